-- take_over: engine, incarnation, beat: the pair that the watcher judged (compare and set). Again until it moves none.
local engine, MOVED_PER_CALL = ARGV[3], 64
local record = redis.call('HMGET', KEY.engine .. engine, 'incarnation', 'beat', 'dead')
if record[1] ~= ARGV[4] or record[2] ~= ARGV[5] then return answer('CHANGED', 0) end

-- Why it fell silent nobody knows. A job that kills whatever computes it must not be handed on for ever, so what the engine was
-- given counts as a strike until it comes back and says otherwise. Of suspects, which run alone one after the other, the first's.
local ids = owned_by(engine)
local suspected, judged = {}, record[3] == '1'
for i, id in ipairs(ids) do
  local job = get(id, 'strikes', 'charged')
  local suspect = tonumber(job[1]) >= SUSPECT_STRIKES
  suspected[id] = job[2] == '1' and not (suspect and judged)
  if suspect and not judged then
    judged = true
    ids[1], ids[i] = id, ids[1] -- this call, the first, must be the one that moves it
  end
end
local moved = math.min(#ids, MOVED_PER_CALL)
if record[3] == '1' and moved == 0 then return answer('OK', 0) end
redis.call('HSET', KEY.engine .. engine, 'dead', 1)
for i = 1, moved do orphan(ids[i], suspected[ids[i]]) end
return wrote('OK', moved)

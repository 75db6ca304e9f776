-- take_over: engine, incarnation, beat: the pair that the watcher judged (compare and set). Again until it moves none.
local engine, MOVED_PER_CALL = ARGV[3], 64
local record = redis.call('HMGET', KEY.engine .. engine, 'incarnation', 'beat', 'dead')
if record[1] ~= ARGV[4] or record[2] ~= ARGV[5] then return answer('CHANGED', 0) end

local ids = owned_by(engine)
local moved = math.min(#ids, MOVED_PER_CALL)
if record[3] == '1' and moved == 0 then return answer('OK', 0) end
redis.call('HSET', KEY.engine .. engine, 'dead', 1)
for i = 1, moved do orphan(ids[i]) end
return wrote('OK', moved)

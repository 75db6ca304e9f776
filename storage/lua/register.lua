-- register: engine, incarnation, blame, seen incarnation, seen beat, boot id, model, pool id, then fields and values of the record.
-- The caller holds the locks of its data directory (engine, and pool file if it has one; then pool id is not empty), so within one boot nobody else can be this engine (PROTOCOL.md 2).
local engine, incarnation, blame = ARGV[3], ARGV[4], ARGV[5] == '1'
local seen_incarnation, seen_beat, boot, model, pool = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local key = KEY.engine .. engine
local old = redis.call('HMGET', key, 'incarnation', 'beat', 'dead', 'boot_id', 'pool_id', 'failed')

local function refuse(word)
  return answer(word, redis.call('HGETALL', key), redis.call('SMEMBERS', KEY.owned .. engine))
end

if old[1] == incarnation then -- this very call was executed before and its reply was lost
  if old[3] == '1' then return answer('DEAD') end
  return answer('REGISTERED', tokens(engine), old[6])
end
if old[1] and old[3] ~= '1' and old[4] ~= boot then
  if seen_incarnation == '' then return refuse('OTHER_HOST') end
  if seen_incarnation ~= old[1] or seen_beat ~= old[2] then return refuse('IN_USE') end
end
local ids = owned_by(engine)
for _, id in ipairs(ids) do
  if redis.call('HGET', KEY.job .. id, 'model') ~= model then return refuse('OTHER_MODEL') end
end

local failed = {}
for _, id in ipairs(ids) do
  local job = get(id, 'fence', 'strikes', 'recoveries')
  local strikes = tonumber(job[2])
  -- Suspects run alone, one after the other: this crash is the fault of the first of them, and the next has its turn.
  if blame and strikes >= POISON_STRIKES and #failed == 0 then
    end_poisoned(id)
    failed[#failed + 1] = id
  else
    set(id, 'incarnation', incarnation, 'fence', tonumber(job[1]) + 1, 'recoveries', tonumber(job[3]) + 1)
    if blame then set(id, 'strikes', strikes + 1, 'charged', 1) end
    redis.call('PUBLISH', KEY.hints, id)
  end
end
redis.call('HSET', key, 'incarnation', incarnation, 'beat', 1, 'dead', 0, 'failed', table.concat(failed, ' '),
  'ended_well', (not blame and old[1]) or '', unpack(ARGV, 11))
redis.call('SADD', KEY.engines, engine)
if old[5] and old[5] ~= pool then redis.call('UNLINK', KEY.pool .. old[5]) end -- that pool file was replaced
return wrote('REGISTERED', tokens(engine), table.concat(failed, ' '))

-- submit: queue limit, deadline in seconds or '', digest of the idempotency key or '', number of jobs, then id, spec and chain
-- of each, then fields and values that their records share. All of them or none.
local limit, deadline, digest, count = tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
local shared = 7 + 3 * count
local record, ids = {}, {}
for i = shared, #ARGV, 2 do record[ARGV[i]] = ARGV[i + 1] end
for i = 7, shared - 1, 3 do ids[#ids + 1] = ARGV[i] end

for _, id in ipairs(ids) do
  if redis.call('EXISTS', KEY.job .. id) == 1 then return answer('EXISTS', ids) end
end
if digest ~= '' then
  local earlier = {}
  for id in string.gmatch(redis.call('GET', KEY.idempotency .. digest) or '', '%S+') do earlier[#earlier + 1] = id end
  local hash = earlier[1] and redis.call('HGET', KEY.job .. earlier[1], 'request_hash')
  if hash then return answer(hash == record.request_hash and 'EXISTS' or 'CONFLICT', earlier) end
end
if redis.call('ZCARD', KEY.queue .. record.model) + count > limit then return answer('FULL', ids) end

for i, id in ipairs(ids) do
  local order = redis.call('HINCRBY', KEY.store, 'order', 1)
  redis.call('HSET', KEY.job .. id, unpack(ARGV, shared))
  set(id, 'spec', ARGV[3 * i + 5], 'chain', ARGV[3 * i + 6])
  set(id, 'order', order, 'status', QUEUED, 'created_at', stamp(now), 'idempotency', digest)
  list(id, record.tenant, 'all', order)
  list(id, record.tenant, QUEUED, order)
  redis.call('HINCRBY', KEY.counts, QUEUED, 1)
  enqueue(id)
  if deadline ~= '' then
    set(id, 'deadline_at', stamp(now + tonumber(deadline)))
    redis.call('ZADD', KEY.deadlines, stamp(now + tonumber(deadline)), id)
  end
  redis.call('PUBLISH', KEY.hints, id)
end
if digest ~= '' then redis.call('SET', KEY.idempotency .. digest, table.concat(ids, ' ')) end
return wrote('CREATED', ids)

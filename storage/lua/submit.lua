-- submit: id, queue limit, deadline in seconds or '', digest of the idempotency key or '', then fields and values of the record.
local id, limit, deadline, digest = ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local record = {}
for i = 7, #ARGV, 2 do record[ARGV[i]] = ARGV[i + 1] end

if redis.call('EXISTS', KEY.job .. id) == 1 then return answer('EXISTS', id) end
if digest ~= '' then
  local earlier = redis.call('GET', KEY.idempotency .. digest)
  local hash = earlier and redis.call('HGET', KEY.job .. earlier, 'request_hash')
  if hash then return answer(hash == record.request_hash and 'EXISTS' or 'CONFLICT', earlier) end
end
if redis.call('ZCARD', KEY.queue .. record.model) >= limit then return answer('FULL', id) end

local order = redis.call('HINCRBY', KEY.store, 'order', 1)
redis.call('HSET', KEY.job .. id, unpack(ARGV, 7))
set(id, 'order', order, 'status', QUEUED, 'created_at', stamp(now), 'idempotency', digest)
list(id, record.tenant, 'all', order)
list(id, record.tenant, QUEUED, order)
redis.call('HINCRBY', KEY.counts, QUEUED, 1)
enqueue(id)
if digest ~= '' then redis.call('SET', KEY.idempotency .. digest, id) end
if deadline ~= '' then
  set(id, 'deadline_at', stamp(now + tonumber(deadline)))
  redis.call('ZADD', KEY.deadlines, stamp(now + tonumber(deadline)), id)
end
redis.call('PUBLISH', KEY.hints, id)
return wrote('CREATED', id)

-- create_batch: batch, file, tenant, limit of live batches, seconds until it expires, then fields and values of the record.
local id, file, tenant, limit, seconds = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
if redis.call('EXISTS', KEY.batch .. id) == 1 then return with_batch(answer('EXISTS'), id) end
local input = redis.call('HMGET', KEY.file .. file, 'tenant', 'deleted')
if input[1] ~= tenant or input[2] ~= '0' then return answer('NO_FILE') end
if redis.call('ZCARD', KEY.live_batches) >= limit then return answer('FULL') end
local order = redis.call('HINCRBY', KEY.store, 'order', 1)
redis.call('HSET', KEY.batch .. id, 'input_file', file, 'tenant', tenant, 'order', order, 'status', 'validating',
  'created_at', stamp(now), 'expires_at', stamp(now + seconds), 'total', 0, 'completed', 0, 'failed', 0, 'fed', 0, 'position', 0,
  'errors', '', 'read_at', '', 'purged', '', unpack(ARGV, 8))
redis.call('HINCRBY', KEY.batch_counts, 'validating', 1)
redis.call('ZADD', KEY.batches .. tenant, order, id)
redis.call('ZADD', KEY.live_batches, order, id)
redis.call('HINCRBY', KEY.file .. file, 'batches', 1)
redis.call('ZREM', KEY.file_expiry, file)
return with_batch(wrote('CREATED'), id)

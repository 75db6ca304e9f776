-- create_file: file, upload, number of its chunks, limit of the tenant's files, tenant, then fields and values of the record. What was
-- uploaded becomes a file, or belongs to nobody. The answer has the record, which may be of an earlier upload.
local id, upload, chunks, limit, tenant = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
if redis.call('EXISTS', KEY.file .. id) == 1 then return answer('EXISTS', redis.call('HGETALL', KEY.file .. id)) end
-- beside the chunks there is their sum; a sweep that took the upload for a dead one leaves nothing, or a part
if redis.call('HLEN', KEY.file_bytes .. upload) ~= chunks + 1 then return answer('INCOMPLETE') end
if redis.call('ZCARD', KEY.files .. tenant) >= limit then return answer('FULL') end
local order = redis.call('HINCRBY', KEY.store, 'order', 1)
redis.call('HSET', KEY.file .. id, 'upload', upload, 'chunks', chunks, 'tenant', tenant, 'order', order, 'created_at', stamp(now),
  'batches', 0, 'deleted', 0, unpack(ARGV, 8))
redis.call('HSET', KEY.file_bytes .. upload, 'file', id)
redis.call('ZREM', KEY.uploads, upload)
redis.call('ZADD', KEY.files .. tenant, order, id)
redis.call('ZADD', KEY.file_expiry, stamp(now), id)
return wrote('CREATED', redis.call('HGETALL', KEY.file .. id))

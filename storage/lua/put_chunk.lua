-- put_chunk: upload, number, limit of all files' bytes together, content. In order, from 0 on.
local key, number = KEY.file_bytes .. ARGV[3], ARGV[4]
if redis.call('HGET', key, 'file') then return answer('CLOSED') end
local more = #ARGV[6] - redis.call('HSTRLEN', key, number)
if tonumber(redis.call('HGET', KEY.store, 'file_bytes') or '0') + more > tonumber(ARGV[5]) then return answer('FULL') end
redis.call('HSET', key, number, ARGV[6])
redis.call('HINCRBY', key, 'bytes', more)
redis.call('HINCRBY', KEY.store, 'file_bytes', more)
redis.call('ZADD', KEY.uploads, stamp(now), ARGV[3])
return wrote('OK')

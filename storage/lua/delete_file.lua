-- delete_file: file. From now on nobody sees it; its bytes go at once, or with the last batch that was made of it.
local id = ARGV[3]
local file = redis.call('HMGET', KEY.file .. id, 'tenant', 'deleted', 'batches')
if not file[1] or file[2] == '1' then return answer('GONE') end
if file[3] == '0' then
  remove_file(id)
else
  redis.call('HSET', KEY.file .. id, 'deleted', 1)
  redis.call('ZREM', KEY.files .. file[1], id)
end
return wrote('OK')

-- create: id, format. Without the store check: this is what makes the store, unless one is there.
if redis.call('EXISTS', KEY.store) == 0 then
  redis.call('HSET', KEY.store, 'id', ARGV[1], 'epoch', 1, 'commit', 0, 'order', 0, 'format', ARGV[2])
end
return redis.call('HMGET', KEY.store, 'id', 'epoch', 'commit', 'format')

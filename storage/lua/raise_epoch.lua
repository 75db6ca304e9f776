-- raise_epoch: id, epoch seen by the caller. A new epoch voids marks, owners and incarnations; logs stay as they are.
local identity = redis.call('HMGET', KEY.store, 'id', 'epoch', 'commit')
local seen = tonumber(ARGV[2])
if identity[1] ~= ARGV[1] or (tonumber(identity[2]) ~= seen and tonumber(identity[2]) ~= seen + 1) then
  return {'WRONG_STORE', identity[3] or '0', identity[1] or '', identity[2] or '0'}
end
if tonumber(identity[2]) == seen + 1 then return answer('ALREADY', identity[2]) end
redis.call('HSET', KEY.store, 'epoch', seen + 1)
for _, engine in ipairs(redis.call('SMEMBERS', KEY.engines)) do
  redis.call('HSET', KEY.engine .. engine, 'dead', 1)
end
for _, id in ipairs(redis.call('ZRANGE', KEY.index .. RUNNING, 0, -1)) do orphan(id) end
return wrote('OK', seen + 1)

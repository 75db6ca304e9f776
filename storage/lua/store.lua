-- Head of every script: ARGV[1] and ARGV[2] prove the store (PROTOCOL.md 5); the verb's own arguments follow from ARGV[3].
local identity = redis.call('HMGET', KEY.store, 'id', 'epoch', 'commit')
if identity[1] ~= ARGV[1] or identity[2] ~= ARGV[2] then
  return {'WRONG_STORE', identity[3] or '0', identity[1] or '', identity[2] or '0'}
end

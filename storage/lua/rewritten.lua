-- rewritten: how many purges the append-only file no longer holds, as ``rewrite`` told before Redis wrote it.
local known = tonumber(redis.call('HGET', KEY.store, 'purges_rewritten') or '0')
if known >= tonumber(ARGV[3]) then return answer('ALREADY') end
redis.call('HSET', KEY.store, 'purges_rewritten', ARGV[3])
return answer('OK')

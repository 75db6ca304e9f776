-- rewrite: seconds between two. Whoever is told OK asks Redis for a new append-only file, on behalf of all.
local store = redis.call('HMGET', KEY.store, 'purges', 'purges_rewritten', 'rewrite_at')
if tonumber(store[1] or '0') <= tonumber(store[2] or '0') then return answer('CLEAN') end
-- By distance, not by order: after a clock that was wrong for a while the time of the last one may lie ahead.
if store[3] and math.abs(now - tonumber(store[3])) < tonumber(ARGV[3]) then return answer('KEPT') end
redis.call('HSET', KEY.store, 'rewrite_at', stamp(now))
return answer('OK', store[1])

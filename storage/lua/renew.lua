-- renew: engine, incarnation. Does not raise the commit counter: a beat is worth nothing after a restart of Redis.
if not alive(ARGV[3], ARGV[4]) then return answer('DEAD') end
redis.call('HINCRBY', KEY.engine .. ARGV[3], 'beat', 1)
return answer('OK', tokens(ARGV[3]), stamp(now))

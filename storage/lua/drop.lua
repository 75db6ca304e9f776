-- drop: engine, incarnation, pool, then host pages.
if not alive(ARGV[3], ARGV[4]) or redis.call('HGET', KEY.engine .. ARGV[3], 'pool_id') ~= ARGV[5] then return answer('DEAD') end
for i = 6, #ARGV do redis.call('HDEL', KEY.pool .. ARGV[5], ARGV[i]) end
return wrote('OK')

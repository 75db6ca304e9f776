-- publish: engine, incarnation, pool, then host page and "identity checksum" pairs. Only the registered incarnation writes its pool.
-- When is noted behind them: how long a page has been kept must not begin anew with each start of the engine.
if not alive(ARGV[3], ARGV[4]) or redis.call('HGET', KEY.engine .. ARGV[3], 'pool_id') ~= ARGV[5] then return answer('DEAD') end
for i = 6, #ARGV, 2 do redis.call('HSET', KEY.pool .. ARGV[5], ARGV[i], ARGV[i + 1] .. ' ' .. stamp(now)) end
return wrote('OK')

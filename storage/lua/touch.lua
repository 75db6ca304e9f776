-- touch: job. It was read just now, so the sweep spares it for a while.
if redis.call('EXISTS', KEY.job .. ARGV[3]) == 1 then set(ARGV[3], 'read_at', stamp(now)) end
return answer('OK')

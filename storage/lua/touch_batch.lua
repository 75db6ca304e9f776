-- touch_batch: batch. Its files are being read, so the sweep spares it for a while.
if redis.call('EXISTS', KEY.batch .. ARGV[3]) == 1 then redis.call('HSET', KEY.batch .. ARGV[3], 'read_at', stamp(now)) end
return answer('OK')

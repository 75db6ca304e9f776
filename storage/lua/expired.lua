-- expired: retention in seconds, limit. Writes nothing: how many terminal jobs are due, of how many, and the first of them.
local due = stamp(now - tonumber(ARGV[3]))
return answer('OK', redis.call('ZCOUNT', KEY.expiry, '-inf', due), redis.call('ZCARD', KEY.expiry),
  redis.call('ZRANGEBYSCORE', KEY.expiry, '-inf', due, 'LIMIT', 0, ARGV[4]))

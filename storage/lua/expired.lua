-- expired: which list, retention in seconds, limit. Writes nothing: how many that ended are due, of how many, and the first of them.
local list, due = KEY[ARGV[3]], stamp(now - tonumber(ARGV[4]))
return answer('OK', redis.call('ZCOUNT', list, '-inf', due), redis.call('ZCARD', list),
  redis.call('ZRANGEBYSCORE', list, '-inf', due, 'LIMIT', 0, ARGV[5]))

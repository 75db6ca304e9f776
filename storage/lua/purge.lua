-- purge: job, retention in seconds. Removes one job whole, if it is still due.
local id, retention = ARGV[3], tonumber(ARGV[4])
local READ_HOLD, IDEMPOTENCY_HOLD = 360, 86400 -- 5 minutes and the 60 s within which a reader repeats its touch; 24 h
local ended = redis.call('ZSCORE', KEY.expiry, id)
if not ended then return answer('GONE') end
if tonumber(ended) > now - retention then return answer('KEPT') end
local job = get(id, 'status', 'tenant', 'idempotency', 'read_at', 'created_at')
local hold = 0
if job[4] ~= '' then hold = tonumber(job[4]) + READ_HOLD end
if job[3] ~= '' then hold = math.max(hold, tonumber(job[5]) + IDEMPOTENCY_HOLD) end
if hold > now then -- due again when the hold ends, so that held jobs do not fill the head of the list
  redis.call('ZADD', KEY.expiry, stamp(hold - retention), id)
  return answer('KEPT')
end
unlist(id, job[2], job[1])
unlist(id, job[2], 'all')
redis.call('HINCRBY', KEY.counts, job[1], -1)
-- The key goes with the first job that it names. The group's other jobs are held as long as that one, so that the key finds them.
local named = job[3] ~= '' and redis.call('GET', KEY.idempotency .. job[3])
if named and string.match(named, '%S+') == id then redis.call('DEL', KEY.idempotency .. job[3]) end
redis.call('ZREM', KEY.expiry, id)
redis.call('UNLINK', KEY.job .. id, KEY.log .. id)
redis.call('PUBLISH', KEY.hints, id)
return wrote('OK')

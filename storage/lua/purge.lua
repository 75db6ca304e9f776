-- purge: job, retention in seconds. Removes one job whole, if it is still due.
local id, retention = ARGV[3], tonumber(ARGV[4])
local READ_HOLD, IDEMPOTENCY_HOLD = 360, 86400 -- 5 minutes and the 60 s within which a reader repeats its touch; 24 h
local ended = redis.call('ZSCORE', KEY.expiry, id)
if not ended then return answer('GONE') end
if tonumber(ended) > now - retention then return answer('KEPT') end
local job = get(id, 'idempotency', 'read_at', 'created_at')
local hold = 0
if job[2] ~= '' then hold = tonumber(job[2]) + READ_HOLD end
if job[1] ~= '' then hold = math.max(hold, tonumber(job[3]) + IDEMPOTENCY_HOLD) end
if hold > now then -- due again when the hold ends, so that held jobs do not fill the head of the list
  redis.call('ZADD', KEY.expiry, stamp(hold - retention), id)
  return answer('KEPT')
end
remove(id)
return wrote('OK')

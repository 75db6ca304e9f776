-- purge_batch: batch, retention in seconds, jobs. If it is still due, it is gone for everybody at once, and its jobs in steps of about so many,
-- again and again until it answers OK; its record goes last, so that who dies in the middle leaves no job behind.
local id, retention, jobs, READ_HOLD = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), 360
local ended = redis.call('ZSCORE', KEY.batch_expiry, id)
if not ended then return answer('GONE') end
local batch = get_batch(id, 'purged', 'read_at', 'line_prefix', 'fed', 'tenant', 'input_file', 'status')
if batch[1] == '' then
  if tonumber(ended) > now - retention then return answer('KEPT') end
  local hold = batch[2] ~= '' and tonumber(batch[2]) + READ_HOLD or 0
  if hold > now then
    redis.call('ZADD', KEY.batch_expiry, stamp(hold - retention), id)
    return answer('KEPT')
  end
  redis.call('ZREM', KEY.batches .. batch[5], id)
  redis.call('HINCRBY', KEY.batch_counts, batch[7], -1)
end
local line, last, removed = tonumber(batch[1]) or 0, tonumber(batch[4]), 0
while line < last and removed < jobs do
  line = line + 1
  local choices = redis.call('HGET', KEY.job .. batch[3] .. line, 'choices') -- unknown where the first was deleted
  for i = 0, tonumber(choices or MAX_CHOICES) - 1 do
    local job = choice_id(batch[3] .. line, i)
    if redis.call('EXISTS', KEY.job .. job) == 1 then
      remove(job)
      removed = removed + 1
    end
  end
end
if line < last then
  redis.call('HSET', KEY.batch .. id, 'purged', line)
  return wrote('MORE', removed)
end
redis.call('UNLINK', KEY.batch .. id)
redis.call('ZREM', KEY.batch_expiry, id)
if redis.call('HINCRBY', KEY.file .. batch[6], 'batches', -1) == 0 then remove_file(batch[6]) end
return wrote('OK', removed)

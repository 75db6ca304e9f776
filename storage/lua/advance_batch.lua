-- advance_batch: batch. What nobody asks for: it expires; of one that is to end at most 64 jobs are ended, and with the last of them the
-- lines that never ran are counted. Again until it answers IDLE.
local id, ENDED_PER_CALL = ARGV[3], 64
local batch = get_batch(id, 'status', 'expires_at')
if not batch[1] then return answer('GONE') end
local status = batch[1]
local expires = (status == 'validating' or status == 'in_progress') and tonumber(batch[2]) <= now
if not expires and status ~= 'finalizing' and status ~= 'cancelling' then return answer('IDLE') end

if expires then
  set_batch_status(id, 'finalizing')
  status = 'finalizing'
end
local jobs = redis.call('SMEMBERS', KEY.batch_jobs .. id)
table.sort(jobs)
for i = 1, math.min(#jobs, ENDED_PER_CALL) do
  if status == 'cancelling' then
    end_job(jobs[i], CANCELLED, '', '', '')
  else
    end_job(jobs[i], FAILED, '', 'batch_expired', 'the completion window of its batch passed before the job was finished')
  end
end
if #jobs <= ENDED_PER_CALL then
  local counts = get_batch(id, 'total', 'completed')
  redis.call('HSET', KEY.batch .. id, 'failed', tonumber(counts[1]) - tonumber(counts[2]))
  set_batch_status(id, status == 'cancelling' and 'cancelled' or 'expired')
end
return wrote('OK')

-- What verbs share of files and batches. A job knows its batch, and is counted there where it ends (PROTOCOL.md 10).
local BATCH_LIVE = {validating = true, in_progress = true, finalizing = true, cancelling = true}
local MAX_CHOICES = 128

local function get_batch(batch, ...)
  return redis.call('HMGET', KEY.batch .. batch, ...)
end

-- The only place that changes a batch's status.
local function set_batch_status(batch, status)
  redis.call('HINCRBY', KEY.batch_counts, redis.call('HGET', KEY.batch .. batch, 'status'), -1)
  redis.call('HINCRBY', KEY.batch_counts, status, 1)
  redis.call('HSET', KEY.batch .. batch, 'status', status, status .. '_at', stamp(now))
  if not BATCH_LIVE[status] then
    redis.call('ZREM', KEY.live_batches, batch)
    redis.call('ZADD', KEY.batch_expiry, stamp(now), batch)
  end
end

local function choice_id(first, i)
  return i == 0 and first or first .. '-' .. i
end

-- How a line ended, of which ``id`` is a job; nil while one of its jobs lives. One that was deleted has failed.
local function line_outcome(id)
  local job = get(id, 'group', 'choices')
  local first, outcome = job[1] ~= '' and job[1] or id, 'completed'
  for i = 0, tonumber(job[2]) - 1 do
    local status = redis.call('HGET', KEY.job .. choice_id(first, i), 'status')
    if LIVE[status] then return nil end
    if status ~= 'completed' and status ~= 'incomplete' then outcome = 'failed' end
  end
  return outcome
end

-- The last line's end is the batch's: its files are views of the jobs, so there is nothing to do for ``finalizing``.
local function batch_job_ended(batch, id)
  redis.call('SREM', KEY.batch_jobs .. batch, id)
  local outcome = line_outcome(id)
  if not outcome then return end
  redis.call('HINCRBY', KEY.batch .. batch, outcome, 1)
  local seen = get_batch(batch, 'status', 'total', 'completed', 'failed')
  if seen[1] == 'in_progress' and tonumber(seen[3]) + tonumber(seen[4]) == tonumber(seen[2]) then
    set_batch_status(batch, 'finalizing')
    set_batch_status(batch, 'completed')
  end
end

-- Before an ended job is deleted by itself: its line has no answer any more.
local function uncount_line(id)
  local batch = redis.call('HGET', KEY.job .. id, 'batch')
  if not batch or batch == '' or redis.call('EXISTS', KEY.batch .. batch) == 0 or line_outcome(id) ~= 'completed' then return end
  redis.call('HINCRBY', KEY.batch .. batch, 'completed', -1)
  redis.call('HINCRBY', KEY.batch .. batch, 'failed', 1)
end

local function remove_upload(upload)
  local bytes = redis.call('HGET', KEY.file_bytes .. upload, 'bytes')
  if bytes then redis.call('HINCRBY', KEY.store, 'file_bytes', -tonumber(bytes)) end
  redis.call('UNLINK', KEY.file_bytes .. upload)
  redis.call('ZREM', KEY.uploads, upload)
  redis.call('HINCRBY', KEY.store, 'purges', 1)
end

local function remove_file(id)
  local file = redis.call('HMGET', KEY.file .. id, 'upload', 'tenant')
  remove_upload(file[1])
  redis.call('UNLINK', KEY.file .. id)
  redis.call('ZREM', KEY.files .. file[2], id)
  redis.call('ZREM', KEY.file_expiry, id)
end

local function with_batch(answered, batch)
  answered[#answered + 1] = redis.call('HGETALL', KEY.batch .. batch)
  return answered
end

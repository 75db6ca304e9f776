-- What the verbs share. A verb makes all its checks before its first write: a call that fails does not roll back earlier ones.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000

local POISON_STRIKES = 3
local QUEUED, RUNNING, FAILED, CANCELLED = 'queued', 'in_progress', 'failed', 'cancelled'
local LIVE = {queued = true, in_progress = true}

local function stamp(seconds)
  return string.format('%.6f', seconds)
end

-- Every answer is {word, commit counter, ...}.
local function answer(word, ...)
  return {word, redis.call('HGET', KEY.store, 'commit'), ...}
end

-- The answer of a script that changed something: the counter is what a later connection compares with its mark.
local function wrote(word, ...)
  redis.call('HINCRBY', KEY.store, 'commit', 1)
  return answer(word, ...)
end

local function get(id, ...)
  return redis.call('HMGET', KEY.job .. id, ...)
end

local function set(id, ...)
  redis.call('HSET', KEY.job .. id, ...)
end

-- An incarnation that is not the registered one, or is marked dead, is refused everything.
local function alive(engine, incarnation)
  local record = redis.call('HMGET', KEY.engine .. engine, 'incarnation', 'dead')
  return record[1] == incarnation and record[2] == '0'
end

-- Ids of the jobs listed under an engine, oldest first.
local function owned_by(engine)
  local order, ids = {}, {}
  for _, id in ipairs(redis.call('SMEMBERS', KEY.owned .. engine)) do
    local value = redis.call('HGET', KEY.job .. id, 'order')
    if value then
      order[id] = tonumber(value)
      ids[#ids + 1] = id
    end
  end
  table.sort(ids, function(a, b) return order[a] < order[b] end)
  return ids
end

-- What an owner is told about its job: {id, fence, strikes}.
local function token(id)
  local job = get(id, 'fence', 'strikes')
  return {id, job[1], job[2]}
end

local function tokens(engine)
  local list = {}
  for _, id in ipairs(owned_by(engine)) do list[#list + 1] = token(id) end
  return list
end

local function list(id, tenant, status, order)
  redis.call('ZADD', KEY.index .. status, order, id)
  redis.call('ZADD', KEY.tenant_index .. tenant .. ':' .. status, order, id)
end

local function unlist(id, tenant, status)
  redis.call('ZREM', KEY.index .. status, id)
  redis.call('ZREM', KEY.tenant_index .. tenant .. ':' .. status, id)
end

-- The only place that changes a status.
local function set_status(id, status)
  local job = get(id, 'status', 'tenant', 'order')
  unlist(id, job[2], job[1])
  list(id, job[2], status, job[3])
  redis.call('HINCRBY', KEY.counts, job[1], -1)
  redis.call('HINCRBY', KEY.counts, status, 1)
  set(id, 'status', status)
  redis.call('PUBLISH', KEY.hints, id)
end

local function enqueue(id)
  local job = get(id, 'model', 'priority', 'order')
  local score = tonumber(job[3]) - tonumber(job[2]) * 17592186044416 -- 2^44: priority first, then order
  redis.call('ZADD', KEY.queue .. job[1], string.format('%.0f', score), id)
end

-- Owner, incarnation and fence stay in the record, so that the retry of a finish recognises itself.
local function end_job(id, status, reason, code, message)
  local job = get(id, 'model', 'engine')
  set_status(id, status)
  set(id, 'finished_at', stamp(now), 'finish_reason', reason, 'error_code', code, 'error_message', message)
  redis.call('ZREM', KEY.queue .. job[1], id)
  redis.call('ZREM', KEY.deadlines, id)
  redis.call('SREM', KEY.owned .. job[2], id)
  redis.call('ZADD', KEY.expiry, stamp(now), id)
end

local function end_poisoned(id)
  end_job(id, FAILED, '', 'poison',
    'the engine died three times before the job made progress, twice with the job running alone')
end

local function requeue(id)
  local job = get(id, 'engine', 'strikes', 'charged')
  -- the strike that the give added goes with the owner, unless a commit already cleared it
  set(id, 'engine', '', 'incarnation', '', 'strikes', tonumber(job[2]) - tonumber(job[3]), 'charged', 0)
  redis.call('SREM', KEY.owned .. job[1], id)
  set_status(id, QUEUED)
  enqueue(id)
end

-- The owner is gone without a release: whoever gets the job next recovers it.
local function orphan(id)
  set(id, 'lost', 1, 'released_by', '')
  requeue(id)
end

-- Answers {word, commit, record after}.
local function with_record(answered, id)
  answered[#answered + 1] = redis.call('HGETALL', KEY.job .. id)
  return answered
end

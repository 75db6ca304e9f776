-- The moves of jobs that verbs share.
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

-- No number comes twice, so that an api which is listed again was seen to move, whatever happened between two looks.
local function api_beat(api)
  redis.call('HSET', KEY.apis, api, redis.call('HINCRBY', KEY.store, 'beat', 1))
end

-- Owner, incarnation and fence stay in the record, so that the retry of a finish recognises itself.
local function end_job(id, status, reason, code, message)
  local job = get(id, 'model', 'engine', 'batch', 'served_by')
  set_status(id, status)
  set(id, 'finished_at', stamp(now), 'finish_reason', reason, 'error_code', code, 'error_message', message)
  redis.call('ZREM', KEY.queue .. job[1], id)
  redis.call('ZREM', KEY.deadlines, id)
  redis.call('SREM', KEY.owned .. job[2], id)
  if (job[4] or '') ~= '' then
    redis.call('SREM', KEY.served .. job[4], id)
    if redis.call('EXISTS', KEY.served .. job[4]) == 0 then redis.call('HDEL', KEY.apis, job[4]) end
  end
  if (job[3] or '') == '' then
    redis.call('ZADD', KEY.expiry, stamp(now), id)
  else
    batch_job_ended(job[3], id)
  end
end

-- Jobs that verbs make, from ARGV[at] on: numbers of jobs and prompts; each prompt and its length; of each job id, spec, chain and the
-- number of its prompt; then fields and values that their records share.
local function read_group(at)
  local prompts = at + 2
  local first = prompts + 2 * tonumber(ARGV[at + 1])
  local group = {ids = {}, record = {}, prompts = prompts, first = first, shared = first + 4 * tonumber(ARGV[at])}
  for i = first, group.shared - 1, 4 do group.ids[#group.ids + 1] = ARGV[i] end
  for i = group.shared, #ARGV, 2 do group.record[ARGV[i]] = ARGV[i + 1] end
  return group
end

-- Why the queue has no room for a group; nil where it has.
local function no_room(group, limit, tenant_limit)
  local record, count = group.record, #group.ids
  if redis.call('ZCARD', KEY.queue .. record.model) + count > limit then return 'FULL' end
  local own = KEY.tenant_index .. record.tenant .. ':' .. QUEUED
  if tenant_limit and redis.call('ZCARD', own) + count > tenant_limit then return 'TENANT_FULL' end
end

local function create_group(group, digest, deadline)
  local api = group.record.served_by
  for i, id in ipairs(group.ids) do
    local order = redis.call('HINCRBY', KEY.store, 'order', 1)
    local job = group.first + 4 * (i - 1)
    local prompt = group.prompts + 2 * (tonumber(ARGV[job + 3]) - 1)
    redis.call('HSET', KEY.job .. id, unpack(ARGV, group.shared))
    set(id, 'spec', ARGV[job + 1], 'chain', ARGV[job + 2], 'prompt', ARGV[prompt], 'prompt_length', ARGV[prompt + 1])
    set(id, 'order', order, 'status', QUEUED, 'created_at', stamp(now), 'idempotency', digest)
    list(id, group.record.tenant, 'all', order)
    list(id, group.record.tenant, QUEUED, order)
    if group.record.stored then list(id, group.record.tenant, 'stored', order) end
    redis.call('HINCRBY', KEY.counts, QUEUED, 1)
    enqueue(id)
    if api ~= '' then redis.call('SADD', KEY.served .. api, id) end
    if deadline ~= '' then
      set(id, 'deadline_at', stamp(now + tonumber(deadline)))
      redis.call('ZADD', KEY.deadlines, stamp(now + tonumber(deadline)), id)
    end
    redis.call('PUBLISH', KEY.hints, id)
  end
  if api ~= '' then api_beat(api) end
end

-- A job that ended goes whole. A key goes with the first job that it names: its group's others are held or deleted with that one.
local function remove(id)
  local job = get(id, 'status', 'tenant', 'idempotency')
  unlist(id, job[2], job[1])
  unlist(id, job[2], 'all')
  unlist(id, job[2], 'stored')
  redis.call('HINCRBY', KEY.counts, job[1], -1)
  local named = job[3] ~= '' and redis.call('GET', KEY.idempotency .. job[3])
  if named and string.match(named, '%S+') == id then redis.call('DEL', KEY.idempotency .. job[3]) end
  redis.call('ZREM', KEY.expiry, id)
  redis.call('UNLINK', KEY.job .. id, KEY.log .. id)
  redis.call('HINCRBY', KEY.store, 'purges', 1)
  redis.call('PUBLISH', KEY.hints, id)
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

-- The owner is gone without a release: whoever gets the job next recovers it. Its strike stays where it may have died of this job.
local function orphan(id, suspected)
  local job = get(id, 'engine', 'incarnation')
  set(id, 'lost', 1, 'released_by', '', 'orphan_of', suspected and job[1] .. ' ' .. job[2] or '')
  if suspected then set(id, 'charged', 0) end
  requeue(id)
end

-- Strikes of a queued job: without the last one where its owner came back since and did not say that it had crashed.
local function strikes_of(id)
  local job = get(id, 'strikes', 'orphan_of')
  local engine, incarnation = string.match(job[2] or '', '^(.*) (.*)$')
  local forgiven = engine and redis.call('HGET', KEY.engine .. engine, 'ended_well') == incarnation
  return tonumber(job[1]) - (forgiven and 1 or 0)
end

-- Answers {word, commit, record after}.
local function with_record(answered, id)
  answered[#answered + 1] = redis.call('HGETALL', KEY.job .. id)
  return answered
end

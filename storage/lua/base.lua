-- What the verbs share. A verb makes all its checks before its first write: a call that fails does not roll back earlier ones.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000

local POISON_STRIKES, SUSPECT_STRIKES = 3, 2
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

-- claim: engine, incarnation, free pages, limit, then the ids that the caller holds.
local engine, incarnation, free, limit = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local SCAN, CONSIDERED, RESERVE_AFTER, GRACE = 128, 32, 30, 30
if not alive(engine, incarnation) then return answer('DEAD') end

local held, given, changed = {}, {}, false
for i = 7, #ARGV do held[ARGV[i]] = true end
local record = redis.call('HMGET', KEY.engine .. engine, 'model', 'page_size', 'device_pages', 'max_context')
local page_size, device_pages, max_context = tonumber(record[2]), tonumber(record[3]), tonumber(record[4])

-- Pages to start with, and pages it can come to need: a job never needs more than its last row.
local function pages(prompt, length, max_tokens)
  local total = math.ceil(math.max(1, math.min(prompt + max_tokens, max_context) - 1) / page_size)
  return math.min(math.ceil((prompt + length) / page_size) + 1, total), total
end

local function give(id)
  local job = get(id, 'fence', 'recoveries', 'lost', 'started_at')
  set(id, 'engine', engine, 'incarnation', incarnation, 'fence', tonumber(job[1]) + 1,
    'strikes', strikes_of(id) + 1, 'charged', 1, 'recoveries', tonumber(job[2]) + tonumber(job[3]), 'lost', 0, 'orphan_of', '',
    'released_by', '', 'affinity', '', 'unfit_since', '', 'started_at', job[4] ~= '' and job[4] or stamp(now))
  redis.call('ZREM', KEY.queue .. record[1], id)
  redis.call('SADD', KEY.owned .. engine, id)
  set_status(id, RUNNING)
  given[#given + 1] = token(id)
end

-- Listed but not held: the reply of an earlier claim was lost, and nobody would ever run these.
local suspect = false
for _, id in ipairs(owned_by(engine)) do
  suspect = suspect or tonumber(get(id, 'strikes')[1]) >= SUSPECT_STRIKES
  if not held[id] and #given < limit then
    local job = get(id, 'prompt_length', 'length', 'max_tokens')
    free = free - pages(tonumber(job[1]), tonumber(job[2]), tonumber(job[3]))
    given[#given + 1] = token(id)
  end
end

-- A suspect runs alone, and who crashes is the first of them by order. Another that is given now may come before the one whose turn it
-- is, and would be blamed for its crash; and nobody else would run before it made progress.
if suspect then return answer('OK', given) end

-- Times are compared by distance: after a clock that was wrong for a while, what it noted may lie a day ahead.
local seen, blocked = 0, false
for _, id in ipairs(redis.call('ZRANGE', KEY.queue .. record[1], 0, SCAN - 1)) do
  if #given >= limit or seen >= CONSIDERED then break end
  local job = get(id, 'affinity', 'affinity_until', 'prompt_length', 'length', 'max_tokens', 'unfit_since')
  local reserved = job[1] ~= '' and job[1] ~= engine and math.abs(tonumber(job[2]) - GRACE - now) < GRACE
  local need, total = pages(tonumber(job[3]), tonumber(job[4]), tonumber(job[5]))
  if not reserved and total <= device_pages then
    seen = seen + 1
    if strikes_of(id) >= POISON_STRIKES then
      end_poisoned(id)
      changed = true
    elseif need <= free then
      free = free - need
      give(id)
      changed = true
    elseif not blocked then
      -- the first that does not fit is the head; when it has waited long enough nobody overtakes it any more
      blocked = true
      if job[6] == '' then
        set(id, 'unfit_since', stamp(now))
      elseif math.abs(now - tonumber(job[6])) > RESERVE_AFTER then
        break
      end
    end
  end
end
return changed and wrote('OK', given) or answer('OK', given)

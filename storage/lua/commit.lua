-- commit: engine, incarnation, job, fence, expected length, chain after, arithmetic fingerprint, cached, replayed, restored,
-- status or '', finish reason, error code, error message, then token, text, logprobs of each new token.
local engine, incarnation, id, fence, expected, chain = ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7]), ARGV[8]
local arithmetic, cached, replayed, restored, status = ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13]
local FIRST = 17
local n = (#ARGV - FIRST + 1) / 3

if not alive(engine, incarnation) then return answer('DEAD') end
local job = get(id, 'status', 'fence', 'incarnation', 'length', 'chain', 'counted', 'arithmetic', 'strikes', 'charged')
if not job[1] then return answer('GONE') end
local length = tonumber(job[4])
local mine = job[2] == fence and job[3] == incarnation
local reached = length == expected + n and job[5] == chain
if not LIVE[job[1]] then
  return answer((mine and reached and job[1] == status) and 'ALREADY' or 'TERMINAL')
end
if not mine or job[1] ~= RUNNING then return answer('FENCED') end
-- A call without tokens leaves length and chain alone, so it is recognised by its counters; a finish by the status above.
local counted = table.concat({fence, expected, cached, replayed, restored, arithmetic}, ':')
if status == '' and reached and (n > 0 or job[6] == counted) then return answer('ALREADY') end
if length ~= expected or (n == 0 and job[5] ~= chain) then return answer('GAP') end

for i = 0, n - 1 do
  local at = FIRST + 3 * i
  local entry = {'t', ARGV[at], 'x', ARGV[at + 1]}
  if ARGV[at + 2] ~= '' then
    entry[5], entry[6] = 'l', ARGV[at + 2]
  end
  redis.call('XADD', KEY.log .. id, string.format('%.0f-0', expected + i + 1), unpack(entry))
end
set(id, 'length', expected + n, 'chain', chain)
if n > 0 and (job[8] ~= '0' or job[9] ~= '0') then set(id, 'strikes', 0, 'charged', 0) end
if n == 0 then set(id, 'counted', counted) end
if job[7] == '' and arithmetic ~= '' then set(id, 'arithmetic', arithmetic) end
if cached ~= '0' then redis.call('HINCRBY', KEY.job .. id, 'cached', cached) end
if replayed ~= '0' then redis.call('HINCRBY', KEY.job .. id, 'replayed', replayed) end
if restored ~= '0' then redis.call('HINCRBY', KEY.job .. id, 'restored', restored) end
if status ~= '' then
  end_job(id, status, ARGV[14], ARGV[15], ARGV[16])
else
  redis.call('PUBLISH', KEY.token_hints, id)
end
return wrote('OK')

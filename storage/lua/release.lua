-- release: engine, incarnation, job, fence, affinity. Back to the queue at the old place, no strike.
local engine, incarnation, id, fence = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local GRACE = 30
if not alive(engine, incarnation) then return answer('DEAD') end
local job = get(id, 'status', 'fence', 'incarnation', 'released_by')
if not job[1] then return answer('GONE') end
if not LIVE[job[1]] then return answer('TERMINAL') end
if job[1] == QUEUED and job[2] == fence and job[4] == incarnation then return answer('ALREADY') end
if job[1] ~= RUNNING or job[2] ~= fence or job[3] ~= incarnation then return answer('FENCED') end

set(id, 'released_by', incarnation, 'affinity', ARGV[7] == '1' and engine or '', 'affinity_until', stamp(now + GRACE))
requeue(id)
return wrote('OK')

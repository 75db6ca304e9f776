-- sweep_deadlines: fails at most 64 jobs whose deadline passed.
local ids = redis.call('ZRANGEBYSCORE', KEY.deadlines, '-inf', stamp(now), 'LIMIT', 0, 64)
if #ids == 0 then return answer('OK', ids) end
for _, id in ipairs(ids) do
  end_job(id, FAILED, '', 'deadline_exceeded', 'the deadline passed before the job was finished')
end
return wrote('OK', ids)

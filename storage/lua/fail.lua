-- fail: job, code, message. Whatever its owner.
local id = ARGV[3]
local status = redis.call('HGET', KEY.job .. id, 'status')
if not status then return answer('GONE') end
if not LIVE[status] then return with_record(answer('ALREADY'), id) end
end_job(id, FAILED, '', ARGV[4], ARGV[5])
return with_record(wrote('OK'), id)

-- cancel: job. Terminal at once; uncommitted work is dropped by its owner, nobody saw it.
local id = ARGV[3]
local status = redis.call('HGET', KEY.job .. id, 'status')
if not status then return answer('GONE') end
if not LIVE[status] then return with_record(answer('ALREADY'), id) end
end_job(id, CANCELLED, '', '', '')
return with_record(wrote('OK'), id)

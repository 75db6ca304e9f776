-- describe: job, metadata in JSON. The spec stays as the chain began with it.
local id = ARGV[3]
local job = get(id, 'status', 'metadata')
if not job[1] then return answer('GONE') end
if job[2] == ARGV[4] then return with_record(answer('ALREADY'), id) end
set(id, 'metadata', ARGV[4])
return with_record(wrote('OK'), id)

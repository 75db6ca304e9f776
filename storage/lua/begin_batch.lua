-- begin_batch: batch, number of lines, what is wrong with them as JSON or ''. The end of its validation, whoever got there first.
local id = ARGV[3]
local status = redis.call('HGET', KEY.batch .. id, 'status')
if not status then return answer('GONE') end
if status ~= 'validating' then return with_batch(answer('ALREADY'), id) end
redis.call('HSET', KEY.batch .. id, 'total', ARGV[4], 'errors', ARGV[5])
set_batch_status(id, ARGV[5] == '' and 'in_progress' or 'failed')
return with_batch(wrote('OK'), id)

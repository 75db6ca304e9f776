-- cancel_batch: batch. Nothing more of it is fed; what runs is ended by ``advance_batch``.
local id = ARGV[3]
local status = redis.call('HGET', KEY.batch .. id, 'status')
if not status then return answer('GONE') end
if status ~= 'validating' and status ~= 'in_progress' then return with_batch(answer('ALREADY'), id) end
set_batch_status(id, 'cancelling')
return with_batch(wrote('OK'), id)

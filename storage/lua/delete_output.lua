-- delete_output: batch, 'output' or 'error'. From now on nobody sees that file of it; the lines go with the batch's jobs.
local batch = get_batch(ARGV[3], 'purged', ARGV[4] .. '_deleted')
if batch[1] ~= '' or batch[2] then return answer('GONE') end
redis.call('HSET', KEY.batch .. ARGV[3], ARGV[4] .. '_deleted', 1)
return wrote('OK')

-- delete: jobs. At once, whatever anybody may still want of them; one that lives is cancelled first, and its owner finds it gone.
local deleted = 0
for i = 3, #ARGV do
  local status = redis.call('HGET', KEY.job .. ARGV[i], 'status')
  if status then
    if LIVE[status] then end_job(ARGV[i], CANCELLED, '', '', '') end
    uncount_line(ARGV[i])
    remove(ARGV[i])
    deleted = deleted + 1
  end
end
if deleted == 0 then return answer('GONE', 0) end
return wrote('OK', deleted)

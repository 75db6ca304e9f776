-- purge_file: file, retention in seconds. If it is still due: one that a batch was made of goes with that.
local at = redis.call('ZSCORE', KEY.file_expiry, ARGV[3])
if not at then return answer('GONE') end
if tonumber(at) > now - tonumber(ARGV[4]) then return answer('KEPT') end
remove_file(ARGV[3])
return wrote('OK')

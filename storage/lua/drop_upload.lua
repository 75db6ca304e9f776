-- drop_upload: upload, seconds for which it got no bytes. One that became a file is none.
local at = redis.call('ZSCORE', KEY.uploads, ARGV[3])
if not at then return answer('GONE') end
if tonumber(at) > now - tonumber(ARGV[4]) then return answer('KEPT') end
remove_upload(ARGV[3])
return wrote('OK')

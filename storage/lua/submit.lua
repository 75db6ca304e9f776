-- submit: queue limit, tenant's limit or '', deadline in seconds or '', digest of the idempotency key or '', then a group. All of its jobs or none.
local limit, tenant_limit, deadline, digest = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local group = read_group(7)
local ids = group.ids

for _, id in ipairs(ids) do
  if redis.call('EXISTS', KEY.job .. id) == 1 then return answer('EXISTS', ids) end
end
if digest ~= '' then
  local earlier = {}
  for id in string.gmatch(redis.call('GET', KEY.idempotency .. digest) or '', '%S+') do earlier[#earlier + 1] = id end
  local hash = earlier[1] and redis.call('HGET', KEY.job .. earlier[1], 'request_hash')
  if hash then return answer(hash == group.record.request_hash and 'EXISTS' or 'CONFLICT', earlier) end
end
local refused = no_room(group, limit, tenant_limit)
if refused then return answer(refused, ids) end

create_group(group, digest, deadline)
if digest ~= '' then redis.call('SET', KEY.idempotency .. digest, table.concat(ids, ' ')) end
return wrote('CREATED', ids)

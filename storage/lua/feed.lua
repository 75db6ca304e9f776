-- feed: batch, line, where the next line begins, window, queue limit, tenant's limit or '', code and message of an error or '', then
-- a group. The cursor makes it once, whoever feeds.
local id, line, position, window = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local code, message = ARGV[9], ARGV[10]
local batch = get_batch(id, 'status', 'fed', 'completed', 'failed')
if not batch[1] then return answer('GONE') end
local fed = tonumber(batch[2])
if fed >= line then return answer('PASSED') end
if batch[1] ~= 'in_progress' then return answer('CLOSED') end
if fed + 1 ~= line then return answer('GAP') end
if fed - tonumber(batch[3]) - tonumber(batch[4]) >= window then return answer('AHEAD') end
local group = read_group(11)
local refused = code == '' and no_room(group, tonumber(ARGV[7]), tonumber(ARGV[8]))
if refused then return answer(refused) end

redis.call('HSET', KEY.batch .. id, 'fed', line, 'position', position)
create_group(group, '', '')
redis.call('SADD', KEY.batch_jobs .. id, unpack(group.ids))
if code ~= '' then -- no job could be made of it: one that has failed stands for the line
  for _, job in ipairs(group.ids) do end_job(job, FAILED, '', code, message) end
end
return wrote('OK')

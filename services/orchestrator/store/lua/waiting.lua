-- call: ids (with blanks between).
-- Returns JSON: `obstacles`, why each trainer takes no job (a `job` has it or one of its samplers,
-- or it is `away`); `places`, the place of each waiting job, 1 for the job that is taken next; and
-- `sharing`, the jobs on each trainer.

local obstacles, places, begun, job_of, sharing = {}, {}, begun_waiting(), {}, {}
for _, id in ipairs(redis.call('ZRANGE', BEGUN, 0, -1)) do
  if is_job(id) and is_leased(id) then
    local trainer = field(id, 'trainer')
    obstacles[trainer] = obstacles[trainer] or {job = id}
    sharing[trainer] = sharing[trainer] or {}
    table.insert(sharing[trainer], id)
    job_of[field(id, 'attempt')] = id
  end
end

-- The job that has a sampler of a free trainer.
local function holder(names)
  for _, attempt in pairs(holders(names)) do
    if job_of[attempt] then return {job = job_of[attempt]} end
  end
end

-- Several workers may have registered one trainer, and only some of them may reach it.
local is_free, found = {}, {}
for _, each in ipairs(trainers()) do
  local why = holder(each.samplers) or each.away and {away = each.away}
  if why then found[each.trainer] = why else is_free[each.trainer] = true end
end
for trainer, why in pairs(found) do
  if not is_free[trainer] and not obstacles[trainer] then obstacles[trainer] = why end
end
for i, id in ipairs(begun) do places[id] = i end
for id in string.gmatch(call.ids, '%S+') do
  local rank = redis.call('ZRANK', QUEUE, id)
  if rank then places[id] = #begun + rank + 1 end
end
return cjson.encode({obstacles = obstacles, places = places, sharing = sharing})

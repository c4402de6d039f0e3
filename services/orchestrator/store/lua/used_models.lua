-- Returns the models of all jobs that have not ended, as JSON: a list of [model, id, status], each
-- with the oldest such job.

local found, known = {}, {}
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  local model = is_job(id) and field(id, 'model')
  if model and not known[model] and not has_ended(id) then
    known[model] = true
    found[#found + 1] = {model, id, field(id, 'status')}
  end
end
return cjson.encode(found)

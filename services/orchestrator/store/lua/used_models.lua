-- Returns the models of all jobs that have not ended, as JSON: a list of [model, id, status], each
-- with the oldest such job.

-- The models that the job uses: its own and the checkpoint that it begins with, or the models that
-- it evaluates.
local function models(id)
  local evaluated = field(id, 'models')
  return evaluated and cjson.decode(evaluated) or {field(id, 'model')}
end

local found, known = {}, {}
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  for _, model in ipairs(is_job(id) and not has_ended(id) and models(id) or {}) do
    if model and not known[model] then
      known[model] = true
      found[#found + 1] = {model, id, field(id, 'status')}
    end
  end
end
return cjson.encode(found)

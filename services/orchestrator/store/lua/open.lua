-- Makes the lists agree with the jobs' hashes, which are the truth. Clears what jobs wait for.
-- Returns ''.

-- Adds the fields that lists need to a record of an older version.
local function complete(id)
  local is_read, spec = pcall(cjson.decode, field(id, 'job') or '')
  if not is_read or type(spec) ~= 'table' or type(spec.data) ~= 'table' then return end
  local files = {}
  for _, name in ipairs({'train', 'eval'}) do
    local source = spec.data[name]
    if type(source) == 'string' and string.match(source, '^file%-%x+$') then
      files[#files + 1] = source
    end
  end
  set(id, 'model', tostring(spec.model), 'metadata', cjson.encode(spec.metadata or {}),
    'files', table.concat(files, ' '))
  if next(spec.request or {}) then set(id, 'openai', '1') end
end

redis.call('DEL', UNENDED)
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  if is_job(id) and not field(id, 'model') then complete(id) end
  local status = is_job(id) and field(id, 'status')
  if is_job(id) then wait(id, nil) end -- who noted it may be gone; else it is noted again
  if status and not has_ended(id) then note_unended(id) end
  local is_listed = redis.call('ZSCORE', QUEUE, id) or redis.call('ZSCORE', BEGUN, id)
  if (status == 'queued' or status == 'running') and not is_listed then
    enqueue(id)
  elseif status and has_ended(id) then
    redis.call('ZADD', ENDED, 'NX', field(id, 'finished_at') or call.now, id)
  end
end
return ''

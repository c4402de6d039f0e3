-- Makes a job's record, and queues it.
-- call: id, key ('' for none), key_ttl_s, fingerprint, fields; perhaps max_jobs: most jobs of the API
--   key that have not ended.
-- Returns id and fingerprint of the key's job; 'withdrawn' if the key's submission was withdrawn;
-- 'taken' if the id is another job's; 'removed ' and the file's id if the job names an uploaded
-- file that was removed during the submission; 'full' if the API key has max_jobs already.

return once(function()
  local known = call.key ~= '' and redis.call('GET', KEY .. call.key)
  if known then return known end
  if redis.call('EXISTS', job(call.id)) == 1 then return 'taken' end
  for file in string.gmatch(call.fields.files or '', '%S+') do
    if redis.call('EXISTS', REMOVED .. file) == 1 then return 'removed ' .. file end
  end
  local by = call.fields.submitted_by
  if by and call.max_jobs and num_unended(by) >= tonumber(call.max_jobs) then return 'full' end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  redis.call('ZADD', JOBS, call.now, call.id)
  local last_ms = tonumber(redis.call('GET', SUBMITTED) or '0')
  local submitted_ms = string.format('%.0f', math.max(now_ms(), last_ms + 1))
  redis.call('SET', SUBMITTED, submitted_ms)
  set(call.id, 'submitted_ms', submitted_ms)
  note_unended(call.id)
  enqueue(call.id)
  local answer = call.id .. ' ' .. call.fingerprint
  if call.key ~= '' then redis.call('SET', KEY .. call.key, answer, 'EX', call.key_ttl_s) end
  return answer
end)

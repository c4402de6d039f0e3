-- Makes the record of a job that has none.
-- call: id, fields, checkpoints (step -> JSON), and either the status of a job that ended or else
--   why it is paused; perhaps error; perhaps key, fingerprint, key_left_s.
-- Returns 'new ' and the record's status; the status of an existing record; 'deleted' if the job
-- was deleted; 'old' if it ended before all ended jobs that are kept.

return once(function()
  if is_job(call.id) then return field(call.id, 'status') or '?' end
  if redis.call('EXISTS', DELETED .. call.id) == 1 then return 'deleted' end
  local ended_at = call.status and call.fields.finished_at
  if ended_at and redis.call('ZCOUNT', ENDED, ended_at, '+inf') >= tonumber(call.keep_jobs) then
    return 'old'
  end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  for step, checkpoint in pairs(call.checkpoints) do
    redis.call('HSET', checkpoints(call.id), step, checkpoint)
  end
  redis.call('ZADD', JOBS, call.fields.created_at, call.id)
  if call.key then
    local submission = call.id .. ' ' .. call.fingerprint
    redis.call('SET', KEY .. call.key, submission, 'EX', call.key_left_s, 'NX')
  end
  if not call.status then
    note_unended(call.id)
    pause(call.id, 'warning', 'error', call.why)
    return 'new paused'
  end
  if call.error then set(call.id, 'error', call.error) end
  local failed = call.status == 'failed'
  become(call.id, call.status, failed and 'error' or 'info', call.error or call.status)
  redis.call('ZADD', ENDED, call.fields.finished_at, call.id)
  return 'new ' .. call.status
end)

-- Queues a paused job again, or calls off a pause that was requested.
-- call: id; perhaps fields to change if the job is paused; perhaps preempted: only a job that made
--   room for another one is queued.
-- Returns the status before; '' if there is no such job.

return once(function()
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  local is_preempted = status == 'paused' and field(call.id, 'pause_reason') == 'preempted'
  if call.preempted and not is_preempted then return status end
  if status == 'paused' then
    for name, value in pairs(call.fields or {}) do set(call.id, name, value) end
    set(call.id, 'tries', 0, 'recoveries', 0)
    redis.call('HDEL', job(call.id), 'error', 'pause_reason')
    enqueue(call.id)
  elseif status == 'running' and not call.fields
      and redis.call('HDEL', job(call.id), 'pause_requested') == 1 then
    event(call.id, 'log', 'info', 'not pausing after all', '{}')
  end
  return status
end)

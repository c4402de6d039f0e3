-- Queues a paused job again, or calls off a pause that was requested.
-- call: id; perhaps fields to change if the job is paused.
-- Returns the status before; '' if there is no such job.

return once(function()
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
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

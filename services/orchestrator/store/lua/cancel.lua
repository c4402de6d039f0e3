-- Cancels the job: at once, or by way of its worker.
-- call: id.
-- Returns the status before; '' if there is no such job.

return once(function()
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if is_waiting(call.id) or status == 'paused' then
    set(call.id, 'cancel_requested', '1')
    cancel(call.id)
  elseif status == 'running' and not asked(call.id, 'cancel') then
    set(call.id, 'cancel_requested', '1')
    event(call.id, 'log', 'info', 'cancelling after the call under way', '{}')
  end
  return status
end)

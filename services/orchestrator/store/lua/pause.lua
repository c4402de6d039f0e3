-- Pauses the job: at once, or by way of its worker.
-- call: id, why (a sentence if an error is the reason, else empty).
-- Returns the status before; '' if there is no such job.

return once(function()
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if is_waiting(call.id) then
    if stopped(call.id) then return status end
    if call.why == '' then pause_on_request(call.id) else pause(call.id, 'info', 'error', call.why) end
  elseif status == 'paused' and field(call.id, 'pause_reason') == 'preempted' then
    pause_on_request(call.id) -- else its program's next operation would resume it
  elseif status == 'running' and not asked(call.id, 'pause') then
    set(call.id, 'pause_requested', '1')
    event(call.id, 'log', 'info', 'pausing', '{}')
  end
  return status
end)

-- The worker has stopped. The job is cancelled if that was requested, else paused if there is a
-- reason why or that was requested, else queued at its old place.
-- call: id, attempt; perhaps why (a sentence) and reason (its code); perhaps left_because: why the
--   attempt failed though the job did not.
-- Returns 'ok' or 'lost'.

return once(function()
  if not is_mine() then return 'lost' end
  free(call.id)
  if call.why and not asked(call.id, 'cancel') then
    pause(call.id, 'warning', call.reason, call.why)
  elseif not stopped(call.id) then
    if call.left_because then
      event(call.id, 'log', 'warning', call.left_because, '{}')
    else
      local tries = tonumber(field(call.id, 'tries')) -- 0 already if it did a new step
      set(call.id, 'tries', math.max(tries - 1, 0))
    end
    become(call.id, 'queued', 'info', 'queued')
  end
  return 'ok'
end)

-- The worker has stopped. The job is cancelled if that was requested, else paused if there is a
-- reason why or that was requested, else queued at its old place.
-- call: id, attempt, paused (the reason of a pause on request); perhaps why, or left_because with
--   max_left and left_too_often.
-- Returns 'ok' or 'lost'.
--
-- A job left to another trainer (left_because) counts a failed attempt; after max_left attempts in
-- a row without a new step it pauses, for the reason left_too_often.

return once(function()
  if not is_mine() then return 'lost' end
  free(call.id)
  if call.why and not asked(call.id, 'cancel') then
    pause(call.id, 'warning', call.why)
  elseif stopped(call.id, call.paused) then
    return 'ok'
  elseif call.left_because and tonumber(field(call.id, 'tries')) >= tonumber(call.max_left) then
    pause(call.id, 'warning', call.left_too_often)
  elseif call.left_because then
    event(call.id, 'log', 'warning', call.left_because, '{}')
    become(call.id, 'queued', 'info', 'queued')
  else
    local tries = tonumber(field(call.id, 'tries')) -- 0 already if it did a new step
    set(call.id, 'tries', math.max(tries - 1, 0))
    become(call.id, 'queued', 'info', 'queued')
  end
  return 'ok'
end)

-- Gives the evaluation a lease on samplers.
-- call: name (of an evaluation), samplers (with blanks between), lease_ms.
-- Returns its attempt; '' if one of the samplers is taken.

return once(function()
  if are_taken(call.samplers) then return '' end
  local attempt = lease(call.samplers)
  redis.call('SET', LOAN .. attempt, call.name, 'PX', call.lease_ms)
  return attempt
end)

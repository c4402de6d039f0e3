-- Notes what only this queued job waits for, and adds one event about it.
-- call: id; perhaps waits.
-- Returns 'ok'; '' if the job does not wait for a worker any more.

if not is_waiting(call.id) then return '' end
local before = field(call.id, 'waits')
wait(call.id, call.waits)
if call.waits and not before then
  event(call.id, 'log', 'warning', 'waits: ' .. call.waits, '{}')
end
return 'ok'

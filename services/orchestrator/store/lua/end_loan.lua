-- Ends the rest of an evaluation's lease.
-- call: samplers, attempt.
-- Returns ''.

for name in string.gmatch(call.samplers, '%S+') do
  if redis.call('GET', LEASE .. name) == call.attempt then redis.call('DEL', LEASE .. name) end
end
redis.call('DEL', LOAN .. call.attempt)
return ''

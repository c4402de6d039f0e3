-- Renews an evaluation's lease.
-- call: samplers, attempt, lease_ms.
-- Returns '' or 'lost'.

for name in string.gmatch(call.samplers, '%S+') do
  if redis.call('GET', LEASE .. name) ~= call.attempt then return 'lost' end
end
for name in string.gmatch(call.samplers, '%S+') do
  redis.call('PEXPIRE', LEASE .. name, call.lease_ms)
end
redis.call('PEXPIRE', LOAN .. call.attempt, call.lease_ms)
return ''

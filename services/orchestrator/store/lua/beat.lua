-- Renews the lease, and notes what the job does and waits for.
-- call: id, attempt, trainer, lease_ms; perhaps doing and waits.
-- Returns the pending request ('cancel', 'pause' or ''), or 'lost'.

if not is_mine() then return 'lost' end
redis.call('PEXPIRE', lease_on(call.id, call.trainer), call.lease_ms)
for _, key in ipairs(samplers(call.id)) do redis.call('PEXPIRE', key, call.lease_ms) end
if call.doing then set(call.id, 'doing', call.doing) end
wait(call.id, call.waits)
if asked(call.id, 'cancel') then return 'cancel' end
return asked(call.id, 'pause') and 'pause' or ''

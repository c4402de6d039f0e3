-- Ends the sampler's registration.
-- call: replica; perhaps boot_id.
-- Returns 'ok', also if it was not registered. If another `boot_id` has the registration, changes
-- nothing and returns 'other'.

local known = redis.call('GET', SAMPLER .. call.replica)
if known and call.boot_id and cjson.decode(known).boot_id ~= call.boot_id then return 'other' end
redis.call('SREM', SAMPLERS, call.replica)
redis.call('DEL', SAMPLER .. call.replica)
return 'ok'

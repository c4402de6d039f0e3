-- Registers the sampler, or renews its registration.
-- call: replica, registration (JSON), lease_ms.
-- Returns 'ok', or the URL of another sampler that has the name.

local key = SAMPLER .. call.replica
local known = redis.call('GET', key)
local url = known and cjson.decode(known).url
if url and url ~= cjson.decode(call.registration).url then return url end
redis.call('SADD', SAMPLERS, call.replica)
redis.call('SET', key, call.registration, 'PX', call.lease_ms)
return 'ok'

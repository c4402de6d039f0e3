-- Registers a worker's trainer, or renews its registration.
-- call: name, registration (JSON: trainer, samplers, perhaps away), lease_ms.
-- Returns how many jobs wait to begin.

redis.call('SADD', TRAINERS, call.name)
redis.call('SET', TRAINER .. call.name, call.registration, 'PX', call.lease_ms)
return tostring(redis.call('ZCARD', QUEUE))

-- Notes a worker's trainer.
-- call: name, note (JSON: trainer, samplers, perhaps away), known_ms.
-- Returns how many jobs wait to begin.

local now, last = now_ms(), tonumber(redis.call('HGET', NOTING, 'last'))
if last and now > last + call.known_ms then redis.call('HSET', NOTING, 'since', now) end
redis.call('HSET', NOTING, 'last', now)
redis.call('SADD', SLOTS, call.name)
redis.call('SET', SLOT .. call.name, call.note, 'PX', call.known_ms)
return tostring(redis.call('ZCARD', QUEUE))

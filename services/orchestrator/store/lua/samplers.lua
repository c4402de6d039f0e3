-- Forgets samplers whose registration has expired.
-- Returns the others as JSON: a list of [replica, registration, milliseconds left]; {} for none.

local found = {}
for _, replica in ipairs(redis.call('SMEMBERS', SAMPLERS)) do
  local registration = redis.call('GET', SAMPLER .. replica)
  if registration then
    local left_ms = redis.call('PTTL', SAMPLER .. replica)
    found[#found + 1] = {replica, registration, left_ms}
  else
    redis.call('SREM', SAMPLERS, replica)
  end
end
return cjson.encode(found)

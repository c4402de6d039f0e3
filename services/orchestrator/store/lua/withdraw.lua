-- From now on no job is made with the key.
-- call: key, key_ttl_s; perhaps by (an API key's name) and most, how many it may have withdrawn.
-- Returns id and fingerprint of the key's earlier job, else 'withdrawn', or 'full'.

return once(function()
  local known = redis.call('GET', KEY .. call.key)
  if known then return known end
  if call.by then
    local own = WITHDRAWN .. call.by
    redis.call('ZREMRANGEBYSCORE', own, '-inf', call.now)
    if redis.call('ZCARD', own) >= tonumber(call.most) then return 'full' end
    redis.call('ZADD', own, call.now + call.key_ttl_s, call.key)
    redis.call('EXPIRE', own, call.key_ttl_s)
  end
  redis.call('SET', KEY .. call.key, 'withdrawn', 'EX', call.key_ttl_s)
  return 'withdrawn'
end)

-- From now on no job is made with the key.
-- call: key, key_ttl_s.
-- Returns id and fingerprint of the key's earlier job, else 'withdrawn'.

return once(function()
  local known = redis.call('GET', KEY .. call.key)
  if known then return known end
  redis.call('SET', KEY .. call.key, 'withdrawn', 'EX', call.key_ttl_s)
  return 'withdrawn'
end)

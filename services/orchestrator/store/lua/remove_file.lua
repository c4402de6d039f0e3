-- From now on no job is submitted with the file.
-- call: file, created_at, removed_ttl_s.
-- Returns 'ok'. If a job that has not ended names the file, changes nothing and returns that job's
-- id and status.

return once(function()
  for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
    local files = is_job(id) and not has_ended(id) and field(id, 'files') or ''
    if string.find(' ' .. files .. ' ', ' ' .. call.file .. ' ', 1, true) then
      return id .. ' ' .. field(id, 'status')
    end
  end
  redis.call('SET', REMOVED .. call.file, call.created_at, 'EX', call.removed_ttl_s)
  return 'ok'
end)

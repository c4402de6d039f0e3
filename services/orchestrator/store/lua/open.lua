-- Makes the lists agree with the jobs' hashes, which are the truth. Clears what jobs wait for.
-- Returns ''.

redis.call('DEL', UNENDED)
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  local status = is_job(id) and field(id, 'status')
  if is_job(id) then wait(id, nil) end -- who noted it may be gone; else it is noted again
  if status and not has_ended(id) then note_unended(id) end
  local is_listed = redis.call('ZSCORE', QUEUE, id) or redis.call('ZSCORE', BEGUN, id)
  if (status == 'queued' or status == 'running') and not is_listed then
    enqueue(id)
  elseif status and has_ended(id) then
    redis.call('ZADD', ENDED, 'NX', field(id, 'finished_at') or call.now, id)
  end
end
return ''

-- Forgets a job that has ended.
-- call: id, deleted_ttl_s.
-- Returns 'deleted', also if it was deleted before; the status if the job has not ended; '' if
-- there is no such job.

return once(function()
  if redis.call('EXISTS', job(call.id)) == 0 then
    return redis.call('EXISTS', DELETED .. call.id) == 1 and 'deleted' or ''
  end
  if is_job(call.id) and not has_ended(call.id) then return field(call.id, 'status') or '?' end
  forget(call.id)
  redis.call('SET', DELETED .. call.id, '1', 'EX', call.deleted_ttl_s)
  return 'deleted'
end)

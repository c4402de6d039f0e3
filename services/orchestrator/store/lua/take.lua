-- Gives the trainer, the samplers and a waiting job to the caller.
-- call: owner, trainer, samplers (names with blanks between), lease_ms, max_tries, paused (the
--   reason of a pause on request); perhaps skip (ids of jobs to pass over, with blanks between),
--   own_only (leave interrupted jobs to their own trainers, which may not be registered yet) and peek
--   (only return the job, change nothing).
-- Returns attempt, number of tries and job id; '' if any of the resources is taken or no job waits.
--
-- Interrupted jobs first: this trainer's own, then those whose own trainer is taken, away or not
-- registered; then the first in the queue. An interrupted job is cancelled or paused instead if that
-- was requested, and pauses if it was interrupted too often.

return once(function()
  local resources = call.trainer .. ' ' .. call.samplers
  if are_taken(resources) then return '' end

  local is_skipped = {}
  for id in string.gmatch(call.skip or '', '%S+') do is_skipped[id] = true end

  -- Gives the job to the caller; returns whether it did. Pauses a job interrupted too often.
  local function taken(id)
    if call.peek then return true end
    if redis.call('HINCRBY', job(id), 'tries', 1) > tonumber(call.max_tries) then
      local why = 'gave up after ' .. call.max_tries
        .. ' attempts in a row that were cut off before a step was done; look into its events'
        .. " and the orchestrator's log, then `hone resume " .. id .. '` goes on from there'
      pause(id, 'error', why)
      return false
    end
    local attempt = lease(resources)
    begin(id)
    set(id, 'attempt', attempt, 'trainer', call.trainer, 'samplers', call.samplers,
      'owner', call.owner, 'status', 'running')
    redis.call('HSETNX', job(id), 'started_at', call.now)
    local attempts = redis.call('HINCRBY', job(id), 'attempts', 1)
    event(id, 'status', 'info', 'running', cjson.encode({status = 'running', attempts = attempts}))
    return true
  end

  local function first_of(ids)
    for _, id in ipairs(ids) do
      local status = is_job(id) and field(id, 'status')
      if status ~= 'queued' and status ~= 'running' then
        leave_queue(id)
      elseif not is_skipped[id] and is_waiting(id) and not stopped(id, call.paused)
          and taken(id) then
        return (field(id, 'attempt') or '0') .. ' ' .. (field(id, 'tries') or '0') .. ' ' .. id
      end
    end
  end

  -- For each registered trainer, whether it is about to take a job itself.
  local function ready_trainers()
    local ready = {}
    for _, each in ipairs(trainers()) do
      ready[each.trainer] = ready[each.trainer] or is_free(each)
    end
    return ready
  end

  local own, others, ready = {}, {}, nil
  for _, id in ipairs(begun_waiting()) do
    local trainer = field(id, 'trainer')
    if trainer == call.trainer then
      own[#own + 1] = id
    else
      ready = ready or ready_trainers()
      if not ready[trainer] then others[#others + 1] = id end
    end
  end
  if call.own_only and #others > 0 then return first_of(own) or '' end
  return first_of(own) or first_of(others) or first_of(redis.call('ZRANGE', QUEUE, 0, -1)) or ''
end)

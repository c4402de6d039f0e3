-- Gives the trainer, the samplers and a waiting job to the caller.
-- call: owner, trainer, samplers (names with blanks between), lease_ms, max_tries, known_ms, paused
--   (the reason of a pause on request); perhaps skip (ids of jobs to pass over, with blanks
--   between) and peek (only return the job, change nothing).
-- Returns attempt, number of tries and job id; '' if any of the resources is taken or no job waits.
--
-- Interrupted jobs first, this trainer's own before jobs whose own trainer is taken or away; then
-- the first in the queue. After known_ms without notes of workers, and for as long again, a trainer
-- without a note may still exist: no new job begins before an interrupted job of such a trainer. An
-- interrupted job is cancelled or paused instead if that was requested, and pauses if it was
-- interrupted too often.

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
        .. ' attempts in a row that were cut off before a step was done; look into the'
        .. " orchestrator's log, then `hone resume " .. id .. '` goes on from there'
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

  -- For each trainer with a note, whether it is about to take a job itself.
  local function ready_trainers()
    local ready = {}
    for _, slot in ipairs(known_slots()) do
      local is_free = not slot.away and not are_taken(slot.trainer .. ' ' .. slot.samplers)
      ready[slot.trainer] = ready[slot.trainer] or is_free
    end
    return ready
  end

  -- Whether every trainer that exists has a note. After a time without any notes, a worker may
  -- not have sent its note yet.
  local function are_all_known()
    local last, since = unpack(redis.call('HMGET', NOTING, 'last', 'since'))
    local now, known_ms = now_ms(), tonumber(call.known_ms)
    if not last then return true end
    local is_back = since and now >= tonumber(since) and now < since + known_ms
    return now <= last + known_ms and not is_back
  end

  local own, others, ready, is_expected = {}, {}, nil, false
  for _, id in ipairs(begun_waiting()) do
    local trainer = field(id, 'trainer')
    if trainer == call.trainer then
      own[#own + 1] = id
    else
      ready = ready or ready_trainers()
      if ready[trainer] == nil and not are_all_known() then
        is_expected = true
      elseif not ready[trainer] then
        others[#others + 1] = id
      end
    end
  end
  local found = first_of(own) or first_of(others)
  if found or is_expected then return found or '' end
  return first_of(redis.call('ZRANGE', QUEUE, 0, -1)) or ''
end)

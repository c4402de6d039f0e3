-- Gives a place on the trainer and the samplers, and a waiting job, to the caller.
-- call: owner, trainer, samplers (names with blanks between), places (how many jobs may share
--   them), lease_ms, max_tries; perhaps skip (ids of jobs to pass over, with blanks between),
--   own_only (leave interrupted jobs to their own trainers, which may not be registered yet) and
--   peek (only return the job, change nothing).
-- Returns attempt, number of tries, job id and the attempts beside it (with commas between); '' if
-- there is no place or no job waits.
--
-- Jobs share a trainer only if `shares` of their records is the same, and not empty. No one
-- overtakes: where the first job that waits cannot share, no other one joins.
--
-- Interrupted jobs first: this trainer's own, then those whose own trainer is taken, away or not
-- registered; then the first in the queue. An interrupted job is cancelled or paused instead if that
-- was requested, and pauses if it was interrupted too often.

-- What the jobs of these attempts all share as; nil if some job shares with none, or has other
-- resources than these.
local function shared_by(attempts, trainer, samplers)
  local shares_of, common = {}, nil
  for _, id in ipairs(redis.call('ZRANGE', BEGUN, 0, -1)) do
    local is_here = is_job(id) and field(id, 'trainer') == trainer
      and field(id, 'samplers') == samplers
    if is_here then shares_of[field(id, 'attempt')] = field(id, 'shares') end
  end
  for _, attempt in pairs(attempts) do
    local shares = shares_of[attempt]
    if not shares or shares == '' or (common and shares ~= common) then return nil end
    common = shares
  end
  return common
end

return once(function()
  local resources = call.trainer .. ' ' .. call.samplers
  local held, place, beside, shares = holders(resources), nil, {}, nil
  for number = tonumber(call.places), 1, -1 do
    if not held[PLACES[number]] then place = PLACES[number] end
  end
  for _, attempt in pairs(held) do beside[#beside + 1] = attempt end
  if #beside > 0 then shares = shared_by(beside, call.trainer, call.samplers) end
  if not place or (#beside > 0 and not shares) then return '' end

  local is_skipped = {}
  for id in string.gmatch(call.skip or '', '%S+') do is_skipped[id] = true end

  -- Whether a lease of the job's latest attempt has not expired on some resource.
  local function has_remains(id)
    for _, attempt in ipairs(beside) do
      if field(id, 'attempt') == attempt then return true end
    end
    return false
  end

  -- Gives the job to the caller; returns whether it did. Pauses a job interrupted too often.
  local function taken(id)
    if call.peek then return true end
    if redis.call('HINCRBY', job(id), 'tries', 1) > tonumber(call.max_tries) then
      local why = 'gave up after ' .. call.max_tries
        .. ' attempts in a row that were cut off before a step was done; look into its events'
        .. " and the orchestrator's log, then `hone resume " .. id .. '` continues from there'
      pause(id, 'error', 'error', why)
      return false
    end
    local attempt = lease(resources, place)
    begin(id)
    set(id, 'attempt', attempt, 'trainer', call.trainer, 'samplers', call.samplers,
      'trainer_place', place, 'owner', call.owner, 'status', 'running')
    redis.call('HSETNX', job(id), 'started_at', call.now)
    local attempts = redis.call('HINCRBY', job(id), 'attempts', 1)
    event(id, 'status', 'info', 'running', cjson.encode({status = 'running', attempts = attempts}))
    return true
  end

  local is_line_kept = false
  local function may_take(id)
    is_line_kept = is_line_kept or shares ~= nil and field(id, 'shares') ~= shares
    return not is_line_kept
  end

  local function first_of(ids)
    for _, id in ipairs(ids) do
      local status = is_job(id) and field(id, 'status')
      if status ~= 'queued' and status ~= 'running' then
        leave_queue(id)
      elseif not is_skipped[id] and is_waiting(id) and not has_remains(id)
          and not stopped(id) and may_take(id) and taken(id) then
        local attempt, tries = field(id, 'attempt') or '0', field(id, 'tries') or '0'
        return attempt .. ' ' .. tries .. ' ' .. id .. ' ' .. table.concat(beside, ',')
      end
    end
  end

  -- Whether a registered trainer is about to take the job up itself: it is free, or has a place
  -- beside jobs that the job may share it with.
  local function is_ready(id, registered)
    for _, each in ipairs(registered) do
      local attempts = holders(each.trainer .. ' ' .. each.samplers)
      if each.trainer == field(id, 'trainer') and not each.away and (next(attempts) == nil
          or shared_by(attempts, each.trainer, each.samplers) == field(id, 'shares')) then
        return true
      end
    end
    return false
  end

  local own, others, registered = {}, {}, nil
  for _, id in ipairs(begun_waiting()) do
    local trainer = field(id, 'trainer')
    if trainer == call.trainer then
      own[#own + 1] = id
    else
      registered = registered or trainers()
      if not is_ready(id, registered) then others[#others + 1] = id end
    end
  end
  if call.own_only and #others > 0 then return first_of(own) or '' end
  return first_of(own) or first_of(others) or first_of(redis.call('ZRANGE', QUEUE, 0, -1)) or ''
end)

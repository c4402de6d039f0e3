"""Every change of a job is one atomic Redis script. The keys are in `keys.py`.

    queued --take--> running --report--> succeeded, failed, cancelled
      ^ ^              |
      | +-----halt-----+----halt
      |                v
      +----resume--- paused          cancel: queued and paused at once, running by way of the worker

A running job whose worker is gone waits to be taken again: it is paused and cancelled at once too.

A worker sends its lease: the job, the trainer and the attempt. Once the trainer's lease has expired
or is another worker's, or the job does not run any more, nothing is changed.

The building blocks of scripts, and how they are called, are in lua.py. Scripts that change no job
are beside their callers (lists.py, loans.py, ...).
"""

from __future__ import annotations

from services.orchestrator.store.lua import SHARED, once

OPEN = (
    SHARED
    + """
-- Adds the fields that lists need to a record of an older version.
local function complete(id)
  local is_read, spec = pcall(cjson.decode, field(id, 'job') or '')
  if not is_read or type(spec) ~= 'table' or type(spec.data) ~= 'table' then return end
  local files = {}
  for _, name in ipairs({'train', 'eval'}) do
    local source = spec.data[name]
    if type(source) == 'string' and string.match(source, '^file%-%x+$') then
      files[#files + 1] = source
    end
  end
  set(id, 'model', tostring(spec.model), 'metadata', cjson.encode(spec.metadata or {}),
    'files', table.concat(files, ' '))
  if next(spec.request or {}) then set(id, 'openai', '1') end
end

for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  if is_job(id) and not field(id, 'model') then complete(id) end
  local status = is_job(id) and field(id, 'status')
  if is_job(id) then wait(id, nil) end -- who noted it may be gone; else it is noted again
  local is_listed = redis.call('ZSCORE', QUEUE, id) or redis.call('ZSCORE', BEGUN, id)
  if (status == 'queued' or status == 'running') and not is_listed then
    enqueue(id)
  elseif status and has_ended(id) then
    redis.call('ZADD', ENDED, 'NX', field(id, 'finished_at') or call.now, id)
  end
end
return ''
"""
)
"""Makes the lists agree with the jobs' hashes, which are the truth. Clears what jobs wait for.
Returns ''."""

SUBMIT = once("""
  local known = call.key ~= '' and redis.call('GET', KEY .. call.key)
  if known then return known end
  if redis.call('EXISTS', job(call.id)) == 1 then return 'taken' end
  for file in string.gmatch(call.fields.files or '', '%S+') do
    if redis.call('EXISTS', REMOVED .. file) == 1 then return 'removed ' .. file end
  end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  redis.call('ZADD', JOBS, call.now, call.id)
  local last_ms = tonumber(redis.call('GET', SUBMITTED) or '0')
  local submitted_ms = string.format('%.0f', math.max(now_ms(), last_ms + 1))
  redis.call('SET', SUBMITTED, submitted_ms)
  set(call.id, 'submitted_ms', submitted_ms)
  enqueue(call.id)
  local answer = call.id .. ' ' .. call.fingerprint
  if call.key ~= '' then redis.call('SET', KEY .. call.key, answer, 'EX', call.key_ttl_s) end
  return answer
""")
"""call: id, key ('' for none), key_ttl_s, fingerprint, fields. Returns id and fingerprint of the
key's job, 'withdrawn' if its submission was withdrawn, 'taken' if the id is another job's, or
'removed ' and the id of a file that the job names and that was removed during the submission."""

WITHDRAWN = "withdrawn"
"""The value of an idempotency key whose submission was withdrawn: it makes no job any more."""

WITHDRAW = once(f"""
  local known = redis.call('GET', KEY .. call.key)
  if known then return known end
  redis.call('SET', KEY .. call.key, '{WITHDRAWN}', 'EX', call.key_ttl_s)
  return '{WITHDRAWN}'
""")
"""call: key, key_ttl_s. From now on no job is made with the key. Returns id and fingerprint of the
key's earlier job, else 'withdrawn'."""

TAKE = once("""
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
""")
"""call: owner, trainer, samplers (names with blanks between), lease_ms, max_tries, known_ms, paused
(the reason of a pause on request); perhaps skip (ids of jobs to pass over, with blanks between) and
peek (only return the job, change nothing). Gives the trainer, the samplers and a waiting job to the
caller. Interrupted jobs first, this trainer's own before jobs whose own trainer is taken or away;
then the first in the queue. After known_ms without notes of workers, and for as long again, a
trainer without a note may still exist: no new job begins before an interrupted job of such a
trainer. An interrupted job is cancelled or paused instead if that was requested, and pauses if it
was interrupted too often. Returns attempt, number of tries and job id; '' if any of the resources
is taken or no job waits. Attempts are at least the Unix seconds, so that none is given twice even
if Redis is emptied."""

BEAT = (
    SHARED
    + """
if not is_mine() then return 'lost' end
redis.call('PEXPIRE', LEASE .. call.trainer, call.lease_ms)
for _, lease in ipairs(samplers(call.id)) do redis.call('PEXPIRE', lease, call.lease_ms) end
if call.doing then set(call.id, 'doing', call.doing) end
wait(call.id, call.waits)
if asked(call.id, 'cancel') then return 'cancel' end
return asked(call.id, 'pause') and 'pause' or ''
"""
)
"""call: id, attempt, trainer, lease_ms; perhaps doing and waits. Renews the lease, and notes what
the job does and waits for. Returns the pending request ('cancel', 'pause' or ''), or 'lost'."""

HOLD = (
    SHARED
    + """
if not is_waiting(call.id) then return '' end
local before = field(call.id, 'waits')
wait(call.id, call.waits)
if call.waits and not before then
  event(call.id, 'log', 'warning', 'waits: ' .. call.waits, '{}')
end
return 'ok'
"""
)
"""call: id; perhaps waits. Notes what only this queued job waits for, and adds one event about it.
Returns 'ok'; '' if the job does not wait for a worker any more."""

REPORT = once("""
  if not is_mine() then return 'lost' end
  local last = 'last_' .. call.type
  if call.step then
    if call.missing_only and tonumber(field(call.id, last) or '-1') >= tonumber(call.step) then
      return 'ok'
    end
    set(call.id, last, call.step)
  end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  local step = call.type == 'step' and tonumber(call.step)
  if step and step > tonumber(field(call.id, 'furthest') or '0') then
    set(call.id, 'tries', 0, 'furthest', call.step)
  end
  if call.type == 'checkpoint' then
    redis.call('HSET', checkpoints(call.id), call.step, call.data)
  end
  event(call.id, call.type, call.level, call.message, call.data)
  if has_ended(call.id) then
    free(call.id)
    close(call.id)
  end
  return 'ok'
""")
"""call: id, attempt, type, level, message, data; perhaps step (of the event) and missing_only (do
nothing if that step has an event of the type); fields of the record. Returns 'ok' or 'lost'."""

HALT = once("""
  if not is_mine() then return 'lost' end
  free(call.id)
  if call.why and not asked(call.id, 'cancel') then
    pause(call.id, 'warning', call.why)
  elseif stopped(call.id, call.paused) then
    return 'ok'
  elseif call.left_because and tonumber(field(call.id, 'tries')) >= tonumber(call.max_left) then
    pause(call.id, 'warning', call.left_too_often)
  elseif call.left_because then
    event(call.id, 'log', 'warning', call.left_because, '{}')
    become(call.id, 'queued', 'info', 'queued')
  else
    local tries = tonumber(field(call.id, 'tries')) -- 0 already if it did a new step
    set(call.id, 'tries', math.max(tries - 1, 0))
    become(call.id, 'queued', 'info', 'queued')
  end
  return 'ok'
""")
"""call: id, attempt, paused (the reason of a pause on request); perhaps why, or left_because with
max_left and left_too_often. The worker has stopped: the job is cancelled if that was requested,
else paused if there is a reason why or that was requested, else queued at its old place. A job left
to another trainer (left_because) counts a failed attempt; after max_left attempts in a row without
a new step it pauses, for the reason left_too_often. Returns 'ok' or 'lost'."""

PAUSE = once("""
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if is_waiting(call.id) then
    if not stopped(call.id, call.paused) then pause(call.id, 'info', call.paused) end
  elseif status == 'running' and not asked(call.id, 'pause') then
    set(call.id, 'pause_requested', '1')
    event(call.id, 'log', 'info', 'pausing', '{}')
  end
  return status
""")
"""call: id, paused (the reason). Returns the status before, or '' if there is no such job."""

RESUME = once("""
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if status == 'paused' then
    for name, value in pairs(call.fields or {}) do set(call.id, name, value) end
    set(call.id, 'tries', 0, 'recoveries', 0)
    redis.call('HDEL', job(call.id), 'error')
    enqueue(call.id)
  elseif status == 'running' and not call.fields
      and redis.call('HDEL', job(call.id), 'pause_requested') == 1 then
    event(call.id, 'log', 'info', 'not pausing after all', '{}')
  end
  return status
""")
"""call: id; perhaps fields to change if the job is paused. Returns the status before, or '' if
there is no such job."""

CANCEL = once("""
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if is_waiting(call.id) or status == 'paused' then
    set(call.id, 'cancel_requested', '1')
    cancel(call.id)
  elseif status == 'running' and not asked(call.id, 'cancel') then
    set(call.id, 'cancel_requested', '1')
    event(call.id, 'log', 'info', 'cancelling after the call under way', '{}')
  end
  return status
""")
"""call: id. Returns the status before, or '' if there is no such job."""

DELETE = once("""
  if redis.call('EXISTS', job(call.id)) == 0 then
    return redis.call('EXISTS', DELETED .. call.id) == 1 and 'deleted' or ''
  end
  if is_job(call.id) and not has_ended(call.id) then return field(call.id, 'status') or '?' end
  forget(call.id)
  redis.call('SET', DELETED .. call.id, '1', 'EX', call.deleted_ttl_s)
  return 'deleted'
""")
"""call: id, deleted_ttl_s. Returns 'deleted', also if it was deleted before; the status if the job
has not ended; '' if there is no such job."""

RECOVER = once("""
  if is_job(call.id) then return field(call.id, 'status') or '?' end
  if redis.call('EXISTS', DELETED .. call.id) == 1 then return 'deleted' end
  local ended_at = call.status and call.fields.finished_at
  if ended_at and redis.call('ZCOUNT', ENDED, ended_at, '+inf') >= tonumber(call.keep_jobs) then
    return 'old'
  end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  for step, checkpoint in pairs(call.checkpoints) do
    redis.call('HSET', checkpoints(call.id), step, checkpoint)
  end
  redis.call('ZADD', JOBS, call.fields.created_at, call.id)
  if call.key then
    local submission = call.id .. ' ' .. call.fingerprint
    redis.call('SET', KEY .. call.key, submission, 'EX', call.key_left_s, 'NX')
  end
  if not call.status then
    pause(call.id, 'warning', call.why)
    return 'new paused'
  end
  if call.error then set(call.id, 'error', call.error) end
  local failed = call.status == 'failed'
  become(call.id, call.status, failed and 'error' or 'info', call.error or call.status)
  redis.call('ZADD', ENDED, call.fields.finished_at, call.id)
  return 'new ' .. call.status
""")
"""call: id, fields, checkpoints (step -> JSON), and the status of a job that ended or else why it
is paused; perhaps error; perhaps key, fingerprint, key_left_s. Makes the record of a job that has
none. Returns 'new ' and its status; the status of an existing record; 'deleted' if the job was
deleted; 'old' if it ended before all ended jobs that are kept."""

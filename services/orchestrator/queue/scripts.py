"""Every change of a job, as one atomic script each that Redis runs. Keys are those of `keys.py`.

    queued --take--> running --report--> succeeded, failed, cancelled
      ^ ^              |
      | +-----halt-----+----halt
      |                v
      +----resume--- paused          cancel: queued and paused at once, running by way of the worker

A worker shows its lease: the job, the trainer and the attempt. Once the trainer's lease has expired
or is another's, or the job does not run any more, nothing is changed.

A script's arguments are one JSON object of texts, `call` in the script. It answers 'emptied', and
does nothing, in another Redis than that of `call.store`. A script of `once` changes
things once however often it is sent: `hone:call:<call>` keeps its answer for the retries of a
caller whose connection broke before the answer came.
"""

from __future__ import annotations

from services.orchestrator.queue import keys

CALL_TTL_S = 900
"""Longer than a caller goes on retrying (connection.py)."""

_KEYS = f"""
local JOBS, QUEUE, ENDED = '{keys.JOBS}', '{keys.QUEUE}', '{keys.ENDED}'
local STORE = '{keys.STORE}'
local ATTEMPTS, LEASE = '{keys.ATTEMPTS}', '{keys.LEASE}'
local KEY, DELETED = '{keys.KEY}', '{keys.DELETED}'
local SAMPLERS, SAMPLER = '{keys.SAMPLERS}', '{keys.SAMPLER}'
local function job(id) return '{keys.JOB}' .. id end
local function events(id) return job(id) .. '{keys.EVENTS}' end
local function checkpoints(id) return job(id) .. '{keys.CHECKPOINTS}' end
"""

_SHARED = (
    _KEYS
    + """
local call = cjson.decode(ARGV[1])

-- Nothing is changed in a Redis that is not the one accepted.
if call.store and redis.call('GET', STORE) ~= call.store then return 'emptied' end

local function field(id, name) return redis.call('HGET', job(id), name) end
local function set(id, ...) redis.call('HSET', job(id), ...) end
local function asked(id, what) return field(id, what .. '_requested') == '1' end

-- Whether there is a job of that id: its key exists and is a hash.
local function is_job(id) return redis.call('TYPE', job(id)).ok == 'hash' end

local function has_ended(id)
  local status = field(id, 'status')
  return status == 'succeeded' or status == 'failed' or status == 'cancelled'
end

local function event(id, type, level, message, data)
  redis.call('XADD', events(id), 'MAXLEN', '~', call.keep_events, '*', 'type', type,
    'level', level, 'message', message, 'data', data, 'time', call.now)
end

-- Sets the status and says so.
local function become(id, status, level, message)
  set(id, 'status', status)
  event(id, 'status', level, message, cjson.encode({status = status}))
end

-- Whether the lease given last for the job is valid.
local function is_leased(id)
  local attempt, trainer = field(id, 'attempt'), field(id, 'trainer')
  return attempt and trainer and redis.call('GET', LEASE .. trainer) == attempt
end

-- Whether the caller has the job.
local function is_mine()
  return is_job(call.id) and field(call.id, 'status') == 'running'
    and field(call.id, 'attempt') == call.attempt and is_leased(call.id)
end

-- The leases on the job's samplers, as far as they are its own.
local function samplers(id)
  local own = {}
  for name in string.gmatch(field(id, 'samplers') or '', '%S+') do
    if redis.call('GET', LEASE .. name) == field(id, 'attempt') then
      own[#own + 1] = LEASE .. name
    end
  end
  return own
end

-- Frees the trainer and the samplers, if they are the job's.
local function free(id)
  if not is_leased(id) then return end
  for _, lease in ipairs(samplers(id)) do redis.call('DEL', lease) end
  redis.call('DEL', LEASE .. field(id, 'trainer'))
end

-- Puts the job last into the queue.
local function enqueue(id)
  local last = redis.call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2] or '0'
  redis.call('ZADD', QUEUE, tonumber(last) + 1, id)
  become(id, 'queued', 'info', 'queued')
end

local function pause(id, level, why)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', job(id), 'pause_requested')
  set(id, 'error', why)
  become(id, 'paused', level, why)
end

local function forget(id)
  local key = is_job(id) and field(id, 'key')
  if key and string.find(redis.call('GET', KEY .. key) or '', id .. ' ', 1, true) == 1 then
    redis.call('DEL', KEY .. key)
  end
  redis.call('DEL', job(id), events(id), checkpoints(id))
  for _, list in ipairs({JOBS, QUEUE, ENDED}) do redis.call('ZREM', list, id) end
end

-- What a job that has just ended leaves. Of the ended ones the newest are kept.
local function close(id)
  set(id, 'finished_at', call.now)
  redis.call('HDEL', job(id), 'pause_requested')
  redis.call('ZREM', QUEUE, id)
  redis.call('ZADD', ENDED, call.now, id)
  for _, old in ipairs(redis.call('ZRANGE', ENDED, 0, -1 - tonumber(call.keep_jobs))) do
    forget(old)
  end
end

local function cancel(id)
  redis.call('HDEL', job(id), 'error')
  become(id, 'cancelled', 'info', 'cancelled')
  close(id)
end
"""
)


def once(body: str) -> str:
    """Returns the script that runs `body` once for each call, and answers retries with what it
    returned. An empty answer says that nothing was changed, and is not kept."""
    return f"""{_SHARED}
local function act()
{body}
end
local known = redis.call('GET', KEYS[1])
if known then return known end
local answer = act()
if answer ~= '' then redis.call('SET', KEYS[1], answer, 'EX', {CALL_TTL_S}) end
return answer
"""


OPEN = (
    _SHARED
    + """
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  local status = is_job(id) and field(id, 'status')
  if (status == 'queued' or status == 'running') and not redis.call('ZSCORE', QUEUE, id) then
    enqueue(id)
  elseif status and has_ended(id) then
    redis.call('ZADD', ENDED, 'NX', field(id, 'finished_at') or call.now, id)
  end
end
return ''
"""
)
"""Makes the lists agree with the jobs, whose hashes are the truth. Returns ''."""

SUBMIT = once("""
  local known = call.key ~= '' and redis.call('GET', KEY .. call.key)
  if known then return known end
  if redis.call('EXISTS', job(call.id)) == 1 then return 'taken' end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  redis.call('ZADD', JOBS, call.now, call.id)
  enqueue(call.id)
  local answer = call.id .. ' ' .. call.fingerprint
  if call.key ~= '' then redis.call('SET', KEY .. call.key, answer, 'EX', call.key_ttl_s) end
  return answer
""")
"""call: id, key ('' for none), key_ttl_s, fingerprint, fields. Returns id and fingerprint of the
job that the key made, or 'taken' if the id is another job's."""

TAKE = once("""
  local resources = call.trainer .. ' ' .. call.samplers
  for name in string.gmatch(resources, '%S+') do
    if redis.call('EXISTS', LEASE .. name) == 1 then return '' end
  end

  for _, id in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
    local status = is_job(id) and field(id, 'status')
    if status ~= 'queued' and status ~= 'running' then
      redis.call('ZREM', QUEUE, id)
    elseif status == 'queued' or not is_leased(id) then
      if redis.call('HINCRBY', job(id), 'tries', 1) > tonumber(call.max_tries) then
        local why = 'gave up after ' .. call.max_tries
          .. ' attempts in a row that were cut off before a step was done; look into the'
          .. " orchestrator's log, then `hone resume " .. id .. '` goes on from there'
        if asked(id, 'cancel') then cancel(id) else pause(id, 'error', why) end
      else
        local last, now = redis.call('INCR', ATTEMPTS), tonumber(redis.call('TIME')[1])
        local attempt = string.format('%d', math.max(last, now))
        redis.call('SET', ATTEMPTS, attempt)
        for name in string.gmatch(resources, '%S+') do
          redis.call('SET', LEASE .. name, attempt, 'PX', call.lease_ms)
        end
        set(id, 'attempt', attempt, 'trainer', call.trainer, 'samplers', call.samplers,
          'owner', call.owner, 'status', 'running')
        redis.call('HSETNX', job(id), 'started_at', call.now)
        local attempts = redis.call('HINCRBY', job(id), 'attempts', 1)
        event(id, 'status', 'info', 'running',
          cjson.encode({status = 'running', attempts = attempts}))
        return attempt .. ' ' .. id
      end
    end
  end
  return ''
""")
"""call: owner, trainer, samplers (with blanks between them), lease_ms, max_tries. Gives the first
job that nobody has to a worker that can have the trainer and the samplers; one that was cut off too
often pauses. Returns attempt and job id; '' if any of them is taken or nothing waits. Attempts are
at least the Unix seconds, so that none is given twice even if Redis is emptied."""

BEAT = (
    _SHARED
    + """
if not is_mine() then return 'lost' end
redis.call('PEXPIRE', LEASE .. call.trainer, call.lease_ms)
for _, lease in ipairs(samplers(call.id)) do redis.call('PEXPIRE', lease, call.lease_ms) end
if asked(call.id, 'cancel') then return 'cancel' end
return asked(call.id, 'pause') and 'pause' or ''
"""
)
"""call: id, attempt, trainer, lease_ms. Renews the lease. Returns what was asked for ('cancel',
'pause' or ''), or 'lost'."""

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
  if asked(call.id, 'cancel') then
    cancel(call.id)
  elseif call.why then
    pause(call.id, 'warning', call.why)
  elseif asked(call.id, 'pause') then
    pause(call.id, 'info', call.paused)
  else
    redis.call('HINCRBY', job(call.id), 'tries', -1)
    become(call.id, 'queued', 'info', 'queued')
  end
  return 'ok'
""")
"""call: id, attempt, paused (the reason of a pause on request); perhaps why. The worker has
stopped: the job is cancelled if that was asked for, else paused if there is a reason why or that
was asked for, else queued where it was. Returns 'ok' or 'lost'."""

PAUSE = once("""
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if status == 'queued' then
    pause(call.id, 'info', call.paused)
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
"""call: id; perhaps fields, to go on with if the job is paused. Returns the status before, or '' if
there is no such job."""

CANCEL = once("""
  if not is_job(call.id) then return '' end
  local status = field(call.id, 'status')
  if status == 'queued' or status == 'paused' then
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
"""call: id, deleted_ttl_s. Returns 'deleted', also if it was before; the status if the job has not
ended; '' if there is no such job."""

RECOVER = once("""
  if is_job(call.id) then return field(call.id, 'status') or '?' end
  if redis.call('EXISTS', DELETED .. call.id) == 1 then return 'deleted' end
  for name, value in pairs(call.fields) do set(call.id, name, value) end
  for step, checkpoint in pairs(call.checkpoints) do
    redis.call('HSET', checkpoints(call.id), step, checkpoint)
  end
  redis.call('ZADD', JOBS, call.fields.created_at, call.id)
  if call.why then
    pause(call.id, 'warning', call.why)
    return 'new paused'
  end
  become(call.id, 'succeeded', 'info', 'succeeded')
  redis.call('ZADD', ENDED, call.fields.finished_at, call.id)
  return 'new succeeded'
""")
"""call: id, fields, checkpoints (step -> JSON); perhaps why. Makes the record of a job that has
none: paused for the reason why, or else succeeded. Returns 'new ' and its status; the status that
it has already; or 'deleted' if the job was deleted."""

REGISTER = (
    _SHARED
    + """
local key = SAMPLER .. call.replica
local known = redis.call('GET', key)
local url = known and cjson.decode(known).url
if url and url ~= cjson.decode(call.registration).url then return url end
redis.call('SADD', SAMPLERS, call.replica)
redis.call('SET', key, call.registration, 'PX', call.lease_ms)
return 'ok'
"""
)
"""call: replica, registration (JSON), lease_ms. Registers the sampler, or renews its lease. Returns
'ok', or the URL of another sampler that has the name."""

UNREGISTER = (
    _SHARED
    + """
local known = redis.call('GET', SAMPLER .. call.replica)
if known and call.boot_id and cjson.decode(known).boot_id ~= call.boot_id then return 'other' end
redis.call('SREM', SAMPLERS, call.replica)
redis.call('DEL', SAMPLER .. call.replica)
return 'ok'
"""
)
"""call: replica; perhaps boot_id. Returns 'ok', also if it was not registered; 'other' if another
life of it than `boot_id` has the registration, which stays."""

REGISTERED = (
    _SHARED
    + """
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
"""
)
"""Returns a list of [replica, registration, milliseconds that are left], as JSON; {} for none.
Forgets those whose lease has ended."""

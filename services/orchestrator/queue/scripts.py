"""Every change of a job, as one atomic script each that Redis runs. Keys and the meaning of fields
are those of `store.py`.

    queued --start--> running --report--> succeeded, failed, cancelled
      ^  |               |
      |  +----pause------+----halt
      |                  v
      +----resume----- paused          cancel: queued and paused at once, running by way of the worker

A worker shows its attempt number; with an old one, or once the job does not run any more, nothing
is changed.
"""

from __future__ import annotations

_SHARED = """
local function event(job, type, level, message, data)
  redis.call('XADD', job .. ':events', '*', 'type', type, 'level', level, 'message', message, 'data', data, 'time', ARGV[1])
end
local function ended(job)
  local status = redis.call('HGET', job, 'status')
  return status == 'succeeded' or status == 'failed' or status == 'cancelled'
end
local function queue(job, id)
  redis.call('HSET', job, 'status', 'queued', 'entry', redis.call('XADD', 'hone:todo', '*', 'job', id))
  event(job, 'status', 'info', 'queued', '{"status": "queued"}')
end
local function drop(job)
  local entry = redis.call('HGET', job, 'entry')
  if entry then redis.call('XACK', 'hone:todo', 'workers', entry) redis.call('XDEL', 'hone:todo', entry) end
end
local function leave(job, status, level, message)
  redis.call('HSET', job, 'status', status)
  redis.call('HDEL', job, 'pause_requested')
  event(job, 'status', level, message, '{"status": "' .. status .. '"}')
  drop(job)
end
"""

# KEYS: job, key ('' for none). ARGV: now, id, fingerprint, ttl, field, value, ...
SUBMIT = (
    _SHARED
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return ARGV[2] .. ' ' .. ARGV[3] end
if KEYS[2] ~= '' then
  local known = redis.call('GET', KEYS[2])
  if known then return known end
  redis.call('SET', KEYS[2], ARGV[2] .. ' ' .. ARGV[3], 'EX', ARGV[4])
end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', 'hone:jobs', ARGV[1], ARGV[2])
queue(KEYS[1], ARGV[2])
return ARGV[2] .. ' ' .. ARGV[3]
"""
)

# KEYS: job. ARGV: now, owner, most tries without a step done, to-do entry. Returns the attempt, or
# 0 if there is nothing to do.
START = (
    _SHARED
    + """
local status = redis.call('HGET', KEYS[1], 'status')
if redis.call('HGET', KEYS[1], 'entry') ~= ARGV[4] or not (status == 'queued' or status == 'running') then
  redis.call('XACK', 'hone:todo', 'workers', ARGV[4]) redis.call('XDEL', 'hone:todo', ARGV[4])
  return 0
end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
if redis.call('HINCRBY', KEYS[1], 'tries', 1) > tonumber(ARGV[3]) then
  local why = 'gave up after ' .. ARGV[3] .. ' attempts in a row that were cut off before a step was done'
  redis.call('HSET', KEYS[1], 'error', why, 'finished_at', ARGV[1])
  leave(KEYS[1], 'failed', 'error', why)
  return 0
end
redis.call('HSET', KEYS[1], 'status', 'running', 'owner', ARGV[2])
redis.call('HSETNX', KEYS[1], 'started_at', ARGV[1])
event(KEYS[1], 'status', 'info', 'running', '{"status": "running", "attempt": ' .. attempt .. '}')
return attempt
"""
)

# KEYS: job. ARGV: now, attempt, owner. Returns -1 if the lease is lost, 1 if cancelling was asked
# for, 2 if pausing was, else 0.
BEAT = """
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'status') ~= 'running' then return -1 end
redis.call('XCLAIM', 'hone:todo', 'workers', ARGV[3], 0, redis.call('HGET', KEYS[1], 'entry'), 'JUSTID')
if redis.call('HGET', KEYS[1], 'cancel_requested') == '1' then return 1 end
return redis.call('HGET', KEYS[1], 'pause_requested') == '1' and 2 or 0
"""

# KEYS: job. ARGV: now, attempt, type, level, message, data, field, value, ... Returns 0 if the
# lease is lost.
REPORT = (
    _SHARED
    + """
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'status') ~= 'running' then return 0 end
for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[3] == 'step' then redis.call('HSET', KEYS[1], 'tries', 0) end
event(KEYS[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
if ended(KEYS[1]) then
  redis.call('HDEL', KEYS[1], 'pause_requested')
  drop(KEYS[1])
end
return 1
"""
)

# KEYS: job. ARGV: now, attempt, why, whether it was asked for ('1' or '0'). Returns 0 if the lease
# is lost. The worker has let go: the job is paused, unless it was cancelled meanwhile, or resumed
# before the pause that it was asked for came about.
HALT = (
    _SHARED
    + """
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'status') ~= 'running' then return 0 end
if redis.call('HGET', KEYS[1], 'cancel_requested') == '1' then
  redis.call('HSET', KEYS[1], 'finished_at', ARGV[1])
  leave(KEYS[1], 'cancelled', 'info', 'cancelled')
elseif ARGV[4] == '1' and redis.call('HGET', KEYS[1], 'pause_requested') ~= '1' then
  drop(KEYS[1])
  queue(KEYS[1], redis.call('HGET', KEYS[1], 'id'))
else
  redis.call('HSET', KEYS[1], 'error', ARGV[3])
  leave(KEYS[1], 'paused', ARGV[4] == '1' and 'info' or 'warning', ARGV[3])
end
return 1
"""
)

# KEYS: job. ARGV: now, why. Returns the status before.
PAUSE = (
    _SHARED
    + """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'queued' then
  redis.call('HSET', KEYS[1], 'error', ARGV[2])
  leave(KEYS[1], 'paused', 'info', ARGV[2])
elseif status == 'running' and redis.call('HGET', KEYS[1], 'pause_requested') ~= '1' then
  redis.call('HSET', KEYS[1], 'pause_requested', '1')
  event(KEYS[1], 'log', 'info', 'pausing', '{}')
end
return status
"""
)

# KEYS: job. ARGV: now. Returns the status before.
RESUME = (
    _SHARED
    + """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'paused' then
  redis.call('HSET', KEYS[1], 'tries', 0, 'recoveries', 0)
  redis.call('HDEL', KEYS[1], 'error')
  queue(KEYS[1], redis.call('HGET', KEYS[1], 'id'))
elseif status == 'running' and redis.call('HDEL', KEYS[1], 'pause_requested') == 1 then
  event(KEYS[1], 'log', 'info', 'not pausing after all', '{}')
end
return status
"""
)

# KEYS: job. ARGV: now. Returns the status before.
CANCEL = (
    _SHARED
    + """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'queued' or status == 'paused' then
  redis.call('HSET', KEYS[1], 'cancel_requested', '1', 'finished_at', ARGV[1])
  redis.call('HDEL', KEYS[1], 'error')
  leave(KEYS[1], 'cancelled', 'info', 'cancelled')
elseif status == 'running' and redis.call('HGET', KEYS[1], 'cancel_requested') ~= '1' then
  redis.call('HSET', KEYS[1], 'cancel_requested', '1')
  event(KEYS[1], 'log', 'info', 'cancelling after the call under way', '{}')
end
return status
"""
)

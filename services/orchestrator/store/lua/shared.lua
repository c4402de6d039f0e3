-- The beginning of every script, after the names of the keys (keys.py): reading the arguments, and
-- the building blocks of a job's changes.
--
-- A script's arguments are one JSON object of texts, `call`. In a Redis that is not `call.store`
-- a script changes nothing and returns 'emptied'. Besides, every `call` has now (Unix seconds),
-- keep_jobs and keep_events.

local call = cjson.decode(ARGV[1])

if call.store and redis.call('GET', STORE) ~= call.store then return 'emptied' end

local function job(id) return JOB .. id end
local function events(id) return job(id) .. EVENTS end
local function checkpoints(id) return job(id) .. CHECKPOINTS end

local function field(id, name) return redis.call('HGET', job(id), name) end
local function set(id, ...) redis.call('HSET', job(id), ...) end
local function asked(id, what) return field(id, what .. '_requested') == '1' end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

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

-- Sets the status, and adds an event.
local function become(id, status, level, message)
  set(id, 'status', status)
  event(id, 'status', level, message, cjson.encode({status = status}))
end

-- The places on a trainer and its samplers: a job has the first, and jobs that share them with it
-- have others. The key of a lease ends with its place.
local PLACES = {''}
for number = 2, MAX_PLACES do PLACES[number] = '#' .. number end

-- The attempts that have one of these resources (with blanks between), by place.
local function holders(resources)
  local found = {}
  for name in string.gmatch(resources, '%S+') do
    for _, place in ipairs(PLACES) do
      found[place] = redis.call('GET', LEASE .. name .. place) or found[place]
    end
  end
  return found
end

local function are_taken(resources) return next(holders(resources)) ~= nil end

-- Gives the caller a lease on a place of all of these resources; returns its attempt. Attempts are
-- at least the Unix seconds, so that none is given twice even if Redis is emptied.
local function lease(resources, place)
  local last, now = redis.call('INCR', ATTEMPTS), tonumber(redis.call('TIME')[1])
  local attempt = string.format('%d', math.max(last, now))
  redis.call('SET', ATTEMPTS, attempt)
  for name in string.gmatch(resources, '%S+') do
    redis.call('SET', LEASE .. name .. place, attempt, 'PX', call.lease_ms)
  end
  return attempt
end

-- The key of the job's latest lease on one of its resources.
local function lease_on(id, name) return LEASE .. name .. (field(id, 'trainer_place') or '') end

-- Whether the job's latest lease is valid.
local function is_leased(id)
  local attempt, trainer = field(id, 'attempt'), field(id, 'trainer')
  return attempt and trainer and redis.call('GET', lease_on(id, trainer)) == attempt
end

-- Whether the caller has the job.
local function is_mine()
  return is_job(call.id) and field(call.id, 'status') == 'running'
    and field(call.id, 'attempt') == call.attempt and is_leased(call.id)
end

-- The leases on the job's samplers that are still the job's.
local function samplers(id)
  local own = {}
  for name in string.gmatch(field(id, 'samplers') or '', '%S+') do
    local key = lease_on(id, name)
    if redis.call('GET', key) == field(id, 'attempt') then own[#own + 1] = key end
  end
  return own
end

-- Notes what the job waits for; nil: nothing.
local function wait(id, what)
  if what then set(id, 'waits', what) else redis.call('HDEL', job(id), 'waits') end
end

-- Frees the trainer and the samplers, if they are the job's.
local function free(id)
  wait(id, nil)
  if not is_leased(id) then return end
  for _, key in ipairs(samplers(id)) do redis.call('DEL', key) end
  redis.call('DEL', lease_on(id, field(id, 'trainer')))
end

-- Whether the job waits for a worker: it is queued, or its worker is gone.
local function is_waiting(id)
  local status = is_job(id) and field(id, 'status')
  return status == 'queued' or status == 'running' and not is_leased(id)
end

-- The score in the lists: priority, then age. A whole number of less than 53 bits.
local function place(id)
  local submitted_ms = field(id, 'submitted_ms') or (field(id, 'created_at') or 0) * 1000
  return math.floor(submitted_ms) - (field(id, 'priority') or 0) * 2^42
end

local function leave_queue(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('ZREM', BEGUN, id)
end

-- The interrupted jobs, which continue before any other begins.
local function begun_waiting()
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', BEGUN, 0, -1)) do
    if is_waiting(id) then found[#found + 1] = id end
  end
  return found
end

-- A registration of a trainer; nil if it cannot be read: another version may have written it.
local function read_trainer(registration)
  local is_read, found = pcall(cjson.decode, registration)
  if not is_read or type(found) ~= 'table' then return end
  if type(found.trainer) ~= 'string' or type(found.samplers) ~= 'string' then return end
  local away = type(found.away) == 'string' and found.away or nil
  return {trainer = found.trainer, samplers = found.samplers, away = away}
end

-- The registered trainers: trainer, samplers; perhaps away.
local function trainers()
  local all = {}
  for _, name in ipairs(redis.call('SMEMBERS', TRAINERS)) do
    local registration = redis.call('GET', TRAINER .. name)
    local found = registration and read_trainer(registration)
    if found then
      all[#all + 1] = found
    elseif not registration then
      redis.call('SREM', TRAINERS, name)
    end
  end
  return all
end

-- Whether the registered trainer is about to take a job.
local function is_free(registered)
  return not registered.away and not are_taken(registered.trainer .. ' ' .. registered.samplers)
end

local function enqueue(id)
  redis.call('ZREM', BEGUN, id)
  redis.call('ZADD', QUEUE, place(id), id)
  local before = #begun_waiting() + redis.call('ZRANK', QUEUE, id)
  become(id, 'queued', 'info', before == 0 and 'queued' or 'queued, ' .. before .. ' before it')
end

local function begin(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('ZADD', BEGUN, place(id), id)
  wait(id, nil)
end

-- Pauses the job. `reason` is 'requested', 'preempted' or 'error'; `why` is its sentence.
local function pause(id, level, reason, why)
  leave_queue(id)
  redis.call('HDEL', job(id), 'pause_requested', 'waits')
  set(id, 'error', why, 'pause_reason', reason)
  become(id, 'paused', level, why)
end

-- The job's place among the unended jobs of its API key. A job of HONE_TOKEN has none.
local function note_unended(id)
  local name = field(id, 'submitted_by')
  if name then redis.call('ZADD', UNENDED, 0, name .. '/' .. id) end
end

local function note_ended(id)
  local name = is_job(id) and field(id, 'submitted_by')
  if name then redis.call('ZREM', UNENDED, name .. '/' .. id) end
end

-- How many jobs of the API key have not ended: '0' is the character after '/'.
local function num_unended(name)
  return redis.call('ZLEXCOUNT', UNENDED, '[' .. name .. '/', '(' .. name .. '0')
end

local function forget(id)
  note_ended(id)
  local key = is_job(id) and field(id, 'key')
  if key and string.find(redis.call('GET', KEY .. key) or '', id .. ' ', 1, true) == 1 then
    redis.call('DEL', KEY .. key)
  end
  redis.call('DEL', job(id), events(id), checkpoints(id))
  for _, list in ipairs({JOBS, QUEUE, BEGUN, ENDED}) do redis.call('ZREM', list, id) end
end

-- Forgets ended jobs until no more than call.keep_jobs are left: each time the oldest job of the
-- API key with most of them, so that one key's jobs do not displace all others'.
local function forget_ended()
  local ended, jobs_of = redis.call('ZRANGE', ENDED, 0, -1), {}
  local num_left = #ended - tonumber(call.keep_jobs)
  if num_left <= 0 then return end
  for i = #ended, 1, -1 do -- so that each one's oldest job is the last
    local name = is_job(ended[i]) and field(ended[i], 'submitted_by') or ''
    jobs_of[name] = jobs_of[name] or {}
    table.insert(jobs_of[name], {id = ended[i], place = i})
  end
  for _ = 1, num_left do
    local most
    for _, jobs in pairs(jobs_of) do
      local is_older = most and #jobs == #most and jobs[#jobs].place < most[#most].place
      if not most or #jobs > #most or is_older then most = jobs end
    end
    forget(table.remove(most).id)
  end
end

-- Cleans up after a job that has just ended.
local function close(id)
  set(id, 'finished_at', call.now)
  redis.call('HDEL', job(id), 'pause_requested')
  leave_queue(id)
  note_ended(id)
  local newest = redis.call('ZRANGE', ENDED, -1, -1, 'WITHSCORES')[2] -- clocks go back
  redis.call('ZADD', ENDED, math.max(call.now, tonumber(newest or 0)), id)
  forget_ended()
end

local function pause_on_request(id) pause(id, 'info', 'requested', 'paused on request') end

local function cancel(id)
  redis.call('HDEL', job(id), 'error', 'pause_reason')
  become(id, 'cancelled', 'info', 'cancelled')
  close(id)
end

-- Cancels or pauses a job without a worker if that was requested; returns whether it was.
local function stopped(id)
  if asked(id, 'cancel') then
    cancel(id)
  elseif asked(id, 'pause') then
    pause_on_request(id)
  else
    return false
  end
  return true
end

-- Runs `act` once for each call, and returns its answer. A caller whose connection broke before the
-- answer came sends the same call again: it gets the first answer, which `hone:call:<call>` keeps.
-- The answer '' means that nothing was changed, and is not kept.
local function once(act)
  local known = redis.call('GET', KEYS[1])
  if known then return known end
  local answer = act()
  if answer ~= '' then redis.call('SET', KEYS[1], answer, 'EX', CALL_TTL_S) end
  return answer
end

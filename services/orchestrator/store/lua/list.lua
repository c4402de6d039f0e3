-- Finds the newest matching jobs that are older than job `after`.
-- call: limit, names (JSON: of the fields to return); perhaps after (a job's id) and after_score
--   (when it was made, for a deleted job), status, name, openai, submitted_by (a key's name, or
--   '' for HONE_TOKEN), metadata (JSON: a table, or null for jobs without any).
-- Returns JSON: `jobs`, each with its id and its fields (false for a missing field); and if there
-- are more jobs, `next_after`, the last job's id and score. Returns 'unknown' if there is neither a
-- job `after` nor a score.

local names = cjson.decode(call.names)
local wanted = call.metadata and cjson.decode(call.metadata)

local PIECE = 256 -- ids that are read at a time

local function has_metadata(id)
  local metadata = cjson.decode(field(id, 'metadata') or '{}')
  if wanted == cjson.null then return next(metadata) == nil end
  for name, value in pairs(wanted) do
    if metadata[name] ~= value then return false end
  end
  return true
end

local function fits(id)
  if call.name and string.match(id, '^(.*)%-') ~= call.name then return false end
  -- pcall: a key that is no hash has no status
  if call.status and redis.pcall('HGET', job(id), 'status') ~= call.status then return false end
  if not (call.openai or wanted or call.submitted_by) then
    return redis.call('EXISTS', job(id)) == 1
  end
  return is_job(id) and (not call.openai or field(id, 'openai'))
    and (not call.submitted_by or (field(id, 'submitted_by') or '') == call.submitted_by)
    and (not wanted or has_metadata(id))
end

local function place_after(id, score)
  local rank = redis.call('ZREVRANK', JOBS, id)
  if rank then return rank + 1 end
  return score and redis.call('ZCOUNT', JOBS, '(' .. score, '+inf')
end

local found, at = {}, 0
if call.after then at = place_after(call.after, call.after_score) end
if not at then return 'unknown' end
while true do
  local ids = redis.call('ZREVRANGE', JOBS, at, at + PIECE - 1)
  for _, id in ipairs(ids) do
    if fits(id) then
      if #found == tonumber(call.limit) then
        local last = found[#found][1]
        local cursor = last .. ':' .. redis.call('ZSCORE', JOBS, last)
        return cjson.encode({jobs = found, next_after = cursor})
      end
      found[#found + 1] = {id, is_job(id) and redis.call('HMGET', job(id), unpack(names))}
    end
  end
  if #ids < PIECE then return cjson.encode({jobs = found}) end
  at = at + PIECE
end

-- Returns the interrupted jobs (begun, without a worker now) as JSON, with each one's latest
-- trainer.

local found = {}
for _, id in ipairs(begun_waiting()) do found[id] = field(id, 'trainer') or '' end
return cjson.encode(found)

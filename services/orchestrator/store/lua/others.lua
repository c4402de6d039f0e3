-- call: name.
-- Returns the notes of the other workers, as JSON; {} for none.

local others = {}
for _, slot in ipairs(known_slots()) do
  if slot.name ~= call.name then others[#others + 1] = slot end
end
return cjson.encode(others)

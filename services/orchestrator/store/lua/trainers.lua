-- Returns the registered trainers as JSON, each with `free`: whether it takes a job now; {} for none.

local all = trainers()
for _, each in ipairs(all) do each.free = is_free(each) end
return cjson.encode(all)

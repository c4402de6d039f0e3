-- Returns the registered trainers as JSON; {} for none.

return cjson.encode(trainers())

-- Adds an event, and sets fields of the record.
-- call: id, attempt, type, level, message, data, fields; perhaps step (of the event), and
--   missing_only (do nothing if that step has an event of the type).
-- Returns 'ok' or 'lost'.

return once(function()
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
end)

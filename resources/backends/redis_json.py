"""The part of scripts that puts members into a JSON object, without decoding it."""

JSON = r"""
-- The place behind the JSON value that begins at `at`.
local function behind(text, at)
  local depth = 0
  repeat
    local c = sub(text, at, at)
    if c == '"' then
      repeat
        at = find(text, '["\\]', at + 1)
        if not at then return nil end
        local quote = sub(text, at, at) == '"'
        if not quote then at = at + 1 end
      until quote
      at = at + 1
    elseif c == "{" or c == "[" then
      depth, at = depth + 1, at + 1
    elseif c == "}" or c == "]" then
      depth, at = depth - 1, at + 1
    elseif depth > 0 then
      at = find(text, '["{}%[%]]', at + 1)
    else
      at = find(text, "[,}%]%s]", at)
    end
  until not at or depth == 0
  return at
end

-- A JSON object with members (names and values at these places) in place of those of the same names.
local function merged(field, text, from, to)
  local new, parts = {}, {}
  for i = from, to, 2 do new[args[i]] = true end
  local at = match(text, "^%s*{()")
  if not at then refuse("column " .. field .. " holds no JSON object") end
  at = match(text, "^%s*()", at)
  while sub(text, at, at) == '"' do
    local ended = behind(text, at)
    local name = ended and sub(text, at, ended - 1)
    local value = ended and match(text, "^%s*:%s*()", ended)
    ended = value and behind(text, value)
    if not ended then refuse("column " .. field .. " holds a text that is no JSON") end
    if not new[name] then parts[#parts + 1] = name .. ":" .. sub(text, value, ended - 1) end
    at = match(text, "^%s*,?%s*()", ended)
  end
  for i = from, to, 2 do parts[#parts + 1] = args[i] .. ":" .. args[i + 1] end
  return "{" .. table.concat(parts, ",") .. "}"
end
"""

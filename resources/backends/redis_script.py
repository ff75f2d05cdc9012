"""The one script that changes records: a key's entries in order, each whole or not at all, with one answer each.

Beside the columns a hash may have fields that conditions need: `adjunct_time` and `adjunct_tie` of the newest entry
applied (`adjunct_newest_by` names the column of that time), `adjunct_marks` (the greatest position applied of each
source, as JSON) and `adjunct_deleted`, with which the hash is no record but what a delete left (a tombstone). All
changes keep them, those without conditions, too.

Arguments: the kind, how many entries there are, and what is compared of times ("n" digits, "f" doubles, "b" bytes, "-"
nothing), marks ("m" or "-"), the column of the time, seconds that tombstones stay (0: for good).
Then for each entry, in this order and where it applies: time, tie; source, position; how many arguments follow that are
its own. Of puts these are fields and values. Of updates: how many there are of the default, and it (fields and values);
how many there are to set, and they; then "add", field, how ("n" or "f"), number, least, most; "append", field, most
bytes, items of a JSON list; "merge", field, most bytes, how many arguments follow, names and values of a JSON object;
"remove", field.

Lua's numbers are doubles and its `<` on texts follows the server's locale. So numbers are compared and added by their
digits, except that floats are added as doubles, and texts are compared by their bytes. JSON is not decoded, because it
would come back otherwise (large integers, empty lists): its lists and objects are put together as texts.
"""

DONE, SKIPPED, MISSING, BEGUN = 1, 2, 3, 4

SCRIPT = r"""
local key, args, call = KEYS[1], ARGV, redis.call
local kind, count, compares, marked = args[1], tonumber(args[2]), args[3], args[4]
local time_column, horizon = args[5], args[6]
local sub, rep, match, find = string.sub, string.rep, string.match, string.find
local format, byte, max = string.format, string.byte, math.max
local NULL, REFUSED = "\0", "adjunct refuses: "

-- End the entry before it has changed anything, and say why.
local function refuse(why) error(REFUSED .. why, 0) end

local function bytes_below(a, b)
  if a == b then return false end
  local i, n = 1, math.min(#a, #b)
  while i <= n and sub(a, i, i + 15) == sub(b, i, i + 15) do i = i + 16 end
  while i <= n do
    local x, y = byte(a, i), byte(b, i)
    if x ~= y then return x < y end
    i = i + 1
  end
  return #a < #b
end

local function parsed(text)
  local sign, whole, part = match(text, "^(-?)0*(%d+)%.?(%d*)$")
  if not sign then refuse("a text that is no number is where one is expected: " .. sub(text, 1, 40)) end
  return sign, whole, part
end

local function digits_below(a, b)
  local sa, ia, fa = parsed(a)
  local sb, ib, fb = parsed(b)
  if sa ~= sb then return sa == "-" and match(a .. b, "[1-9]") ~= nil end
  if sa == "-" then ia, fa, ib, fb = ib, fb, ia, fa end
  if #ia ~= #ib then return #ia < #ib end
  if ia ~= ib then return bytes_below(ia, ib) end
  local n = max(#fa, #fb)
  return bytes_below(fa .. rep("0", n - #fa), fb .. rep("0", n - #fb))
end

local function doubles_below(a, b)
  local x, y = tonumber(a), tonumber(b)
  if not x or not y then refuse("a text that is no number is where a time is expected") end
  return x < y
end

local below = ({ n = digits_below, f = doubles_below, b = bytes_below })[compares]

local function sum(a, b)
  if #a < 16 and #b < 16 and match(a, "^-?%d+$") and match(b, "^-?%d+$") then
    return format("%.0f", tonumber(a) + tonumber(b))
  end
  local sa, ia, fa = parsed(a)
  local sb, ib, fb = parsed(b)
  local scale = max(#fa, #fb)
  local x, y = ia .. fa .. rep("0", scale - #fa), ib .. fb .. rep("0", scale - #fb)
  local width = (math.floor(max(#x, #y) / 14) + 1) * 14  -- 14 digits at a time are exact; the first are 0
  x, y = rep("0", width - #x) .. x, rep("0", width - #y) .. y
  local sign, way = sa, 1
  if sa ~= sb then
    way = -1
    if bytes_below(x, y) then x, y, sign = y, x, sb end
  end
  local chunks, carry = {}, 0
  for i = width - 13, 1, -14 do
    local n = tonumber(sub(x, i, i + 13)) + way * tonumber(sub(y, i, i + 13)) + carry
    carry = 0
    if n >= 1e14 then n, carry = n - 1e14, 1 elseif n < 0 then n, carry = n + 1e14, -1 end
    chunks[(i + 13) / 14] = format("%014.0f", n)
  end
  local digits = table.concat(chunks)
  local text = match(sub(digits, 1, width - scale), "^0*(%d+)$")
  if scale > 0 then text = text .. "." .. sub(digits, width - scale + 1) end
  if sign == "-" and match(text, "[1-9]") then return "-" .. text end
  return text
end

local function within(field, text, most)
  if #text > tonumber(most) then
    refuse("column " .. field .. " would have " .. #text .. " bytes, and " .. most .. " are allowed")
  end
end

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

local function set(from, to)
  for i = from, to, 4000 do call("HSET", key, unpack(args, i, math.min(i + 3999, to))) end
end

-- Make the fields at these places the record, whatever there is; what conditions keep stays.
local function replace(from, to)
  set(from, to)
  if call("HLEN", key) == (to - from + 1) / 2 then return end
  local new, gone, tombstone = {}, {}, false
  for i = from, to, 2 do new[args[i]] = true end
  for _, name in ipairs(call("HKEYS", key)) do
    if name == "adjunct_deleted" then tombstone = true end
    if not new[name] and (name == "adjunct_deleted" or sub(name, 1, 8) ~= "adjunct_") then gone[#gone + 1] = name end
  end
  if gone[1] then call("HDEL", key, unpack(gone)) end
  if tombstone then call("PERSIST", key) end
end

local function there()
  return call("HEXISTS", key, "adjunct_deleted") == 0 and call("EXISTS", key) == 1
end

local function update(at, to)
  local default = tonumber(args[at])
  local default_from, default_to = at + 1, at + default
  local set_from = default_to + 2
  local set_to = set_from + tonumber(args[default_to + 1]) - 1
  local begin = not there()
  if begin and default == 0 then return 3 end
  local function current(field)
    local text = false
    if begin then
      for i = default_from, default_to, 2 do if args[i] == field then text = args[i + 1] end end
    else
      text = call("HGET", key, field)
    end
    return text and text ~= NULL and text
  end
  local changed, removed = {}, {}
  at = set_to + 1
  while at <= to do
    local what, field = args[at], args[at + 1]
    if what == "add" then
      local text, how, number, least, most = current(field), args[at + 2], args[at + 3], args[at + 4], args[at + 5]
      if how == "f" then
        local x = tonumber(text or "0")
        if not x then refuse("column " .. field .. " holds a text that is no number") end
        text = format("%.17g", x + tonumber(number))
      else
        text = sum(text or "0", number)
        if most ~= "" and (digits_below(text, least) or digits_below(most, text)) then
          refuse("column " .. field .. " would become " .. text .. ", which is beyond its type")
        end
      end
      changed[#changed + 1], changed[#changed + 2] = field, text
      at = at + 6
    elseif what == "append" then
      local text, items = current(field) or "[]", args[at + 3]
      if sub(text, 1, 1) ~= "[" then refuse("column " .. field .. " holds no list") end
      text = text == "[]" and "[" .. items .. "]" or sub(text, 1, -2) .. "," .. items .. "]"
      within(field, text, args[at + 2])
      changed[#changed + 1], changed[#changed + 2] = field, text
      at = at + 4
    elseif what == "merge" then
      local last = at + 3 + tonumber(args[at + 3])
      local text = merged(field, current(field) or "{}", at + 4, last)
      within(field, text, args[at + 2])
      changed[#changed + 1], changed[#changed + 2] = field, text
      at = last + 1
    else
      removed[#removed + 1] = field
      at = at + 2
    end
  end
  if begin then replace(default_from, default_to) end
  if set_to >= set_from then set(set_from, set_to) end
  if changed[1] then call("HSET", key, unpack(changed)) end
  if removed[1] then call("HDEL", key, unpack(removed)) end
  return begin and 4 or 1
end

local function bury(kept)
  call("DEL", key)
  call("HSET", key, "adjunct_deleted", "1", unpack(kept))
  if horizon ~= "0" then call("EXPIRE", key, horizon) end
end

local function delete()
  local kept, names = {}, { "adjunct_newest_by", "adjunct_time", "adjunct_tie", "adjunct_marks" }
  for i, value in ipairs(call("HMGET", key, unpack(names))) do
    if value then kept[#kept + 1], kept[#kept + 2] = names[i], value end
  end
  if kept[1] or below or marked == "m" then bury(kept) else call("DEL", key) end
end

local function newer(time, tie)
  local known = call("HMGET", key, "adjunct_newest_by", "adjunct_time", "adjunct_tie", time_column)
  local before, tied = known[2], known[3]
  if known[1] ~= time_column then before, tied = known[4], "" end
  if not before or before == NULL or below(before, time) then return true end
  return not below(time, before) and not bytes_below(tie, tied)
end

local function apply(time, tie, source, position, from, to)
  local marks
  if source then
    local stored = call("HGET", key, "adjunct_marks")
    marks = stored and cjson.decode(stored) or {}
    if not bytes_below(marks[source] or "", position) then return 2 end
  end
  if below and not newer(time, tie) then return 2 end
  local answer = 1
  if kind == "put" then
    replace(from, to)
  elseif kind == "delete" then
    delete()
  elseif kind == "update" then
    answer = update(from, to)
  elseif there() then
    answer = 2
  else
    replace(from, to)
  end
  if answer ~= 1 and answer ~= 4 then return answer end
  if below then call("HSET", key, "adjunct_newest_by", time_column, "adjunct_time", time, "adjunct_tie", tie) end
  if marks then
    marks[source] = position
    call("HSET", key, "adjunct_marks", cjson.encode(marks))
  end
  return answer
end

local at, answers = 7, {}
for n = 1, count do
  local time, tie, source, position
  if below then time, tie, at = args[at], args[at + 1], at + 2 end
  if marked == "m" then source, position, at = args[at], args[at + 1], at + 2 end
  local to = at + tonumber(args[at])
  local well, answer = pcall(apply, time, tie, source, position, at + 1, to)
  if not well then
    if type(answer) == "table" then answer = answer.err end
    -- What a command refuses (another type is there, no memory) it refuses of the first entry: it is about all of them.
    if sub(answer, 1, #REFUSED) ~= REFUSED then return { err = answer } end
    answer = sub(answer, #REFUSED + 1)
  end
  answers[n], at = answer, to + 1
end
return count == 1 and answers[1] or answers
"""

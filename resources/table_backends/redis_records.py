r"""How Redis stores records: the text of each column, and the scripts that change records.

Null, a missing column and an empty text have different texts:

    null        one byte 0 (a text or binary that begins with that byte gets another one in front)
    string      UTF-8                               timestamp   2013-07-01T05:00:00.250000Z
    integers    17                                  date        2013-07-01
    floats      0.1 (the shortest text of a double) decimal     12.50 (all digits of its scale)
    boolean     true, false                         binary      its bytes
    json        JSON                                array<type> JSON; times and decimals in it as
                                                    texts

Values are read back unchanged. Equal values have equal texts, so the hash of a key has one name.
The texts of timestamps, dates and strings sort like the values.

One call of a script applies entries of one key, in order, each entirely or not at all, and returns
an answer for each.

Besides columns a hash may have fields for conditions: `adjunct_time` and `adjunct_tie` of the
newest entry applied (`adjunct_newest_by` names the column of that time), `adjunct_marks` (the
greatest position applied of each source, as lines "\nsource\tposition") and `adjunct_deleted`,
which makes the hash a tombstone of a delete. All changes keep them, also those without conditions.

A script's arguments are the number of entries, the column of the time, for how many seconds
tombstones stay (0: forever), and a column of the key. Then there are for each entry

    time, tie              with `newest_by`
    source, position       with `idempotent`
    count                  the number of the entry's arguments that follow: none for a delete
    field, value, …        for a put
    count, field, value, … for an update: the default
    count, field, value, … for an update: what to set
    "add", field, how to add ("n": by digits, "f": as doubles), number, least sum, greatest sum
    "append", field, greatest number of bytes, the items of a JSON list
    "merge", field, greatest number of bytes, count, name, value, … of a JSON object
    "inside", field, greatest number of bytes, how to change ("set", or add as "n", "f", or "q", by
        digits in quotes), count, the JSON of the names that lead to the value, …, the JSON of the
        value or the number, least sum, greatest sum
    "remove", field

where the last five, for an update, can occur several times. Counts are of single arguments.

Lua's numbers are doubles and its `<` on texts follows the server's locale. So numbers are compared
and added by their digits, except floats, which are added as doubles, and texts are compared by
bytes. JSON is not decoded, because it would change (large integers, empty lists): its lists and
objects are concatenated as texts.

Creating functions that an entry does not need takes a server longer than running it; so a script
contains only the parts that its requests need, and there are several scripts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, NamedTuple

from dagster_adjunct.resources.schemas.types import Type
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    Kind,
    decimal_writer,
    integer_bits,
    nested_form,
    number_bounds,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    json_reader,
    json_writer,
    read_json,
    write_json,
)
from dagster_adjunct.resources.tables.operation import OperationKind

NULL = b"\0"
_LONGEST_DECIMAL = 1000  # digits before or after the point in a column that declares none


@dataclass(frozen=True, slots=True)
class RedisColumn:
    """How values of a column are stored and read back, and how scripts compare and add them.

    `encode` turns a checked value into a text; it raises ValueError, naming the limit, for a
    decimal with too many digits. `compares` is how two texts are compared: "n" as numbers by their
    digits, "f" as doubles, "b" by bytes, "-" not at all. `least` and `most` are the bounds of sums.
    """

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    compares: str
    least: bytes = b""
    most: bytes = b""


def to_redis_column(column: Column) -> RedisColumn:
    """Return how values of a declared column, or inside one, are stored."""
    tree = nested_form(column)
    if tree is not None:
        return _nested_column(tree)
    if column.kind is Kind.INTEGER:
        most = 2 ** (integer_bits(column) - 1) - 1
        return RedisColumn(b"%d".__mod__, int, "n", b"%d" % (-most - 1), b"%d" % most)
    if column.kind is Kind.DECIMAL:
        return _decimal_column(column)
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _list_column(column.element)
    return _COLUMNS[column.kind]


def _nested_column(tree: Type) -> RedisColumn:
    """Return how values of a nested type are stored: as JSON."""
    to_json = json_writer(tree)
    from_json = json_reader(tree)
    return RedisColumn(
        lambda value: write_json(to_json(value)).encode(),
        lambda text: from_json(read_json(text)),
        "-",
    )


def _read_list(text: bytes) -> list[Any]:
    """Return the list that a JSON text holds; ValueError for other JSON."""
    values = json.loads(text)
    if not isinstance(values, list):
        raise ValueError("it holds no list")
    return values


def _list_column(element: Column) -> RedisColumn:
    """Return how lists are stored: as JSON, with values that JSON doesn't know as their texts."""
    if element.kind in (Kind.STRING, Kind.INTEGER, Kind.BOOLEAN):
        return RedisColumn(_dump_json, _read_list, "-")
    stored = to_redis_column(element)

    def decode(item: Any) -> Any:
        if item is None:
            return None
        if element.kind is Kind.FLOAT:
            return float(item)
        return stored.decode(item.encode())

    return RedisColumn(
        lambda values: _dump_json(values, default=lambda item: stored.encode(item).decode()),
        lambda text: list(map(decode, _read_list(text))),
        "-",
    )


def _decimal_column(column: Column) -> RedisColumn:
    """Return how decimals are stored: with all digits of the column's scale, or those that they
    have.
    """
    write = decimal_writer(column)
    bounds = number_bounds(column)
    if bounds is None:

        def any_scale(number: Decimal) -> bytes:
            exponent = number.as_tuple().exponent
            assert isinstance(exponent, int)  # it is finite
            if exponent < -_LONGEST_DECIMAL or number.adjusted() > _LONGEST_DECIMAL:
                raise ValueError(
                    f"expected at most {_LONGEST_DECIMAL} digits before and behind the point"
                )
            return format(number if number else number.copy_abs(), "f").encode()

        return RedisColumn(any_scale, _decimal_of, "n")
    return RedisColumn(
        lambda number: write(number).encode(),
        _decimal_of,
        "n",
        least=write(bounds.least).encode(),
        most=write(bounds.greatest).encode(),
    )


def _decimal_of(text: bytes) -> Decimal:
    """Return the number in a stored text."""
    return Decimal(text.decode())


def _escaped(text: bytes) -> bytes:
    """Return a text that is not taken for null, by another byte 0 in front if it begins with
    one.
    """
    if text[:1] == NULL:
        return NULL + text
    return text


def _unescaped(text: bytes) -> bytes:
    """Return the text that `_escaped` was given."""
    if text[:1] == NULL:
        return text[1:]
    return text


# with `newest_by` a time is encoded twice: for its column and for `adjunct_time`
@lru_cache(maxsize=16)
def _moment(moment: datetime) -> bytes:
    """Return an instant in UTC as stored text."""
    return moment.isoformat("T", "microseconds")[:-6].encode() + b"Z"  # without the +00:00 of UTC


def _dump_json(value: Any, default: Callable[[Any], str] | None = None) -> bytes:
    """Return a value as JSON, without spaces."""
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default
    ).encode()


_COLUMNS = {
    Kind.STRING: RedisColumn(
        lambda value: _escaped(value.encode()), lambda text: _unescaped(text).decode(), "b"
    ),
    Kind.FLOAT: RedisColumn(lambda value: float.__repr__(value).encode(), float, "f"),
    Kind.BOOLEAN: RedisColumn(
        lambda value: b"true" if value else b"false", lambda text: text == b"true", "-"
    ),
    Kind.TIMESTAMP: RedisColumn(
        _moment, lambda text: datetime.fromisoformat(text.decode()).astimezone(UTC), "b"
    ),
    Kind.DATE: RedisColumn(
        lambda day: day.isoformat().encode(), lambda text: date.fromisoformat(text.decode()), "b"
    ),
    Kind.BINARY: RedisColumn(_escaped, _unescaped, "-"),
    Kind.JSON: RedisColumn(_dump_json, json.loads, "-"),
}


JSON = r"""
-- The place after the JSON value that begins at `at`.
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

-- A JSON object whose members are replaced or added (names and values at these places).
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
    if not ended then refuse("column " .. field .. " holds text that is not JSON") end
    if not new[name] then parts[#parts + 1] = name .. ":" .. sub(text, value, ended - 1) end
    at = match(text, "^%s*,?%s*()", ended)
  end
  for i = from, to, 2 do parts[#parts + 1] = args[i] .. ":" .. args[i + 1] end
  return "{" .. table.concat(parts, ",") .. "}"
end
"""

INSIDE = r"""
-- A JSON object in which the value at a path (`names` from `n`) is what `make` returns for the one
-- that is there. An object on the way that is null or missing is created.
local function inside(field, text, names, n, make)
  local old, parts = nil, {}
  if text and text ~= "null" then
    local at = match(text, "^%s*{()")
    if not at then refuse("column " .. field .. " holds no JSON object at " .. names[n]) end
    at = match(text, "^%s*()", at)
    while sub(text, at, at) == '"' do
      local ended = behind(text, at)
      local name = ended and sub(text, at, ended - 1)
      local value = ended and match(text, "^%s*:%s*()", ended)
      ended = value and behind(text, value)
      if not ended then refuse("column " .. field .. " holds text that is not JSON") end
      local known = sub(text, value, ended - 1)
      if name == names[n] then old = known else parts[#parts + 1] = name .. ":" .. known end
      at = match(text, "^%s*,?%s*()", ended)
    end
  end
  if n == #names then old = make(old) else old = inside(field, old, names, n + 1, make) end
  parts[#parts + 1] = names[n] .. ":" .. old
  return "{" .. table.concat(parts, ",") .. "}"
end
"""

# Adds to a number inside an object.
_SUM_INSIDE = r"""
local function sum_inside(field, how, number, least, most)
  return function(old)
    if old == "null" then old = nil end
    if how == "q" then
      local digits = old and match(old, '^"(.*)"$')
      if old and not digits then refuse("column " .. field .. " holds no decimal to add to") end
      return '"' .. added(field, digits, "n", number, least, most) .. '"'
    end
    local text = added(field, old, how, number, least, most)
    if not match(text, "^-?%d") then refuse("column " .. field .. " would become " .. text) end
    return text
  end
end
"""
_NO_SUM_INSIDE = "local sum_inside\n"


# What a script answers for an entry; a text says why it rejects one.
DONE = 1
SKIPPED = 2
MISSING = 3
BEGUN = 4  # applied to the default, for lack of a record
_PUTS = (OperationKind.PUT, OperationKind.PUT_IF_ABSENT)


class Script(NamedTuple):
    """A script, and its SHA-1 digest in hexadecimal digits, by which it is called."""

    digest: bytes
    text: bytes


@cache
def build_script(
    kind: OperationKind,
    compares: str,
    marked: bool,
    changes: frozenset[str],
    *,
    fenced: bool = False,
) -> Script:
    """Return the script for an operation of this kind.

    `compares` is how times are compared (`RedisColumn.compares`; "-" without `newest_by`). `marked`
    says that the entries have positions, `fenced` that the last arguments are the epoch of a run.
    `changes` are those of "default", "add", "append", "merge", "inside" and "remove" that updates
    need; sums inside need "add", too.
    """
    timed = compares != "-"
    update = kind is OperationKind.UPDATE
    delete = kind is OperationKind.DELETE
    changing = bool(changes - {"default"})
    refuses = changing or compares in ("n", "f")  # stored texts may not fit
    # Whether the state of the hash matters: only a plain put writes whatever is there.
    looks = kind is not OperationKind.PUT or timed or marked
    # `Operation.applies_late_changes`.
    adds_late = timed and marked and bool({"add", "append"} & changes)
    parts = [
        (FENCE, fenced),
        (_PRELUDE, True),
        (_REFUSE, refuses),
        (_BYTES, timed or marked),
        (_DIGITS, compares == "n" or "add" in changes),
        (_DOUBLES, compares == "f"),
        (f"local below = {_BELOW.get(compares)}\n", timed),
        (_SUM, "add" in changes),
        (JSON, bool({"merge", "inside"} & changes)),
        (INSIDE, "inside" in changes),
        (_SUM_INSIDE, changes >= {"add", "inside"}),
        (_NO_SUM_INSIDE, changes & {"add", "inside"} == {"inside"}),
        (_WITHIN, bool({"append", "merge", "inside"} & changes)),
        (_SET, True),
        (_REMOVE_OTHERS, kind in _PUTS or "default" in changes),
        (_EXISTS, update or kind is OperationKind.PUT_IF_ABSENT),
        (_CHANGE, changing),
        ("local function apply(time, tie, source, position, from, to)\n", True),
        (_READ_STATE, looks),
        (_CHECK_MARKS, marked),
        (_CHECK_TIME if timed else "  local late\n", True),
        (_LATE_IS_SKIPPED, timed and not adds_late),
        (_LATE_NEEDS_A_RECORD, adds_late),
        (_PUT_IF_ABSENT, kind is OperationKind.PUT_IF_ABSENT),
        ("  local fields = {}\n", True),
        (_COLLECT_RECORD, kind in _PUTS),
        (_COLLECT_DELETE, delete),
        (_COLLECT_UPDATE, update),
        (_COLLECT_CHANGES, changing),
        (_STOP_IF_UNCHANGED, adds_late),
        (_KEEP_TIME, timed),
        (_KEEP_MARKS, marked),
        (_PUT, kind in _PUTS),
        (_DELETE, delete),
        (_UPDATE, update),
        ("end\n\nlocal at, answers = 5, {}\nfor n = 1, tonumber(args[1]) do\n", True),
        ("  local time, tie, source, position\n", True),
        ("  time, tie, at = args[at], args[at + 1], at + 2\n", timed),
        ("  source, position, at = args[at], args[at + 1], at + 2\n", marked),
        ("  local to = at + tonumber(args[at])\n", True),
        (
            (
                _APPLY_PROTECTED
                if refuses
                else "  answers[n] = apply(time, tie, source, position, at + 1, to)\n"
            ),
            True,
        ),
        ("  at = to + 1\nend\nreturn #answers == 1 and answers[1] or answers\n", True),
    ]
    text = "".join(part for part, needed in parts if needed).encode()
    return Script(hashlib.sha1(text, usedforsecurity=False).hexdigest().encode(), text)


FENCED = b"fenced"
"""What a script answers, with the epoch that it has found, instead of writing after a later run
has begun.
"""
# The last key is the book-keeping, the last arguments are the name of the application's epoch and
# the run's own.
FENCE = r"""
local known = tonumber(redis.call("HGET", KEYS[#KEYS], ARGV[#ARGV - 1]) or "0")
if known > tonumber(ARGV[#ARGV]) then return { "fenced", string.format("%.0f", known) } end
if known < tonumber(ARGV[#ARGV]) then
  redis.call("HSET", KEYS[#KEYS], ARGV[#ARGV - 1], ARGV[#ARGV])
end
"""

_PRELUDE = r"""
local key, args, call = KEYS[1], ARGV, redis.call
local time_column, horizon, key_column = args[2], args[3], args[4]
local sub, match, find = string.sub, string.match, string.find
local byte, rep, max = string.byte, string.rep, math.max
local NULL, REFUSED = "\0", "adjunct refuses: "
"""

_REFUSE = r"""
-- Reject the entry, before it has changed anything, with a reason.
local function refuse(why) error(REFUSED .. why, 0) end
"""

# Finds the first different byte in steps that get smaller, because extracting one byte costs as
# much as many.
_BYTES = r"""
local function bytes_below(a, b)
  if a == b then return false end
  local same, step = 0, 64
  while step >= 1 do
    local part = sub(a, same + 1, same + step)
    if #part == step and part == sub(b, same + 1, same + step) then
      same = same + step
    else
      step = step / 2
    end
  end
  local x, y = byte(a, same + 1), byte(b, same + 1)
  return y ~= nil and (x == nil or x < y)
end
"""

_DIGITS = r"""
local function parsed(text)
  local sign, whole, part = match(text, "^(-?)0*(%d+)%.?(%d*)$")
  if not sign then refuse("expected a number, found the text " .. sub(text, 1, 40)) end
  return sign, whole, part
end

local function digits_below(a, b)
  if #a < 16 and #b < 16 and not find(a .. b, "[^%d-]") then return tonumber(a) < tonumber(b) end
  local sa, ia, fa = parsed(a)
  local sb, ib, fb = parsed(b)
  if sa ~= sb then return sa == "-" and match(a .. b, "[1-9]") ~= nil end
  if sa == "-" then ia, fa, ib, fb = ib, fb, ia, fa end
  if #ia ~= #ib then return #ia < #ib end
  local n = max(#fa, #fb)
  ia, ib = ia .. fa .. rep("0", n - #fa), ib .. fb .. rep("0", n - #fb)
  for i = 1, #ia, 14 do  -- 14 digits at a time are exact
    local x, y = tonumber(sub(ia, i, i + 13)), tonumber(sub(ib, i, i + 13))
    if x ~= y then return x < y end
  end
  return false
end
"""

_DOUBLES = r"""
local function doubles_below(a, b)
  local x, y = tonumber(a), tonumber(b)
  if not x or not y then refuse("expected a time, found text that is not a number") end
  return x < y
end
"""

_BELOW = {"n": "digits_below", "f": "doubles_below", "b": "bytes_below"}

_SUM = r"""
local format = string.format

local function sum(a, b)
  if #a < 16 and #b < 16 and match(a, "^-?%d+$") and match(b, "^-?%d+$") then
    return format("%.0f", tonumber(a) + tonumber(b))
  end
  local sa, ia, fa = parsed(a)
  local sb, ib, fb = parsed(b)
  local scale = max(#fa, #fb)
  local x, y = ia .. fa .. rep("0", scale - #fa), ib .. fb .. rep("0", scale - #fb)
  -- 14 digits at a time are exact; the first are 0.
  local width = (math.floor(max(#x, #y) / 14) + 1) * 14
  x, y = rep("0", width - #x) .. x, rep("0", width - #y) .. y
  local sign, way = sa, 1
  if sa ~= sb then
    way = -1
    if digits_below(x, y) then x, y, sign = y, x, sb end
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

local function added(field, text, how, number, least, most)
  if how == "f" then
    local x = tonumber(text or "0")
    if not x then refuse("column " .. field .. " holds text that is not a number") end
    return format("%.17g", x + tonumber(number))
  end
  text = sum(text or "0", number)
  if most ~= "" and (digits_below(text, least) or digits_below(most, text)) then
    refuse("column " .. field .. " would become " .. text .. ", which is beyond its type")
  end
  return text
end
"""

_WITHIN = r"""
local function within(field, text, most)
  if #text > tonumber(most) then
    refuse(
      "column " .. field .. " would have " .. #text .. " bytes, and " .. most .. " are allowed"
    )
  end
  return text
end
"""

_SET = r"""
local function set(fields)
  for i = 1, #fields, 4000 do call("HSET", key, unpack(fields, i, math.min(i + 3999, #fields))) end
end
"""

_REMOVE_OTHERS = r"""
-- Remove fields that are not the record's, and the tombstone; fields of conditions stay.
local function clean(fields)
  local new, gone, tombstone = {}, {}, false
  for i = 1, #fields, 2 do new[fields[i]] = true end
  for _, name in ipairs(call("HKEYS", key)) do
    if name == "adjunct_deleted" then tombstone = true end
    local is_column = name == "adjunct_deleted" or sub(name, 1, 8) ~= "adjunct_"
    if is_column and not new[name] then gone[#gone + 1] = name end
  end
  if gone[1] then call("HDEL", key, unpack(gone)) end
  if tombstone then call("PERSIST", key) end
end
"""

# Whether there is a record: the hash has the key's field, or any other, and is no tombstone.
_EXISTS = r"""
local function there(known)
  return not known[1] and (known[2] or call("EXISTS", key) == 1)
end
"""

_CHANGE = r"""
-- Collect the fields that the changes at these places set, and those that they remove. Late changes
-- only add numbers and append.
local function change(at, to, current, fields, late)
  local removed, made = {}, {}
  while at <= to do
    local what, field, text = args[at], args[at + 1], nil
    if what == "add" then
      text = added(field, current(field), args[at + 2], args[at + 3], args[at + 4], args[at + 5])
      at = at + 6
    elseif what == "append" then
      local old, items = current(field) or "[]", args[at + 3]
      if sub(old, 1, 1) ~= "[" then refuse("column " .. field .. " holds no list") end
      local list = sub(old, 1, -2) .. "," .. items .. "]"
      if old == "[]" then list = "[" .. items .. "]" end
      text = within(field, list, args[at + 2])
      at = at + 4
    elseif what == "merge" then
      local last = at + 3 + tonumber(args[at + 3])
      text = not late
        and within(field, merged(field, current(field) or "{}", at + 4, last), args[at + 2])
      at = last + 1
    elseif what == "inside" then
      local how, names = args[at + 3], {}
      for i = 1, tonumber(args[at + 4]) do names[i] = args[at + 4 + i] end
      local last = at + 5 + #names
      local value, make = args[last], nil
      if how ~= "set" then
        make = sum_inside(field, how, value, args[last + 1], args[last + 2])
      elseif not late then
        make = function() return value end
      end
      if make then
        text = inside(field, made[field] or current(field), names, 1, make)
        made[field] = within(field, text, args[at + 2])
      end
      at = last + 3
    else
      if not late then removed[#removed + 1] = field end
      at = at + 2
    end
    if text then fields[#fields + 1], fields[#fields + 2] = field, text end
  end
  return removed
end
"""

_READ_STATE = r"""
  local known = call("HMGET", key, "adjunct_deleted", key_column, "adjunct_marks",
    "adjunct_newest_by", "adjunct_time", "adjunct_tie", time_column)
"""

_CHECK_MARKS = r"""
  local marks = known[3] or ""
  local _, before_last = find(marks, "\n" .. source .. "\t", 1, true)
  local last = before_last and match(marks, "^[^\n]*", before_last + 1) or ""
  if not bytes_below(last, position) then return 2 end
"""

_CHECK_TIME = r"""
  local before, tied = known[5], known[6]
  if known[4] ~= time_column then before, tied = known[7], "" end
  local late = before and before ~= NULL and not below(before, time)
    and (below(time, before) or bytes_below(tie, tied))
"""

_LATE_IS_SKIPPED = r"""
  if late then return 2 end
"""


_STOP_IF_UNCHANGED = r"""
  if late and not fields[1] then return 2 end
"""

_PUT_IF_ABSENT = r"""
  if there(known) then return 2 end
"""

_COLLECT_RECORD = r"""
  for i = from, to do fields[#fields + 1] = args[i] end
"""

# A tombstone keeps the fields of conditions.
_COLLECT_DELETE = r"""
  local names = {
    [3] = "adjunct_marks",
    [4] = "adjunct_newest_by",
    [5] = "adjunct_time",
    [6] = "adjunct_tie",
  }
  for i = 3, 6 do
    if known[i] then fields[#fields + 1], fields[#fields + 2] = names[i], known[i] end
  end
"""

_COLLECT_UPDATE = r"""
  local default = tonumber(args[from])
  local set_to = from + default + 1 + tonumber(args[from + default + 1])
  local begin = not there(known)
  local removed
  if begin and default == 0 then return 3 end
  if begin then
    for i = from + 1, from + default do fields[#fields + 1] = args[i] end
  end
  if not late then
    for i = from + default + 2, set_to do fields[#fields + 1] = args[i] end
  end
"""

_COLLECT_CHANGES = r"""
  local function current(field)
    local text = false
    if begin then
      for i = from + 1, from + default, 2 do if args[i] == field then text = args[i + 1] end end
    else
      text = call("HGET", key, field)
    end
    return text and text ~= NULL and text
  end
  removed = change(set_to + 1, to, current, fields, late)
"""

_KEEP_TIME = r"""
  if not late then
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3] = "adjunct_newest_by", time_column, "adjunct_time"
    fields[n + 4], fields[n + 5], fields[n + 6] = time, "adjunct_tie", tie
  end
"""

_KEEP_MARKS = r"""
  if before_last then
    marks = sub(marks, 1, before_last) .. position .. sub(marks, before_last + 1 + #last)
  else
    marks = marks .. "\n" .. source .. "\t" .. position
  end
  fields[#fields + 1], fields[#fields + 2] = "adjunct_marks", marks
"""

# Without a record, late additions are skipped and their mark is stored, so that a replay skips them
# too.
_LATE_NEEDS_A_RECORD = f"""
  if late and not there(known) then
    local default, fields = tonumber(args[from]), {{}}
    local set_to = from + default + 1 + tonumber(args[from + default + 1])
    change(set_to + 1, to, function() return false end, fields, true)
    if not fields[1] then return 2 end
    fields = {{}}
    {_KEEP_MARKS}
    set(fields)
    return 2
  end
"""

_PUT = r"""
  set(fields)
  if call("HLEN", key) ~= #fields / 2 then clean(fields) end
  return 1
"""

_DELETE = r"""
  call("DEL", key)
  if fields[1] then
    fields[#fields + 1], fields[#fields + 2] = "adjunct_deleted", "1"
    set(fields)
    if horizon ~= "0" then call("EXPIRE", key, horizon) end
  end
  return 1
"""

_UPDATE = r"""
  if fields[1] then set(fields) end
  if begin and known[1] then clean(fields) end
  if removed and removed[1] then call("HDEL", key, unpack(removed)) end
  return begin and 4 or 1
"""

_APPLY_PROTECTED = r"""
  local well, answer = pcall(apply, time, tie, source, position, at + 1, to)
  if not well then
    if type(answer) == "table" then answer = answer.err end
    -- Errors of commands (wrong type, no memory) come with the first entry and concern all of them.
    if sub(answer, 1, #REFUSED) ~= REFUSED then return { err = answer } end
    answer = sub(answer, #REFUSED + 1)
  end
  answers[n] = answer
"""

"""What orders changes: the columns or paths of `order_by`, and positions made of their values.

    one number                  an integer, a date, a timestamp, a log position: a bigint, as it is
    several values, and texts   a text that sorts as the values do, from the left

What a text stands for is decided by the first change, and kept: each later value must be of its kind.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

    from dagster_adjunct.resources.schemas.schema import Schema

# What is wrong with a change, in words: as columns of Spark's, and as plain texts of the same wording.
#
# A record's own values in a reason are marked, until `telling` or `told` shows or hides them.


_BEGINS, _ENDS = "\x02", "\x03"
_MARKED = re.compile(f"{_BEGINS}[^{_ENDS}]*{_ENDS}")
NO_PATH = "\x04"
"""What a reason begins with where a record lacks a path that `order_by` names: of the first change, it is an error."""
_UNMARKED = str.maketrans("", "", _BEGINS + _ENDS + NO_PATH)
_HIDDEN = "a value that is not told"
TRUNCATE = "a truncate deletes all rows at once, and a change is of one row: build the dataset anew"


def quote_column(value: Column) -> Column:
    """Return a text as reasons show it: quoted, its first 100 characters, or null."""
    from pyspark.sql import functions as F

    quoted = F.concat(F.lit("'"), F.substring(value, 1, 100), F.lit("'"))
    return F.coalesce(mark_column(quoted), F.lit("null"))


def mark_column(text: Column) -> Column:
    """Return a part of a reason that is a record's own; `telling` decides whether it is told."""
    from pyspark.sql import functions as F

    return F.concat(F.lit(_BEGINS), F.translate(text, _BEGINS + _ENDS, ""), F.lit(_ENDS))


def render_reason_column(reason: Column, *, values: bool) -> Column:
    """Return a reason with the values that stand in it (`shown`), or with a word in their places."""
    from pyspark.sql import functions as F

    if values:
        return F.translate(reason, _BEGINS + _ENDS + NO_PATH, "")
    return F.translate(F.regexp_replace(reason, f"{_BEGINS}[^{_ENDS}]*{_ENDS}", _HIDDEN), NO_PATH, "")


def unknown_operation_column(value: Column) -> Column:
    """Return the reason for an operation that is not declared."""
    from pyspark.sql import functions as F

    return F.concat(F.lit("unknown operation "), quote_column(value))


# -- the same in plain Python


def quote_value(value: str | None) -> str:
    """Return a text as reasons show it: quoted, its first 100 characters, or null."""
    return "null" if value is None else f"{_BEGINS}'{value[:100].translate(_UNMARKED)}'{_ENDS}"


def render_reason(reason: str | None, *, values: bool) -> str | None:
    """Return a reason with the values that stand in it (`shown_text`), or with a word in their places."""
    if reason is None:
        return None
    return (reason if values else _MARKED.sub(_HIDDEN, reason)).translate(_UNMARKED)


def unknown_operation_reason(value: str | None) -> str:
    """Return the reason for an operation that is not declared."""
    return f"unknown operation {quote_value(value)}"


Order = tuple[str, ...]
PositionType = Literal["bigint", "string"]
Samples = tuple[str | None, ...]
"""A value of each name in the order, as a text: what later ones are compared with. None: there was none yet."""

STREAMED_FIRST: Order = ("__snapshot", "__offset")
"""The order of changes by offset where a snapshot's row never replaces a streamed change, whichever comes first."""
SNAPSHOT_ROWS = -(2**62)
"""What is added to the offset of a snapshot's row: below all streamed changes, and in order among its own."""
LOWEST = -(2**63)

PATH = re.compile(r"source\.\w+|ts_(ms|us|ns)")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_WHOLE_DECIMAL = re.compile(r"decimal\(\d+,0\)")

# -- what Debezium's connectors send

ORDERS: dict[str, Order] = {
    "postgresql": ("source.lsn",),
    "mysql": ("source.file", "source.pos"),
    "mariadb": ("source.file", "source.pos"),
    "sqlserver": ("source.commit_lsn", "source.change_lsn"),
    "db2": ("source.commit_lsn", "source.change_lsn"),
    "informix": ("source.commit_lsn", "source.change_lsn"),
    "oracle": ("source.scn",),
    "mongodb": ("source.ts_ms", "source.ord"),
}
"""The order of each connector's changes."""

_TIMES = tuple(f"{block}ts_{unit}" for block in ("", "source.") for unit in ("ms", "us", "ns"))
_NUMBERS = ("source.lsn", "source.scn", *_TIMES)
_WITHIN = {
    "source.pos": "source.file",
    "source.row": "source.pos",
    "source.change_lsn": "source.commit_lsn",
    "source.event_serial_no": "source.change_lsn",
    "source.ord": "source.ts_ms",
    "source.ssn": "source.scn",
}
_UNORDERED = (
    "version", "connector", "name", "snapshot", "db", "schema", "table", "sequence", "txId", "xmin", "server_id",
    "thread", "query", "rs", "collection", "h", "lsid", "txnNumber", "rs_id", "redo_thread", "user_name", "row_id",
    "vgtid", "shard", "keyspace",
)  # fmt: skip


def order_as_code(order: Order) -> str:
    """Return an order as it is written in a declaration."""
    names = ", ".join(f'"{name}"' for name in order)
    return f"order_by={names}" if len(order) == 1 else f"order_by=[{names}]"


def describe_order(order: Order | None) -> str:
    """Return an order as errors tell it."""
    if order == STREAMED_FIRST:
        return "offset, with rows of snapshots below streamed changes"
    return "offset" if order is None else ", ".join(order)


def find_path_problem(order: Order, path: str) -> tuple[str, str] | None:
    """Return why a path of Debezium's envelopes can't stand in this order, and what to write; None where it can."""
    place, outer = order.index(path), _WITHIN.get(path)
    if outer is not None and outer not in order[:place]:
        wanted = (*order[:place], *_chain(outer), path)
        return f"{path!r} only orders what has the same {outer!r}", f"Write {order_as_code(wanted)}."
    if path == "source.file" and "source.pos" not in order[place:]:
        wanted = (*order[: place + 1], "source.pos", *order[place + 1 :])
        return "changes of one 'source.file' are ordered by 'source.pos'", f"Write {order_as_code(wanted)}."
    if path.removeprefix("source.") in _UNORDERED:
        known = "; ".join(f"{name}: {order_as_code(by)}" for name, by in ORDERS.items())
        return f"{path!r} does not say which of two changes is newer", f"Write what the connector orders by ({known})."
    return None


def _chain(path: str) -> Order:
    outer = _WITHIN.get(path)
    return (path,) if outer is None else (*_chain(outer), path)


# -- positions


def position_type(order: Order | None, rows: Schema) -> PositionType:
    """Return the type of positions: "bigint", or "string" where no single number orders."""
    if order is None or order == STREAMED_FIRST:
        return "bigint"
    if len(order) > 1:
        return "string"
    if order[0] in rows.names:
        kind = rows.field(order[0]).type
        return "bigint" if kind in (*_INTEGERS, "date", "timestamp") else "string"
    return "bigint" if order[0] in _NUMBERS else "string"


def is_orderable(kind: str) -> bool:
    """Whether values of this type can order changes; of texts the first change decides."""
    return kind in (*_INTEGERS, "date", "timestamp", "string") or _WHOLE_DECIMAL.fullmatch(kind) is not None


NUMBER_PATTERN = r"^[+-]?0*([0-9]{1,99})$"
_LSN = re.compile(r"^[0-9A-Fa-f]{1,32}(:[0-9A-Fa-f]{1,32})+$")
_POSTGRES_LSN = re.compile(r"^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$")
_BINLOG = re.compile(r"^([^\s:@]*[A-Za-z][^\s:@]*)\.[0-9]{1,20}(:[0-9]{1,20})?$")  # a time with a fraction is none
_GTID = re.compile(r"^([0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?::\w+)?):[0-9]{1,20}$")
_MARIADB_GTID = re.compile(r"^([0-9]+)-[0-9]+-[0-9]{1,20}$")
_PART, _HEX = "0*([0-9]{1,20})", "0*([0-9A-Fa-f]{1,32})"


def ordering_pattern(name: str, sample: str) -> str | None:
    """Return the regular expression of texts that are ordered like this one, by its groups; None where none is known.

    That is by the numbers in them: whole numbers, log positions (`0000002c:00000c68:0003`, and of what is called an
    LSN `16/B374D848`), places in MySQL's binary logs (`mysql-bin.000009`, Maxwell's `mysql-bin.000009:120`), and GTIDs
    of one server (of MariaDB: of one domain).
    """
    if re.search(NUMBER_PATTERN, sample):
        return NUMBER_PATTERN
    if _LSN.search(sample):
        return "^" + ":".join([_HEX] * (sample.count(":") + 1)) + "$"
    if "lsn" in name.lower() and _POSTGRES_LSN.search(sample):
        return f"^{_HEX}/{_HEX}$"
    if found := _GTID.search(sample):
        return f"(?i)^{re.escape(found[1])}:{_PART}$"
    if "gtid" in name.lower() and (found := _MARIADB_GTID.search(sample)):
        return f"^{found[1]}-[0-9]+-{_PART}$"
    if found := _BINLOG.search(sample):
        return rf"^{re.escape(found[1])}\.{_PART}" + (f":{_PART}$" if found[2] else "$")
    return None


def can_order_changes(name: str, sample: str, order: Order) -> bool:
    """Whether the first value of a name in the order says which of two changes is newer."""
    pattern = ordering_pattern(name, sample)
    return pattern == NUMBER_PATTERN if order == (name,) and name in _NUMBERS else pattern is not None


def unordered_reason(name: str, sample: str) -> str:
    """Return the reason for a first value that says nothing of which change is newer."""
    return (
        f"order_by names {name!r}, and the first change has {quote_value(sample)} there: which of two such values is "
        "newer is not known. Known are whole numbers, log positions (0000002c:00000c68:0003), binary logs "
        "(mysql-bin.000009) and GTIDs of one server"
    )


def incomparable_reason(name: str, sample: str | None) -> str:
    """Return how a reason goes on that began with a value which can't be compared with the first one.

    `sample` is that, None where a position is a bigint.
    """
    if sample is None:
        return f" in {name!r} can't be ordered: expected a bigint"
    beside = "a whole number" if re.search(NUMBER_PATTERN, sample) else f"one like {quote_value(sample)}"
    return f" in {name!r} can't be ordered: expected {beside}"


def sortable_column(value: Column, name: str, sample: str | None) -> Column:
    """Return a text that sorts as these values do; null for what is not like the sample."""
    from pyspark.sql import functions as F

    pattern = None if sample is None else ordering_pattern(name, sample)
    if pattern is None:
        return F.lit(None).cast("string")
    parts = []
    for group in range(1, re.compile(pattern).groups + 1):
        digits = F.lower(F.regexp_extract(value, pattern, group))
        parts.append(F.concat(F.lpad(F.length(digits).cast("string"), 2, "0"), digits))
    text = F.concat(*parts)
    if pattern == NUMBER_PATTERN:
        below = F.concat(F.lit("n"), F.translate(text, _DIGITS, _DIGITS[::-1]))
        text = F.when(value.startswith("-"), below).otherwise(F.concat(F.lit("p"), text))
    return F.when(value.rlike(pattern), text)


def sortable_array(values: pa.ChunkedArray, name: str, sample: str | None) -> pa.ChunkedArray:
    """Return what `sortable` does, of texts in Arrow."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pattern = None if sample is None else ordering_pattern(name, sample)
    if pattern is None:
        return pa.chunked_array([pa.nulls(len(values), pa.string())])
    groups = range(re.compile(pattern).groups)
    named = reduce(lambda text, place: text.replace("([0-9", f"(?P<g{place}>[0-9", 1), groups, pattern)
    found = pc.extract_regex(values, named)
    parts = []
    for place in groups:
        digits = pc.utf8_lower(pc.struct_field(found, f"g{place}"))
        parts += [pc.utf8_lpad(pc.utf8_length(digits).cast("string"), 2, "0"), digits]
    text = pc.binary_join_element_wise(*parts, "")
    if pattern == NUMBER_PATTERN:
        below = reduce(lambda told, swap: pc.replace_substring(told, *swap), _COMPLEMENT, text)
        text = pc.if_else(
            pc.starts_with(values, "-"),
            pc.binary_join_element_wise("n", below, ""),
            pc.binary_join_element_wise("p", text, ""),
        )
    return text


_DIGITS = "0123456789"
# One digit after the other, by way of letters: what was replaced is not replaced again.
_COMPLEMENT = [(digit, letter) for digit, letter in zip(_DIGITS, "abcdefghij", strict=True)] + [
    (letter, digit) for letter, digit in zip("abcdefghij", _DIGITS[::-1], strict=True)
]
MISSING_PART = "!"
"""The part of a value that a snapshot's row does not have: below all others."""


# Values that Debezium does not know: its placeholder, in each form that a column's type gives it.
#
# PostgreSQL does not log a large value that an update leaves alone, nor does Oracle, and Debezium sends
# `unavailable.value.placeholder` in its place: as text, as base64 or hex where the column holds bytes, as the only
# element of an array of texts or UUIDs, as the codes of its bytes in an array of numbers, as the only entry of an
# hstore.
# Arrays and maps arrive as JSON in a text column.


PLACEHOLDER = "__debezium_unavailable_value"
_JSON = r"\A\s*[\[{]"
_HEX_PREFIX = "hex:"  # as in the connector's setting: what follows are bytes
_UNAVAILABLE_STEP = (
    "Set REPLICA IDENTITY FULL in the source, or leave the column out. To keep the value that the dataset has, declare "
    'on_unavailable="keep". Where it is the column\'s own value: unavailable=None, if the source knows all values, or '
    "another unavailable.value.placeholder in the connector and the same in unavailable="
)


def may_be_unavailable(kind: str) -> bool:
    """Whether a column of this type can hold the placeholder: other types never do, as their values are small."""
    return kind in ("string", "binary") or kind.startswith("decimal")


def check_placeholder(unavailable: str | None, on_unavailable: str, what: str) -> None:
    """Refuse a placeholder that is none, and a rule for it that is none. Raises ConfigurationError."""
    if on_unavailable not in ("refuse", "keep"):
        raise ConfigurationError(
            f"{what} has on_unavailable={on_unavailable!r}: expected 'refuse' or 'keep'.",
            "Choose one.",
            argument="on_unavailable",
        )
    if unavailable is None and on_unavailable == "keep":
        raise ConfigurationError(
            f"{what} has on_unavailable='keep' and unavailable=None: then nothing says that a value is not known.",
            "Give the connector's unavailable.value.placeholder, or leave on_unavailable out.",
            argument="on_unavailable",
        )
    try:
        valid = unavailable is None or bool(_bytes(unavailable))
    except (ValueError, AttributeError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{what} has unavailable={unavailable!r}: expected a text, or 'hex:' and bytes in hex, as the connector's "
            "unavailable.value.placeholder.",
            "Leave it out where the connector does not set it.",
            argument="unavailable",
        )


def is_unavailable(placeholder: str, value: Column, kind: str) -> Column:
    """Whether a value of this type is the placeholder; a decimal is given as its text, or as a decimal."""
    from pyspark.sql import functions as F

    if kind == "binary":
        return F.coalesce(value == F.lit(_bytes(placeholder)), F.lit(False))
    return F.coalesce(value.isin(*_texts(placeholder)) | value.rlike(_whole(placeholder)), F.lit(False))


def contains_unavailable(placeholder: str, value: Column) -> Column:
    """Whether a text is JSON that has the placeholder within it."""
    from pyspark.sql import functions as F

    found = reduce(or_, [value.contains(needle) for needle in _needles(placeholder)])
    return F.coalesce(value.rlike(_JSON) & found, F.lit(False))


def is_unavailable_array(placeholder: str, values: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Whether each value is the placeholder, as `is_unavailable`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "binary":
        same = pc.equal(values, pa.scalar(_bytes(placeholder), values.type))
    else:
        known = pc.is_in(values, value_set=pa.array(_texts(placeholder), values.type))
        same = pc.or_(known, pc.match_substring_regex(values, _whole(placeholder)))
    return pc.fill_null(same, False)


def contains_unavailable_array(placeholder: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each text has the placeholder within it, as `holds_unavailable`."""
    import pyarrow.compute as pc

    found = reduce(pc.or_, [pc.match_substring(values, needle) for needle in _needles(placeholder)])
    return pc.fill_null(pc.and_(pc.match_substring_regex(values, _JSON), found), False)


def unavailable_reason(placeholder: str, name: str) -> str:
    """Return the reason for a change whose value of this column is not known."""
    return (
        f"column {name!r} is {placeholder!r}, which stands for a value too large to be logged that was not changed: "
        f"nothing says what it holds. {_UNAVAILABLE_STEP}"
    )


def nested_unavailable_reason(placeholder: str, name: str) -> str:
    """Return the reason for a change that knows one part of this column's value and not another."""
    return (
        f"column {name!r} has {placeholder!r} within its value: a part of it is not known, and a value is stored, or "
        f"kept, as a whole. {_UNAVAILABLE_STEP}"
    )


def inserted_unavailable_reason(name: str) -> str:
    """Return the reason for an inserted row whose value of this column is not known."""
    return f"column {name!r} is not known, and an insert has no row before it to keep that of"


def _bytes(placeholder: str) -> bytes:
    return (
        bytes.fromhex(placeholder[len(_HEX_PREFIX) :]) if placeholder.startswith(_HEX_PREFIX) else placeholder.encode()
    )


@lru_cache(maxsize=64)
def _texts(placeholder: str) -> tuple[str, ...]:
    """Return the placeholder as a text may have it: itself, or its bytes as `binary.handling.mode` codes them."""
    data = _bytes(placeholder)
    coded = (base64.b64encode(data), base64.urlsafe_b64encode(data), data.hex().encode())
    return tuple(dict.fromkeys((data.decode(errors="replace"), *(text.decode() for text in coded))))


@lru_cache(maxsize=64)
def _whole(placeholder: str) -> str:
    """Return a pattern, of Java's and of RE2, for JSON that is the placeholder as a whole."""
    text, data = (_pattern(text) for text in _texts(placeholder)[:2])
    arrays = (*([element] for element in _elements(placeholder)), *_codes(placeholder))
    forms = (
        *map(_pattern, arrays),
        rf"\{{\s*{text}\s*:\s*{text}\s*\}}",
        rf'\{{\s*"scale"\s*:\s*-?\d+\s*,\s*"value"\s*:\s*{data}\s*\}}',
    )
    return rf"\A\s*(?:{'|'.join(forms)})\s*\z"


@lru_cache(maxsize=64)
def _needles(placeholder: str) -> tuple[str, ...]:
    """Return what is a part of JSON that has the placeholder within it: to be searched for, faster than a pattern."""
    codes = (_json(numbers, comma) for numbers in _codes(placeholder) for comma in (",", ", "))
    return (*map(_json, _elements(placeholder)), *codes)


def _elements(placeholder: str) -> tuple[str, ...]:
    """Return what the only element of an array may be."""
    digest = hashlib.md5(_bytes(placeholder), usedforsecurity=False).digest()
    return (*_texts(placeholder), str(uuid.UUID(bytes=digest, version=3)))  # as Java's UUID.nameUUIDFromBytes


def _codes(placeholder: str) -> tuple[list[Any], ...]:
    """Return the bytes as arrays of numbers: whole ones, with a fraction, and as Connect's decimals."""
    numbers = [code - 256 if code > 127 else code for code in _bytes(placeholder)]
    decimals = [base64.b64encode(number.to_bytes(1, "big", signed=True)).decode() for number in numbers]
    return numbers, list(map(float, numbers)), decimals


def _json(value: Any, comma: str = ",") -> str:
    return json.dumps(value, ensure_ascii=False, separators=(comma, ":"))


def _pattern(value: Any) -> str:
    """Return a pattern for a value as JSON, with spaces wherever it may have some."""
    if isinstance(value, list):
        return r"\[\s*" + r"\s*,\s*".join(map(_pattern, value)) + r"\s*\]"
    return re.escape(_json(value))

"""Values that change formats share: reasons why a change can't be applied, positions that order
changes, and Debezium's placeholder for unavailable values.

A position is computed from the columns or paths of `order_by`:

    one number                    an integer, a date, a timestamp, a log position: a bigint,
                                  unchanged
    several values, and strings   a string that sorts as the values do, from the left

The first change with a value of a known format determines that of a string (a log position, a GTID,
…). All others must have it.

A reason may quote values of the record, between control characters, until `render_reason` shows or
masks them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from decimal import Decimal
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import is_nested
from dagster_adjunct.resources.schemas.values import python_values

if TYPE_CHECKING:
    from pyspark.sql import Column


_BEGINS = "\x02"
_ENDS = "\x03"
_MARKED = re.compile(f"{_BEGINS}[^{_ENDS}]*{_ENDS}")
NO_PATH = "\x04"
"""The prefix of the reason why a change lacks a path of `order_by`.

Such a change is a bad one. If all changes of a stream lack it, the advance fails.
"""
_UNMARKED = str.maketrans("", "", _BEGINS + _ENDS + NO_PATH)
_HIDDEN = "a hidden value"
REPAIR = (
    "To repair rows, write them again in the source (in PostgreSQL, UPDATE … SET id = id), take a"
    " blocking snapshot, whose rows have positions, or rebuild the dataset from a new stream or a"
    " bulk snapshot"
)
"""What to do in place of a snapshot whose rows have no positions, such as an incremental one."""
TRUNCATE = (
    "a truncate deletes all rows at once, which no change of one row can express: rebuild the"
    " dataset"
)


def is_true(condition: Column) -> Column:
    """Return a condition that is false instead of null."""
    return F.coalesce(condition, F.lit(False))


def concat_reason(*parts: str | Column) -> Column:
    """Return a reason made of texts and columns, null if one of these is null."""
    columns = []
    for part in parts:
        columns.append(F.lit(part) if isinstance(part, str) else part)
    return F.concat(*columns)


def quote_column(value: Column) -> Column:
    """Return a value as a reason quotes it: its first 100 characters, marked as the record's, or
    `null`.
    """
    quoted = concat_reason("'", F.substring(value, 1, 100), "'")
    return F.coalesce(mark_column(quoted), F.lit("null"))


def mark_column(text: Column) -> Column:
    """Mark a text within a reason as a value of the record, which `render_reason_column` shows
    or masks.
    """
    return concat_reason(_BEGINS, F.translate(text, _BEGINS + _ENDS, ""), _ENDS)


def render_reason_column(reason: Column, *, values: bool) -> Column:
    """Return a reason for display: its marked values are shown if `values` is true, else masked."""
    if values:
        return F.translate(reason, _BEGINS + _ENDS + NO_PATH, "")
    return F.translate(
        F.regexp_replace(reason, f"{_BEGINS}[^{_ENDS}]*{_ENDS}", _HIDDEN), NO_PATH, ""
    )


def unknown_operation_column(value: Column) -> Column:
    """Return the reason why a change with this undeclared operation can't be applied."""
    return concat_reason("unknown operation ", quote_column(value))


def quote_value(value: str | None) -> str:
    """Return one value as a reason quotes it: its first 100 characters, marked as the record's, or
    `null`.
    """
    if value is None:
        return "null"
    shown = value[:100].translate(_UNMARKED)
    return f"{_BEGINS}'{shown}'{_ENDS}"


def render_reason(reason: str | None, *, values: bool) -> str | None:
    """Return a reason for display: its marked values are shown if `values` is true, else masked."""
    if reason is None:
        return None
    if not values:
        reason = _MARKED.sub(_HIDDEN, reason)
    return reason.translate(_UNMARKED)


def unknown_operation_reason(value: str | None) -> str:
    """Return the reason why a change with this undeclared operation can't be applied."""
    return f"unknown operation {quote_value(value)}"


Order = tuple[str, ...]
PositionType = Literal["bigint", "string"]
Samples = tuple[str | None, ...]
"""The first value of each name in `order_by`, as a string, whose format later ones must have;
None before the first.
"""

STREAMED_FIRST: Order = ("__snapshot", "__offset")
"""The order of changes by offset in which rows of a snapshot never replace streamed changes."""
SNAPSHOT_ROWS = -(2**62)
"""Added to the offset of a snapshot's row: its position is below those of all streamed changes."""
LOWEST = -(2**63)

PATH = re.compile(r"source\.\w+|ts_(ms|us|ns)")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_WHOLE_DECIMAL = re.compile(r"decimal\(\d+,0\)")


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
"""The `order_by` for each of Debezium's connectors."""

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
    "version",
    "connector",
    "name",
    "snapshot",
    "db",
    "schema",
    "table",
    "sequence",
    "txId",
    "xmin",
    "server_id",
    "thread",
    "query",
    "rs",
    "collection",
    "h",
    "lsid",
    "txnNumber",
    "rs_id",
    "redo_thread",
    "user_name",
    "row_id",
    "vgtid",
    "shard",
    "keyspace",
)


_SOURCE_FIELDS = frozenset(
    (
        *_UNORDERED,
        "lsn",
        "scn",
        "file",
        "pos",
        "row",
        "gtid",
        "commit_lsn",
        "change_lsn",
        "event_serial_no",
        "ord",
        "ssn",
        "ts_ms",
        "ts_us",
        "ts_ns",
        "commit_scn",
        "start_scn",
        "commit_ts",
        "commit_ts_ms",
        "start_ts_ms",
        "cluster_id",
        "ts_hlc",
        "mvcc_timestamp",
        "record_sequence",
        "server_transaction_id",
        "low_watermark",
    )
)
"""The fields of `source` that Debezium's connectors, and others with its format, are known to
send.
"""


def is_known_path(path: str) -> bool:
    """Whether a connector is known to send this path."""
    return path.removeprefix("source.") in _SOURCE_FIELDS or path in _TIMES


def suggest_path(path: str) -> str | None:
    """Return the known path that this one, which is not known, is a misspelling of: one letter or
    two swapped ones.

    None if there is none.
    """
    if is_known_path(path):
        return None
    known = [*(f"source.{name}" for name in sorted(_SOURCE_FIELDS - set(_UNORDERED))), *_TIMES]
    for other in known:
        if _is_misspelt(path.lower(), other):
            return other
    return None


def _is_misspelt(text: str, word: str) -> bool:
    """Whether a text is a word with at most one letter added, left out or replaced, or two
    neighbours swapped.
    """
    same = 0
    while same < min(len(text), len(word)) and text[same] == word[same]:
        same += 1
    # What follows the common beginning.
    rest = text[same:]
    wanted = word[same:]
    swapped = rest[1::-1] + rest[2:]
    is_added_or_swapped = wanted in (rest[1:], swapped)
    is_left_out_or_replaced = wanted[1:] in (rest, rest[1:])
    return is_added_or_swapped or is_left_out_or_replaced


def order_as_code(order: Order) -> str:
    """Return an order as a declaration has it: `order_by=["source.file", "source.pos"]`."""
    names = '", "'.join(order)
    if len(order) == 1:
        return f'order_by="{names}"'
    return f'order_by=["{names}"]'


def describe_order(order: Order | None) -> str:
    """Return an order in words, for messages."""
    if order == STREAMED_FIRST:
        return "offset, with rows of snapshots below streamed changes"
    if order is None:
        return "offset"
    return ", ".join(order)


class PathProblem(NamedTuple):
    """What is wrong with a path in `order_by`, and what to write in its place."""

    problem: str
    next_step: str


def find_path_problem(order: Order, path: str) -> PathProblem | None:
    """Return what is wrong with a path of Debezium's envelopes in this order, of which it is one;
    None if nothing.
    """
    index = order.index(path)
    outer = _WITHIN.get(path)
    if outer is not None and outer not in order[:index]:
        completed = (*order[:index], *_with_outer_paths(outer), path)
        return PathProblem(
            f"{path!r} only orders changes with the same {outer!r}",
            f"Write {order_as_code(completed)}.",
        )
    if path == "source.file" and "source.pos" not in order[index:]:
        completed = (*order[: index + 1], "source.pos", *order[index + 1 :])
        return PathProblem(
            "changes of one 'source.file' are ordered by 'source.pos'",
            f"Write {order_as_code(completed)}.",
        )
    if path.removeprefix("source.") in _UNORDERED:
        known = "; ".join(f"{name}: {order_as_code(by)}" for name, by in ORDERS.items())
        return PathProblem(
            f"{path!r} does not say which of two changes is newer",
            f"Use the order of the connector ({known}).",
        )
    return None


def _with_outer_paths(path: str) -> Order:
    """Return the path after all paths that it is within, outermost first: for "source.row", the
    file, the position in it, and the row at that position.
    """
    outer = _WITHIN.get(path)
    if outer is None:
        return (path,)
    return (*_with_outer_paths(outer), path)


def position_type(order: Order | None, rows: Schema) -> PositionType:
    """Return the type of positions: "bigint" for a single number, else "string"."""
    if order is None or order == STREAMED_FIRST:
        return "bigint"
    if len(order) > 1:
        return "string"
    if order[0] in rows.names:
        is_number = rows.field(order[0]).type in (*_INTEGERS, "date", "timestamp")
    else:
        is_number = order[0] in _NUMBERS
    if is_number:
        return "bigint"
    return "string"


def is_orderable(kind: str) -> bool:
    """Whether values of this type can order changes; for strings, the format in the first change
    decides.
    """
    return (
        kind in (*_INTEGERS, "date", "timestamp", "string")
        or _WHOLE_DECIMAL.fullmatch(kind) is not None
    )


NUMBER_PATTERN = r"^[+-]?0*([0-9]{1,99})$"
_LSN = re.compile(r"^[0-9A-Fa-f]{1,32}(:[0-9A-Fa-f]{1,32})+$")
_POSTGRES_LSN = re.compile(r"^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$")
# The groups: the file's name without its number, which has a letter (so that a time with a fraction
# does not match), and ":position" or nothing.
_BINLOG = re.compile(r"^([^\s:@]*[A-Za-z][^\s:@]*)\.[0-9]{1,20}(:[0-9]{1,20})?$")
# The group: the server, with its tag.
_GTID = re.compile(r"^([0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?::\w+)?):[0-9]{1,20}$")
# The group: the domain.
_MARIADB_GTID = re.compile(r"^([0-9]+)-[0-9]+-[0-9]{1,20}$")
# What orders: a decimal or hexadecimal number without its leading zeros.
_PART = "0*([0-9]{1,20})"
_HEX = "0*([0-9A-Fa-f]{1,32})"


def ordering_pattern(name: str, sample: str) -> str | None:
    """Return the regular expression for strings in the format of the sample, whose groups order
    them; None for an unknown format.

    Known formats are whole numbers, log positions (`0000002c:00000c68:0003`, or `16/B374D848` if
    the name contains "lsn"), positions in MySQL's binary logs (`mysql-bin.000009`, Maxwell's
    `mysql-bin.000009:120`), and GTIDs of one server (in MariaDB: of one domain).
    """
    if re.search(NUMBER_PATTERN, sample):
        return NUMBER_PATTERN
    if _LSN.search(sample):
        return "^" + ":".join([_HEX] * (sample.count(":") + 1)) + "$"
    if "lsn" in name.lower() and _POSTGRES_LSN.search(sample):
        return f"^{_HEX}/{_HEX}$"
    gtid = _GTID.search(sample)
    if gtid is not None:
        server = gtid.group(1)
        return f"(?i)^{re.escape(server)}:{_PART}$"
    mariadb_gtid = _MARIADB_GTID.search(sample)
    if "gtid" in name.lower() and mariadb_gtid is not None:
        domain = mariadb_gtid.group(1)
        return f"^{domain}-[0-9]+-{_PART}$"
    return _binlog_pattern(sample)


def _binlog_pattern(sample: str) -> str | None:
    """Return the regular expression for positions in MySQL's binary logs with the file name of the
    sample; None if it is no such position.
    """
    binlog = _BINLOG.search(sample)
    if binlog is None:
        return None
    file = binlog.group(1)
    pattern = rf"^{re.escape(file)}\.{_PART}"
    has_position = binlog.group(2) is not None
    if has_position:
        pattern += f":{_PART}"
    return f"{pattern}$"


def orderable_pattern(name: str, positions: PositionType) -> str:
    """Return the regular expression, for Java and RE2, of strings in a format by which this name
    can order changes; positions that are bigints need whole numbers.
    """
    if positions == "bigint":
        return NUMBER_PATTERN
    formats = [NUMBER_PATTERN, _LSN.pattern, _GTID.pattern, _BINLOG.pattern]
    if "lsn" in name.lower():
        formats.append(_POSTGRES_LSN.pattern)
    if "gtid" in name.lower():
        formats.append(_MARIADB_GTID.pattern)
    return f"(?:{')|(?:'.join(formats)})"


def unordered_reason(name: str, sample: str) -> str:
    """Return the reason why a change with this value, of unknown format, can't be ordered."""
    return (
        f"{name!r} is {quote_value(sample)}, which has no known order: expected a whole number, a"
        " log position (0000002c:00000c68:0003), a binary log (mysql-bin.000009) or a GTID of one"
        " server"
    )


def incomparable_reason(name: str, sample: str | None) -> str:
    """Return the end of a reason for a value that can't be compared with the first one, `sample`.

    `sample` is None where positions are bigints.
    """
    if sample is None:
        return f" in {name!r} can't be ordered: expected a bigint"
    if re.search(NUMBER_PATTERN, sample):
        expected = "a whole number"
    else:
        expected = f"one like {quote_value(sample)}"
    return f" in {name!r} can't be ordered: expected {expected}"


def sortable_column(value: Column, name: str, sample: str | None) -> Column:
    """Return a string that sorts as these values do, null where the format differs from the
    sample's, and everywhere without a sample or for one of unknown format.

    Each number in a value gets its length in two digits before it, so that longer numbers sort
    after shorter ones. A whole number also gets "p", or "n" below zero. After "n", each digit is
    replaced by its complement (9 minus it), so that the largest absolute value sorts first.
    """
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
    """Return a string that sorts as these strings do, made as in `sortable_column`."""
    pattern = None if sample is None else ordering_pattern(name, sample)
    if pattern is None:
        return pa.chunked_array([pa.nulls(len(values), pa.string())])
    groups = range(re.compile(pattern).groups)
    named_pattern = pattern  # Arrow extracts groups by name
    for group in groups:
        named_pattern = named_pattern.replace("([0-9", f"(?P<g{group}>[0-9", 1)
    found = pc.extract_regex(values, named_pattern)
    parts = []
    for group in groups:
        digits = pc.utf8_lower(pc.struct_field(found, f"g{group}"))
        parts += [pc.utf8_lpad(pc.utf8_length(digits).cast("string"), 2, "0"), digits]
    text = pc.binary_join_element_wise(*parts, "")
    if pattern == NUMBER_PATTERN:
        complement = text
        for digit, swapped in _COMPLEMENT:
            complement = pc.replace_substring(complement, digit, swapped)
        negative = pc.binary_join_element_wise("n", complement, "")
        positive = pc.binary_join_element_wise("p", text, "")
        text = pc.if_else(pc.starts_with(values, "-"), negative, positive)
    return text


_DIGITS = "0123456789"
# Digits are replaced by letters first, so that a replaced digit is not replaced again.
_COMPLEMENT = [(digit, letter) for digit, letter in zip(_DIGITS, "abcdefghij", strict=True)] + [
    (letter, digit) for letter, digit in zip("abcdefghij", _DIGITS[::-1], strict=True)
]
MISSING_PART = "!"
"""Stands for a value that a snapshot's row does not have: below all others."""


# PostgreSQL and Oracle do not log a large value that an update does not change, and Debezium sends
# `unavailable.value.placeholder` instead: as a string, as base64 or hex for bytes, as the only
# element of an array of strings or UUIDs, as the codes of its bytes in an array of numbers, as the
# only entry of an hstore. Arrays and maps arrive as JSON in a string column.


PLACEHOLDER = "__debezium_unavailable_value"
_JSON = r"\A\s*[\[{]"
_HEX_PREFIX = "hex:"  # as in the connector's setting, before bytes in hex
_UNAVAILABLE_STEP = (
    "Set REPLICA IDENTITY FULL in the source, or leave the column out. To keep the stored value,"
    ' declare on_unavailable="keep". If it is the actual value, declare unavailable=None where the'
    " source knows all values, or set another unavailable.value.placeholder in the connector and in"
    " unavailable="
)


def may_be_unavailable(kind: str) -> bool:
    """Whether a column of this type can have the placeholder: values of other types are small
    and always known.
    """
    if kind in ("string", "binary") or kind.startswith("decimal"):
        return True
    return is_nested(kind)


def check_placeholder(unavailable: str | None, on_unavailable: str, what: str) -> None:
    """Raise ConfigurationError for an invalid placeholder or `on_unavailable`."""
    if unavailable is None and on_unavailable == "keep":
        raise ConfigurationError(
            f"{what} has on_unavailable='keep' and unavailable=None: then unknown values can't be"
            " recognized.",
            "Give the connector's unavailable.value.placeholder, or leave on_unavailable out.",
            argument="on_unavailable",
        )
    try:
        valid = unavailable is None or bool(_bytes(unavailable))
    except (ValueError, AttributeError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{what} has unavailable={unavailable!r}: expected a text, or 'hex:' and bytes in hex,"
            " as in the connector's unavailable.value.placeholder.",
            "Leave it out if the connector does not set it.",
            argument="unavailable",
        )


def is_unavailable(placeholder: str, value: Column, kind: str) -> Column:
    """Return whether a value is the placeholder, in any form that Debezium sends for this type.

    Pass "string" for all values that are not bytes.
    """
    if kind == "binary":
        return is_true(value == F.lit(_bytes(placeholder)))
    return is_true(value.isin(*_texts(placeholder)) | value.rlike(_whole(placeholder)))


def contains_unavailable(placeholder: str, value: Column) -> Column:
    """Return whether a string is a JSON array or object that contains the placeholder."""
    found = reduce(or_, [value.contains(needle) for needle in _needles(placeholder)])
    return is_true(value.rlike(_JSON) & found)


def is_unavailable_array(placeholder: str, values: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Return whether values in Arrow are the placeholder, as `is_unavailable` does."""
    if kind == "binary":
        same = pc.equal(values, pa.scalar(_bytes(placeholder), values.type))
    else:
        known = pc.is_in(values, value_set=pa.array(_texts(placeholder), values.type))
        same = pc.or_(known, pc.match_substring_regex(values, _whole(placeholder)))
    return pc.fill_null(same, False)


def contains_unavailable_array(placeholder: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return whether strings in Arrow are JSON with the placeholder, as `contains_unavailable`
    does.
    """
    found = reduce(pc.or_, [pc.match_substring(values, needle) for needle in _needles(placeholder)])
    return pc.fill_null(pc.and_(pc.match_substring_regex(values, _JSON), found), False)


def nested_texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return nested values as JSON texts."""
    texts = []
    for value in python_values(values):
        text = None
        if value is not None:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
        texts.append(text)
    return pa.chunked_array([pa.array(texts, pa.string())])


def _plain(value: object) -> object:
    """Return a value that JSON does not have as the text or number that Spark writes for it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return float(value)
    return str(value)


def unavailable_reasons(placeholder: str, name: str, kind: str, *, keeps: bool) -> dict[str, str]:
    """Return why a change can't be applied of which a value of this column is unknown, by what that
    value is: "value" for any unknown value, "insert" for that of an inserted row, "part" for one of
    which a part is unknown.

    `keeps` says whether unknown values keep the stored ones: then there is "insert", and else
    "value". Columns that can't have the placeholder have no reason.
    """
    reasons: dict[str, str] = {}
    if keeps and may_be_unavailable(kind):
        reasons["insert"] = (
            f"column {name!r} is unknown, and an insert has no earlier row whose value it could"
            " keep"
        )
    elif may_be_unavailable(kind):
        reasons["value"] = (
            f"column {name!r} is {placeholder!r}, which stands for a large unchanged value that the"
            f" source has not logged. {_UNAVAILABLE_STEP}"
        )
    if kind == "string" or is_nested(kind):
        reasons["part"] = (
            f"column {name!r} has {placeholder!r} within its value: a part of it is unknown, but"
            f" values can only be stored or kept as a whole. {_UNAVAILABLE_STEP}"
        )
    return reasons


def _bytes(placeholder: str) -> bytes:
    """Return the bytes that the connector's setting stands for."""
    if placeholder.startswith(_HEX_PREFIX):
        return bytes.fromhex(placeholder[len(_HEX_PREFIX) :])
    return placeholder.encode()


@lru_cache(maxsize=64)
def _texts(placeholder: str) -> tuple[str, ...]:
    """Return the placeholder as a string: itself, or its bytes in the encodings of
    `binary.handling.mode`.
    """
    data = _bytes(placeholder)
    coded = (base64.b64encode(data), base64.urlsafe_b64encode(data), data.hex().encode())
    return tuple(dict.fromkeys((data.decode(errors="replace"), *(text.decode() for text in coded))))


@lru_cache(maxsize=64)
def _whole(placeholder: str) -> str:
    """Return a regular expression, for Java and RE2, that matches JSON that is the placeholder
    and nothing else.
    """
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
    """Return strings of which JSON with the placeholder contains at least one: faster to search
    than a pattern.
    """
    needles = list(map(_json, _elements(placeholder)))
    for numbers in _codes(placeholder):
        needles.append(_json(numbers, ","))
        needles.append(_json(numbers, ", "))
    return tuple(needles)


def _elements(placeholder: str) -> tuple[str, ...]:
    """Return the possible forms of the placeholder as the only element of an array."""
    digest = hashlib.md5(_bytes(placeholder), usedforsecurity=False).digest()
    # as Java's UUID.nameUUIDFromBytes
    return (*_texts(placeholder), str(uuid.UUID(bytes=digest, version=3)))


def _codes(placeholder: str) -> tuple[list[Any], ...]:
    """Return the placeholder's bytes as arrays of numbers, in three forms: integers, floats,
    Connect's decimals.
    """
    numbers = []
    decimals = []
    for code in _bytes(placeholder):
        byte = code.to_bytes(1, "big")
        numbers.append(int.from_bytes(byte, "big", signed=True))
        decimals.append(base64.b64encode(byte).decode())
    return numbers, list(map(float, numbers)), decimals


def _json(value: Any, comma: str = ",") -> str:
    """Return a value as JSON, with this text between the elements of an array."""
    return json.dumps(value, ensure_ascii=False, separators=(comma, ":"))


def _pattern(value: Any) -> str:
    """Return a regular expression for a value as JSON, with optional spaces."""
    if isinstance(value, list):
        return r"\[\s*" + r"\s*,\s*".join(map(_pattern, value)) + r"\s*\]"
    return re.escape(_json(value))

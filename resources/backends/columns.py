"""Column types and values that every SQL backend understands the same way.

A column's type may be written as Spark's simple name or as SQL's usual one. What it holds in Python:

    string       str
    integers     int
    float types  float (an int is taken too)
    boolean      bool
    timestamp    datetime with a time zone; always an instant, read back in UTC
    date         date
    decimal      Decimal (an int is taken too); with (p,s), one that has no more digits than that: none is rounded
    binary       bytes
    json         what JSON can hold: dict with str as names, list, str, int, float, bool
    array<type>  list (a tuple is taken too) of one of the types above but binary and json; None may be in it

None is null in all of them. "float" is Spark's, 32 bits wide; "timestamp" is Spark's, an instant. Numbers are finite:
NaN and infinity are refused, because not every store can hold them and none can compare the first.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.common import ClassRegistry
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import arrow_type, to_exact_array

if TYPE_CHECKING:
    import pyarrow as pa

_BACKENDS: ClassRegistry[Any] = ClassRegistry("backend of tables", "register_backend")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make `backend` known as `name`. It takes, as keywords, what its `to_dict()` gives."""
    _BACKENDS.register(name, backend)


def describe_function(function: Any) -> dict[str, Any]:
    """The declaration of a registered function as plain values: {"backend": "sqlite", …}."""
    return _BACKENDS.describe(function)


def function_from_description(description: Mapping[str, Any]) -> Any:
    """The function that `describe` described, closed."""
    return _BACKENDS.from_description(description)


class Kind(Enum):
    """What a column holds, whatever its database calls the type."""

    STRING = "string"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    DATE = "date"
    DECIMAL = "decimal"
    BINARY = "binary"
    JSON = "json"
    LIST = "list"
    OTHER = "other"


_WORDS = {
    Kind.STRING: "string|text|varchar|char|character|character varying|bpchar|name|clob",
    Kind.INTEGER: "tinyint|smallint|int2|int|integer|int4|bigint|int8|long|short|byte",
    Kind.FLOAT: "float|real|float4|double|double precision|float8",
    Kind.BOOLEAN: "boolean|bool",
    Kind.TIMESTAMP: "timestamp|timestamptz|datetime|timestamp with time zone|timestamp without time zone",
    Kind.DATE: "date",
    Kind.DECIMAL: "decimal|numeric|text decimal",
    Kind.BINARY: "binary|bytea|blob|varbinary",
    Kind.JSON: "json|jsonb|text json",
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split("|")}
# "character varying(10)", "timestamp(3) with time zone", "int": words, perhaps a size, perhaps more words.
_SPELLED = re.compile(r"\s*([a-z][a-z0-9_ ]*?)\s*(?:(\(\s*\d+\s*(?:,\s*\d+\s*)?\))\s*([a-z ]*?))?\s*", re.IGNORECASE)
# Spark's array<int>, PostgreSQL's integer[], and the words that SQLite keeps for it.
_LIST = re.compile(r"\s*(?:array\s*<(.+)>|(.+)\[\]|text array (.+))\s*", re.IGNORECASE)
_NOT_IN_LISTS = (Kind.BINARY, Kind.JSON, Kind.LIST, Kind.OTHER)
_BITS = {
    **dict.fromkeys(("tinyint", "byte"), 16),  # PostgreSQL has none with 8
    **dict.fromkeys(("smallint", "short", "int2"), 16),
    **dict.fromkeys(("int", "integer", "int4"), 32),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, the type's name in lower case, its size as "(10,2)" or "", and its kind.

    One that holds lists has the type of what is in them as its `element`.
    """

    name: str
    type: str
    size: str = ""
    kind: Kind = Kind.OTHER
    element: Column | None = None


def parse_column(name: str, declared: str) -> Column:
    """The column that is declared as `declared` in any of the known spellings; else kind OTHER."""
    listed = _LIST.fullmatch(declared)
    if listed is not None:
        element = parse_column(name, listed[1] or listed[2] or listed[3])
        kind = Kind.OTHER if element.kind in _NOT_IN_LISTS else Kind.LIST
        return Column(name, f"array<{element.type}{element.size}>", "", kind, element)
    match = _SPELLED.fullmatch(declared)
    if match is None:
        return Column(check_identifier("column", name), declared.strip().lower())
    word = " ".join(f"{match[1]} {match[3] or ''}".lower().split())
    size = (match[2] or "").replace(" ", "")
    return Column(check_identifier("column", name), word, size, _KINDS.get(word, Kind.OTHER))


def parse_known_column(name: str, declared: str) -> Column:
    """`column_of`, refusing types that aren't known."""
    column = parse_column(name, declared)
    if column.kind is Kind.OTHER:
        raise ConfigurationError(
            f"column {name!r} has the unknown type {declared!r}; expected "
            "string, smallint, int, bigint, float, double, boolean, timestamp, date, decimal(p,s), binary, json, "
            "array<type>, or one of SQL's usual names for them.",
            column=name,
        )
    return column


def check_declared_columns(table: str, names: Sequence[str], declared: Iterable[Column]) -> None:
    """Refuse declared columns that a table, of which `names` are the columns, does not have."""
    for column in declared:
        if column.name not in names:
            raise SchemaMismatchError(
                f"{table} has no column {column.name!r}, but one is declared; it has {', '.join(names)}.",
                "Correct the declaration, or add the column.",
                column=column.name,
            )


def not_unique_error(table: str, key: Sequence[str]) -> SchemaMismatchError:
    """Return the error for a table whose records the key does not tell apart."""
    return SchemaMismatchError(
        f"{table} has no primary key or unique index on {', '.join(key)} that distinguishes all values, so records "
        "can't be identified.",
        "Add one without a collation that equates different texts, or correct the key.",
        table=table,
    )


def loose_key_error(table: str, column: str, kind: str, wanted: str) -> SchemaMismatchError:
    """Return the error for a key column in which the store takes different values for one."""
    return SchemaMismatchError(
        f"{table}: the key column {column!r} is {kind}: several keys would be one record.",
        f"Make it {wanted}, or use another column that is as the key.",
        column=column,
    )


def check_identifier(what: str, name: str) -> str:
    """`name` if it can be a quoted identifier in every backend: 1 to 63 bytes, no control characters."""
    if isinstance(name, str) and 0 < len(name.encode()) <= 63 and name.isprintable():
        return name
    raise ConfigurationError(
        f"{what} name {name!r} is invalid: expected 1 to 63 bytes of printable text.", argument=what
    )


def make_checker(column: Column, bits: int | None = None) -> Callable[[Any], Any]:
    """The function that checks a value that isn't None for the column, and brings it into its one form.

    It raises TypeError, saying what was expected, when the value doesn't fit. `bits`: how wide integers are, where the
    store has one width only.
    """
    if column.kind is Kind.INTEGER:
        return _integers_of(bits or integer_bits(column))
    if column.kind is Kind.DECIMAL and (digits := decimal_digits(column)) is not None:
        return _decimals_of(*digits)
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _lists_of(make_checker(column.element, bits))
    return _CHECKERS[column.kind]


def integer_bits(column: Column) -> int:
    """How wide the integers of such a column are."""
    return _BITS.get(column.type, 64)


def decimal_digits(column: Column) -> tuple[int, int] | None:
    """How many digits such a decimal has, and how many of them behind the point; None where it is not declared."""
    if not column.size:
        return None
    precision, _, scale = column.size.strip("()").partition(",")
    return int(precision), int(scale or 0)


def number_bounds(column: Column) -> tuple[Decimal, Decimal] | None:
    """The least and the greatest number of such a column; None where it declares neither bits nor digits."""
    if column.kind is Kind.INTEGER:
        most = Decimal(2 ** (integer_bits(column) - 1) - 1)
        return -most - 1, most
    digits = decimal_digits(column) if column.kind is Kind.DECIMAL else None
    if digits is None:
        return None
    precision, scale = digits
    most = Decimal((0, (9,) * precision, -scale))
    return most.copy_negate(), most  # of any precision: arithmetic would round it


def _exactly(expected: type, word: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, expected):
            return value
        raise TypeError(f"expected {word}")

    return check


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a str")
    return check_encodable(value)


def check_encodable(text: str) -> str:
    """The text itself, if all of it can be encoded; else TypeError."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise TypeError("expected text without lone surrogates") from None
    return text


def _integers_of(bits: int) -> Callable[[Any], Any]:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("expected an int")
        if least <= value <= most:
            return value
        raise TypeError(f"out of range, expected an int of {bits} bits")

    return check


def _lists_of(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError("expected a list")
        try:
            return [None if item is None else check(item) for item in value]
        except TypeError as error:
            raise TypeError(f"in the list: {error}") from None

    return checked


def _float(value: Any) -> float:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise TypeError("expected a finite float, or None for NaN and infinity")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("expected a float")
    try:
        return float(value)
    except OverflowError:
        raise TypeError("out of range, expected a float") from None


def _decimal(value: Any) -> Decimal:
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if not isinstance(value, Decimal):
        raise TypeError("expected a Decimal")
    if not value.is_finite():
        raise TypeError("expected a finite Decimal, or None")
    return value


def _decimals_of(precision: int, scale: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Decimal:
        number = _decimal(value)
        digits = len(number.as_tuple().digits)
        if number and digits + abs(_exponent_of(number)) > min(scale, precision - scale):
            shortest = number.normalize(Context(prec=max(digits, 1)))
            exponent = _exponent_of(shortest)
            if -exponent > scale or len(shortest.as_tuple().digits) + exponent > precision - scale:
                raise TypeError(f"out of range, expected a Decimal of {precision} digits, {scale} behind the point")
        return number

    return check


def _exponent_of(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return exponent


def _timestamp(value: Any) -> datetime:
    if type(value) is datetime and value.tzinfo is UTC:
        return value
    if isinstance(value, datetime) and value.tzinfo is not None and value.utcoffset() is not None:
        try:
            return value.astimezone(UTC)
        except OverflowError:
            raise TypeError("out of range, expected years 1 to 9999 in UTC") from None
    raise TypeError("expected a datetime with a time zone, or None")


def _date(value: Any) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    raise TypeError("expected a date without a time")


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError("expected bytes")


def _json(value: Any) -> Any:
    try:
        json.dumps(_check_json(value), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"expected what JSON can hold: {error}") from None
    return value


def _check_json(value: Any) -> Any:
    """The value, refused where JSON would make another of it, such as names that aren't text."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"the key {name!r} is not a str")
        for item in value.values():
            _check_json(item)
    elif isinstance(value, list):
        for item in value:
            _check_json(item)
    elif isinstance(value, str):
        if "\0" in value:
            raise ValueError("text contains the character NUL")
        value.encode()
    elif not (value is None or isinstance(value, bool | int | float)):
        raise TypeError(f"{type(value).__name__} in it")
    return value


_CHECKERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: _string,
    Kind.FLOAT: _float,
    Kind.BOOLEAN: _exactly(bool, "a bool"),
    Kind.TIMESTAMP: _timestamp,
    Kind.DATE: _date,
    Kind.DECIMAL: _decimal,
    Kind.BINARY: _binary,
    Kind.JSON: _json,
    Kind.OTHER: lambda value: value,
}


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variable_name(argument: str, given: object, example: str = '"MY_VARIABLE"', *, label: str = "") -> str:
    """Return the name of an environment variable; what is none is refused, not shown: it may be the secret."""
    if isinstance(given, str) and _NAME.fullmatch(given):
        return given
    raise ConfigurationError(
        f"{label}{': ' if label else ''}{argument} is not the name of an environment variable (value not shown).",
        f"Put the value into an environment variable and pass its name: {argument}={example}.",
        argument=argument,
    )


_PURGE_SECONDS = 3600.0
_last_purges: dict[str, float] = {}  # by table: when this process did it last
_purge_lock = threading.Lock()


def is_purge_due(table: str, forget_after: float | None) -> bool:
    """Whether a connection to `table` that has just been made should forget: once an hour in each process, or once in
    `forget_after` seconds where that is less. Tasks connect all the time."""
    if forget_after is None:
        return False
    now = time.monotonic()
    with _purge_lock:
        last = _last_purges.get(table)
        if last is not None and now - last < min(forget_after, _PURGE_SECONDS):
            return False
        _last_purges[table] = now
    return True


_SIMPLE = {
    Kind.STRING: "string",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp",
    Kind.DATE: "date",
    Kind.BINARY: "binary",
    Kind.JSON: "string",
}
_INTEGERS = {
    **dict.fromkeys(("tinyint", "byte"), "tinyint"),
    **dict.fromkeys(("smallint", "short", "int2"), "smallint"),
    **dict.fromkeys(("int", "integer", "int4"), "int"),
    **dict.fromkeys(("bigint", "long", "int8"), "bigint"),
}
_FLOATS = {"float": "float", "real": "float", "float4": "float"}


def to_spark_type(declared: str) -> str | None:
    """Return Spark's type for a column that is declared like this; None where there is none that is certain.

    JSON becomes its text. A decimal needs its digits: "decimal(10,2)".
    """
    return _spark_type_of_column(parse_column("column", declared))


def _spark_type_of_column(column: Column) -> str | None:
    if column.kind is Kind.INTEGER:
        return _INTEGERS.get(column.type)
    if column.kind is Kind.FLOAT:
        return _FLOATS.get(column.type, "double")
    if column.kind is Kind.DECIMAL:
        return f"decimal{column.size}" if "," in column.size else None
    if column.kind is Kind.LIST and column.element is not None:
        element = _spark_type_of_column(column.element)
        return None if element is None else f"array<{element}>"
    return _SIMPLE.get(column.kind)


def to_arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of what `spark_type` returns."""
    import pyarrow as pa

    if kind.startswith("array<"):
        return pa.list_(to_arrow_type(kind[len("array<") : -1]))
    return arrow_type(kind)


def arrow_column_from_records(
    what: str, keys: Sequence[Any], records: Sequence[Mapping[str, Any] | None], name: str, kind: str
) -> pa.Array:
    """Return one column of records as an Arrow array; null where there is no record, or no such value in it.

    Raises SchemaMismatchError for the first value that is not of the type; `what` says whose records they are.
    """
    import pyarrow as pa

    values = [None if record is None else record.get(name) for record in records]
    if kind == "string" and any(isinstance(value, dict | list) for value in values):
        values = [json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value for value in values]
    try:
        return _array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        for key, value in zip(keys, values, strict=True):
            try:
                _array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise SchemaMismatchError(
                    f"{what}: the record of key {key!r} has {value!r} ({type(value).__name__}) in {name!r}, which is "
                    f"{kind}: {str(error).splitlines()[0]}.",
                    "Correct the table's declared columns, or the type given in select=.",
                    column=name,
                ) from error
        raise


def _array(values: list[Any], kind: str) -> pa.Array:
    if kind != "boolean" and any(value.__class__ is bool for value in values):
        raise TypeError("a boolean does not fit another type")
    return to_exact_array(values, to_arrow_type(kind))

"""Column types and values that every SQL backend understands the same way.

A column's type may be written as Spark's simple name or as SQL's usual one. What it holds in Python:

    string       str
    integers     int
    float types  float (an int is taken too)
    boolean      bool
    timestamp    datetime with a time zone; always an instant, read back in UTC
    date         date
    decimal      Decimal (an int is taken too)
    binary       bytes

None is null in all of them. "float" is Spark's, 32 bits wide; "timestamp" is Spark's, an instant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError


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
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split("|")}
# "character varying(10)", "timestamp(3) with time zone", "int": words, perhaps a size, perhaps more words.
_SPELLED = re.compile(r"\s*([a-z][a-z0-9_ ]*?)\s*(?:(\(\s*\d+\s*(?:,\s*\d+\s*)?\))\s*([a-z ]*?))?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, the type's name in lower case, its size as "(10,2)" or "", and its kind."""

    name: str
    type: str
    size: str = ""
    kind: Kind = Kind.OTHER


def column_of(name: str, declared: str) -> Column:
    """The column that is declared as `declared` in any of the known spellings; else kind OTHER."""
    match = _SPELLED.fullmatch(declared)
    if match is None:
        return Column(check_identifier("column", name), declared.strip().lower())
    word = " ".join(f"{match[1]} {match[3] or ''}".lower().split())
    size = (match[2] or "").replace(" ", "")
    return Column(check_identifier("column", name), word, size, _KINDS.get(word, Kind.OTHER))


def declared_column(name: str, declared: str) -> Column:
    """`column_of`, refusing types that aren't known."""
    column = column_of(name, declared)
    if column.kind is Kind.OTHER:
        raise ConfigurationError(
            f"column {name!r} has the type {declared!r}; known are "
            "string, smallint, int, bigint, float, double, boolean, timestamp, date, decimal(p,s), binary "
            "and SQL's usual names for them.",
            "Use one of these.",
        )
    return column


def check_declared(table: str, names: Sequence[str], declared: Iterable[Column]) -> None:
    """Refuse declared columns that a table, of which `names` are the columns, does not have."""
    for column in declared:
        if column.name not in names:
            raise SchemaMismatchError(
                f"{table} has no column {column.name!r}, which is declared; it has {', '.join(names)}.",
                "Correct the declaration, or add the column.",
                column=column.name,
            )


def not_unique(table: str, key: Sequence[str]) -> SchemaMismatchError:
    """Return the error for a table whose records the key does not tell apart."""
    return SchemaMismatchError(
        f"{table} has no primary key or unique index on {', '.join(key)}, so records can't be told apart.",
        "Add one, or correct the key.",
    )


def check_identifier(what: str, name: str) -> str:
    """`name` if it can be a quoted identifier in every backend: 1 to 63 bytes, no control characters."""
    if isinstance(name, str) and 0 < len(name.encode()) <= 63 and name.isprintable():
        return name
    raise ConfigurationError(
        f"{what} name {name!r} can't be used: expected 1 to 63 bytes of printable text.", "Rename it."
    )


def encoder_of(kind: Kind) -> Callable[[Any], Any]:
    """The function that checks a value that isn't None for `kind`, and brings it into its one form.

    It raises TypeError, saying what was expected, when the value doesn't fit.
    """
    return _ENCODERS[kind]


def _exactly(expected: type, word: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, expected):
            return value
        raise TypeError(f"expected {word}")

    return check


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError("expected an int")


def _float(value: Any) -> float:
    if isinstance(value, float):
        return value
    try:
        return float(_integer(value))
    except TypeError:
        raise TypeError("expected a float") from None


def _decimal(value: Any) -> Decimal:
    if isinstance(value, Decimal):
        return value
    try:
        return Decimal(_integer(value))
    except TypeError:
        raise TypeError("expected a Decimal") from None


def _timestamp(value: Any) -> datetime:
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value.astimezone(UTC)
    raise TypeError("expected a datetime with a time zone")


def _date(value: Any) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    raise TypeError("expected a date without a time")


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError("expected bytes")


_ENCODERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: _exactly(str, "a str"),
    Kind.INTEGER: _integer,
    Kind.FLOAT: _float,
    Kind.BOOLEAN: _exactly(bool, "a bool"),
    Kind.TIMESTAMP: _timestamp,
    Kind.DATE: _date,
    Kind.DECIMAL: _decimal,
    Kind.BINARY: _binary,
    Kind.OTHER: lambda value: value,
}

"""How Redis stores each column: texts in which null, a missing column and an empty text differ.

    null        one byte 0 (a text or binary that begins with that byte gets another one in front)
    string      UTF-8                               timestamp   2013-07-01T05:00:00.250000Z
    integers    17                                  date        2013-07-01
    floats      0.1 (the shortest text of a double) decimal     12.50 (all digits of its scale)
    boolean     true, false                         binary      its bytes
    json        JSON                                array<type> JSON; times and decimals in it as texts

Values are read back unchanged. Equal values have equal texts, so a key has one name. The texts of timestamps, dates and
strings sort like the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any

from dagster_adjunct.resources.backends.columns import Column, Kind, declared_digits, integer_bits

NULL = b"\0"
_EXACT = Context(prec=2100)
_LONGEST_DECIMAL = 1000  # digits on either side of the point, if none are declared


@dataclass(frozen=True, slots=True)
class RedisColumn:
    """How a checked value of a column is stored and read back, and what the script needs to know of it.

    `encode` raises ValueError, naming the limit, for a decimal of too many digits. `compares`: how two stored texts are
    compared, "n" as numbers by their digits, "f" as doubles, "b" by bytes, "-" not at all. `least` and `most` bound
    sums.
    """

    name: str
    kind: Kind
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    compares: str
    least: bytes = b""
    most: bytes = b""

    @property
    def may_be_key(self) -> bool:
        """Whether equal values have equal texts: not floats, lists, JSON, or decimals without a scale."""
        if self.kind in (Kind.FLOAT, Kind.JSON, Kind.LIST):
            return False
        return self.kind is not Kind.DECIMAL or bool(self.most)


def to_redis_column(column: Column) -> RedisColumn:
    """Return how a declared column is stored."""
    if column.kind is Kind.INTEGER:
        most = 2 ** (integer_bits(column) - 1) - 1
        return RedisColumn(column.name, column.kind, b"%d".__mod__, int, "n", b"%d" % (-most - 1), b"%d" % most)
    if column.kind is Kind.DECIMAL:
        return _decimal_column(column)
    if column.kind is Kind.LIST:
        assert column.element is not None
        to_json, from_json = _items(column.element)
        return RedisColumn(
            column.name,
            column.kind,
            lambda values: _dump_json(values if to_json is None else [v if v is None else to_json(v) for v in values]),
            lambda text: [v if v is None else from_json(v) for v in json.loads(text)],
            "-",
        )
    encode, decode = _TEXTS[column.kind]
    return RedisColumn(column.name, column.kind, encode, decode, _COMPARES.get(column.kind, "-"))


def _items(element: Column) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
    """Convert between list values and their JSON form."""
    if element.kind in (Kind.STRING, Kind.INTEGER, Kind.BOOLEAN):
        return None, lambda given: given
    if element.kind is Kind.FLOAT:
        return None, float
    stored = to_redis_column(element)
    return lambda value: stored.encode(value).decode(), lambda given: stored.decode(given.encode())


def _decimal_column(column: Column) -> RedisColumn:
    digits = declared_digits(column)
    if digits is None:

        def any_scale(number: Decimal) -> bytes:
            exponent = number.as_tuple().exponent
            assert isinstance(exponent, int)  # it is finite
            if exponent < -_LONGEST_DECIMAL or number.adjusted() > _LONGEST_DECIMAL:
                raise ValueError(f"expected at most {_LONGEST_DECIMAL} digits before and behind the point")
            return _digits(number)

        return RedisColumn(column.name, column.kind, any_scale, _decimal_of, "n")
    precision, scale = digits
    unit = Decimal(1).scaleb(-scale)
    limit = _digits(Decimal(10**precision - 1).scaleb(-scale, _EXACT))

    def fixed_scale(number: Decimal) -> bytes:
        return _digits(number.quantize(unit, context=_EXACT))

    return RedisColumn(column.name, column.kind, fixed_scale, _decimal_of, "n", b"-" + limit, limit)


def _digits(number: Decimal) -> bytes:
    return format(number if number else number.copy_abs(), "f").encode()


def _decimal_of(text: bytes) -> Decimal:
    return Decimal(text.decode())


def _escaped(text: bytes) -> bytes:
    return NULL + text if text[:1] == NULL else text


def _unescaped(text: bytes) -> bytes:
    return text[1:] if text[:1] == NULL else text


@lru_cache(maxsize=16)  # a time is stored in its record and, for newest_by, next to it
def _moment(moment: datetime) -> bytes:
    return moment.isoformat("T", "microseconds")[:-6].encode() + b"Z"  # it is in UTC, and ends in +00:00


def _dump_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_TEXTS: dict[Kind, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    Kind.STRING: (lambda value: _escaped(value.encode()), lambda text: _unescaped(text).decode()),
    Kind.FLOAT: (lambda value: float.__repr__(value).encode(), float),
    Kind.BOOLEAN: (lambda value: b"true" if value else b"false", lambda text: text == b"true"),
    Kind.TIMESTAMP: (_moment, lambda text: datetime.fromisoformat(text.decode()).astimezone(UTC)),
    Kind.DATE: (lambda day: day.isoformat().encode(), lambda text: date.fromisoformat(text.decode())),
    Kind.BINARY: (_escaped, _unescaped),
    Kind.JSON: (_dump_json, json.loads),
}
_COMPARES = {Kind.FLOAT: "f", Kind.STRING: "b", Kind.TIMESTAMP: "b", Kind.DATE: "b"}

"""Between Python's values and DynamoDB's attribute values ({"S": "text"}, {"N": "1.5"}), without losing anything.

    declared column    stored as
    string             S
    integers           N
    float types        N, by the shortest text that reads back as the same float
    decimal            N, of up to 38 digits; zeros at its end are not kept, 1.50 is read as 1.5
    boolean            BOOL
    timestamp          S, in UTC, "2024-05-01T12:30:00.000000Z": texts of one length, which sort as the times do
    date               S, "2024-05-01"
    binary             B
    array<type>        L
    json               M, L, S, N, BOOL, NULL, as the value is built; a whole float is read as an int

Null columns are left out of the item: here "null" and "not there" are one. Without declared columns a value's own type
says what it is stored as; numbers are read as int where they are whole, else as Decimal, and times as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal, DecimalException, Inexact, Overflow, Underflow
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind, checker_of, encodable

AttributeValue = dict[str, Any]
Item = dict[str, AttributeValue]
Limit = tuple[str, AttributeValue]  # "<=" or ">=", and a number

DIGITS = 38  # of a number
_LEAST, _GREATEST = Decimal("1E-130"), Decimal("9.9999999999999999999999999999999999999E+125")
_EXACT = Context(prec=DIGITS, traps=[Inexact, Overflow, Underflow])
_SUMS = Context(prec=300, traps=[Inexact])  # of 1E-130 and 9.9E+125, say
_DEEPEST = 32  # levels of lists and maps in an item


def encoder_for(column: Column) -> Callable[[Any], AttributeValue]:
    """The function that makes a value, which isn't None, of this column an attribute value; TypeError says why not."""
    check = checker_of(column)
    if column.kind is Kind.LIST:
        assert column.element is not None
        encode = encoder_for(column.element)
        return lambda value: {"L": [_NULL if item is None else encode(item) for item in _checked_list(value)]}
    make = _MAKERS[column.kind]
    return lambda value: make(check(value))


def decoder_for(column: Column) -> Callable[[AttributeValue], Any]:
    """The function that reads this column's attribute values, whoever wrote them."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        decode = decoder_for(column.element)
        return lambda stored: [decode(item) for item in stored["L"]] if "L" in stored else decode_any(stored)
    if column.kind is Kind.JSON:
        return _decode_json
    tag, read = _TAGS.get(column.kind, "BOOL"), _READERS.get(column.kind)
    if read is None:
        return lambda stored: stored[tag] if tag in stored else decode_any(stored)
    return lambda stored: read(stored[tag]) if tag in stored else decode_any(stored)


def key_type(column: Column) -> str | None:
    """What a key of this column is stored as ("S", "N", "B"); None where it can't be a key."""
    return _TAGS.get(column.kind)


def encode_any(value: Any, depth: int = 0) -> AttributeValue:
    """The attribute value of any Python value that DynamoDB can hold; TypeError says why another can't be."""
    if value is None:
        return _NULL
    if isinstance(value, str):
        return {"S": _text(value)}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int | float | Decimal):
        return _number(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"B": bytes(value)}
    if isinstance(value, date):
        return _timestamp(value) if isinstance(value, datetime) else {"S": value.isoformat()}
    if depth >= _DEEPEST:
        raise TypeError(f"expected at most {_DEEPEST} levels of lists and maps")
    if isinstance(value, list | tuple):
        return {"L": [encode_any(item, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        return {"M": {_text(name): encode_any(item, depth + 1) for name, item in value.items()}}
    raise TypeError("expected str, bool, int, float, Decimal, bytes, datetime, date, list or dict")


def decode_any(stored: AttributeValue) -> Any:
    """The Python value of an attribute value."""
    ((tag, value),) = stored.items()
    if tag == "N":
        return _whole_or_decimal(value)
    if tag == "L":
        return [decode_any(item) for item in value]
    if tag == "M":
        return {name: decode_any(item) for name, item in value.items()}
    if tag == "NULL":
        return None
    if tag == "NS":
        return {_whole_or_decimal(item) for item in value}
    return set(value) if tag in ("SS", "BS") else value


def added(left: AttributeValue | None, right: AttributeValue) -> AttributeValue:
    """The sum of two numbers, as DynamoDB adds them; one that is not there counts as 0."""
    return right if left is None else _number(exact_sum(left, right))


def exact_sum(left: AttributeValue, right: AttributeValue) -> Decimal:
    """The sum of two numbers with all its digits, which may be more than DynamoDB has."""
    return _SUMS.add(Decimal(left["N"]), Decimal(right["N"]))


def room_for(number: AttributeValue, bounds: tuple[Decimal, Decimal]) -> Limit | None:
    """What a column may hold so that its sum with a number within these bounds is within them, too; None: anything."""
    least, most = bounds
    step = Decimal(number["N"])
    if not step:
        return None
    return ("<=", _number(_EXACT.subtract(most, step))) if step > 0 else (">=", _number(_EXACT.subtract(least, step)))


def is_zero(stored: AttributeValue) -> bool:
    return "N" in stored and not Decimal(stored["N"])


def size_of(stored: AttributeValue) -> int:
    """How many bytes it counts for in an item's size, by DynamoDB's own rules."""
    ((tag, value),) = stored.items()
    if tag == "S":
        return len(value) if value.isascii() else len(value.encode())
    if tag == "N":
        return len(value) // 2 + 2 if len(value) < 40 else 21
    if tag == "B":
        return len(value)
    if tag == "L":
        return 3 + sum(1 + size_of(item) for item in value)
    if tag == "M":
        return 3 + sum(1 + len(name.encode()) + size_of(item) for name, item in value.items())
    return 1


_NULL: AttributeValue = {"NULL": True}


def _text(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected str as names in a map, found {value!r}")
    return encodable(value)


def _number(value: float | Decimal) -> AttributeValue:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError("expected a finite number; NaN and infinity have no place in DynamoDB, write None")
        if value and not 1e-130 <= abs(value) < 1e126:
            raise TypeError("out of range: DynamoDB holds numbers of 1E-130 to 9.9E+125")
        return {"N": repr(value)}
    if isinstance(value, int) and -(10**38) < value < 10**38:
        return {"N": str(int(value))}
    if isinstance(value, Decimal) and not value.is_finite():
        raise TypeError("expected a finite number; NaN and infinity have no place in DynamoDB, write None")
    try:
        exact = _EXACT.create_decimal(value)
    except DecimalException:
        raise TypeError("expected at most 38 digits, which is what DynamoDB can hold") from None
    if exact and not _LEAST <= abs(exact) <= _GREATEST:
        raise TypeError("out of range: DynamoDB holds numbers of 1E-130 to 9.9E+125")
    return {"N": str(exact)}


def _whole_or_decimal(text: str) -> int | Decimal:
    try:
        return int(text)
    except ValueError:
        number = Decimal(text)
        return int(number) if number == number.to_integral_value() else number


def _whole_or_float(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _timestamp(value: datetime) -> AttributeValue:
    if value.tzinfo is None or value.utcoffset() is None:  # pandas' NaT has no offset to ask for
        raise TypeError("expected a datetime with a time zone, or None")
    return {"S": f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"}


def _checked_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError("expected a list")
    return value


def _decode_json(stored: AttributeValue) -> Any:
    ((tag, value),) = stored.items()
    if tag == "N":
        return _whole_or_float(value)
    if tag == "L":
        return [_decode_json(item) for item in value]
    if tag == "M":
        return {name: _decode_json(item) for name, item in value.items()}
    return decode_any(stored)


_MAKERS: dict[Kind, Callable[[Any], AttributeValue]] = {
    Kind.STRING: lambda value: {"S": value},
    Kind.INTEGER: lambda value: {"N": str(int(value))},
    Kind.FLOAT: _number,
    Kind.BOOLEAN: lambda value: {"BOOL": value},
    Kind.TIMESTAMP: _timestamp,
    Kind.DATE: lambda value: {"S": value.isoformat()},
    Kind.DECIMAL: _number,
    Kind.BINARY: lambda value: {"B": value},
    Kind.JSON: encode_any,
}
_TAGS = {
    Kind.STRING: "S",
    Kind.INTEGER: "N",
    Kind.FLOAT: "N",
    Kind.TIMESTAMP: "S",
    Kind.DATE: "S",
    Kind.DECIMAL: "N",
    Kind.BINARY: "B",
}
_READERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.INTEGER: _whole_or_decimal,
    Kind.FLOAT: float,
    Kind.DECIMAL: Decimal,
    Kind.TIMESTAMP: datetime.fromisoformat,
    Kind.DATE: date.fromisoformat,
}

"""How the values of a record are written in JSON, so that anybody can read what a key-value table holds of it.

    string      text                        timestamp   "2013-07-01T00:00:00Z", a fraction only where there is one
    integers    number                      date        "2013-07-01"
    floats      number                      decimal     text with all its digits, "12.50" for decimal(10,2)
    boolean     true, false                 binary      text, base64
    json        as it is                    array<type> array of the above

Equal values of all types but floats, json and decimals without a scale have equal texts: these may be keys.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from functools import partial
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind, decimal_digits

_EXACT = Context(prec=2100)


def written_by(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that brings a checked value into the form that JSON has it in; None where it is that."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _of_items(written_by(column.element))
    if column.kind is Kind.DECIMAL:
        return _decimals_to_text(column)
    return _WRITE.get(column.kind)


def read_by(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that brings back what `written_by` wrote; None where it is that.

    It raises TypeError, ValueError or ArithmeticError for what is no such value: anybody may write to the table.
    """
    if column.kind is Kind.LIST:
        assert column.element is not None
        items = _of_items(read_by(column.element))
        return lambda values: _a(list, values) if items is None else items(_a(list, values))
    return _READ.get(column.kind)


def compact(value: Any) -> str:
    """Return a value's JSON, without spaces."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _of_items(item: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if item is None else lambda values: [None if value is None else item(value) for value in values]


def _decimals_to_text(column: Column) -> Callable[[Decimal], str]:
    digits = decimal_digits(column)
    unit = None if digits is None else Decimal(1).scaleb(-digits[1])

    def text(number: Decimal) -> str:
        if unit is None:
            return str(number)
        number = number.quantize(unit, context=_EXACT)
        return format(number if number else number.copy_abs(), "f")  # -0.00 is 0.00

    return text


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value


_WRITE: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.isoformat().replace("+00:00", "Z"),
    Kind.DATE: date.isoformat,
    Kind.BINARY: lambda value: base64.b64encode(value).decode(),
}
_READ: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: partial(_a, str),
    Kind.INTEGER: partial(_a, int),
    Kind.BOOLEAN: partial(_a, bool),
    Kind.TIMESTAMP: lambda text: datetime.fromisoformat(text).astimezone(UTC),
    Kind.DATE: date.fromisoformat,
    Kind.BINARY: lambda text: base64.b64decode(text, validate=True),
    Kind.DECIMAL: Decimal,
    Kind.FLOAT: float,
}

r"""What Redis stores of each column: texts that tell null, a missing column and an empty text apart.

    null        one byte 0 (a text or binary that begins with that byte gets another one in front)
    string      UTF-8                               timestamp   2013-07-01T05:00:00.250000Z
    integers    17                                  date        2013-07-01
    floats      0.1 (the shortest text of a double) decimal     12.50 (all digits of its scale)
    boolean     true, false                         binary      its bytes
    json        JSON                                array<type> JSON; what JSON has not is a text in it (binary: base64)

A value reads back as it was. Equal values have equal texts, so a key has one name. The texts of timestamps, dates and
strings sort as the values do.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind, column_of, encoder_of
from dagster_adjunct.resources.errors import ConfigurationError

NULL = b"\0"
_BITS = {
    **dict.fromkeys(("tinyint", "byte"), 8),
    **dict.fromkeys(("smallint", "short", "int2"), 16),
    **dict.fromkeys(("int", "integer", "int4"), 32),
}
_EXACT = Context(prec=2100)
_LONGEST_DECIMAL = 1000  # digits on either side of the point, where none are declared
_LIST = re.compile(r"\s*(?:array\s*<(?P<of>.+)>|(?P<sql>.+)\[\])\s*", re.IGNORECASE | re.DOTALL)
_JSON = re.compile(r"\s*(?:jsonb?|(?:map|struct)\s*<.+>)\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class RedisColumn:
    """A column: its value as stored and back, and what the script may do to it.

    `encode` raises TypeError or ValueError that says what was expected. `compares`: how two stored texts are compared,
    "n" as numbers by their digits, "f" as doubles, "b" by bytes. `least` and `most` bound what adding may come to.
    """

    name: str
    declared: str
    kind: Kind
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    compares: str = "b"
    least: bytes = b""
    most: bytes = b""
    appends: bool = False

    @property
    def adds(self) -> bool:
        return self.kind in (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT)

    @property
    def may_be_key(self) -> bool:
        """Equal keys need equal texts: no floats, no JSON, no decimals without a scale."""
        return self.kind not in (Kind.FLOAT, Kind.OTHER) and (self.kind is not Kind.DECIMAL or bool(self.most))


def redis_column(name: str, declared: str) -> RedisColumn:
    """The column of that name and type; ConfigurationError for a type that is not known."""
    if _JSON.fullmatch(declared):
        return RedisColumn(name, declared, Kind.OTHER, _json_text, json.loads, appends=True)
    if _LIST.fullmatch(declared):
        to_json, from_json = _element(name, declared)
        return RedisColumn(
            name,
            declared,
            Kind.OTHER,
            lambda value: _dumped(to_json(value)),
            lambda text: from_json(json.loads(text)),
            appends=True,
        )
    column = column_of(name, declared)
    if column.kind is Kind.OTHER:
        raise ConfigurationError(
            f"column {name!r} has the type {declared!r}; known are string, smallint, int, bigint, float, double, "
            "boolean, timestamp, date, decimal(p,s), binary, json, array<type> and SQL's usual names for them.",
            "Use one of these.",
        )
    if column.kind is Kind.INTEGER:
        most = 2 ** (_BITS.get(column.type, 64) - 1) - 1
        return RedisColumn(
            name, declared, column.kind, _whole_number(most), int, "n", b"%d" % (-most - 1), b"%d" % most
        )
    if column.kind is Kind.DECIMAL:
        return _decimal_column(column, declared)
    encode, decode = _TEXTS[column.kind]
    return RedisColumn(name, declared, column.kind, encode, decode, "f" if column.kind is Kind.FLOAT else "b")


def _whole_number(most: int) -> Callable[[Any], bytes]:
    check = encoder_of(Kind.INTEGER)

    def encode(value: Any) -> bytes:
        number = value if type(value) is int else check(value)
        if not -most - 1 <= number <= most:
            raise ValueError(f"expected a number of {most.bit_length() + 1} bits")
        return b"%d" % number

    return encode


def _decimal_column(column: Column, declared: str) -> RedisColumn:
    check = encoder_of(Kind.DECIMAL)
    if not column.size:

        def any_scale(value: Any) -> bytes:
            number = check(value)
            exponent = number.as_tuple().exponent
            if not isinstance(exponent, int) or exponent < -_LONGEST_DECIMAL or number.adjusted() > _LONGEST_DECIMAL:
                raise ValueError(f"expected a finite number of at most {_LONGEST_DECIMAL} digits beside its point")
            return _plain_digits(number)

        return RedisColumn(column.name, declared, column.kind, any_scale, _decimal_of, "n")
    precision, _, scale_text = column.size[1:-1].partition(",")
    digits, scale = int(precision), int(scale_text or 0)
    unit, most = Decimal(1).scaleb(-scale), Decimal(10**digits - 1).scaleb(-scale, _EXACT)

    def fixed_scale(value: Any) -> bytes:
        number = check(value)
        try:
            exact = number.quantize(unit, context=_EXACT)
        except InvalidOperation:
            exact = None
        if exact is None or exact != number or not -most <= exact <= most:
            raise ValueError(f"expected at most {digits} digits, {scale} of them behind the point")
        return _plain_digits(exact)

    limit = _plain_digits(most)
    return RedisColumn(column.name, declared, column.kind, fixed_scale, _decimal_of, "n", b"-" + limit, limit)


def _plain_digits(number: Decimal) -> bytes:
    return format(number if number else number.copy_abs(), "f").encode()


def _decimal_of(text: bytes) -> Decimal:
    return Decimal(text.decode())


def _escaped(text: bytes) -> bytes:
    return NULL + text if text[:1] == NULL else text


def _unescaped(text: bytes) -> bytes:
    return text[1:] if text[:1] == NULL else text


def _string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError("expected a str")
    try:
        text = value.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text that UTF-8 can hold, without halves of surrogate pairs") from None
    return NULL + text if text[:1] == NULL else text


def _double(value: Any) -> bytes:
    return repr(float(value) if type(value) is float else encoder_of(Kind.FLOAT)(value)).encode()


def _boolean(value: Any) -> bytes:
    return b"true" if encoder_of(Kind.BOOLEAN)(value) else b"false"


def _moment(value: Any) -> bytes:
    moment: datetime = encoder_of(Kind.TIMESTAMP)(value)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='microseconds')}Z".encode()


def _moment_of(text: bytes) -> datetime:
    return datetime.fromisoformat(text.decode()).astimezone(UTC)


_TEXTS: dict[Kind, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    Kind.STRING: (_string, lambda text: _unescaped(text).decode()),
    Kind.FLOAT: (_double, float),
    Kind.BOOLEAN: (_boolean, lambda text: text == b"true"),
    Kind.TIMESTAMP: (_moment, _moment_of),
    Kind.DATE: (lambda day: encoder_of(Kind.DATE)(day).isoformat().encode(), lambda t: date.fromisoformat(t.decode())),
    Kind.BINARY: (lambda value: _escaped(encoder_of(Kind.BINARY)(value)), _unescaped),
}


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _json_text(value: Any) -> bytes:
    _check_json(value)
    return _dumped(value)


def _check_json(value: Any) -> None:
    """Refuse what JSON would give back otherwise: keys that are no text, tuples, numbers without digits."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError("expected text as keys of JSON objects")
            _check_json(item)
    elif isinstance(value, list):
        for item in value:
            _check_json(item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("expected finite numbers, JSON has no others")
    elif not isinstance(value, str | int | bool | None):
        raise TypeError("expected what JSON has: dicts, lists, text, numbers, booleans and None")


def _element(name: str, declared: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Between a value of this type and what stands for it in JSON."""
    inner = _LIST.fullmatch(declared)
    if inner is not None:
        to_json, from_json = _element(name, inner["of"] or inner["sql"])

        def items(value: Any) -> list[Any]:
            if not isinstance(value, list | tuple):
                raise TypeError("expected a list")
            return [None if item is None else to_json(item) for item in value]

        return items, lambda given: [None if item is None else from_json(item) for item in given]
    column = redis_column(name, declared)
    if column.kind is Kind.OTHER:

        def checked(value: Any) -> Any:
            _check_json(value)
            return value

        return checked, lambda given: given
    if column.kind is Kind.BINARY:
        return lambda value: base64.b64encode(encoder_of(Kind.BINARY)(value)).decode(), base64.b64decode
    if column.kind is Kind.FLOAT:
        as_float = encoder_of(Kind.FLOAT)
        return lambda value: number if math.isfinite(number := as_float(value)) else repr(number), float
    if column.kind in (Kind.INTEGER, Kind.BOOLEAN, Kind.STRING):

        def as_it_is(value: Any) -> Any:
            column.encode(value)  # which refuses what is none
            return value

        return as_it_is, lambda given: given
    return lambda value: column.encode(value).decode(), lambda given: column.decode(given.encode())

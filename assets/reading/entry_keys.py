"""Keys of entries: from what a caller gives to the declared types, and back from manifests.

1 as int and as bigint hash differently, so a key is brought to the declared type before it
is hashed, and a value of another kind is an error, never a miss.
"""

from __future__ import annotations

import base64
import datetime as dt
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from dagster_adjunct.resources.errors import NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.schemas.plain_values import Plain
from dagster_adjunct.resources.schemas.schema import Field

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def coerce_key(what: str, fields: Sequence[Field], key: object) -> tuple[Any, ...]:
    """Return `key` as one value a key column, in the declared types.

    A key of one column may be given bare; others as a tuple in the order of the key, or as a mapping by column
    name. `what` names the dataset in errors. Raises SchemaMismatchError and NullKeyError.
    """
    names = [field.name for field in fields]
    if isinstance(key, Mapping):
        if set(key) != set(names):
            raise SchemaMismatchError(
                f"{what}: a key names the columns {', '.join(map(str, key))}: expected {', '.join(names)}.",
                "Give exactly the key columns.",
                argument="key",
            )
        values: tuple[Any, ...] = tuple(key[name] for name in names)
    elif isinstance(key, tuple | list):
        values = tuple(key)
    else:
        values = (key,)
    if len(values) != len(fields):
        raise SchemaMismatchError(
            f"{what}: a key of {len(values)} value(s) is given: the key is ({', '.join(names)}).",
            "Give one value a key column, as a tuple in this order or as a dict.",
            argument="key",
        )
    return tuple(_coerce(what, field, value) for field, value in zip(fields, values, strict=True))


def key_from_text(what: str, fields: Sequence[Field], texts: Sequence[str]) -> tuple[Any, ...]:
    """Return the key that a command line gives, one text a key column (times as ISO 8601, binary as base64)."""
    if len(texts) != len(fields):
        raise SchemaMismatchError(
            f"{what}: {len(texts)} key value(s) are given: the key is ({', '.join(f.name for f in fields)}).",
            "Give one value a key column, in this order.",
            argument="key",
        )
    values = []
    for field, text in zip(fields, texts, strict=True):
        try:
            values.append(_parser(field.type)(text))
        except (ValueError, InvalidOperation) as error:
            raise _wrong(what, field, text) from error
    return coerce_key(what, fields, tuple(values))


def decode_key(types: Sequence[str], encoded: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of columns of these types that `encode_key` wrote into a manifest."""
    return tuple(
        _parser(kind)(value) if isinstance(value, str) else value for kind, value in zip(types, encoded, strict=True)
    )


def plain_key(
    types: Sequence[str], plain: Sequence[Callable[[Any], Plain]], encoded: Sequence[Any] | None
) -> tuple[Plain, ...]:
    """Return a key of a manifest in stored form (`plain`: by key column); () where the manifest has none."""
    if encoded is None:
        return ()
    return tuple(stored(value) for stored, value in zip(plain, decode_key(types, encoded), strict=True))


def _parser(kind: str) -> Callable[[str], Any]:
    if kind in _BITS:
        return int
    if kind.startswith("decimal"):
        return Decimal
    parsers: dict[str, Callable[[str], Any]] = {
        "date": dt.date.fromisoformat,
        "timestamp": _timestamp,
        "binary": lambda text: base64.b64decode(text, validate=True),
    }
    return parsers.get(kind, str)


def _timestamp(text: str) -> dt.datetime:
    value = dt.datetime.fromisoformat(text)
    return value if value.tzinfo else value.replace(tzinfo=dt.UTC)


def _coerce(what: str, field: Field, value: object) -> Any:
    if value is None:
        raise NullKeyError(
            f"{what}: a key has no {field.name!r}.", "No entry has a null in its key.", column=field.name
        )
    try:
        coerced = _CHECKS.get(field.type.partition("(")[0], _text)(field, value)
    except (TypeError, ValueError, OverflowError, InvalidOperation) as error:
        raise _wrong(what, field, value) from error
    return coerced


def _integer(field: Field, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)  # type: ignore[arg-type]
    if not -(2 ** (_BITS[field.type] - 1)) <= number < 2 ** (_BITS[field.type] - 1):
        raise ValueError
    return number


def _text(field: Field, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # a half of a surrogate pair can't be stored, so it is no key
    return str(value)


def _date(field: Field, value: object) -> dt.date:
    if isinstance(value, dt.datetime) or not isinstance(value, dt.date):
        raise TypeError
    return value


def _instant(field: Field, value: object) -> dt.datetime:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise TypeError
    return value.astimezone(dt.UTC)


def _decimal(field: Field, value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise TypeError
    precision, scale = (int(part) for part in field.type[8:-1].split(","))
    number = Decimal(value)
    exact = number.quantize(Decimal(1).scaleb(-scale))
    if exact != number or len(exact.as_tuple().digits) > precision:
        raise ValueError
    return exact


def _binary(field: Field, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray):
        raise TypeError
    return bytes(value)


_CHECKS: dict[str, Callable[[Field, object], Any]] = {
    **dict.fromkeys(_BITS, _integer),
    "date": _date,
    "timestamp": _instant,
    "decimal": _decimal,
    "binary": _binary,
}
_EXPECTED = {
    **{kind: f"a whole number of {bits} bits" for kind, bits in _BITS.items()},
    "string": "a text",
    "date": "a date (not a date with a time)",
    "timestamp": "a datetime with a time zone",
    "decimal": "a Decimal or whole number that fits",
    "binary": "bytes",
}


def _wrong(what: str, field: Field, value: object) -> SchemaMismatchError:
    expected = _EXPECTED.get(field.type.partition("(")[0], field.type)
    return SchemaMismatchError(
        f"{what}: key column {field.name!r} is {field.type}, and {value!r} ({type(value).__name__}) is given: "
        f"expected {expected}.",
        "Convert the value first.",
        column=field.name,
    )

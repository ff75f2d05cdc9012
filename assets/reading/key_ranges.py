"""Ranges of keys, from what a caller gives to bounds in stored form.

Bounds may be leading parts of keys: as tuples they order before all keys that they begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster_adjunct.assets.reading.entry_keys import coerce_key
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.plain_values import Plain, to_plain
from dagster_adjunct.resources.schemas.schema import Field

Bounds = tuple[tuple[Plain, ...], tuple[Plain, ...] | None]


def key_range(what: str, fields: Sequence[Field], prefix: object, start: object, end: object) -> Bounds:
    """Return (first key, first key after or None) of a prefix, or of `start` (included) to `end` (excluded).

    `prefix` is a text or bytes with which the first key column begins, or a tuple of whole values of leading key
    columns. `start` and `end` are keys or tuples of leading values. `what` names the dataset in errors.
    """
    if prefix is None:
        first = () if start is None else _leading(what, fields, start)
        return first, None if end is None else _leading(what, fields, end)
    if start is not None or end is not None:
        raise SchemaMismatchError(
            f"{what}: both a prefix and a range are given.",
            "Give prefix=, or start= and end=, not both.",
            argument="prefix",
        )
    if not isinstance(prefix, tuple | list):
        if fields[0].type not in ("string", "binary"):
            raise SchemaMismatchError(
                f"{what}: key column {fields[0].name!r} is {fields[0].type}, and the prefix {prefix!r} is given: only "
                "texts and binaries have a beginning.",
                "Give a tuple of whole values of leading key columns, or start= and end=.",
                argument="prefix",
                column=fields[0].name,
            )
        (begin,) = _leading(what, fields, prefix)
        assert isinstance(begin, bytes)
        return (begin,), _after_all_beginning_with(begin)
    values = _leading(what, fields, prefix)
    if not values:
        return (), None
    *before, last = values
    return values, (*before, last + b"\0" if isinstance(last, bytes) else last + 1)


def _leading(what: str, fields: Sequence[Field], values: object) -> tuple[Plain, ...]:
    """Return values of leading key columns in stored form."""
    given = tuple(values) if isinstance(values, tuple | list) else (values,)
    known = fields[: len(given)] if len(given) <= len(fields) else fields
    coerced = coerce_key(what, known, given)
    return tuple(to_plain(field.type)(value) for field, value in zip(known, coerced, strict=True))


def _after_all_beginning_with(begin: bytes) -> tuple[Plain, ...] | None:
    """Return the least bytes that are greater than all that begin so; None where there are none."""
    kept = begin.rstrip(b"\xff")
    return (kept[:-1] + bytes([kept[-1] + 1]),) if kept else None

"""How columns may change: added ones, and types that hold all values of the type before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import decimal_digits

_WHOLE = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}


def is_widening(narrow: str, wide: str) -> bool:
    """Whether files with the first type can be read with the second one without changing a value,
    also by Spark.

    That is so for: equal types; integers to longer ones, float to double, decimals to decimals with
    at least as many digits on both sides of the point; integers up to int also to double; and
    integers to decimals with 10 digits before the point, or 20 for bigint, as Spark demands.
    """
    if narrow == wide:
        return True
    from_decimal = decimal_digits(narrow)
    to_decimal = decimal_digits(wide)
    room = 0
    if to_decimal:
        room = to_decimal[0] - to_decimal[1]
    if from_decimal:
        more = room >= from_decimal[0] - from_decimal[1]
        return to_decimal is not None and more and to_decimal[1] >= from_decimal[1]
    if narrow in _WHOLE:
        if to_decimal:
            return room >= (20 if narrow == "bigint" else 10)
        return _WHOLE.get(wide, 0) > _WHOLE[narrow] or (wide == "double" and narrow != "bigint")
    return (narrow, wide) == ("float", "double")


def incompatible_changes(
    stored: Schema, declared: Schema, fixed: Iterable[str] = (), what: str = "the key"
) -> list[str]:
    """Return descriptions of the changes that would make stored rows unreadable: all except added
    and widened columns.

    The types of the columns `fixed` may not change at all; `what` is what these are part of ("the
    key").
    """
    called = {name.lower(): name for name in declared.names}
    changes = []
    for field in stored.fields:
        name = field.name
        was = field.type
        if name not in declared:
            if name.lower() in called:
                changes.append(f"{name} ({was}) is renamed to {called[name.lower()]}")
            else:
                changes.append(f"{name} ({was}) is removed")
            continue
        kind = declared.field(name).type
        if kind != was and name in fixed:
            changes.append(
                f"{name} is {kind}, was {was}, and is a column of {what}, which can't change"
            )
        elif not is_widening(was, kind):
            changes.append(f"{name} is {kind}, was {was}, whose values do not all fit")
    return changes


def evolve_schema(stored: Schema, declared: Schema) -> Schema:
    """Return the stored columns in their order with the declared types, then the added ones.

    Columns that are sensitive in either schema stay so.
    """
    names = [*stored.names, *(name for name in declared.names if name not in stored)]
    return declared.select(names).with_sensitive(*stored.sensitive)

"""How columns may change while what is stored stays as it is: added ones are null in it, widened ones are cast."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.resources.schemas.schema import Schema, widens


def refused_changes(stored: Schema, declared: Schema, fixed: Iterable[str] = (), what: str = "the key") -> list[str]:
    """Return in words which changes stored rows can't be read with; none for columns that are only added or widened.

    The types of `fixed`, the columns of `what`, never change.
    """
    now = {field.name: field.type for field in declared.fields}
    called = {name.lower(): name for name in now}
    refused = []
    for field in stored.fields:
        name, was, kind = field.name, field.type, now.get(field.name)
        if kind is None and name.lower() in called:
            refused.append(f"{name} ({was}) is called {called[name.lower()]}")
        elif kind is None:
            refused.append(f"{name} ({was}) is removed")
        elif kind != was and name in fixed:
            refused.append(f"{name} is {kind}, was {was}, and is a column of {what}, which never changes")
        elif not widens(was, kind):
            refused.append(f"{name} is {kind}, was {was}, whose values do not all fit")
    return refused


def evolved(stored: Schema, declared: Schema) -> Schema:
    """Return the stored columns in their order with the declared types, then those that were added.

    What is sensitive in one of the two stays so.
    """
    names = [*stored.names, *(name for name in declared.names if name not in stored)]
    return declared.select(names).with_sensitive(*stored.sensitive)

"""Paths, which name a value inside a column of structs: `customer.address.city`.

A name that a column has means this column, even if it contains dots. Otherwise its parts are those
of a path, in backticks where they contain dots: `` `shipped.to`.city ``. A path goes through
structs only; it means null where a struct on its way is null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dagster_adjunct.resources.schemas.types import Struct, Type, parse_type, write_name

_STEP = re.compile(r"`(?:[^`]|``)+`|[^`.]+")


@dataclass(frozen=True, slots=True)
class Path:
    """A value inside a column: the `steps` to it, at first the name of the column, and its type."""

    steps: tuple[str, ...]
    type: str

    @property
    def column(self) -> str:
        """The name of the column that the value is in."""
        return self.steps[0]

    @property
    def name(self) -> str:
        """The name that a column with only this value has by default: the last step."""
        return self.steps[-1]

    @property
    def expression(self) -> str:
        """The Spark SQL expression of the value."""
        return ".".join(f"`{step.replace('`', '``')}`" for step in self.steps)

    def __str__(self) -> str:
        return ".".join(map(write_name, self.steps))


def split_path(text: str) -> tuple[str, ...]:
    """Return the steps of a path, a single one for a plain name; () for a text that is no path."""
    steps = []
    at = 0
    while found := _STEP.match(text, at):
        step = found[0]
        if step.startswith("`"):
            step = step[1:-1].replace("``", "`")
        steps.append(step)
        at = found.end()
        if at == len(text):
            return tuple(steps)
        if text[at] != ".":
            return ()
        at += 1
    return ()


def find_path(name: str, types: Mapping[str, str | None]) -> Path | None:
    """Return the path that a name means among columns of these types.

    None if the name is that of a column, or if there is no such value. Types are None where they
    are unknown.
    """
    if name in types:
        return None
    steps = split_path(name)
    if len(steps) < 2:
        return None
    column_type = types.get(steps[0])
    if column_type is None:
        return None
    type_: Type = parse_type(column_type)
    for step in steps[1:]:
        member = type_.member(step) if isinstance(type_, Struct) else None
        if member is None:
            return None
        type_ = member.type
    return Path(steps, str(type_))

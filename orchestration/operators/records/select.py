"""Select: records with exactly these columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dagster_adjunct.orchestration.operators.columns.expressions import plain_column, split_alias
from dagster_adjunct.orchestration.operators.records.map import Map
from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Select(Map):
    """Records with exactly these columns: a map in which each expression has a name that can be read off."""

    kind: ClassVar[str] = "select"


def checked_select(after: str, columns: Sequence[str]) -> Select:
    """Return the selection that a user's arguments ask for, behind the operator `after`."""
    if not columns:
        raise ConfigurationError(f"select after {after} names no column.", "Name those to keep.", argument="columns")
    for item in columns:
        text = item if isinstance(item, str) else ""
        what, name = split_alias(text)
        if not text.strip() or (name is None and plain_column(what) is None):
            raise ConfigurationError(
                f"select after {after} got {item!r}: expected a column, 'column as name', or 'expression as name'.",
                'Give the expression a name, "upper(shop) as shop"; to keep all columns, use with_columns().',
                argument="columns",
            )
    return Select(tuple(columns))

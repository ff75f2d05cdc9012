"""What users write in the arguments of operators, checked and put into one form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.graph import Selected
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset

_ALIAS = re.compile(r"(?P<what>.*\S)\s+as\s+(?P<name>`[^`]+`|\w+)", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(r"`(?P<quoted>[^`]+)`|(?P<plain>[A-Za-z_]\w*)")
_PARTITIONS = 100_000


def column_names(what: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return column names given as one string or several, each once."""
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.strip() or name.startswith("__"):
            raise ConfigurationError(
                f"{what} names the column {name!r}: expected a name that does not begin with '__'.", "Correct it."
            )
    twice = _twice(names)
    if twice:
        raise ConfigurationError(f"{what} names column {twice!r} twice.", "Name it once.")
    return names


def partition_count(what: str, value: int | None) -> int | None:
    """Return a partition count that can be used, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _PARTITIONS:
        raise ConfigurationError(f"{what} is {value!r}: expected 1 to {_PARTITIONS:,}.", "Change it.")
    return value


def plain_column(expression: str) -> str | None:
    """Return the column that an expression is, None when it is anything more than a name."""
    match = _PLAIN.fullmatch(expression.strip())
    return (match["quoted"] or match["plain"]) if match else None


def split_alias(expression: str) -> tuple[str, str | None]:
    """Split "upper(model) as model" into expression and name; the name is None when there is none."""
    match = _ALIAS.fullmatch(expression.strip())
    if match is None:
        return expression.strip(), None
    return match["what"].strip(), match["name"].strip("`")


def join_columns(
    operator: str, dataset: AdjunctDataset, on: str | Sequence[str] | Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return pairs (stream column, dataset column) in the order of the dataset's key."""
    if isinstance(on, Mapping):
        pairs = [(str(stream), str(column)) for stream, column in on.items()]
    else:
        pairs = [(name, name) for name in column_names(f"{operator}: on=", on)]
    key = ", ".join(dataset.key)
    by_column: dict[str, str] = {}
    for stream, column in pairs:
        if column in by_column:
            raise PlanningError(f"{operator}: on= compares dataset column {column!r} twice.", "Keep one of them.")
        if column not in dataset.key:
            raise PlanningError(
                f"{operator}: on= names {column!r}, which is not in the key of dataset {dataset.name!r} ({key}).",
                f"Join on the key; for other names on the stream write on={{stream column: {dataset.key[0]!r}}}.",
            )
        by_column[column] = stream
    missing = ", ".join(repr(column) for column in dataset.key if column not in by_column)
    if missing:
        raise PlanningError(
            f"{operator}: on= lacks {missing} of the key of dataset {dataset.name!r} ({key}), "
            "so a record could meet several entries.",
            "Name every column of the key in on=.",
        )
    column_names(f"{operator}: on=", list(by_column.values()))
    return tuple((by_column[column], column) for column in dataset.key)


def selected_columns(operator: str, select: Sequence[str] | None, prefix: str) -> tuple[Selected, ...] | None:
    """Return what `select` asks for: "year as plane_year" as it says, plain names after `prefix`."""
    if select is None:
        return None
    if isinstance(select, str):
        raise ConfigurationError(
            f"{operator}: select={select!r} is one string: expected a list.", f"Write select=[{select!r}]."
        )
    chosen = []
    for item in select:
        what, alias = split_alias(str(item))
        column = plain_column(what)
        if column is None:
            raise ConfigurationError(
                f"{operator}: select names {item!r}: expected a column, or 'column as name'.",
                "Compute other values with map() after the join.",
            )
        chosen.append(Selected(column, alias or prefix + column))
    twice = _twice([item.name for item in chosen])
    if twice:
        raise PlanningError(
            f"{operator}: select gives two columns the name {twice!r}.", f"Rename one: '{twice} as other_name'."
        )
    return tuple(chosen)


def _twice(names: Sequence[str]) -> str | None:
    """The first name that stands twice; Spark's column names ignore case."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None

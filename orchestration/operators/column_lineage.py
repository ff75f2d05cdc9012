"""What records and their columns are made of, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.orchestration.operators.expressions import columns_named

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.known_columns import Columns

Kind = Literal["stream", "files", "dataset", "table"]


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes") or a remote table."""

    kind: Kind
    name: str


Sources = tuple[tuple[Node, str], ...]
"""The columns, each of an asset, that one column is made of."""
Made = dict[str, Sources]
"""Columns by name, each with what it is made of; one that nothing is known of is left out."""


@dataclass(frozen=True, slots=True)
class LineageContext:
    """Where the columns of one operator are traced: its application, and the columns that are planned before (one for
    each input) and after it."""

    app: Declarations
    before: tuple[Columns, ...]
    after: Columns


def whole(node: Node, columns: Iterable[str]) -> Made:
    """Return columns that are those of `node`, each made of itself."""
    return {name: ((node, name),) for name in columns}


def add(made: Made, name: str, sources: Sources) -> None:
    """Say in `made` that a column is made of these, too."""
    made[name] = tuple(dict.fromkeys((*made.get(name, ()), *sources)))


def sources_of(expression: str, columns: Mapping[str, Sources]) -> Sources:
    """Return the sources of the columns that a SQL expression names."""
    known = {name.lower(): sources for name, sources in columns.items()}
    return tuple(dict.fromkeys(source for name in columns_named(expression) for source in known.get(name, ())))

"""What records and their columns are made of, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.sql.expression import NILADIC
from dagster_adjunct.resources.sql.parsing import parsed

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.columns.known_columns import Columns
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.resources.sql.expression import Expression

Kind = Literal["stream", "files", "dataset", "table", "sink"]


@dataclass(frozen=True, slots=True, order=True)
class LineageNode:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table, or what
    an application hands records to ("alerts/notify")."""

    kind: Kind
    name: str


Sources = tuple[tuple[LineageNode, str], ...]
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


def whole(node: LineageNode, columns: Iterable[str]) -> Made:
    """Return columns that are those of `node`, each made of itself."""
    return {name: ((node, name),) for name in columns}


def add(made: Made, name: str, sources: Sources) -> None:
    """Say in `made` that a column is made of these, too."""
    made[name] = tuple(dict.fromkeys((*made.get(name, ()), *sources)))


def sources_of(expression: str, columns: Mapping[str, Sources]) -> Sources:
    """Return what an expression is made of; () where it is not known of every column that it names."""
    return expression_sources(parsed(expression), columns)


def expression_sources(
    read: Expression, columns: Mapping[str, Sources], aliases: Mapping[str, Sources] | None = None
) -> Sources:
    """Return what an expression is made of that has been read; see `sources_of`.

    `aliases` are the names that stand before it in one list: they count where no column has them.
    """
    known = {name.lower(): sources for name, sources in (*(aliases or {}).items(), *columns.items())}
    column_sources: list[Sources] = []
    for name in read.columns:
        sources = known.get(str(name).lower()) or known.get(name.name.lower()) or _of_fields(name.name, known)
        if not sources and name.name.lower() not in NILADIC:
            return ()
        column_sources.append(sources or ())
    return tuple(dict.fromkeys(source for sources in column_sources for source in sources))


def _of_fields(name: str, known: Mapping[str, Sources]) -> Sources:
    """Return what a struct is made of, where that is known of its fields."""
    within = f"{name.lower()}."
    return tuple(source for field, sources in known.items() if field.startswith(within) for source in sources)

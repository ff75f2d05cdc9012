"""Follows column names through the operators, as far as they can be known. None: not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.entries import schema_of_entries
from dagster_adjunct.orchestration.application.arguments import plain_column, split_alias
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.graph import Join, Map
    from dagster_adjunct.orchestration.planner.catalog import Catalog

Columns = tuple[str, ...] | None


def require(operator: str, side: str, needed: tuple[str, ...], columns: Columns, next_step: str) -> None:
    """Raise PlanningError when `columns` are known and lack one of the needed."""
    missing = [name for name in needed if columns is not None and name not in columns]
    if missing:
        raise PlanningError(
            f"{operator}: {side} has no column {missing[0]!r}; its columns there are {', '.join(columns or ())}.",
            next_step,
        )


def after_map(operator: str, spec: Map, columns: Columns) -> Columns:
    """Return the columns that a map leaves; None when one of them has no name that can be read off."""
    if spec.function is not None:
        return None
    result: list[str] = []
    known = True
    for expression in spec.expressions:
        if expression.strip() == "*":
            known = known and columns is not None
            result.extend(columns or ())
            continue
        what, alias = split_alias(expression)
        column = plain_column(what)
        if column is not None:
            require(operator, "the stream", (column,), columns, "Correct the expression.")
        name = alias or column
        known = known and name is not None
        result.append(name or "")
    named = [name for name in result if name]
    _refuse_collision(operator, named, "List the columns to keep instead of '*', or choose another name.")
    return tuple(result) if known else None


def partitioning_after_map(spec: Map, partitioned_by: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names that the partition columns have after a map, None when one of them is lost.

    A plain name, a plain name with another ("dest as faa") and "*" pass a column on unchanged.
    """
    if spec.function is not None:
        return partitioned_by if spec.keeps_partitioning else None
    passed: dict[str, str] = {}
    computed: set[str] = set()
    star = False
    for expression in spec.expressions:
        if expression.strip() == "*":
            star = True
            continue
        what, alias = split_alias(expression)
        column = plain_column(what)
        if column is not None:
            passed.setdefault(column, alias or column)
        elif alias is not None:
            computed.add(alias.lower())
    kept = []
    for column in partitioned_by:
        if star and column.lower() not in computed:
            kept.append(column)
        elif column in passed:
            kept.append(passed[column])
        else:
            return None
    return tuple(kept)


def of_dataset(dataset: AdjunctDataset, catalog: Catalog) -> Columns:
    """Return the columns that a dataset stores; its input must have them where both are known."""
    if isinstance(dataset.input, str):
        facts = catalog.get(dataset.input)
        records = facts.schema if facts else None
    else:
        records = dataset.input.schema
    if records is None:
        return dataset.columns
    try:
        return schema_of_entries(dataset, records).names
    except SchemaMismatchError as error:
        raise PlanningError(error.problem, "Correct key=, columns= or the extractor of the dataset.") from error


def after_join(operator: str, spec: Join, dataset: AdjunctDataset, stream: Columns, stored: Columns) -> Columns:
    """Return the columns after a join; both sides must have what it names, and no name may come twice."""
    require(
        operator, "the stream", tuple(name for name, _ in spec.on), stream,
        f"Correct on=, or join before the column is dropped; the key of dataset {dataset.name} is "
        f"{', '.join(dataset.key)}.",
    )  # fmt: skip
    side = f"dataset {dataset.name} (input {dataset.input})"
    require(operator, side, tuple(name for _, name in spec.on), stored, "Correct the dataset's key=.")
    if spec.select is not None:
        require(operator, side, tuple(item.column for item in spec.select), stored, "Correct select=.")
    elif stored is None:
        return None
    added = [item.name for item in spec.selection(stored or ())]
    there = {name.lower() for name in stream or ()}
    taken = [name for name in added if name.lower() in there]
    if taken:
        raise PlanningError(
            f"{operator}: the stream and dataset {dataset.name} both bring a column {taken[0]!r}; the stream's "
            f"columns there are {', '.join(stream or ())}.",
            f'Rename the added one: select=["… as {dataset.name}_{taken[0]}"], or prefix="{dataset.name}_".',
        )
    _refuse_collision(operator, added, "Rename one with 'column as name'.")
    return None if stream is None else (*stream, *added)


def _refuse_collision(operator: str, names: list[str], next_step: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise PlanningError(f"{operator}: two columns would be called {name!r}.", next_step)
        seen.add(name.lower())

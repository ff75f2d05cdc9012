"""Which columns each output's columns are made of, read off the operators: what can't be read off is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors.extractor import Projection
from dagster_adjunct.orchestration.application.output_lineage import source_of
from dagster_adjunct.orchestration.operators.spec.column_lineage import (
    LineageContext,
    LineageNode,
    Made,
    Sources,
    add,
    sources_of,
    whole,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan


def output_columns(app: Application, plan: ExecutionPlan) -> dict[LineageNode, Made]:
    """Return, for each output, the columns of streams and datasets that each of its columns is made of.

    A computed column is made of all that its expression names. What a function returns is not known, nor what comes
    after it. A join's condition makes no column.
    """
    planned = {operator.id: operator.columns for operator in plan.operators}
    made: dict[str, Made] = {}
    outputs: dict[LineageNode, Made] = {}
    for operator in app.operators:
        arriving = [made[source] for source in operator.inputs]
        target = operator.spec.target(app)
        if target is not None:
            for columns in arriving:
                for name, sources in operator.spec.written_columns(columns).items():
                    add(outputs.setdefault(target, {}), name, sources)
        context = LineageContext(app, tuple(planned[source] for source in operator.inputs), planned[operator.id])
        made[operator.id] = operator.spec.column_sources(context, arriving)
    return outputs


def dataset_columns(dataset: AdjunctDataset, stored: Iterable[str], records: Iterable[str] | None) -> Made:
    """Return which columns of its input each stored column of a dataset is made of; `records` are the input's."""
    source = source_of(dataset)
    if source is None:
        return {}
    if dataset.extractor is None:
        there = None if records is None else {name.lower() for name in records}
        return whole(source, [name for name in stored if there is None or name.lower() in there])
    if not isinstance(dataset.extractor, Projection) or records is None:
        return {}
    taken, computed = whole(source, records), dict(dataset.extractor.select)
    return {name: sources_of(computed.get(name, f"`{name}`"), taken) for name in stored}


def origins(outputs: Mapping[LineageNode, Made]) -> dict[LineageNode, Made]:
    """Return the same with the columns of outputs replaced by what these are made of."""
    traced: dict[LineageNode, Made] = {}
    for node, made in outputs.items():
        traced[node] = {}
        for name, sources in made.items():
            for source, column in sources:
                earlier = traced.get(source, {}).get(column) if source != node else None
                add(traced[node], name, earlier or ((source, column),))
    return traced


def descriptions_of(app: Application, made: Mapping[str, Sources]) -> dict[str, str]:
    """Return what is said of columns that are a dataset's own, passed on alone."""
    descriptions = {
        (LineageNode("dataset", dataset.name), name): text
        for dataset in app.datasets
        for name, text in dataset.column_descriptions
    }
    sole = {name: sources[0] for name, sources in made.items() if len(sources) == 1}
    return {name: descriptions[source] for name, source in sole.items() if source in descriptions}


def hidden_columns(app: Application, made: Mapping[str, Sources], columns: Iterable[str]) -> set[str]:
    """Return which of an output's columns are masked: what is made of a sensitive column, or has the name of one.

    Where any is sensitive, a column of unknown origin is masked, too.
    """
    sensitive = {
        (LineageNode("dataset", dataset.name), name.lower()) for dataset in app.datasets for name in dataset.sensitive
    }
    if not sensitive:
        return set()
    names = {name for _, name in sensitive}
    return {
        name
        for name in columns
        if name.lower() in names
        or not made.get(name)
        or any((node, column.lower()) in sensitive for node, column in made[name])
    }

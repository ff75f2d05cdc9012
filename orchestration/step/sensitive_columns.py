"""Which columns of an operator's records are never told: what is made of a sensitive column, or has the name of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.column_lineage import LineageContext, Node
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.column_lineage import Made
    from dagster_adjunct.orchestration.step.step_context import StepContext


def sensitive_columns(context: StepContext, operator: str, columns: Iterable[str]) -> frozenset[str]:
    """Return which of the columns of records that leave an operator hold what a schema or a dataset calls sensitive.

    Where anything is sensitive, a column of unknown origin is taken for it, too.
    """
    sensitive = _declared(context)
    if not sensitive:
        return frozenset()
    names = {name for _, name in sensitive}
    made = _made(context, operator)
    return frozenset(
        name
        for name in columns
        if name.lower() in names
        or not made.get(name)
        or any((node, column.lower()) in sensitive for node, column in made[name])
    )


def _declared(context: StepContext) -> set[tuple[Node, str]]:
    app = context.app
    found = {(Node("dataset", dataset.name), name.lower()) for dataset in app.datasets for name in dataset.sensitive}
    for stream in app.inputs:
        system, name = split_stream_name(stream)
        schema = context.systems[system].info(name).schema
        found |= {
            (Node("stream", stream), field.name.lower())
            for field in (schema.fields if schema else ())
            if field.sensitive
        }
    return found


def _made(context: StepContext, wanted: str) -> Made:
    planned = {operator.id: operator.columns for operator in context.plan.operators}
    made: dict[str, Made] = {}
    for operator in context.app.operators:
        before = tuple(planned[source] for source in operator.inputs)
        lineage = LineageContext(context.app, before, planned[operator.id])
        made[operator.id] = operator.spec.column_sources(lineage, [made[source] for source in operator.inputs])
        if operator.id == wanted:
            return made[wanted]
    return {}

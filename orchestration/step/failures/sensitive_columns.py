"""Which columns of an operator's records are never told: what is made of a sensitive column, or has the name of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, LineageNode
from dagster_adjunct.resources.errors import StreamNotFoundError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.resources.schemas.schema import Schema


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


def sensitive_entries(context: StepContext, name: str) -> frozenset[str]:
    """Return the columns of a dataset that it calls sensitive, or the schema of the stream that it is made of."""
    dataset = context.app.dataset(name)
    own = frozenset(column.lower() for column in dataset.sensitive)
    if isinstance(dataset.input, OwnedBy):
        return own | _flagged(dataset.input.schema)
    return own | (_of_stream(context, dataset.stream) if dataset.stream else frozenset())


def _declared(context: StepContext) -> set[tuple[LineageNode, str]]:
    """Return what is declared as sensitive, looked for once a run: every operator of a batch asks."""
    if not context.declared_sensitive:
        context.declared_sensitive.append(_looked_for(context))
    return context.declared_sensitive[0]


def _looked_for(context: StepContext) -> set[tuple[LineageNode, str]]:
    app = context.app
    flagged = {
        (LineageNode("dataset", dataset.name), name)
        for dataset in app.datasets
        for name in sensitive_entries(context, dataset.name)
    }
    for stream in app.inputs:
        flagged |= {(LineageNode("stream", stream), name) for name in _of_stream(context, stream)}
    for operator in app.operators:  # what functions return: known by its name
        schemas = operator.spec.declared_schemas
        flagged |= {(LineageNode("stream", operator.id), name) for schema in schemas for name in _flagged(schema)}
    return flagged


def _of_stream(context: StepContext, stream: str) -> frozenset[str]:
    known = context.sensitive_of_streams
    if stream not in known:
        system, name = split_stream_name(stream)
        try:
            known[stream] = _flagged(context.systems[system].info(name).schema)
        except (StreamNotFoundError, KeyError):  # a dataset that was made before, from what is no more
            known[stream] = frozenset()
    return known[stream]


def _flagged(schema: Schema | None) -> frozenset[str]:
    return frozenset(field.name.lower() for field in (schema.fields if schema else ()) if field.sensitive)


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

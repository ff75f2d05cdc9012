"""Refuses records whose columns their stream, or a key that they are compared with, can't take, as far as names and
types are known before anything runs.

The type of a column is known while it is passed on or brought by a dataset, and that of most that are computed
(`resources/sql/expression_types.py`); after a function nothing is. What is not known here is asked of Spark before a
batch is begun (`step/spark_proof/rehearsal.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.known_columns import Types
from dagster_adjunct.orchestration.operators.spec.planning_values import ComparedColumn, PlanContext
from dagster_adjunct.orchestration.operators.spec.stream_facts import new_streams_in
from dagster_adjunct.orchestration.planner.known_records.fed_columns import check_fed
from dagster_adjunct.orchestration.planner.known_records.key_types import (
    check_declared_types,
    check_key_types,
    shortened,
)
from dagster_adjunct.orchestration.planner.refused_operators.refusals import Refusals
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.evolution import refused_changes
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.schema import check_key_types as check_key_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog, StreamFacts


def check_types(app: Application, catalog: Catalog) -> tuple[tuple[str, ...], dict[str, Types]]:
    """Raise PlanningError for outputs that would not be the columns that their streams have, or more, or wider, and for
    joins of keys of different types; return what of types is unproven, in words, and the types after each operator."""
    after: dict[str, Types] = {}
    unproven: list[str] = []
    refusals = Refusals()
    for operator in app.operators:
        if refusals.stop(operator):
            continue
        with refusals.of(operator):
            arriving = [after[source] for source in operator.inputs]
            target = operator.spec.target(app)
            facts = None if target is None else catalog.get(target.name)  # of a stream: no other name holds a dot
            for types in map(operator.spec.written_types, arriving):
                if types is None or target is None:
                    continue
                if facts is not None:
                    _check(app, operator.id, facts, types)
                elif operator.spec.role == "output" and new_streams_in(catalog, target.name).typed:
                    _check_new(operator.id, target.name, app.outputs[target.name].key, types)
                    unproven += _not_known(operator.id, target.name, types)
            context = PlanContext(operator.id, app, catalog)
            declared = [*operator.spec.declared_types(context, arriving), *_stored(facts, operator.spec, arriving)]
            known = None not in arriving
            unproven += check_declared_types(operator.id, declared, columns_known=known, strict=app.strict)
            after[operator.id] = operator.spec.types(context, arriving)
            unproven += check_key_types(operator.id, operator.spec.compared(context, arriving), strict=app.strict)
    refusals.tell()
    return tuple(unproven), after


def _stored(facts: StreamFacts | None, spec: Spec, arriving: Sequence[Types]) -> list[ComparedColumn]:
    """Return the columns that are written to a stream that exists, with the types that it has."""
    if facts is None or facts.schema is None or not facts.evolves:
        return []
    (types,) = map(spec.written_types, arriving)
    stored = {field.name: field.type for field in facts.schema.fields}
    return [
        ComparedColumn(name, None if types is None else types[name], f"stream {facts.name}", stored[name])
        for name in (stored if types is None else types)
        if name in stored
    ]


def _check_new(operator: str, stream: str, key: Sequence[str], types: dict[str, str | None]) -> None:
    """Refuse columns that a stream can't be made with; one of an unknown type may be any."""
    try:
        schema = Schema(tuple(Field(name, kind or "string") for name, kind in types.items()))
        check_key_columns(schema, key, "there")
    except SchemaMismatchError as error:
        raise _unfit(operator, stream, error) from error


def _not_known(operator: str, stream: str, types: dict[str, str | None]) -> list[str]:
    unknown = [repr(name) for name, kind in types.items() if kind is None]
    if not unknown:
        return []
    return [
        f"{operator}: whether stream {stream} can hold {shortened(unknown)} is unproven: no type is known of it yet."
    ]


def _check(app: Application, operator: str, facts: StreamFacts, types: dict[str, str | None]) -> None:
    if facts.schema is None or not facts.evolves:
        return
    stored = {field.name: field.type for field in facts.schema.fields}
    try:
        declared = Schema(
            tuple(Field(name, _known(kind) or stored.get(name, "string")) for name, kind in types.items())
        )
    except SchemaMismatchError as error:
        raise _unfit(operator, facts.name, error) from error
    refused = refused_changes(facts.schema, declared, facts.key)
    if refused:
        raise PlanningError(
            f"{operator}: stream {facts.name} has other columns than would be sent to it: {'; '.join(refused)}. "
            "Columns can only be added, or widened.",
            "Send these columns as they were (one that is not needed any more can be null: cast(null as …) as …), or "
            "send to a stream of another name, or begin it anew: "
            f"adjunct stream delete {split_stream_name(facts.name)[1]} --reason ….",
            stream=facts.name,
            operator=operator,
        )
    check_fed(app, operator, facts.name, facts.schema, declared)


def _known(kind: str | None) -> str | None:
    """Return a type, None as well for that of null, which every column of a stream can hold."""
    return None if kind == "void" else kind


def _unfit(operator: str, stream: str, error: SchemaMismatchError) -> PlanningError:
    return PlanningError(
        f"{operator}: stream {stream} can't take what would be sent to it: {error.problem}",
        error.next_step,
        stream=stream,
        operator=operator,
        column=error.column,
    )

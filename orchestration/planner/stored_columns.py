"""Refuses records whose columns their stream can't take, as far as names and types are known before anything runs.

The type of a column is known while it is passed on, cast, or brought by a dataset; that of a computed one is not, and
after a function nothing is. What is not known here is asked of Spark before a batch is begun (`output_columns.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.entries import schema_of_entries
from dagster_adjunct.orchestration.application.arguments import plain_column, split_alias
from dagster_adjunct.orchestration.application.graph import Input, Join, Map, SendToStream, SendToTable
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.evolution import refused_changes
from dagster_adjunct.resources.schemas.schema import Field, Schema

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.application.graph import Operator
    from dagster_adjunct.orchestration.planner.catalog import Catalog, StreamFacts

# A type is None where it is not known; so are the columns.
Typed = dict[str, str | None] | None

_CAST = re.compile(r"\s*(?:try_)?cast\s*\([^()]*\bas\s+([a-z]+(?:\s*\(\s*\d+\s*,\s*\d+\s*\))?)\s*\)\s*", re.IGNORECASE)


def check_stored_columns(app: Application, catalog: Catalog) -> None:
    """Raise PlanningError for the first output that would not be the columns that its stream has, or more, or wider."""
    after: dict[str, Typed] = {}
    for operator in app.operators:
        if isinstance(operator.spec, Input):
            facts = catalog.get(operator.spec.stream)
            after[operator.id] = None if facts is None or facts.schema is None else _types(facts.schema)
            if operator.spec.broadcast is not None and (typed := after[operator.id]) is not None:
                typed[operator.spec.broadcast] = "int"
            continue
        typed = after[operator.inputs[0]]
        stream = _written(app, operator)
        facts = catalog.get(stream) if stream else None
        if stream and facts is not None and typed is not None:
            _check(operator.id, stream, facts, typed)
        after[operator.id] = _after(app, catalog, operator, typed)


def _written(app: Application, operator: Operator) -> str | None:
    spec = operator.spec
    if isinstance(spec, SendToStream):
        return spec.stream
    return app.dataset(spec.table).stream if isinstance(spec, SendToTable) and spec.dataset else None


def _check(operator: str, stream: str, facts: StreamFacts, typed: dict[str, str | None]) -> None:
    if facts.schema is None or not facts.evolves:
        return
    stored = {field.name: field.type for field in facts.schema.fields}
    declared = Schema(tuple(Field(name, kind or stored.get(name, "string")) for name, kind in typed.items()))
    refused = refused_changes(facts.schema, declared, facts.key)
    if refused:
        raise PlanningError(
            f"{operator}: stream {stream} has other columns than would be sent to it: {'; '.join(refused)}. Columns "
            "can only be added, or widened.",
            "Send these columns as they were (one that is not needed any more can be null: cast(null as …) as …), or "
            "send to a stream of another name, or begin it anew: "
            f"adjunct stream delete {stream.partition('.')[2]} --reason ….",
        )


def _after(app: Application, catalog: Catalog, operator: Operator, typed: Typed) -> Typed:
    spec = operator.spec
    if typed is None:
        return None
    if isinstance(spec, Map):
        return None if spec.function is not None else _mapped(spec.expressions, typed)
    if isinstance(spec, Join):
        dataset = app.dataset(spec.dataset)
        facts = catalog.get(dataset.stream) if dataset.stream else None
        records = (facts.schema if facts else None) if isinstance(dataset.input, str) else dataset.input.schema
        if records is None:
            return None
        try:
            entries = _types(schema_of_entries(dataset, records))
        except AdjunctError:  # which the plan itself tells
            return None
        return typed | {each.name: entries.get(each.column) for each in spec.selection(tuple(entries))}
    return typed


def _mapped(expressions: tuple[str, ...], typed: dict[str, str | None]) -> Typed:
    result: dict[str, str | None] = {}
    for expression in expressions:
        if expression.strip() == "*":
            result |= typed
            continue
        what, alias = split_alias(expression)
        column = plain_column(what)
        name = alias or column
        if name is None:
            return None
        result[name] = typed.get(column) if column is not None else _cast(what)
    return result


def _cast(expression: str) -> str | None:
    found = _CAST.fullmatch(expression)
    try:
        return Field("value", found[1]).type if found else None
    except AdjunctError:
        return None


def _types(schema: Schema) -> dict[str, str | None]:
    return {field.name: field.type for field in schema.fields}

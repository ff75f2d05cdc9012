"""The columns whose values must not appear in errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import StreamSystem


def list_sensitive_columns(
    app: Application, systems: Mapping[str, StreamSystem]
) -> frozenset[tuple[LineageNode, str]]:
    """Return the columns that datasets and schemas, also those in operators, mark as sensitive,
    in lower case.
    """

    @cache
    def of_stream(stream: str) -> frozenset[str]:
        system, name = split_stream_name(stream)
        try:
            return _sensitive_names(systems[system].info(name).schema)
        except (errors.StreamNotFoundError, KeyError):  # a dataset of a deleted stream
            return frozenset()

    found = {LineageNode("stream", stream): of_stream(stream) for stream in app.inputs}
    for dataset in app.datasets:
        own = frozenset(column.lower() for column in dataset.masked)
        if isinstance(dataset.input, OwnedBy):
            own |= _sensitive_names(dataset.input.schema)
        elif dataset.stream:
            own |= _with_made_columns(dataset, of_stream(dataset.stream))
        found[LineageNode("dataset", dataset.name)] = own
    for operator in app.operators:  # results of functions: matched by column name
        names = frozenset[str]().union(*map(_sensitive_names, operator.spec.declared_schemas))
        found[LineageNode("stream", operator.id)] = names
    columns: set[tuple[LineageNode, str]] = set()
    for node, names in found.items():
        columns |= {(node, name) for name in names}
    return frozenset(columns)


def _with_made_columns(dataset: AdjunctDataset, sensitive: frozenset[str]) -> frozenset[str]:
    """Return the sensitive columns of a dataset's input, and those that the dataset makes of
    them.
    """
    made = [path.name.lower() for path in dataset.paths if path.steps[0].lower() in sensitive]
    return sensitive.union(made)


def _sensitive_names(schema: Schema | None) -> frozenset[str]:
    if schema is None:
        return frozenset()
    return frozenset(field.name.lower() for field in schema.fields if field.sensitive)

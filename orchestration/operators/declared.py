"""What operators know of the application that they are declared in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.tables.table import AnyTable


class DeclaredOutput(Protocol):
    """A declared output stream: its name, partition count, partitioning columns, and which of its
    columns were renamed or dropped.
    """

    @property
    def name(self) -> str: ...
    @property
    def partitions(self) -> int: ...
    @property
    def key(self) -> tuple[str, ...]: ...
    @property
    def changes(self) -> ColumnChanges: ...


class DeclaredApplication(Protocol):
    """An application: its name, and the outputs, datasets and remote tables that it declares."""

    @property
    def name(self) -> str: ...
    @property
    def outputs(self) -> Mapping[str, DeclaredOutput]: ...
    @property
    def tables(self) -> Mapping[str, AnyTable]: ...
    @property
    def datasets(self) -> Iterable[AdjunctDataset]: ...
    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""


def declared_changes(app: DeclaredApplication, stream: str) -> ColumnChanges:
    """Return the renames and removals that are declared for a stream which the application writes:
    by its output, or by a dataset whose rows are the stream's records.
    """
    if stream in app.outputs:
        return app.outputs[stream].changes
    for dataset in app.datasets:
        if dataset.stream == stream and dataset.extractor is None and dataset.evolution:
            return dataset.evolution
    return NO_CHANGES

"""What an application has declared, as the arguments of its operators: tables and output streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import KeyedTable


@dataclass(frozen=True, slots=True, eq=False)
class DatasetHandle:
    """An adjunct dataset as a table of one application, which may demand that it is not staler than so much."""

    graph: OperatorGraph = field(repr=False)
    dataset: AdjunctDataset
    max_staleness: timedelta | None = None

    @property
    def name(self) -> str:
        return self.dataset.name


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTableHandle:
    """A remote table of one application: `table` is what reaches it, `key` its key columns."""

    graph: OperatorGraph = field(repr=False)
    table: KeyedTable
    key: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.table.name


@dataclass(frozen=True, slots=True, eq=False)
class OutputStream:
    """A stream that one application writes."""

    graph: OperatorGraph = field(repr=False)
    name: str
    partitions: int
    key: tuple[str, ...]
    description: str = ""

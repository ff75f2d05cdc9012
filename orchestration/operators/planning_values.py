"""What planning says of records between operators, and what operators say of streams: plain immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.known_columns import Columns
    from dagster_adjunct.orchestration.operators.stream_facts import Catalog, Partitioner

Role = Literal["input", "broadcast-input", "output", "intermediate", "side-input"]
Reason = Literal["partition_by", "auto_repartition", "output", "remote table", "dataset"]


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Where an operator is planned: its id, the application that it is of, and the facts of the streams."""

    operator: str
    app: Declarations
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Flow:
    """Records between two operators. `stream` is the id of the operator (or inserted exchange) whose
    partitions they are in; `partitioned_by` is () when that is not known, since `lost_at`."""

    stream: str
    columns: Columns
    partitioned_by: tuple[str, ...]
    partitioner: Partitioner
    lost_at: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a partitioned dataset asks of the stream that meets it: its count, and the stream's columns
    that stand for the dataset's partition columns (None where only the count matters: it is fed, not joined)."""

    dataset: str
    partitions: int
    columns: tuple[str, ...] | None

    @property
    def joins(self) -> bool:
        """Whether the records are looked up in the dataset; else they are sent to the stream that feeds it."""
        return self.columns is not None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Records move before (or, for partition_by, at) `operator`, into `partitions` by `partitioned_by`.

    With `partitioned_by` () they are spread evenly.
    """

    operator: str
    reason: Reason
    partitioned_by: tuple[str, ...]
    partitions: int
    why: str


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """One stream of the application.

    `partitions` is None for a broadcast dataset's side input; for another dataset it is the dataset's
    own count. `count_from` says where the count comes from ("input", "dataset planes", "inferred from
    dataset planes in join-2-planes"). `dataset` is set on side inputs, `operator` on all others.
    """

    name: str
    role: Role
    partitions: int | None
    partitioned_by: tuple[str, ...]
    partitioner: str
    count_from: str
    operator: str | None = None
    dataset: str | None = None

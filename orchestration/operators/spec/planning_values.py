"""What planning says of records between operators, and what operators say of streams: plain immutable values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.columns.known_columns import Columns
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog, Partitioner

Role = Literal["input", "broadcast-input", "broadcast", "output", "intermediate", "side-input", "local-table"]
Reason = Literal["partition_by", "broadcast", "auto_repartition", "output", "remote table", "dataset", "local table"]
BROADCAST: Collection[Role] = ("broadcast-input", "broadcast")
"""Streams of which every task gets all records."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Where an operator is planned: its id, the application that it is of, and the facts of the streams.

    `counts` has how many partitions there are of what `Flow.stream` names, once that is decided.
    """

    operator: str
    app: Declarations
    catalog: Catalog
    counts: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Records between two operators. `stream` is the id of what has the partitions that they are in: the operator
    that begins a stream, an inserted exchange, or an operator that brings streams together (`agreed`).
    `partitioned_by` is () when that is not known, since `lost_at`."""

    stream: str
    columns: Columns
    partitioned_by: tuple[str, ...]
    partitioner: Partitioner
    lost_at: str = ""


def agreed(context: PlanContext, flows: Sequence[Flow]) -> Flow:
    """Return where the records of several inputs lie together, with the columns of the first.

    Where all inputs lie by the same columns with the same hash, the records do so, too, in as many partitions as each
    input has: what relies on it makes these counts agree. Where nothing does, and they turn out to differ, and where
    the inputs lie differently, nothing is known of it. The types of these columns have to be the same in all inputs,
    which is the operator's to see to.
    """
    first = flows[0]
    one_stream = all(flow.stream == first.stream for flow in flows)
    stream = first.stream if one_stream else context.operator
    alike = all((flow.partitioned_by, flow.partitioner) == (first.partitioned_by, first.partitioner) for flow in flows)
    if context.counts is not None and len({context.counts[flow.stream] for flow in flows}) > 1:
        alike = False
    if alike and first.partitioned_by:
        return replace(first, stream=stream)
    lost = next((flow.lost_at for flow in flows if flow.lost_at), context.operator)
    return Flow(stream, first.columns, (), UNKNOWN, lost)


@dataclass(frozen=True, slots=True)
class Requirement:
    """What an operator asks of the records of one of its inputs: that they lie by `columns` in `partitions`.

    `columns` None asks for the count only; `partitions` None leaves the count open. Whatever the count is, it is the
    same for all inputs of the operator that it asks something of. `dataset` names the partitioned dataset that the
    records are looked up in, or, with `feeds`, sent to: then it asks for nothing unless some join reads the dataset.
    So two inputs that are joined with each other have a Requirement(None, None, columns) each, and a window has one.
    """

    dataset: str | None
    partitions: int | None
    columns: tuple[str, ...] | None
    feeds: bool = False


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column whose values have to equal those of another one ("'id' of dataset planes"); types None: not known."""

    column: str
    type: str | None
    other: str
    other_type: str | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Records move before (or, for partition_by, at) `operator`, into `partitions` by `partitioned_by`.

    With `partitioned_by` () they are spread evenly. `input` is which of the operator's inputs moves, from 0.
    """

    operator: str
    reason: Reason
    partitioned_by: tuple[str, ...]
    partitions: int
    why: str
    input: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """What an operator asks of somebody outside of a batch: of the table or function `of`, with these guarantees.

    `recorded`: the answers are kept for the batch before anything that depends on them is written.
    """

    kind: Literal["lookup", "sink"]
    of: str
    guarantee: str
    recorded: bool


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

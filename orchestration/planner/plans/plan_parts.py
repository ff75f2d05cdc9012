"""What a plan consists of, beside streams and exchanges: plain immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """What meets in an operator that needs its inputs co-partitioned; all of it has `partitions` partitions.

    `streams` are the names of what arrives there (of an operator that brings streams together: its id), and of the
    input of the `dataset`, where one is joined; `partitioned_by` the columns of the first input that choose the
    partition. What takes part by way of a table is in `FedDataset`, once for all joins; `ExecutionPlan.taking_part`
    has it all.
    """

    join: str
    dataset: str | None
    streams: tuple[str, ...]
    partitions: int
    partitioned_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FedDataset:
    """A joined dataset that the application itself feeds, with as many partitions: by which streams, at which sinks."""

    dataset: str
    streams: tuple[str, ...]
    sinks: tuple[str, ...]
    partitions: int


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """What is known of the records that leave an operator. `columns` None: not known before it runs.

    `reads` is the stream whose records enter here, `looks_up` what they are joined with, `writes` what they are sent
    to, by name.
    """

    id: str
    kind: str
    inputs: tuple[str, ...]
    summary: str
    partitions: int
    partitioned_by: tuple[str, ...]
    columns: tuple[str, ...] | None
    reads: str | None
    looks_up: str | None
    writes: str | None


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A send to a remote table. `order` of the records of one key: "newest" (the store keeps it), "per key" (as their
    stream has them), "any" (it comes to the same), or "per source partition" only; `why` it is so, the `harm` that it
    may do, and what `mends` that. `replay` says what reading the `streams` again that its records are made of does to
    it. `marks` is the name by which it knows again what it has had; None where it does not."""

    operator: str
    table: str
    order: str
    why: str
    replay: str
    streams: tuple[str, ...]
    marks: str | None = None
    harm: str = ""
    mends: str = ""


@dataclass(frozen=True, slots=True)
class FedJoin:
    """A join with a dataset that the application itself writes.

    It `meets` what is sent there in "this batch", on top of the version that the batch was begun with, or in the "next
    batch". With "both", in this batch what is sent up to `last_send`, of the local table's sends in their order, and
    in the next what is sent after it.
    """

    join: str
    dataset: str
    meets: Literal["this batch", "next batch", "both"]
    last_send: str | None


@dataclass(frozen=True, slots=True)
class JoinByTime:
    """A join whose records meet the entry that was valid at their own time, in their column `as_of`.

    `before_history` says what a record from before the history of its key meets, "null", "oldest" or "error" (it fails
    the batch); `on_null_time`, whether one without a time meets "null" or is to "fail" it. `known` says how far back
    the dataset tells what was valid.
    """

    join: str
    dataset: str
    as_of: str
    before_history: str
    on_null_time: str
    known: str


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A local table that the application writes, by the operators `sends` in their order: of two records of one key
    the later send's wins. `replay` says what reading its input again does to it."""

    table: str
    sends: tuple[str, ...]
    replay: str


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """What an operator asks of somebody outside of a batch: a "lookup" in a table, or a "sink", a user's function.

    `guarantee` says how often. What is `recorded` is the same when a batch is run again.
    """

    operator: str
    kind: str
    of: str
    guarantee: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class Task:
    """`Partition n`: the input partitions and dataset buckets ("planes.3") that it
    owns, and the datasets and input streams that it reads whole (`ssps` has all partitions of these)."""

    name: str
    ssps: tuple[SystemStreamPartition, ...]
    buckets: tuple[str, ...]
    broadcast: tuple[str, ...]

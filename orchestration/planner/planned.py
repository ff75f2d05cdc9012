"""What a plan says of an application, as immutable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dagster_adjunct.orchestration.operators.operator import Exchange, PlannedCall, PlannedStream
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.resources.streams.system import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """The streams that the operator `join` needs co-partitioned; all of them have `partitions`
    partitions.

    `streams` are the names of its inputs (for merged streams, the id of the operator that merges
    them) and of the source of the joined `dataset`, if any; `partitioned_by` are the partitioning
    columns of the first input. Streams whose records are sent to the dataset are in `FedDataset`.
    """

    join: str
    dataset: str | None
    streams: tuple[str, ...]
    partitions: int
    partitioned_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FedDataset:
    """A joined dataset that the application itself sends records to, at the operators `sinks`.

    The records come from `streams`, which have as many partitions as the dataset.
    """

    dataset: str
    streams: tuple[str, ...]
    sinks: tuple[str, ...]
    partitions: int


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """An operator, with the partitioning and `columns` of the records that leave it; None if
    columns are unknown yet.

    `reads` names the stream that it reads, `looks_up` the dataset or remote table that it joins,
    `writes` the stream, table or function that it sends records to.
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
    """A send to a remote table.

    `order` is the guaranteed order of the records of a key: "newest" (the store keeps the newest),
    "per key" (the stream's), "any" (order does not matter), or "per source partition" only. `why`
    explains it, `harm` says what may go wrong, and `mends` how to fix that. `replay` describes the
    effect of reading `streams` again. Only records of those in `again` reach the table then;
    `left_out` says why records of the others don't. A table with marks stores the position of the
    last record that it applied from each source partition; `marks` is the name of this send there,
    else None.
    """

    operator: str
    table: str
    order: str
    why: str
    replay: str
    streams: tuple[str, ...]
    marks: str | None = None
    harm: str = ""
    mends: str = ""
    again: tuple[str, ...] = ()
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class PlannedOutputTable:
    """A send to an Iceberg or Delta table.

    `replay` describes the effect of reading `streams` again. `changes` are what the next commit
    would create or change; they are None as long as the plan was not compared with the stored
    table. `unchecked` says what could not be compared, and why. `upstream` names the applications,
    with the stream of each, whose replays add rows next to those that they replace. None of these
    counts in comparisons.
    """

    operator: str
    table: str
    on_replay: str
    replay: str
    streams: tuple[str, ...]
    changes: tuple[str, ...] | None = field(default=None, compare=False)
    unchecked: str = field(default="", compare=False)
    upstream: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class FedJoin:
    """A join with a dataset that the application itself sends records to.

    `sees` says when it finds sent records: in "this batch", in the "next batch", or "both". With
    "both", it finds those of the sends up to `last_send` in this batch, and those of later sends in
    the next.
    """

    join: str
    dataset: str
    sees: Literal["this batch", "next batch", "both"]
    last_send: str | None


@dataclass(frozen=True, slots=True)
class JoinByTime:
    """A join with the entry that was valid at the record's own time, in its column `as_of`.

    `before_history` is the result for a record from before the history of its key: "null", "oldest"
    or "error" (the batch fails). `on_null_time` is the result for a record without a time: "null"
    or "fail". `known` says how far back the dataset's history goes.
    """

    join: str
    dataset: str
    as_of: str
    before_history: str
    on_null_time: str
    known: str


@dataclass(frozen=True, slots=True)
class PlannedWait:
    """Records of `stream` wait until the dataset of a join knows everything up to their event time,
    the expression `time`.

    `known_by` says by what the dataset knows it, `wait` how long a record waits.
    """

    join: str
    dataset: str
    known_by: str
    stream: str
    time: str
    wait: str


@dataclass(frozen=True, slots=True)
class RestatedInput:
    """How the records of a `stream` are found whose results a restatement corrects: `keys` are the
    columns, or paths of values, with the dataset's key, in its order.

    `time` is the column, or path, with the time by which entries are joined; None for a join of
    current entries, and for a time that the records of the stream do not have: then records are
    found by their age alone. `indexed` says that the stream is declared to have an index by the
    key.
    """

    stream: str
    keys: tuple[str, ...]
    time: str | None = None
    indexed: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRestatement:
    """A join whose results follow later changes of its dataset, whose `changes` are a stream in
    which the application has positions, in `partitions` partitions.

    `records` says which records of the `inputs` are read again. `operators` are those that then
    compute and send their results again, except to the tables at operators that are `unsent`, whose
    records do not depend on the dataset. `effects` say what it does to each output. `costs` say
    what it reads at most now: they are not in the plan's JSON, and not compared.
    """

    join: str
    dataset: str
    changes: str
    partitions: int
    records: str
    inputs: tuple[RestatedInput, ...]
    operators: tuple[str, ...]
    unsent: tuple[str, ...]
    effects: tuple[str, ...]
    costs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PlannedLateData:
    """How joins take late changes of their datasets into account: records wait for them, or results
    are restated.
    """

    waits: tuple[PlannedWait, ...] = ()
    restatements: tuple[PlannedRestatement, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A local table that the application writes at the operators `sends`; for one key, the later
    send wins.

    `replay` describes the effect on it of reading inputs again.
    """

    table: str
    sends: tuple[str, ...]
    replay: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task ("Partition 3"): the partitions of input streams (`ssps`) and dataset buckets
    ("planes.3") that it owns.

    `broadcast` names the datasets and input streams that it reads completely; `ssps` includes all
    partitions of these streams.
    """

    name: str
    ssps: tuple[SystemStreamPartition, ...]
    buckets: tuple[str, ...]
    broadcast: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SparkNeed:
    """Why an operator needs Spark; `what` is a noun phrase, such as "a DataFrame function"."""

    operator: str
    what: str


@dataclass(frozen=True, slots=True)
class PlannedAdvance:
    """How a dataset is advanced: `needs_spark` says, in noun phrases, why Spark is needed even for
    few records, and `uses_spark` why it is used for them unless there is no session.

    Without any, this process computes small advances, if the application's engine is "auto".
    """

    dataset: str
    needs_spark: tuple[str, ...] = ()
    uses_spark: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """Who computes the batches: the engine that the application chose, "auto" or "spark".

    With "auto", `needs_spark` says why no batch is computed without Spark; it is empty if small
    batches are. `advances` says for each dataset that is made from a source why it needs Spark.
    """

    choice: str = "spark"
    needs_spark: tuple[SparkNeed, ...] = ()
    advances: tuple[PlannedAdvance, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPartitions:
    """The operators of an application, and the partitions that their records are in."""

    application: str
    operators: tuple[PlannedOperator, ...]
    streams: tuple[PlannedStream, ...]
    join_groups: tuple[JoinGroup, ...]
    exchanges: tuple[Exchange, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class PlannedApplication(PlannedPartitions):
    """What the planner has found out of an application.

    `columns` are those after each operator, by its id; the JSON has only their names.
    `stored_notes` are about datasets as they are stored now: they are not in the plan's JSON, and
    not compared.
    """

    notes: tuple[str, ...]
    tables: tuple[PlannedTable, ...]
    fed: tuple[FedDataset, ...]
    calls: tuple[PlannedCall, ...]
    state: tuple[PlannedState, ...]
    fed_joins: tuple[FedJoin, ...]
    by_time: tuple[JoinByTime, ...]
    late_data: PlannedLateData = PlannedLateData()
    output_tables: tuple[PlannedOutputTable, ...] = ()
    columns: Mapping[str, Columns] = field(default_factory=dict, compare=False, repr=False)
    engine: PlannedEngine = PlannedEngine()
    stored_notes: tuple[str, ...] = field(default=(), compare=False)

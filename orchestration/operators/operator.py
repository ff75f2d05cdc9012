"""What every operator says of itself, and the node that it is in an application's graph.

An operator is one file: an immutable `Spec` with all that planner, Spark step, lineage and drawing ask of it. They ask
nothing else, so that they know no kind of operator. Spark is imported inside functions: specs are made wherever an
application is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.operators.batch_context import BatchContext, ChangedColumns, TableSend
    from dagster_adjunct.orchestration.operators.columns import Columns, Types
    from dagster_adjunct.orchestration.operators.stream_facts import (
        Catalog,
        ColumnSources,
        LineageContext,
        LineageNode,
        Partitioner,
    )
    from dagster_adjunct.resources.common import CodeLine


class KeyedTable(Protocol):
    """What planning needs of a remote table: its name and the columns of its key."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> tuple[str, ...]: ...


class DeclaredOutput(Protocol):
    """An output stream: "system.stream", its partition count, and the columns that choose the partition."""

    @property
    def name(self) -> str: ...

    @property
    def partitions(self) -> int: ...

    @property
    def key(self) -> tuple[str, ...]: ...


class Declarations(Protocol):
    """What an application declares, by name."""

    @property
    def name(self) -> str: ...

    @property
    def outputs(self) -> Mapping[str, DeclaredOutput]: ...

    @property
    def tables(self) -> Mapping[str, KeyedTable]: ...

    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""
        ...

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""
        ...


def find_schemas_in_fields(spec: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of an operator that is a dataclass, and in what they hold."""
    for member in fields(spec) if is_dataclass(spec) else ():
        yield from find_schemas(getattr(spec, member.name))


def find_schemas(value: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of a dataclass, and in what these hold: other dataclasses, sequences, mappings.

    What is called is left out: functions of users may hold anything.
    """
    if isinstance(value, Schema):
        yield value
    elif is_dataclass(value) and not callable(value):
        yield from find_schemas_in_fields(value)
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from find_schemas(element)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from find_schemas(element)


BeforeHistory = Literal["null", "oldest", "error"]
OnNullTime = Literal["null", "fail"]


@dataclass(frozen=True, slots=True)
class AsOf:
    """That records meet the entry that was valid at the time in this `column` of theirs.

    A record from before the history of its key meets nothing ("null"), the oldest entry, or fails the batch; one
    without a time meets nothing or fails it.
    """

    column: str
    before_history: BeforeHistory
    on_null_time: OnNullTime


@dataclass(frozen=True, slots=True)
class Match:
    """That each record is looked up in a dataset, or else in a remote table, and the fraction that has to meet an entry
    (None: none has to). `as_of` says at which time; None: as it is when the batch runs."""

    dataset: str | None
    min_rate: float | None = None
    table: str | None = None
    as_of: AsOf | None = None

    @property
    def node(self) -> LineageNode:
        """What the records are looked up in."""
        from dagster_adjunct.orchestration.operators.stream_facts import LineageNode

        return LineageNode("table", self.table or "") if self.dataset is None else LineageNode("dataset", self.dataset)


class Spec(ABC):
    """What one operator does. Four methods have to be written; the others say what most operators say.

    Where an operator has several inputs, what is said of them stands in their order.
    """

    __slots__ = ()
    kind: ClassVar[str]
    """The beginning of the operator's id, and what plans call it."""

    # -- what has to be written

    @abstractmethod
    def summary(self) -> str:
        """Return what it does in a few words, for plans."""

    @abstractmethod
    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        """Return the columns of the records that leave it, and where they lie.

        Raises PlanningError for a column that is known to be missing or double.
        """

    @abstractmethod
    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Return the records that leave the operator of this id, made of those that arrive.

        They keep their hidden columns (`hidden_columns.carried`). What Spark refuses to analyse is told with the id.
        """

    # -- what is said only where it is so

    @property
    def role(self) -> Role | None:
        """What the stream is that begins here; None where records stay in the partitions that they were in."""
        return None

    @property
    def sql(self) -> Sequence[str]:
        """The expressions of Spark SQL that users gave it."""
        return ()

    @property
    def reads(self) -> str | None:
        """The stream whose records enter here; None where records come from other operators only."""
        return None

    @property
    def has_event_time(self) -> bool:
        """Whether the records that enter here say when they happened."""
        return False

    @property
    def declared_schemas(self) -> Sequence[Schema]:
        """The schemas that it was given, as of what a function returns: no failure tells values of columns that one of
        them calls sensitive. Left out, all those in the fields of the dataclass."""
        return tuple(find_schemas_in_fields(self))

    @property
    def writes(self) -> str | None:
        """The output stream or table, as it is declared, that the records are sent to."""
        return None

    @property
    def sends(self) -> TableSend | None:
        """How the records are sent to a remote table; None where they are not."""
        return None

    @property
    def adds(self) -> bool:
        """Whether what it writes to a table adds to what is there, so that it is not the same when it is sent again."""
        return False

    @property
    def feeds(self) -> str | None:
        """The dataset that its records end up in; None where they end up in none of the application's."""
        return None

    @property
    def match(self) -> Match | None:
        """What the records are looked up in."""
        return None

    @property
    def states(self) -> Sequence[str]:
        """The names of the state tables that it keeps from batch to batch, without the application's."""
        return ()

    @property
    def promises_partitioning(self) -> bool:
        """Whether a function of the user's is trusted to leave records in the partitions where they are."""
        return False

    @property
    def diverts_late_records(self) -> bool:
        """Whether it hands over what it leaves out (`late_records.py`)."""
        return False

    @property
    def reads_late_records(self) -> bool:
        """Whether it takes what the operator before leaves out (`Batch.left_out`), which is kept only for who does."""
        return False

    @property
    def assigns_positions(self) -> bool:
        """Whether records that leave have positions of their own, and not those of an input (`made_records.py`)."""
        return False

    @property
    def moves(self) -> int:
        """How often, at most, it moves rows of its own in a batch, which are none of the records that a plan lists."""
        return 0

    @property
    def takes_partition_by(self) -> bool:
        """Whether users can give it `partition_by`: some of its columns, that records have to lie by instead of all."""
        return False

    @property
    def over_time(self) -> str | None:
        """The name that its state and its watermarks are kept under; None where it keeps none from batch to batch."""
        return None

    @property
    def emits_updates(self) -> bool:
        """Whether a result comes again when it has changed, until the one that is final."""
        return False

    @property
    def keeps_only_final(self) -> bool:
        """Whether it asks of results that may be updated whether they are final, and lets others go."""
        return False

    @property
    def watermark_delay(self) -> timedelta:
        """How far the times of what leaves it may lie below the watermark of what arrives."""
        return timedelta(0)

    @property
    def max_result_delay(self) -> timedelta:
        """How much later than a record that arrives what is made of it may be."""
        return timedelta(0)

    @property
    def record_retention(self) -> timedelta:
        """For how long after its time a record may be needed: no time may lie beyond the year 9999."""
        return timedelta(0)

    @property
    def is_side_output(self) -> bool:
        """Whether records are written, and those that arrived go on, from where they lay."""
        return self.writes is not None and self.role is None

    def call(self, app: Declarations) -> ExternalCall | None:
        """Return what is asked of somebody outside of the batch; None where nothing is."""
        return None

    def target(self, app: Declarations) -> LineageNode | None:
        """Return the asset that the records are sent to."""
        return None

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        """Return what is asked of the records of each input, None where nothing is; () where no input is asked."""
        return ()

    def changed(self, app: Declarations, arriving: Types) -> ChangedColumns | None:
        """Return the columns of a table's record that it changes, by records with columns of these types; None where it
        writes all, or nobody knows which."""
        return None

    def declared_partitions(self, context: PlanContext) -> int | None:
        """Return the declared count of the stream that begins here, None where it is open."""
        return None

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge | None:
        """Return the stream that begins here; `flow` is of the records after the operator."""
        return None

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        """Return how records have to move before they are written; None where they lie right, in `partitions`."""
        return None

    def compared_columns(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        """Return the columns of the records whose values are compared with others, which takes equal types."""
        return ()

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        """Return the columns of the records that others declare a type of, where they are written or looked up.

        What certainly does not fit is refused by `types`.
        """
        return ()

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        """Return the types of the columns that leave; None where they are not known."""
        return None

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        """Return what the columns that leave are made of; one that is not known is left out."""
        return {}

    def written_types(self, arriving: Types) -> Types:
        """Return the types of the columns that are written to the target, of records with these."""
        return arriving

    def written_columns(self, arriving: ColumnSources) -> ColumnSources:
        """Return what the columns of the target are made of, written by records with these columns."""
        return arriving


class PassThroughSpec(Spec):
    """What operators say of columns whose records leave with those that they arrived with."""

    __slots__ = ()

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        return types

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        (made,) = arriving
        return made


@dataclass(frozen=True, slots=True)
class Operator:
    """One node: `id` ("join-2-weather"), the ids of its inputs, what it does, and the line of the user's file.

    Operators stand in the order in which they were defined, so an operator's inputs always come before it. A record
    stays in the partition of the stream that it is in until the next operator that begins one.
    """

    id: str
    inputs: tuple[str, ...]
    spec: Spec
    declared_at: CodeLine | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def begins_stream(self) -> bool:
        """Whether the records that leave are in the partitions of a stream of this operator's own."""
        return self.spec.role is not None


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


def merge_flows(context: PlanContext, flows: Sequence[Flow]) -> Flow:
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
class ExternalCall:
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

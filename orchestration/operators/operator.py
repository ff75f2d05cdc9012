"""`Spec`, the interface of every operator, and `Operator`, its node in an application's graph.

The planner, the Spark step, lineage and rendering use only `Spec`, so they need not know the kinds of operators. Spark
is imported inside functions, because specs are created wherever an application is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dagster_adjunct.orchestration.operators.columns import is_sure_name
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, Catalog, Columns, LineageNode, Partitioner
from dagster_adjunct.resources.common import CodeLine
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.in_process import compile_expression
from dagster_adjunct.resources.sql.types import types_differ

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.event_time import EventTime
    from dagster_adjunct.orchestration.operators.remote_tables import ChangedColumns, TableSend
    from dagster_adjunct.orchestration.step.batch import BatchContext
    from dagster_adjunct.orchestration.step.in_process_batch import ArrowBatch


def find_schemas_in_fields(spec: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of a dataclass, also nested ones; none for other objects."""
    for member in fields(spec) if is_dataclass(spec) else ():
        yield from find_schemas(getattr(spec, member.name))


def find_schemas(value: object) -> Iterator[Schema]:
    """Yield the schemas in a value: in dataclasses, sequences and mappings, also nested ones.

    Callables are skipped: a user's function may hold anything.
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
    """The options of an as-of join, which uses the entry that was valid at the time in the record's `column`.

    A record from before the history of its key has no entry ("null"), the key's first entry ("oldest"; of a bounded
    dataset, the one in the oldest version, if any), or fails the batch; a record without a time has no entry or fails
    the batch.
    """

    column: str
    before_history: BeforeHistory
    on_null_time: OnNullTime


@dataclass(frozen=True, slots=True)
class Match:
    """A lookup of each record in a dataset, or else in a remote table.

    `min_rate` is the fraction of records that must have an entry. Without `as_of`, entries are current ones.
    """

    dataset: str | None
    min_rate: float | None = None
    table: str | None = None
    as_of: AsOf | None = None

    @property
    def node(self) -> LineageNode:
        """What the records are looked up in."""
        return LineageNode("table", self.table or "") if self.dataset is None else LineageNode("dataset", self.dataset)


class Spec(ABC):
    """One operator. Its abstract members and `kind` are required; the others have defaults.

    Sequences with one item per input are in the order of the inputs.
    """

    __slots__ = ()
    kind: ClassVar[str]
    """The first part of the operator's id, and its name in plans."""

    @abstractmethod
    def summary(self) -> str:
        """Return a short description for plans."""

    @abstractmethod
    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        """Return the columns of the records that leave it.

        Raises PlanningError for a column that is known to be missing or duplicate, or whose type certainly does not
        fit. Columns whose types have to fit others are passed on to the planner (`PlanContext`).
        """

    @abstractmethod
    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        """Return the partitioning of the records that leave it."""

    @abstractmethod
    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Return the records that leave the operator of this id, given those that arrive.

        They keep their hidden columns (`list_hidden_columns`). Analysis errors of Spark are reported with the id.
        """

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        """Return what of it needs Spark, as a noun phrase; "" if `compute` certainly gives the same records."""
        return f"operator {self.kind}"

    def compute(self, operator: str, tables: Sequence[Any], batch: ArrowBatch) -> Any:
        """Return the records that leave the operator, as Arrow tables like those that arrive, in this process.

        Called only if nothing of it needs Spark. By default `compile`, for operators that leave all to the batch.
        """
        return self.compile(operator, tables, batch)

    @property
    def role(self) -> Role | None:
        """The role of the stream that begins here; None where records stay in their partitions.

        Its name is that of the stream that the operator `reads` or `writes`, otherwise made of the operator's id.
        """
        return None

    @property
    def sql(self) -> Sequence[str]:
        """The user's Spark SQL expressions."""
        return ()

    @property
    def reads(self) -> str | None:
        """The stream that it reads; None where records come from other operators only."""
        return None

    @property
    def event_time(self) -> EventTime | None:
        """The event time of the records that it reads."""
        return None

    @property
    def declared_schemas(self) -> Sequence[Schema]:
        """The schemas that users gave it, such as that of a function's results; errors show no values of their
        sensitive columns. By default all schemas in the fields of the dataclass."""
        return tuple(find_schemas_in_fields(self))

    @property
    def writes(self) -> str | None:
        """The declared output stream or table that records are sent to."""
        return None

    @property
    def send(self) -> TableSend | None:
        """How records are sent to a remote table, or None."""
        return None

    @property
    def feeds(self) -> str | None:
        """The declared dataset that its records are written to, or None."""
        return None

    @property
    def match(self) -> Match | None:
        """The lookup of its records in a dataset or remote table, or None."""
        return None

    @property
    def states(self) -> Sequence[str]:
        """The names of its state tables, without the application's name."""
        return ()

    @property
    def keeps_partitioning(self) -> bool:
        """Whether the user promises that a function leaves records in their partitions."""
        return False

    diverts_late_records: ClassVar[bool] = False
    """Whether it passes its late records to the operator after it (`LateRecords`)."""
    reads_late_records: ClassVar[bool] = False
    """Whether it reads the late records of the operator before it."""
    assigns_positions: ClassVar[bool] = False
    """Whether records that leave have new positions instead of those of an input (`make_records`)."""

    @property
    def needs_tasks(self) -> bool:
        """Whether it is computed in tasks however few its records are, because one may become several, or a function is
        called by task.
        """
        return True

    @property
    def moves(self) -> int:
        """The maximum number of exchanges of its own rows in a batch, which a plan does not list."""
        return 0

    takes_partition_by: ClassVar[bool] = False
    """Whether it has the argument `partition_by`: a subset of its key that records are partitioned by."""

    @property
    def over_time(self) -> str | None:
        """The name of its state and watermarks; None for a stateless operator."""
        return None

    @property
    def emits_updates(self) -> bool:
        """Whether a changed result is emitted again, until it is final."""
        return False

    @property
    def keeps_only_final(self) -> bool:
        """Whether it filters updated results to those that are final."""
        return False

    @property
    def watermark_delay(self) -> timedelta:
        """How far event times of its results may be below the watermark of its input."""
        return timedelta(0)

    @property
    def max_result_delay(self) -> timedelta:
        """How much later than an input record's time the time of its results may be."""
        return timedelta(0)

    @property
    def record_retention(self) -> timedelta:
        """For how long after its time a record may be needed; the sum must not exceed the year 9999."""
        return timedelta(0)

    @property
    def is_side_output(self) -> bool:
        """Whether records are written and also continue, in their partitions."""
        return self.writes is not None and self.role is None

    def call(self, operator: str, app: Application) -> PlannedCall | None:
        """Return its call of a table or function outside the batch, or None."""
        return None

    def target(self, app: Application) -> LineageNode | None:
        """Return the asset that the records are sent to."""
        return None

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        """Return the required partitioning of each input, None for any; () if there is none at all."""
        return ()

    def changed(self, app: Application, arriving: Columns) -> ChangedColumns | None:
        """Return the table's columns that it changes, given those of its input; None for all, or if unknown."""
        return None

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        """Return the declared partition count of the stream that begins here, None where it is open, and its origin."""
        return None, ""

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        """Return the exchange that writing needs; None where the records are partitioned right, in `partitions`."""
        return None

    def written(self, arriving: Columns) -> Columns:
        """Return the columns that are written to the target."""
        return arriving

    def check_frames(self, operator: str, frames: Sequence[DataFrame], app: Application) -> Columns:
        """Check the records that arrive, whose types Spark knows, as planning does; return the columns that leave."""
        return self.derive_columns(PlanContext(operator, app, Catalog()), [Columns.of_frame(frame) for frame in frames])


def expressions_need(texts: Iterable[str], arriving: Columns) -> str:
    """Return what of these Spark SQL expressions needs Spark, given the columns that they read; "" for nothing."""
    if arriving.types is None or None in arriving.types.values():
        return "columns whose types are not known before it runs"
    types = {name: kind for name, kind in arriving.types.items() if kind is not None}
    compiled = ((text, compile_expression(text, types)) for text in texts)
    return next((f"{why} in {text}" for text, why in compiled if isinstance(why, str)), "")


def names_need(names: Iterable[str], arriving: Columns) -> str:
    """Return what of finding these names among the columns, and those before them, needs Spark; "" for nothing."""
    known = list(arriving.known)
    for name in names:
        if not is_sure_name(name, known):
            return f"the name {name}, which other columns may equal but for its case"
        known.append(name)
    return ""


class PassThroughSpec(Spec):
    """An operator whose records keep their columns and their partitions."""

    __slots__ = ()

    @property
    def needs_tasks(self) -> bool:
        return False

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return arriving[0]

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return arriving[0]


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph: `id` ("join-2-weather"), the ids of its inputs, its spec, and the user's line.

    Operators are ordered by definition, so an operator follows its inputs. A record stays in its partition until the
    next operator that begins a stream.
    """

    id: str
    inputs: tuple[str, ...]
    spec: Spec
    declared_at: CodeLine | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.spec.kind


Role = Literal["input", "broadcast-input", "broadcast", "output", "intermediate", "side-input", "local-table"]
Reason = Literal["partition_by", "broadcast", "auto_repartition", "output", "remote table", "dataset", "local table"]
BROADCAST: Collection[Role] = ("broadcast-input", "broadcast")
"""The roles of streams that every task reads completely."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The context of planning an operator: its id, its application, and the facts of the streams.

    `counts` has the partition count of each `Flow.stream`, once decided. The operator adds to `compared` what needs
    equal types, and to `declared` what is written to, or looked up by, columns with declared types.
    """

    operator: str
    app: Application
    catalog: Catalog
    counts: Mapping[str, int] | None = None
    compared: list[ComparedColumn] = field(default_factory=list)
    declared: list[ComparedColumn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flow:
    """The partitioning of records between two operators.

    `stream` is the id of the node that determines their partitions: the operator that begins a stream, an inserted
    exchange, or an operator that merges streams (`merge_flows`). `partitioned_by` is () where it is unknown, since
    `lost_at`.
    """

    stream: str
    partitioned_by: tuple[str, ...]
    partitioner: Partitioner
    lost_at: str = ""

    def lose(self, operator: str) -> Flow:
        """Return the flow with unknown partitioning since this operator, or since an earlier one."""
        return (
            self if not self.partitioned_by else replace(self, partitioned_by=(), partitioner=UNKNOWN, lost_at=operator)
        )


def merge_flows(context: PlanContext, flows: Sequence[Flow]) -> Flow:
    """Return the flow of the merged records of several inputs.

    If all inputs are partitioned by the same columns with the same hash, so is the result; an operator that relies on
    it requires equal partition counts. If the inputs differ, or their counts turn out to differ, the partitioning is
    unknown. The operator must check that the partitioning columns have the same types in all inputs.
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
    return Flow(stream, (), UNKNOWN, lost)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The partitioning that an operator requires of one input: by `columns`, into `partitions`.

    `columns` None requires the count only; `partitions` None leaves the count open. All inputs with a requirement must
    have the same count. `dataset` names the partitioned dataset that the records are looked up in, or, with `feeds`,
    sent to; the latter applies only if a join reads the dataset. Each input of a stream join, and that of a window, has
    a Requirement(None, None, columns).
    """

    dataset: str | None
    partitions: int | None
    columns: tuple[str, ...] | None
    feeds: bool = False


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column that is compared with another one ("'id' of dataset planes"); types are None where unknown."""

    column: str
    type: str | None
    other: str
    other_type: str | None


def check_equal_types(operator: str, compared: Sequence[ComparedColumn], *, dataset: str | None = None) -> None:
    """Raise PlanningError for a column that is compared with one of another type; `dataset` is that of the others."""
    for pair in compared:
        if pair.type is not None and pair.other_type is not None and types_differ(pair.type, pair.other_type):
            problem = (
                f"{operator}: the stream's {pair.column!r} is {pair.type} and {pair.other} is {pair.other_type}; "
                "equal values of different types hash to different buckets."
            )
            step = f'Cast it first: .map("*", "cast({pair.column} as {pair.other_type}) as {pair.column}_key").'
            raise PlanningError(problem, step, operator=operator, column=pair.column, dataset=dataset)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A repartitioning before (for partition_by, at) `operator`, into `partitions` by `partitioned_by`.

    With `partitioned_by` () records are spread evenly. `input` is the index of the operator's input that moves.
    """

    operator: str
    reason: Reason
    partitioned_by: tuple[str, ...]
    partitions: int
    why: str
    input: int = 0


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call outside the batch: a "lookup" in a table, or a "sink", a user's function.

    `guarantee` says how often it is called. `recorded` results are the same when a batch is repeated.
    """

    operator: str
    kind: Literal["lookup", "sink"]
    of: str
    guarantee: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """One stream of the application.

    `partitions` is None for a broadcast dataset; for another dataset it is the dataset's own count. `count_from` says
    where the count comes from ("input", "dataset planes", "inferred from dataset planes in join-2-planes"). `dataset`
    is set on side inputs, `operator` on all others.
    """

    name: str
    role: Role
    partitions: int | None
    partitioned_by: tuple[str, ...]
    partitioner: str
    count_from: str
    operator: str | None = None
    dataset: str | None = None

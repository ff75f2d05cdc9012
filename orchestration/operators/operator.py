"""`Spec`, the interface of every operator, `Operator`, its node in an application's graph, and how
long operators hold back watermarks.

The planner, the Spark step, lineage and rendering use only `Spec`, so they need not know the kinds
of operators. Spark is imported inside functions, because specs are created wherever an application
is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, NamedTuple

from dagster_adjunct.orchestration.operators.columns import is_sure_name
from dagster_adjunct.orchestration.operators.event_times import EventTime
from dagster_adjunct.orchestration.operators.lookups import AsOf, Pairs, Restate, Wait
from dagster_adjunct.orchestration.operators.stream_facts import (
    UNKNOWN,
    Catalog,
    Columns,
    DeclaredApplication,
    LineageNode,
    Partitioner,
)
from dagster_adjunct.orchestration.operators.updates import EVERY_COLUMN, ChangedColumns, TableSend
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.paths import flat_name, split_path, write_path
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.arrow_expressions import compile_expression
from dagster_adjunct.resources.sql.types import types_differ


def find_schemas_in_fields(spec: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of a dataclass, at any depth; none for an object that is
    no dataclass.
    """
    if is_dataclass(spec):
        for member in fields(spec):
            yield from find_schemas(getattr(spec, member.name))


def find_schemas(value: object) -> Iterator[Schema]:
    """Yield the schemas in a value, at any depth of dataclasses, sequences and mappings.

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


@dataclass(frozen=True, slots=True)
class Match:
    """A lookup of each record in a dataset, or else in a remote table.

    `on` has pairs (column of the record, column of the dataset's key), in the order of the key.
    `min_rate` is the fraction of records that must have an entry. With `as_of` None, the current
    entry is looked up, else that of a time, maybe with the id of its interval (`selects_interval`).
    `wait` says how long records wait for the dataset, and `restate` which results follow later
    changes of its entries; None if they don't.
    """

    dataset: str | None
    min_rate: float | None = None
    table: str | None = None
    as_of: AsOf | None = None
    wait: Wait | None = None
    restate: Restate | None = None
    on: Pairs = ()
    selects_interval: bool = False

    @property
    def node(self) -> LineageNode:
        """The dataset or table that the records are looked up in."""
        if self.dataset is None:
            return LineageNode("table", self.table or "")
        return LineageNode("dataset", self.dataset)


OnFail = Literal["warn", "drop", "letter", "fail"]
"""What happens to a record that does not meet an expectation: it is kept, dropped, or diverted to
`failed_records`, or it fails the batch. All but the last are counted.
"""


@dataclass(frozen=True, slots=True)
class Expectation:
    """A named condition that records are expected to meet; null does not meet it."""

    name: str
    condition: str
    on_fail: OnFail


class DeclaredCount(NamedTuple):
    """The declared partition count of a stream, None if the planner chooses it; `declared_in` is
    the argument, or what else declares it, "" for nothing.
    """

    partitions: int | None
    declared_in: str = ""


class Spec(ABC):
    """An operator: how it is planned, computed and shown. A subclass must define the abstract
    members and `kind`.

    "It" is the operator. Sequences with one item per input, such as `arriving`, are in the order of
    its inputs.
    """

    __slots__ = ()
    kind: ClassVar[str]
    """The first part of the operator's id, and its name in plans."""

    @abstractmethod
    def summary(self) -> str:
        """Return a short description for plans."""

    @abstractmethod
    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        """Return the columns of the records that leave it, given those of the records that arrive.

        Raises PlanningError for a column that is known to be missing or duplicate, or whose type
        certainly does not fit. Columns that must have the type of another column are added to
        `context`: the planner notes those whose types are unknown.
        """

    @abstractmethod
    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        """Return the partitioning of the records that leave it."""

    @abstractmethod
    def compile(self, operator: str, frames: Sequence[Any], batch: Any) -> Any:
        """Return the records that leave the operator of this id, given those that arrive.

        `batch` is a `Batch`, and the frames are DataFrames or Arrow tables. For an operator that
        needs Spark (`spark_need`), it is a `SparkBatch`, and they are DataFrames. They keep their
        hidden columns (`list_hidden_columns`). Analysis errors of Spark are reported with the id.
        """

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        """Return why it needs Spark, as a noun phrase ("a DataFrame function"); "" if it does not.

        The `compile` of one that does not need Spark may also get Arrow tables, and returns exactly
        the records that it returns of DataFrames.
        """
        return "" if self.works_without_spark else f"operator {self.kind}"

    works_without_spark: ClassVar[bool] = False
    """Whether it never needs Spark, whatever its arguments are: `compile` only asks the batch."""

    @property
    def role(self) -> Role | None:
        """The role of the stream that begins at this operator; None if records stay in their
        partitions.

        The stream has the name of the one that the operator `reads` or `writes`, else
        APPLICATION-OPERATOR.
        """
        return None

    @property
    def sql(self) -> Sequence[str]:
        """The user's Spark SQL expressions."""
        return ()

    @property
    def reads(self) -> str | None:
        """The name of the input stream that it reads; None if it gets records only from other
        operators.
        """
        return None

    @property
    def event_time(self) -> EventTime | None:
        """The declared event time of the stream that it `reads`, or None."""
        return None

    @property
    def declared_schemas(self) -> Sequence[Schema]:
        """The schemas that users gave it, such as that of a function's results; errors show no
        values of their sensitive columns. By default all schemas in the fields of the dataclass."""
        return tuple(find_schemas_in_fields(self))

    @property
    def writes(self) -> str | None:
        """The name of the output stream, table or function that it sends records to, or None."""
        return None

    @property
    def send(self) -> TableSend | None:
        """The options of its send to a remote table; None if it sends to none."""
        return None

    @property
    def check_target(self) -> Callable[[], object] | None:
        """The call that raises if its target accepts no records now; None if that can't be asked.

        Remote tables are asked by their own functions.
        """
        return None

    @property
    def feeds(self) -> str | None:
        """The name of the dataset (a local table, or one fed by a stream) that it sends records
        to, or None.
        """
        return None

    @property
    def match(self) -> Match | None:
        """The lookup of its records in a dataset or remote table, or None."""
        return None

    @property
    def expectation(self) -> Expectation | None:
        """The expectation that it checks its records against, or None."""
        return None

    @property
    def states(self) -> Sequence[str]:
        """The names of its state tables, without the prefix APPLICATION-."""
        return ()

    def ordered_by(self, arriving: Sequence[Columns]) -> Sequence[str] | None:
        """Return the columns by which it orders its results: results with equal values in these
        columns come in the order of their time, also over batches.

        None for an operator whose records are those that arrive, in their order.
        """
        return None

    @property
    def zones(self) -> Sequence[str]:
        """The time zones whose clocks it follows."""
        return ()

    @property
    def keeps_partitioning(self) -> bool:
        """Whether the user promises that a function leaves records in their partitions, with the
        same key columns.
        """
        return False

    @property
    def keeps_each(self) -> bool:
        """Whether exactly one record leaves it for each that arrives, whatever their values are."""
        return True

    @property
    def diverts(self) -> str:
        """The method of streams that returns the records that it diverts: "late_records", or
        "failed_records"; "" if it diverts none.
        """
        return ""

    reads_diverted: ClassVar[bool] = False
    """Whether it reads the records that the operator before it diverts, instead of those that leave
    that one.
    """
    assigns_positions: ClassVar[bool] = False
    """Whether the records that leave it have new positions instead of those of an input
    (`make_records`).
    """

    needs_tasks: ClassVar[bool] = True
    """Whether a batch with it is read and written by Spark tasks however few its records are.

    True if one record may become many, or if a function is called once per task.
    """

    @property
    def moves(self) -> int:
        """How many exchanges at most its `compile` adds for rows of its own. Plans do not list
        them.
        """
        return 0

    takes_partition_by: ClassVar[bool] = False
    """Whether users can give it `partition_by`, the columns of its key by which its input must
    be partitioned.
    """

    @property
    def over_time(self) -> str | None:
        """The name under which its state and watermarks are stored; None for an operator without
        state over time.
        """
        return None

    @property
    def emits_updates(self) -> bool:
        """Whether it emits a result again each time that it changes, until the result is final."""
        return False

    @property
    def keeps_only_final(self) -> bool:
        """Whether it drops all updates of results except the final one, as a filter by `final`
        does.
        """
        return False

    @property
    def watermark_delay(self) -> timedelta:
        """By how much the event times of its results may be below the watermark of its input."""
        return timedelta(0)

    @property
    def max_result_delay(self) -> timedelta:
        """By how much the event time of a result may be later than that of a record that it is
        made of.
        """
        return timedelta(0)

    @property
    def record_retention(self) -> timedelta:
        """How long after its event time a record may be needed. The event time plus this must be
        before the year 10000.
        """
        return timedelta(0)

    @property
    def is_side_output(self) -> bool:
        """Whether it writes the records and also passes them on, in the partitions in which they
        arrived.
        """
        return self.writes is not None and self.role is None

    def call(self, operator: str, app: DeclaredApplication) -> PlannedCall | None:
        """Return the call, a lookup or a sink, that it makes for its records and that plans
        list; or None.
        """
        return None

    def target(self, app: DeclaredApplication) -> LineageNode | None:
        """Return the asset that it sends records to, or None."""
        return None

    def came_from(self, name: str, arriving: Columns) -> str | None:
        """Return where the values of the column `name` of the records that leave it were in the
        records that arrive: a column, or the path of a value in one. None if it computes the
        values, or may.
        """
        return None

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        """Return the partitioning that it requires of each input, None if any will do; () if it
        requires nothing.
        """
        return ()

    def changed(self, app: DeclaredApplication, arriving: Columns) -> ChangedColumns:
        """Return the columns of the remote table that it changes; all of them if that is unknown.

        `arriving` are the columns of its input.
        """
        return EVERY_COLUMN

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        """Return the declared partition count of the stream that begins at this operator; without
        one by default, so that the planner chooses it.
        """
        return DeclaredCount(None)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        """Return the exchange that is needed before it writes; None if the records are partitioned
        as the target needs.

        `flow` is their partitioning, into `partitions` partitions.
        """
        return None

    def written(self, arriving: Columns) -> Columns:
        """Return the columns that it writes to the target, given those of its input."""
        return arriving

    def check_columns(
        self, operator: str, arriving: Iterable[Columns], app: DeclaredApplication
    ) -> Columns:
        """Check the columns again, now that their types are known; return the columns of the
        records that leave it.

        Raises PlanningError as `derive_columns` does.
        """
        columns = list(arriving)
        context = PlanContext(operator, app, Catalog(), columns=columns)
        return self.derive_columns(context, columns)


def expressions_need(texts: Iterable[str], arriving: Columns) -> str:
    """Return why these Spark SQL expressions need Spark, as `Spec.spark_need`; "" if they do not.
    `arriving` are the columns they read.
    """
    if arriving.types is None or None in arriving.types.values():
        return "columns whose types are not known before it runs"
    types = {name: kind for name, kind in arriving.types.items() if kind is not None}
    for text in texts:
        compiled_or_why = compile_expression(text, types)
        if isinstance(compiled_or_why, str):
            return f"{compiled_or_why} in {text}"
    return ""


def names_need(names: Iterable[str], arriving: Columns) -> str:
    """Return why only Spark can say which columns these names stand for, as `Spec.spark_need`; ""
    if Python can, too.

    Each name is compared with the arriving columns and with the names before it.
    """
    known = list(arriving.known)
    for name in names:
        if not is_sure_name(name, known):
            return f"the name {name}, which other columns may equal but for its case"
        known.append(name)
    return ""


class PassThroughSpec(Spec):
    """An operator whose records keep their columns and their partitions."""

    __slots__ = ()
    needs_tasks: ClassVar[bool] = False

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return arriving[0]

    def came_from(self, name: str, arriving: Columns) -> str | None:
        is_added = arriving.complete and arriving.find(name) is None
        makes_results = self.over_time is not None  # of several records
        if is_added or makes_results:
            return None
        return name

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return arriving[0]


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph: `id` ("join-2-weather"), the ids of its inputs, its spec, and the user's
    line that added it.

    Operators are ordered by definition, so an operator follows its inputs. A record stays in its
    partition until the next operator that begins a stream.
    """

    id: str
    inputs: tuple[str, ...]
    spec: Spec
    declared_at: CodeLine | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The kind of operator, the first part of the id."""
        return self.spec.kind


def find_written(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Return the operators whose records reach an output, in order."""
    needed: set[str] = set()
    found = []
    for operator in reversed(operators):
        if operator.spec.writes is not None or operator.id in needed:
            needed.update(operator.inputs)
            found.append(operator)
    return tuple(reversed(found))


Role = Literal[
    "input", "broadcast-input", "broadcast", "output", "intermediate", "side-input", "local-table"
]
Reason = Literal[
    "partition_by",
    "broadcast",
    "auto_repartition",
    "output",
    "remote table",
    "dataset",
    "local table",
]
BROADCAST: Collection[Role] = ("broadcast-input", "broadcast")
"""The roles of streams that every task reads completely."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The context of planning an operator: its id, its application, and the facts of the streams.

    `counts` has the partition count of each `Flow.stream`; None before counts are decided. The
    operator adds to `compared` pairs of columns that need equal types, and to `declared` columns
    that are written to, or looked up in, columns of a declared type. `columns` are those of its
    inputs, once they are derived.
    """

    operator: str
    app: DeclaredApplication
    catalog: Catalog
    counts: Mapping[str, int] | None = None
    compared: list[ComparedColumn] = field(default_factory=list)
    declared: list[ComparedColumn] = field(default_factory=list)
    columns: Sequence[Columns] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """The partitioning of records between two operators.

    `stream` is the id of the node that determines their partitions: the operator that begins a
    stream, an inserted exchange, or an operator that merges streams (`merge_flows`).
    `partitioned_by` are columns, or paths of values in columns; it is () if the partitioning is
    unknown; `lost_at` is then the id of the operator that lost it, or "" if the input stream has no
    key.
    """

    stream: str
    partitioned_by: tuple[str, ...]
    partitioner: Partitioner
    lost_at: str = ""

    def lose_partitioning(self, operator: str) -> Flow:
        """Return the flow with unknown partitioning, lost at this operator if it was known until
        then.
        """
        if not self.partitioned_by:
            return self
        return replace(self, partitioned_by=(), partitioner=UNKNOWN, lost_at=operator)

    def rename(self, context: PlanContext, renamed: Callable[[str], str | None]) -> Flow:
        """Return the flow after an operator that renames columns: `renamed` returns the new name of
        a column, None if the operator drops or changes it. Without one of its columns, the
        partitioning is lost.
        """
        names = []
        for column in self.partitioned_by:
            name = _rename_value(column, renamed, context.columns[0])
            if name is None:
                return self.lose_partitioning(context.operator)
            names.append(name)
        return replace(self, partitioned_by=tuple(names))

    def keep_paths(self, operator: str, before: Columns, after: Columns) -> Flow:
        """Return the flow after an operator with these columns before and after it. The
        partitioning is lost if one of its names was the path of a value and is the name of a column
        now, or the reverse. Where columns are unknown, it is kept.
        """
        if not before.complete or not after.complete:
            return self
        for name in self.partitioned_by:
            may_be_path = len(split_path(name)) > 1
            was_column = name in before.known
            is_column = name in after.known
            if may_be_path and was_column != is_column:
                return self.lose_partitioning(operator)
        return self


def _rename_value(name: str, renamed: Callable[[str], str | None], columns: Columns) -> str | None:
    """Return the new name of a column, or the new path of a value in one; None if it is lost, or
    if the name may mean either and the two have different new names.
    """
    steps = split_path(name)
    as_column = renamed(name)
    if len(steps) < 2 or name in columns.known:
        return as_column
    as_path = _rename_path(name, renamed)
    is_surely_path = columns.complete  # since it is not among the columns
    if is_surely_path or as_path == as_column:
        return as_path
    return None


def _rename_path(path: str, renamed: Callable[[str], str | None]) -> str | None:
    """Return a path with the new name of its column; None if the column is lost."""
    column, *rest = split_path(path)
    new_column = renamed(column)
    if new_column is None:
        return None
    if new_column == column:
        return path  # in its own spelling: partitionings are compared as texts
    return write_path((new_column, *rest))


def merge_flows(context: PlanContext, flows: Sequence[Flow]) -> Flow:
    """Return the flow of the merged records of several inputs.

    Records of several streams then form one, whose `stream` is the id of the merging operator. The
    result is partitioned like the inputs if all of them are partitioned by the same columns with
    the same hash. An operator that relies on this requires equal partition counts of the
    inputs. If the inputs differ, or once their counts are known to differ, the partitioning is
    unknown: lost where the first input lost it, else here. The merging operator must check that
    partitioning columns have equal types in all inputs.
    """
    first = flows[0]
    stream = first.stream
    is_known = bool(first.partitioned_by)
    counts = context.counts or {}
    for flow in flows:
        if flow.stream != first.stream:
            stream = context.operator
        if (flow.partitioned_by, flow.partitioner) != (first.partitioned_by, first.partitioner):
            is_known = False
        if counts.get(flow.stream) != counts.get(first.stream):
            is_known = False
    if is_known:
        return replace(first, stream=stream)
    lost_at = context.operator
    for flow in flows:
        if flow.lost_at:
            lost_at = flow.lost_at
            break
    return Flow(stream, (), UNKNOWN, lost_at)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The partitioning that an operator requires of one input: by `columns`, into `partitions`.

    `columns` None requires the count only; `partitions` None leaves the count open. All inputs with
    a requirement must have the same count. `dataset` names the partitioned dataset that the records
    are looked up in, or, with `feeds`, sent to; the latter applies only if a join reads the
    dataset. Each input of a stream join, and that of a window, has a Requirement(None, None,
    columns).
    """

    dataset: str | None
    partitions: int | None
    columns: tuple[str, ...] | None
    feeds: bool = False


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column that must have the type of `other` ("'id' of dataset planes"); types are None
    where unknown.
    """

    column: str
    type: str | None
    other: str
    other_type: str | None


def check_equal_types(
    operator: str, compared: Sequence[ComparedColumn], *, dataset: str | None = None
) -> None:
    """Raise PlanningError for a pair of columns with different types; `dataset` has the other
    column of each pair.
    """
    for pair in compared:
        if pair.type is None or pair.other_type is None:
            continue
        if types_differ(pair.type, pair.other_type):
            name = pair.column
            problem = (
                f"{operator}: the stream's {name!r} is {pair.type} and {pair.other} is"
                f" {pair.other_type}; equal values of different types hash to different buckets."
            )
            cast = f"cast({name} as {pair.other_type}) as {flat_name(name)}_key"
            step = f'Cast it first: .map("*", "{cast}").'
            raise PlanningError(problem, step, operator=operator, column=name, dataset=dataset)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A repartitioning of one input of `operator` (for partition_by, its own), into `partitions` by
    `partitioned_by`.

    With `partitioned_by` () records are spread evenly. `input` is the number of the input, from 0.
    """

    operator: str
    reason: Reason
    partitioned_by: tuple[str, ...]
    partitions: int
    why: str
    input: int = 0


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call that a batch makes for its records: a "lookup" in a remote table, or a "sink", a
    user's function.

    `of` names the table or function, `guarantee` says how often it is called. If its results are
    `recorded`, a repeated batch uses the recorded ones.
    """

    operator: str
    kind: Literal["lookup", "sink"]
    of: str
    guarantee: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class PlannedStream:
    """A stream that the application reads, writes or makes, or what a declared dataset is built
    from (a side input).

    A side input has the name of its source, and `dataset` is set; for a local table, both are the
    table's name. All others have the `operator` at which they begin. `partitions` is None for a
    broadcast dataset; for another dataset it is the dataset's own count. `count_from` says where
    the count comes from ("input", "dataset planes", "inferred from dataset planes in
    join-2-planes").
    """

    name: str
    role: Role
    partitions: int | None
    partitioned_by: tuple[str, ...]
    partitioner: str
    count_from: str
    operator: str | None = None
    dataset: str | None = None


_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The watermarks of an operator: it has received all records with earlier event times, except
    late ones.

    `before` is the watermark at the start of the batch; `after` includes the records of the batch,
    and is committed with it. None: no watermark yet.
    """

    before: datetime | None
    after: datetime | None


def watermark_inputs(operators: Iterable[Operator]) -> dict[str, dict[str, timedelta]]:
    """Return {state name: {input stream: delay}} for each operator with state over time.

    The delay is how much the operators in between hold back the stream's watermark on its way to
    the operator.
    """
    inputs = {}
    for operator, delays in sum_along_paths(operators, lambda spec: spec.watermark_delay):
        if operator.spec.over_time is not None:
            inputs[operator.spec.over_time] = delays
    return inputs


def required_retention(operators: Iterable[Operator]) -> dict[str, timedelta]:
    """Return, by input stream, how long after its event time a record may still be needed by an
    operator.
    """
    needed: dict[str, timedelta] = {}
    for operator, delays in sum_along_paths(operators, lambda spec: spec.max_result_delay):
        for stream, delay in delays.items():
            retention = delay + operator.spec.record_retention
            needed[stream] = max(needed.get(stream, _ZERO), retention)
    return needed


class ArrivingSums(NamedTuple):
    """An operator, and a sum for each input stream that it depends on."""

    operator: Operator
    by_stream: dict[str, timedelta]


def sum_along_paths(
    operators: Iterable[Operator], delay_of: Callable[[Spec], timedelta]
) -> list[ArrivingSums]:
    """Return, for each operator, the sums of the delays between each of its input streams and it.

    `delay_of` returns the delay that one operator adds. If there are several paths, the largest sum
    counts.
    """
    leaving: dict[str, dict[str, timedelta]] = {}  # the sums after an operator, by its id
    sums = []
    for operator in operators:
        arriving: dict[str, timedelta] = {}
        if operator.spec.reads is not None:
            arriving[operator.spec.reads] = _ZERO
        for source in operator.inputs:
            for stream, span in leaving[source].items():
                arriving[stream] = max(span, arriving.get(stream, _ZERO))
        sums.append(ArrivingSums(operator, arriving))
        own_delay = delay_of(operator.spec)
        leaving[operator.id] = {stream: span + own_delay for stream, span in arriving.items()}
    return sums

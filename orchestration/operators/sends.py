"""Operators that write records to streams, datasets and sinks, and the exchanges that are needed
before writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy
from dagster_adjunct.orchestration.operators.batch import Batch, Frame, SparkBatch
from dagster_adjunct.orchestration.operators.calls import SinkFunction
from dagster_adjunct.orchestration.operators.columns import OnNullKey, function_label
from dagster_adjunct.orchestration.operators.functions import flow_after_function
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    DeclaredCount,
    Exchange,
    Flow,
    PassThroughSpec,
    PlanContext,
    PlannedCall,
    Reason,
    Requirement,
    Role,
    Spec,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    UNKNOWN,
    Columns,
    DeclaredApplication,
    DeclaredOutput,
    LineageNode,
    StreamFacts,
    new_stream_defaults,
    output_partitioner,
    require_facts,
)
from dagster_adjunct.orchestration.operators.updates import LocalSend
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.checking import check_condition
from dagster_adjunct.resources.sql.operands import may_cast
from dagster_adjunct.resources.streams.system import LAKE
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def exchange_before_stream(
    operator: str, reason: Reason, stream: StreamFacts, flow: Flow, current: int
) -> Exchange | None:
    """Return the exchange needed before records are written to a stream; None if they are
    partitioned as it needs. `flow` is their partitioning, into `current` partitions.

    A stream without a key needs its number of partitions, by any known key. A lake stream with a
    key needs Spark's hash of it. Any other stream needs one task to write all records of a key.
    """
    key = stream.key
    partitions = stream.partitions
    if not key:
        if flow.partitioned_by and current == partitions:
            return None
        why = f"{stream.name} has {partitions} partitions and no key"
        return Exchange(operator, reason, (), partitions, why)
    if stream.partitioner == SPARK:
        is_right = current == partitions and _is_hashed_by(flow, key)
    else:
        # The client of the stream system chooses the partition; the order of a key's records is
        # that of the task that writes them.
        is_right = _has_one_task_per_key(flow, key)
    if is_right:
        return None
    why = (
        f"{stream.name} has {partitions} partitions by ({', '.join(key)});"
        f" {_describe_partitioning(flow, current)}"
    )
    return Exchange(operator, reason, key, partitions, why)


def _is_hashed_by(flow: Flow, key: tuple[str, ...]) -> bool:
    """Whether records are partitioned by Spark's hash of exactly these columns."""
    return flow.partitioned_by == key and flow.partitioner == SPARK


def exchange_before_table(
    operator: str, table: str, key: tuple[str, ...], flow: Flow, current: int
) -> Exchange | None:
    """Return the exchange after which one task writes all records of a key to a table; None without
    need of one.

    `flow` is the partitioning of the records before it, into `current` partitions; the exchange
    keeps that number.
    """
    if _has_one_task_per_key(flow, key):
        return None
    where = _describe_partitioning(flow, current)
    why = f"records of one {', '.join(key)} must be in one task for table {table}; {where}"
    return Exchange(operator, "remote table", key, current, why)


def _has_one_task_per_key(flow: Flow, key: tuple[str, ...]) -> bool:
    """Whether all records of a key are surely in one task."""
    if flow.partitioner != SPARK:
        # The partitions are those of another stream system, and several tasks may read one.
        return False
    by = set(flow.partitioned_by)
    return bool(by) and by <= set(key)


def _describe_partitioning(flow: Flow, partitions: int) -> str:
    """Return a clause that says into how many partitions the records are divided, and how."""
    if not flow.partitioned_by:
        unknown = f"the records are in {partitions} partitions by no known key"
        if flow.lost_at:
            return f"{unknown} since {flow.lost_at}"
        return unknown
    return (
        f"the records are in {partitions} by ({', '.join(flow.partitioned_by)}) with"
        f" {flow.partitioner}"
    )


class OutputStreamSpec(Spec):
    """An operator that writes the output stream `stream`. The records that leave it are in the
    stream's partitions.
    """

    __slots__ = ()
    role: ClassVar[Role] = "output"
    needs_tasks: ClassVar[bool] = False
    stream: str

    @property
    def writes(self) -> str:
        return self.stream

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("stream", self.stream)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        system, _ = split_stream_name(self.stream)
        if system == LAKE:
            return ""
        return f"writing stream {self.stream}"

    def check_output(
        self, context: PlanContext, columns: Columns, side: str, next_step: str
    ) -> None:
        """Raise PlanningError if records with these columns can't be written to the stream.

        They can't if they lack a column of the key, if the stream exists with another key or
        partition count than declared, or if it needs a key and none is declared. In an error for a
        missing column, `side` names the owner of the columns, and `next_step` is the next step.
        """
        output = context.app.outputs[self.stream]
        name = output.name
        columns.require(context.operator, output.key, next_step, side=side)
        columns.require_simple(context.operator, output.key, "as the key of a stream")
        facts = context.catalog.get(name)
        if facts is None:
            _check_new_stream(context, output)
        elif (facts.partitions, facts.key) != (output.partitions, output.key):
            problem = (
                f"output stream {name!r} exists with {facts.partitions} partitions and key"
                f" ({', '.join(facts.key)}); it is declared with {output.partitions} and"
                f" ({', '.join(output.key)})."
            )
            _, short_name = split_stream_name(name)
            step = "Declare it as it exists, or choose another name."
            if facts.key == output.key:
                step += (
                    " A lake stream's partitions can be changed: adjunct stream repartition"
                    f" {short_name} --partitions {output.partitions} --reason …."
                )
            else:
                step += " A stream keeps its key."
            raise PlanningError(problem, step, stream=name)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        output = context.app.outputs[self.stream]
        if not output.key:
            return Flow(context.operator, (), UNKNOWN)
        partitioner = output_partitioner(context.catalog, output.name)
        return Flow(context.operator, output.key, partitioner)

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        return DeclaredCount(context.app.outputs[self.stream].partitions, "output")

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        output = context.app.outputs[self.stream]
        partitioner = output_partitioner(context.catalog, output.name)
        stream = StreamFacts(output.name, output.partitions, output.key, partitioner)
        return exchange_before_stream(context.operator, "output", stream, flow, partitions)


def _check_new_stream(context: PlanContext, output: DeclaredOutput) -> None:
    """Raise PlanningError if a stream that does not exist yet needs a key and declares none."""
    needs_key = new_stream_defaults(context.catalog, output.name).needs_key
    if needs_key and not output.key and output.partitions > 1:
        problem = (
            f"{context.operator}: output stream {output.name!r} is declared with"
            f" {output.partitions} partitions and without a key, so the partition of a record is"
            " undefined."
        )
        step = 'Declare key="…", or partitions=1.'
        raise PlanningError(problem, step, operator=context.operator, stream=output.name)


class DatasetSend(PassThroughSpec):
    """An operator that sends records to the dataset named `table`."""

    __slots__ = ()
    kind: ClassVar[str] = "send-to-table"
    table: str

    @property
    def writes(self) -> str:
        return self.table

    @property
    def feeds(self) -> str:
        return self.table

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        partitions = app.dataset(self.table).partitions
        if partitions is None:
            return ()
        return (Requirement(self.table, partitions, None, feeds=True),)


@dataclass(frozen=True, slots=True)
class SendToLocal(DatasetSend):
    """Records whose columns `schema` are stored by key in a local table; `deleted` is the
    condition for deletions.
    """

    table: str
    schema: Schema
    deleted: str | None = None
    on_null_key: OnNullKey = "fail"

    @property
    def sql(self) -> Sequence[str]:
        if self.deleted is None:
            return ()
        return (self.deleted,)

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("dataset", self.table)

    def summary(self) -> str:
        columns = f"local table {self.table} ({', '.join(self.schema.names)})"
        if self.deleted is None:
            return columns
        return f"{columns}, deleted where {self.deleted}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        step = f"They are the columns of table {self.table}."
        columns.require_columns(context.operator, self.schema.names, step)
        context.declared.extend(self._compare_types(context.operator, columns))
        if self.deleted is not None:
            check_condition(context.operator, self.deleted, columns.names, columns.types)
        return columns

    def _compare_types(self, operator: str, columns: Columns) -> list[ComparedColumn]:
        """Return the table's columns, each with its type in the records and in the table.

        Raises PlanningError for a column whose types differ. `columns` are those of the records.
        """
        what = f"local table {self.table}"
        compared = []
        for declared in self.schema.fields:
            name = declared.name
            kind = columns.type_of(name)
            compared.append(ComparedColumn(name, kind, what, declared.type))
            if kind is not None and kind != declared.type:
                problem = (
                    f"{operator}: column {name!r} is {kind}, and {what} is declared with"
                    f" {declared.type}."
                )
                step = f"Declare the column as {kind}, or send other values."
                if may_cast(kind, declared.type):
                    cast = f'.with_columns({name}="cast({name} as {declared.type})")'
                    step = f"Cast it first: {cast}; or declare the column as {kind}."
                raise PlanningError(problem, step, column=name, operator=operator)
        return compared

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        dataset = context.app.dataset(self.table)
        assert dataset.partitions is not None, "a local table has buckets"
        columns = tuple(map(dataset.source_of, dataset.partition_by))
        buckets = dataset.partitions
        if partitions == buckets and _is_hashed_by(flow, columns):
            return None
        where = _describe_partitioning(flow, partitions)
        why = f"local table {self.table} has {buckets} buckets by ({', '.join(columns)}); {where}"
        return Exchange(context.operator, "local table", columns, buckets, why)

    def written(self, arriving: Columns) -> Columns:
        stored = {name: facts for name, facts in arriving.known.items() if name in self.schema}
        return replace(arriving, known=stored)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        """Write the records and return them unchanged, computed once."""
        (frame,) = frames
        self._compare_types(operator, batch.records.columns(frame))
        if batch.planned.has_consumers(operator):
            frame = batch.records.materialize(operator, frame)
        send = LocalSend(self.table, self.deleted, self.on_null_key)
        batch.local_tables.write(operator, frame, send)
        return frame


def build_send_to_local(
    application: str, after: str, table: AdjunctDataset, deleted: str | None, on_null_key: OnNullKey
) -> SendToLocal:
    """Return the send for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    owned = table.input
    assert isinstance(owned, OwnedBy), "it is a local table"
    if owned.application != application:
        problem = (
            f"send_to after {after}: local table {table.name!r} belongs to application"
            f" {owned.application!r}; only that application writes it."
        )
        step = "Send to a stream that the other application reads. Joining the table is allowed."
        raise PlanningError(problem, step, dataset=table.name, operator=after)
    if deleted is not None and not deleted.strip():
        found = f"send_to after {after} has deleted={deleted!r}"
        expected = 'a Spark SQL condition for entries to delete, such as "visits = 0"'
        raise argument_error(found, expected, argument="deleted")
    return SendToLocal(table.name, owned.schema, deleted, on_null_key)


@dataclass(frozen=True, slots=True)
class SendToDataset(DatasetSend):
    """Records written to the input stream of the dataset named `table`."""

    table: str

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("stream", self._feeding_stream(app))

    def _feeding_stream(self, app: DeclaredApplication) -> str:
        """Return the stream that feeds the dataset."""
        stream = app.dataset(self.table).stream
        assert stream is not None  # MessageStream.send_to rejects datasets without a stream
        return stream

    def summary(self) -> str:
        return f"dataset {self.table}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        key = context.app.dataset(self.table).key_sources
        columns.require(context.operator, key, f"They are the key of table {self.table}.")
        return columns

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        facts = require_facts(context.catalog, self._feeding_stream(context.app), context.operator)
        key = facts.key or context.app.dataset(self.table).key_sources
        stream = StreamFacts(facts.name, facts.partitions, key, facts.partitioner)
        return exchange_before_stream(context.operator, "dataset", stream, flow, partitions)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        """Write the records to the dataset's stream; the dataset reads them when it next advances.

        They are partitioned as the stream is, which may differ from the dataset's buckets: another
        deployment may have repartitioned the dataset.
        """
        (frame,) = frames
        stream = self._feeding_stream(batch.planned.app)
        _, name = split_stream_name(stream)
        info = batch.planned.system_of(stream).info(name)
        batch.outputs.send(operator, frame, stream, key=info.key, partitions=info.partitions)
        return frame


@dataclass(frozen=True, slots=True)
class SendToStream(OutputStreamSpec):
    """Records appended to an output stream."""

    kind: ClassVar[str] = "send-to"
    stream: str

    def summary(self) -> str:
        return self.stream

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        next_step = f"They are the key of output {self.stream}."
        self.check_output(context, columns, "the stream", next_step)
        node = LineageNode("stream", self.stream)
        sent = {}
        for name, facts in columns.known.items():
            sent[name] = replace(facts, sources=((node, name),))
        return replace(columns, known=sent)

    def came_from(self, name: str, arriving: Columns) -> str | None:
        return name

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        """Append to the output stream; return the appended records for the next operators.

        They are read back from the stream if nobody else can have written between them
        (`appends_alone`).
        """
        (frame,) = frames
        output = batch.planned.app.outputs[self.stream]
        reads_back = False
        if batch.planned.has_consumers(operator):
            reads_back = batch.planned.system_of(self.stream).capabilities.appends_alone
            if not reads_back:  # others may write between these records: materialize what is sent
                frame = batch.records.materialize(operator, frame)
        batch.outputs.send(
            operator, frame, self.stream, key=output.key, partitions=output.partitions
        )
        if reads_back:
            return batch.outputs.read_sent(operator, frame, self.stream)
        return frame


@dataclass(frozen=True, slots=True)
class Sink(Spec):
    """Records passed to `function` in Spark tasks. With `returns`, its results continue, else
    the records.
    """

    kind: ClassVar[str] = "sink"
    function: SinkFunction
    returns: Schema | None = None
    keeps_partitioning: bool = False

    @property
    def writes(self) -> str:
        return function_label(self.function)

    @property
    def check_target(self) -> Callable[[], object] | None:
        check: Callable[[], object] | None = getattr(self.function, "check", None)
        if not callable(check):
            return None
        return check

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("sink", f"{app.name}/{self.writes.removesuffix('()')}")

    def summary(self) -> str:
        if self.returns is None:
            return self.writes
        return f"the results of {self.writes}"

    def call(self, operator: str, app: DeclaredApplication) -> PlannedCall:
        is_recorded = self.returns is not None
        if is_recorded:
            again = "; not again once its results are recorded"
        else:
            again = ", and again if the batch is repeated"
        guarantee = f"at least once for each record of a batch{again}"
        return PlannedCall(operator, "sink", self.writes, guarantee, is_recorded)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        if self.returns is None:
            return columns
        return Columns.of_schema(self.returns)

    def came_from(self, name: str, arriving: Columns) -> str | None:
        if self.returns is None:
            return name
        return None

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if self.returns is None:
            return flow
        return flow_after_function(
            context.operator,
            flow,
            self.function,
            self.returns,
            keeps_partitioning=self.keeps_partitioning,
        )

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        """Call the function; return its results, or else the records."""
        (frame,) = frames
        if self.returns is not None:
            return batch.sinks.call_for_results(operator, frame, self.function, self.returns)
        if batch.planned.has_consumers(operator):
            frame = batch.records.materialize(operator, frame)
        batch.sinks.call(operator, frame, self.function)
        return frame


def build_sink(
    after: str, function: SinkFunction, returns: Schema | None, keeps_partitioning: bool
) -> Sink:
    """Return the sink for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    what = f"sink after {after}"
    check_plain_function(what, function, "function", "records", "context")
    if returns is not None and not returns.fields:
        expected = 'the columns of its results, such as Schema.of(order="bigint", state="string")'
        raise argument_error(f"{what} has returns={returns!r}", expected, argument="returns")
    if keeps_partitioning and returns is None:
        problem = (
            f"{what} has keeps_partitioning=True without returns=: the records continue unchanged."
        )
        step = "Leave keeps_partitioning out."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Sink(function, returns, keeps_partitioning)

"""Compiles a planned application to DataFrames for one batch, and runs its outputs in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.assets.sources.entries import schema_of_entries
from dagster_adjunct.orchestration.application.graph import (
    Filter,
    Input,
    Join,
    Map,
    Operator,
    PartitionBy,
    SendToStream,
    SendToTable,
)
from dagster_adjunct.orchestration.step.exchange_check import check_join
from dagster_adjunct.orchestration.step.join_counts import JoinCounts
from dagster_adjunct.resources.errors import PlanningError, StreamNotFoundError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.columns import bigints, column, quoted
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    RECORD_META,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    AppendResult,
    OffsetRange,
)
from dagster_adjunct.resources.streams.lake.sources import SourceRange, Sources
from dagster_adjunct.resources.tables.spark_write import TableWrite, write_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient import TransientVersion
    from dagster_adjunct.orchestration.step.context import StepContext
    from dagster_adjunct.resources.streams.interface.system import StreamSystem
    from dagster_adjunct.resources.tables import RemoteTable

Counters = dict[str, dict[str, int]]
TASK = "__task"


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one batch reads: offsets [start, end) of each input partition, and one version of each dataset.

    A view is None for a dataset that holds nothing back and has no version yet: its joins find no match. `epochs` are
    those of the partitions' positions, without zeros; `consumed` are the offsets at which the main input goes on after
    the batch, None for one that replays. `identities` are those of the input streams that have one. `tasks` is how many
    read broadcast inputs; None: as many as the plan has.
    """

    batch: int
    ranges: Mapping[SystemStreamPartition, OffsetRange]
    views: Mapping[str, VersionReader | TransientVersion | None]
    epochs: Mapping[SystemStreamPartition, int] = field(default_factory=dict)
    consumed: Mapping[SystemStreamPartition, str] | None = None
    identities: Mapping[str, str] = field(default_factory=dict)
    tasks: int | None = None


def run_batch(context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> Counters:
    """Run every output of the application once, in the order of their definition; return their counters.

    Outputs take (application, batch) as producer and sequence, so running a batch again adds nothing to
    streams. `before_output` is called with the output's name before anything is written to it.
    """
    return Batch(context, inputs, before_output).run()


class Batch:
    def __init__(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> None:
        self._context, self._inputs, self._before_output = context, inputs, before_output
        self._spark: SparkSession = context.spark()
        self._frames: dict[str, DataFrame] = {}
        self._counters: Counters = {}
        self._joins: list[JoinCounts] = []
        self._kept: list[DataFrame] = []
        operators = context.app.operators
        self._uses = {op.id: sum(op.id in other.inputs for other in operators) for op in operators}
        self._written = _upstream_of_outputs(operators)

    def run(self) -> Counters:
        try:
            for operator in self._context.app.operators:
                if operator.id not in self._written:
                    continue
                frame = self._analysed(operator)
                if self._uses[operator.id] > 1 and not isinstance(operator.spec, Input | SendToStream | SendToTable):
                    # Several operators read these records: compute them once.
                    frame = frame.persist()
                    self._kept.append(frame)
                self._frames[operator.id] = frame
            for join in self._joins:
                self._counters[join.name] = join.result()
            return self._counters
        finally:
            for frame in self._kept:
                frame.unpersist()

    def _analysed(self, operator: Operator) -> DataFrame:
        """Return the operator's records; what Spark says of its expressions is told with its name, not with a plan."""
        from pyspark.errors import AnalysisException

        try:
            return self._compile(operator)
        except AnalysisException as error:
            said = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
            raise PlanningError(
                f"{operator.id}: {said}.",
                "Correct the expression, or the function; adjunct plan shows the operators by these names.",
            ) from error

    def _compile(self, operator: Operator) -> DataFrame:
        spec = operator.spec
        if isinstance(spec, Input):
            records = self._read(spec.stream)
            tasks = self._inputs.tasks or len(self._context.plan.tasks)
            return records if spec.broadcast is None else _for_each_task(records, spec.broadcast, tasks)
        frame = self._exchanged(operator, self._frames[operator.inputs[0]])
        if isinstance(spec, Filter):
            return self._apply(operator, frame, spec.condition)
        if isinstance(spec, Map):
            return self._apply(operator, frame, spec.function) if spec.function else self._select(frame, spec)
        if isinstance(spec, PartitionBy):
            partitions = self._context.plan.partitions_at(operator.id)
            return frame.repartition(partitions, *[column(name) for name in spec.columns])
        if isinstance(spec, Join):
            return self._join(operator, frame, spec)
        if isinstance(spec, SendToStream):
            return self._append(operator, frame, spec)
        if spec.dataset:
            self._feed(operator, frame, spec)
        else:
            self._write(operator, frame, spec)
        return frame

    def _exchanged(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records where the planner's auto_repartition has them before this operator."""
        for exchange in self._context.plan.exchanges_before(operator.id):
            if exchange.reason == "auto_repartition":
                frame = frame.repartition(exchange.partitions, *[column(name) for name in exchange.partitioned_by])
        return frame

    def _read(self, stream: str) -> DataFrame:
        system, name = split_stream_name(stream)
        streams = self._context.systems[system]
        ranges = {ssp: r for ssp, r in self._inputs.ranges.items() if (ssp.system, ssp.stream) == (system, name)}
        if not ranges:
            # A batch that replays other streams: no records of this one.
            first = streams.upcoming(streams.partitions(name)[:1])
            ranges = {ssp: OffsetRange(end, end) for ssp, end in first.items()}
        epochs = {ssp.partition: epoch for ssp, epoch in self._inputs.epochs.items() if ssp in ranges}
        return _with_epochs(streams.read(self._spark, ranges), epochs)

    def _apply(self, operator: Operator, frame: DataFrame, how: str | Callable[[DataFrame], DataFrame]) -> DataFrame:
        if isinstance(how, str):
            return frame.filter(how)
        result = how(frame)
        lost = [name for name in _kept(frame) if name not in result.columns]
        if lost:
            raise PlanningError(
                f"{operator.id}: its function returned records without {', '.join(lost)}, which carry each record's "
                "position in its stream and its epoch.",
                'Keep them: add columns with withColumn or select("*", …), and drop only your own; or give '
                "expressions instead of a function.",
            )
        return result

    def _select(self, frame: DataFrame, spec: Map) -> DataFrame:
        hidden = [f"`{name}`" for name in _kept(frame)]
        if "*" in [expression.strip() for expression in spec.expressions]:
            hidden = []
        return frame.selectExpr(*hidden, *spec.expressions)

    def _join(self, operator: Operator, frame: DataFrame, spec: Join) -> DataFrame:
        from pyspark.sql import functions as F

        view = self._inputs.views[spec.dataset]
        dataset = self._context.app.dataset(spec.dataset)
        # Held back by nothing and not built yet: an empty dataset of the columns that it will have.
        schema = self._declared_schema(dataset) if view is None else view.schema
        entries = self._entries(view, schema)
        selection = spec.selection(schema.names)
        self._check_columns(operator, frame, spec, schema)
        keys = [f"__key_{index}" for index in range(len(spec.on))]
        side = entries.select(
            *[column(entry).alias(key) for (_, entry), key in zip(spec.on, keys, strict=True)],
            *[column(chosen.column).alias(chosen.name) for chosen in selection],
            F.lit(True).alias("__matched"),
        )
        condition: Column | None = None
        for (stream, _), key in zip(spec.on, keys, strict=True):
            equal = frame[quoted(stream)] == side[key]
            condition = equal if condition is None else condition & equal
        side = F.broadcast(side) if dataset.broadcast else side.hint("merge")
        # An inner join is a left one without what has met no entry, which is counted before it goes.
        joined = frame.join(side, condition, "left")
        if not dataset.broadcast and view is not None:
            self._check_plan(joined, operator.id, dataset.name)
        counted = self._counted(joined, operator.id)
        kept = counted.filter("__matched") if spec.how == "inner" else counted
        return kept.drop(*keys, "__matched")

    def _entries(self, view: VersionReader | TransientVersion | None, schema: Schema) -> DataFrame:
        return self._spark.createDataFrame([], schema.ddl()) if view is None else view.frame(self._spark)

    def _check_plan(self, joined: DataFrame, operator: str, dataset: str) -> None:
        check_join(joined, operator, dataset)

    def _counted(self, joined: DataFrame, operator: str) -> DataFrame:
        counts = JoinCounts(operator)
        self._joins.append(counts)
        return counts.observe(joined)

    def _declared_schema(self, dataset: AdjunctDataset) -> Schema:
        if not isinstance(dataset.input, str):
            return schema_of_entries(dataset, dataset.input.schema)
        system, stream = split_stream_name(dataset.input)
        records = self._context.systems[system].info(stream).schema
        return Schema(()) if records is None else schema_of_entries(dataset, records)

    def _check_columns(self, operator: Operator, frame: DataFrame, spec: Join, schema: Schema) -> None:
        """Say which side lacks a column before Spark does, in the application's own words."""
        types = dict(frame.dtypes)
        for stream, entry in spec.on:
            if stream not in types:
                raise PlanningError(
                    f"{operator.id}: the stream has no column {stream!r} to join on; it has "
                    f"{', '.join(name for name in types if not name.startswith('__'))}.",
                    "Correct on=, or add the column with map().",
                )
            expected = schema.field(entry, f"dataset {spec.dataset}").type
            if types[stream] != expected:
                raise PlanningError(
                    f"{operator.id}: the stream's {stream!r} is {types[stream]} and {entry!r} of dataset "
                    f"{spec.dataset} is {expected}; equal values of different types lie in different buckets.",
                    f'Cast it first: .map("*", "cast({stream} as {expected}) as {stream}_key").',
                )
        for chosen in spec.selection(schema.names):
            schema.field(chosen.column, f"dataset {spec.dataset}")
            if chosen.name in types:
                raise PlanningError(
                    f"{operator.id}: the stream and dataset {spec.dataset} both have a column {chosen.name!r}.",
                    f'Rename one: select=["{chosen.column} as …"] or prefix="{spec.dataset}_".',
                )

    def _append(self, operator: Operator, frame: DataFrame, spec: SendToStream) -> DataFrame:
        """Append to the output stream and go on with what it holds of this batch, where its system can tell."""
        output = self._context.app.outputs[spec.stream]
        system_name, stream = split_stream_name(spec.stream)
        system = self._context.systems[system_name]
        goes_on = bool(self._uses[operator.id])
        if goes_on and not system.appends_alone:
            # Others may write between these records: go on with those that were sent, computed once.
            frame = frame.persist()
            self._kept.append(frame)
        result = self._send(operator, frame, spec.stream, output.key, output.partitions)
        if not goes_on or not system.appends_alone:
            return frame
        ranges = {
            SystemStreamPartition(system_name, stream, partition): OffsetRange(start, result.next[partition])
            for partition, start in result.first.items()
        }
        # The positions in the input go on with the records, not their new ones.
        more = {"positions": True} if system.keeps_positions else {}
        return system.read(self._spark, ranges, **more)

    def _feed(self, operator: Operator, frame: DataFrame, spec: SendToTable) -> None:
        """Append to the stream that feeds a dataset; the dataset takes the changes when it next advances."""
        dataset = self._context.app.dataset(spec.table)
        assert dataset.stream is not None  # MessageStream.send_to refuses others
        self._send(operator, frame, dataset.stream, dataset.partition_by or dataset.key, dataset.partitions or 1)

    def _send(
        self, operator: Operator, frame: DataFrame, qualified: str, key: Sequence[str], partitions: int
    ) -> AppendResult:
        self._before_output(qualified)
        system_name, stream = split_stream_name(qualified)
        system = self._context.systems[system_name]
        create = partial(system.create, stream, schema=sent_schema(frame), key=key, partitions=partitions)
        sources = self._sources(operator) if system.keeps_positions else None
        more: dict[str, Any] = {"sources": sources} if sources else {}
        append = partial(
            system.append,
            stream,
            _with_positions(frame, sources),
            producer=self._context.app.name,
            sequence=self._inputs.batch,
            order_by=("__partition", "__offset", *_task_number(frame)),
            partitioned=not self._context.plan.exchanges_before(operator.id),
            consumed=self._inputs.consumed,
            **more,
        )
        if system.evolves and self._is_in(system, stream):
            # Sent before the columns changed, maybe: they do not change for records that turn out to be others.
            result = append()
            create()
        else:
            create()
            result = append()
        self._counters[qualified] = {"rows": result.rows, "duplicate_batches": int(result.duplicate)}
        return result

    def _is_in(self, system: StreamSystem, stream: str) -> bool:
        try:
            return system.appended(stream, self._context.app.name, self._inputs.batch) is not None
        except StreamNotFoundError:
            return False

    def _sources(self, operator: Operator) -> Sources | None:
        """Return what the records before an operator are made of, None where offsets are no numbers."""
        at, by_id = operator, {each.id: each for each in self._context.app.operators}
        while not isinstance(at.spec, Input):
            at = by_id[at.inputs[0]]
        stream, identity = at.spec.stream, self._inputs.identities.get(at.spec.stream)
        ranges = {ssp: span for ssp, span in self._inputs.ranges.items() if ssp.qualified_stream == stream}
        if not all(text.isdecimal() for span in ranges.values() for text in (span.start, span.end)):
            return None
        app = self._context.app.name
        return Sources(
            stream,
            f"{app}@{identity}" if identity else app,
            tuple(
                SourceRange(str(ssp), int(span.start), int(span.end), self._inputs.epochs.get(ssp, 0))
                for ssp, span in sorted(ranges.items())
            ),
        )

    def _positions_of(self, operator: Operator) -> str:
        """Return the stream whose positions the records before an operator carry."""
        by_id = {each.id: each for each in self._context.app.operators}
        at = by_id[operator.inputs[0]]
        while not isinstance(at.spec, Input | SendToStream):
            at = by_id[at.inputs[0]]
        return at.spec.stream

    def _write(self, operator: Operator, frame: DataFrame, spec: SendToTable) -> None:
        self._before_output(spec.table)
        table = cast("RemoteTable[Any, Any, Any]", self._context.app.tables[spec.table])
        partitions = self._context.plan.partitions_at(operator.id)
        write = TableWrite(table, spec.contract, spec.on_null_key, partitions, self._positions_of(operator))
        exchange = bool(self._context.plan.exchanges_before(operator.id))
        self._counters[spec.table] = write_table(frame, write, exchange=exchange, what=operator.id)


def sent_schema(frame: DataFrame) -> Schema:
    """Return the columns of records that an output stream gets."""
    return Schema.from_spark(
        frame.select(*[column(name) for name in frame.columns if not name.startswith("__")]).schema
    )


def _for_each_task(records: DataFrame, name: str, tasks: int) -> DataFrame:
    """Return all the records once for each task, those of task n in partition n, with its number in the column `name`.

    The number is there a second time, hidden: it orders the copies of one record where they come together again, so
    that a batch that is repeated sends the same bytes.
    """
    from pyspark.sql import functions as F

    numbers = records.sparkSession.range(0, tasks, 1, tasks).select(F.col("id").cast("int").alias(TASK))
    # The numbers stay where they are, and each of their partitions gets all records.
    return numbers.crossJoin(F.broadcast(records)).select(*records.columns, F.col(TASK).alias(name), TASK)


def _task_number(frame: DataFrame) -> tuple[str, ...]:
    return (TASK,) if TASK in frame.columns else ()


def _with_epochs(records: DataFrame, epochs: Mapping[int, int]) -> DataFrame:
    """Return the records with the epoch of their partition's position added to their own.

    The sum, so that who reads the output of an application that read a replayed output can tell, too.
    """
    from pyspark.sql import functions as F

    if not epochs:
        return records
    here = F.get(bigints(epochs.get(partition, 0) for partition in range(max(epochs) + 1)), F.col(PARTITION))
    return records.withColumn(EPOCH, (F.col(EPOCH) + F.coalesce(here, F.lit(0))).cast("int"))


def _kept(frame: DataFrame) -> list[str]:
    """Return the columns that carry the records' positions through every operator."""
    return [*RECORD_META, *(name for name in (*POSITION, TASK) if name in frame.columns)]


def _with_positions(records: DataFrame, sources: Sources | None) -> DataFrame:
    """Return the records with the columns of POSITION, where their output keeps these, and else without.

    Records that come from an output of this batch have them already: the positions are in the application's input.
    """
    from pyspark.sql import functions as F

    if sources is None:
        return records.drop(*POSITION)
    if SOURCE in records.columns:
        return records
    numbers = {SystemStreamPartition.parse(span.source).partition: span.epoch for span in sources.ranges}
    epoch = F.get(bigints(numbers.get(p, 0) for p in range(max(numbers, default=0) + 1)), F.col(PARTITION))
    return records.withColumns(
        {
            SOURCE: F.concat(F.lit(f"{sources.stream}."), F.col(PARTITION).cast("string")),
            SOURCE_OFFSET: F.col(OFFSET),
            SOURCE_EPOCH: F.coalesce(epoch, F.lit(0)).cast("int"),
            READER: F.lit(sources.reader),
        }
    )


def _upstream_of_outputs(operators: Sequence[Operator]) -> set[str]:
    """Return the operators whose records reach an output; the others need not run."""
    needed: set[str] = set()
    for operator in reversed(operators):
        if isinstance(operator.spec, SendToStream | SendToTable) or operator.id in needed:
            needed |= {operator.id, *operator.inputs}
    return needed

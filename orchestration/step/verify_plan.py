"""Compares an application's plan with Spark's physical plans in a dry run: nothing is read or
written, no job runs.

The dry run compiles every operator over the real inputs and marks its records with a metric, so
that each exchange and join in Spark's plan has the name of the nearest operator above it. Batches
have no such marks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import (
    derive_row_schema,
    derive_stored_schema,
    entries_from_frame,
)
from dagster_adjunct.assets.unbounded.local_table import (
    StateSpec,
    declare_state_dataset,
    validate_state,
)
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import Intent
from dagster_adjunct.orchestration.operators.columns import (
    BATCH_ONLY,
    DataFrameFunction,
    OnNullKey,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.lookup_join import TableLookup, check_stored_columns
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.sends import SinkFunction
from dagster_adjunct.orchestration.operators.table_updates import (
    TableSend,
    TableSink,
    check_sink_columns,
)
from dagster_adjunct.orchestration.planner.columns import check_fed_datasets, iterate_dataset_sql
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan, PlannedOperator
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step.batch import BatchContext
from dagster_adjunct.orchestration.step.batch_outputs import StateTable, prepare_table_rows
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext, View
from dagster_adjunct.orchestration.step.lookups import add_unknown_answers
from dagster_adjunct.orchestration.step.recorded_answers import plan_results
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    BucketLayout,
    bucketed_frame,
)
from dagster_adjunct.resources.errors import (
    OperatorFailedError,
    PermanentError,
    PlanningError,
    ZoneRulesError,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.spark.in_process import is_remote
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    RECORD_META_DDL,
    AppendResult,
    OffsetRange,
    SystemStreamPartition,
    require_writer,
)
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.functions import TableFunction
from dagster_adjunct.resources.tables.operation import run_blocking
from dagster_adjunct.resources.tables.spark import check_record_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_log = logging.getLogger("adjunct.step")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Exchanges in DataFrames; those of other reasons happen when records are written.
_IN_FRAMES = ("partition_by", "auto_repartition")


@dataclass(frozen=True, slots=True)
class JoinProof:
    """How Spark executes one join: the kind of join, how it reads the dataset, and the number of
    exchanges on each side.
    """

    operator: str
    dataset: str
    kind: str
    reads: str
    stream_exchanges: int
    dataset_exchanges: int


@dataclass(frozen=True, slots=True)
class PhysicalProof:
    """The result of comparing Spark's physical plans with the application's plan.

    `differences` are exchanges that the plan does not list, as errors that say what to do. `notes`
    are what the plan makes no claim about, such as a function that repartitions records, or a
    promise that Spark can't check. `states` are the state tables that a batch writes.
    """

    joins: tuple[JoinProof, ...] = ()
    differences: tuple[PlanningError, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[AdjunctDataset, ...] = ()

    def report_differences(self) -> None:
        """Log a warning for each difference; with ADJUNCT_STRICT_PLANS raise PlanningError for the
        first.

        Results are right either way; only the speed that the plan promises is lost.
        """
        for difference in self.differences:
            if os.environ.get("ADJUNCT_STRICT_PLANS"):
                raise difference
            _log.warning("%s", difference)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON values."""
        return {
            "joins": [asdict(join) for join in self.joins],
            "differences": [
                {
                    name: getattr(difference, name)
                    for name in ("operator", "problem", "next_step", "dataset")
                }
                for difference in self.differences
            ],
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """Return the proof as plain text."""
        lines = ["What Spark is going to do"]
        for join in self.joins:
            moved = (
                f"exchanges: {join.stream_exchanges} of records, {join.dataset_exchanges} of the"
                " dataset"
            )
            lines.append(
                f"  {join.operator}  {join.kind} with {join.dataset}, {join.reads}; {moved}"
            )
        lines += [f"  {note}" for note in self.notes]
        lines += [
            f"  NOT IN THE PLAN: {difference.problem} {difference.next_step}"
            for difference in self.differences
        ]
        if not self.differences:
            lines.append("  No exchange that the plan does not list.")
        return "\n".join(lines)


def _check_write_placement(
    operator: str, source: PlannedOperator, spark_plan: SparkPlan
) -> str | None:
    """Return a note if records are written without an exchange and Spark can't confirm their
    partitioning; None if it does.

    `source` is the planned operator that the records come from. Raises PlanningError if they are
    certainly partitioned differently: writing them would fail, or lose the order of a key's
    records.
    """
    expected, found = (
        f"hashpartitioning({', '.join(source.partitioned_by)}, {source.partitions})",
        spark_plan.partitioning,
    )
    if expected in found or (source.partitions == 1 and "singlepartition" in found.lower()):
        return None
    if found in ("UnknownPartitioning(0)", f"UnknownPartitioning({source.partitions})"):
        return (
            f"{operator}: that records are partitioned by {expected} is a promise that Spark can't"
            " check."
        )
    moving = [
        name for name, moved in spark_plan.exchanges.items() if any(to in found for to, _ in moved)
    ]
    raise PlanningError(
        f"{operator}: the plan writes records without a shuffle, as already partitioned by"
        f" {expected}, but after {', '.join(moving) or source.id} their partitioning is {found}.",
        "If a function shuffles records, do not use it as a filter, and remove its"
        " keeps_partitioning; then call partition_by after it.",
        operator=operator,
    )


Side = Literal["stream", "dataset"]
_JOIN_NAMES = {"SortMergeJoin": "sort-merge join", "BroadcastHashJoin": "broadcast join"}
_MARK = "adjunct "
_ATTRIBUTE = re.compile(r"#\d+L?")


@dataclass(slots=True)
class SparkJoin:
    """How Spark joins for an operator ("SortMergeJoin"), and how it reads the dataset's side.

    `buckets` is the number of buckets of a bucketed scan, else None; `broadcast` says whether every
    task gets all of it.
    """

    kind: str
    buckets: int | None = None
    broadcast: bool = False

    def describe_scan(self) -> str:
        if self.broadcast:
            return "all of it in every task"
        return "not by buckets" if self.buckets is None else f"a bucketed scan of {self.buckets}"


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """The joins and exchanges of one physical plan by operator, and the partitioning of its result.

    An exchange is its partitioning ("hashpartitioning(k, 4)"), and the side of a join that it is
    on, if any. Operators without one have an empty list.
    """

    joins: Mapping[str, SparkJoin]
    exchanges: Mapping[str, list[tuple[str, Side | None]]]
    partitioning: str


def mark_operator(operator: str, frame: DataFrame) -> DataFrame:
    """Return the same records, marked with the operator's name in Spark's plans."""
    return frame.observe(f"{_MARK}{operator}", F.count(F.lit(1)))


def inspect_spark_plan(
    operator: str, frame: DataFrame, joins: Collection[str], *, persisted: bool = False
) -> SparkPlan:
    """Return Spark's plan for records that arrive at an operator; no job runs.

    `joins` are the operators that join a dataset; the topmost join of each is recorded. For a frame
    that was just `persisted`, it is the plan that Spark has made to compute its rows.
    """
    if persisted:  # the frame's own plan may be from before it was persisted
        manager = frame._jdf.sparkSession().sharedState().cacheManager()
        top = (
            manager.lookupCachedData(frame._jdf)
            .get()
            .cachedRepresentation()
            .cacheBuilder()
            .cachedPlan()
        )
    else:
        top = frame._jdf.queryExecution().executedPlan()
    found: dict[str, SparkJoin] = {}
    exchanges: dict[str, list[tuple[str, Side | None]]] = {operator: []}
    waiting: list[tuple[Any, str, Side | None]] = [(top, operator, None)]
    while waiting:
        node, owner, side = waiting.pop()
        name = node.nodeName()
        sides: tuple[Side | None, ...] = (side, side)
        join = found.get(owner) if side == "dataset" else None
        if name.startswith("CollectMetrics"):
            if node.name().startswith(_MARK):
                owner, sides = node.name().removeprefix(_MARK), (None,)
                exchanges.setdefault(owner, [])
        elif name.startswith(("BroadcastExchange", "ReusedExchange")):
            if join is not None and (
                name[0] == "B" or node.child().nodeName().startswith("Broadcast")
            ):
                join.broadcast = True
            continue
        elif name.startswith(("Exchange", "ShuffleExchange")):
            exchanges[owner].append((_partitioning_text(node.outputPartitioning()), side))
        elif "Join" in name and owner in joins and owner not in found:
            found[owner] = SparkJoin(name.partition("(")[0])
            sides = ("stream", "dataset")
        elif join is not None and join.buckets is None and _is_bucketed(name, node):
            join.buckets = node.outputPartitioning().numPartitions()
        children = node.children()
        for index in range(children.size()):
            waiting.append((children.apply(index), owner, sides[min(index, len(sides) - 1)]))
    return SparkPlan(found, exchanges, _partitioning_text(top.outputPartitioning()))


def _is_bucketed(name: str, node: Any) -> bool:
    if not name.startswith("Scan ") or node.getClass().getSimpleName() != "FileSourceScanExec":
        return False
    return bool(node.bucketedScan())


def _partitioning_text(partitioning: Any) -> str:
    return _ATTRIBUTE.sub("", partitioning.toString())


def analyze_batch(
    context: StepContext,
    views: Mapping[str, View],
    starts: Mapping[SystemStreamPartition, str] | None = None,
) -> PhysicalProof:
    """Return what Spark would do with a batch over these dataset versions; no record is read.

    Jobs run only to compare rules of time zones.

    Raises the errors that creating an output stream would raise, and PlanningError for what Spark
    rejects. Functions of the application are called with an empty DataFrame, as may happen in a
    batch; one that fails on it is rejected. `starts` are existing offsets of the input streams;
    they are looked up where left out.
    """
    with closing(DryRun(context, inputs_of_dry_run(context, views, starts or {}))) as batch:
        batch.run()
        return batch.proof()


def inputs_of_dry_run(
    context: StepContext, views: Mapping[str, View], starts: Mapping[SystemStreamPartition, str]
) -> BatchInputs:
    """Return the inputs of a batch that reads nothing: it is number 0."""
    ranges = {ssp: OffsetRange(start, start) for ssp, start in starts.items()}
    return BatchInputs(
        Intent(batch=0, run=context.run, clock=_EPOCH, ranges=ranges, versions={}), views
    )


_UNSEEN = "Spark Connect does not show its clients the plan: joins and shuffles were not compared."


class DryRun(BatchContext):
    """A batch without records, which writes nothing. Spark jobs only compare rules of time zones.

    It collects Spark's physical plans, each operator once, and compares them with the application's
    plan.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        super().__init__(context, inputs, lambda name: None)
        self._states: list[AdjunctDataset] = []
        self._inspected: set[str] = set()
        self._joins: list[JoinProof] = []
        self._differences: list[PlanningError] = []
        self._notes: list[str] = []
        self._datasets: dict[str, str] = {}
        self._stored_types: dict[str, dict[str, str] | None] = {}

    def proof(self) -> PhysicalProof:
        """Return what was found so far."""
        return PhysicalProof(
            tuple(self._joins), tuple(self._differences), tuple(self._notes), tuple(self._states)
        )

    def compile_operator(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the operator's records; an error names the operator."""
        try:
            return super().compile_operator(operator, sources)
        except PermanentError as error:
            if getattr(error, "operator", None) is not None:
                raise
            about = {"operator": operator.id} if hasattr(error, "operator") else {}
            raise error.reworded(
                f"{operator.id}: {error.problem}", error.next_step, **about
            ) from error

    def hand_on(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records as the next operators get them, marked with this operator's name.

        Where they are read back from an output, they are cached: so Spark's plan for them starts
        there.
        """
        spec = operator.spec
        if spec.reads is not None or not self.has_consumers(operator.id):
            return frame
        if (
            spec.role == "output"
            and spec.writes is not None
            and require_writer(self.system_of(spec.writes)).appends_alone
        ):
            # The next operators read them from the output, partitioned as it is.
            by = map(named_column, self.required_partitioning(operator.id))
            stored = frame.drop(*tie_breakers(frame.columns), *BATCH_ONLY).repartition(
                self.partitions_at(operator.id), *by
            )
            return super().materialize(operator.id, stored)
        return super().hand_on(operator, mark_operator(operator.id, frame))

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, cached, and inspect their plan; Spark's plans of others no
        longer contain it.
        """
        kept = super().materialize(operator, frame)
        self._inspect(operator, kept, persisted=True)
        return kept

    def _inspect(self, operator: str, frame: DataFrame, *, persisted: bool = False) -> SparkPlan:
        """Compare Spark's plan for records that arrive at an operator with the application's plan,
        and return it.

        Does nothing with Spark Connect, whose clients do not get Spark's plan.
        """
        if is_remote(frame):
            self._notes += [] if _UNSEEN in self._notes else [_UNSEEN]
            return SparkPlan({}, {}, "")
        spark_plan = inspect_spark_plan(operator, frame, self._datasets, persisted=persisted)
        for name in sorted(spark_plan.exchanges.keys() - self._inspected):
            self._inspected.add(name)
            dataset, join = self._datasets.get(name), spark_plan.joins.get(name)
            moved = spark_plan.exchanges[name]
            of_dataset = [to for to, side in moved if side == "dataset"]
            others = [to for to, side in moved if side != "dataset"]
            if dataset is not None and join is not None:
                of_stream = sum(side == "stream" for _, side in moved)
                kind, reads = _JOIN_NAMES.get(join.kind, join.kind), join.describe_scan()
                self._joins.append(
                    JoinProof(name, dataset, kind, reads, of_stream, len(of_dataset))
                )
            if of_dataset and dataset is not None:
                problem = (
                    f"{name}: Spark shuffles dataset {dataset}, which the plan proved to be"
                    f" co-partitioned ({', '.join(of_dataset)})."
                )
                step = (
                    "Compare the types of the join's keys and the number of partitions on both"
                    " sides."
                )
                self._differences.append(
                    PlanningError(problem, step, operator=name, dataset=dataset)
                )
            listed = sum(exchange.reason in _IN_FRAMES for exchange in self.exchanges.get(name, ()))
            self._note_unlisted(
                name, dataset, others[listed + self.app.operator(name).spec.moves :]
            )
        return spark_plan

    def _note_unlisted(self, operator: str, dataset: str | None, unlisted: Sequence[str]) -> None:
        """Note exchanges of records that the plan does not list."""
        if not unlisted:
            return
        times = "once" if len(unlisted) == 1 else f"{len(unlisted)} times"
        problem = (
            f"{operator}: Spark shuffles the records {times} more than the plan lists"
            f" ({', '.join(unlisted)})"
        )
        if dataset is None and not self.planned[operator].partitioned_by:
            self._notes.append(
                f"{problem}; the plan makes no claim about their partitioning after it."
            )
            return
        step = (
            "Shuffle them with partition_by, which the plan lists; a function must leave"
            " partitioned records in place."
        )
        self._differences.append(
            PlanningError(f"{problem}.", step, operator=operator, dataset=dataset)
        )

    def _inspect_written(self, operator: str, frame: DataFrame) -> None:
        """Inspect records that are written; without an exchange, check that they are in the
        output's partitions.
        """
        planned = self._inspect(operator, frame)
        if is_remote(frame):
            return
        (source,) = self.app.operator(operator).inputs
        if operator not in self.exchanges and self.planned[source].partitioned_by:
            note = _check_write_placement(operator, self.planned[source], planned)
            if note is not None:
                self._notes.append(note)

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        try:
            return super().call(operator, function, frame)
        except OperatorFailedError as error:
            raise error.reworded(
                f"{error.problem} It was called with no records, in the dry run before the batch.",
                "Return the same columns for no records, too: a batch may have none for it, as when"
                " another stream is replayed.",
            ) from error.__cause__

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        declared = self.app.dataset(dataset)
        if isinstance(declared.input, OwnedBy):
            return self._no_entries(declared, declared.input.schema), declared.input.schema
        return super().entries(dataset)

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        if dataset.partitions is None or not set(dataset.partition_by) <= set(schema.names):
            return super()._no_entries(dataset, schema)
        layout = BucketLayout(schema, dataset.partition_by, dataset.partitions, dataset.key)
        return bucketed_frame(self.spark, self.context.lake.store, dataset.name, layout, []).drop(
            GENERATION_COLUMN
        )

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        self._datasets[operator] = dataset
        return frame

    def first(self, frame: DataFrame) -> None:
        return None

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        self.check_looked_up(operator, lookup)
        return add_unknown_answers(self.materialize(operator, frame), lookup)

    def check_looked_up(self, operator: str, lookup: TableLookup) -> None:
        """Compare the columns that are looked up with those in the table's store; no record is
        read.
        """
        table = self.app.tables[lookup.table]
        check_stored_columns(
            operator, table, lookup, self._read_stored(lookup.table, table.read_function)
        )

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateTable:
        self._states.append(declare_state_dataset(self.context.writer, name, spec))
        validate_state(self.context.lake, self._states[-1])
        return super().state(name, spec, of=of)

    def check_zone_rules(self, state: StateTable, zone: str, outdated: Column) -> None:
        """Raise ZoneRulesError for stored rows, not expired, to which the present rules of a zone
        give other times.

        A Spark job looks for them if the rules are not those that the rows were stored under.
        """
        manifest = DatasetLog(self.context.lake, state.writes.name).read()[1]
        if (
            manifest is None
            or manifest.version is None
            or manifest.declaration.zone_rules == state.spec.zone_rules
        ):
            return
        written = as_unbounded(manifest).written
        rows = VersionReader(self.context.lake.store, manifest.name, manifest.version).frame(
            self.context.spark
        )
        if written is not None and written.watermark is not None:
            rows = rows.filter(named_column(state.spec.expires) > F.lit(written.watermark))
        first = rows.filter(outdated).limit(1).collect()
        if not first:
            return
        was, now = manifest.declaration.zone_rules.split()[0], state.spec.zone_rules.split()[0]
        raise ZoneRulesError(
            f"state {manifest.name!r} has open windows that were computed by the rules {was} of the"
            f" zone {zone!r}, and by the present ones ({now}) they start or end at other times.",
            f"Run with the rules {was} until these windows have closed, then change to others. Or"
            " start the state over, without the records in open windows: adjunct dataset delete"
            f" {manifest.name} --reason ….",
            dataset=manifest.name,
            zone=zone,
            stored_rules=was,
            python_rules=now,
        )

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        system, name = require_writer(self.system_of(stream)), split_stream_name(stream)[1]
        sent = self.output_schema(frame)
        system.check_create(name, schema=sent, key=key, partitions=partitions)
        if system.evolves and any(dataset.stream == stream for dataset in self.app.datasets):
            stored = system.info(name).schema
            if stored is not None:
                check_fed_datasets(self.app, operator, stream, stored, sent)
        if key:
            self._inspect_written(operator, frame)
        else:
            self._inspect(operator, frame)
        return None

    def send_dead_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        name = split_stream_name(stream)[1]
        require_writer(self.system_of(stream)).check_create(
            name, schema=self.output_schema(frame), key=key, partitions=partitions
        )

    def write_local(
        self,
        operator: str,
        frame: DataFrame,
        table: str,
        *,
        deleted: str | None,
        on_null_key: OnNullKey,
    ) -> None:
        self._inspect_written(operator, frame)
        prepare_table_rows(frame, self.app.dataset(table).key, deleted, on_null_key)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Compare the columns and types of the records with those in the table's store; no
        record is written.
        """
        table = self.app.tables[send.table]
        names = self.names(frame)
        check_record_columns(
            names, table.name, table.key, updates=send.contract is not None, what=operator
        )
        sink = TableSink(table, send)
        stored = sink.columns or self._read_stored(sink.table.name, sink.function)
        check_sink_columns(operator, sink, self.column_types(frame), stored)
        self._inspect_written(operator, frame)

    def column_types(self, frame: DataFrame) -> dict[str, str | None]:
        """Return the types of the records' columns, and of the columns in UPDATE and DEFAULT by
        "struct.column".
        """
        return _column_types(frame)

    def _read_stored(self, table: str, function: TableFunction | None) -> dict[str, str] | None:
        if function is None or not hasattr(function, "stored_types"):
            return None
        if table not in self._stored_types:
            try:
                self._stored_types[table] = run_blocking(_read_stored_types(function))
            except PermanentError:
                raise
            except Exception as error:  # noqa: BLE001 - the batch retries, and reports what is wrong
                _log.info("Can't read the columns of table %s now: %s", table, error)
                self._stored_types[table] = None
        return self._stored_types[table]

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        self._sink_call(operator, function, None)  # which pickles it
        self._inspect(operator, frame)

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        self._inspect(operator, frame)
        made = plan_results(frame, self._sink_call(operator, function, returns))
        by = self.required_partitioning(operator)
        if by:
            made = made.repartition(self.partitions_at(operator), *map(named_column, by))
        return super().materialize(operator, made)


async def _read_stored_types(function: TableFunction) -> dict[str, str] | None:
    try:
        return await function.stored_types()
    finally:
        await function.close()


def _column_types(frame: DataFrame) -> dict[str, str | None]:
    from pyspark.sql.types import StructType

    types: dict[str, str | None] = {}
    for field in frame.schema.fields:
        if field.name.startswith("__"):
            continue
        types[field.name] = field.dataType.simpleString()
        if field.name in (UPDATE, DEFAULT) and isinstance(inside := field.dataType, StructType):
            for part in inside.fields:  # of a partial update: set, added and appended columns
                columns = part.dataType.fields if isinstance(part.dataType, StructType) else [part]
                types |= {
                    f"{field.name}.{one.name}": one.dataType.simpleString() for one in columns
                }
    return types


def verify_plan(runtime: Runtime, app: Application, plan: ExecutionPlan) -> PhysicalProof:
    """Return what Spark would do with a batch of this application over the served dataset versions.

    A dataset without a version is treated as an empty one with its declared buckets. Raises the
    errors that a run raises before its first batch for mistakes in expressions and functions.
    """
    views: dict[str, VersionReader | None] = dict.fromkeys(dataset.name for dataset in app.datasets)
    for dataset in app.datasets if runtime.lake.exists() else ():
        if dataset.following.persistent and not isinstance(dataset.input, OwnedBy):
            views[dataset.name] = StoredVersions(runtime.lake, dataset).current()
    _analyze_projections(runtime, app)
    return analyze_batch(StepContext(runtime, app, plan, FanOut()), views)


def _analyze_projections(runtime: Runtime, app: Application) -> None:
    """Let Spark analyze the projections of datasets, over no records; raises PlanningError for what
    it rejects.

    A projection of hidden columns that not all stream systems have is left to the run that advances
    the dataset.
    """
    for dataset in app.datasets:
        if not isinstance(dataset.extractor, Projection) or not isinstance(dataset.input, str):
            continue
        system, stream = split_stream_name(dataset.input)
        records = runtime.systems[system].info(stream).schema
        parsed = [
            parse_expression(text)
            for _, text, is_select in iterate_dataset_sql(dataset)
            if not is_select
        ]
        hidden = {
            name.name for read in parsed for name in read.columns if name.name.startswith("__")
        }
        if records is not None and hidden.issubset(RECORD_META):
            rows = derive_row_schema(dataset, records) if dataset.follows_changes else records
            frame = runtime.spark().createDataFrame([], f"{rows.ddl()}, {RECORD_META_DDL}")
            entries_from_frame(dataset, frame, derive_stored_schema(dataset, records))

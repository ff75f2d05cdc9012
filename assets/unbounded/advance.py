"""Advances an unbounded dataset: creates its table, or applies the changes since its last commit.

    inspect_table   -> TableSnapshot    recovery.py: the table and its stream as they are now
    plan_recovery   -> RecoveryPlan     recovery.py: what to do with the table
    execute_plan    -> AdvanceReport    create the table or evolve it, apply the changes, compact

A new table begins with a commit of its start and target offsets, before any change is read. With a
bulk snapshot, that commit also has the base that was loaded from it, and the start is the
snapshot's position. A bootstrap then applies the changes up to the target in chunks; a table that
is created without a bootstrap is empty and served at once. A rebuilt table is built next to the one
that is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from uuid import uuid4

from dagster_adjunct.assets.declaration.change_formats import ORDER, PROBLEM
from dagster_adjunct.assets.declaration.change_values import LOWEST, Samples
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.snapshots import Snapshot, offset_error, resolve_position
from dagster_adjunct.assets.generation import (
    SPARK,
    Runtime,
    RuntimeOptions,
    open_runtime,
    write_generation,
)
from dagster_adjunct.assets.reading.superseded import is_mask_due, try_to_write_mask
from dagster_adjunct.assets.sources.changes import add_order, add_read_paths, list_read_paths
from dagster_adjunct.assets.sources.entries import (
    Offsets,
    OpenedChanges,
    look_for_files,
    offsets_by_partition,
    offsets_to_json,
    require_changes,
    with_read_paths,
)
from dagster_adjunct.assets.sources.order_samples import (
    needs_samples,
    samples_in_frame,
    unorderable_error,
)
from dagster_adjunct.assets.unbounded import commit
from dagster_adjunct.assets.unbounded.changes import apply_changes, check_spark_needs
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.compaction import compact_due
from dagster_adjunct.assets.unbounded.progress import build_report
from dagster_adjunct.assets.unbounded.recovery import (
    RecoveryPlan,
    inspect_table,
    plan_recovery,
    rebuilt_names,
)
from dagster_adjunct.assets.unbounded.row_rules import Findings, check_snapshot_rows, list_row_rules
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import delete_attempt, record_build, renew_attempt
from dagster_adjunct.assets.versions.manifest import Bootstrap, WatermarkState
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.versions.switches import require_audit_fields
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.resources.bucketing.files import (
    SET_AT,
    VALID_FROM,
    Generation,
    TimelineOptions,
)
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.errors import AdjunctError, DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.lazy_modules import F, pa, pq
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import staged_file_errors
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    StoredNames,
    named_column,
    repeated_names,
    value_column,
)
from dagster_adjunct.resources.schemas.types import types_from_spark
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    TOMBSTONE,
    SystemStreamPartition,
)
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_STAGED_BYTES = 128 * 1024 * 1024
_SNAPSHOT = "a bulk snapshot"


@dataclass(frozen=True, slots=True)
class _LoadedSnapshot:
    """The rows of a bulk snapshot as a generation, and the snapshot's position: the next offset to
    read, by partition.

    `samples` are the first values of the ordering columns, `findings` those of the validators.
    """

    generation: Generation
    position: dict[SystemStreamPartition, str]
    samples: Samples | None
    findings: Findings


def load_snapshot(
    context: Runtime, source: OpenedChanges, attempt: Attempt, number: int, names: StoredNames
) -> _LoadedSnapshot:
    """Write the rows of the bulk snapshot as the base of a new table: the generation with the
    number `number`, in the folder of `attempt`. `names` are the stored names of its columns.

    Raises DatasetError for columns that do not fit the dataset and for duplicate keys,
    BadChangeError for rows that do not meet a validator, and what `validate_snapshot_position`
    raises.
    """
    spec = source.spec
    spark = context.spark()
    initial = spec.following.initial
    assert initial is not None
    what = f"dataset {spec.name!r}: {initial.describe()}"
    over_time = None
    if spec.over_time:
        over_time = TimelineOptions(fills_ends=True)
    with closing(initial.load(spec, source.schema, source.ssps, spark)) as snapshot:
        start = validate_snapshot_position(snapshot, source, what)
        with (
            snapshot_frame(
                snapshot, source.schema, what, context.log(spec.name), spark, context.by
            ) as rows,
            renew_attempt(context.lake, spec.name, attempt.id, context.by),
        ):
            positioned = _with_positions(source, rows)
            rows_to_store = positioned.rows.withColumn(TOMBSTONE, F.lit(False))
            if source.stores_partitions:  # a change of any partition is newer than the snapshot
                rows_to_store = rows_to_store.withColumn(PARTITION, F.lit(None).cast("int"))
            if source.merges_columns:  # each row was written whole
                rows_to_store = rows_to_store.withColumn(SET_AT, F.lit(None).cast("string"))
            layout = commit.table_layout(source, names)
            rules = list_row_rules(spec, source.schema)
            checked = check_snapshot_rows(rows_to_store, spec, rules)
            rows_to_store = checked.rows
            if spec.over_time:
                rows_to_store = rows_to_store.withColumn(
                    VALID_FROM, _snapshot_valid_from(source, start, spark)
                )
            generation, counters = write_generation(
                context.lake.store,
                attempt.generation(number),
                layout,
                rows_to_store,
                SPARK,
                WriteOptions(
                    f"dataset {spec.name!r}, bulk snapshot",
                    drop_tombstones=True,
                    over_time=over_time,
                ),
                order_by=(POSITION,),
                partitioned=False,
            )
    if counters["superseded"]:
        raise DatasetError(
            f"dataset {spec.name!r}: the key ({', '.join(spec.key)}) is not unique in the bulk"
            f" snapshot: {counters['superseded']:,} rows repeat a key. Nothing was published.",
            "Remove the duplicates from the snapshot, or declare a key that is unique.",
            dataset=spec.name,
        )
    return _LoadedSnapshot(generation, start, positioned.samples, checked.read_findings())


class _PositionedRows(NamedTuple):
    """Rows with `__position`, and the first values of the ordering columns, None without any."""

    rows: DataFrame
    samples: Samples | None


def _with_positions(source: OpenedChanges, rows: DataFrame) -> _PositionedRows:
    """Return the snapshot's rows with `__position`.

    A row's position is made from its ordering columns, as that of a change. If the rows don't have
    all of them, their position is below those of all changes, and there are no first values.
    """
    order = source.spec.following.order_by or ()
    schema = with_read_paths(source.spec, source.schema)
    lowest = F.lit(LOWEST).cast("bigint") if source.position_type == "bigint" else F.lit("")
    if not order or not set(order) <= set(schema.names):
        return _PositionedRows(rows.withColumn(POSITION, lowest), None)
    paths = list_read_paths(schema, source.schema)
    rows = add_read_paths(rows, paths)
    rows = rows.withColumns(  # what changes have, for the functions that order them
        {
            PROBLEM: F.lit(None).cast("string"),
            TIMESTAMP: F.lit(None).cast("timestamp"),
            OFFSET: F.lit(0),
            PARTITION: F.lit(0),
        }
    )
    samples: Samples | None = None
    if needs_samples(order, schema):
        found = samples_in_frame(source.spec, rows, schema)
        if found.lacking is not None:
            raise unorderable_error(source.spec, *found.lacking)
        samples = found.values
    ordered = add_order(source.spec, rows, schema, samples)
    ordered = ordered.drop(TIMESTAMP, OFFSET, PARTITION, *paths)
    position = F.coalesce(F.col(ORDER), lowest)  # a row that can't be ordered is the oldest
    positioned = ordered.withColumn(POSITION, position).drop(ORDER, PROBLEM)
    return _PositionedRows(positioned, samples)


def _snapshot_valid_from(
    source: OpenedChanges, start: Mapping[SystemStreamPartition, str], spark: SparkSession
) -> Column:
    """Return since when each row of the snapshot is valid: its value of the declared `valid_from`,
    or where none is declared, one time for all rows.

    That time is the timestamp of the oldest record after the snapshot's position `start`, so that
    no change precedes the row it changes; the current time where there is no such record. Raises
    DatasetError if the snapshot does not have `valid_from`.
    """
    history = source.spec.following.history
    assert history is not None, "without a history, rows have no times"
    name = history.valid_from
    if name is not None and name in with_read_paths(source.spec, source.schema):
        return value_column(source.schema.names, name).cast("timestamp")
    if name is not None:
        raise DatasetError(
            f"dataset {source.spec.name!r}: valid_from is column {name!r}, which is not stored, so"
            " rows of the bulk snapshot have no start of validity.",
            "Store that column too, or leave valid_from out.",
            dataset=source.spec.name,
        )
    ends = source.system.upcoming(source.ssps)
    ranges = {}
    for ssp, offset in start.items():
        if source.system.compare(offset, ends[ssp]) < 0:
            ranges[ssp] = (offset, ends[ssp])
    if ranges:
        oldest = source.read(spark, ranges).agg(F.min(TIMESTAMP)).first()
        if oldest is not None and oldest[0] is not None:
            return F.lit(oldest[0])
    return F.current_timestamp()


def validate_snapshot_position(
    snapshot: Snapshot, source: OpenedChanges, what: str
) -> dict[SystemStreamPartition, str]:
    """Return the snapshot's position: the next offset to read, by partition.

    Raises DatasetError where it does not name each partition of the stream, and
    OffsetOutOfRangeError for an offset that the stream no longer holds or has not reached.
    """
    position = resolve_position(
        source.spec,
        what,
        {str(ssp): offset for ssp, offset in snapshot.position.items()},
        source.ssps,
    )
    oldest = source.system.oldest(source.ssps)
    upcoming = source.system.upcoming(source.ssps)
    for ssp, offset in position.items():
        try:
            source.system.compare(offset, offset)  # only whether it is an offset at all
        except OffsetOutOfRangeError as error:
            raise offset_error(OffsetOutOfRangeError, what, ssp, offset) from error
        if source.system.compare(offset, oldest[ssp]) < 0:
            problem = f"and the stream begins at {oldest[ssp]}: the changes in between are lost."
            step = "Take a new snapshot. Longer retention of the stream prevents this."
        elif source.system.compare(offset, upcoming[ssp]) > 0:
            problem = f"beyond the end of the stream at {upcoming[ssp]}."
            step = "Give the offset of the first change that the snapshot may lack."
        else:
            continue
        raise OffsetOutOfRangeError(
            f"{what} was taken at offset {offset} of {ssp}, {problem}",
            step,
            offset=offset,
            stream=ssp.qualified_stream,
            partition=ssp.partition,
            oldest=oldest[ssp],
            upcoming=upcoming[ssp],
        )
    return position


def cast_to_schema(rows: DataFrame, schema: Schema, what: str) -> DataFrame:
    """Return the rows with just the columns of the schema, cast to its types.

    Raises DatasetError for columns that are missing, repeated, or of a type that can't be widened
    to the schema's.
    """
    types = types_from_spark(rows.schema)
    wrong = {}
    for field in schema.fields:
        found = types.get(field.name)
        if found is None:
            wrong[field.name] = "is missing"
        elif not is_widening(found, field.type):
            wrong[field.name] = f"is {found}, expected {field.type}"
        elif field.name in repeated_names(rows.columns):
            wrong[field.name] = "is duplicated"
    if wrong:
        raise DatasetError(
            f"{what} has different columns than the dataset:"
            f" {'; '.join(f'{name} {problem}' for name, problem in wrong.items())}.",
            "Select, rename and cast the columns of the snapshot to match the dataset.",
            column=next(iter(wrong)),
        )
    return rows.select(
        *[named_column(field.name).cast(field.type).alias(field.name) for field in schema.fields]
    )


@contextmanager
def snapshot_frame(
    snapshot: Snapshot, schema: Schema, what: str, log: DatasetLog, spark: SparkSession, by: str
) -> Iterator[DataFrame]:
    """Provide, while the context lasts, the rows of a snapshot as a frame with the columns of
    `schema`.

    Arrow tables are staged in the lake, where all of Spark's executors can read them. Raises
    DatasetError for columns that do not fit.
    """
    from pyspark.sql import DataFrame

    if isinstance(snapshot.rows, DataFrame):
        yield cast_to_schema(snapshot.rows, schema, what)
        return
    attempt = log.attempt()
    folder = attempt.folder
    with record_build(log.lake, log.name, attempt.id, by):
        try:
            rows = _stage_tables(log.lake, folder, snapshot.rows, spark)
            if rows is None:
                rows = spark.createDataFrame([], schema.ddl())
            yield cast_to_schema(rows, schema, what)
        finally:
            with suppress(AdjunctError):  # a later discard deletes what is left
                log.lake.store.delete_many([item.key for item in log.lake.store.list(f"{folder}/")])


def _stage_tables(
    lake: Lake, folder: str, tables: Iterable[pa.Table], spark: SparkSession
) -> DataFrame | None:
    """Write tables to a folder of the lake and return them as a frame; None if there are none."""
    path = lake.store.staging_dir() / f"{uuid4().hex}.parquet"
    number = 0
    writer = None
    try:
        for table in tables:
            with staged_file_errors(lake.store, path, _SNAPSHOT):
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
                size = path.stat().st_size
            if size >= _STAGED_BYTES:
                number = _upload_part(lake, folder, path, number, writer)
                writer = None
        if writer is not None:
            number = _upload_part(lake, folder, path, number, writer)
            writer = None
    finally:
        with suppress(OSError):  # a full disk, say, which was reported already
            if writer is not None:
                writer.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if not number:
        return None
    return spark.read.parquet(lake.store.spark_uri(folder))


def _upload_part(lake: Lake, folder: str, path: Any, number: int, writer: Any) -> int:
    """Close the staged file and upload it as the part `number` of a folder; return the number of
    the next part.
    """
    with staged_file_errors(lake.store, path, _SNAPSHOT):
        writer.close()
    lake.store.upload(path, f"{folder}/rows-{number:05d}.parquet")
    path.unlink(missing_ok=True)
    return number + 1


def begin_table(advance: Advance, applied: Mapping[str, str]) -> Advance:
    """Commit the first manifest of a new table.

    With a bootstrap, the table is built next to the one that is served, if any; it begins with the
    bulk snapshot's rows if one is declared. Without, it is empty and served at once, and continues
    at the previous table's offsets. The startpoints in `applied` (ids by partition) are recorded as
    applied. Raises CommitConflictError where another writer committed first, and what
    `load_snapshot` raises.
    """
    advance = _commit_repartitioned(advance)
    snapshot = advance.snapshot
    source = advance.source
    decision = advance.decision
    before = advance.manifest
    attempt = advance.log.attempt()
    number = before.next_generation
    bootstraps = decision.action == "bootstrap"
    used_numbers = 0  # how many generations this commit makes
    building = tuple[Generation, ...]()
    samples = None
    names = rebuilt_names(snapshot.spec, before.version, source.schema)
    oldest = source.system.oldest(source.ssps)
    start: Offsets
    if not bootstraps:
        known = {}
        if snapshot.manifest is not None:
            known = offsets_by_partition(snapshot.manifest.offsets)
        start = source.start_offsets(known, oldest, snapshot.ends)
        used_numbers = 1  # the empty one that is served
    elif snapshot.spec.following.initial is not None:
        with advance.stages("load"):
            loaded = load_snapshot(advance.context, source, attempt, number, names)
            start = loaded.position
            samples = loaded.samples
            if loaded.generation.files:
                building = (loaded.generation,)
            used_numbers = 1
        # The bootstrap's target is the end of the stream after the snapshot was loaded.
        advance = replace(
            advance,
            ends=source.system.upcoming(source.ssps),
            counters={"loaded": loaded.generation.rows},
            findings=loaded.findings,
        )
    else:
        start = oldest
    bootstrap = Bootstrap(
        state="done",
        start=offsets_to_json(start),
        target=offsets_to_json(start),
        started_at=snapshot.at,
        finished_at=snapshot.at,
        building=building,
        columns=source.schema,
        names=names,
        loaded=bool(building),
        why=decision.reason,
    )
    if bootstraps:
        target = offsets_to_json(advance.ends)
        bootstrap = bootstrap.model_copy(
            update={"state": "running", "target": target, "finished_at": None}
        )
    after = before.after(
        declaration=source.declaration,
        offsets=bootstrap.start,
        bootstrap=bootstrap,
        stream=source.info.identity,
        next_generation=number + used_numbers,
        first_ordered=samples,
        quarantining=None,
        applied=before.with_applied(applied),
        watermark=WatermarkState(),
        decision=decision,
        change=commit.change_from_decision(decision),
    )
    serves_before = bootstraps and before.version is not None
    if not serves_before:  # else these are facts about the version that is still served
        after = after.after(confirmed_at=None, horizon=None)
    if not bootstraps:
        after = commit.manifest_with_version(
            advance, after, attempt, (attempt.generation(number),), {}, names
        )
    advance = commit.commit_manifest(advance, after, attempt.id)
    delete_attempt(advance.context.lake, snapshot.spec.name, attempt.id)
    return advance


_NONE: Mapping[str, str] = MappingProxyType({})


def advance_unbounded(
    context: Runtime,
    spec: UnboundedDataset,
    *,
    rebuild: str | None = None,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Bootstrap the dataset, or apply the changes since its last commit.

    Without changes it makes no version, unless the columns or the length of history have changed.
    `rebuild` is the reason to rebuild it from the stream's oldest offset (or its bulk snapshot),
    next to the table that is served; None does not rebuild it on purpose. Raises BadChangeError and
    NullKeyError for changes that can't be applied, OffsetOutOfRangeError and DatasetError where the
    table can't be continued, and CommitConflictError when another writer committed first.
    """
    if not spec.following.persistent:
        raise DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: each run builds its own table and"
            " none is stored.",
            "Run the application (adjunct run MODULE:APP), or declare persistent=True to store the"
            " table.",
            dataset=spec.name,
        )
    stages = Stages(spec.name, on_stage)
    with stages("collect"):
        look_for_files(context.systems, spec)
        snapshot = inspect_table(context, spec)
        plan = plan_recovery(snapshot, rebuild=rebuild)
    return execute_plan(Advance.of(context, snapshot, plan.decision, stages), plan)


def execute_plan(
    advance: Advance, plan: RecoveryPlan, *, applied: Mapping[str, str] = _NONE
) -> AdvanceReport:
    """Execute the plan, then apply the changes since the last commit, unless the plan leaves the
    table as it is. Compact the table if it has changed and that is due.

    A new table records the startpoints in `applied` (ids by partition) as applied.
    """
    if advance.context.spark is IN_PROCESS:
        check_spark_needs(advance.source)
    if plan.first == "begin":
        advance = begin_table(advance, applied)
    else:
        advance = resume_table(advance, plan)
    if plan.first == "leave":
        return build_report(commit.commit_decision(advance), "stale")
    advance, action = apply_changes(advance)
    if action == "up-to-date":
        advance = commit.confirm_caught_up(advance)
    elif action != "waiting":
        advance = compact_if_due(advance)
        mask_version(advance)
    return build_report(advance, action)


def resume_table(advance: Advance, plan: RecoveryPlan) -> Advance:
    """Return the advance of the existing table. Commit its position in a repartitioned stream, and
    a version with the declared columns and history if the plan says so.
    """
    assert advance.snapshot.manifest is not None, "the plan begins a table that does not exist"
    advance = _commit_repartitioned(advance)
    if plan.first == "evolve":
        return commit.evolve_table(advance)
    return advance


def compact_if_due(advance: Advance) -> Advance:
    """Compact the table where that is due and the policy declares it as part of the advance."""
    policy = advance.spec.following.compaction
    if not policy.inside_commit:
        return advance
    with advance.stages("compact"):
        compacted = compact_due(advance.context, advance.manifest, policy)
    if compacted is None:
        return advance
    return advance.after(*compacted)


def mask_version(advance: Advance) -> None:
    """Store the mask of the committed version: a cache for readers, which says which stored rows
    are no entries.

    Does nothing if this advance has made no version, or if no mask is due by the time that the
    advance took. If it can't be made, the stage's detail says why; readers then merge the version
    without it.
    """
    version = advance.manifest.version
    if version is None or not advance.sealed:
        return
    took = sum(advance.stages.seconds.values())
    if is_mask_due(version, took):
        with advance.stages("mask") as stage:
            store = advance.context.lake.store
            stage.detail = try_to_write_mask(store, advance.spec.name, version)


def _commit_repartitioned(advance: Advance) -> Advance:
    """Commit that the table continues in its repartitioned stream; does nothing if the stream was
    not repartitioned, or if that is committed already.
    """
    if not advance.snapshot.carried:
        return advance
    return replace(
        advance, commit=advance.log.commit(advance.commit, advance.manifest, by=advance.context.by)
    )


@validated
@translate_spark_errors()
def rebuild_dataset(
    spec: AdjunctDataset,
    *,
    reason: str,
    by: str,
    on_stage: OnStage = ignore_stage,
    **where: Unpack[RuntimeOptions],
) -> AdvanceReport:
    """Rebuild an unbounded dataset from its stream's oldest offset, or from its bulk snapshot.

    The new table, which may have different columns, is built next to the one that is served and
    replaces it once it has reached its target. The next advance resumes an interrupted rebuild.
    Raises DatasetError for a bounded dataset and for a stream that no longer holds every key, and
    ConfigurationError without a reason.
    """
    if isinstance(spec, BoundedDataset):
        raise DatasetError(
            f"dataset {spec.name!r} is bounded: only unbounded datasets are rebuilt from a stream.",
            "Deliver a new version, or serve an earlier one: adjunct dataset rollback"
            f" {spec.name} --reason ….",
            dataset=spec.name,
        )
    require_audit_fields("rebuild", spec.name, reason, by)
    spec = require_changes(spec)
    with open_runtime([spec], by=by, **where) as runtime:
        return advance_unbounded(runtime, spec, rebuild=reason, on_stage=on_stage)

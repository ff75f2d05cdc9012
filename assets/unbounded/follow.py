"""Unbounded datasets: a change stream kept as a consistent snapshot.

    first    target recorded -> base built from the oldest offset to the target -> data and offsets in one commit
    then     changes [offset, upcoming) -> one delta of the changes alone -> data and offsets in one commit

A commit costs what its changes cost, however large the dataset is; readers merge base and deltas. The bootstrap
target is each partition's upcoming offset when the bootstrap began, so records arriving later do not extend
the wait (SAMZA-1278, "Bootstrap"; design, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from assets.log import DatasetLog
from assets.manifest import POSITION, Bootstrap, DatasetManifest, SealedVersion, layout_of
from assets.publishing.build import add, check_declaration, write_generation
from assets.report import Action, AdvanceReport, OnStage, Stages, ignore
from assets.sources.opening import Ranges, Source, as_stored, by_partition
from resources.errors import CommitConflict, DatasetError, OffsetOutOfRangeError
from resources.streams.system import OFFSET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from assets.dataset import AdjunctDataset
    from assets.log import Attempt
    from resources.bucketing.files import Generation
    from resources.objects.commit import Commit
    from resources.objects.lake import Lake
    from resources.streams.ssp import SystemStreamPartition
    from resources.streams.system import StreamSystem


def advance_unbounded(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: Callable[[], SparkSession],
    *,
    by: str,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Bootstrap the dataset, or apply the changes since its last commit; nothing new makes no commit.

    `systems` are the stream systems by name; `by` says in the commits who did it. `spark` is called only if
    there are records to read. Raises NullKeyError, DatasetError (a changed declaration, a stream whose keys
    spread over partitions), and CommitConflict when another writer was first.
    """
    stages = Stages(spec.name, on_stage)
    with stages("collect"):
        source = Source.of(systems, spec)
        _check_order(source)
        log = DatasetLog(lake, spec.name)
        commit, manifest = log.read()
        if manifest is not None:
            check_declaration(spec.name, manifest.declaration, source.declaration)
            _check_columns(manifest, source)
        if commit is None or manifest is None:
            manifest = _begin(source)
            commit = log.commit(None, manifest, by=by)
        bootstrap = manifest.bootstrap
        assert bootstrap is not None
        starts = by_partition(manifest.offsets)
        running = bootstrap.state == "running"
        ends = by_partition(bootstrap.target) if running else source.system.upcoming(source.ssps)
        ranges = _ranges(source, starts, ends)
    if not ranges and not running:
        return _report(source, manifest, "up-to-date", {}, stages)
    attempt = log.attempt()
    with stages("build"):
        records = source.count(ranges) if ranges else 0
        generation, counters = attempt.generation(manifest.next_generation), {"read": records}
        if records:
            generation, counted = _build(log, source, generation, attempt, ranges, spark(), base=running)
            counted.pop("conflicting", None)  # of a change stream nothing else is expected
            counters |= counted if running else {"changes": generation.rows, **counted}
    offsets = as_stored({**starts, **{ssp: end for ssp, (_, end) in ranges.items()}})
    with stages("commit"):
        after = _after(source, manifest, commit, attempt, generation, offsets, counters, running)
        try:
            log.commit(commit, after, by=by, commit_id=attempt.id)
        except CommitConflict:
            log.drop(generation)
            raise
    action: Action = "bootstrapped" if running else "applied"
    made = after.version is not None and after.version is not manifest.version
    return _report(source, after, action, counters, stages, made=made)


def _begin(source: Source) -> DatasetManifest:
    """Return the first manifest: the bootstrap's target, recorded before anything is read."""
    start, target = source.system.oldest(source.ssps), source.system.upcoming(source.ssps)
    return DatasetManifest(
        name=source.spec.name,
        declaration=source.declaration,
        offsets=as_stored(start),
        bootstrap=Bootstrap(
            state="running", start=as_stored(start), target=as_stored(target), started_at=datetime.now(UTC)
        ),
    )


def _ranges(
    source: Source,
    starts: Mapping[SystemStreamPartition, str],
    ends: Mapping[SystemStreamPartition, str],
) -> Ranges:
    """Return the ranges with something in them; a stream that ends before our offset was made anew."""
    ranges: dict[SystemStreamPartition, tuple[str, str]] = {}
    for ssp, start in starts.items():
        order = source.system.compare(start, ends[ssp])
        if order > 0:
            raise OffsetOutOfRangeError(
                f"dataset {source.spec.name!r} has read {ssp} up to offset {start}, and the stream ends at "
                f"{ends[ssp]}.",
                "The stream was deleted and made anew: declare the dataset under a new name to build it afresh.",
            )
        if order < 0:
            ranges[ssp] = (start, ends[ssp])
    return ranges


def _build(
    log: DatasetLog,
    source: Source,
    empty: Generation,
    attempt: Attempt,
    ranges: Ranges,
    spark: SparkSession,
    *,
    base: bool,
) -> tuple[Generation, dict[str, int]]:
    """Write the last change of each key; a base leaves deleted keys out, a delta keeps them as tombstones."""
    from pyspark.sql import functions as F

    spec = source.spec
    rows = source.read(spark, ranges)
    return write_generation(
        log.lake,
        attempt,
        empty.id,
        layout_of(source.schema, spec.key, spec.partition_by, spec.partitions, positioned=True),
        rows.withColumn(POSITION, F.col(OFFSET)),
        what=f"dataset {log.name!r}",
        order_by=(*spec.key, POSITION),
        keep_tombstones=not base,
        partitioned=source.copartitioned,
    )


def _after(
    source: Source,
    manifest: DatasetManifest,
    commit: Commit,
    attempt: Attempt,
    generation: Generation,
    offsets: dict[str, str],
    counters: dict[str, int],
    running: bool,
) -> DatasetManifest:
    """Return the manifest with these changes in it; changes that hold no record leave the version as it is."""
    assert manifest.bootstrap is not None
    now = datetime.now(UTC)
    before = manifest.version
    bootstrap = manifest.bootstrap
    if running:
        bootstrap = bootstrap.model_copy(update={"state": "done", "finished_at": now})
    totals = add(manifest.counters, counters)
    if before is not None and not generation.files:
        return manifest.after(offsets=offsets, counters=totals)
    number = commit.number + 1
    version = SealedVersion(
        id=f"v{number:06d}-{attempt.id}",
        number=number,
        name=None,
        sealed_at=now,
        columns=source.schema,
        key=source.spec.key,
        partition_by=source.spec.partition_by,
        partitions=source.spec.partitions,
        positioned=True,
        generations=(generation,) if before is None else (*before.generations, generation),
        rows=generation.rows if before is None else None,
        offsets={ssp: (bootstrap.start[ssp], end) for ssp, end in offsets.items()},
        counters=counters,
    )
    return manifest.after(
        version=version,
        offsets=offsets,
        bootstrap=bootstrap,
        next_generation=manifest.next_generation + 1,
        counters=totals,
    )


def _check_order(source: Source) -> None:
    """Refuse an input where two changes of one key may lie in two partitions: nothing orders them there."""
    if source.one_partition_a_key:
        return
    spec, info = source.spec, source.info
    keyed = f"keyed by ({', '.join(info.key)})" if info.key else "not keyed"
    raise DatasetError(
        f"dataset {spec.name!r} has the key ({', '.join(spec.key)}), and its input {spec.input} is {keyed} over "
        f"{info.partitions} partitions ({info.partitioner}): changes of one key could lie in several partitions, "
        "where nothing says which is newer.",
        f"Key the stream by columns of ({', '.join(spec.key)}), or give it one partition.",
    )


def _check_columns(manifest: DatasetManifest, source: Source) -> None:
    if manifest.version is not None and manifest.version.columns != source.schema:
        raise DatasetError(
            f"dataset {source.spec.name!r} holds other columns than are declared now: "
            f"{manifest.version.columns.difference(source.schema)}. That needs a rebuild.",
            "Declare it under a new name, which builds it afresh beside the old one, or restore the old columns.",
        )


def _report(
    source: Source,
    manifest: DatasetManifest,
    action: Action,
    counters: Mapping[str, int],
    stages: Stages,
    *,
    made: bool = False,
) -> AdvanceReport:
    version = manifest.version
    return AdvanceReport(
        dataset=manifest.name,
        kind="unbounded",
        action=action,
        version=None if version is None else version.id,
        sealed=(version.id,) if made and version is not None else (),
        rows=None if version is None else version.rows,
        counters=counters,
        offsets=manifest.offsets,
        seconds=stages.seconds,
        schema=source.schema if version is None else version.columns,
        note="no changes since the last commit" if action == "up-to-date" else "",
    )

"""Bounded datasets: versions that arrive on a stream, sealed when every partition has delivered its marker.

    deliver -> (every partition marked?) -> build -> check -> unchanged? -> seal and switch, in one commit

Whatever fails before the commit leaves the current version and the offsets where they were; the next advance
takes up from there. Behaviour: SAMZA-1278, "Bounded dataset"; rules 6 and 10 of the design.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from assets.build import DatasetLog, add, check_declaration, write_generation
from assets.delivery import Complete, MarkerSaid, Settled, Waiting, check_counts, next_delivery
from assets.manifest import (
    LISTED,
    Abandoned,
    DatasetManifest,
    Delivered,
    MarkerFacts,
    SealedVersion,
    VersionRef,
    layout_of,
)
from assets.report import Action, AdvanceReport, Stages
from assets.source import Source, as_stored, by_partition
from resources.errors import DatasetError
from resources.streams.ssp import SystemStreamPartition
from resources.streams.system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from assets.build import Attempt
    from assets.dataset import AdjunctDataset
    from resources.bucketing.files import Generation
    from resources.objects.commit import Commit
    from resources.objects.lake import Lake
    from resources.streams.system import StreamSystem

    State = tuple[Commit | None, DatasetManifest]


def advance_bounded(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: Callable[[], SparkSession],
    *,
    by: str,
) -> AdvanceReport:
    """Seal every version that is complete, in order, and say what the next one waits for.

    `systems` are the stream systems by name; `by` says in the commits who did it. `spark` is called only if
    there are records to build from. Raises MarkerConflictError, NullKeyError, DatasetError (a changed
    declaration), and CommitConflict when another writer was first; what is current stays current.
    """
    stages = Stages()
    with stages("collect"):
        source = Source.of(systems, spec)
        log = DatasetLog(lake, spec.name)
        commit, manifest = log.read()
        if manifest is None:
            manifest = _first_manifest(source)
        check_declaration(spec.name, manifest.declaration, source.declaration)
        markers = source.markers(by_partition(manifest.offsets))
    state: State = (commit, manifest)
    sealed: list[str] = []
    unchanged: list[str] = []
    counters: dict[str, int] = {}
    while True:
        found = next_delivery(spec.name, _numbers(state[1]), markers, _settled(state[1]))
        dropped = sum(source.count({cut.ssp: (str(cut.start), str(cut.end))}) for cut in found.dropped)
        counters = add(counters, {"redelivered": dropped} if dropped else {})
        if isinstance(found, Waiting):
            break
        state, made = _seal(log, source, state, found, spark, stages, by)
        version = state[1].version
        assert version is not None
        (sealed if made else unchanged).append(version.id)
        counters = add(counters, version.counters if made else {})
    state = _leave(log, state, found, by)
    return _report(source, state[1], found, sealed, unchanged, counters, stages)


def abandon_version(lake: Lake, dataset: str, version: str, *, reason: str, by: str) -> None:
    """End a version that can't be completed: its markers close nothing from now on, and the next one can seal.

    Records that end with one of its markers are dropped. A version that is sealed stays as it is, and what is
    delivered under its name again is dropped unread, whatever its markers say. Safe to repeat.
    """
    log = DatasetLog(lake, dataset)
    commit, manifest = log.read()
    if manifest is None:
        raise DatasetError(f"dataset {dataset!r} has no commit yet, so there is nothing to abandon.", "Advance it.")
    if any(ended.name == version for ended in manifest.abandoned):
        return
    ended = Abandoned(name=version, reason=reason, by=by, at=datetime.now(UTC))
    log.commit(commit, manifest.after(abandoned=(*manifest.abandoned, ended)), log.attempt(), by=by)


def waiting_for(systems: Mapping[str, StreamSystem], spec: AdjunctDataset, manifest: DatasetManifest | None) -> Waiting:
    """Return what the next version waits for, without building anything (nothing, if one is complete)."""
    source = Source.of(systems, spec)
    manifest = manifest or _first_manifest(source)
    markers = source.markers(by_partition(manifest.offsets))
    found = next_delivery(spec.name, _numbers(manifest), markers, _settled(manifest))
    return found if isinstance(found, Waiting) else Waiting(found.version, (), found.dropped, found.offsets)


def _first_manifest(source: Source) -> DatasetManifest:
    offsets = as_stored(source.system.oldest(source.ssps))
    return DatasetManifest(name=source.spec.name, declaration=source.declaration, offsets=offsets)


def _numbers(manifest: DatasetManifest) -> dict[SystemStreamPartition, int]:
    return {ssp: int(offset) for ssp, offset in by_partition(manifest.offsets).items()}


def _settled(manifest: DatasetManifest) -> Settled:
    """Return what the markers of delivered versions said; nothing contradicts an abandoned one."""
    settled: dict[str, Mapping[SystemStreamPartition, MarkerSaid]] = {
        done.name: {
            SystemStreamPartition.parse(ssp): MarkerSaid(said.rows, said.checksum) for ssp, said in done.markers.items()
        }
        for done in manifest.delivered
    }
    return settled | {ended.name: {} for ended in manifest.abandoned}


def _seal(
    log: DatasetLog,
    source: Source,
    state: State,
    complete: Complete,
    spark: Callable[[], SparkSession],
    stages: Stages,
    by: str,
) -> tuple[State, bool]:
    """Build and commit one complete version; (state, False) if it equals the current one (rule 6)."""
    commit, manifest = state
    attempt = log.attempt()
    ranges = {cut.ssp: (str(cut.start), str(cut.end)) for cut in complete.segments}
    with stages("validate"):
        records = source.counts(ranges)
        check_counts(log.name, complete, records)
    with stages("build"):
        read = sum(records.values())
        generation, counters = attempt.generation(manifest.next_generation), {"read": read}
        if read:
            what = f"dataset {log.name!r}, version {complete.version!r}"
            generation, counted = _build(log, source, generation, attempt, source.read(spark(), ranges), what)
            counters |= counted
            _check_all_read(what, generation, counters)
    number = manifest.versions[-1].number + 1 if manifest.versions else 1
    version = SealedVersion(
        id=f"v{number:06d}-{attempt.id}",
        number=number,
        name=complete.version,
        sealed_at=datetime.now(UTC),
        columns=source.schema,
        key=source.spec.key,
        partition_by=source.spec.partition_by,
        partitions=source.spec.partitions,
        positioned=False,
        generations=(generation,),
        rows=generation.rows,
        digest=sum(file.digest or 0 for file in generation.files) % 2**64,
        offsets={str(ssp): span for ssp, span in ranges.items()},
        counters=counters,
    )
    same = manifest.version is not None and _same_content(manifest.version, version)
    with stages("commit"):
        if same:
            after = _delivered(manifest, complete, manifest.version)
        else:
            commit_number = 1 if commit is None else commit.number + 1
            shared = {name: getattr(version, name) for name in ("id", "number", "name", "rows", "sealed_at")}
            ref = VersionRef(**shared, commit_number=commit_number, commit=attempt.id)
            after = _delivered(manifest, complete, version).after(
                version=version,
                versions=(*manifest.versions, ref)[-LISTED:],
                next_generation=manifest.next_generation + 1,
                counters=add(manifest.counters, version.counters),
            )
        commit = log.commit(commit, after, attempt, by=by, written=generation)
    if same:
        log.drop(generation)
    return (commit, after), not same


def _build(
    log: DatasetLog, source: Source, empty: Generation, attempt: Attempt, rows: DataFrame, what: str
) -> tuple[Generation, dict[str, int]]:
    """Write the last record of each key, by its place in the stream, without those that are deleted."""
    spec = source.spec
    layout = layout_of(source.schema, spec.key, spec.partition_by, spec.partitions, positioned=False)
    return write_generation(
        log.lake,
        attempt,
        empty.id,
        layout,
        rows,
        what=what,
        order_by=(*spec.key, OFFSET, PARTITION),
        keep_tombstones=False,
        partitioned=source.copartitioned,
    )


def _check_all_read(what: str, generation: Generation, counters: dict[str, int]) -> None:
    got = generation.rows + counters["superseded"] + counters["deleted"]
    if got != counters["read"]:
        raise DatasetError(
            f"{what}: the stream gave {got} records where its index counts {counters['read']}.",
            "Nothing was published. Compare the stream's files with its manifest: adjunct stream describe.",
        )


def _same_content(current: SealedVersion, new: SealedVersion) -> bool:
    """Whether both hold the same rows in the same layout: equal counts and digests, bucket by bucket."""

    def facts(version: SealedVersion) -> list[tuple[int, int, int | None]]:
        return [(file.bucket, file.rows, file.digest) for file in version.generations[0].files]

    return current.layout == new.layout and facts(current) == facts(new)


def _delivered(manifest: DatasetManifest, complete: Complete, held_by: SealedVersion | None) -> DatasetManifest:
    """Return the manifest with this delivery done: its markers remembered, the offsets behind them."""
    assert held_by is not None
    markers = {
        str(cut.ssp): MarkerFacts(offset=cut.end, rows=cut.marker.rows, checksum=cut.marker.checksum)
        for cut in complete.segments
    }
    done = Delivered(name=complete.version, version=held_by.id, markers=markers)
    offsets = as_stored({ssp: str(offset) for ssp, offset in complete.offsets.items()})
    return manifest.after(delivered=(*manifest.delivered, done)[-LISTED:], offsets=offsets)


def _leave(log: DatasetLog, state: State, found: Waiting, by: str) -> State:
    """Commit the offsets behind dropped re-deliveries; and, the first time, where this dataset begins to read."""
    commit, manifest = state
    offsets = as_stored({ssp: str(offset) for ssp, offset in found.offsets.items()})
    if commit is not None and offsets == manifest.offsets:
        return state
    manifest = manifest.after(offsets=offsets)
    return log.commit(commit, manifest, log.attempt(), by=by), manifest


def _report(
    source: Source,
    manifest: DatasetManifest,
    found: Waiting,
    sealed: list[str],
    unchanged: list[str],
    counters: dict[str, int],
    stages: Stages,
) -> AdvanceReport:
    upcoming = source.system.upcoming(source.ssps)
    idle = all(int(upcoming[ssp]) <= offset for ssp, offset in found.offsets.items())
    version = manifest.version
    action: Action = "waiting"
    note = ""
    if sealed:
        action = "sealed"
    elif unchanged:
        action, note = "unchanged", "the version delivered equals the current one"
    elif idle and version is not None:
        action, note = "up-to-date", "nothing new was delivered"
    waiting = () if idle and version is not None else tuple(map(str, found.missing))
    if waiting:
        wanted = "the first version" if found.version is None else f"version {found.version!r}"
        wanted = "the next version" if found.version is None and version is not None else wanted
        note = "; ".join(filter(None, [note, f"{wanted} waits for the markers of {', '.join(waiting)}"]))
    return AdvanceReport(
        dataset=manifest.name,
        kind="bounded",
        action=action,
        version=None if version is None else version.id,
        sealed=tuple(sealed),
        rows=None if version is None else version.rows,
        counters=counters,
        offsets=manifest.offsets,
        waiting=waiting,
        seconds=stages.seconds,
        schema=source.schema if version is None else version.columns,
        note=note,
    )

"""Local tables, which the batches of one application write, and the state tables of its operators.

What one operator of a batch sends to a table (a *send*) becomes a generation, and one commit
publishes all generations of the batch. It names the application and the batch, so a retried batch
finds its commit and adds nothing. Joins of a batch read the version that its intent pinned, plus
what the batch has sent so far. Later generations win: those of a later batch, and within a batch
those of a later operator.

A state table is a local table that an operator writes and nobody declares; each row has a time at
which it expires. The commit whose watermark has passed the last row of a generation drops that
generation whole. Small generations are merged between batches, without the expired rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dagster_adjunct.assets.declaration.dataset import LocalTable, OwnedBy, local_table
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.generation import (
    SPARK,
    GenerationWriter,
    Runtime,
    count_deletions,
    write_generation,
)
from dagster_adjunct.assets.reading.stored_versions import list_datasets, read_committed_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.commit import (
    count_entries,
    next_version,
    strip_large_footers,
    switch_version,
)
from dagster_adjunct.assets.unbounded.compaction import compact_due
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import record_build
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    Change,
    DatasetManifest,
    SentToTable,
    UnboundedManifest,
    Written,
    as_unbounded,
)
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.versions.version import (
    POSITION,
    SealedVersion,
    StoredPositions,
    build_layout,
    build_version,
    check_declaration,
    declaration_from_spec,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.objects.commit_log import Commit, commit_with_rebase, retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.column_changes import FixedColumns, evolve
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, StoredNames
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def has_expired(generation: Generation, watermark: datetime | None) -> bool:
    """Return whether all rows of a generation have expired at this watermark.

    False where a file's stats do not have the range of its rows' expiry times.
    """
    if watermark is None or not generation.files:
        return False
    reached = to_microseconds(watermark)
    for file in generation.files:
        if "range" not in file.stats:
            return False
        _, last_expiry = file.stats["range"]
        if last_expiry > reached:
            return False
    return True


def new_manifest(spec: LocalTable, now: datetime) -> UnboundedManifest:
    """Return the first manifest of a table, which serves no version yet."""
    return UnboundedManifest(
        name=spec.name,
        declaration=declaration_from_spec(spec, spec.stored),
        offsets={},
        bootstrap=Bootstrap(state="done", start={}, target={}, started_at=now, finished_at=now),
    )


def empty_manifest(spec: LocalTable, attempt: Attempt, made: dict[str, Any]) -> UnboundedManifest:
    """Return the first manifest of a table, which serves an empty version; `made` is what
    `next_version` returns for its commit.
    """
    manifest = new_manifest(spec, made["sealed_at"])
    rows = [attempt.generation(manifest.next_generation)]
    version = version_from_generations(spec, rows, AS_NAMED, **made)
    return manifest.after(next_generation=manifest.next_generation + 1, version=version)


def version_from_generations(
    spec: LocalTable, generations: Sequence[Generation], names: StoredNames, **facts: Any
) -> SealedVersion:
    """Return a version of these generations, oldest first, with the declared columns, which have
    these stored names; `facts` are its other fields.
    """
    rows = count_entries(generations, over_time=False)
    return build_version(
        spec, spec.stored, generations, names=names, rows=rows, offsets={}, **facts
    )


def require_local_manifest(stored: DatasetManifest, spec: LocalTable) -> UnboundedManifest:
    """Return the stored manifest if it fits the declared local table.

    Raises DatasetError for incompatible columns, listing the differences, and where the dataset of
    this name belongs to another application or to none.
    """
    columns = spec.stored
    declared = declaration_from_spec(spec, columns)
    if stored.declaration.owner != declared.owner:
        raise errors.DatasetError(
            f"application {declared.owner} can't have a local table {spec.name!r}: the lake has a"
            f" dataset of that name, made from {stored.declaration.input}.",
            "Give this local table another name.",
            dataset=spec.name,
        )
    check_declaration(spec, stored.declaration, declared)
    _evolve_names(spec, stored.version)  # only for its errors
    return as_unbounded(stored)


def _evolve_names(spec: LocalTable, stored: SealedVersion | None) -> StoredNames:
    """Return the stored names of the declared columns; without a `stored` version their own names.
    Raises DatasetError for columns that can't follow the stored ones.
    """
    if stored is None:
        return AS_NAMED
    fixed = FixedColumns(spec.key)
    declared = spec.stored
    after = evolve(stored.columns, stored.names, declared, spec.evolution, fixed, ordered=True)
    if after.problems and spec.input.expires is not None:
        raise errors.DatasetError(
            f"state {spec.name!r} was kept with other columns than its operator has now:"
            f" {stored.columns.difference(declared)}.",
            f"{_earlier_names_step()}, {_afresh_step(spec.name)}",
            dataset=spec.name,
        )
    if after.problems:
        raise errors.DatasetError(
            f"local table {spec.name!r} has other columns than declared:"
            f" {'; '.join(after.problems)}.",
            "Restore the columns, or give the table another name; to start this one over: adjunct"
            f" dataset delete {spec.name} --reason ….",
            dataset=spec.name,
        )
    return after.names


def advance_local(
    context: Runtime, spec: LocalTable, *, on_stage: OnStage = ignore_stage
) -> AdvanceReport:
    """Compact a local table where that is due; only its application's batches change its contents.

    Raises DatasetError for a declaration that does not fit the stored table.
    """
    stages = Stages(spec.name, on_stage)
    report = AdvanceReport(
        dataset=spec.name,
        kind="unbounded",
        action="up-to-date",
        version=None,
        seconds=stages.seconds,
        schema=spec.stored,
        note="no batch has written it yet",
    )
    _, stored = context.log(spec.name).read()
    if stored is None:
        return report
    manifest = require_local_manifest(stored, spec)
    compacted = None
    if spec.compaction.inside_commit:
        with stages("compact"):
            compacted = compact_due(context, manifest, spec.compaction)
    if compacted is not None:
        manifest = compacted.manifest
    note = ""
    if manifest.written is not None:
        note = f"batch {manifest.written.batch} was the last to write it"
    report = replace(report, seconds=stages.seconds, note=note)
    version = manifest.version
    if version is None:
        return report
    sealed = () if compacted is None else (version.id,)
    return replace(report, version=version.id, rows=version.rows, sealed=sealed)


def undo_batch(
    context: Runtime, name: str, application: str, batch: int, *, declared: LocalTable | None = None
) -> str | None:
    """Undo what an abandoned batch wrote to its application's table; return the id of the version
    served afterwards, None without one.

    Later commits of the batch are rejected, also where it has written nothing yet: a `declared`
    table that does not exist is created for that. A dataset that the application does not own is
    left alone (None). Nothing is changed if a later batch has written the table. Safe to repeat.
    Raises VersionDiscardedError where the version before the batch is gone, and DatasetError where
    the table was repartitioned since.
    """
    log = context.log(name)

    def undo() -> str | None:
        commit, stored = log.read()
        attempt = log.attempt()
        made = next_version(commit, attempt, context.now())
        if stored is None and declared is not None:
            manifest = empty_manifest(declared, attempt, made)
        elif stored is not None and stored.declaration.owner == application:
            manifest = as_unbounded(stored)
        else:
            return None
        last = manifest.written
        if last is not None and _is_past(last, batch):
            return manifest.served_id
        # Without a version of the batch, it is only recorded that the batch was abandoned.
        has_made_version = last is not None and last.before != manifest.served_id
        if last is not None and last.batch == batch and has_made_version:
            before = _find_version_before(log, manifest, last, declared, attempt)
            manifest = _serve_again(manifest, before.after(**made, counters={}))
        reason = f"batch {batch} of application {application} was abandoned"
        undone = manifest.after(
            written=Written(application=application, batch=batch, undone=True),
            change=Change(action="undo", reason=reason),
        )
        log.commit(commit, undone, by=context.by, commit_id=attempt.id)
        return undone.served_id

    return retry_conflicts(lambda: undo)


def _is_past(last: Written, batch: int) -> bool:
    """Return whether a later batch was the last to write the table, or this one was undone."""
    return last.batch > batch or (last.batch == batch and last.undone)


def change_owner(
    lake: Lake, name: str, application: str, *, owner: str, reason: str, by: str
) -> bool:
    """Transfer the local table `name` from the application `owner` to `application`.

    Returns whether that was done: not for a dataset that `owner` does not own, nor for a state
    table, whose name has that of its owner.
    """
    log = DatasetLog(lake, name)

    def change() -> bool:
        commit, stored = log.read()
        if stored is None or not _goes_with(stored, owner):
            return False
        update = {"owner": application, "input": f"application {application}"}
        declaration = stored.declaration.model_copy(update=update)
        after = as_unbounded(stored).after(
            declaration=declaration, change=Change(action="rename", reason=reason)
        )
        log.commit(commit, after, by=by, commit_id=log.attempt().id)
        return True

    return retry_conflicts(lambda: change)


def list_transferable(lake: Lake, owner: str) -> list[str]:
    """Return the local tables that `change_owner` would transfer from this application."""
    found = []
    for name in list_datasets(lake):
        _, manifest = DatasetLog(lake, name).read()
        if manifest is not None and _goes_with(manifest, owner):
            found.append(name)
    return found


def _goes_with(manifest: DatasetManifest, owner: str) -> bool:
    """Return whether a dataset is a local table of this application, but no state table."""
    return manifest.declaration.owner == owner and manifest.declaration.expires is None


def _serve_again(manifest: UnboundedManifest, version: SealedVersion) -> UnboundedManifest:
    """Return the manifest that serves a version of earlier generations, which are no longer
    retired.
    """
    folders = version.folders
    after = manifest.after(
        retired=tuple(old for old in manifest.retired if old.folder not in folders),
        next_generation=max(manifest.next_generation, version.generations[-1].id + 1),
    )
    return switch_version(after, version, version.sealed_at)


def _find_version_before(
    log: DatasetLog,
    manifest: UnboundedManifest,
    written: Written,
    declared: LocalTable | None,
    attempt: Attempt,
) -> SealedVersion:
    """Return the version that was served before the batch in `written`; an empty one if there
    was none, with the columns that are `declared` (None: as served).

    Raises VersionDiscardedError if it is gone, and DatasetError if it has another number of
    partitions.
    """
    served = manifest.version
    assert served is not None, "a written table serves a version"
    if written.before is None:
        if declared is None:
            columns = served.columns
            names = served.names
        else:
            columns = declared.stored
            names = AS_NAMED
        return served.after(
            columns=columns,
            names=names,
            generations=(attempt.generation(manifest.next_generation),),
            rows=0,
        )
    by = f"batch {written.batch} of application {written.application}"
    if not manifest.retains(written.before):
        raise errors.VersionDiscardedError(
            f"local table {manifest.name!r}: {by} was abandoned and can't be undone: version"
            f" {written.before}, the one before the batch, is gone, as after an erasure.",
            f"Delete the table (adjunct dataset delete {manifest.name} --reason …), then refill it"
            " from what the inputs still have: adjunct startpoint set MODULE:APP STREAM --oldest"
            " --reason ….",
            dataset=manifest.name,
            version=written.before,
        )
    before = read_committed_version(log, manifest, written.before)
    if before.partitions != served.partitions:
        raise errors.DatasetError(
            f"local table {manifest.name!r} can't be set back to the version before {by}, which was"
            f" abandoned: that version has {before.partitions} partitions, and the table was"
            f" repartitioned to {served.partitions} since.",
            f"Repartition it to {before.partitions}: adjunct dataset repartition"
            f" {manifest.name} --partitions {before.partitions} --reason …; run the application"
            f" once, with the table declared with partitions={before.partitions}; then repartition"
            f" it to {served.partitions} again, and declare that.",
            dataset=manifest.name,
        )
    return before


@dataclass(frozen=True, slots=True)
class WritingBatch:
    """A batch of an application, and who runs it (`by`).

    With `cut` the batch was shortened since it began. If it is committed already, the rows
    committed then stay, also where they differ from those sent now.
    """

    application: str
    number: int
    by: str
    cut: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of application {self.application}"


@dataclass(frozen=True, slots=True)
class _StoredTable:
    """The current commit of a table and its manifest: both None before the first one. After a
    deletion only the manifest is None.
    """

    commit: Commit | None
    manifest: UnboundedManifest | None

    @property
    def next_generation(self) -> int:
        """The number of its next generation."""
        if self.manifest is None:
            return 1
        return self.manifest.next_generation


class CommittedBatch(NamedTuple):
    """The id of the version that a table serves with a batch, and whether an earlier run of the
    batch had committed it before.
    """

    version: str | None
    is_repeated: bool


class _PreparedCommit(NamedTuple):
    """A manifest with a batch, to commit after `parent`; if `is_repeated`, an earlier run has
    committed it.
    """

    parent: Commit | None
    manifest: UnboundedManifest
    is_repeated: bool


class LocalTableWriter:
    """Writes the sends of one batch to one local table, and commits them all at once.

    A context manager that drops the files if they were not committed. `pinned` is the version that
    the batch began with, None if the table had none.
    """

    def __init__(
        self,
        lake: Lake,
        spec: LocalTable,
        pinned: SealedVersion | None,
        batch: WritingBatch,
        writer: GenerationWriter = SPARK,
    ) -> None:
        self._lake = lake
        self._spec = spec
        self._pinned = pinned
        self._batch = batch
        self._writer = writer
        self._log = DatasetLog(lake, spec.name)
        self._schema = spec.stored
        self._names = _evolve_names(spec, pinned)
        layout = build_layout(
            self._schema, spec.key, spec.partition_by, spec.partitions, StoredPositions()
        )
        self._layout: BucketLayout = replace(layout, names=self._names)
        self._start: _StoredTable | None = None
        self._generations: list[Generation] = []
        self._sends: list[SentToTable] = []
        self._stack = ExitStack()
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop the files that were written, unless they were committed."""
        self._stack.close()
        if not self._committed:
            for generation in self._generations:
                self._log.drop(generation)

    # -- sends

    def send(
        self, rows: DataFrame | pa.Table, *, order_by: Sequence[str], partitioned: bool
    ) -> dict[str, int]:
        """Write the last record of each key as a generation; return the counters.

        `rows` have the table's columns, `__tombstone`, and those of `order_by`, which decide the
        last record of a key. `partitioned` says that partition i already holds bucket i. Raises
        NullKeyError.
        """
        if self._start is None:  # at the first send; a batch without any reads it in `commit`
            self._start = self._read()
        number = self._start.next_generation + len(self._sends)
        attempt = self._log.attempt()
        self._stack.enter_context(
            record_build(self._lake, self._spec.name, attempt.id, self._batch.by)
        )
        generation, counters = write_generation(
            self._lake.store,
            attempt.generation(number),
            self._layout,
            _with_position(rows, number),
            self._writer,
            WriteOptions(
                f"local table {self._spec.name!r}",
                drop_tombstones=not self._stacked_generations(),
                range_of=self._spec.input.expires,
            ),
            order_by=order_by,
            partitioned=partitioned,
        )
        tombstones = count_deletions(generation)
        counters["deleted"] += tombstones
        digest = generation.digest
        assert digest is not None, "retries compare digests"
        sent = SentToTable(
            rows=generation.rows - tombstones, deleted=counters["deleted"], digest=digest
        )
        self._sends.append(sent)
        self._generations.append(strip_large_footers(generation))
        return {"rows": sent.rows, **counters}

    def reader(self, *, sends: bool = True) -> VersionReader:
        """Return a reader of the pinned version plus what the batch has sent so far; both may be
        empty.

        Without `sends` it reads the version alone. The columns are the declared ones.
        """
        generations = self._stacked_generations(sends=sends)
        if not generations:  # a version has at least one, which may be empty
            generations = [self._log.attempt().generation(1)]
        made: dict[str, Any]
        if self._pinned is None:
            made = {"id": "v000000-begun", "number": 1}  # is never committed
        else:
            made = {"id": self._pinned.id, "number": self._pinned.number}
        version = version_from_generations(
            self._spec, generations, self._names, **made, sealed_at=self._lake.now()
        )
        return VersionReader(self._lake.store, self._spec.name, version)

    def _stacked_generations(self, *, sends: bool = True) -> list[Generation]:
        """Return the non-empty generations of the pinned version and, with `sends`, of the batch,
        oldest first.
        """
        stacked: list[Generation] = []
        if self._pinned is not None:
            stacked += self._pinned.nonempty
        if sends:
            stacked += self._sent_generations()
        return stacked

    def _sent_generations(self) -> list[Generation]:
        """Return the non-empty generations that the batch has written so far."""
        return [generation for generation in self._generations if generation.files]

    @property
    def name(self) -> str:
        """The table's name."""
        return self._spec.name

    @property
    def sent(self) -> tuple[int, ...]:
        """The numbers of the non-empty generations that the batch has written so far."""
        return tuple(generation.id for generation in self._sent_generations())

    # -- the commit

    def commit(self, watermark: datetime | None = None) -> CommittedBatch:
        """Commit the sends of the batch, once.

        Generations of a state table whose rows have all expired at `watermark` are dropped. Raises
        ProducerConflictError where the batch has committed different rows, CommitConflictError
        where it was abandoned, where a later batch has committed, or something other than a
        compaction has changed the table, and DatasetError for entries in a table that did not exist
        when the batch began.
        """
        if self._start is None:
            self._start = self._read()
        start = self._start
        attempt = self._log.attempt()

        def prepare(current: _StoredTable) -> _PreparedCommit:
            # Apart from the commit, so that an error raised here is not taken for a lost race.
            stored = current.manifest
            if stored is not None and self._is_committed(stored):
                return _PreparedCommit(current.commit, stored, is_repeated=True)
            after = self._manifest_with_batch(start, current, attempt, watermark)
            return _PreparedCommit(current.commit, after, is_repeated=False)

        def commit(prepared: _PreparedCommit) -> CommittedBatch:
            parent, after, is_repeated = prepared
            if not is_repeated:
                self._committed = True  # also if its outcome is unknown: the files may be in use
                try:
                    self._log.commit(parent, after, by=self._batch.by, commit_id=attempt.id)
                except errors.CommitConflictError:
                    self._committed = False
                    raise
            return CommittedBatch(after.served_id, is_repeated)

        return commit_with_rebase(prepare(start), commit, lambda _: prepare(self._read()))

    def _read(self) -> _StoredTable:
        """Return the table as it is now. Raises DatasetError if it does not fit the declaration."""
        commit, stored = self._log.read()
        manifest = None
        if stored is not None:
            manifest = require_local_manifest(stored, self._spec)
        return _StoredTable(commit, manifest)

    def _is_committed(self, manifest: UnboundedManifest) -> bool:
        """Whether this batch is committed. Raises CommitConflictError if it was abandoned or a
        later batch is committed, and ProducerConflictError if it is committed with different rows.
        """
        written = manifest.written
        if written is None or written.batch < self._batch.number:
            return False
        name = self._spec.name
        mine = str(self._batch)
        if written.batch > self._batch.number or written.undone:
            if written.batch > self._batch.number:
                what = f"batch {written.batch} is committed"
            else:
                what = "it was abandoned"
            raise errors.CommitConflictError(
                f"local table {name!r} rejects {mine}: {what}.",
                "Let the newer run of the application continue. If its batch log was started over,"
                f" start the table over too: adjunct dataset delete {name} --reason ….",
                dataset=name,
                application=self._batch.application,
            )
        if written.sends != tuple(self._sends) and not self._batch.cut:
            raise errors.ProducerConflictError(
                f"local table {name!r} has {mine} already, with different rows:"
                f" {_describe_sends(written.sends)} then, {_describe_sends(self._sends)} now.",
                "Expressions and functions must be deterministic. Undo what changed in the"
                " application, or abandon the batch: adjunct checkpoint abandon"
                f" {self._batch.application} --reason ….",
                producer=self._batch.application,
                sequence=self._batch.number,
            )
        return True

    def _require_unchanged(self, start: _StoredTable, current: _StoredTable) -> None:
        """Raise CommitConflictError where another writer has written the table since the batch
        began, and DatasetError for entries in a table that did not exist then.
        """
        name = self._spec.name
        if current.next_generation != start.next_generation:
            raise errors.CommitConflictError(
                f"local table {name!r} was written by another writer during {self._batch}. The"
                " batch committed nothing.",
                "Run the application again.",
                dataset=name,
            )
        manifest = current.manifest
        began_with_table = self._pinned is not None
        if began_with_table or manifest is None:
            return
        if any(generation.files for generation in manifest.served_generations):
            raise errors.DatasetError(
                f"local table {name!r} has entries, and {self._batch} began before the table"
                " existed.",
                "Abandon the batch, so that the next one begins with the table: adjunct checkpoint"
                f" abandon {self._batch.application} --reason ….",
                dataset=name,
            )

    def _manifest_with_batch(
        self,
        start: _StoredTable,
        current: _StoredTable,
        attempt: Attempt,
        watermark: datetime | None,
    ) -> UnboundedManifest:
        """Return the manifest with this batch.

        The version stays if the batch has written no rows, none have expired and the columns are
        the same. If all rows have expired, an empty generation is served.
        """
        self._require_unchanged(start, current)
        spec = self._spec
        now = self._lake.now()
        manifest = current.manifest or new_manifest(spec, now)
        counters = {
            "changes": sum(sent.rows for sent in self._sends),
            "deleted": sum(sent.deleted for sent in self._sends),
        }
        after = manifest.after(
            declaration=declaration_from_spec(spec, self._schema),
            next_generation=start.next_generation + len(self._sends),
            counters=sum_counters(manifest.counters, counters),
            written=Written(
                application=self._batch.application,
                batch=self._batch.number,
                sends=tuple(self._sends),
                before=None if self._pinned is None else self._pinned.id,
                watermark=watermark,
            ),
            change=Change(action="batch", reason=str(self._batch)),
        )
        before = [old for old in manifest.served_generations if old.files]
        generations = [old for old in before if not has_expired(old, watermark)]
        generations += self._sent_generations()
        if generations == before and self._has_these_columns(manifest.version):
            return after
        if not generations:
            generations = [attempt.generation(after.next_generation)]
            after = after.after(next_generation=after.next_generation + 1)
        made = next_version(current.commit, attempt, now)
        version = version_from_generations(
            spec, generations, self._names, **made, counters=counters
        )
        return switch_version(after, version, now)

    def _has_these_columns(self, version: SealedVersion | None) -> bool:
        """Return whether a version has the declared columns under the same stored names."""
        if version is None:
            return False
        return version.columns == self._schema and version.names == self._names


def _with_position(rows: DataFrame | pa.Table, position: int) -> DataFrame | pa.Table:
    """Return the rows with the same `__position` for all; that of a later send is higher, so
    that its rows win.
    """
    if isinstance(rows, pa.Table):
        return rows.append_column(POSITION, pa.array([position] * rows.num_rows, pa.int64()))
    return rows.withColumn(POSITION, F.lit(position).cast("bigint"))


def _describe_sends(sends: Sequence[SentToTable]) -> str:
    """Return what was sent, in words."""
    if not sends:
        return "nothing"
    return "; ".join(
        f"{sent.rows} records, {sent.deleted} deleted ({sent.digest:016x})" for sent in sends
    )


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The columns and key of a state table.

    `expires` is a timestamp among the columns of `schema`: a row expires once the operator's
    watermark has reached it. When a key is written again or deleted, its time must not move back,
    or an older row would reappear after the newest one expired. `append_only` says that each key is
    written once, so that reads merge nothing. `kept_for` describes the operator's settings: an
    operator rejects state that was kept for other settings. `zone_rules` are the rules of the time
    zone by which the rows' times are computed, with their version; "" if they depend on no zone.
    """

    schema: Schema
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int
    expires: str
    append_only: bool = False
    kept_for: str = ""
    zone_rules: str = ""


# Only the batch that began with an earlier state reads it, and holds a lease on it.
_STATE_DISCARD = DiscardPolicy(keep=1, grace=timedelta(0))
_STATE_COMPACTION = DeltaCompaction()
_RETIRED_PER_DISCARD = 8
"""A discard of a state table is due once it has this many generations that were dropped or
merged.
"""


def state_dataset_name(application: str, name: str) -> str:
    """Return the name of the state table of an application's operator."""
    return f"{application}-{name}"


def declare_state_dataset(application: str, name: str, spec: StateSpec) -> LocalTable:
    """Return the declaration of the state table. Raises ConfigurationError for a key that can't
    be compared.
    """
    return local_table(
        state_dataset_name(application, name),
        OwnedBy(application, spec.schema, spec.expires, spec.kept_for, spec.zone_rules),
        key=spec.key,
        partitions=spec.partitions,
        partition_by=spec.partition_by,
        compaction=_STATE_COMPACTION,
        discard=_STATE_DISCARD,
        description=f"What an operator of application {application} keeps until its time.",
    )


def validate_state(lake: Lake, dataset: LocalTable) -> None:
    """Raise DatasetError, saying what differs, where the stored state does not fit the declared
    one.

    State that was kept for other settings does not fit: another bound or window would give its rows
    other expiry times.
    """
    _, stored = DatasetLog(lake, dataset.name).read()
    if stored is None:
        return
    was = stored.declaration.kept_for
    declared = dataset.input.kept_for
    if stored.declaration.expires is None or stored.declaration.owner != dataset.input.application:
        raise errors.DatasetError(
            f"the state of operator {declared} would be stored as {dataset.name!r}, and the lake"
            " has a dataset of that name, which is not state of application"
            f" {dataset.input.application!r}.",
            "Give the operator another name=, or rename the application or the dataset.",
            dataset=dataset.name,
        )
    if was != declared:
        raise errors.DatasetError(
            f"state {dataset.name!r} was kept for operator {was!r}, and the declared one is"
            f" {declared!r}.",
            f"Undo the change, {_afresh_step(dataset.name)} {_earlier_names_step()}.",
            dataset=dataset.name,
        )
    require_local_manifest(stored, dataset)


def _earlier_names_step() -> str:
    """Return how an operator keeps its state when columns of its input were renamed."""
    return (
        "If a column was renamed before the operator, give it its earlier name there, such as"
        ' .select("key", "time", "now as earlier")'
    )


def _afresh_step(name: str) -> str:
    """Return how an operator starts with empty state."""
    return (
        "or give the operator another name, under which it starts with empty state. To start over"
        f" under this one: adjunct dataset delete {name} --reason …."
    )


def create_state(context: Runtime, dataset: LocalTable) -> None:
    """Create an empty state table if there is none.

    `undo_batch` needs a table in which to record an abandoned batch, so that a late commit of a
    dead run is rejected.
    """
    log = context.log(dataset.name)

    def create() -> None:
        commit, stored = log.read()
        if stored is None:
            attempt = log.attempt()
            made = next_version(commit, attempt, context.now())
            change = Change(action="begin", reason="an operator keeps its state here")
            manifest = empty_manifest(dataset, attempt, made).after(change=change)
            log.commit(commit, manifest, by=context.by, commit_id=attempt.id)

    retry_conflicts(lambda: create)


def maintain_state(context: Runtime, name: str) -> bool:
    """Merge small generations of a state table where that is due; return whether a discard of it
    is due.
    """
    _, manifest = context.log(name).read()
    if manifest is None or manifest.declaration.expires is None:
        return False  # another dataset of this name is left alone
    compacted = compact_due(context, as_unbounded(manifest), _STATE_COMPACTION)
    if compacted is not None:
        manifest = compacted.manifest
    return len(manifest.retired) >= _RETIRED_PER_DISCARD

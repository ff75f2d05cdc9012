"""What one batch of its application writes to a local table: a generation for each send, then one commit of all.

The batch was begun with one version, pinned by its intent. Its commit names the application and the batch, so a batch
that is run again finds what it has committed, and adds nothing; joins of the batch read the pinned version with what it
has sent so far on top. A later generation wins: sends of one batch in the order of the application, batches in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.assets.declaration.dataset import local_table
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.declaration.sources import OwnedBy
from dagster_adjunct.assets.reading.stored_versions import read_committed_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.commit import strip_large_footers, switch_version
from dagster_adjunct.assets.unbounded.compaction import compact_due
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import record_build
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    Change,
    SentToTable,
    UnboundedManifest,
    Written,
    as_unbounded,
)
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.versions.version import (
    POSITION,
    SealedVersion,
    build_layout,
    build_table_version,
    check_declaration,
    declaration_from_spec,
    version_id,
)
from dagster_adjunct.assets.writing.generation import SPARK, GenerationWriter, sum_counters, write_generation
from dagster_adjunct.resources.common import to_microseconds
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    ProducerConflictError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.commit_log import commit_with_rebase, retry_conflicts
from dagster_adjunct.resources.schemas.schema import incompatible_changes

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.version import DatasetDeclaration
    from dagster_adjunct.assets.writing.generation import Runtime
    from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class CurrentTable:
    """What is current of a table: its commit, and its manifest; None before the first."""

    commit: Commit | None
    manifest: UnboundedManifest | None

    @property
    def number(self) -> int:
        """The number of the commit, 0 before the first."""
        return 0 if self.commit is None else self.commit.number

    @property
    def next_generation(self) -> int:
        """The number that the next generation has."""
        return 1 if self.manifest is None else self.manifest.next_generation


def columns_of_local_table(spec: AdjunctDataset) -> Schema:
    """Return the columns that a local table is declared with."""
    assert isinstance(spec.input, OwnedBy), "other datasets have the columns of their input"
    return spec.input.schema


def expiry_column(spec: AdjunctDataset) -> str | None:
    """Return the column that says when a row of a table of state is gone; None for other tables."""
    return spec.input.expires if isinstance(spec.input, OwnedBy) else None


def has_expired(generation: Generation, watermark: datetime | None) -> bool:
    """Whether all rows of a generation of state are gone at this watermark; not where a file does not tell."""
    if watermark is None or not generation.files:
        return False
    reached = to_microseconds(watermark)
    return all("range" in file.stats and file.stats["range"][1] <= reached for file in generation.files)


def new_manifest(spec: AdjunctDataset, now: datetime) -> UnboundedManifest:
    """Return the manifest of a table that has nothing yet, and serves nothing."""
    return UnboundedManifest(
        name=spec.name,
        declaration=declaration_from_spec(spec, columns_of_local_table(spec)),
        offsets={},
        bootstrap=Bootstrap(state="done", start={}, target={}, started_at=now, finished_at=now),
    )


def empty_manifest(spec: AdjunctDataset, attempt: Attempt, number: int, now: datetime) -> UnboundedManifest:
    """Return the manifest of a table that serves a version without rows, with the commit of this number."""
    manifest = new_manifest(spec, now)
    rows = [attempt.generation(manifest.next_generation)]
    version = version_from_generations(
        spec, rows, number=number, id=version_id(number, attempt.id), now=now, counters={}
    )
    return manifest.after(next_generation=manifest.next_generation + 1, version=version)


def version_from_generations(
    spec: AdjunctDataset,
    generations: Sequence[Generation],
    *,
    number: int,
    id: str,
    now: datetime,
    counters: Mapping[str, int],
) -> SealedVersion:
    """Return the version of these generations, oldest first, with the columns that are declared now."""
    exact = len(generations) == 1 and not count_deletions(generations[0])
    rows = generations[0].rows if exact else None
    return build_table_version(
        spec,
        columns_of_local_table(spec),
        generations,
        id=id,
        number=number,
        now=now,
        rows=rows,
        offsets={},
        counters=counters,
    )


def count_deletions(generation: Generation) -> int:
    """Return how many of a generation's rows are deletions, which are no entries."""
    return sum(int(file.stats.get("tombstones", 0)) for file in generation.files)


def counters_from_sends(sends: Sequence[SentToTable]) -> dict[str, int]:
    """Return what these sends add to a table's counters."""
    return {"changes": sum(sent.rows for sent in sends), "deleted": sum(sent.deleted for sent in sends)}


def require_local_manifest(stored: DatasetManifest, spec: AdjunctDataset) -> UnboundedManifest:
    """Return what is stored, as the manifest of the local table that is declared.

    Raises DatasetError for what can't be gone on with under this declaration, saying what differs: columns can only be
    added, or widened; and for a dataset of this name that another application, or none, has.
    """
    columns = columns_of_local_table(spec)
    declared = declaration_from_spec(spec, columns)
    if stored.declaration.owner != declared.owner:
        raise DatasetError(
            f"application {declared.owner} can't have a local table {spec.name!r}: the lake has a dataset of that "
            f"name, which is of {stored.declaration.input}.",
            "Give this local table another name.",
            dataset=spec.name,
        )
    check_declaration(spec.name, stored.declaration, declared)
    served = stored.version
    refused = [] if served is None else incompatible_changes(served.columns, columns, spec.key)
    if refused:
        raise DatasetError(
            f"local table {spec.name!r} has other columns than are declared: {'; '.join(refused)}. Columns can only be "
            "added, or widened.",
            "Declare them as they were, or declare a table of another name; to begin this one anew: adjunct dataset "
            f"delete {spec.name} --reason ….",
            dataset=spec.name,
        )
    return as_unbounded(stored)


_TRIES = 20


def advance_local(context: Runtime, spec: AdjunctDataset, *, on_stage: OnStage = ignore_stage) -> AdvanceReport:
    """Compact a local table where that is due: what is in it only its application's batches change.

    Raises DatasetError for a declaration that what is stored can't be read with.
    """
    stages, columns = Stages(spec.name, on_stage), columns_of_local_table(spec)
    stored = context.log(spec.name).read()[1]
    manifest = None if stored is None else require_local_manifest(stored, spec)
    policy, compacted = spec.following.compaction, None
    if manifest is not None and policy.inside_commit:
        with stages("compact"):
            compacted = compact_due(context, manifest, policy)
    if compacted is not None:
        manifest = compacted[1]
    version = None if manifest is None else manifest.version
    return AdvanceReport(
        dataset=spec.name,
        kind="unbounded",
        action="up-to-date",
        version=None if version is None else version.id,
        sealed=(version.id,) if compacted is not None and version is not None else (),
        rows=None if version is None else version.rows,
        counters={},
        offsets={},
        seconds=stages.seconds,
        schema=columns,
        note=_describe_last_batch(manifest),
    )


def _describe_last_batch(manifest: UnboundedManifest | None) -> str:
    if manifest is None:
        return "no batch has written it yet"
    return "" if manifest.written is None else f"batch {manifest.written.batch} was the last to write it"


def undo_batch(
    context: Runtime, name: str, application: str, batch: int, *, declared: AdjunctDataset | None = None
) -> str | None:
    """Take out of an application's table what a batch that was given up has written; return what is served then.

    Where it has written nothing, nothing of it is taken any more: where nothing is stored, a table that is `declared`
    is begun for that. What is stored under the name and is not the application's is left alone. Safe to repeat.
    Raises VersionDiscardedError where the version before the batch is gone.
    """
    log = context.log(name)

    def decided() -> Callable[[], str | None]:
        commit, stored = log.read()
        attempt, number, now = log.attempt(), 1 if commit is None else commit.number + 1, context.now()
        if stored is None and declared is not None:
            manifest = empty_manifest(declared, attempt, number, now)
        elif stored is not None and stored.declaration.owner == application:
            manifest = as_unbounded(stored)
        else:
            return lambda: None
        last = manifest.written
        if last is not None and (last.batch > batch or (last.batch == batch and last.undone)):
            return lambda: _served_id(manifest)
        if last is not None and last.batch == batch and last.before != _served_id(manifest):
            before = _find_version_before(log, manifest, last, declared, attempt)
            version = before.after(id=version_id(number, attempt.id), number=number, sealed_at=now, counters={})
            manifest = _reinstate_version(manifest, version, now)
        undone = manifest.after(
            written=Written(application=application, batch=batch, undone=True),
            change=Change(action="undo", reason=f"batch {batch} of application {application} was given up"),
        )

        def commit_undone() -> str | None:
            log.commit(commit, undone, by=context.by, commit_id=attempt.id)
            return _served_id(undone)

        return commit_undone

    return retry_conflicts(decided, attempts=_TRIES)


def change_owner(lake: Lake, name: str, application: str, *, owner: str, reason: str, by: str) -> bool:
    """Make a local table of the application `owner` that of another one; return whether it was one of its local tables.

    Tables of state keep their owner: it is in their names.
    """
    log = DatasetLog(lake, name)

    def decided() -> Callable[[], bool]:
        commit, stored = log.read()
        if stored is None or stored.declaration.owner != owner or stored.declaration.expires is not None:
            return lambda: False
        update = {"owner": application, "input": f"application {application}"}
        after = as_unbounded(stored).after(
            declaration=stored.declaration.model_copy(update=update), change=Change(action="rename", reason=reason)
        )

        def commit_given() -> bool:
            log.commit(commit, after, by=by, commit_id=log.attempt().id)
            return True

        return commit_given

    return retry_conflicts(decided, attempts=_TRIES)


def _served_id(manifest: UnboundedManifest) -> str | None:
    return None if manifest.version is None else manifest.version.id


def _find_version_before(
    log: DatasetLog, manifest: UnboundedManifest, written: Written, declared: AdjunctDataset | None, attempt: Attempt
) -> SealedVersion:
    """Return the version that a table had before a batch has `written` it; one without rows where it had none."""
    served = manifest.version
    assert served is not None, "a batch has written it"
    if written.before is None:
        columns = served.columns if declared is None else columns_of_local_table(declared)
        return served.after(columns=columns, generations=(attempt.generation(manifest.next_generation),), rows=0)
    by = f"batch {written.batch} of application {written.application}"
    if not manifest.retains(written.before):
        raise VersionDiscardedError(
            f"local table {manifest.name!r}: {by} was given up, and can't be taken out of it: version "
            f"{written.before}, from before the batch, is gone, as after an erasure.",
            f"Begin the table anew: adjunct dataset delete {manifest.name} --reason …; with a startpoint to the oldest "
            "record it has all that the inputs still hold.",
            dataset=manifest.name,
            version=written.before,
        )
    before = read_committed_version(log, manifest, written.before)
    if before.partitions != served.partitions:
        raise DatasetError(
            f"local table {manifest.name!r} was repartitioned, into {served.partitions} from {before.partitions}, "
            f"after {by} had written it. That was given up, and can't be taken out any more.",
            f"Repartition it back for one run: adjunct dataset repartition {manifest.name} --partitions "
            f"{before.partitions} --reason ….",
            dataset=manifest.name,
        )
    return before


def _reinstate_version(manifest: UnboundedManifest, version: SealedVersion, now: datetime) -> UnboundedManifest:
    """Return the manifest with a version whose generations may be retired: they are in use again."""
    used = {generation.folder for generation in version.generations}
    kept = tuple(retired for retired in manifest.retired if retired.folder not in used)
    newest = max(manifest.next_generation, version.generations[-1].id + 1)
    return switch_version(manifest.after(retired=kept, next_generation=newest), version, now)


@dataclass(frozen=True, slots=True)
class WritingBatch:
    """Whose batch it is, its number, and the run that does it.

    One that is `cut` was begun with more records: where it is in the table already, it stays as it is.
    """

    application: str
    number: int
    by: str
    cut: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of application {self.application}"


class LocalTableWriter:
    """The sends of one batch to one local table, and their commit; a context manager, which drops what stays undone.

    `pinned` is the version that the batch was begun with, None where the table had none.
    """

    def __init__(
        self,
        lake: Lake,
        spec: AdjunctDataset,
        pinned: SealedVersion | None,
        batch: WritingBatch,
        writer: GenerationWriter[Any] = SPARK,
    ) -> None:
        self._lake, self._spec, self._pinned, self._batch, self._writer = lake, spec, pinned, batch, writer
        self._log = DatasetLog(lake, spec.name)
        self._schema = columns_of_local_table(spec)
        self._layout: BucketLayout = build_layout(
            self._schema, spec.key, spec.partition_by, spec.partitions, positioned=True
        )
        self._start: CurrentTable | None = None
        self._generations: list[Generation] = []
        self._sends: list[SentToTable] = []
        self._stack = ExitStack()
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if not self._committed:
            for generation in self._generations:
                self._log.drop(generation)

    # -- sends

    def send(self, rows: DataFrame | pa.Table, *, order_by: Sequence[str], partitioned: bool) -> dict[str, int]:
        """Write the last record of each key as a generation; return what was counted.

        `rows` have the table's columns, `__tombstone`, and those of `order_by`, by which the last one of a key wins.
        `partitioned` says that partition i holds bucket i already. Raises NullKeyError.
        """
        begun = self._read_start()
        number = begun.next_generation + len(self._sends)
        attempt = self._log.attempt()
        self._stack.enter_context(record_build(self._lake, self._spec.name, attempt.id, self._batch.by))
        generation, counters = write_generation(
            self._lake,
            attempt,
            number,
            self._layout,
            _with_position(rows, number),
            self._writer,
            what=f"local table {self._spec.name!r}",
            order_by=(*self._spec.key, *order_by),
            keep_tombstones=bool(self._stacked_generations()),
            partitioned=partitioned,
            range_of=expiry_column(self._spec),
        )
        counters.pop("conflicting", None)  # of changes nothing else is expected
        tombstones = count_deletions(generation)
        counters["deleted"] += tombstones
        digest = generation.digest
        assert digest is not None, "without it, other rows of the same batch would be taken for those that are in"
        sent = SentToTable(rows=generation.rows - tombstones, deleted=counters["deleted"], digest=digest)
        self._sends.append(sent)
        self._generations.append(strip_large_footers(generation))
        return {"rows": sent.rows, **counters}

    def reader(self, *, sends: bool = True) -> VersionReader:
        """Return the pinned version with what the batch has sent so far on top; it may hold nothing.

        Without `sends` it is the version alone, with the columns that are declared now.
        """
        generations = self._stacked_generations(sends=sends) or [self._log.attempt().generation(1)]
        shown = self._pinned.id if self._pinned is not None else "v000000-begun"
        number = self._pinned.number if self._pinned is not None else 1
        version = version_from_generations(
            self._spec, generations, number=number, id=shown, now=self._lake.now(), counters={}
        )
        return VersionReader(self._lake.store, self._spec.name, version)

    def _stacked_generations(self, *, sends: bool = True) -> list[Generation]:
        """Return the generations with rows of the pinned version and of the batch, oldest first."""
        before = self._pinned.generations if self._pinned is not None else ()
        mine = self._generations if sends else ()
        return [generation for generation in (*before, *mine) if generation.files]

    @property
    def name(self) -> str:
        """The table's name."""
        return self._spec.name

    @property
    def sent(self) -> tuple[int, ...]:
        """The numbers of the generations that the batch has sent so far."""
        return tuple(generation.id for generation in self._generations if generation.files)

    # -- the commit

    def commit(self, watermark: datetime | None = None) -> tuple[str | None, bool]:
        """Commit what was sent, once for (application, batch); return the version served, and whether it was in before.

        Of a table of state, generations are dropped all of whose rows have expired at `watermark`. Raises
        ProducerConflictError where the batch has committed something else, and CommitConflictError where a later batch
        has committed, or the table was changed by more than a compaction.
        """
        begun = self._read_start()
        commit_id = self._log.attempt().id

        def decided(seen: CurrentTable) -> Callable[[], tuple[str | None, bool]]:
            if self._is_committed(seen.manifest):
                assert seen.manifest is not None
                served = seen.manifest.version
                return lambda: (None if served is None else served.id, True)
            after = self._manifest_with_batch(begun, seen, commit_id, watermark)

            def commit() -> tuple[str | None, bool]:
                self._committed = True  # or it is not known: then the files may be needed
                try:
                    self._log.commit(seen.commit, after, by=self._batch.by, commit_id=commit_id)
                except CommitConflictError:
                    self._committed = False
                    raise
                return None if after.version is None else after.version.id, False

            return commit

        return commit_with_rebase(
            decided(begun), lambda commit: commit(), lambda _: decided(self._read()), attempts=_TRIES
        )

    def _read_start(self) -> CurrentTable:
        if self._start is None:
            self._start = self._read()
        return self._start

    def _read(self) -> CurrentTable:
        commit, stored = self._log.read()
        return CurrentTable(commit, None if stored is None else require_local_manifest(stored, self._spec))

    def _is_committed(self, manifest: UnboundedManifest | None) -> bool:
        """Whether this batch is in the table; what it says now has to be what it said then."""
        written = None if manifest is None else manifest.written
        if written is None or written.batch < self._batch.number:
            return False
        name, mine = self._spec.name, str(self._batch)
        if written.batch > self._batch.number or written.undone:
            what = "it was given up" if written.batch == self._batch.number else f"batch {written.batch} is in"
            raise CommitConflictError(
                f"local table {name!r} takes nothing of {mine} any more: {what}.",
                "Let the run that goes on with the application do so. If its batch log was begun anew, begin the table "
                f"anew, too: adjunct dataset delete {name} --reason ….",
                dataset=name,
                application=self._batch.application,
            )
        if written.sends != tuple(self._sends) and not self._batch.cut:
            raise ProducerConflictError(
                f"local table {name!r} has {mine} already, and what it sends now is something else: "
                f"{_describe_sends(written.sends)} then, {_describe_sends(self._sends)} now.",
                "Expressions and functions must be deterministic. Undo what changed in the application, or give the "
                f"batch up: adjunct checkpoint abandon {self._batch.application} --reason ….",
                producer=self._batch.application,
                sequence=self._batch.number,
            )
        return True

    def _manifest_with_batch(
        self, begun: CurrentTable, seen: CurrentTable, commit_id: str, watermark: datetime | None
    ) -> UnboundedManifest:
        """Return the manifest with this batch in it; one that has sent nothing leaves the version as it is."""
        now, spec = self._lake.now(), self._spec
        if seen.next_generation != begun.next_generation:
            raise CommitConflictError(
                f"local table {spec.name!r} was written by somebody else while {self._batch} was under way.",
                "Nothing of this batch is in it. Run the application again.",
                dataset=spec.name,
            )
        manifest = seen.manifest or new_manifest(spec, now)
        before = None if self._pinned is None else self._pinned.id
        written = Written(
            application=self._batch.application,
            batch=self._batch.number,
            sends=tuple(self._sends),
            before=before,
            watermark=watermark,
        )
        old = manifest.version.generations if manifest.version is not None else ()
        if self._pinned is None and any(generation.files for generation in old):
            raise DatasetError(
                f"local table {spec.name!r} has entries, and {self._batch} was begun without it.",
                f"Give the batch up, so that the next one is begun with it: adjunct checkpoint abandon "
                f"{self._batch.application} --reason ….",
                dataset=spec.name,
            )
        mine = [generation for generation in self._generations if generation.files]
        counters = counters_from_sends(self._sends)
        after = manifest.after(
            declaration=declaration_from_spec(spec, self._schema),
            next_generation=begun.next_generation + len(self._sends),
            counters=sum_counters(manifest.counters, counters),
            written=written,
            change=Change(action="batch", reason=str(self._batch)),
        )
        before_it = [generation for generation in old if generation.files]
        stay = [generation for generation in before_it if not has_expired(generation, watermark)]
        if not mine and manifest.version is not None and len(stay) == len(before_it):
            return after
        generations = (*stay, *mine)
        if not generations:
            generations = (self._log.attempt().generation(after.next_generation),)
            after = after.after(next_generation=after.next_generation + 1)
        number = seen.number + 1
        version = version_from_generations(
            spec, generations, number=number, id=version_id(number, commit_id), now=now, counters=counters
        )
        return switch_version(after, version, now)


def _with_position(rows: DataFrame | pa.Table, position: int) -> DataFrame | pa.Table:
    """Return the rows with one position: of a key, what was sent later wins."""
    if hasattr(rows, "column_names"):
        import pyarrow as pa

        table: pa.Table = rows
        return table.append_column(POSITION, pa.array([position] * table.num_rows, pa.int64()))
    from pyspark.sql import functions as F

    frame: DataFrame = rows
    return frame.withColumn(POSITION, F.lit(position).cast("bigint"))


def _describe_sends(sends: Sequence[SentToTable]) -> str:
    return "; ".join(f"{sent.rows} records, {sent.deleted} deleted ({sent.digest:016x})" for sent in sends) or "nothing"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Rows by key, each until its time.

    `schema` has all columns. `expires` is one of them, a timestamp: a row is gone once the operator's watermark has
    reached it. Where a key is written again, or deleted, its time is never earlier than before: or what was dropped
    with its newest row would come back as an older one. `append_only` says that each key is written once, so that
    reading has nothing to merge. `kept_for` says in words what the rows are kept for: the operator goes on with what it
    has kept for the same, and refuses it for anything else.
    """

    schema: Schema
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int
    expires: str
    append_only: bool = False
    kept_for: str = ""


# Tables of state: what an operator keeps from batch to batch, each row until its time.
#
# A table of state is a local table that an operator writes and nobody declares. Each batch commits a generation of it.
# One whose last row has expired is dropped whole, with the commit of the batch whose watermark has reached it: what
# stays
# is not rewritten for that. Small generations are merged between batches, without the rows that have expired.


# Nobody reads an earlier state but the batch that was begun with it, which holds it.
_STATE_DISCARD = DiscardPolicy(keep=1, grace=timedelta(0))
_STATE_COMPACTION = DeltaCompaction()
_RETIRED_PER_DISCARD = 8
"""So many dropped or merged generations are deleted together."""


def state_dataset_name(application: str, name: str) -> str:
    """Return the name of the dataset that this state of an application is."""
    return f"{application}-{name}"


def declare_state_dataset(application: str, name: str, spec: StateSpec) -> AdjunctDataset:
    """Return the local table that keeps this state. Raises ConfigurationError for a key that can't be compared."""
    return local_table(
        state_dataset_name(application, name),
        application=application,
        key=spec.key,
        schema=spec.schema,
        partitions=spec.partitions,
        partition_by=spec.partition_by,
        compaction=_STATE_COMPACTION,
        discard=_STATE_DISCARD,
        description=f"What an operator of application {application} keeps until its time.",
        expires=spec.expires,
        kept_for=spec.kept_for,
    )


def validate_state(lake: Lake, dataset: AdjunctDataset) -> None:
    """Refuse state that what is stored can't be gone on with, saying what differs. Raises DatasetError."""
    stored = DatasetLog(lake, dataset.name).read()[1]
    if stored is not None:
        _validate_kept_for(dataset, stored.declaration)
        require_local_manifest(stored, dataset)


def create_state(context: Runtime, dataset: AdjunctDataset) -> None:
    """Store a table of state without rows where there is none yet.

    A batch that is given up is noted in it then (`undo_batch`), so that what its dead run commits late is refused.
    """
    log = context.log(dataset.name)

    def decided() -> Callable[[], None]:
        commit, stored = log.read()
        if stored is not None:
            return lambda: None
        attempt, number = log.attempt(), 1 if commit is None else commit.number + 1
        change = Change(action="begin", reason="an operator is going to keep its state here")
        manifest = empty_manifest(dataset, attempt, number, context.now()).after(change=change)

        def commit_begun() -> None:
            log.commit(commit, manifest, by=context.by, commit_id=attempt.id)

        return commit_begun

    retry_conflicts(decided, attempts=_TRIES)


def _validate_kept_for(dataset: AdjunctDataset, stored: DatasetDeclaration) -> None:
    """Refuse what was kept for something else: another bound or window would judge its rows by other times."""
    assert isinstance(dataset.input, OwnedBy)
    was, declared = stored.kept_for, dataset.input.kept_for
    if stored.expires is None or stored.owner != dataset.input.application:
        raise DatasetError(
            f"the lake has a dataset {dataset.name!r}, which is no state of application {dataset.input.application!r}: "
            f"an operator ({declared}) would keep its own under this name.",
            "Give the operator another name=, or the application; or call the dataset otherwise.",
            dataset=dataset.name,
        )
    if was != declared:
        raise DatasetError(
            f"state {dataset.name!r} was kept for another operator than is declared: {was!r}, and now {declared!r}.",
            "Undo the change, or give the operator another name, under which it begins with what it reads from then "
            f"on. To begin anew under this one: adjunct dataset delete {dataset.name} --reason ….",
            dataset=dataset.name,
        )


def maintain_state(context: Runtime, name: str) -> bool:
    """Merge small generations of a table of state where that is due; return whether files wait to be deleted."""
    manifest = context.log(name).read()[1]
    if manifest is None or manifest.declaration.expires is None:  # what is none, under its name, is left alone
        return False
    compacted = compact_due(context, as_unbounded(manifest), _STATE_COMPACTION)
    return len((compacted[1] if compacted is not None else manifest).retired) >= _RETIRED_PER_DISCARD

"""One advance of an unbounded dataset: recover, bootstrap or apply the changes, commit.

    bootstrap   start and target recorded -> chunks of changes, each a generation -> the table is served
    follow      changes [offset, upcoming) -> one delta of the changes alone, served at once

Each commit holds data and offsets together, so there is no second place to disagree with, and one commit is one
consistent cut across all partitions. A commit costs what its changes cost, however large the table is; readers merge
base and deltas. A table that is built anew is built beside the one that is served (SAMZA-1278; design, section 6).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.changes.debezium import DebeziumEnvelope
from dagster_adjunct.assets.declaration.following import DeadLetters
from dagster_adjunct.assets.sources.changes import decode_changes, refuse_problems
from dagster_adjunct.assets.sources.opening import Ranges, Source, as_stored, by_partition
from dagster_adjunct.assets.unbounded.evolution import check_evolution
from dagster_adjunct.assets.unbounded.recovery import check_complete, decide, examine, max_age_of
from dagster_adjunct.assets.versions.attempts import AttemptRenewal, forget_attempt
from dagster_adjunct.assets.versions.carrying_over import carried_over
from dagster_adjunct.assets.versions.log import DatasetLog
from dagster_adjunct.assets.versions.manifest import (
    POSITION,
    Bootstrap,
    Change,
    DatasetManifest,
    Decision,
    Retired,
    SealedVersion,
    layout_of,
)
from dagster_adjunct.assets.versions.report import Action, AdvanceReport, OnStage, StageEvent, Stages, ignore
from dagster_adjunct.assets.writing.generation import add, check_declaration, write_generation
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.unbounded.reapply import Rewinding
    from dagster_adjunct.assets.versions.log import Attempt
    from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.commit import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system import StreamSystem

_TRIES = 20
_INITIAL_POSITION = -1


def advance_unbounded(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: Callable[[], SparkSession],
    *,
    by: str,
    rebuild: str | None = None,
    on_stage: OnStage = ignore,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> AdvanceReport:
    """Bootstrap the dataset, or apply the changes since its last commit; nothing new makes no commit.

    `systems` are the stream systems by name; `by` says in the commits who did it. `spark` is called only if
    there are records to read. `rebuild` gives the reason to build it anew from the stream's oldest offset (or its
    bulk snapshot), beside the table that is served. Raises BadChangeError and NullKeyError for changes that can't be
    applied, OffsetOutOfRangeError and DatasetError where the table can't be continued, and CommitConflictError when
    another writer was first.
    """
    if not spec.following.persistent:
        raise DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: it lives for one run and is not stored.",
            "Applications build it when they run: adjunct run. Declare persistent=True to store it.",
        )
    return Follower(lake, systems, spec, spark, by, rebuild, on_stage, now).run()


@dataclass
class Follower:
    """One advance, in the steps that a rewind takes too: look, decide, go on.

    A new table is begun in answer to the startpoints in `applied`, by partition; `forced` begins one even from a stream
    that does not tell of every key any more. `rewinding` are changes that are applied again.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    spec: AdjunctDataset
    spark: Callable[[], SparkSession]
    by: str
    rebuild: str | None
    on_stage: OnStage = ignore
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    applied: dict[str, str] = field(default_factory=dict)
    forced: bool = False
    rewinding: Rewinding | None = None
    counters: dict[str, int] = field(default_factory=dict)
    sealed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = Stages(self.spec.name, self.on_stage)
        self.log = DatasetLog(self.lake, self.spec.name)

    def run(self) -> AdvanceReport:
        with self.stages("collect"):
            self.look()
            self.decide()
        return self.go_on()

    def look(self) -> None:
        """Find the table and its stream as they are now."""
        self.source = Source.of(self.systems, self.spec)
        check_order(self.source)
        self.commit, self.found, self.damage = self.log.read_or_newest()
        self.carried = carried_over(self.found, self.source.info) if self.found and not self.damage else None
        self.found = self.carried or self.found
        self.looked = self.now()
        self.ends = self.source.system.upcoming(self.source.ssps)

    def carry(self) -> None:
        """Commit that the table goes on in its stream as that was repartitioned, where it was."""
        if self.carried is not None:
            self.commit = self.log.commit(self.commit, self.carried, by=self.by)
            self.carried = None

    def decide(self) -> Decision:
        """Decide what to do with what was found."""
        self.decision = self._decide(self.found, self.damage)
        return self.decision

    def go_on(self) -> AdvanceReport:
        """Do what was decided, and apply what has come."""
        self.carry()
        manifest, decision = self.found, self.decision
        if decision.action == "serve-stale":
            assert manifest is not None
            self.manifest = manifest
            if not _same_decision(manifest.decision, decision):
                self._keep(decision=decision, change=_told(decision))
            return self.report("stale")
        if decision.action != "continue":
            self._begin(manifest, decision)
        else:
            assert manifest is not None
            self.manifest = manifest
            self.evolve()
        action = self.follow()
        if action == "up-to-date":
            self._confirm(decision)
        elif action != "waiting":
            self.compact()
        return self.report(action)

    # -- what to do with what is there

    def _decide(self, manifest: DatasetManifest | None, damage: str) -> Decision:
        source, now = self.source, self.looked
        if manifest is not None:
            _check_declared(manifest, source, anew=self.rebuild is not None)
        if self.rebuild is not None and manifest is not None:
            if not self.forced:
                check_complete(source, self.rebuild)
            return Decision(action="bootstrap", store="invalid", reason=f"rebuild: {self.rebuild}", at=now)
        oldest = source.system.oldest(source.ssps)
        offsets = {} if manifest is None else by_partition(manifest.offsets)
        found = examine(self.log, manifest, source, offsets, oldest, self.ends, now, damage)
        if found.store == "invalid":
            self._check_unmoved()
        decision = decide(self.spec, found, now)
        if self.rebuild is not None:  # there is no table yet, and it is asked for from the oldest offset
            reason = f"rebuild: {self.rebuild}"
            decision = Decision(action="bootstrap", store=decision.store, reason=reason, at=now)
        if decision.action == "bootstrap" and not self.forced:
            check_complete(source, decision.reason)
        return decision

    def _check_unmoved(self) -> None:
        """Refuse to go by a table that was compacted, and whose files were discarded, while it was looked at."""
        head = self.log.log.head()
        if self.commit is not None and head is not None and head.id != self.commit.id:
            raise CommitConflictError(
                f"dataset {self.spec.name!r}: another writer committed first, while this one looked at the table "
                f"(number {head.number}, after {self.commit.number}).",
                "Nothing of this attempt is visible. Advance again: it goes on from what the other one did.",
            )

    def _begin(self, manifest: DatasetManifest | None, decision: Decision) -> None:
        """Commit where a new table begins: its start and its target, recorded before anything is read."""
        source, now = self.source, self.looked
        first = manifest or DatasetManifest(
            name=self.spec.name, declaration=source.declaration, offsets=as_stored(self.ends), bootstrap=_NOT_BEGUN
        )
        attempt = self.log.attempt()
        building: tuple[Generation, ...] = ()
        number = first.next_generation
        if decision.action == "bootstrap":
            start = source.system.oldest(source.ssps)
            if self.spec.following.initial is not None:
                with self.stages("load"):
                    loaded, start = self._load(attempt, number)
                    building, number = (loaded,) if loaded.files else (), number + 1
                self.ends = source.system.upcoming(source.ssps)
            state, target, served = "running", as_stored(self.ends), first.version
        else:
            start = self._last_offsets(first, manifest)
            state, target, served = "done", as_stored(start), None
        bootstrap = Bootstrap(
            state="running" if state == "running" else "done",
            start=as_stored(start),
            target=target,
            started_at=now,
            finished_at=None if state == "running" else now,
            building=building,
            columns=source.schema,
            loaded=bool(building),
            why=decision.reason,
        )
        after = first.after(
            declaration=source.declaration,
            offsets=as_stored(start),
            bootstrap=bootstrap,
            stream=source.info.identity,
            next_generation=number,
            confirmed_at=first.confirmed_at if served is not None else None,
            quarantining=None,
            horizon=first.horizon if served is not None else None,
            applied=first.with_applied(self.applied),
            decision=decision,
            change=_told(decision),
        )
        if state != "running":
            after = after.after(next_generation=number + 1)
            after = self._with_version(after, self.commit, attempt, (attempt.generation(number),), {}, as_stored(start))
            self.sealed += [after.version.id] if after.version else []
        self.commit = self.log.commit(self.commit, after, by=self.by, commit_id=attempt.id)
        forget_attempt(self.lake, self.spec.name, attempt.id)
        self.manifest = after

    def _last_offsets(
        self, first: DatasetManifest, manifest: DatasetManifest | None
    ) -> dict[SystemStreamPartition, str]:
        """Return where a table without bootstrap begins: its last offset where the stream has it, else the default."""
        source = self.source
        oldest = source.system.oldest(source.ssps)
        default = oldest if source.info.default_offset == "oldest" else self.ends
        known = by_partition(manifest.offsets) if manifest is not None else {}
        return {
            ssp: default[ssp] if ssp not in known else max_offset(source, known[ssp], oldest[ssp])
            for ssp in source.ssps
        }

    def _load(self, attempt: Attempt, number: int) -> tuple[Generation, dict[SystemStreamPartition, str]]:
        """Write the bulk snapshot as a base; return it, with the position from which the stream goes on."""
        from contextlib import closing

        from pyspark.sql import functions as F

        from dagster_adjunct.assets.sources.ordering import position_of
        from dagster_adjunct.assets.unbounded.bulk_snapshot import as_frame, check_position
        from dagster_adjunct.resources.streams.interface.system import TOMBSTONE

        initial, source, spark = self.spec.following.initial, self.source, self.spark()
        assert initial is not None
        what = f"dataset {self.spec.name!r}: {initial.describe()}"
        with closing(initial.load(self.spec, source.schema, source.ssps, spark)) as snapshot:
            start = check_position(snapshot, source, what)
            with (
                as_frame(snapshot, source.schema, what, self.log, spark, self.by) as rows,
                AttemptRenewal(self.lake, self.spec.name, attempt.id, self.by),
            ):
                order, first = self.spec.following.order_by, F.lit(_INITIAL_POSITION).cast("bigint")
                ordered = order is not None and order in source.schema.names
                position = F.coalesce(position_of(rows, order), first) if ordered and order else first
                generation, counted = write_generation(
                    self.lake,
                    attempt,
                    number,
                    self._layout(),
                    rows.withColumn(POSITION, position).withColumn(TOMBSTONE, F.lit(False)),
                    what=f"dataset {self.spec.name!r}, bulk snapshot",
                    order_by=(*self.spec.key, POSITION),
                    keep_tombstones=False,
                    partitioned=False,
                )
        if counted["superseded"]:
            raise DatasetError(
                f"dataset {self.spec.name!r}: {counted['superseded']:,} rows of the bulk snapshot have a key "
                f"({', '.join(self.spec.key)}) that another row has too.",
                "Nothing was published. Correct the snapshot, or the key.",
            )
        self.counters = add(self.counters, {"loaded": generation.rows})
        return generation, start

    # -- applying changes

    def follow(self) -> Action:
        """Apply what has come, a chunk a commit; return what that came to."""
        action: Action = "up-to-date"
        began, done = time.monotonic(), 0
        while True:
            running = self._bootstrap.state == "running"
            ranges, last = self._next_ranges()
            reached = running and last and self._reaches_target(ranges)
            if not ranges and not reached:
                return "waiting" if running else action
            read = self.apply(ranges, reached=reached)
            done += read
            action = "bootstrapped" if running else "applied" if action == "up-to-date" else action
            if running:
                self._tell(began, done, reached)
            if last:  # what came since a bootstrap began is for the next advance: readers need not wait for it
                return action if reached or not running else "waiting"

    @property
    def _bootstrap(self) -> Bootstrap:
        assert self.manifest.bootstrap is not None
        return self.manifest.bootstrap

    def _next_ranges(self) -> tuple[Ranges, bool]:
        """Return the next ranges to read, about a chunk, and whether there is nothing more to read now.

        Where transactions are kept whole, the ranges end before the first that is not all there, and a chunk that holds
        no whole one is made larger. A bootstrap then reads on behind its target: there a transaction may end.
        """
        source, system = self.source, self.source.system
        starts = by_partition(self.manifest.offsets)
        form = self.spec.following.changes
        transactions = isinstance(form, DebeziumEnvelope) and form.transactions is not None
        target = by_partition(self._bootstrap.target) if self._bootstrap.state == "running" else self.ends
        ends = self.ends if transactions else target
        if self.manifest.quarantining is not None:
            ranges: Ranges = {
                SystemStreamPartition.parse(ssp): span for ssp, span in self.manifest.quarantining.items()
            }
            at = {**starts, **{ssp: end for ssp, (_, end) in ranges.items()}}
            return ranges, all(system.compare(at[ssp], target[ssp]) >= 0 for ssp in starts)
        lags = {ssp: max(system.distance(ssp, start, ends[ssp]), 0) for ssp, start in starts.items()}
        lag, chunk = sum(lags.values()), self.spec.following.chunk
        while True:
            shares = {ssp: most if lag <= chunk else min(most, -(-most * chunk // lag)) for ssp, most in lags.items()}
            ranges = {
                ssp: (starts[ssp], system.advance(ssp, starts[ssp], count)) for ssp, count in shares.items() if count
            }
            if transactions and ranges:
                from dagster_adjunct.assets.sources.transactions import whole_transactions

                ranges = whole_transactions(self.spec, self.systems, self.spark(), source, ranges)
            if ranges or lag <= chunk:
                return ranges, lag <= chunk
            chunk *= 4

    def _reaches_target(self, ranges: Ranges) -> bool:
        """Whether all of the bootstrap's target is in the table once these ranges are."""
        at = {**by_partition(self.manifest.offsets), **{ssp: end for ssp, (_, end) in ranges.items()}}
        target = by_partition(self._bootstrap.target)
        return all(self.source.system.compare(at[ssp], end) >= 0 for ssp, end in target.items())

    def apply(self, ranges: Ranges, *, reached: bool = False) -> int:
        """Read these changes and commit them; `reached` says that they end a bootstrap."""
        manifest, source = self.manifest, self.source
        running = self._bootstrap.state == "running"
        # By a column's order a deletion must beat what comes after it with a lower value, also in a base.
        base = self.spec.following.order_by is None and (
            not self._bootstrap.building if running else not _has_rows(manifest)
        )
        attempt = self.log.attempt()
        generation = attempt.generation(manifest.next_generation)
        records = source.count(ranges) if ranges else 0
        counters = {"read": records}
        try:
            with AttemptRenewal(self.lake, self.spec.name, attempt.id, self.by):
                with self.stages("build"):
                    if records:
                        generation, counted = self._write(attempt, ranges, keep_tombstones=not base)
                        counted["deleted"] += sum(int(file.stats.get("tombstones", 0)) for file in generation.files)
                        counted.pop("conflicting", None)  # of a change stream nothing else is expected
                        counters |= counted if running else {"changes": generation.rows, **counted}
                with self.stages("commit"):
                    self._commit_changes(attempt, generation, ranges, counters, reached=reached)
        except CommitConflictError:
            forget_attempt(self.lake, self.spec.name, attempt.id)
            raise
        forget_attempt(self.lake, self.spec.name, attempt.id)
        self.counters = add(self.counters, counters)
        return records

    def _write(self, attempt: Attempt, ranges: Ranges, *, keep_tombstones: bool) -> tuple[Generation, dict[str, int]]:
        from dagster_adjunct.assets.sources.ordering import placed_from, without_late

        source, spec = self.source, self.spec
        what = f"dataset {spec.name!r}"
        assert source.info.schema is not None
        records = source.read(self.spark(), ranges)
        changes = decode_changes(spec, records, source.info.schema, source.schema, partitions=len(source.ssps))
        if self.manifest.positions_from and spec.following.order_by is None:
            changes = placed_from(changes, self.manifest.positions_from)
        if self.rewinding is not None:
            changes, late = self.rewinding.onto(changes, self)
        else:
            # A table that is built anew has forgotten no deletion yet.
            horizon = None if self._bootstrap.state == "running" else self.manifest.horizon
            changes, late = without_late(changes, horizon, spec.following.on_bad_change)
        quarantined = 0
        if isinstance(spec.following.on_bad_change, DeadLetters):
            changes, quarantined = self._quarantine(changes, ranges)
        else:
            changes = refuse_problems(changes, what)
        generation, counted = write_generation(
            self.lake,
            attempt,
            self.manifest.next_generation,
            self._layout(),
            changes,
            what=what,
            order_by=(*spec.key, POSITION, *(source.tie_break if self.rewinding is None else (OFFSET, PARTITION))),
            keep_tombstones=keep_tombstones,
            partitioned=source.copartitioned and self.rewinding is None,
        )
        counted |= {"quarantined": quarantined} if quarantined else {}
        counted |= {"late": late()} if late is not None else {}
        return generation, counted

    def _quarantine(self, changes: DataFrame, ranges: Ranges) -> tuple[DataFrame, int]:
        """Send changes that can't be applied to the dead letters, once; return the others.

        The ranges are committed first: a run that takes over sends the very same ones again, which adds nothing. Those
        of a rewind are its own, and it begins again with the same.
        """
        from dagster_adjunct.assets.sources.dead_letters import (
            problems_of,
            send_dead_letters,
            without_problems,
        )

        bad = problems_of(changes)
        good = without_problems(changes)
        if bad.isEmpty():
            return good, 0
        if self.manifest.quarantining is None and self.rewinding is None:
            said = {str(ssp): span for ssp, span in ranges.items()}
            self._keep(quarantining=said, change=Change(action="quarantine"))
        ends = {**by_partition(self.manifest.offsets), **{ssp: end for ssp, (_, end) in ranges.items()}}
        sent = send_dead_letters(
            self.systems,
            self.spec,
            bad,
            producer=self._letters_of(),
            sequence=1 + sum(self.source.system.distance(ssp, "0", end) for ssp, end in ends.items()),
        )
        return good, sent

    def _letters_of(self) -> str:
        """Return the producer of dead letters: another one where the same ranges may give other letters.

        That is so after a rebuild, a changed declaration, or a compaction that has moved the horizon, and in a rewind.
        """
        spec, extractor = self.spec, self.spec.extractor
        said = (
            spec.following.changes.describe(),
            extractor and extractor.describe(),
            spec.columns,
            self.manifest.horizon,
            *([self.manifest.positions_from] if self.manifest.positions_from else []),
            *(self.rewinding.told if self.rewinding is not None else ()),
        )
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:8]
        return f"dead-{spec.name}-{self._bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"

    def _commit_changes(
        self, attempt: Attempt, generation: Generation, ranges: Ranges, counters: dict[str, int], *, reached: bool
    ) -> None:
        """Commit data and offsets together."""
        try:
            self._commit_again(
                lambda: self._after(attempt, generation, ranges, counters, reached=reached), commit_id=attempt.id
            )
        except CommitConflictError:
            self.log.drop(generation)
            raise

    def _after(
        self, attempt: Attempt, generation: Generation, ranges: Ranges, counters: dict[str, int], *, reached: bool
    ) -> DatasetManifest:
        """Return the manifest with these changes in it; changes that hold no record leave the version as it is."""
        manifest, bootstrap, now = self.manifest, self._bootstrap, self.now()
        offsets = manifest.offsets | as_stored({ssp: end for ssp, (_, end) in ranges.items()})
        after = manifest.after(
            declaration=self.source.declaration,
            offsets=offsets,
            stream=self.source.info.identity,
            counters=add(manifest.counters, counters),
            quarantining=None,
            confirmed_at=self.looked if offsets == as_stored(self.ends) else manifest.confirmed_at,
            decision=self.decision,
            next_generation=manifest.next_generation + (1 if generation.files or bootstrap.state == "running" else 0),
            change=Change(action="bootstrap" if bootstrap.state == "running" else "apply"),
        )
        if self.rewinding is not None:
            after = self.rewinding.recorded(after, self)
        if bootstrap.state == "done":
            if not generation.files:
                return after
            assert manifest.version is not None
            kept = [each for each in manifest.version.generations if each.files]
            return self._with_version(after, self.commit, attempt, (*kept, generation), counters, after.offsets)
        building = (*bootstrap.building, *([generation] if generation.files else []))
        if not reached:
            return after.after(bootstrap=bootstrap.model_copy(update={"building": building}))
        done = bootstrap.model_copy(update={"state": "done", "finished_at": now, "building": ()})
        after = after.after(bootstrap=done, confirmed_at=bootstrap.started_at, horizon=None)
        whole = building or (generation,)
        return self._with_version(after, self.commit, attempt, whole, add(self.counters, counters), offsets)

    def _with_version(
        self,
        manifest: DatasetManifest,
        commit: Commit | None,
        attempt: Attempt,
        generations: tuple[Generation, ...],
        counters: Mapping[str, int],
        offsets: Mapping[str, str],
    ) -> DatasetManifest:
        """Return the manifest serving a version of these generations; those that it does not read are retired."""
        assert manifest.bootstrap is not None
        number, now, spec = (commit.number if commit else 0) + 1, self.now(), self.spec
        version = SealedVersion(
            id=f"v{number:06d}-{attempt.id}",
            number=number,
            name=None,
            sealed_at=now,
            columns=self.source.schema,
            key=spec.key,
            partition_by=spec.partition_by,
            partitions=spec.partitions,
            positioned=True,
            order_by=spec.following.order_by,
            generations=generations,
            rows=generations[0].rows if len(generations) == 1 and not _keeps_deletions(spec, generations[0]) else None,
            offsets={ssp: (manifest.bootstrap.start[ssp], end) for ssp, end in offsets.items()},
            counters=dict(counters),
        )
        return retire(manifest, version, now)

    def _keep(self, **changes: Any) -> None:
        """Commit something beside data and offsets."""
        self._commit_again(lambda: self.manifest.after(**changes))

    def _commit_again(self, decide: Callable[[], DatasetManifest], *, commit_id: str | None = None) -> None:
        """Commit what is decided on `self.manifest`, again where somebody else only compacted or discarded."""
        before = self.manifest
        for tried in range(_TRIES):
            after = decide()
            try:
                self.commit = self.log.commit(self.commit, after, by=self.by, commit_id=commit_id)
            except CommitConflictError:
                self.commit, fresh = self.log.read()
                if fresh is None or not _same_progress(before, fresh) or tried + 1 == _TRIES:
                    raise
                self.manifest = fresh
            else:
                if after.version is not None and after.version is not self.manifest.version:
                    self.sealed.append(after.version.id)
                self.manifest = after
                return

    def _confirm(self, decision: Decision) -> None:
        """Remember that the table was found caught up, where its age counts, and not at each look."""
        limit, confirmed, now = max_age_of(self.source), self.manifest.confirmed_at, self.looked
        if self.manifest.offsets != as_stored(self.ends):
            return  # changes of a transaction that has not ended wait
        if limit is None or (confirmed is not None and now - confirmed < limit / 10):
            return
        try:
            self._keep(confirmed_at=now, decision=decision, change=Change(action="confirm"))
        except CommitConflictError:  # somebody else was here, and saw the same
            self.commit, fresh = self.log.read()
            self.manifest = fresh or self.manifest

    def evolve(self) -> None:
        """Serve the columns that are declared now, where they have changed; the rows there stay as they are."""
        manifest, version = self.manifest, self.manifest.version
        assert manifest.bootstrap is not None
        if manifest.bootstrap.state == "running" or version is None or version.columns == self.source.schema:
            return
        attempt = self.log.attempt()
        change = Change(action="evolve", reason=version.columns.difference(self.source.schema))
        after = manifest.after(declaration=self.source.declaration, decision=self.decision, change=change)
        offsets = manifest.offsets
        after = self._with_version(after, self.commit, attempt, version.generations, version.counters, offsets)
        self.commit = self.log.commit(self.commit, after, by=self.by, commit_id=attempt.id)
        self.manifest = after
        self.sealed += [after.version.id] if after.version else []

    def compact(self) -> None:
        """Compact inside the advance, where that is due and declared."""
        if not self.spec.following.compaction.inside_commit:
            return
        from dagster_adjunct.assets.unbounded.compaction import compact_due

        with self.stages("compact"):
            done = compact_due(self.log, self.spec.following.compaction, self.spark, by=self.by)
        if done is not None:
            self.manifest = done
            if done.version is not None:
                self.sealed.append(done.version.id)

    # -- telling

    def _layout(self) -> BucketLayout:
        spec = self.spec
        return layout_of(self.source.schema, spec.key, spec.partition_by, spec.partitions, positioned=True)

    def _tell(self, began: float, done: int, reached: bool) -> None:
        """Tell how far the bootstrap is."""
        ends = by_partition(self._bootstrap.target)
        system, took = self.source.system, time.monotonic() - began
        offsets = by_partition(self.manifest.offsets)
        left = sum(system.distance(ssp, offset, ends[ssp]) for ssp, offset in offsets.items())
        start = by_partition(self._bootstrap.start)
        total = sum(system.distance(ssp, start[ssp], ends[ssp]) for ssp in start)
        detail = f"{_percent(total - left, total)} ({total - left:,} of {total:,} offsets)"
        if not reached and done:
            detail += f", about {timedelta(seconds=round(took * left / done))} left"
        self.on_stage(StageEvent(self.spec.name, None, "bootstrap", took, detail))

    def report(self, action: Action) -> AdvanceReport:
        """Return what this advance has done."""
        manifest, version, decision = self.manifest, self.manifest.version, self.decision
        system = self.source.system
        offsets = by_partition(manifest.offsets)
        lag = {str(ssp): system.distance(ssp, offset, self.ends[ssp]) for ssp, offset in offsets.items()}
        notes = []
        if decision.action != "continue":
            notes.append(f"{decision.action}: {decision.reason}")
        held = sum(lag.values())
        if action == "waiting" or (action == "up-to-date" and held):
            notes.append(f"{held:,} offsets wait for transactions that have not ended")
        elif action == "up-to-date":
            notes.append("no changes since the last commit")
        return AdvanceReport(
            dataset=manifest.name,
            kind="unbounded",
            action=action,
            version=None if version is None else version.id,
            sealed=tuple(dict.fromkeys(self.sealed)),
            rows=None if version is None else version.rows,
            counters=self.counters,
            offsets=manifest.offsets,
            lag=lag,
            decision=decision,
            seconds=self.stages.seconds,
            schema=self.source.schema if version is None else version.columns,
            note="; ".join(notes),
        )


_NOT_BEGUN = Bootstrap(state="running", start={}, target={}, started_at=datetime.fromtimestamp(0, UTC))


def _told(decision: Decision) -> Change:
    return Change(action=decision.action, reason=decision.reason)


def _same_decision(stored: Decision | None, made: Decision) -> bool:
    return stored is not None and (stored.action, stored.reason) == (made.action, made.reason)


def retire(manifest: DatasetManifest, version: SealedVersion, now: datetime) -> DatasetManifest:
    """Return the manifest serving `version`; what only earlier versions read stays for these until it is discarded."""
    before = manifest.version.generations if manifest.version else ()
    needed = {generation.folder for generation in version.generations}
    gone = [each for each in before if each.folder not in needed and each.files]
    retired = [Retired(generation=each.id, folder=each.folder, until=version.number, at=now) for each in gone]
    return manifest.after(version=version, retired=(*manifest.retired, *retired))


def _keeps_deletions(spec: AdjunctDataset, generation: Generation) -> bool:
    """Whether rows of a generation may be deletions, which are no entries."""
    return spec.following.order_by is not None or any(file.stats.get("tombstones") for file in generation.files)


def max_offset(source: Source, left: str, right: str) -> str:
    """Return the later of two offsets."""
    return left if source.system.compare(left, right) >= 0 else right


def _has_rows(manifest: DatasetManifest) -> bool:
    return manifest.version is not None and any(each.files for each in manifest.version.generations)


def _same_progress(before: DatasetManifest, fresh: DatasetManifest) -> bool:
    """Whether nobody else has read on, or begun anew: then our changes still follow what is there."""

    def facts(manifest: DatasetManifest) -> tuple[object, ...]:
        running = manifest.bootstrap is not None and manifest.bootstrap.state == "running"
        horizon = None if running else manifest.horizon  # what was late must be looked at again where it moved
        return (
            manifest.offsets,
            manifest.bootstrap,
            manifest.declaration.partitions,
            manifest.next_generation,
            manifest.quarantining,
            manifest.applied,
            horizon,
        )

    return facts(before) == facts(fresh)


def _percent(done: int, total: int) -> str:
    return "100%" if done >= total else f"{100 * done // total}%"


def check_order(source: Source) -> None:
    """Refuse an input where two changes of one key may lie in two partitions: nothing orders them there."""
    if source.one_partition_a_key or source.spec.following.order_by is not None:
        return
    spec, info = source.spec, source.info
    keyed = f"keyed by ({', '.join(info.key)})" if info.key else "not keyed"
    raise DatasetError(
        f"dataset {spec.name!r} has the key ({', '.join(spec.key)}), and its input {spec.input} is {keyed} over "
        f"{info.partitions} partitions ({info.partitioner}): changes of one key could lie in several partitions, "
        "where nothing says which is newer.",
        f"Key the stream by columns of ({', '.join(spec.key)}), give it one partition, or declare order_by=COLUMN.",
    )


def _check_declared(manifest: DatasetManifest, source: Source, *, anew: bool) -> None:
    """Refuse another key, spread or input; partitions are a matter of recovery, columns one of evolution.

    A table that is built `anew` may have any columns.
    """
    partitions = {"input_partitions": manifest.declaration.input_partitions}
    check_declaration(source.spec.name, manifest.declaration, source.declaration.model_copy(update=partitions))
    running = manifest.bootstrap is not None and manifest.bootstrap.state == "running"
    if manifest.version is not None and not anew and not running:
        check_evolution(source.spec.name, manifest.version.columns, source.schema, source.spec.key)

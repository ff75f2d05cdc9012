"""Compaction: deltas into one, or all generations into a new base, beside commits and readers.

    minor   adjacent deltas -> one delta; every tombstone stays
    major   base and deltas -> a new base; by offset without tombstones, by a column with those above the horizon

Plan, build, switch: the rows are merged bucket by bucket, with no shuffle, and one compare-and-swap puts the output
in the place of exactly its inputs. Deltas that were committed meanwhile stay behind it (design, rule 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.unbounded.advance import retire
from dagster_adjunct.assets.versions.attempts import AttemptRenewal, forget_attempt
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.log import DatasetLog
from dagster_adjunct.assets.versions.manifest import POSITION, TOMBSTONE, Change, SealedVersion
from dagster_adjunct.assets.writing.generation import write_generation
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.spark.errors import unwrapped
from dagster_adjunct.resources.spark.given_session import starter_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.following import DeltaCompaction
    from dagster_adjunct.assets.versions.log import Attempt
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.bucketing.files import Generation
    from dagster_adjunct.resources.objects.lake import Lake

Level = Literal["minor", "major"]
WORTH = 50_000
"""Deltas with fewer rows than these are merged while reading in no time: only their number makes a compaction due."""
_TRIES = 20
FOOTERS = 256 * 1024
"""More bytes of footers than these are left out of a commit: every one after it would repeat them."""
_NEWER = "__newer"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one compaction merges: adjacent generations, oldest first, and why."""

    level: Level
    generations: tuple[Generation, ...]
    reason: str

    @property
    def rows(self) -> int:
        """The stored rows that are read."""
        return sum(generation.rows for generation in self.generations)

    @property
    def size(self) -> int:
        """The bytes that are read."""
        return sum(generation.size for generation in self.generations)


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What one compaction did.

    `action` "compacted" made `version`; "nothing" found nothing to do; "superseded" met another compaction, rebuild
    or erasure that replaced its inputs first, and left nothing behind. `note` says why. `generations` are how many a
    reader merges before and after, `rows` and `bytes` what the inputs and the output hold. `counters` are the rows
    that later ones superseded, and the tombstones that went. `horizon` is how far deletions are forgotten.
    """

    dataset: str
    action: Literal["compacted", "nothing", "superseded"]
    note: str
    level: Level | None = None
    version: str | None = None
    generations: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    counters: dict[str, int] = field(default_factory=dict)
    horizon: int | None = None
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether a version was made."""
        return self.action == "compacted"

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        if not self.changed:
            return f"dataset {self.dataset}: {self.note}"
        return (
            f"dataset {self.dataset}: {self.level} compaction, version {self.version}; "
            f"{self.generations[0]} -> {self.generations[1]} generations; {self.rows[0]:,} -> {self.rows[1]:,} rows; "
            f"{self.bytes[0]:,} -> {self.bytes[1]:,} bytes; {self.seconds:.2f} s ({self.note})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        pairs = {name: list(values[name]) for name in ("generations", "rows", "bytes")}
        return values | pairs | {"seconds": round(self.seconds, 3)}


def plan_compaction(version: SealedVersion, policy: DeltaCompaction, level: Level | None = None) -> Plan | None:
    """Return what to compact, None where nothing is to be done.

    With `level` whatever that level can merge: all deltas, or all generations. Without it what the policy finds due.
    A minor compaction that is due takes the newest deltas, and older ones only while these are not larger than all
    that it has taken: so each row is rewritten a few times, however many commits there are.
    """
    generations = [generation for generation in version.generations if generation.files]
    base, deltas = generations[:1], generations[1:]
    if level == "major":
        return Plan("major", (*base, *deltas), "asked for") if deltas else None
    if level == "minor":
        return Plan("minor", tuple(deltas), "asked for") if len(deltas) > 1 else None
    if not deltas:
        return None
    changed, stored = sum(delta.rows for delta in deltas), base[0].rows
    many = len(deltas) >= policy.deltas
    large = changed > policy.fraction * stored
    if changed > policy.rows:
        return Plan("major", (*base, *deltas), f"the deltas hold {changed:,} rows, more than {policy.rows:,}")
    if large and (many or changed >= WORTH):
        why = f"the deltas hold {changed:,} rows, more than {policy.fraction:.0%} of the base's {stored:,}"
        return Plan("major", (*base, *deltas), why)
    if not many:
        return None
    return Plan("minor", tuple(_newest(deltas, policy.deltas)), f"there are {len(deltas)} deltas")


def _newest(deltas: Sequence[Generation], limit: int) -> Sequence[Generation]:
    """Return the deltas to merge so that fewer than `limit` are left, and no large one for a small one's sake."""
    taken = min(len(deltas), len(deltas) - limit + 2)
    rows = sum(delta.rows for delta in deltas[-taken:])
    while taken < len(deltas) and deltas[-taken - 1].rows <= rows:
        taken += 1
        rows += deltas[-taken].rows
    return deltas[-taken:]


@unwrapped()
def compact_dataset(
    lake: Lake,
    dataset_name: str,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    level: Level | None = None,
    policy: DeltaCompaction | None = None,
) -> CompactionReport:
    """Compact an unbounded dataset; readers and commits go on meanwhile, and whoever reads a version keeps it.

    Without `level`, what the policy finds due: that which was declared at the last advance, unless `policy` is given.
    "minor" merges all deltas into one, "major" everything into a new base. `spark` is called only if there is
    something to do, and `by` stands in the commit. A table that is being rebuilt is compacted where it is served.
    Raises DatasetNotFoundError, and DatasetError for a bounded dataset.
    """
    spark = starter_of(spark)
    if level not in (None, "minor", "major"):
        raise ConfigurationError(
            f"dataset {dataset_name!r} is to be compacted at level {level!r}: expected minor or major.", "Choose one."
        )
    log = DatasetLog(lake, dataset_name)
    manifest = log.read()[1]
    if manifest is None:
        raise DatasetNotFoundError(f"dataset {dataset_name!r} has no commit in {lake.url}.", "Advance it a first time.")
    if manifest.declaration.kind != "unbounded":
        raise DatasetError(
            f"dataset {dataset_name!r} is bounded: each of its versions is one generation already.",
            "Only unbounded datasets have deltas to compact.",
        )
    return _Compaction(log, policy, level, spark, by).run(manifest)[0]


def compact_due(
    log: DatasetLog, policy: DeltaCompaction, spark: Callable[[], SparkSession], *, by: str
) -> DatasetManifest | None:
    """Compact what the policy finds due; return the manifest after it, None where nothing is due."""
    manifest = log.read()[1]
    return None if manifest is None else _Compaction(log, policy, None, spark, by).run(manifest)[1]


@dataclass(frozen=True, slots=True)
class _Built:
    """The output of one build; `horizon` is what it forgets deletions up to, None where it forgets none of its own."""

    attempt: Attempt
    generation: Generation
    counters: dict[str, int]
    tombstones: int
    horizon: int | None


class _LateChanges(Exception):
    """Deltas committed meanwhile hold changes at or below the new horizon, which forgotten deletions should beat."""


@dataclass
class _Compaction:
    log: DatasetLog
    policy: DeltaCompaction | None
    level: Level | None
    spark: Callable[[], SparkSession]
    by: str

    def run(self, manifest: DatasetManifest) -> tuple[CompactionReport, DatasetManifest | None]:
        began = time.perf_counter()
        version = manifest.version
        if version is None:
            return self._idle("nothing", "there is no version to compact yet: its bootstrap is not finished"), None
        plan = plan_compaction(version, self.policy or manifest.declaration.compaction, self.level)
        if plan is None:
            return self._idle("nothing", f"nothing to compact in {_told(version)}"), None
        # The inputs may be replaced, and then discarded, while they are read.
        try:
            with Lease.acquire(self.log.lake, self.log.name, [version.id], holder=f"compaction by {self.by}"):
                try:
                    done = self._build_and_switch(manifest, version, plan, forget=True)
                except _LateChanges:
                    done = self._build_and_switch(manifest, version, plan, forget=False)
        except VersionDiscardedError:  # before it could be leased: somebody compacted and discarded
            done = None
        if done is None:
            what = "another writer replaced these generations first (a compaction, rebuild or erasure)"
            return self._idle("superseded", f"{what}; nothing of this {plan.level} compaction is left"), None
        built, after = done
        assert after.version is not None
        report = CompactionReport(
            dataset=self.log.name,
            action="compacted",
            note=plan.reason,
            level=plan.level,
            version=after.version.id,
            generations=(len(version.generations), len(after.version.generations)),
            rows=(plan.rows, built.generation.rows),
            bytes=(plan.size, built.generation.size),
            counters=built.counters,
            horizon=after.horizon,
            seconds=time.perf_counter() - began,
        )
        return report, after

    def _idle(self, action: Literal["nothing", "superseded"], note: str) -> CompactionReport:
        return CompactionReport(self.log.name, action, note)

    def _build_and_switch(
        self, manifest: DatasetManifest, version: SealedVersion, plan: Plan, *, forget: bool
    ) -> tuple[_Built, DatasetManifest] | None:
        attempt, lake, name = self.log.attempt(), self.log.lake, self.log.name
        try:
            with AttemptRenewal(lake, name, attempt.id, self.by):
                built = self._build(manifest, version, plan, attempt, forget=forget)
                after = self._switch(version, plan, built)
        finally:
            forget_attempt(lake, name, attempt.id)
        return None if after is None else (built, after)

    # -- the output

    def _build(
        self, manifest: DatasetManifest, version: SealedVersion, plan: Plan, attempt: Attempt, *, forget: bool
    ) -> _Built:
        """Write what the generations of the plan come to, as the newest of them: its order to the others stays."""
        what = f"dataset {self.log.name!r}, {plan.level} compaction"
        rows = self._rows(version, plan.generations, what)
        ordered = version.order_by is not None and plan.level == "major"
        horizon = self._horizon(manifest, rows) if ordered and forget else None
        forgotten = max((at for at in (manifest.horizon, horizon) if at is not None), default=None)
        observed: Callable[[], dict[str, int]] | None = None
        if ordered:
            rows, observed = _without_forgotten(rows, version.key, forgotten)
        generation, counters = write_generation(
            self.log.lake,
            attempt,
            plan.generations[-1].id,
            version.layout,
            rows,
            what=what,
            order_by=(*version.key, POSITION, _GENERATION),
            keep_tombstones=plan.level == "minor" or ordered,
            partitioned=True,
        )
        if generation.footer_size > FOOTERS:
            generation = generation.without_footers()
        tombstones = 0
        if observed is not None:
            found = observed()
            tombstones = found["tombstones"]
            counters |= {"superseded": plan.rows - found["keys"], "deleted": found["forgotten"]}
        counters.pop("conflicting", None)
        return _Built(attempt, generation, counters, tombstones, horizon)

    def _rows(self, version: SealedVersion, generations: Sequence[Generation], what: str) -> DataFrame:
        from dagster_adjunct.resources.bucketing.read import bucketed_frame

        rows = bucketed_frame(self.spark(), self.log.lake.store, what, version.layout, generations)
        return rows if version.partition_by else rows.coalesce(1)

    def _horizon(self, manifest: DatasetManifest, rows: DataFrame) -> int | None:
        """Return up to where deletions are forgotten; it never goes back. None where they are kept for ever."""
        from pyspark.sql import functions as F

        kept = manifest.declaration.keep_tombstones
        if kept is None:
            return None
        highest = rows.agg(F.max(POSITION).alias("highest")).collect()[0].highest
        return None if highest is None else int(highest) - kept

    # -- the switch

    def _switch(self, version: SealedVersion, plan: Plan, built: _Built) -> DatasetManifest | None:
        """Commit the output in the place of its inputs, whatever was appended; None where these are not there."""
        known = {generation.folder for generation in version.generations}
        for tried in range(_TRIES):
            commit, fresh = self.log.read()
            if commit is None or fresh is None or not _stand(fresh, plan, built):
                self.log.drop(built.generation)
                return None
            assert fresh.version is not None
            appended = [each for each in fresh.version.generations if each.folder not in known and each.files]
            if built.horizon is not None and appended:
                self._check_late(fresh.version, appended, built)
            after = _replaced(fresh, plan, built, commit.number + 1)
            try:
                self.log.commit(commit, after, by=self.by, commit_id=built.attempt.id)
            except CommitConflictError:
                if tried + 1 == _TRIES:
                    self.log.drop(built.generation)
                    raise
            else:
                return after
        raise AssertionError("unreachable")

    def _check_late(self, version: SealedVersion, appended: Sequence[Generation], built: _Built) -> None:
        from pyspark.sql import functions as F

        rows = self._rows(version, appended, f"dataset {self.log.name!r}, deltas committed meanwhile")
        if not rows.where(F.col(POSITION) <= F.lit(built.horizon)).isEmpty():
            self.log.drop(built.generation)
            raise _LateChanges


def _stand(fresh: DatasetManifest, plan: Plan, built: _Built) -> bool:
    """Whether the manifest serves all inputs still, and nobody takes the output for garbage."""
    served = {generation.folder for generation in fresh.version.generations} if fresh.version else set()
    inputs = {generation.folder for generation in plan.generations}
    return inputs <= served and built.generation.folder not in fresh.doomed


def _replaced(fresh: DatasetManifest, plan: Plan, built: _Built, number: int) -> DatasetManifest:
    """Return the manifest that serves the output instead of its inputs."""
    assert fresh.version is not None
    now = datetime.now(UTC)
    inputs = {generation.folder for generation in plan.generations}
    others = [each for each in fresh.version.generations if each.folder not in inputs and each.files]
    output = [built.generation] if built.generation.files or not others else []
    generations = tuple(sorted((*others, *output), key=lambda generation: generation.id))
    exact = plan.level == "major" and not others
    facts = {
        "id": f"v{number:06d}-{built.attempt.id}",
        "number": number,
        "sealed_at": now,
        "generations": generations,
        "rows": built.generation.rows - built.tombstones if exact else None,
        "counters": built.counters,
    }
    kept = {name: getattr(fresh.version, name) for name in SealedVersion.model_fields}
    version = SealedVersion(**{**kept, **facts})
    horizon = max((at for at in (fresh.horizon, built.horizon) if at is not None), default=None)
    change = Change(action="compact", version=version.id, reason=f"{plan.level}: {plan.reason}")
    return retire(fresh.after(horizon=horizon, change=change), version, now)


def _without_forgotten(
    rows: DataFrame, key: tuple[str, ...], horizon: int | None
) -> tuple[DataFrame, Callable[[], dict[str, int]]]:
    """Return the winner of each key but for tombstones up to the horizon, and the counts once the job has run."""
    from pyspark.sql import Observation, Window
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.schemas.columns import column

    places = Window.partitionBy(*[column(name) for name in key]).orderBy(POSITION, _GENERATION)
    winners = rows.withColumn(_NEWER, F.lead(F.lit(1)).over(places)).where(F.col(_NEWER).isNull()).drop(_NEWER)
    tombstone = F.col(TOMBSTONE)
    gone = tombstone & (F.col(POSITION) <= F.lit(horizon)) if horizon is not None else F.lit(False)
    observed = Observation()

    def count(condition: Column, name: str) -> Column:
        return F.coalesce(F.sum(condition.cast("long")), F.lit(0)).alias(name)

    watched = winners.observe(
        observed,
        F.count(F.lit(1)).alias("keys"),
        count(gone, "forgotten"),
        count(tombstone & ~gone, "tombstones"),
    )
    return watched.where(~gone), lambda: {name: int(value) for name, value in observed.get.items()}


def _told(version: SealedVersion) -> str:
    deltas = len(version.generations) - 1
    return f"version {version.id}, which is a base {'alone' if not deltas else f'and {deltas} delta(s)'}"


_GENERATION = "__gen"

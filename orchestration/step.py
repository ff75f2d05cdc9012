"""The Spark step: one planned application, batch after batch, until it has caught up or met its limits.

    intent    what the batch reads and which dataset versions it meets, committed before anything is read
    work      ranges and versions -> operators -> outputs; each output is idempotent by (application, batch)
    commit    the intent is closed, which is the checkpoint

A crash anywhere leaves either a closed batch or an open intent; the next run runs that intent again as written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from assets import DatasetStore, DatasetView, current_versions
from assets.retention.leases import Lease
from assets.unbounded.freshness import check_fresh
from assets.unbounded.transient import TransientTable, TransientView, is_transient
from orchestration.batchlog import ApplicationState, BatchLog, ClosedBatch, Intent, Range, add_counters, spread
from orchestration.compile import BatchInputs, run_batch
from orchestration.planner import ExecutionPlan
from resources.errors import OffsetOutOfRangeError, StaleDatasetError, VersionDiscardedError
from resources.streams import OffsetRange, SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from assets import DatasetManifest
    from orchestration.application import Application
    from resources.objects import Commit, Lake
    from resources.streams import StreamSystem


_TRIES = 5


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One thing that has just happened to batch number `batch`, or ("caught-up") after it.

    In order: "table" (report) when a dataset that lives for one run was built or has taken changes in, "intent"
    (records, versions), "output" (output) before each output, "outputs" when all are written, "batch" (records so far,
    counters) when its end is committed.
    """

    what: str
    batch: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the event in one line, for logs."""
        if self.what == "caught-up":
            return f"caught up after batch {self.batch}"
        if self.what == "table":
            return str(self.detail["report"].summary())
        said = {
            "intent": "{records:,} records, dataset versions {versions}",
            "output": "writing {output}",
            "outputs": "all outputs written",
            "batch": "committed; {records:,} records so far",
        }[self.what]
        return f"batch {self.batch}: {said.format(**self.detail)}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one run of the step did. Counters are of this run; `state` is the application's after it."""

    batches: int
    caught_up: bool
    counters: dict[str, dict[str, int]]
    versions: dict[str, list[str]]
    seconds: dict[str, float]
    state: ApplicationState

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "state": self.state.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step works with. `run` names who commits; `spark` starts the session when first called.

    `between_batches` is called before each batch is planned but the first of the run: what it brings up to date is met
    by the next batch.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    plan: ExecutionPlan
    spark: Callable[[], SparkSession]
    run: str
    on_event: Callable[[StepEvent], None] = lambda event: None
    max_batches: int | None = None
    between_batches: Callable[[], None] = lambda: None


def run_step(context: StepContext) -> StepReport:
    """Run batches until the inputs are read to the offsets that were upcoming, or the limit is met.

    Raises NoSealedVersionError before reading any input when a dataset marked for bootstrap has no version,
    StaleDatasetError when one is staler than its table allows, and CommitConflict when another run takes the
    application over.
    """
    step = _Step(context)
    try:
        while context.max_batches is None or step.batches < context.max_batches:
            if not step.run_next():
                return step.report(caught_up=True)
        return step.report(caught_up=False)
    finally:
        step.release()


class _Step:
    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._log = BatchLog(context.lake, context.app.name)
        self._commit, self._state = self._log.read()
        self._datasets = {d.name: DatasetStore(context.lake, d) for d in context.app.datasets}
        self._views: dict[tuple[str, str], DatasetView] = {}
        self._manifests: dict[str, DatasetManifest | None] = {}
        self._tables: dict[str, TransientTable] = {}
        self._leases: dict[str, Lease] = {}
        self.batches = 0
        self._counters: dict[str, dict[str, int]] = {}
        self._versions: dict[str, list[str]] = {}
        self._seconds: dict[str, float] = {}

    def report(self, *, caught_up: bool) -> StepReport:
        if caught_up:
            self._context.on_event(StepEvent("caught-up", self._state.batch))
        return StepReport(self.batches, caught_up, self._counters, self._versions, self._seconds, self._state)

    def run_next(self) -> bool:
        """Run one batch; False when there is nothing to read."""
        began = time.monotonic()
        intent = self._state.open
        if intent is None:
            intent = self._plan_batch()
            if intent is None:
                return False
        else:
            # Somebody's crashed batch: it is run again as written, in our name.
            intent = intent.model_copy(update={"run": self._context.run})
            self._hold(intent.versions)
        views = {name: self._view(name, version) for name, version in intent.versions.items()}
        held = self._log.open(self._commit, self._state, intent)
        self._commit, self._state = held, self._state.model_copy(update={"open": intent})
        self._event("intent", intent, records=self._records(intent), versions=intent.versions)
        opened = time.monotonic()
        inputs = BatchInputs(
            ranges={SystemStreamPartition.parse(ssp): OffsetRange(r.start, r.end) for ssp, r in intent.ranges.items()},
            views=views,
            batch=intent.batch,
        )
        counters = run_batch(self._context, inputs, lambda name: self._before_output(held, intent, name))
        worked = time.monotonic()
        seconds = {"intent": opened - began, "work": worked - opened}
        done = ClosedBatch(
            intent=intent,
            closed_at=datetime.now(UTC),
            records=self._records(intent),
            counters=counters,
            seconds=seconds,
        )
        self._event("outputs", intent)
        self._commit, self._state = self._log.close(held, self._state, done)
        self._add(done, time.monotonic() - worked)
        self._event("batch", intent, records=self._state.records, counters=counters)
        return True

    def _records(self, intent: Intent) -> int:
        systems = self._context.systems
        ssps = {ssp: SystemStreamPartition.parse(ssp) for ssp in intent.ranges}
        return sum(
            systems[ssps[name].system].distance(ssps[name], span.start, span.end)
            for name, span in intent.ranges.items()
        )

    def _before_output(self, held: Commit, intent: Intent, name: str) -> None:
        self._log.hold(held)
        for lease in self._leases.values():
            lease.check()
        self._event("output", intent, output=name)

    def _plan_batch(self) -> Intent | None:
        if self.batches:
            self._context.between_batches()
        versions = self._current()
        starts = self._starts()
        ranges = self._ranges(starts)
        if all(span.start == span.end for span in ranges.values()):
            return None
        versions = self._hold_served(versions)
        self._check_fresh()
        versions |= self._read_on()
        return Intent(
            batch=self._state.batch + 1,
            run=self._context.run,
            clock=datetime.now(UTC),
            ranges=ranges,
            versions={dataset.name: versions[dataset.name] for dataset in self._context.app.datasets},
        )

    def _current(self) -> dict[str, str | None]:
        """Return the versions served now, those of a version set from one snapshot of it."""
        app = self._context.app
        stored = [dataset for dataset in app.datasets if dataset.following.persistent]
        found = current_versions(self._context.lake, [each for each in stored if each.name not in app.max_staleness])
        for name in (each.name for each in stored if each.name in app.max_staleness):
            # Version and offsets of one commit: what is found fresh is what the batch meets.
            self._manifests[name] = self._datasets[name].manifest()
            found[name] = self._datasets[name].view_of(self._manifests[name])
        for name, view in found.items():
            if view is not None:
                self._views[(name, view.version)] = view
            elif self._context.app.dataset(name).bootstrap:
                self._datasets[name].require_current(self._context.systems)  # says what it waits for
        return {name: None if view is None else view.version for name, view in found.items()}

    def _check_fresh(self) -> None:
        """Refuse to begin a batch with a stored table that lacks something older than is allowed."""
        for name, manifest in self._manifests.items():
            limit = self._context.app.max_staleness[name]
            if manifest is None or manifest.version is None:
                raise StaleDatasetError(
                    f"dataset {name!r} has taken in nothing yet, and at most {limit} of staleness is allowed.",
                    f"Advance it (materialise its asset, or adjunct dataset advance {name} MODULE:APP).",
                )
            check_fresh(self._context.systems, self._context.app.dataset(name), manifest, limit)

    def _read_on(self) -> dict[str, str | None]:
        """Bring the datasets that live for one run up to date, and return their versions.

        Before the intent, which then names what is known to be readable: a change that can't be applied would keep an
        open batch from ever ending.
        """
        versions: dict[str, str | None] = {}
        limits = self._context.app.max_staleness
        for dataset in self._context.app.datasets:
            if not dataset.following.persistent:
                table = self._table(dataset.name)
                report = table.advance(self._context.spark)
                if report.action != "up-to-date":
                    self._context.on_event(StepEvent("table", self._state.batch + 1, {"report": report}))
                if dataset.name in limits:
                    table.check_fresh(limits[dataset.name])
                versions[dataset.name] = report.version
        return versions

    def _table(self, name: str) -> TransientTable:
        if name not in self._tables:
            last = self._state.last.intent.versions.get(name) if self._state.last else None
            self._tables[name] = TransientTable(self._context.systems, self._context.app.dataset(name), last=last)
        return self._tables[name]

    def _hold_served(self, versions: dict[str, str | None]) -> dict[str, str | None]:
        """Lease these versions, or those that took the place of one that was discarded since; return what is leased."""
        for _ in range(_TRIES):
            try:
                self._hold(versions)
            except VersionDiscardedError:
                versions = self._current()
            else:
                return versions
        self._hold(versions)
        return versions

    def _hold(self, versions: Mapping[str, str | None]) -> None:
        """Lease what this batch reads, before its intent says so; from then on the open intent keeps it as well."""
        for name, version in versions.items():
            held = self._leases.get(name)
            if version is None or is_transient(version) or (held is not None and version in held.versions):
                continue
            try:
                self._leases[name] = Lease.acquire(self._context.lake, name, [version], holder=self._context.run)
            except VersionDiscardedError:
                # An erasure has rewritten what this batch was begun with: the open intent alone keeps it.
                if self._state.open is None:
                    raise
                continue
            if held is not None:
                held.release()

    def release(self) -> None:
        """Let go of the versions that were read."""
        for lease in self._leases.values():
            lease.release()
        for table in self._tables.values():
            table.release()

    def _view(self, name: str, version: str | None) -> DatasetView | TransientView | None:
        if version is None:
            return None
        if is_transient(version):
            return self._table(name).view_of(version, self._context.spark)
        if (name, version) not in self._views:
            self._views[(name, version)] = self._datasets[name].version_of_batch(version)
        return self._views[(name, version)]

    def _starts(self) -> dict[SystemStreamPartition, str]:
        """Return where each input partition goes on; default positions are stored before they are used."""
        starts: dict[SystemStreamPartition, str] = {}
        resolved = False
        for source in self._context.app.inputs.values():
            system_name, _, stream = source.stream.partition(".")
            system = self._context.systems[system_name]
            ssps = system.partitions(stream)
            known = {ssp: self._state.checkpoint.get(str(ssp)) for ssp in ssps}
            fresh = [ssp for ssp, offset in known.items() if offset is None]
            if fresh:
                resolved = True
                choice = source.default_offset or system.info(stream).default_offset
                known |= system.upcoming(fresh) if choice == "upcoming" else system.oldest(fresh)
            starts |= {ssp: offset for ssp, offset in known.items() if offset is not None}
        if resolved:
            checkpoint = self._state.checkpoint | {str(ssp): offset for ssp, offset in starts.items()}
            self._commit = self._log.start(self._commit, self._state, checkpoint, self._context.run)
            self._state = self._state.model_copy(update={"checkpoint": checkpoint})
        return starts

    def _ranges(self, starts: dict[SystemStreamPartition, str]) -> dict[str, Range]:
        """Return this batch's offsets: at most the application's records a batch, shared by lag."""
        systems = self._context.systems
        ends: dict[SystemStreamPartition, str] = {}
        for name in {ssp.system for ssp in starts}:
            mine = [ssp for ssp in starts if ssp.system == name]
            ends |= systems[name].upcoming(mine)
            self._check_retained(systems[name], {ssp: starts[ssp] for ssp in mine})
        lags = {str(ssp): systems[ssp.system].distance(ssp, starts[ssp], ends[ssp]) for ssp in starts}
        shares = spread(lags, self._context.app.max_batch_records)
        return {
            str(ssp): Range(start=starts[ssp], end=systems[ssp.system].advance(ssp, starts[ssp], shares[str(ssp)]))
            for ssp in sorted(starts)
        }

    def _check_retained(self, system: StreamSystem, starts: Mapping[SystemStreamPartition, str]) -> None:
        """Refuse to plan a batch over records that retention has dropped: an intent must be readable."""
        for ssp, oldest in system.oldest(starts).items():
            if system.compare(starts[ssp], oldest) < 0:
                raise OffsetOutOfRangeError(
                    f"{ssp}: application {self._context.app.name!r} goes on at offset {starts[ssp]}, and the oldest "
                    f"that the stream still holds is {oldest}: retention has passed the checkpoint.",
                    "Deliver the lost records again, or run the application under a new name from the oldest offset; "
                    "then give the stream a longer retention.",
                )

    def _add(self, done: ClosedBatch, commit_seconds: float) -> None:
        self.batches += 1
        self._counters = add_counters(self._counters, done.counters)
        for name, version in done.intent.versions.items():
            served = self._versions.setdefault(name, [])
            if version is not None and version not in served:
                served.append(version)
        for stage, value in {**done.seconds, "commit": commit_seconds}.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + value

    def _event(self, what: str, intent: Intent, **detail: Any) -> None:
        self._context.on_event(StepEvent(what, intent.batch, detail))

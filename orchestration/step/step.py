"""The Spark step: one planned application, batch after batch, until it has caught up or met its limits.

    intent    what the batch reads and which dataset versions it meets, committed before anything is read
    work      ranges and versions -> operators -> outputs; each output is idempotent by (application, batch)
    commit    the intent is closed, which is the checkpoint

A crash anywhere leaves either a closed batch or an open intent; the next run runs that intent again as written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.log import (
    BatchLog,
    ClosedBatch,
    Intent,
    Range,
    add_counters,
    spread,
)
from dagster_adjunct.orchestration.batchlog.positions import AppliedStartpoint, Replay
from dagster_adjunct.orchestration.startpoints.coordinator import startpoints_of
from dagster_adjunct.orchestration.startpoints.found_positions import Positions
from dagster_adjunct.orchestration.startpoints.offset_manager import OffsetManager
from dagster_adjunct.orchestration.step.compile import BatchInputs, run_batch
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.dataset_versions import BatchVersions
from dagster_adjunct.orchestration.step.rehearsal import check_outputs
from dagster_adjunct.orchestration.step.report import StepEvent, StepReport
from dagster_adjunct.resources.errors import CommitConflictError, StoreUnavailableError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.spark.errors import adjunct_error
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.assets.versions.report import AdvanceReport
    from dagster_adjunct.resources.objects import Commit
    from dagster_adjunct.resources.schemas.schema import Schema

# Seconds before a batch's work is begun again where the store broke off in the middle of it.
_PAUSES = (1.0, 5.0)
# How often a run begins: another one that was taken over from may come in between, once.
_BEGINNINGS = 3


def run_step(context: StepContext) -> StepReport:
    """Run batches until the inputs are read to the offsets that were upcoming, or the limit is met.

    A batch that a crash left open comes first. Then startpoints are fanned out and resolved, once a run: what is
    requested later waits for the next one. Bounded replays take turns with the main input.

    Raises NoSealedVersionError before reading any input when a dataset marked for bootstrap has no version,
    StaleDatasetError when one is staler than its table allows, and CommitConflictError when another run takes the
    application over. Who was taken over from may commit once more before it notices: who holds the lease then begins
    from that commit.
    """
    for attempt in range(1, _BEGINNINGS + 1):
        step = _Step(context)
        try:
            while context.max_batches is None or step.batches < context.max_batches:
                if not step.run_next():
                    return step.report(caught_up=True)
            return step.report(caught_up=False)
        except CommitConflictError as conflict:
            if step.has_committed or context.still_ours is None or attempt == _BEGINNINGS:
                raise
            context.check()
            text = f"{conflict.problem} This run holds the lease, and begins again from that commit."
            context.on_event(StepEvent("lease", 0, {"text": text}))
        finally:
            step.versions.release()
    raise AssertionError("unreachable")


class _Step:
    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._log = BatchLog(context.lake, context.app.name)
        self._commit, self._state = self._log.read()
        self._found = self._commit
        startpoints = startpoints_of(context.lake, context.app)
        self._offsets = OffsetManager(context.systems, context.app, context.plan, startpoints)
        self._started = False
        self._said: list[str] = []
        self.versions = BatchVersions(
            context.lake, context.systems, context.app, context.spark, context.run, self._table_changed
        )
        self._checked: Mapping[str, Schema | None] | None = None
        self.batches = 0
        self._counters: dict[str, dict[str, int]] = {}
        self._versions: dict[str, list[str]] = {}
        self._seconds: dict[str, float] = {}

    def report(self, *, caught_up: bool) -> StepReport:
        if caught_up:
            self._context.on_event(StepEvent("caught-up", self._state.batch))
        return StepReport(
            self.batches, caught_up, self._counters, self._versions, self._seconds, self._state, tuple(self._said)
        )

    @property
    def has_committed(self) -> bool:
        return self._commit is not self._found

    def run_next(self) -> bool:
        """Run one batch; False when there is nothing to read."""
        began = time.monotonic()
        self._context.check()
        intent = self._state.open
        if intent is None:
            intent = self._plan_batch()
            if intent is None:
                return False
        else:
            # Somebody's crashed batch: it is run again as written, in our name.
            self._offsets.check_open(self._state, intent)
            intent = intent.model_copy(update={"run": self._context.run})
            self.versions.hold(intent.versions, reopened=True)
        views = {name: self.versions.view(name, version, self._state) for name, version in intent.versions.items()}
        self._check_outputs(views)
        held = self._log.open(self._commit, self._state, intent)
        self._commit, self._state = held, self._state.model_copy(update={"open": intent})
        self._event("intent", intent, records=self._records(intent), unit=self._unit, versions=intent.versions)
        opened = time.monotonic()
        inputs = BatchInputs(
            ranges={SystemStreamPartition.parse(ssp): OffsetRange(r.start, r.end) for ssp, r in intent.ranges.items()},
            views=views,
            batch=intent.batch,
            epochs={SystemStreamPartition.parse(ssp): epoch for ssp, epoch in intent.epochs.items()},
            consumed=None
            if intent.replays
            else {SystemStreamPartition.parse(ssp): span.end for ssp, span in intent.ranges.items()},
            identities=self._state.offsets.streams,
            tasks=intent.tasks,
        )
        counters = self._work(held, intent, inputs)
        worked = time.monotonic()
        seconds = {"intent": opened - began, "work": worked - opened}
        done = ClosedBatch(
            intent=intent,
            closed_at=self._context.lake.now(),
            records=self._records(intent),
            counters=add_counters(counters, self._lost_counters(_lost(intent))),
            seconds=seconds,
        )
        self._event("outputs", intent)
        self._context.check()
        before = self._state.offsets
        self._commit, self._state = self._log.close(held, self._state, done)
        # Only now: a crash before this line leaves them fanned out, and the log knows that they were applied.
        self._offsets.remove_applied(intent.startpoints)
        for ssp in intent.startpoints:
            self._say(f"{ssp}: {_words(self._state.offsets.applied[ssp])} applied in batch {intent.batch}")
        for ended in before.replays.keys() - self._state.offsets.replays.keys():
            self._say(f"{before.replays[ended].ssp}: {_words(before.replays[ended])} has ended")
        self._add(done, time.monotonic() - worked)
        self._event("batch", intent, records=self._state.records, unit=self._unit, counters=counters)
        return True

    def _check_outputs(self, views: Mapping[str, VersionReader | TransientVersion | None]) -> None:
        """Refuse what outputs can't take before a batch is begun over it: once a run, and for other dataset columns."""
        met = {name: None if view is None else view.schema for name, view in views.items()}
        if met != self._checked:
            check_outputs(self._context, views)
            self._checked = met

    @property
    def _unit(self) -> str:
        """What the counts of input are of: offsets have no records behind them everywhere in systems with holes."""
        systems = {split_stream_name(stream)[0] for stream in self._context.app.inputs}
        return "records" if all(self._context.systems[name].counts_unread for name in systems) else "offsets"

    def _records(self, intent: Intent) -> int:
        systems = self._context.systems
        ssps = {ssp: SystemStreamPartition.parse(ssp) for ssp in intent.ranges}
        return sum(
            systems[ssps[name].system].distance(ssps[name], span.start, span.end)
            for name, span in intent.ranges.items()
        )

    def _work(self, held: Commit, intent: Intent, inputs: BatchInputs) -> dict[str, dict[str, int]]:
        """Do the batch's work; where the store broke off, again from its beginning: what is written already stays."""
        for pause in (*_PAUSES, None):
            try:
                return run_batch(self._context, inputs, lambda name: self._before_output(held, intent, name))
            except Exception as error:
                ours = adjunct_error(error)
                if pause is None or not isinstance(ours, StoreUnavailableError):
                    raise
                self._event("again", intent, text=f"{ours.problem} The batch is begun again in {pause:g} s")
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _before_output(self, held: Commit, intent: Intent, name: str) -> None:
        self._context.check()
        self._log.hold(held)
        self.versions.check_leases()
        self._event("output", intent, output=name)

    def _plan_batch(self) -> Intent | None:
        if self.batches:
            self._context.between_batches()
        versions = self.versions.current()
        if not self._started:
            self._start()
        found = self._offsets.positions(self._state)
        planned = self._plan_replay(found) or self._plan_main(found)
        if planned is None:
            return None
        versions = self.versions.hold_served(versions)
        self.versions.check_fresh()
        versions |= self.versions.read_on(self._state)
        return planned.model_copy(
            update={"versions": {dataset.name: versions[dataset.name] for dataset in self._context.app.datasets}}
        )

    def _start(self) -> None:
        """Fan out and resolve, and store every position before anything is read from it."""
        start = self._offsets.start(self._state)
        state = self._state
        if (start.checkpoint, start.offsets) != (state.checkpoint, state.offsets):
            note = "; ".join(start.carried) or None
            self._commit = self._log.start(
                self._commit, state, start.checkpoint, self._context.run, start.offsets, note
            )
            self._state = state.model_copy(update={"checkpoint": start.checkpoint, "offsets": start.offsets})
        self._offsets.remove_done(start)
        self._started = True
        for text in start.texts():
            self._say(text)

    def _plan_replay(self, found: Positions) -> Intent | None:
        """Return a batch of the bounded replays under way; not two in a row while the main input has records."""
        state = self._state
        replays = self._offsets.replays(state) if state.offsets.replays else {}
        if not replays:
            return None
        just = state.last is not None and state.last.intent.replays and state.last.intent.batch == state.batch
        if just and any(not self._same(ssp, found.starts[ssp], found.ends[ssp]) for ssp in found.starts):
            return None
        spans = {ssp: (replay.next, replay.until) for ssp, replay in replays.items()}
        ranges = self._shared(spans)
        chosen = {str(ssp): replay for ssp, replay in replays.items() if not self._is_empty(ssp, ranges[str(ssp)])}
        return self._intent(
            {ssp: ranges[ssp] for ssp in chosen},
            replays={ssp: replay.id for ssp, replay in chosen.items()},
            epochs={ssp: replay.epoch for ssp, replay in chosen.items()},
        )

    def _plan_main(self, found: Positions) -> Intent | None:
        offsets = self._state.offsets
        startpoints = {ssp: start.id for ssp, start in offsets.resolved.items() if _is_read(ssp, found.starts)}
        ranges = self._shared({ssp: (found.starts[ssp], found.ends[ssp]) for ssp in sorted(found.starts)})
        if all(self._is_empty(ssp, ranges[str(ssp)]) for ssp in found.starts):
            if startpoints or found.lost:
                self._settle(found, startpoints)
            return None
        epochs = {ssp: offsets.next_epoch(ssp) if ssp in startpoints else offsets.epochs.get(ssp, 0) for ssp in ranges}
        for text in found.texts():
            self._context.on_event(StepEvent("lost", self._state.batch + 1, {"text": text}))
        return self._intent(
            ranges,
            startpoints=startpoints,
            epochs={ssp: epoch for ssp, epoch in epochs.items() if epoch},
            lost={str(ssp): Range(start=span.start, end=span.end) for ssp, span in found.lost.items()},
        )

    def _settle(self, found: Positions, startpoints: dict[str, str]) -> None:
        """Commit positions at which there is nothing to read yet: the startpoints there are applied with that."""
        state, now = self._state, self._context.lake.now()
        checkpoint = state.checkpoint | {str(ssp): offset for ssp, offset in found.starts.items()}
        offsets = state.offsets.with_applied(startpoints, None, now)
        note = "; ".join(["positions moved, nothing to read there yet", *found.texts()])
        lost = self._lost_counters(found.lost)
        totals = add_counters(state.totals, lost)
        after = state.model_copy(update={"totals": totals})
        self._commit = self._log.start(self._commit, after, checkpoint, self._context.run, offsets, note)
        self._state = after.model_copy(update={"checkpoint": checkpoint, "offsets": offsets})
        self._counters = add_counters(self._counters, lost)
        self._offsets.remove_applied(startpoints)
        for ssp in startpoints:
            self._say(f"{ssp}: {_words(offsets.applied[ssp])} applied; there is nothing to read yet")
        for text in found.texts():
            self._context.on_event(StepEvent("lost", state.batch, {"text": text}))

    def _intent(self, ranges: dict[str, Range], **more: Any) -> Intent:
        return Intent(
            batch=self._state.batch + 1,
            run=self._context.run,
            clock=self._context.lake.now(),
            ranges=ranges,
            versions={},
            tasks=len(self._context.plan.tasks)
            if any(each.broadcast for each in self._context.app.inputs.values())
            else None,
            **more,
        )

    def _shared(self, spans: Mapping[SystemStreamPartition, tuple[str, str]]) -> dict[str, Range]:
        """Return this batch's part of these offsets: at most the application's records a batch, shared by lag."""
        systems = self._context.systems
        lags = {str(ssp): systems[ssp.system].distance(ssp, start, end) for ssp, (start, end) in spans.items()}
        shares = spread(lags, self._context.app.max_batch_records)
        return {
            str(ssp): Range(
                start=start,
                # The end itself, not its own way of writing it: a replay has ended when it is there.
                end=end
                if shares[str(ssp)] == lags[str(ssp)]
                else systems[ssp.system].advance(ssp, start, shares[str(ssp)]),
            )
            for ssp, (start, end) in spans.items()
        }

    def _is_empty(self, ssp: SystemStreamPartition, span: Range) -> bool:
        return self._same(ssp, span.start, span.end)

    def _same(self, ssp: SystemStreamPartition, one: str, other: str) -> bool:
        """Whether two offsets are one: only their system can tell."""
        return self._context.systems[ssp.system].compare(one, other) == 0

    def _lost_counters(self, lost: Mapping[SystemStreamPartition, OffsetRange]) -> dict[str, dict[str, int]]:
        counters: dict[str, dict[str, int]] = {}
        for ssp, span in lost.items():
            count = self._context.systems[ssp.system].distance(ssp, span.start, span.end)
            counters = add_counters(counters, {ssp.qualified_stream: {"lost_offsets": count}})
        return counters

    def _say(self, text: str) -> None:
        self._said.append(text)
        self._context.on_event(StepEvent("startpoint", self._state.batch, {"text": text}))

    def _table_changed(self, report: AdvanceReport) -> None:
        self._context.on_event(StepEvent("table", self._state.batch + 1, {"report": report}))

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


def _lost(intent: Intent) -> dict[SystemStreamPartition, OffsetRange]:
    return {SystemStreamPartition.parse(ssp): OffsetRange(span.start, span.end) for ssp, span in intent.lost.items()}


def _is_read(ssp: str, starts: Mapping[SystemStreamPartition, str]) -> bool:
    return SystemStreamPartition.parse(ssp) in starts


def _words(start: AppliedStartpoint | Replay) -> str:
    what = "replay from" if isinstance(start, Replay) else "startpoint"
    return f"{what} {start.position} ({start.by}: {start.reason}), epoch {start.epoch},"

"""The batch log of an application: intents, checkpoints and their history, behind one pointer in
the lake.

Each batch commits twice: its intent before anything is read, and its close after every output is
written. The close is the checkpoint, which alone says where to continue. An intent that a crash
left open is repeated exactly as logged, so that the same input is joined with the same versions and
gives the same output.

A startpoint passes through these states:

    request -> fanned out -> resolved (offset stored, nothing read yet) -> applied (by a commit of
    offsets)
                                     `-> with an end: a replay, a cursor next to the main position

Each applied startpoint, and each replay, opens a new epoch of its partition. Records read from
there on carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from pydantic import Field as Default
from pydantic import ValidationError

from dagster_adjunct.assets.reading.change_streams import followed_dataset
from dagster_adjunct.orchestration.batch_log.event_times import TimeState
from dagster_adjunct.orchestration.batch_log.intent import (
    MAX_SKIPPED,
    Epochs,
    Intent,
    Offsets,
    Partition,
    Ranges,
    ReadVersions,
    Spans,
    WaitState,
    cut_out,
    of_stream,
    without_stream,
)
from dagster_adjunct.orchestration.operators.stream_facts import JoinVersions
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.documents import StoredDocument, first_validation_problem
from dagster_adjunct.resources.objects.commit_log import Commit, retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.times import subtract_span
from dagster_adjunct.resources.validation import validated

# How many requests are remembered for a partition: they expire, so one that is written again is
# among the last.
_MAX_TAKEN = 20
# How often a commit that other commits precede is tried, at most.
_MAX_ATTEMPTS = 5


class RequestedPosition(StoredDocument):
    """A position that somebody requested; `position` describes it, as in "timestamp
    2026-01-02T00:00:00+00:00".
    """

    id: str
    position: str
    by: str
    reason: str


class ResolvedStartpoint(RequestedPosition):
    """A startpoint with the `offset` at which it starts, stored before anything is read from there.

    `id` is that of its request, `stream` is the identity of the stream. With `force`, what is
    restated from there has no limits.
    """

    ssp: Partition
    stream: str | None
    offset: str
    resolved_at: datetime
    force: bool = False

    def is_of(self, request: str, stream: str | None) -> bool:
        """Whether it is of this request, and of the stream with this identity."""
        return self.id == request and self.stream == stream


class AppliedStartpoint(RequestedPosition):
    """The latest startpoint that a commit of offsets applied to a partition, and the epoch that it
    opened.

    `batch` is the first batch that started there; None where there was nothing to read yet.
    """

    offset: str
    epoch: int
    batch: int | None
    applied_at: datetime

    def describe(self, ssp: SystemStreamPartition) -> str:
        """Return a description of this startpoint of a partition, to be followed by a verb."""
        return f"{ssp}: startpoint {self.position} ({self.by}: {self.reason}), epoch {self.epoch},"


class Replay(RequestedPosition):
    """A bounded replay of one partition: it reads [`start`, `until`) again, and has reached `next`.

    `versions` says which dataset versions its records are joined with; for "recorded" the plan
    `recorded` lists them.
    """

    ssp: Partition
    stream: str | None
    epoch: int
    start: str
    next: str
    until: str
    began_at: datetime
    versions: JoinVersions
    recorded: str | None = None

    def describe(self) -> str:
        """Return a description of the replay, to be followed by a verb."""
        return (
            f"{self.ssp}: replay from {self.position} ({self.by}: {self.reason}), epoch"
            f" {self.epoch},"
        )


def replay_id(ssp: SystemStreamPartition, startpoint_id: str) -> str:
    """Return the id of the replay that a bounded request starts on a partition; one request may be
    for several partitions.
    """
    return f"{startpoint_id}@{ssp}"


class AbandonedEnds(StoredDocument):
    """The ends of what abandoned batches read of a partition of changes of a dataset, in the order
    of offsets; `startpoint` is the id of the one at which they began, None for the checkpoint.

    Outputs may have what these batches sent, and a change that was taken back later is in no range
    that goes past their ends. So batches stop there.
    """

    startpoint: str | None
    ends: tuple[str, ...]


class OpenedEpochs(StoredDocument):
    """The epochs of partitions, both without zeros: those of the `main` position, and the `highest`
    ones that were ever opened, by replays and restatements too.
    """

    main: dict[Partition, int] = Default(default_factory=dict)
    highest: dict[Partition, int] = Default(default_factory=dict)

    def next_of(self, ssp: SystemStreamPartition) -> int:
        """Return the epoch that the next startpoint of this partition opens."""
        return self.highest.get(ssp, 0) + 1

    def with_main(self, epochs: Epochs) -> OpenedEpochs:
        """Return the epochs after the main position has opened these."""
        opened = self.with_opened(epochs)
        return opened.model_copy(update={"main": {**self.main, **epochs}})

    def with_opened(self, epochs: Epochs) -> OpenedEpochs:
        """Return the epochs after other reads than those of the main position have opened these."""
        highest = dict(self.highest)
        for ssp, epoch in epochs.items():
            highest[ssp] = max(epoch, highest.get(ssp, 0))
        return self.model_copy(update={"highest": highest})

    def carry_over(self, stream: str, partitions: Iterable[SystemStreamPartition]) -> OpenedEpochs:
        """Return the epochs after the stream was repartitioned into these partitions: all of them
        have the highest epoch that any partition had.
        """
        partitions = tuple(partitions)
        main = _spread(self.main, stream, partitions)
        return OpenedEpochs(main=main, highest=_spread(self.highest, stream, partitions))


def _spread(epochs: Epochs, stream: str, partitions: Iterable[SystemStreamPartition]) -> Epochs:
    """Return the epochs if these partitions of a stream all have the highest that any of its
    partitions has.
    """
    highest = max(of_stream(epochs, stream).values(), default=0)
    spread = without_stream(epochs, stream)
    if highest:
        spread |= dict.fromkeys(partitions, highest)
    return spread


class OffsetState(StoredDocument):
    """The positions of an application besides its checkpoint, by partition.

    `streams` are the identities of the input streams that the checkpoint belongs to. `replays` are
    those under way, by id; `begun` has the ids of replays that began and whose requests may still
    be fanned out. `taken` has the ids of the latest requests that were applied or began a replay:
    if one is written again, it is not applied again. `furthest` has the end of all that the main
    position has read, where it was moved before. `abandoned` has the offsets at which batches have
    to end.

    `skipped` are the spans [from, to) that the main position has passed without reading them, of
    inputs whose results follow later changes of datasets. `joined` has, by dataset,
    what batches have read since the last restatement, and `restated` the time of the last
    one, by dataset.
    """

    streams: dict[str, str] = Default(default_factory=dict)
    resolved: dict[Partition, ResolvedStartpoint] = Default(default_factory=dict)
    applied: dict[Partition, AppliedStartpoint] = Default(default_factory=dict)
    epochs: OpenedEpochs = OpenedEpochs()
    replays: dict[str, Replay] = Default(default_factory=dict)
    begun: frozenset[str] = frozenset()
    taken: dict[Partition, tuple[str, ...]] = Default(default_factory=dict)
    furthest: dict[Partition, str] = Default(default_factory=dict)
    abandoned: dict[Partition, AbandonedEnds] = Default(default_factory=dict)
    skipped: dict[Partition, Spans] = Default(default_factory=dict)
    joined: dict[str, tuple[ReadVersions, ...]] = Default(default_factory=dict)
    restated: dict[str, datetime] = Default(default_factory=dict)

    def has_begun(self, ssp: SystemStreamPartition, startpoint_id: str) -> bool:
        """Return whether this startpoint is the latest one applied to the partition, or has started
        its replay.
        """
        applied = self.applied.get(ssp)
        if applied is not None and applied.id == startpoint_id:
            return True
        return replay_id(ssp, startpoint_id) in self.begun

    def has_taken(self, ssp: SystemStreamPartition, startpoint_id: str) -> bool:
        """Return whether a commit has applied this startpoint of a partition, or has started its
        replay.
        """
        if startpoint_id in self.taken.get(ssp, ()):
            return True
        return self.has_begun(ssp, startpoint_id)

    def with_applied(self, startpoints: Offsets, batch: int | None, at: datetime) -> OffsetState:
        """Return the state after a commit of offsets that applied these startpoints (id by
        partition): each opens an epoch of its partition. `batch` is the one that made the commit,
        None if none did.

        One that is no longer the resolved startpoint of its partition changes nothing.
        """
        applied = dict(self.applied)
        epochs = {}
        resolved = dict(self.resolved)
        taken = []
        for ssp, startpoint_id in startpoints.items():
            start = resolved.get(ssp)
            if start is None or start.id != startpoint_id:
                continue
            del resolved[ssp]
            taken.append((ssp, start.id))
            epoch = self.epochs.next_of(ssp)
            epochs[ssp] = epoch
            about = start.model_dump(include={"id", "position", "offset", "by", "reason"})
            applied[ssp] = AppliedStartpoint(**about, epoch=epoch, batch=batch, applied_at=at)
        left = {ssp: each for ssp, each in self.abandoned.items() if ssp not in startpoints}
        return self.model_copy(
            update={
                "resolved": resolved,
                "applied": applied,
                "epochs": self.epochs.with_main(epochs),
                "taken": self._add_taken(taken),
                "abandoned": left,
            }
        )

    def with_replays(self, replays: Iterable[Replay]) -> OffsetState:
        """Return the state with more replays, whose epochs are opened; a replay of no offsets
        has ended already.
        """
        under_way = dict(self.replays)
        opened = {}
        begun = set(self.begun)
        taken = []
        for replay in replays:
            begun.add(replay.id)
            request_id = replay.id.removesuffix(f"@{replay.ssp}")  # see replay_id
            taken.append((replay.ssp, request_id))
            if replay.start != replay.until:
                under_way[replay.id] = replay
                opened[replay.ssp] = replay.epoch
        return self.model_copy(
            update={
                "replays": under_way,
                "epochs": self.epochs.with_opened(opened),
                "begun": frozenset(begun),
                "taken": self._add_taken(taken),
            }
        )

    def with_abandoned(self, epochs: Epochs, replays: Offsets) -> OffsetState:
        """Return the state after a batch of these epochs was abandoned: its records are read again,
        in higher epochs.

        Outputs may have results of the batch already; the epochs tell these from the repeated ones.
        `replays` are the ids of the replays that the batch read, by partition.
        """
        opened = self.epochs.with_opened(epochs)
        main = {}
        replayed = {}
        under_way = dict(self.replays)
        for ssp in epochs:
            next_epoch = opened.next_of(ssp)
            replay = replays.get(ssp)
            if replay is not None:
                replayed[ssp] = next_epoch
                if replay in under_way:
                    under_way[replay] = under_way[replay].model_copy(update={"epoch": next_epoch})
            elif ssp not in self.resolved:  # else its startpoint opens the next epoch
                main[ssp] = next_epoch
        opened = opened.with_main(main).with_opened(replayed)
        return self.model_copy(update={"epochs": opened, "replays": under_way})

    def abandoned_ends(self, ssp: SystemStreamPartition, startpoint: str | None) -> tuple[str, ...]:
        """Return the offsets at which batches that begin at a startpoint, or with None at the
        checkpoint, have to end; () if they may end anywhere.
        """
        abandoned = self.abandoned.get(ssp)
        if abandoned is None or abandoned.startpoint != startpoint:
            return ()
        return abandoned.ends

    def with_abandoned_ends(self, ranges: Ranges, startpoints: Offsets) -> OffsetState:
        """Return the state after a batch of these ranges of changes of datasets was abandoned,
        which began at these startpoints (ids), or else at the checkpoint.
        """
        abandoned = dict(self.abandoned)
        for ssp, span in ranges.items():
            startpoint = startpoints.get(ssp)
            known = self.abandoned_ends(ssp, startpoint)
            ends = tuple(dict.fromkeys((span.end, *known)))
            abandoned[ssp] = AbandonedEnds(startpoint=startpoint, ends=ends)
        return self.model_copy(update={"abandoned": abandoned})

    def with_reached(
        self, before: OffsetState, reached: Offsets, startpoints: Offsets
    ) -> OffsetState:
        """Return the state after a batch that reached these offsets: of the ends at which batches
        have to stop (`abandoned`), those that are left.

        `startpoints` are the ids of those that the batch applied, and `before` was the state before
        it.
        """
        abandoned = dict(self.abandoned)
        for ssp, reached_end in reached.items():
            ends = before.abandoned_ends(ssp, startpoints.get(ssp))
            left = tuple(end for end in ends if end != reached_end)
            abandoned.pop(ssp, None)
            if left:
                abandoned[ssp] = AbandonedEnds(startpoint=None, ends=left)
        return self.model_copy(update={"abandoned": abandoned})

    def with_joined(self, intent: Intent, *, done: bool = True) -> OffsetState:
        """Return the state after a batch that read the versions of datasets in its intent.

        If it has restated results and is `done`, no results are left that were made of versions
        before.
        """
        joined = dict(self.joined)
        if intent.restating is not None and done:
            for name in intent.restating.datasets:
                joined.pop(name, None)
        for name, read in intent.joined.restated.items():
            before = list(joined.get(name, ()))
            if read in before:
                continue
            last_bases = [versions.base for versions in before[-2:]]
            if read.base is not None and last_bases == [read.base, read.base]:
                before.pop()  # of versions with one base, the first and the last have all changes
            joined[name] = (*before, read)
        return self.model_copy(update={"joined": joined})

    def with_restated(self, intent: Intent, at: datetime) -> OffsetState:
        """Return the state after a batch that restated results; unchanged if it did not."""
        if intent.restating is None:
            return self
        restated = {**self.restated, **dict.fromkeys(intent.restating.datasets, at)}
        epochs = self.epochs.with_opened(intent.epochs)
        return self.model_copy(update={"epochs": epochs, "restated": restated})

    def with_reading(self, before: Offsets, ranges: Ranges) -> OffsetState:
        """Return the state after records in these ranges were read.

        The main position was at the offsets `before`; it has skipped the offsets from there to the
        ranges. Without `before`, as for replays, nothing is skipped. Spans that were skipped
        earlier and are read now are no longer among them.
        """
        skipped = dict(self.skipped)
        for ssp, span in ranges.items():
            has_numbers = span.start.isdecimal() and span.end.isdecimal()
            is_of_changes = followed_dataset(ssp.qualified_stream) is not None
            if not has_numbers or is_of_changes:  # results of such a stream are not restated
                continue
            start = int(span.start)
            end = int(span.end)
            spans = list(skipped.get(ssp, ()))
            if ssp in before:
                spans.append((int(before[ssp]), start))
            skipped[ssp] = tuple(sorted(set(cut_out(spans, start, end)))[-MAX_SKIPPED:])
        not_empty = {ssp: spans for ssp, spans in skipped.items() if spans}
        return self.model_copy(update={"skipped": not_empty})

    def with_taken_back(
        self, startpoints: Sequence[tuple[SystemStreamPartition, str]]
    ) -> OffsetState:
        """Return the state in which these startpoints (partition and id) are not applied any more.

        Their ids count as taken, so that a run or a fan-out that still has them drops them.
        """
        resolved = dict(self.resolved)
        for ssp, startpoint_id in startpoints:
            found = resolved.get(ssp)
            if found is not None and found.id == startpoint_id:
                del resolved[ssp]
        taken = self._add_taken(startpoints)
        return self.model_copy(update={"resolved": resolved, "taken": taken})

    def _add_taken(
        self, ids: Iterable[tuple[SystemStreamPartition, str]]
    ) -> dict[SystemStreamPartition, tuple[str, ...]]:
        """Return `taken` with these ids, by partition; the oldest ids of a partition with more than
        _MAX_TAKEN are dropped.
        """
        taken = dict(self.taken)
        for ssp, newest in ids:
            taken[ssp] = (*taken.get(ssp, ()), newest)[-_MAX_TAKEN:]
        return taken

    def with_replayed(self, ends: Mapping[str, str]) -> OffsetState:
        """Return the state after a batch that advanced these replays (by id) to these offsets.
        Replays that have reached their end are removed.
        """
        replays = dict(self.replays)
        for replay_id, end in ends.items():
            replay = replays.pop(replay_id, None)
            if replay is not None and end != replay.until:
                replays[replay_id] = replay.model_copy(update={"next": end})
        return self.model_copy(update={"replays": replays})


Counters = dict[str, dict[str, int]]
"""Numbers by the name of an output or join, then by the name of the counter."""
KIND = "application"
NAMES = "applications/_names"
"""The folder in the lake with an empty object for each application that has a batch log."""


class ClosedBatch(StoredDocument):
    """What one batch did: its intent, the number of input records, the counters of each output and
    join, and the time that each stage took.
    """

    intent: Intent
    closed_at: datetime
    records: int
    counters: Counters
    seconds: dict[str, float]


class RenamedNames(StoredDocument):
    """The other names of a renamed application: outputs know it as `writes_as`. The log of the
    former name has the new one in `renamed_to`.
    """

    writes_as: str | None = None
    renamed_to: str | None = None


@validated
class ApplicationState(StoredDocument):
    """The whole state of an application.

    `checkpoint` is the next offset to read of each stream partition; `records` and `totals` sum up
    the input records and counters of all closed batches. `given_up` is the number of the abandoned
    batch before the next one, which reads its records again: local tables remove what it wrote.
    `times` are the event times of the inputs. `names` are set after a rename. `note` says what else
    there is to know of this commit, such as its purpose if no batch made it.
    """

    checkpoint: dict[Partition, str] = Default(default_factory=dict)
    batch: int = 0
    records: int = 0
    open: Intent | None = None
    last: ClosedBatch | None = None
    totals: Counters = Default(default_factory=dict)
    offsets: OffsetState = OffsetState()
    given_up: int | None = None
    times: TimeState = TimeState()
    waits: WaitState = WaitState()
    names: RenamedNames = RenamedNames()
    note: str | None = None

    def has_begun(self, ssp: SystemStreamPartition, startpoint_id: str) -> bool:
        """Return whether a batch has applied the startpoint of a partition, or the open batch will.

        It can't be stopped any more then.
        """
        if self.offsets.has_begun(ssp, startpoint_id):
            return True
        return self.open is not None and self.open.startpoints.get(ssp) == startpoint_id

    @property
    def has_just_read_again(self) -> bool:
        """Whether the batch before the next one was a bounded replay or a restatement."""
        if self.last is None or self.last.intent.batch != self.batch:
            return False
        return self.last.intent.reads_again

    def has_position_in(self, stream: str) -> bool:
        """Return whether the checkpoint has partitions of this stream."""
        return any(ssp.qualified_stream == stream for ssp in self.checkpoint)


class LoggedState(NamedTuple):
    """A commit of the batch log (None before the first), and the state of the application in it."""

    commit: Commit | None
    state: ApplicationState


class BatchLog:
    """The batch log of one application in one lake.

    Every change is a compare-and-swap on the application's pointer, from the commit that it was
    decided over. If another run commits in between, the change fails with CommitConflictError and
    has no effect. `commit`, `open` and `close` return the commit and the state that they have
    stored.
    """

    def __init__(self, lake: Lake, application: str) -> None:
        self._lake = lake
        self._application = application
        self._log = lake.commit_log(lake.application_prefix(application), KIND)

    def read(self) -> LoggedState:
        """Return the latest commit and its state (an empty state before the first)."""
        commit = self._log.current()
        return LoggedState(commit, self._parse(commit))

    def commit(
        self,
        logged: LoggedState,
        state: ApplicationState,
        *,
        by: str,
        note: str | None = None,
        checks: Sequence[Callable[[], object]] = (),
    ) -> LoggedState:
        """Commit this state, with a `note` on what the commit does besides a batch's work.

        If one of `checks` raises, nothing is committed. Raises CommitConflictError if another run
        has committed meanwhile.
        """
        if logged.commit is None:
            self._register_name()
        state = state.model_copy(update={"note": note})
        try:
            commit = self._log.commit(
                logged.commit, state.model_dump(mode="json"), by=by, checks=checks
            )
            return LoggedState(commit, state)
        except errors.CommitConflictError as conflict:
            raise self._taken_over_error(self._log.current()) from conflict

    def open(self, logged: LoggedState, intent: Intent) -> LoggedState:
        """Commit an intent: a new one, or an open one that `intent.run` resumes."""
        return self.commit(logged, logged.state.model_copy(update={"open": intent}), by=intent.run)

    def close(
        self,
        logged: LoggedState,
        done: ClosedBatch,
        times: TimeState | None = None,
        checks: Sequence[Callable[[], object]] = (),
    ) -> LoggedState:
        """Commit the end of a batch, whose end offsets become the checkpoint.

        `times` are the event times after it, if they change. `checks` may prevent it, by raising.
        """
        state = logged.state
        intent = done.intent
        reached = _apply_batch(state, intent, done.closed_at)
        if intent.reads_again:  # next to the main input, where records go on waiting
            waits = state.waits
        else:
            passed = state.waits.passed | intent.joined.passed
            waits = WaitState(passed=passed, held=intent.left.held)
        closed = ApplicationState(
            checkpoint=reached.checkpoint,
            batch=intent.batch,
            records=state.records + done.records,
            last=done,
            totals=add_counters(state.totals, done.counters),
            offsets=reached.offsets,
            times=times or state.times,
            waits=waits,
            names=state.names,
        )
        note = None
        if intent.lost.offsets:
            lost = []
            for ssp, span in sorted(intent.lost.offsets.items()):
                lost.append(f"{ssp} from {span.start} up to {span.end}")
            note = f"lost to retention: {', '.join(lost)}"
        return self.commit(logged, closed, by=intent.run, note=note, checks=checks)

    def abandon(self, *, reason: str, by: str, skip: bool) -> Intent:
        """Abandon the open batch, so that the next run plans a new one; return its intent.

        The number of the batch is not used again. Its records are read again in another batch, in a
        higher epoch: an output that has them already gets them twice, except for local tables, from
        which the next run removes what the batch wrote. With `skip`, the batch counts
        as read instead, and what no output has yet is skipped. Raises ConfigurationError if no
        batch is open or no reason is given, and CommitConflictError.
        """
        what = f"the open batch of application {self._application!r}"
        require_reason(reason, what, "abandoned", application=self._application)
        logged = self.read()
        state = logged.state
        intent = state.open
        if intent is None:
            raise errors.ConfigurationError(
                f"application {self._application!r} has no open batch to abandon.",
                f"See its state: adjunct checkpoint show {self._application}.",
                application=self._application,
            )
        note = f"batch {intent.batch} {'skipped' if skip else 'abandoned'}: {reason}"
        update: dict[str, object] = {"open": None, "batch": intent.batch}
        if skip:
            reached = _apply_batch(state, intent, self._lake.now())
            update["checkpoint"] = reached.checkpoint
            update["offsets"] = reached.offsets
            update["given_up"] = None  # the run that opened this batch has undone the one before
        else:
            offsets = state.offsets.with_joined(intent, done=False)
            if intent.restating is not None:
                # The next run plans a restatement anew, in later epochs.
                epochs = offsets.epochs.with_opened(intent.epochs)
                update["offsets"] = offsets.model_copy(update={"epochs": epochs})
            else:
                update["offsets"] = _give_up(offsets, intent)
            update["given_up"] = intent.batch
        self.commit(logged, state.model_copy(update=update), by=by, note=note)
        return intent

    def take_back(
        self, startpoints: Collection[tuple[SystemStreamPartition, str]], *, reason: str, by: str
    ) -> LoggedState:
        """Take back startpoints (partition and id), except those that have begun; return the state.

        A run that has read them, and has not committed a batch with them, meets a conflict at its
        next commit. It starts again without them. Before the first commit of the application
        nothing is committed. Raises CommitConflictError if other commits come first every time.
        """

        def decide() -> Callable[[], LoggedState]:
            """Return the function that commits the state without those that have not begun now; one
            that does nothing if all have.
            """
            logged = self.read()
            state = logged.state
            not_begun = []
            for ssp, startpoint_id in startpoints:
                if not state.has_begun(ssp, startpoint_id):
                    not_begun.append((ssp, startpoint_id))
            if not not_begun or logged.commit is None:
                return lambda: logged
            after = state.model_copy(update={"offsets": state.offsets.with_taken_back(not_begun)})
            note = f"startpoints taken back: {reason}"
            return partial(self.commit, logged, after, by=by, note=note)

        return retry_conflicts(decide, attempts=_MAX_ATTEMPTS)

    def cancel_replays(self, ids: Collection[str], *, reason: str, by: str) -> list[Replay]:
        """Stop these bounded replays where they are; return those that were under way, [] if none
        was.

        Raises ConfigurationError while a batch of one of them is open, and CommitConflictError.
        """
        logged = self.read()
        state = logged.state
        left = dict(state.offsets.replays)
        stopped = [left.pop(key) for key in sorted(left.keys() & set(ids))]
        if not stopped:
            return []
        if state.open is not None and set(ids) & set(state.open.replays.values()):
            partitions = ", ".join(str(replay.ssp) for replay in stopped)
            raise errors.ConfigurationError(
                f"batch {state.open.batch} of application {self._application!r} is reading a replay"
                f" on {partitions}.",
                "Try again after the batch, or abandon it: adjunct checkpoint abandon"
                f" {self._application} --reason ….",
                application=self._application,
            )
        offsets = state.offsets.model_copy(update={"replays": left})
        after = state.model_copy(update={"offsets": offsets})
        self.commit(logged, after, by=by, note=f"replays cancelled: {reason}")
        return stopped

    def continue_from(self, old: str, *, by: str, note: str) -> None:
        """Begin with the history and the state of the application formerly called `old`.

        Safe to repeat until it has returned. Raises CommitConflictError if this log has commits of
        its own.
        """
        old_log = BatchLog(self._lake, old)
        state = old_log.read().state
        # Outputs know the application by its first name, however often it is renamed.
        names = RenamedNames(writes_as=state.names.writes_as or old)
        renamed = state.model_copy(update={"names": names, "note": note})
        self._register_name()
        self._log.continue_from(old_log._log, renamed.model_dump(mode="json"), by=by)

    def check_not_superseded(self, logged: LoggedState) -> None:
        """Raise CommitConflictError if another run has committed since: it owns the batch now.

        Called before each output, so that a run that was presumed dead stops writing as early as
        possible.
        """
        now = self._log.current()
        mine = logged.commit
        if now is None or mine is None or now.id != mine.id:
            raise self._taken_over_error(now)

    def history(self, limit: int | None) -> Iterator[tuple[Commit, ApplicationState]]:
        """Yield commits from the latest to the oldest, each with its state."""
        for commit in self._log.history(limit):
            yield commit, self._parse(commit)

    def forget(self, retention: timedelta) -> None:
        """Delete commits that were made more than `retention` before the latest one, but keep the
        last MANIFESTS_KEPT.

        From then on the history ends with the oldest that is left.
        """
        pointer = self._lake.store.head(self._log.pointer_key)
        if pointer is not None:
            old = self._log.list_old_manifests(subtract_span(pointer.modified, retention))
            self._lake.store.delete_many([item.key for item in old])

    def _register_name(self) -> None:
        """Register the name, before the first commit: discards must find every application with
        an open batch.
        """
        with suppress(errors.ObjectExistsError):
            self._lake.store.put_if_absent(f"{NAMES}/{self._application}", b"")

    def _taken_over_error(self, now: Commit | None) -> errors.CommitConflictError:
        """Return the error for a run that another one has taken the application from; `now` is the
        latest commit.
        """
        by = f"{now.by} at {now.created_at}" if now else "nobody"
        return errors.CommitConflictError(
            f"application {self._application!r} was taken over by another run (last commit by"
            f" {by}).",
            "This run has no effect on the batch; let the other run finish, or stop it and start"
            " again.",
            application=self._application,
        )

    def _parse(self, commit: Commit | None) -> ApplicationState:
        """Return the state in a commit, an empty one for None; raises MalformedDocumentError."""
        if commit is None:
            return ApplicationState()
        try:
            return ApplicationState.model_validate(commit.body)
        except ValidationError as error:
            raise errors.MalformedDocumentError(
                f"the batch log of application {self._application!r} is malformed in"
                f" {commit.manifest_key}: {first_validation_problem(error)}.",
                "Restore that object from a backup; outputs and checkpoints before it are"
                " untouched.",
                document=commit.manifest_key,
            ) from error


def _give_up(offsets: OffsetState, intent: Intent) -> OffsetState:
    """Return the positions after a batch was abandoned that is no restatement: its records are read
    again, in higher epochs.
    """
    epochs_read = {}
    for ssp, span in intent.ranges.items():
        if span.start != span.end:
            epochs_read[ssp] = intent.epochs.get(ssp, 0)
    followed = {}
    for ssp in epochs_read:
        if ssp not in intent.replays and followed_dataset(ssp.qualified_stream):
            followed[ssp] = intent.ranges[ssp]
    given_up = offsets.with_abandoned(epochs_read, intent.replays)
    return given_up.with_abandoned_ends(followed, intent.startpoints)


class _Reached(NamedTuple):
    """The checkpoint of an application, and its other positions."""

    checkpoint: Offsets
    offsets: OffsetState


def _apply_batch(state: ApplicationState, intent: Intent, at: datetime) -> _Reached:
    """Return the positions after this batch: a restatement moves those in changes of datasets, a
    replay its own, and any other batch the checkpoint.
    """
    offsets = state.offsets.with_joined(intent)
    ends = {ssp: span.end for ssp, span in intent.ranges.items()}
    if intent.restating is not None:
        followed = {ssp: span.end for ssp, span in intent.restating.changes.items()}
        applied = offsets.with_applied(intent.startpoints, intent.batch, at)
        return _Reached(state.checkpoint | followed, applied.with_restated(intent, at))
    if intent.replays:
        replayed = {intent.replays[ssp]: end for ssp, end in ends.items()}
        after_reading = offsets.with_reading({}, intent.ranges)
        return _Reached(state.checkpoint, after_reading.with_replayed(replayed))
    after_reading = offsets.with_reading(state.checkpoint, intent.ranges)
    applied = after_reading.with_applied(intent.startpoints, intent.batch, at)
    reached = applied.with_reached(after_reading, ends, intent.startpoints)
    return _Reached(state.checkpoint | ends, reached)


@validated
def served_versions(lake: Lake, application: str) -> dict[str, dict[str, list[int]]]:
    """Return, by dataset and version, which batches of the retained log read it, oldest first."""
    batches: dict[int, Intent] = {}
    for _, state in BatchLog(lake, application).history(None):
        if state.last is not None:
            batches[state.last.intent.batch] = state.last.intent
    served: dict[str, dict[str, list[int]]] = {}
    for batch, intent in sorted(batches.items()):
        for dataset, version in intent.versions.items():
            if version is not None:
                served.setdefault(dataset, {}).setdefault(version, []).append(batch)
    return served


def add_counters(before: Counters, more: Counters) -> Counters:
    """Return the sums of two sets of counters."""
    sums = {}
    for name in {**before, **more}:
        sums[name] = sum_counters(before.get(name, {}), more.get(name, {}))
    return sums


@validated
def application_state(lake: Lake, application: str) -> ApplicationState:
    """Return an application's checkpoint, last batch and counters; an empty state before its
    first run.
    """
    return BatchLog(lake, application).read().state


_SHOWN = 5


def list_applications(lake: Lake) -> list[str]:
    """Return the applications that have a batch log in the lake, sorted; includes one whose
    first commit failed.
    """
    return sorted(item.key.removeprefix(f"{NAMES}/") for item in lake.store.list(f"{NAMES}/"))


def list_application_states(lake: Lake) -> dict[str, ApplicationState]:
    """Return the applications that have run in the lake, with their states."""
    states = {}
    for application in list_applications(lake):
        states[application] = application_state(lake, application)
    return states


def check_application_known(lake: Lake, name: str) -> None:
    """Raise ConfigurationError if no application of this name has run in the lake, but others
    have.
    """
    known = list_applications(lake)
    if known and name not in known:
        raise errors.ConfigurationError(
            f"application {name!r} has never run in {lake.url};"
            f" {describe_similar_names(lake, name)}.",
            "Check the name; for an application that has not run yet, pass the Application itself.",
            application=name,
        )


def check_not_renamed(name: str, state: ApplicationState) -> None:
    """Raise ConfigurationError if this is the former name of a renamed application."""
    renamed_to = state.names.renamed_to
    if renamed_to is not None:
        raise errors.ConfigurationError(
            f"application {name!r} was renamed {renamed_to!r}.",
            f"Use {renamed_to!r} here and in the code; choose another name for another"
            " application.",
            application=name,
        )


def describe_similar_names(lake: Lake, name: str) -> str:
    """Return a text with the applications of the lake that have a name like `name`; the first
    five if none has.
    """
    known = list_applications(lake)
    near = get_close_matches(name, known, n=3)
    if near:
        return f"similar names: {', '.join(near)}"
    if not known:
        return "there are: none"
    more = ", …" if len(known) > _SHOWN else ""
    return f"there are: {', '.join(known[:_SHOWN])}{more}"

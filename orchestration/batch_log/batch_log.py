"""The application's batch log: intents, checkpoints and their history, behind one pointer.

Each batch commits twice: its intent before anything is read, its close when every sink has flushed. The
close is the checkpoint, and the only authority on where to go on. An intent that a crash left open is run
again exactly as written, so that the same input meets the same versions and gives the same output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field as Default
from pydantic import PlainSerializer, PlainValidator, ValidationError

from dagster_adjunct.orchestration.operators.stream_facts import AS_OF, JoinVersions
from dagster_adjunct.resources.common import StoredDocument, first_validation_problem
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    InvalidNameError,
    MalformedDocumentError,
    ObjectExistsError,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake

# What an application's batch log holds of startpoints: resolved ones, applied ones, and replays under way.
#
#     request -> fanned out -> resolved (its offset stored, nothing read yet) -> applied (by a commit of offsets)
#                                      `-> with an end: a replay, a cursor beside the main position
#
# Each applied startpoint, and each replay, opens a new epoch of its partition, which the records that it leads to
# carry.


# Requests expire, so one is written again soon or in vain: few others can have come between.
_MAX_TAKEN = 20


def _parse_partition(stored: object) -> SystemStreamPartition:
    if isinstance(stored, SystemStreamPartition):
        return stored
    try:
        return SystemStreamPartition.parse(str(stored))
    except InvalidNameError as error:
        raise ValueError(error.problem) from error


# A stream partition, stored as its text: "lake.flights.3".
Partition = Annotated[SystemStreamPartition, PlainValidator(_parse_partition), PlainSerializer(str, return_type=str)]


class ResolvedStartpoint(StoredDocument):
    """A startpoint, and the `offset` at which it starts, stored before anything is read from there.

    `id` is that of its request, `stream` is the identity of the stream, `position` says what was asked for, as in
    "timestamp 2026-01-02T00:00:00+00:00".
    """

    id: str
    ssp: Partition
    stream: str | None
    position: str
    offset: str
    by: str
    reason: str
    resolved_at: datetime


class AppliedStartpoint(StoredDocument):
    """The newest startpoint that a commit of offsets applied to a partition, and the epoch that it opened.

    `batch` is the first batch that started there; None where there was nothing to read yet.
    """

    id: str
    position: str
    offset: str
    epoch: int
    by: str
    reason: str
    batch: int | None
    applied_at: datetime

    def words(self, ssp: SystemStreamPartition) -> str:
        """Return what was applied to this partition, as words that a verb may follow."""
        return f"{ssp}: startpoint {self.position} ({self.by}: {self.reason}), epoch {self.epoch},"


class Replay(StoredDocument):
    """A bounded replay of one partition: reads [`start`, `until`) again and has come to `next`.

    `versions` says which versions its records meet; with "recorded" they are in the plan of the id `recorded`.
    """

    id: str
    ssp: Partition
    stream: str | None
    epoch: int
    position: str
    start: str
    next: str
    until: str
    by: str
    reason: str
    began_at: datetime
    versions: JoinVersions
    recorded: str | None = None

    def words(self) -> str:
        """Return which replay it is, as words that a verb may follow."""
        return f"{self.ssp}: replay from {self.position} ({self.by}: {self.reason}), epoch {self.epoch},"


def replay_id(ssp: SystemStreamPartition, startpoint_id: str) -> str:
    """Return the id of the replay that a bounded request begins: one request may be for several partitions."""
    return f"{startpoint_id}@{ssp}"


class OffsetState(StoredDocument):
    """What is known of an application's positions besides its checkpoint; all by partition.

    `streams` holds the identity of each input stream that the checkpoint is of. `epochs` are those of the main
    position and `opened` the highest ones that were ever opened, both without zeros. `replays` are by their ids, and
    `begun` names those that may still be fanned out. `taken` holds the ids
    of the requests that were applied, or whose replay was begun, last: one that is written again is not applied again.
    """

    streams: dict[str, str] = Default(default_factory=dict)
    resolved: dict[Partition, ResolvedStartpoint] = Default(default_factory=dict)
    applied: dict[Partition, AppliedStartpoint] = Default(default_factory=dict)
    epochs: dict[Partition, int] = Default(default_factory=dict)
    opened: dict[Partition, int] = Default(default_factory=dict)
    replays: dict[str, Replay] = Default(default_factory=dict)
    begun: frozenset[str] = frozenset()
    taken: dict[Partition, tuple[str, ...]] = Default(default_factory=dict)

    def has_taken(self, ssp: SystemStreamPartition, startpoint_id: str) -> bool:
        """Whether a commit has applied this startpoint of a partition, or has begun its replay."""
        applied = self.applied.get(ssp)
        known = applied is not None and applied.id == startpoint_id
        return known or replay_id(ssp, startpoint_id) in self.begun or startpoint_id in self.taken.get(ssp, ())

    def next_epoch(self, ssp: SystemStreamPartition) -> int:
        """Return the epoch that the next startpoint of this partition opens."""
        return self.opened.get(ssp, 0) + 1

    def with_applied(
        self, startpoints: Mapping[SystemStreamPartition, str], batch: int | None, at: datetime
    ) -> OffsetState:
        """Return the state after a commit of offsets that applied these startpoints (id by partition)."""
        applied, epochs, opened = dict(self.applied), dict(self.epochs), dict(self.opened)
        resolved, taken = dict(self.resolved), dict[SystemStreamPartition, str]()
        for ssp, startpoint_id in startpoints.items():
            start = resolved.get(ssp)
            if start is None or start.id != startpoint_id:
                continue
            del resolved[ssp]
            taken[ssp] = start.id
            epochs[ssp] = opened[ssp] = self.next_epoch(ssp)
            applied[ssp] = AppliedStartpoint(
                id=start.id,
                position=start.position,
                offset=start.offset,
                epoch=epochs[ssp],
                by=start.by,
                reason=start.reason,
                batch=batch,
                applied_at=at,
            )
        update = {"resolved": resolved, "applied": applied, "epochs": epochs, "opened": opened}
        return self.model_copy(update={**update, "taken": self._remembering(taken)})

    def with_replays(self, replays: Sequence[Replay]) -> OffsetState:
        """Return the state with more replays, whose epochs are opened; those without offsets have ended already."""
        going = {replay.id: replay for replay in replays if replay.start != replay.until}
        return self.model_copy(
            update={
                "replays": {**self.replays, **going},
                "opened": {**self.opened, **{replay.ssp: replay.epoch for replay in going.values()}},
                "begun": self.begun | {replay.id for replay in replays},
                "taken": self._remembering(
                    {replay.ssp: replay.id.removesuffix(f"@{replay.ssp}") for replay in replays}
                ),
            }
        )

    def with_abandoned(
        self, epochs: Mapping[SystemStreamPartition, int], replays: Mapping[SystemStreamPartition, str]
    ) -> OffsetState:
        """Return the state after a batch of these epochs was given up: what it read is read again in higher ones.

        Outputs may have taken it in, so that its results have to be told from those that come again. `replays` are the
        ids of those that it read, by partition.
        """
        now, opened, going = dict(self.epochs), dict(self.opened), dict(self.replays)
        for ssp, epoch in epochs.items():
            opened[ssp] = max(self.opened.get(ssp, 0), epoch)
            if ssp in self.resolved and ssp not in replays:
                continue  # the startpoint that it would have applied opens the next one
            opened[ssp] += 1
            if ssp not in replays:
                now[ssp] = opened[ssp]
            elif replays[ssp] in going:
                going[replays[ssp]] = going[replays[ssp]].model_copy(update={"epoch": opened[ssp]})
        return self.model_copy(update={"epochs": now, "opened": opened, "replays": going})

    def _remembering(self, ids: Mapping[SystemStreamPartition, str]) -> dict[SystemStreamPartition, tuple[str, ...]]:
        return {**self.taken, **{ssp: (*self.taken.get(ssp, ()), newest)[-_MAX_TAKEN:] for ssp, newest in ids.items()}}

    def with_replayed(self, ends: Mapping[str, str]) -> OffsetState:
        """Return the state after a batch that brought these replays (by id) to these offsets; ended ones are gone."""
        replays = dict(self.replays)
        for replay_id, end in ends.items():
            replay = replays.pop(replay_id, None)
            if replay is not None and end != replay.until:
                replays[replay_id] = replay.model_copy(update={"next": end})
        return self.model_copy(update={"replays": replays})


MAX_SKIPPED = 100
"""Spans of offsets of a partition that are known to have been passed over."""


class PartitionTimes(StoredDocument):
    """How far a source partition has come in time; None before its first record that has one.

    `newest` is the latest event time of its records, `watermark` what no record of it should be below any more; it
    never goes back. `read_to` is the offset after the highest that was ever read, `skipped` are the spans of offsets
    [from, to) below it that never were, SKIPPED at most, in order; `active_at` the clock of the last
    batch that had records of it, or left some for a later one, or of the first one that knew it.
    """

    active_at: datetime
    newest: datetime | None = None
    watermark: datetime | None = None
    read_to: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def skipped_after(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the spans that are skipped once the offsets [start, end) were read, too.

        Each startpoint that goes forward adds one. Of more than SKIPPED the lowest are forgotten, and count as read.
        """
        gaps = [*self.skipped, (self.read_to, start)]
        parts = [part for low, high in gaps for part in ((low, min(high, start)), (max(low, end), high))]
        return tuple(part for part in parts if part[0] < part[1])[-MAX_SKIPPED:]


class TimeState(StoredDocument):
    """The times of source partitions, and the watermarks that stateful operators have had, by their names."""

    partitions: dict[Partition, PartitionTimes] = Default(default_factory=dict)
    operators: dict[str, datetime] = Default(default_factory=dict)

    def without_streams(self, streams: Iterable[str]) -> TimeState:
        """Return the state without these streams: they are others by now, and their offsets say nothing."""
        gone = {*streams}
        left = {ssp: times for ssp, times in self.partitions.items() if ssp.qualified_stream not in gone}
        return self if len(left) == len(self.partitions) else self.model_copy(update={"partitions": left})

    def carry_over(self, stream: str, went_on: Mapping[SystemStreamPartition, str]) -> TimeState:
        """Return the state with the stream in other partitions, which go on at these offsets.

        A record of any partition may be in any other now: each has come as far as the one that was farthest behind.
        """
        before = [times for ssp, times in self.partitions.items() if ssp.qualified_stream == stream]
        if not before:
            return self
        newest = [times.newest for times in before if times.newest is not None]
        marks = [times.watermark for times in before if times.watermark is not None]
        all_known = len(newest) == len(before)
        carried = {
            ssp: PartitionTimes(
                active_at=max(times.active_at for times in before),
                newest=min(newest) if all_known else None,
                watermark=min(marks) if all_known else None,
                read_to=int(offset) if offset.isdecimal() else 0,
            )
            for ssp, offset in went_on.items()
        }
        return self.model_copy(update={"partitions": {**self.without_streams([stream]).partitions, **carried}})


KIND = "application"
NAMES = "applications/_names"


class Range(StoredDocument):
    """The offsets [start, end) of one stream partition; opaque strings that only its system orders."""

    start: str
    end: str


class Intent(StoredDocument):
    """What one batch is going to do, written before it reads anything.

    `startpoints` are the ids of those that it applies, `epochs` what its records carry (0 where left out), and `lost`
    the offsets that retention took before they were read, where the input stream says to go on. A batch of `replays`
    (their ids by partition) reads ranges of these only, and moves no checkpoint. `tasks` is how many read each record
    of a broadcast input; None where there is none. `reading` says which versions its records meet. `over_time` are, of
    bounded datasets that are joined by time, all versions that are met, by their ids. `waiting` are partitions with
    `idle_after` that it leaves records of for a later batch: they are not idle. One that is `cut` was begun with more
    records, which retention took before it had ended: outputs that have it already keep what they have.
    """

    batch: int
    run: str
    clock: datetime
    ranges: dict[Partition, Range]
    versions: dict[str, str | None]
    startpoints: dict[Partition, str] = Default(default_factory=dict)
    epochs: dict[Partition, int] = Default(default_factory=dict)
    lost: dict[Partition, Range] = Default(default_factory=dict)
    replays: dict[Partition, str] = Default(default_factory=dict)
    tasks: int | None = None
    reading: JoinVersions = AS_OF
    over_time: dict[str, tuple[str, ...]] = Default(default_factory=dict)
    waiting: tuple[Partition, ...] = ()
    cut: bool = False

    @property
    def met(self) -> dict[str, tuple[str, ...]]:
        """All versions that it reads, by dataset; () of one without a version."""
        return {
            name: tuple(dict.fromkeys([*([] if version is None else [version]), *self.over_time.get(name, ())]))
            for name, version in self.versions.items()
        }


class ClosedBatch(StoredDocument):
    """What one batch did: its intent, the input records it read, and the counters of each output and join."""

    intent: Intent
    closed_at: datetime
    records: int
    counters: dict[str, dict[str, int]]
    seconds: dict[str, float]


class ApplicationState(StoredDocument):
    """The whole state of an application.

    `checkpoint` is the next offset to read of each stream partition; `records` and `totals` add up the input records
    and the counters of all closed batches. `given_up` is the batch before the next one, where it is read again: local
    tables take out what it has written. `times` are how far the inputs have come by the times of their records. Of an
    application that was renamed, `writes_as` is the name that its outputs know it by; under its name of before,
    `renamed_to` says where it went. `note` says what else there is to know of this commit, such as what it was for
    where it is no batch's.
    """

    checkpoint: dict[Partition, str] = Default(default_factory=dict)
    batch: int = 0
    records: int = 0
    open: Intent | None = None
    last: ClosedBatch | None = None
    totals: dict[str, dict[str, int]] = Default(default_factory=dict)
    offsets: OffsetState = Default(default_factory=OffsetState)
    given_up: int | None = None
    times: TimeState = Default(default_factory=TimeState)
    writes_as: str | None = None
    renamed_to: str | None = None
    note: str | None = None


class LoggedState(NamedTuple):
    """A commit of the batch log (None before the first), and the state of the application that it holds."""

    commit: Commit | None
    state: ApplicationState


class BatchLog:
    """The batch log of one application in one lake.

    Every change is a compare-and-swap on the application's pointer, from the commit that it was decided over: a second
    run of the application that commits in between makes ours fail with CommitConflictError, and nothing of ours counts.
    Each returns what is stored then.
    """

    def __init__(self, lake: Lake, application: str) -> None:
        self._lake, self._application = lake, application
        self._log = lake.commit_log(lake.application_prefix(application), KIND)

    def read(self) -> LoggedState:
        """Return the newest commit and the state it holds (an empty one before the first)."""
        commit = self._log.current()
        return LoggedState(commit, self._parse(commit))

    def store_positions(
        self, logged: LoggedState, moved: ApplicationState, *, by: str, note: str | None = None
    ) -> LoggedState:
        """Commit positions that no batch has moved, before anything is read from them."""
        return self._commit(logged, moved.model_copy(update={"note": note}), by)

    def open(self, logged: LoggedState, intent: Intent) -> LoggedState:
        """Commit an intent: a new one, or one left open that `intent.run` takes over."""
        return self._commit(logged, logged.state.model_copy(update={"open": intent, "note": None}), intent.run)

    def close(self, logged: LoggedState, done: ClosedBatch, times: TimeState | None = None) -> LoggedState:
        """Commit the end of a batch, whose ends become the checkpoint; `times` are those after it, if it moves any."""
        state = logged.state
        checkpoint, offsets = _apply_batch(state, done.intent, done.closed_at)
        closed = ApplicationState(
            checkpoint=checkpoint,
            batch=done.intent.batch,
            records=state.records + done.records,
            open=None,
            last=done,
            totals=add_counters(state.totals, done.counters),
            offsets=offsets,
            times=state.times if times is None else times,
            writes_as=state.writes_as,
            note=_describe_lost(done.intent),
        )
        return self._commit(logged, closed, done.intent.run)

    def commit_positions(
        self,
        logged: LoggedState,
        checkpoint: Mapping[SystemStreamPartition, str],
        startpoints: Mapping[SystemStreamPartition, str],
        lost: dict[str, dict[str, int]],
        *,
        by: str,
        note: str,
    ) -> LoggedState:
        """Commit positions at which there is nothing to read yet, and with that apply these startpoints, by their ids.

        `lost` counts what retention took on the way there.
        """
        state = logged.state
        update = {
            "checkpoint": {**state.checkpoint, **checkpoint},
            "offsets": state.offsets.with_applied(startpoints, None, self._lake.now()),
            "totals": add_counters(state.totals, lost),
            "note": note,
        }
        return self._commit(logged, state.model_copy(update=update), by)

    def abandon(self, *, reason: str, by: str, skip: bool) -> Intent:
        """Give up the open batch, so that the next run plans anew; return what it was going to do.

        Its number is not used again: outputs that hold records of it already get those that are read again under
        another number, so twice, but in a higher epoch. With `skip`, its ranges count as read, and what no output has
        yet is passed over. Raises ConfigurationError where no batch is open or no reason is given, and
        CommitConflictError.
        """
        if not reason.strip():
            raise ConfigurationError(
                f"the open batch of application {self._application!r} can't be abandoned without a reason.",
                "Say why (reason=…): it is kept with the change.",
                argument="reason",
                application=self._application,
            )
        logged = self.read()
        state = logged.state
        intent = state.open
        if intent is None:
            raise ConfigurationError(
                f"application {self._application!r} has no open batch: there is nothing to abandon.",
                "Look at its state: adjunct checkpoint show.",
                application=self._application,
            )
        note = f"batch {intent.batch} abandoned: {reason}"
        update: dict[str, object] = {"open": None, "batch": intent.batch, "note": note}
        if skip:
            checkpoint, offsets = _apply_batch(state, intent, self._lake.now())
            state = state.model_copy(update={"checkpoint": checkpoint, "offsets": offsets})
            update["note"] = f"batch {intent.batch} skipped: {reason}"
        else:
            again = {ssp: intent.epochs.get(ssp, 0) for ssp, span in intent.ranges.items() if span.start != span.end}
            update["offsets"] = state.offsets.with_abandoned(again, intent.replays)
            update["given_up"] = intent.batch
        self._commit(logged, state.model_copy(update=update), by)
        return intent

    def cancel_replays(self, ids: Collection[str], *, reason: str, by: str) -> list[Replay]:
        """Stop these bounded replays where they are; return those that were under way.

        Raises ConfigurationError while a batch of one of them is open, and CommitConflictError.
        """
        logged = self.read()
        state = logged.state
        stopped = [state.offsets.replays[key] for key in sorted(ids) if key in state.offsets.replays]
        if not stopped:
            return []
        if state.open is not None and set(state.open.replays.values()) & {replay.id for replay in stopped}:
            raise ConfigurationError(
                f"batch {state.open.batch} of application {self._application!r} is reading a replay on "
                f"{', '.join(str(replay.ssp) for replay in stopped)}.",
                "Wait for its end and repeat this, or abandon the batch: adjunct checkpoint abandon.",
                application=self._application,
            )
        replays = {key: replay for key, replay in state.offsets.replays.items() if replay not in stopped}
        update = {
            "offsets": state.offsets.model_copy(update={"replays": replays}),
            "note": f"replays cancelled: {reason}",
        }
        self._commit(logged, state.model_copy(update=update), by)
        return stopped

    def fence(self, logged: LoggedState, new: str, *, by: str, note: str) -> LoggedState:
        """Commit that the application goes on under a new name: no run goes on under this one."""
        return self._commit(logged, logged.state.model_copy(update={"renamed_to": new, "note": note}), by)

    def clear(self, logged: LoggedState, *, by: str) -> LoggedState:
        """Commit that nothing is kept under this name any more but where the application went."""
        state = logged.state
        left = ApplicationState(batch=state.batch, renamed_to=state.renamed_to, note=state.note)
        return self._commit(logged, left, by)

    def continue_from(self, old: str, *, by: str, note: str) -> None:
        """Begin with the history and the state of the application that was called `old`.

        Safe to repeat until it has returned. Raises CommitConflictError where this log was begun.
        """
        before = BatchLog(self._lake, old)
        state = before.read().state
        update = {"writes_as": state.writes_as or old, "renamed_to": None, "note": note}
        with suppress(ObjectExistsError):
            self._lake.store.put_if_absent(f"{NAMES}/{self._application}", b"")
        self._log.continue_from(before._log, state.model_copy(update=update).model_dump(mode="json"), by=by)

    def check_not_superseded(self, logged: LoggedState) -> None:
        """Raise CommitConflictError if another run has committed since: it owns the batch now.

        Called before each sink, so that a run that was presumed dead stops writing as early as it can.
        """
        now = self._log.current()
        if now is None or logged.commit is None or now.id != logged.commit.id:
            raise self._fenced(now)

    def history(self, limit: int | None) -> Iterator[tuple[Commit, ApplicationState]]:
        """Yield the newest commits first, each with the state that it holds."""
        for commit in self._log.history(limit):
            yield commit, self._parse(commit)

    def _commit(self, logged: LoggedState, state: ApplicationState, by: str) -> LoggedState:
        if logged.commit is None:
            # The name first: whoever discards finds every application that may have an open batch.
            with suppress(ObjectExistsError):
                self._lake.store.put_if_absent(f"{NAMES}/{self._application}", b"")
        try:
            return LoggedState(self._log.commit(logged.commit, state.model_dump(mode="json"), by=by), state)
        except CommitConflictError as conflict:
            raise self._fenced(self._log.current()) from conflict

    def _fenced(self, now: Commit | None) -> CommitConflictError:
        by = f"{now.by} at {now.created_at}" if now else "nobody"
        return CommitConflictError(
            f"application {self._application!r} was taken over by another run (last commit by {by}).",
            "Nothing of this batch counts here; let the other run finish, or stop it and start again.",
            application=self._application,
        )

    def _parse(self, commit: Commit | None) -> ApplicationState:
        if commit is None:
            return ApplicationState()
        try:
            return ApplicationState.model_validate(commit.body)
        except ValidationError as error:
            raise MalformedDocumentError(
                f"the batch log of application {self._application!r} is malformed in {commit.manifest_key}: "
                f"{first_validation_problem(error)}.",
                "Restore that object from a backup; outputs and checkpoints before it are untouched.",
                document=commit.manifest_key,
            ) from error


def _describe_lost(intent: Intent) -> str | None:
    """Return what retention took before this batch could read it, for the history."""
    spans = [f"{ssp} from {span.start} up to {span.end}" for ssp, span in sorted(intent.lost.items())]
    return f"lost to retention: {', '.join(spans)}" if spans else None


def _apply_batch(
    state: ApplicationState, intent: Intent, at: datetime
) -> tuple[dict[SystemStreamPartition, str], OffsetState]:
    """Return checkpoint and positions after this batch."""
    ends = {ssp: span.end for ssp, span in intent.ranges.items()}
    if intent.replays:
        return state.checkpoint, state.offsets.with_replayed({intent.replays[ssp]: end for ssp, end in ends.items()})
    return {**state.checkpoint, **ends}, state.offsets.with_applied(intent.startpoints, intent.batch, at)


def served_versions(lake: Lake, application: str) -> dict[str, dict[str, list[int]]]:
    """Return, by dataset and version, which batches met it: from the batch log's whole history, oldest first."""
    batches: dict[int, dict[str, str | None]] = {}
    for _, state in BatchLog(lake, application).history(None):
        if state.last is not None:
            batches[state.last.intent.batch] = state.last.intent.versions
    served: dict[str, dict[str, list[int]]] = {}
    for batch in sorted(batches):
        for dataset, version in batches[batch].items():
            if version is not None:
                served.setdefault(dataset, {}).setdefault(version, []).append(batch)
    return served


def add_counters(left: dict[str, dict[str, int]], right: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the sums of two sets of counters, by output or join and counter."""
    total: dict[str, dict[str, int]] = {name: dict(counters) for name, counters in left.items()}
    for name, counters in right.items():
        mine = total.setdefault(name, {})
        for counter, value in counters.items():
            mine[counter] = mine.get(counter, 0) + value
    return total


def application_state(lake: Lake, application: str) -> ApplicationState:
    """Return an application's checkpoint, last batch and counters; an empty state before its first run."""
    return BatchLog(lake, application).read()[1]


_SHOWN = 5


def list_applications(lake: Lake) -> list[str]:
    """Return the applications that have a batch log in the lake, sorted; also one whose first commit failed."""
    return sorted(item.key.rsplit("/", 1)[1] for item in lake.store.list(f"{NAMES}/"))


def check_application_known(lake: Lake, name: str) -> None:
    """Raise ConfigurationError for a name that no application of the lake has, where any has run."""
    known = list_applications(lake)
    if known and name not in known:
        raise ConfigurationError(
            f"application {name!r} has never run in {lake.url}; {describe_similar_names(name, known)}.",
            "Correct the name; for an application that has not run yet, pass the Application itself.",
            application=name,
        )


def check_not_renamed(name: str, state: ApplicationState) -> None:
    """Raise ConfigurationError for the name of before of an application that was renamed."""
    if state.renamed_to is not None:
        raise ConfigurationError(
            f"application {name!r} was renamed {state.renamed_to!r}.",
            f"Say {state.renamed_to!r} here and in the code; give another application another name.",
            application=name,
        )


def describe_similar_names(name: str, known: Sequence[str]) -> str:
    """Return in words which of the known applications are called like `name`, else which there are."""
    near = get_close_matches(name, known, n=3)
    if near:
        return f"called like it: {', '.join(near)}"
    more = ", …" if len(known) > _SHOWN else ""
    return f"there are: {', '.join(known[:_SHOWN]) or 'none'}{more}"

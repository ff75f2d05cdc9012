"""The checkpoint of an application and its history, from the batch log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice, pairwise
from typing import Any, Literal, TypeVar

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    AppliedStartpoint,
    BatchLog,
    LoggedState,
    ResolvedStartpoint,
    check_application_known,
    check_not_renamed,
)
from dagster_adjunct.orchestration.batch_log.event_times import TimeState
from dagster_adjunct.orchestration.batch_log.intent import Epochs, HeldTime, Intent, Offsets
from dagster_adjunct.orchestration.operators.waiting import LATE_CHANGES
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.validation import Limit, validated_methods

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplayChange:
    """A change of one bounded replay in one commit: it moved from the offset `before` to
    `after`.
    """

    ssp: SystemStreamPartition
    position: str
    epoch: int
    before: str
    after: str
    until: str
    what: Literal["began", "moved", "ended", "cancelled"]


@dataclass(frozen=True, slots=True)
class CheckpointChange(Report):
    """One commit that changed where an application continues.

    `moved` has the offsets before (None for a new partition) and after, including partitions that a
    startpoint moved back and that have returned to where they were. `batch` is the batch that
    finished with it; if there was none, `note` may say what it was. `resolved` are startpoints
    whose offsets it stored, `applied` those that it applied, with their new epochs.
    """

    number: int
    at: datetime
    by: str
    batch: int | None
    note: str | None
    moved: Mapping[SystemStreamPartition, tuple[str | None, str | None]] = field(
        default_factory=dict
    )
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)
    applied: Mapping[SystemStreamPartition, AppliedStartpoint] = field(default_factory=dict)
    replays: tuple[ReplayChange, ...] = ()

    def concerns(self, ssp: SystemStreamPartition) -> bool:
        """Return whether anything changed for this partition."""
        replayed = [replay.ssp for replay in self.replays]
        return ssp in {*self.moved, *self.resolved, *self.applied, *replayed}

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        moved = {
            str(ssp): {"from": before, "to": after} for ssp, (before, after) in self.moved.items()
        }
        return Report.to_json(self) | {"at": self.at, "moved": moved}


@dataclass(frozen=True, slots=True)
class Checkpoint(Report):
    """Where an application continues: the next offset to read of each partition.

    The commit `last_change` left it so; `batch` is the last batch that finished. `streams` are the
    identities of its streams, `epochs` the epochs of its partitions, without zeros. `resolved` are
    startpoints whose offsets are stored and not applied yet: the next run starts there instead.
    `open` is a batch that has not finished: a run is in it, or the next run repeats it. `times` are
    the event times of the inputs, `versions` the versions of datasets and state tables that the
    last batch read. `late_changes` are those that came after a join had passed their time, by join
    that waits, `held` the first records that the last run found waiting, and `restated` the times
    when results were last restated, by dataset.
    """

    offsets: Offsets
    streams: Mapping[str, str]
    epochs: Epochs
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint]
    batch: int
    last_change: CheckpointChange
    open: Intent | None = None
    times: TimeState = field(default_factory=TimeState)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    late_changes: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[SystemStreamPartition, HeldTime] = field(default_factory=dict)
    restated: Mapping[str, datetime] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint as JSON values, without `versions` and `held`; of the last change
        only its number, and `at` which time and `by` whom it was committed.
        """
        facts = Report.to_json(self)
        del facts["versions"], facts["held"], facts["last_change"]
        change = self.last_change
        return facts | {"number": change.number, "at": change.at, "by": change.by}


@validated_methods
class CheckpointManager:
    """The checkpoint of one application, given itself or by name, in one lake; startpoints move it.

    An unknown name, in a lake that knows others, raises ConfigurationError, which lists similar
    names. So does the former name of a renamed application.
    """

    def __init__(self, lake: Lake, application: Application | str) -> None:
        self._lake = lake
        if isinstance(application, str):
            self._name = application
            self._is_known = False
        else:
            self._name = application.name
            self._is_known = True
        self._log = BatchLog(lake, self._name)

    def read_last_checkpoint(self) -> Checkpoint | None:
        """Return where the application continues, or None if it never ran. Raises
        MalformedDocumentError.
        """
        commit, state = self._read()
        if commit is None:
            return None
        # Where the log keeps no commit that changed anything, the newest one stands for it.
        newest = CheckpointChange(commit.number, commit.created_at, commit.by, None, None)
        offsets = state.offsets
        versions: Mapping[str, str | None] = {}
        if state.last is not None:
            versions = state.last.intent.versions
        late = {}
        for name, counted in state.totals.items():
            if LATE_CHANGES in counted:
                late[name] = counted[LATE_CHANGES]
        return Checkpoint(
            offsets=dict(sorted(state.checkpoint.items())),
            streams=offsets.streams,
            epochs=dict(sorted(offsets.epochs.main.items())),
            resolved=dict(sorted(offsets.resolved.items())),
            batch=state.batch,
            last_change=next(self.history(1), newest),
            open=state.open,
            times=state.times,
            versions=versions,
            late_changes=late,
            held=state.waits.held,
            restated=offsets.restated,
        )

    def history(
        self, limit: Limit | None = None, partition: SystemStreamPartition | None = None
    ) -> Iterator[CheckpointChange]:
        """Yield changes from the latest to the oldest, at most `limit`; with a partition, only
        those that concern it.

        Reads one commit after the other, as far as needed. Raises MalformedDocumentError.
        """
        self._read()  # raises for an unknown or former name
        yield from islice(self._iter_changes(partition), limit)

    def abandon(self, *, reason: str, by: str, skip: bool = False) -> Intent:
        """Abandon the open batch, so that the next run plans a new one; return its intent.

        Its records are read again in another batch: an output that has them already gets them
        twice; those before a startpoint that waits are not read at all. With `skip`, the batch
        counts as read instead, and what no output has yet is skipped. Raises ConfigurationError if
        no batch is open, and CommitConflictError.
        """
        self._read()  # raises for an unknown or former name
        return self._log.abandon(reason=reason, by=by, skip=skip)

    def _read(self) -> LoggedState:
        """Return the logged state; raise ConfigurationError for an unknown or former name."""
        logged = self._log.read()
        if logged.commit is None and not self._is_known:
            check_application_known(self._lake, self._name)
        check_not_renamed(self._name, logged.state)
        return logged

    def _iter_changes(self, partition: SystemStreamPartition | None) -> Iterator[CheckpointChange]:
        """Yield the changes, or only those that concern the `partition`; that of the oldest commit
        only if no earlier ones were deleted.
        """
        nothing_before = None
        commits: Iterable[tuple[Commit, ApplicationState] | None] = chain(
            self._log.history(None), [nothing_before]
        )
        for newer, older in pairwise(commits):
            assert newer is not None
            commit, after = newer
            before = ApplicationState()
            if older is not None:
                _, before = older
            elif commit.number > 1:  # the commits before it were deleted
                return
            change = _describe_change(commit, before, after)
            if change is None:
                continue
            if partition is None or change.concerns(partition):
                yield change


def _describe_change(
    commit: Commit, before: ApplicationState, after: ApplicationState
) -> CheckpointChange | None:
    """Return what a commit changed; None for one that only opened a batch."""
    ended = None
    if after.last is not None and after.last != before.last:
        ended = after.last.intent.batch
    applied = _added(before.offsets.applied, after.offsets.applied)
    moved = {}
    for ssp in sorted({*before.checkpoint, *after.checkpoint}):
        from_offset = before.checkpoint.get(ssp)
        to_offset = after.checkpoint.get(ssp)
        if ssp in applied or from_offset != to_offset:
            moved[ssp] = (from_offset, to_offset)
    change = CheckpointChange(
        number=commit.number,
        at=commit.created_at,
        by=commit.by,
        batch=ended,
        note=after.note,
        moved=moved,
        resolved=_added(before.offsets.resolved, after.offsets.resolved),
        applied=applied,
        replays=tuple(_iter_replay_changes(before, after)),
    )
    only_opened = CheckpointChange(commit.number, commit.created_at, commit.by, None, None)
    if change == only_opened:
        return None
    return change


def _iter_replay_changes(
    before: ApplicationState, after: ApplicationState
) -> Iterator[ReplayChange]:
    """Yield what a commit, from one state to the next, has done to replays."""
    # The commit that ends a replay closes or skips a batch of it; a cancelled replay is in no open
    # batch.
    ids_in_batch: set[str] = set()
    if before.open is not None:
        ids_in_batch = set(before.open.replays.values())
    replays_before = before.offsets.replays
    replays_after = after.offsets.replays
    for key, replay in sorted({**replays_before, **replays_after}.items()):
        old = replays_before.get(key)
        new = replays_after.get(key)
        if old == new:
            continue
        what: Literal["began", "moved", "ended", "cancelled"]
        if old is None:
            what = "began"
            start = replay.start
            end = replay.next
        elif new is not None:
            what = "moved"
            start = old.next
            end = new.next
        elif key in ids_in_batch:
            what = "ended"
            start = old.next
            end = old.until
        else:
            what = "cancelled"
            start = old.next
            end = old.next
        yield ReplayChange(
            ssp=replay.ssp,
            position=replay.position,
            epoch=replay.epoch,
            before=start,
            after=end,
            until=replay.until,
            what=what,
        )


def _added(
    before: Mapping[SystemStreamPartition, T], after: Mapping[SystemStreamPartition, T]
) -> dict[SystemStreamPartition, T]:
    """Return the values that are new or have changed, in order."""
    added = {}
    for ssp, value in sorted(after.items()):
        if before.get(ssp) != value:
            added[ssp] = value
    return added

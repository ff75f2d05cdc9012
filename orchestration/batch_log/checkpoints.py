"""The checkpoint of an application and its history, from the batch log."""

from __future__ import annotations

import sys
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
    Intent,
    LoggedState,
    ResolvedStartpoint,
    TimeState,
    check_application_known,
    check_not_renamed,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.validation import validated_methods

T = TypeVar("T")


def _sorted(by_partition: Mapping[SystemStreamPartition, T]) -> dict[SystemStreamPartition, T]:
    return dict(sorted(by_partition.items()))


@dataclass(frozen=True, slots=True)
class Checkpoint(Report):
    """Where an application continues: the next offset to read of each partition.

    It was committed `at` this time `by` this run or person, as commit `number` of the batch log;
    `batch` is the last batch that finished. `streams` are the identities of its streams, `epochs`
    the epochs of its partitions, without zeros. `resolved` are startpoints whose offsets are stored
    and not applied yet: the next run starts there instead. `open` is a batch that has not finished:
    a run is in it, or the next run repeats it. `times` are the event times of the inputs,
    `versions` the versions of datasets and state tables that the last batch read.
    """

    offsets: Mapping[SystemStreamPartition, str]
    streams: Mapping[str, str]
    epochs: Mapping[SystemStreamPartition, int]
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint]
    batch: int
    number: int
    at: datetime
    by: str
    open: Intent | None = None
    times: TimeState = field(default_factory=TimeState)
    versions: Mapping[str, str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint as JSON values."""
        return {
            name: value for name, value in Report.to_json(self).items() if name != "versions"
        } | {"at": self.at}


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
        changed = {*self.moved, *self.resolved, *self.applied}
        return ssp in changed or any(replay.ssp == ssp for replay in self.replays)

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        moved = {
            str(ssp): {"from": before, "to": after} for ssp, (before, after) in self.moved.items()
        }
        return Report.to_json(self) | {"at": self.at, "moved": moved}


@validated_methods
class CheckpointManager:
    """The checkpoint of one application, given itself or by name, in one lake; startpoints move it.

    An unknown name, in a lake that knows others, raises ConfigurationError, which lists similar
    names. So does the former name of a renamed application.
    """

    def __init__(self, lake: Lake, application: Application | str) -> None:
        self._lake = lake
        self._name = application if isinstance(application, str) else application.name
        self._is_known = not isinstance(application, str)
        self._log = BatchLog(lake, self._name)

    def read_last_checkpoint(self) -> Checkpoint | None:
        """Return where the application continues, or None if it never ran. Raises
        MalformedDocumentError.
        """
        commit, state = self._read()
        if commit is None:
            return None
        last = next(self.history(1), None)
        number, at, by = (
            (last.number, last.at, last.by)
            if last
            else (commit.number, commit.created_at, commit.by)
        )
        offsets = state.offsets
        return Checkpoint(
            offsets=_sorted(state.checkpoint),
            streams=offsets.streams,
            epochs=_sorted(offsets.epochs),
            resolved=_sorted(offsets.resolved),
            batch=state.batch,
            number=number,
            at=at,
            by=by,
            open=state.open,
            times=state.times,
            versions={} if state.last is None else state.last.intent.versions,
        )

    def history(
        self, limit: int | None = None, partition: SystemStreamPartition | None = None
    ) -> Iterator[CheckpointChange]:
        """Yield changes from the latest to the oldest, at most `limit`; with a partition, only
        those that concern it.

        Reads one commit after the other, as far as needed. Raises MalformedDocumentError.
        """
        if limit is not None and not 0 <= limit <= sys.maxsize:
            raise argument_error(
                f"limit is {limit}", "0 or more changes, or None for all", argument="limit"
            )
        self._read()
        changes = (_describe_change(*step) for step in self._iter_steps())
        yield from islice(
            (
                change
                for change in changes
                if change and (partition is None or change.concerns(partition))
            ),
            limit,
        )

    def abandon(self, *, reason: str, by: str, skip: bool = False) -> Intent:
        """Abandon the open batch, so that the next run plans a new one; return its intent.

        Outputs that have its records get them again under another number, so twice. With `skip`,
        its ranges count as read, and what no output has yet is skipped. Raises ConfigurationError
        if no batch is open, and CommitConflictError.
        """
        self._read()
        return self._log.abandon(reason=reason, by=by, skip=skip)

    def _read(self) -> LoggedState:
        """Return the logged state; raise ConfigurationError for an unknown or former name."""
        logged = self._log.read()
        if logged.commit is None and not self._is_known:
            check_application_known(self._lake, self._name)
        check_not_renamed(self._name, logged.state)
        return logged

    def _iter_steps(self) -> Iterator[tuple[Commit, ApplicationState, ApplicationState]]:
        """Yield each commit with the states before and after it, but not the oldest if earlier
        ones were deleted.
        """
        commits: Iterable[tuple[Commit, ApplicationState] | None] = chain(
            self._log.history(None), [None]
        )
        for newer, older in pairwise(commits):
            assert newer is not None
            if older is not None or newer[0].number == 1:
                yield newer[0], ApplicationState() if older is None else older[1], newer[1]


def _describe_change(
    commit: Commit, before: ApplicationState, after: ApplicationState
) -> CheckpointChange | None:
    """Return what a commit changed; None for one that only opened a batch."""
    ended = after.last is not None and after.last != before.last
    old = before.offsets
    new = after.offsets
    applied = _added(old.applied, new.applied)
    moved = {
        ssp: (before.checkpoint.get(ssp), after.checkpoint.get(ssp))
        for ssp in {*before.checkpoint, *after.checkpoint}
        if ssp in applied or before.checkpoint.get(ssp) != after.checkpoint.get(ssp)
    }
    change = CheckpointChange(
        number=commit.number,
        at=commit.created_at,
        by=commit.by,
        batch=after.last.intent.batch if ended and after.last else None,
        note=after.note,
        moved=_sorted(moved),
        resolved=_sorted(_added(old.resolved, new.resolved)),
        applied=_sorted(applied),
        replays=tuple(_iter_replay_changes(before, after)),
    )
    if ended or change.note or change.moved or change.resolved or change.applied or change.replays:
        return change
    return None


def _iter_replay_changes(
    before: ApplicationState, after: ApplicationState
) -> Iterator[ReplayChange]:
    # The commit that ends a replay closes or skips a batch of it; a cancelled replay is in no open
    # batch.
    read = set(before.open.replays.values()) if before.open is not None else set()
    was = before.offsets.replays
    now = after.offsets.replays
    for key, replay in sorted({**was, **now}.items()):
        old = was.get(key)
        new = now.get(key)
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
        elif key in read:
            what = "ended"
            start = old.next
            end = old.until
        else:
            what = "cancelled"
            start = old.next
            end = old.next
        yield ReplayChange(
            replay.ssp, replay.position, replay.epoch, start, end, replay.until, what
        )


def _added(
    before: Mapping[SystemStreamPartition, T], after: Mapping[SystemStreamPartition, T]
) -> dict[SystemStreamPartition, T]:
    return {ssp: value for ssp, value in after.items() if before.get(ssp) != value}

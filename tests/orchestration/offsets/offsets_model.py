"""What is known of an application's positions, in plain Python: requests, the batch log, and what
the output got.

Offsets are numbers here. No word of it is of the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.orchestration.offsets import startpoints_model
from tests.orchestration.offsets.startpoints_model import Tasks

Spans = Mapping[str, tuple[int, int]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Position:
    """oldest, upcoming, specific (value: an offset) or timestamp (value: ms)."""

    kind: Literal["oldest", "upcoming", "specific", "timestamp"]
    value: int = 0


@dataclass(frozen=True)
class Wish:
    """What a request asks for, by its id."""

    position: Position
    until: Position | None
    fallback: bool


@dataclass
class Partition:
    """The times (ms) of its records, and the number of the oldest that is left."""

    times: list[int] = field(default_factory=list)
    oldest: int = 0

    @property
    def upcoming(self) -> int:
        return len(self.times)

    def find(self, position: Position) -> int | None:
        if position.kind == "oldest":
            return self.oldest
        if position.kind == "upcoming":
            return self.upcoming
        if position.kind == "specific":
            return position.value if self.oldest <= position.value <= self.upcoming else None
        return next(
            (n for n in range(self.oldest, self.upcoming) if self.times[n] >= position.value),
            self.upcoming,
        )


@dataclass(frozen=True)
class Replay:
    ssp: str
    epoch: int
    next: int
    until: int


@dataclass(frozen=True)
class Batch:
    """What a batch reads, also empty ranges, with which epochs; the startpoints it applies, or
    the replays it is of.
    """

    number: int
    ranges: Spans
    epochs: Mapping[str, int]
    startpoints: Mapping[str, str] = field(default_factory=dict)
    replays: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """The batch log; `number` counts its commits. `resolved` has id, offset and whether it asked
    for the oldest.
    """

    number: int = 0
    checkpoint: Mapping[str, int] = field(default_factory=dict)
    batch: int = 0
    open: Batch | None = None
    after_replay: bool = False
    resolved: Mapping[str, tuple[str, int, bool]] = field(default_factory=dict)
    applied: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    opened: Mapping[str, int] = field(default_factory=dict)
    replays: Mapping[str, Replay] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    taken: frozenset[tuple[str, str]] = frozenset()

    def has_taken(self, ssp: str, request: str) -> bool:
        """Whether this request was applied to the partition, or its replay begun: ever."""
        return (ssp, request) in self.taken

    def seen(self) -> object:
        """Return what anybody can see of it."""
        opened = self.open and (self.open.number, dict(self.open.ranges), dict(self.open.epochs))
        resolved = {ssp: resolution[:2] for ssp, resolution in self.resolved.items()}
        return (
            (dict(self.checkpoint), self.batch, opened, resolved, dict(self.applied)),
            (dict(self.epochs), dict(self.opened), dict(self.replays), self.begun),
        )

    def after(self, batch: Batch) -> Log:
        """Return the log when this batch is done with."""
        ends = {ssp: end for ssp, (_, end) in batch.ranges.items()}
        if not batch.replays:
            return replace(self, checkpoint={**self.checkpoint, **ends}).applying(batch.startpoints)
        left = dict(self.replays)
        for ssp, replay_key in batch.replays.items():
            moved = replace(left.pop(replay_key), next=ends[ssp])
            if moved.next < moved.until:
                left[replay_key] = moved
        return replace(self, replays=left)

    def given_up(self, batch: Batch) -> Log:
        """Return the log when this batch, given up, is to be read again: each record in an epoch
        of its own.
        """
        log = self
        for ssp, (start, end) in batch.ranges.items():
            if start == end:
                continue
            if ssp in batch.startpoints:
                log = replace(log, opened={**log.opened, ssp: batch.epochs[ssp]})
                continue
            new = log.opened.get(ssp, 0) + 1
            log = replace(log, opened={**log.opened, ssp: new})
            if batch.replays:
                if batch.replays[ssp] in log.replays:
                    changed = replace(log.replays[batch.replays[ssp]], epoch=new)
                    log = replace(log, replays={**log.replays, batch.replays[ssp]: changed})
            else:
                log = replace(log, epochs={**log.epochs, ssp: new})
        return log

    def applying(self, startpoints: Mapping[str, str]) -> Log:
        epochs = {ssp: self.opened.get(ssp, 0) + 1 for ssp in startpoints}
        return replace(
            self,
            resolved={
                ssp: resolution
                for ssp, resolution in self.resolved.items()
                if ssp not in startpoints
            },
            applied={**self.applied, **startpoints},
            taken=self.taken | set(startpoints.items()),
            epochs={**self.epochs, **epochs},
            opened={**self.opened, **epochs},
        )


@dataclass(frozen=True)
class World:
    """Requests and fan-outs, the log, and what the output has of each batch."""

    startpoints: startpoints_model.World = field(default_factory=startpoints_model.World)
    log: Log = field(default_factory=Log)
    output: Mapping[int, Batch] = field(default_factory=dict)

    def seen(self, now: int) -> object:
        output = {
            n: (dict(b.ranges), dict(b.epochs), not b.replays) for n, b in self.output.items()
        }
        return self.startpoints.seen(now), self.log.seen(), output

    def key(self) -> object:
        return self.startpoints.key(), self.log.number, repr(self.log), tuple(self.output)


@dataclass
class Box:
    """The world that several processes change."""

    world: World

    def commit(self, mine: Log, then: Log) -> Log:
        """Make `then` the log after `mine`."""
        if self.world.log.number != mine.number:
            raise ConflictError
        then = replace(then, number=mine.number + 1)
        self.world = replace(self.world, log=then)
        return then


class ConflictError(Exception):
    """Another one has committed."""


class RefusedError(Exception):
    """A position that the stream does not hold."""


@dataclass
class Setting:
    """What a run finds: the streams as they are whenever it looks, the tasks, the clock and the
    application's rules.
    """

    partitions: dict[str, Partition]
    wishes: dict[str, Wish]
    tasks: Tasks
    now: int
    defaults: Mapping[str, Literal["oldest", "upcoming"]]
    on_lost: Literal["fail", "oldest"]
    limit: int

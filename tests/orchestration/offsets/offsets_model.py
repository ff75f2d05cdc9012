"""What an application's positions should be after any history of runs: plain Python, no word of the code under test.

A run is a generator that stops after every step that others can see, and before every look at what others change: who
advances it a few times and drops it has let the process die there; who does something else meanwhile has a race.
Offsets are numbers here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from tests.orchestration.offsets import startpoints_model
from tests.orchestration.offsets.startpoints_model import Request, Tasks

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
        return next((n for n in range(self.oldest, self.upcoming) if self.times[n] >= position.value), self.upcoming)


@dataclass(frozen=True)
class Replay:
    ssp: str
    epoch: int
    next: int
    until: int


@dataclass(frozen=True)
class Batch:
    """What a batch reads, also empty ranges, with which epochs; the startpoints it applies, or the replays it is of."""

    number: int
    ranges: Spans
    epochs: Mapping[str, int]
    startpoints: Mapping[str, str] = field(default_factory=dict)
    replays: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """The batch log; `number` counts its commits. `resolved` has id, offset and whether it asked for the oldest."""

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

    def seen(self) -> object:
        """Return what anybody can see of it."""
        opened = self.open and (self.open.number, dict(self.open.ranges), dict(self.open.epochs))
        resolved = {ssp: found[:2] for ssp, found in self.resolved.items()}
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
        for ssp, each in batch.replays.items():
            moved = replace(left.pop(each), next=ends[ssp])
            if moved.next < moved.until:
                left[each] = moved
        return replace(self, replays=left)

    def applying(self, startpoints: Mapping[str, str]) -> Log:
        epochs = {ssp: self.opened.get(ssp, 0) + 1 for ssp in startpoints}
        return replace(
            self,
            resolved={ssp: found for ssp, found in self.resolved.items() if ssp not in startpoints},
            applied={**self.applied, **startpoints},
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
        output = {n: (dict(b.ranges), dict(b.epochs), not b.replays) for n, b in self.output.items()}
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
    """What a run finds: the streams as they are whenever it looks, the tasks, the clock and the application's rules."""

    partitions: dict[str, Partition]
    wishes: dict[str, Wish]
    tasks: Tasks
    now: int
    defaults: Mapping[str, Literal["oldest", "upcoming"]]
    on_lost: Literal["fail", "oldest"]
    limit: int


def stream_of(ssp: str) -> str:
    return ssp.rpartition(".")[0]


def run(box: Box, setting: Setting, max_batches: int | None) -> Iterator[None]:
    """Raises ConflictError and RefusedError, as a run does."""
    log = box.world.log
    yield
    started, batches = False, 0
    while max_batches is None or batches < max_batches:
        batch = log.open
        if batch is None:
            if not started:
                log = yield from _start(box, setting, log)
                started = True
            batch = yield from _plan(box, setting, log)
            if batch is None:
                return
        log = box.commit(log, replace(log, open=batch))
        yield
        if box.world.log.number != log.number:
            raise ConflictError
        if any(start < setting.partitions[ssp].oldest and start < end for ssp, (start, end) in batch.ranges.items()):
            raise RefusedError
        assert box.world.output.get(batch.number, batch) == batch
        box.world = replace(box.world, output={**box.world.output, batch.number: batch})
        yield
        closed = replace(log.after(batch), open=None, batch=batch.number, after_replay=bool(batch.replays))
        log = box.commit(log, closed)
        yield
        _remove(box, setting, batch.startpoints)
        yield
        batches += 1


def fan_out(box: Box, setting: Setting) -> Iterator[None]:
    hand_out, clean_up = startpoints_model.fan_out(setting.tasks, setting.now)
    world = box.world
    handed = hand_out(world.startpoints)
    box.world = replace(world, startpoints=replace(handed, finished=frozenset()))
    yield
    mine = replace(box.world.startpoints, finished=handed.finished)
    box.world = replace(box.world, startpoints=clean_up(mine))
    yield


def _start(box: Box, setting: Setting, log: Log) -> Generator[None, None, Log]:
    steps = fan_out(box, setting)
    next(steps)
    fanned_out = box.world.startpoints.pending
    yield
    yield from steps
    pending: dict[str, tuple[str, Request]] = {}
    done: dict[tuple[str, str], str] = {}
    for (task, ssp), request in fanned_out.items():
        if log.applied.get(ssp) == request.id or f"{request.id}@{ssp}" in log.begun:
            done[task, ssp] = request.id
        else:
            pending[ssp] = (task, request)
    resolved = {s: found for s, found in log.resolved.items() if s in pending and pending[s][1].id == found[0]}
    begun = log.begun & {f"{each}@{ssp}" for (_, ssp), each in done.items()}
    after = replace(log, resolved=resolved, begun=begun)
    for ssp, (task, request) in sorted(pending.items()):
        if ssp in after.resolved:
            continue
        yield
        wish, partition = setting.wishes[request.id], setting.partitions[ssp]
        found = partition.find(wish.position)
        end = partition.find(wish.until) if wish.until else None
        if found is None or (wish.until and (end is None or end < found)):
            if wish.fallback:
                continue
            raise RefusedError
        if end is None:
            oldest = wish.position.kind == "oldest"
            after = replace(after, resolved={**after.resolved, ssp: (request.id, found, oldest)})
        else:
            after = replace(after, begun=after.begun | {f"{request.id}@{ssp}"})
            if found < end:
                replay = Replay(ssp, after.opened.get(ssp, 0) + 1, found, end)
                replays = {**after.replays, f"{request.id}@{ssp}": replay}
                after = replace(after, replays=replays, opened={**after.opened, ssp: replay.epoch})
            done[task, ssp] = request.id
    checkpoint = dict(log.checkpoint)
    for ssp, partition in setting.partitions.items():
        yield
        if ssp not in log.checkpoint:
            # A partition that came after the others of its stream is read whole.
            new = any(stream_of(other) == stream_of(ssp) for other in log.checkpoint)
            default = "oldest" if new else setting.defaults[stream_of(ssp)]
            checkpoint[ssp] = partition.oldest if default == "oldest" else partition.upcoming
    after = replace(after, checkpoint=checkpoint)
    if after != log:
        log = box.commit(log, after)
        yield
    gone = startpoints_model.remove(done)[0](box.world.startpoints)
    box.world = replace(box.world, startpoints=gone)
    yield
    return log


def _plan(box: Box, setting: Setting, log: Log) -> Generator[None, None, Batch | None]:
    yield
    spans, lost = _positions(setting, log)
    unread = any(start != end for start, end in spans.values())
    chosen: dict[str, str] = {}
    for each, replay in sorted(log.replays.items(), key=lambda item: (item[1].epoch, item[0])):
        chosen.setdefault(replay.ssp, each)
    if chosen:
        yield
        if any(log.replays[each].next < setting.partitions[ssp].oldest for ssp, each in chosen.items()):
            raise RefusedError
        if not (log.after_replay and unread):
            ranges = _shared({s: (log.replays[e].next, log.replays[e].until) for s, e in chosen.items()}, setting.limit)
            ranges = {ssp: span for ssp, span in ranges.items() if span[0] != span[1]}
            replays = {ssp: chosen[ssp] for ssp in ranges}
            epochs = {ssp: log.replays[each].epoch for ssp, each in replays.items()}
            return Batch(log.batch + 1, ranges, epochs, replays=replays)
    startpoints = {ssp: found[0] for ssp, found in log.resolved.items()}
    if not unread:
        if startpoints or lost:
            starts = {ssp: start for ssp, (start, _) in spans.items()}
            box.commit(log, replace(log, checkpoint={**log.checkpoint, **starts}).applying(startpoints))
            yield
            _remove(box, setting, startpoints)
            yield
        return None
    epochs = {s: log.opened.get(s, 0) + 1 if s in startpoints else log.epochs.get(s, 0) for s in spans}
    epochs = {ssp: epoch for ssp, epoch in epochs.items() if epoch}
    return Batch(log.batch + 1, _shared(spans, setting.limit), epochs, startpoints=startpoints)


def _positions(setting: Setting, log: Log) -> tuple[Spans, set[str]]:
    spans: dict[str, Span] = {}
    lost = set()
    for ssp, partition in setting.partitions.items():
        _, start, oldest = log.resolved.get(ssp, ("", log.checkpoint[ssp], False))
        if start < partition.oldest:
            if not oldest:
                lost.add(ssp)
                if setting.on_lost == "fail":
                    raise RefusedError
            start = partition.oldest
        spans[ssp] = (start, partition.upcoming)
    return spans, lost


def _shared(spans: Spans, limit: int) -> dict[str, Span]:
    """Return `limit` records of these: to each its part by length, rounded down, then one more by what was cut off."""
    lengths = {ssp: end - start for ssp, (start, end) in spans.items()}
    total = sum(lengths.values())
    if total <= limit:
        return dict(spans)
    parts = {ssp: Fraction(length * limit, total) for ssp, length in lengths.items()}
    counts = {ssp: int(part) for ssp, part in parts.items()}
    for ssp in sorted(parts, key=lambda each: (counts[each] - parts[each], each))[: limit - sum(counts.values())]:
        counts[ssp] += 1
    return {ssp: (start, start + counts[ssp]) for ssp, (start, _) in spans.items()}


def _remove(box: Box, setting: Setting, applied: Mapping[str, str]) -> None:
    chosen = {(task, ssp): applied[ssp] for task, ssps in setting.tasks.items() for ssp in ssps if ssp in applied}
    box.world = replace(box.world, startpoints=startpoints_model.remove(chosen)[0](box.world.startpoints))

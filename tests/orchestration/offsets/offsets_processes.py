"""What a run does to an application's positions, step by step, in plain Python.

A process is a generator that stops after every step that others can see, and before every look at
what others change: who advances it a few times and drops it has let it die there; who does
something else meanwhile has a race.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from itertools import count

from tests.orchestration.offsets import startpoints_model
from tests.orchestration.offsets.offsets_model import (
    Batch,
    Box,
    ConflictError,
    Log,
    RefusedError,
    Replay,
    Setting,
    Span,
    Spans,
    World,
)
from tests.orchestration.offsets.startpoints_model import Request, Step

Process = Callable[[Box, Setting], Iterator[None]]


def prefixes(world: World, process: Process, setting: Setting) -> Iterator[World]:
    """Yield the worlds that a process leaves that dies, whenever it does."""
    box = Box(world)
    yield world
    with suppress(RefusedError, ConflictError):
        for _ in process(box, setting):
            yield box.world
    yield box.world


def outcomes(
    world: World, process: Process, setting: Setting, other: tuple[Process, Setting] | None
) -> Iterator[tuple[World, str]]:
    """Yield the worlds after a process, and how it ended; `other` does its work at any moment of
    it.
    """
    for steps in count():
        box, mine = Box(world), replace(setting, partitions=deepcopy(setting.partitions))
        running = process(box, mine)
        how, over = advanced(running, None if other is None else steps)
        if other is not None:
            act, theirs = other
            advanced(act(box, replace(theirs, partitions=mine.partitions)), None)
            how, _ = (how, over) if over else advanced(running, None)
        yield box.world, how
        if over:
            return


def advanced(process: Iterator[None], steps: int | None) -> tuple[str, bool]:
    """Let a process go on, to its end or for some steps; return how it ended, and whether it
    did.
    """
    done = 0
    try:
        while steps is None or done < steps:
            next(process)
            done += 1
    except StopIteration:
        return "done", True
    except RefusedError:
        return "refused", True
    except ConflictError:
        return "conflict", True
    return "done", False


def of_startpoints(steps: Sequence[Step]) -> Process:
    """Return the process that does this to requests and fan-outs."""

    def process(box: Box, setting: Setting) -> Iterator[None]:
        for step in steps:
            box.world = replace(box.world, startpoints=step(box.world.startpoints))
            yield

    return process


def cancel_replays(box: Box, setting: Setting) -> Iterator[None]:
    """Cancel all but those that an open batch reads."""
    log = box.world.log
    yield
    reading = set(log.open.replays.values()) if log.open else set()
    left = {
        replay_key: replay for replay_key, replay in log.replays.items() if replay_key in reading
    }
    if left != log.replays:
        box.commit(log, replace(log, replays=left))
    yield


def abandon(skip: bool) -> Process:
    def process(box: Box, setting: Setting) -> Iterator[None]:
        log = box.world.log
        yield
        if log.open is not None:
            after = replace(log, open=None, batch=log.open.number, after_replay=False)
            box.commit(log, after.after(log.open) if skip else after.given_up(log.open))
        yield

    return process


def stream_of(ssp: str) -> str:
    return ssp.rpartition(".")[0]


def run(box: Box, setting: Setting, max_batches: int | None) -> Iterator[None]:
    """Hand out, then end the batch that is open, then begin. Raises ConflictError and
    RefusedError, as a run does.
    """
    known = box.world.log
    yield
    fanned_out = yield from fan_out(box, setting, known)
    log = box.world.log
    yield
    started, batches = False, 0
    while max_batches is None or batches < max_batches:
        batch = log.open
        if batch is None:
            if not started:
                log = yield from _start(box, setting, log, fanned_out)
                started = True
            batch = yield from _plan(box, setting, log)
            if batch is None:
                return
        log = box.commit(log, replace(log, open=batch))
        yield
        if box.world.log.number != log.number:
            raise ConflictError
        if any(
            start < setting.partitions[ssp].oldest and start < end
            for ssp, (start, end) in batch.ranges.items()
        ):
            raise RefusedError
        assert box.world.output.get(batch.number, batch) == batch
        box.world = replace(box.world, output={**box.world.output, batch.number: batch})
        yield
        closed = replace(
            log.after(batch), open=None, batch=batch.number, after_replay=bool(batch.replays)
        )
        log = box.commit(log, closed)
        yield
        _remove(box, setting, batch.startpoints)
        yield
        batches += 1


def fan_out(
    box: Box, setting: Setting, known: Log | None = None
) -> Generator[None, None, Mapping[tuple[str, str], Request]]:
    """Return what each task has to apply, by task and partition. Who knows no log looks at it."""
    while True:
        read = box.world.startpoints
        yield
        requests = box.world.startpoints.requests
        yield
        log = box.world.log if known is None else known
        hand_out, clean_up = startpoints_model.fan_out(setting.tasks, setting.now, log.has_taken)
        handed = _kept(hand_out(replace(read, requests=requests)))
        if handed.fanned_out() == read.fanned_out():
            break
        yield
        # What it read counts, unless somebody else has changed the fan-outs since: then it begins
        # again.
        latest = box.world.startpoints
        if latest.fanned_out() == read.fanned_out():
            after = replace(handed, requests=latest.requests, finished=frozenset())
            box.world = replace(box.world, startpoints=after)
            break
    yield
    mine = replace(box.world.startpoints, finished=handed.finished)
    box.world = replace(box.world, startpoints=clean_up(mine))
    yield
    return handed.pending


def _kept(world: startpoints_model.World) -> startpoints_model.World:
    """Return the world without what a fan-out need not remember: a fan-out that changes nothing
    commits nothing.
    """
    numbers = {request.number for request in world.requests.values()}
    shared = {
        (ssp, request.number) for (_, ssp), request in world.pending.items() if request.task is None
    }
    handed = frozenset(place for place in world.handed if place[1:] in shared)
    return replace(world, settled=world.settled & numbers, handed=handed)


def _start(
    box: Box, setting: Setting, log: Log, fanned_out: Mapping[tuple[str, str], Request]
) -> Generator[None, None, Log]:
    yield
    left = {at: request.id for at, request in box.world.startpoints.pending.items()}
    pending: dict[str, tuple[str, Request]] = {}
    done: dict[tuple[str, str], str] = {}
    for (task, ssp), request in fanned_out.items():
        # else it was taken back
        if ssp in setting.tasks.get(task, ()) and left.get((task, ssp)) == request.id:
            pending[ssp] = (task, request)
    resolved = {
        s: resolution
        for s, resolution in log.resolved.items()
        if s in pending and pending[s][1].id == resolution[0]
    }
    after = replace(log, resolved=resolved, begun=frozenset())
    for ssp, (task, request) in sorted(pending.items()):
        if ssp in after.resolved:
            continue
        yield
        wish, partition = setting.wishes[request.id], setting.partitions[ssp]
        offset = partition.find(wish.position)
        end = partition.find(wish.until) if wish.until else None
        if offset is None or (wish.until and (end is None or end < offset)):
            if wish.fallback:
                continue
            raise RefusedError
        if end is None:
            oldest = wish.position.kind == "oldest"
            after = replace(after, resolved={**after.resolved, ssp: (request.id, offset, oldest)})
        else:
            taken = after.taken | {(ssp, request.id)}
            after = replace(after, begun=after.begun | {f"{request.id}@{ssp}"}, taken=taken)
            if offset < end:
                replay = Replay(ssp, after.opened.get(ssp, 0) + 1, offset, end)
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
    for replay_key, replay in sorted(
        log.replays.items(), key=lambda item: (item[1].epoch, item[0])
    ):
        chosen.setdefault(replay.ssp, replay_key)
    if chosen:
        yield
        if any(
            log.replays[replay_key].next < setting.partitions[ssp].oldest
            for ssp, replay_key in chosen.items()
        ):
            raise RefusedError
        if not (log.after_replay and unread):
            ranges = _shared(
                {s: (log.replays[e].next, log.replays[e].until) for s, e in chosen.items()},
                setting.limit,
            )
            ranges = {ssp: span for ssp, span in ranges.items() if span[0] != span[1]}
            replays = {ssp: chosen[ssp] for ssp in ranges}
            epochs = {ssp: log.replays[replay_key].epoch for ssp, replay_key in replays.items()}
            return Batch(log.batch + 1, ranges, epochs, replays=replays)
    startpoints = {ssp: resolution[0] for ssp, resolution in log.resolved.items()}
    if not unread:
        if startpoints or lost:
            starts = {ssp: start for ssp, (start, _) in spans.items()}
            box.commit(
                log, replace(log, checkpoint={**log.checkpoint, **starts}).applying(startpoints)
            )
            yield
            _remove(box, setting, startpoints)
            yield
        return None
    epochs = {
        s: log.opened.get(s, 0) + 1 if s in startpoints else log.epochs.get(s, 0) for s in spans
    }
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
    """Return `limit` records of these: to each its part by length, rounded down, then one more
    by what was cut off.
    """
    lengths = {ssp: end - start for ssp, (start, end) in spans.items()}
    total = sum(lengths.values())
    if total <= limit:
        return dict(spans)
    parts = {ssp: Fraction(length * limit, total) for ssp, length in lengths.items()}
    counts = {ssp: int(part) for ssp, part in parts.items()}
    for ssp in sorted(parts, key=lambda name: (counts[name] - parts[name], name))[
        : limit - sum(counts.values())
    ]:
        counts[ssp] += 1
    return {ssp: (start, start + counts[ssp]) for ssp, (start, _) in spans.items()}


def _remove(box: Box, setting: Setting, applied: Mapping[str, str]) -> None:
    chosen = {
        (task, ssp): applied[ssp]
        for task, ssps in setting.tasks.items()
        for ssp in ssps
        if ssp in applied
    }
    box.world = replace(
        box.world, startpoints=startpoints_model.remove(chosen)[0](box.world.startpoints)
    )

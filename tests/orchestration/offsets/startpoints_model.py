"""What startpoints of an application should be after any history: plain Python, with no word of
the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

HOUR = 3_600_000
Target = tuple[str, str | None]
Tasks = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Request:
    """A request as it was written; `number` is its place in the order of all writes."""

    ssp: str
    task: str | None
    id: str
    created: int
    number: int

    def expired(self, now: int) -> bool:
        return now - self.created >= 12 * HOUR


@dataclass(frozen=True)
class World:
    """Requests, what each task has to apply, and what the fan-outs have to remember, for ever
    here.
    """

    requests: Mapping[Target, Request] = field(default_factory=dict)
    pending: Mapping[tuple[str, str], Request] = field(default_factory=dict)
    settled: frozenset[int] = frozenset()
    handed: frozenset[tuple[str, str, int]] = frozenset()
    finished: frozenset[int] = frozenset()

    def key(self) -> object:
        """Return what tells two worlds apart."""
        requests = frozenset(self.requests.values())
        return requests, frozenset(self.pending.items()), self.settled, self.handed

    def fanned_out(self) -> object:
        """Return all that is kept of fan-outs."""
        return dict(self.pending), self.settled, self.handed

    def seen(self, now: int) -> object:
        """Return what anybody can see of it."""
        live = {(r.ssp, r.task, r.id) for r in self.requests.values() if not r.expired(now)}
        return live, {(task, ssp, r.id) for (task, ssp), r in self.pending.items()}


Step = Callable[[World], World]


def write(request: Request) -> Sequence[Step]:
    return [
        lambda world: replace(
            world, requests={**world.requests, (request.ssp, request.task): request}
        )
    ]


def delete(target: Target) -> Sequence[Step]:
    """Take it back first, so that no coordinator hands it out, and then delete it."""

    def take_back(world: World) -> World:
        there = world.requests.get(target)
        return world if there is None else replace(world, settled=world.settled | {there.number})

    return [
        take_back,
        lambda world: replace(
            world, requests={k: r for k, r in world.requests.items() if k != target}
        ),
    ]


def remove(chosen: Mapping[tuple[str, str], str | None]) -> Sequence[Step]:
    """Remove what is pending at these tasks and partitions; with an id, only if it is this one."""

    def step(world: World) -> World:
        gone = {
            at for at, r in world.pending.items() if at in chosen and chosen[at] in (None, r.id)
        }
        return replace(world, pending={at: r for at, r in world.pending.items() if at not in gone})

    return [step]


def nothing_taken(ssp: str, request: str) -> bool:
    return False


def fan_out(
    tasks: Tasks, now: int, taken: Callable[[str, str], bool] = nothing_taken
) -> Sequence[Step]:
    """Hand out, then clean up; `taken` says of which partition's requests a commit has taken in."""

    def hand_out(world: World) -> World:
        pending: dict[tuple[str, str], Request] = {}
        handed, settled = set(world.handed), set(world.settled)

        def give(task: str, request: Request) -> None:
            before = pending.get((task, request.ssp))
            pending[task, request.ssp] = (
                request if before is None else which_counts(before, request)
            )
            handed.add((task, request.ssp, request.number))

        orphans = []
        for (task, ssp), request in world.pending.items():
            if taken(ssp, request.id):
                continue
            heirs = request.task is None and any(ssp in ssps for ssps in tasks.values())
            if ssp in tasks.get(task, ()) or not heirs:
                pending[task, ssp] = request
            else:
                orphans.append(request)
                handed.discard((task, ssp, request.number))
        for orphan in orphans:
            for task in tasks:
                heir = orphan.task is None and orphan.ssp in tasks[task]
                if heir and (task, orphan.ssp, orphan.number) not in handed:
                    give(task, orphan)
        finished = set()
        for request in sorted(world.requests.values(), key=lambda waiting: waiting.number):
            takers = [t for t in tasks if request.ssp in tasks[t] and request.task in (None, t)]
            if request.number in settled or request.expired(now):
                finished.add(request.number)
            elif takers:
                for task in takers:
                    give(task, request)
                settled.add(request.number)
                finished.add(request.number)
        return World(
            world.requests, pending, frozenset(settled), frozenset(handed), frozenset(finished)
        )

    def clean_up(world: World) -> World:
        left = {k: r for k, r in world.requests.items() if r.number not in world.finished}
        return replace(world, requests=left, finished=frozenset())

    return [hand_out, clean_up]


def which_counts(left: Request, right: Request) -> Request:
    if (left.task is None) == (right.task is None):
        return max(left, right, key=lambda request: request.number)
    return max(left, right, key=lambda request: (request.created, request.task is not None))


def unknown(world: World, tasks: Tasks, now: int) -> set[str]:
    """Return the ids of live requests that no task can take."""
    return {
        r.id
        for r in world.requests.values()
        if not r.expired(now)
        and r.number not in world.settled
        and not any(r.ssp in ssps and r.task in (None, task) for task, ssps in tasks.items())
    }


def outcomes(
    world: World, steps: Sequence[Step], other: Sequence[Step] | None, whole: bool
) -> list[World]:
    """Return the worlds that can be there after these steps, or (not `whole`) after the first few
    of them.

    `other` was done by somebody else meanwhile, in one go, at any moment.
    """
    worlds: list[World] = []
    for count in [len(steps)] if whole else range(len(steps) + 1):
        done = list(steps[:count])
        if other is None:
            worlds.append(after(world, done))
        else:
            worlds += [
                after(after(after(world, done[:at]), other, done[:at]), done[at:])
                for at in range(count + 1)
            ]
    return worlds


def after(world: World, steps: Sequence[Step], within: Sequence[Step] | None = None) -> World:
    """Return the world after these steps; `within` another's, whose own list of what to delete
    stays its own.
    """
    kept = world.finished
    for step in steps:
        world = step(world)
    return world if within is None else replace(world, finished=kept)

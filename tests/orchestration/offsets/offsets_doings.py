"""What people, coordinators and runs do to an application's positions: on the lake, and in the
model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Fault
from tests.orchestration.offsets import offsets_processes, startpoints_model
from tests.orchestration.offsets.offsets_model import (
    Box,
    Partition,
    Position,
    Replay,
    Setting,
    Wish,
)
from tests.orchestration.offsets.offsets_processes import Process
from tests.orchestration.offsets.offsets_world import OffsetsWorld
from tests.orchestration.offsets.startpoints_model import HOUR, Request

TASKS = ("Partition 0", "Partition 1")
NOT_THERE = "lake.a.7"
LIMIT = 4

# Something done on a lake on which these faults happen, and the same in the model.
Doing = tuple[Callable[..., Any], Process]


@dataclass
class Doings:
    """One application over the streams fake.s and lake.a; `partitions` are those of both in the
    model.

    `assigned` says which task reads each of them.
    """

    here: OffsetsWorld
    app: Application
    default: Literal["oldest", "upcoming"]
    on_lost: Literal["fail", "oldest"]
    assigned: list[str]
    partitions: dict[str, Partition]
    wishes: dict[str, Wish] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def tasks(self) -> dict[str, frozenset[str]]:
        by_task: dict[str, frozenset[str]] = {}
        for ssp, task in zip(self.partitions, self.assigned, strict=False):
            by_task[task] = by_task.get(task, frozenset()) | {ssp}
        return by_task

    def setting(self) -> Setting:
        defaults = {"fake.s": self.default, "lake.a": self.default}
        tasks = self.tasks()
        return Setting(
            self.partitions, self.wishes, tasks, self.here.now_ms, defaults, self.on_lost, LIMIT
        )

    # -- what is done

    def run(self, batches: int | None, *planned: Fault) -> Doing:
        tasks = {task: sorted(ssps) for task, ssps in self.tasks().items()}

        def act(*faults: Fault) -> None:
            run_step(
                self.here.context(
                    self.app, tasks=tasks, max_batches=batches, faults=(*planned, *faults)
                ),
                self.here.output,
            )

        return act, lambda box, setting: offsets_processes.run(box, setting, batches)

    def fan_out(self) -> Doing:
        tasks = {
            task: [SystemStreamPartition.parse(s) for s in ssps]
            for task, ssps in self.tasks().items()
        }

        def act(*faults: Fault) -> None:
            self.here.startpoints(self.app, self.here.faulty(faults)).fan_out(tasks, complete=True)

        return act, offsets_processes.fan_out

    def write(self, to: tuple[int, str | None], wish: Wish, skew: int) -> Doing:
        """Write a request for the partition of this number, by a clock that is off by `skew`
        hours.
        """
        ssp, task = (*self.partitions, NOT_THERE)[to[0]], to[1]
        count, created = next(self.numbers), self.here.now_ms + skew * HOUR
        request = Request(ssp, task, f"id{count}", created, count)
        position, until = (
            self._ago(wish.position),
            None if wish.until is None else self._ago(wish.until),
        )
        self.wishes[request.id] = Wish(position, until, wish.fallback)
        written = StartpointRequest(
            ssp=SystemStreamPartition.parse(ssp),
            startpoint=startpoint_at(ssp, position, created, request.id),
            until=None if until is None else startpoint_at(ssp, until, created, "until"),
            task=task,
            by="ada",
            reason="ticket 7",
            on_unresolved="checkpoint" if wish.fallback else "fail",
            id=request.id,
        )

        def act(*faults: Fault) -> None:
            self.here.startpoints(self.app, self.here.faulty(faults)).write_startpoints([written])

        return act, offsets_processes.of_startpoints(startpoints_model.write(request))

    def clear(self) -> Doing:
        """Take back all requests, one by one, and then what is fanned out, task by task."""
        ssps = [*self.partitions, NOT_THERE]
        targets = [(ssp, task) for ssp in ssps for task in (None, *TASKS)]

        def act(*faults: Fault) -> None:
            manager = self.here.startpoints(self.app, self.here.faulty(faults))
            for ssp, task in targets:
                manager.delete_startpoint(SystemStreamPartition.parse(ssp), task)
            for task in TASKS:
                manager.remove_fan_out_for_task(task)

        deleted = [step for target in targets for step in startpoints_model.delete(target)]
        held = [dict.fromkeys((task, ssp) for ssp in ssps) for task in TASKS]
        removed = [step for chosen in held for step in startpoints_model.remove(chosen)]
        return act, offsets_processes.of_startpoints([*deleted, *removed])

    def cancel_replays(self) -> Doing:
        """Cancel all but those that an open batch reads."""

        def act(*faults: Fault) -> None:
            state = self.here.state(self.app)
            reading = set(state.open.replays.values()) if state.open else set()
            ids = state.offsets.replays.keys() - reading
            BatchLog(self.here.faulty(faults), self.app.name).cancel_replays(
                ids, reason="ticket 9", by="ada"
            )

        return act, offsets_processes.cancel_replays

    def abandon(self, skip: bool) -> Doing:
        def act(*faults: Fault) -> None:
            BatchLog(self.here.faulty(faults), self.app.name).abandon(
                reason="ticket 8", by="ada", skip=skip
            )

        return act, offsets_processes.abandon(skip)

    def arrive(self, partition: int, count: int) -> Doing:
        """Add records to a partition of fake.s, if it has this one. The model's is what a
        process finds.
        """
        name, now = f"fake.s.{partition}", self.here.now_ms

        def act(*faults: Fault) -> None:
            if name in self.partitions:
                self.here.fake.write("s", partition, *[now] * count)

        def in_model(box: Box, setting: Setting) -> Iterator[None]:
            if name in setting.partitions:
                setting.partitions[name].times += [now] * count
            yield

        return act, in_model

    # -- what is seen

    def seen(self) -> object:
        """Return of the lake what `offsets_model.World.seen` returns of the model."""
        live = {
            (str(request.ssp), request.task, request.id)
            for request in self.here.startpoints(self.app).read().waiting
        }
        pending = {
            (task, str(ssp), request_id)
            for (task, ssp), request_id in self.here.fanned_out(self.app).items()
        }
        state = self.here.state(self.app)
        offsets, opened = state.offsets, None
        if state.open:
            ranges = {
                str(ssp): (number(span.start), number(span.end))
                for ssp, span in state.open.ranges.items()
            }
            opened = state.open.batch, ranges, texts(state.open.epochs)
        replays = {
            replay.id: Replay(
                str(replay.ssp), replay.epoch, number(replay.next), number(replay.until)
            )
            for replay in offsets.replays.values()
        }
        checkpoint = {str(ssp): number(offset) for ssp, offset in state.checkpoint.items()}
        resolved = {
            str(ssp): (resolution.id, number(resolution.offset))
            for ssp, resolution in offsets.resolved.items()
        }
        applied = {str(ssp): request.id for ssp, request in offsets.applied.items()}
        positions = (checkpoint, state.batch, opened, resolved, applied)
        epochs = (
            texts(offsets.epochs.main),
            texts(offsets.epochs.highest),
            replays,
            frozenset(offsets.begun),
        )
        output = {
            batch.number: (
                {
                    str(ssp): (number(start), number(end))
                    for ssp, (start, end) in batch.ranges.items()
                },
                texts(batch.epochs),
                batch.main,
            )
            for batch in self.here.output.batches.values()
        }
        return (live, pending), (positions, epochs), output

    def _ago(self, position: Position) -> Position:
        """Return a position whose time is counted back from now."""
        at = self.here.now_ms - position.value
        return replace(position, value=at) if position.kind == "timestamp" else position


def texts(by_partition: Mapping[SystemStreamPartition, int]) -> dict[str, int]:
    """Return what is by partition as the model has it: by their names."""
    return {str(ssp): value for ssp, value in by_partition.items()}


def in_turn(*doings: Doing) -> Doing:
    def act(*faults: Fault) -> None:
        for step, _ in doings:
            step(*faults)

    def in_model(box: Box, setting: Setting) -> Iterator[None]:
        for _, step in doings:
            yield from step(box, setting)

    return act, in_model


def startpoint_at(ssp: str, position: Position, created: int, startpoint_id: str) -> Startpoint:
    given: dict[str, Any] = {"creation_timestamp_ms": created, "id": startpoint_id}
    if position.kind == "specific":
        offset = f"@{position.value}" if ssp.startswith("fake") else str(position.value)
        return StartpointSpecific(offset=offset, **given)
    if position.kind == "timestamp":
        return StartpointTimestamp(timestamp_ms=position.value, **given)
    return (StartpointOldest if position.kind == "oldest" else StartpointUpcoming)(**given)


def number(offset: str) -> int:
    return int(offset.removeprefix("@"))

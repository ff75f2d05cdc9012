"""Any history of requests, runs, crashes, races, repartitions, replays and retention, against a plain-Python model.

After a crash or a race nobody can say how far each came, so the model is then in one of several worlds; what is seen
afterwards must be that of one of them. What the output got is also judged by itself, record by record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestration.application import Application
from orchestration.batchlog import BatchLog
from orchestration.offsets.request import StartpointRequest
from orchestration.step import run_step
from resources.errors import CommitConflict, CommitStateUnknown, OffsetOutOfRangeError, StoreUnavailableError
from resources.objects import commit as commit_module
from resources.objects.faulty import Crash, Fault
from resources.streams import SystemStreamPartition
from resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from tests.orchestration.offsets import offsets_model as model
from tests.orchestration.offsets import startpoints_model
from tests.orchestration.offsets.offsets_model import Box, Partition, Position, Setting, Wish, World
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld
from tests.orchestration.offsets.startpoints_model import HOUR, Request

TASKS = ("Partition 0", "Partition 1")
LAKE = ("lake.a.0", "lake.a.1")
LIMIT = 4

ASSIGNED = st.lists(st.sampled_from(TASKS), min_size=5, max_size=5)
POSITIONS = st.one_of(
    st.sampled_from([Position("oldest"), Position("upcoming")]),
    st.builds(Position, st.just("specific"), st.integers(0, 12)),
    st.builds(Position, st.just("timestamp"), st.integers(0, 30).map(lambda hours: hours * HOUR)),
)
WISHES = st.builds(Wish, POSITIONS, st.one_of(st.none(), st.none(), POSITIONS), st.booleans())
TARGETS = st.tuples(st.integers(0, 4), st.sampled_from([None, None, *TASKS]))
FAULTS = st.tuples(
    st.integers(1, 60),
    st.sampled_from(["crash-before", "crash-after", "crash-before", "lost-after", "lost-before", "throttle"]),
)
BATCHES = st.sampled_from([None, None, 1, 2])

# What a process does in the model: stops wherever somebody else can come in between.
Act = Callable[[Box, Setting], Iterator[None]]


class OffsetMachine(RuleBasedStateMachine):
    """One application over a stream of the lake and one of another system, which gets new partitions and loses old
    records."""

    @initialize(
        assigned=ASSIGNED,
        default=st.sampled_from(["oldest", "upcoming"]),
        on_lost=st.sampled_from(["oldest", "oldest", "fail"]),
    )
    def begin(self, assigned: list[str], default: Any, on_lost: Any) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(commit_module, "_FIRST_PAUSE", 0.0001)
        self.here = OffsetsWorld(self.patch)
        self.here.output.before = self.check_readable
        self.here.stream("a", 2)
        self.here.fake.make("s", 2)
        self.app = Application("app", max_batch_records=LIMIT)
        self.app.input_stream("fake.s", default_offset=default, on_lost=on_lost)
        self.app.input_stream("lake.a", default_offset=default, on_lost=on_lost)
        self.defaults = {"fake.s": default, "lake.a": default}
        self.on_lost = on_lost
        self.assigned = assigned
        self.partitions = {ssp: Partition() for ssp in ("fake.s.0", "fake.s.1", *LAKE)}
        self.wishes: dict[str, Wish] = {}
        self.numbers = itertools.count(1)
        self.abandoned: dict[int, Batch] = {}
        self.worlds = [World()]

    def teardown(self) -> None:
        if not hasattr(self, "worlds"):
            return
        try:
            self.check_that_no_startpoint_was_applied_twice()
        finally:
            self.patch.undo()

    # -- the world

    @rule(partition=st.integers(0, 2), count=st.integers(1, 6))
    def records_arrive(self, partition: int, count: int) -> None:
        if f"fake.s.{partition}" in self.partitions:
            self.here.fake.write("s", partition, *[self.here.now_ms] * count)
            self.partitions[f"fake.s.{partition}"].times += [self.here.now_ms] * count

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def records_arrive_in_the_lake(self, keys: list[int]) -> None:
        self.here.send("a", *keys)
        ssps = [SystemStreamPartition.parse(ssp) for ssp in LAKE]
        for ssp, upcoming in self.here.systems()["lake"].upcoming(ssps).items():
            times = self.partitions[str(ssp)].times
            times += [self.here.now_ms] * (int(upcoming) - len(times))

    @rule(partition=st.integers(0, 2), back=st.integers(0, 3))
    def retention(self, partition: int, back: int) -> None:
        name = f"fake.s.{partition}"
        if name in self.partitions:
            kept = self.partitions[name]
            kept.oldest = max(kept.oldest, kept.upcoming - back)
            self.here.fake.retain_from("s", partition, kept.oldest)

    @precondition(lambda self: "fake.s.2" not in self.partitions)
    @rule(seldom=st.integers(0, 3))
    def a_partition_is_added(self, seldom: int) -> None:
        if seldom == 0:
            self.here.fake.add_partitions("s", 1)
            self.partitions = dict(sorted({**self.partitions, "fake.s.2": Partition()}.items()))

    @rule(hours=st.sampled_from([1, 1, 5, 12]))
    def wait(self, hours: int) -> None:
        self.here.wait(hours=hours)

    @rule(assigned=ASSIGNED)
    def repartition(self, assigned: list[str]) -> None:
        self.assigned = assigned

    # -- what people do

    @rule(to=TARGETS, wish=WISHES, skew=st.sampled_from([0, 0, 0, -1, -12]))
    def write(self, to: tuple[int, str | None], wish: Wish, skew: int) -> None:
        self.do_whole(*self.writing(to, wish, skew))

    @rule(fault=FAULTS)
    def take_back(self, fault: Any) -> None:
        """Somebody clears all requests, and then what is fanned out."""
        self.do(*self.clearing(), fault)

    @rule(fault=FAULTS)
    def cancel_replays(self, fault: Any) -> None:
        self.do(*self.cancelling(), fault)

    @precondition(lambda self: self.here.state(self.app).open is not None)
    @rule(skip=st.booleans(), fault=st.one_of(st.none(), FAULTS))
    def abandon(self, skip: bool, fault: Any) -> None:
        opened = self.here.state(self.app).open
        assert opened is not None
        self.do(*self.abandoning(skip), fault)
        if self.here.state(self.app).open is None:
            ranges = {ssp: (span.start, span.end) for ssp, span in opened.ranges.items()}
            self.abandoned[opened.batch] = Batch(opened.batch, ranges if skip else {}, opened.epochs, True)

    # -- what coordinators and runs do

    @rule()
    def fan_out(self) -> None:
        self.do_whole(*self.fanning_out())

    @rule(batches=BATCHES)
    def run(self, batches: int | None) -> None:
        self.do_whole(*self.running(batches))

    @rule(batches=BATCHES, fault=FAULTS)
    def run_that_dies(self, batches: int | None, fault: Any) -> None:
        self.do(*self.running(batches), fault)

    @rule(
        batches=BATCHES,
        nth=st.integers(1, 40),
        mine=ASSIGNED,
        what=st.sampled_from(
            ["run", "run", "run a batch", "fan out", "write", "write and fan out", "clear", "cancel", "arrive"]
        ),
        to=TARGETS,
        wish=WISHES,
        partition=st.integers(0, 2),
    )
    def run_while_another(
        self, batches: int | None, nth: int, mine: list[str], what: str, to: Any, wish: Wish, partition: int
    ) -> None:
        """Between any two requests of a run, with a plan of its own, somebody else does something."""
        others: dict[str, Callable[[], tuple[Callable[[], Any], Act]]] = {
            "run": lambda: self.running(None),
            "run a batch": lambda: self.running(1),
            "fan out": self.fanning_out,
            "write": lambda: self.writing(to, wish, 0),
            "write and fan out": lambda: in_turn(self.writing(to, wish, 0), self.fanning_out()),
            "clear": self.clearing,
            "cancel": self.cancelling,
            "arrive": lambda: self.arrival(partition),
        }
        act, in_model = others[what]()
        happened: list[bool] = []

        def interrupt() -> None:
            happened.append(True)
            with suppress(OffsetOutOfRangeError, CommitConflict):
                act()

        before, self.assigned = self.assigned, mine
        run, run_in_model = self.running(batches, Fault("*", nth, "meanwhile", interrupt))
        result = self.attempt(run)
        outcomes = self.outcomes(run_in_model, None if not happened else (in_model, before))
        self.assigned = before
        if happened and what == "arrive":
            self.arriving_in(self.partitions, partition)
        self.must_be_one_of([world for world, how in outcomes if how == result])

    @rule()
    def run_to_the_end(self) -> None:
        """A run that nothing disturbs leaves nothing to do."""
        act, in_model = self.running(None)
        result = self.attempt(act)
        self.must_be_one_of([world for world, how in self.outcomes(in_model, None) if how == result])
        if result != "done":
            return
        state = self.here.state(self.app)
        assert (state.open, dict(state.offsets.resolved), dict(state.offsets.replays)) == (None, {}, {})
        for ssp, partition in self.partitions.items():
            assert number(state.checkpoint[ssp]) == partition.upcoming
        for startpoint in self.here.fanned_out(self.app).values():
            assert self.wishes[startpoint].fallback

    # -- what the output got, judged by itself

    @invariant()
    def every_record_is_delivered_once_an_epoch_and_none_is_skipped(self) -> None:
        if not hasattr(self, "worlds"):
            return
        covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for batch in {**self.here.output.batches, **self.abandoned}.values():
            for ssp, (start, end) in batch.ranges.items():
                if start != end:
                    span = (number(start), number(end))
                    covered.setdefault((ssp, batch.epochs.get(ssp, 0)), []).append(span)
        for (ssp, _), spans in covered.items():
            spans.sort()
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert end <= start, f"{ssp}: {spans} overlap"
                gone = self.partitions[ssp].oldest
                assert end == start or start <= gone, f"{ssp}: {spans} leave out what was there"

    def check_that_no_startpoint_was_applied_twice(self) -> None:
        commits = [state for _, state in BatchLog(self.here.lake, "app").history(None)][::-1]
        applied: dict[str, list[str]] = {}
        for state in commits:
            for ssp, startpoint in state.offsets.applied.items():
                known = applied.setdefault(ssp, [])
                if not known or known[-1] != startpoint.id:
                    assert startpoint.id not in known
                    known.append(startpoint.id)
        begun: list[str] = []
        for before, after in itertools.pairwise([None, *commits]):
            old = before.offsets.replays if before else {}
            begun += after.offsets.replays.keys() - old.keys() if after else []
        assert len(begun) == len(set(begun))

    # -- each thing that is done, and what it means in the model

    def running(self, batches: int | None, *planned: Fault) -> tuple[Callable[..., Any], Act]:
        tasks = self.tasks()

        def act(*faults: Fault) -> None:
            run_step(self.here.context(self.app, tasks=tasks, max_batches=batches, faults=(*planned, *faults)))

        return act, lambda box, setting: model.run(box, setting, batches)

    def fanning_out(self) -> tuple[Callable[..., Any], Act]:
        tasks = {task: [SystemStreamPartition.parse(s) for s in ssps] for task, ssps in self.tasks().items()}
        return lambda *faults: self.here.startpoints(self.app, self.here.faulty(faults)).fan_out(tasks), model.fan_out

    def writing(self, to: tuple[int, str | None], wish: Wish, skew: int) -> tuple[Callable[..., Any], Act]:
        ssp, task = (*self.partitions, "lake.a.7")[to[0]], to[1]
        count = next(self.numbers)
        created = self.here.now_ms + skew * HOUR
        request = Request(ssp, task, f"id{count}", created, count)
        position, until = self.ago(wish.position), wish.until and self.ago(wish.until)
        self.wishes[request.id] = Wish(position, until, wish.fallback)
        written = StartpointRequest(
            ssp=SystemStreamPartition.parse(ssp),
            startpoint=startpoint_at(ssp, position, created, request.id),
            until=until and startpoint_at(ssp, until, created, "until"),
            task=task,
            by="ada",
            reason="ticket 7",
            on_unresolved="checkpoint" if wish.fallback else "fail",
        )

        def act(*faults: Fault) -> None:
            self.here.startpoints(self.app, self.here.faulty(faults)).write_startpoints([written])

        return act, startpoint_steps(startpoints_model.write(request))

    def clearing(self) -> tuple[Callable[..., Any], Act]:
        ssps = [*self.partitions, "lake.a.7"]
        targets = [(ssp, task) for ssp in ssps for task in (None, *TASKS)]

        def act(*faults: Fault) -> None:
            manager = self.here.startpoints(self.app, self.here.faulty(faults))
            for ssp, task in targets:
                manager.delete_startpoint(SystemStreamPartition.parse(ssp), task)
            for task in TASKS:
                manager.remove_fan_out_for_task(task)

        deleted = [step for target in targets for step in startpoints_model.delete(target)]
        removed = [startpoints_model.remove(dict.fromkeys((task, ssp) for ssp in ssps))[0] for task in TASKS]
        return act, startpoint_steps([*deleted, *removed])

    def cancelling(self) -> tuple[Callable[..., Any], Act]:
        def act(*faults: Fault) -> None:
            log = BatchLog(self.here.faulty(faults), "app")
            state = self.here.state(self.app)
            reading = set(state.open.replays.values()) if state.open else set()
            log.cancel_replays(state.offsets.replays.keys() - reading, reason="ticket 9", by="ada")

        def in_model(box: Box, setting: Setting) -> Iterator[None]:
            log = box.world.log
            yield
            reading = set(log.open.replays.values()) if log.open else set()
            left = {each: replay for each, replay in log.replays.items() if each in reading}
            if left != log.replays:
                box.commit(log, replace(log, replays=left))
            yield

        return act, in_model

    def abandoning(self, skip: bool) -> tuple[Callable[..., Any], Act]:
        def act(*faults: Fault) -> None:
            BatchLog(self.here.faulty(faults), "app").abandon(reason="ticket 8", by="ada", skip=skip)

        def in_model(box: Box, setting: Setting) -> Iterator[None]:
            log = box.world.log
            yield
            if log.open is not None:
                after = replace(log, open=None, batch=log.open.number, after_replay=False)
                box.commit(log, after.after(log.open) if skip else after)
            yield

        return act, in_model

    def arrival(self, partition: int) -> tuple[Callable[..., Any], Act]:
        def in_model(box: Box, setting: Setting) -> Iterator[None]:
            self.arriving_in(setting.partitions, partition)
            yield

        def act() -> None:
            if f"fake.s.{partition}" in self.partitions:
                self.here.fake.write("s", partition, *[self.here.now_ms] * 2)

        return act, in_model

    def arriving_in(self, partitions: dict[str, Partition], partition: int) -> None:
        if f"fake.s.{partition}" in partitions:
            partitions[f"fake.s.{partition}"].times += [self.here.now_ms] * 2

    # -- how

    def tasks(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for ssp, task in zip(self.partitions, self.assigned, strict=False):
            found[task] = found.get(task, frozenset()) | {ssp}
        return found

    def setting(self, assigned: list[str] | None = None) -> Setting:
        mine, self.assigned = self.assigned, assigned or self.assigned
        tasks, self.assigned = self.tasks(), mine
        streams = deepcopy(self.partitions)
        return Setting(streams, self.wishes, tasks, self.here.now_ms, self.defaults, self.on_lost, LIMIT)

    def ago(self, position: Position) -> Position:
        """Return a position whose time is counted back from now."""
        at = self.here.now_ms - position.value
        return Position("timestamp", at) if position.kind == "timestamp" else position

    def check_readable(self, batch: Batch) -> None:
        for ssp, (start, end) in batch.ranges.items():
            if start != end and number(start) < self.partitions[ssp].oldest:
                raise OffsetOutOfRangeError(f"{ssp} holds no {start} any more.", "Abandon the batch.")

    def attempt(self, act: Callable[..., Any], *faults: Fault) -> str:
        try:
            act(*faults)
        except (Crash, StoreUnavailableError, CommitStateUnknown):
            return "dead"
        except OffsetOutOfRangeError:
            return "refused"
        except CommitConflict:
            return "conflict"
        return "done"

    def do_whole(self, act: Callable[..., Any], in_model: Act) -> None:
        self.do(act, in_model, None)

    def do(self, act: Callable[..., Any], in_model: Act, fault: Any) -> None:
        result = self.attempt(act, *([] if fault is None else [Fault("*", *fault)]))
        if result == "dead":
            self.must_be_one_of([each for world in self.worlds for each in self.prefixes(world, in_model)])
        else:
            self.must_be_one_of([world for world, how in self.outcomes(in_model, None) if how == result])

    def prefixes(self, world: World, in_model: Act) -> Iterator[World]:
        """Yield the worlds that a process leaves that dies, whenever it does."""
        box = Box(world)
        yield world
        with suppress(model.RefusedError, model.ConflictError):
            for _ in in_model(box, self.setting()):
                yield box.world
        yield box.world

    def outcomes(self, in_model: Act, other: tuple[Act, list[str]] | None) -> list[tuple[World, str]]:
        """Return the worlds after this, and how it ended; `other` is done by somebody else at any moment."""
        found = []
        for world in self.worlds:
            for steps in itertools.count():
                box, setting = Box(world), self.setting()
                mine = in_model(box, setting)
                how, over = advanced(mine, None if other is None else steps)
                if other is not None:
                    act, assigned = other
                    theirs = self.setting(assigned)
                    theirs.partitions = setting.partitions
                    advanced(act(box, theirs), None)
                    how, _ = (how, over) if over else advanced(mine, None)
                found.append((box.world, how))
                if over:
                    break
        return found

    def must_be_one_of(self, worlds: list[World]) -> None:
        seen = self.seen()
        possible = {world.key(): world for world in worlds if world.seen(self.here.now_ms) == seen}
        assert possible, f"{seen}\nexpected one of\n" + "\n".join(
            dict.fromkeys(str(world.seen(self.here.now_ms)) for world in worlds)
        )
        self.worlds = list(possible.values())

    def seen(self) -> object:
        """Return what `World.seen` returns, of the real one."""
        manager = self.here.startpoints(self.app)
        live = {(str(each.ssp), each.task, each.startpoint.id) for each in manager.requests()}
        pending = {(task, ssp, each) for (task, ssp), each in self.here.fanned_out(self.app).items()}
        state = self.here.state(self.app)
        offsets = state.offsets
        opened = state.open and (
            state.open.batch,
            {ssp: (number(span.start), number(span.end)) for ssp, span in state.open.ranges.items()},
            dict(state.open.epochs),
        )
        replays = {
            each.id: model.Replay(each.ssp, each.epoch, number(each.next), number(each.until))
            for each in offsets.replays.values()
        }
        log = (
            (
                {ssp: number(offset) for ssp, offset in state.checkpoint.items()},
                state.batch,
                opened,
                {ssp: (each.id, number(each.offset)) for ssp, each in offsets.resolved.items()},
                {ssp: each.id for ssp, each in offsets.applied.items()},
            ),
            (dict(offsets.epochs), dict(offsets.opened), replays, frozenset(offsets.begun)),
        )
        output = {
            each.number: (
                {ssp: (number(start), number(end)) for ssp, (start, end) in each.ranges.items()},
                each.epochs,
                each.main,
            )
            for each in self.here.output.batches.values()
        }
        return (live, pending), log, output


def in_turn(*doings: tuple[Callable[..., Any], Act]) -> tuple[Callable[..., Any], Act]:
    def act(*faults: Fault) -> None:
        for each, _ in doings:
            each(*faults)

    def in_model(box: Box, setting: Setting) -> Iterator[None]:
        for _, each in doings:
            yield from each(box, setting)

    return act, in_model


def advanced(process: Iterator[None], steps: int | None) -> tuple[str, bool]:
    """Let a process of the model go on, to its end or for some steps; return how it ended, and whether it did."""
    count = 0
    try:
        while steps is None or count < steps:
            next(process)
            count += 1
    except StopIteration:
        return "done", True
    except model.RefusedError:
        return "refused", True
    except model.ConflictError:
        return "conflict", True
    return "done", False


def startpoint_steps(steps: Any) -> Act:
    def in_model(box: Box, setting: Setting) -> Iterator[None]:
        for step in steps:
            box.world = replace(box.world, startpoints=step(box.world.startpoints))
            yield

    return in_model


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


TestOffsets = OffsetMachine.TestCase
TestOffsets.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

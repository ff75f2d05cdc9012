"""Any history of requests, runs, crashes, races, repartitions, replays and retention, against a
plain-Python model.

After a crash or a race nobody can say how far each came, so the model is then in one of several
worlds; what is seen afterwards must be that of one of them. What the output got is also judged by
itself, record by record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    OffsetOutOfRangeError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects import commit_log as commit_module
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash, Fault
from tests.orchestration.offsets.offsets_doings import LIMIT, TASKS, Doing, Doings, in_turn, number
from tests.orchestration.offsets.offsets_model import Box, Partition, Position, Wish, World
from tests.orchestration.offsets.offsets_processes import outcomes, prefixes
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld
from tests.orchestration.offsets.startpoints_model import HOUR
from tests.rounds import rounds

LAKE = ("lake.a.0", "lake.a.1")
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
    st.sampled_from(
        ["crash-before", "crash-after", "crash-before", "lost-after", "lost-before", "throttle"]
    ),
)
BATCHES = st.sampled_from([None, None, 1, 2])
MEANWHILE = st.sampled_from(
    [
        "run",
        "run",
        "run a batch",
        "fan out",
        "write",
        "write and fan out",
        "clear",
        "cancel",
        "arrive",
    ]
)


class OffsetMachine(RuleBasedStateMachine):
    """One application over a stream of the lake and one of another system, which gets partitions
    and loses records.
    """

    @initialize(
        assigned=ASSIGNED,
        default=st.sampled_from(["oldest", "upcoming"]),
        on_lost=st.sampled_from(["oldest", "oldest", "fail"]),
    )
    def begin(self, assigned: list[str], default: Any, on_lost: Any) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(commit_module, "_FIRST_PAUSE", 0.0001)
        self.here = OffsetsWorld()
        self.here.output.before = self.check_readable
        self.here.stream("a", 2)
        self.here.fake.make("s", 2)
        app = Application("app", max_batch_records=LIMIT)
        app.input_stream("fake.s", default_offset=default, on_lost=on_lost)
        app.input_stream("lake.a", default_offset=default, on_lost=on_lost)
        partitions = {ssp: Partition() for ssp in ("fake.s.0", "fake.s.1", *LAKE)}
        self.doings = Doings(self.here, app, default, on_lost, assigned, partitions)
        self.abandoned: dict[int, Batch] = {}
        self.worlds = [World()]

    def teardown(self) -> None:
        if not hasattr(self, "worlds"):
            return
        try:
            self.check_that_no_startpoint_was_applied_twice()
        finally:
            self.patch.undo()

    @property
    def partitions(self) -> dict[str, Partition]:
        return self.doings.partitions

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
            self.doings.partitions = dict(
                sorted({**self.partitions, "fake.s.2": Partition()}.items())
            )

    @rule(hours=st.sampled_from([1, 1, 5, 12]))
    def wait(self, hours: int) -> None:
        self.here.wait(hours=hours)

    @rule(assigned=ASSIGNED)
    def repartition(self, assigned: list[str]) -> None:
        self.doings.assigned = assigned

    # -- what people do

    @rule(to=TARGETS, wish=WISHES, skew=st.sampled_from([0, 0, 0, -1, -12]))
    def write(self, to: tuple[int, str | None], wish: Wish, skew: int) -> None:
        self.do(self.doings.write(to, wish, skew), None)

    @rule(fault=FAULTS)
    def take_back(self, fault: Any) -> None:
        self.do(self.doings.clear(), fault)

    @rule(fault=FAULTS)
    def cancel_replays(self, fault: Any) -> None:
        self.do(self.doings.cancel_replays(), fault)

    @precondition(lambda self: self.here.state(self.doings.app).open is not None)
    @rule(skip=st.booleans(), fault=st.one_of(st.none(), FAULTS))
    def abandon(self, skip: bool, fault: Any) -> None:
        opened = self.here.state(self.doings.app).open
        assert opened is not None
        self.do(self.doings.abandon(skip), fault)
        if self.here.state(self.doings.app).open is None:
            ranges = {ssp: (span.start, span.end) for ssp, span in opened.ranges.items()}
            self.abandoned[opened.batch] = Batch(
                opened.batch, ranges if skip else {}, opened.epochs, True
            )

    # -- what coordinators and runs do

    @rule()
    def fan_out(self) -> None:
        self.do(self.doings.fan_out(), None)

    @rule(batches=BATCHES)
    def run(self, batches: int | None) -> None:
        self.do(self.doings.run(batches), None)

    @rule(batches=BATCHES, fault=FAULTS)
    def run_that_dies(self, batches: int | None, fault: Any) -> None:
        self.do(self.doings.run(batches), fault)

    @rule(
        batches=BATCHES,
        nth=st.integers(1, 40),
        mine=ASSIGNED,
        what=MEANWHILE,
        to=TARGETS,
        wish=WISHES,
        partition=st.integers(0, 2),
    )
    def run_while_another(
        self,
        batches: int | None,
        nth: int,
        mine: list[str],
        what: str,
        to: Any,
        wish: Wish,
        partition: int,
    ) -> None:
        """Between any two requests of a run, with a plan of its own, somebody else does
        something.
        """
        doings = self.doings
        others: dict[str, Callable[[], Doing]] = {
            "run": lambda: doings.run(None),
            "run a batch": lambda: doings.run(1),
            "fan out": doings.fan_out,
            "write": lambda: doings.write(to, wish, 0),
            "write and fan out": lambda: in_turn(doings.write(to, wish, 0), doings.fan_out()),
            "clear": doings.clear,
            "cancel": doings.cancel_replays,
            "arrive": lambda: doings.arrive(partition, 2),
        }
        act, in_model = others[what]()
        other = in_model, doings.setting()
        happened: list[bool] = []

        def interrupt() -> None:
            happened.append(True)
            with suppress(OffsetOutOfRangeError, CommitConflictError):
                act()

        before, doings.assigned = doings.assigned, mine
        run, run_in_model = doings.run(batches, Fault("*", nth, "meanwhile", interrupt))
        result = self.attempt(run)
        reached = [
            outcome
            for world in self.worlds
            for outcome in outcomes(
                world, run_in_model, doings.setting(), other if happened else None
            )
        ]
        doings.assigned = before
        if happened and what == "arrive":
            next(in_model(Box(World()), doings.setting()))
        self.must_be_one_of(world for world, how in reached if how == result)

    @rule()
    def run_to_the_end(self) -> None:
        """A run that nothing disturbs leaves nothing to do."""
        if self.do(self.doings.run(None), None) != "done":
            return
        state = self.here.state(self.doings.app)
        assert (state.open, dict(state.offsets.resolved), dict(state.offsets.replays)) == (
            None,
            {},
            {},
        )
        for ssp, partition in self.partitions.items():
            assert number(state.checkpoint[SystemStreamPartition.parse(ssp)]) == partition.upcoming
        tasks = self.doings.tasks()
        for (task, ssp), startpoint in self.here.fanned_out(self.doings.app).items():
            assert self.doings.wishes[startpoint].fallback or str(ssp) not in tasks.get(task, ()), (
                "somebody reads it"
            )

    # -- what the output got, judged by itself

    @invariant()
    def every_record_is_delivered_once_an_epoch_and_none_is_skipped(self) -> None:
        if not hasattr(self, "worlds"):
            return
        covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for batch in {**self.here.output.batches, **self.abandoned}.values():
            for ssp, (start, end) in batch.read().items():
                covered.setdefault((ssp, batch.epochs.get(ssp, 0)), []).append(
                    (number(start), number(end))
                )
        for (ssp, _), spans in covered.items():
            spans.sort()
            for (_, done), (begun, _) in itertools.pairwise(spans):
                assert done <= begun, f"{ssp}: {spans} overlap"
                lost = begun <= self.partitions[str(ssp)].oldest
                assert done == begun or lost, f"{ssp}: {spans} leave out what was there"

    def check_that_no_startpoint_was_applied_twice(self) -> None:
        states = [state.offsets for _, state in BatchLog(self.here.lake, "app").history(None)][::-1]
        applied: dict[str, list[str]] = {}
        begun: list[str] = []
        for before, after in zip([None, *states], states, strict=False):
            begun += after.replays.keys() - (before.replays.keys() if before else set())
            for ssp, startpoint in after.applied.items():
                known = applied.setdefault(ssp, [])
                if known[-1:] != [startpoint.id]:
                    known.append(startpoint.id)
        for ids in (begun, *applied.values()):
            assert len(ids) == len(set(ids))

    # -- how

    def check_readable(self, batch: Batch) -> None:
        for ssp, (start, _) in batch.read().items():
            if number(start) < self.partitions[str(ssp)].oldest:
                raise OffsetOutOfRangeError(
                    f"{ssp} holds no {start} any more.", "Abandon the batch."
                )

    def attempt(self, act: Callable[..., Any], *faults: Fault) -> str:
        try:
            act(*faults)
        except (Crash, StoreUnavailableError, CommitStateUnknownError):
            return "dead"
        except OffsetOutOfRangeError:
            return "refused"
        except CommitConflictError:
            return "conflict"
        return "done"

    def do(self, doing: Doing, fault: Any) -> str:
        act, in_model = doing
        result = self.attempt(act, *([] if fault is None else [Fault("*", *fault)]))
        setting = self.doings.setting()
        if result == "dead":
            self.must_be_one_of(
                possible for world in self.worlds for possible in prefixes(world, in_model, setting)
            )
        else:
            reached = [
                outcome
                for world in self.worlds
                for outcome in outcomes(world, in_model, setting, None)
            ]
            self.must_be_one_of(world for world, how in reached if how == result)
        return result

    def must_be_one_of(self, worlds: Iterable[World]) -> None:
        seen, now = self.doings.seen(), self.here.now_ms
        expected = [(world, world.seen(now)) for world in worlds]
        possible = {world.key(): world for world, visible in expected if visible == seen}
        assert possible, f"{seen}\nexpected one of\n" + "\n".join(
            {str(visible): "" for _, visible in expected}
        )
        self.worlds = list(possible.values())


TestOffsets = pytest.mark.lengthy(pytest.mark.rounds(OffsetMachine.TestCase))
TestOffsets.settings = settings(max_examples=rounds(20, 160), stateful_step_count=40)

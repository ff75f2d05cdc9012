"""Any history of requests, expiry, fan-outs, crashes, removals, repartitions and two coordinators,
against a model.

After a crash nobody can say how far it came, so the model is then in one of several worlds; what is
seen afterwards must always be that of one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources import metadata as document_module
from dagster_adjunct.resources.errors import CommitStateUnknownError, StoreUnavailableError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects import commit_log as commit_module
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.clocks import on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.offsets import startpoints_model as model
from tests.orchestration.offsets.startpoints_model import HOUR, Request, Step, Tasks, World
from tests.orchestration.offsets.stored_startpoints import handed_to, waiting_at, write_startpoint
from tests.rounds import rounds

# Names that a careless key would take for something else.
TASKS = ("Partition 1", '["task","Partition 1"]', 'lake.s.0","Partition 1')
SSPS = ("lake.s.0", "lake.s.1", "lake.s.10")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)

NAMED = st.sampled_from(TASKS)
PARTITIONS = st.sampled_from(SSPS)
TARGETS = st.tuples(PARTITIONS, st.one_of(st.none(), NAMED))
ALL = frozenset(SSPS)
MAPPINGS = st.one_of(
    st.frozensets(NAMED, min_size=1).map(lambda tasks: dict.fromkeys(sorted(tasks), ALL)),
    st.dictionaries(NAMED, st.frozensets(PARTITIONS), min_size=1),
)
SKEWS = st.sampled_from([0, 0, 0, -1, 1, -12, -11])  # hours that a client's clock is off
FAULTS = st.one_of(
    st.none(),
    st.none(),
    st.tuples(
        st.integers(1, 24),
        st.sampled_from(["crash-before", "crash-after", "lost-after", "lost-before", "throttle"]),
    ),
)

Act = Callable[[StartpointManager], Any]


class StartpointMachine(RuleBasedStateMachine):
    """One application's startpoints, in a lake in memory with small pages."""

    @initialize(tasks=MAPPINGS)
    def begin(self, tasks: Tasks) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(document_module, "PAGE_BYTES", 900)
        self.patch.setattr(commit_module, "_FIRST_PAUSE", 0.0001)
        self.lake = lake_in(InMemoryStore())
        self.now = BEGIN
        self.tasks = tasks
        self.worlds = [World()]
        self.numbers = itertools.count(1)
        self.applied: set[tuple[str, str, str]] = set()
        self.honest = self.manager(self.lake)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def manager(self, lake: Lake) -> StartpointManager:
        return StartpointManager(MetadataStore(on_clock(lake, lambda: self.now)), "app")

    @property
    def now_ms(self) -> int:
        return int(self.now.timestamp()) * 1000

    # -- what people do

    @rule(to=TARGETS, skew=SKEWS, fault=FAULTS)
    def write(self, to: model.Target, skew: int, fault: Any) -> None:
        self.do(*self.writing(to, skew), fault)

    @rule(to=TARGETS, fault=FAULTS)
    def delete(self, to: model.Target, fault: Any) -> None:
        self.do(*self.deleting(to), fault)

    @rule(hours=st.sampled_from([1, 1, 11, 12]))
    def wait(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule(tasks=MAPPINGS)
    def repartition(self, tasks: Tasks) -> None:
        self.tasks = tasks

    # -- what coordinators and runs do

    @rule(fault=FAULTS)
    def fan_out(self, fault: Any) -> None:
        report = self.do(*self.fanning_out(self.tasks), fault)
        if report is not None:
            self.check_report(report)

    @rule(
        to=TARGETS,
        skew=SKEWS,
        nth=st.integers(1, 20),
        mine=MAPPINGS,
        what=st.sampled_from(["fan out", "apply", "write", "delete"]),
        fault=FAULTS,
    )
    def fan_out_while_another(
        self, to: model.Target, skew: int, nth: int, mine: Tasks, what: str, fault: Any
    ) -> None:
        """One coordinator, with a plan of its own, between any two requests of which somebody
        else acts.
        """
        others = {
            "fan out": lambda: self.fanning_out(self.tasks),
            "apply": lambda: self.removing_all(),
            "write": lambda: self.writing(to, skew),
            "delete": lambda: self.deleting(to),
        }
        self.do(*self.fanning_out(mine), fault, (nth, *others[what]()))

    @rule(tasks=st.sets(NAMED), fault=FAULTS)
    def apply(self, tasks: set[str], fault: Any) -> None:
        """A run reads the fan-outs of some tasks, applies them, commits and removes what it
        applied.
        """
        fan_outs = {task: handed_to(self.honest, task) for task in tasks}
        ids = {
            task: {ssp: request.startpoint.id for ssp, request in held.items()}
            for task, held in fan_outs.items()
        }
        chosen = {
            (task, str(ssp)): request_id
            for task, held in ids.items()
            for ssp, request_id in held.items()
        }
        fault_hit = (
            self.do(
                lambda manager: manager.remove_fan_outs(ids) or True, model.remove(chosen), fault
            )
            is None
        )
        if not fault_hit:
            self.applied |= {(task, ssp, request_id) for (task, ssp), request_id in chosen.items()}

    @rule(task=NAMED, ssps=st.one_of(st.none(), st.sets(PARTITIONS)), fault=FAULTS)
    def remove(self, task: str, ssps: set[str] | None, fault: Any) -> None:
        given = "all" if ssps is None else [SystemStreamPartition.parse(ssp) for ssp in ssps]
        chosen = dict.fromkeys((task, ssp) for ssp in (SSPS if ssps is None else ssps))
        self.do(
            lambda manager: manager.remove_fan_out_for_task(task, given),
            model.remove(chosen),
            fault,
        )

    @rule(fault=FAULTS)
    def apply_what_was_read_before_a_fan_out(self, fault: Any) -> None:
        """A run names what it applied, so that what was handed out meanwhile stays."""
        handed_out = {
            (task, str(ssp)): request.startpoint.id
            for task, held in self.honest.get_fan_outs().items()
            for ssp, request in held.items()
        }
        self.do(*self.fanning_out(self.tasks), None)
        for task in {task for task, _ in handed_out}:
            ids = {
                SystemStreamPartition.parse(s): request_id
                for (t, s), request_id in handed_out.items()
                if t == task
            }
            chosen = {at: request_id for at, request_id in handed_out.items() if at[0] == task}
            self.do(
                lambda m, t=task, i=ids: m.remove_fan_out_for_task(t, list(i), ids=i),
                model.remove(chosen),
                fault,
            )

    # -- invariants

    @invariant()
    def what_is_seen_is_that_of_a_possible_world(self) -> None:
        if not hasattr(self, "worlds"):
            return
        seen = self.seen()
        possible = [world for world in self.worlds if world.seen(self.now_ms) == seen]
        assert possible, (
            f"{seen}, expected one of {[world.seen(self.now_ms) for world in self.worlds]}"
        )
        self.worlds = list({world.key(): world for world in possible}.values())

    @invariant()
    def what_a_task_applied_is_never_handed_to_it_again(self) -> None:
        if hasattr(self, "applied"):
            assert not self.applied & self.seen()[1]

    @invariant()
    def each_target_is_read_by_itself(self) -> None:
        if not hasattr(self, "worlds"):
            return
        live = {(r.ssp, r.task): r.startpoint for r in self.honest.read().waiting}
        for ssp in map(SystemStreamPartition.parse, SSPS):
            for task in (None, *TASKS):
                assert waiting_at(self.honest, ssp, task) == live.get((ssp, task))
        for task in TASKS:
            assert handed_to(self.honest, task) == self.honest.get_fan_outs().get(task, {})

    def seen(self) -> tuple[set[Any], set[Any]]:
        return (
            {
                (str(request.ssp), request.task, request.startpoint.id)
                for request in self.honest.read().waiting
            },
            {
                (task, str(ssp), request.startpoint.id)
                for task, held in self.honest.get_fan_outs().items()
                for ssp, request in held.items()
            },
        )

    def check_report(self, report: FanOut) -> None:
        there = [*report.tasks.items(), *report.stranded.items()]
        pending = {
            (task, str(ssp), request.startpoint.id)
            for task, held in there
            for ssp, request in held.items()
        }
        assert pending == self.seen()[1]
        for task, held in report.tasks.items():
            assert {str(ssp) for ssp in held} <= self.tasks.get(task, frozenset())
        unknown = {request.startpoint.id for request in report.unknown}
        assert any(
            model.unknown(world, self.tasks, self.now_ms) == unknown for world in self.worlds
        )

    # -- how

    def writing(self, to: model.Target, skew: int) -> tuple[Act, Sequence[Step]]:
        number = next(self.numbers)
        ssp, task = to
        startpoint = StartpointOldest(
            creation_timestamp_ms=self.now_ms + skew * HOUR, id=f"id{number}"
        )
        request = Request(ssp, task, startpoint.id, startpoint.creation_timestamp_ms, number)

        def act(manager: StartpointManager) -> bool:
            where = SystemStreamPartition.parse(ssp)
            write_startpoint(manager, where, startpoint, task=task, by="ada", reason="ticket 7")
            return True

        return act, model.write(request)

    def deleting(self, to: model.Target) -> tuple[Act, Sequence[Step]]:
        ssp = SystemStreamPartition.parse(to[0])
        return lambda manager: manager.delete_startpoint(ssp, to[1]), model.delete(to)

    def fanning_out(self, tasks: Tasks) -> tuple[Act, Sequence[Step]]:
        given = {
            task: [SystemStreamPartition.parse(ssp) for ssp in ssps] for task, ssps in tasks.items()
        }
        return lambda manager: manager.fan_out(given, complete=True), model.fan_out(
            tasks, self.now_ms
        )

    def removing_all(self) -> tuple[Act, Sequence[Step]]:
        everything: Mapping[tuple[str, str], None] = dict.fromkeys(
            (task, ssp) for task in TASKS for ssp in SSPS
        )

        def act(manager: StartpointManager) -> None:
            for task in TASKS:
                manager.remove_fan_out_for_task(task)

        return act, model.remove(everything)

    def do(
        self,
        act: Act,
        steps: Sequence[Step],
        fault: Any,
        other: tuple[int, Act, Sequence[Step]] | None = None,
    ) -> Any:
        """Act on the lake and on every possible world; return the result, or None if it did not
        come back.
        """
        plan = [] if fault is None else [Fault("*", *fault)]
        interrupted: list[bool] = []
        if other is not None:
            nth, others_act, _ = other

            def interrupt() -> None:
                interrupted.append(True)
                others_act(self.manager(self.lake))

            plan.insert(0, Fault("*", nth, "meanwhile", interrupt))
        result, whole = None, True
        try:
            result = act(self.manager(Lake(FaultyStore(self.lake.store, plan), self.lake.id)))
        except (Crash, StoreUnavailableError, CommitStateUnknownError):
            whole = False
        others_steps = other[2] if other is not None and interrupted else None
        self.worlds = [
            after
            for world in self.worlds
            for after in model.outcomes(world, steps, others_steps, whole)
        ]
        self.what_is_seen_is_that_of_a_possible_world()
        return result if whole else None


TestStartpoints = pytest.mark.lengthy(pytest.mark.rounds(StartpointMachine.TestCase))
TestStartpoints.settings = settings(max_examples=rounds(10, 200), stateful_step_count=40)

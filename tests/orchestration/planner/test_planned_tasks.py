"""Tasks: one for each partition number, or so many as the application says; what they own, and
what they are handed.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.offsets.stored_startpoints import handed_to, write_startpoint
from tests.orchestration.planner.planning import application, catalog, dataset

RULES = StreamFacts("lake.rules", 2, ("k",), SPARK)


def planned(tasks: int | None, partitions: int = 6, other: int = 4):
    app = application(tasks=tasks)
    app.input_stream("lake.s").join(app.table(dataset("d", partitions)), on="k", select=[])
    app.input_stream("lake.r").join(app.table(dataset("small", other)), on="k", select=[])
    app.input_stream("lake.rules", broadcast=True)
    return build_plan(app, catalog(RULES, s=partitions, r=other, d=1, small=1))


def test_each_partition_number_is_a_task_unless_declared_otherwise():
    tasks = planned(None).tasks
    assert [task.name for task in tasks] == [f"Partition {number}" for number in range(6)]
    assert tasks == planned(6).tasks == planned(100).tasks


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_task_owns_several_partitions_and_the_buckets_that_go_with_them(count):
    execution_plan = planned(count)
    assert [task.name for task in execution_plan.tasks] == [
        f"Task {number}" for number in range(count)
    ]
    owned = [
        str(ssp) for task in execution_plan.tasks for ssp in task.ssps if ssp.stream != "rules"
    ]
    assert sorted(owned) == sorted(
        [f"lake.s.{n}" for n in range(6)] + [f"lake.r.{n}" for n in range(4)]
    )
    for task in execution_plan.tasks:
        numbers = {ssp.partition for ssp in task.ssps if ssp.stream == "s"}
        assert {
            int(name.rpartition(".")[2]) for name in task.buckets if name.startswith("d.")
        } == numbers
        assert {ssp.partition for ssp in task.ssps if ssp.stream == "rules"} == {0, 1}
    # one copy of what all tasks read for each of them
    assert execution_plan.operator("input-5").partitions == count
    assert execution_plan.partitions_by_task()["Task 0"] == frozenset(execution_plan.tasks[0].ssps)


def test_the_plan_says_which_task_owns_what():
    rendered = planned(4).render().split("Tasks\n")[1]
    assert rendered.splitlines()[:2] == [
        "  task i modulo 4 owns partition i, and bucket i of each dataset",
        "  Task 0 to 3: input lake.s; input lake.r; dataset d; dataset small; all of lake.rules",
    ]
    with pytest.raises(PlanningError) as failure:
        planned(4).task("Partition 0")
    assert failure.value.application == "app"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", True])
def test_a_number_of_tasks_that_can_not_be_is_refused(wrong):
    with pytest.raises(ConfigurationError) as failure:
        application(tasks=wrong)
    assert failure.value.argument == "tasks"


def test_a_startpoint_goes_to_the_task_that_owns_its_partition_after_tasks_change():
    startpoints = StartpointManager(MetadataStore(lake_in(InMemoryStore())), "app")
    fifth = SystemStreamPartition("lake", "s", 5)
    write_startpoint(startpoints, fifth, StartpointOldest(), by="ada", reason="r")
    for tasks, owner in ((None, "Partition 5"), (4, "Task 1"), (2, "Task 1"), (3, "Task 2")):
        report = startpoints.fan_out(planned(tasks).partitions_by_task(), complete=True)
        assert not report.stranded
        assert not report.unknown
        assert list(handed_to(startpoints, owner)) == [fifth]
        assert [task for task, held in startpoints.get_fan_outs().items() if held] == [owner]


def test_what_all_tasks_read_is_handed_to_each_of_them():
    startpoints = StartpointManager(MetadataStore(lake_in(InMemoryStore())), "app")
    rules = SystemStreamPartition("lake", "rules", 1)
    write_startpoint(startpoints, rules, StartpointOldest(), by="ada", reason="r")
    startpoints.fan_out(planned(4).partitions_by_task(), complete=True)
    assert [list(handed_to(startpoints, f"Task {number}")) for number in range(4)] == [[rules]] * 4

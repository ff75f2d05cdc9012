"""Broadcast inputs in plans: every task reads them whole, they decide no counts, and prove
nothing for joins.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog, dataset

RULES = StreamFacts("lake.rules", 2, ("rule",), SPARK, Schema.of(rule="string", limit="int"))


def test_each_task_reads_all_of_it_next_to_its_own_partition() -> None:
    app = application()
    app.input_stream("lake.s")
    app.input_stream("lake.rules", broadcast=True).send_to(
        app.output_stream("lake.out", partitions=9, key="rule")
    )
    execution_plan = build_plan(app, catalog(RULES, s=4))
    everywhere = ("lake.rules.0", "lake.rules.1")
    assert [tuple(map(str, task.ssps)) for task in execution_plan.tasks] == [
        (f"lake.s.{number}", *everywhere) for number in range(4)
    ]
    assert execution_plan.operator("input-2").partitions == 4
    assert execution_plan.operator("input-2").columns == ("rule", "limit", "task")
    rendered = execution_plan.render()
    assert "Partition 0 to 3: input lake.s; all of lake.rules" in rendered
    assert ["lake.rules", "broadcast-input", "2", "rule"] in [
        line.split()[:4] for line in rendered.splitlines()
    ]


def test_it_constrains_no_count_and_is_no_member_of_a_join_group() -> None:
    app = application()
    wide = dataset("wide", 16)
    app.input_stream("lake.s").join(app.table(wide), on="k")
    rules = app.input_stream("lake.rules", broadcast=True)
    rules.map("*", "rule as k").partition_by("k").join(app.table(dataset("other", 16)), on="k")
    execution_plan = build_plan(app, catalog(RULES, s=16, wide=16, other=16))
    assert all("lake.rules" not in group.streams for group in execution_plan.join_groups)
    assert execution_plan.operator("input-3").partitions == 16  # as many as there are tasks
    with pytest.raises(PartitionCountMismatchError):
        build_plan(app, catalog(RULES, s=8, wide=16, other=16))


def test_a_partitioned_dataset_is_not_matched_without_moving_first() -> None:
    for options, refused in (({}, True), ({"auto_repartition": True}, False)):
        app = application(**options)
        app.input_stream("lake.s")
        rules = app.input_stream("lake.rules", broadcast=True).map("*", "rule as k")
        rules.join(app.table(dataset("d", 4)), on="k").send_to(
            app.output_stream("lake.out", partitions=4, key="k")
        )
        facts = catalog(RULES, s=4, d=4)
        if refused:
            with pytest.raises(PlanningError) as failure:
                build_plan(app, facts)
            assert failure.value.operator == "join-4-d"
            assert failure.value.dataset == "d"
        else:
            assert [exchange.operator for exchange in build_plan(app, facts).exchanges] == [
                "join-4-d"
            ]


def test_a_broadcast_dataset_is_matched_as_it_is() -> None:
    app = application()
    app.input_stream("lake.s")
    rules = app.input_stream("lake.rules", broadcast=True).map("*", "rule as k")
    rules.join(app.table(dataset("d")), on="k")
    assert build_plan(app, catalog(RULES, s=4, d=1)).exchanges == ()


def test_the_copies_of_a_task_stay_together_in_an_output_of_as_many_partitions() -> None:
    app = application()
    app.input_stream("lake.s")
    rules = app.input_stream("lake.rules", broadcast="number")
    rules.send_to(app.output_stream("kafka.alike", partitions=4))
    rules.send_to(app.output_stream("kafka.fewer", partitions=3))
    rules.send_to(app.output_stream("lake.keyed", partitions=4, key="number"))
    moved = {
        exchange.operator: exchange.partitioned_by
        for exchange in build_plan(app, catalog(RULES, s=4)).exchanges
    }
    assert moved == {"send-to-4": (), "send-to-5": ("number",)}


def test_what_can_not_be_is_refused() -> None:
    app = application()
    app.input_stream("lake.rules", broadcast=True)
    with pytest.raises(PlanningError, match="all inputs of application 'app' are broadcast"):
        build_plan(app, catalog(RULES))
    app = application()
    app.input_stream("lake.s")
    app.input_stream("lake.rules", broadcast="Limit")
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(RULES, s=1))
    assert failure.value.operator == "input-2"
    assert failure.value.column == "Limit"
    for wrong in ("", "a b", "__task", 3):
        with pytest.raises(ConfigurationError) as failure:
            Application("app").input_stream("lake.rules", broadcast=wrong)  # type: ignore[arg-type]
        assert failure.value.argument == "broadcast"

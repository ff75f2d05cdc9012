"""Exchanges before sinks, tasks, notes, and how a plan is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.planner.planning import application, catalog, dataset, exchanges_before


def remote(key: str | tuple[str, ...]) -> RemoteTable[Any, Any, Any]:
    return RemoteTable("state", key=key, write_function=MemoryTable("state"))


def to_output(partitions: int, key, prepare=lambda s: s, name: str = "lake.out", facts=()):
    app = application()
    prepare(app.input_stream("lake.s")).send_to(
        app.output_stream(name, partitions=partitions, key=key)
    )
    return exchanges_before(build_plan(app, catalog(*facts, s=8)), app.operators[-1].id)


def test_records_that_lie_right_go_to_an_output_stream_as_they_are():
    assert to_output(8, "k") == ()
    assert to_output(8, "k", lambda s: s.filter("true").map("*", "1 as one")) == ()


def test_records_move_before_an_output_stream_with_another_count_or_key():
    (exchange,) = to_output(4, "k")
    assert (exchange.reason, exchange.partitioned_by, exchange.partitions) == ("output", ("k",), 4)
    assert (
        exchange.why
        == "lake.out has 4 partitions by (k); the records are in 8 by (k) with spark-murmur3"
    )
    (exchange,) = to_output(8, ["k", "x"])
    assert exchange.partitioned_by == ("k", "x")
    (exchange,) = to_output(8, "k", lambda s: s.map(lambda frame: frame))
    assert exchange.why.endswith("by no known key since map-2")


def test_records_for_a_stream_without_a_key_move_only_to_change_their_count():
    assert to_output(8, None, name="kafka.out") == ()
    (exchange,) = to_output(4, None, name="kafka.out")
    assert (exchange.partitioned_by, exchange.partitions) == ((), 4)


def test_a_system_that_spreads_records_itself_only_needs_a_key_in_one_task():
    assert to_output(16, ["k", "x"], name="kafka.out") == ()
    assert len(to_output(16, "x", name="kafka.out")) == 1
    facts = (StreamFacts("kafka.out", 16, ("k",), "kafka-murmur2"),)
    # records that lie by key in Spark's partitions
    assert to_output(16, "k", name="kafka.out", facts=facts) == ()


def to_table(key, prepare=lambda s: s, facts=()):
    app = application()
    stream = prepare(app.input_stream("lake.s")).send_to(app.table(remote(key)))
    stream.filter("true")
    planned = build_plan(app, catalog(*facts, s=8) if not facts else catalog(*facts))
    return exchanges_before(planned, app.operators[-2].id), planned.operators[-1]


def test_records_of_one_key_meet_in_one_task_before_a_remote_table():
    assert to_table("k")[0] == ()
    assert to_table(("k", "x"))[0] == ()  # partitioned by a part of the key is enough
    (exchange,), after = to_table("x")
    assert (exchange.reason, exchange.partitioned_by, exchange.partitions) == (
        "remote table",
        ("x",),
        8,
    )
    assert after.partitioned_by == ("k",)  # what goes on does so from before the exchange


def test_a_remote_table_after_a_stream_of_unknown_partitioning_needs_an_exchange():
    facts = (StreamFacts("lake.s", 8, ("k",), "unknown"),)
    assert len(to_table("k", facts=facts)[0]) == 1
    # One partition of another system's stream may be read in several tasks.
    assert len(to_table("k", facts=(StreamFacts("lake.s", 8, ("k",), "kafka-murmur2"),))[0]) == 1
    assert len(to_table("k", lambda s: s.map(lambda frame: frame))[0]) == 1


def test_a_dataset_is_fed_through_its_input_stream():
    app = application()
    app.input_stream("lake.s").send_to(app.table(dataset("t", 4)))
    planned = build_plan(app, catalog(s=8, t=2))
    (exchange,) = exchanges_before(planned, "send-to-table-2-t")
    assert (exchange.reason, exchange.partitioned_by, exchange.partitions) == ("dataset", ("k",), 2)


def full():
    app = application()
    stream = app.input_stream("lake.s").join(app.table(dataset("t", 8)), on="k", select=[])
    stream.join(app.table(dataset("b")), on="k", select=[]).send_to(
        app.output_stream("lake.out", partitions=4, key="k")
    )
    app.input_stream("lake.r").partition_by("x", partitions=10).send_to(app.table(remote("x")))
    return app, catalog(s=8, t=1, b=1, r=3)


def test_a_task_owns_a_partition_of_each_input_and_all_broadcasts():
    planned = build_plan(*full())
    assert len(planned.tasks) == 10
    assert tuple(map(str, planned.tasks[2].ssps)) == ("lake.s.2", "lake.r.2")
    assert planned.tasks[2].buckets == ("t.2",)
    assert tuple(map(str, planned.tasks[3].ssps)) == ("lake.s.3",)
    assert planned.tasks[9] == type(planned.tasks[9])("Partition 9", (), (), ("b",))


def test_a_plan_is_plain_json_and_readable_text():
    planned = build_plan(*full())
    document = json.loads(json.dumps(planned.to_json()))
    assert document["application"] == "app"
    assert [edge["role"] for edge in document["streams"]].count("side-input") == 2
    assert document["join_groups"][0]["streams"] == ["lake.s", "lake.t"]
    text = planned.render()
    for part in (
        "join-2-t",
        "lake.out",
        "broadcast",
        "Partition 0 to 2:",
        "partition_by(partitions=10)",
    ):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_equal_applications_give_equal_plans():
    assert build_plan(*full()) == build_plan(*full())
    assert build_plan(*full()).render() == build_plan(*full()).render()


def test_what_is_declared_and_not_used_is_noted():
    app = application()
    app.input_stream("lake.s").filter("true")
    app.table(dataset("t", 8))
    app.output_stream("lake.out", partitions=4)
    app.table(remote("k"))
    notes = build_plan(app, catalog(s=8, t=1)).notes
    assert [note.split()[0] for note in notes] == [
        "Nothing",
        "Output",
        "Dataset",
        "Table",
        "Unproven;",
    ]


def test_asking_a_plan_for_what_it_has_not_is_refused():
    planned = build_plan(*full())
    with pytest.raises(PlanningError) as failure:
        planned.stream("lake.x")
    assert failure.value.stream == "lake.x"
    with pytest.raises(PlanningError) as failure:
        planned.operator("join-9")
    assert failure.value.operator == "join-9"
    assert planned.operator("join-2-t").partitions == 8
    assert planned.stream("lake.s").partitioner == SPARK

"""Applications whose streams and local tables have keys inside columns, by every engine, against
plain Python.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import NullKeyError, OperatorFailedError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.formats import Json
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.windows import Count, Tumbling
from tests.orchestration.all_engines import BY_EACH, BY_SPARK, ENGINES, WithoutSpark
from tests.orchestration.kafka_world import KafkaWorld
from tests.orchestration.seen_times import at
from tests.resources.streams.kafka.producing import seen
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
Rows = list[dict[str, Any]]

VISITS = Schema.of(no="int", customer={"id": "bigint", "city": "string"}, spent="int")
CUSTOMERS = Schema.of(person={"id": "bigint"}, name="string")
KEYS = [7, 8, None, 7, 9, 42, 8, 7, 13, None, 21, 9]


def visit(no: int, key: int | None) -> dict[str, Any]:
    """Return a visit; of the customers without an id, one is null and one a struct of nulls."""
    customer = None if key is None and no % 2 == 0 else {"id": key, "city": f"c{no % 3}"}
    return {"no": no, "customer": customer, "spent": no * 10}


ROWS: Rows = [visit(no, key) for no, key in enumerate(KEYS)]
NAMES = {key: f"name of {key}" for key in (7, 9, 13, 21)}


def fill(world: StepWorld) -> None:
    world.streams.create("visits", schema=VISITS, key=["customer.id"], partitions=4)
    world.streams.append("visits", ROWS, producer="test", sequence=1)
    world.streams.create("customers", schema=CUSTOMERS, key=["person.id"], partitions=4)
    customers = [{"person": {"id": key}, "name": name} for key, name in NAMES.items()]
    world.streams.append("customers", customers, producer="test", sequence=1, end_of_dataset="v1")


def received(world: StepWorld, name: str) -> Rows:
    return sorted(world.rows(name), key=repr)


def run(world: StepWorld, app: Application, engine: str) -> None:
    world.advance(*app.datasets)
    app.engine = "auto" if ENGINES[engine] is WithoutSpark else "spark"
    report = run_step(world.context(app), ENGINES[engine]())
    if ENGINES[engine] is WithoutSpark:
        assert report.in_process_batches == report.batches == 1


@pytest.mark.parametrize("engine", BY_EACH)
def test_a_stream_and_a_dataset_that_are_keyed_by_paths_are_joined_in_place(
    step_world: StepWorld, engine: str
) -> None:
    """ADJUNCT_STRICT_PLANS is set: an exchange that the plan does not list would fail the batch."""
    fill(step_world)
    app = Application("app")
    known = app.table(
        bounded_dataset("known", input="lake.customers", key="person.id", partitions=4)
    )
    joined = (
        app.input_stream("lake.visits")
        .filter("spent < 100")
        .select("customer as buyer", "no")
        .join(known, on={"buyer.id": "id"}, how="left", select=["name"])
    )
    out = app.output_stream("lake.out", partitions=4, key="buyer.id")
    again = joined.send_to(out).with_columns(no="no + 1")
    again = again.join(known, on={"buyer.id": "id"}, select=["name as again"])
    again.send_to(app.output_stream("lake.again", partitions=4, key="buyer.id"))
    assert plan_application(app, systems=step_world.systems).exchanges == ()
    run(step_world, app, engine)
    expected = []
    for row in ROWS[:10]:
        name = NAMES.get(row["customer"] and row["customer"]["id"])
        expected.append({"buyer": row["customer"], "no": row["no"], "name": name})
    assert received(step_world, "out") == sorted(expected, key=repr)
    matched = [
        {**row, "no": row["no"] + 1, "again": row["name"]} for row in expected if row["name"]
    ]
    assert received(step_world, "again") == sorted(matched, key=repr)
    assert step_world.streams.info("out").key == ("buyer.id",)


@pytest.mark.parametrize("engine", BY_SPARK)
def test_a_local_table_is_keyed_by_a_path(step_world: StepWorld, engine: str) -> None:
    fill(step_world)
    app = Application("app")
    seen = app.local_table("seen", key="customer.id", schema=VISITS, partitions=4)
    visits = app.input_stream("lake.visits")
    joined = visits.send_to(seen, deleted="no = 7", on_null_key="skip").join(
        seen, on={"customer.id": "id"}, how="left", select=["spent as last"]
    )
    joined.send_to(app.output_stream("lake.out", partitions=4, key="customer.id"))
    assert plan_application(app, systems=step_world.systems).exchanges == ()
    run(step_world, app, engine)
    last: dict[int, dict[str, Any]] = {}
    for row in ROWS:
        key = row["customer"] and row["customer"]["id"]
        if key is not None:
            last[key] = row
    del last[7]
    with open_dataset(step_world.lake, "seen") as table:
        assert dict(table.items()) == {key: {"id": key, **row} for key, row in last.items()}
        assert table.get(9) == {"id": 9, **last[9]}
    expected = []
    for row in ROWS:
        entry = last.get(row["customer"] and row["customer"]["id"])
        expected.append({**row, "last": entry and entry["spent"]})
    assert received(step_world, "out") == sorted(expected, key=repr)


EVENTS = Schema.of(no="int", who={"id": "bigint", "home": {"city": "string"}}, at="timestamp")


def event(no: int, key: int | None, second: int) -> dict[str, Any]:
    who = None if no % 4 == 0 else {"id": key, "home": {"city": f"c{key}"}}
    return {"no": no, "who": who, "at": at(second)}


def test_two_streams_that_are_keyed_by_paths_meet_in_place(step_world: StepWorld) -> None:
    """Also what is made of them, and of records without a partner, is joined in place."""
    sent = {
        "left": [event(no, no % 3, no) for no in range(1, 12)],
        "right": [event(no, (no + 1) % 4, no) for no in range(2, 13)],
    }
    for stream, rows in sent.items():
        ends = [event(no, no, 60) for no in range(21, 80)]  # every partition has one
        step_world.streams.create(stream, schema=EVENTS, key=["who.id"], partitions=3)
        step_world.streams.append(stream, [*rows, *ends], producer="test", sequence=1)
    app = Application("app")
    times: dict[str, Any] = {"event_time": "at", "delay": timedelta(seconds=1)}
    met = app.input_stream("lake.left", **times).join_stream(
        app.input_stream("lake.right", **times),
        on={"who.id": "who.id"},
        within=timedelta(seconds=2),
        how="full",
        name="meet",
        select=["no as other", "who as whom"],
    )
    met.select("who as buyer", "no", "other", "whom").filter("coalesce(no, other) < 20").send_to(
        app.output_stream("lake.out", partitions=3, key="buyer.id")
    )
    counts = met.window(
        Tumbling(timedelta(seconds=10)), by="who.id", name="ten", aggregates={"n": Count()}
    )
    counts.send_to(app.output_stream("lake.counted", partitions=3, key="id"))
    assert plan_application(app, systems=step_world.systems).exchanges == ()
    run(step_world, app, "tasks")
    expected: Rows = []
    alone = {row["no"]: row for row in sent["right"]}
    for row in sent["left"]:
        key = row["who"] and row["who"]["id"]
        near = [
            other
            for other in sent["right"]
            if key is not None
            and other["who"]
            and other["who"]["id"] == key
            and abs(other["at"] - row["at"]) <= timedelta(seconds=2)
        ]
        for other in near:
            alone.pop(other["no"], None)
            whom = other["who"]
            expected.append(
                {"buyer": row["who"], "no": row["no"], "other": other["no"], "whom": whom}
            )
        if not near:
            expected.append({"buyer": row["who"], "no": row["no"], "other": None, "whom": None})
    for other in alone.values():
        who = other["who"] and {"id": other["who"]["id"], "home": None}
        expected.append({"buyer": who, "no": None, "other": other["no"], "whom": other["who"]})
    assert received(step_world, "out") == sorted(expected, key=repr)
    counted = sum(row["n"] for row in step_world.rows("counted"))
    assert counted == sum(row["buyer"] is not None for row in expected)


def few(frame: Any) -> Any:
    return frame.where("spent < 100")


def other_customers(frame: Any) -> Any:
    from pyspark.sql import functions as F

    return frame.withColumn("customer", F.expr("named_struct('id', 1L, 'city', 'x')"))


def test_a_function_keeps_the_partitioning_by_a_path_or_fails(step_world: StepWorld) -> None:
    fill(step_world)
    known = bounded_dataset("known", input="lake.customers", key="person.id", partitions=4)

    def joined(name: str, function: Any) -> Application:
        app = Application(name)
        visits = app.input_stream("lake.visits", default_offset="oldest")
        kept = visits.map(function, keeps_partitioning=True)
        both = kept.filter("no < 3").merge(kept.filter("no >= 3"))
        found = both.join(app.table(known), on={"customer.id": "id"}, select=["name"])
        found.select("no", "name").send_to(app.output_stream(f"lake.{name}", partitions=1))
        return app

    run(step_world, joined("few", few), "tasks")
    expected = [
        {"no": row["no"], "name": NAMES[row["customer"]["id"]]}
        for row in ROWS[:10]
        if row["customer"] and row["customer"]["id"] in NAMES
    ]
    assert received(step_world, "few") == sorted(expected, key=repr)
    with pytest.raises(OperatorFailedError, match=r"changes customer\.id"):
        run(step_world, joined("others", other_customers), "tasks")


def one_more(frame: Any) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    here = Window.partitionBy("customer.id").orderBy("__partition", "__offset")
    return frame.withColumn("seen", F.coalesce("seen", F.lit(0)) + F.row_number().over(here))


def test_a_function_counts_on_by_a_path_that_the_records_are_partitioned_by(
    step_world: StepWorld,
) -> None:
    fill(step_world)
    app = Application("app", max_batch_records=5)
    columns = Schema.of(customer=VISITS.field("customer").type, seen="bigint")
    counts = app.local_table("counts", key="customer.id", schema=columns, partitions=4)
    visits = app.input_stream("lake.visits").partition_by("customer.id")
    counted = visits.join(counts, on={"customer.id": "id"}, how="left", select=["seen"])
    numbered = counted.map(one_more, keeps_partitioning=True)
    numbered.send_to(counts, on_null_key="skip")
    run(step_world, app, "tasks")
    with open_dataset(step_world.lake, "counts") as table:
        found = {key: entry["seen"] for key, entry in table.items()}
    keys = [row["customer"]["id"] for row in ROWS if row["customer"]]
    assert found == {key: keys.count(key) for key in keys if key is not None}


def test_records_are_sent_to_a_dataset_whose_stream_is_keyed_by_a_path(
    step_world: StepWorld,
) -> None:
    fill(step_world)
    step_world.streams.create("last", schema=VISITS, key=["customer.id"], partitions=4)
    app = Application("app")
    last = app.table(unbounded_dataset("last", input="lake.last", key="customer.id", partitions=4))
    app.input_stream("lake.visits").filter("customer.id is not null").send_to(last)
    assert plan_application(app, systems=step_world.systems).exchanges == ()
    run(step_world, app, "tasks")
    step_world.advance(last.dataset)
    rows = {row["customer"]["id"]: row for row in ROWS if row["customer"]}
    with open_dataset(step_world.lake, "last") as table:
        found = {key: entry["no"] for key, entry in table.items()}
    assert found == {key: row["no"] for key, row in rows.items() if key is not None}


@pytest.mark.server
def test_a_topic_that_is_keyed_by_a_path_is_written_joined_and_followed(
    step_world: StepWorld, kafka: KafkaServer
) -> None:
    topic = KafkaTopic(
        kafka.new_topic(3),
        Json(VISITS),
        Json("id BIGINT"),
        partitioner="kafka-murmur2",
        key_paths="customer.id",
    )
    own = {each.name: getattr(step_world, each.name) for each in fields(step_world)}
    world = KafkaWorld(**own, server=kafka, topics={"visits": topic})
    fill(world)
    app = Application("sending")
    out = app.output_stream("kafka.visits", partitions=3, key="customer.id")
    app.input_stream("lake.visits").send_to(out)
    assert plan_application(app, systems=world.systems).exchanges == ()
    run(world, app, "tasks")
    identity = world.streams.info("visits").identity
    assert identity is not None
    ids = [record.headers["adjunct-source-id"] for record in seen(kafka, topic.topic)]
    assert ids == [identity.encode()] * len(ROWS)
    app = Application("joining", auto_repartition=True)
    known = bounded_dataset("known", input="lake.customers", key="person.id", partitions=4)
    visits = app.input_stream("kafka.visits", default_offset="oldest")
    joined = visits.join(app.table(known), on={"customer.id": "id"}, how="left", select=["name"])
    joined.send_to(app.output_stream("lake.out", partitions=4, key="customer.id"))
    (exchange,) = plan_application(app, systems=world.systems).exchanges
    assert exchange.partitioned_by == ("customer.id",)
    run(world, app, "tasks")
    names = [NAMES.get(row["customer"] and row["customer"]["id"]) for row in ROWS]
    expected = [{**row, "name": name} for row, name in zip(ROWS, names, strict=True)]
    assert received(world, "out") == sorted(expected, key=repr)
    followed = unbounded_dataset(
        "followed",
        input="kafka.visits",
        key="customer.id",
        partitions=2,
        on_bad_change=DeadLetters("lake.letters"),
    )
    world.advance(followed)
    last = {row["customer"]["id"]: row["no"] for row in ROWS if row["customer"]}
    with open_dataset(world.lake, "followed") as table:
        found = {key: entry["no"] for key, entry in table.items()}
    assert found == {key: no for key, no in last.items() if key is not None}


def test_a_null_key_inside_a_column_is_refused_by_a_local_table(step_world: StepWorld) -> None:
    fill(step_world)
    app = Application("app")
    seen = app.local_table("seen", key="customer.id", schema=VISITS, partitions=2)
    app.input_stream("lake.visits").partition_by("customer.id", partitions=2).send_to(seen)
    with pytest.raises(NullKeyError) as failure:
        run(step_world, app, "tasks")
    assert failure.value.operator == "send-to-table-3-seen"

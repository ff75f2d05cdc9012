"""Times that Kafka's records and markers say, from a real broker: windows, stream joins and as-of
joins over topics.

The test itself puts records into partitions, and plain Python says of the whole input what has to
come out.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct import Application, advance_dataset, bounded_dataset, open_dataset
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.windows import Count, Sum, Tumbling
from tests.orchestration.kafka_world import KafkaWorld, Produced
from tests.orchestration.meeting_streams import AFTER, BEFORE, DELAY, Result, results_of, seconds
from tests.orchestration.seen_times import at, watermarks_in_order
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.server]
SIZE, LATENESS = 10, 3
Record = tuple[str, int, float | None]  # key, number, second of its time
Parts = list[list[Record]]


@pytest.fixture
def world(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> KafkaWorld:
    """Orders whose time is the record's own, and payments that say it in a column; two
    partitions each.
    """
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    topics = {
        "orders": KafkaTopic(kafka.new_topic(2), Json("n INT"), KeyText("k")),
        "payments": KafkaTopic(
            kafka.new_topic(2), Json("n INT, ts TIMESTAMP"), KeyText("order_key")
        ),
    }
    return KafkaWorld(
        open_lake(tmp_path / "lake"), tmp_path, lambda: spark, server=kafka, topics=topics
    )


def send(world: KafkaWorld, stream: str, parts: Parts, new: Parts) -> None:
    """Write these records to their partitions, and keep them in `parts`."""
    for number, records in enumerate(new):
        parts[number] += records
        made: list[Produced] = []
        for key, n, time in records:
            moment = None if time is None else at(time)
            # Kafka's own time of a payment is not what it says of itself.
            made.append(
                (moment, key, {"n": n})
                if stream == "orders"
                else (at(9_999), key, {"n": n, "ts": moment})
            )
        world.produce(stream, number, made)


def windows(parts: Parts) -> set[tuple[Any, ...]]:
    """Return the windows that all partitions have passed, of the records that were not too late
    for them.
    """
    marks, taken = [], dict[tuple[str, int], list[int]]()
    for records in parts:
        behind, mark = watermarks_in_order([time for _, _, time in records], DELAY)
        marks.append(mark)
        for (key, n, time), limit in zip(records, behind, strict=True):
            if time is None:
                continue
            start = int(time // SIZE) * SIZE
            if limit is None or start + SIZE + LATENESS > limit:
                taken.setdefault((key, start), []).append(n)
    passed = min(mark for mark in marks if mark is not None)
    return {
        (key, at(start), len(own), sum(own))
        for (key, start), own in taken.items()
        if start + SIZE + LATENESS <= passed
    }


def counted(world: KafkaWorld) -> list[tuple[Any, ...]]:
    return [
        (row["k"], row["window_start"], row["orders"], row["sum"]) for row in world.rows("counted")
    ]


def counting() -> Application:
    """Orders and payments of each ten seconds together, each by its own time."""
    app = Application("both")
    options: dict[str, Any] = {"default_offset": "oldest", "delay": seconds(DELAY)}
    orders = app.input_stream("kafka.orders", event_time=ARRIVAL, **options).select("k", "n")
    payments = app.input_stream("kafka.payments", event_time="ts", **options).select(
        "order_key as k", "n"
    )
    counted = (
        orders.merge(payments)
        .partition_by("k", partitions=2)
        .window(
            Tumbling(seconds(SIZE)),
            by="k",
            name="counted",
            aggregates={"orders": Count(), "sum": Sum("n")},
            allowed_lateness=seconds(LATENESS),
        )
    )
    counted.send_to(app.output_stream("lake.counted", partitions=2, key="k"))
    return app


FIRST: tuple[Parts, Parts] = (
    [[("a", 1, 0), ("a", 2, 12), ("b", 3, 5), ("b", 4, 2)], [("c", 5, 3), ("c", 6, 1)]],
    [[("a", 1, 4), ("b", 2, 13), ("c", 3, None)], [("c", 4, 2), ("a", 5, 30)]],
)
# Records that are late by their own partition only, and windows that are passed by all.
SECOND: tuple[Parts, Parts] = (
    [[("a", 7, 40), ("b", 8, 7), ("b", 9, 33)], [("c", 10, 2), ("d", 11, 35), ("d", 12, 8)]],
    [[("b", 6, 40), ("a", 7, 41)], [("d", 8, 41), ("c", 9, 3)]],
)


def test_kafka_records_are_counted_by_their_time_and_a_column_over_a_restart(
    world: KafkaWorld,
) -> None:
    orders: Parts = [[], []]
    payments: Parts = [[], []]
    for number, (new_orders, new_payments) in enumerate((FIRST, SECOND)):
        send(world, "orders", orders, new_orders)
        send(world, "payments", payments, new_payments)
        world.run(counting(), run=f"{number}")
        rows = counted(world)
        assert len(rows) == len(set(rows))
        assert set(rows) == windows([*orders, *payments])
        assert len(rows) == 5 * number, "the slowest partition holds all windows back at first"
    (totals,) = (
        of for name, of in world.state(counting()).totals.items() if name.startswith("window")
    )
    # Behind 40, 35 and 41 in their partitions; not the order of c at 2, whose partition was at 3.
    assert (totals["late"], totals["null_times"]) == (3, 1)


def meeting() -> Application:
    """Orders and the payments that come within some seconds of them, each by its own time."""
    app = Application("meeting", max_batch_records=24)
    options: dict[str, Any] = {"default_offset": "oldest", "delay": seconds(DELAY)}
    orders = app.input_stream("kafka.orders", event_time=ARRIVAL, **options)
    payments = app.input_stream("kafka.payments", event_time="ts", **options)
    joined = orders.partition_by("k", partitions=2).join_stream(
        payments.partition_by("order_key", partitions=2),
        on={"k": "order_key"},
        within=(seconds(BEFORE), seconds(AFTER)),
        how="full",
        name="paid",
        select=["n as paid"],
    )
    joined.send_to(app.output_stream("lake.paid", partitions=2, key="k"))
    return app


def expected(orders: Parts, payments: Parts) -> tuple[Counter[Result], int]:
    """Return what comes of the records that were not late in their partition, and how many were."""
    sides, marks, late = [], [], 0
    for parts in (orders, payments):
        rows: list[Record] = []
        for records in parts:
            behind, mark = watermarks_in_order([time for _, _, time in records], DELAY)
            marks.append(mark)
            rows += [record for record, limit in zip(records, behind, strict=True) if limit is None]
            late += sum(limit is not None for limit in behind)
        sides.append(rows)
    passed = [mark for mark in marks if mark is not None]
    return results_of(*sides, "full", min(passed) if len(passed) == len(marks) else None), late


@pytest.mark.long  # windows over topics, and streams of the lake that meet, are shown apart
def test_records_of_two_topics_meet_by_their_own_times_once_over_runs_and_batches(
    world: KafkaWorld,
) -> None:
    chance, numbers = random.Random(7), count(1)
    orders: Parts = [[], []]
    payments: Parts = [[], []]

    def drawn(now: int) -> Record:
        off = chance.choice([0, 0, 1, -2, -5, 3, -25])
        return (f"k{chance.randrange(5)}", next(numbers), now + off)

    for run in range(3):
        for stream, parts in (("orders", orders), ("payments", payments)):
            new: Parts = [[drawn(100 + 40 * run + 2 * step) for step in range(15)] for _ in parts]
            if run == 1 and stream == "payments":
                new[0].append(("k0", next(numbers), None))
            send(world, stream, parts, new)
        world.run(meeting(), run=f"{run}")
        results, late = expected(orders, payments)
        assert Counter((row["k"], row["n"], row["paid"]) for row in world.rows("paid")) == results
    (totals,) = (
        of for name, of in world.state(meeting()).totals.items() if name.startswith("stream-join")
    )
    assert (totals["late"], totals["null_times"]) == (late, 1)
    assert late > 5
    assert min(totals["matched"], totals["unmatched"]) > 20


def test_kafka_markers_date_versions_joined_as_of_each_records_time(world: KafkaWorld) -> None:
    """Versions come in another order than they are valid in, one of them from another producer,
    two can't be dated.
    """
    world.topics["planes"] = KafkaTopic(
        world.server.new_topic(2), Json("seats INT"), KeyText("item")
    )
    planes = bounded_dataset(
        "planes", input="kafka.planes", key="item", partitions=2, valid_from="marker"
    )
    fleets = {5: {"x": 1, "y": 1}, 3: {"x": 3}, 8: {"x": 5, "y": 8}}

    def deliver(version: str, fleet: dict[str, int], *times: dt.datetime | None) -> Any:
        for number, (item, seats) in enumerate(fleet.items()):
            world.produce("planes", number % 2, [(None, item, {"seats": seats})])
        for partition, time in enumerate(times):
            dated = {} if time is None else {"valid_from": time.isoformat()}
            world.mark(
                "planes", partition, version=version, rows=len(list(fleet)[partition::2]), **dated
            )
        return advance_dataset(
            planes, lake=world.lake, systems=world.systems, spark=world.spark, by="test"
        )

    for day in (5, 3):
        deliver(f"v{day}", fleets[day], at(day), at(day))
    for version, times in {"undated": (None, None), "of two times": (at(6), at(7))}.items():
        assert deliver(version, {"x": 99}, *times).action == "rejected"
    table = pa.table({"item": list(fleets[8]), "seats": pa.array(fleets[8].values(), pa.int32())})
    world.kafka.append(
        "planes", table, producer="p", sequence=1, end_of_dataset="v8", valid_from=at(8)
    )

    trips = [
        (item, 10 * day + number, day) for number, item in enumerate("xyz") for day in range(1, 11)
    ]
    parts: Parts = [[], []]
    send(world, "payments", parts, [trips[0::2], trips[1::2]])
    app = Application("flown")
    flown = app.input_stream("kafka.payments", default_offset="oldest").partition_by(
        "order_key", partitions=2
    )
    flown.join(
        app.table(planes), on={"order_key": "item"}, how="left", select=["seats"], as_of="ts"
    ).send_to(app.output_stream("lake.flown", partitions=2, key="order_key"))
    counters = world.run(app).counters

    def seats(item: str, day: int) -> int | None:
        past = [begin for begin in fleets if begin <= day]
        return fleets[max(past)].get(item) if past else None

    assert {row["n"]: row["seats"] for row in world.rows("flown")} == {
        n: seats(item, day) for item, n, day in trips
    }
    (join,) = (of for name, of in counters.items() if name.startswith("join"))
    assert (join["rows"], join["before_history"]) == (30, 6)
    with open_dataset(world.lake, planes) as served:
        reported = [
            (part.valid_from, part.valid_to, part.entry and part.entry["seats"])
            for part in served.history_of("y")
        ]
        assert reported == [(at(5), at(8), 1), (at(8), None, 8)]

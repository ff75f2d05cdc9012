"""Records meet what was valid at their own time, in whole batches: of changes, of versions, and
however cut.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.valid_time import choose_time_bins
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest, choose_versions
from dagster_adjunct.orchestration.step.dry_run import analyze_batch
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OperatorFailedError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.startpoints import StartpointOldest, Startpoints, StartpointUpcoming
from tests.orchestration.step_world import StepWorld

PRICES = unbounded_dataset(
    "prices", input="lake.prices", key="item", partitions=2, history="all", valid_from="since"
)
PLANES = bounded_dataset("planes", input="lake.planes", key="item", partitions=2, valid_from="name")
Change = tuple[str, int | None, dt.datetime]


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number, tzinfo=dt.UTC)


def moment(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=number)


in_process_at_first = pytest.mark.parametrize(
    "world",
    [pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long]), "in process"],
    indirect=True,
)


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.spark), "in process"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StepWorld:
    """A lake whose batches are computed by Spark, and again in this process."""
    if request.param == "spark":
        made: StepWorld = request.getfixturevalue("step_world")
    else:
        monkeypatch.setenv("ADJUNCT_ENGINE", "auto")
        made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.stream("sales", "item", 2, n="int", item="string", at="timestamp")
    made.stream("prices", "item", 2, item="string", price="int", since="timestamp")
    made.stream("planes", "item", 2, item="string", price="int")
    return made


def application(
    dataset: AdjunctDataset, name: str = "app", *, most: int = 1_000_000, **options: Any
) -> Application:
    app = Application(name, max_batch_records=most, few_records=0)
    given = {"how": "left", "select": ["price"]} | options
    sales = app.input_stream("lake.sales").join(app.table(dataset), on="item", as_of="at", **given)
    sales.send_to(app.output_stream(f"lake.{name}-out", key="item", partitions=2))
    return app


def advance(world: StepWorld, dataset: AdjunctDataset) -> None:
    advance_dataset(dataset, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test")


def send_changes(world: StepWorld, changes: Sequence[Change]) -> None:
    kept = [change for change in changes if change[1] is not None]
    world.send("prices", *kept, deleted=[change for change in changes if change[1] is None])


def matched(world: StepWorld, name: str = "app") -> dict[int, int | None]:
    rows = world.rows(f"{name}-out")
    assert len({row["n"] for row in rows}) == len(rows)
    return {row["n"]: row["price"] for row in rows}


def valid(changes: Sequence[Change], item: str, at: dt.datetime | None) -> int | None:
    """What of these changes, the later of one time counting, was valid at a time."""
    rows = {since: price for name, price, since in changes if name == item}
    before = [since for since in rows if at is not None and since <= at]
    return rows[max(before)] if before else None


def test_random_changes_in_any_split_are_matched_as_a_search_finds(world: StepWorld) -> None:
    chance = random.Random(16)
    changes = [
        (
            chance.choice("abcd"),
            None if chance.random() < 0.2 else chance.randint(1, 99),
            moment(chance.randint(5, 60)),
        )
        for _ in range(60)
    ]
    sales = [
        (
            number,
            chance.choice("abcdx"),
            None if chance.random() < 0.1 else moment(chance.randint(0, 70)),
        )
        for number in range(90)
    ]
    world.send("sales", *sales)
    # Of one time, deletions are sent behind the rest of their part: so is the order in which they
    # count.
    parts = [changes[:30], changes[30:50], changes[50:]]
    reported = [
        change for part in parts for change in sorted(part, key=lambda change: change[1] is None)
    ]
    for part in parts:
        send_changes(world, part)
        advance(world, PRICES)
    expected = {number: valid(reported, item, at) for number, item, at in sales}
    whole = world.run(application(PRICES))
    assert matched(world) == expected
    counted = whole.counters["join-2-prices"]
    assert (counted["rows"], counted["unmatched"]) == (
        90,
        sum(price is None for price in expected.values()),
    )
    assert counted["null_times"] == sum(at is None for *_, at in sales)
    firsts = {item: min(since for name, _, since in reported if name == item) for item in "abcd"}
    assert counted["before_history"] == sum(
        at is not None and item in firsts and at < firsts[item] for _, item, at in sales
    )
    world.run(application(PRICES, "pieces", most=50))
    assert matched(world, "pieces") == expected
    compact_dataset(world.lake, "prices", spark=IN_PROCESS, by="test", level="major")
    world.run(application(PRICES, "compacted", how="inner"))
    assert matched(world, "compacted") == {
        n: price for n, price in expected.items() if price is not None
    }


@in_process_at_first
@pytest.mark.parametrize("lying", [{"partitions": 2}, {"broadcast": True}])
def test_the_oldest_entry_is_matched_where_a_history_begins_with_deletions(
    world: StepWorld, lying: dict[str, Any]
) -> None:
    prices = unbounded_dataset(
        "spread", input="lake.prices", key="item", history="all", valid_from="since", **lying
    )
    changes: list[Change] = [
        ("a", None, moment(5)),
        ("a", None, moment(6)),
        ("a", 7, moment(8)),
        ("a", 9, moment(20)),
    ]
    changes += [
        ("b", None, moment(5)),
        ("c", 1, moment(5)),
        ("c", None, moment(9)),
        ("d", None, moment(3)),
    ]
    send_changes(world, changes)
    advance(world, prices)
    changes.append(("d", 4, moment(9)))
    send_changes(world, changes[-1:])
    advance(world, prices)
    sales = [
        (n, item, moment(at))
        for n, (item, at) in enumerate((i, a) for i in "abcdx" for a in (2, 4, 5, 7, 8, 21))
    ]
    world.send("sales", *sales, (99, "a", None))
    expected: dict[int, int | None] = {99: None}
    for number, item, at in sales:
        begins = [since for name, _, since in changes if name == item]
        entries = [
            (since, price) for name, price, since in changes if name == item and price is not None
        ]
        early = bool(entries) and at < min(begins)
        expected[number] = min(entries)[1] if early else valid(changes, item, at)
    for name in ("deltas", "compacted"):
        counters = world.run(application(prices, name, before_history="oldest")).counters[
            "join-2-spread"
        ]
        assert matched(world, name) == expected
        assert counters["before_history"] == 7
        compact_dataset(world.lake, "spread", spark=IN_PROCESS, by="test", level="major")


@pytest.mark.parametrize("world", [pytest.param("spark", marks=pytest.mark.spark)], indirect=True)
def test_no_exchange_is_on_the_datasets_side_and_the_plan_reports_of_times(
    world: StepWorld,
) -> None:
    send_changes(world, [("a", 1, moment(1)), ("b", 2, moment(2))])
    advance(world, PRICES)
    send_changes(world, [("a", 3, moment(3))])
    advance(world, PRICES)
    app = application(PRICES, before_history="oldest")
    context = world.context(app)
    proof = analyze_batch(context, {"prices": StoredVersions(world.lake, PRICES).current()})
    (join,) = proof.joins
    assert (join.kind, join.stream_exchanges, join.dataset_exchanges) == ("sort-merge join", 0, 0)
    plan = plan_application(app, systems=world.systems)
    assert plan.by_time[0].as_of == "at"
    text = plan.render()
    assert "left join prices on item as of at" in text
    assert "the oldest entry" in text
    assert "is joined with the last known entry" in text
    assert type(plan).from_json(plan.to_json()) == plan
    assert "as of at" in plan.to_mermaid()


@in_process_at_first
def test_each_version_is_matched_from_the_time_that_its_name_states(world: StepWorld) -> None:
    world.send("planes", ("a", 1), ("b", 10), version="2026-01-10")
    advance(world, PLANES)
    world.send("planes", ("a", 2), ("c", 20), version="2026-01-20")
    advance(world, PLANES)
    world.send(
        "sales",
        *[
            (n, item, day(number))
            for n, (item, number) in enumerate(
                [
                    ("a", 9),
                    ("a", 10),
                    ("a", 19),
                    ("a", 20),
                    ("b", 15),
                    ("b", 25),
                    ("c", 15),
                    ("c", 30),
                    ("c", 9),
                ]
            )
        ],
    )
    report = world.run(application(PLANES))
    assert matched(world) == {0: None, 1: 1, 2: 1, 3: 2, 4: 10, 5: None, 6: None, 7: 20, 8: None}
    assert report.counters["join-2-planes"] == {
        "rows": 9,
        "unmatched": 4,
        "before_history": 2,
        "null_times": 0,
    }
    world.run(application(PLANES, "oldest", before_history="oldest"))
    assert matched(world, "oldest") == {**matched(world), 0: 1}


def test_a_batch_that_died_is_run_again_with_the_versions_that_it_was_begun_with(
    world: StepWorld,
) -> None:
    world.send("planes", ("a", 1), version="2026-01-10")
    advance(world, PLANES)
    world.send("planes", ("a", 2), version="2026-01-20")
    advance(world, PLANES)
    world.send("sales", (0, "a", day(12)), (1, "a", day(22)))
    app = application(PLANES)
    world.killed_when(app, "intent")
    intent = world.state(app).open
    assert intent is not None
    assert len(intent.joined.over_time["planes"]) == 2
    assert intent.versions["planes"] == intent.joined.over_time["planes"][-1]
    world.send("planes", ("a", 3), version="2026-01-11")  # late: of before the newest
    advance(world, PLANES)
    spared = expire_versions(
        world.lake, "planes", DiscardPolicy(keep=2, grace=dt.timedelta(0)), by="test"
    )
    assert not set(spared.discarded) & set(intent.joined.over_time["planes"])
    run_step(world.context(app, run="run-2"))
    assert matched(world) == {0: 1, 1: 2}
    world.run(application(PLANES, "later"))
    assert matched(world, "later") == {0: 3, 1: 2}


@in_process_at_first
def test_a_record_from_before_the_history_fails_the_batch_before_anything_is_written(
    world: StepWorld,
) -> None:
    send_changes(world, [("a", 1, moment(10))])
    world.send("sales", (0, "a", moment(12)), (1, "a", moment(9)))
    app = application(PRICES, before_history="error")
    with pytest.raises(OperatorFailedError) as caught:
        world.run(app)
    assert (
        caught.value.operator,
        caught.value.stream,
        caught.value.partition,
        caught.value.offset,
    ) == ("join-2-prices", "lake.sales", 0, "1")
    with pytest.raises(StreamNotFoundError):
        world.rows("app-out")
    send_changes(world, [("a", 7, moment(1))])
    advance(world, PRICES)
    with pytest.raises(OperatorFailedError):  # the batch that is open meets what it was begun with
        world.run(app)


@in_process_at_first
def test_a_late_correction_is_joined_from_then_on_and_a_plain_join_uses_the_current(
    world: StepWorld,
) -> None:
    send_changes(world, [("a", 1, moment(10)), ("a", 2, moment(20))])
    world.send("sales", (0, "a", moment(15)))
    app = application(PRICES)
    world.run(app)
    send_changes(world, [("a", 9, moment(14))])
    world.send("sales", (1, "a", moment(15)), (2, "a", moment(99)))
    world.run(app)
    assert matched(world) == {0: 1, 1: 9, 2: 2}
    plain = Application("plain", few_records=0)
    sales = plain.input_stream("lake.sales").join(plain.table(PRICES), on="item", select=["price"])
    sales.send_to(plain.output_stream("lake.plain-out", key="item", partitions=2))
    world.run(plain)
    assert matched(world, "plain") == {0: 2, 1: 2, 2: 2}


@pytest.mark.lengthy
@in_process_at_first
def test_a_replay_appends_what_a_late_correction_changes_as_the_plan_says(world: StepWorld) -> None:
    send_changes(world, [("a", 1, moment(10))])
    world.send("sales", (0, "a", moment(15)))
    app = application(PRICES)
    assert "as further records" in plan_application(app, systems=world.systems).render()
    world.run(app)
    send_changes(world, [("a", 9, moment(14))])
    world.run(app)
    assert matched(world) == {0: 1}, "what is written does not change"
    Startpoints(app, lake=world.lake).request(
        "lake.sales", StartpointOldest(), reason="to correct", by="test"
    )
    world.run(app)
    assert sorted(row["price"] for row in world.rows("app-out")) == [1, 9]


def id_of(item: str, begin: dt.datetime) -> str:
    """Return the id of an interval by its definition."""
    text = f"{int(begin.timestamp() * 1_000_000)}|{item.encode().hex().upper()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.lengthy
def test_records_get_the_id_of_the_interval_and_the_values_of_their_own_time(
    world: StepWorld,
) -> None:
    world.stream("tariffs", "item", 2, item="string", price="int", note="string", since="timestamp")
    tariffs = unbounded_dataset(
        "tariffs",
        input="lake.tariffs",
        key="item",
        partitions=2,
        history=dt.timedelta(hours=5),
        valid_from="since",
        history_columns=["price"],
    )
    world.send("tariffs", *[("a", 5, note, moment(at)) for at, note in ((1, "x"), (2, "y"))])
    advance(world, tariffs)
    world.send("tariffs", ("a", 5, "z", moment(4)), ("a", 7, "z", moment(8)))
    advance(world, tariffs)
    sales = [(n, "a", moment(at)) for n, at in enumerate((0, 1, 2, 3, 4, 7, 8, 99))]
    sales += [(8, "b", moment(5)), (9, "a", None)]
    world.send("sales", *sales)
    first, second = id_of("a", moment(1)), id_of("a", moment(8))
    notes = {1: "x", 2: "y", 3: "y", 4: "z", 5: "z", 6: "z", 7: "z"}
    for name in ("stored", "compacted"):
        options = {"select": ["price", "note", "interval_id as price_id"]}
        app = application(tariffs, name, **options)
        world.run(app)
        rows = {row["n"]: row for row in world.rows(f"{name}-out")}
        # What ended before the edge, hour 3, is dropped by the compaction.
        known = 1 if name == "stored" else 2
        for n in range(10):
            told = notes.get(n) if n >= known else None
            assert rows[n]["note"] == told, (name, n)
            identity = None if told is None else second if n in (6, 7) else first
            assert rows[n]["price_id"] == identity, (name, n)
        compact_dataset(world.lake, "tariffs", spark=IN_PROCESS, by="test", level="major")
    world.run(application(tariffs, "oldest", **options, before_history="oldest"))
    rows = {row["n"]: row for row in world.rows("oldest-out")}
    assert [(rows[n]["note"], rows[n]["price_id"]) for n in (0, 1)] == [("y", first)] * 2


@in_process_at_first
def test_intervals_of_versions_have_ids_which_follow_discarded_versions(world: StepWorld) -> None:
    days: dict[int, list[tuple[str, int]]] = {
        10: [("a", 1), ("b", 1)],
        12: [("a", 1)],
        14: [("b", 1)],
    }
    for number, entries in days.items():
        world.send("planes", *entries, version=f"2026-01-{number}")
        advance(world, PLANES)
    sales = [("a", 11), ("a", 13), ("a", 15), ("b", 11), ("b", 13), ("b", 15)]
    world.send("sales", *[(n, item, day(at)) for n, (item, at) in enumerate(sales)])
    options = {"select": ["price", "interval_id"]}
    world.run(application(PLANES, **options))
    ids = {row["n"]: row["interval_id"] for row in world.rows("app-out")}
    begins = {0: 10, 1: 10, 2: None, 3: 10, 4: None, 5: 14}
    assert ids == {
        n: None if begin is None else id_of(sales[n][0], day(begin)) for n, begin in begins.items()
    }
    expire_versions(world.lake, "planes", DiscardPolicy(keep=2, grace=dt.timedelta(0)), by="test")
    world.run(application(PLANES, "later", **options))
    later = {row["n"]: row["interval_id"] for row in world.rows("later-out")}
    assert (later[1], later[5]) == (id_of("a", day(12)), ids[5])


def test_a_replay_with_current_entries_has_no_ids() -> None:
    app = application(PRICES, select=["price", "interval_id"])
    partition = SystemStreamPartition("lake", "sales", 0)
    request = StartpointRequest(
        ssp=partition,
        startpoint=StartpointOldest(),
        by="me",
        reason="test",
        until=StartpointUpcoming(),
        versions="current",
    )
    with pytest.raises(ConfigurationError) as caught:
        choose_versions(app, request)
    assert caught.value.argument == "versions"


def test_keys_with_many_rows_are_matched_by_intervals_of_time(world: StepWorld) -> None:
    chance = random.Random(3)
    changes: list[Change] = []
    for number in range(100):
        for item in "abc":
            changes.append((item, chance.choice([None, number]), moment(chance.randrange(4000))))
    changes.sort(key=lambda change: change[1] is None)  # as deletions are sent
    send_changes(world, changes)
    advance(world, PRICES)
    view = StoredVersions(world.lake, PRICES).current()
    assert view is not None
    bins = choose_time_bins(view)
    rows = len({(item, at) for item, _, at in changes})
    assert bins is not None
    assert bins.count == rows // 3
    sales = []
    for n in range(400):
        sales.append((n, chance.choice("abcx"), moment(chance.randint(-5, 4200))))
    world.send("sales", *sales)
    world.run(application(PRICES))
    assert matched(world) == {n: valid(changes, item, at) for n, item, at in sales}


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["changes", "versions", "known then"])
def test_before_the_history_means_the_same_everywhere(world: StepWorld, kind: str) -> None:
    options: Any = {"as_of": "at", "before_history": "error"}
    times = {"early": day(5), "late": day(25), "none": None}
    early = {("a", "early"), ("b", "early")}
    dataset: AdjunctDataset = PRICES
    if kind == "changes":
        send_changes(world, [("a", 1, day(10)), ("b", None, day(12)), ("a", 3, day(27))])
        advance(world, dataset)
    else:
        dataset = PLANES
        early |= {("x", "early")}
        for name, rows in (("2026-01-10", [("a", 1)]), ("2026-01-20", [("a", 2), ("b", 2)])):
            world.send("planes", *rows, version=name)
            advance(world, dataset)
    if kind == "known then":
        options["versions"] = "known-then"
        only_newest = DiscardPolicy(keep=1, grace=dt.timedelta(0))
        expire_versions(world.lake, "planes", only_newest, by="test")
        times["late"] = dt.datetime.now(dt.UTC)
    cases = [*product("abx", ("early", "late")), ("a", "none"), (None, "early")]
    for number, (item, when) in enumerate(cases):
        schema = Schema.of(item="string", at="timestamp").to_arrow()
        record = pa.table({"item": [item], "at": [times[when]]}, schema=schema)
        with open_dataset(world.lake, dataset) as served:
            with raises_where((item, when) in early):
                served.point_in_time(record, on="item", **options)
            if world.spark is not IN_PROCESS:
                frame = frame_from_arrow(world.spark(), record)
                with raises_where((item, when) in early):
                    served.point_in_time(frame, on="item", **options).select("item").toArrow()
        sales = f"sales-{number}"
        world.stream(sales, "item", 2, n="int", item="string", at="timestamp")
        world.send(sales, (1, item, times[when]))
        app = Application(f"app-{number}", few_records=0)
        records = app.input_stream(f"lake.{sales}", default_offset="oldest")
        joined = records.join(app.table(dataset), on="item", how="left", **options)
        joined.send_to(app.output_stream(f"lake.out-{number}", key="item", partitions=2))
        with raises_where((item, when) in early):
            world.run(app)


def raises_where(expected: bool) -> AbstractContextManager[Any]:
    if not expected:
        return nullcontext()
    return pytest.raises(Exception, match=r"from before (the history|what is known)")

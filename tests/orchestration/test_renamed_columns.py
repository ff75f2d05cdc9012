"""Applications over datasets, outputs and local tables whose columns are renamed and dropped: by
Spark and in process, with broadcast and partitioned copies, as of a time, and read again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.dataset import DatasetTable, open_dataset
from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import (
    DatasetError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.windows import Sum, Tumbling
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld, crash_at

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

WHO: dict[str, Any] = {"by": "ada", "reason": "an audit"}
BEFORE = Schema.of(k="string", seats="int", note="string", home={"city": "string", "zip": "int"})
AFTER = Schema.of(k="string", places="int", home={"town": "string"})
RENAMED = {"seats": "places", "home.city": "town"}
CHANGES: dict[str, Any] = {"renamed": RENAMED, "drop": ["note", "home.zip"]}


def change_columns(world: StepWorld, schema: Schema, **changes: Any) -> None:
    changes = {"drop": (), **changes}
    changes["drop"] = tuple(changes["drop"])
    world.streams.create(
        "planes", schema=schema, key=["k"], partitions=2, changes=ColumnChanges(**changes)
    )


def bounded(**options: Any) -> AdjunctDataset:
    spread = {} if "broadcast" in options else {"partitions": 2}
    return bounded_dataset("planes", input="lake.planes", key="k", **spread, **options)


def unbounded(**options: Any) -> AdjunctDataset:
    spread = {} if "broadcast" in options else {"partitions": 2}
    by_hand = DeltaCompaction(inside_commit=False)
    return unbounded_dataset(
        "planes", input="lake.planes", key="k", compaction=by_hand, **spread, **options
    )


def joining(planes: AdjunctDataset, *select: str, **output: Any) -> Application:
    """Join records with planes, and with what was last sent for their key."""
    app = Application("app")
    joined = app.input_stream("lake.s", default_offset="oldest").join(
        app.table(planes), on="k", how="left", select=[*select]
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k", **output))
    return app


def sent(world: StepWorld, epoch: int = 0) -> list[tuple[Any, ...]]:
    """Return what was sent in an epoch, which Spark reads as Arrow does."""
    ranges = world.streams.all_ranges("out")
    rows = world.streams.read_arrow(ranges).to_pylist()
    found = [(row["k"], row["places"], row["home"]) for row in rows if row["__epoch"] == epoch]
    frame = world.streams.read(world.spark(), ranges)
    by_spark = [row.asDict(recursive=True) for row in frame.collect()]
    assert sorted(map(str, found)) == sorted(
        str((row["k"], row["places"], row["home"])) for row in by_spark if row["__epoch"] == epoch
    )
    return sorted(found, key=str)


@pytest.mark.parametrize(("declare", "spread"), [(bounded, {}), (unbounded, {"broadcast": True})])
def test_a_recorded_replay_over_renamed_and_dropped_columns_sends_what_was_sent(
    step_world: StepWorld, declare: Callable[..., AdjunctDataset], spread: dict[str, Any]
) -> None:
    change_columns(step_world, BEFORE)
    step_world.send(
        "planes", ("a", 1, "x", {"city": "Oslo", "zip": 5}), ("b", 2, "y", None), version="v1"
    )
    step_world.stream("s", "k", 2, k="string")
    step_world.send("s", ("a",), ("b",), ("c",))
    step_world.run(joining(declare(**spread), "seats", "note", "home"))
    change_columns(step_world, AFTER, **CHANGES)
    step_world.send("planes", ("a", 7, {"town": "Rome"}), ("c", 8, {"town": "Bonn"}), version="v2")
    now = joining(declare(**spread, **CHANGES), "places", "home", **CHANGES)
    step_world.send("s", ("a",))
    step_world.run(now)
    first = [("a", 1, {"town": "Oslo"}), ("b", 2, None), ("c", None, None)]
    assert sent(step_world) == sorted([*first, ("a", 7, {"town": "Rome"})], key=str)
    if declare is unbounded:
        compact_dataset(step_world.lake, "planes", spark=IN_PROCESS, level="major", by="me")
    startpoints = Startpoints(now, lake=step_world.lake)
    startpoints.request(
        "lake.s", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHO
    )
    step_world.run(now)
    assert sent(step_world, 1) == sent(step_world)


# -- lookups


def looking_up(world: StepWorld, column: str, **options: Any) -> Application:
    app = Application("app")
    served = DatasetTable(world.lake, "planes", refresh_every=0.0, **options)
    planes = RemoteTable("planes", key="k", read_function=served)
    found = app.input_stream("lake.s", default_offset="oldest").join(
        app.table(planes), on="k", how="left", select={f"{column} as found": "int"}
    )
    found.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def test_lookups_have_the_names_of_now_and_a_column_of_before_is_refused(
    step_world: StepWorld,
) -> None:
    change_columns(step_world, BEFORE)
    step_world.stream("s", "k", 2, k="string")
    step_world.send("planes", ("a", 1, "x", None), version="v1")
    step_world.advance(bounded())
    step_world.send("s", ("a",))
    step_world.run(looking_up(step_world, "seats"))
    step_world.send("s", ("a",))

    def rename(event: StepEvent) -> None:
        if event.what == "intent":
            change_columns(step_world, AFTER, **CHANGES)
            step_world.send("planes", ("a", 7, {"town": "Rome"}), version="v2")
            step_world.advance(bounded(**CHANGES))

    with pytest.raises(SchemaMismatchError, match="renamed or dropped"):
        step_world.run(looking_up(step_world, "seats"), on_event=rename)
    with pytest.raises(PlanningError) as caught:
        step_world.run(looking_up(step_world, "seats"))
    assert caught.value.column == "seats"
    step_world.run(looking_up(step_world, "places"))
    open_stored_versions(step_world.lake, "planes").rollback(reason="test", by="me")
    step_world.send("s", ("a",))
    step_world.run(looking_up(step_world, "places"))
    step_world.send("s", ("a",))
    step_world.run(looking_up(step_world, "places", version="v2"))
    assert [row["found"] for row in step_world.rows("out")] == [1, 7, 1, 7]


# -- as of a time


def hour(number: int) -> datetime:
    return datetime(2026, 1, 1, number, tzinfo=UTC)


def as_of(dataset: AdjunctDataset, price: str, **output: Any) -> Application:
    app = Application("as-of")
    sales = app.input_stream("lake.sales", default_offset="oldest")
    joined = sales.join(app.table(dataset), on="k", as_of="at", how="left", select=[price])
    joined.send_to(app.output_stream("lake.sold", partitions=2, key="k", **output))
    return app


@pytest.mark.parametrize(
    ("kind", "spread"), [("history", {"partitions": 2}), ("versions", {"broadcast": True})]
)
def test_joins_as_of_a_time_before_a_rename_have_the_names_of_now(
    step_world: StepWorld, kind: str, spread: dict[str, Any]
) -> None:
    step_world.stream("sales", "k", 2, n="int", k="string", at="timestamp")
    step_world.stream("prices", "k", 2, k="string", price="int", since="timestamp", note="string")

    def declare(since: str, **options: Any) -> AdjunctDataset:
        if kind == "versions":
            return bounded_dataset(
                "prices",
                input="lake.prices",
                key="k",
                valid_from="%Y-%m-%d_%H",
                **spread,
                **options,
            )
        return unbounded_dataset(
            "prices",
            input="lake.prices",
            key="k",
            history="all",
            valid_from=since,
            **spread,
            **options,
        )

    def send(number: int, price: int, *note: str) -> None:
        row = ("a", price, hour(number), *note)
        step_world.send("prices", row, version=f"2026-01-01_{number:02}")

    send(1, 10, "x")
    step_world.send("sales", (0, "a", hour(2)))
    step_world.run(as_of(declare("since"), "price"))
    send(3, 11, "y")  # it is read under the new names
    renamed = {"price": "amount", "since": "start"}
    step_world.streams.change_columns("prices", renamed=renamed, drop=["note"])
    send(5, 12)
    now = declare("start", renamed=renamed, drop=["note"])
    sales = [(number, "a", hour(number)) for number in range(7)]
    step_world.send("sales", *[(10 + number, key, at) for number, key, at in sales])
    app = as_of(now, "amount", renamed=renamed)
    step_world.run(app)
    expected = {0: 10, 10: None, 11: 10, 12: 10, 13: 11, 14: 11, 15: 12, 16: 12}
    assert {row["n"]: row["amount"] for row in step_world.rows("sold")} == expected
    startpoints = Startpoints(app, lake=step_world.lake)
    startpoints.request(
        "lake.sales", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHO
    )
    step_world.run(app)
    again = step_world.streams.read_arrow(step_world.streams.all_ranges("sold")).to_pylist()
    replayed = {row["n"]: row["amount"] for row in again if row["__epoch"] == 1}
    assert replayed == expected


# -- local tables


VISITS = Schema.of(k="string", visitor="string", zip="int")
MOVED = Schema.of(k="string", guest="string", zip="int")
BARE = Schema.of(k="string", guest="string")
RENAMES = {"visitor": "guest"}


def visiting(schema: Schema, **changes: Any) -> Application:
    """Send for each visit who came last before."""
    app = Application("visiting")
    last = app.local_table("last", key="k", schema=schema, partitions=2, **changes)
    person = schema.names[1]
    visits = app.input_stream("lake.visits", default_offset="oldest")
    visits.join(last, on="k", how="left", select=[f"{person} as before"]).send_to(
        app.output_stream("lake.seen", partitions=2, key="k")
    )
    visits.select("k", f"person as {person}", *schema.names[2:]).send_to(last)
    return app


def seen(world: StepWorld, epoch: int = 0) -> dict[int, str | None]:
    rows = world.streams.read_arrow(world.streams.all_ranges("seen")).to_pylist()
    mine = [row for row in rows if row["__epoch"] == epoch]
    found = {row["n"]: row["before"] for row in mine}
    assert len(found) == len(mine)
    return found


@pytest.mark.long  # with the table alone: tests/assets/test_evolving_upkeep.py
def test_a_local_table_goes_on_under_other_names_and_is_replayed(step_world: StepWorld) -> None:
    step_world.stream("visits", "k", 2, n="int", k="string", person="string", zip="int")
    before = visiting(VISITS)
    step_world.send("visits", (1, "a", "Ada", 5), (2, "b", "Bo", 6))
    step_world.run(before)
    step_world.send("visits", (3, "a", "Cy", 7))
    with pytest.raises(Crash):  # everything is written, nothing committed
        step_world.run(before, on_event=crash_at("outputs"))
    now = visiting(BARE, renamed=RENAMES, drop="zip")
    with pytest.raises(ProducerConflictError):  # the rows that it has written can't be compared
        step_world.run(now)
    step_world.run(visiting(MOVED, renamed=RENAMES))
    step_world.send("visits", (4, "a", "Di", 8), (5, "b", "Ed", 9))
    step_world.run(now)
    expected = {1: None, 2: None, 3: "Ada", 4: "Cy", 5: "Bo"}
    assert seen(step_world) == expected
    last = {"a": {"k": "a", "guest": "Di"}, "b": {"k": "b", "guest": "Ed"}}
    assert dict(open_dataset(step_world.lake, "last").items()) == last
    startpoints = Startpoints(now, lake=step_world.lake)
    startpoints.request(
        "lake.visits", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHO
    )
    step_world.run(now)
    assert seen(step_world, 1) == expected
    compact_dataset(step_world.lake, "last", spark=IN_PROCESS, level="major", by="me")
    assert dict(open_dataset(step_world.lake, "last").items()) == last
    with pytest.raises(DatasetError) as caught:
        step_world.run(before)
    assert "renamed=" in caught.value.problem


# -- state of operators over time


def moment(second: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def over_time(kind: str, *columns: str, value: str = "v") -> Application:
    """Join or sum the values of a stream, of which these columns are selected, if any."""
    app = Application(kind)
    times: dict[str, Any] = {"event_time": "at", "default_offset": "oldest"}
    left = app.input_stream("lake.left", **times)
    chosen = left.select(*columns) if columns else left
    out = app.output_stream("lake.out", partitions=1, key="k")
    if kind == "window":
        tens = Tumbling(timedelta(seconds=10))
        summed = chosen.window(tens, by="k", name="w", aggregates={"v": Sum(value)})
        summed.select("k", "v").send_to(out)
        return app
    right = app.input_stream("lake.right", **times)
    within = timedelta(seconds=5)
    joined = chosen.join_stream(right, on="k", within=within, how="left", name="w", select=["w"])
    joined.select("k", f"{value} as v").send_to(out)
    return app


@pytest.mark.parametrize("kind", ["join", pytest.param("window", marks=pytest.mark.long)])
def test_state_is_kept_under_the_earlier_name_as_the_error_advises(
    step_world: StepWorld, kind: str
) -> None:
    step_world.stream("left", "k", 1, k="string", at="timestamp", v="int")
    step_world.stream("right", "k", 1, k="string", at="timestamp", w="int")
    step_world.send("left", ("a", moment(1), 5))
    step_world.run(over_time(kind))
    step_world.streams.change_columns("left", renamed={"v": "n"})
    for stream in ("left", "right"):
        step_world.send(stream, ("z", moment(100), 0))
    with pytest.raises(DatasetError) as caught:
        step_world.run(over_time(kind, value="n"))
    assert '.select("key", "time", "now as earlier")' in caught.value.next_step
    step_world.run(over_time(kind, "k", "at", "n as v"))
    assert [(row["k"], row["v"]) for row in step_world.rows("out") if row["k"] == "a"] == [("a", 5)]

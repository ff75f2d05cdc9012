"""What plans and previews note is held against what then happens: each effect where it is noted,
and nowhere else.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct import Application, open_lake
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.operators.windows.kinds import Kind, Session, Sliding, Tumbling
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planned import PlannedTable
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.startpoints import StartpointOldest, Startpoints, StartpointSpecific
from dagster_adjunct.windows import Count, Max
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

OLDER = "an older record may replace a newer one"
IN_A_TEST = 6
Record = tuple[str, str, int]


# -- remote tables, without Spark


@dataclass(frozen=True)
class Sent:
    """A send to a table: by which columns the input is partitioned, what is between, and how the
    table is written.
    """

    keyed: tuple[str, ...]
    partitions: int
    between: tuple[str, ...]
    key: tuple[str, ...]
    how: str
    options: Mapping[str, Any] = field(default_factory=dict)


BETWEEN = ("filter", "with_columns", "map", "partition_by", "merge", "rekey")


def draw(dice: Random) -> Sent:
    options = dice.choice(
        [
            {},
            {},
            {},
            {"newest_by": "n"},
            {"idempotent": True},
            {"idempotent": True, "on_replay": "skip"},
        ]
    )
    keyed: tuple[str, ...] = dice.choice([("k",), ("g",), ("k", "g"), ()])
    return Sent(
        keyed,
        dice.randrange(1, 4) if keyed else 1,
        tuple(dice.sample(BETWEEN, dice.randrange(3))),
        dice.choice([("k",), ("g",), ("k", "g")]),
        dice.choice(["put", "set", "add"]),
        options,
    )


def described(sent: Sent, file: Path) -> Application:
    app = Application("drawn", engine="auto", auto_repartition=True, max_batch_records=7)
    stream = app.input_stream("lake.records", default_offset="oldest")
    for step in sent.between:
        match step:
            case "filter":
                stream = stream.filter("n >= 0")
            case "with_columns":
                stream = stream.with_columns(more="n + 1")
            case "map":
                stream = stream.map("k", "g", "n")
            case "partition_by":
                stream = stream.partition_by("g", partitions=2)
            case "merge":
                stream = stream.filter("n % 2 = 0").merge(stream.filter("n % 2 = 1"))
            case _:
                stream = stream.with_columns(k="concat(k, '')")
    columns = {"k": "string", "g": "string", "n": "bigint"}
    store = SqliteTable(file, "things", list(sent.key), columns=columns, create=True)
    table = app.table(
        RemoteTable(
            "things", key=list(sent.key), read_function=store, write_function=store, **sent.options
        )
    )
    others = [name for name in columns if name not in sent.key]
    if sent.how == "put":
        stream.map("k", "g", "n").send_to(table)
    elif sent.how == "set":
        stream.update(table, set={name: name for name in others}, if_missing=[])
    else:
        stream.update(table, add={"n": "n"}, if_missing={"n": "0"})
    return app


def things(file: Path) -> dict[Any, Any]:
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        rows = map(dict, connection.execute("SELECT * FROM things"))
        return {(row["k"], row["g"]): row for row in rows} if rows else {}


def expected(sent: Sent, records: Sequence[Record]) -> dict[Any, Any]:
    """Return the table if records were applied in the order in which they were sent."""
    table: dict[Any, dict[str, Any]] = {}
    for k, g, n in records:
        row = {"k": k, "g": g, "n": n}
        key = tuple(row[name] for name in sent.key)
        kept = {name: row[name] for name in ("k", "g") if name in sent.key or sent.how != "add"}
        stored = table.setdefault(key, {"k": None, "g": None, "n": 0})
        stored |= kept | {"n": stored["n"] + n if sent.how == "add" else n}
    return {(row["k"], row["g"]): row for row in table.values()}


class World:
    """An application that is drawn, in a lake of its own, whose records have rising numbers `n`."""

    def __init__(self, folder: Path, sent: Sent) -> None:
        folder.mkdir()
        self.file, self.sent = folder / "things.sqlite", sent
        self.world = StepWorld(open_lake(folder / "lake"), folder, IN_PROCESS)
        self.world.stream(
            "records", sent.keyed, sent.partitions, k="string", g="string", n="bigint"
        )
        self.app = described(sent, self.file)
        self.records: list[Record] = []

    def plan(self) -> PlannedTable:
        (table,) = plan_application(self.app, systems=self.world.systems).tables
        return table

    def send(self, dice: Random, batches: int) -> None:
        for _ in range(batches):
            first = 1 + len(self.records)  # an addition of 0 would change nothing
            sent = [
                (f"k{dice.randrange(2)}", f"g{dice.randrange(3)}", first + n)
                for n in range(dice.randrange(1, 6))
            ]
            self.records += sent
            self.world.send("records", *sent)
            if dice.random() < 0.5:
                self.world.run(self.app)
        self.world.run(self.app)


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(rounds(IN_A_TEST, 400)))
def test_an_older_record_replaces_a_newer_one_only_where_it_is_noted(
    tmp_path: Path, seed: int
) -> None:
    dice = Random(seed)
    sent = draw(dice)
    if sent.options.get("newest_by") and sent.how == "add":
        sent = Sent(sent.keyed, sent.partitions, sent.between, sent.key, "put", sent.options)
    world = World(tmp_path / "world", sent)
    planned = world.plan()
    notes = plan_application(world.app, systems=world.world.systems).notes
    assert any(OLDER in note or "older record may" in note for note in notes) == bool(planned.harm)
    world.send(dice, 3)
    if planned.harm:
        for trial in range(40):  # it may happen: some records show it
            if things(world.file) != expected(sent, world.records):
                return
            world = World(tmp_path / f"trial-{trial}", sent)
            world.send(dice, 5)
        pytest.fail(f"it is noted, and does not happen: {planned.why}; {sent}")
    assert things(world.file) == expected(sent, world.records), planned.why


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(rounds(IN_A_TEST, 400)))
@pytest.mark.parametrize("bounded", [False, True])
def test_a_table_becomes_what_the_preview_of_a_replay_says(
    tmp_path: Path, seed: int, bounded: bool
) -> None:
    dice = Random(seed)
    sent = draw(dice)
    if sent.options.get("newest_by") and sent.how == "add":
        sent = Sent(sent.keyed, sent.partitions, sent.between, sent.key, "put", sent.options)
    world = World(tmp_path / "world", sent)
    world.send(dice, 4)
    before = things(world.file)
    startpoints = Startpoints(world.app, lake=world.world.lake)
    read = world.world.streams.partitions("records")
    until = {"until": StartpointSpecific("1")} if bounded else {}
    with_records = [ssp for ssp, end in world.world.streams.upcoming(read).items() if int(end) > 0]
    said_messages = startpoints.preview(with_records, StartpointOldest(), **until).tables["things"]
    startpoints.request(with_records, StartpointOldest(), reason="to see", by="test", **until)
    world.world.run(world.app)
    after = things(world.file)
    kind = said_messages.split()[0].rstrip(":;,")
    if kind == "unchanged":
        assert after == before, said_messages
    elif kind == "changed":
        assert after != before, said_messages
    elif "as before at its end" in said_messages and not bounded:
        assert after == before, said_messages
    else:
        assert kind == "older", said_messages


# -- windows, with Spark

EPOCH = datetime(2026, 3, 2, 12, tzinfo=UTC)
KINDS: dict[str, Kind] = {
    "tumbling": Tumbling(timedelta(minutes=5)),
    "sliding": Sliding(timedelta(minutes=10), timedelta(minutes=5)),
    "session": Session(timedelta(minutes=2)),
}


def windows_app(
    file: Path,
    kind: Kind,
    by: tuple[str, ...],
    key: tuple[str, ...],
    results: Any,
    *,
    only_final: bool = False,
) -> Application:
    """Return an application that keeps windows by `by` in a table with this key."""
    app = Application("windows", auto_repartition=True)
    sales = app.input_stream(
        "lake.sales", event_time="at", delay=timedelta(minutes=30), default_offset="oldest"
    )
    windows: MessageStream = sales.window(
        kind, by=by, name="w", results=results, aggregates={"n": Count(), "last": Max("sale")}
    )
    windows = windows.filter("final") if only_final else windows
    columns = {
        "shop": "string",
        "product": "string",
        "window_start": "timestamp",
        "n": "bigint",
        "last": "bigint",
    }
    columns = {
        name: kind
        for name, kind in columns.items()
        if name in (*by, *key, "window_start", "n", "last")
    }
    store = SqliteTable(file, "results", list(key), columns=columns, create=True)
    table = app.table(
        RemoteTable("results", key=list(key), read_function=store, write_function=store)
    )
    windows.select(*columns).send_to(table)
    return app


def planned(app: Application, world: StepWorld) -> ExecutionPlan:
    return plan_application(app, systems=world.systems)


# By the key of the table: whether the results of a window are in order for it.
CASES: list[tuple[tuple[str, ...], tuple[str, ...], str, bool, bool]] = [
    (("shop",), ("shop", "window_start"), "final", False, True),
    (("shop",), ("shop",), "final", False, True),
    (("shop", "product"), ("shop", "product", "window_start"), "final", False, True),
    (("shop", "product"), ("shop", "product"), "final", False, True),
    (("shop", "product"), ("shop",), "final", False, False),
    (("shop",), ("shop", "window_start"), "updates", False, True),
    (("shop",), ("shop",), "updates", False, False),
    (("shop",), ("shop",), "updates", True, True),
]


def sell(world: StepWorld, dice: Random, batches: int, app: Application) -> None:
    """Sell in small batches, with times that go on and come up to half an hour late."""
    minute = 0
    for _ in range(batches):
        rows = []
        for _ in range(dice.randrange(3, 9)):
            minute += dice.randrange(4)
            late = dice.choice([0, 0, 5, 15, 25])
            rows.append(
                (dice.randrange(10**6), f"s{dice.randrange(2)}", f"p{dice.randrange(2)}",
                 EPOCH + timedelta(minutes=max(minute - late, 0), seconds=dice.randrange(60)))
            )  # fmt: skip
        world.send("sales", *rows)
        world.run(app)
    later = EPOCH + timedelta(minutes=minute + 120)
    world.send("sales", *[(number, f"s{number % 2}", "p0", later) for number in range(8)])
    world.run(app)


def results_of(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        return {tuple(row)[:1]: dict(row) for row in connection.execute("SELECT * FROM results")}


@pytest.mark.lengthy
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(("by", "key", "results", "only_final", "ordered"), CASES)
def test_a_plan_says_whether_windows_keep_a_tables_order(
    tmp_path: Path,
    by: tuple[str, ...],
    key: tuple[str, ...],
    results: str,
    only_final: bool,
    ordered: bool,
    partitions: int,
) -> None:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    columns = {"sale": "bigint", "shop": "string", "product": "string", "at": "timestamp"}
    world.stream("sales", "sale", partitions, **columns)
    app = windows_app(
        tmp_path / "t.sqlite", KINDS["tumbling"], by, key, results, only_final=only_final
    )
    (table,) = planned(app, world).tables
    assert (table.order, bool(table.harm)) == (
        ("per key", False) if ordered else ("per source partition", True)
    )
    assert table.again == ()
    assert table.replay.startswith("unchanged: window-")
    notes = [note for note in planned(app, world).notes if OLDER in note]
    assert len(notes) == (not ordered)
    for note in notes:  # and it says what mends it
        assert f"columns {', '.join(by)}" in note


def latest(rows: Sequence[Mapping[str, Any]]) -> dict[str, datetime]:
    """Return the start of the latest window of each shop."""
    found: dict[str, datetime] = {}
    for row in rows:
        start = row["window_start"].replace(tzinfo=UTC)
        found[row["shop"]] = max(found.get(row["shop"], start), start)
    return found


def batches_out_of_order() -> list[list[tuple[int, str, str, datetime]]]:
    """Return three batches: of each shop, later windows of earlier products; late records; and what
    closes all windows.

    Their event times are up to half an hour late, which the input allows.
    """
    shops = [f"s{number}" for number in range(4)]
    first = [
        (shop, f"p{3 - part}", EPOCH + timedelta(minutes=6 * part))
        for shop in shops
        for part in range(4)
    ]
    late = [(shop, "p0", EPOCH + timedelta(minutes=1)) for shop in shops]
    end = [(shop, "p0", EPOCH + timedelta(hours=3)) for shop in shops for _ in range(3)]
    return [[(number, *sale) for number, sale in enumerate(batch)] for batch in (first, late, end)]


@pytest.mark.spark
@pytest.mark.parametrize(
    "kind",
    ["tumbling", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sliding", "session"))],
)
def test_tables_of_windows_have_the_latest_except_where_it_is_noted(
    step_world: StepWorld, kind: str
) -> None:
    world = step_world
    world.stream("sales", "sale", 3, sale="bigint", shop="string", product="string", at="timestamp")
    app = Application("windows", auto_repartition=True)
    sales = app.input_stream(
        "lake.sales", event_time="at", delay=timedelta(minutes=30), default_offset="oldest"
    )
    noted = {"final": False, "by product": True, "updates": True}
    for name, by, results in (
        ("final", ["shop"], "final"),
        ("by product", ["shop", "product"], "final"),
        ("updates", ["shop"], "updates"),
    ):
        place = name.replace(" ", "_")
        windows = sales.window(
            KINDS[kind], by=by, name=place, results=results, aggregates={"n": Count()}
        )  # type: ignore[arg-type]
        columns = dict.fromkeys(by, "string") | {"window_start": "timestamp", "n": "bigint"}
        store = SqliteTable(world.folder / "t.sqlite", place, "shop", columns=columns, create=True)
        table = app.table(RemoteTable(place, key="shop", read_function=store, write_function=store))
        made = windows.select(*columns)
        made.send_to(table)
        made.send_to(app.output_stream(f"lake.{place}", partitions=1))
    tables = planned(app, world).tables
    assert {table.table.replace("_", " "): bool(table.harm) for table in tables} == noted
    wrong = set()
    for batch in batches_out_of_order():
        world.send("sales", *batch)
        world.run(app)
        for table in tables:
            emitted = [row for row in world.rows(table.table) if row["window_start"] is not None]
            with closing(sqlite3.connect(world.folder / "t.sqlite")) as connection:
                connection.row_factory = sqlite3.Row
                exists = connection.execute(
                    "SELECT 1 FROM sqlite_master WHERE name = ?", [table.table]
                ).fetchone()
                kept = (
                    [dict(row) for row in connection.execute(f"SELECT * FROM {table.table}")]
                    if exists
                    else []
                )
            for row in kept:
                row["window_start"] = datetime.fromisoformat(row["window_start"])
            if latest(kept) != latest(emitted):
                wrong.add(table.table)
    assert wrong == {table.table for table in tables if table.harm}


@pytest.mark.spark
def test_a_replay_into_a_window_changes_no_table_as_its_preview_says(step_world: StepWorld) -> None:
    world = step_world
    world.stream("sales", "sale", 2, sale="bigint", shop="string", product="string", at="timestamp")
    file = world.folder / "t.sqlite"
    app = windows_app(file, KINDS["tumbling"], ("shop",), ("shop", "window_start"), "final")
    sell(world, Random(1), 3, app)
    before = results_of(file)
    assert before
    startpoints = Startpoints(app, lake=world.lake)
    for until in ({}, {"until": StartpointSpecific("2")}):
        asked = startpoints.preview("lake.sales", StartpointOldest(), **until)
        assert asked.tables["results"].startswith("unchanged: window-")
        assert [note for note in asked.notes if "keeps state" in note]
        assert not any("older" in line for line in asked.describe_effects())
        startpoints.request("lake.sales", StartpointOldest(), reason="to see", by="test", **until)
        world.run(app)
        assert results_of(file) == before
        counted = world.state(app).totals
    assert any(counts.get("again") for counts in counted.values())


# -- what else is noted


def two_streams(folder: Path) -> tuple[StepWorld, Application, MessageStream]:
    """Windows of one stream and records of another in one table each, and together in a third."""
    world = StepWorld(open_lake(folder / "lake"), folder, IN_PROCESS)
    for name in ("sales", "returns"):
        world.stream(name, "k", 2, k="string", n="bigint", at="timestamp")
    app = Application("both", auto_repartition=True)
    sales = app.input_stream("lake.sales", event_time="at", default_offset="oldest")
    returns = app.input_stream("lake.returns", default_offset="oldest")
    windows = sales.window(
        Tumbling(timedelta(hours=1)), by="k", name="w", aggregates={"n": Count()}
    ).select("k", "n")

    def table(name: str) -> Any:
        store = SqliteTable(
            folder / "t.sqlite", name, "k", columns={"k": "string", "n": "bigint"}, create=True
        )
        return app.table(RemoteTable(name, key="k", read_function=store, write_function=store))

    windows.send_to(table("counted"))
    plain = returns.select("k", "n")
    plain.send_to(table("returned"))
    windows.merge(plain).send_to(table("together"))
    return world, app, windows


def test_only_tables_and_operators_of_the_streams_that_are_read_again_are_named(
    tmp_path: Path,
) -> None:
    world, app, _ = two_streams(tmp_path)
    startpoints = Startpoints(app, lake=world.lake)
    of_sales = startpoints.preview("lake.sales", StartpointOldest())
    assert {name: effect.split()[0] for name, effect in of_sales.tables.items()} == {
        "counted": "unchanged:", "together": "unchanged:",
    }  # fmt: skip
    assert len([note for note in of_sales.notes if "keeps state" in note]) == 1
    of_returns = startpoints.preview("lake.returns", StartpointOldest())
    assert {name: effect.split()[0].rstrip(",") for name, effect in of_returns.tables.items()} == {
        "returned": "older", "together": "older",
    }  # fmt: skip
    assert [note for note in of_returns.notes if "keeps state" in note] == []


@pytest.mark.lengthy
def test_a_startpoint_that_goes_forward_has_no_effect_on_tables(tmp_path: Path) -> None:
    world = World(tmp_path / "world", Sent(("k",), 1, (), ("k",), "put"))
    world.send(Random(1), 4)
    world.world.send("records", ("k0", "g0", 1), ("k1", "g1", 2))
    startpoints = Startpoints(world.app, lake=world.world.lake)
    end = len(world.records)
    assert startpoints.preview("lake.records", StartpointSpecific(str(end + 1))).tables == {}
    assert startpoints.preview("lake.records", StartpointSpecific(str(end))).tables == {}
    assert list(startpoints.preview("lake.records", StartpointSpecific(str(end - 1))).tables) == [
        "things"
    ]


def test_local_tables_behind_windows_are_not_reported_to_count_records_again(
    tmp_path: Path,
) -> None:
    world, app, windows = two_streams(tmp_path)
    counts = app.local_table(
        "counts", key="k", schema=Schema.of(k="string", n="bigint"), partitions=2
    )
    windows.send_to(counts)
    (state,) = planned(app, world).state
    assert "counters count them" not in state.replay
    assert "window-" in state.replay


@pytest.mark.lengthy
def test_what_is_declared_and_not_used_is_exactly_what_is_noted(tmp_path: Path) -> None:
    for seed in range(40):
        dice, folder = Random(seed), tmp_path / str(seed)
        world = StepWorld(open_lake(folder / "lake"), folder, IN_PROCESS)
        world.stream("a", "k", 1, k="string", n="bigint")
        world.stream("d", "k", 1, k="string", m="bigint")
        app = Application("drawn")
        stream = app.input_stream("lake.a")
        used = {
            name: dice.random() < 0.6
            for name in ("out", "letters", "table", "looked up", "joined", "local")
        }
        out = app.output_stream("lake.out", partitions=1, key="k")
        letters = app.output_stream("lake.letters", partitions=1)
        tables = {}
        for name in ("things", "names"):
            columns = {"k": "string", "n": "bigint"}
            store = SqliteTable(folder / "t.sqlite", name, "k", columns=columns, create=True)
            tables[name] = app.table(
                RemoteTable(name, key="k", read_function=store, write_function=store)
            )
        dataset = app.table(bounded_dataset("d", input="lake.d", key="k", partitions=1))
        local = app.local_table(
            "counts", key="k", schema=Schema.of(k="string", n="bigint"), partitions=1
        )
        if used["joined"]:
            stream = stream.join(dataset, on="k", select=["m"])
        if used["looked up"]:
            stream = stream.join(tables["names"], on="k", select=["n as o"])
        plain = stream.select("k", "n")
        used["letters"] &= used["table"]
        if used["table"]:
            more: dict[str, Any] = (
                {"dead_letters": letters, "at_most": 5} if used["letters"] else {}
            )
            plain.send_to(tables["things"], **more)
        if used["local"]:
            plain.send_to(local)
        if used["out"]:
            plain.send_to(out)
        noted = {note for note in planned(app, world).notes if " is declared and " in note}
        wanted = {
            "Output stream lake.out is declared and nothing is sent to it.": used["out"],
            "Output stream lake.letters is declared and nothing is sent to it.": used["letters"],
            "Dataset d is declared and not used.": used["joined"],
            "Dataset counts is declared and not used.": used["local"],
            "Table things is declared and not used.": used["table"],
            "Table names is declared and not used.": used["looked up"],
        }
        assert noted == {note for note, is_used in wanted.items() if not is_used}
        nothing = any(note.startswith("Nothing is written") for note in planned(app, world).notes)
        assert nothing == (not (used["out"] or used["table"] or used["local"]))

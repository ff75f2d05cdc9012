"""What plans note of marks, joins with tables that an application writes, other writers, columns
that are not proven and renames happens as noted, and nowhere else.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct import Application, open_lake
from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

pytestmark = pytest.mark.lengthy
LETTERS = "abcd"


def plan_of(app: Application, world: StepWorld) -> ExecutionPlan:
    return plan_application(app, systems=world.systems)


def stored(file: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]


# -- marks


def sums(world: StepWorld, sends: Sequence[tuple[str, str | None]]) -> Application:
    """Return an application with a send for each (column, name of its marks), which adds to it."""
    app = Application("sums", engine="auto")
    columns = {"k": "string", **dict.fromkeys(LETTERS, "bigint")}
    store = SqliteTable(world.folder / "t.sqlite", "sums", "k", columns=columns, create=True)
    table = app.table(
        RemoteTable(
            "sums",
            key="k",
            read_function=store,
            write_function=store,
            idempotent=True,
            on_replay="skip",
        )
    )
    stream = app.input_stream("lake.r", default_offset="oldest")
    for column, name in sends:
        stream.update(
            table, add={column: "n"}, if_missing=dict.fromkeys(LETTERS, "0"), marks_as=name
        )
    return app


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(6, 200)))
def test_sends_that_are_distinguished_by_their_order_get_the_marks_of_others(
    tmp_path: Path, seed: int
) -> None:
    """A replay shows which sends have a mark: these skip what is read again, others add it."""
    dice = Random(seed)
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    world.stream("r", "k", 1, k="string", n="bigint")
    names = {letter: dice.choice([None, None, letter]) for letter in LETTERS}
    first = [(letter, names[letter]) for letter in dice.sample(LETTERS, dice.randrange(1, 4))]
    second = [(letter, names[letter]) for letter in dice.sample(LETTERS, dice.randrange(1, 5))]
    before, after = sums(world, first), sums(world, second)
    world.send("r", ("k", 1), ("k", 2))
    world.run(before)
    old, new = plan_of(before, world), plan_of(after, world)
    for app, sends in ((before, first), (after, second)):
        unnamed = [name for _, name in sends if name is None]
        noted = any("tells" in note for note in plan_of(app, world).notes)
        assert noted == (len(unnamed) > 1)
    Startpoints(after, lake=world.lake).request(
        "lake.r", StartpointOldest(), reason="to see", by="test"
    )
    world.run(after)
    marks = {table.marks for table in old.tables}
    expected = {letter: 3 if letter in dict(first) else 0 for letter in LETTERS}
    for table, (letter, _) in zip(new.tables, second, strict=True):
        expected[letter] += 0 if table.marks in marks else 3
    (row,) = stored(tmp_path / "t.sqlite", "sums")
    assert {letter: row[letter] for letter in LETTERS} == expected
    moved = [line for line in new.differences_from(old) if "marks applied records as" in str(line)]
    kept = {letter: table.marks for table, (letter, _) in zip(old.tables, first, strict=True)}
    changed = [
        letter
        for table, (letter, _) in zip(new.tables, second, strict=True)
        if letter in kept and kept[letter] != table.marks
    ]
    if set(dict(first)) <= set(dict(second)):  # else a new send is taken for one that is gone
        assert len(moved) == len(changed)


# -- joins with what the application writes


@pytest.mark.rounds
@pytest.mark.spark
@pytest.mark.parametrize("seed", range(rounds(1, 40)))
def test_joins_see_records_of_the_sends_that_the_plan_names(
    step_world: StepWorld, seed: int
) -> None:
    dice, world = Random(seed), step_world
    world.stream("r", "k", 1, k="string", n="bigint")
    app = Application("fed")
    table = app.local_table("seen", key="k", schema=Schema.of(k="string", n="bigint"), partitions=1)
    stream = app.input_stream("lake.r", default_offset="oldest")
    steps = [*["join"] * dice.randrange(1, 4), *["send"] * dice.randrange(1, 4)]
    dice.shuffle(steps)
    sends: dict[str, int] = {}
    for number, step in enumerate(steps):
        if step == "send":  # each send writes its own number, so that a join shows the last
            sent = stream.map("k", f"n + {1000 * (number + 1)} as n").send_to(table)
            sends[app.operators[-1].id] = number + 1
            assert sent is not None
        else:
            joined = stream.join(table, on="k", select=["n as m"], name=f"j{number}")
            joined.send_to(app.output_stream(f"lake.out{number}", partitions=1, key="k"))
    planned = plan_of(app, world).fed_joins
    last = list(sends.values())[-1]
    for batch in (1, 2):
        world.send("r", ("k", batch))
        world.run(app)
        for join in planned:
            number = join.join.rpartition("-j")[2]
            row = next(row for row in world.rows(f"out{number}") if row["n"] == batch)
            earlier = None if batch == 1 else 1000 * last + batch - 1
            sees = {
                "next batch": earlier,
                "this batch": 1000 * last + batch,
                "both": 1000 * sends.get(join.last_send or "", 0) + batch,
            }
            assert row["m"] == sees[join.sees], (steps, join)


# -- other writers of a table


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(5, 200)))
def test_several_sends_to_one_table_do_harm_only_where_it_is_noted(
    tmp_path: Path, seed: int
) -> None:
    """Two sends of one stream, each with a half of its records: their order between them is lost
    if they set the same columns, and a newer record of the one hides columns of the other.
    """
    dice = Random(seed)
    kind = dice.choice(["same", "own", "newest same", "newest own", "merged", "sums"])
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    world.stream("r", "k", 1, k="string", n="bigint")
    app = Application("writers", engine="auto", max_batch_records=9)
    columns = {"k": "string", "at": "bigint", "a": "bigint", "b": "bigint"}
    store = SqliteTable(tmp_path / "t.sqlite", "things", "k", columns=columns, create=True)
    more = {"newest_by": "at"} if kind.startswith("newest") else {}
    table = app.table(
        RemoteTable("things", key="k", read_function=store, write_function=store, **more)
    )
    stream = app.input_stream("lake.r", default_offset="oldest")
    even = stream.filter("n % 2 = 0").with_columns(at="n", a="n", b="n")
    odd = stream.filter("n % 2 = 1").with_columns(at="n", a="n", b="n")
    at = ["at"] if more else []
    if kind == "merged":
        even.merge(odd).update(table, set=["a"], if_missing=[])
    elif kind == "sums":
        for half in (even, odd):
            half.update(table, add={"a": "n"}, if_missing={"a": "0"})
    else:
        even.update(table, set=[*at, "a"], if_missing=[])
        odd.update(table, set=[*at, "b" if kind.endswith("own") else "a"], if_missing=[])
    harmful = any(planned.harm for planned in plan_of(app, world).tables)
    assert harmful == (kind in ("same", "newest own"))
    sent = [(dice.choice("xyz"), number) for number in range(1, 60)]
    differs = False
    for first in range(0, len(sent), 15):
        world.send("r", *sent[first : first + 15])
        world.run(app)
        expected: dict[str, dict[str, int]] = {}
        for k, n in sent[: first + 15]:
            row = expected.setdefault(k, {"a": 0, "b": 0})
            if kind == "sums":
                row["a"] += n
            else:
                row["b" if kind.endswith("own") and n % 2 else "a"] = n
        found = {
            row["k"]: {"a": row["a"] or 0, "b": row["b"] or 0}
            for row in stored(tmp_path / "t.sqlite", "things")
        }
        differs |= found != expected
    assert differs == harmful, kind


# -- columns that are not proven


@pytest.mark.spark
def test_what_is_noted_as_unproven_works_or_names_its_operator_when_it_runs(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("r", "k", 1, k="string", n="bigint")
    world.send("r", ("a", 1), ("b", 2))
    for column, works in (("made", True), ("other", False)):
        app = Application(f"unproven-{column}")
        made = app.input_stream("lake.r", default_offset="oldest").map(
            lambda frame: frame.withColumn("made", frame.n + 1)
        )
        out = app.output_stream(f"lake.{column}", partitions=1)
        made.filter(f"{column} > 0").map("k", f"{column} as n").send_to(out)
        notes = [note for note in plan_of(app, world).notes if "nproven" in note]
        assert len(notes) == 1
        assert "map-2" in notes[0]
        if works:
            world.run(app)
            assert sorted(row["n"] for row in world.rows(column)) == [2, 3]
            continue
        with pytest.raises(AdjunctError) as refused:
            world.run(app)
        assert refused.value.operator == "filter-3"
        assert column in str(refused.value)
        assert world.state(app).last is None, "it is found before a batch begins"

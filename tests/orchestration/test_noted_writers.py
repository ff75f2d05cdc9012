"""What a plan notes of other applications that have written the same outputs is what a run then
does or refuses.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct import Application, open_lake, run_application
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.startpoints.coordinator import describe_other_writers
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.startpoints import Startpoints, StartpointUpcoming
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

pytestmark = pytest.mark.lengthy
STREAMS = ("r", "s")
TABLES = ("t", "u")


@dataclass(frozen=True)
class Sends:
    """Which input streams an application adds up in which tables, and how."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    idempotent: bool

    @property
    def streams(self) -> set[str]:
        return {stream for stream, _ in self.pairs}

    @property
    def tables(self) -> set[str]:
        return {table for _, table in self.pairs}


def draw(dice: Random, name: str) -> Sends:
    pairs = [(stream, table) for stream in STREAMS for table in TABLES]
    return Sends(name, tuple(dice.sample(pairs, dice.randrange(1, 4))), dice.random() < 0.5)


def application(world: StepWorld, sends: Sends) -> Application:
    app = Application(sends.name, engine="auto")
    tables: dict[str, Any] = {}
    for name in sorted(sends.tables):
        store = SqliteTable(
            world.folder / "t.sqlite", name, "k", columns={"k": "string", "n": "bigint"},
            create=True,
        )  # fmt: skip
        tables[name] = app.table(
            RemoteTable(
                name, key="k", read_function=store, write_function=store,
                idempotent=sends.idempotent,
            )
        )  # fmt: skip
    for stream in sorted(sends.streams):
        records = app.input_stream(f"lake.{stream}", default_offset="oldest")
        for table in sorted(table for of, table in sends.pairs if of == stream):
            records.update(tables[table], add={"n": "n"}, if_missing=[])
    return app


def run(world: StepWorld, app: Application, **options: Any) -> None:
    run_application(app, lake=world.lake, systems=world.systems, spark=IN_PROCESS, **options)


def totals(world: StepWorld) -> dict[str, int]:
    with closing(sqlite3.connect(world.folder / "t.sqlite")) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
        found = {name: connection.execute(f"SELECT sum(n) FROM {name}").fetchone()[0]
                 for name in TABLES if name in names}  # fmt: skip
    return {name: found.get(name) or 0 for name in TABLES}


def world_of(tmp_path: Path) -> StepWorld:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    for stream in STREAMS:
        world.stream(stream, "k", 2, k="string", n="bigint")
    return world


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(8, 200)))
def test_a_first_run_is_refused_exactly_where_the_plan_notes_another_writer(
    tmp_path: Path, seed: int
) -> None:
    dice = Random(seed)
    world = world_of(tmp_path)
    first, second = draw(dice, "first"), draw(dice, "second")
    sizes = {stream: dice.choice([0, 1, 10]) for stream in STREAMS}
    for stream, number in sizes.items():
        if number:
            world.send(stream, *[("a", 1)] * number)
    run(world, application(world, first))
    written = {table for stream, table in first.pairs if sizes[stream]}
    before = totals(world)
    assert before == added(first, sizes)

    app = application(world, second)
    notes = describe_other_writers(world.lake, app)
    # Which input the other one has written to which table is not known.
    shared = {table for stream, table in second.pairs if table in written & second.tables
              if stream in first.streams}  # fmt: skip
    assert bool(notes) == bool(shared)
    for note in notes:
        assert all(f" {table}" in note for table in shared)
        if "would read and write these records again" in note:
            assert all(added(second, sizes)[table] for table in shared)
    if not notes:
        run(world, app)
    else:
        with pytest.raises(ConfigurationError) as refused:
            run(world, app)
        assert refused.value.application == "second"
        assert totals(world) == before
        run(world, app, adopt=True)
    # Marks belong to one application: another one adds each record again, as the note says.
    again = added(second, sizes)
    assert totals(world) == {table: before[table] + again[table] for table in TABLES}
    assert describe_other_writers(world.lake, app) == [], "it has run"


def added(sends: Sends, sizes: dict[str, int]) -> dict[str, int]:
    return {
        table: sum(sizes[stream] for stream, of in sends.pairs if of == table) for table in TABLES
    }


def test_with_a_startpoint_for_each_partition_nothing_is_written_again(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.send("r", ("a", 1), ("b", 2))
    run(world, application(world, Sends("first", (("r", "t"),), idempotent=False)))
    app = application(world, Sends("second", (("r", "t"),), idempotent=False))
    assert len(describe_other_writers(world.lake, app)) == 1
    Startpoints(app, lake=world.lake).request(
        "lake.r", StartpointUpcoming(), reason="to see", by="test"
    )
    assert describe_other_writers(world.lake, app) == [], "the startpoints say where it begins"
    run(world, app)
    world.send("r", ("a", 10))
    run(world, app)
    assert totals(world)["t"] == 13

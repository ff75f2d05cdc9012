"""Applications leave the same in a table with compact batches as in one without, letters
included.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.batching import BatchProvider
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

KEYS = [f"k{n}" for n in range(6)]
COLUMNS = {"k": "string", "n": "smallint", "last": "int", "v": "double"}


def run(folder: Path, seed: int, *, compact: bool, updates: bool) -> tuple[Any, ...]:
    """What a run leaves: the table's records, the letters, and its counters."""
    drawn = random.Random(seed)
    world = StepWorld(open_lake(folder / f"lake-{compact}"), folder, IN_PROCESS)
    world.stream("changes", "k", 3, k="string", v="double", i="int")
    for _ in range(3):
        values = [
            (
                drawn.choice(KEYS),
                drawn.choice([1.0, 2.0, 3.0, float("nan")]),
                drawn.choice([1, 2, 9000]),
            )
            for _ in range(40)
        ]
        deleted = [] if updates else [(key, None, None) for key in drawn.choices(KEYS, k=3)]
        world.send("changes", *values, deleted=deleted)
    store = SqliteTable(folder / f"t-{compact}.sqlite", "t", "k", columns=COLUMNS, create=True)
    batches = BatchProvider(size=drawn.choice([7, 500]), compact=compact)
    table = RemoteTable("t", key="k", read_function=store, write_function=store, batches=batches)
    app = Application("app", engine="auto")
    letters = app.output_stream("lake.letters", partitions=1)
    stream = app.input_stream("lake.changes")
    if updates:
        added, begun = {"n": "i"}, {"last": "1"}
        stream.update(
            app.table(table),
            add=added,
            set=["v"],
            if_missing=begun,
            dead_letters=letters,
            at_most=500,
        )
    else:
        stream.select("k", "v").send_to(app.table(table), dead_letters=letters, at_most=500)
    counters = world.run(app).counters["t"]
    with BlockingTable(table) as blocking:
        records = blocking.get_all(KEYS)
    rejected = [
        (row["kind"], row["key"], row["record"], row["problem"]) for row in world.rows("letters")
    ]
    kept = ("writes", "deletes", "updates", "defaults_put", "dead_letters")
    rejected = [
        tuple(str(part).replace(f"t-{compact}", "t") for part in letter) for letter in rejected
    ]
    return records, sorted(rejected), {name: counters[name] for name in kept}, counters["compacted"]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("seed", range(rounds(3, 30)))
def test_records_letters_and_counters_are_the_same(
    tmp_path: Path, seed: int, updates: bool
) -> None:
    *plain, saved_by_none = run(tmp_path, seed, compact=False, updates=updates)
    *compact, saved = run(tmp_path, seed, compact=True, updates=updates)
    assert compact == plain
    assert saved_by_none == 0
    assert saved > 0

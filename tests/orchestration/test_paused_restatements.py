"""A run that restates results, paused at any request to the lake or write to a table, while others
finish its restatement and make further ones: nothing comes twice, and the results are right.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import CommitConflictError, LeaseLostError, RunLeaseLostError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import KEYS, START, PausedFunction, PausedWorld, at_call
from tests.rounds import rounds

DATASET = unbounded_dataset("planes", input="lake.changes", key="k", partitions=2)
RESULTS = {"id": "bigint", "v": "bigint", "seen": "timestamp"}
LOST = RunLeaseLostError | CommitConflictError | LeaseLostError


class RestatingWorld:
    """Records that were joined with a dataset, of which most keys have changed since.

    They are sent to a stream, and written to a table: before each write of the run that is paused,
    `before` is called.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.sqlite"
        self.before: Any = lambda: None
        self.paused = PausedWorld(lambda _, first: self.make(first))
        world = self.paused
        facts = {"id": "bigint", "k": "string", "seen": "timestamp"}
        world.streams.create("facts", schema=Schema.of(**facts), key=["k"], partitions=2)
        rows = []
        for n in range(KEYS + 4):  # some have no entry
            rows.append({"id": n, "k": f"k{n}", "seen": START + timedelta(seconds=n)})
        records = pa.Table.from_pylist(rows, Schema.of(**facts).to_arrow())
        world.streams.append("facts", records, producer="test", sequence=1)
        world.run("zeroth")
        world.send()

    def store(self, first: bool) -> Any:
        made = SqliteTable(str(self.path), "results", "id", columns=RESULTS, create=True)
        return PausedFunction(made, within=self.before) if first else made

    def make(self, first: bool) -> Application:
        app = Application("sets", engine="auto")
        facts = app.input_stream("lake.facts", default_offset="oldest")
        joined = facts.join(
            app.table(DATASET), on="k", how="left", select=["n as v"], restate=timedelta(days=7)
        )
        joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        table = RemoteTable(
            "results", key="id", write_function=self.store(first), newest_by="seen", batch_size=5
        )
        joined.update(
            app.table(table), set={"v": "v", "seen": "seen"}, if_missing={"v": "v", "seen": "seen"}
        )
        return app

    def check(self, made: Any) -> None:
        """Check the results after a last run."""
        world = self.paused
        world.run("last")
        last = 100 * world.rounds
        expected = {n: last + n if n < KEYS else None for n in range(KEYS + 4)}
        ranges = world.streams.all_ranges("out")
        latest = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
        assert sorted((row["id"], row["v"]) for row in latest) == sorted(expected.items()), made
        every = world.streams.read_arrow(ranges).to_pylist()
        sent = Counter((row["id"], row["__epoch"]) for row in every)
        assert set(sent.values()) == {1}, made
        restated = [row for row in every if row["v"] is not None]
        assert len(restated) == len({(row["id"], row["v"]) for row in restated}), made
        function = self.store(first=False)
        with BlockingTable(RemoteTable("results", key="id", read_function=function)) as table:
            found = table.get_all([*expected])
        assert {n: row["v"] for n, row in found.items()} == expected, made


def requests_of(folder: Path) -> list[tuple[str, str]]:
    counting = RestatingWorld(folder, "counting")
    counted = FaultyStore(counting.paused.store)
    counting.paused.run("first", Lake(counted, counting.paused.lake.id))
    return counted.requests


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_restatement_that_was_paused_at_any_request_restates_nothing_twice(
    tmp_path: Path,
) -> None:
    requests = requests_of(tmp_path)
    outcomes = set()
    for nth in rounds([*range(3, len(requests), 19)], [*range(1, len(requests) + 1)]):
        world = RestatingWorld(tmp_path, f"{nth}")
        pause = Fault("*", nth, "meanwhile", action=world.paused.pause)
        lake = Lake(FaultyStore(world.paused.store, [pause]), world.paused.lake.id)
        error = world.paused.run_paused(lake)
        made = (nth, requests[nth - 1], error)
        if not world.paused.paused:  # it made fewer requests this time
            world.paused.go_on()
        assert error is None or isinstance(error, LOST), made
        outcomes.add(type(error))
        world.check(made)
    assert RunLeaseLostError in outcomes


@pytest.mark.lengthy
@pytest.mark.parametrize("nth", [1, 3])
def test_a_restatement_that_was_paused_within_a_write_writes_no_former_result(
    tmp_path: Path, nth: int
) -> None:
    world = RestatingWorld(tmp_path, "table")
    world.before = at_call(nth, world.paused.pause)
    error = world.paused.run_paused()
    assert world.paused.paused
    assert isinstance(error, LOST)
    world.check(error)

"""Tables whose key is not the stream's, on real stores: what is newest stays, and increments are
exact, whatever comes.

A tag is scanned at many gates; the stream is partitioned by gate, the table by tag. What should be
there is told by plain Python over the scans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration import scan_tables
from tests.orchestration.scan_tables import (
    Scan,
    Store,
    counting,
    newest,
    postgres_store,
    scanned,
    send,
    sqlite_store,
)
from tests.orchestration.step_world import StepWorld
from tests.orchestration.test_adding_an_operator import Union
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.spark


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.long),
        pytest.param("postgres", marks=pytest.mark.server),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "sqlite":
        return sqlite_store(tmp_path)
    return emptied(postgres_store(request.getfixturevalue("postgres_server").port))


def emptied(store: Store) -> Store:
    for (table,) in store.look("SELECT tablename FROM pg_tables WHERE tablename LIKE 'tags%'"):
        store.look(f'DROP TABLE "{table}"')
    return store


def last_seen(table: RemoteTable[Any, Any, Any], name: str) -> Application:
    app = Application(name, max_batch_records=250)
    app.input_stream("lake.scans").map("tag", "gate", "at").send_to(app.table(table))
    return app


def read_again(
    world: StepWorld, app: Application, *, until: str | None = None, offset: str | None = None
) -> None:
    start = StartpointOldest() if offset is None else StartpointSpecific(offset)
    bound = None if until is None else StartpointSpecific(until)
    Startpoints(app, lake=world.lake).request(
        "lake.scans", start, until=bound, by="test", reason="a test"
    )


def wrong(times: dict[str, datetime], scans: Sequence[Scan]) -> int:
    expected = newest(scans)
    assert times.keys() == expected.keys()
    return sum(times[tag] != at for tag, at in expected.items())


def test_last_seen_is_wrong_without_newest_by_as_the_plan_says_and_right_with_it(
    step_world: StepWorld, store: Store
) -> None:
    scans = scanned(1, 600)
    send(step_world, scans)
    plain = last_seen(store.table(), "plain")
    planned = step_world.context(plain).plan
    assert planned.tables[0].order == "per source partition"
    assert any("order holds per source partition only" in note for note in planned.notes)
    step_world.run(plain)
    assert wrong(store.times(), scans) > 0

    app = last_seen(store.table(newest_by="at"), "newest")
    counters = step_world.run(app).counters["tags"]
    assert wrong(store.times(), scans) == 0
    assert counters["skipped"] > 0
    previewed = Startpoints(app, lake=step_world.lake).preview("lake.scans", StartpointOldest())
    assert previewed.tables["tags"].startswith(
        "unchanged: records that are older by at are skipped"
    )
    read_again(step_world, app, offset="8")
    step_world.run(app, run="run-2")
    assert wrong(store.times(), scans) == 0
    read_again(step_world, app, until="14")
    step_world.run(app, run="run-3")
    assert wrong(store.times(), scans) == 0


# a run that dies: test_advice_for_tables.py; replays: the two tests below, and the last
@pytest.mark.long
def test_counters_are_exact_after_a_kill_and_replays_apply_or_skip_as_declared(
    step_world: StepWorld, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    store = emptied(postgres_store(postgres_server.port))
    scans = scanned(2, 600)
    send(step_world, scans)
    expected = Counter(
        {tag: 2 * count for tag, count in Counter(tag for _, tag, _ in scans).items()}
    )
    command = [sys.executable, "-m", scan_tables.__name__, str(tmp_path), str(postgres_server.port)]
    with (tmp_path / "killed.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            there = counted_so_far(store, child, 200, tmp_path / "killed.log")
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert 0 < there < sum(expected.values())
    app = counting(store)
    assert step_world.state(app).open is not None
    counters = step_world.run(app).counters["tags"]
    assert store.counts() == expected
    assert counters["skipped"] >= there

    read_again(step_world, app, offset="10")  # another epoch: applied again, on purpose
    step_world.run(app, run="run-2")
    again = Counter(
        {
            tag: 2 * count
            for tag, count in Counter(t for _, t, _ in read_from(step_world, 10)).items()
        }
    )
    assert store.counts() == expected + again
    expected += again
    # A bounded replay is applied beside the main position, and what comes after it is not taken for
    # older.
    read_again(step_world, app, until="5")
    step_world.run(app, run="run-4")
    first = Counter(t for _, t, _ in read_from(step_world, 0, 5))
    expected += Counter({tag: 2 * count for tag, count in first.items()})
    assert store.counts() == expected
    last = scanned(4, 50)
    send(step_world, last)
    step_world.run(app, run="run-5")
    expected += Counter(
        {tag: 2 * count for tag, count in Counter(tag for _, tag, _ in last).items()}
    )
    assert store.counts() == expected


def test_a_replay_leaves_a_table_alone_that_skips_what_it_has_had(
    step_world: StepWorld, tmp_path: Path
) -> None:
    store, scans = sqlite_store(tmp_path), scanned(5, 300)
    send(step_world, scans)
    app = counting(store, on_replay="skip")
    step_world.run(app)
    expected = {tag: 2 * count for tag, count in Counter(tag for _, tag, _ in scans).items()}
    assert store.counts() == expected
    read_again(step_world, app)
    assert step_world.run(app, run="run-2").counters["tags"]["skipped"] == 600
    assert store.counts() == expected
    # Another application's messages are others, though they are of the same stream.
    step_world.run(counting(store, "another", on_replay="skip"), run="run-3")
    assert store.counts() == {tag: 2 * count for tag, count in expected.items()}


def test_a_replay_ahead_of_the_position_takes_nothing_from_a_table_that_skips(
    step_world: StepWorld, tmp_path: Path
) -> None:
    store, scans = sqlite_store(tmp_path), scanned(8, 200)
    send(step_world, scans)
    app = counting(store, on_replay="skip")
    step_world.run(app)
    more = scanned(9, 300)
    send(step_world, more)
    # Of each partition, the last records but one, which the main position has not come to.
    ends = step_world.streams.upcoming(step_world.streams.partitions("scans"))
    for ssp, end in ends.items():
        start, until = StartpointSpecific(str(int(end) - 8)), StartpointSpecific(str(int(end) - 1))
        Startpoints(app, lake=step_world.lake).request(
            str(ssp), start, until=until, by="test", reason="a test"
        )
    step_world.run(app, run="run-2")
    assert store.counts() == {
        tag: 2 * count for tag, count in Counter(tag for _, tag, _ in [*scans, *more]).items()
    }


@pytest.mark.one_engine
def test_rows_of_a_message_that_differ_in_each_run_are_refused(
    step_world: StepWorld, tmp_path: Path
) -> None:
    send(step_world, scanned(6, 20))
    app = Application("random")
    table = app.table(sqlite_store(tmp_path).table(idempotent=True))
    rows = app.input_stream("lake.scans").map(
        lambda frame: frame.selectExpr("*", "explode(array(rand(), rand())) as part"),
        keeps_partitioning=True,
    )
    rows.update(table, add={"scans": "1"}, if_missing=[])
    with pytest.raises(
        ConfigurationError, match=r"yields several records for the key 'tag-\d+'.*rand\(\)"
    ):
        step_world.run(app)


def read_from(world: StepWorld, start: int, end: int | None = None) -> list[Scan]:
    """Return the scans from an offset on, up to another, of all partitions."""
    rows = world.streams.read_arrow(world.streams.all_ranges("scans")).to_pylist()
    chosen = [
        row for row in rows if start <= row["__offset"] and (end is None or row["__offset"] < end)
    ]
    return [(row["gate"], row["tag"], row["at"]) for row in chosen]


def counted_so_far(store: Store, child: subprocess.Popen[Any], least: int, log: Path) -> int:
    """Wait until the process has counted so many scans; return how many there are."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert child.poll() is None, log.read_text()[-3000:]
        try:
            there = sum(count or 0 for count in store.counts().values())
        except Exception:  # noqa: BLE001 - the table is made by the process, in its own time
            there = 0
        if there >= least:
            return there
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-3000:])


def test_records_of_two_streams_at_one_position_both_count_also_after_an_output(
    step_world: StepWorld, tmp_path: Path
) -> None:
    store = sqlite_store(tmp_path)
    for name in ("left", "right"):
        step_world.stream(name, "gate", 1, gate="string", tag="string")
        step_world.send(name, ("g", "a"), ("g", "b"), ("g", "a"))

    def merged() -> Application:
        app = Application("merged")
        table, out = (
            app.table(store.table(idempotent=True)),
            app.output_stream("lake.out", partitions=2, key="gate"),
        )
        left, right = app.input_stream("lake.left"), app.input_stream("lake.right")
        left.apply(Union(), right).update(table, add={"scans": "1"}, if_missing=[])
        right.send_to(out).map("tag").update(table, add={"scans": "100"}, if_missing=[])
        return app

    app = merged()
    assert [table.order for table in step_world.context(app).plan.tables] == ["any", "per key"]
    step_world.run(app)
    assert store.counts() == {"a": 204, "b": 102}
    step_world.again(app)
    assert store.counts() == {"a": 204, "b": 102}
    Startpoints(app, lake=step_world.lake).request(
        "lake.right", StartpointOldest(), by="test", reason="a test"
    )
    step_world.run(app, run="run-2")
    assert store.counts() == {"a": 406, "b": 203}
    step_world.send("right", ("g", "b"))
    step_world.run(app, run="run-3")
    assert store.counts() == {"a": 406, "b": 304}

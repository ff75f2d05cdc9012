"""Counters stay exact where a single Spark worker is killed in the middle of a write, on real
stores.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import TransientError
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from tests.orchestration.killed_in_tasks import KilledInTask, KilledPostgres, KilledSqlite
from tests.orchestration.scan_tables import (
    COLUMNS,
    Store,
    counting,
    postgres_store,
    scanned,
    send,
    sqlite_store,
)
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    function: KilledInTask
    if request.param == "sqlite":
        store = sqlite_store(tmp_path)
        function = KilledSqlite(
            tmp_path / "tags.sqlite", "tags", "tag", columns=COLUMNS, create=True
        )
    else:
        store = postgres_store(request.getfixturevalue("postgres_server").port)
        for (table,) in store.look("SELECT tablename FROM pg_tables WHERE tablename LIKE 'tags%'"):
            store.look(f'DROP TABLE "{table}"')
        connect = store.function.connect
        function = KilledPostgres(
            connect=connect, table="tags", key="tag", columns=COLUMNS, create=True
        )
    function.flag, function.driver = str(tmp_path / "killed"), os.getpid()
    store.function = function
    return store


@pytest.mark.parametrize(
    ("store", "when"),
    [
        ("sqlite", "before"),
        pytest.param("postgres", "after", marks=pytest.mark.server),
        pytest.param("sqlite", "after", marks=pytest.mark.long),
        pytest.param("postgres", "before", marks=[pytest.mark.server, pytest.mark.long]),
    ],
    indirect=["store"],
)
def test_counters_are_exact_if_a_worker_dies_before_or_after_a_write(
    step_world: StepWorld, store: Store, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.function.when = when
    send(step_world, scanned(11, 300))
    app = counting(store, batch_size=20)
    with pytest.raises(
        TransientError, match="a Python worker of Spark ended in the middle of its task"
    ):
        run_application(
            app,
            lake=step_world.lake,
            systems=step_world.systems,
            spark=step_world.spark,
            run="killed",
        )
    assert "Table tags: order holds per source partition only" in caplog.text, (
        "the run says it, as the plan does"
    )
    assert (tmp_path / "killed").exists()
    there = sum(store.counts().values())
    assert 0 < there < 600
    assert step_world.state(app).open is not None
    # Asked for between the crash and the next run: a part beside the main position, each of it once
    # more.
    Startpoints(app, lake=step_world.lake).request(
        "lake.scans",
        StartpointSpecific("2"),
        until=StartpointSpecific("9"),
        by="test",
        reason="a test",
    )
    counters = step_world.run(app, run="again").counters["tags"]
    rows = step_world.streams.read_arrow(step_world.streams.all_ranges("scans")).to_pylist()
    expected: Counter[str] = Counter()
    for row in rows:
        expected[row["tag"]] += 2 * (1 + (2 <= row["__offset"] < 9))
    assert store.counts() == expected
    assert counters["skipped"] == there

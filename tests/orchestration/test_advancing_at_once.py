"""Independent datasets of one application advance at once, in threads of one session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.unbounded import write_changes
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run_application import run_application
from dagster_adjunct.resources.errors import DatasetError, StoreUnavailableError
from dagster_adjunct.resources.objects import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World
from tests.assets.unbounded.following_plain import follow_without_spark

COLUMNS = Schema.of(k="string", n="int")
NAMES = ("first", "second", "third")
TABLES = [unbounded_dataset(name, input=f"lake.{name}", key="k", partitions=2) for name in NAMES]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    follow_without_spark(monkeypatch)
    world = World(open_lake(tmp_path / "lake"))
    for name in (*NAMES, "orders"):
        world.stream(name, COLUMNS, ["k"], 2)
        world.send(name, [("a", 1), ("b", 2)])
    return world


def before_writing(patch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with the dataset's name before it is written."""
    write = write_changes.write_generation

    def acting(*arguments: Any, what: str, **options: Any) -> Any:
        act(what.split("'")[1])
        return write(*arguments, what=what, **options)

    patch.setattr(write_changes, "write_generation", acting)


def run(world: World, session: Callable[[], Any] = lambda: None, **options: Any) -> Any:
    app = Application("shop")
    for table in TABLES:
        app.table(table)
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=2, key="k"))
    return run_application(world.lake, world.systems, app, session, run="r1", max_batches=0, **options)


def test_several_datasets_bootstrap_at_the_same_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=20)
    before_writing(monkeypatch, lambda name: together.wait())
    assert [report.action for report in run(world).datasets] == ["bootstrapped"] * 3


def test_one_session_is_started_for_all(world: World) -> None:
    started: list[str] = []

    def session() -> Any:
        if not started:
            time.sleep(0.2)
            started.append(threading.current_thread().name)

    run(world, session)
    assert len(started) == 1


def test_reports_come_in_order_of_declaration_whichever_is_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before_writing(monkeypatch, lambda name: time.sleep({"first": 0.5, "second": 0.2}.get(name, 0.0)))
    heard: list[str] = []
    done = run(world, on_event=lambda event: heard.append(event.dataset) if hasattr(event, "dataset") else None)
    assert heard == [report.dataset for report in done.datasets] == [*NAMES]


def test_one_that_fails_keeps_no_other_from_advancing_and_hides_no_other_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name == "first":
            time.sleep(0.2)
            raise DatasetError("first is broken.", "Mend it.")
        if name == "third":
            raise StoreUnavailableError("third has no store.", "Wait.")

    before_writing(monkeypatch, fail)
    heard: list[str] = []
    with pytest.raises(DatasetError, match=r"first is broken\.") as caught:
        run(world, on_event=lambda event: heard.append(event.dataset))
    assert caught.value.__notes__ == ["Also: third has no store. Wait."]
    assert heard == ["second"]
    assert "copy" not in world.streams.list_streams(), "no batch has begun"


def test_the_progress_of_each_bootstrap_is_heard(world: World) -> None:
    heard: list[str] = []
    run(world, on_stage=lambda event: heard.append(event.summary()) if event.stage == "bootstrap" else None)
    assert sorted(text.split(":")[0] for text in heard) == [f"dataset {name}" for name in sorted(NAMES)]
    assert all(text.endswith("100% (2 of 2 offsets)") for text in heard)

"""Independent datasets of one application advance at once, in threads of one session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, StoreUnavailableError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.acting import Acting
from tests.assets.conftest import World

COLUMNS = Schema.of(k="string", n="int")
NAMES = ("first", "second", "third")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"))
    for name in (*NAMES, "orders"):
        world.stream(name, COLUMNS, ["k"], 2)
        world.send(name, [("a", 1), ("b", 2)])
    return world


def run(
    world: World,
    before: Callable[[str], object] = lambda name: None,
    session: Any = IN_PROCESS,
    **options: Any,
) -> Any:
    """Run an application of three tables; `before` is called with the name of each before it is
    written.
    """
    app = Application("shop")
    for name in NAMES:
        acting = Acting(partial(before, name))
        app.table(
            unbounded_dataset(name, input=f"lake.{name}", key="k", partitions=2, changes=acting)
        )
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=2, key="k"))
    return run_application(
        app,
        lake=world.lake,
        systems=world.systems,
        spark=session,
        run="r1",
        max_batches=0,
        **options,
    )


def test_several_datasets_bootstrap_at_the_same_time(world: World) -> None:
    together = threading.Barrier(3, timeout=120)
    assert [report.action for report in run(world, lambda name: together.wait()).datasets] == [
        "bootstrapped"
    ] * 3


def test_the_session_is_asked_for_by_one_thread_at_a_time(world: World) -> None:
    asking = threading.Lock()

    def session() -> NoReturn:
        assert asking.acquire(blocking=False), "another thread is starting it"
        time.sleep(0.1)
        asking.release()
        raise ConfigurationError("there is no Java.", "Install it.")

    with pytest.raises(ConfigurationError) as caught:
        run(world, session=session)
    assert caught.value.__notes__ == ["Also: there is no Java. Install it."] * 2


@pytest.mark.lengthy
def test_reports_come_in_order_of_declaration_whichever_is_first(world: World) -> None:
    received: list[str] = []
    slow = {"first": 0.5, "second": 0.2}
    done = run(
        world,
        lambda name: time.sleep(slow.get(name, 0.0)),
        on_event=lambda event: (
            received.append(event.dataset) if hasattr(event, "dataset") else None
        ),
    )
    assert received == [report.dataset for report in done.datasets] == [*NAMES]


def test_one_that_fails_keeps_no_other_from_advancing_and_hides_no_other_error(
    world: World,
) -> None:
    def fail(name: str) -> None:
        if name == "first":
            time.sleep(0.2)
            raise DatasetError("first is broken.", "Mend it.")
        if name == "third":
            raise StoreUnavailableError("third has no store.", "Wait.")

    received: list[str] = []
    with pytest.raises(DatasetError, match=r"first is broken\.") as caught:
        run(
            world,
            fail,
            on_event=lambda event: (
                received.append(event.dataset) if hasattr(event, "dataset") else None
            ),
        )
    assert caught.value.__notes__ == ["Also: third has no store. Wait."]
    assert received == ["second"]
    assert "copy" not in world.streams.list_streams(), "no batch has begun"


def test_the_progress_of_each_bootstrap_is_received(world: World) -> None:
    received: list[str] = []
    run(
        world,
        on_stage=lambda event: (
            received.append(event.summary()) if event.stage == "bootstrap" else None
        ),
    )
    assert sorted(text.split(":")[0] for text in received) == [
        f"dataset {name}" for name in sorted(NAMES)
    ]
    assert all(text.endswith("100% (2 of 2 offsets)") for text in received)

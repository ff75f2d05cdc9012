"""Applications under a new name: refused where they would write all again, and renamed with all
that they have.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, RenamedNames
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.maintenance.repartition import repartition_stream
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import ApplicationBusyError, ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.startpoints import Startpoints
from dagster_adjunct.windows import Count, Tumbling
from tests.faulty_store import Crash, Fault, deaths
from tests.orchestration.cli.commands import document, printed
from tests.orchestration.offsets.offsets_world import OffsetsWorld, two_partitions
from tests.orchestration.offsets.test_lost_open_batches import S0, S1, dies_open, reader
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import StepWorld, crash_at

WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}
VISITS = {"shop": "string", "n": "int", "at": "timestamp"}


def shopping(world: StepWorld, name: str, default_offset: Any = "oldest") -> Application:
    """Count visits in every way that is remembered between batches."""
    store = SqliteTable(
        world.folder / "sums.sqlite",
        "sums",
        "shop",
        columns={"shop": "string", "n": "bigint"},
        create=True,
    )
    sums = RemoteTable(
        "sums", key="shop", read_function=store, write_function=store, idempotent=True
    )
    app = Application(name, max_batch_records=100)
    visits = app.input_stream("lake.visits", default_offset=default_offset, event_time="at")
    local = app.local_table(
        "last", key="shop", schema=Schema.of(shop="string", n="int"), partitions=2
    )
    out = app.output_stream("lake.out", partitions=2, key="shop")
    joined = visits.join(local, on="shop", how="left", select=["n as before"])
    joined.send_to(out)
    visits.select("shop", "n").send_to(local)
    visits.update(app.table(sums), add={"n": "n"}, if_missing={"n": "0"})
    visits.window(
        Tumbling(timedelta(seconds=10)), by="shop", name="tens", aggregates={"c": Count()}
    ).send_to(app.output_stream("lake.tens", partitions=2, key="shop"))
    return app


@pytest.fixture(autouse=True)
def no_wait_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here batches are committed without a lease, as if it had been deleted while a run lives."""
    monkeypatch.setattr(RunLease, "_wait_for_writes", lambda *_: None)


def world_in(folder: Path, spark: Any) -> StepWorld:
    folder.mkdir()
    world = StepWorld(open_lake(folder / "lake"), folder, lambda: spark)
    world.stream("visits", "shop", 2, **VISITS)
    return world


def send(world: StepWorld, *numbers: int) -> None:
    world.send("visits", *[(shop, number, at(number * 3)) for number in numbers for shop in "abc"])


def run(world: StepWorld, app: Application, **options: Any) -> StepReport:
    return run_application(
        app, lake=world.lake, systems=world.systems, spark=world.spark, run="a run", **options
    ).step


def twins(folder: Path, spark: Any) -> tuple[StepWorld, StepWorld]:
    """Return two lakes in which the same application, named "old", has run."""
    worlds = world_in(folder / "renamed", spark), world_in(folder / "kept", spark)
    for world in worlds:
        send(world, 1, 2, 3)
        run(world, shopping(world, "old"))
    return worlds


def everything(world: StepWorld) -> dict[str, Any]:
    """Return all that the outputs hold."""
    rows = {
        stream: sorted(
            (row["shop"], *(str(value) for name, value in row.items() if name != "shop"))
            for row in there
        )
        for stream in ("out", "tens")
        for there in [world.rows(stream)]
    }
    with sqlite3.connect(world.folder / "sums.sqlite") as connection:
        sums = dict(connection.execute("SELECT shop, n FROM sums").fetchall())
    return {
        **rows,
        "sums": sums,
        "last": {shop: row["n"] for shop, row in open_dataset(world.lake, "last").items()},
    }


@pytest.mark.spark
def test_a_renamed_application_goes_on_as_if_it_had_its_name_of_before(
    tmp_path: Path, spark: Any
) -> None:
    renamed, kept = twins(tmp_path, spark)
    module = ModuleType("shops")
    module.app = shopping(renamed, "new")  # type: ignore[attr-defined]
    sys.modules["shops"] = module
    before = everything(renamed)
    with pytest.raises(ConfigurationError) as refused:
        run(renamed, shopping(renamed, "new"))
    assert (refused.value.application, refused.value.stream) == ("new", "lake.visits")
    assert "adjunct app rename old new" in refused.value.next_step
    assert everything(renamed) == before
    notes = document(renamed, "plan", "shops:app")["notes"]
    assert [note for note in notes if "'old' has written lake.out, sums from lake.visits" in note]

    rename = ("app", "rename", "old", "new", "--reason", "a better name")
    planned = document(renamed, *rename, "--dry-run")
    assert (planned["dry_run"], planned["batches"], planned["local_tables"]) == (True, 1, ["last"])
    printed(renamed, *rename, code=1)  # it asks, and nobody says yes
    run(renamed, shopping(renamed, "old"))
    assert everything(renamed) == before, "nothing has changed yet"
    printed(renamed, *rename, "--yes")
    assert not [note for note in document(renamed, "plan", "shops:app")["notes"] if "'old'" in note]
    module.app = shopping(renamed, "old")  # type: ignore[attr-defined]
    assert [
        note
        for note in document(renamed, "plan", "shops:app")["notes"]
        if "'old' was renamed 'new'" in note
    ]
    del sys.modules["shops"]
    report = run(renamed, shopping(renamed, "new"))
    assert (report.batches, [*report.event_time.state_sizes]) == (0, ["old-tens"]), (
        "state tables keep the name"
    )
    for world, name in ((renamed, "new"), (kept, "old")):
        send(world, 4, 5, 9)
        run(world, shopping(world, name))
    assert everything(renamed) == everything(kept) != before


@pytest.mark.spark
@pytest.mark.long
def test_batches_and_replays_of_a_renamed_application_are_repeated_as_ever(
    tmp_path: Path, spark: Any
) -> None:
    renamed, kept = twins(tmp_path, spark)
    rename_application(renamed.lake, "old", "new", **WHO)
    for world, name in ((renamed, "new"), (kept, "old")):
        send(world, 12)
        with pytest.raises(Crash):
            run(world, shopping(world, name), on_event=crash_at("outputs"))
        run(world, shopping(world, name))
        latest = Startpoints(shopping(world, name), lake=world.lake)
        latest.request("lake.visits", StartpointSpecific(offset="2"), **WHO)
        run(world, shopping(world, name))
    assert everything(renamed) == everything(kept)


@pytest.mark.spark
def test_the_name_of_before_runs_no_more_and_takes_no_startpoints(
    tmp_path: Path, spark: Any
) -> None:
    world = world_in(tmp_path / "world", spark)
    send(world, 1)
    run(world, shopping(world, "old"))
    rename_application(world.lake, "old", "new", **WHO)
    send(world, 2)
    for again in (
        lambda: run(world, shopping(world, "old")),
        lambda: run(world, shopping(world, "old"), adopt=True),
        lambda: Startpoints(shopping(world, "old"), lake=world.lake).request(
            "lake.visits", StartpointOldest(), **WHO
        ),
    ):
        with pytest.raises(ConfigurationError) as refused:
            again()
        assert refused.value.application == "old"
        assert "'new'" in refused.value.problem


@pytest.mark.spark
@pytest.mark.parametrize("how", ["adopt", "startpoints"])
def test_a_second_application_begins_where_it_is_declared_to(
    tmp_path: Path, spark: Any, how: str
) -> None:
    world = world_in(tmp_path / "world", spark)

    def copying(name: str) -> Application:
        app = Application(name)
        visits = app.input_stream("lake.visits", default_offset="oldest")
        visits.select("shop", "n").send_to(
            app.output_stream("lake.copied", partitions=2, key="shop")
        )
        return app

    send(world, 1)
    run(world, copying("one"))
    with pytest.raises(ConfigurationError):
        run(world, copying("two"))
    if how == "startpoints":
        startpoints = Startpoints(copying("two"), lake=world.lake)
        startpoints.request("lake.visits.0", StartpointUpcoming(), **WHO)
        with pytest.raises(ConfigurationError):
            run(world, copying("two"))
        startpoints.request("lake.visits.1", StartpointUpcoming(), **WHO)
    run(world, copying("two"), adopt=how == "adopt")
    assert len(world.rows("copied")) == (6 if how == "adopt" else 3)
    send(world, 2)
    run(world, copying("two"))
    assert len(world.rows("copied")) == (9 if how == "adopt" else 6)


@pytest.mark.spark
def test_another_application_with_other_inputs_or_outputs_runs_as_ever(
    tmp_path: Path, spark: Any
) -> None:
    world = world_in(tmp_path / "world", spark)
    world.stream("others", "shop", 2, **VISITS)

    def copying(name: str, source: str, target: str) -> Application:
        app = Application(name)
        visits = app.input_stream(f"lake.{source}", default_offset="oldest")
        visits.select("shop", "n").send_to(
            app.output_stream(f"lake.{target}", partitions=2, key="shop")
        )
        return app

    send(world, 1)
    world.send("others", ("a", 1, at(1)))
    run(world, copying("one", "visits", "copied"))
    assert run(world, copying("two", "others", "copied")).batches == 1
    assert run(world, copying("three", "visits", "elsewhere")).batches == 1
    assert len(world.rows("copied")) == 4


# -- what is carried over, without Spark


def test_checkpoints_history_startpoints_and_epochs_are_carried_over() -> None:
    world, old, new = two_partitions(), reader(name="old"), reader(name="new")
    world.run(old)
    world.ask(old, "fake.s.0", StartpointOldest)
    world.run(old)
    world.fake.write("s", 1, 4)
    asked = [
        world.ask(old, "fake.s.0", StartpointSpecific, offset="@1"),
        world.ask(old, "fake.s.1", StartpointOldest),
    ]
    before, history = (
        world.state(old),
        [change.number for change in CheckpointManager(world.lake, old).history()],
    )
    report = rename_application(world.lake, "old", "new", **WHO)
    assert (report.batches, report.local_tables) == (2, ())
    after = world.state(new)
    assert after.model_copy(update={"names": RenamedNames(), "note": before.note}) == before
    assert after.names.writes_as == "old"
    carried = [change.number for change in CheckpointManager(world.lake, new).history()]
    assert carried[-len(history) :] == history
    assert sorted(request.id for request in world.startpoints(new).read().waiting) == sorted(asked)
    again = world.ask(new, "fake.s.0", StartpointSpecific, offset="@2")
    (batch,) = world.delivered(new)
    assert (batch.number, batch.read()) == (3, {S0: ("@2", "@3"), S1: ("@0", "@4")})
    assert world.state(new).offsets.applied[S0].id == again, "the one that was asked for last"
    assert world.state(new).offsets.epochs.main == {S0: 2, S1: 1}


def test_startpoints_that_were_carried_over_no_longer_wait_under_the_old_name(
    tmp_path: Path,
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("in", schema=Schema.of(k="string"), key=["k"], partitions=2)
    streams.append("in", [{"k": "a"}], producer="p", sequence=0)

    def named(name: str) -> Application:
        app = Application(name, engine="auto")
        app.input_stream("lake.in").send_to(app.output_stream("lake.out", partitions=2, key="k"))
        return app

    def run_in_process(name: str) -> None:
        run_application(named(name), lake=lake, spark=IN_PROCESS)

    run_in_process("old")
    Startpoints(named("old"), lake=lake).request("lake.in.0-1", StartpointOldest(), **WHO)
    rename_application(lake, "old", "new", **WHO)
    assert len(Startpoints(named("new"), lake=lake).list()["waiting"]) == 2
    run_in_process("new")
    assert len(streams.read_arrow(streams.all_ranges("out"))) == 2, "it was read again"
    assert repartition_stream(lake, "in", 3, **WHO).carried == ("new",)


def test_the_checkpoint_of_the_name_of_before_is_refused_with_the_name_of_now() -> None:
    world, old = two_partitions(), reader(name="old")
    world.run(old)
    rename_application(world.lake, "old", "new", **WHO)
    for named in ("old", old):
        manager = CheckpointManager(world.lake, named)
        asked: tuple[Callable[[], object], ...] = (
            manager.read_last_checkpoint,
            lambda manager=manager: [*manager.history()],
            lambda manager=manager: manager.abandon(**WHO),
        )
        for ask in asked:
            with pytest.raises(ConfigurationError, match="'new'"):
                ask()
    last = CheckpointManager(world.lake, "new").read_last_checkpoint()
    assert last is not None
    assert last.offsets == {S0: "@3", S1: "@3"}


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_rename_that_dies_at_any_request_is_repeated_and_nobody_starts_afresh() -> None:
    def prepared() -> OffsetsWorld:
        world, old = two_partitions(), reader(name="old")
        world.run(old)
        world.ask(old, "fake.s.0", StartpointSpecific, offset="@1")
        return world

    whole = prepared()
    lake = whole.faulty([])
    rename_application(lake, "old", "new", **WHO)
    for nth in deaths(lake.store.requests):  # type: ignore[attr-defined]
        world = prepared()
        with pytest.raises(Crash):
            rename_application(world.faulty([Fault("*", nth, "crash-before")]), "old", "new", **WHO)
        for _ in range(2):
            assert rename_application(world.lake, "old", "new", **WHO).batches == 1
        assert (
            world.state(reader(name="new")).checkpoint == whole.state(reader(name="new")).checkpoint
        )
        assert world.state(reader(name="old")).names.renamed_to == "new"
        assert world.reads(reader(name="new")) == [{S0: ("@1", "@3")}]


def test_a_renaming_that_would_lose_something_is_refused_and_changes_nothing() -> None:
    world = two_partitions()
    world.run(reader(name="other"))
    dies_open(world, reader(name="old"))
    for old, new, application in (
        ("nobody", "new", "nobody"),
        ("old", "new", "old"),  # its batch is open
        ("other", "old", "other"),
        ("other", "other", "other"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            rename_application(world.lake, old, new, **WHO)
        assert refused.value.application == application
    with pytest.raises(ConfigurationError) as refused:
        rename_application(world.lake, "other", "new", reason=" ", by="ada")
    assert refused.value.argument == "reason"
    assert world.state(reader(name="other")).names.renamed_to is None
    assert BatchLog(world.lake, "new").read().commit is None


def test_an_application_that_runs_is_not_renamed() -> None:
    world = two_partitions()
    world.run(reader(name="old"))
    with RunLease(world.lake, "old", "run", Claim()), pytest.raises(ApplicationBusyError):
        rename_application(world.lake, "old", "new", **WHO)
    assert world.state(reader(name="old")).names.renamed_to is None

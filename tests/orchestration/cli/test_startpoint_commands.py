"""`adjunct startpoint …` and `adjunct checkpoint …`: what they do, what they print, and what
they refuse.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.faulty_store import Crash
from tests.orchestration.cli.commands import document, invoke, printed, refused
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld, ssp

WHY = ["--reason", "ticket 7", "--by", "ada"]
DAY = datetime(2026, 1, 1, tzinfo=UTC)
HOURS = 24


@pytest.fixture
def app() -> Application:
    app = Application("order-totals", max_batch_records=1000)
    app.input_stream("lake.orders", default_offset="oldest")
    return app


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: Application) -> OffsetsWorld:
    """Stream lake.orders with a record each hour of a day, in 4 partitions; one run has read
    them. No Spark.
    """
    module = ModuleType("shop")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", module)
    world = OffsetsWorld(lake=open_lake(tmp_path / "lake"))
    world.stream("orders", 4)
    times = [DAY + timedelta(hours=hour) for hour in range(HOURS)]
    orders = pa.table(
        {"k": pa.array(range(HOURS)), "at": pa.array(times, pa.timestamp("us", tz="UTC"))}
    )
    world.systems()["lake"].append("orders", orders, producer="shop", sequence=1)
    world.run(app)
    return world


def ask(*arguments: str) -> list[str]:
    return ["startpoint", "set", "shop:app", *arguments, *WHY]


def listed(world: OffsetsWorld) -> dict[str, list[str]]:
    """Return the partitions of everything that `startpoint list` lists."""
    facts = document(world, "startpoint", "list", "shop:app")
    return {what: sorted(row["partition"] for row in rows) for what, rows in facts.items() if rows}


def first_since(world: OffsetsWorld, moment: datetime) -> dict[str, int]:
    """Return, by partition, the offset of the first record at or after a time: from the records
    themselves.
    """
    streams: Any = world.systems()["lake"]
    records = streams.read_arrow(streams.all_ranges("orders")).to_pylist()
    late = [record for record in records if record["__timestamp"] >= moment]
    return {
        f"lake.orders.{number}": min(
            record["__offset"] for record in late if record["__partition"] == number
        )
        for number in {record["__partition"] for record in late}
    }


def die(batch: Batch) -> None:
    raise Crash


def crash_in_a_batch(world: OffsetsWorld, app: Application) -> None:
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    world.output.before = lambda batch: None


# -- set


def test_two_partitions_are_replayed_from_a_time_and_from_exactly_there(
    world: OffsetsWorld, app: Application
) -> None:
    expected = first_since(world, DAY + timedelta(hours=10))
    asked = document(world, *ask("lake.orders.1,3", "--timestamp", "2026-01-01T10:00Z"))
    starts = {partition["partition"]: partition["start"] for partition in asked["partitions"]}
    assert starts == {name: str(expected[name]) for name in ("lake.orders.1", "lake.orders.3")}
    assert "the sensor order_totals_startpoints" in asked["next"]
    assert "adjunct run shop:app" in asked["next"]
    (batch,) = world.delivered(app)
    assert {str(ssp): start for ssp, (start, _) in batch.read().items()} == starts
    assert world.delivered(app) == []


def test_a_change_without_a_reason_is_refused_in_a_dry_run_too(world: OffsetsWorld) -> None:
    for more in ([], ["--dry-run"]):
        assert "--reason is empty" in refused(
            world, *ask("lake.orders", "--oldest", *more), "--reason", " "
        )
    assert listed(world) == {}


def test_a_dry_run_reports_tasks_offsets_and_records_and_writes_nothing(
    world: OffsetsWorld,
) -> None:
    text = printed(world, *ask("lake.orders", "--oldest", "--dry-run"))
    ends = document(world, "checkpoint", "show", "order-totals")["offsets"]
    for number in range(4):
        end = ends[f"lake.orders.{number}"]
        cells = [
            cell.strip()
            for cell in text.split(f"lake.orders.{number} ")[1].splitlines()[0].split("│")
        ]
        assert cells[1:4] == [f"Partition {number}", end, "0"]
        assert cells[4:6] == [end, f"goes back by {end}" if end != "0" else "stays where it is"]
    assert "nothing was written" in text
    assert listed(world) == {}


def test_the_time_that_a_date_means_is_shown(world: OffsetsWorld) -> None:
    text = printed(world, *ask("lake.orders.0", "--timestamp", "2026-01-01", "--dry-run"))
    assert "would be requested: timestamp 2026-01-01T00:00:00+00:00" in text


def test_a_bounded_replay_reads_its_part_again_and_the_position_stays(
    world: OffsetsWorld, app: Application
) -> None:
    before = document(world, "checkpoint", "show", "order-totals")["offsets"]
    text = printed(world, *ask("lake.orders.0", "--offset", "1", "--until-offset", "3"))
    assert "the position stays" in text
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.main, batch.epochs) == (
        {ssp("lake.orders.0"): ("1", "3")},
        False,
        {ssp("lake.orders.0"): 1},
    )
    assert document(world, "checkpoint", "show", "order-totals")["offsets"] == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["lake.orders.0"], "no position is given"),
        (["lake.orders.0", "--oldest", "--offset", "0"], "--oldest and --offset are given"),
        (
            ["lake.orders.0", "--oldest", "--until-offset", "1", "--until-upcoming"],
            "--until-upcoming and --until-",
        ),
        (["lake.orders.0", "--timestamp", "2026-01-01T10:00"], "names no zone"),
        (
            ["lake.orders.0", "--timestamp", "0001-01-01T00:00+14:00"],
            "is outside the years 1 to 9999",
        ),
        (["lake.orders.7", "--oldest"], "names partition 7"),
        (["lake.sales", "--oldest"], "does not read lake.sales"),
        (["lake.orders.0", "--offset", "9000"], "9000 is not on the stream"),
        (["lake.orders.0", "--oldest", "--task", "Partition 3"], "does not read lake.orders.0"),
        (["lake.orders.0", "--offset", "3", "--until-offset", "1"], "would end before it begins"),
    ],
)
def test_what_can_not_be_followed_is_refused_at_once(
    world: OffsetsWorld, arguments: list[str], why: str
) -> None:
    assert why in refused(world, *ask(*arguments))
    assert listed(world) == {}


def test_a_request_says_what_it_replaces(world: OffsetsWorld) -> None:
    printed(world, *ask("lake.orders.0", "--oldest"))
    assert "replaced: lake.orders.0: oldest, waiting (ada: ticket 7)" in printed(
        world, *ask("lake.orders", "--upcoming")
    )
    assert "or replace it with --replace" in refused(
        world, *ask("lake.orders.0", "--oldest", "--until-upcoming")
    )
    again = printed(world, *ask("lake.orders.0", "--oldest", "--until-upcoming", "--replace"))
    assert "replaced: lake.orders.0: upcoming, waiting" in again


# -- list and clear


@pytest.mark.lengthy
def test_a_startpoint_is_listed_from_its_request_to_its_end(
    world: OffsetsWorld, app: Application
) -> None:
    assert "no startpoint waits, and none was applied" in printed(
        world, "startpoint", "list", "shop:app"
    )
    app.max_batch_records = 2
    printed(world, *ask("lake.orders.0", "--oldest"))
    printed(world, *ask("lake.orders.1", "--oldest", "--until-upcoming"))
    assert listed(world) == {"waiting": ["lake.orders.0", "lake.orders.1"]}
    (first, _) = document(world, "startpoint", "list", "shop:app")["waiting"]
    assert (first["by"], first["reason"], first["position"]) == ("ada", "ticket 7", "oldest")
    assert first["expires_in"].startswith("11:5")
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    facts = document(world, "startpoint", "list", "shop:app")
    assert [
        (startpoint["partition"], startpoint["task"], startpoint["offset"])
        for startpoint in facts["handed"]
    ] == [("lake.orders.0", "Partition 0", "0")]
    world.output.before = lambda batch: None
    world.run(app, max_batches=1)
    (replay,) = document(world, "startpoint", "list", "shop:app")["replays"]
    end = int(replay["until"])
    assert (replay["next"], replay["left"], replay["per_cent"]) == ("2", end - 2, 200 // end)
    assert "bounded replays in progress" in printed(world, "startpoint", "list", "shop:app")
    world.run(app)
    assert listed(world) == {"applied": ["lake.orders.0"]}
    (applied,) = document(world, "startpoint", "list", "shop:app")["applied"]
    assert (applied["epoch"], applied["offset"], applied["by"]) == (1, "0", "ada")
    assert "applied last" in printed(world, "startpoint", "list", "shop:app")


def test_clear_takes_back_what_is_not_applied_and_says_what_is(
    world: OffsetsWorld, app: Application
) -> None:
    app.max_batch_records = 2
    printed(world, *ask("lake.orders.0", "--oldest", "--until-upcoming"))
    world.run(app, max_batches=1)
    printed(world, *ask("lake.orders.1", "--oldest"))
    text = printed(world, "startpoint", "clear", "shop:app", "lake.orders", *WHY)
    assert "taken back: lake.orders.1: oldest, waiting (ada: ticket 7)" in text
    assert "stopped: lake.orders.0: the replay from oldest (ada: ticket 7) at offset 2" in text
    assert "not removed: lake.orders.2: there is no request" in text
    assert world.delivered(app) == []
    assert "replays cancelled: ticket 7" in printed(world, "checkpoint", "history", "order-totals")
    assert "nothing to remove" in printed(world, "startpoint", "clear", "shop:app", "--all", *WHY)


def test_clear_wants_to_know_what(world: OffsetsWorld) -> None:
    assert "neither PARTITIONs nor --all" in refused(world, "startpoint", "clear", "shop:app", *WHY)
    assert "both given" in refused(
        world, "startpoint", "clear", "shop:app", "lake.orders", "--all", *WHY
    )
    assert invoke(world, "startpoint", "clear", "shop:app", "--all").exit_code == 2  # no reason


# -- checkpoint


def test_a_checkpoint_is_displayed_by_name_and_with_the_streams_ends_by_application(
    world: OffsetsWorld, app: Application
) -> None:
    world.send("orders", 0, 0, 0)
    displayed = document(world, "checkpoint", "show", "shop:app")
    assert sum(displayed["behind"].values()) == 3
    by_name = document(world, "checkpoint", "show", "order-totals")
    assert (by_name["batch"], by_name["by"]) == (1, "run-1")
    assert sum(map(int, by_name["offsets"].values())) == HOURS
    assert "offsets behind" in printed(world, "checkpoint", "show", "shop:app")
    assert "offsets behind" not in printed(world, "checkpoint", "show", "order-totals")


def test_history_reports_who_moved_what_from_where_to_where(
    world: OffsetsWorld, app: Application
) -> None:
    end = document(world, "checkpoint", "show", "order-totals")["offsets"]["lake.orders.2"]
    printed(world, *ask("lake.orders.2", "--offset", "1"))
    world.run(app)
    text = printed(world, "checkpoint", "history", "order-totals", "lake.orders.2")
    assert f"lake.orders.2: {end} -> 1 -> {end}" in text
    assert "offset 1 applied, epoch 1 (ada: ticket 7)" in text
    assert "lake.orders.3" not in text
    newest, *_ = document(world, "checkpoint", "history", "order-totals", "--limit", "1")
    assert (newest["batch"], newest["by"], list(newest["applied"])) == (
        2,
        "run-2",
        ["lake.orders.2"],
    )
    assert "never read lake.orders.9" in refused(
        world, "checkpoint", "history", "order-totals", "lake.orders.9"
    )


def test_a_history_without_changes_is_not_about_a_partition(
    world: OffsetsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointManager, "history", lambda *given: iter(()))
    assert "None" not in refused(world, "checkpoint", "history", "order-totals")


def test_an_application_that_is_not_there_is_reported_with_those_that_are(
    world: OffsetsWorld,
) -> None:
    for command in (["show", "sales"], ["history", "sales"], ["abandon", "sales", *WHY]):
        assert "there are: order-totals" in refused(world, "checkpoint", *command)


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_is_abandoned_after_its_meaning_was_explained(
    world: OffsetsWorld, app: Application, skip: bool
) -> None:
    assert "has no open batch" in refused(
        world, "checkpoint", "abandon", "order-totals", "--yes", *WHY
    )
    end = document(world, "checkpoint", "show", "order-totals")["offsets"]["lake.orders.0"]
    world.send("orders", *range(HOURS))
    crash_in_a_batch(world, app)
    assert "Open: batch 2 of 4 partitions, begun by run-2" in printed(
        world, "checkpoint", "show", "order-totals"
    )
    command = ["checkpoint", "abandon", "order-totals", *WHY, *(["--skip"] if skip else [])]
    asked = invoke(world, *command, input="n\n")
    assert f"lake.orders.0: offsets {end} to" in asked.output
    assert ("never get them" if skip else "gets them twice") in asked.output
    assert world.state(app).open is not None
    assert "the next run" in printed(world, *command, "--yes")
    assert (
        "batch 2 skipped"
        if skip
        else "batch 2 abandoned" in printed(world, "checkpoint", "history", "order-totals")
    )
    batches = world.delivered(app)
    assert [batch.number for batch in batches] == ([] if skip else [3])


def test_abandoning_a_batch_tells_which_of_its_records_a_startpoint_passes_over(
    world: OffsetsWorld, app: Application
) -> None:
    ends = document(world, "checkpoint", "show", "order-totals")["offsets"]
    world.send("orders", *range(HOURS))
    crash_in_a_batch(world, app)
    starts = {name: int(end) for name, end in ends.items()}
    requested = document(
        world,
        *("startpoint", "set", "shop:app", "lake.orders.0", *WHY),
        *("--offset", str(starts["lake.orders.0"] + 2)),
    )
    assert requested["partitions"][0]["passed_over"] == 2
    assert requested["partitions"][0]["open_batch"] == 2
    document(world, "startpoint", "set", "shop:app", "lake.orders.1", "--upcoming", *WHY)
    document(world, "startpoint", "set", "shop:app", "lake.orders.2", "--oldest", *WHY)
    command = ("checkpoint", "abandon", "order-totals", *WHY)
    clear = "adjunct startpoint clear MODULE:APP lake.orders.{}"
    before = invoke(world, *command, input="n\n").output
    assert clear.format(0) in before
    assert clear.format(1) in before
    assert clear.format(2) not in before
    abandoned = document(world, *command, "--yes")
    (batch,) = world.delivered(app)
    read = {str(ssp): int(start) for ssp, (start, _) in batch.read().items()}
    read["lake.orders.1"] = int(world.state(app).checkpoint[ssp("lake.orders.1")])
    assert abandoned["passed_over"] == {
        name: read[name] - starts[name] for name in ("lake.orders.0", "lake.orders.1")
    }
    assert abandoned["passed_over"]["lake.orders.0"] == 2


# -- streams of datasets


@pytest.fixture
def rates(world: OffsetsWorld, app: Application) -> None:
    """Dataset rates, of stream lake.rates with 2 partitions, has taken in 8 changes."""
    dataset = unbounded_dataset("rates", input="lake.rates", key="k", partitions=2)
    app.table(dataset)
    world.stream("rates", 2)
    world.send("rates", *range(8))
    advance_dataset(dataset, lake=world.lake, systems=world.systems(), spark=IN_PROCESS, by="test")


@pytest.mark.usefixtures("rates")
def test_a_startpoint_on_a_datasets_stream_is_for_the_dataset(world: OffsetsWorld) -> None:
    asked = document(world, *ask("lake.rates.0", "--offset", "1"))["partitions"]
    taken = int(asked[0]["checkpoint"])
    assert [
        (partition["tasks"], partition["start"], partition["moved"]) for partition in asked
    ] == [(["dataset rates"], "1", 1 - taken)]
    assert listed(world) == {"waiting": ["lake.rates.0"]}
    whole = document(world, *ask("lake.rates", "--oldest", "--dry-run"))
    assert sum(partition["offsets"] for partition in whole["partitions"]) == 8
    assert len(whole["replaced"]) == 1


@pytest.mark.usefixtures("rates")
def test_what_would_leave_gaps_in_a_table_is_refused_without_force(world: OffsetsWorld) -> None:
    assert "it would skip the changes in between" in refused(
        world, *ask("lake.rates.1", "--upcoming")
    )
    assert "can't be replayed" in refused(
        world, *ask("lake.rates", "--oldest", "--until-offset", "1")
    )
    fallen = ["--upcoming", "--on-unresolved", "checkpoint"]
    assert "it would skip the changes in between" in refused(world, *ask("lake.rates.1", *fallen))
    assert listed(world) == {}
    printed(world, *ask("lake.rates.1", "--upcoming", "--force"))
    assert listed(world) == {"waiting": ["lake.rates.1"]}


# -- switched off


def test_where_startpoints_are_switched_off_they_are_refused_listed_and_taken_back(
    world: OffsetsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(world, *ask("lake.orders.1", "--oldest"))
    off = Application("order-totals", startpoints=False)
    off.input_stream("lake.orders", default_offset="oldest")
    monkeypatch.setattr(sys.modules["shop"], "app", off)
    for more in ([], ["--dry-run"]):
        assert "disabled (startpoints=False)" in refused(
            world, *ask("lake.orders.0", "--oldest", *more)
        )
    assert "are switched off (startpoints=False): runs ignore these" in printed(
        world, "startpoint", "list", "shop:app"
    )
    assert document(world, "startpoint", "list", "shop:app")["switched_off"] is True
    assert "taken back: lake.orders.1" in printed(
        world, "startpoint", "clear", "shop:app", "--all", *WHY
    )

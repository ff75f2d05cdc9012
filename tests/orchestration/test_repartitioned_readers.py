"""A stream is rewritten into other partitions under those who read it: who goes on where, and
who is refused.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    OffsetState,
    OpenedEpochs,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.maintenance.repartition import repartition_stream
from dagster_adjunct.orchestration.startpoints.positions import carry_over_stream
from dagster_adjunct.orchestration.startpoints.request import Target
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.startpoints.store import FAN_OUTS, settled_key
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    PlanningError,
    StillReadError,
)
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.lake.readers import NewRecords, read_new
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.step_world import StepWorld
from tests.orchestration.test_deleting import sent, values

WHY = {"reason": "more machines", "by": "ada"}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def at(
    lake: Lake,
    offsets: list[str],
    *,
    application: str = "app",
    open_over: str = "",
    epochs: int = 0,
) -> None:
    """Let an application stand at these offsets of lake.s."""
    log = BatchLog(lake, application)
    identity = LakeStreams(lake).info("s").identity
    assert identity is not None
    main = {"lake.s.1": epochs} if epochs else {}
    known = OffsetState(streams={"lake.s": identity}, epochs=OpenedEpochs(main=main))
    checkpoint = {f"lake.s.{p}": offset for p, offset in enumerate(offsets)} | {"lake.other.0": "5"}
    logged = log.commit(
        log.read(), ApplicationState(checkpoint=checkpoint, offsets=known), by="run"
    )
    if open_over:
        intent = Intent(
            batch=1,
            run="run",
            clock=datetime.now(UTC),
            ranges={open_over: OffsetRange(start="0", end="1")},
        )
        log.open(logged, intent)


def ends(streams: LakeStreams) -> list[str]:
    return list(streams.upcoming(streams.partitions("s")).values())


def texts(checkpoint: dict[SystemStreamPartition, str]) -> dict[str, str]:
    return {str(ssp): offset for ssp, offset in checkpoint.items()}


def test_an_application_that_has_read_all_goes_on_in_the_new_partitions(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    at(lake, ends(streams), epochs=3)
    planned = repartition_stream(lake, "s", 5, dry_run=True, **WHY)
    assert (planned.carried, planned.affected, planned.blocking, planned.rows) == (
        ("app",),
        (),
        (),
        9,
    )
    assert streams.info("s").partitions == 2
    report = repartition_stream(lake, "s", 5, **WHY)
    assert report.carried == ("app",)
    state = BatchLog(lake, "app").read()[1]
    assert texts(state.checkpoint) == {"lake.other.0": "5"} | {
        f"lake.s.{p}": end for p, end in enumerate(ends(streams))
    }
    assert state.note == "lake.s was repartitioned into 5: continues where it had read to"
    assert state.offsets.streams == {"lake.s": streams.info("s").identity}
    assert set(state.offsets.epochs.main.values()) == {3}
    assert len(state.offsets.epochs.main) == 5
    assert values(streams) == list(range(9))
    assert repartition_stream(lake, "s", 2, **WHY).carried == ("app",), "and once more"


def test_a_dry_run_refuses_what_the_command_would_refuse(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    for partitions in (0, 2, 10**20):
        with pytest.raises(ConfigurationError) as caught:
            repartition_stream(lake, "s", partitions, dry_run=True, **WHY)
        assert caught.value.argument == "partitions"
    streams.append_markers("s", "v1", producer="m", sequence=0, partitions=[0])
    for dry_run in (True, False):
        with pytest.raises(ConfigurationError) as caught:
            repartition_stream(lake, "s", 3, dry_run=dry_run, **WHY)
        assert caught.value.stream == "lake.s"


def test_one_that_is_carried_over_by_its_own_next_run_needs_no_command(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    at(lake, ends(streams))
    # The command dies when the stream is rewritten and no application was told.
    store = FaultyStore(lake.store, [Fault("put_if_match", 1, "crash-after")])
    with pytest.raises(Crash):
        repartition_stream(Lake(store, lake.id), "s", 5, **WHY)
    state = BatchLog(lake, "app").read()[1]
    assert "lake.s.4" not in texts(state.checkpoint)
    after = carry_over_stream(state, "lake.s", streams.info("s"))
    assert after is not None
    assert [texts(after.checkpoint)[f"lake.s.{p}"] for p in range(5)] == ends(streams)
    assert carry_over_stream(after, "lake.s", streams.info("s")) is None
    behind = state.model_copy(
        update={"checkpoint": state.checkpoint | {SystemStreamPartition("lake", "s", 0): "0"}}
    )
    assert carry_over_stream(behind, "lake.s", streams.info("s")) is None


def test_who_has_not_read_all_or_is_at_it_refuses_the_rewriting(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    at(lake, ["0", ends(streams)[1]])
    with pytest.raises(StillReadError) as failure:
        repartition_stream(lake, "s", 5, **WHY)
    assert failure.value.stream == "lake.s"
    at(lake, ends(streams), open_over="lake.s.0")
    for force in (False, True):
        with pytest.raises(StillReadError) as failure:
            repartition_stream(lake, "s", 5, force=force, **WHY)
        assert failure.value.stream == "lake.s"
    assert streams.info("s").partitions == 2
    with pytest.raises(ConfigurationError) as failure:
        repartition_stream(lake, "s", 5, reason="", by="ada")
    assert failure.value.stream == "lake.s"
    assert failure.value.argument == "reason"


def test_what_comes_between_the_look_and_the_commit_is_seen(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    at(lake, ends(streams))
    pointer = Fault("put_if_match", 1, "meanwhile", lambda: sent(streams, 99, sequence=2))
    with pytest.raises(StillReadError) as failure:
        repartition_stream(Lake(FaultyStore(lake.store, [pointer]), lake.id), "s", 5, **WHY)
    assert failure.value.stream == "lake.s"
    assert (streams.info("s").partitions, values(streams)) == (2, [*range(9), 99])


def test_a_named_reader_that_is_behind_is_reported(lake: Lake) -> None:
    sent(LakeStreams(lake), *range(9))
    with read_new(lake, "s", reader="me", max_records=3) as new:
        new.commit()
    with pytest.raises(StillReadError) as failure:
        repartition_stream(lake, "s", 5, **WHY)
    assert failure.value.stream == "lake.s"
    assert repartition_stream(lake, "s", 5, force=True, **WHY).affected == (
        "reader me has not read all of it",
    )


def test_the_command_says_what_it_did(lake: Lake) -> None:
    sent(LakeStreams(lake), *range(9))
    at(lake, ends(LakeStreams(lake)))
    words = [
        "stream",
        "repartition",
        "s",
        "--partitions",
        "3",
        "--reason",
        "x",
        "--by",
        "ada",
        "--lake",
        lake.url,
    ]
    dry = CliRunner().invoke(root, [*words, "--dry-run"])
    assert "9 records would be rewritten from 2 into 3 partitions" in dry.stdout
    done = CliRunner().invoke(root, words)
    assert "application app continues at its position" in done.stdout
    again = CliRunner().invoke(root, [*words[:4], "4", *words[5:], "--json"])
    assert json.loads(again.stdout)["carried"] == ["app"]


@pytest.mark.spark
def test_a_run_reads_what_came_after_and_nothing_twice(step_world: StepWorld) -> None:
    def app(partitions: int) -> Application:
        made = Application("app")
        stream = made.input_stream("lake.s")
        stream.send_to(made.output_stream("lake.out", partitions=partitions, key="k"))
        return made

    step_world.stream("s", "k", 2, k="string", v="int")
    step_world.send("s", *[(f"k{i}", i) for i in range(9)])
    step_world.run(app(2))
    lake = step_world.lake
    repartition_stream(lake, "s", 5, **WHY)
    step_world.send("s", ("k1", 100))
    step_world.run(app(2))
    repartition_stream(lake, "out", 3, **WHY)
    with pytest.raises(
        PlanningError, match=r"exists with 3 partitions .* adjunct stream repartition out"
    ):
        step_world.run(app(2))
    step_world.send("s", ("k2", 101))
    # This time nobody carries its position over but the run itself; then a run stands behind, and
    # is refused.
    before = BatchLog(lake, "app").read()
    step_world.run(app(3))
    assert sorted(row["v"] for row in step_world.rows("out")) == [*range(9), 100, 101]
    step_world.send("s", ("k3", 102))
    repartition_stream(lake, "s", 4, force=True, **WHY)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"lake\.s was repartitioned into 4 .*startpoint set"
    ):
        step_world.run(app(3))
    assert before[1].open is None


def test_a_startpoint_that_waits_is_not_followed_among_other_records(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    at(lake, ends(streams))
    app = Application("app")
    app.input_stream("lake.s").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    Startpoints(app, lake=lake).request("lake.s.1", StartpointSpecific(offset="2"), **WHY)
    for force in (False, True):
        with pytest.raises(StillReadError) as failure:
            repartition_stream(lake, "s", 5, force=force, **WHY)
        assert failure.value.stream == "lake.s"
    Startpoints(app, lake=lake).clear(**WHY)
    # What a run remembers of one that it has followed is no startpoint that waits.
    settled = {settled_key(Target(SystemStreamPartition("lake", "s", 1), None)): 1}
    MetadataStore(lake).namespace(FAN_OUTS, "app").transact(lambda _: (settled, None), by="ada")
    assert repartition_stream(lake, "s", 5, **WHY).carried == ("app",)


def test_a_named_reader_goes_on_over_several_rewritings(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, *range(9))
    for reader in ("ahead", "behind"):
        with read_new(
            lake, "s", reader=reader, max_records=None if reader == "ahead" else 3
        ) as new:
            new.commit()
    for partitions in (5, 3, 2):
        repartition_stream(lake, "s", partitions, force=True, **WHY)
    sent(streams, 99, sequence=2)
    assert values_of(read_new(lake, "s", reader="ahead")) == [99]
    with pytest.raises(OffsetOutOfRangeError) as failure:
        read_new(lake, "s", reader="behind")
    assert failure.value.stream == "lake.s"


def values_of(new: NewRecords) -> list[int]:
    return sorted(new.table(["v"])["v"].to_pylist())


def test_the_preview_of_a_replay_says_which_tables_apply_repartitioned_records_again(
    step_world: StepWorld,
) -> None:
    step_world.stream("orders", "shop", 2, shop="string", size="int")
    app = Application("counting", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest").map("shop as k", "size as v")
    stored = step_world.table().write_function
    table = app.table(RemoteTable("things", key="k", write_function=stored, idempotent=True))
    orders.update(table, add={"v": "v"}, if_missing={"v": "v"})
    step_world.send("orders", ("a", 1), ("b", 2))
    step_world.run(app)
    assert step_world.records() == {"a": (2, None), "b": (4, None)}  # the default, and once added
    startpoints = Startpoints(app, lake=step_world.lake)
    asked = startpoints.preview("lake.orders", StartpointOldest())
    assert not any("repartitioned" in note for note in asked.notes)
    repartition_stream(step_world.lake, "orders", 3, **WHY)
    asked = startpoints.preview("lake.orders", StartpointOldest())
    (note,) = [note for note in asked.notes if "repartitioned" in note]
    assert "applies those again" in note
    startpoints.request("lake.orders", StartpointOldest(), **WHY)
    step_world.run(app)
    assert step_world.records() == {"a": (3, None), "b": (6, None)}

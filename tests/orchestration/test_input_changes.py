"""Applications that follow the changes of a dataset, against dictionaries."""

from __future__ import annotations

import random
import re
import sqlite3
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import (
    Presentation,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.reading.change_streams import (
    ChangeImageStreams,
    ChangeStreams,
    commit_offset,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset
from dagster_adjunct.orchestration.maintenance.expire import erase_keys, expire_versions
from dagster_adjunct.orchestration.maintenance.followers import list_lagging_followers
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.context import list_sensitive_columns
from dagster_adjunct.orchestration.step.progress import StepEvent, measure_stream_progress
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.orchestration.testing import TestApplication, TestStream
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    PlanningError,
    StillReadError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.checked_reads import read_table
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.changing_datasets import (
    KEEP_LITTLE,
    WHY,
    Changing,
    ChangingWorld,
    Content,
    Delivered,
    Following,
    abandon,
    check_followed,
    entries_of,
    follow,
    follow_and_die,
    mirror_of,
    new_world,
)
from tests.orchestration.cli.commands import document, printed
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

EVENTS = ("intent", "output", "outputs", "batch")


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("partitions", [2, None], ids=["partitioned", "broadcast"])
@pytest.mark.parametrize("seed", range(rounds(1, 30)))
def test_what_follows_a_dataset_ends_equal_to_it(
    tmp_path: Path, kind: type[Changing], partitions: int | None, seed: int
) -> None:
    draw = random.Random(f"{kind.__name__} {partitions} {seed}")
    world = new_world(tmp_path)
    dataset = kind(world, draw, partitions)
    dataset.begin()
    dataset.change()
    may_abandon = draw.randrange(2)
    abandoned = False
    for _ in range(25):
        draw.choice(dataset.actions)()
        app = mirror_of(dataset.declare(), world, max_batch_records=draw.choice([1, 4, 1000]))
        match draw.randrange(4):
            case 0:
                follow_and_die(world, app, draw.choice(EVENTS))
                if may_abandon and draw.randrange(2):
                    abandoned |= abandon(world)
            case 1:
                follow(world, app, max_batches=1)
            case 2 if draw.randrange(3) == 0:
                follow(world, app)
                check_followed(world, dataset.served, repeated=abandoned)
                dataset.repartition()
    follow(world, mirror_of(dataset.declare(), world))
    check_followed(world, dataset.served, repeated=abandoned)


def begun(tmp_path: Path, kind: type[Changing] = Following) -> Changing:
    """Return a dataset with some entries, and a mirror that has read them."""
    dataset = kind(new_world(tmp_path), random.Random(1))
    dataset.begin()
    dataset.send({"a": (1, 1), "b": (2, 2), "c": (3, 3)})
    follow(dataset.world, mirror_of(dataset.declare(), dataset.world))
    return dataset


def discard(dataset: Changing, followed: timedelta) -> None:
    """Discard all that is not needed, several commits after the mirror has read."""
    for number in range(3):
        dataset.send({"b": (number, number)}, gone=["c"] if "c" in dataset.served else [])
    if isinstance(dataset, Following):
        compact_dataset(dataset.world.lake, "planes", spark=IN_PROCESS, by="test", level="major")
        dataset.send({"d": (4, 4)})
    policy = replace(KEEP_LITTLE, followed=followed)
    expire_versions(dataset.world.lake, "planes", policy, by="test")


@pytest.mark.parametrize("kind", [Following, Delivered])
def test_what_a_follower_needs_is_kept_until_it_has_read_on(
    tmp_path: Path, kind: type[Changing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 1)
    dataset = begun(tmp_path, kind)
    world = dataset.world
    discard(dataset, timedelta(days=7))
    (follower,) = {(f.application, f.version) for f in list_lagging_followers(world.lake)}
    folders = folders_of(world)
    follow(world, mirror_of(dataset.declare(), world))
    check_followed(world, dataset.served)
    assert follower[0] == "mirror"
    assert list_lagging_followers(world.lake) == []
    expire_versions(world.lake, "planes", KEEP_LITTLE, by="test")
    assert folders_of(world) < folders, "nobody needs it any more"


def folders_of(world: StepWorld) -> set[str]:
    listed = world.lake.store.list("datasets/planes/data/")
    return {item.key.rpartition("/")[0] for item in listed}


@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_follower_beyond_the_limit_fails_and_begins_again_into_an_empty_table(
    tmp_path: Path, kind: type[Changing]
) -> None:
    dataset = begun(tmp_path, kind)
    world = dataset.world
    discard(dataset, timedelta(0))
    app = mirror_of(dataset.declare(), world)
    with pytest.raises(VersionDiscardedError) as failure:
        follow(world, app)
    assert failure.value.dataset == "planes"
    assert "changes.planes --oldest" in failure.value.next_step
    assert world.state(app).open is None
    assert "c" in world.records(), "it was deleted in between"

    with sqlite3.connect(tmp_path / "things.sqlite") as table:
        table.execute("DELETE FROM things")
    Startpoints(app, lake=world.lake).request(
        "changes.planes", StartpointOldest(), reason="too late", by="test"
    )
    Startpoints(app, lake=world.lake).request(
        "change-images.planes", StartpointOldest(), reason="too late", by="test"
    )
    follow(world, app)
    assert world.records() == dataset.served


def test_a_discard_can_let_go_of_what_a_follower_needs(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    lake = dataset.world.lake
    discard(dataset, timedelta(days=7))
    before = folders_of(dataset.world)
    expire_versions(lake, "planes", replace(KEEP_LITTLE, followed=timedelta(0)), by="test")
    assert folders_of(dataset.world) < before
    (follower,) = list_lagging_followers(lake)
    assert follower.version is None


@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_key_that_was_erased_is_deleted_and_nothing_shows_what_it_was(
    tmp_path: Path, kind: type[Changing]
) -> None:
    dataset = begun(tmp_path, kind)
    world = dataset.world
    dataset.send({"b": (5, 5)})
    erase_keys(world.lake, "planes", ["a"], **WHY)
    del dataset.served["a"]
    seen = len(world.rows("images"))
    follow(world, mirror_of(dataset.declare(), world))
    check_followed(world, dataset.served)
    later = world.rows("images")[seen:]
    kinds = {image["k"]: (image["kind"], image["before"]) for image in world.rows("images")}
    assert kinds["a"] == ("delete", None)
    assert kinds["b"] == ("update", None)
    assert later


def test_startpoints_of_all_kinds_say_from_what_was_served(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    system = ChangeStreams(dataset.world.lake)
    ssp = SystemStreamPartition("changes", "planes", 0)
    first = dict(dataset.served)
    between = datetime.now(UTC)
    dataset.send({"a": (7, 7), "d": (4, 4)}, gone=["b"])

    def read_from(startpoint: Startpoint) -> Content:
        ranges = {}
        for each in system.partitions("planes"):
            start = resolve_startpoint_to_offset(system, each, startpoint)
            ranges[each] = OffsetRange(start, system.upcoming([each])[each])
        rows = read_table(system, ranges).to_pylist()
        found = {row["k"]: (row["v"], row["w"]) for row in rows if not row["__tombstone"]}
        return found | {row["k"]: None for row in rows if row["__tombstone"]}

    changed = {"a": (7, 7), "b": None, "d": (4, 4)}
    assert read_from(StartpointOldest()) == dataset.served
    assert read_from(StartpointUpcoming()) == {}
    assert read_from(StartpointTimestamp(int(between.timestamp() * 1000))) == changed
    assert read_from(StartpointTimestamp(1_000_000_000_000)) == dataset.served
    end = StoredVersions(dataset.world.lake, "planes").newest()[0].number
    assert read_from(StartpointSpecific(commit_offset(end - 1))) == changed
    assert first["b"] == (2, 2)
    with pytest.raises(OffsetOutOfRangeError):
        resolve_startpoint_to_offset(system, ssp, StartpointSpecific(str(end)))


def test_a_range_always_has_the_same_records(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    dataset.send({"a": (7, 7), "d": (4, 4)}, gone=["b"])
    system = ChangeStreams(dataset.world.lake)
    ends = system.upcoming(system.partitions("planes"))
    ranges = {ssp: OffsetRange(commit_offset(2), end) for ssp, end in ends.items()}
    before = system.read_arrow(ranges)
    dataset.send({"a": (8, 8), "e": (5, 5)})
    compact_dataset(dataset.world.lake, "planes", spark=IN_PROCESS, by="test", level="major")
    assert ChangeStreams(dataset.world.lake).read_arrow(ranges) == before


@pytest.mark.lengthy
def test_only_changed_keys_are_read_however_often_the_table_was_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = begun(tmp_path)
    lake = dataset.world.lake
    before = dict(dataset.served)
    for number, level in enumerate(["minor", "major", "minor", "major", None]):
        dataset.send({"a": (number, 0), "xyz"[number % 3]: (number, number)}, gone=["b"])
        dataset.send({"c": (number, 1)})
        if level is not None:
            compact_dataset(lake, "planes", spark=IN_PROCESS, by="test", level=level)

    def read_whole(*_: object, **__: object) -> None:
        raise AssertionError("a whole bucket was read")

    monkeypatch.setattr("dagster_adjunct.assets.reading.entry_changes.read_entries", read_whole)
    system = ChangeStreams(lake)
    ends = system.upcoming(system.partitions("planes"))
    ranges = {ssp: OffsetRange(commit_offset(2), end) for ssp, end in ends.items()}
    for row in read_table(system, ranges).to_pylist():
        before[row["k"]] = (row["v"], row["w"])
        if row["__tombstone"]:
            del before[row["k"]]
    assert before == dataset.served


def test_compactions_are_nothing_to_read(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    dataset.send({"a": (7, 7)})
    app = mirror_of(dataset.declare(), dataset.world)
    follow(dataset.world, app)
    batch = dataset.world.state(app).batch
    compact_dataset(dataset.world.lake, "planes", spark=IN_PROCESS, by="test", level="major")
    follow(dataset.world, app)
    assert dataset.world.state(app).batch == batch


def test_whoever_waits_sees_each_commit_and_counts_what_is_new(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    system = ChangeStreams(dataset.world.lake)
    seen = system.fingerprint("planes")
    assert system.fingerprint("planes") == seen
    app = mirror_of(dataset.declare(), dataset.world)

    def lag() -> int:
        view = system.snapshot("planes")
        state = dataset.world.state(app)
        return measure_stream_progress(view, app.inputs["changes.planes"], state).lag

    assert lag() == 0
    dataset.send({"a": (9, 9), "x": (1, 1)})
    assert system.fingerprint("planes") != seen
    assert lag() == 2


def test_sensitive_columns_stay_sensitive(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    declared = replace(dataset.declare(), presentation=Presentation(sensitive=("v",)))
    app = mirror_of(declared, dataset.world)
    dataset.send({"a": (9, 9)}, declared=declared)
    masked = {name for _, name in list_sensitive_columns(app, dataset.world.systems)}
    assert masked == {"v", "before", "after"}


def test_a_dataset_that_the_application_sends_to_is_refused(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    app = Application("loop")
    changes = app.input_changes(dataset.declare())
    with pytest.raises(PlanningError):
        changes.send_to(app.table(dataset.declare()))


def test_what_has_no_stored_changes_is_refused() -> None:
    transient = unbounded_dataset("t", input="lake.t", key="k", broadcast=True, persistent=False)
    with pytest.raises(ConfigurationError):
        Application("app").input_changes(transient)
    with pytest.raises(ConfigurationError):
        unbounded_dataset("copy", input="changes.planes", key="k", broadcast=True)


def test_a_dataset_that_was_created_again_is_not_taken_for_the_former_one(tmp_path: Path) -> None:
    dataset = begun(tmp_path)
    world = dataset.world
    app = mirror_of(dataset.declare(), world)
    with pytest.raises(StillReadError):
        delete_dataset(world.lake, "planes", **WHY)
    delete_dataset(world.lake, "planes", force=True, **WHY)
    with pytest.raises(PlanningError):
        follow(world, app)
    dataset.served.clear()
    for number in range(5):
        dataset.send({"a": (number, number)})
    with pytest.raises(VersionDiscardedError):
        follow(world, app)


@pytest.mark.lengthy
def test_members_of_a_version_set_are_followed_from_before_they_joined(tmp_path: Path) -> None:
    dataset = begun(tmp_path, Delivered)
    world = dataset.world
    dataset.send({"a": (5, 5)})
    world.stream("crews", "k", 1, k="string", v="int", w="int")
    crews = bounded_dataset("crews", input="lake.crews", key="k", partitions=1)
    together, crews = version_set("fleet", dataset.declare(), crews)
    for number in (10, 11):
        world.send("crews", ("x", number, number), version=f"v{number}")
        dataset.served["b"] = (number, number)
        rows = [(key, *row) for key, row in dataset.served.items()]
        world.send("planes", *rows, version=f"v{number}")
        advance_version_set(
            [together, crews],
            lake=world.lake,
            systems={"lake": world.streams},
            spark=IN_PROCESS,
            by="test",
        )
        if number == 11:
            follow(world, mirror_of(together, world))
            check_followed(world, dataset.served)
    StoredVersions(world.lake, "planes").rollback(**WHY)
    dataset.served = entries_of(world, "planes")
    assert dataset.served["b"] == (10, 10)
    follow(world, mirror_of(together, world))
    check_followed(world, dataset.served)


@pytest.mark.lengthy
def test_commands_say_who_needs_which_version_and_let_go_of_it(tmp_path: Path) -> None:
    world = ChangingWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    dataset = Following(world, random.Random(1))
    dataset.begin()
    dataset.send({"a": (1, 1)})
    app = mirror_of(dataset.declare(), world)
    follow(world, app)
    held = StoredVersions(world.lake, "planes").newest()[1].served_id
    dataset.send({"a": (2, 2)})
    shown = (
        f"application mirror follows the changes of dataset planes from commit 2, .*{held} is kept"
    )
    (kept,) = document(world, "checkpoint", "show", "mirror")["follows"]
    assert re.match(shown, kept)
    found = {
        each["check"]: each for each in document(world, "doctor", "--master", "none")["findings"]
    }
    assert (found["followed datasets"]["state"], found["followed datasets"]["found"]) == (
        "ok",
        kept,
    )
    compact_dataset(world.lake, "planes", spark=IN_PROCESS, by="test", level="major")
    dataset.send({"a": (3, 3)})
    options = ("--keep", "1", "--grace", "0s", "--followed", "0s")
    printed(world, "dataset", "expire", "planes", *options)
    assert document(world, "checkpoint", "show", "mirror")["follows"] != [kept]
    with pytest.raises(VersionDiscardedError):
        follow(world, app)


def test_columns_that_change_are_read_as_they_are_now(tmp_path: Path) -> None:
    world = new_world(tmp_path)
    system = ChangeImageStreams(world.lake)

    def read(since: int) -> list[tuple[Any, ...]]:
        ends = system.upcoming(system.partitions("planes"))
        ranges = {ssp: OffsetRange(commit_offset(since), end) for ssp, end in ends.items()}
        rows = read_table(system, ranges).to_pylist()
        assert read_table(ChangeStreams(world.lake), changes_of(ranges)).num_rows == len(rows)
        return [(row["kind"], row["before"], row["after"]) for row in rows]

    def changes_of(ranges: dict[SystemStreamPartition, OffsetRange]) -> Any:
        return {replace(ssp, system="changes"): span for ssp, span in ranges.items()}

    world.stream("planes", "k", 1, k="string", v="int", w="int")
    planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=1)
    world.send("planes", ("a", 1, 1), ("b", 2, 2), version="1")
    world.advance(planes)
    first = StoredVersions(world.lake, "planes").newest()[0].number
    world.streams.change_columns("planes", renamed={"v": "seats"}, drop=["w"])
    world.streams.create(
        "planes",
        schema=Schema.of(k="string", seats="bigint", more="string"),
        key=["k"],
        partitions=1,
    )
    renamed = bounded_dataset(
        "planes", input="lake.planes", key="k", partitions=1, renamed={"v": "seats"}, drop="w"
    )
    world.send("planes", ("a", 1, None), ("b", 3, "x"), version="2")
    world.advance(renamed)
    before = {"k": "b", "seats": 2, "more": None}
    assert read(first) == [("update", before, {"k": "b", "seats": 3, "more": "x"})]
    assert [kind for kind, *_ in read(0)] == ["insert", "insert"]


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("dies", [False, True])
def test_an_open_batch_keeps_what_it_compares_whatever_is_discarded(
    tmp_path: Path, kind: type[Changing], dies: bool
) -> None:
    dataset = begun(tmp_path, kind)
    world = dataset.world
    dataset.send({"b": (7, 7)}, gone=["c"])

    def discard_at(event: StepEvent) -> None:
        if event.what == "intent":
            for _ in range(2):
                discard(dataset, timedelta(0))
            if dies:
                raise Crash

    app = mirror_of(dataset.declare(), world)
    with suppress(Crash):
        run_step(world.context(app, on_event=discard_at, max_batches=1))
    if dies:
        discard(dataset, timedelta(0))
        follow(world, app, max_batches=1)
    assert world.records() == {"a": (1, 1), "b": (7, 7)}


def test_users_give_changes_to_their_application_under_test(tmp_path: Path) -> None:
    planes = bounded_dataset("planes", input="lake.planes", key="k", broadcast=True)
    app = Application("mirror", engine="auto")
    changes = app.input_changes(planes)
    changes.join(app.table(planes), on="k", select=["v as now"], how="left").send_to(
        app.output_stream("lake.copied", partitions=1)
    )
    streams = {"changes.planes": TestStream(Schema.of(k="string", v="int"), key="k", partitions=1)}
    with TestApplication(app, streams) as test:
        for number in (1, 2):
            test.dataset("planes", [{"k": "a", "v": number}])
            test.input("changes.planes", [{"k": "a", "v": number}], deleted=[{"k": "b"}])
            result = test.run(IN_PROCESS)
        assert result.output("lake.copied") == [{"k": "a", "v": 2, "now": 2}]


@pytest.mark.lengthy
@pytest.mark.parametrize("times", [1, 2])
def test_what_an_abandoned_batch_has_sent_is_taken_back_with_the_change(
    tmp_path: Path, times: int
) -> None:
    dataset = begun(tmp_path)
    world = dataset.world
    app = mirror_of(dataset.declare(), world)
    for number in range(times):
        dataset.send({"a": (50 + number, 0)}, gone=["b", "c"][number : number + 1])
        follow_and_die(world, app, "outputs")
        assert world.records()["a"][0] == 50, "it was sent"
        BatchLog(world.lake, "mirror").abandon(skip=False, **WHY)
    dataset.send({"a": (1, 1), "b": (2, 2), "c": (3, 3)})
    discard_all = replace(KEEP_LITTLE, followed=timedelta(days=7))
    expire_versions(world.lake, "planes", discard_all, by="test")
    follow(world, app)
    assert world.records() == dataset.served == {"a": (1, 1), "b": (2, 2), "c": (3, 3)}
    assert world.state(app).offsets.abandoned == {}

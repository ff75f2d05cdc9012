"""Local tables are datasets: the commands know them, and upkeep spares what an open batch was
begun with.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_with_runtime
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy, local_table
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.generation import ARROW, Runtime
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.local_table import LocalTableWriter, WritingBatch, undo_batch
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset
from dagster_adjunct.orchestration.maintenance.expire import (
    expire_versions,
    versions_in_open_batches,
)
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.errors import DatasetError, StillReadError, VersionDiscardedError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.orchestration.cli.commands import document, printed, refused


class World:
    """A lake with the table `counts` of application `app`, which two batches have written."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.batch(1, ("a", 1), ("b", 1))
        self.batch(2, ("a", 2), ("c", 2))

    def spec(self, partitions: int = 2) -> AdjunctDataset:
        schema = Schema.of(k="string", v="bigint")
        return local_table("counts", OwnedBy("app", schema), key=("k",), partitions=partitions)

    def batch(
        self, number: int, *sent: tuple[str, int], partitions: int = 2, begun: str = ""
    ) -> None:
        spec = self.spec(partitions)
        stored = StoredVersions(self.lake, spec)
        pinned = stored.version(begun) if begun else stored.current()
        rows = pa.table(
            {
                "k": [key for key, _ in sent],
                "v": pa.array([value for _, value in sent], pa.int64()),
                "__tombstone": pa.array([False] * len(sent), pa.bool_()),
            }
        )
        version = None if pinned is None else pinned.sealed
        with LocalTableWriter(
            self.lake, spec, version, WritingBatch("app", number, "run"), ARROW
        ) as writes:
            writes.send(rows, order_by=(), partitioned=False)
            writes.commit()

    def begin(self, number: int) -> str:
        """Open a batch over the version that is served now, and return that."""
        log, version = BatchLog(self.lake, "app"), self.served()
        intent = Intent(
            batch=number,
            run="run",
            clock=datetime.now(UTC),
            ranges={},
            joined=JoinedVersions(versions={"counts": version}),
        )
        log.open(log.read(), intent)
        return version

    def served(self) -> str:
        with open_dataset(self.lake, "counts") as table:
            return str(table.version)

    def held(self, version: str | None = None) -> dict[str, int]:
        with open_dataset(self.lake, "counts", version=version) as table:
            return {key: entry["v"] for key, entry in table.items()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(open_lake(tmp_path / "lake"))


def test_the_local_table_of_another_application_is_refused_and_not_to_be_deleted(
    world: World,
) -> None:
    schema = Schema.of(k="string", v="bigint")
    other = local_table("counts", OwnedBy("other", schema), key=("k",), partitions=2)
    with pytest.raises(DatasetError, match="application app") as caught:
        advance_with_runtime(Runtime(world.lake, {}, IN_PROCESS, by="me"), other)
    assert "another name" in caught.value.next_step
    assert "delete" not in caught.value.next_step
    assert world.held() == {"a": 2, "b": 1, "c": 2}


def test_the_commands_know_a_local_table_as_any_dataset(world: World) -> None:
    assert "counts" in printed(world, "dataset", "list")
    displayed = document(world, "dataset", "show", "counts")
    assert (displayed["declaration"]["owner"], displayed["declaration"]["input"]) == (
        "app",
        "application app",
    )
    assert "application app" in printed(world, "dataset", "show", "counts")
    (answer,) = document(world, "dataset", "get", "counts", "a")
    assert answer["entry"] == {"k": "a", "v": 2}
    history = document(world, "dataset", "history", "counts")
    assert [entry["reason"] for entry in history if entry.get("reason")][:2] == [
        "batch 2 of application app",
        "batch 1 of application app",
    ]
    first, last = open_dataset(world.lake, "counts", as_of=1).version, world.served()
    assert document(world, "dataset", "diff", "counts", first, last)["changed"] == 1
    assert "counts" in printed(world, "dataset", "verify", "counts", "--deep")


def test_what_needs_a_stream_is_refused_by_name(world: World) -> None:
    assert "local table of application 'app', which follows no stream" in refused(
        world, "dataset", "lag", "counts"
    )
    with pytest.raises(DatasetError) as failure:
        rebuild_dataset(
            world.spec(), lake=world.lake, systems={}, spark=IN_PROCESS, reason="a test", by="me"
        )
    assert failure.value.dataset == "counts"


def test_an_open_batch_rereads_its_versions_after_compaction_and_discard(world: World) -> None:
    begun = world.begin(3)
    world.batch(3, ("b", 3))
    compact_dataset(world.lake, "counts", spark=IN_PROCESS, by="me", level="major")
    expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="me")
    assert world.held(begun) == {"a": 2, "b": 1, "c": 2}
    world.batch(3, ("b", 3), begun=begun)
    assert world.held() == {"a": 2, "b": 3, "c": 2}
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=True)
    expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="me")
    with pytest.raises(DatasetError):
        world.held(begun)


def test_what_a_batch_that_was_given_up_is_taken_out_to_stays_until_then(world: World) -> None:
    begun = world.begin(3)
    world.batch(3, ("b", 3), begun=begun)
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=False)
    compact_dataset(world.lake, "counts", spark=IN_PROCESS, by="me", level="major")
    expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="me")
    with pytest.raises(StillReadError) as failure:
        repartition_dataset(world.lake, "counts", 5, reason="more", by="me")
    assert failure.value.dataset == "counts"
    context = Runtime(world.lake, {}, IN_PROCESS, "run")
    undo_batch(context, "counts", "app", 3, declared=world.spec())
    assert world.held() == {"a": 2, "b": 1, "c": 2}
    expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="me")
    with pytest.raises(DatasetError):
        world.held(begun)
    assert world.held() == {"a": 2, "b": 1, "c": 2}


def test_what_it_is_taken_out_to_stays_also_if_its_application_is_renamed(world: World) -> None:
    with RunLease(world.lake, "app", "run", Claim(wait=timedelta(0))):
        begun = world.begin(3)
    world.batch(3, ("b", 3), begun=begun)
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=False)
    rename_application(world.lake, "app", "other", reason="a test", by="me")
    compact_dataset(world.lake, "counts", spark=IN_PROCESS, by="me", level="major")
    expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="me")
    undo_batch(Runtime(world.lake, {}, IN_PROCESS, "run"), "counts", "other", 3)
    assert world.held() == {"a": 2, "b": 1, "c": 2}


def test_a_batch_that_is_skipped_leaves_none_to_be_taken_out(world: World) -> None:
    log = BatchLog(world.lake, "app")
    world.batch(3, ("b", 3), begun=world.begin(3))
    log.abandon(reason="a test", by="me", skip=False)
    assert log.read().state.given_up == 3
    undo_batch(Runtime(world.lake, {}, IN_PROCESS, "run"), "counts", "app", 3)  # as a run begins
    world.batch(4, ("b", 4), begun=world.begin(4))
    log.abandon(reason="a test", by="me", skip=True)
    assert log.read().state.given_up is None
    assert world.held() == {"a": 2, "b": 4, "c": 2}


def test_undoing_a_batch_whose_former_version_was_erased_says_what_to_do(world: World) -> None:
    begun = world.begin(3)
    world.batch(3, ("a", 3), begun=begun)
    assert not erase_keys(
        world.lake, "counts", ["a"], reason="asked", by="me", roots=_roots(world)
    ).complete
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=False)
    context = Runtime(world.lake, {}, IN_PROCESS, "run")
    with pytest.raises(VersionDiscardedError) as caught:
        undo_batch(context, "counts", "app", 3, declared=world.spec())
    assert caught.value.dataset == "counts"
    assert str(caught.value.version).startswith("v000002-")
    assert "adjunct dataset delete counts" in caught.value.next_step
    delete_dataset(world.lake, "counts", reason="as it says", by="me", force=True)
    undo_batch(context, "counts", "app", 3, declared=world.spec())
    world.batch(4, ("b", 4))
    assert world.held() == {"b": 4}


def test_undoing_a_batch_after_a_repartition_is_rejected_with_what_to_do(world: World) -> None:
    context = Runtime(world.lake, {}, IN_PROCESS, "run")
    # nobody knows yet that batch 2 is given up
    repartition_dataset(world.lake, "counts", 3, reason="more", by="me")
    with pytest.raises(
        DatasetError, match="has 2 partitions, and the table was repartitioned to 3 since"
    ) as caught:
        undo_batch(context, "counts", "app", 2, declared=world.spec(3))
    assert "--partitions 2" in caught.value.next_step
    assert "partitions=2" in caught.value.next_step
    repartition_dataset(world.lake, "counts", 2, reason="as it says", by="me")
    undo_batch(context, "counts", "app", 2, declared=world.spec())
    assert world.held() == {"a": 1, "b": 1}


def _roots(world: World) -> Callable[[], dict[str, str]]:
    return lambda: versions_in_open_batches(world.lake).get("counts", {})


def test_its_partitions_are_changed_in_place_between_batches_only(world: World) -> None:
    world.begin(3)
    with pytest.raises(StillReadError) as failure:
        repartition_dataset(world.lake, "counts", 5, reason="more", by="me")
    assert failure.value.dataset == "counts"
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=True)
    repartition_dataset(world.lake, "counts", 5, reason="more", by="me")
    with pytest.raises(DatasetError) as failure:
        world.batch(4, ("b", 4))
    assert failure.value.dataset == "counts"
    world.batch(4, ("b", 4), ("d", 4), partitions=5)
    assert world.held() == {"a": 2, "b": 4, "c": 2, "d": 4}


def test_an_erased_key_leaves_all_versions_and_the_report_names_its_sources(world: World) -> None:
    report = erase_keys(world.lake, "counts", ["a"], reason="asked for", by="me")
    assert world.held() == {"b": 1, "c": 2}
    assert any("input streams of application app" in text for text in report.not_erased)
    world.batch(3, ("b", 3))
    assert world.held() == {"b": 3, "c": 2}


def test_a_table_that_was_deleted_begins_again(world: World) -> None:
    world.begin(3)
    with pytest.raises(StillReadError) as failure:
        delete_dataset(world.lake, "counts", reason="over", by="me", force=True)
    assert failure.value.dataset == "counts"
    BatchLog(world.lake, "app").abandon(reason="a test", by="me", skip=True)
    delete_dataset(world.lake, "counts", reason="over", by="me", force=True)
    world.batch(1, ("z", 1))
    assert world.held() == {"z": 1}

"""SAMZA-1278's recovery table, cell by cell, and what makes a table valid; persistent stores.

                            no store                  found, not valid             found and valid
marked for bootstrap        create, force bootstrap   re-create, force bootstrap   continue from
                                                      last offset
not marked                  create, last offset       re-create, last offset       continue from
                                                      last offset
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.assets.retention.discard import delete_dataset_objects
from dagster_adjunct.assets.sources.entries import offsets_by_partition
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.versions.reports import AdvanceReport, StageEvent
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import describe_waiting_datasets
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MalformedDocumentError,
    ManifestMismatchError,
    NoSealedVersionError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.commit_log import seal_json, unseal_json
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LogCompaction
from tests.assets.conftest import World
from tests.assets.cycle import faulty
from tests.assets.unbounded.following_plain import NAME, Shape, Table, keys_of, partition, table_in
from tests.faulty_store import Crash, Fault

DAY = timedelta(days=1)
COMPACTED = Shape(compaction=LogCompaction(tombstones_kept=DAY))


def lose_an_object(table: Table) -> str:
    """Delete one file of the version that is served; return its key."""
    version = table.manifest.version
    assert version is not None
    generation = next(candidate for candidate in version.generations if candidate.files)
    key = f"{generation.folder}/{generation.files[0].name}"
    (Path(table.world.lake.url) / key).unlink()
    return key


def damage_the_manifest(table: Table, data: bytes = b"{") -> str:
    """Overwrite the current manifest; return its key."""
    pointer = json.loads(table.world.lake.store.get(f"datasets/{NAME}/CURRENT").data)
    (Path(table.world.lake.url) / pointer["manifest"]).write_bytes(data)
    return str(pointer["manifest"])


# -- the table


def test_no_store_found_and_marked_creates_and_forces_bootstrap(world: World) -> None:
    table = table_in(world)
    table.send(a=1, b=2)
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 2})
    decision = report.decision
    assert decision is not None
    assert (decision.action, decision.store, decision.reason) == (
        "bootstrap", "none", "there is no table yet",
    )  # fmt: skip
    assert table.manifest.decision == decision


def test_store_found_not_valid_and_marked_recreates_and_forces_bootstrap(world: World) -> None:
    table = table_in(world)
    table.send(a=1, b=2)
    table.advance()
    table.send(a=3)
    key = lose_an_object(table)
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 3, "b": 2})
    assert report.counters["read"] == 3, "all of the stream, from its oldest offset"
    assert report.decision is not None
    assert (report.decision.action, report.decision.store) == ("bootstrap", "invalid")
    assert "objects are missing or cut" in report.decision.reason
    assert key in report.decision.reason
    assert table.advance().action == "up-to-date"


def test_store_found_valid_and_marked_continues_from_last_offset(world: World) -> None:
    table = table_in(world)
    table.send(a=1, b=2)
    table.advance()
    table.send(a=3, b=None)
    report = table.advance()
    assert (report.action, report.counters["read"], table.content) == ("applied", 2, {"a": 3})
    assert report.decision is not None
    assert (report.decision.action, report.decision.store) == ("continue", "valid")
    assert table.manifest.decision == report.decision


def test_no_store_found_and_not_marked_creates_and_continues_from_the_default_offset(
    world: World,
) -> None:
    table = table_in(world, bootstrap=False)
    table.send(a=1, b=2)
    report = table.advance()
    assert report.decision is not None
    assert (report.decision.action, report.decision.store) == ("create", "none")
    assert table.content == {"a": 1, "b": 2}, (
        "a lake stream is read from its oldest offset by default"
    )
    bootstrap = table.manifest.bootstrap
    assert bootstrap is not None
    assert bootstrap.state == "done"


def test_an_invalid_unmarked_table_is_recreated_and_continues_from_its_offset(world: World) -> None:
    table = table_in(world, bootstrap=False)
    table.send(a=1, b=2)
    table.advance()
    lose_an_object(table)
    table.send(c=3)
    report = table.advance()
    assert report.decision is not None
    assert (report.decision.action, report.decision.store) == ("recreate", "invalid")
    assert (report.counters["read"], table.content) == (1, {"c": 3}), (
        "what was before is not read again"
    )


def test_store_found_valid_and_not_marked_continues_from_last_offset(world: World) -> None:
    table = table_in(world, bootstrap=False)
    table.send(a=1, b=2)
    table.advance()
    table.send(c=3)
    report = table.advance()
    assert report.decision is not None
    assert (report.decision.action, report.counters["read"]) == ("continue", 1)
    assert table.content == {"a": 1, "b": 2, "c": 3}


# -- valid by age


def test_a_table_older_than_the_maximum_age_with_changes_to_read_is_rebuilt(world: World) -> None:
    table = table_in(world, max_age=7 * DAY)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    assert table.advance(later=6 * DAY).action == "applied"
    table.send(c=3)
    report = table.advance(later=14 * DAY)
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 2, "c": 3})
    assert report.decision is not None
    assert "longer than 7 days, 0:00:00 ago" in report.decision.reason


def test_a_paused_week_on_an_idle_stream_does_not_bootstrap_again(world: World) -> None:
    table = table_in(world, max_age=DAY)
    table.send(a=1)
    table.advance()
    report = table.advance(later=7 * DAY)
    assert (report.action, report.decision.action if report.decision else "") == (
        "up-to-date",
        "continue",
    )
    table.send(b=2)
    report = table.advance(later=7 * DAY + timedelta(hours=23))
    assert (report.action, report.counters["read"]) == ("applied", 1), (
        "the idle look has confirmed it"
    )


def test_age_counts_from_when_the_stream_was_looked_at_and_not_from_the_commit(
    world: World,
) -> None:
    table = table_in(world, max_age=DAY)
    table.send(a=1)
    table.advance()
    bootstrap, decision = table.manifest.bootstrap, table.manifest.decision
    assert bootstrap is not None
    assert decision is not None
    assert table.manifest.confirmed_at == bootstrap.started_at == decision.at
    table.send(b=1)
    report = table.advance()
    assert report.decision is not None
    assert table.manifest.confirmed_at == report.decision.at


def test_the_default_age_is_how_long_a_compacted_stream_keeps_deletions(world: World) -> None:
    table = table_in(world, shape=COMPACTED)
    table.send(a=1, b=1)
    table.advance()
    table.send(b=2)
    assert table.advance(later=timedelta(hours=23)).action == "applied"
    table.send(b=3)
    report = table.advance(later=timedelta(hours=48))
    assert report.action == "bootstrapped"
    table.shape = Shape()
    table.send(b=4)
    assert table.advance(later=400 * DAY).action == "applied", (
        "a stream that keeps all has no such age"
    )


def test_a_bootstrap_of_a_compacted_stream_that_was_paused_for_too_long_begins_again(
    world: World,
) -> None:
    table = table_in(world, shape=COMPACTED, chunk=1, partitions=1)
    table.send(a=1, b=1, c=1)
    stop_after_chunks(table, 1)
    report = table.advance(later=2 * DAY)
    assert (report.action, report.counters["read"]) == ("bootstrapped", 3)
    assert report.decision is not None
    assert "keeps deletions for 1 day, 0:00:00 only" in report.decision.reason


# -- valid by offset


def test_retention_that_passed_an_unmarked_table_recreates_it_from_what_is_left(
    world: World,
) -> None:
    table = table_in(world, bootstrap=False, partitions=1)
    table.send(a=1, b=2)
    table.advance()
    table.send(c=3)
    table.send(d=4)
    table.drop_the_front()
    report = table.advance()
    assert (report.action, table.content) == ("applied", {"d": 4})
    assert report.decision is not None
    assert (
        report.decision.reason
        == "it continues at offset 2 of lake.accounts.0, and the oldest in the stream is 3"
    )


def test_retention_behind_the_table_is_none_of_its_business(world: World) -> None:
    table = table_in(world)
    table.send(a=1, b=2)
    table.advance()
    table.drop_the_front(keep=0)
    table.send(c=3)
    report = table.advance()
    assert (report.action, report.counters["read"]) == ("applied", 1)
    assert table.content == {"a": 1, "b": 2, "c": 3}


def test_a_lost_offset_of_an_incomplete_stream_is_rejected_and_the_table_served(
    world: World,
) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1, b=2)
    table.advance()
    table.send(c=3)
    table.send(d=4)
    table.drop_the_front()
    with pytest.raises(DatasetError, match="retention has deleted the oldest") as caught:
        table.advance()
    assert "it continues at offset 2 of lake.accounts.0" in caught.value.problem
    assert "initial=" in caught.value.next_step
    assert table.content == {"a": 1, "b": 2}


def test_a_lost_offset_on_a_compacted_stream_is_rebuilt(world: World) -> None:
    table = table_in(world, partitions=1, shape=COMPACTED)
    table.send(a=1, b=2)
    table.advance()
    table.send(c=3)
    table.send(a=1, b=2, d=4)
    table.drop_the_front()
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 2, "d": 4})


def test_on_lost_offset_fail_fails_and_what_was_served_stays(world: World) -> None:
    table = table_in(world, partitions=1, on_lost_offset="fail", shape=COMPACTED)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    table.send(c=3)
    table.drop_the_front()
    before = table.commits
    with pytest.raises(OffsetOutOfRangeError) as caught:
        table.advance()
    assert caught.value.dataset == "accounts"
    assert "adjunct dataset rebuild accounts" in caught.value.next_step
    assert (table.content, table.commits) == ({"a": 1}, before)
    assert table.advance(rebuild="c is enough").action == "bootstrapped"
    assert table.content == {"c": 3}


@pytest.mark.parametrize("bootstrap", [True, False])
def test_on_lost_offset_serve_stale_serves_on_and_says_so_in_one_commit(
    world: World, bootstrap: bool
) -> None:
    table = table_in(world, partitions=1, on_lost_offset="serve_stale", bootstrap=bootstrap)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    table.send(c=3)
    table.drop_the_front()
    report = table.advance()
    assert (report.action, table.content, report.lag) == ("stale", {"a": 1}, {"lake.accounts.0": 2})
    assert table.manifest.decision is not None
    assert (table.manifest.decision.action, table.store.history(1)[0].action) == (
        "serve-stale",
        "serve-stale",
    )
    before = table.commits
    assert table.advance().action == "stale"
    assert table.commits == before, "nothing changed, nothing is committed"


@pytest.mark.parametrize(
    "partitions", [1, 3], ids=["with as many partitions", "with more partitions"]
)
def test_a_stream_that_was_recreated_under_the_same_name_is_distinguished(
    world: World, partitions: int
) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1, b=2)
    table.advance()
    import shutil

    shutil.rmtree(Path(world.lake.url) / world.lake.stream_prefix(NAME))
    table_in(world, partitions=partitions)
    world.sequences.clear()
    table.send(z=1)
    with pytest.raises(OffsetOutOfRangeError) as failure:
        table.advance()
    assert (failure.value.partition, failure.value.offset) == (0, "2")
    assert table.content == {"a": 1, "b": 2}
    assert table.advance(rebuild="made anew").action == "bootstrapped"
    assert table.content == {"z": 1}


# -- a partition without records; partitions added and removed


def test_a_partition_that_never_had_a_record_does_not_make_a_store_invalid(world: World) -> None:
    table = table_in(world, partitions=2)
    first, second, third = keys_of(world, 0, 2)
    table.send(**{first: 1})
    table.advance()
    table.send(**{second: 2})
    table.send(**{third: 3})
    report = table.advance()
    assert (report.action, report.counters["read"]) == ("applied", 2)
    assert offsets_by_partition(table.manifest.offsets)[partition(1)] == "0"
    assert table.advance(later=1000 * DAY).action == "up-to-date"


def test_added_partitions_are_named_and_the_table_is_rebuilt(world: World) -> None:
    table = table_in(world, partitions=3, shape=Shape(partitions=2))
    displayed, hidden = keys_of(world, 0, 3)[0], keys_of(world, 2, 3)[0]
    table.send(**{displayed: 1, hidden: 2})
    table.advance()
    assert table.content == {displayed: 1}
    table.shape = Shape()
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {displayed: 1, hidden: 2})
    assert report.decision is not None
    assert (
        report.decision.reason
        == "the partitions of its stream have changed (lake.accounts.2 added)"
    )
    assert table.manifest.declaration.input_partitions == 3


def test_removed_partitions_are_named_and_an_unmarked_table_is_recreated(world: World) -> None:
    table = table_in(world, partitions=3, bootstrap=False)
    displayed, hidden = keys_of(world, 0, 3)[:2], keys_of(world, 2, 3)[0]
    table.send(**{displayed[0]: 1, hidden: 2})
    table.advance()
    table.shape = Shape(partitions=2)
    table.send(**{displayed[1]: 3})
    report = table.advance()
    assert report.decision is not None
    assert (
        report.decision.reason
        == "the partitions of its stream have changed (lake.accounts.2 removed)"
    )
    assert (table.content, set(report.offsets)) == (
        {displayed[1]: 3},
        {"lake.accounts.0", "lake.accounts.1"},
    )


# -- a rebuild: beside the served table, in chunks, through crashes


class Stop(BaseException):
    """The process is killed."""


def stop_after_chunks(table: Table, chunks: int, **advance: object) -> None:
    """Advance until this many chunks are committed, and end as a killed process does."""
    done: list[StageEvent] = []

    def count(event: StageEvent) -> None:
        done.extend([event] if event.stage == "bootstrap" else [])
        if len(done) == chunks:
            raise Stop

    with pytest.raises(Stop):
        table.advance(on_stage=count, **advance)  # type: ignore[arg-type]


def test_a_rebuild_in_chunks_continues_after_a_crash_next_to_the_served_table(world: World) -> None:
    table = table_in(world, partitions=1, chunk=2)
    table.send(a=1, b=1, c=1, d=1, e=1)
    table.advance()
    table.send(a=2, f=1)
    stop_after_chunks(table, 2, rebuild="the clerk was wrong")
    assert table.content == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, "the old table is served"
    begun = table.manifest.bootstrap
    assert begun is not None
    assert (begun.state, begun.target, len(begun.building)) == (
        "running",
        {"lake.accounts.0": "7"},
        2,
    )
    table.send(g=1)
    report = table.advance()
    assert report.decision is not None
    assert (report.decision.store, report.decision.reason) == (
        "building",
        "its bootstrap continues",
    )
    assert (report.action, report.counters["read"]) == ("bootstrapped", 3), (
        "it goes on after the last whole chunk"
    )
    assert table.content == {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}, (
        "up to the target, and not further"
    )
    ended = table.manifest.bootstrap
    assert ended is not None
    assert (ended.state, ended.target, ended.started_at) == ("done", begun.target, begun.started_at)
    assert ended.why == "rebuild: the clerk was wrong"
    assert table.advance().action == "applied"
    assert table.content is not None
    assert table.content["g"] == 1


def test_a_rebuild_has_a_reason_and_is_of_an_unbounded_dataset(world: World) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1)

    def rebuild(spec: AdjunctDataset, reason: str) -> AdvanceReport:
        return rebuild_dataset(
            spec,
            lake=world.lake,
            systems={"lake": table.streams},
            spark=IN_PROCESS,
            reason=reason,
            by="ada",
        )

    with pytest.raises(ConfigurationError) as caught:
        rebuild(table.spec, "")
    assert caught.value.argument == "reason"
    with pytest.raises(DatasetError, match="is bounded"):
        rebuild(bounded_dataset("b", input="lake.accounts", key="k", partitions=1), "why not")
    assert rebuild(table.spec, "before the first advance").action == "bootstrapped"
    assert rebuild(table.spec, "the clerk was wrong").action == "bootstrapped"
    begun = table.store.history()[1]
    assert (begun.action, begun.by, begun.reason) == (
        "bootstrap",
        "ada",
        "rebuild: the clerk was wrong",
    )


def test_a_rebuild_never_asks_for_the_old_table_again(world: World) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1)
    first = table.advance().version
    assert first is not None
    table.advance(rebuild="to be sure")
    assert table.store.version(first).get("a") == {"k": "a", "n": 1}, (
        "who holds the old one reads it on"
    )
    assert [retired.generation for retired in table.manifest.retired] == [1]


def test_a_bootstrap_whose_next_offset_fell_off_the_stream_begins_again(world: World) -> None:
    table = table_in(world, partitions=1, chunk=1, shape=COMPACTED, on_lost_offset="fail")
    table.send(a=1)
    table.send(b=1)
    table.send(c=1)
    stop_after_chunks(table, 1)
    table.send(a=1, b=1, d=1)
    table.drop_the_front()
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 1, "d": 1})
    assert report.decision is not None
    assert (
        "the unfinished bootstrap starts again: it continues at offset 1" in report.decision.reason
    )


def test_a_bootstrap_that_lost_what_it_had_built_begins_again_though_not_marked(
    world: World,
) -> None:
    table = table_in(world, partitions=1, chunk=1, bootstrap=False)
    table.send(a=1, b=1)
    table.advance()
    stop_after_chunks(table, 1, rebuild="to be sure")
    bootstrap = table.manifest.bootstrap
    assert bootstrap is not None
    generation = bootstrap.building[0]
    (Path(world.lake.url) / generation.folder / generation.files[0].name).unlink()
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 1})


@pytest.mark.parametrize("nth", range(1, 30))
def test_a_rebuild_that_dies_at_any_request_serves_the_old_or_the_new_table_and_ends(
    world: World, nth: int
) -> None:
    table = table_in(world, partitions=1, chunk=2)
    table.send(a=1, b=1, c=1)
    table.advance()
    table.send(c=None, d=1)
    broken = faulty(world, Fault("*", nth, "crash-before"))
    died = False
    try:
        table.advance(lake=broken, rebuild="to be sure")
    except Crash:
        died = True
    assert table.content in ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "d": 1})
    table.advance()
    table.advance()
    assert table.content == {"a": 1, "b": 1, "d": 1}
    assert died or nth > 15, "the test has requests to die at"


def test_a_first_bootstrap_of_a_stream_that_lost_its_front_is_refused(world: World) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1)
    table.send(b=1)
    table.drop_the_front()
    with pytest.raises(DatasetError, match=r"has to be bootstrapped \(there is no table yet\)"):
        table.advance()
    with pytest.raises(NoSealedVersionError):
        table.store.require_current()


# -- a damaged manifest


@pytest.mark.lengthy
@pytest.mark.parametrize("data", [b"{", b"", b'{"format":1}'], ids=["cut", "empty", "other"])
def test_a_table_with_a_damaged_manifest_is_rebuilt_next_to_the_readable_one(
    world: World, data: bytes
) -> None:
    table = table_in(world)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    table.advance()
    key = damage_the_manifest(table, data)
    with pytest.raises(MalformedDocumentError):
        table.store.require_current()
    table.send(c=3)
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1, "b": 2, "c": 3})
    assert report.decision is not None
    assert key in report.decision.reason
    assert table.advance().action == "up-to-date"
    assert table.store.history()[-1].reason == report.decision.reason, (
        "history ends where it can't be read"
    )


def test_a_damaged_manifest_does_not_keep_the_sensor_from_the_run_that_mends_it(
    world: World,
) -> None:
    table = table_in(world)
    table.send(a=1)
    table.advance()
    damage_the_manifest(table)
    app = Application("transfers")
    app.table(table.spec)
    assert describe_waiting_datasets(world.lake, {"lake": table.streams}, app) == ()


def test_an_unmarked_table_continues_from_its_newest_readable_manifest(world: World) -> None:
    table = table_in(world, bootstrap=False, partitions=1)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    table.advance()
    damage_the_manifest(table)
    report = table.advance()
    assert (report.action, report.counters["read"], table.content) == ("applied", 1, {"b": 2})
    assert report.decision is not None
    assert report.decision.action == "recreate"


def test_a_damaged_body_is_a_damaged_manifest(world: World) -> None:
    table = table_in(world)
    table.send(a=1)
    table.advance()
    pointer = json.loads(world.lake.store.get(f"datasets/{NAME}/CURRENT").data)
    content = unseal_json(world.lake.store.get(pointer["manifest"]).data)
    assert content is not None
    manifest = json.loads(content)
    manifest["body"]["offsets"] = {}
    damage_the_manifest(table, seal_json(json.dumps(manifest).encode()))
    report = table.advance()
    assert (report.action, table.content) == ("bootstrapped", {"a": 1})


def test_without_any_readable_manifest_the_table_is_rebuilt(world: World) -> None:
    table = table_in(world, bootstrap=False)
    table.send(a=1)
    table.advance()
    for item in world.lake.store.list(f"datasets/{NAME}/manifests/"):
        (Path(world.lake.url) / item.key).unlink()
    report = table.advance()
    assert (report.action, table.content) == ("applied", {"a": 1})
    assert report.decision is not None
    assert (report.decision.action, report.decision.store) == ("recreate", "invalid")


def test_manifests_of_lost_races_are_not_taken_for_earlier_commits(world: World) -> None:
    table = table_in(world, partitions=1, bootstrap=False)
    table.send(a=1)
    table.advance()
    keys = sorted(item.key for item in world.lake.store.list(f"datasets/{NAME}/manifests/"))
    lost = json.loads((Path(world.lake.url) / keys[-1]).read_bytes())
    lost["commit"] = "lost"
    lost["body"]["offsets"] = {"lake.accounts.0": "77"}
    number = lost["number"]
    world.lake.store.put_if_absent(
        f"datasets/{NAME}/manifests/{number:012d}-lost.json", json.dumps(lost).encode()
    )
    table.send(b=2)
    table.advance()
    damage_the_manifest(table)
    table.advance()
    assert table.manifest.offsets == {"lake.accounts.0": "2"}


def test_a_damaged_pointer_is_refused_with_the_next_step(world: World) -> None:
    table = table_in(world)
    table.send(a=1)
    table.advance()
    pointer = Path(world.lake.url) / f"datasets/{NAME}/CURRENT"
    whole = pointer.read_bytes()
    pointer.write_bytes(b"{")
    with pytest.raises(MalformedDocumentError) as caught:
        table.advance()
    assert "datasets/accounts/CURRENT" in str(caught.value.document)
    assert "Restore this object" in caught.value.next_step
    pointer.unlink()
    with pytest.raises(MalformedDocumentError) as caught:
        table.advance()
    assert caught.value.document == "datasets/accounts/CURRENT"
    assert "Restore that object" in caught.value.next_step
    pointer.write_bytes(whole)
    assert table.advance().action == "up-to-date"


def test_two_writers_who_find_the_damage_commit_once(world: World) -> None:
    from dagster_adjunct.resources.errors import CommitConflictError

    table = table_in(world)
    table.send(a=1)
    table.advance()
    damage_the_manifest(table)
    rival = Lake(
        faulty(world, Fault("put_if_match", 1, "meanwhile", lambda: table.advance())).store,
        world.lake.id,
    )
    with pytest.raises(CommitConflictError):
        table.advance(lake=rival)
    assert (table.content, table.advance().action) == ({"a": 1}, "up-to-date")


# -- for good measure: what is read is what is whole


def test_an_unmarked_table_that_lost_an_object_fails_readers_until_it_is_advanced(
    world: World,
) -> None:
    table = table_in(world, bootstrap=False)
    table.send(a=1)
    table.advance()
    lose_an_object(table)
    with pytest.raises(ManifestMismatchError):
        table.store.require_current().get("a")


def test_the_streams_of_a_lake_tell_all_until_retention_drops_something(world: World) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1)
    table.send(b=1)
    assert LakeStreams(world.lake).has_all_keys(NAME)
    table.drop_the_front()
    assert not LakeStreams(world.lake).has_all_keys(NAME)


def test_one_that_was_deleted_is_rebuilt_from_its_stream(world: World) -> None:
    table = table_in(world)
    for number in range(3):
        table.send(a=number, b=number)
        table.advance()
    seen = table.store.read()[0]
    assert seen is not None
    delete_dataset_objects(world.lake, NAME, seen, reason="another key", by="ada")
    assert table.content is None
    table.send(b=None, c=7)
    assert table.advance().action == "bootstrapped"
    assert table.content == {"a": 2, "c": 7}

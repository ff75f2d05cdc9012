"""Masks beside commits: made after them, never in their way, and gone when what they are of is
gone.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.superseded import read_mask
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys, find_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.reports import StageEvent
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.tables import entries, faulty, send, table
from tests.faulty_store import Fault

SUPERSEDED = "dagster_adjunct.assets.reading.superseded"


@pytest.fixture
def quick(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A lake in which nothing needs Spark, and small tables have masks."""
    monkeypatch.setattr(f"{SUPERSEDED}.FEWEST_ROWS", 0)
    world.spark = IN_PROCESS
    return world


def masks(world: World) -> set[str]:
    stored = {item.key for item in world.lake.store.list("datasets/")}
    return {key for key in stored if "_mask" in key}


def has_mask(world: World, version: str) -> bool:
    sealed = StoredVersions(world.lake, "table").version(version).sealed
    return read_mask(world.lake.store, sealed) is not None


def test_a_commit_with_a_delta_has_a_mask_afterwards(quick: World) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1, "c": 1})
    assert masks(quick) == set(), "a base alone needs none"
    second, _ = send(quick, spec, {"a": 2, "b": None})
    third, _ = send(quick, spec, {"c": 3})
    assert [has_mask(quick, version) for version in (second, third)] == [True, True]
    assert entries(quick, spec) == {"a": 2, "c": 3}
    assert entries(quick, spec, second) == {"a": 2, "c": 1}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("FEWEST_ROWS", 5), ("MOST_ROWS", 3), ("_SECONDS_A_ROW", 1000.0)],
    ids=["small", "huge", "slow"],
)
def test_a_table_that_gains_nothing_by_a_mask_has_none(
    quick: World, monkeypatch: pytest.MonkeyPatch, setting: str, value: float
) -> None:
    monkeypatch.setattr(f"{SUPERSEDED}.{setting}", value)
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1, "c": 1})
    send(quick, spec, {"a": 2})
    assert masks(quick) == set()


def test_a_table_with_history_has_no_mask(quick: World) -> None:
    spec = table(quick, partitions=2, history="all")
    for number in range(2):
        send(quick, spec, {"a": number})
    assert masks(quick) == set()


@pytest.mark.parametrize("failing", ["put", "get"])
def test_a_mask_that_can_not_be_stored_or_made_is_reported_and_the_commit_stays(
    quick: World, failing: str
) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    quick.send(spec.name, [("a", 2)])
    reported: list[StageEvent] = []
    broken = faulty(
        quick,
        *[Fault(failing, nth, "lost-before", below="datasets/table/data/") for nth in range(1, 9)],
    )
    report = advance_dataset(
        spec,
        lake=broken,
        systems=quick.systems,
        spark=quick.spark,
        by="test",
        on_stage=reported.append,
    )
    assert report.action == "applied"
    (event,) = (event for event in reported if event.stage == "mask")
    assert event.is_notable
    assert str(report.version) in event.detail
    assert masks(quick) == set()
    assert entries(quick, spec) == {"a": 2, "b": 1}


def test_nothing_that_is_wrong_with_a_mask_fails_the_advance(
    quick: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*what: object) -> None:
        raise MemoryError("no more of it")

    monkeypatch.setattr(f"{SUPERSEDED}.make_mask", broken)
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    quick.send(spec.name, [("a", 2)])
    assert quick.advance(spec).action == "applied"
    assert entries(quick, spec) == {"a": 2, "b": 1}


def test_a_compaction_that_leaves_deltas_makes_the_mask_of_its_version(quick: World) -> None:
    spec = table(quick, partitions=2)
    for number in range(4):
        send(quick, spec, {"a": number, "b": number})
    report = compact_dataset(quick.lake, spec.name, spark=quick.spark, by="test", level="minor")
    assert report.version is not None
    assert has_mask(quick, report.version)
    assert entries(quick, spec) == {"a": 3, "b": 3}


def test_masks_go_with_the_versions_that_they_are_of(quick: World) -> None:
    spec = table(quick, partitions=2)
    for number in range(4):
        send(quick, spec, {"a": number, "b": number})
    compact_dataset(quick.lake, spec.name, spark=quick.spark, by="test", level="major")
    assert len(masks(quick)) == 3
    discard(quick.lake, spec.name, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
    assert masks(quick) == set()
    assert entries(quick, spec) == {"a": 3, "b": 3}


def test_an_erasure_takes_a_mask_for_no_file_that_may_hold_a_key(quick: World) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"b": 2})
    send(quick, spec, {"c": 3})
    assert len(masks(quick)) == 2
    assert find_keys(quick.lake, "table", ["nobody"]).clean
    report = erase_keys(quick.lake, "table", ["a"], reason="request 4711", by="test")
    assert report.complete
    assert entries(quick, spec) == {"b": 2, "c": 3}

    earlier, _ = send(quick, spec, {"d": 4})
    compact_dataset(quick.lake, "table", spark=IN_PROCESS, by="test", level="major")
    assert erase_keys(quick.lake, "table", ["nobody"], reason="request 4712", by="test").complete
    assert entries(quick, spec, earlier) == {"b": 2, "c": 3, "d": 4}, (
        "replaced files with masks can still be read"
    )

"""What a change stream should not hold, or not hold any more, told to who advances, and never
applied by halves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters, OnLostOffset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import BadChangeError, DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import Retention, list_segments
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.assets.changes.changing import VALUES, dataset, send, stream
from tests.assets.conftest import World
from tests.assets.unbounded import facts
from tests.assets.unbounded.facts import BY_HAND, NAME, SCHEMA, content, faulty, table_of
from tests.faulty_store import Crash, Fault

ROWS = Schema.of(id="bigint", op="string", n="int")
STRICT = dataset(changes=OperationColumn(), compaction=BY_HAND)
LENIENT = dataset(
    changes=OperationColumn(), compaction=BY_HAND, on_bad_change=DeadLetters("lake.dead")
)


@pytest.fixture
def quick(world: World) -> World:
    world.spark = IN_PROCESS
    world.stream(NAME, SCHEMA, ["k"], 2)
    return world


def rows(world: World, spec: AdjunctDataset, keys: tuple[int, ...] = (1, 2, 3)) -> dict[int, Any]:
    """Return what the table holds, by key and in order, and by Spark where the world has it."""
    view = world.view(spec)
    held = {key: entry["n"] for key, entry in view.items()}
    assert {key: entry["n"] for key, entry in view.get_all(keys).items()} == held
    if world.spark is not IN_PROCESS:
        assert {row.id: row.n for row in view.frame(world.spark()).collect()} == held
    return held


def dead(world: World) -> list[tuple[int, str]]:
    """Return the dead letters' offsets and reasons, in order."""
    letters = world.streams.read_arrow(world.streams.all_ranges("dead"), ["offset", "reason"])
    return [(letter["offset"], letter["reason"]) for letter in letters.to_pylist()]


# -- changes that can't be read, and null keys


@pytest.mark.parametrize(
    ("bad", "reason"),
    [((2, "explode", 9), "unknown operation 'explode'"), ((None, "c", 9), "null key column 'id'")],
    ids=["unparsable", "null key"],
)
def test_a_bad_change_fails_the_advance_or_is_a_dead_letter_once(
    quick: World, bad: Any, reason: str
) -> None:
    stream(quick, ROWS, [(1, "c", 1)])
    quick.advance(STRICT)
    send(quick, [(2, "c", 2), bad, (3, "c", 3)])
    for _ in range(2):
        with pytest.raises(BadChangeError, match=rf"'table'.*offset 2 of partition 0.*{reason}"):
            quick.advance(STRICT)
        assert rows(quick, STRICT) == {1: 1}
    lake = faulty(quick, Fault("put_if_match", 2, "crash-before"))
    with pytest.raises(Crash):
        quick.advance(LENIENT, lake=lake)
    assert rows(quick, LENIENT) == {1: 1}
    report = quick.advance(LENIENT)
    assert (report.action, report.counters["quarantined"]) == ("applied", 1)
    assert rows(quick, LENIENT) == {1: 1, 2: 2, 3: 3}
    assert dead(quick) == [(2, reason)]
    assert quick.advance(LENIENT).action == "up-to-date"
    manifest = StoredVersions(quick.lake, LENIENT.name).require_manifest()
    assert manifest.counters["quarantined"] == 1


@pytest.mark.spark
def test_unparsable_envelopes_are_dead_letters_and_the_rest_is_applied(sparkling: World) -> None:
    good = json.dumps({"op": "c", "after": {"id": 1, "n": 1}})
    stream(
        sparkling,
        VALUES,
        [(good,), ("no JSON",), ('{"op": "c"}',), ('{"op": "c", "after": {"id": "one"}}',)],
    )
    spec = dataset(
        changes=DebeziumEnvelope("id BIGINT, n INT"), on_bad_change=DeadLetters("lake.dead")
    )
    report = sparkling.advance(spec)
    assert (report.action, report.counters["quarantined"]) == ("bootstrapped", 3)
    assert rows(sparkling, spec) == {1: 1}
    letters = dead(sparkling)
    assert [offset for offset, _ in letters] == [1, 2, 3]
    assert all(reason for _, reason in letters)


# -- deletions


def test_a_deletion_of_an_unknown_key_is_ignored_and_counted(quick: World) -> None:
    stream(quick, ROWS, [(1, "c", 1), (2, "d", None)])
    report = quick.advance(STRICT)
    assert (report.rows, report.counters["read"], report.counters["deleted"]) == (1, 2, 1)
    send(quick, [(3, "d", None)])
    report = quick.advance(STRICT)
    assert (report.counters["read"], report.counters["changes"]) == (1, 1), (
        "of a delta its tombstones are counted"
    )
    assert rows(quick, STRICT) == {1: 1}
    merged = compact_dataset(quick.lake, STRICT.name, spark=quick.spark, by="test", level="major")
    assert merged.counters["deleted"] == 1
    assert rows(quick, STRICT) == {1: 1}


@pytest.mark.spark
@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(False, id="in one commit", marks=pytest.mark.long),
        pytest.param(True, id="in the next one"),
    ],
)
def test_a_key_that_an_update_changes_is_deleted_and_the_new_one_written(
    sparkling: World, apart: bool
) -> None:
    def envelope(lsn: int, op: str, before: Any, after: Any) -> tuple[str]:
        return (json.dumps({"op": op, "before": before, "after": after, "source": {"lsn": lsn}}),)

    one, moved = {"id": 1, "n": 1}, {"id": 2, "n": 7}
    spec = dataset(
        changes=DebeziumEnvelope("id BIGINT, n INT"), order_by="source.lsn", compaction=BY_HAND
    )
    stream(
        sparkling, VALUES, [envelope(1, "c", None, one), envelope(2, "c", None, {"id": 3, "n": 3})]
    )
    if apart:
        sparkling.advance(spec)
        assert rows(sparkling, spec) == {1: 1, 3: 3}
    send(sparkling, [envelope(3, "u", one, moved)])
    sparkling.advance(spec)
    assert rows(sparkling, spec) == {2: 7, 3: 3}
    # again, as a connector that was started anew sends it
    send(sparkling, [envelope(1, "c", None, one)])
    sparkling.advance(spec)
    assert rows(sparkling, spec) == {2: 7, 3: 3}, "older changes that come again bring nothing back"


# -- offsets that are not there, partitions that were not there


def forget_all_but_the_newest(world: World) -> None:
    """Let retention drop all of the stream's segments but one."""
    streams = LakeStreams(world.lake)
    sizes = [
        segment.size for segment in list_segments(streams.state(NAME)[1], streams.files_of(NAME))
    ]
    streams.configure(NAME, retention=Retention(max_bytes=sizes[-1]), compaction=None)
    streams.maintain(NAME)


@pytest.mark.parametrize("policy", ["rebuild", "fail", "serve_stale"])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_changes_that_are_missing_from_the_middle_are_never_passed_over_in_silence(
    quick: World, policy: OnLostOffset, bootstrap: bool
) -> None:
    spec = table_of(on_lost_offset=policy, bootstrap=bootstrap)
    facts.send(quick, [("a", 1, 1), ("b", 1, 1)])
    quick.advance(spec)
    for number in (2, 3, 4):
        facts.send(
            quick,
            [
                ("a", number, number),
                ("c", number, number),
                ("d", number, number),
                ("b", number, number),
            ],
        )
    forget_all_but_the_newest(quick)
    served = content(quick.view(spec))
    if policy == "serve_stale":
        report = quick.advance(spec)
        assert (report.action, content(quick.view(spec))) == ("stale", served)
        assert sum(report.lag.values()) == 12
    elif policy == "fail" or bootstrap:
        expected = OffsetOutOfRangeError if policy == "fail" else DatasetError
        with pytest.raises(expected, match="retention"):
            quick.advance(spec)
        assert content(quick.view(spec)) == served
    else:
        report = quick.advance(spec)
        assert report.decision is not None
        assert report.decision.action == "recreate"
        assert "continues at offset" in report.decision.reason
        assert content(quick.view(spec)) == {"a": 4, "b": 4, "c": 4, "d": 4}


def recreate(world: World, partitions: int = 2) -> None:
    shutil.rmtree(Path(world.lake.url) / world.lake.stream_prefix(NAME))
    world.sequences.clear()
    world.stream(NAME, SCHEMA, ["k"], partitions)


def test_a_stream_that_was_recreated_is_refused(quick: World) -> None:
    facts.send(quick, [("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("d", 1, 1)])
    quick.advance(table_of())
    recreate(quick)
    facts.send(quick, [("a", 2, 2)])
    with pytest.raises(OffsetOutOfRangeError) as caught:
        quick.advance(table_of())
    assert (caught.value.partition, caught.value.offset, caught.value.upcoming) == (0, "3", "1")
    assert content(quick.view(table_of())) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_a_recreated_stream_that_outgrew_the_table_is_not_mixed_with_the_old_one(
    quick: World,
) -> None:
    facts.send(quick, [("a", 1, 1), ("b", 1, 1)])
    quick.advance(table_of())
    recreate(quick)
    for number in range(3):
        facts.send(quick, [(key, number, number) for key in facts.KEYS])
    with pytest.raises(OffsetOutOfRangeError) as caught:
        quick.advance(table_of())
    assert (caught.value.dataset, caught.value.stream) == ("facts", "lake.facts")
    assert content(quick.view(table_of())) == {"a": 1, "b": 1}


def test_a_stream_recreated_with_more_partitions_is_refused_and_what_is_served_stays(
    quick: World,
) -> None:
    facts.send(quick, [("a", 1, 1), ("b", 1, 1)])
    quick.advance(table_of())
    recreate(quick, partitions=3)
    facts.send(quick, [(key, 2, 2) for key in ("a", "b", "c", "d", "e")])
    with pytest.raises(OffsetOutOfRangeError) as caught:
        quick.advance(table_of())
    assert (caught.value.partition, caught.value.offset, caught.value.upcoming) == (0, "1", "0")
    assert content(quick.view(table_of())) == {"a": 1, "b": 1}


def test_a_null_key_is_a_bad_change_in_a_bootstrap_too(quick: World) -> None:
    facts.send(quick, [("a", 1, 1), (None, 1, 1)])
    with pytest.raises(BadChangeError) as failure:
        quick.advance(table_of())
    assert failure.value.dataset == "facts"
    assert StoredVersions(quick.lake, NAME).current() is None
    spec = unbounded_dataset(
        NAME,
        input=f"lake.{NAME}",
        key="k",
        partitions=2,
        on_bad_change=DeadLetters("lake.facts-dead"),
    )
    assert quick.advance(spec).counters["quarantined"] == 1
    assert content(quick.view(spec)) == {"a": 1}

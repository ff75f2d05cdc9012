"""Local tables: what a batch sends is in once, whatever crashes, and a batch that is given up
leaves no trace.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    OwnedBy,
    bounded_dataset,
    local_table,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.generation import ARROW, Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    WritingBatch,
    advance_local,
    require_local_manifest,
    undo_batch,
)
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import SealedVersion, declaration_from_spec
from dagster_adjunct.resources.bucketing.files import BucketFile
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    NullKeyError,
    ProducerConflictError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.servers.s3 import S3Server

COLUMNS = Schema.of(k="string", v="bigint")
Row = tuple[Any, ...]  # (k, v), or (k, None) which deletes it
Held = dict[Any, dict[str, Any]]


def counts(schema: Schema = COLUMNS, partitions: int = 2, **options: Any) -> AdjunctDataset:
    return local_table(
        "counts", OwnedBy("app", schema), key=("k",), partitions=partitions, **options
    )


def rows(*sent: Row) -> pa.Table:
    return pa.table(
        {
            "k": pa.array([row[0] for row in sent], pa.string()),
            "v": pa.array([row[1] for row in sent], pa.int64()),
            "__tombstone": pa.array([row[1] is None for row in sent], pa.bool_()),
            "__offset": pa.array(range(len(sent)), pa.int64()),
        }
    )


def pinned(lake: Lake, spec: AdjunctDataset) -> SealedVersion | None:
    reader = StoredVersions(lake, spec).current()
    return None if reader is None else reader.sealed


def do(
    lake: Lake,
    number: int,
    *sends: list[Row],
    begun: SealedVersion | None,
    spec: AdjunctDataset | None = None,
    by: str = "run",
) -> tuple[bool, list[Held]]:
    """Do a batch; return whether it was in before, and what its joins met after each send."""
    matched = []
    with LocalTableWriter(
        lake, spec or counts(), begun, WritingBatch("app", number, by), ARROW
    ) as writes:
        for sent in sends:
            writes.send(rows(*sent), order_by=("__offset",), partitioned=False)
            matched.append(dict(writes.reader().items()))
        return writes.commit().is_repeated, matched


def held(lake: Lake, spec: AdjunctDataset | None = None) -> dict[str, int]:
    return entries_of(StoredVersions(lake, spec or counts()).require_current())


def entries_of(reader: VersionReader) -> dict[str, int]:
    return {key: entry["v"] for key, entry in reader.items()}


def batch(lake: Lake, number: int, *sends: list[Row], **options: Any) -> tuple[bool, list[Held]]:
    return do(lake, number, *sends, begun=pinned(lake, options.get("spec") or counts()), **options)


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


# -- what a batch does


def test_the_last_record_of_a_key_wins_and_tombstones_delete(lake: Lake) -> None:
    batch(lake, 1, [("a", 1), ("b", 1), ("a", 2), ("c", None)])
    assert held(lake) == {"a": 2, "b": 1}
    batch(lake, 2, [("b", None), ("c", 3)])
    assert held(lake) == {"a": 2, "c": 3}


def test_a_later_batch_wins_whatever_offsets_its_records_have(lake: Lake) -> None:
    batch(lake, 1, [("x", 0), ("y", 0), ("a", 1)])
    batch(lake, 2, [("a", 2)])
    assert held(lake)["a"] == 2


def test_sends_of_one_batch_win_in_their_order_and_what_follows_one_meets_it(lake: Lake) -> None:
    batch(lake, 1, [("a", 0)])
    _, matched = batch(lake, 2, [("a", 1), ("b", 1)], [("a", None), ("b", 2)])
    assert [{key: entry["v"] for key, entry in one.items()} for one in matched] == [
        {"a": 1, "b": 1},
        {"b": 2},
    ]
    assert held(lake) == {"b": 2}


def test_a_batch_without_records_is_in_and_makes_no_version(lake: Lake) -> None:
    batch(lake, 1, [])
    assert held(lake) == {}
    batch(lake, 2, [("a", 1)])
    version = pinned(lake, counts())
    batch(lake, 3, [], [])
    assert pinned(lake, counts()) == version
    assert batch(lake, 3, [], [])[0]


def test_records_without_a_key_are_refused_and_nothing_of_the_batch_is_in(lake: Lake) -> None:
    batch(lake, 1, [("a", 1)])
    with pytest.raises(NullKeyError) as caught:
        batch(lake, 2, [("a", 2)], [(None, 1)])
    assert caught.value.column == "k"
    assert held(lake) == {"a": 1}


# -- once


def test_a_batch_that_comes_again_adds_nothing_and_reads_what_it_was_begun_with(lake: Lake) -> None:
    batch(lake, 1, [("a", 1)])
    begun = pinned(lake, counts())
    assert do(lake, 2, [("b", 2)], begun=begun)[0] is False
    after = pinned(lake, counts())
    again, matched = do(lake, 2, [("b", 2)], begun=begun, by="another run")
    assert (again, matched) == (True, [{"a": {"k": "a", "v": 1}, "b": {"k": "b", "v": 2}}])
    assert pinned(lake, counts()) == after


@pytest.mark.parametrize(
    "other", [[[("b", 3)]], [[("b", None)]], [[]], [], [[("b", 2)], [("c", 1)]]]
)
def test_another_content_of_the_same_batch_is_refused(lake: Lake, other: list[list[Row]]) -> None:
    batch(lake, 1, [("a", 1)])
    begun = pinned(lake, counts())
    do(lake, 2, [("b", 2)], begun=begun)
    with pytest.raises(ProducerConflictError) as failure:
        do(lake, 2, *other, begun=begun)
    assert (failure.value.producer, failure.value.sequence) == ("app", 2)
    assert held(lake) == {"a": 1, "b": 2}


def test_rows_that_nothing_reports_from_others_are_not_taken_for_those_that_are_in(
    lake: Lake,
) -> None:
    def without_digests(*given: Any, **options: Any) -> list[BucketFile]:
        return [replace(file, digest=None) for file in ARROW(*given, **options)]

    with LocalTableWriter(
        lake, counts(), None, WritingBatch("app", 1, "run"), without_digests
    ) as writes:
        writes.send(rows(), order_by=("__offset",), partitioned=False)
        with pytest.raises(AssertionError, match="retries compare digests"):
            writes.send(rows(("a", 1)), order_by=("__offset",), partitioned=False)


def test_an_older_batch_comes_too_late(lake: Lake) -> None:
    begun = pinned(lake, counts())
    batch(lake, 1, [("a", 1)])
    batch(lake, 2, [("a", 2)])
    with pytest.raises(CommitConflictError) as failure:
        do(lake, 1, [("a", 1)], begun=begun)
    assert failure.value.application == "app"
    assert held(lake) == {"a": 2}


@pytest.mark.lengthy
def test_two_runs_of_one_batch_at_once_leave_it_once_whoever_comes_between() -> None:
    for nth in range(1, 60):
        lake = lake_in(InMemoryStore())
        batch(lake, 1, [("a", 1)])
        begun, other = pinned(lake, counts()), []

        def meanwhile(lake: Lake = lake, begun: Any = begun, other: list[bool] = other) -> None:
            other.append(do(lake, 2, [("a", 2), ("b", 2)], begun=begun)[0])

        store = FaultyStore(lake.store, [Fault("*", nth, "meanwhile", meanwhile)])
        mine = do(Lake(store, lake.id), 2, [("a", 2), ("b", 2)], begun=begun)[0]
        assert held(lake) == {"a": 2, "b": 2}
        if not other:
            assert nth > 8
            return
        assert sorted([mine, *other]) == [False, True]
    pytest.fail("the batch never ended")


@pytest.mark.lengthy
def test_a_crash_at_any_request_and_the_batch_again_leave_each_change_once(lake: Lake) -> None:
    for nth in range(1, 60):
        lake = lake_in(InMemoryStore())
        batch(lake, 1, [("a", 1), ("b", 1)])
        begun = pinned(lake, counts())
        sends: list[list[Row]] = [[("a", 2), ("c", 2)], [("b", None)]]
        died = False
        try:
            do(
                Lake(FaultyStore(lake.store, [Fault("*", nth, "crash-after")]), lake.id),
                2,
                *sends,
                begun=begun,
            )
        except Crash:
            died = True
        _, matched = do(lake, 2, *sends, begun=begun)
        assert matched[0] == {
            key: {"k": key, "v": v} for key, v in {"a": 2, "b": 1, "c": 2}.items()
        }
        assert held(lake) == {"a": 2, "c": 2}
        if not died:
            assert nth > 8
            return
    pytest.fail("the batch never ended")


# -- beside it


def test_a_compaction_between_a_crash_and_the_batch_again_changes_nothing(lake: Lake) -> None:
    for number in range(1, 5):
        batch(lake, number, [("a", number), (f"k{number}", number)])
    begun = pinned(lake, counts())
    assert begun is not None
    do(lake, 5, [("a", 5)], begun=begun)
    assert (
        compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major").action
        == "compacted"
    )
    again, matched = do(lake, 5, [("a", 5)], begun=begun)
    assert again
    assert matched[0]["a"]["v"] == 5
    batch(lake, 6, [("k1", None)])
    assert held(lake) == {"a": 5, "k2": 2, "k3": 3, "k4": 4}


def test_a_compaction_while_a_batch_works_is_gone_on_from(lake: Lake) -> None:
    for number in range(1, 4):
        batch(lake, number, [("a", number), (f"k{number}", number)])
    begun = pinned(lake, counts())
    with LocalTableWriter(lake, counts(), begun, WritingBatch("app", 4, "run"), ARROW) as writes:
        writes.send(rows(("a", 4), ("k1", None)), order_by=("__offset",), partitioned=False)
        compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
        writes.commit()
    assert held(lake) == {"a": 4, "k2": 2, "k3": 3}


def test_advancing_compacts_when_it_is_due_and_changes_nothing_else(lake: Lake) -> None:
    spec = counts(compaction=DeltaCompaction(deltas=2, fraction=0.1))
    context = Runtime(lake, {}, IN_PROCESS, "me")
    assert advance_local(context, spec).version is None
    for number in range(1, 4):
        batch(lake, number, [("a", number), ("b", number)], spec=spec)
    report = advance_local(context, spec)
    assert report.sealed == (report.version,)
    assert held(lake, spec) == {"a": 3, "b": 3}
    assert advance_local(context, spec).sealed == ()


def test_what_an_open_batch_was_begun_with_survives_compaction_and_discard(lake: Lake) -> None:
    policy = DiscardPolicy(keep=1, grace=timedelta(0))
    for number in range(1, 4):
        batch(lake, number, [("a", number)])
    begun = pinned(lake, counts())
    assert begun is not None
    do(lake, 4, [("b", 4)], begun=begun)
    compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
    discard(lake, "counts", policy, by="me", roots=lambda: {begun.id: "an open batch"})
    assert entries_of(StoredVersions(lake, counts()).version(begun.id)) == {"a": 3}
    assert do(lake, 4, [("b", 4)], begun=begun)[0]
    discard(lake, "counts", policy, by="me", roots=dict)
    assert held(lake) == {"a": 3, "b": 4}


# -- given up


def test_a_batch_that_was_given_up_is_taken_out_and_comes_under_another_number(lake: Lake) -> None:
    context = Runtime(lake, {}, IN_PROCESS, "me")
    batch(lake, 1, [("a", 1)])
    begun = pinned(lake, counts())
    batch(lake, 2, [("a", 2), ("b", 2)])
    compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
    for _ in range(2):
        undo_batch(context, "counts", "app", 2, declared=counts())
        assert held(lake) == {"a": 1}
    with pytest.raises(CommitConflictError) as failure:
        do(lake, 2, [("a", 2), ("b", 2)], begun=begun)
    assert failure.value.application == "app"
    batch(lake, 3, [("b", 3)])
    undo_batch(context, "counts", "app", 2, declared=counts())
    assert held(lake) == {"a": 1, "b": 3}
    compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
    discard(lake, "counts", DiscardPolicy(keep=1, grace=timedelta(0)), by="me", roots=dict)
    assert held(lake) == {"a": 1, "b": 3}


def test_the_first_batch_can_be_given_up_and_one_that_has_written_nothing(lake: Lake) -> None:
    context = Runtime(lake, {}, IN_PROCESS, "me")
    undo_batch(context, "counts", "app", 1, declared=counts())
    with pytest.raises(CommitConflictError) as failure:
        do(lake, 1, [("a", 1)], begun=None)
    assert failure.value.application == "app"
    batch(lake, 2, [("a", 2)])
    undo_batch(context, "counts", "app", 2, declared=counts())
    assert held(lake) == {}
    batch(lake, 3, [("a", 3)])
    assert held(lake) == {"a": 3}


def test_a_batch_of_newer_code_can_be_given_up_and_the_columns_are_those_of_before(
    lake: Lake,
) -> None:
    context = Runtime(lake, {}, IN_PROCESS, "me")
    wider = counts(Schema.of(k="string", v="bigint", w="bigint"))
    for number, before in ((1, {}), (3, {"a": 2})):
        sent = rows(("a", number), ("b", number)).append_column("w", pa.array([0, 0], pa.int64()))
        with LocalTableWriter(
            lake, wider, pinned(lake, wider), WritingBatch("app", number, "run"), ARROW
        ) as writes:
            writes.send(sent, order_by=("__offset",), partitioned=False)
            writes.commit()
        undo_batch(context, "counts", "app", number, declared=counts())
        assert held(lake) == before
        served = StoredVersions(lake, counts()).require_current()
        assert served.schema == COLUMNS, "the code of before reads it, and goes on"
        batch(lake, number + 1, [("a", number + 1)])
    assert held(lake) == {"a": 4}


def test_what_another_application_keeps_under_the_name_is_left_alone(lake: Lake) -> None:
    context = Runtime(lake, {}, IN_PROCESS, "me")
    theirs = local_table("counts", OwnedBy("other", COLUMNS), key=("k",), partitions=2)
    with LocalTableWriter(lake, theirs, None, WritingBatch("other", 7, "run"), ARROW) as writes:
        writes.send(rows(("a", 1)), order_by=("__offset",), partitioned=False)
        writes.commit()
    before = DatasetLog(lake, "counts").read()
    for number in (7, 9):
        assert undo_batch(context, "counts", "app", number, declared=counts()) is None
    assert DatasetLog(lake, "counts").read() == before


# -- columns


def test_added_and_widened_columns_are_read_over_what_was_there(lake: Lake) -> None:
    narrow = counts(Schema.of(k="string", v="bigint"))
    batch(lake, 1, [("a", 1)], spec=narrow)
    wide = counts(Schema.of(k="string", v="bigint", more="string"))
    version = pinned(lake, wide)
    with LocalTableWriter(lake, wide, version, WritingBatch("app", 2, "run"), ARROW) as writes:
        sent = rows(("b", 2)).append_column("more", pa.array(["new"]))
        writes.send(sent, order_by=("__offset",), partitioned=False)
        assert writes.reader().get("a") == {"k": "a", "v": 1, "more": None}
        writes.commit()
    assert StoredVersions(lake, wide).require_current().get("b") == {
        "k": "b",
        "v": 2,
        "more": "new",
    }
    with pytest.raises(DatasetError) as failure:
        advance_local(Runtime(lake, {}, IN_PROCESS, "me"), narrow)
    assert failure.value.dataset == "counts"


def test_a_batch_that_was_begun_without_a_table_adds_nothing_to_one_that_has_entries(
    lake: Lake,
) -> None:
    batch(lake, 1, [("a", 1)])
    with pytest.raises(DatasetError) as failure:
        do(lake, 2, [("a", None)], begun=None)
    assert failure.value.dataset == "counts"
    assert held(lake) == {"a": 1}


def test_a_dataset_in_versions_under_the_name_is_reported_as_another_declaration() -> None:
    bounded = bounded_dataset("counts", input="lake.counts", key="k", partitions=2)
    stored = BoundedManifest(
        name="counts", declaration=declaration_from_spec(bounded, COLUMNS), offsets={}
    )
    with pytest.raises(DatasetError) as failure:
        require_local_manifest(stored, counts())
    assert failure.value.dataset == "counts"


def test_another_owner_or_another_key_is_another_table(lake: Lake) -> None:
    batch(lake, 1, [("a", 1)])
    theirs = local_table("counts", OwnedBy("other", COLUMNS), key=("k",), partitions=2)
    with pytest.raises(DatasetError, match="of that name, made from application app"):
        do(lake, 2, [("a", 2)], begun=None, spec=theirs)
    with pytest.raises(ConfigurationError) as caught:
        local_table("counts", OwnedBy("app", Schema.of(v="double")), key=("v",), partitions=2)
    assert (caught.value.dataset, caught.value.argument) == ("counts", "key")


# -- on S3


@pytest.mark.server
def test_on_a_real_s3_server_batches_that_die_are_in_once(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    lake = open_lake(versitygw.url())
    expected: dict[str, int] = {}
    for number in range(1, 9):
        begun, sent = pinned(lake, counts()), [("a", number), (f"k{number}", number)]
        faults = [Fault("*", 2 * number, "crash-after")]
        with suppress(Crash):
            do(Lake(FaultyStore(lake.store, faults), lake.id), number, sent, begun=begun)
        do(lake, number, sent, begun=begun)
        expected |= dict(sent)
        assert held(lake) == expected
    compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
    assert held(lake) == expected


# -- a history


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
def test_any_history_with_crashes_is_what_a_dictionary_says(seed: int) -> None:
    chance, lake = random.Random(seed), lake_in(InMemoryStore())
    context = Runtime(lake, {}, IN_PROCESS, "me")
    expected: dict[str, int] = {}
    for number in range(1, 26):
        begun = pinned(lake, counts())
        sends = [
            [
                (chance.choice("abcdef"), chance.choice([None, chance.randrange(99)]))
                for _ in range(chance.randrange(5))
            ]
            for _ in range(chance.randrange(3))
        ]
        for _ in range(chance.randrange(3)):
            faults = [
                Fault("*", chance.randrange(1, 30), chance.choice(["crash-before", "crash-after"]))
            ]
            with suppress(Crash):
                do(Lake(FaultyStore(lake.store, faults), lake.id), number, *sends, begun=begun)
            if chance.random() < 0.3:
                (
                    compact_dataset(lake, "counts", spark=IN_PROCESS, by="me", level="major")
                    if begun
                    else None
                )
            if chance.random() < 0.3 and begun is not None:
                roots = {begun.id: "an open batch"}
                discard(
                    lake,
                    "counts",
                    DiscardPolicy(1, timedelta(0)),
                    by="me",
                    roots=lambda roots=roots: roots,
                )
        if chance.random() < 0.2:
            undo_batch(context, "counts", "app", number, declared=counts())
        else:
            do(lake, number, *sends, begun=begun)
            for key, value in (row for sent in sends for row in sent):
                if value is None:
                    expected.pop(key, None)
                else:
                    expected[key] = value
        assert held(lake) == expected

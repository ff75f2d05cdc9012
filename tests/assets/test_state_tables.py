"""Tables of state: rows are there until the watermark has reached their time, and generations go
whole.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.generation import ARROW, Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.rebucketing import repartition_table
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    StateSpec,
    WritingBatch,
    create_state,
    declare_state_dataset,
    maintain_state,
    undo_batch,
    validate_state,
)
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.faulty_store import Crash, Fault, FaultyStore

# key, value (None deletes it), and the minute at which it is gone
Row = tuple[str, int | None, int]
START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = StateSpec(Schema.of(k="string", v="bigint", until="timestamp"), ("k",), ("k",), 2, "until")


def at(minute: int) -> datetime:
    return START + timedelta(minutes=minute)


def dataset(spec: StateSpec = SPEC) -> AdjunctDataset:
    return declare_state_dataset("app", "seen", spec)


def rows(sent: list[Row]) -> pa.Table:
    return pa.table(
        {
            "k": pa.array([row[0] for row in sent], pa.string()),
            "v": pa.array([row[1] for row in sent], pa.int64()),
            "until": pa.array([at(row[2]) for row in sent], pa.timestamp("us", "UTC")),
            "__tombstone": pa.array([row[1] is None for row in sent], pa.bool_()),
        }
    )


def pinned(lake: Lake) -> SealedVersion | None:
    reader = StoredVersions(lake, "app-seen").current()
    return None if reader is None else reader.sealed


def do(
    lake: Lake, number: int, sent: list[Row], begun: SealedVersion | None, watermark: int
) -> None:
    with LocalTableWriter(
        lake, dataset(), begun, WritingBatch("app", number, "run"), ARROW
    ) as writes:
        writes.send(rows(sent), order_by=(), partitioned=False)
        writes.commit(at(watermark))


def batch(lake: Lake, number: int, sent: list[Row], watermark: int) -> None:
    do(lake, number, sent, pinned(lake), watermark)


def held(lake: Lake, watermark: int) -> dict[str, int]:
    """Return what a batch meets that begins at this watermark."""
    reader = StoredVersions(lake, "app-seen").require_current()
    return {key: entry["v"] for key, entry in reader.items() if entry["until"] > at(watermark)}


def generations(lake: Lake) -> list[int]:
    version = pinned(lake)
    return (
        []
        if version is None
        else [generation.id for generation in version.generations if generation.files]
    )


def writing(lake: Lake) -> Runtime:
    return Runtime(lake, {}, IN_PROCESS, "run")


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


def test_a_generation_is_dropped_once_the_watermark_reaches_its_last_row(lake: Lake) -> None:
    batch(lake, 1, [("a", 1, 10), ("b", 1, 20)], 0)
    batch(lake, 2, [("c", 2, 15)], 5)
    batch(lake, 3, [("d", 3, 40)], 14)
    assert generations(lake) == [1, 2, 3]
    folders = {generation.id: generation.folder for generation in pinned(lake).generations}  # type: ignore[union-attr]
    batch(lake, 4, [], 15)
    assert generations(lake) == [1, 3]
    assert held(lake, 15) == {"b": 1, "d": 3}
    batch(lake, 5, [], 19)
    assert generations(lake) == [1, 3]
    batch(lake, 6, [], 20)
    assert [generation.folder for generation in pinned(lake).generations] == [folders[3]]  # type: ignore[union-attr]
    batch(lake, 7, [], 40)
    assert held(lake, 40) == {}
    batch(lake, 8, [("e", 1, 50)], 41)
    assert held(lake, 41) == {"e": 1}


def test_a_generation_is_dropped_after_the_table_was_repartitioned(lake: Lake) -> None:
    batch(lake, 1, [("a", 1, 10), ("b", 1, 20), ("c", None, 30)], 0)
    repartition_table(lake, "app-seen", 3, reason="more machines", by="me")
    with LocalTableWriter(
        lake,
        dataset(replace(SPEC, partitions=3)),
        pinned(lake),
        WritingBatch("app", 2, "run"),
        ARROW,
    ) as writes:
        writes.send(rows([("d", 2, 40)]), order_by=(), partitioned=False)
        writes.commit(at(30))
    assert held(lake, 0) == {"d": 2}


def test_expired_rows_are_deleted_and_the_version_that_a_batch_began_with_stays(lake: Lake) -> None:
    batch(lake, 1, [("a", 1, 10)], 0)
    begun = pinned(lake)
    assert begun is not None
    do(lake, 2, [("b", 2, 90)], begun, 10)
    discard(lake, "app-seen", by="test", roots=lambda: {begun.id: "batch 2 is open"})
    do(lake, 2, [("b", 2, 90)], begun, 10)  # again, as after a crash before its end
    assert held(lake, 10) == {"b": 2}
    discard(lake, "app-seen", by="test", roots=dict)
    used = {generation.folder for generation in pinned(lake).generations}  # type: ignore[union-attr]
    stored = {
        item.key.rsplit("/", 1)[0] for item in lake.store.list("") if item.key.endswith(".parquet")
    }
    assert stored == used


def test_small_generations_are_merged_without_what_has_expired(lake: Lake) -> None:
    for number in range(1, 9):
        batch(lake, number, [(f"k{number}", number, 5 * number), (f"l{number}", 0, 100)], number)
    before = held(lake, 8)
    maintain_state(writing(lake), "app-seen")
    assert len(generations(lake)) < 8
    assert held(lake, 8) == before
    rows_there = sum(generation.rows for generation in pinned(lake).generations)  # type: ignore[union-attr]
    assert rows_there == 15  # k1 was gone at 8
    batch(lake, 9, [], 100)
    assert generations(lake) == [], "what is merged still tells when its last row goes"


def test_a_table_of_its_name_that_is_no_state_is_left_alone(lake: Lake) -> None:
    other = replace(dataset(), input=replace(dataset().input, expires=None))
    for number in range(1, 10):
        with LocalTableWriter(
            lake, other, pinned(lake), WritingBatch("app", number, "run"), ARROW
        ) as writes:
            writes.send(rows([(f"k{number}", number, 100)]), order_by=(), partitioned=False)
            writes.commit(None)
    before = pinned(lake)
    assert not maintain_state(writing(lake), "app-seen")
    assert pinned(lake) == before
    assert len(generations(lake)) == 9


def test_a_batch_that_was_given_up_leaves_what_was_there_before_also_what_it_dropped(
    lake: Lake,
) -> None:
    batch(lake, 1, [("a", 1, 10)], 0)
    batch(lake, 2, [("b", 2, 90)], 10)
    assert held(lake, 0) == {"b": 2}
    undo_batch(writing(lake), "app-seen", "app", 2)
    assert held(lake, 0) == {"a": 1}
    undo_batch(writing(lake), "no-such-state", "app", 2)
    batch(lake, 3, [("b", 3, 90)], 10)
    assert held(lake, 0) == {"b": 3}


def test_a_created_state_table_rejects_the_first_commit_of_an_abandoned_batch(lake: Lake) -> None:
    create_state(writing(lake), dataset())
    create_state(writing(lake), dataset())
    assert held(lake, 0) == {}
    # the first has sent rows when it is given up, the second sends them afterwards
    for number in (1, 2):
        with LocalTableWriter(
            lake, dataset(), None, WritingBatch("app", number, "dead"), ARROW
        ) as writes:
            if number == 1:
                writes.send(rows([("a", 1, 10)]), order_by=(), partitioned=False)
            undo_batch(writing(lake), "app-seen", "app", number)
            if number == 2:
                writes.send(rows([("a", 1, 10)]), order_by=(), partitioned=False)
            with pytest.raises(CommitConflictError) as caught:
                writes.commit(at(0))
            assert (caught.value.application, caught.value.dataset) == ("app", "app-seen")
    assert held(lake, 0) == {}
    batch(lake, 3, [("b", 2, 90)], 0)
    assert held(lake, 0) == {"b": 2}


def test_a_table_that_dies_while_it_is_begun_is_begun_by_the_next_run(lake: Lake) -> None:
    for number in range(12):
        with suppress(Crash):
            fault = Fault("*", number // 2 + 1, "crash-before" if number % 2 else "crash-after")
            store = FaultyStore(lake.store, [fault])
            create_state(writing(Lake(store, lake.id)), dataset())
    create_state(writing(lake), dataset())
    batch(lake, 1, [("a", 1, 10)], 0)
    create_state(writing(lake), dataset())
    assert held(lake, 0) == {"a": 1}


def test_other_columns_and_partitions_are_refused_with_what_to_do(lake: Lake) -> None:
    validate_state(lake, dataset())
    batch(lake, 1, [("a", 1, 10)], 0)
    more = Schema.of(k="string", v="bigint", until="timestamp", more="int")
    validate_state(lake, dataset(StateSpec(more, ("k",), ("k",), 2, "until")))
    with pytest.raises(DatasetError, match="partitions is 3, was 2"):
        validate_state(lake, dataset(StateSpec(SPEC.schema, ("k",), ("k",), 3, "until")))
    with pytest.raises(DatasetError, match="adjunct dataset delete app-seen"):
        validate_state(
            lake,
            dataset(
                StateSpec(Schema.of(k="string", until="timestamp"), ("k",), ("k",), 2, "until")
            ),
        )


def test_what_was_kept_for_another_operator_is_refused(lake: Lake) -> None:
    batch(lake, 1, [("a", 1, 10)], 0)
    with pytest.raises(
        DatasetError, match="kept for operator '', and the declared one is 'within a day'"
    ):
        validate_state(lake, dataset(replace(SPEC, kept_for="within a day")))


def test_what_is_no_state_of_the_application_is_left_alone(lake: Lake) -> None:
    create_state(writing(lake), declare_state_dataset("app-last", "seen", SPEC))
    with pytest.raises(
        DatasetError, match="name, which is not state of application 'app'"
    ) as caught:
        validate_state(
            lake, declare_state_dataset("app", "last-seen", replace(SPEC, kept_for="within a day"))
        )
    assert "delete" not in str(caught.value)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
def test_whatever_dies_and_is_merged_what_has_not_expired_is_what_a_dictionary_has(
    seed: int,
) -> None:
    chance = random.Random(seed)
    lake, watermark = lake_in(InMemoryStore()), 0
    wanted: dict[str, tuple[int | None, int]] = {}
    create_state(writing(lake), dataset())
    for number in range(1, 40):
        begun = pinned(lake)
        sent: dict[str, Row] = {}
        for _ in range(chance.randrange(5)):
            key = chance.choice("abcdefgh")
            until = max(wanted.get(key, (0, 0))[1], watermark + chance.randrange(1, 12))
            sent[key] = (key, chance.choice([None, chance.randrange(99)]), until)
        after = watermark + chance.randrange(4)
        if chance.random() < 0.4:
            store = FaultyStore(
                lake.store, [Fault("*", chance.randrange(1, 30), chance.choice(["crash-after"]))]
            )
            with suppress(Crash):
                do(Lake(store, lake.id), number, list(sent.values()), begun, after)
        if chance.random() < 0.2:
            undo_batch(writing(lake), "app-seen", "app", number)
            continue
        do(lake, number, list(sent.values()), begun, after)
        wanted |= {key: row[1:] for key, row in sent.items()}
        watermark = after
        live = {key: value for key, (value, until) in wanted.items() if until > watermark}
        assert held(lake, watermark) == {
            key: value for key, value in live.items() if value is not None
        }
        if chance.random() < 0.5:
            maintain_state(writing(lake), "app-seen")
        if chance.random() < 0.3:
            discard(lake, "app-seen", by="test", roots=dict)
        assert held(lake, watermark) == {
            key: value for key, value in live.items() if value is not None
        }
        assert len(generations(lake)) <= 9


def test_state_is_a_dataset_that_says_whose_it_is(lake: Lake) -> None:
    batch(lake, 1, [("a", 1, 10)], 0)
    manifest: Any = as_unbounded(StoredVersions(lake, "app-seen").require_manifest())
    assert (manifest.declaration.owner, manifest.declaration.expires) == ("app", "until")
    assert manifest.written.watermark == at(0)

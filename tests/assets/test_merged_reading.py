"""Base and deltas read as one frame, against a dictionary: every key type, both orders, any
number of deltas.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.reading.superseded import can_have_mask, mask_key, try_to_write_mask
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    SealedVersion,
    StoredPositions,
    build_layout,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
Key = tuple[Any, ...]

TEXT = Schema.of(k="string", v="int")
EVERY_TYPE = Schema.of(
    s="string", b="bigint", d="date", t="timestamp", m="decimal(9,2)", x="binary", v="int"
)
BEGIN = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Change:
    """One stored row; `value` None deletes."""

    key: Key
    position: int
    value: int | None


def texts(number: int) -> Key:
    return (f"é{number}" * (number % 4 + 1),)


def typed(number: int) -> Key:
    day, instant = dt.date(2000, 1, 1 + number % 3), BEGIN + dt.timedelta(microseconds=number)
    return (
        f"s{number % 5}",
        number * 10**10,
        day,
        instant,
        Decimal(number) / 4,
        bytes([0, number % 7, 255]),
    )


def version(
    lake: Lake,
    schema: Schema,
    generations: Sequence[Sequence[Change]],
    *,
    partition_by: Sequence[str] | None = None,
    partitions: int | None = 3,
    order_by: str | None = None,
) -> VersionReader:
    """Store these generations, the base first, and return a view of them."""
    key = schema.names[:-1]
    bucketed = () if partitions is None else tuple(partition_by or key)
    layout = build_layout(schema, key, bucketed, partitions, StoredPositions())
    made = []
    for number, changes in enumerate(generations, 1):
        folder = f"datasets/merged/data/{id(generations)}-{number}"
        table = pa.table(
            {
                **{name: [change.key[i] for change in changes] for i, name in enumerate(key)},
                schema.names[-1]: [change.value for change in changes],
                POSITION: [change.position for change in changes],
                TOMBSTONE: [change.value is None for change in changes],
            },
            schema=layout.arrow_schema(),
        ).sort_by([(name, "ascending") for name in key])
        # As `write_generation` does: by offset the first one has no need of its tombstones.
        options = WriteOptions(
            "a test", last_per_key=True, drop_tombstones=order_by is None and number == 1
        )
        files = [
            file
            for file in write_arrow_buckets(table, lake.store, folder, layout, options)
            if file.rows
        ]
        made.append(Generation(number, folder, tuple(files)))
    sealed = SealedVersion(
        id="v000001-test",
        number=1,
        name=None,
        sealed_at=BEGIN,
        columns=schema,
        key=key,
        partition_by=bucketed,
        partitions=partitions,
        positioned=True,
        order_by=order_by,
        generations=tuple(made),
        offsets={},
    )
    return VersionReader(lake.store, "merged", sealed)


def wanted(generations: Sequence[Sequence[Change]]) -> dict[Key, int]:
    newest: dict[Key, Change] = {}
    for changes in generations:
        for change in changes:
            if change.key not in newest or change.position >= newest[change.key].position:
                newest[change.key] = change
    return {key: change.value for key, change in newest.items() if change.value is not None}


def entries_in(frame: DataFrame) -> dict[Key, int]:
    rows = [tuple(_plain(value) for value in row) for row in frame.collect()]
    keys = {row[:-1]: row[-1] for row in rows}
    assert len(keys) == len(rows), "a key stands twice in the frame"
    return keys


def _plain(value: Any) -> Any:
    # Spark gives them in the session's time zone, without saying so
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC)
    return bytes(value) if isinstance(value, bytearray) else value


def history(chance: random.Random, key_of: Any, *, by_column: bool) -> list[list[Change]]:
    """Return a base and deltas; by a column, positions are any and the base keeps deletions."""
    generations: list[list[Change]] = []
    position = 0
    for number in range(chance.randint(1, 5)):
        changes = []
        for key in chance.sample(range(20), chance.randint(0, 20)):
            position += 1
            dead = chance.random() < 0.3 and (by_column or number > 0)
            at = chance.randint(1, 30) if by_column else position
            changes.append(Change(key_of(key), at, None if dead else position))
        generations.append(changes)
    return generations


by_offset_at_length = pytest.mark.parametrize(
    "by_column",
    [
        pytest.param(False, id="by offset", marks=pytest.mark.long),
        pytest.param(True, id="by a column"),
    ],
)
LAYOUTS: dict[str, tuple[Schema, Any, dict[str, Any]]] = {
    "by its key": (TEXT, texts, {}),
    "one copy": (TEXT, texts, {"partitions": None}),
    "every type, by two of the columns": (EVERY_TYPE, typed, {"partition_by": ["m", "s"]}),
    "every type, one copy": (EVERY_TYPE, typed, {"partitions": None}),
}


@pytest.fixture
def lake(tmp_path: Any) -> Lake:
    return open_lake(tmp_path / "lake")


WAYS = {
    "few deltas": ("version_reader._BROADCAST_ROWS", 2_000_000),
    "many deltas": ("version_reader._BROADCAST_ROWS", 0),
    "a mask": ("superseded.FEWEST_ROWS", 0),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the deltas are merged."""
    setting, value = WAYS[request.param]
    monkeypatch.setattr(f"dagster_adjunct.assets.reading.{setting}", value)
    return str(request.param)


def masked(view: VersionReader) -> VersionReader:
    assert not try_to_write_mask(view.store, view.dataset, view.sealed)
    return view


@by_offset_at_length
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "one copy")) for name in LAYOUTS],
)
def test_the_frame_is_the_newest_row_of_each_key(
    lake: Lake, spark: SparkSession, layout: str, by_column: bool, way: str
) -> None:
    schema, key_of, options = LAYOUTS[layout]
    chance = random.Random(f"{layout} {by_column}")
    for _ in range(2):
        generations = history(chance, key_of, by_column=by_column)
        view = version(lake, schema, generations, order_by=("v",) if by_column else None, **options)
        if way == "a mask" and can_have_mask(view.sealed):
            masked(view)
        assert entries_in(view.frame(spark)) == wanted(generations)
        by_key = {
            key if isinstance(key, tuple) else (key,): entry["v"] for key, entry in view.items()
        }
        assert by_key == wanted(generations)


def test_a_change_that_is_older_than_the_base_does_not_win_by_a_column(
    lake: Lake, spark: SparkSession
) -> None:
    base = [Change(("a",), 10, 1), Change(("b",), 10, None), Change(("c",), 10, 3)]
    late = [Change(("a",), 5, 7), Change(("b",), 5, 7), Change(("c",), 10, 8), Change(("d",), 5, 9)]
    view = version(lake, TEXT, [base, late], order_by=("v",))
    assert entries_in(view.frame(spark)) == {("a",): 1, ("c",): 8, ("d",): 9}


def test_a_base_alone_hides_the_deletions_that_it_keeps(lake: Lake, spark: SparkSession) -> None:
    view = version(lake, TEXT, [[Change(("a",), 1, 1), Change(("b",), 2, None)]], order_by=("v",))
    assert entries_in(view.frame(spark)) == {("a",): 1}


def test_a_base_that_came_from_a_delta_hides_its_deletions_too(
    lake: Lake, spark: SparkSession
) -> None:
    generations = [
        [Change(("gone",), 1, 1)],
        [Change(("a",), 2, None), Change(("b",), 3, 3)],
        [Change(("c",), 4, 4)],
    ]
    sealed = version(lake, TEXT, generations).sealed
    erased = sealed.model_copy(update={"generations": sealed.generations[1:]})
    assert entries_in(VersionReader(lake.store, "merged", erased).frame(spark)) == {
        ("b",): 3,
        ("c",): 4,
    }


def test_deletions_alone_leave_nothing(lake: Lake, spark: SparkSession) -> None:
    view = version(lake, TEXT, [[], [Change(("a",), 1, None)], [Change(("b",), 2, None)]])
    assert entries_in(view.frame(spark)) == {}


GENERATIONS = [
    [Change(texts(number), number, number) for number in range(50)],
    [Change(texts(number), 100 + number, None if number % 2 else -number) for number in range(10)],
    [Change(texts(number), 200 + number, -number) for number in range(60, 64)],
]


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def scans(frame: DataFrame) -> list[str]:
    return [line for line in plan_of(frame).splitlines() if "FileScan" in line]


def columns_read(scan: str) -> set[str]:
    """Return the hidden columns that a scan reads from files."""
    return {name for name in (POSITION, TOMBSTONE) if name in scan.split("ReadSchema")[1]}


@by_offset_at_length
def test_a_join_on_the_key_shuffles_nothing_of_the_merged_frame(
    lake: Lake, spark: SparkSession, by_column: bool, way: str
) -> None:
    view = version(lake, TEXT, GENERATIONS, order_by=("v",) if by_column else None)
    frame = (masked(view) if way == "a mask" else view).frame(spark)
    stream = version(
        lake, TEXT, [[Change(texts(number), number, number) for number in range(5, 70)]]
    ).frame(spark)
    joined = stream.withColumnRenamed("v", "n").join(frame.hint("merge"), "k", "left")
    plan = plan_of(joined)
    assert "Exchange hashpartitioning" not in plan
    assert ("BroadcastHashJoin" in plan) == (way == "few deltas")
    entries = wanted(GENERATIONS)
    assert {row.k: row.v for row in joined.collect()} == {
        texts(number)[0]: entries.get(texts(number)) for number in range(5, 70)
    }


def test_positions_and_deletions_are_read_of_the_deltas_only(
    lake: Lake, spark: SparkSession
) -> None:
    whole, deltas = scans(version(lake, TEXT, GENERATIONS).frame(spark))
    assert not {POSITION, TOMBSTONE} & columns_read(whole)
    assert {POSITION, TOMBSTONE} <= columns_read(deltas)
    assert "isnotnull(__gen" in deltas, "the base is left out of what is broadcast"


@pytest.fixture
def small_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_adjunct.assets.reading.superseded.FEWEST_ROWS", 0)


@pytest.mark.usefixtures("small_masks")
def test_a_masked_frame_reads_no_positions_and_joins_nothing(
    lake: Lake, spark: SparkSession
) -> None:
    frame = masked(version(lake, TEXT, GENERATIONS)).frame(spark)
    (scan,) = scans(frame)
    assert not {POSITION, TOMBSTONE} & columns_read(scan)
    assert "Join" not in plan_of(frame)


TORN = {
    "missing": lambda mask, others: None,
    "empty": lambda mask, others: b"",
    "cut": lambda mask, others: mask[:-1],
    "changed": lambda mask, others: mask[:-9] + bytes([mask[-9] ^ 1]) + mask[-8:],
    "something else": lambda mask, others: b"{}" * 40,
    "of other files": lambda mask, others: others,
}


@pytest.mark.usefixtures("small_masks")
@pytest.mark.parametrize("harm", TORN)
def test_a_version_is_read_rightly_without_its_mask(
    lake: Lake, spark: SparkSession, harm: str
) -> None:
    """Without it, or with one that is not of these files: of a version with other rows under the
    same numbers.
    """
    other = masked(version(lake, TEXT, [GENERATIONS[0][5:], GENERATIONS[1], GENERATIONS[2]]))
    view = masked(version(lake, TEXT, GENERATIONS))
    key = mask_key(view.sealed)
    left = TORN[harm](lake.store.get(key).data, lake.store.get(mask_key(other.sealed)).data)
    lake.store.delete(key)
    if left is not None:
        lake.store.put(key, left)
    assert entries_in(VersionReader(lake.store, "merged", view.sealed).frame(spark)) == wanted(
        GENERATIONS
    )


@pytest.mark.usefixtures("small_masks")
def test_a_mask_drops_the_right_rows_where_tasks_read_several_buckets(
    lake: Lake, spark: SparkSession
) -> None:
    view = masked(version(lake, TEXT, GENERATIONS, partitions=7))
    assert entries_in(view.frame(spark).coalesce(2)) == wanted(GENERATIONS)
    spark.conf.set("spark.sql.sources.bucketing.enabled", "false")
    try:
        assert entries_in(VersionReader(lake.store, "merged", view.sealed).frame(spark)) == wanted(
            GENERATIONS
        )
    finally:
        spark.conf.unset("spark.sql.sources.bucketing.enabled")


@pytest.mark.usefixtures("small_masks")
def test_a_column_of_sparks_own_name_for_files_has_no_mask(lake: Lake, spark: SparkSession) -> None:
    view = version(lake, Schema.of(k="string", _metadata="int"), GENERATIONS)
    assert not can_have_mask(view.sealed)
    assert entries_in(view.frame(spark)) == wanted(GENERATIONS)


@pytest.mark.usefixtures("small_masks")
def test_a_version_is_as_its_manifest_lists_it_though_it_has_a_mask(lake: Lake) -> None:
    assert verify_version(masked(version(lake, TEXT, GENERATIONS)), deep=True).damaged == ()

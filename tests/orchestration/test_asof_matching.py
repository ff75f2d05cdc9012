"""What an as-of join meets, of any rows over time and any times of records: what a plain Python
search finds.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.reading.keyed_entries import TimedEntries
from dagster_adjunct.assets.reading.valid_time import TimeBins
from dagster_adjunct.assets.versions.version import TOMBSTONE
from dagster_adjunct.orchestration.operators.as_of_join import AsOfJoin
from dagster_adjunct.orchestration.operators.join_arguments import JoinArguments
from dagster_adjunct.orchestration.operators.lookups import AsOf, EntryLookup
from dagster_adjunct.orchestration.step.spark_datasets import (
    AsOfMatch,
    DatasetEntries,
    TimedRows,
    join_entries,
)
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tuning import PersistedFrames
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

History = dict[str, list[tuple[dt.datetime, int | None]]]
"""Of each key, since when which price was valid, in the order of time; None: it was deleted."""
Record = tuple[str | None, dt.datetime | None]
PRICES = unbounded_dataset(
    "prices", input="lake.prices", key="item", partitions=2, history="all", sensitive=["secret"]
)
SCHEMA = Schema.of(item="string", price="int")


def moment(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=number)


@dataclass
class FakeBatch:
    """A batch in which the dataset has these rows; its other parts are real."""

    rows: TimedRows
    hidden: frozenset[str] = frozenset()
    reading: str = "as-of"
    records: SparkFrames = field(init=False)

    def __post_init__(self) -> None:
        self.planned: Any = SimpleNamespace(
            app=SimpleNamespace(dataset=lambda name: PRICES),
            reading=self.reading,
            is_dry_run=False,
            sensitive=lambda operator, names: self.hidden,
            stream_of=lambda operator: "lake.sales",
        )
        self.records = SparkFrames(self.planned, cast("Any", None), PersistedFrames())
        self.datasets = self

    def schema_of(self, dataset: str, *, over_time: bool = False) -> Schema:
        return self.rows.schema

    def match(self, operator: str, frame: DataFrame, lookup: EntryLookup) -> DataFrame:
        if lookup.as_of is not None:
            return AsOfMatch(lookup, lookup.as_of, self.rows, False).join(frame, lambda side: side)
        now = self.rows.frame.where("__valid_to IS NULL AND NOT __tombstone")
        entries = now.select(*self.rows.schema.names)
        current = DatasetEntries(entries, self.rows.schema)
        return join_entries(frame, current, lookup, lambda side: side)


def stored(
    spark: SparkSession, history: History, known_from: dt.datetime | None = None
) -> TimedRows:
    """The rows as a dataset gives them: each until the next one of its key."""
    rows = []
    for item, changes in history.items():
        for number, (start, price) in enumerate(changes):
            end = changes[number + 1][0] if number + 1 < len(changes) else None
            rows.append((item, price, start, end, number == 0, price is None))
    ddl = (
        "item string, price int, __valid_from timestamp, __valid_to timestamp, __first boolean,"
        " __tombstone boolean"
    )
    return TimedRows(spark.createDataFrame(rows, ddl), SCHEMA, known_from)


HOUR = 3_600_000_000


def sent(spark: SparkSession, records: list[Record], kind: str = "timestamp") -> DataFrame:
    rows = [(item, at, 0, number) for number, (item, at) in enumerate(records)]
    return spark.createDataFrame(rows, f"item string, at {kind}, __partition int, __offset bigint")


def join(**options: Any) -> AsOfJoin:
    given = {"how": "left", "before_history": "null", "on_null_time": "null"} | options
    as_of = AsOf("at", given["before_history"], given["on_null_time"])
    arguments = JoinArguments("join-2", "item", given["how"], None, "", None)
    return arguments.build(AsOfJoin, PRICES, as_of=as_of)


def joined(spec: AsOfJoin, frame: DataFrame, batch: FakeBatch) -> DataFrame:
    made: DataFrame = spec.compile("join-2", [frame], cast("Any", batch))
    return made


def expected(
    history: History, record: Record, known_from: dt.datetime | None, oldest: bool
) -> tuple[int | None, bool]:
    """What the record meets, and whether it lies before the history."""
    item, at = record
    if item is None or at is None:
        return None, False
    changes = history.get(item, [])
    if not changes:
        return None, known_from is not None and at < known_from
    if at < changes[0][0]:  # before the history, which may begin with deletions
        return (
            next((price for _, price in changes if price is not None), None) if oldest else None
        ), True
    return [price for start, price in changes if start <= at][-1], False


def drawn(chance: random.Random) -> tuple[History, list[Record]]:
    """Return a history, and records of any time, also at and right before each change."""
    history: History = {}
    for item in "abcdefgh":
        starts = sorted(chance.sample(range(10, 60), chance.randint(1, 12)))
        history[item] = [
            (moment(at), None if chance.random() < 0.25 else chance.randint(1, 99)) for at in starts
        ]
    records: list[Record] = [
        (
            chance.choice([*"abcdefghxy", None]),
            None if chance.random() < 0.1 else moment(chance.randint(0, 70)),
        )
        for _ in range(400)
    ]
    records += [(item, start) for item, changes in history.items() for start, _ in changes]
    records += [
        (item, start - dt.timedelta(microseconds=1))
        for item, changes in history.items()
        for start, _ in changes
    ]
    return history, records


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("before_history", ["null", "oldest"])
@pytest.mark.parametrize("bins", [None, (15, 7 * HOUR, 5), (30, HOUR // 3, 200)])
def test_each_record_meets_the_entry_that_was_valid_at_its_own_time(
    spark: SparkSession, how: str, before_history: str, bins: tuple[int, int, int] | None
) -> None:
    history, records = drawn(random.Random(f"{how} {before_history}"))
    known_from, oldest = moment(20), before_history == "oldest"
    rows = stored(spark, history, known_from)
    if bins is not None:  # some before all of the rows, within them and after them
        start, width, count = bins
        rows = replace(rows, bins=TimeBins(to_microseconds(moment(start)), width, count))
    batch = FakeBatch(rows)
    by_offset = {row["__offset"]: row for row in joined(
        join(how=how, before_history=before_history), sent(spark, records), batch
    ).collect()}  # fmt: skip
    reported = [expected(history, record, known_from, oldest) for record in records]
    assert {at: row["price"] for at, row in by_offset.items()} == {
        number: price
        for number, (price, _) in enumerate(reported)
        if how == "left" or price is not None
    }
    assert batch.records.observed()["join-2"] == {
        "rows": len(records),
        "unmatched": sum(price is None for price, _ in reported),
        "before_history": sum(early for _, early in reported),
        "null_times": sum(at is None for _, at in records),
    }
    assert all(not name.startswith("__met") for name in by_offset[next(iter(by_offset))].asDict())


@pytest.mark.parametrize("known_from", [None, moment(20)])
@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_without_spark_each_record_meets_the_same(
    seed: int, oldest: bool, known_from: dt.datetime | None
) -> None:
    history, records = drawn(random.Random(seed))
    rows = [
        (item, price, start, ends, number == 0, price is None)
        for item, changes in history.items()
        for number, ((start, price), ends) in enumerate(
            zip(changes, [*(start for start, _ in changes[1:]), None], strict=True)
        )
    ]
    names = (*SCHEMA.names, VALID_FROM, VALID_TO, IS_FIRST, TOMBSTONE)
    instant = pa.timestamp("us", "UTC")
    kinds = (pa.string(), pa.int32(), instant, instant, pa.bool_(), pa.bool_())
    columns = [
        pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]
    table = pa.table(dict(zip(names, columns, strict=True)))
    entries = TimedEntries.of(table, SCHEMA, ("item",), known_from and to_microseconds(known_from))
    items = pa.chunked_array([pa.array([item for item, _ in records], pa.string())])
    times = [None if at is None else to_microseconds(at) for _, at in records]
    places, early = entries.find([items], times, oldest=oldest)
    prices = entries.entries.column("price").take(places).to_pylist()
    assert [*zip(prices, early.to_pylist(), strict=True)] == [
        expected(history, record, known_from, oldest) for record in records
    ]


def test_a_date_is_its_midnight_in_utc(spark: SparkSession) -> None:
    history: History = {"a": [(moment(0), 1), (moment(24), 2), (moment(25), 3)]}
    days = [("a", dt.date(2026, 1, number)) for number in (1, 2, 3)]
    frame = sent(spark, cast("list[Record]", days), "date")
    rows = joined(join(), frame, FakeBatch(stored(spark, history))).orderBy("__offset").collect()
    assert [row["price"] for row in rows] == [1, 2, 3]


def test_a_batch_that_reads_what_is_current_meets_that_whatever_the_times_are(
    spark: SparkSession,
) -> None:
    history: History = {
        "a": [(moment(1), 1), (moment(5), 2)],
        "b": [(moment(1), 7), (moment(2), None)],
    }
    records: list[Record] = [("a", moment(2)), ("a", None), ("b", moment(1))]
    batch = FakeBatch(stored(spark, history), reading="current")
    rows = joined(join(), sent(spark, records), batch).orderBy("__offset").collect()
    assert [row["price"] for row in rows] == [2, 2, None]


HISTORY: History = {"a": [(moment(10), 1)], "b": [(moment(10), 1)]}


@pytest.mark.parametrize(
    ("options", "records", "known_from", "reported"),
    [
        (
            {"before_history": "error"},
            [("a", moment(11)), ("b", moment(9)), ("a", moment(1)), ("a", None)],
            None,
            "item = b is from before the history of dataset prices: at = 2026-01-01 09:00:00",
        ),
        (
            {"before_history": "error"},
            [("x", moment(2))],
            moment(3),
            "item = x is from before the history",
        ),
        (
            {"on_null_time": "fail"},
            [("a", moment(1)), ("b", None)],
            None,
            "as of at, which is null",
        ),
    ],
)
def test_what_must_not_be_there_fails_the_batch_and_is_named(
    spark: SparkSession,
    options: dict[str, Any],
    records: list[Record],
    known_from: dt.datetime | None,
    reported: str,
) -> None:
    batch = FakeBatch(stored(spark, HISTORY, known_from))
    with pytest.raises(OperatorFailedError, match=reported) as caught:
        joined(join(**options), sent(spark, records), batch)
    assert caught.value.offset == str(
        min(n for n, (item, _) in enumerate(records) if item in ("b", "x"))
    )
    assert (caught.value.operator, caught.value.stream, caught.value.partition) == (
        "join-2",
        "lake.sales",
        0,
    )
    assert caught.value.next_step


def test_values_that_nobody_may_see_are_masked(spark: SparkSession) -> None:
    batch = FakeBatch(stored(spark, HISTORY), hidden=frozenset({"item", "at"}))
    with pytest.raises(OperatorFailedError, match=r"item = \*\*\*.*: at = \*\*\* ") as caught:
        joined(join(before_history="error"), sent(spark, [("b", moment(9))]), batch)
    assert "2026" not in str(caught.value)


def test_nothing_fails_where_nothing_is_wrong(spark: SparkSession) -> None:
    batch = FakeBatch(stored(spark, HISTORY, moment(3)))
    records: list[Record] = [("a", moment(11)), ("x", moment(3)), (None, moment(1))]
    frame = joined(join(before_history="error", on_null_time="fail"), sent(spark, records), batch)
    assert sorted(row["price"] or 0 for row in frame.collect()) == [0, 0, 1]


def test_a_time_that_is_none_is_refused_in_the_applications_own_words(spark: SparkSession) -> None:
    make: Callable[[str], DataFrame] = lambda kind: sent(spark, [], kind)  # noqa: E731
    for kind, step in (("string", "cast"), ("bigint", "timestamp_millis")):
        with pytest.raises(PlanningError) as caught:
            joined(join(), make(kind), FakeBatch(stored(spark, HISTORY)))
        assert (caught.value.operator, caught.value.column) == ("join-2", "at")
        assert step in caught.value.next_step


@pytest.mark.parametrize("is_first", [True, False])
def test_the_oldest_entry_is_used_only_if_the_history_begins_with_it(is_first: bool) -> None:
    rows = {
        "item": ["a"],
        "price": [3],
        VALID_FROM: [30],
        VALID_TO: [None],
        IS_FIRST: [is_first],
        TOMBSTONE: [False],
    }
    instant = pa.timestamp("us", "UTC")
    table = pa.table(
        rows,
        pa.schema(
            [
                *SCHEMA.to_arrow(),
                (VALID_FROM, instant),
                (VALID_TO, instant),
                (IS_FIRST, pa.bool_()),
                (TOMBSTONE, pa.bool_()),
            ]
        ),
    )
    places, early = TimedEntries.of(table, SCHEMA, ("item",), 20).find(
        [pa.chunked_array([["a"]])], [10], oldest=True
    )
    assert (places.to_pylist(), early.to_pylist()) == ([0 if is_first else None], [True])

"""Windows over plain frames, without a step around them: any split into batches gives what plain
Python says.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.columns import BEHIND, EVENT_TIME, REPLAYED
from dagster_adjunct.orchestration.operators.made_records import (
    DELETED,
    EXCLUSION,
    LATE,
    NULL_KEY,
    NULL_TIME,
    REPLAYED_REASON,
)
from dagster_adjunct.orchestration.operators.operator import Watermarks
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.operators.windows.assignment import (
    PARTLY_LATE,
    Windows,
    classify_window_records,
    union_sessions,
)
from dagster_adjunct.orchestration.operators.windows.kinds import Kind, Session, Sliding, Tumbling
from dagster_adjunct.orchestration.operators.windows.window import build_window
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.windows import Count, Distinct, Max, Mean, Min, Sum
from tests.orchestration.window_oracle import (
    Click,
    at,
    behind,
    expected,
    random_clicks,
    values_of,
    watermark,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.assets.unbounded.local_table import StateSpec

pytestmark = pytest.mark.spark

KEYS, RECORDS, PARTITIONS = 12, 150, 2
KINDS: Mapping[str, Kind] = {
    "tumbling": Tumbling(dt.timedelta(seconds=10)),
    "sliding": Sliding(dt.timedelta(seconds=10), dt.timedelta(seconds=4)),
    "session": Session(dt.timedelta(seconds=6)),
}
AGGREGATES = {
    "clicks": Count(),
    "numbers": Count("number"),
    "total": Sum("number"),
    "spent": Sum("price"),
    "weight": Sum("weight"),
    "first": Min("text"),
    "most": Max("number"),
    "mean": Mean("number"),
    "mean_price": Mean("price"),
    "texts": Distinct("text"),
    "weights": Distinct("weight"),
    "about": Distinct("text", approximate=True),
}
COLUMNS = "key string, number int, price decimal(6,2), text string, weight double"
HIDDEN = (
    "__partition int, __offset bigint, __timestamp timestamp, __tombstone boolean, __epoch int, "
    "__event_time timestamp, __behind timestamp, __again boolean"
)


class State:
    """A state table as plain rows: what was written last counts, until it expires."""

    def __init__(
        self, spark: SparkSession, spec: StateSpec, rows: dict[Any, Any], watermarks: Watermarks
    ) -> None:
        self.spark, self.spec, self.rows, self.watermarks = spark, spec, rows, watermarks
        self.written: dict[Any, Any] = {}

    def frame(self) -> DataFrame:
        before = self.watermarks.before
        rows = [
            row for row in self.rows.values() if before is None or row[self.spec.expires] > before
        ]
        values = [tuple(row[name] for name in self.spec.schema.names) for row in rows]
        return self.spark.createDataFrame(values, self.spec.schema.ddl())

    def with_written(self) -> DataFrame:
        return State(self.spark, self.spec, self.rows | self.written, self.watermarks).frame()

    def write(self, rows: DataFrame, *, partitioned: bool = False) -> None:
        for row in rows.collect():
            key = tuple(row[name] for name in self.spec.key)
            assert key not in self.written, "a key is written once"
            assert not self.spec.append_only or key not in self.rows
            self.written[key] = None if row.asDict().get("__tombstone") else row.asDict()

    def commit(self) -> None:
        for key, row in self.written.items():
            if row is None:
                del self.rows[key]
            else:
                self.rows[key] = row


class Batches:
    """A batch after another, as far as windows ask for them.

    It is also the facts that are planned of a batch, its records, and its state.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.planned = self.records = self.state = self
        self.spark, self.tables, self.number = spark, {}, 0
        self.clock = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
        self.states: list[State] = []
        self.late: list[Any] = []
        self.marks = Watermarks(None, None)
        self.app = Application("app")

    def begin(self, after: dt.datetime | None) -> None:
        self.number += 1
        self.marks = Watermarks(self.marks.after, after)
        self.states = []

    def commit(self) -> None:
        for state in self.states:
            state.commit()

    def watermarks(self, name: str) -> Watermarks:
        return self.marks

    def table(self, name: str, spec: StateSpec, *, of: str | None = None) -> State:
        self.states.append(State(self.spark, spec, self.tables.setdefault(name, {}), self.marks))
        return self.states[-1]

    def count_records(
        self, operator: str, frame: DataFrame, conditions: Mapping[str, Any]
    ) -> DataFrame:
        return frame

    def has_diverted_consumer(self, operator: str) -> bool:
        return True

    def divert(self, operator: str, records: DataFrame) -> None:
        self.late += records.collect()

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        return frame.localCheckpoint()

    def check_zone_rules(self, name: str, zone: str, outdated: Column) -> None:
        pass

    def columns(self, frame: DataFrame) -> Columns:
        return Columns.of_frame(frame)

    def required_partitioning(self, operator: str) -> tuple[str, ...]:
        return ()

    def partitions_at(self, operator: str) -> int:
        return 2

    def sensitive(self, operator: str, *arriving: Collection[str]) -> frozenset[str]:
        return frozenset()


def rows_of(
    clicks: list[list[Click]], cuts: list[int], ends: list[int], delay: float
) -> list[tuple[Any, ...]]:
    rows = []
    for partition, own in enumerate(clicks):
        limits = list(behind(own, delay))
        for offset in range(cuts[partition], ends[partition]):
            click, limit = own[offset], limits[offset]
            values = (click.key, click.number, click.price, click.text, click.weight)
            hidden = (partition, offset, at(0), False, 0, at(click.time), at(limit), False)
            rows.append((*values, *hidden))
    return rows


def run(
    spark: SparkSession,
    window: Any,
    clicks: list[list[Click]],
    delay: float,
    batches: int,
    seed: int,
) -> list[list[dict[str, Any]]]:
    """Return what each batch gives, the input cut into batches at random places of each
    partition.
    """
    rng = random.Random(seed)
    cuts = [[*sorted(rng.choices(range(len(own) + 1), k=batches - 1)), len(own)] for own in clicks]
    world, before, results = Batches(spark), [0] * len(clicks), []
    for number in range(batches):
        ends = [cut[number] for cut in cuts]
        marks = [watermark(own[:end], delay) for own, end in zip(clicks, ends, strict=True)]
        after = None if None in marks else at(min(mark for mark in marks if mark is not None))
        frame = spark.createDataFrame(rows_of(clicks, before, ends, delay), f"{COLUMNS}, {HIDDEN}")
        world.begin(after)
        results.append(
            [row.asDict() for row in window.compile("window-2", [frame], world).collect()]
        )
        world.commit()
        before = ends
    return results


def displayed(row: Mapping[str, Any], names: Any) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("key", "window_start", "window_end", *names))


AT_LENGTH = [
    ("tumbling", "final"),
    ("session", "final"),
    ("sliding", "final"),
    ("tumbling", "updates"),
]
AT_LENGTH += [("sliding", "updates")]


@pytest.mark.parametrize(
    ("name", "results"),
    [("session", "updates"), *(pytest.param(*case, marks=pytest.mark.long) for case in AT_LENGTH)],
)
def test_any_split_gives_the_windows_of_the_whole_input_once(
    spark: SparkSession, name: str, results: Any
) -> None:
    kind, delay, lateness = KINDS[name], 5.0, 3.0
    window = build_window(
        "input-1", kind, "key", "views", AGGREGATES, results, dt.timedelta(seconds=lateness), None
    )
    clicks = random_clicks(7, KEYS, RECORDS, PARTITIONS)
    reported = expected(clicks, kind, delay, lateness)
    assert {why for _, why in reported.late} == {"late", "null time", "null key"}
    mark = min(watermark(own, delay) or 0 for own in clicks)
    windows = {
        (key, at(start), at(end)): values_of(own)
        for (key, start), (end, own) in reported.windows.items()
    }
    closed = {
        (*key, *values.values())
        for key, values in windows.items()
        if key[2] + dt.timedelta(seconds=lateness) <= at(mark)
    }
    assert len(closed) > 50
    for batches, seed in ((1, 0), (3, 1)):
        rows_by_batch = run(spark, window, clicks, delay, batches, seed)
        every = [row for batch in rows_by_batch for row in batch]
        if results == "final":
            assert sorted(map(str, (displayed(row, AGGREGATES) for row in every))) == sorted(
                map(str, closed)
            )
            continue
        final = [
            displayed(row, AGGREGATES) for row in every if row["final"] and not row["__tombstone"]
        ]
        assert sorted(map(str, final)) == sorted(map(str, closed))
        table: dict[Any, Any] = {}
        for row in every:
            table[row["key"], row["window_start"]] = (
                None if row["__tombstone"] else displayed(row, AGGREGATES)
            )
        left = [row for row in table.values() if row is not None]
        everything = [(*key, *values.values()) for key, values in windows.items()]
        assert sorted(map(str, left)) == sorted(map(str, everything))


def test_less_lateness_closes_no_window_twice(spark: SparkSession) -> None:
    world, results = Batches(spark), []
    clicks = [
        (*("a", 1, None, None, None), *(0, offset, at(0), False, 0, at(1), None, False))
        for offset in (0, 1)
    ]
    for lateness, rows, mark in (
        (30, clicks, 1),
        (0, [], 20),
        (0, [], 30),
        (0, [], 60),
        (0, [], 90),
    ):
        late, made = dt.timedelta(seconds=lateness), {"clicks": Count()}
        window = build_window(
            "input-1", KINDS["tumbling"], "key", "views", made, "final", late, None
        )
        world.begin(at(mark))
        results += window.compile(
            "window-2", [spark.createDataFrame(rows, f"{COLUMNS}, {HIDDEN}")], world
        ).collect()
        world.commit()
    assert [(row["key"], row["clicks"]) for row in results] == [("a", 2)]


@pytest.mark.parametrize("kind", [Tumbling(dt.timedelta(days=1)), Session(dt.timedelta(days=1))])
def test_a_record_whose_last_window_ends_after_all_times_has_no_time_that_counts(
    spark: SparkSession, kind: Tumbling | Session
) -> None:
    windows = Windows(kind, ("k",), (("n", Count()),), dt.timedelta(days=2), {"k": "string"})
    times = ["9999-12-28 23:59:58", "9999-12-29 12:00:00", "9999-12-31 23:59:59"]
    frame = spark.sql(
        " union all ".join(
            f"select 'a' as k, timestamp'{time}+00:00' as {EVENT_TIME}, cast(null as timestamp) as"
            f" {BEHIND}, false as {TOMBSTONE}, {number} as n"
            for number, time in enumerate(times)
        )
    )
    found = {
        row["n"]: row[EXCLUSION] for row in classify_window_records(frame, windows, None).collect()
    }
    assert found == {0: None, 1: NULL_TIME, 2: NULL_TIME}


def test_only_records_that_count_in_some_window_are_partly_late(spark: SparkSession) -> None:
    windows = Windows(KINDS["sliding"], ("k",), (("n", Count()),), dt.timedelta(0), {"k": "string"})
    rows = [
        ("a", at(9), at(10)),
        ("a", at(9), None),
        ("a", at(1), at(30)),
        (None, at(9), at(10)),
        ("a", None, None),
    ]
    marked = [(*row, place == 5, place == 6) for place, row in enumerate([*rows, rows[0], rows[0]])]
    columns = (
        f"k string, {EVENT_TIME} timestamp, {BEHIND} timestamp, {TOMBSTONE} boolean,"
        f" {REPLAYED} boolean"
    )
    found = (
        classify_window_records(spark.createDataFrame(marked, columns), windows, None)
        .select(EXCLUSION, PARTLY_LATE)
        .collect()
    )
    why = [None, None, LATE, NULL_KEY, NULL_TIME, DELETED, REPLAYED_REASON]
    assert [tuple(row) for row in found] == [(None, True), *((reason, False) for reason in why[1:])]


def test_open_sessions_of_a_key_are_rows_and_no_list_that_has_to_fit_in_one(
    spark: SparkSession,
) -> None:
    windows = Windows(KINDS["session"], ("k",), (("n", Count()),), dt.timedelta(0), {"k": "string"})
    columns = windows.schema.ddl()
    rows = [("hot", at(20 * n), at(20 * n + 6), 1, 1, at(20 * n + 6)) for n in range(50)]
    rows += [
        ("other", at(0), at(6), 1, 1, at(6)),
        ("closing", at(0), at(6), 1, 1, at(1)),
        ("new", *rows[0][1:]),
    ]
    kept, runs = (
        spark.createDataFrame(rows[:-1], columns),
        spark.createDataFrame([rows[0], rows[-1]], columns),
    )
    together = union_sessions(kept, runs, windows, Watermarks(None, at(1)))
    assert "collect_list" not in together._jdf.queryExecution().optimizedPlan().toString()  # type: ignore[operator]
    counts = Counter((row["k"], row["__stored"]) for row in together.collect())
    assert counts == {("hot", True): 50, ("hot", False): 1, ("closing", True): 1, ("new", False): 1}

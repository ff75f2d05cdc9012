"""Versions that Spark computes: named, asked for once, and refused when the answer is not as
declared.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    Computation,
    QuerySource,
    bounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.query_source import (
    QueryVersions,
    _fill_placeholders,
    _generate_version_name,
)
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
from dagster_adjunct.assets.versions.manifest import Abandoned, Delivered
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    TransientError,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World, no_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = Schema.of(tailnum="string", seats="int", note="string")


def dataset(query: Any, **more: Any) -> AdjunctDataset:
    source = QuerySource(query, SCHEMA, name="fleet")
    return bounded_dataset("planes", input=source, key="tailnum", broadcast=True, **more)


def opened(spec: AdjunctDataset, partition: str | None = None) -> QueryVersions:
    source = open_source({}, spec, Lake(InMemoryStore(), "x"), partition=partition)
    assert isinstance(source, QueryVersions)
    return source


def delivered(source: QueryVersions) -> Delivery:
    delivery = source.next(source.first_manifest())
    assert isinstance(delivery, Delivery)
    return delivery


def test_a_query_runs_once_per_opening_and_is_named_by_time_or_partition() -> None:
    source = opened(dataset("SELECT 1"))
    first = delivered(source)
    assert re.fullmatch(r"\d{8}T\d{6}Z", first.version)
    assert source.check(first, no_spark) is None
    again = source.next(source.first_manifest())
    assert isinstance(again, Awaiting)
    assert again.idle
    partitioned = dataset("SELECT 1", versions=VersionPartitions("day", start="2026-01-01"))
    assert delivered(opened(partitioned, "2026-01-31")).version == "2026-01-31"


def test_a_name_made_of_the_time_is_one_that_no_version_has_had() -> None:
    now = dt.datetime(2026, 11, 21, 10, 15, tzinfo=dt.UTC)
    manifest = opened(dataset("SELECT 1")).first_manifest()
    assert _generate_version_name(manifest, now) == "20261121T101500Z"
    manifest = manifest.after(
        known=("20261121T101500Z",),
        delivered=(Delivered(name="20261121T101500Z-2", version="v1", markers={}),),
        abandoned=(Abandoned(name="20261121T101500Z-3", reason="x", by="me", at=now),),
    )
    assert _generate_version_name(manifest, now) == "20261121T101500Z-4"


def test_version_and_partition_stand_in_sql_as_quoted_texts() -> None:
    sql = "SELECT {version}, {partition}, '{\"a\": 1}', {other}"
    filled = _fill_placeholders(sql, Computation("it's {partition}\\", "2026-01-31"))
    assert filled == "SELECT 'it\\'s {partition}\\\\', '2026-01-31', '{\"a\": 1}', {other}"
    assert _fill_placeholders("SELECT {partition}", Computation("v", None)) == "SELECT NULL"


def test_a_new_query_result_is_published_whatever_the_order_of_its_columns(
    sparkling: World,
) -> None:
    seats = [1]

    def fleet(spark: SparkSession, asked: Computation) -> DataFrame:
        rows = [("of the query", seats[0], "N1"), ("other", 7, "N2"), ("other", 9, "N2")]
        return spark.createDataFrame(rows, "note STRING, seats INT, tailnum STRING")

    spec = dataset(fleet)
    report = sparkling.advance(spec)
    assert (report.action, report.rows, report.counters["read"]) == ("sealed", 2, 3)
    assert sparkling.view(spec).get("N2") == {"tailnum": "N2", "seats": 9, "note": "other"}
    assert sparkling.advance(spec).action == "unchanged"
    seats[0] = 2
    assert sparkling.advance(spec).action == "sealed"
    assert sparkling.view(spec).get("N1") == {"tailnum": "N1", "seats": 2, "note": "of the query"}
    changed = dataset("SELECT 'N1' tailnum, 3 seats, {version} note")
    assert sparkling.advance(changed).action == "sealed"


def test_an_answer_without_rows_is_refused_unless_the_query_may_be_empty(either: World) -> None:
    rows = pa.table({"key": ["a"], "number": [1]})

    def query(spark: Any, asked: Computation) -> Any:
        return rows if spark is IN_PROCESS else spark.createDataFrame(rows)

    def answering(**more: Any) -> AdjunctDataset:
        source = QuerySource(query, Schema.of(key="string", number="bigint"), name="rows", **more)
        return bounded_dataset("rows", input=source, key="key", broadcast=True)

    assert either.advance(answering()).rows == 1
    rows = rows.slice(0, 0)
    report = either.advance(answering())
    assert report.action == "rejected"
    assert "is rejected: EmptyVersionError: " in report.note
    assert either.view(answering()).get("a") == {"key": "a", "number": 1}
    report = either.advance(answering(allow_empty=True))
    assert (report.action, report.rows) == ("sealed", 0)


def test_of_rows_with_one_key_the_greatest_counts_and_nulls_are_least(either: World) -> None:
    keys = ["a", "a", "b", "b", "b", "c", "c"]
    numbers = [None, 5.0, math.nan, None, 3.0, None, None]
    texts = [None, None, None, None, None, "x", None]
    rows = pa.table({"key": keys, "number": numbers, "text": texts})

    def query(spark: Any, asked: Computation) -> Any:
        return rows if spark is IN_PROCESS else spark.createDataFrame(rows)

    schema = Schema.of(key="string", number="double", text="string")
    spec = bounded_dataset(
        "rows", input=QuerySource(query, schema, name="rows"), key="key", broadcast=True
    )
    assert either.advance(spec).rows == 3
    found = [either.view(spec).get(key) for key in "abc"]
    assert found[::2] == [
        {"key": "a", "number": 5.0, "text": None},
        {"key": "c", "number": None, "text": "x"},
    ]
    assert found[1] is not None
    assert math.isnan(found[1]["number"])


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT 'N1' tailnum, 1 seats", "note is missing"),
        ("SELECT 'N1' tailnum, 1 seats, 'x' note, 2 more", "more (int) is not declared"),
        ("SELECT 'N1' tailnum, 1L seats, 'x' note", "seats is bigint, declared int"),
        ("SELECT 'N1' tailnum, 1 seats, NULL note", "note is void, declared string"),
        ("SELECT 'N1' tailnum, 1 seats, 'x' note, 'y' note", "note appears twice"),
        (
            "SELECT 'N1' Tailnum, 1 seats, 'x' note",
            "tailnum is missing; Tailnum (string) is not declared",
        ),
    ],
)
def test_an_answer_with_other_columns_is_refused_with_the_difference(
    spark: SparkSession, sql: str, problem: str
) -> None:
    source = opened(dataset(sql))
    with pytest.raises(DatasetError, match=re.escape(problem)) as caught:
        source.read(delivered(source), lambda: spark)
    assert "dataset 'planes', version" in caught.value.problem
    assert "query fleet" in caught.value.problem


@pytest.mark.parametrize("partition", [None, "2025-12-31", "2026-1-2", "banana"])
def test_a_query_for_each_day_is_not_asked_for_what_is_no_partition(partition: str | None) -> None:
    spec = dataset("SELECT 1", versions=VersionPartitions("day", start="2026-01-01"))
    with pytest.raises(ConfigurationError) as caught:
        advance_dataset(
            spec,
            lake=Lake(InMemoryStore(), "x"),
            systems={},
            spark=lambda: None,
            by="test",
            partition=partition,
        )
    assert caught.value.argument == "partition"


def test_a_query_that_can_not_be_planned_or_returns_no_frame_names_the_dataset(
    spark: SparkSession,
) -> None:
    for query, problem in (
        ("SELECT nothing FROM nowhere", "can't be read: .*nowhere"),
        ("SELEC 1", "can't be read: .*SELEC"),
        (lambda *_: 7, "returned a int"),
    ):
        source = opened(dataset(query))
        with pytest.raises(DatasetError, match=f"'planes'.*query fleet.*{problem}"):
            source.read(delivered(source), lambda: spark)


class OperationalError(Exception):
    """As drivers of databases name it, which share no base class."""


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ConnectionResetError("cut off"), TransientError),
        (TimeoutError("too slow"), TransientError),
        (OperationalError("server closed the connection"), TransientError),
        (KeyError("seats"), DatasetError),
        (FileNotFoundError("fleet.csv"), DatasetError),
    ],
)
def test_a_query_that_fails_names_the_dataset_and_may_be_run_again_if_cut_off(
    raised: Exception, error: type[AdjunctError]
) -> None:
    def query(*_: Any) -> Any:
        raise raised

    source = opened(dataset(query))
    with pytest.raises(
        error, match=rf"'planes'.*query fleet: its function failed: {type(raised).__name__}"
    ):
        source.read(delivered(source), IN_PROCESS)


def test_a_query_that_returns_a_null_key_is_run_once(tmp_path: Path) -> None:
    answers = [
        pa.table({"tailnum": ["N1", None], "seats": pa.array([1, 2], pa.int32()), "note": ["", ""]})
    ]
    lake = open_lake(tmp_path / "lake")
    report = advance_dataset(
        dataset(lambda *_: answers.pop()), lake=lake, systems={}, spark=IN_PROCESS, by="test"
    )
    assert (report.action, answers) == ("rejected", [])
    assert "NullKeyError" in report.note


def test_an_empty_pandas_frame_is_an_empty_version_if_that_is_declared(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    empty = pandas.DataFrame({"tail": pandas.Series([], dtype="object"), "n": []})
    source = QuerySource(
        lambda *_: empty.astype({"n": "int32"}),
        Schema.of(tail="string", n="int"),
        name="empty",
        allow_empty=True,
    )
    spec = bounded_dataset("empty", input=source, key="tail", broadcast=True)
    report = advance_dataset(spec, lake=open_lake(str(tmp_path / "lake")), spark=IN_PROCESS)
    assert (report.action, report.rows) == ("sealed", 0)

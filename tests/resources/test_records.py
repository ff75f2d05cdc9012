"""Records as users have them, given to streams, tables and datasets: frames of libraries, rows
as dictionaries.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct import (
    IN_PROCESS,
    LakeStreams,
    Schema,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    open_lake,
)
from dagster_adjunct.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.records import to_arrow_table, to_spark_frame
from dagster_adjunct.resources.spark.tasks import small_frame
from dagster_adjunct.sources import QuerySource
from dagster_adjunct.tables import BlockingTable, MemoryTable, RemoteTable

SCHEMA = Schema.of(
    k="string", n="bigint", x="double", m="decimal(10,2)", at="timestamp", day="date", raw="binary"
)
AT = dt.datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=dt.UTC)
A = {"k": "a", "n": 1, "x": 0.5, "m": Decimal("1.50"), "at": AT, "day": AT.date(), "raw": b"\x00"}
B = {
    "k": "b",
    "n": 2**53 + 1,
    "x": 2.0,
    "m": Decimal("-3.00"),
    "at": AT,
    "day": AT.date(),
    "raw": b"",
}
NOTHING = {"k": "c", "n": None, "x": None, "m": None, "at": None, "day": None, "raw": None}
ROWS = [A, B, NOTHING]
PANDAS = {"n": "Int64", "x": "float64"}


def pandas_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, dtype=object).astype(
        {name: kind for name, kind in PANDAS.items() if name in rows[0]}
    )


def duckdb_relation(rows: list[dict[str, Any]]) -> Any:
    table = pa.Table.from_pylist(rows)
    return duckdb.from_arrow(table).project("*")


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "rows": list,
    "pandas": pandas_frame,
    "pandas filtered": (
        lambda rows: pandas_frame([{**A, "n": 0}, *rows]).query("n != 0 or n.isna()")
    ),
    "pandas with an index": lambda rows: pandas_frame(rows).set_index("k"),
    "polars": pl.DataFrame,
    "polars with categories": (
        lambda rows: pl.DataFrame(rows).with_columns(pl.col("k").cast(pl.Categorical))
    ),
    "polars with an enum": (
        lambda rows: pl.DataFrame(rows).with_columns(pl.col("k").cast(pl.Enum(["c", "b", "a"])))
    ),
    "batch": pa.RecordBatch.from_pylist,
    "table": pa.Table.from_pylist,
    "duckdb": duckdb_relation,
}


@pytest.fixture
def streams() -> LakeStreams:
    streams = LakeStreams(lake_in(InMemoryStore()))
    streams.create("s", schema=SCHEMA, key=["k"], partitions=1)
    return streams


def stored(streams: LakeStreams) -> list[dict[str, Any]]:
    return streams.read_arrow(streams.all_ranges("s")).select(SCHEMA.names).to_pylist()


@pytest.mark.parametrize("form", FORMS)
def test_records_in_any_form_are_stored_as_a_table_of_them_is(
    streams: LakeStreams, form: str
) -> None:
    streams.append("s", FORMS[form](ROWS), producer="p", sequence=1)
    assert stored(streams) == ROWS
    assert streams.append("s", pa.Table.from_pylist(ROWS), producer="p", sequence=1).duplicate


def test_rows_that_are_none_or_name_fewer_columns_are_taken(streams: LakeStreams) -> None:
    assert streams.append("s", [], producer="p", sequence=1).rows == 0
    streams.append("s", [A, {"k": "c"}], producer="p", sequence=2)
    streams.append("s", [{"k": "c"}], producer="p", sequence=3)  # whatever else is in the batch
    assert stored(streams) == [A, NOTHING, NOTHING]


def test_what_pandas_calls_missing_is_null_in_rows(streams: LakeStreams) -> None:
    rows = pd.DataFrame({"k": ["a", "c"], "at": [AT, None]}).to_dict("records")
    assert rows[1]["at"] is pd.NaT
    streams.append(
        "s",
        [*rows, {"k": "c", "day": pd.NaT, "n": pd.NA}, {"k": None, "n": 1}],
        producer="p",
        sequence=1,
    )
    assert stored(streams) == [
        {**NOTHING, "k": "a", "at": AT},
        NOTHING,
        NOTHING,
        {**NOTHING, "k": None, "n": 1},
    ]


@pytest.mark.parametrize(
    ("data", "column"),
    [
        ([{**A, "extra": 1}], "extra"),
        ([{**A, "n": 1.5}], "n"),
        ([{**A, "n": "1"}], "n"),
        ([A, {**A, "n": "1"}], "n"),
        ([{**A, "k": 1}], "k"),
        ([{**A, "n": 2**70}], "n"),
        ([{**A, "at": AT.replace(tzinfo=None)}], "at"),
        ([A, {**A, "at": AT.replace(tzinfo=None)}], "at"),
        ([{**A, "day": AT}], "day"),
        ([A, {**A, "day": AT}], "day"),
        ([{**A, "k": "\ud800"}], "k"),
        (pd.DataFrame([A, NOTHING]), "n"),
        (pandas_frame([A]).assign(at=pd.Timestamp("2026-03-01")), "at"),
        (pl.DataFrame([A]).with_columns(at=dt.datetime(2026, 3, 1)), "at"),
        (pa.table([pa.array(["a"])] * 2, names=["k", "k"]), "k"),
    ],
)
def test_records_that_lose_something_as_columns_are_refused(
    streams: LakeStreams, data: Any, column: str
) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        streams.append("s", data, producer="p", sequence=1)
    assert refused.value.column == column
    assert stored(streams) == []


NAIVE = dt.datetime(2026, 3, 1)


@pytest.mark.parametrize(
    ("rows", "column", "row"),
    [
        ([A, {**B, "at": NAIVE}], "at", 1),
        ([{**A, "at": None}, {**B, "at": pd.Timestamp(NAIVE)}], "at", 1),
        ([{**A, "ats": [AT, NAIVE]}], "ats", 0),
        ([{**A, "st": {"at": NAIVE}}], "st", 0),
        ([A, {**B, "by": {"x": NAIVE}}], "by", 1),
    ],
)
def test_a_time_without_a_zone_in_rows_is_named_with_advice_for_python(
    streams: LakeStreams, rows: list[dict[str, Any]], column: str, row: int
) -> None:
    fields = "ats array<timestamp>, st struct<at: timestamp>, by map<string, timestamp>"
    schema = Schema((*SCHEMA.fields, *Schema.from_ddl(fields).fields))
    streams.create("times", schema=schema, partitions=1)
    with pytest.raises(SchemaMismatchError) as refused:
        streams.append("times", rows, producer="p", sequence=1)
    assert (refused.value.column, refused.value.row) == (column, row)
    assert "time.replace(tzinfo=" in refused.value.next_step
    assert "pandas" not in str(refused.value)
    assert "JSON" not in str(refused.value)


@pytest.mark.parametrize("form", [pandas_frame, pl.DataFrame, pa.Table.from_pylist])
def test_frames_get_the_advice_of_their_libraries(streams: LakeStreams, form: Any) -> None:
    with pytest.raises(SchemaMismatchError, match="tz_localize") as refused:
        streams.append("s", form([{**A, "at": NAIVE}]), producer="p", sequence=1)
    assert refused.value.column == "at"


@pytest.mark.parametrize(
    ("column", "value", "step"),
    [
        ("at", "2026-03-01T00:00:00Z", "Send a datetime with a time zone; texts in lines of JSON"),
        ("at", 5, "Send a datetime with a time zone."),
        ("m", "1.50", "Send a Decimal; texts in lines of JSON"),
        ("n", 1.5, "Send an int."),
        ("k", 5, "Send a str."),
    ],
)
def test_values_of_another_type_in_rows_say_what_to_send(
    streams: LakeStreams, column: str, value: object, step: str
) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        streams.append("s", [{**A, column: value}], producer="p", sequence=1)
    assert refused.value.column == column
    assert refused.value.next_step.startswith(step)


@pytest.mark.parametrize(
    "data",
    [
        pd.concat([pandas_frame([A])] * 2, axis=1),
        pandas_frame([A]).assign(k=[{1: 2}]),
        pl.Series(["a"]),
    ],
)
def test_a_frame_that_arrow_can_not_hold_is_refused(streams: LakeStreams, data: Any) -> None:
    with pytest.raises(SchemaMismatchError):
        streams.append("s", data, producer="p", sequence=1)


@pytest.mark.parametrize(
    "data", [pl.Series("k", ["a"]), pl.Series("n", [1]), pa.chunked_array([["a"]])]
)
def test_one_column_alone_is_no_frame(streams: LakeStreams, data: Any) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        streams.append("s", data, producer="p", sequence=1)
    assert refused.value.facts == {"argument": "data"}
    assert refused.value.argument == "data"
    # a column of whole records
    streams.append("s", pl.DataFrame([A]).to_struct("whole"), producer="p", sequence=1)
    assert stored(streams) == [A]


@pytest.mark.parametrize(
    ("form", "step"),
    [(pd.Series(["a"], name="k"), "to_frame"), (pl.DataFrame([A]).lazy(), "collect")],
)
def test_what_can_be_made_a_frame_says_how(streams: LakeStreams, form: Any, step: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        streams.append("s", form, producer="p", sequence=1)
    frame = getattr(form, step)()
    assert refused.value.next_step == f"Pass the result of its {step}()."
    assert len(to_arrow_table(frame, "s")) == 1


@pytest.mark.parametrize("data", [None, "abc", 5, [1], pd.Series(["a"]), pl.DataFrame([A]).lazy()])
def test_what_holds_no_records_is_refused_and_reported_what_does(
    streams: LakeStreams, data: Any
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        streams.append("s", data, producer="p", sequence=1)
    assert refused.value.argument == "data"


@pytest.mark.parametrize(
    ("unit", "count"), [("s", 10**13), ("ms", -(10**17)), ("us", 10**18), ("ns", 1)]
)
def test_a_time_that_microseconds_do_not_hold_is_refused_by_row(
    streams: LakeStreams, unit: Any, count: int
) -> None:
    """As a record's own time, and as a value of a table's record."""
    table = pa.table({"k": ["a", "b"], "at": pa.array([0, count], pa.timestamp(unit, "UTC"))})
    rows = {**{name: pa.nulls(2) for name in SCHEMA.names}, "k": pa.array(["a", "b"])}
    memory = MemoryTable("times")
    memory.clear()
    with pytest.raises(SchemaMismatchError) as refused:
        streams.append(
            "s", pa.table({**rows, "__timestamp": table.column("at")}), producer="p", sequence=1
        )
    assert (refused.value.column, refused.value.row) == ("__timestamp", 1)
    with BlockingTable(
        RemoteTable("t", key="k", read_function=memory, write_function=memory)
    ) as blocking:
        with pytest.raises(SchemaMismatchError) as refused:
            blocking.put_all(table)
        assert (refused.value.column, refused.value.row) == ("at", 1)
        blocking.put_all(table.slice(0, 1))
        assert memory.records() == {"a": {"k": "a", "at": dt.datetime(1970, 1, 1, tzinfo=dt.UTC)}}


def test_a_reader_of_batches_is_refused_since_a_repeat_would_find_nothing(
    streams: LakeStreams,
) -> None:
    with pytest.raises(ConfigurationError) as failure:
        streams.append("s", pa.Table.from_pylist(ROWS).to_reader(), producer="p", sequence=1)  # type: ignore[arg-type]
    assert failure.value.facts == {"argument": "data"}


@pytest.mark.parametrize("form", ["pandas", "polars", "batch", "table", "duckdb"])
def test_a_table_takes_frames_as_records_and_as_updates(form: str) -> None:
    memory = MemoryTable(f"frames of {form}")
    memory.clear()
    with BlockingTable(
        RemoteTable("t", key="k", read_function=memory, write_function=memory)
    ) as table:
        table.put_all(FORMS[form]([A, B]))
        assert memory.records() == {"a": A, "b": B}
        table.update_all(FORMS[form]([{**B, "k": "a"}]))
        assert memory.records() == {"a": {**B, "k": "a"}, "b": B}


@pytest.mark.parametrize("form", ["pandas", "polars", "batch", "table"])
def test_a_dataset_can_be_computed_as_any_frame(form: str, tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    frame = FORMS[form]([{"k": "a", "n": 1}, {"k": "b", "n": 2**53 + 1}])
    query = QuerySource(lambda _session, _computation: frame, Schema.of(k="string", n="bigint"))
    advance_dataset(
        bounded_dataset("d", input=query, key="k", partitions=1),
        lake=lake,
        systems={},
        spark=IN_PROCESS,
        by="test",
    )
    with open_dataset(lake, "d") as opened:
        assert {key: entry["n"] for key, entry in opened.items()} == {"a": 1, "b": 2**53 + 1}


@pytest.mark.parametrize("form", ["pandas", "polars", "table"])
def test_spark_takes_what_a_query_computes_as_any_frame(
    form: str, spark: SparkSession, tmp_path: Path
) -> None:
    lake = open_lake(tmp_path)
    frame = FORMS[form]([{"k": "a", "n": 1}, {"k": "b", "n": 2**53 + 1}])
    query = QuerySource(lambda _session, _computation: frame, Schema.of(k="string", n="bigint"))
    advance_dataset(
        bounded_dataset("d", input=query, key="k", partitions=1),
        lake=lake,
        systems={},
        spark=spark,
        by="test",
    )
    with open_dataset(lake, "d") as opened:
        assert {key: entry["n"] for key, entry in opened.items()} == {"a": 1, "b": 2**53 + 1}


@pytest.mark.parametrize("half", [{"k": "\ud83d"}, {"k": "fine", "tags": ["\udc00"]}])
def test_half_a_character_is_refused_with_its_column_and_row(half: dict[str, Any]) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        to_arrow_table([{"k": "a", "tags": []}, half], "rows")
    assert (caught.value.column, caught.value.row) == (list(half)[-1], 1)


def test_a_query_that_gives_half_a_character_is_rejected(tmp_path: Path) -> None:
    lake, frame = open_lake(tmp_path), pd.DataFrame({"k": ["a"], "v": ["\ud83d"]})
    source = QuerySource(lambda _, __: frame, Schema.of(k="string", v="string"), name="halves")
    dataset = bounded_dataset("halves", input=source, key="k", broadcast=True)
    assert (
        advance_dataset(dataset, lake=lake, systems={}, spark=IN_PROCESS, by="test").action
        == "rejected"
    )


@pytest.mark.parametrize("sizes", [(1, 0, 1), (0, 0, 2), (0, 1, 0, 1)])
def test_a_frame_has_all_rows_of_a_table_with_empty_batches(
    sizes: tuple[int, ...], spark: SparkSession
) -> None:
    rows = pa.table({"k": ["a", "b"]})
    table = pa.concat_tables(rows.slice(0, size) for size in sizes)
    frame = to_spark_frame(table, spark, "rows")
    assert frame is not None
    assert (frame.count(), small_frame(spark, table).count()) == (2, 2)

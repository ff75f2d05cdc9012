"""flat_map of arrays and maps without Spark makes the records that Spark makes, with their hidden
columns, in order.
"""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.arrow_frames import ArrowFrames
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.nested import comparable, draw_rows, draw_schema, draw_type
from tests.orchestration.step_world import ByTasks, StepWorld, twin_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
ARROW = ArrowFrames(cast("Any", None), cast("Any", None))


def drawn_frame(seed: int) -> tuple[pa.Table, dict[str, str]]:
    """Return records with nested columns, of which `xs` has elements, and with ordinals, some of
    them null; and the types of its columns.
    """
    drawn = random.Random(seed)
    kind = draw_type(drawn, 3)
    elements = str(kind) if str(kind).startswith("map") else f"array<{kind}>"
    types = {**draw_schema(drawn, columns=1).types, "s": f"struct<xs:{elements}>", "xs": elements}
    schema = Schema.of(types)
    rows = draw_rows(drawn, schema, range(20))
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    if seed % 2:
        ordinals = [drawn.choice([None, "0000000003"]) for _ in rows]
        table = table.add_column(1, "__ordinal", pa.array(ordinals, pa.string()))
    return table.slice(drawn.randrange(4)), types


def exploded(table: pa.Table, path: str, name: str, keep_empty: bool) -> Rows:
    """Return the records that plain Python makes."""
    made: Rows = []
    for row in table.to_pylist(maps_as_pydicts="strict"):
        value: Any = row
        for part in path.split("."):
            value = None if value is None else value[part]
        if isinstance(value, dict):
            value = [{"key": key, "value": each} for key, each in value.items()]
        before = row.pop("__ordinal", None)
        for number, element in enumerate(value or ([None] if keep_empty else [])):
            ordinal = f"{number:010d}" if before is None else f"{before}/{number:010d}"
            made.append({**row, name: element, "__ordinal": ordinal})
    return [comparable(row) for row in made]


def to_rows(table: pa.Table) -> Rows:
    return [comparable(row) for row in table.to_pylist(maps_as_pydicts="strict")]


@pytest.mark.lengthy  # the first one reads many modules
@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize(("path", "name"), [("xs", "xs"), ("s.xs", "x"), ("xs", "V0")])
@pytest.mark.parametrize("seed", range(6))
def test_each_element_becomes_a_record(seed: int, path: str, name: str, keep_empty: bool) -> None:
    table, _ = drawn_frame(seed)
    made = ARROW.explode("flat-map-2", table, path, name, keep_empty=keep_empty)
    expected = exploded(table, path, name, keep_empty)
    if name == "V0":
        for row in expected:
            del row["v0"]
    assert to_rows(made) == expected
    none = ARROW.explode("flat-map-2", table.slice(0, 0), path, name, keep_empty=keep_empty)
    assert none.schema == made.schema
    assert none.num_rows == 0


@pytest.mark.spark
@pytest.mark.parametrize("seed", range(4))
def test_spark_makes_the_same_records(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    table, _ = drawn_frame(seed)
    pq.write_table(table, tmp_path / "rows.parquet")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet"))
    frames = SparkFrames(cast("Any", None), cast("Any", None), cast("Any", None))
    places = [str(tmp_path / name) for name in ("first", "second")]
    for path, name, keep_empty in (("xs", "V0", True), ("s.xs", "x", False)):
        by_spark = frames.explode("flat-map-2", frame, path, name, keep_empty=keep_empty)
        made = ARROW.explode("flat-map-2", table, path, name, keep_empty=keep_empty)
        assert by_spark.columns == made.column_names
        assert frames.types(by_spark) == ARROW.types(made)
        by_spark.coalesce(1).write.parquet(places[-1])
        read = pq.read_table(places.pop(), coerce_int96_timestamp_unit="us")
        assert to_rows(read.cast(made.schema)) == to_rows(made)


@pytest.mark.parametrize("column", ["k", "s"])
def test_a_value_without_elements_is_rejected_by_name(column: str) -> None:
    table, _ = drawn_frame(0)
    with pytest.raises(PlanningError) as failure:
        ARROW.explode("flat-map-2", table, column, "x", keep_empty=False)
    assert failure.value.operator == "flat-map-2"


LINES: Rows = [
    {
        "k": "a",
        "parts": [{"sku": "x", "tags": ["1", None]}, None, {"sku": "y", "tags": []}],
        "m": {"b": 1, "a": None},
    },
    {"k": "b", "parts": None, "m": {"a": 1}},
    {"k": "c", "parts": [], "m": None},
    {
        "k": "a",
        "parts": [{"sku": None, "tags": None}, {"sku": "z", "tags": ["2", "2", "3"]}],
        "m": {},
    },
]


def described(world: StepWorld) -> Application:
    app = Application("app", engine="auto")
    parts = app.input_stream("lake.lines", default_offset="oldest").flat_map("parts as part")
    tags = parts.flat_map("part.tags as tag", keep_empty=True).select("k", "part.sku as sku", "tag")
    tags.send_to(app.output_stream("lake.tags", partitions=2, key="k"))
    entries = parts.flat_map("m as entry", keep_empty=True).select("k", "entry")
    entries.send_to(app.output_stream("lake.entries", partitions=2, key="k"))
    columns = {"k": "string", "n": "bigint"}
    store = SqliteTable(world.folder / "tags.sqlite", "tags", "k", columns=columns, create=True)
    table = RemoteTable("tags", key="k", write_function=store, idempotent=True)
    both = tags.merge(tags.filter("tag is not null"))
    both.update(app.table(table), add={"n": "1"}, if_missing=[])
    return app


def left_by(world: StepWorld) -> tuple[Any, ...]:
    sent = []
    for stream in ("tags", "entries"):
        records = world.streams.read_arrow(world.streams.all_ranges(stream), positions=True)
        sent.append(to_rows(records.drop_columns(["__timestamp"])))
        sent.append(world.streams.state(stream).state.producers["app"][-1].digest)
    with sqlite3.connect(world.folder / "tags.sqlite") as connection:
        counted = connection.execute("SELECT k, n FROM tags ORDER BY k").fetchall()
    return *sent, counted


@pytest.mark.spark
def test_batches_without_spark_leave_what_those_of_spark_leave(step_world: StepWorld) -> None:
    schema = Schema.of(
        k="string", parts=[{"sku": "string", "tags": "array<string>"}], m="map<string,int>"
    )
    step_world.streams.create("lines", schema=schema, key=["k"], partitions=2)
    step_world.streams.append("lines", LINES, producer="test", sequence=1)
    assert (
        plan_application(described(step_world), systems=step_world.systems).engine.needs_spark == ()
    )
    left = []
    for engine in (SmallBatchesInProcess, BatchEngine, ByTasks):
        world = twin_of(step_world, engine.__name__)
        report = run_step(world.context(described(world)), engine())
        assert report.in_process_batches == (engine is SmallBatchesInProcess)
        left.append(left_by(world))
        world.again(described(world))
        assert left_by(world) == left[-1]
    assert left[0] == left[1] == left[2]
    rows, _, entries, _, counted = left[0]
    assert [(row["sku"], row["tag"]) for row in rows if row["k"] == "a"] == [
        ("x", "1"), ("x", None), (None, None), ("y", None),
        (None, None), ("z", "2"), ("z", "2"), ("z", "3"),
    ]  # fmt: skip
    assert [row["entry"] for row in entries] == [
        *[{"key": "a", "value": None}, {"key": "b", "value": 1}] * 3,
        *[None] * 2,
    ]
    assert counted == [("a", 12)]


def test_the_plan_says_which_elements_need_spark(step_world: StepWorld) -> None:
    step_world.stream("words", "k", 1, k="string", words="string")
    app = Application("app", engine="auto")
    words = app.input_stream("lake.words").flat_map("split(words, ' ') as word")
    words.send_to(app.output_stream("lake.out", partitions=1))
    (need,) = plan_application(app, systems=step_world.systems).engine.needs_spark
    assert need.operator == "flat-map-2"
    assert "split" in need.what


def fail(record: dict[str, Any]) -> list[dict[str, Any]]:
    raise ValueError(f"unlike {record['line']['sku']}")


def test_elements_of_a_sensitive_part_are_masked(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    types = {"k": "string", "lines": "array<struct<sku:string>>", "who": "struct<email:string>"}
    schema = Schema.of(types).with_sensitive("lines[].sku", "who.email")
    streams.create("orders", schema=schema, key=["k"], partitions=1)
    order = {"k": "a", "lines": [{"sku": "hopper"}], "who": {"email": "hopper"}}
    streams.append("orders", [order], producer="test", sequence=1)
    app = Application("app", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    lines = orders.with_columns(email="who.email").flat_map("lines as line")
    lines.flat_map(fail, schema=Schema.of(k="string")).send_to(
        app.output_stream("lake.out", partitions=1)
    )
    with pytest.raises(OperatorFailedError) as failure:
        run_application(app, lake=lake, spark=IN_PROCESS, adopt=True)
    assert failure.value.record == "{k: 'a', lines: ***, who: ***, email: ***, line: ***}"
    assert "hopper" not in str(failure.value)

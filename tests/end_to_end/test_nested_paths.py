"""Drawn schemas of nested columns, with drawn records, through every path: what comes back equals
what was drawn, and a part that does not fit is rejected by its path.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    polars_frame,
    pyarrow_dataset,
    stream_view,
)
from dagster_adjunct.assets.exchange.sql import query_lake
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.engines import BatchEngine
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.files.formats import (
    DeclaredFiles,
    FileFormat,
    read_files,
    read_files_with_spark,
)
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type, parse_type
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json
from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    create_decoder,
    encode_table,
)
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.end_to_end.nested_messages import avro_of, protobuf_of
from tests.nested import (
    ANYTHING,
    PLAIN_NAMES,
    SIMPLE,
    Limits,
    comparable_rows,
    draw_rows,
    draw_schema,
    spoil,
    spoil_type,
    write_json,
)
from tests.orchestration.all_engines import SmallBatches, WithoutSpark
from tests.orchestration.step_world import ByTasks, StepWorld
from tests.resources.streams.kafka.messages import batch_of
from tests.resources.table_backends.fresh_functions import WHOLE_STORES, dynamodb
from tests.rounds import rounds
from tests.servers.http_records import running_service

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.kafka import KafkaServer

Rows = list[dict[str, Any]]
pytestmark = [pytest.mark.rounds, pytest.mark.lengthy]
QUICK = range(rounds(3, 60))
"""The seeds of paths that neither start Spark nor ask a server."""
SLOW = range(rounds(1, 8))
FINITE = Limits(finite=True)
IN_AVRO = Limits(
    names=PLAIN_NAMES, simple=[kind for kind in SIMPLE if kind not in ("tinyint", "smallint")]
)
IN_PROTOBUF = Limits(
    names=PLAIN_NAMES,
    simple=("string", "boolean", "int", "bigint", "float", "double", "timestamp", "binary"),
    like_protobuf=True,
)
IN_PLAIN_JSON = Limits(simple=("string", "boolean", "bigint", "double"), finite=True)


@dataclass
class Drawn:
    """A drawn schema with drawn records, and a folder of their own."""

    folder: Path
    random: Random
    schema: Schema
    rows: Rows

    @property
    def table(self) -> pa.Table:
        rows = to_arrow_table(self.rows, "rows", self.schema)
        return fit_to_schema(rows, self.schema, "rows")

    def more(self, keys: range, limits: Limits = ANYTHING) -> Rows:
        return draw_rows(self.random, self.schema, keys, limits)

    def check(self, found: Rows, expected: Rows | None = None) -> None:
        """Compare what came back with what was drawn."""
        assert comparable_rows(found) == comparable_rows(
            self.rows if expected is None else expected
        )

    def lake(self) -> Lake:
        return open_lake(self.folder / "lake")

    def send(self, streams: LakeStreams, name: str, data: Any, sequence: int = 1) -> None:
        streams.create(name, schema=self.schema, key=["k"], partitions=2)
        streams.append(name, data, producer="test", sequence=sequence)


Draw = Callable[..., Iterator[Drawn]]


@pytest.fixture
def drawn(tmp_path: Path) -> Draw:
    """Draw a schema with records for each seed."""

    def draw(seeds: range, limits: Limits = ANYTHING) -> Iterator[Drawn]:
        for seed in seeds:
            random = Random(seed)
            schema = draw_schema(random, limits=limits)
            folder = tmp_path / str(seed)
            folder.mkdir()
            yield Drawn(folder, random, schema, draw_rows(random, schema, range(12), limits))

    return draw


def read(streams: LakeStreams, name: str) -> Rows:
    return python_rows(streams.read_arrow(streams.all_ranges(name)))


# -- streams and files


def test_records_of_streams(drawn: Draw) -> None:
    for each in drawn(QUICK):
        streams = LakeStreams(lake_in(InMemoryStore()))
        each.send(streams, "rows", each.rows)
        assert streams.append("rows", each.table, producer="test", sequence=1).duplicate
        each.check(read(streams, "rows"))
        parts = streams.read_parts(streams.all_ranges("rows"))
        each.check(python_rows(pa.concat_tables(parts)))


@pytest.mark.spark
def test_records_of_streams_by_spark(drawn: Draw, spark: SparkSession) -> None:
    for each in drawn(SLOW):
        streams = LakeStreams(each.lake())
        each.send(streams, "frame", spark.createDataFrame(each.table))
        assert streams.append("frame", each.rows, producer="test", sequence=1).duplicate
        each.check(read(streams, "frame"))
        frame = streams.read(spark, streams.all_ranges("frame"))
        each.check(python_rows(frame.toArrow()))


def write_files(each: Drawn, format: FileFormat) -> LocalTree:
    """Write the records into one file, in the folder of a version."""
    folder = each.folder / "files" / "v1"
    folder.mkdir(parents=True)
    if format == "parquet":
        pq.write_table(each.table, folder / "a.parquet")
    else:
        lines = [f"{write_json(row)}\n" for row in each.rows]
        (folder / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "_SUCCESS").touch()
    return LocalTree(str(folder))


def files_of(tree: LocalTree) -> Any:
    return [file for file in tree.list() if not file.path.endswith("_SUCCESS")]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_records_of_files(drawn: Draw, format: FileFormat) -> None:
    for each in drawn(QUICK, FINITE):
        tree = write_files(each, format)
        files = DeclaredFiles(tree, format, each.schema, "files")
        each.check(python_rows(read_files(files, files_of(tree)).select(each.schema.names)))
        source = FileSource(str(each.folder / "files"), format, each.schema)
        advance(each, bounded_dataset("d", input=source, key="k", partitions=2), IN_PROCESS)
        check_entries(each, each.rows)


@pytest.mark.spark
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_records_of_files_by_spark(drawn: Draw, spark: SparkSession, format: FileFormat) -> None:
    for each in drawn(SLOW, FINITE):
        tree = write_files(each, format)
        files = DeclaredFiles(tree, format, each.schema, "files")
        frame = read_files_with_spark(spark, files, files_of(tree)).select(
            *[f"`{name}`" for name in each.schema.names]
        )
        each.check(python_rows(frame.toArrow()))
        source = FileSource(str(each.folder / "files"), format, each.schema)
        advance(each, bounded_dataset("d", input=source, key="k", partitions=2), lambda: spark)
        check_entries(each, each.rows, spark)


# -- datasets

IN_PROCESS_OR_SPARK = pytest.mark.parametrize(
    "engine", ["in process", pytest.param("spark", marks=pytest.mark.spark)]
)


def session_of(engine: str, request: pytest.FixtureRequest) -> Any:
    if engine == "spark":
        return request.getfixturevalue("spark")
    return None


def advance(each: Drawn, dataset: AdjunctDataset, spark: Any) -> None:
    lake = each.lake()
    systems = {"lake": LakeStreams(lake)}
    advance_dataset(dataset, lake=lake, systems=systems, spark=spark, by="test")


def check_entries(each: Drawn, expected: Rows, spark: SparkSession | None = None) -> None:
    """Compare what readers of the dataset d find: lookups, scans and Spark."""
    with open_dataset(each.lake(), "d") as served:
        each.check([entry for _, entry in served.items()], expected)
        each.check([*served.get_all([row["k"] for row in expected]).values()], expected)
        if spark is not None:
            each.check(python_rows(served.frame(spark).toArrow()), expected)


@IN_PROCESS_OR_SPARK
def test_entries_of_versions(drawn: Draw, engine: str, request: pytest.FixtureRequest) -> None:
    session = session_of(engine, request)
    for each in drawn(SLOW if session else QUICK):
        streams = LakeStreams(each.lake())
        streams.create("s", schema=each.schema, key=["k"], partitions=2)
        spec = bounded_dataset("d", input="lake.s", key="k", partitions=2)
        later = [*each.rows[:4], *each.more(range(4, 16))]
        for number, rows in enumerate([each.rows, later], 1):
            streams.append("s", rows, producer="test", sequence=number, end_of_dataset=f"v{number}")
            advance(each, spec, IN_PROCESS if session is None else lambda: session)
            check_entries(each, rows, session)
        before = comparable_rows(each.rows)
        changed = []
        for row in comparable_rows(later):
            if row["k"] < 12 and row not in before:
                changed.append(row["k"])
        with open_dataset(each.lake(), "d") as served:
            found = served.diff("v1", "v2", sample=50)
            each.check([*map(dict, found_rows(found))], [r for r in later if r["k"] in changed])
            assert served.verify(deep=True).damaged == ()


def found_rows(found: Any) -> Iterator[dict[str, Any]]:
    for change in found.sample.changed:
        yield {"k": change.key["k"]} | change.new


@IN_PROCESS_OR_SPARK
def test_entries_that_follow_changes(
    drawn: Draw, engine: str, request: pytest.FixtureRequest
) -> None:
    session = session_of(engine, request)
    spark = IN_PROCESS if session is None else lambda: session
    for each in drawn(SLOW if session else QUICK):
        streams = LakeStreams(each.lake())
        spec = unbounded_dataset("d", input="lake.s", key="k", partitions=2)
        held: dict[int, dict[str, Any]] = {}
        for number, rows in enumerate([each.rows, each.more(range(8, 16)), each.more(range(4))], 1):
            gone = [{"k": 15 - number, "__tombstone": True}]
            kept = [{**row, "__tombstone": False} for row in rows if row["k"] != 15 - number]
            each.send(streams, "s", kept + gone, number)
            advance(each, spec, spark)
            held |= {row["k"]: row for row in rows}
            held.pop(15 - number, None)
            check_entries(each, [*held.values()], session)
        compact_dataset(each.lake(), "d", spark=spark, by="test", level="major")
        check_entries(each, [*held.values()], session)


@IN_PROCESS_OR_SPARK
def test_entries_that_a_function_returns(
    drawn: Draw, engine: str, request: pytest.FixtureRequest
) -> None:
    session = session_of(engine, request)
    for each in drawn(SLOW if session else QUICK):
        query = QuerySource(lambda spark, computation, each=each: each.table, schema=each.schema)
        if session is not None:
            query = QuerySource(
                lambda spark, computation, each=each: session.createDataFrame(each.table),
                schema=each.schema,
            )
        spec = bounded_dataset("d", input=query, key="k", partitions=2)
        advance(each, spec, IN_PROCESS if session is None else lambda: session)
        check_entries(each, each.rows, session)


def test_records_and_entries_in_other_engines(drawn: Draw) -> None:
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    for each in drawn(QUICK):
        lake = each.lake()
        streams = LakeStreams(lake)
        each.send(streams, "s", each.rows)
        advance(each, unbounded_dataset("d", input="lake.s", key="k", partitions=2), IN_PROCESS)
        with open_dataset(lake, "d") as served:
            for view in (stream_view(lake, "s"), served):
                each.check(python_rows(pyarrow_dataset(view).to_table()))
                each.check(polars_frame(view).collect().to_dicts())
                connection = duckdb.connect()
                duckdb_view(connection, view, "drawn")
                result = connection.execute("FROM drawn")
                names = [column[0] for column in result.description]
                rows = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
                each.check(rows)
        for name in ("lake.s", "d"):
            with query_lake(lake, f"SELECT * FROM {name}") as reader:
                each.check(python_rows(reader.read_all()))


# -- applications


def prefixed(rows: Rows, prefix: str) -> Rows:
    """Return rows whose columns, but the key, have this letter before their names."""
    return [
        {name if name == "k" else prefix + name: value for name, value in row.items()}
        for row in rows
    ]


@dataclass
class Sides:
    """Streams of drawn records in the lake of an application, each named by a letter with which its
    columns begin, but `k` and `ts`.
    """

    each: Drawn
    world: StepWorld
    rows: dict[str, Rows] = field(default_factory=dict)

    def create(self, letter: str) -> None:
        columns = {"k": "bigint", "ts": "timestamp", **self.types(letter)}
        self.world.streams.create(letter, schema=Schema.of(columns), key=["k"], partitions=2)

    def send(self, letter: str, rows: Rows, **options: Any) -> None:
        at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
        self.rows[letter] = prefixed(rows, letter)
        timed = [{"ts": at, **row} for row in self.rows[letter]]
        self.world.streams.append(letter, timed, producer="test", sequence=1, **options)

    def types(self, letters: str) -> dict[str, str]:
        types = {}
        for letter in letters:
            for column in self.each.schema.fields[1:]:
                types[letter + column.name] = column.type
        return types

    def merged(self, letters: str) -> Rows:
        """Return the records of these streams joined by their keys."""
        found: dict[int, dict[str, Any]] = {}
        for letter in letters:
            for row in self.rows[letter]:
                found[row["k"]] = found.get(row["k"], {}) | row
        return [*found.values()]

    def check_output(self, name: str, letters: str) -> None:
        found = self.world.streams.read_arrow(self.world.streams.all_ranges(name))
        found = found.select(["k", *self.types(letters)])
        self.each.check(python_rows(found), self.merged(letters))


BY_SPARK: list[Any] = [
    pytest.param(SmallBatches, marks=[pytest.mark.spark, pytest.mark.long]),
    pytest.param(ByTasks, marks=pytest.mark.spark),
]


def sides_of(each: Drawn, engine: type[BatchEngine], request: pytest.FixtureRequest) -> Sides:
    spark = IN_PROCESS
    if engine is not WithoutSpark:
        session = request.getfixturevalue("spark")
        spark = lambda: session  # noqa: E731
    return Sides(each, StepWorld(each.lake(), each.folder, spark))


def run(world: StepWorld, app: Application, engine: type[BatchEngine]) -> None:
    world.advance(*app.datasets)
    report = run_step(world.context(app), engine())
    if engine is WithoutSpark:
        assert report.in_process_batches == report.batches


def seeds_of(engine: type[BatchEngine]) -> range:
    return QUICK if engine is WithoutSpark else SLOW


@pytest.mark.parametrize("engine", [WithoutSpark, *BY_SPARK])
def test_records_that_are_joined_sent_and_looked_up(
    drawn: Draw, engine: type[BatchEngine], request: pytest.FixtureRequest
) -> None:
    for each in drawn(seeds_of(engine), FINITE):
        sides = sides_of(each, engine, request)
        for letter, last in {"r": {}, "b": {"end_of_dataset": "v1"}, "u": {}}.items():
            sides.create(letter)
            sides.send(letter, each.more(range(12), FINITE), **last)
        path = each.folder / "tables.sqlite"
        columns = {"k": "bigint", **sides.types("rbu")}
        store = SqliteTable(path, "t", "k", columns=columns, create=True)
        remote = RemoteTable("remote", key="k", read_function=store, write_function=store)
        app = Application("joins")
        versions = app.table(bounded_dataset("b", input="lake.b", key="k", partitions=2))
        changes = app.table(unbounded_dataset("u", input="lake.u", key="k", partitions=2))
        joined = (
            app.input_stream("lake.r")
            .join(versions, on="k", select=[*sides.types("b")])
            .join(changes, on="k", select=[*sides.types("u")])
        )
        joined.send_to(app.output_stream("lake.joined", partitions=2, key="k"))
        joined.select(*columns).send_to(app.table(remote))
        run(sides.world, app, engine)
        sides.check_output("joined", "rbu")
        with BlockingTable(remote) as stored:
            each.check([*stored.get_all(range(12)).values()], sides.merged("rbu"))
        app = Application("lookups")
        found = app.input_stream("lake.r").join(
            app.table(remote), on="k", select=[*sides.types("bu")]
        )
        found.send_to(app.output_stream("lake.found", partitions=2, key="k"))
        run(sides.world, app, engine)
        sides.check_output("found", "rbu")


@pytest.mark.parametrize("engine", BY_SPARK)
def test_records_that_state_and_local_tables_keep(
    drawn: Draw, engine: type[BatchEngine], request: pytest.FixtureRequest
) -> None:
    for each in drawn(SLOW):
        sides = sides_of(each, engine, request)
        sides.create("l")
        sides.create("r")
        sides.send("l", each.rows)
        app = Application("state")
        times: dict[str, Any] = {"event_time": "ts", "delay": dt.timedelta(seconds=1)}
        left = app.input_stream("lake.l", **times)
        right = app.input_stream("lake.r", **times)
        schema = Schema.of({"k": "bigint", **sides.types("l")})
        local = app.local_table("local", key="k", schema=schema, partitions=2)
        left.select(*schema.names).send_to(local)
        soon = dt.timedelta(seconds=5)
        names = [*sides.types("r")]
        met = left.join_stream(right, on="k", within=soon, name="meet", select=names)
        met.send_to(app.output_stream("lake.met", partitions=2, key="k"))
        run(sides.world, app, engine)
        sides.send("r", each.more(range(12)))
        run(sides.world, app, engine)
        sides.check_output("met", "lr")
        with open_dataset(sides.world.lake, "local") as served:
            each.check([entry for _, entry in served.items()], sides.merged("l"))


# -- Kafka


def json_of(schema: Schema) -> Json:
    return Json(schema)


FORMATS = [
    pytest.param(json_of, FINITE, id="json"),
    pytest.param(avro_of, IN_AVRO, id="avro"),
    pytest.param(protobuf_of, IN_PROTOBUF, id="protobuf"),
]


@pytest.mark.parametrize(("form", "limits"), FORMATS)
def test_records_of_messages(drawn: Draw, form: Any, limits: Limits) -> None:
    for each in drawn(QUICK, limits):
        topic = KafkaTopic(value=form(each.schema))
        assert topic.schema().types == each.schema.types
        messages = encode_table(each.table, topic, "kafka.s").column("__value").to_pylist()
        each.check(python_rows(create_decoder(topic, "kafka.s")(batch_of(messages))))


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.parametrize(("form", "limits"), FORMATS)
def test_records_of_topics(
    drawn: Draw, spark: SparkSession, kafka: KafkaServer, form: Any, limits: Limits
) -> None:
    for each in drawn(SLOW, limits):
        topics = {}
        for name in ("rows", "frame"):
            topics[name] = KafkaTopic(value=form(each.schema), topic=kafka.new_topic(2))
        settings = KafkaSettings("kafka", kafka.bootstrap, topics=topics)
        streams = KafkaStreams(lake_in(InMemoryStore()), settings)
        for name, data in {"rows": each.rows, "frame": spark.createDataFrame(each.table)}.items():
            streams.append(name, data, producer="test", sequence=1)
            ends = streams.upcoming(streams.partitions(name))
            ranges = {ssp: OffsetRange("0", end) for ssp, end in ends.items()}
            each.check(python_rows(streams.read(spark, ranges).toArrow().select(each.schema.names)))


# -- remote tables


@pytest.mark.parametrize("backend", WHOLE_STORES)
def test_records_of_remote_tables(
    drawn: Draw, backend: Any, request: pytest.FixtureRequest
) -> None:
    limits = replace(FINITE, empty_keys=backend is not dynamodb)
    for each in drawn(QUICK, limits):
        columns = {name: kind for name, kind in each.schema.types.items() if name != "k"}
        new_store = backend(request, each.folder, {"id": "string", **columns})
        with blocking(new_store()) as table:
            records = [{**row, "id": f"k{row['k']}"} for row in each.rows]
            for record in records:
                del record["k"]
            table.put_all([(record["id"], record) for record in records])
            found = table.get_all([record["id"] for record in records])
        rows = [
            {"k": int(key[1:]), **dict.fromkeys(columns)} | record for key, record in found.items()
        ]
        each.check([{name: row[name] for name in each.schema.names} for row in rows])


def test_records_of_a_service(drawn: Draw) -> None:
    with running_service() as service:
        for each in drawn(QUICK, IN_PLAIN_JSON):
            with blocking(HttpTable(service.url, "/t/{k}", "k"), "k") as table:
                table.put_all([(row["k"], row) for row in each.rows])
                each.check([*table.get_all(range(12)).values()])


def blocking(store: Any, key: str = "id") -> BlockingTable:
    return BlockingTable(RemoteTable("t", key=key, read_function=store, write_function=store))


# -- what does not fit


def spoilt(each: Drawn) -> tuple[dict[str, Any], str, str]:
    """Return a record with a part that does not fit, the column and the path of the part."""
    column = each.random.choice(each.schema.names[1:])
    row = each.random.choice(each.rows)
    wrong, path = spoil(each.random, row, column, parse_type(each.schema.field(column).type))
    return wrong, column, path


def test_a_part_that_does_not_fit_is_rejected_by_its_path(drawn: Draw) -> None:
    for each in drawn(range(rounds(25, 500)), FINITE):
        wrong, column, path = spoilt(each)
        streams = LakeStreams(lake_in(InMemoryStore()))
        with pytest.raises(SchemaMismatchError) as failure:
            each.send(streams, "s", [*each.rows, wrong])
        check_failure(failure.value, column, path)
        assert failure.value.row == len(each.rows)
        assert read(streams, "s") == []

        (each.folder / "a.jsonl").write_text(
            f"{write_json(each.rows[0])}\n{write_json(wrong)}\n", encoding="utf-8"
        )
        tree = LocalTree(str(each.folder))
        with pytest.raises(SchemaMismatchError) as failure:
            read_files(DeclaredFiles(tree, "jsonl", each.schema, "files"), tree.list())
        check_failure(failure.value, column, path)
        assert failure.value.line == 2

        decode = create_decoder(KafkaTopic(value=Json(each.schema)), "kafka.s")
        with pytest.raises(SchemaMismatchError) as failure:
            decode(batch_of([write_json(each.rows[0]).encode(), write_json(wrong).encode()]))
        assert repr(path) in failure.value.problem

        columns = {"id": "string", **dict([*each.schema.types.items()][1:])}
        store = SqliteTable(each.folder / "t.sqlite", "t", "id", columns=columns, create=True)
        with blocking(store) as table, pytest.raises(SchemaMismatchError) as failure:
            table.put("a", {name: wrong[name] for name in columns if name != "id"})
        assert failure.value.column == column


def check_failure(error: AdjunctError, column: str, path: str) -> None:
    assert error.facts["column"] == column
    assert repr(path) in error.problem


def test_a_part_of_another_type_is_rejected_by_its_path(drawn: Draw) -> None:
    for each in drawn(range(rounds(25, 500))):
        column, path, table = with_other_type(each)
        streams = LakeStreams(lake_in(InMemoryStore()))
        with pytest.raises(SchemaMismatchError) as failure:
            each.send(streams, "s", table)
        check_failure(failure.value, column, path)
        pq.write_table(table, each.folder / "a.parquet")
        tree = LocalTree(str(each.folder))
        with pytest.raises(SchemaMismatchError) as failure:
            read_files(DeclaredFiles(tree, "parquet", each.schema, "files"), tree.list())
        check_failure(failure.value, column, path)


@pytest.mark.spark
def test_a_part_of_another_type_is_rejected_by_its_path_by_spark(
    drawn: Draw, spark: SparkSession
) -> None:
    for each in drawn(range(rounds(4, 100))):
        column, path, table = with_other_type(each)
        streams = LakeStreams(lake_in(InMemoryStore()))
        with pytest.raises(SchemaMismatchError) as failure:
            each.send(streams, "s", spark.createDataFrame(table))
        check_failure(failure.value, column, path)


def with_other_type(each: Drawn) -> tuple[str, str, pa.Table]:
    """Return a column, the path of a part of it, and records in which that part has another type
    than is declared.
    """
    column = each.random.choice(each.schema.names[1:])
    other, path = spoil_type(each.random, parse_type(each.schema.field(column).type), column)
    table = each.table
    place = table.column_names.index(column)
    nulls = pa.nulls(table.num_rows, arrow_type(str(other)))
    return column, path, table.set_column(place, column, nulls)

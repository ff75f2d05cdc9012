"""A version in other engines: the same rows as were written, read from the lake's own files."""

from __future__ import annotations

import datetime as dt
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest

from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
)
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.arrow_files import arrow_filesystem
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.objects.s3_store import S3Store
from dagster_adjunct.resources.objects.store import InMemoryStore, S3Options
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.sealing import Row, table_of, view_of

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")

SCHEMA = Schema.of(
    {
        "k": "string",
        "the.key": "int",
        "t": "tinyint",
        "s": "smallint",
        "b": "bigint",
        "f": "float",
        "d": "double",
        "day": "date",
        "at": "timestamp",
        "bin": "binary",
        "m": "decimal(9,2)",
        "wide": "decimal(38,4)",
        'odd "name"': "boolean",
    }
)
EMPTY: Row = (None,) * (len(SCHEMA.names) - 1)


def row(n: int) -> Row:
    return (
        f"clé {n}",
        n,
        n % 100,
        n,
        n * 2**40,
        n / 2,
        math.inf if n == 3 else n / 3,
        dt.date(2000, 1, 1 + n),
        dt.datetime(2024, 1, 1, 0, 0, 0, n, dt.UTC),
        bytes([0, n]),
        Decimal(n) / 4,
        Decimal(n) / 8,
        n % 2 == 0,
    )


ROWS: list[Row] = [*map(row, range(20)), ("nulls", *EMPTY)]


def by_key(rows: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(
        (tuple(r.values() if isinstance(r, dict) else r) for r in rows), key=lambda r: r[0]
    )


EXPECTED = by_key(ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> VersionReader:
    """A version in a folder whose name means something to engines that expand patterns or
    partitions.
    """
    lake = open_lake(tmp_path / "k=7" / "it's a läke #1, 100%")
    return view_of(lake.store, ROWS, schema=SCHEMA, key=["k"], partitions=3)


@pytest.fixture
def bucket(s3_server: S3Server) -> VersionReader:
    lake = open_lake(s3_server.url(), settings=s3_server.settings)
    return view_of(lake.store, ROWS, schema=SCHEMA, key=["k"], partitions=3)


def check_all_engines(view: VersionReader) -> None:
    dataset = pyarrow_dataset(view)
    assert dataset.schema.equals(view.schema.to_arrow())
    assert by_key(dataset.to_table().to_pylist()) == EXPECTED
    assert by_key(dataset.to_table(filter=pc.field("b") > 2**43, columns=["k"]).to_pylist()) == [
        r[:1] for r in EXPECTED if r[4] is not None and r[4] > 2**43
    ]

    connection = duckdb.connect()
    duckdb_view(connection, view, 'my "view"')
    result = connection.execute('SELECT * FROM "my ""view"""')
    assert tuple(column[0] for column in result.description) == view.schema.names
    assert by_key(result.fetchall()) == EXPECTED
    counted = connection.execute(
        'SELECT sum(b), count(*), min(day) FROM "my ""view""" WHERE "the.key" >= 10'
    )
    assert counted.fetchall() == [(sum(range(10, 20)) * 2**40, 10, dt.date(2000, 1, 11))]

    frame = polars_frame(view)
    assert by_key(frame.collect().to_dicts()) == EXPECTED
    assert frame.select("k", "b").filter(frame_column("b") > 2**43).collect().height == 11


def frame_column(name: str) -> Any:
    import polars

    return polars.col(name)


def test_every_engine_reads_what_was_written_in_a_folder(folder: VersionReader) -> None:
    files = parquet_files(folder)
    assert [Path(path).stat().st_size for path in files] == [
        file.size for file in folder.sealed.generations[0].files
    ]
    check_all_engines(folder)


@pytest.mark.server
def test_every_engine_reads_what_was_written_on_s3(bucket: VersionReader) -> None:
    assert all(
        path.startswith(f"{bucket.store.url}/datasets/planes/data/")
        for path in parquet_files(bucket)
    )
    check_all_engines(bucket)


def test_columns_whose_names_are_patterns_of_polars_are_those_columns(tmp_path: Path) -> None:
    schema = Schema.of({"k": "string", "*": "int", "^k$": "int"})
    view = view_of(
        open_lake(tmp_path / "lake").store, [("a", 1, 2)], schema=schema, key=["k"], partitions=1
    )
    assert polars_frame(view).collect().rows(named=True) == [{"k": "a", "*": 1, "^k$": 2}]


def test_a_folder_whose_name_is_a_pattern_gives_no_files_of_others(tmp_path: Path) -> None:
    lakes = [open_lake(tmp_path / name) for name in ("lak?", "lake")]
    views = [
        view_of(lake.store, [ROWS[i]], schema=SCHEMA, key=["k"], partitions=1)
        for i, lake in enumerate(lakes)
    ]
    connection = duckdb.connect()
    duckdb_view(connection, views[0], "planes")
    assert connection.execute("SELECT * FROM planes").fetchall() == [ROWS[0]]
    assert polars_frame(views[0]).collect().rows() == [ROWS[0]]


def test_a_view_is_replaced_by_that_of_the_next_version(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    connection = duckdb.connect()
    connection.execute("CREATE VIEW planes AS SELECT 'older' AS tailnum")
    for number, rows in enumerate([[("N1", 1)], [], [("N2", 2), ("N3", 3)]], start=1):
        view = view_of(
            lake.store,
            rows,
            schema=Schema.of(tailnum="string", seats="int"),
            key=["tailnum"],
            number=number,
        )
        duckdb_view(connection, view, "planes")
        assert sorted(connection.execute("FROM planes").fetchall()) == rows


def test_a_version_without_rows_has_its_columns(tmp_path: Path) -> None:
    view = view_of(open_lake(tmp_path / "lake").store, [], schema=SCHEMA, key=["k"])
    assert parquet_files(view) == []
    assert pyarrow_dataset(view).to_table().equals(SCHEMA.to_arrow().empty_table())
    assert polars_frame(view).collect().columns == list(SCHEMA.names)
    connection = duckdb.connect()
    duckdb_view(connection, view, "v")
    assert [c[0] for c in connection.execute("FROM v").description] == list(SCHEMA.names)


def unbounded(store: Any, tombstones: list[bool], deltas: int = 0) -> VersionReader:
    schema = Schema.of(k="string", v="int")
    sealed = view_of(store, [], schema=schema, key=["k"], partitions=1).sealed
    facts = {name: getattr(sealed, name) for name in SealedVersion.model_fields}
    facts.update(positioned=True, order_by=None if deltas else ("v",))
    layout = SealedVersion(**facts).layout
    generations = []
    for number in range(1, 2 + deltas):
        table = table_of(schema, [(f"k{n}", n) for n in range(len(tombstones))])
        for name, kind, values in (
            (POSITION, "int64", range(len(tombstones))),
            (TOMBSTONE, "bool", tombstones),
        ):
            table = table.append_column(name, pc.cast(list(values), kind))
        files = write_arrow_buckets(
            table, store, f"datasets/d/data/a{number}", layout, WriteOptions("d")
        )
        generations.append(Generation(number, f"datasets/d/data/a{number}", tuple(files)))
    live = None if deltas or any(tombstones) else len(tombstones)
    return VersionReader(
        store, "d", SealedVersion(**{**facts, "generations": tuple(generations), "rows": live})
    )


def test_hidden_columns_are_left_out(tmp_path: Path) -> None:
    view = unbounded(open_lake(tmp_path / "lake").store, [False, False])
    rows = [("k0", 0), ("k1", 1)]
    connection = duckdb.connect()
    duckdb_view(connection, view, "v")
    assert connection.execute("FROM v").fetchall() == rows
    assert polars_frame(view).collect().rows() == rows
    assert by_key(pyarrow_dataset(view).to_table().to_pylist()) == rows


@pytest.mark.parametrize(
    ("tombstones", "deltas", "message"),
    [
        (
            [False],
            1,
            (
                r"2 generations some are superseded or deleted.*adjunct dataset compact d --level"
                r" major"
            ),
        ),
        (
            [False, True],
            0,
            r"some are deletions that later changes are compared with.*keep_tombstones",
        ),
    ],
)
def test_what_has_to_be_merged_is_refused(
    tmp_path: Path, tombstones: list[bool], deltas: int, message: str
) -> None:
    view = unbounded(open_lake(tmp_path / "lake").store, tombstones, deltas)
    for hand_over in (
        parquet_files,
        pyarrow_dataset,
        polars_frame,
        lambda v: duckdb_view(duckdb.connect(), v, "v"),
    ):
        with pytest.raises(DatasetError, match=message):
            hand_over(view)


def test_a_lake_in_memory_is_refused() -> None:
    view = view_of(InMemoryStore(), ROWS, schema=SCHEMA, key=["k"])
    with pytest.raises(ConfigurationError) as caught:
        parquet_files(view)
    assert str(caught.value.url).startswith("memory://")


def test_an_engine_that_is_not_installed_is_named(
    folder: VersionReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match=r'pip install "dagster-adjunct\[polars\]"'):
        polars_frame(folder)


@pytest.mark.lengthy
def test_settings_of_the_store_hold_for_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    on_aws = arrow_filesystem(S3Store("s3://bucket/lake", S3Options(region="eu-west-1")))
    assert on_aws.region == "eu-west-1"
    other = S3Store(
        "s3://bucket/lake", S3Options(endpoint="http://127.0.0.1:9", region="x", attempts=1)
    )
    with pytest.raises(OSError, match=r"(?i)curl|connect"):
        arrow_filesystem(other).get_file_info("bucket/lake")

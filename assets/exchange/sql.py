"""SQL over the lake by DuckDB: a query names datasets, their versions and streams, and reads
nothing else.

    planes              the version of a dataset that is served
    "planes@v2"         one of its versions, by name, id or the beginning of an id
    "lake.flights"      a stream, also lake.flights; with the columns __tombstone and __epoch

The names are taken from DuckDB's own syntax tree. Each becomes a view over the stored files, or
over the entries in memory where deltas must be merged; values of sensitive columns are masked.
DuckDB then has no access to files, the network, extensions and settings.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.exchange.handover import must_be_masked, read_files, stream_view
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.reading.version_reader import VersionReader, read_entries
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.file_streams.overview import is_of_files
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import EPOCH, LAKE
from dagster_adjunct.resources.user_code import MASKED

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_BATCH = 10_000
_OF_DUCKDB = ("information_schema", "pg_catalog")


@contextmanager
def query_lake(lake: Lake, sql: str) -> Iterator[pa.RecordBatchReader]:
    """Yield the result of one SELECT over the lake's datasets and streams; the versions are leased
    until the end.

    Raises ConfigurationError for anything but one SELECT and for what DuckDB rejects,
    DatasetNotFoundError and StreamNotFoundError for a name that does not exist, and DatasetError as
    `open_dataset` does.
    """
    duckdb = import_package("a query in SQL", "duckdb", "duckdb")
    with ExitStack() as opened, _translate_errors(duckdb):
        connection = opened.enter_context(
            closing(duckdb.connect(":memory:", config={"python_enable_replacements": False}))
        )
        for name in _named_tables(connection, sql):
            _create_view(connection, opened, lake, name)
        for setting in (
            "TimeZone = 'UTC'",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        result = connection.sql(sql)
        # The latter is its name in older releases.
        read: Callable[[int], Any] = (
            getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
        )
        yield read(_BATCH)


@contextmanager
def _translate_errors(duckdb: Any) -> Iterator[None]:
    """Raise the errors of DuckDB as ConfigurationError."""
    try:
        yield
    except duckdb.Error as error:
        raise ConfigurationError(
            f"DuckDB rejects the query: {str(error).strip()}",
            "Correct the SQL, which is DuckDB's.",
            argument="sql",
        ) from error


def _named_tables(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Return the names of tables in a query, with their schema, if they have one, before a dot."""
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    tree = json.loads(text)
    if tree.get("error_type") == "parser":
        connection.execute(sql)  # raises DuckDB's own error, which shows the position
    if tree.get("error") or len(tree.get("statements", ())) != 1:
        raise ConfigurationError(
            "expected one query (SELECT, FROM, VALUES, DESCRIBE or SUMMARIZE), which reads the"
            " lake.",
            "Give one query; write into a stream with adjunct stream append NAME FILE, or into a"
            " file with --output.",
            argument="sql",
        )
    tables: dict[str, None] = {}
    local: set[str] = set()
    for node in _nodes(tree):
        if node.get("type") == "BASE_TABLE" and node.get("schema_name") not in _OF_DUCKDB:
            parts = (node.get("catalog_name"), node.get("schema_name"), node["table_name"])
            tables[".".join(filter(None, parts))] = None
        # Tables that the query itself defines: WITH name AS (…).
        local |= {entry["key"] for entry in node.get("cte_map", {}).get("map", ())}
    return [name for name in tables if name not in local]


def _nodes(tree: object) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a JSON document, the outer ones before those within them."""
    children: Iterable[object] = ()
    if isinstance(tree, Mapping):
        yield tree
        children = tree.values()
    elif isinstance(tree, list):
        children = tree
    for child in children:
        yield from _nodes(child)


def _create_view(
    connection: duckdb.DuckDBPyConnection, opened: ExitStack, lake: Lake, name: str
) -> None:
    """Create the view of what a query names: of a stream, which has a dot in its name, or else of a
    dataset or one of its versions.

    A stream's name may be written as one name in quotes, or as a schema and a table, so it gets a
    view for each.
    """
    dataset, _, version = name.partition("@")
    system, dot, stream = name.partition(".")
    if dot:
        if system != LAKE or stream not in LakeStreams(lake).list_streams():
            raise _stream_not_found_error(lake, name)
        view = stream_view(lake, stream)
        rows: Any = read_files(view).dataset()
        schema = view.schema
        columns = view.columns
    else:
        if dataset not in list_datasets(lake):
            raise _dataset_not_found_error(lake, name, dataset)
        open_version = opened.enter_context(open_dataset(lake, dataset, version=version or None))
        rows = open_version.lend(_entries)
        schema = open_version.schema
        columns = schema.types
    connection.register(f"adjunct {name}", rows)
    shown = ", ".join(_shown(column, schema) for column in columns)
    create = f"AS SELECT {shown} FROM {_quoted(f'adjunct {name}')}"
    connection.execute(f"CREATE TEMP VIEW {_quoted(name)} {create}")
    if dot:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(system)}")
        connection.execute(f"CREATE VIEW {_quoted(system)}.{_quoted(stream)} {create}")


def _entries(reader: VersionReader) -> Any:
    """Return the entries of a version: a pyarrow dataset of its files, or a table if deltas must
    be merged.
    """
    if must_be_masked(reader):
        return read_entries(reader, None)
    return read_files(reader).dataset()


def _shown(column: str, schema: Schema) -> str:
    """Return the SQL expression for a column of a view: masked if it is sensitive."""
    name = _quoted(column)
    if column == EPOCH:
        return f"coalesce({name}, 0) AS {name}"
    if column in schema.sensitive:
        return f"CASE WHEN {name} IS NOT NULL THEN '{MASKED}' END AS {name}"
    return name


def _quoted(name: str) -> str:
    """Return a name quoted for DuckDB's SQL."""
    return '"' + name.replace('"', '""') + '"'


def _dataset_not_found_error(lake: Lake, name: str, dataset: str) -> DatasetNotFoundError:
    """Return the error for a query that names a dataset which the lake does not have."""
    datasets = list_datasets(lake)
    streams = LakeStreams(lake).list_streams()
    problem = (
        f"the query names {name!r}, and there is no dataset {dataset!r}: the lake has"
        f" {_listed(datasets)}."
    )
    if dataset in streams:
        return DatasetNotFoundError(
            problem, f'For the stream write "lake.{dataset}".', dataset=dataset
        )
    near = difflib.get_close_matches(dataset, datasets, n=1)
    if near:
        step = f"Did you mean {near[0]}?"
    else:
        step = f"Streams are {_listed([f'lake.{each}' for each in streams])}."
    return DatasetNotFoundError(problem, step, dataset=dataset)


def _stream_not_found_error(lake: Lake, name: str) -> StreamNotFoundError:
    """Return the error for a query that names a stream which the lake does not have."""
    streams = [f"lake.{stream}" for stream in LakeStreams(lake).list_streams()]
    problem = (
        f"the query names {name!r}, which is no stream of the lake: it has {_listed(streams)}."
    )
    if is_of_files(name):
        return StreamNotFoundError(
            problem,
            f"Export the stream of files, adjunct stream export {name} --to FILE.parquet, and query"
            " that file with DuckDB itself.",
            stream=name,
        )
    if not name.startswith(f"{LAKE}."):
        return StreamNotFoundError(
            problem,
            "Streams of other systems and files can't be queried: name one of the lake.",
            stream=name,
        )
    near = difflib.get_close_matches(name, streams, n=1)
    if near:
        step = f'Did you mean "{near[0]}"?'
    else:
        step = "Name one of these, or check --lake."
    return StreamNotFoundError(problem, step, stream=name)


def _listed(names: list[str]) -> str:
    """Return names in a list, for messages."""
    return ", ".join(names) or "none"

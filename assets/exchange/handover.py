"""Views of a version or stream for other engines (pyarrow, DuckDB, Polars), over the lake's files without copies.

A view does not follow the dataset or stream. An open dataset leases the version of its views until it is closed; an
Iceberg catalogue retains what is registered in it (`iceberg.py`). The files of a stream's view are not retained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.assets.declaration.change_values import describe_order
from dagster_adjunct.assets.reading.dataset import Dataset
from dagster_adjunct.assets.reading.history import (
    EntriesAt,
    EntriesOverTime,
    Reader,
    Span,
    VersionsOverTime,
    content_columns,
    history_edge,
    time_column_names,
)
from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import TOMBSTONE, datetime_from_micros
from dagster_adjunct.resources.bucketing.files import attempt_id
from dagster_adjunct.resources.bucketing.timeline import VALID_FROM, VALID_TO
from dagster_adjunct.resources.common import unqualify_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.arrow_files import arrow_filesystem, object_location
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type
from dagster_adjunct.resources.streams.lake.lineage import WithoutPosition, find_replaced_results
from dagster_adjunct.resources.streams.lake.manifest import HIDDEN_COLUMNS, SupersededRange, list_segments
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    LAKE,
    POSITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    Epochs,
)
from dagster_adjunct.resources.streams.system import TOMBSTONE as STREAM_TOMBSTONE
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    import duckdb
    import polars
    import pyarrow.dataset as pads


SHOWN_OVER_TIME = {VALID_FROM: "timestamp", VALID_TO: "timestamp", TOMBSTONE: "boolean"}
"""The additional columns with a row's validity, in files and in views of all rows."""


@dataclass(frozen=True, slots=True)
class TimedFiles:
    """A view of rows over time: those valid at `moment`, or now without a `moment`.

    With `whole` it has all rows without deletions, and joins intervals without a change. The rows come from the base of
    a table with history, whose rows store their validity, or from the files of all versions, with each version's times
    as added columns. pyarrow reads the rows; DuckDB and Polars filter and join them.
    """

    reader: Reader
    whole: bool = False
    moment: datetime | None = None

    def dataset(self) -> pads.Dataset:
        """Return a pyarrow dataset of the rows, with SHOWN_OVER_TIME; intervals are not joined."""
        return self._all().filter(self._condition())

    def create_view(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Create or replace a DuckDB view of the rows."""
        columns = ", ".join(map(_sql_name, self.reader.schema.names))
        source = _register(connection, name, self._all() if self.whole else self.dataset())
        query = self._sql_over_time(source) if self.whole else f"SELECT {columns} FROM {source}"
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {_sql_name(name)} AS {query}")

    def polars_frame(self, polars: Any) -> polars.LazyFrame:
        """Return the rows as a Polars LazyFrame."""
        pl, names = polars, list(self.reader.schema.names)
        if not self.whole:
            return pl.scan_pyarrow_dataset(self.dataset()).select(names)  # type: ignore[no-any-return]
        rows = pl.scan_pyarrow_dataset(self._all())
        if self._edge is not None:
            rows = rows.filter(pl.col(VALID_TO).is_null() | (pl.col(VALID_TO) > self._edge))
        key = list(self.reader.sealed.key)
        same = pl.col(VALID_TO).shift(1).over(key) == pl.col(VALID_FROM)
        same &= ~pl.col(TOMBSTONE).shift(1).over(key) & ~pl.col(TOMBSTONE)
        for name in content_columns(self.reader):
            same &= pl.col(name).shift(1).over(key).eq_missing(pl.col(name))
        rows = rows.sort(*key, VALID_FROM).with_columns(__starts=~same.fill_null(False))
        rows = rows.with_columns(__run=pl.col("__starts").cum_sum().over(key))
        rows = rows.with_columns(pl.col(VALID_TO).last().over([*key, "__run"]))
        start, end, current = time_column_names(self.reader)
        times = [pl.col(VALID_FROM).alias(start)] if start else []
        times += [pl.col(VALID_TO).alias(end), pl.col(VALID_TO).is_null().alias(current)]
        whole = rows.filter(pl.col("__starts") & ~pl.col(TOMBSTONE)).select(*map(pl.col, names), *times)
        return whole  # type: ignore[no-any-return]

    # -- inside

    @property
    def _edge(self) -> datetime | None:
        edge = history_edge(self.reader)
        return None if edge is None else datetime_from_micros(edge)

    def _condition(self) -> Any:
        """Return the pyarrow expression for the rows of this view."""
        valid, end = ~pc.field(TOMBSTONE), pc.field(VALID_TO)
        if self.whole and self._edge is None:
            return valid
        if not self.whole and self.moment is None:
            return valid & end.is_null()
        moment = pa.scalar(self._edge if self.whole else self.moment, arrow_type("timestamp"))
        lasting = valid & (end.is_null() | (end > moment))
        return lasting if self.whole else lasting & (pc.field(VALID_FROM) <= moment)

    def _all(self) -> pads.FileSystemDataset:
        """Return all rows, including deletions."""
        schema = _extend_schema(self.reader.schema.to_arrow(), SHOWN_OVER_TIME)
        return _arrow_dataset(self.reader.store, schema, _files_with_spans(self.reader))

    def _sql_over_time(self, source: str) -> str:
        reader = self.reader
        key = ", ".join(map(_sql_name, reader.sealed.key))
        in_time = f"(PARTITION BY {key} ORDER BY {VALID_FROM})"
        same = [f"NOT {TOMBSTONE}", f"NOT lag({TOMBSTONE}, 1, true) OVER {in_time}"]
        same += [f"coalesce(lag({VALID_TO}) OVER {in_time} = {VALID_FROM}, false)"]
        same += [f"lag({c}) OVER {in_time} IS NOT DISTINCT FROM {c}" for c in map(_sql_name, content_columns(reader))]
        edge = f"TIMESTAMPTZ '{self._edge.isoformat(sep=' ')}'" if self._edge else ""
        exact = f"({VALID_TO} IS NULL OR {VALID_TO} > {edge})" if edge else "true"
        start, end, current = time_column_names(reader)
        columns = [*map(_sql_name, reader.schema.names), *([f"{VALID_FROM} AS {start}"] if start else [])]
        whole = f"PARTITION BY {key}, __run ORDER BY {VALID_FROM} ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING"
        return (
            f"WITH marked AS (SELECT *, NOT ({' AND '.join(same)}) AS __starts FROM {source} "
            f"WHERE {exact}), "
            f"runs AS (SELECT *, sum(__starts::INT) OVER {in_time} AS __run FROM marked), "
            f"ended AS (SELECT * EXCLUDE ({VALID_TO}), last_value({VALID_TO}) OVER ({whole}) AS {VALID_TO} FROM runs) "
            f"SELECT {', '.join(columns)}, {VALID_TO} AS {end}, {VALID_TO} IS NULL AS {current} "
            f"FROM ended WHERE __starts AND NOT {TOMBSTONE}"
        )


def select_timed_files(view: VersionReader | StreamView | EntriesOverTime | EntriesAt) -> TimedFiles | None:
    """Return the TimedFiles of a view with rows over time; None for any other view."""
    if isinstance(view, EntriesOverTime):
        return TimedFiles(view.reader, whole=True)
    if isinstance(view, EntriesAt):
        return None if isinstance(view.reader, VersionsOverTime) else TimedFiles(view.reader, moment=view.moment)
    if isinstance(view, VersionReader) and view.sealed.history is not None:
        return TimedFiles(view)
    return None


def _files_with_spans(reader: Reader) -> list[tuple[Span | None, StoredFile]]:
    """Return the files with the validity of their version; None if their rows store it."""
    what = f"dataset {reader.dataset!r}, version {reader.version}"
    if isinstance(reader, VersionsOverTime):
        return [
            (span, StoredFile(reader.store, what, generation.folder, file))
            for span, generation in zip(reader.spans, reader.generations, strict=True)
            for file in generation.files
        ]
    generations = [generation for generation in reader.sealed.generations if generation.files]
    if len(generations) > 1 or reader.sealed.lacks_base:
        raise _not_merged_error(reader, len(generations), "superseded or have a changed end")
    return [(None, StoredFile(reader.store, what, only.folder, file)) for only in generations for file in only.files]


def _partition_expression(span: Span) -> Any:
    """Return the pyarrow expression that holds for all rows of a version's file."""
    end, (first, last) = pc.field(VALID_TO), (pa.scalar(t, arrow_type("timestamp")) for t in (span.start, span.end))
    ends = end.is_null() if span.end is None else end == last
    return (pc.field(VALID_FROM) == first) & ends & (pc.field(TOMBSTONE) == pc.scalar(False))


def _sql_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


_MOST_CONDITIONS = 1000
SHOWN = (STREAM_TOMBSTONE, EPOCH)


@dataclass(frozen=True, slots=True)
class StreamView:
    """The records of a stream at one moment: those of `files`, without those that later epochs have `replaced`.

    Other engines see the columns of `schema`, then `__tombstone` and `__epoch`, which is null for 0 in files. `version`
    is the number of the stream's commit. `stream_id` distinguishes it from a later stream of the same name.
    """

    store: ObjectStore
    stream: str
    stream_id: str
    version: str
    schema: Schema
    files: tuple[StoredFile, ...]
    replaced: tuple[SupersededRange, ...] = ()

    @property
    def dataset(self) -> str:
        """The stream's full name, in place of a dataset's name."""
        return f"lake.{self.stream}"

    @property
    def attempts(self) -> tuple[str, ...]:
        """The last parts of the folders of its files."""
        return tuple(dict.fromkeys(attempt_id(stored.folder) for stored in self.files))

    @property
    def columns(self) -> dict[str, str]:
        """The columns that other engines see, with their types."""
        return {**{field.name: field.type for field in self.schema.fields}, STREAM_TOMBSTONE: "boolean", EPOCH: "int"}

    @property
    def hidden(self) -> dict[str, str]:
        """Further columns that files may have, with their types."""
        return {name: kind for name, kind in HIDDEN_COLUMNS if name not in SHOWN}


@validated
def stream_view(
    lake: Lake, stream: str, *, epochs: Epochs = "all", without_position: WithoutPosition = "refuse"
) -> StreamView:
    """Return a stream as it is now, for `pyarrow_dataset`, `duckdb_view`, `polars_frame` and the like.

    `epochs` and `without_position` are as in `LakeStreams.read`. Retention and compaction delete replaced files after
    an hour (or as passed to `maintain`): take a new view before that. Raises StreamNotFoundError, ConfigurationError as
    a read does, and DatasetError if too many ranges are replaced.
    """
    latest = epochs == "latest"
    streams, name = LakeStreams(lake), unqualify_stream_name(LAKE, stream)
    commit, state = streams.state(name)
    segments = list_segments(state, streams.files_of(name))
    prefix, what = lake.stream_prefix(name), f"stream {name!r} at commit {commit.number}"
    files = tuple(
        StoredFile(lake.store, what, segment.folder(prefix), file)
        for number, segment in enumerate(segments)
        for file in segment.generation(number, prefix).files
    )
    replaced = find_replaced_results(streams, name, state, segments, without_position) if latest else []
    if len(replaced) > _MOST_CONDITIONS:
        raise DatasetError(
            f"stream {name!r}: replaced records are in {len(replaced):,} ranges, more than other engines take as "
            f"conditions ({_MOST_CONDITIONS:,}).",
            "Write the latest results into files: adjunct stream export --epochs latest.",
            stream=f"lake.{name}",
        )
    return StreamView(lake.store, name, state.id, str(commit.number), state.declaration.columns, files, tuple(replaced))


def arrow_filter(view: StreamView) -> Any:
    """Return the pyarrow expression for records that are not replaced; those without a position never are."""
    gone: Any = pc.scalar(False)
    for span in view.replaced:
        gone = gone | (
            (pc.field(READER) == span.reader)
            & (pc.field(SOURCE) == span.source)
            & (pc.field(SOURCE_OFFSET) >= span.start)
            & (pc.field(SOURCE_OFFSET) < span.end)
            & (pc.field(SOURCE_EPOCH) < span.epoch)
        )
    return ~pc.coalesce(gone, pa.scalar(False))


T = TypeVar("T")
Held = VersionReader | StreamView | EntriesOverTime | EntriesAt
View = Dataset | Held
"""A dataset or one version of it, a stream at a moment, or entries at other times than now."""


def lend_view(view: View, hand_over: Callable[[Held], T]) -> T:
    """Return the result of `hand_over` for a view; an open dataset keeps its version leased until it is closed."""
    if isinstance(view, Dataset):
        return view.lend(hand_over)
    if isinstance(view, EntriesAt) and select_timed_files(view) is None:
        return hand_over(view.read)  # the version that was valid then
    return hand_over(view)


@validated
def parquet_files(view: View) -> list[str]:
    """Return the locations of the Parquet files: paths for a lake in a folder, s3:// URLs on S3.

    Their rows are exactly the entries of a version, or the records of a stream. Files of a change stream's table also
    have `__position` and `__tombstone` (always false); those of a stream have further columns that start with `__`.
    Files of `Dataset.over_time()` have the rows of a table with history, including deletions, with `__valid_from`,
    `__valid_to` and `__first`. Raises DatasetError for a version whose files must be merged, for a stream with replaced
    records, and for files with rows of other times; raises ConfigurationError for a lake in memory.
    """
    return lend_view(view, _files)


def _files(view: Held) -> list[str]:
    over_time = select_timed_files(view)
    if over_time is not None and not over_time.whole:
        problem = f"dataset {view.dataset!r} keeps a history: its files also have rows of other times."
        step = "Use pyarrow_dataset, duckdb_view or polars_frame, which filter them; or all rows: dataset.over_time()."
        raise DatasetError(problem, step, dataset=view.dataset)
    if isinstance(view, StreamView) and view.replaced:
        raise DatasetError(
            f"stream {view.stream!r}: its files also have records that a replay has replaced.",
            'Use pyarrow_dataset, duckdb_view or polars_frame, which filter them; or all records (epochs="all"); or '
            "write the latest ones into a file: adjunct stream export --epochs latest.",
            stream=view.stream,
        )
    return _paths(view)


def _paths(view: Held) -> list[str]:
    return [object_location(stored.store, stored.key) for stored in list_whole_files(view)]


@validated
def pyarrow_dataset(view: View) -> pads.Dataset:
    """Return a `pyarrow.dataset` over exactly the version's or stream's files, with the columns of `view.schema`.

    A stream's columns are followed by `__tombstone` and `__epoch` (null for 0), and, if records are replaced, by the
    columns of their positions; replaced records are left out. Rows over time have `__valid_from`, `__valid_to` and
    `__tombstone`; of these only the valid rows are returned, each interval as stored. Files are opened when they are
    read. Raises as `parquet_files` does, but not for replaced records.
    """
    return lend_view(view, _dataset)


def _dataset(view: Held) -> pads.Dataset:
    if (over_time := select_timed_files(view)) is not None:
        return over_time.dataset()
    schema, files = exchange_schema(view), [(None, stored) for stored in list_whole_files(view)]
    if not (isinstance(view, StreamView) and view.replaced):
        return _arrow_dataset(view.store, schema, files)
    schema = _extend_schema(schema, {name: view.hidden[name] for name in POSITION})
    return _arrow_dataset(view.store, schema, files).filter(arrow_filter(view))


def _arrow_dataset(
    store: ObjectStore, schema: pa.Schema, files: Sequence[tuple[Span | None, StoredFile]]
) -> pads.FileSystemDataset:
    """Return a dataset of exactly these files; rows of a file with a span get its times as columns."""
    from pyarrow import dataset

    filesystem, parquet = arrow_filesystem(store), dataset.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(
            object_location(stored.store, stored.key).removeprefix("s3://"),
            filesystem=filesystem,
            file_size=stored.file.size,
            partition_expression=None if span is None else _partition_expression(span),
        )
        for span, stored in files
    ]
    return dataset.FileSystemDataset(fragments, schema, parquet, filesystem=filesystem)


def _extend_schema(schema: pa.Schema, more: Mapping[str, str]) -> pa.Schema:
    return pa.schema([*schema, *(pa.field(name, arrow_type(kind)) for name, kind in more.items())])


@validated
def duckdb_view(connection: duckdb.DuckDBPyConnection, view: View, name: str) -> None:
    """Create or replace a view of this name over the version or stream; it lasts as long as the connection.

    DuckDB itself reads a version's files in a folder. On S3, and for a stream, they are read through pyarrow, so that
    no extension is needed and the lake's own settings apply. Raises as `parquet_files` does, but leaves out replaced
    records.
    """
    lend_view(view, lambda held: _create_view(connection, held, name))


def _create_view(connection: duckdb.DuckDBPyConnection, view: Held, name: str) -> None:
    if (over_time := select_timed_files(view)) is not None:
        over_time.create_view(connection, name)
        return
    files, query = _paths(view), None
    columns = ", ".join(map(_sql_name, exchange_columns(view)))
    if isinstance(view, StreamView):
        columns = columns.replace(_sql_name(EPOCH), f"coalesce({EPOCH}, 0) AS {EPOCH}")
    elif files and _has_all_columns(view) and not any(mark in path for path in files for mark in ("s3://", *"*?[")):
        listed = ", ".join("'" + path.replace("'", "''") + "'" for path in files)
        # Without hive partitioning: a folder named a=b would add or replace a column.
        query = f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false)"
    if query is None:
        source = _register(connection, name, _dataset(view))
        query = f"SELECT {columns} FROM {source}"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {_sql_name(name)} AS {query}")


def _register(connection: duckdb.DuckDBPyConnection, view: str, rows: pads.Dataset) -> str:
    """Register the rows of a view in a connection; return their quoted name.

    Each view has its own: two of one version may have different rows.
    """
    connection.execute("SELECT 1").fetchall()  # registering fails while a result is not fully read
    connection.register(f"adjunct {view}", rows)
    return _sql_name(f"adjunct {view}")


@validated
def polars_frame(view: View) -> polars.LazyFrame:
    """Return a Polars LazyFrame over the version or stream, with the columns of `view.schema`.

    Polars itself reads a version's files in a folder; on S3, and for a stream, pyarrow does. Raises as `duckdb_view`
    does, and ConfigurationError if Polars is not installed.
    """
    polars = import_engine("polars", extra="polars")
    return lend_view(view, lambda held: _lazy_frame(polars, held))


def _lazy_frame(polars: Any, view: Held) -> polars.LazyFrame:
    if (over_time := select_timed_files(view)) is not None:
        return over_time.polars_frame(polars)
    if isinstance(view, StreamView):
        records = polars.scan_pyarrow_dataset(_dataset(view)).with_columns(polars.col(EPOCH).fill_null(0))
        return records.select(list(view.columns))  # type: ignore[no-any-return]
    files = _files(view)
    if files and not files[0].startswith("s3://") and _has_all_columns(view):
        frame = polars.scan_parquet(files, glob=False, hive_partitioning=False).select(view.schema.names)
    else:
        frame = polars.scan_pyarrow_dataset(_dataset(view))
    return frame  # type: ignore[no-any-return]


def exchange_columns(view: Held) -> dict[str, str]:
    """Return the columns that other engines see, with their types."""
    if isinstance(view, StreamView):
        return view.columns
    more = SHOWN_OVER_TIME if select_timed_files(view) is not None else {}
    return {**{field.name: field.type for field in view.schema.fields}, **more}


def exchange_schema(view: Held) -> pa.Schema:
    """Return the columns that other engines see as an Arrow schema."""
    fields = view.schema.to_arrow()
    return _extend_schema(fields, {n: kind for n, kind in exchange_columns(view).items() if n not in fields.names})


def import_engine(module: str, *, extra: str) -> Any:
    """Import an engine's module. Raises ConfigurationError, with how to install it, if it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        problem = f"{module.partition('.')[0]} is not installed."
        step = f'Install it: pip install "dagster-adjunct[{extra}]".'
        raise ConfigurationError(problem, step, package=module.partition(".")[0]) from error


def list_whole_files(view: Held) -> list[StoredFile]:
    """Return the files of a view if all their rows are entries or records. Raises DatasetError otherwise."""
    if isinstance(view, StreamView):
        return list(view.files)
    if isinstance(view, EntriesOverTime | EntriesAt) or view.sealed.history is not None:
        reader = view if isinstance(view, VersionReader) else view.reader
        if isinstance(reader, VersionReader):
            return [stored for _, stored in _files_with_spans(reader)]
        problem = f"dataset {reader.dataset!r}: the valid-from times are those of versions and not in their files."
        step = "Use one version, dataset.valid_at(…), or all of them with pyarrow_dataset, duckdb_view or polars_frame."
        raise DatasetError(problem, step, dataset=reader.dataset)
    sealed = view.sealed
    if len(sealed.generations) > 1 or sealed.lacks_base:
        raise _not_merged_error(view, len(sealed.generations), "superseded or deleted")
    if sealed.stored_rows != sealed.rows:
        raise DatasetError(
            f"dataset {view.dataset!r}, version {view.version}: of the {sealed.stored_rows} rows in its base some are "
            "deletions that later changes are compared with (in the order of "
            f"{describe_order(sealed.order_by)}), and other engines would take them for entries.",
            "Declare keep_tombstones=…, so that a major compaction drops old deletions, and compact once the newest "
            "is old enough. Or read it with frame() or get().",
            dataset=view.dataset,
            version=view.version,
        )
    return list_stored_files(view.store, view.dataset, sealed)


def _not_merged_error(reader: VersionReader, generations: int, problem: str) -> DatasetError:
    count = "one generation" if generations == 1 else f"{generations} generations"
    return DatasetError(
        f"dataset {reader.dataset!r}, version {reader.version}: of the {reader.sealed.stored_rows} rows in its {count} "
        f"some are {problem}, and other engines can't merge them.",
        f"Compact the dataset and use the new version: adjunct dataset compact {reader.dataset} --level major. "
        "Or read it with frame() or get().",
        dataset=reader.dataset,
        version=reader.version,
    )


def _has_all_columns(view: Held) -> bool:
    """Whether all files have the version's current columns; those of a change stream's table may be older.

    pyarrow adapts columns that were added or widened since; other engines do not.
    """
    if not isinstance(view, VersionReader):  # too many files to open each
        return False
    if not view.sealed.positioned:
        return True
    wanted = view.sealed.layout.arrow_schema()
    return all(stored.open().schema_arrow.remove_metadata().equals(wanted) for stored in list_whole_files(view))

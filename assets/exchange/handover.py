"""A version, or a stream at one moment, handed to other engines as it lies in the lake: nothing is copied.

What is handed over does not follow the dataset or stream. An open dataset holds the version that was handed over until
it is closed; an Iceberg catalogue holds what is registered in it (`iceberg.py`). Nothing holds a stream's files.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.declaration.changes.change_order import order_in_words
from dagster_adjunct.assets.exchange.files_over_time import SHOWN, timed, whole_table_files
from dagster_adjunct.assets.exchange.stream_view import StreamView, arrow_filter, polars_filter, sql_filter
from dagster_adjunct.assets.reading.entries_over_time import EntriesAt, EntriesOverTime
from dagster_adjunct.assets.reading.open_dataset import Dataset
from dagster_adjunct.assets.reading.stored_files import StoredFile, files_of
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.arrow_fs import arrow_filesystem, location
from dagster_adjunct.resources.schemas.schema import arrow_type
from dagster_adjunct.resources.streams.interface.stream_system import EPOCH, POSITION

if TYPE_CHECKING:
    import duckdb
    import polars
    import pyarrow
    import pyarrow.dataset

T = TypeVar("T")
Held = VersionReader | StreamView | EntriesOverTime | EntriesAt
View = Dataset | Held
"""What is handed over: a dataset or one version of it, a stream at a moment, or entries at other times than now."""


def lent(view: View, hand_over: Callable[[Held], T]) -> T:
    """Return what `hand_over` makes of a view; the version of an open dataset stays held until that is closed."""
    if isinstance(view, Dataset):
        return view.lend(hand_over)
    if isinstance(view, EntriesAt) and timed(view) is None:
        return hand_over(view.read)  # of versions, the one that was valid then
    return hand_over(view)


def parquet_files(view: View) -> list[str]:
    """Return where the Parquet files are: paths for a lake in a folder, s3:// addresses on S3.

    Their rows are all entries of a version, each once, or all records of a stream. Those of a change stream's table
    have two columns more, `__position` and `__tombstone` (false in each); a stream's have more that begin with `__`.
    Those of `Dataset.over_time()` are the rows of a table with history, deletions too, and have `__valid_from`,
    `__valid_to` and `__first`. Raises DatasetError for a version whose files have to be merged first, for a stream of
    which records are replaced, and where files hold rows of other times; and ConfigurationError for a lake in memory.
    """
    return lent(view, _files)


def _files(view: Held) -> list[str]:
    over_time = timed(view)
    if over_time is not None and not over_time.whole:
        raise DatasetError(
            f"dataset {view.dataset!r} keeps a history: its files hold rows of other times, too, and files can't tell.",
            "Hand it over by pyarrow_dataset, duckdb_view or polars_frame; or take all rows: dataset.over_time().",
            dataset=view.dataset,
        )
    if isinstance(view, StreamView) and view.replaced:
        raise DatasetError(
            f"stream {view.stream!r}: its files hold records that a replay has replaced, and files can't tell.",
            'Hand it over by pyarrow_dataset, duckdb_view or polars_frame; or take all records (epochs="all"), or '
            "write the latest ones into a file: adjunct stream export --epochs latest.",
            stream=view.stream,
        )
    return _paths(view)


def _paths(view: Held) -> list[str]:
    return [location(stored.store, stored.key) for stored in whole_files(view)]


def pyarrow_dataset(view: View) -> pyarrow.dataset.Dataset:
    """Return a `pyarrow.dataset` over exactly the version's or stream's files, with the columns of `view.schema`.

    Those of a stream are followed by `__tombstone` and `__epoch` (null for 0). Where records of it are replaced they
    are left out, and the columns that tell it follow. So do `__valid_from`, `__valid_to` and `__tombstone` where rows
    are over time: of these are given what is valid (at the moment), each interval as it is stored. No file is opened
    before it is read. Raises as `parquet_files` does, but not for what is replaced.
    """
    return lent(view, _dataset)


def _dataset(view: Held) -> pyarrow.dataset.Dataset:
    if (over_time := timed(view)) is not None:
        return over_time.dataset()
    whole = _whole_dataset(view)
    return whole.filter(arrow_filter(view)) if isinstance(view, StreamView) and view.replaced else whole


def _whole_dataset(view: Held) -> pyarrow.dataset.FileSystemDataset:
    import pyarrow as pa
    from pyarrow import dataset

    paths = [path.removeprefix("s3://") for path in _paths(view)]
    schema = arrow_schema_of(view)
    if isinstance(view, StreamView) and view.replaced:
        schema = pa.schema([*schema, *(pa.field(name, arrow_type(view.hidden[name])) for name in POSITION)])
    sizes = [stored.file.size for stored in whole_files(view)]
    filesystem, parquet = arrow_filesystem(view.store), dataset.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(path, filesystem=filesystem, file_size=size)
        for path, size in zip(paths, sizes, strict=True)
    ]
    return dataset.FileSystemDataset(fragments, schema, parquet, filesystem=filesystem)


def duckdb_view(connection: duckdb.DuckDBPyConnection, view: View, name: str) -> None:
    """Create, or replace, a view of this name over the version or stream; it lives as long as the connection.

    Over a version's files in a folder DuckDB reads them itself. On S3, and for a stream, they are read through
    pyarrow, so that no extension has to be installed and the lake's own settings hold. Raises as `parquet_files`
    does, but leaves out what is replaced.
    """
    lent(view, lambda held: _create_view(connection, held, name))


def _create_view(connection: duckdb.DuckDBPyConnection, view: Held, name: str) -> None:
    if (over_time := timed(view)) is not None:
        over_time.create_view(connection, name)
        return
    files, where = _paths(view), "true"
    if (
        files
        and _has_all_columns(view)
        and not any(mark in path for path in files for mark in ("s3://", "*", "?", "["))
    ):
        listed = ", ".join("'" + path.replace("'", "''") + "'" for path in files)
        # Without hive partitioning: a folder named a=b would add or replace a column.
        source = f"read_parquet([{listed}], hive_partitioning = false)"
    else:
        registered = f"adjunct {view.dataset} {view.version}"
        connection.execute("SELECT 1").fetchall()  # with a result that is not read to its end, nothing is registered
        connection.register(registered, _whole_dataset(view))
        source = _quoted(registered)
    columns = ", ".join(map(_quoted, columns_of(view)))
    if isinstance(view, StreamView):
        columns, where = columns.replace(_quoted(EPOCH), f"coalesce({EPOCH}, 0) AS {EPOCH}"), sql_filter(view)
    query = f"SELECT {columns} FROM {source} WHERE {where}"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {_quoted(name)} AS {query}")


def polars_frame(view: View) -> polars.LazyFrame:
    """Return a Polars LazyFrame over the version or stream, with the columns of `view.schema`.

    Over a version's files in a folder Polars reads them itself; on S3, and for a stream, through pyarrow. Raises as
    `duckdb_view` does, and ConfigurationError where Polars is not installed.
    """
    polars = engine("polars", extra="polars")
    return lent(view, lambda held: _lazy_frame(polars, held))


def _lazy_frame(polars: Any, view: Held) -> polars.LazyFrame:
    if (over_time := timed(view)) is not None:
        return over_time.polars_frame(polars)
    if isinstance(view, StreamView):
        records = polars_filter(view, polars.scan_pyarrow_dataset(_whole_dataset(view)))
        records = records.with_columns(polars.col(EPOCH).fill_null(0))
        return records.select(list(view.columns))
    files = _files(view)
    if files and not files[0].startswith("s3://") and _has_all_columns(view):
        frame = polars.scan_parquet(files, glob=False, hive_partitioning=False).select(view.schema.names)
    else:
        frame = polars.scan_pyarrow_dataset(_dataset(view))
    return frame  # type: ignore[no-any-return]


def columns_of(view: Held) -> dict[str, str]:
    """Return the columns that other engines see, with their types."""
    if isinstance(view, StreamView):
        return view.columns
    more = SHOWN if timed(view) is not None else {}
    return {**{field.name: field.type for field in view.schema.fields}, **more}


def arrow_schema_of(view: Held) -> pyarrow.Schema:
    """Return the same as Arrow's schema."""
    import pyarrow as pa

    fields = view.schema.to_arrow()
    more = {name: kind for name, kind in columns_of(view).items() if name not in fields.names}
    return pa.schema([*fields, *(pa.field(name, arrow_type(kind)) for name, kind in more.items())])


def engine(module: str, *, extra: str) -> Any:
    """Return an engine's module, or raise ConfigurationError that says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ConfigurationError(
            f"{module.partition('.')[0]} is not installed.",
            f'Install it: pip install "dagster-adjunct[{extra}]".',
            package=module.partition(".")[0],
        ) from error


def whole_files(view: Held) -> list[StoredFile]:
    """Return the files, whose rows are all entries or records. Raises DatasetError where they have to be merged."""
    if isinstance(view, StreamView):
        return list(view.files)
    if isinstance(view, EntriesOverTime | EntriesAt) or view.sealed.history is not None:
        return whole_table_files(view if isinstance(view, VersionReader) else view.reader)
    sealed = view.sealed
    stored = f"dataset {view.dataset!r}, version {view.version}: of the {sealed.stored_rows} rows in its "
    if len(sealed.generations) > 1 or sealed.lacks_base:
        count = "one generation" if len(sealed.generations) == 1 else f"{len(sealed.generations)} generations"
        raise DatasetError(
            f"{stored}{count} some are superseded or deleted, and other engines can't merge them.",
            f"Compact the dataset and hand over the version that this makes: adjunct dataset compact {view.dataset} "
            "--level major. Or read it by frame() or get().",
            dataset=view.dataset,
            version=view.version,
        )
    if sealed.stored_rows != sealed.rows:
        raise DatasetError(
            f"{stored}base some are deletions that later changes are compared with (in the order of "
            f"{order_in_words(sealed.order_by)}), and other engines would take them for entries.",
            "Declare keep_tombstones=…, so that a major compaction forgets deletions that are old enough, and compact "
            "when the newest is. Or read it by frame() or get().",
            dataset=view.dataset,
            version=view.version,
        )
    return files_of(view.store, view.dataset, sealed)


def _has_all_columns(view: Held) -> bool:
    """Whether the files have the version's columns as they are; those of a change stream's table may be older.

    Where a column was added or widened since, pyarrow reads it as it is now; others do not.
    """
    if not isinstance(view, VersionReader):  # not worth opening each of many files
        return False
    if not view.sealed.positioned:
        return True
    wanted = view.sealed.layout.arrow_schema()
    return all(stored.open().schema_arrow.remove_metadata().equals(wanted) for stored in whole_files(view))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

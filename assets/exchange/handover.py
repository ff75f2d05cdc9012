"""A version handed to other engines as it lies in the lake: nothing is copied.

What is handed over is one version: it does not follow the dataset, and nothing here keeps it from being discarded.
Pin it or hold a lease while others read, or register it in an Iceberg catalogue, which holds it (`iceberg.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assets.reading.stored import StoredFile, files_of
from resources.errors import ConfigurationError, DatasetError
from resources.objects.arrow_fs import arrow_filesystem, location

if TYPE_CHECKING:
    import duckdb
    import polars
    import pyarrow.dataset

    from assets.reading.view import DatasetView


def parquet_files(view: DatasetView) -> list[str]:
    """Return where the version's Parquet files are: paths for a lake in a folder, s3:// addresses on S3.

    Their rows are all entries, each once. Those of a change stream's table have two columns more, `__position` and
    `__tombstone` (false in each). Raises DatasetError for a version whose files have to be merged first, and
    ConfigurationError for a lake in memory.
    """
    return [location(stored.store, stored.key) for stored in whole_files(view)]


def pyarrow_dataset(view: DatasetView) -> pyarrow.dataset.FileSystemDataset:
    """Return a `pyarrow.dataset` over exactly the version's files, with the columns of `view.schema`.

    No file is opened before it is read. Raises as `parquet_files` does.
    """
    from pyarrow import dataset

    paths = [path.removeprefix("s3://") for path in parquet_files(view)]
    sizes = [stored.file.size for stored in whole_files(view)]
    filesystem, parquet = arrow_filesystem(view.store), dataset.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(path, filesystem=filesystem, file_size=size)
        for path, size in zip(paths, sizes, strict=True)
    ]
    return dataset.FileSystemDataset(fragments, view.schema.to_arrow(), parquet, filesystem=filesystem)


def duckdb_view(connection: duckdb.DuckDBPyConnection, view: DatasetView, name: str) -> None:
    """Create, or replace, a view of this name over the version's files; it lives as long as the connection.

    Over files in a folder DuckDB reads them itself. On S3 they are read through `pyarrow_dataset`, so that no
    extension has to be installed and the lake's own settings hold. Raises as `parquet_files` does.
    """
    files = parquet_files(view)
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
        connection.register(registered, pyarrow_dataset(view))
        source = _quoted(registered)
    columns = ", ".join(map(_quoted, view.schema.names))
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {_quoted(name)} AS SELECT {columns} FROM {source}")


def polars_frame(view: DatasetView) -> polars.LazyFrame:
    """Return a Polars LazyFrame over the version's files, with the columns of `view.schema`.

    Over files in a folder Polars reads them itself, and on S3 through `pyarrow_dataset`. Raises as `parquet_files`
    does, and ConfigurationError where Polars is not installed.
    """
    polars = engine("polars", extra="polars")
    files = parquet_files(view)
    if files and not files[0].startswith("s3://") and _has_all_columns(view):
        frame = polars.scan_parquet(files, glob=False, hive_partitioning=False).select(view.schema.names)
    else:
        frame = polars.scan_pyarrow_dataset(pyarrow_dataset(view))
    return frame  # type: ignore[no-any-return]


def engine(module: str, *, extra: str) -> Any:
    """Return an engine's module, or raise ConfigurationError that says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ConfigurationError(
            f"{module.partition('.')[0]} is not installed.", f'Install it: pip install "dagster-adjunct[{extra}]".'
        ) from error


def whole_files(view: DatasetView) -> list[StoredFile]:
    """Return the version's files, whose rows are its entries. Raises DatasetError where they have to be merged."""
    sealed = view.sealed
    stored = f"dataset {view.dataset!r}, version {view.version}: of the {sealed.stored_rows} rows in its "
    if len(sealed.generations) > 1:
        raise DatasetError(
            f"{stored}{len(sealed.generations)} generations some are superseded or deleted, and other engines can't "
            "merge them.",
            f"Compact the dataset and hand over the version that this makes: adjunct dataset compact {view.dataset} "
            "--level major. Or read it by frame() or get().",
        )
    if sealed.stored_rows != sealed.rows:
        raise DatasetError(
            f"{stored}base some are deletions that later changes are compared with (order_by={sealed.order_by!r}), "
            "and other engines would take them for entries.",
            "Declare keep_tombstones=…, so that a major compaction forgets deletions that are old enough, and compact "
            "when the newest is. Or read it by frame() or get().",
        )
    return files_of(view.store, view.dataset, sealed)


def _has_all_columns(view: DatasetView) -> bool:
    """Whether the files have the version's columns as they are; those of a change stream's table may be older.

    Where a column was added or widened since, pyarrow reads it as it is now; others do not.
    """
    if not view.sealed.positioned:
        return True
    wanted = view.sealed.layout.arrow_schema()
    return all(stored.open().schema_arrow.remove_metadata().equals(wanted) for stored in whole_files(view))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

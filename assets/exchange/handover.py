"""Views of a version or stream for other engines (pyarrow, DuckDB, Polars), over the lake's files
without copies.

A view does not follow the dataset or stream. An open dataset leases the version of its views until
it is closed; an Iceberg catalogue retains what is registered in it (`iceberg.py`). The files of a
stream's view are not retained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dagster_adjunct.assets.declaration.change_values import describe_order
from dagster_adjunct.assets.reading import valid_time
from dagster_adjunct.assets.reading.dataset import Dataset
from dagster_adjunct.assets.reading.interval_ids import interval_ids
from dagster_adjunct.assets.reading.stored_file import (
    StoredFile,
    list_generation_files,
    list_stored_files,
)
from dagster_adjunct.assets.reading.valid_time import (
    EntriesAt,
    EntriesOverTime,
    Reader,
    Span,
    VersionsOverTime,
)
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import TOMBSTONE, datetime_from_micros
from dagster_adjunct.resources.bucketing.files import (
    VALID_FROM,
    VALID_TO,
    BucketLayout,
    attempt_id,
    conform_to_layout,
)
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.names import unqualify_stream_name
from dagster_adjunct.resources.objects.arrow_files import arrow_filesystem, object_location
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Field,
    Schema,
    StoredNames,
    list_steps,
)
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.lake.lineage import WithoutPosition, find_replaced_results
from dagster_adjunct.resources.streams.lake.manifest import SupersededRange, list_segments
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


def _valid_rows(view: VersionReader | EntriesOverTime | EntriesAt, reader: Reader) -> Any:
    """Return the pyarrow expression for the rows over time that a view shows: of a version those
    that are valid now, of EntriesAt those that are valid at its moment, and of EntriesOverTime
    those that are valid at any time since the history's edge.
    """
    valid = ~pc.field(TOMBSTONE)
    end = pc.field(VALID_TO)
    if isinstance(view, VersionReader):
        return valid & end.is_null()
    moment = view.moment if isinstance(view, EntriesAt) else _edge(reader)
    if moment is None:  # the reader has all of the history
        return valid
    scalar = pa.scalar(moment, arrow_type("timestamp"))
    valid &= end.is_null() | (end > scalar)
    if isinstance(view, EntriesAt):
        valid &= pc.field(VALID_FROM) <= scalar
    return valid


def _edge(reader: Reader) -> datetime | None:
    """Return the time before which a reader has no history, None if it has all."""
    edge = valid_time.history_edge(reader)
    if edge is None:
        return None
    return datetime_from_micros(edge)


def _polars_over_time(pl: Any, over_time: EntriesOverTime, rows: Any) -> polars.LazyFrame:
    """Return the query of all entries over time; adjacent equal ones of a key are merged.

    `rows` is a LazyFrame of all rows with their intervals.
    """
    reader = over_time.reader
    sealed = reader.sealed
    key = [_exactly(pl, name) for name in sealed.key]
    # Whether a row continues the one before it: without a gap, and with the same compared values.
    same = pl.col(VALID_TO).shift(1).over(key) == pl.col(VALID_FROM)
    same &= ~pl.col(TOMBSTONE).shift(1).over(key) & ~pl.col(TOMBSTONE)
    for path in sealed.compared:
        value = _exactly(pl, path.steps[0])
        for step in path.steps[1:]:
            value = value.struct.field(step)
        same &= value.shift(1).over(key).eq_missing(value)
    # Rows that continue each other are one run, which is shown as its first row, with the end and
    # the latest columns of its last one.
    rows = rows.sort(*key, VALID_FROM).with_columns(__starts=~same.fill_null(False))
    rows = rows.with_columns(__run=pl.col("__starts").cum_sum().over(key))
    latest = [_exactly(pl, name) for name in (VALID_TO, *sealed.latest_columns)]
    rows = rows.with_columns(*[value.last().over([*key, "__run"]) for value in latest])
    valid = pl.col("__starts") & ~pl.col(TOMBSTONE)
    if (edge := _edge(reader)) is not None:
        valid &= pl.col(VALID_TO).is_null() | (pl.col(VALID_TO) > edge)
    identified = over_time.interval_id
    start, end, current = valid_time.time_column_names(reader, interval_id=identified)
    shown = [_exactly(pl, name) for name in reader.schema.names]
    if start:
        shown.append(pl.col(VALID_FROM).alias(start))
    shown += [pl.col(VALID_TO).alias(end), pl.col(VALID_TO).is_null().alias(current)]
    if identified:
        of_key = pl.struct(*key, VALID_FROM)
        ids = of_key.map_batches(partial(_polars_ids, sealed.key), return_dtype=pl.String)
        shown.append(ids.alias(over_time.id_column))
    return rows.filter(valid).select(*shown)  # type: ignore[no-any-return]


def _polars_ids(key: Sequence[str], intervals: Any) -> Any:
    """Return the ids of intervals, structs of their keys and begins, as a Polars series."""
    import polars

    rows = intervals.struct.unnest().to_arrow()
    begins = rows.column(VALID_FROM).cast(arrow_type("timestamp")).cast("int64").to_pylist()
    return polars.Series(interval_ids(rows, key, begins))


def _exactly(pl: Any, name: str) -> Any:
    """Return the Polars expression for the column of this name, which Polars might take for a
    pattern ("*", "^…").
    """
    if name == "*" or name.startswith("^"):
        name = f"^{re.escape(name)}$"
    return pl.col(name)


class ViewFile(NamedTuple):
    """A file of a view, with the interval in which its version is valid; `span` is None if its rows
    have no intervals or store them.
    """

    span: Span | None
    stored: StoredFile


def _files_over_time(reader: Reader) -> list[ViewFile]:
    """Return the files of a reader of entries over time: those of all its versions, each with the
    span of its version, or those of one version with history.

    Raises DatasetError for a version with history whose generations must be merged.
    """
    what = f"dataset {reader.dataset!r}, version {reader.version}"
    if isinstance(reader, VersionsOverTime):
        files = []
        for span, generation in zip(reader.spans, reader.generations, strict=True):
            for stored in list_generation_files(reader.store, what, generation):
                files.append(ViewFile(span, stored))
        return files
    generations = reader.sealed.nonempty
    if len(generations) > 1 or reader.sealed.lacks_base:
        raise _not_merged_error(reader, len(generations), "superseded or have a changed end")
    return _without_spans(list_stored_files(reader.store, reader.dataset, reader.sealed))


def _without_spans(stored: Iterable[StoredFile]) -> list[ViewFile]:
    """Return these files as those of a view, without intervals."""
    return [ViewFile(None, file) for file in stored]


def _partition_expression(span: Span) -> Any:
    """Return the interval of a version as a pyarrow expression, which holds for all rows of its
    file.
    """
    kind = arrow_type("timestamp")
    end = pc.field(VALID_TO)
    ends = end.is_null() if span.end is None else end == pa.scalar(span.end, kind)
    begins = pc.field(VALID_FROM) == pa.scalar(span.start, kind)
    return begins & ends & (pc.field(TOMBSTONE) == pc.scalar(False))


def _renamed_rows(
    span: Span | None, stored: StoredFile, layout: BucketLayout, schema: pa.Schema
) -> pa.Table:
    """Return the rows of a file with the columns of `schema`, named as users see them.

    A column of `schema` is one of the entries, a hidden one of the file, one that the `span` of its
    version gives a value, or null.
    """
    table = stored.reading(lambda: stored.open().read()).replace_schema_metadata()
    entry_columns = [name for name in table.column_names if name in layout.stored.schema]
    columns_only = replace(layout, key=(), bucket_by=(), partitions=1, hidden=(), projected=True)
    values = conform_to_layout(table.select(entry_columns), columns_only)
    constants: dict[str, Any] = {}
    if span is not None:
        constants = {VALID_FROM: span.start, VALID_TO: span.end, TOMBSTONE: False}
    columns = []
    for field in schema:
        if field.name in values.column_names:
            columns.append(values.column(field.name))
        elif field.name in table.column_names:
            columns.append(table.column(field.name).cast(field.type))
        else:
            constant = pa.scalar(constants.get(field.name), field.type)
            columns.append(pa.repeat(constant, table.num_rows))
    return pa.table(columns, schema=schema)


def _sql_name(name: str) -> str:
    """Return a name quoted for DuckDB's SQL."""
    return '"' + name.replace('"', '""') + '"'


_MOST_CONDITIONS = 1000
_SHOWN_OF_STREAM = (STREAM_TOMBSTONE, EPOCH)
"""The hidden columns of a stream's files that other engines see."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """The records of a stream at one moment: those of `files`, without those that later epochs have
    `replaced`.

    Other engines see the columns of `schema`, then `__tombstone` and `__epoch`; in files, epoch 0
    is null. `hidden` are further columns that files may have and other engines don't see, with
    their types. `version` is the number of the stream's commit. `stream_id` distinguishes it from a
    later stream of the same name.
    """

    store: ObjectStore
    stream: str
    stream_id: str
    version: str
    schema: Schema
    files: tuple[StoredFile, ...]
    hidden: tuple[tuple[str, str], ...]
    replaced: tuple[SupersededRange, ...] = ()
    names: StoredNames = AS_NAMED

    @property
    def layout(self) -> BucketLayout:
        """The layout of its files, which may lack hidden columns."""
        return BucketLayout(self.schema, (), 1, names=self.names, projected=True)

    @property
    def dataset(self) -> str:
        """The stream's full name, in place of a dataset's name."""
        return f"lake.{self.stream}"

    @property
    def attempts(self) -> tuple[str, ...]:
        """The ids of the attempts that wrote its files: the last part of each folder."""
        return tuple(dict.fromkeys(attempt_id(stored.generation.folder) for stored in self.files))

    @property
    def columns(self) -> dict[str, str]:
        """The columns that other engines see, with their types."""
        return {**self.schema.types, STREAM_TOMBSTONE: "boolean", EPOCH: "int"}


@validated
def stream_view(
    lake: Lake, stream: str, *, epochs: Epochs = "all", without_position: WithoutPosition = "refuse"
) -> StreamView:
    """Return a stream as it is now, for `pyarrow_dataset`, `duckdb_view`, `polars_frame` and the
    like.

    `epochs` and `without_position` are as in `LakeStreams.read`. Retention and compaction delete
    replaced files after an hour: take a new view before that. Raises StreamNotFoundError,
    ConfigurationError as a read does, and DatasetError if too many ranges are replaced.
    """
    streams = LakeStreams(lake)
    name = unqualify_stream_name(LAKE, stream)
    commit, state = streams.state(name)
    segments = list_segments(state, streams.files_of(name))
    prefix = lake.stream_prefix(name)
    what = f"stream {name!r} at commit {commit.number}"
    files: list[StoredFile] = []
    for number, segment in enumerate(segments):
        files += list_generation_files(lake.store, what, segment.generation(number, prefix))
    replaced: list[SupersededRange] = []
    if epochs == "latest":
        replaced = find_replaced_results(streams, name, state, segments, without_position)
    if len(replaced) > _MOST_CONDITIONS:
        raise DatasetError(
            f"stream {name!r}: replaced records are in {len(replaced):,} ranges, more than other"
            f" engines take as conditions ({_MOST_CONDITIONS:,}).",
            f"Write the latest results into files: adjunct stream export {name} --epochs latest"
            " --to FOLDER.",
            stream=f"lake.{name}",
        )
    columns = state.declaration.layout.hidden
    return StreamView(
        lake.store,
        name,
        state.id,
        str(commit.number),
        state.declaration.columns,
        tuple(files),
        tuple(column for column in columns if column[0] not in _SHOWN_OF_STREAM),
        tuple(replaced),
        state.declaration.names,
    )


def arrow_filter(view: StreamView) -> Any:
    """Return the pyarrow expression for the records that are not replaced. A record without a
    position never is.
    """
    is_replaced: Any = pc.scalar(False)
    for span in view.replaced:
        is_replaced = is_replaced | (
            (pc.field(READER) == span.reader)
            & (pc.field(SOURCE) == span.source)
            & (pc.field(SOURCE_OFFSET) >= span.start)
            & (pc.field(SOURCE_OFFSET) < span.end)
            & (pc.field(SOURCE_EPOCH) < span.epoch)
        )
    return ~pc.coalesce(is_replaced, pa.scalar(False))


T = TypeVar("T")
Held = VersionReader | StreamView | EntriesOverTime | EntriesAt
View = Dataset | Held
"""A dataset or one version of it, a stream at a moment, or entries at other times than now."""


@dataclass(frozen=True, slots=True)
class ViewFiles:
    """What other engines read of a view: its files, and which of their columns and rows.

    Engines see `columns`; files may also have `hidden` ones. `condition` is the pyarrow expression
    for the rows of the view (None: all rows), and may need the hidden columns in `tested`. With
    `over_time`, rows are intervals of these entries; adjacent intervals of a key with equal entries
    are merged.
    """

    view: Held
    files: list[ViewFile]
    columns: dict[str, str]
    hidden: dict[str, str]
    condition: Any = None
    tested: tuple[str, ...] = ()
    over_time: EntriesOverTime | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns that other engines see."""
        return self._schema_with({})

    @property
    def layout(self) -> BucketLayout:
        """The layout of the files."""
        if isinstance(self.view, VersionReader):
            return self.view.sealed.layout
        if isinstance(self.view, StreamView):
            return self.view.layout
        reader = self.view.reader
        return reader.sealed.layout if isinstance(reader, VersionReader) else reader.layout

    @property
    def named_columns(self) -> NamedColumns:
        """The columns that engines see, with the names that files have; hidden ones have theirs."""
        fields = tuple(Field(name, kind) for name, kind in self.view.schema.types.items())
        return NamedColumns(Schema(fields), self.layout.names)

    @property
    def is_renamed(self) -> bool:
        """Whether files have other names than engines see."""
        return bool(self.layout.names.names)

    def find_other_column(self) -> str | None:
        """Return a column for which files have another name than engines see, or that was dropped
        and that they still have; None if there is none.
        """
        names = self.layout.names
        if names.names:
            steps, name_in_files = names.names[0]
            return f"{name_in_files} for {'.'.join(steps)}"
        if not names.retired:
            return None
        for file in self.files:
            found = file.stored.open().schema_arrow
            own = [field for field in found if not field.name.startswith("__")]
            dropped = names.retired & list_steps(Schema.from_arrow(pa.schema(own)))
            if dropped:
                return f"{'.'.join(min(dropped))}, which was dropped"
        return None

    @property
    def paths(self) -> list[str]:
        """The locations of the files."""
        return [object_location(file.stored.store, file.stored.key) for file in self.files]

    def plain_paths(self) -> list[str]:
        """Return the paths of the files if engines can read them without pyarrow, else [].

        They can if the files are in a folder, and have exactly the rows and columns of the view.
        pyarrow adapts columns that were added or widened since a file was written; other engines do
        not.
        """
        if self.condition is not None or not isinstance(self.view, VersionReader):
            return []
        if self.is_renamed:
            return []
        paths = self.paths
        if any(path.startswith("s3://") for path in paths):
            return []
        sealed = self.view.sealed
        if not sealed.positioned and not sealed.projected:
            return paths
        wanted = self.layout.arrow_schema()
        for file in self.files:
            if not file.stored.open().schema_arrow.remove_metadata().equals(wanted):
                return []
        return paths

    def dataset(self) -> pads.Dataset:
        """Return a pyarrow dataset of the view's rows. Of a view over time it has intervals as
        stored, not merged.
        """
        _refuse_ids(self.view)
        rows = self.all_rows()
        if self.condition is None:
            return rows
        return rows.filter(self.condition)

    def all_rows(self) -> pads.Dataset:
        """Return a pyarrow dataset of all rows in the files.

        The span of a file, if it has one, becomes columns with its start and end. Files with other
        names than engines see are read into memory.
        """
        from pyarrow import dataset

        schema = self._schema_with({name: self.hidden[name] for name in self.tested})
        if self.is_renamed:
            tables = [_renamed_rows(span, file, self.layout, schema) for span, file in self.files]
            return dataset.InMemoryDataset(tables, schema)
        filesystem = arrow_filesystem(self.view.store)
        parquet = dataset.ParquetFileFormat()
        fragments = [
            parquet.make_fragment(
                object_location(stored.store, stored.key).removeprefix("s3://"),
                filesystem=filesystem,
                file_size=stored.file.size,
                partition_expression=None if span is None else _partition_expression(span),
            )
            for span, stored in self.files
        ]
        return dataset.FileSystemDataset(fragments, schema, parquet, filesystem=filesystem)

    def _schema_with(self, more: Mapping[str, str]) -> pa.Schema:
        """Return the columns that engines see, followed by these (name to type)."""
        schema = self.view.schema.to_arrow()
        for name, kind in {**self.columns, **more}.items():
            if name not in schema.names:
                schema = schema.append(pa.field(name, arrow_type(kind)))
        return schema


def lend_files(view: View, hand_over: Callable[[ViewFiles], T]) -> T:
    """Return `hand_over(files)` for the files of a view; an open dataset keeps its version
    leased until `close`.
    """
    if isinstance(view, Dataset):
        return view.lend(lambda reader: hand_over(read_files(reader)))
    return hand_over(read_files(view))


def lend_whole_files(view: View, hand_over: Callable[[ViewFiles], T], *, masked: bool = False) -> T:
    """Do what `lend_files` does, for a view that shows all rows in its files. Raises DatasetError
    for any other.

    With `masked`, the files of a version may have superseded and deleted rows, which `hand_over`
    leaves out itself.
    """
    if isinstance(view, Dataset):
        return view.lend(lambda reader: lend_whole_files(reader, hand_over, masked=masked))
    if _is_over_time(view) and not isinstance(view, EntriesOverTime):
        raise DatasetError(
            f"dataset {view.dataset!r} keeps a history: its files also have rows of other times.",
            "Use pyarrow_dataset, duckdb_view or polars_frame, which filter them; or take all"
            " rows, dataset.over_time(), and filter by __valid_from, __valid_to and __tombstone.",
            dataset=view.dataset,
        )
    if isinstance(view, StreamView) and view.replaced:
        raise DatasetError(
            f"stream {view.stream!r}: its files also have records that a replay has replaced.",
            "Use pyarrow_dataset, duckdb_view or polars_frame, which filter them; or all records"
            ' (epochs="all"); or write the latest ones into files: adjunct stream export'
            f" {view.stream} --epochs latest --to FOLDER.",
            stream=view.stream,
        )
    _refuse_ids(view)
    files = read_files(view, masked=masked)
    if any(file.span is not None for file in files.files):
        raise DatasetError(
            f"dataset {view.dataset!r}: its files have no valid-from times, which are those of"
            " whole versions.",
            "Use one version, dataset.valid_at(…), or all of them with pyarrow_dataset, duckdb_view"
            " or polars_frame.",
            dataset=view.dataset,
        )
    return hand_over(files)


def _refuse_ids(view: Held) -> None:
    """Raise DatasetError for entries over time with ids of their intervals: files have rows, of
    which an interval may have several.
    """
    if isinstance(view, EntriesOverTime) and view.interval_id:
        raise DatasetError(
            f"dataset {view.dataset!r}: over_time(interval_id=True) has merged intervals, and its"
            " files have their rows.",
            "Use duckdb_view, polars_frame or Spark; or leave interval_id out.",
            dataset=view.dataset,
        )


def _is_over_time(view: Held) -> bool:
    """Whether the files of a view have rows that are valid at different times."""
    if isinstance(view, VersionReader):
        return view.sealed.history is not None
    if isinstance(view, EntriesAt):
        return isinstance(view.reader, VersionReader)
    return isinstance(view, EntriesOverTime)


def read_files(view: Held, *, masked: bool = False) -> ViewFiles:
    """Return what other engines read of a view.

    Raises DatasetError for files that must be merged; with `masked` only for those with history.
    """
    if isinstance(view, StreamView):
        return _read_stream(view)
    if isinstance(view, EntriesAt) and not _is_over_time(view):
        view = view.read  # the version that was valid at the view's moment
    columns = view.schema.types
    if isinstance(view, VersionReader) and view.sealed.history is None:
        if not masked:
            _check_whole(view)
        files = _without_spans(list_stored_files(view.store, view.dataset, view.sealed))
        return ViewFiles(view, files, columns, dict(view.sealed.layout.hidden))
    # Entries over time, whose rows are chosen by their intervals.
    reader = view if isinstance(view, VersionReader) else view.reader
    hidden = dict(reader.sealed.layout.hidden)
    for name in SHOWN_OVER_TIME:
        hidden.pop(name, None)
    return ViewFiles(
        view,
        _files_over_time(reader),
        {**columns, **SHOWN_OVER_TIME},
        hidden,
        _valid_rows(view, reader),
        over_time=view if isinstance(view, EntriesOverTime) else None,
    )


def _read_stream(view: StreamView) -> ViewFiles:
    """Return what other engines read of a stream's view. If records are replaced, this also takes
    the columns of their positions.
    """
    files = _without_spans(view.files)
    hidden = dict(view.hidden)
    if not view.replaced:
        return ViewFiles(view, files, view.columns, hidden)
    condition = arrow_filter(view)
    return ViewFiles(view, files, view.columns, hidden, condition, tuple(POSITION))


@validated
def parquet_files(view: View) -> list[str]:
    """Return the locations of the Parquet files: paths for a lake in a folder, s3:// URLs on S3.

    Their rows are exactly the entries of a version, or the records of a stream. Files of a change
    stream's table also have `__position` and `__tombstone` (always false); those of a stream have
    further columns that start with `__`. Files of `Dataset.over_time()` have the rows of a table
    with history, including deletions, with `__valid_from`, `__valid_to` and `__first`. Raises
    DatasetError for a version whose files must be merged, for a stream with replaced records, for
    files that also have rows of other times, and for files from before columns were renamed or
    dropped; raises ConfigurationError for a lake in memory.
    """
    return lend_whole_files(view, _plain_locations)


def _plain_locations(files: ViewFiles) -> list[str]:
    """Return the locations of the files. Raises DatasetError if they have names that the columns of
    the view don't, because columns were renamed or dropped.
    """
    other = files.find_other_column()
    if other is None:
        return files.paths
    view = files.view
    what = (
        f"stream {view.stream!r}" if isinstance(view, StreamView) else f"dataset {view.dataset!r}"
    )
    raise DatasetError(
        f"{what}: its files do not have its columns, because some were renamed or dropped: they"
        f" have {other}.",
        "Use pyarrow_dataset, duckdb_view or polars_frame, which give columns their names. For"
        " files with these names, write them from there:"
        ' pyarrow.dataset.write_dataset(pyarrow_dataset(…), FOLDER, format="parquet").',
        dataset=view.dataset,
    )


@validated
def pyarrow_dataset(view: View) -> pads.Dataset:
    """Return a `pyarrow.dataset` over exactly the version's or stream's files, with the columns of
    `view.schema`.

    A stream's columns are followed by `__tombstone` and `__epoch` (null for 0), and, if records are
    replaced, by the columns of their positions; replaced records are left out. Rows over time have
    `__valid_from`, `__valid_to` and `__tombstone`; of these only the valid rows are returned, each
    interval as stored. Files are opened when they are read. Raises as `parquet_files` does, but not
    for replaced records and rows of other times, which are left out, nor for renamed columns.
    """
    return lend_files(view, ViewFiles.dataset)


@validated
def duckdb_view(connection: duckdb.DuckDBPyConnection, view: View, name: str) -> None:
    """Create or replace a view of this name over the version or stream; it lasts as long as the
    connection.

    DuckDB itself reads a version's files in a folder. On S3, and for a stream, they are read
    through pyarrow, so that no extension is needed and the lake's own settings apply. Raises as
    `pyarrow_dataset` does.
    """
    create = f"CREATE OR REPLACE TEMP VIEW {_sql_name(name)} AS "
    lend_files(
        view, lambda files: connection.execute(create + _duckdb_query(connection, files, name))
    )


def _duckdb_query(connection: duckdb.DuckDBPyConnection, files: ViewFiles, name: str) -> str:
    """Return the SELECT of a DuckDB view over the files; what it reads through pyarrow is
    registered in the connection.
    """
    if files.over_time is not None:
        edge = _edge(files.over_time.reader)
        edge_sql = ""
        if edge:
            edge_sql = f"TIMESTAMPTZ '{edge.isoformat(sep=' ')}'"
        rows = _register(connection, name, files.all_rows())
        return valid_time.intervals_sql(files.over_time, rows, _sql_name, edge_sql)
    columns = ", ".join(map(_sql_name, _shown_columns(files)))
    if isinstance(files.view, StreamView):
        columns = columns.replace(_sql_name(EPOCH), f"coalesce({EPOCH}, 0) AS {EPOCH}")
    paths = files.plain_paths()
    has_pattern = any(mark in path for path in paths for mark in "*?[")  # to DuckDB
    if paths and not has_pattern:
        listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
        # Without hive partitioning: a folder named a=b would add or replace a column.
        return f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false)"
    return f"SELECT {columns} FROM {_register(connection, name, files.dataset())}"


def _shown_columns(files: ViewFiles) -> list[str]:
    """Return the columns that a DuckDB view or Polars frame shows: of rows over time, only those
    of the entries.
    """
    if isinstance(files.view, StreamView):
        return list(files.columns)
    return list(files.view.schema.names)


def _register(connection: duckdb.DuckDBPyConnection, view: str, rows: pads.Dataset) -> str:
    """Register the rows of a view in a connection; return the quoted name of the registered table.

    Each view has its own, because two views of one version may have different rows.
    """
    connection.execute("SELECT 1").fetchall()  # registering fails while a result is not fully read
    connection.register(f"adjunct {view}", rows)
    return _sql_name(f"adjunct {view}")


@validated
def polars_frame(view: View) -> polars.LazyFrame:
    """Return a Polars LazyFrame over the version or stream, with the columns of `view.schema`.

    Polars itself reads a version's files in a folder; on S3, and for a stream, pyarrow does. Raises
    as `pyarrow_dataset` does, and ConfigurationError if Polars is not installed.
    """
    polars = import_package("polars_frame()", "polars", "polars")
    return lend_files(view, lambda files: _lazy_frame(polars, files))


def _lazy_frame(polars: Any, files: ViewFiles) -> polars.LazyFrame:
    """Return a Polars LazyFrame of the view's rows."""
    if files.over_time is not None:
        return _polars_over_time(
            polars, files.over_time, polars.scan_pyarrow_dataset(files.all_rows())
        )
    if paths := files.plain_paths():
        frame = polars.scan_parquet(paths, glob=False, hive_partitioning=False)
    else:
        frame = polars.scan_pyarrow_dataset(files.dataset())
    if isinstance(files.view, StreamView):
        frame = frame.with_columns(polars.col(EPOCH).fill_null(0))
    shown = [_exactly(polars, name) for name in _shown_columns(files)]
    return frame.select(shown)  # type: ignore[no-any-return]


def must_be_masked(view: Held) -> bool:
    """Whether the files of a version without history may have superseded or deleted rows, which
    a mask leaves out.
    """
    if not isinstance(view, VersionReader) or view.sealed.history is not None:
        return False
    return len(view.sealed.generations) > 1 or view.sealed.stored_rows != view.sealed.rows


def _check_whole(view: VersionReader) -> None:
    """Raise DatasetError for a version without history whose stored rows are not all entries."""
    sealed = view.sealed
    if len(sealed.generations) > 1 or sealed.lacks_base:
        raise _not_merged_error(view, len(sealed.generations), "superseded or deleted")
    if sealed.stored_rows != sealed.rows:
        raise DatasetError(
            f"dataset {view.dataset!r}, version {view.version}: of the {sealed.stored_rows} rows in"
            " its base some are deletions that later changes are compared with (in the order of"
            f" {describe_order(sealed.order_by)}), and other engines would take them for entries.",
            "Declare keep_tombstones=…, so that a major compaction drops old deletions, and compact"
            " once the newest is old enough. Or read it with frame() or get().",
            dataset=view.dataset,
            version=view.version,
        )


def _not_merged_error(reader: VersionReader, generations: int, problem: str) -> DatasetError:
    """Return the error for a version whose rows other engines would have to merge; `problem` says
    what some of its rows are.
    """
    count = "one generation" if generations == 1 else f"{generations} generations"
    return DatasetError(
        f"dataset {reader.dataset!r}, version {reader.version}: of the"
        f" {reader.sealed.stored_rows} rows in its {count} some are {problem}, and other engines"
        " can't merge them.",
        "Compact the dataset and use the new version: adjunct dataset compact"
        f" {reader.dataset} --level major. Or read it with frame() or get().",
        dataset=reader.dataset,
        version=reader.version,
    )

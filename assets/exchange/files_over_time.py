"""Entries over time handed to other engines: which rows of the files they are, as each engine's own query.

    a table with history       its base's files, whose rows say from when to when each is valid
    versions over time         the files of all versions, with the times of each as columns that its files lack

The rows are read through pyarrow; what is joined and left out, DuckDB and Polars do themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.entries_over_time import (
    EntriesAt,
    EntriesOverTime,
    content_of,
    edge_of,
    names_of_times,
)
from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime
from dagster_adjunct.assets.versions.kept_history import VALID_FROM, VALID_TO, moment_of
from dagster_adjunct.assets.versions.sealed_version import TOMBSTONE
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.arrow_fs import arrow_filesystem, location
from dagster_adjunct.resources.schemas.schema import arrow_type

if TYPE_CHECKING:
    import duckdb
    import polars
    import pyarrow.dataset

    from dagster_adjunct.assets.exchange.stream_view import StreamView
    from dagster_adjunct.assets.reading.entries_over_time import Reader
    from dagster_adjunct.assets.reading.versions_over_time import Span

SHOWN = {VALID_FROM: "timestamp", VALID_TO: "timestamp", TOMBSTONE: "boolean"}
"""The columns beside those of entries that tell when a row is valid; in files, and where rows are handed over whole."""


@dataclass(frozen=True, slots=True)
class TimedFiles:
    """Rows over time of which some are handed over: those valid at `moment`, without it those that are valid now.

    With `whole` it is all of them, joined where nothing changed and without deletions.
    """

    reader: Reader
    whole: bool = False
    moment: datetime | None = None

    @property
    def name(self) -> str:
        """What tells these rows from others in one connection."""
        return f"adjunct {self.reader.dataset} {self.reader.version} over time"

    def dataset(self) -> pyarrow.dataset.Dataset:
        """Return the rows as pyarrow's: the columns of entries and those of SHOWN; intervals are not joined."""
        return self._all().filter(self._condition())

    def create_view(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Create, or replace, a DuckDB view of them."""
        connection.execute("SELECT 1").fetchall()  # with a result that is not read to its end, nothing is registered
        connection.register(self.name, self._all())
        query = self._sql_over_time() if self.whole else self._sql_at()
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {_quoted(name)} AS {query}")

    def polars_frame(self, polars: Any) -> polars.LazyFrame:
        """Return them as a frame of Polars."""
        rows, pl = polars.scan_pyarrow_dataset(self._all()), polars
        names = list(self.reader.schema.names)
        if not self.whole:
            begun, open_ended = pl.lit(True), pl.col(VALID_TO).is_null()
            if self.moment is not None:
                begun, open_ended = pl.col(VALID_FROM) <= self.moment, open_ended | (pl.col(VALID_TO) > self.moment)
            return rows.filter(begun & open_ended & ~pl.col(TOMBSTONE)).select(names)  # type: ignore[no-any-return]
        if self._edge is not None:
            rows = rows.filter(pl.col(VALID_TO).is_null() | (pl.col(VALID_TO) > self._edge))
        key = list(self.reader.sealed.key)
        same = pl.col(VALID_TO).shift(1).over(key) == pl.col(VALID_FROM)
        same &= ~pl.col(TOMBSTONE).shift(1).over(key) & ~pl.col(TOMBSTONE)
        for name in content_of(self.reader):
            same &= pl.col(name).shift(1).over(key).eq_missing(pl.col(name))
        rows = rows.sort(*key, VALID_FROM).with_columns(__starts=~same.fill_null(False))
        rows = rows.with_columns(__run=pl.col("__starts").cum_sum().over(key))
        rows = rows.with_columns(pl.col(VALID_TO).last().over([*key, "__run"]))
        start, end, current = names_of_times(self.reader)
        times = [pl.col(VALID_FROM).alias(start)] if start else []
        times += [pl.col(VALID_TO).alias(end), pl.col(VALID_TO).is_null().alias(current)]
        whole = rows.filter(pl.col("__starts") & ~pl.col(TOMBSTONE)).select(*map(pl.col, names), *times)
        return whole  # type: ignore[no-any-return]

    # -- inside

    @property
    def _edge(self) -> datetime | None:
        edge = edge_of(self.reader)
        return None if edge is None else moment_of(edge)

    def _condition(self) -> Any:
        """Return pyarrow's expression for the rows that are handed over."""
        import pyarrow.compute as pc

        valid = ~pc.field(TOMBSTONE)
        if self.whole:
            return valid if self._edge is None else valid & (_open() | (pc.field(VALID_TO) > _scalar(self._edge)))
        if self.moment is None:
            return valid & _open()
        moment = _scalar(self.moment)
        return valid & (pc.field(VALID_FROM) <= moment) & (_open() | (pc.field(VALID_TO) > moment))

    def _all(self) -> pyarrow.dataset.FileSystemDataset:
        """Return all rows, deletions too."""
        import pyarrow as pa
        from pyarrow import dataset

        filesystem, parquet = arrow_filesystem(self.reader.store), dataset.ParquetFileFormat()
        fields = [*self.reader.schema.to_arrow(), *(pa.field(name, arrow_type(kind)) for name, kind in SHOWN.items())]
        fragments = [
            parquet.make_fragment(
                location(stored.store, stored.key).removeprefix("s3://"),
                filesystem=filesystem,
                file_size=stored.file.size,
                partition_expression=None if span is None else _told_of(span),
            )
            for span, stored in _files(self.reader)
        ]
        return dataset.FileSystemDataset(fragments, pa.schema(fields), parquet, filesystem=filesystem)

    def _sql_at(self) -> str:
        columns = ", ".join(map(_quoted, self.reader.schema.names))
        valid = f"NOT {TOMBSTONE} AND ({VALID_TO} IS NULL"
        if self.moment is None:
            return f"SELECT {columns} FROM {_quoted(self.name)} WHERE {valid})"
        moment = _literal(self.moment)
        return (
            f"SELECT {columns} FROM {_quoted(self.name)} WHERE {VALID_FROM} <= {moment} AND {valid} "
            f"OR {VALID_TO} > {moment})"
        )

    def _sql_over_time(self) -> str:
        reader = self.reader
        key = ", ".join(map(_quoted, reader.sealed.key))
        in_time = f"(PARTITION BY {key} ORDER BY {VALID_FROM})"
        same = [f"NOT {TOMBSTONE}", f"NOT lag({TOMBSTONE}, 1, true) OVER {in_time}"]
        same += [f"coalesce(lag({VALID_TO}) OVER {in_time} = {VALID_FROM}, false)"]
        same += [f"lag({c}) OVER {in_time} IS NOT DISTINCT FROM {c}" for c in map(_quoted, content_of(reader))]
        exact = "true" if self._edge is None else f"({VALID_TO} IS NULL OR {VALID_TO} > {_literal(self._edge)})"
        start, end, current = names_of_times(reader)
        columns = [*map(_quoted, reader.schema.names), *([f"{VALID_FROM} AS {start}"] if start else [])]
        whole = f"PARTITION BY {key}, __run ORDER BY {VALID_FROM} ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING"
        return (
            f"WITH marked AS (SELECT *, NOT ({' AND '.join(same)}) AS __starts FROM {_quoted(self.name)} "
            f"WHERE {exact}), "
            f"runs AS (SELECT *, sum(__starts::INT) OVER {in_time} AS __run FROM marked), "
            f"ended AS (SELECT * EXCLUDE ({VALID_TO}), last_value({VALID_TO}) OVER ({whole}) AS {VALID_TO} FROM runs) "
            f"SELECT {', '.join(columns)}, {VALID_TO} AS {end}, {VALID_TO} IS NULL AS {current} "
            f"FROM ended WHERE __starts AND NOT {TOMBSTONE}"
        )


def timed(view: VersionReader | StreamView | EntriesOverTime | EntriesAt) -> TimedFiles | None:
    """Return what is handed over of a view whose rows are over time; None for any other."""
    if isinstance(view, EntriesOverTime):
        return TimedFiles(view.reader, whole=True)
    if isinstance(view, EntriesAt):
        return None if isinstance(view.reader, VersionsOverTime) else TimedFiles(view.reader, moment=view.moment)
    if isinstance(view, VersionReader) and view.sealed.history is not None:
        return TimedFiles(view)
    return None


def whole_table_files(reader: Reader) -> list[StoredFile]:
    """Return the files of a table with history. Raises DatasetError where no file says when its rows are valid."""
    if isinstance(reader, VersionsOverTime):
        raise DatasetError(
            f"dataset {reader.dataset!r}: its versions say since when they are valid, and their files do not.",
            "Hand over one version, dataset.valid_at(…), or all by pyarrow_dataset, duckdb_view or polars_frame.",
            dataset=reader.dataset,
        )
    return [stored for _, stored in _files(reader)]


def _files(reader: Reader) -> list[tuple[Span | None, StoredFile]]:
    """Return the files with the span of their version; None where their rows tell it."""
    what = f"dataset {reader.dataset!r}, version {reader.version}"
    if isinstance(reader, VersionsOverTime):
        return [
            (span, StoredFile(reader.store, what, generation.folder, file))
            for span, generation in zip(reader.spans, reader.generations, strict=True)
            for file in generation.files
        ]
    generations = [generation for generation in reader.sealed.generations if generation.files]
    if len(generations) > 1 or reader.sealed.lacks_base:
        count = "one generation" if len(generations) == 1 else f"{len(generations)} generations"
        raise DatasetError(
            f"{what}: of the {reader.sealed.stored_rows} rows in its {count} some are "
            "superseded or end otherwise than they say, and other engines can't merge them.",
            f"Compact the dataset and hand over the version that this makes: adjunct dataset compact {reader.dataset} "
            "--level major. Or read it by frame().",
            dataset=reader.dataset,
        )
    return [(None, StoredFile(reader.store, what, only.folder, file)) for only in generations for file in only.files]


def _told_of(span: Span) -> Any:
    """Return what pyarrow is to know of all rows of a version's file."""
    import pyarrow.compute as pc

    end = pc.field(VALID_TO)
    return (
        (pc.field(VALID_FROM) == _scalar(span.start))
        & (end.is_null() if span.end is None else end == _scalar(span.end))
        & (pc.field(TOMBSTONE) == pc.scalar(False))
    )


def _open() -> Any:
    import pyarrow.compute as pc

    return pc.field(VALID_TO).is_null()


def _scalar(moment: datetime) -> Any:
    import pyarrow as pa

    return pa.scalar(moment, arrow_type("timestamp"))


def _literal(moment: datetime) -> str:
    return f"TIMESTAMPTZ '{moment.isoformat(sep=' ')}'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

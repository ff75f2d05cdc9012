"""The entries of a version, or its rows over time, as Arrow tables: read in this process, without Spark."""

from __future__ import annotations

from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.history import Reader, Span
from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files, read_stored_file
from dagster_adjunct.assets.reading.superseded import kept_rows, key_codes, number_values, sortable_positions
from dagster_adjunct.assets.reading.version_reader import VersionReader, no_history_error
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.common import map_in_threads, to_microseconds
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type


def read_entries(view: VersionReader, bucket: int | None, *, threads: bool = True) -> pa.Table:
    """Return the entries of one bucket, or of all (None), with the columns that users see and deltas merged.

    Each file is fetched whole, in one request. `threads` decodes columns in parallel; pass False where buckets are read
    in parallel. Raises ManifestMismatchError for a file that is missing or damaged or differs from the manifest.
    """
    sealed = view.sealed
    rows, generation = _stored_rows(view, bucket, threads=threads)
    if rows.num_rows and (sealed.history is not None or sealed.positioned):
        kept = kept_rows(rows, generation, sealed.key, by_time=sealed.history is not None)
        rows = rows if kept.all() else rows.filter(kept)
    return rows.select(sealed.columns.names)


def read_rows_over_time(reader: Reader) -> pa.Table:
    """Return all rows over time, deletions included, sorted by key (in any order of keys) and time.

    They have the columns of entries, `__valid_from`, `__valid_to` (null: open), `__first` (nothing is known of the key
    before it) and `__tombstone`, as from `history_frame`. Raises DatasetError for a version without history, and
    ManifestMismatchError for damaged files.
    """
    if not isinstance(reader, VersionReader):
        parts = [_rows_of_span(reader.store, reader.dataset, reader.schema, n, s) for n, s in enumerate(reader.spans)]
        rows = pa.concat_tables(parts)
        return rows.take(np.lexsort((_micros(rows, VALID_FROM), _key_numbers(rows, reader.sealed.key))))
    if reader.sealed.history is None:
        raise no_history_error(reader.dataset)
    rows, generation = _stored_rows(reader, None, threads=False)
    numbers, begins = _key_numbers(rows, reader.sealed.key), _micros(rows, VALID_FROM)
    order = np.lexsort((generation, sortable_positions(rows.column(POSITION)), begins, numbers))
    numbers, begins = numbers[order], begins[order]
    newest = ~_same_as_next(numbers, begins)
    rows, numbers, begins = rows.take(order[newest]), numbers[newest], begins[newest]
    followed = _same_as_next(numbers)
    ends = pa.array(np.roll(begins, -1), pa.int64(), mask=~followed)
    first = pa.array(~np.roll(followed, 1))
    entries = rows.select([*reader.schema.names, VALID_FROM, TOMBSTONE])
    return entries.append_column(VALID_TO, ends.cast(arrow_type("timestamp"))).append_column(IS_FIRST, first)


def _stored_rows(view: VersionReader, bucket: int | None, *, threads: bool) -> tuple[pa.Table, Any]:
    """Return the stored rows of a bucket, or of all (None), and the generation of each (numpy)."""
    sealed = view.sealed
    numbers = {generation.folder: generation.id for generation in sealed.generations}
    stored = list_stored_files(view.store, view.dataset, sealed)
    wanted = [one for one in stored if bucket is None or one.file.bucket == bucket]
    tables = map_in_threads(partial(read_stored_file, layout=sealed.layout, threads=threads), wanted)
    generations = [np.full(table.num_rows, numbers[one.folder]) for one, table in zip(wanted, tables, strict=True)]
    rows = pa.concat_tables(tables) if tables else sealed.layout.arrow_schema().empty_table()
    return rows, np.concatenate([np.zeros(0, np.int64), *generations])


def _rows_of_span(store: ObjectStore, dataset: str, schema: Schema, number: int, span: Span) -> pa.Table:
    """Return the entries of a version, in these columns, with the interval in which it was valid."""
    version, wanted = span.version, schema.to_arrow()
    what = f"dataset {dataset!r}, version {version.id}"
    files = (StoredFile(store, what, one.folder, file) for one in version.generations for file in one.files)
    tables = map_in_threads(partial(read_stored_file, layout=version.layout, threads=False), files)
    rows = pa.concat_tables(tables) if tables else version.layout.arrow_schema().empty_table()
    columns: dict[str, Any] = {
        field.name: rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in wanted
    }
    instant = arrow_type("timestamp")
    end = None if span.end is None else to_microseconds(span.end)
    columns |= {
        VALID_FROM: pa.repeat(pa.scalar(to_microseconds(span.start), pa.int64()), rows.num_rows).cast(instant),
        TOMBSTONE: pa.repeat(pa.scalar(False), rows.num_rows),
        VALID_TO: pa.repeat(pa.scalar(end, pa.int64()), rows.num_rows).cast(instant),
        IS_FIRST: pa.repeat(pa.scalar(number == 0), rows.num_rows),
    }
    return pa.table(columns)


def _key_numbers(rows: pa.Table, key: tuple[str, ...]) -> Any:
    """Return a number for each row, equal where the keys are (numpy)."""
    return number_values(key_codes([rows.column(name) for name in key]))[0]


def _same_as_next(*columns: Any) -> Any:
    """Return for each row whether the next one has the same values (numpy); the last row has no next one."""
    same = np.zeros(len(columns[0]), np.bool_)
    same[:-1] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return same


def _micros(rows: pa.Table, name: str) -> Any:
    return rows.column(name).cast("int64").to_numpy()

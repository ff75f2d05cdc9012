"""The entries of a version as Arrow tables, a bucket at a time: for those who look at all of them without Spark."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.arrow_comparison import key_codes
from dagster_adjunct.assets.reading.stored_files import StoredFile, files_of
from dagster_adjunct.assets.versions.kept_history import VALID_FROM
from dagster_adjunct.assets.versions.sealed_version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files_before_evolution import as_laid_out, columns_problem

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout


def read_entries(view: VersionReader, bucket: int | None, *, threads: bool = True) -> pa.Table:
    """Return the entries of one bucket, or of all (None), with the columns that users see.

    Deltas are merged, so each key stands once. Whole files are fetched, in one request each. `threads` decodes columns
    side by side: False where the caller has buckets read side by side. Raises ManifestMismatchError for a file that is
    missing, damaged or not what the manifest says.
    """
    import pyarrow as pa

    sealed = view.sealed
    tables: list[pa.Table] = []
    generations: list[int] = []
    files = iter(files_of(view.store, view.dataset, sealed))
    for generation in sealed.generations:
        for _ in generation.files:
            stored = next(files)
            if bucket is None or stored.file.bucket == bucket:
                tables.append(read_stored_file(stored, sealed.layout, threads=threads))
                generations.append(generation.id)
    rows = pa.concat_tables(tables) if tables else sealed.layout.arrow_schema().empty_table()
    if sealed.history is not None:
        rows = _current(rows, [(table.num_rows, id) for table, id in zip(tables, generations, strict=True)], sealed.key)
    elif sealed.positioned:
        rows = _newest(rows, [(table.num_rows, id) for table, id in zip(tables, generations, strict=True)], sealed.key)
    return rows.select(sealed.columns.names)


def read_stored_file(stored: StoredFile, layout: BucketLayout, *, threads: bool = True) -> pa.Table:
    """Return all rows of a file with the columns of the layout, fetched in one request; raises as `read_entries`."""
    return stored.reading(partial(_decoded, stored, layout, threads))


def _decoded(stored: StoredFile, layout: BucketLayout, threads: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(stored.store.get(stored.key).data))
    if file.metadata.num_rows != stored.file.rows:
        raise stored.damaged(f"it has {file.metadata.num_rows} rows")
    if problem := columns_problem(file.schema_arrow, layout):
        raise stored.damaged(problem)
    return as_laid_out(file.read(use_threads=threads).replace_schema_metadata(), layout)


def _current(rows: pa.Table, files: list[tuple[int, int]], key: tuple[str, ...]) -> pa.Table:
    """Return the row of each key with the highest (moment, position, generation), unless it is a tombstone."""
    import numpy as np

    if not rows.num_rows:
        return rows
    generation = np.repeat([id for _, id in files], [count for count, _ in files])
    codes = key_codes([rows.column(name) for name in key]).dictionary_encode().unify_dictionaries()
    number = np.concatenate([chunk.indices.to_numpy() for chunk in codes.chunks])
    moment = rows.column(VALID_FROM).cast("int64").to_numpy()
    order = np.lexsort((generation, _places(rows.column(POSITION)), moment, number))
    last = np.append(np.diff(number[order]) != 0, True)
    kept = np.zeros(rows.num_rows, dtype=bool)
    kept[order[last]] = True
    return rows.filter(kept & ~rows.column(TOMBSTONE).to_numpy())


def _newest(rows: pa.Table, files: list[tuple[int, int]], key: tuple[str, ...]) -> pa.Table:
    """Return the row with the highest (position, generation) of each key, unless it is a tombstone.

    `files` are the rows and the generation of each file, in the order of `rows`. Only keys that stand in a delta
    are sorted out; the base's other rows pass as they are.
    """
    import numpy as np
    import pyarrow.compute as pc

    kept: Any = ~rows.column(TOMBSTONE).to_numpy()
    if len({generation for _, generation in files}) > 1:
        generation = np.repeat([id for _, id in files], [count for count, _ in files])
        codes = key_codes([rows.column(name) for name in key])
        later = generation != generation.min()
        contested = np.nonzero(pc.is_in(codes, value_set=codes.filter(later)).to_numpy())[0]
        same = codes.take(contested).dictionary_encode().unify_dictionaries()
        number = np.concatenate([chunk.indices.to_numpy() for chunk in same.chunks])
        position = _places(rows.column(POSITION))[contested]
        order = np.lexsort((generation[contested], position, number))
        beaten = contested[order[:-1][np.diff(number[order]) == 0]]
        kept = kept.copy()
        kept[beaten] = False
    return rows if kept.all() else rows.filter(kept)


def _places(positions: pa.ChunkedArray) -> Any:
    """Return numbers that compare as positions do, which may be texts."""
    import pyarrow.compute as pc
    import pyarrow.types as pt

    return (pc.rank(positions, tiebreaker="dense") if pt.is_string(positions.type) else positions).to_numpy()

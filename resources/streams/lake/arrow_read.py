"""Reads a lake stream without Spark: records of exact ranges, and the first one at or after a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ManifestMismatchError, ObjectNotFoundError
from dagster_adjunct.resources.objects.object_file import open_object
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    RECORD_META,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.streams.lake.segment_index import Pages, Span, touches, walk
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    HIDDEN,
    ROW,
    FileEntry,
    Segment,
    StreamState,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dagster_adjunct.resources.objects.object_store import ObjectStore

_POSITION_KINDS = {name: kind for name, kind in HIDDEN if name in POSITION}


def read_tables(
    store: ObjectStore,
    prefix: str,
    columns: Schema,
    segments: Sequence[Segment],
    spans: Mapping[int, Span],
    *,
    positions: bool = False,
) -> Iterator[pa.Table]:
    """Yield these columns and those of RECORD_META (and POSITION), ordered by partition and offset.

    In parts of a row group each, so that only one is in memory. `segments` are those that the spans touch.
    """
    schema = meta_schema(columns.to_arrow(), positions=positions)
    for partition, span in sorted(spans.items()):
        for segment in segments:
            for file in segment.files:
                if file.partition == partition and touches(segment, {partition: span}):
                    for table in _file_rows(store, prefix, segment, file, span, columns.names, positions=positions):
                        yield table.cast(schema)


def meta_schema(schema: pa.Schema, *, positions: bool = False) -> pa.Schema:
    """Return the Arrow schema of a read: the record's columns, then those of RECORD_META, then those of POSITION."""
    import pyarrow as pa

    kinds = (pa.int32(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.bool_(), pa.int32())
    for name, kind in zip(RECORD_META, kinds, strict=True):
        schema = schema.append(pa.field(name, kind))
    for name, kind in _POSITION_KINDS.items() if positions else ():
        schema = schema.append(pa.field(name, arrow_type(kind)))
    return schema


def open_parquet(store: ObjectStore, prefix: str, segment: Segment, file: FileEntry) -> pq.ParquetFile:
    """Open a segment's file. Raises ManifestMismatchError where it is missing or is no such file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    key = segment.key_of(prefix, file)
    try:
        parquet = pq.ParquetFile(open_object(store, key, file.size), pre_buffer=True)
    except (ObjectNotFoundError, pa.ArrowInvalid) as error:
        raise ManifestMismatchError(
            f"{prefix}: the manifest lists {key!r} with {file.rows} records, and it can't be read "
            f"({str(error).splitlines()[0]})",
            "Restore that object from a backup or an older object version; other ranges stay readable.",
            key=key,
        ) from error
    if parquet.metadata.num_rows != file.rows:
        raise ManifestMismatchError(
            f"{prefix}: {key!r} has {parquet.metadata.num_rows} records, the manifest lists {file.rows}.",
            "Restore that object from a backup or an older object version; other ranges stay readable.",
            key=key,
        )
    return parquet


def groups_of(parquet: pq.ParquetFile, column: str) -> Iterator[tuple[int, object, object, int]]:
    """Yield (row group, least, greatest, nulls) of a column; least and greatest are None where unknown."""
    names = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    index = names.index(column)
    for group in range(parquet.metadata.num_row_groups):
        stats = parquet.metadata.row_group(group).column(index).statistics
        if stats is not None and stats.has_min_max:
            yield group, stats.min, stats.max, stats.null_count or 0
        else:
            yield group, None, None, parquet.metadata.row_group(group).num_rows


def _file_rows(
    store: ObjectStore,
    prefix: str,
    segment: Segment,
    file: FileEntry,
    span: Span,
    columns: Sequence[str],
    *,
    positions: bool,
) -> Iterator[pa.Table]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    base = segment.base[file.partition]
    low, high = span[0] - base, span[1] - base
    parquet = open_parquet(store, prefix, segment, file)
    more = _POSITION_KINDS if positions else {}
    for group, least, greatest, _ in groups_of(parquet, ROW):
        if isinstance(least, int) and isinstance(greatest, int) and (greatest < low or least >= high):
            continue
        # Columns that the file is older than are left out here, and null for who reads them.
        table = parquet.read_row_group(group, columns=[*columns, ROW, TIMESTAMP, TOMBSTONE, EPOCH, *more])
        rows = table.column(ROW).to_numpy()
        first, last = np.searchsorted(rows, [low, high])
        table = table.slice(first, last - first)
        when = pa.scalar(segment.appended * 1000, pa.timestamp("us", tz="UTC"))
        yield pa.table(
            {
                **{name: _column(table, name) for name in columns},
                PARTITION: pa.array(np.full(table.num_rows, file.partition, np.int32)),
                OFFSET: pc.add(table.column(ROW), base),
                TIMESTAMP: pc.fill_null(table.column(TIMESTAMP), when),
                TOMBSTONE: table.column(TOMBSTONE),
                EPOCH: _epochs(table),
                **{name: _column(table, name) for name in more},
            }
        )


def _column(table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    place = table.schema.get_field_index(name)
    return pa.nulls(table.num_rows) if place < 0 else table.column(place)


def _epochs(table: pa.Table) -> pa.Array | pa.ChunkedArray:
    """Return the records' epochs: 0 for those of a file that has none, and where none was given."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if EPOCH not in table.column_names:
        return pa.array(np.zeros(table.num_rows, np.int32))
    return pc.fill_null(table.column(EPOCH), 0)


def first_offset_at(
    store: ObjectStore, prefix: str, state: StreamState, pages: Pages, partition: int, time_us: int
) -> int:
    """Return the offset of the partition's first record at or after this time, or its next offset."""

    def may_hold(entry: object) -> bool:
        latest = entry.latest(partition)  # type: ignore[attr-defined]
        return latest is not None and latest >= time_us

    for segment in walk(state, pages, may_hold):
        file = next(file for file in segment.files if file.partition == partition)
        row = _first_row_at(store, prefix, segment, file, time_us)
        if row is not None:
            return segment.base[partition] + row
    return state.next[partition]


def _first_row_at(store: ObjectStore, prefix: str, segment: Segment, file: FileEntry, time_us: int) -> int | None:
    import numpy as np
    import pyarrow.compute as pc

    parquet = open_parquet(store, prefix, segment, file)
    appended = segment.appended * 1000
    for group, _, greatest, nulls in groups_of(parquet, TIMESTAMP):
        if not (nulls and appended >= time_us) and greatest is not None and _us(greatest) < time_us:
            continue
        table = parquet.read_row_group(group, columns=[ROW, TIMESTAMP])
        times = pc.fill_null(table.column(TIMESTAMP).cast("int64"), appended).to_numpy()
        places = np.nonzero(times >= time_us)[0]
        if places.size:
            return int(table.column(ROW)[int(places[0])].as_py())
    return None


def _us(value: object) -> int:
    import datetime as dt

    assert isinstance(value, dt.datetime)
    return (value - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)

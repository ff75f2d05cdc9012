"""Reads exact ranges of a lake stream, with and without Spark, and finds the first record at or
after a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    bucket_file_suffix,
    bucketed_frame,
)
from dagster_adjunct.resources.bucketing.writer import ROW
from dagster_adjunct.resources.errors import ManifestMismatchError, ObjectNotFoundError, first_line
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import open_input
from dagster_adjunct.resources.objects.store import ObjectStore, StoreDescriptor
from dagster_adjunct.resources.schemas.arrow_values import cast_table, rename_columns
from dagster_adjunct.resources.schemas.schema import Schema, StoredNames, copy_name, named_column
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tuning import bigint_array
from dagster_adjunct.resources.streams import system
from dagster_adjunct.resources.streams.lake import lineage, manifest
from dagster_adjunct.resources.streams.lake.lineage import WithoutPosition
from dagster_adjunct.resources.streams.lake.manifest import (
    FileEntry,
    LakeStreamDeclaration,
    Segment,
    Span,
    StreamFiles,
    StreamState,
    StreamStates,
    SupersededRange,
)
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    RECORD_META,
    RECORD_META_COLUMNS,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    TIMESTAMP,
    TOMBSTONE,
    Epochs,
    Marker,
    NumberedOffsets,
    OffsetRange,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.validation import validated_methods

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame, SparkSession

    Rows = npt.NDArray[np.int64]


def read_tables(
    files: StreamFiles,
    columns: Schema,
    names: StoredNames,
    segments: Sequence[Segment],
    spans: Mapping[int, Span],
    *,
    positions: bool,
    whole: bool = False,
    finish: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> Iterator[pa.Table]:
    """Yield the records of these spans with these columns and those of RECORD_META (and POSITION,
    with `positions`).

    Files have the columns under their stored `names`. The records are ordered by partition and
    offset, and come in parts of one row group, of which only one is in memory. With `whole` all are
    in memory, and files are read concurrently. `segments` must include all that overlap the spans.
    `finish` is applied to each part.
    """
    form = RecordForm.of(columns, names, positions=positions)

    def read(part: FilePart) -> list[pa.Table]:
        return [finish(table) for table in _read_file(files, part, form)]

    parts = find_parts(segments, spans)
    if whole:
        yield from chain.from_iterable(map_in_threads(read, parts))
        return
    for part in parts:
        for table in _read_file(files, part, form):
            yield finish(table)


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The columns of the records that a read returns, as users see them (`schema`) and as files
    have them (`stored`), with those of RECORD_META, and maybe POSITION.
    """

    schema: pa.Schema
    stored: pa.Schema

    @classmethod
    def of(cls, columns: Schema, names: StoredNames, *, positions: bool) -> RecordForm:
        """Return the form of records with these columns, which files have under stored `names`."""
        schema = with_meta_columns(columns.to_arrow(), positions=positions)
        if names.names:
            stored = with_meta_columns(names.store(columns).to_arrow(), positions=positions)
        else:
            stored = schema
        return cls(schema, stored)

    def read(self, parquet: SegmentFile, group: int) -> GroupRows:
        """Return the rows of a row group with those of these columns that the file has."""
        # Columns added after the file was written are missing here, and read as null.
        return read_rows(parquet, group, self.stored.names)

    def finish(self, rows: GroupRows, segment: Segment, partition: int) -> pa.Table:
        """Return rows of a file, as `read` returns them, as records."""
        numbers, table = rows
        appended = pa.scalar(segment.appended * 1000, pa.timestamp("us", tz="UTC"))
        missing = pa.nulls(len(numbers))
        values = dict(zip(table.column_names, table.columns, strict=True))
        values |= {
            PARTITION: pa.array(np.full(len(numbers), partition, np.int32)),
            OFFSET: pa.array(numbers + segment.base[partition]),
            TIMESTAMP: pc.fill_null(table.column(TIMESTAMP), appended),
            EPOCH: pc.fill_null(values.get(EPOCH, missing.cast("int32")), 0),
        }
        found = pa.table({name: values.get(name, missing) for name in self.stored.names})
        records = cast_table(found, self.stored)
        if self.stored is self.schema:
            return records
        return rename_columns(records, self.schema)


class GroupRows(NamedTuple):
    """Rows of a row group: their `__row`, and a table with other columns of theirs."""

    numbers: Rows
    table: pa.Table

    def between(self, low: int, high: int) -> GroupRows:
        """Return those of the rows, which are in order, that are in [low, high)."""
        first, last = np.searchsorted(self.numbers, [low, high])
        return GroupRows(self.numbers[first:last], self.table.slice(first, last - first))

    def take(self, places: Rows) -> GroupRows:
        """Return the rows at these places in the row group."""
        return GroupRows(self.numbers[places], self.table.take(pa.array(places)))


class FilePart(NamedTuple):
    """The rows [low, high) of a file of a segment."""

    segment: Segment
    file: FileEntry
    low: int
    high: int


def find_parts(segments: Sequence[Segment], spans: Mapping[int, Span]) -> list[FilePart]:
    """Return the files that may have records of the spans, by partition and offset."""
    parts = []
    for partition, span in sorted(spans.items()):
        for segment in segments:
            if not manifest.overlaps_spans(segment, {partition: span}):
                continue
            base = segment.base[partition]
            for file in segment.files:
                if file.partition == partition:
                    parts.append(FilePart(segment, file, span.start - base, span.end - base))
    return parts


def with_meta_columns(schema: pa.Schema, *, positions: bool = False) -> pa.Schema:
    """Return the Arrow schema of a read: the record's columns, then those of RECORD_META, then,
    with `positions`, those of POSITION.
    """
    more = dict(RECORD_META_COLUMNS)
    if positions:
        more |= POSITION
    added = [pa.field(name, arrow_type(kind)) for name, kind in more.items()]
    return pa.schema([*schema, *added])


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The open file of a segment. What can't be read of it is a ManifestMismatchError."""

    parquet: pq.ParquetFile
    translate_errors: Callable[[], AbstractContextManager[None]]

    @property
    def metadata(self) -> pq.FileMetaData:
        return self.parquet.metadata

    @property
    def schema(self) -> pq.ParquetSchema:
        return self.parquet.schema

    @property
    def column_names(self) -> list[str]:
        """The stored names of the columns."""
        names: list[str] = self.parquet.schema_arrow.names
        return names

    def read_row_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a row group, with all columns or those of these that the file has."""
        with self.translate_errors():
            return self.parquet.read_row_group(group, columns=columns)


def open_segment_file(
    files: StreamFiles, segment: Segment, file: FileEntry, *, for_few: bool = False
) -> SegmentFile:
    """Return the open file of a segment. Raises ManifestMismatchError if it is missing or
    damaged.

    If it is read `for_few` of its rows, texts stay in the dictionaries in which they are stored,
    which takes a third of the time.
    """
    key = segment.key_of(files.prefix, file)
    translate_errors = partial(_translate_damage, files.prefix, key, file)
    with translate_errors():
        source = open_input(
            file.size,
            partial(_read_whole, files.store, key, file.sha256),
            partial(files.store.get_range, key),
        )
        # Pages of a file that is read in ranges have checksums of their own.
        parquet = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
        if for_few:
            parquet = pq.ParquetFile(
                source,
                pre_buffer=True,
                page_checksum_verification=True,
                metadata=parquet.metadata,
                read_dictionary=_columns_in_dictionaries(parquet),
            )
    if parquet.metadata.num_rows != file.rows:
        found = f"it has {parquet.metadata.num_rows}"
        raise _damage_error(files.prefix, key, file, found)
    return SegmentFile(parquet, translate_errors)


def _read_whole(store: ObjectStore, key: str, sha256: str) -> bytes:
    """Return the bytes of an object, which must have this SHA-256. Raises ArrowInvalid."""
    data = store.get(key).data
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise pa.ArrowInvalid(f"its SHA-256 is {found}, the manifest lists {sha256}")
    return data


@contextmanager
def _translate_damage(prefix: str, key: str, file: FileEntry) -> Iterator[None]:
    """Raise errors about a missing or damaged file as ManifestMismatchError. Those of this process
    or machine say nothing about the file, and are raised as they are.
    """
    try:
        yield
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (ObjectNotFoundError, pa.ArrowException, ValueError, KeyError) as error:
        raise _damage_error(prefix, key, file, first_line(error)) from error
    except OSError as error:
        if error.errno is not None:  # of the system: Arrow's own about contents have none
            raise
        raise _damage_error(prefix, key, file, first_line(error)) from error


def _damage_error(prefix: str, key: str, file: FileEntry, reason: str) -> ManifestMismatchError:
    """Return the error for a file that is missing or damaged."""
    problem = (
        f"{prefix}: the manifest lists {key!r} with {file.rows} records, but it can't be read"
        f" ({reason})"
    )
    step = (
        "Restore the object from a backup or an older object version; other ranges stay readable."
    )
    return ManifestMismatchError(problem, step, key=key)


def _columns_in_dictionaries(parquet: pq.ParquetFile) -> list[str]:
    """Return the columns of texts that a file has in dictionaries."""
    if not parquet.metadata.num_row_groups:
        return []
    names = []
    facts = parquet.metadata.row_group(0)
    for column in map(facts.column, range(facts.num_columns)):
        is_text = column.physical_type == "BYTE_ARRAY"
        is_nested = "." in column.path_in_schema
        if is_text and not is_nested and column.has_dictionary_page:
            names.append(column.path_in_schema)
    return names


class GroupStatistics(NamedTuple):
    """What a file says of a column in a row group. Without statistics, `least` and `greatest` are
    None, and all rows count as `nulls`.
    """

    group: int
    least: Any
    greatest: Any
    nulls: int


def iter_row_groups(
    parquet: pq.ParquetFile | SegmentFile, column: str
) -> Iterator[GroupStatistics]:
    """Yield the statistics of a column in each row group."""
    index = _column_index(parquet, column)
    for group in range(parquet.metadata.num_row_groups):
        facts = parquet.metadata.row_group(group)
        stats = facts.column(index).statistics
        if stats is not None and stats.has_min_max:
            yield GroupStatistics(group, stats.min, stats.max, stats.null_count or 0)
        else:
            yield GroupStatistics(group, None, None, facts.num_rows)


def _column_index(parquet: pq.ParquetFile | SegmentFile, column: str) -> int:
    """Return the place of a column among the leaves of a file's schema."""
    names = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    return names.index(column)


def read_rows(parquet: SegmentFile, group: int, columns: Sequence[str]) -> GroupRows:
    """Return the rows of a row group with those of these columns that the file has.

    If their `__row` has no gap, as in most files, it follows from the statistics, and is not read.
    """
    facts = parquet.metadata.row_group(group)
    stats = facts.column(_column_index(parquet, ROW)).statistics
    has_bounds = stats is not None and stats.has_min_max
    if has_bounds and stats.max - stats.min + 1 == facts.num_rows:
        table = parquet.read_row_group(group, columns=columns)
        return GroupRows(np.arange(stats.min, stats.max + 1, dtype=np.int64), table)
    table = parquet.read_row_group(group, columns=[*columns, ROW])
    return GroupRows(table.column(ROW).to_numpy(), table)


def iter_groups_between(parquet: SegmentFile, low: int, high: int) -> Iterator[int]:
    """Yield the row groups that may have one of the rows [low, high)."""
    for stats in iter_row_groups(parquet, ROW):
        if stats.greatest is not None and stats.greatest < low:
            continue
        if stats.least is not None and stats.least >= high:
            break  # rows are in order
        yield stats.group


def _read_file(files: StreamFiles, part: FilePart, form: RecordForm) -> Iterator[pa.Table]:
    """Yield the records of a part of a file, by row group."""
    parquet = open_segment_file(files, part.segment, part.file)
    for group in iter_groups_between(parquet, part.low, part.high):
        rows = form.read(parquet, group).between(part.low, part.high)
        yield form.finish(rows, part.segment, part.file.partition)


def find_offset_at_time(
    files: StreamFiles, state: StreamState, partition: int, time_us: int
) -> int:
    """Return the offset of the partition's first record at or after this time (us since the epoch).

    If there is none, returns the partition's upcoming offset.
    """

    def may_hold(entry: object) -> bool:
        latest = entry.latest(partition)  # type: ignore[attr-defined]
        return latest is not None and latest >= time_us

    for segment in manifest.walk_segments(state, files, may_hold):
        file = next(file for file in segment.files if file.partition == partition)
        row = _find_row_at_time(files, segment, file, time_us)
        if row is not None:
            return segment.base[partition] + row
    return state.next[partition]


def _find_row_at_time(
    files: StreamFiles, segment: Segment, file: FileEntry, time_us: int
) -> int | None:
    """Return the `__row` of the first record of a file at or after this time, None if there is
    none.
    """
    parquet = open_segment_file(files, segment, file)
    appended = segment.appended * 1000  # the time of records without a timestamp
    for stats in iter_row_groups(parquet, TIMESTAMP):
        may_have_stored = stats.greatest is None or to_microseconds(stats.greatest) >= time_us
        may_have_appended = stats.nulls > 0 and appended >= time_us
        if not may_have_stored and not may_have_appended:
            continue
        table = parquet.read_row_group(stats.group, columns=[ROW, TIMESTAMP])
        times = pc.fill_null(table.column(TIMESTAMP).cast("int64"), appended).to_numpy()
        places = np.nonzero(times >= time_us)[0]
        if places.size:
            return int(table.column(ROW)[int(places[0])].as_py())
    return None


_MAX_INTERVALS = 8


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Which rows of segments to read, as conditions on `__row`, which counts from the segment's
    base in each file.

    `partitions` are those whose files are read, None for all. `rows` are intervals [low, high) that
    contain every row to read, by which Spark skips row groups; empty if it would skip none.
    `clipped_low` are the indexes of the segments with a file that begins before its partition's
    span, `clipped_high` of those with one that ends after it. Only in these must rows be compared
    with `lows` and `highs`, the bounds by segment * number of partitions + partition.
    """

    partitions: tuple[int, ...] | None
    rows: tuple[Span, ...]
    clipped_low: tuple[int, ...]
    clipped_high: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]


def find_row_ranges(
    segments: Sequence[Segment], spans: Mapping[int, Span], partitions: int
) -> RowRanges:
    """Return which rows of the segments are in the spans, which are [start, end) by partition;
    `partitions` is the number of all partitions.
    """
    wanted = {partition for partition, (start, end) in spans.items() if start < end}
    has_others = False  # whether there are files of other partitions
    # By segment and partition.
    lows, highs, widths = np.zeros((3, len(segments), partitions), np.int64)
    for i, segment in enumerate(segments):
        filled = {file.partition for file in segment.files}
        has_others |= not filled <= wanted
        for p in filled & wanted:
            start, end = spans[p]
            widths[i, p] = segment.next[p] - segment.base[p]
            lows[i, p] = max(start - segment.base[p], 0)
            highs[i, p] = min(end - segment.base[p], widths[i, p])
    has_rows = lows < highs
    intervals = _merge_intervals(map(Span, lows[has_rows].tolist(), highs[has_rows].tolist()))
    all_rows = Span(0, widths.max(initial=0))
    if intervals == (all_rows,):  # Spark would skip nothing
        intervals = ()
    return RowRanges(
        partitions=tuple(sorted(wanted)) if has_others else None,
        rows=intervals,
        clipped_low=tuple(np.nonzero((lows > 0).any(axis=1))[0].tolist()),
        clipped_high=tuple(np.nonzero((highs < widths).any(axis=1))[0].tolist()),
        lows=tuple(lows.ravel().tolist()),
        highs=tuple(highs.ravel().tolist()),
    )


def _merge_intervals(rows: Iterable[Span]) -> tuple[Span, ...]:
    """Return the union of the intervals, or one interval around it if it has more than
    _MAX_INTERVALS.
    """
    merged: list[Span] = []
    for span in sorted(rows):
        if merged and span.start <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end))
        else:
            merged.append(span)
    if len(merged) <= _MAX_INTERVALS:
        return tuple(merged)
    return (Span(merged[0].start, merged[-1].end),)


def read_frame(
    spark: SparkSession,
    files: StreamFiles,
    declaration: LakeStreamDeclaration,
    touched: Sequence[Segment],
    spans: Mapping[int, Span],
    *,
    positions: bool,
    copies: bool = False,
) -> DataFrame:
    """Return the records of these spans with the columns of RECORD_META, as a bucketed scan.

    With `positions`, those of POSITION follow, and with `copies` those that copy values of the key
    (`copy_name`). `touched` are the segments that overlap the spans; each is a generation of the
    bucketed table. What differs by segment and partition (the first offset, the time of the append)
    is looked up in array literals.
    """
    schema = declaration.columns
    partitions = declaration.partitions
    segments = [segment for segment in touched if manifest.may_have_records_in(segment, spans)]
    generations = [segment.generation(i, files.prefix) for i, segment in enumerate(segments)]
    layout = declaration.layout
    frame = bucketed_frame(spark, files.store, files.prefix, layout, generations)
    copied = []
    if copies:
        for copy, path in declaration.copied.items():
            copied.append(named_column(copy).alias(copy_name(str(path))))
    if not segments:
        return _empty_frame(frame, schema.names, copied, positions=positions)

    partition: Column = F.lit(0)  # the only one of a stream without key
    if layout.bucket_by:
        partition = F.pmod(F.hash(*map(named_column, layout.bucket_by)), F.lit(partitions))
    place = F.col(GENERATION_COLUMN) * partitions + partition
    base = bigint_array(chain.from_iterable(segment.base for segment in segments))
    appended = bigint_array(segment.appended * 1000 for segment in segments)
    meta = {
        PARTITION: partition.cast("int"),
        OFFSET: F.col(ROW) + F.get(base, place),
        TIMESTAMP: F.coalesce(
            F.col(TIMESTAMP), F.timestamp_micros(F.get(appended, F.col(GENERATION_COLUMN)))
        ),
        TOMBSTONE: F.col(TOMBSTONE),
        EPOCH: F.coalesce(F.col(EPOCH), F.lit(0)),  # files without the column read as null
    }
    ranges = find_row_ranges(segments, spans, partitions)
    for condition in _row_conditions(ranges, place, len(segments)):
        frame = frame.where(condition)
    columns = [named_column(name) for name in schema.names]
    columns += [meta[name].alias(name) for name in RECORD_META]
    if positions:
        columns += map(F.col, POSITION)
    return frame.select(*columns, *copied)


def _empty_frame(
    frame: DataFrame, own: Sequence[str], copied: Sequence[Column], *, positions: bool
) -> DataFrame:
    """Return the empty `frame`, still a bucketed scan, with the columns of records, and those
    `copied`.

    Its timestamps and tombstones are columns: if they were literals, Spark would find that filters
    on them never match, and remove the scan from the plan, with its buckets.
    """
    kinds = dict(RECORD_META_COLUMNS)
    if positions:
        kinds |= POSITION
    known = {EPOCH: F.lit(0), TIMESTAMP: F.col(TIMESTAMP), TOMBSTONE: F.col(TOMBSTONE)}
    return frame.select(
        *[named_column(name) for name in own],
        *[known.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in kinds.items()],
        *copied,
    )


def _row_conditions(cut: RowRanges, place: Column, segments: int) -> Iterator[Column]:
    """Yield the filters that select the rows of `cut`; `place` is segment * number of partitions +
    partition.

    Spark evaluates them for each row, so the costly ones are limited to the segments that need
    them.
    """
    if cut.partitions is not None:
        # Spark skips files by this filter, but also evaluates it for every row, so it compares
        # suffixes, which is fast.
        name = F.col("_metadata.file_name")
        in_wanted = [name.endswith(bucket_file_suffix(partition)) for partition in cut.partitions]
        yield reduce(or_, in_wanted or [F.lit(False)])  # no row, if no partition is wanted
    if cut.rows:
        yield reduce(or_, [(F.col(ROW) >= low) & (F.col(ROW) < high) for low, high in cut.rows])
    if cut.clipped_low:
        yield _is_outside(cut.clipped_low, segments) | (
            F.col(ROW) >= F.get(bigint_array(cut.lows), place)
        )
    if cut.clipped_high:
        yield _is_outside(cut.clipped_high, segments) | (
            F.col(ROW) < F.get(bigint_array(cut.highs), place)
        )


def _is_outside(some: Sequence[int], segments: int) -> Column:
    """Return the condition that a row is in none of these segments, of `segments` in all; as SQL
    text, which saves a JVM call for each.
    """
    if len(some) == segments:
        return F.lit(False)
    return F.expr(f"`{GENERATION_COLUMN}` NOT IN ({', '.join(map(str, some))})")


def read_partition(
    store: StoreDescriptor,
    prefix: str,
    schema: Schema,
    names: StoredNames,
    segments: Sequence[Segment],
    spans: Mapping[int, Span],
    p: int,
) -> Iterator[pa.Table]:
    """Yield the records of partition `p` in order, in parts of one row group. Opens the store,
    for tasks.
    """
    return read_tables(
        StreamFiles(store.open(), prefix), schema, names, segments, {p: spans[p]}, positions=False
    )


def spans_from_ranges(
    state: StreamState, ranges: Mapping[SystemStreamPartition, OffsetRange]
) -> dict[int, Span]:
    """Return the ranges as [start, end) by partition number.

    Raises OffsetOutOfRangeError if the stream does not contain a range entirely.
    """
    spans: dict[int, Span] = {}
    for ssp, given in ranges.items():
        system.check_partition(ssp, len(state.next))
        start = system.parse_offset(given.start, str(ssp))
        end = system.parse_offset(given.end, str(ssp))
        system.check_range(ssp, start, end, state.oldest[ssp.partition], state.next[ssp.partition])
        spans[ssp.partition] = Span(start, end)
    return spans


class ReadOptions(TypedDict, total=False):
    """Options of a read: which records it returns, and whether with source positions and copies of
    the key. See `LakeStreams.read`.
    """

    epochs: Epochs
    positions: bool
    copies: bool
    without_position: WithoutPosition


class _Located(NamedTuple):
    """Where the records of ranges of one stream are: in which segments, and at which offsets, by
    partition. `replaced` are the ranges of results to leave out, with `epochs="latest"`.
    """

    state: StreamState
    files: StreamFiles
    segments: list[Segment]
    spans: dict[int, Span]
    replaced: list[SupersededRange]


@validated_methods
class LakeReads(StreamStates, NumberedOffsets):
    """The read operations of `LakeStreams`."""

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        if not ranges:
            return 0
        stream = system.require_one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = spans_from_ranges(state, ranges)
        offsets = sum(span.end - span.start for span in spans.values())
        markers = manifest.find_markers(state, self.files_of(stream), spans)
        return offsets - len(markers)

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        **options: Unpack[ReadOptions],
    ) -> DataFrame:
        """Return the records of these ranges of one stream, as a scan that is bucketed by its key.

        The frame has the stream's columns and those of RECORD_META; with `positions`, those of
        POSITION follow. With `copies`, a copy of each value of the key that is inside a column
        follows (`copy_name`): by these the scan is bucketed. With `epochs="latest"`, it leaves out
        records that a later epoch, even outside of these ranges, has replaced. Then records without
        a source position raise ConfigurationError, unless `without_position="keep"`.
        """
        spark = resolve_session(spark)
        positions = options.get("positions", False)
        at = self._locate(ranges, **options)
        with_positions = positions or bool(at.replaced)  # by which replaced records are found
        frame = read_frame(
            spark,
            at.files,
            at.state.declaration,
            at.segments,
            at.spans,
            positions=with_positions,
            copies=options.get("copies", False),
        )
        frame = filter_latest_frame(frame, at.replaced)
        if positions:
            return frame
        return frame.drop(*POSITION)

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        **options: Unpack[ReadOptions],
    ) -> pa.Table:
        """Return the records that `read` returns, with all columns or these `columns`, without
        Spark, ordered by partition and offset. The option `copies` makes no difference.

        All of them are in memory; `read_parts` yields them in parts.
        """
        return pa.concat_tables(self._iter_parts(ranges, columns, whole=True, **options))

    def read_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Iterator[pa.Table]:
        """Yield the records that `read_arrow` returns in tables of at most 65,536, of which one is
        in memory. The first one is empty.
        """
        return self._iter_parts(ranges, columns, whole=False, **options)

    def _iter_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None,
        *,
        whole: bool,
        **options: Unpack[ReadOptions],
    ) -> Iterator[pa.Table]:
        """Yield an empty table with the columns, then the records in parts (`read_tables`)."""
        at = self._locate(ranges, **options)
        declared = at.state.declaration.columns
        positions = options.get("positions", False)
        if columns is not None:
            schema = declared.select(columns)
        else:
            schema = declared
        yield with_meta_columns(schema.to_arrow(), positions=positions).empty_table()

        with_positions = positions or bool(at.replaced)  # by which replaced records are found

        def finish(table: pa.Table) -> pa.Table:
            latest = lineage.filter_latest(table, at.replaced)
            if with_positions and not positions:
                return latest.drop_columns(list(POSITION))
            return latest

        names = at.state.declaration.names
        yield from read_tables(
            at.files,
            schema,
            names,
            at.segments,
            at.spans,
            positions=with_positions,
            whole=whole,
            finish=finish,
        )

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        at = self._locate(ranges)
        declared = at.state.declaration
        schema = declared.columns.select(columns)
        store = at.files.store.descriptor
        return partial(
            read_partition, store, at.files.prefix, schema, declared.names, at.segments, at.spans
        )

    def _locate(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        epochs: Epochs = "all",
        positions: bool = False,
        copies: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> _Located:
        """Return where the records of these ranges are. It takes the options of `read`, of which
        `positions` and `copies` make no difference. Raises OffsetOutOfRangeError, and
        ConfigurationError as `read` does.
        """
        stream = system.require_one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = spans_from_ranges(state, ranges)
        files = self.files_of(stream)
        segments = manifest.list_overlapping(state, files, spans)
        replaced = []
        if epochs == "latest":
            replaced = lineage.find_replaced_results(
                self, stream, state, segments, without_position
            )
        return _Located(state, files, segments, spans, replaced)

    def all_ranges(self, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
        """Return the ranges of all records that the stream holds now."""
        _, state = self.state(stream)
        ranges = {}
        for p, (start, end) in enumerate(zip(state.oldest, state.next, strict=True)):
            ssp = SystemStreamPartition(self.name, stream, p)
            ranges[ssp] = OffsetRange(str(start), str(end))
        return ranges

    def markers(
        self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None
    ) -> list[Marker]:
        _, state = self.state(stream)
        ssps = [SystemStreamPartition(self.name, stream, p) for p in range(len(state.next))]
        if since is None:
            since = dict.fromkeys(ssps, "0")
        spans = {}
        for ssp in ssps:
            if ssp in since:  # markers of other partitions are not asked for
                start = system.parse_offset(since[ssp], str(ssp))
                spans[ssp.partition] = Span(start, state.next[ssp.partition])
        found = []
        for entry in manifest.find_markers(state, self.files_of(stream), spans):
            valid_from = None
            if entry.valid_from is not None:
                valid_from = system.time_from_micros(entry.valid_from)
            marker = Marker(
                ssps[entry.partition],
                str(entry.offset),
                entry.version,
                rows=entry.rows,
                checksum=entry.checksum,
                counted=entry.counted,
                valid_from=valid_from,
            )
            found.append(marker)
        return found


def filter_latest_frame(frame: DataFrame, replaced: Sequence[SupersededRange]) -> DataFrame:
    """Return the records of the frame that are not replaced. It must have the columns of
    POSITION.
    """
    if not replaced:
        return frame
    names = [f"__replaced_{name}" for name in SupersededRange._fields]
    kinds = ("string", "string", "bigint", "bigint", "int")
    ddl = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    spans = frame.sparkSession.createDataFrame([tuple(span) for span in replaced], ddl)
    reader, source, start, end, epoch = (F.col(name) for name in names)
    condition = (
        (F.col(READER) == reader)
        & (F.col(SOURCE) == source)
        & (F.col(SOURCE_OFFSET) >= start)
        & (F.col(SOURCE_OFFSET) < end)
        & (F.col(SOURCE_EPOCH) < epoch)
    )
    return frame.join(F.broadcast(spans), condition, "left_anti")

"""LakeStreams: append-only streams in the lake's object store, Adjunct's own.

    streams/_names/NAME                        exists for each declared stream
    streams/NAME/CURRENT, manifests/…          the commit log (`StreamState`)
    streams/NAME/data/ATTEMPT/part-0000i-…     an append's records, one file a partition
    streams/NAME/pages/…                       pages of the index

An append writes its files and then commits offsets, markers and its producer's sequence at once. A crash in between
leaves files that are in no manifest, which `maintain` deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    ProducerConflictError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.commit_log import (
    Commit,
    DeletedObjects,
    commit_deletion,
    exclude_newer_manifests,
    is_deletion_commit,
    list_log_objects,
)
from dagster_adjunct.resources.schemas.records import ArrowFrame, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema, evolve_schema, incompatible_changes
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.streams.lake.append import Append, NewMarker, decide_append, write_append
from dagster_adjunct.resources.streams.lake.lineage import (
    WithoutPosition,
    drop_positions,
    filter_latest,
    filter_latest_frame,
    find_replaced_results,
)
from dagster_adjunct.resources.streams.lake.maintenance import MaintenanceResult
from dagster_adjunct.resources.streams.lake.manifest import (
    NAMES_PREFIX,
    STREAM_KIND,
    CompactionPolicy,
    Fold,
    LakeStreamDeclaration,
    Retention,
    Segment,
    Span,
    StreamState,
    StreamStates,
    find_full_level,
    find_markers,
    overlaps_spans,
    walk_segments,
)
from dagster_adjunct.resources.streams.lake.producers import content_digest, find_sequence, result_from_sequence
from dagster_adjunct.resources.streams.lake.read import TaskReader, find_offset_at_time, read_tables, with_meta_columns
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    POSITION,
    AppendResult,
    Epochs,
    Marker,
    NewStreams,
    NumberedOffsets,
    OffsetRange,
    OffsetRangeChecker,
    Repartitioning,
    Sources,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
    build_declaration,
    check_producer,
    describe_differences,
    micros_from_valid_from,
    missing_partition_error,
    parse_offset,
    raise_if_different,
    require_one_stream,
    time_from_micros,
    wants_latest_epochs,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def spans_from_ranges(
    stream: str, state: StreamState, ranges: Mapping[SystemStreamPartition, OffsetRange]
) -> dict[int, Span]:
    """Return the ranges as [start, end) by partition. Raises OffsetOutOfRangeError for records not in the stream."""
    held = OffsetRangeChecker(
        of="stream",
        upcoming="the stream's upcoming one",
        dropped="Retention dropped the records before it: begin at the oldest (with a startpoint), or keep the stream "
        "longer.",
        ahead=f"; if the offset was valid once, stream {stream!r} was restored or created again.",
    )
    spans: dict[int, Span] = {}
    for ssp, given in ranges.items():
        if ssp.partition >= len(state.next):
            raise missing_partition_error(ssp, len(state.next))
        start, end = parse_offset(given.start, str(ssp)), parse_offset(given.end, str(ssp))
        oldest, upcoming = state.oldest[ssp.partition], state.next[ssp.partition]
        held.check(ssp, start, end, oldest, upcoming)
        spans[ssp.partition] = (start, end)
    return spans


class LakeReads(StreamStates, NumberedOffsets):
    """The read operations of `LakeStreams`."""

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        if not ranges:
            return 0
        stream = require_one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = spans_from_ranges(stream, state, ranges)
        width = sum(end - start for start, end in spans.values())
        return width - len(find_markers(state, self.pages_of(stream), spans))

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> DataFrame:
        """Return the records of these ranges of one stream, as a scan that is bucketed by its key.

        With `epochs="latest"`, only those that no later epoch anywhere in the stream has replaced. Records without a
        source position are an error then, unless `without_position="keep"`. With `positions`, the columns of POSITION
        follow.
        """
        from dagster_adjunct.resources.streams.lake.read import read_frame

        spark = resolve_session(spark)
        latest = wants_latest_epochs(epochs)
        stream, state, segments, spans = self._locate(ranges)
        prefix = self.lake.stream_prefix(stream)
        replaced = find_replaced_results(self, stream, state, segments, without_position) if latest else []
        frame = read_frame(
            spark, self.lake.store, prefix, state, segments, spans, positions=positions or bool(replaced)
        )
        frame = filter_latest_frame(frame, replaced)
        return frame if positions else frame.drop(*POSITION)

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> pa.Table:
        """Return the same records (or only these `columns`) without Spark, ordered by partition and offset.

        All of them are in memory; `read_parts` yields them in parts.
        """
        parts = self.read_parts(ranges, columns, epochs=epochs, positions=positions, without_position=without_position)
        return pa.concat_tables(parts)

    def read_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> Iterator[pa.Table]:
        """Yield the same in parts of at most 65,536 records, one of them in memory. The first part is empty."""
        latest = wants_latest_epochs(epochs)
        stream, state, segments, spans = self._locate(ranges)
        schema = state.declaration.schema_ if columns is None else state.declaration.schema_.select(columns)
        replaced = find_replaced_results(self, stream, state, segments, without_position) if latest else []
        yield with_meta_columns(schema.to_arrow(), positions=positions).empty_table()
        wanted = positions or bool(replaced)
        prefix = self.lake.stream_prefix(stream)
        for table in read_tables(self.lake.store, prefix, schema, segments, spans, positions=wanted):
            latest_rows = filter_latest(table, replaced)
            yield latest_rows if positions else drop_positions(latest_rows)

    def task_reads(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str],
    ) -> TaskReader:
        stream, state, segments, spans = self._locate(ranges)
        schema, prefix = state.declaration.schema_.select(columns), self.lake.stream_prefix(stream)
        return TaskReader(self.lake.store.descriptor, prefix, schema, segments, spans)

    def _locate(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> tuple[str, StreamState, list[Segment], dict[int, Span]]:
        """Return the stream of these ranges, its state, their segments, and the ranges by partition."""
        stream = require_one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = spans_from_ranges(stream, state, ranges)
        return (
            stream,
            state,
            list(walk_segments(state, self.pages_of(stream), lambda entry: overlaps_spans(entry, spans))),
            spans,
        )

    def whole(self, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
        """Return the ranges of all records that the stream holds now."""
        _, state = self.state(stream)
        return {
            SystemStreamPartition(self.name, stream, p): OffsetRange(str(start), str(end))
            for p, (start, end) in enumerate(zip(state.oldest, state.next, strict=True))
        }

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        _, state = self.state(stream)
        ends = dict(enumerate(state.next))
        if since is None:
            spans = {p: (0, end) for p, end in ends.items()}
        else:
            spans = {
                ssp.partition: (parse_offset(offset, str(ssp)), ends.get(ssp.partition, 0))
                for ssp, offset in since.items()
                if ssp.stream == stream
            }
        ssps = [SystemStreamPartition(self.name, stream, p) for p in ends]
        return [
            Marker(
                ssps[entry.partition],
                str(entry.offset),
                entry.version,
                entry.rows,
                entry.checksum,
                entry.counted,
                None if entry.valid_from is None else time_from_micros(entry.valid_from),
            )
            for entry in find_markers(state, self.pages_of(stream), spans)
        ]


NEW_STREAMS = NewStreams("spark-murmur3", needs_key=True, typed=True)


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream as `adjunct stream show` shows it; sizes in bytes, offsets by partition."""

    info: StreamInfo
    timestamp: str | None
    retention: Retention | None
    compaction: CompactionPolicy | None
    oldest: tuple[int, ...]
    upcoming: tuple[int, ...]
    segments: int
    rows: int
    size: int
    markers: int
    commits: int
    changed_at: datetime


def declare_stream(
    name: str,
    schema: Schema,
    key: tuple[str, ...],
    partitions: int,
    timestamp: str | None,
    retention: Retention | None,
    compaction: CompactionPolicy | None,
) -> LakeStreamDeclaration:
    """Return the validated declaration. Raises ConfigurationError or SchemaMismatchError."""
    declaration = build_declaration(
        LakeStreamDeclaration,
        f"lake.{name}",
        schema,
        key,
        partitions,
        timestamp=timestamp,
        retention=retention,
        compaction=compaction,
    )
    what = f"stream {name!r}"
    if timestamp is not None and (kind := schema.field(timestamp, what).type) != "timestamp":
        raise SchemaMismatchError(
            f"{what}: column {timestamp!r} is {kind}, but the record's time must be a timestamp.",
            "Cast it to a timestamp, or leave out timestamp= to use the time of the append.",
            column=timestamp,
        )
    return declaration


def evolve_declaration(
    name: str, stored: LakeStreamDeclaration, wanted: LakeStreamDeclaration
) -> LakeStreamDeclaration:
    """Return the stored declaration with the columns that `wanted` adds or widens.

    The order of columns does not matter, since records are matched by name. Raises StreamExistsError for other changes.
    """
    fixed = [*stored.key, *([stored.timestamp] if stored.timestamp else [])]
    columns = incompatible_changes(stored.schema_, wanted.schema_, fixed, "the key or the record's time")
    raise_if_different(
        f"lake.{name}",
        [*columns, *describe_differences(stored, wanted)],
        "Declare the stream as it exists, or use another name. Columns of a lake stream can be added and widened, not "
        "removed; fill an unused one with null. Change policies with configure, and partitions with adjunct stream "
        "repartition.",
    )
    now = evolve_schema(stored.schema_, wanted.schema_)
    return stored if now.to_json() == stored.schema_.to_json() else stored.model_copy(update={"columns": now})


def stream_info_from_state(name: str, state: StreamState) -> StreamInfo:
    declaration, rewritten = state.declaration, state.rewritten
    repartitioned = None
    if rewritten is not None:
        ended, went_on = (tuple(map(str, offsets)) for offsets in (rewritten.ended, rewritten.next))
        repartitioned = Repartitioning(rewritten.id, ended, went_on)
    return StreamInfo(
        name,
        declaration.partitions,
        declaration.key,
        NEW_STREAMS.partitioner,
        declaration.schema_,
        "oldest",
        identity=state.id,
        repartitioned=repartitioned,
    )


def describe_state(name: str, commit: Commit, state: StreamState) -> StreamDescription:
    """Return the description of a stream from its manifest."""
    entries, declared = state.entries(), state.declaration
    return StreamDescription(
        info=stream_info_from_state(name, state),
        timestamp=declared.timestamp,
        retention=declared.retention,
        compaction=declared.compaction,
        oldest=state.oldest,
        upcoming=state.next,
        segments=sum(entry.segments for entry in entries),
        rows=sum(entry.rows for entry in entries),
        size=sum(entry.size for entry in entries),
        markers=sum(entry.marked for entry in entries),
        commits=commit.number,
        changed_at=commit.created_at,
    )


_COMMIT_ATTEMPTS = 100


class LakeStreams(LakeReads):
    """The streams of one lake, as the system `lake`. Safe to use from several threads and processes."""

    evolves = True
    new_streams = NEW_STREAMS
    appends_alone = True
    counts_unread = True
    reads_columns = True
    keeps_positions = True
    appends_by_one_task = True
    reads_arrow = True
    reads_in_tasks = True

    def create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        timestamp: str | None = None,
        retention: Retention | None = None,
        compaction: CompactionPolicy | None = None,
    ) -> StreamInfo:
        """Create a stream, or add and widen columns of an existing one.

        Options that are left out (except `key`) do not change an existing stream. Its records are not rewritten: added
        columns are null in them, widened ones are cast when they are read.
        `key` determines a record's partition (Spark's hash of it modulo `partitions`, also for a null key); a stream
        without key has one partition. `timestamp` is the column with the record's time; without it, and where it is
        null, the time of the append is used.
        Raises StreamExistsError with the differences, and ConfigurationError or SchemaMismatchError.
        """
        prefix = self.lake.stream_prefix(name)
        declaration = declare_stream(name, schema, tuple(key), partitions, timestamp, retention, compaction)

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            if commit is None or is_deletion_commit(commit):
                return StreamState.empty(declaration).body()
            state = self._parse(commit)
            now = evolve_declaration(name, state.declaration, declaration)
            return None if now is state.declaration else state.with_declaration(now).body()

        # The name first, so that every stream is listed; a name without a commit is ignored.
        with suppress(ObjectExistsError):
            self.lake.store.put_if_absent(f"{NAMES_PREFIX}/{name}", b"")
        self.lake.commit_log(prefix, STREAM_KIND).transact(decide, by="create", attempts=_COMMIT_ATTEMPTS)
        return self.info(name)

    def check_create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> None:
        declaration = declare_stream(name, schema, tuple(key), partitions, None, None, None)
        commit = self.log(name).current()
        if commit is not None and not is_deletion_commit(commit):
            evolve_declaration(name, self._parse(commit).declaration, declaration)

    def info(self, stream: str) -> StreamInfo:
        state = self.state(stream)[1]
        return stream_info_from_state(stream, state)

    def stored_bytes(self, stream: str) -> int:
        return self.describe(stream).size

    def describe(self, stream: str) -> StreamDescription:
        """Return the stream's declaration, offsets and totals."""
        return describe_state(stream, *self.state(stream))

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda state: state.oldest)

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda state: state.next)

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        state = self._state_of(ssp)
        prefix, pages = self.lake.stream_prefix(ssp.stream), self.pages_of(ssp.stream)
        offset = find_offset_at_time(self.lake.store, prefix, state, pages, ssp.partition, timestamp_ms * 1000)
        return str(offset)

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        valid_from: datetime | None = None,
        order_by: Sequence[str] = (),
        partitioned: bool = False,
        consumed: Mapping[SystemStreamPartition, str] | None = None,
        sources: Sources | None = None,
        one_task: bool = False,
    ) -> AppendResult:
        """Append records to all their partitions in one commit, once per producer and sequence.

        `data` is a Spark frame, an Arrow table or batch, a pandas or Polars frame, or rows as dictionaries; all except
        Spark frames are written without Spark. It has the stream's columns, or its earlier ones (columns added since
        are null), and may have `__tombstone` (boolean), `__timestamp` and `__epoch` (int). The records of a partition
        keep the order of a table; those of a Spark frame are sorted by `order_by` (columns that only serve the order
        are dropped). `end_of_dataset` ends a version: every partition gets a marker with the number of its records
        since its previous marker; `valid_from` (with its zone) is when the version becomes valid. With
        `partitioned=True`, partition i of the frame contains exactly the stream's partition i. `consumed` is ignored.
        `sources` are the ranges that the records were made of; then each has the columns of POSITION, which are
        dropped otherwise. With `one_task`, one task writes all partitions of a small frame.

        A retry with the same records returns the first result. It must be a table or a Spark frame as before, since
        their digests differ. Raises SchemaMismatchError, ProducerConflictError, and CommitConflictError or
        CommitStateUnknownError, after which the same call may be repeated.
        """
        check_producer(producer, sequence)
        if end_of_dataset is not None:
            check_name("version", end_of_dataset)
        valid_micros = micros_from_valid_from(end_of_dataset, valid_from)
        _, state = self.state(stream)
        if not hasattr(data, "mapInArrow"):
            data = to_arrow_table(data, f"stream {stream!r}", state.declaration.schema_)
        while True:
            append, files = write_append(
                self.lake,
                stream,
                state,
                data,
                producer,
                sequence,
                end_of_dataset,
                valid_micros,
                order_by,
                partitioned,
                self.now_ms(),
                sources,
                one_task,
            )
            try:
                result = self._commit(state, append)
            except ProducerConflictError:
                sent = find_sequence(self.state(stream)[1].producers, producer, sequence, stream)
                if sent is None or sent.columns == append.columns:
                    raise
                _, state = self.state(stream)
                continue  # another process appended the sequence with other columns: compare the records with these
            if result.duplicate:
                self.lake.store.delete_many(files)
            return result

    def append_markers(
        self,
        stream: str,
        version: str,
        *,
        producer: str,
        sequence: int,
        partitions: Sequence[int] | None = None,
        rows: Mapping[int, int] | None = None,
        checksum: str | None = None,
        valid_from: datetime | None = None,
    ) -> AppendResult:
        """Append only an end-of-dataset marker to these partitions (default: all).

        `version` is the version's name. `rows` are its numbers of records by partition, for validation; by default the
        stream counts them since each partition's previous marker. `valid_from` (with its zone) is when the version
        becomes valid.
        """
        check_producer(producer, sequence)
        check_name("version", version)
        valid_micros = micros_from_valid_from(version, valid_from)
        _, state = self.state(stream)
        sent = find_sequence(state.producers, producer, sequence, stream)
        count = sent.partitions if sent is not None and sent.partitions else state.declaration.partitions
        chosen = tuple(range(count)) if partitions is None else tuple(sorted(set(partitions)))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < count:
            raise ConfigurationError(
                f"marker {version!r}: partitions {list(chosen)} are not partitions of {stream!r}, which has {count}.",
                f"Give partitions from 0 to {count - 1}.",
                argument="partitions",
                stream=f"lake.{stream}",
            )
        marker = NewMarker(version, chosen, None if rows is None else dict(rows), checksum, valid_micros)
        started = self.now_ms()
        digest = content_digest((), marker.content())
        append = Append(stream, producer, sequence, digest, f"{started:013d}", started, (), marker, state.id)
        return self._commit(state, append)

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        sent = find_sequence(self.state(stream)[1].producers, producer, sequence, stream)
        return None if sent is None else result_from_sequence(sent, duplicate=True)

    def configure(self, stream: str, *, retention: Retention | None, compaction: CompactionPolicy | None) -> None:
        """Set the policies of a stream, for its next `maintain`."""
        update = {"retention": retention, "compaction": compaction}

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._require_commit(stream, commit))
            declaration = state.declaration.model_copy(update=update)
            if declaration == state.declaration:
                return None
            return state.model_copy(update={"declaration": declaration}).body()

        self.log(stream).transact(decide, by="configure", attempts=_COMMIT_ATTEMPTS)

    def maintain(self, stream: str, now: datetime | None = None) -> MaintenanceResult:
        """Apply the stream's retention and compaction, and delete what has been unreachable for an hour.

        Retention drops whole segments from the front and moves `oldest`; compaction changes no offset. An append
        that began more than an hour ago can no longer commit.
        """
        from dagster_adjunct.resources.streams.lake.maintenance import maintain

        return maintain(self, stream, now or self.lake.now())

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a view of the streams with this one as it is now: two requests answer all questions about it."""
        return _Snapshot(self, stream)

    def _commit(self, seen: StreamState, append: Append) -> AppendResult:
        result: list[AppendResult] = []
        append = replace(append, fold=self._write_fold(append.stream, seen))

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._require_commit(append.stream, commit))
            after, decided = decide_append(state, append, self.now_ms())
            result[:] = [decided]
            return None if after is None else after.body()

        self.log(append.stream).transact(decide, by=append.producer, attempts=_COMMIT_ATTEMPTS)
        return result[0]

    def _write_fold(self, stream: str, state: StreamState) -> Fold | None:
        """Write the page that the index needs next, if any, so that deciding the commit does no I/O."""
        full = find_full_level(state)
        if full is None:
            return None
        level, entries = full
        return Fold(self.pages_of(stream).write(level, entries), entries, self.now_ms())

    def _state_of(self, ssp: SystemStreamPartition) -> StreamState:
        _, state = self.state(require_one_stream(self.name, [ssp]))
        if ssp.partition >= state.declaration.partitions:
            raise missing_partition_error(ssp, state.declaration.partitions)
        return state

    def _edges(
        self, ssps: Iterable[SystemStreamPartition], edge: Callable[[StreamState], tuple[int, ...]]
    ) -> dict[SystemStreamPartition, str]:
        edges: dict[SystemStreamPartition, str] = {}
        by_stream: dict[str, list[SystemStreamPartition]] = {}
        for ssp in ssps:
            by_stream.setdefault(require_one_stream(self.name, [ssp]), []).append(ssp)
        for stream, wanted in by_stream.items():
            offsets = edge(self.state(stream)[1])
            for ssp in wanted:
                if ssp.partition >= len(offsets):
                    raise missing_partition_error(ssp, len(offsets))
                edges[ssp] = str(offsets[ssp.partition])
        return edges


class _Snapshot(LakeStreams):
    """The streams of a lake, of which one is read once."""

    def __init__(self, streams: LakeStreams, stream: str) -> None:
        super().__init__(streams.lake)
        self._stream = stream
        self._state: tuple[Commit, StreamState] | None = None

    def state(self, stream: str) -> tuple[Commit, StreamState]:
        if stream != self._stream:
            return super().state(stream)
        if self._state is None:
            self._state = super().state(stream)
        return self._state


def list_deletable_objects(streams: LakeStreams, stream: str) -> dict[str, int]:
    """Return the sizes of the objects to delete, by key: all except named readers' positions, which must detect it."""
    log = streams.log(stream)
    return {key: size for key, size in list_log_objects(log).items() if not key.startswith(f"{log.prefix}/readers/")}


def delete_stream(streams: LakeStreams, stream: str, seen: Commit, *, reason: str, by: str) -> DeletedObjects:
    """Delete the stream as it was `seen`, or complete an interrupted deletion; return what was deleted.

    Raises CommitConflictError if it has changed since. Concurrent reads fail because of missing files.
    """
    log = streams.log(stream)
    last = seen if is_deletion_commit(seen) else commit_deletion(log, seen, reason=reason, by=by)
    sizes = list_deletable_objects(streams, stream)
    now = log.current()
    if now is None or now.id != last.id:
        return DeletedObjects(0, 0, left=True)  # recreated meanwhile: its `maintain` deletes the rest
    # Nobody writes to a deleted stream, so the listed objects are those of the old one.
    keys = exclude_newer_manifests(log, last, sizes)
    log.store.delete_many(keys)
    return DeletedObjects(len(keys), sum(sizes[key] for key in keys))

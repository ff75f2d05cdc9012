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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import pyarrow as pa

from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.errors import (
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
from dagster_adjunct.resources.streams.lake.append import (
    Append,
    NewMarker,
    content_digest,
    decide_append,
    find_sequence,
    result_from_sequence,
    write_append,
)
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
    SupersededRange,
    find_full_level,
    find_markers,
    overlaps_spans,
    walk_segments,
)
from dagster_adjunct.resources.streams.lake.read import (
    find_offset_at_time,
    read_partition,
    read_tables,
    with_meta_columns,
)
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
    check_marker_partitions,
    check_producer,
    micros_from_valid_from,
    missing_partition_error,
    parse_offset,
    raise_if_different,
    require_one_stream,
    time_from_micros,
    wants_latest_epochs,
)
from dagster_adjunct.resources.validation import validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def spans_from_ranges(
    stream: str, state: StreamState, ranges: Mapping[SystemStreamPartition, OffsetRange]
) -> dict[int, Span]:
    """Return the ranges as [start, end) by partition. Raises OffsetOutOfRangeError for records not in the stream."""
    checker = OffsetRangeChecker(
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
        checker.check(ssp, start, end, oldest, upcoming)
        spans[ssp.partition] = (start, end)
    return spans


class ReadOptions(TypedDict, total=False):
    """Which records a read returns, and with which columns; see `LakeStreams.read`."""

    epochs: Epochs
    positions: bool
    without_position: WithoutPosition


class _Located(NamedTuple):
    """The records of ranges of one stream: its state, their segments, and the ranges by partition."""

    stream: str
    state: StreamState
    segments: list[Segment]
    spans: dict[int, Span]


@validated_methods
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
        **options: Unpack[ReadOptions],
    ) -> DataFrame:
        """Return the records of these ranges of one stream, as a scan that is bucketed by its key.

        With `epochs="latest"`, only those that no later epoch anywhere in the stream has replaced. Records without a
        source position are an error then, unless `without_position="keep"`. With `positions`, the columns of POSITION
        follow.
        """
        from dagster_adjunct.resources.streams.lake.read import read_frame

        spark, store, positions = resolve_session(spark), self.lake.store, options.get("positions", False)
        at, replaced = self._locate(ranges, **options)
        prefix, wanted = self.lake.stream_prefix(at.stream), positions or bool(replaced)
        frame = read_frame(spark, store, prefix, at.state, at.segments, at.spans, positions=wanted)
        frame = filter_latest_frame(frame, replaced)
        return frame if positions else frame.drop(*POSITION)

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        **options: Unpack[ReadOptions],
    ) -> pa.Table:
        """Return the same records (or only these `columns`) without Spark, ordered by partition and offset.

        All of them are in memory; `read_parts` yields them in parts.
        """
        return pa.concat_tables(self.read_parts(ranges, columns, **options))

    def read_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Iterator[pa.Table]:
        """Yield the same in parts of at most 65,536 records, one of them in memory. The first part is empty."""
        at, replaced = self._locate(ranges, **options)
        declared, positions = at.state.declaration.schema_, options.get("positions", False)
        schema = declared if columns is None else declared.select(columns)
        yield with_meta_columns(schema.to_arrow(), positions=positions).empty_table()
        prefix, wanted = self.lake.stream_prefix(at.stream), positions or bool(replaced)
        for table in read_tables(self.lake.store, prefix, schema, at.segments, at.spans, positions=wanted):
            latest = filter_latest(table, replaced)
            yield latest if positions else drop_positions(latest)

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        at, _ = self._locate(ranges)
        schema, prefix = at.state.declaration.schema_.select(columns), self.lake.stream_prefix(at.stream)
        return partial(read_partition, self.lake.store.descriptor, prefix, schema, at.segments, at.spans)

    def _locate(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> tuple[_Located, list[SupersededRange]]:
        """Return where the records of these ranges are, and which of them are to be left out."""
        latest = wants_latest_epochs(epochs)
        stream = require_one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = spans_from_ranges(stream, state, ranges)
        segments = list(walk_segments(state, self.pages_of(stream), lambda entry: overlaps_spans(entry, spans)))
        replaced = find_replaced_results(self, stream, state, segments, without_position) if latest else []
        return _Located(stream, state, segments, spans), replaced

    def all_ranges(self, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
        """Return the ranges of all records that the stream holds now."""
        _, state = self.state(stream)
        spans = enumerate(zip(state.oldest, state.next, strict=True))
        return {SystemStreamPartition(self.name, stream, p): OffsetRange(str(a), str(b)) for p, (a, b) in spans}

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        _, state = self.state(stream)
        ssps = [SystemStreamPartition(self.name, stream, p) for p in range(len(state.next))]
        since, known = dict.fromkeys(ssps, "0") if since is None else since, set(ssps)
        starts = {ssp.partition: parse_offset(offset, str(ssp)) for ssp, offset in since.items() if ssp in known}
        spans = {p: (start, state.next[p]) for p, start in starts.items()}
        found = []
        for entry in find_markers(state, self.pages_of(stream), spans):
            since_when = None if entry.valid_from is None else time_from_micros(entry.valid_from)
            facts = (str(entry.offset), entry.version, entry.rows, entry.checksum, entry.counted, since_when)
            found.append(Marker(ssps[entry.partition], *facts))
        return found


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
    name: str, schema: Schema, key: Sequence[str], partitions: int, timestamp: str | None = None, **policies: Any
) -> LakeStreamDeclaration:
    """Return the validated declaration. Raises ConfigurationError or SchemaMismatchError."""
    declaration = build_declaration(
        LakeStreamDeclaration, f"lake.{name}", schema, tuple(key), partitions, timestamp=timestamp, **policies
    )
    what = f"stream {name!r}"
    if timestamp is not None and (kind := schema.field(timestamp, what).type) != "timestamp":
        problem = f"{what}: column {timestamp!r} is {kind}, but the record's time must be a timestamp."
        step = "Cast it to a timestamp, or leave out timestamp= to use the time of the append."
        raise SchemaMismatchError(problem, step, column=timestamp)
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
        stored,
        wanted,
        columns,
        "Declare the stream as it exists, or use another name. Columns of a lake stream can be added and widened, not "
        "removed; fill an unused one with null. Change policies with configure, and partitions with adjunct stream "
        "repartition.",
    )
    now = evolve_schema(stored.schema_, wanted.schema_)
    return stored if now.to_json() == stored.schema_.to_json() else stored.model_copy(update={"columns": now})


def stream_info_from_state(name: str, state: StreamState) -> StreamInfo:
    declared, rewritten, repartitioned = state.declaration, state.rewritten, None
    if rewritten is not None:
        ended, went_on = (tuple(map(str, offsets)) for offsets in (rewritten.ended, rewritten.next))
        repartitioned = Repartitioning(rewritten.id, ended, went_on)
    facts = (declared.partitions, declared.key, NEW_STREAMS.partitioner, declared.schema_)
    return StreamInfo(name, *facts, default_offset="oldest", identity=state.id, repartitioned=repartitioned)


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


@validated_methods
class LakeStreams(LakeReads):
    """The streams of one lake, as the system `lake`. Safe to use from several threads and processes."""

    evolves = True
    new_streams = NEW_STREAMS
    appends_alone = True
    counts_unread = True
    reads_columns = True
    keeps_positions = True
    appends_by_one_task = True

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
        declaration = declare_stream(
            name, schema, key, partitions, timestamp, retention=retention, compaction=compaction
        )

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
        declaration = declare_stream(name, schema, key, partitions)
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
        marker = None
        if end_of_dataset is not None:
            marker = NewMarker(end_of_dataset, (), "delivered", valid_from=valid_micros)
        while True:
            append = Append(stream, producer, sequence, started=self.now_ms(), marker=marker, sources=sources)
            append, files = write_append(self.lake, state, data, append, order_by, partitioned, one_task)
            try:
                result = self._commit(state, append)
            except ProducerConflictError:
                _, state = self.state(stream)
                sent = find_sequence(state.producers, producer, sequence, stream)
                if sent is None or sent.columns == append.columns:
                    raise
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
        check_marker_partitions(f"lake.{stream}", version, chosen, count, rows)
        marker = NewMarker(version, chosen, None if rows is None else dict(rows), checksum, valid_micros)
        started, digest = self.now_ms(), content_digest((), marker.content())
        append = Append(stream, producer, sequence, started, marker, None, digest, f"{started:013d}", seen=state.id)
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
        """Return a view of the streams as they are when it first asks: two requests answer all questions about one."""
        view = LakeStreams(self.lake)
        view._snapshot = {}
        return view

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
        states: dict[str, tuple[int, ...]] = {}
        for ssp in ssps:
            stream = require_one_stream(self.name, [ssp])
            offsets = states[stream] = states.get(stream) or edge(self.state(stream)[1])
            if ssp.partition >= len(offsets):
                raise missing_partition_error(ssp, len(offsets))
            edges[ssp] = str(offsets[ssp.partition])
        return edges


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

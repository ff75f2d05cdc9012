"""Appends to a lake stream: casts records to its columns, writes their files, and computes the
stream's next state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.bucketing.hashing import arrow_checksum, row_digests
from dagster_adjunct.resources.bucketing.writer import (
    DIGEST,
    WriteOptions,
    write_arrow_buckets,
    write_buckets,
)
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ProducerConflictError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.schemas.paths import read_path
from dagster_adjunct.resources.schemas.records import (
    ArrowFrame,
    cast_column,
    fit_to_schema,
    to_arrow_table,
)
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    Steps,
    check_column_names,
    named_column,
    quote_name,
    value_column,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    arrow_type,
    find_difference,
    is_nested,
    is_same_family,
    parse_type,
    tree_from_spark,
)
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.streams import append_checks
from dagster_adjunct.resources.streams.lake import manifest
from dagster_adjunct.resources.streams.lake.manifest import (
    OPTIONAL_META,
    FileEntry,
    Fold,
    LakeStreamDeclaration,
    MarkerEntry,
    Segment,
    SentSequence,
    Span,
    StreamFiles,
    StreamState,
    StreamStates,
)
from dagster_adjunct.resources.streams.lake.read import read_tables, with_meta_columns
from dagster_adjunct.resources.streams.lake.repeats import (
    RepeatedAppend,
    fitted_value_sql,
    is_table,
)
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    POSITION,
    SOURCE_EPOCH,
    TIMESTAMP,
    TOMBSTONE,
    AppendOptions,
    AppendResult,
    Sources,
)
from dagster_adjunct.resources.validation import validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# A stream remembers the 32 highest sequences (the window) of each of the 256 producers that
# appended last, so that a retried append adds nothing. A sequence before a full window is rejected:
# it may be a retry or a restarted counter.
WINDOW = 32
PRODUCERS = 256
# Files that are appended by hand are producers, too. They never push out the others: only the last
# of them are kept.
FILE_PRODUCER = "file:"
FILE_PRODUCERS = 128

Producers = Mapping[str, tuple[SentSequence, ...]]


class DigestedFile(NamedTuple):
    """What the digest of an append has of each file."""

    partition: int
    rows: int
    digest: int | str | None


def content_digest(files: Iterable[DigestedFile], markers: Iterable[object]) -> str:
    """Return the digest of an append's files and of its marker (`NewMarker.content`, nothing
    without one).
    """
    content = json.dumps([sorted(files), list(markers)], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def find_sequence(
    producers: Producers, producer: str, sequence: int, stream: str
) -> SentSequence | None:
    """Return the append that the stream remembers under this sequence, or None if the sequence is
    new.

    Raises ProducerConflictError for a sequence before the producer's full window.
    """
    window = producers.get(producer, ())
    for sent in window:
        if sent.sequence == sequence:
            return sent
    if len(window) >= WINDOW and sequence < window[0].sequence:
        raise append_checks.stale_sequence_error(
            f"lake.{stream}", producer, sequence, window[-1].sequence
        )
    return None


def result_from_sequence(sent: SentSequence, *, duplicate: bool) -> AppendResult:
    """Return the result of an append that the stream remembers."""
    first = dict(enumerate(map(str, sent.first)))
    after = dict(enumerate(map(str, sent.next)))
    return AppendResult(first, after, sent.rows, duplicate)


def record_sequence(
    producers: Producers, producer: str, sent: SentSequence
) -> dict[str, tuple[SentSequence, ...]]:
    """Return the producers with one more sequence, ordered by their last append.

    Drops the lowest sequence of a full window, and of too many producers the one whose last append
    is the oldest; files that were appended by hand are counted by themselves.
    """
    window = tuple(sorted((*producers.get(producer, ()), sent)))[-WINDOW:]
    after = dict(producers)
    after.pop(producer, None)
    after[producer] = window
    is_file = producer.startswith(FILE_PRODUCER)
    if is_file:
        room = FILE_PRODUCERS
    else:
        room = PRODUCERS
    alike = [name for name in after if name.startswith(FILE_PRODUCER) == is_file]
    for name in alike[: max(0, len(alike) - room)]:
        del after[name]
    return after


@dataclass(frozen=True, slots=True)
class NewMarker:
    """A marker to add after an append's records, in these partitions.

    `rows` are the counts by partition that the producer gave. With "delivered" or None the stream
    counts each partition's records since its previous marker (or first offset). None also marks the
    count as the stream's own (`MarkerEntry.counted`), so that a producer may repeat the marker
    without its records. `valid_from` is in microseconds since the epoch.
    """

    version: str
    partitions: tuple[int, ...]
    rows: Mapping[int, int] | str | None = None
    checksum: str | None = None
    valid_from: int | None = None

    def content(self) -> list[object]:
        """Return what the digest of an append has of its marker."""
        rows: object = self.rows
        if isinstance(self.rows, Mapping):
            rows = sorted(self.rows.items())
        content: list[object] = [self.version, list(self.partitions), rows, self.checksum]
        if self.valid_from is not None:
            content.append(self.valid_from)
        return content

    def entry(self, partition: int, offset: int, delivered: int) -> MarkerEntry:
        """Return the marker at an offset; `delivered` records precede it since the previous one."""
        if isinstance(self.rows, Mapping):
            rows = self.rows[partition]
        else:
            rows = delivered
        return MarkerEntry(
            partition,
            offset,
            self.version,
            rows,
            self.checksum,
            counted=self.rows is None,
            valid_from=self.valid_from,
        )


@dataclass(frozen=True, slots=True)
class Append:
    """An append, begun at `started` (ms since the epoch), made of `sources`, if known.

    The fields from `digest` on are set once its files are written: `attempt` is their folder,
    `seen` the identity of the stream that they were written for, `columns` the index of their
    columns (see `StreamState.with_columns_at`), and `chained` as in `Segment`.
    """

    stream: str
    producer: str
    sequence: int
    started: int
    marker: NewMarker | None = None
    sources: Sources | None = None
    digest: str = ""
    attempt: str = ""
    files: tuple[FileEntry, ...] = ()
    seen: str = ""
    columns: int = 0
    chained: bool = False


class AppendDecision(NamedTuple):
    """The stream's state after an append, None if its sequence was appended before; and the
    append's result.
    """

    state: StreamState | None
    result: AppendResult


def decide_append(
    state: StreamState, append: Append, now_ms: int, fold: Fold | None = None
) -> AppendDecision:
    """Return what an append changes, and its result: a repeated append changes nothing, and has the
    result of the first one. `fold` is the index page that the commit may add.

    Raises ProducerConflictError for other contents under the sequence, and CommitConflictError if
    the stream was recreated or the files may have been deleted meanwhile.
    """
    what = f"sequence {append.sequence} of producer {append.producer!r} in stream {append.stream!r}"
    if state.id != append.seen:
        problem = f"{what}: the stream was recreated while its records were written."
        step = "Nothing was added. Append again if the records belong in the new stream."
        raise CommitConflictError(problem, step, stream=f"lake.{append.stream}")
    before = find_sequence(state.producers, append.producer, append.sequence, append.stream)
    if before is not None:
        newest = state.producers[append.producer][-1].sequence
        name = f"lake.{append.stream}"
        append_checks.check_same_contents(
            name, append.producer, append.sequence, newest, before.digest, append.digest
        )
        return AppendDecision(None, result_from_sequence(before, duplicate=True))
    if append.files and append.started < state.horizon:
        problem = (
            f"{what}: its files were written by an attempt begun"
            f" {(state.horizon - append.started) / 1000:.0f} s before the time up to which unlisted"
            " files are deleted, so they may be gone."
        )
        step = (
            "Nothing was added. Append again; if that fails at once, correct this machine's clock."
        )
        raise CommitConflictError(problem, step, stream=f"lake.{append.stream}")
    state = manifest.apply_fold(state, fold)
    appended = max(now_ms, state.appended)  # segments stay in order even if a clock lags
    segment = _build_segment(state, append, appended)
    sent = SentSequence(
        append.sequence, append.digest, segment.base, segment.next, segment.rows, append.columns
    )
    marked = list(state.marked_until)
    for marker in segment.markers:
        marked[marker.partition] = marker.offset + 1
    update: dict[str, object] = {
        "next": segment.next,
        "marked_until": tuple(marked),
        "producers": record_sequence(state.producers, append.producer, sent),
        "appended": appended,
        "read": manifest.add_sources(state.read, append.sources),
    }
    if segment.next != segment.base:  # an empty append only stores its sequence
        index = state.index
        state = state.with_index(tail=(*index.tail, segment), next_segment=segment.id + 1)
    after = state.model_copy(update=update)
    return AppendDecision(after, result_from_sequence(sent, duplicate=False))


def _build_segment(state: StreamState, append: Append, appended: int) -> Segment:
    """Return the segment with the append's files, and its marker after their records."""
    offsets = list(state.next)
    for file in append.files:
        offsets[file.partition] += file.rows
    markers = []
    if append.marker is not None:
        for partition in append.marker.partitions:
            offset = offsets[partition]
            delivered = offset - state.marked_until[partition]
            markers.append(append.marker.entry(partition, offset, delivered))
            offsets[partition] += 1
    return Segment(
        id=state.index.next_segment,
        attempt=append.attempt,
        base=state.next,
        next=tuple(offsets),
        appended=appended,
        files=append.files,
        markers=tuple(markers),
        positioned=append.sources is not None,
        chained=append.chained,
    )


def match_columns(state: StreamState, data: Any, order_by: Sequence[str]) -> int:
    """Return the index of the newest columns of the stream, current or earlier ones, that the
    records have.

    So producers that only know earlier columns keep working: columns added since are null in their
    records. Returns the index of the current columns if none match, so that the error is about
    these.
    """
    if not state.earlier:
        return 0
    if is_table(data):
        types: dict[str, Any] = {field.name: field.type for field in data.schema}
    else:
        types = {field.name: tree_from_spark(field.dataType) for field in data.schema.fields}
    given = types.keys() - OPTIONAL_META.keys()
    newest = len(state.earlier)
    for index in range(newest, -1, -1):
        columns = state.with_columns_at(index).columns
        declared = set(columns.names)
        is_complete = declared <= given
        has_others = not given - declared <= set(order_by)
        if not is_complete or has_others:
            continue
        if all(_fits(types[each.name], each.type) for each in columns.fields):
            return index
    return newest


_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def _is_narrower(given: str, declared: str) -> bool:
    """Return whether a Spark frame's values of the first type are cast to the second."""
    if given == "void":  # F.lit(None): a column without values has every type
        return True
    if given not in _INTEGERS or declared not in _INTEGERS:
        return False
    return _INTEGERS.index(given) < _INTEGERS.index(declared)


def _fits(given: Any, kind: str) -> bool:
    """Return whether a column of this type, Spark's or Arrow's, can be sent as one of `kind`."""
    if isinstance(given, Simple | Array | Map | Struct):
        return find_difference(given, parse_type(kind), "", _is_narrower) is None
    return is_same_family(given, arrow_type(kind))


def conform_table(table: pa.Table, declaration: LakeStreamDeclaration, what: str) -> pa.Table:
    """Return the table with the stream's columns and types, then `__timestamp` and `__tombstone`.

    A null `__timestamp` stands for the time of the append, which is only known when it commits.
    `__epoch` follows if one is not 0 (null for 0), then the columns of POSITION that the table has,
    then the copies of values of the key (`LakeStreamDeclaration.copied`). Raises
    SchemaMismatchError, also for a value that readers could not read.
    """
    plain = fit_to_schema(
        table.select([name for name in table.column_names if name not in OPTIONAL_META]),
        declaration.columns,
        what,
    )
    times = _optional_column(table, TIMESTAMP, what)
    if declaration.timestamp is not None:
        times = pc.coalesce(times, plain.column(declaration.timestamp))
    tombstones = pc.fill_null(_optional_column(table, TOMBSTONE, what), False)
    conformed = plain.append_column(TIMESTAMP, times).append_column(TOMBSTONE, tombstones)
    if EPOCH in table.column_names:
        epochs = _optional_column(table, EPOCH, what)
        # Null for 0 saves space.
        epochs = pc.if_else(pc.equal(epochs, 0), pa.scalar(None, pa.int32()), epochs)
        if epochs.null_count < len(epochs):
            conformed = conformed.append_column(EPOCH, epochs)
    for name in POSITION:
        if name in table.column_names:
            conformed = conformed.append_column(name, _optional_column(table, name, what))
    for copy, path in declaration.copied.items():
        conformed = conformed.append_column(copy, read_path(plain, path.steps))
    found = first_unreadable(conformed)
    if found is not None:
        hidden = found.column in declaration.columns.sensitive
        raise found.error(what, f"row {found.row}", hidden=hidden, row=found.row)
    # One chunk a column, since the file's bytes, and so its checksum, must not depend on the
    # table's chunks.
    return conformed.combine_chunks()


def _optional_column(table: pa.Table, name: str, what: str) -> pa.ChunkedArray:
    """Return a column of OPTIONAL_META, nulls if the table does not have it. Raises
    SchemaMismatchError for another type than its own.
    """
    kind = arrow_type(OPTIONAL_META[name])
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    column = table.column(name)
    lacks_zone = pa.types.is_timestamp(column.type) and column.type.tz is None
    has_type = column.type.id == kind.id and not lacks_zone
    has_values = not pa.types.is_null(column.type)  # a column without them has every type
    if has_values and not has_type:
        problem = f"{what}: column {name!r} holds {column.type}, expected {kind}."
        raise SchemaMismatchError(problem, "Cast it, or leave the column out.", column=name)
    return cast_column(column, name, OPTIONAL_META[name], what)


def conform_frame(
    df: DataFrame, declaration: LakeStreamDeclaration, order_by: Sequence[str], what: str
) -> DataFrame:
    """Return the frame in the form that `conform_table` describes, then the columns of `order_by`
    not yet in it.

    Types are only widened. `__epoch` is kept if the frame has it, even if it is 0 everywhere
    (stored as null).
    """
    types = {field.name: tree_from_spark(field.dataType) for field in df.schema.fields}
    schema = declaration.columns
    check_column_names(df.columns, schema, what, {*OPTIONAL_META, *order_by})
    _check_frame_types(types, schema, what)
    columns = []
    for field in schema.fields:
        column = named_column(field.name)
        if is_nested(field.type):
            kinds = (types[field.name], parse_type(field.type))
            column = F.expr(fitted_value_sql(quote_name(field.name), *kinds))
        columns.append(column.cast(field.type).alias(field.name))
    times = F.col(TIMESTAMP) if TIMESTAMP in types else F.lit(None)
    if declaration.timestamp is not None:
        times = F.coalesce(times, named_column(declaration.timestamp))
    columns.append(times.cast("timestamp").alias(TIMESTAMP))
    tombstones = F.lit(False)
    if TOMBSTONE in types:
        tombstones = F.coalesce(F.col(TOMBSTONE), tombstones)
    columns.append(tombstones.cast("boolean").alias(TOMBSTONE))
    if EPOCH in types:
        columns.append(F.nullif(F.col(EPOCH), F.lit(0)).cast("int").alias(EPOCH))
    for name, kind in POSITION.items():
        if name in types:
            columns.append(F.col(name).cast(kind).alias(name))
    for name in dict.fromkeys(order_by):
        if name not in schema and name not in OPTIONAL_META:
            columns.append(named_column(name))
    return _with_copies(df.select(*columns), declaration)


def _with_copies(df: DataFrame, declaration: LakeStreamDeclaration) -> DataFrame:
    for copy, path in declaration.copied.items():
        df = df.withColumn(copy, value_column(declaration.columns.names, str(path)))
    return df


def _check_frame_types(types: Mapping[str, Type], schema: Schema, what: str) -> None:
    """Raise SchemaMismatchError for a column of a Spark frame whose type is not the declared one,
    or a narrower one.
    """
    for each in schema.fields:
        found = find_difference(types[each.name], parse_type(each.type), each.name, _is_narrower)
        if found is not None:
            path, given, declared = found
            problem = f"{what}: column {path!r} holds {given} where the schema says {declared}."
            raise SchemaMismatchError(
                problem, f"Cast it: F.col({each.name!r}).cast({each.type!r}).", column=each.name
            )
    for name, kind in OPTIONAL_META.items():
        if types.get(name, Simple(kind)) not in (Simple(kind), Simple("void")):
            problem = f"{what}: column {name!r} holds {types[name]}, expected {kind}."
            raise SchemaMismatchError(problem, "Cast it, or leave it out.", column=name)


def _select_positions(data: Any, sources: Sources | None, what: str) -> Any:
    """Return the records, without the columns of POSITION unless `sources` are given.

    Raises SchemaMismatchError if `sources` are given and the records lack one of these columns.
    """
    names = data.column_names if is_table(data) else data.columns
    there = [name for name in POSITION if name in names]
    if sources is not None:
        missing = [name for name in POSITION if name not in there]
        if missing:
            problem = f"{what}: sources are given, but the records lack {', '.join(missing)}."
            raise SchemaMismatchError(
                problem, "Add these columns, or leave the sources out.", column=missing[0]
            )
        return data
    if not there:
        return data
    if is_table(data):
        return data.drop_columns(there)
    return data.drop(*there)


def _digested_columns(declaration: LakeStreamDeclaration, there: Sequence[str]) -> list[str]:
    """Return the columns that each record's digest is computed from, in an order of their own.

    So a retry has the same digest, whatever the form of its records and the order of their columns.
    Source positions are not part of it.
    """
    optional = []
    for name in (TIMESTAMP, TOMBSTONE, EPOCH):
        if name in there:
            optional.append(name)
    return [*declaration.columns.names, *optional]


def _stored_checksum(
    state: StreamState,
    files: StreamFiles,
    sent: SentSequence,
    repeat: RepeatedAppend,
    retired: Collection[Steps],
) -> str:
    """Return the checksum of the stored records of an append, over the columns that the repeated
    records have too; a text that equals no checksum if the records are no longer known.
    """
    compared = repeat.without_lost(retired).before
    if not compared.columns.fields:  # no column of the first append is left to compare
        return _UNKNOWN_CHECKSUM
    if not sent.first:  # its offsets were forgotten when the stream was repartitioned
        return _UNKNOWN_CHECKSUM
    spans = {}
    for partition, (start, end) in enumerate(zip(sent.first, sent.next, strict=True)):
        if start < state.oldest[partition]:  # retention has dropped records
            return _UNKNOWN_CHECKSUM
        spans[partition] = Span(start, end)
    segments = manifest.list_overlapping(state, files, spans)
    columns = compared.columns
    parts = read_tables(files, columns, compared.names, segments, spans, positions=False)
    empty = with_meta_columns(columns.to_arrow()).empty_table()
    return arrow_checksum(pa.concat_tables([empty, *parts]), columns)


class _ChosenRecords(NamedTuple):
    """The records of an append with columns of the stream, whose index is `columns`, and how they
    are written.
    """

    data: Any
    columns: int
    declaration: LakeStreamDeclaration
    options: AppendOptions


def _choose_columns(
    state: StreamState, data: Any, append: Append, options: AppendOptions, what: str
) -> _ChosenRecords:
    """Return the records, to be written with the newest of the stream's columns that match
    (`match_columns`). If the sequence was appended before, they get the columns and partitions of
    that append, so that the digests can be compared.
    """
    sent = find_sequence(state.producers, append.producer, append.sequence, append.stream)
    matching = match_columns(state, data, options.order_by)
    if sent is None:
        return _ChosenRecords(data, matching, state.with_columns_at(matching), options)
    declaration = state.with_columns_at(sent.columns)
    repeat = RepeatedAppend(declaration, state.with_columns_at(matching))
    data = repeat.translate(data, options.order_by, what)
    if sent.partitions:
        declaration = declaration.model_copy(update={"partitions": sent.partitions})
        # The frame may be partitioned as the stream is now.
        options = replace(options, partitioned=False)
    return _ChosenRecords(data, sent.columns, declaration, options)


_COMMIT_ATTEMPTS = 100
_UNKNOWN_CHECKSUM = "of records that are no longer known"


class _WrittenAppend(NamedTuple):
    """An append with its files, and the keys of their objects."""

    append: Append
    keys: list[str]


@validated_methods
class LakeAppends(StreamStates):
    """The appending operations of `LakeStreams`."""

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        valid_from: datetime | None = None,
        options: AppendOptions = AppendOptions(),
    ) -> AppendResult:
        """Append records to all their partitions in one commit, once per producer and sequence.

        `data` is a Spark frame, an Arrow table or batch, a pandas or Polars frame, or rows as
        dictionaries; all except Spark frames are written without Spark. It has the stream's
        columns, or its earlier ones (columns added since are null), and may have `__tombstone`
        (boolean), `__timestamp` and `__epoch` (int). The records of a partition keep the order of a
        table; those of a Spark frame are sorted by `options.order_by`. `end_of_dataset` ends a
        version: every partition gets a marker with the number of its records since its previous
        marker; `valid_from` (with a time zone) is when the version becomes valid. Without
        `options.sources`, the columns of POSITION are dropped. `options.consumed` is ignored.

        A retry with the same records, in any form, returns the first result. Raises
        SchemaMismatchError, ProducerConflictError, and CommitConflictError or
        CommitStateUnknownError, after which the same call may be repeated.
        """
        valid_micros = append_checks.check_append(producer, sequence, end_of_dataset, valid_from)
        _, state = self.state(stream)
        is_frame = hasattr(data, "mapInArrow")  # without importing PySpark
        if not is_frame:
            declared = state.declaration
            data = to_arrow_table(data, f"stream {stream!r}", declared.columns, declared.key)
        marker = None
        if end_of_dataset is not None:
            marker = NewMarker(end_of_dataset, (), "delivered", valid_from=valid_micros)
        while True:
            append = Append(
                stream,
                producer,
                sequence,
                started=self.now_ms(),
                marker=marker,
                sources=options.sources,
            )
            first = self._find_first_result(state, data, append, options.order_by)
            if first is not None:
                return first
            written = self._write(state, data, append, options)
            try:
                result = self._commit(state, written.append)
            except ProducerConflictError:
                state = self.state(stream).state
                sent = find_sequence(state.producers, producer, sequence, stream)
                if sent is None or sent.columns == written.append.columns:
                    raise
                # Another process has appended the sequence with other columns: compare the records
                # with these.
                continue
            if result.duplicate:  # nothing refers to the files that were written just now
                self.lake.store.delete_many(written.keys)
            return result

    def _write(
        self, state: StreamState, data: Any, append: Append, append_options: AppendOptions
    ) -> _WrittenAppend:
        """Write the records of an append to files; return the append with what the commit needs to
        know of them. Raises SchemaMismatchError, with the stream.
        """
        what = f"stream {append.stream!r}"
        data = _select_positions(data, append.sources, what)
        chosen = _choose_columns(state, data, append, append_options, what)
        data, columns, declaration, append_options = chosen
        attempt = manifest.new_attempt(append.started)
        folder = manifest.data_folder(self.lake.stream_prefix(append.stream), attempt)
        options = WriteOptions(
            what, number_rows=True, range_of=TIMESTAMP, differing=(EPOCH, SOURCE_EPOCH)
        )
        try:
            if is_table(data):
                append_checks.check_table_options(what, append_options)
                data = conform_table(data, declaration, what)
                layout = declaration.layout_of(data.column_names)
                data = data.append_column(
                    DIGEST, row_digests(data, _digested_columns(declaration, data.column_names))
                )
                files = write_arrow_buckets(data, self.lake.store, folder, layout, options)
            else:
                data = conform_frame(data, declaration, append_options.order_by, what)
                digested = tuple(_digested_columns(declaration, data.columns))
                files = write_buckets(
                    data,
                    self.lake.store,
                    folder,
                    declaration.layout_of(data.columns),
                    replace(options, digested=digested),
                    order_by=tuple(append_options.order_by),
                    partitioned=append_options.partitioned,
                    one_task=append_options.one_task,
                )
        except SchemaMismatchError as error:
            error.stream = f"lake.{append.stream}"
            raise
        marker = append.marker
        marker_content: Sequence[object] = ()
        if marker is not None:
            marker = replace(marker, partitions=tuple(range(declaration.partitions)))
            marker_content = marker.content()
        digested_files = []
        for file in files:
            digest = file.sha256 if file.digest is None else file.digest
            digested_files.append(DigestedFile(file.bucket, file.rows, digest))
        written = replace(
            append,
            marker=marker,
            digest=content_digest(digested_files, marker_content),
            attempt=attempt,
            files=tuple(FileEntry.of(file) for file in files),
            seen=state.id,
            columns=columns,
            chained=any(file.stats.get("differing") for file in files),
        )
        return _WrittenAppend(written, [f"{folder}/{file.name}" for file in files])

    def _find_first_result(
        self, state: StreamState, data: Any, append: Append, order_by: Sequence[str]
    ) -> AppendResult | None:
        """Return the result of the first append of this sequence, if it had columns that were
        dropped since and that the records lack; else None.

        Digests can't be compared in this case: the other columns are compared with the stored
        records. Raises ProducerConflictError if they differ, or can't be compared.
        """
        sent = find_sequence(state.producers, append.producer, append.sequence, append.stream)
        retired = state.declaration.names.retired
        if sent is None or not retired:
            return None
        before = state.with_columns_at(sent.columns)
        given = state.with_columns_at(match_columns(state, data, order_by))
        repeat = RepeatedAppend(before, given)
        if not repeat.has_lost(retired):
            return None
        what = f"stream {append.stream!r}"
        now = repeat.without_lost(retired).checksum(data, order_by, what)
        stored = _stored_checksum(state, self.files_of(append.stream), sent, repeat, retired)
        newest = state.producers[append.producer][-1].sequence
        append_checks.check_same_contents(
            f"lake.{append.stream}", append.producer, append.sequence, newest, stored, now
        )
        return result_from_sequence(sent, duplicate=True)

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

        `version` is the version's name. `rows` is its number of records in each partition, for
        validation; by default the stream counts them since the partition's previous marker.
        `checksum` is for readers, who validate the records of each of these partitions by it (see
        `Marker`). `valid_from` (with a time zone) is when the version becomes valid.
        """
        valid_micros = append_checks.check_append(producer, sequence, version, valid_from)
        _, state = self.state(stream)
        sent = find_sequence(state.producers, producer, sequence, stream)
        if sent is not None and sent.partitions:
            count = sent.partitions
        else:
            count = state.declaration.partitions
        if partitions is not None:
            chosen = tuple(sorted(set(partitions)))
        else:
            chosen = tuple(range(count))
        append_checks.check_marker_partitions(f"lake.{stream}", version, chosen, count, rows)
        if rows is None:
            counts = None  # the stream counts them
        else:
            counts = {p: int(count) for p, count in rows.items()}  # JSON has no NumPy integers
        marker = NewMarker(version, chosen, counts, checksum, valid_micros)
        started = self.now_ms()
        append = Append(
            stream,
            producer,
            sequence,
            started,
            marker,
            digest=content_digest((), marker.content()),
            attempt=f"{started:013d}",
            seen=state.id,
        )
        return self._commit(state, append)

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        sent = find_sequence(self.state(stream).state.producers, producer, sequence, stream)
        if sent is None:
            return None
        return result_from_sequence(sent, duplicate=True)

    def _commit(self, seen: StreamState, append: Append) -> AppendResult:
        """Commit an append whose files are written; return its result. Raises the errors of
        `decide_append`.
        """
        decided: AppendDecision | None = None
        fold = self._write_fold(append.stream, seen)

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal decided
            state = self._parse(self._require_commit(append.stream, commit))
            decided = decide_append(state, append, self.now_ms(), fold)
            if decided.state is None:
                return None
            return decided.state.body()

        self._transact(append.stream, decide, append.producer)
        assert decided is not None
        return decided.result

    def _transact(
        self, stream: str, decide: Callable[[Commit | None], dict[str, Any] | None], by: str
    ) -> Commit | None:
        """Commit what `decide` returns, and return the commit, as `CommitLog.transact` does.

        In a snapshot, `decide` is first called with the commit that the snapshot has read, or with
        the current one if others append to the stream at the same time.
        """
        read = None
        if self._snapshot is not None:
            # After a conflict or a commit, what was read is no longer the current commit.
            read = self._snapshot.pop(stream, None)
        seen = None
        if read is not None and stream not in self._contended:
            seen = read.commit
        commit = self.log(stream).transact(decide, by=by, attempts=_COMMIT_ATTEMPTS, seen=seen)
        if commit is None:
            return None
        if seen is not None and commit.number > seen.number + 1:
            self._contended.add(stream)
        # If `decide` had nothing to commit, what was read is still the current commit.
        if self._snapshot is not None and read is not None and commit is read.commit:
            self._snapshot[stream] = read
        return commit

    def _write_fold(self, stream: str, state: StreamState) -> Fold | None:
        """Write the page that the index needs next; return None if it needs none. (`decide_append`
        itself does no I/O.)
        """
        full = manifest.find_full_level(state)
        if full is None:
            return None
        page = self.files_of(stream).write(full.level, full.entries)
        return Fold(page, full.entries, self.now_ms())

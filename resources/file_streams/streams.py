"""Streams of files as a stream system: files are admitted to a log, and read at its offsets.

Whoever takes a snapshot of a stream (a run, a sensor, a dataset, a command) looks for new files
first, and admits them. Everything else is answered from the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.feed import (
    Feed,
    FilePiece,
    FileStreamDeclaration,
    Found,
)
from dagster_adjunct.resources.file_streams.log import (
    AdmittedFile,
    FileLog,
    FileLogState,
    list_logged,
)
from dagster_adjunct.resources.lazy_modules import F, np, pa
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import read_in_tasks
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META,
    RECORD_META_COLUMNS,
    TIMESTAMP,
    TOMBSTONE,
    NumberedOffsets,
    OffsetRange,
    StreamCapabilities,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
    check_partition,
    check_range,
    parse_offset,
    require_one_stream,
)
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

_declared: dict[str, dict[str, FileStreamDeclaration]] = {}
_TASK_BYTES = 64 * 1024 * 1024
_TASK_FILES = 256
_THREADS = 16
_CHANGED = (
    "Restore the file as it was when it was admitted, or go on without its records: adjunct stream"
    " set-aside STREAM FILE --reason …."
)


def declare_file_stream(system: str, name: str, declaration: FileStreamDeclaration) -> str:
    """Declare a stream of files in this process; return its full name.

    The same declaration may be repeated. Raises ConfigurationError for another one of this name.
    """
    check_name("stream", name)
    known = _declared.setdefault(system, {}).setdefault(name, declaration)
    if known != declaration:
        raise errors.ConfigurationError(
            f"stream '{system}.{name}' is declared twice, differently.",
            "Declare it once, and use the returned name in all applications.",
            stream=f"{system}.{name}",
        )
    return f"{system}.{name}"


@dataclass(slots=True)
class _Known:
    """What was admitted before, for a source of files; read once."""

    log: FileLog
    state: FileLogState
    _by_path: dict[str, AdmittedFile] | None = field(default=None, init=False)

    @property
    def cursor(self) -> str:
        return self.state.cursor

    def by_path(self) -> dict[str, AdmittedFile]:
        if self._by_path is None:
            self._by_path = self.log.known(self.state)
        return self._by_path


class FileStreams(NumberedOffsets):
    """The streams of one kind of source. Each has one partition, whose records are those of the
    admitted files, in the order of admission.

    A record's time is that of its file. Subclasses have the `name` of the system, and parse the
    declarations that they stored.
    """

    default_offset = "oldest"
    capabilities = StreamCapabilities(
        reads_arrow=True, reads_in_tasks=True, finds_times=True, counts_unread=True
    )
    declaration_class: type[FileStreamDeclaration]

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._states: dict[str, FileLogState] | None = None

    # -- what there is

    def list_streams(self) -> list[str]:
        declared = _declared.get(self.name, {})
        return sorted({*declared, *list_logged(self.lake, self.name)})

    def declaration(self, stream: str) -> FileStreamDeclaration:
        """Return the declaration of a stream: this process's, else the stored one. Raises
        StreamNotFoundError.
        """
        check_name("stream", stream)
        declared = _declared.get(self.name, {}).get(stream)
        if declared is not None:
            return declared
        state = self.file_log(stream).read()
        if state is None:
            there = ", ".join(self.list_streams()) or "there are none"
            raise errors.StreamNotFoundError(
                f"there is no stream '{self.name}.{stream}': it is not declared here, and no file"
                " of it was ever admitted.",
                f"Declare it in the module of the application, or use another stream: {there}.",
                stream=f"{self.name}.{stream}",
            )
        return self.declaration_class.model_validate(state.declared)

    def file_log(self, stream: str) -> FileLog:
        """Return the log of a stream."""
        return FileLog(self.lake, self.name, stream)

    def state(self, stream: str) -> FileLogState | None:
        """Return what was admitted of a stream, None if that is nothing; in a snapshot as it was
        then.
        """
        if self._states is not None and stream in self._states:
            return self._states[stream]
        return self.file_log(stream).read()

    def snapshot(self, stream: str) -> StreamSystem:
        view = copy(self)
        view._states = {stream: self.admit(stream)}
        return view

    def info(self, stream: str) -> StreamInfo:
        declaration = self.declaration(stream)
        state = self.state(stream)
        return StreamInfo(
            stream,
            declaration.partitions,
            declaration.key,
            "unknown",
            declaration.columns,
            identity=None if state is None else state.id,
        )

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._offsets(ssps, lambda state: state.oldest)

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._offsets(ssps, lambda state: state.next)

    def _offsets(
        self, ssps: Iterable[SystemStreamPartition], select: Callable[[FileLogState], int]
    ) -> dict[SystemStreamPartition, str]:
        found = {}
        for ssp in ssps:
            check_partition(ssp, self.declaration(ssp.stream).partitions)
            state = self.state(ssp.stream)
            found[ssp] = "0" if state is None else str(select(state))
        return found

    def fingerprint(self, stream: str) -> str:
        self.admit(stream)
        return str(self.file_log(stream).log.pointer_etag())

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        check_partition(ssp, self.declaration(ssp.stream).partitions)
        state = self.state(ssp.stream)
        if state is None:
            return "0"
        return str(self.file_log(ssp.stream).first_since(state, timestamp_ms * 1000))

    # -- admission

    def admit(self, stream: str) -> FileLogState:
        """Admit the files that have arrived since the last look; return what was admitted until
        now.

        Repeated and concurrent calls admit each file once. Raises the errors of the declared rules.
        """
        log = self.file_log(stream)
        declaration = self.declaration(stream)
        feed = declaration.feed(self.lake)
        found: Found | None = None

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal found
            before = log.parse(commit)
            if before is not None:
                declaration.check_stored(f"{self.name}.{stream}", before)
            state = before or FileLogState.empty(declaration)
            found = feed.find(_Known(log, state))
            after = state
            if found.files or found.cursor != state.cursor:
                after = log.add(state, found.files, found.cursor)
            declared = declaration.model_dump(mode="json")
            if after.declared != declared:
                after = after.model_copy(update={"declared": declared})
            return None if after is before else after.body()

        commit = log.log.transact(decide, by="admit")
        if found is not None and found.settled is not None:
            found.settled()
        state = log.parse(commit)
        assert state is not None
        return state

    def set_aside(self, stream: str, path: str, *, reason: str) -> AdmittedFile:
        """Set an admitted file aside, so that reads leave out its records; return it as it was.

        For a file that is gone, or damaged, before all readers have read it. Its offsets stay.
        Raises ConfigurationError if no such file was admitted.
        """
        log = self.file_log(stream)
        found: AdmittedFile | None = None

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal found
            state = log.parse(commit)
            if state is not None:
                found = log.known(state).get(path)
            if state is None or found is None:
                raise errors.ConfigurationError(
                    f"stream {self.name}.{stream} has no file {path!r}.",
                    f"Find its name: adjunct stream files {self.name}.{stream}.",
                    stream=f"{self.name}.{stream}",
                )
            if found.problem:
                return None
            return log.void(state, path, found.etag, f"set aside: {reason}").body()

        log.log.transact(decide, by="set aside")
        assert found is not None
        return found

    # -- reading

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        return sum(piece.end - piece.start for piece in self._pieces(ranges))

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        stream = require_one_stream(self.name, ranges)
        declaration = self.declaration(stream)
        names = list(columns if columns is not None else declaration.columns.names)
        read = partial(_read_piece, declaration.feed(self.lake), names)
        tables = [_empty_table(declaration.columns, names)]
        for found in map_in_threads(read, self._pieces(ranges), _THREADS):
            tables += found
        return pa.concat_tables(tables)

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
    ) -> DataFrame:
        stream = require_one_stream(self.name, ranges)
        declaration = self.declaration(stream)
        feed = declaration.feed(self.lake)
        pieces = self._pieces(ranges)
        session = resolve_session(spark)
        whole = [piece for piece in pieces if piece.end - piece.start == piece.file.rows]
        others = [piece for piece in pieces if piece.end - piece.start < piece.file.rows]
        frame = None
        if whole:
            with _as_admitted():
                frame = feed.frame(session, whole)
        if frame is None:
            return _frame_of_tasks(session, declaration, feed, pieces)
        frame = frame.select(
            *[F.col(f"`{name}`") for name in declaration.columns.names],
            F.lit(0).cast("int").alias(PARTITION),
            OFFSET,
            TIMESTAMP,
            F.lit(False).alias(TOMBSTONE),
            F.lit(0).cast("int").alias(EPOCH),
        )
        if not others:
            return frame
        return frame.unionByName(_frame_of_tasks(session, declaration, feed, others))

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        stream = require_one_stream(self.name, ranges)
        declaration = self.declaration(stream)
        pieces = self._pieces(ranges)
        return partial(_read_partition, declaration.feed(self.lake), list(columns), pieces)

    def _pieces(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> list[FilePiece]:
        """Return the parts of files that have the records of these ranges, without files that were
        set aside. Raises OffsetOutOfRangeError.
        """
        stream = require_one_stream(self.name, ranges)
        log = self.file_log(stream)
        state = self.state(stream)
        pieces = []
        for ssp, span in sorted(ranges.items()):
            check_partition(ssp, self.declaration(stream).partitions)
            start = parse_offset(span.start, str(ssp))
            end = parse_offset(span.end, str(ssp))
            if state is None:
                check_range(ssp, start, end, 0, 0)
                continue
            check_range(ssp, start, end, state.oldest, state.next)
            for file in log.files_between(state, start, end):
                if not file.problem:
                    from_row = max(start - file.first, 0)
                    pieces.append(FilePiece(file, from_row, min(end, file.next) - file.first))
        return pieces


def _empty_table(schema: Any, names: Sequence[str]) -> pa.Table:
    columns = schema.to_arrow()
    empty = pa.schema([columns.field(name) for name in names]).empty_table()
    return _with_meta(empty, AdmittedFile("", 0, "", 0, 0), 0)


def _with_meta(table: pa.Table, file: AdmittedFile, number: int) -> pa.Table:
    """Return records of a file, the first of which is its record `number`, with the columns of
    RECORD_META.
    """
    count = table.num_rows
    first = file.first + number
    meta = {
        PARTITION: pa.array(np.zeros(count, np.int32)),
        OFFSET: pa.array(np.arange(first, first + count, dtype=np.int64)),
        TIMESTAMP: pa.array(np.full(count, file.modified, np.int64)).cast(
            pa.timestamp("us", "UTC")
        ),
        TOMBSTONE: pa.array(np.zeros(count, np.bool_)),
        EPOCH: pa.array(np.zeros(count, np.int32)),
    }
    for name in RECORD_META:
        table = table.append_column(name, meta[name])
    return table


def _read_piece(feed: Feed, names: Sequence[str], piece: FilePiece) -> list[pa.Table]:
    """Return the records of a piece, with the columns of RECORD_META. Raises StreamReadError if
    there are not as many as were admitted.
    """
    return list(_piece_tables(feed, names, piece))


def _piece_tables(feed: Feed, names: Sequence[str], piece: FilePiece) -> Iterator[pa.Table]:
    """Yield the records of a piece. Raises AdmittedFileError if the file is not as it was when it
    was admitted.
    """
    wanted = piece.end - piece.start
    count = 0
    with _as_admitted():
        for number, table in feed.tables(piece, names):
            count += table.num_rows
            yield _with_meta(table, piece.file, number)
    if count != wanted:
        problem = (
            f"{piece.file.path} has other records than when it was admitted: found {count} of the"
            f" {wanted} records from {piece.start} on."
        )
        raise errors.AdmittedFileError(problem, _CHANGED, file=piece.file.path)


@contextmanager
def _as_admitted() -> Iterator[None]:
    """Raise AdmittedFileError for a file that is not as it was when it was admitted."""
    try:
        yield
    except errors.SourceChangedError as error:
        raise errors.AdmittedFileError(error.problem, _CHANGED, file=error.file) from error


def _read_partition(
    feed: Feed, names: Sequence[str], pieces: Sequence[FilePiece], partition: int
) -> Iterator[pa.Table]:
    if partition == 0:
        for piece in pieces:
            yield from _piece_tables(feed, names, piece)


def _frame_of_tasks(
    spark: SparkSession, declaration: FileStreamDeclaration, feed: Feed, pieces: Sequence[FilePiece]
) -> DataFrame:
    """Return the records of pieces as a frame that Python tasks read."""
    columns = [(one.name, one.type) for one in declaration.columns.fields]
    columns += RECORD_META_COLUMNS
    read = partial(_read_task, feed, declaration.columns.names)
    return read_in_tasks(spark, plan_tasks(pieces), read, columns)


def _read_task(
    feed: Feed, names: Sequence[str], pieces: Sequence[FilePiece]
) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        for table in _piece_tables(feed, names, piece):
            yield from table.combine_chunks().to_batches()


def plan_tasks(pieces: Sequence[FilePiece]) -> list[list[FilePiece]]:
    """Return the pieces that each task reads, about 64 MiB of files."""
    tasks: list[list[FilePiece]] = []
    room = 0
    for piece in pieces:
        share = (piece.end - piece.start) / max(1, piece.file.rows)
        size = int(piece.file.size * share)
        if not tasks or size > room or len(tasks[-1]) >= _TASK_FILES:
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(piece)
        room -= size
    return tasks

"""Streams of files as a stream system: files are admitted to a log, and read at its offsets.

Whoever takes a snapshot of a stream (a run, a sensor, a dataset, a command) looks for new files
first, and admits them. Everything else is answered from the log.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.feed import (
    Feed,
    FilePiece,
    FileStreamDeclaration,
    Found,
    naming_large_file,
)
from dagster_adjunct.resources.file_streams.log import (
    AdmittedFile,
    FileLog,
    FileLogState,
    FileMaintenance,
    LostFile,
    list_logged,
)
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectInfo
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import TASK_BYTES, read_in_tasks, share_among_tasks
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

_declared: dict[str, dict[str, FileStreamDeclaration]] = {}  # by system and stream
_logger = logging.getLogger(__name__)
_THREADS = 16
_LOOK_SECONDS = 20.0


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


def find_source_url(name: str) -> str:
    """Return where the files of a stream that this process has declared are, "" for another
    stream.
    """
    system, _, stream = name.partition(".")
    declared = _declared.get(system, {}).get(stream)
    return "" if declared is None else declared.source_url


@dataclass(slots=True)
class _Known:
    """What was admitted before, as a source of files asks for it (`KnownFiles`)."""

    log: FileLog
    state: FileLogState
    all_files: bool = False
    _by_path: dict[str, AdmittedFile] | None = field(default=None, init=False)

    @property
    def cursor(self) -> str:
        return self.state.cursor

    def by_path(self) -> dict[str, AdmittedFile]:
        if self._by_path is None:
            self._by_path = self.log.known(self.state)
        return self._by_path

    def among(self, paths: Collection[str]) -> dict[str, AdmittedFile]:
        return self.log.among(self.state, paths)

    def has_contents(self, path: str, etag: str) -> bool:
        admitted = self.log.admissions(self.state, path)
        return any(file.etag == etag and not file.problem for file in admitted)


class _Admission(NamedTuple):
    """What was admitted before this admission, and up to now, and whether the source has more files
    to admit.
    """

    before: FileLogState | None
    state: FileLogState
    has_more: bool


class _PlannedAdmission(NamedTuple):
    """The state before, the state to commit, and what a look has found; or the error of a first
    look, to raise once the declaration is stored.
    """

    before: FileLogState | None
    state: FileLogState
    found: Found | errors.PermanentError


class _SettingAside(NamedTuple):
    """The state in which a file is set aside, and the file as it was before. If several admissions
    of the file are set aside, its `rows` are those of all.
    """

    state: FileLogState
    file: AdmittedFile


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
        # By stream: why files wait, by path, as the last look has found.
        self._waiting: dict[str, dict[str, str]] = {}

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
        """Return what was admitted of a stream, None if nothing was. A snapshot returns what was
        admitted when it was taken.
        """
        if self._states is not None and stream in self._states:
            return self._states[stream]
        return self.file_log(stream).read()

    def snapshot(self, stream: str) -> StreamSystem:
        view = copy(self)
        view._states = {stream: self._look(stream)}
        return view

    def info(self, stream: str) -> StreamInfo:
        declaration = self.declaration(stream)
        state = self.state(stream)
        return StreamInfo(
            stream,
            declaration.partitions,
            declaration.key,
            # One partition has all records of each key, by any hash.
            "spark-murmur3",
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
        """Return the offset that `select` reads from the state of each partition's stream, "0" if
        nothing was admitted.
        """
        found = {}
        for ssp in ssps:
            check_partition(ssp, self.declaration(ssp.stream).partitions)
            state = self.state(ssp.stream)
            found[ssp] = "0" if state is None else str(select(state))
        return found

    def fingerprint(self, stream: str) -> str:
        self._look(stream)
        return str(self.file_log(stream).log.pointer_etag())

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        check_partition(ssp, self.declaration(ssp.stream).partitions)
        state = self.state(ssp.stream)
        if state is None:
            return "0"
        return str(self.file_log(ssp.stream).first_since(state, timestamp_ms * 1000))

    # -- admission

    def admit(self, stream: str, *, all_files: bool = False) -> FileLogState:
        """Admit the files that have arrived since the last look; return what was admitted until
        now.

        Repeated and concurrent calls admit each file once. `all_files` also finds those that a look
        does not expect: that came late under an old name, or whose notification was lost. Raises
        the errors of the declared rules.
        """
        admission = self._admit_once(stream, all_files)
        while admission.has_more:
            admission = self._admit_once(stream, all_files)
        return admission.state

    def _look(self, stream: str) -> FileLogState:
        """Admit the files that have arrived, for about `_LOOK_SECONDS` (a sensor has a minute);
        return what was admitted until now. The next look admits the rest. Logs how many files were
        set aside: the reports of runs do not say it.
        """
        deadline = time.monotonic() + _LOOK_SECONDS
        admission = self._admit_once(stream)
        before = admission.before
        while admission.has_more and time.monotonic() <= deadline:
            admission = self._admit_once(stream)
        name = f"{self.name}.{stream}"
        for rule, count in admission.state.set_aside_since(before).items():
            step = f"adjunct stream files {name} --problems"
            _logger.warning("%s: %s file(s) set aside (%s): %s", name, count, rule, step)
        return admission.state

    def _admit_once(self, stream: str, all_files: bool = False) -> _Admission:
        """Look at the source once, and admit what it finds in one commit. Raises the errors of the
        declared rules.

        The first look always commits, so that the stream has a state and a stored declaration, by
        which commands show what is wrong with its files; a later one only if the files, the cursor
        or the declaration are new.
        """
        log = self.file_log(stream)
        planned: _PlannedAdmission | None = None

        # Called again after a conflict, which harms nothing: only what the last call has found is
        # used, and `maintain` deletes pages of the log that an earlier call has written.
        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal planned
            before = log.parse(commit)
            planned = self._plan_admission(stream, before, all_files)
            is_unchanged = planned.state is before  # not at the first look, when `before` is None
            return None if is_unchanged else planned.state.body()

        commit = log.transact(decide, by="admit")
        assert planned is not None
        found = planned.found
        if isinstance(found, errors.PermanentError):
            raise found
        if found.settled is not None:
            found.settled()
        state = log.parse(commit)
        assert state is not None
        self._waiting[stream] = _without_admitted(found.waiting, _Known(log, state))
        return _Admission(planned.before, state, found.more)

    def _plan_admission(
        self, stream: str, before: FileLogState | None, all_files: bool
    ) -> _PlannedAdmission:
        """Look at the source, and return the state in which what it has is admitted; the state
        `before` if nothing is new. Raises the errors of the declared rules, except at a first look.
        """
        log = self.file_log(stream)
        declaration = self.declaration(stream)
        if before is not None and before.looked:
            declaration.check_stored(f"{self.name}.{stream}", before)
        state = before or FileLogState.empty(declaration)
        after = state
        found: Found | errors.PermanentError
        try:
            with _naming_stream(f"{self.name}.{stream}"):
                found = declaration.feed(self.lake).find(_Known(log, state, all_files))
        except errors.PermanentError as error:
            if state.looked:
                raise
            found = error
        else:
            if found.files or found.cursor != state.cursor:
                after = log.add(state, found.files, found.cursor)
        declared = declaration.model_dump(mode="json")
        looked = state.looked or isinstance(found, Found)
        if (after.declared, after.looked) != (declared, looked):
            after = after.model_copy(update={"declared": declared, "looked": looked})
        return _PlannedAdmission(before, after, found)

    def waiting(self, stream: str) -> dict[str, str]:
        """Return why files that exist are not admitted yet, by path. Admits nothing.

        This is what the last admission by this object found; without one, it looks now. Raises the
        errors of the declared rules.
        """
        if stream not in self._waiting:
            declaration = self.declaration(stream)
            log = self.file_log(stream)
            known = _Known(log, log.read() or FileLogState.empty(declaration))
            with _naming_stream(f"{self.name}.{stream}"):
                found = declaration.feed(self.lake).find(known)
            self._waiting[stream] = _without_admitted(found.waiting, known)
        return self._waiting[stream]

    def set_aside(
        self, stream: str, path: str, *, reason: str, by: str = "set aside"
    ) -> AdmittedFile:
        """Set a file aside, so that reads leave out its records; return it as it was, with the
        number of the records that are left out.

        If the file has contents that were not admitted yet (it is new, or was overwritten), these
        will not be, and what was admitted before stays. Otherwise reads leave out the records that
        were admitted, whose offsets stay: for a file that is gone, or damaged, before all readers
        have read it. If it was admitted several times, with different contents, those that are gone
        are set aside, or the last ones if none is. If the file is delivered again with other
        contents, it is admitted. Raises ConfigurationError if there is no such file.
        """
        log = self.file_log(stream)
        planned: _SettingAside | None = None

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal planned
            before = log.parse(commit)
            state = before or FileLogState.empty(self.declaration(stream))
            planned = self._plan_set_aside(stream, state, path, f"set aside: {reason}")
            if planned.state is before:
                return None  # it was set aside before
            return planned.state.body()

        log.transact(decide, by=by)
        assert planned is not None
        return planned.file

    def _plan_set_aside(
        self, stream: str, state: FileLogState, path: str, problem: str
    ) -> _SettingAside:
        """Return the state in which a file is set aside, the same state if it was before. Raises
        ConfigurationError if there is no such file.
        """
        log = self.file_log(stream)
        admitted = log.admissions(state, path)
        present = self.find_file(stream, path)
        known = {file.etag for file in admitted}
        if present is not None and present.etag not in known:  # it has contents that are new
            aside = present._replace(problem=problem)
            return _SettingAside(log.add(state, [aside], state.cursor), present)
        if not admitted:
            raise errors.ConfigurationError(
                f"stream {self.name}.{stream} has no file {path!r}.",
                f"Find its name: adjunct stream files {self.name}.{stream}.",
                stream=f"{self.name}.{stream}",
            )
        readable = [file for file in admitted if file.is_read]
        if not readable:  # there are no records to leave out
            return _SettingAside(state, admitted[-1])
        chosen = [lost.file for lost in self.find_lost(stream, readable)]
        if not chosen:
            chosen = readable[-1:]
        after = log.void(state, {file.contents: problem for file in chosen})
        rows = sum(file.rows for file in chosen)
        return _SettingAside(after, chosen[-1]._replace(rows=rows))

    def find_file(self, stream: str, path: str) -> AdmittedFile | None:
        """Return a file as it is now, without the number of its records; None if it is gone, and
        for streams of tables.
        """
        return None

    def find_lost(self, stream: str, files: Sequence[AdmittedFile]) -> list[LostFile]:
        """Return those of these admitted files that can't be read any more; none for a source that
        does not know it.
        """
        return []

    def present_files(self, stream: str) -> Mapping[str, str] | None:
        """Return the ETags of all files that exist, by path; None for a source whose names always
        stay in the log.
        """
        return None

    def _find_lost_to_leave_out(self, stream: str, files: Sequence[AdmittedFile]) -> list[LostFile]:
        """Return those of these admitted files that can't be read any more and are to be left out;
        none unless that is declared.
        """
        return []

    # -- maintenance

    def maintain(self, stream: str, now: datetime | None = None) -> FileMaintenance:
        """Apply the stream's retention, and delete pages and manifests of its log that have not
        been needed for an hour.

        Retention moves `oldest`. The files themselves stay, and are not admitted again: the log
        keeps the name of a file as long as the file exists. `now` is as for `LakeStreams.maintain`.
        """
        log = self.file_log(stream)
        retention = self.declaration(stream).retention
        at = now or self.lake.now()
        if now is None and log.read() is not None:
            at = self.lake.cautious_now(log.log.prefix)
        dropped: list[AdmittedFile] = []
        unreachable: list[ObjectInfo] = []

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            nonlocal dropped, unreachable
            before = log.parse(commit)
            if before is None:
                return None
            if retention is not None:
                after = log.retain(before, retention, at)
            else:
                after = before
            dropped = [*log.files_between(before, before.oldest, after.oldest)]
            after = log.forget(after, lambda: self.present_files(stream))
            # A writer that wrote a page before this commit, and commits after it, loses its race.
            # So pages that are listed now, and that this state does not refer to, can be deleted;
            # not those that are listed later, which may look old where clocks differ.
            unreachable = log.list_unreachable(after, at)
            if after is before and not unreachable:
                return None
            return after.body()

        log.transact(decide, by="maintain")
        self.lake.store.delete_many([item.key for item in unreachable])
        return FileMaintenance(
            dropped_files=len(dropped),
            dropped_rows=sum(file.rows for file in dropped),
            deleted_objects=len(unreachable),
            deleted_bytes=sum(item.size for item in unreachable),
        )

    # -- reading

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        pieces = self._set_lost_aside_and_plan(ranges)
        return sum(piece.end - piece.start for piece in pieces)

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        stream = require_one_stream(self.name, ranges)
        declaration = self.declaration(stream)
        names = list(declaration.columns.names if columns is None else columns)
        read = partial(_read_piece, self._reader(stream), names)
        tables = [_empty_table(declaration.columns, names)]
        pieces = self._set_lost_aside_and_plan(ranges)
        for found in map_in_threads(read, pieces, _THREADS):
            tables += found
        return pa.concat_tables(tables)

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
    ) -> DataFrame:
        stream = require_one_stream(self.name, ranges)
        declaration = self.declaration(stream)
        reader = self._reader(stream)
        pieces = self._set_lost_aside_and_plan(ranges)
        columns = [(one.name, one.type) for one in declaration.columns.fields]
        columns += RECORD_META_COLUMNS
        read = partial(_read_task, reader, declaration.columns.names)
        parts = []
        for cut in map_in_threads(partial(_cut, reader), pieces, _THREADS):
            parts += cut
        tasks = share_among_tasks(parts, _size)
        return read_in_tasks(resolve_session(spark), tasks, read, columns)

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        stream = require_one_stream(self.name, ranges)
        pieces = self._set_lost_aside_and_plan(ranges)
        return partial(_read_partition, self._reader(stream), list(columns), pieces)

    def find_records(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        keys: pa.Table,
        columns: Sequence[str] = (),
    ) -> pa.Table:
        """Return where the records with these keys are: see `StreamSystem.find_records`. If a file
        is lost, the AdmittedFileError is about all files of the ranges that are.
        """
        try:
            return super().find_records(ranges, keys, columns)
        except errors.AdmittedFileError as error:
            if error.rule != "lost":
                raise
            stream = require_one_stream(self.name, ranges)
            files = [piece.file for piece in self._plan_pieces(stream, ranges)]
            lost = [one.file for one in self.find_lost(stream, files)]
            if not lost:  # another file took its place meanwhile
                raise
            raise _all_lost_error(f"{self.name}.{stream}", lost, error) from error

    def read_records(
        self, stream: str, places: pa.Table, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the records at these places: see `StreamSystem.read_records`. There are none in
        files that were set aside after the places were found.
        """
        return super().read_records(stream, self._without_set_aside(stream, places), columns)

    def _without_set_aside(self, stream: str, places: pa.Table) -> pa.Table:
        """Return the places without those in files that are set aside."""
        if not places.num_rows:
            return places
        offsets = places.column(OFFSET).to_numpy()
        span = OffsetRange(str(offsets.min()), str(offsets.max() + 1))
        pieces = self._set_lost_aside_and_plan({SystemStreamPartition(self.name, stream, 0): span})
        is_readable = np.zeros(len(offsets), np.bool_)
        for piece in pieces:
            is_readable |= (piece.file.first <= offsets) & (offsets < piece.file.next)
        return places.filter(pa.array(is_readable))

    def _reader(self, stream: str) -> _PieceReader:
        """Return what reads the files of a stream, in this process or in tasks."""
        return _PieceReader(f"{self.name}.{stream}", self.declaration(stream).feed(self.lake))

    def _set_lost_aside_and_plan(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> list[FilePiece]:
        """Return the parts of files that have the records of these ranges, without files that are
        set aside. Raises OffsetOutOfRangeError.

        If lost files are declared to be left out, those of these ranges are set aside first, in a
        commit.
        """
        stream = require_one_stream(self.name, ranges)
        pieces = self._plan_pieces(stream, ranges)
        lost = self._find_lost_to_leave_out(stream, [piece.file for piece in pieces])
        if not lost:
            return pieces
        self._commit_lost(stream, lost)
        gone = {one.file.contents for one in lost}
        return [piece for piece in pieces if piece.file.contents not in gone]

    def _commit_lost(self, stream: str, lost: Sequence[LostFile]) -> None:
        """Set aside files that can't be read any more; commits nothing if another reader did."""
        log = self.file_log(stream)
        problems = {one.file.contents: f"lost: {one.reason}" for one in lost}

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            before = log.parse(commit)
            assert before is not None
            state = log.void(before, problems)
            # The counts grow by each file that was not set aside before.
            is_done = state.set_aside == before.set_aside
            return None if is_done else state.body()

        log.transact(decide, by="set aside")

    def _plan_pieces(
        self, stream: str, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> list[FilePiece]:
        """Return the parts of files that have the records of these ranges."""
        log = self.file_log(stream)
        state = self.state(stream)
        pieces = []
        for ssp, span in sorted(ranges.items()):
            check_partition(ssp, self.declaration(stream).partitions)
            start = parse_offset(span.start, str(ssp))
            end = parse_offset(span.end, str(ssp))
            if state is None:  # nothing was admitted: only the empty range at 0 is no error
                check_range(ssp, start, end, 0, 0)
                continue
            check_range(ssp, start, end, state.oldest, state.next)
            for file in log.files_between(state, start, end):
                if file.problem:
                    continue
                first_row = max(start - file.first, 0)
                end_row = min(end - file.first, file.rows)
                pieces.append(FilePiece(file, first_row, end_row))
        return pieces


def _without_admitted(waiting: Mapping[str, str], known: _Known) -> dict[str, str]:
    """Return the reasons why files wait, by path, for those files that were never admitted.

    A source also names files that were admitted: by somebody else since it looked, or before their
    markers were deleted.
    """
    before = known.among(waiting)
    return {path: reason for path, reason in waiting.items() if path not in before}


@contextmanager
def _naming_stream(stream: str) -> Iterator[None]:
    """Put the name of the stream into errors about files, and into the commands that they suggest:
    feeds do not know it, and write STREAM. Names that are there already stay.
    """
    try:
        yield
    except (
        errors.AdmittedFileError,
        errors.SchemaMismatchError,
        errors.StreamUnavailableError,
    ) as error:
        step = error.next_step.replace("stream set-aside STREAM ", f"stream set-aside {stream} ")
        step = step.replace("stream admit STREAM.", f"stream admit {stream}.")
        step = step.replace("(lake, STREAM,", f"(lake, {stream!r},")  # of begin_changes_again
        problem = error.problem
        if error.stream is None:
            problem = f"stream {stream}: {problem}"
        raise error.reworded(problem, step, stream=stream) from error.__cause__


def _empty_table(schema: Schema, names: Sequence[str]) -> pa.Table:
    """Return a table without rows, with these columns of the schema and those of RECORD_META."""
    columns = schema.to_arrow()
    empty = pa.schema([columns.field(name) for name in names]).empty_table()
    no_file = AdmittedFile("", 0, "", 0, 0)
    return _with_meta(empty, no_file, 0)


def _with_meta(table: pa.Table, file: AdmittedFile, number: int) -> pa.Table:
    """Return records of a file with the columns of RECORD_META; the first of them is the record
    `number` of the file, counted from 0.
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


@dataclass(frozen=True, slots=True)
class _PieceReader:
    """Reads the files of a stream. Can be pickled, for Spark's tasks. `stream` is the full name,
    which errors have.
    """

    stream: str
    feed: Feed

    def tables(self, names: Sequence[str], piece: FilePiece) -> Iterator[pa.Table]:
        """Yield the records of a piece, with the columns of RECORD_META. Raises AdmittedFileError
        if the file is not as it was when it was admitted.
        """
        wanted = piece.end - piece.start
        count = 0
        with self._locating_errors(piece):
            for number, table in self.feed.tables(piece, names):
                count += table.num_rows
                yield _with_meta(table, piece.file, number)
            if count != wanted:
                problem = (
                    f"{piece.file.path} has other records than when it was admitted: found {count}"
                    f" of the {wanted} records from {piece.start} on."
                )
                step = _restore_step(piece.file.path)
                raise errors.AdmittedFileError(problem, step, file=piece.file.path, rule="lost")

    def cuts(self, piece: FilePiece) -> Sequence[int]:
        """Return the numbers of the records before which the file of a piece can be cut. Raises
        AdmittedFileError if the file is not as it was when it was admitted.
        """
        with self._locating_errors(piece):
            return self.feed.cuts(piece.file)

    @contextmanager
    def _locating_errors(self, piece: FilePiece) -> Iterator[None]:
        """Raise errors about the file of a piece as those of an admitted file of this stream."""
        path = piece.file.path
        with _naming_stream(self.stream), _as_admitted(path), naming_large_file(path):
            yield


def _read_piece(reader: _PieceReader, names: Sequence[str], piece: FilePiece) -> list[pa.Table]:
    """Return the records of a piece, with the columns of RECORD_META, in tables."""
    return list(reader.tables(names, piece))


def _restore_step(path: str) -> str:
    """Return what to do about an admitted file that is not as it was."""
    name = shlex.quote(path)
    return (
        "Move the file back that was admitted (in a folder, a copy counts as another file), or go"
        f" on without its records: adjunct stream set-aside STREAM {name} --reason …."
    )


@contextmanager
def _as_admitted(path: str) -> Iterator[None]:
    """Raise AdmittedFileError if the file at this path is not as it was when it was admitted; for
    values that do not fit, add the next step to the error.
    """
    try:
        yield
    except errors.SchemaMismatchError as error:
        if error.column is None and error.line is None:
            raise _damaged_error(error, path) from error
        step = (
            f"{error.next_step} To go on without the file: adjunct stream set-aside STREAM"
            f" {shlex.quote(path)} --reason …."
        )
        raise error.reworded(error.problem, step) from error
    except errors.SourceChangedError as error:
        step = _restore_step(path)
        lost = errors.AdmittedFileError(error.problem, step, file=error.file, rule="lost")
        raise lost from error


_MOST_NAMED = 5


def _all_lost_error(
    stream: str, lost: Sequence[AdmittedFile], error: errors.AdmittedFileError
) -> errors.AdmittedFileError:
    """Return the error for all files of which records were to be read and that are lost; `error` is
    that of the first one.
    """
    rows = sum(file.rows for file in lost)
    names = ", ".join(file.path for file in lost[:_MOST_NAMED])
    if len(lost) > _MOST_NAMED:
        names += ", …"
    problem = (
        f"{len(lost):,} files of {stream} with {rows:,} records are gone, or have other contents"
        f" than when they were admitted: {names}."
    )
    step = (
        "Move them back (in a folder, a copy counts as another file). Or go on without their"
        ' records: declare FileRules(lost="set-aside"), or for each file: adjunct stream set-aside'
        f" {stream} FILE --reason …."
    )
    return error.reworded(problem, step)


def _damaged_error(error: errors.SchemaMismatchError, path: str) -> errors.AdmittedFileError:
    """Return the error of an admitted file that is as it was admitted, but can't be read."""
    step = (
        "Go on without its records, and deliver it again, complete, afterwards: adjunct stream"
        f" set-aside STREAM {shlex.quote(path)} --reason …. With FileRules(damaged="
        '"set-aside"), later files are read before they are admitted.'
    )
    return errors.AdmittedFileError(error.problem, step, file=error.file, rule="damaged")


def _read_partition(
    reader: _PieceReader, names: Sequence[str], pieces: Sequence[FilePiece], partition: int
) -> Iterator[pa.Table]:
    """Yield the records of a partition. All pieces are those of partition 0, the only one that
    streams of files have; others have no records.
    """
    if partition == 0:
        for piece in pieces:
            yield from reader.tables(names, piece)


def _read_task(
    reader: _PieceReader, names: Sequence[str], pieces: Sequence[FilePiece]
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a task's pieces, as Spark takes them."""
    for piece in pieces:
        for table in reader.tables(names, piece):
            yield from table.combine_chunks().to_batches()


def _cut(reader: _PieceReader, piece: FilePiece) -> list[FilePiece]:
    """Return the parts of a large piece that tasks read in parallel, each of `TASK_BYTES` or more
    but for the last; a small piece as it is.
    """
    if _size(piece) < 2 * TASK_BYTES:
        return [piece]
    parts = []
    rest = piece
    for number in reader.cuts(piece):
        if number >= piece.end:
            break
        # If the cut is not after the start of the rest, this part has no records, and no size.
        before = FilePiece(piece.file, rest.start, number)
        if _size(before) >= TASK_BYTES:
            parts.append(before)
            rest = FilePiece(piece.file, number, piece.end)
    return [*parts, rest]


def _size(piece: FilePiece) -> int:
    """Return about how many bytes of its file a piece has: its share of the records."""
    rows = piece.end - piece.start
    return piece.file.size * rows // max(1, piece.file.rows)

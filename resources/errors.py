"""The errors that Adjunct raises deliberately, as one tree.

    AdjunctError
    |-- PermanentError                 the same call fails again: change something first
    |   |-- ConfigurationError         a setting, a name, a declaration
    |   |   |-- InvalidNameError
    |   |   |-- ZoneRulesError         Java and Python have different rules of a time zone
    |   |   `-- ComponentError         a mistake in a component's YAML
    |   |-- SchemaMismatchError        data or a declaration does not fit the schema
    |   |-- NullKeyError               a null where a key is needed
    |   |-- MalformedDocumentError     a stored pointer, manifest or index that can't be parsed
    |   |-- ManifestMismatchError      stored objects differ from what the manifest lists
    |   |-- ConditionalWritesUnsupportedError, ObjectNotFoundError
    |   |-- ObjectExistsError          put-if-absent found an object
    |   |-- PreconditionFailedError    put-if-match found another ETag
    |   |-- CommitConflictError        another writer committed first: re-read and decide again
    |   |-- CommitStateUnknownError    the store did not report whether the commit happened
    |   |-- ProducerConflictError      one producer and sequence, two different contents
    |   |-- LakeNotFoundError          there is no lake at this URL
    |   |-- StreamNotFoundError, StreamExistsError, OffsetOutOfRangeError
    |   |-- StreamReadError            a stream system's reads return something else than they must
    |   |-- AdmittedFileError          a file of a stream can't be admitted, or has changed since
    |   |-- StillReadError             a reader still needs what was to be deleted or rewritten
    |   |-- DatasetNotFoundError, NoSealedVersionError, MarkerConflictError, DatasetError
    |   |-- EmptyVersionError          a version without records, which nobody declared to be empty
    |   |-- VersionDiscardedError, LeaseLostError, ValidatorError, StaleDatasetError
    |   |-- BadChangeError, KeyOrderError
    |   |-- PlanningError, PartitionCountMismatchError
    |   |-- RestatementError           more results would be restated than declared
    |   |-- OperatorFailedError        an expression or a function of the application failed
    |   |   `-- ExpectationError       a record does not meet an expectation of the application
    |   `-- TableError, RecordNotFoundError, TableAccessError, TableNotFoundError,
    |       TableReplacedError
    `-- TransientError                 the same call may succeed later: retry it
        |-- StoreUnavailableError, StreamUnavailableError
        |-- ApplicationBusyError       another run of the application is active: wait until it ends
        |-- RunLeaseLostError          the run's lease was not renewed, or another run took it over
        |-- SourceChangedError         files were replaced while they were read
        `-- TableUnavailableError

Every message says what the problem is, what was found, what was expected and what to do next. Its
subjects are also fields, so that code need not parse the text; a field is None where its value is
unknown, and streams are named with their system. Retry logic checks for `TransientError` only: the
base class of an error decides whether it is retried.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

# The text after the colon is a password, unless it is a port before a path. Some passwords contain
# a slash.
_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@(?=[\w\[])")


def redact_passwords(text: str) -> str:
    """Return the text with `***` in place of user and password in its URLs."""
    return _LOGIN.sub(r"\1***@", text)


def first_line(error: BaseException) -> str:
    """Return what another library's error says first, without passwords and without a full stop;
    the name of its class if it says nothing.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return redact_passwords(lines[0].rstrip("."))


@dataclass_transform(eq_default=False, kw_only_default=True)
class _ErrorFields:
    """Turns the annotated attributes of each error class into keyword-only fields, as a
    dataclass does.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        dataclass(eq=False, repr=False, kw_only=kw_only)(cls)


class AdjunctError(_ErrorFields, Exception, kw_only=False):
    """Base of all errors that Adjunct raises deliberately.

    `problem` says what was found and where, `next_step` what to do about it. The other fields are
    what the error is about; subclasses add their own.
    """

    problem: str
    next_step: str = ""
    _: KW_ONLY
    application: str | None = None
    operator: str | None = None
    dataset: str | None = None
    stream: str | None = None
    table: str | None = None
    column: str | None = None
    url: str | None = None  # of a lake, a server, an object or a place with files
    key: str | None = None  # of an object, or of an entry

    def __post_init__(self) -> None:
        # Messages of other libraries, such as a driver that can't reach its server, may quote a URL
        # with its password.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                setattr(self, field.name, redact_passwords(value))
        super().__init__(f"{self.problem} {self.next_step}" if self.next_step else self.problem)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the error that are set, by name, without the two texts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def reworded(self, problem: str, next_step: str, **more: Any) -> Self:
        """Return the error with another message, with the same fields and those in `more`."""
        return type(self)(problem, next_step, **self.facts | more)

    def with_problem(self, problem: str, **more: Any) -> Self:
        """Return a copy of the error with another problem, the same next step, and the fields in
        `more`.

        Unlike `reworded` it calls no constructor, which a user's subclass may have changed.
        """
        changed = copy(self)
        changed.__dict__.update(more, problem=problem)
        AdjunctError.__post_init__(changed)
        _begin_with_line(changed, changed.facts.get("declared_at"))
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes (Spark workers). Not calling the constructor lets
        # subclasses that have one of their own be pickled as well.
        return _rebuild, (type(self), *self.args), self.__dict__


def _begin_with_line(error: AdjunctError, line: str | None) -> None:
    """Let the text of an error begin with the line of the user's file, unless that is None."""
    if line is not None:
        error.args = (f"{line}: {error.args[0]}",)


def _rebuild(kind: type[AdjunctError], *args: object) -> AdjunctError:
    """Return an unpickled error, made without a call of its constructor."""
    return kind.__new__(kind, *args)


class PermanentError(AdjunctError):
    """The same call fails again until something is changed."""


class TransientError(AdjunctError):
    """The same call may succeed later.

    `needs_action` is True where it can't succeed within seconds, because somebody has to act first,
    such as make room on a disk: nothing waits for that, and a later run goes on.
    """

    needs_action: bool | None = None


class ConfigurationError(PermanentError):
    """A setting, a name or a declaration that can't work; the fields say of what."""

    argument: str | None = (
        None  # the parameter of a function, or the field of a declaration, that has a wrong value
    )
    setting: str | None = (
        # an option of a command, a setting of a client, or an environment variable, as written
        None
    )
    system: str | None = None  # of streams
    topic: str | None = None  # of Kafka
    backend: str | None = None  # the name under which a backend of tables is registered
    module: str | None = None  # of the user's code
    package: str | None = None  # that is not installed
    declared_at: str | None = None  # the line of the user's file with the mistake: "visits.py:12"

    def __post_init__(self) -> None:
        super().__post_init__()
        _begin_with_line(self, self.declared_at)


class InvalidNameError(ConfigurationError):
    """A name that is not safe as part of a path or key."""

    name: str | None = None  # as it was given


class ZoneRulesError(ConfigurationError):
    """The rules of a time zone are not those of Java, or not those by which state was computed."""

    zone: str | None = None
    java_rules: str | None = None  # the version of Java's database, such as "2025b"
    python_rules: str | None = None  # the version of Python's
    stored_rules: str | None = None  # the version by which state was computed
    at: str | None = None  # a moment for which the rules differ


class ComponentError(ConfigurationError):
    """A mistake in the YAML of a component: `problem` begins with its place, and shows the lines
    around it.
    """

    file: str | None = None
    line: int | None = None  # of the file, counted from 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.line is not None:  # the problem ends with the lines around it
            self.args = (f"{self.problem}\n{self.next_step}",)


class SchemaMismatchError(PermanentError):
    """Data, or a declaration, does not fit the schema."""

    file: str | None = None  # its URL
    line: int | None = None  # of the file, counted from 1; of Parquet the row
    row: int | None = None  # the place among the given records, counted from 0
    argument: str | None = None  # of a function or a declaration
    keys: tuple[object, ...] = ()  # of the table's entries that do not fit


class NullKeyError(PermanentError):
    """A record without a key where one is needed."""


class RestatementError(PermanentError):
    """More results would be restated than the join declares, or the versions by which they were
    made are gone, or files with the records that they were made of.
    """

    changed_keys: int | None = None  # how many keys have changed, if that is known


class MalformedDocumentError(PermanentError):
    """A stored pointer, manifest or index that can't be parsed."""

    document: str | None = None  # its kind and key


class ManifestMismatchError(PermanentError):
    """The stored objects are not exactly those that the manifest lists."""

    version: str | None = None  # its id
    partition_by: str | None = None  # the columns by which rows should have been partitioned


class ConditionalWritesUnsupportedError(PermanentError):
    """The object store accepts conditional writes but does not honour them."""


class ObjectNotFoundError(PermanentError):
    """No object has this key."""


class ObjectExistsError(PermanentError):
    """`put_if_absent` found that the object already exists."""


class PreconditionFailedError(PermanentError):
    """`put_if_match` found an object with another ETag, or none."""


class CommitConflictError(PermanentError):
    """Another writer committed first, so this commit has no effect: re-read and decide again."""

    prefix: str | None = None  # of the commit log in the lake, where nothing more is known


class CommitStateUnknownError(PermanentError):
    """The store did not report whether the commit happened: read the current state before
    acting.
    """

    prefix: str | None = None  # of the commit log in the lake


class ProducerConflictError(PermanentError):
    """A producer sent one sequence number twice with different contents, or long after the first
    was forgotten.
    """

    producer: str | None = None
    sequence: int | None = None
    newest: int | None = None  # the producer's newest sequence number, if it is known


class LakeNotFoundError(PermanentError):
    """There is no lake at the URL: nothing has been written to it yet, or it is elsewhere."""


class StreamNotFoundError(PermanentError):
    """No stream has this name."""

    system: str | None = None


class StreamExistsError(PermanentError):
    """A stream of this name exists with a different declaration."""


class OffsetOutOfRangeError(PermanentError):
    """An offset that the stream does not hold, or no longer holds."""

    partition: int | None = None
    offset: str | None = None
    oldest: str | None = None  # the first offset that is available
    upcoming: str | None = None  # the next one that will be written


class StreamReadError(PermanentError):
    """A read of a stream system returned other records or columns than its interface promises."""

    system: str | None = None
    partition: int | None = None
    start: str | None = None  # the offsets [start, end) that were to be read
    end: str | None = None
    found: str | None = None
    expected: str | None = None


class AdmittedFileError(PermanentError):
    """A file of a stream can't be admitted by the declared rules, or is not as it was admitted."""

    file: str | None = None  # its URL
    rule: str | None = None  # the rule that says what is to happen, such as "changed"


class StillReadError(PermanentError):
    """A reader still needs what was to be deleted or rewritten."""

    readers: tuple[str, ...] = ()  # a description of each


class DatasetError(PermanentError):
    """A dataset that can't be built or read as declared."""

    version: str | None = (
        None  # its id, or the name under which it was delivered if it has no id yet
    )
    function: str | None = None  # the user's function or expression, as declared


class DatasetNotFoundError(DatasetError):
    """No dataset has this name."""


class NoSealedVersionError(DatasetError):
    """The dataset has no sealed version (or finished bootstrap) yet."""


class VersionDiscardedError(DatasetError):
    """The version is no longer retained."""


class StaleDatasetError(DatasetError):
    """The dataset lags behind its stream by more than its reader allows: advance it first."""


class LeaseLostError(DatasetError):
    """The lease on a version was lost, so its files may have been deleted while they were read."""


class MarkerConflictError(DatasetError):
    """An end-of-dataset marker contradicts a version that is sealed, or the records before it."""

    expected: str | None = None  # the number of rows or the checksum in the marker
    found: str | None = None  # the same, counted from the records


class EmptyVersionError(DatasetError):
    """A version has no records, and its delivery does not say that this is meant."""


class BadChangeError(DatasetError):
    """A change on a stream that can't be applied: it is unreadable, has no key or an unknown
    operation, or does not meet a validator.
    """

    validator: str | None = None  # the name of the one that it does not meet


class KeyOrderError(DatasetError):
    """Changes of one key are in several partitions of a stream, where nothing says which one is
    the newest.
    """

    partition: int | None = None
    offset: str | None = None


class ValidatorError(DatasetError):
    """A validator that can't be evaluated because of a mistake in it, which says nothing about
    the version.
    """

    validator: str | None = None  # its name


class PlanningError(PermanentError):
    """The application can't be planned."""

    declared_at: str | None = (
        None  # the line of the user's file that made the operator: "visits.py:12"
    )
    places: tuple[str, ...] = ()  # such lines of several operators, which the problem lists

    def __post_init__(self) -> None:
        super().__post_init__()
        _begin_with_line(self, self.declared_at)


class PartitionCountMismatchError(PlanningError):
    """Streams of one or several joins have different partition counts; `operator` is the first
    such join.
    """

    # The streams of the first join, and their partition counts.
    counts: tuple[tuple[str, int | None], ...] = ()
    # Each such join: its id and counts.
    conflicts: tuple[tuple[str, tuple[tuple[str, int | None], ...]], ...] = ()


class OperatorFailedError(PermanentError):
    """An expression or a function of the application failed, for a record or when it was called."""

    file: str | None = None  # of the user's code that failed, or where the operator is declared
    line: int | None = None
    partition: int | None = None
    offset: str | None = None
    record: str | None = None  # a sample, with *** for sensitive values


class ExpectationError(OperatorFailedError):
    """A record does not meet an expectation with on_fail="fail"; the batch writes nothing."""

    expectation: str | None = None  # its name


class TableError(PermanentError):
    """A table rejected a request permanently."""

    keys: tuple[object, ...] = ()  # of the entries that it rejected
    budget: str | None = None  # the rate limit that tables share
    function: str | None = None  # the user's function, or its class


class RecordNotFoundError(TableError):
    """An update found no record for its key: `keys` are those without a record."""


class TableAccessError(TableError):
    """The table's server refused the connection or the credentials, or lacks the table."""


class TableNotFoundError(TableAccessError):
    """The store has no such table or file."""


class TableReplacedError(TableNotFoundError):
    """The store's table is not the one that was written: it is new, was truncated, or comes from an
    older backup.

    `loss` says which: "replaced", "truncated", "marks" (those of conditions are gone) or "older".
    """

    loss: str | None = None


class StoreUnavailableError(TransientError):
    """The object store did not answer, or asked to slow down.

    `without_effect` is True where the request surely changed nothing, as on a full disk; None if
    that is not known.
    """

    without_effect: bool | None = None


class StreamUnavailableError(TransientError):
    """A stream's servers, or services that they depend on, are temporarily unreachable."""

    system: str | None = None


class ApplicationBusyError(TransientError):
    """Another run of the application is active and did not end in the time that this one waited
    for it.
    """

    run: str | None = None  # the active one


class RunLeaseLostError(TransientError):
    """A run stopped because it lost its lease on the application, so that another run may have
    started.
    """

    run: str | None = None  # the one that stopped


class SourceChangedError(TransientError):
    """Files of a source were replaced or removed between being listed and being read."""

    file: str | None = None  # its URL


class TableUnavailableError(TransientError):
    """The table's server is busy, restarting or temporarily unreachable."""


# Errors of the local file system.

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# What concerns the files and limits of this process, wherever it was raised.
OF_FILES = (*DISK_FULL_ERRNOS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EROFS)
# Below these, a file system is short of room or of inodes. What was refused may be more than what
# is free, and what failed has freed its own by the time somebody looks.
_SHORT_OF_BYTES = 64 * 1024
_SHORT_OF_INODES = 16
_FILES_AT_ONCE = 4  # that a library opens for one of its own: SQLite the log and its index, too
# Permanent until somebody changes permissions, paths or limits. Other errors (a full or failing
# disk) may pass.
REFUSED_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EMFILE,
)


def needs_action(error: BaseException | None) -> bool:
    """Whether the error, or a cause of it, passes only once somebody has acted."""
    while error is not None:
        if isinstance(error, TransientError) and error.needs_action:
            return True
        if isinstance(error, OSError) and needs_room(error):
            return True
        error = error.__cause__
    return False


class FileProblem(NamedTuple):
    """The reason of an error of the file system, and what to do about it."""

    reason: str
    next_step: str


# What to do about errors that no access of the user helps with.
_FILE_STEPS = {
    errno.EMFILE: (
        "Let this process have more open files: ulimit -n 4096, or LimitNOFILE= of its service."
    ),
    errno.ENFILE: "Let this machine have more open files (fs.file-max), then run it again.",
    errno.EFBIG: "Let this process write larger files: ulimit -f, or LimitFSIZE= of a service.",
    errno.EDQUOT: (
        "Make room or raise the quota of this user, then run it again. What was committed is kept."
    ),
    errno.ENOSPC: "Make room on that disk, then run it again. What was committed is kept.",
}


def describe_file_error(error: OSError, place: str | Path) -> FileProblem:
    """Return the reason of an error of the file system at `place`, and what to do about it.

    The next step depends on the kind of error: a limit, a refused access, or else perhaps the disk.
    """
    reason = os.strerror(error.errno) if error.errno else error.strerror or str(error)
    if error.errno == errno.ENOSPC and _lacks_inodes(place):
        reason = f"{reason}: no inode is free, though there may be room"
    if error.errno in _FILE_STEPS:
        return FileProblem(reason, _FILE_STEPS[error.errno])
    if error.errno in (*REFUSED_ERRNOS, errno.ENOENT):
        step = (
            "Give this user read and write access, or choose another path (for temporary files:"
            " TMPDIR)."
        )
    else:
        step = (
            "Check whether the disk is full or failing, then run it again. What was committed is"
            " kept."
        )
    return FileProblem(reason, step)


def _lacks_inodes(place: str | Path) -> bool:
    """Whether the file system at `place` can't store another file although it may have room."""
    found = _read_file_system(place)
    if found is None or found.f_files == 0:  # some file systems have no such limit
        return False
    has_room = found.f_bavail * found.f_frsize >= _SHORT_OF_BYTES
    return found.f_favail == 0 or (has_room and found.f_favail < _SHORT_OF_INODES)


def _read_file_system(place: str | Path) -> os.statvfs_result | None:
    """Return the facts of the file system at `place`, or at the nearest folder above it that can be
    asked; None if none can.
    """
    for folder in (Path(place), *Path(place).parents):
        try:
            return os.statvfs(folder)
        except OSError:
            continue
    return None


def find_file_error(path: str | Path) -> OSError | None:
    """Return what keeps this process from writing the file at `path` now, None if nothing is found.

    For libraries that do not report the error of the file system. Opens no file: closing one would
    release the locks that this process has on it.
    """
    folder = Path(path).parent
    opened: list[int] = []
    try:
        while len(opened) < _FILES_AT_ONCE:  # whether this process may open so many
            opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        found = os.statvfs(folder)
        # of the file, and of those that a library keeps beside it
        largest = max(
            (each.stat().st_size for each in folder.glob(f"{Path(path).name}*")), default=0
        )
        places = [each for each in (Path(path), folder) if each.exists()]
    except OSError as error:
        return error
    finally:
        for each in opened:
            os.close(each)
    if found.f_flag & os.ST_RDONLY:
        return OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not all(os.access(each, os.R_OK | os.W_OK, effective_ids=True) for each in places):
        return OSError(errno.EACCES, os.strerror(errno.EACCES))
    if found.f_bavail * found.f_frsize < _SHORT_OF_BYTES or _lacks_inodes(folder):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest + _SHORT_OF_BYTES > limit:
        return OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return None


def file_error(error: OSError, place: str | Path, what: str) -> AdjunctError:
    """Return Adjunct's error for an error of the file system at `place`; `what` names the
    operation.

    It is a ConfigurationError where access is denied, the path is wrong or the process has too many
    files open, and else a StoreUnavailableError, which is transient.
    """
    reason, step = describe_file_error(error, place)
    if error.errno in (*REFUSED_ERRNOS, errno.ENOENT):
        return ConfigurationError(
            f"{what}: {place} can't be accessed: {reason}.", step, url=str(place)
        )
    return StoreUnavailableError(
        f"{what}: the file system failed at {place}: {reason}.",
        step,
        url=str(place),
        needs_action=needs_room(error),
    )


def needs_room(error: OSError) -> bool | None:
    """Return True for an error of a full disk, a quota or a limit of files' sizes, None for others:
    the field `needs_action` of ours.
    """
    return True if error.errno in (*DISK_FULL_ERRNOS, errno.EFBIG) else None


@contextmanager
def translate_file_errors(place: str | Path, what: str) -> Iterator[None]:
    """Raise errors of the file system as `file_error` translates them."""
    try:
        yield
    except OSError as error:
        raise file_error(error, place, what) from error


def raise_first(errors: Sequence[Exception], *, describe: Callable[[Exception], str] = str) -> None:
    """Raise the first of the errors, if there are any, with a note for each of the others."""
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"Also: {describe(other)}")
        raise first


# The errors of key-value tables.
#
# PermanentError
# |-- KeyValueTableError           also: a request that a table can't take
# |   |-- ScopeNotFoundError, ScopeNotEmptyError
# |   |-- KeyValueTableNotFoundError   no such table, or it was deleted since it was opened
# |   |-- KeyValueTableExistsError     a table of this name has another configuration
# |   |-- KeyValueTableSealedError     reads continue, writes are rejected
# |   |-- KeyTooLongError, ValueTooLongError, BatchTooLargeError   found before anything is sent
# |   |-- ConditionsNotMetError        nothing was changed; `failures` has each key's version
# |   |-- OutcomeUnknownError          the store did not report whether a write happened
# |   |-- IteratorStateError           the state of another iteration, or no state at all
# |   `-- SerializationError           a key or value that its serializer rejects or can't read
# TransientError
# `-- TableUnavailableError            (of all tables) nothing happened: the same call may succeed
#                                      later


class KeyValueTableError(PermanentError):
    """A request that a key-value table or the table manager rejects."""

    scope: str | None = None
    family: str | None = None  # of keys; the beginning of a long one

    def of_family(self, family: object) -> Self:
        """Set the `family` field of this error unless it is set already; return the error."""
        if self.family is None and family is not None:
            self.family = family[:80] if isinstance(family, str) else f"{family!r:.80}"
        return self


class ScopeNotFoundError(KeyValueTableError):
    """No scope has this name."""


class ScopeNotEmptyError(KeyValueTableError):
    """The scope can't be deleted because it holds tables."""


class KeyValueTableNotFoundError(KeyValueTableError):
    """No table has this name, or it was deleted since it was opened."""


class KeyValueTableExistsError(KeyValueTableError):
    """A table of this name exists, with another configuration."""


class KeyValueTableSealedError(KeyValueTableError):
    """The table is sealed: it can be read but not written. Nothing was changed."""


class KeyTooLongError(KeyValueTableError):
    """A key, with its family, has more bytes than the table or its backend accepts. Nothing was
    sent.
    """

    size: int | None = None  # in bytes


class ValueTooLongError(KeyValueTableError):
    """A value has more bytes than the table or its backend accepts. Nothing was sent."""

    size: int | None = None  # in bytes


class BatchTooLargeError(KeyValueTableError):
    """A batch has more changes, or more bytes, than the backend applies at once. Nothing was
    sent.
    """

    changes: int | None = None  # how many
    size: int | None = None  # of keys and values, in bytes


@dataclass(frozen=True, slots=True)
class FailedCondition:
    """A key whose condition does not hold: the versions are `KeyVersion`s, None means "no such
    key".
    """

    family: str | None
    key: Any
    expected: Any
    found: Any


class ConditionsNotMetError(KeyValueTableError):
    """Conditions of a write do not hold, so none of it was applied: re-read and decide again."""

    failures: tuple[FailedCondition, ...] = ()


class OutcomeUnknownError(KeyValueTableError):
    """A write was sent, and it is unknown whether it was applied: read before acting again."""


class IteratorStateError(KeyValueTableError):
    """The state belongs to another table, kind of iteration, family or range, or is not an
    iterator state.
    """


class SerializationError(KeyValueTableError):
    """A key or value that its serializer rejects, or stored bytes that it can't read."""

    serializer: str | None = None  # its class, or the format that it reads

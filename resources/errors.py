"""The errors that Adjunct raises on purpose, as one tree.

    AdjunctError
    |-- PermanentError                 the same call fails again: change something first
    |   |-- ConfigurationError         a setting, a name, a declaration
    |   |   `-- InvalidNameError
    |   |-- SchemaMismatchError        data or a declaration does not fit the schema
    |   |-- NullKeyError               a null where a key is needed
    |   |-- MalformedDocumentError     a pointer, manifest or index that can't be read
    |   |-- ManifestMismatchError      stored objects differ from what the manifest lists
    |   |-- ConditionalWritesUnsupportedError, ObjectNotFoundError
    |   |-- ObjectExistsError          put-if-absent met an object
    |   |-- PreconditionFailedError    put-if-match met another ETag
    |   |-- CommitConflictError        somebody else committed: re-read and decide again
    |   |-- CommitStateUnknownError    the store never said whether the commit happened
    |   |-- ProducerConflictError      one producer and sequence, two different contents
    |   |-- LakeNotFoundError          no lake is where one is to be read
    |   |-- MetadataMovedError         a lake's metadata are kept elsewhere since it was opened
    |   |-- StreamNotFoundError, StreamExistsError, OffsetOutOfRangeError
    |   |-- StillReadError             something still reads what was to be deleted or rewritten
    |   |-- DatasetNotFoundError, NoSealedVersionError, MarkerConflictError, DatasetError
    |   |-- VersionDiscardedError, LeaseLostError, ValidatorError, BadChangeError, StaleDatasetError
    |   |-- PlanningError, PartitionCountMismatchError
    |   |-- OperatorFailedError        an expression or a function of the application failed
    |   `-- TableError, RecordNotFoundError, TableAccessError
    `-- TransientError                 the same call may succeed later: retry it
        |-- StoreUnavailableError, StreamUnavailableError
        |-- ApplicationBusyError       another run of the application works: wait for its end
        |-- RunLeaseLostError          the run could not show any more that it lives, or was taken over
        |-- SourceChangedError         files were replaced while they were read
        `-- TableUnavailableError

Every message names the thing, what was found, what was expected and the next step. The same things are fields, so that
nobody has to read them from the text; one that is not known where the error was raised is None, and a stream is named
with its system. Retry logic looks at `TransientError` only: whoever adds an error decides there whether it is retried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Self

# What follows the colon is a password, unless it is a port and a path behind it. Some write a slash in a password.
_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@(?=[\w\[])")


def without_passwords(text: str) -> str:
    """Return a text in which URLs have no login any more: `***` stands for user and password."""
    return _LOGIN.sub(r"\1***@", text)


@dataclass(eq=False, repr=False)
class AdjunctError(Exception):
    """Base of all errors that Adjunct raises on purpose.

    `problem` says what was found where; `next_step` says what to do about it. Classes below add what they are about, as
    fields that are given by name.
    """

    problem: str
    next_step: str = ""

    def __post_init__(self) -> None:
        # What others say, such as a driver that did not reach its server, may quote a URL with its password.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                setattr(self, field.name, without_passwords(value))
        super().__init__(f"{self.problem} {self.next_step}" if self.next_step else self.problem)

    @property
    def facts(self) -> dict[str, Any]:
        """What the error is about: its fields that are known, by name, besides the two texts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def reworded(self, problem: str, next_step: str, **more: Any) -> Self:
        """Return the same error, about the same things and `more` of them, in other words."""
        return type(self)(problem, next_step, **self.facts | more)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Spark workers): without a call of the constructor, subclasses with one of
        # their own travel too.
        return _rebuild, (type(self), *self.args), self.__dict__


def _rebuild(kind: type[AdjunctError], *args: object) -> AdjunctError:
    return kind.__new__(kind, *args)


class PermanentError(AdjunctError):
    """The same call fails again until something is changed."""


class TransientError(AdjunctError):
    """The same call may succeed later."""


@dataclass(eq=False, repr=False, kw_only=True)
class ConfigurationError(PermanentError):
    """A setting, a name or a declaration that can't work; the fields say of what, as far as it is one of them."""

    argument: str | None = None  # the parameter of a function, or the field of a declaration, that has a wrong value
    setting: str | None = None  # an option of a command, a setting of a client, or an environment variable, as written
    application: str | None = None
    dataset: str | None = None
    stream: str | None = None
    table: str | None = None


def check_whole_number(
    value: object, what: str, expected: str, *, argument: str, least: int = 1, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected `expected`.", unless `value` is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)


_ENDLESS = 1e12  # seconds: beyond it clocks and stores can't count


def check_seconds(
    value: object, what: str, *, argument: str, none: bool = False, zero: bool = False, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected seconds above 0.", unless `value` is such a number and finite.

    `none`: it may be None; `zero`: it may be 0.
    """
    if value is None and none:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _ENDLESS
    if not number or (value == 0 and not zero):
        expected = ("seconds from 0 on" if zero else "seconds above 0") + (", or None" if none else "")
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)


class InvalidNameError(ConfigurationError):
    """A name that is not safe as part of a path or key."""


@dataclass(eq=False, repr=False, kw_only=True)
class SchemaMismatchError(PermanentError):
    """Data, or a declaration, does not fit the schema."""

    dataset: str | None = None
    column: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class NullKeyError(PermanentError):
    """A record without a key where one is needed."""

    dataset: str | None = None
    table: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class MalformedDocumentError(PermanentError):
    """A stored pointer, manifest or index that can't be read as what it should be."""

    document: str | None = None  # what it is, and its key


@dataclass(eq=False, repr=False, kw_only=True)
class ManifestMismatchError(PermanentError):
    """The stored objects are not exactly those that the manifest lists."""

    dataset: str | None = None
    version: str | None = None  # its id
    key: str | None = None  # of the object


class ConditionalWritesUnsupportedError(PermanentError):
    """The object store accepts conditional writes but does not honour them."""


@dataclass(eq=False, repr=False, kw_only=True)
class ObjectNotFoundError(PermanentError):
    """No object has this key."""

    key: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ObjectExistsError(PermanentError):
    """`put_if_absent` met an object that is there already."""

    key: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class PreconditionFailedError(PermanentError):
    """`put_if_match` met an object with another ETag, or none."""

    key: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class CommitConflictError(PermanentError):
    """Somebody else committed first: nothing of ours is visible. Re-read and decide again."""

    prefix: str | None = None  # of the log of commits in the lake, where nothing more is known
    dataset: str | None = None
    stream: str | None = None
    application: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class CommitStateUnknownError(PermanentError):
    """The store never answered whether our commit happened: read the current state before acting."""

    prefix: str | None = None  # of the log of commits in the lake


@dataclass(eq=False, repr=False, kw_only=True)
class ProducerConflictError(PermanentError):
    """One producer and sequence came twice, with different contents."""

    stream: str | None = None
    producer: str | None = None
    sequence: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class LakeNotFoundError(PermanentError):
    """Nothing has been written to the lake yet, or it is somewhere else."""

    url: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class MetadataMovedError(PermanentError):
    """The lake keeps its metadata elsewhere since it was opened: in a key-value table, or not in it any more."""


@dataclass(eq=False, repr=False, kw_only=True)
class StreamNotFoundError(PermanentError):
    """No stream has this name."""

    stream: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class StreamExistsError(PermanentError):
    """A stream of this name exists and is declared otherwise."""

    stream: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class OffsetOutOfRangeError(PermanentError):
    """An offset that the stream does not hold, or not any more."""

    stream: str | None = None
    partition: int | None = None
    offset: str | None = None
    oldest: str | None = None  # the first offset that there is
    upcoming: str | None = None  # the next one that will be written
    dataset: str | None = None  # which reads there
    application: str | None = None  # which reads there


@dataclass(eq=False, repr=False, kw_only=True)
class StillReadError(PermanentError):
    """Something still reads what was to be deleted or rewritten."""

    stream: str | None = None
    dataset: str | None = None
    readers: tuple[str, ...] = ()  # in words


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetError(PermanentError):
    """A dataset that can't be built or read as declared."""

    dataset: str | None = None
    version: str | None = None  # its id, or the name that it was delivered under where it has no id yet


class DatasetNotFoundError(DatasetError):
    """No dataset has this name."""


class NoSealedVersionError(DatasetError):
    """The dataset has no sealed version (or finished bootstrap) yet."""


class VersionDiscardedError(DatasetError):
    """The version is not retained any more."""


class StaleDatasetError(DatasetError):
    """The dataset has not read changes that are older than its reader allows: advance it first."""


class LeaseLostError(DatasetError):
    """What was read may have been deleted meanwhile: the lease on it was lost."""


@dataclass(eq=False, repr=False, kw_only=True)
class MarkerConflictError(DatasetError):
    """An end-of-dataset marker contradicts a version that is sealed, or the records before it."""

    expected: str | None = None  # what the marker says: a number of rows, or a checksum
    found: str | None = None  # what was counted


class BadChangeError(DatasetError):
    """A change on a stream that can't be applied: it can't be read, has no key, or says nothing that is known."""


@dataclass(eq=False, repr=False, kw_only=True)
class ValidatorError(DatasetError):
    """A validator that can't be evaluated, because of a mistake in it: that says nothing of the version."""

    validator: str | None = None  # its name


@dataclass(eq=False, repr=False, kw_only=True)
class PlanningError(PermanentError):
    """The application can't be planned."""

    application: str | None = None
    operator: str | None = None
    dataset: str | None = None
    stream: str | None = None
    column: str | None = None
    declared_at: str | None = None  # the line of the user's file that made the operator: "visits.py:12"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.declared_at is not None:
            self.args = (f"{self.declared_at}: {self.args[0]}",)


@dataclass(eq=False, repr=False, kw_only=True)
class PartitionCountMismatchError(PlanningError):
    """Streams of one join, or of several, have partition counts that can't agree; `operator` is the first such join."""

    counts: tuple[tuple[str, int | None], ...] = ()  # the streams of the first that must agree, and their partitions
    conflicts: tuple[tuple[str, tuple[tuple[str, int | None], ...]], ...] = ()  # of every such join: its id, its counts


@dataclass(eq=False, repr=False, kw_only=True)
class OperatorFailedError(PermanentError):
    """An expression or a function of the application failed: over a record, or where it was called."""

    application: str | None = None
    operator: str | None = None
    file: str | None = None  # of the user's code that failed, or where the operator is declared
    line: int | None = None
    stream: str | None = None  # that the record's position is in
    partition: int | None = None
    offset: str | None = None
    record: str | None = None  # a sample in words, with *** for what is sensitive


@dataclass(eq=False, repr=False, kw_only=True)
class TableError(PermanentError):
    """A table refused a request for good."""

    table: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RecordNotFoundError(TableError):
    """An update met no record."""

    keys: tuple[object, ...] = ()  # those without one


class TableAccessError(TableError):
    """The table's server refused the connection or the credentials, or lacks the table."""


@dataclass(eq=False, repr=False, kw_only=True)
class StoreUnavailableError(TransientError):
    """The object store did not answer, or asked to slow down."""

    key: str | None = None  # of the object


@dataclass(eq=False, repr=False, kw_only=True)
class StreamUnavailableError(TransientError):
    """A stream's servers, or what they depend on, are out of reach for a moment."""

    system: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ApplicationBusyError(TransientError):
    """Another run of the application is alive, and was not over in the time that this one waited for it."""

    application: str | None = None
    run: str | None = None  # the one that is alive


@dataclass(eq=False, repr=False, kw_only=True)
class RunLeaseLostError(TransientError):
    """A run's lease on its application was lost, so that another one may have begun: it stopped."""

    application: str | None = None
    run: str | None = None  # the one that stopped


@dataclass(eq=False, repr=False, kw_only=True)
class SourceChangedError(TransientError):
    """Files of a source were replaced or removed between being listed and being read."""

    dataset: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class TableUnavailableError(TransientError):
    """The table's server is busy, restarting or out of reach for a moment."""

    table: str | None = None

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
    |   |-- StreamNotFoundError, StreamExistsError, OffsetOutOfRangeError
    |   |-- StillReadError             something still reads what was to be deleted or rewritten
    |   |-- DatasetNotFoundError, NoSealedVersionError, MarkerConflictError, DatasetError
    |   |-- VersionDiscardedError, LeaseLostError, ValidatorError, BadChangeError, StaleDatasetError
    |   |-- PlanningError, PartitionCountMismatchError
    |   |-- OperatorFailedError        an expression or a function of the application failed
    |   `-- TableError, RecordNotFoundError, TableAccessError, TableNotFoundError
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

# What follows the colon is a password, unless it is a port and a path behind it. Some write a slash in a password.
_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@(?=[\w\[])")


def redact_passwords(text: str) -> str:
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
                setattr(self, field.name, redact_passwords(value))
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
    operator: str | None = None
    column: str | None = None
    system: str | None = None  # of streams
    topic: str | None = None  # of Kafka
    backend: str | None = None  # of tables, as it is registered
    url: str | None = None  # of a lake, a server or a place with files
    key: str | None = None  # of an object, or of an entry
    module: str | None = None  # of the user's code
    package: str | None = None  # that is not installed


@dataclass(eq=False, repr=False, kw_only=True)
class InvalidNameError(ConfigurationError):
    """A name that is not safe as part of a path or key."""

    name: str | None = None  # as it was given


@dataclass(eq=False, repr=False, kw_only=True)
class SchemaMismatchError(PermanentError):
    """Data, or a declaration, does not fit the schema."""

    dataset: str | None = None
    column: str | None = None
    stream: str | None = None
    table: str | None = None
    operator: str | None = None
    file: str | None = None  # its URL
    line: int | None = None  # of the file, counted from 1; of Parquet the row
    row: int | None = None  # of the records that were given, counted from 0
    url: str | None = None  # of a schema registry
    argument: str | None = None  # of a function, or of a declaration, that does not fit


@dataclass(eq=False, repr=False, kw_only=True)
class NullKeyError(PermanentError):
    """A record without a key where one is needed."""

    dataset: str | None = None
    table: str | None = None
    column: str | None = None
    operator: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class MalformedDocumentError(PermanentError):
    """A stored pointer, manifest or index that can't be read as what it should be."""

    document: str | None = None  # what it is, and its key
    dataset: str | None = None
    stream: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ManifestMismatchError(PermanentError):
    """The stored objects are not exactly those that the manifest lists."""

    dataset: str | None = None
    version: str | None = None  # its id
    key: str | None = None  # of the object
    stream: str | None = None
    url: str | None = None  # of the object, where Spark could not read it
    partition_by: str | None = None  # the columns by which rows should have been partitioned, and were not


@dataclass(eq=False, repr=False, kw_only=True)
class ConditionalWritesUnsupportedError(PermanentError):
    """The object store accepts conditional writes but does not honour them."""

    url: str | None = None  # of the store


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
    dataset: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ProducerConflictError(PermanentError):
    """One producer and sequence came twice, with different contents, or with contents that are not known any more."""

    stream: str | None = None
    producer: str | None = None
    sequence: int | None = None
    newest: int | None = None  # sequence of the producer, as far as it is known


@dataclass(eq=False, repr=False, kw_only=True)
class LakeNotFoundError(PermanentError):
    """Nothing has been written to the lake yet, or it is somewhere else."""

    url: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
@dataclass(eq=False, repr=False, kw_only=True)
class StreamNotFoundError(PermanentError):
    """No stream has this name."""

    stream: str | None = None
    system: str | None = None


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
    column: str | None = None
    function: str | None = None  # of the user's, or an expression, as it is declared
    stream: str | None = None  # whose files were to be handed over, or that lacks something


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
    budget: str | None = None  # of rates, which tables share
    function: str | None = None  # of the user's, or its class


@dataclass(eq=False, repr=False, kw_only=True)
class RecordNotFoundError(TableError):
    """An update met no record."""

    keys: tuple[object, ...] = ()  # those without one


class TableAccessError(TableError):
    """The table's server refused the connection or the credentials, or lacks the table."""


class TableNotFoundError(TableAccessError):
    """The store has no such table, or there is no such file."""


@dataclass(eq=False, repr=False, kw_only=True)
class StoreUnavailableError(TransientError):
    """The object store did not answer, or asked to slow down."""

    key: str | None = None  # of the object
    url: str | None = None  # of the store, or of the object
    table: str | None = None  # that holds what is asked for


@dataclass(eq=False, repr=False, kw_only=True)
class StreamUnavailableError(TransientError):
    """A stream's servers, or what they depend on, are out of reach for a moment."""

    system: str | None = None
    stream: str | None = None
    url: str | None = None  # of a schema registry


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
    file: str | None = None  # its URL


@dataclass(eq=False, repr=False, kw_only=True)
class TableUnavailableError(TransientError):
    """The table's server is busy, restarting or out of reach for a moment."""

    table: str | None = None


def raise_first(errors: Sequence[Exception], *, words: Callable[[Exception], str] = str) -> None:
    """Raise the first of these errors, if there are any, with a note for each of the others."""
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"Also: {words(other)}")
        raise first


# What can go wrong with key-value tables, below the errors of everything else.
#
# PermanentError
# |-- KeyValueTableError           also: a request that a table can't take
# |   |-- ScopeNotFoundError, ScopeNotEmptyError
# |   |-- KeyValueTableNotFoundError   no such table, or it was deleted (and maybe created anew) since it was opened
# |   |-- KeyValueTableExistsError     a table of this name has another configuration
# |   |-- KeyValueTableSealedError     reads go on, writes are refused
# |   |-- KeyTooLongError, ValueTooLongError, BatchTooLargeError   found before anything is sent
# |   |-- ConditionsNotMetError        nothing was changed; `failures` tells each key with the version found
# |   |-- OutcomeUnknownError          the store never said whether a write happened
# |   |-- IteratorStateError           the state of another iteration, or none
# |   `-- SerializationError           a key or value that its serializer does not take, or can't read
# TransientError
# `-- TableUnavailableError            (of all tables) nothing happened: the same call may succeed later


@dataclass(eq=False, repr=False, kw_only=True)
class KeyValueTableError(PermanentError):
    """A request that a key-value table, or their manager, refuses; the fields say of what, as far as it is known."""

    scope: str | None = None
    table: str | None = None
    family: str | None = None  # of keys; the beginning of a long one

    def of_family(self, family: object) -> Self:
        """Return the error, which names this family if it named none."""
        if self.family is None and family is not None:
            self.family = family[:80] if isinstance(family, str) else f"{family!r:.80}"
        return self


class ScopeNotFoundError(KeyValueTableError):
    """No scope has this name."""


class ScopeNotEmptyError(KeyValueTableError):
    """The scope that was to be deleted holds tables."""


class KeyValueTableNotFoundError(KeyValueTableError):
    """No table has this name, or it was deleted since it was opened."""


class KeyValueTableExistsError(KeyValueTableError):
    """A table of this name exists, with another configuration."""


class KeyValueTableSealedError(KeyValueTableError):
    """The table is sealed: it is read, and not written any more. Nothing was changed."""


@dataclass(eq=False, repr=False, kw_only=True)
class KeyTooLongError(KeyValueTableError):
    """A key, or a family with it, has more bytes than the table or its backend takes. Nothing was sent."""

    size: int | None = None  # in bytes


@dataclass(eq=False, repr=False, kw_only=True)
class ValueTooLongError(KeyValueTableError):
    """A value has more bytes than the table or its backend takes. Nothing was sent."""

    size: int | None = None  # in bytes


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTooLargeError(KeyValueTableError):
    """A batch has more changes, or more bytes, than the backend applies at once. Nothing was sent."""

    changes: int | None = None  # how many
    size: int | None = None  # of keys and values, in bytes


@dataclass(frozen=True, slots=True)
class FailedCondition:
    """One key of a write whose condition does not hold: the versions are `KeyVersion`s, None is "no such key"."""

    family: str | None
    key: Any
    expected: Any
    found: Any


@dataclass(eq=False, repr=False, kw_only=True)
class ConditionsNotMetError(KeyValueTableError):
    """Conditions of a write do not hold, so that nothing of it was applied. Look again and decide again."""

    failures: tuple[FailedCondition, ...] = ()


class OutcomeUnknownError(KeyValueTableError):
    """A write was sent, and whether it was applied could not be found out: read before acting again."""


class IteratorStateError(KeyValueTableError):
    """The state belongs to another table, kind of iteration, family or range, or is none."""


@dataclass(eq=False, repr=False, kw_only=True)
class SerializationError(KeyValueTableError):
    """A key or value that its serializer does not take, or stored bytes that it can't read."""

    serializer: str | None = None  # its class, or what it reads

"""The errors that Adjunct raises on purpose, as one tree.

    AdjunctError
    |-- PermanentError                 the same call fails again: change something first
    |   |-- ConfigurationError         a setting, a name, a declaration
    |   |   `-- InvalidNameError
    |   |-- SchemaMismatchError        data or a declaration does not fit the schema
    |   |-- NullKeyError               a null where a key is needed
    |   |-- MalformedDocumentError     a pointer, manifest or index that can't be read
    |   |-- ManifestMismatchError      stored objects differ from what the manifest lists
    |   |-- ConditionalWritesUnsupportedError
    |   |-- ObjectNotFoundError
    |   |-- ObjectExistsError          put-if-absent met an object
    |   |-- PreconditionFailedError    put-if-match met another ETag
    |   |-- CommitConflictError          somebody else committed: re-read and decide again
    |   |-- CommitStateUnknownError      the store never said whether the commit happened
    |   |-- ProducerConflictError        one producer and sequence, two different contents
    |   |-- LakeNotFoundError          no lake is where one is to be read
    |   |-- StreamNotFoundError, StreamExistsError, OffsetOutOfRangeError
    |   |-- StillReadError             something still reads what was to be deleted or rewritten
    |   |-- DatasetNotFoundError, NoSealedVersionError, MarkerConflictError, DatasetError
    |   |-- VersionDiscardedError, LeaseLostError, ValidatorError, BadChangeError, StaleDatasetError
    |   |-- PlanningError, PartitionCountMismatchError
    |   `-- TableError, RecordNotFoundError, TableAccessError
    `-- TransientError                 the same call may succeed later: retry it
        |-- StoreUnavailableError
        |-- StreamUnavailableError
        |-- ApplicationBusyError       another run of the application works: wait for its end
        |-- RunLeaseLostError          the run could not show any more that it lives, or was taken over
        |-- SourceChangedError         files were replaced while they were read
        `-- TableUnavailableError

Every message names the thing, what was found, what was expected and the next step. Retry logic
looks at `TransientError` only, so whoever adds an error decides there whether it is retried.
"""

from __future__ import annotations

import re
from typing import Any

# What follows the colon is a password, unless it is a port and a path behind it. Some write a slash in a password.
_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@(?=[\w\[])")


def without_passwords(text: str) -> str:
    """Return a text in which URLs have no login any more: `***` stands for user and password."""
    return _LOGIN.sub(r"\1***@", text)


class AdjunctError(Exception):
    """Base of all errors that Adjunct raises on purpose.

    `problem` says what was found where; `next_step` says what to do about it.
    """

    def __init__(self, problem: str, next_step: str = "") -> None:
        # What others say, such as a driver that did not reach its server, may quote a URL with its password.
        self.problem = without_passwords(problem)
        self.next_step = without_passwords(next_step)
        super().__init__(f"{self.problem} {self.next_step}" if next_step else self.problem)

    def __reduce__(self) -> tuple[type[AdjunctError], tuple[str, str], dict[str, object]]:
        # Errors cross process borders (Spark workers): keep both parts apart when pickled, and let
        # subclasses with constructors of their own travel too.
        return (_rebuild, (self.problem, self.next_step), {"cls": type(self), **self.__dict__})  # type: ignore[return-value]

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        state = dict(state or {})
        self.__class__ = state.pop("cls", type(self))
        self.__dict__.update(state)


def _rebuild(problem: str, next_step: str) -> AdjunctError:
    return AdjunctError(problem, next_step)


class PermanentError(AdjunctError):
    """The same call fails again until something is changed."""


class TransientError(AdjunctError):
    """The same call may succeed later."""


class ConfigurationError(PermanentError):
    """A setting or declaration that can't work."""


class InvalidNameError(ConfigurationError):
    """A name that is not safe as part of a path or key."""


class SchemaMismatchError(PermanentError):
    """Data, or a declaration, does not fit the schema."""


class NullKeyError(PermanentError):
    """A record without a key where one is needed."""


class MalformedDocumentError(PermanentError):
    """A stored pointer, manifest or index that can't be read as what it should be."""


class ManifestMismatchError(PermanentError):
    """The stored objects are not exactly those that the manifest lists."""


class ConditionalWritesUnsupportedError(PermanentError):
    """The object store accepts conditional writes but does not honour them."""


class ObjectNotFoundError(PermanentError):
    """No object has this key."""


class ObjectExistsError(PermanentError):
    """`put_if_absent` met an object that is there already."""


class PreconditionFailedError(PermanentError):
    """`put_if_match` met an object with another ETag, or none."""


class CommitConflictError(PermanentError):
    """Somebody else committed first: nothing of ours is visible. Re-read and decide again."""


class CommitStateUnknownError(PermanentError):
    """The store never answered whether our commit happened: read the current state before acting."""


class ProducerConflictError(PermanentError):
    """One producer and sequence came twice, with different contents."""


class LakeNotFoundError(PermanentError):
    """Nothing has been written to the lake yet, or it is somewhere else."""


class StreamNotFoundError(PermanentError):
    """No stream has this name."""


class StreamExistsError(PermanentError):
    """A stream of this name exists and is declared otherwise."""


class OffsetOutOfRangeError(PermanentError):
    """An offset that the stream does not hold, or not any more."""


class StillReadError(PermanentError):
    """Something still reads what was to be deleted or rewritten."""


class DatasetError(PermanentError):
    """A dataset that can't be built or read as declared."""


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


class MarkerConflictError(DatasetError):
    """An end-of-dataset marker contradicts a version that is sealed, or the records before it."""


class BadChangeError(DatasetError):
    """A change on a stream that can't be applied: it can't be read, has no key, or says nothing that is known."""


class ValidatorError(DatasetError):
    """A validator that can't be evaluated, because of a mistake in it: that says nothing of the version.

    `dataset` and `validator` are their names.
    """

    def __init__(self, problem: str, next_step: str = "", *, dataset: str = "", validator: str = "") -> None:
        super().__init__(problem, next_step)
        self.dataset = dataset
        self.validator = validator


class PlanningError(PermanentError):
    """The application can't be planned."""


class PartitionCountMismatchError(PlanningError):
    """Streams of one join have partition counts that can't agree."""


class TableError(PermanentError):
    """A table refused a request for good."""


class RecordNotFoundError(TableError):
    """An update met no record. `keys` names those without one."""

    def __init__(self, problem: str, next_step: str = "", keys: tuple[object, ...] = ()) -> None:
        super().__init__(problem, next_step)
        self.keys = keys


class TableAccessError(TableError):
    """The table's server refused the connection or the credentials, or lacks the table."""


class StoreUnavailableError(TransientError):
    """The object store did not answer, or asked to slow down."""


class StreamUnavailableError(TransientError):
    """A stream's servers, or what they depend on, are out of reach for a moment."""


class ApplicationBusyError(TransientError):
    """Another run of the application is alive, and was not over in the time that this one waited for it."""


class RunLeaseLostError(TransientError):
    """A run's lease on its application was lost, so that another one may have begun: it stopped."""


class SourceChangedError(TransientError):
    """Files of a source were replaced or removed between being listed and being read."""


class TableUnavailableError(TransientError):
    """The table's server is busy, restarting or out of reach for a moment."""

"""What can go wrong with key-value tables, below the errors of everything else.

PermanentError
|-- KeyValueTableError           also: a request that a table can't take
|   |-- ScopeNotFoundError, ScopeNotEmptyError
|   |-- KeyValueTableNotFoundError   no such table, or it was deleted (and maybe created anew) since it was opened
|   |-- KeyValueTableExistsError     a table of this name has another configuration
|   |-- KeyValueTableSealedError     reads go on, writes are refused
|   |-- KeyTooLongError, ValueTooLongError, BatchTooLargeError   found before anything is sent
|   |-- ConditionsNotMetError        nothing was changed; `failures` tells each key with the version found
|   |-- OutcomeUnknownError          the store never said whether a write happened
|   |-- IteratorStateError           the state of another iteration, or none
|   `-- SerializationError           a key or value that its serializer does not take, or can't read
TransientError
`-- TableUnavailableError            (of all tables) nothing happened: the same call may succeed later
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from dagster_adjunct.resources.errors import PermanentError


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

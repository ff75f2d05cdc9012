"""What a join asks of a dataset or a remote table, and the hidden columns of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dagster_adjunct.resources.schemas.paths import Path

BeforeHistory = Literal["null", "oldest", "error"]


OnNullTime = Literal["null", "fail"]


@dataclass(frozen=True, slots=True)
class AsOf:
    """The options of an as-of join, which uses the entry that was valid at the time in the record's
    `column`.

    A record from before the history of its key has no entry ("null"), the key's first entry
    ("oldest"; of a bounded dataset, the one in the oldest version, if any), or fails the batch; a
    record without a time has no entry or fails the batch.
    """

    column: str
    before_history: BeforeHistory
    on_null_time: OnNullTime


MATCHED = "__matched"
"""True if a joined record has an entry, else null."""


How = Literal["inner", "left"]


Pairs: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """A `column` of the dataset or table to add, or the path of a value in one, its `name` in the
    joined record, and its type if the user gave one.
    """

    column: str
    name: str
    type: str | None = None


ENTRY = "__entry"
"""A joined record's whole entry, as a struct."""


@dataclass(frozen=True, slots=True)
class EntryLookup:
    """A lookup in a dataset: `on` has pairs (stream column, key column) in the order of its key.

    `added` are the columns of the entry to take; with None, all of them are taken as the struct
    ENTRY. With `as_of`, the entry is the one that was valid at the record's time.
    """

    dataset: str
    on: Pairs
    added: tuple[SelectedColumn, ...] | None
    as_of: AsOf | None = None


@dataclass(frozen=True, slots=True)
class LookupColumn:
    """A value of a table's records, the `name` that it has in the joined record, and the Spark
    type of its column.
    """

    value: Path
    name: str
    column_type: str


@dataclass(frozen=True, slots=True)
class TableLookup:
    """A lookup in the remote table named `table`: `keys` are the stream's columns in the order of
    the table's key.

    `answers` are the columns to add; `args` are passed to the table's read function.
    """

    table: str
    keys: tuple[str, ...]
    answers: tuple[LookupColumn, ...]
    args: tuple[object, ...] = ()


BEFORE_HISTORY = "__before_history"
NO_TIME = "__no_time"
"""Hidden columns of joined records: whether the time is before the history of the key, and
whether it is null.
"""

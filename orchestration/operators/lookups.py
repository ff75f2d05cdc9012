"""What a join asks of a dataset or a remote table, and the hidden columns of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from dagster_adjunct.assets.reading.interval_ids import INTERVAL_ID
from dagster_adjunct.assets.reading.point_in_time import Known
from dagster_adjunct.orchestration.operators.columns import check_duration, validate_column_names
from dagster_adjunct.resources.schemas.paths import Path
from dagster_adjunct.resources.times import write_span
from dagster_adjunct.resources.validation import validated

BeforeHistory = Literal["null", "oldest", "error"]


OnNullTime = Literal["null", "fail"]


WaitBy = Literal["clock", "event time"]


Share = Annotated[float, Field(gt=0, le=1)]


@validated
@dataclass(frozen=True, slots=True)
class Wait:
    """How long records of an input wait, in their stream, until the watermark of the dataset that
    they join has passed their event time.

    A record waits at most for `at_most`: since it was written, by the clock of batches, or by
    "event time", until the input has a record that much newer in the same partition. Times further
    ahead of the clock than `at_most` are not believed, and don't make it wait. Then it is joined
    with what is known, and counted as `early`; with `mark`, a column of this name is true
    for such records.
    """

    at_most: timedelta
    by: WaitBy = "clock"
    mark: str | None = None

    def __post_init__(self) -> None:
        check_duration(self.at_most, "a join has wait", argument="wait")
        if self.mark is not None:
            validate_column_names("wait: mark=", self.mark)

    def describe(self) -> str:
        """Return a description for plans."""
        return f"at most {write_span(self.at_most)} by the {self.by}"


@validated
@dataclass(frozen=True, slots=True)
class Restate:
    """Which results of a join are corrected when entries of its dataset change: those of records
    that were written at most `age` ago, at most once in `every` (None: whenever entries change).

    A restatement of more than `most_keys` changed keys, of more than `most_records` records, or of
    more than the share `most_share` of the records of that age is an error.
    """

    age: timedelta
    every: timedelta | None = None
    most_keys: PositiveInt = 100_000
    most_records: PositiveInt = 100_000
    most_share: Share = 1.0

    def __post_init__(self) -> None:
        check_duration(self.age, "a join has restate", argument="restate")
        if self.every is not None:
            check_duration(self.every, "restate has every", argument="every")

    def describe(self) -> str:
        """Return a description for plans."""
        often = "" if self.every is None else f", at most once in {write_span(self.every)}"
        return f"records of the last {write_span(self.age)}{often}"


RESTATED = "restated"
"""The counters of what was restated: `changed_keys` of datasets, and `records` that were read again
for them.
"""


@dataclass(frozen=True, slots=True)
class AsOf:
    """The options of an as-of join, which uses the entry that was valid at the time in the record's
    `column`.

    A record from before the history of its key has no entry ("null"), the key's first entry
    ("oldest"; of a bounded dataset, the one in the oldest version, if any), or fails the batch; a
    record without a time has no entry or fails the batch. With `versions` "known-then", the entry
    is the one that the dataset served at that time; a record is then from before the history if it
    is not known any more what was served at its time.
    """

    column: str
    before_history: BeforeHistory
    on_null_time: OnNullTime
    versions: Known = "now"

    @property
    def known_then(self) -> bool:
        """Whether the entry is the one that was served at the record's time."""
        return self.versions == "known-then"


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


def selects_interval_id(selected: Iterable[SelectedColumn] | None) -> bool:
    """Whether one of the selected columns is the id of the entry's interval, or has its name."""
    if selected is None:
        return False
    return any(item.column == INTERVAL_ID for item in selected)


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

    @property
    def with_ids(self) -> bool:
        """Whether it may take the id of the entry's interval: as of a time, and if no column of the
        entries has this name.
        """
        if self.as_of is None or self.as_of.known_then:
            return False
        return selects_interval_id(self.added)


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
EARLY = "__early"
"""Hidden columns of joined records: whether the time is before the history of the key, whether it
is null, and whether the dataset was incomplete at the event time (only in joins that wait).
"""

"""`Batch`, what operators know of a batch and what they ask of it.

It has one part for each subject, generic over frames: Spark DataFrames, or the Arrow tables of a
batch that this process computes. `SparkBatch` adds what only Spark does. Operators that need Spark
are typed against `SparkBatch`; the others against `Batch`, and work with both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dagster_adjunct.assets.unbounded.local_table import StateSpec
from dagster_adjunct.orchestration.operators.calls import RecordCall, SinkFunction
from dagster_adjunct.orchestration.operators.columns import DataFrameFunction
from dagster_adjunct.orchestration.operators.lookups import EntryLookup, How, TableLookup
from dagster_adjunct.orchestration.operators.operator import Watermarks
from dagster_adjunct.orchestration.operators.stream_facts import (
    Columns,
    DeclaredApplication,
    JoinVersions,
)
from dagster_adjunct.orchestration.operators.updates import LocalSend, TableSend, Update
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Frame = TypeVar("Frame")
"""Records: a DataFrame or an Arrow table."""


class Planned(Protocol):
    """What is known of a batch before its records are read.

    `number` is the batch's number among those of the application, and `clock` its start by the
    lake's clock; a repeated batch has the same. `reading` says which versions joins use; with
    "current", as-of joins use current entries. `tasks` is the number of tasks, each of which gets a
    copy of broadcast records.
    """

    @property
    def app(self) -> DeclaredApplication: ...
    @property
    def number(self) -> int: ...
    @property
    def clock(self) -> datetime: ...
    @property
    def reading(self) -> JoinVersions: ...
    @property
    def tasks(self) -> int: ...
    def partitions_at(self, operator: str) -> int:
        """Return the planned partition count of the records that leave an operator."""

    def required_partitioning(self, operator: str) -> Sequence[str]:
        """Return the columns that records must be partitioned by after an operator; () where
        nothing relies on it.
        """

    def may_be_early(self, operator: str) -> bool:
        """Whether records of a join may be read before its dataset is complete up to their time:
        not if they waited until then, or if nothing waited when they were first read.
        """

    def known_until(self, operator: str) -> datetime | None:
        """Return the watermark of the dataset that the records of a join wait for; None for
        none.
        """

    def has_consumers(self, operator: str) -> bool:
        """Whether another operator uses the records of this one."""

    def has_diverted_consumer(self, operator: str) -> bool:
        """Whether an operator reads the records that this one diverts."""

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of an operator's records are in; None if there
        are several.
        """

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system of a stream ("system.stream"), as it was when the batch was
        planned.
        """

    def sensitive(self, operator: str, *arriving: Collection[str]) -> frozenset[str]:
        """Return the columns of an operator's input whose values must not appear in errors;
        `arriving` has the names of the columns of each input.
        """


@dataclass(frozen=True, slots=True)
class Checked:
    """Which records have failed a check: those for which the boolean column `flag` is true.

    `describe` returns the text for one, given its position (PARTITION, OFFSET and, if it has one,
    ORIGIN) and the values that the names or paths in `shown` have in it.
    """

    flag: str
    shown: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], str]


SAMPLE_SIZE = 5
"""How many failed records of a batch are described at most: the first one of those whose offsets
have the same remainder.
"""


class Records(Protocol[Frame]):
    """How records are read and changed.

    Without Spark, only the SQL expressions that `compile_expression` takes can be computed:
    operators report others beforehand (`expressions_need`).
    """

    def read(self, stream: str) -> Frame:
        """Return the batch's records of an input stream."""

    def names(self, frame: Frame) -> Sequence[str]:
        """Return the names of the records' columns, hidden ones included."""

    def columns(self, frame: Frame) -> Columns:
        """Return the records' columns with their types, without hidden ones."""

    def filter(self, frame: Frame, condition: str) -> Frame:
        """Return the records that match a Spark SQL condition."""

    def select(self, frame: Frame, expressions: Sequence[str]) -> Frame:
        """Return the records with the columns that these Spark SQL expressions give."""

    def select_update(self, frame: Frame, names: Sequence[str], update: Update) -> Frame:
        """Return the records with these (quoted) columns, and the columns UPDATE and DEFAULT of
        a partial update.
        """

    def with_columns(self, frame: Frame, columns: Sequence[tuple[str, str]]) -> Frame:
        """Return the records with these columns, pairs of a name and a Spark SQL expression,
        added or replaced.
        """

    def explode(
        self, operator: str, frame: Frame, expression: str, name: str, *, keep_empty: bool
    ) -> Frame:
        """Return a record for each element of the array or map that a Spark SQL expression gives,
        with the element as column `name`, added or replaced, and an ORDINAL.

        A record without elements is dropped, or kept with null if `keep_empty`. Raises
        PlanningError for a value of another type.
        """

    def merge(self, operator: str, frames: Sequence[Frame]) -> Frame:
        """Return the records of all inputs with the columns of the first. A hidden column that an
        input lacks is null in its records.
        """

    def repartition(self, frame: Frame, partitions: int, by: Sequence[str]) -> Frame:
        """Return the records in partitions by these columns."""

    def materialize(self, operator: str, frame: Frame) -> Frame:
        """Return the same records, computed once for the batch, so that all readers see the
        same.
        """

    def first(self, frame: Frame, flags: Sequence[str]) -> Mapping[str, Any] | None:
        """Return the first record, by position, in which one of these boolean columns is true;
        None if there is none.
        """

    def call(self, frame: Frame, call: RecordCall, kept: Sequence[str]) -> Frame:
        """Return what a user's function returns for each record, with the columns `kept` of the
        record.
        """

    def divert(self, operator: str, frame: Frame) -> None:
        """Pass records of an operator on to the operators that read what it diverts
        (`Spec.reads_diverted`). Further calls add records to those of earlier calls.
        """

    def diverted(self, operator: str) -> Frame:
        """Return the records that the operator before this one has diverted."""

    def count_failed(self, operator: str, frame: Frame, checked: Checked) -> Frame:
        """Return all records; count them and the failed ones, and describe a sample of the failed
        ones.

        The sample is the same however the records are computed.
        """

    def keep_matches(self, operator: str, frame: Frame, how: How) -> Frame:
        """Return joined records without MATCHED, BEFORE_HISTORY, NO_TIME and EARLY; an inner join
        drops the records without an entry.

        Counts all records, those without an entry, and those for which BEFORE_HISTORY, NO_TIME or
        EARLY is true.
        """


class SparkRecords(Records["DataFrame"], Protocol):
    """How Spark changes records."""

    def call_frame(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        """Return the result of a user's DataFrame function, which must keep the hidden columns."""

    def count_records(
        self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]
    ) -> DataFrame:
        """Return the records; counts how many match each condition, as metrics of the operator."""


class Datasets(Protocol[Frame]):
    """The datasets that a batch joins, in the versions that its intent names."""

    def schema_of(self, dataset: str, *, over_time: bool = False) -> Schema:
        """Return the columns of a dataset's entries, or of its rows over time.

        A dataset without `bootstrap` that is not built yet has the columns that it will have.
        """

    def match(self, operator: str, frame: Frame, lookup: EntryLookup) -> Frame:
        """Return all records, each with what the lookup takes of its entry, and MATCHED: true
        if it has one, else null.

        As of a time, they also have BEFORE_HISTORY and NO_TIME. A local table of the application
        includes what the batch has sent to it.
        """


class Tables(Protocol[Frame]):
    """The remote tables that records are looked up in."""

    def look_up(self, operator: str, frame: Frame, lookup: TableLookup) -> Frame:
        """Return the records with the columns looked up in a table, and MATCHED as in
        `Datasets.match`.
        """


class Outputs(Protocol[Frame]):
    """The output streams and remote tables that a batch writes."""

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append records to a stream as (application, batch); it is created with `key` and
        `partitions` if needed.
        """

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        """Return the records that the operator has sent, read back from the stream with their
        positions in the input; `frame`, the same records, if nothing was written.
        """

    def commit(self, operator: str, frame: Frame, table: str) -> None:
        """Append records to an output table, in one commit of the batch."""

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        """Write records to a remote table; a replay writes nothing to one with on_replay="skip".

        Errors show no values of `sensitive` records.
        """

    def refused_records(self, operator: str) -> Frame:
        """Return the records that the table of the operator before this one rejected
        (DEAD_LETTER_COLUMNS).
        """

    def send_dead_letters(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append rejected records to a stream, once per batch; if they were sent before, check
        that none is missing.
        """


class LocalTables(Protocol):
    """The local tables of the application, which Spark writes."""

    def write(self, operator: str, frame: DataFrame, send: LocalSend) -> None:
        """Write the last record of each key to a local table; tombstones delete their key.

        The table is committed, and counted, at the end of the batch. A bounded replay commits
        nothing; in one of recorded versions, joins still read what the batch would write.
        """


class Sinks(Protocol):
    """Users' functions that get records in Spark tasks; errors omit values of sensitive columns."""

    def call(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Call a function with the records."""

    def call_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return the results of a function for the records, partitioned like these; a repeated
        batch reuses the recorded results.
        """


class StateRows(Protocol):
    """A stateful operator's table in one batch."""

    def frame(self) -> DataFrame:
        """Return the unexpired rows as of the start of the batch, in their buckets, so that no
        exchange is needed.
        """

    def with_written(self) -> DataFrame:
        """Return the rows of `frame` and those that the batch has written, marked by the boolean
        `__new`; no exchange is needed. For append-only tables."""

    def write(self, rows: DataFrame, *, partitioned: bool = False) -> None:
        """Write rows of the table's columns, with `__tombstone` if some delete; they are committed
        with the batch.

        `partitioned` says that they are in the table's partitions already. A bounded replay writes
        nothing.
        """


class State(Protocol):
    """What operators keep from batch to batch."""

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and after this
        batch.
        """

    def table(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateRows:
        """Return the state table of this name, one of the operator's `states`.

        Rows expire by the watermark of the stateful operator `of`, by default the one of the
        table's name.
        """

    def check_zone_rules(self, name: str, zone: str, outdated: Column) -> None:
        """Check in the dry run that the present rules of the zone are those of the stored rows of
        the state table, or make no difference.

        `outdated` says whether they would give a row other times.
        """


class Batch(Protocol[Frame]):
    """One batch that is computed: what its operators read, and what they write."""

    @property
    def planned(self) -> Planned: ...
    @property
    def records(self) -> Records[Frame]: ...
    @property
    def datasets(self) -> Datasets[Frame]: ...
    @property
    def tables(self) -> Tables[Frame]: ...
    @property
    def outputs(self) -> Outputs[Frame]: ...


class SparkBatch(Batch["DataFrame"], Protocol):
    """A batch that Spark computes."""

    @property
    def records(self) -> SparkRecords: ...
    @property
    def local_tables(self) -> LocalTables: ...
    @property
    def sinks(self) -> Sinks: ...
    @property
    def state(self) -> State: ...

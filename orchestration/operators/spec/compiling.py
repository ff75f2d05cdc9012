"""What an operator has at hand while it is compiled to DataFrames for one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult, StreamSystem


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Up to where an operator has heard of all that it takes; None before there is any.

    `before` is committed when the batch begins, `after` has the batch in it, and is committed with it.
    """

    before: datetime | None
    after: datetime | None


@dataclass(frozen=True, slots=True)
class TimedRows:
    """The rows of a dataset over time, with their columns (`schema`) and those of `kept_history.py`.

    Of each key the intervals do not overlap; a deletion is a row, too, and `__first` the one before which nothing is
    known of the key. `known_from`: of times before it a key without such a row may have been anything; None: of none.
    """

    frame: DataFrame
    schema: Schema
    known_from: datetime | None


class StateHandle(Protocol):
    """A table of state in one batch."""

    def frame(self) -> DataFrame:
        """Return the rows that the batch was begun with, without the expired ones; in their buckets: no exchange."""
        ...

    def write(self, rows: DataFrame, *, lying: bool = False) -> None:
        """Keep these rows of the table's columns, and `__tombstone` where some delete; committed with the batch.

        `lying` says that they lie by the table's `partition_by` in its partitions. A bounded replay keeps nothing.
        """
        ...

    def with_written(self) -> DataFrame:
        """Return what `frame` does with the rows that the batch has written, as the boolean `__new` says of each; no
        exchange either. For tables that are only appended to."""
        ...


class BatchContext(Protocol):
    """One batch of records, or a rehearsal of it: no records, whatever is written is only checked."""

    @property
    def app(self) -> Declarations: ...

    @property
    def tasks(self) -> int:
        """How many tasks read what is broadcast."""
        ...

    def read(self, stream: str) -> DataFrame:
        """Return what the batch reads of an input stream."""
        ...

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system that a stream ("system.stream") is in."""
        ...

    def partitions_at(self, operator: str) -> int:
        """Return the planned count of the records that leave an operator."""
        ...

    def lying_by(self, operator: str) -> Sequence[str]:
        """Return the columns by which records that leave an operator have to lie; () where nobody relies on it."""
        ...

    def sensitive(self, operator: str) -> frozenset[str]:
        """Return the columns of the records that arrive at an operator whose values no error tells."""
        ...

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of an operator's records are in; None for several, or unknown."""
        ...

    def goes_on(self, operator: str) -> bool:
        """Whether another operator takes the records of this one."""
        ...

    @property
    def reading(self) -> VersionsMet:
        """Which entries its joins meet: a join by time meets the current ones where that is "current"."""
        ...

    @property
    def number(self) -> int:
        """The batch's number among those of the application."""
        ...

    def counted(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        """Return the records, counted as they pass: how many meet each condition is told of the operator."""
        ...

    def leave_out(self, operator: str, records: DataFrame) -> None:
        """Hand over what an operator has left out (`late_records.as_late`), for who asks for it."""
        ...

    def left_out(self, operator: str) -> DataFrame:
        """Return what the operator before this one has left out."""
        ...

    def late_wanted(self, operator: str) -> bool:
        """Whether somebody asks for what this operator leaves out."""
        ...

    @property
    def clock(self) -> datetime:
        """When the batch was begun, by the lake's clock: the same however often it is run."""
        ...

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and with this batch."""
        ...

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        """Return the table of state of this name, one of the operator's `states`.

        The watermark of the stateful operator `of` says what has expired; it has the table's name where left out.
        """
        ...

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        """Return what a function of the application makes of records; it has to keep their hidden columns."""
        ...

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        """Return the entries of the dataset's version of this batch, and their columns."""
        ...

    def over_time(self, dataset: str) -> TimedRows:
        """Return the rows over time of a dataset, of the version or versions that the batch was begun with."""
        ...

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        """Return joined records, counted as they pass; `__matched` is null where one met no entry of the dataset."""
        ...

    def first(self, frame: DataFrame) -> Row | None:
        """Return the first of these records, which is looked for now; None where there is none, and in a rehearsal."""
        ...

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Return records with what a remote table answers, counted as they pass; `__matched` as of `matched`."""
        ...

    def together(self, frame: DataFrame) -> DataFrame:
        """Return the records before they are moved: few are brought into one task, which does the work of all."""
        ...

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, kept while the batch runs, so that two who read them read the same."""
        ...

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        """Append records to a stream, which is created with `key` and `partitions`; None in a rehearsal."""
        ...

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Write records to a declared remote table."""
        ...

    def keep(self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey) -> None:
        """Keep the last record of each key in a local table; tombstones, and what meets `deleted`, delete theirs."""
        ...

    def hand_to(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Hand records to a function of the application, in tasks."""
        ...

    def results_of(self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema) -> DataFrame:
        """Return what a function of the application returns for records, the same however often the batch is run."""
        ...

    def letters(self, operator: str) -> DataFrame:
        """Return what a table has refused of the records of an operator that writes to it (`send_dead_letters.py`)."""
        ...

    def send_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append refused records to a stream, once for the batch, whatever else a repeated batch finds refused."""
        ...

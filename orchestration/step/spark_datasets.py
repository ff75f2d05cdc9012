"""How Spark joins records with datasets: with current entries, or with those that were valid at the
time of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, LocalTable
from dagster_adjunct.assets.reading.interval_ids import add_interval_id
from dagster_adjunct.assets.reading.valid_time import (
    Reader,
    TimeBins,
    choose_time_bins,
    frame_over_time,
)
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import (
    TOMBSTONE,
    StoredPositions,
    build_layout,
    datetime_from_micros,
)
from dagster_adjunct.orchestration.operators.lookups import (
    BEFORE_HISTORY,
    ENTRY,
    MATCHED,
    NO_TIME,
    AsOf,
    EntryLookup,
    Pairs,
)
from dagster_adjunct.orchestration.step.planned_batch import (
    PlannedBatch,
    find_history,
    schema_of_dataset,
)
from dagster_adjunct.orchestration.step.spark_state import WrittenLocalTables
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    IS_FIRST,
    VALID_FROM,
    VALID_TO,
    BucketLayout,
    bucketed_frame,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import Schema, named_column, value_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.assets.unbounded.transient_table import TransientVersion

_FROM = "__row_from"
_TO = "__row_to"
_FIRST = "__row_first"
_ROW_ENTRY = "__row_entry"
"""Whether the row is an entry, not a deletion."""
_BEGINS = "__row_begins"
"""The start of the key's history, in the one row that also matches all earlier times; null in
the other rows.
"""
_BIN = "__row_bin"
"""The number of an interval of time that the row overlaps (`TimeBins`)."""


@dataclass(frozen=True, slots=True)
class TimedRows:
    """The rows of a dataset over time: the columns of `schema`, and the interval in which each row
    was valid.

    Intervals of one key do not overlap. A deletion is a row, too. IS_FIRST is true in the row with
    which the history of its key begins. A key without such a row has lost its older rows: its
    history before `known_from` is unknown. With `known_from` None, no history was dropped. `bins`
    are intervals of time by which rows of keys that have many are found; None if keys have few.
    """

    frame: DataFrame
    schema: Schema
    known_from: datetime | None
    bins: TimeBins | None = None


@dataclass(frozen=True, slots=True)
class DatasetEntries:
    """The entries of a dataset, with the columns of `schema` and maybe others."""

    frame: DataFrame
    schema: Schema


@dataclass(frozen=True, slots=True)
class SparkDatasets:
    """The datasets that Spark joins: `Datasets` of operators.

    Where the records of a batch are gathered in one partition, Spark caches each dataset while
    batches read the same version of it, and broadcasts it.
    """

    planned: PlannedBatch
    local_tables: WrittenLocalTables

    @property
    def _session(self) -> SparkSession:
        return self.planned.context.spark()

    def schema_of(self, dataset: str, *, over_time: bool = False) -> Schema:
        """Return the columns of a dataset's entries, or of its rows over time."""
        return schema_of_dataset(self.planned, dataset, over_time=over_time)

    def match(self, operator: str, frame: DataFrame, lookup: EntryLookup) -> DataFrame:
        """Return all records with what the lookup takes of their entries, and MATCHED; as of a time
        also with BEFORE_HISTORY and NO_TIME.
        """
        dataset = self.planned.app.dataset(lookup.dataset)
        hint: Callable[[DataFrame], DataFrame]
        if self.planned.gathered or dataset.broadcast:
            hint = F.broadcast
        else:
            hint = _hint_merge
        if lookup.as_of is None:
            return join_entries(frame, self.entries(lookup.dataset), lookup, hint)
        if lookup.as_of.known_then:
            rows = self.served(lookup.dataset)
        else:
            rows = self.over_time(lookup.dataset, with_ids=lookup.with_ids)
        is_scattered = not dataset.partition_by
        return AsOfMatch(lookup, lookup.as_of, rows, is_scattered).join(frame, hint)

    # -- entries

    def entries(self, dataset: str) -> DatasetEntries:
        """Return the entries of a dataset; a local table includes what the batch has sent to it.

        A dataset without `bootstrap` that is not built yet has the columns that it will have. A dry
        run takes local tables for empty.
        """
        declared = self.planned.app.dataset(dataset)
        schema = schema_of_dataset(self.planned, dataset)
        if isinstance(declared, LocalTable) and self.planned.is_dry_run:
            return DatasetEntries(self._no_entries(declared, schema), schema)
        if isinstance(declared, LocalTable) and declared.is_owned_by(self.planned.app.name):
            frame = self.local_tables.open(declared).reader().frame(self._session)
            return DatasetEntries(frame, schema)
        view = self.planned.inputs.views[dataset]
        if view is None:
            return DatasetEntries(self._no_entries(declared, schema), schema)
        return DatasetEntries(self._frame_of(view), schema)

    def _frame_of(self, view: VersionReader | TransientVersion) -> DataFrame:
        """Return the entries of a version, cached for later batches if the batch is gathered."""
        if not self.planned.gathered or not isinstance(view, VersionReader):
            return view.frame(self._session)
        return self._persisted(view.dataset, view.version, lambda: view.frame(self._session))

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        """Return no entries, in the buckets of a dataset that has no version yet."""
        if dataset.partitions is None or not set(dataset.partition_by) <= set(schema.names):
            return self._session.createDataFrame([], schema.ddl())
        layout = BucketLayout(schema, dataset.partition_by, dataset.partitions, dataset.key)
        store = self.planned.context.lake.store
        rows = bucketed_frame(self._session, store, dataset.name, layout, [])
        return rows.drop(GENERATION_COLUMN)

    # -- rows over time

    def over_time(self, dataset: str, *, with_ids: bool = False) -> TimedRows:
        """Return the rows over time of a dataset, of the versions that the batch started with;
        `with_ids` as `frame_over_time` does.
        """
        history = find_history(self.planned, dataset)
        reader = history.reader
        if reader is None:
            schema = schema_of_dataset(self.planned, dataset, over_time=True)
            if with_ids:
                schema = add_interval_id(schema)
            return self._no_rows(dataset, schema)
        known_from = None
        if history.known_from is not None:
            known_from = datetime_from_micros(history.known_from)
        rows = self._history_of(reader, with_ids=with_ids)
        return TimedRows(rows, reader.schema, known_from, choose_time_bins(reader))

    def served(self, dataset: str) -> TimedRows:
        """Return the rows that a dataset has served, up to the commit that the batch started with,
        each with the time in which it was served.
        """
        reader = self.planned.inputs.served.get(dataset)
        if reader is None:
            return self._no_rows(dataset, schema_of_dataset(self.planned, dataset))
        known_from = None
        if reader.known_from is not None:
            known_from = datetime_from_micros(reader.known_from)
        if self.planned.gathered:
            name = f"{dataset} as served"
            frame = self._persisted(name, reader.commits, lambda: reader.frame(self._session))
        else:
            frame = reader.frame(self._session)
        return TimedRows(frame, reader.schema, known_from)

    def _no_rows(self, dataset: str, schema: Schema) -> TimedRows:
        """Return no rows over time, in the buckets of a dataset that has no version yet."""
        declared = self.planned.app.dataset(dataset)
        layout = build_layout(
            schema,
            declared.key,
            declared.partition_by,
            declared.partitions,
            StoredPositions(),
            over_time=True,
        )
        store = self.planned.context.lake.store
        return TimedRows(bucketed_frame(self._session, store, dataset, layout, []), schema, None)

    def _history_of(self, reader: Reader, *, with_ids: bool) -> DataFrame:
        """Return the rows over time of one or several versions, cached for later batches if the
        batch is gathered.
        """

        def frame() -> DataFrame:
            return frame_over_time(reader, self._session, with_ids=with_ids)

        if not self.planned.gathered:
            return frame()
        versions = reader.version if isinstance(reader, VersionReader) else reader.versions
        kind = "over time, with ids" if with_ids else "over time"
        return self._persisted(f"{reader.dataset} {kind}", versions, frame)

    def _persisted(self, rows: str, versions: object, frame: Callable[[], DataFrame]) -> DataFrame:
        """Return rows of a dataset, which Spark caches for later batches."""
        kept = self.planned.context.versions
        return kept.persisted(rows, versions, lambda: frame().coalesce(1))


def _hint_merge(side: DataFrame) -> DataFrame:
    """Let Spark join this side by a sort-merge join."""
    return side.hint("merge")


def join_entries(
    frame: DataFrame,
    entries: DatasetEntries,
    lookup: EntryLookup,
    hint: Callable[[DataFrame], DataFrame],
) -> DataFrame:
    """Return all records with what the lookup takes of their entries, and MATCHED."""
    if lookup.added is None:
        whole = F.struct(*[named_column(name) for name in entries.schema.names])
        added = [whole.alias(ENTRY)]
    else:
        added = _added_columns(entries.frame, lookup)
    key = _key_columns(lookup.on)
    side = entries.frame.select(*key, *added, F.lit(True).alias(MATCHED))
    joined = frame.join(hint(side), _same_key(frame, side, lookup.on), "left")
    return joined.drop(*_key_names(lookup.on))


def _added_columns(entries: DataFrame, lookup: EntryLookup) -> list[Column]:
    """Return the chosen columns of entries, under the names that they get in joined records."""
    added = []
    for chosen in lookup.added or ():
        added.append(value_column(entries.columns, chosen.column).alias(chosen.name))
    return added


def _key_names(on: Pairs) -> list[str]:
    """Return the names of the key's columns on a dataset's side."""
    return [f"__key_{index}" for index in range(len(on))]


def _key_columns(on: Pairs) -> list[Column]:
    """Return the key of a dataset's side, under names that no record has."""
    names = _key_names(on)
    return [named_column(entry).alias(key) for (_, entry), key in zip(on, names, strict=True)]


def _same_key(frame: DataFrame, side: DataFrame, on: Pairs) -> Column:
    """Return the condition that a record and a row of the dataset's side have the same key."""
    is_same = F.lit(True)
    for (stream, _), key in zip(on, _key_names(on), strict=True):
        is_same = is_same & (value_column(frame.columns, stream) == side[key])
    return is_same


@dataclass(frozen=True, slots=True)
class AsOfMatch:
    """A join of records with the entries that were valid at their times.

    The intervals of a key's rows do not overlap. One row also matches all times before the first
    row: the first row itself, or, if that is a deletion and the oldest entry is wanted, the first
    entry. So a record matches at most one row: the join is an equality on the key, which decides
    the bucket, and a comparison of times within the bucket. The matched row shows whether the
    record is from before the history, or from a time when its key was deleted. If the rows are
    `scattered`, those of one key may be in several partitions.
    """

    lookup: EntryLookup
    as_of: AsOf
    rows: TimedRows
    scattered: bool

    def join(self, frame: DataFrame, hint: Callable[[DataFrame], DataFrame]) -> DataFrame:
        """Return the records with their matching rows and the columns MATCHED, BEFORE_HISTORY and
        NO_TIME.
        """
        on = self.lookup.on
        side = hint(self._side())
        at = value_column(frame.columns, self.as_of.column).cast("timestamp")
        during = (at >= side[_FROM]) & (side[_TO].isNull() | (at < side[_TO]))
        is_matched = during | (at < side[_BEGINS])
        if self.rows.bins is not None:
            is_matched = (self.rows.bins.number_of(at) == side[_BIN]) & is_matched
        joined = frame.join(side, _same_key(frame, side, on) & is_matched, "left")
        row = F.col(_ROW_ENTRY)  # null for a record without a row
        early = row.isNotNull() & (at < F.col(_FROM))
        # A record from before its row has an entry only if the oldest one is wanted.
        entry = row if self.as_of.before_history == "oldest" else row & ~early
        is_pruned = self._is_pruned(frame.columns, row, at)
        is_before = F.coalesce(early | is_pruned, F.lit(False))
        columns = {name: named_column(name) for name in joined.columns}
        for unused in (*_key_names(on), _FROM, _TO, _BEGINS, _ROW_ENTRY, _BIN):
            columns.pop(unused, None)
        for chosen in self.lookup.added or ():
            columns[chosen.name] = F.when(entry, columns[chosen.name]).alias(chosen.name)
        return joined.select(
            *columns.values(),
            F.when(entry, True).alias(MATCHED),
            is_before.alias(BEFORE_HISTORY),
            at.isNull().alias(NO_TIME),
        )

    def _side(self) -> DataFrame:
        """Return the dataset's rows for the join, under names that no record has."""
        from pyspark.sql import Window

        on = self.lookup.on
        side = self.rows.frame.select(
            *_key_columns(on),
            *_added_columns(self.rows.frame, self.lookup),
            F.col(VALID_FROM).alias(_FROM),
            F.col(VALID_TO).alias(_TO),
            F.col(IS_FIRST).alias(_FIRST),
            (~F.col(TOMBSTONE)).alias(_ROW_ENTRY),
        )
        begins = F.when(F.col(_FIRST), F.col(_FROM))
        if self.as_of.before_history == "oldest":
            if self.scattered:  # the window over a key needs its rows in one partition
                side = side.coalesce(1)
            of_key = Window.partitionBy(*_key_names(on))
            first_entry = F.min(F.when(F.col(_ROW_ENTRY), F.col(_FROM))).over(of_key)
            oldest = F.coalesce(first_entry, F.min(_FROM).over(of_key))
            begins = F.when(F.col(_FROM) == oldest, F.min(begins).over(of_key))
        side = side.withColumn(_BEGINS, begins).drop(_FIRST)
        if self.rows.bins is None:
            return side
        # A record is in one interval, and a row in all that it overlaps: as part of the equality,
        # its number leaves few rows of a key to compare with the time.
        numbers = self.rows.bins.overlapping(F.col(_FROM), F.col(_TO), F.col(_BEGINS))
        return side.withColumn(_BIN, F.explode(numbers))

    def _is_pruned(self, names: Collection[str], row: Column, time: Column) -> Column:
        """Return the condition that a record matches no row because the history of its time was
        dropped.

        The record has the columns `names`; `row` is null if it matches no row. A record with a null
        in its key never matches a row, whatever the history.
        """
        known_from = self.rows.known_from
        if known_from is None:
            return F.lit(False)
        is_unmatched = row.isNull()
        is_too_early = time < F.lit(known_from)
        is_pruned = is_unmatched & is_too_early
        for stream, _ in self.lookup.on:
            is_pruned = is_pruned & value_column(names, stream).isNotNull()
        return is_pruned

"""`AsOfJoin`, which adds the columns of the dataset entry that was valid at the time of the
record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.versions.version import TOMBSTONE
from dagster_adjunct.orchestration.operators.columns import require_columns, tie_breakers
from dagster_adjunct.orchestration.operators.event_time import TIME_TYPES
from dagster_adjunct.orchestration.operators.joins import MATCHED, Join
from dagster_adjunct.orchestration.operators.operator import AsOf, Match
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.lazy_modules import F, pc
from dagster_adjunct.resources.schemas.schema import Schema, named_column, quote_name
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import MASKED, truncate_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext
    from dagster_adjunct.orchestration.step.in_process_batch import ArrowBatch


BEFORE_HISTORY, NO_TIME = "__before_history", "__no_time"
"""Hidden columns of joined records: whether the time is before the history of the key, and
whether it is null.
"""

_FROM, _TO, _FIRST, _ROW_ENTRY = "__row_from", "__row_to", "__row_first", "__row_entry"
_BEGINS = "__row_begins"
"""The start of the key's history, in the one row that also matches all earlier times; null in
the other rows.
"""


@dataclass(frozen=True, slots=True)
class TimedRows:
    """The rows of a dataset over time: the columns of `schema`, and the interval in which each row
    was valid.

    Intervals of one key do not overlap. A deletion is a row, too. IS_FIRST is true in the row with
    which the history of its key begins. A key without such a row has lost its older rows: its
    history before `known_from` is unknown. With `known_from` None, no history was dropped.
    """

    frame: DataFrame
    schema: Schema
    known_from: datetime | None


@dataclass(frozen=True, slots=True)
class AsOfJoin(Join):
    """Records with the columns of the entry that was valid at the time in their column
    `as_of.column`.

    The intervals of a key's rows do not overlap. One row also matches all times before the first
    row: the first row itself, or, if that is a deletion and the oldest entry is wanted, the first
    entry. So a record matches at most one row: the join is an equality on the key, which decides
    the bucket, and a comparison of times within the bucket. The matched row shows whether the
    record is from before the history, or from a time when its key was deleted.
    """

    kind: ClassVar[str] = "join"
    as_of: AsOf = field(kw_only=True)

    @property
    def match(self) -> Match:
        return Match(self.dataset, self.min_match_rate, as_of=self.as_of)

    def summary(self) -> str:
        return f"{Join.summary(self)} as of {self.as_of.column}"

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        step = "Correct as_of=, or join before the column is dropped."
        time = self.as_of.column
        require_columns(operator, "the stream", (time,), stream.names, step)
        kind = (stream.types or {}).get(time)
        if kind is not None and kind not in TIME_TYPES:
            is_text = kind in ("string", "timestamp_ntz")
            converted = f"cast({time} as timestamp)" if is_text else f"timestamp_millis({time})"
            problem = f"{operator}: the stream's {time!r} is {kind}: expected timestamp or date."
            step = f'Convert it first, for example .with_columns({time}="{converted}").'
            raise PlanningError(problem, step, column=time, dataset=self.dataset, operator=operator)
        return Join._join_columns(self, operator, stream, entries, dataset)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        if batch.reading == CURRENT:
            return Join.compile(self, operator, frames, batch)
        (frame,) = frames
        over = batch.over_time(self.dataset)
        self._check(operator, Columns.of_frame(frame), over.schema, batch)
        keys = [f"__key_{index}" for index in range(len(self.on))]
        matched = self._match(frame, keys, over, batch)
        if self._failing:
            matched = batch.materialize(operator, matched)
            self._check_times(operator, matched, batch)
        counted = batch.count_matches(operator, self.dataset, matched)
        kept = counted.filter(MATCHED) if self.how == "inner" else counted
        return kept.drop(*keys, _FROM, _TO, _BEGINS, _ROW_ENTRY, BEFORE_HISTORY, NO_TIME, MATCHED)

    def _match(
        self, frame: DataFrame, keys: Sequence[str], over: TimedRows, batch: BatchContext
    ) -> DataFrame:
        """Return the records with their matching rows and the columns MATCHED, BEFORE_HISTORY and
        NO_TIME.

        `keys` are the names of the dataset's key columns in the result.
        """
        added = self.selection(over.schema.names)
        side = self._side(over, keys, scattered=not batch.app.dataset(self.dataset).partition_by)
        side = batch.hint_join(self.dataset, side)
        stream = [frame[quote_name(name)] for name, _ in self.on]
        same = reduce(and_, [mine == side[key] for mine, key in zip(stream, keys, strict=True)])
        at = frame[quote_name(self.as_of.column)].cast("timestamp")
        during = (at >= side[_FROM]) & (side[_TO].isNull() | (at < side[_TO]))
        joined = frame.join(side, same & (during | (at < side[_BEGINS])), "left")
        time, row = named_column(self.as_of.column).cast("timestamp"), F.col(_ROW_ENTRY)
        early = row.isNotNull() & (time < F.col(_FROM))
        entry = row & (F.lit(True) if self.as_of.before_history == "oldest" else ~early)
        there = {chosen.name for chosen in added}
        return joined.select(
            *[
                (
                    F.when(entry, named_column(name)).alias(name)
                    if name in there
                    else named_column(name)
                )
                for name in joined.columns
            ],
            F.when(entry, True).alias(MATCHED),
            F.coalesce(early | self._pruned(row, time, over), F.lit(False)).alias(BEFORE_HISTORY),
            time.isNull().alias(NO_TIME),
        )

    def _side(self, over: TimedRows, keys: Sequence[str], *, scattered: bool) -> DataFrame:
        """Return the dataset's rows for the join, under names that no record has; `keys` are those
        of the key columns.

        With `scattered`, the rows of one key may be in several partitions.
        """
        from pyspark.sql import Window

        side = over.frame.select(
            *[
                named_column(entry).alias(key)
                for (_, entry), key in zip(self.on, keys, strict=True)
            ],
            *[
                named_column(chosen.column).alias(chosen.name)
                for chosen in self.selection(over.schema.names)
            ],
            F.col(VALID_FROM).alias(_FROM),
            F.col(VALID_TO).alias(_TO),
            F.col(IS_FIRST).alias(_FIRST),
            (~F.col(TOMBSTONE)).alias(_ROW_ENTRY),
        )
        begins = F.when(F.col(_FIRST), F.col(_FROM))
        if self.as_of.before_history == "oldest":
            side = side.coalesce(1) if scattered else side
            of_key = Window.partitionBy(*keys)
            oldest = F.coalesce(
                F.min(F.when(F.col(_ROW_ENTRY), F.col(_FROM))).over(of_key),
                F.min(_FROM).over(of_key),
            )
            begins = F.when(F.col(_FROM) == oldest, F.min(begins).over(of_key))
        return side.withColumn(_BEGINS, begins).drop(_FIRST)

    def _pruned(self, row: Column, time: Column, over: TimedRows) -> Column:
        """Return the condition that a record matches no row because the history of its time was
        dropped.
        """
        if over.known_from is None:
            return F.lit(False)
        known = reduce(and_, [named_column(name).isNotNull() for name, _ in self.on])
        return row.isNull() & known & (time < F.lit(over.known_from))

    def compute(self, operator: str, tables: Sequence[Any], batch: ArrowBatch) -> Any:
        if batch.reading == CURRENT:
            return Join.compute(self, operator, tables, batch)
        (table,), schema = tables, batch.schema_over_time(self.dataset)
        self._check(operator, Columns.of_schema(batch.output_schema(table)), schema, batch)
        chosen = self.selection(schema.names)
        joined, matched = batch.join_as_of(
            operator, table, self.dataset, self.on, chosen, self.as_of
        )
        if self._failing:
            wrong = joined.filter(reduce(pc.or_, [joined.column(name) for name in self._failing]))
            places = (PARTITION, OFFSET, *tie_breakers(wrong.column_names))
            for record in (
                wrong.sort_by([(name, "ascending") for name in places]).slice(0, 1).to_pylist()
            ):
                self._raise_for_time(operator, record, batch)
        joined = joined.drop_columns([BEFORE_HISTORY, NO_TIME])
        return joined.filter(matched) if self.how == "inner" else joined

    @property
    def _failing(self) -> list[str]:
        """Those of BEFORE_HISTORY and NO_TIME that fail the batch if they are true for a record."""
        fails = {
            BEFORE_HISTORY: self.as_of.before_history == "error",
            NO_TIME: self.as_of.on_null_time == "fail",
        }
        return [name for name, is_failure in fails.items() if is_failure]

    def _check_times(self, operator: str, matched: DataFrame, batch: BatchContext) -> None:
        """Raise OperatorFailedError for the first record, by position, that must fail the batch."""
        wrong = reduce(or_, [F.col(name) for name in self._failing])
        record = batch.first(
            matched.where(wrong).orderBy(PARTITION, OFFSET, *tie_breakers(matched.columns))
        )
        if record is not None:
            self._raise_for_time(operator, record.asDict(), batch)

    def _raise_for_time(
        self, operator: str, record: Mapping[str, Any], batch: BatchContext
    ) -> NoReturn:
        hidden = {name.lower() for name in batch.sensitive(operator)}
        hidden_entries = {name.lower() for name in batch.app.dataset(self.dataset).sensitive}

        def describe(name: str, entry: str = "") -> str:
            is_hidden = name.lower() in hidden or entry.lower() in hidden_entries
            value = record[name]
            value = (
                value.replace(tzinfo=None) if isinstance(value, datetime) else value
            )  # the time is in UTC
            return f"{name} = {MASKED if is_hidden else truncate_text(str(value))}"

        key = ", ".join(describe(stream, entry) for stream, entry in self.on)
        stream, partition, offset = (
            batch.stream_of(operator),
            record[PARTITION],
            str(record[OFFSET]),
        )
        place = "" if stream is None else f" (at {stream}.{partition} offset {offset})"
        what = (
            f"from before the history of dataset {self.dataset}:"
            f" {describe(self.as_of.column)}{place}"
        )
        step = (
            'Load the entries of that time, or choose before_history="null" or "oldest" for such'
            " records."
        )
        if record[NO_TIME]:
            what = (
                f"joined with dataset {self.dataset} as of {self.as_of.column}, which is"
                f" null{place}"
            )
            step = 'Correct the record, or join such records with no entry: on_null_time="null".'
        problem = f"{operator}: a record of {key} is {what}."
        raise OperatorFailedError(
            problem, step, operator=operator, stream=stream, partition=partition, offset=offset
        )


def check_as_of(operator: str, dataset: AdjunctDataset, as_of: str) -> None:
    """Raise ConfigurationError for an empty `as_of`, and PlanningError for a dataset without a
    history.
    """
    if not as_of:
        expected = "the name of the stream's column with the record's time, a timestamp or a date"
        raise argument_error(
            f"{operator} has as_of={as_of!r}", expected, argument="as_of", operator=operator
        )
    if dataset.following.history is not None or dataset.valid_from is not None:
        return
    if dataset.is_local:
        problem = "is a local table, which keeps current entries only"
        step = "Join it without as_of=, or use an unbounded dataset with history=."
    elif dataset.follows_changes:
        problem, step = "keeps no history", 'Declare it with history=timedelta(days=…), or "all".'
    else:
        problem = "does not declare from when its versions are valid"
        step = 'Declare it, for example valid_from="name".'
    problem = f"{operator}: dataset {dataset.name!r} is joined as of a time, but {problem}."
    raise PlanningError(problem, step, dataset=dataset.name, operator=operator)

"""Event times: their declaration, late records, and the hidden columns of records that stream joins
and windows make.

Such a record is made of several others, which may be from different batches, so it has no input
position. It gets one: the partition is chosen by its key, the offset is the number of the batch
that made it, and its ordinal is the same however often the batch is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns import (
    BEHIND,
    EVENT_TIME,
    ORDINAL,
    ORIGIN,
    REPLAYED,
    Names,
    Types,
    check_duration,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.operator import Flow, PlanContext, Spec
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, ColumnFacts, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.sql.checking import check_expression, nondeterministic_parts
from dagster_adjunct.resources.sql.expression import other_records_construct
from dagster_adjunct.resources.streams.system import EPOCH, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext


ARRIVAL = TIMESTAMP
"""As `event_time=`: the event time of a record is the time when it was written to its stream."""
MIN_MICROS, MAX_MICROS = (
    to_microseconds(moment.replace(tzinfo=UTC)) for moment in (datetime.min, datetime.max)
)
"""The first and the last time of the years 1 to 9999, in microseconds since 1970."""
TIME_TYPES = ("timestamp", "date")
"""The types of columns that may be used as times; a date means its midnight in UTC."""
_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class EventTime:
    """The declared event time of an input: a Spark SQL expression over its records, or ARRIVAL.

    A record is late if its time is more than `delay` before the newest time that its source
    partition had before. A source partition without records for `idle_after` does not hold back the
    watermark; with None it always does. If the watermark is further than `max_lag` behind the
    clock, Dagster warns.
    """

    expression: str
    delay: timedelta = _ZERO
    idle_after: timedelta | None = None
    max_lag: timedelta | None = None

    @property
    def sql(self) -> tuple[str, ...]:
        """The user's Spark SQL expressions: one, or none with ARRIVAL."""
        return () if self.expression == ARRIVAL else (self.expression,)

    def describe(self) -> str:
        """Return a description for plans."""
        by = "arrival" if self.expression == ARRIVAL else self.expression
        idle = "" if self.idle_after is None else f", idle after {self.idle_after}"
        return f"by {by}, {self.delay} late at most{idle}"

    def check(self, operator: str, columns: Names, types: Types) -> None:
        """Raise PlanningError for an expression that is certainly invalid, or certainly not a time.

        The value must depend on the record alone: other records, the clock and chance are rejected,
        too.
        """
        if self.expression == ARRIVAL:
            return
        kind = check_expression(
            operator,
            self.expression,
            columns,
            types,
            next_step="Correct event_time, or leave it out for none.",
        )
        if kind is not None and kind not in TIME_TYPES:
            raise self._no_time(operator, kind)
        others = other_records_construct(self.expression)
        changing = nondeterministic_parts(self.expression, types or {})
        if others or changing:
            effect = (
                "depend on how records are cut into batches"
                if others
                else "change when the record is read again"
            )
            raise PlanningError(
                f"{operator}: event_time={self.expression!r} uses {others or ', '.join(changing)}:"
                f" a record's time must depend on the record alone, or it would {effect}.",
                "Write an expression over columns of the record, or have its producer add the"
                " time.",
                operator=operator,
            )

    def column(self, operator: str, records: DataFrame) -> Column:
        """Return the records' event times as timestamps; raises PlanningError for an expression of
        another type.

        Times before the year 1 or after 9999 become null: they are mistakes, and would close all
        windows.
        """
        time = F.col(TIMESTAMP) if self.expression == ARRIVAL else F.expr(self.expression)
        kind = records.select(time.alias("time")).dtypes[0][1]
        if kind not in TIME_TYPES:
            raise self._no_time(operator, kind)
        time = time.cast("timestamp")
        return F.when(F.unix_micros(time).between(F.lit(MIN_MICROS), F.lit(MAX_MICROS)), time)

    def column_name(self, types: Mapping[str, str]) -> str | None:
        """Return the timestamp column that the event time is taken from unchanged; None where Spark
        must compute it.

        `types` are the types of the records' columns.
        """
        plain = self.expression == ARRIVAL or self.expression.isidentifier()
        return self.expression if plain and types.get(self.expression) == "timestamp" else None

    def _no_time(self, operator: str, kind: str) -> PlanningError:
        problem = (
            f"{operator}: event_time={self.expression!r} is {kind}: expected timestamp or date."
        )
        return PlanningError(
            problem, "Convert it: to_timestamp(text), timestamp_millis(number).", operator=operator
        )


def build_event_time(
    stream: str,
    event_time: str | None,
    delay: timedelta,
    idle_after: timedelta | None,
    max_lag: timedelta | None,
) -> EventTime | None:
    """Return the event time for a user's arguments; None for an input without one."""
    options = {"delay": delay or None, "idle_after": idle_after, "max_watermark_lag": max_lag}
    given = {name: value for name, value in options.items() if value is not None}
    if event_time is None:
        for name in given:
            problem = (
                f"input stream {stream!r} has {name} without event_time: its records have no times."
            )
            step = f'Declare event_time="a column" or event_time=ARRIVAL, or leave {name} out.'
            raise ConfigurationError(problem, step, argument=name, stream=stream)
        return None
    if not event_time.strip():
        found, expected = (
            f"input stream {stream!r} has event_time={event_time!r}",
            "a Spark SQL expression, or ARRIVAL",
        )
        raise argument_error(found, expected, argument="event_time", stream=stream)
    for name, value in given.items():
        found = f"input stream {stream!r} has {name}"
        check_duration(value, found, argument=name, zero=name == "delay", stream=stream)
    return EventTime(event_time, delay, idle_after, max_lag)


_WIDTH = 20
# By default Spark omits nulls and truncates times to milliseconds.
_JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def make_records(
    frame: DataFrame,
    batch: BatchContext,
    *,
    by: Sequence[str],
    partitions: int,
    ordinal: Column,
    event_time: Column,
    behind: Column | None = None,
) -> DataFrame:
    """Return the rows as records of this batch: with hidden columns, which give them new positions.

    `by` are the columns that choose one of `partitions` partitions, `ordinal` is a text that is
    unique in the batch. If the rows have a TOMBSTONE column, it is kept. `behind` becomes BEHIND
    (see `hold_back_watermark`): the watermark that a late row is behind, null for others.
    """
    own = [named_column(name) for name in frame.columns if not name.startswith("__")]
    place = (
        F.pmod(F.hash(*[named_column(name) for name in by]), F.lit(partitions)) if by else F.lit(0)
    )
    return frame.select(
        *own,
        place.cast("int").alias(PARTITION),
        F.lit(batch.number).cast("bigint").alias(OFFSET),
        F.lit(batch.clock).cast("timestamp").alias(TIMESTAMP),
        (F.col(TOMBSTONE) if TOMBSTONE in frame.columns else F.lit(False)).alias(TOMBSTONE),
        F.lit(0).cast("int").alias(EPOCH),
        ordinal.alias(ORDINAL),
        event_time.cast("timestamp").alias(EVENT_TIME),
        (F.lit(None) if behind is None else behind).cast("timestamp").alias(BEHIND),
    )


def hold_back_watermark(behind: Column, micros: Column, by: timedelta) -> Column:
    """Return BEHIND of an operator's results: `behind` minus `by`, the delay that the operator adds
    to watermarks.

    `behind` is the watermark that the input record was behind, `micros` the event time of the
    result in microseconds. The value is null for a result that is not below the delayed watermark.
    The next operator decides by it whether the result is late, so that this does not depend on how
    batches are cut.
    """
    mark = F.unix_micros(behind) - F.lit(by // timedelta(microseconds=1))
    return F.when(micros < mark, F.timestamp_micros(mark))


def to_json_object(columns: Sequence[Column]) -> Column:
    """Return the text of a JSON object with these columns; it includes nulls, and times have
    microseconds.
    """
    return F.to_json(F.struct(*columns), _JSON_OPTIONS)


def stored_position_key(frame: DataFrame, batch: BatchContext) -> Column:
    """Return `position_key` with the batch's number, as a unique key of records that are stored as
    state.

    Positions alone are not unique over batches: a recreated or repartitioned stream has other
    records at the same ones.
    """
    return F.concat_ws("@", position_key(frame), F.lit(str(batch.number)))


def position_key(frame: DataFrame) -> Column:
    """Return a text for each record that is unique within the batch; sorted by it, records are
    ordered by position.
    """
    numbers = [F.lpad(F.col(name).cast("string"), _WIDTH, "0") for name in (PARTITION, OFFSET)]
    names = (*tie_breakers(frame.columns), *((ORIGIN,) if ORIGIN in frame.columns else ()))
    return F.concat_ws(
        ":", *numbers, *[F.coalesce(F.col(name).cast("string"), F.lit("")) for name in names]
    )


EXCLUSION = "__why"
"""Why a stream join or window ignores a record: one of the reasons below; null for records that
it uses.
"""
REPLAYED_REASON, DELETED, LATE, NULL_TIME, NULL_KEY = (
    "again",
    "tombstone",
    "late",
    "null time",
    "null key",
)
_COUNTERS = {"late": LATE, "null_times": NULL_TIME, "null_keys": NULL_KEY, "again": REPLAYED_REASON}
_COUNTERS |= {"tombstones": DELETED}


def exclusion_column(
    frame: DataFrame, keys: Sequence[str], null_time: Column, late: Column
) -> Column:
    """Return the values of EXCLUSION: the first reason to ignore each record, null for none.

    `null_time` and `late` are conditions.
    """
    reasons = [(F.col(REPLAYED), REPLAYED_REASON)] if REPLAYED in frame.columns else []
    null_key = reduce(or_, [named_column(name).isNull() for name in keys])
    reasons += [
        (F.col(TOMBSTONE), DELETED),
        (null_time, NULL_TIME),
        (null_key, NULL_KEY),
        (late, LATE),
    ]
    return F.coalesce(*[F.when(condition, F.lit(why)) for condition, why in reasons])


def exclusion_conditions() -> dict[str, Column]:
    """Return a condition for each reason to ignore records, by the name of the counter that
    counts them.
    """
    return {name: F.col(EXCLUSION) == why for name, why in _COUNTERS.items()}


# The input that the record came from ("left" or "right" of a stream join, "" of a window), why it
# was rejected ("late", "null time" or "null key"), its event time, and its columns as JSON.
LATE_RECORD_COLUMNS = {
    "side": "string",
    "why": "string",
    "event_time": "timestamp",
    "record": "string",
}


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The watermarks of an operator: it has received all records with earlier event times, except
    late ones.

    `before` is the watermark at the start of the batch; `after` includes the records of the batch,
    and is committed with it. None: no watermark yet.
    """

    before: datetime | None
    after: datetime | None


@dataclass(frozen=True, slots=True)
class LateRecords(Spec):
    """One record with LATE_RECORD_COLUMNS for each record that the stream join or window before
    it rejected.
    """

    kind: ClassVar[str] = "late-records"
    reads_late_records: ClassVar[bool] = True
    assigns_positions: ClassVar[bool] = True

    def summary(self) -> str:
        return "records that arrived too late"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns({name: ColumnFacts(kind) for name, kind in LATE_RECORD_COLUMNS.items()})

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(arriving[0].stream, (), UNKNOWN, context.operator)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        late = batch.diverted_late_records(operator).select(
            *LATE_RECORD_COLUMNS, "__place", EVENT_TIME, BEHIND
        )
        ordinal, time, behind = map(F.col, ("__place", EVENT_TIME, BEHIND))
        return make_records(
            late, batch, by=(), partitions=1, ordinal=ordinal, event_time=time, behind=behind
        )


def to_late_records(
    frame: DataFrame, why: Column, holds_back: timedelta, side: str = ""
) -> DataFrame:
    """Return rejected records in the form that `BatchContext.divert_late_records` takes; `why` is
    the reason of each.

    `holds_back` is the watermark delay of the operator that rejects them, `side` the input that
    they came from.
    """
    own = [named_column(name) for name in frame.columns if not name.startswith("__")]
    return frame.select(
        F.lit(side).alias("side"),
        why.alias("why"),
        F.col(EVENT_TIME).alias("event_time"),
        to_json_object(own).alias("record"),
        F.concat_ws("/", F.lit(side), position_key(frame)).alias("__place"),
        F.col(EVENT_TIME),
        hold_back_watermark(F.col(BEHIND), F.unix_micros(EVENT_TIME), holds_back).alias(BEHIND),
    )

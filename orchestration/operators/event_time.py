"""When the records of an input happened: what users declare of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns import BEHIND, EVENT_TIME, ORDINAL, ORIGIN, tie_breakers
from dagster_adjunct.orchestration.operators.operator import Flow, Spec
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN
from dagster_adjunct.resources.common import to_microseconds
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import named_column
from dagster_adjunct.resources.sql.checking import check_expression, nondeterministic_parts
from dagster_adjunct.resources.sql.parser import other_records_construct
from dagster_adjunct.resources.streams.system import EPOCH, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.batch_context import BatchContext
    from dagster_adjunct.orchestration.operators.columns import Columns, Types
    from dagster_adjunct.orchestration.operators.operator import PlanContext

ARRIVAL = TIMESTAMP
"""As an event time: when the record was written to its stream."""
MIN_MICROS, MAX_MICROS = (to_microseconds(moment.replace(tzinfo=UTC)) for moment in (datetime.min, datetime.max))
"""The years 1 to 9999, in microseconds since 1970."""
_TIME_TYPES = ("timestamp", "date")
_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class EventTime:
    """A Spark SQL expression over the records of an input, or ARRIVAL, that says when what they tell of happened.

    Records of a source partition come at most `delay` later than one of a later time; those that come later still are
    behind. A source partition that had no record for `idle_after` is not waited for; None: each is, always.
    A watermark that is further behind the clock than `max_lag` is warned of.
    """

    expression: str
    delay: timedelta = _ZERO
    idle_after: timedelta | None = None
    max_lag: timedelta | None = None

    @property
    def sql(self) -> tuple[str, ...]:
        """The expressions that users gave."""
        return () if self.expression == ARRIVAL else (self.expression,)

    def words(self) -> str:
        """Return what was declared, as plans show it."""
        by = "arrival" if self.expression == ARRIVAL else self.expression
        idle = "" if self.idle_after is None else f", idle after {self.idle_after}"
        return f"by {by}, {self.delay} late at most{idle}"

    def check(self, operator: str, columns: Columns, types: Types) -> None:
        """Raise PlanningError for an expression that is certainly wrong, or certainly no time."""
        if self.expression == ARRIVAL:
            return
        kind = check_expression(
            operator, self.expression, columns, types, next_step="Correct event_time, or leave it out for none."
        )
        if kind is not None and kind not in _TIME_TYPES:
            raise self._no_time(operator, kind)
        others, changing = (
            other_records_construct(self.expression),
            nondeterministic_parts(self.expression, types or {}),
        )
        if others or changing:
            effect = "depend on how records are cut into batches" if others else "change when the record is read again"
            raise PlanningError(
                f"{operator}: event_time={self.expression!r} takes {others or ', '.join(changing)}: a record's time is "
                f"told by the record alone, or it would {effect}.",
                "Write an expression over columns of the one record, or let what writes the stream say the time.",
                operator=operator,
            )

    def column(self, operator: str, records: DataFrame) -> Column:
        """Return the records' times. Raises PlanningError where Spark makes something else of the expression.

        What lies before the year 1 or after 9999 counts as no time: nobody means it, and it would end all windows.
        """
        from pyspark.sql import functions as F

        time = F.col(TIMESTAMP) if self.expression == ARRIVAL else F.expr(self.expression)
        kind = records.select(time.alias("time")).dtypes[0][1]
        if kind not in _TIME_TYPES:
            raise self._no_time(operator, kind)
        time = time.cast("timestamp")
        return F.when(F.unix_micros(time).between(F.lit(MIN_MICROS), F.lit(MAX_MICROS)), time)

    def column_name(self, types: Mapping[str, str]) -> str | None:
        """Return the column that is the time as it stands, of records with these types; None where Spark makes it."""
        plain = self.expression == ARRIVAL or self.expression.isidentifier()
        return self.expression if plain and types.get(self.expression) == "timestamp" else None

    def _no_time(self, operator: str, kind: str) -> PlanningError:
        return PlanningError(
            f"{operator}: event_time={self.expression!r} is {kind}: expected timestamp or date.",
            "Make a time of it: to_timestamp(text), timestamp_millis(number).",
            operator=operator,
        )


def build_event_time(
    stream: str,
    event_time: str | None,
    delay: timedelta,
    idle_after: timedelta | None,
    max_lag: timedelta | None = None,
) -> EventTime | None:
    """Return the event time that a user's arguments ask for; None for an input without."""
    if event_time is None:
        given = {
            "delay": delay != _ZERO,
            "idle_after": idle_after is not None,
            "max_watermark_lag": max_lag is not None,
        }
        if any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ConfigurationError(
                f"input stream {stream!r} has {name} without event_time: its records have no times.",
                f'Say when records happened (event_time="a column", or ARRIVAL), or leave {name} out.',
                argument=name,
                stream=stream,
            )
        return None
    if not isinstance(event_time, str) or not event_time.strip():
        raise ConfigurationError(
            f"input stream {stream!r} has event_time={event_time!r}: expected a Spark SQL expression, or ARRIVAL.",
            "Name the column that says when it happened.",
            argument="event_time",
            stream=stream,
        )
    if not isinstance(delay, timedelta) or delay < _ZERO:
        raise ConfigurationError(
            f"input stream {stream!r} has delay={delay!r}: expected a timedelta of nothing or more.",
            "Write how much later than others a record may come: delay=timedelta(minutes=5), say.",
            argument="delay",
            stream=stream,
        )
    _check_positive(stream, "idle_after", idle_after)
    _check_positive(stream, "max_watermark_lag", max_lag)
    return EventTime(event_time, delay, idle_after, max_lag)


def _check_positive(stream: str, argument: str, value: timedelta | None) -> None:
    if value is not None and (not isinstance(value, timedelta) or value <= _ZERO):
        raise ConfigurationError(
            f"input stream {stream!r} has {argument}={value!r}: expected a timedelta of more than nothing.",
            f"Write {argument}=timedelta(minutes=10), say, or leave it out.",
            argument=argument,
            stream=stream,
        )


# The hidden columns of records that an operator over time makes: of several others, from several batches.
#
# No position of an input tells what such a record is made of. It has one of its own: the batch that made it, a
# partition
# by its key, and a text by which all records of a batch have an order, the same however often the batch is run.


_WIDTH = 20
# Spark leaves out what is null otherwise, and cuts times to milliseconds.
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
    """Return the rows as records of this batch: with their own columns, and the hidden ones of made records.

    `by` is the columns that choose the partition, `ordinal` a text that is another one for each row of a batch. Of rows
    with TOMBSTONE it is kept. `behind` is the watermark that a row is behind (`held_back`), null for others.
    """
    from pyspark.sql import functions as F

    own = [named_column(name) for name in frame.columns if not name.startswith("__")]
    place = F.pmod(F.hash(*[named_column(name) for name in by]), F.lit(partitions)) if by else F.lit(0)
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
    """Return the watermark that a record is behind once an operator holds watermarks back by so much; null for none.

    An operator after that judges the record by it, whenever it arrives: how far batches have come says nothing.
    """
    from pyspark.sql import functions as F

    mark = F.unix_micros(behind) - F.lit(by // timedelta(microseconds=1))
    return F.when(micros < mark, F.timestamp_micros(mark))


def to_json_object(columns: Sequence[Column]) -> Column:
    """Return a JSON object of these columns as a text, with nulls, and times to the microsecond."""
    from pyspark.sql import functions as F

    return F.to_json(F.struct(*columns), _JSON_OPTIONS)


def stored_position_key(frame: DataFrame, batch: BatchContext) -> Column:
    """Return `place_of` for records that are kept from batch to batch: with the batch that they came with.

    A stream that is made anew, or repartitioned, has other records at the same positions.
    """
    from pyspark.sql import functions as F

    return F.concat_ws("@", position_key(frame), F.lit(str(batch.number)))


def position_key(frame: DataFrame) -> Column:
    """Return a text that is another one for each record of a batch, and sorts them by their positions."""
    from pyspark.sql import functions as F

    numbers = [F.lpad(F.col(name).cast("string"), _WIDTH, "0") for name in (PARTITION, OFFSET)]
    names = (*tie_breakers(frame), *((ORIGIN,) if ORIGIN in frame.columns else ()))
    return F.concat_ws(":", *numbers, *[F.coalesce(F.col(name).cast("string"), F.lit("")) for name in names])


# Of each record: which input it came by ("left", "right"; "" of an operator with one), why it was left out ("late",
# "null time", "null key"), its time, and its columns as JSON.
LATE_RECORD_COLUMNS = {"side": "string", "why": "string", "event_time": "timestamp", "record": "string"}


@dataclass(frozen=True, slots=True)
class LateRecords(Spec):
    """What the operator before has left out, one record of LATE for each."""

    kind: ClassVar[str] = "late-records"

    def summary(self) -> str:
        return "records that came too late"

    @property
    def reads_late_records(self) -> bool:
        return True

    @property
    def assigns_positions(self) -> bool:
        return True

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return Flow(flow.stream, tuple(LATE_RECORD_COLUMNS), (), UNKNOWN, context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        return dict(LATE_RECORD_COLUMNS)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        return make_records(
            batch.diverted_late_records(operator).select(*LATE_RECORD_COLUMNS, "__place", EVENT_TIME, BEHIND),
            batch,
            by=(),
            partitions=1,
            ordinal=F.col("__place"),
            event_time=F.col(EVENT_TIME),
            behind=F.col(BEHIND),
        )


def to_late_records(frame: DataFrame, why: Column, holds_back: timedelta, side: str = "") -> DataFrame:
    """Return records as they are handed to `BatchContext.leave_out`; `why` says why each was left out.

    `holds_back` is by how much the operator that leaves them out holds watermarks back.
    """
    from pyspark.sql import functions as F

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


def build_late_records(after: str, spec: Spec) -> LateRecords:
    """Return the records that the operator `after` leaves out. Raises PlanningError where it leaves out none."""
    if not spec.diverts_late_records:
        raise PlanningError(
            f"late_records after {after}: it leaves no records out.",
            "Ask a join of two streams, or a window, itself: joined.late_records().",
            operator=after,
        )
    return LateRecords()

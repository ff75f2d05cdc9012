"""`EventTime`, the declared event time of an input stream, and the range of times that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns import Names, Types, check_duration
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.sql.checking import check_expression, nondeterministic_parts
from dagster_adjunct.resources.sql.expression import other_records_construct
from dagster_adjunct.resources.streams.system import TIMESTAMP
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


ARRIVAL = TIMESTAMP
"""As `event_time=`: the event time of a record is the time when it was written to its stream."""
MIN_MICROS = to_microseconds(datetime.min.replace(tzinfo=UTC))
MAX_MICROS = to_microseconds(datetime.max.replace(tzinfo=UTC))
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
        if self.expression == ARRIVAL:
            return ()
        return (self.expression,)

    def describe(self) -> str:
        """Return a description for plans."""
        by = self.expression
        if by == ARRIVAL:
            by = "arrival"
        described = f"by {by}, {self.delay} late at most"
        if self.idle_after is None:
            return described
        return f"{described}, idle after {self.idle_after}"

    def check(self, operator: str, columns: Names, types: Types) -> None:
        """Raise PlanningError for an expression that is certainly invalid, or certainly not a time.

        The value must depend on the record alone: other records, the clock and chance are rejected,
        too.
        """
        if self.expression == ARRIVAL:
            return
        step = "Correct event_time, or leave it out for none."
        kind = check_expression(operator, self.expression, columns, types, next_step=step)
        if kind is not None and kind not in TIME_TYPES:
            raise self._no_time(operator, kind)
        used = other_records_construct(self.expression)
        if used:
            effect = "depend on how records are cut into batches"
        else:
            used = ", ".join(nondeterministic_parts(self.expression, types or {}))
            effect = "change when the record is read again"
        if used:
            problem = (
                f"{operator}: event_time={self.expression!r} uses {used}: a record's time must"
                f" depend on the record alone, or it would {effect}."
            )
            step = (
                "Write an expression over columns of the record, or have its producer add the time."
            )
            raise PlanningError(problem, step, operator=operator)

    def column(self, operator: str, records: DataFrame) -> Column:
        """Return the records' event times as timestamps; raises PlanningError for an expression of
        another type.

        Times before the year 1 or after 9999 become null: they are mistakes, and would close all
        windows.
        """
        time = F.expr(self.expression)  # ARRIVAL is the name of a column
        ((_, kind),) = records.select(time.alias("time")).dtypes
        if kind not in TIME_TYPES:
            raise self._no_time(operator, kind)
        time = time.cast("timestamp")
        return F.when(F.unix_micros(time).between(F.lit(MIN_MICROS), F.lit(MAX_MICROS)), time)

    def column_name(self, types: Mapping[str, str]) -> str | None:
        """Return the timestamp column that the event time is taken from unchanged; None where Spark
        must compute it.

        `types` are the types of the records' columns.
        """
        is_plain = self.expression == ARRIVAL or self.expression.isidentifier()
        if is_plain and types.get(self.expression) == "timestamp":
            return self.expression
        return None

    def _no_time(self, operator: str, kind: str) -> PlanningError:
        """Return the error for an expression of this type, which is no time."""
        problem = (
            f"{operator}: event_time={self.expression!r} is {kind}: expected timestamp or date."
        )
        step = "Convert it: to_timestamp(text), timestamp_millis(whole number)."
        return PlanningError(problem, step, operator=operator)


def build_event_time(
    stream: str,
    event_time: str | None,
    delay: timedelta,
    idle_after: timedelta | None,
    max_lag: timedelta | None,
) -> EventTime | None:
    """Return the event time for a user's arguments; None for an input without one."""
    what = f"input stream {stream!r} has"
    given = {"idle_after": idle_after, "max_watermark_lag": max_lag}
    if delay:
        given = {"delay": delay, **given}
    for name, span in given.items():
        if span is None:
            continue
        if event_time is None:
            problem = f"{what} {name} without event_time: its records have no times."
            step = f'Declare event_time="a column" or event_time=ARRIVAL, or leave {name} out.'
            raise ConfigurationError(problem, step, argument=name, stream=stream)
        may_be_zero = name == "delay"
        check_duration(span, f"{what} {name}", argument=name, zero=may_be_zero, stream=stream)
    if event_time is None:
        return None
    if not event_time.strip():
        found = f"{what} event_time={event_time!r}"
        expected = "a Spark SQL expression, or ARRIVAL"
        raise argument_error(found, expected, argument="event_time", stream=stream)
    return EventTime(event_time, delay, idle_after, max_lag)

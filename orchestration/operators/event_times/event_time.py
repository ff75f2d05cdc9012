"""When the records of an input happened: what users declare of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.sql.changing_values import changing_values
from dagster_adjunct.resources.sql.checking import checked_expression
from dagster_adjunct.resources.sql.parsing import other_records
from dagster_adjunct.resources.streams.interface.stream_system import TIMESTAMP
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Columns, Types

ARRIVAL = TIMESTAMP
"""As an event time: when the record was written to its stream."""
FIRST, LAST = (microseconds(moment.replace(tzinfo=UTC)) for moment in (datetime.min, datetime.max))
"""The years 1 to 9999, in microseconds since 1970."""
_KINDS = ("timestamp", "date")
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
        kind = checked_expression(
            operator, self.expression, columns, types, next_step="Correct event_time, or leave it out for none."
        )
        if kind is not None and kind not in _KINDS:
            raise self._no_time(operator, kind)
        others, changing = other_records(self.expression), changing_values(self.expression, types or {})
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
        if kind not in _KINDS:
            raise self._no_time(operator, kind)
        time = time.cast("timestamp")
        return F.when(F.unix_micros(time).between(F.lit(FIRST), F.lit(LAST)), time)

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


def checked_event_time(
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
    _check_more_than_nothing(stream, "idle_after", idle_after)
    _check_more_than_nothing(stream, "max_watermark_lag", max_lag)
    return EventTime(event_time, delay, idle_after, max_lag)


def _check_more_than_nothing(stream: str, argument: str, value: timedelta | None) -> None:
    if value is not None and (not isinstance(value, timedelta) or value <= _ZERO):
        raise ConfigurationError(
            f"input stream {stream!r} has {argument}={value!r}: expected a timedelta of more than nothing.",
            f"Write {argument}=timedelta(minutes=10), say, or leave it out.",
            argument=argument,
            stream=stream,
        )

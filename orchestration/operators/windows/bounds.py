"""The start and end of tumbling and sliding windows in microseconds since 1970, as Spark columns.

Windows by the clock of a time zone start when its clock first shows a multiple of their length. If the clock was put
forward past that, they start when it was put forward. With a length of one hour, a window also starts whenever the
clock shows a full hour again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from dagster_adjunct.orchestration.operators.windows.aggregates import Sliding, Tumbling, to_micros
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.column_sql import F

if TYPE_CHECKING:
    from pyspark.sql import Column

_HOUR = 3_600_000_000
_EPOCH = datetime(1970, 1, 1)


def window_start(time: Column, kind: Tumbling) -> Column:
    """Return the start of the window that a time is in."""
    if kind.zone is None or kind.local is None:
        assert kind.size is not None
        return time - F.pmod(time, F.lit(to_micros(kind.size)))
    zone, length = kind.zone, to_micros(kind.local)
    _check_known_to_spark(zone)
    label = _floor(_utc_to_clock(time, zone), length)
    # A clock that is put back shows times twice, and one that is put forward skips some, so the label may be that of
    # the window before or after.
    begin, following = _clock_to_utc(label, zone, length), _clock_to_utc(label + length, zone, length)
    start = (
        F.when(time < begin, _clock_to_utc(label - length, zone, length))
        .when(time >= following, following)
        .otherwise(begin)
    )
    if length != _HOUR:
        return start
    again = time - (_utc_to_clock(time, zone) - label)
    return F.when(_utc_to_clock(again, zone) == label, again).otherwise(start)


def window_end(start: Column, kind: Tumbling | Sliding) -> Column:
    """Return the exclusive end of the window with this start."""
    if isinstance(kind, Sliding) or kind.zone is None or kind.local is None:
        assert kind.size is not None
        return start + to_micros(kind.size)
    zone, length = kind.zone, to_micros(kind.local)
    end = _clock_to_utc(_floor(_utc_to_clock(start, zone), length) + length, zone, length)
    if length != _HOUR:
        return end
    later = start + length
    again = F.pmod(_utc_to_clock(later, zone), F.lit(length)) == 0
    return F.when(again & ((later < end) | (end <= start)), later).otherwise(end)


@cache
def _check_known_to_spark(zone: str) -> None:
    """Raise ConfigurationError for a zone that Spark's Java does not know: its database differs from Python's."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    query = "select from_utc_timestamp(timestamp'1970-01-01 00:00:00', :zone)"
    try:
        SparkSession.active().sql(query, args={"zone": zone}).collect()
    except PySparkException as error:
        if "INVALID_TIMEZONE" not in str(error):
            raise
        problem = f"Tumbling has zone={zone!r}, which Spark's Java does not know."
        step = 'Write another name of the same clocks, such as "Asia/Taipei" for "ROC", or update Java.'
        raise ConfigurationError(problem, step, argument="zone") from error


def _floor(clock: Column, length: int) -> Column:
    return clock - F.pmod(clock, F.lit(length))


def _utc_to_clock(moment: Column, zone: str) -> Column:
    """Return the local time in the zone, in microseconds since its 1970-01-01T00:00."""
    return F.unix_micros(F.from_utc_timestamp(F.timestamp_micros(moment), zone))


def _clock_to_utc(clock: Column, zone: str, length: int) -> Column:
    """Return when the clock of the zone first shows this multiple of `length`, or is put forward past it."""
    moment = F.unix_micros(F.to_utc_timestamp(F.timestamp_micros(clock), zone))
    # Spark adds the amount by which the clock was put forward, which is too late if it was not at a multiple before.
    for skipped, put_forward in skipped_multiples(zone, length):
        moment = F.when(clock == skipped, put_forward).otherwise(moment)
    return moment


@cache
def skipped_multiples(zone: str, length: int) -> tuple[tuple[int, int], ...]:
    """Return the multiples of `length` that the clock of the zone skipped, each with the time at which it did.

    In St. John's, for example, clocks were put forward at 00:01 until 2011, and never showed 01:00 that day.
    """
    found = []
    for moment, before, after in _clock_changes(zone):
        shown, next_shown = moment + before, moment + after
        first = (shown // length + 1) * length
        found += [(multiple, moment) for multiple in range(first, next_shown, length)]
    return tuple(found)


@cache
def _clock_changes(zone: str) -> tuple[tuple[int, int, int], ...]:
    """Return when the clock of the zone was or will be changed, with its offsets before and after."""
    clocks, step = ZoneInfo(zone), timedelta(days=3)  # no zone has changed twice within that

    def offset(moment: datetime) -> timedelta:
        return clocks.utcoffset(moment.replace(tzinfo=UTC).astimezone(clocks)) or timedelta(0)

    changes, time = [], datetime(1850, 1, 1)
    before = offset(time)
    while time < datetime(2100, 1, 1):
        after = offset(time + step)
        if after != before:
            low, high = time, time + step
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) // 2
                low, high = (middle, high) if offset(middle) == before else (low, middle)
            moment = high.replace(microsecond=0)
            changes.append(tuple(span // timedelta(microseconds=1) for span in (moment - _EPOCH, before, after)))
        time, before = time + step, after
    return tuple((moment, before, after) for moment, before, after in changes)

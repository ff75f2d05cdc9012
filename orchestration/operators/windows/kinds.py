"""The kinds of windows: tumbling, sliding and sessions, and where windows start and end.

Windows by the clock of a time zone start when that clock first shows a multiple of their length. If
it never shows the multiple because it was put forward past it, they start when it was put forward.
With a length of one hour, a window also starts when the clock, put back, shows a full hour for the
second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.orchestration.operators.columns import MAX_DURATION, check_duration
from dagster_adjunct.orchestration.operators.windows.zone_rules import (
    clock_changes,
    differing_spans,
)
from dagster_adjunct.resources.arguments import argument_error, check_zone
from dagster_adjunct.resources.errors import ConfigurationError, ZoneRulesError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column

_HOUR = 3_600_000_000
_MAX_OVERLAP = 1_000
_HOURS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class ZoneClock:
    """The clock of a zone, by which windows begin; `shown` is their length as the clock shows it.

    All times are in microseconds since 1970, in UTC or as the clock shows them.
    """

    zone: str
    shown: timedelta

    @property
    def length(self) -> int:
        return to_micros(self.shown)

    def floor(self, shown: Column) -> Column:
        """Return what the clock shows, rounded down to a multiple of the length."""
        return shown - F.pmod(shown, F.lit(self.length))

    def show(self, moment: Column) -> Column:
        """Return what the clock shows at a time in UTC."""
        return F.unix_micros(F.from_utc_timestamp(F.timestamp_micros(moment), self.zone))

    def find(self, shown: Column) -> Column:
        """Return the time in UTC at which the clock first shows a multiple of the length, or is put
        forward past it.
        """
        moment = F.unix_micros(F.to_utc_timestamp(F.timestamp_micros(shown), self.zone))
        # For a skipped time, Spark adds the amount by which the clock was put forward. That is too
        # late if the clock was not put forward at a multiple of the length.
        for skipped, put_forward in skipped_multiples(self.zone, self.length):
            moment = F.when(shown == skipped, put_forward).otherwise(moment)
        return moment


@validated
@dataclass(frozen=True, slots=True)
class Tumbling:
    """Consecutive windows: each time is in exactly one of them.

    Windows of one `size` start at multiples of it since 1970-01-01T00:00Z. Windows of `days` or
    `hours` follow the clock of a `zone`, such as "America/New_York": days start at midnight there
    and have 23 or 25 hours when the clock changes; several days are counted from 1970-01-01. Hours
    (1, 2, 3, 4, 6, 8 or 12) are counted from midnight. With `hours=1`, an hour that the clock shows
    twice is two windows; longer windows contain both.

    Raises ConfigurationError for other arguments.
    """

    size: timedelta | None = None
    days: int | None = None
    hours: int | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("size", "days", "hours") if getattr(self, name) is not None]
        if len(given) != 1:
            problem = (
                f"Tumbling has {' and '.join(given) or 'no size'}: expected a size, or days= or"
                " hours= of a zone."
            )
            step = (
                "Write Tumbling(timedelta(minutes=5)), or Tumbling(days=1,"
                ' zone="America/New_York").'
            )
            raise ConfigurationError(problem, step, argument=given[-1] if given else "size")
        if self.size is not None:
            check_duration(self.size, "Tumbling has size", argument="size", most=MAX_DURATION)
        if (self.size is None) != (self.zone is not None):
            without = "it names no zone"
            if self.zone is not None:
                without = "a size does not follow the clock of a zone"
            problem = (
                f"Tumbling has {given[0]}={getattr(self, given[0])!r} and zone={self.zone!r}:"
                f" {without}."
            )
            step = (
                'Write days=1 or hours=1 with a zone, such as zone="UTC"; or a timedelta without'
                " one."
            )
            raise ConfigurationError(problem, step, argument="zone")
        if self.zone is not None:
            _check_calendar(self.days, self.hours, self.zone)

    @property
    def clock(self) -> ZoneClock | None:
        """The clock of its zone, and the length of a window as it shows it; None for windows of a
        fixed `size`.
        """
        if self.zone is None:
            return None
        return ZoneClock(self.zone, timedelta(days=self.days or 0, hours=self.hours or 0))

    def describe(self) -> str:
        """Return a description for plans."""
        if self.zone is None:
            return f"tumbling {self.size}"
        count = self.hours
        unit = "hour"
        if self.days is not None:
            count = self.days
            unit = "day"
        plural = "" if count == 1 else "s"
        return f"tumbling {count} {unit}{plural} of {self.zone}"


@validated
@dataclass(frozen=True, slots=True)
class Sliding:
    """Overlapping windows of one `size`, which start at multiples of `every`: each time is in
    size / every of them.
    """

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        check_duration(self.size, "Sliding has size", argument="size", most=MAX_DURATION)
        check_duration(self.every, "Sliding has every", argument="every", most=MAX_DURATION)
        if not self.every <= self.size <= self.every * _MAX_OVERLAP:
            problem = (
                f"Sliding has size={self.size} and every={self.every}: expected a size of 1 to"
                f" {_MAX_OVERLAP:,} times every; each record is counted in that many windows."
            )
            step = (
                "Choose others; for windows with gaps between them, filter the results of Tumbling."
            )
            raise ConfigurationError(problem, step, argument="every")

    def describe(self) -> str:
        """Return a description for plans."""
        return f"sliding {self.size} every {self.every}"


@validated
@dataclass(frozen=True, slots=True)
class Session:
    """A window for each series of records of a key in which each record is less than `gap` later
    than the one before.

    A session ends `gap` after its last record.
    """

    gap: timedelta

    def __post_init__(self) -> None:
        check_duration(self.gap, "Session has gap", argument="gap", most=MAX_DURATION)

    def describe(self) -> str:
        """Return a description for plans."""
        return f"sessions with gaps of {self.gap}"


Kind: TypeAlias = Tumbling | Sliding | Session


def to_micros(length: timedelta) -> int:
    """Return a duration in microseconds."""
    return length // timedelta(microseconds=1)


def max_duration_after(kind: Kind) -> timedelta:
    """Return how much later than a record the end of a window with it may be, if it gets no later
    record.

    That is the size of the window, or the gap of a session. A zone's clock has been put back by at
    most a day.
    """
    if isinstance(kind, Session):
        return kind.gap
    if isinstance(kind, Tumbling) and kind.clock is not None:
        return kind.clock.shown + timedelta(days=1)
    assert kind.size is not None
    return kind.size


def _check_calendar(days: int | None, hours: int | None, zone: str) -> None:
    """Raise ConfigurationError for an unsupported number of days or hours, and for an unknown
    zone.
    """
    if days is not None and days not in range(1, 366):
        expected = "a whole number from 1 to 365"
        raise argument_error(f"Tumbling has days={days!r}", expected, argument="days")
    if hours is not None and hours not in _HOURS:  # windows of hours are counted from midnight
        expected = f"hours that divide a day: one of {', '.join(map(str, _HOURS))}"
        raise argument_error(f"Tumbling has hours={hours!r}", expected, argument="hours")
    check_zone("Tumbling has zone", zone, argument="zone")


def window_start(time: Column, kind: Tumbling) -> Column:
    """Return the start of the window that a time is in, both in microseconds since 1970."""
    clock = kind.clock
    if clock is None:
        assert kind.size is not None
        return time - F.pmod(time, F.lit(to_micros(kind.size)))
    from pyspark.sql import SparkSession

    length = clock.length
    spans = differing_spans(SparkSession.active(), clock.zone)
    label = clock.floor(clock.show(time))
    # The label is the clock's time, rounded down. A clock that is put back shows times twice, and
    # one that is put forward skips some, so the label may be that of the window before or after.
    begin = clock.find(label)
    following = clock.find(label + length)
    start = (
        F.when(time < begin, clock.find(label - length))
        .when(time >= following, following)
        .otherwise(begin)
    )
    start = _refuse_spans(start, time, kind, spans)
    if length != _HOUR:
        return start
    again = time - (clock.show(time) - label)
    return F.when(clock.show(again) == label, again).otherwise(start)


def _refuse_spans(
    start: Column, time: Column, kind: Tumbling, spans: Sequence[tuple[int, int]]
) -> Column:
    """Return the start of a record's window, which raises if the window may be in one of these
    spans.

    In them, long ago or far ahead, Java and Python have different rules for the zone.
    """
    for first, last in spans:
        problem = F.concat(
            F.lit(f"{kind.describe()}: a record is of "),
            F.timestamp_micros(time).cast("string"),
            F.lit(f", for which Java and Python have different rules of the zone {kind.zone}."),
        )
        step = (
            "Filter records of that time before the window, or count them by windows of a fixed"
            " size."
        )
        refused = raise_error_column(ZoneRulesError, problem, step, zone=kind.zone or "")
        reach = to_micros(max_duration_after(kind))
        is_refused = time.between(first - reach, last + reach)
        start = F.when(is_refused, refused.cast("bigint")).otherwise(start)
    return start


def window_end(start: Column, kind: Tumbling | Sliding) -> Column:
    """Return the exclusive end of the window with this start, both in microseconds since 1970."""
    clock = kind.clock if isinstance(kind, Tumbling) else None
    if clock is None:
        assert kind.size is not None
        return start + to_micros(kind.size)
    length = clock.length
    end = clock.find(clock.floor(clock.show(start)) + length)
    if length != _HOUR:
        return end
    later = start + length
    again = F.pmod(clock.show(later), F.lit(length)) == 0
    return F.when(again & ((later < end) | (end <= start)), later).otherwise(end)


@cache
def skipped_multiples(zone: str, length: int) -> tuple[tuple[int, int], ...]:
    """Return pairs (local time, UTC time): the multiples of `length` that the zone's clock skipped,
    and when it did.

    All in microseconds. In St. John's, for example, clocks were put forward at 00:01 until 2011,
    and never showed 01:00 that day.
    """
    found = []
    for moment, before, after in clock_changes(zone):
        shown = moment + before
        next_shown = moment + after
        first = (shown // length + 1) * length
        found += [(multiple, moment) for multiple in range(first, next_shown, length)]
    return tuple(found)

"""The kinds of windows: tumbling, sliding and sessions, and where windows start and end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.orchestration.operators.columns import MAX_DURATION, check_duration
from dagster_adjunct.orchestration.operators.windows.zone_clock import (
    DAY,
    MONDAY,
    Begins,
    Months,
    Multiples,
    ZoneClock,
)
from dagster_adjunct.orchestration.operators.windows.zone_rules import differing_spans
from dagster_adjunct.resources.arguments import argument_error, check_zone
from dagster_adjunct.resources.errors import ConfigurationError, ZoneRulesError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column

_MAX_OVERLAP = 1_000
_COUNTS: Mapping[str, tuple[Collection[int], str]] = {
    "hours": ((1, 2, 3, 4, 6, 8, 12), "hours that divide a day: one of 1, 2, 3, 4, 6, 8, 12"),
    "days": (range(1, 366), "a whole number from 1 to 365"),
    "weeks": (
        (1,),
        "1, because calendars have no first week from which to count several; days=14 counts from"
        " 1970-01-01, a Thursday",
    ),
    "months": ((1, 3, 6, 12), "a month, a quarter, half a year or a year: one of 1, 3, 6, 12"),
}
"""The units of a zone's calendar, and how many of each a window may have."""


@validated
@dataclass(frozen=True, slots=True)
class Tumbling:
    """Consecutive windows: each time is in exactly one of them.

    Windows of one `size` start at multiples of it since 1970-01-01T00:00Z. Windows of `hours`,
    `days`, `weeks` or `months` follow the clock of a `zone`, such as "America/New_York". Days start
    at midnight there and have 23 or 25 hours when the clock changes; several days are counted from
    1970-01-01. A week (1) starts on Monday; months (1, 3, 6 or 12) are counted from January. Hours
    (1, 2, 3, 4, 6, 8 or 12) are counted from midnight. With `hours=1`, an hour that the clock shows
    twice is two windows; longer windows contain both.

    Raises ConfigurationError for other arguments.
    """

    size: timedelta | None = None
    hours: int | None = None
    days: int | None = None
    weeks: int | None = None
    months: int | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("size", *_COUNTS) if getattr(self, name) is not None]
        if len(given) != 1:
            problem = (
                f"Tumbling has {' and '.join(given) or 'no size'}: expected a size, or one of"
                f" {', '.join(f'{unit}=' for unit in _COUNTS)} of a zone."
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
                'Write hours=, days=, weeks= or months= with a zone, such as zone="UTC"; or a'
                " timedelta without one."
            )
            raise ConfigurationError(problem, step, argument="zone")
        if self.zone is not None:
            unit, count = self._calendar
            counts, expected = _COUNTS[unit]
            if count not in counts:
                raise argument_error(f"Tumbling has {unit}={count!r}", expected, argument=unit)
            check_zone("Tumbling has zone", self.zone, argument="zone")

    @property
    def _calendar(self) -> tuple[str, int]:
        """The unit of the calendar, and how many of it a window has, for windows of a zone."""
        (given,) = [unit for unit in _COUNTS if getattr(self, unit) is not None]
        return given, getattr(self, given)

    @property
    def clock(self) -> ZoneClock | None:
        """The clock of its zone, with the begins of windows; None for windows of a fixed `size`."""
        if self.zone is None:
            return None
        begins: Begins
        if self.months is not None:
            begins = Months(self.months)
        elif self.weeks is not None:
            begins = Multiples(self.weeks * 7 * DAY, origin=MONDAY)
        else:
            begins = Multiples(to_micros(timedelta(days=self.days or 0, hours=self.hours or 0)))
        return ZoneClock(self.zone, begins)

    def describe(self) -> str:
        """Return a description for plans."""
        if self.zone is None:
            return f"tumbling {self.size}"
        unit, count = self._calendar
        if count == 1:
            unit = unit.removesuffix("s")
        return f"tumbling {count} {unit} of {self.zone}"


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
        return kind.clock.begins.longest + timedelta(days=1)
    assert kind.size is not None
    return kind.size


def window_start(time: Column, kind: Tumbling) -> Column:
    """Return the start of the window that a time is in, both in microseconds since 1970."""
    clock = kind.clock
    if clock is None:
        assert kind.size is not None
        return time - F.pmod(time, F.lit(to_micros(kind.size)))
    from pyspark.sql import SparkSession

    begins = clock.begins
    spans = differing_spans(SparkSession.active(), clock.zone)
    label = begins.floor(clock.show(time))
    # The label is the clock's time, rounded down. A clock that is put back shows times twice, and
    # one that is put forward skips some, so the label may be that of the window before or after.
    begin = clock.find(label)
    following = clock.find(begins.shift(label, 1))
    start = (
        F.when(time < begin, clock.find(begins.shift(label, -1)))
        .when(time >= following, following)
        .otherwise(begin)
    )
    start = _refuse_spans(start, time, kind, spans)
    if not clock.repeats_begins:
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
    begins = clock.begins
    end = clock.find(begins.shift(begins.floor(clock.show(start)), 1))
    if not clock.repeats_begins:
        return end
    later = begins.shift(start, 1)
    again = begins.floor(clock.show(later)) == clock.show(later)
    return F.when(again & ((later < end) | (end <= start)), later).otherwise(end)

"""The kinds of windows: tumbling, sliding and sessions, and where windows start and end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dagster_adjunct.orchestration.operators.columns import check_duration
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
            units = ", ".join(f"{unit}=" for unit in _COUNTS)
            problem = (
                f"Tumbling has {' and '.join(given) or 'no size'}: expected a size, or one of"
                f" {units} of a zone."
            )
            step = (
                "Write Tumbling(timedelta(minutes=5)), or Tumbling(days=1,"
                ' zone="America/New_York").'
            )
            argument = given[-1] if given else "size"
            raise ConfigurationError(problem, step, argument=argument)
        if self.size is not None:
            check_duration(self.size, "Tumbling has size", argument="size", limited=True)
        follows_clock = self.size is None
        has_zone = self.zone is not None
        if follows_clock != has_zone:
            if has_zone:
                reason = "a size does not follow the clock of a zone"
            else:
                reason = "it names no zone"
            (length,) = given
            problem = (
                f"Tumbling has {length}={getattr(self, length)!r} and zone={self.zone!r}: {reason}."
            )
            step = (
                'Write hours=, days=, weeks= or months= with a zone, such as zone="UTC"; or a'
                " timedelta without one."
            )
            raise ConfigurationError(problem, step, argument="zone")
        if self.zone is not None:
            calendar = self._calendar_length
            numbers, expected = _COUNTS[calendar.unit]
            if calendar.number not in numbers:
                found = f"Tumbling has {calendar.unit}={calendar.number!r}"
                raise argument_error(found, expected, argument=calendar.unit)
            check_zone("Tumbling has zone", self.zone, argument="zone")

    @property
    def _calendar_length(self) -> _CalendarLength:
        """The length of windows of a zone."""
        (unit,) = [unit for unit in _COUNTS if getattr(self, unit) is not None]
        return _CalendarLength(unit, getattr(self, unit))

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
        length = self._calendar_length
        unit = length.unit
        if length.number == 1:
            unit = unit.removesuffix("s")
        return f"tumbling {length.number} {unit} of {self.zone}"


class _CalendarLength(NamedTuple):
    """The length of a window by the calendar: a unit ("days"), and how many of it."""

    unit: str
    number: int


@validated
@dataclass(frozen=True, slots=True)
class Sliding:
    """Overlapping windows of one `size`, which start at multiples of `every`: each time is in
    size / every of them.
    """

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        check_duration(self.size, "Sliding has size", argument="size", limited=True)
        check_duration(self.every, "Sliding has every", argument="every", limited=True)
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
        check_duration(self.gap, "Session has gap", argument="gap", limited=True)

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
    """Return the start of the window that a time is in, both in microseconds since 1970.

    For windows of a zone, it raises for times of which Java and Python may have different rules,
    which the first call for a zone finds out by a Spark job (`differing_spans`).
    """
    clock = kind.clock
    if clock is None:
        assert kind.size is not None
        return time - F.pmod(time, F.lit(to_micros(kind.size)))
    from pyspark.sql import SparkSession

    begins = clock.begins
    spans = differing_spans(SparkSession.active(), clock.zone)
    shown_begin = begins.floor(clock.show(time))
    # A clock that is put back shows times twice, and one that is put forward skips some, so what it
    # showed, rounded down, may be the begin of the window before or after.
    begin = clock.find(shown_begin)
    following = clock.find(begins.shift(shown_begin, 1))
    previous = clock.find(begins.shift(shown_begin, -1))
    start = F.when(time < begin, previous).when(time >= following, following).otherwise(begin)
    start = _reject_spans(start, time, kind, spans)
    if not clock.repeats_begins:
        return start
    # The last time at which the clock showed the begin, if it showed it again after it was put
    # back.
    repeated = time - (clock.show(time) - shown_begin)
    return F.when(clock.show(repeated) == shown_begin, repeated).otherwise(start)


def _reject_spans(
    start: Column, time: Column, kind: Tumbling, spans: Sequence[tuple[int, int]]
) -> Column:
    """Return the start of a record's window, which raises if the window may be in one of these
    `spans`.

    The spans are long ago or far ahead: in them, Java and Python have different rules for the zone.
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
        failure = raise_error_column(ZoneRulesError, problem, step, zone=kind.zone or "")
        reach = to_micros(max_duration_after(kind))
        may_be_within = time.between(first - reach, last + reach)
        start = F.when(may_be_within, failure.cast("bigint")).otherwise(start)
    return start


def window_end(start: Column, kind: Tumbling | Sliding) -> Column:
    """Return the exclusive end of the window with this start, both in microseconds since 1970."""
    clock = kind.clock if isinstance(kind, Tumbling) else None
    if clock is None:
        assert kind.size is not None
        return start + to_micros(kind.size)
    begins = clock.begins
    begin = begins.floor(clock.show(start))
    end = clock.find(begins.shift(begin, 1))
    if not clock.repeats_begins:
        return end
    # An hour later in UTC, the clock may show the same or another begin.
    later = begins.shift(start, 1)
    is_begin = begins.floor(clock.show(later)) == clock.show(later)
    is_nearer = (later < end) | (end <= start)
    return F.when(is_begin & is_nearer, later).otherwise(end)

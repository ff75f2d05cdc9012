"""The clock of a time zone, and when windows begin by it.

A window begins when the clock first shows its begin, such as a midnight. If the clock never shows
it because it was put forward past it, the window begins when the clock was put forward. Windows of
one hour also begin when the clock, put back, shows a full hour for the second time.

All times are in microseconds since 1970, in UTC or as the clock shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.orchestration.operators.windows.zone_rules import clock_changes
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column

HOUR = 3_600_000_000
DAY = 24 * HOUR
MONDAY = 4 * DAY
"""The first Monday of 1970, as clocks show it."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Multiples:
    """Windows of one length as the clock shows it: one of them begins at `origin`."""

    length: int
    origin: int = 0

    @property
    def longest(self) -> timedelta:
        """The length of the longest window."""
        return timedelta(microseconds=self.length)

    def floor(self, shown: Column) -> Column:
        """Return the begin of the window that a time is in, as the clock shows both."""
        return shown - F.pmod(shown - self.origin, F.lit(self.length))

    def shift(self, begin: Column, windows: int) -> Column:
        """Return the begin of the window that is so many later, as the clock shows both."""
        return begin + windows * self.length

    def following(self, shown: int) -> int:
        """Return the first begin after a time, as the clock shows both."""
        return shown + self.length - (shown - self.origin) % self.length


@dataclass(frozen=True, slots=True)
class Months:
    """Windows of 1, 3, 6 or 12 months of the calendar, the first of which begins in January."""

    count: int

    @property
    def longest(self) -> timedelta:
        """The length of the longest window."""
        most_days = {1: 31, 3: 92, 6: 184, 12: 366}
        return timedelta(days=most_days[self.count])

    def floor(self, shown: Column) -> Column:
        """Return the begin of the window that a time is in, as the clock shows both."""
        date = _to_date(shown)
        into_window = F.pmod(F.month(date) - 1, F.lit(self.count))
        return _to_micros(F.add_months(F.trunc(date, "month"), -into_window))

    def shift(self, begin: Column, windows: int) -> Column:
        """Return the begin of the window that is so many later, as the clock shows both."""
        return _to_micros(F.add_months(_to_date(begin), windows * self.count))

    def following(self, shown: int) -> int:
        """Return the first begin after a time, as the clock shows both."""
        time = _EPOCH + timedelta(microseconds=shown)
        months = 12 * time.year + time.month - 1
        first_of_next = months + self.count - months % self.count
        year, month = divmod(first_of_next, 12)
        return to_microseconds(datetime(year, month + 1, 1, tzinfo=UTC))


Begins: TypeAlias = Multiples | Months


def _to_date(shown: Column) -> Column:
    """Return the date of a time that the clock shows."""
    # Spark's own casts of timestamps depend on the time zone of the session.
    days = F.call_function("div", shown - F.pmod(shown, F.lit(DAY)), F.lit(DAY))
    return F.date_from_unix_date(days.cast("int"))


def _to_micros(date: Column) -> Column:
    """Return the midnight at which a date begins, as the clock shows it."""
    return F.unix_date(date).cast("bigint") * DAY


@dataclass(frozen=True, slots=True)
class ZoneClock:
    """The clock of a zone, and the begins of windows: the times, as the clock shows them, at which
    windows begin.
    """

    zone: str
    begins: Begins

    @property
    def repeats_begins(self) -> bool:
        """Whether a window also begins when the clock, put back, shows a begin again."""
        return self.begins == Multiples(HOUR)

    def show(self, moment: Column) -> Column:
        """Return what the clock shows at a time in UTC."""
        return F.unix_micros(F.from_utc_timestamp(F.timestamp_micros(moment), self.zone))

    def find(self, begin: Column) -> Column:
        """Return the time in UTC at which the clock first shows a begin, or is put forward past
        it.
        """
        moment = F.unix_micros(F.to_utc_timestamp(F.timestamp_micros(begin), self.zone))
        # For a skipped time, Spark adds the amount by which the clock was put forward. That is too
        # late if the clock was not put forward at a begin.
        for skipped, put_forward in skipped_begins(self):
            moment = F.when(begin == skipped, put_forward).otherwise(moment)
        return moment


@cache
def skipped_begins(clock: ZoneClock) -> tuple[tuple[int, int], ...]:
    """Return pairs (local time, UTC time): the begins that the clock skipped, and when it did.

    In St. John's, for example, clocks were put forward at 00:01 until 2011, and never showed 01:00
    that day.
    """
    found = []
    for change in clock_changes(clock.zone):
        begin = clock.begins.following(change.moment + change.before)
        while begin < change.moment + change.after:
            found.append((begin, change.moment))
            begin = clock.begins.following(begin)
    return tuple(found)

"""The rules of time zones: Python's, and whether those of Spark's Java are the same.

Windows of a zone need both: Spark converts times, and Python's rules say which times a clock skips.
Each has a database of its own, of some version, and governments change the rules several times a
year.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from dagster_adjunct.resources.errors import ConfigurationError, ZoneRulesError
from dagster_adjunct.resources.lazy_modules import F, np
from dagster_adjunct.resources.spark.in_process import identify_session
from dagster_adjunct.resources.spark.session import open_jvm
from dagster_adjunct.resources.times import to_microseconds, utc_now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPAN = timedelta(days=3653)
"""The rules of a zone are compared from this long ago to as long ahead. Beyond, databases are known
to differ: what they say of the time before 1970 depends on how they are built."""
_MICROSECOND = timedelta(microseconds=1)
_SECOND = 1_000_000
_DAY = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = datetime(1850, 1, 1, tzinfo=UTC)
_END = datetime(2100, 1, 1, tzinfo=UTC)
_TASKS = 8  # each compares all rules: enough to meet several executors of a cluster


@dataclass(frozen=True, slots=True)
class Database:
    """A database of time zones: its version ("2025b"), "" if it is unknown, and where it is."""

    version: str
    place: str

    def __str__(self) -> str:
        return f"{self.version or 'of an unknown version'} ({self.place})"


@cache
def python_database(zone: str) -> Database:
    """Return the database that Python's rules of a zone are from: a folder of the system, else
    the package tzdata.
    """
    for folder in map(Path, zoneinfo.TZPATH):
        if (folder / zone).is_file():
            return Database(_version_of_folder(folder), str(folder))
    import tzdata

    return Database(tzdata.IANA_VERSION, "the package tzdata")


def _version_of_folder(folder: Path) -> str:
    """Return the version of the database in a folder, "" if it is unknown."""
    for name, form in (("tzdata.zi", r"# version (\S+)"), ("+VERSION", r"(\S+)")):
        try:
            with (folder / name).open(encoding="utf-8") as file:
                found = re.match(form, file.readline())
        except OSError:
            continue
        if found:
            return found[1]
    return ""


class ClockChange(NamedTuple):
    """A change of a zone's clock: its UTC time, and the offsets from UTC before and after it, all
    in microseconds.
    """

    moment: int
    before: int
    after: int


@cache
def clock_changes(zone: str) -> tuple[ClockChange, ...]:
    """Return the changes of the zone's clock from 1850 to 2100, by Python's rules."""
    clocks = ZoneInfo(zone)
    step = timedelta(days=3)  # no zone has changed its clock twice within three days

    def offset(moment: datetime) -> timedelta:
        """Return the offset of the zone's clock from UTC."""
        return clocks.utcoffset(moment.astimezone(clocks)) or timedelta(0)

    changes = []
    time = _FIRST
    before = offset(time)
    while time < _END:
        after = offset(time + step)
        if after != before:
            low = time
            high = time + step
            # Halve the step until it is known in which second the offset changes.
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) // 2
                if offset(middle) == before:
                    low = middle
                else:
                    high = middle
            moment = to_microseconds(high.replace(microsecond=0))
            changes.append(ClockChange(moment, before // _MICROSECOND, after // _MICROSECOND))
        time = time + step
        before = after
    return tuple(changes)


def describe_rules(zone: str) -> str:
    """Return the version of Python's rules of a zone, and a digest of the rules: "2025b
    5f2c8a1e".
    """
    changes = tuple(map(tuple, clock_changes(zone)))  # stored digests are of plain tuples
    digest = sha256(repr((_first_offset(zone), changes)).encode()).hexdigest()
    return f"{python_database(zone).version or 'unknown'} {digest[:16]}"


_differences: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}
"""The results of `differing_spans`, by session and zone."""


def differing_spans(session: SparkSession, zone: str) -> tuple[tuple[int, int], ...]:
    """Return the spans of time (first, last, in microseconds) for which Java's rules of a zone are
    not Python's.

    A span begins up to a day early. Runs a Spark job, once for each session and zone. Raises
    ZoneRulesError if a span is within SPAN of now, and ConfigurationError for a zone that Java does
    not know.
    """
    session_and_zone = (identify_session(session), zone)
    if session_and_zone not in _differences:
        java = _offsets_by_spark(session, zone)
        _differences[session_and_zone] = _find_differences(zone, java)
    spans = _differences[session_and_zone]
    _check_near_spans(zone, spans, lambda: java_database(session))
    return spans


def check_zones_in_jvm(zones: Iterable[str]) -> None:
    """Raise ZoneRulesError if Java and Python have different rules within SPAN of now for one of
    these zones.

    Starts a JVM, which takes a second or two, unless the process has one; raises ConfigurationError
    without Java, and for a zone that Java does not know. Of a cluster, only the driver's Java is
    asked.
    """
    with open_jvm() as jvm:
        time = jvm.java.time
        for zone in zones:
            if not time.ZoneId.getAvailableZoneIds().contains(zone):
                raise unknown_to_java_error(zone)
            spans = _find_differences(zone, _offsets_by_jvm(time, zone))
            rules = time.zone.ZoneRulesProvider.getVersions("UTC").lastKey()
            java = f"Java {jvm.java.lang.System.getProperty('java.version')}"
            _check_near_spans(zone, spans, partial(Database, rules, java))


def java_database(session: SparkSession) -> Database:
    """Return the database of time zones of Spark's Java."""
    versions = "java_method('java.time.zone.ZoneRulesProvider', 'getVersions', 'UTC') as versions"
    java = "java_method('java.lang.System', 'getProperty', 'java.version') as java"
    (row,) = session.range(1).selectExpr(versions, java).collect()
    found = re.match(r"\{(\w+)=", row.versions or "")
    version = found[1] if found else ""
    return Database(version, f"Java {row.java}")


def unknown_to_java_error(zone: str) -> ConfigurationError:
    """Return the error for a zone that Python knows and Spark's Java does not."""
    problem = f"Tumbling has zone={zone!r}, which Spark's Java does not know."
    step = 'Write another name of the same clocks, such as "Asia/Taipei" for "ROC", or update Java.'
    return ConfigurationError(problem, step, argument="zone")


def _check_near_spans(
    zone: str, spans: Sequence[tuple[int, int]], java: Callable[[], Database]
) -> None:
    """Raise ZoneRulesError for the first of these spans that is within SPAN of now."""
    now = to_microseconds(utc_now())
    reach = SPAN // _MICROSECOND
    for first, last in spans:
        if last < now - reach or first > now + reach:
            continue
        java_rules = java()
        python_rules = python_database(zone)
        at = _EPOCH + timedelta(microseconds=first + _DAY)
        problem = (
            f"Java and Python have different rules for the zone {zone!r}, as on {at:%Y-%m-%d}:"
            f" those of Java are {java_rules}, those of Python {python_rules}. Windows would not"
            " start when the zone's clocks say."
        )
        raise ZoneRulesError(
            problem,
            _next_step(java_rules, python_rules),
            zone=zone,
            java_rules=java_rules.version or None,
            python_rules=python_rules.version or None,
            at=at.isoformat(),
        )


def _next_step(java: Database, python: Database) -> str:
    """Return how to get the newer rules for both and, if the release with Java's is known, how to
    get Java's for Python.
    """
    is_folder_of_system = "/" in python.place
    if java.version < python.version:
        newest = f"Update Java to a release with the rules of {python.version}."
    elif is_folder_of_system:
        newest = "Update the system's package tzdata."
    else:
        newest = "Update the package: pip install --upgrade tzdata."
    release = _package_version(java.version)
    if release is None:
        return newest
    return (
        f"{newest} Or let Python use the rules of Java: pip install tzdata=={release}, and set the"
        " environment variable PYTHONTZPATH to the empty text, so that Python reads this package."
    )


def _package_version(rules: str) -> str | None:
    """Return the version of the package tzdata with these rules: "2025.2" for "2025b"; None if the
    rules have another name.
    """
    found = re.fullmatch(r"(?P<year>\d{4})(?P<letter>[a-z])", rules)
    if found is None:
        return None
    number = ord(found["letter"]) - ord("a") + 1
    return f"{found['year']}.{number}"


class _JavaOffsets(NamedTuple):
    """Moments, and the offset from UTC that Java's rules give a zone at each: arrays, in
    microseconds.
    """

    moments: Any
    offsets: Any


def _find_differences(zone: str, java: _JavaOffsets) -> tuple[tuple[int, int], ...]:
    """Return the spans of time in which Java's offsets are not Python's, () if there are none.

    Moments are at most a day apart, so a span begins a day before its first wrong moment, and ends
    a day after its last one.
    """
    changes = clock_changes(zone)
    # By Python's rules: the offset before the first change, and after each.
    offsets = np.array([_first_offset(zone), *(change.after for change in changes)])
    times = np.array([change.moment for change in changes], "int64")
    python_offsets = offsets[np.searchsorted(times, java.moments, side="right")]
    wrong = np.unique(java.moments[java.offsets != python_offsets])
    if not len(wrong):
        return ()
    # The places in `wrong` where a span ends, without the last one.
    ends = np.flatnonzero(np.diff(wrong) > 2 * _DAY)
    firsts = wrong[[0, *(ends + 1)]]
    lasts = wrong[[*ends, -1]]
    spans = []
    for first, last in zip(firsts, lasts, strict=True):
        spans.append((int(first) - _DAY, int(last) + _DAY))
    return tuple(spans)


def _first_offset(zone: str) -> int:
    """Return the offset of the zone in 1850."""
    changes = clock_changes(zone)
    if changes:
        return changes[0].before
    offset = ZoneInfo(zone).utcoffset(_FIRST.replace(tzinfo=None)) or timedelta(0)
    return offset // _MICROSECOND


def _moments_around_changes(zone: str) -> list[int]:
    """Return each time at which the clock changes by Python's rules, and the second before."""
    times: list[int] = []
    for change in clock_changes(zone):
        times += (change.moment - _SECOND, change.moment)
    return times


def _offsets_by_spark(session: SparkSession, zone: str) -> _JavaOffsets:
    """Return the offsets by the rules of Spark's executors, for every day and around changes.

    Raises ConfigurationError for a zone that Java does not know.
    """
    from pyspark.errors import PySparkException

    first = to_microseconds(_FIRST)
    days = (_END - _FIRST).days
    around = _moments_around_changes(zone) or [first]
    number = F.pmod(F.col("id"), F.lit(days + len(around)))
    change = F.element_at(F.array(*map(F.lit, around)), (number - days + 1).cast("int"))
    moment = F.when(number < days, F.lit(first) + number * _DAY).otherwise(change)
    shown = F.unix_micros(F.from_utc_timestamp(F.timestamp_micros("moment"), zone))
    master = session.conf.get("spark.master", "") or ""
    tasks = 1 if master.startswith("local") else _TASKS
    numbers = session.range(0, tasks * (days + len(around)), 1, tasks)
    try:
        moments = numbers.select(moment.alias("moment"))
        found = moments.select("moment", shown - F.col("moment")).toArrow()
    except PySparkException as error:
        if error.getCondition() != "INVALID_TIMEZONE" and "INVALID_TIMEZONE" not in str(error):
            raise
        raise unknown_to_java_error(zone) from error
    java_moments, java_offsets = found.columns
    return _JavaOffsets(java_moments.to_numpy(), java_offsets.to_numpy())


def _offsets_by_jvm(time: Any, zone: str) -> _JavaOffsets:
    """Return the offsets by the rules of this JVM, for moments within SPAN of now; `time` is
    java.time.
    """
    now = to_microseconds(utc_now())
    reach = SPAN // _MICROSECOND
    rules = time.ZoneId.of(zone).getRules()
    begin = time.Instant.ofEpochSecond((now - reach) // _SECOND)
    # The times of changes by Java's rules; the offsets before the first one and after each.
    times: list[int] = []
    offsets = [rules.getOffset(begin).getTotalSeconds()]
    change = rules.nextTransition(begin)
    while change is not None and change.toEpochSecond() * _SECOND < now + reach:
        times.append(change.toEpochSecond() * _SECOND)
        offsets.append(change.getOffsetAfter().getTotalSeconds())
        change = rules.nextTransition(change.getInstant())
    around = [moment for moment in _moments_around_changes(zone) if abs(moment - now) < reach]
    days = np.arange(now - reach, now + reach, _DAY)
    moments = np.concatenate((days, np.array([*around, *times], "int64")))
    at = np.searchsorted(np.array(times, "int64"), moments, side="right")
    return _JavaOffsets(moments, np.array(offsets)[at] * _SECOND)

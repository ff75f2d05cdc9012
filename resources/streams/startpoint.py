"""Startpoints: positions from which a stream partition is read instead of its checkpoint
(SAMZA-1983).

A startpoint is independent of the system; `resolve_startpoint_to_offset` turns it into an offset.
It is stored as JSON with its kind and version.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.names import is_storable_text
from dagster_adjunct.resources.streams.system import (
    StreamSystem,
    SystemStreamPartition,
    time_from_micros,
)
from dagster_adjunct.resources.validation import validated, validated_methods

VERSION = 1
# The years 1 to 9999, which every system and file format can represent.
MIN_MS = -62_135_596_800_000
MAX_MS = 253_402_300_799_999
_FINER_UNITS = (("microseconds", 1_000), ("nanoseconds", 1_000_000))
# A number that is a time from 1985 on in microseconds or nanoseconds is probably in that unit.
_LIKELY_MS = 500_000_000_000
# The years 1985 to 2286 in seconds; read as milliseconds, these are January to April 1970.
_LIKELY_SECONDS = range(_LIKELY_MS // 1000, 10_000_000_000)
ID_LENGTH = 200


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _new_id() -> str:
    return uuid.uuid4().hex


@validated_methods
@dataclass(frozen=True, slots=True, kw_only=True)
class Startpoint:
    """A position in a stream partition, created at `creation_timestamp_ms` (since the epoch),
    with a unique `id`.
    """

    kind: ClassVar[str]

    creation_timestamp_ms: int = field(default_factory=_now_ms)
    id: str = field(default_factory=_new_id)

    def __post_init__(self) -> None:
        check_timestamp_ms("creation_timestamp_ms", self.creation_timestamp_ms)
        check_id("startpoint", self.id)

    def reissue(self) -> Self:
        """Return the same position as a new startpoint, with a new id and time, so that it is
        applied again.
        """
        return replace(self, creation_timestamp_ms=_now_ms(), id=_new_id())

    def to_json(self) -> dict[str, Any]:
        """Return the stored form: `version`, `kind`, and the fields by name."""
        return {
            "version": VERSION,
            "kind": self.kind,
            **{field.name: getattr(self, field.name) for field in fields(self)},
        }

    @staticmethod
    def from_json(value: object, where: str = "startpoint") -> Startpoint:
        """Return the startpoint that `to_json` wrote, of any kind; `where` names its source in
        errors.

        Raises MalformedDocumentError for a newer version, an unknown kind, and fields that the kind
        does not have.
        """
        if not isinstance(value, Mapping):
            raise _malformed(where, f"is {value!r}", "an object with version and kind")
        check_stored_version(value, where)
        kind = value.get("kind")
        cls = None
        if isinstance(kind, str):
            cls = KINDS.get(kind)
        if cls is None:
            raise _malformed(where, f"has the kind {kind!r}", f"one of {', '.join(KINDS)}")
        names = {field.name for field in fields(cls)}
        given = {str(name) for name in value} - {"version", "kind"}
        if given != names:
            raise _malformed(
                where, f"of kind {kind!r} has the fields {_join_names(given)}", _join_names(names)
            )
        try:
            return cls(**{name: value[name] for name in names})
        except ConfigurationError as error:
            raise _malformed(
                where,
                f"of kind {kind!r} can't be read ({error.problem})",
                "a startpoint as written",
            ) from error


@validated_methods
@dataclass(frozen=True, slots=True)
class StartpointOldest(Startpoint):
    """The oldest record that can be read."""

    kind: ClassVar[str] = "oldest"


@validated_methods
@dataclass(frozen=True, slots=True)
class StartpointUpcoming(Startpoint):
    """The next record that will arrive."""

    kind: ClassVar[str] = "upcoming"


@validated_methods
@dataclass(frozen=True, slots=True)
class StartpointTimestamp(Startpoint):
    """The first record at or after a time, in ms since the epoch; upcoming if there is none."""

    kind: ClassVar[str] = "timestamp"

    timestamp_ms: int

    def __post_init__(self) -> None:
        Startpoint.__post_init__(self)
        check_timestamp_ms("timestamp_ms", self.timestamp_ms)


@validated_methods
@dataclass(frozen=True, slots=True)
class StartpointSpecific(Startpoint):
    """The record at an offset, in its system's form."""

    kind: ClassVar[str] = "specific"

    offset: str

    def __post_init__(self) -> None:
        Startpoint.__post_init__(self)
        if not self.offset or not is_storable_text(self.offset):
            problem = (
                f"startpoint offset {self.offset!r} is not an offset: expected a text, as in '42'."
            )
            raise ConfigurationError(
                problem, "Give the offset as the stream's system writes it.", argument="offset"
            )


KINDS: Mapping[str, type[Startpoint]] = {
    cls.kind: cls
    for cls in (StartpointOldest, StartpointUpcoming, StartpointTimestamp, StartpointSpecific)
}


def check_startpoint(startpoint: Startpoint, what: str, argument: str = "startpoint") -> None:
    """Raise ConfigurationError for a startpoint of a custom class; `what` names it in the error."""
    if type(startpoint) not in KINDS.values():
        found = f"{what} is a {type(startpoint).__name__}, a custom class that can't be stored"
        raise argument_error(
            found,
            f"one of {', '.join(kind.__name__ for kind in KINDS.values())}",
            argument=argument,
        )


def check_stored_version(value: Mapping[Any, Any], where: str) -> None:
    """Raise MalformedDocumentError unless the stored startpoint or request has the format
    VERSION.
    """
    version = value.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        problem = f"{where} has version {version}; this release of Adjunct reads version {VERSION}."
        raise MalformedDocumentError(
            problem, "Upgrade dagster-adjunct: a newer version wrote this.", document=where
        )
    if version != VERSION or isinstance(version, bool):
        raise _malformed(where, f"has the version {version!r}", str(VERSION))


def describe_startpoint(startpoint: Startpoint) -> str:
    """Return a description of a startpoint: "oldest", "timestamp 2026-01-02T00:00:00+00:00",
    "offset 42".
    """
    if isinstance(startpoint, StartpointTimestamp):
        return f"timestamp {time_from_micros(startpoint.timestamp_ms * 1000).isoformat()}"
    if isinstance(startpoint, StartpointSpecific):
        return f"offset {startpoint.offset}"
    return startpoint.kind


@validated
def resolve_startpoint_to_offset(
    system: StreamSystem, ssp: SystemStreamPartition, startpoint: Startpoint
) -> str:
    """Return the offset of `ssp` at which `startpoint` starts now.

    A specific offset must lie in [oldest, upcoming]. A time gives the first record at or after it,
    else upcoming. To resolve many startpoints of one stream, pass `system.snapshot(stream)`, which
    asks once.

    Raises ConfigurationError for a value that is not a startpoint, for a time if the system does
    not implement `offset_for_timestamp`, and for a system that does not return an offset. Raises
    OffsetOutOfRangeError for an offset outside the partition.
    """
    check_startpoint(startpoint, f"the startpoint of {ssp}")
    if isinstance(startpoint, StartpointTimestamp):
        return _resolve_time(system, ssp, startpoint)
    if isinstance(startpoint, StartpointSpecific):
        return _resolve_specific(system, ssp, startpoint.offset)
    return _find_bound(system, ssp, startpoint.kind)


def _resolve_time(
    system: StreamSystem, ssp: SystemStreamPartition, startpoint: StartpointTimestamp
) -> str:
    """Return the offset of the first record at or after a time. Raises ConfigurationError for a
    system that can't find it.
    """
    if not system.capabilities.finds_times:
        able = ", ".join(kind for kind in KINDS if kind != startpoint.kind)
        problem = (
            f"{ssp}: stream system {system.name!r} can't start at a startpoint of kind"
            f" {startpoint.kind!r}."
        )
        step = f"Use a startpoint of a supported kind: {able}."
        raise ConfigurationError(problem, step, system=system.name, stream=ssp.qualified_stream)
    offset = system.offset_for_timestamp(ssp, startpoint.timestamp_ms)
    asked = f"asked where the startpoint {describe_startpoint(startpoint)} starts"
    return check_offset(system, ssp, offset, asked)


def _find_bound(system: StreamSystem, ssp: SystemStreamPartition, which: str) -> str:
    """Return the "oldest" or "upcoming" offset of a partition, whichever is asked for."""
    if which == "oldest":
        find = system.oldest
    else:
        find = system.upcoming
    return check_offset(system, ssp, find([ssp]).get(ssp), f"asked for its {which} offset")


def _resolve_specific(system: StreamSystem, ssp: SystemStreamPartition, offset: str) -> str:
    """Return an offset that a user has given, if it is in [oldest, upcoming]. Raises
    OffsetOutOfRangeError.
    """
    oldest = _find_bound(system, ssp, "oldest")
    upcoming = _find_bound(system, ssp, "upcoming")
    try:
        above = system.compare(oldest, offset)
        below = system.compare(offset, upcoming)
    except OffsetOutOfRangeError as error:
        raise error.reworded(f"startpoint of {ssp}: {error.problem}", error.next_step) from error
    if above > 0 or below > 0:
        problem = (
            f"{ssp}: the startpoint's offset {offset} is not on the stream: expected {oldest} (the"
            f" oldest) to {upcoming} (upcoming)."
        )
        about: Any = {"stream": ssp.qualified_stream, "partition": ssp.partition, "oldest": oldest}
        step = "Use an offset in this range, or the oldest."
        raise OffsetOutOfRangeError(problem, step, offset=offset, upcoming=upcoming, **about)
    # At a bound, return it as the system writes it: if the user wrote the same offset differently,
    # comparing the texts would show a range where there is none.
    if above == 0:
        return oldest
    if below == 0:
        return upcoming
    return offset


def check_id(what: str, value: str) -> None:
    """Raise ConfigurationError unless `value` can be the id of a startpoint or request."""
    if not 0 < len(value) <= ID_LENGTH or not is_storable_text(value):
        problem = (
            f"{what} id {value!r:.80} is not an id: expected a text of 1 to {ID_LENGTH} characters."
        )
        raise ConfigurationError(
            problem, f"Leave the id out: every {what} gets a new one.", argument="id"
        )


def check_timestamp_ms(name: str, value: object, what: str = "startpoint") -> None:
    """Raise ConfigurationError unless `value` is a plausible time in ms since 1970, and not in
    another unit.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        problem = (
            f"{what} {name} {value!r} is not a time: expected whole milliseconds since 1970 in UTC."
        )
        raise ConfigurationError(
            problem, "Convert the time first: int(moment.timestamp() * 1000).", argument=name
        )
    if value in _LIKELY_SECONDS:
        moments = [
            f"{time_from_micros(ms * 1000):%Y-%m-%d %H:%M} UTC" for ms in (value, value * 1000)
        ]
        problem = (
            f"{what} {name} {value} is {moments[0]} in milliseconds: it looks like seconds"
            f" ({moments[1]})."
        )
        raise ConfigurationError(problem, f"Give milliseconds: {value * 1000}.", argument=name)
    if not MIN_MS <= value <= MAX_MS:
        looks = ""
        step = "Give milliseconds: int(moment.timestamp() * 1000)."
        for unit, n in _FINER_UNITS:
            if _LIKELY_MS <= value // n <= MAX_MS:
                moment = time_from_micros(value // n * 1000)
                looks = f": it looks like {unit} ({moment:%Y-%m-%d %H:%M} UTC)"
                step = f"Give milliseconds: {value // n}."
                break
        # Python can't write much larger numbers in decimal digits.
        shown = str(value) if abs(value) < 10**30 else f"of {value.bit_length():,} bits"
        problem = (
            f"{what} {name} {shown} is not within the years 1 to 9999 in milliseconds since"
            f" 1970{looks}."
        )
        raise ConfigurationError(problem, step, argument=name)


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"


def _malformed(where: str, problem: str, expected: str) -> MalformedDocumentError:
    """Return the error for a stored startpoint that can't be read."""
    step = (
        "Delete it and write it again with this release of Adjunct, or upgrade if a newer one"
        " wrote it."
    )
    return MalformedDocumentError(f"{where} {problem}; expected {expected}.", step, document=where)


def check_offset(
    system: StreamSystem, ssp: SystemStreamPartition, answer: object, asked: str
) -> str:
    """Return a system's `answer` if it can be an offset: a text that is not empty, and can be
    stored.

    Otherwise raises ConfigurationError, since a stored value of another type would only fail much
    later. `asked` describes the question in the error.
    """
    if isinstance(answer, str) and answer and is_storable_text(answer):
        return answer
    problem = (
        f"{ssp}: stream system {system.name!r}, {asked}, returned {answer!r}: expected an offset, a"
        " text."
    )
    step = "Correct the system; it raises OffsetOutOfRangeError for an offset that does not exist."
    raise ConfigurationError(problem, step, system=system.name, stream=ssp.qualified_stream)

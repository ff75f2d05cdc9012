"""Startpoints: positions at which the reading of a stream partition starts instead of its checkpoint (SAMZA-1983).

A startpoint says *where* in words that any system understands; `resolve_startpoint_to_offset` turns it into an
offset of one. Its stored form is JSON that names its kind and version.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition

VERSION = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The years 1 to 9999, which every system, file format and clock here can write as a date.
MIN_MS, MAX_MS = -62_135_596_800_000, 253_402_300_799_999
_FINER_UNITS = (("microseconds", 1_000), ("nanoseconds", 1_000_000))
_LIKELY_MS = 500_000_000_000  # a day in 1985: who writes an earlier one does not count in finer units
_LIKELY_SECONDS = range(_LIKELY_MS // 1000, 10_000_000_000)  # of 1985 to 2286; in milliseconds January to April 1970
ID_LENGTH = 200

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
T = TypeVar("T")
G = TypeVar("G")


class StartpointVisitor(Protocol[In_contra, Out_co]):
    """What to do with each kind of startpoint; `Startpoint.apply` calls the method of its own kind."""

    def visit_oldest(self, given: In_contra, startpoint: StartpointOldest) -> Out_co: ...

    def visit_upcoming(self, given: In_contra, startpoint: StartpointUpcoming) -> Out_co: ...

    def visit_timestamp(self, given: In_contra, startpoint: StartpointTimestamp) -> Out_co: ...

    def visit_specific(self, given: In_contra, startpoint: StartpointSpecific) -> Out_co: ...


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Startpoint(ABC):
    """A position in a stream partition, made at `creation_timestamp_ms` (since the epoch), with an `id` of its own."""

    kind: ClassVar[str]

    creation_timestamp_ms: int = field(default_factory=_now_ms)
    id: str = field(default_factory=_new_id)

    def __post_init__(self) -> None:
        check_timestamp_ms("creation_timestamp_ms", self.creation_timestamp_ms)
        check_id("startpoint", self.id)

    @abstractmethod
    def apply(self, given: G, visitor: StartpointVisitor[G, T]) -> T:
        """Return what the visitor's method for this kind makes of `given` and this startpoint."""

    def reissue(self) -> Self:
        """Return the same position as a wish of its own: made now, with another id, so that it is applied again."""
        return replace(self, creation_timestamp_ms=_now_ms(), id=_new_id())

    def to_json(self) -> dict[str, Any]:
        """Return the stored form: `version`, `kind`, and the fields by name."""
        return {
            "version": VERSION,
            "kind": self.kind,
            **{field.name: getattr(self, field.name) for field in fields(self)},
        }

    @staticmethod
    def from_json(value: object) -> Startpoint:
        """Return what `to_json` returned, of any kind. Raises MalformedDocumentError."""
        return startpoint_from_json(value)


@dataclass(frozen=True, slots=True)
class StartpointOldest(Startpoint):
    """The first record that can still be read."""

    kind: ClassVar[str] = "oldest"

    def apply(self, given: G, visitor: StartpointVisitor[G, T]) -> T:
        return visitor.visit_oldest(given, self)


@dataclass(frozen=True, slots=True)
class StartpointUpcoming(Startpoint):
    """The next record that will arrive."""

    kind: ClassVar[str] = "upcoming"

    def apply(self, given: G, visitor: StartpointVisitor[G, T]) -> T:
        return visitor.visit_upcoming(given, self)


@dataclass(frozen=True, slots=True)
class StartpointTimestamp(Startpoint):
    """The first record at or after a time, in ms since the epoch; upcoming where there is none."""

    kind: ClassVar[str] = "timestamp"

    timestamp_ms: int

    def __post_init__(self) -> None:
        Startpoint.__post_init__(self)
        check_timestamp_ms("timestamp_ms", self.timestamp_ms)

    def apply(self, given: G, visitor: StartpointVisitor[G, T]) -> T:
        return visitor.visit_timestamp(given, self)


@dataclass(frozen=True, slots=True)
class StartpointSpecific(Startpoint):
    """The record at an offset, as its system writes offsets."""

    kind: ClassVar[str] = "specific"

    offset: str

    def __post_init__(self) -> None:
        Startpoint.__post_init__(self)
        if not isinstance(self.offset, str) or not self.offset or not _is_text(self.offset):
            raise ConfigurationError(
                f"startpoint offset {self.offset!r} is no offset: expected a text, as in '42'.",
                "Give the offset as the stream's system wrote it.",
                argument="offset",
            )

    def apply(self, given: G, visitor: StartpointVisitor[G, T]) -> T:
        return visitor.visit_specific(given, self)


KINDS: Mapping[str, type[Startpoint]] = {
    cls.kind: cls for cls in (StartpointOldest, StartpointUpcoming, StartpointTimestamp, StartpointSpecific)
}


def check_startpoint(value: object, what: str = "a startpoint", argument: str = "startpoint") -> Startpoint:
    """Return `value` if it is a startpoint of a kind that is stored and read again, and no subclass of one.

    `what` says in the error where it was given. Raises ConfigurationError.
    """
    if isinstance(value, Startpoint) and type(value) in KINDS.values():
        return value
    kinds = ", ".join(kind.__name__ for kind in KINDS.values())
    problem = f"is {value!r:.80}, no startpoint"
    if isinstance(value, Startpoint):
        problem = f"is a {type(value).__name__}, a class of startpoints that nobody could read again"
    raise ConfigurationError(
        f"{what} {problem}: expected one of {kinds}.",
        "Write it as in StartpointOldest(), StartpointTimestamp(timestamp_ms=1767225600000) or StartpointSpecific("
        "offset='42').",
        argument=argument,
    )


def startpoint_from_json(value: object, where: str = "startpoint") -> Startpoint:
    """Return what `to_json` wrote; `where` says in errors what it was read from.

    Raises MalformedDocumentError for a future version, an unknown kind, and fields that the kind does not have.
    """
    if not isinstance(value, Mapping):
        raise _malformed(where, f"is {value!r}", "an object with version and kind")
    check_stored_version(value, where)
    kind = value.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise _malformed(where, f"has the kind {kind!r}", f"one of {', '.join(KINDS)}")
    names = {field.name for field in fields(cls)}
    given = {str(name) for name in value} - {"version", "kind"}
    if given != names:
        raise _malformed(where, f"of kind {kind!r} has the fields {_join_names(given)}", _join_names(names))
    try:
        return cls(**{name: value[name] for name in names})
    except ConfigurationError as error:
        raise _malformed(
            where, f"of kind {kind!r} can't be read ({error.problem})", "a startpoint as written"
        ) from error


def check_stored_version(value: Mapping[Any, Any], where: str) -> None:
    """Refuse a stored form of another version than this one. Raises MalformedDocumentError."""
    version = value.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        raise MalformedDocumentError(
            f"{where} has version {version}; this release of Adjunct reads version {VERSION}.",
            "Upgrade dagster-adjunct: a newer version wrote this.",
            document=where,
        )
    if version != VERSION or isinstance(version, bool):
        raise _malformed(where, f"has the version {version!r}", str(VERSION))


def describe_startpoint(startpoint: Startpoint) -> str:
    """Return what a startpoint asks for in words: "oldest", "timestamp 2026-01-02T00:00:00+00:00", "offset 42"."""
    if isinstance(startpoint, StartpointTimestamp):
        moment = _EPOCH + timedelta(milliseconds=1) * startpoint.timestamp_ms
        return f"timestamp {moment.isoformat()}"
    return f"offset {startpoint.offset}" if isinstance(startpoint, StartpointSpecific) else startpoint.kind


def resolve_startpoint_to_offset(system: StreamSystem, ssp: SystemStreamPartition, startpoint: Startpoint) -> str:
    """Return the offset of `ssp` at which `startpoint` starts, as the system answers now and writes it.

    A specific offset is returned if it lies in [oldest, upcoming]. A time gives the first record at or
    after it, and upcoming past the end or where the partition is empty. Whoever resolves many of one stream passes
    `system.snapshot(stream)`, which looks once.

    A system that lacks kinds lists them in `unsupported_startpoints` (as in `{"timestamp"}`): they raise
    ConfigurationError, as do a system that answers no offset, and what is no startpoint. Raises OffsetOutOfRangeError
    for an offset that the partition does not hold.
    """
    check_startpoint(startpoint, f"the startpoint of {ssp}")
    unsupported = system.unsupported_startpoints
    if startpoint.kind in unsupported:
        able = [kind for kind in KINDS if kind not in unsupported]
        raise ConfigurationError(
            f"{ssp}: stream system {system.name!r} can't start at a startpoint of kind {startpoint.kind!r}; it can at: "
            f"{', '.join(able) or 'none'}.",
            "Write a startpoint of a kind that the system has.",
            system=system.name,
            stream=ssp.qualified_stream,
        )
    offset = startpoint.apply(ssp, _Resolver(system))
    return check_offset(system, ssp, offset, f"asked where the startpoint {describe_startpoint(startpoint)} starts")


def check_offset(system: StreamSystem, ssp: SystemStreamPartition, answer: object, asked: str) -> str:
    """Return what a system has answered if it can be an offset; `asked` says in the error what it was asked.

    Raises ConfigurationError: stored, or compared, anything else would come out wrong much later.
    """
    if isinstance(answer, str) and answer and _is_text(answer):
        return answer
    raise ConfigurationError(
        f"{ssp}: stream system {system.name!r}, {asked}, has answered {answer!r}, which is no offset: expected a text.",
        "Mend the system: every offset is a text that is not empty, and a question that it can't answer is an "
        "OffsetOutOfRangeError.",
        system=system.name,
        stream=ssp.qualified_stream,
    )


@dataclass(frozen=True, slots=True)
class _Resolver:
    """Asks a system; a `StartpointVisitor` from partitions to offsets."""

    system: StreamSystem

    def visit_oldest(self, given: SystemStreamPartition, startpoint: StartpointOldest) -> str:
        return self._edge("oldest", given)

    def visit_upcoming(self, given: SystemStreamPartition, startpoint: StartpointUpcoming) -> str:
        return self._edge("upcoming", given)

    def visit_timestamp(self, given: SystemStreamPartition, startpoint: StartpointTimestamp) -> str:
        return self.system.offset_for_timestamp(given, startpoint.timestamp_ms)

    def visit_specific(self, given: SystemStreamPartition, startpoint: StartpointSpecific) -> str:
        offset = startpoint.offset
        oldest, upcoming = self._edge("oldest", given), self._edge("upcoming", given)
        try:
            above, below = self.system.compare(oldest, offset), self.system.compare(offset, upcoming)
        except OffsetOutOfRangeError as error:
            raise error.reworded(f"startpoint of {given}: {error.problem}", error.next_step) from error
        if above > 0 or below > 0:
            raise OffsetOutOfRangeError(
                f"{given}: the startpoint's offset {offset} is not on the stream: expected {oldest} (the oldest) to "
                f"{upcoming} (upcoming).",
                "Ask for an offset in this range, or for the oldest.",
                offset=offset,
                stream=given.qualified_stream,
                partition=given.partition,
                oldest=oldest,
                upcoming=upcoming,
            )
        # An end as the system writes it: two ways of writing one offset would else pass for a range.
        return oldest if above == 0 else upcoming if below == 0 else offset

    def _edge(self, which: Literal["oldest", "upcoming"], ssp: SystemStreamPartition) -> str:
        answer = (self.system.oldest if which == "oldest" else self.system.upcoming)([ssp]).get(ssp)
        return check_offset(self.system, ssp, answer, f"asked for its {which} offset")


def check_id(what: str, value: object) -> None:
    """Refuse what can't be kept as the id of a startpoint or of a request. Raises ConfigurationError."""
    if not isinstance(value, str) or not 0 < len(value) <= ID_LENGTH or not _is_text(value):
        raise ConfigurationError(
            f"{what} id {value!r:.80} is no id: expected a text of 1 to {ID_LENGTH} characters.",
            f"Leave the id out: every {what} gets one of its own.",
            argument="id",
        )


def check_timestamp_ms(name: str, value: object, what: str = "startpoint") -> None:
    """Refuse what is no time in ms since 1970, or looks like one in another unit. Raises ConfigurationError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(
            f"{what} {name} {value!r} is no time: expected whole milliseconds since 1970 in UTC.",
            "Convert the time first: int(moment.timestamp() * 1000).",
            argument=name,
        )
    if value in _LIKELY_SECONDS:
        moments = [f"{_EPOCH + timedelta(milliseconds=1) * ms:%Y-%m-%d %H:%M} UTC" for ms in (value, value * 1000)]
        raise ConfigurationError(
            f"{what} {name} {value} is {moments[0]} in milliseconds since 1970: it looks like seconds ({moments[1]}).",
            f"Give milliseconds: {value * 1000}.",
            argument=name,
        )
    if not MIN_MS <= value <= MAX_MS:
        looks, step = "", "Give milliseconds: int(moment.timestamp() * 1000)."
        for unit, n in _FINER_UNITS:
            if _LIKELY_MS <= value // n <= MAX_MS:
                moment = _EPOCH + timedelta(milliseconds=1) * (value // n)
                looks = f": it looks like {unit} ({moment:%Y-%m-%d %H:%M} UTC)"
                step = f"Give milliseconds: {value // n}."
                break
        raise ConfigurationError(
            f"{what} {name} {_format_int(value)} is no time of the years 1 to 9999 in milliseconds since 1970{looks}.",
            step,
            argument=name,
        )


def _format_int(value: int) -> str:
    """Return a number for an error: Python refuses to write very long ones."""
    return str(value) if abs(value) < 10**30 else f"of {value.bit_length():,} bits"


def _is_text(value: str) -> bool:
    """Whether the text can be stored as UTF-8 (a lone surrogate can't)."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"


def _malformed(where: str, problem: str, expected: str) -> MalformedDocumentError:
    return MalformedDocumentError(
        f"{where} {problem}; expected {expected}.",
        "Delete it and write it again with this release of Adjunct, or upgrade if a newer one wrote it.",
        document=where,
    )

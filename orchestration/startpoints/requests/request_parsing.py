"""What people ask of startpoints, in their words: positions and partitions.

Shared by the command line and the job in Dagster. Nothing here writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import split_partitions, split_stream_name
from dagster_adjunct.resources.streams.interface.startpoint import (
    GREATEST_MS,
    LEAST_MS,
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

POSITIONS = ("oldest", "upcoming", "timestamp", "offset")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
# In ms, this is a day in 1973; in seconds, one in the year 5138.
_LEAST_MS = 100_000_000_000
_DIGITS = re.compile(r"\d{1,13}", re.ASCII)
_FINER = re.compile(r"\d{16,30}", re.ASCII)


def parse_position(kind: str, value: str | None = None) -> Startpoint:
    """Return the startpoint that words say: `oldest`, `upcoming`, `timestamp` VALUE or `offset` VALUE.

    A timestamp is ISO 8601 with its zone, a date (its start in UTC), or milliseconds since 1970.
    Raises ConfigurationError for anything else.
    """
    if kind not in POSITIONS:
        raise ConfigurationError(
            f"position {kind!r} is unknown: expected one of {', '.join(POSITIONS)}.",
            "Choose one of them.",
            argument="position",
        )
    text = (value or "").strip()
    if kind in ("oldest", "upcoming"):
        if text:
            raise ConfigurationError(
                f"position {kind} takes no value, and {text!r} was given.", "Leave the value out.", argument="position"
            )
        return StartpointOldest() if kind == "oldest" else StartpointUpcoming()
    if not text:
        raise ConfigurationError(
            f"position {kind} needs a value.",
            "Write it as in 2026-01-31T18:00Z." if kind == "timestamp" else "Write the offset as its system does.",
            argument="position",
        )
    return StartpointTimestamp(timestamp_ms=_ms(text)) if kind == "timestamp" else StartpointSpecific(offset=text)


def expand_partitions(
    app: Application, systems: Mapping[str, StreamSystem], texts: Iterable[str]
) -> list[SystemStreamPartition]:
    """Return the partitions that texts name: `lake.flights.3`, `lake.flights.0-3,7`, or `lake.flights` for all.

    Each once, in the order in which they are named. Raises ConfigurationError for a stream that the application does
    not read, and for a partition that the stream does not have; InvalidNameError and StreamNotFoundError.
    """
    counts: dict[str, int] = {}
    partitions: dict[SystemStreamPartition, None] = {}
    for text in texts:
        qualified, numbers = split_partitions(text)
        _check_read(app, qualified)
        system, stream = split_stream_name(qualified)
        if qualified not in counts:
            counts[qualified] = systems[system].info(stream).partitions
        for number in range(counts[qualified]) if numbers is None else _numbers(text, numbers, counts[qualified]):
            partitions[SystemStreamPartition(system, stream, number)] = None
    return list(partitions)


def _ms(text: str) -> int:
    if _DIGITS.fullmatch(text):
        if int(text) < _LEAST_MS:
            raise ConfigurationError(
                f"timestamp {text!r} is {_EPOCH + int(text) * _MS:%Y-%m-%d %H:%M} UTC in milliseconds since 1970: it "
                "looks like a year, or like seconds.",
                "Write milliseconds, or the time in ISO form, as in 2026-01-31T18:00Z.",
                argument="timestamp",
            )
        return int(text)
    if _FINER.fullmatch(text):
        return int(text)  # microseconds, or nanoseconds: no startpoint takes that, and it says what to do
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"timestamp {text!r} can't be read: expected ISO 8601 with its zone, a date, or milliseconds since 1970.",
            "Write it as in 2026-01-31T18:00Z.",
            argument="timestamp",
        ) from None
    if moment.tzinfo is None and _DATE.fullmatch(text):
        moment = moment.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        raise ConfigurationError(
            f"timestamp {text!r} names no zone.",
            f"Write {text}Z for UTC, or the offset of its zone: {text}+01:00.",
            argument="timestamp",
        )
    if moment.microsecond % 1000:
        raise ConfigurationError(
            f"timestamp {text!r} is finer than a millisecond, and startpoints are not.",
            "Round it: down to begin there, up to end there.",
            argument="timestamp",
        )
    since_1970 = (moment - _EPOCH) // _MS
    if not LEAST_MS <= since_1970 <= GREATEST_MS:
        raise ConfigurationError(
            f"timestamp {text!r} lies outside the years 1 to 9999 in UTC.",
            "Name a time within; or say oldest.",
            argument="timestamp",
        )
    return since_1970


def _numbers(text: str, spans: str, count: int) -> list[int]:
    numbers: list[int] = []
    for span in spans.split(","):
        bounds = _SPAN.fullmatch(span)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if first > last:
            raise ConfigurationError(
                f"{text!r} can't be read: {span!r} is no partition and no range of them.",
                "Write partitions as in lake.flights.3, lake.flights.0-3,7, or lake.flights for all.",
                argument="partitions",
            )
        if last >= count:
            raise ConfigurationError(
                f"{text!r} names partition {last}, and the stream has {count} partitions, 0 to {count - 1}.",
                "Name partitions that it has.",
                argument="partitions",
            )
        numbers += range(first, last + 1)
    return numbers


def _check_read(app: Application, stream: str) -> None:
    split_stream_name(stream)
    fed = {str(dataset.stream): dataset for dataset in app.datasets if dataset.stream is not None}
    goes_back = {name for name, dataset in fed.items() if dataset.follows_changes and dataset.following.persistent}
    if stream in {*app.inputs, *goes_back}:
        return
    if stream not in fed:
        known = ", ".join(sorted({*app.inputs, *goes_back})) or "no stream"
        raise ConfigurationError(
            f"application {app.name!r} does not read {stream}; it reads: {known}.",
            "Correct the name.",
            application=app.name,
        )
    name = fed[stream].name
    if not fed[stream].follows_changes:
        raise ConfigurationError(
            f"{stream} is the input of dataset {name!r}, which is bounded: it goes back to a version, not an offset.",
            f"Choose one (adjunct dataset versions {name}), then: adjunct dataset rollback {name} VERSION --reason ….",
            dataset=name,
        )
    raise ConfigurationError(
        f"{stream} is the input of dataset {name!r}, whose table lives for one run: there is nothing to go back in.",
        "Run the application again: the table is made anew.",
        dataset=name,
    )

"""Checks of appends and of end-of-dataset markers, for systems that write streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.streams.system import AppendOptions
from dagster_adjunct.resources.times import fits_utc, to_microseconds
from dagster_adjunct.resources.validation import validated

_NAME_LENGTH = 300


def check_producer(producer: str, sequence: int) -> None:
    """Raise ConfigurationError for a producer or a sequence that can't be stored."""
    if not isinstance(producer, str) or not 0 < len(producer) <= _NAME_LENGTH:
        expected = f"a text of 1 to {_NAME_LENGTH} characters"
        step = (
            "Name what appends (an application's output, an import), with the same name in every"
            " retry."
        )
        raise argument_error(
            f"producer {producer!r} is not a name", expected, step, argument="producer"
        )
    found = f"sequence {sequence!r} of producer {producer!r}"
    step = "Use the same number in every retry of an append."
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
        raise argument_error(found, "an integer from 0", step, argument="sequence")


def check_append(
    producer: str, sequence: int, version: str | None, valid_from: datetime | None
) -> int | None:
    """Validate the arguments of an append; return `valid_from` in microseconds since the epoch, as
    markers store it, None if it is None.

    Raises ConfigurationError for a producer, a sequence or a version that can't be stored, and for
    `valid_from` without time zone or version, or outside the years 1 to 9999 of UTC.
    """
    check_producer(producer, sequence)
    if version is not None:
        check_name("version", version)
    if valid_from is None:
        return None
    zoned = isinstance(valid_from, datetime) and valid_from.tzinfo is not None
    if version is None or not zoned or not fits_utc(valid_from):
        if version is None:
            what = "without end_of_dataset"
        else:
            what = f"of version {version!r}"
        problem = (
            f"valid_from={valid_from!r} {what}: expected end_of_dataset, and a datetime with a time"
            " zone, of the years 1 to 9999 in UTC."
        )
        step = "Pass end_of_dataset=…, and valid_from with tzinfo=UTC."
        raise errors.ConfigurationError(problem, step, argument="valid_from")
    return to_microseconds(valid_from)


@validated
def stale_sequence_error(
    stream: str, producer: str, sequence: int, newest: int
) -> errors.ProducerConflictError:
    """Return the error for a sequence that is older than all of its producer that the stream
    still remembers.
    """
    problem = (
        f"sequence {sequence} of producer {producer!r} in {stream} is older than those that are"
        f" still known; the newest is {newest}."
    )
    step = (
        f"Nothing was added. Give new records the sequence {newest + 1}, or a new producer name if"
        " its counter restarted. A late retry of an earlier append needs nothing: its records are"
        " in the stream."
    )
    return errors.ProducerConflictError(
        problem, step, stream=stream, producer=producer, sequence=sequence, newest=newest
    )


def check_same_contents(
    stream: str, producer: str, sequence: int, newest: int, before: str, now: str
) -> None:
    """Raise ProducerConflictError if the digests of two appends under the same sequence differ."""
    if before != now:
        problem = (
            f"sequence {sequence} of producer {producer!r} in {stream} was appended with other"
            f" contents (digest {before[:12]}, now {now[:12]}); the newest is {newest}."
        )
        step = (
            "Nothing was added. Retry with the same records, or give new records the sequence"
            f" {newest + 1}."
        )
        raise errors.ProducerConflictError(
            problem, step, stream=stream, producer=producer, sequence=sequence, newest=newest
        )


def check_table_options(what: str, options: AppendOptions) -> None:
    """Raise ConfigurationError if `order_by` or `partitioned` is given for an Arrow table."""
    if options.order_by or options.partitioned:
        problem = (
            f"{what}: order_by and partitioned are only for Spark frames; a table keeps its order."
        )
        raise errors.ConfigurationError(
            problem, "Sort the table first, and leave both out.", argument="order_by"
        )


def check_marker_partitions(
    stream: str, version: str, chosen: Sequence[int], count: int, rows: Mapping[int, int] | None
) -> None:
    """Raise ConfigurationError if a marker is for no partition, or for one that the stream does not
    have.

    Also raises it if `rows`, the record counts by partition, lacks one of these partitions or has a
    negative count.
    """
    wrong = [p for p in chosen if not 0 <= p < count]
    if wrong or not chosen:
        problem = (
            f"marker {version!r}: partitions {wrong} are not partitions of {stream}, which has"
            f" {count}."
        )
        step = f"Give partitions from 0 to {count - 1}."
        raise errors.ConfigurationError(problem, step, argument="partitions", stream=stream)
    if rows is None:
        return
    missing = [p for p in chosen if p not in rows]
    if missing:
        problem = f"marker {version!r} has no row count for partitions {missing} of {stream}."
        step = "Give a count for every partition that gets the marker, or no counts."
        raise errors.ConfigurationError(problem, step, argument="rows", stream=stream)
    negative = [p for p in chosen if rows[p] < 0]
    if negative:
        found = f"marker {version!r} has row counts below 0 for partitions {negative} of {stream}"
        raise argument_error(found, "counts from 0 on", argument="rows", stream=stream)

"""Finds a record that an operator fails over, after it has failed: by halves, in a bounded time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

SECONDS = 60.0
_MOST = 2_000_000


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A record that an operator failed over: where it stands in its stream, and its columns."""

    partition: int
    offset: str
    record: dict[str, Any]


def sample_record(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool]
) -> SampleRecord | None:
    """Return a record of these over which what is `made` of them fails with the `same` error; None where none is found.

    Each half is computed anew, so a batch of 100,000 records takes some twenty small jobs, which end after a minute.
    """
    return _in_time(arriving, lambda ends: _found(arriving, made, same, ends))


def fails_over(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool], seconds: float
) -> bool:
    """Return whether what is `made` of these records fails with the `same` error, as far as these seconds tell."""
    return bool(_in_time(arriving, lambda ends: _fails(made(arriving), same), seconds))


def _in_time(arriving: DataFrame, look: Callable[[float], T], seconds: float = SECONDS) -> T | None:
    """Return what is found, None where that fails or takes longer."""
    session = arriving.sparkSession
    tag = f"adjunct-sample-{uuid.uuid4().hex}"
    ends = time.monotonic() + seconds
    timer = threading.Timer(seconds, session.interruptTag, [tag])
    session.addTag(tag)
    timer.start()
    try:
        return look(ends)
    except Exception:  # noqa: BLE001 - what failed is told without a sample then
        return None
    finally:
        timer.cancel()
        session.removeTag(tag)


def _found(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool], ends: float
) -> SampleRecord | None:
    places = [(row[0], row[1]) for row in arriving.select(PARTITION, OFFSET).distinct().limit(_MOST + 1).collect()]
    if len(places) > _MOST:
        return None
    places.sort()
    while len(places) > 1:
        if time.monotonic() > ends:
            return None
        half = places[: len(places) // 2]
        places = half if _fails(made(_between(arriving, half)), same) else places[len(half) :]
    if not places or not _fails(made(_between(arriving, places)), same):
        return None
    row = _between(arriving, places).first()
    return None if row is None else SampleRecord(places[0][0], str(places[0][1]), row.asDict())


def _between(frame: DataFrame, places: Sequence[tuple[int, int]]) -> DataFrame:
    from pyspark.sql import functions as F

    (first, low), (last, high) = places[0], places[-1]
    partition, offset = F.col(PARTITION), F.col(OFFSET)
    return frame.where(
        ((partition > first) | ((partition == first) & (offset >= low)))
        & ((partition < last) | ((partition == last) & (offset <= high)))
    )


def _fails(frame: DataFrame, same: Callable[[Exception], bool]) -> bool:
    try:
        frame.write.format("noop").mode("overwrite").save()
    except Exception as error:
        if same(error):
            return True
        raise
    return False

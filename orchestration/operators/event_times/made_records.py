"""The hidden columns of records that an operator over time makes: of several others, from several batches.

No position of an input tells what such a record is made of. It has one of its own: the batch that made it, a partition
by its key, and a text by which all records of a batch have an order, the same however often the batch is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.hidden_columns import (
    BEHIND,
    EVENT_TIME,
    ORDINAL,
    ORIGIN,
    tie_breakers,
)
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import EPOCH, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext

_WIDTH = 20
# Spark leaves out what is null otherwise, and cuts times to milliseconds.
_AS_IT_IS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def made_records(
    frame: DataFrame,
    batch: BatchContext,
    *,
    by: Sequence[str],
    partitions: int,
    ordinal: Column,
    event_time: Column,
    behind: Column | None = None,
) -> DataFrame:
    """Return the rows as records of this batch: with their own columns, and the hidden ones of made records.

    `by` is the columns that choose the partition, `ordinal` a text that is another one for each row of a batch. Of rows
    with TOMBSTONE it is kept. `behind` is the watermark that a row is behind (`held_back`), null for others.
    """
    from pyspark.sql import functions as F

    own = [column(name) for name in frame.columns if not name.startswith("__")]
    place = F.pmod(F.hash(*[column(name) for name in by]), F.lit(partitions)) if by else F.lit(0)
    return frame.select(
        *own,
        place.cast("int").alias(PARTITION),
        F.lit(batch.number).cast("bigint").alias(OFFSET),
        F.lit(batch.clock).cast("timestamp").alias(TIMESTAMP),
        (F.col(TOMBSTONE) if TOMBSTONE in frame.columns else F.lit(False)).alias(TOMBSTONE),
        F.lit(0).cast("int").alias(EPOCH),
        ordinal.alias(ORDINAL),
        event_time.cast("timestamp").alias(EVENT_TIME),
        (F.lit(None) if behind is None else behind).cast("timestamp").alias(BEHIND),
    )


def held_back(behind: Column, micros: Column, by: timedelta) -> Column:
    """Return the watermark that a record is behind once an operator holds watermarks back by so much; null for none.

    An operator after that judges the record by it, whenever it arrives: how far batches have come says nothing.
    """
    from pyspark.sql import functions as F

    mark = F.unix_micros(behind) - F.lit(by // timedelta(microseconds=1))
    return F.when(micros < mark, F.timestamp_micros(mark))


def as_json(columns: Sequence[Column]) -> Column:
    """Return a JSON object of these columns as a text, with nulls, and times to the microsecond."""
    from pyspark.sql import functions as F

    return F.to_json(F.struct(*columns), _AS_IT_IS)


def place_in(frame: DataFrame, batch: BatchContext) -> Column:
    """Return `place_of` for records that are kept from batch to batch: with the batch that they came with.

    A stream that is made anew, or repartitioned, has other records at the same positions.
    """
    from pyspark.sql import functions as F

    return F.concat_ws("@", place_of(frame), F.lit(str(batch.number)))


def place_of(frame: DataFrame) -> Column:
    """Return a text that is another one for each record of a batch, and sorts them by their positions."""
    from pyspark.sql import functions as F

    numbers = [F.lpad(F.col(name).cast("string"), _WIDTH, "0") for name in (PARTITION, OFFSET)]
    names = (*tie_breakers(frame), *((ORIGIN,) if ORIGIN in frame.columns else ()))
    return F.concat_ws(":", *numbers, *[F.coalesce(F.col(name).cast("string"), F.lit("")) for name in names])

"""Records that stream joins and windows make or reject: their hidden columns, and why a record was
rejected.

Such a record is made of several others, which may be from different batches, so it has no input
position. It gets one: the partition is chosen by its key, the offset is the number of the batch
that made it, and its ordinal is the same however often the batch is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.batch import Planned, SparkBatch
from dagster_adjunct.orchestration.operators.columns import (
    BEHIND,
    BRANCH,
    EVENT_TIME,
    ORDINAL,
    ORIGIN,
    REPLAYED,
    TASK,
    is_own,
    keep_present,
    list_copies,
)
from dagster_adjunct.orchestration.operators.operator import Flow, PlanContext, Spec
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, ColumnFacts, Columns
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import named_column, value_column
from dagster_adjunct.resources.streams.system import EPOCH, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_DIGITS = 20
"""How many digits a partition or an offset has in a key, so that keys sort as numbers do."""

# By default Spark omits nulls and truncates times to milliseconds.
_JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def make_records(
    frame: DataFrame,
    planned: Planned,
    *,
    by: Sequence[str],
    partitions: int,
    ordinal: Column,
    event_time: Column,
    behind: Column | None = None,
) -> DataFrame:
    """Return the rows as records of this batch: with hidden columns, which give them new positions.

    `by` are the columns, or paths of values, that choose one of `partitions` partitions; without
    them all rows are in partition 0. `ordinal` is a text that is unique in the batch. If the rows
    have a TOMBSTONE column, it is kept, as are copies of values inside columns. `behind` becomes
    BEHIND (see `hold_back_watermark`): the watermark that a late row is behind, null for others.
    """
    partition: Column = F.lit(0)
    if by:
        values = [value_column(frame.columns, name) for name in by]
        partition = F.pmod(F.hash(*values), F.lit(partitions))
    tombstone: Column = F.lit(False)
    if TOMBSTONE in frame.columns:
        tombstone = F.col(TOMBSTONE)
    if behind is None:
        behind = F.lit(None)
    copies = [named_column(name) for name in list_copies(frame.columns)]
    return frame.select(
        *_own_columns(frame),
        *copies,
        partition.cast("int").alias(PARTITION),
        F.lit(planned.number).cast("bigint").alias(OFFSET),
        F.lit(planned.clock).cast("timestamp").alias(TIMESTAMP),
        tombstone.alias(TOMBSTONE),
        F.lit(0).cast("int").alias(EPOCH),
        ordinal.alias(ORDINAL),
        event_time.cast("timestamp").alias(EVENT_TIME),
        behind.cast("timestamp").alias(BEHIND),
    )


def _own_columns(frame: DataFrame) -> list[Column]:
    """Return the columns of a frame without the hidden ones."""
    return list(map(named_column, filter(is_own, frame.columns)))


def hold_back_watermark(behind: Column, micros: Column, by: timedelta) -> Column:
    """Return BEHIND of an operator's results: `behind` minus `by`, the delay that the operator adds
    to watermarks.

    `behind` is the watermark that the input record was behind, `micros` the event time of the
    result in microseconds. The value is null for a result that is not below the delayed watermark.
    The next operator decides by it whether the result is late, so that this does not depend on how
    batches are cut.
    """
    watermark = F.unix_micros(behind) - F.lit(by // timedelta(microseconds=1))
    return F.when(micros < watermark, F.timestamp_micros(watermark))


def to_json_object(columns: Sequence[Column]) -> Column:
    """Return the text of a JSON object with these columns; it includes nulls, and times have
    microseconds.
    """
    return F.to_json(F.struct(*columns), _JSON_OPTIONS)


def stored_position_key(frame: DataFrame, planned: Planned) -> Column:
    """Return `position_key` with the batch's number, as a unique key of records that are stored as
    state.

    Positions alone are not unique over batches: a recreated or repartitioned stream has other
    records at the same ones.
    """
    return F.concat_ws("@", position_key(frame), F.lit(str(planned.number)))


def position_key(frame: DataFrame) -> Column:
    """Return a text for each record that is unique within the batch; sorted by it, records are
    ordered by position.
    """
    parts = [F.lpad(F.col(name).cast("string"), _DIGITS, "0") for name in (PARTITION, OFFSET)]
    for name in keep_present((TASK, BRANCH, ORDINAL, ORIGIN), frame.columns):
        parts.append(F.coalesce(F.col(name).cast("string"), F.lit("")))
    return F.concat_ws(":", *parts)


EXCLUSION = "__why"
"""Why a stream join or window ignores a record: one of the reasons below; null for records that
it uses.
"""


# The values of EXCLUSION: read before, a tombstone, late, and without a time or key.
REPLAYED_REASON = "again"
DELETED = "tombstone"
LATE = "late"
NULL_TIME = "null time"
NULL_KEY = "null key"


# The reason that each counter counts.
_COUNTERS = {
    "late": LATE,
    "null_times": NULL_TIME,
    "null_keys": NULL_KEY,
    "again": REPLAYED_REASON,
    "tombstones": DELETED,
}


def exclusion_column(
    frame: DataFrame, keys: Sequence[str], null_time: Column, late: Column
) -> Column:
    """Return the values of EXCLUSION: the first reason to ignore each record, null for none.

    `keys` are columns, or paths of values in columns; `null_time` and `late` are conditions.
    """
    null_key = reduce(or_, [value_column(frame.columns, name).isNull() for name in keys])
    reasons = {DELETED: F.col(TOMBSTONE), NULL_TIME: null_time, NULL_KEY: null_key, LATE: late}
    if REPLAYED in frame.columns:
        reasons = {REPLAYED_REASON: F.col(REPLAYED), **reasons}
    reason_if_met = []
    for reason, condition in reasons.items():
        reason_if_met.append(F.when(condition, F.lit(reason)))
    return F.coalesce(*reason_if_met)


def exclusion_conditions() -> dict[str, Column]:
    """Return a condition for each reason to ignore records, by the name of the counter that
    counts them.
    """
    return {name: F.col(EXCLUSION) == why for name, why in _COUNTERS.items()}


# The input that the record came from ("left" or "right" of a stream join, "" of a window), why it
# was rejected ("late", "null time" or "null key"), its event time, and its columns as JSON.
LATE_RECORD_COLUMNS = {
    "side": "string",
    "why": "string",
    "event_time": "timestamp",
    "record": "string",
}


@dataclass(frozen=True, slots=True)
class LateRecords(Spec):
    """One record with LATE_RECORD_COLUMNS for each record that the stream join or window before
    it rejected.
    """

    kind: ClassVar[str] = "late-records"
    reads_diverted: ClassVar[bool] = True
    assigns_positions: ClassVar[bool] = True

    def summary(self) -> str:
        return "records that arrived too late"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns({name: ColumnFacts(kind) for name, kind in LATE_RECORD_COLUMNS.items()})

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return Flow(flow.stream, (), UNKNOWN, context.operator)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        late = batch.records.diverted(operator).select(
            *LATE_RECORD_COLUMNS, "__place", EVENT_TIME, BEHIND
        )
        return make_records(
            late,
            batch.planned,
            by=(),
            partitions=1,
            ordinal=F.col("__place"),
            event_time=F.col(EVENT_TIME),
            behind=F.col(BEHIND),
        )


def to_late_records(
    frame: DataFrame, why: Column, holds_back: timedelta, side: str = ""
) -> DataFrame:
    """Return rejected records in the form that `Records.divert` takes; `why` is the reason of each.

    `holds_back` is the watermark delay of the operator that rejects them, `side` the input that
    they came from ("" of a window).
    """
    return frame.select(
        F.lit(side).alias("side"),
        why.alias("why"),
        F.col(EVENT_TIME).alias("event_time"),
        to_json_object(_own_columns(frame)).alias("record"),
        F.concat_ws("/", F.lit(side), position_key(frame)).alias("__place"),
        F.col(EVENT_TIME),
        hold_back_watermark(F.col(BEHIND), F.unix_micros(EVENT_TIME), holds_back).alias(BEHIND),
    )

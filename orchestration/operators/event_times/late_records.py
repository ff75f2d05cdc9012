"""LateRecords: the records that the operator before has left out, because they came too late or say no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns.hidden_columns import BEHIND, EVENT_TIME
from dagster_adjunct.orchestration.operators.event_times.made_records import as_json, held_back, made_records, place_of
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.quoted_columns import column

if TYPE_CHECKING:
    from datetime import timedelta

    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext

# Of each record: which input it came by ("left", "right"; "" of an operator with one), why it was left out ("late",
# "null time", "null key"), its time, and its columns as JSON.
LATE = {"side": "string", "why": "string", "event_time": "timestamp", "record": "string"}


@dataclass(frozen=True, slots=True)
class LateRecords(Spec):
    """What the operator before has left out, one record of LATE for each."""

    kind: ClassVar[str] = "late-records"

    def summary(self) -> str:
        return "records that came too late"

    @property
    def takes_left_out(self) -> bool:
        return True

    @property
    def makes_records(self) -> bool:
        return True

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return Flow(flow.stream, tuple(LATE), (), UNKNOWN, context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        return dict(LATE)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        return made_records(
            batch.left_out(operator).select(*LATE, "__place", EVENT_TIME, BEHIND),
            batch,
            by=(),
            partitions=1,
            ordinal=F.col("__place"),
            event_time=F.col(EVENT_TIME),
            behind=F.col(BEHIND),
        )


def as_late(frame: DataFrame, why: Column, holds_back: timedelta, side: str = "") -> DataFrame:
    """Return records as they are handed to `BatchContext.leave_out`; `why` says why each was left out.

    `holds_back` is by how much the operator that leaves them out holds watermarks back.
    """
    from pyspark.sql import functions as F

    own = [column(name) for name in frame.columns if not name.startswith("__")]
    return frame.select(
        F.lit(side).alias("side"),
        why.alias("why"),
        F.col(EVENT_TIME).alias("event_time"),
        as_json(own).alias("record"),
        F.concat_ws("/", F.lit(side), place_of(frame)).alias("__place"),
        F.col(EVENT_TIME),
        held_back(F.col(BEHIND), F.unix_micros(EVENT_TIME), holds_back).alias(BEHIND),
    )


def checked_late_records(after: str, spec: Spec) -> LateRecords:
    """Return the records that the operator `after` leaves out. Raises PlanningError where it leaves out none."""
    if not spec.leaves_out:
        raise PlanningError(
            f"late_records after {after}: it leaves no records out.",
            "Ask a join of two streams, or a window, itself: joined.late_records().",
            operator=after,
        )
    return LateRecords()

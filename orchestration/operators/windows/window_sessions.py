"""Session windows of one batch: the open sessions, with the batch's records, which may join some into one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.windows.window_kinds import Session, micros
from dagster_adjunct.orchestration.operators.windows.window_records import PLACE
from dagster_adjunct.orchestration.operators.windows.window_rows import (
    ABSORBED,
    END,
    EXPIRES,
    START,
    TIME,
    TOUCHED,
    Windows,
    made_of,
    merged_of,
    micros_of,
    with_marks,
)
from dagster_adjunct.resources.schemas.quoted_columns import column, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.spec.compiling import Watermarks

_NUMBER, _BEGINS, _ITEMS, _KEPT, _FIRST = "__number", "__begins", "__items", "__kept", "__first"
_CLOSES = "__closes"


def session_runs(records: DataFrame, windows: Windows) -> DataFrame:
    """Return the sessions that the batch's records, those that count, make by themselves; they have no EXPIRES yet."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    assert isinstance(windows.kind, Session)
    gap = micros(windows.kind.gap)
    order = (TIME, PLACE)
    before = F.lag(TIME).over(Window.partitionBy(*map(column, windows.by)).orderBy(*map(column, order)))
    numbered = _numbered(records, before.isNull() | (F.col(TIME) - before >= gap), windows, order)
    times = (
        F.timestamp_micros(F.min(TIME)).alias(START),
        F.timestamp_micros(F.max(TIME) + gap).alias(END),
    )
    runs = made_of(numbered, (*windows.by, _NUMBER), windows.partials, order, *times)
    return runs.withColumn(EXPIRES, F.lit(None).cast("timestamp"))


def sessions_side_by_side(kept: DataFrame, runs: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the open sessions of before with `runs`, those that the batch's records make by themselves.

    Of `kept`, those of before, only the sessions of keys that have records, or of which one closes. Each is a row of
    its own, of which Spark puts on disk what memory has no room for: one key may have most of them. Only where both
    are put together is not known any more where rows lie.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    asked = F.col(f"new.{quoted(windows.by[0])}").isNotNull()
    reached = micros_of(marks.after)
    if reached is not None:
        first = F.min(column(EXPIRES)).over(Window.partitionBy(*map(column, windows.by)))
        kept = kept.withColumn(_CLOSES, F.unix_micros(first) <= reached)
        asked = asked | F.col(f"old.{_CLOSES}")
    pairs = [F.col(f"old.{quoted(name)}") == F.col(f"new.{quoted(name)}") for name in windows.by]
    keys = runs.select(*map(column, windows.by)).distinct()
    known = kept.alias("old").join(keys.hint("merge").alias("new"), reduce(and_, pairs), "left").filter(asked)
    names = (*windows.by, START, END, EXPIRES, *(partial.name for partial in windows.partials))
    before = known.select(*[F.col(f"old.{quoted(name)}") for name in names], F.lit(True).alias(_KEPT))
    return before.union(runs.select(*map(column, names), F.lit(False).alias(_KEPT)))


def session_windows(rows: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the sessions that the batch has changed or closes, of `sessions_side_by_side`.

    ABSORBED has START and EXPIRES of the sessions of before that are part of one with another begin now.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = (START, _KEPT)
    before = Window.partitionBy(*map(column, windows.by)).orderBy(*order).rowsBetween(Window.unboundedPreceding, -1)
    reach = F.max(END).over(before)
    numbered = _numbered(rows, reach.isNull() | (F.col(START) >= reach), windows, order)
    was = F.when(F.col(_KEPT), F.struct(F.col(START), column(EXPIRES)))
    touched = F.bool_or(~F.col(_KEPT)).alias(TOUCHED)
    times = (F.min(START).alias(_FIRST), F.max(END).alias(END), F.max(column(EXPIRES)).alias(EXPIRES))
    sessions = merged_of(
        numbered, (*windows.by, _NUMBER), windows.partials, order, *times, touched, F.collect_list(was).alias(_ITEMS)
    )
    others = F.filter(_ITEMS, lambda item: item[START] != F.col(_FIRST))
    made = sessions.withColumn(ABSORBED, others).drop(_ITEMS, _NUMBER).withColumnRenamed(_FIRST, START)
    return with_marks(made, windows, marks.after)


def _numbered(frame: DataFrame, begins: Column, windows: Windows, order: Sequence[str]) -> DataFrame:
    """Return the rows of each key with the number of the session that they are in."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    so_far = Window.partitionBy(*map(column, windows.by)).orderBy(*map(column, order))
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    marked = frame.withColumn(_BEGINS, begins.cast("int"))
    return marked.withColumn(_NUMBER, F.sum(_BEGINS).over(so_far)).drop(_BEGINS)

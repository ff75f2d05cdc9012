"""Tumbling and sliding windows of one batch: what was kept, with the batch's records added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.windows.window_bounds import end_of
from dagster_adjunct.orchestration.operators.windows.window_kinds import Session
from dagster_adjunct.orchestration.operators.windows.window_records import BEGIN, PLACE, in_windows
from dagster_adjunct.orchestration.operators.windows.window_rows import (
    END,
    EXPIRES,
    RECORDS,
    START,
    TOUCHED,
    Windows,
    joined_rows,
    made_of,
    with_marks,
)
from dagster_adjunct.resources.schemas.quoted_columns import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.compiling import Watermarks


def fixed_windows(kept: DataFrame, records: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the rows of the windows that the batch has changed or closes.

    `kept` are the rows of before it, `records` those that count. Where both lie in the partitions of the same columns
    of the key, nothing moves.
    """
    from pyspark.sql import functions as F

    assert not isinstance(windows.kind, Session)
    key = (*windows.by, START)
    new = made_of(in_windows(records, windows), (*windows.by, BEGIN), windows.partials, (PLACE,))
    both, keys = joined_rows(kept, new.withColumnRenamed(BEGIN, START), key)
    added = [
        F.expr(partial.added.format(f"old.{quoted(partial.name)}", f"new.{quoted(partial.name)}"))
        .cast(partial.type)
        .alias(partial.name)
        for partial in windows.partials
    ]
    touched = F.col(f"new.{quoted(RECORDS)}").isNotNull().alias(TOUCHED)
    rows = both.select(*keys, *added, touched, F.col(f"old.{quoted(EXPIRES)}").alias(EXPIRES))
    end = F.timestamp_micros(end_of(F.unix_micros(START), windows.kind))
    return with_marks(rows.withColumn(END, end), windows, marks.after)

"""The records that windows make and the rows that they keep, with what sessions take back that are part of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from dagster_adjunct.orchestration.operators.columns.known_columns import FINAL
from dagster_adjunct.orchestration.operators.windows.window_kinds import Session
from dagster_adjunct.orchestration.operators.windows.window_rows import (
    ABSORBED,
    CLOSING,
    END,
    EXPIRES,
    START,
    TOUCHED,
    Windows,
)
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Results: TypeAlias = Literal["final", "updates"]


def results_of(rows: DataFrame, windows: Windows, results: Results) -> DataFrame:
    """Return a result for each row, with TOMBSTONE; with updates FINAL and what sessions take back, too."""
    from pyspark.sql import functions as F

    values = [F.col(START), F.col(END), *windows.results()]
    if results == "final":
        kept = [column(name) for name in windows.by]
        return rows.filter(CLOSING).select(*kept, *values, F.lit(False).alias(TOMBSTONE))
    return _with_taken_back(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def kept_rows(rows: DataFrame, windows: Windows) -> DataFrame:
    """Return the rows that stay open, as they are kept, with TOMBSTONE: those of absorbed sessions are deleted."""
    names = [name for name in windows.schema.names if name not in windows.by]
    still_open = rows.filter(TOUCHED).filter(f"not {CLOSING}")
    return _with_taken_back(still_open, windows, [column(name) for name in names], (START, EXPIRES))


def _with_taken_back(rows: DataFrame, windows: Windows, values: Sequence[Column], known: Sequence[str]) -> DataFrame:
    """Return these values of each row, and a tombstone with the `known` columns for each session that it absorbed.

    They come out of one list a row, so that they lie where it does: of a union Spark would not know.
    """
    from pyspark.sql import functions as F

    key = [column(name) for name in windows.by]
    if not isinstance(windows.kind, Session):
        return rows.select(*key, *values, F.lit(False).alias(TOMBSTONE))
    here = F.struct(*values, F.lit(False).alias(TOMBSTONE))
    fields = rows.select(*values).schema.fields

    def gone(old: Column) -> Column:
        parts = [
            (old.getField(field.name) if field.name in known else F.lit(None).cast(field.dataType)).alias(field.name)
            for field in fields
        ]
        return F.struct(*parts, F.lit(True).alias(TOMBSTONE))

    return rows.select(*key, F.inline(F.concat(F.array(here), F.transform(ABSORBED, gone))))

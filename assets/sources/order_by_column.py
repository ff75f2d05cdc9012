"""Order by a column: positions made of its values, and changes that come after their horizon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.versions.kept_history import VALID_FROM, moment_of
from dagster_adjunct.assets.versions.sealed_version import POSITION

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def position_of(rows: DataFrame, name: str) -> Column:
    """Return the position that a value of the ordering column stands for: microseconds, days, or the number."""
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.schemas.quoted_columns import column

    value = column(name)
    kind = rows.select(value).schema.fields[0].dataType.simpleString()
    if kind.startswith("timestamp"):
        return F.unix_micros(value)
    return F.unix_date(value).cast("bigint") if kind == "date" else value.cast("bigint")


def placed_from(changes: DataFrame, first: int) -> DataFrame:
    """Return changes ordered by offset with positions that begin at `first`."""
    from pyspark.sql import functions as F

    return changes.withColumn(POSITION, F.col(POSITION) + F.lit(first).cast("bigint"))


def without_late(
    changes: DataFrame, horizon: int | None, on_bad_change: object
) -> tuple[DataFrame, Callable[[], int] | None]:
    """Return the changes above the horizon, and what counts the others once the job has run.

    The horizon is a position, and of rows over time a moment, in microseconds.
    Late ones can't be told from what a deletion that is forgotten would beat. With dead letters they become a problem
    of theirs instead.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    if horizon is None:
        return changes, None
    over_time = VALID_FROM in changes.columns
    late = (F.unix_micros(VALID_FROM) if over_time else F.col(POSITION)) <= F.lit(horizon)
    # A row without a time is refused for that.
    late = F.coalesce(late, F.lit(False)) if over_time else late
    if isinstance(on_bad_change, DeadLetters):
        reason = F.lit(too_late(horizon, over_time))
        return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), F.when(late, reason))), None
    observed = Observation()
    counted = changes.observe(observed, F.coalesce(F.sum(late.cast("long")), F.lit(0)).alias("late"))
    return counted.where(~late | F.col(PROBLEM).isNotNull()), lambda: int(observed.get["late"])


def too_late(horizon: int, over_time: bool = False) -> str:
    """Return the reason for a change at or below this position; of rows over time it is a moment in microseconds."""
    place = f"{moment_of(horizon):%Y-%m-%d %H:%M:%S.%f} UTC" if over_time else f"position {horizon}"
    return f"it comes too late: deletions up to {place} are forgotten"

"""The rows that windows are kept as, and the algebra that all kinds of windows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.windows.exact_sums import ExactSum, Partial
from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregate, Aggregation, Mean, Sum
from dagster_adjunct.orchestration.operators.windows.window_kinds import Kind, micros
from dagster_adjunct.resources.schemas.quoted_columns import column, quoted
from dagster_adjunct.resources.schemas.schema import Field, Schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

START, END = "window_start", "window_end"
EXPIRES = "expires$"
"""When a row is not needed any more: the end of its window and the lateness that is allowed."""
RECORDS = "records$"
"""How many records are in the window."""
TOUCHED, CLOSING, ABSORBED = "__touched", "__closing", "__absorbed"
"""Whether this batch has brought records of the window; whether it closes it; what a session has taken in."""
TIME = "__micros"
"""The event time of a record, in microseconds."""
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a kind by the columns `by`, whose types in `types` are known, as those of the records' columns."""

    kind: Kind
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregation], ...]
    lateness: timedelta
    types: Mapping[str, str]

    @property
    def partials(self) -> tuple[Partial, ...]:
        """The columns of a window's row that are made of its records."""
        counted = Partial(
            RECORDS, "bigint", "count(1)", f"sum({quoted(RECORDS)})", "coalesce({0}, 0L) + coalesce({1}, 0L)"
        )
        return (
            counted,
            *(partial for name, made in self.aggregates for partial in made.partials(name, self.kind_of(made))),
        )

    @property
    def functions(self) -> tuple[tuple[str, Aggregate], ...]:
        """The functions of users among the aggregates."""
        return tuple((name, made) for name, made in self.aggregates if isinstance(made, Aggregate))

    @property
    def schema(self) -> Schema:
        """The columns of the rows that are kept."""
        keys = [Field(name, self.types[name]) for name in self.by]
        times = [Field(name, "timestamp") for name in (START, END)]
        return Schema(
            (
                *keys,
                *times,
                *(Field(partial.name, partial.type) for partial in self.partials),
                Field(EXPIRES, "timestamp"),
            )
        )

    @property
    def ordered(self) -> bool:
        """Whether some value depends on the order in which records are added."""
        return any(partial.ordered for partial in self.partials)

    @property
    def units(self) -> str:
        """Return in words the units that sums of decimals are kept in; nothing for sums of integers."""
        scales = {
            name: ExactSum(name, self.kind_of(made)).scale
            for name, made in self.aggregates
            if isinstance(made, Sum | Mean)
        }
        return "".join(f"; {name} in units of 1E-{scale}" for name, scale in scales.items() if scale)

    def kind_of(self, made: Aggregation) -> str:
        """Return the type of the column that a value is made of; "" for records, or all of their columns."""
        return self.types[made.columns[0]] if made.columns else ""


def micros_of(moment: datetime | None) -> int | None:
    """Return a moment as microseconds since 1970."""
    if moment is None:
        return None
    return micros((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - _BEGINNING)


def made_of(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], *more: Column
) -> DataFrame:
    """Return a row of partial values, and of `more` aggregates, for each of the groups `by` of records.

    They are added in the order of `order` where that makes a difference.
    """
    from pyspark.sql import functions as F

    made = [F.expr(partial.made).cast(partial.type).alias(partial.name) for partial in partials]
    return _aggregated(frame, by, partials, order, [*more, *made])


def merged_of(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], *more: Column
) -> DataFrame:
    """Return the same for each of the groups `by` of rows that have partial values."""
    from pyspark.sql import functions as F

    merged = [F.expr(partial.merged).cast(partial.type).alias(partial.name) for partial in partials]
    return _aggregated(frame, by, partials, order, [*more, *merged])


def _aggregated(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], made: Sequence[Column]
) -> DataFrame:
    names = [column(name) for name in by]
    if any(partial.ordered for partial in partials):  # a task adds up rows as they come
        frame = frame.sortWithinPartitions(*names, *map(column, order))
    return frame.groupBy(*names).agg(*made)


def joined_rows(left: DataFrame, right: DataFrame, on: Sequence[str]) -> tuple[DataFrame, list[Column]]:
    """Return all rows of both sides, a pair in one, and the columns `on` of either; the sides are "old" and "new".

    They lie as both lay: Spark knows nothing any more of where rows of a union lie.
    """
    from pyspark.sql import functions as F

    pairs = [F.col(f"old.{quoted(name)}") == F.col(f"new.{quoted(name)}") for name in on]
    condition = pairs[0]
    for pair in pairs[1:]:
        condition = condition & pair
    both = left.alias("old").join(right.hint("merge").alias("new"), condition, "full")
    return both, [F.coalesce(f"old.{quoted(name)}", f"new.{quoted(name)}").alias(name) for name in on]


def with_marks(rows: DataFrame, windows: Windows, after: datetime | None) -> DataFrame:
    """Return the rows that a batch has changed or closes, with EXPIRES and CLOSING; `after` is its watermark.

    EXPIRES of `rows` is as it was kept, null for a new window. It never gets earlier, also where less lateness is
    allowed since: or a window would be closed in one batch, and again in another by what was kept of it before.
    """
    from pyspark.sql import functions as F

    kept_until = F.greatest(column(EXPIRES), F.timestamp_micros(F.unix_micros(END) + micros(windows.lateness)))
    reached = micros_of(after)
    closing = F.lit(False) if reached is None else F.unix_micros(column(EXPIRES)) <= F.lit(reached)
    marked = rows.withColumn(EXPIRES, kept_until).withColumn(CLOSING, closing)
    return marked.filter(F.col(TOUCHED) | F.col(CLOSING))

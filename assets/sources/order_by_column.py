"""The order of changes: positions made of what `order_by` names, and changes that come after their horizon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_formats import ORDER, PROBLEM, SNAPSHOT, path_column
from dagster_adjunct.assets.declaration.changes.change_order import (
    NOTHING,
    SNAPSHOT_ROWS,
    STREAMED_FIRST,
    Samples,
    no_order,
    orders_changes,
    position_type,
    sortable,
    unlike,
)
from dagster_adjunct.assets.declaration.changes.problem_texts import NO_PATH, shown, told
from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.versions.kept_history import VALID_FROM, moment_of
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.schemas.schema import Schema

_POSITION = r"^[+-]?\d{1,30}$"


def with_order(
    spec: AdjunctDataset, rows: DataFrame, schema: Schema, samples: Samples | None
) -> tuple[DataFrame, Samples | None]:
    """Return the rows with ORDER, their position, and a problem where they have none; and the first values.

    `samples` are those that are known. Raises SchemaMismatchError for a first change that can't be ordered.
    """
    from pyspark.sql import functions as F

    order, string = spec.following.order or (), position_type(spec.following.order, schema) == "string"
    if order == STREAMED_FIRST:
        below = F.when(F.col(SNAPSHOT), F.lit(SNAPSHOT_ROWS)).otherwise(F.lit(0)).cast("bigint")
        return rows.withColumn(ORDER, F.col(OFFSET) + below).drop(SNAPSHOT), samples
    paths = [name for name in order if name not in schema.names]
    values = [_text_of(name, schema) if string or name in paths else column(name) for name in order]
    if any(name in paths or schema.field(name).type == "string" for name in order):
        samples = first_values(spec, rows, values, samples)
    parts: list[Column] = []
    reasons: list[Column] = []
    # Of the streamed change that a snapshot's row is not, it has nothing: it is older than each of that place.
    snapshot = F.col(SNAPSHOT) if SNAPSHOT in rows.columns else F.lit(False)
    for place, (name, value) in enumerate(zip(order, values, strict=True)):
        sample = "0" if samples is None else samples[place]
        lacks = value.isNull() & snapshot if place else F.lit(False)
        part = sortable(value, name, sample) if string else _number(value) if paths else position_of(name, schema)
        parts.append(F.when(lacks, F.lit(NOTHING)).otherwise(part) if string else part)
        reasons.append(F.when(value.isNull() & ~lacks, F.lit(no_value(name))))
        reasons.append(
            F.when(part.isNull() & ~lacks, F.concat(shown(value), F.lit(unlike(name, sample if string else None))))
        )
    placed = with_problem(rows.withColumn(ORDER, F.concat(*parts) if string else parts[0]), *reasons)
    return placed.drop(*[path_column(path) for path in paths], SNAPSHOT), samples


def first_values(
    spec: AdjunctDataset, rows: DataFrame, values: Sequence[Column], samples: Samples | None
) -> Samples | None:
    """Return what the values of later changes are compared with: those of the first change that has them.

    None where there is no change. Raises SchemaMismatchError where the first one can't be ordered.
    """
    from pyspark.sql import functions as F

    if samples is not None and None not in samples:
        return samples
    names = [f"v{place}" for place in range(len(values))]
    changes = rows.select(F.col(PROBLEM), *[value.alias(name) for value, name in zip(values, names, strict=True)])
    changes = changes.where(F.col(PROBLEM).isNull() | F.startswith(F.col(PROBLEM), F.lit(NO_PATH)))
    if samples is None:
        first = changes.head()
        if first is None:
            return None
        if first[PROBLEM] is not None:
            raise refused(spec, first[PROBLEM])
        samples = tuple(first[name] for name in names)
    found = []
    for name, sample in zip(names, samples, strict=True):
        later = changes.where(F.col(name).isNotNull()).head() if sample is None else None
        found.append(sample if later is None else later[name])
    return checked(spec, tuple(found))


def checked(spec: AdjunctDataset, samples: Samples) -> Samples:
    """Return these first values, all of which can order. Raises SchemaMismatchError for one that can't."""
    for name, sample in zip(spec.following.order_by or (), samples, strict=True):
        if sample is not None and not orders_changes(name, sample, spec.following.order_by or ()):
            raise refused(spec, no_order(name, sample), name)
    return samples


def refused(spec: AdjunctDataset, reason: str, name: str | None = None) -> SchemaMismatchError:
    """Return the error for a first change that can't be ordered."""
    hidden = spec.sensitive or getattr(spec.extractor, "sensitive", ())
    return SchemaMismatchError(
        f"dataset {spec.name!r} (input {spec.input}): {told(reason, values=not hidden)}.",
        "Nothing was committed. Name in order_by what the changes have, or leave it out to order by offset.",
        dataset=spec.name,
        column=name,
        argument="order_by",
    )


def _text_of(name: str, schema: Schema) -> Column:
    """Return the values of a name in the order as texts, by which they can be compared."""
    from pyspark.sql import functions as F

    if name not in schema.names:
        return F.col(path_column(name))
    if schema.field(name).type in ("date", "timestamp"):
        return position_of(name, schema).cast("string")
    return column(name).cast("string")


def _number(text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.when(text.rlike(_POSITION), text.try_cast("bigint"))


def position_of(name: str, schema: Schema) -> Column:
    """Return the position that a value of the ordering column stands for: microseconds, days, or the number."""
    from pyspark.sql import functions as F

    value, kind = column(name), schema.field(name).type
    if kind == "timestamp":
        return F.unix_micros(value)
    return F.unix_date(value).cast("bigint") if kind == "date" else value.cast("bigint")


def no_value(name: str) -> str:
    """Return the reason for a change whose value in the order is null."""
    return f"no value to order by: {name!r} is null"


def with_problem(changes: DataFrame, *reasons: Column) -> DataFrame:
    """Return the changes with what is wrong with them, where nothing was before."""
    from pyspark.sql import functions as F

    return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), *reasons))


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

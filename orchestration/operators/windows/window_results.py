"""The records that windows make and the rows that they keep, with what sessions take back that are part of others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from dagster_adjunct.orchestration.operators.columns.known_columns import FINAL
from dagster_adjunct.orchestration.operators.windows.exact_sums import ExactSum
from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregate, Aggregation
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
from dagster_adjunct.resources.errors import OperatorFailedError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.spark.spark_errors import refusal
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE
from dagster_adjunct.resources.user_code import MASKED, SHOWN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Results: TypeAlias = Literal["final", "updates"]


def results_of(
    rows: DataFrame, windows: Windows, results: Results, operator: str, sensitive: Collection[str]
) -> DataFrame:
    """Return a result for each row, with TOMBSTONE; with updates FINAL and what sessions take back, too.

    A sum that its type can't hold fails the batch that closes its window. In updates before that it is null: records
    may come that bring it back.
    """
    from pyspark.sql import functions as F

    masked = frozenset(name.lower() for name in sensitive)
    values = [F.col(START), F.col(END)]
    values += [_value(name, made, windows, operator, masked) for name, made in windows.aggregates]
    if results == "final":
        kept = [column(name) for name in windows.by]
        return rows.filter(CLOSING).select(*kept, *values, F.lit(False).alias(TOMBSTONE))
    return _with_taken_back(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def _value(name: str, made: Aggregation, windows: Windows, operator: str, masked: Collection[str]) -> Column:
    from pyspark.sql import functions as F

    if isinstance(made, Aggregate):
        return column(name)
    kind = windows.kind_of(made)
    value, exact = F.expr(made.result(name, kind)), made.exact(name, kind)
    if exact is None:
        return value.alias(name)

    def shown(source: str, part: Column) -> Column:
        return F.lit(MASKED) if source.lower() in masked else F.substring(part.cast("string"), 1, SHOWN)

    words = [F.lit(f"{operator}: {made.words()} as {name} is "), shown(made.columns[0], F.expr(exact))]
    words.append(F.lit(f", which is no {made.returns_of(kind)}: in the window from "))
    words += [F.col(START).cast("string"), F.lit(" to "), F.col(END).cast("string"), F.lit(" UTC of ")]
    for place, key in enumerate(windows.by):
        words += [F.lit(f"{', ' if place else ''}{key} = "), shown(key, column(key))]
    refused = refusal(OperatorFailedError, F.concat(*words, F.lit(".")), _next_step(made, kind), operator=operator)
    too_large = F.col(CLOSING) & value.isNull() & F.expr(exact).isNotNull()
    return F.when(too_large, refused.cast(str(made.returns_of(kind)))).otherwise(value).alias(name)


def _next_step(made: Aggregation, kind: str) -> str:
    """Return what can be done about a result that its type can't hold: only what is kept alike is gone on with."""
    column, wider = made.columns[0], ExactSum("", kind).wider
    if wider is not None:
        return (
            f"Nothing is lost: the sum is kept whole. Add up a wider type, .with_columns({column}="
            f'"cast({column} as {wider})") before the window, and the next run goes on with it.'
        )
    scale = ExactSum("", kind).scale
    fewer = f', or, with fewer digits behind the point, "cast({column} as decimal(38,{scale // 2}))"' if scale else ""
    return (
        f"No decimal with {scale} digits behind the point holds it, and what is kept has as many. Add up doubles, "
        f'which round: .with_columns({column}="cast({column} as double)") before the window{fewer}. Do so in an '
        "application of another name, with outputs of its own: it fills its windows from the oldest records on."
    )


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

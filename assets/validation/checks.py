"""The checks behind the validators: each takes a candidate and its arguments, and returns a Finding."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.reading.stored_file import count_nulls, list_stored_files
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.column_sql import F, quote_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.errors import first_message_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.validation.validators import Candidate

Rule = Literal["exact", "additive", "any"]
SAMPLE_SIZE = 5
VERSION, CURRENT = "version", "current"
"""The tables that a validator's SELECT reads: the candidate, and the served version."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: whether it passed, a message, and the counts behind it.

    `without_values` is the message without any values, for sensitive columns.
    """

    passed: bool
    message: str = ""
    facts: Mapping[str, Any] | None = None
    without_values: str = ""


def check_unique_keys(candidate: Candidate) -> Finding:
    counters = candidate.view.sealed.counters
    superseded, read = counters.get("superseded", 0), counters.get("read", 0)
    facts = {"superseded": superseded, "read": read}
    if superseded:
        key = ", ".join(candidate.view.sealed.key)
        return Finding(
            False, f"{superseded:,} of {read:,} records have a key ({key}) that a later record has too", facts
        )
    return Finding(True, f"{read:,} records, each with a key of its own", facts)


def check_no_null_keys(candidate: Candidate) -> Finding:
    return check_no_nulls(candidate, *candidate.view.sealed.key)


def check_no_nulls(candidate: Candidate, *columns: str) -> Finding:
    view = candidate.view
    for column in columns:
        view.schema.field(column, f"dataset {view.dataset!r}")
    nulls = count_nulls(list_stored_files(view.store, view.dataset, view.sealed), columns)
    broken = [f"{count:,} of {view.rows:,} rows have no {column!r}" for column, count in nulls.items() if count]
    facts = {"nulls": nulls, "rows": view.rows}
    return Finding(not broken, "; ".join(broken) or f"{view.rows:,} rows have {', '.join(map(repr, columns))}", facts)


def check_schema_compatible(candidate: Candidate, rule: Rule) -> Finding:
    if candidate.current is None:
        return Finding(True, "the first version")
    old, new = candidate.current.schema, candidate.view.schema
    removed, retyped, added = _differences(old, new)
    facts = {"removed": removed, "retyped": retyped, "added": added, "served": candidate.current.version}
    parts = [f"{what} {', '.join(names)}" for what, names in facts.items() if isinstance(names, list) and names]
    if not parts and old.names != new.names:
        parts = [f"the order is {', '.join(new.names)}, was {', '.join(old.names)}"]
    passed = {"exact": not parts, "additive": not removed and not retyped, "any": True}[rule]
    if not parts:
        return Finding(True, f"the same {len(new.names)} columns as version {candidate.current.version}", facts)
    return Finding(passed, f"against version {candidate.current.version}: {'; '.join(parts)}", facts)


def _differences(old: Schema, new: Schema) -> tuple[list[str], list[str], list[str]]:
    before, after = ({field.name: field.type for field in schema.fields} for schema in (old, new))
    removed = [name for name in before if name not in after]
    retyped = [f"{n} ({before[n]} to {after[n]})" for n in before if n in after and before[n] != after[n]]
    return removed, retyped, [f"{name} ({after[name]})" for name in after if name not in before]


def check_row_count_within(candidate: Candidate, fraction: float, minimum_rows: int) -> Finding:
    rows = candidate.view.rows or 0
    if candidate.current is None:
        return Finding(True, f"the first version, with {rows:,} rows", {"rows": rows})
    served = candidate.current.rows or 0
    facts: dict[str, Any] = {"rows": rows, "served_rows": served, "served": candidate.current.version}
    if not served or served < minimum_rows:
        return Finding(True, f"{rows:,} rows; version {candidate.current.version} has only {served:,}", facts)
    change = (rows - served) / served
    facts["change"] = round(change, 6)
    change_in_rows = f"{rows:,} rows, {change:+.1%} of the {served:,} of version {candidate.current.version}"
    passed = abs(rows - served) <= fraction * served
    return Finding(passed, change_in_rows if passed else f"{change_in_rows}: at most {fraction:.1%} is allowed", facts)


def check_min_rows(candidate: Candidate, n: int) -> Finding:
    rows = candidate.view.rows or 0
    return Finding(rows >= n, f"{rows:,} rows" + ("" if rows >= n else f", expected {n:,} or more"), {"rows": rows})


def check_values_in(candidate: Candidate, column: str, values: tuple[Any, ...]) -> Finding:
    from pyspark.errors import DateTimeException, NumberFormatException

    field = candidate.view.schema.field(column, f"dataset {candidate.view.dataset!r}")
    name = quote_name(column)
    others = candidate.view.frame(candidate.spark()).where(~F.col(name).isin(*values))
    try:
        counted = others.groupBy(F.col(name).alias("value")).count().orderBy(F.desc("count"), "value").collect()
    except (NumberFormatException, DateTimeException) as error:
        # Spark only casts to compare with values of another type, so the data is not the cause.
        problem = (
            f"values_in({column!r}) has values that can't be compared with the column's type, {field.type}: "
            f"{first_message_line(error)}"
        )
        raise ConfigurationError(problem, "List values of that type.", argument="values") from error
    violations = sum(row["count"] for row in counted)
    if not violations:
        return Finding(True, f"{column!r} holds nothing but the {len(values):,} allowed values", {"violations": 0})
    listed = ", ".join(f"{row['value']!r} ({row['count']:,})" for row in counted[:SAMPLE_SIZE])
    facts = {
        "violations": violations,
        "values": len(counted),
        "sample_of": column,
        "sample": [[to_json_value(row["value"]), row["count"]] for row in counted[:SAMPLE_SIZE]],
    }
    more = f" and {len(counted) - SAMPLE_SIZE:,} more" if len(counted) > SAMPLE_SIZE else ""
    counted_only = f"{violations:,} rows have other values of {column!r}"
    return Finding(False, f"{counted_only}: {listed}{more}", facts, counted_only)


def check_sql(candidate: Candidate, sql: str) -> Finding:
    broken = _broken_rows(candidate, sql)
    violations = broken.count()
    if not violations:
        return Finding(True, "no row breaks it", {"violations": 0})
    # A SELECT may not return the key columns: then the sample is of its own rows.
    key = [name for name in candidate.view.sealed.key if name in broken.columns]
    wanted = [quote_name(name) for name in key] or ["*"]
    sample = [[to_json_value(value) for value in row] for row in broken.select(*wanted).limit(SAMPLE_SIZE).collect()]
    what = ", ".join(key) or "rows"
    listed = ", ".join(str(tuple(values)) if len(values) > 1 else repr(values[0]) for values in sample)
    more = " …" if violations > len(sample) else ""
    facts = {"violations": violations, "sample_of": what, "sample": sample}
    counted_only = f"{violations:,} rows break it"
    return Finding(False, f"{counted_only}: {what} {listed}{more}", facts, counted_only)


def _broken_rows(candidate: Candidate, sql: str) -> DataFrame:
    from uuid import uuid4

    spark = candidate.spark()
    version = candidate.view.frame(spark)
    if not re.match(r"\(*\s*(select|with)\b", sql, re.IGNORECASE):
        return version.where(~F.coalesce(F.expr(sql), F.lit(False)))
    current = candidate.current.frame(spark) if candidate.current is not None else version.limit(0)
    names = {VERSION: version, CURRENT: current}
    mark = uuid4().hex
    try:
        for name, frame in names.items():
            frame.createOrReplaceTempView(f"{name}_{mark}")
        # As common table expressions, so that views of the user's session neither conflict nor are overwritten.
        tables = ", ".join(f"{name} AS (SELECT * FROM {name}_{mark})" for name in names)
        return spark.sql(f"WITH {tables} SELECT * FROM (\n{sql}\n)")
    finally:
        for name in names:
            spark.catalog.dropTempView(f"{name}_{mark}")


def to_json_value(value: Any) -> Any:
    """Return a value as JSON stores it; values that JSON does not know become text."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return to_json_value(value.item())
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)

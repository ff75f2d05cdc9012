"""From records of a change stream to changes of a dataset's entries, by Spark.

    records -> change format -> order -> extractor -> changes, each with its position, and its problem if it has one

What can't be applied goes through as a change with a problem: `refuse_problems` lets the job fail at it, or
change_dead_letters.py takes it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_formats import KEPT, ORDER, PROBLEM
from dagster_adjunct.assets.declaration.changes.change_order import (
    Samples,
    has_order,
    order_in_code,
    position_type,
    refused_path,
)
from dagster_adjunct.assets.declaration.changes.problem_texts import shown, telling
from dagster_adjunct.assets.declaration.extractors.extractor import (
    Projection,
    PythonExtractor,
    companions,
    hiding,
)
from dagster_adjunct.assets.sources.entries_of_records import schema_of_entries
from dagster_adjunct.assets.sources.order_by_column import with_order, with_problem
from dagster_adjunct.assets.versions.kept_history import VALID_FROM
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.errors import BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column, literal, quoted
from dagster_adjunct.resources.schemas.readable_values import CHECKED_TYPES, rule_of, unreadable_in_sql
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.spark_errors import refusal
from dagster_adjunct.resources.streams.interface.stream_system import META, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset

RAW = "__raw"
DELETION_OF_NOTHING = "a deletion, and nothing says of which entry: the key is computed by the extractor"
_CORRECT = (
    "Nothing was committed. Correct what writes the stream and the stream itself, or declare "
    "on_bad_change=DeadLetters(STREAM), which sets such changes aside and counts them."
)


def stored_schema(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that a dataset stores of an input whose records have these: of what its envelopes hold.

    Raises SchemaMismatchError, naming the dataset, as `schema_of_rows` and `schema_of_entries` do.
    """
    follows = spec.follows_changes and isinstance(spec.input, str)
    return schema_of_entries(spec, schema_of_rows(spec, records) if follows else records)


def schema_of_rows(spec: AdjunctDataset, stream_schema: Schema) -> Schema:
    """Return the columns of the rows that change, which the dataset's extractor gets.

    Raises SchemaMismatchError, naming the dataset, where the stream can't be of the declared format, or can't be
    ordered as declared.
    """
    what, following = _what(spec), spec.following
    rows = following.changes.schema(stream_schema, what)
    _check_valid_from(rows, following.valid_from, what)
    for name in following.order_by or ():
        _check_ordering(spec, rows, name, what)
    if following.keep_tombstones is not None and position_type(following.order, rows) != "bigint":
        raise SchemaMismatchError(
            f"{what}: keep_tombstones is {following.keep_tombstones}, and between values of "
            f"{order_in_code(following.order_by or ())} there is no distance.",
            "Leave it out, and deletions are remembered for ever, or order by an integer, a date or a timestamp.",
            dataset=spec.name,
            argument="keep_tombstones",
        )
    return rows


def looked_at(spec: AdjunctDataset, rows: Schema) -> Schema:
    """Return the columns of rows that the dataset stores or goes by: a value of another one makes no bad change."""
    if spec.columns is None or spec.extractor is not None:
        return rows
    used = {*spec.columns, *(spec.following.order_by or ()), spec.following.valid_from}
    return Schema(tuple(field for field in rows.fields if field.name in used))


def _check_ordering(spec: AdjunctDataset, rows: Schema, name: str, what: str) -> None:
    following = spec.following
    order = following.order_by or ()
    if name in rows.names:
        kind = rows.field(name).type
        if not has_order(kind):
            raise SchemaMismatchError(
                f"{what}: order_by names the column {name!r}, which is {kind}: expected an integer, a decimal without "
                "fraction, a date, a timestamp, or a text of numbers.",
                "Order by another column, or by offset (leave order_by out).",
                dataset=spec.name,
                column=name,
            )
        return
    if not following.changes.orders(name):
        raise SchemaMismatchError(
            f"{what}: order_by is {name!r}, and changes ({following.changes.describe()}) have no such column or "
            f"position: their columns are {', '.join(rows.names)}.",
            "Name one of them; of Debezium's envelopes also source.lsn, source.ts_ms, ts_ms and their like.",
            dataset=spec.name,
            column=name,
        )
    refused = refused_path(order, name)
    if refused is not None:
        told = f"{what}: order_by names {name!r}: {refused[0]}"
        raise SchemaMismatchError(f"{told}.", refused[1], dataset=spec.name, column=name)


def _check_valid_from(rows: Schema, name: str | None, what: str) -> None:
    if name is None:
        return
    kind = rows.field(name, f"{what}: valid_from names {name!r}, and the record").type
    if kind not in ("date", "timestamp"):
        raise SchemaMismatchError(
            f"{what}: valid_from names the column {name!r}, which is {kind}: expected a timestamp or a date.",
            "Name another column, or leave valid_from out: an entry is valid from its record's time then.",
            column=name,
        )


def decode_changes(
    spec: AdjunctDataset,
    records: DataFrame,
    stream_schema: Schema,
    entry_schema: Schema,
    *,
    partitions: int,
    samples: Samples | None = None,
) -> tuple[DataFrame, Samples | None]:
    """Return the changes of entries that records make: `entry_schema`, META, `__position` and PROBLEM.

    `partitions` is how many the stream has. A change may become none, one or several entries; its problem says why it
    can't be applied. Where problems go to dead letters, `__raw` is the record that it was made of, as JSON.
    `samples` are the first values that changes were ordered by, None where there were none yet: then they are found,
    and returned with the changes. Raises SchemaMismatchError where the first change can't be ordered.
    """
    from pyspark.sql import functions as F

    what, following = _what(spec), spec.following
    rows_schema = looked_at(spec, schema_of_rows(spec, stream_schema))
    outside = F.expr(unreadable_in_sql(TIMESTAMP, "timestamp"))
    records = records.withColumn(TIMESTAMP, F.when(~outside, F.col(TIMESTAMP)))
    if following.on_bad_change != "fail":
        given = F.struct(*[column(name) for name in stream_schema.names])
        records = records.withColumn(RAW, F.to_json(given, {"ignoreNullFields": "false"}))
    order_by, order = following.order_by or (), following.order
    rows = following.changes.decode(
        records,
        rows_schema,
        what,
        key=tuple(name for name in spec.key if name in rows_schema.names),
        order_by=order_by,
        comparable=bool(order_by) or partitions == 1,
    )
    rows = _readable(rows, rows_schema)
    if order is not None:
        rows, samples = with_order(spec, rows, rows_schema, samples)
    if following.history is not None:
        rows = _with_time(rows, following.valid_from)
    if spec.extractor is not None:
        rows = _readable(_extracted(spec, rows, entry_schema, what), entry_schema)
    null_key = [F.when(column(name).isNull(), F.lit(f"null key column {name!r}")) for name in spec.key]
    changes = with_problem(rows, *null_key)
    if KEPT in changes.columns:
        told = [F.when(F.array_contains(KEPT, name), F.lit(unknown_key(name))) for name in spec.key]
        changes = with_problem(changes, *told)
    more = [F.col(name) for name in (KEPT, RAW) if name in changes.columns]
    # A text that can't be taken apart may hold any column, so one that is sensitive hides the values of all.
    hidden = spec.sensitive or getattr(spec.extractor, "sensitive", ())
    made = changes.select(
        *[column(name) for name in entry_schema.names],
        *META,
        F.col(OFFSET if order is None else ORDER).alias(POSITION),
        telling(F.col(PROBLEM), values=not hidden).alias(PROBLEM),
        *([F.col(VALID_FROM)] if following.history is not None else []),
        *more,
    )
    return made, samples


def refuse_problems(changes: DataFrame, dataset: str) -> DataFrame:
    """Return the changes without PROBLEM; the job that writes them fails, with BadChangeError, at one that has any."""
    from pyspark.sql import functions as F

    place = F.concat(
        F.lit(f"dataset {dataset!r}: the change at offset "), F.col(OFFSET).cast("string"), F.lit(" of partition "),
        F.col(PARTITION).cast("string"), F.lit(" can't be applied: "), F.col(PROBLEM), F.lit("."),
    )  # fmt: skip
    # In the column that every writer reads: a filter might be optimised away.
    mark = F.when(F.col(PROBLEM).isNull(), F.col(TOMBSTONE)).otherwise(
        refusal(BadChangeError, place, _CORRECT, dataset=dataset)
    )
    kept = [name for name in changes.columns if name not in (PROBLEM, RAW)]
    return changes.select(*[mark.alias(name) if name == TOMBSTONE else column(name) for name in kept])


def bad_change(dataset: str, offset: int, partition: int, reason: str) -> BadChangeError:
    """Return the error that `refuse_problems` makes a job fail with."""
    place = f"the change at offset {offset} of partition {partition}"
    return BadChangeError(f"dataset {dataset!r}: {place} can't be applied: {reason}.", _CORRECT, dataset=dataset)


def _extracted(spec: AdjunctDataset, rows: DataFrame, entry_schema: Schema, what: str) -> DataFrame:
    """Return the entries that the extractor makes of rows; deletions and problems go around it.

    A change of which it makes no entry deletes the one that was there, where the key tells which.
    """
    from pyspark.sql import functions as F

    assert spec.extractor is not None
    extractor = hiding(spec.extractor, spec.sensitive)
    kept = extractor.keeps(spec.key)
    marks = companions(rows)
    around = rows.withColumn(TOMBSTONE, F.col(TOMBSTONE) | F.col(PROBLEM).isNotNull())
    if kept and isinstance(extractor, Projection | PythonExtractor):
        entries = extractor.apply_to_changes(around, entry_schema, what, spec.key)
    else:
        entries = extractor.apply(around, entry_schema, what)
    lost = [name for name in marks if name not in entries.columns]
    if lost:
        raise SchemaMismatchError(
            f"{what}: extractor {extractor.describe()} does not pass on {', '.join(lost)}.",
            "Let apply pass on every column that begins with '__', record by record.",
            dataset=spec.name,
            column=lost[0],
        )
    if kept:
        return entries
    return with_problem(entries, F.when(F.col(TOMBSTONE), F.lit(DELETION_OF_NOTHING)))


def _with_time(rows: DataFrame, name: str | None) -> DataFrame:
    """Return the rows with the time since when they are valid, of this column or the record's; none is a problem."""
    from pyspark.sql import functions as F

    rows = rows.withColumn(VALID_FROM, column(name).cast("timestamp") if name is not None else F.col(TIMESTAMP))
    return with_problem(rows, F.when(F.col(VALID_FROM).isNull(), F.lit(timeless(name))))


def timeless(name: str | None) -> str:
    """Return the reason for a change that does not say since when it is valid."""
    whose = "the record has none" if name is None else f"{name!r} is null"
    return f"no time from which it is valid: {whose}"


def unknown_key(name: str) -> str:
    """Return the reason for a change that leaves out a part of its key."""
    return f"nothing says what key column {name!r} is"


def _readable(changes: DataFrame, schema: Schema) -> DataFrame:
    """Return the changes with a problem, and no value, where a date or text is one that Python does not have."""
    from pyspark.sql import functions as F

    fields = [field for field in schema.fields if field.type in CHECKED_TYPES]
    if not fields:
        return changes
    # As SQL: a call of Spark's for each part of each column would take seconds where there are many.
    names, texts, rules, values = [], [], [], {}
    for field in fields:
        name, lacking = quoted(field.name), unreadable_in_sql(quoted(field.name), field.type)
        text = f"make_valid_utf8({name})" if field.type == "string" else f"cast({name} as string)"
        names.append(f"WHEN {lacking} THEN {literal(f'column {field.name!r} is ')}")
        texts.append(f"WHEN {lacking} THEN {text}")
        rules.append(f"WHEN {lacking} THEN {literal(f', declared {field.type}: {rule_of(field.type)}')}")
        values[field.name] = F.expr(f"CASE WHEN {lacking} THEN NULL ELSE {name} END")
    which, found, rule = (F.expr(f"CASE {' '.join(cases)} END") for cases in (names, texts, rules))
    told = F.when(which.isNotNull(), F.concat(which, shown(found), rule))
    values[PROBLEM] = F.coalesce(F.col(PROBLEM), told)
    return changes.withColumns(values)


def _what(spec: AdjunctDataset) -> str:
    return f"dataset {spec.name!r} (input {spec.input})"

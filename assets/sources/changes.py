"""Changes of a dataset's entries, decoded by Spark from the records of a change stream.

    records -> change format -> order -> extractor -> changes, each with its position, and its problem if it has one

A change that can't be applied keeps its problem in a column: `fail_on_problems` makes the job fail at it, or it is sent
to the dead letters.

`arrow_changes.py` makes the same changes from the same records in this process, and rejects the same ones with the same
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.change_formats import KEPT, ORDER, PROBLEM, SNAPSHOT, path_column
from dagster_adjunct.assets.declaration.change_values import (
    MISSING_PART,
    NO_PATH,
    SNAPSHOT_ROWS,
    STREAMED_FIRST,
    Samples,
    can_order_changes,
    find_path_problem,
    incomparable_reason,
    is_orderable,
    order_as_code,
    position_type,
    quote_column,
    render_reason,
    render_reason_column,
    sortable_column,
    unordered_reason,
)
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor, mask_columns, metadata_columns
from dagster_adjunct.assets.sources.entries import derive_entry_schema
from dagster_adjunct.assets.versions.version import POSITION, datetime_from_micros
from dagster_adjunct.resources.bucketing.timeline import VALID_FROM
from dagster_adjunct.resources.errors import BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column, quote_name, quote_text
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import CHECKED_TYPES, expected_values, unreadable_condition
from dagster_adjunct.resources.spark.errors import raise_error_column
from dagster_adjunct.resources.streams.system import META, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.sources.opened_stream import OpenedStream

_POSITION = r"^[+-]?\d{1,30}$"


def add_order(
    spec: AdjunctDataset, rows: DataFrame, schema: Schema, samples: Samples | None
) -> tuple[DataFrame, Samples | None]:
    """Return the rows with the column ORDER, or a problem if they have no position; and the first values.

    `samples` are the known first values. Raises SchemaMismatchError if the first change can't be ordered.
    """
    order, string = spec.following.order or (), position_type(spec.following.order, schema) == "string"
    if order == STREAMED_FIRST:
        below = F.when(F.col(SNAPSHOT), F.lit(SNAPSHOT_ROWS)).otherwise(F.lit(0)).cast("bigint")
        return rows.withColumn(ORDER, F.col(OFFSET) + below).drop(SNAPSHOT), samples
    paths = [name for name in order if name not in schema.names]
    values = [_order_text(name, schema) if string or name in paths else named_column(name) for name in order]
    if any(name in paths or schema.field(name).type == "string" for name in order):
        samples = find_first_order_values(spec, rows, values, samples)
    parts: list[Column] = []
    reasons: list[Column] = []
    # A snapshot's row lacks the fields of a streamed change: it comes before every change with them.
    snapshot = F.col(SNAPSHOT) if SNAPSHOT in rows.columns else F.lit(False)
    for place, (name, value) in enumerate(zip(order, values, strict=True)):
        sample = "0" if samples is None else samples[place]
        missing = value.isNull() & snapshot if place else F.lit(False)
        if string:
            part = F.when(missing, F.lit(MISSING_PART)).otherwise(sortable_column(value, name, sample))
        elif paths:
            part = F.when(value.rlike(_POSITION), value.try_cast("bigint"))
        else:
            part = position_column(name, schema)
        parts.append(part)
        reasons.append(F.when(value.isNull() & ~missing, F.lit(null_order_reason(name))))
        reason = F.lit(incomparable_reason(name, sample if string else None))
        reasons.append(F.when(part.isNull() & ~missing, F.concat(quote_column(value), reason)))
    placed = add_problem(rows.withColumn(ORDER, F.concat(*parts) if string else parts[0]), *reasons)
    return placed.drop(*[path_column(path) for path in paths], SNAPSHOT), samples


def find_first_order_values(
    spec: AdjunctDataset, rows: DataFrame, values: Sequence[Column], samples: Samples | None
) -> Samples | None:
    """Return the ordering values of the first change that has them, which later ones are compared with.

    None without changes. Raises SchemaMismatchError if the first change can't be ordered.
    """
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
            raise unorderable_error(spec, first[PROBLEM])
        samples = tuple(first[name] for name in names)
    found = []
    for name, sample in zip(names, samples, strict=True):
        later = changes.where(F.col(name).isNotNull()).head() if sample is None else None
        found.append(sample if later is None else later[name])
    return check_order_values(spec, tuple(found))


def check_order_values(spec: AdjunctDataset, samples: Samples) -> Samples:
    """Return these first values unchanged. Raises SchemaMismatchError for one that can't order changes."""
    for name, sample in zip(spec.following.order_by or (), samples, strict=True):
        if sample is not None and not can_order_changes(name, sample, spec.following.order_by or ()):
            raise unorderable_error(spec, unordered_reason(name, sample), name)
    return samples


def unorderable_error(spec: AdjunctDataset, reason: str, name: str | None = None) -> SchemaMismatchError:
    """Return the error for a first change that can't be ordered."""
    hidden = spec.sensitive or getattr(spec.extractor, "sensitive", ())
    problem = f"dataset {spec.name!r} (input {spec.input}): {render_reason(reason, values=not hidden)}."
    step = "Nothing was committed. Name in order_by what the changes have, or leave it out to order by offset."
    return SchemaMismatchError(problem, step, dataset=spec.name, column=name, argument="order_by")


def _order_text(name: str, schema: Schema) -> Column:
    """Return the values of a name in `order_by` as texts for comparison."""
    if name not in schema.names:
        return F.col(path_column(name))
    if schema.field(name).type in ("date", "timestamp"):
        return position_column(name, schema).cast("string")
    return named_column(name).cast("string")


def position_column(name: str, schema: Schema) -> Column:
    """Return the positions of the ordering column's values: microseconds, days, or the number."""
    value, kind = named_column(name), schema.field(name).type
    if kind == "timestamp":
        return F.unix_micros(value)
    return F.unix_date(value).cast("bigint") if kind == "date" else value.cast("bigint")


def null_order_reason(name: str) -> str:
    """Return the reason for rejecting a change whose ordering value is null."""
    return f"no value to order by: {name!r} is null"


def add_problem(changes: DataFrame, *reasons: Column) -> DataFrame:
    """Return the changes with the first of these reasons as their problem, unless they have one."""
    return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), *reasons))


def late_change_reason(horizon: int, over_time: bool = False) -> str:
    """Return the reason for rejecting a change at or below this position (or time in microseconds)."""
    place = f"{datetime_from_micros(horizon):%Y-%m-%d %H:%M:%S.%f} UTC" if over_time else f"position {horizon}"
    return f"it comes too late: deletions up to {place} are no longer stored"


RAW = "__raw"
UNKEYED_DELETION = "a deletion of an unknown entry: the key is computed by the extractor"
_CORRECT = (
    "Nothing was committed. Correct what writes the stream and the stream itself, or declare "
    "on_bad_change=DeadLetters(STREAM), which sets such changes aside and counts them."
)


def derive_stored_schema(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that a dataset stores from an input with these record columns.

    Raises SchemaMismatchError, naming the dataset, as `derive_row_schema` and `derive_entry_schema` do.
    """
    follows = spec.follows_changes and isinstance(spec.input, str)
    return derive_entry_schema(spec, derive_row_schema(spec, records) if follows else records)


def derive_row_schema(spec: AdjunctDataset, stream_schema: Schema) -> Schema:
    """Return the columns of the changed rows, which the dataset's extractor receives.

    Raises SchemaMismatchError, naming the dataset, if the stream does not fit the declared change format or order.
    """
    what, following = _describe_input(spec), spec.following
    rows = following.changes.schema(stream_schema, what)
    name = following.valid_from
    kind = "timestamp" if name is None else rows.field(name, f"{what}: valid_from names {name!r}, and the record").type
    if kind not in ("date", "timestamp"):
        problem = f"{what}: valid_from names the column {name!r}, which is {kind}: expected a timestamp or a date."
        step = "Name another column, or leave valid_from out to use the record's time."
        raise SchemaMismatchError(problem, step, column=name)
    for name in following.order_by or ():
        _check_ordering(spec, rows, name, what)
    if following.keep_tombstones is not None and position_type(following.order, rows) != "bigint":
        problem = (
            f"{what}: keep_tombstones is {following.keep_tombstones}, and between values of "
            f"{order_as_code(following.order_by or ())} there is no distance."
        )
        step = "Leave it out, so that deletions are kept for ever, or order by an integer, a date or a timestamp."
        raise SchemaMismatchError(problem, step, dataset=spec.name, argument="keep_tombstones")
    return rows


def select_relevant_columns(spec: AdjunctDataset, rows: Schema) -> Schema:
    """Return the columns that the dataset stores or uses; bad values in other columns are ignored."""
    if spec.columns is None or spec.extractor is not None:
        return rows
    used = {*spec.columns, *(spec.following.order_by or ()), spec.following.valid_from}
    return Schema(tuple(field for field in rows.fields if field.name in used))


def _check_ordering(spec: AdjunctDataset, rows: Schema, name: str, what: str) -> None:
    following = spec.following
    order = following.order_by or ()
    if name in rows.names:
        kind = rows.field(name).type
        if not is_orderable(kind):
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
    found = find_path_problem(order, name)
    if found is not None:
        problem, next_step = f"{what}: order_by names {name!r}: {found[0]}.", found[1]
        raise SchemaMismatchError(problem, next_step, dataset=spec.name, column=name)


def decode_changes(
    source: OpenedStream, records: DataFrame, positions_from: int = 0, samples: Samples | None = None
) -> tuple[DataFrame, Samples | None]:
    """Return the changes made from records: the columns of the entries, META, `__position` and PROBLEM.

    A change may make none, one or several entries; its problem is why it can't be applied. With dead letters, `__raw`
    is its record as JSON. Positions by offset start at `positions_from`. `samples` are the first ordering values, None
    if there were no changes yet: then they are found and returned with the changes. Raises SchemaMismatchError if the
    first change can't be ordered.
    """
    spec, stream_schema, entry_schema = source.spec, source.info.schema, source.schema
    assert stream_schema is not None, "raw records are rejected when the input is opened"
    what, following = _describe_input(spec), spec.following
    rows_schema = select_relevant_columns(spec, derive_row_schema(spec, stream_schema))
    outside = F.expr(unreadable_condition(TIMESTAMP, "timestamp"))
    records = records.withColumn(TIMESTAMP, F.when(~outside, F.col(TIMESTAMP)))
    if following.on_bad_change != "fail":
        given = F.struct(*[named_column(name) for name in stream_schema.names])
        records = records.withColumn(RAW, F.to_json(given, {"ignoreNullFields": "false"}))
    order_by, order = following.order_by or (), following.order
    rows = following.changes.decode(
        records,
        rows_schema,
        what,
        key=tuple(name for name in spec.key if name in rows_schema.names),
        order_by=order_by,
        comparable=bool(order_by) or len(source.ssps) == 1,
    )
    rows = _reject_unreadable(rows, rows_schema)
    if order is not None:
        rows, samples = add_order(spec, rows, rows_schema, samples)
    if following.history is not None:
        rows = _add_valid_from(rows, following.valid_from)
    if spec.extractor is not None:
        rows = _reject_unreadable(_extract_entries(spec, rows, entry_schema, what), entry_schema)
    null_key = [F.when(named_column(name).isNull(), F.lit(f"null key column {name!r}")) for name in spec.key]
    changes = add_problem(rows, *null_key)
    if KEPT in changes.columns:
        reasons = [F.when(F.array_contains(KEPT, name), F.lit(unknown_key_reason(name))) for name in spec.key]
        changes = add_problem(changes, *reasons)
    more = [F.col(name) for name in (KEPT, RAW) if name in changes.columns]
    # A text that can't be parsed may hold any column, so one sensitive column hides all values.
    hidden = spec.sensitive or getattr(spec.extractor, "sensitive", ())
    position = F.col(OFFSET if order is None else ORDER)
    if positions_from and following.order_by is None:
        position = position + F.lit(positions_from).cast("bigint")
    made = changes.select(
        *[named_column(name) for name in entry_schema.names],
        *META,
        position.alias(POSITION),
        render_reason_column(F.col(PROBLEM), values=not hidden).alias(PROBLEM),
        *([F.col(VALID_FROM)] if following.history is not None else []),
        *more,
    )
    return made, samples


def fail_on_problems(changes: DataFrame, dataset: str) -> DataFrame:
    """Return the changes without PROBLEM; writing a change that has one fails with BadChangeError."""
    place = F.concat(
        F.lit(f"dataset {dataset!r}: the change at offset "), F.col(OFFSET).cast("string"), F.lit(" of partition "),
        F.col(PARTITION).cast("string"), F.lit(" can't be applied: "), F.col(PROBLEM), F.lit("."),
    )  # fmt: skip
    # In a column that every writer reads, because Spark may optimise a filter away.
    mark = F.when(F.col(PROBLEM).isNull(), F.col(TOMBSTONE)).otherwise(
        raise_error_column(BadChangeError, place, _CORRECT, dataset=dataset)
    )
    kept = [name for name in changes.columns if name not in (PROBLEM, RAW)]
    return changes.select(*[mark.alias(name) if name == TOMBSTONE else named_column(name) for name in kept])


def bad_change_error(dataset: str, offset: int, partition: int, reason: str) -> BadChangeError:
    """Return the error for a change that can't be applied."""
    place = f"the change at offset {offset} of partition {partition}"
    return BadChangeError(f"dataset {dataset!r}: {place} can't be applied: {reason}.", _CORRECT, dataset=dataset)


def _extract_entries(spec: AdjunctDataset, rows: DataFrame, entry_schema: Schema, what: str) -> DataFrame:
    """Return the entries that the extractor makes from rows; deletions and problems bypass it.

    A change from which it makes no entry deletes the existing entry, if the extractor keeps the key.
    """
    assert spec.extractor is not None
    extractor = mask_columns(spec.extractor, spec.sensitive)
    kept = extractor.keeps(spec.key)
    marks = metadata_columns(rows.columns)
    around = rows.withColumn(TOMBSTONE, F.col(TOMBSTONE) | F.col(PROBLEM).isNotNull())
    if kept and isinstance(extractor, Projection | PythonExtractor):
        entries = extractor.apply_to_changes(around, entry_schema, what, spec.key)
    else:
        entries = extractor.apply(around, entry_schema, what)
    lost = [name for name in marks if name not in entries.columns]
    if lost:
        problem = f"{what}: extractor {extractor.describe()} does not pass on {', '.join(lost)}."
        step = "Keep every column that begins with '__' in apply, record by record."
        raise SchemaMismatchError(problem, step, dataset=spec.name, column=lost[0])
    if kept:
        return entries
    return add_problem(entries, F.when(F.col(TOMBSTONE), F.lit(UNKEYED_DELETION)))


def _add_valid_from(rows: DataFrame, name: str | None) -> DataFrame:
    """Return the rows with their valid-from time, from this column or the record's time; a null is a problem."""
    rows = rows.withColumn(VALID_FROM, named_column(name).cast("timestamp") if name is not None else F.col(TIMESTAMP))
    return add_problem(rows, F.when(F.col(VALID_FROM).isNull(), F.lit(missing_time_reason(name))))


def missing_time_reason(name: str | None) -> str:
    """Return the reason for rejecting a change without a valid-from time."""
    whose = "the record has none" if name is None else f"{name!r} is null"
    return f"no time from which it is valid: {whose}"


def unknown_key_reason(name: str) -> str:
    """Return the reason for rejecting a change that leaves out a part of its key."""
    return f"the value of key column {name!r} is unknown"


def _reject_unreadable(changes: DataFrame, schema: Schema) -> DataFrame:
    """Return the changes with a problem and a null for each date or text that Python can't represent."""
    fields = [field for field in schema.fields if field.type in CHECKED_TYPES]
    if not fields:
        return changes
    # As SQL: separate Spark calls for each part of each column would take seconds for many columns.
    names, texts, rules, values = [], [], [], {}
    for field in fields:
        name, lacking = quote_name(field.name), unreadable_condition(quote_name(field.name), field.type)
        text = f"make_valid_utf8({name})" if field.type == "string" else f"cast({name} as string)"
        names.append(f"WHEN {lacking} THEN {quote_text(f'column {field.name!r} is ')}")
        texts.append(f"WHEN {lacking} THEN {text}")
        rules.append(f"WHEN {lacking} THEN {quote_text(f', declared {field.type}: {expected_values(field.type)}')}")
        values[field.name] = F.expr(f"CASE WHEN {lacking} THEN NULL ELSE {name} END")
    which, found, rule = (F.expr(f"CASE {' '.join(cases)} END") for cases in (names, texts, rules))
    problem = F.when(which.isNotNull(), F.concat(which, quote_column(found), rule))
    values[PROBLEM] = F.coalesce(F.col(PROBLEM), problem)
    return changes.withColumns(values)


def _describe_input(spec: AdjunctDataset) -> str:
    return f"dataset {spec.name!r} (input {spec.input})"

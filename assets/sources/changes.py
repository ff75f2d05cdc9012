"""Changes of a dataset's entries, decoded from the records of a change stream: by Spark, or in this
process from Arrow.

    records -> change format -> order -> extractor -> changes, each with its position, and its
    problem if it has one

A change that can't be applied keeps its problem in a column: `fail_on_problems` makes the job fail
at it, or it is sent to the dead letters. Both engines make the same changes of the same records,
and reject the same ones with the same messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration import change_formats, change_values
from dagster_adjunct.assets.declaration.change_formats import (
    KEPT,
    ORDER,
    PROBLEM,
    SNAPSHOT,
    ArrowChangeFormat,
)
from dagster_adjunct.assets.declaration.change_values import Order, Samples
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.declaration.extractors import (
    UNDECIDED,
    KeyValueExtractor,
    Projection,
    PythonExtractor,
    mask_columns,
    metadata_columns,
)
from dagster_adjunct.assets.sources.entries import (
    OpenedChanges,
    derive_row_schema,
    describe_input,
    extracted_columns,
    hides_values,
    select_relevant_columns,
    with_read_paths,
)
from dagster_adjunct.assets.sources.json_records import records_to_json
from dagster_adjunct.assets.versions.version import POSITION, datetime_from_micros
from dagster_adjunct.resources.bucketing.files import VALID_FROM
from dagster_adjunct.resources.errors import BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.schemas.paths import path_expression, read_path, split_path
from dagster_adjunct.resources.schemas.schema import Schema, named_column, quote_name, quote_text
from dagster_adjunct.resources.schemas.values import (
    CHECKED_TYPES,
    expected_values,
    unreadable_condition,
    unreadable_values,
)
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.streams.system import META, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_POSITION = r"^[+-]?\d{1,30}$"


def add_order(
    spec: UnboundedDataset, rows: DataFrame, schema: Schema, samples: Samples | None
) -> DataFrame:
    """Return the rows, without SNAPSHOT, with their positions in the column ORDER; a row that can't
    be ordered gets a problem.

    `schema` has the columns that rows are ordered by; other names in the order are paths.
    `samples` are the first ordering values as far as they are known (see `find_order_samples`).
    """
    order = spec.following.order or ()
    if order == change_values.STREAMED_FIRST:  # by offset, with all rows of snapshots below 0
        below = F.when(F.col(SNAPSHOT), change_values.SNAPSHOT_ROWS).otherwise(0).cast("bigint")
        return rows.withColumn(ORDER, F.col(OFFSET) + below).drop(SNAPSHOT)
    are_texts = change_values.position_type(order, schema) == "string"
    first_values = _comparable_samples(order, samples, are_texts)
    parts: list[Column] = []
    reasons: list[Column] = []
    is_snapshot = F.col(SNAPSHOT) if SNAPSHOT in rows.columns else F.lit(False)
    paths = []
    for name, value, sample in zip(order, order_columns(order, schema), first_values, strict=True):
        if are_texts:
            part = change_values.sortable_column(value, name, sample)
        elif name in schema.names:
            part = position_column(name, schema)
        else:  # a text at a path; a cast alone would also accept 1.5
            part = F.when(value.rlike(_POSITION), value.try_cast("bigint"))
        may_be_null = F.lit(False)
        # A snapshot's row lacks the fields of a streamed change: it comes before every change with
        # them.
        if parts:
            may_be_null = value.isNull() & is_snapshot
            part = F.when(may_be_null, change_values.MISSING_PART).otherwise(part)
        if name not in schema.names:
            paths.append(change_formats.path_column(name))
        null_reason = F.when(is_snapshot, null_order_reason(name, snapshot=True))
        null_reason = null_reason.otherwise(null_order_reason(name))
        format_reason = change_values.concat_reason(
            change_values.quote_column(value), change_values.incomparable_reason(name, sample)
        )
        parts.append(part)
        reasons += [
            F.when(value.isNull() & ~may_be_null, null_reason),
            F.when(part.isNull(), format_reason),
        ]
    position = F.concat(*parts) if are_texts else parts[0]
    return add_problem(rows.withColumn(ORDER, position), *reasons).drop(*paths, SNAPSHOT)


def _add_group_order(rows: DataFrame, order: Order) -> DataFrame:
    """Return the rows, without SNAPSHOT, all with the position 0: which one is newer is decided for
    each group of columns, by its ordering column in `order`. A row that sets no group gets a
    problem.
    """
    sets_group = reduce(or_, (named_column(name).isNotNull() for name in order))
    rows = rows.withColumn(ORDER, F.lit(0).cast("bigint")).drop(SNAPSHOT)
    return add_problem(rows, F.when(~sets_group, no_group_reason(order)))


def no_group_reason(order: Order) -> str:
    """Return the reason for rejecting a change that sets no group of columns."""
    return f"no value to order by: null in {', '.join(map(repr, order))}"


def _comparable_samples(order: Order, samples: Samples | None, are_texts: bool) -> Samples:
    """Return the first value of each name, whose format later ones must have; a number if none are
    known.

    `are_texts` says whether positions are texts. Otherwise they are numbers, which need no samples:
    all are None.
    """
    if not are_texts:
        return (None,) * len(order)
    return ("0",) * len(order) if samples is None else samples


def order_columns(order: Sequence[str], schema: Schema) -> list[Column]:
    """Return the values of the names in `order_by`: as strings, if positions are made of strings
    or paths. Of a date or timestamp, the string is the number that `position_column` gives.
    """
    are_texts = change_values.position_type(tuple(order), schema) == "string"
    values = []
    for name in order:
        if name not in schema.names:
            values.append(F.col(change_formats.path_column(name)))
        elif not are_texts:
            values.append(named_column(name))
        elif schema.field(name).type in ("date", "timestamp"):
            values.append(position_column(name, schema).cast("string"))
        else:
            values.append(named_column(name).cast("string"))
    return values


def position_column(name: str, schema: Schema) -> Column:
    """Return the positions that the column gives: the number, or microseconds or days since the
    epoch.
    """
    value = named_column(name)
    kind = schema.field(name).type
    if kind == "timestamp":
        return F.unix_micros(value)
    if kind == "date":
        return F.unix_date(value).cast("bigint")
    return value.cast("bigint")


def null_order_reason(name: str, *, snapshot: bool = False) -> str:
    """Return the reason for rejecting a change, or a row of a `snapshot`, whose ordering value is
    null.
    """
    reason = f"no value to order by: {name!r} is null"
    if not snapshot:
        return reason
    return (
        f"{reason} in a row of a snapshot, so it may be older than a change of its key."
        f" {change_values.REPAIR}"
    )


def add_problem(changes: DataFrame, *reasons: Column) -> DataFrame:
    """Return the changes with the first of these reasons that is not null as their problem,
    unless they have one.
    """
    return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), *reasons))


def late_change_reason(horizon: int, over_time: bool = False) -> str:
    """Return the reason for rejecting a change at or below the position `horizon`.

    With `over_time`, that is a time, in microseconds since the epoch.
    """
    if over_time:
        place = f"{datetime_from_micros(horizon):%Y-%m-%d %H:%M:%S.%f} UTC"
    else:
        place = f"position {horizon}"
    return f"it comes too late: deletions up to {place} are no longer stored"


RAW = "__raw"
UNKEYED_DELETION = "a deletion of an unknown entry: the key is computed by the extractor"
_CORRECT = (
    "Its commit was not made. Correct what writes the stream and the stream itself, or declare "
    "on_bad_change=DeadLetters(STREAM), which sets such changes aside and counts them."
)


def decode_rows(source: OpenedChanges, records: DataFrame) -> DataFrame:
    """Return the changes of rows made from records, before these are ordered: the columns of the
    rows, META, PROBLEM.

    With dead letters, `__raw` is the record as JSON.
    """
    spec = source.spec
    following = source.spec.following
    schema = relevant_schema(source)
    is_unreadable = F.expr(unreadable_condition(TIMESTAMP, "timestamp"))
    records = records.withColumn(TIMESTAMP, F.when(~is_unreadable, F.col(TIMESTAMP)))
    if following.on_bad_change != "fail":
        given = F.struct(*[named_column(name) for name in source.records.names])
        records = records.withColumn(RAW, F.to_json(given, {"ignoreNullFields": "false"}))
    readable = with_read_paths(spec, schema)
    paths = list_read_paths(readable, schema)
    order_by = []
    for name in following.ordering:
        # The format decodes the column; the path into it is read below.
        order_by.append(split_path(name)[0] if name in paths else name)
    key = []
    for name in spec.key:
        if spec.steps_to(name)[0] in schema:  # else the extractor makes it
            key.append(spec.source_of(name))
    rows = following.changes.decode(
        records,
        schema,
        describe_input(spec),
        key=tuple(key),
        order_by=tuple(dict.fromkeys(order_by)),
        comparable=bool(order_by) or len(source.ssps) == 1,
    )
    return _reject_unreadable(add_read_paths(rows, paths), readable)


def add_read_paths(rows: DataFrame, paths: Sequence[str]) -> DataFrame:
    """Return the rows with the values of these paths as columns of their names."""
    for path in paths:
        rows = rows.withColumn(path, F.expr(path_expression(split_path(path))))
    return rows


def relevant_schema(source: OpenedChanges) -> Schema:
    """Return the columns of the changed rows that the dataset stores or uses."""
    return select_relevant_columns(source.spec, derive_row_schema(source.spec, source.records))


def readable_schema(source: OpenedChanges) -> Schema:
    """Return the columns of the changed rows that the dataset stores or uses, and the paths that it
    is ordered or valid by.
    """
    return with_read_paths(source.spec, relevant_schema(source))


def list_read_paths(readable: Schema, rows: Schema) -> list[str]:
    """Return the names in `readable` that are paths into columns of the rows: those that the rows
    don't have.
    """
    return [name for name in readable.names if name not in rows]


def decode_changes(
    source: OpenedChanges,
    records: DataFrame,
    positions_from: int = 0,
    samples: Samples | None = None,
) -> DataFrame:
    """Return the changes made from records: the columns of the entries, META, `__position` and
    PROBLEM.

    A record may make none, one or several changes; the problem of a change is why it can't be
    applied. With a history the changes have `__valid_from`; where they may leave out columns, KEPT;
    with dead letters `__raw`, the record as JSON. `positions_from` is added to positions by offset.
    `samples` are the first ordering values (see `find_order_samples`).
    """
    spec = source.spec
    following = spec.following
    rows = _reject_unplaced(spec, decode_rows(source, records))
    if following.groups:
        rows = _add_group_order(rows, following.ordering)
        position = F.col(ORDER)
    elif following.order is not None:
        rows = add_order(spec, rows, readable_schema(source), samples)
        position = F.col(ORDER)
    else:
        position = F.col(OFFSET)
    if positions_from and following.order_by is None:
        position = position + F.lit(positions_from).cast("bigint")
    if following.history is not None:
        rows = _add_valid_from(rows, following.history.valid_from)
    schema = relevant_schema(source)
    rows = rows.drop(*list_read_paths(readable_schema(source), schema))
    if spec.extractor is not None:
        extracted = extracted_columns(spec, source.schema, schema)
        entries = _extract_entries(spec, rows, extracted, describe_input(spec))
        rows = _reject_unreadable(entries, extracted)
    if spec.columns.paths:
        rows = _reject_unreadable(_select_stored(spec, rows, source.schema), source.schema)
    changes = _add_key_problems(spec, rows)
    shown = change_values.render_reason_column(F.col(PROBLEM), values=not hides_values(spec))
    return changes.select(
        *map(named_column, source.schema.names),
        *META,
        position.alias(POSITION),
        shown.alias(PROBLEM),
        *[name for name in (VALID_FROM, KEPT, RAW) if name in changes.columns],
    )


def _select_stored(spec: UnboundedDataset, rows: DataFrame, schema: Schema) -> DataFrame:
    """Return the rows with the columns of `schema`, which are stored, and the metadata columns.

    A stored column may be at a path into a column of the rows. It is kept if that column is.
    """
    values = {}
    kept = []
    for name in schema.names:
        steps = spec.steps_to(name)
        values[name] = F.expr(path_expression(steps))
        kept.append(F.when(F.array_contains(KEPT, steps[0]), name))
    for name in metadata_columns(rows.columns):
        values[name] = named_column(name)
    kept.append(F.when(F.array_contains(KEPT, UNDECIDED), UNDECIDED))
    if KEPT in values:
        values[KEPT] = F.when(F.col(KEPT).isNotNull(), F.array_compact(F.array(*kept)))
    return rows.select(*[value.alias(name) for name, value in values.items()])


def _list_placing_columns(spec: UnboundedDataset, columns: Collection[str]) -> list[str]:
    """Return which of these columns of the rows order the changes, or say since when they are
    valid.
    """
    found = dict.fromkeys(split_path(name)[0] for name in spec.following.placing)
    return [name for name in found if name in columns]


def _reject_unplaced(spec: UnboundedDataset, rows: DataFrame) -> DataFrame:
    """Return the rows with a problem where a column that orders them, or is their time, is left
    out.
    """
    if KEPT not in rows.columns:  # no row leaves out columns
        return rows
    reasons = []
    for name in _list_placing_columns(spec, rows.columns):
        reasons.append(F.when(F.array_contains(KEPT, name), left_out_reason(name)))
    return add_problem(rows, *reasons)


def left_out_reason(name: str) -> str:
    """Return the reason for rejecting a change that leaves out what places it among others."""
    return f"it leaves out {name!r}, which places it among the changes of its key"


def _add_key_problems(spec: UnboundedDataset, rows: DataFrame) -> DataFrame:
    """Return the rows with a problem where a column of the key is null or unknown."""
    reasons = []
    for name in spec.key:
        reasons.append(F.when(named_column(name).isNull(), f"null key column {name!r}"))
    if KEPT in rows.columns:
        for name in spec.key:
            reasons.append(F.when(F.array_contains(KEPT, name), unknown_key_reason(name)))
    return add_problem(rows, *reasons)


def fail_on_problems(changes: DataFrame, dataset: str) -> DataFrame:
    """Return the changes without PROBLEM; writing a change that has one fails with
    BadChangeError.
    """
    place = change_values.concat_reason(
        f"dataset {dataset!r}: the change at offset ",
        F.col(OFFSET).cast("string"),
        " of partition ",
        F.col(PARTITION).cast("string"),
        " can't be applied: ",
        F.col(PROBLEM),
        ".",
    )
    # The error is raised in a column that every writer reads: Spark may optimise a filter away.
    mark = F.when(F.col(PROBLEM).isNull(), F.col(TOMBSTONE)).otherwise(
        raise_error_column(BadChangeError, place, _CORRECT, dataset=dataset)
    )
    return changes.withColumn(TOMBSTONE, mark).drop(PROBLEM, RAW)


def bad_change_error(dataset: str, offset: int, partition: int, reason: str) -> BadChangeError:
    """Return the error for a change that can't be applied."""
    place = f"the change at offset {offset} of partition {partition}"
    return BadChangeError(
        f"dataset {dataset!r}: {place} can't be applied: {reason}.", _CORRECT, dataset=dataset
    )


def _extract_entries(
    spec: UnboundedDataset, rows: DataFrame, entry_schema: Schema, what: str
) -> DataFrame:
    """Return the entries that the extractor makes from rows; deletions, and rows with a problem,
    bypass it as tombstones.

    If the extractor copies the key, a row from which it makes no entry deletes the existing entry.
    If it computes the key, deletions get a problem. `what` names the dataset in errors.
    """
    assert spec.extractor is not None
    extractor = mask_columns(spec.extractor, spec.masked)
    copies_key = extractor.keeps(spec.key_columns)
    metadata = metadata_columns(rows.columns)
    if KEPT in rows.columns:
        rows = _name_kept_entries(spec, rows, extractor, entry_schema)
    marked = rows.withColumn(TOMBSTONE, F.col(TOMBSTONE) | F.col(PROBLEM).isNotNull())
    if copies_key and isinstance(extractor, Projection | PythonExtractor):
        entries = extractor.apply_to_changes(marked, entry_schema, what, spec.key_steps)
    else:
        entries = extractor.apply(marked, entry_schema, what)
    lost = [name for name in metadata if name not in entries.columns]
    if lost:
        raise SchemaMismatchError(
            f"{what}: extractor {extractor.describe()} drops the metadata columns"
            f" {', '.join(lost)}.",
            "Let its method apply() pass on every column that begins with '__', with the values of"
            " the record that the entry was made from.",
            dataset=spec.name,
            column=lost[0],
        )
    entries = entries.drop(UNDECIDED)
    if copies_key:
        return entries
    return add_problem(entries, F.when(F.col(TOMBSTONE), UNKEYED_DELETION))


def _name_kept_entries(
    spec: UnboundedDataset, rows: DataFrame, extractor: KeyValueExtractor, entries: Schema
) -> DataFrame:
    """Return the rows with null in the columns that they leave out, and with the names of columns
    of the entries in KEPT.

    A column of the entries is kept if a row leaves out all columns that it is made of. If it leaves
    out only some of them, it gets a problem. The condition of the extractor is treated like a
    column: if a row leaves out what it is made of, KEPT has UNDECIDED, and so is the row.
    """
    assert isinstance(extractor, Projection), "others were rejected when it was declared"
    key = spec.simple_key
    # By column of the entries, the columns of the rows that it is made of.
    made_of = {name: extractor.record_columns(name, key) for name in entries.names}
    named_as = {name: f"column {name!r} is made" for name in made_of}
    if extractor.where is not None:
        made_of[UNDECIDED] = extractor.condition_columns(key)
        named_as[UNDECIDED] = f"the condition ({extractor.where}) is made"
    by_lower_name = {name.lower(): name for name in rows.columns}  # as Spark resolves names
    nulled = {}
    kept = []
    problems = []
    for name, columns in made_of.items():
        left_out = []
        for column in columns:
            found = by_lower_name.get(column.lower(), column)
            is_left_out = F.coalesce(F.array_contains(KEPT, found), F.lit(False))
            nulled[found] = F.when(~is_left_out, named_column(found))
            left_out.append(is_left_out)
        if not left_out:  # made of constants
            continue
        lacks_all = reduce(and_, left_out)
        kept.append(F.when(lacks_all, name))
        lacks_some = reduce(or_, left_out) & ~lacks_all & ~F.col(TOMBSTONE)
        problems.append(F.when(lacks_some, partly_named_reason(named_as[name], columns)))
    names = F.array_compact(F.array(*kept)) if kept else F.col(KEPT)
    rows = add_problem(rows, *problems).withColumns({**nulled, KEPT: names})
    if UNDECIDED not in made_of:
        return rows
    is_undecided = F.coalesce(F.array_contains(KEPT, UNDECIDED), F.lit(False))
    return rows.withColumn(UNDECIDED, is_undecided)


def partly_named_reason(what: str, columns: Sequence[str]) -> str:
    """Return the reason for rejecting a change that leaves out only some of these columns. `what`
    is made of them, as in "column 'a' is made".
    """
    return f"it leaves out some of the columns {', '.join(map(repr, columns))}, of which {what}"


def _add_valid_from(rows: DataFrame, name: str | None) -> DataFrame:
    """Return the rows with their valid-from time, from this column or the record's time; a null
    is a problem.
    """
    time = named_column(TIMESTAMP if name is None else name).cast("timestamp")
    rows = rows.withColumn(VALID_FROM, time)
    return add_problem(rows, F.when(F.col(VALID_FROM).isNull(), missing_time_reason(name)))


def missing_time_reason(name: str | None) -> str:
    """Return the reason for rejecting a change without a valid-from time."""
    whose = "the record has none" if name is None else f"{name!r} is null"
    return f"no time from which it is valid: {whose}"


def unknown_key_reason(name: str) -> str:
    """Return the reason for rejecting a change that leaves out a part of its key."""
    return f"the value of key column {name!r} is unknown"


def _reject_unreadable(changes: DataFrame, schema: Schema) -> DataFrame:
    """Return the changes with a null, and a problem, where a date or text can't be represented
    in Python. `schema` has the columns to check.
    """
    fields = [field for field in schema.fields if field.type in CHECKED_TYPES]
    if not fields:
        return changes
    # As SQL: separate Spark calls for each part of each column would take seconds for many columns.
    names = []
    texts = []
    rules = []
    values = {}
    for field in fields:
        name = quote_name(field.name)
        lacking = unreadable_condition(quote_name(field.name), field.type)
        text = f"make_valid_utf8({name})" if field.type == "string" else f"cast({name} as string)"
        names.append(f"WHEN {lacking} THEN {quote_text(f'column {field.name!r} is ')}")
        texts.append(f"WHEN {lacking} THEN {text}")
        rules.append(
            f"WHEN {lacking} THEN"
            f" {quote_text(f', declared {field.type}: {expected_values(field.type)}')}"
        )
        values[field.name] = F.expr(f"CASE WHEN {lacking} THEN NULL ELSE {name} END")
    which, found, rule = (F.expr(f"CASE {' '.join(cases)} END") for cases in (names, texts, rules))
    problem = F.when(which.isNotNull(), F.concat(which, change_values.quote_column(found), rule))
    values[PROBLEM] = F.coalesce(F.col(PROBLEM), problem)
    return changes.withColumns(values)


def decode_arrow_rows(source: OpenedChanges, records: pa.Table) -> pa.Table:
    """Return the changes of rows made from records, before these are ordered, with the columns that
    `decode_rows` gives. The format is one that decodes Arrow, for which the schema is enough.
    """
    following = source.spec.following
    schema = relevant_schema(source)
    assert isinstance(following.changes, ArrowChangeFormat), "other formats were rejected before"
    times = records.column(TIMESTAMP)
    records = _set_column(records, TIMESTAMP, null_out_rows(times, unreadable_values(times)))
    if following.on_bad_change != "fail":
        records = _set_column(records, RAW, records_to_json(records, source.records))
    rows = following.changes.decode_arrow(records, schema)
    readable = with_read_paths(source.spec, schema)
    for name in list_read_paths(readable, schema):
        rows = rows.append_column(name, read_path(rows, split_path(name)))
    return _reject_unreadable_in_arrow(rows, readable)


def _select_stored_in_arrow(spec: UnboundedDataset, rows: pa.Table, schema: Schema) -> pa.Table:
    """Return the rows with the columns of `schema`, which are stored, and the metadata columns; see
    `_select_stored`. Without Spark nothing is UNDECIDED.
    """
    made = {name: read_path(rows, spec.steps_to(name)) for name in schema.names}
    for name in metadata_columns(rows.column_names):
        made[name] = rows.column(name)
    if KEPT in made:
        first_steps = list(dict.fromkeys(spec.steps_to(name)[0] for name in schema.names))
        matrix = change_formats.kept_matrix(made[KEPT], first_steps)
        is_kept = dict(zip(first_steps, matrix.T, strict=True))
        marks = {}
        for name in schema.names:
            marks[name] = pa.chunked_array([pa.array(is_kept[spec.steps_to(name)[0]])])
        made[KEPT] = change_formats.kept_column(marks, pa.repeat(True, rows.num_rows))
    return pa.table(made)


def _reject_unplaced_in_arrow(spec: UnboundedDataset, rows: pa.Table) -> pa.Table:
    """Return the rows with a problem where a column that orders them, or is their time, is left
    out.
    """
    if KEPT not in rows.column_names:  # no row leaves out columns
        return rows
    names = _list_placing_columns(spec, rows.column_names)
    marks = change_formats.kept_matrix(rows.column(KEPT), names)
    for name, is_left_out in zip(names, marks.T, strict=True):
        rows = _add_problem_where(rows, pa.array(is_left_out), left_out_reason(name))
    return rows


def _add_key_problems_in_arrow(spec: UnboundedDataset, rows: pa.Table) -> pa.Table:
    """Return the rows with a problem where a column of the key is null or unknown."""
    for name in spec.key:
        rows = _add_problem_where(rows, rows.column(name).is_null(), f"null key column {name!r}")
    if KEPT in rows.column_names:
        marks = change_formats.kept_matrix(rows.column(KEPT), spec.key)
        for name, unknown in zip(spec.key, marks.T, strict=True):
            rows = _add_problem_where(rows, pa.array(unknown), unknown_key_reason(name))
    return rows


def decode_arrow_changes(
    source: OpenedChanges,
    records: pa.Table,
    positions_from: int = 0,
    samples: Samples | None = None,
) -> pa.Table:
    """Return the changes made from records in Arrow; columns and parameters are those of
    `decode_changes`.
    """
    spec = source.spec
    schema = source.schema
    following = spec.following
    rows = _reject_unplaced_in_arrow(spec, decode_arrow_rows(source, records))
    if following.groups:
        rows = _add_group_order_in_arrow(rows, following.ordering)
    elif following.order is not None:
        rows = _add_order_in_arrow(spec, rows, readable_schema(source), samples)
    if following.history is not None:
        rows = _add_valid_from_in_arrow(rows, following.history.valid_from)
    relevant = relevant_schema(source)
    rows = rows.drop_columns(list_read_paths(readable_schema(source), relevant))
    if spec.extractor is not None:
        extracted = extracted_columns(spec, schema, relevant)
        entries = _extract_entries_in_arrow(spec, rows, extracted, describe_input(spec))
        rows = _reject_unreadable_in_arrow(entries, extracted)
    if spec.columns.paths:
        rows = _reject_unreadable_in_arrow(_select_stored_in_arrow(spec, rows, schema), schema)
    rows = _add_key_problems_in_arrow(spec, rows)
    position = rows.column(OFFSET if following.order is None else ORDER)
    if following.order_by is None:
        position = pc.add(position, positions_from)
    shows = not hides_values(spec)
    problems = rows.column(PROBLEM).to_pylist()
    reasons = [change_values.render_reason(reason, values=shows) for reason in problems]
    made = {name: rows.column(name) for name in (*schema.names, *META)}
    made |= {POSITION: position, PROBLEM: pa.array(reasons, pa.string())}
    for name in (VALID_FROM, KEPT, RAW):
        if name in rows.column_names:
            made[name] = rows.column(name)
    return pa.table(made)


def _add_order_in_arrow(
    spec: UnboundedDataset, rows: pa.Table, schema: Schema, samples: Samples | None
) -> pa.Table:
    """Return the rows, without SNAPSHOT, with their positions in the column ORDER; a row that can't
    be ordered gets a problem.

    As `add_order`, but each name in the order is a column of `schema`: formats with other paths
    need Spark.
    """
    order = spec.following.order or ()
    if order == change_values.STREAMED_FIRST:  # by offset, with all rows of snapshots below 0
        below = pc.if_else(
            rows.column(SNAPSHOT), pa.scalar(change_values.SNAPSHOT_ROWS), pa.scalar(0)
        )
        return _set_column(rows, ORDER, pc.add(rows.column(OFFSET), below)).drop_columns([SNAPSHOT])
    are_texts = change_values.position_type(order, schema) == "string"
    first_values = _comparable_samples(order, samples, are_texts)
    if SNAPSHOT in rows.column_names:
        is_snapshot = rows.column(SNAPSHOT)
        rows = rows.drop_columns([SNAPSHOT])
    else:
        is_snapshot = pa.repeat(False, rows.num_rows)
    parts: list[Any] = []
    reasons: dict[int, str] = {}  # by row
    for name, sample in zip(order, first_values, strict=True):
        value = position_array(rows, name, schema)
        if are_texts:
            part = change_values.sortable_array(value.cast("string"), name, sample)
        else:
            part = value
        if parts:  # a snapshot's row may lack all fields but the first, and comes first then
            may_be_null = pc.and_(value.is_null(), is_snapshot)
            part = pc.if_else(may_be_null, change_values.MISSING_PART, part)
        parts.append(part)
        rejected = pc.indices_nonzero(part.is_null())
        texts = value.take(rejected).cast("string").to_pylist()
        for row, text in zip(rejected.to_pylist(), texts, strict=True):
            reason = _unordered_reason(name, text, sample, snapshot=bool(is_snapshot[row].as_py()))
            reasons.setdefault(row, reason)  # the first one counts
    position = pc.binary_join_element_wise(*parts, "") if are_texts else parts[0]
    rows = _set_column(rows, ORDER, position)
    return add_problems(rows, list(map(reasons.get, range(rows.num_rows))))


def _unordered_reason(name: str, text: str | None, sample: str | None, *, snapshot: bool) -> str:
    """Return why a change can't be ordered by this value of the column."""
    if text is None:
        return null_order_reason(name, snapshot=snapshot)
    return change_values.quote_value(text) + change_values.incomparable_reason(name, sample)


def _add_group_order_in_arrow(rows: pa.Table, order: Order) -> pa.Table:
    """Return the rows, without SNAPSHOT, all with the position 0; one that sets no group gets a
    problem. See `_add_group_order`.
    """
    sets_no_group = reduce(pc.and_, (rows.column(name).is_null() for name in order))
    rows = _set_column(rows, ORDER, pa.array(np.zeros(rows.num_rows, np.int64)))
    if SNAPSHOT in rows.column_names:
        rows = rows.drop_columns([SNAPSHOT])
    return _add_problem_where(rows, sets_no_group, no_group_reason(order))


def position_array(rows: pa.Table, name: str, schema: Schema) -> pa.ChunkedArray:
    """Return the positions that the column gives: the number, or microseconds or days since the
    epoch.

    Strings and decimals are returned unchanged.
    """
    values = rows.column(name)
    kind = schema.field(name).type
    if kind == "string" or kind.startswith("decimal"):
        return values
    if kind == "date":
        values = values.cast("int32")
    return values.cast("int64")


def _add_valid_from_in_arrow(rows: pa.Table, name: str | None) -> pa.Table:
    """Return the rows with their valid-from time, from this column or the record's time; a null
    is a problem.
    """
    times = rows.column(TIMESTAMP if name is None else name).cast(pa.timestamp("us", tz="UTC"))
    rows = _set_column(rows, VALID_FROM, times)
    return _add_problem_where(rows, times.is_null(), missing_time_reason(name))


def add_problems(changes: pa.Table, reasons: Sequence[str | None]) -> pa.Table:
    """Return the changes with these reasons, one for each row or None, as their problems, unless
    they have one.
    """
    problems = pc.coalesce(changes.column(PROBLEM), pa.array(reasons, pa.string()))
    return _set_column(changes, PROBLEM, problems)


def _add_problem_where(changes: pa.Table, where: pa.ChunkedArray, reason: str) -> pa.Table:
    """Return the changes with this reason as the problem where this is true, unless they have
    one.
    """
    reasons = pc.if_else(where, reason, pa.scalar(None, pa.string()))
    return _set_column(changes, PROBLEM, pc.coalesce(changes.column(PROBLEM), reasons))


def _extract_entries_in_arrow(
    spec: UnboundedDataset, rows: pa.Table, schema: Schema, what: str
) -> pa.Table:
    """Return the entries that the extractor makes from rows in Arrow, as `_extract_entries` does.

    Projections have no expressions here, so that KEPT names the same columns before and after, and
    no row is UNDECIDED. They and functions pass on all metadata columns.
    """
    assert spec.extractor is not None
    extractor = mask_columns(spec.extractor, spec.masked)
    assert isinstance(extractor, Projection | PythonExtractor), "others were rejected before"
    copies_key = extractor.keeps(spec.key_columns)
    marked = _set_column(
        rows, TOMBSTONE, pc.or_(rows.column(TOMBSTONE), pc.is_valid(rows.column(PROBLEM)))
    )
    deleting = spec.key_steps if copies_key else ()
    entries = extractor.apply_arrow(marked, schema, what, deleting)
    if copies_key:
        return entries
    return _add_problem_where(entries, entries.column(TOMBSTONE), UNKEYED_DELETION)


def _reject_unreadable_in_arrow(changes: pa.Table, schema: Schema) -> pa.Table:
    """Return the changes with a null, and a problem, where a date or text can't be represented
    in Python.
    """
    for field in schema.fields:
        if field.type not in CHECKED_TYPES:
            continue
        values = changes.column(field.name)
        lacking = unreadable_values(values, "replace")
        if not lacking:
            continue
        rule = f", declared {field.type}: {expected_values(field.type)}"
        reasons: list[str | None] = [None] * changes.num_rows
        for row, text in lacking.items():
            quoted = change_values.quote_value(text)
            reasons[row] = f"column {field.name!r} is {quoted}{rule}"
        changes = add_problems(changes, reasons)
        changes = _set_column(changes, field.name, null_out_rows(values, lacking))
    return changes


def null_out_rows(values: pa.ChunkedArray, rows: Collection[int]) -> pa.ChunkedArray:
    """Return the values with null in these rows, given by their indices."""
    if not rows:
        return values
    stays = pa.array([row not in rows for row in range(len(values))])
    return pc.if_else(stays, values, pa.scalar(None, values.type))


def _set_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the table with these values as its column of this name, which it may have already."""
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)

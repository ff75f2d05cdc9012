"""Changes decoded in this process from records in Arrow: the same as by Spark (`changes.py`), without a session."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.assets.declaration.change_formats import (
    KEPT,
    ORDER,
    PROBLEM,
    SNAPSHOT,
    ArrowChangeFormat,
    kept_matrix,
)
from dagster_adjunct.assets.declaration.change_values import (
    MISSING_PART,
    SNAPSHOT_ROWS,
    STREAMED_FIRST,
    Samples,
    incomparable_reason,
    position_type,
    quote_value,
    render_reason,
    sortable_array,
)
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor, mask_columns
from dagster_adjunct.assets.sources.changes import (
    RAW,
    UNKEYED_DELETION,
    check_order_values,
    derive_row_schema,
    missing_time_reason,
    null_order_reason,
    select_relevant_columns,
    unknown_key_reason,
)
from dagster_adjunct.assets.sources.opened_stream import OpenedStream
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.resources.bucketing.timeline import VALID_FROM
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import (
    CHECKED_TYPES,
    expected_values,
    format_spark_date,
    readable_values,
    unreadable_values,
)
from dagster_adjunct.resources.streams.system import META, OFFSET, TIMESTAMP, TOMBSTONE

_TYPES = ("string", "boolean", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = str.maketrans({**{chr(code): f"\\u{code:04X}" for code in range(32)}, **_SHORT})


def supports_json(kind: str) -> bool:
    """Whether values of this type can be written as JSON here; fractions and decimals need Java's own format."""
    return kind in _TYPES


def records_to_json(records: pa.Table, schema: Schema) -> pa.Array:
    """Return each record's columns as a JSON object, nulls included."""
    names = [f'"{name.translate(_ESCAPED)}":' for name in schema.names]
    columns = [_texts(records.column(field.name), field.type) for field in schema.fields]
    rows = zip(*columns, strict=True)
    texts = [",".join(name + text for name, text in zip(names, row, strict=True)) for row in rows]
    return pa.array([f"{{{text}}}" for text in texts], pa.string())


def _texts(column: pa.ChunkedArray, kind: str) -> list[str]:
    if kind in ("date", "timestamp"):
        column = column.cast("int32" if kind == "date" else "int64")
    return ["null" if value is None else _text(value, kind) for value in readable_values(column, "replace")]


def _text(value: Any, kind: str) -> str:
    if kind == "boolean":
        return "true" if value else "false"
    if kind == "string":
        return f'"{value.translate(_ESCAPED)}"'
    if kind == "binary":
        return f'"{base64.b64encode(value).decode()}"'
    if kind == "date":
        return f'"{_day(value)}"'
    if kind == "timestamp":
        days, micros = divmod(value, 86_400_000_000)
        seconds, rest = divmod(micros, 1_000_000)
        time = (dt.datetime.min + dt.timedelta(seconds=seconds)).time()
        return f'"{_day(days)}T{time:%H:%M:%S}.{rest // 1000:03d}Z"'
    return str(value)


def _day(days: int) -> str:
    return format_spark_date(str(np.datetime64(days, "D")))


def decode_arrow_changes(
    source: OpenedStream, records: pa.Table, positions_from: int = 0, samples: Samples | None = None
) -> tuple[pa.Table, Samples | None]:
    """Return the changes made from records in Arrow, and the first ordering values, as `decode_changes` does."""
    spec, schema, following = source.spec, source.schema, source.spec.following
    what = f"dataset {spec.name!r} (input {spec.input})"
    assert source.info.schema is not None, "raw records are rejected when the input is opened"
    assert isinstance(following.changes, ArrowChangeFormat), "other formats were rejected before"
    columns = select_relevant_columns(spec, derive_row_schema(spec, source.info.schema))
    records = _set_column(
        records, TIMESTAMP, null_out_rows(records.column(TIMESTAMP), unreadable_values(records.column(TIMESTAMP)))
    )
    if following.on_bad_change != "fail":
        records = _set_column(records, RAW, records_to_json(records, source.info.schema))
    rows = _reject_unreadable(following.changes.decode_arrow(records, columns), columns)
    if following.order is not None:
        rows, samples = _add_order(spec, rows, columns, samples)
    if following.history is not None:
        rows = _add_valid_from(rows, following.valid_from)
    if spec.extractor is not None:
        rows = _reject_unreadable(_extract_entries(spec, rows, schema, what), schema)
    for name in spec.key:
        nulls = rows.column(name).is_null().to_pylist()
        rows = add_problems(rows, [f"null key column {name!r}" if null else None for null in nulls])
    if KEPT in rows.column_names:
        marks = kept_matrix(rows.column(KEPT), spec.key)
        for name, unknown in zip(spec.key, marks.T.tolist(), strict=True):
            rows = add_problems(rows, [unknown_key_reason(name) if mark else None for mark in unknown])
    placed = pc.add(rows.column(OFFSET), positions_from) if following.order is None else rows.column(ORDER)
    if following.order == STREAMED_FIRST:
        placed = pc.add(placed, positions_from)
    hidden = spec.sensitive or getattr(spec.extractor, "sensitive", ())
    reasons = [render_reason(reason, values=not hidden) for reason in rows.column(PROBLEM).to_pylist()]
    made = {name: rows.column(name) for name in (*schema.names, *META)}
    made |= {POSITION: placed, PROBLEM: pa.array(reasons, pa.string())}
    made |= {name: rows.column(name) for name in (VALID_FROM, KEPT, RAW) if name in rows.column_names}
    return pa.table(made), samples


def _add_order(
    spec: AdjunctDataset, rows: pa.Table, schema: Schema, samples: Samples | None
) -> tuple[pa.Table, Samples | None]:
    """Return the rows with the column ORDER, and the first values, as `add_order` in changes.py does."""
    order = spec.following.order or ()
    if order == STREAMED_FIRST:
        below = pc.if_else(rows.column(SNAPSHOT), pa.scalar(SNAPSHOT_ROWS), pa.scalar(0))
        return _set_column(rows, ORDER, pc.add(rows.column(OFFSET), below)).drop_columns([SNAPSHOT]), samples
    values = [position_array(rows, name, schema) for name in order]
    string = position_type(order, schema) == "string"
    if any(schema.field(name).type == "string" for name in order):
        fine, known = rows.column(PROBLEM).is_null(), samples or (None,) * len(order)
        sent = [value.filter(pc.and_(fine, value.is_valid())).cast("string") for value in values]
        first = [new[0].as_py() if len(new) else None for new in sent]
        found = tuple(new if old is None else old for old, new in zip(known, first, strict=True))
        samples = None if found == (None,) * len(order) else check_order_values(spec, found)
    none = pa.array([False] * rows.num_rows)
    snapshot = rows.column(SNAPSHOT) if SNAPSHOT in rows.column_names else none
    parts, reasons = [], dict[int, str]()
    for place, (name, value) in enumerate(zip(order, values, strict=True)):
        sample = "0" if samples is None else samples[place]
        missing = pc.and_(value.is_null(), snapshot if place else none)
        part = sortable_array(value.cast("string"), name, sample) if string else value
        parts.append(pc.if_else(missing, MISSING_PART, part) if string else part)
        bad = pc.indices_nonzero(pc.and_(part.is_null(), pc.invert(missing)))
        for row, text in zip(bad.to_pylist(), value.take(bad).cast("string").to_pylist(), strict=True):
            reasons.setdefault(
                row, null_order_reason(name) if text is None else quote_value(text) + incomparable_reason(name, sample)
            )
    rows = _set_column(rows, ORDER, pc.binary_join_element_wise(*parts, "") if string else parts[0])
    if reasons:
        rows = add_problems(rows, [reasons.get(row) for row in range(rows.num_rows)])
    return rows.drop_columns([SNAPSHOT] if SNAPSHOT in rows.column_names else []), samples


def position_array(rows: pa.Table, name: str, schema: Schema) -> pa.ChunkedArray:
    """Return the positions of the ordering column's values: microseconds, days, or the number.

    Texts and decimals are returned unchanged.
    """
    values, kind = rows.column(name), schema.field(name).type
    if kind == "string" or kind.startswith("decimal"):
        return values
    return values.cast("int32").cast("int64") if kind == "date" else values.cast("int64")


def _add_valid_from(rows: pa.Table, name: str | None) -> pa.Table:
    """Return the rows with their valid-from time, from this column or the record's time; a null is a problem."""
    times = rows.column(TIMESTAMP if name is None else name).cast(pa.timestamp("us", tz="UTC"))
    rows = _set_column(rows, VALID_FROM, times)
    return add_problems(rows, [missing_time_reason(name) if none else None for none in times.is_null().to_pylist()])


def add_problems(changes: pa.Table, reasons: Sequence[str | None]) -> pa.Table:
    """Return the changes with these problems, by row, unless they have one."""
    return _set_column(changes, PROBLEM, pc.coalesce(changes.column(PROBLEM), pa.array(reasons, pa.string())))


def _extract_entries(spec: AdjunctDataset, rows: pa.Table, schema: Schema, what: str) -> pa.Table:
    """Return the entries that the extractor makes from rows; deletions and problems bypass it."""
    assert spec.extractor is not None
    extractor = mask_columns(spec.extractor, spec.sensitive)
    assert isinstance(extractor, Projection | PythonExtractor), "others were rejected before"
    kept = extractor.keeps(spec.key)
    around = _set_column(rows, TOMBSTONE, pc.or_(rows.column(TOMBSTONE), pc.is_valid(rows.column(PROBLEM))))
    entries = extractor.apply_arrow(around, schema, what, spec.key if kept else ())
    if kept:
        return entries
    deleted = entries.column(TOMBSTONE).to_pylist()
    return add_problems(entries, [UNKEYED_DELETION if mark else None for mark in deleted])


def _reject_unreadable(changes: pa.Table, schema: Schema) -> pa.Table:
    """Return the changes with a problem and a null for each date or text that Python can't represent."""
    for field in (field for field in schema.fields if field.type in CHECKED_TYPES):
        values = changes.column(field.name)
        if lacking := unreadable_values(values, "replace"):
            expected = expected_values(field.type)
            reasons = {
                row: f"column {field.name!r} is {quote_value(text)}, declared {field.type}: {expected}"
                for row, text in lacking.items()
            }
            changes = add_problems(changes, [reasons.get(row) for row in range(changes.num_rows)])
            changes = _set_column(changes, field.name, null_out_rows(values, lacking))
    return changes


def null_out_rows(values: pa.ChunkedArray, rows: Collection[int]) -> pa.ChunkedArray:
    """Return the values with null in these rows."""
    if not rows:
        return values
    return pc.if_else(pa.array([row not in rows for row in range(len(values))]), values, pa.scalar(None, values.type))


def _set_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)

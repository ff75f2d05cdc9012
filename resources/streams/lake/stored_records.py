"""Brings records into the form in which a stream stores them, or says what does not fit; and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.bucket_files import BucketFile
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column, quoted
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type, conform, fitted, same_family, widens
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    POSITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    TIMESTAMP,
    TOMBSTONE,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.objects.object_store import ObjectStore
    from dagster_adjunct.resources.streams.lake.stream_manifest import Declaration, StreamState

_POSITIONS = {SOURCE: "string", SOURCE_OFFSET: "bigint", SOURCE_EPOCH: "int", READER: "string"}
MARKS = {TIMESTAMP: "timestamp", TOMBSTONE: "boolean", EPOCH: "int", **_POSITIONS}
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def write_records(
    data: DataFrame | pa.Table,
    store: ObjectStore,
    folder: str,
    declaration: Declaration,
    what: str,
    order_by: tuple[str, ...],
    *,
    partitioned: bool,
    one_task: bool = False,
) -> list[BucketFile]:
    """Write records into an attempt's folder, one file a partition; a table without Spark, a frame by its tasks."""
    options = WriteOptions(what, number_rows=True, range_of=TIMESTAMP, differing=(EPOCH, SOURCE_EPOCH))
    if _is_table(data):
        if order_by or partitioned:
            raise ConfigurationError(
                f"{what}: order_by and partitioned are for Spark frames; a table keeps its own order.",
                "Sort the table before, and leave both out.",
                argument="order_by",
            )
        table = table_content(data, declaration, what)
        return write_arrow_buckets(table, store, folder, declaration.layout_of(table.column_names), options)
    from dagster_adjunct.resources.bucketing.write_buckets import write_buckets

    frame = frame_content(data, declaration, order_by, what)
    return write_buckets(
        frame,
        store,
        folder,
        declaration.layout_of(frame.columns),
        options,
        order_by=order_by,
        partitioned=partitioned,
        one_task=one_task,
        digest_also=[name for name in (TIMESTAMP, TOMBSTONE, EPOCH) if name in frame.columns],
    )


def columns_sent(state: StreamState, data: Any, order_by: Sequence[str]) -> int:
    """Return the place of the newest of the stream's columns, now or before, that these records have; else of now's.

    Who knows only the columns of before goes on: what was added since is null in its records.
    """
    if not state.earlier:
        return 0
    if _is_table(data):
        types: dict[str, Any] = {field.name: field.type for field in data.schema}
    else:
        types = dict(data.dtypes)
    names = types.keys() - MARKS.keys()
    for place in range(len(state.earlier), -1, -1):
        fields = state.declared_with(place).schema_.fields
        known = {field.name for field in fields}
        if known <= names and names - known <= set(order_by) and all(_fits(types[f.name], f.type) for f in fields):
            return place
    return len(state.earlier)


def _fits(given: Any, kind: str) -> bool:
    if isinstance(given, str):
        return given == kind or _widens(given, kind)
    return same_family(given, arrow_type(kind))


def as_before(data: Any, before: Schema, order_by: Sequence[str]) -> Any:
    """Return the records with the columns that their stream had when they were sent a first time, to be compared.

    A value that does not fit into the type of then is null, or left for who writes it to refuse.
    """
    kept = {*before.names, *MARKS, *order_by}
    if _is_table(data):
        return _table_before(data.select([name for name in data.column_names if name in kept]), before)
    types = dict(data.dtypes)
    narrower = {
        field.name: field.type
        for field in before.fields
        if types.get(field.name, field.type) != field.type and widens(field.type, types[field.name])
    }
    return data.select(
        *[
            column(name).try_cast(narrower[name]).alias(name) if name in narrower else column(name)
            for name in data.columns
            if name in kept
        ]
    )


def _table_before(table: pa.Table, before: Schema) -> pa.Table:
    import pyarrow as pa

    for field in before.fields:
        place = table.schema.get_field_index(field.name)
        if place >= 0:
            with suppress(pa.ArrowInvalid):
                table = table.set_column(place, field.name, table.column(place).cast(arrow_type(field.type)))
    return table


def _is_table(data: Any) -> bool:
    return type(data).__module__.startswith("pyarrow")  # asking for the class itself would import Arrow


def table_content(table: pa.Table, declaration: Declaration, what: str) -> pa.Table:
    """Return the table with the stream's columns and types, then `__timestamp` and `__tombstone`.

    A null `__timestamp` stands for the time of the append, which is known when it commits. `__epoch` follows where one
    of the records has another than 0, then the columns of POSITION that the table has.
    """
    import pyarrow.compute as pc

    plain = conform(
        table.select([name for name in table.column_names if name not in MARKS]),
        declaration.schema_,
        what,
    )
    times = _mark(table, TIMESTAMP, what)
    if declaration.timestamp is not None:
        times = pc.coalesce(times, plain.column(declaration.timestamp))
    tombstones = pc.fill_null(_mark(table, TOMBSTONE, what), False)
    # One chunk a column: the bytes of the file, and so its checksum, must not depend on how the table was cut.
    marked = plain.append_column(TIMESTAMP, times).append_column(TOMBSTONE, tombstones)
    if EPOCH in table.column_names:
        epochs = _stored(_mark(table, EPOCH, what))
        if epochs.null_count < len(epochs):
            marked = marked.append_column(EPOCH, epochs)
    for name in POSITION:
        if name in table.column_names:
            marked = marked.append_column(name, _mark(table, name, what))
    if (found := first_unreadable(marked)) is not None:
        hidden = found.column in declaration.schema_.sensitive
        raise found.error(what, f"row {found.row}", hidden=hidden, row=found.row)
    return marked.combine_chunks()


def _stored(epochs: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return epochs as files have them: null for 0, which takes no room."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pc.equal(epochs, 0), pa.scalar(None, pa.int32()), epochs)


def _mark(table: pa.Table, name: str, what: str) -> pa.ChunkedArray:
    import pyarrow as pa

    kind = arrow_type(MARKS[name])
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    column = table.column(name)
    aware = not pa.types.is_timestamp(column.type) or column.type.tz is not None
    if not pa.types.is_null(column.type) and not (column.type.id == kind.id and aware):
        raise SchemaMismatchError(
            f"{what}: column {name!r} holds {column.type}, expected {kind}.",
            "Cast it, or leave the column out.",
            column=name,
        )
    return fitted(column, name, MARKS[name], what)


def frame_content(df: DataFrame, declaration: Declaration, order_by: tuple[str, ...], what: str) -> DataFrame:
    """Return the frame with the stream's columns and types, marks, and whatever else `order_by` names."""
    from pyspark.sql import functions as F

    types = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    schema = declaration.schema_
    missing = [name for name in schema.names if name not in types]
    extra = [name for name in types if name not in schema and name not in MARKS and name not in order_by]
    if missing or extra or len(types) != len(df.schema.fields):
        raise SchemaMismatchError(
            f"{what}: columns {missing} are missing and {extra} are not expected; the schema is "
            f"{', '.join(f'{f.name} {f.type}' for f in schema.fields)}.",
            "Send records with exactly these columns, each once.",
            column=next(iter([*missing, *extra]), None),
        )
    columns = []
    for field in schema.fields:
        if types[field.name] != field.type and not _widens(types[field.name], field.type):
            raise SchemaMismatchError(
                f"{what}: column {field.name!r} holds {types[field.name]} where the schema says {field.type}.",
                f"Cast it: F.col({field.name!r}).cast({field.type!r}).",
                column=field.name,
            )
        columns.append(F.col(quoted(field.name)).cast(field.type).alias(field.name))
    for name, kind in MARKS.items():
        if types.get(name, kind) not in (kind, "void"):
            raise SchemaMismatchError(
                f"{what}: column {name!r} holds {types[name]}, expected {kind}.",
                "Cast it, or leave it out.",
                column=name,
            )
    times = F.col(TIMESTAMP) if TIMESTAMP in types else F.lit(None)
    if declaration.timestamp is not None:
        times = F.coalesce(times, F.col(quoted(declaration.timestamp)))
    tombstones = F.coalesce(F.col(TOMBSTONE), F.lit(False)) if TOMBSTONE in types else F.lit(False)
    marks = [times.cast("timestamp").alias(TIMESTAMP), tombstones.cast("boolean").alias(TOMBSTONE)]
    if EPOCH in types:
        marks.append(F.nullif(F.col(EPOCH), F.lit(0)).cast("int").alias(EPOCH))
    marks += [F.col(name).cast(kind).alias(name) for name, kind in _POSITIONS.items() if name in types]
    rest = [F.col(quoted(name)) for name in dict.fromkeys(order_by) if name not in schema and name not in MARKS]
    return df.select(*columns, *marks, *rest)


def _widens(given: str, expected: str) -> bool:
    if given == "void":  # F.lit(None): a column without values has every type
        return True
    both = given in _INTEGERS and expected in _INTEGERS
    return both and _INTEGERS.index(given) < _INTEGERS.index(expected)

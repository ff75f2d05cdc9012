"""Data files of an Iceberg table: how they are written, each with rows of one partition, and
rewritten without some of their rows.

PyIceberg 0.12 turns a null array or map of structs into an empty one, when it writes and when it
reads, so that its Parquet writer is used here without the conversion before it. And it computes
most transforms with a package of its own, `pyiceberg-core`: here they are computed with Arrow, and
for few distinct values in Python.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.output_tables.batches import ReplacedRange, group_by_source
from dagster_adjunct.resources.streams.system import READER, SOURCE, SOURCE_OFFSET
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionKey
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.transforms import Transform
    from pyiceberg.types import IcebergType

_HOUR = 3_600_000_000
_FIELD_ID = b"PARQUET:field_id"


@dataclass(slots=True)
class DataFiles:
    """Writes the rows of one commit to data files; `files` are those that it has written, with
    `rows` in total. `metadata` has the table's columns and partitions as they are then.
    """

    io: FileIO
    metadata: TableMetadata
    files: list[DataFile] = field(default_factory=list)
    rows: int = 0
    _folder: uuid.UUID = field(default_factory=uuid.uuid4)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def write(self, rows: pa.Table) -> None:
        """Write rows, which have the table's columns, to files of their own."""
        from pyiceberg.io.pyarrow import bin_pack_arrow_table, schema_to_pyarrow
        from pyiceberg.table import TableProperties

        self.rows += rows.num_rows
        target = self.metadata.properties.get(
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )
        with_ids = schema_to_pyarrow(self.metadata.schema(), include_field_ids=True)

        def write_partition(part: PartitionRows) -> list[DataFile]:
            chosen = rows if part.places is None else rows.take(part.places)
            files = []
            for batches in bin_pack_arrow_table(chosen, int(target)):
                table = pa.Table.from_batches(batches)
                files.append(self._write_file(_with_schema(table, with_ids), part.key))
            return files

        for written in map_in_threads(write_partition, split_by_partition(rows, self.metadata)):
            self.files += written

    def _write_file(self, rows: pa.Table, key: PartitionKey | None) -> DataFile:
        """Write rows of one partition to a file; return its entry for a manifest."""
        from pyiceberg.io.pyarrow import ParquetFormatWriter
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.table.locations import load_location_provider
        from pyiceberg.typedef import Record

        metadata = self.metadata
        locations = load_location_provider(metadata.location, metadata.properties)
        name = f"00000-{next(self._numbers)}-{self._folder}.parquet"
        output = self.io.new_output(locations.new_data_location(name, key))
        writer = ParquetFormatWriter(output, metadata.schema(), metadata.properties)
        with writer:
            writer.write(rows)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=output.location,
            file_format=FileFormat.PARQUET,
            partition=Record() if key is None else key.partition,
            file_size_in_bytes=len(output),
            sort_order_id=None,
            spec_id=metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **writer.result().to_serialized_dict(),
        )


def rewrite_without(
    tasks: Sequence[FileScanTask], ranges: Sequence[ReplacedRange], files: DataFiles, table: str
) -> list[DataFile]:
    """Rewrite data files without the rows of these ranges; return the files that have such rows,
    which the commit removes.

    Raises TableError for a file from which somebody has deleted rows by a delete file.
    """
    import pyarrow.parquet as pq

    removed = []
    for task in tasks:
        with files.io.new_input(task.file.file_path).open() as opened:
            stored = pq.read_table(opened)
        rows = project(stored, files.metadata.schema())
        replaced = is_replaced(rows, ranges)
        if not pc.any(replaced).as_py():
            continue
        if task.delete_files:
            raise errors.TableError(
                f"table {table} has delete files for {task.file.file_path}, of which this batch"
                " replaces rows: rewriting it would bring the deleted rows back.",
                "Compact the table with the engine that has deleted rows, then run it again.",
                table=table,
            )
        removed.append(task.file)
        remaining = rows.filter(pc.invert(replaced))
        if remaining.num_rows:
            files.write(remaining)
    return removed


def is_replaced(rows: pa.Table, ranges: Sequence[ReplacedRange]) -> pa.Array:
    """Return which rows are in these ranges."""
    found = np.zeros(rows.num_rows, bool)
    offsets = pc.fill_null(rows.column(SOURCE_OFFSET), -1).to_numpy()
    for source, spans in group_by_source(ranges).items():
        by_reader = pc.equal(rows.column(READER), source.reader)
        of_source = pc.equal(rows.column(SOURCE), source.source)
        is_here = pc.fill_null(pc.and_(by_reader, of_source), False).to_numpy()
        starts = np.array([span.start for span in spans])
        ends = np.array([span.end for span in spans])
        # The last span that begins at or before each offset, -1 if none does.
        last = np.searchsorted(starts, offsets, side="right") - 1
        is_inside = (last >= 0) & (offsets < ends[np.maximum(last, 0)])
        found |= is_inside & is_here
    return pa.array(found)


def project(stored: pa.Table, schema: Schema) -> pa.Table:
    """Return the rows of a data file with the table's columns, which are matched by their ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    wanted = schema_to_pyarrow(schema, include_field_ids=True)
    by_id = {_id_of(each): number for number, each in enumerate(stored.schema)}
    columns = []
    for each in wanted:
        number = by_id.get(_id_of(each))
        if number is None:
            columns.append(pa.nulls(stored.num_rows, each.type))
        else:
            columns.append(_project_array(_one_array(stored.column(number)), each.type))
    return pa.Table.from_arrays(columns, schema=wanted)


def _id_of(each: pa.Field) -> bytes | None:
    """Return the id of a field in a file of Iceberg, None if it has none."""
    found: bytes | None = (each.metadata or {}).get(_FIELD_ID)
    return found


def _project_array(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return values with the members of structs that a type has, matched by id, at every depth."""
    mask = values.is_null()
    if pa.types.is_struct(wanted):
        by_id = {_id_of(each): number for number, each in enumerate(values.type)}
        members = []
        for each in wanted:
            number = by_id.get(_id_of(each))
            if number is None:
                members.append(pa.nulls(len(values), each.type))
            else:
                members.append(_project_array(values.field(number), each.type))
        return pa.StructArray.from_arrays(members, fields=[*wanted], mask=mask)
    if pa.types.is_map(wanted):
        items = _project_array(values.items, wanted.item_type)
        keys = values.keys.cast(wanted.key_type)
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=wanted, mask=mask)
    if pa.types.is_list(wanted) or pa.types.is_large_list(wanted):
        kind = pa.LargeListArray if pa.types.is_large_list(values.type) else pa.ListArray
        inner = _project_array(values.values, wanted.value_type)
        return kind.from_arrays(values.offsets, inner, mask=mask).cast(wanted)
    return values.cast(wanted)


def _with_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the field ids of a schema, of which they have the columns."""
    return pa.Table.from_arrays(
        [column.cast(each.type) for column, each in zip(rows.columns, schema, strict=True)],
        schema=schema,
    )


class PartitionRows(NamedTuple):
    """The key of a partition, None for a table without partitions, and the places of its rows in
    their order, None for all rows.
    """

    key: PartitionKey | None
    places: pa.Array | None


def split_by_partition(rows: pa.Table, metadata: TableMetadata) -> list[PartitionRows]:
    """Return which rows belong to each partition that has some."""
    from pyiceberg.partitioning import PartitionFieldValue, PartitionKey

    spec = metadata.spec()
    schema = metadata.schema()
    if spec.is_unpartitioned():
        return [PartitionRows(None, None)]
    values = []
    for each in spec.fields:
        source = _read_field(rows, schema, each.source_id)
        kind = schema.find_field(each.source_id).field_type
        values.append(transform_values(source, each.transform, kind))
    groups = _number_groups(values)
    order = np.argsort(groups.of_rows, kind="stable")
    ends = np.searchsorted(groups.of_rows[order], np.arange(1, len(groups.first_rows) + 1))
    start = 0
    parts = []
    for first, end in zip(groups.first_rows, ends.tolist(), strict=True):
        fields = []
        for each, value in zip(spec.fields, values, strict=True):
            fields.append(PartitionFieldValue(each, value[first].as_py()))
        places = None  # the only partition has all rows
        if len(groups.first_rows) > 1:
            places = pa.array(order[start:end])
        parts.append(PartitionRows(PartitionKey(fields, spec, schema), places))
        start = end
    return parts


def transform_values(
    values: pa.ChunkedArray, transform: Transform[Any, Any], kind: IcebergType
) -> pa.Array:
    """Return the values that a transform of a partition spec gives for a column of this type.
    Transforms to units of time are computed by Arrow; others by PyIceberg, once for each distinct
    value.
    """
    from pyiceberg import transforms

    if isinstance(transform, transforms.IdentityTransform):
        return _one_array(values)
    by_unit: Mapping[type, Callable[[pa.Array], pa.Array]] = {
        transforms.YearTransform: _years,
        transforms.MonthTransform: _months,
        transforms.DayTransform: _days,
        transforms.HourTransform: _hours,
    }
    in_arrow = by_unit.get(type(transform))
    if in_arrow is not None:
        return in_arrow(_one_array(values))
    encoded = _one_array(values).dictionary_encode()
    call = transform.transform(kind)
    made = pa.array([call(value) for value in encoded.dictionary.to_pylist()])
    return made.take(encoded.indices)


def _years(moments: pa.Array) -> pa.Array:
    return pc.cast(pc.subtract(pc.year(moments), 1970), pa.int32())


def _months(moments: pa.Array) -> pa.Array:
    months = pc.add(pc.multiply(_years(moments), 12), pc.subtract(pc.month(moments), 1))
    return pc.cast(months, pa.int32())


def _days(moments: pa.Array) -> pa.Array:
    """Return the days since the epoch of timestamps or dates."""
    if pa.types.is_timestamp(moments.type):
        moments = pc.floor_temporal(moments, unit="day").cast(pa.date32())
    return moments.cast(pa.int32())


def _hours(moments: pa.Array) -> pa.Array:
    begun = pc.floor_temporal(moments.cast(pa.timestamp("us")), unit="hour").cast(pa.int64())
    return pc.cast(pc.divide(begun, _HOUR), pa.int32())


def _one_array(values: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)


def _read_field(rows: pa.Table, schema: Schema, field_id: int) -> pa.ChunkedArray:
    """Return the values of a column, or of a member of a struct, by its id."""
    name = schema.find_column_name(field_id)
    if name in rows.column_names:  # which may have dots itself
        return rows.column(name)
    column, *steps = str(name).split(".")
    values = rows.column(column)
    return reduce(pc.struct_field, steps, values)


class _RowGroups(NamedTuple):
    """Groups of rows with equal values: the number of each row's group, and the place of the first
    row of each group.
    """

    of_rows: Any
    first_rows: list[int]


def _number_groups(values: list[pa.Array]) -> _RowGroups:
    """Return the groups of the rows that have these values."""
    codes = np.zeros(len(values[0]), np.int64)
    for each in values:
        encoded = each.dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy(
            zero_copy_only=False
        )
        # Numbered anew after each column: products of many numbers would overflow.
        _, codes = np.unique(codes, return_inverse=True)
    _, firsts = np.unique(codes, return_index=True)
    return _RowGroups(codes, firsts.tolist())

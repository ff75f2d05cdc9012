"""Data files of an Iceberg table, written by PyIceberg: each has rows of one partition.

PyIceberg computes most transforms with a package of its own, `pyiceberg-core`. Here they are
computed with Arrow, and for few distinct values in Python, so that it isn't needed.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionKey
    from pyiceberg.schema import Schema
    from pyiceberg.table import WriteTask
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.transforms import Transform
    from pyiceberg.types import IcebergType

_HOUR = 3_600_000_000


@dataclass(slots=True)
class DataFiles:
    """Writes the rows of one commit to data files; `files` are those that it has written, with
    `rows` in total.
    """

    io: FileIO
    metadata: TableMetadata
    files: list[DataFile] = field(default_factory=list)
    rows: int = 0
    _folder: uuid.UUID = field(default_factory=uuid.uuid4)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def write(self, rows: pa.Table) -> None:
        """Write rows, which have the table's columns, to files of their own."""
        from pyiceberg.io.pyarrow import write_file

        self.rows += rows.num_rows
        self.files += write_file(self.io, self.metadata, self._tasks(rows))

    def _tasks(self, rows: pa.Table) -> Iterator[WriteTask]:
        from pyiceberg.io.pyarrow import bin_pack_arrow_table, pyarrow_to_schema
        from pyiceberg.table import TableProperties, WriteTask

        schema = self.metadata.schema()
        written = pyarrow_to_schema(rows.schema, name_mapping=schema.name_mapping)
        size = self.metadata.properties.get(
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )
        for key, part in split_by_partition(rows, self.metadata):
            for batches in bin_pack_arrow_table(part, int(size)):
                yield WriteTask(self._folder, next(self._numbers), written, batches, None, key)


def split_by_partition(
    rows: pa.Table, metadata: TableMetadata
) -> Iterator[tuple[PartitionKey | None, pa.Table]]:
    """Yield the rows of each partition, in their order, with its key; None for a table without
    partitions.
    """
    from pyiceberg.partitioning import PartitionFieldValue, PartitionKey

    spec = metadata.spec()
    schema = metadata.schema()
    if spec.is_unpartitioned():
        yield None, rows
        return
    values = []
    for each in spec.fields:
        source = _read_field(rows, schema, each.source_id)
        kind = schema.find_field(each.source_id).field_type
        values.append(transform_values(source, each.transform, kind))
    codes, firsts = _number_groups(values)
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(1, len(firsts) + 1))
    start = 0
    for first, end in zip(firsts, ends.tolist(), strict=True):
        fields = [
            PartitionFieldValue(each, value[first].as_py())
            for each, value in zip(spec.fields, values, strict=True)
        ]
        part = rows
        if len(firsts) > 1:
            part = rows.take(pa.array(order[start:end]))
        yield PartitionKey(fields, spec, schema), part
        start = end


def transform_values(
    values: pa.ChunkedArray, transform: Transform[Any, Any], kind: IcebergType
) -> pa.Array:
    """Return the values that a transform of a partition spec gives for a column of this type."""
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
    if name in rows.column_names:
        return rows.column(name)
    column, *steps = str(name).split(".")
    values = rows.column(column)
    return reduce(lambda value, step: pc.struct_field(value, step), steps, values)


def _number_groups(values: list[pa.Array]) -> tuple[Any, list[int]]:
    """Return the number of each row's group, and the place of the first row of each group; rows
    of one group have equal values.
    """
    codes = np.zeros(len(values[0]), np.int64)
    for each in values:
        encoded = each.dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy(
            zero_copy_only=False
        )
        _, codes = np.unique(codes, return_inverse=True)
    _, firsts = np.unique(codes, return_index=True)
    return codes, firsts.tolist()

"""What of an input's records becomes a dataset's entries: extractor, columns, and keys made of offsets.

Shared by streams, files and queries, so that a declaration means the same whatever the records arrive by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assets.manifest import Declaration
from resources.schema import Schema, check_key_types

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from assets.dataset import AdjunctDataset


def schema_of_entries(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that the dataset stores of records with these columns.

    Raises SchemaMismatchError, naming the dataset, where key or `columns` name something else, or where the key
    can't be compared exactly.
    """
    what = f"dataset {spec.name!r} (input {spec.input})"
    schema = records if spec.extractor is None else spec.extractor.schema(records, what)
    if spec.columns is not None:
        schema = schema.select(spec.columns, what)
    check_key_types(schema, spec.key, what)
    return schema


def entries_of(spec: AdjunctDataset, records: DataFrame, schema: Schema) -> DataFrame:
    """Return the entries that records make, with the columns of `schema` and those of META."""
    from resources.streams.system import META

    if spec.extractor is not None:
        records = spec.extractor.apply(records, schema)
    return records.select(*[column(name) for name in (*schema.names, *META)])


def declaration_of(spec: AdjunctDataset, schema: Schema, *, input_partitions: int = 0) -> Declaration:
    """Return what the manifest keeps of a specification whose entries have these columns."""
    return Declaration(
        kind=spec.kind,
        input=str(spec.input),
        key=spec.key,
        key_types=tuple(schema.field(name).type for name in spec.key),
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        input_partitions=input_partitions,
        columns=spec.columns,
        bootstrap=spec.bootstrap,
        order="arrival" if spec.versions is None else "name",
    )


def column(name: str) -> Column:
    """Return a column by its exact name, whatever characters it has."""
    from pyspark.sql import functions as F

    return F.col(f"`{name.replace('`', '``')}`")

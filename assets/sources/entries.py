"""Entries made from an input's records: extractor, columns, and keys made of offsets.

Streams, files and queries share this, so that a declaration means the same for each of them. Entries can be made
without Spark if the stream system reads Arrow (the lake's streams do) and the extractor is none, a Projection without
expressions, or a PythonExtractor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import BY_OFFSET, AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor, mask_columns
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_key_types
from dagster_adjunct.resources.streams.system import META, OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.sources.opened_stream import OpenedStream

_NO_KEY = "is a tombstone that has no entry's key: the key is not the record's own."
_NO_KEY_STEP = "Key the dataset by columns that the extractor keeps, or deliver versions without tombstones."
_POSITION = (Field(BY_OFFSET[0], "int"), Field(BY_OFFSET[1], "bigint"))


def derive_entry_schema(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that the dataset stores from records with these columns.

    Raises SchemaMismatchError, naming the dataset, if key or `columns` name an unknown column, or if the key's type
    can't be compared exactly.
    """
    what = f"dataset {spec.name!r} (input {spec.input})"
    schema = records if spec.extractor is None else spec.extractor.schema(records, what)
    if spec.columns is not None:
        schema = schema.select(spec.columns, what)
    if spec.by_offset:
        schema = _add_position_columns(spec, schema, what)
    check_key_types(schema, spec.key, what)
    return schema


def entries_from_frame(spec: AdjunctDataset, records: DataFrame, schema: Schema) -> DataFrame:
    """Return the entries made from records, with the columns of `schema` and those of META.

    The job fails with SchemaMismatchError at a tombstone that has no entry's key.
    """
    what = f"dataset {spec.name!r} (input {spec.input})"
    position = {BY_OFFSET[0]: named_column(PARTITION), BY_OFFSET[1]: named_column(OFFSET)} if spec.by_offset else {}
    if spec.extractor is not None:
        given = Schema(tuple(field for field in schema.fields if field.name not in position))
        records = mask_columns(spec.extractor, spec.sensitive).apply(records, given, what)
    values = {name: position.get(name, named_column(name)) for name in (*schema.names, *META)}
    if spec.by_offset or (spec.extractor is not None and not spec.extractor.keeps(spec.key)):
        values[TOMBSTONE] = _reject_tombstones_column(what)
    return records.select(*[value.alias(name) for name, value in values.items()])


def _add_position_columns(spec: AdjunctDataset, schema: Schema, what: str) -> Schema:
    taken = [name for name in BY_OFFSET if name in schema.names]
    if taken:
        problem = (
            f"{what}: it is keyed by offset, which is stored as {' and '.join(BY_OFFSET)}, and records already have a "
            f"column {taken[0]!r}."
        )
        step = "Rename that column with a Projection, or leave it out with columns=."
        raise SchemaMismatchError(problem, step, dataset=spec.name, column=taken[0])
    if isinstance(spec.extractor, PythonExtractor):
        raise SchemaMismatchError(
            f"{what}: it is keyed by offset, and extractor {spec.extractor.factory} may make several entries from one "
            "record, of which only one would be kept.",
            "Declare key columns of the entries, or use a Projection.",
            dataset=spec.name,
        )
    return Schema((*_POSITION, *schema.fields))


def _reject_tombstones_column(what: str) -> Column:
    """Return `__tombstone` as false, with an error for tombstones."""
    from dagster_adjunct.resources.spark.errors import raise_error_column

    place = F.concat(
        F.lit(f"{what}: the record at offset "), named_column(OFFSET).cast("string"), F.lit(" of partition "),
        named_column(PARTITION).cast("string"), F.lit(f" {_NO_KEY}"),
    )  # fmt: skip
    error = raise_error_column(SchemaMismatchError, place, _NO_KEY_STEP)
    return F.when(named_column(TOMBSTONE), error).otherwise(F.lit(False))


def list_spark_needs(source: OpenedStream) -> list[str]:
    """Return, in words, why this dataset's entries can't be made without Spark; empty if they can."""
    spec, needed = source.spec, list[str]()
    if not source.system.implements("read_arrow"):
        needed.append(f"stream system {source.system.name!r}, whose records only Spark reads")
    return [*needed, *list_extractor_spark_needs(spec)]


def list_extractor_spark_needs(spec: AdjunctDataset) -> list[str]:
    """Return this dataset's extractor, in words, if it needs Spark; empty otherwise."""
    extractor = spec.extractor
    if extractor is None or (isinstance(extractor, Projection | PythonExtractor) and not extractor.needs_spark):
        return []
    return [f"the extractor ({extractor.describe()})"]


def raise_if_spark_needed(spec: AdjunctDataset, needed: list[str]) -> None:
    """Raise ConfigurationError if anything needs Spark."""
    if needed:
        problem = f"dataset {spec.name!r} (input {spec.input}) can't be made without Spark: {'; '.join(needed)}."
        step = "Pass a Spark session, or session_scope(), instead of IN_PROCESS."
        raise ConfigurationError(problem, step, dataset=spec.name)


def entries_from_arrow(spec: AdjunctDataset, records: pa.Table, schema: Schema) -> pa.Table:
    """Return the same entries from an Arrow table. Raises SchemaMismatchError for a tombstone without a key."""
    what = f"dataset {spec.name!r} (input {spec.input})"
    position = {BY_OFFSET[0]: PARTITION, BY_OFFSET[1]: OFFSET} if spec.by_offset else {}
    if spec.extractor is not None:
        given = Schema(tuple(field for field in schema.fields if field.name not in position))
        extractor = mask_columns(spec.extractor, spec.sensitive)
        assert isinstance(extractor, Projection | PythonExtractor), "others were rejected before"
        records = extractor.apply_arrow(records, given, what)
    if spec.by_offset or (spec.extractor is not None and not spec.extractor.keeps(spec.key)):
        deleted = records.filter(records.column(TOMBSTONE))
        if deleted.num_rows:
            offset, partition = (deleted.column(name)[0].as_py() for name in (OFFSET, PARTITION))
            problem = f"{what}: the record at offset {offset} of partition {partition} {_NO_KEY}"
            raise SchemaMismatchError(problem, _NO_KEY_STEP, dataset=spec.name)
    return pa.table({name: records.column(position.get(name, name)) for name in (*schema.names, *META)})

"""Whether the records of a stream can be made a dataset's without Spark, and the entries that they make.

the stream system   gives records in Arrow: the lake's streams
the extractor       none, a Projection without expressions, or a PythonExtractor
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import BY_OFFSET
from dagster_adjunct.assets.declaration.extractors.extractor import Projection, PythonExtractor, hiding
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.stream_system import META, OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Source


def what_needs_spark(source: Source) -> list[str]:
    """Return what of this dataset's records only Spark can read or make entries of, in words."""
    spec, needed = source.spec, list[str]()
    if not source.system.reads_arrow:
        needed.append(f"stream system {source.system.name!r}, whose records only Spark reads")
    return [*needed, *what_only_spark_extracts(spec)]


def what_only_spark_extracts(spec: AdjunctDataset) -> list[str]:
    """Return the extractor of this dataset, in words, where only Spark can make entries with it."""
    extractor = spec.extractor
    if extractor is None or (isinstance(extractor, Projection | PythonExtractor) and not extractor.needs_spark):
        return []
    return [f"the extractor ({extractor.describe()})"]


def refuse_in_process(spec: AdjunctDataset, needed: list[str]) -> None:
    """Raise ConfigurationError where something needs a session."""
    if needed:
        raise ConfigurationError(
            f"dataset {spec.name!r} (input {spec.input}) can't be made without Spark: {'; '.join(needed)}.",
            "Pass a Spark session, or what session_scope() gives, instead of IN_PROCESS.",
            dataset=spec.name,
        )


def entries_in_arrow(spec: AdjunctDataset, records: pa.Table, schema: Schema) -> pa.Table:
    """Return what `entries_of` does, of records in Arrow. Raises SchemaMismatchError for a tombstone of no entry."""
    import pyarrow as pa

    what = f"dataset {spec.name!r} (input {spec.input})"
    position = {BY_OFFSET[0]: PARTITION, BY_OFFSET[1]: OFFSET} if spec.by_offset else {}
    if spec.extractor is not None:
        given = Schema(tuple(field for field in schema.fields if field.name not in position))
        extractor = hiding(spec.extractor, spec.sensitive)
        assert isinstance(extractor, Projection | PythonExtractor), "others are refused"
        records = extractor.apply_arrow(records, given, what)
    if spec.by_offset or (spec.extractor is not None and not spec.extractor.keeps(spec.key)):
        _refuse_tombstones(spec, records)
    return pa.table({name: records.column(position.get(name, name)) for name in (*schema.names, *META)})


def _refuse_tombstones(spec: AdjunctDataset, records: pa.Table) -> None:
    deleted = records.filter(records.column(TOMBSTONE))
    if deleted.num_rows:
        offset, partition = (deleted.column(name)[0].as_py() for name in (OFFSET, PARTITION))
        raise SchemaMismatchError(
            f"dataset {spec.name!r} (input {spec.input}): the record at offset {offset} of partition {partition} is a "
            "tombstone, and nothing says which entry it deletes: the key is not the record's own.",
            "Key the dataset by columns that the extractor passes on unchanged, or deliver versions without "
            "tombstones.",
            dataset=spec.name,
        )

"""Which Parquet files Spark's own reader reads exactly as they are read here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa, pt
from dagster_adjunct.resources.schemas.schema import Schema, schema_struct
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type

# Spark has written dates before 1582, or 1900, in another calendar.
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")


def spark_form(schema: Schema) -> str:
    """Return the form of Parquet files that Spark's own reader reads with these columns as they are
    read here.
    """
    columns = sorted(f"{field.name} {field.type}" for field in schema.fields)
    return hashlib.blake2b("\n".join(columns).encode(), digest_size=8).hexdigest()


def find_spark_form(parquet: Any, stored: pa.Schema, schema: Schema) -> str:
    """Return the form of an opened file with the columns `stored`: that of the schema, or "" if
    Spark's own reader may read it otherwise than it is read here.
    """
    facts = parquet.metadata.metadata or {}
    written = facts.get(b"org.apache.spark.version", b"3").split(b".")[0]
    if int(written) < 3 or any(key in facts for key in _LEGACY):
        return ""
    lowered = [name.lower() for name in stored.names]
    if len({*lowered}) < len(lowered):  # Spark ignores the case of names
        return ""
    wanted = schema.to_arrow()
    for field in schema.fields:
        if field.name not in stored.names:
            return ""
        found = stored.field(field.name).type
        if not _is_read_alike(found, wanted.field(field.name).type):
            return ""
    columns = [parquet.schema.column(index).path for index in range(len(parquet.schema))]
    struct = schema_struct(schema)
    expected = {path for member in struct.members for path in _leaves(member.type, member.name)}
    return spark_form(schema) if expected <= {*columns} else ""


def _is_read_alike(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Spark reads values of this type as they are read here. It has the entries of maps in
    another order, and no nanoseconds.
    """
    if pt.is_dictionary(stored):
        stored = stored.value_type
    if pt.is_struct(stored) and pt.is_struct(wanted):
        return [field.name for field in stored] == [field.name for field in wanted] and all(
            _is_read_alike(one.type, other.type) for one, other in zip(stored, wanted, strict=True)
        )
    if pt.is_list(stored) and pt.is_list(wanted):
        return _is_read_alike(stored.value_type, wanted.value_type)
    if pt.is_timestamp(stored):
        return pt.is_timestamp(wanted) and stored.unit in ("ms", "us")
    if pt.is_large_string(stored):
        stored = pa.string()
    if pt.is_large_binary(stored):
        stored = pa.binary()
    return not pt.is_nested(stored) and bool(stored.equals(wanted))


def _leaves(type_: Type, path: str) -> Iterator[str]:
    """Yield the paths of the columns of Parquet that a type has, as Arrow and Spark write them."""
    if isinstance(type_, Struct):
        for member in type_.members:
            yield from _leaves(member.type, f"{path}.{member.name}")
    elif isinstance(type_, Array):
        yield from _leaves(type_.element, f"{path}.list.element")
    elif isinstance(type_, Map):
        yield from _leaves(type_.value, f"{path}.key_value.value")
    else:
        yield path

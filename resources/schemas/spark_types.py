"""Converts Spark's types of columns to the types of schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.types import write_name

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def type_from_spark(kind: DataType) -> str:
    """Return the text of a type of Spark. Unlike Spark's own text, it quotes names of fields where
    that is needed, so that it can be read again.
    """
    name = kind.typeName()
    if name == "array":
        return f"array<{type_from_spark(kind.elementType)}>"  # type: ignore[attr-defined]
    if name == "map":
        key = type_from_spark(kind.keyType)  # type: ignore[attr-defined]
        return f"map<{key},{type_from_spark(kind.valueType)}>"  # type: ignore[attr-defined]
    if name == "struct":
        members = []
        for field in kind.fields:  # type: ignore[attr-defined]
            members.append(f"{write_name(field.name)}:{type_from_spark(field.dataType)}")
        return f"struct<{','.join(members)}>"
    return kind.simpleString()


def types_from_spark(schema: StructType) -> dict[str, str]:
    """Return the text of the type of each column."""
    return {field.name: type_from_spark(field.dataType) for field in schema.fields}

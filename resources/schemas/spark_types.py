"""Converts Spark's types of columns to the types of schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.types import Array, Map, Member, Simple, Struct, Type

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def type_from_spark(kind: DataType) -> str:
    """Return the text of a type of Spark. Unlike Spark's own text, it quotes names of fields where
    that is needed, so that it can be read again.
    """
    return str(tree_from_spark(kind))


def tree_from_spark(kind: DataType) -> Type:
    """Return a type of Spark as a tree. A type that no schema may have, such as `void` or a map
    whose keys are numbers, is a simple one with its text as name.
    """
    name = kind.typeName()
    if name == "array":
        return Array(tree_from_spark(kind.elementType))  # type: ignore[attr-defined]
    if name == "struct":
        members = []
        for field in kind.fields:  # type: ignore[attr-defined]
            members.append(Member(field.name, tree_from_spark(field.dataType)))
        return Struct(tuple(members))
    if name != "map":
        return Simple(kind.simpleString())
    value = tree_from_spark(kind.valueType)  # type: ignore[attr-defined]
    key = type_from_spark(kind.keyType)  # type: ignore[attr-defined]
    if key == "string":
        return Map(value)
    return Simple(f"map<{key},{value}>")


def types_from_spark(schema: StructType) -> dict[str, str]:
    """Return the text of the type of each column."""
    return {field.name: type_from_spark(field.dataType) for field in schema.fields}

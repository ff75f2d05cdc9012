"""Converts Spark's types of columns to the types of schemas, and compares both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    write_name,
)

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


def find_frame_mismatch(given: Type, declared: Type, path: str) -> tuple[str, str, str] | None:
    """Return the path, the type and the declared type of the first part of a Spark frame's column
    that has another type than the declared one; None if there is none.

    Integers may be narrower, members of structs may be missing, and a column without values has
    every type.
    """
    if given == declared or given == Simple("void"):
        return None
    if isinstance(given, Struct) and isinstance(declared, Struct):
        return _find_member_mismatch(given, declared, path)
    if isinstance(given, Array) and isinstance(declared, Array):
        return find_frame_mismatch(given.element, declared.element, f"{path}[]")
    if isinstance(given, Map) and isinstance(declared, Map):
        return find_frame_mismatch(given.value, declared.value, f"{path}[*]")
    if isinstance(given, Simple) and isinstance(declared, Simple):
        names = (given.name, declared.name)
        both = set(names) <= set(_INTEGERS)
        if both and _INTEGERS.index(names[0]) < _INTEGERS.index(names[1]):
            return None
    return path, str(given), str(declared)


_INTEGERS = ("tinyint", "smallint", "int", "bigint")


def _find_member_mismatch(
    given: Struct, declared: Struct, path: str
) -> tuple[str, str, str] | None:
    seen = set()
    for member in given.members:
        inner = f"{path}.{write_name(member.name)}"
        wanted = declared.member(member.name)
        if wanted is None or member.name in seen:
            return inner, str(member.type), f"only {', '.join(m.name for m in declared.members)}"
        seen.add(member.name)
        found = find_frame_mismatch(member.type, wanted.type, inner)
        if found is not None:
            return found
    return None

"""Compares types of columns with those of an Iceberg table, at every depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    parse_type,
    write_name,
)

if TYPE_CHECKING:
    from pyiceberg.types import IcebergType
    from pyiceberg.types import StructType as IcebergStruct

_TYPES = {"tinyint": "int", "smallint": "int", "bigint": "long", "timestamp": "timestamptz"}


def missing_fields(kind: str, theirs: IcebergType, path: str) -> Iterator[str]:
    """Yield the fields within an Iceberg type that structs of a column's type lack, with their
    paths. Parts whose types differ in kind have none.
    """
    for struct_path, mine, struct in _struct_pairs(parse_type(kind), theirs, path):
        for field in struct.fields:
            if mine.member(field.name) is None:
                yield f"{struct_path}.{write_name(field.name)} ({field.field_type})"


def type_differences(kind: str, theirs: IcebergType, path: str) -> Iterator[str]:
    """Yield how a column's type differs from an Iceberg type, with the path of each difference.
    Structs may differ in which fields they have.
    """
    yield from _differences(parse_type(kind), theirs, path)


def _struct_pairs(
    mine: Type, theirs: IcebergType, path: str
) -> Iterator[tuple[str, Struct, IcebergStruct]]:
    """Yield (path, our struct, Iceberg's struct) for all structs that two types have in the same
    place.
    """
    from pyiceberg.types import StructType

    if isinstance(mine, Struct) and isinstance(theirs, StructType):
        yield path, mine, theirs
    for part_path, part, other in _common_parts(mine, theirs, path) or ():
        yield from _struct_pairs(part, other, part_path)


def _differences(mine: Type, theirs: IcebergType, path: str) -> Iterator[str]:
    """Yield how a type differs from an Iceberg type, with the path of each difference: where they
    are not both arrays, maps or structs, they must be the same simple type.
    """
    parts = _common_parts(mine, theirs, path)
    if parts is None:
        if not isinstance(mine, Simple) or _simple_name(mine) != str(theirs):
            yield f"{path} is {_describe(mine)}, expected {theirs}"
        return
    for part_path, part, other in parts:
        yield from _differences(part, other, part_path)


def _common_parts(
    mine: Type, theirs: IcebergType, path: str
) -> list[tuple[str, Type, IcebergType]] | None:
    """Return the parts that both types have, with their paths; None unless both are arrays, maps
    or structs. Keys of maps are no parts: a map whose keys are no texts has nothing in common.
    """
    from pyiceberg.types import ListType, MapType, StringType, StructType

    if isinstance(mine, Array) and isinstance(theirs, ListType):
        return [(f"{path}[]", mine.element, theirs.element_type)]
    if isinstance(mine, Map) and isinstance(theirs, MapType):
        if theirs.key_type != StringType():
            return None
        return [(f"{path}[*]", mine.value, theirs.value_type)]
    if not isinstance(mine, Struct) or not isinstance(theirs, StructType):
        return None
    parts = []
    for field in theirs.fields:
        member = mine.member(field.name)
        if member is not None:
            parts.append((f"{path}.{write_name(field.name)}", member.type, field.field_type))
    return parts


def _describe(mine: Type) -> str:
    """Return a type as Iceberg would name it, if it is a simple one."""
    if isinstance(mine, Simple):
        return _simple_name(mine)
    return str(mine)


def _simple_name(mine: Simple) -> str:
    """Return Iceberg's name of a simple type; Iceberg has no integers shorter than `int`."""
    return _TYPES.get(mine.name, mine.name.replace(",", ", "))

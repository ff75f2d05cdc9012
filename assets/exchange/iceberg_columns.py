"""How the columns of an Iceberg table follow those of a dataset or stream: by field ids.

The table's name mapping has, for each field id, the name that files have for the column. A column
with that stored name is the same column, whatever its name is: it is renamed in the table. A new
column under the name of a dropped one is a new field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.schemas.schema import (
    Field,
    Schema,
    Steps,
    StoredNames,
    schema_struct,
    sorted_names,
)
from dagster_adjunct.resources.schemas.types import Array, Map, Member, Simple, Struct, Type
from dagster_adjunct.resources.schemas.version_columns import NamedColumns

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.name_mapping import MappedField, NameMapping
    from pyiceberg.types import IcebergType, NestedField

Path = tuple[str, ...]
"""The names of a field and of all that it is within, in the table, from the outermost to its own;
a list's element is "element", a map's value "value".
"""


def stored_names_by_id(metadata: TableMetadata) -> dict[int, str]:
    """Return the names that files have for the fields of a table, by field id."""
    mapping = metadata.name_mapping()
    names: dict[int, str] = {}
    if mapping is not None:
        _collect_ids(mapping.root, names)
    return names


def _collect_ids(fields: Iterable[MappedField], names: dict[int, str]) -> None:
    """Add the names that files have for these fields, and those within them, to `names`."""
    for field in fields:
        if field.field_id is not None and field.names:
            names[field.field_id] = field.names[0]
        _collect_ids(field.fields, names)


def find_changes(metadata: TableMetadata, mine: NamedColumns) -> dict[Path, str | None]:
    """Return the new names of the table's fields that were renamed, by path, None for those that
    were dropped; {} for a table without a name mapping, which is new.
    """
    if metadata.name_mapping() is None:
        return {}
    names = stored_names_by_id(metadata)
    struct = schema_struct(mine.schema)
    return dict(_changes(metadata.schema().fields, names, struct, mine.names, (), ()))


def _changes(
    fields: Sequence[NestedField],
    stored_names: Mapping[int, str],
    mine: Struct,
    names: StoredNames,
    parent: Steps,
    path: Path,
) -> Iterator[tuple[Path, str | None]]:
    """Yield the changes of these fields, and of those within them, as `find_changes` returns them.

    `stored_names` has the names in files for the table's fields, `names` those for our columns.
    `parent` is where the fields are in files, `path` where they are in the table.
    """
    by_stored_name = {names.of(parent, member.name): member for member in mine.members}
    for field in fields:
        stored = stored_names.get(field.field_id, field.name)
        stored_steps = (*parent, stored)
        member = by_stored_name.get(stored)
        if member is None:
            if stored_steps in names.retired:
                yield (*path, field.name), None
            continue  # a field of the table that we never had
        if member.name != field.name:
            yield (*path, field.name), member.name
        found = _find_structs(field.field_type, member.type, (*path, field.name))
        if found is not None:
            yield from _changes(
                found.fields, stored_names, found.mine, names, stored_steps, found.path
            )


class _StructPair(NamedTuple):
    """The fields of a struct in the table's type, our struct, and its path in the table."""

    fields: Sequence[NestedField]
    mine: Struct
    path: Path


def _find_structs(theirs: IcebergType, mine: Type, path: Path) -> _StructPair | None:
    """Return the structs that two types are, or have as elements of lists and values of maps; None
    without them.
    """
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(theirs, ListType) and isinstance(mine, Array):
        return _find_structs(theirs.element_type, mine.element, (*path, "element"))
    if isinstance(theirs, MapType) and isinstance(mine, Map):
        return _find_structs(theirs.value_type, mine.value, (*path, "value"))
    if isinstance(theirs, StructType) and isinstance(mine, Struct):
        return _StructPair(theirs.fields, mine, path)
    return None


def columns_of_table(metadata: TableMetadata) -> NamedColumns:
    """Return the names of a table's columns with those that files have; their types don't count."""
    stored_names = stored_names_by_id(metadata)
    found: list[tuple[Steps, str]] = []
    struct = _named_struct(metadata.schema().fields, stored_names, (), found)
    fields = tuple(Field(member.name, str(member.type)) for member in struct.members)
    return NamedColumns(Schema(fields), StoredNames(sorted_names(found)))


def _named_struct(
    fields: Sequence[NestedField],
    stored_names: Mapping[int, str],
    parent: Steps,
    found: list[tuple[Steps, str]],
) -> Struct:
    """Return a struct with the names of these fields; add their stored names to `found`.

    `parent` are the stored steps of the struct. `found` gets pairs as `StoredNames.names` has them:
    the stored steps of the parent and then the field's own name; and its stored name.
    """
    members = []
    for field in fields:
        stored = stored_names.get(field.field_id, field.name)
        steps = (*parent, field.name)
        found.append((steps, stored))
        stored_steps = (*parent, stored)
        type_ = _named_type(field.field_type, stored_names, stored_steps, found)
        members.append(Member(field.name, type_))
    return Struct(tuple(members))


def _named_type(
    theirs: IcebergType,
    stored_names: Mapping[int, str],
    stored_steps: Steps,
    found: list[tuple[Steps, str]],
) -> Type:
    """Return the type in which only the names of fields count; every simple type is a string. For
    `found` see `_named_struct`; `stored_steps` are those of the column or field of this type, and
    the elements of lists and values of maps add none.
    """
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(theirs, ListType):
        return Array(_named_type(theirs.element_type, stored_names, stored_steps, found))
    if isinstance(theirs, MapType):
        return Map(_named_type(theirs.value_type, stored_names, stored_steps, found))
    if isinstance(theirs, StructType):
        return _named_struct(theirs.fields, stored_names, stored_steps, found)
    return Simple("string")


def map_names(
    metadata: TableMetadata, before: NameMapping | None, mine: NamedColumns
) -> list[MappedField]:
    """Return the table's mapping of the names in files to fields, which readers need, with those of
    our columns added.

    `metadata` has the new columns, and `before` is the mapping before they were changed. Deleted
    fields stay mapped, for earlier snapshots.
    """
    known: list[MappedField] = [] if before is None else [*before.root]
    return _map_fields(metadata.schema().fields, known, schema_struct(mine.schema), mine.names, ())


def _map_fields(
    fields: Sequence[NestedField],
    known: Sequence[MappedField],
    mine: Struct | None,
    names: StoredNames,
    parent: Steps,
) -> list[MappedField]:
    """Return the mapping of these fields: those that were `known` before, with the names that files
    of the dataset have now.

    A field that is ours has our stored name. Any other one keeps the name that it was known by, or
    else has its own. `mine` is our struct of these fields, None if we have none; `parent` is where
    it is in files.
    """
    from pyiceberg.table.name_mapping import MappedField

    mapped = {field.field_id: field for field in known}
    for field in fields:
        before = mapped.get(field.field_id)
        member = None if mine is None else mine.member(field.name)
        if member is not None:
            stored = names.of(parent, field.name)
        elif before is not None:
            stored = before.names[0]
        else:
            stored = field.name
        my_type = None if member is None else member.type
        inner = _map_type(
            field.field_type,
            [] if before is None else before.fields,
            my_type,
            names,
            (*parent, stored),
        )
        mapped[field.field_id] = MappedField(field_id=field.field_id, names=[stored], fields=inner)
    return [*mapped.values()]


def _map_type(
    theirs: IcebergType,
    known: Sequence[MappedField],
    mine: Type | None,
    names: StoredNames,
    stored_steps: Steps,
) -> list[MappedField]:
    """Return the mapping of the fields, elements or keys and values within a type; [] for a simple
    one. `stored_steps` is where the type is in files.
    """
    from pyiceberg.table.name_mapping import MappedField
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(theirs, StructType):
        return _map_fields(
            theirs.fields, known, mine if isinstance(mine, Struct) else None, names, stored_steps
        )
    known_inner = {field.field_id: field.fields for field in known}
    if isinstance(theirs, ListType):
        element = mine.element if isinstance(mine, Array) else None
        parts = [(theirs.element_id, "element", theirs.element_type, element)]
    elif isinstance(theirs, MapType):
        value = mine.value if isinstance(mine, Map) else None
        parts = [
            (theirs.key_id, "key", theirs.key_type, None),
            (theirs.value_id, "value", theirs.value_type, value),
        ]
    else:
        return []
    mapped = []
    for field_id, name, type_, my_part in parts:
        fields = _map_type(type_, known_inner.get(field_id, []), my_part, names, stored_steps)
        mapped.append(MappedField(field_id=field_id, names=[name], fields=fields))
    return mapped


def fields_in_files(metadata: TableMetadata) -> list[NestedField]:
    """Return the fields of a table under the names that files have."""
    stored_names = stored_names_by_id(metadata)
    return [_stored_field(field, stored_names) for field in metadata.schema().fields]


def _stored_field(field: NestedField, stored_names: Mapping[int, str]) -> NestedField:
    """Return a field under the name that files have for it, and so those within it."""
    from pyiceberg.types import NestedField

    name = stored_names.get(field.field_id, field.name)
    type_: Any = _stored_type(field.field_type, stored_names)
    return NestedField(field.field_id, name, type_, required=field.required)


def _stored_type(theirs: IcebergType, stored_names: Mapping[int, str]) -> IcebergType:
    """Return a type with the names that files have for the fields within it."""
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(theirs, StructType):
        return StructType(*[_stored_field(field, stored_names) for field in theirs.fields])
    if isinstance(theirs, ListType):
        return ListType(
            theirs.element_id,
            _stored_type(theirs.element_type, stored_names),
            element_required=theirs.element_required,
        )
    if isinstance(theirs, MapType):
        return MapType(
            theirs.key_id,
            theirs.key_type,
            theirs.value_id,
            _stored_type(theirs.value_type, stored_names),
            value_required=theirs.value_required,
        )
    return theirs

"""Where the files of a table have a stream's columns: by field ids (Iceberg), or stored names
(Delta).

A declared column is the table's column of that name when it was first admitted. It stays that one,
under the declared name, when the table renames it. Where a file does not have it, it is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field as Documented

from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.arrow_values import cast_to, rename_values
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import (
    SIMPLE_TYPES,
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    decimal_digits,
    is_list,
    parse_type,
    write_name,
)

ARRAY = "array"
MAP = "map"
STRUCT = "struct"
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_FLOATS = ("float", "double")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table, or a part of one.

    `at` is what identifies it in files: its field id, or its stored name. `kind` is "struct" with
    its members as `parts`, "array" with its element, "map" with key and value, or the name of a
    simple type, which may be one that no schema has.
    """

    name: str
    at: int | str
    kind: str
    parts: tuple[TableColumn, ...] = ()


class Located(StoredDocument):
    """What identifies a declared column in files, and the members within it, by declared name. The
    parts of an array or a map are those of its element or value.
    """

    at: int | str
    parts: dict[str, Located] = Documented(default_factory=dict)


def schema_of_table(columns: Sequence[TableColumn], what: str) -> Schema:
    """Return the columns of a table as a schema, without those that begin with "__", as an
    application's output table has them. Raises SchemaMismatchError for types that no schema has.
    """
    fields = []
    for column in columns:
        if column.name.startswith("__"):
            continue
        problem = _undeclarable(column, column.name)
        if problem is not None:
            raise SchemaMismatchError(
                f"{what}: {problem}.",
                "Declare the stream with schema=…, without this column.",
                column=column.name,
            )
        fields.append(Field(column.name, str(_type_of(column))))
    return Schema(tuple(fields))


def locate_columns(
    schema: Schema, columns: Sequence[TableColumn], known: Mapping[str, Located], what: str
) -> dict[str, Located]:
    """Return where files have the columns of a schema; `known` says it of those that were located
    before.

    Raises SchemaMismatchError if the table has no such column, or one of another type.
    """
    located = {}
    for field in schema.fields:
        before = known.get(field.name)
        located[field.name] = _locate(
            field.name, parse_type(field.type), columns, before, _Place(what, field.name)
        )
    return located


@dataclass(frozen=True, slots=True)
class _Place:
    """A declared column, or a part of one, for errors."""

    what: str
    path: str

    def within(self, name: str) -> _Place:
        return _Place(self.what, f"{self.path}.{write_name(name)}")

    def error(self, problem: str, step: str) -> SchemaMismatchError:
        return SchemaMismatchError(
            f"{self.what}: column {self.path!r} {problem}.", step, column=self.path
        )


def _locate(
    name: str, kind: Type, columns: Sequence[TableColumn], known: Located | None, place: _Place
) -> Located:
    """Return where files have the column of this name and type. `columns` are those that the table
    has now; `known` says where it was located before, None at the first time. Raises
    SchemaMismatchError if the table does not have it, or has another one under its name.
    """
    named = next((column for column in columns if column.name == name), None)
    if known is None:
        if named is None:
            there = ", ".join(column.name for column in columns)
            raise place.error(
                f"does not exist in the table, which has {there or 'none'}",
                "Correct the schema of the stream.",
            )
        return _locate_parts(named, kind, None, place)
    if named is not None and named.at != known.at:
        raise place.error(
            "was dropped or renamed in the table, where its name now is that of another column",
            "Declare the stream without the column, and admit once: adjunct stream admit STREAM."
            " Then declare it again, for the values of the new one.",
        )
    column = next((column for column in columns if column.at == known.at), None)
    if column is None:  # the table has dropped it, but older files still have it
        return known
    return _locate_parts(column, kind, known, place)


def _locate_parts(column: TableColumn, kind: Type, known: Located | None, place: _Place) -> Located:
    """Return where files have this column of the table, and the members that the declared type has
    within it. Raises SchemaMismatchError unless the declared type is the table's, or a wider one.
    """
    parts: dict[str, Located] = {}
    if isinstance(kind, Struct) and column.kind == STRUCT:
        parts = _locate_members(column, kind, known, place)
    elif isinstance(kind, Array) and column.kind == ARRAY:
        inner = _Place(place.what, f"{place.path}[]")
        parts = _locate_parts(column.parts[0], kind.element, known, inner).parts
    elif isinstance(kind, Map) and column.kind == MAP and column.parts[0].kind == "string":
        inner = _Place(place.what, f"{place.path}[*]")
        parts = _locate_parts(column.parts[1], kind.value, known, inner).parts
    elif not isinstance(kind, Simple) or not _is_as_wide(kind.name, column.kind):
        found = _describe(column)
        raise place.error(
            f"is declared {kind}, and is {found} in the table", f"Declare it {found}."
        )
    return Located(at=column.at, parts=parts)


def _locate_members(
    column: TableColumn, kind: Struct, known: Located | None, place: _Place
) -> dict[str, Located]:
    """Return where files have the members of a struct, by declared name. Raises
    SchemaMismatchError if two of them are one member in the table.
    """
    before = {} if known is None else known.parts
    parts = {}
    for member in kind.members:
        parts[member.name] = _locate(
            member.name,
            member.type,
            column.parts,
            before.get(member.name),
            place.within(member.name),
        )
    if len({part.at for part in parts.values()}) < len(parts):
        raise place.error(
            f"declares a field of {_describe(column)} twice, by its name and by an earlier one",
            "Declare it once.",
        )
    return parts


def _is_as_wide(declared: str, stored: str) -> bool:
    """Return whether a simple type holds all values of the table's one, as itself."""
    if declared == stored:
        return True
    for order in (_WHOLE, _FLOATS):
        if declared in order and stored in order:
            return order.index(declared) >= order.index(stored)
    wider = decimal_digits(declared)
    narrower = decimal_digits(stored)
    if wider is None or narrower is None:  # one of them is no decimal
        return False
    whole = wider.precision - wider.scale
    return wider.scale >= narrower.scale and whole >= narrower.precision - narrower.scale


def _type_of(column: TableColumn) -> Type:
    """Return the type of a column, of which a simple part may be of a type that no schema has."""
    if column.kind == STRUCT:
        return Struct(tuple(Member(part.name, _type_of(part)) for part in column.parts))
    if column.kind == ARRAY:
        return Array(_type_of(column.parts[0]))
    if column.kind == MAP:
        return Map(_type_of(column.parts[1]))
    return Simple(column.kind)


def _describe(column: TableColumn) -> str:
    return str(_type_of(column))


def _undeclarable(column: TableColumn, path: str) -> str | None:
    """Return why a schema can't have this column, None if it can."""
    if column.kind == MAP and column.parts[0].kind != "string":
        return f"column {path!r} is a map whose keys are {column.parts[0].kind}, expected string"
    if column.kind not in (ARRAY, MAP, STRUCT):
        if column.kind in SIMPLE_TYPES or decimal_digits(column.kind) is not None:
            return None
        return f"column {path!r} is {column.kind}, which streams do not have"
    for part in column.parts:
        problem = _undeclarable(part, f"{path}.{part.name}")
        if problem is not None:
            return problem
    return None


# -- files


def arrow_parts(kind: pa.DataType) -> tuple[str, list[pa.Field]]:
    """Return the kind of an Arrow type, as `TableColumn` has it, and the fields of its parts; for a
    simple type its text, and no parts.
    """
    from pyarrow import types

    if types.is_struct(kind):
        return STRUCT, list(kind)
    if types.is_map(kind):
        return MAP, [kind.key_field, kind.item_field]
    if types.is_list(kind) or types.is_large_list(kind):
        return ARRAY, [kind.value_field]
    return str(kind), []


def select_columns(
    table: pa.Table,
    columns: Sequence[TableColumn],
    located: Mapping[str, Located],
    schema: Schema,
    constants: Mapping[str, pa.Array],
) -> pa.Table:
    """Return the columns of a schema from records of a file, in the declared types.

    The first columns of `table` are `columns`, in this order. A column of the schema is one of the
    `constants`, which are arrays of one value; else the column of the file that `located` finds;
    else it is null. Raises ArrowInvalid for a value that is not of the declared type.
    """
    numbers = {column.at: number for number, column in enumerate(columns)}
    arrays = []
    for field in schema.to_arrow():
        where = located[field.name]
        number = numbers.get(where.at)
        if field.name in constants:
            arrays.append(pa.repeat(constants[field.name][0], table.num_rows))
            continue
        if number is None:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        values = table.column(number)
        wanted = _relabel(values.type, columns[number], where)
        arrays.append(cast_to(rename_values(values, wanted), field.type))
    if not arrays:
        return table.select([])  # which keeps the number of records
    return pa.table(arrays, schema=schema.to_arrow())


def _relabel(kind: pa.DataType, column: TableColumn, where: Located) -> pa.DataType:
    """Return an Arrow type whose members have the declared names."""
    if column.kind == STRUCT:
        return pa.struct(list(_relabel_members(kind, column, where)))
    if column.kind == ARRAY:
        element = _relabel(kind.value_type, column.parts[0], where)
        inner = kind.value_field.with_type(element)
        return pa.large_list(inner) if _is_large(kind) else pa.list_(inner)
    if column.kind == MAP:
        item = _relabel(kind.item_type, column.parts[1], where)
        return pa.map_(kind.key_field, kind.item_field.with_type(item))
    return kind


def _is_large(kind: pa.DataType) -> bool:
    return bool(is_list(kind) and kind.equals(pa.large_list(kind.value_field)))


def _relabel_members(kind: pa.DataType, column: TableColumn, where: Located) -> Iterator[pa.Field]:
    """Yield the members of a struct of a file, in its order, under their declared names."""
    names = {located.at: name for name, located in where.parts.items()}
    for number, (field, part) in enumerate(zip(kind, column.parts, strict=True)):
        name = names.get(part.at)
        if name is None:  # not declared: it must not have the declared name of another member
            yield field.with_name(f"__unknown_{number}")
        else:
            inner = _relabel(field.type, part, where.parts[name])
            yield pa.field(name, inner, field.nullable)

"""Casts Arrow values to the types of columns without loss, at every depth, and builds arrays of
nested values.

The entries of maps are sorted by their keys as UTF-8, so that two maps are equal if they are stored
alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc, pt
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    arrow_type,
    expected_range,
    parse_type,
    write_name,
)

_KEYS_RULE = "expected each key of a map once, and no null key"


def cast_values(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Return a column cast to the type with this text. Raises ArrowInvalid for a value that would
    change, except in rounding.
    """
    return cast_to(column, arrow_type(kind))


def cast_to(column: pa.ChunkedArray, to: pa.DataType) -> pa.ChunkedArray:
    """Return a column cast to the Arrow type of a schema's column. Raises ArrowInvalid for a value
    that would change, except in rounding.
    """
    if not pt.is_nested(to):
        return _cast_simple(column, to)
    return pa.chunked_array([_cast(chunk, to) for chunk in column.chunks], to)


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of this schema, which it has in this order, cast to its
    types.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for column, field in zip(table.columns, schema, strict=True):
        columns.append(column if column.type == field.type else cast_to(column, field.type))
    return pa.table(columns, schema=schema)


def rename_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the names of this schema, at every depth; its columns, and the members
    of structs, have the same order and types.
    """
    columns = []
    for column, field in zip(table.columns, schema, strict=True):
        columns.append(rename_values(column, field.type))
    return pa.table(columns, schema=schema)


def rename_values(column: pa.ChunkedArray, to: pa.DataType) -> pa.ChunkedArray:
    """Return a column as one of a type that differs only in the names of members."""
    if column.type == to:
        return column
    return pa.chunked_array([chunk.view(to) for chunk in column.chunks], to)


def _cast_simple(values: Any, to: pa.DataType) -> Any:
    """Return values of a simple type cast to another. Raises ArrowInvalid for a value that would
    change.
    """
    fitted = values.cast(to, safe=True)
    if pt.is_float32(to) and pt.is_float64(values.type):
        beyond = pc.and_(pc.is_inf(fitted), pc.is_finite(values))
        if pc.any(beyond).as_py():
            raise pa.ArrowInvalid(f"{values.filter(beyond)[0]} is too large for 32 bits")
    return fitted


def _cast(values: pa.Array, to: pa.DataType) -> pa.Array:
    """Return an array cast to a type, at every depth. Raises ArrowInvalid for a value that would
    change, except in rounding.
    """
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not pt.is_nested(to):
        return _cast_simple(values, to)
    if pt.is_null(values.type):
        return pa.nulls(len(values), to)
    if pt.is_struct(to):
        return _cast_structs(values, to)
    values = as_lists(values)
    lengths = pc.list_value_length(values)
    elements = pc.list_flatten(values)
    if pt.is_list(to):
        return build_lists(lengths, _cast(elements, to.value_type), to)
    key, item = elements.flatten()
    return build_maps(lengths, _cast(key, pa.string()), _cast(item, to.item_type))


def _cast_structs(values: pa.Array, to: pa.DataType) -> pa.Array:
    """Return structs cast to another struct's type: members are matched by name, missing ones are
    null.
    """
    given = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
    parts = []
    for field in to:
        if field.name in given:
            parts.append(_cast(given[field.name], field.type))
        else:
            parts.append(pa.nulls(len(values), field.type))
    return pa.StructArray.from_arrays(parts, fields=list(to), mask=values.is_null())


def as_lists(values: pa.Array) -> pa.Array:
    """Return maps as lists of their entries, and other lists in a form that Arrow's list functions
    take.
    """
    kind = values.type
    if pt.is_map(kind):
        return values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pt.is_list(kind) or pt.is_large_list(kind):
        return values
    return values.cast(pa.large_list(kind.value_field))


def map_parts(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the keys and the values of the entries of maps, one map after the other."""
    keys, values = pc.list_flatten(as_lists(column)).flatten()
    return keys, values


def split_parts(column: pa.Array, parts: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the parts that belong to each array or map of a column, none for null."""
    start = 0
    for length in pc.fill_null(pc.list_value_length(as_lists(column)), 0).to_pylist():
        yield parts[start : start + length]
        start += length


def with_nulls(made: list[Any], column: pa.Array, null: Any) -> list[Any]:
    """Return what was made of the values of a column, with `null` for each null."""
    if not column.null_count:
        return made
    valid = column.is_valid().to_pylist()
    return [one if is_valid else null for one, is_valid in zip(made, valid, strict=True)]


def build_lists(lengths: pa.Array, elements: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return lists of these lengths, one after the other in `elements`; a length of null makes a
    null.
    """
    return pa.ListArray.from_arrays(_offsets(lengths), elements, type=kind, mask=lengths.is_null())


def build_maps(lengths: pa.Array, keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return maps of these numbers of entries, one after the other in `keys` and `values`, sorted
    by key; a length of null makes a null.

    Raises ArrowInvalid if a key is null or occurs twice in a map.
    """
    if keys.null_count:
        raise pa.ArrowInvalid(f"a key is null: {_KEYS_RULE}")
    offsets = _offsets(lengths)
    if len(keys) > 1:
        keys, values = _sort_entries(np.diff(np.asarray(offsets)), keys, values)
    return pa.MapArray.from_arrays(offsets, keys, values, mask=lengths.is_null())


def _offsets(lengths: pa.Array) -> pa.Array:
    """Return where lists of these lengths begin if they follow each other, and where the last one
    ends.
    """
    ends = np.cumsum(np.asarray(pc.fill_null(lengths, 0)), dtype=np.int32)
    return pa.array(np.concatenate([np.zeros(1, np.int32), ends]), pa.int32())


def _sort_entries(counts: Any, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return keys and values sorted by key within each map; `counts` are the maps' numbers of
    entries. Raises ArrowInvalid if a key occurs twice in a map.
    """
    maps = np.repeat(np.arange(len(counts)), counts)
    if not _are_sorted(maps, keys):
        entries = pa.table({"map": maps, "key": keys})
        order = pc.sort_indices(entries, [("map", "ascending"), ("key", "ascending")])
        keys = keys.take(order)
        values = values.take(order)
        if not _are_sorted(maps, keys):
            raise pa.ArrowInvalid(f"a key occurs twice: {_KEYS_RULE}")
    return keys, values


def _are_sorted(maps: Any, keys: pa.Array) -> bool:
    """Whether the keys of each map ascend, and none occurs twice."""
    ascends = np.asarray(pc.greater(keys[1:], keys[:-1]))
    return bool(np.all(ascends | (maps[1:] != maps[:-1])))


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that does not fit its declared type: its path from the column, the value, the text
    of the declared type, and which values that type holds.
    """

    path: str
    value: pa.Scalar
    kind: str
    expected: str


def find_misfit(value: pa.Array, kind: str, path: str) -> Misfit:
    """Return the part of a value, given as an array of one, that can't be cast to the type with
    this text.
    """
    found = _find_misfit(value, parse_type(kind), path)
    return found or Misfit(path, value[0], kind, expected_range(kind))


def _find_misfit(values: pa.Array, type_: Type, path: str) -> Misfit | None:
    """Return the first part of these values that can't be cast to the type; None without one."""
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pt.is_null(values.type):
        return None
    if isinstance(type_, Simple):
        return _find_simple_misfit(values, type_, path)
    if isinstance(type_, Struct):
        return _find_member_misfit(values, type_, path)
    lists = as_lists(values)
    elements = pc.list_flatten(lists)
    if isinstance(type_, Array):
        return _find_misfit(elements, type_.element, f"{path}[]")
    key, item = elements.flatten()
    found = _find_misfit(item, type_.value, f"{path}[*]")
    if found is None and _has_bad_keys(lists, key):
        return Misfit(path, values[0], str(type_), _KEYS_RULE)
    return found


def _find_simple_misfit(values: pa.Array, type_: Simple, path: str) -> Misfit | None:
    """Return the first of these simple values that can't be cast to the type; None without one."""
    to = arrow_type(type_.name)
    for place in range(len(values)):
        try:
            _cast_simple(values.slice(place, 1), to)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return Misfit(path, values[place], type_.name, expected_range(type_.name))
    return None


def _find_member_misfit(values: pa.Array, type_: Struct, path: str) -> Misfit | None:
    """Return the first part of these structs that can't be cast to the type; None without one."""
    for field, part in zip(values.type, values.flatten(), strict=True):
        member = type_.member(field.name)
        if member is not None:
            found = _find_misfit(part, member.type, f"{path}.{write_name(field.name)}")
            if found is not None:
                return found
    return None


def _has_bad_keys(lists: pa.Array, keys: pa.Array) -> bool:
    """Whether a map, given as the list of its entries, has a key that is null or occurs twice."""
    try:
        build_maps(pc.list_value_length(lists), keys, pa.nulls(len(keys)))
    except pa.ArrowInvalid:
        return True
    return False


def length_array(parts: Sequence[Sequence[object] | None]) -> pa.Array:
    """Return the lengths of lists, null for None."""
    return pa.array([None if part is None else len(part) for part in parts], pa.int32())

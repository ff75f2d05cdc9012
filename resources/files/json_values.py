"""Values of JSON lines as columns, at every depth: as Arrow has parsed them, or one by one.

Structs and maps are objects, arrays are lists. Numbers are converted exactly; dates and timestamps
are texts, binary values base64.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc, pt
from dagster_adjunct.resources.schemas.arrow_values import build_lists, build_maps, length_array
from dagster_adjunct.resources.schemas.texts import TextMisfit, convert_texts
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    arrow_type,
    decimal_digits,
    nested_types,
    write_name,
)

_TEXTS = ("date", "timestamp", "binary")


class Number(str):
    """A number as it is written in JSON."""


JSON_KINDS = {
    Number: "a number",
    str: "a text",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
}
# The kinds of JSON values with which the values of a type are written.
_KINDS_OF_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint", "float", "double"), (Number,)),
    **dict.fromkeys(("string", *_TEXTS), (str,)),
    "decimal": (Number, str),
    "boolean": (bool,),
}


class JsonMisfit(ValueError):
    """A JSON value is not of its declared type, whose text is `kind`: its row (from 0), the path
    to it from the value of the column, and the reason, which shows it. Without `kind`, nothing is
    declared there.
    """

    def __init__(self, row: int, path: str, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.path = path
        self.kind = kind
        self.reason = reason

    def within(self, step: str, row: int) -> JsonMisfit:
        """Return the misfit as that of the value of this row, of which it is a part."""
        return JsonMisfit(row, step + self.path, self.kind, self.reason)


_MOST_KEYS = 256
_NULL = re.compile(rb":\s*null")


class MapKeys:
    """The keys of the maps in a file so far, by the path of the map: Arrow's parser reads objects
    only as structs with known members.
    """

    def __init__(self, types: Iterable[Type]) -> None:
        parts = chain.from_iterable(map(nested_types, types))
        self.has_maps = any(isinstance(part, Map) for _, part in parts)
        self.too_many = False
        """Whether a map has so many keys that structs do not pay off."""
        self._of_path: dict[str, set[str]] = {}

    def at(self, path: str) -> list[str]:
        """Return the keys of the map at this path, in the order of entries."""
        return sorted(self._of_path.get(path, ()), key=str.encode)

    def learn(self, type_: Type, parsed: pa.DataType, path: str) -> None:
        """Add the keys in a type that Arrow has inferred from values of `type_`. Parts that it has
        inferred as another kind of type, such as nulls, have no keys.
        """
        if isinstance(type_, Array):
            if pt.is_list(parsed):
                self.learn(type_.element, parsed.value_type, f"{path}[]")
        elif pt.is_struct(parsed) and isinstance(type_, Struct):
            for field in parsed:
                member = type_.member(field.name)
                if member is not None:
                    self.learn(member.type, field.type, f"{path}.{field.name}")
        elif pt.is_struct(parsed) and isinstance(type_, Map):
            known = self._of_path.setdefault(path, set())
            for field in parsed:
                known.add(field.name)
                self.learn(type_.value, field.type, f"{path}[*]")
            self.too_many = self.too_many or len(known) > _MOST_KEYS

    def may_be_null(self, block: bytes) -> bool:
        """Whether an entry of a map in these lines may be null: then a struct does not tell
        whether it has the entry.
        """
        if not self.has_maps or b"null" not in block or not _NULL.search(block):
            return False
        keys = {key.encode() for keys in self._of_path.values() for key in keys}
        named = b"|".join(map(re.escape, keys))
        # A key may also be written with escapes.
        nulls = rb'"(?:' + named + rb')"\s*:\s*null|\\.(?:[^"\\]|\\.)*"\s*:\s*null'
        return re.search(nulls, block) is not None


def parsed_type(type_: Type, keys: MapKeys, path: str) -> pa.DataType:
    """Return the Arrow type with which values of this type are parsed: none is changed while it is
    parsed. Maps are structs of the known `keys`; `path` is that of the values.
    """
    if isinstance(type_, Array):
        return pa.list_(parsed_type(type_.element, keys, f"{path}[]"))
    if isinstance(type_, Struct):
        members = []
        for member in type_.members:
            members.append((member.name, parsed_type(member.type, keys, f"{path}.{member.name}")))
        return pa.struct(members)
    if isinstance(type_, Map):
        value = parsed_type(type_.value, keys, f"{path}[*]")
        return pa.struct([(key, value) for key in keys.at(path)])
    kind = str(type_)
    if kind in _TEXTS:
        return pa.string()
    # Arrow rescales a number without a check that it fits the declared digits: in 256 bits it does
    # not overflow.
    digits = decimal_digits(kind)
    if digits is None:
        return arrow_type(kind)
    return pa.decimal256(*digits)


def convert_parsed(values: pa.Array, type_: Type) -> pa.Array:
    """Return values that were parsed with `parsed_type` as values of the type. Raises ArrowInvalid
    or TextMisfit for a value that is not of it.
    """
    if isinstance(type_, Array):
        elements = convert_parsed(pc.list_flatten(values), type_.element)
        return build_lists(pc.list_value_length(values), elements, arrow_type(str(type_)))
    if isinstance(type_, Struct):
        parts = []
        for part, member in zip(values.flatten(), type_.members, strict=True):
            parts.append(convert_parsed(part, member.type))
        fields = list(arrow_type(str(type_)))
        return pa.StructArray.from_arrays(parts, fields=fields, mask=values.is_null())
    if isinstance(type_, Map):
        return _maps_from_structs(values, type_)
    kind = str(type_)
    if kind in _TEXTS:
        values.validate(full=True)  # the parser accepts strings that are not UTF-8
        return convert_texts(values, kind)
    if pt.is_floating(values.type) and pc.any(pc.is_inf(values)).as_py():
        # A number that is too large.
        raise pa.ArrowInvalid("infinite")
    return values.cast(arrow_type(kind))


def _maps_from_structs(values: pa.Array, type_: Map) -> pa.Array:
    """Return structs whose members are the keys, sorted, as maps of those that are not null."""
    names = [field.name for field in values.type]
    parts = [convert_parsed(part, type_.value) for part in values.flatten()]
    if not parts:  # no keys are known: all maps are empty
        lengths = pc.if_else(values.is_valid(), 0, pa.scalar(None, pa.int32()))
        return build_maps(
            lengths, pa.nulls(0, pa.string()), pa.nulls(0, arrow_type(str(type_.value)))
        )
    # By row and key: whether the map of the row has the key.
    has_key = np.stack([np.asarray(part.is_valid()) for part in parts], axis=1)
    rows, places = np.nonzero(has_key)
    keys = pa.array(names, pa.string()).take(pa.array(places))
    # One after the other, each part has a value for every row.
    items = pa.concat_arrays(parts).take(pa.array(places * len(values) + rows))
    lengths = pa.array(has_key.sum(axis=1, dtype=np.int32), mask=np.asarray(values.is_null()))
    return build_maps(lengths, keys, items)


def column_from_json(values: Sequence[Any], type_: Type) -> pa.Array:
    """Return decoded JSON values, with numbers as `Number`, as an array of a type.

    A field that an object lacks is null. Raises JsonMisfit for a value that is not of the type, and
    for a field that it does not declare.
    """
    if isinstance(type_, Array):
        _check_kinds(values, (list,), type_)
        elements = _column_within("[]", values, type_.element, lambda value: value)
        return build_lists(length_array(values), elements, arrow_type(str(type_)))
    if isinstance(type_, Map):
        _check_kinds(values, (dict,), type_)
        items = _column_within("[*]", values, type_.value, lambda value: value.values())
        keys = list(chain.from_iterable(filter(None, values)))
        for row, value in enumerate(values):
            if value and not all(map(_is_unicode, value)):
                raise JsonMisfit(row, "", str(type_), "a key has half of a surrogate pair")
        return build_maps(length_array(values), pa.array(keys, pa.string()), items)
    if isinstance(type_, Struct):
        return _struct_column(values, type_)
    texts = _simple_texts(values, type_)
    try:
        return convert_texts(texts, type_.name)
    except TextMisfit as misfit:
        raise JsonMisfit(misfit.row, "", type_.name, misfit.reason) from misfit


def _column_within(
    step: str, values: Sequence[Any], type_: Type, parts_of: Callable[[Any], Iterable[Any]]
) -> pa.Array:
    """Return the parts of all values, one after the other, as an array; `step` is what their
    path adds.
    """
    parts = list(chain.from_iterable(parts_of(value) for value in values if value))
    try:
        return column_from_json(parts, type_)
    except JsonMisfit as misfit:
        ends = list(accumulate(len(value) if value else 0 for value in values))
        row = bisect_right(ends, misfit.row)
        raise misfit.within(step, row) from misfit


def _struct_column(values: Sequence[Any], type_: Struct) -> pa.Array:
    """Return objects as an array of structs. Raises JsonMisfit."""
    _check_kinds(values, (dict,), type_)
    _check_declared(values, type_)
    parts = []
    for member in type_.members:
        inner = [None if value is None else value.get(member.name) for value in values]
        try:
            parts.append(column_from_json(inner, member.type))
        except JsonMisfit as misfit:
            raise misfit.within(f".{write_name(member.name)}", misfit.row) from misfit
    fields = list(arrow_type(str(type_)))
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(parts, fields=fields, mask=missing)


def _check_declared(values: Sequence[Any], type_: Struct) -> None:
    """Raise JsonMisfit for an object with a field that the struct does not declare."""
    declared = {member.name for member in type_.members}
    for row, value in enumerate(values):
        if value and not value.keys() <= declared:
            unknown = next(name for name in value if name not in declared)
            names = ", ".join(member.name for member in type_.members)
            reason = f"this field is not declared: expected {names}"
            raise JsonMisfit(row, f".{write_name(unknown)}", "", reason)


def _check_kinds(values: Sequence[Any], expected: tuple[type, ...], type_: Type) -> None:
    """Raise JsonMisfit for a value that is neither None nor of one of these Python types."""
    for row, value in enumerate(values):
        if value is not None and type(value) not in expected:
            found = f"the number {value}" if type(value) is Number else JSON_KINDS[type(value)]
            kinds = " or ".join(JSON_KINDS[kind] for kind in expected)
            raise JsonMisfit(row, "", str(type_), f"it is {found}, expected {kinds}")


def _simple_texts(values: Sequence[Any], type_: Simple) -> pa.Array:
    """Return the texts of simple values for `convert_texts`. Raises JsonMisfit for another kind
    of JSON value.
    """
    _check_kinds(values, _KINDS_OF_TYPES[type_.name.partition("(")[0]], type_)
    texts: list[str | None] = []
    for row, value in enumerate(values):
        text = None
        if value is not None:
            text = str(value)
        if text is not None and not _is_unicode(text):
            raise JsonMisfit(row, "", type_.name, "the text has half of a surrogate pair")
        texts.append(text)
    return pa.array(texts, pa.string())


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

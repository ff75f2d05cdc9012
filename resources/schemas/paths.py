"""Paths, which name a value inside a column of structs: `customer.address.city`.

A name that a column has means this column, even if it contains dots. Otherwise its parts are those
of a path, in backticks where they contain dots: `` `shipped.to`.city ``. A path goes through
structs only; it means null where a struct on its way is null.

Where a path becomes a column, this has the name of the last step, or another one after "as":
`customer.address.city as home`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Struct,
    Type,
    is_nested,
    parse_type,
    write_name,
)
from dagster_adjunct.resources.validation import validated

_STEP = re.compile(r"`(?:[^`]|``)+`|[^`.]+")
_ALIASED = re.compile(
    r"(?P<source>.*[^\s])\s+as\s+(?P<name>`(?:[^`]|``)+`|\w+)", re.IGNORECASE | re.DOTALL
)


WHERE_COLUMNS_ARE_MADE = (
    "in an application by .with_columns(…), for a dataset by its extractor, else where the records"
    " are made"
)


@dataclass(frozen=True, slots=True)
class Path:
    """A value inside a column: the `steps` to it, at first the name of the column, and its type."""

    steps: tuple[str, ...]
    type: str

    @property
    def column(self) -> str:
        """The name of the column that the value is in."""
        return self.steps[0]

    @property
    def name(self) -> str:
        """The name that a column with only this value has by default: the last step."""
        return self.steps[-1]

    @property
    def expression(self) -> str:
        """The Spark SQL expression of the value."""
        return path_expression(self.steps)

    def __str__(self) -> str:
        return write_path(self.steps)


def steps_among(name: str, names: Container[str]) -> tuple[str, ...]:
    """Return the steps to the value that a name means in records with the columns `names`: the name
    itself if it is that of a column, or no path.
    """
    steps = split_path(name)
    if len(steps) < 2 or name in names:
        return (name,)
    return steps


def value_name(name: str, names: Collection[str]) -> str:
    """Return the name of a column with the value that a name means: the last step of a path;
    `names` are those of the columns.
    """
    return steps_among(name, names)[-1]


def flat_name(name: str) -> str:
    """Return a name for a column with the value that a path names: "customer_id" for
    "customer.id"; the name of a column unchanged.
    """
    return "_".join(split_path(name)) or name


@validated
def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value that a name, or a path, means in a record; None within a null struct.

    Raises SchemaMismatchError if the record has no such column or field.
    """
    value: Any = record
    for step in steps_among(name, record):
        if value is None:
            return None
        if not isinstance(value, Mapping) or step not in value:
            problem = f"a record has no {name!r}: its columns are {', '.join(record) or 'none'}."
            raise SchemaMismatchError(problem, "Check the name.", column=name)
        value = value[step]
    return value


def missing_part(record: Mapping[str, Any], name: str, names: Container[str]) -> str | None:
    """Return the first part of a path that a record lacks: "customer" or "customer.id"; None if it
    has all parts, or a null struct on the way.

    `names` are the columns that such records may have.
    """
    steps = steps_among(name, names)
    value: Any = record
    for length, step in enumerate(steps, 1):
        if not isinstance(value, Mapping):
            return None
        if step not in value:
            return step if length == 1 else write_path(steps[:length])
        value = value[step]
    return None


def nest_value(name: str, names: Container[str], value: object) -> dict[str, Any]:
    """Return the record, or the part of one, in which a name or path means this value:
    {"customer": {"id": value}}.
    """
    for step in reversed(steps_among(name, names)):
        value = {step: value}
    return cast("dict[str, Any]", value)


def column_of(name: str, names: Collection[str]) -> str:
    """Return the column that a name means, or that its path begins with; `names` are those of the
    columns.
    """
    return steps_among(name, names)[0]


def read_values(records: pa.Table, name: str) -> pa.ChunkedArray:
    """Return the values of the column of this name, or those that the name is the path of."""
    return read_path(records, steps_among(name, records.column_names))


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path that becomes a column: the `steps` to the value, and the `name` of the column."""

    name: str
    steps: tuple[str, ...]

    @property
    def renames(self) -> bool:
        """Whether it is anything but a column under its own name."""
        return self.steps != (self.name,)

    def __str__(self) -> str:
        path = write_path(self.steps)
        if self.name == self.steps[-1]:
            return path
        return f"{path} as {write_name(self.name)}"


def read_named_path(text: str, columns: Container[str] = ()) -> NamedPath:
    """Return the column that a text means where it becomes one: "customer.id" is stored as "id",
    "customer.id as customer" as "customer".

    The name of one of these `columns` means this column. A text that is no path is a plain name.
    """
    if text in columns:
        return NamedPath(text, (text,))
    source, name = split_alias(text)
    steps = split_path(source) or (source,)
    return NamedPath(steps[-1] if name is None else name, steps)


def path_expression(steps: Sequence[str]) -> str:
    """Return the Spark SQL expression of the value at these steps."""
    return ".".join(f"`{step.replace('`', '``')}`" for step in steps)


def read_path(records: pa.Table, steps: Sequence[str]) -> pa.ChunkedArray:
    """Return the values at these steps; null where a struct on the way is null."""
    values = records.column(steps[0])
    for step in steps[1:]:
        values = pc.struct_field(values, [step])
    return values


def set_value(
    values: pa.Array, steps: Sequence[str], new: pa.Array, where: pa.BooleanArray
) -> pa.Array:
    """Return the values with those at these steps replaced by the `new` ones, in the rows where
    `where` is true. A null struct on the way becomes a struct, unless the new value is null.
    """
    if not steps:
        return pc.if_else(where, new, values)
    kind = values.type
    members = values.flatten()  # null where the struct is
    place = kind.get_field_index(steps[0])
    members[place] = set_value(members[place], steps[1:], new, where)
    is_null = pc.and_(values.is_null(), pc.invert(pc.and_(where, new.is_valid())))
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return pa.StructArray.from_arrays(members, fields=fields, mask=is_null)


def write_path(steps: Sequence[str]) -> str:
    """Return the text of a path with these steps."""
    return ".".join(map(write_name, steps))


def normal_path(text: str) -> str:
    """Return a path without needless backticks, so that equal paths are equal texts; any other text
    unchanged.
    """
    steps = split_path(text)
    return write_path(steps) if len(steps) > 1 else text


def split_path(text: str) -> tuple[str, ...]:
    """Return the steps of a path, a single one for a plain name; () for a text that is no path."""
    steps = []
    at = 0
    while found := _STEP.match(text, at):
        step = found[0]
        if step.startswith("`"):
            step = step[1:-1].replace("``", "`")
        steps.append(step)
        at = found.end()
        if at == len(text):
            return tuple(steps)
        if text[at] != ".":
            return ()
        at += 1
    return ()


def split_alias(text: str) -> tuple[str, str | None]:
    """Split "customer.id as customer_id" into the path and the name; the name is None without
    "as".
    """
    match = _ALIASED.fullmatch(text.strip())
    if match is None:
        return text, None
    name = match["name"]
    if name.startswith("`"):
        name = name[1:-1].replace("``", "`")
    return match["source"], name


def find_path(name: str, types: Mapping[str, str | None]) -> Path | None:
    """Return the path that a name means among columns of these types.

    None if the name is that of a column, or if there is no such value. Types are None where they
    are unknown.
    """
    if name in types:
        return None
    steps = split_path(name)
    if len(steps) < 2:
        return None
    column_type = types.get(steps[0])
    if column_type is None:
        return None
    type_: Type = parse_type(column_type)
    for step in steps[1:]:
        member = type_.member(step) if isinstance(type_, Struct) else None
        if member is None:
            return None
        type_ = member.type
    return Path(steps, str(type_))


def require_value(name: str, types: Mapping[str, str], what: str) -> Path:
    """Return the path to the simple value that a name means among columns of these types.

    Raises SchemaMismatchError for a missing column or field, for a path through anything but
    structs, and for a value that is nested.
    """
    path = require_path(name, types, what)
    if is_nested(path.type):
        problem = f"{what}: {name!r} is {path.type}: expected a simple value."
        raise SchemaMismatchError(problem, simple_value_advice(str(path), path.type), column=name)
    return path


def require_path(name: str, types: Mapping[str, str], what: str) -> Path:
    """Return the path to the value, simple or nested, that a name means among columns of these
    types: a single step for the name of a column.

    Raises SchemaMismatchError for a missing column or field, and for a path through anything but
    structs; `what` names whose columns these are.
    """
    if name in types:
        steps: tuple[str, ...] = (name,)
    else:
        steps = split_path(name)
    if not steps or steps[0] not in types:
        column = steps[0] if steps else name
        container = container_of(column)
        container_type = parse_type(types[container]) if container in types else None
        if isinstance(container_type, Array | Map):
            raise _elements_error(steps, (container,), container_type, what)
        problem = f"{what} has no column {column!r}: it has {', '.join(types) or 'none'}."
        raise SchemaMismatchError(problem, "Check the name.", column=name)
    type_ = parse_type(types[steps[0]])
    for at, step in enumerate(steps[1:], 1):
        member = type_.member(step) if isinstance(type_, Struct) else None
        if member is None:
            raise _no_member_error(name, steps, at, type_, what)
        type_ = member.type
    return Path(steps, str(type_))


def _no_member_error(
    name: str, steps: Sequence[str], at: int, type_: Type, what: str
) -> SchemaMismatchError:
    """Return the error for a path whose step `at` is not in the value at the steps before it, which
    is of this type.
    """
    if not isinstance(type_, Struct):
        return _no_struct_error(name, steps[:at], type_, what)
    container = container_of(steps[at])
    member = type_.member(container)
    if member is not None and isinstance(member.type, Array | Map):
        return _elements_error(steps, (*steps[:at], container), member.type, what)
    before = write_path(steps[:at])
    fields = ", ".join(write_name(member.name) for member in type_.members)
    problem = (
        f"{what}: the path {name!r} does not exist: {before!r} is {type_}, without a field"
        f" {steps[at]!r}."
    )
    return SchemaMismatchError(problem, f"Name one of its fields: {fields}.", column=name)


def container_of(step: str) -> str:
    """Return the name of the array or map that a step takes an element of: "lines" for "lines[]";
    any other step unchanged.
    """
    return step.partition("[")[0]


def _elements_error(
    steps: Sequence[str], container: Sequence[str], type_: Type, what: str
) -> SchemaMismatchError:
    """Return the error for a path to elements of an array or a map, which is of this type and at
    the steps `container`.
    """
    text = ".".join(steps)  # without the backticks that brackets would need in a name
    return _no_struct_error(text, container, type_, what)


def _no_struct_error(
    name: str, before: Sequence[str], type_: Type, what: str
) -> SchemaMismatchError:
    """Return the error for a path that goes on behind the steps `before`, although the value there
    is of this type, which is no struct.
    """
    value = write_path(before)
    if isinstance(type_, Array | Map):
        step = f"Make the value a column of its own: {WHERE_COLUMNS_ARE_MADE}."
    else:
        step = f"Name {value!r} itself."
    problem = (
        f"{what}: the path {name!r} does not exist: {value!r} is {type_}, and paths go through"
        " structs only."
    )
    return SchemaMismatchError(problem, step, column=name)


def simple_value_advice(
    path: str, kind: str, fits: Callable[[str], bool] = lambda kind: True
) -> str:
    """Return what to do where a simple value is expected, and a path to a value of this nested type
    was given; `fits` says of which types the value may be.
    """
    within = _first_simple(parse_type(kind), fits)
    if within is None:
        return f"Make a simple value of it a column of its own: {WHERE_COLUMNS_ARE_MADE}."
    inner = write_path((*split_path(path), *within))
    return f"Name a simple value within it instead, for example {inner!r}."


def _first_simple(type_: Type, fits: Callable[[str], bool]) -> tuple[str, ...] | None:
    """Return the steps to the first simple value that fits, through structs; None if there is
    none.
    """
    if isinstance(type_, Array | Map):
        return None
    if not isinstance(type_, Struct):
        return () if fits(str(type_)) else None
    for member in type_.members:
        within = _first_simple(member.type, fits)
        if within is not None:
            return (member.name, *within)
    return None

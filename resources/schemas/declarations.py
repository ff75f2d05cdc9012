"""Writes schemas as users declare them: the values that `Schema.of` takes, and Python source."""

from __future__ import annotations

import keyword
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import Array, Struct, Type, parse_type

_WIDTH = 88


def to_declaration(schema: Schema) -> dict[str, Any]:
    """Return the columns as `Schema.of` and YAML take them: structs as dictionaries, arrays as
    lists, other types as texts.
    """
    return {field.name: _declared(parse_type(field.type)) for field in schema.fields}


def _declared(type_: Type) -> Any:
    """Return a type as `Schema.of` takes it."""
    if isinstance(type_, Array):
        return [_declared(type_.element)]
    if not isinstance(type_, Struct):
        return str(type_)
    # Schema.of reserves such names for columns.
    if any(member.name.startswith("__") for member in type_.members):
        return str(type_)
    return {member.name: _declared(member.type) for member in type_.members}


def write_python(schema: Schema) -> str:
    """Return the Python expression `Schema.of(…)` that makes the schema."""
    columns = to_declaration(schema)
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in columns):
        return f"Schema.of({_write(columns, 0, len('Schema.of('))})"
    lines = []
    for name, declared in columns.items():
        lines.append(f"    {name}={_write(declared, 1, len(name) + 1)},")
    one = ", ".join(f"{name}={_one_line(declared)}" for name, declared in columns.items())
    if len(one) <= _WIDTH - len("SCHEMA = Schema.of()"):
        return f"Schema.of({one})"
    return "\n".join(["Schema.of(", *lines, ")"])


def _write(declared: Any, depth: int, used: int) -> str:
    """Return a declaration as source, in one line if it fits behind `used` characters."""
    one = _one_line(declared)
    if isinstance(declared, str) or 4 * depth + used + len(one) < _WIDTH:
        return one
    inner = "    " * (depth + 1)
    outer = "    " * depth
    if isinstance(declared, list):
        return f"[\n{inner}{_write(declared[0], depth + 1, 0)}\n{outer}]"
    lines = []
    for name, member in declared.items():
        key = _one_line(name)
        lines.append(f"{inner}{key}: {_write(member, depth + 1, len(key) + 2)},")
    return "\n".join(["{", *lines, f"{outer}}}"])


def _one_line(declared: Any) -> str:
    """Return a declaration as source in one line."""
    if isinstance(declared, list):
        return f"[{_one_line(declared[0])}]"
    if isinstance(declared, dict):
        members = (f"{_one_line(name)}: {_one_line(inner)}" for name, inner in declared.items())
        return "{" + ", ".join(members) + "}"
    return _quoted(declared)


def _quoted(text: str) -> str:
    """Return a text as a Python literal, in double quotes where its contents let it."""
    literal = repr(text)
    if literal.startswith("'") and '"' not in literal:
        return f'"{literal[1:-1]}"'
    return literal

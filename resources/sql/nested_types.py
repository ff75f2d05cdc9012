"""What arrays, maps and structs hold, read off the spelling of their types; None where not all of it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema


def element_type(type_: str | None) -> str | None:
    """Return the type of an array's elements, or of a map's values."""
    inner = _inside(type_)
    if inner is None or type_ is None or type_.startswith("struct<"):
        return None
    return list(_parts(inner))[-1] or None


def key_type(type_: str | None) -> str | None:
    """Return the type of a map's keys."""
    inner = _inside(type_)
    return None if inner is None or type_ is None or not type_.startswith("map<") else next(_parts(inner))


def field_type(type_: str | None, field: str) -> str | None:
    """Return the type of a struct's field, whatever its case; of an array of structs that of all these fields."""
    inner = _inside(type_)
    if inner is None or type_ is None:
        return None
    if type_.startswith("array<"):
        of_one = field_type(inner, field)
        return None if of_one is None else f"array<{of_one}>"
    if not type_.startswith("struct<"):
        return None
    fields = [part.partition(":") for part in _parts(inner)]
    kinds = [kind for name, _, kind in fields if name.lower() == field.lower()]
    return kinds[0] if len(kinds) == 1 else None


def struct_of(fields: Iterable[tuple[str, str | None]]) -> str:
    """Return the type of a struct with these fields."""
    known = list(fields)
    whole = all(kind is not None and "…" not in kind and name.isidentifier() for name, kind in known)
    return f"struct<{','.join(f'{name}:{kind}' for name, kind in known)}>" if known and whole else "struct<…>"


def type_of_json(schema: str) -> str | None:
    """Return what `from_json` makes by a schema of plain columns, "a INT, b STRING"."""
    try:
        return struct_of((field.name, field.type) for field in Schema.from_ddl(schema).fields)
    except SchemaMismatchError:
        return None


def _inside(type_: str | None) -> str | None:
    if type_ is None or "…" in type_ or not type_.endswith(">"):
        return None
    return type_.partition("<")[2][:-1]


def _parts(text: str) -> Iterator[str]:
    """Yield what commas part, those within brackets left alone: "string", "array<int>"."""
    depth, start = 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "<(") - (sign in ">)")
        if sign == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]

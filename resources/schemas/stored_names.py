"""The names that files use for columns and members of structs, which stay when users rename them.

A column is stored under the name that it had when it was added. A rename changes only the name that
users see. A dropped column is removed from the schema, and its stored name is never used again:
a new column of that name is stored under another one (`note#2`), so old values do not come back.

Steps lead from a column to a member: `("customer", "mail")`. Arrays and maps add no step, as they
have one part. *Stored steps* are made of stored names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from dagster_adjunct.resources.errors import AdjunctError, MalformedDocumentError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    parse_type,
)

Steps: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The stored names of a schema's columns and members, as far as they differ from their names.

    `names` are (steps, stored name), where the steps are those of the stored parent and then the
    member's name. `retired` are the stored steps of what was dropped.
    """

    names: tuple[tuple[Steps, str], ...] = ()
    retired: frozenset[Steps] = frozenset()
    _by_steps: dict[Steps, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_steps", dict(self.names))

    def of(self, parent: Steps, name: str) -> str:
        """Return the stored name of a member; `parent` are the stored steps of its struct, () for a
        column.
        """
        return self._by_steps.get((*parent, name), name)

    def of_steps(self, steps: Steps) -> Steps:
        """Return the stored steps to a column, or to a value inside one."""
        stored: Steps = ()
        for step in steps:
            stored = (*stored, self.of(stored, step))
        return stored

    def store(self, schema: Schema) -> Schema:
        """Return the columns under their stored names, in the same order."""
        if not self.names:
            return schema
        struct = self._store_type(schema_struct(schema), ())
        return struct_schema(struct, schema)

    def _store_type(self, type_: Type, parent: Steps) -> Any:
        if isinstance(type_, Simple):
            return type_
        if isinstance(type_, Array):
            return Array(self._store_type(type_.element, parent))
        if isinstance(type_, Map):
            return Map(self._store_type(type_.value, parent))
        members = []
        for member in type_.members:
            name = self.of(parent, member.name)
            members.append(Member(name, self._store_type(member.type, (*parent, name))))
        return Struct(tuple(members))

    def without_retired(self, type_: Type, steps: Steps) -> Type:
        """Return the type of a stored column or member at these stored steps without what was
        dropped from it.
        """
        if isinstance(type_, Array):
            return Array(self.without_retired(type_.element, steps))
        if isinstance(type_, Map):
            return Map(self.without_retired(type_.value, steps))
        if isinstance(type_, Simple):
            return type_
        members = []
        for member in type_.members:
            inner = (*steps, member.name)
            if inner not in self.retired:
                members.append(Member(member.name, self.without_retired(member.type, inner)))
        return Struct(tuple(members))

    def choose(self, parent: Steps, name: str, taken: Collection[str]) -> str:
        """Return the stored name for a new member: its name, or with a number if that was retired,
        or is among the stored names `taken` by its siblings.
        """
        retired = {steps[-1] for steps in self.retired if steps[:-1] == parent}
        used = {each.lower() for each in (*retired, *taken)}  # Spark ignores the case of names
        chosen = name
        number = 2
        while chosen.lower() in used:
            chosen = f"{name}#{number}"
            number += 1
        return chosen

    def to_json(self) -> dict[str, Any]:
        """Return these names for a stored document: {} if nothing was renamed or dropped."""
        if self == AS_NAMED:
            return {}
        names = [{"path": list(steps), "stored": stored} for steps, stored in self.names]
        return {"names": names, "retired": [list(steps) for steps in sorted(self.retired)]}

    @classmethod
    def from_json(cls, item: Any) -> StoredNames:
        """Return the names in a stored document. Raises MalformedDocumentError."""
        if item == {}:
            return cls()
        try:
            names = [(_read_steps(each["path"]), each["stored"]) for each in item["names"]]
            retired = frozenset(_read_steps(each) for each in item["retired"])
            is_exact = set(item) == {"names", "retired"}
        except (KeyError, TypeError, ValueError) as error:
            raise _malformed_error(item, repr(error)) from error
        known = {steps for steps, _ in names}
        stored = {(*steps[:-1], name) for steps, name in names}
        if not is_exact or not all(isinstance(name, str) and name for _, name in names):
            raise _malformed_error(item, "expected the members 'names' and 'retired'")
        if len(known) < len(names) or len(stored) < len(names) or stored & retired:
            raise _malformed_error(item, "a name occurs twice")
        return cls(tuple(sorted(names)), retired)


AS_NAMED = StoredNames()
"""The stored names where nothing was renamed or dropped."""


def _read_steps(value: Any) -> Steps:
    if not value or not isinstance(value, list):
        raise ValueError(f"{value!r} is no list of names")
    for step in value:
        if not isinstance(step, str) or not step:
            raise ValueError(f"{step!r} is no name")
    return tuple(value)


def _malformed_error(item: Any, reason: str) -> MalformedDocumentError:
    problem = f"stored names of columns read {str(item)[:200]!r}: {reason}."
    step = "Restore the document from a backup, or roll back to the commit before."
    return MalformedDocumentError(problem, step, document="stored names")


def _validate_names(value: Any) -> StoredNames:
    if isinstance(value, StoredNames):
        return value
    try:
        return StoredNames.from_json(value)
    except AdjunctError as error:
        raise ValueError(str(error)) from error


StoredNamesField = Annotated[
    StoredNames, PlainValidator(_validate_names), PlainSerializer(StoredNames.to_json)
]
"""Stored names as a field of a stored document."""


def list_steps(schema: Schema) -> set[Steps]:
    """Return the steps of all columns and members."""
    return set(_iter_steps(schema_struct(schema), ()))


def keep_steps(schema: Schema, names: StoredNames, kept: Collection[Steps]) -> Schema:
    """Return the schema with only those columns and members whose stored steps are among `kept`,
    without structs of which nothing is left.
    """
    struct = _keep_members(schema_struct(schema), (), names, kept)
    fields = []
    for member in struct.members:
        is_sensitive = schema.field(member.name).sensitive
        fields.append(Field(member.name, str(member.type), is_sensitive))
    return Schema(tuple(fields))


def _keep_members(type_: Type, parent: Steps, names: StoredNames, kept: Collection[Steps]) -> Any:
    if isinstance(type_, Array):
        return Array(_keep_members(type_.element, parent, names, kept))
    if isinstance(type_, Map):
        return Map(_keep_members(type_.value, parent, names, kept))
    if isinstance(type_, Simple):
        return type_
    members = []
    for member in type_.members:
        place = (*parent, names.of(parent, member.name))
        if place in kept:
            inner = _keep_members(member.type, place, names, kept)
            if not _is_empty(inner):
                members.append(Member(member.name, inner))
    return Struct(tuple(members))


def _is_empty(type_: Type) -> bool:
    if isinstance(type_, Array):
        return _is_empty(type_.element)
    if isinstance(type_, Map):
        return _is_empty(type_.value)
    return isinstance(type_, Struct) and not type_.members


def _iter_steps(type_: Type, parent: Steps) -> Iterator[Steps]:
    if isinstance(type_, Array):
        yield from _iter_steps(type_.element, parent)
    elif isinstance(type_, Map):
        yield from _iter_steps(type_.value, parent)
    elif isinstance(type_, Struct):
        for member in type_.members:
            yield (*parent, member.name)
            yield from _iter_steps(member.type, (*parent, member.name))


def schema_struct(schema: Schema) -> Struct:
    """Return the columns of a schema as the members of a struct."""
    return Struct(tuple(Member(each.name, parse_type(each.type)) for each in schema.fields))


def struct_schema(struct: Struct, like: Schema) -> Schema:
    """Return a schema of a struct's members, which are sensitive where the columns at the same
    places of `like` are.
    """
    fields = []
    for member, before in zip(struct.members, like.fields, strict=True):
        fields.append(Field(member.name, str(member.type), before.sensitive))
    return Schema(tuple(fields))


def sorted_names(names: Iterable[tuple[Steps, str]]) -> tuple[tuple[Steps, str], ...]:
    """Return the names that differ from the last of their steps, in order."""
    return tuple(sorted((steps, stored) for steps, stored in names if steps[-1] != stored))

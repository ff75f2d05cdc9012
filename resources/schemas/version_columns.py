"""Columns of versions that are written whole. A version may have any columns; a column is that of
an earlier version if it has the same name, or if it is declared to be renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dagster_adjunct.resources.schemas.column_changes import (
    ColumnChanges,
    Evolution,
    FixedColumns,
    evolve,
)
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Field,
    Schema,
    Steps,
    StoredNames,
    schema_struct,
    sorted_names,
    struct_schema,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Struct,
    Type,
    path_column,
    write_name,
)


def adopt_columns(
    known: Schema, names: StoredNames, declared: Schema, changes: ColumnChanges, fixed: FixedColumns
) -> Evolution:
    """Return all columns that versions have had, with their stored names, once a version has the
    declared ones.

    Columns and members that the declaration lacks stay known, under their names: only a declared
    removal gives up a stored name. Types may change in any way, except of `fixed` columns.
    """
    # The declared columns are those after the changes, so the changes must not apply to them.
    contradicting = evolve(declared, AS_NAMED, None, changes)
    if contradicting.changes or contradicting.problems:
        declared_too = tuple(f"{change}, but declared too" for change in contradicting.changes)
        return Evolution(known, names, problems=(*declared_too, *contradicting.problems))
    moved = evolve(known, names, None, changes, fixed)
    if moved.problems:
        return moved
    problems = _find_other_cases(moved.schema, declared)
    if problems:
        return Evolution(known, names, problems=problems)
    before = schema_struct(moved.schema)
    wanted = schema_struct(declared)
    # `evolve` only widens types, so the known columns get their declared types first.
    retyped = struct_schema(_merge_structs(before, wanted, adds=False), moved.schema)
    after = _merge_structs(before, wanted, adds=True)
    added = Schema(tuple(Field(each.name, str(each.type)) for each in after.members))
    sensitive = {*moved.schema.sensitive, *declared.sensitive}
    merged = evolve(retyped, moved.names, added.with_sensitive(*sensitive))
    return replace(merged, changes=(*moved.changes, *merged.changes))


def _find_other_cases(known: Schema, declared: Schema) -> tuple[str, ...]:
    """Return problems of columns whose names differ from known ones in the case of letters only."""
    lowered = {name.lower(): name for name in known.names}
    problems = []
    for name in declared.names:
        was = lowered.get(name.lower(), name)
        if was != name:
            problems.append(f'{was} is called {name} now: declare renamed={{"{was}": "{name}"}}')
    return tuple(problems)


def _merge_structs(known: Struct, declared: Struct, *, adds: bool) -> Struct:
    """Return the known members with their declared types and, if `adds`, the new members."""
    members = []
    for member in known.members:
        wanted = declared.member(member.name)
        if wanted is not None:
            type_ = _merge_types(member.type, wanted.type, adds=adds)
        else:
            type_ = member.type
        members.append(Member(member.name, type_))
    if adds:
        for wanted in declared.members:
            if known.member(wanted.name) is None:
                members.append(wanted)
    return Struct(tuple(members))


def _merge_types(known: Type, declared: Type, *, adds: bool) -> Type:
    """Return the known type with the declared simple types and, if `adds`, the new members; the
    declared type if the two are of different kinds.
    """
    if isinstance(known, Struct) and isinstance(declared, Struct):
        return _merge_structs(known, declared, adds=adds)
    if isinstance(known, Array) and isinstance(declared, Array):
        return Array(_merge_types(known.element, declared.element, adds=adds))
    if isinstance(known, Map) and isinstance(declared, Map):
        return Map(_merge_types(known.value, declared.value, adds=adds))
    return declared


def names_in_files(columns: Schema, names: StoredNames) -> StoredNames:
    """Return the stored names of just these columns and their members, and the dropped ones, for
    files that have exactly these columns.
    """
    found: list[tuple[Steps, str]] = []
    _collect_names(schema_struct(columns), (), names, found)
    return StoredNames(sorted_names(found), names.retired)


def _collect_names(
    type_: Type, parent: Steps, names: StoredNames, found: list[tuple[Steps, str]]
) -> None:
    """Add (steps, stored name) of each member within a type to `found`; `parent` are the stored
    steps to it.
    """
    if isinstance(type_, Array):
        _collect_names(type_.element, parent, names, found)
    elif isinstance(type_, Map):
        _collect_names(type_.value, parent, names, found)
    elif isinstance(type_, Struct):
        for member in type_.members:
            stored = names.of(parent, member.name)
            found.append(((*parent, member.name), stored))
            _collect_names(member.type, (*parent, stored), names, found)


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """Columns with their stored names."""

    schema: Schema
    names: StoredNames

    def named_as(self, other: NamedColumns, *, keep_others: bool = False) -> NamedColumns:
        """Return these columns and members, with their types, under the names that they have among
        `other` columns.

        Those that are not among these are left out. With `keep_others` they keep their names,
        unless another column or member has that name now.
        """
        view = _View(self.names, other.names, keep_others=keep_others)
        struct = view.name_members(schema_struct(self.schema), schema_struct(other.schema), ())
        sensitive = {self.names.of((), name) for name in self.schema.sensitive}
        fields = []
        names = StoredNames(sorted_names(view.found), self.names.retired | view.left_out)
        for member in struct.members:
            is_sensitive = names.of((), member.name) in sensitive
            fields.append(Field(member.name, str(member.type), is_sensitive))
        return NamedColumns(Schema(tuple(fields)), names)


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A column, or a member at any depth: its name, its path as users write it, and its type."""

    name: str
    path: str
    type: Type


def list_parts(columns: NamedColumns) -> dict[Steps, NamedPart]:
    """Return the columns and their members by the stored steps to them, the outer ones first."""
    parts: dict[Steps, NamedPart] = {}
    _collect_parts(schema_struct(columns.schema), (), "", columns.names, parts)
    return parts


def _collect_parts(
    type_: Type, parent: Steps, path: str, names: StoredNames, parts: dict[Steps, NamedPart]
) -> None:
    """Add the members within a type to `parts`; `parent` are the stored steps to it."""
    if isinstance(type_, Array):
        _collect_parts(type_.element, parent, f"{path}[]", names, parts)
    elif isinstance(type_, Map):
        _collect_parts(type_.value, parent, f"{path}[*]", names, parts)
    elif isinstance(type_, Struct):
        for member in type_.members:
            steps = (*parent, names.of(parent, member.name))
            inner = f"{path}.{write_name(member.name)}" if parent else member.name
            parts[steps] = NamedPart(member.name, inner, member.type)
            _collect_parts(member.type, steps, inner, names, parts)


class _View:
    """Gives columns and members the names that they have in other columns."""

    def __init__(self, names: StoredNames, now: StoredNames, *, keep_others: bool) -> None:
        self._names = names
        self._now = now
        self._keep_others = keep_others
        self.found: list[tuple[Steps, str]] = []  # as `StoredNames.names`
        self.left_out: set[Steps] = set()

    def name_members(self, struct: Struct, now: Struct | None, parent: Steps) -> Struct:
        """Return the members of a struct under the names that they have in the struct `now`, by
        their stored names; `parent` are the stored steps of both structs.

        Without `now`, all keep their names. Members that are left out are added to `left_out`.
        """
        current = {}  # the members of `now` by their stored names
        lowered_names = set()
        for member in now.members if now is not None else ():
            current[self._now.of(parent, member.name)] = member
            lowered_names.add(member.name.lower())
        members = []
        for member in struct.members:
            stored = self._names.of(parent, member.name)
            same = current.get(stored)
            is_free = member.name.lower() not in lowered_names
            keeps_name = now is None or (self._keep_others and is_free)
            if same is not None:
                named = self._name_member(member, same.name, same.type, (*parent, stored))
            elif keeps_name:
                named = self._name_member(member, member.name, None, (*parent, stored))
            else:
                named = None
            if named is None:
                self.left_out.add((*parent, stored))
                continue
            self.found.append(((*parent, named.name), stored))
            members.append(named)
        return Struct(tuple(members))

    def _name_member(
        self, member: Member, name: str, now: Type | None, place: Steps
    ) -> Member | None:
        """Return the member under this name; None if none of its own members is left."""
        type_ = self._name_type(member.type, now, place)
        return None if type_ is None else Member(name, type_)

    def _name_type(self, was: Type, now: Type | None, place: Steps) -> Type | None:
        """Return a type whose members have their names of `now`; None if no member of
        it is left.
        """
        if isinstance(was, Struct):
            struct = self.name_members(was, now if isinstance(now, Struct) else None, place)
            return struct if struct.members else None
        if isinstance(was, Array):
            element = now.element if isinstance(now, Array) else None
            inner = self._name_type(was.element, element, place)
            return None if inner is None else Array(inner)
        if isinstance(was, Map):
            value = now.value if isinstance(now, Map) else None
            inner = self._name_type(was.value, value, place)
            return None if inner is None else Map(inner)
        return was


def drop_replaced(
    stored: NamedColumns, input_before: StoredNames, now: NamedColumns, changes: ColumnChanges
) -> NamedColumns:
    """Return the stored columns after the renames and removals, without those that are others in
    the input now: dropped there, and added again under the same name.

    `input_before` are the stored names that the columns had in the input when they were stored
    last, and `now` the columns and stored names of the input. Problems of `changes` are left to
    `evolve`.
    """
    moved = evolve(stored.schema, stored.names, None, changes)
    before = evolve(stored.schema, input_before, None, changes)
    if moved.problems or before.problems:
        return stored
    replaced = _Replaced(before.names, now.names)
    paths = tuple(
        replaced.find(schema_struct(before.schema), schema_struct(now.schema), (), (), "")
    )
    if not paths:
        return stored
    columns = tuple(dict.fromkeys(map(path_column, paths)))
    for drop in (paths, columns):  # whole columns if nothing would be left of a struct
        after = evolve(moved.schema, moved.names, None, ColumnChanges(drop=drop))
        if not after.problems:
            return NamedColumns(after.schema, after.names)
    return stored


@dataclass(frozen=True, slots=True)
class _Replaced:
    """Finds members that were dropped and added again under the same name: their stored name
    `before` was given up, and they have another one `now`.
    """

    before: StoredNames
    now: StoredNames

    def find(
        self, was: Type, is_now: Type, parent: Steps, parent_now: Steps, path: str
    ) -> Iterator[str]:
        """Yield the paths of such members within a type that was `was` and is `is_now`; the stored
        steps to it were `parent` and are `parent_now`.
        """
        if isinstance(was, Array) and isinstance(is_now, Array):
            yield from self.find(was.element, is_now.element, parent, parent_now, f"{path}[]")
        elif isinstance(was, Map) and isinstance(is_now, Map):
            yield from self.find(was.value, is_now.value, parent, parent_now, f"{path}[*]")
        elif isinstance(was, Struct) and isinstance(is_now, Struct):
            for member in was.members:
                same = is_now.member(member.name)
                if same is not None:
                    place = ".".join(filter(None, (path, write_name(member.name))))
                    yield from self._find_in_member(member, same, parent, parent_now, place)

    def _find_in_member(
        self, was: Member, is_now: Member, parent: Steps, parent_now: Steps, path: str
    ) -> Iterator[str]:
        """Yield the path of a member if its stored name was given up and is another one now, else
        those within it.
        """
        stored = self.before.of(parent, was.name)
        stored_now = self.now.of(parent_now, is_now.name)
        if stored == stored_now:
            steps = (*parent, stored)
            yield from self.find(was.type, is_now.type, steps, (*parent_now, stored_now), path)
        elif (*parent_now, stored) in self.now.retired:
            yield path

"""Which columns of a file are the declared ones: rules for files that have other columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import Field

from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc, pt
from dagster_adjunct.resources.schemas.arrow_values import as_lists, build_lists, build_maps
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.schema import Field as Column
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    check_column_names,
    repeated_names,
    schema_struct,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    find_difference,
    parse_type,
    write_name,
)
from dagster_adjunct.resources.validation import validated

_STEP = "Deliver the files with exactly these columns, or change the declared ones."
_PATH = re.compile(r"(?:(?P<parent>.*)\.)?(?P<name>`(?:[^`]|``)+`|[^.`]+)", re.S)


@validated
class ColumnRules(StoredDocument):
    """What becomes of files whose columns are not the declared ones; by default they are errors.

    `missing="null"` reads declared columns that a file lacks as null, except those of the key.
    `undeclared="ignore"` leaves out columns that are not declared. `renamed` are the present names
    of columns, by the names that they have in older files, and `drop` are columns that files may
    have, and that are left out. Both also have paths of members of structs: `{"customer.mail":
    "email"}`, `("lines[].note",)`.

    In JSON lines, a missing field is null whatever the rule. A member that a struct lacks is null
    in every format.
    """

    missing: Literal["fail", "null"] = "fail"
    undeclared: Literal["fail", "ignore"] = "fail"
    renamed: dict[str, str] = Field(default_factory=dict)
    drop: tuple[str, ...] = ()


AS_DECLARED = ColumnRules()


class _Place(NamedTuple):
    """The path of a part of a column as a file writes it, and as it is declared; "" is the record
    itself.
    """

    given: str = ""
    declared: str = ""

    def within(self, given: str, declared: str) -> _Place:
        """Return the place of a member of this struct."""
        return _Place(_join(self.given, given), _join(self.declared, declared))

    def inside(self, step: str) -> _Place:
        """Return the place of the elements of this array, or of the values of this map."""
        return _Place(self.given + step, self.declared + step)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{write_name(name)}" if parent else name


class _Names(NamedTuple):
    """Names of columns and members, by (path of the struct, name)."""

    renamed: Mapping[tuple[str, str], str]
    dropped: Collection[tuple[str, str]]


def _split(path: str) -> Iterator[tuple[str, str]]:
    """Yield (path of the struct, name) of what a path may name: a member, or a column of this
    name.
    """
    yield "", path
    parts = _PATH.fullmatch(path)
    if parts is not None:
        yield parts["parent"] or "", _unquote(parts["name"])


def _unquote(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


class _NoMember(Enum):
    """Why a member that a file has is none of the declared ones: it is to be left out, or no rule
    allows it.
    """

    LEFT_OUT = auto()
    UNDECLARED = auto()


class TwoNamesError(ValueError):
    """A record has a value under two names of one column, whose path is the text."""


@dataclass(frozen=True)
class DeclaredColumns:
    """The declared columns of files, and the rules for files that have others.

    Without rules, a file has exactly these columns, with these types. With rules, narrower types
    are widened too. The columns `required` are never missing.
    """

    schema: Schema
    rules: ColumnRules | None = None
    required: tuple[str, ...] = ()

    @cached_property
    def _struct(self) -> Struct:
        return schema_struct(self.schema)

    @cached_property
    def _names(self) -> _Names:
        """The names that rules rename and drop, under each path that they may mean."""
        renamed: dict[tuple[str, str], str] = {}
        dropped: set[tuple[str, str]] = set()
        if self.rules is not None:
            for path, name in self.rules.renamed.items():
                renamed |= dict.fromkeys(_split(path), _unquote(name))
            for path in self.rules.drop:
                dropped |= set(_split(path))
        return _Names(renamed, dropped)

    @property
    def ignores_undeclared(self) -> bool:
        """Whether columns are left out that are not declared."""
        return self.rules is not None and self.rules.undeclared == "ignore"

    @property
    def leaves_fields_out(self) -> bool:
        """Whether files may have columns that are left out."""
        return self.rules is not None and (self.ignores_undeclared or bool(self.rules.drop))

    @property
    def reads_others(self) -> bool:
        """Whether files may have other names than the declared ones."""
        return self.leaves_fields_out or (self.rules is not None and bool(self.rules.renamed))

    def _find_member(self, name: str, struct: Struct, place: _Place) -> Member | _NoMember:
        """Return the declared member that has this name in a file, maybe one of its older names.
        `struct` is the declared type of what is at the `place`.
        """
        seen: set[str] = set()
        while (member := struct.member(name)) is None:
            seen.add(name)
            # Rules name the struct by its path in the file, or by its declared path.
            keys = [(place.given, name), (place.declared, name)]
            if self._names.dropped & {*keys}:  # type: ignore[operator]
                return _NoMember.LEFT_OUT
            newer = [self._names.renamed[key] for key in keys if key in self._names.renamed]
            # A newer name was seen before if renames go in a circle.
            ends_here = not newer or newer[0] in seen
            if ends_here:
                return _NoMember.LEFT_OUT if self.ignores_undeclared else _NoMember.UNDECLARED
            name = newer[0]
        return member

    def leads_nowhere(self, path: str) -> bool:
        """Return whether a column with this older name is not one of the declared ones now. Paths
        of members may lead through older names of their columns, and are not looked up.
        """
        is_member = any(parent for parent, _ in _split(path))
        found = self._find_member(_unquote(path), self._struct, _Place())
        return not is_member and found is _NoMember.UNDECLARED

    # -- what a file has

    def match(self, names: Sequence[str], where: str) -> dict[str, str]:
        """Return the names that a file with these columns has for the declared ones, without those
        that it lacks. Raises SchemaMismatchError.
        """
        sources: dict[str, str] = {}
        present: list[str] = []  # names that the file has, declared ones in place of older ones
        repeated = repeated_names(names)  # which `check_column_names` reports, also if left out
        for name in names:
            found = self._find_member(name, self._struct, _Place())
            if isinstance(found, Member):
                declared = found.name
                if declared in sources and name not in repeated:
                    raise SchemaMismatchError(
                        f"{where}: columns {sources[declared]!r} and {name!r} are both there, but"
                        f" {declared!r} is the name of both now.",
                        "Deliver the files with one of them, or correct renamed= of the column"
                        " rules.",
                        column=declared,
                    )
                sources[declared] = name
                present.append(declared)
            elif found is _NoMember.UNDECLARED or name in repeated:
                present.append(name)
        may_lack = self.rules is not None and self.rules.missing == "null"
        if may_lack:
            known = {*present, *self.required}
            present += [name for name in self.schema.names if name not in known]
        check_column_names(present, self.schema, where, next_step=self._next_step(present))
        return sources

    def _next_step(self, names: Sequence[str]) -> str:
        """Return what to do about files with these columns, if they are not as declared."""
        if self.rules is None:
            return _STEP
        missing = [name for name in self.schema.names if name not in names]
        unknown = [name for name in names if name not in self.schema]
        declare = ""
        if unknown:
            declare = (
                f", or add {unknown[0]!r} to the schema (with"
                ' column_rules=ColumnRules(missing="null"), for files without it)'
            )
        ways = []
        if missing and unknown:
            ways.append(f'renamed={{"{unknown[0]}": "{missing[0]}"}} if that is its older name')
        if missing and not {*missing} & {*self.required}:
            ways.append('missing="null" to read missing columns as null')
        if unknown:
            ways.append(f'drop=("{unknown[0]}",) or undeclared="ignore" to leave out others')
        if not ways:
            return _STEP
        return (
            f"Deliver the files with exactly these columns{declare}, or declare"
            f" column_rules=ColumnRules(…) with {', or '.join(ways)}."
        )

    def check_types(
        self, types: Mapping[str, Type], sources: Mapping[str, str], where: str
    ) -> None:
        """Raise SchemaMismatchError if values of a type can't be read as the declared one.

        `types` are those of a file's columns, and `sources` what `match` has returned for it.
        """
        fits = is_widening if self.rules is not None else _are_equal
        wrong: dict[str, str] = {}
        for member in self._struct.members:
            if member.name not in sources:
                continue
            given = sources[member.name]
            adapted = self._adapt_type(
                types[given], member.type, _Place().within(given, member.name)
            )
            found = find_difference(adapted, member.type, member.name, fits)
            if found is not None:
                wrong[member.name] = (
                    f"column {found.path!r} is {found.given}, declared {found.declared}"
                )
        if wrong:
            step = "Write the files with the declared types, or change the declared types."
            raise SchemaMismatchError(
                f"{where}: {'; '.join(wrong.values())}.", step, column=next(iter(wrong))
            )

    def find_change(self, name: str, stored: Type) -> str | None:
        """Return how a column of an earlier declaration is not continued by this one, None if it
        is.
        """
        member = self._find_member(name, self._struct, _Place())
        if member is _NoMember.UNDECLARED:
            return f"column {name!r} is neither declared, nor renamed or dropped"
        if member is _NoMember.LEFT_OUT:
            return None
        adapted = self._adapt_type(stored, member.type, _Place().within(name, member.name))
        found = find_difference(adapted, member.type, member.name, is_widening)
        if found is None:
            return None
        return f"column {found.path!r} was {found.given}, and is declared {found.declared}"

    def _adapt_type(self, given: Type, declared: Type, place: _Place) -> Type:
        """Return a type of a file with the declared names, without what is left out of it. Members
        that are not declared stay, to be reported.
        """
        if isinstance(given, Array) and isinstance(declared, Array):
            inside = place.inside("[]")
            return Array(self._adapt_type(given.element, declared.element, inside))
        if isinstance(given, Map) and isinstance(declared, Map):
            return Map(self._adapt_type(given.value, declared.value, place.inside("[*]")))
        if not isinstance(given, Struct) or not isinstance(declared, Struct):
            return given
        members = []
        for member in given.members:
            wanted = self._find_member(member.name, declared, place)
            if isinstance(wanted, Member):
                inner = place.within(member.name, wanted.name)
                adapted = self._adapt_type(member.type, wanted.type, inner)
                members.append(Member(wanted.name, adapted))
            elif wanted is _NoMember.UNDECLARED:
                members.append(member)
        return Struct(tuple(members))

    # -- its values

    def conform(self, table: pa.Table, schema: Schema | None = None) -> pa.Table:
        """Return records of a file with the declared columns, or those of `schema`, which has some
        of them: under their declared names, null where the file lacks them, and with the types that
        they have in the file.

        Raises TwoNamesError.
        """
        struct = self._struct
        found: dict[str, pa.Array] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            member = self._find_member(name, struct, _Place())
            if isinstance(member, Member):
                values = column
                if self.reads_others and not isinstance(member.type, Simple):
                    place = _Place().within(name, member.name)
                    values = self._adapt_values(column.combine_chunks(), member.type, place)
                _add_part(found, member.name, values, member.name)
        columns = {}
        for field in (schema or self.schema).to_arrow():
            if field.name in found:
                columns[field.name] = found[field.name]
            else:
                columns[field.name] = pa.nulls(table.num_rows, field.type)
        return pa.table(columns)

    def _adapt_values(self, values: pa.Array, declared: Type, place: _Place) -> pa.Array:
        """Return values of a file with the declared names of members, without those left out.
        Simple values, and a column that has only nulls, stay as they are.
        """
        if isinstance(declared, Simple) or pt.is_null(values.type):
            return values
        if isinstance(declared, Struct):
            return self._adapt_structs(values, declared, place)
        lists = as_lists(values)
        lengths = pc.list_value_length(lists)
        elements = pc.list_flatten(lists)
        if isinstance(declared, Array):
            inner = self._adapt_values(elements, declared.element, place.inside("[]"))
            return build_lists(lengths.cast(pa.int32()), inner, pa.list_(inner.type))
        keys, items = elements.flatten()
        inner = self._adapt_values(items, declared.value, place.inside("[*]"))
        return build_maps(lengths.cast(pa.int32()), keys.cast(pa.string()), inner)

    def _adapt_structs(self, values: pa.Array, declared: Struct, place: _Place) -> pa.Array:
        """Return structs of a file with the declared members that it has. Raises TwoNamesError."""
        parts: dict[str, pa.Array] = {}
        for field, part in zip(values.type, values.flatten(), strict=True):
            member = self._find_member(field.name, declared, place)
            if isinstance(member, Member):
                inner = place.within(field.name, member.name)
                adapted = self._adapt_values(part, member.type, inner)
                _add_part(parts, member.name, adapted, inner.declared)
        if not parts:  # an array of structs has its length by its members
            parts[declared.members[0].name] = pa.nulls(len(values))
        return pa.StructArray.from_arrays(
            list(parts.values()), names=list(parts), mask=values.is_null()
        )

    # -- JSON, in which each record may have other names

    @cached_property
    def with_older_names(self) -> DeclaredColumns:
        """These columns, and for each of them further ones with its older names, of the same type;
        itself without renamed columns.
        """
        if self.rules is None or not self.rules.renamed:
            return self
        struct = self._add_older_members(self._struct, _Place())
        fields = []
        for member in struct.members:
            declared = self._find_member(member.name, self._struct, _Place())
            assert isinstance(declared, Member)
            sensitive = self.schema.field(declared.name).sensitive
            fields.append(Column(member.name, str(member.type), sensitive))
        return replace(self, schema=Schema(tuple(fields)))

    def _add_older_names(self, declared: Type, place: _Place) -> Type:
        """Return a declared type whose structs also have members under their older names."""
        if isinstance(declared, Array):
            return Array(self._add_older_names(declared.element, place.inside("[]")))
        if isinstance(declared, Map):
            return Map(self._add_older_names(declared.value, place.inside("[*]")))
        if isinstance(declared, Struct):
            return self._add_older_members(declared, place)
        return declared

    def _add_older_members(self, declared: Struct, place: _Place) -> Struct:
        """Return a struct that has each member under its own name and under its older names."""
        names = [member.name for member in declared.members]
        for parent, older in self._names.renamed:
            # Rules name the struct by its path in the file, or by its declared path.
            if parent in (place.given, place.declared):
                names.append(older)
        members: dict[str, Member] = {}
        for name in names:
            member = self._find_member(name, declared, place)
            if isinstance(member, Member):  # else the newer name is not declared any more
                inner = place.within(name, member.name)
                members.setdefault(name, Member(name, self._add_older_names(member.type, inner)))
        return Struct(tuple(members.values()))

    def without_others(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a decoded JSON object without the fields that are left out. Those that are not
        declared stay, to be reported, and older names stay as they are.
        """
        if not self.reads_others:
            return record
        fields: dict[str, Any] = self._without_others(record, self._struct, _Place())
        return fields

    def _without_others(self, value: Any, declared: Type, place: _Place) -> Any:
        """Return a decoded JSON value as `without_others` does, at every depth."""
        if isinstance(declared, Array) and isinstance(value, list):
            inside = place.inside("[]")
            return [self._without_others(item, declared.element, inside) for item in value]
        if isinstance(declared, Map) and isinstance(value, dict):
            inside = place.inside("[*]")
            return {
                key: self._without_others(item, declared.value, inside)
                for key, item in value.items()
            }
        if not isinstance(declared, Struct) or not isinstance(value, dict):
            return value
        kept = {}
        for name, item in value.items():
            member = self._find_member(name, declared, place)
            if isinstance(member, Member):
                kept[name] = self._without_others(
                    item, member.type, place.within(name, member.name)
                )
            elif member is _NoMember.UNDECLARED:
                kept[name] = item
        return kept

    def allows(self, found: pa.DataType) -> bool:
        """Return whether all fields that JSON objects have, as Arrow has inferred them, are
        declared, or are left out. Maps have any fields.
        """
        return self._allows(found, self._struct, _Place())

    def _allows(self, found: pa.DataType, declared: Type, place: _Place) -> bool:
        """Return what `allows` does for a part of the objects."""
        if isinstance(declared, Array) and pt.is_list(found):
            return self._allows(found.value_type, declared.element, place.inside("[]"))
        if not isinstance(declared, Struct) or not pt.is_struct(found):
            return True
        for field in found:
            member = self._find_member(field.name, declared, place)
            if member is _NoMember.UNDECLARED:
                return False
            if isinstance(member, Member):
                inner = place.within(field.name, member.name)
                if not self._allows(field.type, member.type, inner):
                    return False
        return True


def check_rules(schema: Schema, rules: ColumnRules, what: str) -> None:
    """Raise SchemaMismatchError for rules that contradict the declared columns."""
    columns = DeclaredColumns(schema, rules)
    for path, name in rules.renamed.items():
        if columns.leads_nowhere(path):
            raise SchemaMismatchError(
                f"{what}: {path} is renamed to {name}, which is neither declared nor dropped.",
                f"Correct the name, or add {name} to drop.",
                column=path,
            )
    for path in [*rules.renamed, *rules.drop]:
        if schema.column_of(path) is not None:
            done = "dropped" if path in rules.drop else f"renamed to {rules.renamed[path]}"
            raise SchemaMismatchError(
                f"{what}: {path} is {done}, but declared too.",
                f"Remove {path} from the schema, or from the column rules.",
                column=path,
            )


def evolution_problems(stored: Schema, declared: Schema, rules: ColumnRules) -> list[str]:
    """Return which columns of a stream's stored schema the declared one does not continue, and
    why.
    """
    columns = DeclaredColumns(declared, rules)
    problems = []
    for field in stored.fields:
        found = columns.find_change(field.name, parse_type(field.type))
        if found is not None:
            problems.append(found)
    return problems


def _add_part(parts: dict[str, pa.Array], name: str, values: Any, path: str) -> None:
    """Add values of a column or member to `parts`, which may have values of it that other records
    have under another name. Raises TwoNamesError if one record has both.
    """
    if name in parts:
        if pc.any(pc.and_(parts[name].is_valid(), values.is_valid())).as_py():
            raise TwoNamesError(path)
        values = pc.if_else(parts[name].is_valid(), parts[name], values)
    parts[name] = values


def _are_equal(stored: str, declared: str) -> bool:
    """Whether two parts of types are equal, by their texts."""
    return stored == declared

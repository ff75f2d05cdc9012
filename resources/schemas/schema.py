"""The columns of records and entries: names with types as `types.py` has them.

A schema is stored as a list of {"name", "type"}; reading one imports neither Spark nor Arrow.

`StoredNames` are the names that files use for columns and members of structs, which stay when users
rename them. A column is stored under the name that it had when it was added. A dropped column is
removed from the schema, and its stored name is never used again: a new column of that name is
stored under another one (`note#2`), so old values do not come back. Steps lead from a column to a
member: `("customer", "mail")`. Arrays and maps add no step, as they have one part. *Stored steps*
are made of stored names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as declared
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from dagster_adjunct.resources.errors import (
    AdjunctError,
    MalformedDocumentError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.models import columns_of_model
from dagster_adjunct.resources.schemas.paths import (
    WHERE_COLUMNS_ARE_MADE,
    require_path,
    simple_value_advice,
    steps_among,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    TypeReader,
    TypeTextError,
    arrow_type,
    decimal_digits,
    is_nested,
    nested_types,
    parse_type,
    path_column,
    type_from_arrow,
    type_from_spark,
    write_name,
)
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_KEY_TYPES = frozenset(
    {"string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary"}
)


@validated
@dataclass(frozen=True, slots=True)
class Field:
    """A column: its name and its type in Spark's spelling (`bigint`, `decimal(10,2)`,
    `array<struct<sku:string,price:double>>`, …).

    Errors do not show values of a `sensitive` column. Fields that differ only in `sensitive` are
    equal.
    """

    name: str
    type: str
    sensitive: bool = declared(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the name and the type, which is then written in its normal form."""
        if not isinstance(self.name, str) or not self.name or self.name.startswith("__"):
            problem = (
                f"column name {self.name!r} can't be used: names that begin with '__' are reserved."
            )
            raise SchemaMismatchError(problem, "Rename the column.", column=self.name)
        try:
            normal = str(parse_type(self.type))
        except TypeTextError as error:
            problem = f"column {self.name!r} has type {self.type!r}: {error}."
            step = "Correct the type, or cast the column to one of these."
            raise SchemaMismatchError(problem, step, column=self.name) from error
        object.__setattr__(self, "type", normal)


@validated_methods
@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of records or entries, in order."""

    fields: tuple[Field, ...]
    _by_name: dict[str, Field] = declared(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {field.name: field for field in self.fields})
        # Spark ignores the case of names.
        twice = repeated_names(field.name.lower() for field in self.fields)
        if twice:
            problem = f"columns {twice} occur twice in a schema."
            raise SchemaMismatchError(problem, "Rename one of each.", column=twice[0])

    @classmethod
    def of(
        cls, columns: Mapping[str, DeclaredType] | None = None, /, **more: DeclaredType
    ) -> Schema:
        """Return a schema from names and types: `Schema.of(tailnum="string", seats="int")`.

        A struct is a schema or a mapping of names and types, an array a list of the type of its
        elements: `Schema.of(customer={"id": "bigint"}, lines=[{"sku": "string"}])`.
        """
        columns = {**(columns or {}), **more}
        return cls(tuple(Field(name, _type_text(kind, name)) for name, kind in columns.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def types(self) -> dict[str, str]:
        """Spark's name of the type of each column."""
        return {field.name: field.type for field in self.fields}

    def __contains__(self, name: object) -> bool:
        """Whether there is a column of this name."""
        return name in self._by_name

    def field(self, name: str, what: str = "schema") -> Field:
        """Return the field of this name; `what` names the schema in the error."""
        if name in self._by_name:
            return self._by_name[name]
        problem = f"{what} has no column {name!r}: it has {', '.join(self.names) or 'none'}."
        raise SchemaMismatchError(problem, "Check the name.", column=name)

    def select(self, names: Iterable[str], what: str = "schema") -> Schema:
        """Return the schema with only these columns, in this order."""
        return Schema(tuple(self.field(name, what) for name in names))

    def column_of(self, path: str) -> str | None:
        """Return the column that a name means, or the path of a part of it ("customer.email",
        "lines[].price", "attributes[*]"); None if there is none.
        """
        if path in self:
            return path
        column = path_column(path)
        if column not in self:
            return None
        known = set()
        for part, _ in nested_types(parse_type(self.field(column).type)):
            known |= {f"{column}{part}", f"{write_name(column)}{part}"}
        return column if path in known else None

    def with_sensitive(self, *names: str) -> Schema:
        """Return the same columns with these marked as sensitive, whose values errors show as
        `***`.

        The path of a part of a nested column, such as "customer.email", marks the whole column.
        """
        fields = dict(self._by_name)
        for name in names:
            column = self.column_of(name) or name
            fields[column] = replace(self.field(column), sensitive=True)
        return Schema(tuple(fields.values()))

    @property
    def sensitive(self) -> tuple[str, ...]:
        """The names of the sensitive columns."""
        return tuple(field.name for field in self.fields if field.sensitive)

    @classmethod
    def from_ddl(cls, text: str, what: str = "schema") -> Schema:
        """Return the columns in DDL like Spark's, "tailnum STRING, `seats` INT"; `what` names
        the schema in errors.
        """
        if not text.strip():
            raise SchemaMismatchError(
                f"{what} names no columns.", 'Write them like "tailnum STRING, seats INT".'
            )
        reader = TypeReader(text)
        try:
            fields = [Field(name, str(type_)) for name, type_ in _read_ddl(reader)]
        except TypeTextError as error:
            raise SchemaMismatchError(
                f"{what}: the columns {text!r} can't be parsed {error}.",
                'Write them like "tailnum STRING, seats INT, price DECIMAL(10,2)".',
            ) from error
        return cls(tuple(fields))

    def to_json(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for field in self.fields:
            item: dict[str, Any] = {"name": field.name, "type": field.type}
            if field.sensitive:
                item["sensitive"] = True
            items.append(item)
        return items

    @classmethod
    def from_json(cls, items: Any) -> Schema:
        """Return the schema of stored items {"name": …, "type": …, "sensitive": true or missing}.

        Raises MalformedDocumentError for anything else.
        """
        try:
            return cls(
                tuple(
                    Field(item["name"], item["type"], item.get("sensitive") is True)
                    for item in items
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            problem = (
                f"a stored schema reads {str(items)[:200]!r}: expected a list of name and type"
                f" ({error})."
            )
            step = "Restore the document from a backup, or roll back to the commit before."
            raise MalformedDocumentError(problem, step, document="a schema") from error

    def ddl(self) -> str:
        """Return the columns as Spark DDL with quoted names."""
        return ", ".join(f"{quote_name(field.name)} {_ddl_type(field)}" for field in self.fields)

    def difference(self, other: Schema) -> str:
        """Return a description of how the columns of `other` differ from these, "" if they are
        equal.
        """
        parts = []
        for name in self.names:
            if name not in other:
                parts.append(f"{name} is missing")
        for field in other.fields:
            if field.name not in self:
                parts.append(f"{field.name} ({field.type}) is not expected")
        for field in self.fields:
            if field.name in other and other.field(field.name).type != field.type:
                found = other.field(field.name).type
                parts.append(f"{field.name} is {found}, expected {field.type}")
        if not parts and self.names != other.names:
            parts.append(f"the order is {', '.join(other.names)}, expected {', '.join(self.names)}")
        return "; ".join(parts)

    def to_arrow(self) -> pa.Schema:
        """Return the Arrow schema; timestamps are in microseconds, UTC."""
        return pa.schema([pa.field(field.name, arrow_type(field.type)) for field in self.fields])

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Schema:
        return cls(tuple(Field(field.name, type_from_arrow(field)) for field in schema))

    @classmethod
    def from_model(cls, model: type) -> Schema:
        """Return the columns that the annotations of a Pydantic model or a dataclass declare.

        Models are structs, lists arrays, `dict[str, …]` maps, Literals and Enums of texts `string`.

        A Decimal needs `max_digits` and `decimal_places`. Raises SchemaMismatchError, which names
        the path, for a type that no column can have.
        """
        return cls.of(columns_of_model(model))

    @classmethod
    def from_spark(cls, schema: StructType) -> Schema:
        return cls(
            tuple(Field(field.name, type_from_spark(field.dataType)) for field in schema.fields)
        )


DeclaredType: TypeAlias = "str | Schema | Mapping[str, Any] | list[Any]"
"""A type as users declare it: its text, a schema or mapping for a struct, or a list of one type for
an array."""


def _type_text(kind: DeclaredType, path: str) -> str:
    """Return the text of a type that a user declared; `path` names its place in errors. A text is
    returned as it is, for `Field` to check.
    """
    return kind if isinstance(kind, str) else str(_declared_type(kind, path))


def _declared_type(kind: object, path: str) -> Type:
    """Return the type that a user declared; `path` names its place in errors."""
    if isinstance(kind, str):
        return parse_type(Field(path, kind).type)  # whose error names the path
    if isinstance(kind, Schema):
        kind = kind.types
    if isinstance(kind, Mapping):
        fields = Schema.of(kind).fields
        return Struct(tuple(Member(field.name, parse_type(field.type)) for field in fields))
    if isinstance(kind, list) and len(kind) == 1:
        return Array(_declared_type(kind[0], path))
    problem = f"column {path!r} has type {kind!r}: expected a type."
    step = (
        'Write "int" or "array<int>", a schema or a dictionary of names and types for a struct, or'
        " a list of one type for an array."
    )
    raise SchemaMismatchError(problem, step, column=path)


def _read_ddl(reader: TypeReader) -> Iterable[tuple[str, Type]]:
    """Yield the names and types of the columns in a text of DDL."""
    for member in reader.read_columns(""):
        yield member.name, member.type
    reader.expect_end()


def _ddl_type(field: Field) -> str:
    """Return a column's type as DDL: Spark's in capitals, nested ones as they are, with the names
    in them.
    """
    if is_nested(field.type):
        return field.type
    return field.type.upper()


def quote_name(name: str) -> str:
    """Return a column's name in backticks for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def quote_text(text: str) -> str:
    """Return a text as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def named_column(name: str) -> Column:
    """Return Spark's column of exactly this name; a dot in it does not mean a field of a struct."""
    return F.col(quote_name(name))


def named_columns(names: Iterable[str]) -> list[Column]:
    """Return Spark's columns of exactly these names."""
    return [named_column(name) for name in names]


COPY = "__value "


def copy_name(path: str) -> str:
    """Return the name of a hidden column of frames that copies the value at a path. Spark knows how
    records are partitioned by columns that it reads, but not by values inside them.
    """
    return f"{COPY}{path}"


def value_column(names: Collection[str], name: str) -> Column:
    """Return Spark's column of this name, or the value that the name is the path of, in records
    that have the columns `names`: its copy, if there is one.
    """
    if copy_name(name) in names:
        return named_column(copy_name(name))
    steps = steps_among(name, names)
    value = named_column(steps[0])
    for step in steps[1:]:
        value = value.getField(step)
    return value


def repeated_names(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def is_key_type(kind: str) -> bool:
    """Whether values of this type can be compared exactly, so that they can be a key."""
    return kind in _KEY_TYPES or decimal_digits(kind) is not None


def check_key_types(schema: Schema, key: Sequence[str], what: str) -> None:
    """Raise SchemaMismatchError for a part of a key that does not exist, or whose type can't be
    compared exactly. The `key` has names of columns, and paths of values in columns.
    """
    for name in key:
        value = require_path(name, schema.types, what)
        kind = value.type
        if not is_key_type(kind):
            expected = "a string, integer, date, timestamp, decimal or binary column"
            problem = f"{what}: key column {name!r} is {kind}: expected {expected}."
            if is_nested(kind):
                step = simple_value_advice(str(value), kind, is_key_type)
            else:
                step = f"Convert it: {WHERE_COLUMNS_ARE_MADE}."
            raise SchemaMismatchError(problem, step, column=name)


def check_column_names(
    given: Sequence[str],
    schema: Schema,
    what: str,
    also: Collection[str] = (),
    next_step: str = "Send records with exactly these columns, each once.",
) -> None:
    """Raise SchemaMismatchError unless `given` has each of the schema's columns once, and others
    only from `also`.
    """
    there = dict.fromkeys(given)
    wrong = {name: "is missing" for name in schema.names if name not in there}
    for name in there:
        if name not in schema and name not in also:
            wrong[name] = "is not declared"
    wrong |= dict.fromkeys(repeated_names(given), "occurs twice")
    if wrong:
        listed = "; ".join(f"column {name!r} {problem}" for name, problem in wrong.items())
        declared_columns = ", ".join(f"{field.name} {field.type}" for field in schema.fields)
        problem = f"{what}: {listed}. Declared are {declared_columns}."
        raise SchemaMismatchError(problem, next_step, column=next(iter(wrong)))


Steps: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The stored names of a schema's columns and members, as far as they differ from their names.

    `names` are (steps, stored name), where the steps are those of the stored parent and then the
    member's name. `retired` are the stored steps of what was dropped.
    """

    names: tuple[tuple[Steps, str], ...] = ()
    retired: frozenset[Steps] = frozenset()
    _by_steps: dict[Steps, str] = declared(init=False, repr=False, compare=False)

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
        """Return a type with stored names of members; `parent` are the stored steps to it."""
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

    def choose(self, parent: Steps, name: str, siblings: Collection[str]) -> str:
        """Return the stored name for a new member: its name, or with a number if that was retired,
        or is among the stored names of its `siblings`.
        """
        retired = {steps[-1] for steps in self.retired if steps[:-1] == parent}
        used = {each.lower() for each in (*retired, *siblings)}  # Spark ignores the case of names
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
        if not is_exact or not all(isinstance(name, str) and name for _, name in names):
            raise _malformed_error(item, "expected the members 'names' and 'retired'")
        stored = {(*steps[:-1], name) for steps, name in names}
        is_named_twice = len({steps for steps, _ in names}) < len(names)
        is_stored_twice = len(stored) < len(names)
        if is_named_twice or is_stored_twice or stored & retired:
            raise _malformed_error(item, "a name occurs twice")
        return cls(tuple(sorted(names)), retired)


AS_NAMED = StoredNames()
"""The stored names where nothing was renamed or dropped."""


def _read_steps(value: Any) -> Steps:
    """Return the steps in a stored document. Raises ValueError for anything but a list of names."""
    if not value or not isinstance(value, list):
        raise ValueError(f"{value!r} is no list of names")
    for step in value:
        if not isinstance(step, str) or not step:
            raise ValueError(f"{step!r} is no name")
    return tuple(value)


def _malformed_error(item: Any, reason: str) -> MalformedDocumentError:
    """Return the error for stored names that can't be read."""
    problem = f"stored names of columns read {str(item)[:200]!r}: {reason}."
    step = "Restore the document from a backup, or roll back to the commit before."
    return MalformedDocumentError(problem, step, document="stored names")


def _validate_names(value: Any) -> StoredNames:
    """Return stored names for a field of a document, given as these or as JSON. Raises
    ValueError.
    """
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
    """Return a type with only the members that `keep_steps` keeps; `parent` are the stored steps to
    it.
    """
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
    """Whether nothing is left of a type: it is a struct without members, or a container of one."""
    if isinstance(type_, Array):
        return _is_empty(type_.element)
    if isinstance(type_, Map):
        return _is_empty(type_.value)
    return isinstance(type_, Struct) and not type_.members


def _iter_steps(type_: Type, parent: Steps) -> Iterator[Steps]:
    """Yield the steps of the members within a type, the outer ones first; `parent` are the steps to
    it.
    """
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
    """Return those pairs of steps and stored name in which the stored name is not the member's own,
    in order.
    """
    return tuple(sorted((steps, stored) for steps, stored in names if steps[-1] != stored))

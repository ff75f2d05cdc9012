"""The YAML forms of datasets, tables and applications, declared once: by the signatures of the API.

`signature_of` reads a function's arguments and their types. Of it are made the pydantic model that
validates the YAML, with its JSON schema, and the forms by which `components.py` reads the values.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    RootModel,
    Tag,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypeAliasType

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    DatasetHandle,
    OutputStream,
    OutputTable,
    RemoteTableHandle,
)
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.code_location.definitions import build_definitions
from dagster_adjunct.resources.file_streams.delta import delta_stream
from dagster_adjunct.resources.file_streams.folder import file_stream
from dagster_adjunct.resources.file_streams.iceberg import iceberg_stream
from dagster_adjunct.resources.file_streams.table_changes import delta_changes, iceberg_changes
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.validation import type_hints

PYTHON = "python"  # the key of an import
# The types of our own errors among those of pydantic.
UNKNOWN_KEY = "unknown_key"
NO_DURATION = "no_duration"
PLAIN = (str, int, float, bool, type(None))
TARGETS = (DatasetHandle, RemoteTableHandle, OutputStream, OutputTable)
# The key for the argument `on`, because YAML reads `on` as true.
KEYS = {"on": "by"}


# -- forms of values


@dataclass(frozen=True, slots=True)
class Form:
    """How the values of a declared type are written in YAML.

    `members` are the alternatives of the type, such as timedelta and str.
    """

    members: tuple[Any, ...]

    @property
    def yaml_type(self) -> Any:
        """The type of what is written, such as str for a stream or a duration."""
        return _union(map(_yaml_type, self.members))

    @property
    def elements(self) -> Form:
        """The form of a list's items."""
        return form_of(_union(_list_items(self.members)))

    @property
    def is_tuple(self) -> bool:
        """Whether the value of a list is passed as a tuple."""
        return any(_is_kind(kind, tuple) for kind in self.members)

    @property
    def values(self) -> Form | None:
        """The form of a mapping's values; None if the type takes no mapping."""
        mappings = [kind for kind in self.members if _is_kind(kind, Mapping)]
        if mappings:
            arguments = get_args(mappings[0])
            return form_of(arguments[1] if arguments else Any)
        return form_of(Any) if Any in self.members else None

    @property
    def takes_objects(self) -> bool:
        """Whether `{Class: {…}}` means an object of that class; else it is only a mapping."""
        takes_mapping = any(_is_kind(kind, Mapping) for kind in self.members)
        return not takes_mapping or any(_is_class(kind) for kind in self.members)

    @property
    def classes(self) -> list[type]:
        """The dataclasses and pydantic models among the alternatives."""
        return [kind for kind in self.members if _has_fields(kind)]

    @property
    def enums(self) -> list[type[Enum]]:
        """The enums of which a text names a member."""
        return [kind for kind in self.members if _is_enum(kind)]

    @property
    def takes_target(self) -> bool:
        """Whether a text names a dataset, a table or an output stream."""
        return bool(self.targets)

    @property
    def targets(self) -> tuple[type, ...]:
        """The kinds of what a text may name: datasets, tables and output streams."""
        return tuple(kind for kind in TARGETS if kind in self.members)

    @property
    def literals(self) -> tuple[Any, ...]:
        """The values of Literal types, such as "left"."""
        literal = [kind for kind in self.members if get_origin(kind) is Literal]
        return tuple(value for kind in literal for value in get_args(kind))


def form_of(hint: Any) -> Form:
    """Return the form of a declared type."""
    return Form(_members(hint))


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a declared type, without annotations; the type alone if it is no
    union.
    """
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for each in get_args(hint) for member in _members(each))
    return (hint,)


def _union(members: Iterable[Any]) -> Any:
    """Return the union of types; Any if there are none."""
    distinct = tuple(dict.fromkeys(members))
    return Union[distinct] if distinct else Any  # noqa: UP007


def _yaml_type(kind: Any) -> Any:
    """Return the type of what is written in YAML for a value of one declared type."""
    for fits, yaml_type in _YAML_TYPES:
        if fits(kind):
            return yaml_type(kind)
    return dict[str, Any]  # {Class: …} or {python: …}


def _is_plain(kind: Any) -> bool:
    """Whether YAML itself has such values: texts, numbers, booleans, null and literals."""
    return kind in PLAIN or get_origin(kind) is Literal


def _is_any(kind: Any) -> bool:
    """Whether a declared type takes any value."""
    return kind in (Any, object)


def _is_named(kind: Any) -> bool:
    """Return whether a text stands for the value: its name."""
    return kind in (MessageStream, AdjunctDataset, *TARGETS)


def _reject_other_than_text(value: Any) -> Any:
    """Return a text as it is. Raises PydanticCustomError for any other value, such as a number
    without a unit.
    """
    if not isinstance(value, str):
        raise PydanticCustomError(NO_DURATION, "no duration")
    return value


def _has_fields(kind: Any) -> bool:
    """Whether a declared type is a class whose arguments are its fields."""
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel))


def _is_enum(kind: Any) -> bool:
    """Whether a declared type is an enum."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_kind(kind: Any, base: type) -> bool:
    """Whether a generic type such as `list[str]` is of a base such as `Iterable`; False for a type
    without arguments, such as `list` or `str`.
    """
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, base)


def _is_class(kind: Any) -> bool:
    """Whether a declared type is a class of which `{Class: {…}}` makes an object."""
    return kind not in PLAIN and get_origin(kind) in (None, type)


def _list_items(members: Iterable[Any]) -> list[Any]:
    """Return the types of the items of all lists among the types."""
    lists = [kind for kind in members if _is_kind(kind, Iterable) and not _is_kind(kind, Mapping)]
    return [item for kind in lists for item in get_args(kind) if item is not ...]


ColumnType = TypeAliasType(
    "ColumnType",
    "str | dict[str, ColumnType] | Annotated[list[ColumnType], Field(min_length=1, max_length=1)]",
)
"""A column's type: its text, names and types of a struct, or a list of one type for an array."""

_DURATION = Annotated[str, BeforeValidator(_reject_other_than_text)]
_YAML_TYPES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (_is_plain, lambda kind: kind),
    (_is_any, lambda kind: Any),
    (_is_named, lambda kind: str),
    (lambda kind: kind is timedelta, lambda kind: _DURATION),
    (_is_enum, lambda kind: Literal[tuple(member.name.lower() for member in kind)]),
    (lambda kind: kind is Schema, lambda kind: dict[str, ColumnType]),
    (
        lambda kind: _is_kind(kind, Mapping),
        lambda kind: dict[str, form_of(get_args(kind)[1]).yaml_type],  # type: ignore[misc]
    ),
    (
        lambda kind: _is_kind(kind, Iterable),
        lambda kind: list[form_of(kind).elements.yaml_type],  # type: ignore[misc]
    ),
)
"""Which types have which form, the first that fits."""


# -- arguments of the API


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function, or an option that it takes as `**options: Unpack[…]`."""

    name: str
    form: Form
    is_required: bool
    is_starred: bool = False  # *names: takes a list

    @property
    def key(self) -> str:
        """The key of the argument in YAML."""
        return KEYS.get(self.name, self.name)

    @property
    def yaml_type(self) -> Any:
        """The type of what is written for the argument."""
        written: Any = self.form.yaml_type
        return list[written] if self.is_starred else written


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function or class, in order."""

    arguments: tuple[Argument, ...]
    takes_any_name: bool  # **columns: takes a mapping

    def by_key(self, key: str) -> Argument | None:
        """Return the argument with this key in YAML, None if there is none."""
        return next((each for each in self.arguments if each.key == key), None)

    def names(self) -> list[str]:
        """Return the arguments' names in Python, in order."""
        return [argument.name for argument in self.arguments]


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the arguments of a function or class; of a bound method, those of its function."""
    return _read_signature(getattr(function, "__func__", function))


@cache
def _read_signature(function: Callable[..., Any]) -> Signature:
    """Return the arguments of a function, or of a class's constructor."""
    hinted: Any = function  # the hints of a class with fields are the class's own
    if isinstance(function, type) and not _has_fields(function):
        hinted = hinted.__init__
    hints = type_hints(inspect.unwrap(hinted))
    arguments: list[Argument] = []
    takes_any_name = False
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, Any)
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            options = _options(hint)
            takes_any_name = not options
            arguments += options
        else:
            is_starred = parameter.kind is parameter.VAR_POSITIONAL
            is_required = parameter.default is parameter.empty and not is_starred
            arguments.append(Argument(parameter.name, form_of(hint), is_required, is_starred))
    return Signature(tuple(arguments), takes_any_name)


def _options(hint: Any) -> list[Argument]:
    """Return the arguments of `**options: Unpack[…]`, none for other types."""
    if get_origin(hint) is None:
        return []
    hints = get_type_hints(get_args(hint)[0])
    return [Argument(name, form_of(kind), is_required=False) for name, kind in hints.items()]


# -- models of the YAML


_HOW_YAML_READS = "YAML reads no, off, yes and on as false and true: write a text in quotes, 'no'"


def _complete_schema(schema: dict[str, Any]) -> None:
    """Add to a form's JSON schema what `dg check yaml` shows in its errors: the form's keys, for an
    unknown one, and how YAML reads texts such as no.
    """
    properties = schema.get("properties", {})
    schema["propertyNames"] = {"enum": list(properties), "not": _no_text({"type": "boolean"})}
    for written in properties.values():
        _refuse_booleans(written)


def _refuse_booleans(schema: Any) -> None:
    """Add to the JSON schema of a value, and of its parts, that a text is no boolean."""
    if not isinstance(schema, dict):  # additionalProperties may be true
        return
    choices = schema.get("anyOf", [schema])
    refused: list[dict[str, Any]] = []
    if _takes_text(choices):
        refused.append({"type": "boolean"})
    for choice in choices:
        items = choice.get("items")
        if isinstance(items, dict) and _takes_text(items.get("anyOf", [items])):
            refused.append({"type": "array", "contains": {"type": "boolean"}})
        for part in ("items", "additionalProperties", "then", "else"):
            _refuse_booleans(choice.get(part))
    if refused:
        schema["not"] = _no_text(*refused)


def _takes_text(choices: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of these JSON schemas takes texts, and none takes booleans."""
    types = {choice.get("type") for choice in choices}
    return "string" in types and "boolean" not in types


def _no_text(*refused: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema that a text is not valid under. The error of `dg check yaml` shows it,
    with sorted keys, so that it begins with the reason.
    """
    return {"$comment": _HOW_YAML_READS, "anyOf": list(refused)}


class _Declaration(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_complete_schema)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        """Return the mapping as it is. Raises PydanticCustomError for a key that the form does not
        have.
        """
        known = keys_of(cls)
        for key in given if isinstance(given, Mapping) else ():
            if key not in known:
                raise PydanticCustomError(UNKNOWN_KEY, "unknown key", {"key": key, "known": known})
        return given


def keys_of(form: type[BaseModel]) -> list[str]:
    """Return the keys that a form takes."""
    return [field.alias or name for name, field in form.model_fields.items()]


class _ByShape:
    """Annotates a union: a declaration, an import with the key `python`, and possibly values that
    are no mappings.

    The JSON schema chooses one of them by the value's shape, so that an error is about that one
    only. So does pydantic, by `_shape`.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        forms = handler(core)["oneOf"]
        # Models are references, in the order of `_by_shape`; a plain type (`_alone_type`) never is.
        declared, imported = (form for form in forms if "$ref" in form)
        plain = [form for form in forms if "$ref" not in form]
        mapping = {"if": {"required": [PYTHON]}, "then": imported, "else": declared}
        if not plain:
            return mapping
        return {"if": {"type": "object"}, "then": mapping, "else": plain[0]}


def _shape(value: Any) -> str:
    """Return "imported" for {python: …}, "declared" for another mapping, else "alone"."""
    if isinstance(value, Mapping):
        return "imported" if PYTHON in value else "declared"
    return "alone"


def _by_shape(declared: Any, alone: Any = None) -> Any:
    """Return the type of a value that is a declaration or an import. If `alone` is given, a value
    that is no mapping is of that type.
    """
    forms = Annotated[declared, Tag("declared")] | Annotated[Imported, Tag("imported")]
    if alone is not None:
        forms |= Annotated[alone, Tag("alone")]
        return Annotated[forms, Discriminator(_shape), _ByShape]
    return Annotated[forms, Discriminator(_mapping_shape), _ByShape]


def _mapping_shape(value: Any) -> str:
    """Return "imported" for {python: …}, else "declared": also for a value that is no mapping,
    whose error then is that of a declaration.
    """
    return "imported" if _shape(value) == "imported" else "declared"


def _model(
    name: str, function: Callable[..., Any], *, without: Sequence[str] = (), **more: Any
) -> type[_Declaration]:
    """Return a pydantic model of a function's arguments, except `without`; `more` are fields
    that only YAML has.
    """
    fields: dict[str, Any] = {}
    for argument in signature_of(function).arguments:
        if argument.name not in without:
            default = ... if argument.is_required else None
            # A field may not have the name of a method of the model, such as schema.
            name_of_field = f"{argument.name}_"
            fields[name_of_field] = (argument.yaml_type, Field(default, alias=argument.key))
    return create_model(
        name, __base__=_Declaration, __doc__=inspect.getdoc(function), **fields, **more
    )


Imported = create_model("Imported", __base__=_Declaration, python=(str, ...))


def step_form(name: str, function: Callable[..., Any]) -> Any:
    """Return the type of a step's YAML value: its arguments by name, or the first one alone if
    no other is required.

    It is a mapping of columns for a function that takes any name, and `true` for one without
    arguments; both types take null, too.
    """
    signature = signature_of(function)
    if signature.takes_any_name:
        return dict[str, str] | None
    if not signature.arguments:
        return Literal[True] | None
    first, *others = signature.arguments
    form = _model("".join(map(str.title, name.split("_"))), function)
    if any(other.is_required for other in others):
        return form  # more than the first one is needed
    return _by_shape(form, _alone_type(first))


def _alone_type(argument: Argument) -> Any:
    """Return the YAML type of a step's first argument where it is written without its key, as in
    `filter: a > 1`.

    A mapping is left out, because it would be the arguments by name; null, because a step that is
    written needs a value. A starred argument is a list, or its only item.
    """
    members = [kind for kind in argument.form.members if kind is not type(None)]
    yaml_types = []
    for kind in members:
        yaml_type = _yaml_type(kind)
        if get_origin(yaml_type) is not dict:
            yaml_types.append(yaml_type)
    if not yaml_types:
        # The argument takes only mappings or objects. A text passes here, because the error that
        # the operator then raises says more than that of this type.
        yaml_types = [str]
    single: Any = _union(yaml_types)
    return argument.yaml_type | single if argument.is_starred else single


_METHODS = {
    name: method for name, method in vars(MessageStream).items() if inspect.isfunction(method)
}
STEPS: dict[str, Callable[..., Any]] = {
    "input_stream": Application.input_stream,
    "input_changes": Application.input_changes,
    **{
        name: method
        for name, method in _METHODS.items()
        if not name.startswith("_") and name != "apply"
    },
}
_FROM = "The step whose records this one gets, by its `as`; by default the step before it."
_AS = "A name for the records that leave this step, for `from`, merge and join_stream."
_STEP: dict[str, Any] = {
    "after": (str, Field(None, alias="from", description=_FROM)),
    "name": (str, Field(None, alias="as", description=_AS)),
    **{name: (step_form(name, function), None) for name, function in STEPS.items()},
}
Step = create_model(
    "Step", __base__=_Declaration, __doc__="One operator, with what it is given.", **_STEP
)
OutputStreamForm = _model("OutputStream", Application.output_stream, without=("name",))
OutputTableForm = _model(
    "OutputTable",
    Application.output_table,
    without=("table",),
    iceberg=(_model("IcebergTable", IcebergTable) | None, None),
    delta=(_model("DeltaLakeTable", DeltaLakeTable) | None, None),
)
LocalTableForm = _model("LocalTable", Application.local_table, without=("name",))
ApplicationForm = _model(
    "Application",
    Application,
    without=("name",),
    output_streams=(dict[str, OutputStreamForm], {}),  # type: ignore[valid-type]
    output_tables=(dict[str, OutputTableForm], {}),  # type: ignore[valid-type]
    local_tables=(dict[str, LocalTableForm], {}),  # type: ignore[valid-type]
    datasets=(
        list[str],
        Field([], description="Datasets that belong to it although no step names them."),
    ),
    max_staleness=(
        dict[str, _DURATION],
        Field({}, description="By unbounded dataset: how old it may be."),
    ),
    steps=(list[Step], ...),
)
FileStreamForm = _model("FileStream", file_stream, without=("name",))
IcebergStreamForm = _model("IcebergStream", iceberg_stream, without=("name",))
DeltaStreamForm = _model("DeltaStream", delta_stream, without=("name",))
IcebergChangesForm = _model("IcebergChanges", iceberg_changes, without=("name",))
DeltaChangesForm = _model("DeltaChanges", delta_changes, without=("name",))
BoundedForm = _model("BoundedDataset", bounded_dataset, without=("name",))
UnboundedForm = _model("UnboundedDataset", unbounded_dataset, without=("name",))
_STORE = "Both read_function and write_function, such as {PostgresTable: {...}}."
TableForm = _model(
    "RemoteTable",
    RemoteTable,
    without=("name",),
    store=(dict[str, Any], Field(None, description=_STORE)),
)
Attributes = _model(
    "Attributes",
    build_definitions,
    without=("app", "more"),
    kafka=(
        dict[str, dict[str, Any]],
        Field({}, description="Kafka clusters by name: the arguments of kafka_system."),
    ),
    file_streams=(
        dict[str, FileStreamForm],  # type: ignore[valid-type]
        Field({}, description="Streams of files by name: clicks is the stream files.clicks."),
    ),
    iceberg_streams=(
        dict[str, IcebergStreamForm],  # type: ignore[valid-type]
        Field({}, description="Iceberg tables by name: events is the stream iceberg.events."),
    ),
    delta_streams=(
        dict[str, DeltaStreamForm],  # type: ignore[valid-type]
        Field({}, description="Delta tables by name: orders is the stream delta.orders."),
    ),
    iceberg_changes=(
        dict[str, IcebergChangesForm],  # type: ignore[valid-type]
        Field({}, description="Iceberg tables by name: a is the stream table-changes.a."),
    ),
    delta_changes=(
        dict[str, DeltaChangesForm],  # type: ignore[valid-type]
        Field({}, description="Delta tables by name: a is the stream table-changes.a."),
    ),
    bounded_datasets=(dict[str, _by_shape(BoundedForm)], {}),  # type: ignore[misc]
    unbounded_datasets=(dict[str, _by_shape(UnboundedForm)], {}),  # type: ignore[misc]
    tables=(dict[str, _by_shape(TableForm)], {}),  # type: ignore[misc]
    applications=(dict[str, ApplicationForm], Field(..., min_length=1)),  # type: ignore[valid-type]
)


class AsWritten(RootModel[Any]):
    """The attributes as they are written: `AdjunctComponent.load` checks them, because it knows
    their lines.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(Attributes.__pydantic_core_schema__)

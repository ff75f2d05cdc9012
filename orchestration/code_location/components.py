"""Datasets, tables and applications declared in YAML, for Dagster's components and its command line
`dg`.

YAML uses the names of the Python API: a section or step is a function or method, its keys are the
arguments. A value such as `{Tumbling: {size: 5m}}` calls a public class or function with arguments;
`{python: "module:name"}` is an object of a module; a duration is 30s, 5m, 2h, 7d or 1w. Values are
checked as strictly as those of the Python API: no number is taken for a text, no `2.0` for a whole
number. Errors name the line and column.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import dagster as dg
import yaml
from dagster.components.resolved.context import ResolutionContext
from dagster.components.resolved.errors import ResolutionException
from dagster.components.scaffold.scaffold import Scaffolder, ScaffoldRequest
from dagster_shared.yaml_utils.source_position import SourcePositionTree
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    RootModel,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.orchestration.application.application import Application, import_user_module
from dagster_adjunct.orchestration.application.graph import (
    DatasetHandle,
    OutputStream,
    RemoteTableHandle,
)
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.code_location.definitions import build_definitions
from dagster_adjunct.orchestration.operators.event_time import ARRIVAL
from dagster_adjunct.orchestration.planner.planner import (
    build_plan,
    check_syntax,
    read_catalog,
    systems_for,
)
from dagster_adjunct.resources.code_lines import CodeLine, declaring_at
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ComponentError,
    ConfigurationError,
    InvalidNameError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.times import read_duration
from dagster_adjunct.resources.validation import type_hints, validated_methods

Place = tuple[str | int, ...]
_PYTHON = "python"
_UNKNOWN = "unknown_key"
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_IN_YAML = {"on": "by"}  # the key for the argument `on`, because YAML reads `on` as true
_ON = re.compile(r"\bon=")
_PLAIN = (str, int, float, bool, type(None))
_TARGETS = (DatasetHandle, RemoteTableHandle, OutputStream)
_MODULES = (
    "automation",
    "changes",
    "code_location",
    "exchange",
    "sources",
    "tables",
    "validators",
    "windows",
    "kafka",
)
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# -- models of the YAML, made from the signatures of the API


def _list_names(schema: dict[str, Any]) -> None:
    """Let `dg check yaml` say which keys there are, where it finds an unknown one."""
    schema["propertyNames"] = {"enum": list(schema.get("properties", ()))}


class _Declaration(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_list_names)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in given if isinstance(given, Mapping) else ():
            if key not in known:
                raise PydanticCustomError(_UNKNOWN, "unknown key", {"key": key, "known": known})
        return given


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
        declared, imported = (form for form in forms if "$ref" in form)
        others = [form for form in forms if "$ref" not in form]
        chosen = {"if": {"required": [_PYTHON]}, "then": imported, "else": declared}
        return {"if": {"type": "object"}, "then": chosen, "else": others[0]} if others else chosen


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "imported" if _PYTHON in value else "declared"
    return "alone"


def _by_shape(declared: Any, alone: Any = None) -> Any:
    """Return the type of a value that is a declaration, an import, or else of the type `alone`,
    if that is given.
    """
    forms = Annotated[declared, Tag("declared")] | Annotated[Imported, Tag("imported")]
    if alone is not None:
        forms |= Annotated[alone, Tag("alone")]
        return Annotated[forms, Discriminator(_shape), _ByShape]
    return Annotated[forms, Discriminator(_mapping_shape), _ByShape]


def _mapping_shape(value: Any) -> str:
    return "imported" if _shape(value) == "imported" else "declared"


def _arguments(function: Callable[..., Any]) -> dict[str, tuple[Any, inspect.Parameter]]:
    """Return, by name, the type and the parameter of each argument of a function or class.

    Options that the function takes as `**options: Unpack[…]` are included, one by one.
    """
    made: Any = function
    if isinstance(function, type) and not is_dataclass(function):
        made = vars(function)["__init__"]
    hints, parameters = (
        type_hints(inspect.unwrap(made)),
        inspect.signature(function).parameters.values(),
    )
    found: dict[str, tuple[Any, inspect.Parameter]] = {}
    for parameter in parameters:
        hint = hints.get(parameter.name, Any)
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is not None:  # Unpack[…]
            options = get_type_hints(get_args(hint)[0])
            found |= {
                name: (
                    kind,
                    parameter.replace(name=name, kind=parameter.KEYWORD_ONLY, default=None),
                )
                for name, kind in options.items()
            }
        elif parameter.name != "self":
            found[parameter.name] = (hint, parameter)
    return found


def _form(hint: Any) -> Any:
    """Return the type of the YAML value for an argument of type `hint`, such as str for a stream
    or a duration.
    """
    members = _members(hint)
    if len(members) > 1:
        return Union[tuple(dict.fromkeys(_form(member) for member in members))]  # noqa: UP007
    (kind,) = members
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        return kind
    if kind in (Any, object):
        return Any
    if kind is timedelta:
        return str
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Literal[tuple(member.name.lower() for member in kind)]
    if kind is MessageStream or kind in _TARGETS:
        return str  # its name
    if kind is Schema:
        return dict[str, str]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, _form(arguments[1])]  # type: ignore[misc]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return list[Union[tuple(_form(each) for each in arguments if each is not ...)]]  # type: ignore[misc]  # noqa: UP007
    return dict[str, Any]  # {Class: …} or {python: …}


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for each in get_args(hint) for member in _members(each))
    return (hint,)


def _model(
    name: str, function: Callable[..., Any], *, without: Sequence[str] = (), **more: Any
) -> type[_Declaration]:
    """Return a pydantic model of a function's arguments, except `without`; `more` are fields
    that only YAML has.
    """
    fields: dict[str, Any] = {}
    for argument, (hint, parameter) in _arguments(function).items():
        if argument in without:
            continue
        form = _form(hint)
        is_starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.kind is parameter.VAR_POSITIONAL:
            form = list[form]  # type: ignore[valid-type]
        needed = parameter.default is parameter.empty and not is_starred
        # A field may not have the name of a method of the model, such as schema.
        fields[f"{argument}_"] = (
            form,
            Field(... if needed else None, alias=_IN_YAML.get(argument, argument)),
        )
    return create_model(
        name, __base__=_Declaration, __doc__=inspect.getdoc(function), **fields, **more
    )


Imported = create_model("Imported", __base__=_Declaration, python=(str, ...))


def _step_form(name: str, function: Callable[..., Any]) -> Any:
    """Return the type of a step's YAML value: its arguments by name, or the first one alone if
    it needs no other.
    """
    arguments = list(_arguments(function).values())
    if not arguments:
        return Literal[True] | None
    hint, first = arguments[0]
    if first.kind is first.VAR_KEYWORD:
        return dict[str, str] | None
    form = _model("".join(map(str.title, name.split("_"))), function)
    if any(other.default is other.empty for _, other in arguments[1:]):
        return form  # more than the first one is needed
    alone: Any = list[_form(hint)] | str if first.kind is first.VAR_POSITIONAL else str  # type: ignore[misc]
    return _by_shape(form, alone)


_METHODS = {
    name: method for name, method in vars(MessageStream).items() if inspect.isfunction(method)
}
_STEPS: dict[str, Callable[..., Any]] = {
    "input_stream": Application.input_stream,
    **{
        name: method
        for name, method in _METHODS.items()
        if not name.startswith("_") and name != "apply"
    },
}
_MADE_BY: dict[Any, type] = {
    bounded_dataset: AdjunctDataset,
    unbounded_dataset: AdjunctDataset,
    RemoteTable: RemoteTable,
}
_FROM = "The step whose records this one gets, by its `as`; by default the step before it."
_AS = "A name for the records that leave this step, for `from`, merge and join_stream."
_STEP: dict[str, Any] = {
    "after": (str, Field(None, alias="from", description=_FROM)),
    "name": (str, Field(None, alias="as", description=_AS)),
    **{name: (_step_form(name, function), None) for name, function in _STEPS.items()},
}
Step = create_model(
    "Step", __base__=_Declaration, __doc__="One operator, with what it is given.", **_STEP
)
OutputStreamForm = _model("OutputStream", Application.output_stream, without=("name",))
LocalTableForm = _model("LocalTable", Application.local_table, without=("name",))
ApplicationForm = _model(
    "Application",
    Application,
    without=("name",),
    output_streams=(dict[str, OutputStreamForm], {}),  # type: ignore[valid-type]
    local_tables=(dict[str, LocalTableForm], {}),  # type: ignore[valid-type]
    datasets=(
        list[str],
        Field([], description="Datasets that belong to it although no step names them."),
    ),
    max_staleness=(
        dict[str, str],
        Field({}, description="By unbounded dataset: how old it may be."),
    ),
    steps=(list[Step], ...),
)
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


# -- mistakes in values


@dataclass(frozen=True, slots=True)
class _Mistake:
    """What is wrong with the value at a place, and what to do."""

    place: Place
    problem: str
    next_step: str


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def find_mistake(given: Any, line_of: Callable[[Place], int]) -> _Mistake | None:
    """Return the mistake in the attributes that comes first in the file, None if their keys and
    values are right.
    """
    try:
        Attributes.model_validate(given)
    except ValidationError as error:
        found: dict[Place, list[ErrorDetails]] = {}
        for problem in error.errors(include_url=False):
            found.setdefault(_place_of(problem, given), []).append(problem)
        # An alternative of which only an element is wrong says more than those that are wrong as a
        # whole.
        whole = {place[:length] for place in found for length in range(len(place))}
        first = min((place for place in found if place not in whole), key=line_of)
        return _describe_mistake(("attributes", *first), found[first])
    return None


def _place_of(problem: ErrorDetails, given: Any) -> Place:
    """Return the path to what the problem is about, without the names of alternatives in it."""
    place: list[str | int] = []
    value = given
    for at in problem["loc"]:
        is_key = isinstance(value, Mapping) and at in value
        if is_key or (isinstance(value, list) and isinstance(at, int)):
            value = value[at]
            place.append(at)
    if problem["type"] == _UNKNOWN:
        place.append(problem["ctx"]["key"])
    return tuple(place)


def _describe_mistake(place: Place, problems: Sequence[ErrorDetails]) -> _Mistake:
    first = problems[0]
    if first["type"] == _UNKNOWN:
        key, known = str(first["ctx"]["key"]), first["ctx"]["known"]
        near = difflib.get_close_matches(key, known, n=1)
        step = f"Did you mean {near[0]}?" if near else f"Give one of {', '.join(known)}."
        return _Mistake(place, f"{place[-2]} takes no {key!r}.", step)
    if missing := [str(problem["loc"][-1]) for problem in problems if problem["type"] == "missing"]:
        return _Mistake(place, f"{place[-1]} lacks {', '.join(missing)}.", f"Add {missing[0]}: …")
    value = first["input"]
    expected = " or ".join(dict.fromkeys(map(_expected, problems)))
    what = f"item {place[-1] + 1} of {place[-2]}" if isinstance(place[-1], int) else place[-1]
    found = "is empty" if value is None or value in ({}, []) else f"is {_written(value)}"
    return _Mistake(place, f"{what} {found}: expected {expected}.", _next_step(value, expected))


def _expected(problem: ErrorDetails) -> str:
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    return _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))


def _written(value: Any) -> str:
    """Return a value as it would be written in YAML, in one line."""
    try:
        text = str(
            yaml.safe_dump(
                value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1_000_000
            )
        )
    except yaml.YAMLError:  # such as a set, whose items Dagster has wrapped
        return f"a {type(value).__name__}"
    text = text.removesuffix("\n").removesuffix("\n...")
    text = f"'{text}'" if isinstance(value, str) and not text.startswith(("'", '"')) else text
    return text if len(text) <= 80 else f"{text[:77]}..."


def _next_step(value: Any, expected: str) -> str:
    if value is None:
        return "Give a value, or remove the key."
    if isinstance(value, bool | int | float) and "a text" in expected:
        return f"Write it in quotes: '{_written(value)}'."
    if isinstance(value, float) and value.is_integer() and "a whole number" in expected:
        return f"Write {int(value)}."
    if isinstance(value, str) and "number" in expected and re.fullmatch(_WHOLE_NUMBER, value):
        return f"Write {value} without quotes."
    if (
        isinstance(value, str)
        and "true or false" in expected
        and value.lower() in ("true", "false")
    ):
        return f"Write {value.lower()} without quotes."
    return f"Give {expected}."


# -- from YAML to the API


class _Translation:
    """Declares what one YAML document describes.

    `tree` knows the line of each value, and is None if the document is not from a file. The `place`
    of a value is the path to it, such as ("attributes", "tables", "rates").
    """

    def __init__(self, tree: SourcePositionTree | None, empty: Collection[Place] = ()) -> None:
        self.tree = tree
        self.empty = set(empty)
        self.datasets: dict[str, AdjunctDataset] = {}
        self.tables: dict[str, Any] = {}
        self.declared_in: dict[tuple[str, str], Place] = {}

    def applications(self, given: Mapping[str, Any]) -> dict[str, _ApplicationTranslation]:
        """Declare all datasets, tables and applications; return the applications by name."""
        place: Place = ("attributes",)
        for name, arguments in given.get("kafka", {}).items():
            self.cluster(name, arguments, (*place, "kafka", name))
        for section, function in (
            ("bounded_datasets", bounded_dataset),
            ("unbounded_datasets", unbounded_dataset),
        ):
            for name, arguments in given.get(section, {}).items():
                where = (*place, section, name)
                self.refuse_second(name, where)
                self.declared_in["dataset", name] = where
                self.datasets[name] = self.declared(function, name, arguments, where)
        for name, arguments in given.get("tables", {}).items():
            self.refuse_second(name, (*place, "tables", name))
            self.tables[name] = self.table(name, arguments, (*place, "tables", name))
        for name in given["applications"]:
            self.declared_in["application", name] = (*place, "applications", name)
        return {
            name: _ApplicationTranslation(self, name, arguments, (*place, "applications", name))
            for name, arguments in given["applications"].items()
        }

    def cluster(self, name: str, arguments: Mapping[str, Any], place: Place) -> None:
        """Register a Kafka cluster as a stream system; refuse it if Kafka's client, an extra, is
        not installed.
        """
        register = _public("kafka_system")
        if register is None:
            self.refuse(
                "Kafka's client is not installed.",
                'Run pip install "dagster-adjunct[kafka]".',
                place,
            )
        self.call(register, arguments, place, name)

    def refuse_second(self, name: str, place: Place) -> None:
        """Refuse a name that another dataset or table has."""
        if name in self.datasets or name in self.tables:
            self.refuse(
                f"two datasets or tables have the name {name!r}.", "Rename one of them.", place
            )

    def read_source(self) -> None:
        """Read the file again for what its values no longer show.

        Remember which values are empty. Refuse a mapping that has the same key twice, of which
        Dagster would silently use the last, and scalars that YAML reads as something else than they
        look like, such as 010 and yes.
        """
        if self.tree is None or not Path(self.tree.position.filename).is_file():
            return
        text = Path(self.tree.position.filename).read_text(encoding="utf-8")
        for root in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if (root.start_mark.line + 1, root.start_mark.column + 1) == self.tree.position.start:
                self.read_node(root, (), set())

    def read_node(self, node: yaml.Node, place: Place, seen: set[yaml.Node]) -> None:
        if node in seen:  # a YAML alias leads to it again
            return
        seen.add(node)
        if isinstance(node, yaml.ScalarNode):
            self.read_scalar(node, place)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.read_node(item, (*place, number), seen)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if key.value in lines and key.value != "<<":  # merge keys may be repeated
                    found = (
                        f"the key {key.value!r} is given twice, first in line {lines[key.value]}."
                    )
                    self.refuse(
                        found,
                        "Rename or remove one; each step begins with `- `.",
                        (*place, key.value),
                    )
                lines[key.value] = key.start_mark.line + 1
                loaded = yaml.safe_load(key.value) if _is_misread(key) else key.value
                self.read_scalar(key, (*place, loaded))
                self.read_node(value, (*place, loaded), seen)

    def read_scalar(self, node: yaml.Node, place: Place) -> None:
        if place[:1] != ("attributes",):
            return
        if node.tag.endswith(":null") and node.value == "":
            self.empty.add(place)
        elif _is_misread(node):
            read = _written(yaml.safe_load(node.value))
            instead = _IN_YAML.get(node.value, f"{read} if you mean that")
            self.refuse(
                f"YAML reads {node.value} as {read}.",
                f"Write {instead}, or '{node.value}' for a text.",
                place,
            )

    def check_values(self, given: Any) -> None:
        """Refuse unknown and missing keys, and values of a wrong kind."""
        mistake = find_mistake(given, lambda place: self.line_of(("attributes", *place)))
        if mistake is not None:
            self.refuse(mistake.problem, mistake.next_step, mistake.place)

    def line_of(self, place: Place) -> int:
        if self.tree is None:
            return 0
        position, _ = self.tree.lookup_closest_and_path(list(place), None)
        return int(position.start.line)

    def definitions(self, given: Mapping[str, Any]) -> dg.Definitions:
        """Return the definitions of all applications."""
        apps = self.applications(given)
        if os.environ.get("DAGSTER_IS_DEFS_VALIDATION_CLI"):  # `dg check defs`
            written = {stream for app in apps.values() for stream in app.app.outputs}
            for app in apps.values():
                app.plan(given.get("lake"), written, self)
        options = {
            name: value for name, value in given.items() if name in _arguments(build_definitions)
        }
        made: dg.Definitions = self.call(
            build_definitions, options, ("attributes",), *(app.app for app in apps.values())
        )
        return made

    def declared(
        self, function: Callable[..., Any], name: str, arguments: Mapping[str, Any], place: Place
    ) -> Any:
        """Call `function` with the name and these arguments; for {python: "module:name"}, import
        the object instead.

        An imported object must have been declared with the same name.
        """
        if arguments.keys() != {_PYTHON}:
            return self.call(function, arguments, place, name)
        made = self.imported(arguments[_PYTHON], (*place, _PYTHON))
        kind = _MADE_BY[function]
        is_of_kind = isinstance(made, kind)
        if isinstance(made, AdjunctDataset):
            is_of_kind = is_of_kind and made.kind in function.__name__
        if not is_of_kind:
            found = (
                f"{arguments[_PYTHON]!r} is {_describe(made)}: expected what"
                f" {_label(function)} returns."
            )
            self.refuse(
                found, f"Name a {kind.__name__}, in the section of its kind.", (*place, _PYTHON)
            )
        if getattr(made, "name", None) != name:
            found = (
                f"{arguments[_PYTHON]!r} has the name {getattr(made, 'name', None)!r}: expected"
                f" {name!r}."
            )
            self.refuse(found, "Declare it under its own name.", (*place, _PYTHON))
        return made

    def table(self, name: str, arguments: Mapping[str, Any], place: Place) -> Any:
        """Return a remote table; its `store`, if given, is both its read function and its write
        function.
        """
        if "store" not in arguments:
            return self.declared(RemoteTable, name, arguments, place)
        hint = _arguments(RemoteTable)["read_function"][0]
        store = self.value(arguments["store"], hint, (*place, "store"))
        rest = {argument: value for argument, value in arguments.items() if argument != "store"}
        return self.call(RemoteTable, rest, place, name, read_function=store, write_function=store)

    def call(
        self, function: Callable[..., Any], given: Any, place: Place, /, *args: Any, **more: Any
    ) -> Any:
        """Call a function or class with the arguments that YAML gives: a mapping by name, or the
        first one alone.

        `args` and `more` are passed as they are, before and besides those of YAML.
        """
        arguments, positional, keywords = _arguments(function), list(args), dict(more)
        unnamed = [name for name in arguments if name not in more][len(args) :]
        if any(
            parameter.kind is parameter.VAR_KEYWORD for _, parameter in arguments.values()
        ):  # it takes any names
            keywords, given = {**keywords, **(given or {})}, {}
        if not isinstance(given, Mapping) or (
            given.keys() == {_PYTHON} and _PYTHON not in arguments
        ):
            if not unnamed and given not in (None, True):
                self.refuse(
                    f"{_label(function)} takes no arguments, and has {given!r}.",
                    "Leave it out.",
                    place,
                )
            given = {unnamed[0]: given} if unnamed and given is not None else {}
        named = {_IN_YAML.get(argument, argument): argument for argument in arguments}
        for key in keywords.keys() | given.keys():
            if (*place, key) in self.empty:
                step = "Give its value, such as [] for an empty list, or remove the key."
                self.refuse(f"{key} is empty.", step, (*place, key))
        for key, value in given.items():
            if key not in named:
                takes = ", ".join(_IN_YAML.get(name, name) for name in unnamed) or "nothing"
                self.refuse(
                    f"{_label(function)} takes no {key!r}.", f"It takes {takes}.", (*place, key)
                )
            name, place_of = named[key], (*place, key)
            hint, parameter = arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                each = value if isinstance(value, list) else [value]
                positional += [
                    self.value(one, hint, (*place_of, number)) for number, one in enumerate(each)
                ]
            else:
                arrives = name == "event_time" and value == "ARRIVAL"
                keywords[name] = ARRIVAL if arrives else self.value(value, hint, place_of)
        position = (
            None if self.tree is None else self.tree.lookup_closest_and_path(list(place), None)[0]
        )
        try:
            with declaring_at(
                None if position is None else CodeLine(position.filename, position.start.line)
            ):
                return function(*positional, **keywords)
        except InvalidNameError as error:
            named_so = [(*place, key) for key, value in given.items() if value == error.name]
            self.refuse_as(error, named_so[0] if named_so and error.argument is None else place)
        except AdjunctError as error:
            self.refuse_as(error, place)

    def value(self, value: Any, hint: Any, place: Place) -> Any:
        """Return the argument of type `hint` that a YAML value describes: imports, calls and
        texts are resolved.
        """
        members = _members(hint)
        if isinstance(value, str):
            return self.text(value, members, place)
        if isinstance(value, list):
            kinds = [
                kind for kind in members if _is_kind(kind, Iterable) and not _is_kind(kind, Mapping)
            ]
            inner = [one for kind in kinds for one in get_args(kind) if one is not ...]
            element = Union[tuple(inner)] if inner else Any  # noqa: UP007
            made = [self.value(one, element, (*place, number)) for number, one in enumerate(value)]
            return tuple(made) if any(_is_kind(kind, tuple) for kind in kinds) else made
        if not isinstance(value, Mapping):
            return value
        if value.keys() == {_PYTHON} and isinstance(value[_PYTHON], str):
            return self.imported(value[_PYTHON], (*place, _PYTHON))
        if Schema in members:
            return self.call(Schema.of, value, place)
        mapping = next((kind for kind in members if _is_kind(kind, Mapping)), None)
        objects = (
            any(kind not in _PLAIN and get_origin(kind) in (None, type) for kind in members)
            or mapping is None
        )
        name, arguments = next(iter(value.items())) if len(value) == 1 else ("", None)
        made_by = _public(name) if objects and isinstance(name, str) and name else None
        if made_by is not None:
            return self.call(made_by, arguments, (*place, name))
        if mapping is None and Any in members:
            return {key: self.value(one, Any, (*place, key)) for key, one in value.items()}
        if mapping is None:
            found = (
                f"the package has no class or function {name!r}"
                if name
                else f"{place[-1]} is {dict(value)!r}"
            )
            self.refuse(
                f"{found}.",
                'Give {Class: {argument: value}}, or {python: "module:name"}.',
                (*place, name),
            )
        inside = get_args(mapping)[1] if get_args(mapping) else Any
        return {name: self.value(one, inside, (*place, name)) for name, one in value.items()}

    def text(self, text: str, members: Sequence[Any], place: Place) -> Any:
        """Return the argument that a string describes: a duration or an enum member if `members`
        has that type.

        `members` are the types that the argument may have. Any other string stays as it is.
        """
        if any(get_origin(kind) is Literal and text in get_args(kind) for kind in members):
            return text
        if timedelta in members:
            duration = read_duration(text)
            if duration is None and str not in members:
                self.refuse(
                    f"{place[-1]} is {text!r}: expected a duration.",
                    "Give 30s, 5m, 2h, 7d or 1w.",
                    place,
                )
            return text if duration is None else duration
        for kind in members:
            if isinstance(kind, type) and issubclass(kind, Enum):
                found = {member.name.lower(): member for member in kind}
                if text.lower() not in found:
                    self.refuse(f"{place[-1]} is {text!r}.", f"Give {', '.join(found)}.", place)
                return found[text.lower()]
        return text

    def imported(self, reference: str, place: Place) -> Any:
        """Import the object "module:name" and return it."""
        module, _, names = reference.partition(":")
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", reference):
            self.refuse(f"{reference!r} names nothing of a module.", 'Give "module:name".', place)
        try:
            found: Any = import_user_module(module)
        except AdjunctError as error:
            self.refuse_as(error, place)
        for name in names.split("."):
            if not hasattr(found, name):
                self.refuse(
                    f"{reference!r}: there is no {name!r}.",
                    "Correct the name after the colon.",
                    place,
                )
            found = getattr(found, name)
        if isinstance(found, (*_PLAIN, types.ModuleType)):
            step = (
                "Write texts and numbers in YAML; name a function, a dataset, a table or another"
                " object here."
            )
            self.refuse(
                f"{reference!r} is {_describe(found)}: expected an object of a module.", step, place
            )
        return found

    def refuse(self, problem: str, next_step: str, place: Place) -> NoReturn:
        self.refuse_as(ConfigurationError(problem, next_step, argument=str(place[-1])), place)

    def refuse_as(self, error: AdjunctError, place: Place) -> NoReturn:
        """Raise the error as ComponentError, with the file, line and column of `place` and its
        lines.

        If the error names an argument, its place is that of the argument.
        """
        if isinstance(error, ComponentError):
            raise error
        if place == (
            "attributes",
        ):  # build_definitions has raised it: find the declaration that it names
            owners = ((kind, getattr(error, kind, None)) for kind in ("application", "dataset"))
            place = next(
                (self.declared_in[one] for one in owners if one in self.declared_in), place
            )
        about = getattr(error, "argument", None)
        about = _IN_YAML.get(str(about), about)
        if isinstance(about, str) and place[-1] != about:
            place = (*place, about)
        problem, next_step = (_ON.sub("by=", text) for text in (error.problem, error.next_step))
        facts = {
            name: value
            for name, value in error.facts.items()
            if name in ComponentError.__dataclass_fields__
        }
        facts["argument"] = about if isinstance(about, str) else None
        if self.tree is not None:
            position, _ = self.tree.lookup_closest_and_path(list(place), None)
            snippet = self.tree.source_error(list(place), "here", False).snippet
            declared = re.escape(str(CodeLine(position.filename, 0)).removesuffix("0"))
            problem = re.sub(
                rf"^{declared}\d+: ", "", problem
            )  # of the declaration, which may begin above
            where = f"{position.filename}:{position.start.line}:{position.start.col}"
            problem = f"{where}: {'.'.join(map(str, place))}: {problem}\n{snippet}"
            facts |= {"file": position.filename, "line": position.start.line}
        # Dagster prints the stack of each cause, which is no help to whoever writes YAML.
        raise ComponentError(problem, next_step or "Correct it there.", **facts) from None


class _ApplicationTranslation(_Translation):
    """Declares one application; `places` has, by operator id, the place of the step that made
    the operator.
    """

    def __init__(
        self, whole: _Translation, name: str, given: Mapping[str, Any], place: Place
    ) -> None:
        super().__init__(whole.tree, whole.empty)
        self.datasets, self.tables = whole.datasets, whole.tables
        options = {
            argument: value
            for argument, value in given.items()
            if argument in _arguments(Application)
        }
        self.place, self.given = place, given
        self.app: Application = self.call(Application, options, place, name)
        self.places: dict[str, Place] = {}
        self.streams: dict[str, MessageStream] = {}
        self.targets: dict[str, Any] = {}
        for section, declare in (
            ("output_streams", self.app.output_stream),
            ("local_tables", self.app.local_table),
        ):
            for target, arguments in given.get(section, {}).items():
                self.refuse_second(target, (*place, section, target))
                self.targets[target] = self.call(
                    declare, arguments, (*place, section, target), target
                )
        for number, dataset in enumerate(given.get("datasets", ())):
            self.target(dataset, (*place, "datasets", number))
        for dataset in given.get("max_staleness", {}):
            if dataset not in self.datasets:
                where = (*place, "max_staleness", dataset)
                self.refuse(f"{dataset!r} is no dataset of this file.", "Name one that is.", where)
            self.target(dataset, (*place, "max_staleness", dataset))
        before: MessageStream | None = None
        for number, step in enumerate(given["steps"]):
            before = self.step(step, before, (*place, "steps", number))

    def step(
        self, step: Mapping[str, Any], before: MessageStream | None, place: Place
    ) -> MessageStream:
        """Add one step's operator and return the stream that leaves it."""
        named = [name for name in step if name in _STEPS]
        if len(named) != 1:
            found = f"a step has {' and '.join(named) or 'no operator'}: expected one operator."
            self.refuse(found, f"Give one of {', '.join(_STEPS)}.", place)
        (name,), known = named, set(self.app._graph.operators)
        if name == "input_stream":
            if "from" in step:
                self.refuse(
                    "an input gets no records of a step.", "Leave `from` out.", (*place, "from")
                )
            stream = self.call(self.app.input_stream, step[name], (*place, name))
        else:
            source = self.stream(step["from"], (*place, "from")) if "from" in step else before
            if source is None:
                self.refuse(
                    "the first step reads no stream.", "Begin with input_stream.", (*place, name)
                )
            stream = self.call(getattr(source, name), step[name], (*place, name))
        self.places |= dict.fromkeys(set(self.app._graph.operators) - known, (*place, name))
        if "as" in step:
            if step["as"] in self.streams:
                self.refuse(
                    f"two steps have the name {step['as']!r}.",
                    "Rename one of them.",
                    (*place, "as"),
                )
            self.streams[step["as"]] = stream
        return stream  # type: ignore[no-any-return]

    def stream(self, name: str, place: Place) -> MessageStream:
        """Return the stream that leaves the step whose `as` is this name."""
        if name not in self.streams:
            known = ", ".join(self.streams) or "none yet"
            self.refuse(
                f"no step before is named {name!r}.", f"Give a step's `as`: {known}.", place
            )
        return self.streams[name]

    def text(self, text: str, members: Sequence[Any], place: Place) -> Any:
        """Return the stream, dataset, table or output stream that a string names, if `members` has
        such a type.

        Any other string is handled as in a whole document.
        """
        if MessageStream in members:
            return self.stream(text, place)
        if not any(kind in _TARGETS for kind in members):
            return super().text(text, members, place)
        return self.target(text, place)

    def target(self, name: str, place: Place) -> Any:
        """Return the application's dataset, table or output stream of this name; the first call
        adds it to the app.
        """
        if name not in self.targets:
            declared = self.datasets.get(name) or self.tables.get(name)
            if declared is None:
                known = ", ".join([*self.targets, *self.datasets, *self.tables]) or "nothing"
                self.refuse(f"{name!r} is not declared.", f"Declared are {known}.", place)
            limits = self.given.get("max_staleness", {})
            stale = {"max_staleness": limits[name]} if name in limits else {}
            self.targets[name] = self.call(self.app.table, stale, place, declared)
        return self.targets[name]

    def plan(self, lake: str | None, written: Collection[str], whole: _Translation) -> None:
        """Let the planner check the application, and Spark's parser its SQL; an error names the
        line of the step.

        Without a lake there is nothing to plan against, nor before its streams are there: this is
        logged, with the line of the stream, and the first run checks. `written` are the streams
        that applications of this file write.
        """
        try:
            check_syntax(self.app)
            opened = open_lake(lake)
            if not opened.exists():
                self.wait_for(
                    "there is no lake yet",
                    f"{opened.url}. Run what writes to it first.",
                    self.place,
                )
                return
            catalog = read_catalog(self.app, systems_for(self.app, lake=opened))
            awaited = self.awaited(catalog.missing, whole)
            for stream, place in awaited.items():
                problem = catalog.missing[stream]
                step = (
                    "Run the application that writes it."
                    if stream in written
                    else "Create it, or correct the name."
                )
                self.wait_for(problem.rstrip("."), step, place)
            if not awaited:
                build_plan(self.app, catalog)
        except AdjunctError as error:
            dataset = whole.declared_in.get(("dataset", error.dataset or ""), self.place)
            self.refuse_as(error, self.places.get(getattr(error, "operator", None) or "", dataset))

    def awaited(self, missing: Mapping[str, str], whole: _Translation) -> dict[str, Place]:
        """Return the streams that the application needs and that are not there, with the lines
        that name them.
        """
        inputs = {
            each.spec.reads: each.id for each in self.app.operators if each.spec.reads is not None
        }
        needed = {stream: self.places[operator] for stream, operator in inputs.items()}
        needed |= {
            dataset.stream: (*whole.declared_in["dataset", dataset.name], "input")
            for dataset in self.app.datasets
            if dataset.stream is not None and ("dataset", dataset.name) in whole.declared_in
        }
        return {stream: place for stream, place in needed.items() if stream in missing}

    def wait_for(self, problem: str, next_step: str, place: Place) -> None:
        where = ""
        if self.tree is not None:
            position, _ = self.tree.lookup_closest_and_path(list(place), None)
            where = f"{position.filename}:{position.start.line}:{position.start.col}: "
        dg.get_dagster_logger().warning(
            "%s%s is not planned: %s. %s", where, self.app.name, problem, next_step
        )


def _is_kind(hint: Any, kind: type) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_misread(node: yaml.Node) -> bool:
    """Return whether YAML reads a scalar as another value than people do: 010 is 8, 1:30 is 90,
    yes is true.
    """
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return False
    if node.tag.endswith(":int"):
        return not re.fullmatch(_WHOLE_NUMBER, node.value)
    if node.tag.endswith(":bool"):
        return node.value.lower() not in ("true", "false")
    return node.tag.endswith(":float") and bool(set(node.value) & set(":_"))


def _describe(value: Any) -> str:
    """Return what an imported object is, for errors."""
    if isinstance(value, types.ModuleType):
        return "a module"
    if isinstance(value, _PLAIN):
        return f"the plain value {value!r}"
    return (
        f"the class {value.__name__}"
        if isinstance(value, type)
        else f"an object of {type(value).__name__}"
    )


def _label(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _public(name: str) -> Callable[..., Any] | None:
    """Return the public class or function of this name, None if there is none."""
    for module in ("dagster_adjunct", *(f"dagster_adjunct.{public}" for public in _MODULES)):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:  # of an extra that is not installed
            continue
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


class AdjunctScaffolder(Scaffolder[Any]):
    """Writes an application that runs at once, and sample data for it."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Copy the example into the new component's folder, or append it to the component's
        file.
        """
        if request.scaffold_format != "yaml":
            problem = f"AdjunctComponent is declared in YAML, not in {request.scaffold_format}."
            raise ConfigurationError(problem, "Leave --format out.", argument="format")
        example = (_EXAMPLES / "component.yaml").read_text(encoding="utf-8")
        if request.append:
            with request.target_path.open("a", encoding="utf-8") as file:
                file.write(f"\n---\n{example}")  # the file may not end in a line break
            return
        request.target_path.mkdir(parents=True, exist_ok=True)
        (request.target_path / "defs.yaml").write_text(example, encoding="utf-8")
        deliver = (_EXAMPLES / "new_project/new_project/deliver.py").read_text(encoding="utf-8")
        deliver = deliver.replace("-m new_project.deliver", "deliver.py")
        (request.target_path / "deliver.py").write_text(deliver, encoding="utf-8")


@validated_methods
@dg.scaffold_with(AdjunctScaffolder)
class AdjunctComponent(dg.Component):
    """Streams joined with reference data and written to tables: datasets, remote tables and
    applications.
    """

    def __init__(
        self,
        attributes: Mapping[str, Any],
        tree: SourcePositionTree | None = None,
        empty: Collection[tuple[str | int, ...]] = (),
    ) -> None:
        self.attributes, self.tree, self.empty = attributes, tree, empty

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model of `attributes` in `defs.yaml`: its JSON schema says what `load`
        accepts.
        """
        return AsWritten

    @classmethod
    def load(
        cls, attributes: BaseModel | None, context: dg.ComponentLoadContext
    ) -> AdjunctComponent:
        """Return the component of these attributes, with templates such as {{ env.LAKE }} filled
        in.

        Raises ComponentError for a mistake.
        """
        resolution = context.resolution_context
        translation = _Translation(resolution.source_position_tree)
        try:
            translation.read_source()
            if not isinstance(attributes, AsWritten):
                translation.refuse(
                    "there are no attributes.", "Declare at least one application.", ("attributes",)
                )
            translation.check_values(attributes.root)
            made = _filled_in(
                attributes.root, resolution.at_path("attributes"), translation, ("attributes",)
            )
        except ComponentError as error:
            raise error.with_traceback(None) from None  # Dagster prints the stack
        return cls(made, resolution.source_position_tree, translation.empty)

    def applications(self) -> dict[str, Application]:
        """Return the applications by name, for programs and tests. Raises ComponentError for a
        mistake.
        """
        return {
            name: made.app
            for name, made in self._translation().applications(self.attributes).items()
        }

    def application(self, name: str | None = None) -> Application:
        """Return the application of this name, or the only one, whatever its name.

        Raises ComponentError for a mistake, and ConfigurationError where there is no such
        application.
        """
        declared = self.applications()
        if name is None and len(declared) == 1:
            return next(iter(declared.values()))
        if name in declared:
            return declared[name]
        wanted = (
            "one of several applications is asked for without a name"
            if name is None
            else f"no {name!r}"
        )
        problem = (
            f"application(): {wanted}: the component declares {', '.join(declared) or 'none'}."
        )
        step = "Pass the name of one of these, as it is written below `applications` in defs.yaml."
        raise ConfigurationError(problem, step, argument="name")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the applications. Raises ComponentError if one is invalid."""
        try:
            return self._translation().definitions(self.attributes)
        except ComponentError as error:
            raise error.with_traceback(None) from None  # Dagster prints the stack

    def _translation(self) -> _Translation:
        return _Translation(self.tree, self.empty)


def _filled_in(
    value: Any, context: ResolutionContext, translation: _Translation, place: Place
) -> Any:
    """Return a value with the templates in it, at any depth, filled in; a template that has no
    value is refused.
    """

    def inside(at: str | int, one: Any) -> Any:
        return _filled_in(one, context.at_path(at), translation, (*place, at))

    if isinstance(value, Mapping):
        return {name: inside(name, one) for name, one in value.items()}
    if isinstance(value, list):
        return [inside(number, one) for number, one in enumerate(value)]
    if not isinstance(value, str) or "{{" not in value:
        return value
    try:
        filled = context.resolve_value(value)
    except Exception as error:  # noqa: BLE001 - a template runs code of its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(str(cause).split())
        if not isinstance(cause, ResolutionException):
            why = f"{type(cause).__name__}: {why}"
        translation.refuse(
            f"{value!r} can't be filled in: {why.rstrip('.')}.", "Correct the template.", place
        )
    if filled is None:
        translation.refuse(
            f"{value!r} has no value.", "Set the variable, or write the value.", place
        )
    return filled

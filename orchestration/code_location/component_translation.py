"""Datasets, tables and applications that a component in YAML describes, declared by the Python API.

YAML uses its names: a section or step is a function or method, its keys are the arguments. A value
such as `{Tumbling: {size: 5m}}` calls a public class or function with arguments; `{python:
"module:name"}` is an object of a module; a duration is 30s, 5m, 2h, 7d or 1w.
"""

from __future__ import annotations

import importlib
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import dagster as dg

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    UnboundedDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.orchestration.application.application import Application, import_user_module
from dagster_adjunct.orchestration.application.graph import (
    DatasetHandle,
    OutputStream,
    OutputTable,
    RemoteTableHandle,
)
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.code_location.component_forms import (
    KEYS,
    PLAIN,
    PYTHON,
    STEPS,
    Argument,
    Form,
    form_of,
    signature_of,
)
from dagster_adjunct.orchestration.code_location.component_mistakes import (
    component_error,
    facts_of,
    find_name,
    name_of,
    with_keys,
)
from dagster_adjunct.orchestration.code_location.component_source import (
    ATTRIBUTES,
    Mistake,
    Place,
    Source,
)
from dagster_adjunct.orchestration.code_location.definitions import (
    build_definitions,
    check_preview_rows,
)
from dagster_adjunct.orchestration.operators.event_times import ARRIVAL
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
from dagster_adjunct.resources.file_streams.delta import delta_stream
from dagster_adjunct.resources.file_streams.folder import file_stream
from dagster_adjunct.resources.file_streams.iceberg import iceberg_stream
from dagster_adjunct.resources.file_streams.table_changes import delta_changes, iceberg_changes
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import check_store_url, open_lake
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.expression import did_you_mean
from dagster_adjunct.resources.streams.system import LAKE, registered_systems
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.times import read_duration

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
_GROUP = re.compile(r"[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*")
_KINDS_OF_TARGETS: dict[type, str] = {
    DatasetHandle: "a dataset",
    RemoteTableHandle: "a remote table",
    OutputStream: "an output stream",
    OutputTable: "an output table",
}
KindAndName = tuple[str, str]
"""What a component declares or uses, such as ("dataset", "planes")."""

_INPUTS = ("input_stream", "input_changes")
_MADE_BY: dict[Any, type] = {
    bounded_dataset: AdjunctDataset,
    unbounded_dataset: AdjunctDataset,
    RemoteTable: RemoteTable,
}


class Translation:
    """Declares what one YAML document describes; errors name the line of the value in `source`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.document: Mapping[str, Any] = {}
        self.datasets: dict[str, AdjunctDataset] = {}
        self.tables: dict[str, Any] = {}
        self.declared_in: dict[KindAndName, Place] = {}

    def applications(self, given: Mapping[str, Any]) -> dict[str, ApplicationTranslation]:
        """Declare all datasets, tables and applications; return the applications by name."""
        place = ATTRIBUTES
        self.document = {"attributes": given}
        self.check_options(given)
        for name, arguments in given.get("kafka", {}).items():
            self.register_cluster(name, arguments, (*place, "kafka", name))
        for section, declare in (
            ("file_streams", file_stream),
            ("iceberg_streams", iceberg_stream),
            ("delta_streams", delta_stream),
            ("iceberg_changes", iceberg_changes),
            ("delta_changes", delta_changes),
        ):
            for name, arguments in given.get(section, {}).items():
                self.call(declare, arguments, (*place, section, name), name)
        for section, function in (
            ("bounded_datasets", bounded_dataset),
            ("unbounded_datasets", unbounded_dataset),
        ):
            for name, arguments in given.get(section, {}).items():
                where = (*place, section, name)
                self.refuse_second(name, where)
                self.declared_in["dataset", name] = where
                self.datasets[name] = self.declare(function, name, arguments, where)
                self.check_dataset(self.datasets[name], where)
        for name, arguments in given.get("tables", {}).items():
            self.refuse_second(name, (*place, "tables", name))
            self.tables[name] = self.declare_table(name, arguments, (*place, "tables", name))
            self.declared_in["table", name] = (*place, "tables", name)
        made: dict[str, ApplicationTranslation] = {}
        for name, arguments in given["applications"].items():
            where = (*place, "applications", name)
            self.declared_in["application", name] = where
            made[name] = ApplicationTranslation(self, name, arguments, where)
        return made

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments of `build_definitions` that it, or the first run, would refuse later."""
        try:
            check_preview_rows(given.get("preview_rows") or 0)
        except ConfigurationError as error:
            self.refuse_as(error, (*ATTRIBUTES, "preview_rows"))
        try:
            if given.get("lake") is not None:
                check_store_url(given["lake"], "lake")
        except ConfigurationError as error:  # of an argument `url`, which YAML does not have
            self.refuse(error.problem, error.next_step, (*ATTRIBUTES, "lake"))

    def check_dataset(self, dataset: AdjunctDataset, place: Place) -> None:
        """Refuse streams of systems that are not there, and what Dagster would refuse later."""
        self.check_system(dataset.stream, (*place, "input"))
        if isinstance(dataset, UnboundedDataset):
            self.check_system(dataset.dead_letters, (*place, "on_bad_change"))
            self.check_system(dataset.transactions, (*place, "changes"))
        self.check_owners(dataset.presentation.owners, place)
        group = dataset.presentation.group
        if group is not None and not _GROUP.fullmatch(group):
            problem = f"group is {group!r}: expected letters, digits and _, in parts divided by /."
            self.refuse(problem, "Choose another name.", (*place, "group"))

    def check_owners(self, owners: Iterable[str], place: Place) -> None:
        """Refuse an owner that Dagster would refuse."""
        for owner in owners:
            if "@" not in owner and not owner.startswith("team:"):
                problem = f"the owner {owner!r} is neither an email address nor a team."
                self.refuse(problem, f"Write team:{owner} for a team.", (*place, "owners"))

    def check_system(self, stream: str | None, place: Place) -> None:
        """Refuse a stream of a system that is not there, such as a cluster without its section."""
        if stream is None:
            return
        system, name = split_stream_name(stream)
        known = [LAKE, *registered_systems()]
        if system not in known:
            cluster = f'{{bootstrap_servers: "HOST:9092", topics: {{{name}: …}}}}'
            problem = f"{stream!r} is of the stream system {system!r}, which is not declared."
            step = f"Declare a Kafka cluster below attributes: `kafka: {{{system}: {cluster}}}`."
            self.refuse(problem, f"{did_you_mean(system, known)}{step}", place)

    def register_cluster(self, name: str, arguments: Mapping[str, Any], place: Place) -> None:
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

    def names(self, apps: Mapping[str, ApplicationTranslation]) -> dict[KindAndName, Place]:
        """Return what applications use and Dagster shows, with its places."""
        named: dict[KindAndName, Place] = {}
        used = set(apps)
        for app in apps.values():
            used |= app.targets.keys()
            named |= {("stream", stream): place for stream, place in app.inputs().items()}
            outputs = (*app.place, "output_streams")
            named |= {("stream", stream): (*outputs, stream) for stream in app.app.outputs}
        for (kind, name), place in self.declared_in.items():
            if name in used:
                named[kind, name] = place
        return named

    def warn_of_shared(
        self, apps: Mapping[str, ApplicationTranslation], others: Mapping[KindAndName, str]
    ) -> None:
        """Warn of each asset that another component declares or uses, too, before Dagster refuses
        it. `others` has the lines where other components do.
        """
        for (kind, name), place in self.names(apps).items():
            if (kind, name) in others:
                dg.get_dagster_logger().warning(
                    "%s%s %r is in another component, too: %s. Dagster takes each asset once:"
                    " declare the applications that share it in one component.",
                    self.source.describe_position(place),
                    kind,
                    name,
                    others[kind, name],
                )

    def definitions(
        self, given: Mapping[str, Any], others: Mapping[KindAndName, str]
    ) -> dg.Definitions:
        """Return the definitions of all applications, which `dg check defs` also plans; see
        `warn_of_shared` for `others`.
        """
        apps = self.applications(given)
        self.warn_of_shared(apps, others)
        if os.environ.get("DAGSTER_IS_DEFS_VALIDATION_CLI"):  # `dg check defs`
            written = {stream for app in apps.values() for stream in app.app.outputs}
            for app in apps.values():
                app.plan(given.get("lake"), written)
            self.warn_of_unused({name for app in apps.values() for name in app.targets})
        options = {
            name: value
            for name, value in given.items()
            if name in signature_of(build_definitions).names()
        }
        made: dg.Definitions = self.call(
            build_definitions, options, ATTRIBUTES, *(app.app for app in apps.values())
        )
        return made

    def warn_of_unused(self, used: Collection[str]) -> None:
        """Warn of datasets and tables that no application uses: Dagster does not show them."""
        for name in (*self.datasets, *self.tables):
            if name not in used:
                kind = "dataset" if name in self.datasets else "table"
                dg.get_dagster_logger().warning(
                    "%sno application uses %r. Name it in a step, or in `datasets` of one.",
                    self.source.describe_position(self.declared_in[kind, name]),
                    name,
                )

    def declare(
        self, function: Callable[..., Any], name: str, arguments: Mapping[str, Any], place: Place
    ) -> Any:
        """Return what `function` makes of the name and these arguments; for {python:
        "module:name"}, the imported object.

        An imported object must be what `function` makes, with the same name.
        """
        if arguments.keys() != {PYTHON}:
            return self.call(function, arguments, place, name)
        made = self.imported(arguments[PYTHON], (*place, PYTHON))
        kind = _MADE_BY[function]
        is_of_kind = isinstance(made, kind)
        if isinstance(made, AdjunctDataset):
            is_of_kind = is_of_kind and function.__name__ == f"{made.kind}_dataset"
        if not is_of_kind:
            found = (
                f"{arguments[PYTHON]!r} is {_describe(made)}: expected what"
                f" {_label(function)} returns."
            )
            article = "an" if kind is AdjunctDataset else "a"
            self.refuse(
                found,
                f"Name {article} {kind.__name__}, in the section of its kind.",
                (*place, PYTHON),
            )
        if getattr(made, "name", None) != name:
            found = (
                f"{arguments[PYTHON]!r} has the name {getattr(made, 'name', None)!r}: expected"
                f" {name!r}."
            )
            self.refuse(found, "Declare it under its own name.", (*place, PYTHON))
        return made

    def declare_table(self, name: str, arguments: Mapping[str, Any], place: Place) -> Any:
        """Return a remote table; its `store`, if given, is both its read function and its write
        function.
        """
        if "store" not in arguments:
            return self.declare(RemoteTable, name, arguments, place)
        function = signature_of(RemoteTable).by_key("read_function")
        form = form_of(Any) if function is None else function.form
        store = self.value(arguments["store"], form, (*place, "store"))
        rest = {argument: value for argument, value in arguments.items() if argument != "store"}
        return self.call(RemoteTable, rest, place, name, read_function=store, write_function=store)

    def call(
        self, function: Callable[..., Any], given: Any, place: Place, /, *args: Any, **more: Any
    ) -> Any:
        """Call a function or class with the arguments that YAML gives: a mapping by name, or the
        first one alone.

        `args` and `more` are passed as they are, before and besides those of YAML.
        """
        signature = signature_of(function)
        not_by_name = [each for each in signature.arguments if each.name not in more]
        free = not_by_name[len(args) :]  # the arguments that are left to YAML
        positional = list(args)
        keywords = dict(more)
        if signature.takes_any_name:
            keywords |= given or {}
            named: Mapping[str, Any] = {}
        else:
            named = self.by_name(function, given, free, place)
        self.refuse_empty((*keywords, *named), place)
        for argument, value in self.read_arguments(function, named, free, place):
            if argument.is_starred:
                positional += value
            else:
                keywords[argument.name] = value
        for argument in free:
            if argument.is_required and argument.key not in named:
                problem = f"{_label(function)} lacks {argument.key}."
                self.refuse(problem, f"Add {argument.key}: …", place)
        return self.make(function, positional, keywords, place)

    def make(
        self,
        function: Callable[..., Any],
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
        place: Place,
    ) -> Any:
        """Return what a function returns for these arguments. Raises ComponentError for any error
        of the function, with the place of what it is about.
        """
        try:
            with declaring_at(self.source.code_line(place)):
                return function(*positional, **keywords)
        except AdjunctError as error:
            self.refuse_as(error, place)
        except Exception as error:  # noqa: BLE001 - it may be a user's class
            problem = f"{_label(function)} fails: {type(error).__name__}: {error}."
            self.refuse(problem, "Correct its arguments.", place)

    def read_arguments(
        self,
        function: Callable[..., Any],
        named: Mapping[str, Any],
        free: Sequence[Argument],
        place: Place,
    ) -> Iterator[tuple[Argument, Any]]:
        """Yield the arguments with the values that YAML gives them."""
        signature = signature_of(function)
        for key, value in named.items():
            argument = signature.by_key(key)
            if argument is None:
                takes = [each.key for each in free]
                problem = f"{_label(function)} takes no {key!r}."
                step = f"{did_you_mean(key, takes)}It takes {', '.join(takes) or 'nothing'}."
                self.refuse(problem, step, (*place, key))
            yield argument, self.argument(argument, value, (*place, key))

    def by_name(
        self, function: Callable[..., Any], given: Any, free: Sequence[Argument], place: Place
    ) -> Mapping[str, Any]:
        """Return the given values by the keys of their arguments: a mapping as it is, any other
        value as that of the first argument, and nothing for null.
        """
        takes_python = any(argument.name == PYTHON for argument in free)
        # {python: …} is an object to import, unless the function has an argument of that name.
        is_object = _is_import(given) and not takes_python
        if isinstance(given, Mapping) and not is_object:
            return given
        if not free and given not in (None, True):  # `late_records: true` calls it
            problem = f"{_label(function)} takes no arguments, and has {given!r}."
            self.refuse(problem, "Leave it out.", place)
        if not free or given is None:
            return {}
        return {free[0].key: given}

    def refuse_empty(self, keys: Iterable[str], place: Place) -> None:
        """Refuse a key without a value."""
        for key in keys:
            if (*place, key) in self.source.empty:
                step = "Give its value, such as [] for an empty list, or remove the key."
                self.refuse(f"{key} is empty.", step, (*place, key))

    def argument(self, argument: Argument, value: Any, place: Place) -> Any:
        """Return the value of an argument; for a starred one, the list of its values.

        Two arguments have forms that their types don't say: the constant ARRIVAL of `event_time`,
        and nested types of `columns`.
        """
        if argument.is_starred:
            each = value if isinstance(value, list) else [value]
            return self.values(each, argument.form, place)
        if argument.name == "event_time" and value == "ARRIVAL":
            return ARRIVAL
        if argument.name == "columns" and isinstance(value, Mapping) and not _is_import(value):
            value = self.column_types(value, place)
        return self.value(value, argument.form, place)

    def column_types(self, columns: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        """Return the columns with the texts of nested types, which YAML writes as mappings and
        lists.
        """
        types = dict(columns)
        for name, kind in columns.items():
            if isinstance(kind, list) or (isinstance(kind, Mapping) and not _is_import(kind)):
                made = self.make(Schema.of, ({name: kind},), {}, (*place, name))
                types[name] = made.field(name).type
        return types

    def value(self, value: Any, form: Form, place: Place) -> Any:
        """Return the argument that a YAML value describes: imports, calls and texts are
        resolved.
        """
        if isinstance(value, str):
            return self.text(value, form, place)
        if isinstance(value, list):
            items = self.values(value, form.elements, place)
            return tuple(items) if form.is_tuple else items
        if isinstance(value, Mapping):
            return self.mapping(value, form, place)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        takes_numbers = not {int, float}.isdisjoint(form.members)
        if is_number and timedelta in form.members and not takes_numbers:
            problem = f"{place[-1]} is {value}: expected a duration."
            self.refuse(problem, f"Add the unit, as in {value}s, {value}m or {value}h.", place)
        return value

    def values(self, values: Sequence[Any], form: Form, place: Place) -> list[Any]:
        """Return what the items of a list describe."""
        return [self.value(item, form, (*place, number)) for number, item in enumerate(values)]

    def mapping(self, value: Mapping[str, Any], form: Form, place: Place) -> Any:
        """Return what a mapping describes: an object to import, a schema, an object to make, or a
        mapping; the first that fits.
        """
        if _is_import(value):
            return self.imported(value[PYTHON], (*place, PYTHON))
        if Schema in form.members:
            return self.make(Schema.of, (value,), {}, place)
        name = next(iter(value)) if len(value) == 1 else ""
        makes = _public(name) if form.takes_objects and name else None
        if makes is not None:
            return self.call(makes, value[name], (*place, name))
        if form.values is None:
            self.refuse_mapping(value, form, place)
        return {key: self.value(each, form.values, (*place, key)) for key, each in value.items()}

    def refuse_mapping(self, value: Mapping[str, Any], form: Form, place: Place) -> NoReturn:
        """Refuse a mapping that neither makes an object nor names one to import."""
        what = name_of(place, {})
        for kind in form.classes:
            if value and value.keys() <= set(signature_of(kind).names()):
                name = kind.__name__
                problem = f"{what} has arguments of {name}, but does not name it."
                step = f"Write {{{name}: {{{', '.join(f'{key}: …' for key in value)}}}}}."
                self.refuse(problem, step, place)
        step = 'Give {Class: {argument: value}}, or {python: "module:name"}.'
        if len(value) == 1:
            name = next(iter(value))
            step = f"{did_you_mean(name, _public_names())}{step}"
            self.refuse(f"the package has no class or function {name!r}.", step, (*place, name))
        found = f"has the keys {' and '.join(value)}" if value else "is empty"
        self.refuse(f"{what} {found}: expected one class or function.", step, place)

    def text(self, text: str, form: Form, place: Place) -> Any:
        """Return the argument that a string describes: a duration or an enum member if the form
        has that type.

        Any other string stays as it is, and so does a literal.
        """
        if text in form.literals:  # such as "all" besides a duration
            return text
        if timedelta in form.members:
            return self.duration(text, form, place)
        if form.enums:
            members = {member.name.lower(): member for member in form.enums[0]}
            if text.lower() not in members:
                self.refuse(f"{place[-1]} is {text!r}.", f"Give {', '.join(members)}.", place)
            return members[text.lower()]
        return text

    def duration(self, text: str, form: Form, place: Place) -> timedelta | str:
        """Return the duration that a text describes. A text that is no duration is returned as it
        is if the argument takes texts too; else it is refused.
        """
        duration = read_duration(text)
        if duration is not None:
            return duration
        if str not in form.members:
            problem = f"{place[-1]} is {text!r}: expected a duration."
            others = "".join(f", or {text!r}" for text in form.literals)
            self.refuse(problem, f"Give 30s, 5m, 2h, 7d or 1w{others}.", place)
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
        if isinstance(found, (*PLAIN, types.ModuleType)):
            step = (
                "Write texts and numbers in YAML; name a function, a dataset, a table or another"
                " object here."
            )
            self.refuse(
                f"{reference!r} is {_describe(found)}: expected an object of a module.", step, place
            )
        return found

    def refuse(self, problem: str, next_step: str, place: Place) -> NoReturn:
        """Raise a ComponentError for a mistake in the value at a place."""
        argument = place[-1] if isinstance(place[-1], str) else None
        raise component_error(self.source, Mistake(place, problem, next_step), argument=argument)

    def refuse_as(self, error: AdjunctError, place: Place) -> NoReturn:
        """Raise the error as ComponentError, for the value at a place; that of a ComponentError
        stays.
        """
        if place == ATTRIBUTES:  # build_definitions has raised it
            place = self.declaration_of(error)
        raise self.as_component_error(error, place) from None

    def as_component_error(self, error: AdjunctError, *places: Place) -> ComponentError:
        """Return the error as ComponentError, for the value at the first of these places; a
        ComponentError unchanged.

        If the error names an argument or a column, and one of the places has it, the error is for
        the value there.
        """
        if isinstance(error, ComponentError):
            return error
        argument = getattr(error, "argument", None)
        key = KEYS.get(argument, argument) if isinstance(argument, str) else None
        named = next(filter(None, (self.place_of_name(error, key, at) for at in places)), None)
        place = named or places[0]
        problem = with_keys(self.without_line(error.problem, place))
        next_step = with_keys(error.next_step) or "Correct it there."
        facts = facts_of(error) | {"argument": key}
        return component_error(self.source, Mistake(place, problem, next_step), **facts)

    def place_of_name(self, error: AdjunctError, key: str | None, place: Place) -> Place | None:
        """Return the place of the key, the argument of an error, or of the name or column that the
        error is about, in the value at a place; None if it is not there.
        """
        if key is not None and (*place, key) in self.source.positions:
            return (*place, key)
        name = error.name if isinstance(error, InvalidNameError) else error.column
        return None if name is None else find_name(name, place, self.document)

    def without_line(self, problem: str, place: Place) -> str:
        """Return the problem without the line of the declaration at its beginning, which the
        ComponentError names itself.
        """
        line = self.source.code_line(place)
        if line is None:
            return problem
        declared = re.escape(str(CodeLine(line.file, 0)).removesuffix("0"))
        return re.sub(rf"^{declared}\d+: ", "", problem)

    def declaration_of(self, error: AdjunctError) -> Place:
        """Return the place of the application or dataset that an error names; that of all
        attributes if it names none.
        """
        owners = ((kind, getattr(error, kind, None)) for kind in ("application", "dataset"))
        declared = [self.declared_in[owner] for owner in owners if owner in self.declared_in]
        return declared[0] if declared else ATTRIBUTES


class ApplicationTranslation(Translation):
    """Declares one application; `places` has, by operator id, the place of the step that made
    the operator.
    """

    def __init__(
        self, whole: Translation, name: str, given: Mapping[str, Any], place: Place
    ) -> None:
        """Declare the application `name` with all that YAML gives for it at `place`: its options,
        outputs, datasets and steps, in this order. `whole` has translated the rest of the file.
        """
        super().__init__(whole.source)
        self.document = whole.document
        self.datasets = whole.datasets
        self.tables = whole.tables
        self.declared_in = whole.declared_in
        options = {
            argument: value
            for argument, value in given.items()
            if argument in signature_of(Application).names()
        }
        self.place = place
        self.given = given
        self.app: Application = self.call(Application, options, place, name)
        self.app.error_of_source = self.explain
        self.check_owners(self.app.owners, place)
        self.places: dict[str, Place] = {}
        self.streams: dict[str, MessageStream] = {}
        self.targets: dict[str, Any] = {}
        for section, declare in (
            ("output_streams", self.app.output_stream),
            ("local_tables", self.app.local_table),
        ):
            for target, arguments in given.get(section, {}).items():
                where = (*place, section, target)
                self.refuse_second(target, where)
                self.targets[target] = self.call(declare, arguments, where, target)
                if section == "local_tables":
                    self.declared_in["dataset", target] = where
                else:
                    self.check_system(target, where)
        for target, arguments in given.get("output_tables", {}).items():
            where = (*place, "output_tables", target)
            self.refuse_second(target, where)
            self.targets[target] = self._declare_output_table(dict(arguments), where)
        for number, dataset in enumerate(given.get("datasets", ())):
            self.target(dataset, (*place, "datasets", number))
        for dataset in given.get("max_staleness", {}):
            if dataset not in self.datasets:
                where = (*place, "max_staleness", dataset)
                self.refuse(
                    f"{dataset!r} is no dataset of this file.",
                    _name_one_of(dataset, self.datasets),
                    where,
                )
            self.target(dataset, (*place, "max_staleness", dataset))
        last_stream: MessageStream | None = None
        for number, step in enumerate(given["steps"]):
            last_stream = self.step(step, last_stream, (*place, "steps", number))

    def _declare_output_table(self, given: dict[str, Any], place: Place) -> OutputTable:
        """Return the output table of these arguments, one of which is `iceberg` or `delta`."""
        formats = {"iceberg": IcebergTable, "delta": DeltaLakeTable}
        named = [name for name in formats if given.get(name) is not None]
        if len(named) != 1:
            found = f"an output table has {' and '.join(named) or 'neither iceberg nor delta'}."
            self.refuse(
                found, "Give one of them: iceberg: {identifier: …}, delta: {url: …}.", place
            )
        (name,) = named
        table = self.call(formats[name], given[name], (*place, name))
        options = {key: value for key, value in given.items() if key not in formats}
        output: OutputTable = self.call(self.app.output_table, options, place, table)
        return output

    def step(
        self, step: Mapping[str, Any], before: MessageStream | None, place: Place
    ) -> MessageStream:
        """Add one step's operator and return the stream that leaves it."""
        named = [name for name in step if name in STEPS]
        if len(named) != 1:
            found = f"a step has {' and '.join(named) or 'no operator'}: expected one operator."
            if named:
                next_step = "Give one of them, indented with its arguments, after each `- `."
            else:
                next_step = f"Give one of {', '.join(STEPS)}."
            self.refuse(found, next_step, place)
        (name,) = named
        known = set(self.app._graph.operators)
        method = self.step_method(step, name, before, place)
        stream = self.call(method, step[name], (*place, name))
        if name == "input_stream":
            added = list(self.app.inputs)[-1]
            self.check_system(added, (*place, name, "name"))
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

    def step_method(
        self, step: Mapping[str, Any], name: str, before: MessageStream | None, place: Place
    ) -> Callable[..., Any]:
        """Return the method that adds a step's operator: of the application for an input, else of
        the stream that the step reads (`before`, without `from`).
        """
        if name in _INPUTS:
            if "from" in step:
                problem = "an input gets no records of a step."
                self.refuse(problem, "Leave `from` out.", (*place, "from"))
            method: Callable[..., Any] = getattr(self.app, name)
            return method
        source = self.stream(step["from"], (*place, "from")) if "from" in step else before
        if source is None:
            problem = "the first step reads no stream."
            self.refuse(problem, "Begin with input_stream or input_changes.", (*place, name))
        method = getattr(source, name)
        return method

    def stream(self, name: str, place: Place) -> MessageStream:
        """Return the stream that leaves the step whose `as` is this name."""
        if name not in self.streams:
            known = ", ".join(self.streams) or "none yet"
            self.refuse(
                f"no step before is named {name!r}.", f"Give a step's `as`: {known}.", place
            )
        return self.streams[name]

    def text(self, text: str, form: Form, place: Place) -> Any:
        """Return the stream, dataset, table or output stream that a string names, if the form
        has such a type; else what it describes anywhere in the document.
        """
        if MessageStream in form.members:
            return self.stream(text, place)
        if AdjunctDataset in form.members:
            if text not in self.datasets:
                step = _name_one_of(text, self.datasets)
                self.refuse(f"{text!r} is no dataset of this file.", step, place)
            return self.datasets[text]
        if not form.takes_target:
            return super().text(text, form, place)
        target = self.target(text, place)
        if not isinstance(target, form.targets):
            kinds = " or ".join(_KINDS_OF_TARGETS[kind] for kind in form.targets)
            problem = f"{text!r} is {_KINDS_OF_TARGETS[type(target)]}: expected {kinds}."
            self.refuse(problem, f"Name {kinds} of this file.", place)
        return target

    def target(self, name: str, place: Place) -> Any:
        """Return the application's dataset, table or output stream of this name; the first call
        adds it to the app.
        """
        if name not in self.targets:
            declared = self.datasets.get(name) or self.tables.get(name)
            if declared is None:
                known = {**self.targets, **self.datasets, **self.tables}
                self.refuse(f"{name!r} is not declared.", _name_one_of(name, known), place)
            limits = self.given.get("max_staleness", {})
            stale = {"max_staleness": limits[name]} if name in limits else {}
            self.targets[name] = self.call(self.app.table, stale, place, declared)
        return self.targets[name]

    def plan(self, lake: str | None, written: Collection[str]) -> None:
        """Let the planner check the application, and Spark's parser its SQL; an error names the
        line of the step.

        The planner needs the streams that are read. If one of them does not exist yet, or its lake
        does not, a warning says so, and the first run checks the application. `written` are the
        streams that applications of this file write.
        """
        try:
            check_syntax(self.app)
            opened = open_lake(lake)
            if not opened.exists() and self.reads_lake():
                self.warn_unplanned(
                    "there is no lake yet",
                    f"{opened.url}. Run what writes to it first.",
                    self.place,
                )
                return
            catalog = read_catalog(self.app, systems_for(self.app, lake=opened))
            awaited = {
                stream: place
                for stream, place in self.inputs().items()
                if stream in catalog.missing
            }
            for stream, place in awaited.items():
                problem = catalog.missing[stream]
                if stream in written:
                    step = "Run the application that writes it."
                else:
                    step = "Create it, or correct the name."
                self.warn_unplanned(problem.rstrip("."), step, place)
            if not awaited:
                build_plan(self.app, catalog)
        except AdjunctError as error:
            raise self.explain(error) from None

    def explain(self, error: AdjunctError) -> ComponentError:
        """Return an error of the planner as that of the step or dataset that it names; else as
        that of the application.
        """
        places = [
            self.places.get(error.operator or ""),
            self.declared_in.get(("dataset", error.dataset or "")),
            self.place,
        ]
        return self.as_component_error(error, *filter(None, places))

    def inputs(self) -> dict[str, Place]:
        """Return the streams that the application and its datasets read, with the lines that name
        them.
        """
        reading = {
            each.spec.reads: each.id for each in self.app.operators if each.spec.reads is not None
        }
        needed = {stream: self.places[operator] for stream, operator in reading.items()}
        for dataset in self.app.datasets:
            declared = self.declared_in.get(("dataset", dataset.name))
            if dataset.stream is not None and declared is not None:
                needed[dataset.stream] = (*declared, "input")
        return needed

    def reads_lake(self) -> bool:
        """Whether the application or one of its datasets reads a stream of the lake."""
        return any(split_stream_name(stream)[0] == LAKE for stream in self.inputs())

    def warn_unplanned(self, problem: str, next_step: str, place: Place) -> None:
        """Log a warning that the application is not planned yet: why, and what to do."""
        where = self.source.describe_position(place)
        dg.get_dagster_logger().warning(
            "%s%s is not planned: %s. %s", where, self.app.name, problem, next_step
        )


def _is_import(value: Any) -> bool:
    """Return whether a value is {python: "module:name"}."""
    return (
        isinstance(value, Mapping) and value.keys() == {PYTHON} and isinstance(value[PYTHON], str)
    )


def _describe(value: Any) -> str:
    """Return what an imported object is, for errors."""
    if isinstance(value, types.ModuleType):
        return "a module"
    if isinstance(value, PLAIN):
        return f"the plain value {value!r}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of {type(value).__name__}"


def _label(function: Callable[..., Any]) -> str:
    """Return the name of a function or class, for errors."""
    return getattr(function, "__name__", repr(function))


def _public(name: str) -> Callable[..., Any] | None:
    """Return the public class or function of this name, None if there is none."""
    if name.startswith("_"):
        return None
    for module in ("dagster_adjunct", *(f"dagster_adjunct.{public}" for public in _MODULES)):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:  # of an extra that is not installed
            continue
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def _public_names() -> list[str]:
    """Return the names of all public classes and functions that can be imported here."""
    names: set[str] = set()
    for module in ("dagster_adjunct", *(f"dagster_adjunct.{public}" for public in _MODULES)):
        try:
            public = importlib.import_module(module)
        except ImportError:  # of an extra that is not installed
            continue
        names.update(name for name in dir(public) if callable(getattr(public, name, None)))
    return sorted(names)


def _name_one_of(name: str, known: Iterable[str]) -> str:
    """Return a next step that names what is declared, the nearest first."""
    names = list(known)
    return f"{did_you_mean(name, names)}Declared are {', '.join(names) or 'none'}."

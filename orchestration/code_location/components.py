"""The component of applications in YAML, for Dagster's `dg`: it is scaffolded, checked and loaded.

Values are checked as strictly as those of the Python API: no number is taken for a text, no `2.0`
for a whole number. Errors name the line and column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import dagster as dg
from pydantic import BaseModel

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.code_location.component_forms import AsWritten
from dagster_adjunct.orchestration.code_location.component_mistakes import (
    component_error,
    find_mistake,
)
from dagster_adjunct.orchestration.code_location.component_source import (
    ATTRIBUTES,
    Mistake,
    Place,
    Source,
    read_source,
)
from dagster_adjunct.orchestration.code_location.component_translation import (
    KindAndName,
    Translation,
)
from dagster_adjunct.orchestration.code_location.dagster_internals import (
    BriefLoadError,
    ResolutionException,
    SourcePositionTree,
    hides_messages,
)
from dagster_adjunct.resources.errors import ComponentError, ConfigurationError
from dagster_adjunct.resources.package_files import read_package_file
from dagster_adjunct.resources.validation import validated, validated_methods

_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.DOTALL)  # of a template


class AdjunctScaffolder(dg.Scaffolder[Any]):
    """Writes an application that runs at once, and sample data for it."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Copy the example into the new component's folder, or append it to the component's
        file.
        """
        if request.scaffold_format != "yaml":
            problem = f"AdjunctComponent is declared in YAML, not in {request.scaffold_format}."
            raise ConfigurationError(problem, "Leave --format out.", argument="format")
        example = read_package_file("examples/component.yaml")
        if request.append:
            with request.target_path.open("a", encoding="utf-8") as file:
                file.write(f"\n---\n{example}")  # the file may not end in a line break
            return
        request.target_path.mkdir(parents=True, exist_ok=True)
        (request.target_path / "defs.yaml").write_text(example, encoding="utf-8")
        deliver = read_package_file("examples/new_project/new_project/deliver.py")
        deliver = deliver.replace("-m new_project.deliver", "deliver.py")
        (request.target_path / "deliver.py").write_text(deliver, encoding="utf-8")


@validated_methods
@dg.scaffold_with(AdjunctScaffolder)
class AdjunctComponent(dg.Component):
    """Streams joined with reference data and written to tables: datasets, remote tables and
    applications.
    """

    def __init__(self, attributes: Mapping[str, Any], source: Source | None = None) -> None:
        self.attributes = attributes
        self.source = Source() if source is None else source

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
        try:
            source = _checked_source(context.resolution_context.source_position_tree)
            given = _checked_values(attributes, source)
            nowhere: Any = None  # our errors have the place themselves
            templates = context.resolution_context.with_source_position_tree(nowhere)
            filled = _filled_in(given, templates, source, ATTRIBUTES)
        except ComponentError as error:
            _raise_to_dagster(error)
        return cls(filled, source)

    def applications(self) -> dict[str, Application]:
        """Return the applications by name, for programs and tests. Raises ComponentError for a
        mistake.
        """
        made = Translation(self.source).applications(self.attributes)
        return {name: application.app for name, application in made.items()}

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
        if name is None:
            wanted = "one of several applications is asked for without a name"
        else:
            wanted = f"no {name!r}"
        problem = (
            f"application(): {wanted}: the component declares {', '.join(declared) or 'none'}."
        )
        step = "Pass the name of one of these, as it is written below `applications` in defs.yaml."
        raise ConfigurationError(problem, step, argument="name")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the applications. Raises ComponentError if one is invalid."""
        try:
            others = self._names_in_others(context)
            return Translation(self.source).definitions(self.attributes, others)
        except ComponentError as error:
            _raise_to_dagster(error)

    def _names_in_others(self, context: dg.ComponentLoadContext) -> dict[KindAndName, str]:
        """Return what the other components of the project declare or use, with its line; empty
        without a file or project.
        """
        tree = context.component_tree
        if not self.source.lines or not isinstance(tree.defs_module, ModuleType):
            return {}
        named: dict[KindAndName, str] = {}
        for other in tree.get_all_components(AdjunctComponent):
            if other is not self:
                translation = Translation(other.source)
                names = translation.names(translation.applications(other.attributes))
                for key, place in names.items():
                    named[key] = other.source.describe_position(place).rstrip(": ")
        return named


class _ShownComponentError(ComponentError, BriefLoadError):
    """A mistake of which Dagster shows the message without a stack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.report(f"{ComponentError.__name__}: {self}\n")


@validated
def load_applications(project: str | Path) -> dict[str, Application]:
    """Return the applications of all components in the project of this folder, by name.

    Raises ComponentError for a mistake in one of them, and for two applications of one name.
    """
    try:
        tree = dg.ComponentTree.for_project(Path(project))
    except dg.DagsterError as error:
        problem = f"load_applications(): {str(project)!r} is in no project of Dagster: {error}"
        step = "Pass a folder of a project that `dg` knows, such as Path(__file__).parent."
        raise ConfigurationError(problem, step, argument="project") from error
    applications: dict[str, Application] = {}
    for component in tree.get_all_components(AdjunctComponent):
        for name, application in component.applications().items():
            if name in applications:
                mistake = Mistake(
                    (*ATTRIBUTES, "applications", name),
                    f"two components declare an application {name!r}.",
                    "Rename one of them.",
                )
                raise component_error(component.source, mistake, application=name)
            applications[name] = application
    return applications


def _raise_to_dagster(error: ComponentError) -> NoReturn:
    """Raise a mistake so that Dagster shows its message alone, or hides it if it is told to."""
    if hides_messages():  # a _ShownComponentError would show its message all the same
        raise error.with_traceback(None) from None
    raise _ShownComponentError(error.problem, error.next_step, **error.facts) from error


def _checked_source(tree: SourcePositionTree | None) -> Source:
    """Return the document that Dagster has read; an empty one if it is not from a file.

    Raises ComponentError for a key that is given twice, and for what YAML reads as something else
    than it looks like.
    """
    if tree is None or not Path(tree.position.filename).is_file():
        return Source()
    source, mistake = read_source(Path(tree.position.filename), tree.position.start)
    if mistake is not None:
        raise component_error(source, mistake)
    return source


def _checked_values(attributes: BaseModel | None, source: Source) -> Any:
    """Return the attributes as they are written. Raises ComponentError for unknown and missing
    keys, and values of a wrong kind.
    """
    if not isinstance(attributes, AsWritten):
        step = "Declare at least one application."
        raise component_error(source, Mistake(ATTRIBUTES, "there are no attributes.", step))
    mistake = find_mistake(attributes.root, source.position_of)
    if mistake is not None:
        raise component_error(source, mistake)
    return attributes.root


def _filled_in(value: Any, context: dg.ResolutionContext, source: Source, place: Place) -> Any:
    """Return a value with the templates in it, at any depth, filled in. Raises ComponentError for
    a template that has no value.
    """

    def inside(at: str | int, part: Any) -> Any:
        return _filled_in(part, context, source, (*place, at))

    if isinstance(value, Mapping):
        return {name: inside(name, part) for name, part in value.items()}
    if isinstance(value, list):
        return [inside(number, item) for number, item in enumerate(value)]
    if not isinstance(value, str) or "{{" not in value:
        return value
    filled: Any = None
    # An expression without a value would be "None" or nothing in the text around it.
    for template in (*_EXPRESSION.findall(value), value):
        try:
            filled = context.resolve_value(template)
        except Exception as error:  # noqa: BLE001 - a template runs code of its own
            problem = f"{template!r} can't be filled in: {_reason(error)}."
            mistake = Mistake(place, problem, "Correct the template.")
            raise component_error(source, mistake) from None
        if filled is None:
            step = "Set the variable, or write the value."
            raise component_error(source, Mistake(place, f"{template!r} has no value.", step))
    return filled


def _reason(error: Exception) -> str:
    """Return why a template can't be filled in: what the first error says, which caused the
    others.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ResolutionException):  # it may hold a formatted traceback
        return str(cause).strip().split("\n")[-1].rstrip(".")
    why = " ".join(str(cause).split()).rstrip(".")
    return f"{type(cause).__name__}: {why}"

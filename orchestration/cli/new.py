"""`adjunct new NAME`: a small project that runs at once, to be changed into one's own.

It is a copy of `examples/new_project` under the new name; with --yaml, the application is that of
`examples/component.yaml`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import click

from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.package_files import read_package_file, read_package_folder

_MODULE = "new_project"
_TITLE = "new-project"
_COMPONENT = "defs/orders/defs.yaml"
# YAML reads these as booleans or null
_IN_YAML = frozenset({"on", "off", "yes", "no", "true", "false", "null"})
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@click.command()
@click.argument("name")
@click.option(
    "--yaml",
    "in_yaml",
    is_flag=True,
    help="Declare the application in YAML, as a component for dg.",
)
@options.output_options
def new(name: str, in_yaml: bool) -> None:
    """Make a small project in the folder NAME: two datasets, an application, sample data, tests,
    Dagster's settings.

    It runs at once, without a server and without Java. Its README says how.
    """
    folder = create_project(name, in_yaml=in_yaml)
    module = name.replace("-", "_")
    output.show_line(f"{name}: created. Next:")
    for line in (f"cd {name}", f"python -m {module}.deliver", f"adjunct run {module}.pipeline:app"):
        output.show_line(f"  {line}")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    output.show_json({"folder": str(folder), "files": files})


def create_project(name: str, *, in_yaml: bool = False) -> Path:
    """Create a project in the working directory and return its folder.

    Raises ConfigurationError for a name that can't be that of a module, and for one that a module
    or folder has.
    """
    from dagster_adjunct.orchestration.code_location.dagster_internals import DISALLOWED_NAMES
    from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home

    module = name.replace("-", "_")
    if name in _IN_YAML or name in DISALLOWED_NAMES:
        problem = (
            f"{name!r} can't be the name of a project: its application has the same name, which "
        )
        problem += "YAML or Dagster reserves."
        raise ConfigurationError(
            problem, f"Use another name, such as {name}-streams.", argument="name"
        )
    if not _NAME.fullmatch(name):
        problem = f"{name!r} can't be the name of a project: its module has the same name."
        step = (
            "Use lower-case letters and digits, with single - or _ between them, as in my-orders."
        )
        raise ConfigurationError(problem, step, argument="name")
    folder = Path.cwd() / name
    with translate_file_errors(folder, "the new project"):
        exists = folder.exists()
    if exists:
        problem = f"{folder} exists already, and nothing in it is changed."
        step = "Use another name, or remove it."
        raise ConfigurationError(problem, step, argument="name")
    if importlib.util.find_spec(module) is not None:
        problem = (
            f"there is a Python module {module!r} already, which would be imported instead of the"
            " project's."
        )
        raise ConfigurationError(
            problem, f"Use another name, such as {name}-streams.", argument="name"
        )
    texts = dict(_template("new_project"))
    if in_yaml:
        component = read_package_file("examples/component.yaml")
        texts |= dict(_template("new_project_in_yaml"))
        texts[f"{_MODULE}/{_COMPONENT}"] = component.replace("    orders:\n", f"    {_TITLE}:\n")
        texts["README.md"] = re.sub(r"\bpipeline\.py", _COMPONENT, texts["README.md"])
    with translate_file_errors(folder, "the new project"):
        for place, text in texts.items():
            target = folder / place.replace(_MODULE, module)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(_MODULE, module).replace(_TITLE, name), encoding="utf-8")
    prepare_dagster_home(folder)
    return folder


def _template(name: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a template: their paths within the project, and their texts."""
    for place, text in read_package_folder(f"examples/{name}"):
        yield place.replace("gitignore", ".gitignore"), text

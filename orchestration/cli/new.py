"""`adjunct new NAME`: a small project that runs at once, to be changed into one's own.

It is a copy of `examples/new_project`, under the new name.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

import click

from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors

_TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "new_project"
_MODULE, _TITLE = "new_project", "new-project"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@click.command()
@click.argument("name")
@options.output_options
def new(name: str) -> None:
    """Make a small project in the folder NAME: two datasets, an application, sample data, tests, Dagster's settings.

    It runs at once, without a server and without Java. Its README says how.
    """
    folder = create_project(name)
    module = name.replace("-", "_")
    output.show_line(f"{name}: created. Next:")
    for line in (f"cd {name}", f"python -m {module}.deliver", f"adjunct run {module}.pipeline:app"):
        output.show_line(f"  {line}")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    output.show_json({"folder": str(folder), "files": files})


def create_project(name: str, where: Path | None = None) -> Path:
    """Create a project and return its folder, below `where` (default: the working directory).

    Raises ConfigurationError for a name that is no module's, or that another module or a folder has already.
    """
    from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home

    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        problem = f"{name!r} can't be the name of a project: its module has the same name."
        step = "Use lower-case letters and digits, with single - or _ between them, as in my-orders."
        raise ConfigurationError(problem, step, argument="name")
    folder = (where or Path.cwd()) / name
    if folder.exists():
        problem, step = f"{folder} exists already, and nothing in it is changed.", "Use another name, or remove it."
        raise ConfigurationError(problem, step, argument="name")
    if importlib.util.find_spec(module) is not None:
        problem = f"there is a Python module {module!r} already, which would be imported instead of the project's."
        raise ConfigurationError(problem, f"Use another name, such as {name}-streams.", argument="name")
    with translate_file_errors(folder, "the new project"):
        for source in _TEMPLATE.rglob("*"):
            place = str(source.relative_to(_TEMPLATE)).replace(_MODULE, module).replace("gitignore", ".gitignore")
            if source.is_dir() or "__pycache__" in place:
                continue
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace(_MODULE, module).replace(_TITLE, name)
            target.write_text(text, encoding="utf-8")
    prepare_dagster_home(folder)
    return folder

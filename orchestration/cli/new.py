"""`adjunct new NAME`: a small project that runs at once, to be changed into one's own.

It is a copy of `examples/new_project` under the new name; with --yaml, the application is that of
`examples/component.yaml`. With --from, it is a copy of `examples/new_project_from_files` with the
columns of these files, or, for a folder, of `examples/new_project_from_folder`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dagster_adjunct.assets.exchange.samples import SampledFile, find_files, infer_from_files
from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.orchestration.cli.schema import describe_sample
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.package_files import read_package_file, read_package_folder
from dagster_adjunct.resources.schemas.declarations import write_python
from dagster_adjunct.resources.schemas.inference import InferredSchema
from dagster_adjunct.resources.schemas.paths import steps_among
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import Struct, Type, parse_type

_MODULE = "new_project"
_TITLE = "new-project"
_COMPONENT = "defs/orders/defs.yaml"
# YAML reads these as booleans or null
_IN_YAML = frozenset({"on", "off", "yes", "no", "true", "false", "null"})
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# What the template of --from has in the place of the stream, its columns and its files.
_STREAM = "sample-records"
_COLUMNS = """# KEY is a guess.
KEY = ["record_id"]
SCHEMA = Schema.of(record_id="bigint")
"""
_RECORD = 'RECORD = {"record_id": 1}'
_FILES = "append sample-records FILES"
_DESCRIPTION = "Orders joined with products and customers"
_ROWS = 10_000
_LIKE_ID = re.compile(r"(^|[a-z0-9_-])(id|key|uuid|guid|number|code)$", re.IGNORECASE)
_MOST_FILES = 5
_FOLDER = '"sample-folder"'
_FORMAT = 'format="jsonl"'
_DELIVER = f"{_MODULE}/deliver.py"


@click.command()
@click.argument("name")
@click.option(
    "--yaml",
    "in_yaml",
    is_flag=True,
    help="Declare the application in YAML, as a component for dg.",
)
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILES",
    help=(
        "Begin with a stream of the records of these files (JSON lines, CSV or Parquet; local or"
        " s3://…), whose columns and key are inferred. May be repeated. Of one"
        " folder, the stream has all files that land in it."
    ),
)
@options.output_options
def new(name: str, in_yaml: bool, files: tuple[str, ...]) -> None:
    """Make a small project in the folder NAME: two datasets, an application, sample data, tests,
    Dagster's settings.

    It runs at once, without a server and without Java. Its README says how.
    """
    if files and in_yaml:
        problem = "--from makes a project in Python, and --yaml one in YAML."
        step = "Leave out --yaml; `adjunct schema infer --yaml` prints the columns for YAML."
        raise ConfigurationError(problem, step, setting="--yaml")
    beginning = infer_beginning(files) if files else None
    folder = create_project(name, in_yaml=in_yaml, beginning=beginning)
    module = name.replace("-", "_")
    commands = [f"cd {name}", f"python -m {module}.deliver", f"adjunct run {module}.pipeline:app"]
    output.show_line(f"{name}: created. Next:")
    if beginning is not None and beginning.folder:
        del commands[1]  # the files land by themselves
    elif beginning is not None:
        commands.insert(2, f"adjunct stream append {beginning.stream} {beginning.files}")
    for line in commands:
        output.show_line(f"  {line}")
    facts: dict[str, object] = {"folder": str(folder)}
    if beginning is not None:
        facts |= {"stream": beginning.stream, "key": beginning.key}
        output.show_line(beginning.describe_key())
        for line in describe_sample(beginning.inferred):
            output.show_line(line)
    made = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    output.show_json({**facts, "files": made})


@dataclass(frozen=True, slots=True)
class Beginning:
    """The stream with which a project begins: its name, what was inferred, its key, and the files
    to append, for a shell; or the folder in which they land, and their format.
    """

    stream: str
    inferred: InferredSchema
    key: str | None
    files: str
    folder: str = ""
    format: str = ""

    def describe_key(self) -> str:
        """Return why this is the key."""
        if self.key is None:
            return "No column might be a key: none is simple, never null and unique in the sample."
        return (
            f"The key {self.key!r} is a guess: no value occurred twice in"
            f" {self.inferred.records:,} records. Change it in columns.py before you create the"
            " stream."
        )

    def replacements(self) -> Mapping[str, str]:
        """Return the texts of the template with those that take their places."""
        sentences = self.describe_key().replace(". ", ".\n").splitlines()
        comments = [f"# {line}" for line in (*describe_sample(self.inferred), *sentences)]
        key = "[]" if self.key is None else f"[{_literal(self.key)}]"
        columns = [*comments, f"KEY = {key}", f"SCHEMA = {write_python(self.inferred.schema)}"]
        return {
            _COLUMNS: "\n".join([*columns, ""]),
            _RECORD: f"RECORD = {_example(self.inferred.schema, self.key)}",
            _FILES: f"append {self.stream} {self.files}",
            _STREAM: self.stream,
            _DESCRIPTION: "Records of files, and an application that reads them",
            _FOLDER: _literal(self.folder),
            _FORMAT: f"format={_literal(self.format)}",
        }


def infer_beginning(urls: Sequence[str]) -> Beginning:
    """Return the stream, the columns and the key that fit these files.

    Raises ConfigurationError for files that are not there or of several formats,
    SchemaMismatchError for records that no schema can hold.
    """
    inferred = infer_from_files(urls, rows=_ROWS)
    files = find_files(urls)
    folder = _folder_of(urls, files)
    if folder:
        name = _stream_name(folder.rpartition("/")[2])
        return Beginning(
            name, inferred, guess_key(inferred), "", folder=folder, format=files[0].format
        )
    stems = []
    for each in files:
        _, _, file_name = each.file.path.rpartition("/")
        stem, _, _ = file_name.partition(".")
        stems.append(stem)
    stream = _stream_name(_common_name(stems))
    return Beginning(stream, inferred, guess_key(inferred), _for_shell(files))


def _folder_of(urls: Sequence[str], files: Sequence[SampledFile]) -> str:
    """Return the URL of the folder that is named instead of files, "" if files are."""
    if len(urls) != 1 or not files:
        return ""
    folder = files[0].tree.url
    named = urls[0].rstrip("/")
    if named.startswith(("s3://", "s3a://")):  # the two schemes mean the same
        return folder if named.partition("://")[2] == folder.partition("://")[2] else ""
    path = Path(named.removeprefix("file://")).expanduser().resolve()
    return folder if path.is_dir() else ""


def _stream_name(text: str) -> str:
    """Return the name of a stream that is most like a text."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[:80] or "records"


def _common_name(stems: Sequence[str]) -> str:
    """Return what several files have in common before their numbers: "orders" of "orders-1" and
    "orders-2". It is the first name if they have nothing in common, or only a part of a word.
    """
    if len(stems) == 1:
        return stems[0]
    common = os.path.commonprefix(stems)  # noqa: RUF071 - it is of letters
    name = common.rstrip("0123456789-_ ")
    is_cut = common == name and common not in stems  # within a word
    return stems[0] if is_cut or not name else name


def guess_key(inferred: InferredSchema) -> str | None:
    """Return the column, or the path, that is most likely the key: of those that are unique in the
    sample, the first with a name like `id`, else the first. None if none is unique.

    Names that need backticks are left out.
    """
    names = [name for name in inferred.unique if "`" not in name]
    for name in names:
        if _LIKE_ID.search(name):
            return name
    return next(iter(names), None)


def _for_shell(files: Sequence[SampledFile]) -> str:
    """Return the files as arguments of `adjunct stream append`, which takes local ones."""
    is_local = all(isinstance(each.tree, LocalTree) for each in files)
    if is_local and len(files) <= _MOST_FILES:
        return " ".join(shlex.quote(each.url) for each in files)
    return "FILE..."


def _example(schema: Schema, key: str | None) -> str:
    """Return a record for the project's test, as source: with only the key; without a key, with its
    first column, which is None.
    """
    if key is None:
        return f"{{{_literal(schema.names[0])}: None}}"
    column, *steps = steps_among(key, schema.names)
    return f"{{{_literal(column)}: {_example_value(parse_type(schema.field(column).type), steps)}}}"


def _example_value(type_: Type, steps: Sequence[str]) -> str:
    """Return an example of a key's value, as source: "a" or 1, since keys are texts or whole
    numbers. A struct has it in the member at `steps`, and None in all others.
    """
    if not isinstance(type_, Struct):
        return '"a"' if str(type_) == "string" else "1"
    members = []
    for member in type_.members:
        if member.name == steps[0]:
            value = _example_value(member.type, steps[1:])
        else:
            value = "None"
        members.append(f"{_literal(member.name)}: {value}")
    return f"{{{', '.join(members)}}}"


def _literal(text: str) -> str:
    """Return a text as a literal of Python."""
    return json.dumps(text, ensure_ascii=False)


def create_project(name: str, *, in_yaml: bool = False, beginning: Beginning | None = None) -> Path:
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
    if beginning is not None:
        texts = _texts_over_files(texts, beginning)
    with translate_file_errors(folder, "the new project"):
        for place, text in texts.items():
            target = folder / place.replace(_MODULE, module)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(_MODULE, module).replace(_TITLE, name), encoding="utf-8")
    prepare_dagster_home(folder)
    return folder


def _texts_over_files(texts: Mapping[str, str], beginning: Beginning) -> dict[str, str]:
    """Return the files of a project over a stream of records."""
    adapted = {**texts, **dict(_template("new_project_from_files"))}
    if beginning.folder:
        adapted |= dict(_template("new_project_from_folder"))
        del adapted[_DELIVER]
    replacements = beginning.replacements()
    for place, text in adapted.items():
        for old, new in replacements.items():
            text = text.replace(old, new)  # noqa: PLW2901
        adapted[place] = text
    return adapted


def _template(name: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a template: their paths within the project, and their texts."""
    for place, text in read_package_folder(f"examples/{name}"):
        yield place.replace("gitignore", ".gitignore"), text

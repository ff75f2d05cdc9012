"""Mistakes in the file of a component that keep Dagster from loading the component: YAML that can't
be read, the first level of a document, and its type. Dagster raises them while a user's module is
imported.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from dagster_adjunct.resources.code_lines import show_lines
from dagster_adjunct.resources.errors import ComponentError

_TYPE = "dagster_adjunct.components.AdjunctComponent"
_KEYS = ("type", "attributes", "requirements", "template_vars_module", "post_processing")
_FIRST_LEVEL = (
    f"A component has {', '.join(_KEYS[:2])}, and at most {', '.join(_KEYS[2:-1])} and {_KEYS[-1]};"
    " all else is indented below attributes."
)
# Those that fail where a component can't be read; what they call is other people's code.
_LIBRARIES = ("dagster", "dagster_shared", "yaml", "pydantic", "pathlib", "codecs", "importlib")
_PLAIN_TAGS = ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp")


def find_component_mistake(module: str, error: BaseException) -> ComponentError | None:
    """Return the mistake in a component's file that made the import of a module fail; None if the
    error is of something else.
    """
    if isinstance(error, AttributeError) and _is_of_several(error.obj):
        return _describe_several(module, error)
    reading = _Reading(tuple(frame for frame, _ in traceback.walk_tb(error.__traceback__)))
    if not reading.is_of_dagster:
        return None
    found = reading.find_mistake(error)
    if found is None:
        return None
    if reading.file is None or not found.line:
        return ComponentError(found.problem, found.next_step, module=module)
    place = f"{reading.file}:{found.line}:{found.column}"
    shown = show_lines(reading.text.split("\n"), found.line, found.column)
    about: dict[str, Any] = {"module": module, "file": str(reading.file), "line": found.line}
    return ComponentError(f"{place}: {found.problem}\n{shown}", found.next_step, **about)


def _is_of_several(value: object) -> bool:
    """Whether a value is what Dagster makes of a file with several components."""
    return type(value).__name__ == "CompositeYamlComponent" and hasattr(value, "components")


def _describe_several(module: str, error: AttributeError) -> ComponentError:
    """Return the error for a file of several components that is used as if it had one."""
    several: Any = error.obj
    problem = (
        f"module {module!r} asks a file for its {error.name}, and it has"
        f" {len(several.components)} components, which `---` divides."
    )
    step = (
        "Take load_applications(Path(__file__).parent)[NAME] of dagster_adjunct.components, or one"
        " of .components."
    )
    return ComponentError(problem, step, module=module)


@dataclass(frozen=True)
class _Mistake:
    """A mistake in a component's file; without a place if `line` is 0."""

    problem: str
    next_step: str
    line: int = 0
    column: int = 1


@dataclass(frozen=True)
class _Reading:
    """What Dagster was reading when it failed, by the frames of the error."""

    frames: tuple[FrameType, ...] = field(repr=False)

    @property
    def is_of_dagster(self) -> bool:
        """Whether Dagster itself has failed in reading a component, and not code that it calls."""
        named = [str(frame.f_globals.get("__name__")) for frame in self.frames]
        reads = any(name.startswith("dagster.components.") for name in named)
        return reads and named[-1].partition(".")[0] in _LIBRARIES

    def local(self, name: str) -> Any:
        """Return the innermost local variable of this name, None if there is none."""
        for frame in reversed(self.frames):
            if name in frame.f_locals:
                return frame.f_locals[name]
        return None

    @property
    def file(self) -> Path | None:
        """The file of the component; None if it is not known or not there."""
        file: Path | None = self.local("component_def_path")
        if file is None and self.tree is not None:
            file = Path(self.tree.source_position_tree.position.filename)
        if file is None or not file.is_file():
            return None
        return file

    @cached_property
    def text(self) -> str:
        """The text of the component's file; "" without a file."""
        if self.file is None:
            return ""
        return self.file.read_text(encoding="utf-8", errors="replace")

    def find_mistake(self, error: BaseException) -> _Mistake | None:
        """Return the mistake that an error of Dagster is about; None if it is about none that is
        known here.
        """
        from yaml import MarkedYAMLError

        if isinstance(error, RecursionError):
            return _Mistake("the YAML is nested too deeply.", "Nest it less deeply.", line=1)
        if isinstance(error, UnicodeDecodeError):
            return _describe_encoding(error)
        if isinstance(error, MarkedYAMLError):
            return _describe_syntax(error, self.text.split("\n"))
        if isinstance(error, ValidationError):
            return self._describe_keys(error)
        # Other mistakes are told apart by the function of Dagster that has failed.
        if any(frame.f_code.co_name == "_get_component_class" for frame in self.frames):
            return self._describe_type(error)
        if any(frame.f_code.co_name == "context_with_injected_scope" for frame in self.frames):
            problem = f"template_vars_module: {error}."
            position = self.position_of("template_vars_module")
            return _Mistake(problem, "Correct its name, or install it.", *position)
        if any(frame.f_code.co_name == "construct_document" for frame in self.frames):
            return _find_unreadable(self.text)
        if self.file is not None and not self.local("component_nodes"):
            return _Mistake("there is no component in the file.", f"Begin with type: {_TYPE}.", 1)
        return None

    def position_of(self, key: str) -> tuple[int, int]:
        """Return the line and column of a key of the document."""
        position, _ = self.tree.source_position_tree.lookup_closest_and_path([key], None)
        return int(position.start.line), int(position.start.col)

    @property
    def tree(self) -> Any:
        """The document with its positions, None if Dagster was not in one."""
        tree = self.local("source_tree")
        if tree is not None:
            return tree
        for frame in self.frames:
            tree = getattr(frame.f_locals.get("self"), "source_tree", None)
            if tree is not None:
                return tree
        return None

    def _describe_keys(self, error: ValidationError) -> _Mistake | None:
        """Return the first mistake in a document's first level, or in the attributes of a component
        of another type; None if the error does not say its line.
        """
        mistakes = error.errors(include_url=False)
        unknown_keys = [each for each in mistakes if each["type"] == "extra_forbidden"]
        first = (unknown_keys or mistakes)[0]
        location = str(first["loc"][0])  # "attributes at defs.yaml:3"
        path, at, place = location.rpartition(" at ")
        line = place.rpartition(":")[2]
        if not at or not line.isdigit():
            return None
        if error.title == "ComponentFileModel":
            mistake = _describe_key(path, first["type"], first["input"])
        else:  # the attributes of a component of another type
            step = f"Correct it, or the type: {_TYPE} declares applications."
            mistake = _Mistake(f"{path}: {first['msg']}.", step)
        text = self.text.split("\n")[int(line) - 1]
        column = len(text) - len(text.lstrip()) + 1
        return replace(mistake, line=int(line), column=column)

    def _describe_type(self, error: BaseException) -> _Mistake:
        """Return the mistake in the type of a component, with a similar type if there is one."""
        name = self.local("component_file_model").type
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if difflib.get_close_matches(name.rpartition(".")[2], [_TYPE.rpartition(".")[2]]):
            near = [_TYPE]
        else:
            near = difflib.get_close_matches(name, [_TYPE, *_component_types(name)], n=1)
        step = f"Did you mean {near[0]}?" if near else f"Give {_TYPE}, or another component."
        problem = f"the type {name!r} names no component: {reason}."
        return _Mistake(problem, step, *self.position_of("type"))


def _describe_key(path: str, kind: str, value: object) -> _Mistake:
    """Return the mistake in a key of a document's first level, without its place; `kind` is that of
    pydantic's error.
    """
    if not path and value is None:
        step = f"Remove the `---` above it, or write a component: type: {_TYPE}."
        return _Mistake("the document is empty.", step)
    if not path:
        return _Mistake("the document is no mapping.", _FIRST_LEVEL)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path, _KEYS, n=1)
        step = f"Did you mean {near[0]}? {_FIRST_LEVEL}" if near else _FIRST_LEVEL
        return _Mistake(f"{path}: a component takes no such key.", step)
    if kind == "missing":
        return _Mistake(f"{path}: Field required.", _FIRST_LEVEL)
    found = "empty" if value is None else repr(value)
    if path == "type":
        return _Mistake(f"type: it is {found}: expected a text.", f"Give {_TYPE}.")
    expected = "a text" if kind == "string_type" else "a mapping"
    return _Mistake(f"{path}: it is {found}: expected {expected}.", _FIRST_LEVEL)


def _component_types(name: str) -> list[str]:
    """Return the types of components in the module of a type; [] if that is not imported."""
    module = name.rpartition(".")[0]
    if module not in sys.modules:
        return []
    component = sys.modules["dagster"].Component
    types = []
    for attribute, value in vars(sys.modules[module]).items():
        if isinstance(value, type) and issubclass(value, component):
            types.append(f"{module}.{attribute}")
    return types


def _describe_encoding(error: UnicodeDecodeError) -> _Mistake:
    """Return the mistake of a file that is not UTF-8."""
    around = error.object[max(error.start - 20, 0) : error.end + 20].decode(errors="replace")
    before = error.object[: error.start]
    line = before.count(b"\n") + 1
    column = error.start - before.rfind(b"\n")
    problem = f"the file is not UTF-8 at byte {error.start}: {around!r}."
    return _Mistake(problem, "Save it as UTF-8.", line, column)


_NO_TEXT = ":,]}-?*&!%@`#\t"
"""The characters with which no text without quotes begins in YAML."""


def _describe_syntax(error: Any, lines: Sequence[str]) -> _Mistake:
    """Return the mistake of what is no YAML."""
    mark = error.problem_mark or error.context_mark
    is_in_one_line = error.context_mark is not None and error.context_mark.line == mark.line
    if not error.context:
        context = ""
    elif error.context_mark is None or is_in_one_line:
        context = f"{error.context}: "
    else:
        context = f"{error.context} that begins in line {error.context_mark.line + 1}: "
    problem = f"this is not YAML: {context}{error.problem}."
    opening = _character_at(lines, error.context_mark)
    found = _character_at(lines, mark)
    begins_with = opening + found
    is_second_text = opening in ("[", "{") and found not in {"", *_NO_TEXT}
    special = sorted(set(begins_with) & set("*&!%@`"))
    if is_in_one_line and is_second_text:
        step = 'Write a text with a bracket, a comma or a quote in it in quotes: "items[0]".'
    elif "\t" in begins_with:
        step = "Correct it there: indent with blanks, and divide words by blanks; a tab is none."
    elif special:
        step = f'Write a text that begins with {special[0]} in quotes: "{special[0]}…".'
    else:
        step = "Correct it there; often a line above lacks a bracket, a quote, a colon or a blank."
    return _Mistake(problem, step, mark.line + 1, mark.column + 1)


def _character_at(lines: Sequence[str], mark: Any) -> str:
    """Return the character at a mark, nothing where there is none."""
    if mark is None or mark.line >= len(lines):
        return ""
    line: str = lines[mark.line]
    return line[mark.column : mark.column + 1]


def _find_unreadable(text: str) -> _Mistake | None:
    """Return the first part of YAML that Dagster does not read: a key that is no text, a tag, or a
    number or time that can't be read as one; None if there is none.
    """
    import yaml

    documents = yaml.compose_all(text, Loader=yaml.SafeLoader)
    nodes = list(filter(None, documents))
    while nodes:
        node = nodes.pop(0)
        at = (node.start_mark.line + 1, node.start_mark.column + 1)
        tag = node.tag.rpartition(":")[2]
        if tag not in _PLAIN_TAGS:
            return _Mistake(f"the tag !!{tag} can't be read.", "Leave the tag out.", *at)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    at = (key.start_mark.line + 1, key.start_mark.column + 1)
                    problem = "a key is a list or a mapping: expected a text."
                    step = 'Write the key as a text; put a template in quotes: "{{ … }}".'
                    return _Mistake(problem, step, *at)
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif tag in ("int", "float", "timestamp") and not _is_readable(node.value, tag):
            problem = f"{node.value[:40]!r} can't be read as {tag}."
            return _Mistake(problem, "Leave the tag out, or write a shorter number.", *at)
    return None


def _is_readable(text: str, tag: str) -> bool:
    """Whether YAML reads a text with this tag."""
    import yaml

    try:
        yaml.safe_load(f"!!{tag} {text!r}")
    except (ValueError, AttributeError):
        return False
    return True

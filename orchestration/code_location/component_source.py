"""The text of a component in YAML: where its values are, which of them are empty, and what YAML
reads as something else than it looks like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dagster_adjunct.orchestration.code_location.component_forms import KEYS
from dagster_adjunct.resources.code_lines import CodeLine, show_lines

Place = tuple[str | int, ...]
"""The path to a value, such as ("attributes", "tables", "rates")."""

ATTRIBUTES: Place = ("attributes",)
"""The place of what users declare; what is outside of it in a component is Dagster's."""

WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_MOST_VALUES = 100_000
_KINDS_OF_KEYS = {"int": "a number", "float": "a number", "bool": "true or false", "null": "null"}


class Position(NamedTuple):
    """A place in a file; both numbers begin with 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with the value at a place, and what to do."""

    place: Place
    problem: str
    next_step: str


@dataclass(frozen=True)
class Source:
    """One YAML document: the lines of its file, the position of each value in it, and the places
    of empty values.

    Without lines it is not from a file, and nothing is known of its places.
    """

    file: str = ""
    lines: Sequence[str] = ()
    positions: Mapping[Place, Position] = field(default_factory=dict)
    empty: frozenset[Place] = frozenset()

    def position_of(self, place: Place) -> Position:
        """Return the position of a value, or of the nearest one that it is in."""
        while place and place not in self.positions:
            place = place[:-1]
        return self.positions.get(place, Position(1, 1))

    def code_line(self, place: Place) -> CodeLine | None:
        """Return the line of a place, None if the document is not from a file."""
        return CodeLine(self.file, self.position_of(place).line) if self.lines else None

    def describe_position(self, place: Place) -> str:
        """Return "defs.yaml:5:3: "; nothing if the document is not from a file."""
        at = self.position_of(place)
        return f"{self.file}:{at.line}:{at.column}: " if self.lines else ""

    def show(self, place: Place) -> str:
        """Return the lines around a place with their numbers, and a mark below its column."""
        return show_lines(self.lines, *self.position_of(place))


def read_source(file: Path, start: tuple[int, int]) -> tuple[Source, Mistake | None]:
    """Return the document of a file that begins at this line and column, and its first mistake in
    writing YAML, None if there is none.

    Such a mistake is a key that is given twice or is no text, or a scalar that YAML reads as
    something else than it looks like, such as 010 and yes. Too many values are one as well, because
    then they were not all read.
    """
    text = file.read_text(encoding="utf-8-sig")
    reader = _Reader()
    for root in yaml.compose_all(text, Loader=yaml.SafeLoader):
        if root is not None and _position_of(root) == start:
            reader.read(root, ())
    source = Source(str(file), text.split("\n"), reader.positions, frozenset(reader.empty))
    if reader.read_values > _MOST_VALUES:
        problem = f"the file has more than {_MOST_VALUES:,} values."
        return source, Mistake(ATTRIBUTES, problem, "Use fewer aliases of aliases.")
    first = min(reader.mistakes, key=lambda each: source.position_of(each.place), default=None)
    return source, first


def _position_of(node: yaml.Node) -> Position:
    """Return where a node begins; YAML's marks count from 0."""
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


class _Reader:
    """Collects the positions, empty values and mistakes of a document's nodes."""

    def __init__(self) -> None:
        self.positions: dict[Place, Position] = {}
        self.empty: set[Place] = set()
        self.mistakes: list[Mistake] = []
        self.read_values = 0  # reading stops at the limit: aliases of aliases have no end

    def read(self, node: yaml.Node, place: Place) -> None:
        """Note the positions and the mistakes of the value at a place and of those in it."""
        # The value of a key has the position of its key, which `_read_mapping` has set.
        self.positions.setdefault(place, _position_of(node))
        self.read_values += 1
        if self.read_values > _MOST_VALUES:
            return
        if isinstance(node, yaml.ScalarNode):
            self._read_scalar(node, place)
        elif isinstance(node, yaml.SequenceNode):
            items = [((*place, number), item) for number, item in enumerate(node.value)]
            self._note_divided_text(node, items, place)
            for at, item in items:
                self.read(item, at)
        elif isinstance(node, yaml.MappingNode):
            self._read_mapping(node, place)

    def _read_mapping(self, node: yaml.MappingNode, place: Place) -> None:
        """Note the positions and the mistakes of the keys and values of a mapping, then of the
        mappings merged into it (`<<`), which count where it has no such key.
        """
        parts = []
        for key, value in node.value:
            parts += [((*place, str(key.value)), each) for each in (key, value)]
        self._note_divided_text(node, parts, place)
        merged = []
        lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag.endswith(":merge"):
                merged.append(value)
                continue
            name = self._read_key(key, place)
            at = (*place, name)
            if name in lines:
                problem = f"the key {name!r} is given twice, first in line {lines[name]}."
                step = "Rename or remove one; each step begins with `- `."
                self.mistakes.append(Mistake(at, problem, step))
                self.positions[at] = _position_of(key)  # it is the second one that is shown
                continue
            lines[name] = key.start_mark.line + 1
            if at not in self.positions:  # else the mapping has a key instead of this merged one
                self.positions[at] = _position_of(key)
                self.read(value, at)
        for mapping in _mappings(merged):
            self._read_mapping(mapping, place)

    def _note_divided_text(
        self, node: yaml.CollectionNode, parts: Sequence[tuple[Place, yaml.Node]], place: Place
    ) -> None:
        """Note a text in braces or brackets that a comma within its parentheses divides, such as
        {total: coalesce(a, 0)}.
        """
        is_dagsters = place[:1] != ATTRIBUTES
        is_in_lines = not node.flow_style
        if is_dagsters or is_in_lines:
            return
        unquoted = [
            (at, str(each.value))
            for at, each in parts
            if isinstance(each, yaml.ScalarNode) and each.style is None
        ]
        for number, (at, text) in enumerate(unquoted):
            if text.count("(") > text.count(")"):
                # In braces, what follows the comma is a key with an empty value.
                whole = ", ".join(part for _, part in unquoted[number:] if part)
                problem = f"a comma divides {text!r} from what follows."
                step = f'Write a text with a comma in quotes, such as "{_balanced(whole)}".'
                self.mistakes.append(Mistake(at, problem, step))
                return

    def _read_key(self, key: yaml.Node, place: Place) -> str:
        """Return the name of a key, "?" for a list or mapping. A key that is no text, or that YAML
        does not read as one, is noted as a mistake.
        """
        if not isinstance(key, yaml.ScalarNode):
            step = "Give a text; in braces, {key: value} is a mapping."
            at = (*place, "?")
            self.positions[at] = _position_of(key)
            self.mistakes.append(Mistake(at, "a key is a list or a mapping.", step))
            return "?"
        name = str(key.value)
        _, _, kind = key.tag.rpartition(":")
        is_dagsters = place[:1] != ATTRIBUTES
        is_read_as_text = kind not in _KINDS_OF_KEYS
        if is_dagsters or is_read_as_text:
            return name
        at = (*place, name)
        if is_misread(key):
            self.mistakes.append(_misread(key, at))
        else:
            problem = f"the key {name or 'before the colon'} is {_KINDS_OF_KEYS[kind]}."
            step = f"Write it in quotes, '{name}'." if name else "Write the key."
            self.mistakes.append(Mistake(at, problem, step))
        return name

    def _read_scalar(self, node: yaml.ScalarNode, place: Place) -> None:
        """Note an empty value, and one that YAML reads as something else than it looks like."""
        if place[:1] != ATTRIBUTES:
            return
        if node.tag.endswith(":null") and node.value == "":
            self.empty.add(place)
        elif is_misread(node):
            self.mistakes.append(_misread(node, place))


def _balanced(text: str) -> str:
    """Return the shortest beginning of a text, up to a comma, in which each parenthesis is closed;
    the whole text if there is none.
    """
    parts = text.split(", ")
    for length in range(1, len(parts)):
        begin = ", ".join(parts[:length])
        if begin.count("(") == begin.count(")"):
            return begin
    return text


def _mappings(merged: Sequence[yaml.Node]) -> Iterator[yaml.MappingNode]:
    """Yield the mappings that merge keys name, one or several each, the one that counts first."""
    for value in reversed(merged):
        each = value.value if isinstance(value, yaml.SequenceNode) else [value]
        yield from (mapping for mapping in each if isinstance(mapping, yaml.MappingNode))


def is_misread(node: yaml.ScalarNode) -> bool:
    """Return whether YAML reads a scalar as another value than people do: 010 is 8, 1:30 is 90,
    yes is true.
    """
    is_quoted = node.style is not None
    if is_quoted:
        return False
    if node.tag.endswith(":int"):
        return not WHOLE_NUMBER.fullmatch(node.value)
    if node.tag.endswith(":bool"):
        return node.value.lower() not in ("true", "false")
    return node.tag.endswith(":float") and bool(set(node.value) & set(":_"))


def _misread(node: yaml.ScalarNode, place: Place) -> Mistake:
    """Return the mistake of a scalar that YAML reads as something else than it looks like."""
    read = written_in_yaml(yaml.safe_load(node.value))
    instead = KEYS.get(node.value, f"{read} if you mean that")  # `by` for `on`
    return Mistake(
        place,
        f"YAML reads {node.value} as {read}.",
        f"Write {instead}, or '{node.value}' for a text.",
    )


def write_flow(value: Any) -> str:
    """Return a list or mapping in YAML, in one line."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1_000_000
    )
    return text.removesuffix("\n")


def written_in_yaml(value: Any) -> str:
    """Return a value as it would be written in YAML, in one line, cut if it is long."""
    try:
        text = write_flow(value)
    except yaml.YAMLError:  # such as a set, whose items Dagster has wrapped
        return f"a {type(value).__name__}"
    if isinstance(value, bytes):
        return "binary"
    text = text.removesuffix("\n...")  # after a scalar alone
    is_quoted = text.startswith(("'", '"'))
    if isinstance(value, str) and not is_quoted:
        text = f"'{text}'"
    return text if len(text) <= 80 else f"{text[:77]}..."

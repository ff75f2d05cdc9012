"""Errors and notes suggest only commands that exist, with all arguments and options that these
need, and with no options that they lack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest

from dagster_adjunct.orchestration.cli.main import root

ROOT = Path(__file__).parents[3]
_NAMES = "|".join(root.list_commands(click.Context(root)))
# Punctuation ends a command in a sentence; the "…" of a reason belongs to it.
_COMMAND = re.compile(rf"\badjunct (?P<words>({_NAMES})\b.*?)(?=[.,;:?)(](?:[\s.,;)]|$)|$)")
_WORD = re.compile(r"--[a-z-]+|[A-Z][A-Z:_]*|[\w:./-]+")
_ARGUMENT = re.compile(r"[A-Z][A-Z:_]*")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield each text but docstrings, with VALUE for what is inserted."""
    unread = [tree]
    while unread:
        node = unread.pop()
        text = _text(node)
        if text is not None:
            yield text
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            unread += ast.iter_child_nodes(node)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "VALUE" for part in node.values)
    return None


def missing(words: str) -> list[str]:
    """Return what these words of a command lack: the arguments and options that it requires; then
    the options that it does not have.
    """
    command: click.Command = root
    rest = _WORD.findall(words)
    while isinstance(command, click.Group):
        below = command.get_command(click.Context(command), rest.pop(0)) if rest else None
        if below is None:
            return ["an existing command"]
        command = below
    options = [option for option in command.params if isinstance(option, click.Option)]
    valued = {name for option in options if not option.is_flag for name in option.opts}
    given = [
        word
        for before, word in pairwise(["", *rest])
        if before not in valued and _ARGUMENT.fullmatch(word)
    ]
    arguments = [
        argument
        for argument in command.params
        if isinstance(argument, click.Argument) and argument.required
    ]
    lacking = [option for option in options if option.required and not set(option.opts) & set(rest)]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    unknown = [word for word in rest if word.startswith("--") and word not in known]
    required = (*arguments[len(given) :], *lacking)
    return [*(parameter.human_readable_name for parameter in required), *unknown]


@pytest.mark.lengthy
def test_every_suggested_command_has_what_it_needs() -> None:
    modules = [
        module
        for floor in ("assets", "orchestration", "resources")
        for module in (ROOT / floor).rglob("*.py")
    ]
    suggested = [
        (module.name, command["words"])
        for module in modules
        if "adjunct " in (source := module.read_text("utf-8"))
        for text in texts(ast.parse(source))
        for command in _COMMAND.finditer(text)
    ]
    assert len(suggested) > 100
    assert [
        (module, words, lacks) for module, words in suggested if (lacks := missing(words))
    ] == []


def test_a_command_without_its_arguments_is_found() -> None:
    assert missing("checkpoint abandon") == ["NAME", "reason"]
    assert missing("stream export VALUE --epochs latest") == ["target"]
    assert missing("dataset compare") == ["an existing command"]
    assert missing("dataset rollback NAME --to VALUE --reason …") == ["--to"]

"""Lines of user code, which errors and plans name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# The folder that the packages are imported from. The examples below it count as user code.
_PACKAGE = Path(__file__).parents[1]

_EXAMPLES = str(_PACKAGE / "examples")

# Code that makes an object of a class of this distribution from what a user has passed to it.
_MODELS = re.compile(r"[/\\]site-packages[/\\](?:pydantic|dagster[/\\]_config)[/\\]")

_AROUND = 3  # lines that are shown before and after the one that is meant
_WIDTH = 120  # characters that are shown of a line
# A key such as password with its value, unless that names a variable.
_SECRET = re.compile(
    r"""(?ix)
    ( (?<! [\w.-] ) [\w.-]* (?: password | secret | token | credential ) [\w.-]* (?<! _env )
      ["']? \s* : \s+ )
    (?! env: | ["']env: | \{\{ | ["']\{\{ ) [^\s,}][^,}]*"""
)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code: its file and line number."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return "visits.py:12"; the path is relative if the file is in the working directory or
        below it.
        """
        file = Path(self.file)
        if file.is_relative_to(Path.cwd()):
            file = file.relative_to(Path.cwd())
        return f"{file}:{self.line}"

    def describe(self) -> str:
        """Return "flights.py, line 12", for messages: without the folder, so the text is the
        same on all machines.
        """
        return f"{Path(self.file).name}, line {self.line}"


def is_library_code(file: str) -> bool:
    """Whether a file of code belongs to this distribution; its examples count as user code."""
    return file.startswith(str(_PACKAGE)) and not file.startswith(_EXAMPLES)


_declared_at: ContextVar[CodeLine | None] = ContextVar("declared_at", default=None)


@contextmanager
def declaring_at(line: CodeLine | None) -> Iterator[None]:
    """Let `find_calling_line` return this line in the context.

    For declarations in files that are not code, such as YAML. None changes nothing.
    """
    before = _declared_at.set(line)
    try:
        yield
    finally:
        _declared_at.reset(before)


def find_calling_line() -> CodeLine | None:
    """Return the line of user code that called into this distribution, or that of `declaring_at`;
    None in an interactive session.
    """
    if (declared := _declared_at.get()) is not None:
        return declared
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_between = file.startswith("<") or _MODELS.search(file)  # "<string>": no file
        if not is_between and not is_library_code(file):
            return CodeLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def show_lines(lines: Sequence[str], line: int, column: int) -> str:
    """Return a line of a file and those around it with their numbers, and a mark below the column;
    both are counted from 1.

    Long lines are cut, and values of keys such as password are left out.
    """
    first = max(line - _AROUND, 1)
    last = min(line + _AROUND, len(lines))
    width = len(str(last))
    shown = []
    for number in range(first, last + 1):
        hidden = 0  # characters left out at the beginning of the line
        if number == line:
            hidden = max(column - _WIDTH // 2, 0)
        text = _SECRET.sub(r"\1***", lines[number - 1].rstrip())[hidden:]
        if len(text) > _WIDTH:
            text = f"{text[:_WIDTH]}…"
        shown.append(f"{number:>{width}} | {text}")
        if number == line:
            shown.append(f"{'':>{width}} | {' ' * (column - 1 - hidden)}^ here")
    return "\n".join(shown)

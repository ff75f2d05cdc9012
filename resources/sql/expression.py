"""A parsed Spark SQL expression, syntax errors that are found without parsing, and names similar to a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlglot import exp

NILADIC = frozenset(
    {
        "current_catalog", "current_database", "current_date", "current_path", "current_schema", "current_time",
        "current_timestamp", "current_user", "grouping__id", "localtimestamp", "session_user", "user",
    }
)  # fmt: skip
"""Names that Spark reads as function calls without parentheses, unless a column has the name."""


@dataclass(frozen=True, slots=True)
class ColumnName:
    """A reference to a column or field: ("address", "city") for `address.city`, and its position in the text."""

    parts: tuple[str, ...]
    start: int = 0

    @property
    def name(self) -> str:
        return self.parts[0]

    def __str__(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class WindowClause:
    """The clause of a window function: of `over (partition by id, upper(s))` the plain columns, (id,), and the text."""

    columns: tuple[str, ...]
    partition_by: str


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed Spark SQL expression.

    `alias` is the name after "as". `name` is that of the resulting column, None where only Spark knows it or where
    there are several. `column` is a column that is passed on unchanged ("dest as faa" passes on dest). `columns` are
    the columns that it references, without the variables of lambdas. `star` says that it is "*", without those in
    `excepted`.

    `unread` says why it could not be parsed, in which case only Spark can check it. `mistake` is an error that Spark
    is certain to raise, whatever columns there are. `number` tells apart the expressions of one SELECT, whose `text`
    is the whole SELECT.
    """

    text: str
    alias: str | None = None
    name: str | None = None
    column: str | None = None
    columns: tuple[ColumnName, ...] = ()
    star: bool = False
    excepted: tuple[str, ...] = ()
    unread: str = ""
    mistake: str = ""
    number: int = 0
    tree: exp.Expr | None = field(default=None, compare=False, repr=False)
    """The syntax tree without the alias. It is shared: don't change it."""

    def place(self, name: ColumnName) -> str:
        """Return the position of a column for messages (" in line 2"), "" for a text of one line."""
        return f" in line {self.text.count(chr(10), 0, name.start) + 1}" if "\n" in self.text.strip() else ""


_TOKEN = re.compile(
    r"""(?P<unsure>--|/\*|\$\$|\b[rR](?=['"]))|(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`]|``)*`)"""
    r"""|(?P<open>[(\[])|(?P<close>[)\]])|(?P<unclosed>['"`])|(?P<ended>;)""",
    re.DOTALL,
)
_PAIRS = {")": "(", "]": "["}
_LONE = re.compile(r"(?:^|[(\[,])\s*(,)|(,)\s*(?:[)\]]|$)|^\s*([/%<>=|&^]+)|([-+/%<>=|&^!~]+)\s*$|(=)\s+[<>=]")


def find_syntax_error(text: str) -> str:
    """Return what is unbalanced or lacks an operand, "" where nothing is certainly wrong."""
    if not text.strip():
        return "it is empty"
    opened: list[str] = []
    mistake = ""
    for match in _TOKEN.finditer(text):
        if match["unsure"]:  # a comment, or a text that has no escapes
            return ""
        if mistake:
            continue
        if match["unclosed"]:
            mistake = f"{match['unclosed']} is not closed"
        elif match["ended"]:
            mistake = "';' ends a statement: expected an expression"
        elif match["open"]:
            opened.append(match["open"])
        elif match["close"] and (not opened or opened.pop() != _PAIRS[match["close"]]):
            mistake = f"{match['close']!r} has no opening bracket"
    if not mistake and opened:
        mistake = f"{opened[-1]!r} is not closed"
    if mistake:
        return mistake
    lone = _LONE.search(_TOKEN.sub(lambda match: "''" if match["text"] else match[0], text))
    symbol = lone[lone.lastindex or 0] if lone else ""
    ends_in_type = ">" in symbol and "<" in text  # x::array<int>
    return f"an operand is missing next to {symbol!r}" if symbol and not ends_in_type else ""


def nearest_names(name: str, there: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return the available names that are most similar to a missing one, the nearest first, ignoring case."""
    by_lower: dict[str, str] = {}
    for known in there:
        by_lower.setdefault(known.lower(), known)
    return tuple(by_lower[lower] for lower in get_close_matches(name.lower(), list(by_lower), most, 0.6))


def did_you_mean(name: str, there: Iterable[str]) -> str:
    """Return "Did you mean 'spent'? ", or "" where no name is similar."""
    similar = [repr(known) for known in nearest_names(name, there)]
    return f"Did you mean {' or '.join(similar)}? " if similar else ""

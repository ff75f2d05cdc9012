"""One Spark SQL expression as a value: what it is called, which columns it names, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.certain_mistakes import certain_mistake

if TYPE_CHECKING:
    from sqlglot import exp

_NAME = r"`(?:[^`]|``)+`|[A-Za-z_]\w*"
_PLAIN = re.compile(rf"\s*(?P<column>{_NAME})(?:\s+as\s+(?P<alias>{_NAME}))?\s*", re.IGNORECASE | re.ASCII)
_VALUES = frozenset({"true", "false", "null"})

NILADIC = frozenset(
    {
        "current_catalog", "current_database", "current_date", "current_path", "current_schema", "current_time",
        "current_timestamp", "current_user", "grouping__id", "localtimestamp", "session_user", "user",
    }
)  # fmt: skip
"""What Spark takes for a call without parentheses where no column has the name."""


@dataclass(frozen=True, slots=True)
class ColumnName:
    """A column as an expression names it: ("address", "city") for `address.city`, and where that stands in the text."""

    parts: tuple[str, ...]
    start: int = 0

    @property
    def name(self) -> str:
        return self.parts[0]

    def __str__(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class Expression:
    """What is read off a Spark SQL expression.

    `alias` is the name after "as", `name` the one of the column that it gives: None where only Spark knows it, or where
    it gives several. `column` is the column that it passes on unchanged ("dest as faa" passes on dest). `columns` are
    those that it names, variables of lambdas left out. `star` is "*", less what stands in `excepted`.

    `unread` says why nothing is known of it: what it holds is then Spark's to judge. `mistake` is what Spark is certain
    to refuse, whatever columns there are.
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
    tree: exp.Expr | None = field(default=None, compare=False, repr=False)
    """Of the expression without its alias; shared, so nobody changes it."""

    def place(self, name: ColumnName) -> str:
        """Return where a column stands, where the text has several lines: " in line 2"."""
        return f" in line {self.text.count(chr(10), 0, name.start) + 1}" if "\n" in self.text.strip() else ""

    def fields(self) -> tuple[tuple[str, Expression], ...]:
        """Return the fields of a struct that is made here (`named_struct('a', x)`), () of anything else."""
        return () if self.tree is None else tuple(_fields(self.text, self.tree))


@lru_cache(maxsize=65_536)
def parsed(text: str) -> Expression:
    """Return what is read off an expression; it never fails, see `Expression.unread` and `mistake`."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None and plain["column"].lower() not in _VALUES:
        name, alias = _bare(plain["column"]), _bare(plain["alias"])
        return Expression(
            text, alias, alias or name, name, (ColumnName((name or "",), plain.start("column")),), tree=None
        )
    if text.strip() == "*":
        return Expression(text, star=True)
    mistake = certain_mistake(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    from dagster_adjunct.resources.sql.reading import read

    return read(text)


def _bare(name: str | None) -> str | None:
    if name is None:
        return None
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _fields(text: str, tree: exp.Expr) -> Iterator[tuple[str, Expression]]:
    from dagster_adjunct.resources.sql.reading import fields_of

    return fields_of(text, tree)

"""One Spark SQL expression as a value: what it is called, which columns it names, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlglot import exp

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
class WindowClause:
    """What a function over records goes by: the columns of `over (partition by id, upper(s))`, (id,), and all of it."""

    columns: tuple[str, ...]
    partition_by: str


@dataclass(frozen=True, slots=True)
class Expression:
    """What is read off a Spark SQL expression.

    `alias` is the name after "as", `name` the one of the column that it gives: None where only Spark knows it, or where
    it gives several. `column` is the column that it passes on unchanged ("dest as faa" passes on dest). `columns` are
    those that it names, variables of lambdas left out. `star` is "*", less what stands in `excepted`.

    `unread` says why nothing is known of it: what it holds is then Spark's to judge. `mistake` is what Spark is certain
    to refuse, whatever columns there are. The expressions of one SELECT, all of its text, have a `number` each.
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
    """Of the expression without its alias; shared, so nobody changes it."""

    def place(self, name: ColumnName) -> str:
        """Return where a column stands, where the text has several lines: " in line 2"."""
        return f" in line {self.text.count(chr(10), 0, name.start) + 1}" if "\n" in self.text.strip() else ""

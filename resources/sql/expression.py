"""A parsed Spark SQL expression: the name of its result, and the columns that it references, with their positions."""

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

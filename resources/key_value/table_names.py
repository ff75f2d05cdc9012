"""Names of scopes and of key-value tables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster_adjunct.resources.errors import InvalidNameError

LONGEST_NAME = 255
_NAME = re.compile(rf"[A-Za-z0-9.-][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


def check_table_name(kind: str, name: str) -> str:
    """Return `name` if a scope or a table may have it; `kind` says in the error which of them it names.

    That is: 1 to 255 letters (of ASCII), digits, `.`, `-` and `_`, the first of them no `_`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{kind} name {name!r:.300} is not allowed: expected 1 to {LONGEST_NAME} letters, digits, '.', '-' or '_', "
            "not beginning with '_'.",
            "Rename it.",
            name=f"{name!s:.300}",
        )
    return name


@dataclass(frozen=True, slots=True)
class TableName:
    """The name of a table in its scope, as errors tell it."""

    scope: str
    table: str

    @classmethod
    def checked(cls, scope: str, table: str) -> TableName:
        """Return the name. Raises InvalidNameError."""
        return cls(check_table_name("scope", scope), check_table_name("key-value table", table))

    @property
    def key(self) -> str:
        """Under which the table is stored; a scope is stored under its name."""
        return f"{self.scope}/{self.table}"

    def __str__(self) -> str:
        return f"key-value table {self.key!r}"

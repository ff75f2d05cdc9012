"""Parts of a Spark SQL expression, read off its text."""

from __future__ import annotations

import re

from dagster_adjunct.resources.sql.parsing import parsed

_ALIAS = re.compile(
    r"(?P<what>.*?[^\s])\s*(?:(?<=[\s)\]'\"`])as\s+)?(?:`(?:[^`]|``)+`|\w+)\s*", re.IGNORECASE | re.DOTALL
)


def plain_column(expression: str) -> str | None:
    """Return the column that an expression is, None when it is anything more than a name."""
    read = parsed(expression)
    return read.column if read.alias is None else None


def split_alias(expression: str) -> tuple[str, str | None]:
    """Split "upper(model) as model" into expression and name; the name is None when there is none."""
    alias = parsed(expression).alias
    match = None if alias is None else _ALIAS.fullmatch(expression.strip())
    return (expression.strip(), None) if match is None else (match["what"].strip(), alias)

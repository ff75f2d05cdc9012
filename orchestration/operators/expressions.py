"""What can be read off a Spark SQL expression without Spark: the column that it is, its name, its type, its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.schemas.schema import Field

_ALIAS = re.compile(r"(?P<what>.*\S)\s+as\s+(?P<name>`[^`]+`|\w+)", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(r"`(?P<quoted>[^`]+)`|(?P<plain>[A-Za-z_]\w*)")
_CAST = re.compile(r"\s*(?:try_)?cast\s*\([^()]*\bas\s+([a-z]+(?:\s*\(\s*\d+\s*,\s*\d+\s*\))?)\s*\)\s*", re.IGNORECASE)
_TOKEN = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z_]\w*)(?P<called>\s*\()?"
)


def plain_column(expression: str) -> str | None:
    """Return the column that an expression is, None when it is anything more than a name."""
    match = _PLAIN.fullmatch(expression.strip())
    return (match["quoted"] or match["plain"]) if match else None


def split_alias(expression: str) -> tuple[str, str | None]:
    """Split "upper(model) as model" into expression and name; the name is None when there is none."""
    match = _ALIAS.fullmatch(expression.strip())
    if match is None:
        return expression.strip(), None
    return match["what"].strip(), match["name"].strip("`")


def cast_type(expression: str) -> str | None:
    """Return the type that a cast gives, None for any other expression."""
    match = _CAST.fullmatch(expression)
    try:
        return Field("value", match[1]).type if match else None
    except AdjunctError:
        return None


def columns_named(expression: str) -> Iterator[str]:
    """Yield what may be a column in an expression, in lower case; names of functions and texts are none."""
    for match in _TOKEN.finditer(expression):
        if match["quoted"] or (match["name"] and not match["called"]):
            yield (match["quoted"] or match["name"]).lower()


def struct_fields(arguments: str) -> Iterator[tuple[str, str]]:
    """Yield names and expressions of `named_struct`'s arguments: "'a', x, 'b', f(y, z)"."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(arguments):
        text = _TOKEN.match(arguments, at)
        if text is not None and not text["called"]:
            at = text.end()
            continue
        depth += {"(": 1, ")": -1}.get(arguments[at], 0)
        if arguments[at] == "," and not depth:
            parts.append(arguments[start:at].strip())
            start = at + 1
        at += 1
    parts.append(arguments[start:].strip())
    for name, value in zip(parts[::2], parts[1::2], strict=False):
        yield name.strip("'").replace("\\'", "'"), value

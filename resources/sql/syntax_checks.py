"""Errors that can be found in an expression without parsing it, and suggestions for mistyped names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

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
    return mistake or _find_lone_operator(_TOKEN.sub(lambda match: "''" if match["text"] else match[0], text))


def _find_lone_operator(text: str) -> str:
    """Return the operator or comma that lacks an operand, in an expression without quoted text."""
    lone = _LONE.search(text)
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

"""Texts that Spark takes for the day or the moment, 'now' or 'today', where it makes a time of a text by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.operands import Operands
from dagster_adjunct.resources.sql.parsing import parsed

if TYPE_CHECKING:
    from sqlglot import exp

_TEXT = r"\s*(now|today|tomorrow|yesterday)(?:\s+[\w/:+-]+)?\s*"  # perhaps with a time zone
_QUOTED = re.compile(rf"(['\"]){_TEXT}\1", re.IGNORECASE)
_SPECIAL = re.compile(_TEXT, re.IGNORECASE)
_COMPARES = "EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In If Case"
_OF_TIMES = """AddMonths DateAdd DateDiff DateSub Day DayOfMonth DayOfWeek DayOfYear Extract Hour LastDay Minute Month
    MonthsBetween NextDay Quarter Second TimeStrToTime TimestampAdd TimestampDiff TimestampTrunc TimeToStr TsOrDsAdd
    TsOrDsDiff TsOrDsToDate TsOrDsToTimestamp WeekOfYear Year"""
"""The parser's nodes that compare, and those whose operands become times."""


def special_times(text: str, types: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the texts in an expression over columns of these types that become a time which changes, in lower case.

    Beside one of a type that is not known such a text counts: it may be a time.
    """
    if not _QUOTED.search(text):
        return ()
    tree = parsed(text).tree
    if tree is None:
        return ()
    from sqlglot import exp

    operands = Operands(types)
    specials: dict[str, None] = {}
    for literal in tree.find_all(exp.Literal, bfs=False):
        special = _SPECIAL.fullmatch(literal.name) if literal.is_string else None
        if special is not None and _becomes_a_time(operands, literal):
            specials[special[1].lower()] = None
    return tuple(specials)


def _becomes_a_time(operands: Operands, literal: exp.Expr) -> bool:
    node, parent = literal, literal.parent
    while parent is not None and type(parent).__name__ == "Paren":
        node, parent = parent, parent.parent
    if parent is None:
        return False
    kind = type(parent).__name__
    if kind not in _COMPARES.split():
        return kind in _OF_TIMES.split()
    above = parent.parent
    beside = above if kind == "If" and above is not None and type(above).__name__ == "Case" else parent
    parts = [beside.this, *(beside.args.get(name) for name in ("expression", "low", "high")), *beside.expressions]
    groups = [operands.kind(part) and operands.group(part) for part in parts if part is not None and part is not node]
    return any(group in (None, "time") for group in groups)

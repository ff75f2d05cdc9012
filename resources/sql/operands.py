"""Finds operands of types that Spark compares, calculates with or casts in no mode.

Types are compared by group. Within a group, and where a string is cast to the other's type, nothing is rejected.
`test_spark_agrees.py` checks over all pairs of types that Spark rejects whatever is rejected here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from dagster_adjunct.resources.lazy_modules import exp
from dagster_adjunct.resources.sql.expression import Expression, parse_expression
from dagster_adjunct.resources.sql.types import KnownTypes

Rule: TypeAlias = Callable[["Operands", "exp.Expr"], str | None]

_GROUPS = {
    "number": ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal"),
    "text": ("string",),
    "boolean": ("boolean",),
    "time": ("date", "timestamp", "timestamp_ntz"),
    "binary": ("binary",),
    "interval": ("interval",),
    "array": ("array",),
    "map": ("map",),
    "struct": ("struct",),
}
_GROUP_OF = {word: group for group, words in _GROUPS.items() for word in words}
_WORD = re.compile("[a-z_]+")
_NESTED = frozenset({"array", "map", "struct"})
_COMPARISONS = frozenset({"EQ", "NEQ", "LT", "LTE", "GT", "GTE", "NullSafeEQ", "NullSafeNEQ"})
_PREDICATES = frozenset({"In", "Between", "Like", "ILike", "RegexpLike", "Is"})
_FIELDS = """year y years yr yrs yearofweek quarter qtr month mon mons months week w weeks day d days dayofweek dow
    dayofweek_iso dow_iso doy hour h hours hr hrs minute m min mins minutes second s sec seconds secs"""
_NO_DDL = re.compile(r"[!?;@#%^&*+=/~|$]")


def find_operand_problem(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return the first operand type that Spark is certain to reject ("compares 'n', which is int, with …"), or None."""
    if expression.tree is None or expression.unread:
        return None
    operands = Operands(types)
    for node in expression.tree.walk():
        rule = None if _binds_differently_in_spark(node) else _RULES.get(type(node).__name__)
        problem = None if rule is None else rule(operands, node)
        if problem is not None and node.find_ancestor(exp.Lambda) is None:  # where a name may be a variable's
            return problem
    return None


def _binds_differently_in_spark(node: exp.Expr) -> bool:
    """Whether the parser binds operands differently from Spark, which reads `a = b IN (c)` as `(a = b) IN (c)`."""
    if type(node).__name__ in _COMPARISONS:
        return any(_is_predicate(side) for side in (node.this, node.args.get("expression")))
    above = node.parent
    while type(above).__name__ == "Not":
        above = above.parent if above is not None else None
    return _is_predicate(node) and type(above).__name__ in _COMPARISONS


def _is_predicate(node: exp.Expr | None) -> bool:
    while type(node).__name__ == "Not" and node is not None:
        node = node.this
    return type(node).__name__ in _PREDICATES


class Operands(KnownTypes):
    """The operands of an expression over columns of these types."""

    def kind(self, node: exp.Expr | None) -> str | None:
        """Return the type of an operand, None if it is unknown or null, which fits everywhere."""
        type_ = self.type(node)
        return None if type_ == "void" else type_

    def group(self, node: exp.Expr | None) -> str | None:
        """Return the group of an operand's type, None where the type is unknown."""
        kind = self.kind(node)
        word = None if kind is None else _WORD.match(kind)
        return None if word is None else _GROUP_OF.get(word[0])

    def describe(self, node: exp.Expr) -> str:
        """Return an operand with its type for messages."""
        return f"{node.sql('spark')!r}, which is {self.kind(node)}"


def _check_comparison(operands: Operands, node: exp.Expr) -> str | None:
    first = operands.group(node.this)
    if first is None:
        return None
    others = [node.args.get(name) for name in ("expression", "low", "high")] + list(node.expressions)
    if len(node.expressions) > 1 and {"text", None} & set(map(operands.group, node.expressions)):
        return None  # all become strings, or are of one unknown type
    for other in others:
        second = None if other is None else operands.group(other)
        if other is None or second is None or _is_comparable(first, second, type(node).__name__):
            continue
        return f"compares {operands.describe(node.this)}, with {operands.describe(other)}"
    return None


def _is_comparable(first: str, second: str, operator: str) -> bool:
    both = {first, second}
    if first == second:
        return first != "map"
    if both == {"boolean", "number"}:  # without ANSI mode Spark takes booleans as 0 and 1
        return operator in ("EQ", "NEQ", "NullSafeEQ", "NullSafeNEQ")
    if both == {"text", "interval"}:
        return operator == "In"
    return "text" in both and not both & _NESTED


def _check_arithmetic(operands: Operands, node: exp.Expr) -> str | None:
    no_time = type(node).__name__ not in ("Add", "Sub")
    sides = [side for side in (node.this, node.args.get("expression")) if side is not None]
    for side in sides:
        group = operands.group(side)
        if group in _NESTED or group in ("boolean", "binary") or (no_time and group == "time"):
            return f"calculates with {operands.describe(side)}"
    kinds = [operands.kind(side) or "" for side in sides]
    if any(kind.startswith("timestamp") for kind in kinds) and "number" in map(operands.group, sides):
        return f"adds a number to a timestamp, {' and '.join(operands.describe(side) for side in sides)}"
    return None


def _check_concatenation(operands: Operands, node: exp.Expr) -> str | None:
    parts = node.expressions or [node.this, node.args.get("expression")]
    groups = {group for group in map(operands.group, parts) if group is not None}
    for part in parts:
        group = operands.group(part)
        if group in ("map", "struct") or (group == "array" and groups != {"array"}):
            return f"concatenates {operands.describe(part)}, with another type"
    return None


def _expects(*groups: str) -> Rule:
    def check(operands: Operands, node: exp.Expr) -> str | None:
        operand = node.this
        if type(operand).__name__ == "TsOrDsToDate" and not operand.args.get("safe"):  # added by the parser
            operand = operand.this
        group = operands.group(operand)
        if group is None or group in groups:
            return None
        expected = " or ".join(_GROUP_WORDS.get(name, name) for name in groups) if len(groups) < 4 else "a single value"
        return f"takes {operands.describe(operand)}: expected {expected}"

    return check


_GROUP_WORDS = {
    "array": "an array",
    "map": "a map",
    "text": "a text",
    "number": "a number",
    "time": "a date or timestamp",
}


def _check_extraction(operands: Operands, node: exp.Expr) -> str | None:
    field = node.name
    if type(node.this).__name__ != "Var" or field.lower() in _FIELDS.split():
        return None
    return f"extracts {field.lower()!r}: expected a part of a time, such as year, month, day or hour"


def _check_from_json(operands: Operands, node: exp.Expr) -> str | None:
    schema = node.args.get("expression")
    text = schema.name if schema is not None and getattr(schema, "is_string", False) else ""
    if any(sign in text for sign in "'\"`{"):  # names in quotes and comments; or a schema that is JSON
        return None
    return f"reads JSON by {text!r}, which is not a schema" if _NO_DDL.search(text) else None


_SCALARS = tuple(group for group in _GROUPS if group not in _NESTED)
_RULES = {
    name: rule
    for names, rule in (
        ("EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In", _check_comparison),
        ("Add Sub Mul Div Mod", _check_arithmetic),
        ("DPipe Concat", _check_concatenation),
        (
            """Upper Lower Trim Length Initcap Ascii Substring Left Right Pad Repeat Unhex RegexpReplace
            RegexpExtract Replace Translate RegexpSplit Levenshtein StrPosition Like ILike RegexpLike Contains
            StartsWith EndsWith""",
            _expects(*_SCALARS),
        ),
        ("Sqrt Exp Ln Round Floor Ceil Pow Sin Cos Tan IsNan", _expects("number", "text")),
        ("Abs Neg", _expects("number", "text", "interval")),
        (
            """Year Month Day DayOfMonth DayOfWeek DayOfYear Hour Minute Second WeekOfYear LastDay AddMonths
            NextDay TimeToStr""",
            _expects("time", "text"),
        ),
        ("MD5 SHA SHA2", _expects("text", "binary")),
        (
            """ArrayDistinct ArraySort ArrayContains ArrayFilter ArraySlice Exists Transform Flatten ArrayToString
            ArrayMax ArrayMin""",
            _expects("array"),
        ),
        ("ArraySize Bracket Explode", _expects("array", "map")),
        ("MapKeys", _expects("map")),
        ("Extract", _check_extraction),
        ("FromJson", _check_from_json),
    )
    for name in names.split()
}


_TEXT = r"\s*(now|today|tomorrow|yesterday)(?:\s+[\w/:+-]+)?\s*"  # perhaps with a time zone
_QUOTED = re.compile(rf"(['\"]){_TEXT}\1", re.IGNORECASE)
_SPECIAL = re.compile(_TEXT, re.IGNORECASE)
_COMPARES = "EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In If Case"
_OF_TIMES = """AddMonths DateAdd DateDiff DateSub Day DayOfMonth DayOfWeek DayOfYear Extract Hour LastDay Minute Month
    MonthsBetween NextDay Quarter Second TimeStrToTime TimestampAdd TimestampDiff TimestampTrunc TimeToStr TsOrDsAdd
    TsOrDsDiff TsOrDsToDate TsOrDsToTimestamp WeekOfYear Year"""
"""The syntax nodes that compare, and those whose operands are cast to dates or timestamps."""


def relative_datetime_literals(text: str, types: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the string literals ("now", "today", …) that Spark casts to the current date or time, in lower case.

    A literal that is compared with an operand of unknown type counts, because that may be a date or time.
    """
    if not _QUOTED.search(text):
        return ()
    tree = parse_expression(text).tree
    if tree is None:
        return ()
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
    owner = above if kind == "If" and above is not None and type(above).__name__ == "Case" else parent
    parts = [owner.this, *(owner.args.get(name) for name in ("expression", "low", "high")), *owner.expressions]
    groups = [operands.kind(part) and operands.group(part) for part in parts if part is not None and part is not node]
    return any(group in (None, "time") for group in groups)

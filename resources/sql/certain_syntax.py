"""Whether the parser certainly reads an expression as Spark does.

sqlglot accepts more than Spark: it drops a plus sign, and has other rules of precedence for `a = b < c`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.types import NUMBERS

if TYPE_CHECKING:
    from sqlglot import exp

UNSURE = "an expression that only Spark can parse"
_QUOTED = re.compile(r"(['\"`])(?:(?!\1).)*\1", re.DOTALL)
_DOUBTS = {
    "a comment": re.compile(r"--|/\*"),
    "a typed or repeated text": re.compile(
        r"(?:['\"]|\b(?!(?:and|or|not|when|then|else|case|like|between|date|timestamp)\b)[a-z_]\w*)\s*['\"]",
        re.I | re.A,
    ),
    UNSURE: re.compile(
        r"[^\w \t\r\n.,()=<>!+*/%|'\"`-]|!(?!=)|,\s*[,)]|\(\s*,|(?<!\w)\.|\.(?!\w)|\btry_cast\b|\bunknown\b"
        r"|\b(?:both|leading|trailing)\s+(?!from\b)"
        r"|\b(?!(?:and|or|not|when|then|else|case|like|between|div|from|for)\b)[a-z_]\w*\s+\d",
        re.I | re.A,
    ),
}
_NUMBER = re.compile(r"(?<![\w`.])\d[\w.]*", re.ASCII)
_USUAL_NUMBER = re.compile(r"\d+L?|\d+\.\d+", re.ASCII)
_CAST = re.compile(r"\bas\s+(\w+)\s*(?:\([^)]*\))?\s*\)", re.IGNORECASE | re.ASCII)
_CAST_TYPES = frozenset({"string", "boolean", "date", "timestamp", "decimal", *NUMBERS})
_ALIAS = re.compile(r"\bas\s+(`|[a-z_]\w*)\s*$", re.IGNORECASE | re.ASCII)
_BEFORE_PARENTHESIS = re.compile(r"(^|[^\w\s]|\b\w+)\s*(?=\()", re.ASCII)
_KEYWORDS = frozenset({"and", "or", "not", "when", "then", "else", "case", "between"})
_SIGNS = {
    r"\+": ("Add",), "-": ("Neg", "Sub"), r"\*": ("Mul",), "/": ("Div",), "%": ("Mod",), r"\|\|": ("DPipe",),
    r"\band\b": ("And", "Between"), r"\bor\b": ("Or",), r"\bis\b": ("Is",), r"\bbetween\b": ("Between",),
}  # fmt: skip
_COMPARED = {"Is", "In", "Between", "Like", "EQ", "NEQ", "NullSafeEQ", "LT", "LTE", "GT", "GTE"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "IntDiv", "Mod", "Neg"}


def doubt_about_syntax(text: str, tree: exp.Expr | None, alias: str | None) -> str:
    """Return what Spark may read otherwise than the tree says, as a noun phrase, or ""."""
    if "\\" in text or "${" in text:  # Spark replaces ${…} also within texts
        return "an escape in a text"
    plain = _QUOTED.sub(lambda match: match[1], text)  # one quote for each quoted part
    for what, pattern in _DOUBTS.items():
        if pattern.search(plain):
            return what
    for number in _NUMBER.findall(plain):
        if not _USUAL_NUMBER.fullmatch(number):
            return f"the number {number}"
    for kind in _CAST.findall(plain):
        if kind.lower() not in _CAST_TYPES:
            return f"a cast to {kind.lower()}"
    if tree is None:
        return ""
    names = [type(node).__name__ for node in tree.walk()]
    words = [match[1].lower() for match in _BEFORE_PARENTHESIS.finditer(plain)]
    groups = sum(word in _KEYWORDS or not word.isidentifier() for word in words)
    is_certain = groups == names.count("Paren") and (alias is None or _ALIAS.search(plain) is not None)
    for sign, nodes in _SIGNS.items():
        is_certain &= len(re.findall(sign, plain, re.IGNORECASE)) == sum(map(names.count, nodes))
    return "" if is_certain and not any(map(_has_unsure_operand, tree.walk())) else UNSURE


def _has_unsure_operand(node: exp.Expr) -> bool:
    """Whether an operand without parentheses is one to which Spark gives another precedence."""
    operands = {type(operand).__name__ for operand in node.iter_expressions()}
    if type(node).__name__ == "DPipe":
        return bool(operands & (_COMPARED | _ARITHMETIC | {"And", "Or", "Not"}))
    is_operator = type(node).__name__ in _COMPARED | _ARITHMETIC
    return is_operator and bool(operands & (_COMPARED | {"And", "Or", "Not", "DPipe"}))

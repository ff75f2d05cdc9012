"""Parses Spark SQL expressions, and finds what their text reveals without parsing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.lazy_modules import LazyModule, exp
from dagster_adjunct.resources.schemas.types import SIMPLE_TYPES
from dagster_adjunct.resources.sql.parsed import (
    SPARK_FUNCTIONS,
    Call,
    ColumnName,
    Expression,
    WindowClause,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql import spark_grammar as grammar
    from dagster_adjunct.resources.sql.spark_grammar import SelectParts
else:
    grammar = LazyModule("dagster_adjunct.resources.sql.spark_grammar")

NILADIC = frozenset(
    {
        "current_catalog",
        "current_database",
        "current_date",
        "current_path",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "grouping__id",
        "localtimestamp",
        "session_user",
        "user",
    }
)
"""Names that Spark reads as function calls without parentheses, unless a column has the name."""


_TOKEN = re.compile(
    r"""(?P<unsure>--|/\*|\$\$|\b[rR](?=['"]))"""
    r"""|(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`]|``)*`)"""
    r"""|(?P<open>[(\[])|(?P<close>[)\]])|(?P<unclosed>['"`])|(?P<ended>;)""",
    re.DOTALL,
)
_PAIRS = {")": "(", "]": "["}
_LONE = re.compile(
    r"(?:^|[(\[,])\s*(,)|(,)\s*(?:[)\]]|$)|^\s*([/%<>=|&^]+)|([-+/%<>=|&^!~]+)\s*$|(=)\s+[<>=]"
)


def find_syntax_error(text: str) -> str:
    """Return, for messages, what is unbalanced or lacks an operand; "" where nothing is
    certainly wrong.
    """
    if not text.strip():
        return "it is empty"
    tokens = list(_TOKEN.finditer(text))
    if any(token["unsure"] for token in tokens):  # a comment, or a text that has no escapes
        return ""
    return _find_unbalanced(tokens) or _find_lone_symbol(text)


def _find_unbalanced(tokens: Iterable[re.Match[str]]) -> str:
    """Return which bracket or quotation mark has no counterpart, "" if all have one."""
    opened: list[str] = []
    for token in tokens:
        if token["unclosed"]:
            return f"{token['unclosed']} is not closed"
        if token["ended"]:
            return "';' ends a statement: expected an expression"
        if token["open"]:
            opened.append(token["open"])
        elif token["close"] and (not opened or opened.pop() != _PAIRS[token["close"]]):
            return f"{token['close']!r} has no opening bracket"
    if opened:
        return f"{opened[-1]!r} is not closed"
    return ""


def _find_lone_symbol(text: str) -> str:
    """Return which operator lacks an operand, "" if none certainly does."""
    lone = _LONE.search(_TOKEN.sub(lambda match: "''" if match["text"] else match[0], text))
    if lone is None:
        return ""
    symbol = lone[lone.lastindex or 0]  # the group that has matched
    if ">" in symbol and "<" in text:  # x::array<int>
        return ""
    return f"an operand is missing next to {symbol!r}"


# Whether the parser certainly reads an expression as Spark does. It accepts more than Spark, drops
# a unary plus, and has other rules of precedence for `a = b < c`.

UNSURE = "an expression that only Spark can parse"
QUOTED = re.compile(r"(['\"`])(?:(?!\1).)*\1", re.DOTALL)
_DOUBTS = {
    "a comment": re.compile(r"--|/\*"),
    "a typed or repeated text": re.compile(
        r"(?:['\"]|\b(?!(?:and|or|not|when|then|else|case|like|between|date|timestamp)\b)"
        r"[a-z_]\w*)\s*['\"]",
        re.I | re.A,
    ),
    UNSURE: re.compile(
        r"[^\w"
        r" \t\r\n.,()\[\]=<>!+*/%|'\"`-]|!(?!=)|,\s*[,)]|\(\s*,|(?<![\w\]`])\.|\.(?![\w`])"
        r"|\btry_cast\b|\bunknown\b"
        r"|\b(?:both|leading|trailing)\s+(?!from\b)"
        r"|\b(?!(?:and|or|not|when|then|else|case|like|between|div|from|for)\b)[a-z_]\w*\s+\d",
        re.I | re.A,
    ),
}
_NUMBER = re.compile(r"(?<![\w`.])\d[\w.]*", re.ASCII)
_USUAL_NUMBER = re.compile(r"\d+L?|\d+\.\d+", re.ASCII)
_CAST = re.compile(r"\bas\s+(\w+)\s*(?:\([^)]*\))?\s*\)", re.IGNORECASE | re.ASCII)
_CAST_TYPES = frozenset({*SIMPLE_TYPES, "decimal"}) - {"binary"}
_ALIAS_AT_END = re.compile(r"\bas\s+(`|[a-z_]\w*)\s*$", re.IGNORECASE | re.ASCII)
_BEFORE_PARENTHESIS = re.compile(r"(^|[^\w\s]|\b\w+)\s*(?=\()", re.ASCII)
_KEYWORDS = frozenset({"and", "or", "not", "when", "then", "else", "case", "between"})
# By the pattern of an operator in a text, the nodes of which each has one.
_SIGNS = {
    r"\+": ("Add",),
    "-": ("Neg", "Sub"),
    r"\*": ("Mul",),
    "/": ("Div",),
    "%": ("Mod",),
    r"\|\|": ("DPipe",),
    r"\band\b": ("And", "Between"),
    r"\bor\b": ("Or",),
    r"\bis\b": ("Is",),
    r"\bbetween\b": ("Between",),
}
_COMPARED = {"Is", "In", "Between", "Like", "EQ", "NEQ", "NullSafeEQ", "LT", "LTE", "GT", "GTE"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "IntDiv", "Mod", "Neg"}


def doubt_about_syntax(text: str, tree: exp.Expr | None, alias: str | None) -> str:
    """Return a noun phrase for a part that Spark may read otherwise than the parser did in
    `tree`, or "".
    """
    if "\\" in text or "${" in text:  # Spark replaces ${…} in string literals, too
        return "an escape in a text"
    plain = QUOTED.sub(lambda match: match[1], text)  # each quoted part becomes one quotation mark
    for what, pattern in _DOUBTS.items():
        if pattern.search(plain):
            return what
    for number in _NUMBER.findall(plain):
        if not _USUAL_NUMBER.fullmatch(number):
            return f"the number {number}"
    for kind in _CAST.findall(plain):
        if kind.lower() not in _CAST_TYPES:
            return f"a cast to {kind.lower()}"
    if tree is not None and not _is_certain(plain, tree, alias):
        return UNSURE
    return ""


def _is_certain(plain: str, tree: exp.Expr, alias: str | None) -> bool:
    """Whether Spark certainly reads a text as the parser did; `plain` is the text without what is
    in quotes.
    """
    if alias is not None and not _ALIAS_AT_END.search(plain):
        return False
    return _has_nodes_of_signs(plain, tree) and not any(map(_has_unsure_operand, tree.walk()))


def _is_in_brackets(node: exp.Expr) -> bool:
    """Whether a node is `values[index]`; the parser reads element_at(values, index) alike."""
    return type(node).__name__ == "Bracket" and node.args.get("offset") is None


def _has_nodes_of_signs(plain: str, tree: exp.Expr) -> bool:
    """Whether a tree has as many nodes of operators and parentheses as the text has signs."""
    names = [type(node).__name__ for node in tree.walk()]
    groups = 0
    for match in _BEFORE_PARENTHESIS.finditer(plain):
        word = match[1].lower()
        if word in _KEYWORDS or not word.isidentifier():
            groups += 1
    if groups != names.count("Paren"):
        return False
    if plain.count("[") != sum(map(_is_in_brackets, tree.walk())):
        return False
    for sign, nodes in _SIGNS.items():
        if len(re.findall(sign, plain, re.IGNORECASE)) != sum(map(names.count, nodes)):
            return False
    return True


def _has_unsure_operand(node: exp.Expr) -> bool:
    """Whether an operand of this node is an operator without parentheses that may have another
    precedence in Spark.
    """
    operands = {type(operand).__name__ for operand in node.iter_expressions()}
    if type(node).__name__ == "DPipe":
        return bool(operands & (_COMPARED | _ARITHMETIC | {"And", "Or", "Not"}))
    is_operator = type(node).__name__ in _COMPARED | _ARITHMETIC
    return is_operator and bool(operands & (_COMPARED | {"And", "Or", "Not", "DPipe"}))


def nearest_names(name: str, there: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return up to `most` of the names in `there` that are most similar to `name`, the nearest
    first, ignoring case.
    """
    by_lower: dict[str, str] = {}
    for known in there:
        by_lower.setdefault(known.lower(), known)
    return tuple(
        by_lower[lower] for lower in get_close_matches(name.lower(), list(by_lower), most, 0.6)
    )


def did_you_mean(name: str, there: Iterable[str]) -> str:
    """Return "Did you mean 'spent'? ", or "" where no name is similar."""
    similar = [repr(known) for known in nearest_names(name, there)]
    if similar:
        return f"Did you mean {' or '.join(similar)}? "
    return ""


# Parsing, each text once. Plain column names are read without sqlglot, which is slow to import.


_NAME = r"`(?:[^`]|``)+`|[A-Za-z_]\w*"
_PLAIN = re.compile(
    rf"\s*(?P<column>{_NAME})(?:\s+as\s+(?P<alias>{_NAME}))?\s*", re.IGNORECASE | re.ASCII
)
_VALUES = frozenset({"true", "false", "null"})


@lru_cache(maxsize=65_536)
def parse_expression(text: str) -> Expression:
    """Return the parsed expression. Never fails: see `Expression.unread` and
    `Expression.mistake`.
    """
    plain = _PLAIN.fullmatch(text)
    if plain is not None and plain["column"].lower() not in _VALUES:  # needs no parser
        name = _unquote(plain["column"])
        alias = _unquote(plain["alias"])
        columns = (ColumnName((name or "",), plain.start("column")),)
        return Expression(text, alias, alias or name, name, columns)
    if text.strip() == "*":
        return Expression(text, star=True)
    mistake = find_syntax_error(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    return grammar.read_expression(text)


@lru_cache(maxsize=4_096)
def parse_select(text: str, table: str) -> SelectParts | None:
    """Return the parts of a SELECT from `table`, None if it reads from anything else or can't be
    parsed.
    """
    return grammar.read_select(text, table)


def _unquote(name: str | None) -> str | None:
    """Return a name without its backticks; None for None."""
    if name is None:
        return None
    if name.startswith("`"):
        return name[1:-1].replace("``", "`")
    return name


def struct_fields(expression: Expression) -> tuple[tuple[str, Expression], ...]:
    """Return the fields of a struct that the expression builds (`named_struct('a', x)`), without
    fields that have no names; () for any other expression.
    """
    if expression.tree is None or not isinstance(expression.tree, exp.Struct):
        return ()
    items = (item for item in expression.tree.expressions if isinstance(item, exp.PropertyEQ))
    named = (item for item in items if isinstance(item.this, exp.Identifier))
    return tuple(
        (item.this.name, grammar.expression_from_tree(expression.text, item.expression))
        for item in named
    )


@lru_cache(maxsize=65_536)
def calls(text: str) -> tuple[Call, ...]:
    """Return the calls of functions, with parentheses, in a text. Works even if the text can't
    be parsed.
    """
    if "(" in text:
        return grammar.find_calls(text)
    return ()


def unknown_functions(text: str) -> tuple[str, ...]:
    """Return the names of called functions that Spark does not have: mistyped, or registered by
    the user.
    """
    return tuple(
        dict.fromkeys(
            call.name for call in calls(text) if call.is_word and call.name not in SPARK_FUNCTIONS
        )
    )


def multi_record_functions(text: str) -> tuple[tuple[str, bool], ...]:
    """Return the called aggregates and generators, each with whether `over (…)` follows it.

    The result is empty where the expression can't be parsed, because a subquery reads records of
    its own.
    """
    found = tuple((call.name, call.is_over) for call in calls(text) if call.is_multi_record)
    if found and parse_expression(text).unread:
        return ()
    return found


@lru_cache(maxsize=65_536)
def window_clauses(text: str) -> tuple[WindowClause, ...]:
    """Return the clauses of window functions, `over (…)`; none where the expression can't be
    parsed.
    """
    if "over" not in text.lower():
        return ()
    tree = parse_expression(text).tree
    if tree is None:
        return ()
    return tuple(grammar.find_window_clauses(tree))


def other_records_construct(text: str) -> str:
    """Return the construct that makes an expression read other records (a function, "over", "a
    subquery"), or "".

    It reads tokens only, and so works even if the expression can't be parsed.
    """
    several = [call.name for call in calls(text) if call.is_multi_record]
    if several:
        return f"{several[0]}()"
    if "(" in text:  # both clauses have parentheses
        return grammar.find_clause_of_other_records(text)
    return ""


def implies_true(text: str, column: str) -> bool:
    """Whether a condition certainly holds only for records whose boolean `column` is true."""
    expression = parse_expression(text)
    if expression.column is not None:
        return expression.column.lower() == column.lower()
    return expression.tree is not None and _tree_implies_true(expression.tree, column)


def _tree_implies_true(tree: exp.Expr, column: str) -> bool:
    """Whether a condition is the column, compares it with true, or is an "and" of which one side
    is that.
    """
    if isinstance(tree, exp.Paren):
        return _tree_implies_true(tree.this, column)
    if isinstance(tree, exp.And):
        return _tree_implies_true(tree.left, column) or _tree_implies_true(tree.right, column)
    if isinstance(tree, exp.EQ | exp.Is):
        if _is_true(tree.left):
            return _tree_implies_true(tree.right, column)
        return _is_true(tree.right) and _tree_implies_true(tree.left, column)
    return isinstance(tree, exp.Column) and not tree.table and tree.name.lower() == column.lower()


def _is_true(node: exp.Expr) -> bool:
    """Whether a node is the literal true."""
    return isinstance(node, exp.Boolean) and bool(node.this)


def has_star_argument(expression: Expression) -> bool:
    """Whether a function gets all columns as "*", as in `struct(*)`; not for `count(*)`."""
    if expression.tree is None or expression.star or "*" not in expression.text:
        return False
    for star in expression.tree.find_all(exp.Star):
        if isinstance(star.parent, exp.Func) and not isinstance(star.parent, exp.Count):
            return True
    return False

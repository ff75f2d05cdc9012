"""Expressions read by a parser of Spark's SQL. What it can't read, or what is not understood here, is left to Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from dagster_adjunct.resources.sql.expression import ColumnName, Expression, WindowClause
from dagster_adjunct.resources.sql.spark_functions import (
    AGGREGATE_FUNCTIONS,
    GENERATOR_FUNCTIONS,
    SPARK_FUNCTIONS,
    argument_count_problem,
)

if TYPE_CHECKING:
    from sqlglot.parsers.spark import SparkParser
else:
    SparkParser = Spark.Parser

# Beside functions and operators: nodes in which a column is a column. In any other, names may be something else.
_UNDERSTOOD = (
    exp.Func, exp.Binary, exp.Unary, exp.Condition, exp.Alias, exp.Aliases, exp.Lambda, exp.Tuple, exp.Star,
    exp.PropertyEQ, exp.Window, exp.WindowSpec, exp.Order, exp.Ordered, exp.Distinct, exp.Filter, exp.Where,
    exp.WithinGroup, exp.IgnoreNulls, exp.RespectNulls, exp.Interval, exp.IntervalSpan, exp.DataType, exp.DataTypeParam,
    exp.Identifier, exp.Var, exp.Kwarg, exp.RawString, exp.ColumnDef, exp.JSONPath, exp.JSONPathPart,
)  # fmt: skip
_ALIAS = re.compile(r".*[\s)]as\s+(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[A-Za-z_]\w*))\s*", re.IGNORECASE | re.DOTALL)
_UNIT = re.compile(
    r"(?:year|quarter|month|week|day|hour|minute|second|millisecond|microsecond)s?|dayofyear", re.IGNORECASE
)
_BEFORE_OVER = frozenset({")", "filter", "within", "group", "ignore", "respect", "nulls"})
_IS_CALL = "is_call"
_TAKES_UNIT = re.compile(r"(?:timestamp_?add|timestamp_?diff|date_?add|date_?diff)\s*\(", re.IGNORECASE)


class _Parser(SparkParser):
    """Spark's, which marks the nodes that it makes of function calls."""

    def validate_expression(self, expression: Any, args: list[Any] | None = None) -> Any:
        if args is not None:
            expression.meta[_IS_CALL] = True
        return super().validate_expression(expression, args)


def read_expression(text: str) -> Expression:
    """Return what is read off an expression that is more than a name."""
    mistake = find_wrong_call(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    tree = parse_tree(text)
    return _unread_expression(text, tree) if isinstance(tree, str) else expression_from_tree(text, tree)


def find_wrong_call(text: str) -> str:
    """Return what is wrong with the number of arguments of a call; "" where nothing is, or no call can be told."""
    try:
        return next(_wrong_calls(_dialect().tokenize(text)), "")
    except SqlglotError:
        return ""


def parse_tree(text: str, *, query: bool = False) -> exp.Expr | str:
    """Return the tree of an expression, or of a query; or else why it can't be read."""
    try:
        dialect = _dialect()
        tokens = dialect.tokenize(text)
        parser = _Parser(error_level=ErrorLevel.IMMEDIATE, dialect=dialect)
        (tree,) = parser.parse(tokens, text) if query else parser.parse_into(exp.Expr, tokens, text)
    except (SqlglotError, RecursionError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        return f"it can't be read without Spark ({type(error).__name__})"
    return "it can't be read without Spark" if tree is None else tree


def find_unknown_functions(text: str) -> tuple[str, ...]:
    """Return what is called in an expression that can be read, and is none of Spark's own functions."""
    try:
        tokens = _dialect().tokenize(text)
    except SqlglotError:
        return ()
    words = {token.text.lower() for token in tokens if token.token_type is TokenType.VAR}  # and no keywords
    return tuple(dict.fromkeys(name for name, _ in _calls(tokens) if name in words and name not in SPARK_FUNCTIONS))


def find_called_functions(text: str) -> tuple[str, ...]:
    """Return what is called in an expression by a plain name, in lower case, each once."""
    try:
        return tuple(dict.fromkeys(name for name, _ in _calls(_dialect().tokenize(text))))
    except SqlglotError:
        return ()


def find_multi_record_functions(text: str) -> tuple[tuple[str, bool], ...]:
    """Return the functions in an expression that take or make several records, and whether `over (…)` follows each."""
    try:
        tokens = _dialect().tokenize(text)
    except SqlglotError:
        return ()
    calls = []
    for at in _call_positions(tokens):
        name = tokens[at].text.lower()
        compared = at > 0 and tokens[at - 1].token_type in (TokenType.LIKE, TokenType.ILIKE, TokenType.RLIKE)
        if name in GENERATOR_FUNCTIONS or (name in AGGREGATE_FUNCTIONS and not compared):
            calls.append((name, _has_over_clause(tokens, at + 1)))
    return tuple(calls)


def find_other_records_construct(text: str) -> str:
    """Return what in an expression takes other records than the one that it is of; "" where nothing does."""
    calls = find_multi_record_functions(text)
    if calls:
        return f"{calls[0][0]}()"
    try:
        tokens = _dialect().tokenize(text)
    except SqlglotError:
        return ""
    for before, token in pairwise(tokens):
        if token.text.lower() == "over" and before.token_type is TokenType.R_PAREN:
            return "over"
        if token.token_type is TokenType.SELECT and before.token_type is not TokenType.DOT:
            return "a subquery"
    return ""


def tree_implies_true(tree: exp.Expr, column: str) -> bool:
    """Whether a condition is the column, says that it is true, or asks for one of these and for more."""
    if isinstance(tree, exp.Paren):
        return tree_implies_true(tree.this, column)
    if isinstance(tree, exp.And):
        return tree_implies_true(tree.left, column) or tree_implies_true(tree.right, column)
    if isinstance(tree, exp.EQ | exp.Is):
        sides = (tree.left, tree.right)
        true = [side for side in sides if isinstance(side, exp.Boolean) and side.this]
        return bool(true) and any(tree_implies_true(side, column) for side in sides if side not in true)
    return isinstance(tree, exp.Column) and not tree.table and tree.name.lower() == column.lower()


def _has_over_clause(tokens: list[Token], opened: int) -> bool:
    """Whether `over` follows a call, behind what may stand between: filter (…), within group (…), ignore nulls."""
    depth = 0
    for token in tokens[opened:]:
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if depth < 0 or (depth == 0 and token.text.lower() not in _BEFORE_OVER):
            return depth == 0 and token.text.lower() == "over"
    return False


def _wrong_calls(tokens: list[Token]) -> Iterator[str]:
    for name, count in _calls(tokens):
        wrong = "" if count is None else argument_count_problem(name, count)
        if wrong:
            yield wrong


def _calls(tokens: list[Token]) -> Iterator[tuple[str, int | None]]:
    """Yield the functions that are called by plain names, with their number of arguments; None where "*" is one."""
    for at in _call_positions(tokens):
        yield tokens[at].text.lower(), _count_arguments(tokens, at + 2)


def _call_positions(tokens: list[Token]) -> Iterator[int]:
    for at, token in enumerate(tokens[:-1]):
        qualified = at > 0 and tokens[at - 1].token_type is TokenType.DOT
        named = token.token_type is not TokenType.IDENTIFIER and token.text.isidentifier() and not qualified
        if named and tokens[at + 1].token_type is TokenType.L_PAREN:
            yield at


def _count_arguments(tokens: list[Token], start: int) -> int | None:
    depth, commas, stars = 0, 0, False
    for at in range(start, len(tokens)):
        kind = tokens[at].token_type
        if kind in (TokenType.L_PAREN, TokenType.L_BRACKET):
            depth += 1
        elif kind in (TokenType.R_PAREN, TokenType.R_BRACKET):
            if depth == 0:
                return None if stars else 0 if at == start else commas + 1
            depth -= 1
        elif depth == 0 and kind is TokenType.COMMA:
            commas += 1
        elif depth == 0 and kind is TokenType.STAR:
            stars = True
    return None


def struct_fields_of_tree(text: str, tree: exp.Expr) -> Iterator[tuple[str, Expression]]:
    """Yield names and values of the struct that a tree makes."""
    if isinstance(tree, exp.Struct):
        for item in tree.expressions:
            if isinstance(item, exp.PropertyEQ) and isinstance(item.this, exp.Identifier):
                yield item.this.name, expression_from_tree(text, item.expression)


def _unread_expression(text: str, why: str) -> Expression:
    """Return an expression of which no more is known than the name that it ends in."""
    match = None if "--" in text or "/*" in text else _ALIAS.fullmatch(text)
    name = None if match is None else match["quoted"] or match["plain"]
    alias = None if name is None else name.replace("``", "`")
    return Expression(text, alias, alias, unread=why)


@cache
def _dialect() -> Spark:
    return Spark()


def expression_from_tree(text: str, tree: exp.Expr) -> Expression:
    """Return what is read off the tree of an expression."""
    nodes = list(tree.walk(bfs=False))
    if any(isinstance(node, exp.Query) for node in nodes):
        return _unread_expression(text, "a subquery is not understood without Spark")
    strange = next((node for node in nodes if not isinstance(node, _UNDERSTOOD) and _IS_CALL not in node.meta), None)
    if strange is not None:
        return _unread_expression(text, f"{strange.key} is not understood without Spark")
    columns = [node for node in nodes if isinstance(node, exp.Column)]
    alias = None
    if isinstance(tree, exp.Alias):
        alias, tree = tree.alias, tree.this
    if isinstance(tree, exp.Star):
        return Expression(text, alias, star=True, excepted=_excepted(tree), tree=tree)
    column, name = None, alias
    if isinstance(tree, exp.Column) and not isinstance(tree.this, exp.Star):
        name = alias or tree.name
        column = tree.name if len(tree.parts) == 1 else None
    return Expression(text, alias, name, column, tuple(_column_names(text, columns)), tree=tree)


def find_window_clauses(tree: exp.Expr) -> Iterator[WindowClause]:
    """Yield what the functions over records in a tree go by."""
    for node in tree.find_all(exp.Window):
        parts = [part.unnest() for part in node.args.get("partition_by") or ()]
        columns = (part.name for part in parts if isinstance(part, exp.Column) and len(part.parts) == 1)
        yield WindowClause(tuple(dict.fromkeys(columns)), ", ".join(part.sql("spark") for part in parts))


def tree_has_star_argument(tree: exp.Expr) -> bool:
    """Whether a function other than count takes "*"."""
    stars = (star for star in tree.find_all(exp.Star) if isinstance(star.parent, exp.Func))
    return any(not isinstance(star.parent, exp.Count) for star in stars)


def _excepted(star: exp.Star) -> tuple[str, ...]:
    return tuple(item.name for item in star.args.get("except_") or ())


def _column_names(text: str, columns: list[exp.Column]) -> Iterator[ColumnName]:
    takes_unit = _TAKES_UNIT.search(text) is not None
    for node in columns:
        parts = tuple(part.name for part in node.parts if not isinstance(part, exp.Star))
        if not parts or parts[0].lower() in variables_around(node) or (takes_unit and _UNIT.fullmatch(parts[0])):
            continue
        yield ColumnName(parts, int(node.parts[0].meta.get("start", 0)))


def variables_around(node: exp.Expr) -> set[str]:
    """Return the variables of the lambdas that a node stands in."""
    names: set[str] = set()
    parent = node.parent
    while parent is not None:
        if isinstance(parent, exp.Lambda):
            names |= {item.name.lower() for item in parent.expressions}
        parent = parent.parent
    return names


# Clauses that bring no other names into scope. What stands in any other, Spark alone knows.
_CLAUSES = frozenset({"expressions", "from_", "where", "group", "having", "order", "limit", "offset", "distinct"})


@dataclass(frozen=True, slots=True)
class SelectParts:
    """What is read off a SELECT that reads a table, without the table's name before its columns.

    `items` make its columns; `where` sees those of the table alone; `behind` are the expressions of group by, having
    and order by, which see the names of the items, too. Where other tables are joined, only `qualified` is known: the
    columns that are named as the table's, `v.city`. `mistake` is what Spark refuses whatever columns there are.
    """

    items: tuple[Expression, ...] = ()
    where: Expression | None = None
    behind: tuple[Expression, ...] = ()
    qualified: tuple[ColumnName, ...] = ()
    groups: bool = False
    mistake: str = ""

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return (*self.items, *(() if self.where is None else (self.where,)), *self.behind)


def read_select(text: str, table: str) -> SelectParts | None:
    """Return what is read off a SELECT of the rows of `table`; None where it reads anything else, or can't be read."""
    tree = parse_tree(text, query=True)
    while isinstance(tree, exp.Subquery) and _nonempty_args(tree) == {"this"}:
        tree = tree.this
    if not isinstance(tree, exp.Select) or len(list(tree.find_all(exp.Query))) > 1:
        return None
    source = tree.args.get("from_")
    alias = None if source is None else _alias(source.this, table)
    if alias is not None and _nonempty_args(tree) <= _CLAUSES:
        return _read_single_table(text, tree, alias)
    sources = [source, *(tree.args.get("joins") or ())]
    aliases = [alias for item in sources if item is not None and (alias := _alias(item.this, table)) is not None]
    if len(aliases) != 1:
        return None
    return SelectParts(qualified=tuple(_qualified(tree, aliases[0])))


def _nonempty_args(node: exp.Expr) -> set[str]:
    return {name for name, value in node.args.items() if value}


def _alias(source: exp.Expr, table: str) -> str | None:
    """Return the name that the columns of `table` have before them, None where the source is not the table alone."""
    if (
        not isinstance(source, exp.Table)
        or source.name.lower() != table
        or not _nonempty_args(source) <= {"this", "alias"}
    ):
        return None
    alias = source.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        return None
    return source.alias_or_name.lower()


def _read_single_table(text: str, tree: exp.Select, alias: str) -> SelectParts | None:
    for column in list(_columns_of(tree, alias)):
        _unqualify(column)
    where, group, having, order = (tree.args.get(name) for name in ("where", "group", "having", "order"))
    behind = [] if group is None else list(group.expressions)
    behind += [] if having is None else [having.this]
    behind += [] if order is None else [item.this for item in order.expressions]
    trees = [*tree.expressions, *behind, *([] if where is None else [where.this])]
    expressions = [replace(expression_from_tree(text, one), number=number) for number, one in enumerate(trees)]
    items, others = expressions[: len(tree.expressions)], expressions[len(tree.expressions) :]
    return SelectParts(
        items=tuple(items),
        where=None if where is None else others.pop(),
        behind=tuple(others),
        groups=group is not None or having is not None or tree.find(exp.AggFunc) is not None,
        mistake=find_wrong_call(text),
    )


def _columns_of(tree: exp.Expr, alias: str) -> Iterator[exp.Column]:
    """Yield the columns in a tree with the table's name before them."""
    for column in tree.find_all(exp.Column):
        first, *others = column.parts
        if others and first.name.lower() == alias and alias not in variables_around(column):
            yield column


def _unqualify(column: exp.Column) -> None:
    """Take the first part off a column's name: "v.address.city" is `address.city`, and "v.*" is `*`."""
    _, *others = column.parts
    if isinstance(others[0], exp.Star):
        column.replace(others[0])
        return
    names = ("this", "table", "db", "catalog")
    kept = dict(zip(names, reversed(others), strict=False))
    for name in names:
        column.set(name, kept.get(name))


def _qualified(tree: exp.Expr, alias: str) -> Iterator[ColumnName]:
    for column in _columns_of(tree, alias):
        first, *others = column.parts
        if not isinstance(others[0], exp.Star):
            yield ColumnName(tuple(part.name for part in others), int(first.meta.get("start", 0)))

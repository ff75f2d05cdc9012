"""Parses expressions and SELECTs with sqlglot. Whatever can't be parsed, or is unknown here, is
left to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from dagster_adjunct.resources.sql.parsed import (
    ARGUMENTS,
    CALLED_AS,
    SUBQUERY,
    Call,
    ColumnName,
    Expression,
    WindowClause,
    argument_count_problem,
)

if TYPE_CHECKING:
    from sqlglot.parsers.spark import SparkParser
else:
    SparkParser = Spark.Parser

# A name in these nodes is a column. In any other node it may be something else.
_UNDERSTOOD = (
    exp.Func,
    exp.Binary,
    exp.Unary,
    exp.Condition,
    exp.Alias,
    exp.Aliases,
    exp.Lambda,
    exp.Tuple,
    exp.Star,
    exp.PropertyEQ,
    exp.Window,
    exp.WindowSpec,
    exp.Order,
    exp.Ordered,
    exp.Distinct,
    exp.Filter,
    exp.Where,
    exp.WithinGroup,
    exp.IgnoreNulls,
    exp.RespectNulls,
    exp.Interval,
    exp.IntervalSpan,
    exp.DataType,
    exp.DataTypeParam,
    exp.Identifier,
    exp.Var,
    exp.Kwarg,
    exp.RawString,
    exp.ColumnDef,
    exp.JSONPath,
    exp.JSONPathPart,
)
_ALIAS = re.compile(
    r".*[\s)]as\s+(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[A-Za-z_]\w*))\s*",
    re.IGNORECASE | re.DOTALL,
)
_UNIT = re.compile(
    r"(?:year|quarter|month|week|day|hour|minute|second|millisecond|microsecond)s?|dayofyear",
    re.IGNORECASE,
)
_BEFORE_OVER = frozenset({")", "filter", "within", "group", "ignore", "respect", "nulls"})
_IS_CALL = "is_call"
_TAKES_UNIT = re.compile(
    r"(?:timestamp_?add|timestamp_?diff|date_?add|date_?diff)\s*\(", re.IGNORECASE
)


class _Dialect(Spark):
    """Spark's dialect, whose nodes also know by which name a function was called."""

    ORIGINAL_NAME_META_KEY = CALLED_AS


def _read_plus(parser: SparkParser) -> exp.Expr:
    """Return `+value` as the function that it is in Spark, which casts strings: the parser of
    sqlglot leaves the sign out.
    """
    return parser.expression(exp.Anonymous(this="positive", expressions=[parser._parse_unary()]))


class _Parser(SparkParser):
    """The parser of Spark SQL, which also marks nodes that were written as function calls."""

    UNARY_PARSERS: ClassVar = {**SparkParser.UNARY_PARSERS, TokenType.PLUS: _read_plus}

    def validate_expression(self, expression: Any, args: list[Any] | None = None) -> Any:
        """Mark a node that has `args`: it was written as a function call."""
        if args is not None:
            is_argument = any(expression is argument for argument in args)
            expression.meta[_IS_CALL] = True
            expression.meta[ARGUMENTS] = () if is_argument else tuple(args)
        return super().validate_expression(expression, args)


def read_expression(text: str) -> Expression:
    """Return the parsed expression; the text is more than a name."""
    mistake = find_wrong_call(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    tree = parse_tree(text)
    if isinstance(tree, str):
        return _unread_expression(text, tree)
    return expression_from_tree(text, tree)


def find_wrong_call(text: str) -> str:
    """Return a message about the first call with a wrong number of arguments, or ""."""
    problems = (argument_count_problem(call.name, call.arguments) for call in find_calls(text))
    return next(filter(None, problems), "")


def _tokens(text: str) -> list[Token]:
    """Return the tokens of an expression; none if its text can't be split into tokens."""
    try:
        return _dialect().tokenize(text)
    except SqlglotError:  # the tokenizer, unlike the parser, raises nothing else
        return []


def parse_tree(text: str, *, query: bool = False) -> exp.Expr | str:
    """Return the syntax tree of an expression or a query, or else the reason why it can't be
    parsed.
    """
    try:
        dialect = _dialect()
        tokens = dialect.tokenize(text)
        parser = _Parser(error_level=ErrorLevel.IMMEDIATE, dialect=dialect)
        (tree,) = parser.parse(tokens, text) if query else parser.parse_into(exp.Expr, tokens, text)
    except Exception as error:  # noqa: BLE001 - of what is no SQL, sqlglot fails with any
        return f"only Spark can parse it ({type(error).__name__})"
    if tree is None:
        return "only Spark can parse it"
    return tree


def find_clause_of_other_records(text: str) -> str:
    """Return "over" or "a subquery", if one of these makes the expression read other records, or
    else "".
    """
    for before, token in pairwise(_tokens(text)):
        if token.text.lower() == "over" and before.token_type is TokenType.R_PAREN:
            return "over"
        if token.token_type is TokenType.SELECT and before.token_type is not TokenType.DOT:
            return SUBQUERY
    return ""


def _has_over_clause(tokens: list[Token], opened: int) -> bool:
    """Whether `over` follows a call, perhaps after filter (…), within group (…) or ignore nulls.

    `opened` is the index of the call's opening parenthesis.
    """
    depth = 0
    for token in tokens[opened:]:
        if token.token_type is TokenType.L_PAREN:
            depth += 1
        elif token.token_type is TokenType.R_PAREN:
            depth -= 1
        if depth < 0:
            return False
        word = token.text.lower()
        if depth == 0 and word not in _BEFORE_OVER:
            return word == "over"
    return False


def find_calls(text: str) -> tuple[Call, ...]:
    """Return the calls of functions by plain names, without a database or quotes."""
    tokens = _tokens(text)
    calls = []
    before = None
    for at, (token, following) in enumerate(pairwise(tokens)):
        kind = token.token_type
        is_name = kind is not TokenType.IDENTIFIER and token.text.isidentifier()
        is_call = is_name and following.token_type is TokenType.L_PAREN
        if is_call and before is not TokenType.DOT:
            is_compared = before in (TokenType.LIKE, TokenType.ILIKE, TokenType.RLIKE)
            arguments = _count_arguments(tokens, at + 2)
            is_over = _has_over_clause(tokens, at + 1)
            is_word = kind is TokenType.VAR
            calls.append(Call(token.text.lower(), arguments, is_word, is_compared, is_over))
        before = kind
    return tuple(calls)


def _count_arguments(tokens: list[Token], start: int) -> int | None:
    """Return the number of arguments of a call; None if it is not closed, or if `*` may stand for
    several arguments. The first token after "(" is at `start`.
    """
    depth = 0
    commas = 0
    stars = False
    for at in range(start, len(tokens)):
        kind = tokens[at].token_type
        is_end = kind in (TokenType.R_PAREN, TokenType.R_BRACKET)
        if depth == 0 and is_end:
            break
        if kind in (TokenType.L_PAREN, TokenType.L_BRACKET):
            depth += 1
        elif is_end:
            depth -= 1
        elif depth == 0 and kind is TokenType.COMMA:
            commas += 1
        elif depth == 0 and kind is TokenType.STAR:
            stars = True
    else:
        return None
    if stars:
        return None
    return 0 if at == start else commas + 1


def _unread_expression(text: str, why: str) -> Expression:
    """Return an expression that can't be parsed, for the reason `why`; only the alias at its end
    is known.
    """
    match = None if "--" in text or "/*" in text else _ALIAS.fullmatch(text)
    name = None
    if match is not None:
        name = match["quoted"] or match["plain"]
    alias = None
    if name is not None:
        alias = name.replace("``", "`")
    return Expression(text, alias, alias, unread=why)


@cache
def _dialect() -> _Dialect:
    """Return Spark's dialect."""
    return _Dialect()


def expression_from_tree(text: str, tree: exp.Expr) -> Expression:
    """Return the `Expression` for a syntax tree of (a part of) this text."""
    strange = _find_strange_part(tree)
    if strange:
        return _unread_expression(text, f"only Spark can analyze {strange}")
    columns = []
    for node in tree.walk(bfs=False):
        if isinstance(node, exp.Column):
            columns.append(node)
    alias = None
    if isinstance(tree, exp.Alias):
        alias = tree.alias
        tree = tree.this
    if isinstance(tree, exp.Star):
        excepted = tuple(item.name for item in tree.args.get("except_") or ())
        return Expression(text, alias, star=True, excepted=excepted, tree=tree)
    column = None
    name = alias
    if isinstance(tree, exp.Column) and not isinstance(tree.this, exp.Star):
        name = alias or tree.name
        if len(tree.parts) == 1:
            column = tree.name
    return Expression(text, alias, name, column, tuple(_column_names(text, columns)), tree=tree)


def _find_strange_part(tree: exp.Expr) -> str:
    """Return a noun phrase for a part that only Spark can analyze, or ""."""
    if tree.find(exp.Query) is not None:
        return SUBQUERY
    for node in tree.walk(bfs=False):
        if not isinstance(node, _UNDERSTOOD) and _IS_CALL not in node.meta:
            return node.key
    return ""


def find_window_clauses(tree: exp.Expr) -> Iterator[WindowClause]:
    """Yield the clauses of the window functions in a tree."""
    for node in tree.find_all(exp.Window):
        parts = [part.unnest() for part in node.args.get("partition_by") or ()]
        columns: dict[str, None] = {}
        for part in parts:
            if isinstance(part, exp.Column) and len(part.parts) == 1:
                columns[part.name] = None
        yield WindowClause(tuple(columns), ", ".join(part.sql("spark") for part in parts))


def _column_names(text: str, columns: list[exp.Column]) -> Iterator[ColumnName]:
    """Yield the names of columns, without variables of lambdas and without units of time, which the
    parser takes for columns.
    """
    takes_unit = _TAKES_UNIT.search(text) is not None
    for node in columns:
        parts = tuple(part.name for part in node.parts if not isinstance(part, exp.Star))
        if not parts or parts[0].lower() in variables_around(node):
            continue
        if takes_unit and _UNIT.fullmatch(parts[0]):
            continue
        yield ColumnName(parts, int(node.parts[0].meta.get("start", 0)))


def variables_around(node: exp.Expr) -> set[str]:
    """Return the variables of the lambdas that contain a node, in lower case."""
    names: set[str] = set()
    parent = node.parent
    while parent is not None:
        if isinstance(parent, exp.Lambda):
            names |= {item.name.lower() for item in parent.expressions}
        parent = parent.parent
    return names


# In these clauses of a SELECT, names are columns or aliases. A SELECT with any other clause is left
# to Spark.
_CLAUSES = frozenset(
    {"expressions", "from_", "where", "group", "having", "order", "limit", "offset", "distinct"}
)


@dataclass(frozen=True, slots=True)
class SelectParts:
    """The parts of a SELECT from one table, with the table's name removed from its columns.

    `items` are the selected expressions. `where` may use only columns of the table. `later` are the
    expressions of group by, having and order by, which may also use aliases of the items. `groups`
    says that it groups or aggregates. If other tables are joined, only `qualified` is known: the
    columns written with the table's name, as in `v.city`. `mistake` is an error that Spark is
    certain to raise, whatever the columns are.
    """

    items: tuple[Expression, ...] = ()
    where: Expression | None = None
    later: tuple[Expression, ...] = ()
    qualified: tuple[ColumnName, ...] = ()
    groups: bool = False
    mistake: str = ""

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """All expressions: the items, the condition of WHERE, and the later ones."""
        return (*self.items, *filter(None, [self.where]), *self.later)


def read_select(text: str, table: str) -> SelectParts | None:
    """Return the parts of a SELECT from `table`, None if it reads from anything else or can't be
    parsed.
    """
    tree = parse_tree(text, query=True)
    while isinstance(tree, exp.Subquery) and _nonempty_args(tree) == {"this"}:
        tree = tree.this
    if not isinstance(tree, exp.Select) or len(list(tree.find_all(exp.Query))) > 1:
        return None
    source = tree.args.get("from_")
    alias = None
    if source is not None:
        alias = _alias(source.this, table)
    if alias is not None and _nonempty_args(tree) <= _CLAUSES:
        return _read_single_table(text, tree, alias)
    # Other tables are joined: only names that are qualified with that of this table are known.
    aliases = []
    for item in filter(None, [source, *(tree.args.get("joins") or ())]):
        alias = _alias(item.this, table)
        if alias is not None:
            aliases.append(alias)
    if len(aliases) != 1:
        return None
    return SelectParts(qualified=tuple(_qualified_names(tree, aliases[0])))


def _qualified_names(tree: exp.Expr, alias: str) -> Iterator[ColumnName]:
    """Yield the columns that are written with the table's name, without it."""
    for column in _columns_of(tree, alias):
        first, *others = column.parts
        if not isinstance(others[0], exp.Star):
            names = tuple(part.name for part in others)
            yield ColumnName(names, int(first.meta.get("start", 0)))


def _nonempty_args(node: exp.Expr) -> set[str]:
    """Return the names of a node's arguments that are not empty."""
    return {name for name, value in node.args.items() if value}


def _alias(source: exp.Expr, table: str) -> str | None:
    """Return the name that qualifies columns of `table` in this item of FROM; None if it is
    anything but the table.
    """
    is_table = isinstance(source, exp.Table) and source.name.lower() == table
    if not is_table or not _nonempty_args(source) <= {"this", "alias"}:
        return None
    alias = source.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        return None
    return source.alias_or_name.lower()


def _read_single_table(text: str, tree: exp.Select, alias: str) -> SelectParts:
    """Return the parts of a SELECT from one table, which `alias` names. Changes the tree."""
    _remove_qualifier(tree, alias)
    where = tree.args.get("where")
    group = tree.args.get("group")
    having = tree.args.get("having")
    order = tree.args.get("order")
    trees = list(tree.expressions)
    if group is not None:
        trees += group.expressions
    if having is not None:
        trees.append(having.this)
    if order is not None:
        trees += [item.this for item in order.expressions]
    if where is not None:
        trees.append(where.this)
    expressions = []
    for number, one in enumerate(trees):
        expressions.append(replace(expression_from_tree(text, one), number=number))
    condition = None
    if where is not None:
        condition = expressions.pop()  # it was added last
    groups = group is not None or having is not None
    return SelectParts(
        items=tuple(expressions[: len(tree.expressions)]),
        where=condition,
        later=tuple(expressions[len(tree.expressions) :]),
        groups=groups or tree.find(exp.AggFunc) is not None,
        mistake=find_wrong_call(text),
    )


def _remove_qualifier(tree: exp.Select, alias: str) -> None:
    """Remove the table's name from columns: "v.address.city" becomes `address.city`, "v.*" `*`."""
    names = ("this", "table", "db", "catalog")  # of a column's parts, the last one first
    for column in list(_columns_of(tree, alias)):
        _, *path = column.parts
        if isinstance(path[0], exp.Star):
            column.replace(path[0])
            continue
        parts = dict(zip(names, reversed(path), strict=False))
        for name in names:
            column.set(name, parts.get(name))


def _columns_of(tree: exp.Expr, alias: str) -> Iterator[exp.Column]:
    """Yield the columns in a tree that are qualified with `alias`, the name of the table."""
    for column in tree.find_all(exp.Column):
        first, *others = column.parts
        if others and first.name.lower() == alias and alias not in variables_around(column):
            yield column

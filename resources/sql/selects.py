"""A SELECT of the rows of one table, taken apart into expressions; one of more than that is left to Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sqlglot import exp

from dagster_adjunct.resources.sql.expression import ColumnName, Expression
from dagster_adjunct.resources.sql.spark_sql_parser import expression_of, tree_of, variables_around, wrong_call

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
    tree = tree_of(text, query=True)
    while isinstance(tree, exp.Subquery) and _given(tree) == {"this"}:
        tree = tree.this
    if not isinstance(tree, exp.Select) or len(list(tree.find_all(exp.Query))) > 1:
        return None
    source = tree.args.get("from_")
    alias = None if source is None else _alias(source.this, table)
    if alias is not None and _given(tree) <= _CLAUSES:
        return _of_one_table(text, tree, alias)
    sources = [source, *(tree.args.get("joins") or ())]
    aliases = [alias for item in sources if item is not None and (alias := _alias(item.this, table)) is not None]
    if len(aliases) != 1:
        return None
    return SelectParts(qualified=tuple(_qualified(tree, aliases[0])))


def _given(node: exp.Expr) -> set[str]:
    return {name for name, value in node.args.items() if value}


def _alias(source: exp.Expr, table: str) -> str | None:
    """Return the name that the columns of `table` have before them, None where the source is not the table alone."""
    if not isinstance(source, exp.Table) or source.name.lower() != table or not _given(source) <= {"this", "alias"}:
        return None
    alias = source.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        return None
    return source.alias_or_name.lower()


def _of_one_table(text: str, tree: exp.Select, alias: str) -> SelectParts | None:
    for column in list(_columns_of(tree, alias)):
        _unqualify(column)
    where, group, having, order = (tree.args.get(name) for name in ("where", "group", "having", "order"))
    behind = [] if group is None else list(group.expressions)
    behind += [] if having is None else [having.this]
    behind += [] if order is None else [item.this for item in order.expressions]
    trees = [*tree.expressions, *behind, *([] if where is None else [where.this])]
    expressions = [replace(expression_of(text, one), number=number) for number, one in enumerate(trees)]
    items, others = expressions[: len(tree.expressions)], expressions[len(tree.expressions) :]
    return SelectParts(
        items=tuple(items),
        where=None if where is None else others.pop(),
        behind=tuple(others),
        groups=group is not None or having is not None or tree.find(exp.AggFunc) is not None,
        mistake=wrong_call(text),
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

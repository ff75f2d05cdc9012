"""Several expressions that make the columns of a record, as `select` and `map` take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_adjunct.resources.sql.checking import checked_expression, resolved
from dagster_adjunct.resources.sql.expression import Expression
from dagster_adjunct.resources.sql.parsing import parsed


@dataclass(frozen=True, slots=True)
class Item:
    """One of the expressions, with its type where it is certain."""

    expression: Expression
    type: str | None

    def stars(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return which of these columns "*" stands for, or "* except (…)"."""
        gone = {name.lower() for name in self.expression.excepted}
        return tuple(name for name in columns if name.lower() not in gone) if gone else tuple(columns)


def checked_list(
    operator: str,
    texts: Sequence[str],
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
) -> tuple[Item, ...]:
    """Return what a list of expressions makes of records with these columns; see `checked_expression`.

    Spark lets an expression use the names that stand before it in the list, where no column has them.
    """
    items: list[Item] = []
    before: dict[str, str | None] = {}
    for text in texts:
        kind = checked_expression(operator, text, columns, types, aliases=before)
        expression = resolved(parsed(text), columns)
        items.append(Item(expression, kind))
        if expression.alias is not None:
            before[expression.alias] = kind
    return tuple(items)

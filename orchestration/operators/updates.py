"""What is sent to tables: records or updates, and the columns that updates change."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from dagster_adjunct.orchestration.operators.columns import OnNullKey
from dagster_adjunct.resources.schemas.schema import quote_text
from dagster_adjunct.resources.table_backends.nested_values import root_name
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.operation import UpdateContract

Pairs = tuple[tuple[str, str], ...]
"""Pairs (column, Spark SQL expression, or where its value is)."""


class WrittenExpression(NamedTuple):
    """An expression of an update, and the table's column that gets its value; `argument` is the
    one in which it was given: "set", "add", "append" or "if_missing".
    """

    argument: str
    column: str
    expression: str


@dataclass(frozen=True, slots=True)
class Update:
    """The expressions that make an update of a record: pairs (the table's column, Spark SQL
    expression).

    The value is assigned (`set`), added or appended. `remove` names columns that are set to null.
    `if_missing` has the default record, to which an update is applied if there is no record; None:
    a missing record is an error.
    """

    set: Pairs = ()
    add: Pairs = ()
    append: Pairs = ()
    remove: tuple[str, ...] = ()
    if_missing: Pairs | None = None

    @property
    def parts(self) -> dict[str, Pairs]:
        """The pairs by kind of change ("set", "add", "append"), without kinds that have none."""
        parts = {}
        if self.set:
            parts["set"] = self.set
        if self.add:
            parts["add"] = self.add
        if self.append:
            parts["append"] = self.append
        return parts

    @property
    def kinds(self) -> AbstractSet[str]:
        """The kinds of change that an update makes, with "remove"."""
        if not self.remove:
            return self.parts.keys()
        return {*self.parts, "remove"}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the table's columns that an update changes."""
        names = [name for name, _ in (*self.set, *self.add, *self.append)]
        return (*names, *self.remove)

    @property
    def written(self) -> tuple[WrittenExpression, ...]:
        """All expressions, with those of the default record."""
        arguments = self.parts
        if self.if_missing is not None:
            arguments["if_missing"] = self.if_missing
        written = []
        for argument, pairs in arguments.items():
            for column, expression in pairs:
                written.append(WrittenExpression(argument, column, expression))
        return tuple(written)

    def expressions(self) -> tuple[str, ...]:
        """Return the expressions by which `map` makes the update and, if there is one, the
        default record.
        """
        structs = [f"'{name}', {struct_expression(pairs)}" for name, pairs in self.parts.items()]
        if not structs:
            # Spark has no struct without fields: an update that only removes columns is a boolean.
            update = "true"
        else:
            update = f"named_struct({', '.join(structs)})"
        return (f"{update} as {UPDATE}", *default_expression(self.if_missing))


def default_expression(pairs: Pairs | None) -> tuple[str, ...]:
    """Return the expression by which `map` makes the default record; () if `pairs` is None."""
    if pairs is None:
        return ()
    if not pairs:
        # Spark has no struct without fields: a default record without columns is a boolean.
        return (f"(true) as {DEFAULT}",)
    return (f"{struct_expression(pairs)} as {DEFAULT}",)


def struct_expression(pairs: Pairs) -> str:
    """Return the Spark SQL expression of a struct with these fields."""
    arguments = [f"{quote_text(name)}, {expression}" for name, expression in pairs]
    return f"named_struct({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class TableSend:
    """A send to the remote table named `table`: of whole records, or with a `contract` of updates.

    `update` has the expressions that turn each record into an update; without it, the records must
    be update messages. `on` has pairs (column or path of the records, column of the table's key) in
    the order of the key; () if the records have columns with the key's names. `dead_letters` is how
    many records of a batch the table may reject permanently, which are passed to the next operator;
    with None, the first one fails the batch. `args` are passed to the table's write function. A
    table with marks stores the position of the last record that it applied from each source
    partition; `marks_as` names this send there.
    """

    table: str
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"
    update: Update | None = None
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    marks_as: str | None = None
    on: Pairs = ()

    @property
    def expressions(self) -> Update:
        """The expressions of the update; none if records or update messages are sent."""
        return self.update or Update()

    def key_sources(self, key: Sequence[str]) -> tuple[str, ...]:
        """Return where the records have the values of the table's key: columns or paths."""
        return tuple(source for source, _ in self.key_pairs(key))

    def key_pairs(self, key: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return where the records have each value of the table's key, and its column there."""
        if not self.on:
            return tuple((name, name) for name in key)
        return self.on


@dataclass(frozen=True, slots=True)
class LocalSend:
    """A send to the local table named `table`: records for which the SQL condition `deleted` is
    true delete their key.
    """

    table: str
    deleted: str | None
    on_null_key: OnNullKey


class ChangedColumns(NamedTuple):
    """The columns of a table that a send changes, and how.

    A value is assigned (`set`), a number is added (`summed`), an element is appended to a list
    (`appended`), or a value is added to JSON or to an unknown type (`merged`). `begun` are further
    columns of the default record. Only the effect of sums does not depend on the order of updates.
    A send of whole records changes all columns (`every`).
    """

    set: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    appended: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()
    begun: frozenset[str] = frozenset()
    every: bool = False

    @property
    def only_sums(self) -> bool:
        """Whether it does no more than add numbers."""
        return not self.every and not self._ordered

    @property
    def sets_nothing(self) -> bool:
        """Whether no value is assigned to a column."""
        return not self.every and not self.set

    @property
    def adds(self) -> bool:
        """Whether applying an update twice differs from applying it once."""
        return bool(self.summed or self.appended or self.merged)

    @property
    def _ordered(self) -> frozenset[str]:
        """The columns whose values depend on the order of updates."""
        return self.set | self.appended | self.merged

    def depends_on_order_with(self, other: ChangedColumns) -> bool:
        """Whether the order of two updates matters: both change a column, and one does more than
        add a number.
        """
        if self.every or other.every:
            return True
        if _overlap(self._ordered, other.summed):
            return True
        return _overlap(self._ordered | self.summed, other._ordered)

    def hides(self, other: ChangedColumns) -> bool:
        """Whether columns would be lost where a table keeps the newer record of two sends: where
        the two set different columns, the newer record hides what only the older one sets.
        """
        if self.every or other.every:
            return self.every != other.every  # two sends of whole records set the same
        if not self.set or not other.set:
            return False
        return self.set != other.set


def _overlap(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two sends name the same column, or one a column and the other a value inside it."""
    return bool(one & other or _columns_of(one) & other or one & _columns_of(other))


def _columns_of(names: frozenset[str]) -> set[str]:
    """Return the columns that have the values with such names as "address.city"; other names have
    none.
    """
    return {root_name(name, ()) for name in names if "." in name}


EVERY_COLUMN = ChangedColumns(every=True)

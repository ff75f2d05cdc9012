"""`TableSend`: how the records of one operator are sent to a remote table, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.orchestration.operators.columns.update_columns import Update
    from dagster_adjunct.resources.tables.partial_update import UpdateContract


@dataclass(frozen=True, slots=True)
class TableSend:
    """Records to the declared table `table`: without a contract whole ones, with one updates.

    With `update` each record is an update by these expressions; without, updates have their form already. With
    `dead_letters`, so many records of a batch may be refused for good, and are kept for an operator that follows.
    `args` are handed through to the table's function. `marks_as` names the send among those of the application to the
    table, in the marks that the table keeps.
    """

    table: str
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"
    update: Update | None = None
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    marks_as: str | None = None


class ChangedColumns(NamedTuple):
    """The columns that updates change: to what they bring (`set`), by adding what is known to be a number (`summed`),
    by appending to lists (`appended`), and by adding members to JSON, or what may be either (`merged`). `begun` are
    those that a record has besides where there was none.

    Only sums come to the same in any order: a list has it, and of two members of one name the last stays.
    """

    set: frozenset[str]
    summed: frozenset[str]
    appended: frozenset[str]
    merged: frozenset[str]
    begun: frozenset[str]

    @property
    def only_sums(self) -> bool:
        return not self._ordered

    @property
    def adds(self) -> bool:
        """Whether an update that is applied twice is not the same as one."""
        return bool(self.summed or self.appended or self.merged)

    @property
    def _ordered(self) -> frozenset[str]:
        return self.set | self.appended | self.merged

    def depends_on_order_with(self, other: ChangedColumns) -> bool:
        """Whether it matters which of two updates comes last: both change a column, and one not by summing."""
        return bool(self._ordered & (other._ordered | other.summed)) or bool(other._ordered & self.summed)

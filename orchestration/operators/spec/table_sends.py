"""`TableSend`: how the records of one operator are sent to a remote table, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.resources.tables.partial_update import UpdateContract


@dataclass(frozen=True, slots=True)
class TableSend:
    """Records to the declared table `table`: without a contract whole ones, with one updates.

    `typed` says that updates have structs for what is set, added and appended, and `remove` what all of them remove.
    With `dead_letters`, so many records of a batch may be refused for good, and are kept for an operator that follows.
    `args` are handed through to the table's function. `marks_as` names the send among those of the application to the
    table, in the marks that the table keeps.
    """

    table: str
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"
    typed: bool = False
    remove: tuple[str, ...] = ()
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    marks_as: str | None = None


class ChangedColumns(NamedTuple):
    """The columns that updates change: to what they bring, and by adding or appending."""

    set: frozenset[str]
    added: frozenset[str]

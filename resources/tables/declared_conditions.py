"""The conditions that a table declares, put onto an operation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.operation import DIRECT, Conditions, Entries, Operation, OperationKind, RowEntries

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.table_functions import TableFunction


@dataclass(frozen=True, slots=True)
class DeclaredConditions:
    """What a table asks its store to check with every write (`Conditions`).

    `newest_by` holds for every write, and its time comes with the entries or is read from records and updates.
    `idempotent` holds for messages, which carry marks; a direct call has none, and is done each time it is made.
    `on_replay` says what a startpoint's records, which are read again on purpose, do: "apply" or "skip".
    """

    table: str
    newest_by: str | None = None
    idempotent: bool = False
    on_replay: Literal["apply", "skip"] = "apply"

    def check(self, capabilities: Capabilities | None) -> None:
        """Raise ConfigurationError where the declaration, or the write function, makes no sense of it."""
        for name, wanted in (("newest_by", self.newest_by is not None), ("idempotent", self.idempotent)):
            if wanted and (capabilities is None or not getattr(capabilities, name)):
                raise ConfigurationError(
                    f"table {self.table} declares {name}, and "
                    + ("has no write function." if capabilities is None else "its write function can't check it."),
                    f"Declare a write function whose store can, or leave {name} out.",
                    argument=name,
                    table=self.table,
                )
        if self.newest_by is not None and (not isinstance(self.newest_by, str) or not self.newest_by):
            raise ConfigurationError(
                f"table {self.table}: newest_by={self.newest_by!r}; expected the name of a column.",
                "Name the column that holds a record's time.",
                argument="newest_by",
                table=self.table,
            )
        if not isinstance(self.idempotent, bool):
            raise ConfigurationError(
                f"table {self.table}: idempotent={self.idempotent!r}; expected True or False.",
                "Change it.",
                argument="idempotent",
                table=self.table,
            )
        if self.on_replay not in ("apply", "skip") or (self.on_replay == "skip" and not self.idempotent):
            raise ConfigurationError(
                f"table {self.table}: on_replay={self.on_replay!r} with idempotent={self.idempotent}; expected "
                '"apply", or "skip" together with idempotent=True.',
                "Correct the declaration.",
                argument="on_replay",
                table=self.table,
            )

    def on(self, operation: Operation[Any]) -> Operation[Any]:
        """The operation with these conditions, and what they need of each entry; errors before anything is sent."""
        if (self.newest_by is None and not self.idempotent) or not operation.kind.writes or operation.conditions:
            return operation
        entries = operation.entries
        idempotent = self.idempotent and entries.marks is not None
        if self.newest_by is None:
            return replace(operation, conditions=_ONCE if idempotent else _MARKED)
        if not idempotent and operation.kind is OperationKind.UPDATE:
            self._check_repeatable(entries)
        if entries.newest is None or entries.marks is None:
            times = entries.newest if entries.newest is not None else self._times(operation)
            marks = entries.marks if entries.marks is not None else [DIRECT] * len(entries)
            entries = RowEntries(entries.keys, entries.values, entries.defaults, marks, times)
        return replace(operation, entries=entries, conditions=Conditions(self.newest_by, idempotent, self.idempotent))

    def deleted(self, keys: Sequence[Any], newest: Any) -> RowEntries[Any]:
        """The entries of a delete, which hold by the time `newest` where it is given."""
        if newest is None:
            return RowEntries(keys)
        if self.newest_by is None:
            raise ConfigurationError(
                f"table {self.table} got a delete by newest={newest!r}, and is not declared with newest_by.",
                "Leave it out, or declare the table with newest_by.",
                argument="newest",
                table=self.table,
            )
        return RowEntries(keys, newest=[newest] * len(keys))

    def _times(self, operation: Operation[Any]) -> list[Any]:
        assert self.newest_by is not None
        values: Sequence[Any] = operation.entries.values or [None] * len(operation)
        times = [_time(value, self.newest_by) for value in values]
        for place, time in enumerate(times):
            if time is None:
                key, column = operation.entries.keys[place], self.newest_by
                gone = operation.kind is OperationKind.DELETE or values[place] is None
                thing = "update" if operation.kind is OperationKind.UPDATE else "record"
                raise TableError(
                    f"table {self.table}: {operation.kind.value} of key {key!r} has no {column}, by which the table "
                    "keeps the newest.",
                    f"Say by which {column} the record goes: delete({key!r}, newest=…)."
                    if gone
                    else f"Give the {thing} its {column}.",
                    table=self.table,
                )
        return times

    def _check_repeatable(self, entries: Entries[Any]) -> None:
        if not isinstance(entries, RowEntries):
            return  # of a stream: its expressions are known, and refused, when the application is planned
        for place, value in enumerate(entries.values or ()):
            if isinstance(value, Changes) and not value.repeatable:
                raise TableError(
                    f"table {self.table}: the update of key {entries.keys[place]!r} adds or appends, and newest_by "
                    "alone applies what has an equal time again.",
                    "Declare the table idempotent=True and send messages with marks, or only set values.",
                    table=self.table,
                )


_ONCE, _MARKED = Conditions(None, True), Conditions(keeps_marks=True)


def check_conditions(table: str, function: TableFunction, operation: Operation[Any]) -> None:
    """Raise for conditions of a request that its function would leave out, or that have nothing to go by."""
    conditions, entries = operation.conditions, operation.entries
    capabilities, what = function.capabilities, f"table {table}: a {operation.kind.value}"
    for name, wanted in (("newest_by", conditions.newest_by is not None), ("idempotent", conditions.idempotent)):
        if wanted and not getattr(capabilities, name):
            raise ConfigurationError(
                f"{what} came with the condition {name}, and {type(function).__name__} can't check it.",
                f"Leave it out, or send it to a table whose store can check {name}.",
                argument=name,
                table=table,
            )
    if isinstance(entries, RowEntries):  # of a stream they are made together
        needed = ["marks"] if conditions.newest_by is None else ["marks", "newest"]
        for name in needed:
            if getattr(entries, name) is None:
                raise TableError(
                    f"{what} came with conditions, and its entries have no {name}.",
                    f"Give RowEntries(…, {name}=…), or let the table declare its conditions.",
                    table=table,
                )


def _time(value: Any, column: str) -> Any:
    if isinstance(value, Changes):
        return value.set.get(column)
    return value.get(column) if isinstance(value, Mapping) else getattr(value, column, None)

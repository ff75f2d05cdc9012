"""`Applied`: what a store keeps beside a record, to tell messages that are late or come again.

It lies in a table of its own, `<table>__adjunct`, one row a key, which is locked before a conditional write and
changed in the same transaction. It stays when the record is deleted, so that what is older does not bring it back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.backends.column_values import Kind
from dagster_adjunct.resources.backends.rows import RowCodec
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, TableAccessError
from dagster_adjunct.resources.tables.operation import Conditions, Mark

COLUMNS = ("newest_of", "newest", "tie", "applied")
"""The texts that stand for it, in this order, after the key's columns; then `at`, when they were last written."""

_READ: dict[Kind, Any] = {
    Kind.STRING: str,
    Kind.INTEGER: int,
    Kind.FLOAT: float,
    Kind.DECIMAL: Decimal,
    Kind.DATE: date.fromisoformat,
    Kind.TIMESTAMP: datetime.fromisoformat,
}
_WRITTEN: dict[Kind, Any] = {Kind.STRING: str, Kind.INTEGER: str, Kind.DECIMAL: str, Kind.FLOAT: repr}


def beside(table: str, key: Sequence[str]) -> str:
    """The name of the table that keeps it, by the columns `key`."""
    name = f"{table}__adjunct"
    if len(name.encode()) > 63:
        raise ConfigurationError(
            f"table {table!r} can have no conditions: {name!r}, where their state would lie, is longer than 63 bytes.",
            "Give the table a shorter name, or leave newest_by and idempotent out.",
            table=table,
        )
    for part in key:
        if part in (*COLUMNS, "at"):
            raise ConfigurationError(
                f"table {table!r} can have no conditions: its key has a column {part!r}, and so has {name!r}, "
                "where their state lies.",
                "Rename the key's column, or leave newest_by and idempotent out.",
                table=table,
            )
    return name


def check_columns_beside(label: str, beside: str, key: Sequence[str], names: Sequence[str]) -> None:
    """TableAccessError where the columns of that table are others, or none because it is missing."""
    if set(names) != {*key, *COLUMNS, "at"}:
        raise TableAccessError(
            f"{label}: newest_by and idempotent need the table {beside!r} with the columns {', '.join(key)}, "
            f"{', '.join(COLUMNS)}, at; " + (f"it has {', '.join(names)}." if names else "there is none."),
            "Declare it with create=True, or make that table.",
            table=label,
        )


@dataclass(slots=True)
class Applied:
    """The time and tie of the newest message applied, and the greatest position applied from each source."""

    newest: tuple[Any, str] | None = None
    positions: dict[str, str] = field(default_factory=dict)
    stands: tuple[str | None, ...] = (None, None, None)  # the first three texts as they were read
    of_record: tuple[Any, str] | None = None  # of a record that was written without conditions; it is not kept

    def has_had(self, conditions: Conditions, mark: Mark) -> bool:
        """Whether the message, or a later one of its source, was applied before."""
        return conditions.idempotent and mark.position <= self.positions.get(mark.source, "")

    def is_late(self, conditions: Conditions, mark: Mark, time: Any) -> bool:
        """Whether the record is newer."""
        newest = self.newest or self.of_record
        return conditions.newest_by is not None and newest is not None and (time, mark.tie) < newest

    def remember(self, conditions: Conditions, mark: Mark, time: Any, *, late: bool) -> None:
        """Record that the message was applied; one that is late does not become the newest."""
        if conditions.idempotent:
            self.positions[mark.source] = mark.position
        if conditions.newest_by is not None and not late:
            self.newest = (time, mark.tie)


def check_newest_by(codec: RowCodec, newest_by: str | None) -> None:
    """Refuse a column by which nothing can be the newest."""
    if newest_by is not None and codec.column(newest_by).kind not in _READ:
        raise SchemaMismatchError(
            f"{codec.table}: column {newest_by!r} is {codec.columns[newest_by].type}, and newest_by needs a column "
            "of times, numbers or text.",
            "Name another column as newest_by.",
            column=newest_by,
        )


def to_texts(codec: RowCodec, newest_by: str | None, applied: Applied) -> tuple[str | None, ...]:
    """`COLUMNS` of what is kept."""
    if applied.newest is None or newest_by is None:
        return (*applied.stands, json.dumps(applied.positions))
    time, tie = applied.newest
    write = _WRITTEN.get(codec.columns[newest_by].kind)
    return (newest_by, write(time) if write else time.isoformat(), tie, json.dumps(applied.positions))


def from_texts(codec: RowCodec, newest_by: str | None, texts: tuple[Any, ...]) -> Applied:
    """What `COLUMNS` stand for; times of another column than `newest_by` say nothing."""
    newest_of, newest, tie, applied = texts
    positions = json.loads(applied) if applied else {}
    if newest_by is None or newest_of != newest_by or newest is None:
        return Applied(None, positions, (newest_of, newest, tie))
    return Applied((_READ[codec.columns[newest_by].kind](newest), tie), positions, (newest_of, newest, tie))

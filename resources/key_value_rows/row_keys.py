"""The key of a record as family and key of a key-value table.

    no family      key     the text of the only key column, or a JSON array of all
    with a family  family  the text of the first key column, or a JSON array of the first; key: the same of the rest

A text is a string itself, or another value as JSON has it, without quotation marks. No family of a table is empty: a
record whose first column is an empty string has none, and lies in a partition by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind, decimal_digits
from dagster_adjunct.resources.backends.rows import Row
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.key_value_rows.row_values_in_json import compact, written_by


class RowKeys:
    """Makes families and keys of checked keys; `family` names the first of the key's columns, or none."""

    def __init__(self, label: str, key: Sequence[Column], family: Sequence[str]) -> None:
        names = [column.name for column in key]
        if list(family) != names[: len(family)] or len(family) == len(names):
            raise ConfigurationError(
                f"{label} has the family {', '.join(family)} and the key {', '.join(names)}; expected the first "
                "columns of the key, and not all of them.",
                "Name those columns that are to lie in one partition first in key=, and in family=.",
                argument="family",
            )
        for column in key:
            if column.kind is Kind.FLOAT or (column.kind is Kind.DECIMAL and decimal_digits(column) is None):
                raise SchemaMismatchError(
                    f"{label}: its key column {column.name!r} is {column.type}, in which equal values may be written "
                    "in several ways.",
                    "Use a string, an integer, boolean, timestamp, date, binary or decimal(p,s).",
                    column=column.name,
                )
        self._families = len(family)
        self._family_text = _text_of(key[: len(family)])
        self._key_text = _text_of(key[len(family) :])

    def address(self, key: Row) -> tuple[str | None, str]:
        """Return the family, None where there is none, and the key."""
        family = self._family_text(key[: self._families]) if self._families else None
        # All other texts are families of their own, and all keys of this table have one: so it meets no other record.
        return family or None, self._key_text(key[self._families :])


def _text_of(columns: Sequence[Column]) -> Callable[[Row], str]:
    writers = [written_by(column) for column in columns]

    def values(row: Row) -> list[Any]:
        return [part if write is None else write(part) for write, part in zip(writers, row, strict=True)]

    if len(columns) > 1:
        return lambda row: compact(values(row))

    def text(row: Row) -> str:
        (value,) = values(row)
        return value if isinstance(value, str) else compact(value)

    return text

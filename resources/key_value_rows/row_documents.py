"""Between records and the JSON documents that a key-value table holds of them.

    {"seats":149,"tail":"N1","adjunct_applied":{"lake.flights.3":"0000000000:00000000000000000017:000000"}}
    {"adjunct_deleted":true,"adjunct_at":1372636800.0,"adjunct_newest":["at","2013-07-01T00:00:00Z","lake.flights.3 …"]}

A document is the record's columns, those of its key among them and those that are null left out, and beside them what
conditions need (`Applied`). A deleted record whose marks are kept is a document without columns. Columns that are not
declared, as another release may have written them, are left alone by updates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dagster_adjunct.resources.backends.applied_marks import Applied, from_texts, to_texts
from dagster_adjunct.resources.backends.column_values import Column
from dagster_adjunct.resources.backends.rows import CheckedChanges, RowCodec
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.key_value_rows.row_values_in_json import compact, read_by, written_by

OWN = "adjunct_"  # how members begin that are no columns
DELETED, AT, NEWEST, APPLIED = (OWN + name for name in ("deleted", "at", "newest", "applied"))

Document = dict[str, Any]


class RowDocuments:
    """Makes and reads documents; errors name the table, the key and what was found."""

    def __init__(self, label: str, columns: Sequence[Column]) -> None:
        for column in columns:
            if column.name.startswith(OWN):
                raise ConfigurationError(
                    f"{label} has a column {column.name!r}; names that begin with {OWN} are for what conditions keep.",
                    "Rename it.",
                    argument="columns",
                )
        self._label = label
        self._write = {column.name: written_by(column) for column in columns}
        self._read = {column.name: read_by(column) for column in columns}

    def whole(self, record: Mapping[str, Any]) -> Document:
        """Return the document of a checked record."""
        return {name: self._written(name, value) for name, value in record.items() if value is not None}

    def changed(self, old: Mapping[str, Any], changes: CheckedChanges) -> Document:
        """Return a document after checked changes, of which none adds: the sums are set already."""
        new = {**old, **self.whole(changes.set)}
        for name, value in changes.set.items():
            if value is None:
                new.pop(name, None)
        for name, values in changes.append.items():
            new[name] = [*(new.get(name) or ()), *self._written(name, values)]
        return new

    def record(self, document: Mapping[str, Any], names: Sequence[str], key: object) -> dict[str, Any]:
        """Return these columns, None where there is no value. Raises SchemaMismatchError."""
        record: dict[str, Any] = {}
        for name in names:
            value = document.get(name)
            read = self._read[name]
            try:
                record[name] = value if value is None or read is None else read(value)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise SchemaMismatchError(
                    f"{self._label}: the record of key {key!r} has {value!r} in {name!r}, which is no such value.",
                    "Correct the record, or the declared columns.",
                    column=name,
                ) from error
        return record

    def _written(self, name: str, value: Any) -> Any:
        write = self._write[name]
        return value if write is None else write(value)

    def to_bytes(self, document: Document) -> bytes:
        """Return what is stored."""
        return compact(document).encode()

    def from_bytes(self, stored: bytes, key: object) -> Document:
        """Return the document that was stored. Raises SchemaMismatchError for what is none."""
        try:
            document = json.loads(stored)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise SchemaMismatchError(
                f"{self._label} holds {stored[:60]!r} under the key {key!r}; expected a record as a JSON object.",
                "Remove it, or read the table as what it is.",
                table=self._label,
            )
        return document


def is_deleted(document: Mapping[str, Any]) -> bool:
    """Whether a document has no record, but the marks of one that was deleted."""
    return DELETED in document


def marks_in(document: Mapping[str, Any]) -> Document:
    """Return what a document holds beside the record."""
    return {name: document[name] for name in (NEWEST, APPLIED, AT) if name in document}


def applied_in(codec: RowCodec, newest_by: str | None, document: Mapping[str, Any]) -> Applied:
    """Return what was applied to the record."""
    newest = document.get(NEWEST) or (None, None, None)
    applied = from_texts(codec, newest_by, (*newest, None))
    applied.positions = dict(document.get(APPLIED) or {})
    return applied


def marks_of(codec: RowCodec, newest_by: str | None, applied: Applied, at: float) -> Document:
    """Return what a document holds of `applied`; `at`: seconds since 1970."""
    *newest, _ = to_texts(codec, newest_by, applied)
    marks: Document = {NEWEST: newest} if newest[0] is not None else {}
    if applied.positions:
        marks[APPLIED] = applied.positions
    return {**marks, AT: at}

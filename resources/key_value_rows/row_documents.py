"""Between records and the JSON documents that a key-value table holds of them.

    {"seats":149,"tail":"N1","adjunct_applied":{"lake.flights.3":"0000000000:00000000000000000017:000000"}}
    {"adjunct_deleted":true,"adjunct_at":1372636800.0,"adjunct_newest":["at","2013-07-01T00:00:00Z","lake.flights.3 …"]}

A document is the record's columns, those of its key among them and those that are null left out, and beside them what
conditions need (`Applied`). A deleted record whose marks are kept is a document without columns. Columns that are not
declared, as another release may have written them, are left alone by updates.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from functools import partial
from typing import Any

from dagster_adjunct.resources.backends.columns import Column, Kind, declared_digits
from dagster_adjunct.resources.backends.write_plan import (
    Applied,
    CheckedChanges,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    WritePlan,
    applied_from_texts,
    applied_to_texts,
    columns_to_read,
    needs_read,
    plan_writes,
)
from dagster_adjunct.resources.errors import ConfigurationError, KeyValueTableError, SchemaMismatchError
from dagster_adjunct.resources.key_value.segment import ABSENT, ANYTHING, Expected, StoredEntry
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Problem, State

# How the values of a record are written in JSON, so that anybody can read what a key-value table holds of it.
#
#     string      text                        timestamp   "2013-07-01T00:00:00Z", a fraction only where there is one
#     integers    number                      date        "2013-07-01"
#     floats      number                      decimal     text with all its digits, "12.50" for decimal(10,2)
#     boolean     true, false                 binary      text, base64
#     json        as it is                    array<type> array of the above
#
# Equal values of all types but floats, json and decimals without a scale have equal texts: these may be keys.


_EXACT = Context(prec=2100)


def json_encoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that brings a checked value into the form that JSON has it in; None where it is that."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _of_items(json_encoder(column.element))
    if column.kind is Kind.DECIMAL:
        return _decimals_to_text(column)
    return _WRITE.get(column.kind)


def json_decoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that brings back what `written_by` wrote; None where it is that.

    It raises TypeError, ValueError or ArithmeticError for what is no such value: anybody may write to the table.
    """
    if column.kind is Kind.LIST:
        assert column.element is not None
        items = _of_items(json_decoder(column.element))
        return lambda values: _a(list, values) if items is None else items(_a(list, values))
    return _READ.get(column.kind)


def to_compact_json(value: Any) -> str:
    """Return a value's JSON, without spaces."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _of_items(item: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if item is None else lambda values: [None if value is None else item(value) for value in values]


def _decimals_to_text(column: Column) -> Callable[[Decimal], str]:
    digits = declared_digits(column)
    unit = None if digits is None else Decimal(1).scaleb(-digits[1])

    def text(number: Decimal) -> str:
        if unit is None:
            return str(number)
        number = number.quantize(unit, context=_EXACT)
        return format(number if number else number.copy_abs(), "f")  # -0.00 is 0.00

    return text


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value


_WRITE: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.isoformat().replace("+00:00", "Z"),
    Kind.DATE: date.isoformat,
    Kind.BINARY: lambda value: base64.b64encode(value).decode(),
}
_READ: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: partial(_a, str),
    Kind.INTEGER: partial(_a, int),
    Kind.BOOLEAN: partial(_a, bool),
    Kind.TIMESTAMP: lambda text: datetime.fromisoformat(text).astimezone(UTC),
    Kind.DATE: date.fromisoformat,
    Kind.BINARY: lambda text: base64.b64decode(text, validate=True),
    Kind.DECIMAL: Decimal,
    Kind.FLOAT: float,
}


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
        self._write = {column.name: json_encoder(column) for column in columns}
        self._read = {column.name: json_decoder(column) for column in columns}

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
        return to_compact_json(document).encode()

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


def stored_marks(document: Mapping[str, Any]) -> Document:
    """Return what a document holds beside the record."""
    return {name: document[name] for name in (NEWEST, APPLIED, AT) if name in document}


def applied_in(codec: RowCodec, newest_by: str | None, document: Mapping[str, Any]) -> Applied:
    """Return what was applied to the record."""
    newest = document.get(NEWEST) or (None, None, None)
    applied = applied_from_texts(codec, newest_by, (*newest, None))
    applied.positions = dict(document.get(APPLIED) or {})
    return applied


def marks_of(codec: RowCodec, newest_by: str | None, applied: Applied, at: float) -> Document:
    """Return what a document holds of `applied`; `at`: seconds since 1970."""
    *newest, _ = applied_to_texts(codec, newest_by, applied)
    marks: Document = {NEWEST: newest} if newest[0] is not None else {}
    if applied.positions:
        marks[APPLIED] = applied.positions
    return {**marks, AT: at}


# What a request of writes comes to in a key-value table: for each key the document to write, and what it depends on.
#
# All of it is pure. What is decided over documents that were read holds only while these are there: each change expects
# the version that was seen, and after a conflict all is decided again.


@dataclass(frozen=True, slots=True)
class DocumentWrite:
    """What is done to one key: `document` as bytes, None to remove it; `begins`: a default begins the record."""

    document: bytes | None
    expected: Expected | bytes
    begins: bool = False


@dataclass(frozen=True, slots=True)
class PlannedWrites:
    """The keys that are written, and the entries that are not done, by their places."""

    written: Mapping[Row, DocumentWrite]
    problems: Mapping[int, Problem]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was read: documents by key, those with marks alone among them, and why others could not be."""

    documents: dict[Row, Document] = field(default_factory=dict)
    records: dict[Row, dict[str, Any]] = field(default_factory=dict)
    unreadable: dict[Row, Problem] = field(default_factory=dict)


def needs_stored_rows(operation: Operation[Any]) -> bool:
    """Whether the writes depend on what is there, or have to leave some of it."""
    return needs_read(operation) or operation.conditions.keeps_marks


def plan_documents(
    codec: RowCodec,
    documents: RowDocuments,
    operation: Operation[Any],
    asked: ValidEntries,
    stored_entries: Mapping[Row, StoredEntry | None],
    at: float,
    fitting: Callable[[bytes], bytes],
) -> PlannedWrites:
    """Decide over what was found, which has all keys where the operation `looks`; `at`: the time, for marks.

    `fitting` returns a value that the table takes, or raises KeyValueTableError.
    """
    seen = _seen(documents, columns_to_read(operation, asked.entries), stored_entries)
    fit = [entry for entry in asked.entries if entry.key not in seen.unreadable]
    unfit = {entry.place: seen.unreadable[entry.key] for entry in asked.entries if entry.key in seen.unreadable}
    newest_by = operation.conditions.newest_by
    applied = {}
    if operation.conditions:
        applied = {key: applied_in(codec, newest_by, document) for key, document in seen.documents.items()}
    plan = plan_writes(codec, operation, ValidEntries(fit, {}), StoredState(seen.records, applied))
    marks = {key: marks_of(codec, newest_by, applied_to_key, at) for key, applied_to_key in plan.applied.items()}
    looked, begins = needs_stored_rows(operation), operation.kind is OperationKind.UPDATE
    written: dict[Row, DocumentWrite] = {}
    for key, document in _new_documents(documents, plan, seen, marks):
        entry = stored_entries.get(key)
        if document is None and looked and entry is None:
            continue  # nothing is there to remove
        expected = (ABSENT if entry is None else entry.version) if looked else ANYTHING
        try:
            stored = None if document is None else fitting(documents.to_bytes(document))
        except KeyValueTableError as error:
            too_large = Problem(State.REFUSED, error)
            unfit |= {one.place: too_large for one in fit if one.key == key}
        else:
            written[key] = DocumentWrite(stored, expected, begins and key in plan.begins)
    return PlannedWrites(written, {**unfit, **plan.problems})


def _seen(documents: RowDocuments, names: tuple[str, ...], stored_entries: Mapping[Row, StoredEntry | None]) -> _Seen:
    seen = _Seen()
    for key, entry in stored_entries.items():
        if entry is None:
            continue
        try:
            document = documents.from_bytes(entry.value or b"", key)
            if not is_deleted(document):
                seen.records[key] = documents.record(document, names, key)
            seen.documents[key] = document
        except SchemaMismatchError as error:
            seen.unreadable[key] = Problem(State.REFUSED, error)
    return seen


def _new_documents(
    documents: RowDocuments, plan: WritePlan, seen: _Seen, marks: Mapping[Row, Document]
) -> Iterator[tuple[Row, Document | None]]:
    """Yield each key with its new document; None where nothing of it stays."""

    def kept(key: Row) -> Document:
        return marks.get(key) or stored_marks(seen.documents.get(key, {}))

    for records in (plan.puts, plan.begins):
        for key, record in records.items():
            yield key, {**documents.whole(record), **kept(key)}
    for key in plan.deletes:
        beside = kept(key)
        yield key, {DELETED: True, **beside} if beside else None
    for key, changes in plan.changes.items():
        if changes.set or changes.append or key in marks:
            yield key, {**documents.changed(seen.documents[key], changes), **marks.get(key, {})}
    for key in marks.keys() - {*plan.puts, *plan.begins, *plan.deletes, *plan.changes}:
        yield key, {**seen.documents[key], **marks[key]}


# The key of a record as family and key of a key-value table.
#
#     no family      key     the text of the only key column, or a JSON array of all
#     with a family  family  the text of the first key column, or a JSON array of the first; key: the same of the rest
#
# A text is a string itself, or another value as JSON has it, without quotation marks. No family of a table is empty: a
# record whose first column is an empty string has none, and lies in a partition by its key.


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
            if column.kind is Kind.FLOAT or (column.kind is Kind.DECIMAL and declared_digits(column) is None):
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
    writers = [json_encoder(column) for column in columns]

    def values(row: Row) -> list[Any]:
        return [part if write is None else write(part) for write, part in zip(writers, row, strict=True)]

    if len(columns) > 1:
        return lambda row: to_compact_json(values(row))

    def text(row: Row) -> str:
        (value,) = values(row)
        return value if isinstance(value, str) else to_compact_json(value)

    return text

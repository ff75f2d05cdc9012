"""Conversion between records and the JSON documents that a key-value table stores, and planning of writes.

    {"seats":149,"tail":"N1","adjunct_applied":{"lake.flights.3":"0000000000:00000000000000000017:000000"}}
    {"adjunct_deleted":true,"adjunct_at":1372636800.0,"adjunct_newest":["at","2013-07-01T00:00:00Z","lake.flights.3 …"]}

A document has the record's columns, including those of its key and without nulls, and the marks that conditions need
(`Applied`). A deleted record whose marks are kept is a document without columns. Updates keep columns that are not
declared, which another release may have written.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from functools import partial
from typing import Any

from dagster_adjunct.resources.backends import write_plan
from dagster_adjunct.resources.backends.columns import (
    OWN_PREFIX,
    Column,
    Kind,
    check_key_text,
    check_not_reserved,
    declared_digits,
)
from dagster_adjunct.resources.backends.write_plan import (
    Applied,
    CheckedChanges,
    Entry,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    WritePlan,
)
from dagster_adjunct.resources.errors import ConfigurationError, KeyValueTableError, SchemaMismatchError
from dagster_adjunct.resources.key_value.segment import ABSENT, ANYTHING, SegmentChange, StoredEntry
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Problem, State

# The JSON form of values, for any reader:
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
    """Return the function from a checked value to its JSON form, None if they are the same."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _of_items(json_encoder(column.element))
    if column.kind is Kind.DECIMAL:
        return _decimals_to_text(column)
    return _WRITE.get(column.kind)


def json_decoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the inverse of `json_encoder`'s function.

    It raises TypeError, ValueError or ArithmeticError for other values, because anybody may write to the table.
    """
    if column.kind is Kind.LIST:
        assert column.element is not None
        items = _of_items(json_decoder(column.element))
        return lambda values: _require(list, values) if items is None else items(_require(list, values))
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


def _require(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value


_WRITE: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.isoformat().replace("+00:00", "Z"),
    Kind.DATE: date.isoformat,
    Kind.BINARY: lambda value: base64.b64encode(value).decode(),
}
_READ: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: partial(_require, str),
    Kind.INTEGER: partial(_require, int),
    Kind.BOOLEAN: partial(_require, bool),
    Kind.TIMESTAMP: lambda text: datetime.fromisoformat(text).astimezone(UTC),
    Kind.DATE: date.fromisoformat,
    Kind.BINARY: lambda text: base64.b64decode(text, validate=True),
    Kind.DECIMAL: Decimal,
    Kind.FLOAT: float,
}


DELETED, AT, NEWEST, APPLIED = (OWN_PREFIX + name for name in ("deleted", "at", "newest", "applied"))

Document = dict[str, Any]


class RowDocuments:
    """Converts records to documents and back. Errors name the table, the key and the value."""

    def __init__(self, codec: RowCodec, columns: Sequence[Column]) -> None:
        self.codec, self._label = codec, codec.table
        for column in columns:
            check_not_reserved(codec.table, column.name)
        self._write = {column.name: json_encoder(column) for column in columns}
        self._read = {column.name: json_decoder(column) for column in columns}

    def whole(self, record: Mapping[str, Any]) -> Document:
        """Return the document of a checked record."""
        return {name: self._written(name, value) for name, value in record.items() if value is not None}

    def changed(self, old: Mapping[str, Any], changes: CheckedChanges) -> Document:
        """Return a document after checked changes, in which additions were replaced by their sums."""
        new = {**old, **self.whole(changes.set)}
        for name, value in changes.set.items():
            if value is None:
                new.pop(name, None)
        for name, values in changes.append.items():
            new[name] = [*(new.get(name) or ()), *self._written(name, values)]
        return new

    def record(self, document: Mapping[str, Any], names: Sequence[str], key: object) -> dict[str, Any]:
        """Return these columns of a document, None for missing values. Raises SchemaMismatchError."""
        record: dict[str, Any] = {}
        for name in names:
            value = document.get(name)
            read = self._read[name]
            try:
                record[name] = value if value is None or read is None else read(value)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise SchemaMismatchError(
                    f"{self._label}: the record of key {key!r} has {value!r} in {name!r}, which is of another type.",
                    "Correct the record, or the declared columns.",
                    column=name,
                ) from error
        return record

    def _written(self, name: str, value: Any) -> Any:
        write = self._write[name]
        return value if write is None else write(value)

    def to_bytes(self, document: Document) -> bytes:
        """Return the stored form of a document."""
        return to_compact_json(document).encode()

    def from_bytes(self, stored: bytes, key: object) -> Document:
        """Return a stored document. Raises SchemaMismatchError for anything else."""
        try:
            document = json.loads(stored)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            problem = f"{self._label} has {stored[:60]!r} under the key {key!r}; expected a record as a JSON object."
            step = "Remove it, or read the table with its own serializers."
            raise SchemaMismatchError(problem, step, table=self._label)
        return document


def is_deleted(document: Mapping[str, Any]) -> bool:
    """Whether a document has only the marks of a deleted record."""
    return DELETED in document


def applied_in(codec: RowCodec, newest_by: str | None, document: Mapping[str, Any]) -> Applied:
    """Return the updates that were applied to the record."""
    newest = document.get(NEWEST) or (None, None, None)
    applied = write_plan.applied_from_texts(codec, newest_by, (*newest, None))
    applied.positions = dict(document.get(APPLIED) or {})
    return applied


def marks_of(codec: RowCodec, newest_by: str | None, applied: Applied, at: float) -> Document:
    """Return the marks for `applied`; `at` is in seconds since 1970."""
    *newest, _ = write_plan.applied_to_texts(codec, newest_by, applied)
    marks: Document = {NEWEST: newest} if newest[0] is not None else {}
    if applied.positions:
        marks[APPLIED] = applied.positions
    return {**marks, AT: at}


# Planning of writes: for each key the document to write, and the version that it depends on. Pure functions.


@dataclass(frozen=True, slots=True)
class PlannedWrites:
    """The change of each key, without a version, the keys whose record starts from a default, and the problems of
    entries by their places."""

    changes: Mapping[Row, SegmentChange]
    begun: Collection[Row]
    problems: Mapping[int, Problem]


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """The documents that were read, including those with marks only, their records, and why others are unreadable."""

    documents: dict[Row, Document] = field(default_factory=dict)
    records: dict[Row, dict[str, Any]] = field(default_factory=dict)
    unreadable: dict[Row, Problem] = field(default_factory=dict)


def needs_stored_rows(operation: Operation[Any]) -> bool:
    """Whether writes depend on the stored rows, or have to keep parts of them."""
    return write_plan.needs_read(operation) or operation.conditions.keeps_marks


def plan_documents(
    documents: RowDocuments,
    operation: Operation[Any],
    entries: Sequence[Entry],
    table_keys: Mapping[Row, bytes],
    stored_entries: Mapping[Row, StoredEntry | None],
    at: float,
    fitting: Callable[[bytes], bytes],
) -> PlannedWrites:
    """Plan the writes of an operation. `stored_entries` has all keys if `needs_stored_rows`; `at` is the time of marks.

    `fitting` returns a value that the table accepts, or raises KeyValueTableError.
    """
    seen = _parse_stored(documents, write_plan.columns_to_read(operation, entries), stored_entries)
    fit = [entry for entry in entries if entry.key not in seen.unreadable]
    unfit = {entry.place: seen.unreadable[entry.key] for entry in entries if entry.key in seen.unreadable}
    codec, newest_by = documents.codec, operation.conditions.newest_by
    applied = {}
    if operation.conditions:
        applied = {key: applied_in(codec, newest_by, document) for key, document in seen.documents.items()}
    plan = write_plan.plan_writes(codec, operation, ValidEntries(fit, {}), StoredState(seen.records, applied))
    marks = {key: marks_of(codec, newest_by, applied_to_key, at) for key, applied_to_key in plan.applied.items()}
    has_read, begun = needs_stored_rows(operation), operation.kind is OperationKind.UPDATE
    written: dict[Row, SegmentChange] = {}
    for key, document in _new_documents(documents, plan, seen, marks):
        entry = stored_entries.get(key)
        if document is None and has_read and entry is None:
            continue  # there is nothing to remove
        expected = (ABSENT if entry is None else entry.version) if has_read else ANYTHING
        try:
            stored = None if document is None else fitting(documents.to_bytes(document))
        except KeyValueTableError as error:
            too_large = Problem(State.REFUSED, error)
            unfit |= {one.place: too_large for one in fit if one.key == key}
        else:
            written[key] = SegmentChange(table_keys[key], stored, b"", expected)
    return PlannedWrites(written, plan.begins if begun else (), {**unfit, **plan.problems})


def _parse_stored(
    documents: RowDocuments, names: tuple[str, ...], stored_entries: Mapping[Row, StoredEntry | None]
) -> _StoredRows:
    seen = _StoredRows()
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
    documents: RowDocuments, plan: WritePlan, seen: _StoredRows, marks: Mapping[Row, Document]
) -> Iterator[tuple[Row, Document | None]]:
    """Yield each key with its new document, None if it is removed."""

    def kept(key: Row) -> Document:
        document = seen.documents.get(key, {})
        return marks.get(key) or {name: document[name] for name in (NEWEST, APPLIED, AT) if name in document}

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


# Family and key of a record in a key-value table:
#
#     no family      key     the text of the only key column, or a JSON array of all
#     with a family  family  the text of the first key column, or a JSON array of the first; key: the same of the rest
#
# The text of a string is itself, that of another value its JSON without quotation marks. Families are not empty: a
# record whose first column is an empty string has none, and its key selects the partition.


class RowKeys:
    """Converts checked keys to families and keys; `family` names the first of the key's columns, or none."""

    def __init__(self, label: str, key: Sequence[Column], family: Sequence[str]) -> None:
        names = [column.name for column in key]
        if list(family) != names[: len(family)] or len(family) == len(names):
            raise ConfigurationError(
                f"{label} has the family {', '.join(family)} and the key {', '.join(names)}; expected the first "
                "columns of the key, but not all.",
                "Name the columns of the family first in key=, and again in family=.",
                argument="family",
            )
        for column in key:
            check_key_text(label, column)
        self._families = len(family)
        self._family_text = _text_of(key[: len(family)])
        self._key_text = _text_of(key[len(family) :])

    def address(self, key: Row) -> tuple[str | None, str]:
        """Return the family (None if it has none) and the key."""
        family = self._family_text(key[: self._families]) if self._families else None
        # All other texts are families, so a key without one can't collide with another record's.
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

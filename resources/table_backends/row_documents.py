"""Records as documents of a key-value table: their values in JSON, their keys, the marks that
conditions need, and the documents that writes make of what is stored. Nothing here asks a store.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.key_value.segment import ABSENT, ANYTHING, SegmentChange, StoredEntry
from dagster_adjunct.resources.table_backends import write_plan
from dagster_adjunct.resources.table_backends.columns import (
    OWN_PREFIX,
    Column,
    Kind,
    check_cases,
    check_key_text,
    check_not_reserved,
    decimal_writer,
    nested_form,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    InnerName,
    json_reader,
    json_writer,
    with_inside,
    write_json,
)
from dagster_adjunct.resources.table_backends.write_plan import (
    Applied,
    CheckedChanges,
    Entry,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    WritePlan,
)
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Problem, State

# The JSON form of values, for any reader:
#
#     string      text                        timestamp   "2013-07-01T00:00:00Z", a fraction only
#                                                         where there is one
#     integers    number                      date        "2013-07-01"
#     floats      number                      decimal     text with all its digits, "12.50" for
#                                                         decimal(10,2)
#     boolean     true, false                 binary      text, base64
#     json        as it is                    array<type> array of the above
#     nested      `nested_values.py`
#
# Equal values of all types but floats, json and decimals without a scale have equal texts: these
# may be keys.


def json_encoder(column: Column) -> Callable[[Any], Any]:
    """Return the function from a checked value to its JSON form."""
    tree = nested_form(column)
    if tree is not None:
        return json_writer(tree)
    if column.kind is Kind.LIST:
        assert column.element is not None
        write = json_encoder(column.element)
        return lambda values: [None if value is None else write(value) for value in values]
    if column.kind is Kind.DECIMAL:
        return decimal_writer(column)
    return _WRITE.get(column.kind, _as_it_is)


def json_decoder(column: Column) -> Callable[[Any], Any]:
    """Return the inverse of `json_encoder`'s function.

    It raises TypeError, ValueError or ArithmeticError for other values, because anybody may write
    to the table.
    """
    tree = nested_form(column)
    if tree is not None:
        return json_reader(tree)
    if column.kind is Kind.LIST:
        assert column.element is not None
        read = json_decoder(column.element)
        return lambda values: [
            None if value is None else read(value) for value in _require(list, values)
        ]
    return _READ.get(column.kind, _as_it_is)


def _as_it_is(value: Any) -> Any:
    """Return the value, which JSON holds unchanged."""
    return value


def _require(kind: type, value: Any) -> Any:
    """Return the value if it is of exactly this type; else raise TypeError."""
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


DELETED = f"{OWN_PREFIX}deleted"  # a document with it has only the marks of a deleted record
AT = f"{OWN_PREFIX}at"
NEWEST = f"{OWN_PREFIX}newest"
APPLIED = f"{OWN_PREFIX}applied"


Document = dict[str, Any]


class RowDocuments:
    """Converts records to documents and back. Errors name the table, the key and the value."""

    def __init__(self, codec: RowCodec, columns: Sequence[Column]) -> None:
        self.codec = codec
        self._label = codec.table
        check_not_reserved(codec.table, columns)
        self._write = {column.name: json_encoder(column) for column in columns}
        self._read = {column.name: json_decoder(column) for column in columns}

    def whole(self, record: Mapping[str, Any]) -> Document:
        """Return the document of a complete, checked record; null values are left out."""
        return {
            name: self._write[name](value) for name, value in record.items() if value is not None
        }

    def changed(self, old: Mapping[str, Any], changes: CheckedChanges) -> Document:
        """Return the document `old` with these changes, whose `set` already has the sums of what
        `add` adds.
        """
        columns: Mapping[str, Any] = changes.set
        if self.codec.has_inner:
            split = write_plan.split_inner(changes.set)
            columns = {name: changes.set[name] for name in split.columns}
            old = self._changed_inside(old, changes.set, split.paths)
        new = {**old, **self.whole(columns)}
        for name, value in columns.items():
            if value is None:
                new.pop(name, None)
        for name, values in changes.append.items():
            new[name] = [*(new.get(name) or ()), *self._write[name](values)]
        return new

    def _changed_inside(
        self,
        old: Mapping[str, Any],
        changes: Mapping[str, Any],
        inside: Mapping[str, Sequence[InnerName]],
    ) -> Document:
        """Return the document with changed values at paths inside columns, and all other fields
        kept. `inside` has the paths by column; `changes` has the new values by path.
        """
        new = dict(old)
        for column, paths in inside.items():
            for path in paths:
                value = changes[path]
                if value is not None:
                    value = json_encoder(self.codec.column(path))(value)
                new[column] = with_inside(new.get(column), path.names, value)
        return new

    def record(
        self, document: Mapping[str, Any], names: Sequence[str], key: object
    ) -> dict[str, Any]:
        """Return these columns of a document, None for missing values. Raises
        SchemaMismatchError.
        """
        record: dict[str, Any] = {}
        if not document.keys() >= self._read.keys():
            check_cases(self._label, key, document, self._read)
        for name in names:
            value = document.get(name)
            try:
                record[name] = None if value is None else self._read[name](value)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise errors.SchemaMismatchError(
                    f"{self._label}: the record of key {key!r} has {value!r} in {name!r}, which is"
                    " of another type.",
                    "Correct the record, or the declared columns.",
                    column=name,
                ) from error
        return record

    def from_bytes(self, stored: bytes, key: object) -> Document:
        """Return the document in these stored bytes. Raises SchemaMismatchError unless they are
        a JSON object.
        """
        try:
            document = json.loads(stored)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            problem = (
                f"{self._label} has {stored[:60]!r} under the key {key!r}; expected a record as a"
                " JSON object."
            )
            step = "Remove it, or read the table with its own serializers."
            raise errors.SchemaMismatchError(problem, step, table=self._label)
        return document


def applied_in(codec: RowCodec, newest_by: str | None, document: Mapping[str, Any]) -> Applied:
    """Return what the marks of a document say about the updates that were applied to its record.

    A newest time of another column than `newest_by` is ignored.
    """
    newest_texts = document.get(NEWEST) or (None, None, None)
    applied = write_plan.applied_from_texts(codec, newest_by, (*newest_texts, None))
    applied.positions = dict(document.get(APPLIED) or {})
    return applied


def marks_of(codec: RowCodec, newest_by: str | None, applied: Applied, at: float) -> Document:
    """Return the marks to store for `applied`; `at`, in seconds since 1970, says when, for
    `forget`.
    """
    *newest_texts, _ = write_plan.applied_to_texts(codec, newest_by, applied)
    marks: Document = {}
    if newest_texts[0] is not None:
        marks[NEWEST] = newest_texts
    if applied.positions:
        marks[APPLIED] = applied.positions
    return {**marks, AT: at}


# Planning of writes, as pure functions: for each key, which document to write, and which version
# the key must have.


@dataclass(frozen=True, slots=True)
class PlannedWrites:
    """The change of each key, still without its new version, the keys `begun` (those without a
    record, which get a default), and the problems of the other entries by their place in the
    request."""

    changes: Mapping[Row, SegmentChange]
    begun: Collection[Row]
    problems: Mapping[int, Problem]


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
    """Return the writes of an operation, given the stored entries of its keys (all of them if
    `needs_stored_rows`).

    `at` is the time of new marks, in seconds since 1970. `fitting` returns its argument, a value to
    write, or raises KeyValueTableError if that is too long.
    """
    codec = documents.codec
    read = write_plan.columns_to_read(codec, operation, entries)
    rows = _read_rows(documents, read, stored_entries)
    newest_by = operation.conditions.newest_by
    state = _stored_state(codec, operation, rows)
    plan = write_plan.plan_writes(codec, operation, rows.readable(entries), state)
    marks = {key: marks_of(codec, newest_by, new, at) for key, new in plan.applied.items()}
    # Keys without a stored entry have none, or their entries were not needed.
    if_missing = ABSENT if needs_stored_rows(operation) else ANYTHING
    written: dict[Row, SegmentChange] = {}
    too_large: dict[Row, Problem] = {}
    for key, new in _new_documents(documents, plan, rows.documents, marks):
        stored_entry = stored_entries.get(key)
        expected = if_missing if stored_entry is None else stored_entry.version
        if new is None and expected is ABSENT:
            continue  # there is nothing to remove
        try:
            stored = _encode(new, fitting)
        except errors.KeyValueTableError as error:
            too_large[key] = Problem(State.REFUSED, error)
        else:
            written[key] = SegmentChange(table_keys[key], stored, b"", expected)
    problems = {entry.place: too_large[entry.key] for entry in entries if entry.key in too_large}
    # What a put if absent begins is no default.
    begun: Collection[Row] = plan.begins if operation.kind is OperationKind.UPDATE else ()
    return PlannedWrites(written, begun, problems | plan.problems)


def _stored_state(codec: RowCodec, operation: Operation[Any], rows: _StoredRows) -> StoredState:
    """Return the stored records, with what was applied to them if the operation has conditions."""
    applied = {}
    if operation.conditions:
        for key, document in rows.documents.items():
            applied[key] = applied_in(codec, operation.conditions.newest_by, document)
    return StoredState(rows.records, applied)


def _encode(document: Document | None, fitting: Callable[[bytes], bytes]) -> bytes | None:
    """Return a document as bytes to store; None for the removal of an entry."""
    if document is None:
        return None
    return fitting(write_json(document).encode())


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """By key: documents, including those of deleted records; records; and problems of entries
    that can't be read.
    """

    documents: dict[Row, Document] = field(default_factory=dict)
    records: dict[Row, dict[str, Any]] = field(default_factory=dict)
    unreadable: dict[Row, Problem] = field(default_factory=dict)

    def readable(self, entries: Sequence[Entry]) -> ValidEntries:
        """Return the request's entries whose stored records can be read, and the problems of its
        other entries.
        """
        valid = ValidEntries([entry for entry in entries if entry.key not in self.unreadable], {})
        for entry in entries:
            if entry.key in self.unreadable:
                valid.problems[entry.place] = self.unreadable[entry.key]
        return valid


def _read_rows(
    documents: RowDocuments, names: Sequence[str], stored_entries: Mapping[Row, StoredEntry | None]
) -> _StoredRows:
    """Return the documents of the stored entries, and the columns `names` of their records."""
    rows = _StoredRows()
    for key, entry in stored_entries.items():
        if entry is None:
            continue
        try:
            document = documents.from_bytes(entry.value or b"", key)
            if DELETED not in document:
                rows.records[key] = documents.record(document, names, key)
            rows.documents[key] = document
        except errors.SchemaMismatchError as error:
            rows.unreadable[key] = Problem(State.REFUSED, error)
    return rows


def _new_documents(
    documents: RowDocuments,
    plan: WritePlan,
    stored: Mapping[Row, Document],
    marks: Mapping[Row, Document],
) -> Iterator[tuple[Row, Document | None]]:
    """Yield each key to write with its new document; None if the entry is removed."""

    def marks_after(key: Row) -> Document:
        return marks.get(key) or _select_marks(stored.get(key, {}))

    for key, record in {**plan.puts, **plan.begins}.items():
        yield key, {**documents.whole(record), **marks_after(key)}
    for key in plan.deletes:
        marks_kept = marks_after(key)
        yield key, {DELETED: True, **marks_kept} if marks_kept else None
    for key, changes in plan.changes.items():
        if changes.set or changes.append or key in marks:  # else nothing changes
            yield key, {**documents.changed(stored[key], changes), **marks.get(key, {})}
    # Late updates of deleted records are skipped, and noted.
    only_marked = marks.keys() - {*plan.puts, *plan.begins, *plan.deletes, *plan.changes}
    for key in only_marked:
        yield key, {**stored[key], **marks[key]}


def _select_marks(document: Mapping[str, Any]) -> Document:
    """Return the marks in a document."""
    return {name: document[name] for name in (NEWEST, APPLIED, AT) if name in document}


# Family and key of a record in a key-value table:
#
#     no family      key     the text of the only key column, or a JSON array of all
#     with a family  family  the text of the first key column, or a JSON array of the first; key:
#                            the same of the rest
#
# The text of a string is the string; the text of any other value is its JSON without quotation
# marks. Families are not empty: a record whose first column is an empty string has none, and its
# key selects the partition.


class RecordAddress(NamedTuple):
    """The family (None: none) and the key under which a record is stored."""

    family: str | None
    key: str


class RowKeys:
    """Converts checked keys of records to families and keys; `family` are the first of the key's
    columns, or none.
    """

    def __init__(self, label: str, key: Sequence[Column], family: Sequence[str]) -> None:
        names = [column.name for column in key]
        if list(family) != names[: len(family)] or len(family) == len(names):
            raise errors.ConfigurationError(
                f"{label} has the family {', '.join(family)} and the key {', '.join(names)};"
                " expected the first columns of the key, but not all.",
                "Name the columns of the family first in key=, and again in family=.",
                argument="family",
            )
        for column in key:
            check_key_text(label, column)
        self._families = len(family)
        self._family_text = _text_of(key[: len(family)])
        self._key_text = _text_of(key[len(family) :])

    def address(self, key: Row) -> RecordAddress:
        """Return where the record of this key is stored."""
        family = None
        if self._families:
            family = self._family_text(key[: self._families])
        # The empty text is no family. All other texts are, so no two records have the same address.
        return RecordAddress(family or None, self._key_text(key[self._families :]))


def _text_of(columns: Sequence[Column]) -> Callable[[Row], str]:
    """Return the function from the values of these columns to their text in a family or key."""
    writers = [json_encoder(column) for column in columns]

    def values(row: Row) -> list[Any]:
        return [write(part) for write, part in zip(writers, row, strict=True)]

    if len(columns) > 1:
        return lambda row: write_json(values(row))

    def text(row: Row) -> str:
        (value,) = values(row)
        if isinstance(value, str):
            return value
        return write_json(value)

    return text

"""What a request of writes comes to in a key-value table: for each key the document to write, and what it depends on.

All of it is pure. What is decided over documents that were read holds only while these are there: each change expects
the version that was seen, and after a conflict all is decided again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.backends.rows import Row, RowCodec
from dagster_adjunct.resources.backends.write_plan import Checked, Found, Plan, columns_to_read, must_look, planned
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.key_value.table_segment import ABSENT, ANYTHING, Expected, StoredEntry
from dagster_adjunct.resources.key_value_errors import KeyValueTableError
from dagster_adjunct.resources.key_value_rows.row_documents import (
    DELETED,
    Document,
    RowDocuments,
    applied_in,
    is_deleted,
    marks_in,
    marks_of,
)
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Problem, State


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


def looks(operation: Operation[Any]) -> bool:
    """Whether the writes depend on what is there, or have to leave some of it."""
    return must_look(operation) or operation.conditions.keeps_marks


def decided(
    codec: RowCodec,
    documents: RowDocuments,
    operation: Operation[Any],
    asked: Checked,
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
    plan = planned(codec, operation, Checked(fit, {}), Found(seen.records, applied))
    marks = {key: marks_of(codec, newest_by, applied_to_key, at) for key, applied_to_key in plan.applied.items()}
    looked, begins = looks(operation), operation.kind is OperationKind.UPDATE
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
    documents: RowDocuments, plan: Plan, seen: _Seen, marks: Mapping[Row, Document]
) -> Iterator[tuple[Row, Document | None]]:
    """Yield each key with its new document; None where nothing of it stays."""

    def kept(key: Row) -> Document:
        return marks.get(key) or marks_in(seen.documents.get(key, {}))

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

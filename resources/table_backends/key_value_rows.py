"""`KeyValueRows`: records in a key-value table, for remote tables.

A record is one entry, whose value is the record as a JSON document. Its key columns make the
entry's key and, optionally, its family. Nothing is locked: a write that depends on a record is
decided from the version that was read, requires this version, and is decided again after a
conflict.

    {"seats":149,"tail":"N1",
     "adjunct_applied":{"lake.flights.3":"0000000000:00000000000000000017:000000"}}
    {"adjunct_deleted":true,"adjunct_at":1372636800.0,
     "adjunct_newest":["at","2013-07-01T00:00:00Z","lake.flights.3 …"]}

A document has the record's columns, including those of its key and without nulls, and the marks
that conditions need (`Applied`). A deleted record whose marks are kept is a document without
columns. Updates keep columns that are not declared, which another release may have written.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.key_value import run_count, segment
from dagster_adjunct.resources.key_value.fencing import TableFences
from dagster_adjunct.resources.key_value.manager import (
    KeyValueTableManager,
    TableInfo,
    ensure_table,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    KeyValueTableConfiguration,
    ReplyLostError,
    SegmentBackend,
    SegmentChange,
    StoredEntry,
)
from dagster_adjunct.resources.key_value.serializers import BytesSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import OpenTable
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake, open_lake
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
from dagster_adjunct.resources.table_backends.store import StoreTable
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
from dagster_adjunct.resources.tables.functions import TableUse, reduce_function
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)
from dagster_adjunct.resources.tables.presence import NO_TABLE, Presence
from dagster_adjunct.resources.validation import validated

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
    return value


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


# A document with DELETED has only the marks of a deleted record.
DELETED, AT, NEWEST, APPLIED = (
    OWN_PREFIX + name for name in ("deleted", "at", "newest", "applied")
)

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
            names, inside = write_plan.split_inner(changes.set)
            columns = {name: changes.set[name] for name in names}
            old = self._changed_inside(old, changes.set, inside)
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
        """Return the document with other values inside columns; their other fields are kept."""
        new = dict(old)
        for root, paths in inside.items():
            for path in paths:
                value = changes[path]
                if value is not None:
                    value = json_encoder(self.codec.column(path))(value)
                new[root] = with_inside(new.get(root), path.names, value)
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
    """Return what the marks of a document say about the updates that were applied to its record."""
    newest = document.get(NEWEST) or (None, None, None)
    applied = write_plan.applied_from_texts(codec, newest_by, (*newest, None))
    applied.positions = dict(document.get(APPLIED) or {})
    return applied


def marks_of(codec: RowCodec, newest_by: str | None, applied: Applied, at: float) -> Document:
    """Return the marks to store for `applied`; `at`, in seconds since 1970, says when, for
    `forget`.
    """
    *newest, _ = write_plan.applied_to_texts(codec, newest_by, applied)
    marks: Document = {NEWEST: newest} if newest[0] is not None else {}
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
    marked = rows.documents if operation.conditions else {}
    applied = {key: applied_in(codec, newest_by, d) for key, d in marked.items()}
    state = StoredState(rows.records, applied)
    plan = write_plan.plan_writes(codec, operation, rows.readable(entries), state)
    marks = {key: marks_of(codec, newest_by, new, at) for key, new in plan.applied.items()}
    if_missing = ABSENT if needs_stored_rows(operation) else ANYTHING
    written: dict[Row, SegmentChange] = {}
    too_large: dict[Row, Problem] = {}
    for key, new in _new_documents(documents, plan, rows.documents, marks):
        found = stored_entries.get(key)
        expected = if_missing if found is None else found.version
        if new is None and expected is ABSENT:
            continue  # there is nothing to remove
        try:
            stored = _encode(new, fitting)
        except errors.KeyValueTableError as error:
            too_large[key] = Problem(State.REFUSED, error)
        else:
            written[key] = SegmentChange(table_keys[key], stored, b"", expected)
    problems = {entry.place: too_large[entry.key] for entry in entries if entry.key in too_large}
    begun: Collection[Row] = plan.begins if operation.kind is OperationKind.UPDATE else ()
    return PlannedWrites(written, begun, problems | plan.problems)


def _encode(document: Document | None, fitting: Callable[[bytes], bytes]) -> bytes | None:
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
        """Return those of the entries whose stored ones can be read, and problems of the others."""
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
    seen: Mapping[Row, Document],
    marks: Mapping[Row, Document],
) -> Iterator[tuple[Row, Document | None]]:
    """Yield each key to write with its new document; None if the entry is removed."""

    def kept(key: Row) -> Document:
        return marks.get(key) or _select_marks(seen.get(key, {}))

    for key, record in {**plan.puts, **plan.begins}.items():
        yield key, {**documents.whole(record), **kept(key)}
    for key in plan.deletes:
        beside = kept(key)
        yield key, {DELETED: True, **beside} if beside else None
    for key, changes in plan.changes.items():
        if changes.set or changes.append or key in marks:
            yield key, {**documents.changed(seen[key], changes), **marks.get(key, {})}
    for key in marks.keys() - {*plan.puts, *plan.begins, *plan.deletes, *plan.changes}:
        yield key, {**seen[key], **marks[key]}


def _select_marks(document: Mapping[str, Any]) -> Document:
    return {name: document[name] for name in (NEWEST, APPLIED, AT) if name in document}


# Family and key of a record in a key-value table:
#
#     no family      key     the text of the only key column, or a JSON array of all
#     with a family  family  the text of the first key column, or a JSON array of the first; key:
#                            the same of the rest
#
# The text of a string is itself, that of another value its JSON without quotation marks. Families
# are not empty: a record whose first column is an empty string has none, and its key selects the
# partition.


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

    def address(self, key: Row) -> tuple[str | None, str]:
        """Return the family (None if there is none) and the key under which the record of this
        key is stored.
        """
        family = None
        if self._families:
            family = self._family_text(key[: self._families])
        # All other texts are families, so a key without one can't collide with another record's.
        return family or None, self._key_text(key[self._families :])


def _text_of(columns: Sequence[Column]) -> Callable[[Row], str]:
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


Table = OpenTable[str, bytes]
_PAGE = 500  # entries


async def purge_marks(table: Table, before: float) -> int:
    """Remove the marks of updates applied before a time (seconds since 1970); return the number of
    entries changed.

    Entries of deleted records are removed. A record that is written meanwhile keeps its marks.
    """
    forgotten = 0
    for partition in range(table.partitions):
        left: KeyRange | None = segment.ALL_ENTRIES
        while left is not None:
            page = await table.segment(partition).page(left, _PAGE, values=True)
            left = left.after(page.keys[-1]) if page else None
            changes = [
                change
                for entry in page.entries()
                if (change := _without_marks(entry, before)) is not None
            ]
            for part in segment.split_into_requests(changes, table.backend.limits):
                forgotten += await _apply(table, partition, part)
    return forgotten


async def _apply(table: Table, partition: int, changes: Sequence[SegmentChange]) -> int:
    """Apply those changes whose keys still have the expected version; return how many they are."""
    while changes:
        try:
            # Requests without effect are not retried here, but by the remote table's own retry
            # policy.
            await table.apply(partition, *segment.with_versions(changes), retried=ReplyLostError)
            break
        except ConditionsFailed as late:
            changes = [change for place, change in enumerate(changes) if place not in late.found]
    return len(changes)


def _without_marks(entry: StoredEntry, before: float) -> SegmentChange | None:
    """Return the change that removes old marks, or the entry if its record is deleted; None
    without old marks.
    """
    try:
        document = json.loads(entry.value or b"")
    except (ValueError, RecursionError):
        return None
    at = None
    if isinstance(document, dict):
        at = document.get(AT)
    if not isinstance(at, int | float) or at >= before:
        return None
    if DELETED in document:
        return SegmentChange(entry.key, None, b"", entry.version)
    rest = {}
    for name, value in document.items():
        if name not in (AT, NEWEST, APPLIED):
            rest[name] = value
    return SegmentChange(entry.key, write_json(rest).encode(), b"", entry.version)


# seconds
_PAUSE = 0.005
_LONGEST_PAUSE = 0.5
_CONTESTED = 30.0  # seconds for which conflicting writes are retried


@dataclass(slots=True)
class OptimisticWrites:
    """Writes the entries of a request in one partition: `left` are not written yet, `problems`
    those of failed entries.

    A round reads, decides and writes. Each request to the segment is atomic, and requires of each
    key the version that was read. If another writer was first, it has no effect, and the next round
    reads and decides again. Keys whose version had changed are written alone from then on, so that
    they don't delay others.
    """

    rows: KeyValueRows
    table: Table
    fences: TableFences
    partition: int
    operation: Operation[Any]
    left: Sequence[Entry]
    table_keys: Mapping[Row, bytes]
    problems: dict[int, Problem] = field(default_factory=dict)
    defaults_put: int = 0
    _contested: set[Row] = field(default_factory=set)

    async def finish(self) -> None:
        """Write until each entry is done or has a problem."""
        if not await self._round():
            return
        rounds = AsyncRetrying(
            retry=retry_if_result(bool),
            wait=wait_random_exponential(multiplier=_PAUSE, max=_LONGEST_PAUSE),
            stop=stop_after_delay(_CONTESTED),
        )
        try:
            await rounds(self._round)
        except RetryError:
            keys = list(dict.fromkeys(entry.key for entry in self.left))
            label = self.rows._label
            contested = errors.TableUnavailableError(
                f"{label}: writes of {len(keys)} keys conflicted with others for {_CONTESTED:g} s;"
                f" the first key is {keys[0]!r}.",
                "It is retried. If that continues, have fewer writers of the same key.",
                table=label,
            )
            self._give_up(self.left, contested)

    async def _round(self) -> bool:
        """Read, decide and write once; return whether entries are left."""
        entries = self.left
        self.left = ()
        stored_entries: Mapping[Row, StoredEntry | None] = {}
        if needs_stored_rows(self.operation):
            keys = list(dict.fromkeys(entry.key for entry in entries))
            try:
                stored = await self.table.segment(self.partition).get(
                    [self.table_keys[key] for key in keys]
                )
            except errors.AdjunctError as error:
                self._give_up(entries, error)
                return False
            stored_entries = dict(zip(keys, stored, strict=True))
        decision = plan_documents(
            self.rows._documents,
            self.operation,
            entries,
            self.table_keys,
            stored_entries,
            time.time(),
            self.table.coder.value,
        )
        failed, lost = await self._write(decision)
        for entry in entries:
            if entry.key in failed:
                self.problems[entry.place] = failed[entry.key]
            elif entry.key not in lost and entry.place in decision.problems:
                self.problems[entry.place] = decision.problems[entry.place]
        self.left = [entry for entry in entries if entry.key in lost]
        return bool(self.left)

    async def _write(self, decision: PlannedWrites) -> tuple[dict[Row, Problem], set[Row]]:
        """Send the decided writes; return the problems of failed keys, and the keys of requests
        with a conflict.
        """
        failed: dict[Row, Problem] = {}
        lost: set[Row] = set()
        for keys, changes in self._requests(decision):
            try:
                await self._send(changes)
            except ConditionsFailed as conflict:
                self._contested |= {keys[place] for place in conflict.found if place < len(keys)}
                lost.update(keys)
            except errors.RunLeaseLostError:
                raise
            except errors.AdjunctError as error:
                # A single change can be too large.
                of_request = not isinstance(error, errors.BatchTooLargeError)
                problem = replace(self.rows._outcome(error), of_request=of_request)
                failed.update(dict.fromkeys(keys, problem))
            else:
                self.defaults_put += sum(key in decision.begun for key in keys)
        return failed, lost

    async def _send(self, changes: Sequence[SegmentChange]) -> None:
        """Send one request, together with the fence of the run that writes."""
        await self.operation.check_fence()
        fence = self.operation.fence
        guards = [] if fence is None else [await self.fences.guard(self.partition, fence)]
        sent, token = segment.with_versions([*changes, *guards])
        try:
            await self.table.apply(self.partition, sent, token, retried=ReplyLostError)
        except ConditionsFailed as conflict:
            if fence is not None and len(changes) in conflict.found:
                self.fences.forget(self.partition, fence)
            raise
        if fence is not None:
            self.fences.note(self.partition, fence, sent[-1])

    def _requests(self, decision: PlannedWrites) -> Iterator[tuple[list[Row], list[SegmentChange]]]:
        """Yield the keys of each request and their changes, without versions."""
        changes = decision.changes
        # Lists, because conflicts add keys to `_contested` while these requests are sent.
        alone = [key for key in changes if key in self._contested]
        together = [key for key in changes if key not in self._contested]
        keys = iter(together)
        limits = self.table.backend.limits
        if self.operation.fence is not None and limits.changes is not None:
            limits = replace(limits, changes=limits.changes - 1)
        for part in segment.split_into_requests([changes[key] for key in together], limits):
            yield [next(keys) for _ in part], part
        for key in alone:
            yield [key], [changes[key]]

    def _give_up(self, entries: Sequence[Entry], error: errors.AdjunctError) -> None:
        problem = replace(self.rows._outcome(error), of_request=True)
        self.problems.update({entry.place: problem for entry in entries})


_NOT_CREATED = (
    errors.LakeNotFoundError,
    errors.ScopeNotFoundError,
    errors.KeyValueTableNotFoundError,
)


@validated
class KeyValueRows(StoreTable):
    """Read and write function over the key-value table `table` of a scope of `lake`.

    `key` names one column or several (then keys are tuples), `columns` has each column's type.
    Records of one `family`, the first of the key's columns, are in one partition and can be
    iterated together. If the family is the empty text, the key selects the partition. With
    `create`, the first write creates a missing scope and table with this number of `partitions`, in
    the backend `stored_in` or the lake's default one. Reads create neither, and find no records.
    `to_dict` and pickles have names and descriptions, never a secret.

    Each key is changed by one conditional write. A request of many keys is one write per partition,
    within the limits of the backend. The table itself refuses writes of a run that has lost its
    lease. Marks of `newest_by` and `idempotent` are stored in the record's document, and outlive a
    deleted record; `forget` removes old ones.
    """

    counted_every: ClassVar[float] = 60.0  # a count may be a few requests to an object store

    def __init__(  # noqa: PLR0913
        self,
        lake: Lake | str,
        scope: str,
        table: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str],
        family: str | Sequence[str] = (),
        create: bool = False,
        partitions: int = 4,
        stored_in: SegmentBackend | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(lake, str) and ":" not in lake:  # an executor has another working directory
            lake = str(Path(lake).expanduser().absolute())
        self.lake = lake
        self.scope = scope
        self.table = table
        self._label = f"key-value table {scope}/{table}"
        self._declare(table, key, columns, create=create)
        self.family = (family,) if isinstance(family, str) else tuple(family)
        self.partitions = KeyValueTableConfiguration(partitions).partitions
        self.stored_in = stored_in
        self._codec = RowCodec(self._label, self.key, self._declared)
        self._documents = RowDocuments(self._codec, self._declared)
        self._keys = RowKeys(
            self._label, [self._codec.columns[name] for name in self.key], self.family
        )
        self._open: Table | None = None
        self._fences: TableFences | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"KeyValueRows({self._url!r}, {self.scope!r}, {self.table!r}, key={self.key})"

    @property
    def _url(self) -> str:
        if isinstance(self.lake, str):
            return self.lake
        return self.lake.url

    def to_dict(self) -> dict[str, Any]:
        """Return the declaration as plain values, without secrets."""
        described: Any = self.stored_in
        if isinstance(described, Mapping):
            described = dict(described)
        elif described is not None:
            described = segment.describe_backend(described)
        return {
            **super().to_dict(),
            "lake": self._url,
            "columns": self.column_types(),
            "stored_in": described,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {**KeyValueRows.to_dict(self), "lake": self.lake, "stored_in": self.stored_in}
        return reduce_function(self, KeyValueRows, settings)

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        # Other errors mean that nothing was written: a lost reply has been looked for, and is an
        # OutcomeUnknownError.
        if isinstance(error, errors.OutcomeUnknownError):
            return Problem(State.UNKNOWN, error)
        return super().problem_of(error, sent=sent and not isinstance(error, errors.AdjunctError))

    async def inspect(self) -> Presence:
        found = await self._find()
        if found is None:
            return NO_TABLE
        try:
            runs = await run_count.read_runs(await self._opened(make=False))
        except errors.KeyValueTableNotFoundError:
            self._open = None  # it was deleted, and may have been created again
            runs = None
        return Presence(exists=True, id=found.incarnation, runs=runs)

    async def begin_run(self, *, create: bool, marks: bool, fence: Fence | None = None) -> Presence:
        if create and self.create:
            await asyncio.to_thread(
                lambda: ensure_table(
                    self._manager(make=True), self.scope, self.table, self.partitions
                )
            )
        found = await self._find()
        if found is None:
            problem = f"{self._label} does not exist in {self._url}."
            step = "Correct scope and table, or declare it with create=True."
            raise errors.TableNotFoundError(problem, step, table=self.table)
        runs = await run_count.count_run(await self._opened(make=False))
        return Presence(exists=True, id=found.incarnation, runs=runs)

    async def _find(self) -> TableInfo | None:
        """Return what the lake says about the table; None if it does not exist or is being
        deleted.
        """

        def find() -> TableInfo | None:
            try:
                found = self._manager(make=False).describe(self.scope, self.table)
            except _NOT_CREATED:
                return None
            return None if found.state == "deleting" else found

        return await asyncio.to_thread(find)

    async def open(self) -> None:
        """Look up the table in the lake, unless the first write may have to create it. Raises
        the manager's errors.
        """
        if not self.create:
            await self._opened(make=False)

    async def check(self, use: TableUse) -> None:
        """Look up the table in the lake, and ask one of its segments."""
        try:
            opened = await self._opened(make=False)
        except _NOT_CREATED:
            if not self.create:
                raise
            return
        await opened.segment(0).get([b"adjunct-check"])

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        return write_plan.validate_entries(self._codec, operation).problems

    async def close(self) -> None:
        """Release what the running event loop uses, not what others use. A closed function may
        be opened again.
        """
        if self._open is not None:
            await self._open.close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        reads = operation.kind is OperationKind.GET
        try:
            opened = await self._opened(make=not reads and operation.may_create)
            return await (self._get if reads else self._write)(opened, operation)
        except errors.RunLeaseLostError:
            raise
        except errors.AdjunctError as error:
            if reads and self.create and isinstance(error, _NOT_CREATED):
                return Outcomes(len(operation), [None] * len(operation))
            return Outcomes.all(len(operation), replace(self.problem_of(error), of_request=True))

    async def announce(self, fence: Fence) -> None:
        try:
            opened = await self._opened(make=False)
        except _NOT_CREATED:
            if not self.create:
                raise
        else:
            await self._fences_of(opened).announce(fence)

    async def forget(self, older_than: float) -> int:
        """Remove the marks of updates applied more than `older_than` seconds ago, also of deleted
        records; return the number of keys.

        Messages that old are applied again if they are repeated. Reads the whole table.
        """
        return await purge_marks(await self._opened(make=self.create), time.time() - older_than)

    async def _get(self, opened: Table, operation: Operation[Any]) -> Outcomes:
        table_keys, parts, problems = self._place_entries(opened, operation)
        records: list[Any] = [None] * len(operation)

        async def read(number: int, entries: list[Entry]) -> None:
            try:
                stored_entries = await opened.segment(number).get(
                    [table_keys[entry.key] for entry in entries]
                )
            except errors.AdjunctError as error:
                failed = self._outcome(error)
                problems.update({entry.place: failed for entry in entries})
                return
            for entry, stored in zip(entries, stored_entries, strict=True):
                if stored is None:
                    continue
                try:
                    records[entry.place] = self._record(entry.key, stored.value or b"")
                except errors.AdjunctError as error:
                    problems[entry.place] = self._outcome(error)

        await asyncio.gather(*(read(number, entries) for number, entries in parts.items()))
        return Outcomes(len(operation), records, problems)

    async def _write(self, opened: Table, operation: Operation[Any]) -> Outcomes:
        table_keys, parts, problems = self._place_entries(opened, operation)
        fences = self._fences_of(opened)
        writes = [
            OptimisticWrites(self, opened, fences, number, operation, entries, table_keys)
            for number, entries in parts.items()
        ]
        ended = await asyncio.gather(*(write.finish() for write in writes), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        for write in writes:
            problems |= write.problems
        return Outcomes(
            len(operation),
            problems=problems,
            defaults_put=sum(write.defaults_put for write in writes),
        )

    def _place_entries(
        self, opened: Table, operation: Operation[Any]
    ) -> tuple[dict[Row, bytes], dict[int, list[Entry]], dict[int, Problem]]:
        """Return the table key of each valid key, valid entries by partition, and the problems
        of others by place.
        """
        valid = write_plan.validate_entries(self._codec, operation)
        problems = dict(valid.problems)
        places: dict[Row, tuple[int, bytes]] = {}
        parts: dict[int, list[Entry]] = {}
        for entry in valid.entries:
            try:
                if entry.key not in places:
                    places[entry.key] = opened.coder.place(*self._keys.address(entry.key))
                parts.setdefault(places[entry.key][0], []).append(entry)
            except errors.AdjunctError as error:
                is_read = operation.kind is OperationKind.GET
                if is_read and isinstance(error, errors.KeyTooLongError):
                    continue  # no record can have the key: none is found
                problems[entry.place] = self._outcome(error)
        return {key: stored for key, (_, stored) in places.items()}, parts, problems

    def _fences_of(self, opened: Table) -> TableFences:
        fences = self._fences
        if fences is None or fences.table is not opened:
            fences = self._fences = TableFences(opened)
        return fences

    def _record(self, key: Row, stored: bytes) -> dict[str, Any] | None:
        document = self._documents.from_bytes(stored, key)
        if DELETED in document:
            return None
        return self._documents.record(document, self._codec.names, key)

    def _outcome(self, error: errors.AdjunctError) -> Problem:
        """Return the problem of an entry whose request failed with this error."""
        if isinstance(error, errors.KeyValueTableNotFoundError):
            self._open = None  # the table may be created again
        return self.problem_of(error)

    def _manager(self, *, make: bool) -> KeyValueTableManager:
        lake = open_lake(self.lake, create=make) if isinstance(self.lake, str) else self.lake
        backend = self.stored_in
        if isinstance(backend, Mapping):
            backend = segment.backend_from(backend)
        return KeyValueTableManager(lake, backend)

    def _check_partitions(self, found: int) -> None:
        """Raise KeyValueTableExistsError if the table has another number than it would be created
        with.
        """
        if self.create and found != self.partitions:
            raise errors.KeyValueTableExistsError(
                f"{self._label} has {found} partitions, and is declared with {self.partitions}.",
                f"Declare it with partitions={found}, or under another name.",
                table=self._label,
            )

    async def _opened(self, *, make: bool) -> Table:
        if self._open is not None:
            return self._open
        return await asyncio.to_thread(self._open_now, make=make and self.create)

    def _open_now(self, *, make: bool) -> Table:
        with self._opening:
            opened = self._open
            if opened is None:
                manager = self._manager(make=make)
                if make:
                    ensure_table(manager, self.scope, self.table, self.partitions)
                key = TextSerializer()
                value = BytesSerializer()
                table = manager.open(self.scope, self.table, key=key, value=value)
                self._check_partitions(table.configuration.partitions)
                opened = OpenTable(table.id, table.configuration, table.backend, key, value)
                # A backend whose driver is missing fails here, not at a write.
                for number in range(opened.partitions):
                    opened.segment(number)
                self._open = opened
            return opened

"""`KeyValueRows`: records in a key-value table, as a remote table reads and writes them.

A record is one entry, whose value is the record as JSON (row_documents.py); its key columns make the entry's key, and
the first of them its family where that is wanted (row_keys.py). Nothing is locked: what depends on a record is decided
over the version that was read, written on the condition that this is still there, and decided anew where it is not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_adjunct.resources.backends.column_values import declared_column
from dagster_adjunct.resources.backends.rows import Key, Record, Row, RowCodec
from dagster_adjunct.resources.backends.write_plan import Entry, checked
from dagster_adjunct.resources.errors import AdjunctError, LakeNotFoundError
from dagster_adjunct.resources.key_value.backend_names import backend_from, describe_backend
from dagster_adjunct.resources.key_value.made_tables import make_table
from dagster_adjunct.resources.key_value.serializers import BytesSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager
from dagster_adjunct.resources.key_value_errors import (
    KeyValueTableNotFoundError,
    OutcomeUnknownError,
    ScopeNotFoundError,
)
from dagster_adjunct.resources.key_value_rows.forget_marks import forget_marks
from dagster_adjunct.resources.key_value_rows.open_table import OpenTable
from dagster_adjunct.resources.key_value_rows.optimistic_writes import OptimisticWrites
from dagster_adjunct.resources.key_value_rows.planned_documents import decided, looks
from dagster_adjunct.resources.key_value_rows.row_documents import RowDocuments, is_deleted
from dagster_adjunct.resources.key_value_rows.row_keys import RowKeys
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.key_columns import key_columns
from dagster_adjunct.resources.tables.layer import OF_A_STORE, Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.pickled_functions import as_declared
from dagster_adjunct.resources.tables.table_functions import StoreFunction

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
    from dagster_adjunct.resources.objects import Lake


_NOT_MADE = (LakeNotFoundError, ScopeNotFoundError, KeyValueTableNotFoundError)


class KeyValueRows(StoreFunction[Key, Record, Record | Changes]):
    """Read and write function over the key-value table `table` of a scope, whose metadata lies in `lake`.

    `key` names one column or several (then keys are tuples), `columns` gives each column's type. The records of one
    `family`, the first of the key's columns, lie in one partition and can be iterated together; those whose
    family is the empty text lie by their keys. `create` has the first write make scope and table where they are
    missing, of so many `partitions`, in the backend `stored_in` or, without one, where the lake keeps its tables;
    reading makes neither, and finds no records then. `to_dict` and pickles hold names and descriptions, never a secret.

    Each key is changed by one conditional write; a request of many keys is one write a partition, as far as the
    backend takes so much at once. Marks of `newest_by` and `idempotent` lie in the record's own document, and stay
    behind when it is deleted; `forget` removes what is old of them.
    """

    appends_to_json: ClassVar[bool] = False  # only to lists

    def __init__(
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
        self.lake, self.scope, self.table = lake, scope, table
        self.key = key_columns(table, key)
        self.columns = dict(columns)
        self.family = (family,) if isinstance(family, str) else tuple(family)
        self.create, self.partitions = create, KeyValueTableConfiguration(partitions).partitions
        self.stored_in = stored_in
        self._label = f"key-value table {scope}/{table}"
        declared = [declared_column(*pair) for pair in self.columns.items()]
        self._codec = RowCodec(self._label, self.key, declared)
        self._documents = RowDocuments(self._label, declared)
        self._keys = RowKeys(self._label, [self._codec.columns[name] for name in self.key], self.family)
        self._open: OpenTable | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"KeyValueRows({self._url!r}, {self.scope!r}, {self.table!r}, key={self.key})"

    @property
    def _url(self) -> str:
        return self.lake if isinstance(self.lake, str) else self.lake.url

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values; it holds no secret."""
        return {
            "lake": self._url,
            "scope": self.scope,
            "table": self.table,
            "key": list(self.key),
            "columns": dict(self.columns),
            "family": list(self.family),
            "create": self.create,
            "partitions": self.partitions,
            "stored_in": self._backend_description(),
        }

    def _backend_description(self) -> dict[str, Any] | None:
        if self.stored_in is None or isinstance(self.stored_in, Mapping):
            return None if self.stored_in is None else dict(self.stored_in)
        return describe_backend(self.stored_in)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {**KeyValueRows.to_dict(self), "lake": self.lake, "stored_in": self.stored_in}
        return as_declared(self, KeyValueRows, settings)

    @property
    def capabilities(self) -> Capabilities:
        return OF_A_STORE

    def column_types(self) -> dict[str, str]:
        return dict(self.columns)

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        # What passes did nothing: a reply that is lost for good is an error of its own.
        if isinstance(error, OutcomeUnknownError):
            return Problem(State.UNKNOWN, error)
        return super().problem_of(error, sent=sent and not isinstance(error, AdjunctError))

    async def open(self) -> None:
        """Connect; a table that is to be made is left to the first write."""
        if not self.create:
            await self._opened(make=False)

    async def close(self) -> None:
        """Give back what the running event loop holds; others keep theirs. A closed function may be opened again."""
        if self._open is not None:
            await self._open.close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        reads = operation.kind is OperationKind.GET
        try:
            opened = await self._opened(make=not reads)
            return await (self._get if reads else self._write)(opened, operation)
        except AdjunctError as error:
            if reads and self.create and isinstance(error, _NOT_MADE):
                return Outcomes(len(operation), [None] * len(operation))
            return Outcomes.all(len(operation), self.problem_of(error))

    async def forget(self, older_than: float) -> int:
        """Forget what was applied to keys more than these seconds ago, deleted records' too; return how many keys'.

        A message as old as that is from then on applied when it comes (again). Reads the whole table.
        """
        return await forget_marks(await self._opened(make=self.create), time.time() - older_than)

    async def _get(self, opened: OpenTable, operation: Operation[Any]) -> Outcomes:
        asked = checked(self._codec, operation)
        problems = dict(asked.problems)
        records: list[Any] = [None] * len(operation)

        async def read(number: int, entries: list[Entry]) -> None:
            try:
                stored_entries = await opened.partitions[number].get([places[entry.key][1] for entry in entries])
            except AdjunctError as error:
                problems.update(dict.fromkeys([entry.place for entry in entries], self._met(error)))
                return
            for entry, stored in zip(entries, stored_entries, strict=True):
                try:
                    records[entry.place] = None if stored is None else self._record(entry.key, stored.value or b"")
                except AdjunctError as error:
                    problems[entry.place] = self._met(error)

        places, unfit = self._places(opened, asked.entries)
        problems |= unfit
        parts = _by_partition(asked.entries, places)
        await asyncio.gather(*(read(number, entries) for number, entries in parts.items()))
        return Outcomes(len(operation), records, problems)

    async def _write(self, opened: OpenTable, operation: Operation[Any]) -> Outcomes:
        asked = checked(self._codec, operation)
        places, unfit = self._places(opened, asked.entries)
        writes = [
            OptimisticWrites(
                label=self._label,
                partition=opened.partitions[number],
                left=entries,
                table_keys={entry.key: places[entry.key][1] for entry in entries},
                looks=looks(operation),
                decide=lambda part, stored: decided(
                    self._codec, self._documents, operation, part, stored, time.time(), opened.checked
                ),
                problem_of=self._met,
            )
            for number, entries in _by_partition(asked.entries, places).items()
        ]
        await asyncio.gather(*(write.finish() for write in writes))
        problems = {**asked.problems, **unfit}
        for write in writes:
            problems |= write.problems
        return Outcomes(len(operation), problems=problems, defaults_put=sum(write.defaults_put for write in writes))

    def _places(
        self, opened: OpenTable, entries: Sequence[Entry]
    ) -> tuple[dict[Row, tuple[int, bytes]], dict[int, Problem]]:
        """Return the partition and table key of each key; and the entries whose key the table does not take."""
        places: dict[Row, tuple[int, bytes]] = {}
        unfit: dict[int, Problem] = {}
        for entry in entries:
            if entry.key not in places:
                try:
                    places[entry.key] = opened.place(*self._keys.address(entry.key))
                except AdjunctError as error:
                    unfit[entry.place] = self._met(error)
        return places, unfit

    def _record(self, key: Row, stored: bytes) -> dict[str, Any] | None:
        document = self._documents.from_bytes(stored, key)
        return None if is_deleted(document) else self._documents.record(document, self._codec.names, key)

    def _met(self, error: AdjunctError) -> Problem:
        """What an error of the store says of the entries that met it."""
        if isinstance(error, KeyValueTableNotFoundError):
            self._open = None  # the table may be created anew
        return self.problem_of(error)

    async def _opened(self, *, make: bool) -> OpenTable:
        opened = self._open
        return opened if opened is not None else await asyncio.to_thread(self._open_now, make=make and self.create)

    def _open_now(self, *, make: bool) -> OpenTable:
        # Makes the backends known by name. Here, because declaring a table should not import what they need.
        from dagster_adjunct.resources import key_value_backends  # noqa: F401

        with self._opening:
            opened = self._open
            if opened is None:
                lake = open_lake(self.lake, create=make) if isinstance(self.lake, str) else self.lake
                backend = backend_from(self.stored_in) if isinstance(self.stored_in, Mapping) else self.stored_in
                manager = KeyValueTableManager(lake, backend)
                if make:
                    make_table(manager, self.scope, self.table, self.partitions)
                table = manager.open(self.scope, self.table, key=TextSerializer(), value=BytesSerializer())
                opened = OpenTable(table.id, table.configuration, table.backend)
                self._open = opened
            return opened


def _by_partition(entries: Sequence[Entry], places: Mapping[Row, tuple[int, bytes]]) -> dict[int, list[Entry]]:
    parts: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.key in places:
            parts.setdefault(places[entry.key][0], []).append(entry)
    return parts

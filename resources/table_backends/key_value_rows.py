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
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import PositiveInt
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
    TableState,
    ensure_table,
)
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    KeyRange,
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
from dagster_adjunct.resources.table_backends.nested_values import write_json
from dagster_adjunct.resources.table_backends.row_documents import (
    APPLIED,
    AT,
    DELETED,
    NEWEST,
    PlannedWrites,
    RowDocuments,
    RowKeys,
    needs_stored_rows,
    plan_documents,
)
from dagster_adjunct.resources.table_backends.store import StoreTable
from dagster_adjunct.resources.table_backends.write_plan import Entry, Row, RowCodec
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
            left = left.after(page.keys[-1]) if page else None  # nothing follows an empty page
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
        except ConditionsFailed as failed:
            changes = [change for place, change in enumerate(changes) if place not in failed.found]
    return len(changes)


def _without_marks(entry: StoredEntry, before: float) -> SegmentChange | None:
    """Return the change that removes marks from before a time, or the whole entry if its record is
    deleted; None for an entry without such marks.
    """
    try:
        document = json.loads(entry.value or b"")
    except (ValueError, RecursionError):
        return None  # not written by `KeyValueRows`
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


# seconds between attempts
_PAUSE = 0.005
_LONGEST_PAUSE = 0.5
_CONTESTED = 30.0  # seconds for which conflicting writes are retried


class _SentKeys(NamedTuple):
    """Of the keys of one round: the problems of those that failed, and those whose request had a
    conflict, and no effect.
    """

    failed: dict[Row, Problem]
    conflicting: set[Row]


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
        are_left = await self._round()
        if not are_left:
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
        sent = await self._write(decision)
        for entry in entries:
            if entry.key in sent.failed:
                self.problems[entry.place] = sent.failed[entry.key]
            elif entry.key not in sent.conflicting and entry.place in decision.problems:
                self.problems[entry.place] = decision.problems[entry.place]
        self.left = [entry for entry in entries if entry.key in sent.conflicting]
        return bool(self.left)

    async def _write(self, decision: PlannedWrites) -> _SentKeys:
        """Send the decided writes, each request once; count the defaults that became records."""
        failed: dict[Row, Problem] = {}
        conflicting: set[Row] = set()
        for keys, changes in self._requests(decision):
            try:
                await self._send(changes)
            except ConditionsFailed as conflict:
                # The fence's guard, which follows the changes, has no key.
                self._contested.update(keys[place] for place in conflict.found if place < len(keys))
                conflicting.update(keys)
            except errors.RunLeaseLostError:
                raise
            except errors.AdjunctError as error:
                # A single change can be too large.
                of_request = not isinstance(error, errors.BatchTooLargeError)
                problem = replace(self.rows._entry_problem(error), of_request=of_request)
                failed.update(dict.fromkeys(keys, problem))
            else:
                self.defaults_put += sum(key in decision.begun for key in keys)
        return _SentKeys(failed, conflicting)

    async def _send(self, changes: Sequence[SegmentChange]) -> None:
        """Send one request, together with the fence of the run that writes."""
        await self.operation.check_fence()
        fence = self.operation.fence
        guards = [] if fence is None else [await self.fences.guard(self.partition, fence)]
        sent, token = segment.with_versions([*changes, *guards])
        try:
            await self.table.apply(self.partition, sent, token, retried=ReplyLostError)
        except ConditionsFailed as conflict:
            guard_failed = len(changes) in conflict.found
            if fence is not None and guard_failed:
                self.fences.forget(self.partition, fence)
            raise
        if fence is not None:
            self.fences.note(self.partition, fence, sent[-1])

    def _requests(self, decision: PlannedWrites) -> Iterator[tuple[list[Row], list[SegmentChange]]]:
        """Yield the keys of each request and their changes, without versions. Contested keys come
        last, each in a request of its own.
        """
        changes = decision.changes
        # Lists, because conflicts add keys to `_contested` while these requests are sent.
        alone = [key for key in changes if key in self._contested]
        together = [key for key in changes if key not in self._contested]
        keys = iter(together)
        limits = self.table.backend.limits
        if self.operation.fence is not None and limits.changes is not None:
            limits = replace(limits, changes=limits.changes - 1)  # `_send` adds a guard
        for part in segment.split_into_requests([changes[key] for key in together], limits):
            yield [next(keys) for _ in part], part
        for key in alone:
            yield [key], [changes[key]]

    def _give_up(self, entries: Sequence[Entry], error: errors.AdjunctError) -> None:
        """Give these entries the problem of a request that failed with this error."""
        problem = replace(self.rows._entry_problem(error), of_request=True)
        self.problems.update({entry.place: problem for entry in entries})


class _PlacedEntries(NamedTuple):
    """The valid entries of an operation by partition, the table key of each of their keys, and the
    problems of the other entries by place.
    """

    table_keys: dict[Row, bytes]
    by_partition: dict[int, list[Entry]]
    problems: dict[int, Problem]


_NOT_CREATED = (
    errors.LakeNotFoundError,
    errors.ScopeNotFoundError,
    errors.KeyValueTableNotFoundError,
)


@validated
class KeyValueRows(StoreTable):
    """Read and write function over the key-value table `table` of a scope of `lake`.

    `key` names one column or several (then keys are tuples), `columns` has each column's type.
    `family` names the first of the key's columns: records with the same values there are in one
    partition, and can be iterated together. A record with the empty text there has no family, as
    if none was named: its key selects the partition. With `create`, the first write creates a
    missing scope and table with this number of `partitions`, in the backend `stored_in` or the
    lake's default one. Reads create neither, and find no records. `to_dict` and pickles have names
    and descriptions, never a secret.

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
        partitions: PositiveInt = 4,
        stored_in: SegmentBackend | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(lake, str):
            is_folder = ":" not in lake  # else a URL
            if is_folder:  # an executor has another working directory
                lake = str(Path(lake).expanduser().absolute())
        self.lake = lake
        self.scope = scope
        self.table = table
        self._label = f"key-value table {scope}/{table}"
        self._declare(table, key, columns, create=create)
        self.family = (family,) if isinstance(family, str) else tuple(family)
        segment.check_partitions(partitions)
        self.partitions = partitions
        self.stored_in = stored_in
        self._codec = RowCodec(self._label, self.key, self._declared)
        self._documents = RowDocuments(self._codec, self._declared)
        self._keys = RowKeys(
            self._label, [self._codec.columns[name] for name in self.key], self.family
        )
        self._open: Table | None = None  # made at the first request that needs it (`_opened`)
        self._fences: TableFences | None = None  # of `_open`, made at the first write of a run
        self._opening = threading.Lock()  # held while one thread makes `_open`

    def __repr__(self) -> str:
        return f"KeyValueRows({self._url!r}, {self.scope!r}, {self.table!r}, key={self.key})"

    @property
    def _url(self) -> str:
        """The lake's URL, or its folder."""
        if isinstance(self.lake, str):
            return self.lake
        return self.lake.url

    def to_dict(self) -> dict[str, Any]:
        """Return the declaration as plain values, without secrets."""
        described: dict[str, Any] | None
        if self.stored_in is None:
            described = None
        elif isinstance(self.stored_in, Mapping):
            described = dict(self.stored_in)
        else:
            described = segment.describe_backend(self.stored_in)
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
        """Return whether the key-value table exists, its id and its count of runs; creates
        nothing.
        """
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
        """Create the key-value table if asked to, and count the run; return its presence. Raises
        TableNotFoundError.
        """
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
            if found.state == TableState.DELETING.value:
                return None
            return found

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
        """Read or write the entries; an error that no entry caused is the problem of all."""
        if not len(operation):
            return Outcomes(0)
        reads = operation.kind is OperationKind.GET
        try:
            opened = await self._opened(make=not reads and operation.may_create)
            return await (self._get if reads else self._write)(opened, operation)
        except errors.RunLeaseLostError:
            raise
        except errors.AdjunctError as error:
            may_be_created = self.create and operation.may_create
            if reads and may_be_created and isinstance(error, _NOT_CREATED):
                # The first write creates the table, so it has no records yet.
                return Outcomes(len(operation), [None] * len(operation))
            return Outcomes.all(len(operation), replace(self.problem_of(error), of_request=True))

    async def announce(self, fence: Fence) -> None:
        """Make the fence known in the key-value table, if it exists."""
        try:
            opened = await self._opened(make=False)
        except _NOT_CREATED:
            if not self.create:
                raise
        else:
            await self._fences_of(opened).announce(fence)

    async def forget(self, older_than: float) -> int:
        """Remove the marks of updates applied more than `older_than` seconds ago, also of deleted
        records; return the number of keys that had such marks.

        Messages that old are applied again if they are repeated. Reads the whole table.
        """
        return await purge_marks(await self._opened(make=self.create), time.time() - older_than)

    async def _get(self, opened: Table, operation: Operation[Any]) -> Outcomes:
        """Return the records of an operation's keys as its outcomes."""
        placed = self._place_entries(opened, operation)
        problems = placed.problems
        records: list[Any] = [None] * len(operation)

        async def read(number: int, entries: list[Entry]) -> None:
            """Add the records of a partition's entries, and their problems."""
            try:
                stored_entries = await opened.segment(number).get(
                    [placed.table_keys[entry.key] for entry in entries]
                )
            except errors.AdjunctError as error:
                failed = self._entry_problem(error)
                problems.update({entry.place: failed for entry in entries})
                return
            for entry, stored in zip(entries, stored_entries, strict=True):
                if stored is None:
                    continue
                try:
                    records[entry.place] = self._record(entry.key, stored.value or b"")
                except errors.AdjunctError as error:
                    problems[entry.place] = self._entry_problem(error)

        await asyncio.gather(*(read(*part) for part in placed.by_partition.items()))
        return Outcomes(len(operation), records, problems)

    async def _write(self, opened: Table, operation: Operation[Any]) -> Outcomes:
        """Write the partitions of an operation at the same time; the first error that is no problem
        of entries is raised once all have ended.
        """
        placed = self._place_entries(opened, operation)
        problems = placed.problems
        fences = self._fences_of(opened)
        writes = [
            OptimisticWrites(self, opened, fences, number, operation, entries, placed.table_keys)
            for number, entries in placed.by_partition.items()
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

    def _place_entries(self, opened: Table, operation: Operation[Any]) -> _PlacedEntries:
        """Return the valid entries by partition, and the problems of the others."""
        valid = write_plan.validate_entries(self._codec, operation)
        placed = _PlacedEntries({}, {}, dict(valid.problems))
        partitions: dict[Row, int] = {}
        for entry in valid.entries:
            key = entry.key
            try:
                if key not in partitions:
                    address = self._keys.address(key)
                    partition, table_key = opened.coder.locate(address.family, address.key)
                    partitions[key] = partition
                    placed.table_keys[key] = table_key
                placed.by_partition.setdefault(partitions[key], []).append(entry)
            except errors.AdjunctError as error:
                is_read = operation.kind is OperationKind.GET
                if is_read and isinstance(error, errors.KeyTooLongError):
                    continue  # no record can have the key: none is found
                placed.problems[entry.place] = self._entry_problem(error)
        return placed

    def _fences_of(self, opened: Table) -> TableFences:
        """Return the fences of the opened table, new ones if it was opened again."""
        fences = self._fences
        if fences is None or fences.table is not opened:
            fences = self._fences = TableFences(opened)
        return fences

    def _record(self, key: Row, stored: bytes) -> dict[str, Any] | None:
        """Return the record in stored bytes; None for a deleted one."""
        document = self._documents.from_bytes(stored, key)
        if DELETED in document:
            return None
        return self._documents.record(document, self._codec.names, key)

    def _entry_problem(self, error: errors.AdjunctError) -> Problem:
        """Return the problem of an entry whose request failed with this error.

        If the table is gone, the next request opens it again.
        """
        if isinstance(error, errors.KeyValueTableNotFoundError):
            self._open = None  # the table may be created again
        return self.problem_of(error)

    def _manager(self, *, make: bool) -> KeyValueTableManager:
        """Return the manager of the lake's tables; with `make`, a missing lake is created."""
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
        """Return the table, opened if need be; with `make`, a missing one is created if it is
        declared so.
        """
        if self._open is not None:
            return self._open
        return await asyncio.to_thread(self._open_now, make=make and self.create)

    def _open_now(self, *, make: bool) -> Table:
        """Open the table, unless another thread has; with `make`, a missing one is created. Raises
        KeyValueTableExistsError if it has another number of partitions than declared.
        """
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

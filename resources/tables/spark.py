"""Reads and writes remote tables from batches: `BulkReader` for lookups, `write_table` for DataFrames, `write_rows` for
records in memory."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.common import to_json_value
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value, unreadable_values
from dagster_adjunct.resources.spark.tasks import error_from_json, error_to_json, map_in_arrow
from dagster_adjunct.resources.tables import metrics as metrics_hooks
from dagster_adjunct.resources.tables.arrow import TOMBSTONE, UPDATE, Marking, Marks, Part, Shape, split_batch
from dagster_adjunct.resources.tables.cache import CacheLayer
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.metrics import Meter, TableMetrics
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateContract,
    first_cause,
    run_blocking,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable, error_from_outcomes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MIN_KEYS_PER_TASK = 5_000
"""How many keys a task asks for at least; so many are asked for in this process."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The records of the requested keys, None for missing ones, and the metrics of reading them."""

    records: Sequence[Any]
    metrics: TableMetrics


class BulkReader:
    """Reads a table, keeping its connection and, as its cache says, its records; `close` it.

    All requests use the table's batches, retries and rate, in tasks too.
    """

    def __init__(self, table: RemoteTable[Any, Any, Any], spark: Callable[[], SparkSession]) -> None:
        bare = copy.copy(table)
        bare.__setstate__(bare.__getstate__() | {"cache": None})  # the cache is kept here, above this process and tasks
        self._table, self._spark, self._here = bare, spark, BlockingTable(bare)
        self._meter = Meter()
        self._cache = (
            None if table.cache is None else CacheLayer(_UncachedTable(self), table.cache, self._meter, table.clock)
        )
        self._in_tasks = TableMetrics()
        self._tasks = 1

    def read(self, keys: Sequence[Hashable], args: tuple[object, ...], tasks: int) -> ReadResult:
        """Return the records of these distinct keys, using at most `tasks` Spark tasks.

        Raises the first error of an entry that the table has given up.
        """
        before, self._tasks = self._metrics(), tasks
        gets = Operation(OperationKind.GET, RowEntries(keys), args, key=self._key)
        outcomes = self.ask(gets) if self._cache is None else run_blocking(self._cache.send(gets))
        if outcomes.problems and (error := error_from_outcomes(self._table.name, gets, outcomes)) is not None:
            raise error
        records = outcomes.records or [None] * len(keys)
        present = len(records) - list(records).count(None)
        return ReadResult(records, replace(self._metrics() - before, reads=len(keys), found=present))

    def ask(self, gets: Operation[Any]) -> Outcomes:
        """Read from the table, bypassing the cache."""
        tasks = min(self._tasks, len(gets) // MIN_KEYS_PER_TASK)
        if tasks < 2:
            outcomes = self._here.send(gets)
            self._here.flush()
            return outcomes
        return self._ask_in_tasks(gets, tasks)

    def close(self) -> None:
        self._here.close()

    @property
    def _key(self) -> tuple[str, ...]:
        return self._table.key if len(self._table.key) > 1 else ()

    def _metrics(self) -> TableMetrics:
        return self._table.metrics + self._meter.metrics() + self._in_tasks

    def _ask_in_tasks(self, gets: Operation[Any], tasks: int) -> Outcomes:
        keys = gets.entries.keys
        size = -(-len(keys) // tasks)
        parts = [pickle.dumps(keys[at : at + size]) for at in range(0, len(keys), size)]
        numbered = list(enumerate(parts))
        frame = self._spark().createDataFrame(numbered, "part int, keys binary").repartitionById(len(parts), "part")
        ask = _reading_task(self._table, gets.args, self._key)
        answered: dict[Any, Any] = {}
        metrics, failed = TableMetrics(), None
        for row in frame.mapInArrow(ask, "answer binary").collect():
            records, counted, error = pickle.loads(row.answer)
            answered |= records
            metrics += counted
            failed = failed or error
        self._in_tasks += metrics
        metrics_hooks.report_metrics(self._table.name, metrics)
        if failed is not None:
            raise failed
        return Outcomes(len(keys), [answered[key] for key in keys])


@dataclass(frozen=True, slots=True)
class _UncachedTable:
    """The layer below the cache."""

    reader: BulkReader

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return self.reader.ask(operation)

    async def close(self) -> None:
        pass


def _reading_task(
    table: RemoteTable[Any, Any, Any], args: tuple[object, ...], key: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    async def ask(keys: Sequence[Hashable]) -> tuple[dict[Any, Any], TableMetrics, errors.AdjunctError | None]:
        # Errors are reported, not raised, since the table's retries are over.
        before, records, error = table.metrics, dict[Any, Any](), None
        gets = Operation(OperationKind.GET, RowEntries(keys), args, key=key)
        try:
            async with table:
                outcomes = await table.send(gets)
            error = error_from_outcomes(table.name, gets, outcomes) if outcomes.problems else None
            if error is None:
                records = dict(zip(keys, outcomes.records or (), strict=True))
        except errors.AdjunctError as raised:
            error = raised
        return records, table.metrics - before, _plain_error(error)

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for part in batch.column("keys").to_pylist():
                answer = pickle.dumps(asyncio.run(ask(pickle.loads(part))))
                yield pa.RecordBatch.from_pydict({"answer": pa.array([answer], pa.binary())})

    return read


def _plain_error(error: errors.AdjunctError | None) -> errors.AdjunctError | None:
    """Return the error without what a driver may lack: classes and values of the user's own."""
    return None if error is None else error_from_json(error_to_json(error))


MAX_BATCHES_IN_FLIGHT = 4
"""Batches of Spark's that are under way at a time."""
KEYS_SHOWN = 5
_END = object()


@dataclass(slots=True)
class TaskReport:
    """The result of a task's records: counts, and the failed ones."""

    failed: int = 0
    keys: list[str] = field(default_factory=list)  # the first of those that failed
    error: errors.AdjunctError | None = None
    unfit: bool = False  # whether the error is about its record's content
    letters: list[Any] = field(default_factory=list)
    null_keys: int = 0
    metrics: TableMetrics = field(default_factory=TableMetrics)

    def to_bytes(self) -> bytes:
        return pickle.dumps(replace(self, error=_plain_error(self.error)))

    def add(self, part: Part, outcomes: Outcomes, at_most: int | None) -> None:
        """Add a part's outcomes; up to `at_most` entries rejected for good, and one more, are kept as dead letters."""
        entries, kind = part.operation.entries, part.operation.kind.value
        for place, problem in sorted(outcomes.problems.items()):
            if problem.state is State.SKIPPED:  # its condition failed, which the table counts
                continue
            key, is_rejected = entries.keys[place], is_record_rejected(problem)
            if at_most is not None and is_rejected and len(self.letters) < at_most + 1:
                value = None if entries.values is None else entries.values[place]
                row = part.batch.slice(part.rows[place], 1)
                self.letters.append(_dead_letter(row, kind, key, value, problem.describe()))
                if len(self.letters) <= at_most:
                    continue
            self.failed += 1
            if len(self.keys) < KEYS_SHOWN:
                self.keys.append(repr(key))
            if self.error is None:
                self.error, self.unfit = _error_from_problem(problem), is_rejected


def _error_from_problem(problem: Problem) -> errors.AdjunctError:
    ours = None if problem.error is None else first_cause(problem.error, errors.AdjunctError)
    if ours is not None:
        return ours
    reason = f"{problem.describe()}."
    if problem.may_pass:
        return errors.TableUnavailableError(reason, "Check that the store can be reached, then run the batch again.")
    return errors.TableError(reason, "Correct the records or the table, then run the batch again.")


async def send_batches(
    batches: Iterator[Any],
    parts: Callable[[Any], Sequence[Part]],
    send: Callable[[Part], Any],
    done: Callable[[Part, Outcomes], bool],
) -> None:
    """Send all batches, at most `MAX_BATCHES_IN_FLIGHT` at a time; stop when `done` returns False.

    Operations begin in order, and the table keeps those of one key in the order of the calls.
    """
    loop = asyncio.get_running_loop()
    going: set[asyncio.Task[bool]] = set()
    useful = True

    async def write(parts: Sequence[Part]) -> bool:
        outcomes = await asyncio.gather(*(send(part) for part in parts))
        successes = [done(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
        return all(successes)

    try:
        while useful:
            batch = await loop.run_in_executor(None, next, batches, _END)
            if batch is _END:
                break
            if len(going) >= MAX_BATCHES_IN_FLIGHT:
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            finished = {task for task in going if task.done()}
            going -= finished
            # Batches after a failed one must not begin: see `send_unblocked`.
            useful = all(task.result() for task in finished)
            if useful:
                going.add(asyncio.create_task(write(parts(batch))))
                await asyncio.sleep(0)  # it takes its tickets before the next one
        await asyncio.gather(*going)
    finally:
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)


_PLACE = ("__partition", "__offset")
_POSITION = (*_PLACE, "__task", "__branch", "__ordinal")
_LETTER = (*_PLACE, "__timestamp", "__epoch")
Counters = dict[str, int]


@dataclass(frozen=True, slots=True)
class TableWrite:
    """How to write records: as updates with a contract, as whole records without one.

    `marking` is required if the table has conditions. With `dead_letters`, up to that many records that the table
    rejects for good are returned instead of failing the batch. `source` is the stream whose positions the records
    carry, for errors, which contain no values of `sensitive` records. `typed` and `remove` are as in `Shape`.
    """

    table: RemoteTable[Any, Any, Any]
    contract: UpdateContract | None
    on_null_key: Literal["fail", "skip"]
    tasks: int
    source: str = ""
    marking: Marking | None = None
    typed: bool = False
    remove: tuple[str, ...] = ()
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    sensitive: bool = False

    @property
    def shape(self) -> Shape:
        """How a batch of the records becomes operations."""
        conditions = Conditions(self.table.newest_by, self.table.idempotent)
        return Shape(self.table.key, self.contract, conditions, self.typed, self.remove, self.args)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write's counters, and the records that the table rejected for good, as dictionaries.

    `metrics` are those of all tasks.
    """

    counters: Counters
    letters: tuple[dict[str, Any], ...] = ()
    metrics: TableMetrics = field(default_factory=TableMetrics)


def write_table(df: DataFrame, write: TableWrite, *, exchange: bool, what: str) -> WriteResult:
    """Send every record of `df` to the table in one Spark job; return the summed counters of all tasks.

    With a contract `df` has the key's columns and the structs `update` and (optional) `default`; without one its
    columns are the record. A tombstone deletes. `exchange` brings the records of one key into one task, which sends
    them in source order.
    """
    check_record_columns(df.columns, write.table.name, write.table.key, updates=write.contract is not None, what=what)
    if exchange:
        df = df.repartition(write.tasks, *map(named_column, write.table.key))
    df, write = _sort_records(df, write)
    rows = map_in_arrow(
        df.drop(*_unsent_columns(df.columns, write)), _sending_task(write, what), "report binary"
    ).collect()
    return _sum_reports([pickle.loads(row.report) for row in rows], write, what)


def write_rows(rows: pa.Table, write: TableWrite, *, what: str) -> WriteResult:
    """Send every record of a table in memory as `write_table` does, from this process.

    Each record has a position of its own.
    """
    check_record_columns(
        rows.column_names, write.table.name, write.table.key, updates=write.contract is not None, what=what
    )
    marking = write.marking
    first = () if marking is None else (*marking.order, *write.table.key)
    names = [*dict.fromkeys((*first, *(name for name in _POSITION if name in rows.column_names)))]
    sent = rows.sort_by([(name, "ascending") for name in names])
    batches = sent.drop_columns(_unsent_columns(sent.column_names, write)).combine_chunks().to_batches()
    own = copy.copy(write.table)  # as a task has it: with connections and metrics of its own
    own.__setstate__(own.__getstate__())
    (report,) = _sending_task(replace(write, table=own), what)(iter(batches))
    return _sum_reports([pickle.loads(report.column(0)[0].as_py())], write, what)


def _unsent_columns(names: Sequence[str], write: TableWrite) -> list[str]:
    """Return the hidden columns that neither the table nor a dead letter needs."""
    kept = {TOMBSTONE, *_LETTER, *(() if write.marking is None else write.marking.order)}
    return [name for name in names if name.startswith("__") and name not in kept]


def _sum_reports(reports: Sequence[TaskReport], write: TableWrite, what: str) -> WriteResult:
    """Return the result of all tasks. Raises the first error, with the number of failed records in all of them."""
    total = sum((report.metrics for report in reports), TableMetrics())
    at_most = write.dead_letters
    metrics_hooks.report_metrics(write.table.name, total)
    failed = [report for report in reports if report.error is not None]
    letters = tuple(letter for report in reports for letter in report.letters)
    if at_most is not None and len(letters) > at_most and all(report.unfit for report in failed):
        # Each task keeps its first ones, so that these are the first of all, however many tasks there are.
        first = sorted(letters, key=lambda letter: (letter.get("partition", 0), letter.get("offset", 0)))[: at_most + 1]
        keys = ", ".join([*dict.fromkeys(letter["key"] for letter in first)][:KEYS_SHOWN])
        raise errors.TableError(
            f"{what}: table {write.table.name} rejects more than {at_most} records of this batch, the limit of its "
            f"dead letters; the first have the keys {keys}: {first[0]['problem']}",
            "Correct the records or the table, then run the batch again; or raise the limit with at_most=….",
            table=write.table.name,
        )
    if failed:
        raise _failure_error(failed, sum(min(len(report.letters), at_most or 0) for report in reports), write)
    counters = {"null_keys": sum(report.null_keys for report in reports), "dead_letters": len(letters)}
    return WriteResult({**total.counts(), **counters}, letters, total)


def _failure_error(failed: Sequence[TaskReport], letters: int, write: TableWrite) -> errors.AdjunctError:
    """Return the first task's error, with the number of failed records in all tasks and their first keys.

    `letters` are rejected records that would have become dead letters.
    """
    error, count = failed[0].error, sum(report.failed for report in failed)
    assert error is not None
    if not count:
        return error
    count += letters
    keys = list(dict.fromkeys(key for report in failed for key in report.keys))[:KEYS_SHOWN]
    shown = ", ".join(keys) + (", …" if count > len(keys) else "")
    problem = f"table {write.table.name} rejected {count} records, the first with the keys {shown}"
    return error.reworded(f"{problem}: {error.problem}", error.next_step)


def _sort_records(df: DataFrame, write: TableWrite) -> tuple[DataFrame, TableWrite]:
    """Return the records in source order; those of one message and key in a deterministic order."""
    marking, position = write.marking, [name for name in _POSITION if name in df.columns]
    if marking is None:
        return df.sortWithinPartitions(*position), write
    names = dict.fromkeys([*marking.order, *write.table.key, *position])
    others = [name for name in _orderable_columns(df) if name not in names]
    return df.sortWithinPartitions(*map(named_column, (*names, *others))), note_exactness(df, write)


def note_exactness(df: DataFrame, write: TableWrite) -> TableWrite:
    """Return how to write these records, with whether Spark computes the same ones in the same order each time."""
    if write.marking is None:
        return write
    plan = getattr(df, "_jdf", None)
    # A Connect client can't tell, and assumes so.
    deterministic = plan is None or bool(plan.queryExecution().analyzed().deterministic())
    shown = [name for name in df.columns if name[:2] != "__"]
    exact = deterministic and len(_orderable_columns(df)) == len(shown)
    return replace(write, marking=replace(write.marking, exact=exact))


def _orderable_columns(df: DataFrame) -> list[str]:
    kinds = {field.name: field.dataType.simpleString() for field in df.schema.fields if field.name[:2] != "__"}
    return [name for name, kind in kinds.items() if "map<" not in kind and "variant" not in kind]


def check_record_columns(columns: Sequence[str], table: str, key: Sequence[str], *, updates: bool, what: str) -> None:
    """Raise SchemaMismatchError if records lack the table's key, or are not updates; `what` is the operator."""
    needed = [*key, *([UPDATE] if updates else [])]
    missing = [name for name in needed if name not in columns]
    if missing:
        shown = ", ".join(name for name in columns if not name.startswith("__"))
        raise errors.SchemaMismatchError(
            f"{what}: records for table {table} have no {', '.join(map(repr, missing))}; they have {shown}.",
            "Turn the records into updates first: .map(*update_message(key=…, update=…, default=…))."
            if updates
            else f"Keep the table's key ({', '.join(key)}), or rename a column to it.",
            table=table,
            operator=what,
            column=missing[0],
        )


def _sending_task(write: TableWrite, what: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def send(batches: Iterator[Any]) -> Iterator[Any]:
        try:
            report = run_blocking(_Sending(write, what).send_all(batches))
        except errors.AdjunctError as error:
            # As a result, not as an exception: the table's retries are over, and Spark would retry the task
            # and wrap the error.
            report = TaskReport(error=error)
        if report.error is not None:
            for _ in batches:  # a worker whose input is not consumed is not reused
                pass
        yield pa.RecordBatch.from_pydict({"report": pa.array([report.to_bytes()], pa.binary())})

    return send


class _Sending:
    """Sends a task's records to the table."""

    def __init__(self, write: TableWrite, what: str) -> None:
        self._write, self._what, self._shape = write, what, write.shape
        self._marks = None if write.marking is None else Marks(write.marking, write.table.key, what)
        self._report = TaskReport()

    async def send_all(self, batches: Iterator[Any]) -> TaskReport:
        """Send all batches."""
        report = self._report

        def record(part: Part, outcomes: Outcomes) -> bool:
            report.add(part, outcomes, self._write.dead_letters)
            return report.error is None

        async with self._write.table as table:
            await send_batches(batches, self._parts, lambda part: table.send(part.operation), record)
            report.metrics = table.metrics
            return report

    def _parts(self, batch: Any) -> list[Part]:
        keyed, nulls = _drop_null_keys(batch, self._write, self._what)
        self._report.null_keys += nulls
        keyed = self._drop_unreadable(keyed)
        return split_batch(keyed, self._shape, self._marks, self._what) if keyed.num_rows else []

    def _drop_unreadable(self, batch: Any) -> Any:
        """Return the rows that Python can represent; the others are rejected before they are sent."""
        write, names = self._write, [name for name in batch.schema.names if not name.startswith("__")]
        found = first_unreadable(batch, names)
        if found is None:
            return batch
        if write.dead_letters is None:
            row = batch.slice(found.row, 1)
            at = _describe_place(row, write.source)
            place = f"the record of the key {_key_of(row, write)!r}{f' ({at})' if at else ''}"
            about = {"operator": self._what, "table": write.table.name}
            raise found.error(self._what, place, hidden=write.sensitive, **about)
        refused = np.zeros(batch.num_rows, bool)
        for name in names:
            refused[list(unreadable_values(batch.column(name)))] = True
        for place in np.nonzero(refused)[0][: write.dead_letters + 1 - len(self._report.letters)].tolist():
            self._report.letters.append(self._unreadable_letter(batch.slice(place, 1), names))
        return batch.filter(pa.array(~refused))

    def _unreadable_letter(self, row: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return the dead letter of a row that Python can't represent, as far as possible."""
        found, write = first_unreadable(row, names), self._write
        assert found is not None
        record: Any = {name: readable_value(row.column(name)[0]) for name in names}
        kind = "put" if write.contract is None else "update"
        if TOMBSTONE in row.schema.names and row.column(TOMBSTONE)[0].as_py():
            kind, record = "delete", None
        elif write.contract is not None:
            update = record[UPDATE] if isinstance(record[UPDATE], dict) else {}
            record = Changes(**update, remove=write.remove) if write.typed else update
        return _dead_letter(row, kind, _key_of(row, write), record, f"{found.problem()}.")


def _dead_letter(row: Any, kind: str, key: Any, value: Any, problem: str) -> dict[str, Any]:
    """Return the request of a rejected row as JSON-able values, with its position in the stream.

    Of an update it has the columns that it sets, or its changes under the names of `Changes`.
    """
    place = {name.strip("_"): row.column(name)[0].as_py() for name in _LETTER if name in row.schema.names}
    if isinstance(value, Changes):
        parts = {"set": value.set, "add": value.add, "append": value.append}
        removed = {"remove": list(value.remove)} if value.remove else {}
        value = {part: dict(columns) for part, columns in parts.items() if columns} | removed
    texts = {name: json.dumps(to_json_value(part)) for name, part in (("key", key), ("record", value))}
    content: dict[str, Any] = to_json_value({**place, "kind": kind, **texts, "problem": problem})
    return content


def _key_of(row: Any, write: TableWrite) -> Any:
    """Return the key of a row as tables take it: a value, or a tuple of several."""
    key = tuple(readable_value(row.column(name)[0]) for name in write.table.key)
    return key[0] if len(key) == 1 else key


def _drop_null_keys(batch: Any, write: TableWrite, what: str) -> tuple[Any, int]:
    """Return the rows without a null in their key, and how many others there are."""
    if not any(batch.column(name).null_count for name in write.table.key):
        return batch, 0
    valid = functools.reduce(pc.and_, (pc.is_valid(batch.column(name)) for name in write.table.key))
    kept = batch.filter(valid)
    nulls = batch.num_rows - kept.num_rows
    if nulls and write.on_null_key == "fail":
        first = _describe_place(batch.filter(pc.invert(valid)), write.source)
        raise errors.NullKeyError(
            f"{what}: {nulls} record(s) have no {' or no '.join(write.table.key)}, the key of table "
            f"{write.table.name}{f'; the first is {first}' if first else ''}.",
            'Filter them out, or skip and count them: send_to(…, on_null_key="skip").',
            table=write.table.name,
        )
    return kept, nulls


def _describe_place(lacking: Any, source: str) -> str:
    """Describe the position of the first of these records, as far as known."""
    if not set(_PLACE) <= set(lacking.schema.names):
        return ""
    partition, offset = (lacking.column(name)[0].as_py() for name in _PLACE)
    return f"{source or 'partition '}{'.' if source else ''}{partition} at offset {offset}"

"""Reads and writes remote tables for an application's batches: `BulkReader` for lookups,
`write_table` for records of a DataFrame, `write_rows` for records in memory."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.equality import comparable_sql
from dagster_adjunct.resources.schemas.schema import named_column, quote_name
from dagster_adjunct.resources.schemas.types import is_storable, type_from_spark
from dagster_adjunct.resources.schemas.values import (
    first_unreadable,
    readable_value,
    unreadable_values,
)
from dagster_adjunct.resources.spark.jvm import is_deterministic
from dagster_adjunct.resources.spark.tasks import error_from_json, error_to_json, map_in_arrow
from dagster_adjunct.resources.tables import metrics as metrics_hooks
from dagster_adjunct.resources.tables.arrow import (
    TOMBSTONE,
    UPDATE,
    Marking,
    Marks,
    Part,
    Shape,
    split_batch,
)
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
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable, error_from_outcomes
from dagster_adjunct.resources.threads import run_blocking, run_in_new_loop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MIN_KEYS_PER_TASK = 5_000
"""A Spark task requests at least so many keys. If there are not enough for two tasks, this
process requests them.
"""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The records of the requested keys, None for missing ones, and the metrics of reading them."""

    records: Sequence[Any]
    metrics: TableMetrics


class BulkReader:
    """Reads records of a table, from this process or from Spark tasks. Call `close` at the end.

    Between reads it keeps this process's connection, and records as the table's cache declares. The
    table's batches, retries and rate apply to all requests, in tasks too.
    """

    def __init__(
        self, table: RemoteTable[Any, Any, Any], spark: Callable[[], SparkSession]
    ) -> None:
        uncached = copy.copy(table)
        uncached.cache = None  # this reader has it, for all tasks
        self._table = uncached
        self._spark = spark
        self._here = BlockingTable(uncached)
        self._meter = Meter()
        self._cache = None
        if table.cache is not None:
            self._cache = CacheLayer(_UncachedTable(self), table.cache, self._meter, table.clock)
        self._task_metrics = TableMetrics()
        self._tasks = 1

    def read(self, keys: Sequence[Hashable], args: tuple[object, ...], tasks: int) -> ReadResult:
        """Return the records of `keys`, which are distinct, using at most `tasks` Spark tasks.

        `args` are the extra arguments of the table's function. If the table gives up a key, its
        error is raised.
        """
        before = self._metrics()
        self._tasks = tasks
        gets = Operation(OperationKind.GET, RowEntries(keys), args, key=self._key)
        outcomes = self.ask(gets) if self._cache is None else run_blocking(self._cache.send(gets))
        error = error_from_outcomes(self._table.name, gets, outcomes)
        if error is not None:
            raise error
        records = outcomes.records or [None] * len(keys)
        present = len(records) - list(records).count(None)
        spent = self._metrics() - before
        asked = replace(spent.records, reads=len(keys), found=present)
        return ReadResult(records, replace(spent, records=asked))

    def ask(self, gets: Operation[Any]) -> Outcomes:
        """Send the gets to the table without looking into the cache, from this process or in
        tasks.
        """
        tasks = min(self._tasks, len(gets) // MIN_KEYS_PER_TASK)
        if tasks < 2:
            outcomes = self._here.send(gets)
            self._here.flush()  # reports the table's metrics
            return outcomes
        return self._ask_in_tasks(gets, tasks)

    def close(self) -> None:
        """Close this process's connection."""
        self._here.close()

    @property
    def _key(self) -> tuple[str, ...]:
        """The key's columns, in the order that tuple keys have; () if keys are no tuples."""
        if len(self._table.key) > 1:
            return self._table.key
        return ()

    def _metrics(self) -> TableMetrics:
        """The metrics of all reads up to now, in this process and in tasks."""
        return self._table.metrics + self._meter.metrics() + self._task_metrics

    def _ask_in_tasks(self, gets: Operation[Any], tasks: int) -> Outcomes:
        """Send the gets in so many Spark tasks; raises the first error."""
        keys = gets.entries.keys
        size = -(-len(keys) // tasks)  # rounded up
        parts = [pickle.dumps(keys[at : at + size]) for at in range(0, len(keys), size)]
        numbered = list(enumerate(parts))
        frame = (
            self._spark()
            .createDataFrame(numbered, "part int, keys binary")
            .repartitionById(len(parts), "part")
        )
        ask = _reading_task(self._table, gets.args, self._key)
        answered: dict[Any, Any] = {}  # the records by key
        metrics = TableMetrics()
        failed = None
        for row in frame.mapInArrow(ask, "answer binary").collect():
            answer: _TaskAnswer = pickle.loads(row.answer)
            answered |= answer.records
            metrics += answer.metrics
            failed = failed or answer.error
        self._task_metrics += metrics
        metrics_hooks.report_metrics(self._table.name, metrics)
        if failed is not None:
            raise failed
        return Outcomes(len(keys), [answered[key] for key in keys])


@dataclass(frozen=True, slots=True)
class _UncachedTable:
    """The layer below the reader's cache: it asks the table."""

    reader: BulkReader

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return self.reader.ask(operation)

    async def close(self) -> None:
        pass


class _TaskAnswer(NamedTuple):
    """What a task returns: the records of its keys, or an error, and what reading has cost."""

    records: dict[Any, Any]
    metrics: TableMetrics
    error: errors.AdjunctError | None


def _reading_task(
    table: RemoteTable[Any, Any, Any], args: tuple[object, ...], key: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function of a task, which reads the records of the keys in each row."""

    async def ask(keys: Sequence[Hashable]) -> _TaskAnswer:
        """Return the records of some keys, or the error."""
        # An error is returned, not raised: the table has retried already, and Spark would retry the
        # task.
        before = table.metrics
        records = dict[Any, Any]()
        gets = Operation(OperationKind.GET, RowEntries(keys), args, key=key)
        try:
            async with table:
                outcomes = await table.send(gets)
            error = error_from_outcomes(table.name, gets, outcomes)
            if error is None:
                records = dict(zip(keys, outcomes.records or (), strict=True))
        except errors.AdjunctError as raised:
            error = raised
        return _TaskAnswer(records, table.metrics - before, _plain_error(error))

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the pickled answer for the keys in each row."""
        for batch in batches:
            for part in batch.column("keys").to_pylist():
                answer = pickle.dumps(run_in_new_loop(ask(pickle.loads(part))))
                yield pa.RecordBatch.from_pydict({"answer": pa.array([answer], pa.binary())})

    return read


def _plain_error(error: errors.AdjunctError | None) -> errors.AdjunctError | None:
    """Return the error without what the driver may be unable to unpickle: the user's own classes
    and values. None for None.
    """
    if error is None:
        return None
    return error_from_json(error_to_json(error))


MAX_BATCHES_IN_FLIGHT = 4
"""How many Arrow batches of a Spark task are being sent at a time."""
KEYS_SHOWN = 5  # in an error
_END = object()


@dataclass(slots=True)
class TaskReport:
    """What a task reports of the records that it sent: counters, failures and dead letters."""

    failed: int = 0
    keys: list[str] = field(default_factory=list)  # the first few of records that failed, as text
    error: errors.AdjunctError | None = None
    unfit: bool = False  # whether `error` rejects the content of its record
    letters: list[Any] = field(default_factory=list)
    null_keys: int = 0
    metrics: TableMetrics = field(default_factory=TableMetrics)

    def to_bytes(self) -> bytes:
        """Return the report as the driver gets it."""
        return pickle.dumps(replace(self, error=_plain_error(self.error)))

    def add(self, part: Part, outcomes: Outcomes, at_most: int | None) -> None:
        """Add a part's outcomes. `at_most`: how many dead letters the batch may have, None if
        rejected records are failures.

        A record rejected for its content becomes a dead letter. The first one after `at_most` is
        kept too, which tells the driver that there are too many; it counts as failed, as do those
        after it. All other problems are failures, except failed conditions.
        """
        for place, problem in sorted(outcomes.problems.items()):
            if problem.state is State.SKIPPED:
                continue  # its condition failed, which the table's metrics count
            is_rejected = is_record_rejected(problem)
            if is_rejected and at_most is not None and len(self.letters) <= at_most:
                self.letters.append(_rejected_letter(part, place, problem))
                is_allowed = len(self.letters) <= at_most
                if is_allowed:
                    continue
            self.failed += 1
            if len(self.keys) < KEYS_SHOWN:
                self.keys.append(repr(part.operation.entries.keys[place]))
            # A cause that concerns all records says more than the first record that is rejected.
            if self.error is None or (self.unfit and not is_rejected):
                self.error = _error_from_problem(problem)
                self.unfit = is_rejected


def _rejected_letter(part: Part, place: int, problem: Problem) -> dict[str, Any]:
    """Return the dead letter of an entry that was rejected for its content."""
    entries = part.operation.entries
    kind = part.operation.kind.value
    value = None
    if entries.values is not None:
        value = entries.values[place]
    if value is None:  # also of a put, in a compact batch
        kind = "delete"
    row = part.batch.slice(part.rows[place], 1)
    return _dead_letter(row, kind, entries.keys[place], value, problem.describe())


def _error_from_problem(problem: Problem) -> errors.AdjunctError:
    """Return the AdjunctError of an entry's problem: its own, or one that describes it."""
    if problem.error is not None:
        ours = first_cause(problem.error, errors.AdjunctError)
        if ours is not None:
            return ours
    reason = f"{problem.describe()}."
    if problem.may_pass:
        return errors.TableUnavailableError(
            reason, "Check that the store can be reached, then run the batch again."
        )
    return errors.TableError(reason, "Correct the records or the table, then run the batch again.")


async def send_batches(
    batches: Iterator[Any],
    parts: Callable[[Any], Sequence[Part]],
    send: Callable[[Part], Any],
    done: Callable[[Part, Outcomes], bool],
) -> None:
    """Send all batches, at most `MAX_BATCHES_IN_FLIGHT` at a time.

    `parts` splits a batch into operations, `send` sends one to the table, and `done` receives its
    outcomes. Once `done` has returned False, no further batch is sent. Calls of `send` begin in
    the order of the batches, and the table keeps this order for each key.
    """
    loop = asyncio.get_running_loop()
    going: set[asyncio.Task[bool]] = set()
    may_go_on = True

    async def write(batch_parts: Sequence[Part]) -> bool:
        outcomes = await asyncio.gather(*(send(part) for part in batch_parts))
        answered = zip(batch_parts, outcomes, strict=True)
        successes = [done(part, outcome) for part, outcome in answered]
        return all(successes)

    try:
        while may_go_on:
            batch = await loop.run_in_executor(None, next, batches, _END)
            if batch is _END:
                break
            if len(going) >= MAX_BATCHES_IN_FLIGHT:
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            finished = {task for task in going if task.done()}
            going -= finished
            # Batches after a failed one must not begin: see `send_unblocked`.
            may_go_on = all(task.result() for task in finished)
            if may_go_on:
                going.add(asyncio.create_task(write(parts(batch))))
                await asyncio.sleep(0)  # so that its calls are made before those of the next batch
        await asyncio.gather(*going)
    finally:
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)


_OFFSET = ("__partition", "__offset")
_POSITION = (*_OFFSET, "__task", "__branch", "__ordinal")
_LETTER = (*_OFFSET, "__timestamp", "__epoch")
Counters = dict[str, int]


@dataclass(frozen=True, slots=True)
class TableWrite:
    """How to write a batch's records to `table`: as updates if there is a `contract`, else as whole
    records.

    `marking` is required if the table has conditions. `tasks` is the number of tasks that
    `write_table` makes with `exchange`. `dead_letters` is how many records rejected for their
    content are returned as dead letters; with None, or if there are more, the batch fails. Errors
    name the records' positions in the stream `source`, and no values if they are `sensitive`.
    `typed`, `remove` and `args` are as in `Shape`.
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
        compact = self.table.batches.compact
        return Shape(
            self.table.key, self.contract, conditions, self.typed, self.remove, self.args, compact
        )


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write's counters, its dead letters as dictionaries, and the summed metrics of all tasks.

    The counters are those of the metrics, `null_keys` and `dead_letters`.
    """

    counters: Counters
    letters: tuple[dict[str, Any], ...] = ()
    metrics: TableMetrics = field(default_factory=TableMetrics)


def write_table(df: DataFrame, write: TableWrite, *, exchange: bool, what: str) -> WriteResult:
    """Send every record of `df` to the table, in one Spark job. Raises if a record fails; `what` is
    the operator.

    The columns are as in `Shape`; a tombstone deletes. With `exchange`, Spark first brings all
    records of one key into one task. Each task sends its records in source order
    (`_sorting_columns`).
    """
    check_record_columns(df.columns, write.table, updates=write.contract is not None, what=what)
    if exchange:
        df = df.repartition(write.tasks, *map(named_column, write.table.key))
    write = note_exactness(df, write)
    df = _sort_records(df, write)
    rows = map_in_arrow(
        df.drop(*_unsent_columns(df.columns, write)), _sending_task(write, what), "report binary"
    ).collect()
    return _sum_reports([pickle.loads(row.report) for row in rows], write, what)


def write_rows(rows: pa.Table, write: TableWrite, *, what: str) -> WriteResult:
    """Send every record of an Arrow table from this process, as `write_table` does in tasks.

    No two records may have the same position: nothing but `_sorting_columns` sorts them, while
    `write_table` sorts records of equal positions by all other columns.
    """
    names = rows.column_names
    check_record_columns(names, write.table, updates=write.contract is not None, what=what)
    sent = rows.sort_by([(name, "ascending") for name in _sorting_columns(names, write)])
    batches = sent.drop_columns(_unsent_columns(names, write)).combine_chunks().to_batches()
    table = copy.copy(write.table)  # as a task has it: with connections and metrics of its own
    (report,) = _sending_task(replace(write, table=table), what)(iter(batches))
    return _sum_reports([pickle.loads(report.column(0)[0].as_py())], write, what)


def _unsent_columns(names: Sequence[str], write: TableWrite) -> list[str]:
    """Return the internal columns (`__…`) that neither the table nor a dead letter needs."""
    needed = {TOMBSTONE, *_LETTER}
    if write.marking is not None:
        needed.update(write.marking.order)
    return [name for name in names if name.startswith("__") and name not in needed]


def _sum_reports(reports: Sequence[TaskReport], write: TableWrite, what: str) -> WriteResult:
    """Return the result of all tasks. If records failed, raises the first error, with their number
    in all tasks.

    Also raises if all tasks together have more dead letters than `write.dead_letters`.
    """
    total = TableMetrics()
    failed: list[TaskReport] = []
    letters: list[dict[str, Any]] = []
    counted = 0  # letters up to the limit of each task
    null_keys = 0
    for report in reports:
        total += report.metrics
        if report.error is not None:
            failed.append(report)
        letters += report.letters
        counted += min(len(report.letters), write.dead_letters or 0)
        null_keys += report.null_keys
    metrics_hooks.report_metrics(write.table.name, total)
    is_over = write.dead_letters is not None and len(letters) > write.dead_letters
    only_rejections = all(report.unfit for report in failed)
    if is_over and only_rejections:  # any other error matters more
        raise _too_many_letters_error(letters, write, what)
    if failed:
        raise _failure_error(failed, counted, write)
    counters = {**total.counts(), "null_keys": null_keys, "dead_letters": len(letters)}
    return WriteResult(counters, tuple(letters), total)


def _too_many_letters_error(
    letters: Sequence[dict[str, Any]], write: TableWrite, what: str
) -> errors.TableError:
    """Return the error for more dead letters than a batch may have."""
    # Each task keeps one more than the limit of its own first letters, so these are the first of
    # all tasks.
    first = sorted(letters, key=lambda each: (each.get("partition", 0), each.get("offset", 0)))
    del first[(write.dead_letters or 0) + 1 :]
    keys = list(dict.fromkeys(letter["key"] for letter in first))
    return errors.TableError(
        f"{what}: table {write.table.name} rejects more than {write.dead_letters} records of this"
        " batch, the limit of its dead letters; the first have the keys"
        f" {', '.join(keys[:KEYS_SHOWN])}: {first[0]['problem']}",
        "Correct the records or the table, then run the batch again; or raise the limit with"
        " at_most=….",
        table=write.table.name,
    )


def _failure_error(
    failed: Sequence[TaskReport], letters: int, write: TableWrite
) -> errors.AdjunctError:
    """Return the error of the failed tasks: one that concerns all records, if there is one, else
    that of the first rejected record.

    The error of a rejected record also says how many records failed in all tasks, with the first
    keys. `letters` is how many rejected records would have become dead letters if the batch had not
    failed.
    """
    first = next((report for report in failed if not report.unfit), failed[0])
    error = first.error
    count = sum(report.failed for report in failed)
    assert error is not None
    if not count:  # the error was raised before any record failed
        return error
    if not first.unfit:  # it concerns all records, of which some were not even sent
        lacks = f"Table {write.table.name} lacks {count} records of this batch."
        return error.reworded(f"{error.problem} {lacks}", error.next_step)
    count += letters
    keys = list(dict.fromkeys(key for report in failed for key in report.keys))[:KEYS_SHOWN]
    if count > len(keys):
        keys.append("…")
    problem = (
        f"table {write.table.name} rejected {count} records, the first with the keys"
        f" {', '.join(keys)}"
    )
    return error.reworded(f"{problem}: {error.problem}", error.next_step)


def _sorting_columns(names: Sequence[str], write: TableWrite) -> list[str]:
    """Return the columns by which a task's records are sorted, the most significant first.

    Without marks these are the columns of the records' positions (`_POSITION`), as far as they are
    among `names`. With marks, the message and then the key come first, as `Marking` requires.
    """
    position = [name for name in _POSITION if name in names]
    if write.marking is None:
        return position
    return list(dict.fromkeys([*write.marking.order, *write.table.key, *position]))


def _sort_records(df: DataFrame, write: TableWrite) -> DataFrame:
    """Return the records sorted within partitions by `_sorting_columns`, and with marks then by
    all other columns that users see.
    """
    names = _sorting_columns(df.columns, write)
    if write.marking is None:
        return df.sortWithinPartitions(*names)  # positions, whose names need no quotes
    others = [order for name, order in _orders_of_columns(df).items() if name not in names]
    return df.sortWithinPartitions(*map(named_column, names), *map(F.expr, others))


def note_exactness(df: DataFrame, write: TableWrite) -> TableWrite:
    """Return `write` with `Marking.exact` set: whether a repeated batch has the same records in the
    same order. Without a marking, `write` is returned unchanged.

    The records are the same if their expressions are deterministic. Their order is the same if they
    can be sorted by every column that users see.
    """
    if write.marking is None:
        return write
    orders = _orders_of_columns(df)
    sorts_by_all = all(name in orders for name in df.columns if not _is_hidden(name))
    exact = sorts_by_all and is_deterministic(df)
    return replace(write, marking=replace(write.marking, exact=exact))


def _is_hidden(name: str) -> bool:
    """Whether a column is one that Adjunct adds, which users don't see."""
    return name.startswith("__")


def _orders_of_columns(df: DataFrame) -> dict[str, str]:
    """Return, for each column that users see, the SQL expression that sorts records by it.

    Columns that can't be sorted are left out: variants, and maps whose entries can't be.
    """
    orders = {}
    for column in df.schema.fields:
        kind = type_from_spark(column.dataType)
        if _is_hidden(column.name) or "variant" in kind:
            continue
        order = quote_name(column.name)
        if "map<" not in kind:
            orders[column.name] = order
        elif is_storable(kind):
            orders[column.name] = comparable_sql(order, kind)
    return orders


def check_record_columns(
    columns: Sequence[str], table: RemoteTable[Any, Any, Any], *, updates: bool, what: str
) -> None:
    """Raise SchemaMismatchError if records lack the table's key, or the column `update` when
    `updates` are wanted. `what` is the operator.
    """
    needed = list(table.key)
    step = f"Keep the table's key ({', '.join(needed)}), or rename a column to it."
    if updates:
        needed.append(UPDATE)
        step = (
            "Turn the records into updates first: .map(*update_message(key=…, update=…,"
            " default=…))."
        )
    missing = [name for name in needed if name not in columns]
    if missing:
        shown = ", ".join(name for name in columns if not name.startswith("__"))
        problem = (
            f"{what}: records for table {table.name} have no {', '.join(map(repr, missing))}; they"
            f" have {shown}."
        )
        raise errors.SchemaMismatchError(
            problem, step, table=table.name, operator=what, column=missing[0]
        )


def _sending_task(write: TableWrite, what: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function of a task, which sends the records of its batches and returns its
    report.
    """

    def send(batches: Iterator[Any]) -> Iterator[Any]:
        """Send the batches; yield one row, the report."""
        try:
            report = run_blocking(_Sending(write, what).send_all(batches))
        except errors.AdjunctError as error:
            # Return the error, don't raise it: the table has retried already, and Spark would retry
            # the task and wrap the error.
            report = TaskReport(error=error)
        if report.error is not None:
            # Spark does not reuse a Python worker whose input was not read to its end.
            deque(batches, 0)
        yield pa.RecordBatch.from_pydict({"report": pa.array([report.to_bytes()], pa.binary())})

    return send


class _Sending:
    """Sends a task's records to the table."""

    def __init__(self, write: TableWrite, what: str) -> None:
        self._write = write
        self._what = what
        self._shape = write.shape
        self._marks = None if write.marking is None else Marks(write.marking, write.table.key, what)
        self._report = TaskReport()

    async def send_all(self, batches: Iterator[Any]) -> TaskReport:
        """Send all batches, up to the first that fails; return the report."""
        report = self._report

        def record(part: Part, outcomes: Outcomes) -> bool:
            report.add(part, outcomes, self._write.dead_letters)
            return report.error is None

        async with self._write.table as table:
            await send_batches(
                batches, self._parts, lambda part: table.send(part.operation), record
            )
            report.metrics = table.metrics
            return report

    def _parts(self, batch: Any) -> list[Part]:
        """Return the operations to send for a batch; records that can't be sent are counted or
        become dead letters.
        """
        keyed, nulls = _drop_null_keys(batch, self._write, self._what)
        self._report.null_keys += nulls
        keyed = self._drop_unreadable(keyed)
        if keyed.num_rows:
            return split_batch(keyed, self._shape, self._marks, self._what)
        return []

    def _drop_unreadable(self, batch: Any) -> Any:
        """Return the rows whose values Python can represent; dates after 9999, say, it can't.

        The other rows become dead letters. If the batch can't have any, the first such row is an
        error.
        """
        write = self._write
        names = [name for name in batch.schema.names if not _is_hidden(name)]
        found = first_unreadable(batch, names)
        if found is None:
            return batch
        if write.dead_letters is None:
            row = batch.slice(found.row, 1)
            where = f"the record of the key {_key_of(row, write)!r}"
            offset = _describe_offset(row, write.source)
            if offset:
                where += f" ({offset})"
            about = {"operator": self._what, "table": write.table.name}
            raise found.error(self._what, where, hidden=write.sensitive, **about)
        refused = np.zeros(batch.num_rows, bool)
        for name in names:
            refused[list(unreadable_values(batch.column(name)))] = True
        # One more than allowed, as in `TaskReport.add`.
        room = write.dead_letters + 1 - len(self._report.letters)
        for place in np.nonzero(refused)[0][:room].tolist():
            self._report.letters.append(self._unreadable_letter(batch.slice(place, 1), names))
        return batch.filter(pa.array(~refused))

    def _unreadable_letter(self, row: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return the dead letter of a row with values that Python can't represent, which
        `readable_value` replaces.
        """
        found = first_unreadable(row, names)
        write = self._write
        assert found is not None
        record: Any = {name: readable_value(row.column(name)[0]) for name in names}
        if TOMBSTONE in row.schema.names and row.column(TOMBSTONE)[0].as_py():
            kind = "delete"
            record = None
        elif write.contract is not None:
            kind = "update"
            record = record[UPDATE] if isinstance(record[UPDATE], dict) else {}
            if write.typed:
                record = Changes(**record, remove=write.remove)
        else:
            kind = "put"
        return _dead_letter(row, kind, _key_of(row, write), record, f"{found.problem()}.")


def _dead_letter(row: Any, kind: str, key: Any, value: Any, problem: str) -> dict[str, Any]:
    """Return the dead letter of a row, as JSON-able values: its position in the stream, the request
    and the problem.

    `key` and `record` in it are texts of JSON; `record` is that of the record or update. Of
    `Changes` it has the fields that are not empty, by name.
    """
    position = {}
    for name in _LETTER:
        if name in row.schema.names:
            position[name.strip("_")] = row.column(name)[0].as_py()
    if isinstance(value, Changes):
        parts: dict[str, Any] = {
            "set": dict(value.set),
            "add": dict(value.add),
            "append": dict(value.append),
            "remove": list(value.remove),
        }
        value = {part: columns for part, columns in parts.items() if columns}
    texts = {"key": json.dumps(to_json_value(key)), "record": json.dumps(to_json_value(value))}
    content: dict[str, Any] = to_json_value({**position, "kind": kind, **texts, "problem": problem})
    return content


def _key_of(row: Any, write: TableWrite) -> Any:
    """Return the key of a row, a batch of one record, as tables take it: a value, or a tuple for a
    key of several columns.
    """
    key = tuple(readable_value(row.column(name)[0]) for name in write.table.key)
    if len(key) == 1:
        return key[0]
    return key


def _drop_null_keys(batch: Any, write: TableWrite, what: str) -> tuple[Any, int]:
    """Return the rows without a null in their key, and how many were dropped.

    Raises NullKeyError for a dropped row if `on_null_key` is "fail".
    """
    if not any(batch.column(name).null_count for name in write.table.key):
        return batch, 0
    valid = functools.reduce(pc.and_, (pc.is_valid(batch.column(name)) for name in write.table.key))
    keyed = batch.filter(valid)
    nulls = batch.num_rows - keyed.num_rows
    if write.on_null_key == "fail":
        first = _describe_offset(batch.filter(pc.invert(valid)), write.source)
        first_shown = f"; the first is {first}" if first else ""
        raise errors.NullKeyError(
            f"{what}: {nulls} record(s) have no {' or no '.join(write.table.key)}, the key of table"
            f" {write.table.name}{first_shown}.",
            'Filter them out, or skip and count them: send_to(…, on_null_key="skip").',
            table=write.table.name,
        )
    return keyed, nulls


def _describe_offset(records: Any, source: str) -> str:
    """Return partition and offset of the first record as text, with the stream `source` if that is
    known; "" if the records do not have these columns.
    """
    if not set(_OFFSET) <= set(records.schema.names):
        return ""
    partition, offset = (records.column(name)[0].as_py() for name in _OFFSET)
    if source:
        described = f"{source}.{partition}"
    else:
        described = f"partition {partition}"
    return f"{described} at offset {offset}"

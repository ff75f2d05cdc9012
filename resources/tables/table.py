"""`RemoteTable`: a table in another store, accessed through a function and the layers above it;
`BlockingTable` for threads.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import PositiveInt, SkipValidation

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.batching import BatchLayer, BatchProvider
from dagster_adjunct.resources.tables.cache import Cache, CacheLayer
from dagster_adjunct.resources.tables.function_layer import FunctionLayer
from dagster_adjunct.resources.tables.functions import TableReadFunction, TableWriteFunction
from dagster_adjunct.resources.tables.metrics import (
    Meter,
    TableMetrics,
    has_metrics_hooks,
    report_metrics,
)
from dagster_adjunct.resources.tables.operation import (
    DIRECT,
    Changes,
    Clock,
    Conditions,
    Entries,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    SystemClock,
    UpdateContract,
    UpdateMessage,
    key_columns,
)
from dagster_adjunct.resources.tables.rate import CreditSource, RateLayer, RateLimit
from dagster_adjunct.resources.tables.retry import AttemptLayer, RetryLayer, RetryPolicy
from dagster_adjunct.resources.tables.update_contract import (
    UpdateContractLayer,
    explain_missing_records,
)
from dagster_adjunct.resources.threads import LoopThread
from dagster_adjunct.resources.validation import validated_methods

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")


@validated_methods
class BlockingTable(Generic[K, V, U]):
    """The methods of a `RemoteTable` for plain Python: each blocks until it is done.

    They run on an event loop in a thread of its own, so they can be called from any thread, also
    from one whose event loop is running (and is blocked meanwhile). Use it in a `with` block, or
    `close()` it; arguments, results and errors are those of `RemoteTable`.
    """

    def __init__(self, table: RemoteTable[K, V, U]) -> None:
        self.table = table
        self._thread = LoopThread(f"table-{table.name}")

    def __enter__(self) -> BlockingTable[K, V, U]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def metrics(self) -> TableMetrics:
        """The table's metrics up to now."""
        return self.table.metrics

    def send(self, operation: Operation[K]) -> Outcomes:
        return self._thread.run(self.table.send(operation))

    def flush(self) -> None:
        self._thread.run(self.table.flush())

    def get(self, key: K, *args: object) -> V | None:
        return self._thread.run(self.table.get(key, *args))

    def get_all(self, keys: Iterable[K], *args: object) -> dict[K, V]:
        return self._thread.run(self.table.get_all(keys, *args))

    def put(self, key: K, value: V | None, *args: object) -> None:
        self._thread.run(self.table.put(key, value, *args))

    def put_all(
        self, entries: SkipValidation[Iterable[tuple[K, V | None]] | ArrowFrame], *args: object
    ) -> None:
        self._thread.run(self.table.put_all(entries, *args))

    def delete(self, key: K, *args: object, newest: object = None) -> None:
        self._thread.run(self.table.delete(key, *args, newest=newest))

    def delete_all(self, keys: Iterable[K], *args: object, newest: object = None) -> None:
        self._thread.run(self.table.delete_all(keys, *args, newest=newest))

    def update(self, key: K, update: U, *args: object) -> None:
        self._thread.run(self.table.update(key, update, *args))

    def update_all(
        self, entries: SkipValidation[Iterable[tuple[K, U]] | ArrowFrame], *args: object
    ) -> None:
        self._thread.run(self.table.update_all(entries, *args))

    def update_messages(
        self,
        entries: SkipValidation[Iterable[tuple[K, UpdateMessage[U, V]]]],
        contract: UpdateContract = UpdateContract.UPDATE_ONLY,
        *args: object,
    ) -> None:
        self._thread.run(self.table.update_messages(entries, contract, *args))

    def close(self) -> None:
        """Close the table and end the thread. The next operation starts them again."""
        self._thread.close(self.table.close)


def declared_key(function: object) -> tuple[str, ...]:
    """Return the key columns that a read or write function declares, () if it has none."""
    key = getattr(function, "key", None)
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple | list):
        return tuple(key)
    return ()


def check_request(table: str, key: Sequence[str], operation: Operation[Any]) -> None:
    """Raise for null or unhashable keys, and for updates and puts if absent of None."""
    entries = operation.entries
    place = entries.null_key()
    if place is not None:
        found = f"{entries.keys[place]!r} as a key to {operation.kind.value}"
        named = " and ".join(key)
        problem = f"table {table} got {found}; {named} must not be null."
        raise errors.NullKeyError(
            problem, "Filter such records out before they reach the table.", table=table
        )
    if type(entries) is RowEntries:  # Arrow columns of keys have hashable values only
        try:
            deque(map(hash, entries.keys), 0)
        except TypeError as error:
            raise _unhashable_key_error(table, error) from error
    needs_values = operation.kind in (OperationKind.UPDATE, OperationKind.PUT_IF_ABSENT)
    if needs_values and (place := entries.null_value()) is not None:
        problem = (
            f"table {table} got None to {operation.kind.value} for key {entries.keys[place]!r}."
        )
        raise errors.TableError(
            problem, "Use delete() to remove a record, or leave the entry out.", table=table
        )


def _unhashable_key_error(table: str, error: TypeError) -> errors.TableError:
    """Return the error for a key that no dictionary can have."""
    problem = f"table {table} got a key that is not hashable: {error}."
    step = "Use a plain value, or a tuple of plain values for a key of several columns."
    return errors.TableError(problem, step, table=table)


def split_pairs(table: str, entries: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of the entries. Raises TableError unless they are pairs, in
    the order to apply them, which a mapping or a set does not state.
    """
    step = "Pass a list of (key, value), or the .items() of a dict."
    if isinstance(entries, (Mapping, set, frozenset)):
        problem = (
            f"table {table} got a {type(entries).__name__} as entries; expected pairs in the order"
            " to apply them."
        )
        raise errors.TableError(problem, step, table=table)
    try:
        pairs = list(entries)
        for kind in set(map(type, pairs)):
            if issubclass(kind, str | bytes):  # "ab" would unpack as a pair
                raise TypeError("they are text")
        return [key for key, _ in pairs], [value for _, value in pairs]
    except (TypeError, ValueError) as error:
        raise errors.TableError(
            f"table {table} got entries that are not pairs: {error}.", step, table=table
        ) from error


# The states of failed entries: the error that is raised is of the first one here that occurs.
_ORDER = (State.REFUSED, State.UNKNOWN, State.FAILED, State.MISSING)

_SHOWN = 300  # characters of a key that an error contains at most


def error_from_outcomes(
    table: str, operation: Operation[Any], outcomes: Outcomes
) -> errors.AdjunctError | None:
    """Return the error for the failed entries of an operation; None if none failed. Skipped entries
    have not failed.

    Entries that failed are grouped by state, in the order of `_ORDER`. The message names the table,
    the operation, and the first key of each group. The error's cause is the error of the first
    entry of the first group. If that is an AdjunctError, the error has its class. Its `keys` are
    those of the first group.
    """
    # The indices of the entries of each state.
    failed = [places for state in _ORDER if (places := outcomes.places(state))]
    if not failed:
        return None
    places = failed[0]
    problem = outcomes.problems[places[0]]
    cause = problem.error
    is_missing = problem.state is State.MISSING
    if is_missing and isinstance(cause, errors.RecordNotFoundError) and cause.table == table:
        return cause  # `explain_missing_records` has named the table, and has said everything
    failures = [_describe_failures(operation, outcomes, same) for same in failed]
    text = f"table {table}: {' Also, '.join(failures)}"
    return _error_like(problem, text, table, _distinct_keys(operation, places))


def _error_like(
    problem: Problem, text: str, table: str, keys: tuple[Any, ...]
) -> errors.AdjunctError:
    """Return an error that says `text`, caused by the problem's error.

    If that is an AdjunctError, the new error has its class, its next step and its other fields.
    """
    cause = problem.error
    error: errors.AdjunctError
    if isinstance(cause, errors.AdjunctError):
        fields: dict[str, Any] = {"table": table}
        if hasattr(cause, "keys"):  # the class is about entries
            fields["keys"] = keys
        error = cause.with_problem(text, **fields)
    elif problem.may_pass:
        error = errors.TableUnavailableError(text, table=table)
    else:
        step = "Correct what the store rejects, then send it again."
        error = errors.TableError(text, step, table=table, keys=keys)
    error.__cause__ = cause
    for note in getattr(cause, "__notes__", ()):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return error


def _distinct_keys(operation: Operation[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Return the keys of the entries at `places`, each once."""
    return tuple(dict.fromkeys(operation.entries.keys[place] for place in places))


def _describe_failures(operation: Operation[Any], outcomes: Outcomes, places: Sequence[int]) -> str:
    """Describe the entries at `places`: the first key, the number of other keys, and the first
    entry's reason.
    """
    problem = outcomes.problems[places[0]]
    keys = _distinct_keys(operation, places)
    shown = repr(keys[0])
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "…"
    if len(keys) > 1:
        shown += f" and {len(keys) - 1} more"
    reason = problem.describe()
    if not reason.endswith((".", "!", "?", "…")):
        reason += "."
    of_table = isinstance(problem.error, errors.ConfigurationError | errors.TableAccessError)
    failed = f"{operation.kind.value} of key {shown} failed"
    # Nothing is wrong with the entries if the request as a whole has failed.
    if problem.of_request and (of_table or problem.state is State.FAILED):
        return f"{reason} So the {failed}."
    return f"{failed}: {reason}"


GET = OperationKind.GET
PUT = OperationKind.PUT
DELETE = OperationKind.DELETE
UPDATE = OperationKind.UPDATE
_COUNTED_AS = {
    GET: "reads",
    PUT: "writes",
    OperationKind.PUT_IF_ABSENT: "writes",
    DELETE: "deletes",
    UPDATE: "updates",
}


class _Layers(NamedTuple):
    """The table's topmost layer, and the one that gathers requests, which `flush` sends."""

    top: Layer
    batch: BatchLayer


# Attributes that are not pickled. All others are, including those that a subclass adds.
_PROCESS_STATE = ("_meter", "_reported", "_layers")


@validated_methods
class RemoteTable(Generic[K, V, U]):
    """Records V by key K in another store, with partial updates U. All requests are async.

    It is a declaration until its first request: it pickles small, without connections, limiter
    state or counts, so each executor opens its own. Use `async with table:` or `close()` to release
    connections; in plain Python use `BlockingTable`. Guarantees:

    - Operations on one key take effect in the order of the calls, also if they are retried; the
      order between keys is undefined.
    - Concurrent calls are batched into requests of at most `batch_size` records (or as `batches`
      says), of which at most `in_flight` are under way at a time. `args` are passed to the function
      unchanged.
    - None as a key, or in one, raises NullKeyError before anything is sent; an update that is None
      raises TableError.
    - A request may be retried (see `RetryPolicy`): at least once, in order.
    - An error concerns the entries it names; the other entries of the call have taken effect.

    `key` names the key's columns, for operators that bring a key's records together. `newest_by`
    names the column whose greatest value wins, and `idempotent` makes replays of messages harmless
    (`on_replay="skip"`: a startpoint doesn't apply them again either); the store checks both with
    each write. With `fenced` it also checks that no later run of the application has begun: a run
    that was paused can't even write what it had under way. `defaults_may_overwrite` allows defaults
    if the function does not support put_if_absent. `cache` keeps records in this process; a table
    with a cache takes no updates from streams.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        *,
        key: str | Sequence[str],
        read_function: TableReadFunction[K, V] | None = None,
        write_function: TableWriteFunction[K, V, U] | None = None,
        retry: RetryPolicy | None = None,
        rate_limit: RateLimit | None = None,
        batch_size: int | None = None,
        batches: BatchProvider | None = None,
        in_flight: PositiveInt = 8,
        newest_by: str | None = None,
        idempotent: bool = False,
        on_replay: Literal["apply", "skip"] = "apply",
        fenced: bool = False,
        defaults_may_overwrite: bool = False,
        cache: Cache | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = check_name("table", name)
        self.key: tuple[str, ...] = key_columns(name, key)
        self.read_function = read_function
        self.write_function = write_function
        self.retry = retry or RetryPolicy()
        self.rate_limit = rate_limit or RateLimit()
        if batches is not None and batch_size is not None:
            found = (
                f"table {name}: batch_size={batch_size} and batches={batches} both set the batch"
                " size"
            )
            raise argument_error(found, "one of them", argument="batches", table=name)
        if batch_size is not None:
            batches = BatchProvider(size=batch_size)
        self.batches = batches or BatchProvider()
        self.in_flight = in_flight
        self.newest_by = newest_by
        self.idempotent = idempotent
        self.on_replay = on_replay
        self.fenced = fenced
        self.defaults_may_overwrite = defaults_may_overwrite
        self.cache = cache
        self.clock = SystemClock() if clock is None else clock
        methods = (getattr(self.clock, name, None) for name in ("now", "sleep"))
        if not all(map(callable, methods)):
            expected = "an object with now() and async sleep(seconds)"
            raise argument_error(
                f"table {name} has clock={clock!r}", expected, argument="clock", table=name
            )
        if read_function is None and write_function is None:
            problem = f"table {name} has neither a read nor a write function."
            step = "Pass read_function=…, write_function=… or both (often the same object)."
            raise errors.ConfigurationError(problem, step, table=name)
        self._check_columns()
        self._check_conditions()
        functions = (read_function, write_function)
        # Whether operations name the key's columns (`Operation.key`).
        self._names_key = len(self.key) > 1 or any(
            getattr(function, "compares_keys", False) for function in functions
        )
        self.credit_source: CreditSource | None = None
        self.fence: Fence | None = None
        self.may_create = True
        self._meter = Meter()
        self._reported = TableMetrics()
        assert self._layers  # made here so that it raises if the layers can't be composed

    def _check_columns(self) -> None:
        """Raise ConfigurationError if a function declares another key, or columns without
        `newest_by`, or if `newest_by` is part of the key.
        """
        for function in (self.read_function, self.write_function):
            declared = declared_key(function)
            if declared and sorted(declared) != sorted(self.key):
                found = f"table {self.name} has the key ({', '.join(self.key)})"
                problem = f"{found}, and its {type(function).__name__} ({', '.join(declared)})."
                step = "Declare both with the same columns."
                raise errors.ConfigurationError(problem, step, argument="key", table=self.name)
        column_types = getattr(self.write_function, "column_types", None)
        columns = None
        if column_types is not None:
            columns = column_types()
        if self.newest_by in self.key:
            problem = (
                f"table {self.name} has newest_by={self.newest_by!r}, which is part of its key"
                f" ({', '.join(self.key)}): all records of a key have the same value."
            )
            step = "Name a column with the records' times, or take it out of the key."
            raise errors.ConfigurationError(problem, step, argument="newest_by", table=self.name)
        if self.newest_by and columns and self.newest_by not in columns:
            problem = (
                f"table {self.name} has newest_by={self.newest_by!r}, and its columns are"
                f" {', '.join(columns)}."
            )
            step = "Name one of its columns, or declare that column."
            raise errors.ConfigurationError(problem, step, argument="newest_by", table=self.name)

    def _check_conditions(self) -> None:
        """Raise ConfigurationError if `newest_by`, `idempotent` and `on_replay` do not fit each
        other or the table.

        The write function must support them, and a table with a cache can't have them.
        """
        table = f"table {self.name}"
        for name in ("newest_by", "idempotent", "fenced"):
            is_declared = getattr(self, name) not in (None, False)
            if is_declared:
                self._check_support(name)
        if self.newest_by == "":
            expected = "the name of the column with each record's time"
            raise argument_error(
                f"{table}: newest_by=''", expected, argument="newest_by", table=self.name
            )
        if self.on_replay == "skip" and not self.idempotent:
            found = f"{table}: on_replay='skip' with idempotent=False"
            expected = '"apply", or "skip" together with idempotent=True'
            raise argument_error(found, expected, argument="on_replay", table=self.name)
        if self.newest_by is None and not self.idempotent:
            return
        if self.batches.compact:
            problem = (
                f"{table}: compact batches can't be combined with newest_by or idempotent: the"
                " store decides for each write whether it is the newest, and was not applied"
                " before."
            )
            step = "Remove compact=True, or the conditions."
            raise errors.ConfigurationError(problem, step, argument="batches", table=self.name)
        if self.cache is not None:
            problem = (
                f"{table}: a cache can't know which writes the store skips under newest_by or"
                " idempotent."
            )
            step = (
                "Remove the cache, or declare a second table for reading that has the cache and no"
                " conditions."
            )
            raise errors.ConfigurationError(problem, step, argument="cache", table=self.name)

    def _check_support(self, condition: str) -> None:
        """Raise ConfigurationError unless the write function can check a condition."""
        function = self.write_function
        if function is None:
            lacks = "it has no write function."
        elif getattr(function.capabilities, condition):
            return
        else:
            lacks = "its write function can't check it."
        raise errors.ConfigurationError(
            f"table {self.name} declares {condition}, but {lacks}",
            f"Use a write function whose store supports it, or remove {condition}.",
            argument=condition,
            table=self.name,
        )

    @cached_property
    def _layers(self) -> _Layers:
        """The layers, from above to below: cache, batch (with the order of each key), update
        contract, retry, rate, attempt, function.
        """
        meter = self._meter
        reader = self.read_function
        writer = self.write_function
        function = FunctionLayer(
            self.name, reader, writer, self.fence, self.fenced, self.may_create
        )
        attempt = AttemptLayer(self.name, function, self.retry.timeout, meter)
        rate = RateLayer(self.name, attempt, self.rate_limit, self.credit_source, meter, self.clock)
        retry = RetryLayer(rate, self.retry, meter, self.clock)
        capabilities = [each.capabilities for each in (reader, writer) if each is not None]
        sizes = [self.batches.size]
        for each in capabilities:
            if each.largest is not None:
                sizes.append(each.largest)
        contract = UpdateContractLayer(
            retry,
            table=self.name,
            capabilities=capabilities[-1],  # of the write function, if there is one
            defaults_may_overwrite=self.defaults_may_overwrite,
        )
        batch = BatchLayer(
            contract,
            batches=replace(self.batches, size=rate.largest(min(sizes))),
            in_flight=self.in_flight,
            function=writer,
            meter=meter,
        )
        if self.cache is None:
            return _Layers(batch, batch)
        return _Layers(CacheLayer(batch, self.cache, meter, self.clock), batch)

    def __repr__(self) -> str:
        return (
            f"RemoteTable({self.name!r}, key={self.key}, read_function={self.read_function!r},"
            f" write_function={self.write_function!r}, retry={self.retry},"
            f" rate_limit={self.rate_limit})"
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._meter = Meter()
        self._reported = TableMetrics()

    def with_credit_source(self, source: CreditSource) -> RemoteTable[K, V, U]:
        """Return a copy of this table that gets its credits from `source`, also in tasks."""
        table = copy.copy(self)
        table.credit_source = source
        return table

    def with_fence(self, fence: Fence) -> RemoteTable[K, V, U]:
        """Return a copy of this table whose writes are those of a run, also in tasks: see
        `Operation.fence`.
        """
        table = copy.copy(self)
        table.fence = fence
        return table

    def with_existing_store(self) -> RemoteTable[K, V, U]:
        """Return a copy of this table for which a missing table of the store is an error, because
        the run has found it before: see `Operation.may_create`.
        """
        table = copy.copy(self)
        table.may_create = False
        return table

    async def announce(self) -> None:
        """Let the store, where it can, refuse writes of earlier runs than the one whose fence this
        table has (`with_fence`).
        """
        if self.fence is not None and self.write_function is not None:
            await self.write_function.announce(self.fence)

    @property
    def batch_size(self) -> int:
        """The greatest number of records in a request."""
        return self.batches.size

    @property
    def metrics(self) -> TableMetrics:
        """The metrics of this table up to now."""
        return self._meter.metrics()

    async def __aenter__(self) -> RemoteTable[K, V, U]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def flush(self) -> None:
        """Send waiting operations, and return when everything requested so far is answered. Reports
        the metrics since the last `flush` to hooks.
        """
        await self._layers.batch.flush()
        if has_metrics_hooks():
            before = self._reported
            self._reported = self.metrics
            report_metrics(self.name, self._reported - before)

    async def close(self) -> None:
        """Release the connections when everything requested is answered. The next request opens
        them again.
        """
        await self.flush()
        if self.credit_source is not None:
            await self.credit_source.close()
        await self._layers.top.close()

    async def send(self, operation: Operation[K]) -> Outcomes:
        """Execute the operation under the table's declared conditions; return each entry's outcome.

        All other requests use it. Invalid requests raise before anything is sent; problems of
        entries are in the outcomes.
        """
        return await self._send(operation)

    async def _send(self, operation: Operation[K]) -> Outcomes:
        """Execute the operation for `send`, or for a method of this class if no subclass overrides
        `send`.
        """
        entries: object = operation.entries
        if not (hasattr(entries, "null_key") and hasattr(entries, "take")):
            problem = (
                f"table {self.name} got an Operation whose entries are a {type(entries).__name__}."
            )
            step = "Use RowEntries(keys, values), or ArrowEntries.of(batch, key)."
            raise errors.TableError(problem, step, table=self.name)
        if not operation.count:
            return Outcomes(0)
        check_request(self.name, self.key, operation)
        if self._names_key and not operation.key:
            operation = replace(operation, key=self.key)
        operation = self._with_conditions(operation)
        outcomes = await self._layers.top.send(operation)
        if outcomes.problems and operation.kind is UPDATE:
            outcomes = explain_missing_records(self.name, operation, outcomes)
        self._count_entries(operation, outcomes)
        return outcomes

    async def get(self, key: K, *args: object) -> V | None:
        """The record of `key`, or None if there is none."""
        outcomes = await self._send_or_raise(Operation(GET, RowEntries((key,)), args))
        return outcomes.records[0] if outcomes.records else None

    async def get_all(self, keys: Iterable[K], *args: object) -> dict[K, V]:
        """The records by key, for those `keys` that have one."""
        wanted = list(keys)
        try:
            wanted = list(dict.fromkeys(wanted))
        except TypeError as error:
            raise _unhashable_key_error(self.name, error) from error
        records = (
            await self._send_or_raise(Operation(GET, RowEntries(wanted), args))
        ).records or ()
        return {
            key: record for key, record in zip(wanted, records, strict=False) if record is not None
        }

    async def put(self, key: K, value: V | None, *args: object) -> None:
        """Make `value` the record of `key`; None deletes it."""
        if value is None:
            await self.delete(key, *args)
        else:
            await self._send_or_raise(Operation(PUT, RowEntries((key,), (value,)), args))

    async def put_all(
        self, entries: SkipValidation[Iterable[tuple[K, V | None]] | ArrowFrame], *args: object
    ) -> None:
        """`put` for each entry, in order for each key; None deletes.

        Rows of an Arrow table or batch, or of a pandas or Polars frame, are records by the table's
        key. They become Python values only if the store needs them.
        """
        await self._send_or_raise(Operation(PUT, self._entries_of(entries), args))

    async def delete(self, key: K, *args: object, newest: object = None) -> None:
        """Remove the record of `key`; no error if there is none.

        A table with `newest_by` requires `newest`, and keeps a record that is newer.
        """
        await self._send_or_raise(Operation(DELETE, self._deletes((key,), newest), args))

    async def delete_all(self, keys: Iterable[K], *args: object, newest: object = None) -> None:
        """`delete` for each key."""
        await self._send_or_raise(Operation(DELETE, self._deletes(list(keys), newest), args))

    async def update(self, key: K, update: U, *args: object) -> None:
        """Apply `update` to the record of `key`; RecordNotFoundError if there is none."""
        await self._send_or_raise(
            Operation(
                UPDATE, RowEntries((key,), (update,)), args, contract=UpdateContract.UPDATE_ONLY
            )
        )

    async def update_all(
        self, entries: SkipValidation[Iterable[tuple[K, U]] | ArrowFrame], *args: object
    ) -> None:
        """`update` for each entry, in order for each key. A row of a frame sets all columns but the
        key's.

        RecordNotFoundError names the keys without a record; all other entries are applied.
        """
        rows = self._entries_of(entries, updates=True)
        await self._send_or_raise(
            Operation(UPDATE, rows, args, contract=UpdateContract.UPDATE_ONLY)
        )

    def _deletes(self, keys: Sequence[Any], newest: Any) -> RowEntries[Any]:
        """The entries that delete `keys`, each with the time `newest` if that is given. Raises
        ConfigurationError for a time without `newest_by`.
        """
        if newest is None:
            return RowEntries(keys)
        if self.newest_by is None:
            problem = (
                f"table {self.name} got a delete with newest={newest!r}, but is declared without"
                " newest_by."
            )
            step = "Omit newest, or declare the table with newest_by."
            raise errors.ConfigurationError(problem, step, argument="newest", table=self.name)
        return RowEntries(keys, newest=[newest] * len(keys))

    def _entries_of(
        self, entries: Iterable[tuple[Any, Any]] | ArrowFrame, *, updates: bool = False
    ) -> Entries[Any]:
        """Return pairs, or the rows of a frame, as entries."""
        if isinstance(entries, ArrowFrame):
            return ArrowEntries.of(entries, self.key, updates=updates)
        keys, values = split_pairs(self.name, entries)
        return RowEntries(keys, values)

    async def update_messages(
        self,
        entries: SkipValidation[Iterable[tuple[K, UpdateMessage[U, V]]]],
        contract: UpdateContract = UpdateContract.UPDATE_ONLY,
        *args: object,
    ) -> None:
        """Apply each message in order, starting missing records from their defaults if `contract`
        allows it.

        Takes one request per batch if the function supports defaults in updates, else up to three.
        Raises RecordNotFoundError as `update_all` does; it says how to avoid the missing records.
        """
        keys, messages = split_pairs(self.name, entries)
        for key, message in zip(keys, messages, strict=True):
            if not isinstance(message, UpdateMessage):
                problem = (
                    f"table {self.name} got {message!r} for key {key!r}; expected an UpdateMessage."
                )
                raise errors.TableError(
                    problem, "Wrap the update: UpdateMessage(update, default).", table=self.name
                )
        defaults: list[V | None] | None
        if all(message.default is None for message in messages):
            defaults = None
        else:
            defaults = [message.default for message in messages]
        updates = RowEntries(keys, [message.update for message in messages], defaults)
        await self._send_or_raise(Operation(UPDATE, updates, args, contract=contract))

    async def _send_or_raise(self, operation: Operation[Any]) -> Outcomes:
        """Send an operation, by a subclass's `send` if it has one; raise the error of its failed
        entries.
        """
        # `_send` skips the validation of `send`: the operation is our own.
        is_overridden = type(self).send is not RemoteTable.send
        outcomes = await (self.send(operation) if is_overridden else self._send(operation))
        if outcomes.problems:
            error = error_from_outcomes(self.name, operation, outcomes)
            if error is not None:
                raise error
        return outcomes

    def _with_conditions(self, operation: Operation[Any]) -> Operation[Any]:
        """Return the operation with the conditions that the table declares, and the times and marks
        that they need.

        `newest_by` applies to every write; the times are those of the entries (`newest`), else they
        are read from the records and updates. `idempotent` applies only to entries with marks,
        which those of a direct call lack. Raises TableError for entries without a time, and for
        updates that a retry could apply twice. Reads, and operations that already have conditions,
        are returned unchanged.
        """
        if self.newest_by is None and not self.idempotent:
            return operation
        if not operation.kind.writes or operation.conditions:
            return operation
        entries = operation.entries
        idempotent = self.idempotent and entries.marks is not None
        conditions = Conditions(self.newest_by, idempotent, keeps_marks=self.idempotent)
        if self.newest_by is None:
            return replace(operation, conditions=conditions)
        if not idempotent and operation.kind is UPDATE:
            self._check_repeatable(entries)
        marks = entries.marks
        times = entries.newest
        if times is None or marks is None:
            if times is None:
                times = self._read_times(operation, self.newest_by)
            if marks is None:
                marks = [DIRECT] * len(entries)
            entries = RowEntries(entries.keys, entries.values, entries.defaults, marks, times)
        return replace(operation, entries=entries, conditions=conditions)

    def _read_times(self, operation: Operation[Any], column: str) -> list[Any]:
        """Return each entry's value of `newest_by`; TableError for one that has none."""
        values: Sequence[Any] = operation.entries.values or [None] * len(operation)
        times = [_read_time(value, column) for value in values]
        for place, time in enumerate(times):
            if time is None:
                key = operation.entries.keys[place]
                problem = (
                    f"table {self.name}: {operation.kind.value} of key {key!r} has no {column},"
                    " which newest_by needs."
                )
                if operation.kind is DELETE or values[place] is None:
                    step = f"Pass the {column} of the delete: delete({key!r}, newest=…)."
                elif operation.kind is UPDATE:
                    step = f"Set {column} in the update."
                else:
                    step = f"Set {column} in the record."
                raise errors.TableError(problem, step, table=self.name)
        return times

    def _check_repeatable(self, entries: Entries[Any]) -> None:
        """Raise TableError for an update that adds or appends, as a retry could do so twice."""
        if not isinstance(entries, RowEntries):
            return  # from a stream: its expressions are checked when the application is planned
        for place, value in enumerate(entries.values or ()):
            if isinstance(value, Changes) and not value.repeatable:
                raise errors.TableError(
                    f"table {self.name}: the update of {entries.keys[place]!r} adds or appends:"
                    " with newest_by alone, a repeated update would do so twice.",
                    "Only set values; or declare the table with idempotent=True, and send entries"
                    " with marks.",
                    table=self.name,
                )

    def _count_entries(self, operation: Operation[Any], outcomes: Outcomes) -> None:
        """Count what an operation has done, by its outcomes."""
        count = self._meter.add
        records = outcomes.records
        present = 0
        if records:
            present = len(records) - records.count(None)
        done = outcomes.done
        has_deletes = operation.kind is PUT and operation.entries.null_value() is not None
        if has_deletes:
            deleted = 0
            for place, value in enumerate(operation.entries.values or ()):
                deleted += value is None and place not in outcomes.problems
            count("deletes", deleted)
            done -= deleted
        count(_COUNTED_AS[operation.kind], done, present)
        if outcomes.defaults_put:
            count("defaults_put", outcomes.defaults_put)
        if outcomes.problems:
            count("skipped", len(outcomes.places(State.SKIPPED)))


def _read_time(value: Any, column: str) -> Any:
    """Return the column's value in a record or an update, None if it has none."""
    if isinstance(value, Changes):
        return value.set.get(column)
    if isinstance(value, Mapping):
        return value.get(column)
    return getattr(value, column, None)


AnyTable: TypeAlias = RemoteTable[Any, Any, Any]

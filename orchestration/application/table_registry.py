"""The registry of remote tables in the lake: it opens a table by its name alone, and tells when a
store has lost one.

It stores names of registered backends and plain settings, never module paths or secrets, and what
the store of a table that applications have written said about it last (`Presence`).

`check_stores` asks the stores of an application's tables, and its sinks, whether they can do what
is needed: once a run, before the intent of a batch is committed. A wrong password, a server that is
away or a column that was dropped then leaves no batch open, and no output has been written. Nothing
is created or written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.written_tables import (
    is_output_table,
    list_known_tables,
    table_log,
)
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.operators.updates import TableSend, Update
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
)
from dagster_adjunct.resources.table_backends.store import StoreTable
from dagster_adjunct.resources.tables.functions import TableFunction, TableUse
from dagster_adjunct.resources.tables.operation import Conditions, OperationKind
from dagster_adjunct.resources.tables.presence import (
    NO_TABLE,
    Loss,
    Presence,
    find_loss,
    is_emptied,
    is_same_table,
    merge_presence,
)
from dagster_adjunct.resources.tables.table import AnyTable, RemoteTable
from dagster_adjunct.resources.threads import LoopThread, call_in_threads, run_blocking
from dagster_adjunct.resources.times import subtract_span

# Commits of a table, after which those older than _KEPT are deleted: each run makes some.
_PRUNED_EVERY = 100
_KEPT = timedelta(days=7)
_NOTES_SECONDS = 3.0  # how long a plan waits for a store
_STORED_EVERY = 60.0  # seconds; what the stores say is also stored at the end of a run
T = TypeVar("T")


@contextmanager
def register_tables(
    lake: Lake, app: Application, *, by: str, warn: Callable[[str], None] = lambda text: None
) -> Iterator[RegisteredTables]:
    """Register the application's remote tables before the block, which is a run, and record after
    it what their stores say.

    Tables of backends that are not registered are not remembered. Raises TableNotFoundError for a
    table that is gone, and TableReplacedError for a table that is not the one that applications
    have written: the run would go on with an empty or an older table. `warn` gets texts about
    changes that somebody may have made on purpose.
    """
    tables = RegisteredTables(lake, app, by=by, warn=warn)
    try:
        tables.check()
        try:
            yield tables
        except BaseException:
            with suppress(errors.AdjunctError):  # the error that ended the run matters more
                tables.remember()
            raise
        tables.remember()
    finally:
        tables.close()


class RegisteredTables:
    """The registered tables of a run's application, of which the store is asked before each
    batch that writes them.
    """

    def __init__(
        self, lake: Lake, app: Application, *, by: str, warn: Callable[[str], None]
    ) -> None:
        self._lake = lake
        self._by = by
        self._warn = warn
        targets = [operator.spec.target(app) for operator in app.operators]
        self._tables: list[_Table] = []
        for declared in app.tables.values():
            is_written = LineageNode("table", declared.name) in targets
            table = _table_of_run(declared, is_written=is_written)
            if table is not None:
                self._tables.append(table)
        self._thread = LoopThread("registered-tables")
        # The names of the tables that `check` or `begin_batch` has found or created: if one is
        # missing later in the run, it was dropped.
        self.existing: set[str] = set()

    def check(self) -> None:
        """Compare each table with what the lake remembers of it, and register its declaration.

        A store that does not answer is asked again before the first batch.
        """
        self._for_each(self._check, self._tables)

    def read_notes(self) -> list[str]:
        """Return the notes on settings of stores that may lose records. Raises
        ConfigurationError as a run would.
        """
        notes: list[str] = []

        async def read(table: _Table) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_NOTES_SECONDS):
                    notes.extend(await _settings_notes(table))

        self._for_each(read, self._tables)
        return notes

    def begin_batch(self, fence: Fence | None = None) -> None:
        """Ask the stores of the tables that the run writes whether they still hold them.

        Each call counts a batch in the stores. The first call creates tables that no application
        has written yet; from then on a missing table is an error. Tables that are fenced then
        refuse writes of runs before the run of this `fence`. Raises TableUnavailableError,
        RunLeaseLostError if a later run has begun, and the errors of `register_tables`.
        """

        async def begin(table: _Table) -> None:
            await self._begin_batch(table, fence)

        self._for_each(begin, [table for table in self._tables if table.is_written])

    def remember(self) -> None:
        """Store what the stores say now; a loss is left for the next run to report."""
        self._for_each(self._remember, self._tables)

    def close(self) -> None:
        """Close the connections."""

        async def close_all() -> None:
            for table in self._tables:
                # Another one may have no connections for each event loop.
                if isinstance(table.function, StoreTable):
                    await table.function.close()

        self._thread.close(close_all)

    def _for_each(self, work: Callable[[_Table], Awaitable[None]], tables: list[_Table]) -> None:
        """Do the work for all of these tables at the same time, in the event loop of the run."""

        async def work_all() -> None:
            await asyncio.gather(*(work(table) for table in tables))

        if tables:
            self._thread.run(work_all())

    async def _check(self, table: _Table) -> None:
        """Compare a table with what the lake remembers of it, and store what its store says now."""
        for note in await _settings_notes(table):
            self._warn(note)
        before = await self._remembered(table)
        now = None
        with suppress(errors.AdjunctError):  # before the first batch, an error is reported
            now = await table.function.inspect()
        if now is not None:
            self._check_not_lost(table, before, now)
            self._warn_if_emptied(table, before, now)
            table.seen = now
            if now.exists:
                self.existing.add(table.name)
        await self._store(table, now)

    async def _begin_batch(self, table: _Table, fence: Fence | None) -> None:
        """Ask the store of a table whether it still holds it, unless it was asked a moment ago.

        The first batch also creates the table and, if it is fenced, announces the run of this
        `fence` to it. What the store says is stored at the first batch, when it is new, and now and
        then.
        """
        if table.has_begun and time.monotonic() < table.asked_at + table.function.inspected_every:
            return
        table.asked_at = time.monotonic()
        is_first = not table.has_begun
        now = await self._inspect_and_count(table, fence)
        table.has_begun = True
        if now is None:
            if is_first:
                await self._store(table, None)
            return
        self.existing.add(table.name)
        is_other = replace(now, runs=None) != replace(table.seen, runs=None)
        is_due = time.monotonic() >= table.stored_at + _STORED_EVERY
        table.seen = now
        if is_first or is_other or is_due:
            await self._store(table, now)
            table.stored_at = time.monotonic()

    async def _inspect_and_count(self, table: _Table, fence: Fence | None) -> Presence | None:
        """Return what the store of a table says, after it has counted the batch if that is due;
        None if the store can't say.

        The first batch also begins the run in the store. Raises the error for a table that is not
        what it was before.
        """
        is_first = not table.has_begun
        if is_first:
            before = await self._remembered(table)
        else:
            before = table.seen
        now = await _retried(table, table.function.inspect)
        if now is None:
            return None
        self._check_not_lost(table, before, now)
        if not is_first and not table.must_count():
            return now
        is_announced = is_first and table.declared.fenced
        now = await self._begin_run(table, before, fence if is_announced else None)
        table.counted_at = time.monotonic()
        return now

    async def _begin_run(
        self, table: _Table, before: Presence, fence: Fence | None
    ) -> Presence | None:
        """Create the table if applications have not written it yet, and count a batch in it; return
        what its store says then, None if it can't say. With a `fence`, the store then refuses
        writes of runs before its run. Raises TableNotFoundError for a table that applications have
        written and that is gone.
        """
        begin = partial(
            table.function.begin_run, create=not before.exists, marks=table.has_marks, fence=fence
        )
        try:
            return await _retried(table, begin)
        except errors.TableNotFoundError as error:
            if not before.exists:
                raise
            raise self._lost(table, "gone", NO_TABLE, before) from error

    async def _remember(self, table: _Table) -> None:
        """Store what the store of a table says now, unless it has lost the table."""
        now = None
        with suppress(errors.AdjunctError):  # what it said before stays
            now = await table.function.inspect()
        if now is not None and find_loss(table.seen, now) is None:
            await self._store(table, now)

    def _check_not_lost(self, table: _Table, before: Presence, now: Presence) -> None:
        """Raise the error for a table that is not what it was before."""
        loss = find_loss(before, now)
        if loss is not None:
            raise self._lost(table, loss, now, before)

    def _warn_if_emptied(self, table: _Table, before: Presence, now: Presence) -> None:
        """Warn of a table that had rows before and has none now."""
        if is_emptied(before, now):
            self._warn(
                f"table {table.name} has no rows, and the last run that wrote it left some. If"
                f" nobody deleted them on purpose, stop this run and restore {table.place} from a"
                " copy."
            )

    def _lost(
        self, table: _Table, loss: Loss, now: Presence, before: Presence
    ) -> errors.TableNotFoundError:
        """Return the error for a table that its store has lost."""
        current = table_log(self._lake, table.name).current()
        written_as = table.place if current is None else _place_of(current.body["function"])
        return _loss_error(self._lake.url, table, loss, now, before, written_as)

    async def _remembered(self, table: _Table) -> Presence:
        """Return what the lake remembers of a table."""
        if table.declaration is None:
            return NO_TABLE
        return _presence_in(await asyncio.to_thread(table_log(self._lake, table.name).current))

    async def _store(self, table: _Table, now: Presence | None) -> None:
        """Store the declaration, and what its store says if that is known."""
        declaration = table.declaration
        if declaration is None:
            return

        def decide(current: Commit | None) -> dict[str, Any] | None:
            return _registration(current, declaration, now, is_written=table.has_begun)

        def store() -> None:
            log = table_log(self._lake, table.name)
            commit = log.transact(decide, by=self._by)
            if commit is not None and commit.number % _PRUNED_EVERY == 0:
                old = log.list_old_manifests(subtract_span(self._lake.now(), _KEPT))
                self._lake.store.delete_many([item.key for item in old])

        await asyncio.to_thread(store)


@dataclass(slots=True)
class _Table:
    """A table in a run: as the application has `declared` it, its `declaration` as the lake stores
    it, None without a registered backend, and what its store said last (`seen`).
    """

    declared: AnyTable
    function: TableFunction
    declaration: dict[str, Any] | None
    is_written: bool
    seen: Presence = field(default=NO_TABLE)
    has_begun: bool = False
    asked_at: float = 0.0
    counted_at: float = 0.0
    stored_at: float = 0.0

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def place(self) -> str:
        """Where the table is stored, as errors name it."""
        return repr(self.function)

    @property
    def has_marks(self) -> bool:
        """Whether the table stores which records it has applied."""
        return self.declared.idempotent or self.declared.newest_by is not None

    def must_count(self) -> bool:
        """Whether the store has to count another batch of the run."""
        return time.monotonic() >= self.counted_at + self.function.counted_every


def _table_of_run(table: AnyTable, *, is_written: bool) -> _Table | None:
    """Return a table of a run that writes it or only reads it; None if its function is not one
    of ours.
    """
    described = table.read_function or table.write_function
    asked: Any
    if is_written:
        asked = table.write_function
    else:
        asked = described
    if not isinstance(asked, TableFunction):
        return None
    declaration = None
    with suppress(errors.ConfigurationError):  # its backend is not registered
        declaration = {
            "name": table.name,
            "key": list(table.key),
            "function": describe_function(described),
        }
    return _Table(table, asked, declaration, is_written)


async def _settings_notes(table: _Table) -> list[str]:
    """Return notes on settings of the table's store that may lose records; [] if the store can't be
    asked now.

    Raises ConfigurationError for settings that make the conditions of its writes, or its fence,
    void.
    """
    conditions = Conditions()
    if table.is_written:
        conditions = Conditions(table.declared.newest_by, table.declared.idempotent)
    fenced = table.is_written and table.declared.fenced
    try:
        return await table.function.check_settings(conditions, fenced=fenced)
    except errors.AdjunctError as error:
        if getattr(error, "argument", None) in ("newest_by", "idempotent", "fenced"):
            raise
        return []  # the first write reports why the store can't be asked


async def _retried(table: _Table, request: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a request, which is retried by the table's policy while the store is
    unavailable.
    """
    loop = asyncio.get_running_loop()
    attempts = 0
    began = loop.time()
    while True:
        attempts += 1
        try:
            return await request()
        except errors.RunLeaseLostError:  # a TransientError, too
            raise
        except errors.TransientError:
            wait = table.declared.retry.wait(attempts, loop.time() - began)
            if wait is None:
                raise
        await asyncio.sleep(wait)


def _presence_in(commit: Commit | None) -> Presence:
    """Return what a table's store said last, as a commit of its log has it."""
    if commit is None or commit.body.get("presence") is None:
        return NO_TABLE
    return Presence(exists=True, **commit.body["presence"])


def _registration(
    current: Commit | None, declaration: dict[str, Any], now: Presence | None, *, is_written: bool
) -> dict[str, Any] | None:
    """Return what to commit of a table with this declaration, whose store says `now`; None to
    leave the `current` commit.

    Where applications have written the table as another function, that stays until a run writes
    this one, or its store says that it is the table that they have written.
    """
    latest = _presence_in(current)
    if _is_written_as_other(current, declaration):
        if not is_written and not is_same_table(latest, now):
            return None
        latest = NO_TABLE  # what that store said
    if now is not None and now.exists:
        latest = merge_presence(latest, now)
    presence = latest.to_dict() if latest.exists else None
    body = {**declaration, "presence": presence}
    if current is not None and current.body == body:
        return None
    return body


def _is_written_as_other(current: Commit | None, declaration: dict[str, Any]) -> bool:
    """Return whether applications have written a table as another function than is declared."""
    if current is None or not _presence_in(current).exists:
        return False
    return bool(current.body["function"] != declaration["function"])


def _place_of(description: dict[str, Any]) -> str:
    """Return where a table is stored by the description of its function."""
    try:
        return repr(function_from_description(dict(description)))
    except errors.AdjunctError:  # a backend that is not registered any more
        return repr(description)


def _loss_error(
    lake: str, table: _Table, loss: Loss, now: Presence, before: Presence, written_as: str
) -> errors.TableNotFoundError:
    """Return the error for a table that is gone, or is another one than applications have written,
    at the place `written_as`.
    """
    name = table.name
    here = table.place
    accept = f"adjunct table allow-recreate {name} --reason …"
    if loss == "gone":
        if here == written_as:
            problem = (
                f"table {name}: {here} is gone, and applications of {lake} have written it. A new"
                " one would be empty."
            )
            step = f"Restore it from a copy. Or let the next run create it again: {accept}."
        else:
            problem = (
                f"table {name} is declared as {here}, which does not exist, and applications of"
                f" {lake} have written it as {written_as}. A second one would be empty."
            )
            step = (
                "Run in the folder from which the path leads to the first one, declare its absolute"
                f" path, or move it. Or let the next run create it: {accept}."
            )
        return errors.TableNotFoundError(problem, step, table=name)
    found = {
        "replaced": "it was created again, or replaced, since applications wrote it",
        "truncated": "all its rows were removed at once (TRUNCATE)",
        "marks": (
            "the table with its marks is gone, so that repeated messages would be applied again"
        ),
        "older": (
            "it is restored from an older backup, or was emptied: its count of runs and batches is"
            f" {now.runs}, and was {before.runs}"
        ),
    }[loss]
    moved = "" if here == written_as else f" Applications have written it as {written_as}."
    return errors.TableReplacedError(
        f"table {name}: {here} is not the table that applications of {lake} have written:"
        f" {found}.{moved}",
        f"Restore it from its newest copy. Or accept it as it is: {accept}; a startpoint can send"
        " records again.",
        table=name,
        loss=loss,
    )


def read_table_notes(lake: Lake, app: Application) -> list[str]:
    """Return notes on settings of the stores of remote tables; stores that do not answer are left
    out.

    Raises ConfigurationError if a store can't hold what a table declares.
    """
    tables = RegisteredTables(lake, app, by="plan", warn=lambda text: None)
    try:
        return tables.read_notes()
    finally:
        tables.close()


def reset_table(lake: Lake, name: str, *, by: str, reason: str) -> None:
    """Forget what a table's store said, or which applications have written an output table, so that
    the next run may create or accept it; the table is left unchanged, and the lake records who did
    it and why. Raises ConfigurationError for a table that the lake does not know.
    """
    forgotten: dict[str, Any] = {"presence": None}
    if is_output_table(name):
        forgotten = {"writers": []}

    def decide(current: Commit | None) -> dict[str, Any]:
        if current is None:
            raise _unknown_table_error(lake, name)
        reset = {"at": lake.now().isoformat(), "by": by, "reason": reason}
        return {**current.body, **forgotten, "reset": reset}

    table_log(lake, name).transact(decide, by=by)


def open_registered_table(lake: Lake, name: str) -> AnyTable:
    """Return the registered table of this name, for reading; it connects when it is first used.

    Raises ConfigurationError for an output table and for one that the lake does not know, and
    MalformedDocumentError.
    """
    if is_output_table(name):
        problem = f"{name} is an output table: its records have no key to look them up by."
        step = "Read it with any engine that reads Iceberg or Delta tables."
        raise errors.ConfigurationError(problem, step, table=name)
    commit = table_log(lake, name).current()
    if commit is None:
        raise _unknown_table_error(lake, name)
    try:
        settings = dict(commit.body["function"])
        if "create" in settings:  # looking up a record must not create a table
            settings["create"] = False
        function = function_from_description(settings)
        return RemoteTable(commit.body["name"], key=commit.body["key"], read_function=function)
    except (KeyError, TypeError) as error:
        problem = (
            f"the declaration of table {name!r} in {commit.manifest_key} can't be read: {error!r}."
        )
        step = "Run its application again, which rewrites the declaration."
        raise errors.MalformedDocumentError(problem, step, document=commit.manifest_key) from error


def _unknown_table_error(lake: Lake, name: str) -> errors.ConfigurationError:
    """Return the error for a table that the lake does not know, with those that it knows."""
    known = list_known_tables(lake)
    problem = (
        f"no application of {lake.url} has written a table {name!r}; known are"
        f" {', '.join(known) or 'none'}."
    )
    step = "Check the name; a table is known once an application that writes it has run."
    return errors.ConfigurationError(problem, step, table=name)


def check_stores(app: Application) -> None:
    """Ask each remote table and sink that the application uses; raise the first error, in the order
    of declaration.

    A table that can't be reached is asked again as its retry policy says. A function of a user is
    asked if it has a method `check`.
    """
    asked = [partial(_check_table, used) for used in list_uses(app)]
    for operator in app.operators:
        check = operator.spec.check_target
        if check is not None:
            asked.append(partial(_check_sink, operator.id, str(operator.spec.writes), check))
    if asked:
        call_in_threads(*asked)


@dataclass(frozen=True, slots=True)
class UsedFunction:
    """A function of a remote table, and for what the application uses it, first in `operator`."""

    operator: str
    table: AnyTable
    function: TableFunction
    use: TableUse


def list_uses(app: Application) -> list[UsedFunction]:
    """Return the functions of remote tables that can be asked, each function of a table once, for
    all its uses.
    """
    uses: dict[tuple[str, int], UsedFunction] = {}  # by table, and id() of the function
    for operator, name, use in _uses_of_operators(app):
        table = app.tables[name]
        function: Any
        if use.reads:
            function = table.read_function
        else:
            function = table.write_function
        is_ours = isinstance(function, TableFunction)
        if is_ours and type(function).check is not TableFunction.check:  # it has a check of its own
            used = UsedFunction(operator, table, function, replace(use, key=table.key))
            earlier = uses.setdefault((name, id(function)), used)
            uses[name, id(function)] = replace(earlier, use=earlier.use | use)
    return list(uses.values())


def _uses_of_operators(app: Application) -> Iterator[tuple[str, str, TableUse]]:
    """Yield the id of each operator that uses a remote table, the name of the table, and the
    use.
    """
    for operator in app.operators:
        send = operator.spec.send
        match = operator.spec.match
        if match is not None and match.table is not None:
            yield operator.id, match.table, TableUse(frozenset({OperationKind.GET}))
        if send is not None:
            yield operator.id, send.table, _use_of_send(app.tables[send.table], send)


def _use_of_send(table: AnyTable, send: TableSend) -> TableUse:
    """Return what a send does with a table, and which of its columns it writes."""
    conditions = Conditions(table.newest_by, table.idempotent)
    if send.contract is None:
        return TableUse(frozenset({OperationKind.PUT}), conditions)
    update = send.update
    if update is None:
        update = Update()
    kinds = {OperationKind.UPDATE}
    if update.if_missing is not None:
        kinds.add(OperationKind.PUT_IF_ABSENT)
    columns = set(update.columns)
    for name, _ in update.if_missing or ():
        columns.add(name)
    return TableUse(frozenset(kinds), conditions, frozenset(columns))


def _check_table(used: UsedFunction) -> None:
    """Ask the store of a table whether it can be used; again while it is unavailable, as the
    table's retry policy says. Raises the last error.
    """
    function = used.function
    retry = used.table.retry
    began = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        try:
            run_blocking(_ask(function, used.use, retry.timeout))
        except Exception as error:
            problem = function.problem_of(error, sent=False)
            waited = time.monotonic() - began
            pause = None
            if problem.may_pass and not errors.needs_action(error):
                pause = retry.wait(attempts, waited, problem.retry_after or 0.0)
            if pause is None:
                raise _table_error(used, error, passing=problem.may_pass) from error
            time.sleep(pause)
        else:
            return


async def _ask(function: TableFunction, use: TableUse, timeout: float | None) -> None:
    """Ask a table's store once whether it can be used, within this many seconds."""
    try:
        async with asyncio.timeout(timeout):
            await function.check(use)
    finally:
        await function.close()


def _table_error(used: UsedFunction, error: Exception, *, passing: bool) -> errors.AdjunctError:
    """Return the error for a table that can't be used: of the class of the store's error, if that
    is ours. Else it is a TableUnavailableError if the error may be `passing`, or a
    TableAccessError.
    """
    table = used.table.name
    step = "No batch was begun or continued: the next run goes on from here."
    if not isinstance(error, errors.AdjunctError):
        kind = errors.TableUnavailableError if passing else errors.TableAccessError
        if isinstance(error, TimeoutError):
            reason = "it did not answer in time"
        else:
            reason = f"{type(error).__name__}: {error}"
        problem = f"{used.operator}: table {table}: {reason.removesuffix('.')}."
        advice = "Check its store."
        if isinstance(error, OSError) and error.errno in errors.OF_FILES:
            _, advice = errors.describe_file_error(error, error.filename or "/")
        return kind(problem, f"{advice} {step}", table=table, operator=used.operator)
    problem = f"{used.operator}: {error.problem}"
    next_step = f"{error.next_step} {step}"
    return error.reworded(problem, next_step, table=table, operator=used.operator)


def _check_sink(operator: str, sink: str, check: Callable[[], object]) -> None:
    """Ask the sink of an operator whether it can be used. Raises OperatorFailedError for an error
    of the user's `check`; ours pass unchanged.
    """
    try:
        check()
    except errors.AdjunctError:
        raise
    except Exception as error:
        problem = f"{operator}: {sink} can't be used: {type(error).__name__}: {error}."
        step = "Correct what its check() reports. No batch was begun."
        raise errors.OperatorFailedError(problem, step, operator=operator) from error

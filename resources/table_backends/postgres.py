"""`PostgresTable`: records in a table of a PostgreSQL server.

Values are PostgreSQL's own: text, numbers, boolean, timestamp with time zone (read back in UTC),
date, numeric, bytea, jsonb and arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import PositiveInt

from dagster_adjunct.resources.errors import (
    AdjunctError,
    RunLeaseLostError,
    SchemaMismatchError,
    TableAccessError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends import postgres_connection, write_plan
from dagster_adjunct.resources.table_backends.columns import (
    check_identifier,
    check_required_columns,
)
from dagster_adjunct.resources.table_backends.nested_values import root_name
from dagster_adjunct.resources.table_backends.postgres_connection import READ_ONLY_STEP
from dagster_adjunct.resources.table_backends.postgres_values import (
    StagedBatch,
    find_unreadable,
    format_array,
    postgres_checker,
    postgres_decoder,
    postgres_encoder,
    split_repeated_keys,
    stage_batch,
    tolerant_cursor,
)
from dagster_adjunct.resources.table_backends.sql_table import Pool, SqlTable
from dagster_adjunct.resources.table_backends.store import check_variable_name
from dagster_adjunct.resources.table_backends.write_plan import (
    COLUMNS,
    Applied,
    RejectedKeysError,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    WritePlan,
    check_dropped,
)
from dagster_adjunct.resources.tables.functions import (
    TableUse,
    is_retryable,
    record_not_found_error,
)
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)
from dagster_adjunct.resources.tables.presence import Presence
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.validation import Seconds, validated

if TYPE_CHECKING:
    from psycopg import AsyncConnection, sql

    from dagster_adjunct.resources.table_backends.postgres_bookkeeping import PostgresBookkeeping
    from dagster_adjunct.resources.table_backends.postgres_statements import Statements

_ROUNDS = 20  # how often a write starts over because of concurrent changes, before it fails


class _BatchResult(NamedTuple):
    """What the statement of a staged batch returns: how many records it wrote, how many of them it
    created from defaults, and the places of those that a condition skipped.
    """

    written: int
    begun: int
    skipped: list[int]


class ConcurrentChangeError(Exception):
    """Another transaction created a record that this one was to create, or purged a mark that it
    was to update.

    The write must start over.
    """


class _RowByRowError(Exception):
    """Some records of a staged batch were not written: it is rolled back, and written row by row to
    find which.

    They are missing, and their marks must not be stored; or a trigger or a policy dropped them or
    changed their keys.
    """


class PostgresRequests:
    """A connection, which one caller holds at a time, with its requests: each is one transaction.

    A transaction locks the keys that it changes in key order, so that writers of the same keys wait
    instead of deadlocking. If there are conditions, it first locks their rows in the idempotency
    table, then their records. Two transactions may deadlock nevertheless, if both create the same
    record: the server ends one of them, which is retried.
    """

    def __init__(
        self, connection: AsyncConnection[Any], statements: Statements, table: PostgresTable
    ) -> None:
        self.connection = connection
        self.codec = statements.codec
        self._statements = statements
        self._declared = table
        self.has_idempotency_table = False
        self._staging: set[str] = set()  # names of the staging tables that exist
        self.may_have_committed = False

    outdated = False

    @property
    def closed(self) -> bool:
        """Whether requests can no longer be sent over this connection."""
        return self.connection.closed or self.connection.broken

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()

    def finish(self) -> None:
        """Close the connection without its event loop."""
        self.connection.pgconn.finish()

    async def get(self, keys: Sequence[Row]) -> list[dict[str, Any] | AdjunctError | None]:
        """The record of each key; None if there is none, an error if it can't be read."""
        by_place = await self._read(self._statements.select, self.codec.names, keys)
        return [by_place.get(place) for place in range(1, len(keys) + 1)]

    async def _read(
        self, statement: sql.SQL, names: Sequence[str], keys: Sequence[Row]
    ) -> dict[int, dict[str, Any] | AdjunctError]:
        """The columns `names` of the records that a statement returns for these keys, by place.

        A record with a value that Python can't hold is an error that names the column.
        """
        from psycopg import DataError

        arrays = self._statements.arrays(self.codec.key, keys)
        cursor = await self.connection.execute(statement, arrays, binary=True)
        try:
            rows = await cursor.fetchall()
        except (DataError, ValueError, ArithmeticError):
            cursor = tolerant_cursor(self.connection)
            await cursor.execute(statement, arrays)
            rows = await cursor.fetchall()
        return {place: self._record(names, row) for place, *row in rows}

    def _record(self, names: Sequence[str], row: Sequence[Any]) -> dict[str, Any] | AdjunctError:
        """Return the record in a row of the columns `names`, or the error if Python can't hold a
        value.
        """
        found = find_unreadable(row)
        if found is not None:
            return self.codec.unreadable_error(
                names[found.place], found.value.text, found.value.why
            )
        try:
            return self.codec.read(names, row)
        except SchemaMismatchError as error:
            return error

    async def write(self, operation: Operation[Any], valid: ValidEntries) -> WritePlan:
        """Write the valid entries in one transaction. After an error nothing was written, unless
        `may_have_committed` is set: then that is unknown. Raises RejectedKeysError for records that
        were dropped or can't be read, and TableUnavailableError if concurrent changes make it start
        over too often.
        """
        self.may_have_committed = False
        for _ in range(_ROUNDS):
            try:
                async with self.connection.transaction():
                    await self._pass_fence(operation)
                    if write_plan.needs_read(operation):
                        stored = await self._lock_and_read(operation, valid)
                    else:
                        stored = StoredState()
                    plan = write_plan.plan_writes(self.codec, operation, valid, stored)
                    await self._write(operation, plan)
                    await operation.check_fence()
                    self.may_have_committed = True
            except ConcurrentChangeError:
                continue
            self.may_have_committed = False
            return plan
        if operation.conditions:
            # If a trigger drops rows of that table, no round can succeed: this raises.
            await self._check_idempotency_table(may_be_missing=False)
        problem = (
            f"{self.codec.table}: other writers created or deleted the records {_ROUNDS} times"
            " during the write."
        )
        step = (
            "The request is retried; if it keeps failing, find out which other writers delete the"
            " records."
        )
        raise TableUnavailableError(problem, step, table=self.codec.table)

    async def write_batch(self, operation: Operation[Any], batch: StagedBatch) -> Outcomes | None:
        """Write the batch in one transaction, by one statement; return the outcomes of its entries.

        Returns None, and writes nothing, if not all records could be written. The caller then
        writes them row by row to find out which could not. After an error nothing was written,
        unless `may_have_committed` is set: then that is unknown. Raises RunLeaseLostError if the
        run that writes has lost its lease.
        """
        shape = batch.shape
        self.may_have_committed = False
        if shape.conditions.newest_by is not None:
            self.codec.check_order(shape.conditions.newest_by)
        statements = self._statements.staging(shape)
        if statements.name not in self._staging:
            await self.connection.execute(statements.settings)
            await self.connection.execute(statements.create, ())
            self._staging.add(statements.name)
        missing: list[int] = []
        expected = batch.rows
        try:
            async with self.connection.transaction():
                await self._pass_fence(operation)
                cursor = self.connection.cursor()
                async with cursor.copy(statements.copy, ()) as copy:
                    await copy.write(batch.csv)
                # A batch that inserts misses no records. One with conditions has stored marks of
                # missing records when they are found: it is rolled back below.
                may_skip_missing = not shape.inserts and not shape.conditions
                if may_skip_missing:
                    # Locks the records in key order, as every request does.
                    await cursor.execute(statements.lock, (), binary=True)
                    present = {place for (place,) in await cursor.fetchall()}
                    expected = len(present)
                    if expected < batch.rows:
                        missing = batch.missing(present)
                await cursor.execute(statements.write, batch.constants, binary=True)
                row = await cursor.fetchone()
                assert row is not None  # every `write` statement returns one
                result = _BatchResult(*row)
                has_written_all = result.written + len(result.skipped) >= expected
                if not has_written_all:
                    raise _RowByRowError
                await operation.check_fence()
                self.may_have_committed = True
        except _RowByRowError:
            return None
        self.may_have_committed = False
        problems = {}
        if missing:
            keys = operation.entries.keys  # Python values, which take time to make
            for place in missing:
                error = record_not_found_error([keys[place]], self.codec.table)
                problems[place] = Problem(State.MISSING, error)
        problems |= dict.fromkeys(result.skipped, Problem(State.SKIPPED))
        return Outcomes(len(operation), problems=problems, defaults_put=result.begun)

    async def forget(self, older_than: float, most: int | None = None) -> int:
        """Purge what was last applied to keys more than `older_than` seconds ago, for at most
        `most` keys (None: all); return how many.
        """
        return (await self.connection.execute(self._statements.forget, (older_than, most))).rowcount

    async def _pass_fence(self, operation: Operation[Any]) -> None:
        """Raise RunLeaseLostError if the operation is fenced and a later run of its application has
        begun.
        """
        if operation.fence is not None and operation.fenced:
            await self._bookkeeping().pass_fence(self.codec.table, operation.fence)

    async def inspect(self) -> Presence:
        return await self._bookkeeping().presence()

    async def begin_run(self, fence: Fence | None) -> None:
        """Count the run in the bookkeeping, created first if the table may be, and pass the
        fence.
        """
        from psycopg.errors import InsufficientPrivilege

        bookkeeping = self._bookkeeping()
        try:
            if self._declared.create:
                await bookkeeping.create()
            await bookkeeping.count_run()
        except InsufficientPrivilege:
            # The book-keeping of a table that others have created may be missing or theirs. Runs
            # are not counted then, but a fence needs it.
            if fence is not None:
                raise
        if fence is not None:
            async with self.connection.transaction():
                await bookkeeping.pass_fence(self.codec.table, fence)

    def _bookkeeping(self) -> PostgresBookkeeping:
        """Return the table's book-keeping, over this connection."""
        from dagster_adjunct.resources.table_backends.postgres_bookkeeping import (
            PostgresBookkeeping,
        )

        return PostgresBookkeeping(self.connection, self._statements.schema, self._statements.table)

    async def open_idempotency_table(self, *, create: bool) -> None:
        """Check the table that stores marks, after creating it if asked to; then use it. Raises
        TableAccessError if it is missing or unsuitable.
        """
        from dagster_adjunct.resources.table_backends.postgres_statements import create_table

        schema = self._statements.schema
        casts = self._statements.casts
        key = self.codec.key
        name = write_plan.idempotency_table_name(self._statements.table, key)
        if create:
            types = (
                {part: casts[part] for part in key}
                | dict.fromkeys(COLUMNS, "text")
                | {"applied": "jsonb"}
            )
            await create_table(
                self.connection,
                schema,
                name,
                {**types, "at": "timestamp with time zone NOT NULL"},
                key,
            )
        await self._check_idempotency_table(may_be_missing=False)
        self.has_idempotency_table = True

    async def check(self, use: TableUse) -> None:
        """Raise for rights, required columns or an idempotency table that the use needs and the
        table lacks.
        """
        key = self.codec.key
        names = self.codec.names
        kinds = use.kinds
        inserts = bool(kinds & {OperationKind.PUT, OperationKind.PUT_IF_ABSENT})
        changed: set[str] = set()
        if OperationKind.UPDATE in kinds:
            changed = {root_name(name, names) for name in use.columns} & set(names)
        if OperationKind.PUT in kinds:
            changed |= set(names)
        # The key is not updated, but if there are no other columns, an upsert sets it to itself.
        updated = changed - set(key) or changed
        # Privileges, each with the column for which it is needed.
        wanted = {("SELECT", name) for name in (names if use.reads else key)}
        wanted |= {("INSERT", name) for name in names if inserts}
        wanted |= {("UPDATE", name) for name in updated}
        await self._check_rights(
            f"{self._statements.schema}.{self._statements.table}", wanted, writes=use.writes
        )
        if inserts:
            await self._check_required_columns()
        if use.writes and use.conditions:
            await self._check_idempotency_table(may_be_missing=self._declared.create)

    async def _check_required_columns(self) -> None:
        """Raise SchemaMismatchError for a column that each new row has to give, and that is not
        declared.
        """
        from dagster_adjunct.resources.table_backends.postgres_statements import REQUIRED_COLUMNS

        statements = self._statements
        cursor = await self.connection.execute(
            REQUIRED_COLUMNS, (statements.schema, statements.table)
        )
        (required,) = await cursor.fetchone() or (None,)
        check_required_columns(self.codec.table, required or (), self.codec.names)

    async def _check_rights(
        self, table: str, wanted: set[tuple[str, str]], *, writes: bool
    ) -> None:
        """Raise TableAccessError without the rights (privilege, column) on the table, or in a
        read-only session.
        """
        from dagster_adjunct.resources.table_backends.postgres_statements import MISSING_RIGHTS

        statements = self._statements
        privileges, columns = zip(*sorted(wanted), strict=True)
        named = (statements.schema, statements.table)
        cursor = await self.connection.execute(
            MISSING_RIGHTS, (list(privileges), list(columns), *named)
        )
        user, missing, read_only = await cursor.fetchone() or ("", None, False)
        if missing:
            rights = ", ".join(missing)
            problem = f"{self.codec.table}: user {user} has no right to {rights} in {table}."
            raise TableAccessError(
                problem, f"GRANT {rights} ON {table} TO {user}.", table=self.codec.table
            )
        if writes and read_only:
            problem = f"{self.codec.table}: the session is read-only."
            raise TableAccessError(problem, READ_ONLY_STEP, table=self.codec.table)

    async def _check_idempotency_table(self, *, may_be_missing: bool) -> None:
        """Raise TableAccessError if the idempotency table is missing (unless it may be), has other
        columns, or could drop rows.
        """
        from psycopg import sql

        from dagster_adjunct.resources.table_backends.postgres_statements import DROPS_ROWS

        schema = self._statements.schema
        key = self.codec.key
        name = write_plan.idempotency_table_name(self._statements.table, key)
        cursor = await self.connection.execute(
            """SELECT a.attname FROM pg_attribute a
               WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped""",
            (sql.Identifier(schema, name).as_string(self.connection),),
        )
        columns = [column for (column,) in await cursor.fetchall()]
        if may_be_missing and not columns:
            return
        write_plan.check_idempotency_columns(self.codec.table, name, list(key), columns)
        cursor = await self.connection.execute(
            DROPS_ROWS, (sql.Identifier(schema, name).as_string(self.connection),)
        )
        (reason,) = await cursor.fetchone() or (None,)
        if reason is not None:
            problem = (
                f"{self.codec.table}: {name!r}, the table for its conditions, has {reason}, which"
                " may drop rows."
            )
            raise TableAccessError(
                problem, f"Remove it from {schema}.{name}.", table=self.codec.table
            )

    async def _lock_and_read(self, operation: Operation[Any], valid: ValidEntries) -> StoredState:
        """Lock the entries' keys, and return what must be known of them to plan the operation. With
        conditions, missing rows of the idempotency table are created. Raises RejectedKeysError for
        records that can't be read, and ConcurrentChangeError.
        """
        statements = self._statements
        codec = self.codec
        keys = valid.keys
        arrays = statements.arrays(codec.key, keys)
        applied: dict[Row, Applied] = {}
        if operation.conditions:
            await self.connection.execute(statements.claim, arrays)
            cursor = await self.connection.execute(statements.applied, arrays)
            newest_by = operation.conditions.newest_by
            for place, *texts in await cursor.fetchall():
                applied[keys[place - 1]] = write_plan.applied_from_texts(
                    codec, newest_by, tuple(texts)
                )
            if len(applied) < len(keys):
                # A row was purged after `claim`: an update of it would store no mark.
                raise ConcurrentChangeError
        names = write_plan.columns_to_read(codec, operation, valid.entries)
        found = await self._read(statements.lock(names), names, keys)
        records: dict[Row, dict[str, Any]] = {}
        unreadable: dict[Row, AdjunctError] = {}
        for place, record in found.items():
            if isinstance(record, AdjunctError):
                unreadable[keys[place - 1]] = record
            else:
                records[keys[place - 1]] = record
        if unreadable:
            raise RejectedKeysError(unreadable)
        return StoredState(records, applied)

    async def _write(self, operation: Operation[Any], plan: WritePlan) -> None:
        """Execute the statements of a plan, and store its marks. Raises RejectedKeysError for
        records that were dropped.
        """
        statements = self._statements
        key = self.codec.key
        dropped: dict[Row, str] = {}  # by key, what was not done
        if plan.puts:
            unwritten = await self._put(statements.upsert, plan.puts)
            dropped |= dict.fromkeys(unwritten, "put the record")
        if plan.begins:
            uncreated = await self._put(statements.insert, plan.begins)
            if uncreated:
                arrays = statements.arrays(key, uncreated)
                others_created_some = bool(await self._places(statements.lock(()), arrays))
                if others_created_some:
                    raise ConcurrentChangeError
            dropped |= dict.fromkeys(uncreated, "create the record")
        if plan.deletes:
            keys = list(plan.deletes)
            arrays = statements.arrays(key, keys)
            if not write_plan.needs_read(operation):  # else `_lock_and_read` has locked them
                await self.connection.execute(statements.lock(()), arrays)
            left = await self._places(statements.delete, arrays)
            dropped |= dict.fromkeys(_keys_at(keys, left), "delete the record")
        for group in plan.groups():
            names = (*group.sets, *group.appends, *key)
            update = statements.update(group.sets, group.appends)
            changed = await self._places(update, statements.arrays(names, group.rows))
            unchanged = set(range(1, len(group.rows) + 1)) - changed
            keys = [row[-len(key) :] for row in group.rows]
            dropped |= dict.fromkeys(_keys_at(keys, unchanged), "update the record")
        check_dropped(self.codec.table, dropped)
        if plan.applied:
            await self._remember(plan.applied, operation.conditions.newest_by)

    async def _remember(self, applied: Mapping[Row, Applied], newest_by: str | None) -> None:
        """Store what was applied to keys in the idempotency table."""
        texts = [write_plan.applied_to_texts(self.codec, newest_by, a) for a in applied.values()]
        arrays = self._statements.arrays(self.codec.key, list(applied))
        arrays += map(format_array, zip(*texts, strict=True))
        await self.connection.execute(self._statements.remember, arrays)

    async def _places(self, statement: sql.SQL, parameters: Sequence[Any]) -> set[int]:
        """The places, from 1, that a statement returns."""
        cursor = await self.connection.execute(statement, parameters, binary=True)
        return {place for (place,) in await cursor.fetchall()}

    async def _put(self, statement: sql.SQL, records: Mapping[Row, dict[str, Any]]) -> list[Row]:
        """Write whole records; return the keys of those that were not written."""
        names = self.codec.names
        rows = [tuple(map(record.get, names)) for record in records.values()]
        unwritten = await self._places(statement, self._statements.arrays(names, rows))
        return _keys_at(list(records), unwritten)


def _keys_at(keys: Sequence[Row], places: set[int]) -> list[Row]:
    """The keys at these places, which are counted from 1."""
    return [keys[place - 1] for place in sorted(places)]


@validated
class PostgresTable(SqlTable[PostgresRequests]):
    """Read and write function for one table of a PostgreSQL server.

    Each event loop has up to `connections` connections, so that many requests run at a time.

    `dsn_env` names an environment variable with the DSN (read when connecting, never stored),
    `connect` has libpq's keywords without secrets (`service`, `host`, …), and the rest comes from
    libpq's own environment, service and password files. `key`, `columns`, `create` and
    `forget_after` are as in `SqliteTable`.
    """

    def __init__(  # noqa: PLR0913
        self,
        table: str,
        key: str | Sequence[str],
        *,
        dsn_env: str | None = None,
        connect: Mapping[str, str | int] | None = None,
        schema: str = "public",
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        connections: PositiveInt = 4,
        forget_after: Seconds | None = None,
    ) -> None:
        self.table = check_identifier("table", table)
        self.schema = check_identifier("schema", schema)
        self._label = f"PostgreSQL table {schema}.{table}"
        self._declare(table, key, columns, create=create)
        self.dsn_env = None if dsn_env is None else check_variable_name("dsn_env", dsn_env)
        self.connect = postgres_connection.check_keywords(connect or {})
        self.connections = connections
        self.forget_after = forget_after
        self._pools = PerLoop(lambda: Pool(self.connections, self._connected), Pool.finish)

    def __repr__(self) -> str:
        source = f"dsn_env={self.dsn_env!r}" if self.dsn_env else f"connect={self.connect}"
        return f"PostgresTable({self.table!r}, key={self.key}, schema={self.schema!r}, {source})"

    async def _write_entries(
        self, requests: PostgresRequests, operation: Operation[Any]
    ) -> Outcomes:
        """Write the entries, those of a repeated key in parts after each other; return their
        outcomes.
        """
        outcomes = Outcomes(len(operation))
        unsent: Problem | None = None  # of all later parts, once an entry has to be retried
        for places, part in split_repeated_keys(operation):
            if unsent is None:
                batch = stage_batch(requests.codec, part)
                of_part = None
                if batch is not None:
                    of_part = await self._write_batch(requests, part, batch)
                if of_part is None:  # row by row
                    of_part = await super()._write_entries(requests, part)
                retryable = filter(is_retryable, of_part.problems.values())
                unsent = next((problem.unsent for problem in retryable), None)
            else:
                # It would overtake the entries that are retried.
                of_part = Outcomes.all(len(part), unsent)
            outcomes = of_part if places is None else outcomes.with_retried(places, of_part)
        return outcomes

    async def _write_batch(
        self, requests: PostgresRequests, operation: Operation[Any], batch: StagedBatch
    ) -> Outcomes | None:
        """Write the batch and return its outcomes.

        Returns None, and writes nothing, if it must be written row by row to find rejected or
        missing rows.
        """
        await operation.check_fence()
        try:
            outcomes: Outcomes | None = await self._run(
                requests, requests.write_batch, operation, batch
            )
        except RunLeaseLostError:
            raise
        except AdjunctError as error:
            problem = self.problem_of(error, sent=requests.may_have_committed)
            if problem.may_pass:
                return Outcomes.all(len(operation), problem)
            return None
        if outcomes is None:
            return None
        skipped = outcomes.places(State.SKIPPED)
        if skipped and batch.shape.adds and operation.applies_late_changes:
            # The statement skips late entries entirely, also what they add. No other entry of the
            # batch has their keys, so they can be written after it.
            late = operation.with_entries(operation.entries.take(skipped))
            outcomes = outcomes.with_retried(skipped, await super()._write_entries(requests, late))
        return outcomes

    async def _check_creation(self) -> None:
        """Raise TableAccessError if the user may not create the table, or the session is
        read-only.
        """
        from dagster_adjunct.resources.table_backends.postgres_statements import MAY_CREATE

        postgres_connection.require_driver(self._label)
        settings = postgres_connection.connection_settings(self._label, self.dsn_env, self.connect)
        connection = await postgres_connection.connect_async(self._label, settings)
        try:
            with self._translated():
                cursor = await connection.execute(MAY_CREATE, {"schema": self.schema})
                found = await cursor.fetchone()
                assert found is not None  # the statement has no condition
                user, may_create, read_only = found
        finally:
            await connection.close()
        if not may_create:
            problem = f"{self._label} does not exist, and user {user} may not create it."
            step = f"GRANT CREATE ON SCHEMA {self.schema} TO {user}, or create it."
            raise TableAccessError(problem, step, table=self._label)
        if read_only:
            problem = f"{self._label} does not exist, and the session is read-only."
            raise TableAccessError(problem, READ_ONLY_STEP, table=self._label)

    async def _run(
        self, requests: PostgresRequests, request: Callable[..., Any], *arguments: Any
    ) -> Any:
        with self._translated():
            return await postgres_connection.run_cancellable(
                requests.connection, request(*arguments)
            )

    def _is_data_error(self, error: BaseException | None) -> bool:
        """Whether the data is at fault: a type, a constraint, a trigger's own error or a row
        policy.
        """
        import psycopg

        if not isinstance(error, psycopg.Error):
            return False
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
            return True
        is_raised_by_trigger = (error.sqlstate or "").startswith("P0")  # PL/pgSQL's own errors
        return is_raised_by_trigger or postgres_connection.is_against_policy(error)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of the driver in the `with` block into ours."""
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            raise postgres_connection.translate_error(error, self._label, self.address) from error

    async def _connected(self, create: bool) -> PostgresRequests:
        """Return a new connection, after checking the table's columns; `create`: a missing table is
        created. Raises TableNotFoundError, and SchemaMismatchError for unsuitable columns.
        """
        postgres_connection.require_driver(self._label)
        from dagster_adjunct.resources.table_backends import postgres_statements
        from dagster_adjunct.resources.table_backends.postgres_bookkeeping import (
            PostgresBookkeeping,
        )

        settings = postgres_connection.connection_settings(self._label, self.dsn_env, self.connect)
        self.address = postgres_connection.format_address(settings)
        connection = await postgres_connection.connect_async(self._label, settings)
        try:
            with self._translated():
                read_columns = partial(
                    postgres_statements.read_postgres_columns,
                    connection,
                    self._label,
                    self.address,
                    self.schema,
                    self.table,
                    self.key,
                    self._declared,
                )
                try:
                    stored = await read_columns()
                except TableNotFoundError:
                    if not create:
                        raise
                    types = {
                        column.name: postgres_statements.column_type(column)
                        for column in self._declared
                    }
                    await PostgresBookkeeping(
                        connection, self.schema, self.table
                    ).create_with_table(types, self.key)
                    stored = await read_columns()
            codec = RowCodec(
                self._label,
                self.key,
                stored.columns,
                check=postgres_checker,
                encode=postgres_encoder,
                decode=postgres_decoder,
            )
            statements = postgres_statements.Statements(
                self.schema, self.table, codec, stored.casts
            )
        except BaseException:
            await connection.close()
            raise
        return PostgresRequests(connection, statements, self)

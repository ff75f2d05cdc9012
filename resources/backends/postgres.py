"""`PostgresTable`: records in a table of a PostgreSQL server.

Values are PostgreSQL's own: text, numbers, boolean, timestamp with time zone (read back in UTC), date,
numeric, bytea, jsonb and arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from dagster_adjunct.resources.backends.columns import check_identifier
from dagster_adjunct.resources.backends.postgres_connection import (
    check_keywords,
    connect_async,
    connection_settings,
    format_address,
    is_data_error,
    require_driver,
    run_cancellable,
    translate_error,
)
from dagster_adjunct.resources.backends.postgres_requests import (
    Pool,
    PostgresRequests,
    create_postgres_table,
    read_columns,
)
from dagster_adjunct.resources.backends.postgres_values import (
    StagedBatch,
    postgres_decoder,
    postgres_encoder,
    split_repeated_keys,
    stage_batch,
)
from dagster_adjunct.resources.backends.store import StoreTable, check_variable_name, is_purge_due
from dagster_adjunct.resources.backends.write_plan import BisectRejected, RowCodec, validate_entries
from dagster_adjunct.resources.common import check_seconds, check_whole_number
from dagster_adjunct.resources.errors import AdjunctError, TableNotFoundError
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Outcomes, PerLoop, Problem, State
from dagster_adjunct.resources.validation import validated


@validated
class PostgresTable(StoreTable):
    """Read and write function for one table, with up to `connections` per event loop.

    That many requests run at a time; threads may share it, each with a `BlockingTable` of its own.

    `dsn_env` names an environment variable with the DSN (read when connecting, never stored), `connect` has libpq's
    keywords without secrets (`service`, `host`, …), and the rest comes from libpq's own environment, service and
    password files. `key`, `columns`, `create` and `forget_after` are as in `SqliteTable`.
    """

    appends_to_json: ClassVar[bool] = False  # for lists only

    def __init__(
        self,
        table: str,
        key: str | Sequence[str],
        *,
        dsn_env: str | None = None,
        connect: Mapping[str, str | int] | None = None,
        schema: str = "public",
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        connections: int = 4,
        forget_after: float | None = None,
    ) -> None:
        self.table = check_identifier("table", table)
        self.schema = check_identifier("schema", schema)
        self._label = f"PostgreSQL table {schema}.{table}"
        self._declare(table, key, columns, create=create)
        self.dsn_env = None if dsn_env is None else check_variable_name("dsn_env", dsn_env)
        self.connect = check_keywords(connect or {})
        self.connections, self.forget_after = connections, forget_after
        what, whole = f"PostgreSQL table {table!r} has", "a whole number, at least 1"
        check_whole_number(connections, f"{what} connections={connections!r}", whole, argument="connections")
        check_seconds(forget_after, f"{what} forget_after={forget_after!r}", argument="forget_after", none=True)
        self._place = ""
        self._open: PerLoop[Pool] = PerLoop(lambda: Pool(self.connections, self._connected), Pool.finish)

    def __repr__(self) -> str:
        source = f"dsn_env={self.dsn_env!r}" if self.dsn_env else f"connect={self.connect}"
        return f"PostgresTable({self.table!r}, key={self.key}, schema={self.schema!r}, {source})"

    async def stored_types(self) -> dict[str, str] | None:
        require_driver(self._label)
        try:
            async with self._open.here().one() as requests:
                return requests.codec.types
        except TableNotFoundError:
            if not self.create:
                raise
            return self.column_types()

    async def open(self) -> None:
        """Connect; a table to be created is created by the first write."""
        require_driver(self._label)
        pool = self._open.here()
        if not pool.is_connected:
            try:
                async with pool.one():
                    pass
            except TableNotFoundError:
                if not self.create:
                    raise

    async def close(self) -> None:
        """Close the running event loop's connections after its requests."""
        await self._open.here().close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        require_driver(self._label)
        reads, count = operation.kind is OperationKind.GET, len(operation)
        request = self._get if reads else self._write
        for has_table in (False, True):
            connected = False
            try:
                async with self._open.here().one() as requests:
                    connected = True
                    return await run_cancellable(requests.connection, request(requests, operation))
            except AdjunctError as error:
                if connected:
                    raise
                if has_table or not self.create or not isinstance(error, TableNotFoundError):
                    return Outcomes.all(count, self.problem_of(error, sent=False))
            if reads:
                break
            try:
                await self._create_table()
            except AdjunctError as error:
                return Outcomes.all(count, self.problem_of(error, sent=False))
        return Outcomes(count, [None] * count)

    async def _create_table(self) -> None:
        """Create the table unless it exists."""
        connection = await connect_async(self._label, connection_settings(self._label, self.dsn_env, self.connect))
        try:
            with self._translated():
                await create_postgres_table(connection, self.schema, self.table, self.key, self._declared)
        finally:
            await connection.close()

    async def _get(self, requests: PostgresRequests, operation: Operation[Any]) -> Outcomes:
        valid = validate_entries(requests.codec, operation)
        try:
            with self._translated():
                stored = await requests.get([entry.key for entry in valid.entries])
        except AdjunctError as error:
            return Outcomes.all(len(operation), self.problem_of(error, sent=False))
        return valid.outcomes(len(operation), stored)

    async def forget(self, older_than: float) -> int:
        """Purge what was applied to keys, including deleted ones, more than `older_than` seconds ago; return the number
        of keys.

        A message that old is applied if it arrives again.
        """
        require_driver(self._label)
        try:
            with self._translated():
                async with self._open.here().one() as requests:
                    return await requests.forget(older_than)
        except TableNotFoundError:
            if not self.create:
                raise
            return 0

    async def _write(self, requests: PostgresRequests, operation: Operation[Any]) -> Outcomes:
        outcomes = Outcomes(len(operation))
        unsent: Problem | None = None
        for places, part in split_repeated_keys(operation):
            if unsent is None:
                batch = stage_batch(requests.codec, part)
                later = None if batch is None else await self._write_batch(requests, part, batch)
                later = later or await self._write_rows(requests, part)
                unsent = next((problem.unsent for problem in later.problems.values() if problem.may_pass), None)
            else:
                later = Outcomes.all(len(part), unsent)  # it would overtake the retry
            outcomes = later if places is None else outcomes.with_retried(places, later)
        return outcomes

    async def _write_rows(self, requests: PostgresRequests, operation: Operation[Any]) -> Outcomes:
        bisect = BisectRejected(validate_entries(requests.codec, operation))
        while (part := bisect.next()) is not None:
            try:
                with self._translated():
                    bisect.done(await requests.write(operation, part))
            except AdjunctError as error:
                problem = self.problem_of(error, sent=requests.committing)  # without a commit it had no effect
                bisect.failed(problem, by_data=is_data_error(error.__cause__))
        return bisect.outcomes(len(operation))

    async def _write_batch(
        self, requests: PostgresRequests, operation: Operation[Any], batch: StagedBatch
    ) -> Outcomes | None:
        """Write the batch and return its outcomes; None, without effect, if it must be written by row to find rejected
        rows.
        """
        try:
            with self._translated():
                outcomes = await requests.write_batch(operation, batch)
        except AdjunctError as error:
            problem = self.problem_of(error, sent=requests.committing)
            return Outcomes.all(len(operation), problem) if problem.may_pass else None
        skipped = [] if outcomes is None else outcomes.places(State.SKIPPED)
        if outcomes is not None and skipped and batch.shape.adds and operation.applies_late_changes:
            # The statement skips late entries entirely. Each is the only one of its key, so they can follow it.
            late = operation.with_entries(operation.entries.take(skipped))
            outcomes = outcomes.with_retried(skipped, await self._write_rows(requests, late))
        return outcomes

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the driver's errors as ours."""
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            raise translate_error(error, self._label, self._place) from error

    async def _connected(self) -> PostgresRequests:
        from dagster_adjunct.resources.backends.postgres_statements import Statements

        settings = connection_settings(self._label, self.dsn_env, self.connect)
        self._place = format_address(settings)
        connection = await connect_async(self._label, settings)
        try:
            with self._translated():
                columns, casts = await read_columns(
                    connection, self._label, self._place, self.schema, self.table, self.key, self._declared
                )
                codec = RowCodec(self._label, self.key, columns, keep=postgres_encoder, decode=postgres_decoder)
                statements = Statements(self.schema, self.table, codec, casts)
                requests = PostgresRequests(connection, statements, create=self.create)
                if is_purge_due(f"{self._label} {self._place}", self.forget_after):
                    await requests.forget(self.forget_after or 0)
        except BaseException:
            await connection.close()
            raise
        return requests

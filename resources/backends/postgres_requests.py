"""What a `PostgresTable` sends over one connection: one transaction a request.

A transaction locks the keys that it will change in order of the key, so that writers of the same keys wait for each
other rather than deadlock: first their rows beside the table, where there are conditions, then their records. Where
that is not enough (a record begun by two at once), the server breaks the deadlock and the request may be sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.backends.applied_marks import Applied, check_newest_by, from_texts, to_texts
from dagster_adjunct.resources.backends.postgres_batches import StagedBatch
from dagster_adjunct.resources.backends.postgres_values import array_text
from dagster_adjunct.resources.backends.rows import Row, RowCodec
from dagster_adjunct.resources.backends.write_plan import Checked, Found, Plan, columns_to_read, must_look, planned
from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.tables.operation import Operation

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from dagster_adjunct.resources.backends.postgres_statements import Statements

_NOTHING: tuple[int, int, list[int]] = (0, 0, [])
_ROUNDS = 20  # of being overtaken, before the request counts as failed


class Overtaken(Exception):
    """Another has begun what this request was about to begin, or forgotten what it was about to keep; start anew."""


class _SomeMissing(Exception):
    """Updates of a batch with conditions met no record; their marks must not be kept."""


class BatchWritten(NamedTuple):
    """What became of a batch: the places of entries that met no record or did not pass; how many records began."""

    missing: list[int]
    skipped: list[int]
    defaults_put: int


class PostgresRequests:
    """Requests over one connection, which is somebody's alone meanwhile."""

    def __init__(
        self, connection: AsyncConnection[Any], codec: RowCodec, statements: Statements, casts: Mapping[str, str]
    ) -> None:
        self.connection, self.codec, self.casts, self._statements = connection, codec, casts, statements
        self.beside_open = False
        self._staging: set[str] = set()
        self.committing = False

    async def get(self, keys: Sequence[Row]) -> list[dict[str, Any] | None]:
        """The record of each key."""
        statements, names = self._statements, self.codec.names
        arrays = statements.arrays(self.codec.key, keys)
        cursor = await self.connection.execute(statements.select, arrays, binary=True)
        records: list[dict[str, Any] | None] = [None] * len(keys)
        for place, *row in await cursor.fetchall():
            records[place - 1] = self.codec.read(names, row)
        return records

    async def write(self, operation: Operation[Any], asked: Checked) -> Plan:
        """Do it all or, on an error, nothing; while `committing`, nobody knows which."""
        self.committing = False
        for _ in range(_ROUNDS):
            try:
                async with self.connection.transaction():
                    stored = await self._stored(operation, asked) if must_look(operation) else Found()
                    plan = planned(self.codec, operation, asked, stored)
                    await self._write(operation, plan)
                    self.committing = True
            except Overtaken:
                continue
            self.committing = False
            return plan
        raise TableUnavailableError(
            f"{self.codec.table}: records or their marks came and went {_ROUNDS} times while they were begun.",
            "It is tried again; if that goes on, find out who deletes them.",
            table=self.codec.table,
        )

    async def write_batch(self, batch: StagedBatch) -> BatchWritten | None:
        """Do it all or, on an error, nothing; None, and nothing, where rows are needed to tell what is missing."""
        shape = batch.shape
        check_newest_by(self.codec, shape.conditions.newest_by)
        statements = self._statements.staging(shape)
        self.committing = False
        if statements.name not in self._staging:
            await self.connection.execute(statements.settings)
            await self.connection.execute(statements.create, ())
            self._staging.add(statements.name)
        missing: list[int] = []
        try:
            async with self.connection.transaction():
                cursor = self.connection.cursor()
                async with cursor.copy(statements.copy, ()) as copy:
                    await copy.write(batch.csv)
                if not (shape.inserts or shape.conditions):
                    # In order of the key, as every request locks, and to learn which are missing.
                    await cursor.execute(statements.lock, (), binary=True)
                    present = {place for (place,) in await cursor.fetchall()}
                    missing = batch.missing(present) if len(present) < batch.rows else []
                await cursor.execute(statements.write, batch.constants, binary=True)
                written, begun, skipped = (await cursor.fetchone() or _NOTHING) if cursor.description else _NOTHING
                if shape.conditions and not shape.inserts and written + len(skipped) < batch.rows:
                    raise _SomeMissing
                self.committing = True
        except _SomeMissing:
            return None
        self.committing = False
        return BatchWritten(missing, skipped, begun)

    async def forget(self, older_than: float) -> int:
        """Remove what was applied to keys more than these seconds ago; return how many keys' it was."""
        return (await self.connection.execute(self._statements.forget, (older_than,))).rowcount

    async def _stored(self, operation: Operation[Any], asked: Checked) -> Found:
        statements, codec, keys = self._statements, self.codec, asked.keys
        arrays = statements.arrays(codec.key, keys)
        applied: dict[Row, Applied] = {}
        if operation.conditions:
            await self.connection.execute(statements.claim, arrays)
            cursor = await self.connection.execute(statements.applied, arrays)
            newest_by = operation.conditions.newest_by
            for place, *texts in await cursor.fetchall():
                applied[keys[place - 1]] = from_texts(codec, newest_by, tuple(texts))
            if len(applied) < len(keys):  # forgotten after it was claimed: what is remembered now would get lost
                raise Overtaken
        names = columns_to_read(operation, asked.entries)
        cursor = await self.connection.execute(statements.lock(names), arrays, binary=True)
        records = {keys[row[0] - 1]: codec.read(names, row[1:]) for row in await cursor.fetchall()}
        return Found(records, applied)

    async def _write(self, operation: Operation[Any], plan: Plan) -> None:
        statements, codec, execute = self._statements, self.codec, self.connection.execute
        if plan.puts:
            await execute(statements.upsert, self._whole(plan.puts))
        if plan.begins:
            begun = await execute(statements.insert, self._whole(plan.begins))
            if begun.rowcount < len(plan.begins):
                raise Overtaken
        if plan.deletes:
            arrays = statements.arrays(codec.key, list(plan.deletes))
            if not must_look(operation):
                await execute(statements.lock(()), arrays)
            await execute(statements.delete, arrays)
        for group in plan.groups():
            names = (*group.sets, *group.append, *codec.key)
            await execute(statements.update(group.sets, group.append), statements.arrays(names, group.rows))
        if plan.applied:
            newest_by = operation.conditions.newest_by
            texts = [(*key, *to_texts(codec, newest_by, applied)) for key, applied in plan.applied.items()]
            width = len(codec.key)
            arrays = statements.arrays(codec.key, texts)
            arrays += [array_text(row[place] for row in texts) for place in range(width, width + 4)]
            await execute(statements.remember, arrays)

    def _whole(self, records: dict[Row, dict[str, Any]]) -> list[Any]:
        names = self.codec.names
        return self._statements.arrays(names, [tuple(map(record.get, names)) for record in records.values()])

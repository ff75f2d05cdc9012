"""The book-keeping of a table in PostgreSQL: `<table>__adjunct_runs`, with a number for each
name (`presence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.epochs import (
    epoch_name,
    must_raise_epoch,
    no_bookkeeping_error,
)
from dagster_adjunct.resources.table_backends.postgres_statements import (
    create_table,
    has_relation,
    quote_name,
)
from dagster_adjunct.resources.table_backends.write_plan import (
    bookkeeping_table_name,
    marks_table_name,
)
from dagster_adjunct.resources.tables.presence import ID, NO_TABLE, RUNS, Presence, new_table_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from psycopg import AsyncConnection

_TYPES = {"name": "text", "value": "bigint NOT NULL"}
_TABLE_OID = "oid of the table"
_OWN_OID = "oid of this table"
"""Names of the numbers by which the server knows the table and its book-keeping: each is another
one once the table is dropped and created again.
"""


@dataclass(frozen=True, slots=True)
class PostgresBookkeeping:
    """The book-keeping of a table."""

    connection: AsyncConnection[Any]
    schema: str
    table: str

    async def create_with_table(self, types: Mapping[str, str], key: Sequence[str]) -> None:
        """Create the table and give it an id, unless it exists. Marks of an earlier one are
        deleted.

        They would make the new table skip messages that only the old one has applied.
        """
        async with self.connection.transaction():
            if not await create_table(self.connection, self.schema, self.table, types, key):
                return
            marks = marks_table_name(self.table)
            if await self._has(marks):
                await self.connection.execute(sql.SQL("DELETE FROM {}").format(self._quoted(marks)))
            await self.create()
            if bookkeeping_table_name(self.table) is not None:
                await self._store(ID, new_table_id(), "excluded.value")

    async def create(self) -> None:
        """Create the book-keeping of an existing table unless there is one."""
        name = bookkeeping_table_name(self.table)
        if name is not None:
            await create_table(self.connection, self.schema, name, _TYPES, ["name"])

    async def count_run(self) -> None:
        """Count a run of an application, or a batch, if the table has book-keeping.

        A table that has no id, or was created again, gets a new one. The oids that belong to the id
        are noted.
        """
        name = bookkeeping_table_name(self.table)
        if name is None or not await self._has(name):
            return
        async with self.connection.transaction():
            # First, as it locks the count: a run that begins at the same time waits here, and then
            # finds the id that this one has stored.
            await self._store(RUNS, 1, "b.value + 1")
            table_oid, own_oid = await self._oids(name)
            numbers = await self._numbers(name)
            is_recreated = _is_of_earlier_table(numbers, table_oid, own_oid)
            if ID not in numbers or is_recreated:
                await self._store(ID, new_table_id(), "excluded.value")
            for oid_name, oid in {_TABLE_OID: table_oid, _OWN_OID: own_oid}.items():
                if numbers.get(oid_name) != oid:
                    await self._store(oid_name, oid, "excluded.value")

    async def pass_fence(self, label: str, fence: Fence) -> None:
        """Let a write of a run pass if no later run of its application has begun; raise
        RunLeaseLostError if one has. A smaller epoch becomes that of this run.

        It must be the first statement of the write's transaction. The shared lock on the epoch lets
        writes run beside each other, and makes a later run, which raises the epoch, wait until they
        have ended. A write that waits for the later run's transaction reads the epoch again after
        it, also under READ COMMITTED.
        """
        name = bookkeeping_table_name(self.table)
        if name is None:
            raise no_bookkeeping_error(label, name, "name and value")
        query = f"SELECT value FROM {quote_name(self.schema, name)} WHERE name = %s FOR SHARE"
        cursor = await self.connection.execute(sql.SQL(query), (epoch_name(fence),))
        (known,) = await cursor.fetchone() or (None,)
        if must_raise_epoch(label, known, fence):
            raised = await self._store(
                epoch_name(fence), fence.epoch, "greatest(b.value, excluded.value)"
            )
            must_raise_epoch(label, raised, fence)  # raises if a later run was faster

    async def presence(self) -> Presence:
        """Return what the server says about the table."""
        name = bookkeeping_table_name(self.table)
        table = self._text(self.table)
        marks = self._text(marks_table_name(self.table))
        own = self._text(name or self.table)  # without book-keeping, what it finds is not used
        cursor = await self.connection.execute(
            """SELECT to_regclass(%s) IS NOT NULL, to_regclass(%s) IS NOT NULL,
                 pg_relation_filenode(to_regclass(%s))::text,
                 has_table_privilege(to_regclass(%s), 'SELECT'),
                 has_table_privilege(to_regclass(%s), 'SELECT'),
                 to_regclass(%s)::oid::bigint, to_regclass(%s)::oid::bigint""",
            (table, marks, table, table, own, table, own),
        )
        found = await cursor.fetchone()
        assert found is not None
        exists, has_marks, file, may_read, may_read_own, table_oid, own_oid = found
        if not exists:
            return NO_TABLE
        numbers = await self._numbers(name) if may_read_own and name is not None else {}
        if _is_of_earlier_table(numbers, table_oid, own_oid):
            del numbers[ID]
        rows = None
        if may_read:
            query = sql.SQL("SELECT EXISTS (SELECT FROM {})").format(self._quoted(self.table))
            row = await (await self.connection.execute(query)).fetchone()
            assert row is not None
            (rows,) = row
        return Presence(
            exists=True,
            id=str(numbers[ID]) if ID in numbers else None,
            runs=numbers.get(RUNS),
            rows=rows,
            file=file,
            marks=has_marks,
        )

    async def _oids(self, name: str) -> tuple[int, int]:
        """Return the oids of the table and of its book-keeping `name`."""
        query = "SELECT to_regclass(%s)::oid::bigint, to_regclass(%s)::oid::bigint"
        tables = (self._text(self.table), self._text(name))
        oids = await (await self.connection.execute(query, tables)).fetchone()
        assert oids is not None
        table_oid, own_oid = oids
        return table_oid, own_oid

    async def _numbers(self, name: str) -> dict[str, int]:
        """Return all numbers in the book-keeping `name`, by their names."""
        query = sql.SQL("SELECT name, value FROM {}").format(self._quoted(name))
        return dict(await (await self.connection.execute(query)).fetchall())

    async def _store(self, name: str, value: int, replacement: str) -> int:
        """Store a number, and return it; if there is one, it becomes `replacement`, which is
        SQL.
        """
        table = bookkeeping_table_name(self.table)
        assert table is not None  # callers have checked it
        insert = f"INSERT INTO {quote_name(self.schema, table)} AS b (name, value) VALUES (%s, %s) "
        update = f"ON CONFLICT (name) DO UPDATE SET value = {replacement} RETURNING value"
        cursor = await self.connection.execute(sql.SQL(insert + update), (name, value))
        row = await cursor.fetchone()
        assert row is not None  # it was inserted or updated
        (stored,) = row
        return int(stored)

    async def _has(self, table: str) -> bool:
        """Whether the schema has this table."""
        return await has_relation(self.connection, self.schema, table)

    def _quoted(self, table: str) -> sql.Identifier:
        """Return a table of the schema as an SQL identifier."""
        return sql.Identifier(self.schema, table)

    def _text(self, table: str) -> str:
        """Return a table of the schema as text, for to_regclass."""
        return self._quoted(table).as_string(self.connection)


def _is_of_earlier_table(numbers: Mapping[str, int], table_oid: int, own_oid: int) -> bool:
    """Whether the table alone was dropped and created again, perhaps from a backup: its
    book-keeping is the same one, but has noted another oid of the table.

    If both were restored, their counts of runs say whether they are older.
    """
    is_same = numbers.get(_OWN_OID) == own_oid
    return ID in numbers and is_same and numbers.get(_TABLE_OID) != table_oid

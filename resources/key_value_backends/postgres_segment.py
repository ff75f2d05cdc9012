"""`PostgresSegment`: one partition of a key-value table in a PostgreSQL schema."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from dagster_adjunct.resources.backends.postgres_connection import READ_ONLY, translate_error
from dagster_adjunct.resources.errors import AdjunctError, KeyValueTableNotFoundError, TableUnavailableError
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    Pause,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    deleted_table_error,
    pause_blocking,
    sealed_table_error,
)
from dagster_adjunct.resources.key_value_backends.postgres_wire import (
    PostgresWire,
    UnreadAnswer,
    WirePool,
    encode_bytea_array,
    encode_int4,
)
from dagster_adjunct.resources.key_value_backends.sqlite import sql_table_name

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

# The two tables of a PostgreSQL schema that are a key-value table, and the statements over them.
#
# `kvt_<incarnation>` has the entries of all partitions. An address is the partition in four bytes and the table key;
# were they two columns, a plan could search for the partition alone and look at all of its keys.
# `kvt_<incarnation>_tokens` has a row for each recent request, written in the request's own transaction: `applied` is
# true where it was applied, and false where a repeat found its condition not to hold, which keeps a late first
# attempt from being applied still.
#
# Every statement sees what was committed before it began (READ COMMITTED), and waits for whoever has the rows that it
# would change. What that means for each is said beside it.


SEALED = "KV001"
"""The SQLSTATE of a write to a sealed table; classes that begin with I to Z are free for use."""
ENTRY = "substr(address, 5), version, value"
BARE = "substr(address, 5), version, NULL::bytea"
PAGE_BYTES = 16 << 20
"""Bytes of values after which a page of entries of unknown size ends."""
FORGETTING_BLOCKS = 64
"""Blocks of the tokens' table that are looked through at a time: about 8,000 requests, after each thousand."""


def quoted(schema: str, name: str) -> str:
    """Return schema.name as it stands in statements."""
    return sql.Identifier(schema, name).as_string(None)


@dataclass(frozen=True, slots=True)
class PostgresStatements:
    """What is sent about one table. $1 is the address, or all of them. Rows are the table key, version and value.

    A change of one key is one statement, which writes the request's token too. `put` and `remove` write it first, as
    they always happen: a repeat waits for them there. The others write it, and report one row, only if they happened.
    """

    name: str
    rows: str  # the same with its schema, quoted
    get: str
    get_version: str
    get_many: str
    get_many_versions: str
    put: str
    insert: str
    replace: str
    remove: str
    remove_version: str
    batch: str
    batch_again: str
    hold: str
    claim: str
    forget: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(schema: str, table: TableId) -> PostgresStatements:
        """Return the statements over the table of this incarnation."""
        name = sql_table_name(table)
        rows, tokens = quoted(schema, name), quoted(schema, f"{name}_tokens")
        columns = "(address, version, value)"
        first = f"WITH token AS (INSERT INTO {tokens} (token) VALUES ($2::bytea) RETURNING 1)"
        then = f"INSERT INTO {tokens} (token) SELECT $2::bytea FROM done"
        return PostgresStatements(
            name,
            rows,
            get=f"SELECT {ENTRY} FROM {rows} WHERE address = $1",
            get_version=f"SELECT {BARE} FROM {rows} WHERE address = $1",
            get_many=f"SELECT {ENTRY} FROM {rows} WHERE address = ANY ($1)",
            get_many_versions=f"SELECT {BARE} FROM {rows} WHERE address = ANY ($1)",
            # Of two at once the later has the last word.
            put=f"{first} INSERT INTO {rows} {columns} SELECT $1::bytea, $3::bytea, $4::bytea FROM token "
            "ON CONFLICT (address) DO UPDATE SET version = excluded.version, value = excluded.value",
            # Waits for one that is inserting or removing the same key; what that one came to decides.
            insert=f"WITH done AS (INSERT INTO {rows} {columns} VALUES ($1, $3, $4) ON CONFLICT DO NOTHING "
            f"RETURNING 1) {then}",
            # Waits for one that is changing the key, then looks at the version again.
            replace=f"WITH done AS (UPDATE {rows} SET version = $3, value = $4 WHERE address = $1 AND version = $5 "
            f"RETURNING 1) {then}",
            # A key that came in after the statement began stays: then the removal was before it.
            remove=f"{first} DELETE FROM {rows} USING token WHERE address = $1",
            remove_version=f"WITH done AS (DELETE FROM {rows} WHERE address = $1 AND version = $3 RETURNING 1) {then}",
            batch=_batch(rows, f"INSERT INTO {tokens} (token) SELECT $5::bytea WHERE EXISTS (SELECT FROM fine)"),
            batch_again=_batch(
                rows, f"UPDATE {tokens} SET applied = true WHERE token = $5::bytea AND EXISTS (SELECT FROM fine)"
            ),
            # As a batch does it: those that are there in their order, then the others in theirs.
            hold=f"WITH locked AS MATERIALIZED (SELECT address FROM {rows} WHERE address = ANY ($1) ORDER BY address "
            f"FOR UPDATE) INSERT INTO {rows} AS t {columns} SELECT held, ''::bytea, ''::bytea "
            "FROM unnest($1::bytea[]) AS held WHERE held NOT IN (SELECT address FROM locked) ORDER BY held "
            "ON CONFLICT (address) DO UPDATE SET version = t.version",
            # Waits for an attempt that has written its token; one that has not can't write it any more.
            claim=f"INSERT INTO {tokens} AS t (token, applied) VALUES ($1, false) "
            "ON CONFLICT (token) DO UPDATE SET applied = t.applied RETURNING applied",
            forget=_forget(tokens),
        )

    def page(self, values: bool, guarded: bool) -> str:
        """Return the query for the first $3 entries from the address $1 on and before $2.

        Where it is `guarded`, no further entry is read behind PAGE_BYTES of values.
        """
        range_ = f"FROM {self.rows} WHERE address >= $1 AND address < $2 ORDER BY address LIMIT $3::int"
        if not guarded:
            return f"SELECT {ENTRY if values else BARE} {range_}"
        # The sizes are known without taking a value apart.
        sizes = "sum(octet_length(value)) OVER (ORDER BY address ROWS UNBOUNDED PRECEDING) - octet_length(value)"
        return (
            f"SELECT {ENTRY} FROM (SELECT address, version, value, {sizes} AS before {range_}) AS part "
            f"WHERE before < {PAGE_BYTES} ORDER BY address"
        )


def _forget(tokens: str) -> str:
    """Return the statement that forgets the requests that are older than so many seconds, in some blocks of the table.

    Which blocks is left to chance. An index of times would find all that is old, and cost each write a tenth more.
    """
    blocks = f"(pg_relation_size({sql.Literal(tokens).as_string(None)}) / current_setting('block_size')::int)"
    # From before the first block on, so that those at both ends have the same chance as all others.
    first = f"random() * ({blocks} + {FORGETTING_BLOCKS}) - {FORGETTING_BLOCKS}"
    return (
        f"DELETE FROM {tokens} WHERE ctid = ANY (ARRAY(WITH part AS MATERIALIZED (SELECT "
        f"greatest(least({first}, {blocks} - {FORGETTING_BLOCKS}), 0)::bigint AS first) SELECT ctid FROM {tokens} "
        "WHERE ctid >= (SELECT format('(%s,0)', first)::tid FROM part) "
        f"AND ctid < (SELECT format('(%s,0)', first + {FORGETTING_BLOCKS})::tid FROM part) "
        "AND at < now() - interval '1 second' * {} FOR UPDATE SKIP LOCKED))"
    )


def _batch(rows: str, token: str) -> str:
    """Return the statement that applies changes of several keys, or none of them, and returns the place of each whose
    condition failed. $1 to $4 are addresses, values, versions and what is expected; '' is "no such key". What has the
    version '' is only looked at: it is locked, and stays as it is.

    The keys that are there are locked in their order, so that those who change the same ones wait rather than deadlock;
    what is locked is the newest, and stays so until the commit. A key that came in after the statement began makes the
    insertion fail, and with it the statement, which is then sent again. Only for keys that are to be removed and were
    not there, while others are changed, nothing would say so: nothing is applied then, and their places are returned
    negative. Then all keys are made and locked first, by `hold`, with a version that is empty.
    """
    one = f"{rows}.address = ANY ($1) AND {rows}.address = seen.address AND EXISTS (SELECT FROM fine)"
    return f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[]) WITH ORDINALITY
        AS a (address, value, version, expected, place)
), locked AS MATERIALIZED (
    SELECT address, version FROM {rows} WHERE address = ANY ($1) ORDER BY address FOR UPDATE
), seen AS MATERIALIZED (
    SELECT asked.*, locked.version AS found FROM asked LEFT JOIN locked USING (address)
), refused AS MATERIALIZED (
    SELECT place FROM seen WHERE expected <> coalesce(found, ''::bytea)
), loose AS MATERIALIZED (
    SELECT place FROM seen WHERE found IS NULL AND value IS NULL
        AND EXISTS (SELECT FROM seen WHERE found IS NOT NULL OR value IS NOT NULL)
), fine AS MATERIALIZED (
    SELECT WHERE NOT EXISTS (SELECT FROM refused) AND NOT EXISTS (SELECT FROM loose)
), noted AS ({token}
), removed AS (
    DELETE FROM {rows} USING seen WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NULL
        AND (seen.version <> '' OR seen.found = '')
), updated AS (
    UPDATE {rows} SET version = seen.version, value = seen.value FROM seen
    WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NOT NULL
), inserted AS (
    INSERT INTO {rows} (address, version, value) SELECT address, version, value FROM seen
    WHERE found IS NULL AND value IS NOT NULL AND EXISTS (SELECT FROM fine) ORDER BY address
)
SELECT place FROM refused
UNION ALL SELECT - place FROM loose WHERE NOT EXISTS (SELECT FROM refused)"""


# `PostgresPages`: the pages of an iteration, of which the server prepares one while the one before is used.
#
# Client and server would else work by turns. A page that was asked for holds no connection of the pool: its answer
# waits in the wire, for whoever uses that next. So an iteration may be left at any time, and others never wait for
# its end.


AHEAD_BYTES = 256 << 10
"""Bytes that a page asked for ahead may have, by the page before: a server that has to wait until somebody reads them
would hold its lock on the table meanwhile."""
_SAMPLED = 32  # entries of a page for one whose size is looked at
_OF_ROW = 50  # bytes of a row on the wire besides its key and value


class PageQuery(NamedTuple):
    """What is sent to the server for a page."""

    statement: str
    parameters: Sequence[bytes]


class _Asked(NamedTuple):
    """A page that was asked for ahead."""

    within: KeyRange
    limit: int
    values: bool
    unread: UnreadAnswer


class PostgresPages:
    """Reads pages of one partition. `query` makes what is sent for a page, `seen` is told each."""

    def __init__(
        self,
        pool: Callable[[], WirePool],
        errors: PostgresSegmentErrors,
        query: Callable[[KeyRange, int, bool], PageQuery],
        seen: Callable[[StoredPage, bool], None],
    ) -> None:
        self._pool, self._errors, self._query, self._seen = pool, errors, query, seen
        self._entry_bytes: float | None = None  # on the average of the last page
        self._asked: _Asked | None = None

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return a page as `TableSegment.page` does; ask for the next one, if this is not the first."""
        asked, self._asked = self._asked, None
        if asked is not None and asked[:3] != (within, limit, values):
            asked = None
        pool = self._pool()
        wire = (
            asked.unread.wire if asked is not None and await pool.take_again(asked.unread.wire) else await pool.take()
        )
        try:
            answer = await wire.read(asked.unread) if asked is not None else None
            if answer is None:
                answer = await wire.ask(*self._query(within, limit, values))
            await self._ask_ahead(wire, answer, within, limit, values)
            rows = wire.rows(answer, tuple)
            # Fewer than were asked for are all, unless their values have filled the page.
            is_last = len(rows) < limit and (not values or sum(len(value) for _, _, value in rows) < PAGE_BYTES)
            page = StoredPage.of(rows, is_last=is_last)
        except psycopg.Error as error:
            raise await self._errors.met(error, wire) from error
        finally:
            await pool.give(wire)
        if page:
            self._seen(page, values)
            some = range(0, len(page), _SAMPLED)
            size = sum(len(page.keys[at]) + len(page.values[at] or b"") for at in some)
            self._entry_bytes = size / len(some) + _OF_ROW
        return page

    async def _ask_ahead(
        self, wire: PostgresWire, answer: PGresult, within: KeyRange, limit: int, values: bool
    ) -> None:
        """Ask for what is behind a full page, before its rows are taken apart."""
        small = self._entry_bytes is not None and self._entry_bytes * limit <= AHEAD_BYTES
        if not small or answer.ntuples < limit:
            return
        last = answer.get_value(limit - 1, 0)
        assert last is not None
        behind = within.after(last)
        with suppress(psycopg.Error):  # which the next page meets
            unread = await wire.ask_ahead(*self._query(behind, limit, values))
            self._asked = _Asked(behind, limit, values, unread)


_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_NOT_THERE = ("42P01", "3F000")
_GIVEN_UP = "57014"  # a time limit of the server's
_DUPLICATE = "23505"


def had_no_effect(error: psycopg.Error, table: str) -> bool:
    """Tell whether others came between, so that a request did nothing and may be sent again at once."""
    return error.sqlstate in _CONFLICTS or (error.sqlstate == _DUPLICATE and error.diag.table_name == table)


@dataclass(frozen=True, slots=True)
class PostgresSegmentErrors:
    """Makes errors about one table; `label` names it and `place` tells its server."""

    table: TableId
    label: str
    place: Callable[[], str]

    async def met(self, error: psycopg.Error, wire: PostgresWire) -> AdjunctError:
        """Return what an error that a request met means; a connection that is of no use any more is closed."""
        state, words = error.sqlstate, " ".join(str(error).split())
        cut = state is None or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
        if cut or state == READ_ONLY:  # a session keeps the setting that it began with
            await wire.close()
        if state == SEALED:
            return sealed_table_error(self.table, self.label)
        if state in _NOT_THERE:
            return self.not_found()
        # The only other row that may be there already is the token, where a repeat of this very request has taken it.
        if (cut and wire.may_stand) or state == _DUPLICATE:
            return ReplyLostError(
                f"{self.label} at {self.place()}: the answer to a write was lost ({words}).",
                "It is found out whether it happened; if that goes on, look at the server and the network.",
            )
        if cut or state == _GIVEN_UP:
            return TableUnavailableError(
                f"{self.label} at {self.place()} does not answer, or not now ({words}).",
                "It is tried again; if that goes on, look at the server's log, or for long transactions.",
                table=self.label,
            )
        return self.of_schema(error)

    def of_schema(self, error: psycopg.Error) -> AdjunctError:
        """Return what an error means where nothing has happened."""
        return translate_error(error, self.label, self.place())

    def not_found(self) -> KeyValueTableNotFoundError:
        """Return the error of a table that is not there (any more)."""
        return deleted_table_error(self.table, f"{self.label} at {self.place()}")


_ROUNDS = 50  # of being overtaken, before the request counts as failed
_PAUSE = 0.005  # seconds at most, between them
_KEYS_AT_ONCE = 50_000
WRITES_BETWEEN_FORGETTING = 1000
"""Writes for each of which old tokens are forgotten once, on the average of all processes."""

_KEY = itemgetter(0)

R = TypeVar("R")
Refused = dict[int, bytes | None]
_entry: Callable[[Sequence[Any]], StoredEntry] = partial(tuple.__new__, StoredEntry)


class PostgresSegment:
    """Requests to one partition, over connections that all segments of the backend share: in an event loop or, where
    it never `waits`, in all threads."""

    def __init__(
        self,
        pool: Callable[[], WirePool],
        statements: PostgresStatements,
        partition: int,
        limits: SegmentLimits,
        errors: PostgresSegmentErrors,
        kept: float,
        *,
        waits: bool,
    ) -> None:
        self.limits, self.waits = limits, waits
        self._pause: Pause = asyncio.sleep if waits else pause_blocking
        self._pool, self._statements, self._errors = pool, statements, errors
        self._prefix, self._end = partition.to_bytes(4, "big"), (partition + 1).to_bytes(4, "big")
        self._forget = statements.forget.format(round(kept)).encode()
        self._value_bytes: float | None = None  # on the average of the last page

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        write = self._again if repeated else self._one if len(changes) == 1 else self._batch
        for _ in range(_ROUNDS):
            refused = await self._attempt(write, changes, token)
            if refused:
                raise ConditionsFailed(refused)
            if refused is not None:
                return
            await self._pause(random.random() * _PAUSE)
        raise TableUnavailableError(
            f"{self._errors.label}: others changed the same keys {_ROUNDS} times while they were written.",
            "It is tried again; if that goes on, let fewer write the same keys.",
            table=self._errors.label,
        )

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        sql = self._statements
        if len(keys) == 1:
            one = await self._read(sql.get if values else sql.get_version, [self._prefix + keys[0]], _entry)
            return [one[0] if one else None]
        entries: dict[bytes, StoredEntry] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = self._addresses(keys if len(keys) <= _KEYS_AT_ONCE else keys[start : start + _KEYS_AT_ONCE])
            query = sql.get_many if values else sql.get_many_versions
            rows: list[tuple[Any, ...]] = await self._read(query, [part], tuple)
            # Faster than to have each row made an entry when it is read.
            entries.update(zip(map(_KEY, rows), map(tuple.__new__, repeat(StoredEntry), rows), strict=True))
        return list(map(entries.get, keys))

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        return await self.prefetching_reader().page(within, limit, values=values)

    def prefetching_reader(self) -> PostgresPages:
        return PostgresPages(self._pool, self._errors, self._query, self._seen)

    async def close(self) -> None:
        """Close these connections, for all tables of the same backend."""
        await self._pool().close()

    def _query(self, within: KeyRange, limit: int, values: bool) -> PageQuery:
        # Where the values are small, as they were last, their sizes are not added up, which takes as long as the rest.
        guarded = values and (self._value_bytes is None or self._value_bytes * limit > PAGE_BYTES)
        ends = self._end if within.end is None else self._prefix + within.end
        parameters = [self._prefix + within.start, ends, encode_int4(min(limit, 2**31 - 1))]
        return PageQuery(self._statements.page(values, guarded), parameters)

    def _seen(self, page: StoredPage, values: bool) -> None:
        if values:
            some = page.values[::_SAMPLED]
            self._value_bytes = sum(len(value or b"") for value in some) / len(some)

    async def _read(self, query: str, parameters: Sequence[bytes], make: Callable[[Sequence[Any]], R]) -> list[R]:
        pool = self._pool()
        wire = await pool.take()
        try:
            return wire.rows(await wire.ask(query, parameters), make)
        except psycopg.Error as error:
            raise await self._errors.met(error, wire) from error
        finally:
            await pool.give(wire)

    async def _attempt(
        self,
        write: Callable[[PostgresWire, Sequence[SegmentChange], bytes], Awaitable[Refused | None]],
        changes: Sequence[SegmentChange],
        token: bytes,
    ) -> Refused | None:
        """Return what refused the changes, which is nothing where they are done; None where others came between."""
        pool = self._pool()
        wire = await pool.take()
        try:
            if random.random() * WRITES_BETWEEN_FORGETTING < 1:
                await wire.tell(self._forget)
            return await write(wire, changes, token)
        except psycopg.Error as error:
            if had_no_effect(error, self._statements.name):
                return None
            raise await self._errors.met(error, wire) from error
        finally:
            await pool.give(wire)

    async def _one(self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes) -> Refused | None:
        """Apply a change of one key in one statement."""
        sql, (change,) = self._statements, changes
        key, value, version, expected, is_guard = change
        if value is None and (is_guard or expected is ABSENT):
            return await self._batch(wire, changes, token)
        parameters = [self._prefix + key, token]
        if value is None:
            statement = sql.remove if expected is ANYTHING else sql.remove_version
        else:
            statement = sql.put if expected is ANYTHING else sql.insert if expected is ABSENT else sql.replace
            parameters += (version, value)
        if isinstance(expected, bytes):
            parameters.append(expected)
        answer = await wire.ask(statement, parameters, commits=True)
        if answer.command_tuples or expected is ANYTHING:
            return {}
        rows = wire.rows(await wire.ask(sql.get_version, parameters[:1]), _entry)
        current = rows[0].version if rows else None
        # Where the condition holds by now it did not a moment ago, but nobody could be told why.
        return None if current == (None if expected is ABSENT else expected) else {0: current}

    async def _batch(self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes) -> Refused | None:
        """Apply changes of several keys in one statement; in a transaction where keys have to be held first."""
        parameters = self._arrays(changes, token)
        answer = await wire.ask(self._statements.batch, parameters, commits=True)
        if not answer.ntuples:
            return {}
        _, loose = _outcome(wire.rows(answer, tuple))
        if not loose:
            return await self._refused(wire, changes)
        return await self._in_transaction(wire, changes, self._statements.batch, parameters, hold=True)

    async def _again(self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes) -> Refused | None:
        """Apply changes whose earlier attempt has not been applied; from here on it can't be any more."""
        parameters = self._arrays(changes, token)
        return await self._in_transaction(wire, changes, self._statements.batch_again, parameters, claim=token)

    async def _in_transaction(
        self,
        wire: PostgresWire,
        changes: Sequence[SegmentChange],
        statement: str,
        parameters: list[bytes | None],
        *,
        hold: bool = False,
        claim: bytes | None = None,
    ) -> Refused | None:
        """Apply changes, unless the token that is claimed was applied; `hold` all keys first, if need be."""
        await wire.tell(b"BEGIN")
        try:
            if claim is not None:
                ((applied,),) = wire.rows(await wire.ask(self._statements.claim, [claim]), tuple)
                if applied:
                    await wire.undo()
                    return {}
                await wire.tell(b"SAVEPOINT claimed")
            if not hold:
                refused, hold = _outcome(wire.rows(await wire.ask(statement, parameters), tuple))
            if hold:
                await wire.ask(self._statements.hold, parameters[:1])
                refused, _ = _outcome(wire.rows(await wire.ask(statement, parameters), tuple))
            if refused and claim is None:
                await wire.undo()
            else:
                if refused:  # what was held goes, and the claim stays: an attempt that comes late is not applied
                    await wire.tell(b"ROLLBACK TO claimed")
                await wire.tell(b"COMMIT", commits=not refused)
        except BaseException:
            may_stand = wire.may_stand
            await wire.undo()
            wire.may_stand = may_stand
            raise
        return await self._refused(wire, changes) if refused else {}

    async def _refused(self, wire: PostgresWire, changes: Sequence[SegmentChange]) -> Refused | None:
        """Return what refuses changes of which nothing was applied; None where, by now, nothing does.

        The batch itself can't tell: a key that came in while it waited for another one counted as missing.
        """
        keys = self._addresses([change.key for change in changes])
        rows = wire.rows(await wire.ask(self._statements.get_many_versions, [keys]), _entry)
        current = {entry.key: entry.version for entry in rows}
        refused: Refused = {}
        for place, (key, _, _, expected, _) in enumerate(changes):
            if expected is not ANYTHING and current.get(key) != (None if expected is ABSENT else expected):
                refused[place] = current.get(key)
        return refused or None

    def _addresses(self, keys: Sequence[bytes]) -> bytes:
        return encode_bytea_array(keys, self._prefix)

    def _arrays(self, changes: Sequence[SegmentChange], token: bytes) -> list[bytes | None]:
        expected = [
            None if change.expected is ANYTHING else b"" if change.expected is ABSENT else change.expected
            for change in changes
        ]
        addresses = self._addresses([change.key for change in changes])
        values = encode_bytea_array([change.value for change in changes])
        versions = encode_bytea_array([b"" if change.is_guard else change.version for change in changes])
        return [addresses, values, versions, encode_bytea_array(expected), token]


def _outcome(rows: list[tuple[Any, ...]]) -> tuple[bool, bool]:
    """Return whether the conditions of a batch refuse it, and whether keys have to be held first."""
    return any(place > 0 for (place,) in rows), any(place < 0 for (place,) in rows)

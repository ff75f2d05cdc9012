"""`PostgresSegment`: one partition of a key-value table in a PostgreSQL schema."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from dagster_adjunct.resources.errors import (
    AdjunctError,
    KeyValueTableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    Failing,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    StoredEntry,
    StoredPage,
    TableId,
    deleted_table_error,
    failed_conditions,
    pause,
    sealed_table_error,
)
from dagster_adjunct.resources.key_value_backends import postgres_wire
from dagster_adjunct.resources.key_value_backends.postgres_wire import (
    PostgresWire,
    UnreadAnswer,
    WirePool,
)
from dagster_adjunct.resources.key_value_backends.sqlite import sql_table_name
from dagster_adjunct.resources.table_backends.postgres_connection import READ_ONLY, translate_error

SEALED = "KV001"
"""The SQLSTATE of a write to a sealed table; classes that start with I to Z are free for use."""
ENTRY = "substr(address, 5), version, value"
ENTRY_WITHOUT_VALUE = "substr(address, 5), version, NULL::bytea"
PAGE_BYTES = 16 << 20
"""Bytes of values after which a page of entries of unknown size ends."""
PRUNED_BLOCKS = 64
"""Blocks of the tokens' table that are pruned at a time: about 8,000 tokens, once in
WRITES_BETWEEN_PRUNING writes.
"""


class PostgresStatements:
    """The SQL statements for the two tables of a key-value table.

    `kvt_<incarnation>` has the entries of all partitions. An address is the partition in four bytes
    and the table key: with two columns, a plan could search for the partition alone and look at all
    of its keys. `kvt_<incarnation>_tokens` has a row for each recent request, written in the
    transaction of the request. `applied` is true if the request was applied. It is false if a
    repeat found that a condition does not hold; this row keeps a late first attempt from being
    applied.

    $1 is the address, or all of them. Result rows are the table key, version and value. A change of
    one key is one statement, which writes the request's token too. `put` and `remove` have no
    condition: they write the token first, so that a repeat waits for them there. The others write
    it, and report one row, only if their condition holds.

    Every statement sees what was committed before it began (READ COMMITTED), and waits for whoever
    has locked the rows that it would change.
    """

    def __init__(self, schema: str, table: TableId) -> None:
        self.name = name = sql_table_name(table)
        self.rows = rows = sql.Identifier(schema, name).as_string(None)
        tokens = sql.Identifier(schema, f"{name}_tokens").as_string(None)
        columns = "(address, version, value)"
        token_first = f"WITH token AS (INSERT INTO {tokens} (token) VALUES ($2::bytea) RETURNING 1)"
        token_then = f"INSERT INTO {tokens} (token) SELECT $2::bytea FROM done"
        self.get = f"SELECT {ENTRY} FROM {rows} WHERE address = $1"
        self.get_version = f"SELECT {ENTRY_WITHOUT_VALUE} FROM {rows} WHERE address = $1"
        self.get_many = f"SELECT {ENTRY} FROM {rows} WHERE address = ANY ($1)"
        self.get_many_versions = (
            f"SELECT {ENTRY_WITHOUT_VALUE} FROM {rows} WHERE address = ANY ($1)"
        )
        # The later of two concurrent writes wins.
        self.put = (
            f"{token_first} INSERT INTO {rows} {columns} SELECT $1::bytea, $3::bytea, $4::bytea"
            " FROM token ON CONFLICT (address) DO UPDATE SET version = excluded.version, value ="
            " excluded.value"
        )
        # Waits for a concurrent insertion or removal of the key, whose outcome decides.
        self.insert = (
            f"WITH done AS (INSERT INTO {rows} {columns} VALUES ($1, $3, $4) ON CONFLICT DO NOTHING"
            f" RETURNING 1) {token_then}"
        )
        # Waits for a concurrent change of the key, then checks the version again.
        self.replace = (
            f"WITH done AS (UPDATE {rows} SET version = $3, value = $4 WHERE address = $1 AND"
            f" version = $5 RETURNING 1) {token_then}"
        )
        # Does not remove a key inserted after the statement began, as if the removal had come
        # first.
        self.remove = f"{token_first} DELETE FROM {rows} USING token WHERE address = $1"
        self.remove_version = (
            f"WITH done AS (DELETE FROM {rows} WHERE address = $1 AND version = $3 RETURNING 1)"
            f" {token_then}"
        )
        self.batch = _batch(
            rows, f"INSERT INTO {tokens} (token) SELECT $5::bytea WHERE EXISTS (SELECT FROM fine)"
        )
        self.batch_again = _batch(
            rows,
            f"UPDATE {tokens} SET applied = true WHERE token = $5::bytea AND EXISTS (SELECT FROM"
            " fine)",
        )
        # Locks in the order in which batches lock: first the existing keys, sorted, then the
        # missing ones, sorted.
        self.lock = (
            f"WITH locked AS MATERIALIZED (SELECT address FROM {rows} WHERE address = ANY ($1)"
            f" ORDER BY address FOR UPDATE) INSERT INTO {rows} AS t {columns} SELECT wanted,"
            " ''::bytea, ''::bytea FROM unnest($1::bytea[]) AS wanted WHERE wanted NOT IN (SELECT"
            " address FROM locked) ORDER BY wanted ON CONFLICT (address) DO UPDATE SET version ="
            " t.version"
        )
        # Waits for an earlier attempt that has written the token. One that has not will fail,
        # because the token is taken.
        self.claim = (
            f"INSERT INTO {tokens} AS t (token, applied) VALUES ($1, false) "
            "ON CONFLICT (token) DO UPDATE SET applied = t.applied RETURNING applied"
        )
        self.prune = _prune(tokens)

    def page(self, values: bool, guarded: bool) -> str:
        """Return the query for the first $3 entries from address $1 up to but not including $2.

        If it is `guarded`, it ends with the entry at which the values reach PAGE_BYTES.
        """
        range_ = (
            f"FROM {self.rows} WHERE address >= $1 AND address < $2 ORDER BY address LIMIT $3::int"
        )
        if not guarded:
            return f"SELECT {ENTRY if values else ENTRY_WITHOUT_VALUE} {range_}"
        # Sizes are known without decompressing values.
        sizes = (
            "sum(octet_length(value)) OVER (ORDER BY address ROWS UNBOUNDED PRECEDING) -"
            " octet_length(value)"
        )
        return (
            f"SELECT {ENTRY} FROM (SELECT address, version, value, {sizes} AS before {range_}) AS"
            f" part WHERE before < {PAGE_BYTES} ORDER BY address"
        )


def _prune(tokens: str) -> str:
    """Return the statement that deletes old tokens in random blocks of their table; `{}` in it is
    the age in seconds.

    An index of times would find all old tokens, but add a tenth to the cost of each write.
    """
    blocks = (
        f"(pg_relation_size({sql.Literal(tokens).as_string(None)}) /"
        " current_setting('block_size')::int)"
    )
    # The range may begin before the first block, so that blocks at both ends are as likely as all
    # others.
    first = f"random() * ({blocks} + {PRUNED_BLOCKS}) - {PRUNED_BLOCKS}"
    return (
        f"DELETE FROM {tokens} WHERE ctid = ANY (ARRAY(WITH part AS MATERIALIZED (SELECT"
        f" greatest(least({first}, {blocks} - {PRUNED_BLOCKS}), 0)::bigint AS first) SELECT ctid"
        f" FROM {tokens} WHERE ctid >= (SELECT format('(%s,0)', first)::tid FROM part) AND ctid <"
        f" (SELECT format('(%s,0)', first + {PRUNED_BLOCKS})::tid FROM part) AND at < now() -"
        " interval '1 second' * {} FOR UPDATE SKIP LOCKED))"
    )


def _batch(rows: str, token: str) -> str:
    """Return the statement that applies changes of several keys, or none, and returns the places of
    failed conditions.

    $1 to $4 are addresses, values, versions and expected versions; '' expects no such key. A change
    with the version '' is a guard: its key is locked and stays as it is. Places count from 1.

    Existing keys are locked in sorted order, so that concurrent batches wait instead of
    deadlocking. Locked rows are current, and stay so until the commit. If another writer inserts a
    key after the statement began, the statement's own insertion fails, and it is sent again. But if
    a key to be removed or guarded does not exist, nothing would detect its insertion. If such a key
    occurs together with other changes, nothing is applied, and its place is returned as a negative
    number. The caller then creates and locks all keys by `lock`, with an empty version, and repeats
    the statement, which removes such a key if it is guarded.
    """
    one = (
        f"{rows}.address = ANY ($1) AND {rows}.address = seen.address AND EXISTS (SELECT FROM fine)"
    )
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


AHEAD_BYTES = 256 << 10
"""The most bytes, estimated from the previous page, of a page that is requested ahead: while the
server waits until a larger one is read, it would hold its lock on the table."""
_SAMPLED = 32  # one of so many entries is measured, to estimate the size of all
_ROW_BYTES = 50  # bytes of a row on the wire besides its key and value


class _PageAhead(NamedTuple):
    """A page that was requested ahead, by the arguments of `page`, and its answer."""

    within: KeyRange
    limit: int
    values: bool
    unread: UnreadAnswer


class PostgresPages:
    """Reads pages of one partition. The server prepares a page while the previous one is used.

    The answer to a page that was requested ahead does not occupy a connection of the pool: whoever
    uses the connection next reads it from there first. So an iteration may be abandoned at any
    time, and others never wait for it to end.
    """

    def __init__(self, segment: PostgresSegment) -> None:
        self._segment = segment
        self._entry_bytes: float | None = None  # average of the last page
        self._ahead: _PageAhead | None = None

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return the first entries of a range, at most `limit`, as `TableSegment.page` specifies.

        If the page is full, entries are small (AHEAD_BYTES), and a page was read before, the next
        page is requested ahead.
        """
        ahead = self._ahead
        self._ahead = None
        unread = None
        wanted = (within, limit, values)
        if ahead is not None and (ahead.within, ahead.limit, ahead.values) == wanted:
            unread = ahead.unread
        pool = self._segment._pool()
        # The answer can only be read from the connection that was asked.
        if unread is not None and await pool.take_again(unread.wire):
            wire = unread.wire
        else:
            wire = await pool.take()
        try:
            answer = None
            if unread is not None:
                answer = await wire.read(unread)
            if answer is None:
                answer = await wire.ask(*self._segment.page_query(within, limit, values))
            # The next page is requested before the rows of this one are decoded.
            if self._are_small(limit) and answer.ntuples >= limit:
                following = within.after(answer.get_value(limit - 1, 0) or b"")
                await self._ask_ahead(wire, following, limit, values)
            page = _page_of(wire.rows(answer, tuple), limit, values)
        except psycopg.Error as error:
            raise await self._segment._errors.translate(error, wire) from error
        finally:
            pool.give(wire)
        if page:
            self._measure(page, values)
        return page

    def _are_small(self, limit: int) -> bool:
        """Whether the next `limit` entries are expected to be small, as those of the last page."""
        return self._entry_bytes is not None and self._entry_bytes * limit <= AHEAD_BYTES

    async def _ask_ahead(
        self, wire: PostgresWire, following: KeyRange, limit: int, values: bool
    ) -> None:
        """Request the page of the range `following`, and remember its answer for the next call of
        `page`.
        """
        with suppress(psycopg.Error):  # the request of the next page will raise it again
            unread = await wire.ask_ahead(*self._segment.page_query(following, limit, values))
            self._ahead = _PageAhead(following, limit, values, unread)

    def _measure(self, page: StoredPage, values: bool) -> None:
        """Estimate the size of the next entries from some of this page."""
        if values:
            some = page.values[::_SAMPLED]
            self._segment.value_bytes = sum(len(value or b"") for value in some) / len(some)
        sampled = range(0, len(page), _SAMPLED)
        size = sum(len(page.keys[at]) + len(page.values[at] or b"") for at in sampled)
        self._entry_bytes = size / len(sampled) + _ROW_BYTES


def _page_of(rows: list[tuple[Any, ...]], limit: int, values: bool) -> StoredPage:
    """Return the page with these rows. Fewer than requested are all, unless their values have
    filled the page.
    """
    is_last = len(rows) < limit
    if is_last and values:
        is_last = sum(len(value) for _, _, value in rows) < PAGE_BYTES
    return StoredPage.of(rows, is_last=is_last)


_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_NOT_THERE = ("42P01", "3F000")  # no such table, no such schema
_GIVEN_UP = "57014"  # a time limit of the server's
_DUPLICATE = "23505"  # another row has this unique value


@dataclass(frozen=True, slots=True)
class PostgresSegmentErrors:
    """Converts errors of psycopg to those of one table. `label` names the table, `server` returns
    the address of its server.
    """

    table: TableId
    label: str
    server: Callable[[], str]

    async def translate(self, error: psycopg.Error, wire: PostgresWire) -> AdjunctError:
        """Return the table's error for one of a request over `wire`, which is closed if it can't
        be used any more.

        In this order: sealed, deleted, a write of unknown outcome, no answer, a rejected request.
        """
        state = error.sqlstate
        words = " ".join(str(error).split())
        was_cut = state is None or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
        if was_cut or state == READ_ONLY:  # a session keeps the setting that it started with
            wire.close()
        if state == SEALED:
            return sealed_table_error(self.table, self.label)
        if state in _NOT_THERE:
            return self.not_found()
        # Duplicate entries are handled before. So this is a duplicate token: a repeat of this
        # request has claimed it.
        if (was_cut and wire.may_be_applied) or state == _DUPLICATE:
            step = (
                "It is checked whether it was applied. If that continues, check the server and the"
                " network."
            )
            return ReplyLostError(
                f"{self.label} at {self.server()}: the answer to a write was lost ({words}).", step
            )
        if was_cut or state == _GIVEN_UP:
            problem = f"{self.label} at {self.server()} does not answer at present ({words})."
            step = (
                "It is retried. If that continues, check the server's log, and for long"
                " transactions."
            )
            return TableUnavailableError(problem, step, table=self.label)
        return self.of_schema(error)

    def of_schema(self, error: psycopg.Error) -> AdjunctError:
        """Return the table's error for a change of the schema, or another request that had no
        effect.
        """
        return translate_error(error, self.label, self.server())

    def not_found(self) -> KeyValueTableNotFoundError:
        """Return the error for a missing or deleted table."""
        return deleted_table_error(self.table, f"{self.label} at {self.server()}")


_ROUNDS = 50  # of conflicts with others, before the request counts as failed
_PAUSE = 0.005  # seconds, at most, between two rounds
_KEYS_AT_ONCE = 50_000
WRITES_BETWEEN_PRUNING = 1000
"""The average number of writes, over all processes, after which old tokens are pruned."""

_KEY = itemgetter(0)

R = TypeVar("R")
_entry: Callable[[Sequence[Any]], StoredEntry] = partial(tuple.__new__, StoredEntry)


class PostgresSegment:
    """Sends the requests to one partition.

    All segments of the backend share connections: those of an event loop, or those of all threads
    without one. `tokens_kept` is for how many seconds the tokens of requests stay.
    """

    def __init__(
        self,
        pool: Callable[[], WirePool],
        statements: PostgresStatements,
        partition: int,
        errors: PostgresSegmentErrors,
        tokens_kept: float,
    ) -> None:
        self._pool = pool
        self._statements = statements
        self._errors = errors
        # The addresses of its entries are from `_prefix` up to `_end`.
        self._prefix = partition.to_bytes(4, "big")
        self._end = (partition + 1).to_bytes(4, "big")
        self._prune = statements.prune.format(round(tokens_kept)).encode()
        self.value_bytes: float | None = None  # average of the last page

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        """Apply the changes in one statement, and again while others change the same keys. Raises
        ConditionsFailed, and TableUnavailableError after too many conflicts.
        """
        if repeated:
            write = self._repeat
        elif len(changes) == 1:
            write = self._apply_one
        else:
            write = self._apply_batch
        for _ in range(_ROUNDS):
            failed = await self._attempt(write, changes, token)
            if failed:
                raise ConditionsFailed(failed)
            had_conflict = failed is None
            if not had_conflict:
                return
            await pause(random.random() * _PAUSE)
        problem = (
            f"{self._errors.label}: others changed the same keys {_ROUNDS} times while they were"
            " written."
        )
        step = "It is retried. If that continues, have fewer writers of the same keys."
        raise TableUnavailableError(problem, step, table=self._errors.label)

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        """Return the entries of the keys, None for missing ones: of one key by a statement of its
        own, of more keys by parts.
        """
        sql = self._statements
        if len(keys) == 1:
            query = sql.get if values else sql.get_version
            found = await self._read(query, [[self._prefix + keys[0]]], _entry)
            return [found[0] if found else None]
        parts = [
            keys[start : start + _KEYS_AT_ONCE] for start in range(0, len(keys), _KEYS_AT_ONCE)
        ]
        query = sql.get_many if values else sql.get_many_versions
        rows: list[tuple[Any, ...]] = await self._read(
            query, [[self._addresses(part)] for part in parts], tuple
        )
        # Faster than making each row an entry when it is read.
        entries = dict(
            zip(map(_KEY, rows), map(tuple.__new__, repeat(StoredEntry), rows), strict=True)
        )
        return list(map(entries.get, keys))

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        return await self.prefetching_reader().page(within, limit, values=values)

    def prefetching_reader(self) -> PostgresPages:
        return PostgresPages(self)

    async def close(self) -> None:
        """Close the connections of this event loop, or of all threads without one, for all
        tables of the backend.
        """
        await self._pool().close()

    def page_query(self, within: KeyRange, limit: int, values: bool) -> tuple[str, list[bytes]]:
        """Return the query of a page and its parameters."""
        # If values were small in the last page, the query does not add up their sizes, which takes
        # as long as the rest.
        guarded = values and (self.value_bytes is None or self.value_bytes * limit > PAGE_BYTES)
        end = self._end if within.end is None else self._prefix + within.end
        parameters = [self._prefix + within.start, end, min(limit, 2**31 - 1).to_bytes(4, "big")]
        return self._statements.page(values, guarded), parameters

    async def _read(
        self, query: str, asked: Sequence[list[bytes]], make: Callable[[Sequence[Any]], R]
    ) -> list[R]:
        """Return the rows of a query, sent once with each of these lists of parameters; all see
        the same moment.
        """
        pool = self._pool()
        wire = await pool.take()
        try:
            if len(asked) == 1:
                return wire.rows(await wire.ask(query, asked[0]), make)
            await wire.tell(b"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            try:
                return [row for one in asked for row in wire.rows(await wire.ask(query, one), make)]
            finally:
                await wire.rollback()
        except psycopg.Error as error:
            raise await self._errors.translate(error, wire) from error
        finally:
            pool.give(wire)

    async def _attempt(
        self,
        write: Callable[[PostgresWire, Sequence[SegmentChange], bytes], Awaitable[Failing | None]],
        changes: Sequence[SegmentChange],
        token: bytes,
    ) -> Failing | None:
        """Return the failed conditions; {} if the changes are applied, None after a conflict
        with others. Now and then deletes old tokens first.
        """
        pool = self._pool()
        wire = await pool.take()
        try:
            if random.random() * WRITES_BETWEEN_PRUNING < 1:
                await wire.tell(self._prune)
            return await write(wire, changes, token)
        except psycopg.Error as error:
            # These had no effect, and may be sent again at once.
            if error.sqlstate in _CONFLICTS:
                return None
            if error.sqlstate == _DUPLICATE and error.diag.table_name == self._statements.name:
                return None
            raise await self._errors.translate(error, wire) from error
        finally:
            pool.give(wire)

    async def _apply_one(
        self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes
    ) -> Failing | None:
        """Apply a change of one key in one statement.

        Returns the failed condition, {} if the change is applied, None to try again.
        """
        sql = self._statements
        key, value, version, expected, is_guard = changes[0]
        changes_nothing = value is None and (is_guard or expected is ABSENT)
        if changes_nothing:  # no statement for one key only checks it
            return await self._apply_batch(wire, changes, token)
        parameters = [self._prefix + key, token]
        statements: dict[Any, str]  # by what is expected, other than a version
        if value is None:
            statements = {ANYTHING: sql.remove}
            for_version = sql.remove_version
        else:
            statements = {ANYTHING: sql.put, ABSENT: sql.insert}
            for_version = sql.replace
            parameters += (version, value)
        statement = statements.get(expected, for_version)
        if isinstance(expected, bytes):
            parameters.append(expected)
        answer = await wire.ask(statement, parameters, commits=True)
        if answer.command_tuples or expected is ANYTHING:
            return {}
        rows = wire.rows(await wire.ask(sql.get_version, parameters[:1]), _entry)
        # The condition did not hold a moment ago. If it holds now, there is no version to report:
        # try again.
        return failed_conditions(changes, {entry.key: entry.version for entry in rows}) or None

    async def _apply_batch(
        self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes
    ) -> Failing | None:
        """Apply changes of several keys: in one statement, or in a transaction if keys have to
        be locked first.

        Returns the failed conditions, {} if the changes are applied, None to try again.
        """
        parameters = self._arrays(changes, token)
        answer = await wire.ask(self._statements.batch, parameters, commits=True)
        has_no_failures = not answer.ntuples
        if has_no_failures:
            return {}
        if not _outcome(wire.rows(answer, tuple)).needs_locks:
            return await self._failing_now(wire, changes)
        return await self._in_transaction(
            wire, changes, self._statements.batch, parameters, lock=True
        )

    async def _repeat(
        self, wire: PostgresWire, changes: Sequence[SegmentChange], token: bytes
    ) -> Failing | None:
        """Apply changes unless an earlier attempt was applied; after this, no earlier one can be
        applied any more.

        Returns the failed conditions, {} if the changes are or were applied, None to try again.
        """
        parameters = self._arrays(changes, token)
        return await self._in_transaction(
            wire, changes, self._statements.batch_again, parameters, claim=token
        )

    async def _in_transaction(
        self,
        wire: PostgresWire,
        changes: Sequence[SegmentChange],
        statement: str,
        parameters: list[bytes | None],
        *,
        lock: bool = False,
        claim: bytes | None = None,
    ) -> Failing | None:
        """Apply changes in a transaction; `lock` all keys first, also if the statement asks for it.

        If `claim` is given, it is the token of a repeated request: nothing is done if it was
        applied. Returns the failed conditions, {} if the changes are or were applied, None to try
        again.
        """
        await wire.tell(b"BEGIN")
        try:
            if claim is not None:
                ((applied,),) = wire.rows(await wire.ask(self._statements.claim, [claim]), tuple)
                if applied:
                    await wire.rollback()
                    return {}
                await wire.tell(b"SAVEPOINT claimed")
            if lock:
                outcome = _BatchOutcome(is_refused=False, needs_locks=True)
            else:
                outcome = _outcome(wire.rows(await wire.ask(statement, parameters), tuple))
            if outcome.needs_locks:
                await wire.ask(self._statements.lock, parameters[:1])
                outcome = _outcome(wire.rows(await wire.ask(statement, parameters), tuple))
            if outcome.is_refused and claim is None:
                await wire.rollback()
            else:
                if outcome.is_refused:
                    # Release the locks but keep the claim, so that no late attempt is applied.
                    await wire.tell(b"ROLLBACK TO claimed")
                await wire.tell(b"COMMIT", commits=not outcome.is_refused)
        except BaseException:
            may_be_applied = wire.may_be_applied
            await wire.rollback()
            wire.may_be_applied = may_be_applied
            raise
        if outcome.is_refused:
            return await self._failing_now(wire, changes)
        return {}

    async def _failing_now(
        self, wire: PostgresWire, changes: Sequence[SegmentChange]
    ) -> Failing | None:
        """Return the conditions that fail now, of changes that were not applied; None if all hold,
        so that the changes can be tried again.

        The statement of a batch can't report them: for it, a key inserted while it waited for
        another one is missing.
        """
        keys = self._addresses([change.key for change in changes])
        rows = wire.rows(await wire.ask(self._statements.get_many_versions, [keys]), _entry)
        return failed_conditions(changes, {entry.key: entry.version for entry in rows}) or None

    def _addresses(self, keys: Sequence[bytes]) -> bytes:
        """Return the addresses of table keys, as one parameter."""
        return postgres_wire.encode_bytea_array(keys, self._prefix)

    def _arrays(self, changes: Sequence[SegmentChange], token: bytes) -> list[bytes | None]:
        """Return the parameters of a batch's statement (`_batch`)."""
        # What `_batch` takes for an expectation other than a version.
        parameters: dict[Any, Any] = {ANYTHING: None, ABSENT: b""}
        expected = [parameters.get(change.expected, change.expected) for change in changes]
        addresses = self._addresses([change.key for change in changes])
        values = postgres_wire.encode_bytea_array([change.value for change in changes])
        versions = postgres_wire.encode_bytea_array(
            [b"" if change.is_guard else change.version for change in changes]
        )
        return [addresses, values, versions, postgres_wire.encode_bytea_array(expected), token]


class _BatchOutcome(NamedTuple):
    """Whether conditions of a batch failed, and whether all its keys have to be locked first.
    Without either, it was applied.
    """

    is_refused: bool
    needs_locks: bool


def _outcome(rows: list[tuple[Any, ...]]) -> _BatchOutcome:
    """Return what the rows of a batch's statement (`_batch`) say."""
    return _BatchOutcome(
        is_refused=any(place > 0 for (place,) in rows),
        needs_locks=any(place < 0 for (place,) in rows),
    )

"""`PostgresSegment`: one partition of a key-value table in a PostgreSQL schema."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar

import psycopg

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.repeating import Pause, pause_by_hand, pause_in_loop
from dagster_adjunct.resources.key_value.table_segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
)
from dagster_adjunct.resources.key_value_backends.postgres_key_values import PAGE_BYTES, PostgresStatements
from dagster_adjunct.resources.key_value_backends.postgres_pages import PageQuery, PostgresPages
from dagster_adjunct.resources.key_value_backends.postgres_segment_errors import PostgresSegmentErrors, without_effect
from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire, WirePool, byteas, integer

_ROUNDS = 50  # of being overtaken, before the request counts as failed
_PAUSE = 0.005  # seconds at most, between them
_KEYS_AT_ONCE = 50_000
WRITES_BETWEEN_FORGETTING = 1000
"""Writes for each of which old tokens are forgotten once, on the average of all processes."""

_KEY = itemgetter(0)
_SAMPLED = 32  # entries of a page for one whose size is looked at

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
        self._pause: Pause = pause_in_loop if waits else pause_by_hand
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
        return await self.reading_ahead().page(within, limit, values=values)

    def reading_ahead(self) -> PostgresPages:
        return PostgresPages(self._pool, self._errors, self._query, self._seen)

    async def close(self) -> None:
        """Close these connections, for all tables of the same backend."""
        await self._pool().close()

    def _query(self, within: KeyRange, limit: int, values: bool) -> PageQuery:
        # Where the values are small, as they were last, their sizes are not added up, which takes as long as the rest.
        guarded = values and (self._value_bytes is None or self._value_bytes * limit > PAGE_BYTES)
        ends = self._end if within.end is None else self._prefix + within.end
        parameters = [self._prefix + within.start, ends, integer(min(limit, 2**31 - 1))]
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
            if without_effect(error, self._statements.name):
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
        return byteas(keys, self._prefix)

    def _arrays(self, changes: Sequence[SegmentChange], token: bytes) -> list[bytes | None]:
        expected = [
            None if change.expected is ANYTHING else b"" if change.expected is ABSENT else change.expected
            for change in changes
        ]
        addresses = self._addresses([change.key for change in changes])
        values = byteas([change.value for change in changes])
        versions = byteas([b"" if change.is_guard else change.version for change in changes])
        return [addresses, values, versions, byteas(expected), token]


def _outcome(rows: list[tuple[Any, ...]]) -> tuple[bool, bool]:
    """Return whether the conditions of a batch refuse it, and whether keys have to be held first."""
    return any(place > 0 for (place,) in rows), any(place < 0 for (place,) in rows)

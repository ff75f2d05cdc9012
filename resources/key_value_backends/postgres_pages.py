"""`PostgresPages`: the pages of an iteration, of which the server prepares one while the one before is used.

Client and server would else work by turns. A page that was asked for holds no connection of the pool: its answer waits
in the wire, for whoever uses that next. So an iteration may be left at any time, and others never wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import StoredPage
from dagster_adjunct.resources.key_value_backends.postgres_key_values import PAGE_BYTES
from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire, UnreadAnswer, WirePool

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from dagster_adjunct.resources.key_value_backends.postgres_segment_errors import PostgresSegmentErrors

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

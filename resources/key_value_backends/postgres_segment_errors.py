"""What errors of PostgreSQL mean for a request to a key-value table: whether it may have happened, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from dagster_adjunct.resources.backends.postgres_connection import READ_ONLY, translated
from dagster_adjunct.resources.errors import AdjunctError, TableUnavailableError
from dagster_adjunct.resources.key_value.ended_tables import deleted_table, sealed_table
from dagster_adjunct.resources.key_value.table_segment import ReplyLostError, TableId
from dagster_adjunct.resources.key_value_backends.postgres_key_values import SEALED
from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError

_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_NOT_THERE = ("42P01", "3F000")
_GIVEN_UP = "57014"  # a time limit of the server's
_DUPLICATE = "23505"


def without_effect(error: psycopg.Error, table: str) -> bool:
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
            return sealed_table(self.table, self.label)
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
        return translated(error, self.label, self.place())

    def not_found(self) -> KeyValueTableNotFoundError:
        """Return the error of a table that is not there (any more)."""
        return deleted_table(self.table, f"{self.label} at {self.place()}")

"""Table functions that kill the Spark worker they are in, once each, in the middle of a batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import Operation, Outcomes


class KilledInTask:
    """Kills its process at its third write, before the store has it or after; the file `flag`
    says that it has.
    """

    flag: str = ""
    when: str = "after"
    driver: int = 0
    writes = 0

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not operation.kind.writes or os.getpid() == self.driver:
            return await super().send(operation)  # type: ignore[misc, no-any-return]
        self.writes += 1
        if self.when == "before":
            self._die()
        outcomes: Outcomes = await super().send(operation)  # type: ignore[misc]
        if self.when == "after":
            self._die()
        return outcomes

    def _die(self) -> None:
        if self.writes != 3:
            return
        try:
            Path(self.flag).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class KilledSqlite(KilledInTask, SqliteTable):
    pass


class KilledPostgres(KilledInTask, PostgresTable):
    pass

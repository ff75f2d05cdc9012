"""Credits of a rate limit in an application's run: `RunCredits` in the driver, `CreditClient` in its tasks.

The server that divides the credits among tasks, and leases them from the lake for all runs, is in `rate_server.py`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.resources.errors import TableError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import error_from_json
from dagster_adjunct.resources.tables.operation import PerLoop
from dagster_adjunct.resources.tables.rate import Budget, unequal_rates_error
from dagster_adjunct.resources.tables.rate_server import (
    BudgetLeases,
    CreditAddress,
    CreditServer,
    authenticate_driver,
    receive_message,
    send_message,
)
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# A driver unreachable for _RECONNECT_SECONDS is gone; a live one sends several signs of life in _SILENT_SECONDS.
_RECONNECT_SECONDS = 5.0
_SILENT_SECONDS = 15.0
_PAUSE_SECONDS = 0.2
# Small requests that wait together are one demand, of at most this many seconds' credits: each takes a round trip.
_TOGETHER_SECONDS = 0.05


class CreditClient:
    """A `CreditSource` that gets credits from the run's driver, with one connection per budget and event loop.

    `acquire` raises TableError if the driver is gone, or the driver's own error if it could not lease credits.
    """

    def __init__(self, address: CreditAddress) -> None:
        self._address = address
        self._lines: PerLoop[dict[Budget, _BudgetConnection]] = PerLoop(dict)

    def __reduce__(self) -> tuple[type[CreditClient], tuple[CreditAddress]]:
        return CreditClient, (self._address,)

    async def acquire(self, budget: Budget, credits: float) -> None:
        if credits <= 0:
            return
        lines = self._lines.here()
        line = lines.get(budget)
        if line is None:
            line = lines[budget] = _BudgetConnection(self._address, budget)
        await line.acquire(credits)

    async def close(self) -> None:
        for line in (self._lines.take() or {}).values():
            line.close()


class _BudgetConnection:
    """One connection, with one demand at a time; other callers wait in order."""

    def __init__(self, address: CreditAddress, budget: Budget) -> None:
        self._address, self._budget = address, budget
        self._turn = asyncio.Lock()
        self._waiting: dict[object, float] = {}  # credits of each caller that has none yet, in order
        self._lost_at: float | None = None  # since when the driver can't be reached, while somebody waits for it
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def acquire(self, credits: float) -> None:
        mine = object()
        self._waiting[mine] = credits
        try:
            async with self._turn:
                while mine in self._waiting:
                    together = self._first_waiting()
                    if await self._demand(sum(together.values())):
                        for one in together:
                            self._waiting.pop(one, None)
                    else:
                        await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._waiting.pop(mine, None)
            if not self._waiting:
                self._lost_at = None

    def _first_waiting(self) -> dict[object, float]:
        """Return the first waiting caller's credits, and those of others after it that fit into the same demand."""
        first, left = dict[object, float](), self._budget.rate * _TOGETHER_SECONDS
        for caller, credits in self._waiting.items():
            left -= credits
            if first and left < 0:
                break
            first[caller] = credits
        return first

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    async def _demand(self, credits: float) -> bool:
        """Return whether the credits were granted; if not, the driver can't be reached now."""
        message = {"budget": self._budget.name, "tag": self._budget.tag, "credits": credits}
        answer: dict[str, object] = {"wait": True}
        try:
            if self._open is None:
                self._open = await asyncio.open_connection(self._address.host, self._address.port)
                await authenticate_driver(*self._open, self._address.secret)
            reader, writer = self._open
            await send_message(writer, message)
            while "wait" in answer:
                async with asyncio.timeout(_SILENT_SECONDS):
                    answer = await receive_message(reader)
                self._lost_at = None
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            if now - self._lost_at > _RECONNECT_SECONDS:
                raise TableError(
                    f"budget {self._budget.name!r} ({self._budget.tag}): the run's driver, which hands out its "
                    f"credits at {self._address.host}:{self._address.port}, is gone.",
                    "If the run has ended, end this task too. Otherwise make sure that tasks can reach the "
                    "driver's host (spark.driver.host).",
                    budget=self._budget.name,
                ) from error
            return False
        except BaseException:
            self.close()  # the next demand must not get this one's answer
            raise
        if "error" in answer:
            raise error_from_json(answer["error"])  # type: ignore[arg-type]
        return True


class RunCredits:
    """A context manager that hands out a run's part of its tables' rates until it exits.

    The server starts when a table with a rate is first written; a run without one has no server.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake, self._run = lake, uuid.uuid4().hex[:12]
        self._servers: dict[str, CreditServer] = {}  # by the address at which tasks reach them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            server.stop()

    def with_credits(self, table: RemoteTable[Any, Any, Any], spark: SparkSession | None) -> RemoteTable[Any, Any, Any]:
        """Return the table as the tasks of this session, or this process, may use it: with credits from here."""
        budgets = table.rate_limit.budgets(table.name)
        if not budgets:
            return table
        host = (None if spark is None else spark.conf.get("spark.driver.host")) or "127.0.0.1"
        if host not in self._servers:
            bind = host if spark is None else spark.conf.get("spark.driver.bindAddress", host)
            leases = partial(BudgetLeases, self._lake, run=f"{self._run}-{len(self._servers)}")
            self._servers[host] = CreditServer(leases, host=host, bind=bind)
        return table.with_credit_source(CreditClient(self._servers[host].serve(budgets)))


def list_budgets(tables: Iterable[object]) -> tuple[Budget, ...]:
    """Return the budgets that these tables declare; objects other than remote tables have none."""
    remote = [table for table in tables if isinstance(table, RemoteTable)]
    return tuple(budget for table in remote for budget in table.rate_limit.budgets(table.name))


def check_budgets(budgets: Iterable[Budget]) -> None:
    """Raise ConfigurationError if tables declare one budget with several rates."""
    rates: dict[tuple[str, str], float] = {}
    for budget in budgets:
        rate = rates.setdefault((budget.name, budget.tag), budget.rate)
        if rate != budget.rate:
            raise unequal_rates_error(budget, rate)

"""`RunCredits`: what the tables of a run's application pay with in its tasks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.credits.credit_client import CreditClient
from dagster_adjunct.resources.tables.credits.credit_server import CreditServer
from dagster_adjunct.resources.tables.credits.leases_of_budget import LeasesOfBudget
from dagster_adjunct.resources.tables.remote_table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.tables.credit_source import Budget


class RunCredits:
    """A run's part of the rates that tables state: a context manager, which hands credits out until its end.

    It begins to when a table with a rate is first written; a run without one has no server.
    """

    def __init__(self, lake: Lake, budgets: Iterable[Budget]) -> None:
        self._lake, self._run = lake, uuid.uuid4().hex[:12]
        self._budgets = tuple(dict.fromkeys(budgets))
        self._server: CreditServer | None = None
        check_budgets(self._budgets)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.stop()

    def paid(self, table: RemoteTable[Any, Any, Any], spark: SparkSession) -> RemoteTable[Any, Any, Any]:
        """Return the table as tasks of this session may use it: what its requests cost, they get from here."""
        budgets = table.rate_limit.budgets(table.name)
        if not budgets:
            return table
        if self._server is None:
            host = spark.conf.get("spark.driver.host", "127.0.0.1")
            bind = spark.conf.get("spark.driver.bindAddress", host)
            self._server = CreditServer(self._leases, host=host or "127.0.0.1", bind=bind)
        return table.paying(CreditClient(self._server.serve(budgets)))

    def _leases(self, budget: Budget) -> LeasesOfBudget:
        return LeasesOfBudget(self._lake, budget, self._run)


def budgets_of(tables: Iterable[object]) -> tuple[Budget, ...]:
    """Return the budgets that these tables state; those that are no remote tables have none."""
    remote = [table for table in tables if isinstance(table, RemoteTable)]
    return tuple(budget for table in remote for budget in table.rate_limit.budgets(table.name))


def check_budgets(budgets: Iterable[Budget]) -> None:
    """Raise ConfigurationError where tables state one budget with several rates."""
    rates: dict[tuple[str, str], float] = {}
    for budget in budgets:
        rate = rates.setdefault((budget.name, budget.tag), budget.rate)
        if rate != budget.rate:
            raise ConfigurationError(
                f"budget {budget.name!r} is stated with {rate:g} and with {budget.rate:g} {budget.tag}s per second.",
                "Tables that share a budget state one rate: give all of them the same RateLimit, or other budgets.",
                argument="budget",
            )

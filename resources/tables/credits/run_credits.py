"""`RunCredits`: what the tables of a run's application pay with in its tasks."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.resources.tables.credits.credit_client import CreditClient
from dagster_adjunct.resources.tables.credits.credit_server import CreditServer
from dagster_adjunct.resources.tables.credits.leases_of_budget import LeasesOfBudget

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.tables.credit_source import Budget
    from dagster_adjunct.resources.tables.remote_table import RemoteTable


class RunCredits:
    """A run's part of the rates that tables state: a context manager, which hands credits out until its end.

    It begins to when a table with a rate is first written; a run without one has no server.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake, self._run = lake, uuid.uuid4().hex[:12]
        self._server: CreditServer | None = None

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

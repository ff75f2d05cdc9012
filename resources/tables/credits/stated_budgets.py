"""Which budgets the tables of an application state, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.credit_source import Budget
from dagster_adjunct.resources.tables.remote_table import RemoteTable


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

"""Where the counts of tables go beside their callers: hooks of this process, such as `PrometheusTables`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from dagster_adjunct.resources.tables.metrics import TableMetrics

logger = logging.getLogger(__name__)


class MetricsHook(Protocol):
    """Takes what tables have done.

    A table in this process reports when it is flushed or closed, and what a run's tasks have done with one is reported
    in the run's process when its sink is through.
    """

    def report(self, table: str, metrics: TableMetrics) -> None:
        """Take what `table` has done since it was last reported. It may be called from several threads."""
        ...


_HOOKS: list[MetricsHook] = []


def report_tables_to(hook: MetricsHook) -> Callable[[], None]:
    """Let all tables of this process report to `hook` from now on; call the result to end that."""
    _HOOKS.append(hook)

    def end() -> None:
        if hook in _HOOKS:
            _HOOKS.remove(hook)

    return end


def anyone_listens() -> bool:
    """Whether a report would reach anybody."""
    return bool(_HOOKS)


def report(table: str, metrics: TableMetrics) -> None:
    """Tell all hooks. One that fails is logged: the table's work is done, and must not fail with it."""
    for hook in tuple(_HOOKS):
        try:
            hook.report(table, metrics)
        except Exception:
            logger.exception("The metrics of table %s did not reach %r.", table, hook)

"""Runs an application as a whole: its datasets first, then its step, on one session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assets import AdvanceReport
from orchestration.advancing import advance_together, made_by_partition, units_of
from orchestration.catalog import read_catalog
from orchestration.planner import ExecutionPlan, plan
from orchestration.step import StepContext, StepEvent, StepReport, run_step
from orchestration.tables import remember_tables
from resources.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from orchestration.application import Application
    from resources.objects import Lake
    from resources.streams import StreamSystem


@dataclass(frozen=True, slots=True)
class RunReport:
    """What one run did: a report for each dataset that advanced, and the step's."""

    datasets: tuple[AdvanceReport, ...]
    step: StepReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {"datasets": [report.to_json() for report in self.datasets], "step": self.step.to_json()}


def plan_application(app: Application, systems: Mapping[str, StreamSystem]) -> ExecutionPlan:
    """Return the application's plan over the streams as they are now, or raise PlanningError."""
    return plan(app, read_catalog(app, systems))


@unwrapped()
def run_application(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    spark: Callable[[], SparkSession],
    *,
    run: str,
    on_event: Callable[[StepEvent | AdvanceReport], None] = lambda event: None,
    max_batches: int | None = None,
) -> RunReport:
    """Bring every dataset up to date, then run the step until it has caught up.

    A dataset whose versions are made by a query, one for each partition, is read as it is.
    `run` names this run in commits. `on_event` hears of every dataset and every stage of a batch. Raises what
    planning, datasets and step raise; whatever was committed before stays, and the next run goes on from it.
    """
    planned = plan_application(app, systems)
    datasets: list[AdvanceReport] = []
    alone = [dataset for dataset in app.datasets if not made_by_partition(dataset)]
    for unit in units_of(alone, f"application {app.name!r}"):
        reports = advance_together(lake, systems, unit, spark, by=run)
        for report in reports:
            on_event(report)
        datasets += reports
    remember_tables(lake, app, by=run)
    context = StepContext(lake, systems, app, planned, spark, run, on_event, max_batches)
    return RunReport(tuple(datasets), run_step(context))

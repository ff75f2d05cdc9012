"""Runs an application as a whole: its datasets first, then its step, on one session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage, ignore
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.orchestration.application.advance_units import advances_alone, units_of
from dagster_adjunct.orchestration.application.remembered_tables import remembered_tables
from dagster_adjunct.orchestration.batchlog.run_lease import WAIT, Claim, RunLease, checked_wait
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application
from dagster_adjunct.orchestration.planner.table_order import order_notes
from dagster_adjunct.orchestration.startpoints.dataset_requests import DatasetOutcome, apply_dataset_startpoints
from dagster_adjunct.orchestration.startpoints.fan_out_coordinator import hand_out
from dagster_adjunct.orchestration.startpoints.other_writers import check_first_run
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import rewindable
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
from dagster_adjunct.orchestration.step.advancing import advance_units, follow_meanwhile
from dagster_adjunct.orchestration.step.context.step_context import StepContext
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent, StepReport, planned_event
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

_log = logging.getLogger("adjunct.run")


@dataclass(frozen=True, slots=True)
class RunReport:
    """What one run did: a report for each dataset that advanced, and the step's.

    A dataset that took in more while batches ran has a further report each time, after those of the beginning.
    """

    datasets: tuple[AdvanceReport, ...]
    step: StepReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {"datasets": [report.to_json() for report in self.datasets], "step": self.step.to_json()}


@dataclass(frozen=True, slots=True)
class AdvancedDatasets:
    """What came of bringing the datasets of an application up to date.

    `fan_out` is what was fanned out for that, to all tasks of the application; None where nothing had to be.
    """

    reports: tuple[AdvanceReport, ...]
    fan_out: FanOut | None = None


def apply_startpoints(
    runtime: Runtime,
    app: Application,
    plan: ExecutionPlan | None = None,
    *,
    only: Collection[str] | None = None,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
) -> DatasetOutcome:
    """Bring the datasets of an application, or `only` these, to where startpoints want them; most often nowhere.

    `plan` is the application's, where its run has one already.
    """
    startpoints = startpoints_of(runtime.lake, app)
    if not rewindable(app, only) or not startpoints.has_any():
        return DatasetOutcome()
    if plan is None and app.inputs:
        plan = plan_application(app, runtime.systems)
    handed = hand_out(runtime, app, plan)
    if handed.left_alone:
        _log.warning("application %s: startpoints are switched off: %s wait", app.name, len(handed.left_alone))
    outcome = apply_dataset_startpoints(runtime, app, startpoints, handed, only=only, on_report=on_report)
    return replace(outcome, fan_out=handed)


def advance_datasets(
    runtime: Runtime,
    app: Application,
    plan: ExecutionPlan | None = None,
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore,
) -> AdvancedDatasets:
    """Bring the datasets of an application up to date, several at once: first to where startpoints want them.

    One that fails keeps no other from advancing; the first error is raised in the end.
    """
    applied = apply_startpoints(runtime, app, plan, on_report=on_report)
    able = [dataset for dataset in app.datasets if advances_alone(dataset) and dataset.name not in applied.failed]
    units = units_of(able, f"application {app.name!r}")
    reports = advance_units(runtime, units, on_report=on_report, on_stage=on_stage)
    applied.raise_failed()
    return AdvancedDatasets((*applied.reports, *reports), applied.fan_out)


@unwrapped()
def run_application(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    run: str,
    on_event: Callable[[StepEvent | AdvanceReport], None] = lambda event: None,
    on_stage: OnStage = ignore,
    max_batches: int | None = None,
    wait: timedelta | float = WAIT,
    take_over: bool = False,
    adopt: bool = False,
) -> RunReport:
    """Bring every dataset up to date, several at once, then run the step until it has caught up.

    A dataset whose versions are made by a query, one for each partition, is read as it is. One that is not marked for
    bootstrap is advanced again between batches, so that each batch meets what has come by then.
    `run` names this run in commits. `on_event` hears of every dataset and every stage of a batch, `on_stage` of each
    stage of a dataset, such as the progress of a bootstrap. Startpoints on the streams of datasets are applied first.
    One run of an application works at a time: while another one is alive this one waits for its end, at most `wait`
    (a timedelta, or seconds; 0 does not wait), then it raises ApplicationBusyError, which says who that is. What is
    dead is taken over at once, what is alive only with `take_over`.
    The first run of an application is refused where another one has written its outputs from its inputs, as its own
    name of before has: unless startpoints say where it begins, or it is to `adopt` the outputs as they are.
    Raises what planning, datasets and step raise, and RunLeaseLostError; whatever was
    committed before stays, and the next run goes on from it. A dataset that fails keeps no other from advancing.
    """
    runtime = Runtime(lake, systems, starter_of(spark), by=run)
    if not lake.exists():  # the lease would make it, also where there is nothing to run: at a mistyped URL
        plan_application(app, systems)

    def say(text: str) -> None:
        _log.warning(text)
        on_event(StepEvent("lease", 0, {"text": text}))

    claim = Claim(wait=checked_wait(wait), take_over=take_over, say=say)
    with RunLease(lake, app.name, run, claim) as lease:
        plan = plan_application(app, systems)  # over the streams as they are now, not before a wait
        check_first_run(lake, app, adopt=adopt)
        for note in order_notes(plan.tables):
            _log.warning("application %s: %s", app.name, note)
        on_event(planned_event(app))
        with remembered_tables(lake, app, by=run):
            advanced = advance_datasets(runtime, app, plan, on_report=on_event, on_stage=on_stage)
            datasets = [*advanced.reports]

            def heard(report: AdvanceReport) -> None:
                on_event(report)
                datasets.append(report)

            def follow() -> None:
                follow_meanwhile(runtime, app, on_report=heard, on_stage=on_stage)

            # Once a run: the datasets took theirs from it, where any could go back.
            fan_out = hand_out(runtime, app, plan) if advanced.fan_out is None else advanced.fan_out
            context = StepContext(runtime, app, plan, fan_out, on_event, max_batches, follow, lease.check)
            step = run_step(context)
    return RunReport(tuple(datasets), step)

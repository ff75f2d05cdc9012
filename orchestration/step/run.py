"""Runs an application as a whole: its datasets first, then its step, on one session."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, StageEvent, ignore_stage
from dagster_adjunct.assets.writing.generation import Runtime, open_runtime
from dagster_adjunct.orchestration.application.graph import DatasetGroup, group_datasets, is_advanced_by_runs
from dagster_adjunct.orchestration.application.table_registry import register_tables
from dagster_adjunct.orchestration.batch_log.run_lease import DEFAULT_WAIT, Claim, RunLease, validate_wait
from dagster_adjunct.orchestration.planner.catalog import plan_application, systems_for
from dagster_adjunct.orchestration.planner.notes import note_table_order
from dagster_adjunct.orchestration.startpoints.coordinator import (
    DatasetOutcome,
    apply_dataset_startpoints,
    fan_out_for_run,
)
from dagster_adjunct.orchestration.startpoints.other_writers import check_first_run
from dagster_adjunct.orchestration.startpoints.request import list_rewindable_datasets
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport, new_planned_event
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.common import subtract_span
from dagster_adjunct.resources.errors import CommitConflictError, raise_first
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.errors import find_adjunct_error, first_message_line, translate_spark_errors
from dagster_adjunct.resources.spark.in_process import IN_PROCESS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamSystem

# More at once would share the same cores, and hold more of the cluster's memory.
_MAX_PARALLEL = 4


def advance_units(
    runtime: Runtime,
    units: Sequence[DatasetGroup],
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore_stage,
) -> list[AdvanceReport]:
    """Bring several units up to date at once, in threads of one Spark session; reports in order of declaration.

    A unit that fails keeps no other from advancing: the first error is raised in the end, and names the rest.
    `on_report` is called in order by this thread, `on_stage` by one thread at a time.
    """
    starting, telling = threading.Lock(), threading.Lock()

    def session() -> SparkSession:
        with starting:  # threads ask at the same time, and one session is started
            return runtime.spark()

    spark = IN_PROCESS if runtime.spark is IN_PROCESS else session

    def tell(event: StageEvent) -> None:
        with telling:
            on_stage(event)

    def advance(unit: DatasetGroup) -> list[AdvanceReport]:
        return advance_unit(replace(runtime, spark=spark), unit, on_stage=tell)

    reports: list[AdvanceReport] = []
    errors: list[Exception] = []
    pool = ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="adjunct-advance")
    try:
        futures: list[Future[list[AdvanceReport]]] = [pool.submit(advance, unit) for unit in units]
        for future in futures:
            try:
                done = future.result()
            except Exception as error:  # noqa: BLE001 - told when the others have ended
                errors.append(find_adjunct_error(error) or error)
            else:
                for report in done:
                    on_report(report)
                reports += done
    finally:
        # After Ctrl-C nobody waits for the others: they end with the session.
        pool.shutdown(wait=False, cancel_futures=True)
    raise_first(errors, words=first_message_line)
    return reports


def advance_followed_datasets(
    runtime: Runtime,
    app: Application,
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore_stage,
) -> None:
    """Advance those of the datasets that are not marked for bootstrap: they are followed while batches run.

    So are those that the application itself feeds: the next batch meets what this one has sent.

    Nothing is reported where nothing has come, nor where somebody else follows one too: the next batch meets what they
    have committed.
    """
    fed = {operator.spec.feeds for operator in app.operators}
    for dataset in app.datasets:
        followed = not dataset.bootstrap or dataset.name in fed
        if dataset.follows_changes and followed and is_advanced_by_runs(dataset):
            with suppress(CommitConflictError):
                for report in advance_unit(runtime, [dataset], on_stage=on_stage):
                    if report.changed:
                        on_report(report)


def advance_unit(
    runtime: Runtime, unit: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore_stage
) -> list[AdvanceReport]:
    """Bring one dataset, or the members of one version set, up to date with their input; a report for each.

    Where a version was published, what the policy lets go by then is discarded: the last stage of its cycle.
    """
    from dagster_adjunct.assets.advancing.advance_dataset import advance_with_runtime
    from dagster_adjunct.assets.bounded.advance import advance_members

    if unit[0].version_set is not None:
        reports = advance_members(runtime, unit, on_stage=on_stage)
    else:
        reports = [advance_with_runtime(runtime, unit[0], on_stage=on_stage)]
    told = zip(unit, reports, strict=True)
    return [discard_retired(runtime.lake, dataset, report, runtime.by, on_stage) for dataset, report in told]


def _has_expired_files(lake: Lake, dataset: AdjunctDataset) -> bool:
    """Whether a compaction has retired something long ago: a commit of changes alone makes nothing needless."""
    manifest = DatasetLog(lake, dataset.name).read()[1]
    limit = subtract_span(lake.now(), dataset.discard.grace)
    return manifest is not None and any(retired.at <= limit for retired in manifest.retired)


def discard_retired(
    lake: Lake, dataset: AdjunctDataset, report: AdvanceReport, by: str, on_stage: OnStage
) -> AdvanceReport:
    """Discard what a new version has made needless; return the report with the time that this took."""
    from dagster_adjunct.orchestration.maintenance.discard import discard_all

    if not report.sealed or (dataset.follows_changes and not _has_expired_files(lake, dataset)):
        return report
    began = time.perf_counter()
    discard_all(lake, {dataset.name: dataset}, datasets=[dataset.name], by=by)
    took = time.perf_counter() - began
    on_stage(StageEvent(dataset.name, None, "discard", took))
    return replace(report, seconds={**report.seconds, "discard": took})


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
    startpoints = open_startpoints(runtime.lake, app)
    if not list_rewindable_datasets(app, only) or not startpoints.has_any():
        return DatasetOutcome()
    if plan is None and app.inputs:
        plan = plan_application(app, systems=runtime.systems)
    handed = fan_out_for_run(runtime, app, plan)
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
    on_stage: OnStage = ignore_stage,
) -> AdvancedDatasets:
    """Bring the datasets of an application up to date, several at once: first to where startpoints want them.

    One that fails keeps no other from advancing; the first error is raised in the end.
    """
    applied = apply_startpoints(runtime, app, plan, on_report=on_report)
    able = [dataset for dataset in app.datasets if is_advanced_by_runs(dataset) and dataset.name not in applied.failed]
    units = group_datasets(able, f"application {app.name!r}")
    reports = advance_units(runtime, units, on_report=on_report, on_stage=on_stage)
    applied.raise_failed()
    return AdvancedDatasets((*applied.reports, *reports), applied.fan_out)


@translate_spark_errors()
def run_application(
    app: Application,
    *,
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    run: str | None = None,
    on_event: Callable[[StepEvent | AdvanceReport], None] = lambda event: None,
    on_stage: OnStage = ignore_stage,
    max_batches: int | None = None,
    wait: timedelta | float = DEFAULT_WAIT,
    take_over: bool = False,
    adopt: bool = False,
) -> RunReport:
    """Bring every dataset up to date, several at once, then run the step until it has caught up.

    A dataset whose versions are made by a query, one for each partition, is read as it is. One that is not marked for
    bootstrap is advanced again between batches, so that each batch meets what has come by then.
    Without a lake, systems or a session, it uses those of `open_lake()`, `systems_for(app)` and `session_scope()`.
    `run` names this run in commits; it is drawn when it is not given. `on_event` hears of every dataset and every
    stage of a batch, `on_stage` of each stage of a dataset, such as the progress of a bootstrap. Startpoints on the
    streams of datasets are applied first.
    One run of an application works at a time: while another one is alive this one waits for its end, at most `wait`
    (a timedelta, or seconds; 0 does not wait), then it raises ApplicationBusyError, which says who that is. What is
    dead is taken over at once, what is alive only with `take_over`.
    The first run of an application is refused where another one has written its outputs from its inputs, as its own
    name of before has: unless startpoints say where it begins, or it is to `adopt` the outputs as they are.
    Raises what planning, datasets and step raise, and RunLeaseLostError; whatever was
    committed before stays, and the next run goes on from it. A dataset that fails keeps no other from advancing.
    """
    run = f"run-{uuid4().hex[:12]}" if run is None else run
    lake = open_lake() if lake is None else lake
    systems = systems_for(app, lake=lake) if systems is None else systems
    if not lake.exists():  # the lease would make it, also where there is nothing to run: at a mistyped URL
        plan_application(app, systems=systems)

    def say(text: str) -> None:
        _log.warning(text)
        on_event(StepEvent("lease", 0, {"text": text}))

    claim = Claim(wait=validate_wait(wait), take_over=take_over, say=say)
    with (
        open_runtime((), lake=lake, systems=systems, spark=spark, by=run) as runtime,
        RunLease(lake, app.name, run, claim) as lease,
    ):
        plan = plan_application(app, systems=systems)  # over the streams as they are now, not before a wait
        check_first_run(lake, app, adopt=adopt)
        for note in note_table_order(plan.tables):
            _log.warning("application %s: %s", app.name, note)
        on_event(new_planned_event(app))
        with register_tables(lake, app, by=run):
            advanced = advance_datasets(runtime, app, plan, on_report=on_event, on_stage=on_stage)
            datasets = [*advanced.reports]

            def heard(report: AdvanceReport) -> None:
                on_event(report)
                datasets.append(report)

            def follow() -> None:
                advance_followed_datasets(runtime, app, on_report=heard, on_stage=on_stage)

            # Once a run: the datasets took theirs from it, where any could go back.
            fan_out = fan_out_for_run(runtime, app, plan) if advanced.fan_out is None else advanced.fan_out
            context = StepContext(runtime, app, plan, fan_out, on_event, max_batches, follow, lease.check)
            step = run_step(context)
    return RunReport(tuple(datasets), step)

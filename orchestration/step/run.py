"""Runs an application: advances its datasets, then runs its step, in one Spark session."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_adjunct.assets.advance_dataset import advance_with_runtime
from dagster_adjunct.assets.bounded.advance import advance_members
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.generation import Runtime, open_runtime
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, StageEvent, ignore_stage
from dagster_adjunct.orchestration.application.application import Application, group_datasets
from dagster_adjunct.orchestration.application.graph import (
    advances_between_batches,
    is_advanced_by_runs,
)
from dagster_adjunct.orchestration.application.table_registry import (
    RegisteredTables,
    register_tables,
)
from dagster_adjunct.orchestration.batch_log.run_lease import (
    DEFAULT_WAIT,
    Claim,
    RunLease,
    validate_span,
)
from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions
from dagster_adjunct.orchestration.operators.stream_facts import Catalog
from dagster_adjunct.orchestration.planner.notes import note_table_order
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import (
    build_plan,
    plan_application,
    read_catalog,
    systems_for,
)
from dagster_adjunct.orchestration.startpoints.coordinator import (
    DatasetOutcome,
    apply_dataset_startpoints,
    check_first_run,
    fan_out_for_run,
)
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.request import list_rewindable_datasets
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.context import RunHooks, StepContext
from dagster_adjunct.orchestration.step.engines import check_session
from dagster_adjunct.orchestration.step.following import Following, follow_application
from dagster_adjunct.orchestration.step.progress import (
    StepEvent,
    StepReport,
    list_dataset_streams,
    new_planned_event,
)
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import CommitConflictError, raise_first
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import (
    find_adjunct_error,
    first_message_line,
    translate_spark_errors,
)
from dagster_adjunct.resources.streams.lake.streams import open_systems
from dagster_adjunct.resources.streams.system import StreamSystem
from dagster_adjunct.resources.threads import call_in_threads
from dagster_adjunct.resources.times import subtract_span
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Threads that advance datasets; more would share the same cores and use more memory.
_MAX_PARALLEL = 4


def advance_followed_datasets(
    runtime: Runtime,
    app: Application,
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore_stage,
) -> None:
    """Advance the datasets that are followed while batches run, so that the next batch sees their
    new entries.

    These are the datasets without `bootstrap`, and those that the application itself feeds. Nothing
    is reported where nothing changed, or where another process advances the dataset at the same
    time.
    """
    fed = {operator.spec.feeds for operator in app.operators}
    for dataset in app.datasets:
        if advances_between_batches(dataset, fed):
            with suppress(CommitConflictError):
                for report in advance_unit(runtime, [dataset], on_stage=on_stage):
                    if report.changed:
                        on_report(report)


def advance_unit(
    runtime: Runtime, unit: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore_stage
) -> list[AdvanceReport]:
    """Advance one dataset, or all members of one version set; return a report for each.

    After a version is published, the versions that the discard policy no longer keeps are deleted.
    """
    if unit[0].version_set is not None:
        reports = advance_members(runtime, unit, on_stage=on_stage)
    else:
        reports = [advance_with_runtime(runtime, unit[0], on_stage=on_stage)]
    done = []
    for dataset, report in zip(unit, reports, strict=True):
        done.append(_discard_retired(runtime.lake, dataset, report, runtime.by, on_stage))
    return done


def _discard_retired(
    lake: Lake, dataset: AdjunctDataset, report: AdvanceReport, by: str, on_stage: OnStage
) -> AdvanceReport:
    """Delete what a new version made unnecessary; return the report with the time that this
    took, unchanged if there is nothing to delete.
    """
    if not report.sealed:
        return report
    if dataset.follows_changes:  # a commit of changes alone retires no files
        _, manifest = DatasetLog(lake, dataset.name).read()
        limit = subtract_span(lake.now(), dataset.discard.grace)
        if manifest is None or all(retired.at > limit for retired in manifest.retired):
            return report
    began = time.perf_counter()
    expire_all_versions(lake, {dataset.name: dataset}, datasets=[dataset.name], by=by)
    took = time.perf_counter() - began
    on_stage(StageEvent(dataset.name, None, "discard", took))
    return replace(report, seconds={**report.seconds, "discard": took})


_log = logging.getLogger("adjunct.run")
MAX_REPORTS = 100


@dataclass(frozen=True, slots=True)
class RunReport(Report):
    """What one run did: a report for each dataset that advanced, and the step's report.

    A dataset that advanced again between batches has a further report each time, after the initial
    ones. Of a run that stays these are the last ones: at least MAX_REPORTS, and all with a rejected
    version.
    """

    datasets: tuple[AdvanceReport, ...]
    step: StepReport


def apply_startpoints(
    runtime: Runtime,
    app: Application,
    plan: ExecutionPlan | None = None,
    *,
    only: Collection[str] | None = None,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
) -> DatasetOutcome:
    """Rewind the application's datasets (or `only` these) to their requested startpoints; return
    the outcome.

    `plan` is the application's plan, if the run has it already.
    """
    startpoints = open_startpoints(runtime.lake, app)
    if not list_rewindable_datasets(app, only) or not startpoints.has_any():
        return DatasetOutcome()
    if plan is None and app.inputs:
        plan = plan_application(app, systems=runtime.systems)
    handed = fan_out_for_run(runtime, app, plan)
    if handed.disabled:
        _log.warning(
            "application %s: startpoints are disabled: %s wait", app.name, len(handed.disabled)
        )
    outcome = apply_dataset_startpoints(
        runtime, app, startpoints, handed, only=only, on_report=on_report
    )
    return replace(outcome, fan_out=handed)


def advance_datasets(
    runtime: Runtime,
    app: Application,
    plan: ExecutionPlan | None = None,
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore_stage,
) -> DatasetOutcome:
    """Rewind datasets to their startpoints, then advance all of them; return the reports of both,
    in order.

    Datasets and version sets advance in parallel threads of one Spark session. One that fails does
    not stop the others: the first error is raised at the end and names the rest. `on_report` is
    called in declaration order by the calling thread, `on_stage` by one thread at a time.
    """
    applied = apply_startpoints(runtime, app, plan, on_report=on_report)
    to_advance = []
    for dataset in app.datasets:
        if is_advanced_by_runs(dataset) and dataset.name not in applied.failed:
            to_advance.append(dataset)
    units = group_datasets(to_advance, f"application {app.name!r}")
    session_lock = threading.Lock()
    stage_lock = threading.Lock()

    def session() -> SparkSession:
        with session_lock:  # threads may ask at the same time
            return runtime.spark()

    def forward_stage(event: StageEvent) -> None:
        with stage_lock:
            on_stage(event)

    shared = runtime if runtime.spark is IN_PROCESS else replace(runtime, spark=session)
    reports: list[AdvanceReport] = []
    errors: list[Exception] = []
    pool = ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="adjunct-advance")
    try:
        futures = [
            pool.submit(advance_unit, shared, unit, on_stage=forward_stage) for unit in units
        ]
        for future in futures:
            try:
                done = future.result()
            except Exception as error:  # noqa: BLE001 - raised when the others have ended
                errors.append(find_adjunct_error(error) or error)
                continue
            for report in done:
                on_report(report)
            reports += done
    finally:
        # After Ctrl-C do not wait for the others: they end with the session.
        pool.shutdown(wait=False, cancel_futures=True)
    raise_first(errors, describe=first_message_line)
    applied.raise_failed()
    return replace(applied, reports=(*applied.reports, *reports))


# How often datasets are advanced, at most, while other processes advance them too.
_MAX_ADVANCES = 3


def advance_changed(
    runtime: Runtime,
    app: Application,
    plan: ExecutionPlan,
    *,
    on_report: Callable[[AdvanceReport], None],
    on_stage: OnStage = ignore_stage,
) -> None:
    """Advance the datasets of a run that stays; report those that changed.

    Where another process advances a dataset at the same time, it is advanced again: that process
    may not have seen what this run looks for. After _MAX_ADVANCES conflicts it is left to the next
    look.
    """

    def report_changed(report: AdvanceReport) -> None:
        if report.changed:
            on_report(report)

    for _ in range(_MAX_ADVANCES):
        with suppress(CommitConflictError):
            advance_datasets(runtime, app, plan, on_report=report_changed, on_stage=on_stage)
            break


_UNLIMITED_REQUEST = 60.0
"""The seconds that a request without a limit of its own counts as under way: a user's function,
`timeout=None`.
"""


def longest_request(app: Application, systems: Mapping[str, StreamSystem]) -> float:
    """Return how many seconds a write of an application's run may be under way, as far as that is
    limited.

    Writes to the lake do not count: what a run sends that has lost its lease changes nothing there.
    """
    limits = [0.0]
    for operator in app.operators:
        send = operator.spec.send
        target = operator.spec.target(app)
        if send is not None:
            limits.append(app.tables[send.table].retry.timeout or _UNLIMITED_REQUEST)
        elif target is not None and target.kind == "sink":
            limits.append(_UNLIMITED_REQUEST)
        elif target is not None and target.kind == "stream":
            system = systems.get(split_stream_name(target.name)[0])
            limits.append(getattr(system, "longest_request", 0.0))
    return max(limits)


@dataclass(frozen=True, slots=True)
class RunCalls:
    """What a run calls.

    - `on_event`: receives the events of the step.
    - `on_report`: receives the step's report after each batch.
    - `on_advance`: receives the reports of datasets that advance after the first step has begun.
    - `on_stage`: receives each stage of these datasets.
    - `warn`: receives the plan's notes.
    - `say` and `tick`: see `Following`; for a run that stays.
    """

    on_event: Callable[[StepEvent], None]
    on_advance: Callable[[AdvanceReport], None]
    warn: Callable[[str], None]
    say: Callable[[str], None]
    on_report: Callable[[StepReport], None] = lambda report: None
    on_stage: OnStage = ignore_stage
    tick: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """The plan of a step over the streams as they were when it began, and the identities of the
    streams that the run reads.
    """

    plan: ExecutionPlan
    identities: Mapping[str, str | None]


@dataclass(slots=True)
class _LeasedRun:
    """A run that holds its lease: it plans and begins each step.

    `writes_as` is the name by which tables know a renamed application; nobody renames it while this
    run has the lease. `planned` is the last step that has begun.
    """

    runtime: Runtime
    app: Application
    lease: RunLease
    advance: Callable[[Runtime, ExecutionPlan], FanOut | None]
    calls: RunCalls
    adopt: bool
    max_batches: int | None
    opened: ExitStack
    writes_as: str | None = None
    planned: _PlannedStep | None = None
    registered: RegisteredTables | None = None

    @property
    def plan(self) -> ExecutionPlan:
        """The plan of the current step."""
        assert self.planned is not None
        return self.planned.plan

    def begin(self) -> StepContext:
        """Plan a step, advance the datasets, and return what the step works with.

        The first time, also checks that the application may run, and registers its remote tables.
        """
        app = self.app
        runtime = self.runtime
        if self.planned is None:
            check = partial(check_first_run, runtime.lake, app, adopt=self.adopt)
            catalog, self.writes_as = call_in_threads(self._read_catalog, check)
            self.planned = self._plan_step(catalog)
        else:
            self.planned = self._plan_step(self._read_catalog())
        check_session(runtime, self.plan)
        if self.registered is None:
            self.registered = self._register_tables()
        fan_out = self.advance(runtime, self.plan)
        # Startpoints are fanned out once a step, which rewinding datasets may have done already.
        if fan_out is None:
            fan_out = fan_out_for_run(runtime, app, self.plan)
        hooks = RunHooks(
            on_event=self.calls.on_event,
            on_report=self.calls.on_report,
            between_batches=self._follow_datasets,
        )
        return StepContext(
            runtime,
            app,
            self.plan,
            fan_out,
            hooks=hooks,
            max_batches=self.max_batches,
            still_ours=self.lease.check,
            lease=self.lease,
            registered=self.registered,
        )

    def refresh(self) -> bool:
        """Advance the datasets if the plan still holds for the streams as they are now; return
        whether it does.
        """
        if self._plan_step(self._read_catalog()) != self.planned:
            return False
        advance_changed(
            self.runtime,
            self.app,
            self.plan,
            on_report=self.calls.on_advance,
            on_stage=self.calls.on_stage,
        )
        return True

    def _read_catalog(self) -> Catalog:
        """Return the facts of the application's streams as they are now."""
        return read_catalog(self.app, self.runtime.systems)

    def _plan_step(self, catalog: Catalog) -> _PlannedStep:
        """Return the plan of a step over these streams."""
        read = {*self.app.inputs, *list_dataset_streams(self.app)}
        identities = {name: facts.identity for name, facts in catalog.items() if name in read}
        plan = build_plan(self.app, catalog, writes_as=self.writes_as)
        return _PlannedStep(plan, identities)

    def _register_tables(self) -> RegisteredTables:
        """Report the plan and its warnings, and register the application's remote tables until the
        run's end.
        """
        calls = self.calls
        for note in note_table_order(self.plan.tables):
            calls.warn(note)
        calls.on_event(new_planned_event(self.app))
        runtime = self.runtime
        tables = register_tables(runtime.lake, self.app, by=runtime.by, warn=calls.warn)
        return self.opened.enter_context(tables)

    def _follow_datasets(self) -> None:
        """Advance the datasets that are followed while batches run."""
        on_report = self.calls.on_advance
        on_stage = self.calls.on_stage
        advance_followed_datasets(self.runtime, self.app, on_report=on_report, on_stage=on_stage)


def run_batches(
    runtime: Runtime,
    app: Application,
    claim: Claim,
    advance: Callable[[Runtime, ExecutionPlan], FanOut | None],
    calls: RunCalls,
    *,
    adopt: bool,
    max_batches: int | None = None,
) -> tuple[StepReport, ExecutionPlan]:
    """Run the step of an application under its run lease: once, or again and again for as long as
    the run `stays`.

    `advance` advances the datasets before a step, with the runtime of the run, whose writes check
    its lease. It returns the fan-out, if it has made one. Returns the report and the latest plan.
    """
    lake = runtime.lake
    systems = runtime.systems
    with ExitStack() as opened:
        opened.enter_context(lake.manifests.while_kept())
        claim = replace(claim, in_flight=longest_request(app, systems))
        lease = opened.enter_context(RunLease(lake, app.name, runtime.by, claim))
        fenced_systems = {name: system.fenced(lease.fence) for name, system in systems.items()}
        fenced_runtime = replace(runtime, lake=lake.fenced(lease.fence), systems=fenced_systems)
        run = _LeasedRun(
            fenced_runtime,
            app,
            lease,
            advance=advance,
            calls=calls,
            adopt=adopt,
            max_batches=max_batches,
            opened=opened,
        )
        following = None
        if claim.stays is not None:
            following = follow_application(
                fenced_runtime,
                app,
                claim.stays,
                asked=lease.asked_by,
                refresh=run.refresh,
                say=calls.say,
                tick=calls.tick,
            )
        report = run_steps(following, run.begin)
        return report, run.plan


@validated
@translate_spark_errors()
def run_application(  # noqa: PLR0913
    app: Application,
    *,
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    run: str | None = None,
    on_event: Callable[[StepEvent | AdvanceReport], None] = lambda event: None,
    on_report: Callable[[StepReport], None] = lambda report: None,
    on_stage: OnStage = ignore_stage,
    max_batches: int | None = None,
    wait: timedelta | float = DEFAULT_WAIT,
    take_over: bool = False,
    adopt: bool = False,
    follow: timedelta | float | None = None,
) -> RunReport:
    """Advance every dataset in parallel, then run the step until it has caught up.

    With `follow` (a timedelta or seconds), the run then stays for that long: it keeps what it has
    opened, and goes on when there are new records, versions, changes or startpoints. It ends
    earlier when another run asks for the application, after `max_batches`, and when its memory
    exceeds a limit.

    Lake, systems and session default to those of `open_lake()`, `systems_for(app)` and
    `session_scope()`. Partitioned datasets that are built by a query are read as they are. Datasets
    without `bootstrap` are advanced again between batches. `run` names this run in commits; by
    default the name is random. `on_event` receives the events of datasets and batches, `on_report`
    the report of the step after each batch, `on_stage` each stage of a dataset, such as the
    progress of a bootstrap. Startpoints on the streams of datasets are applied first.

    One run of an application works at a time. If another run is alive, this one waits at most
    `wait` (a timedelta or seconds; 0 does not wait), then raises ApplicationBusyError, which names
    the other run. A dead run is taken over at once, a live one only with `take_over`: this run
    takes its lease, and begins when the other, which stops at its next request, can't write any
    more. The first run of an application is rejected if another application, such as its own former
    name, has written its outputs from its inputs, unless startpoints say where to begin, or `adopt`
    accepts the outputs as they are.

    Raises the errors of planning, datasets and step, and RunLeaseLostError. What was committed
    before an error stays, and the next run continues from there. A failing dataset does not stop
    the others.
    """
    run = f"run-{uuid4().hex[:12]}" if run is None else run
    lake = open_lake() if lake is None else lake
    if systems is None:
        systems = systems_for(app, lake=lake)
    systems = {**open_systems(lake, app.restated), **systems}
    stays = None if follow is None else validate_span("follow", follow)
    if not lake.exists():
        # Plan before taking the lease, which would create the lake: its URL may be mistyped.
        plan_application(app, systems=systems)

    def report_lease(text: str) -> None:
        _log.warning(text)
        on_event(StepEvent("lease", 0, {"text": text}))

    def report_following(text: str) -> None:
        on_event(StepEvent("follow", 0, {"text": text}))

    def record_report(report: AdvanceReport) -> None:
        """Keep the report; a run that stays drops old ones now and then, except those with a
        rejected version.
        """
        on_event(report)
        datasets.append(report)
        if len(datasets) >= 2 * MAX_REPORTS:
            datasets[:-MAX_REPORTS] = [older for older in datasets[:-MAX_REPORTS] if older.rejected]

    claim = Claim(
        wait=validate_span("wait", wait), take_over=take_over, stays=stays, say=report_lease
    )
    datasets: list[AdvanceReport] = []
    calls = RunCalls(
        on_event=on_event,
        on_advance=record_report,
        warn=partial(_log.warning, "application %s: %s", app.name),
        say=report_following,
        on_report=on_report,
        on_stage=on_stage,
    )
    with open_runtime((), lake=lake, systems=systems, spark=spark, by=run) as opened:
        runtime = replace(opened, few_in_process=app.engine == "auto")

        def advance(fenced: Runtime, plan: ExecutionPlan) -> FanOut | None:
            advanced = advance_datasets(fenced, app, plan, on_report=on_event, on_stage=on_stage)
            datasets.extend(advanced.reports)
            return advanced.fan_out

        step, _ = run_batches(
            runtime, app, claim, advance, calls, adopt=adopt, max_batches=max_batches
        )
    return RunReport(tuple(datasets), step)


def run_steps(following: Following | None, begin: Callable[[], StepContext]) -> StepReport:
    """Run the step of an application: once, or again and again while the run stays; return the
    report of all.

    `begin` plans, hands out the startpoints, and returns the context of the next step.
    """
    if following is None:
        return run_step(begin())
    report: StepReport | None = None
    while True:
        following.begin()
        context = begin()
        hooks = replace(context.hooks, wait=following.wait, go_on=following.go_on)
        report = run_step(replace(context, hooks=hooks, earlier=report))
        is_at_limit = context.max_batches is not None and report.batches >= context.max_batches
        if following.ended or is_at_limit:
            return report

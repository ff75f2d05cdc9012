"""Assets of an application's outputs: materializing them runs the application's step."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import dagster as dg
from pydantic import Field

from dagster_adjunct.assets.declaration.dataset import BoundedDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    describe_partitions,
    is_advanced_by_partition,
    to_dagster_name,
)
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, validate_span
from dagster_adjunct.orchestration.code_location import checks, dataset_assets, metadata
from dagster_adjunct.orchestration.code_location.dataset_assets import AssetEvent
from dagster_adjunct.orchestration.code_location.nodes import NODE_KINDS, VERSION_KEY, RunOutputs
from dagster_adjunct.orchestration.code_location.op_work import run_work
from dagster_adjunct.orchestration.code_location.resources import LakeResource, SparkResource
from dagster_adjunct.orchestration.code_location.submission import Host
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode

if TYPE_CHECKING:
    from dagster_adjunct.assets.generation import Runtime
    from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
    from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
    from dagster_adjunct.orchestration.step.progress import InputTimes, StepReport
    from dagster_adjunct.resources.streams.system import SystemStreamPartition

_WAIT_SECONDS = 300.0


class StepConfig(dg.Config):
    """Run configuration of the op that runs an application's batches."""

    take_over: bool = Field(
        default=False,
        description=(
            "Take the lease of another run of the application, even if it is alive, and begin when"
            " that one can't write any more."
        ),
    )
    adopt: bool = Field(
        default=False,
        description=(
            "Let a first run write to outputs that another application has written from the same"
            " inputs."
        ),
    )
    wait_seconds: float = Field(
        default=_WAIT_SECONDS,
        description="How long to wait for another run to end; 0 fails at once.",
    )
    follow_seconds: float = Field(
        default=0.0,
        description=(
            "How long to stay and go on when there is something new; 0 ends when it has caught up."
        ),
    )


@dataclass(frozen=True)
class ApplicationAssets:
    """The assets of an application's outputs and of what it reads, and how a run reports on them.

    `inputs` are the assets of its input streams, `datasets` those of its datasets, whose served
    versions are reported, and `tables` those of its lookup tables. `preview_rows` is the number of
    records to show of each output stream.
    """

    app: Application
    outputs: Mapping[LineageNode, dg.AssetSpec]
    inputs: Mapping[str, dg.AssetKey]
    datasets: Mapping[str, dg.AssetKey]
    tables: Mapping[str, dg.AssetKey]
    preview_rows: int = 0

    @cached_property
    def joins(self) -> dict[str, dg.AssetCheckSpec]:
        """The checks of match rates, by join."""
        return checks.join_check_specs(self.app, self.outputs)

    @cached_property
    def expectations(self) -> dict[str, dg.AssetCheckSpec]:
        """The checks of expectations, by operator."""
        return checks.expectation_check_specs(self.app, self.outputs)

    @cached_property
    def restatements(self) -> dict[str, dg.AssetCheckSpec]:
        """The checks of results that follow changes of datasets, by join."""
        return checks.restatement_check_specs(self.app, self.outputs)

    @cached_property
    def lags(self) -> dict[str, dg.AssetCheckSpec]:
        """The checks of watermarks, by input stream."""
        return checks.watermark_check_specs(self.app, self.outputs)

    @cached_property
    def files(self) -> dict[str, dg.AssetCheckSpec]:
        """The checks of files that were set aside, by input stream."""
        return checks.file_check_specs(self.app, self.outputs)

    def report_inputs(self, op: checks.OpRun) -> dict[str, str]:
        """Log observations of the inputs at a run's start; return which datasets the run leaves
        out, and why.
        """
        waiting = log_skipped_datasets(op, self.app)
        dataset_assets.observe_streams(op, self.inputs)
        self.report_datasets(op)
        return waiting

    def report_datasets(self, op: checks.OpRun) -> None:
        """Log the served versions of the datasets that runs of other assets build; not those of
        partitioned datasets, whose runs report each partition.
        """
        for dataset in self.app.datasets:
            if dataset.versions is not None or dataset.is_owned_by(self.app.name):
                continue
            manifest = StoredVersions(op.lake, dataset).manifest()
            if manifest is not None and manifest.version is not None:
                dataset_assets.report_served_version(
                    op.context, op.lake, dataset, self.datasets[dataset.name], manifest
                )

    def report_batches(self, op: checks.OpRun, report: "StepReport") -> None:
        """Log a materialization of each output while a run stays."""
        shared = metadata.step_metadata(report) | metadata.lookup_metadata(report, self.tables)
        description = _describe_batches(self.app, report)
        tags = {metadata.DATA_VERSION_TAG: _data_version(self.app, report)}
        for node, spec in self.outputs.items():
            facts = shared | metadata.output_metadata(report, node.name)
            op.context.log_event(dg.AssetMaterialization(spec.key, description, facts, tags=tags))

    def describe_outputs(
        self,
        op: checks.OpRun,
        report: "StepReport",
        planned: "ExecutionPlan",
        waiting: Mapping[str, str],
    ) -> dict[LineageNode, dict[str, Any]]:
        """Return the metadata of each output at the end of a run."""
        written = RunOutputs(op.lake, op.systems, self.app, self.preview_rows, planned.tables)
        keys_read = {**self.inputs, **self.datasets, **self.tables}

        def key_of(node: LineageNode) -> dg.AssetKey | None:
            if node in self.outputs:
                return self.outputs[node].key
            return keys_read.get(node.name)

        made = metadata.output_columns(self.app, planned)
        traced = metadata.trace_sources(made)
        shared = metadata.step_metadata(report) | metadata.plan_metadata(planned)
        shared |= metadata.lookup_metadata(report, self.tables)
        if waiting:
            shared["adjunct/left_out"] = dg.MetadataValue.json(dict(waiting))
        return {
            node: shared
            | metadata.output_metadata(report, node.name)
            | NODE_KINDS[node.kind].written(written, node.name, traced.get(node, {}))
            | metadata.lineage_metadata(made.get(node, {}), key_of)
            for node in self.outputs
        }

    def report_outputs(
        self,
        op: checks.OpRun,
        report: "StepReport",
        described: Mapping[LineageNode, dict[str, Any]],
        began: "ApplicationState | None" = None,
    ) -> Iterator[AssetEvent | dg.AssetCheckResult]:
        """Yield the events of the outputs and their checks at the end of a run. Before the first
        batch there are none, and a warning is logged.

        `began` is the application's state before the run. If it is not known, the check of files
        covers the last batch.
        """
        context = op.context
        if not report.state.batch:
            context.log.warning(
                f"{self.app.name} has run no batch yet, because its inputs hold no records."
            )
            yield from dataset_assets.missing_check_outputs(context)
            return
        version = _data_version(self.app, report)
        description = _describe_batches(self.app, report)
        for node, spec in self.outputs.items():
            facts = dict(described[node])  # local tables have data versions of their own
            yield from dataset_assets.report_version(
                context, spec.key, facts.pop(VERSION_KEY, version), facts, description
            )
        after = None
        if began is None:
            since = _last_starts(self, report.state)
        else:
            since = _positions_of(self.files, began.checkpoint)
            if began.last is not None:
                after = began.last.closed_at
        files = checks.file_check_results(op, self.files, since, after)
        yield from self.report_checks(
            op, report.counters, report.samples, report.event_time.watermarks, files
        )

    def report_checks(
        self,
        op: checks.OpRun,
        counters: Mapping[str, Mapping[str, int]],
        samples: Mapping[str, Sequence[str]],
        inputs: "Sequence[InputTimes]",
        files: Iterable[dg.AssetCheckResult],
    ) -> Iterator[AssetEvent | dg.AssetCheckResult]:
        """Yield the results of the selected checks, and an output for each that has none; `files`
        are the results of the checks of files.
        """
        context = op.context
        restated = checks.restatement_check_results(
            context, op.lake, self.app, self.restatements, counters
        )
        results = [
            *checks.join_check_results(context, self.app, self.joins, counters),
            *checks.expectation_check_results(
                context, self.app, self.expectations, counters, samples
            ),
            *restated,
            *checks.watermark_check_results(context, self.lags, inputs),
            *files,
        ]
        yield from results
        yield from dataset_assets.missing_check_outputs(context, results)


def _positions_of(
    streams: Iterable[str], offsets: "Mapping[SystemStreamPartition, str]"
) -> dict[str, str]:
    """Return the offset of each of the streams, by stream; each has one partition."""
    chosen = set(streams)
    return {
        ssp.qualified_stream: offset
        for ssp, offset in offsets.items()
        if ssp.qualified_stream in chosen
    }


def outputs_asset(assets: ApplicationAssets) -> dg.AssetsDefinition:
    """Return the multi-asset of an application's outputs, which one run of its step materializes.

    Before the first batch nothing is materialized; outputs that no batch changed are observed.
    """
    app = assets.app
    specs: list[dg.AssetCheckSpec] = []
    kinds = (assets.joins, assets.expectations, assets.restatements, assets.lags, assets.files)
    for found in kinds:
        specs += found.values()

    @dg.multi_asset(
        name=to_dagster_name(f"{app.name}_step"),
        specs=[spec.replace_attributes(skippable=True) for spec in assets.outputs.values()],
        check_specs=specs,
        # Lets the UI and sensors select assets without their checks.
        can_subset=bool(specs),
        pool=f"adjunct/application/{app.name}",
        description=app.description or None,
    )
    def step(
        context: dg.AssetExecutionContext,
        config: StepConfig,
        adjunct_lake: LakeResource,
        adjunct_spark: SparkResource,
    ) -> Iterator[AssetEvent | dg.AssetCheckResult]:
        from dagster_adjunct.orchestration.batch_log.batch_log import application_state
        from dagster_adjunct.orchestration.planner.planner import systems_for
        from dagster_adjunct.orchestration.step.progress import measure_input_times

        if not context.selected_asset_keys:  # checks of the last batch; none is run
            with metadata.translate_errors(context):
                lake = adjunct_lake.open()
                state = application_state(lake, app.name)
                times = measure_input_times(app, state.times, lake.now())
                op = checks.OpRun(context, lake, systems_for(app, lake=lake))
            counters = state.last.counters if state.last is not None else {}
            files = checks.file_check_results(op, assets.files, _last_starts(assets, state))
            yield from assets.report_checks(op, counters, {}, times, files)
            return
        with metadata.translate_errors(context):
            lake = adjunct_lake.open()
            op = checks.OpRun(context, lake, systems_for(app, lake=lake))
            began = application_state(lake, app.name)
            waiting = assets.report_inputs(op)
            report_datasets = partial(assets.report_datasets, op)
            report_batches = partial(assets.report_batches, op)
            with checks.report_failed_operators(context, assets.expectations, assets.restatements):
                report, planned = _run_batches(
                    op, app, config, adjunct_spark, report_datasets, report_batches
                )
            if report.batches > 1 or config.follow_seconds:
                report_datasets()  # later batches may have read newer versions
            described = assets.describe_outputs(op, report, planned, waiting)
        yield from assets.report_outputs(op, report, described, began)

    return step


def _last_starts(assets: ApplicationAssets, state: "ApplicationState") -> dict[str, str]:
    """Return the offsets at which the last batch began to read streams of files, by stream."""
    if state.last is None:
        return {}
    starts = {ssp: span.start for ssp, span in state.last.intent.ranges.items()}
    return _positions_of(assets.files, starts)


def _data_version(app: Application, report: "StepReport") -> str:
    """Return the data version of outputs that have all batches up to the last one of this
    report.
    """
    return hashlib.sha256(f"{app.name}:{report.state.batch}".encode()).hexdigest()[:16]


def _describe_batches(app: Application, report: "StepReport") -> str:
    """Return how many batches a run has done, and which is the last of all."""
    return f"{app.name}: {report.batches} batches, the last of all is {report.state.batch}"


def _run_batches(
    op: checks.OpRun,
    app: Application,
    config: StepConfig,
    spark: SparkResource,
    report_datasets: Callable[[], None],
    report_batches: "Callable[[StepReport], None]",
) -> "tuple[StepReport, ExecutionPlan]":
    """Run the application's step under its run lease; return the report and the plan.

    A run that stays (`follow_seconds`) reports datasets and batches while it runs, by the two
    functions.
    """
    from dagster_adjunct.orchestration.planner.planner import systems_for

    log = op.context.log
    work = StepWork(
        app,
        validate_span("follow", config.follow_seconds) if config.follow_seconds else None,
        validate_span("wait", config.wait_seconds),
        take_over=config.take_over,
        adopt=config.adopt,
    )
    handlers = {
        "event": op.log_event,
        "advanced": lambda done: log.info(done.summary()),
        "batches": report_batches,
        "datasets": lambda done: report_datasets(),
        "info": log.info,
        "warning": log.warning,
    }
    few_in_process = app.engine == "auto"
    systems = partial(systems_for, app)
    return run_work(
        op, spark, work, handlers, systems, few_in_process=few_in_process, submit_at_once=True
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """Runs the step of an application on the host where it is called, and reports to the op.

    `lasts` is how long the run stays once it has caught up (None: it ends). `wait`, `take_over` and
    `adopt` are those of StepConfig.
    """

    app: Application
    lasts: timedelta | None
    wait: timedelta
    take_over: bool
    adopt: bool

    def __call__(self, host: Host) -> "tuple[StepReport, ExecutionPlan]":
        """Run the batches; return the report and the plan by which they ran."""
        from dagster_adjunct.orchestration.step.run import RunCalls, run_batches

        runtime = host.runtime
        tell = host.tell
        app = self.app
        lasts = self.lasts
        warn = partial(tell, "warning")
        claim = Claim(
            wait=self.wait,
            take_over=self.take_over,
            stays=lasts,
            dagster=runtime.by,
            finished=host.has_ended,
            say=warn,
        )
        reports: Bundled[StepReport] = Bundled(partial(tell, "batches"))
        versions: Bundled[AdvanceReport] = Bundled(partial(tell, "datasets"))

        def report_advance(done: AdvanceReport) -> None:
            """Report a dataset's advance; in a run that stays, the datasets' assets too."""
            tell("advanced", done)
            if lasts is not None:
                versions.add(done)

        def advance(fenced: "Runtime", plan: "ExecutionPlan") -> None:
            """Advance the datasets that no other op does: all of them in a run that stays."""
            from dagster_adjunct.orchestration.step.run import advance_changed, advance_unit

            if lasts is not None:
                # For what was delivered, and startpoints, since the datasets' own ops advanced
                # them.
                advance_changed(fenced, app, plan, on_report=report_advance)
                return
            for dataset in app.datasets:
                # Other datasets are advanced by the ops of their own assets.
                if dataset.is_owned_by(app.name):
                    advance_unit(fenced, [dataset])

        def flush() -> None:
            reports.flush()
            versions.flush()

        calls = RunCalls(
            on_event=partial(tell, "event"),
            on_advance=report_advance,
            warn=warn,
            say=partial(tell, "info"),
            on_report=(lambda report: None) if lasts is None else reports.add,
            tick=flush,
        )
        return run_batches(runtime, app, claim, advance, calls, adopt=self.adopt)


T = TypeVar("T")


class Bundled(Generic[T]):
    """Passes on the reports of a run that stays: only the newest one, and at most one every
    `every` seconds.
    """

    def __init__(
        self,
        report: Callable[[T], None],
        clock: Callable[[], float] = time.monotonic,
        every: float = 60.0,
    ) -> None:
        self._report = report
        self._clock = clock
        self._every = every
        self._due = clock() + every
        self._waiting: T | None = None

    def add(self, report: T) -> None:
        """Pass the report on if the last one is old enough; otherwise keep it, in place of the
        one kept before.
        """
        self._waiting = report
        self.flush()

    def flush(self) -> None:
        """Pass on the report that is kept, if any, once the last one is old enough."""
        if self._waiting is not None and self._clock() >= self._due:
            self._report(self._waiting)
            self._waiting = None
            self._due = self._clock() + self._every


def log_skipped_datasets(run: checks.OpRun, app: Application) -> dict[str, str]:
    """Log which datasets this run does not advance because their versions are partitions.

    Returns, by dataset, which version is delivered or awaited. A delivered one is logged as a
    warning.
    """
    from dagster_adjunct.orchestration.step.progress import NextVersion, find_delivered_version

    log = run.context.log
    waiting = {}
    for dataset in app.datasets:
        if not isinstance(dataset, BoundedDataset) or dataset.versions is None:
            continue
        on_demand = is_advanced_by_partition(dataset)  # nothing lists what is delivered
        if on_demand:
            found = NextVersion(None)
        else:
            found = find_delivered_version(run.lake, run.systems, dataset)
        version = found.version
        note = describe_partitions(dataset)
        if version is not None:
            log.warning(
                f"Version {version} of {dataset.name} is delivered, but this run does not build it."
                f" {note}"
            )
            waiting[dataset.name] = f"version {version} is delivered"
        else:
            log.info(note)
            waiting[dataset.name] = found.awaited or "not requested"
    return waiting

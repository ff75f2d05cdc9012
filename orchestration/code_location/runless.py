"""Reports what the command line has done to Dagster, as events without a run: the same events as
runs in Dagster log.

Events are for the assets that `build_definitions` makes with the default translator. Nothing here
fails a command: if Dagster's storage can't be reached, the rest is not reported, and one warning
says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.code_location import dataset_assets, metadata
from dagster_adjunct.orchestration.code_location.checks import OpRun
from dagster_adjunct.orchestration.code_location.dataset_assets import DatasetAsset
from dagster_adjunct.orchestration.code_location.definitions import AssetGraph
from dagster_adjunct.orchestration.code_location.nodes import AdjunctTranslator
from dagster_adjunct.orchestration.code_location.output_assets import Bundled
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import first_message_line
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.progress import StepReport

_log = logging.getLogger("adjunct.dagster")
_REPORT_SECONDS = 60.0
# What an op would log, the command prints itself.
_silent = logging.Logger("adjunct.dagster.events")
_silent.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class _Names:
    """Names of outputs, which only an op has."""

    def get_output_name_for_asset_key(self, key: dg.AssetKey) -> str:
        """Return a name for an asset's output."""
        return key.to_python_identifier()

    def get_output_name_for_asset_check_key(self, key: dg.AssetCheckKey) -> str:
        """Return a name for a check's output."""
        return key.name


@dataclass(frozen=True)
class _Run:
    """The command's run, with an id as Dagster's runs have one."""

    run_id: str


@dataclass
class RunlessContext:
    """What the functions that report to Dagster use of an op's context; all assets and checks
    are selected.
    """

    instance: dg.DagsterInstance
    run: _Run
    selected_asset_keys: frozenset[dg.AssetKey]
    selected_asset_check_keys: frozenset[dg.AssetCheckKey]
    log: logging.Logger = _silent
    assets_def: _Names = field(default_factory=_Names)

    def log_event(self, event: Any) -> None:
        """Store an event."""
        self.instance.report_runless_asset_event(event)


def _as_event(event: object) -> dg.AssetMaterialization | dg.AssetCheckEvaluation | None:
    """Return what an op yields as an event without a run; None for an output, which is none."""
    if isinstance(event, dg.AssetMaterialization):
        return event
    if isinstance(event, dg.MaterializeResult):
        tags = dict(event.tags or {})
        if event.data_version:
            tags[metadata.DATA_VERSION_TAG] = event.data_version.value
        assert event.asset_key is not None
        return dg.AssetMaterialization(event.asset_key, metadata=event.metadata, tags=tags)
    if isinstance(event, dg.AssetCheckResult):
        assert event.asset_key is not None
        assert event.check_name is not None
        return dg.AssetCheckEvaluation(
            asset_key=event.asset_key,
            check_name=event.check_name,
            passed=event.passed,
            metadata=event.metadata,
            severity=event.severity,
            description=event.description,
        )
    return None


class _Advance(NamedTuple):
    """The report of a dataset's advance, and the partition that was requested, if any."""

    report: AdvanceReport
    partition: str | None


class RunlessReporter:
    """Reports what one command does with an application; `by` names the command's run.

    Reports of datasets may come from any thread. They are stored with those of the step, or at the
    end.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        app: Application,
        lake: Lake,
        systems: Mapping[str, StreamSystem],
        by: str,
    ) -> None:
        self._instance = instance
        self._app = app
        self._lake = lake
        self._systems = systems
        self._by = by
        self._advanced: list[_Advance] = []
        self._batches: Bundled[StepReport] = Bundled(
            self._report_batches, time.monotonic, _REPORT_SECONDS
        )
        self._step: StepReport | None = None
        self._error: Exception | None = None

    def add_advance(self, report: AdvanceReport, partition: str | None = None) -> None:
        """Keep the report of a dataset's advance, for the next time that events are stored."""
        self._advanced.append(_Advance(report, partition))

    def add_batch(self, report: StepReport) -> None:
        """Report the outputs after a batch, at most once a minute."""
        self._batches.add(report)

    def set_step(self, report: StepReport) -> None:
        """Keep the report of the step at its end."""
        self._step = report

    def end(self) -> None:
        """Report the datasets, and the outputs if a step has run; warn if Dagster's storage
        could not be reached.
        """
        self._attempt(self._report_advanced)
        if self._step is not None:
            self._attempt(partial(self._report_step, self._step))
        if self._error is not None:
            found = f"{type(self._error).__name__}: {first_message_line(self._error)}"
            _log.warning(
                "Dagster was not told all that this command did, because its storage failed (%s)."
                " The command's own results are stored. Check DAGSTER_HOME (%s) and the storage in"
                " its dagster.yaml.",
                found,
                self._instance.root_directory if self._instance.is_persistent else "in memory",
            )

    def _attempt(self, act: Callable[[], None]) -> None:
        """Do this unless something has failed before; keep an error."""
        if self._error is None:
            try:
                act()
            # Whatever a storage raises must not end the command.
            except Exception as error:  # noqa: BLE001
                self._error = error

    @cached_property
    def _graph(self) -> AssetGraph:
        """The assets of the application alone."""
        graph = AssetGraph(AdjunctTranslator(), 0, link_code=False)
        graph.add(self._app)
        return graph

    @cached_property
    def _op(self) -> OpRun:
        """What stands for an op in which all assets and checks are selected."""
        built = self._graph.built_assets()
        selected = frozenset(key for asset in built for key in asset.keys)
        evaluated = frozenset(key for asset in built for key in asset.check_keys)
        context: Any = RunlessContext(self._instance, _Run(self._by), selected, evaluated)
        return OpRun(context, self._lake, self._systems)

    def _log_all(self, events: Iterable[object]) -> None:
        """Store what an op would yield."""
        for event in events:
            stored = _as_event(event)
            if stored is not None:
                self._instance.report_runless_asset_event(stored)

    def _report_advanced(self) -> None:
        """Store the events of the datasets that have advanced since the last time."""
        while self._advanced:
            advance = self._advanced.pop(0)
            member = self._graph.datasets.get(advance.report.dataset)
            if member is not None and member.key in self._op.context.selected_asset_keys:
                self._report_dataset(member, advance)

    def _report_dataset(self, member: DatasetAsset, advance: _Advance) -> None:
        """Store the events of a dataset, or of its partitions, after an advance."""
        dataset_assets.observe_streams(self._op, member.streams)
        if member.dataset.versions is None:
            results = dataset_assets.dataset_results(self._op, member, advance.report)
        else:
            results = dataset_assets.report_partitions(
                self._op, member, advance.report, advance.partition
            )
        self._log_all(results)

    def _report_batches(self, report: StepReport) -> None:
        """Store the events of the outputs after a batch, those of datasets first."""
        self._attempt(self._report_advanced)
        assets = self._graph.applications.get(self._app.name)
        if assets is not None and report.batches:
            self._attempt(lambda: assets.report_batches(self._op, report))

    def _report_step(self, report: StepReport) -> None:
        """Store the events of the outputs and their checks at the end of the step."""
        assets = self._graph.applications.get(self._app.name)
        if assets is None:
            return
        planned = plan_application(
            self._app, systems=self._systems, writes_as=report.state.names.writes_as
        )
        waiting = assets.report_inputs(self._op)
        described = assets.describe_outputs(self._op, report, planned, waiting)
        self._log_all(assets.report_outputs(self._op, report, described))


@contextmanager
def reporting_to(
    home: Path, app: Application, lake: Lake, systems: Mapping[str, StreamSystem], by: str
) -> Iterator[RunlessReporter | None]:
    """Yield a reporter to the Dagster instance of this home; None, with a warning, if the instance
    can't be opened.

    At the end of the context, also after an error, what was not reported yet is.
    """
    try:
        instance = dg.DagsterInstance.from_config(str(home))
    except Exception as error:  # noqa: BLE001 - the command's own work goes on
        found = f"{type(error).__name__}: {first_message_line(error)}"
        _log.warning(
            "Dagster is not told what is done here: its instance in %s can't be opened (%s).",
            home,
            found,
        )
        yield None
        return
    with instance:
        reporter = RunlessReporter(instance, app, lake, systems, by)
        try:
            yield reporter
        finally:
            reporter.end()

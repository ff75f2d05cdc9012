"""Holds the dataset versions that a batch is going to meet: stored ones by leases.

Datasets that live for one run are brought up to date here: what they hold is the run's own, and needs no lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.table_lag import check_fresh
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import is_readable
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
from dagster_adjunct.resources.errors import ConfigurationError, StaleDatasetError, VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.next_batch.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.next_batch.plan_batch import PlannedBatch
    from dagster_adjunct.orchestration.step.next_batch.served_versions import ServedVersions
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch that can begin: what it is to do, and meets, under leases.

    `records` are the columns of its input streams; None where they are not known.
    """

    intent: Intent
    records: Mapping[str, Schema | None]


def hold_versions(step: OpenedStep, run: StepRun, planned: PlannedBatch, seen: Seen) -> HeldBatch:
    """Return the planned batch with the versions that it meets, leased: those that are served, or were recorded.

    Raises VersionDiscardedError where one is gone since the look, or since it was recorded; StaleDatasetError for a
    table that lacks something older than is allowed; ConfigurationError for a dataset that a recorded batch did not
    meet.
    """
    if planned.intent.reading == RECORDED:
        intent = _with_recorded(step, planned.intent, seen.served)
    else:
        intent = _with_served(step, run.logged.state, planned.intent, seen.served)
    for text in planned.losses:
        step.context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return HeldBatch(intent, seen.schemas)


def _with_served(step: OpenedStep, state: ApplicationState, intent: Intent, served: ServedVersions) -> Intent:
    """Lease what is served; of bounded datasets that are joined by time, all other versions too."""
    app, ids = step.context.app, dict(served.ids)
    _check_all_fresh(step.context, served)
    joined = [name for name in _joined_by_time(app) if ids[name] is not None]
    retained = {name: step.versions.retained_over_time(name) for name in joined}
    step.leases.take(ids, retained)
    # Opened once they are held. Of versions that say one time only the one that was sealed last is met.
    over_time = {name: step.versions.over_time(name, versions).versions for name, versions in retained.items()}
    ids |= _read_on(step, state)
    names = (*(dataset.name for dataset in app.datasets), *step.states)
    return intent.model_copy(update={"versions": {name: ids[name] for name in names}, "over_time": over_time})


def _check_all_fresh(context: StepContext, served: ServedVersions) -> None:
    """Refuse to begin a batch with a stored table that lacks something older than is allowed."""
    for name, manifest in served.limited.items():
        limit = context.app.max_staleness[name]
        if manifest is None or manifest.version is None:
            raise StaleDatasetError(
                f"dataset {name!r} has taken in nothing yet, and at most {limit} of staleness is allowed.",
                f"Advance it (materialise its asset, or adjunct dataset advance {name} MODULE:APP).",
                dataset=name,
            )
        check_fresh(context.systems, context.app.dataset(name), as_unbounded(manifest), limit, context.lake.now())


def _joined_by_time(app: Application) -> list[str]:
    """Return the bounded datasets that records are joined with as of their times."""
    matches = (operator.spec.match for operator in app.operators)
    names = {match.dataset for match in matches if match and match.dataset and match.as_of}
    return [name for name in sorted(names) if not app.dataset(name).follows_changes]


def _read_on(step: OpenedStep, state: ApplicationState) -> dict[str, str | None]:
    """Bring the datasets that live for one run up to date, and return their versions; tell what has changed.

    Before the intent, which then names what is known to be readable: a change that can't be applied would keep an
    open batch from ever ending.
    """
    context, versions = step.context, dict[str, str | None]()
    for dataset in context.app.datasets:
        if not dataset.following.persistent:
            table = step.versions.table(dataset.name, state)
            report = table.advance(context.spark)
            if report.action != "up-to-date":
                context.on_event(StepEvent("table", state.batch + 1, {"report": report}))
            if dataset.name in context.app.max_staleness:
                table.check_fresh(context.app.max_staleness[dataset.name])
            versions[dataset.name] = report.version
    return versions


def _with_recorded(step: OpenedStep, intent: Intent, served: ServedVersions) -> Intent:
    """Lease the versions that recorded replays meet, named in the intent already; there is one for each dataset.

    Tables of state are as they are `served`: what has been read before is left out there.
    """
    names = [dataset.name for dataset in step.context.app.datasets]
    cancel = f"Cancel it (adjunct startpoint clear MODULE:APP {min(intent.ranges)} --reason …) and ask again with "
    lacking = [name for name in names if name not in intent.versions]
    if lacking:
        raise ConfigurationError(
            f"a recorded replay can't go on: the application has dataset {lacking[0]!r} now, of which the batch "
            "that it follows met no version.",
            f"{cancel}versions=current.",
            application=step.context.app.name,
            dataset=lacking[0],
        )
    met = {name: intent.versions[name] for name in names}
    # The plan keeps what a discard has spared for it.
    for name in step.leases.take(met, intent.over_time, reopened=True):
        manifest = step.versions.stored(name).require_manifest()
        for version in intent.met[name]:
            if not is_readable(step.context.lake, manifest, version):
                raise VersionDiscardedError(
                    f"a recorded replay can't go on: dataset {name!r}: version {version} is gone, as after an erasure.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = {name: served.ids[name] for name in step.states}
    step.leases.take(states)
    return intent.model_copy(update={"versions": met | states})

"""Holds the dataset versions that a batch is going to read, each in the way that it was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import is_readable
from dagster_adjunct.orchestration.step.next_batch.served_versions import ServedVersions, check_all_fresh, served_now
from dagster_adjunct.orchestration.step.step_report import StepEvent
from dagster_adjunct.resources.errors import ConfigurationError, VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.step.next_batch.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.schemas.schema import Schema

# How often versions are chosen anew where one of them is discarded between the look and the lease.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch that can begin: what it is to do, and meets, under leases.

    `records` are the columns of its input streams; None where they are not known.
    """

    intent: Intent
    records: Mapping[str, Schema | None]


def hold_versions(step: OpenedStep, run: StepRun, planned: Intent, seen: Seen) -> HeldBatch:
    """Return the planned batch with the versions that it meets, leased: those that are served, or were recorded.

    Raises StaleDatasetError for a table that lacks something older than is allowed, and for a recorded replay
    VersionDiscardedError where a version is gone, and ConfigurationError for a dataset that it did not meet.
    """
    if planned.reading == RECORDED:
        held = _with_recorded(step, planned, seen.served)
    else:
        held = _with_served(step, run.logged.state, planned, seen.served)
    return HeldBatch(held, seen.schemas)


def _with_served(step: OpenedStep, state: ApplicationState, planned: Intent, served: ServedVersions) -> Intent:
    """Lease what is served; of bounded datasets that are joined by time, all other versions too."""
    app = step.context.app
    served, over_time = _hold(step, served, served.ids, _joined_by_time(app))
    check_all_fresh(step.context, served)
    ids = {**served.ids, **_read_on(step, state)}
    names = (*(dataset.name for dataset in app.datasets), *step.states)
    return planned.model_copy(update={"versions": {name: ids[name] for name in names}, "over_time": over_time})


def _hold(
    step: OpenedStep, served: ServedVersions, names: Iterable[str], by_time: Iterable[str] = ()
) -> tuple[ServedVersions, dict[str, tuple[str, ...]]]:
    """Lease what is served under these names, or what took the place of a version that was discarded since.

    Returns what is served then, and the versions over time of those `by_time` that serve one.
    """
    for attempt in range(_TRIES + 1):
        versions = {name: served.ids[name] for name in names}
        over_time = {name: step.versions.over_time(name).versions for name in by_time if versions[name] is not None}
        try:
            step.leases.take(versions, over_time)
            return served, over_time
        except VersionDiscardedError:
            if attempt == _TRIES:
                raise
            served = served_now(step)
    raise AssertionError("unreachable")


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


def _with_recorded(step: OpenedStep, planned: Intent, served: ServedVersions) -> Intent:
    """Lease the versions that recorded replays meet, named in the plan already; there is one for each dataset.

    Tables of state are as they are `served`: what has been read before is left out there.
    """
    names = [dataset.name for dataset in step.context.app.datasets]
    cancel = f"Cancel it (adjunct startpoint clear MODULE:APP {min(planned.ranges)} --reason …) and ask again with "
    lacking = [name for name in names if name not in planned.versions]
    if lacking:
        raise ConfigurationError(
            f"a recorded replay can't go on: the application has dataset {lacking[0]!r} now, of which the batch "
            "that it follows met no version.",
            f"{cancel}versions=current.",
            application=step.context.app.name,
            dataset=lacking[0],
        )
    met = {name: planned.versions[name] for name in names}
    # The plan keeps what a discard has spared for it.
    for name in step.leases.take(met, planned.over_time, reopened=True):
        manifest = step.versions.stored(name).require_manifest()
        for version in planned.met[name]:
            if not is_readable(step.context.lake, manifest, version):
                raise VersionDiscardedError(
                    f"a recorded replay can't go on: dataset {name!r}: version {version} is gone, as after an erasure.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = _hold(step, served, step.states)[0].ids
    return planned.model_copy(update={"versions": met | {name: states[name] for name in step.states}})

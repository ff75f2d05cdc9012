"""Holds the dataset versions that a batch is going to read, each in the way that it was chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.versions_over_time import refs_over_time
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import is_readable
from dagster_adjunct.orchestration.step.batch_compiler.timed_rows import joined_by_time
from dagster_adjunct.orchestration.step.next_batch.served_versions import ServedVersions, served_now
from dagster_adjunct.resources.errors import ConfigurationError, VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.step_run import OpenedStep

# How often versions are chosen anew where one of them is discarded between the look and the lease.
_TRIES = 5


def hold_served(step: OpenedStep, served: ServedVersions, only: Collection[str] | None = None) -> ServedVersions:
    """Lease what is served, or what took the place of a version that was discarded since; return what is leased."""
    for attempt in range(_TRIES + 1):
        try:
            step.leases.take({name: id for name, id in served.ids.items() if only is None or name in only})
            break
        except VersionDiscardedError:
            if attempt == _TRIES:
                raise
            served = served_now(step)
    return served


def hold_over_time(step: OpenedStep, versions: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Lease also the other versions that joins by time meet of bounded datasets, and return these, by dataset."""
    app, met = step.context.app, dict[str, tuple[str, ...]]()
    names = [name for name in joined_by_time(app) if not app.dataset(name).follows_changes]
    for attempt in range(_TRIES + 1):
        met = {name: _retained(step, name) for name in names if versions.get(name) is not None}
        try:
            step.leases.take(versions, met)
            break
        except VersionDiscardedError:
            if attempt == _TRIES:
                raise
    return met


def _retained(step: OpenedStep, name: str) -> tuple[str, ...]:
    manifest = as_bounded(step.versions.stored(name).require_manifest())
    return step.versions.over_time(name, [ref.id for ref in refs_over_time(manifest)]).versions


def hold_recorded(step: OpenedStep, intent: Intent, served: ServedVersions) -> Intent:
    """Lease the versions that a batch of recorded replays meets; return it with one for each dataset.

    Tables of state are as they are `served`: what has been read before is left out there.
    Raises VersionDiscardedError where one is gone all the same, as after an erasure, and ConfigurationError where
    the application has a dataset now that the batch did not meet.
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
    step.leases.take(met, intent.over_time, reopened=True)  # the plan keeps what a discard has spared for it
    for name, versions in intent.met.items():
        for version in versions if name in met and not set(versions) <= set(step.leases.held(name)) else ():
            if not is_readable(step.context.lake, step.versions.stored(name).require_manifest(), version):
                raise VersionDiscardedError(
                    f"a recorded replay can't go on: dataset {name!r}: version {version} is gone, as after an erasure.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = hold_served(step, served, step.states).ids
    return intent.model_copy(update={"versions": met | {name: states[name] for name in step.states}})

"""Holds the dataset versions that a batch is going to meet: stored ones by leases.

Datasets that live for one run are brought up to date here: what they hold is the run's own, and needs no lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.dataset import current_readers
from dagster_adjunct.assets.reading.history import VersionsOverTime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.local_table import require_local_manifest
from dagster_adjunct.assets.unbounded.progress import raise_if_stale
from dagster_adjunct.assets.unbounded.transient import TransientTable, is_transient
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import as_bounded, as_unbounded
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.startpoints.recorded_replay import is_readable, read_plan
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectNotFoundError,
    StaleDatasetError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient import TransientVersion
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.version import SealedVersion
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Intent, Replay
    from dagster_adjunct.orchestration.startpoints.recorded_replay import RecordedPlan
    from dagster_adjunct.orchestration.step.context import StepContext, StepResources, StepState
    from dagster_adjunct.orchestration.step.plan_batch import BatchSnapshot, PlannedBatch
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """A batch that can begin: what it is to do, and meets, under leases.

    `records` are the columns of its input streams; None where they are not known.
    """

    intent: Intent
    records: Mapping[str, Schema | None]


def lease_versions(step: StepResources, run: StepState, planned: PlannedBatch, seen: BatchSnapshot) -> LeasedBatch:
    """Return the planned batch with the versions that it meets, leased: those that are served, or were recorded.

    Raises VersionDiscardedError where one is gone since the look, or since it was recorded; StaleDatasetError for a
    table that lacks something older than is allowed; ConfigurationError for a dataset that a recorded batch did not
    meet.
    """
    if planned.intent.reading == RECORDED:
        intent = _lease_recorded(step, planned.intent, seen.served)
    else:
        intent = _lease_served(step, run.logged.state, planned.intent, seen.served)
    for text in planned.losses:
        step.context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return LeasedBatch(intent, seen.schemas)


def _lease_served(step: StepResources, state: ApplicationState, intent: Intent, served: ServedVersions) -> Intent:
    """Lease what is served; of bounded datasets that are joined by time, all other versions too."""
    app, ids = step.context.app, dict(served.ids)
    _check_freshness(step.context, served)
    joined = [name for name in _find_as_of_datasets(app) if ids[name] is not None]
    retained = {name: step.versions.retained_over_time(name) for name in joined}
    step.leases.take(ids, retained)
    # Opened once they are held. Of versions that say one time only the one that was sealed last is met.
    over_time = {name: step.versions.over_time(name, versions).versions for name, versions in retained.items()}
    ids |= _advance_transient_tables(step, state)
    names = (*(dataset.name for dataset in app.datasets), *step.states)
    return intent.model_copy(update={"versions": {name: ids[name] for name in names}, "over_time": over_time})


def _check_freshness(context: StepContext, served: ServedVersions) -> None:
    """Refuse to begin a batch with a stored table that lacks something older than is allowed."""
    for name, manifest in served.limited.items():
        limit = context.app.max_staleness[name]
        if manifest is None or manifest.version is None:
            raise StaleDatasetError(
                f"dataset {name!r} has taken in nothing yet, and at most {limit} of staleness is allowed.",
                f"Advance it (materialise its asset, or adjunct dataset advance {name} MODULE:APP).",
                dataset=name,
            )
        raise_if_stale(context.systems, context.app.dataset(name), as_unbounded(manifest), limit, context.lake.now())


def _find_as_of_datasets(app: Application) -> list[str]:
    """Return the bounded datasets that records are joined with as of their times."""
    matches = (operator.spec.match for operator in app.operators)
    names = {match.dataset for match in matches if match and match.dataset and match.as_of}
    return [name for name in sorted(names) if not app.dataset(name).follows_changes]


def _advance_transient_tables(step: StepResources, state: ApplicationState) -> dict[str, str | None]:
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
                table.raise_if_stale(context.app.max_staleness[dataset.name])
            versions[dataset.name] = report.version
    return versions


def _lease_recorded(step: StepResources, intent: Intent, served: ServedVersions) -> Intent:
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


def check_bootstrapped(step: StepResources, unserved: Iterable[str]) -> None:
    """Raise NoSealedVersionError for a dataset with `bootstrap` that serves nothing yet, saying what it lacks."""
    for name in unserved:
        if step.context.app.dataset(name).bootstrap:
            step.versions.stored(name).require_current(step.context.systems)


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """What each stored dataset and each table of state serves, by its id; None: nothing yet.

    `limited` are the manifests of those that may not be stale: version and offsets of one commit, so that what is found
    fresh is what the batch meets.
    """

    ids: Mapping[str, str | None]
    limited: Mapping[str, DatasetManifest | None]


def read_served_versions(step: StepResources) -> ServedVersions:
    """Return the versions served now, those of a version set from one snapshot of it.

    Raises NoSealedVersionError for a dataset that holds its application back and has no version, saying what it waits
    for; and what a declaration of the application's own table raises that does not fit what is stored.
    """
    app, stored = step.context.app, step.versions.stored
    own = [dataset for dataset in app.datasets if dataset.is_owned_by(app.name)]
    others = [dataset.name for dataset in app.datasets if dataset.following.persistent and dataset not in own]
    readers = current_readers({name: stored(name) for name in others if name not in app.max_staleness})
    limited = {name: stored(name).manifest() for name in others if name in app.max_staleness}
    readers |= {name: stored(name).reader_of(manifest) for name, manifest in limited.items()}
    for dataset in own:
        manifest = stored(dataset.name).manifest()
        local = None if manifest is None else require_local_manifest(manifest, dataset)
        readers[dataset.name] = stored(dataset.name).reader_of(local)
    check_bootstrapped(step, [name for name, reader in readers.items() if reader is None])
    readers |= {name: stored(name).current() for name in step.states}
    step.versions.keep(readers)
    ids = {name: None if reader is None else reader.version for name, reader in readers.items()}
    return ServedVersions(ids, limited)


class VersionCache:
    """A cache: what is asked for is opened where it was not yet. Nothing is held by that (`VersionLeases`).

    `close` lets go of the tables that live for one run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._stored: dict[str, StoredVersions] = {}
        self._readers: dict[tuple[str, str], VersionReader] = {}
        self._sealed: dict[tuple[str, str], SealedVersion] = {}
        self._tables: dict[str, TransientTable] = {}
        self._plans: dict[str, RecordedPlan] = {}

    def stored(self, name: str) -> StoredVersions:
        """Return the stored versions of a dataset; a table of state is declared by nobody."""
        if name not in self._stored:
            declared = {dataset.name: dataset for dataset in self._context.app.datasets}
            self._stored[name] = StoredVersions(self._context.lake, declared.get(name, name))
        return self._stored[name]

    def table(self, name: str, state: ApplicationState) -> TransientTable:
        """Return a table that lives for this run; it goes on from the version that the last batch met."""
        if name not in self._tables:
            last = state.last.intent.versions.get(name) if state.last else None
            self._tables[name] = TransientTable(self._context.systems, self._context.app.dataset(name), last=last)
        return self._tables[name]

    def keep(self, readers: Mapping[str, VersionReader | None]) -> None:
        """Keep readers that were opened already, by dataset."""
        self._readers |= {(name, reader.version): reader for name, reader in readers.items() if reader is not None}

    def view(self, name: str, version: str | None, state: ApplicationState) -> VersionReader | TransientVersion | None:
        """Return a version as joins read it; None where there is none yet."""
        if version is None:
            return None
        if is_transient(version):
            return self.table(name, state).restore(version, self._context.spark)
        if (name, version) not in self._readers:
            self._readers[(name, version)] = self.stored(name).version_of_batch(version)
        return self._readers[(name, version)]

    def retained_over_time(self, name: str) -> tuple[str, ...]:
        """Return the versions of a bounded dataset that say their time and are retained now; they are not opened."""
        return as_bounded(self.stored(name).require_manifest()).versions_over_time

    def over_time(self, name: str, versions: Sequence[str]) -> VersionsOverTime:
        """Return these versions of a bounded dataset as joins by time read them."""
        for version in versions:
            if (name, version) not in self._sealed:
                self._sealed[(name, version)] = self.stored(name).version_of_batch(version).sealed
        sealed = [self._sealed[(name, version)] for version in versions]
        return VersionsOverTime(self._context.lake.store, name, sealed)

    def plan_of(self, replay: Replay) -> RecordedPlan:
        """Return what a replay of recorded versions reads and meets. Raises ConfigurationError where that is gone."""
        plan, app = replay.recorded or "", self._context.app.name
        if plan not in self._plans:
            try:
                self._plans[plan] = read_plan(self._context.lake, app, plan)
            except ObjectNotFoundError as error:
                raise ConfigurationError(
                    f"{replay.words()} can't go on: what says which versions it meets is gone ({error.key}).",
                    f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …) and ask again.",
                    application=app,
                ) from error
        return self._plans[plan]

    def close(self) -> None:
        """Let go of the tables that live for one run."""
        for table in self._tables.values():
            table.release()


class VersionLeases:
    """One lease a dataset, on what the newest batch reads of it; `close` lets go of all."""

    def __init__(self, lake: Lake, holder: str) -> None:
        self._lake, self._holder = lake, holder
        self._leases: dict[str, Lease] = {}

    def take(
        self,
        versions: Mapping[str, str | None],
        over_time: Mapping[str, Sequence[str]] | None = None,
        *,
        reopened: bool = False,
    ) -> list[str]:
        """Lease what a batch reads, before its intent says so; from then on the open intent keeps it as well.

        Raises VersionDiscardedError, but for what a `reopened` batch was begun with: that may be gone from the versions
        that there are, and its intent alone keeps it. The datasets are returned of which that is so.
        """
        left: list[str] = []
        for name, version in versions.items():
            if version is None or is_transient(version):
                continue
            held, wanted = self._leases.get(name), {version, *(over_time or {}).get(name, ())}
            if held is not None and wanted <= set(held.versions):
                continue
            try:
                self._leases[name] = Lease.acquire(self._lake, name, sorted(wanted), holder=self._holder)
            except VersionDiscardedError:
                if not reopened:  # else an erasure has rewritten it since
                    raise
                left.append(name)
                continue
            if held is not None:
                held.release()
        return left

    def check_held(self) -> None:
        """Raise LeaseLostError if a version that is being read is held no more."""
        for lease in self._leases.values():
            lease.check()

    def close(self) -> None:
        """Let go of the versions that were read."""
        for lease in self._leases.values():
            lease.release()

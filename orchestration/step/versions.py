"""Leases the dataset versions that a batch reads, and brings the tables that live for one run up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.dataset import current_readers
from dagster_adjunct.assets.reading.history import VersionsOverTime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import require_local_manifest
from dagster_adjunct.assets.unbounded.progress import raise_if_stale
from dagster_adjunct.assets.unbounded.transient import TransientTable, TransientVersion, is_transient
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_bounded, as_unbounded
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Intent, Replay
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.startpoints.recorded_replay import RecordedPlan, is_readable, read_plan
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectNotFoundError,
    StaleDatasetError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.context import StepContext, StepResources, StepState
    from dagster_adjunct.orchestration.step.plan_batch import BatchSnapshot, PlannedBatch


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """A batch that can start, with its dataset versions leased.

    `records` are the columns of its input streams; None where they are not known.
    """

    intent: Intent
    records: Mapping[str, Schema | None]


def lease_versions(step: StepResources, run: StepState, planned: PlannedBatch, seen: BatchSnapshot) -> LeasedBatch:
    """Return the planned batch with the versions that it reads, leased: the served or the recorded ones.

    Raises VersionDiscardedError if one was discarded since the snapshot or the recording, StaleDatasetError for a table
    behind its allowed staleness, and ConfigurationError for a dataset that a recorded batch did not read.
    """
    if planned.intent.reading == RECORDED:
        intent = _lease_recorded(step, planned.intent, seen.served)
    else:
        intent = _lease_served(step, run.logged.state, planned.intent, seen.served)
    for text in planned.losses:
        step.context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return LeasedBatch(intent, seen.schemas)


def _lease_served(step: StepResources, state: ApplicationState, intent: Intent, served: ServedVersions) -> Intent:
    """Lease the served versions, and all other versions of bounded datasets that are joined by time."""
    app, ids = step.context.app, dict(served.ids)
    _check_freshness(step.context, served)
    joined = [name for name in _find_as_of_datasets(app) if ids[name] is not None]
    retained = {name: step.versions.retained_over_time(name) for name in joined}
    step.leases.take(ids, retained)
    # Opened once they are leased. Of several versions with one time only the one sealed last is read.
    over_time = {name: step.versions.over_time(name, versions).versions for name, versions in retained.items()}
    ids |= _advance_transient_tables(step, state)
    names = (*(dataset.name for dataset in app.datasets), *step.states)
    return intent.model_copy(update={"versions": {name: ids[name] for name in names}, "over_time": over_time})


def _check_freshness(context: StepContext, served: ServedVersions) -> None:
    """Raise StaleDatasetError for a stored table that is behind its allowed staleness."""
    for name, manifest in served.limited.items():
        limit = context.app.max_staleness[name]
        if manifest is None or manifest.version is None:
            raise StaleDatasetError(
                f"dataset {name!r} has no entries yet, and its allowed staleness is {limit}.",
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
    """Bring the tables that live for one run up to date; return their versions and send an event for each change.

    This happens before the intent: a change that can't be applied would keep an open batch from ever finishing.
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
    """Lease the versions of recorded replays, which the intent names already.

    State tables are read as they are `served`: they leave out records that were read before.
    """
    names = [dataset.name for dataset in step.context.app.datasets]
    cancel = f"Cancel it (adjunct startpoint clear MODULE:APP {min(intent.ranges)} --reason …) and ask again with "
    lacking = [name for name in names if name not in intent.versions]
    if lacking:
        raise ConfigurationError(
            f"a recorded replay can't continue: the application now has dataset {lacking[0]!r}, which the recorded "
            "batch did not read.",
            f"{cancel}versions=current.",
            application=step.context.app.name,
            dataset=lacking[0],
        )
    met = {name: intent.versions[name] for name in names}
    # Versions that a discard spared for the plan may be read, although they can't be leased.
    for name in step.leases.take(met, intent.over_time, reopened=True):
        manifest = step.versions.stored(name).require_manifest()
        for version in intent.met[name]:
            if not is_readable(step.context.lake, manifest, version):
                raise VersionDiscardedError(
                    f"a recorded replay can't continue: dataset {name!r}: version {version} is gone, maybe erased.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = {name: served.ids[name] for name in step.states}
    step.leases.take(states)
    return intent.model_copy(update={"versions": met | states})


def check_bootstrapped(step: StepResources, unserved: Iterable[str]) -> None:
    """Raise NoSealedVersionError for a dataset with `bootstrap` and no version, saying what it waits for."""
    for name in unserved:
        if step.context.app.dataset(name).bootstrap:
            step.versions.stored(name).require_current(step.context.systems)


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """The ids of the served versions of stored datasets and state tables; None for one without a version.

    `limited` has the manifests of datasets with a maximum staleness: version and offsets of one commit, so that the
    batch reads exactly what was found fresh.
    """

    ids: Mapping[str, str | None]
    limited: Mapping[str, DatasetManifest | None]


def read_served_versions(step: StepResources) -> ServedVersions:
    """Return the versions served now; those of a version set come from one snapshot.

    Raises NoSealedVersionError for a dataset with `bootstrap` and no version, and an error for a local table whose
    declaration does not match what is stored.
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
    """Caches opened versions, transient tables and replay plans of one run; it leases nothing (see `VersionLeases`)."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._stored: dict[str, StoredVersions] = {}
        self._readers: dict[tuple[str, str], VersionReader] = {}
        self._sealed: dict[tuple[str, str], SealedVersion] = {}
        self._tables: dict[str, TransientTable] = {}
        self._plans: dict[str, RecordedPlan] = {}

    def stored(self, name: str) -> StoredVersions:
        """Return the stored versions of a dataset or state table."""
        if name not in self._stored:
            declared = {dataset.name: dataset for dataset in self._context.app.datasets}
            self._stored[name] = StoredVersions(self._context.lake, declared.get(name, name))
        return self._stored[name]

    def table(self, name: str, state: ApplicationState) -> TransientTable:
        """Return a table that lives for this run; it continues from the version that the last batch read."""
        if name not in self._tables:
            last = state.last.intent.versions.get(name) if state.last else None
            self._tables[name] = TransientTable(self._context.systems, self._context.app.dataset(name), last=last)
        return self._tables[name]

    def keep(self, readers: Mapping[str, VersionReader | None]) -> None:
        """Add readers that are open already, by dataset."""
        self._readers |= {(name, reader.version): reader for name, reader in readers.items() if reader is not None}

    def view(self, name: str, version: str | None, state: ApplicationState) -> VersionReader | TransientVersion | None:
        """Return a version as joins read it; None if there is none yet."""
        if version is None:
            return None
        if is_transient(version):
            return self.table(name, state).restore(version, self._context.spark)
        if (name, version) not in self._readers:
            self._readers[(name, version)] = self.stored(name).version_of_batch(version)
        return self._readers[(name, version)]

    def retained_over_time(self, name: str) -> tuple[str, ...]:
        """Return the retained versions of a bounded dataset that have a time, without opening them."""
        return as_bounded(self.stored(name).require_manifest()).versions_over_time

    def over_time(self, name: str, versions: Sequence[str]) -> VersionsOverTime:
        """Return these versions of a bounded dataset as joins by time read them."""
        for version in versions:
            if (name, version) not in self._sealed:
                self._sealed[(name, version)] = self.stored(name).version_of_batch(version).sealed
        sealed = [self._sealed[(name, version)] for version in versions]
        return VersionsOverTime(self._context.lake.store, name, sealed)

    def plan_of(self, replay: Replay) -> RecordedPlan:
        """Return the plan of a recorded replay. Raises ConfigurationError if it is gone."""
        plan, app = replay.recorded or "", self._context.app.name
        if plan not in self._plans:
            try:
                self._plans[plan] = read_plan(self._context.lake, app, plan)
            except ObjectNotFoundError as error:
                raise ConfigurationError(
                    f"{replay.words()} can't continue: the plan of its versions is gone ({error.key}).",
                    f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …) and ask again.",
                    application=app,
                ) from error
        return self._plans[plan]

    def close(self) -> None:
        """Release the tables that live for one run."""
        for table in self._tables.values():
            table.release()


class VersionLeases:
    """One lease for each dataset, on the versions that the current batch reads."""

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
        """Lease what a batch reads, before its intent names it; from then on the open intent retains it too.

        Raises VersionDiscardedError, except for a `reopened` batch, whose intent alone may retain a version; the
        datasets of such versions are returned.
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
                if not reopened:  # a reopened version may have been rewritten by an erasure
                    raise
                left.append(name)
                continue
            if held is not None:
                held.release()
        return left

    def check_held(self) -> None:
        """Raise LeaseLostError if a lease on a version in use was lost."""
        for lease in self._leases.values():
            lease.check()

    def close(self) -> None:
        """Release all leases."""
        for lease in self._leases.values():
            lease.release()

"""The dataset versions that the batches of a run meet: found, leased while they are read, and opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.served_together import current_readers
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime, refs_over_time
from dagster_adjunct.assets.unbounded.freshness import check_fresh
from dagster_adjunct.assets.unbounded.local_manifest import check_columns
from dagster_adjunct.assets.unbounded.local_table import undo_batch
from dagster_adjunct.assets.unbounded.state_table import begin_state, tend_state, undo_state
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.unbounded.transient_version import TransientVersion, is_transient
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import as_bounded, as_unbounded
from dagster_adjunct.assets.writing.write_context import WriteContext
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPlan, is_readable, read_plan
from dagster_adjunct.orchestration.step.state_tables import states_of
from dagster_adjunct.orchestration.step.timed_rows import joined_by_time
from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard_all
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectNotFoundError,
    StaleDatasetError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.step.step_context import StepContext

_TRIES = 5


class BatchVersions:
    """The versions of an application's datasets for one run of its step, which holds leases on them."""

    def __init__(self, context: StepContext) -> None:
        self._lake, self._systems, self._app = context.lake, context.systems, context.app
        self._spark, self._run = context.spark, context.run
        self._datasets = {dataset.name: StoredVersions(context.lake, dataset) for dataset in context.app.datasets}
        self.states = tuple(states_of(context.app))
        self._datasets |= {name: StoredVersions(context.lake, name) for name in self.states}
        self._views: dict[tuple[str, str], VersionReader] = {}
        self._manifests: dict[str, DatasetManifest | None] = {}
        self._tables: dict[str, TransientTable] = {}
        self._leases: dict[str, Lease] = {}
        self._plans: dict[str, RecordedPlan] = {}
        self._by_time = [name for name in joined_by_time(context.app) if not context.app.dataset(name).follows_changes]
        self._sealed: dict[tuple[str, str], SealedVersion] = {}

    def current(self) -> dict[str, str | None]:
        """Return the versions served now, those of a version set from one snapshot of it."""
        app = self._app
        own = [dataset for dataset in app.datasets if dataset.is_owned_by(app.name)]
        stored = [dataset for dataset in app.datasets if dataset.following.persistent and dataset not in own]
        views = current_readers(
            {dataset.name: self._datasets[dataset.name] for dataset in stored if dataset.name not in app.max_staleness}
        )
        for name in (dataset.name for dataset in stored if dataset.name in app.max_staleness):
            # Version and offsets of one commit: what is found fresh is what the batch meets.
            self._manifests[name] = self._datasets[name].manifest()
            views[name] = self._datasets[name].reader_of(self._manifests[name])
        for dataset in own:
            manifest = self._datasets[dataset.name].manifest()
            if manifest is not None:  # a declaration that doesn't fit it is refused before a batch is begun
                check_columns(dataset, as_unbounded(manifest))
            views[dataset.name] = self._datasets[dataset.name].reader_of(manifest)
        views |= {name: self._datasets[name].current() for name in self.states}
        for name, view in views.items():
            if view is not None:
                self._views[(name, view.version)] = view
            elif name not in self.states and self._app.dataset(name).bootstrap:
                self._datasets[name].require_current(self._systems)  # says what it waits for
        return {name: None if view is None else view.version for name, view in views.items()}

    def undo(self, batch: int) -> None:
        """Take what a batch that was given up has written out of the application's local tables, once."""
        write = WriteContext(self._lake, self._systems, self._spark, self._run)
        for dataset in self._app.datasets:
            if dataset.is_owned_by(self._app.name):
                undo_batch(write, dataset, self._app.name, batch)
        for name in self.states:
            undo_state(write, name, self._app.name, batch)

    def begin_state(self, dataset: AdjunctDataset) -> None:
        """Store a table of state that a batch is going to write, so that the batch can be taken out of it."""
        begin_state(WriteContext(self._lake, self._systems, self._spark, self._run), dataset)

    def tend_states(self) -> None:
        """Merge small generations of the tables of state where there are many, and delete what nobody reads."""
        write = WriteContext(self._lake, self._systems, self._spark, self._run)
        waiting = [name for name in self.states if tend_state(write, name)]
        if waiting:
            discard_all(self._lake, datasets=waiting, by=self._run)

    def check_fresh(self) -> None:
        """Refuse to begin a batch with a stored table that lacks something older than is allowed."""
        for name, manifest in self._manifests.items():
            limit = self._app.max_staleness[name]
            if manifest is None or manifest.version is None:
                raise StaleDatasetError(
                    f"dataset {name!r} has taken in nothing yet, and at most {limit} of staleness is allowed.",
                    f"Advance it (materialise its asset, or adjunct dataset advance {name} MODULE:APP).",
                    dataset=name,
                )
            check_fresh(self._systems, self._app.dataset(name), as_unbounded(manifest), limit, self._lake.now())

    def read_on(self, state: ApplicationState, on_report: Callable[[AdvanceReport], None]) -> dict[str, str | None]:
        """Bring the datasets that live for one run up to date, and return their versions; tell what has changed.

        Before the intent, which then names what is known to be readable: a change that can't be applied would keep an
        open batch from ever ending.
        """
        versions: dict[str, str | None] = {}
        limits = self._app.max_staleness
        for dataset in self._app.datasets:
            if not dataset.following.persistent:
                table = self._table(dataset.name, state)
                report = table.advance(self._spark)
                if report.action != "up-to-date":
                    on_report(report)
                if dataset.name in limits:
                    table.check_fresh(limits[dataset.name])
                versions[dataset.name] = report.version
        return versions

    def _table(self, name: str, state: ApplicationState) -> TransientTable:
        if name not in self._tables:
            last = state.last.intent.versions.get(name) if state.last else None
            self._tables[name] = TransientTable(self._systems, self._app.dataset(name), last=last)
        return self._tables[name]

    def hold_served(self, versions: dict[str, str | None]) -> dict[str, str | None]:
        """Lease these versions, or those that took the place of one that was discarded since; return what is leased."""
        for _ in range(_TRIES):
            try:
                self.hold(versions)
            except VersionDiscardedError:
                versions = self.current()
            else:
                return versions
        self.hold(versions)
        return versions

    def plan_of(self, replay: Replay) -> RecordedPlan:
        """Return what a replay of recorded versions reads and meets. Raises ConfigurationError where that is gone."""
        plan = replay.recorded or ""
        if plan not in self._plans:
            try:
                self._plans[plan] = read_plan(self._lake, self._app.name, plan)
            except ObjectNotFoundError as error:
                raise ConfigurationError(
                    f"{replay.words()} can't go on: what says which versions it meets is gone ({error.key}).",
                    f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …) and ask again.",
                    application=self._app.name,
                ) from error
        return self._plans[plan]

    def hold_recorded(self, intent: Intent, served: Mapping[str, str | None]) -> Intent:
        """Lease the versions that a batch of recorded replays meets; return it with one for each dataset.

        Tables of state are as they are `served`: what has been read before is left out there.
        Raises VersionDiscardedError where one is gone all the same, as after an erasure, and ConfigurationError where
        the application has a dataset now that the batch did not meet.
        """
        names = [dataset.name for dataset in self._app.datasets]
        cancel = f"Cancel it (adjunct startpoint clear MODULE:APP {min(intent.ranges)} --reason …) and ask again with "
        lacking = [name for name in names if name not in intent.versions]
        if lacking:
            raise ConfigurationError(
                f"a recorded replay can't go on: the application has dataset {lacking[0]!r} now, of which the batch "
                "that it follows met no version.",
                f"{cancel}versions=current.",
                application=self._app.name,
                dataset=lacking[0],
            )
        met = {name: intent.versions[name] for name in names}
        self.hold(met, intent.over_time, reopened=True)  # the plan keeps what a discard has spared for it
        for name, versions in intent.met.items():
            for version in versions if name in met and not set(versions) <= set(self._held(name)) else ():
                if not is_readable(self._lake, self._datasets[name].require_manifest(), version):
                    raise VersionDiscardedError(
                        f"a recorded replay can't go on: dataset {name!r}: version {version} is gone, as after an "
                        "erasure.",
                        f"{cancel}versions=as-of, or current.",
                        dataset=name,
                        version=version,
                    )
        states = self.hold_served({name: served[name] for name in self.states})
        return intent.model_copy(update={"versions": met | {name: states[name] for name in self.states}})

    def hold_over_time(self, versions: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
        """Lease also the other versions that joins by time meet of bounded datasets, and return these, by dataset."""
        for _ in range(_TRIES):
            met = {name: self._retained(name) for name in self._by_time if versions.get(name) is not None}
            try:
                self.hold(versions, met)
            except VersionDiscardedError:
                continue
            return met
        self.hold(versions, met)
        return met

    def _retained(self, name: str) -> tuple[str, ...]:
        manifest = as_bounded(self._datasets[name].require_manifest())
        return self.over_time(name, [ref.id for ref in refs_over_time(manifest)]).versions

    def over_time(self, name: str, versions: Sequence[str]) -> VersionsOverTime:
        """Return these versions of a bounded dataset as joins by time read them."""
        stored = self._datasets[name]
        for version in versions:
            if (name, version) not in self._sealed:
                self._sealed[(name, version)] = stored.version_of_batch(version).sealed
        return VersionsOverTime(self._lake.store, name, [self._sealed[(name, version)] for version in versions])

    def hold(
        self,
        versions: Mapping[str, str | None],
        over_time: Mapping[str, Sequence[str]] | None = None,
        *,
        reopened: bool = False,
    ) -> None:
        """Lease what a batch reads, before its intent says so; from then on the open intent keeps it as well.

        What a `reopened` batch was begun with may be gone from the versions that there are: its intent alone keeps it.
        """
        for name, version in versions.items():
            if version is None or is_transient(version):
                continue
            held, wanted = self._leases.get(name), {version, *(over_time or {}).get(name, ())}
            if held is not None and wanted <= set(held.versions):
                continue
            try:
                self._leases[name] = Lease.acquire(self._lake, name, sorted(wanted), holder=self._run)
            except VersionDiscardedError:
                if not reopened:  # else an erasure has rewritten it since
                    raise
                continue
            if held is not None:
                held.release()

    def _held(self, name: str) -> Sequence[str]:
        return self._leases[name].versions if name in self._leases else ()

    def check_leases(self) -> None:
        """Raise LeaseLostError if a version that is being read is held no more."""
        for lease in self._leases.values():
            lease.check()

    def release(self) -> None:
        """Let go of the versions that were read."""
        for lease in self._leases.values():
            lease.release()
        for table in self._tables.values():
            table.release()

    def view(self, name: str, version: str | None, state: ApplicationState) -> VersionReader | TransientVersion | None:
        """Return the version as joins read it; None where there is none yet."""
        if version is None:
            return None
        if is_transient(version):
            return self._table(name, state).view_of(version, self._spark)
        if (name, version) not in self._views:
            self._views[(name, version)] = self._datasets[name].version_of_batch(version)
        return self._views[(name, version)]

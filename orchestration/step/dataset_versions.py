"""The dataset versions that the batches of a run meet: found, leased while they are read, and opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.served_together import current_readers
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.freshness import check_fresh
from dagster_adjunct.assets.unbounded.local_manifest import check_columns
from dagster_adjunct.assets.unbounded.local_table import undo_batch
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.unbounded.transient_version import TransientVersion, is_transient
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.writing.write_context import WriteContext
from dagster_adjunct.resources.errors import StaleDatasetError, VersionDiscardedError

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.step.step_context import StepContext

_TRIES = 5


class BatchVersions:
    """The versions of an application's datasets for one run of its step, which holds leases on them."""

    def __init__(self, context: StepContext) -> None:
        self._lake, self._systems, self._app = context.lake, context.systems, context.app
        self._spark, self._run = context.spark, context.run
        self._datasets = {dataset.name: StoredVersions(context.lake, dataset) for dataset in context.app.datasets}
        self._views: dict[tuple[str, str], VersionReader] = {}
        self._manifests: dict[str, DatasetManifest | None] = {}
        self._tables: dict[str, TransientTable] = {}
        self._leases: dict[str, Lease] = {}

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
        for name, view in views.items():
            if view is not None:
                self._views[(name, view.version)] = view
            elif self._app.dataset(name).bootstrap:
                self._datasets[name].require_current(self._systems)  # says what it waits for
        return {name: None if view is None else view.version for name, view in views.items()}

    def undo(self, batch: int) -> None:
        """Take what a batch that was given up has written out of the application's local tables, once."""
        write = WriteContext(self._lake, self._systems, self._spark, self._run)
        for dataset in self._app.datasets:
            if dataset.is_owned_by(self._app.name):
                undo_batch(write, dataset, self._app.name, batch)

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

    def hold(self, versions: Mapping[str, str | None], *, reopened: bool = False) -> None:
        """Lease what a batch reads, before its intent says so; from then on the open intent keeps it as well.

        What a `reopened` batch was begun with may be gone from the versions that there are: its intent alone keeps it.
        """
        for name, version in versions.items():
            held = self._leases.get(name)
            if version is None or is_transient(version) or (held is not None and version in held.versions):
                continue
            try:
                self._leases[name] = Lease.acquire(self._lake, name, [version], holder=self._run)
            except VersionDiscardedError:
                if not reopened:  # else an erasure has rewritten it since
                    raise
                continue
            if held is not None:
                held.release()

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

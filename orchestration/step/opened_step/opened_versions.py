"""What a run of the step has opened of its datasets: each log, version and table once, however many batches read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.unbounded.transient_version import is_transient
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import read_plan
from dagster_adjunct.resources.errors import ConfigurationError, ObjectNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import RecordedPlan
    from dagster_adjunct.orchestration.step.context.step_context import StepContext


class OpenedVersions:
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
            return self.table(name, state).view_of(version, self._context.spark)
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

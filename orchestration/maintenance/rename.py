"""Rename an application, with its batch log, startpoints and local tables.

Its outputs still know it by the old name: as producer of streams, in the idempotency marks of
remote tables and in the names of its state tables (`RenamedNames.writes_as`). The steps:

    fence       record the new name in the old log, so that no run continues under the old name
    copy        hand over local tables, and copy startpoints and the plans of recorded replays
    log         copy the log with its history; from here on the application can run under the new
                name
    leave       empty the old log, except for the new name, and the old startpoints

After a crash the rename is repeated.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.unbounded.local_table import change_owner, list_transferable
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    LoggedState,
    RenamedNames,
    describe_similar_names,
)
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.startpoints.store import FAN_OUTS, REQUESTS, StartpointManager
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.errors import ConfigurationError, ObjectExistsError
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.validation import validated


@dataclass(frozen=True, slots=True)
class RenameReport(Report):
    """A renamed application with its number of batches, and the local tables that it owns now.

    With `dry_run`, nothing was changed, and the local tables are those that it would own.
    """

    old: str
    new: str
    batches: int
    local_tables: tuple[str, ...] = ()
    dry_run: bool = False

    def summary(self) -> str:
        """Return the report in one line."""
        if self.dry_run:
            is_renamed = "would be"
            continues = "would continue"
        else:
            is_renamed = "is"
            continues = "continues"
        renamed = f"application {self.old} {is_renamed} renamed to {self.new}"
        if self.local_tables:
            renamed += f", with {', '.join(self.local_tables)}"
        return f"{renamed}: it {continues} after batch {self.batches}"


@validated
def rename_application(
    lake: Lake, old: str, new: str, *, reason: str, by: str, dry_run: bool = False
) -> RenameReport:
    """Rename an application, with its checkpoint, history, startpoints and local tables.

    Its outputs still know it by the old name. It can't be undone: a former name can't be used
    again. With `dry_run`, nothing is changed, and what prevents a rename is raised. Safe to repeat
    after a crash. Raises ConfigurationError if the old name has never run, if the new name has, and
    while a batch is open; ApplicationBusyError while a run is alive.
    """
    log = BatchLog(lake, old)
    new_log = BatchLog(lake, new)
    lake.application_prefix(new)  # raises InvalidNameError
    require_reason(reason, f"application {old!r}", "renamed", application=old)
    if old == new:
        raise _rename_error(old, new, "that is its name already")
    if log.read().commit is None:
        problem = (
            f"application {old!r} has never run in {lake.url}; {describe_similar_names(lake, old)}."
        )
        raise ConfigurationError(problem, "Correct the name.", application=old)
    claim = Claim(wait=timedelta(0))
    note = f"renamed from {old} to {new}: {reason}"
    with (
        RunLease(lake, old, f"rename-{uuid.uuid4().hex[:12]}", claim),
        RunLease(lake, new, "rename", claim),
    ):
        logged = _read_logs(log, new_log, old, new)
        state = logged.state
        if dry_run:
            tables = list_transferable(lake, old)
            return RenameReport(old, new, state.batch, tuple(tables), dry_run=True)
        if state.names.renamed_to != new:  # else an interrupted rename has recorded it
            names = state.names.model_copy(update={"renamed_to": new})
            state = state.model_copy(update={"names": names})
            logged = log.commit(logged, state, by=by, note=note)
            state = logged.state
        tables = []
        for name in list_datasets(lake):
            if change_owner(lake, name, new, owner=old, reason=note, by=by):
                tables.append(name)
        # Else an interrupted rename has done this, and has left the old log without checkpoint.
        if state.checkpoint or new_log.read().commit is None:
            StartpointManager(MetadataStore(lake), new).continue_from(old, by=by)
            _copy_plans(lake, old, new)
            if new_log.read().commit is None:
                new_log.continue_from(old, by=by, note=note)
            # The old log keeps only this.
            left = ApplicationState(batch=state.batch, names=RenamedNames(renamed_to=new))
            log.commit(logged, left, by=by, note=state.note)
        # Requests left under the old name would wait for ever, and keep their streams from being
        # repartitioned.
        for namespace in (REQUESTS, FAN_OUTS):
            MetadataStore(lake).namespace(namespace, old).transact(_remove_all, by=by)
    return RenameReport(old, new, state.batch, tuple(tables))


def _remove_all(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
    """Return the changes that remove all entries of a namespace."""
    return {key: None for key, _ in snapshot.items()}, None


def _copy_plans(lake: Lake, old: str, new: str) -> None:
    """Copy the plans of replays that read recorded versions; those that an interrupted rename has
    copied stay.
    """
    prefix = f"{lake.application_prefix(old)}/recorded/"
    for item in [*lake.store.list(prefix)]:
        key = f"{lake.application_prefix(new)}/recorded/{item.key.removeprefix(prefix)}"
        with suppress(ObjectExistsError):
            lake.store.put_if_absent(key, lake.store.get(item.key).data)


def _read_logs(log: BatchLog, new_log: BatchLog, old: str, new: str) -> LoggedState:
    """Return the state of the old log, also if an interrupted rename has recorded the new name.

    Raises ConfigurationError if the application has another new name or an open batch, or if the
    new name has run.
    """
    logged = log.read()
    existing = new_log.read()
    renamed_to = logged.state.names.renamed_to
    if renamed_to == new:
        return logged
    if renamed_to is not None:
        raise _rename_error(old, new, f"it was renamed to {renamed_to!r}")
    if existing.commit is not None:
        raise _rename_error(old, new, f"{new!r} has run already")
    if logged.state.open is not None:
        raise ConfigurationError(
            f"application {old!r} can't be renamed while its batch {logged.state.open.batch} is"
            " open.",
            "Run it once more under the old name, or abandon the batch (adjunct checkpoint abandon"
            f" {old} --reason …).",
            application=old,
        )
    return logged


def _rename_error(old: str, new: str, problem: str) -> ConfigurationError:
    """Return the error for a name that an application can't get."""
    step = "Choose a name that has no batch log in this lake; old names can't be reused."
    return ConfigurationError(
        f"application {old!r} can't be renamed to {new!r}: {problem}.", step, application=old
    )

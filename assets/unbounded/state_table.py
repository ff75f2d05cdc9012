"""State tables: local tables that stream joins and windows keep for themselves, and nobody declares."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy, local_table
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.unbounded.compaction import compact_due
from dagster_adjunct.assets.unbounded.local_table import empty_manifest, require_local_manifest
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import Change, as_unbounded
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The columns and key of a state table.

    `expires` is a timestamp among the columns of `schema`: a row expires once the operator's watermark has reached it.
    When a key is written again or deleted, its time must not move back, or an older row would reappear after the newest
    one expired. `append_only` says that each key is written once, so that reads merge nothing. `kept_for` describes the
    operator's settings: it continues with state kept for the same ones, and rejects any other.
    """

    schema: Schema
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int
    expires: str
    append_only: bool = False
    kept_for: str = ""


# Only the batch that began with an earlier state reads it, and holds a lease on it.
_STATE_DISCARD = DiscardPolicy(keep=1, grace=timedelta(0))
_STATE_COMPACTION = DeltaCompaction()
_RETIRED_PER_DISCARD = 8
"""How many dropped or merged generations one discard waits for."""


def state_dataset_name(application: str, name: str) -> str:
    """Return the name of the state table of an application's operator."""
    return f"{application}-{name}"


def declare_state_dataset(application: str, name: str, spec: StateSpec) -> AdjunctDataset:
    """Return the declaration of the state table. Raises ConfigurationError for a key that can't be compared."""
    return local_table(
        state_dataset_name(application, name),
        application=application,
        key=spec.key,
        schema=spec.schema,
        partitions=spec.partitions,
        partition_by=spec.partition_by,
        compaction=_STATE_COMPACTION,
        discard=_STATE_DISCARD,
        description=f"What an operator of application {application} keeps until its time.",
        expires=spec.expires,
        kept_for=spec.kept_for,
    )


def validate_state(lake: Lake, dataset: AdjunctDataset) -> None:
    """Raise DatasetError, saying what differs, where the stored state does not fit the declared one.

    State kept for other settings does not: another bound or window would give its rows other expiry times.
    """
    stored = DatasetLog(lake, dataset.name).read()[1]
    if stored is None:
        return
    assert isinstance(dataset.input, OwnedBy)
    was, declared = stored.declaration.kept_for, dataset.input.kept_for
    if stored.declaration.expires is None or stored.declaration.owner != dataset.input.application:
        raise DatasetError(
            f"the state of operator {declared} would be stored as {dataset.name!r}, and the lake has a dataset of that "
            f"name which is no state of application {dataset.input.application!r}.",
            "Give the operator another name=, or rename the application or the dataset.",
            dataset=dataset.name,
        )
    if was != declared:
        raise DatasetError(
            f"state {dataset.name!r} was kept for operator {was!r}, and the declared one is {declared!r}.",
            "Undo the change, or give the operator another name, under which it starts with empty state. To start over "
            f"under this one: adjunct dataset delete {dataset.name} --reason ….",
            dataset=dataset.name,
        )
    require_local_manifest(stored, dataset)


def create_state(context: Runtime, dataset: AdjunctDataset) -> None:
    """Create an empty state table if there is none.

    `undo_batch` records abandoned batches in it, so that a late commit of a dead run is rejected.
    """
    log = context.log(dataset.name)

    def create() -> None:
        commit, stored = log.read()
        if stored is None:
            attempt, number = log.attempt(), 1 if commit is None else commit.number + 1
            change = Change(action="begin", reason="an operator keeps its state here")
            manifest = empty_manifest(dataset, attempt, number, context.now()).after(change=change)
            log.commit(commit, manifest, by=context.by, commit_id=attempt.id)

    retry_conflicts(lambda: create)


def maintain_state(context: Runtime, name: str) -> bool:
    """Merge small generations of a state table where that is due; return whether a discard is due."""
    manifest = context.log(name).read()[1]
    if manifest is None or manifest.declaration.expires is None:  # another dataset of this name is left alone
        return False
    compacted = compact_due(context, as_unbounded(manifest), _STATE_COMPACTION)
    return len((compacted[1] if compacted is not None else manifest).retired) >= _RETIRED_PER_DISCARD

"""Tables of state: what an operator keeps from batch to batch, each row until its time.

A table of state is a local table that an operator writes and nobody declares. Each batch commits a generation of it.
One whose last row has expired is dropped whole, with the commit of the batch whose watermark has reached it: what stays
is not rewritten for that. Small generations are merged between batches, without the rows that have expired.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction
from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.assets.declaration.local_table import local_table
from dagster_adjunct.assets.unbounded.compact_table import compact_due
from dagster_adjunct.assets.unbounded.local_manifest import as_local, empty_table
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.commit_log import retry_conflicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.lake import Lake

# Nobody reads an earlier state but the batch that was begun with it, which holds it.
_NO_LONGER = DiscardPolicy(keep=1, grace=timedelta(0))
_COMPACTION = DeltaCompaction()
_TRIES = 20
_RETIRED = 8
"""So many dropped or merged generations are deleted together."""


def state_name(application: str, name: str) -> str:
    """Return the name of the dataset that this state of an application is."""
    return f"{application}-{name}"


def state_dataset(application: str, name: str, spec: StateSpec) -> AdjunctDataset:
    """Return the local table that keeps this state. Raises ConfigurationError for a key that can't be compared."""
    return local_table(
        state_name(application, name),
        application=application,
        key=spec.key,
        schema=spec.schema,
        partitions=spec.partitions,
        partition_by=spec.partition_by,
        compaction=_COMPACTION,
        discard=_NO_LONGER,
        description=f"What an operator of application {application} keeps until its time.",
        expires=spec.expires,
        kept_for=spec.kept_for,
    )


def check_state(lake: Lake, dataset: AdjunctDataset) -> None:
    """Refuse state that what is stored can't be gone on with, saying what differs. Raises DatasetError."""
    stored = DatasetLog(lake, dataset.name).read()[1]
    if stored is not None:
        _check_kept_for(dataset, stored.declaration)
        as_local(stored, dataset)


def begin_state(context: Runtime, dataset: AdjunctDataset) -> None:
    """Store a table of state without rows where there is none yet.

    A batch that is given up is noted in it then (`undo_batch`), so that what its dead run commits late is refused.
    """
    log = context.log(dataset.name)

    def decided() -> Callable[[], None]:
        commit, stored = log.read()
        if stored is not None:
            return lambda: None
        attempt, number = log.attempt(), 1 if commit is None else commit.number + 1
        change = Change(action="begin", reason="an operator is going to keep its state here")
        manifest = empty_table(dataset, attempt, number, context.now()).after(change=change)

        def commit_begun() -> None:
            log.commit(commit, manifest, by=context.by, commit_id=attempt.id)

        return commit_begun

    retry_conflicts(decided, attempts=_TRIES)


def _check_kept_for(dataset: AdjunctDataset, stored: DatasetDeclaration) -> None:
    """Refuse what was kept for something else: another bound or window would judge its rows by other times."""
    assert isinstance(dataset.input, OwnedBy)
    was, declared = stored.kept_for, dataset.input.kept_for
    if stored.expires is None or stored.owner != dataset.input.application:
        raise DatasetError(
            f"the lake has a dataset {dataset.name!r}, which is no state of application {dataset.input.application!r}: "
            f"an operator ({declared}) would keep its own under this name.",
            "Give the operator another name=, or the application; or call the dataset otherwise.",
            dataset=dataset.name,
        )
    if was != declared:
        raise DatasetError(
            f"state {dataset.name!r} was kept for another operator than is declared: {was!r}, and now {declared!r}.",
            "Undo the change, or give the operator another name, under which it begins with what it reads from then "
            f"on. To begin anew under this one: adjunct dataset delete {dataset.name} --reason ….",
            dataset=dataset.name,
        )


def tend_state(context: Runtime, name: str) -> bool:
    """Merge small generations of a table of state where that is due; return whether files wait to be deleted."""
    manifest = context.log(name).read()[1]
    if manifest is None or manifest.declaration.expires is None:  # what is none, under its name, is left alone
        return False
    compacted = compact_due(context, as_unbounded(manifest), _COMPACTION)
    return len((compacted[1] if compacted is not None else manifest).retired) >= _RETIRED

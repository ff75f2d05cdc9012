"""What a run does with the table that it finds: SAMZA-1278's recovery table.

                                no table      found, not valid                     valid
    marked for bootstrap        bootstrap     bootstrap beside the one served      continue
    not marked                  create        recreate empty, from the last offset continue

A bootstrap that was begun and can't go on begins again, whether the dataset is marked or not: what is served is not
given up for it. `decide` is pure: what it goes by is in `Seen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.assets.declaration.change_values import order_in_words
from dagster_adjunct.assets.unbounded.commit import TableContinuity, TableSnapshot, assess_continuity
from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.version import describe_history_length, history_from_spec
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import refused_changes

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What an advance does first, and the decision behind it as its commits keep it.

    "leave" serves the table as it is; "begin" begins a new one, empty or bootstrapped; "evolve" takes on the columns
    and the length of the history that are declared now. All but "leave" then apply what has come.
    """

    first: Literal["leave", "begin", "evolve", "apply"]
    decision: Decision


def plan_recovery(snapshot: TableSnapshot, *, rebuild: str | None = None, forced: bool = False) -> RecoveryPlan:
    """Return what to do with the table that was seen; `rebuild` is the reason to build it anew.

    `forced` begins a bootstrap even from a stream that does not tell of every key any more. Raises DatasetError for
    columns that the table can't be continued with and for a bootstrap that would lack keys, OffsetOutOfRangeError and
    MalformedDocumentError where nothing can be decided, and CommitConflictError where another writer committed
    meanwhile.
    """
    if rebuild is None:
        _check_columns(snapshot)
        _check_order(snapshot)
    if rebuild is not None and snapshot.manifest is not None:
        decision = Decision(action="bootstrap", store="invalid", reason=f"rebuild: {rebuild}", at=snapshot.at)
        if not forced:
            require_complete_stream(snapshot, rebuild)
        return RecoveryPlan("begin", decision)
    decision = decide_recovery(snapshot)
    if rebuild is not None:  # there is no table yet, and it is asked for from the oldest offset
        reason = f"rebuild: {rebuild}"
        decision = Decision(action="bootstrap", store=decision.store, reason=reason, at=snapshot.at)
    if decision.action == "bootstrap" and not forced:
        require_complete_stream(snapshot, decision.reason)
    if decision.action == "serve-stale":
        return RecoveryPlan("leave", decision)
    if decision.action != "continue":
        return RecoveryPlan("begin", decision)
    return RecoveryPlan("evolve" if _needs_evolution(snapshot) else "apply", decision)


def decide_recovery(snapshot: TableSnapshot) -> Decision:
    """Return the decision of the recovery table. Raises OffsetOutOfRangeError where that is declared."""
    state = assess_continuity(snapshot)
    for refusal in (state.refusal, snapshot.refusal):
        if refusal is not None:
            raise refusal
    return _apply_recovery_table(snapshot.spec, state, snapshot.at)


def _apply_recovery_table(spec: AdjunctDataset, state: TableContinuity, now: datetime) -> Decision:
    lost = state.lost and not state.building
    if lost and spec.following.on_lost_offset == "fail":
        raise OffsetOutOfRangeError(
            f"dataset {spec.name!r} can't be continued: {state.problem}: retention has passed it.",
            "Deliver the lost changes again, or rebuild it from a complete source: adjunct dataset rebuild "
            f"{spec.name} MODULE:APP --reason …. A longer retention of the stream keeps this from happening.",
            dataset=spec.name,
        )
    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    if state.store in ("valid", "building"):
        action = "continue"
        reason = "the table is valid" if state.store == "valid" else "its bootstrap goes on"
    elif state.building:
        action, reason = "bootstrap", f"the bootstrap that was not finished begins again: {state.problem}"
    elif lost and spec.following.on_lost_offset == "serve_stale":
        action, reason = "serve-stale", state.problem
    elif spec.bootstrap:
        action, reason = "bootstrap", state.problem or "there is no table yet"
    else:
        action = "create" if state.store == "none" else "recreate"
        reason = state.problem or "there is no table yet"
    return Decision(action=action, store=state.store, reason=reason, at=now)


def require_complete_stream(snapshot: TableSnapshot, why: str) -> None:
    """Refuse to bootstrap from a stream that does not tell of every key any more."""
    spec = snapshot.spec
    if spec.following.initial is not None or snapshot.tells_all:
        return
    raise DatasetError(
        f"dataset {spec.name!r} has to be bootstrapped ({why}), and its input {spec.input} does not hold all changes: "
        "retention has dropped the oldest, and the stream is not compacted by key.",
        "Declare a bulk snapshot to begin with (initial=…), deliver the whole table into the stream again, or declare "
        "bootstrap=False, which goes on without what is lost. What was served stays served.",
        dataset=spec.name,
    )


def _needs_evolution(snapshot: TableSnapshot) -> bool:
    """Whether other columns are served than are declared now, or a history of another length.

    What is being built has its own.
    """
    manifest = snapshot.manifest
    if manifest is None or manifest.version is None:
        return False
    kept = manifest.version.history, history_from_spec(snapshot.spec)
    other = manifest.version.columns != snapshot.source.schema or describe_history_length(
        kept[0]
    ) != describe_history_length(kept[1])
    return manifest.bootstrap.state == "done" and other


def _check_columns(snapshot: TableSnapshot) -> None:
    """Refuse columns that what is served can't be read with; a table that is being built anew may have any."""
    manifest = snapshot.manifest
    if manifest is not None and manifest.version is not None and manifest.bootstrap.state != "running":
        check_evolution(snapshot.spec.name, manifest.version.columns, snapshot.source.schema, snapshot.spec.key)


def _check_order(snapshot: TableSnapshot) -> None:
    """Refuse another order than that of the stored positions; a table that is being built anew may have any."""
    manifest, declared = snapshot.manifest, snapshot.source.declaration
    if manifest is None or manifest.version is None or manifest.bootstrap.state == "running":
        return
    version = manifest.version
    if (version.order_by, version.position_type) != (declared.order_by, declared.position_type):
        was, wanted = order_in_words(version.order_by), order_in_words(declared.order_by)
        name = snapshot.spec.name
        raise DatasetError(
            f"dataset {name!r} is ordered by {was}, and declared to be ordered by {wanted}: positions of "
            "different orders can't be compared.",
            f"Restore the order, or rebuild the dataset: adjunct dataset rebuild {name} MODULE:APP --reason …. The old "
            "table is served until the rebuild is done.",
            dataset=name,
        )


def check_evolution(dataset: str, stored: Schema, declared: Schema, key: tuple[str, ...]) -> None:
    """Refuse columns that the stored rows can't be read with: only added and widened ones can, and no key's.

    Raises DatasetError with the differences.
    """
    refused = refused_changes(stored, declared, key)
    if refused:
        raise DatasetError(
            f"dataset {dataset!r} holds other columns than are declared now: {'; '.join(refused)}. Columns can only be "
            "added, or widened.",
            f"Restore these columns, or build it anew with the new ones: adjunct dataset rebuild {dataset} MODULE:APP "
            "--reason …; the old table is served until that is done.",
            dataset=dataset,
        )

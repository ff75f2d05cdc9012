"""Decides what an advance does with the table that it finds: SAMZA-1278's recovery table.

                                no table      found, not valid                     valid
    marked for bootstrap        bootstrap     bootstrap next to the served one     continue
    not marked                  create        recreate empty, from the last offset continue

A bootstrap that can't be continued starts again, whether the dataset is marked or not; the served version stays until
it is done. `plan_recovery` is pure: it decides on a TableSnapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster_adjunct.assets.declaration.change_values import describe_order
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.unbounded.commit import TableSnapshot, assess_continuity
from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.version import describe_history_length, history_from_spec
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import Schema, incompatible_changes


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What an advance does first, and the decision that its commits store.

    "leave" serves the table as it is; "begin" creates a new one, empty or bootstrapped; "evolve" adopts the declared
    columns and length of history. All but "leave" then apply the changes since the last commit.
    """

    first: Literal["leave", "begin", "evolve", "apply"]
    decision: Decision


def plan_recovery(snapshot: TableSnapshot, *, rebuild: str | None = None, forced: bool = False) -> RecoveryPlan:
    """Return what to do with the table; `rebuild` is the reason to rebuild it.

    `forced` bootstraps even from a stream that no longer holds every key. Raises DatasetError for incompatible columns
    and for a bootstrap that would lack keys, OffsetOutOfRangeError and MalformedDocumentError where nothing can be
    decided, and CommitConflictError where another writer committed meanwhile.
    """
    manifest, source, spec = snapshot.manifest, snapshot.source, snapshot.spec
    # A table that is being rebuilt may have any columns and order.
    served = None if manifest is None or manifest.bootstrap.state == "running" else manifest.version
    if rebuild is None:
        if served is not None:
            declared = source.declaration
            check_evolution(spec.name, served.columns, source.schema, spec.key)
            if (served.order_by, served.position_type) != (declared.order_by, declared.position_type):
                raise order_change_error(spec.name, served.order_by, declared.order_by)
        decision = decide_recovery(snapshot)
    else:  # also where there is no table yet, whatever is declared
        store = decide_recovery(snapshot).store if manifest is None else "invalid"
        decision = Decision(action="bootstrap", store=store, reason=f"rebuild: {rebuild}", at=snapshot.at)
    if decision.action == "bootstrap" and not forced:
        require_complete_stream(snapshot, decision.reason)
    if decision.action == "serve-stale":
        return RecoveryPlan("leave", decision)
    if decision.action != "continue":
        return RecoveryPlan("begin", decision)
    histories = served.history if served is not None else None, history_from_spec(spec)
    kept, declared_length = map(describe_history_length, histories)
    evolves = served is not None and (served.columns != source.schema or kept != declared_length)
    return RecoveryPlan("evolve" if evolves else "apply", decision)


def decide_recovery(snapshot: TableSnapshot) -> Decision:
    """Return the decision of the recovery table. Raises OffsetOutOfRangeError where that is declared."""
    state = assess_continuity(snapshot)
    for refusal in (state.refusal, snapshot.refusal):
        if refusal is not None:
            raise refusal
    spec = snapshot.spec
    lost = state.lost and not state.building
    if lost and spec.following.on_lost_offset == "fail":
        rebuild = f"rebuild it from a complete source: adjunct dataset rebuild {spec.name} MODULE:APP --reason …"
        raise lost_changes_error(spec.name, state.problem, rebuild)
    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    if state.store in ("valid", "building"):
        action = "continue"
        reason = "the table is valid" if state.store == "valid" else "its bootstrap continues"
    elif state.building:
        action, reason = "bootstrap", f"the unfinished bootstrap starts again: {state.problem}"
    elif lost and spec.following.on_lost_offset == "serve_stale":
        action, reason = "serve-stale", state.problem
    elif spec.bootstrap:
        action, reason = "bootstrap", state.problem or "there is no table yet"
    else:
        action = "create" if state.store == "none" else "recreate"
        reason = state.problem or "there is no table yet"
    return Decision(action=action, store=state.store, reason=reason, at=snapshot.at)


def require_complete_stream(snapshot: TableSnapshot, why: str) -> None:
    """Raise DatasetError for a bootstrap from a stream that no longer holds every key."""
    spec = snapshot.spec
    if spec.following.initial is not None or snapshot.has_all_keys:
        return
    raise incomplete_stream_error(spec, why, "Declare a bulk snapshot (initial=…)", " The served version stays served.")


def incomplete_stream_error(spec: AdjunctDataset, why: str, instead: str, then: str = "") -> DatasetError:
    """Return the error for a bootstrap from a stream that no longer holds every key."""
    problem = (
        f"dataset {spec.name!r} has to be bootstrapped ({why}), and its input {spec.input} does not hold all changes: "
        "retention has deleted the oldest, and the stream is not compacted by key."
    )
    step = f"{instead}, deliver the whole table into the stream again, or declare bootstrap=False to continue without "
    return DatasetError(problem, f"{step}the lost changes.{then}", dataset=spec.name)


def lost_changes_error(dataset: str, problem: str, instead: str) -> OffsetOutOfRangeError:
    """Return the error for a table whose next changes retention has deleted."""
    return OffsetOutOfRangeError(
        f"dataset {dataset!r} can't be continued: {problem}: retention has deleted the changes in between.",
        f"Deliver the lost changes again, or {instead}. Longer retention of the stream prevents this.",
        dataset=dataset,
    )


def order_change_error(dataset: str, stored: tuple[str, ...] | None, declared: tuple[str, ...] | None) -> DatasetError:
    """Return the error for a table whose positions are of another order than the declared one."""
    problem = (
        f"dataset {dataset!r} is ordered by {describe_order(stored)}, and declared to be ordered by "
        f"{describe_order(declared)}: positions of different orders can't be compared."
    )
    return DatasetError(problem, _restore_or_rebuild("the order", dataset), dataset=dataset)


def _restore_or_rebuild(what: str, dataset: str) -> str:
    command = f"adjunct dataset rebuild {dataset} MODULE:APP --reason …"
    return f"Restore {what}, or rebuild the dataset: {command}. The old table is served until the rebuild is done."


def check_evolution(dataset: str, stored: Schema, declared: Schema, key: tuple[str, ...]) -> None:
    """Raise DatasetError, listing the differences, for any change but added and widened columns outside the key."""
    refused = incompatible_changes(stored, declared, key)
    if refused:
        problem = (
            f"dataset {dataset!r} is stored with other columns than declared: {'; '.join(refused)}. Columns can only "
            "be added or widened."
        )
        raise DatasetError(problem, _restore_or_rebuild("these columns", dataset), dataset=dataset)

"""One advance of an unbounded dataset: look at what is there, decide, carry it out.

look        -> SeenTable      what the manifest, the stream's ends and the declaration say now     table_validity.py
decide      -> RecoveryPlan   by the recovery table of SAMZA-1278, without any I/O                 recovery.py
carry out   -> AdvanceProgress begin a table (bootstrap.py), apply the changes (apply_changes.py), compact
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.apply_changes import apply_changes
from dagster_adjunct.assets.unbounded.bootstrap import begin_table
from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress, confirm, keep_decision
from dagster_adjunct.assets.unbounded.compact_table import compact_due
from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.evolve_columns import evolve
from dagster_adjunct.assets.unbounded.recovery import RecoveryPlan, decide
from dagster_adjunct.assets.unbounded.table_report import report_of
from dagster_adjunct.assets.unbounded.table_validity import look
from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage, Stages, ignore
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.commit_log import Commit

_NONE: Mapping[str, str] = MappingProxyType({})


def advance_unbounded(
    context: Runtime, spec: AdjunctDataset, *, rebuild: str | None = None, on_stage: OnStage = ignore
) -> AdvanceReport:
    """Bootstrap the dataset, or apply the changes since its last commit; nothing new makes no commit.

    `rebuild` gives the reason to build it anew from the stream's oldest offset (or its bulk snapshot), beside the table
    that is served. Raises BadChangeError and NullKeyError for changes that can't be applied, OffsetOutOfRangeError and
    DatasetError where the table can't be continued, and CommitConflictError when another writer was first.
    """
    if not spec.following.persistent:
        raise DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: it lives for one run and is not stored.",
            "Applications build it when they run: adjunct run. Declare persistent=True to store it.",
            dataset=spec.name,
        )
    stages = Stages(spec.name, on_stage)
    with stages("collect"):
        seen = look(context, spec)
        plan = decide(seen, rebuild=rebuild)
    return carry_out(Advance(context, seen, plan.decision, stages), plan)


def carry_out(advance: Advance, plan: RecoveryPlan, *, applied: Mapping[str, str] = _NONE) -> AdvanceReport:
    """Do what was decided, and apply what has come.

    A new table is begun in answer to the startpoints in `applied`, which are ids by partition.
    """
    engine_of(advance.context.spark).decoder.check(advance.source)
    if plan.first == "begin":
        progress = begin_table(advance, _carried_over(advance), applied)
    else:
        progress = taken_up(advance, plan)
    if plan.first == "leave":
        return report_of(advance, keep_decision(advance, progress), "stale")
    progress, action = apply_changes(advance, progress)
    if action == "up-to-date":
        progress = confirm(advance, progress)
    elif action != "waiting":
        progress = compact(advance, progress)
    return report_of(advance, progress, action)


def taken_up(advance: Advance, plan: RecoveryPlan) -> AdvanceProgress:
    """Return where the table that was seen goes on, with the columns that are declared now."""
    seen = advance.seen
    assert seen.manifest is not None, "a table that is not there is begun"
    progress = AdvanceProgress(_carried_over(advance), seen.manifest, seen.ends)
    return evolve(advance, progress) if plan.first == "evolve" else progress


def compact(advance: Advance, progress: AdvanceProgress) -> AdvanceProgress:
    """Compact inside the advance, where that is due and declared."""
    policy = advance.spec.following.compaction
    if not policy.inside_commit:
        return progress
    with advance.stages("compact"):
        compacted = compact_due(advance.context, progress.manifest, policy)
    return progress if compacted is None else progress.after(*compacted)


def _carried_over(advance: Advance) -> Commit | None:
    """Return the current commit, once one says that the table goes on in its stream as that was repartitioned."""
    seen = advance.seen
    if not seen.carried or seen.manifest is None:
        return seen.commit
    return advance.log.commit(seen.commit, seen.manifest, by=advance.context.by)

"""What operators do to stored data: compact, discard, erase, rebuild, rewind, repartition, rename, delete."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.bounded.advance_versions import abandon_version
from dagster_adjunct.assets.rebucketing.rebucket_report import RebucketReport
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.retention.erasing.erasure import ErasureReport, find_keys, forget
from dagster_adjunct.assets.retention.erasing.key_search import KeySearch
from dagster_adjunct.assets.unbounded.compact_table import compact_dataset
from dagster_adjunct.assets.unbounded.compaction_report import CompactionReport
from dagster_adjunct.assets.unbounded.rebuild import rebuild_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.unbounded.rewind_plan import RewindPlan, plan_rewind
from dagster_adjunct.orchestration.upkeep.delete_unread import DeletionReport, delete_dataset, delete_stream
from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard, discard_all
from dagster_adjunct.orchestration.upkeep.renaming import RenameReport, rename_application
from dagster_adjunct.orchestration.upkeep.repartitioning import (
    RepartitionReport,
    repartition_dataset,
    repartition_stream,
)

__all__ = [
    "CompactionReport",
    "DeletionReport",
    "DiscardReport",
    "ErasureReport",
    "KeySearch",
    "RebucketReport",
    "RenameReport",
    "RepartitionReport",
    "RewindPlan",
    "abandon_version",
    "compact_dataset",
    "delete_dataset",
    "delete_stream",
    "discard",
    "discard_all",
    "find_keys",
    "forget",
    "plan_rewind",
    "rebuild_dataset",
    "rename_application",
    "repartition_dataset",
    "repartition_stream",
    "rewind_dataset",
]

guard(globals(), __all__)

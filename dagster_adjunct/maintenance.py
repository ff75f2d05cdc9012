"""What operators do to stored data: compact, expire, erase, rebuild, rewind, rename, delete."""

from __future__ import annotations

from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.retention.erasure import ErasureReport, erase_keys, find_keys
from dagster_adjunct.assets.retention.key_search import KeySearch
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import CompactionReport, compact_dataset
from dagster_adjunct.assets.unbounded.rewind import RewindPlan, plan_rewind, rewind_dataset
from dagster_adjunct.orchestration.maintenance.delete import DeletionReport, delete_dataset, delete_stream
from dagster_adjunct.orchestration.maintenance.discard import expire_all_versions, expire_versions
from dagster_adjunct.orchestration.maintenance.rename import RenameReport, rename_application

__all__ = [
    "CompactionReport",
    "DeletionReport",
    "DiscardReport",
    "ErasureReport",
    "KeySearch",
    "RenameReport",
    "RewindPlan",
    "abandon_version",
    "compact_dataset",
    "delete_dataset",
    "delete_stream",
    "erase_keys",
    "expire_all_versions",
    "expire_versions",
    "find_keys",
    "plan_rewind",
    "rebuild_dataset",
    "rename_application",
    "rewind_dataset",
]

"""Reading what a dataset holds: now, earlier, by key, and as the difference between two versions."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.reading.diff import ChangedEntry, VersionDiff, diff_versions
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.serving import ServedDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions as DatasetStore
from dagster_adjunct.assets.reading.verify import VerifyReport, verify_version
from dagster_adjunct.assets.reading.watch import Watch
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.operator_actions import HistoryEntry

__all__ = [
    "ChangedEntry",
    "DatasetStore",
    "FileCache",
    "HistoryEntry",
    "Lease",
    "ServedDataset",
    "VerifyReport",
    "VersionDiff",
    "Watch",
    "diff_versions",
    "verify_version",
]

guard(globals(), __all__)

"""Reading what a dataset holds: now, earlier, by key, and as the difference between two versions."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.reading.diff_versions import ChangedEntry, VersionDiff
from dagster_adjunct.assets.reading.entries_over_time import EntriesAt, EntriesOverTime
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.open_dataset import Dataset
from dagster_adjunct.assets.reading.rows_of_key import Validity
from dagster_adjunct.assets.reading.verify_version import VerifyReport
from dagster_adjunct.assets.reading.watch import Watch
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.operator_actions import HistoryEntry

__all__ = [
    "ChangedEntry",
    "Dataset",
    "EntriesAt",
    "EntriesOverTime",
    "FileCache",
    "HistoryEntry",
    "Lease",
    "Validity",
    "VerifyReport",
    "VersionDiff",
    "Watch",
]

guard(globals(), __all__)

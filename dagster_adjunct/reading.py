"""Reading what a dataset holds: now, earlier, by key, and as the difference between two versions."""

from __future__ import annotations

from dagster_adjunct.assets.reading.dataset import Dataset
from dagster_adjunct.assets.reading.diff import ChangedEntry, VersionDiff
from dagster_adjunct.assets.reading.history import EntriesAt, EntriesOverTime
from dagster_adjunct.assets.reading.key_lookup import FileCache
from dagster_adjunct.assets.reading.rows_over_time import Validity
from dagster_adjunct.assets.reading.served_version import Watch
from dagster_adjunct.assets.reading.verify import VerifyReport
from dagster_adjunct.assets.versions.actions import HistoryEntry
from dagster_adjunct.assets.versions.leases import Lease

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

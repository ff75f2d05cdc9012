"""Reading what a dataset holds: now, earlier, by key, and as the difference between two
versions.
"""

from dagster_adjunct.assets.reading.dataset import Dataset as Dataset
from dagster_adjunct.assets.reading.diff import ChangedEntry as ChangedEntry
from dagster_adjunct.assets.reading.diff import VersionDiff as VersionDiff
from dagster_adjunct.assets.reading.entry_changes import EntryChange as EntryChange
from dagster_adjunct.assets.reading.entry_changes import EntryChanges as EntryChanges
from dagster_adjunct.assets.reading.key_lookup import FileCache as FileCache
from dagster_adjunct.assets.reading.served_version import Watch as Watch
from dagster_adjunct.assets.reading.valid_time import EntriesAt as EntriesAt
from dagster_adjunct.assets.reading.valid_time import EntriesOverTime as EntriesOverTime
from dagster_adjunct.assets.reading.verification import VerifyReport as VerifyReport
from dagster_adjunct.assets.reading.version_reader import Validity as Validity
from dagster_adjunct.assets.versions.leases import Lease as Lease
from dagster_adjunct.assets.versions.switches import HistoryEntry as HistoryEntry

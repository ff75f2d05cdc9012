"""What operators do to stored data: compact, expire, erase, rebuild, rewind, rename, delete."""

from dagster_adjunct.assets.bounded.advance import abandon_version as abandon_version
from dagster_adjunct.assets.retention.discard import DiscardReport as DiscardReport
from dagster_adjunct.assets.retention.erasure import ErasureReport as ErasureReport
from dagster_adjunct.assets.retention.erasure import find_keys as find_keys
from dagster_adjunct.assets.retention.key_search import KeySearch as KeySearch
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset as rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import CompactionReport as CompactionReport
from dagster_adjunct.assets.unbounded.compaction import compact_dataset as compact_dataset
from dagster_adjunct.assets.unbounded.rewind import plan_rewind as plan_rewind
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset as rewind_dataset
from dagster_adjunct.assets.unbounded.rewind_plan import RewindPlan as RewindPlan
from dagster_adjunct.orchestration.maintenance.delete import DeletionReport as DeletionReport
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset as delete_dataset
from dagster_adjunct.orchestration.maintenance.delete import delete_stream as delete_stream
from dagster_adjunct.orchestration.maintenance.expire import erase_keys as erase_keys
from dagster_adjunct.orchestration.maintenance.expire import (
    expire_all_versions as expire_all_versions,
)
from dagster_adjunct.orchestration.maintenance.expire import expire_versions as expire_versions
from dagster_adjunct.orchestration.maintenance.move import MoveReport as MoveReport
from dagster_adjunct.orchestration.maintenance.move import move_stream as move_stream
from dagster_adjunct.orchestration.maintenance.rename import RenameReport as RenameReport
from dagster_adjunct.orchestration.maintenance.rename import (
    rename_application as rename_application,
)
from dagster_adjunct.resources.file_streams.table_changes import (
    begin_changes_again as begin_changes_again,
)

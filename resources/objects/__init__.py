"""Object stores, and the commit protocol on top of them."""

from __future__ import annotations

from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.lake_address import LakeSettings
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.memory_store import InMemoryStore
from dagster_adjunct.resources.objects.object_store import (
    ObjectStore,
    S3Options,
    StoreDescriptor,
)
from dagster_adjunct.resources.objects.paging import PageRef, read_page, write_page

__all__ = [
    "Commit",
    "CommitLog",
    "InMemoryStore",
    "Lake",
    "LakeSettings",
    "LocalStore",
    "ObjectStore",
    "PageRef",
    "S3Options",
    "StoreDescriptor",
    "read_page",
    "write_page",
]

"""Object stores, and the commit protocol on top of them (design sections 3 and 13, rules 1-4)."""

from __future__ import annotations

from resources.objects.commit import Commit, CommitLog
from resources.objects.lake import Lake, LakeSettings, lake_in, open_lake
from resources.objects.local import LocalStore
from resources.objects.memory import InMemoryStore
from resources.objects.paging import PageRef, read_page, write_page
from resources.objects.store import ObjectInfo, ObjectStore, S3Options, Stored, StoreDescriptor

__all__ = [
    "Commit",
    "CommitLog",
    "InMemoryStore",
    "Lake",
    "LakeSettings",
    "LocalStore",
    "ObjectInfo",
    "ObjectStore",
    "PageRef",
    "S3Options",
    "StoreDescriptor",
    "Stored",
    "lake_in",
    "open_lake",
    "read_page",
    "write_page",
]

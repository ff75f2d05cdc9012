"""What several datasets serve at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.reading.version_reader import VersionReader


def current_readers(datasets: Mapping[str, StoredVersions]) -> dict[str, VersionReader | None]:
    """Return the version that each dataset serves now; members of one version set from one snapshot of it."""
    readers: dict[str, VersionReader | None] = {}
    for name, stored in datasets.items():
        if name in readers:
            continue
        snapshot = stored.log.read_all()[1]
        for member, other in datasets.items():
            if member == name or (member in snapshot and member not in readers):
                readers[member] = other.reader_of(snapshot.get(member))
    return readers

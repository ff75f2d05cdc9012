"""`RecordedPlan`: what a replay with recorded versions reads again, as it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from dagster_adjunct.orchestration.batch_log.intent import JoinedVersions, Partition
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.streams.system import OffsetRange


class RecordedPiece(StoredDocument):
    """Offsets that one batch was the first to read: from the end of the previous piece up to,
    excluding, `end`.
    """

    end: str
    batch: int


class VersionRead(NamedTuple):
    """A version of a dataset, and the numbers of the batches that read it, in order."""

    dataset: str
    version: str
    batches: list[int]


class RecordedPlan(StoredDocument):
    """The offsets to read again, in pieces, and the dataset versions that each batch read.

    `spans` has, by partition, all offsets, `pieces` those of each batch. `versions` has, by batch,
    the versions that it read of datasets. From `expires_at` on, a request that still waits does not
    retain versions any more. `streams` has the identities of the streams, which tell whether one
    was recreated.
    """

    id: str
    application: str
    expires_at: datetime
    streams: dict[str, str]
    spans: dict[Partition, OffsetRange]
    pieces: dict[Partition, tuple[RecordedPiece, ...]]
    versions: dict[int, JoinedVersions]

    def versions_read(self) -> Iterator[VersionRead]:
        """Yield the versions that the batches read."""
        batches_of: dict[tuple[str, str], list[int]] = {}  # by dataset and version
        for batch, joined in sorted(self.versions.items()):
            for dataset, versions in joined.list_all().items():
                for version in versions:
                    batches_of.setdefault((dataset, version), []).append(batch)
        for (dataset, version), batches in sorted(batches_of.items()):
            yield VersionRead(dataset, version, batches)

    def describe(self) -> tuple[str, ...]:
        """Return a line on the batches, and one on the versions of each dataset."""
        batches = sorted(self.versions)
        if not batches:
            return ()
        first = batches[0]
        last = batches[-1]
        if last != first:
            which = f"{len(batches)} batches, {first} to {last}"
        else:
            which = f"batch {first}"
        lines = [f"recorded: what {which} read, kept until the replay has ended"]
        versions_of: dict[str, list[str]] = {}
        for read in self.versions_read():
            versions_of.setdefault(read.dataset, []).append(read.version)
        for dataset, versions in versions_of.items():
            more = f" and {len(versions) - 3} more" if len(versions) > 3 else ""
            lines.append(f"recorded: dataset {dataset}: {', '.join(versions[:3])}{more}")
        return tuple(lines)

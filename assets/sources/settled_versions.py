"""What a dataset has settled of its stream: where it stands, and what the markers of its versions said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagster_adjunct.assets.sources.end_of_dataset_markers import MarkerSaid, Settled
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class SettledVersions:
    """Where a dataset stands in its stream (`offsets`), and what it knows of versions that were marked before there.

    `markers` has what those of delivered versions said; nothing contradicts one abandoned, rejected, or long past.
    `gone` names versions that were lost, withdrawn, or dropped after they were rejected: they may come again.
    """

    offsets: dict[SystemStreamPartition, int]
    markers: Settled
    gone: frozenset[str]


def settled_versions(manifest: BoundedManifest) -> SettledVersions:
    """Return what a manifest has settled of its stream.

    The name of a version that was withdrawn, or dropped after it was rejected, says nothing any more: what comes under
    it is a new version.
    """
    offsets = {SystemStreamPartition.parse(text): int(offset) for text, offset in manifest.offsets.items()}
    rejected = {ref.id for ref in manifest.versions if ref.state == "rejected"}
    marked: dict[str, Mapping[SystemStreamPartition, MarkerSaid]] = {name: {} for name in manifest.known}
    for done in manifest.delivered:
        if done.freed is not None:
            continue
        markers = {} if done.version in rejected else done.markers
        marked[done.name] = {
            SystemStreamPartition.parse(ssp): MarkerSaid(facts.rows, facts.checksum, facts.valid_from)
            for ssp, facts in markers.items()
        }
    lost = {name for lost in manifest.lost for name in lost.versions}
    freed = {done.name for done in manifest.delivered if done.freed is not None}
    return SettledVersions(
        dict(sorted(offsets.items())),
        marked | {ended.name: {} for ended in manifest.abandoned},
        frozenset(lost | freed),
    )

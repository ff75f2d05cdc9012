"""What is told of records that came again under the name of a version that was taken, and were dropped."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_adjunct.assets.sources.end_of_dataset_markers import MarkedSegment
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.deliveries import MarkerFacts


def told_again(manifest: BoundedManifest, dropped: Mapping[MarkedSegment, int]) -> tuple[str, ...]:
    """Return a sentence for each version of which records were dropped that are not known to be what was taken.

    `dropped` are the records by segment. Equal counts prove nothing; equal checksums in all markers do.
    """
    again: dict[str, dict[MarkedSegment, int]] = {}
    for segment, count in dropped.items():
        if count:
            again.setdefault(segment.marker.version, {})[segment] = count
    return tuple(told for name, segments in again.items() if (told := _told(manifest, name, segments)))


def _told(manifest: BoundedManifest, name: str, segments: Mapping[MarkedSegment, int]) -> str:
    done = next((delivered for delivered in reversed(manifest.delivered) if delivered.name == name), None)
    ref = manifest.ref(done.version) if done else None
    again = f"version {name!r} was delivered again: its {sum(segments.values()):,} record(s) are dropped"
    if any(abandoned.name == name for abandoned in manifest.abandoned):
        return f"{again}, because it was abandoned. To publish them, deliver them under a new version name"
    if ref is not None and ref.state == "rejected":
        drop = f"adjunct dataset drop {manifest.name} {ref.id} --reason …"
        way = f"To have them judged, deliver them under a new name, or again after {drop}"
        return f"{again}, because the rejected one holds the name. {way}"
    taken = done.markers if done else {}
    if all(_is_equal(segment, taken.get(str(segment.ssp))) for segment in segments):
        return ""
    why = "whether they equal what was taken is not known (the markers have no equal checksums)"
    for segment, count in segments.items():
        before = taken.get(str(segment.ssp))
        if before is not None and before.rows not in (None, count):
            why = f"they differ from what was taken: {segment.ssp} had {before.rows:,} and has {count:,} now"
    return f"{again}, and {why}. To publish them, deliver them under a new version name"


def _is_equal(segment: MarkedSegment, before: MarkerFacts | None) -> bool:
    checksum = segment.marker.checksum
    return before is not None and checksum is not None and checksum == before.checksum

"""Where a bounded dataset resumes after retention has removed unread records of its stream: decided without I/O.

Each version is self-contained, so the dataset resumes with the first complete one. In a truncated partition, the
records up to the first marker are complete only if that marker states their exact count: otherwise the start of the
version may be missing. Markers without records may repeat those of a removed version. All partitions have their
versions in one order, so every version before the first common one is lost in all partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dagster_adjunct.assets.sources.markers import (
    MarkedSegment,
    Settled,
    declared_partition_counts,
    has_partition,
    is_bare,
    resolve_next_version,
)
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.streams.system import Marker, SystemStreamPartition

Offsets = Mapping[SystemStreamPartition, int]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The `offsets` to resume at, and the `versions` lost before them, in order."""

    offsets: dict[SystemStreamPartition, int]
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossUnknown:
    """The lost versions are unknown until the `missing` partitions have a marker of `version` (None: any next one)."""

    version: str | None
    missing: tuple[SystemStreamPartition, ...]


def find_truncated_partitions(offsets: Offsets, oldest: Offsets) -> dict[SystemStreamPartition, tuple[int, int]]:
    """Return the unread offsets that retention has removed: [first, oldest) by partition."""
    return {ssp: (offset, oldest[ssp]) for ssp, offset in sorted(offsets.items()) if offset < oldest[ssp]}


def resume_after_truncation(
    dataset: str,
    offsets: Offsets,
    oldest: Offsets,
    markers: Sequence[Marker],
    settled: Settled,
    count: Callable[[MarkedSegment], int],
) -> ResumePoint | LossUnknown:
    """Return where a dataset resumes, and the lost versions: at its offsets, unless retention has removed records.

    `count` returns the number of records that a segment still has. Markers of settled versions end re-deliveries, as
    usual. Raises MarkerConflictError if the orders of partitions contradict each other.
    """
    cut = find_truncated_partitions(offsets, oldest)
    if not cut:
        return ResumePoint(dict(offsets), ())
    start = {ssp: max(offset, oldest[ssp]) for ssp, offset in sorted(offsets.items())}
    seen = {ssp: _markers_from(ssp, at, markers) for ssp, at in start.items()}
    fresh = {ssp: _first_unsettled(marked, settled) for ssp, marked in seen.items()}
    names = {ssp: [marker.version for marker in marked] for ssp, marked in fresh.items()}
    spans = declared_partition_counts(markers)
    common = {
        version
        for version in {name for marked in names.values() for name in marked}
        if all(version in marked for ssp, marked in names.items() if has_partition(ssp, version, spans))
    }
    silent = tuple(ssp for ssp, marked in names.items() if not marked)
    if silent and not common:
        return LossUnknown(None, silent)
    if not common:
        # A truncated partition is ahead: the others have yet to deliver the version that it has.
        ahead = {names[ssp][0] for ssp in cut}
        version = ahead.pop() if len(ahead) == 1 else None
        return LossUnknown(version, tuple(ssp for ssp, marked in names.items() if version not in marked))
    nexts = {ssp: next((marker for marker in fresh[ssp] if marker.version in common), None) for ssp in names}
    version = resolve_next_version(dataset, {ssp: marker.version for ssp, marker in nexts.items() if marker}, spans)
    assert version is not None, "there is a common version"
    first = {ssp: marker for ssp, marker in nexts.items() if marker is not None and has_partition(ssp, version, spans)}
    lost = _lost_before(dataset, version, {ssp: names[ssp] for ssp in first}, cut, spans)
    cut_in_it = [ssp for ssp in cut if ssp in first]
    partial = is_bare(first.values()) and any(seen[ssp][0] is first[ssp] for ssp in cut_in_it)
    for ssp in cut_in_it:  # the version's start may have been removed
        marker = seen[ssp][0]
        if marker.version == version and not partial:
            segment = MarkedSegment(ssp, oldest[ssp], int(marker.offset), marker)
            partial = marker.rows is None or marker.rows != count(segment)
    if partial:
        return ResumePoint(
            {**start, **{ssp: int(marker.offset) + 1 for ssp, marker in first.items()}}, (*lost, version)
        )
    for ssp, marker in first.items():  # after the last marker of an earlier version
        earlier = [int(other.offset) + 1 for other in seen[ssp] if int(other.offset) < int(marker.offset)]
        start[ssp] = max([start[ssp], *earlier])
    return ResumePoint(start, lost)


def _lost_before(
    dataset: str,
    version: str,
    names: Mapping[SystemStreamPartition, Sequence[str]],
    cut: Collection[SystemStreamPartition],
    spans: Mapping[str, int],
) -> tuple[str, ...]:
    """Return the versions before this one; only truncated partitions may lack the earliest of them."""
    before = {ssp: tuple(marked[: marked.index(version)]) for ssp, marked in names.items()}
    longest = max(before.values(), key=len)
    for ssp, marked in before.items():
        expected = tuple(name for name in longest if has_partition(ssp, name, spans))
        if marked != (expected[len(expected) - len(marked) :] if ssp in cut else expected):
            orders = "; ".join(f"{other}: {', '.join(earlier) or 'none'}" for other, earlier in before.items())
            raise MarkerConflictError(
                f"dataset {dataset!r}: retention has removed unread records, and before version {version!r} "
                f"partitions mark different versions ({orders}); expected the same ones in one order.",
                "Abandon the version whose marker never arrived in some partition: "
                f"abandon_version(lake, {dataset!r}, VERSION, reason=…, by=…).",
                dataset=dataset,
                version=version,
            )
    return longest


def _markers_from(ssp: SystemStreamPartition, start: int, markers: Sequence[Marker]) -> list[Marker]:
    later = (marker for marker in markers if marker.ssp == ssp and int(marker.offset) >= start)
    return sorted(later, key=lambda marker: int(marker.offset))


def _first_unsettled(markers: Sequence[Marker], settled: Settled) -> list[Marker]:
    """Return the first marker of each unsettled version, in order."""
    first: dict[str, Marker] = {}
    for marker in markers:
        if marker.version not in settled:
            first.setdefault(marker.version, marker)
    return list(first.values())

"""Where a bounded dataset goes on when retention has taken what comes next of its stream: decided without I/O.

A version stands for itself, so the dataset goes on with the first one that is whole. In a partition that retention has
cut, the records up to its first marker are whole only where that marker counts exactly those: otherwise the beginning
of that version may be gone, and all of a version whose marker is gone. Markers alone that count nothing there may be
those of a version that is gone, sent again. Versions follow each other in one order in all
partitions, so what comes before the first common one is lost in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dagster_adjunct.assets.sources.end_of_dataset_markers import (
    MarkedSegment,
    Settled,
    in_span,
    is_bare,
    next_version,
    spans_of,
)
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.streams.interface.stream_system import Marker
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

Offsets = Mapping[SystemStreamPartition, int]


@dataclass(frozen=True, slots=True)
class GoesOn:
    """The dataset goes on at `offsets`; `versions` are those lost before them, in their order."""

    offsets: dict[SystemStreamPartition, int]
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Which versions are lost is known when `missing` have the marker of `version` (None: their next one)."""

    version: str | None
    missing: tuple[SystemStreamPartition, ...]


def cut_partitions(offsets: Offsets, oldest: Offsets) -> dict[SystemStreamPartition, tuple[int, int]]:
    """Return what retention has taken before it was read: [first, oldest) by partition."""
    return {ssp: (offset, oldest[ssp]) for ssp, offset in sorted(offsets.items()) if offset < oldest[ssp]}


def after_lost(
    dataset: str,
    offsets: Offsets,
    oldest: Offsets,
    markers: Sequence[Marker],
    settled: Settled,
    count: Callable[[MarkedSegment], int],
) -> GoesOn | Unknown:
    """Return where a dataset goes on: where it stands, unless retention has taken what comes next there.

    `count` tells how many records a segment still holds. Raises what `go_on` does.
    """
    if not cut_partitions(offsets, oldest):
        return GoesOn(dict(offsets), ())
    counted = {segment.ssp: count(segment) for segment in to_count(offsets, oldest, markers)}
    return go_on(dataset, offsets, oldest, markers, settled, counted)


def to_count(offsets: Offsets, oldest: Offsets, markers: Sequence[Marker]) -> list[MarkedSegment]:
    """Return the first segments of cut partitions that are whole if they hold as many records as their marker says."""
    firsts = [
        following[0] for ssp in cut_partitions(offsets, oldest) if (following := _after(ssp, oldest[ssp], markers))
    ]
    return [
        MarkedSegment(marker.ssp, oldest[marker.ssp], int(marker.offset), marker)
        for marker in firsts
        if marker.rows is not None
    ]


def go_on(
    dataset: str,
    offsets: Offsets,
    oldest: Offsets,
    markers: Sequence[Marker],
    settled: Settled,
    counted: Mapping[SystemStreamPartition, int],
) -> GoesOn | Unknown:
    """Return where a dataset goes on whose stream is cut in some partition, and what is lost.

    `counted` are the records of the segments that `to_count` names. Markers of settled versions end re-deliveries, as
    ever. Raises MarkerConflictError where the partitions' orders contradict each other.
    """
    cut = cut_partitions(offsets, oldest)
    start = {ssp: max(offset, oldest[ssp]) for ssp, offset in sorted(offsets.items())}
    seen = {ssp: _after(ssp, at, markers) for ssp, at in start.items()}
    fresh = {ssp: _firsts(marked, settled) for ssp, marked in seen.items()}
    names = {ssp: [marker.version for marker in marked] for ssp, marked in fresh.items()}
    spans = spans_of(markers)
    common = {
        version
        for version in {name for marked in names.values() for name in marked}
        if all(version in marked for ssp, marked in names.items() if in_span(ssp, version, spans))
    }
    silent = tuple(ssp for ssp, marked in names.items() if not marked)
    if silent and not common:
        return Unknown(None, silent)
    if not common:
        # A partition that retention has cut is ahead: the others have yet to deliver what it has.
        ahead = {names[ssp][0] for ssp in cut}
        version = ahead.pop() if len(ahead) == 1 else None
        return Unknown(version, tuple(ssp for ssp, marked in names.items() if version not in marked))
    nexts = {ssp: next((marker for marker in fresh[ssp] if marker.version in common), None) for ssp in names}
    version = next_version(dataset, {ssp: marker.version for ssp, marker in nexts.items() if marker}, spans)
    assert version is not None, "it is one of those that are common"
    first = {ssp: marker for ssp, marker in nexts.items() if marker is not None and in_span(ssp, version, spans)}
    lost = _lost_before(dataset, version, {ssp: names[ssp] for ssp in first}, cut, spans)
    cut_in_it = [ssp for ssp in cut if ssp in first]
    repeated = is_bare(first.values()) and any(seen[ssp][0] is first[ssp] for ssp in cut_in_it)
    if repeated or any(_is_partial(seen[ssp][0], version, counted.get(ssp)) for ssp in cut_in_it):
        return GoesOn({**start, **{ssp: int(marker.offset) + 1 for ssp, marker in first.items()}}, (*lost, version))
    behind = {ssp: _behind(seen[ssp], start[ssp], int(marker.offset)) for ssp, marker in first.items()}
    return GoesOn({**start, **behind}, lost)


def _lost_before(
    dataset: str,
    version: str,
    names: Mapping[SystemStreamPartition, Sequence[str]],
    cut: Collection[SystemStreamPartition],
    spans: Mapping[str, int],
) -> tuple[str, ...]:
    """Return the versions before this one; a cut partition may lack the earliest of them, no other may lack any."""
    before = {ssp: tuple(marked[: marked.index(version)]) for ssp, marked in names.items()}
    longest = max(before.values(), key=len)
    for ssp, marked in before.items():
        expected = tuple(name for name in longest if in_span(ssp, name, spans))
        if marked != (expected[len(expected) - len(marked) :] if ssp in cut else expected):
            orders = "; ".join(f"{other}: {', '.join(earlier) or 'none'}" for other, earlier in before.items())
            raise MarkerConflictError(
                f"dataset {dataset!r}: retention has taken records that were not read, and before version {version!r} "
                f"partitions mark different versions ({orders}); expected the same ones in one order.",
                "Abandon the version whose marker never came in some partition: "
                f"abandon_version(lake, {dataset!r}, VERSION, reason=…, by=…).",
                dataset=dataset,
                version=version,
            )
    return longest


def _is_partial(first: Marker, version: str, counted: int | None) -> bool:
    """Whether the version may have begun before what a partition still holds, whose first marker this is."""
    return first.version == version and (first.rows is None or first.rows != counted)


def _behind(markers: Sequence[Marker], start: int, end: int) -> int:
    """Return the offset behind the last of these markers that is before `end`."""
    return max([start, *(int(marker.offset) + 1 for marker in markers if int(marker.offset) < end)])


def _after(ssp: SystemStreamPartition, start: int, markers: Sequence[Marker]) -> list[Marker]:
    later = (marker for marker in markers if marker.ssp == ssp and int(marker.offset) >= start)
    return sorted(later, key=lambda marker: int(marker.offset))


def _firsts(markers: Sequence[Marker], settled: Settled) -> list[Marker]:
    """Return the first marker of each version that is not settled, in order."""
    first: dict[str, Marker] = {}
    for marker in markers:
        if marker.version not in settled:
            first.setdefault(marker.version, marker)
    return list(first.values())

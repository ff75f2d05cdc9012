"""End-of-dataset markers: which version on a stream is complete.

In each partition of a stream, the records up to the first marker of an unsettled version belong to
that version. A version is complete when every partition has delivered its marker, in any order; if
its markers state how many partitions the stream had, those partitions are enough, because others
were added later. Records that end with the marker of a settled version (sealed, rejected or
abandoned) are a re-delivery: they are dropped, counted and reported, unless the marker contradicts
the sealed version.

Where retention has removed unread records, a dataset resumes with the first complete version. In a
truncated partition, the records up to the first marker are complete only if that marker states
their exact count: otherwise the start of the version may be missing. Markers without records may
repeat those of a removed version. All partitions have their versions in one order, so every version
before the first common one is lost in all partitions.

All of this is decided from offsets and markers alone, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from dagster_adjunct.assets.sources.version_source import Delivery, contradiction_error
from dagster_adjunct.assets.versions.manifest import BoundedManifest, MarkerFacts
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.streams.system import Marker, SystemStreamPartition

IntOffsets = Mapping[SystemStreamPartition, int]
Settled = Mapping[str, Mapping[SystemStreamPartition, MarkerFacts]]
"""The marker facts of each settled version, by version name and partition; {} for a version
without known markers.
"""


@dataclass(frozen=True, slots=True)
class MarkedSegment:
    """The records [start, end) of one partition and the marker at `end` that closed them."""

    ssp: SystemStreamPartition
    start: int
    end: int
    marker: Marker

    @property
    def next(self) -> int:
        """The offset after the marker, which has an offset of its own."""
        return self.end + 1


@dataclass(frozen=True, slots=True)
class CompleteVersion:
    """A version delivered by all partitions that it spans: its records (`segments`), and the
    re-deliveries to drop before them.

    `offsets` are the next ones to read after it, of all partitions.
    """

    version: str
    segments: tuple[MarkedSegment, ...]
    dropped: tuple[MarkedSegment, ...]
    offsets: dict[SystemStreamPartition, int]

    def delivery(self, records: Mapping[SystemStreamPartition, int]) -> Delivery:
        """Return the version as a Delivery; `records` is the number of records that each
        partition has of it.
        """
        ranges: dict[str, tuple[str, str]] = {}
        markers: dict[str, MarkerFacts] = {}
        times: set[datetime] = set()
        for segment in self.segments:
            marker = segment.marker
            ssp = str(segment.ssp)
            ranges[ssp] = (str(segment.start), str(segment.end))
            markers[ssp] = MarkerFacts(
                offset=segment.end,
                rows=records[segment.ssp] if marker.rows is None else marker.rows,
                checksum=marker.checksum,
                valid_from=marker.valid_from,
            )
            if marker.valid_from is not None:
                times.add(marker.valid_from)
        return Delivery(
            self.version,
            ranges=ranges,
            markers=markers,
            content=self,
            valid_from=tuple(sorted(times)),
        )


@dataclass(frozen=True, slots=True)
class IncompleteVersion:
    """No version is complete. `version` is the one that some partitions have delivered, if any.

    `missing` are the partitions without its marker. `offsets` are the next ones after the
    re-deliveries in `dropped`; {} if retention has removed unread records, and where to resume
    depends on the missing markers.
    """

    version: str | None
    missing: tuple[SystemStreamPartition, ...]
    dropped: tuple[MarkedSegment, ...] = ()
    offsets: dict[SystemStreamPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PartitionMarkers:
    """What one partition has delivered after an offset.

    `dropped` are the re-deliveries before the next version, `position` is the offset after them,
    and `segment` is the next version there; None if its marker has not arrived.
    """

    ssp: SystemStreamPartition
    dropped: tuple[MarkedSegment, ...]
    position: int
    segment: MarkedSegment | None

    @classmethod
    def read(
        cls,
        dataset: str,
        ssp: SystemStreamPartition,
        offset: int,
        markers: Sequence[Marker],
        settled: Settled,
    ) -> _PartitionMarkers:
        """Return what the partition has at or after the offset, up to its first marker of an
        unsettled version. Raises MarkerConflictError for a re-delivery that contradicts what was
        delivered.
        """
        dropped: list[MarkedSegment] = []
        position = offset
        for marker in _markers_from(markers, ssp, offset):
            segment = MarkedSegment(ssp, position, int(marker.offset), marker)
            if marker.version not in settled:
                return cls(ssp, tuple(dropped), position, segment)
            _check_repeated(dataset, marker, settled[marker.version].get(ssp))
            dropped.append(segment)
            position = segment.next
        return cls(ssp, tuple(dropped), position, None)


def _markers_from(
    markers: Iterable[Marker], ssp: SystemStreamPartition, offset: int
) -> tuple[Marker, ...]:
    """Return the markers of a partition at or after an offset, in order."""
    remaining = []
    for marker in markers:
        if marker.ssp == ssp and int(marker.offset) >= offset:
            remaining.append(marker)
    return tuple(sorted(remaining, key=lambda marker: int(marker.offset)))


def find_next_delivery(
    dataset: str,
    offsets: Mapping[SystemStreamPartition, int],
    markers: Sequence[Marker],
    settled: Settled,
    reusable: Collection[str] = (),
) -> CompleteVersion | IncompleteVersion:
    """Return the next complete version after `offsets`, or the partitions that it waits for.

    `markers` are all markers at or after the offsets. `settled` has the facts of markers by version
    name (empty for an abandoned one). `reusable` names lost or dropped versions, which may be
    delivered again; their markers alone, repeated without records, are not an empty version. Raises
    MarkerConflictError if a marker contradicts another one of its version, or if partitions mark
    different versions as the next.
    """
    spans = declared_partition_counts(markers)
    partitions: list[_PartitionMarkers] = []
    marked: dict[SystemStreamPartition, str] = {}
    for ssp, offset in sorted(offsets.items()):
        each = _PartitionMarkers.read(dataset, ssp, offset, markers, settled)
        partitions.append(each)
        if each.segment is not None:
            marked[ssp] = each.segment.marker.version
    version = resolve_next_version(dataset, marked, spans)
    dropped: list[MarkedSegment] = []
    segments: list[MarkedSegment] = []
    missing: list[SystemStreamPartition] = []
    position: dict[SystemStreamPartition, int] = {}
    for each in partitions:
        dropped += each.dropped
        position[each.ssp] = each.position
        if not has_partition(each.ssp, version, spans):
            continue
        if each.segment is None:
            missing.append(each.ssp)
        else:
            segments.append(each.segment)
    after = position | {segment.ssp: segment.next for segment in segments}
    if not missing and _is_repeated_alone(segments, reusable):  # no version: look after it
        behind = find_next_delivery(dataset, after, markers, settled, reusable)
        return replace(behind, dropped=(*dropped, *behind.dropped))
    for segment in segments:
        _check_repeats(dataset, segment, markers)
    if version is None or missing:
        return IncompleteVersion(version, tuple(missing), tuple(dropped), position)
    return CompleteVersion(version, tuple(segments), tuple(dropped), after)


def _check_repeats(dataset: str, segment: MarkedSegment, markers: Sequence[Marker]) -> None:
    """Raise MarkerConflictError if a later marker of this version contradicts its first."""
    first = segment.marker
    for marker in _markers_from(markers, segment.ssp, segment.end):
        if marker.version == first.version:
            _check_repeated(dataset, marker, first)


def _is_repeated_alone(segments: Sequence[MarkedSegment], reusable: Collection[str]) -> bool:
    """Whether only the markers of a reusable version were delivered again, without records; False
    without segments, which are all of one version.
    """
    markers = [segment.marker for segment in segments]
    if not markers or markers[0].version not in reusable:
        return False
    return is_bare(markers)


def is_bare(markers: Iterable[Marker]) -> bool:
    """Whether no records precede any of these markers, by the count of the stream itself."""
    return all(marker.counted and marker.rows == 0 for marker in markers)


def check_repeats(
    dataset: str,
    complete: CompleteVersion,
    markers: Sequence[Marker],
    records: Mapping[SystemStreamPartition, int],
) -> None:
    """Raise MarkerConflictError if a repeated marker states another count than the records before
    the first one, by partition in `records`.

    This covers first markers that state no count; `find_next_delivery` checks the others.
    """
    for segment in complete.segments:
        if segment.marker.rows is not None:
            continue
        counted = replace(segment.marker, rows=records[segment.ssp], valid_from=None)
        _check_repeats(dataset, replace(segment, marker=counted), markers)


def check_counts(
    dataset: str, complete: CompleteVersion, records: Mapping[SystemStreamPartition, int]
) -> None:
    """Raise MarkerConflictError if a partition does not have the number of records that its
    marker states.
    """
    for segment in complete.segments:
        expected = segment.marker.rows
        got = records[segment.ssp]
        if expected not in (None, got):
            raise contradiction_error(
                f"dataset {dataset!r}, version {complete.version!r}: the marker at offset"
                f" {segment.marker.offset} of {segment.ssp} expects {expected} records, the"
                f" partition holds {got} before it.",
                dataset,
                complete.version,
                f"{expected} records",
                f"{got} records",
            )


def _check_repeated(dataset: str, marker: Marker, before: MarkerFacts | Marker | None) -> None:
    """Raise MarkerConflictError if a repeated marker states something else than the first one did.

    `before` is that marker, or what the manifest has of it; None if nothing is known.
    """
    if before is None:
        return
    # A count by the stream is no statement of the producer: the marker may be repeated without its
    # records.
    for what, first, now in (
        ("records", before.rows, None if marker.counted else marker.rows),
        ("checksum", before.checksum, marker.checksum),
        ("valid_from", before.valid_from, marker.valid_from),
    ):
        if first is not None and now is not None and first != now:
            raise contradiction_error(
                f"dataset {dataset!r}: version {marker.version!r} is marked again at offset"
                f" {marker.offset} of {marker.ssp} with {what} {now}; it was first delivered there"
                f" with {first}.",
                dataset,
                marker.version,
                f"{what} {first}",
                f"{what} {now}",
            )


def declared_partition_counts(markers: Iterable[Marker]) -> dict[str, int]:
    """Return, by version, the number of partitions that it spans according to its markers: the
    first N.

    A version that is not in the result spans all partitions.
    """
    spans: dict[str, int] = {}
    for marker in markers:
        if marker.partitions is not None:
            count = max(marker.partitions, marker.ssp.partition + 1)
            spans[marker.version] = max(spans.get(marker.version, 0), count)
    return spans


def has_partition(
    ssp: SystemStreamPartition, version: str | None, spans: Mapping[str, int]
) -> bool:
    """Whether a version spans this partition; `spans` is what `declared_partition_counts`
    returns.
    """
    return version is None or version not in spans or ssp.partition < spans[version]


def resolve_next_version(
    dataset: str, versions: Mapping[SystemStreamPartition, str], spans: Mapping[str, int]
) -> str | None:
    """Return the dataset's next version, given the next marked version of each partition that has
    one; None if none has.

    It is the version that no other partition which it spans contradicts: partitions that it does
    not span may mark another one. Raises MarkerConflictError if partitions disagree.
    """
    ssps_by_version: dict[str, list[SystemStreamPartition]] = {}
    for ssp, version in versions.items():
        ssps_by_version.setdefault(version, []).append(ssp)
    if not ssps_by_version:
        return None
    for version, ssps in ssps_by_version.items():
        others = versions.keys() - ssps
        is_contradicted = any(has_partition(ssp, version, spans) for ssp in others)
        if not is_contradicted:
            return version
    described: list[str] = []
    for version, ssps in sorted(ssps_by_version.items()):
        more = " …" if len(ssps) > 3 else ""
        described.append(f"{', '.join(map(str, ssps[:3]))}{more}: {version!r}")
    raise MarkerConflictError(
        f"dataset {dataset!r}: partitions mark different versions as the next one"
        f" ({'; '.join(described)}); expected the same versions in the same order in every"
        " partition.",
        "If the marker of one version will never arrive, for example in a partition added"
        f" later, abandon that version: abandon_version(lake, {dataset!r}, VERSION, reason=…,"
        " by=…).",
        dataset=dataset,
    )


def describe_redeliveries(
    manifest: BoundedManifest, dropped: Mapping[MarkedSegment, int]
) -> tuple[str, ...]:
    """Return a note for each version whose dropped records may differ from the published ones.

    `dropped` is the number of records of each dropped segment. Only equal checksums in all markers
    prove that records are equal.
    """
    segments_by_version: dict[str, dict[MarkedSegment, int]] = {}
    for segment, count in dropped.items():
        if count:
            segments_by_version.setdefault(segment.marker.version, {})[segment] = count
    notes = [
        _describe_redelivery(manifest, name, segments)
        for name, segments in segments_by_version.items()
    ]
    return tuple(filter(None, notes))


def _describe_redelivery(
    manifest: BoundedManifest, name: str, segments: Mapping[MarkedSegment, int]
) -> str:
    """Return the note on a version that was delivered again in these segments, by their numbers of
    records; "" if it is unchanged.

    An abandoned and a rejected version are named as such, whatever the records are.
    """
    records = sum(segments.values())
    again = f"version {name!r} was delivered again: its {records:,} record(s) are dropped"
    if name in manifest.given_up:
        return (
            f"{again}, because it was abandoned. To publish them, deliver them under a new version"
            " name"
        )
    earlier = manifest.newest_deliveries.get(name)
    delivered = {} if earlier is None else earlier.markers
    if earlier is not None and earlier.version in manifest.rejected:
        drop = f"adjunct dataset remove-version {manifest.name} {earlier.version} --reason …"
        way = f"To have them validated, deliver them under a new name, or again after {drop}"
        return f"{again}, because the rejected one holds the name. {way}"
    if all(_has_equal_checksum(segment, delivered) for segment in segments):
        return ""
    why = _describe_difference(segments, delivered)
    return f"{again}, and {why}. To publish them, deliver them under a new version name"


def _has_equal_checksum(segment: MarkedSegment, delivered: Mapping[str, MarkerFacts]) -> bool:
    """Whether a re-delivered segment has the checksum that it had before; False if one is unknown.

    `delivered` are the facts of the markers delivered before, by partition.
    """
    before = delivered.get(str(segment.ssp))
    if before is None or not before.checksum:
        return False
    return before.checksum == segment.marker.checksum


def _describe_difference(
    segments: Mapping[MarkedSegment, int], delivered: Mapping[str, MarkerFacts]
) -> str:
    """Return how a re-delivery differs from the first delivery, as far as it is known: in the
    number of records of a partition. `delivered` are the facts of the markers delivered before.
    """
    why = (
        "it is unknown whether they equal the first delivery (the markers have no equal checksums)"
    )
    for segment, count in segments.items():
        before = delivered.get(str(segment.ssp))
        if before is not None and before.rows not in (None, count):
            why = (
                f"they differ from the first delivery: {segment.ssp} had {before.rows:,} and has"
                f" {count:,} now"
            )
    return why


class InputPosition(NamedTuple):
    """How far a dataset has come in its stream.

    `offsets` are the next ones to read. `settled` versions have the facts of their markers, with
    which re-deliveries are compared; abandoned, rejected and old ones have none. `reusable` are the
    names of lost, revoked, and rejected-then-dropped versions: a delivery under one of them is a
    new version.
    """

    offsets: dict[SystemStreamPartition, int]
    settled: Settled
    reusable: frozenset[str]


def position_from_manifest(manifest: BoundedManifest) -> InputPosition:
    """Return how far the dataset of this manifest has come in its stream."""
    parse = SystemStreamPartition.parse
    offsets = {parse(text): int(offset) for text, offset in manifest.offsets.items()}
    rejected = manifest.rejected
    given_up = manifest.given_up
    settled: dict[str, Mapping[SystemStreamPartition, MarkerFacts]]
    settled = {name: {} for name in (*manifest.known, *given_up)}
    for done in manifest.delivered:
        if done.freed is None and done.name not in given_up:
            markers = {} if done.version in rejected else done.markers
            settled[done.name] = {parse(ssp): facts for ssp, facts in markers.items()}
    reusable = manifest.freed.union(*(lost.versions for lost in manifest.lost))
    return InputPosition(dict(sorted(offsets.items())), settled, frozenset(reusable))


def find_truncated_partitions(
    offsets: IntOffsets, oldest: IntOffsets
) -> list[SystemStreamPartition]:
    """Return the partitions of which retention has removed unread records, those at `offsets`."""
    return [ssp for ssp in sorted(offsets) if offsets[ssp] < oldest[ssp]]


@dataclass(frozen=True, slots=True)
class _RemainingMarkers:
    """The markers that retention has left in one partition: those from `start` on, in order.

    `is_cut` says whether unread records before `start` were removed. `upcoming` has, of these
    markers, the first one of each unsettled version.
    """

    ssp: SystemStreamPartition
    start: int
    is_cut: bool
    markers: tuple[Marker, ...]
    upcoming: tuple[Marker, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        """The unsettled versions that are marked here, in order."""
        return tuple(marker.version for marker in self.upcoming)

    def first_of(self, versions: Collection[str]) -> Marker | None:
        """Return the first marker of one of these versions, None if there is none."""
        for marker in self.upcoming:
            if marker.version in versions:
                return marker
        return None

    def may_lack_start(self, marker: Marker) -> bool:
        """Whether removed records may have belonged to the version that ends with this marker: they
        may if no other marker is left before it.
        """
        return self.is_cut and self.markers[0] is marker

    def has_all_records(self, marker: Marker, count: Callable[[MarkedSegment], int]) -> bool:
        """Whether all records that this marker, the first one that is left, states are still there;
        False if it states no number. `count` returns the number of records in a segment.
        """
        segment = MarkedSegment(self.ssp, self.start, int(marker.offset), marker)
        return marker.rows is not None and marker.rows == count(segment)

    def position_before(self, marker: Marker) -> int:
        """Return the offset after the last marker before this one; without one, `start`."""
        index = self.markers.index(marker)
        if index == 0:
            return self.start
        return int(self.markers[index - 1].offset) + 1


class _EndMarker(NamedTuple):
    """The marker that ends a version in one partition, and that partition."""

    partition: _RemainingMarkers
    marker: Marker


class Resumption(NamedTuple):
    """The offsets where a dataset resumes, and the names of the versions that it lost."""

    offsets: dict[SystemStreamPartition, int]
    lost: tuple[str, ...]


def resume_after_truncation(
    dataset: str,
    offsets: IntOffsets,
    oldest: IntOffsets,
    markers: Sequence[Marker],
    settled: Settled,
    count: Callable[[MarkedSegment], int],
) -> Resumption | IncompleteVersion:
    """Return where a dataset resumes, and the versions that it lost.

    If retention has removed no unread records, these are its own offsets, and no version is lost.
    Otherwise the lost versions are unknown (IncompleteVersion) until all partitions have the marker
    of one next version.

    `count` returns the number of records that a segment still has. Markers of settled versions end
    re-deliveries, as usual. Raises MarkerConflictError if the orders of partitions contradict each
    other.
    """
    truncated = find_truncated_partitions(offsets, oldest)
    if not truncated:
        return Resumption(dict(offsets), ())
    remaining: list[_RemainingMarkers] = []
    for ssp, offset in sorted(offsets.items()):
        start = max(offset, oldest[ssp])
        markers_left = _markers_from(markers, ssp, start)
        upcoming = _first_unsettled(markers_left, settled)
        remaining.append(_RemainingMarkers(ssp, start, ssp in truncated, markers_left, upcoming))
    spans = declared_partition_counts(markers)
    common = _find_common_versions(remaining, spans)
    if not common:
        return _await_common_version(remaining)
    next_versions: dict[SystemStreamPartition, str] = {}
    for each in remaining:
        first = each.first_of(common)
        if first is not None:
            next_versions[each.ssp] = first.version
    version = resolve_next_version(dataset, next_versions, spans)
    assert version is not None, "there is a common version"
    ends = _find_ends(remaining, version, spans)
    lost = _lost_before(dataset, version, [end.partition for end in ends], spans)
    positions = {each.ssp: each.start for each in remaining}
    if _may_lack_records(ends, count):
        # This version is lost, too: resume after it.
        for partition, marker in ends:
            positions[partition.ssp] = int(marker.offset) + 1
        return Resumption(positions, (*lost, version))
    for partition, marker in ends:
        positions[partition.ssp] = partition.position_before(marker)
    return Resumption(positions, lost)


def _find_common_versions(
    remaining: Sequence[_RemainingMarkers], spans: Mapping[str, int]
) -> set[str]:
    """Return the versions that are marked in all partitions that they span."""
    common: set[str] = set().union(*(each.versions for each in remaining))
    for each in remaining:
        for version in common.difference(each.versions):
            if has_partition(each.ssp, version, spans):
                common.remove(version)
    return common


def _await_common_version(remaining: Sequence[_RemainingMarkers]) -> IncompleteVersion:
    """Return what is awaited if no version is marked in all partitions: any marker in those that
    have none; else the version with which the truncated partitions begin, if it is one.
    """
    without_marker: list[SystemStreamPartition] = []
    ahead: set[str] = set()
    for each in remaining:
        if not each.upcoming:
            without_marker.append(each.ssp)
        elif each.is_cut:
            ahead.add(each.versions[0])
    if without_marker:
        return IncompleteVersion(None, tuple(without_marker))
    # A truncated partition is ahead: the others have yet to deliver the version that it has.
    version = None
    if len(ahead) == 1:
        version = ahead.pop()
    lacking = tuple(each.ssp for each in remaining if version not in each.versions)
    return IncompleteVersion(version, lacking)


def _find_ends(
    remaining: Sequence[_RemainingMarkers], version: str, spans: Mapping[str, int]
) -> list[_EndMarker]:
    """Return the first marker of a version in each partition that it spans."""
    ends = []
    for each in remaining:
        marker = each.first_of([version])
        if marker is not None and has_partition(each.ssp, version, spans):
            ends.append(_EndMarker(each, marker))
    return ends


def _may_lack_records(ends: Sequence[_EndMarker], count: Callable[[MarkedSegment], int]) -> bool:
    """Whether retention may have removed records of the version that these markers end.

    If the markers have no records before them, they may repeat those of a removed version. `count`
    returns the number of records in a segment.
    """
    without_records = is_bare(end.marker for end in ends)
    for partition, marker in ends:
        if not partition.may_lack_start(marker):
            continue
        if without_records or not partition.has_all_records(marker, count):
            return True
    return False


def _lost_before(
    dataset: str, version: str, partitions: Sequence[_RemainingMarkers], spans: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the versions that are marked before this one, which are lost.

    Raises MarkerConflictError if partitions mark different ones; truncated partitions may lack the
    earliest.
    """
    before = {each.ssp: each.versions[: each.versions.index(version)] for each in partitions}
    longest = max(before.values(), key=len)
    for each in partitions:
        marked = before[each.ssp]
        expected = tuple(name for name in longest if has_partition(each.ssp, name, spans))
        if each.is_cut:  # only its newest markers are left
            expected = expected[len(expected) - len(marked) :]
        if marked != expected:
            orders = "; ".join(
                f"{ssp}: {', '.join(earlier) or 'none'}" for ssp, earlier in before.items()
            )
            raise MarkerConflictError(
                f"dataset {dataset!r}: retention has removed unread records, and before version"
                f" {version!r} partitions mark different versions ({orders}); expected the same"
                " versions in the same order.",
                "Abandon the version whose marker never arrived in some partition: "
                f"abandon_version(lake, {dataset!r}, VERSION, reason=…, by=…).",
                dataset=dataset,
                version=version,
            )
    return longest


def _first_unsettled(markers: Sequence[Marker], settled: Settled) -> tuple[Marker, ...]:
    """Return the first marker of each unsettled version, in order."""
    first: dict[str, Marker] = {}
    for marker in markers:
        if marker.version not in settled:
            first.setdefault(marker.version, marker)
    return tuple(first.values())

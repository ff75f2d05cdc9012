"""Deliveries: the versions that streams, files and queries deliver, and which version on a stream
is complete.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.sources import entries
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    DatasetManifest,
    Lost,
    MarkerFacts,
    as_bounded,
)
from dagster_adjunct.assets.versions.version import DatasetDeclaration, check_declaration
from dagster_adjunct.resources.errors import EmptyVersionError, MarkerConflictError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import Marker, SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a source answers: a delivery, or what it awaits.

    `offsets` are those that the manifest has after this answer ({} for files and queries): after
    the delivery, dropped re-deliveries and what retention removed (`lost`). `redelivered` is the
    number of records dropped, `left_out` that of dropped versions which are no partitions;
    `outside` names those that have arrived. `notes` describe what was left out and possible
    problems of the source, and `stream` is the identity of the stream. `copies` are, by version
    name, the new marker facts of earlier deliveries whose files were copied or completed again
    unchanged.
    """

    offsets: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    redelivered: int = field(default=0, kw_only=True)
    left_out: int = field(default=0, kw_only=True)
    outside: tuple[str, ...] = field(default=(), kw_only=True)
    lost: Lost | None = field(default=None, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    copies: Mapping[str, Mapping[str, MarkerFacts]] = field(default_factory=dict, kw_only=True)
    stream: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Delivery(_Answer):
    """A completely delivered version: its name and the location of its records.

    `ranges` are the offsets [start, end) of its records by stream partition, {} for files and
    queries. `markers` are its marker facts, by stream partition or by completion object. `content`
    is private to the source. `identity` identifies the files, so that a finished build of them can
    be reused after a crash; "" if there is no such identity. `valid_from` are the times stated by
    its markers: one, none, or by mistake several.
    """

    version: str
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict)
    content: Any = None
    identity: str = ""
    valid_from: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class Awaiting(_Answer):
    """No version is complete. `version` is the one that has begun, if any; `missing` names its
    missing markers.

    `idle` means that nothing new has arrived. `since` is the time since when the version is
    awaited, None until the advance records it. `files` says in words what is missing where versions
    are files.
    """

    version: str | None
    missing: tuple[str, ...]
    idle: bool = False
    since: datetime | None = None
    files: str = ""

    @property
    def described(self) -> str:
        """What is missing, in words."""
        return self.files or f"the end-of-dataset markers of {', '.join(self.missing)}"


class VersionSource(ABC):
    """A source of versions of one dataset. It looks for versions once; each `next` decides from
    what it found then.

    `schema` are the columns of the entries, after extractor and `columns`. `ordered_by` are the
    columns that order the records of one key; the last record is kept. `copartitioned` says that
    partition i of the records that `read` returns is exactly bucket i, so that no exchange is
    needed. A source raises DatasetError, naming the dataset, if the dataset can't be made from it:
    no schema, or no key columns. The methods here are those of sources without a stream: files and
    queries, which have no partitions and no offsets.
    """

    copartitioned = False
    # Whether offsets alone order the records of a key, which have to be in one of several
    # partitions then.
    ordered_by_offset = False

    def __init__(
        self,
        spec: AdjunctDataset,
        schema: Schema,
        declaration: DatasetDeclaration,
        ordered_by: tuple[str, ...],
    ) -> None:
        self.spec, self.schema, self.declaration, self.ordered_by = (
            spec,
            schema,
            declaration,
            ordered_by,
        )

    def first_manifest(self) -> BoundedManifest:
        """Return the initial manifest of a dataset without a commit."""
        return BoundedManifest(name=self.spec.name, declaration=self.declaration, offsets={})

    def outside(self, names: Iterable[str]) -> set[str]:
        """Return those of these version names that are no partitions of the dataset; none if it
        has no partitions.
        """
        versions = self.spec.versions
        return set() if versions is None else {name for name in names if not versions.has(name)}

    def describe_outside(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return a note for each of these names of delivered versions that are no partitions."""
        versions = self.spec.versions
        return () if versions is None else tuple(map(versions.describe_outside, names))

    def follow_repartition(self, stored: DatasetManifest) -> DatasetManifest | None:
        """Return the manifest at its position in the repartitioned input.

        None if the input was not repartitioned, or if the dataset had unread records then.
        """
        return None

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        """Return a stored manifest with the declared order and policies, to continue from.

        Raises DatasetError for an incompatible declaration, and OffsetOutOfRangeError for a
        recreated stream.
        """
        check_declaration(stored.name, stored.declaration, self.declaration)
        return as_bounded(stored).with_declared_policies(self.declaration)

    @abstractmethod
    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the next complete version that the manifest has not settled. Raises
        MarkerConflictError.
        """

    @abstractmethod
    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return the delivery's number of records, None if it is unknown before they are read.

        Raises MarkerConflictError if the records differ from what the markers state.
        """

    def empty_error(self, delivery: Delivery) -> EmptyVersionError | None:
        """Return the error for a delivery without records; None if that is meant, as the markers
        of a stream say.
        """
        return None

    def read(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> DataFrame | pa.Table:
        """Return the delivery's entries: `schema`, META and `ordered_by`, with exactly these types.

        They are a Spark frame, or an Arrow table if `spark` is IN_PROCESS.
        """
        if spark is IN_PROCESS:
            entries.raise_if_spark_needed(self.spec, self.list_spark_needs())
            return entries.entries_from_arrow(
                self.spec, self.records_in_arrow(delivery), self.schema
            )
        return entries.entries_from_frame(
            self.spec, self.records_in_spark(delivery, spark()), self.schema
        )

    @abstractmethod
    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        """Return the delivery's records with the columns of META."""

    @abstractmethod
    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        """Return what `records_in_spark` returns, in Arrow."""

    def list_spark_needs(self) -> list[str]:
        """Return, in words, why the entries can't be made without Spark; empty if they can."""
        return entries.list_extractor_spark_needs(self.spec)

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Return where the record with this `__partition` and `__offset` is, for errors; "" if
        it has no location.
        """
        return ""


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
    """A version delivered by its partitions: its records, and the re-deliveries to drop before
    them.

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
        return Delivery(
            self.version,
            ranges={str(cut.ssp): (str(cut.start), str(cut.end)) for cut in self.segments},
            markers={
                str(cut.ssp): MarkerFacts(
                    offset=cut.end,
                    rows=records[cut.ssp] if cut.marker.rows is None else cut.marker.rows,
                    checksum=cut.marker.checksum,
                    valid_from=cut.marker.valid_from,
                )
                for cut in self.segments
            },
            content=self,
            valid_from=tuple(
                sorted({cut.marker.valid_from for cut in self.segments if cut.marker.valid_from})
            ),
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
    by_partition: dict[SystemStreamPartition, list[Marker]] = {ssp: [] for ssp in sorted(offsets)}
    for marker in sorted(markers, key=lambda candidate: int(candidate.offset)):
        if marker.ssp in by_partition and int(marker.offset) >= offsets[marker.ssp]:
            by_partition[marker.ssp].append(marker)
    next_segments: dict[SystemStreamPartition, MarkedSegment] = {}
    dropped: list[MarkedSegment] = []
    position = dict(offsets)
    for ssp, delivered in by_partition.items():
        for marker in delivered:
            if marker.version not in settled:
                next_segments[ssp] = MarkedSegment(ssp, position[ssp], int(marker.offset), marker)
                break
            _check_repeated(dataset, marker, settled[marker.version].get(ssp))
            segment = MarkedSegment(ssp, position[ssp], int(marker.offset), marker)
            dropped.append(segment)
            position[ssp] = segment.next
    marked = {ssp: segment.marker.version for ssp, segment in next_segments.items()}
    version = resolve_next_version(dataset, marked, spans)
    wanted = [ssp for ssp in by_partition if has_partition(ssp, version, spans)]
    next_segments = {ssp: next_segments[ssp] for ssp in wanted if ssp in next_segments}
    after = {**position, **{ssp: segment.next for ssp, segment in next_segments.items()}}
    repeated = bool(next_segments) and all(
        segment.marker.version in reusable for segment in next_segments.values()
    )
    if (
        repeated
        and len(next_segments) == len(wanted)
        and is_bare(cut.marker for cut in next_segments.values())
    ):
        behind = find_next_delivery(dataset, after, markers, settled, reusable)
        return replace(behind, dropped=(*dropped, *behind.dropped))
    for ssp, segment in next_segments.items():
        for marker in by_partition[ssp]:
            if marker.version == segment.marker.version:
                _check_repeated(dataset, marker, segment.marker)
    missing = tuple(ssp for ssp in wanted if ssp not in next_segments)
    if version is None or missing:
        return IncompleteVersion(version, missing, tuple(dropped), position)
    return CompleteVersion(
        version, tuple(next_segments[ssp] for ssp in wanted), tuple(dropped), after
    )


def is_bare(markers: Iterable[Marker]) -> bool:
    """Whether no records precede these markers, by the stream's own count: their producer states
    none.
    """
    return all(marker.counted and marker.rows == 0 for marker in markers)


def check_repeats(
    dataset: str,
    complete: CompleteVersion,
    markers: Sequence[Marker],
    records: Mapping[SystemStreamPartition, int],
) -> None:
    """Raise MarkerConflictError if a repeated marker states another count than the records before
    the first one.

    This covers first markers that state no count; `find_next_delivery` checks the others.
    """
    for segment in complete.segments:
        if segment.marker.rows is not None:
            continue
        counted = replace(segment.marker, rows=records[segment.ssp], valid_from=None)
        for marker in markers:
            again = marker.ssp == segment.ssp and marker.version == complete.version
            if again and int(marker.offset) > segment.end:
                _check_repeated(dataset, marker, counted)


def check_counts(
    dataset: str, complete: CompleteVersion, records: Mapping[SystemStreamPartition, int]
) -> None:
    """Raise MarkerConflictError if a partition does not have the number of records that its
    marker states.
    """
    for segment in complete.segments:
        expected, got = segment.marker.rows, records[segment.ssp]
        if expected not in (None, got):
            problem = (
                f"dataset {dataset!r}, version {complete.version!r}: the marker at offset"
                f" {segment.marker.offset} of {segment.ssp} expects {expected} records, the"
                f" partition holds {got} before it."
            )
            raise contradiction_error(
                problem, dataset, complete.version, f"{expected} records", f"{got} records"
            )


def _check_repeated(dataset: str, marker: Marker, before: MarkerFacts | Marker | None) -> None:
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
            problem = (
                f"dataset {dataset!r}: version {marker.version!r} is marked again at offset"
                f" {marker.offset} of {marker.ssp} with {what} {now}; it was first delivered there"
                f" with {first}."
            )
            raise contradiction_error(
                problem, dataset, marker.version, f"{what} {first}", f"{what} {now}"
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
    """Return the dataset's next version, given the next marked version of each partition; None if
    none has one.

    Partitions that the version does not span may mark another one. Raises MarkerConflictError if
    partitions disagree.
    """
    names: dict[str, list[SystemStreamPartition]] = {}
    for ssp, version in versions.items():
        names.setdefault(version, []).append(ssp)
    for version in names:
        if all(
            other == version or not has_partition(ssp, version, spans)
            for ssp, other in versions.items()
        ):
            return version
    if names:
        by_version = "; ".join(
            f"{', '.join(map(str, ssps[:3]))}{' …' if len(ssps) > 3 else ''}: {version!r}"
            for version, ssps in sorted(names.items())
        )
        raise MarkerConflictError(
            f"dataset {dataset!r}: partitions mark different versions as the next one"
            f" ({by_version}); expected the same versions in the same order in every partition.",
            "If the marker of one version will never arrive, for example in a partition added"
            f" later, abandon that version: abandon_version(lake, {dataset!r}, VERSION, reason=…,"
            " by=…).",
            dataset=dataset,
        )
    return None


def contradiction_error(
    problem: str, dataset: str, version: str, expected: str, found: str, step: str = ""
) -> MarkerConflictError:
    """Return the error for a delivery that is not what its markers state."""
    step = step or (
        "Nothing was published and what is current stays. Deliver the right content under a new"
        f" version name, and abandon this one: abandon_version(lake, {dataset!r}, {version!r},"
        " reason=…, by=…)."
    )
    return MarkerConflictError(
        problem, step, dataset=dataset, version=version, expected=expected, found=found
    )


def describe_redeliveries(
    manifest: BoundedManifest, dropped: Mapping[MarkedSegment, int]
) -> tuple[str, ...]:
    """Return a note for each version whose dropped records may differ from the published ones.

    `dropped` is the number of records of each dropped segment. Only equal checksums in all markers
    prove that records are equal.
    """
    again: dict[str, dict[MarkedSegment, int]] = {}
    for segment, count in dropped.items():
        if count:
            again.setdefault(segment.marker.version, {})[segment] = count
    return tuple(
        note
        for name, segments in again.items()
        if (note := _describe_redelivery(manifest, name, segments))
    )


def _describe_redelivery(
    manifest: BoundedManifest, name: str, segments: Mapping[MarkedSegment, int]
) -> str:
    done = next(
        (delivered for delivered in reversed(manifest.delivered) if delivered.name == name), None
    )
    ref = manifest.ref(done.version) if done else None
    again = (
        f"version {name!r} was delivered again: its {sum(segments.values()):,} record(s) are"
        " dropped"
    )
    if any(abandoned.name == name for abandoned in manifest.abandoned):
        return (
            f"{again}, because it was abandoned. To publish them, deliver them under a new version"
            " name"
        )
    if ref is not None and ref.state == "rejected":
        drop = f"adjunct dataset remove-version {manifest.name} {ref.id} --reason …"
        way = f"To have them validated, deliver them under a new name, or again after {drop}"
        return f"{again}, because the rejected one holds the name. {way}"
    taken = done.markers if done else {}
    pairs = [(segment, taken.get(str(segment.ssp))) for segment in segments]
    if all(
        before and before.checksum and before.checksum == segment.marker.checksum
        for segment, before in pairs
    ):
        return ""
    why = (
        "it is unknown whether they equal the first delivery (the markers have no equal checksums)"
    )
    for segment, before in pairs:
        count = segments[segment]
        if before is not None and before.rows not in (None, count):
            why = (
                f"they differ from the first delivery: {segment.ssp} had {before.rows:,} and has"
                f" {count:,} now"
            )
    return f"{again}, and {why}. To publish them, deliver them under a new version name"


def settled_from_manifest(
    manifest: BoundedManifest,
) -> tuple[dict[SystemStreamPartition, int], Settled, frozenset[str]]:
    """Return the next offsets of a dataset in its stream, the settled versions, and the names that
    are reusable.

    Settled versions have the facts of their markers, with which re-deliveries are compared;
    abandoned, rejected and old ones have none. The names of lost, revoked, and
    rejected-then-dropped versions are reusable: a delivery under one of them is a new version.
    """
    offsets = {
        SystemStreamPartition.parse(text): int(offset) for text, offset in manifest.offsets.items()
    }
    rejected = {ref.id for ref in manifest.versions if ref.state == "rejected"}
    marked: dict[str, Mapping[SystemStreamPartition, MarkerFacts]] = {
        name: {} for name in manifest.known
    }
    for done in manifest.delivered:
        if done.freed is None:
            markers = {} if done.version in rejected else done.markers
            marked[done.name] = {
                SystemStreamPartition.parse(ssp): facts for ssp, facts in markers.items()
            }
    lost = {name for lost in manifest.lost for name in lost.versions}
    freed = {done.name for done in manifest.delivered if done.freed is not None}
    return (
        dict(sorted(offsets.items())),
        marked | {ended.name: {} for ended in manifest.abandoned},
        frozenset(lost | freed),
    )


Offsets = Mapping[SystemStreamPartition, int]


def find_truncated_partitions(
    offsets: Offsets, oldest: Offsets
) -> dict[SystemStreamPartition, tuple[int, int]]:
    """Return the unread offsets that retention has removed: [first, oldest) by partition."""
    return {
        ssp: (offset, oldest[ssp])
        for ssp, offset in sorted(offsets.items())
        if offset < oldest[ssp]
    }


def resume_after_truncation(
    dataset: str,
    offsets: Offsets,
    oldest: Offsets,
    markers: Sequence[Marker],
    settled: Settled,
    count: Callable[[MarkedSegment], int],
) -> tuple[dict[SystemStreamPartition, int], tuple[str, ...]] | IncompleteVersion:
    """Return the offsets where a dataset resumes, and the names of the versions that it lost.

    If retention has removed no unread records, these are its own offsets, and no version is lost.
    Otherwise the lost versions are unknown (IncompleteVersion) until all partitions have the marker
    of one next version.

    `count` returns the number of records that a segment still has. Markers of settled versions end
    re-deliveries, as usual. Raises MarkerConflictError if the orders of partitions contradict each
    other.
    """
    cut = find_truncated_partitions(offsets, oldest)
    if not cut:
        return dict(offsets), ()
    start = {ssp: max(offset, oldest[ssp]) for ssp, offset in sorted(offsets.items())}
    in_order = sorted(markers, key=lambda marker: int(marker.offset))
    seen = {
        ssp: [mark for mark in in_order if mark.ssp == ssp and int(mark.offset) >= start[ssp]]
        for ssp in start
    }
    fresh = {ssp: _first_unsettled(marked, settled) for ssp, marked in seen.items()}
    names = {ssp: [marker.version for marker in marked] for ssp, marked in fresh.items()}
    spans = declared_partition_counts(markers)
    common = {
        version
        for version in {name for marked in names.values() for name in marked}
        if all(
            version in marked for ssp, marked in names.items() if has_partition(ssp, version, spans)
        )
    }
    silent = tuple(ssp for ssp, marked in names.items() if not marked)
    if silent and not common:
        return IncompleteVersion(None, silent)
    if not common:
        # A truncated partition is ahead: the others have yet to deliver the version that it has.
        ahead = {names[ssp][0] for ssp in cut}
        version = ahead.pop() if len(ahead) == 1 else None
        return IncompleteVersion(
            version, tuple(ssp for ssp, marked in names.items() if version not in marked)
        )
    nexts = {
        ssp: next((marker for marker in fresh[ssp] if marker.version in common), None)
        for ssp in names
    }
    version = resolve_next_version(
        dataset, {ssp: marker.version for ssp, marker in nexts.items() if marker}, spans
    )
    assert version is not None, "there is a common version"
    first = {
        ssp: marker
        for ssp, marker in nexts.items()
        if marker is not None and has_partition(ssp, version, spans)
    }
    lost = _lost_before(dataset, version, {ssp: names[ssp] for ssp in first}, cut, spans)
    cut_in_it = [ssp for ssp in cut if ssp in first]
    partial = is_bare(first.values()) and any(seen[ssp][0] is first[ssp] for ssp in cut_in_it)
    for ssp in cut_in_it:  # the version's start may have been removed
        marker = seen[ssp][0]
        if marker.version == version and not partial:
            segment = MarkedSegment(ssp, oldest[ssp], int(marker.offset), marker)
            partial = marker.rows is None or marker.rows != count(segment)
    if partial:
        return {**start, **{ssp: int(marker.offset) + 1 for ssp, marker in first.items()}}, (
            *lost,
            version,
        )
    for ssp, marker in first.items():  # after the last marker of an earlier version
        earlier = [
            int(other.offset) + 1 for other in seen[ssp] if int(other.offset) < int(marker.offset)
        ]
        start[ssp] = max([start[ssp], *earlier])
    return start, lost


def _lost_before(
    dataset: str,
    version: str,
    names: Mapping[SystemStreamPartition, Sequence[str]],
    cut: Collection[SystemStreamPartition],
    spans: Mapping[str, int],
) -> tuple[str, ...]:
    """Return the versions that are marked before this one, which are lost.

    Raises MarkerConflictError if partitions mark different ones; truncated partitions may lack the
    earliest.
    """
    before = {ssp: tuple(marked[: marked.index(version)]) for ssp, marked in names.items()}
    longest = max(before.values(), key=len)
    for ssp, marked in before.items():
        expected = tuple(name for name in longest if has_partition(ssp, name, spans))
        if marked != (expected[len(expected) - len(marked) :] if ssp in cut else expected):
            orders = "; ".join(
                f"{other}: {', '.join(earlier) or 'none'}" for other, earlier in before.items()
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


def _first_unsettled(markers: Sequence[Marker], settled: Settled) -> list[Marker]:
    """Return the first marker of each unsettled version, in order."""
    first: dict[str, Marker] = {}
    for marker in markers:
        if marker.version not in settled:
            first.setdefault(marker.version, marker)
    return list(first.values())

"""Bounded datasets whose stream retention has cut: what is whole is taken, what is not is named,
nothing is mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.bounded.advance import abandon_version, advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources.markers import (
    CompleteVersion,
    IncompleteVersion,
    MarkedSegment,
    find_next_delivery,
    resume_after_truncation,
)
from dagster_adjunct.resources.errors import MarkerConflictError, OffsetOutOfRangeError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import Marker, StreamSystem, SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.cycle import KEYS, NAME, PLANES, SCHEMA, deliver, served, whole
from tests.clocks import on_clock

P0, P1, P2 = (SystemStreamPartition("lake", "planes", p) for p in range(3))
NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=2)


def marker(
    ssp: SystemStreamPartition, offset: int, version: str, rows: int | None = None
) -> Marker:
    return Marker(ssp, str(offset), version, rows)


def resumed(
    offsets: Mapping[SystemStreamPartition, int],
    oldest: Mapping[SystemStreamPartition, int],
    markers: list[Marker],
    counts: Mapping[SystemStreamPartition, int],
) -> tuple[dict[SystemStreamPartition, int], tuple[str, ...]] | IncompleteVersion:
    """Return where a dataset resumes whose partitions still have these numbers of records up to
    their first marker.
    """
    return resume_after_truncation(
        "planes", offsets, oldest, markers, {}, lambda cut: counts[cut.ssp]
    )


# -- decided from markers alone


def test_a_version_truncated_in_one_partition_is_lost_and_the_next_one_is_taken() -> None:
    markers = [
        marker(P0, 5, "v1", 5),
        marker(P0, 9, "v2", 3),
        marker(P1, 5, "v1", 5),
        marker(P1, 9, "v2", 3),
    ]
    answer = resumed({P0: 0, P1: 0}, {P0: 2, P1: 0}, markers, {P0: 3})
    assert answer == ({P0: 6, P1: 6}, ("v1",))


def test_a_version_whose_markers_count_what_is_left_is_whole() -> None:
    markers = [marker(P0, 9, "v2", 3), marker(P1, 5, "v1", 5), marker(P1, 9, "v2", 3)]
    offsets, oldest = {P0: 0, P1: 0}, {P0: 6, P1: 0}
    asked: list[MarkedSegment] = []
    resume_after_truncation(
        "planes", offsets, oldest, markers, {}, lambda cut: asked.append(cut) or 3
    )
    assert [(cut.ssp, cut.start, cut.end) for cut in asked] == [(P0, 6, 9)]
    assert resumed(offsets, oldest, markers, {P0: 3}) == ({P0: 6, P1: 6}, ("v1",))
    assert resumed(offsets, oldest, markers, {P0: 2}) == ({P0: 10, P1: 10}, ("v1", "v2"))


def test_a_truncated_version_whose_marker_states_no_count_is_never_complete() -> None:
    markers = [marker(P0, 9, "v2"), marker(P0, 12, "v3"), marker(P1, 9, "v2"), marker(P1, 12, "v3")]
    answer = resumed({P0: 0, P1: 0}, {P0: 6, P1: 6}, markers, {})
    assert answer == ({P0: 10, P1: 10}, ("v2",))


def test_what_is_lost_is_not_reported_before_every_partition_says_what_it_has_next() -> None:
    offsets, oldest = {P0: 0, P1: 0}, {P0: 6, P1: 0}
    assert resumed(offsets, oldest, [marker(P1, 5, "v1")], {}) == IncompleteVersion(None, (P0,))
    ahead = [marker(P0, 9, "v2", 3), marker(P1, 5, "v1")]
    assert resumed(offsets, oldest, ahead, {P0: 3}) == IncompleteVersion("v2", (P1,))


def test_a_version_that_comes_again_whole_after_it_was_cut_is_taken() -> None:
    markers = [
        marker(P0, 5, "v1", 5),
        marker(P0, 11, "v1", 5),
        marker(P1, 5, "v1", 5),
        marker(P1, 11, "v1", 5),
    ]
    answer = resumed({P0: 0, P1: 0}, {P0: 2, P1: 2}, markers, {P0: 3, P1: 3})
    assert answer == ({P0: 6, P1: 6}, ("v1",))
    again = find_next_delivery("planes", answer[0], markers, {})
    assert isinstance(again, CompleteVersion)
    assert [(cut.start, cut.end) for cut in again.segments] == [(6, 11), (6, 11)]


def test_a_truncated_and_grown_stream_resumes_with_what_is_complete() -> None:
    counts = {"v1": 2, "v2": 3, "v3": 3}
    places = (
        (P0, 9, "v2"),
        (P0, 12, "v3"),
        (P1, 5, "v1"),
        (P1, 9, "v2"),
        (P1, 12, "v3"),
        (P2, 3, "v2"),
        (P2, 6, "v3"),
    )
    markers = [replace(marker(*place, 3), partitions=counts[place[2]]) for place in places]
    offsets, oldest = {P0: 0, P1: 0, P2: 0}, {P0: 6, P1: 0, P2: 0}
    assert resumed(offsets, oldest, markers, {P0: 3}) == ({P0: 6, P1: 6, P2: 0}, ("v1",))
    answer = resumed(offsets, oldest, markers, {P0: 2})
    assert answer == ({P0: 10, P1: 10, P2: 4}, ("v1", "v2"))
    whole = [m for m in markers if m.version != "v1"] + [
        replace(marker(P0, 7, "v1", 1), partitions=2),
        markers[2],
    ]
    assert resumed(offsets, oldest, whole, {P0: 1}) == ({P0: 6, P1: 0, P2: 0}, ())
    silent = [replace(marker(ssp, 7, "v1", 1), partitions=2) for ssp in (P0, P1)]
    assert resumed(offsets, oldest, silent, {P0: 1}) == ({P0: 6, P1: 0, P2: 0}, ())


def test_partitions_that_disagree_on_what_was_lost_are_refused_and_named() -> None:
    markers = [
        *(marker(P0, at, version) for at, version in ((2, "v1"), (4, "vX"), (6, "v2"))),
        *(marker(P1, at, version) for at, version in ((2, "v1"), (6, "v2"))),
        *(marker(P2, at, version, 1) for at, version in ((6, "v2"), (8, "v3"))),
    ]
    with pytest.raises(
        MarkerConflictError,
        match=r"before version 'v2'.*lake\.planes\.0: v1, vX; lake\.planes\.1: v1;",
    ):
        resumed({P0: 0, P1: 0, P2: 0}, {P0: 0, P1: 0, P2: 5}, markers, {P2: 1})


@dataclass(frozen=True)
class History:
    """What producers sent, by partition: records of each version (the last ones without marker),
    and the cut.
    """

    rows: tuple[tuple[int, ...], ...]
    reported: tuple[bool, ...]
    read: int
    cut: tuple[float, ...]

    def begins(self, partition: int, version: int) -> int:
        return sum(rows + 1 for rows in self.rows[partition][:version])

    def oldest(self, partition: int) -> int:
        return round(self.begins(partition, len(self.rows[partition])) * self.cut[partition])

    def is_whole(self, version: int) -> bool:
        """Every partition has its marker, holds all of it, and has a proof of it: a count or the
        marker before.
        """
        for partition, rows in enumerate(self.rows):
            begins, oldest = self.begins(partition, version), self.oldest(partition)
            if version >= len(rows) or oldest > begins:
                return False
            proof = (
                self.reported[version]
                or oldest < begins
                or oldest <= self.begins(partition, self.read)
            )
            if not proof:
                return False
        return True


histories = st.integers(2, 3).flatmap(
    lambda partitions: st.builds(
        History,
        st.tuples(*[st.lists(st.integers(0, 3), max_size=5).map(tuple) for _ in range(partitions)]),
        st.tuples(*[st.booleans() for _ in range(5)]),
        st.integers(0, 2),
        st.tuples(
            *[st.sampled_from((0.0, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0)) for _ in range(partitions)]
        ),
    )
)


@pytest.mark.lengthy
@given(histories)
@settings(max_examples=200)
def test_exactly_the_whole_versions_are_taken_in_order_wherever_retention_cuts(
    history: History,
) -> None:
    history = replace(history, read=min(history.read, *map(len, history.rows)))
    ssps = [SystemStreamPartition("lake", "planes", p) for p in range(len(history.rows))]
    markers = [
        marker(ssp, history.begins(p, n) + rows, f"v{n}", rows if history.reported[n] else None)
        for p, ssp in enumerate(ssps)
        for n, rows in enumerate(history.rows[p])
        if history.begins(p, n) + rows >= history.oldest(p)
    ]
    offsets = {ssp: history.begins(p, history.read) for p, ssp in enumerate(ssps)}
    oldest = {ssp: history.oldest(p) for p, ssp in enumerate(ssps)}
    settled = {f"v{n}": {} for n in range(history.read)}
    lost: tuple[str, ...] = ()
    taken = []
    if any(offsets[ssp] < oldest[ssp] for ssp in ssps):
        answer = resume_after_truncation(
            "planes", offsets, oldest, markers, settled, lambda cut: cut.end - cut.start
        )
        offsets, lost = ({}, ()) if isinstance(answer, IncompleteVersion) else answer
    while offsets and isinstance(
        complete := find_next_delivery("planes", offsets, markers, settled), CompleteVersion
    ):
        number = int(complete.version[1:])
        assert {cut.ssp: (cut.start, cut.end) for cut in complete.segments} == {
            ssp: (history.begins(p, number), history.begins(p, number) + history.rows[p][number])
            for p, ssp in enumerate(ssps)
        }
        taken.append(number)
        settled[complete.version] = {}
        offsets = complete.offsets
    complete_versions = range(history.read, min(map(len, history.rows)))
    assert taken == [version for version in complete_versions if history.is_whole(version)]
    assert not set(lost) & {f"v{version}" for version in taken}


# -- a real lake stream


class UncountedStreams(LakeStreams):
    """Streams whose markers tell no rows, as those that were written by the first releases."""

    def markers(
        self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None
    ) -> list[Marker]:
        return [replace(one, rows=None) for one in super().markers(stream, since)]

    def snapshot(self, stream: str) -> StreamSystem:
        return self


@dataclass
class Aging(World):
    """A world whose appends are made at `now`, so that retention can take the older ones."""

    now: datetime = LONG_AGO
    counted: bool = True

    @property
    def streams(self) -> LakeStreams:
        kind = LakeStreams if self.counted else UncountedStreams
        return kind(on_clock(self.lake, lambda: self.now))

    def cut(self) -> None:
        """Let retention take what was appended long ago."""
        self.streams.configure(
            NAME, retention=Retention(max_age=timedelta(days=1)), compaction=None
        )
        assert self.streams.maintain(NAME, NOW).dropped_segments


@pytest.fixture
def aging(world: World) -> Aging:
    aged = Aging(world.lake, IN_PROCESS)
    aged.stream(NAME, SCHEMA, ["k"], 2)
    return aged


def begun(world: Aging) -> None:
    """The dataset has v1, and v2 and v3 come while nobody looks."""
    deliver(world, 1)
    assert world.advance(PLANES).action == "sealed"
    deliver(world, 2)
    deliver(world, 3)


def test_a_dataset_goes_on_with_the_first_whole_version_and_says_what_it_has_lost(
    aging: Aging,
) -> None:
    begun(aging)
    read = StoredVersions(aging.lake, NAME).require_manifest().offsets
    gone = aging.streams.upcoming(aging.streams.partitions(NAME))
    aging.now = NOW
    deliver(aging, 4)
    aging.cut()
    report = aging.advance(PLANES)
    assert (report.action, served(aging.lake)) == ("sealed", whole(4))
    for ssp, end in gone.items():
        assert f"offsets {read[str(ssp)]} to {int(end) - 1} of {ssp}" in report.summary()
    (lost,) = StoredVersions(aging.lake, NAME).require_manifest().lost
    assert lost.versions == (), "their markers are gone with them"
    assert lost.ranges == {str(ssp): (read[str(ssp)], end) for ssp, end in gone.items()}
    entry = next(iter(StoredVersions(aging.lake, NAME).history(limit=1)))
    assert entry.action == "seal"
    assert "retention took" in entry.reason
    again = aging.advance(PLANES)
    assert (again.action, again.note) == ("up-to-date", "nothing new was delivered")


def test_versions_that_began_before_the_cut_are_named_and_never_served(aging: Aging) -> None:
    begun(aging)
    aging.send(NAME, [(key, 4) for key in KEYS[:2]])
    aging.now = NOW
    aging.send(NAME, [(key, 4) for key in KEYS[2:]])
    aging.streams.append_markers(NAME, "v4", producer="p", sequence=1)
    aging.cut()
    report = aging.advance(PLANES)
    assert (report.action, report.lost, served(aging.lake)) == ("waiting", ("v4",), whole(1))
    assert "not whole any more, and left out: 'v4'" in report.summary()
    deliver(aging, 4)
    assert aging.advance(PLANES).action == "sealed", "it is delivered again, as a remedy"
    assert served(aging.lake) == whole(4)


def test_a_dataset_of_which_everything_is_gone_waits_for_the_next_version(aging: Aging) -> None:
    begun(aging)
    aging.cut()
    for _ in range(2):
        report = aging.advance(PLANES)
        assert (report.action, served(aging.lake)) == ("up-to-date", whole(1))
        assert "retention took offsets" in report.summary()
    aging.now = NOW
    deliver(aging, 5)
    assert aging.advance(PLANES).action == "sealed"
    assert served(aging.lake) == whole(5)


@pytest.mark.parametrize(
    "counted", [True, False], ids=["counted by the stream", "not counted, as in older streams"]
)
def test_a_new_dataset_does_not_take_a_version_whose_beginning_is_gone(
    aging: Aging, counted: bool
) -> None:
    aging.counted = counted
    aging.send(NAME, [(key, 1) for key in KEYS[:2]])
    aging.now = NOW
    aging.send(NAME, [(key, 1) for key in KEYS[2:]])
    aging.streams.append_markers(NAME, "v1", producer="p", sequence=1)
    aging.cut()
    report = aging.advance(PLANES)
    assert (report.action, report.lost, served(aging.lake)) == ("waiting", ("v1",), None)
    deliver(aging, 2)
    assert aging.advance(PLANES).action == "sealed"
    assert served(aging.lake) == whole(2)


def test_a_new_dataset_begins_with_a_version_that_is_whole_behind_a_cut(aging: Aging) -> None:
    deliver(aging, 1)
    aging.now = NOW
    aging.send(NAME, [("a", 2)])
    aging.streams.append_markers(NAME, "v2", producer="p", sequence=1)
    aging.cut()
    report = aging.advance(PLANES)
    assert (report.action, served(aging.lake), report.lost) == ("sealed", {"a": 2}, ())
    assert "retention" not in report.summary(), "before it began, nothing was its own to lose"


def test_a_marker_alone_that_comes_again_contradicts_nothing(aging: Aging) -> None:
    aging.send(NAME, [(key, 1) for key in KEYS])
    for sequence in (1, 2):
        aging.streams.append_markers(NAME, "v1", producer="p", sequence=sequence)
    assert aging.advance(PLANES).action == "sealed"
    aging.streams.append_markers(NAME, "v1", producer="p", sequence=3)
    report = aging.advance(PLANES)
    assert (report.action, report.note) == ("up-to-date", "nothing new was delivered")
    aging.send(NAME, [("a", 2)])
    aging.streams.append_markers(NAME, "v1", producer="p", sequence=4)
    assert "they differ from the first delivery: lake.planes." in aging.advance(PLANES).summary()


@pytest.mark.parametrize("repeated", ["before the cut", "behind it", "twice behind it"])
def test_a_marker_that_comes_again_alone_is_no_version_without_records(
    aging: Aging, repeated: str
) -> None:
    aging.send(NAME, [(key, 1) for key in KEYS])
    if repeated != "twice behind it":
        aging.streams.append_markers(NAME, "v1", producer="p", sequence=1)
    aging.now = LONG_AGO if repeated == "before the cut" else NOW
    aging.streams.append_markers(NAME, "v1", producer="p", sequence=2)
    aging.now = NOW
    aging.streams.append_markers(NAME, "v1", producer="p", sequence=3)
    aging.cut()
    report = aging.advance(PLANES)
    assert (report.action, report.sealed, served(aging.lake)) == ("waiting", (), None)
    deliver(aging, 1)
    assert aging.advance(PLANES).action == "sealed"
    assert served(aging.lake) == whole(1)


# -- streams made anew, and deliveries that come again


@pytest.mark.parametrize("versions", [1, 3], ids=["as long as the first", "longer than the first"])
def test_a_stream_recreated_is_refused_however_long_it_is(aging: Aging, versions: int) -> None:
    deliver(aging, 1)
    aging.advance(PLANES)
    aging.lake.store.delete_many([item.key for item in aging.lake.store.list(f"streams/{NAME}/")])
    aging.stream(NAME, SCHEMA, ["k"], 2)
    for number in range(1, versions + 1):
        aging.send(NAME, [(key, -number) for key in KEYS], version=f"v{number}")
    with pytest.raises(OffsetOutOfRangeError) as caught:
        aging.advance(PLANES)
    assert (caught.value.dataset, caught.value.stream) == ("planes", "lake.planes")
    assert served(aging.lake) == whole(1)


def test_a_stream_recreated_with_other_partitions_is_refused_as_another_stream(
    aging: Aging,
) -> None:
    deliver(aging, 1)
    aging.advance(PLANES)
    aging.lake.store.delete_many([item.key for item in aging.lake.store.list(f"streams/{NAME}/")])
    aging.stream(NAME, SCHEMA, ["k"], 3)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"was read from another stream .*adjunct dataset delete planes"
    ):
        aging.advance(PLANES)
    assert served(aging.lake) == whole(1)


def test_a_redelivery_of_equal_size_is_reported_with_the_way_to_publish_it(aging: Aging) -> None:
    deliver(aging, 1)
    aging.advance(PLANES)
    aging.send(NAME, [(key, 99) for key in KEYS], version="v1")
    report = aging.advance(PLANES)
    assert (report.action, report.counters, served(aging.lake)) == (
        "up-to-date",
        {"redelivered": 4},
        whole(1),
    )
    reported = (
        "v1' was delivered again: its 4 record(s) are dropped, and it is unknown whether they equal"
        " the first delivery"
    )
    assert reported in report.summary()
    assert "new version name" in report.summary()
    assert next(iter(StoredVersions(aging.lake, NAME).history(limit=1))).reason == "; ".join(
        report.warnings
    )
    aging.send(NAME, [(key, 98) for key in KEYS], version="v1")
    deliver(aging, 2)
    report = aging.advance(PLANES)
    assert (report.action, served(aging.lake)) == ("sealed", whole(2))
    assert reported in report.summary(), "also where a new version comes behind it"


def test_a_delivery_with_equal_checksums_in_all_markers_is_known_to_be_equal(aging: Aging) -> None:
    def send(sequence: int, checksum: str) -> None:
        aging.send(NAME, [(key, 1) for key in KEYS])
        aging.streams.append_markers(NAME, "v1", producer="p", sequence=sequence, checksum=checksum)

    send(1, "sha256:abc")
    aging.advance(PLANES)
    send(2, "sha256:abc")
    report = aging.advance(PLANES)
    assert (report.counters, report.note) == ({"redelivered": 4}, "nothing new was delivered")
    send(3, "sha256:def")
    with pytest.raises(MarkerConflictError) as failure:
        aging.advance(PLANES)
    assert failure.value.found == "checksum sha256:def"


def test_a_correction_under_a_rejected_name_is_reported_with_its_holder(aging: Aging) -> None:
    aging.mark(NAME, "v1", [0, 1], rows={0: 7, 1: 7})
    rejected = aging.advance(PLANES).rejected
    deliver(aging, 1)
    report = aging.advance(PLANES)
    assert "the rejected one holds the name. To have them validated" in report.summary()
    assert f"adjunct dataset remove-version planes {rejected[0]} --reason" in report.summary()
    abandon_version(aging.lake, NAME, "v1", reason="wrong", by="me")
    deliver(aging, 1)
    assert "because it was abandoned" in aging.advance(PLANES).summary()


def test_a_version_set_goes_on_when_what_one_member_lost_is_abandoned(aging: Aging) -> None:
    aging.stream("crews", SCHEMA, ["k"], 2)
    planes = bounded_dataset(NAME, input=f"lake.{NAME}", key="k", partitions=2)
    members = version_set(
        "fleet", planes, bounded_dataset("crews", input="lake.crews", key="k", partitions=2)
    )

    def send(number: int) -> None:
        for name in (NAME, "crews"):
            aging.send(name, [(key, number) for key in KEYS], version=f"v{number}")

    def advance() -> list[str]:
        return [
            report.action
            for report in advance_version_set(
                members, lake=aging.lake, systems=aging.systems, spark=IN_PROCESS, by="test"
            )
        ]

    send(1)
    assert advance() == ["sealed", "sealed"]
    send(2)
    aging.now = NOW
    send(3)
    aging.cut()  # of planes alone
    with pytest.raises(MarkerConflictError, match=r"planes: 'v3'; crews: 'v2'"):
        advance()
    abandon_version(aging.lake, "crews", "v2", reason="lost to retention", by="test")
    assert advance() == ["sealed", "sealed"]
    assert (served(aging.lake), served(aging.lake, "crews")) == (whole(3), whole(3))

"""Which version is complete: decided from offsets and markers alone."""

from __future__ import annotations

import datetime as dt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.assets.sources.markers import (
    CompleteVersion,
    IncompleteVersion,
    check_counts,
    find_next_delivery,
)
from dagster_adjunct.assets.versions.manifest import MarkerFacts
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.streams.system import Marker, SystemStreamPartition

P0, P1, P2 = (SystemStreamPartition("lake", "planes", p) for p in (0, 1, 2))
START = {P0: 0, P1: 0}


def marker(
    ssp: SystemStreamPartition, offset: int, version: str, rows: int | None = None
) -> Marker:
    return Marker(ssp, str(offset), version, rows)


def test_a_version_waits_until_every_partition_has_its_marker() -> None:
    delivery = find_next_delivery("planes", START, [marker(P0, 5, "v1")], {})
    assert delivery == IncompleteVersion("v1", (P1,), (), START)


def test_nothing_delivered_waits_for_all_partitions_and_names_no_version() -> None:
    delivery = find_next_delivery("planes", START, [], {})
    assert delivery == IncompleteVersion(None, (P0, P1), (), START)


def test_records_after_a_marker_belong_to_the_next_version() -> None:
    markers = [marker(P1, 2, "v1"), marker(P0, 5, "v1"), marker(P0, 9, "v2")]
    first = find_next_delivery("planes", START, markers, {})
    assert isinstance(first, CompleteVersion)
    assert [(cut.start, cut.end) for cut in first.segments] == [(0, 5), (0, 2)]
    second = find_next_delivery("planes", first.offsets, markers, {"v1": {}})
    assert second == IncompleteVersion("v2", (P1,), (), {P0: 6, P1: 3})


def test_records_between_two_markers_of_one_version_are_dropped() -> None:
    markers = [
        marker(P0, 5, "v1", 5),
        marker(P0, 11, "v1", 5),
        marker(P0, 12, "v2"),
        marker(P1, 0, "v1"),
    ]
    first = find_next_delivery("planes", START, markers, {})
    assert isinstance(first, CompleteVersion)
    assert first.dropped == ()
    settled = {"v1": {P0: MarkerFacts(offset=0, rows=5), P1: MarkerFacts(offset=0)}}
    second = find_next_delivery("planes", first.offsets, markers, settled)
    assert isinstance(second, IncompleteVersion)
    assert [(cut.start, cut.end) for cut in second.dropped] == [(6, 11)]
    assert second.offsets == {P0: 12, P1: 1}


def test_a_marker_that_repeats_a_version_with_other_counts_refuses_it() -> None:
    markers = [marker(P0, 5, "v1", 5), marker(P0, 9, "v1", 3), marker(P1, 0, "v1", 0)]
    with pytest.raises(MarkerConflictError) as failure:
        find_next_delivery("planes", START, markers, {})
    assert (failure.value.version, failure.value.found) == ("v1", "records 3")


def test_a_marker_for_a_sealed_version_with_other_counts_is_refused() -> None:
    settled = {"v1": {P0: MarkerFacts(offset=0, rows=5), P1: MarkerFacts(offset=0, rows=0)}}
    with pytest.raises(MarkerConflictError) as failure:
        find_next_delivery("planes", {P0: 6, P1: 1}, [marker(P0, 10, "v1", 4)], settled)
    assert (failure.value.version, failure.value.expected) == ("v1", "records 5")


def test_a_marker_repeated_with_another_valid_from_time_is_rejected() -> None:
    first, other = dt.datetime(2026, 1, 3, tzinfo=dt.UTC), dt.datetime(2026, 1, 4, tzinfo=dt.UTC)
    elsewhere = first.astimezone(dt.timezone(dt.timedelta(hours=2)))

    def timed(offset: int, time: dt.datetime | None) -> Marker:
        return Marker(P0, str(offset), "v1", 5, valid_from=time)

    with pytest.raises(MarkerConflictError) as refused:
        find_next_delivery(
            "planes", START, [timed(5, first), timed(9, other), marker(P1, 0, "v1", 0)], {}
        )
    assert (refused.value.version, refused.value.expected, refused.value.found) == (
        "v1",
        "valid_from 2026-01-03 00:00:00+00:00",
        "valid_from 2026-01-04 00:00:00+00:00",
    )
    assert "under a new version name" in refused.value.next_step
    settled = {
        "v1": {
            P0: MarkerFacts(offset=0, rows=5, valid_from=first),
            P1: MarkerFacts(offset=0, rows=0),
        }
    }
    after = {P0: 6, P1: 1}
    with pytest.raises(MarkerConflictError) as caught:
        find_next_delivery("planes", after, [timed(9, other)], settled)
    assert (caught.value.version, caught.value.expected, caught.value.found) == (
        "v1",
        "valid_from 2026-01-03 00:00:00+00:00",
        "valid_from 2026-01-04 00:00:00+00:00",
    )
    for same in (first, elsewhere, None):
        delivery = find_next_delivery("planes", after, [timed(9, same)], settled)
        assert isinstance(delivery, IncompleteVersion)
        assert delivery.offsets == {P0: 10, P1: 1}


def test_an_abandoned_version_is_dropped_whatever_its_markers_say() -> None:
    markers = [
        marker(P0, 5, "v1", 5),
        marker(P0, 6, "v1", 99),
        marker(P0, 8, "v2"),
        marker(P1, 3, "v2"),
    ]
    delivery = find_next_delivery("planes", START, markers, {"v1": {}})
    assert isinstance(delivery, CompleteVersion)
    assert delivery.version == "v2"
    assert [(cut.start, cut.end) for cut in delivery.segments] == [(7, 8), (0, 3)]


def test_partitions_that_mark_different_versions_next_are_refused_and_named() -> None:
    with pytest.raises(MarkerConflictError, match=r"lake.planes.0: 'v1'; lake.planes.1: 'v2'"):
        find_next_delivery("planes", START, [marker(P0, 5, "v1"), marker(P1, 5, "v2")], {})


def test_a_marker_that_expects_other_counts_than_were_delivered_is_refused() -> None:
    delivery = find_next_delivery(
        "planes", START, [marker(P0, 5, "v1", 6), marker(P1, 2, "v1", 2)], {}
    )
    assert isinstance(delivery, CompleteVersion)
    with pytest.raises(MarkerConflictError) as failure:
        check_counts("planes", delivery, {P0: 5, P1: 2})
    assert (failure.value.expected, failure.value.found) == ("6 records", "5 records")


def grown(ssp: SystemStreamPartition, offset: int, version: str, partitions: int | None) -> Marker:
    return Marker(ssp, str(offset), version, partitions=partitions)


def test_a_version_is_of_the_partitions_that_its_markers_count() -> None:
    start = {P0: 0, P1: 0, P2: 0}
    ones = [grown(P0, 5, "v1", 2), grown(P1, 3, "v1", 2)]
    twos = [grown(P0, 9, "v2", 3), grown(P1, 7, "v2", 3), grown(P2, 4, "v2", 3)]
    assert find_next_delivery("planes", start, ones[:1], {}) == IncompleteVersion(
        "v1", (P1,), (), start
    )
    assert find_next_delivery("planes", start, [ones[0], twos[2]], {}) == IncompleteVersion(
        "v1", (P1,), (), start
    )
    for markers in (ones, ones + twos):
        first = find_next_delivery("planes", start, markers, {})
        assert isinstance(first, CompleteVersion)
        assert (first.version, first.offsets) == ("v1", {P0: 6, P1: 4, P2: 0})
    second = find_next_delivery("planes", first.offsets, ones + twos, {"v1": {}})
    assert isinstance(second, CompleteVersion)
    assert [(cut.start, cut.end) for cut in second.segments] == [(6, 9), (4, 7), (0, 4)]


def test_markers_that_count_no_partitions_are_waited_for_in_all() -> None:
    start = {P0: 0, P1: 0, P2: 0}
    ones = [grown(P0, 5, "v1", None), grown(P1, 3, "v1", None)]
    assert find_next_delivery("planes", start, ones, {}) == IncompleteVersion(
        "v1", (P2,), (), start
    )
    twos = [grown(ssp, 9, "v2", None) for ssp in (P0, P1, P2)]
    with pytest.raises(
        MarkerConflictError, match=r"lake.planes.0, lake.planes.1: 'v1'; lake.planes.2: 'v2'"
    ):
        find_next_delivery("planes", start, ones + twos, {})
    second = find_next_delivery("planes", start, ones + twos, {"v1": {}})
    assert isinstance(second, CompleteVersion), "as the advice says: v1 is abandoned"
    assert second.version == "v2"


def test_a_version_spans_as_many_partitions_as_any_of_its_markers_states() -> None:
    start = {P0: 0, P1: 0, P2: 0}
    markers = [grown(P0, 5, "v1", 2), grown(P1, 5, "v1", 3)]
    assert find_next_delivery("planes", start, markers, {}) == IncompleteVersion(
        "v1", (P2,), (), start
    )
    markers = [grown(P0, 5, "v1", 2), grown(P1, 5, "v1", None), grown(P2, 5, "v1", 2)]
    delivery = find_next_delivery("planes", start, markers, {})
    assert isinstance(delivery, CompleteVersion)
    assert len(delivery.segments) == 3, "where it has a marker, it has records"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_versions_of_a_stream_that_grows_seal_in_order_and_whole(
    steps: list[tuple[int, int]], draw: Random
) -> None:
    """Against a model that keeps what each version holds by partition; markers arrive up to any
    point in time.
    """
    partitions = 1
    # of each partition: None is a record, a text a marker
    logs: list[list[str | None]] = [[] for _ in range(5)]
    expected: list[tuple[str, dict[int, int]]] = []
    sent: list[tuple[int, str, int, int]] = []
    for number, (grows, records) in enumerate(steps):
        partitions = min(5, partitions + (grows == 3))
        for _ in range(records):
            logs[draw.randrange(partitions)].append(None)
        held = {}
        for partition in range(partitions):
            log = logs[partition]
            held[partition] = next(
                (at for at, text in enumerate(reversed(log)) if text is not None), len(log)
            )
            sent.append((partition, f"v{number}", len(log), partitions))
            log.append(f"v{number}")
        expected.append((f"v{number}", held))
    known = [
        Marker(SystemStreamPartition("lake", "planes", p), str(at), version, partitions=counted)
        for p, version, at, counted in sent
    ]
    arrived = known[: draw.randrange(len(known) + 1)]
    offsets = {SystemStreamPartition("lake", "planes", p): 0 for p in range(partitions)}
    settled: dict[str, dict[SystemStreamPartition, MarkerFacts]] = {}
    sealed = []
    while isinstance(
        delivery := find_next_delivery("planes", offsets, arrived, settled), CompleteVersion
    ):
        sealed.append(
            (
                delivery.version,
                {cut.ssp.partition: cut.end - cut.start for cut in delivery.segments},
            )
        )
        settled[delivery.version] = {cut.ssp: MarkerFacts(offset=0) for cut in delivery.segments}
        offsets = delivery.offsets
    whole = [
        e
        for e in expected
        if all((p, e[0]) in {(m.ssp.partition, m.version) for m in arrived} for p in e[1])
    ]
    assert sealed == whole


@pytest.mark.lengthy
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["record", "next", "again"])),
        min_size=1,
        max_size=60,
    )
)
def test_versions_seal_in_order_and_whole_however_deliveries_interleave(
    events: list[tuple[int, str]],
) -> None:
    """Against a model that keeps, by partition, the list of records of each version as a
    producer sent them.
    """
    logs: dict[int, list[str | None]] = {0: [], 1: []}  # None is a record, a text a marker
    sent: dict[int, list[list[int]]] = {0: [[]], 1: [[]]}
    for partition, event in events:
        log, versions = logs[partition], sent[partition]
        if event == "record":
            versions[-1].append(len(log))
            log.append(None)
        elif event == "next":
            log.append(f"v{len(versions)}")
            versions.append([])
        elif len(versions) > 1:  # the marker before, again: what came since was a re-delivery
            versions[-1] = []
            log.append(f"v{len(versions) - 1}")
    ssps = {0: P0, 1: P1}
    markers = [
        marker(ssps[partition], offset, version)
        for partition, log in logs.items()
        for offset, version in enumerate(log)
        if version is not None
    ]
    settled: dict[str, dict[SystemStreamPartition, MarkerFacts]] = {}
    offsets = dict(START)
    sealed: list[tuple[str, list[list[int]]]] = []
    while isinstance(
        delivery := find_next_delivery("planes", offsets, markers, settled), CompleteVersion
    ):
        sealed.append(
            (delivery.version, [list(range(cut.start, cut.end)) for cut in delivery.segments])
        )
        settled[delivery.version] = {cut.ssp: MarkerFacts(offset=0) for cut in delivery.segments}
        offsets = delivery.offsets
    complete = min(len(sent[0]), len(sent[1])) - 1
    assert sealed == [(f"v{n + 1}", [sent[0][n], sent[1][n]]) for n in range(complete)]

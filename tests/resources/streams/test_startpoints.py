"""Startpoints: their stored form, and the offsets to which they resolve on lake streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    describe_startpoint,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.resources.streams.stream_helpers import SCHEMA

SSP = SystemStreamPartition("lake", "s", 0)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
MS = st.integers(-62_135_596_800_000, 253_402_300_799_999).filter(
    lambda ms: not 500_000_000 <= ms < 10**10
)
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
COMMON: dict[str, Any] = {"creation_timestamp_ms": MS, "id": IDS}
STARTPOINTS = st.one_of(
    st.builds(StartpointOldest, **COMMON),
    st.builds(StartpointUpcoming, **COMMON),
    st.builds(StartpointTimestamp, MS, **COMMON),
    st.builds(StartpointSpecific, IDS, **COMMON),
)


def at(seconds: float) -> StartpointTimestamp:
    return StartpointTimestamp(int((BEGIN.timestamp() + seconds) * 1000))


# -- the stored form


@given(STARTPOINTS)
def test_what_is_written_is_read_again(startpoint: Startpoint) -> None:
    assert Startpoint.from_json(json.loads(json.dumps(startpoint.to_json()))) == startpoint


def test_the_stored_form_stays_what_it_is() -> None:
    startpoint = StartpointSpecific("42", creation_timestamp_ms=7, id="a1")
    assert startpoint.to_json() == {
        "version": 1,
        "kind": "specific",
        "offset": "42",
        "creation_timestamp_ms": 7,
        "id": "a1",
    }
    assert StartpointTimestamp(5, creation_timestamp_ms=7, id="a1").to_json()["timestamp_ms"] == 5
    assert StartpointOldest().to_json()["kind"] == "oldest"
    assert StartpointUpcoming().to_json()["kind"] == "upcoming"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "reads version 1. Upgrade"),
        ({"version": 0}, "version 0; expected 1"),
        ({"version": True}, "version True"),
        ({"version": None}, "version None"),
        (
            {"kind": "middle"},
            "kind 'middle'; expected one of oldest, upcoming, timestamp, specific",
        ),
        ({"kind": ["oldest"]}, "kind \\['oldest'\\]"),
        ({"more": 1}, "fields .*more.*; expected creation_timestamp_ms, id, offset"),
        ({"offset": 42}, "offset is 42"),
        ({"offset": ""}, "offset '' is not an offset"),
        ({"offset": "\ud800"}, "offset is .*expected whole characters"),
        ({"id": ""}, "id '' is not an id"),
        ({"creation_timestamp_ms": "7"}, "creation_timestamp_ms is '7'"),
        ({"creation_timestamp_ms": True}, "creation_timestamp_ms is True"),
    ],
)
def test_a_form_that_is_not_known_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    stored = {**StartpointSpecific("42").to_json(), **change}
    with pytest.raises(MalformedDocumentError, match=message) as caught:
        Startpoint.from_json(stored, "startpoint of lake.s.0")
    assert "startpoint of lake.s.0" in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "oldest", 3])
def test_what_is_no_object_is_no_startpoint(value: object) -> None:
    with pytest.raises(MalformedDocumentError) as caught:
        Startpoint.from_json(value)
    assert caught.value.document == "startpoint"


def test_a_missing_field_is_refused() -> None:
    stored = StartpointTimestamp(5).to_json()
    del stored["timestamp_ms"]
    with pytest.raises(
        MalformedDocumentError, match="expected creation_timestamp_ms, id, timestamp_ms"
    ):
        Startpoint.from_json(stored)


def test_startpoints_are_distinguished_and_never_change() -> None:
    first, second = StartpointOldest(), StartpointOldest()
    assert first.id != second.id
    with pytest.raises(FrozenInstanceError):
        first.id = "other"  # type: ignore[misc]
    now_ms = datetime.now(UTC).timestamp() * 1000
    assert abs(first.creation_timestamp_ms - now_ms) < 60_000


def test_a_time_that_is_no_whole_number_of_milliseconds_is_refused() -> None:
    with pytest.raises(ConfigurationError) as failure:
        StartpointTimestamp(1.5)  # type: ignore[arg-type]
    assert failure.value.argument == "timestamp_ms"


# -- resolving


def fill(streams: LakeStreams, clock: Clock, appends: int, rows: int = 2) -> None:
    """Append to the one partition of `s`: `rows` records a second, `appends` times."""
    streams.create(
        "s", schema=SCHEMA, partitions=1, retention=Retention(max_age=timedelta(hours=1))
    )
    for number in range(appends):
        table = pa.table({"k": ["k"] * rows, "v": pa.array(range(rows), pa.int64())})
        streams.append("s", table, producer="p", sequence=number)
        clock.forward(seconds=1)


@pytest.fixture(params=["memory", "local"])
def filled(request: pytest.FixtureRequest, clock: Clock) -> LakeStreams:
    """Records 0-1 of second 0, 2-3 of second 1, 4-5 of second 2."""
    lake: Lake = request.getfixturevalue("lake" if request.param == "memory" else "local_lake")
    streams = LakeStreams(on_clock(lake, clock))
    fill(streams, clock, 3)
    return streams


@pytest.mark.parametrize(
    ("startpoint", "offset"),
    [
        (StartpointOldest(), "0"),
        (StartpointUpcoming(), "6"),
        (StartpointSpecific("0"), "0"),
        (StartpointSpecific("3"), "3"),
        (StartpointSpecific("6"), "6"),
        (at(-100), "0"),
        (at(0), "0"),
        (at(0.001), "2"),
        (at(1), "2"),
        (at(2), "4"),
        (at(2.001), "6"),
        (at(100), "6"),
    ],
)
def test_each_kind_resolves_to_its_record(
    filled: LakeStreams, startpoint: Startpoint, offset: str
) -> None:
    assert resolve_startpoint_to_offset(filled, SSP, startpoint) == offset
    assert resolve_startpoint_to_offset(filled.snapshot("s"), SSP, startpoint) == offset


def test_on_an_empty_partition_everything_is_upcoming(streams: LakeStreams) -> None:
    streams.create("s", schema=SCHEMA, partitions=1)
    for startpoint in (
        StartpointOldest(),
        StartpointUpcoming(),
        at(-5),
        at(5),
        StartpointSpecific("0"),
    ):
        assert resolve_startpoint_to_offset(streams, SSP, startpoint) == "0"


def test_a_specific_offset_outside_of_the_stream_is_refused_with_the_edges(
    filled: LakeStreams,
) -> None:
    with pytest.raises(OffsetOutOfRangeError) as failure:
        resolve_startpoint_to_offset(filled, SSP, StartpointSpecific("7"))
    assert failure.value.facts == {
        "stream": "lake.s",
        "partition": 0,
        "offset": "7",
        "oldest": "0",
        "upcoming": "6",
    }


def test_what_retention_dropped_is_refused_and_times_before_it_are_the_oldest(
    streams: LakeStreams, clock: Clock
) -> None:
    fill(streams, clock, 1)
    clock.forward(hours=2)
    fill_more = pa.table({"k": ["k"], "v": pa.array([1], pa.int64())})
    streams.append("s", fill_more, producer="q", sequence=0)
    streams.maintain("s", clock.now)
    assert resolve_startpoint_to_offset(streams, SSP, StartpointOldest()) == "2"
    assert resolve_startpoint_to_offset(streams, SSP, at(0)) == "2"
    with pytest.raises(OffsetOutOfRangeError) as failure:
        resolve_startpoint_to_offset(streams, SSP, StartpointSpecific("1"))
    assert failure.value.facts == {
        "stream": "lake.s",
        "partition": 0,
        "offset": "1",
        "oldest": "2",
        "upcoming": "3",
    }
    streams.maintain("s", clock.forward(hours=9))
    assert resolve_startpoint_to_offset(streams, SSP, StartpointOldest()) == "3"
    assert resolve_startpoint_to_offset(streams, SSP, at(0)) == "3"


def test_an_offset_in_another_form_names_the_partition(filled: LakeStreams) -> None:
    with pytest.raises(OffsetOutOfRangeError) as failure:
        resolve_startpoint_to_offset(filled, SSP, StartpointSpecific("a3"))
    assert failure.value.facts == {"offset": "a3"}


@pytest.mark.parametrize(
    "startpoint", [StartpointOldest(), StartpointUpcoming(), at(0), StartpointSpecific("0")]
)
def test_a_partition_or_stream_that_is_not_there_is_an_error(
    filled: LakeStreams, startpoint: Startpoint
) -> None:
    with pytest.raises(OffsetOutOfRangeError) as failure:
        resolve_startpoint_to_offset(filled, SystemStreamPartition("lake", "s", 1), startpoint)
    assert failure.value.facts == {"stream": "lake.s", "partition": 1}
    with pytest.raises(StreamNotFoundError):
        resolve_startpoint_to_offset(filled, SystemStreamPartition("lake", "t", 0), startpoint)


def test_a_system_that_lacks_a_kind_says_so(streams: LakeStreams, clock: Clock) -> None:
    class Timeless(LakeStreams):
        capabilities = replace(LakeStreams.capabilities, finds_times=False)

    fill(streams, clock, 1)
    timeless = Timeless(streams.lake)
    with pytest.raises(ConfigurationError) as failure:
        resolve_startpoint_to_offset(timeless, SSP, at(0))
    assert failure.value.facts == {"system": "lake", "stream": "lake.s"}
    assert "oldest, upcoming, specific" in failure.value.next_step
    assert resolve_startpoint_to_offset(timeless, SSP, StartpointOldest()) == "0"


@pytest.mark.lengthy
@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.integers(-5, 5)), min_size=1, max_size=4), max_size=4
    ),
    st.integers(-6, 12),
)
def test_a_time_gives_the_first_record_at_or_after_it(
    appends: list[list[int | None]], wanted: int
) -> None:
    """Records carry times in any order, or none, which is that of their append."""
    clock = Clock()
    streams = LakeStreams(on_clock(lake_in(InMemoryStore()), clock))
    streams.create("s", schema=SCHEMA, partitions=1)
    times: list[int] = []
    for sequence, seconds in enumerate(appends):
        given_times = [None if s is None else BEGIN + timedelta(seconds=s) for s in seconds]
        table = pa.table(
            {
                "k": ["k"] * len(seconds),
                "v": pa.array(range(len(seconds)), pa.int64()),
                "__timestamp": pa.array(given_times, pa.timestamp("us", tz="UTC")),
            }
        )
        streams.append("s", table, producer="p", sequence=sequence)
        times += [int((clock.now - BEGIN).total_seconds()) if s is None else s for s in seconds]
        clock.forward(seconds=3)
    expected = next((offset for offset, time in enumerate(times) if time >= wanted), len(times))
    assert resolve_startpoint_to_offset(streams, SSP, at(wanted)) == str(expected)


# -- what is no time, no offset, no startpoint


@pytest.mark.parametrize(
    ("ms", "reported"),
    [
        (
            1_767_225_600_000_000_000,
            r"looks like nanoseconds \(2026-01-01 00:00 UTC\)\. Give .*: 1767225600000\.",
        ),
        (
            1_767_225_600_000_000,
            r"looks like microseconds \(2026-01-01 00:00 UTC\)\. Give .*: 1767225600000\.",
        ),
        (253_402_300_800_000, "is not within the years 1 to 9999 in milliseconds"),
        (-62_135_596_800_001, "is not within the years 1 to 9999 in milliseconds"),
        pytest.param(
            10**5000,
            "is not within the years 1 to 9999 in milliseconds since 1970. Give",
            id="huge",
        ),
    ],
)
def test_a_time_outside_of_the_years_1_to_9999_is_refused_with_a_hint(
    ms: int, reported: str
) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        StartpointTimestamp(timestamp_ms=ms)
    with pytest.raises(ConfigurationError) as failure:
        StartpointOldest(creation_timestamp_ms=ms)
    assert failure.value.facts == {"argument": "creation_timestamp_ms"}
    stored = {**StartpointTimestamp(timestamp_ms=0).to_json(), "timestamp_ms": ms}
    with pytest.raises(MalformedDocumentError, match="years 1 to 9999") as caught:
        Startpoint.from_json(stored)
    assert caught.value.document == "startpoint"


@pytest.mark.parametrize("seconds", [500_000_000, 1_767_225_600, 9_999_999_999])
def test_seconds_where_milliseconds_belong_are_refused_with_what_they_are(
    filled: LakeStreams, seconds: int
) -> None:
    for made in (
        lambda ms: StartpointTimestamp(timestamp_ms=ms),
        lambda ms: StartpointOldest(creation_timestamp_ms=ms),
        lambda ms: filled.offset_for_timestamp(SSP, ms),
    ):
        with pytest.raises(ConfigurationError) as refused:
            made(seconds)
        assert refused.value.next_step == f"Give milliseconds: {seconds * 1000}."
        made(seconds * 1000)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-62_135_596_800_000, "0001-01-01T00:00:00+00:00"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999"),
    ],
)
def test_the_first_and_the_last_time_can_be_reported_and_found(
    filled: LakeStreams, ms: int, text: str
) -> None:
    startpoint = StartpointTimestamp(timestamp_ms=ms)
    assert text in describe_startpoint(startpoint)
    oldest, upcoming = filled.oldest([SSP])[SSP], filled.upcoming([SSP])[SSP]
    assert resolve_startpoint_to_offset(filled, SSP, startpoint) == (oldest if ms < 0 else upcoming)


@pytest.mark.parametrize(
    "offset", ["0003", "00", "+3", " 3", "3 ", "3\n", "-0", "1_0", "\uff13", "\u0663", "3" * 5000]
)
def test_a_number_that_is_written_in_another_way_is_no_offset(
    filled: LakeStreams, offset: str
) -> None:
    with pytest.raises(OffsetOutOfRangeError) as caught:
        resolve_startpoint_to_offset(filled, SSP, StartpointSpecific(offset=offset))
    assert caught.value.offset == offset[:80]
    with pytest.raises(OffsetOutOfRangeError):
        filled.records_between({SSP: OffsetRange(offset, "4")})


@pytest.mark.parametrize("value", ["oldest", None, 3, StartpointOldest, {"kind": "oldest"}])
def test_what_is_no_startpoint_is_not_resolved(filled: LakeStreams, value: Any) -> None:
    with pytest.raises(ConfigurationError) as failure:
        resolve_startpoint_to_offset(filled, SSP, value)
    assert failure.value.argument == "startpoint"


class Answering(LakeStreams):
    """The streams of a lake, with given answers to what the oldest offsets are."""

    answers: Mapping[SystemStreamPartition, Any]

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return {ssp: self.answers[ssp] for ssp in ssps if ssp in self.answers}


@pytest.mark.parametrize("answer", [None, "", 3])
def test_an_answer_that_is_no_offset_is_refused(filled: LakeStreams, answer: Any) -> None:
    answering = Answering(filled.lake)
    answering.answers = {SSP: answer}
    with pytest.raises(ConfigurationError) as caught:
        resolve_startpoint_to_offset(answering, SSP, StartpointOldest())
    assert (caught.value.stream, caught.value.system) == ("lake.s", "lake")
    answering.answers = {}
    with pytest.raises(ConfigurationError) as caught:
        resolve_startpoint_to_offset(answering, SSP, StartpointOldest())
    assert (caught.value.stream, caught.value.system) == ("lake.s", "lake")

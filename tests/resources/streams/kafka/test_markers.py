from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    MarkerConflictError,
)
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import Marker, OffsetRange, SystemStreamPartition
from tests.resources.streams.kafka.producing import raw, seen, system_with
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.server
EAST = timezone(timedelta(hours=5))
RECORDS = raw(*[(f"key {i}", f"value {i}") for i in range(20)])


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    return kafka.new_topic(3)


@pytest.fixture
def system(kafka: KafkaServer, tmp_path: Path, topic: str) -> KafkaStreams:
    return system_with(
        kafka, tmp_path, s=KafkaTopic(topic), t=KafkaTopic(kafka.new_topic(2), transactional=True)
    )


def test_a_version_ends_with_a_marker_in_every_partition(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    first = system.append("s", RECORDS, producer="p", sequence=0, end_of_dataset="v1")
    second = system.append("s", RECORDS.slice(0, 3), producer="p", sequence=1, end_of_dataset="v2")
    assert (first.rows, second.rows) == (20, 3)
    markers = system.markers("s")
    assert [(marker.version, marker.ssp.partition) for marker in markers] == [
        (v, p) for p in range(3) for v in ("v1", "v2")
    ]
    # A marker is the last record of its append, has neither key nor value, and is no record.
    for marker, result in zip(markers, [first, second] * 3, strict=True):
        assert int(marker.offset) == int(result.next[marker.ssp.partition]) - 1
    places = {(marker.ssp.partition, int(marker.offset)) for marker in markers}
    marked = [
        record for record in seen(kafka, topic) if (record.partition, record.offset) in places
    ]
    assert {(record.key, record.value) for record in marked} == {(None, None)}
    whole = {
        SystemStreamPartition("kafka", "s", p): OffsetRange("0", offset)
        for p, offset in second.next.items()
    }
    assert system.records_between(whole) == 23


def test_markers_are_looked_for_from_an_offset_on(system: KafkaStreams) -> None:
    for sequence, version in enumerate(("v1", "v2")):
        system.append("s", RECORDS, producer="p", sequence=sequence, end_of_dataset=version)
    ones = [marker for marker in system.markers("s") if marker.version == "v1"]
    after = {marker.ssp: str(int(marker.offset) + 1) for marker in ones}
    assert [marker.version for marker in system.markers("s", after)] == ["v2"] * 3
    assert system.markers("s", {ones[1].ssp: ones[1].offset})[0] == ones[1]
    assert system.markers("s", system.upcoming(system.partitions("s"))) == []
    assert system.markers("s", {}) == []


def test_markers_alone_tell_counts_and_checksums(system: KafkaStreams) -> None:
    result = system.append_markers(
        "s", "v1", partitions=[2, 0], rows={0: 5, 2: 0}, checksum="abc", producer="p", sequence=0
    )
    assert result.rows == 0
    assert result.next == {0: "1", 1: "0", 2: "1"}
    zero, two = (SystemStreamPartition("kafka", "s", p) for p in (0, 2))
    assert system.markers("s") == [
        Marker(zero, "0", "v1", 5, "abc"),
        Marker(two, "0", "v1", 0, "abc"),
    ]
    assert {marker.partitions for marker in system.markers("s")} == {3}
    with pytest.raises(ConfigurationError) as failure:
        system.append_markers("s", "v1", partitions=[3], producer="p", sequence=1)
    assert failure.value.facts == {"stream": "kafka.s", "argument": "partitions"}
    with pytest.raises(ConfigurationError) as failure:
        system.append_markers("s", "v1", partitions=[0, 1], rows={0: 1}, producer="p", sequence=1)
    assert failure.value.facts == {"stream": "kafka.s", "argument": "rows"}
    with pytest.raises(ConfigurationError) as failure:
        system.append_markers("s", "v1", partitions=[0], rows={0: -1}, producer="p", sequence=1)
    assert failure.value.facts == {"stream": "kafka.s", "argument": "rows"}
    system.append_markers(
        "s", "v2", partitions=[0], rows={0: np.int64(7)}, producer="p", sequence=1
    )  # type: ignore[dict-item]
    assert [marker.rows for marker in system.markers("s", {zero: "1"})] == [7]


def test_a_marker_says_since_when_its_version_is_valid(system: KafkaStreams) -> None:
    since = datetime(2026, 1, 31, 6, 0, 0, 123456, tzinfo=UTC)
    for stream in ("s", "t"):
        system.append(
            stream, RECORDS, producer="p", sequence=0, end_of_dataset="v1", valid_from=since
        )
        system.append_markers(
            stream, "v2", producer="p", sequence=1, valid_from=since.astimezone(EAST)
        )
        assert {marker.valid_from for marker in system.markers(stream)} == {since}
    for version, wrong in (("v3", since.replace(tzinfo=None)), (None, since)):
        with pytest.raises(ConfigurationError) as caught:
            system.append(
                "s", RECORDS, producer="p", sequence=2, end_of_dataset=version, valid_from=wrong
            )
        assert caught.value.argument == "valid_from"


def test_a_transaction_has_its_markers_once(system: KafkaStreams) -> None:
    for _ in range(2):
        result = system.append("t", RECORDS, producer="p", sequence=0, end_of_dataset="v1")
    assert (result.rows, result.duplicate) == (20, True)
    for _ in range(2):
        marked = system.append_markers("t", "v2", producer="p", sequence=1)
    assert (marked.rows, marked.duplicate) == (0, True)
    assert [marker.version for marker in system.markers("t")] == ["v1", "v2"] * 2


def test_markers_of_other_producers_count_and_bad_ones_are_named(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    theirs = kafka.producer()
    content = {"version": "2013-01-01", "rows": 2, "more": "of theirs"}
    theirs.produce(topic, partition=1, headers={"adjunct-end-of-dataset": json.dumps(content)})
    theirs.flush()
    (marker,) = system.markers("s")
    assert (marker.version, marker.rows, marker.ssp.partition) == ("2013-01-01", 2, 1)
    theirs.produce(topic, partition=1, headers={"adjunct-end-of-dataset": "v2"})
    theirs.flush()
    with pytest.raises(
        MalformedDocumentError, match=r"kafka\.s\.1: the end-of-dataset marker at offset 1 is b'v2'"
    ):
        system.markers("s")


@pytest.mark.parametrize(
    "members",
    [
        '"row": 5',
        '"Rows": 5',
        '"rows": "5"',
        '"rows": true',
        '"rows": 5, "rows": 6',
        '"validFrom": "x"',
    ],
)
def test_a_marker_whose_check_would_be_off_is_malformed(
    kafka: KafkaServer, system: KafkaStreams, topic: str, members: str
) -> None:
    theirs = kafka.producer()
    theirs.produce(
        topic, partition=1, headers={"adjunct-end-of-dataset": f'{{"version": "v1", {members}}}'}
    )
    theirs.flush()
    with pytest.raises(MalformedDocumentError) as caught:
        system.markers("s")
    assert caught.value.facts == {"stream": "kafka.s"}


def test_a_marker_behind_a_malformed_one_without_records_between_replaces_it(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    theirs = kafka.producer()

    def produce(partition: int, header: str | None = None) -> None:
        headers = None if header is None else {"adjunct-end-of-dataset": header}
        theirs.produce(topic, partition=partition, headers=headers, key="k")
        theirs.flush()

    for partition, headers in ((0, ["v1", "again"]), (1, [None, "v1"])):
        for header in headers:
            produce(partition, header)
    with pytest.raises(MalformedDocumentError):
        system.markers("s")
    system.append_markers("s", "v1", partitions=[0, 1], producer="p", sequence=0)
    assert [(m.ssp.partition, m.offset, m.version) for m in system.markers("s")] == [
        (0, "2", "v1"),
        (1, "2", "v1"),
    ]

    produce(1, "v2")
    produce(1)
    system.append_markers("s", "v2", partitions=[1], producer="p", sequence=1)
    with pytest.raises(MalformedDocumentError, match="at offset 3") as caught:
        system.markers("s")
    assert "kafka-delete-records" in caught.value.next_step
    admin = kafka.admin()
    next(iter(admin.delete_records([TopicPartition(topic, 1, 4)]).values())).result(30)
    assert [(m.offset, m.version) for m in system.markers("s") if m.ssp.partition == 1] == [
        ("5", "v2")
    ]


def test_a_compacted_topic_takes_no_markers(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(1, cleanup_policy="compact")
    system = system_with(kafka, tmp_path, c=KafkaTopic(topic))
    with pytest.raises(ConfigurationError) as caught:
        system.append("c", RECORDS, producer="p", sequence=0, end_of_dataset="v1")
    assert (caught.value.stream, caught.value.topic) == ("kafka.c", topic)
    assert seen(kafka, topic) == []


@pytest.mark.parametrize("transactional", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_bounded_dataset_is_made_of_the_versions_on_a_topic(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession, transactional: bool
) -> None:
    from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText

    value = Json("tailnum STRING, seats INT")
    declared = KafkaTopic(
        kafka.new_topic(2), value, KeyText("tailnum"), transactional=transactional
    )
    system = system_with(kafka, tmp_path, planes=declared)
    planes = bounded_dataset("planes", input="kafka.planes", key="tailnum", partitions=2)

    def send(sequence: int, version: str | None, **seats: int) -> None:
        table = pa.table({"tailnum": list(seats), "seats": pa.array(seats.values(), pa.int32())})
        system.append("planes", table, producer="p", sequence=sequence, end_of_dataset=version)

    def advance() -> AdvanceReport:
        return advance_dataset(
            planes, lake=system.lake, systems={"kafka": system}, spark=lambda: spark, by="test"
        )

    def served() -> dict[str, int]:
        view = StoredVersions(system.lake, planes).current()
        return (
            {} if view is None else {row.tailnum: row.seats for row in view.frame(spark).collect()}
        )

    def delivered(sequence: int, version: str | None, **seats: int) -> tuple[str, dict[str, int]]:
        send(sequence, version, **seats)
        return advance().action, served()

    assert delivered(0, None, N1=1, N2=2) == ("waiting", {})
    assert delivered(1, "v1", N2=20, N3=3) == ("sealed", {"N1": 1, "N2": 20, "N3": 3})
    assert delivered(2, None, N4=4) == ("waiting", {"N1": 1, "N2": 20, "N3": 3})
    assert delivered(3, "v2", N5=5) == ("sealed", {"N4": 4, "N5": 5})

    zero = SystemStreamPartition("kafka", "planes", 0)
    begins = int(system.upcoming([zero])[zero])
    # before a transaction's own record
    read = StoredVersions(system.lake, planes).require_manifest().offsets[str(zero)]
    fleet = {f"N{number}": number for number in range(20)}
    send(4, "v3", **fleet)
    cut = TopicPartition(declared.topic, 0, begins + 1)  # one record of v3, in one partition
    admin = kafka.admin()
    next(iter(admin.delete_records([cut]).values())).result(30)
    report = advance()
    assert (report.action, report.lost, served()) == ("waiting", ("v3",), {"N4": 4, "N5": 5})
    assert (
        f"retention took offsets {read} to {begins} of kafka.planes.0 before they were read"
        in report.summary()
    )
    assert delivered(5, "v4", **fleet) == ("sealed", fleet)


def grow(kafka: KafkaServer, system: KafkaStreams, stream: str, partitions: int) -> None:
    from confluent_kafka.admin import NewPartitions

    admin = kafka.admin()
    more = NewPartitions(system.settings.topics[stream].topic, partitions)
    next(iter(admin.create_partitions([more]).values())).result(30)
    while system.info(stream).partitions < partitions:
        time.sleep(0.05)


@pytest.mark.parametrize("read_before", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_dataset_goes_on_in_a_topic_that_grew_between_two_versions(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession, read_before: bool
) -> None:
    from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText

    declared = KafkaTopic(kafka.new_topic(2), Json("tailnum STRING, seats INT"), KeyText("tailnum"))
    system = system_with(kafka, tmp_path, planes=declared)
    planes = bounded_dataset("planes", input="kafka.planes", key="tailnum", partitions=2)

    def advance() -> AdvanceReport:
        return advance_dataset(
            planes, lake=system.lake, systems={"kafka": system}, spark=lambda: spark, by="test"
        )

    fleets = {f"v{n}": {f"N{number}": number * n for number in range(n, 30)} for n in (1, 2, 3)}
    for partitions, (version, seats) in zip((2, 3, 5), fleets.items(), strict=True):
        if partitions > 2:
            grow(kafka, system, "planes", partitions)
        table = pa.table({"tailnum": list(seats), "seats": pa.array(seats.values(), pa.int32())})
        system.append("planes", table, producer="p", sequence=0, end_of_dataset=version)
        if read_before:
            assert advance().action == "sealed"
    assert len(advance().sealed) == (0 if read_before else 3)
    stored = StoredVersions(system.lake, planes)
    for version, seats in fleets.items():
        assert {
            row.tailnum: row.seats for row in stored.version(version).frame(spark).collect()
        } == seats
    assert {record.partition for record in seen(kafka, declared.topic)} == set(range(5))
    assert sum(entry.action == "carry" for entry in stored.history()) == 2 * read_before
    assert advance().action == "up-to-date"


def test_a_version_whose_topic_got_more_partitions_is_abandoned_as_the_error_says(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession
) -> None:
    from dagster_adjunct.resources.streams.kafka.formats import Json

    declared = KafkaTopic(kafka.new_topic(1), Json("k STRING, n INT"))
    system = system_with(kafka, tmp_path, s=declared)
    spec = bounded_dataset("d", input="kafka.s", key="k", broadcast=True)

    def send(version: str, number: int, partitions: int) -> None:
        theirs = kafka.producer()
        for partition in range(partitions):
            theirs.produce(
                declared.topic, json.dumps({"k": f"k{partition}", "n": number}), partition=partition
            )
            header = {"adjunct-end-of-dataset": json.dumps({"version": version})}
            theirs.produce(declared.topic, partition=partition, headers=header)
        assert theirs.flush(30) == 0

    def advance() -> AdvanceReport:
        return advance_dataset(
            spec, lake=system.lake, systems={"kafka": system}, spark=lambda: spark, by="test"
        )

    send("v1", 1, 1)
    grow(kafka, system, "s", 2)
    send("v2", 2, 2)
    with pytest.raises(MarkerConflictError) as refused:
        advance()
    assert "abandon_version(lake, 'd', VERSION, reason=…, by=…)" in refused.value.next_step
    abandon_version(system.lake, "d", "v1", reason="before the topic grew", by="me")
    assert advance().action == "sealed"
    view = StoredVersions(system.lake, spec).require_current()
    assert [view.get(key) for key in ("k0", "k1")] == [{"k": "k0", "n": 2}, {"k": "k1", "n": 2}]

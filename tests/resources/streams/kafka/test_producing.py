from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PermanentError,
    SchemaMismatchError,
    StreamNotFoundError,
    StreamUnavailableError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka import produce
from dagster_adjunct.resources.streams.kafka.client import (
    KafkaAdmin,
    KafkaSettings,
    TopicDescription,
    TopicFacts,
)
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.partitioner import choose_partitions
from dagster_adjunct.resources.streams.kafka.produce import (
    SendResult,
    SentSpan,
    TaskAppend,
    send_without_transaction,
)
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import (
    AppendOptions,
    OffsetRange,
    SystemStreamPartition,
)
from tests.resources.streams.kafka.producing import raw, seen, system_with
from tests.servers.kafka import KafkaServer
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.streams.system import AppendResult

pytestmark = pytest.mark.server
KEYS = ["N14228", "", "zürich", "東京", "🛩", "a" * 300, *(f"key-{i}" for i in range(2000))]


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bits, with the seed of Kafka's Java client, written from the description
    of the algorithm.
    """
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def javas_partition(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def test_partitions_are_chosen_for_keys_of_any_length_as_java_does() -> None:
    drawn = random.Random(7)
    keys = [
        drawn.randbytes(length) for length in [*range(70), 255, 256, 257, 1001] for _ in range(3)
    ]
    for count in (2, 3, 4, 7):
        assert choose_partitions(keys, count).tolist() == [
            javas_partition(key, count) for key in keys
        ]


def test_the_oracle_gives_the_values_of_kafkas_own_tests() -> None:
    expected = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"abc": 479470107,
    }
    assert {key: (murmur2(key) ^ 0x80000000) - 0x80000000 for key in expected} == expected


def test_keys_go_where_kafkas_java_clients_put_them(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(7)
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    result = system.append(
        "s", raw(*[(key, f"v{i}") for i, key in enumerate(KEYS)]), producer="p", sequence=4
    )
    records = seen(kafka, topic)
    assert {
        record.key.decode(): record.partition for record in records if record.key is not None
    } == {key: javas_partition(key.encode(), 7) for key in KEYS}
    assert result.rows == len(KEYS) == len(records)
    assert not result.duplicate
    assert {int(p): int(offset) for p, offset in result.next.items()} == {
        p: sum(record.partition == p for record in records) for p in range(7)
    }
    assert set(result.first.values()) == {"0"}


@pytest.mark.long  # in a transaction: test_transactions.py; where keys go: above
def test_records_of_a_frame_keep_the_order_of_their_key(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession
) -> None:
    system = system_with(kafka, tmp_path)
    system.create("ordered", schema=Schema.of(k="string", n="bigint"), key=["k"], partitions=3)
    rows = [(f"k{i % 17}", i) for i in range(5000)]
    random.Random(5).shuffle(rows)
    frame = spark.createDataFrame(rows, "k string, n bigint").repartition(5)
    result = system.append(
        "ordered", frame, producer="p", sequence=0, options=AppendOptions(order_by=("n",))
    )
    assert result.rows == 5000
    read = (
        system.read(spark, ranges_of("ordered", result))
        .orderBy("__partition", "__offset")
        .collect()
    )
    assert sorted((row.k, row.n) for row in read) == sorted(rows)
    for key in {row.k for row in read}:
        numbers = [row.n for row in read if row.k == key]
        assert numbers == sorted(numbers)
        assert {row["__partition"] for row in read if row.k == key} == {
            javas_partition(key.encode(), 3)
        }


def ranges_of(stream: str, result: AppendResult) -> dict[SystemStreamPartition, OffsetRange]:
    return {
        SystemStreamPartition("kafka", stream, p): OffsetRange(first, result.next[p])
        for p, first in result.first.items()
    }


def test_rows_without_the_key_are_refused_by_column(kafka: KafkaServer, tmp_path: Path) -> None:
    declared = KafkaTopic(kafka.new_topic(), Json("tailnum STRING, seats INT"), KeyText("tailnum"))
    system = system_with(kafka, tmp_path, s=declared)
    for rows in ([{"seats": 1}], [{"seats": 1}, {}]):
        with pytest.raises(SchemaMismatchError) as caught:
            system.append("s", rows, producer="p", sequence=0)
        assert caught.value.column == "tailnum"
    assert system.append("s", [{"tailnum": None, "seats": 1}], producer="p", sequence=0).rows == 1


def test_a_record_carries_its_time_its_epoch_and_who_wrote_it(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    then = datetime(2013, 1, 1, 5, 15, 0, 123_456, tzinfo=UTC)
    table = raw(
        ("a", "1"), ("b", None), __timestamp=[then, None], __epoch=pa.array([3, None], pa.int32())
    )
    system.append("s", table, producer="flüge", sequence=12)
    first, second = seen(kafka, topic)
    assert first.timestamp == 1_357_017_300_123
    assert abs(second.timestamp - datetime.now(UTC).timestamp() * 1000) < 60_000
    whose = {"adjunct-producer": "flüge".encode(), "adjunct-sequence": b"12"}
    assert (first.headers, second.headers) == (whose | {"adjunct-epoch": b"3"}, whose)
    assert second.value is None

    made = {"__source": ["lake.in.3", None], "__source_offset": pa.array([17, None], pa.int64())}
    system.append("s", raw(("a", "1"), ("b", "2"), **made), producer="app", sequence=1)
    of_a_record, of_none = seen(kafka, topic)[2:]
    assert of_a_record.headers["adjunct-source"] == b"lake.in.3@17"
    assert "adjunct-source" not in of_none.headers

    # After its input was recreated, or where an input has no identity.
    made["__source_reader"] = ["app@1f", "app"]
    made["__source"] = ["lake.in.3", "lake.in.3"]
    made["__source_offset"] = pa.array([17, 17], pa.int64())
    system.append("s", raw(("a", "1"), ("b", "2"), **made), producer="app", sequence=2)
    of_identity, of_no_identity = seen(kafka, topic)[4:]
    assert of_identity.headers["adjunct-source-id"] == b"1f"
    assert of_identity.headers["adjunct-source"] == of_no_identity.headers["adjunct-source"]
    assert "adjunct-source-id" not in of_no_identity.headers
    ranges = ranges_of("s", system.append("s", raw(("c", "3")), producer="app", sequence=3))
    with pytest.raises(ConfigurationError) as caught:
        system.read(None, ranges, epochs="latest")  # type: ignore[arg-type]
    assert (caught.value.argument, caught.value.system) == ("epochs", "kafka")


def test_a_tombstone_has_no_value_whatever_its_columns_hold(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession
) -> None:
    system = system_with(kafka, tmp_path)
    system.create("tombstones", schema=Schema.of(k="string", n="bigint"), key=["k"], partitions=1)
    rows = [("a", 1, False), ("b", 2, True), ("c", 3, None)]
    system.append(
        "tombstones",
        spark.createDataFrame(rows, "k string, n bigint, __tombstone boolean"),
        producer="p",
        sequence=0,
        options=AppendOptions(order_by=("k",)),
    )
    system.append(
        "tombstones",
        pa.table({"k": ["d"], "n": [4], "__tombstone": [True]}),
        producer="p",
        sequence=1,
    )
    values = [(record.key, record.value is None) for record in seen(kafka, "tombstones")]
    assert values == [(b"a", False), (b"b", True), (b"c", False), (b"d", True)]


def test_headers_of_adjuncts_own_are_not_carried_on(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic, headers="heads"))
    heads = (
        '[["trace", "YWJj"], ["none", null], ["adjunct-end-of-dataset", "e30="],'
        ' ["adjunct-sequence", "OTk="]]'
    )
    system.append("s", raw(("a", "1"), ("b", "2"), heads=[heads, None]), producer="p", sequence=1)
    first, second = seen(kafka, topic)
    ours = {"adjunct-producer": b"p", "adjunct-sequence": b"1"}
    assert first.headers == {"trace": b"abc", "none": None} | ours
    assert second.headers == ours
    assert system.markers("s") == []


def test_without_transactions_a_repeated_append_is_written_again(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    results = [system.append("s", raw(("a", "1")), producer="p", sequence=7) for _ in range(2)]
    assert [(r.first, r.next, r.duplicate) for r in results] == [
        ({0: "0"}, {0: "1"}, False),
        ({0: "1"}, {0: "2"}, False),
    ]
    assert [record.headers["adjunct-sequence"] for record in seen(kafka, topic)] == [b"7", b"7"]
    assert system.appended("s", "p", 7) is None


def test_a_record_that_is_too_large_is_named_by_its_key_and_the_limit(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession
) -> None:
    topic = kafka.new_topic(1, max_message_bytes=20_000)
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    table = raw(("small", "1"), ("N14228", "secret" * 10_000))
    with pytest.raises(
        PermanentError,
        match=r"kafka\.s: .*'N14228' has 60,006 bytes .* \(20,000 bytes\).*max\.message",
    ) as e:
        system.append("s", table, producer="p", sequence=0)
    assert "secret" not in str(e.value)
    frame = spark.createDataFrame(table.to_pandas())
    with pytest.raises(PermanentError, match=r"'N14228' has 60,006 bytes"):
        system.append("s", frame, producer="p", sequence=1)
    # Many records that are small enough are never refused for what they are together.
    many = raw(*[("k", "v" * 1000) for _ in range(200)])
    assert system.append("s", many, producer="p", sequence=2).rows == 200


def test_a_broker_that_refuses_a_record_fails_the_append_by_its_reason(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    topic = kafka.new_topic(1, cleanup_policy="compact")
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    with pytest.raises(PermanentError, match=r"kafka\.s: Kafka rejected.*INVALID_RECORD"):
        system.append("s", raw((None, "no key")), producer="p", sequence=0)


def test_a_broker_that_is_not_there_is_a_passing_failure(tmp_path: Path) -> None:
    nowhere = KafkaSettings("kafka", f"127.0.0.1:{free_port()}", client={"message.timeout.ms": 300})
    batch = pa.RecordBatch.from_pydict({"__key": [b"k"], "__value": [b"v"]})
    with pytest.raises(StreamUnavailableError) as caught:
        send_without_transaction(
            TaskAppend(TopicFacts(nowhere, "s", "t", "id", 1), "p", 0), [batch]
        )
    assert (caught.value.stream, caught.value.system) == ("kafka.s", "kafka")


def test_an_append_whose_partitions_grow_meanwhile_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client, which chooses the partitions, knows of the new ones before we do, and may get
    no offsets.
    """

    class Admin(KafkaAdmin):
        def describe(self, topic: str) -> TopicDescription | None:
            return TopicDescription("id", 1)

        def config(self, topic: str) -> Mapping[str, str]:
            return {}

        def upcoming(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
            return dict.fromkeys(partitions, 5)

    settings = KafkaSettings("kafka", "none", topics={"s": KafkaTopic("s")})
    system = KafkaStreams(open_lake(tmp_path / "lake"), settings)
    system.admin = Admin(settings)
    spans = [SentSpan(0, 2, 5, 3), SentSpan(1, None, None, 4), SentSpan(2, 1, 3, 2)]
    monkeypatch.setattr(produce, "produce_batches", lambda *_: SendResult(spans))
    result = system.append("s", raw(("k", "v")), producer="p", sequence=0)
    assert (result.first, result.next, result.rows) == (
        {0: "2", 1: "0", 2: "1"},
        {0: "5", 1: "5", 2: "3"},
        9,
    )


def test_what_kafka_cannot_keep_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    system = system_with(kafka, tmp_path, s=KafkaTopic(topic))
    before = raw(("a", "1"), __timestamp=[datetime(1969, 7, 20, tzinfo=UTC)])
    with pytest.raises(SchemaMismatchError) as caught:
        system.append("s", before, producer="p", sequence=0)
    assert caught.value.stream == "kafka.s"
    with pytest.raises(StreamNotFoundError):
        system.append("nowhere", raw(("a", "1")), producer="p", sequence=0)
    with pytest.raises(ConfigurationError) as caught:
        system.append(
            "s", raw(("a", "1")), producer="p", sequence=0, options=AppendOptions(order_by=("key",))
        )
    assert caught.value.argument == "order_by"
    assert seen(kafka, topic) == []

"""Runs that are stopped while they send to a real broker, without transactions: once others have
gone on, nothing of theirs arrives, so that the newest record of a key stays the newest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_adjunct import Application, unbounded_dataset
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.step.run import longest_request
from dagster_adjunct.resources.errors import ConfigurationError, RunLeaseLostError
from dagster_adjunct.resources.objects.fence import Fence, lease_lost_error
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.produce import delivery_seconds
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import AppendOptions
from dagster_adjunct.tables import MemoryTable, RemoteTable, RetryPolicy
from tests.orchestration.kafka_sender import KEYS, copies, send
from tests.resources.streams.kafka.producing import seen
from tests.servers.kafka import KafkaServer


@pytest.mark.server
@pytest.mark.parametrize(
    ("setting", "take_over"),
    [
        ("message.timeout.ms", True),
        # The name's limit: test_a_successor_waits_for_the_limit_of_the_client
        pytest.param("delivery.timeout.ms", False, marks=pytest.mark.long),
    ],
)
def test_nothing_arrives_of_a_stopped_run_once_others_went_on(
    setting: str,
    take_over: bool,
    kafka: KafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ADJUNCT_RUN_TTL", "2")
    lake, topic, log = open_lake(tmp_path / "lake"), kafka.new_topic(1), tmp_path / "first.log"
    streams = copies(lake, kafka.bootstrap, topic)
    order = [str(tmp_path / "lake"), kafka.bootstrap, topic, setting]
    with log.open("w") as output:
        first = subprocess.Popen(
            [sys.executable, "-m", "tests.orchestration.kafka_sender", *order],
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 240
        while streams.admin.upcoming(topic, [0])[0] == 0:
            assert first.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        os.kill(first.pid, signal.SIGSTOP)
        with RunLease(lake, "copying", "second", Claim(take_over=take_over)) as lease:
            send(streams, lease, 1, value=1)
            send(streams, lease, 2, value=2)
        before = seen(kafka, topic)
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(60) != 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert 0 < len(before) - 2 * KEYS < KEYS  # it was stopped within its append
    after = seen(kafka, topic)
    assert len(after) == len(before)
    newest = {int(record.key or b""): json.loads(record.value or b"")["n"] for record in after}
    assert newest == dict.fromkeys(range(KEYS), 2)


class Lost(Fence):
    """A fence whose lease was lost."""

    def __init__(self) -> None:
        pass

    def check(self) -> None:
        raise lease_lost_error("copying", "first", "it was taken")


@pytest.mark.server
def test_a_transaction_of_a_run_that_lost_its_lease_does_not_begin(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    topic = KafkaTopic(
        kafka.new_topic(1), Json("n BIGINT"), KeyText("id BIGINT"), transactional=True
    )
    settings = KafkaSettings("kafka", kafka.bootstrap, topics={"copies": topic})
    streams = KafkaStreams(open_lake(tmp_path / "lake"), settings)
    newer = kafka.producer(transactional_id=f"copying/{topic.topic}")
    newer.init_transactions(30)
    newer.begin_transaction()
    with pytest.raises(RunLeaseLostError):
        streams.append(
            "copies",
            [{"id": 1, "n": 1}],
            producer="copying",
            sequence=1,
            options=AppendOptions(fence=Lost()),
        )
    newer.produce(str(topic.topic), b"newer")
    newer.commit_transaction(30)
    # The broker writes the marker, up to which readers see records, some time after it answers.
    deadline = time.monotonic() + 240
    while not (records := seen(kafka, str(topic.topic))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [record.value for record in records] == [b"newer"]


@pytest.mark.parametrize(
    ("client", "seconds"),
    [
        ({}, 60.0),
        ({"message.timeout.ms": 5000}, 5.0),
        ({"delivery.timeout.ms": "5000"}, 5.0),
        ({"delivery.timeout.ms": "env:KAFKA_LIMIT"}, 7.0),
        ({"delivery.timeout.ms": 9000, "message.timeout.ms": 8000}, 8.0),
    ],
)
def test_a_successor_waits_for_the_limit_of_the_client(
    client: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_LIMIT", "7000")
    assert delivery_seconds(KafkaSettings("kafka", "h:1", client=client)) == seconds


@pytest.mark.parametrize("name", ["message.timeout.ms", "delivery.timeout.ms"])
@pytest.mark.parametrize("value", [0, "0", -1, "soon", True, 2.5])
def test_a_producer_that_tries_for_ever_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as reported:
        delivery_seconds(KafkaSettings("kafka", "h:1", client={name: value}))
    assert reported.value.setting == name


def test_dead_letters_in_kafka_count_by_its_limit() -> None:
    app = Application("sets")
    letters = app.output_stream("kafka.letters", partitions=1)
    table: Any = RemoteTable(
        "t", key="id", write_function=MemoryTable("letters"), retry=RetryPolicy(timeout=1.0)
    )
    source = app.input_stream("lake.numbers")
    source.update(app.table(table), set={"n": "n"}, dead_letters=letters, at_most=1)
    kafka: Any = SimpleNamespace(longest_request=9.0)
    assert longest_request(app, {"kafka": kafka}) == 9.0


def test_changes_sent_to_a_dataset_in_kafka_count_by_its_limit() -> None:
    app = Application("feeds")
    people = app.table(unbounded_dataset("people", input="kafka.people", key="id", partitions=1))
    app.input_stream("lake.numbers").send_to(people)
    kafka: Any = SimpleNamespace(longest_request=9.0)
    assert longest_request(app, {"kafka": kafka}) == 9.0

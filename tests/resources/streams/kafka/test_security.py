"""Logging in to Kafka: secrets are named, never held; a login that is refused is an error at
once.
"""

from __future__ import annotations

import base64
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import ConfigurationError, StreamUnavailableError
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka import client as kafka_client
from dagster_adjunct.resources.streams.kafka.client import (
    BrokerRefusals,
    ClientLog,
    KafkaSettings,
    TopicFacts,
    new_client,
    resolve_client_settings,
)
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, read_ranges
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams, kafka_system
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.resources.streams.kafka import guarded
from tests.servers.kafka import KafkaServer
from tests.servers.s3 import ROOT

server = pytest.mark.server
FACTORIES = guarded.__name__
SECRET = "hunter2-hunter2"
# Reads a range in a process of its own, from a pickled topic, as a task does.
_TASK = """
import base64, pickle, sys
from dagster_adjunct.resources.streams.kafka.consume import read_ranges
topic, wanted = pickle.loads(base64.b64decode(sys.argv[1]))
print([message.value() for _, got in read_ranges(topic, [wanted]) for message in got])
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    with guarded.guarded_broker(tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.fixture
def login(broker: KafkaServer) -> Callable[..., KafkaSettings]:
    """Make settings for the guarded listener."""

    def make(factory: str | None = None, **changed: Any) -> KafkaSettings:
        client = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": guarded.USER,
            "sasl.password": "env:KAFKA_PASSWORD",
            "ssl.ca.location": str(broker.folder / "ca.pem"),
            **{key.replace("_", "."): value for key, value in changed.items()},
        }
        return KafkaSettings("kafka", broker.addresses["GUARDED"], client, factory)

    return make


@server
def test_records_go_over_tls_with_a_password_that_only_the_environment_holds(
    login: Callable[..., KafkaSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", guarded.PASSWORD)
    settings = login()
    streams = KafkaStreams(lake_in(InMemoryStore()), settings)
    info = streams.create("private", schema=Schema.of(value="string"), partitions=1)
    streams.append("private", pa.table({"value": ["a", "b"]}), producer="me", sequence=1)
    ssp = SystemStreamPartition("kafka", "private", 0)
    assert (streams.oldest([ssp])[ssp], streams.upcoming([ssp])[ssp]) == ("0", "2")
    assert info.identity is not None
    task = pickle.dumps((streams.topic("private"), TopicRange(0, 0, 2)))
    for held in (
        task,
        repr(info).encode(),
        repr(streams.topic("private")).encode(),
        str(settings).encode(),
    ):
        assert guarded.PASSWORD.encode() not in held
    command = [sys.executable, "-c", _TASK, base64.b64encode(task).decode()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == """[b'{"value":"a"}', b'{"value":"b"}']\n""", done.stderr
    bare = {name: value for name, value in os.environ.items() if name != "KAFKA_PASSWORD"}
    done = subprocess.run(
        command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=300, check=False
    )
    assert "environment variable KAFKA_PASSWORD, which is not set in this process" in done.stderr


@server
@pytest.mark.parametrize("ask", ["topics", "describe", "read", "append"])
def test_a_wrong_password_is_a_permanent_error_at_once(
    ask: str,
    login: Callable[..., KafkaSettings],
    broker: KafkaServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = broker.new_topic()
    identity = (
        KafkaStreams(lake_in(InMemoryStore()), KafkaSettings("kafka", broker.bootstrap))
        .info(topic)
        .identity
    )
    assert identity is not None
    monkeypatch.setenv("KAFKA_PASSWORD", SECRET)
    streams = KafkaStreams(lake_in(InMemoryStore()), login())
    facts = TopicFacts(streams.settings, topic, topic, identity, 1)
    asked: dict[str, Callable[[], object]] = {
        "topics": streams.list_streams,
        "describe": lambda: streams.info(topic),
        "read": lambda: list(read_ranges(facts, [TopicRange(0, 0, 5)])),
        "append": lambda: _sent(facts),
    }
    with pytest.raises(
        ConfigurationError, match=r"Kafka system 'kafka' .* rejected the connection"
    ) as caught:
        asked[ask]()
    assert SECRET not in str(caught.value)
    assert "credentials" in caught.value.next_step


def _sent(facts: TopicFacts) -> object:
    from dagster_adjunct.resources.streams.kafka.produce import Sender

    sender = Sender(facts)
    sender.send([(b"k", b"v", 0, [])])
    return sender.finish()


@server
def test_a_broker_whose_certificate_is_not_trusted_is_refused(
    login: Callable[..., KafkaSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", guarded.PASSWORD)
    guarded._certificates(tmp_path)  # of another authority
    streams = KafkaStreams(
        lake_in(InMemoryStore()), login(ssl_ca_location=str(tmp_path / "ca.pem"))
    )
    with pytest.raises(ConfigurationError, match="rejected the connection: SSL"):
        streams.info("private")


@server
def test_a_client_factory_gives_the_password_in_each_process(
    login: Callable[..., KafkaSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "overridden")
    monkeypatch.setenv("ANOTHER_PLACE", guarded.PASSWORD)
    streams = KafkaStreams(lake_in(InMemoryStore()), login(f"{FACTORIES}:login_settings"))
    assert isinstance(streams.list_streams(), list)


def _with_tokens(broker: KafkaServer, factory: str) -> KafkaSettings:
    client = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    return KafkaSettings("kafka", broker.addresses["TOKENS"], client, f"{FACTORIES}:{factory}")


@server
def test_a_callback_gives_tokens_to_every_kind_of_client(broker: KafkaServer) -> None:
    settings = _with_tokens(broker, "token_settings")
    streams = KafkaStreams(lake_in(InMemoryStore()), settings)
    topic = broker.new_topic()
    table = pa.table(
        {"key": pa.array([None], pa.binary()), "value": pa.array([b"\0"], pa.binary())}
    )
    streams.append(topic, table, producer="me", sequence=1)
    there = pickle.loads(pickle.dumps(streams.topic(topic)))
    read = read_ranges(there, [TopicRange(0, 0, 1)])
    assert [message.value() for _, got in read for message in got] == [b"\0"]


@server
def test_a_callback_without_a_token_is_a_passing_trouble(broker: KafkaServer) -> None:
    streams = KafkaStreams(lake_in(InMemoryStore()), _with_tokens(broker, "no_token_settings"))
    with pytest.raises(StreamUnavailableError) as caught:
        streams.info("private")
    assert caught.value.system == "kafka"
    assert str(caught.value.__cause__) == "the token service is away"


def test_nothing_that_is_kept_or_displayed_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", SECRET)
    settings = KafkaSettings("kafka", "127.0.0.1:9", {"sasl.password": "env:KAFKA_PASSWORD"})
    assert resolve_client_settings(settings) == {
        "bootstrap.servers": "127.0.0.1:9",
        "sasl.password": SECRET,
    }
    streams = KafkaStreams(lake_in(InMemoryStore()), settings)
    for held in (
        pickle.dumps(settings),
        repr(settings).encode(),
        repr(streams).encode(),
        repr(vars(streams)).encode(),
    ):
        assert SECRET.encode() not in held
    assert resolve_client_settings(pickle.loads(pickle.dumps(settings)))["sasl.password"] == SECRET


@pytest.mark.parametrize(
    "key",
    [
        "sasl.password", "ssl.key.password", "ssl.keystore.password", "sasl.oauthbearer.client.secret", "ssl.key.pem",
        "sasl.oauthbearer.config", "sasl.oauthbearer.assertion.private.key.passphrase", "SASL.PASSWORD",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [SECRET, "env:", "env:NOT A NAME", 12345, SECRET.encode()])
def test_a_secret_in_plain_text_is_refused_by_its_name_alone(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kafka_system("secrets", bootstrap_servers="127.0.0.1:9", client={key: value})
    assert caught.value.setting == key
    assert str(value) not in str(caught.value).replace("env:NAME", "")


@pytest.mark.parametrize(
    "key",
    [
        "group.id", "enable.auto.commit", "isolation.level", "auto.offset.reset", "transactional.id", "acks",
        "bootstrap.servers", "plugin.library.paths",
    ],
)  # fmt: skip
def test_a_setting_that_promises_rest_on_can_not_be_changed(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KafkaSettings("kafka", "127.0.0.1:9", {key: "x"})
    assert caught.value.setting == key


@pytest.mark.parametrize(
    ("client", "factory", "message"),
    [
        ({"nonsense.setting": 1}, None, "No such configuration property"),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
            None,
            "sasl.username and sasl.password must be",
        ),
        (
            {"sasl.password": "env:NOT_THERE"},
            None,
            "'sasl.password' is to be taken from the environment variable NOT_",
        ),
        ({}, f"{FACTORIES}:nothing", "can't be imported"),
        ({}, "no.such.module:nothing", "can't be imported"),
        ({}, f"{FACTORIES}:login_settings", "failed with KeyError"),
        ({}, f"{FACTORIES}:not_settings", "returned a list"),
        ({}, f"{FACTORIES}:group_settings", r"returned group\.id, which Adjunct sets itself"),
    ],
)
def test_settings_that_no_client_can_be_made_of_are_refused(
    client: Any, factory: str | None, message: str
) -> None:
    streams = KafkaStreams(
        lake_in(InMemoryStore()), KafkaSettings("kafka", "127.0.0.1:9", client, factory)
    )
    with pytest.raises(ConfigurationError, match=message):
        streams.list_streams()


def test_the_error_of_a_client_factory_is_not_handed_on_as_it_may_hold_a_secret() -> None:
    settings = KafkaSettings("kafka", "127.0.0.1:9", client_factory=f"{FACTORIES}:login_settings")
    with pytest.raises(ConfigurationError) as caught:
        KafkaStreams(lake_in(InMemoryStore()), settings).list_streams()
    assert caught.value.argument == "client_factory"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("client", "factory", "message"),
    [
        ({"oauth_cb": print}, None, "'oauth_cb' is a builtin_function_or_method"),
        ({"debug": None}, None, "'debug' is a NoneType"),
        ({}, "module.function", "expected a function, as"),
        ({}, "module:", "expected a function, as"),
    ],
)
def test_settings_that_can_not_travel_are_refused(
    client: Any, factory: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        KafkaSettings("kafka", "127.0.0.1:9", client, factory)


@pytest.mark.parametrize(
    ("client", "kind"),
    [
        (
            {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"},
            StreamUnavailableError,
        ),
        (
            {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER"},
            StreamUnavailableError,
        ),
        ({}, ConfigurationError),
    ],
)
def test_a_rejected_token_is_transient_and_a_rejected_password_is_not(
    client: dict[str, Any], kind: type[Exception]
) -> None:
    from confluent_kafka import KafkaError

    settings = KafkaSettings("main", "127.0.0.1:9", client)
    refusals = BrokerRefusals(settings)
    new_client("producer", settings, {}, refusals)
    refusals(KafkaError(KafkaError._AUTHENTICATION))
    with pytest.raises(kind):
        refusals.check()


@pytest.mark.lengthy
def test_what_librdkafka_says_is_logged_once_for_each_broker_and_cause(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = KafkaSettings("far", "localhost:1,127.0.0.1:2")
    kinds: list[tuple[Any, dict[str, Any]]] = [
        ("producer", {}),
        ("consumer", {"group.id": "g"}),
        ("admin", {}),
    ]
    clients = [new_client(kind, settings, own, BrokerRefusals(settings)) for kind, own in kinds * 2]
    for turn in range(200):
        for client in clients:
            client.poll(0.05)
        if turn >= 20 and len(caplog.records) >= 2:
            break
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.split("/bootstrap")[0] for line in lines] == [
        "Kafka system 'far': 127.0.0.1:2",
        "Kafka system 'far': localhost:1",
    ]
    assert {(record.name, record.levelname) for record in caplog.records} == {
        ("adjunct.kafka", "ERROR")
    }
    assert "rdkafka" not in capfd.readouterr().err


def test_causes_that_were_logged_are_kept_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    for turn in range(1_500):
        ClientLog("many").log(
            logging.ERROR, "", "FAIL", "", f"host{turn}.example:9092: Connect failed"
        )
    ClientLog("many").log(logging.ERROR, "", "FAIL", "", "host1499.example:9092: Connect failed")
    assert len(caplog.records) == 1_500
    assert len(kafka_client._logged) <= 1_000

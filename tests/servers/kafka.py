"""A real Kafka broker on 127.0.0.1, one a test process: KRaft, one node, its jars from
`.ci/install-kafka.sh`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers.ports import free_port
from tests.servers.s3 import ROOT

if TYPE_CHECKING:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient

READY_SECONDS = 240.0
_JAVA = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
# One node holds all copies, cleans and times out at once, and keeps its buffers small.
_SETTINGS = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.cleaner.io.buffer.size": "262144",
    "log.retention.ms": "-1",
    "log.retention.check.interval.ms": "500",
    "log.initial.task.delay.ms": "100",
    "log.segment.delete.delay.ms": "500",
    # Until the controller has missed the broker for so long, a crashed one may not register again.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
}


@dataclass
class KafkaServer:
    """A broker. `bootstrap` is its plain listener; `addresses` has the others, by name. A
    restart keeps all of them.
    """

    folder: Path
    port: int
    settings: Mapping[str, str]
    addresses: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def admin(self) -> AdminClient:
        """Return a client of its own: hold it until what it began has ended."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.bootstrap})

    def producer(self, **settings: Any) -> Producer:
        """Return a producer of the test's own; underscores in names are dots
        (`transactional_id`).
        """
        from confluent_kafka import Producer

        own = {name.replace("_", "."): value for name, value in settings.items()}
        return Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, **own})

    def create_topic(self, name: str, partitions: int = 1, **config: str | int) -> str:
        """Create a topic, wait for its leaders, and return its name; underscores in its
        settings' names are dots.
        """
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import NewTopic, OffsetSpec

        own = {key.replace("_", "."): str(value) for key, value in config.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=own)
        admin = self.admin()
        admin.create_topics([topic])[name].result(30)
        wanted = {
            TopicPartition(name, partition): OffsetSpec.latest() for partition in range(partitions)
        }
        for _ in range(100):
            try:
                for future in admin.list_offsets(wanted).values():
                    future.result(30)
                return name
            except KafkaException:  # partitions without a leader yet
                time.sleep(0.05)
        raise AssertionError(f"topic {name!r} has no leaders")

    def new_topic(self, partitions: int = 1, **config: str | int) -> str:
        """Create a topic of a name of its own and return that."""
        return self.create_topic(f"t-{uuid.uuid4().hex[:10]}", partitions, **config)

    def delete_topic(self, name: str) -> None:
        admin = self.admin()
        admin.delete_topics([name])[name].result(30)

    def start(self) -> None:
        """Start the broker on its folder and wait until it answers."""
        with (self.folder / "kafka.log").open("ab") as log:
            self.process = subprocess.Popen(
                _java("kafka.Kafka", str(self.folder / "server.properties")),
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log_end = (self.folder / "kafka.log").read_text(errors="replace")[-3000:]
                pytest.fail(f"the Kafka broker did not start:\n{log_end}")

    def stop(self, *, crash: bool = False) -> None:
        """End the broker; `crash` gives it no time to close its files."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGKILL if crash else signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException

        time.sleep(0.1)
        # The client would write of every connection that is refused.
        with (
            suppress(OSError, KafkaException),
            socket.create_connection(("127.0.0.1", self.port), 1),
        ):
            # It takes connections before it has registered itself.
            return bool(self.admin().list_topics(timeout=1).brokers)
        return False


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaServer]:
    """A broker with a plain listener; skipped where its jars are missing, unless CI is set."""
    check_jars()
    folder = Path(tempfile.mkdtemp(prefix="adjunct-kafka-"))
    try:
        with start_kafka(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def start_kafka(
    folder: Path,
    extra: Mapping[str, str] | None = None,
    *,
    listeners: Mapping[str, str] | None = None,
) -> Iterator[KafkaServer]:
    """Run a broker in this folder while the context lasts.

    `extra` are more of its settings. `listeners` are more ways in, each a name and its security
    protocol, as in {"GUARDED": "SASL_PLAINTEXT"}: `addresses["GUARDED"]` then is where it listens.
    """
    check_jars()
    named = {"PLAIN": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(listeners or {})}
    ports = {name: free_port() for name in named}
    ways = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    settings = {
        **_SETTINGS,
        "log.dirs": str(folder / "data"),
        "listeners": ",".join(f"{name}://{way}" for name, way in ways.items()),
        "advertised.listeners": ",".join(
            f"{name}://{way}" for name, way in ways.items() if name != "CONTROLLER"
        ),
        "listener.security.protocol.map": ",".join(
            f"{name}:{protocol}" for name, protocol in named.items()
        ),
        "inter.broker.listener.name": "PLAIN",
        "controller.quorum.voters": f"1@{ways['CONTROLLER']}",
        **(extra or {}),
    }
    (folder / "server.properties").write_text(
        "".join(f"{key}={value}\n" for key, value in settings.items())
    )
    cluster = "ATestClusterAAAAAAAAAA"
    format_it = (
        "kafka.tools.StorageTool",
        "format",
        "-t",
        cluster,
        "-c",
        str(folder / "server.properties"),
    )
    done = subprocess.run(
        _java(*format_it), capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, (
        f"formatting Kafka's folder failed: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    )
    server = KafkaServer(folder, ports["PLAIN"], settings, ways)
    server.start()
    try:
        yield server
    finally:
        server.stop(crash=True)


def check_jars() -> None:
    """Skip the test where the broker's jars are missing; in CI, fail it."""
    if any(_jars().glob("kafka_2.13-*.jar")):
        return
    reason = (
        "no Kafka broker: run .ci/install-kafka.sh (fetches 43 MB of jars), or set"
        " ADJUNCT_KAFKA_JARS."
    )
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _jars() -> Path:
    return Path(os.environ.get("ADJUNCT_KAFKA_JARS") or ROOT / ".cache/kafka")


def _java(*command: str) -> list[str]:
    java = Path(os.environ["JAVA_HOME"]) / "bin/java" if os.environ.get("JAVA_HOME") else "java"
    logging = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return [str(java), *_JAVA, logging, "-cp", f"{_jars()}/*", *command]

"""Asks a Kafka cluster about topics: which there are, their partitions, ids, settings and offsets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    StreamNotFoundError,
    StreamUnavailableError,
)
from dagster_adjunct.resources.streams.kafka.security import BrokerRefusals, new_client

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

    from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings

T = TypeVar("T")
_LOOK = 0.05
_WARNINGS = 4
_GREATEST = 2**63 - 1
_LEADER_SECONDS = 0.2
_PROPAGATION_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as the cluster has it. `identity` is its id, another one after it was deleted and made anew."""

    topic: str
    identity: str
    partitions: int


class KafkaAdmin:
    """The client that answers. It is made when first needed and kept; threads may share it.

    Every call raises StreamUnavailableError where brokers do not answer within `socket.timeout.ms` (60 s), and
    ConfigurationError where they refuse us.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self._refusals = BrokerRefusals(settings)
        self._lock = threading.Lock()
        self._client: AdminClient | None = None

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        from confluent_kafka import KafkaException

        deadline, part = time.monotonic() + patience(self.settings), 1.0
        while True:
            # In parts, each longer than the one before: while it waits, the client does not tell that we are refused.
            left = max(deadline - time.monotonic(), 0.1)
            try:
                return sorted(self._connected().list_topics(timeout=min(left, part)).topics)
            except KafkaException as error:
                explained = self._explained(error.args[0], "its topics")
                if left <= part or not isinstance(explained, StreamUnavailableError):
                    raise explained from error
            part *= 2

    def describe(self, topic: str) -> TopicDescription | None:
        """Return the topic, or None where there is none."""
        from confluent_kafka import KafkaException, TopicCollection

        asked = self._connected().describe_topics(TopicCollection([topic]))
        try:
            (description,) = self._answers(asked, f"topic {topic!r}").values()
        except KafkaException as error:
            if error.args[0].code() == error.args[0].UNKNOWN_TOPIC_OR_PART:
                return None
            raise self._explained(error.args[0], f"topic {topic!r}") from error
        return TopicDescription(topic, str(description.topic_id), len(description.partitions))

    def config(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic, by Kafka's names; none where the cluster does not let us see them."""
        from confluent_kafka import KafkaException

        kafka = _api()
        asked = self._connected().describe_configs([kafka.ConfigResource(kafka.RESOURCE_TOPIC, topic)])
        try:
            (settings,) = self._answers(asked, f"the settings of topic {topic!r}").values()
        except KafkaException as error:
            if error.args[0].code() in (error.args[0].TOPIC_AUTHORIZATION_FAILED, error.args[0].UNKNOWN_TOPIC_OR_PART):
                return {}
            raise self._explained(error.args[0], f"the settings of topic {topic!r}") from error
        return {name: entry.value for name, entry in settings.items() if entry.value is not None}

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic, unless there is one, and wait until the cluster shows it and tells its offsets."""
        from confluent_kafka import KafkaException

        asked = self._connected().create_topics(
            [_api().NewTopic(topic, num_partitions=partitions, replication_factor=-1)]
        )
        try:
            self._answers(asked, f"topic {topic!r}")
        except KafkaException as error:
            if error.args[0].code() != error.args[0].TOPIC_ALREADY_EXISTS:
                raise self._explained(error.args[0], f"topic {topic!r}, which was to be created") from error
        deadline = time.monotonic() + _PROPAGATION_SECONDS
        while self.describe(topic) is None:
            if time.monotonic() > deadline:
                raise StreamUnavailableError(
                    f"{self.settings.where} created topic {topic!r}, but does not show it.",
                    "Try again in a moment.",
                    system=self.settings.name,
                )
            time.sleep(_LOOK)
        self.upcoming(topic, range(partitions))

    def oldest(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the first offset of each partition. One request a broker, as for all offsets."""
        return self._offsets(topic, partitions, _api().OffsetSpec.earliest())

    def upcoming(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the last stable offset of each partition: everything before it is decided, and may be read."""
        return self._offsets(topic, partitions, _api().OffsetSpec.latest())

    def since(self, topic: str, partitions: Iterable[int], timestamp_ms: int) -> dict[int, int]:
        """Return where each partition has its first entry at or after this time (ms), -1 where there is none.

        The entry may be one that readers don't see: of an aborted transaction, or what ends one.
        """
        # Below 0 Kafka takes a time for another question: -1 asks for the end.
        spec = _api().OffsetSpec.for_timestamp(min(max(timestamp_ms, 0), _GREATEST))
        return self._offsets(topic, partitions, spec)

    def _offsets(self, topic: str, partitions: Iterable[int], spec: Any) -> dict[int, int]:
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

        wanted = {TopicPartition(topic, partition): spec for partition in partitions}
        if not wanted:
            return {}
        what, deadline = f"the offsets of topic {topic!r}", time.monotonic() + patience(self.settings)
        while True:
            asked = self._connected().list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED)
            try:
                return {at.partition: answer.offset for at, answer in self._answers(asked, what).items()}
            except KafkaException as error:
                # While a partition gets another leader, the client does not ask again by itself.
                if error.args[0].code() not in _moving(error.args[0]) or time.monotonic() > deadline:
                    raise self._explained(error.args[0], what) from error
                time.sleep(_LEADER_SECONDS)

    def _connected(self) -> AdminClient:
        with self._lock:
            if self._client is None:
                own = {} if "log_level" in self.settings.client else {"log_level": _WARNINGS}
                self._client = new_client("admin", self.settings, own, self._refusals)
            return self._client

    def _answers(self, asked: Mapping[Any, Future[T]], what: str) -> dict[Any, T]:
        """Return what was answered; raises as soon as a broker is known to refuse us, or an answer is an error."""
        deadline = time.monotonic() + patience(self.settings) + 1
        pending = set(asked.values())
        while pending:
            _, pending = wait(pending, timeout=_LOOK)
            if pending:
                self._connected().poll(0)
                self._check()
            if pending and time.monotonic() > deadline:
                raise no_answer(self.settings, what, "no answer")
        return {key: future.result() for key, future in asked.items()}

    def _check(self) -> None:
        """Raise if brokers refused us; the client, which would go on trying and may lock the account, is dropped."""
        try:
            self._refusals.check()
        except AdjunctError:
            with self._lock:
                self._client, self._refusals = None, BrokerRefusals(self.settings)
            raise

    def _explained(self, error: KafkaError, what: str) -> AdjunctError:
        self._connected().poll(0)
        try:
            self._check()
        except AdjunctError as refused:
            return refused
        return failure(error, self.settings, what)


def _api() -> Any:
    """Return the client's admin module, which tells type checkers little of what it has."""
    import confluent_kafka.admin

    return confluent_kafka.admin


def patience(settings: KafkaSettings) -> float:
    """Return for how many seconds brokers may leave us without an answer: the client's own `socket.timeout.ms`."""
    return float(settings.client.get("socket.timeout.ms", 60_000)) / 1000


def no_answer(settings: KafkaSettings, what: str, reason: str) -> StreamUnavailableError:
    return StreamUnavailableError(
        f"{settings.where} did not tell of {what}: {reason}.",
        "See whether its brokers are up and can be reached from here, then try again.",
        system=settings.name,
    )


def failure(error: KafkaError, settings: KafkaSettings, what: str) -> AdjunctError:
    """Return the error of ours that says what Kafka's means when we ask for something, or read it."""
    code, reason = error.code(), f"{error.name()}: {error.str()}"
    if code in (error.UNKNOWN_TOPIC_OR_PART, error._UNKNOWN_TOPIC, error._UNKNOWN_PARTITION):
        return StreamNotFoundError(
            f"{settings.where} does not have {what} ({reason}).",
            "See whether the topic was deleted.",
            system=settings.name,
        )
    if error.retriable() or code in _passing(error):
        return no_answer(settings, what, reason)
    return ConfigurationError(
        f"{settings.where} refused {what} ({reason}).",
        "See the settings and the access rules of the cluster.",
        system=settings.name,
    )


def _passing(error: KafkaError) -> frozenset[int]:
    """Return the codes of what passes: nobody answers, or not the right one."""
    return _moving(error) | {
        error._TRANSPORT, error._TIMED_OUT, error._TIMED_OUT_QUEUE, error._ALL_BROKERS_DOWN, error._RESOLVE,
        error._WAIT_COORD, error._RETRY, error.REQUEST_TIMED_OUT, error.NETWORK_EXCEPTION, error.BROKER_NOT_AVAILABLE,
    }  # fmt: skip


def _moving(error: KafkaError) -> frozenset[int]:
    """Return the codes of partitions that just get another leader."""
    return frozenset(
        {
            error.LEADER_NOT_AVAILABLE, error.NOT_LEADER_FOR_PARTITION, error.KAFKA_STORAGE_ERROR,
            error.OFFSET_NOT_AVAILABLE, error.FENCED_LEADER_EPOCH, error.UNKNOWN_LEADER_EPOCH,
        }
    )  # fmt: skip

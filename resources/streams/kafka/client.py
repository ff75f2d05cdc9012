"""Kafka clients: their settings and secrets, their logs and errors, and an admin client.

Settings of librdkafka are passed through. A secret is "env:NAME" wherever settings are stored,
displayed or pickled; `resolve_client_settings` replaces it in the process that creates a client.
Callbacks, such as one that fetches tokens, come from `client_factory`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from cachetools import TTLCache
from pydantic import SkipValidation

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic, check_topic_name
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

# Validated here instead of by pydantic, whose errors would contain a secret.
SettingValue = SkipValidation[str | int | float | bool]
_REFERENCE = "env:"
_SECRET = re.compile(
    r"(^|[._])(password|passphrase|secret|pem|token|user\.info)$|^sasl\.oauthbearer\.config$",
    re.IGNORECASE,
)
# Settings that users may not give: reading and writing depend on them, or they would load code.
_RESERVED_SETTINGS = {
    **dict.fromkeys(("bootstrap.servers", "metadata.broker.list"), "give it as bootstrap_servers"),
    **dict.fromkeys(
        ("group.id", "enable.auto.commit", "enable.auto.offset.store"),
        "Adjunct keeps the positions itself",
    ),
    "auto.offset.reset": "an offset that is no longer available is an error",
    "isolation.level": "reading is read_committed",
    "enable.partition.eof": "ranges end by position",
    "enable.idempotence": "producing is idempotent",
    **dict.fromkeys(("acks", "request.required.acks"), "producing waits for all replicas"),
    "transactional.id": "transactions are declared with the topic",
    "partitioner": "keys are hashed by murmur2_random",
    "plugin.library.paths": "libraries are not loaded by a setting",
}
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LOGIN_CODES = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED")
_REFUSED_CODES = (*_LOGIN_CODES, "_SSL", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE")
# A partition is changing its leader.
_LEADER_CHANGE_CODES = {
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "KAFKA_STORAGE_ERROR",
    "OFFSET_NOT_AVAILABLE",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
}
# No answer, one from the wrong broker, or one that asks to retry.
TRANSIENT_CODES = _LEADER_CHANGE_CODES | {
    "_TRANSPORT",
    "_TIMED_OUT",
    "_TIMED_OUT_QUEUE",
    "_ALL_BROKERS_DOWN",
    "_RESOLVE",
    "_WAIT_COORD",
    "_RETRY",
    "_MSG_TIMED_OUT",
    "_PURGE_QUEUE",
    "_PURGE_INFLIGHT",
    "REQUEST_TIMED_OUT",
    "NETWORK_EXCEPTION",
    "BROKER_NOT_AVAILABLE",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "CONCURRENT_TRANSACTIONS",
}
_DEFAULT_MAX_BYTES = 1_000_000
_NO_TOKEN = "Failed to acquire SASL OAUTHBEARER token"


def check_client_settings(
    client: Mapping[str, SettingValue], client_factory: str | None = None
) -> None:
    """Raise ConfigurationError for settings that contain a secret, can't be pickled, or are set by
    Adjunct.

    The error contains the name of the setting, never its value.
    """
    for key, value in client.items():
        if key in _RESERVED_SETTINGS:
            problem = f"client setting {key!r} can't be set: {_RESERVED_SETTINGS[key]}."
            raise errors.ConfigurationError(problem, "Leave it out.", setting=key)
        if not isinstance(value, str | int | float | bool):
            problem = (
                f"client setting {key!r} is a {type(value).__name__}: expected a text, a number or"
                " a boolean."
            )
            step = (
                'Return callbacks from a function, and name it: client_factory="module:function".'
            )
            raise errors.ConfigurationError(problem, step, setting=key)
        if _SECRET.search(key) and not is_env_reference(value):
            raise errors.ConfigurationError(
                f"client setting {key!r} is a secret in plain text, which would be stored, logged"
                " and sent around.",
                "Put it into an environment variable of every process, and give its name:"
                f' "{_REFERENCE}NAME".',
                setting=key,
            )
    if client_factory is not None and not _FACTORY.fullmatch(client_factory):
        problem = f"client_factory is {client_factory!r}: expected a function, as module:function."
        step = (
            "Name a function that executors can import; it takes nothing and returns librdkafka"
            " settings."
        )
        raise errors.ConfigurationError(problem, step, argument="client_factory")


@validated
@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """A Kafka cluster as a system of streams; see `kafka_system`, which creates and registers
    it.
    """

    name: str
    bootstrap_servers: str
    client: Mapping[str, SettingValue] = field(default_factory=dict)
    client_factory: str | None = None
    topics: Mapping[str, KafkaTopic] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        check_name("system", self.name)
        if not self.bootstrap_servers:
            problem = f"Kafka system {self.name!r} has no bootstrap servers."
            step = "Give them as HOST:PORT, separated by commas."
            raise errors.ConfigurationError(problem, step, argument="bootstrap_servers")
        check_client_settings(self.client, self.client_factory)
        if self.prefix:
            check_topic_name(self.prefix)
        names: dict[str, str] = {}
        for stream, topic in self.topics.items():
            check_name("stream", stream)
            other = names.setdefault(topic.name_for(stream), stream)
            if other != stream:
                raise errors.ConfigurationError(
                    f"streams {other!r} and {stream!r} of Kafka system {self.name!r} are both topic"
                    f" {topic.name_for(stream)!r}: a topic can only be one stream.",
                    "Leave one of them out.",
                    argument="topics",
                    system=self.name,
                    topic=topic.name_for(stream),
                )

    @property
    def where(self) -> str:
        """How errors name the cluster."""
        return f"Kafka system {self.name!r} ({self.bootstrap_servers})"


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What is known of a stream's topic: its name, id (`identity`), partition count and
    declaration; picklable.

    `config` are the topic's settings by Kafka's names. It is empty if these were not requested (see
    `KafkaStreams.topic`), or if we are not authorized to read them. `keys_checked_for` is the
    dataset for which reads check that each record is in its key's partition, "" for none.
    """

    settings: KafkaSettings
    stream: str
    topic: str
    identity: str
    partitions: int
    declared: KafkaTopic = field(default_factory=KafkaTopic)
    config: Mapping[str, str] = field(default_factory=dict)
    keys_checked_for: str = ""

    def __str__(self) -> str:
        return f"{self.settings.name}.{self.stream}"

    @property
    def max_bytes(self) -> int:
        """The size in bytes of the largest record that the topic accepts; the broker's default
        if it is not known.
        """
        return int(self.config.get("max.message.bytes", _DEFAULT_MAX_BYTES))

    def ssp(self, partition: int) -> SystemStreamPartition:
        """Return the partition of this number."""
        return SystemStreamPartition(self.settings.name, self.stream, partition)


def resolve_client_settings(settings: KafkaSettings) -> dict[str, Any]:
    """Return the librdkafka settings with secrets, for a client of this process. Never store or
    display them.

    Settings of `client_factory` override others. Raises ConfigurationError for a variable that is
    not set, and for a factory that fails.
    """
    client: dict[str, Any] = {
        key: resolve_secret(value, f"client setting {key!r}")
        for key, value in settings.client.items()
    }
    if settings.client_factory is not None:
        client |= _call_factory(settings.client_factory)
    return {**client, "bootstrap.servers": settings.bootstrap_servers}


def resolve_secret(value: Any, what: str) -> Any:
    """Return a setting's value; for "env:NAME", that of the variable. `what` names the setting
    in errors. Raises ConfigurationError if the variable is not set.
    """
    if not is_env_reference(value):
        return value
    name = value.removeprefix(_REFERENCE)
    if name not in os.environ:
        problem = (
            f"{what} is to be taken from the environment variable {name}, which is not set in this"
            " process."
        )
        step = f"Set {name} wherever Dagster, the command line and Spark's executors run."
        raise errors.ConfigurationError(problem, step, setting=name)
    return os.environ[name]


class BrokerRefusals:
    """A client's `error_cb` that records permanent errors of brokers, such as a rejected login or
    certificate.

    librdkafka retries after these errors for ever, so that calls only time out. `check` raises the
    error instead, once the client has been polled.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._refusal: Any = None
        self.has_tokens = False
        """Whether the client logs in by tokens, which expire and are asked for again."""

    def __call__(self, error: Any) -> None:
        """Keep an error that librdkafka reports, if it is permanent, for `check`."""
        if error.name() in _REFUSED_CODES:
            self._refusal = error

    def check(self) -> None:
        """Raise ConfigurationError if a broker rejected us, StreamUnavailableError if no token
        could be fetched.
        """
        if self._refusal is None:
            return
        reason = str(self._refusal.str())
        if reason.startswith(_NO_TOKEN):
            step = "Check whether the token callback's server can be reached, then retry."
            problem = f"{self._settings.where}: {reason[:300]}."
            raise errors.StreamUnavailableError(problem, step, system=self._settings.name)
        problem = (
            f"{self._settings.where} rejected the connection: {self._refusal.name().lstrip('_')}:"
            f" {reason[:300]}."
        )
        if self.has_tokens and self._refusal.name() in _LOGIN_CODES:
            step = (
                "The token has expired, or is wrong: the next client asks the token callback for"
                " another one."
            )
            raise errors.StreamUnavailableError(problem, step, system=self._settings.name)
        step = "Check security.protocol, the SASL mechanism and credentials, and the certificates."
        raise errors.ConfigurationError(problem, step, system=self._settings.name)


_log = logging.getLogger("adjunct.kafka")
_LOG_INTERVAL = 600.0  # seconds
_logged: TTLCache[tuple[str, str, str], None] = TTLCache(1000, _LOG_INTERVAL)
_logging = threading.Lock()
_THREAD = re.compile(r"^\[thrd:[^]]*\]: ")
# The parts by which log lines of the same cause differ: durations, addresses, client names.
_VARYING_PARTS = re.compile(r"\s*\([^()]*\)|ipv[46]#\S+|\b\d+\b")


class ClientLog:
    """A logger for librdkafka: a process logs the same cause for the same broker at most once in
    ten minutes.

    Lines arrive when the client is polled. Without a logger they are written to the terminal.
    """

    def __init__(self, system: str) -> None:
        self._system = system

    def log(self, level: int, form: str, facility: str, client: str, line: str) -> None:
        """Log a line; `facility` is librdkafka's category, such as "FAIL", `client` the client's
        name.
        """
        text = _THREAD.sub("", line)
        broker = text.partition(": ")[0]
        cause = (self._system, facility, broker + _VARYING_PARTS.sub("", text.removeprefix(broker)))
        with _logging:
            is_new = cause not in _logged
            _logged.setdefault(cause, None)
        if is_new:
            _log.log(level, "Kafka system %r: %s", self._system, text)


# By default, an unreachable broker is tried ten times a second, and each time a line is logged.
_DEFAULTS: Mapping[str, Any] = {"reconnect.backoff.ms": 500}


def new_client(
    kind: Literal["admin", "consumer", "producer"],
    settings: KafkaSettings,
    own: Mapping[str, Any],
    refusals: BrokerRefusals,
) -> Any:
    """Return a new client with the system's settings, overridden by the caller's `own`.

    Raises ConfigurationError for settings that librdkafka rejects, and StreamUnavailableError if
    the token callback fails. Poll the client before `refusals.check()`.
    """
    from confluent_kafka import Consumer, KafkaException, Producer
    from confluent_kafka.admin import AdminClient

    client: Any = {"admin": AdminClient, "consumer": Consumer, "producer": Producer}[kind]
    always = {**_DEFAULTS, "logger": ClientLog(settings.name)}
    try:
        resolved = _with_token(resolve_client_settings(settings), settings)
        mechanism = resolved.get("sasl.mechanism", resolved.get("sasl.mechanisms"))
        refusals.has_tokens = str(mechanism) == "OAUTHBEARER"
        return client({**always, **resolved, **own, "error_cb": refusals})
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        # The cause may contain the settings.
        raise errors.ConfigurationError(
            f"Kafka system {settings.name!r}: the client settings can't be used: {reason}.",
            "Correct client= of kafka_system; the names are those of librdkafka.",
            system=settings.name,
            argument="client",
        ) from None


def _with_token(client: dict[str, Any], settings: KafkaSettings) -> dict[str, Any]:
    """Return the settings of a client that has a first token.

    The token is fetched here, since a client that does not get one only waits, without an error.
    """
    callback = client.get("oauth_cb")
    if callback is None:
        return client
    try:
        first = [callback(client.get("sasl.oauthbearer.config", ""))]
    except errors.AdjunctError:
        raise
    except Exception as error:
        raise errors.StreamUnavailableError(
            f"Kafka system {settings.name!r}: could not get a token: the callback failed with"
            f" {type(error).__name__}.",
            "Check whether the callback's server can be reached from here, then retry.",
            system=settings.name,
        ) from error
    # The client's own first request gets that token, later ones ask again.
    return {**client, "oauth_cb": lambda config: first.pop() if first else callback(config)}


def _call_factory(factory: str) -> Mapping[str, Any]:
    """Return the settings that a client factory, named as "module:function", returns.

    Raises ConfigurationError if it can't be imported, fails, or returns no mapping or settings that
    users may not give. An AdjunctError that it raises is raised as it is.
    """
    module, _, name = factory.partition(":")

    def error(problem: str, next_step: str) -> errors.ConfigurationError:
        return errors.ConfigurationError(
            f"client_factory {factory!r} {problem}.", next_step, argument="client_factory"
        )

    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as cause:
        step = (
            "Name a function of a module that is installed wherever Dagster and Spark's executors"
            " run."
        )
        raise error(f"can't be imported: {cause}", step) from cause
    try:
        made = function()
    except errors.AdjunctError:
        raise
    except Exception as cause:  # noqa: BLE001
        step = "Call it in this process's environment, without arguments, to see its error."
        # The cause may contain a secret.
        raise error(f"failed with {type(cause).__name__}", step) from None
    if not isinstance(made, Mapping):
        raise error(f"returned a {type(made).__name__}", "Return a dict of librdkafka settings.")
    reserved = {*_RESERVED_SETTINGS, "error_cb"}  # by which `new_client` notices rejections
    not_allowed = sorted(reserved.intersection(made))
    if not_allowed:
        raise error(
            f"returned {', '.join(not_allowed)}, which Adjunct sets itself", "Leave them out."
        )
    return made


def is_env_reference(value: object) -> bool:
    """Whether a setting is "env:NAME", which stands for the variable of this name."""
    return isinstance(value, str) and re.fullmatch(r"env:[A-Za-z_]\w*", value) is not None


T = TypeVar("T")
_POLL_SECONDS = 0.05
_WARNINGS = 4
_GREATEST = 2**63 - 1
_LEADER_SECONDS = 0.2
_PROPAGATION_SECONDS = 30.0


class TopicDescription(NamedTuple):
    """A topic's id, which changes when it is recreated, and its number of partitions."""

    id: str
    partitions: int


class KafkaAdmin:
    """An admin client, which connects on first use; threads may share it.

    Every call raises StreamUnavailableError if brokers do not answer within `socket.timeout.ms` (60
    s), and ConfigurationError if they reject us.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self._refusals = BrokerRefusals(settings)
        self._lock = threading.Lock()
        self._client: AdminClient | None = None

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + response_timeout(self.settings)
        step_seconds = 1.0
        while True:
            # In steps of growing length, since the client does not report a rejection while it
            # waits.
            left = max(deadline - time.monotonic(), 0.1)
            try:
                return sorted(self._connected().list_topics(timeout=min(left, step_seconds)).topics)
            except KafkaException as error:
                translated = self._translate_error(error.args[0], "its topics")
                is_last = left <= step_seconds
                if is_last or not isinstance(translated, errors.StreamUnavailableError):
                    raise translated from error
            step_seconds *= 2

    def describe(self, topic: str) -> TopicDescription | None:
        """Return the topic's id and number of partitions; None if there is no such topic."""
        from confluent_kafka import TopicCollection

        asked = self._connected().describe_topics(TopicCollection([topic]))
        description = self._answer(asked, f"topic {topic!r}", {"UNKNOWN_TOPIC_OR_PART"})
        if description is None:
            return None
        return TopicDescription(str(description.topic_id), len(description.partitions))

    def config(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic by Kafka's names; none if we are not authorized to read
        them.
        """
        kafka = _api()
        asked = self._connected().describe_configs(
            [kafka.ConfigResource(kafka.RESOURCE_TOPIC, topic)]
        )
        settings = self._answer(
            asked,
            f"the settings of topic {topic!r}",
            {"TOPIC_AUTHORIZATION_FAILED", "UNKNOWN_TOPIC_OR_PART"},
        )
        return {
            name: entry.value for name, entry in (settings or {}).items() if entry.value is not None
        }

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic unless it exists, and wait until its offsets are available."""
        new = _api().NewTopic(topic, num_partitions=partitions, replication_factor=-1)
        asked = self._connected().create_topics([new])
        self._answer(asked, f"topic {topic!r}, which was to be created", {"TOPIC_ALREADY_EXISTS"})
        deadline = time.monotonic() + _PROPAGATION_SECONDS
        while self.describe(topic) is None:
            if time.monotonic() > deadline:
                problem = (
                    f"{self.settings.where} created topic {topic!r}, but does not list it yet."
                )
                raise errors.StreamUnavailableError(
                    problem, "Retry in a moment.", system=self.settings.name
                )
            time.sleep(_POLL_SECONDS)
        self.upcoming(topic, range(partitions))  # waits until each partition has a leader

    def oldest(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the first offset of each partition. One request per broker, as for `upcoming`
        and `since`.
        """
        return self._offsets(topic, partitions, _api().OffsetSpec.earliest())

    def upcoming(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the last stable offset of each partition: no open transaction is before it."""
        return self._offsets(topic, partitions, _api().OffsetSpec.latest())

    def since(self, topic: str, partitions: Iterable[int], timestamp_ms: int) -> dict[int, int]:
        """Return the offset of each partition's first entry at or after this time (ms since the
        epoch), -1 without one.

        Readers may not see this entry: it may be of an aborted transaction, or a control record.
        """
        # Negative times have another meaning in Kafka: -1 is the end.
        spec = _api().OffsetSpec.for_timestamp(min(max(timestamp_ms, 0), _GREATEST))
        return self._offsets(topic, partitions, spec)

    def _offsets(self, topic: str, partitions: Iterable[int], spec: Any) -> dict[int, int]:
        """Return the offset of each partition that `spec` asks for, as readers of committed records
        see it.
        """
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

        wanted = {TopicPartition(topic, partition): spec for partition in partitions}
        if not wanted:
            return {}
        what = f"the offsets of topic {topic!r}"
        deadline = time.monotonic() + response_timeout(self.settings)
        while True:
            asked = self._connected().list_offsets(
                wanted, isolation_level=IsolationLevel.READ_COMMITTED
            )
            try:
                return {
                    at.partition: answer.offset for at, answer in self._answers(asked, what).items()
                }
            except KafkaException as error:
                # The client does not retry while a partition changes its leader.
                if error.args[0].name() not in _LEADER_CHANGE_CODES or time.monotonic() > deadline:
                    raise self._translate_error(error.args[0], what) from error
                time.sleep(_LEADER_SECONDS)

    def _connected(self) -> AdminClient:
        """Return the client, created on first use."""
        with self._lock:
            if self._client is None:
                own = {}
                if "log_level" not in self.settings.client:
                    own = {"log_level": _WARNINGS}
                self._client = new_client("admin", self.settings, own, self._refusals)
            return self._client

    def _answer(self, asked: Mapping[Any, Future[Any]], what: str, ignored: Collection[str]) -> Any:
        """Return the answer to a request that is about one thing, None for an error with one of
        the `ignored` codes.
        """
        from confluent_kafka import KafkaException

        try:
            (answer,) = self._answers(asked, what).values()
        except KafkaException as error:
            if error.args[0].name() in ignored:
                return None
            raise self._translate_error(error.args[0], what) from error
        return answer

    def _answers(self, asked: Mapping[Any, Future[T]], what: str) -> dict[Any, T]:
        """Return the answers by what was asked; raise as soon as a broker rejects us or an
        answer is an error.
        """
        deadline = time.monotonic() + response_timeout(self.settings) + 1
        pending = set(asked.values())
        while pending:
            _, pending = wait(pending, timeout=_POLL_SECONDS)
            if pending:
                self._connected().poll(0)
                self._check()
            if pending and time.monotonic() > deadline:
                raise no_answer_error(self.settings, what, "no answer")
        return {key: future.result() for key, future in asked.items()}

    def _check(self) -> None:
        """Raise if brokers rejected us; then also drop the client, since its retries could get
        the account locked.
        """
        try:
            self._refusals.check()
        except errors.AdjunctError:
            with self._lock:
                self._client = None
                self._refusals = BrokerRefusals(self.settings)
            raise

    def _translate_error(self, error: KafkaError, what: str) -> errors.AdjunctError:
        """Return the Adjunct error for an error of Kafka, or for the rejection by brokers that
        caused it.
        """
        self._connected().poll(0)
        try:
            self._check()
        except errors.AdjunctError as refused:
            return refused
        return translate_kafka_error(error, self.settings, what)


def _api() -> Any:
    """Return the client's admin module as Any, since its type hints are incomplete."""
    import confluent_kafka.admin

    return confluent_kafka.admin


def response_timeout(settings: KafkaSettings) -> float:
    """Return the seconds to wait for an answer of brokers: the client's `socket.timeout.ms`."""
    return float(settings.client.get("socket.timeout.ms", 60_000)) / 1000


def no_answer_error(
    settings: KafkaSettings, what: str, reason: str
) -> errors.StreamUnavailableError:
    """Return the error for a request that no broker answered in time."""
    step = "Check whether its brokers are up and can be reached from here, then retry."
    problem = f"{settings.where} did not return {what}: {reason}."
    return errors.StreamUnavailableError(problem, step, system=settings.name)


def translate_kafka_error(
    error: KafkaError, settings: KafkaSettings, what: str
) -> errors.AdjunctError:
    """Return the Adjunct error for a Kafka error of a request or a read."""
    reason = f"{error.name()}: {error.str()}"
    if error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"):
        problem = f"{settings.where} does not have {what} ({reason})."
        return errors.StreamNotFoundError(
            problem, "Check whether the topic was deleted.", system=settings.name
        )
    if error.retriable() or error.name() in TRANSIENT_CODES:
        return no_answer_error(settings, what, reason)
    problem = f"{settings.where} rejected the request for {what} ({reason})."
    step = "Check the settings and the access rules of the cluster."
    return errors.ConfigurationError(problem, step, system=settings.name)

"""What Kafka's errors mean to an append: whether to try again, and what is to be changed otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    PermanentError,
    StreamUnavailableError,
)

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from dagster_adjunct.resources.streams.kafka.task_producer import Target

_SHOWN = 60


def refused(error: KafkaError, target: Target, key: bytes | None = None, size: int | None = None) -> AdjunctError:
    """Return the error of ours that says what Kafka's means here."""
    code, reason = error.code(), error.str()
    if code in (error._FENCED, error.PRODUCER_FENCED, error.INVALID_PRODUCER_EPOCH):
        return CommitConflictError(
            f"{target}: another producer with the same name took over while this one was appending, or the append took "
            f"longer than transaction.timeout.ms ({reason}).",
            "Nothing of this append is visible. Run one application of a name at a time, then append again: what is "
            "in already adds nothing.",
            stream=str(target),
        )
    if code == error.MSG_SIZE_TOO_LARGE:
        its_size = "" if size is None else f" has {size:,} bytes and"
        return PermanentError(
            f"{target}: the record with the key {_shown(key)}{its_size} is larger than the topic takes "
            f"({target.max_bytes:,} bytes).",
            f"Raise max.message.bytes of topic {target.topic!r} (and message.max.bytes in client=, if that is set), or "
            "make the record smaller.",
        )
    if code in _transient(error):
        return StreamUnavailableError(
            f"{target}: Kafka did not take the records ({error.name()}: {reason}).",
            "See whether the brokers are up, then append again.",
            system=target.settings.name,
            stream=str(target),
        )
    record = "" if key is None else f" the record with the key {_shown(key)}"
    return PermanentError(
        f"{target}: Kafka refused{record or ' the records'} ({error.name()}: {reason}).",
        f"See the settings and the access rules of topic {target.topic!r}, then append again.",
    )


def _transient(error: KafkaError) -> frozenset[int]:
    return frozenset(
        {
            error._MSG_TIMED_OUT, error._TIMED_OUT, error._TIMED_OUT_QUEUE, error._TRANSPORT, error._ALL_BROKERS_DOWN,
            error._RESOLVE, error._PURGE_QUEUE, error._PURGE_INFLIGHT, error._WAIT_COORD, error._RETRY,
            error.LEADER_NOT_AVAILABLE, error.NOT_LEADER_FOR_PARTITION, error.REQUEST_TIMED_OUT,
            error.NETWORK_EXCEPTION, error.BROKER_NOT_AVAILABLE, error.NOT_ENOUGH_REPLICAS,
            error.NOT_ENOUGH_REPLICAS_AFTER_APPEND, error.COORDINATOR_LOAD_IN_PROGRESS,
            error.COORDINATOR_NOT_AVAILABLE, error.NOT_COORDINATOR, error.CONCURRENT_TRANSACTIONS,
            error.KAFKA_STORAGE_ERROR,
        }
    )  # fmt: skip


def _shown(key: bytes | None) -> str:
    """Return a key as an error may show it: its text, or its bytes in hex; at most 60 characters."""
    if key is None:
        return "null"
    text = key.decode("utf-8", "replace")
    text = text if text.isprintable() and "\ufffd" not in text else key.hex()
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")

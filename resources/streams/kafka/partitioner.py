"""The partitions that Kafka's Java client chooses for keys: MurmurHash2 of their bytes.

Records outside the partition of their key were written before partitions were added, or by a
producer that chooses otherwise. Then the newest record of a key may be in another partition, and
offsets do not tell which one is newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import KeyOrderError
from dagster_adjunct.resources.lazy_modules import np
from dagster_adjunct.resources.schemas.paths import column_of
from dagster_adjunct.resources.streams.kafka.client import TopicFacts
from dagster_adjunct.resources.streams.system import order_keys_step

if TYPE_CHECKING:
    from confluent_kafka import Message

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF
_NOT_NEGATIVE = 0x7FFFFFFF  # Kafka's client drops the sign of the hash, a Java int
_TOGETHER_BYTES = 64
"""The longest keys that are hashed together: long ones rarely share their length with many."""


def choose_partitions(keys: Sequence[bytes], count: int) -> Any:
    """Return the partition of each key in a topic of `count` partitions, as a NumPy array."""
    hashes = np.zeros(len(keys), np.int64)
    # Keys of one length are rows of one array, which NumPy hashes at once.
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    for length in np.unique(lengths).tolist():
        places: list[int] = np.nonzero(lengths == length)[0].tolist()
        if length > _TOGETHER_BYTES:
            hashes[places] = [_hash_one(keys[place]) for place in places]
        else:
            data = np.frombuffer(b"".join([keys[place] for place in places]), np.uint8)
            hashes[places] = _hash_together(data.reshape(len(places), length))
    return (hashes & _NOT_NEGATIVE) % count


def _hash_together(keys: Any) -> Any:
    """Return the hashes of keys of one length: a row of bytes for each. The same as `_hash_one`,
    but quicker for many.
    """
    count, length = keys.shape
    whole = length // 4
    words = np.ascontiguousarray(keys[:, : whole * 4]).view("<u4").astype(np.uint64)
    hashed = np.full(count, _SEED ^ length, np.uint64)
    for place in range(whole):
        mixed = words[:, place] * _FACTOR & _MASK
        mixed = (mixed ^ mixed >> np.uint64(24)) * _FACTOR & _MASK
        hashed = hashed * _FACTOR & _MASK ^ mixed
    if length % 4:
        for place, byte in enumerate(keys[:, whole * 4 :].T):
            hashed = hashed ^ byte.astype(np.uint64) << np.uint64(8 * place)
        hashed = hashed * _FACTOR & _MASK
    hashed = (hashed ^ hashed >> np.uint64(13)) * _FACTOR & _MASK
    return (hashed ^ hashed >> np.uint64(15)).astype(np.int64)


def _hash_one(key: bytes) -> int:
    """Return the MurmurHash2 of one key, as an unsigned number of 32 bits."""
    whole = len(key) // 4 * 4
    hashed = (_SEED ^ len(key)) & _MASK
    for word in np.frombuffer(key[:whole], "<u4").tolist():
        mixed = word * _FACTOR & _MASK
        mixed = (mixed ^ mixed >> 24) * _FACTOR & _MASK
        hashed = hashed * _FACTOR & _MASK ^ mixed
    if whole < len(key):
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _MASK
    hashed = (hashed ^ hashed >> 13) * _FACTOR & _MASK
    return hashed ^ hashed >> 15


def check_key_partitions(topic: TopicFacts, partition: int, got: Sequence[Message]) -> None:
    """Raise KeyOrderError for a message of this partition that is not in the partition of its key.

    Does nothing unless `topic.keys_checked_for` names a dataset. A message without a key is in the
    wrong partition, too, if its value has the key's columns.
    """
    declared = topic.declared
    reader = topic.keys_checked_for
    is_hashed = declared.partitioner == "kafka-murmur2"  # else nobody knows the right partition
    if not reader or not is_hashed or topic.partitions == 1:
        return
    keys: list[Any] = [message.key() for message in got]
    chosen = choose_partitions([key or b"" for key in keys], topic.partitions)
    unkeyed = [place for place, key in enumerate(keys) if key is None]
    columns = declared.value.columns().names
    has_key_in_value = all(column_of(name, columns) in columns for name in declared.key_names)
    # A message without a key whose value has the key's columns is wrong in every partition (-1). If
    # the value does not have them either, any partition is right.
    chosen[unkeyed] = -1 if has_key_in_value else partition
    wrong = np.nonzero(chosen != partition)[0]
    if not len(wrong):
        return
    place = int(wrong[0])
    offset = got[place].offset()
    right = int(chosen[place])
    if right >= 0:
        where = f"has a key of partition {right} of {topic.partitions}"
    else:
        where = "has no key, so that any partition may have newer ones of its entry"
    raise KeyOrderError(
        f"dataset {reader!r}: the record at offset {offset} of {topic.ssp(partition)} {where}. It"
        " was written before partitions were added to the topic, or by a producer that chooses"
        " partitions in another way: records of one key are in several partitions, and their"
        " offsets do not say which one is newer.",
        order_keys_step(reader),
        dataset=reader,
        stream=str(topic),
        partition=partition,
        offset=str(offset),
    )

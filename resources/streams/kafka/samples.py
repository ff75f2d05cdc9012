"""Infers a schema from a sample of a topic's JSON records, or returns the one that a schema
registry has for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dagster_adjunct.resources.documents import RepeatedMemberError, unique_members
from dagster_adjunct.resources.errors import SchemaMismatchError, StreamNotFoundError
from dagster_adjunct.resources.schemas.inference import Inference, InferredSchema
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.client import KafkaAdmin, KafkaSettings, TopicFacts
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, read_ranges
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry


def infer_from_topic(
    settings: KafkaSettings, topic: str, *, rows: int, times: bool = False
) -> InferredSchema:
    """Return the schema of the JSON objects that are the values of a topic's newest records, at
    most `rows`, the same number of each partition. Records without a value are left out.

    Raises StreamNotFoundError without the topic, SchemaMismatchError for values of another format.
    """
    inference = Inference(f"topic {topic!r}", times=times)
    for record in _records(settings, topic, rows):
        inference.add(record)
    return inference.result()


def registered_schema(registry: SchemaRegistry, topic: str) -> InferredSchema:
    """Return the columns of the Avro schema that is registered for a topic's values.

    Raises SchemaMismatchError if there is none, or one of another format.
    """
    found = registry.latest(f"{topic}-value")
    if found.kind != "AVRO":
        problem = f"the values of topic {topic!r} have a registered schema of {found.kind}."
        step = (
            "Only registered Avro schemas can be printed. For Protobuf, give its descriptor set to"
            " the topic's format: Protobuf(FILE, MESSAGE).columns() returns the schema."
        )
        raise SchemaMismatchError(problem, step, stream=topic)
    return InferredSchema(Avro(found.text, registry).columns(), (), 0)


def _records(settings: KafkaSettings, topic: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the values of a topic's newest records, at most about `rows`."""
    admin = KafkaAdmin(settings)
    described = admin.describe(topic)
    if described is None:
        problem = f"{settings.where} has no topic {topic!r}."
        raise StreamNotFoundError(problem, "Check the name of the topic.", stream=topic)
    count = described.partitions
    facts = TopicFacts(settings, topic, topic, described.id, count)
    share = -(-rows // count)
    oldest = admin.oldest(topic, range(count))
    upcoming = admin.upcoming(topic, range(count))
    ranges = []
    for partition, end in upcoming.items():
        start = max(oldest[partition], end - share)
        ranges.append(TopicRange(partition, start, end))
    for part, messages in read_ranges(facts, ranges):
        for message in messages:
            value = message.value()
            if value is not None:
                place = f"topic {topic!r}, partition {part.partition}, offset {message.offset()}"
                yield _parse(value, place, topic)


def _parse(value: bytes, place: str, topic: str) -> dict[str, Any]:
    """Return a value as a JSON object. Raises SchemaMismatchError, which names the `place`."""
    try:
        record = json.loads(value, object_pairs_hook=unique_members)
    except RepeatedMemberError as error:
        problem = f"the field {str(error)!r} is specified twice"
    except (ValueError, RecursionError):
        problem = f"the value is not JSON ({value[:20]!a})"
    else:
        if isinstance(record, dict):
            return record
        problem = f"the value is {ascii(record)[:40]}, not an object"
    step = "Only topics of JSON objects can be sampled. For Avro with a registry, give --registry."
    raise SchemaMismatchError(f"{place}: {problem}.", step, stream=topic)

"""What the lake remembers of the streams of a Kafka cluster: read as it was stored, compared
with what is declared.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.streams import DeclaredTopics, KafkaStreams

SCHEMA = Schema.of(tailnum="string", seats="int")
# As every release has written it.
STORED = {
    "version": 1,
    "topic": "made",
    "declaration": {
        "columns": [{"name": "tailnum", "type": "string"}, {"name": "seats", "type": "int"}],
        "key": ["tailnum"],
        "partitions": 3,
    },
}


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


def topics_of(lake: Lake) -> DeclaredTopics:
    return DeclaredTopics(lake, KafkaSettings("main", "localhost:1"))


def test_a_created_stream_is_stored_with_its_topic_columns_and_key(lake: Lake) -> None:
    topics_of(lake).remember("made", SCHEMA, ["tailnum"], 3)
    assert dict(MetadataStore(lake).namespace("kafka-streams", "main").read().items()) == {
        "made": STORED
    }
    assert topics_of(lake).check("made", SCHEMA, ["tailnum"], 3) == topics_of(lake).of("made")


def test_another_declaration_names_the_stream_by_its_system_and_what_helps_there(
    lake: Lake,
) -> None:
    topics_of(lake).remember("made", SCHEMA, ["tailnum"], 3)
    for ask in (topics_of(lake).check, topics_of(lake).remember):
        with pytest.raises(StreamExistsError, match="partitions is 4, expected 3") as caught:
            ask("made", SCHEMA, ["tailnum"], 4)
        assert caught.value.stream == "main.made"
        # Neither more columns nor other partitions are to be had of a topic.
        assert caught.value.next_step == "Declare the stream as it exists, or use another name."


def test_a_declaration_that_can_not_be_is_of_a_stream_of_this_system(lake: Lake) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        topics_of(lake).check("made", Schema(()), [], 1)
    assert caught.value.stream == "main.made"
    with pytest.raises(ConfigurationError, match="no key and 4 partitions") as caught:
        topics_of(lake).check("made", SCHEMA, [], 4)
    assert caught.value.stream == "main.made"
    with pytest.raises(ConfigurationError, match=r"partitions: .* \(found 0\)"):
        topics_of(lake).check("made", SCHEMA, ["tailnum"], 0)


def test_an_end_of_dataset_names_its_version_before_the_cluster_is_asked() -> None:
    system = KafkaStreams(lake_in(InMemoryStore()), KafkaSettings("kafka", "127.0.0.1:1"))
    for version in (None, "", "a b"):
        with pytest.raises(InvalidNameError):
            system.append_markers("s", version, producer="p", sequence=0)  # type: ignore[arg-type]

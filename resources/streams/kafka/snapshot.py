"""A stream of Kafka's as it stands now: many questions about its partitions, few requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_adjunct.resources.streams.kafka.kafka_streams import Edges, KafkaStreams, TopicFacts


class KafkaSnapshot(KafkaStreams):
    """The streams of a cluster, of which one is seen as it was at the first look at each part of it."""

    def __init__(self, streams: KafkaStreams, stream: str) -> None:
        super().__init__(streams.lake, streams.settings)
        self.admin = streams.admin
        self._stream = stream
        self._facts: TopicFacts | None = None
        self._config: Mapping[str, str] | None = None
        self._edges_seen: Edges | None = None
        self._times: dict[int, dict[int, int]] = {}

    def _located(self, stream: str) -> TopicFacts:
        if stream != self._stream:
            return super()._located(stream)
        if self._facts is None:
            self._facts = super()._located(stream)
        return self._facts

    def _config_of(self, facts: TopicFacts) -> Mapping[str, str]:
        if facts.stream != self._stream:
            return super()._config_of(facts)
        if self._config is None:
            self._config = super()._config_of(facts)
        return self._config

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> Edges:
        if facts.stream != self._stream:
            return super()._offsets(facts, partitions)
        if self._edges_seen is None:
            self._edges_seen = super()._offsets(facts, range(facts.partitions))
        return self._edges_seen

    def _first_at(self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        if facts.stream != self._stream:
            return super()._first_at(facts, partitions, timestamp_ms)
        if timestamp_ms not in self._times:
            self._times[timestamp_ms] = super()._first_at(facts, range(facts.partitions), timestamp_ms)
        return self._times[timestamp_ms]

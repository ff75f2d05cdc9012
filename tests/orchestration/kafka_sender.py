"""A run that sends older values of all keys to a topic, each in a request of its own, until it is
stopped: `python -m tests.orchestration.kafka_sender LAKE BOOTSTRAP TOPIC SETTING`.

`SETTING` is the client's setting that says how long a record may be under way: two seconds.
"""

from __future__ import annotations

import sys
from typing import Any

from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import AppendOptions

KEYS = 10_000


def copies(lake: Lake, bootstrap: str, topic: str, **client: Any) -> KafkaStreams:
    declared = KafkaTopic(topic, Json("n BIGINT"), KeyText("id BIGINT"))
    settings = KafkaSettings("kafka", bootstrap, topics={"copies": declared}, client=client)
    return KafkaStreams(lake, settings)


def send(
    streams: KafkaStreams, lease: RunLease, sequence: int, value: int, keys: int = KEYS
) -> None:
    rows = [{"id": key, "n": value} for key in range(keys)]
    streams.append(
        "copies",
        rows,
        producer="copying",
        sequence=sequence,
        options=AppendOptions(fence=lease.fence),
    )


if __name__ == "__main__":
    place, server, name, setting = sys.argv[1:]
    lake = open_lake(place)
    one_by_one: dict[str, Any] = {
        "batch.num.messages": 1,
        "max.in.flight.requests.per.connection": 1,
        setting: 2000,
    }
    slow = copies(lake, server, name, **one_by_one)
    claim = Claim(in_flight=slow.longest_request)
    with RunLease(lake, "copying", "first", claim) as held:
        send(slow, held, 1, value=1)

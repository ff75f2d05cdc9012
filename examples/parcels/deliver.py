"""Sample data as its producers would send it: python -m dagster_adjunct.examples.parcels.deliver 1,
and later 2.

Part 1: the depots of March, 500 parcels as Debezium's snapshot has them, the scans of one morning.
Part 2: another list of depots, in which one has moved, changes of some parcels, the scans of the
afternoon. The same part has the same records whenever it is made, and sending it again sends them
again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from dagster_adjunct.examples.parcels.pipeline import depots, kafka

PARCELS, SCANS = 500, 3_000
MORNING = datetime(2026, 3, 2, 6, tzinfo=UTC)
TOPICS = {"scans": 4, "shop.public.parcels": 2}
KINDS = ("arrived", "sorted", "loaded", "delivered")
CITIES = {
    1: {"d1": "Leeds", "d2": "York", "d3": "Hull", "d4": "Ripon"},
    2: {"d1": "Leeds", "d2": "York", "d3": "Beverley", "d4": "Ripon", "d5": "Selby"},
}


def changes(part: int) -> Iterator[tuple[str, dict[str, Any] | None, int]]:
    """Yield (parcel, its new row or None if it is deleted, position in PostgreSQL's log) of a
    part, in order.
    """
    draw = random.Random(part)
    numbers = range(PARCELS) if part == 1 else draw.sample(range(PARCELS), 60)
    for count, number in enumerate(numbers):
        parcel, deleted = f"p{number:04}", part == 2 and count % 6 == 0
        row = {
            "parcel": parcel,
            "customer": f"c{draw.randrange(80):02}",
            "service": draw.choice(["next day", "slow"]),
        }
        yield parcel, None if deleted else row, part * 1_000_000 + count


def envelopes(part: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (parcel, what Debezium sends of its change) of a part, in order."""
    for parcel, row, position in changes(part):
        operation = "d" if row is None else "r" if part == 1 else "u"
        source = {
            "connector": "postgresql",
            "schema": "public",
            "table": "parcels",
            "lsn": position,
        }
        before = {"parcel": parcel} if row is None else None
        yield (
            parcel,
            {"op": operation, "before": before, "after": row, "source": source, "ts_ms": position},
        )


def scans(part: int) -> Iterator[dict[str, Any]]:
    """Yield the scans of a part: in the order of their times, but for some that come up to five
    minutes late.
    """
    draw, began = random.Random(-part), MORNING + timedelta(hours=6 * (part - 1))
    first = 200 * (part - 1)  # these were delivered in the morning
    for second in sorted(draw.randrange(6 * 3600) for _ in range(SCANS)):
        at = began + timedelta(
            seconds=second - draw.choice([0, 0, 0, 300]), microseconds=draw.randrange(1_000_000)
        )
        depot = f"d{draw.randrange(1, 6)}"  # d5 is not in the first list
        yield {
            "parcel": f"p{draw.randrange(first, PARCELS + 20):04}",
            "depot": depot,
            "kind": draw.choice(KINDS),
            "at": at,
        }


def deliver(part: int) -> None:
    """Send a part to the topics, which are created if they are missing, and complete its folder
    of depots.
    """
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    _create_topics(AdminClient(servers))
    producer = Producer(
        {**servers, "enable.idempotence": True, "log_level": 3, "partitioner": "murmur2_random"}
    )
    for parcel, envelope in envelopes(part):
        key = json.dumps({"parcel": parcel})
        producer.produce("shop.public.parcels", json.dumps(envelope), key)
        if envelope["op"] == "d":
            producer.produce("shop.public.parcels", None, key)  # Debezium's tombstone
    for scan in scans(part):
        value = {"depot": scan["depot"], "kind": scan["kind"], "at": scan["at"].isoformat()}
        producer.produce("scans", json.dumps(value), scan["parcel"])
    if left := producer.flush(60):
        sys.exit(f"{left} messages were not sent to {kafka.bootstrap_servers} within a minute.")
    folder = Path(depots.input.url) / f"2026-03-0{part}"  # type: ignore[union-attr]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["depot,city", *(f"{depot},{city}" for depot, city in CITIES[part].items())]
    (folder / "depots.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "_SUCCESS").touch()  # last: the version is complete from here on
    print(  # noqa: T201
        f"part {part}: {SCANS} scans, {len(list(changes(part)))} changes of parcels,"
        f" {len(lines) - 1} depots"
    )


def _create_topics(admin: AdminClient) -> None:
    topics = [
        NewTopic(name, num_partitions=count, replication_factor=1) for name, count in TOPICS.items()
    ]
    for name, created in admin.create_topics(topics).items():
        try:
            created.result(30)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                sys.exit(
                    f"topic {name} was not created at {kafka.bootstrap_servers}:"
                    f" {error.args[0].str()}"
                )


if __name__ == "__main__":
    deliver(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

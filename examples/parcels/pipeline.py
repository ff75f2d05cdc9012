"""Where is each parcel, and how many scans does each city make in an hour?

Scans come from Kafka. Each gets the city of its depot, from files that are delivered in versions,
and the customer of its parcel, from a PostgreSQL table that Debezium follows. The DynamoDB table
`parcel-status` has the last scan of each parcel and the number of its scans; `lake.city-hours` has
the hours.

PARCELS_KAFKA says where the brokers are, PARCELS_DEPOTS where the files are delivered.
"""

from __future__ import annotations

import os
from datetime import timedelta

from dagster_adjunct import Application, Schema, bounded_dataset, unbounded_dataset
from dagster_adjunct.changes import DebeziumEnvelope
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText, Text, kafka_system
from dagster_adjunct.sources import FileSource
from dagster_adjunct.tables import DynamoDbTable, RemoteTable
from dagster_adjunct.windows import Count, Distinct, Tumbling

kafka = kafka_system(
    "kafka",
    bootstrap_servers=os.environ.get("PARCELS_KAFKA", "127.0.0.1:9092"),
    topics={
        "scans": KafkaTopic(
            value=Json("depot STRING, kind STRING, at TIMESTAMP"),
            key=KeyText("parcel"),
            partitioner="kafka-murmur2",
        ),
        # Debezium's name of the table public.parcels: its key is JSON, and the change as a whole is
        # a text.
        "parcels": KafkaTopic(topic="shop.public.parcels", key=Json("parcel STRING"), value=Text()),
    },
)

depots = bounded_dataset(
    "depots",
    input=FileSource(
        os.environ.get("PARCELS_DEPOTS", ".adjunct/parcels/depots"),
        "csv",
        Schema.of(depot="string", city="string"),
    ),
    key="depot",
    broadcast=True,
)
parcels = unbounded_dataset(
    "parcels",
    input="kafka.parcels",
    key="parcel",
    partitions=4,
    changes=DebeziumEnvelope("parcel STRING, customer STRING, service STRING"),
    order_by="source.lsn",
)

# boto3 finds region and credentials; AWS_ENDPOINT_URL_DYNAMODB names another server.
store = DynamoDbTable(
    table="parcel-status",
    key={"parcel": "string"},
    columns={
        "parcel": "string",
        "customer": "string",
        "service": "string",
        "kind": "string",
        "city": "string",
        "at": "timestamp",
        "scans": "bigint",
    },
    create=True,
)
# A replay sets again what it reads, so that a correction reaches the table; it counts nothing
# again.
status = RemoteTable("parcel-status", key="parcel", read_function=store, write_function=store)
counted = RemoteTable(
    "parcel-scans",
    key="parcel",
    read_function=store,
    write_function=store,
    idempotent=True,
    on_replay="skip",
)

app = Application(
    "parcels", description="Where each parcel is, and the scans of each city by the hour"
)
scans = (
    app.input_stream(
        "kafka.scans", default_offset="oldest", event_time="at", delay=timedelta(minutes=10)
    )
    .join(app.table(depots), on="depot", how="left", select=["city"])
    .partition_by("parcel")
    .join(app.table(parcels), on="parcel", how="left", select=["customer", "service"])
)
scans.update(
    app.table(status),
    set={"customer": "customer", "service": "service", "kind": "kind", "city": "city", "at": "at"},
    if_missing=[],
)
scans.update(app.table(counted), add={"scans": "1"}, if_missing=[])
scans.filter("city is not null").partition_by("city").window(
    Tumbling(timedelta(hours=1)),
    by="city",
    name="hours",
    aggregates={"scans": Count(), "parcels": Distinct("parcel")},
).send_to(app.output_stream("lake.city-hours", partitions=2, key="city"))

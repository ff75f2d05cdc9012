"""The example with Kafka, Debezium's changes, files and DynamoDB: its README leaves what plain
Python makes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dagster_adjunct import LakeStreams, Schema, open_lake
from dagster_adjunct.testing import TestApplication, TestStream
from tests.doc_blocks import ROOT, PageReader, blocks_of
from tests.orchestration.dagster.test_components import component, facts
from tests.servers.dynamodb import DynamoDbServer
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = ROOT / "examples" / "parcels"


@pytest.mark.spark
def test_a_morning_is_what_plain_python_makes_of_it(spark: SparkSession) -> None:
    """Without Kafka and DynamoDB, as the page on testing has it."""
    from dagster_adjunct.examples.parcels.deliver import CITIES, envelopes, scans
    from dagster_adjunct.examples.parcels.pipeline import app

    streams = {
        "kafka.scans": TestStream(
            Schema.of(parcel="string", depot="string", kind="string", at="timestamp"), key="parcel"
        ),
        "kafka.parcels": TestStream(Schema.of(parcel="string", value="string"), key="parcel"),
    }
    with TestApplication(app, streams) as test:
        test.dataset(
            "depots", [{"depot": depot, "city": city} for depot, city in CITIES[1].items()]
        )
        test.dataset(
            "parcels",
            [{"parcel": key, "value": json.dumps(envelope)} for key, envelope in envelopes(1)],
        )
        test.input("kafka.scans", list(scans(1)))
        result = test.run(spark)
    status, hours = expected((1,))
    assert {parcel: row["scans"] for parcel, row in result.table("parcel-scans").items()} == {
        parcel: row.pop("scans") for parcel, row in status.items()
    }
    assert {
        parcel: {"parcel": parcel, **row} for parcel, row in result.table("parcel-status").items()
    } == status
    found = {
        (row["city"], row["window_start"]): (row["scans"], row["parcels"])
        for row in result.output("lake.city-hours")
    }
    assert found == {key: counts for key, counts in hours.items() if key[1].hour < 11}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
def test_the_readme_s_commands_leave_what_plain_python_makes_of_the_sample(
    kafka: KafkaServer, dynamodb: DynamoDbServer, tmp_path: Path
) -> None:
    env = {"PARCELS_KAFKA": kafka.bootstrap, "PARCELS_DEPOTS": "depots", **dynamodb.env}
    with PageReader(tmp_path, tmp_path / "session.log", env) as reader:
        for block in blocks_of(EXAMPLE / "README.md"):
            reader.follow(block)
    status, hours = expected()
    assert {row["parcel"]: row for row in stored(dynamodb)} == status
    streams = LakeStreams(open_lake(tmp_path / ".adjunct" / "lake"))
    rows = streams.read_arrow(streams.all_ranges("city-hours")).to_pylist()
    found = {(row["city"], row["window_start"]): (row["scans"], row["parcels"]) for row in rows}
    assert len(rows) == len(found), "a window came twice"
    assert found == {key: hours[key] for key in found}
    assert hours.keys() - found.keys() == {
        key for key in hours if key[1] >= datetime(2026, 3, 2, 17, tzinfo=UTC)
    }


def expected(
    parts: tuple[int, ...] = (1, 2),
) -> tuple[dict[str, Any], dict[tuple[str, datetime], tuple[int, int]]]:
    """Return each parcel's status after a replay, and scans and parcels by city and hour, which
    it leaves alone.
    """
    from dagster_adjunct.examples.parcels.deliver import CITIES, changes, scans

    customers = {parcel: row for part in parts for parcel, row, _ in changes(part)}
    status: dict[str, dict[str, Any]] = {}
    hours: dict[tuple[str, datetime], list[str]] = defaultdict(list)
    for part in parts:
        for scan in scans(part):
            parcel, depot, at = scan["parcel"], scan["depot"], scan["at"]
            of_parcel = customers.get(parcel) or {"customer": None, "service": None}
            number = status[parcel]["scans"] + 1 if parcel in status else 1
            city = CITIES[parts[-1]].get(depot)
            known = {
                "parcel": parcel,
                "kind": scan["kind"],
                "city": city,
                "at": at,
                "scans": number,
            }
            status[parcel] = {**known, **of_parcel}
            if depot in CITIES[part]:
                hours[CITIES[part][depot], at.replace(minute=0, second=0, microsecond=0)].append(
                    parcel
                )
    return status, {key: (len(parcels), len(set(parcels))) for key, parcels in hours.items()}


def stored(server: DynamoDbServer) -> list[dict[str, Any]]:
    """Return the items of the table as DynamoDB has them, without Adjunct's own attributes."""
    pages = server.client().get_paginator("scan").paginate(TableName="parcel-status")
    columns = ("parcel", "customer", "service", "kind", "city", "at", "scans")
    rows = []
    for item in (item for page in pages for item in page["Items"]):
        row: dict[str, Any] = {
            name: next(iter(item[name].values())) if name in item else None for name in columns
        }
        rows.append({**row, "at": datetime.fromisoformat(row["at"]), "scans": int(row["scans"])})
    return rows


def test_the_component_declares_the_application_of_the_python_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dagster_adjunct.examples.parcels.pipeline import app, depots, kafka
    from dagster_adjunct.resources.streams.kafka.streams import _openers

    monkeypatch.setenv("PARCELS_KAFKA", kafka.bootstrap_servers)
    monkeypatch.setenv("PARCELS_DEPOTS", depots.input.url)  # type: ignore[union-attr]
    declared = yaml.safe_load((EXAMPLE / "defs.yaml").read_text(encoding="utf-8"))
    made = component(yaml.safe_dump(declared["attributes"], sort_keys=False)).applications()
    assert facts(made["parcels"]) == facts(app)
    assert _openers["kafka"][0] == kafka

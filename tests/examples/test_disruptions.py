"""The example's second application: a merge, state in a local table and a look-up, against plain
Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Schema
from dagster_adjunct.examples.flights.disruptions import disruptions
from dagster_adjunct.testing import TestApplication, TestStream
from tests.examples.oracle import FLIGHT_COLUMNS, by_flight, disrupted, flights_in_order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY, BATCH = 97, 1_750
TYPES = {
    "carrier": "string",
    "tailnum": "string",
    "origin": "string",
    "dest": "string",
    "time_hour": "string",
}
FLIGHTS = TestStream(
    Schema.of(**{name: TYPES.get(name, "int") for name in FLIGHT_COLUMNS}),
    key="tailnum",
    partitions=8,
)
DESKS = {"AA": "American operations", "UA": "United operations"}


@pytest.mark.spark
def test_disrupted_flights_know_where_their_aircraft_is_and_whom_to_call(
    spark: SparkSession,
) -> None:
    app = disruptions()
    app.max_batch_records = BATCH
    flights = flights_in_order(EVERY)
    with TestApplication(app, {"lake.enriched-flights": FLIGHTS}) as test:
        test.table("carrier-desks", {carrier: {"desk": desk} for carrier, desk in DESKS.items()})
        outputs: list[dict[str, Any]] = []
        wanted: list[dict[str, Any]] = []
        seen: dict[str, str] = {}
        for start in range(0, len(flights), BATCH):  # what is given at once is one batch
            given = flights[start : start + BATCH]
            test.input("lake.enriched-flights", given)
            result = test.run(spark)
            assert result.report.step.batches == 1
            outputs += result.output("lake.disrupted-flights")
            wanted += disrupted(given, seen, DESKS)
        assert by_flight(outputs) == by_flight(wanted)
        assert len(wanted) > 150
        assert {row["reason"] for row in outputs} == {"cancelled", "late"}
        assert any(row["aircraft_at"] not in (row["dest"], None) for row in outputs)

"""The example's second application: a merge, state in a local table and a look-up, against plain Python."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from dagster_adjunct import Schema
from dagster_adjunct.examples.flights.disruptions import VERY_LATE, disruptions
from dagster_adjunct.testing import TestApplication, TestStream
from tests.examples.oracle import FLIGHT_COLUMNS, flights_in_order

EVERY, BATCH = 97, 1_750
TYPES = {"carrier": "string", "tailnum": "string", "origin": "string", "dest": "string", "time_hour": "string"}
FLIGHTS = TestStream(
    Schema.of(**{name: TYPES.get(name, "int") for name in FLIGHT_COLUMNS}), key="tailnum", partitions=8
)
DESKS = {"AA": "American operations", "UA": "United operations"}


@pytest.mark.spark
def test_disrupted_flights_know_where_their_aircraft_is_and_whom_to_call() -> None:
    app = disruptions()
    app.max_batch_records = BATCH
    flights = [dict(zip(FLIGHT_COLUMNS, flight, strict=True)) for flight in flights_in_order(EVERY)]
    with TestApplication(app, {"lake.enriched-flights": FLIGHTS}) as test:
        test.table("carrier-desks", {carrier: {"desk": desk} for carrier, desk in DESKS.items()})
        found: list[dict[str, Any]] = []
        wanted: list[dict[str, Any]] = []
        seen: dict[str, str] = {}
        for start in range(0, len(flights), BATCH):  # what is given at once is one batch
            given = flights[start : start + BATCH]
            test.input("lake.enriched-flights", given)
            result = test.run()
            assert result.report.step.batches == 1
            found += result.output("lake.disrupted-flights")
            wanted += expected(given, seen)
        assert by_flight(found) == by_flight(wanted)
        assert len(wanted) > 150
        assert {row["reason"] for row in found} == {"cancelled", "late"}
        assert any(row["aircraft_at"] not in (row["dest"], None) for row in found)


def expected(given: list[dict[str, Any]], seen: dict[str, str]) -> list[dict[str, Any]]:
    """Return what comes of one batch; `seen` is the destination of each aircraft, kept from batch to batch."""
    for flight in given:
        if flight["dep_time"] is not None and flight["tailnum"] is not None:
            seen[flight["tailnum"]] = flight["dest"]
    rows = []
    for flight in given:
        late = flight["arr_delay"] is not None and flight["arr_delay"] >= VERY_LATE
        if flight["dep_time"] is not None and not late:
            continue
        row = {name: flight[name] for name in ("time_hour", "carrier", "flight", "tailnum", "origin", "dest")}
        row["reason"] = "late" if late else "cancelled"
        rows.append(row | {"aircraft_at": seen.get(flight["tailnum"]), "desk": DESKS.get(flight["carrier"])})
    return rows


def by_flight(rows: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows in an order that does not depend on partitions."""
    ordered: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        ordered[f"{row['carrier']}{row['flight']}"].append(tuple(map(str, row.values())))
    return {flight: sorted(several) for flight, several in ordered.items()}

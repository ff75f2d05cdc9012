"""Flights that were cancelled or very late, each with where its aircraft is by now and who is to be
called.

A second application, behind the first: it reads the enriched flights. It shows a merge, state in a
local table, and a look-up in a remote table.
"""

from __future__ import annotations

from dagster_adjunct import Application, Schema
from dagster_adjunct.examples.flights.stores import carrier_desks

VERY_LATE = 120


def disruptions() -> Application:
    app = Application(
        "disruptions", description="Cancelled and very late flights", max_batch_records=100_000
    )
    flights = app.input_stream("lake.enriched-flights")
    disrupted = app.output_stream("lake.disrupted-flights", partitions=8, key="tailnum")
    last_seen = app.local_table(
        "last_seen", key="tailnum", schema=Schema.of(tailnum="string", dest="string"), partitions=8
    )
    flights.filter("dep_time is not null").send_to(last_seen, on_null_key="skip")
    cancelled = flights.filter("dep_time is null").with_columns(reason="'cancelled'")
    late = flights.filter(f"arr_delay >= {VERY_LATE}").with_columns(reason="'late'")
    (
        cancelled.merge(late)
        .join(last_seen, on="tailnum", how="left", select=["dest as aircraft_at"])
        .join(app.table(carrier_desks()), on="carrier", how="left", select=["desk"])
        .select(
            "time_hour",
            "carrier",
            "flight",
            "tailnum",
            "origin",
            "dest",
            "reason",
            "aircraft_at",
            "desk",
        )
        .send_to(disrupted)
    )
    return app


app = disruptions()

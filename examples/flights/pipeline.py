"""Flights of 2013 from New York, joined with planes, weather, airlines and airports, as an application.

Every flight is enriched and written to a stream; the last flight of every aircraft is kept in a table.
"""

from __future__ import annotations

import os

from dagster_adjunct import (
    Application,
    UpdateContract,
    bounded_dataset,
    build_definitions,
    unbounded_dataset,
    update_message,
)
from dagster_adjunct.tables import PostgresTable, RemoteTable, SqliteTable

planes = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8)
airlines = bounded_dataset("airlines", input="lake.airlines", key="carrier", broadcast=True)
airports = bounded_dataset("airports", input="lake.airports", key="faa", broadcast=True)
weather = unbounded_dataset(
    "weather", input="lake.weather", key=["origin", "time_hour"], partition_by="origin", partitions=8
)

# What is known of an aircraft, and where it was last seen.
PROFILE = {"manufacturer": "string", "model": "string", "plane_year": "int", "seats": "int"}
LAST_SEEN = {
    "last_flight": "int",
    "last_origin": "string",
    "last_dest": "string",
    "last_time_hour": "timestamp",
    "last_dep_delay": "int",
}


def aircraft_state() -> RemoteTable:
    """The remote table: PostgreSQL where ADJUNCT_DEMO_POSTGRES holds a DSN, else SQLite."""
    columns = {"tailnum": "string", **PROFILE, **LAST_SEEN}
    if os.environ.get("ADJUNCT_DEMO_POSTGRES"):
        store = PostgresTable(
            dsn_env="ADJUNCT_DEMO_POSTGRES", table="aircraft_state", key="tailnum", columns=columns, create=True
        )
    else:
        path = os.environ.get("ADJUNCT_DEMO_SQLITE", ".adjunct/demo.sqlite")
        store = SqliteTable(path=path, table="aircraft_state", key="tailnum", columns=columns, create=True)
    return RemoteTable("aircraft-state", key="tailnum", read_function=store, write_function=store, batch_size=5_000)


def flight_delays() -> Application:
    app = Application(
        "flight-delays",
        description="Enriched flights, and where each aircraft was last seen",
        max_batch_records=45_000,
    )
    flights = app.input_stream("lake.flights")
    enriched = app.output_stream("lake.enriched-flights", partitions=8, key="tailnum")
    (
        flights.join(
            app.table(planes),
            on="tailnum",
            how="left",
            select=["manufacturer", "model", "year as plane_year", "seats"],
        )
        .partition_by("origin")
        .join(
            app.table(weather),
            on=["origin", "time_hour"],
            how="left",
            select=["temp", "wind_speed", "precip", "visib"],
        )
        .join(app.table(airlines), on="carrier", how="left", select=["name as airline"])
        .join(app.table(airports), on={"dest": "faa"}, how="left", select=["name as dest_name"])
        .send_to(enriched)
        .map(
            *update_message(
                key="tailnum",
                update={name: name.removeprefix("last_") for name in LAST_SEEN},
                default=list(PROFILE),
            )
        )
        .send_to(app.table(aircraft_state()), UpdateContract.UPDATE_WITH_DEFAULTS, on_null_key="skip")
    )
    return app


app = flight_delays()
defs = build_definitions(app)

"""Flights of 2013 from New York, joined with planes, weather, airlines and airports, as an
application.

Every flight is enriched and written to a stream; the last flight of every aircraft is kept in a
table. A second application (disruptions.py) goes on from that stream. A third (over_time.py) reads
the flights beside it.
"""

from __future__ import annotations

from dagster_adjunct import Application, bounded_dataset, build_definitions, unbounded_dataset
from dagster_adjunct.examples.flights.disruptions import app as disruptions
from dagster_adjunct.examples.flights.over_time import app as over_time
from dagster_adjunct.examples.flights.stores import LAST_SEEN, PROFILE, aircraft_state

planes = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8)
airlines = bounded_dataset("airlines", input="lake.airlines", key="carrier", broadcast=True)
airports = bounded_dataset("airports", input="lake.airports", key="faa", broadcast=True)
weather = unbounded_dataset(
    "weather",
    input="lake.weather",
    key=["origin", "time_hour"],
    partition_by="origin",
    partitions=8,
)


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
        .update(
            app.table(aircraft_state()),
            set={name: name.removeprefix("last_") for name in LAST_SEEN},
            if_missing=list(PROFILE),
            on_null_key="skip",
        )
    )
    return app


app = flight_delays()
defs = build_definitions(app, disruptions, over_time)

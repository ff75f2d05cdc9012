"""Flights that are right in the end: with the weather and the place of their aircraft when they
were due, however late that was reported, and however often it was corrected.

A fourth application, beside the first: its flights wait for the weather, and what is reported later
still, or corrected, changes the results of the flights that it concerns, and no others.
"""

from __future__ import annotations

from datetime import timedelta

from dagster_adjunct import Application, Restate, Wait, unbounded_dataset
from dagster_adjunct.changes import Watermark
from dagster_adjunct.examples.flights.over_time import aircraft
from dagster_adjunct.examples.flights.stores import last_conditions

HOUR = timedelta(hours=1)
# Flights of 2013 are older than corrections of today reach back elsewhere.
SINCE_2013 = timedelta(days=365 * 40)

observations = unbounded_dataset(
    "observations",
    input="lake.weather",
    key=["origin", "time_hour"],
    broadcast=True,
    history="all",
    valid_from="time_hour",
    watermark=Watermark(delay=HOUR),
)


def corrected_flights() -> Application:
    app = Application(
        "corrected-flights",
        description="Flights with their weather and their aircraft's place, corrected later",
        max_batch_records=100_000,
    )
    flights = app.input_stream("lake.flights", event_time="time_hour", delay=HOUR)
    correction = Restate(SINCE_2013, most_records=400_000)
    conditions = (
        flights.join(
            app.table(observations),
            on=["origin", "time_hour"],
            how="left",
            as_of="time_hour",
            select=["temp", "wind_speed", "visib"],
            wait=Wait(6 * HOUR, by="event time"),
            restate=correction,
        )
        .join(
            app.table(aircraft),
            on="tailnum",
            how="left",
            as_of="time_hour",
            select=["airport as came_from", "since as there_since"],
            restate=correction,
        )
        .select(
            "tailnum",
            "time_hour",
            "carrier",
            "flight",
            "origin",
            "dest",
            "temp",
            "wind_speed",
            "visib",
            "came_from",
            "there_since",
        )
    )
    conditions.send_to(app.output_stream("lake.flight-conditions", partitions=8, key="tailnum"))
    conditions.send_to(app.table(last_conditions()), on_null_key="skip")
    return app


app = corrected_flights()

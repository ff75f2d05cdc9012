"""What the example's third application makes of flights, in plain Python: nothing of Adjunct is
used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

Row = Mapping[str, Any]
WITHIN = timedelta(hours=6)
DAY = timedelta(days=1)


def of_aircraft(flights: Iterable[Row], landings: Iterable[Row]) -> Counter[tuple[Any, ...]]:
    """Return each flight with the last landing of its aircraft at or before its time."""
    places: dict[str, list[tuple[datetime, str, str]]] = defaultdict(list)
    # of one moment the later record counts
    for row in sorted(landings, key=lambda row: row["since"]):
        places[row["tailnum"]].append((row["since"], row["operator"], row["airport"]))
    outputs: Counter[tuple[Any, ...]] = Counter()
    for flight in flights:
        known = places.get(flight["tailnum"], [])
        at = bisect_right(known, flight["time_hour"], key=lambda place: place[0])
        since, operator, airport = known[at - 1] if at else (None, None, None)
        named = (
            flight[name] for name in ("time_hour", "carrier", "flight", "tailnum", "origin", "dest")
        )
        outputs[(*named, operator, airport, since)] += 1
    return outputs


def instead(flights: Iterable[Row]) -> Counter[tuple[Any, ...]]:
    """Return each cancelled flight with each that left for the same place in time; alone where
    there is none.
    """
    flights = list(flights)
    left: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for flight in flights:
        if flight["dep_time"] is not None:
            left[(flight["carrier"], flight["dest"])].append(flight)
    outputs: Counter[tuple[Any, ...]] = Counter()
    for flight in flights:
        if flight["dep_time"] is not None:
            continue
        own = (
            flight["carrier"],
            flight["dest"],
            flight["flight"],
            flight["origin"],
            flight["time_hour"],
        )
        others = [
            other
            for other in left[(flight["carrier"], flight["dest"])]
            if flight["time_hour"] <= other["time_hour"] <= flight["time_hour"] + WITHIN
        ]
        for other in others:
            outputs[(*own, other["flight"], other["origin"], other["time_hour"])] += 1
        if not others:
            outputs[(*own, None, None, None)] += 1
    return outputs


def days(flights: Iterable[Row]) -> dict[tuple[str, datetime], tuple[int, int, float | None]]:
    """Return flights, those that departed, and the mean delay, by airport and the day's first
    moment (UTC).
    """
    of_day: dict[tuple[str, datetime], list[Row]] = defaultdict(list)
    for flight in flights:
        day = flight["time_hour"].replace(hour=0, minute=0, second=0, microsecond=0)
        of_day[(flight["origin"], day)].append(flight)
    by_day = {}
    for key, rows in of_day.items():
        delays = [row["dep_delay"] for row in rows if row["dep_delay"] is not None]
        departed = sum(row["dep_time"] is not None for row in rows)
        by_day[key] = (len(rows), departed, sum(delays) / len(delays) if delays else None)
    return by_day

"""Reads the outputs of the example's third application, and compares them with the oracle."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import LakeStreams, open_lake
from dagster_adjunct.examples.flights.data import load
from tests.examples.drive import every_nth
from tests.examples.oracle_over_time import DAY, days, instead, of_aircraft

if TYPE_CHECKING:
    from dagster_adjunct import Lake

LAST_DAY = datetime(2013, 12, 30, tzinfo=UTC)
OF_AIRCRAFT = (
    "time_hour",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "operator",
    "came_from",
    "there_since",
)
INSTEAD = (
    "carrier",
    "dest",
    "flight",
    "origin",
    "time_hour",
    "next_flight",
    "next_origin",
    "next_time_hour",
)
DAYS = ("origin", "window_start", "flights", "departed", "mean_delay")


def assert_over_time(lake_url: str, every: int) -> None:
    """Compare all three outputs with the oracle, all rows; `every` as the flights were
    delivered.
    """
    lake = open_lake(lake_url)
    flights, landings = every_nth("flights", every).to_pylist(), load("aircraft").to_pylist()
    assert outputs(lake, "flights-of-aircraft", OF_AIRCRAFT) == of_aircraft(flights, landings)
    assert_instead(lake, flights)
    assert_days(lake, flights)


def outputs(lake: Lake, stream: str, columns: tuple[str, ...]) -> Counter[tuple[Any, ...]]:
    """Return the records of an output with their counts."""
    streams = LakeStreams(lake)
    table = streams.read_arrow(streams.all_ranges(stream), columns=list(columns))
    return Counter(zip(*[table.column(name).to_pylist() for name in columns], strict=True))


def assert_instead(lake: Lake, flights: list[dict[str, Any]]) -> None:
    """Compare what met; what met nothing comes out once its six hours are over by the slowest
    partition.
    """
    written, wanted = outputs(lake, "flights-instead", INSTEAD), instead(flights)
    assert not written - wanted
    assert all(row[5] is None and row[4] >= LAST_DAY for row in wanted - written)


def assert_days(lake: Lake, flights: list[dict[str, Any]]) -> None:
    """Compare the days that are over, which are all but the last."""
    written = outputs(lake, "airport-days", DAYS)
    assert set(written.values()) == {1}
    wanted = days(flights)
    over = {row[:2] for row in written}
    assert over >= {key for key in wanted if key[1] < LAST_DAY - DAY}
    assert {row[:2]: row[2:4] for row in written} == {
        key: day[:2] for key, day in wanted.items() if key in over
    }
    assert all(row[4] == pytest.approx(wanted[row[:2]][2]) for row in written)

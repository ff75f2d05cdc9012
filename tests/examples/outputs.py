"""Reads both outputs of the main job in the form in which the oracle gives them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct import LakeStreams, open_lake
from tests.examples.oracle import (
    ENRICHED_COLUMNS,
    STATE_COLUMNS,
    airline_desks,
    by_flight,
    disrupted,
    expected,
    flights_in_order,
)

if TYPE_CHECKING:
    from tests.servers.postgres import PostgresServer


def enriched_rows(lake_url: str) -> Counter[tuple[Any, ...]]:
    """Return the rows of the enriched stream with their counts; times as ISO text ending in Z."""
    streams = LakeStreams(open_lake(lake_url))
    table = streams.read_arrow(
        streams.all_ranges("enriched-flights"), columns=list(ENRICHED_COLUMNS)
    )
    columns = [table.column(name).to_pylist() for name in ENRICHED_COLUMNS]
    at = ENRICHED_COLUMNS.index("time_hour")
    columns[at] = [time.strftime("%Y-%m-%dT%H:%M:%SZ") for time in columns[at]]
    return Counter(zip(*columns, strict=True))


def assert_disruptions(lake_url: str, every: int) -> None:
    """Compare the second application's output with the oracle, all rows, where one batch has
    taken all flights.
    """
    streams = LakeStreams(open_lake(lake_url))
    columns = [
        "time_hour",
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "reason",
        "aircraft_at",
        "desk",
    ]
    rows = (
        streams.read_arrow(streams.all_ranges("disrupted-flights"), columns=columns)
        .select(columns)
        .to_pylist()
    )
    outputs = [row | {"time_hour": row["time_hour"].strftime("%Y-%m-%dT%H:%M:%SZ")} for row in rows]
    assert by_flight(outputs) == by_flight(disrupted(flights_in_order(every), {}, airline_desks()))


def sqlite_state(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return the records of the table by tail number."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(STATE_COLUMNS)} FROM aircraft_state"
        ).fetchall()
    return {row[0]: tuple(row) for row in rows}


def postgres_state(server: PostgresServer) -> dict[str, tuple[Any, ...]]:
    """Return the records of the table by tail number; times as ISO text ending in Z."""
    moment = "to_char(last_time_hour AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
    columns = [moment if name == "last_time_hour" else name for name in STATE_COLUMNS]
    rows = server.execute(f"SELECT {', '.join(columns)} FROM aircraft_state")
    return {str(row[0]): tuple(row) for row in rows}


def assert_outputs(lake_url: str, state: dict[str, tuple[Any, ...]], every: int = 1) -> None:
    """Compare both outputs with the oracle, all rows; `every` as the flights were delivered."""
    enriched, records, _ = expected(every)
    rows = enriched_rows(lake_url)
    assert rows == enriched, (
        list((rows - enriched).items())[:3],
        list((enriched - rows).items())[:3],
    )
    different = {key for key in records.keys() | state.keys() if records.get(key) != state.get(key)}
    assert not different, [(state.get(key), records.get(key)) for key in sorted(different)[:3]]

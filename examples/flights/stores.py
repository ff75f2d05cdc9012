"""The remote tables of the example: in PostgreSQL where ADJUNCT_DEMO_POSTGRES holds a DSN, else
in a SQLite file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dagster_adjunct.examples.flights.data import load
from dagster_adjunct.tables import PostgresTable, RemoteTable, SqliteTable

# What is known of an aircraft, and where it was last seen.
PROFILE = {"manufacturer": "string", "model": "string", "plane_year": "int", "seats": "int"}
LAST_SEEN = {
    "last_flight": "int",
    "last_origin": "string",
    "last_dest": "string",
    "last_time_hour": "timestamp",
    "last_dep_delay": "int",
}
# The last flight of an aircraft, with the conditions in which it left.
CONDITIONS = {
    "tailnum": "string",
    "time_hour": "timestamp",
    "carrier": "string",
    "flight": "int",
    "origin": "string",
    "dest": "string",
    "temp": "double",
    "wind_speed": "double",
    "visib": "double",
    "came_from": "string",
    "there_since": "timestamp",
}


def aircraft_state() -> RemoteTable:
    """Return the table of aircraft, which the application keeps up to date."""
    return _table("aircraft-state", "tailnum", {"tailnum": "string", **PROFILE, **LAST_SEEN})


def carrier_desks() -> RemoteTable:
    """Return the table of whom to call at each carrier, which somebody else keeps."""
    return _table("carrier-desks", "carrier", {"carrier": "string", "desk": "string"})


def last_conditions() -> RemoteTable:
    """Return the table of each aircraft's last flight, with what is known of its conditions by
    now.
    """
    return _table("last-conditions", "tailnum", CONDITIONS, newest_by="time_hour")


def fill_carrier_desks() -> None:
    """Put the desk of every carrier, as that somebody would have."""
    from dagster_adjunct.tables import BlockingTable

    with BlockingTable(carrier_desks()) as desks:
        for airline in load("airlines").to_pylist():
            desks.put(airline["carrier"], {"desk": f"{airline['name']} operations"})


def _table(name: str, key: str, columns: Mapping[str, str], **options: Any) -> RemoteTable:
    table = name.replace("-", "_")
    if os.environ.get("ADJUNCT_DEMO_POSTGRES"):
        store = PostgresTable(
            dsn_env="ADJUNCT_DEMO_POSTGRES", table=table, key=key, columns=columns, create=True
        )
    else:
        path = os.environ.get("ADJUNCT_DEMO_SQLITE", ".adjunct/demo.sqlite")
        store = SqliteTable(path=path, table=table, key=key, columns=columns, create=True)
    return RemoteTable(
        name, key=key, read_function=store, write_function=store, batch_size=5_000, **options
    )

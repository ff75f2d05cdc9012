"""What PostgreSQL has confirmed survives its crash, whatever the database sets for its sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dagster_adjunct.resources.table_backends.postgres_connection import connect_async, connect_sync
from tests.servers.postgres import PostgresServer

SHOW = "SHOW synchronous_commit"


@pytest.mark.parametrize(("default", "used"), [("off", "on"), ("remote_apply", "remote_apply")])
def test_no_session_confirms_a_commit_before_it_is_stored(
    postgres_server: PostgresServer, default: str, used: str
) -> None:
    settings: dict[str, Any] = {
        **conninfo_to_dict(postgres_server.dsn()),
        "options": f"-c synchronous_commit={default}",
    }
    with psycopg.connect(**settings) as plain:
        assert plain.execute(SHOW).fetchone() == (default,)
    with connect_sync("a table", settings) as session:
        assert session.execute(SHOW).fetchone() == (used,)

    async def show() -> Any:
        async with await connect_async("a table", settings) as session:
            return await (await session.execute(SHOW)).fetchone()

    assert asyncio.run(show()) == (used,)

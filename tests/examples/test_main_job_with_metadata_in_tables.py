"""The main job with its lake's metadata in a key-value table: in SQLite, and in PostgreSQL beside a lake on S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct import open_lake
from dagster_adjunct.resources.key_value_backends import PostgresSegments
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.upkeep import move_metadata
from tests.examples.driving import drive
from tests.examples.outputs import assert_disruptions, assert_outputs, postgres_state, sqlite_state
from tests.servers.postgres import PostgresServer
from tests.servers.s3 import S3Server

# A test with a small application, in tests/orchestration, always runs.
pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]
EVERY = 64
REDUCED = ["--every", str(EVERY), "--batch", "3000"]
KILLED_AT = "output aircraft-state"


def test_the_main_job_with_metadata_in_sqlite_is_killed_and_equals_the_oracle(tmp_path: Path) -> None:
    lake, state = tmp_path / "lake", tmp_path / "state.sqlite"
    move_metadata(open_lake(lake), "lake", "metadata")
    drive(str(lake), state, *REDUCED, "--kill", f"{KILLED_AT}@2").assert_killed_at(KILLED_AT)
    drive(str(lake), state, *REDUCED).result  # noqa: B018
    assert_outputs(str(lake), sqlite_state(state), EVERY)
    assert_all_in_the_table(str(lake))


def test_both_applications_with_metadata_in_postgres_and_their_lake_on_versitygw_equal_the_oracle(
    versitygw: S3Server, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_server.execute("DROP TABLE IF EXISTS aircraft_state, carrier_desks")
    dsn = postgres_server.dsn()
    env = {**versitygw.env, "ADJUNCT_DEMO_POSTGRES": dsn, "METADATA_DSN": dsn}
    for name, value in {**versitygw.env, "METADATA_DSN": dsn}.items():
        monkeypatch.setenv(name, value)
    lake = versitygw.url()
    move_metadata(open_lake(lake), "lake", "metadata", backend=PostgresSegments(dsn_env="METADATA_DSN"))
    drive(lake, tmp_path / "unused", *REDUCED, "--disruptions", env=env).result  # noqa: B018
    assert_outputs(lake, postgres_state(postgres_server), EVERY)
    assert_disruptions(lake, EVERY)
    assert_all_in_the_table(lake)


def assert_all_in_the_table(url: str) -> None:
    """No batch log, lease or request of the run is in the object store."""
    store = open_lake(url).store
    assert isinstance(store, RoutedStore)
    in_objects = {item.key for item in store.objects.list("") if item.key.startswith(("applications/", "metadata/"))}
    assert {key.split("/")[1] for key in in_objects} == {"key-value-tables"}
    assert any(item.key.endswith("/CURRENT") for item in store.list("applications/"))

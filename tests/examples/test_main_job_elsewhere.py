"""The main job on real servers: S3 lakes over a socket, a PostgreSQL table, a Spark cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct import application_state, open_lake
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import session_config
from tests.examples.driving import drive
from tests.examples.oracle import expected
from tests.examples.outputs import assert_disruptions, assert_outputs, postgres_state, sqlite_state
from tests.examples.outputs_over_time import assert_over_time
from tests.servers.postgres import PostgresServer
from tests.servers.s3 import S3Server
from tests.servers.spark_connect import connect_server

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1200)]
EVERY = 64


def reduced(every: int) -> list[str]:
    return ["--every", f"{every}", "--batch", "3000"]


# Spark on S3: tests/packaging/test_iam_policies.py. On PostgreSQL:
# tests/orchestration/test_killed_spark_tasks.py.
@pytest.mark.long
@pytest.mark.parametrize("others", [False, True], ids=["main", "all"])
def test_applications_on_versitygw_and_postgres_equal_the_oracle(
    versitygw: S3Server,
    postgres_server: PostgresServer,
    others: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others run on a folder in tests of their own, and what a request does on this server
    is tested apart.
    """
    postgres_server.execute("DROP TABLE IF EXISTS aircraft_state, carrier_desks")
    for name, value in versitygw.env.items():
        monkeypatch.setenv(name, value)
    lake, env = versitygw.url(), {**versitygw.env, "ADJUNCT_DEMO_POSTGRES": postgres_server.dsn()}
    every, more = (EVERY, ("--disruptions", "--over-time")) if others else (256, ())
    assert drive(lake, tmp_path / "unused", *reduced(every), *more, env=env).result["spark_started"]
    assert_outputs(lake, postgres_state(postgres_server), every)
    if others:
        assert_disruptions(lake, EVERY)
        assert_over_time(lake, EVERY)
    assert_counters(lake, every)
    assert not (tmp_path / "unused").exists()


@pytest.mark.long
def test_the_main_job_on_all_its_data_on_versitygw_equals_the_oracle(
    versitygw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request does on this server and what all the data gives are tested apart from each
    other, too.
    """
    on_s3(versitygw, tmp_path, monkeypatch, 1)


@pytest.mark.long
def test_the_main_job_on_moto_equals_the_oracle(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_s3(moto_s3, tmp_path, monkeypatch, 1)


def on_s3(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Run every n-th flight on the server, over a socket, and compare all rows."""
    lake, state = server.url(), tmp_path / "state.sqlite"
    result = drive(lake, state, *(reduced(every) if every > 1 else ()), env=server.env).result
    server.set_in(monkeypatch)
    assert_outputs(lake, sqlite_state(state), every)
    assert_counters(lake, every)
    assert result["spark_started"]


def assert_counters(lake: str, every: int) -> None:
    facts = expected(every)[2]
    counters = application_state(open_lake(lake), "flight-delays").totals
    assert counters["lake.enriched-flights"] == {"rows": facts["flights"], "duplicate_batches": 0}
    assert counters["aircraft-state"]["updates"] == facts["updates"]
    assert counters["aircraft-state"]["defaults_put"] == facts["defaults put"]


@pytest.mark.long  # an application of a project of its own runs on a cluster in tests/packaging
def test_the_main_job_on_a_cluster_equals_the_oracle(spark_cluster: str, tmp_path: Path) -> None:
    """Two executors, each a process of its own, write to the lake and to the table."""
    lake, state = str(tmp_path / "lake"), tmp_path / "state.sqlite"
    shared = {"ADJUNCT_LAKE_SHARED": "true"}
    drive(lake, state, *reduced(EVERY), "--master", spark_cluster, env=shared).result  # noqa: B018
    assert_outputs(lake, sqlite_state(state), EVERY)


@pytest.mark.long
def test_the_applications_with_spark_connect_equal_the_oracle(tmp_path: Path) -> None:
    lake, state = str(tmp_path / "lake"), tmp_path / "state.sqlite"
    shared = {"ADJUNCT_LAKE_SHARED": "true"}
    with connect_server(tmp_path, "local[2]") as server:
        run = drive(
            lake,
            state,
            *reduced(EVERY),
            "--disruptions",
            "--over-time",
            "--master",
            server.url,
            env=shared,
        )
        assert run.result is not None
    assert_outputs(lake, sqlite_state(state), EVERY)
    assert_disruptions(lake, EVERY)
    assert_over_time(lake, EVERY)


def test_executors_elsewhere_are_refused_for_a_folder_that_only_this_machine_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADJUNCT_LAKE", raising=False)
    monkeypatch.delenv("ADJUNCT_LAKE_SHARED", raising=False)
    for lake in (str(tmp_path), None):
        with pytest.raises(ConfigurationError, match=r"is a folder.*ADJUNCT_LAKE_SHARED=true"):
            session_config(master="spark://head:7077", lake_url=lake)
    assert session_config(master="local[2]", lake_url=str(tmp_path))["spark.master"] == "local[2]"
    assert session_config(master="spark://head:7077", lake_url="s3://bucket/lake")
    monkeypatch.setenv("ADJUNCT_LAKE_SHARED", "true")
    assert session_config(master="spark://head:7077", lake_url=str(tmp_path))

"""Runs with sessions of a Spark Connect server, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import Application, Lake, LakeStreams, SparkResource, open_lake
from dagster_adjunct.errors import ConfigurationError, TransientError
from dagster_adjunct.orchestration.step.engines import check_credits
from dagster_adjunct.resources.spark.session import new_session
from dagster_adjunct.tables import RateLimit, RemoteTable, SqliteTable
from tests.kept_processes import without_kept_processes
from tests.orchestration.dagster import connected, small, submitted
from tests.servers.ports import free_port
from tests.servers.s3 import ROOT
from tests.servers.spark_connect import connect_server

LOOK = """
import sys
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import new_session, stop_session
try:
    new_session({"spark.executor.memory": "1g"}, master=sys.argv[1], lake_url="s3://a/lake")
except ConfigurationError as error:
    print(error.setting)
session = new_session({"spark.sql.shuffle.partitions": "3"}, master=sys.argv[1], lake_url="s3://a/lake")
print(session.conf.get("spark.sql.shuffle.partitions"), session.conf.get("spark.sql.autoBroadcastJoinThreshold"))
stop_session(session)
session = new_session(master=sys.argv[1], lake_url="s3://a/lake")
print(*sorted(row.namespace for row in session.sql("SHOW DATABASES").collect()))
stop_session(session)
"""

EMPTY = """
import sys
from pathlib import Path
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.session import new_session, stop_session
from tests.orchestration.step_world import StepWorld
folder = Path(sys.argv[1])
session = new_session(master=sys.argv[2], lake_url=f"{folder}/lake")
world = StepWorld(open_lake(folder / "lake"), folder, lambda: session)
world.stream("trips", "k", 2, k="string", v="int")
world.stream("others", "k", 2, k="string", v="int")
world.send("trips", ("a", 1))
app = Application("app")
trips, others = app.input_stream("lake.trips"), app.input_stream("lake.others")
others.send_to(app.output_stream("lake.out", partitions=2, key="k"))
letters = app.output_stream("lake.letters", partitions=1)
trips.select("k", "v", "1 as w").send_to(app.table(world.table()), dead_letters=letters)
counters = run_step(world.context(app)).counters
print(*(counters[name]["rows"] for name in ("lake.out", "lake.letters")), world.records())
stop_session(session)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**without_kept_processes(os.environ), "ADJUNCT_LAKE_SHARED": "true"}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def run(folder: Path, url: str, name: str) -> subprocess.Popen[str]:
    return start("-m", connected.__name__, str(folder), url, name)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out = process.communicate(timeout=300)[0]
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


def filled(folder: Path) -> Lake:
    folder.mkdir()
    lake = open_lake(folder / "lake")
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "rates", 1, small.RATES)
    small.append(lake, "orders", 1, small.orders(0, 300))
    return lake


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.slow
def test_a_client_of_a_server_has_the_results_of_the_oracle(tmp_path: Path) -> None:
    lake = filled(tmp_path / "one")
    with connect_server(tmp_path, "local[2]") as server:
        done = ended(run(tmp_path / "one", server.url, "order_totals"))
        looked = start("-c", LOOK, server.url).communicate(timeout=300)[0].splitlines()
    assert done["success"], done["log"]
    assert set(done["passed"].values()) == {True}
    assert small.priced(lake) == small.expected(small.orders(0, 300))
    setting, values, databases = looked
    assert setting == "spark.executor.memory", "a setting that a session can't change is refused"
    assert values == "3 -1"
    own = databases.split()
    assert own.pop() == "default"
    assert len(own) <= 2, "those of the two sessions of this process"


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_clients_at_once_have_their_tables_to_themselves_and_later_ones_go_on(
    tmp_path: Path,
) -> None:
    lakes = [filled(tmp_path / name) for name in ("first", "second")]
    with connect_server(tmp_path, "local[2]") as server:
        runs = [run(tmp_path / name, server.url, "order_totals") for name in ("first", "second")]
        for done, lake in zip([*map(ended, runs)], lakes, strict=True):
            assert done["success"], done["log"]
            assert small.priced(lake) == small.expected(small.orders(0, 300))
        small.append(lakes[0], "orders", 2, small.orders(300, 300))
        assert ended(run(tmp_path / "first", server.url, "order_totals"))["success"]
    assert small.priced(lakes[0]) == small.expected(small.orders(0, 600))


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_a_small_batch_has_inputs_and_dead_letters_without_records(tmp_path: Path) -> None:
    with connect_server(tmp_path, "local[1]") as server:
        out = start("-c", EMPTY, str(tmp_path), server.url).communicate(timeout=90)[0]
    assert out.split(maxsplit=2) == ["0", "0", "{'a': (1, 1)}\n"]


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_errors_of_tasks_and_tables_of_one_run_are_as_in_process(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    lake = filled(folder)
    submitted.call(lake, folder, 1, range(3))
    with connect_server(tmp_path, "local[2]") as server:
        assert "no tariff for" in ended(run(folder, server.url, "refusals"))["failure"]
        assert ended(run(folder, server.url, "passing"))["success"]
    streams = LakeStreams(lake)
    rated = streams.read_arrow(streams.all_ranges("rated")).to_pylist()
    rates = [(id, rate) for id, _, _, _, _, rate in small.expected(small.orders(0, 300))]
    assert sorted((row["id"], row["rate"]) for row in rated) == rates


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_a_batch_survives_its_executor_and_its_server(tmp_path: Path, spark_cluster: str) -> None:
    lake = open_lake(tmp_path / "lake")
    small.create_streams(lake)
    (tmp_path / "tariffs.py").write_text(submitted.TARIFFS)
    settings = {"spark.executorEnv.PYTHONPATH": f"{ROOT}:{tmp_path}"}
    begun, go = tmp_path / "begun", tmp_path / "go"
    submitted.call(lake, tmp_path, 1, range(40))
    with connect_server(tmp_path, spark_cluster, settings) as server:
        client = run(tmp_path, server.url, "charges")
        wait_for(begun)
        os.kill(int(begun.read_text()), signal.SIGKILL)
        go.touch()
        done = ended(client)
        assert done["success"], done["log"]
        assert submitted.charges(lake) == submitted.expected(range(40))
        begun.unlink()
        go.unlink()
        submitted.call(lake, tmp_path, 2, range(40, 60))
        client = run(tmp_path, server.url, "charges")
        wait_for(begun)
        server.process.kill()
        done = ended(client)
    assert not done["success"]
    assert "Spark Connect server" in done["failure"]
    go.touch()
    with connect_server(tmp_path, spark_cluster, settings) as server:
        done = ended(run(tmp_path, server.url, "charges"))
    assert done["success"], done["log"]
    assert submitted.charges(lake) == submitted.expected(range(60))


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_server_that_does_not_answer_may_do_so_later() -> None:
    with pytest.raises(TransientError):
        new_session(master=f"sc://localhost:{free_port()}", lake_url="s3://bucket/lake")


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_a_server_that_demands_a_token_has_clients_with_it_only(tmp_path: Path) -> None:
    code = f"import sys; from {connected.__name__} import open_session; open_session(sys.argv[1])"
    with connect_server(
        tmp_path, "local[1]", {"spark.connect.authenticate.token": "secret"}
    ) as server:
        answers = [
            start("-c", code, server.url + part).communicate()[0] for part in ("", "/;token=secret")
        ]
    refused, answered = answers
    assert "spark.master" in refused
    assert "token" in refused
    assert answered.endswith("opened\n")


def test_nothing_is_submitted_to_such_a_server() -> None:
    with pytest.raises(ConfigurationError) as refused:
        SparkResource(master="sc://localhost", submit="spark-submit").submission("/srv/lake")
    assert refused.value.setting == "spark.master"


def test_rate_limits_are_refused_on_a_server_elsewhere(tmp_path: Path) -> None:
    """Its tasks would have to reach this process."""
    limited = SqliteTable(
        path=tmp_path / "t.sqlite", table="t", key="id", columns={"id": "bigint"}, create=True
    )
    app = Application("limited")
    app.input_stream("lake.calls").select("id").send_to(
        app.table(
            RemoteTable(
                "t", key="id", write_function=limited, rate_limit=RateLimit(writes_per_second=10)
            )
        )
    )
    conf: dict[str, str] = {"spark.driver.host": "127.0.0.1"}
    session: Any = type(
        "SparkSession", (), {"__module__": "pyspark.sql.connect.session", "conf": conf}
    )()
    check_credits(session, app)
    conf["spark.driver.host"] = "connect.example.com"
    with pytest.raises(ConfigurationError) as refused:
        check_credits(session, app)
    assert refused.value.application == "limited"

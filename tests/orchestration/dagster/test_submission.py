"""Runs whose Spark applications spark-submit starts: what comes back, and what their deaths
leave behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from dagster import DagsterInstance

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    SparkResource,
    build_definitions,
    open_lake,
)
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.code_location import driver
from dagster_adjunct.orchestration.code_location.submission import Exchange, do_order, pack
from dagster_adjunct.resources.objects.local_store import LocalStore
from tests.doc_blocks import ROOT
from tests.kept_processes import without_kept_processes
from tests.orchestration.dagster import small, submitted
from tests.orchestration.dagster.lab import FinishedRun
from tests.servers.s3 import S3Server

DRIVER = driver.__file__


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake with streams, and an environment in which spark-submit is that of this Python."""
    own = without_kept_processes(os.environ)
    for name in set(os.environ) - set(own):
        monkeypatch.delenv(name)
    monkeypatch.setenv("ADJUNCT_LAKE_SHARED", "true")
    lake = open_lake(tmp_path / "lake")
    small.create_streams(lake)
    (tmp_path / "tariffs.py").write_text(submitted.TARIFFS)
    with tarfile.open(tmp_path / "tariffs.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "tariffs.py", "tariffs.py")
    return lake


def run(lake: Lake, app: Application, spark: SparkResource) -> FinishedRun:
    defs = build_definitions(app, lake=lake.url, spark=spark)
    instance = DagsterInstance.ephemeral()
    job = defs.resolve_job_def(app.name.replace("-", "_"))
    return FinishedRun(job.execute_in_process(instance=instance, raise_on_error=False), instance)


def processes(*words: str) -> list[int]:
    """Return the processes whose command lines have all these words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if all(any(word in part for part in line) for word in words):
                    found.append(int(folder.name))
    return found


def until(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.5)  # looking at all processes is work


@contextmanager
def when_begun(folder: Path, act: Callable[[], object]) -> Iterator[None]:
    """Act once tasks of the run that starts here have begun; then let them go on."""

    def wait_and_act() -> None:
        until((folder / "begun").exists, 300)
        act()
        (folder / "go").touch()

    thread = Thread(target=wait_and_act, daemon=True)
    thread.start()
    yield
    thread.join()


def kill_executor(folder: Path) -> None:
    os.kill(int((folder / "begun").read_text()), signal.SIGKILL)


def kill_driver() -> None:
    (submit,) = [
        pid
        for pid in processes("SparkSubmit", "driver.py")
        if submitted.parent_of(pid) == os.getpid()
    ]
    os.kill(submit, signal.SIGKILL)


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.long
def test_an_application_on_a_cluster_survives_the_death_of_an_executor(
    lake: Lake, tmp_path: Path, spark_cluster: str
) -> None:
    """Its module comes from an archive. What it reports is what a run in process reports."""
    submitted.call(lake, tmp_path, 1, range(40))
    with when_begun(tmp_path, lambda: kill_executor(tmp_path)):
        done = run(
            lake, submitted.app, submitted.resource(tmp_path, lake.url, master=spark_cluster)
        )
    assert done.success, done.log
    assert submitted.charges(lake) == submitted.expected(range(40))
    assert done.made["charges"]["adjunct/last_batch"] == 1
    assert done.made["charges"]["adjunct/rows"] == 40
    assert "batch 1: committed; 40 records so far" in done.log
    (application,) = re.findall(rf"Spark application (\S+) on {spark_cluster}", done.log)
    until(lambda: not processes("CoarseGrainedExecutorBackend", application), 30)


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_a_batch_whose_driver_was_killed_is_ended_when_its_op_is_tried_again(
    lake: Lake, tmp_path: Path, spark_cluster: str
) -> None:
    submitted.call(lake, tmp_path, 1, range(40))
    with when_begun(tmp_path, kill_driver):
        done = run(
            lake, submitted.app, submitted.resource(tmp_path, lake.url, master=spark_cluster)
        )
    assert done.success, done.log
    assert "was ended by signal 9" in done.log
    assert submitted.charges(lake) == submitted.expected(range(40))
    until(lambda: not processes(DRIVER), 30)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long  # who takes over from the dead: test_run_lease.py
@pytest.mark.parametrize(
    ("sent", "fixture"),
    [
        pytest.param(signal.SIGKILL, None, id="is killed"),
        pytest.param(signal.SIGKILL, "spark_cluster", id="on a cluster is killed"),
        pytest.param(signal.SIGINT, "spark_cluster", id="on a cluster is cancelled"),
    ],
)
def test_an_application_ends_with_its_run_and_the_next_one_takes_over(
    lake: Lake,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
    fixture: str | None,
) -> None:
    """Dagster cancels a run by an interrupt of its process. It finds the code location by its
    working directory.
    """
    master = request.getfixturevalue(fixture) if fixture else "local[2]"
    if fixture is None:  # a driver that is its own executor unpacks no archive
        (tmp_path / "tariffs.py").write_text(submitted.TARIFFS)
        monkeypatch.syspath_prepend(tmp_path)
    submitted.call(lake, tmp_path, 1, range(40))
    for folder in ("home", "code", "temporary"):
        (tmp_path / folder).mkdir()
    code = "from dagster_adjunct import Application\nclass Charges(Application): pass\n"
    (tmp_path / "code/of_a_user.py").write_text(code)
    code = (
        "from of_a_user import Charges\nfrom tests.orchestration.dagster.submitted import"
        " charge_calls, load\n"
    )
    (tmp_path / "code/location.py").write_text(
        f"{code}defs = load({str(tmp_path)!r}, charge_calls(Charges('charges')))"
    )
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(tmp_path / "home"),
        "ADJUNCT_SPARK_MASTER": master,
    }
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    # unlike python -m, it has no folder of its own on the path
    dagster = str(Path(sys.executable).with_name("dagster"))
    command = [dagster, "job", "execute", "-d", "code", "-m", "location", "-j", "charges"]
    with (tmp_path / "run.log").open("w") as log:
        op = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    until((tmp_path / "begun").exists)
    (application,) = re.findall(
        rf"Spark application (\S+) on {re.escape(master)}", (tmp_path / "run.log").read_text()
    )
    (folder,) = (tmp_path / "temporary").glob(f"adjunct-{'?' * 8}")
    assert not {path.name for path in folder.iterdir()} & {"spark.properties", "order"}, (
        "they may have secrets"
    )
    op.send_signal(sent)
    assert op.wait(60) != 0
    until(lambda: not processes("CoarseGrainedExecutorBackend", application), 30)
    until(lambda: not processes(DRIVER), 30)
    assert not folder.exists()
    assert submitted.charges(lake) == []
    (tmp_path / "go").touch()
    done = run(lake, submitted.app, submitted.resource(tmp_path, lake.url, master=master))
    assert done.success, done.log
    assert "waiting up to" not in done.log
    assert done.made["charges"]["adjunct/rows"] == 40
    assert submitted.charges(lake) == submitted.expected(range(40))


EXPECTED_LABELS = [(id, label) for id, _, _, _, label, _ in small.expected(small.orders(0, 50))]


def labelled(lake: Lake) -> Application:
    """Return an application with one dataset, and deliver to both."""
    app = Application("labels")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.join(app.table(small.items), on="item", how="left", select=["label"]).send_to(
        app.output_stream("lake.labelled", partitions=2, key="item")
    )
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "orders", 1, small.orders(0, 50))
    return app


def labels(lake: Lake) -> list[tuple[int, str]]:
    streams = LakeStreams(lake)
    rows = streams.read_arrow(streams.all_ranges("labelled")).to_pylist()
    return sorted((row["id"], row["label"]) for row in rows)


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_an_application_reads_and_writes_a_lake_in_s3(
    lake: Lake, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in versitygw.env.items():
        monkeypatch.setenv(name, value)
    in_s3 = open_lake(versitygw.url())
    spark = SparkResource(master="local[2]", lake=in_s3.url, submit="spark-submit")
    done = run(in_s3, labelled(in_s3), spark)
    assert done.success, done.log
    assert labels(in_s3) == EXPECTED_LABELS


@pytest.mark.spark
@pytest.mark.long  # what a driver reports of a run that succeeds: test_remote_drivers.py
def test_what_needs_spark_is_submitted_and_reported_as_in_process(
    lake: Lake, tmp_path: Path
) -> None:
    """A dataset is tried without a session first; only where there are rows to process an
    application starts.
    """
    app = labelled(lake)
    spark = SparkResource(master="local[2]", lake=lake.url, submit="spark-submit")
    first = run(lake, app, spark)
    assert first.success, first.log
    assert labels(lake) == EXPECTED_LABELS
    assert first.made["items"]["adjunct/action"] == "sealed"
    assert first.made["labelled"]["adjunct/joins"] == {
        "join-2-items": {"rows": 50, "unmatched": 10}
    }
    assert first.passed == {"items adjunct_accepted": True, "labelled match_rate_items": True}
    assert len(re.findall(r"Spark application", first.log)) == 2
    second = run(lake, app, spark)
    assert second.success, second.log
    assert "Spark application" not in second.log


@pytest.mark.spark
@pytest.mark.slow
def test_an_error_in_the_application_fails_the_run_as_it_would_in_process(
    lake: Lake, tmp_path: Path
) -> None:
    submitted.call(lake, tmp_path, 1, range(3))
    done = run(
        lake,
        submitted.refusing,
        SparkResource(master="local[1]", lake=lake.url, submit="spark-submit"),
    )
    assert not done.success
    assert done.failure.metadata["error"].value == "OperatorFailedError"
    assert done.failure.metadata["permanent"].value is True
    assert "no tariff for" in done.failure.description
    assert "adjunct checkpoint abandon refusals" in done.failure.description


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"submit": "no-such-spark-submit"}, "submit"),
        ({"master": "none"}, "spark.master"),
        ({"spark_config": {"spark.submit.deployMode": "cluster"}}, "spark.submit.deployMode"),
    ],
)
def test_what_can_not_be_submitted_is_refused(settings: dict[str, Any], setting: str) -> None:
    resource = SparkResource(**{"master": "local[1]", "submit": "spark-submit", **settings})
    with pytest.raises(ConfigurationError) as refused:
        resource.submission("/srv/lake")
    assert refused.value.setting == setting


def test_an_application_of_a_module_that_the_driver_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "order").write_bytes(b"cno_such_module_of_a_user\nwork\n.")
    reported: list[str] = []
    with pytest.raises(ConfigurationError) as refused:
        do_order(Exchange(LocalStore(tmp_path), ""), reported.append)
    assert refused.value.module == "no_such_module_of_a_user"
    assert reported == [pack("error", refused.value)]

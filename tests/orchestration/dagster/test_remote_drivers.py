"""Runs whose drivers are in services of AWS or in pods: what comes back, and what their deaths
leave.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.pipes.context import PipesMessageHandler

from dagster_adjunct import Application, Lake, SparkResource, open_lake
from dagster_adjunct.code_location import EmrCluster, EmrServerless, Glue, Kubernetes
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.code_location import spark_services, submission
from dagster_adjunct.orchestration.code_location.submission import Exchange, Inbox, do_order, pack
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.doc_blocks import ROOT
from tests.faulty_store import Fault, FaultyStore
from tests.kept_processes import without_kept_processes
from tests.orchestration.dagster import small, submitted
from tests.orchestration.dagster.lab import FinishedRun
from tests.orchestration.dagster.test_submission import run, until, when_begun
from tests.servers.s3 import SECRET_KEY, S3Server
from tests.servers.spark_services import (
    APPLICATION,
    CLUSTER,
    JOB,
    ROLE,
    EmrServerlessStandIn,
    EmrStandIn,
    GlueStandIn,
    KubernetesStandIn,
    StandIn,
)

QUICK = {
    "spark.jars.ivy": str(Path.home() / ".cache/dagster-adjunct/ivy"),
    "spark.ui.enabled": "false",
}


@pytest.fixture
def lake(tmp_path: Path, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake in S3 with calls to charge, and an environment in which nothing is kept."""
    own = without_kept_processes(os.environ)
    for name in set(os.environ) - set(own):
        monkeypatch.delenv(name)
    versitygw.set_in(monkeypatch)
    monkeypatch.setattr(spark_services, "_POLL_SECONDS", 0.3)
    lake = open_lake(versitygw.url())
    small.create_streams(lake)
    submitted.call(lake, tmp_path, 1, range(40))
    (tmp_path / "image").mkdir()
    (tmp_path / "image/tariffs.py").write_text(submitted.TARIFFS)
    return lake


@pytest.fixture
def emr(
    tmp_path: Path, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmrServerlessStandIn]:
    stand_in = EmrServerlessStandIn(tmp_path / "jobs", versitygw, [tmp_path / "image"])
    with stand_in.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_EMR_SERVERLESS", url)
        monkeypatch.setenv("EMR_APPLICATION", APPLICATION)
        yield stand_in


@pytest.fixture
def cluster(
    tmp_path: Path, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmrStandIn]:
    stand_in = EmrStandIn(tmp_path / "steps", versitygw, [tmp_path / "image"])
    with stand_in.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_EMR", url)
        monkeypatch.setenv("EMR_CLUSTER", CLUSTER)
        yield stand_in


@pytest.fixture
def glue(
    tmp_path: Path, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GlueStandIn]:
    stand_in = GlueStandIn(tmp_path / "runs", versitygw, [tmp_path / "image"])
    with stand_in.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", url)
        monkeypatch.setenv("GLUE_JOB", JOB)
        yield stand_in


def on_emr(lake: str, **settings: Any) -> SparkResource:
    service = EmrServerless(
        application_id=dg.EnvVar("EMR_APPLICATION"), execution_role=ROLE, **settings
    )
    return SparkResource(lake=lake, emr_serverless=service, spark_config=QUICK)


def on_cluster(lake: str, **settings: Any) -> SparkResource:
    declared = {"cluster_id": dg.EnvVar("EMR_CLUSTER"), "python": sys.executable, **settings}
    service = EmrCluster(**declared)
    return SparkResource(lake=lake, emr_cluster=service, master="local[2]", spark_config=QUICK)


def on_glue(lake: str, **settings: Any) -> SparkResource:
    return SparkResource(
        lake=lake, glue=Glue(**{"job_name": dg.EnvVar("GLUE_JOB"), **settings}), spark_config=QUICK
    )


RESOURCES = {"emr": on_emr, "cluster": on_cluster, "glue": on_glue}


def left(lake: Lake) -> list[str]:
    return [item.key for item in lake.store.list("exchanges/")]


def check_as_in_process(lake: Lake, done: FinishedRun, service: StandIn, engine: str) -> None:
    """Check what a run has charged and reported, and that Spark was started only if it is the
    engine.
    """
    assert done.success, done.log + service.logs()
    assert submitted.charges(lake) == submitted.expected(range(40))
    assert done.made["charges"]["adjunct/last_batch"] == 1
    assert done.made["charges"]["adjunct/rows"] == 40
    assert "batch 1: committed; 40 records so far" in done.log
    assert bool(re.search(r"Spark application \S+ on local\[2\]", done.log)) == (engine == "spark")
    assert left(lake) == []


@pytest.mark.server
@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long])]
)
def test_a_job_run_computes_and_reports_what_a_run_in_process_does(
    lake: Lake, tmp_path: Path, emr: EmrServerlessStandIn, engine: str
) -> None:
    """The job run has only what its request, its role and its image give it."""
    for name in ("begun", "go"):
        (tmp_path / name).touch()
    overrides = {
        "monitoringConfiguration": {"managedPersistenceMonitoringConfiguration": {"enabled": True}}
    }
    request = {"executionTimeoutMinutes": 60, "configurationOverrides": overrides}
    app = submitted.charge_calls(Application("charges", engine=engine))
    done = run(lake, app, on_emr(lake.url, request=request))
    check_as_in_process(lake, done, emr, engine)
    assert "not be able to receive" not in done.log
    (sent,) = emr.requests
    assert sent["executionTimeoutMinutes"] == 60
    assert (
        sent["configurationOverrides"]["monitoringConfiguration"]
        == overrides["monitoringConfiguration"]
    )
    assert SECRET_KEY not in json.dumps(sent)
    assert str(ROOT) not in json.dumps(sent), "paths of this machine"
    policy = json.loads((ROOT / "deploy/iam/emr-serverless.json").read_text("utf-8"))
    allowed = {
        action.removeprefix("emr-serverless:") for action in policy["Statement"][0]["Action"]
    }
    assert allowed == {*emr.operations, "CancelJobRun", "TagResource"}
    assert sent["tags"]["dagster/run-id"]


@pytest.mark.server
@pytest.mark.long  # how a step begins and fails is below; that what is computed comes back, above
@pytest.mark.parametrize("engine", ["auto", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_step_computes_and_reports_what_a_run_in_process_does(
    lake: Lake, tmp_path: Path, cluster: EmrStandIn, engine: str
) -> None:
    """The step has only what its request, its role and its node give it.

    Neither too many questions for it nor a lost reply do any harm: it is not added twice.
    """
    for name in ("begun", "go"):
        (tmp_path / name).touch()
    cluster.failing, cluster.losing = 6, 1  # botocore itself asks five times
    app = submitted.charge_calls(Application("charges", engine=engine))
    done = run(lake, app, on_cluster(lake.url, environment={"ORDERS_STAGE": "test"}))
    check_as_in_process(lake, done, cluster, engine)
    (sent,) = cluster.requests
    assert sent["ActionOnFailure"] == "CONTINUE", "the cluster outlives it"
    assert {"ORDERS_STAGE=test", "HADOOP_CONF_DIR=/etc/hadoop/conf"} < set(
        sent["HadoopJarStep"]["Args"]
    )
    assert SECRET_KEY not in json.dumps(sent)
    assert str(ROOT) not in json.dumps(sent).replace(sys.executable, ""), "paths of this machine"
    policy = json.loads((ROOT / "deploy/iam/emr-cluster.json").read_text("utf-8"))
    allowed = {
        action.removeprefix("elasticmapreduce:") for action in policy["Statement"][0]["Action"]
    }
    assert allowed == {*cluster.operations, "CancelSteps"}


@pytest.mark.server
@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long])]
)
def test_a_run_of_a_glue_job_computes_and_reports_what_a_run_in_process_does(
    lake: Lake, tmp_path: Path, glue: GlueStandIn, engine: str
) -> None:
    """The run has only what its request, its role and its job give it; the lake's settings win over
    those of Glue.

    A lost reply starts no second run.
    """
    for name in ("begun", "go"):
        (tmp_path / name).touch()
    glue.is_busy = engine == "spark"  # the op is tried again, which takes a while
    glue.losing = 1
    app = submitted.charge_calls(Application("charges", engine=engine))
    resource = on_glue(
        lake.url, arguments={"--enable-metrics": "true"}, request={"NumberOfWorkers": 4}
    )
    done = run(lake, app, resource)
    check_as_in_process(lake, done, glue, engine)
    (sent,) = glue.requests
    assert (sent["NumberOfWorkers"], sent["Arguments"]["--enable-metrics"]) == (4, "true")
    assert SECRET_KEY not in json.dumps(sent)
    assert str(ROOT) not in json.dumps(sent), "paths of this machine"
    policy = json.loads((ROOT / "deploy/iam/glue.json").read_text("utf-8"))
    allowed = {action.removeprefix("glue:") for action in policy["Statement"][0]["Action"]}
    assert allowed == {*glue.operations, "BatchStopJobRun"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"arguments": {"--db-password": "shown-to-nobody"}}, "--db-password"),
        ({"arguments": {"--scriptLocation": "s3://b/own.py"}}, "--scriptLocation"),
        ({"request": {"Arguments": {"--x": "y"}}}, "Arguments"),
        ({"request": {"WorkerType": "G.1000X"}}, "G.1000X"),
        ({"job_name": "missing"}, "Entity missing does not exist"),
    ],
)
def test_a_glue_job_that_can_not_be_run_fails_its_run_for_good(
    lake: Lake, glue: GlueStandIn, settings: dict[str, Any], named: str
) -> None:
    done = run(lake, submitted.app, on_glue(lake.url, **settings))
    assert done.failure.metadata["error"].value == "ConfigurationError"
    assert named in done.failure.description
    assert "shown-to-nobody" not in done.failure.description
    assert glue.processes == {}
    assert left(lake) == []


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("emr", "EMR Serverless job failed"),
        ("cluster", "step 00f0 of EMR"),
        ("glue", "Glue job orders-spark run 00f0"),
    ],
)
def test_a_batch_whose_driver_was_killed_is_ended_when_its_op_is_tried_again(
    lake: Lake, tmp_path: Path, service: str, reason: str, request: pytest.FixtureRequest
) -> None:
    stand_in: StandIn = request.getfixturevalue(service)
    with when_begun(tmp_path, lambda: stand_in.stop("00f0", signal.SIGKILL)):
        done = run(lake, submitted.app, RESOURCES[service](lake.url))
    assert done.success, done.log + stand_in.logs()
    assert f"the driver of the Spark application ended early: {reason}" in done.log
    assert len(stand_in.requests) == 2
    assert submitted.charges(lake) == submitted.expected(range(40))
    assert left(lake) == []


LOCATION = """
from dagster_adjunct import Application, build_definitions
from dagster_adjunct.orchestration.batch_log.run_lease import Process
from dagster_adjunct.orchestration.code_location import submission
from tests.orchestration.dagster.submitted import app
from tests.orchestration.dagster.test_remote_drivers import RESOURCES

submission.this_process = lambda: Process(host="elsewhere", pid=1)
submission._TTL *= 0.1
defs = build_definitions(app, lake={url!r}, spark=RESOURCES[{service!r}]({url!r}))
"""


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("service", ["emr", "cluster", "glue"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["is cancelled", "is killed"])
def test_a_driver_ends_with_its_run_and_the_next_one_takes_over(
    lake: Lake, tmp_path: Path, service: str, request: pytest.FixtureRequest, sent: signal.Signals
) -> None:
    """A run that is cancelled cancels the job run or the step. One that is killed is missed by
    its heartbeat, in S3.
    """
    stand_in: StandIn = request.getfixturevalue(service)
    (tmp_path / "home").mkdir()
    (tmp_path / "location.py").write_text(LOCATION.format(url=lake.url, service=service))
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "job",
        "execute",
        "-m",
        "location",
        "-j",
        "charges",
    ]
    with (tmp_path / "run.log").open("w") as log:
        op = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    until((tmp_path / "begun").exists, 300)
    assert not [key for key in left(lake) if key.endswith("order")]
    op.send_signal(sent)
    assert op.wait(60) != 0
    until(lambda: stand_in.processes["00f0"].poll() is not None, 30)
    assert stand_in.stopped == ({"00f0"} if sent == signal.SIGINT else set())
    assert left(lake) == []
    assert submitted.charges(lake) == []
    (tmp_path / "go").touch()
    done = run(lake, submitted.app, RESOURCES[service](lake.url))
    assert done.success, done.log + stand_in.logs()
    assert submitted.charges(lake) == submitted.expected(range(40))


def test_a_pod_computes_and_reports_what_a_run_in_process_does(
    lake: Lake, tmp_path: Path, versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver prints comes back too, since a pod is deleted with its log."""
    for name in ("begun", "go"):
        (tmp_path / name).touch()
    printed: list[str] = []
    monkeypatch.setattr(
        PipesMessageHandler,
        "_handle_log_external_stream",
        lambda self, stream, text, extras: printed.append(text),
    )
    cluster = KubernetesStandIn(tmp_path / "pods", versitygw, [tmp_path / "image"])
    with cluster.serving() as url:
        limits = {"limits": {"cpu": "2", "memory": "4Gi"}}
        kubernetes = Kubernetes(
            image="registry.example.com/orders:1",
            namespace="orders",
            service_account="orders-runs",
            environment={"ORDERS_STAGE": "test"},
            pod_spec={
                "containers": [{"resources": limits, "envFrom": [{"secretRef": {"name": "dsn"}}]}]
            },
            kubeconfig=str(cluster.write_config(url, tmp_path / "kubeconfig")),
        )
        app = submitted.charge_calls(Application("charges", engine="auto"))
        done = run(lake, app, SparkResource(kubernetes=kubernetes))
    check_as_in_process(lake, done, cluster, "auto")
    assert "charging 39\n" in "".join(printed)
    (pod,) = cluster.requests
    container = pod["spec"]["containers"][0]
    assert (pod["spec"]["serviceAccountName"], pod["spec"]["restartPolicy"]) == (
        "orders-runs",
        "Never",
    )
    assert (container["image"], container["resources"]) == ("registry.example.com/orders:1", limits)
    assert {"name": "ORDERS_STAGE", "value": "test"} in container["env"]
    assert cluster.pods == {}, "deleted"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"lake_url": "/srv/lake"}, "lake"),
        ({"master": "sc://localhost:15002"}, "spark.master"),
        ({"master": "none"}, "spark.master"),
        ({"master": "local[2]"}, "spark.master"),
        (
            {"spark_config": {"spark.hadoop.fs.s3a.secret.key": "shown-to-nobody"}},
            "spark.hadoop.fs.s3a.secret.key",
        ),
        (
            {"spark_config": {"spark.executorEnv.AWS_ACCESS_KEY_ID": "x"}},
            "spark.executorEnv.AWS_ACCESS_KEY_ID",
        ),
        ({"spark_config": {"spark.submit.deployMode": "cluster"}}, "spark.submit.deployMode"),
        ({"submit": "spark-submit"}, None),
    ],
)
def test_what_can_not_run_elsewhere_is_refused(
    settings: dict[str, Any], setting: str | None
) -> None:
    lake = settings.pop("lake_url", "s3://bucket/lake")
    resource = SparkResource(
        emr_serverless=EmrServerless(application_id=APPLICATION, execution_role=ROLE), **settings
    )
    with pytest.raises(ConfigurationError) as refused:
        resource.submission(lake)
    assert refused.value.setting == setting
    assert "shown-to-nobody" not in str(refused.value)


@pytest.mark.parametrize(
    "service", [Glue(job_name=JOB), EmrServerless(application_id=APPLICATION, execution_role=ROLE)]
)
def test_services_with_a_master_of_their_own_get_none(service: Glue | EmrServerless) -> None:
    name = "glue" if isinstance(service, Glue) else "emr_serverless"
    _, settings = SparkResource(**{name: service}).submission("s3://bucket/lake")
    assert "spark.master" not in settings
    with pytest.raises(ConfigurationError, match="masters of their own"):
        SparkResource(master="yarn", **{name: service}).submission("s3://bucket/lake")


def test_steps_of_a_cluster_have_yarn_for_their_master_unless_another_is_declared() -> None:
    service = EmrCluster(cluster_id=CLUSTER, python="/opt/adjunct/bin/python")
    for declared, used in ((None, "yarn"), ("local[*]", "local[*]")):
        _, settings = SparkResource(emr_cluster=service, master=declared).submission(
            "s3://bucket/lake"
        )
        assert settings["spark.master"] == used


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"environment": {"DB_PASSWORD": "shown-to-nobody"}}, "DB_PASSWORD"),
        ({"cluster_id": "j-0"}, "Cluster id is not valid"),
        (
            {"python": "/opt/missing/bin/python"},
            f"step 00f0 of EMR cluster {CLUSTER} is FAILED: Unknown Error. s3://",
        ),
    ],
)
def test_a_step_that_can_not_begin_fails_its_run_for_good(
    lake: Lake, cluster: EmrStandIn, settings: dict[str, Any], named: str
) -> None:
    done = run(lake, submitted.app, on_cluster(lake.url, **settings))
    assert done.failure.metadata["error"].value == "ConfigurationError"
    assert named in done.failure.description
    assert "shown-to-nobody" not in done.failure.description
    assert "CancelSteps" not in cluster.operations
    assert left(lake) == []


def test_a_step_that_somebody_cancels_before_it_begins_is_tried_again(
    lake: Lake, cluster: EmrStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.orchestration.code_location.metadata._RETRY_SECONDS", 0.01)
    cluster.stopped.add("00f0")
    done = run(lake, submitted.app, on_cluster(lake.url, python="/opt/missing/bin/python"))
    assert f"step 00f0 of EMR cluster {CLUSTER} is CANCELLED: EMR gives no reason." in done.log
    assert f"step 00f1 of EMR cluster {CLUSTER} is FAILED" in done.failure.description
    assert len(cluster.requests) == 2


def test_references_to_secrets_are_no_secrets_and_executors_are_pods_of_the_image() -> None:
    references = {"spark.hadoop.javax.jdo.option.ConnectionPassword": "EMR.secret@metastore"}
    references |= {"spark.kubernetes.executor.secretKeyRef.DSN": "dsn:url"}
    kubernetes = Kubernetes(image="orders:1", namespace="orders", service_account="runs")
    spark = SparkResource(
        master="k8s://https://kubernetes", kubernetes=kubernetes, spark_config=references
    )
    _, settings = spark.submission("s3://bucket/lake")
    assert settings["spark.kubernetes.container.image"] == "orders:1"
    assert settings["spark.kubernetes.executor.secretKeyRef.DSN"] == "dsn:url"


def test_a_reference_to_a_secret_is_left_to_the_service(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the driver the secret in place of the reference, which the order would put back."""
    orders: list[submission.Order] = []

    def refuse(exchange: Exchange, order: submission.Order) -> None:
        orders.append(order)
        raise ConfigurationError("no run.", "Stop.", argument="x")

    monkeypatch.setattr(Exchange, "offering", refuse)
    config = {
        "spark.hadoop.javax.jdo.option.ConnectionPassword": "EMR.secret@metastore",
        "spark.executor.memory": "2g",
    }
    service = EmrServerless(application_id=APPLICATION, execution_role=ROLE)
    run(
        lake,
        submitted.app,
        SparkResource(lake=lake.url, emr_serverless=service, spark_config=config),
    )
    (order,) = orders
    assert order.settings["spark.executor.memory"] == "2g"
    assert "spark.hadoop.javax.jdo.option.ConnectionPassword" not in order.settings


def test_a_variable_of_a_pod_that_looks_like_a_secret_is_refused(
    lake: Lake, tmp_path: Path
) -> None:
    secret = "shown-to-nobody"
    container = {"name": "driver", "env": [{"name": "DB_PASSWORD", "value": secret}]}
    for where in (
        {"environment": {"DB_PASSWORD": secret}},
        {"pod_spec": {"containers": [container]}},
    ):
        done = run(
            lake, submitted.app, SparkResource(kubernetes=Kubernetes(image="orders:1", **where))
        )
        assert done.failure.metadata["error"].value == "ConfigurationError"
        assert "DB_PASSWORD" in done.failure.description
        assert secret not in done.failure.description


@pytest.mark.parametrize(
    ("pod_spec", "named"),
    [
        ({"nodeSelecter": {"disk": "ssd"}}, "nodeSelecter"),
        ({"containers": {"resources": {}}}, "pod_spec is not the specification of a pod"),
        (
            {"containers": [{"image": "another:1", "command": ["sh"]}]},
            "pod_spec sets image and command",
        ),
    ],
)
def test_a_specification_that_is_none_of_a_pod_is_refused(
    lake: Lake, pod_spec: dict[str, Any], named: str
) -> None:
    kubernetes = Kubernetes(image="orders:1", pod_spec=pod_spec)
    done = run(lake, submitted.app, SparkResource(kubernetes=kubernetes))
    assert done.failure.metadata["error"].value == "ConfigurationError"
    assert named in done.failure.description


@pytest.mark.parametrize(
    "request_", [{"jobDriver": {"sparkSubmit": {}}}, {"configurationOverrides": "spark.x=1"}]
)
def test_parts_of_a_request_that_would_be_ignored_are_refused(
    lake: Lake, emr: EmrServerlessStandIn, request_: dict[str, Any]
) -> None:
    done = run(lake, submitted.app, on_emr(lake.url, request=request_))
    assert done.failure.metadata["error"].value == "ConfigurationError"
    assert next(iter(request_)) in done.failure.description
    assert emr.processes == {}


def test_a_run_fails_for_good_if_the_service_refuses_or_its_client_is_missing(
    lake: Lake, emr: EmrServerlessStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run(lake, submitted.app, on_emr(lake.url, request={"executionTimeoutMinutes": -1}))
    assert refused.failure.metadata["error"].value == "ConfigurationError"
    assert "executionTimeoutMinutes" in refused.failure.description
    monkeypatch.setitem(sys.modules, "dagster_aws.pipes", None)
    missing = run(lake, submitted.app, on_emr(lake.url))
    assert "dagster-adjunct[aws]" in missing.failure.description
    assert emr.processes == {}
    assert left(lake) == []


@pytest.mark.parametrize("name", ["Python", "Spark", "dagster-adjunct"])
def test_a_driver_of_other_versions_is_refused(name: str) -> None:
    exchange = Exchange(InMemoryStore(), "", versions={name: "3.9"})
    reported: list[str] = []
    with pytest.raises(ConfigurationError, match=rf"has {name} .*: expected 3\.9") as refused:
        do_order(exchange, reported.append)
    assert reported == [pack("error", refused.value)]


class Heard:
    """What Dagster gets of messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def handle_message(self, message: Any) -> None:
        self.messages.append(message["params"])


def test_messages_of_threads_arrive_in_order_and_whole() -> None:
    """Also those that were sent just before the driver ended."""
    exchange, received, numbers = Exchange(InMemoryStore(), "a/"), Heard(), []
    inbox = Inbox(exchange, {"number": numbers.append}, with_output=False)

    def tell(first: int) -> None:
        for number in range(first, first + 20):
            payload = {"payload": pack("number", number)}
            exchange.write_message(
                {
                    "__dagster_pipes_version": "0.1",
                    "method": "report_custom_message",
                    "params": payload,
                }
            )

    with exchange.offering("work"):
        with inbox.read_messages(received):
            threads = [threading.Thread(target=tell, args=(first,)) for first in (0, 20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            exchange.write_message(
                {"__dagster_pipes_version": "0.1", "method": "closed", "params": {"last": True}}
            )
        assert sorted(numbers) == list(range(40))
        assert [number for number in numbers if number < 20] == list(range(20))
        assert received.messages == [{"last": True}]
        assert not inbox.is_open
    assert list(exchange.store.list("a/")) == []


def test_a_message_that_can_not_be_deleted_ends_nothing() -> None:
    store = InMemoryStore()
    exchange, numbers = (
        Exchange(FaultyStore(store, [Fault("delete", 1, "throttle")]), "a/"),
        list[int](),
    )
    inbox = Inbox(exchange, {"number": numbers.append}, with_output=False)
    with inbox.read_messages(Heard()):
        for number in (1, 2):
            payload = {"payload": pack("number", number)}
            exchange.write_message(
                {
                    "__dagster_pipes_version": "0.1",
                    "method": "report_custom_message",
                    "params": payload,
                }
            )
    inbox.raise_error(None)
    assert numbers == [1, 2]
    assert [item.key for item in store.list("a/")] == ["a/messages/1"]


@pytest.mark.lengthy
def test_an_op_is_taken_for_dead_when_its_heartbeat_stops_or_is_gone() -> None:
    store = InMemoryStore()
    op, driver = Exchange(store, "a/", ttl=0.4), Exchange(store, "a/", ttl=0.4)
    deadline = time.monotonic() + 1.2
    with op.offering("work"):
        while time.monotonic() < deadline:
            assert driver.op_lives()
            time.sleep(0.05)
        beat = store.get("a/op").data
    assert not driver.op_lives()
    store.put("a/op", beat)
    assert driver.op_lives()
    time.sleep(0.5)
    assert not driver.op_lives()

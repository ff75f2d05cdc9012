"""Services that run Spark applications for ops: each starts one, waits for its end, and stops it if
the run ends.

Each is a client of Dagster Pipes. `run` returns when the application has succeeded, and raises an
error if it fails. `is_remote` says that the driver is on another machine: then op and driver
exchange data in the lake, without secrets.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import dagster as dg
from pydantic import Field

from dagster_adjunct.orchestration.code_location.dagster_internals import DagsterPipesExecutionError
from dagster_adjunct.orchestration.code_location.submission import (
    SECRET_REFERENCE,
    SETTINGS,
    STOP_SECONDS,
    Exchange,
    Inbox,
)
from dagster_adjunct.resources.aws import new_session, stale_reason
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, TransientError
from dagster_adjunct.resources.package_files import package_file, read_package_file
from dagster_adjunct.resources.spark.tasks import lost_process_error
from dagster_adjunct.resources.validation import validated

_DRIVER = "driver.py"
_DRIVER_FILE = f"orchestration/code_location/{_DRIVER}"
_MODULE = f"{__package__}.driver"
_BY_SIGNAL = 128  # the exit code of a process ended by a signal is this plus the signal's number
_POLL_SECONDS = 5.0
_STARTS = 5  # attempts to start one application
# The names that Spark redacts, without the settings that only refer to secrets of Kubernetes.
_SECRET = re.compile(
    r"(?i)(?!spark\.kubernetes\.(driver|executor)\.secret).*(secret|password|token|access[._]?key)"
)
# Executors connect to the driver by the name of its node, unless the declared variables say
# otherwise.
_ON_NODE = 'export SPARK_LOCAL_HOSTNAME=$(hostname -f) SPARK_LOCAL_IP=$(hostname -f); exec env "$@"'
_SCRIPT = "--scriptLocation"  # takes precedence over the script of a Glue job
_START = "--adjunct-start"  # identifies a start of a Glue job
_GLUE_GOES_ON = ("WAITING", "STARTING", "RUNNING", "STOPPING")
_TOO_MANY = re.compile("Throttling|ConcurrentRunsExceeded")
_CLIENT = re.compile(r"(botocore|kubernetes|urllib3)(\.|$)")
# base classes in botocore and urllib3
_UNANSWERED = {"HTTPClientError", "ConnectionError", "HTTPError"}


def check_no_secrets(settings: Mapping[str, str], what: str) -> None:
    """Raise ConfigurationError for a setting whose name looks like a secret's, without showing its
    value.

    References to secrets are allowed. `what` names the kind of setting in the error.
    """
    for name, value in settings.items():
        if _SECRET.match(name) and not value.startswith(SECRET_REFERENCE):
            raise ConfigurationError(
                f"{what} {name} looks like a secret, and would be sent to the driver on another"
                " machine.",
                "Leave it out: give the service a role, or a reference to a secret that it reads"
                " itself.",
                setting=name,
            )


@dataclass(frozen=True, slots=True)
class SparkSubmit:
    """The program spark-submit, whose driver is a process on this machine."""

    command: str
    is_remote: ClassVar[bool] = False

    def run(
        self, context: Any, inbox: Inbox, exchange: Exchange, settings: Mapping[str, str]
    ) -> None:
        """Run the driver as a child process until its end. Raises TransientError if a signal ended
        it.
        """
        lines = "".join(f"{key} {_escape(value)}\n" for key, value in settings.items())
        exchange.store.put(exchange.key(SETTINGS), lines.encode())
        command = [
            self.command,
            "--load-spark-defaults",
            "--properties-file",
            exchange.url(SETTINGS),
            str(package_file(_DRIVER_FILE)),
        ]
        client = dg.PipesSubprocessClient(
            message_reader=inbox, termination_timeout_seconds=STOP_SECONDS
        )
        try:
            client.run(
                context=context, command=command, env={"PYTHONPATH": _python_path(context.run)}
            )
        except DagsterPipesExecutionError as error:
            ended_by = 0
            if found := re.search(r"code (-?\d+)$", str(error)):
                ended_by = _signal_of(int(found[1]))
            if 0 < ended_by < signal.NSIG:
                raise lost_process_error(
                    f"the driver of the Spark application was ended by signal {ended_by}."
                ) from error
            raise


def _signal_of(code: int) -> int:
    """Return the number of the signal that ended a process with this exit code; a number that is
    no signal's (0 or less, or too large) for other codes.
    """
    if code < 0:  # of the process itself
        return -code
    return code - _BY_SIGNAL  # of a shell around it


def _escape(value: str) -> str:
    """Return the value as it is written in a file of Java properties."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _python_path(run: dg.DagsterRun) -> str:
    """Return the PYTHONPATH on which the driver finds the modules that this process has imported.

    That includes the folder of the code location, which Dagster has on its own path only while it
    loads the location.
    """
    pointer = run.job_code_origin and run.job_code_origin.repository_origin.code_pointer
    folders = [*sys.path, getattr(pointer, "working_directory", None)]
    return os.pathsep.join(dict.fromkeys(folder or str(Path.cwd()) for folder in folders))


@validated
class EmrServerless(dg.Config):
    """An application of EMR Serverless: each driver is a job run, started by
    `PipesEMRServerlessClient`.

    Its script is an object in the lake. The modules that it imports must be in the application's
    image or in `spark.archives`.
    """

    application_id: str
    execution_role: str = Field(
        description="ARN of the role of its job runs, which needs what runs need of the lake."
    )
    region: str | None = Field(default=None, description="By default that of boto3's own chain.")
    request: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the request StartJobRun, such as executionTimeoutMinutes.",
    )

    is_remote: ClassVar[bool] = True

    def run(
        self, context: Any, inbox: Inbox, exchange: Exchange, settings: Mapping[str, str]
    ) -> None:
        """Run the driver as a job run of the application until its end."""
        pipes: Any = _import_client("dagster_aws.pipes", "PipesEMRServerlessClient", "aws")

        class Client(pipes):  # type: ignore[misc]
            def _read_messages(self, *args: object) -> None:
                """Do nothing: messages come through the exchange, not through CloudWatch, where
                Dagster looks.
                """

        _check_not_given(
            self.request, ("applicationId", "executionRoleArn", "jobDriver"), "request"
        )
        exchange.store.put(exchange.key(_DRIVER), read_package_file(_DRIVER_FILE).encode())
        # the service rejects empty values
        own = {name: value for name, value in settings.items() if value.strip()}
        overrides = self.request.get("configurationOverrides", {})
        if not isinstance(overrides, dict):
            raise ConfigurationError(
                f"the request's configurationOverrides are {type(overrides).__name__}: expected a"
                " mapping.",
                "Write them as StartJobRun has them.",
                argument="request",
            )
        ours = {"classification": "spark-defaults", "properties": own}
        configured = [*overrides.get("applicationConfiguration", []), ours]
        request = {
            "name": f"{context.job_name} {context.run.run_id}",
            **self.request,
            "applicationId": self.application_id,
            "executionRoleArn": self.execution_role,
            "jobDriver": {"sparkSubmit": {"entryPoint": exchange.url(_DRIVER)}},
            "configurationOverrides": {**overrides, "applicationConfiguration": configured},
        }
        with _translated_errors("EMR Serverless"):
            service: Any = new_session().create_client("emr-serverless", region_name=self.region)
            client = Client(client=service, message_reader=inbox, poll_interval=_POLL_SECONDS)
            client.run(context=context, start_job_run_params=request)


@validated
class EmrCluster(dg.Config):
    """A running cluster of EMR on EC2: each driver is a step on the primary node, and its executors
    are on YARN.

    Dagster's own client can't be used, because it starts a cluster for each run. The nodes must
    have Java and the modules that the driver imports.
    """

    cluster_id: str
    python: str = Field(description="Path of the nodes' Python, such as /opt/adjunct/bin/python.")
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables of the driver, without secrets."
    )
    region: str | None = Field(default=None, description="By default that of boto3's own chain.")

    is_remote: ClassVar[bool] = True

    def run(
        self, context: Any, inbox: Inbox, exchange: Exchange, settings: Mapping[str, str]
    ) -> None:
        """Run the driver as a step until its end; cancel the step if an error ends the wait."""
        check_no_secrets(self.environment, "the variable")
        with dg.open_pipes_session(context, dg.PipesEnvContextInjector(), inbox) as session:
            variables = {
                "HADOOP_CONF_DIR": "/etc/hadoop/conf",
                **self.environment,
                **session.get_bootstrap_env_vars(),
            }
            command = [
                *(f"{name}={value}" for name, value in variables.items()),
                self.python,
                "-m",
                _MODULE,
            ]
            step = {
                "Name": f"{context.job_name} {context.run.run_id} {uuid4().hex[:8]}",
                "ActionOnFailure": "CONTINUE",
                "HadoopJarStep": {
                    "Jar": "command-runner.jar",
                    "Args": ["bash", "-c", _ON_NODE, "driver", *command],
                },
            }
            with _translated_errors("EMR"):
                service: Any = new_session().create_client("emr", region_name=self.region)
                step_id = self._add(service, step)
            context.log.info(f"The driver is step {step_id} of EMR cluster {self.cluster_id}")
            try:
                asked = {"ClusterId": self.cluster_id, "StepId": step_id}
                status = _wait_for_end(
                    "EMR",
                    lambda: service.describe_step(**asked)["Step"]["Status"],
                    lambda status: status["State"] not in ("PENDING", "RUNNING", "CANCEL_PENDING"),
                )
            except BaseException:
                # If that fails, the driver ends because it misses the heartbeat of this process.
                with suppress(AdjunctError), _translated_errors("EMR"):
                    service.cancel_steps(ClusterId=self.cluster_id, StepIds=[step_id])
                raise
        if (state := status["State"]) == "COMPLETED":
            return
        facts = {**status.get("StateChangeReason", {}), **status.get("FailureDetails", {})}
        reason = " ".join(facts[name] for name in ("Reason", "Message", "LogFile") if name in facts)
        problem = (
            f"step {step_id} of EMR cluster {self.cluster_id} is {state}:"
            f" {reason or 'EMR gives no reason'}."
        )
        if state != "FAILED":
            raise TransientError(problem, "Run it again.")
        raise ConfigurationError(
            problem,
            "Check that all nodes have this Python, with Spark and the modules that the driver"
            " imports.",
            argument="python",
        )

    def _add(self, service: Any, step: Mapping[str, Any]) -> str:
        """Add a step to the cluster and return its id. The step has a unique name."""
        once = _client_without_retries("emr", self.region)

        def add() -> str:
            (added,) = once.add_job_flow_steps(JobFlowId=self.cluster_id, Steps=[step])["StepIds"]
            return str(added)

        def find() -> str | None:
            newest = service.list_steps(ClusterId=self.cluster_id)["Steps"]
            ids = (str(found["Id"]) for found in newest if found["Name"] == step["Name"])
            return next(ids, None)

        return _start_once("EMR", add, find)


@validated
class Glue(dg.Config):
    """A job of AWS Glue: each driver is a run of the job, started by `PipesGlueClient`; its script
    is in the lake.

    The job must be of type glueetl and have the modules that the driver imports. It uses Glue's own
    Spark with S3A.
    """

    job_name: str
    arguments: dict[str, str] = Field(
        default_factory=dict,
        description="More arguments of each run, without secrets, such as --enable-metrics.",
    )
    request: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the request StartJobRun, such as NumberOfWorkers.",
    )
    region: str | None = Field(default=None, description="By default that of boto3's own chain.")

    is_remote: ClassVar[bool] = True

    def run(
        self, context: Any, inbox: Inbox, exchange: Exchange, settings: Mapping[str, str]
    ) -> None:
        """Run the driver as a run of the job until its end."""
        pipes: Any = _import_client("dagster_aws.pipes", "PipesGlueClient", "aws")
        mark = uuid4().hex

        class Client(pipes):  # type: ignore[misc]
            def _wait_for_job_run_completion(self, job_name: str, run_id: str) -> Any:
                """Wait until the run has ended in any state; Dagster's method never returns if
                the run expires.
                """
                return _wait_for_end(
                    "Glue",
                    lambda: service.get_job_run(JobName=job_name, RunId=run_id),
                    lambda found: found["JobRun"]["JobRunState"] not in _GLUE_GOES_ON,
                )

        _check_not_given(self.request, ("JobName", "Arguments"), "request")
        _check_not_given(self.arguments, (_SCRIPT, _START), "arguments")
        check_no_secrets(self.arguments, "the argument")
        exchange.store.put(exchange.key(_DRIVER), read_package_file(_DRIVER_FILE).encode())
        arguments = {**self.arguments, _SCRIPT: exchange.url(_DRIVER), _START: mark}
        request = {**self.request, "JobName": self.job_name, "Arguments": arguments}
        with _translated_errors("Glue"):
            service: Any = new_session().create_client("glue", region_name=self.region)
            starter = _GlueStarter(service, _client_without_retries("glue", self.region))
            client = Client(dg.PipesEnvContextInjector(), inbox, starter)
            client.run(context=context, start_job_run_params=request)


@dataclass(frozen=True, slots=True)
class _GlueStarter:
    """Glue's client, which starts a run of a job once, also if a reply is lost; `once` does not
    retry.
    """

    service: Any
    once: Any

    def __getattr__(self, name: str) -> Any:
        """Return what Glue's client has."""
        return getattr(self.service, name)

    def start_job_run(self, **request: Any) -> dict[str, str]:
        """Start a run, which has a unique argument, and return its id as Glue does."""
        mark = request["Arguments"][_START]

        def start() -> str:
            return str(self.once.start_job_run(**request)["JobRunId"])

        def find() -> str | None:
            newest = self.service.get_job_runs(JobName=request["JobName"])["JobRuns"]
            ours = (run for run in newest if run.get("Arguments", {}).get(_START) == mark)
            return next((str(run["Id"]) for run in ours), None)

        return {"JobRunId": _start_once("Glue", start, find)}


@validated
class Kubernetes(dg.Config):
    """A pod for each driver, started by `PipesK8sClient`. The image must have Java and the modules
    that it imports.

    With the master local[*] this pod does all the work; with k8s://https://kubernetes.default.svc
    each executor is a pod of its own.
    """

    image: str
    namespace: str | None = Field(
        default=None, description="By default that of the run's pod, else default."
    )
    service_account: str | None = None
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables of the driver, without secrets."
    )
    python: str = Field(default="python", description="Path of the image's Python.")
    pod_spec: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the pod's specification, such as resources of its first container.",
    )
    kubeconfig: str | None = Field(
        default=None, description="File to reach the cluster with from outside."
    )

    is_remote: ClassVar[bool] = True

    def run(
        self, context: Any, inbox: Inbox, exchange: Exchange, settings: Mapping[str, str]
    ) -> None:
        """Run the driver in a pod until its end. Raises ConfigurationError if `pod_spec` specifies
        none.
        """
        pipes: Any = _import_client("dagster_k8s", "PipesK8sClient", "k8s")
        spec: dict[str, Any] = copy.deepcopy(self.pod_spec)
        if self.service_account:
            spec["serviceAccountName"] = self.service_account
        # Executors connect to the driver by the address of its pod.
        address = {
            "name": "SPARK_LOCAL_IP",
            "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
        }
        try:
            container = spec.setdefault("containers", [{}])[0]
            _check_not_given(container, ("image", "command"), "pod_spec")
            env = container.get("env", [])
            written = {}
            for variable in env:
                if "value" in variable:
                    written[variable["name"]] = variable["value"]
            check_no_secrets(written | self.environment, "the variable")
            container |= {"image": self.image, "command": [self.python, "-m", _MODULE]}
            container["env"] = [*env, address]
            # only called because it raises for what is no pod
            import_module("dagster_k8s.pipes").build_pod_body(
                "driver", None, None, {}, None, copy.deepcopy(spec)
            )
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"pod_spec is not the specification of a pod: {str(error).rstrip('.')}.",
                "Write it as Kubernetes has it.",
                argument="pod_spec",
            ) from error
        with _translated_errors("Kubernetes"):
            client = pipes(message_reader=inbox, kubeconfig_file=self.kubeconfig)
            request = {"namespace": self.namespace, "env": self.environment, "base_pod_spec": spec}
            client.run(context=context, pod_wait_timeout=0, **request)

    def for_executors(self) -> dict[str, str]:
        """Return the Spark settings that give pods of executors the image, namespace and account
        of the driver's.
        """
        prefix = "spark.kubernetes"
        ours = {f"{prefix}.container.image": self.image, f"{prefix}.namespace": self.namespace}
        ours[f"{prefix}.authenticate.executor.serviceAccountName"] = self.service_account
        found = {}
        for name, value in ours.items():
            if value:
                found[name] = value
        return found


RemoteService = EmrServerless | EmrCluster | Glue | Kubernetes


def _check_not_given(given: Mapping[str, Any], ours: Sequence[str], argument: str) -> None:
    """Raise ConfigurationError if `given` has one of the keys in `ours`, whose values Adjunct
    would replace.
    """
    if found := [name for name in ours if name in given]:
        raise ConfigurationError(
            f"{argument} sets {' and '.join(found)}, which the declared service or Adjunct sets.",
            f"Leave {'these' if len(found) > 1 else 'this'} out of {argument}.",
            argument=argument,
        )


def _import_client(module: str, name: str, extra: str) -> Any:
    """Return a client of Dagster Pipes. Raises ConfigurationError if its package is not
    installed.
    """
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ConfigurationError(
            f"{name} can't be imported here ({error}).",
            f'Install it where runs are executed: pip install "dagster-adjunct[{extra}]".',
            package=package,
        ) from error


def _client_without_retries(service: str, region: str | None) -> Any:
    """Return a client of an AWS service that sends each request once."""
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1})
    return new_session().create_client(service, region_name=region, config=config)


def _start_once(service: str, start: Callable[[], str], find: Callable[[], str | None]) -> str:
    """Start an application and return its id; `start` sends one request.

    After a request without an answer, `find` looks for the application before the next attempt,
    which would otherwise start a second one.
    """
    attempt = 1
    while True:
        try:
            with _translated_errors(service):
                return start()
        except TransientError:
            if attempt == _STARTS:
                raise
        time.sleep(_POLL_SECONDS)
        with _translated_errors(service):
            found = find()
        if found is not None:
            return found
        attempt += 1


def _wait_for_end(service: str, ask: Callable[[], Any], has_ended: Callable[[Any], bool]) -> Any:
    """Ask the service every few seconds until its answer says that the application has ended;
    return that answer.

    Transient errors of the service are ignored.
    """
    while True:
        time.sleep(_POLL_SECONDS)
        with suppress(TransientError), _translated_errors(service):
            if has_ended(found := ask()):
                return found


@contextmanager
def _translated_errors(service: str) -> Iterator[None]:
    """Raise errors of a service's client as TransientError (throttled, or no answer) or
    ConfigurationError (others).
    """
    try:
        yield
    except Exception as error:
        kinds = {base.__name__ for base in type(error).__mro__ if _CLIENT.match(base.__module__)}
        if not kinds:
            raise
        response: Any = getattr(error, "response", None) or {}
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = status or getattr(error, "status", None) or 0
        problem = (
            f"{service} could not be asked to run a Spark application:"
            f" {str(error).strip().rstrip('.')}."
        )
        is_throttled = status == 429 or _TOO_MANY.search(response.get("Error", {}).get("Code", ""))
        stale, renew = stale_reason(error)
        if stale:
            raise TransientError(f"{problem.rstrip('.')}: {stale}.", renew) from error
        if is_throttled or status >= 500 or kinds & _UNANSWERED:
            raise TransientError(problem, "Run it again.") from error
        raise ConfigurationError(
            problem, "Correct the declaration, or what the run's role may do.", setting=service
        ) from error

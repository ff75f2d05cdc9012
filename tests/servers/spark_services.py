"""Stand-ins for the APIs of EMR Serverless, EMR, Glue and Kubernetes: what they are to start runs
here, as a process.

A process gets a clean working directory, and the environment that its image, its role and the
request give it. Requests are checked against what the services publish: the models of botocore and
of the Kubernetes client.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import botocore.session
from botocore.model import Shape

from dagster_adjunct.resources.lazy_modules import LazyModule
from dagster_adjunct.resources.spark.session import session_config
from tests.java_classes import SHORT_LIVED, archived
from tests.servers.s3 import ROOT, S3Server

# Some 700 modules: each process that collects tests would import them.
kubernetes_models: Any = LazyModule("kubernetes.client.models")

SPARK_SUBMIT = str(Path(sys.executable).with_name("spark-submit"))
JOB = "orders-spark"
CLUSTER = "j-2AXXXXXXGAPLF"
APPLICATION, ROLE = "00fexample123", "arn:aws:iam::111122223333:role/orders-runs"


class Throttled(ValueError):
    """A request too many, for now."""

    code = "ThrottlingException"


class TooManyRuns(Throttled):
    """A run too many, for now."""

    code = "ConcurrentRunsExceededException"


class ReplyLostError(Exception):
    """The request is done, and its reply does not arrive."""


class StandIn(ABC):
    """An API on loopback that answers requests by `answer(method, path, body)`, and the processes
    that it started.

    An API that has one path has the name of the operation in its place.
    """

    def __init__(self, folder: Path, s3: S3Server, modules: Sequence[Path]) -> None:
        self.folder, self.s3, self.modules = folder, s3, modules
        folder.mkdir()
        self.requests: list[dict[str, Any]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()

    @abstractmethod
    def answer(self, method: str, path: str, body: Any) -> Any: ...

    @contextmanager
    def serving(self) -> Iterator[str]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.headers.get("X-Amz-Target") or self.path
                try:
                    status, found = (
                        200,
                        stand_in.answer(self.command, path, json.loads(data) if data else None),
                    )
                except ReplyLostError:
                    self.close_connection = True
                    return
                except ValueError as error:
                    code = getattr(error, "code", "ValidationException")
                    status, found = 400, {"message": str(error), "code": code, "__type": code}
                reply = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            for name in self.processes:
                self.stop(name, signal.SIGKILL)
            server.shutdown()
            server.server_close()
            thread.join()

    def start(self, command: list[str], environment: Mapping[str, str]) -> str:
        """Start a process, and return its name."""
        name = f"00f{len(self.processes)}"
        place = self.folder / name
        place.mkdir()
        role = {
            key: value
            for key, value in self.s3.env.items()
            if key.startswith("AWS_") and "ENDPOINT" not in key
        }
        path = os.pathsep.join(map(str, [ROOT, *self.modules]))
        image = {"PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": path}
        image |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        # hurries no less than the tests' other JVMs
        image["JAVA_TOOL_OPTIONS"] = SHORT_LIVED + archived()
        with (place / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=place,
                env={**image, **role, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return name

    def fetch(self, url: str) -> Path:
        """Return the file of a script in S3, made anew for each request."""
        script = self.folder / f"{len(self.requests)}.py"
        bucket, _, key = url.removeprefix("s3://").partition("/")
        script.write_bytes(self.s3.client().get_object(Bucket=bucket, Key=key)["Body"].read())
        return script

    def stop(self, name: str, sent: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, sent)

    def logs(self) -> str:
        return "\n".join(
            (self.folder / name / "log").read_text(errors="replace") for name in self.processes
        )


class EmrServerlessStandIn(StandIn):
    """Job runs of one application, whose master is local[2]. `operations` has those that it was
    asked for.
    """

    names: ClassVar = {
        ("POST",): "StartJobRun",
        ("GET",): "GetJobRun",
        ("GET", "dashboard"): "GetDashboardForJobRun",
        ("DELETE",): "CancelJobRun",
    }

    def __init__(self, folder: Path, s3: S3Server, modules: Sequence[Path]) -> None:
        super().__init__(folder, s3, modules)
        self.operations: set[str] = set()

    def answer(self, method: str, path: str, body: Any) -> Any:
        _, _, application, _, *rest = path.split("/")
        assert application == APPLICATION
        self.operations.add(self.names[method, *rest[1:]])
        if method == "POST":
            return {
                "applicationId": application,
                "arn": "arn",
                "jobRunId": self._start_job({**body, "applicationId": application}),
            }
        job = rest[0]
        if rest[1:] == ["dashboard"]:
            return {"url": "https://dashboard.example.com"}
        if method == "DELETE":
            self.stopped.add(job)
            self.stop(job, signal.SIGTERM)
            return {"applicationId": application, "jobRunId": job}
        ended = self.processes[job].poll()
        state = (
            "RUNNING"
            if ended is None
            else "CANCELLED"
            if job in self.stopped
            else "FAILED"
            if ended
            else "SUCCESS"
        )
        return {
            "jobRun": {
                "applicationId": application,
                "jobRunId": job,
                "state": state,
                "stateDetails": f"{ended}",
            }
        }

    def _start_job(self, request: dict[str, Any]) -> str:
        check_aws_request("emr-serverless", "StartJobRun", request)
        self.requests.append(request)
        submit = request["jobDriver"]["sparkSubmit"]
        script = self.fetch(submit["entryPoint"])
        properties = script.with_suffix(".properties")
        (given,) = request["configurationOverrides"]["applicationConfiguration"]
        assert given["classification"] == "spark-defaults"
        properties.write_text(
            "".join(f"{name} {value}\n" for name, value in given["properties"].items())
        )
        words = shlex.split(submit["sparkSubmitParameters"])
        assert set(words[::2]) == {"--conf"}
        of_driver = "spark.emr-serverless.driverEnv."
        environment = dict(word.removeprefix(of_driver).split("=", 1) for word in words[1::2])
        command = [
            SPARK_SUBMIT,
            "--master",
            "local[2]",
            "--properties-file",
            str(properties),
            str(script),
        ]
        return self.start(command, environment)


class EmrStandIn(StandIn):
    """Steps of one cluster, which has one node. `operations` has those that it was asked for."""

    def __init__(self, folder: Path, s3: S3Server, modules: Sequence[Path]) -> None:
        super().__init__(folder, s3, modules)
        self.operations: list[str] = []
        self.failing = 0
        """How many of the next questions for a step fail, as where a cluster is asked too often."""
        self.losing = 0
        """Of how many of the next steps that are added the reply is lost."""

    def answer(self, method: str, path: str, body: Any) -> Any:
        operation = path.removeprefix("ElasticMapReduce.")
        self.operations.append(operation)
        check_aws_request("emr", operation, body)
        assert body.get("ClusterId", CLUSTER) == CLUSTER
        if operation == "AddJobFlowSteps":
            if body["JobFlowId"] != CLUSTER:
                raise ValueError("Cluster id is not valid.")
            (step,) = body["Steps"]
            jar = step["HadoopJarStep"]
            assert jar["Jar"] == "command-runner.jar"
            if (size := sum(map(len, [jar["Jar"], *jar["Args"]]))) > 10_240:
                raise ValueError(
                    f"the strings of a step have {size} characters: at most 10240 are allowed"
                )
            self.requests.append(step)
            started = self.start(jar["Args"], {})
            if self.losing:
                self.losing -= 1
                raise ReplyLostError
            return {"StepIds": [started]}
        if operation == "ListSteps":
            steps = zip(self.processes, self.requests, strict=True)
            return {"Steps": [{"Id": name, "Name": step["Name"]} for name, step in steps][::-1]}
        if operation == "CancelSteps":
            (step,) = body["StepIds"]
            self.stopped.add(step)
            self.stop(step, signal.SIGTERM)
            return {"CancelStepsInfoList": [{"StepId": step, "Status": "SUBMITTED"}]}
        if self.failing:
            self.failing -= 1
            raise Throttled("Rate exceeded")
        ended = self.processes[body["StepId"]].poll()
        if ended is None:
            return {"Step": {"Status": {"State": "RUNNING"}}}
        if not ended or body["StepId"] in self.stopped:
            return {"Step": {"Status": {"State": "CANCELLED" if ended else "COMPLETED"}}}
        details = {
            "Reason": "Unknown Error.",
            "LogFile": f"s3://company-logs/{CLUSTER}/steps/stderr.gz",
        }
        return {"Step": {"Status": {"State": "FAILED", "FailureDetails": details}}}


class GlueStandIn(StandIn):
    """Runs of one job, whose Spark has S3A and settings of its own. `operations` has those that
    it was asked for.
    """

    def __init__(self, folder: Path, s3: S3Server, modules: Sequence[Path]) -> None:
        super().__init__(folder, s3, modules)
        self.operations: set[str] = set()
        self.is_busy = False
        self.losing = 0
        """Of how many of the next runs that are started the reply is lost."""

    def answer(self, method: str, path: str, body: Any) -> Any:
        operation = path.removeprefix("AWSGlue.")
        self.operations.add(operation)
        check_aws_request("glue", operation, body)
        if body["JobName"] != JOB:
            raise ValueError(f"Entity {body['JobName']} does not exist")
        if operation == "StartJobRun" and self.is_busy:
            self.is_busy = False
            raise TooManyRuns(f"Concurrent runs exceeded for {JOB}")
        if operation == "StartJobRun":
            self.requests.append(body)
            words = [word for pair in body["Arguments"].items() for word in pair]
            script = self.fetch(body["Arguments"]["--scriptLocation"])
            command = [SPARK_SUBMIT, *self._settings(), str(script), "--JOB_NAME", JOB, *words]
            started = self.start(command, {})
            if self.losing:
                self.losing -= 1
                raise ReplyLostError
            return {"JobRunId": started}
        if operation == "GetJobRuns":
            runs = zip(self.processes, self.requests, strict=True)
            return {
                "JobRuns": [{"Id": name, "Arguments": sent["Arguments"]} for name, sent in runs][
                    ::-1
                ]
            }
        if operation == "BatchStopJobRun":
            (run,) = body["JobRunIds"]
            self.stopped.add(run)
            self.stop(run, signal.SIGTERM)
            return {"SuccessfulSubmissions": [{"JobName": JOB, "JobRunId": run}]}
        run = body["RunId"]
        ended = self.processes[run].poll()
        state = (
            "RUNNING"
            if ended is None
            else "STOPPED"
            if run in self.stopped
            else "FAILED"
            if ended
            else "SUCCEEDED"
        )
        return {
            "JobRun": {
                "Id": run,
                "JobName": JOB,
                "JobRunState": state,
                "ErrorMessage": f"exit status {ended}",
            }
        }

    def _settings(self) -> list[str]:
        ours = session_config(lake_url=self.s3.url(), is_elsewhere=True)
        own = {name: value for name, value in ours.items() if name.startswith("spark.jars.")}
        own |= {
            "spark.jars.ivy": str(Path.home() / ".cache/dagster-adjunct/ivy"),
            "spark.ui.enabled": "false",
        }
        # Sessions with these are refused, so that the run's own have to win.
        own |= {"spark.sql.session.timeZone": "America/New_York", "spark.sql.ansi.enabled": "false"}
        return [
            "--master",
            "local[2]",
            *(word for pair in own.items() for word in ("--conf", "=".join(pair))),
        ]


class KubernetesStandIn(StandIn):
    """Pods of a namespace; the command of the first container runs."""

    def __init__(self, folder: Path, s3: S3Server, modules: Sequence[Path]) -> None:
        super().__init__(folder, s3, modules)
        self.pods: dict[str, str] = {}

    def write_config(self, url: str, file: Path) -> Path:
        """Write the file with which clients find it."""
        cluster, user = {"name": "here", "cluster": {"server": url}}, {"name": "me", "user": {}}
        context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
        file.write_text(
            json.dumps({**config, "clusters": [cluster], "users": [user], "contexts": [context]})
        )
        return file

    def answer(self, method: str, path: str, body: Any) -> Any:
        if method == "POST":
            check_kubernetes_request("V1Pod", body)
            self.requests.append(body)
            container = body["spec"]["containers"][0]
            assert container["command"][0] == "python"
            environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
            environment["SPARK_LOCAL_IP"] = "127.0.0.1"
            started = self.start([sys.executable, *container["command"][1:]], environment)
            self.pods[body["metadata"]["name"]] = started
            return body
        if method == "DELETE":
            name = path.rpartition("/")[2]
            self.stopped.add(self.pods[name])
            self.stop(self.pods.pop(name), signal.SIGTERM)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if "/log" in path:
            return "a line of the log"
        return {
            "kind": "PodList",
            "apiVersion": "v1",
            "items": [self._pod(name) for name in self.pods],
        }

    def _pod(self, name: str) -> Any:
        ended = self.processes[self.pods[name]].poll()
        state = (
            {"running": {}}
            if ended is None
            else {"terminated": {"exitCode": ended if ended >= 0 else 128 - ended}}
        )
        container = {
            "name": "dagster-pipes-execution",
            "image": "i",
            "imageID": "",
            "ready": True,
            "restartCount": 0,
        }
        status = {"containerStatuses": [{**container, "state": state}]}
        return {
            "metadata": {"name": name},
            "spec": {"containers": [{"name": container["name"]}]},
            "status": status,
        }


def check_aws_request(service: str, operation: str, request: Mapping[str, Any]) -> None:
    """Raise ValueError unless a request is what the model of botocore says, down to lengths and
    patterns.
    """
    model = botocore.session.get_session().get_service_model(service).operation_model(operation)
    problems = list(_differences(model.input_shape, request, operation))
    if problems:
        raise ValueError("; ".join(problems))


_BEYOND_JAVAS = r"\uD800\uDC00-\uDBFF\uDFFF"
"""Characters of more than 16 bits, as a pattern of Java names them."""


def _differences(shape: Shape | Any, value: Any, at: str) -> Iterator[str]:
    types: dict[str, Any] = {
        "structure": dict,
        "map": dict,
        "list": list,
        "string": str,
        "boolean": bool,
    }
    if not isinstance(value, types.get(shape.type_name, int)):
        yield f"{at} is no {shape.type_name}: {value!r}"
        return
    size, of = (value if isinstance(value, int) else len(value)), shape.metadata
    if not of.get("min", size) <= size <= of.get("max", size):
        yield f"{at} has {size}: expected {of.get('min')} to {of.get('max')}"
    pattern = of.get("pattern", ".*").replace(_BEYOND_JAVAS, "\U00010000-\U0010ffff")
    if isinstance(value, str) and not re.fullmatch(pattern, value, re.DOTALL):
        yield f"{at} is {value!r}: expected {pattern}"
    if isinstance(value, str) and value not in of.get("enum", [value]):
        yield f"{at} is {value!r}: expected one of {of['enum']}"
    if shape.type_name == "structure":
        yield from (f"{at} has no {name}" for name in shape.required_members if name not in value)
        for name, member in value.items():
            if name not in shape.members:
                yield f"{at} has an unknown {name}"
            else:
                yield from _differences(shape.members[name], member, f"{at}.{name}")
    elif shape.type_name == "map":
        for name, member in value.items():
            yield from _differences(shape.key, name, f"{at} key")
            yield from _differences(shape.value, member, f"{at}[{name}]")
    elif shape.type_name == "list":
        for number, member in enumerate(value):
            yield from _differences(shape.member, member, f"{at}[{number}]")


def check_kubernetes_request(kind: str, body: Any) -> None:
    """Raise ValueError unless the body is what the client's models, made from the published
    OpenAPI, say.
    """
    problems = list(_unlike(kind, body, kind))
    if problems:
        raise ValueError("; ".join(problems))


def _unlike(kind: str, value: Any, at: str) -> Iterator[str]:
    if found := re.fullmatch(r"list\[(.*)\]", kind):
        for number, member in enumerate(value):
            yield from _unlike(found[1], member, f"{at}[{number}]")
    elif found := re.fullmatch(r"dict[(\[](.*), ?(.*)[)\]]", kind):
        for name, member in value.items():
            yield from _unlike(found[2], member, f"{at}[{name}]")
    elif kind in ("str", "int", "bool", "float"):
        if not isinstance(
            value, {"str": str, "int": int, "bool": bool, "float": (int, float)}[kind]
        ):
            yield f"{at} is no {kind}: {value!r}"
    elif hasattr(kubernetes_models, kind):
        model = getattr(kubernetes_models, kind)
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        for name, member in value.items():
            if name not in names:
                yield f"{at} has an unknown {name}"
            else:
                yield from _unlike(model.openapi_types[names[name]], member, f"{at}.{name}")
        try:
            model(**{names[name]: member for name, member in value.items() if name in names})
        except ValueError as error:
            yield f"{at}: {error}"

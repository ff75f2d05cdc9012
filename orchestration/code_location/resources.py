"""Dagster resources for the lake and the Spark session."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_adjunct.orchestration.code_location.services import (
    EmrCluster,
    EmrServerless,
    Glue,
    Kubernetes,
    RemoteService,
    SparkSubmit,
    check_no_secrets,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, has_running_session, is_in_process
from dagster_adjunct.resources.spark.session import (
    is_connect,
    new_session,
    prepare_environment,
    prepare_session,
    session_config,
    stop_session,
)
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@validated
class LakeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The lake with its streams, datasets and batch logs. Without a URL: `ADJUNCT_LAKE`, else `.adjunct/lake`.

    Nothing is opened before `open` is called, so loading a code location needs no network.
    """

    url: str | None = Field(default=None, description="s3://bucket/prefix or a folder.")

    _lake: Any = PrivateAttr(default=None)

    def open(self) -> Lake:
        """Return the lake; the first call opens it and probes the store."""
        if self._lake is None:
            self._lake = open_lake(self.url)
        lake: Lake = self._lake
        return lake


_SERVICES = ("submit", "emr_serverless", "emr_cluster", "glue", "kubernetes")


@validated
class SparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A Spark session for each run, built on dagster-pyspark's resource.

    Unlike that resource, it imports pyspark on first use, so that code locations load and sensors tick quickly, and
    stops the session at the end of the run, unless the process had it before. `master` is any Spark master (default:
    `ADJUNCT_SPARK_MASTER`, else all cores of this machine), or "none": then small datasets are advanced in the run's
    own process, and whatever needs Spark raises ConfigurationError. "sc://HOST:PORT" is a running Spark Connect server.

    With `submit`, datasets and batches are computed by an application that spark-submit starts, whose driver is a
    process of its own on the machine of the run (client mode), with all settings above. With `emr_serverless`,
    `emr_cluster`, `glue` or `kubernetes` the driver runs there. An application ends with the run.
    """

    master: str | None = Field(
        default=None, description="Spark master, such as local[2], spark://host:7077 or sc://host:15002."
    )
    spark_config: dict[str, Any] = Field(default_factory=dict, description="More Spark settings; they win.")
    lake: str | None = Field(default=None, description="Lake URL; an s3:// lake brings the S3A packages along.")
    submit: str | None = Field(default=None, description='Path of spark-submit, or "spark-submit" if it is installed.')
    emr_serverless: EmrServerless | None = None
    emr_cluster: EmrCluster | None = None
    glue: Glue | None = None
    kubernetes: Kubernetes | None = None

    _session: Any = PrivateAttr(default=None)
    _ours: bool = PrivateAttr(default=False)

    @property
    def starter(self) -> Callable[[], SparkSession]:
        """Return a function that returns the run's session; for the master "none", IN_PROCESS."""
        return IN_PROCESS if is_in_process(self.master) else lambda: self.spark_session

    @property
    def spark_session(self) -> SparkSession:
        """Return the run's session, starting it on first use (6-10 s)."""
        if self._session is None:
            for log in (dg.get_dagster_logger(), logging.getLogger("adjunct.spark")):
                log.info("starting Spark")
            self._ours = not has_running_session()
            if is_connect(self.master):
                self._session = new_session(self.spark_config, master=self.master, lake_url=self._lake_url)
            else:
                prepare_environment()
                from dagster_pyspark import LazyPySparkResource

                self._session = LazyPySparkResource(spark_config=self._settings()).spark_session
                prepare_session(self._session)
        session: SparkSession = self._session
        return session

    @property
    def _lake_url(self) -> str | None:
        return self.lake or os.environ.get("ADJUNCT_LAKE")

    def _settings(self) -> dict[str, str]:
        return session_config(self.spark_config, master=self.master, lake_url=self._lake_url)

    @property
    def services(self) -> list[str | RemoteService]:
        """Return what is to start applications: nothing, or one of these."""
        return [getattr(self, name) for name in _SERVICES if getattr(self, name) is not None]

    def submission(self, lake_url: str) -> tuple[SparkSubmit | RemoteService, dict[str, str]]:
        """Return what starts the application for a lake, and the application's settings.

        Raises ConfigurationError for a spark-submit that is not found and for settings that can't be submitted.
        """
        service, *others = self.services
        if others:
            problem = f"SparkResource has several of {', '.join(_SERVICES)}: expected one."
            raise ConfigurationError(problem, "Leave out the others.", argument="submit")
        if is_in_process(self.master) or is_connect(self.master):
            problem = "the master is none or a Spark Connect server, but an application is to be started."
            step = f"Leave out {', '.join(_SERVICES)}, or give another master."
            raise ConfigurationError(problem, step, setting="spark.master")
        starter, settings = self._local(service) if isinstance(service, str) else self._remote(service, lake_url)
        mode = settings.get("spark.submit.deployMode", "client")
        if mode != "client":
            problem = f"spark.submit.deployMode is {mode!r}: expected client. The driver of spark-submit exchanges "
            problem += "files with the run, and services start the driver themselves."
            step = f"Leave out the setting; {', '.join(_SERVICES[1:])} let the driver run elsewhere."
            raise ConfigurationError(problem, step, setting="spark.submit.deployMode")
        return starter, settings

    def _local(self, submit: str) -> tuple[SparkSubmit, dict[str, str]]:
        here = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
        command = shutil.which(submit, path=here)
        if command is None:
            problem = f"submit is {submit!r}, which is no program on the PATH or beside this Python."
            raise ConfigurationError(problem, "Give the path of your Spark's bin/spark-submit.", setting="submit")
        prepare_environment()
        return SparkSubmit(command), self._settings()

    def _remote(self, service: RemoteService, lake_url: str) -> tuple[RemoteService, dict[str, str]]:
        if not lake_url.startswith("s3://"):
            problem = f"the lake {lake_url} is a folder, which the driver on another machine can't access."
            raise ConfigurationError(problem, "Use an s3:// lake, or submit instead.", setting="lake")
        master = self.master or ("yarn" if isinstance(service, EmrCluster) else None)
        settings = session_config(self.spark_config, master=master, lake_url=lake_url, is_elsewhere=True)
        if isinstance(service, EmrServerless | Glue):
            if self.master:
                problem = f"the master is {self.master!r}, but EMR Serverless and Glue have masters of their own."
                raise ConfigurationError(problem, "Leave out the master.", setting="spark.master")
            del settings["spark.master"]
        if isinstance(service, Kubernetes) and settings["spark.master"].startswith("k8s://"):
            settings = service.for_executors() | settings
        check_no_secrets(settings, "the setting")
        return service, settings

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session if the run started one, so that no executors are left behind."""
        self.stop()

    def stop(self) -> None:
        """Stop the session if this resource has started one; the next use starts another."""
        session, self._session = self._session, None
        if session is not None and self._ours:
            stop_session(session)

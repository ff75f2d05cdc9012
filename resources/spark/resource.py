"""The Spark session as a Dagster resource: started when first asked for, stopped when the run ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dagster import ConfigurableResource, InitResourceContext, get_dagster_logger
from pydantic import Field, PrivateAttr

from dagster_adjunct.resources.spark.early_workers import wait_for_workers
from dagster_adjunct.resources.spark.given_session import IN_PROCESS, is_in_process
from dagster_adjunct.resources.spark.remembered_functions import remember_functions
from dagster_adjunct.resources.spark.session import prepare_environment, session_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkResource(ConfigurableResource):  # type: ignore[type-arg]
    """One session a run, on dagster-pyspark's resource.

    That resource imports pyspark where it is defined, and never stops its session; here the import waits for
    the first use, so that loading a code location and ticking sensors stay light, and the session ends with
    the run. One that this process had before the run is used, and left running. `master` takes any Spark
    master (default: `ADJUNCT_SPARK_MASTER`, else all cores of this machine), or "none": then small datasets are
    advanced in the run's own process, and what needs Spark is refused.
    """

    master: str | None = Field(default=None, description="Spark master URL, such as local[2] or spark://host:7077.")
    spark_config: dict[str, Any] = Field(default_factory=dict, description="More Spark settings; they win.")
    lake: str | None = Field(default=None, description="Lake URL; an s3:// lake brings the S3A packages along.")

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
            for log in (get_dagster_logger(), logging.getLogger("adjunct.spark")):
                log.info("starting Spark")
            prepare_environment()
            from dagster_pyspark import LazyPySparkResource
            from pyspark.sql import SparkSession

            lake = self.lake or os.environ.get("ADJUNCT_LAKE")
            config = session_config(self.spark_config, master=self.master, lake_url=lake)
            running = SparkSession.getActiveSession()
            self._session = LazyPySparkResource(spark_config=config).spark_session
            self._ours = running is None
            remember_functions(self._session)
        session: SparkSession = self._session
        return session

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Stop the session, if the run started one: it leaves no executors behind."""
        session, self._session = self._session, None
        if session is not None and self._ours:
            wait_for_workers(session.sparkContext)
            session.stop()

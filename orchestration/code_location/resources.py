"""Dagster resources: the lake, the Spark session, and what loads datasets and streams as inputs
of users' assets.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_adjunct.assets.exchange.handover import pyarrow_dataset, stream_view
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.version_reader import read_entries
from dagster_adjunct.orchestration.code_location.metadata import DATASET, STREAM
from dagster_adjunct.orchestration.code_location.spark_services import (
    EmrCluster,
    EmrServerless,
    Glue,
    Kubernetes,
    RemoteService,
    SparkSubmit,
    check_no_secrets,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.schema import quote_name
from dagster_adjunct.resources.schemas.values import python_rows, to_pandas
from dagster_adjunct.resources.spark.in_process import (
    IN_PROCESS,
    has_running_session,
    is_in_process,
)
from dagster_adjunct.resources.spark.session import (
    is_connect,
    new_session,
    prepare_environment,
    prepare_session,
    session_config,
    stop_session,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("adjunct.spark")


@validated
class LakeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The lake with its streams, datasets and batch logs. Without a URL: `ADJUNCT_LAKE`, else
    `.adjunct/lake`.

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


class Submission(NamedTuple):
    """What starts a Spark application, and the application's Spark settings."""

    starter: SparkSubmit | RemoteService
    settings: dict[str, str]


@validated
class SparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A Spark session for each run, built on dagster-pyspark's resource.

    Unlike that resource, it imports pyspark on first use, so that code locations load and sensors
    tick quickly, and stops the session at the end of the run, unless it ran before the run.
    `master` is any Spark master (default: `ADJUNCT_SPARK_MASTER`, else all cores of this machine),
    or "none": then small datasets are advanced in the run's own process, and whatever needs Spark
    raises ConfigurationError. "sc://HOST:PORT" is a running Spark Connect server.

    With `submit`, datasets and batches are computed by an application that spark-submit starts,
    whose driver is a process of its own on the machine of the run (client mode), with all settings
    above. With `emr_serverless`, `emr_cluster`, `glue` or `kubernetes` the driver runs there. An
    application ends with the run.
    """

    master: str | None = Field(
        default=None,
        description="Spark master, such as local[2], spark://host:7077 or sc://host:15002.",
    )
    spark_config: dict[str, Any] = Field(
        default_factory=dict, description="More Spark settings; they win."
    )
    lake: str | None = Field(
        default=None, description="Lake URL; an s3:// lake brings the S3A packages along."
    )
    submit: str | None = Field(
        default=None, description='Path of spark-submit, or "spark-submit" if it is installed.'
    )
    emr_serverless: EmrServerless | None = None
    emr_cluster: EmrCluster | None = None
    glue: Glue | None = None
    kubernetes: Kubernetes | None = None

    _session: Any = PrivateAttr(default=None)
    _is_ours: bool = PrivateAttr(default=False)  # this resource has started the session

    @property
    def starter(self) -> Callable[[], SparkSession]:
        """Return a function that starts and returns the run's session; IN_PROCESS (no Spark) for
        the master "none".
        """
        if is_in_process(self.master):
            return IN_PROCESS
        return lambda: self.spark_session

    @property
    def spark_session(self) -> SparkSession:
        """Return the run's session, starting it on first use (6-10 s)."""
        if self._session is None:
            self._start_session()
        session: SparkSession = self._session
        return session

    def _start_session(self) -> None:
        """Start the session: one of a Spark Connect server, or one with its driver in this
        process.
        """
        dg.get_dagster_logger().info("starting Spark")  # for the page of the run
        _log.info("starting Spark")  # for the log of the process
        self._is_ours = not has_running_session()
        if is_connect(self.master):
            self._session = new_session(
                self.spark_config, master=self.master, lake_url=self._lake_url
            )
            return
        prepare_environment()
        from dagster_pyspark import LazyPySparkResource

        self._session = LazyPySparkResource(spark_config=self._settings()).spark_session
        prepare_session(self._session)

    @property
    def _lake_url(self) -> str | None:
        """The URL of the lake that sessions work on; None if it is unknown."""
        return self.lake or os.environ.get("ADJUNCT_LAKE")

    def _settings(self) -> dict[str, str]:
        """Return the Spark settings for a driver on this machine."""
        return session_config(self.spark_config, master=self.master, lake_url=self._lake_url)

    @property
    def services(self) -> list[str | RemoteService]:
        """Return which of `submit` and the services are set: none, or the one that starts
        applications.
        """
        found = []
        for name in _SERVICES:
            if getattr(self, name) is not None:
                found.append(getattr(self, name))
        return found

    def submission(self, lake_url: str) -> Submission:
        """Return how to start a Spark application that works on this lake.

        Raises ConfigurationError for several services, for a spark-submit that is not found, and
        for a master, lake or setting that the service can't use.
        """
        service, *others = self.services
        if others:
            raise ConfigurationError(
                f"SparkResource has several of {', '.join(_SERVICES)}: expected one.",
                "Leave out the others.",
                argument="submit",
            )
        if is_in_process(self.master) or is_connect(self.master):
            raise ConfigurationError(
                "the master is none or a Spark Connect server, but an application is to be"
                " started.",
                f"Leave out {', '.join(_SERVICES)}, or give another master.",
                setting="spark.master",
            )
        if isinstance(service, str):
            submission = self._local(service)
        else:
            submission = self._remote(service, lake_url)
        mode = submission.settings.get("spark.submit.deployMode", "client")
        if mode != "client":
            raise ConfigurationError(
                f"spark.submit.deployMode is {mode!r}: expected client. The driver of spark-submit"
                " exchanges files with the run, and services start the driver themselves.",
                f"Leave out the setting; {', '.join(_SERVICES[1:])} let the driver run elsewhere.",
                setting="spark.submit.deployMode",
            )
        return submission

    def _local(self, submit: str) -> Submission:
        """Return how to start an application with this spark-submit."""
        here = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
        command = shutil.which(submit, path=here)
        if command is None:
            raise ConfigurationError(
                f"submit is {submit!r}, which is no program on the PATH or beside this Python.",
                "Give the path of your Spark's bin/spark-submit.",
                setting="submit",
            )
        prepare_environment()
        return Submission(SparkSubmit(command), self._settings())

    def _remote(self, service: RemoteService, lake_url: str) -> Submission:
        """Return how to start an application whose driver runs on another machine."""
        if not lake_url.startswith("s3://"):
            raise ConfigurationError(
                f"the lake {lake_url} is a folder, which the driver on another machine can't"
                " access.",
                "Use an s3:// lake, or submit instead.",
                setting="lake",
            )
        master = self.master
        if isinstance(service, EmrCluster):
            master = master or "yarn"
        settings = session_config(
            self.spark_config, master=master, lake_url=lake_url, is_elsewhere=True
        )
        if isinstance(service, EmrServerless | Glue):
            if self.master:
                raise ConfigurationError(
                    f"the master is {self.master!r}, but EMR Serverless and Glue have masters of"
                    " their own.",
                    "Leave out the master.",
                    setting="spark.master",
                )
            del settings["spark.master"]
        if isinstance(service, Kubernetes) and settings["spark.master"].startswith("k8s://"):
            settings = service.for_executors() | settings
        check_no_secrets(settings, "the setting")
        return Submission(service, settings)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session if the run started one, so that no executors are left behind."""
        self.stop()

    def stop(self) -> None:
        """Stop the session if this resource has started it. The next use of `spark_session`
        starts another.
        """
        session = self._session
        self._session = None
        if session is not None and self._is_ours:
            stop_session(session)


LOADER = "adjunct_loader"
"""The key of the resource: `dg.AssetIn(key=…, input_manager_key="adjunct_loader")`."""


def _pandas(table: pa.Table) -> Any:
    """Return a table as a pandas DataFrame; an integer column with nulls stays exact, as Int64."""
    whole = _engine("pandas").Int64Dtype()
    frame = to_pandas(table)
    for name in table.column_names:
        column = table.column(name)
        if column.null_count and column.type == pa.int64():  # floats are inexact beyond 2**53
            frame[name] = column.to_pandas(types_mapper=lambda _: whole)
    return frame


def _polars(table: pa.Table) -> Any:
    """Return a table as a polars DataFrame."""
    return _engine("polars").from_arrow(table)


def _engine(module: str) -> Any:
    """Return a package that users may install. Raises ConfigurationError if it is missing."""
    return import_package(f"an input in {module}", module, module)


_FORMS: Mapping[str, Callable[[pa.Table], Any]] = {
    "pyarrow.Table": lambda table: table,
    "pandas.DataFrame": _pandas,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": lambda table: _polars(table).lazy(),
    "duckdb.DuckDBPyRelation": lambda table: _engine("duckdb").from_arrow(table),
    "builtins.list": python_rows,
}
_SPARK = "pyspark.DataFrame"


@validated
class AdjunctLoader(dg.ConfigurableIOManager):
    """An I/O manager that loads datasets and streams of Adjunct as inputs of users' assets; it
    stores nothing.

    For a dataset it loads the served version, or the partition's version if versions are
    partitions. For a stream it loads all records except tombstones, including results that a replay
    has replaced. Everything is loaded into memory, except a Spark DataFrame: that belongs to the
    session of `spark`, and its version is leased until the step ends.
    """

    lake: str | None = Field(
        default=None, description="The lake's URL. Default: ADJUNCT_LAKE, else .adjunct/lake."
    )
    spark: SparkResource

    _opened: list[Dataset] = PrivateAttr(default_factory=list)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Release the leases of the versions that were loaded as Spark DataFrames."""
        while self._opened:
            self._opened.pop().close()

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Raise ConfigurationError, because the output would not be stored."""
        raise ConfigurationError(
            f"output {context.name!r} has the I/O manager {LOADER}, which only loads: its value is"
            " not stored.",
            "Give the output another I/O manager; name this one for inputs, as input_manager_key.",
            argument=context.name,
        )

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the entries of a dataset or records of a stream, as the type that the input is
        annotated with.

        Several partitions of a dataset are a dictionary by partition, such as dict[str,
        pandas.DataFrame]. Raises ConfigurationError for an unsupported type and for an asset that
        is no dataset or stream of Adjunct; and the errors of `open_dataset`.
        """
        facts: Mapping[str, Any] = {}
        if context.upstream_output is not None:
            facts = context.upstream_output.definition_metadata
        wanted = context.dagster_type.typing_type
        by_partition = get_origin(wanted) is dict
        kind = _kind(context.name, get_args(wanted)[1] if by_partition else wanted)
        lake = open_lake(self.lake)
        stream = facts.get(STREAM)
        dataset = facts.get(DATASET, "")
        if stream is None and not dataset:
            raise ConfigurationError(
                f"input {context.name!r} is neither a dataset nor a stream of the definitions of"
                " build_definitions.",
                "Merge them with Definitions.merge, or load it in the asset itself.",
                argument=context.name,
            )
        versions: list[str | None]
        if dataset and context.has_asset_partitions:
            versions = list(context.asset_partition_keys)
        else:
            versions = [None]  # the served one
        if by_partition and versions == [None]:
            raise ConfigurationError(
                f"input {context.name!r} is annotated as a dictionary by partition, but it has no"
                " partitions.",
                "Annotate it with the type of the whole, such as pandas.DataFrame instead of"
                " dict[str, pandas.DataFrame].",
                argument=context.name,
            )
        if stream is not None:
            return self._stream(lake, stream, kind)
        if by_partition:
            return {version: self._dataset(lake, dataset, version, kind) for version in versions}
        if len(versions) != 1:
            raise ConfigurationError(
                f"input {context.name!r} has {len(versions)} partitions, and its annotation is for"
                " one.",
                "Annotate it with dict[str, …], by partition.",
                argument=context.name,
            )
        return self._dataset(lake, dataset, versions[0], kind)

    def _dataset(self, lake: Lake, dataset: str, version: str | None, kind: str) -> Any:
        """Return the entries of a dataset's version (None: the served one) as this kind of
        frame.
        """
        if kind == _SPARK:
            self._opened.append(open_dataset(lake, dataset, version=version))
            return self._opened[-1].frame(self.spark.spark_session)
        with open_dataset(lake, dataset, version=version) as opened:
            return _FORMS[kind](opened.lend(lambda reader: read_entries(reader, None)))

    def _stream(self, lake: Lake, stream: str, kind: str) -> Any:
        """Return the records of a stream, without tombstones, as this kind of frame."""
        view = stream_view(lake, stream)  # raises an error for a stream outside the lake
        names = list(view.schema.names)
        if kind == _SPARK:
            streams = LakeStreams(lake)
            _, name = split_stream_name(stream)
            records = streams.read(self.spark.spark_session, streams.all_ranges(name))
            return records.filter(f"not {TOMBSTONE}").select(*map(quote_name, names))
        return _FORMS[kind](
            pyarrow_dataset(view).to_table(columns=names, filter=~pc.field(TOMBSTONE))
        )


def _kind(name: str, wanted: Any) -> str:
    """Return the annotated type as "package.name", a key of _FORMS or _SPARK; "pyarrow.Table"
    for Any. Raises ConfigurationError for other types; `name` is that of the input.
    """
    given = get_origin(wanted) or wanted
    # Some releases of duckdb have their classes in _duckdb.
    package = getattr(given, "__module__", "").partition(".")[0].removeprefix("_")
    if wanted is Any:
        kind = "pyarrow.Table"
    else:
        kind = f"{package}.{getattr(given, '__name__', '')}"
    if kind not in (*_FORMS, _SPARK):
        raise ConfigurationError(
            f"input {name!r} is annotated with {wanted!r}: expected one of"
            f" {', '.join([*_FORMS, _SPARK])}.",
            "Change the annotation, or take the resource adjunct_lake and open the dataset in the"
            " asset.",
            argument=name,
        )
    return kind

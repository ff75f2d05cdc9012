"""Loads datasets and streams of the lake as inputs of users' assets.

The annotation of the asset's parameter chooses the form: a table of pyarrow, a frame of pandas, Polars or Spark, a
relation of DuckDB, or a list of dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_adjunct.assets.exchange.handover import import_engine, pyarrow_dataset, stream_view
from dagster_adjunct.assets.reading.arrow_rows import read_entries
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.orchestration.code_location.resources import SparkResource
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import quote_name
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.validation import validated

LOADER = "adjunct_loader"
"""The key of the resource: `dg.AssetIn(key=…, input_manager_key="adjunct_loader")`."""


def _pandas(table: pa.Table) -> Any:
    whole, frame = _engine("pandas").Int64Dtype(), table.to_pandas()
    for name in table.column_names:
        column = table.column(name)
        if column.null_count and column.type == pa.int64():  # as floats they would be rounded beyond 2**53
            frame[name] = column.to_pandas(types_mapper=lambda _: whole)
    return frame


def _polars(table: pa.Table) -> Any:
    return _engine("polars").from_arrow(table)


def _engine(module: str) -> Any:
    return import_engine(module, extra=module)


_FORMS: Mapping[str, Callable[[pa.Table], Any]] = {
    "pyarrow.Table": lambda table: table,
    "pandas.DataFrame": _pandas,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": lambda table: _polars(table).lazy(),
    "duckdb.DuckDBPyRelation": lambda table: _engine("duckdb").from_arrow(table),
    "builtins.list": lambda table: table.to_pylist(),
}
_SPARK = "pyspark.DataFrame"


@validated
class AdjunctLoader(dg.ConfigurableIOManager):
    """Loads what Adjunct's assets have stored for assets that take it as an input; it stores nothing.

    For a dataset it loads the served version, or the partition's version if versions are partitions. For a stream it
    loads all records except tombstones, results that a replay has replaced included. All of it is in memory, but for
    a frame of Spark, which is of the session of `spark`, and whose version stays leased until the step's end.
    """

    lake: str | None = Field(default=None, description="The lake's URL. Default: ADJUNCT_LAKE, else .adjunct/lake.")
    spark: SparkResource

    _opened: list[Dataset] = PrivateAttr(default_factory=list)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Release the leases of what was loaded as frames of Spark."""
        while self._opened:
            self._opened.pop().close()

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Raise ConfigurationError: it would be lost. Runs of applications write to the lake themselves."""
        problem = f"output {context.name!r} has the I/O manager {LOADER}, which only loads: its value is not stored."
        step = "Give the output another I/O manager; name this one for inputs, as input_manager_key."
        raise ConfigurationError(problem, step, argument=context.name)

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the entries or records in the form that the input is annotated with.

        Of several partitions of a dataset, that is a dictionary by partition: dict[str, pandas.DataFrame]. Raises
        ConfigurationError for another form and for an asset that is neither, and what `open_dataset` raises.
        """
        facts = {} if context.upstream_output is None else context.upstream_output.definition_metadata
        wanted = context.dagster_type.typing_type
        by_partition = get_origin(wanted) is dict
        kind = _kind(context.name, get_args(wanted)[1] if by_partition else wanted)
        lake = open_lake(self.lake)
        stream, dataset = facts.get(metadata.STREAM), facts.get(metadata.DATASET, "")
        if stream is None and not dataset:
            problem = f"input {context.name!r} is no dataset and no stream that this code location has from "
            problem += "build_definitions."
            step = "Merge them with Definitions.merge, or load it in the asset itself."
            raise ConfigurationError(problem, step, argument=context.name)
        versions = list(context.asset_partition_keys) if dataset and context.has_asset_partitions else [None]
        if by_partition and versions == [None]:
            problem = f"input {context.name!r} has no partitions, and its annotation is a dictionary by partition."
            raise ConfigurationError(problem, "Annotate it with what it is in all.", argument=context.name)
        if stream is not None:
            return self._stream(lake, stream, kind)
        if by_partition:
            return {version: self._dataset(lake, dataset, version, kind) for version in versions}
        if len(versions) != 1:
            problem = f"input {context.name!r} has {len(versions)} partitions, and its annotation is for one."
            raise ConfigurationError(problem, "Annotate it with dict[str, …], by partition.", argument=context.name)
        return self._dataset(lake, dataset, versions[0], kind)

    def _dataset(self, lake: Lake, dataset: str, version: str | None, kind: str) -> Any:
        if kind == _SPARK:
            self._opened.append(open_dataset(lake, dataset, version=version))
            return self._opened[-1].frame(self.spark.spark_session)
        with open_dataset(lake, dataset, version=version) as opened:
            return _FORMS[kind](opened.lend(lambda reader: read_entries(reader, None)))

    def _stream(self, lake: Lake, stream: str, kind: str) -> Any:
        view = stream_view(lake, stream)  # refuses streams of other systems
        names = list(view.schema.names)
        if kind == _SPARK:
            streams, name = LakeStreams(lake), split_stream_name(stream)[1]
            records = streams.read(self.spark.spark_session, streams.all_ranges(name))
            return records.filter(f"not {TOMBSTONE}").select(*map(quote_name, names))
        return _FORMS[kind](pyarrow_dataset(view).to_table(columns=names, filter=~pc.field(TOMBSTONE)))


def _kind(name: str, wanted: Any) -> str:
    """Return the form that is annotated, by package and name; for Any, a table of pyarrow."""
    given = get_origin(wanted) or wanted
    package = getattr(given, "__module__", "").partition(".")[0].removeprefix("_")
    kind = "pyarrow.Table" if wanted is Any else f"{package}.{getattr(given, '__name__', '')}"
    if kind not in (*_FORMS, _SPARK):
        problem = f"input {name!r} is annotated with {wanted!r}: expected one of {', '.join([*_FORMS, _SPARK])}."
        step = "Change the annotation, or take the resource adjunct_lake and open the dataset in the asset."
        raise ConfigurationError(problem, step, argument=name)
    return kind

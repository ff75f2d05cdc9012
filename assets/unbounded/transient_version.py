"""Versions of a table of one run: a text that says what they were made of, and their rows in Spark's memory.

The text is "offsets-1:" and the ranges of the stream, as JSON. Whoever reads these ranges again gets the same table, so
a batch that a crash has cut off can be run again as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from dagster_adjunct.resources.errors import AdjunctError, MalformedDocumentError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.stored_documents import first_problem
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.resources.schemas.schema import Schema

_KIND, _FORM = "offsets-", "offsets-1:"
_STORED = TypeAdapter(dict[str, tuple[str, str]])


def is_transient(version: str) -> bool:
    """Whether a version's id is that of a table of one run."""
    return version.startswith(_KIND)


def version_of(ranges: Ranges) -> str:
    """Return the version that stands for the changes in these ranges."""
    spans = {str(ssp): list(ranges[ssp]) for ssp in sorted(ranges)}
    return _FORM + json.dumps(spans, separators=(",", ":"))


def ranges_of(dataset: str, version: str) -> Ranges:
    """Return the ranges that a version stands for. Raises MalformedDocumentError for any other text."""
    try:
        if not version.startswith(_FORM):
            raise ValueError(f"it does not begin with {_FORM}")
        ranges = _STORED.validate_json(version.removeprefix(_FORM))
        return {SystemStreamPartition.parse(ssp): span for ssp, span in ranges.items()}
    except (ValueError, AdjunctError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise MalformedDocumentError(
            f"dataset {dataset!r} lives for one run, and {version!r} is no version of it: {problem}.",
            "Run the application with the release that wrote its batch log, or a newer one.",
            dataset=dataset,
        ) from error


class TransientVersion:
    """One version of a table of one run, in Spark's memory until it is released. `rows` are its entries."""

    def __init__(self, dataset: str, schema: Schema, ranges: Ranges, kept: DataFrame, rows: int) -> None:
        self.dataset, self.schema, self.ranges, self.rows = dataset, schema, ranges, rows
        self.version = version_of(ranges)
        self.kept = kept

    def __repr__(self) -> str:
        return f"TransientVersion({self.dataset!r}, {self.version!r})"

    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        Bucket i of a partitioned dataset is partition i, so that a join on its partition columns, or on its key, has no
        exchange on this side; a broadcast one is one partition, which all tasks get a copy of.
        """
        spark = session_of(spark)
        return self.kept.where(f"NOT {TOMBSTONE}").select(*[column(name) for name in self.schema.names])

    def release(self) -> None:
        """Give the memory back; the view can't be read any more."""
        rdd = self.kept._jdf.queryExecution().logical().rdd()
        # What RDD.unpersist does, without its warning that nothing can be computed again: nobody will ask for it.
        rdd.context().unpersistRDD(rdd.id(), False)

"""Versions that a query or a function computes: each computation is a version of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, Computation, QuerySource
from dagster_adjunct.assets.declaration.snapshots import call_user_function, run_query
from dagster_adjunct.assets.sources import entries
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import declaration_from_spec
from dagster_adjunct.resources.errors import DatasetError, EmptyVersionError
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.records import ArrowFrame, fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    named_column,
    quote_text,
    repeated_names,
)
from dagster_adjunct.resources.schemas.types import type_from_spark
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import META

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def list_query_spark_needs(spec: BoundedDataset, query: QuerySource) -> list[str]:
    """Return, in words, why the query can't be run, or entries made, without Spark; empty if
    they can.
    """
    needed = entries.list_extractor_spark_needs(spec)
    if isinstance(query.query, str):
        needed.insert(0, "its query, which is SQL")
    return needed


class QueryVersions(VersionSource):
    """The one version that a query computes now, named after its partition or else after the time
    in UTC.

    A query's rows have no order: of several with one key, the one with the greatest values is kept;
    nested values are compared by their hashes.
    """

    def __init__(
        self,
        spec: BoundedDataset,
        query: QuerySource,
        partition: str | None,
        *,
        now: Callable[[], datetime],
    ) -> None:
        schema = entries.derive_entry_schema(spec, query.schema)
        ordered_by = tuple(name for name in schema.names if name not in spec.key)
        super().__init__(spec, schema, declaration_from_spec(spec, schema), ordered_by)
        self._query = query
        self._partition = partition
        self._now = now
        self._given = False

    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the version to compute, on the first call only; it is computed when it is read."""
        if self._given:
            return Awaiting(None, (), idle=True)
        self._given = True
        version = self._partition or _generate_version_name(manifest, self._now())
        return Delivery(version, content=Computation(version, self._partition))

    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int | None:
        """Return None: the number of rows is not known before they are computed."""
        return None

    def reject_empty(self, delivery: Delivery) -> None:
        """Raise EmptyVersionError for an answer without entries, unless the query may be empty."""
        if self._query.allow_empty:
            return
        problem = "returned no rows"
        if self.spec.extractor is not None:
            problem += " from which an entry is made"
        raise EmptyVersionError(
            f"{self._what(delivery)} {problem}.",
            "Correct the query or what it reads; if it may be empty, declare QuerySource(…,"
            " allow_empty=True).",
            dataset=self.spec.name,
            version=delivery.version,
        )

    def list_spark_needs(self) -> list[str]:
        """Return, in words, why the query can't be run, or entries made, without Spark."""
        return list_query_spark_needs(self.spec, self._query)

    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        """Run the query and return its rows with the columns of META.

        Raises DatasetError if its columns are not the declared ones.
        """
        query = self._query.query
        what = self._what(delivery)
        assert not isinstance(query, str), "SQL needs Spark"
        answer = call_user_function(
            self.spec, what, "function", partial(query, IN_PROCESS, delivery.content)
        )
        if not isinstance(answer, ArrowFrame):
            raise DatasetError(
                f"{what} returned a {type(answer).__name__}.",
                "Without Spark, return an Arrow table, or a pandas or Polars frame.",
                dataset=self.spec.name,
            )
        answer = _type_nulls(to_arrow_table(answer, what), self._query.schema)
        columns = [(field.name, field.type) for field in Schema.from_arrow(answer.schema).fields]
        _check_columns(columns, self._query.schema, what)
        answer = fit_to_schema(answer, self._query.schema, what)
        rows = answer.num_rows
        partition, offset, timestamp, tombstone = META
        records = {name: answer.column(name) for name in self._query.schema.names}
        records[partition] = pa.repeat(pa.scalar(0, pa.int32()), rows)
        records[offset] = pa.repeat(pa.scalar(0, pa.int64()), rows)
        records[timestamp] = pa.nulls(rows, pa.timestamp("us", "UTC"))
        records[tombstone] = pa.repeat(False, rows)
        return pa.table(records)

    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        """Run the query and return its rows with the columns of META.

        Raises DatasetError if its columns are not the declared ones.
        """
        what = self._what(delivery)
        query = self._query.query
        computation = delivery.content
        ready: str | Callable[[], object]
        if isinstance(query, str):
            ready = _fill_placeholders(query, computation)
        else:
            ready = partial(
                call_user_function, self.spec, what, "function", partial(query, spark, computation)
            )
        frame = run_query(self.spec, what, spark, ready)
        columns = [(field.name, type_from_spark(field.dataType)) for field in frame.schema.fields]
        _check_columns(columns, self._query.schema, what)
        partition, offset, timestamp, tombstone = META
        return frame.select(
            *map(named_column, self._query.schema.names),
            F.lit(0).alias(partition),
            F.lit(0).cast("bigint").alias(offset),
            F.lit(None).cast("timestamp").alias(timestamp),
            F.lit(False).alias(tombstone),
        )

    def _what(self, delivery: Delivery) -> str:
        """Return the dataset, the version and its query, for errors."""
        return f"dataset {self.spec.name!r}, version {delivery.version!r}: {self._query}"


def _type_nulls(answer: pa.Table, schema: Schema) -> pa.Table:
    """Return an answer with the declared types for columns that have none, as those of an empty
    pandas frame.
    """
    declared = schema.to_arrow()
    for index, name in enumerate(answer.column_names):
        if pa.types.is_null(answer.schema.field(index).type) and name in schema:
            kind = declared.field(name).type
            answer = answer.set_column(index, name, pa.nulls(answer.num_rows, kind))
    return answer


def _check_columns(columns: Sequence[tuple[str, str]], declared: Schema, what: str) -> None:
    """Raise DatasetError unless these columns (name and type) are exactly the declared ones, in
    any order.
    """
    types = dict(columns)
    problems = [(name, "is missing") for name in declared.names if name not in types]
    for name, kind in types.items():
        if name not in declared:
            problems.append((name, f"({kind}) is not declared"))
    for field in declared.fields:
        found = types.get(field.name, field.type)
        if found != field.type:
            problems.append((field.name, f"is {found}, declared {field.type}"))
    problems += [(name, "appears twice") for name in repeated_names(name for name, _ in columns)]
    if problems:
        first, _ = problems[0]
        raise DatasetError(
            f"{what} returns other columns than declared:"
            f" {'; '.join(' '.join(problem) for problem in problems)}.",
            "Select, name and cast them in the query, or declare the columns that it returns.",
            column=first,
        )


def _generate_version_name(manifest: BoundedManifest, now: datetime) -> str:
    """Return an unused version name made of the time: 20260131T120000Z, or that with a number."""
    taken = manifest.names.union(str(ref.name) for ref in manifest.versions)
    time = f"{now:%Y%m%dT%H%M%SZ}"
    name = time
    numbers = count(2)
    while name in taken:
        name = f"{time}-{next(numbers)}"
    return name


def _fill_placeholders(sql: str, computation: Computation) -> str:
    """Return the SQL with {version} and {partition} replaced by quoted names; other braces are
    unchanged.
    """
    values = {"{version}": quote_text(computation.version), "{partition}": "NULL"}
    if computation.partition is not None:
        values["{partition}"] = quote_text(computation.partition)
    return re.sub(r"\{version\}|\{partition\}", lambda placeholder: values[placeholder[0]], sql)

"""Looks the records of a batch up in remote tables: each key is asked for once, and what is answered is recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.spark_types import arrow_type_of, column_of_records
from dagster_adjunct.resources.errors import TableError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.tables.bulk_read import BulkReader
from dagster_adjunct.resources.tables.metrics import TableMetrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.step.answers.recorded_answers import RecordedAnswers
    from dagster_adjunct.resources.tables.credits.run_credits import RunCredits
    from dagster_adjunct.resources.tables.remote_table import RemoteTable

FOUND = "__found"


@dataclass(slots=True)
class OpenTables:
    """The tables that a run of the step reads, each kept open, with its cache, from batch to batch; `close` them."""

    _readers: dict[str, BulkReader] = field(default_factory=dict)

    def reader(self, table: RemoteTable[Any, Any, Any], spark: SparkSession, credits: RunCredits | None) -> BulkReader:
        if table.name not in self._readers:
            paid = table if credits is None else credits.paid(table, spark)
            self._readers[table.name] = BulkReader(paid, spark)
        return self._readers[table.name]

    def forget(self, table: str) -> None:
        """Forget what is known of a table's records, since the application has written some."""
        if table in self._readers:
            self._readers.pop(table).close()

    def close(self) -> None:
        for name in list(self._readers):
            self.forget(name)


@dataclass(frozen=True, slots=True)
class Answered:
    """Every key with its answer: columns `key_names(…)`, `__found`, and a column for each answer, by its place."""

    table: pa.Table
    metrics: TableMetrics


def about(lookup: TableLookup, types: Mapping[str, str]) -> dict[str, Any]:
    """Return what a lookup asks, as it is recorded; `types` are those of the stream's columns.

    Of arguments that are plain values a digest: they may be secret. Others can't be told from those of another process.
    """
    asked: dict[str, Any] = {
        "table": lookup.table,
        "key": [types[name] for name in lookup.keys],
        "columns": {answer.column: answer.type for answer in lookup.answers},
    }
    with suppress(TypeError):
        plain = json.dumps(lookup.args, sort_keys=True)
        if lookup.args:
            asked["args"] = sha256(plain.encode()).hexdigest()[:16]
    return asked


def distinct_keys(operator: str, frame: DataFrame, lookup: TableLookup, *, sensitive: bool = False) -> pa.Table:
    """Return the keys of the records, each once, without those that are null or null in a part."""
    import pyarrow as pa

    keys = frame.select(*[column(name).alias(key) for name, key in zip(lookup.keys, key_names(lookup), strict=True)])
    # Brought here as they are: an exchange of the keys would take longer than the few bytes of those that come twice.
    distinct = keys.dropna().toArrow().group_by(key_names(lookup)).aggregate([])
    if (found := first_unreadable(distinct.rename_columns(list(lookup.keys)))) is not None:
        place = f"a record to look up in table {lookup.table}"
        raise found.error(operator, place, hidden=sensitive, operator=operator, table=lookup.table)
    fields = [
        pa.timestamp("us", tz="UTC") if pa.types.is_timestamp(part.type) else part.type for part in distinct.schema
    ]
    return distinct.cast(pa.schema(list(zip(distinct.schema.names, fields, strict=True))))


def answered(keys: pa.Table, lookup: TableLookup, record: RecordedAnswers, reader: BulkReader, tasks: int) -> Answered:
    """Return what is answered for these keys, each of which is there once: what is recorded, else what the table says.

    Of several runs of the batch, the first that records an answer decides it for all.
    """
    import pyarrow as pa

    known, metrics, turn = [_nothing(keys, lookup)], TableMetrics(), 1
    while True:
        while (recorded := record.read(turn)) is not None:
            known.append(recorded.replace_schema_metadata(None).cast(known[0].schema))
            turn += 1
        there = {key for part in known for key in _as_keys(part, lookup)}
        asked = [place for place, key in enumerate(_as_keys(keys, lookup)) if key not in there]
        if not asked:
            return Answered(pa.concat_tables(known), metrics)
        fresh = keys.take(asked)
        wanted = _as_keys(fresh, lookup)
        read = reader.read(wanted, lookup.args, tasks)
        metrics += read.metrics
        kept = record.keep(turn, _answers(fresh, wanted, read.records, lookup))
        if kept is not None:
            known.append(kept.replace_schema_metadata(None))
            turn += 1


def with_answers(operator: str, frame: DataFrame, lookup: TableLookup, answers: DataFrame) -> DataFrame:
    """Return all records with their answers, and `__matched`, which is null where there is none.

    Fails over a record whose key was not asked for: the records are others than a moment ago.
    """
    from pyspark.sql import functions as F

    names = key_names(lookup)
    side = F.broadcast(answers)
    condition: Column | None = None
    whole: Column | None = None
    for stream, name in zip(lookup.keys, names, strict=True):
        equal, there = frame[f"`{stream}`"] == side[name], column(stream).isNotNull()
        condition = equal if condition is None else condition & equal
        whole = there if whole is None else whole & there
    assert condition is not None
    assert whole is not None
    lacking = (
        f"{operator}: a record has a key that this batch did not look up in table {lookup.table}: what comes before "
        "the join gives other records each time."
    )
    unknown = F.raise_error(F.lit(lacking)).cast("boolean")
    matched = F.when(F.col(FOUND), True).when(F.col(FOUND).isNull() & whole, unknown)
    return frame.join(side, condition, "left").withColumn("__matched", matched).drop(*names, FOUND)


def with_unknown(frame: DataFrame, lookup: TableLookup) -> DataFrame:
    """Return the records with columns for their answers, and `__matched`, of which nothing is known but the types."""
    from pyspark.sql import functions as F

    def column_for(kind: str) -> Column:
        # Nulls alone would be seen through: Spark would say that records that are spread by them lie in one partition.
        return F.from_json(F.col("__offset").cast("string"), f"value {kind}")["value"]

    answers = [column_for(answer.type).alias(answer.name) for answer in lookup.answers]
    return frame.select("*", *answers, column_for("boolean").alias("__matched"))


def as_frame(spark: SparkSession, answers: pa.Table, lookup: TableLookup) -> DataFrame:
    """Return answers as a DataFrame, with the names that they have in joined records."""
    named = answers.rename_columns([*key_names(lookup), FOUND, *(answer.name for answer in lookup.answers)])
    return spark.createDataFrame(named)


def key_names(lookup: TableLookup) -> list[str]:
    return [f"__key_{place}" for place in range(len(lookup.keys))]


def _as_keys(part: pa.Table, lookup: TableLookup) -> Sequence[Any]:
    """Return keys as tables take them: a value, or a tuple of several."""
    columns = [part.column(place).to_pylist() for place in range(len(lookup.keys))]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _answers(keys: pa.Table, wanted: Sequence[Any], records: Sequence[Any], lookup: TableLookup) -> pa.Table:
    from collections.abc import Mapping as AnyMapping

    import pyarrow as pa

    what = f"table {lookup.table}"
    strange = next((record for record in records if record is not None and not isinstance(record, AnyMapping)), None)
    if strange is not None:
        raise TableError(
            f"{what} gave a {type(strange).__name__} for a record: expected a mapping of columns.",
            "Have its function return dictionaries.",
            table=lookup.table,
        )
    columns = [keys.column(place) for place in range(len(lookup.keys))]
    columns.append(pa.array([record is not None for record in records], pa.bool_()))
    columns += [column_of_records(what, wanted, records, one.column, one.type) for one in lookup.answers]
    return pa.table(columns, names=_nothing(keys, lookup).schema.names)


def _nothing(keys: pa.Table, lookup: TableLookup) -> pa.Table:
    import pyarrow as pa

    types = [*(part.type for part in keys.schema), pa.bool_(), *(arrow_type_of(one.type) for one in lookup.answers)]
    names = [*key_names(lookup), FOUND, *(f"{place}:{one.column}" for place, one in enumerate(lookup.answers))]
    return pa.schema(list(zip(names, types, strict=True))).empty_table()

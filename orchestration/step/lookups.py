"""Looks records up in remote tables during a batch: collects their keys, asks the table, and joins
its answers.

Each distinct key of a batch is requested once. The answers are recorded, so a repeated batch gets
the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.lookups import TableLookup
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.step.recorded_answers import RecordedAnswers
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.paths import read_path
from dagster_adjunct.resources.schemas.schema import value_column
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.table_backends.columns import arrow_column_from_records
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.shared_rate import RunCredits
from dagster_adjunct.resources.tables.spark import BulkReader
from dagster_adjunct.resources.tables.table import AnyTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


FOUND = "__found"
"""The boolean column of answers that says whether the table has a record for the key."""


@dataclass(slots=True)
class OpenTables:
    """The remote tables in which a run looks records up; they stay open between batches, with
    their caches. `credits` hands out the run's part of the tables' rate limits.
    """

    credits: RunCredits | None = None
    _readers: dict[str, BulkReader] = field(default_factory=dict)

    def limit(self, table: AnyTable, session: SparkSession | None) -> AnyTable:
        """Return the table as this session's tasks may use it (None: this process): within the part
        of its rate that the run has. Without `credits`, return it unchanged.
        """
        if self.credits is None:
            return table
        return self.credits.with_credits(table, session)

    def reader(
        self, table: AnyTable, spark: Callable[[], SparkSession], session: SparkSession | None
    ) -> BulkReader:
        """Return the reader of a table, within its rate; the first call opens it."""
        if table.name not in self._readers:
            self._readers[table.name] = BulkReader(self.limit(table, session), spark)
        return self._readers[table.name]

    def forget(self, table: str) -> None:
        """Close a table and drop its cache, because the application has written to it."""
        if table in self._readers:
            self._readers.pop(table).close()

    def close(self) -> None:
        """Close all tables."""
        for name in list(self._readers):
            self.forget(name)


def describe_lookup(lookup: TableLookup, columns: Columns) -> dict[str, Any]:
    """Return what a lookup asks of its table, for `RecordedAnswers.about`; `columns` are those of
    the records.

    `args` are included as a digest of their JSON, since they may be secret. If they are not JSON
    values they are left out, as they can't be compared between processes.
    """
    asked: dict[str, Any] = {
        "table": lookup.table,
        "key": [columns.type_of(name) for name in lookup.keys],
        "columns": {str(answer.value): answer.value.type for answer in lookup.answers},
    }
    with suppress(TypeError):
        plain = json.dumps(lookup.args, sort_keys=True)
        if lookup.args:
            asked["args"] = sha256(plain.encode()).hexdigest()[:16]
    return asked


def distinct_keys(
    operator: str, keys: pa.Table, lookup: TableLookup, *, sensitive: bool
) -> pa.Table:
    """Return each of these keys once, with times in microseconds of UTC; `keys` has no nulls.

    Raises SchemaMismatchError for a value that Python can't hold, such as a date after the year
    9999. The error omits the value if the key is `sensitive`.
    """
    distinct = keys.group_by(key_columns(lookup)).aggregate([])
    found = first_unreadable(distinct.rename_columns(list(lookup.keys)))
    if found is not None:
        place = f"a record to look up in table {lookup.table}"
        raise found.error(operator, place, hidden=sensitive, operator=operator, table=lookup.table)
    fields = []
    for part in distinct.schema:
        kind = part.type
        if pa.types.is_timestamp(kind):
            kind = pa.timestamp("us", tz="UTC")
        fields.append((part.name, kind))
    return distinct.cast(pa.schema(fields))


def answer_keys(
    keys: pa.Table, lookup: TableLookup, recorded: RecordedAnswers, reader: BulkReader, tasks: int
) -> tuple[pa.Table, TableMetrics]:
    """Return the answers for these distinct keys, and the metrics of reading the table.

    Recorded answers are used. For keys without one the table is read, by at most this number of
    Spark `tasks`, and its answers are recorded. If the batch runs several times, the first run that
    records an answer decides for all. The columns of the result are `key_columns(…)`, FOUND, and
    one for each value that is looked up.
    """
    schema = _answers_schema(keys, lookup)
    parts = [schema.empty_table()]
    answered: set[Any] = set()  # the keys in these parts
    metrics = TableMetrics()
    turn = 1
    while True:
        earlier = recorded.read(turn)
        if earlier is not None:
            turn += 1
            part = earlier.replace_schema_metadata(None).cast(schema)
            parts.append(part)
            answered.update(_as_keys(part, lookup))
            continue
        places = []  # of the keys without an answer
        for place, key in enumerate(_as_keys(keys, lookup)):
            if key not in answered:
                places.append(place)
        if not places:
            return pa.concat_tables(parts), metrics
        unanswered = keys.take(places)
        wanted = _as_keys(unanswered, lookup)
        read = reader.read(wanted, lookup.args, tasks)
        metrics += read.metrics
        kept = recorded.keep(turn, _build_answers(unanswered, wanted, read.records, lookup))
        if kept is not None:  # else another run was faster: its answers of this turn are read
            turn += 1
            parts.append(kept.replace_schema_metadata(None))
            answered.update(wanted)


def join_answers(
    operator: str, frame: DataFrame, lookup: TableLookup, answers: DataFrame
) -> DataFrame:
    """Return all records with their answers, and `__matched`: true if the table has a record for
    the key, else null.

    The Spark job fails on a key that was not looked up: the operators before the join gave other
    records the first time.
    """
    names = key_columns(lookup)
    side = F.broadcast(answers)
    equal = []
    has_whole_key = F.lit(True)
    for stream, name in zip(lookup.keys, names, strict=True):
        value = value_column(frame.columns, stream)
        equal.append(value == side[name])
        has_whole_key = has_whole_key & value.isNotNull()
    problem = (
        f"{operator}: a record has a key that this batch did not look up in table {lookup.table}:"
        " the operators before the join are not deterministic."
    )
    failed = F.raise_error(F.lit(problem)).cast("boolean")
    was_not_asked = F.col(FOUND).isNull() & has_whole_key
    matched = F.when(F.col(FOUND), True).when(was_not_asked, failed)
    return frame.join(side, equal, "left").withColumn("__matched", matched).drop(*names, FOUND)


def add_unknown_answers(frame: DataFrame, lookup: TableLookup) -> DataFrame:
    """Return the records with the columns that `join_answers` adds, all null and of the same types,
    for a dry run.
    """

    def null_column(kind: str) -> Column:
        # A number is no JSON object, so its "value" is null, which Spark does not know when it
        # plans. Of a plain null it would infer that records partitioned by it are in one partition.
        return F.from_json(F.col("__offset").cast("string"), f"value {kind}")["value"]

    answers = [null_column(answer.value.type).alias(answer.name) for answer in lookup.answers]
    return frame.select("*", *answers, null_column("boolean").alias("__matched"))


def key_columns(lookup: TableLookup) -> list[str]:
    """Return the names of the key's columns in tables of keys and answers."""
    return [f"__key_{place}" for place in range(len(lookup.keys))]


def _as_keys(part: pa.Table, lookup: TableLookup) -> Sequence[Any]:
    """Return the keys in the first columns of `part`, each a value, or a tuple for a composite
    key.
    """
    columns = [part.column(place).to_pylist() for place in range(len(lookup.keys))]
    if len(columns) == 1:
        keys: Sequence[Any] = columns[0]
    else:
        keys = list(zip(*columns, strict=True))
    return keys


def _build_answers(
    keys: pa.Table, wanted: Sequence[Any], records: Sequence[Any], lookup: TableLookup
) -> pa.Table:
    """Return the answers of a table for these keys; None among `records` is a key without a record.
    Raises TableError for a record that is no mapping.
    """
    what = f"table {lookup.table}"
    has_record = []
    for record in records:
        if record is not None and not isinstance(record, Mapping):
            raise errors.TableError(
                f"{what} gave a {type(record).__name__} for a record: expected a mapping of"
                " columns.",
                "Have its function return dictionaries.",
                table=lookup.table,
            )
        has_record.append(record is not None)
    columns = [*keys.select(key_columns(lookup)).columns, pa.array(has_record, pa.bool_())]
    names = [answer.value.column for answer in lookup.answers]
    for answer in lookup.answers:
        column = answer.value.column
        values = arrow_column_from_records(what, wanted, records, column, answer.column_type, names)
        columns.append(read_path(pa.table({column: values}), answer.value.steps))
    return pa.table(columns, names=_answers_schema(keys, lookup).names)


def _answers_schema(keys: pa.Table, lookup: TableLookup) -> pa.Schema:
    """Return the columns of answers: those of the key, FOUND, and one for each value that is looked
    up.
    """
    fields = [(name, keys.schema.field(name).type) for name in key_columns(lookup)]
    fields.append((FOUND, pa.bool_()))
    for place, answer in enumerate(lookup.answers):
        fields.append((f"{place}:{answer.value}", arrow_type(answer.value.type)))
    return pa.schema(fields)

"""Records what a batch received from outside - function results and table answers - before any output depends on it.

The lake has one object for each operator and turn, under (application, batch), written only if absent: if a batch runs
several times, the answers of the first run count for all. They are deleted after the batch is closed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from hashlib import sha256
from operator import and_
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.operators.columns import list_hidden_columns, tie_breakers
from dagster_adjunct.orchestration.operators.functions import PickledFunction, check_readable_records, record_position
from dagster_adjunct.orchestration.operators.remote_tables import SinkContext, TableLookup
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.backends.columns import arrow_column_from_records, to_arrow_type
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema, is_same_family, named_column, quote_name
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.tasks import encode_task_errors, map_in_arrow
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import BulkReader
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


PLACE = "__place"
"""The partition that a result's record was in."""


@dataclass(frozen=True, slots=True)
class SinkCall:
    """How an operator calls a function in a batch, and the columns of its results, if any.

    Errors name the function and the `stream` of the records, and omit values of `sensitive` columns. A `cut` batch has
    fewer records than it began with.
    """

    operator: str
    name: str
    shipped: PickledFunction
    application: str
    batch: int
    returns: Schema | None = None
    stream: str | None = None
    sensitive: frozenset[str] = frozenset()
    cut: bool = False


def hand_to_function(frame: DataFrame, call: SinkCall) -> dict[str, int]:
    """Hand all records to the function; return the numbers of records and calls."""
    done = map_in_arrow(_sort_records(frame), partial(_call_in_task, call, []), "rows bigint")
    rows, calls = done.agg(F.sum("rows"), F.count("*")).collect()[0]
    return {"rows": rows or 0, "calls": calls}


def call_or_replay(
    frame: DataFrame, call: SinkCall, record: RecordedAnswers, before_call: Callable[[], None]
) -> tuple[pa.Table, dict[str, int]]:
    """Return the recorded results of the batch, else call the function; also the numbers of records and calls.

    If the batch runs several times, the first run that records its results decides for all.
    """
    assert call.returns is not None
    recorded = record.read(1)
    if recorded is not None:
        rows = frame.count()  # counts upstream complete only once their records are consumed
        if rows != recorded.num_rows and not call.cut:
            raise errors.PlanningError(
                f"{call.operator}: this retry of the batch passes {rows} records to {call.name}, but "
                f"{recorded.num_rows} results were recorded for it.",
                f"Make the operators before {call.operator} deterministic, or abandon the batch: adjunct checkpoint "
                f"abandon {call.application} --reason ….",
                operator=call.operator,
            )
        return recorded, {"rows": recorded.num_rows, "calls": 0}
    before_call()
    answered = _call_on_frame(frame, call).toArrow()
    calls = answered.group_by([PLACE, _CALL]).aggregate([]).num_rows
    kept = record.keep(1, answered.drop_columns([_CALL]))
    first = kept if kept is not None else record.read(1)
    if first is None:
        raise errors.CommitConflictError(
            f"batch {record.batch} of application {record.application!r} was closed by another run, while this one "
            f"passed its records to {call.name}.",
            "Nothing is lost: run the application again, it continues after that batch.",
            application=record.application,
        )
    return first, {"rows": answered.num_rows, "calls": calls}


def plan_results(frame: DataFrame, call: SinkCall) -> DataFrame:
    """Return the results as an uncomputed DataFrame, for its columns and partitioning."""
    return _call_on_frame(frame, call).drop(PLACE, _CALL)


def _call_on_frame(frame: DataFrame, call: SinkCall) -> DataFrame:
    from pyspark.sql.types import IntegerType, StructField, StructType

    assert call.returns is not None
    hidden, made = list_hidden_columns(frame.columns), cast("StructType", StructType.fromDDL(call.returns.ddl()))
    own = [StructField(PLACE, IntegerType()), StructField(_CALL, IntegerType())]
    schema = StructType([*(frame.schema[name] for name in hidden), *made.fields, *own])
    return map_in_arrow(_sort_records(frame), partial(_call_in_task, call, hidden), schema)


def frame_from_results(spark: SparkSession, table: pa.Table, partitions: int | None) -> DataFrame:
    """Return recorded results as a DataFrame; with `partitions`, in the partitions of their records."""
    frame = spark.createDataFrame(table.replace_schema_metadata(None))
    if partitions is not None:
        frame = frame.repartitionById(partitions, PLACE)
    return frame.drop(PLACE)


_CALL = "__call"


def _sort_records(frame: DataFrame) -> DataFrame:
    return frame.sortWithinPartitions("__partition", "__offset", *tie_breakers(frame.columns))


def _call_in_task(call: SinkCall, kept: Sequence[str], batches: Iterator[Any]) -> Iterator[Any]:
    yield from encode_task_errors(_call_on_batches(call, kept, batches))


def _call_on_batches(call: SinkCall, kept: Sequence[str], batches: Iterator[Any]) -> Iterator[Any]:
    from pyspark import TaskContext

    operator, name, returns = call.operator, call.name, call.returns
    function, task = call.shipped.here(), TaskContext.get()
    partition, attempt = (task.partitionId(), task.attemptNumber()) if task is not None else (0, 0)
    for number, records in enumerate(part for part in batches if part.num_rows):
        check_readable_records(records, operator, name, call.stream, call.sensitive)
        context, count = SinkContext(call.application, call.batch, partition, number, attempt), records.num_rows
        try:
            result = function(records, context)
        except Exception as error:  # noqa: BLE001 - it is a user's function
            about = {"record": records.slice(0, 1).to_pylist()[0], "sensitive": call.sensitive, "among": count}
            about |= record_position(records, 0, call.stream)
            failed = function_failed_error(operator, name, function, error, **about)
            raise failed from (None if call.sensitive else error)
        if returns is None:
            if result is not None:
                what = f"returned {type(result).__name__}, but the sink declares no returns="
                raise _result_error(operator, name, what)
            yield pa.RecordBatch.from_pydict({"rows": pa.array([count], pa.int64())})
            continue
        made = cast_result(operator, name, result, count, returns, show_values=not call.sensitive)
        own = [pa.array([value] * count, pa.int32()) for value in (partition, number)]
        yield pa.RecordBatch.from_arrays(
            [*(records.column(column) for column in kept), *made, *own], [*kept, *returns.names, PLACE, _CALL]
        )


def cast_result(
    operator: str, name: str, result: Any, rows: int, returns: Schema, *, show_values: bool = True
) -> list[Any]:
    """Return the declared columns of a function's result, which must have one row for each of `rows` records.

    Raises OperatorFailedError for any other result. `show_values` says whether errors may quote values.
    """

    def wrong(what: str) -> errors.OperatorFailedError:
        return _result_error(operator, name, f"returned {what}")

    if isinstance(result, pa.Table):
        result = pa.RecordBatch.from_struct_array(result.to_struct_array().combine_chunks())
    if not isinstance(result, pa.RecordBatch):
        raise wrong(f"{type(result).__name__}: expected a pyarrow Table or RecordBatch")
    if sorted(result.schema.names) != sorted(returns.names):
        raise wrong(f"the columns {', '.join(result.schema.names) or 'none'}: expected {', '.join(returns.names)}")
    if result.num_rows != rows:
        raise wrong(f"{result.num_rows} rows for {rows} records: expected one for each")
    columns = []
    for each in returns.to_arrow():
        given = result.schema.field(each.name).type
        if pa.types.is_timestamp(each.type) and not is_same_family(given, each.type):
            raise wrong(f"{each.name!r} as {given}, expected a timestamp with a time zone")
        try:
            columns.append(result.column(each.name).cast(each.type))
        except pa.ArrowException as error:
            reason = f": {error}" if show_values else ""
            what = f"{each.name!r} as {given}, which is no {returns.field(each.name).type}{reason}"
            raise wrong(what) from (error if show_values else None)
    if (found := first_unreadable(pa.table(columns, names=list(returns.names)))) is not None:
        raise wrong(f"a result whose {found.problem(hidden=not show_values)}")
    return columns


def _result_error(operator: str, name: str, what: str) -> errors.OperatorFailedError:
    return errors.OperatorFailedError(
        f"{operator}: {name} {what}.", "Change the function or the declared returns=.", operator=operator
    )


_ABOUT = b"adjunct"


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """The recorded answers of one operator in one batch, by turn: a repeated batch may ask for more in a further turn.

    `about` says what was asked, as JSON values; answers to another question are rejected.
    """

    lake: Lake
    application: str
    batch: int
    operator: str
    about: dict[str, Any]

    def read(self, turn: int) -> pa.Table | None:
        """Return the answers recorded in this turn, from 1 on; None if there are none yet."""
        key = self._key(turn)
        try:
            data = self.lake.store.get(key).data
        except errors.ObjectNotFoundError:
            return None
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            about = json.loads((table.schema.metadata or {})[_ABOUT])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise errors.MalformedDocumentError(
                f"the answers of {self.operator} in batch {self.batch} of application {self.application!r} can't be "
                f"read: {error}.",
                "Restore that object from a backup, or abandon the batch: adjunct checkpoint abandon "
                f"{self.application} --reason ….",
                document=key,
            ) from error
        if about != self.about:
            before, now = (", ".join(f"{name} {value}" for name, value in it.items()) for it in (about, self.about))
            problem = (
                f"{self.operator}: batch {self.batch} of application {self.application!r} was started by another "
                f"version of the code, which asked for {before}; this one asks for {now}."
            )
            abandon = f"adjunct checkpoint abandon {self.application} --reason …"
            step = f"Let that version finish the batch, then deploy this one; or abandon it: {abandon}."
            raise errors.ConfigurationError(problem, step, application=self.application, operator=self.operator)
        return table

    def keep(self, turn: int, answers: pa.Table) -> pa.Table | None:
        """Record the answers of this turn and return them; None if another run of the batch was first."""
        answers = answers.replace_schema_metadata({_ABOUT: json.dumps(self.about)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, answers.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(answers)
        try:
            self.lake.store.put_if_absent(self._key(turn), sink.getvalue().to_pybytes())
        except errors.ObjectExistsError:
            return None
        return answers

    def _key(self, turn: int) -> str:
        return f"{_prefix(self.lake, self.application)}{self.batch}/{self.operator}/{turn}.arrow"


def purge_answers(lake: Lake, application: str, closed: int) -> None:
    """Delete the recorded answers of batches up to `closed`, which never run again."""
    prefix = _prefix(lake, application)
    batches = ((info.key, info.key.removeprefix(prefix).partition("/")[0]) for info in lake.store.list(prefix))
    lake.store.delete_many([key for key, batch in batches if batch.isdecimal() and int(batch) <= closed])


def _prefix(lake: Lake, application: str) -> str:
    return f"{lake.application_prefix(application)}/answers/"


FOUND = "__found"


@dataclass(slots=True)
class OpenTables:
    """The tables that a run of the step reads; each stays open, with its cache, between batches until `close`."""

    _readers: dict[str, BulkReader] = field(default_factory=dict)

    def reader(self, table: RemoteTable[Any, Any, Any], spark: Callable[[], SparkSession]) -> BulkReader:
        """Return the reader of a table, which is given as the session's tasks may use it, and kept from then on."""
        if table.name not in self._readers:
            self._readers[table.name] = BulkReader(table, spark)
        return self._readers[table.name]

    def forget(self, table: str) -> None:
        """Close a table and drop its cache, because the application has written to it."""
        if table in self._readers:
            self._readers.pop(table).close()

    def close(self) -> None:
        for name in list(self._readers):
            self.forget(name)


def describe_lookup(lookup: TableLookup, types: Mapping[str, str]) -> dict[str, Any]:
    """Return what a lookup asks, as recorded; `types` are the types of the stream's columns.

    Plain arguments are recorded as a digest, since they may be secret; other arguments can't be compared between
    processes.
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


def collect_distinct_keys(operator: str, frame: DataFrame, lookup: TableLookup, *, sensitive: bool = False) -> pa.Table:
    """Return the distinct keys of the records, without those that are null in any part."""
    keys = frame.select(
        *[named_column(name).alias(key) for name, key in zip(lookup.keys, key_columns(lookup), strict=True)]
    )
    # Collected with duplicates: a shuffle would cost more than the few extra bytes.
    return distinct_keys(operator, keys.dropna().toArrow(), lookup, sensitive=sensitive)


def distinct_keys(operator: str, keys: pa.Table, lookup: TableLookup, *, sensitive: bool) -> pa.Table:
    """Return the distinct ones of these keys, which have no nulls; raise SchemaMismatchError for unreadable ones."""
    distinct = keys.group_by(key_columns(lookup)).aggregate([])
    if (found := first_unreadable(distinct.rename_columns(list(lookup.keys)))) is not None:
        place = f"a record to look up in table {lookup.table}"
        raise found.error(operator, place, hidden=sensitive, operator=operator, table=lookup.table)
    fields = [
        pa.timestamp("us", tz="UTC") if pa.types.is_timestamp(part.type) else part.type for part in distinct.schema
    ]
    return distinct.cast(pa.schema(list(zip(distinct.schema.names, fields, strict=True))))


def answer_keys(
    keys: pa.Table, lookup: TableLookup, record: RecordedAnswers, reader: BulkReader, tasks: int
) -> tuple[pa.Table, TableMetrics]:
    """Return the answers for these distinct keys, and the metrics of reading: the recorded ones, else the table's.

    Answers have the columns `key_columns(…)`, `__found`, and one for each answer.

    If the batch runs several times, the first run that records an answer decides for all.
    """
    known, metrics, turn = [_answers_schema(keys, lookup).empty_table()], TableMetrics(), 1
    while True:
        while (recorded := record.read(turn)) is not None:
            known.append(recorded.replace_schema_metadata(None).cast(known[0].schema))
            turn += 1
        answered_keys = {key for part in known for key in _as_keys(part, lookup)}
        asked = [place for place, key in enumerate(_as_keys(keys, lookup)) if key not in answered_keys]
        if not asked:
            return pa.concat_tables(known), metrics
        fresh = keys.take(asked)
        wanted = _as_keys(fresh, lookup)
        read = reader.read(wanted, lookup.args, tasks)
        metrics += read.metrics
        kept = record.keep(turn, _build_answers(fresh, wanted, read.records, lookup))
        if kept is not None:
            known.append(kept.replace_schema_metadata(None))
            turn += 1


def join_answers(operator: str, frame: DataFrame, lookup: TableLookup, answers: DataFrame) -> DataFrame:
    """Return all records with their answers, and `__matched`, which is null where there is none.

    Fails on a record whose key was not looked up: the records differ from those of a moment ago.
    """
    names, side = key_columns(lookup), F.broadcast(answers)
    equal = [frame[quote_name(stream)] == side[name] for stream, name in zip(lookup.keys, names, strict=True)]
    whole = reduce(and_, [named_column(stream).isNotNull() for stream in lookup.keys])
    lacking = (
        f"{operator}: a record has a key that this batch did not look up in table {lookup.table}: the operators "
        "before the join are not deterministic."
    )
    unknown = F.raise_error(F.lit(lacking)).cast("boolean")
    matched = F.when(F.col(FOUND), True).when(F.col(FOUND).isNull() & whole, unknown)
    return frame.join(side, equal, "left").withColumn("__matched", matched).drop(*names, FOUND)


def add_unknown_answers(frame: DataFrame, lookup: TableLookup) -> DataFrame:
    """Return the records with columns of the right types for their answers and `__matched`, for a dry run."""

    def column_for(kind: str) -> Column:
        # Not plain nulls: Spark would infer that records partitioned by them are in one partition.
        return F.from_json(F.col("__offset").cast("string"), f"value {kind}")["value"]

    answers = [column_for(answer.type).alias(answer.name) for answer in lookup.answers]
    return frame.select("*", *answers, column_for("boolean").alias("__matched"))


def frame_from_answers(spark: SparkSession, answers: pa.Table, lookup: TableLookup) -> DataFrame:
    """Return answers as a DataFrame, with the column names of joined records."""
    named = answers.rename_columns([*key_columns(lookup), FOUND, *(answer.name for answer in lookup.answers)])
    return spark.createDataFrame(named)


def key_columns(lookup: TableLookup) -> list[str]:
    return [f"__key_{place}" for place in range(len(lookup.keys))]


def _as_keys(part: pa.Table, lookup: TableLookup) -> Sequence[Any]:
    """Return keys as tables take them: a value, or a tuple for a composite key."""
    columns = [part.column(place).to_pylist() for place in range(len(lookup.keys))]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _build_answers(keys: pa.Table, wanted: Sequence[Any], records: Sequence[Any], lookup: TableLookup) -> pa.Table:
    what = f"table {lookup.table}"
    strange = next((record for record in records if record is not None and not isinstance(record, Mapping)), None)
    if strange is not None:
        problem = f"{what} gave a {type(strange).__name__} for a record: expected a mapping of columns."
        raise errors.TableError(problem, "Have its function return dictionaries.", table=lookup.table)
    columns = [keys.column(place) for place in range(len(lookup.keys))]
    columns.append(pa.array([record is not None for record in records], pa.bool_()))
    columns += [arrow_column_from_records(what, wanted, records, one.column, one.type) for one in lookup.answers]
    return pa.table(columns, names=_answers_schema(keys, lookup).names)


def _answers_schema(keys: pa.Table, lookup: TableLookup) -> pa.Schema:
    types = [*(part.type for part in keys.schema), pa.bool_(), *(to_arrow_type(one.type) for one in lookup.answers)]
    names = [*key_columns(lookup), FOUND, *(f"{place}:{one.column}" for place, one in enumerate(lookup.answers))]
    return pa.schema(list(zip(names, types, strict=True)))

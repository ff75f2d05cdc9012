"""What a batch has learned from outside, kept in the lake before anything that depends on it is written.

An object for each operator and turn, under (application, batch), written only where there is none: of two runs of one
batch the first one's answers count for both. They are of no use once the batch is closed, and go then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.operators.arguments import function_label
from dagster_adjunct.orchestration.operators.batch_context import SinkContext, SinkFunction
from dagster_adjunct.orchestration.operators.columns import list_hidden_columns, tie_breakers
from dagster_adjunct.orchestration.operators.functions import PickledFunction, check_readable_records, pickle_function
from dagster_adjunct.resources.backends.columns import arrow_column_from_records, to_arrow_type
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    MalformedDocumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    OperatorFailedError,
    PlanningError,
    TableError,
)
from dagster_adjunct.resources.schemas.column_sql import named_column
from dagster_adjunct.resources.schemas.schema import is_same_family
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.errors import encode_task_errors
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import BulkReader
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.orchestration.operators.batch_context import TableLookup
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.tables.shared_rate import RunCredits
    from dagster_adjunct.resources.tables.table import RemoteTable

PLACE = "__place"
"""The partition that a result's record was in."""


@dataclass(frozen=True, slots=True)
class SinkCall:
    """How the operator `operator` calls a function in a batch, and the columns of its results, if it has any. Errors
    tell where in its `stream` the records begin, and no values of `sensitive` columns. A batch that is `cut` has fewer
    records than it was begun with."""

    operator: str
    function: SinkFunction
    application: str
    batch: int
    returns: Schema | None = None
    stream: str | None = None
    sensitive: frozenset[str] = frozenset()
    cut: bool = False


def hand_to_function(frame: DataFrame, call: SinkCall) -> dict[str, int]:
    """Hand all records to the function; return how many records and calls there were."""
    from pyspark.sql import functions as F

    done = map_in_arrow(_sort_records(frame), _task(call, []), "rows bigint")
    rows, calls = done.agg(F.sum("rows"), F.count("*")).collect()[0]
    return {"rows": rows or 0, "calls": calls}


def call_or_replay(
    frame: DataFrame, call: SinkCall, record: RecordedAnswers, before_call: Callable[[], None]
) -> tuple[pa.Table, dict[str, int]]:
    """Return the results, and how many records and calls there were: as they are recorded, else of the function.

    Of several runs of the batch, the first that records its results decides them for all.
    """
    assert call.returns is not None
    recorded = record.read(1)
    if recorded is not None:
        rows = frame.count()  # also what has been counted before it would be waited for in vain else
        if rows != recorded.num_rows and not call.cut:
            raise PlanningError(
                f"{call.operator}: this batch is run again with {rows} records, and had {recorded.num_rows} when the "
                f"results of {function_label(call.function)} were recorded.",
                "Have what comes before it give the same records each time; or abandon the batch: adjunct checkpoint "
                "abandon.",
                operator=call.operator,
            )
        return recorded, {"rows": recorded.num_rows, "calls": 0}
    before_call()
    answered = _call_on_frame(frame, call).toArrow()
    calls = len({(place, number) for place, number in _calls(answered)})
    kept = record.keep(1, answered.drop_columns([_CALL]))
    first = kept if kept is not None else record.read(1)
    if first is None:
        raise CommitConflictError(
            f"batch {record.batch} of application {record.application!r} was ended by another run, while this one "
            f"handed its records to {function_label(call.function)}.",
            "Nothing is lost: run the application again, it goes on behind that batch.",
            application=record.application,
        )
    return first, {"rows": answered.num_rows, "calls": calls}


def plan_results(frame: DataFrame, call: SinkCall) -> DataFrame:
    """Return the results as Spark would compute them, for what it says of them."""
    return _call_on_frame(frame, call).drop(PLACE, _CALL)


def _call_on_frame(frame: DataFrame, call: SinkCall) -> DataFrame:
    assert call.returns is not None
    return map_in_arrow(
        _sort_records(frame), _task(call, list_hidden_columns(frame)), _result_schema(frame, call.returns)
    )


def frame_from_results(spark: SparkSession, table: pa.Table, partitions: int | None) -> DataFrame:
    """Return recorded results as a DataFrame; with `partitions`, in those that their records were in."""
    frame = spark.createDataFrame(table.replace_schema_metadata(None))
    if partitions is not None:
        frame = frame.repartitionById(partitions, PLACE)
    return frame.drop(PLACE)


_CALL = "__call"


def _calls(answered: pa.Table) -> Iterator[tuple[int, int]]:
    counted = answered.group_by([PLACE, _CALL]).aggregate([])
    return zip(counted[PLACE].to_pylist(), counted[_CALL].to_pylist(), strict=True)


def _sort_records(frame: DataFrame) -> DataFrame:
    return frame.sortWithinPartitions("__partition", "__offset", *tie_breakers(frame))


def _result_schema(frame: DataFrame, returns: Schema) -> Any:
    from pyspark.sql.types import IntegerType, StructField, StructType

    made = cast("StructType", StructType.fromDDL(returns.ddl()))
    own = [StructField(PLACE, IntegerType()), StructField(_CALL, IntegerType())]
    return StructType([*(frame.schema[name] for name in list_hidden_columns(frame)), *made.fields, *own])


def _task(call: SinkCall, kept: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    shipped = pickle_function(call.operator, call.function)
    unshipped, name = replace(call, function=_placeholder), function_label(call.function)

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        yield from encode_task_errors(_call_on_batches(batches, shipped, unshipped, name, kept))

    return task


def _placeholder(records: pa.RecordBatch, context: SinkContext) -> None:
    """Stand for the function on its way to the tasks."""


def _call_on_batches(
    batches: Iterator[Any],
    shipped: PickledFunction,
    call: SinkCall,
    name: str,
    kept: Sequence[str],
) -> Iterator[Any]:
    import pyarrow as pa
    from pyspark import TaskContext

    operator, returns = call.operator, call.returns
    function, task = shipped.here(), TaskContext.get()
    partition, attempt = (task.partitionId(), task.attemptNumber()) if task is not None else (0, 0)
    for number, records in enumerate(part for part in batches if part.num_rows):
        check_readable_records(records, operator, name, call.stream, call.sensitive)
        context = SinkContext(call.application, call.batch, partition, number, attempt)
        try:
            result = function(records, context)
        except Exception as error:  # noqa: BLE001 - it is a user's function
            raise _failure(call, name, function, records, error) from (None if call.sensitive else error)
        if returns is None:
            if result is not None:
                raise _result_error(
                    operator, name, f"returned {type(result).__name__}, and the sink declares no returns="
                )
            yield pa.RecordBatch.from_pydict({"rows": pa.array([records.num_rows], pa.int64())})
            continue
        made = cast_result(operator, name, result, records.num_rows, returns, told=not call.sensitive)
        count = records.num_rows
        own = [pa.array([partition] * count, pa.int32()), pa.array([number] * count, pa.int32())]
        yield pa.RecordBatch.from_arrays(
            [*(records.column(column) for column in kept), *made, *own], [*kept, *returns.names, PLACE, _CALL]
        )


def _failure(
    call: SinkCall, name: str, function: object, records: pa.RecordBatch, error: Exception
) -> OperatorFailedError:
    first = records.slice(0, 1).to_pylist()[0]
    return function_failed_error(
        call.operator,
        name,
        function,
        error,
        record=first,
        sensitive=call.sensitive,
        among=records.num_rows,
        stream=call.stream,
        partition=first.get(PARTITION),
        offset=str(first[OFFSET]) if OFFSET in first else None,
    )


def cast_result(operator: str, name: str, result: Any, rows: int, returns: Schema, *, told: bool = True) -> list[Any]:
    """Return the columns of what a function returned for so many records; OperatorFailedError for anything else.

    What Arrow says of a value in its own words is `told` or not.
    """
    import pyarrow as pa

    if isinstance(result, pa.Table):
        result = pa.RecordBatch.from_struct_array(result.to_struct_array().combine_chunks())
    if not isinstance(result, pa.RecordBatch):
        raise _result_error(
            operator, name, f"returned {type(result).__name__}: expected a pyarrow Table or RecordBatch"
        )
    if sorted(result.schema.names) != sorted(returns.names):
        names = ", ".join(result.schema.names) or "none"
        raise _result_error(operator, name, f"returned the columns {names}: expected {', '.join(returns.names)}")
    if result.num_rows != rows:
        raise _result_error(
            operator, name, f"returned {result.num_rows} rows for {rows} records: expected one for each"
        )
    columns = []
    for each in returns.to_arrow():
        given = result.schema.field(each.name).type
        if pa.types.is_timestamp(each.type) and not is_same_family(given, each.type):
            raise _result_error(operator, name, f"returned {each.name!r} as {given}, which is no timestamp with a zone")
        try:
            columns.append(result.column(each.name).cast(each.type))
        except pa.ArrowException as error:
            kind = returns.field(each.name).type
            returned_type = result.schema.field(each.name).type
            reason = f": {error}" if told else ""
            wrong = _result_error(
                operator, name, f"returned {each.name!r} as {returned_type}, which is no {kind}{reason}"
            )
            raise wrong from (error if told else None)
    if (found := first_unreadable(pa.table(columns, names=list(returns.names)))) is not None:
        raise _result_error(operator, name, f"returned a result whose {found.problem(hidden=not told)}")
    return columns


def _result_error(operator: str, name: str, what: str) -> OperatorFailedError:
    return OperatorFailedError(f"{operator}: {name} {what}.", "Correct the function, or returns=.", operator=operator)


_FORMAT = 1
_ABOUT = b"adjunct"


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """The answers that one operator has got in one batch, in turns: a batch that is run again may have more to ask.

    `about` says what was asked, as JSON-able values; answers to something else are refused.
    """

    lake: Lake
    application: str
    batch: int
    operator: str
    about: dict[str, Any]

    def read(self, turn: int) -> pa.Table | None:
        """Return what was recorded in this turn, from 1 on; None where nothing is yet."""
        import pyarrow as pa

        key = self._key(turn)
        try:
            data = self.lake.store.get(key).data
        except ObjectNotFoundError:
            return None
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            about = json.loads((table.schema.metadata or {})[_ABOUT])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise MalformedDocumentError(
                f"the answers of {self.operator} in batch {self.batch} of application {self.application!r} can't be "
                f"read: {error}.",
                "Restore that object from a backup, or abandon the batch: adjunct checkpoint abandon.",
                document=key,
            ) from error
        if about != self._about:
            raise ConfigurationError(
                f"{self.operator}: batch {self.batch} of application {self.application!r} was started by another "
                f"version of the code, which asked for {_describe(about)}; this one asks for {_describe(self._about)}.",
                "Let that version finish the batch, then deploy this one; or abandon it: adjunct checkpoint abandon.",
                application=self.application,
                operator=self.operator,
            )
        return table

    def keep(self, turn: int, answers: pa.Table) -> pa.Table | None:
        """Record what was answered in this turn and return it; None where another run of the batch was first."""
        import pyarrow as pa

        answers = answers.replace_schema_metadata({_ABOUT: json.dumps(self._about)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, answers.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(answers)
        try:
            self.lake.store.put_if_absent(self._key(turn), sink.getvalue().to_pybytes())
        except ObjectExistsError:
            return None
        return answers

    @property
    def _about(self) -> dict[str, Any]:
        return {"format": _FORMAT, **self.about}

    def _key(self, turn: int) -> str:
        return f"{_prefix(self.lake, self.application)}{self.batch}/{self.operator}/{turn}.arrow"


def purge_answers(lake: Lake, application: str, closed: int) -> None:
    """Delete what batches up to this one have recorded: they are closed, and not run again."""
    prefix = _prefix(lake, application)
    batches = ((info.key, info.key.removeprefix(prefix).partition("/")[0]) for info in lake.store.list(prefix))
    lake.store.delete_many([key for key, batch in batches if batch.isdecimal() and int(batch) <= closed])


def _prefix(lake: Lake, application: str) -> str:
    return f"{lake.application_prefix(application)}/answers/"


def _describe(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items() if name != "format")


FOUND = "__found"


@dataclass(slots=True)
class OpenTables:
    """The tables that a run of the step reads, each kept open, with its cache, from batch to batch; `close` them."""

    _readers: dict[str, BulkReader] = field(default_factory=dict)

    def reader(self, table: RemoteTable[Any, Any, Any], spark: SparkSession, credits: RunCredits | None) -> BulkReader:
        if table.name not in self._readers:
            paid = table if credits is None else credits.with_credits(table, spark)
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
class AnsweredKeys:
    """Every key with its answer: columns `key_names(…)`, `__found`, and a column for each answer, by its place."""

    table: pa.Table
    metrics: TableMetrics


def describe_lookup(lookup: TableLookup, types: Mapping[str, str]) -> dict[str, Any]:
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


def collect_distinct_keys(operator: str, frame: DataFrame, lookup: TableLookup, *, sensitive: bool = False) -> pa.Table:
    """Return the keys of the records, each once, without those that are null or null in a part."""
    import pyarrow as pa

    keys = frame.select(
        *[named_column(name).alias(key) for name, key in zip(lookup.keys, key_columns(lookup), strict=True)]
    )
    # Brought here as they are: an exchange of the keys would take longer than the few bytes of those that come twice.
    distinct = keys.dropna().toArrow().group_by(key_columns(lookup)).aggregate([])
    if (found := first_unreadable(distinct.rename_columns(list(lookup.keys)))) is not None:
        place = f"a record to look up in table {lookup.table}"
        raise found.error(operator, place, hidden=sensitive, operator=operator, table=lookup.table)
    fields = [
        pa.timestamp("us", tz="UTC") if pa.types.is_timestamp(part.type) else part.type for part in distinct.schema
    ]
    return distinct.cast(pa.schema(list(zip(distinct.schema.names, fields, strict=True))))


def answer_keys(
    keys: pa.Table, lookup: TableLookup, record: RecordedAnswers, reader: BulkReader, tasks: int
) -> AnsweredKeys:
    """Return what is answered for these keys, each of which is there once: what is recorded, else what the table says.

    Of several runs of the batch, the first that records an answer decides it for all.
    """
    import pyarrow as pa

    known, metrics, turn = [_empty_answers(keys, lookup)], TableMetrics(), 1
    while True:
        while (recorded := record.read(turn)) is not None:
            known.append(recorded.replace_schema_metadata(None).cast(known[0].schema))
            turn += 1
        there = {key for part in known for key in _as_keys(part, lookup)}
        asked = [place for place, key in enumerate(_as_keys(keys, lookup)) if key not in there]
        if not asked:
            return AnsweredKeys(pa.concat_tables(known), metrics)
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

    Fails over a record whose key was not asked for: the records are others than a moment ago.
    """
    from pyspark.sql import functions as F

    names = key_columns(lookup)
    side = F.broadcast(answers)
    condition: Column | None = None
    whole: Column | None = None
    for stream, name in zip(lookup.keys, names, strict=True):
        equal, there = frame[f"`{stream}`"] == side[name], named_column(stream).isNotNull()
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


def add_unknown_answers(frame: DataFrame, lookup: TableLookup) -> DataFrame:
    """Return the records with columns for their answers, and `__matched`, of which nothing is known but the types."""
    from pyspark.sql import functions as F

    def column_for(kind: str) -> Column:
        # Nulls alone would be seen through: Spark would say that records that are spread by them lie in one partition.
        return F.from_json(F.col("__offset").cast("string"), f"value {kind}")["value"]

    answers = [column_for(answer.type).alias(answer.name) for answer in lookup.answers]
    return frame.select("*", *answers, column_for("boolean").alias("__matched"))


def frame_from_answers(spark: SparkSession, answers: pa.Table, lookup: TableLookup) -> DataFrame:
    """Return answers as a DataFrame, with the names that they have in joined records."""
    named = answers.rename_columns([*key_columns(lookup), FOUND, *(answer.name for answer in lookup.answers)])
    return spark.createDataFrame(named)


def key_columns(lookup: TableLookup) -> list[str]:
    return [f"__key_{place}" for place in range(len(lookup.keys))]


def _as_keys(part: pa.Table, lookup: TableLookup) -> Sequence[Any]:
    """Return keys as tables take them: a value, or a tuple of several."""
    columns = [part.column(place).to_pylist() for place in range(len(lookup.keys))]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _build_answers(keys: pa.Table, wanted: Sequence[Any], records: Sequence[Any], lookup: TableLookup) -> pa.Table:
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
    columns += [arrow_column_from_records(what, wanted, records, one.column, one.type) for one in lookup.answers]
    return pa.table(columns, names=_empty_answers(keys, lookup).schema.names)


def _empty_answers(keys: pa.Table, lookup: TableLookup) -> pa.Table:
    import pyarrow as pa

    types = [*(part.type for part in keys.schema), pa.bool_(), *(to_arrow_type(one.type) for one in lookup.answers)]
    names = [*key_columns(lookup), FOUND, *(f"{place}:{one.column}" for place, one in enumerate(lookup.answers))]
    return pa.schema(list(zip(names, types, strict=True))).empty_table()

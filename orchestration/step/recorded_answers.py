"""Records what a batch receives from outside, before any output depends on it; and calls the
functions of sinks.

That is the answers of remote tables and the results of functions. They are objects in the lake,
under (application, batch, operator), written only if absent: if a batch runs several times, the
answers of the first run count for all. They are deleted after the batch is closed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.operators.calls import SinkContext
from dagster_adjunct.orchestration.operators.columns import list_hidden_columns, tie_breakers
from dagster_adjunct.orchestration.operators.functions import (
    PickledFunction,
    check_readable_records,
    record_position,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.objects.arrow_files import read_sealed_table, write_sealed_table
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.arrow_values import cast_values
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type, is_nested, is_same_family
from dagster_adjunct.resources.schemas.values import first_unreadable, python_rows
from dagster_adjunct.resources.spark.tasks import encode_task_errors, map_in_arrow
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


PLACE = "__place"
"""The column with the number of the Spark partition that a result's record was in."""


@dataclass(frozen=True, slots=True)
class SinkCall:
    """How an operator calls a user's function in a batch.

    `name` is the function's name for errors, `shipped` the function as tasks unpickle it, `returns`
    the declared columns of its results, None if it returns none. Errors name the `stream` of the
    records, and omit values of `sensitive` columns. A `cut` batch has lost records to retention
    since it began. The `fence` of the run is checked before each call.
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
    fence: Fence | None = None


def call_function(frame: DataFrame, call: SinkCall) -> dict[str, int]:
    """Call the function with all records, in tasks; return the number of records ("rows") and of
    "calls".
    """
    done = map_in_arrow(_sort_records(frame), partial(_call_in_task, call, []), "rows bigint")
    ((rows, calls),) = done.agg(F.sum("rows"), F.count("*")).collect()
    if rows is None:  # there are no records
        rows = 0
    return {"rows": rows, "calls": calls}


def call_unless_recorded(
    frame: DataFrame, call: SinkCall, answers: RecordedAnswers, before_call: Callable[[], None]
) -> tuple[pa.Table, dict[str, int]]:
    """Return the function's results for the batch, and the number of records ("rows") and of
    "calls".

    If results are recorded, the function is not called. Otherwise `before_call` and then the
    function are called, and the results are recorded; if another run of the batch has recorded its
    own meanwhile, these are returned. Raises PlanningError if the number of recorded results is not
    that of the records, and CommitConflictError if another run has closed the batch.
    """
    assert call.returns is not None
    recorded = answers.read(1)
    if recorded is not None:
        rows = frame.count()  # counts upstream complete only once their records are consumed
        if rows != recorded.num_rows and not call.cut:
            raise errors.PlanningError(
                f"{call.operator}: this retry of the batch passes {rows} records to {call.name},"
                f" but {recorded.num_rows} results were recorded for it.",
                f"Make the operators before {call.operator} deterministic, or abandon the batch:"
                f" adjunct checkpoint abandon {call.application} --reason ….",
                operator=call.operator,
            )
        return recorded, {"rows": recorded.num_rows, "calls": 0}
    before_call()
    made = _call_on_frame(frame, call).toArrow()
    calls = made.group_by([PLACE, _CALL]).aggregate([]).num_rows
    results = answers.keep(1, made.drop_columns([_CALL]))
    if results is None:  # another run of the batch was faster
        results = answers.read(1)
    if results is None:  # that run has closed the batch, which deletes its answers
        raise errors.CommitConflictError(
            f"batch {answers.batch} of application {answers.application!r} was closed by another"
            f" run, while this one passed its records to {call.name}.",
            "Nothing is lost: run the application again, it continues after that batch.",
            application=answers.application,
        )
    return results, {"rows": made.num_rows, "calls": calls}


def plan_results(frame: DataFrame, call: SinkCall) -> DataFrame:
    """Return a DataFrame with the columns and partitioning of the results, for a dry run.

    The function is called only if the DataFrame is computed.
    """
    return _call_on_frame(frame, call).drop(PLACE, _CALL)


def _call_on_frame(frame: DataFrame, call: SinkCall) -> DataFrame:
    """Return a DataFrame of the function's results, with hidden columns, PLACE and the number of
    the call.
    """
    from pyspark.sql.types import IntegerType, StructField, StructType

    assert call.returns is not None
    hidden = list_hidden_columns(frame.columns)
    made = cast("StructType", StructType.fromDDL(call.returns.ddl()))
    own = [StructField(PLACE, IntegerType()), StructField(_CALL, IntegerType())]
    schema = StructType([*(frame.schema[name] for name in hidden), *made.fields, *own])
    return map_in_arrow(_sort_records(frame), partial(_call_in_task, call, hidden), schema)


def frame_from_results(spark: SparkSession, table: pa.Table, partitions: int | None) -> DataFrame:
    """Return recorded results as a DataFrame.

    With `partitions`, the number of Spark partitions, each result is in the partition that its
    record was in.
    """
    frame = frame_from_arrow(spark, table.replace_schema_metadata(None))
    if partitions is not None:
        frame = frame.repartitionById(partitions, PLACE)
    return frame.drop(PLACE)


_CALL = "__call"
"""The column with the number of the call, within its Spark partition, that a result is of."""


def _sort_records(frame: DataFrame) -> DataFrame:
    """Return the records of each partition in the order of their positions."""
    return frame.sortWithinPartitions("__partition", "__offset", *tie_breakers(frame.columns))


def _call_in_task(call: SinkCall, kept: Sequence[str], batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the numbers of records, or the results, of the calls in a task (`_call_on_batches`);
    errors are encoded for the driver.
    """
    yield from encode_task_errors(_call_on_batches(call, kept, batches))


def _call_on_batches(call: SinkCall, kept: Sequence[str], batches: Iterator[Any]) -> Iterator[Any]:
    """Call a sink's function with each batch of records of a task. Yields the number of its records
    or, with `returns=`, the results, with the columns `kept` of the records and the call's place.
    """
    from pyspark import TaskContext

    operator = call.operator
    name = call.name
    returns = call.returns
    function = call.shipped.unpickle()
    partition = 0
    attempt = 0
    task = TaskContext.get()
    if task is not None:  # else Spark does not call this
        partition = task.partitionId()
        attempt = task.attemptNumber()
    # Empty batches have no number: a repeated batch has to number its calls in the same way.
    filled = (records for records in batches if records.num_rows)
    for number, records in enumerate(filled):
        check_readable_records(records, operator, name, call.stream, call.sensitive)
        context = SinkContext(
            call.application, call.batch, partition, number, attempt, fence=call.fence
        )
        result = _call_once(call, function, records, context)
        count = records.num_rows
        if returns is None:
            if result is not None:
                what = f"{type(result).__name__}, but the sink declares no returns="
                raise _result_error(operator, name, what)
            yield pa.RecordBatch.from_pydict({"rows": pa.array([count], pa.int64())})
            continue
        results = cast_result(
            operator, name, result, count, returns, show_values=not call.sensitive
        )
        columns = [records.column(column) for column in kept]
        place = pa.array([partition] * count, pa.int32())
        numbers = pa.array([number] * count, pa.int32())
        yield pa.RecordBatch.from_arrays(
            [*columns, *results, place, numbers], [*kept, *returns.names, PLACE, _CALL]
        )


def _call_once(
    call: SinkCall, function: Callable[..., Any], records: pa.RecordBatch, context: SinkContext
) -> Any:
    """Return what the function returns for these records, after a look at the run's lease."""
    context.check_lease()
    try:
        return function(records, context)
    except errors.TransientError:  # of `check_lease`
        raise
    except Exception as error:  # noqa: BLE001 - it is a user's function
        about = {
            "record": python_rows(records.slice(0, 1))[0],
            "sensitive": call.sensitive,
            "among": records.num_rows,
        }
        about |= record_position(records, 0, call.stream)
        failed = function_failed_error(call.operator, call.name, function, error, **about)
        raise failed from (None if call.sensitive else error)


def cast_result(
    operator: str, name: str, result: Any, rows: int, returns: Schema, *, show_values: bool = True
) -> list[Any]:
    """Return the declared columns of a function's result, which must have one row for each of
    `rows` records.

    Raises OperatorFailedError for any other result. `show_values` says whether errors may quote
    values.
    """
    if isinstance(result, pa.Table):
        result = pa.RecordBatch.from_struct_array(result.to_struct_array().combine_chunks())
    misshapen = _describe_misshapen(result, rows, returns)
    if misshapen is not None:
        raise _result_error(operator, name, misshapen)
    columns = []
    for field in returns.fields:
        column = result.column(field.name)
        try:
            columns.append(_cast_result_column(column, field.type))
        except pa.ArrowException as error:
            what = f"{field.name!r} as {column.type}, which is no {field.type}"
            if not show_values:
                raise _result_error(operator, name, what) from None
            raise _result_error(operator, name, f"{what}: {error}") from error
    found = first_unreadable(pa.table(columns, names=list(returns.names)))
    if found is not None:
        problem = found.problem(hidden=not show_values)
        raise _result_error(operator, name, f"a result whose {problem}")
    return columns


def _describe_misshapen(result: Any, rows: int, returns: Schema) -> str | None:
    """Return how a function's result differs from a batch with these columns and rows, None if it
    does not.
    """
    if not isinstance(result, pa.RecordBatch):
        return f"{type(result).__name__}: expected a pyarrow Table or RecordBatch"
    if sorted(result.schema.names) != sorted(returns.names):
        given = ", ".join(result.schema.names) or "none"
        return f"the columns {given}: expected {', '.join(returns.names)}"
    if result.num_rows != rows:
        return f"{result.num_rows} rows for {rows} records: expected one for each"
    return None


def _cast_result_column(column: pa.Array, kind: str) -> pa.Array:
    """Return a result's column as the declared type. Raises ArrowException for values that do not
    fit.
    """
    if kind == "timestamp" and not is_same_family(column.type, arrow_type(kind)):
        raise pa.ArrowInvalid("expected a timestamp with a time zone")
    if is_nested(kind):
        return cast_values(pa.chunked_array([column]), kind).combine_chunks()
    return column.cast(arrow_type(kind))


def _result_error(operator: str, name: str, what: str) -> errors.OperatorFailedError:
    """Return the error for a function that returned `what`."""
    return errors.OperatorFailedError(
        f"{operator}: {name} returned {what}.",
        "Change the function or the declared returns=.",
        operator=operator,
    )


_ABOUT = b"adjunct"
"""The key of the Arrow metadata that stores `RecordedAnswers.about`, as JSON."""


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """The answers that one operator has recorded in one batch, numbered by *turn* from 1.

    A repeated batch that asks for further keys records their answers in a further turn; results of
    functions are all in turn 1. `about` says what was asked, as JSON values: `read` rejects answers
    to another question.
    """

    lake: Lake
    application: str
    batch: int
    operator: str
    about: dict[str, Any]

    def read(self, turn: int) -> pa.Table | None:
        """Return the answers recorded in this turn; None if there are none yet.

        Raises ConfigurationError for answers to another question, and MalformedDocumentError.
        """
        key = self._key(turn)
        try:
            data = self.lake.store.get(key).data
        except errors.ObjectNotFoundError:
            return None
        abandon = f"adjunct checkpoint abandon {self.application} --reason …"
        try:
            table = read_sealed_table(data)
            metadata = table.schema.metadata or {}
            about = json.loads(metadata[_ABOUT])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise errors.MalformedDocumentError(
                f"the answers of {self.operator} in batch {self.batch} of application"
                f" {self.application!r} can't be read: {error}.",
                f"Restore that object from a backup, or abandon the batch: {abandon}.",
                document=key,
            ) from error
        if about != self.about:
            raise errors.ConfigurationError(
                f"{self.operator}: batch {self.batch} of application {self.application!r} was"
                " started by another version of the code, which asked for"
                f" {_describe_asked(about)}; this one asks for {_describe_asked(self.about)}.",
                "Let that version finish the batch, then deploy this one; or abandon it:"
                f" {abandon}.",
                application=self.application,
                operator=self.operator,
            )
        return table

    def keep(self, turn: int, answers: pa.Table) -> pa.Table | None:
        """Record the answers of this turn and return them; None if another run of the batch has
        recorded its own.
        """
        answers = answers.replace_schema_metadata({_ABOUT: json.dumps(self.about)})
        try:
            self.lake.store.put_if_absent(self._key(turn), write_sealed_table(answers))
        except errors.ObjectExistsError:
            return None
        return answers

    def _key(self, turn: int) -> str:
        """Return the key of the object with the answers of this turn."""
        prefix = answers_prefix(self.lake, self.application)
        return f"{prefix}{self.batch}/{self.operator}/{turn}.arrow"


def _describe_asked(about: Mapping[str, Any]) -> str:
    """Return as text what answers are about."""
    return ", ".join(f"{name} {value}" for name, value in about.items())


def purge_answers(lake: Lake, application: str, closed: int) -> None:
    """Delete the recorded answers of batches up to `closed`, which never run again."""
    prefix = answers_prefix(lake, application)
    old = []
    for info in lake.store.list(prefix):
        batch = info.key.removeprefix(prefix).partition("/")[0]
        if batch.isdecimal() and int(batch) <= closed:
            old.append(info.key)
    lake.store.delete_many(old)


def answers_prefix(lake: Lake, application: str) -> str:
    """Return the prefix of what batches record, before their numbers."""
    return f"{lake.application_prefix(application)}/answers/"

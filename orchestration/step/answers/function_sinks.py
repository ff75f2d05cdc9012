"""Hands the records of a batch to functions of the user's, in Spark's tasks, and takes their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.hidden_columns import carried, tie_breakers
from dagster_adjunct.orchestration.operators.functions.record_functions import check_given
from dagster_adjunct.orchestration.operators.functions.shipped_function import ShippedFunction, shipped_function
from dagster_adjunct.orchestration.operators.spec.sink_context import SinkContext, SinkFunction
from dagster_adjunct.resources.errors import CommitConflictError, OperatorFailedError, PlanningError
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.schemas.schema import same_family
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import failure_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.orchestration.step.answers.recorded_answers import RecordedAnswers
    from dagster_adjunct.resources.schemas.schema import Schema

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


def handed(frame: DataFrame, call: SinkCall) -> dict[str, int]:
    """Hand all records to the function; return how many records and calls there were."""
    from pyspark.sql import functions as F

    done = map_in_arrow(_in_order(frame), _task(call, []), "rows bigint")
    rows, calls = done.agg(F.sum("rows"), F.count("*")).collect()[0]
    return {"rows": rows or 0, "calls": calls}


def results(
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
                f"results of {called(call.function)} were recorded.",
                "Have what comes before it give the same records each time; or abandon the batch: adjunct checkpoint "
                "abandon.",
                operator=call.operator,
            )
        return recorded, {"rows": recorded.num_rows, "calls": 0}
    before_call()
    answered = _called(frame, call).toArrow()
    calls = len({(place, number) for place, number in _calls(answered)})
    kept = record.keep(1, answered.drop_columns([_CALL]))
    first = kept if kept is not None else record.read(1)
    if first is None:
        raise CommitConflictError(
            f"batch {record.batch} of application {record.application!r} was ended by another run, while this one "
            f"handed its records to {called(call.function)}.",
            "Nothing is lost: run the application again, it goes on behind that batch.",
            application=record.application,
        )
    return first, {"rows": answered.num_rows, "calls": calls}


def made_by(frame: DataFrame, call: SinkCall) -> DataFrame:
    """Return the results as Spark would compute them, for what it says of them."""
    return _called(frame, call).drop(PLACE, _CALL)


def _called(frame: DataFrame, call: SinkCall) -> DataFrame:
    assert call.returns is not None
    return map_in_arrow(_in_order(frame), _task(call, carried(frame)), _schema(frame, call.returns))


def as_frame(spark: SparkSession, table: pa.Table, partitions: int | None) -> DataFrame:
    """Return recorded results as a DataFrame; with `partitions`, in those that their records were in."""
    frame = spark.createDataFrame(table.replace_schema_metadata(None))
    if partitions is not None:
        frame = frame.repartitionById(partitions, PLACE)
    return frame.drop(PLACE)


_CALL = "__call"


def _calls(answered: pa.Table) -> Iterator[tuple[int, int]]:
    counted = answered.group_by([PLACE, _CALL]).aggregate([])
    return zip(counted[PLACE].to_pylist(), counted[_CALL].to_pylist(), strict=True)


def _in_order(frame: DataFrame) -> DataFrame:
    return frame.sortWithinPartitions("__partition", "__offset", *tie_breakers(frame))


def _schema(frame: DataFrame, returns: Schema) -> Any:
    from pyspark.sql.types import IntegerType, StructField, StructType

    made = cast("StructType", StructType.fromDDL(returns.ddl()))
    own = [StructField(PLACE, IntegerType()), StructField(_CALL, IntegerType())]
    return StructType([*(frame.schema[name] for name in carried(frame)), *made.fields, *own])


def _task(call: SinkCall, kept: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    shipped = shipped_function(call.operator, call.function)
    unshipped, name = replace(call, function=_not_here), called(call.function)

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        yield from wrapped(_handed(batches, shipped, unshipped, name, kept))

    return task


def _not_here(records: pa.RecordBatch, context: SinkContext) -> None:
    """Stand for the function on its way to the tasks."""


def _handed(
    batches: Iterator[Any],
    shipped: ShippedFunction,
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
        check_given(records, operator, name, call.stream, call.sensitive)
        context = SinkContext(call.application, call.batch, partition, number, attempt)
        try:
            result = function(records, context)
        except Exception as error:  # noqa: BLE001 - it is a user's function
            raise _failure(call, name, function, records, error) from (None if call.sensitive else error)
        if returns is None:
            if result is not None:
                raise _wrong(operator, name, f"returned {type(result).__name__}, and the sink declares no returns=")
            yield pa.RecordBatch.from_pydict({"rows": pa.array([records.num_rows], pa.int64())})
            continue
        made = as_declared(operator, name, result, records.num_rows, returns, told=not call.sensitive)
        count = records.num_rows
        own = [pa.array([partition] * count, pa.int32()), pa.array([number] * count, pa.int32())]
        yield pa.RecordBatch.from_arrays(
            [*(records.column(column) for column in kept), *made, *own], [*kept, *returns.names, PLACE, _CALL]
        )


def _failure(
    call: SinkCall, name: str, function: object, records: pa.RecordBatch, error: Exception
) -> OperatorFailedError:
    first = records.slice(0, 1).to_pylist()[0]
    return failure_of(
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


def as_declared(operator: str, name: str, result: Any, rows: int, returns: Schema, *, told: bool = True) -> list[Any]:
    """Return the columns of what a function returned for so many records; OperatorFailedError for anything else.

    What Arrow says of a value in its own words is `told` or not.
    """
    import pyarrow as pa

    if isinstance(result, pa.Table):
        result = pa.RecordBatch.from_struct_array(result.to_struct_array().combine_chunks())
    if not isinstance(result, pa.RecordBatch):
        raise _wrong(operator, name, f"returned {type(result).__name__}: expected a pyarrow Table or RecordBatch")
    if sorted(result.schema.names) != sorted(returns.names):
        names = ", ".join(result.schema.names) or "none"
        raise _wrong(operator, name, f"returned the columns {names}: expected {', '.join(returns.names)}")
    if result.num_rows != rows:
        raise _wrong(operator, name, f"returned {result.num_rows} rows for {rows} records: expected one for each")
    columns = []
    for field in returns.to_arrow():
        given = result.schema.field(field.name).type
        if pa.types.is_timestamp(field.type) and not same_family(given, field.type):
            raise _wrong(operator, name, f"returned {field.name!r} as {given}, which is no timestamp with a zone")
        try:
            columns.append(result.column(field.name).cast(field.type))
        except pa.ArrowException as error:
            kind = returns.field(field.name).type
            returned_type = result.schema.field(field.name).type
            reason = f": {error}" if told else ""
            wrong = _wrong(operator, name, f"returned {field.name!r} as {returned_type}, which is no {kind}{reason}")
            raise wrong from (error if told else None)
    if (found := first_unreadable(pa.table(columns, names=list(returns.names)))) is not None:
        raise _wrong(operator, name, f"returned a result whose {found.problem(hidden=not told)}")
    return columns


def _wrong(operator: str, name: str, what: str) -> OperatorFailedError:
    return OperatorFailedError(f"{operator}: {name} {what}.", "Correct the function, or returns=.", operator=operator)

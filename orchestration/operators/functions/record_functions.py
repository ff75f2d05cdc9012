"""Functions of the application that are called with one record at a time, in Spark's tasks.

They take records as dictionaries, with the values that Arrow gives, and return dictionaries of declared columns. All of
them are called in `_results`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.hidden_columns import ORDINAL, ordinal_text
from dagster_adjunct.orchestration.operators.functions.shipped_function import shipped_function
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, OperatorFailedError, SchemaMismatchError
from dagster_adjunct.resources.schemas.exact_array import exact_array
from dagster_adjunct.resources.schemas.readable_values import first_unreadable, readable_value
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import check_plain_function, failed, failure_of, place_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Record: TypeAlias = "dict[str, Any]"
RecordFunction: TypeAlias = "Callable[..., Any]"
_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class RecordCall:
    """How the operator `operator` calls `function`: with a record, and with the struct in the column `entry` if there
    is one, for a dictionary of the columns `made`; or, with `several`, for any number of them. None is no result.
    Errors tell the position of the record in its `stream`, and no values of `sensitive` columns."""

    operator: str
    function: RecordFunction
    made: Schema
    several: bool = False
    entry: str | None = None
    stream: str | None = None
    sensitive: frozenset[str] = frozenset()


def call_in_tasks(frame: DataFrame, call: RecordCall, kept: Sequence[str]) -> DataFrame:
    """Return a record for each result of the function: the columns `kept` of that it is made of, and its own.

    Where one record may have several results, the ordinal of each is told.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    fields = [frame.schema[name] for name in kept if not (call.several and name == ORDINAL)]
    names = [field.name for field in fields]
    if call.several:
        fields.append(StructField(ORDINAL, StringType()))
    made = cast("StructType", StructType.fromDDL(call.made.ddl()))
    return map_in_arrow(frame, _task(call, names), StructType([*fields, *made.fields]))


def checked_function(what: str, function: object, schema: object, *given: str) -> None:
    """Raise ConfigurationError where this is no function of what it is `given`, or nothing says which columns its
    results have."""
    if not callable(function):
        raise ConfigurationError(f"{what} got {function!r}.", "Pass a function.", argument="function")
    check_plain_function(what, function, "function", *given)
    if not isinstance(schema, Schema) or not schema.fields:
        raise ConfigurationError(
            f"{what}: nothing says which columns the results of {called(function)} have; schema is {schema!r}.",
            'Declare them: schema=Schema.of(word="string", length="int").',
            argument="schema",
        )


def _task(call: RecordCall, kept: Sequence[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    shipped = shipped_function(call.operator, call.function)
    unshipped = replace(call, function=_not_here)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        here = replace(unshipped, function=shipped.here())
        yield from wrapped(made for batch in batches for made in _made(batch, here, kept))

    return task


def _not_here(record: Record) -> None:
    """Stand for the function on its way to the tasks."""


def _made(batch: pa.RecordBatch, call: RecordCall, kept: Sequence[str]) -> Iterator[pa.RecordBatch]:
    names = batch.schema.names
    check_given(batch, call.operator, called(call.function), call.stream, call.sensitive)
    records = batch.select([name for name in names if not name.startswith("__")]).to_pylist()
    entries = batch.column(call.entry).to_pylist() if call.entry else None
    before = batch.column(ORDINAL).to_pylist() if call.several and ORDINAL in names else [None] * len(records)
    rows: list[int] = []
    ordinals: list[str] = []
    results: list[Record] = []
    for row, record in enumerate(records):
        arguments = (record,) if entries is None else (record, entries[row])
        for number, result in enumerate(_told(call, arguments, batch, row)):
            rows.append(row)
            ordinals.append(ordinal_text(before[row], number))
            results.append(result)
            if len(rows) == _ROWS:
                yield _batch(batch, call, kept, rows, ordinals, results)
                rows, ordinals, results = [], [], []
    if rows:
        yield _batch(batch, call, kept, rows, ordinals, results)


def check_given(
    records: pa.RecordBatch, operator: str, function: str, stream: str | None, sensitive: Collection[str]
) -> None:
    """Raise OperatorFailedError for a record that Python can't hold, before a `function` gets it: its column is wrong,
    and not the function."""
    found = first_unreadable(records, [name for name in records.schema.names if not name.startswith("__")])
    if found is None:
        return
    record = {name: readable_value(records.column(name)[found.row]) for name in records.schema.names}
    hidden = found.column.lower() in {name.lower() for name in sensitive}
    problem = f"{operator}: {found.problem(f'a record for {function}', hidden=hidden)}"
    place = _position(records, found.row, stream)
    told = failed(problem, None, record, sensitive, operator=operator, **place)
    step = "Make another value of it before, or null; or leave the record, or the column, out: filter(…), select(…)."
    raise told.reworded(told.problem, step)


def _told(call: RecordCall, arguments: tuple[Any, ...], batch: pa.RecordBatch, row: int) -> Iterator[Record]:
    """Yield the results of one record; what the function raises is told with the record and where it stands."""
    try:
        yield from _results(call, arguments)
    except SchemaMismatchError as error:
        raise _misfit(call, error.problem, error.next_step, arguments[0], batch, row) from None
    except AdjunctError:
        raise
    except Exception as error:  # noqa: BLE001 - it is a user's function
        raise failure_of(
            call.operator,
            called(call.function),
            call.function,
            error,
            record=arguments[0],
            sensitive=call.sensitive,
            **_position(batch, row, call.stream),
        ) from (None if call.sensitive else error)


def _position(batch: pa.RecordBatch, row: int, stream: str | None) -> dict[str, Any]:
    place = {name: batch.column(name)[row].as_py() for name in (PARTITION, OFFSET) if name in batch.schema.names}
    offset = str(place[OFFSET]) if OFFSET in place else None
    return {"stream": stream, "partition": place.get(PARTITION), "offset": offset}


def _misfit(
    call: RecordCall, problem: str, step: str, record: Record, batch: pa.RecordBatch, row: int
) -> OperatorFailedError:
    """Return the error for a result that is not as declared, with the record that it is made of."""
    place = place_of(call.function)
    about = {"operator": call.operator, **_position(batch, row, call.stream)}
    error = failed(problem.rstrip("."), place, record, call.sensitive, **about)
    return error.reworded(error.problem, step)


def _results(call: RecordCall, arguments: tuple[Any, ...]) -> Iterator[Record]:
    """Yield what the function makes of one record: user code runs here and nowhere else."""
    given = call.function(*arguments)
    if given is None:
        return
    if call.several and (isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__")):
        raise SchemaMismatchError(
            f"{call.operator}: {called(call.function)} returned {type(given).__name__} for a record: expected any "
            "number of dictionaries, one for each record that it makes.",
            "Return a list of dictionaries, or yield them.",
            operator=call.operator,
        )
    names = call.made.names
    for result in given if call.several else (given,):
        if not isinstance(result, Mapping) or set(result) != set(names):
            columns = "other columns" if call.sensitive else f"the columns {', '.join(map(str, result))}"
            result_columns = columns if isinstance(result, Mapping) and result else repr(type(result))
            raise SchemaMismatchError(
                f"{call.operator}: a result of {called(call.function)} has {result_columns}; its schema says "
                f"{', '.join(names)}.",
                "Return a dictionary of exactly these, None where there is no value; or correct schema=.",
                operator=call.operator,
            )
        yield dict(result)


def _batch(
    batch: pa.RecordBatch,
    call: RecordCall,
    kept: Sequence[str],
    rows: Sequence[int],
    ordinals: Sequence[str],
    results: Sequence[Record],
) -> pa.RecordBatch:
    import pyarrow as pa

    taken = batch.select(list(kept)).take(pa.array(rows, pa.int64()))
    arrays, names = list(taken.columns), list(kept)
    if call.several:
        arrays.append(pa.array(ordinals, pa.string()))
        names.append(ORDINAL)
    for field in call.made.to_arrow():
        try:
            arrays.append(exact_array([result[field.name] for result in results], field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            wrong = (at for at, result in enumerate(results) if not _fits(result[field.name], field.type))
            at = next(wrong, 0)
            (record,) = (
                batch.select([name for name in batch.schema.names if not name.startswith("__")])
                .slice(rows[at], 1)
                .to_pylist()
            )
            raise _misfit(
                call,
                f"{call.operator}: {called(call.function)} gave column {field.name!r} a value that is no "
                f"{call.made.field(field.name).type}{'' if call.sensitive else f': {error}'}",
                "Return values of this type, or correct schema=.",
                record,
                batch,
                rows[at],
            ) from (None if call.sensitive else error)
        names.append(field.name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _fits(value: object, kind: pa.DataType) -> bool:
    import pyarrow as pa

    try:
        exact_array([value], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True

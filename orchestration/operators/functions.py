"""Users' functions that Spark tasks call with one record at a time, and the operators `Explode` and
`FlatMap`.

Functions receive records as dictionaries with Arrow's Python values, and return dictionaries of
declared columns. `_BatchCalls.make_results` is the only place that calls them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.calls import Record, RecordCall, RecordFunction
from dagster_adjunct.orchestration.operators.columns import (
    ORDINAL,
    find_taken,
    function_label,
    is_own,
    list_hidden_columns,
    ordinal_text,
    plain_column,
    split_alias,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    PlanContext,
    Spec,
    expressions_need,
    names_need,
)
from dagster_adjunct.orchestration.operators.records import WithColumns
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.exact_values import to_exact_array
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.schemas.values import (
    first_unreadable,
    python_rows,
    python_values,
    readable_value,
)
from dagster_adjunct.resources.spark.tasks import encode_task_errors, map_in_arrow
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.sql.result_types import type_of_elements
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import (
    check_plain_function,
    definition_line,
    function_failed_error,
    operator_failed_error,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def flow_after_function(
    operator: str,
    flow: Flow,
    function: Callable[..., object],
    schema: Schema,
    *,
    keeps_partitioning: bool,
) -> Flow:
    """Return the flow after a user's function; its partitioning is known only if
    `keeps_partitioning` promises it.

    Raises PlanningError if `schema`, the columns of the results, lacks a partitioning column
    despite the promise.
    """
    if not keeps_partitioning or not flow.partitioned_by:
        return flow.lose_partitioning(operator)
    side = f"what {function_label(function)} returns with keeps_partitioning=True"
    by = flow.partitioned_by
    next_step = f"The records are partitioned by {', '.join(by)}: return these, too."
    Columns.of_schema(schema).require(operator, by, next_step, side=side)
    return flow


@dataclass(frozen=True, slots=True)
class PickledFunction:
    """A pickled function, or a pickled object that calls it, and `sys.path` of the process that
    pickled it.
    """

    pickled: bytes
    path: tuple[str, ...]

    def unpickle(self) -> Any:
        """Unpickle the function or object in this process, a task's, after extending its
        `sys.path`.
        """
        # The function's module may be importable only from the driver's import path, such as a
        # script's folder.
        for folder in self.path:
            if folder not in sys.path:
                sys.path.append(folder)
        return pickle.loads(self.pickled)


def pickle_function(
    operator: str, function: Callable[..., Any], call: object = None
) -> PickledFunction:
    """Pickle `function`, or `call`, an object that calls it; raises ConfigurationError if it
    can't be pickled.
    """
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    shipped = function if call is None else call
    try:
        pickled = bytes(pickling.dumps(shipped))
    except Exception as error:  # pickling calls code of users' objects
        problem = (
            f"{operator}: {function_label(function)} can't be sent to tasks:"
            f" {type(error).__name__}: {error}."
        )
        step = (
            "Let it create connections, locks and the like itself, for example at its first call."
        )
        raise errors.ConfigurationError(
            problem, step, argument="function", operator=operator
        ) from error
    # "" in sys.path is the working directory, which is another one in tasks.
    path = tuple(folder or str(Path.cwd()) for folder in sys.path)
    return PickledFunction(pickled, path)


def to_typed_array(values: Sequence[object], kind: str) -> pa.Array:
    """Return values as an array of this type; raises ValueError if one is not of the type."""
    try:
        return to_exact_array(values, arrow_type(kind))
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise ValueError(str(error)) from error


_ROWS = 10_000
"""How many results are converted to Arrow at once."""


def call_in_tasks(frame: DataFrame, call: RecordCall, kept: Sequence[str]) -> DataFrame:
    """Return a record for each result: the columns `kept` of the record that the function got, and
    those of the result.

    If the function returns several results for a record, each gets an ORDINAL. It is called in
    Spark tasks.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    names = _passed_columns(call, kept)
    fields = [frame.schema[name] for name in names]
    if call.several:
        fields.append(StructField(ORDINAL, StringType()))
    results = cast("StructType", StructType.fromDDL(call.schema.ddl()))
    shipped = pickle_function(call.operator, call.function, call)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return encode_task_errors(_process_batches(batches, shipped.unpickle(), names))

    return map_in_arrow(frame, task, StructType([*fields, *results.fields]))


def call_in_process(records: pa.Table, call: RecordCall, kept: Sequence[str]) -> pa.Table:
    """Return what `call_in_tasks` returns, for records in memory: the function is called in this
    process.
    """
    names = _passed_columns(call, kept)
    fields = [pa.field(name, records.schema.field(name).type) for name in names]
    if call.several:
        fields.append(pa.field(ORDINAL, pa.string()))
    schema = pa.schema([*fields, *call.schema.to_arrow()])
    batches = records.combine_chunks().to_batches()
    return pa.Table.from_batches(_process_batches(batches, call, names), schema)


def _passed_columns(call: RecordCall, kept: Sequence[str]) -> list[str]:
    """Return those of the columns `kept` that results have as their record has them: all but
    ORDINAL, if each of several results gets one of its own.
    """
    if not call.several:
        return list(kept)
    return [name for name in kept if name != ORDINAL]


def validate_record_function(what: str, function: object, schema: object, *given: str) -> None:
    """Raise ConfigurationError unless `function` takes the arguments `given`, and `schema`
    declares its results.
    """
    if not callable(function):
        problem = f"{what} got {function!r}."
        raise errors.ConfigurationError(problem, "Pass a function.", argument="function")
    check_plain_function(what, function, "function", *given)
    if not isinstance(schema, Schema) or not schema.fields:
        problem = (
            f"{what}: the columns of the results of {function_label(function)} are not declared;"
            f" schema is {schema!r}."
        )
        step = 'Declare them: schema=Schema.of(word="string", length="int").'
        raise errors.ConfigurationError(problem, step, argument="schema")


@dataclass(frozen=True, slots=True)
class _BatchCalls:
    """The calls of a function with the records of a batch; `names` are the columns of results."""

    call: RecordCall
    batch: pa.RecordBatch
    names: frozenset[str]

    def make_results(self, row: int, arguments: tuple[Any, ...]) -> Iterator[Record]:
        """Yield the function's results for the record in this row; none if it returns None. Only
        this method runs the user's code.

        Errors contain the record, which is the first of the `arguments`, and its position.
        """
        call = self.call
        try:
            returned = call.function(*arguments)
            if returned is None:
                return
            if call.several:
                results = self._require_iterable(row, returned)
            else:
                results = (returned,)
            for result in results:
                if not isinstance(result, Mapping) or result.keys() != self.names:
                    raise self._columns_error(row, result)
                yield dict(result)
        except errors.SchemaMismatchError as error:  # raised by what the user's function called
            raise self.error(row, error.problem.rstrip("."), error.next_step) from None
        except errors.AdjunctError:
            raise
        except Exception as error:  # noqa: BLE001 - it is a user's function
            record, *_ = arguments
            failed = function_failed_error(
                call.operator,
                function_label(call.function),
                call.function,
                error,
                record=record,
                sensitive=call.sensitive,
                **record_position(self.batch, row, call.stream),
            )
            raise failed from (None if call.sensitive else error)

    def _require_iterable(self, row: int, returned: Any) -> Iterable[Any]:
        """Return what the function returned, if it is any number of results; raises
        OperatorFailedError if it is not.
        """
        if hasattr(returned, "__iter__") and not isinstance(returned, str | bytes | Mapping):
            return returned  # type: ignore[no-any-return]
        problem = (
            f"{function_label(self.call.function)} returned {type(returned).__name__} for a record:"
            " expected any number of dictionaries"
        )
        raise self.error(row, problem, "Return a list of dictionaries, or yield them.")

    def _columns_error(self, row: int, result: object) -> errors.OperatorFailedError:
        """Return the error for a result that is no dictionary with the declared columns."""
        found = repr(type(result))
        if isinstance(result, Mapping) and result:
            if self.call.sensitive:
                found = "other columns"
            else:
                found = f"the columns {', '.join(map(str, result))}"
        label = function_label(self.call.function)
        names = ", ".join(self.call.schema.names)
        problem = f"a result of {label} has {found}; its schema says {names}"
        step = (
            "Return a dictionary of exactly these, None where there is no value; or correct"
            " schema=."
        )
        return self.error(row, problem, step)

    def error(self, row: int, problem: str, step: str) -> errors.OperatorFailedError:
        """Return the error for a result that does not match the schema, with its record."""
        call = self.call
        (record,) = python_rows(_own_columns(self.batch).slice(row, 1))
        position = record_position(self.batch, row, call.stream)
        error = operator_failed_error(
            f"{call.operator}: {problem}",
            definition_line(call.function),
            record,
            call.sensitive,
            operator=call.operator,
            **position,
        )
        return error.reworded(error.problem, step)

    def build_batch(self, results: Sequence[_Result], kept: Sequence[str]) -> pa.RecordBatch:
        """Return results, with the columns `kept` of the records that they are made of; raises
        OperatorFailedError for a value that is not of its column's type.
        """
        call = self.call
        rows = pa.array([result.row for result in results], pa.int64())
        of_records = self.batch.select(list(kept)).take(rows)
        columns = dict(zip(kept, of_records.columns, strict=True))
        if call.several:
            columns[ORDINAL] = pa.array([result.ordinal for result in results], pa.string())
        for field in call.schema.fields:
            values = [result.record[field.name] for result in results]
            try:
                columns[field.name] = to_typed_array(values, field.type)
            except ValueError as error:
                reason = "" if call.sensitive else f": {error}"
                problem = (
                    f"{function_label(call.function)} gave column {field.name!r} a value that is no"
                    f" {field.type}{reason}"
                )
                step = "Return values of this type, or correct schema=."
                misfit = results[_find_misfit(values, field.type)]
                failure = self.error(misfit.row, problem, step)
                raise failure from (None if call.sensitive else error)
        return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


class _Result(NamedTuple):
    """A result of a function: the row of its record in the batch, its ORDINAL, and its values."""

    row: int
    ordinal: str
    record: Record


def _own_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the records without their hidden columns."""
    return batch.select(list(filter(is_own, batch.schema.names)))


def _find_misfit(values: Sequence[object], kind: str) -> int:
    """Return the place of the first value that is not of this type; 0 if each of them is, converted
    by itself.
    """
    for at, value in enumerate(values):
        try:
            to_typed_array([value], kind)
        except ValueError:
            return at
    return 0


def _process_batches(
    batches: Iterable[pa.RecordBatch], call: RecordCall, kept: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the results for the records of these batches, as `call_in_tasks` returns them."""
    names = frozenset(call.schema.names)
    for batch in batches:
        yield from _process_batch(_BatchCalls(call, batch, names), kept)


def _process_batch(calls: _BatchCalls, kept: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the results for the records of one batch, at most _ROWS at once."""
    call = calls.call
    batch = calls.batch
    label = function_label(call.function)
    check_readable_records(batch, call.operator, label, call.stream, call.sensitive)
    arguments = [python_rows(_own_columns(batch))]
    if call.entry:
        arguments.append(python_values(batch.column(call.entry)))
    ordinals: list[str | None] = [None] * batch.num_rows
    if call.several and ORDINAL in batch.schema.names:
        ordinals = batch.column(ORDINAL).to_pylist()
    results: list[_Result] = []
    for row, given in enumerate(zip(*arguments, strict=True)):
        for number, record in enumerate(calls.make_results(row, given)):
            results.append(_Result(row, ordinal_text(ordinals[row], number), record))
            if len(results) == _ROWS:
                yield calls.build_batch(results, kept)
                results = []
    if results:
        yield calls.build_batch(results, kept)


def check_readable_records(
    records: pa.RecordBatch,
    operator: str,
    function: str,
    stream: str | None,
    sensitive: Collection[str],
) -> None:
    """Raise OperatorFailedError for a record whose values Python can't represent, before the
    function is called.
    """
    names = records.schema.names
    found = first_unreadable(records, list(filter(is_own, names)))
    if found is None:
        return
    record = {name: readable_value(records.column(name)[found.row]) for name in names}
    is_sensitive = find_taken((found.column,), sensitive) is not None
    problem = f"{operator}: {found.problem(f'a record for {function}', hidden=is_sensitive)}"
    place = record_position(records, found.row, stream)
    error = operator_failed_error(problem, None, record, sensitive, operator=operator, **place)
    step = (
        "Replace the value before, or drop the record or the column: with_columns(…), filter(…),"
        " select(…)."
    )
    raise error.reworded(error.problem, step)


def record_position(batch: pa.RecordBatch, row: int, stream: str | None) -> dict[str, Any]:
    """Return the fields of an error that say where a record was read: stream, partition, offset
    (None if unknown).
    """
    partition = None
    offset = None
    if PARTITION in batch.schema.names:
        partition = batch.column(PARTITION)[row].as_py()
    if OFFSET in batch.schema.names:
        offset = str(batch.column(OFFSET)[row].as_py())
    return {"stream": stream, "partition": partition, "offset": offset}


def no_elements_error(operator: str, expression: str, kind: str) -> errors.PlanningError:
    """Return the error for a flat_map by an expression of a type without elements."""
    problem = (
        f"{operator}: {expression} is {kind}, which has no elements: expected an array or a map."
    )
    step = "Convert it, for example with split(words, ' ') or from_json(text, 'array<string>')."
    return errors.PlanningError(problem, step, operator=operator)


@dataclass(frozen=True, slots=True)
class Explode(Spec):
    """A record for each element of an array or map: all columns, and the element as column `name`,
    new or replaced.

    A record without elements is dropped, or kept with null if `keep_empty`.
    """

    kind: ClassVar[str] = "flat-map"
    keeps_each: ClassVar[bool] = False
    expression: str
    name: str
    keep_empty: bool = False

    def summary(self) -> str:
        null = ", or null" if self.keep_empty else ""
        return f"each of {self.expression} as {self.name}{null}"

    @property
    def sql(self) -> Sequence[str]:
        return (self.expression,)

    @property
    def _as_columns(self) -> WithColumns:
        """An operator that changes columns in the same way, by which columns and partitioning
        are planned.
        """
        return WithColumns(((self.name, f"explode({self.expression})"),))

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        names = columns.names
        kind = check_expression(context.operator, self.expression, names, columns.types)
        if kind is None:
            kind = "unknown"
        may_have_elements = kind.startswith(("array<", "map<", "unknown"))
        if columns.types is not None and not may_have_elements:
            raise no_elements_error(context.operator, self.expression, kind)
        exploded = self._as_columns.derive_columns(context, arriving)
        element = type_of_elements(kind)
        if element is not None:
            column = replace(exploded.known[self.name], type=element)
            return exploded.add({self.name: column})
        return exploded

    def came_from(self, name: str, arriving: Columns) -> str | None:
        return self._as_columns.came_from(name, arriving)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return self._as_columns.flow(context, arriving)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        (columns,) = arriving
        need = expressions_need(self.sql, columns)
        if need:
            return need
        return names_need((self.name,), columns)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        explode = batch.records.explode
        return explode(operator, frame, self.expression, self.name, keep_empty=self.keep_empty)


@dataclass(frozen=True, slots=True)
class FlatMap(Spec):
    """The records that a `function` returns for each record, with the columns of `schema`."""

    kind: ClassVar[str] = "flat-map"
    keeps_each: ClassVar[bool] = False
    works_without_spark: ClassVar[bool] = True
    function: RecordFunction
    schema: Schema
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return function_label(self.function)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns.of_schema(self.schema)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return flow_after_function(
            context.operator,
            flow,
            self.function,
            self.schema,
            keeps_partitioning=self.keeps_partitioning,
        )

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        names = batch.records.names(frame)
        call = RecordCall(
            operator,
            self.function,
            self.schema,
            several=True,
            stream=batch.planned.stream_of(operator),
            sensitive=batch.planned.sensitive(operator, names),
        )
        return batch.records.call(frame, call, list_hidden_columns(names))


def build_flat_map(
    after: str,
    what: str | RecordFunction,
    schema: Schema | None,
    keep_empty: bool,
    keeps_partitioning: bool,
) -> Explode | FlatMap:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    place = f"flat_map after {after}"
    if isinstance(what, str):
        given = ""
        if keeps_partitioning:
            given = "keeps_partitioning"
        if schema is not None:
            given = "schema"
        if given:
            problem = f"{place} has an expression, and {given}=, which is for functions."
            raise errors.ConfigurationError(problem, "Leave it out.", argument=given)
        expression, alias = split_alias(what)
        name = alias or plain_column(expression)
        if not expression or name is None:
            expected = "a name for the element, as in \"split(words, ' ') as word\""
            raise argument_error(f"{place} got {what!r}", expected, argument="what")
        validate_column_names(place, name)
        return Explode(expression, name, keep_empty)
    validate_record_function(place, what, schema, "record")
    assert schema is not None
    if keep_empty:
        problem = f"{place} has a function, and keep_empty=, which is for expressions."
        step = "Leave it out: the function decides itself what it returns for a record."
        raise errors.ConfigurationError(problem, step, argument="keep_empty")
    return FlatMap(what, schema, keeps_partitioning)

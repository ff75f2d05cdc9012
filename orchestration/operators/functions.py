"""Users' functions that Spark tasks call with one record at a time, and the operators `Explode` and
`FlatMap`.

Functions receive records as dictionaries with Arrow's Python values, and return dictionaries of
declared columns. `_call_function` is the only place that calls them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from dagster_adjunct.orchestration.operators.columns import (
    ORDINAL,
    function_label,
    list_hidden_columns,
    ordinal_column,
    ordinal_text,
    plain_column,
    require_columns,
    split_alias,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.operator import Flow, PlanContext, Spec
from dagster_adjunct.orchestration.operators.records import WithColumns
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.schema import (
    Schema,
    arrow_type,
    named_column,
    to_exact_array,
)
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value
from dagster_adjunct.resources.spark.tasks import encode_task_errors, map_in_arrow
from dagster_adjunct.resources.sql.checking import check_expression
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import (
    check_plain_function,
    definition_line,
    function_failed_error,
    operator_failed_error,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext


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
        return flow.lose(operator)
    side = f"what {function_label(function)} returns with keeps_partitioning=True"
    next_step = (
        f"The records are partitioned by {', '.join(flow.partitioned_by)}: return these, too."
    )
    require_columns(operator, side, flow.partitioned_by, schema.names, next_step)
    return flow


@dataclass(frozen=True, slots=True)
class PickledFunction:
    """A pickled function, or a pickled object that calls it, and `sys.path` of the process that
    pickled it.
    """

    pickled: bytes
    path: tuple[str, ...]

    def here(self) -> Any:
        """Unpickle the function or object in this process, a task's, after extending its
        `sys.path`.
        """
        # The function's module may be importable only from the driver's import path, such as a
        # script's folder.
        sys.path.extend(place for place in self.path if place not in sys.path)
        return pickle.loads(self.pickled)


def pickle_function(
    operator: str, function: Callable[..., Any], call: object = None
) -> PickledFunction:
    """Pickle `function`, or `call`, an object that calls it; raises ConfigurationError if it
    can't be pickled.
    """
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    try:
        pickled = bytes(pickling.dumps(function if call is None else call))
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
    return PickledFunction(pickled, tuple(place or str(Path.cwd()) for place in sys.path))


Record: TypeAlias = "dict[str, Any]"
RecordFunction: TypeAlias = Callable[..., Any]
_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class RecordCall:
    """How an operator calls a user's function: with a record, and with its entry if `entry` names a
    column of entries.

    The function returns a dictionary with the columns of `schema`, or None; with `several`, any
    number of dictionaries. Errors contain the position of the record in its `stream`, but no values
    of `sensitive` columns.
    """

    operator: str
    function: RecordFunction
    schema: Schema
    several: bool = False
    entry: str | None = None
    stream: str | None = None
    sensitive: frozenset[str] = frozenset()


def call_in_tasks(frame: DataFrame, call: RecordCall, kept: Sequence[str]) -> DataFrame:
    """Return a record for each result: the columns `kept` of the record that the function got, and
    those of the result.

    If the function returns several results for a record, each gets an ORDINAL. It is called in
    Spark tasks.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    fields = [frame.schema[name] for name in kept if not (call.several and name == ORDINAL)]
    names = [field.name for field in fields]
    if call.several:
        fields.append(StructField(ORDINAL, StringType()))
    made = cast("StructType", StructType.fromDDL(call.schema.ddl()))
    return map_in_arrow(frame, _task(call, names), StructType([*fields, *made.fields]))


def call_in_process(records: pa.Table, call: RecordCall, kept: Sequence[str]) -> pa.Table:
    """Do what `call_in_tasks` does for records in memory, calling the function in this process."""
    names = [name for name in kept if not (call.several and name == ORDINAL)]
    fields = [pa.field(name, records.schema.field(name).type) for name in names]
    fields += (
        [pa.field(ORDINAL, pa.string()), *call.schema.to_arrow()]
        if call.several
        else call.schema.to_arrow()
    )
    batches = [
        made
        for batch in records.combine_chunks().to_batches()
        for made in _process_batch(batch, call, names)
    ]
    return pa.Table.from_batches(batches, pa.schema(fields))


def validate_record_function(what: str, function: object, schema: object, *given: str) -> None:
    """Raise ConfigurationError unless `function` takes the arguments `given`, and `schema`
    declares its results.
    """
    if not callable(function):
        raise errors.ConfigurationError(
            f"{what} got {function!r}.", "Pass a function.", argument="function"
        )
    check_plain_function(what, function, "function", *given)
    if not isinstance(schema, Schema) or not schema.fields:
        raise errors.ConfigurationError(
            f"{what}: the columns of the results of {function_label(function)} are not declared;"
            f" schema is {schema!r}.",
            'Declare them: schema=Schema.of(word="string", length="int").',
            argument="schema",
        )


def _task(
    call: RecordCall, kept: Sequence[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    shipped = pickle_function(call.operator, call.function, call)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        here = shipped.here()
        yield from encode_task_errors(
            made for batch in batches for made in _process_batch(batch, here, kept)
        )

    return task


def _process_batch(
    batch: pa.RecordBatch, call: RecordCall, kept: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    names = batch.schema.names
    check_readable_records(
        batch, call.operator, function_label(call.function), call.stream, call.sensitive
    )
    records = batch.select([name for name in names if not name.startswith("__")]).to_pylist()
    entries = batch.column(call.entry).to_pylist() if call.entry else None
    before = (
        batch.column(ORDINAL).to_pylist()
        if call.several and ORDINAL in names
        else [None] * len(records)
    )
    rows: list[int] = []
    ordinals: list[str] = []
    results: list[Record] = []
    for row, record in enumerate(records):
        arguments = (record,) if entries is None else (record, entries[row])
        for number, result in enumerate(_call_function(call, arguments, batch, row)):
            rows.append(row)
            ordinals.append(ordinal_text(before[row], number))
            results.append(result)
            if len(rows) == _ROWS:
                yield _build_batch(batch, call, kept, rows, ordinals, results)
                rows, ordinals, results = [], [], []
    if rows:
        yield _build_batch(batch, call, kept, rows, ordinals, results)


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
    found = first_unreadable(
        records, [name for name in records.schema.names if not name.startswith("__")]
    )
    if found is None:
        return
    record = {
        name: readable_value(records.column(name)[found.row]) for name in records.schema.names
    }
    hidden = found.column.lower() in {name.lower() for name in sensitive}
    problem = f"{operator}: {found.problem(f'a record for {function}', hidden=hidden)}"
    place = record_position(records, found.row, stream)
    error = operator_failed_error(problem, None, record, sensitive, operator=operator, **place)
    step = (
        "Replace the value before, or drop the record or the column: with_columns(…), filter(…),"
        " select(…)."
    )
    raise error.reworded(error.problem, step)


def _call_function(
    call: RecordCall, arguments: tuple[Any, ...], batch: pa.RecordBatch, row: int
) -> Iterator[Record]:
    """Yield the function's results for one record. Only this function runs the user's code.

    Errors contain the record and its position.
    """
    label, names = function_label(call.function), call.schema.names
    try:
        given = call.function(*arguments)
        if given is None:
            return
        if call.several and (
            isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__")
        ):
            problem = (
                f"{label} returned {type(given).__name__} for a record: expected any number of"
                " dictionaries"
            )
            step = "Return a list of dictionaries, or yield them."
            raise _result_error(call, problem, step, arguments[0], batch, row)
        for result in given if call.several else (given,):
            if not isinstance(result, Mapping) or set(result) != set(names):
                columns = (
                    "other columns"
                    if call.sensitive
                    else f"the columns {', '.join(map(str, result))}"
                )
                found = columns if isinstance(result, Mapping) and result else repr(type(result))
                problem = f"a result of {label} has {found}; its schema says {', '.join(names)}"
                step = (
                    "Return a dictionary of exactly these, None where there is no value; or correct"
                    " schema=."
                )
                raise _result_error(call, problem, step, arguments[0], batch, row)
            yield dict(result)
    except errors.SchemaMismatchError as error:  # raised by what the user's function called
        raise _result_error(
            call, error.problem.rstrip("."), error.next_step, arguments[0], batch, row
        ) from None
    except errors.AdjunctError:
        raise
    except Exception as error:  # noqa: BLE001 - it is a user's function
        about = {
            "record": arguments[0],
            "sensitive": call.sensitive,
            **record_position(batch, row, call.stream),
        }
        failed = function_failed_error(call.operator, label, call.function, error, **about)
        raise failed from (None if call.sensitive else error)


def record_position(batch: pa.RecordBatch, row: int, stream: str | None) -> dict[str, Any]:
    """Return the fields of an error that say where a record was read: stream, partition, offset
    (None if unknown).
    """
    place = {
        name: batch.column(name)[row].as_py()
        for name in (PARTITION, OFFSET)
        if name in batch.schema.names
    }
    offset = str(place[OFFSET]) if OFFSET in place else None
    return {"stream": stream, "partition": place.get(PARTITION), "offset": offset}


def _result_error(
    call: RecordCall, problem: str, step: str, record: Record, batch: pa.RecordBatch, row: int
) -> errors.OperatorFailedError:
    """Return the error for a result that does not match the schema, with its source record."""
    place, position = definition_line(call.function), record_position(batch, row, call.stream)
    problem = f"{call.operator}: {problem}"
    error = operator_failed_error(
        problem, place, record, call.sensitive, operator=call.operator, **position
    )
    return error.reworded(error.problem, step)


def _build_batch(
    batch: pa.RecordBatch,
    call: RecordCall,
    kept: Sequence[str],
    rows: Sequence[int],
    ordinals: Sequence[str],
    results: Sequence[Record],
) -> pa.RecordBatch:
    taken = batch.select(list(kept)).take(pa.array(rows, pa.int64()))
    arrays, names = list(taken.columns), list(kept)
    if call.several:
        arrays.append(pa.array(ordinals, pa.string()))
        names.append(ORDINAL)
    for field in call.schema.fields:
        kind = arrow_type(field.type)
        try:
            arrays.append(to_exact_array([result[field.name] for result in results], kind))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            at = next(
                (at for at, result in enumerate(results) if not _fits(result[field.name], kind)), 0
            )
            own = batch.select([name for name in batch.schema.names if not name.startswith("__")])
            (record,) = own.slice(rows[at], 1).to_pylist()
            problem = (
                f"{function_label(call.function)} gave column {field.name!r} a value that is no "
                f"{field.type}{'' if call.sensitive else f': {error}'}"
            )
            step = "Return values of this type, or correct schema=."
            failure = _result_error(call, problem, step, record, batch, rows[at])
            raise failure from (None if call.sensitive else error)
        names.append(field.name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _fits(value: object, kind: pa.DataType) -> bool:
    try:
        to_exact_array([value], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


_NUMBER, _ELEMENT = "__number", "__element"


@dataclass(frozen=True, slots=True)
class Explode(Spec):
    """A record for each element of an array or map: all columns, and the element as column `name`,
    new or replaced.

    A record without elements is dropped, or kept with null if `keep_empty`.
    """

    kind: ClassVar[str] = "flat-map"
    expression: str
    name: str
    keep_empty: bool = False

    def summary(self) -> str:
        return f"each of {self.expression} as {self.name}" + (
            ", or null" if self.keep_empty else ""
        )

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
        kind = check_expression(context.operator, self.expression, columns.names, columns.types)
        if (
            kind is not None
            and columns.types is not None
            and not kind.startswith(("array<", "map<"))
        ):
            raise self._no_elements(context.operator, kind)
        made = self._as_columns.derive_columns(context, arriving)
        if kind is not None and kind.startswith("array<") and "…" not in kind:
            return made.add({self.name: replace(made.known[self.name], type=kind[6:-1])})
        return made

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return self._as_columns.flow(context, arriving)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql.types import ArrayType, MapType

        (frame,) = frames
        values = F.expr(self.expression)
        kind = frame.select(values).schema.fields[0].dataType
        if not isinstance(kind, ArrayType | MapType):
            raise self._no_elements(operator, kind.simpleString())
        values = F.map_entries(values) if isinstance(kind, MapType) else values
        exploded = (F.posexplode_outer if self.keep_empty else F.posexplode)(values)
        made = frame.select("*", exploded.alias(_NUMBER, _ELEMENT))
        number = F.coalesce(F.col(_NUMBER), F.lit(0))
        names = {name.lower(): name for name in frame.columns if name != ORDINAL}
        element = F.col(_ELEMENT).alias(self.name)
        columns = {lower: named_column(name) for lower, name in names.items()} | {
            self.name.lower(): element
        }
        return made.select(*columns.values(), ordinal_column(frame, number).alias(ORDINAL))

    def _no_elements(self, operator: str, kind: str) -> errors.PlanningError:
        problem = (
            f"{operator}: {self.expression} is {kind}, which has no elements: expected an array or"
            " a map."
        )
        step = "Convert it, for example with split(words, ' ') or from_json(text, 'array<string>')."
        return errors.PlanningError(problem, step, operator=operator)


@dataclass(frozen=True, slots=True)
class FlatMap(Spec):
    """The records that a `function` returns for each record, with the columns of `schema`."""

    kind: ClassVar[str] = "flat-map"
    function: RecordFunction
    schema: Schema
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return function_label(self.function)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns.of_schema(self.schema)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        kept = self.keeps_partitioning
        return flow_after_function(
            context.operator, arriving[0], self.function, self.schema, keeps_partitioning=kept
        )

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return ""

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        stream, sensitive = batch.stream_of(operator), batch.sensitive(operator)
        call = RecordCall(
            operator, self.function, self.schema, several=True, stream=stream, sensitive=sensitive
        )
        return batch.call_for_records(frame, call, list_hidden_columns(batch.names(frame)))


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
        if schema is not None or keeps_partitioning:
            problem = (
                f"{place} has an expression, and schema= or keeps_partitioning=, which are for"
                " functions."
            )
            raise errors.ConfigurationError(problem, "Leave them out.", argument="schema")
        expression, alias = split_alias(what)
        name = alias or plain_column(expression)
        if not expression or name is None:
            expected = "a name for the element, as in \"split(words, ' ') as word\""
            raise argument_error(f"{place} got {what!r}", expected, argument="what")
        validate_column_names(place, name)
        return Explode(expression, name, bool(keep_empty))
    validate_record_function(place, what, schema, "record")
    assert schema is not None
    if keep_empty:
        problem = f"{place} has a function, and keep_empty=, which is for expressions."
        step = "Leave it out: the function decides itself what it returns for a record."
        raise errors.ConfigurationError(problem, step, argument="keep_empty")
    return FlatMap(what, schema, bool(keeps_partitioning))

"""The operators on records: `Input`, `Broadcast`, `Filter`, `Map`, `Select`, `WithColumns`,
`Merge`, `PartitionBy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from dagster_adjunct.orchestration.operators.batch import Batch, Frame, SparkBatch
from dagster_adjunct.orchestration.operators.columns import (
    FINAL,
    ORDINAL,
    TASK,
    DataFrameFunction,
    check_new_names,
    find_taken,
    function_label,
    is_own,
    list_copies,
    list_hidden_columns,
    ordinal_column,
    plain_column,
    plain_path,
    split_alias,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.event_times import EventTime
from dagster_adjunct.orchestration.operators.operator import (
    DeclaredCount,
    Flow,
    PassThroughSpec,
    PlanContext,
    Role,
    Spec,
    expressions_need,
    merge_flows,
    names_need,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    TASK_NUMBER,
    UNKNOWN,
    ColumnFacts,
    Columns,
    LineageNode,
    Sources,
    merge_sources,
    require_facts,
    sources_from_expression,
    sources_from_sql,
    validate_partition_count,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.paths import steps_among, write_path
from dagster_adjunct.resources.schemas.schema import named_columns, quote_name
from dagster_adjunct.resources.schemas.types import types_from_spark
from dagster_adjunct.resources.sql.checking import (
    check_condition,
    check_expression,
    check_expressions,
)
from dagster_adjunct.resources.sql.expression import implies_true, parse_expression, struct_fields
from dagster_adjunct.resources.sql.operands import may_cast
from dagster_adjunct.resources.sql.parsed import Expression
from dagster_adjunct.resources.sql.types import expression_type, types_differ
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DefaultOffset = Literal["oldest", "upcoming"]
OnLost = Literal["fail", "oldest"]


@dataclass(frozen=True, slots=True)
class InputSpec(Spec):
    """An operator that reads the input stream `stream`; `default_offset` is where reading starts
    without a checkpoint.

    With an `event_time`, records have hidden columns with their time and with the watermark that
    they are behind, if any.
    """

    kind: ClassVar[str] = "input"
    stream: str
    default_offset: DefaultOffset | None = None
    reset_offset: bool = False
    on_lost: OnLost = "fail"
    event_time: EventTime | None = None

    @property
    def sql(self) -> Sequence[str]:
        if self.event_time is None:
            return ()
        return self.event_time.sql

    @property
    def reads(self) -> str:
        return self.stream

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        facts = require_facts(context.catalog, self.stream, context.operator)
        columns = Columns.of_schema(facts.schema, LineageNode("stream", self.stream))
        if self.event_time is not None:
            self.event_time.check(context.operator, columns.names, columns.types)
        return columns

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if not require_facts(context.catalog, self.stream, context.operator).in_arrow:
            return f"reading stream {self.stream}"
        if self.event_time is not None:
            return "event_time="
        return ""


@dataclass(frozen=True, slots=True)
class Input(InputSpec):
    """The records of an input stream, in its partitions."""

    role: ClassVar[Role] = "input"
    needs_tasks: ClassVar[bool] = False

    def summary(self) -> str:
        return self.stream

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        facts = require_facts(context.catalog, self.stream, context.operator)
        if not facts.key:
            return Flow(context.operator, (), UNKNOWN)
        return Flow(context.operator, facts.key, facts.partitioner)

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        facts = require_facts(context.catalog, self.stream, context.operator)
        return DeclaredCount(facts.partitions, "input")

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        return batch.records.read(self.stream)


@dataclass(frozen=True, slots=True)
class BroadcastInput(InputSpec):
    """The records of an input stream, all of which every task reads: the column `task` gets the
    task's number.
    """

    role: ClassVar[Role] = "broadcast-input"
    task: str = field(kw_only=True)

    def summary(self) -> str:
        return f"{self.stream}, all of it for each {self.task}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        columns = InputSpec.derive_columns(self, context, arriving)
        what = f"{context.operator}: stream {self.stream}"
        return add_task_column(context.operator, what, columns, self.task, "input_stream(broadcast")

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, (self.task,), TASK_NUMBER)

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        # It has one partition per task. The number of tasks follows from other streams: see
        # `add_broadcast_counts`.
        return DeclaredCount(None, "input")

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return InputSpec.spark_need(self, context, arriving) or "broadcast="

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        return copy_for_each_task(batch.records.read(self.stream), self.task, batch.planned.tasks)


@dataclass(frozen=True, slots=True)
class Broadcast(PassThroughSpec):
    """All records once per task, with the task's number (from 0) in the column `task`."""

    kind: ClassVar[str] = "broadcast"
    role: ClassVar[Role] = "broadcast"
    needs_tasks: ClassVar[bool] = True
    task: str

    def summary(self) -> str:
        return f"all of it for each {self.task}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        what = f"{context.operator}: the stream"
        return add_task_column(context.operator, what, columns, self.task, "broadcast(task")

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, (self.task,), TASK_NUMBER)

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        return DeclaredCount(None, "one for each task")

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        (frame,) = frames
        return copy_for_each_task(frame, self.task, batch.planned.tasks)


def add_task_column(operator: str, what: str, columns: Columns, task: str, call: str) -> Columns:
    """Return the columns and `task`, the one for the task's number; raises PlanningError if a
    column has that name.

    In the error, `what` names the owner of the columns, and `call` is the beginning of the user's
    call that names the column: "broadcast(task".
    """
    if find_taken((task,), columns.names or ()):
        problem = (
            f"{what} has a column {task!r}, which is the name of the column for the task's number."
        )
        step = f'Choose another name: {call}="task_number").'
        raise PlanningError(problem, step, column=task, operator=operator)
    return columns.add({task: ColumnFacts("int")})


def check_task_column(task: str, found: str, **about: Any) -> None:
    """Raise ConfigurationError unless `task` can name the column for the task's number; `found`
    says what was given.
    """
    if plain_column(task) != task or not is_own(task):
        raise argument_error(found, 'a plain column name, by default "task"', **about)


def copy_for_each_task(records: DataFrame, name: str, tasks: int) -> DataFrame:
    """Return all records once per task: those for task n are in partition n, and have n in the
    column `name`.

    The hidden column TASK has the number, too: it orders the copies of one record when they are in
    one partition again, so that a repeated batch sends the same bytes. If the records are copies
    already, their earlier TASK moves to ORDINAL.
    """
    if TASK in records.columns:
        records = records.withColumn(ORDINAL, ordinal_column(records, F.col(TASK))).drop(TASK)
    numbers = records.sparkSession.range(0, tasks, 1, tasks).select(
        F.col("id").cast("int").alias(TASK)
    )
    # `numbers` has one partition per task. The broadcast join gives each of them all records.
    return numbers.crossJoin(F.broadcast(records)).select(
        *named_columns(records.columns), F.col(TASK).alias(name), TASK
    )


@dataclass(frozen=True, slots=True)
class Filter(PassThroughSpec):
    """The records that match a Spark SQL condition."""

    kind: ClassVar[str] = "filter"
    keeps_each: ClassVar[bool] = False
    condition: str

    def summary(self) -> str:
        return self.condition

    @property
    def sql(self) -> Sequence[str]:
        return (self.condition,)

    @property
    def keeps_only_final(self) -> bool:
        return implies_true(self.condition, FINAL)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        check_condition(context.operator, self.condition, columns.names, columns.types)
        return columns

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        (columns,) = arriving
        return expressions_need(self.sql, columns)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        return batch.records.filter(frame, self.condition)


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """Records whose columns are the Spark SQL `expressions`."""

    kind: ClassVar[str] = "map"
    needs_tasks: ClassVar[bool] = False
    expressions: tuple[str, ...]

    def summary(self) -> str:
        return ", ".join(self.expressions)

    @property
    def sql(self) -> Sequence[str]:
        return self.expressions

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        checked = check_expressions(
            context.operator, self.expressions, columns.names, columns.types
        )
        result: dict[str, ColumnFacts] = {}
        sure_names: list[str] = []
        computed: dict[str, Sources] = {}  # by name, for the expressions after it
        is_complete = True
        for expression, kind in checked:
            if expression.star:
                expanded = expression.expand_star(columns.known)
                result |= {column: columns.known[column] for column in expanded}
                if columns.complete:
                    sure_names += expanded
                else:
                    is_complete = False
            elif expression.name is None:
                is_complete = False
            else:
                name = expression.name
                sure_names.append(name)
                result[name] = _derive_column(expression, kind, columns, computed)
                computed[name] = result[name].sources
        step = "List the columns to keep instead of '*', or choose another name."
        check_new_names(context.operator, sure_names, step)
        is_typed = columns.typed and columns.complete
        return Columns(result, is_complete, is_typed)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return flow.rename(context, self._new_name)

    def _new_name(self, column: str) -> str | None:
        """Return the name that an input column has after the map, None if it is lost.

        "*" keeps a column unless another expression has its name. A plain name and "dest as faa"
        keep it, too, under the first name that it gets.
        """
        new_names: dict[str, str] = {}
        not_in_star: set[str] = set()
        has_star = False
        for expression in map(parse_expression, self.expressions):
            if expression.star:
                has_star = True
                not_in_star.update(map(str.lower, expression.excepted))
            elif expression.column is not None:
                new_name = expression.name or expression.column
                new_names.setdefault(expression.column.lower(), new_name)
            elif expression.alias is not None:
                not_in_star.add(expression.alias.lower())
        if has_star and column.lower() not in not_in_star:
            return column
        return new_names.get(column.lower())

    def came_from(self, name: str, arriving: Columns) -> str | None:
        # By new column, the steps to the value that it passes on; () for a computed column.
        passed: dict[str, tuple[str, ...]] = {}
        for text in self.expressions:
            expression = parse_expression(text)
            if expression.star:
                for column in expression.expand_star(arriving.known):
                    passed[column] = (column,)
            elif expression.name is not None:  # without an alias only Spark knows the name
                passed[expression.name] = _passed_value(text)
        return _find_source(name, passed)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        (columns,) = arriving
        texts = []
        unnamed = []
        excepted: list[str] = []
        for text in self.expressions:
            expression = parse_expression(text)
            excepted += expression.excepted
            if expression.star:
                continue
            texts.append(text)
            if expression.name is None:
                unnamed.append(text)
        need = expressions_need(texts, columns)
        if need:
            return need
        if unnamed:
            return f"the name that Spark gives {unnamed[0]}"
        return names_need(excepted, columns)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        if any(parse_expression(text).star for text in self.expressions):
            return batch.records.select(frame, self.expressions)  # "*" has the hidden columns, too
        names = batch.records.names(frame)
        hidden = map(quote_name, (*list_hidden_columns(names), *list_copies(names)))
        return batch.records.select(frame, (*hidden, *self.expressions))


def _passed_value(expression: str) -> tuple[str, ...]:
    """Return the steps to the value that an expression passes on unchanged; () if it makes one."""
    value, _ = split_alias(expression)
    column = plain_column(value)
    if column is not None:
        return (column,)
    return plain_path(value)


def _find_source(name: str, passed: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the column or path in which the value called `name` was before an operator; None if
    the operator computes it.

    `passed` has, by new column, the steps to the value that it passes on; () for a computed column.
    """
    column, *inner = steps_among(name, passed)
    steps = passed.get(column)
    if not steps:
        return None
    if len(steps) == 1 and not inner:
        return steps[0]
    return write_path((*steps, *inner))


def _derive_column(
    expression: Expression, kind: str | None, columns: Columns, computed: Mapping[str, Sources]
) -> ColumnFacts:
    """Return the column of this type (None: unknown) that an expression computes, with fields if it
    is a struct of updates. `computed` has the sources of the columns that expressions before it
    compute.
    """
    fields: Sequence[tuple[str, Expression]] = ()
    if expression.name in (UPDATE, DEFAULT):
        fields = struct_fields(expression)
    if not fields:
        return ColumnFacts(kind, sources_from_expression(expression, columns.sources, computed))
    types = columns.types or {}
    parts = {}
    for field_name, value in fields:
        sources = sources_from_expression(value, columns.sources, computed)
        parts[field_name] = ColumnFacts(expression_type(value, types), sources)
    return ColumnFacts(kind, (), parts)


@dataclass(frozen=True, slots=True)
class MapFunction(Spec):
    """The records that a DataFrame `function` returns."""

    kind: ClassVar[str] = "map"
    keeps_each: ClassVar[bool] = False
    function: DataFrameFunction
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return function_label(self.function)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns(complete=False)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if self.keeps_partitioning:
            return flow
        return flow.lose_partitioning(context.operator)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return "a DataFrame function"

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        (frame,) = frames
        return batch.records.call_frame(operator, self.function, frame)


@dataclass(frozen=True, slots=True)
class FilterFunction(MapFunction):
    """The records that a DataFrame function returns with the same columns."""

    kind: ClassVar[str] = "filter"
    needs_tasks: ClassVar[bool] = False

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        return columns

    def came_from(self, name: str, arriving: Columns) -> str | None:
        return name

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        (frame,) = frames
        passed = MapFunction.compile(self, operator, frames, batch)
        before = types_from_spark(frame.schema)
        after = types_from_spark(passed.schema)
        _check_columns_unchanged(operator, self.function, before, after)
        return passed


def _check_columns_unchanged(
    operator: str, function: DataFrameFunction, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Raise PlanningError if a filter's function has changed the columns, given by their types
    `before` and `after`: later operators rely on them.
    """
    for name in (*before, *after):
        if name not in before:
            what = f"adds the column {name!r}"
        elif name not in after:
            what = f"drops the column {name!r}"
        elif before[name] != after[name]:
            what = f"changes the type of column {name!r} from {before[name]} to {after[name]}"
        else:
            continue
        label = function_label(function)
        problem = f"{operator}: {label} {what}: a filter must not change columns."
        step = "Change columns with map(function), and filter after it."
        raise PlanningError(problem, step, operator=operator, column=name)


def build_filter(
    after: str, condition: str | DataFrameFunction, keeps_partitioning: bool
) -> Filter | FilterFunction:
    """Return the filter for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    what = f"filter after {after}"
    if callable(condition):
        check_plain_function(what, condition, "condition", "frame")
        return FilterFunction(condition, keeps_partitioning)
    if not condition.strip():
        expected = "a Spark SQL condition or a function"
        raise argument_error(f"{what} got {condition!r}", expected, argument="condition")
    if keeps_partitioning:
        step = "Leave it out: a condition always keeps the partitioning."
        problem = f"{what} has keeps_partitioning=True with a condition."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Filter(condition)


def build_map(
    after: str, expressions: Sequence[str | DataFrameFunction], keeps_partitioning: bool
) -> Map | MapFunction:
    """Return the map for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    what = f"map after {after}"
    if len(expressions) == 1:
        (function,) = expressions
        if callable(function):
            check_plain_function(what, function, "expressions", "frame")
            return MapFunction(function, keeps_partitioning)
    texts = []
    for expression in expressions:
        if isinstance(expression, str) and expression.strip():
            texts.append(expression)
    if not texts or len(texts) < len(expressions):
        expected = (
            'Spark SQL expressions, such as "tailnum" and "upper(model) as model", or one function'
        )
        raise argument_error(f"{what} got {expressions!r}", expected, argument="expressions")
    if keeps_partitioning:
        step = "Leave it out: the planner knows the effect of expressions."
        problem = f"{what} has keeps_partitioning=True with expressions."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Map(tuple(texts))


@dataclass(frozen=True, slots=True)
class Merge(Spec):
    """The records of all inputs, which have the same columns of the same types; the first input
    gives their order.

    `inputs` are the ids of the input operators.
    """

    kind: ClassVar[str] = "merge"
    works_without_spark: ClassVar[bool] = True
    needs_tasks: ClassVar[bool] = False
    inputs: tuple[str, ...]

    def summary(self) -> str:
        return f"of {', '.join(self.inputs)}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        first, *others = arriving
        are_typed = all(columns.types is not None for columns in arriving)
        for source, other in zip(self.inputs[1:], others, strict=True):
            if first.complete and other.complete:
                self._check_names(context.operator, first, source, other)
            if are_typed:
                self._check_types(context.operator, first, source, other)
        result = {}
        for name in first.known:
            of_inputs = [columns.known.get(name, ColumnFacts()) for columns in arriving]
            known_types = [column.type for column in of_inputs if column.type]
            kind = known_types[0] if known_types else None
            result[name] = ColumnFacts(kind, merge_sources(of_inputs))
        return Columns(result, first.complete, are_typed)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        flow = merge_flows(context, arriving)
        # Partitions by another hash were chosen by the client of another stream system; several
        # tasks may read one such partition.
        if flow.partitioner != SPARK:
            return flow.lose_partitioning(context.operator)
        return flow

    def came_from(self, name: str, arriving: Columns) -> str | None:
        return name

    def _check_names(self, operator: str, first: Columns, source: str, other: Columns) -> None:
        """Raise PlanningError if the columns `other` of the input `source` differ from those of the
        first input.
        """
        missing = [name for name in first.known if name not in other.known]
        more = [name for name in other.known if name not in first.known]
        if not missing and not more:
            return
        differences = []
        if missing:
            differences.append(f"has no {', '.join(map(repr, missing))}")
        if more:
            differences.append(f"has {', '.join(map(repr, more))}")
        common = [f'"{name}"' for name in first.known if name in other.known]
        selected = ", ".join(common) if common else '"…"'
        differs = f"{source} {' and '.join(differences)}, unlike {self.inputs[0]}"
        problem = f"{operator}: its inputs have different columns: {differs}."
        step = (
            f"Give all of them the same: .select({selected}) of each, or .with_columns(…) for what"
            " is missing."
        )
        differing = [*missing, *more]
        raise PlanningError(problem, step, operator=operator, column=differing[0])

    def _check_types(self, operator: str, first: Columns, source: str, other: Columns) -> None:
        """Raise PlanningError if the input `source` has a column of another type than the first
        one.
        """
        for name, column in first.known.items():
            kind = column.type
            other_kind = other.known[name].type
            if kind is None or other_kind is None:
                continue
            if types_differ(kind, other_kind):
                problem = (
                    f"{operator}: its inputs have different types of {name!r}: {other_kind} in"
                    f" {source}, {kind} in {self.inputs[0]}; equal values of different types hash"
                    " to different partitions."
                )
                common = _common_cast(kind, other_kind)
                where = "one of them" if common in (kind, other_kind) else "both"
                step = f'Cast it in {where}: .with_columns({name}="cast({name} as {common})").'
                raise PlanningError(problem, step, operator=operator, column=name)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        self.check_columns(operator, map(batch.records.columns, frames), batch.planned.app)
        return batch.records.merge(operator, frames)


_NAMED = re.compile(r"\sas\s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartitionBy(PassThroughSpec):
    """An intermediate stream: the records repartitioned by `columns` into `partitions` (None: a
    planned count).
    """

    kind: ClassVar[str] = "partition-by"
    role: ClassVar[Role] = "intermediate"
    works_without_spark: ClassVar[bool] = True
    columns: tuple[str, ...]
    partitions: int | None = None

    def summary(self) -> str:
        return f"by {', '.join(self.columns)}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        next_step = (
            'Name columns that it has; an expression needs a name: partition_by("upper(city) as'
            ' city_key").'
        )
        (columns,) = arriving
        columns.require(context.operator, self.columns, next_step)
        columns.require_simple(context.operator, self.columns, "to partition by")
        return columns

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, self.columns, SPARK)

    def declared_count(self, context: PlanContext) -> DeclaredCount:
        if self.partitions is None:
            return DeclaredCount(None)
        return DeclaredCount(self.partitions, f"partition_by(partitions={self.partitions})")

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        partitions = batch.planned.partitions_at(operator)
        (frame,) = frames
        return batch.records.repartition(frame, partitions, self.columns)


def build_partition_by(after: str, columns: Sequence[str], partitions: int | None) -> PartitionBy:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    what = f"partition_by after {after}"
    names = validate_column_names(what, columns)
    if not names:
        step = "Name the columns to partition by."
        raise ConfigurationError(f"{what} names no column.", step, argument="columns")
    return PartitionBy(names, validate_partition_count(f"{what}: partitions", partitions))


class KeyColumns(NamedTuple):
    """The columns to partition by, and {name: expression} of those to compute first."""

    names: tuple[str, ...]
    computed: dict[str, str]


def parse_key_columns(columns: Sequence[str]) -> KeyColumns:
    """Return the columns to partition by, given as columns or as "expression as name".

    A text without " as " is the name of a column, also if it would be an expression.
    """
    names = []
    computed = {}
    for item in columns:
        name = item
        if _NAMED.search(str(item)):
            expression, alias = split_alias(item)
            if alias is not None:
                name = alias
                computed[name] = expression
        names.append(name)
    return KeyColumns(tuple(names), computed)


@dataclass(frozen=True, slots=True)
class Select(Map):
    """Records with exactly these columns: a map in which every expression has a name."""

    kind: ClassVar[str] = "select"


def build_select(after: str, columns: Sequence[str]) -> Select:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    if not columns:
        problem = f"select after {after} names no column."
        raise ConfigurationError(problem, "Name those to keep.", argument="columns")
    for item in columns:
        expression, alias = split_alias(item)
        has_name = bool(alias or plain_column(expression) or plain_path(expression))
        if not item.strip() or not has_name:
            found = f"select after {after} got {item!r}"
            expected = "a column, a path such as customer.id, or 'expression as name'"
            step = (
                'Give the expression a name, "upper(shop) as shop"; to keep all columns, use'
                " with_columns()."
            )
            raise argument_error(found, expected, step, argument="columns")
    return Select(tuple(columns))


@dataclass(frozen=True, slots=True)
class WithColumns(Spec):
    """Records with their columns and further ones: pairs (name, Spark SQL expression over the
    input's columns).

    An existing column of the same name is replaced in place; the case of names is ignored, as in
    Spark.
    """

    kind: ClassVar[str] = "with-columns"
    needs_tasks: ClassVar[bool] = False
    columns: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        return ", ".join(f"{expression} as {name}" for name, expression in self.columns)

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, expression in self.columns)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        by_lower_name = {name.lower(): (name, column) for name, column in columns.known.items()}
        for name, text in self.columns:
            kind = check_expression(context.operator, text, columns.names, columns.types)
            computed = ColumnFacts(kind, sources_from_sql(text, columns.sources))
            by_lower_name[name.lower()] = (name, computed)
        return replace(columns, known=dict(by_lower_name.values()))

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return flow.rename(context, self._new_name)

    def came_from(self, name: str, arriving: Columns) -> str | None:
        # By new column, the steps to the value that it passes on; () for a computed column.
        passed: dict[str, tuple[str, ...]] = {known: (known,) for known in arriving.known}
        for column, text in self.columns:
            value = _passed_value(text)
            replaced = [known for known in passed if known.lower() == column.lower()]
            for spelling in (column, *replaced):
                passed[spelling] = value
        return _find_source(name, passed)

    def _new_name(self, column: str) -> str | None:
        """Return the name that an input column has after this operator, None if its values are
        replaced.
        """
        for name, expression in self.columns:
            if name.lower() != column.lower():
                continue
            source = plain_column(expression)
            if source is None or source.lower() != column.lower():
                return None
            return name
        return column

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        (columns,) = arriving
        need = expressions_need(self.sql, columns)
        if need:
            return need
        return names_need(dict(self.columns), columns)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        return batch.records.with_columns(frame, self.columns)


def build_with_columns(after: str, columns: Mapping[str, str]) -> WithColumns:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    what = f"with_columns after {after}"
    if not columns:
        expected = 'at least one, such as gross="spent * 1.2"'
        raise argument_error(f"{what} names no column", expected, argument="columns")
    validate_column_names(what, list(columns))
    for name, expression in columns.items():
        if not expression.strip():
            problem = f"{what} got {name}={expression!r}: expected a Spark SQL expression."
            step = f'Write, for example, {name}="spent * 1.2"; a text is {name}="\'text\'".'
            raise ConfigurationError(problem, step, argument=name)
    return WithColumns(tuple(columns.items()))


def _common_cast(one: str, other: str) -> str:
    """Return a type to which both types can be cast: one of them, or else string."""
    if may_cast(other, one):
        return one
    return other if may_cast(one, other) else "string"

"""The operators on records: `Input`, `Broadcast`, `Filter`, `Map`, `Select`, `WithColumns`,
`Merge`, `PartitionBy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dagster_adjunct.orchestration.operators.columns import (
    FINAL,
    ORDINAL,
    TASK,
    DataFrameFunction,
    check_new_names,
    function_label,
    list_hidden_columns,
    ordinal_column,
    plain_column,
    require_columns,
    split_alias,
    validate_column_names,
    validate_partition_count,
)
from dagster_adjunct.orchestration.operators.event_time import EventTime
from dagster_adjunct.orchestration.operators.operator import (
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
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.sql.checking import (
    check_condition,
    check_expression,
    check_expressions,
)
from dagster_adjunct.resources.sql.expression import implies_true, parse_expression, struct_fields
from dagster_adjunct.resources.sql.types import expression_type, types_differ
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext
    from dagster_adjunct.orchestration.step.in_process_batch import ArrowBatch


DefaultOffset = Literal["oldest", "upcoming"]
OnLost = Literal["fail", "oldest"]


@dataclass(frozen=True, slots=True)
class Input(Spec):
    """The records of an input stream; `default_offset` is where reading starts without a
    checkpoint.

    If `broadcast` is given, every task reads all records; it names the column that gets the task's
    number. With an `event_time`, records have hidden columns with their time and with the watermark
    that they are behind, if any.
    """

    kind: ClassVar[str] = "input"
    stream: str
    default_offset: DefaultOffset | None = None
    reset_offset: bool = False
    on_lost: OnLost = "fail"
    broadcast: str | None = None
    event_time: EventTime | None = None

    @property
    def sql(self) -> Sequence[str]:
        return () if self.event_time is None else self.event_time.sql

    @property
    def role(self) -> Role:
        return "input" if self.broadcast is None else "broadcast-input"

    @property
    def reads(self) -> str:
        return self.stream

    def summary(self) -> str:
        return (
            self.stream
            if self.broadcast is None
            else f"{self.stream}, all of it for each {self.broadcast}"
        )

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        facts = require_facts(context.catalog, self.stream, context.operator)
        columns = Columns.of_schema(facts.schema, LineageNode("stream", self.stream))
        if self.event_time is not None:
            self.event_time.check(context.operator, columns.names, columns.types)
        if self.broadcast is None:
            return columns
        return add_task_column(
            context.operator, f"stream {self.stream}", columns, self.broadcast, "input_stream"
        )

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        if self.broadcast is not None:
            return Flow(context.operator, (self.broadcast,), TASK_NUMBER)
        facts = require_facts(context.catalog, self.stream, context.operator)
        return Flow(context.operator, facts.key, facts.partitioner if facts.key else UNKNOWN)

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        # A broadcast input has one partition per task. The number of tasks follows from other
        # streams: see `add_broadcast_counts`.
        facts = require_facts(context.catalog, self.stream, context.operator)
        return facts.partitions if self.broadcast is None else None, "input"

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if not require_facts(context.catalog, self.stream, context.operator).in_arrow:
            return f"reading stream {self.stream}"
        return (
            "event_time="
            if self.event_time is not None
            else "broadcast="
            if self.broadcast is not None
            else ""
        )

    @property
    def needs_tasks(self) -> bool:
        return self.broadcast is not None

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        records = batch.read(self.stream)
        return (
            records
            if self.broadcast is None
            else copy_for_each_task(records, self.broadcast, batch.tasks)
        )


@dataclass(frozen=True, slots=True)
class Broadcast(PassThroughSpec):
    """All records once per task, with the task's number (from 0) in the column `task`."""

    kind: ClassVar[str] = "broadcast"
    role: ClassVar[Role] = "broadcast"
    task: str

    def summary(self) -> str:
        return f"all of it for each {self.task}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return add_task_column(context.operator, "the stream", arriving[0], self.task, "broadcast")

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, (self.task,), TASK_NUMBER)

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        return None, "one for each task"

    @property
    def needs_tasks(self) -> bool:
        return True

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        return copy_for_each_task(frames[0], self.task, batch.tasks)


def add_task_column(operator: str, what: str, columns: Columns, task: str, method: str) -> Columns:
    """Return the columns and `task`, the one for the task's number; raises PlanningError if a
    column has that name.

    `what` has the columns, and `method` is the one that the user called.
    """
    if task.lower() in map(str.lower, columns.names or ()):
        problem = (
            f"{operator}: {what} has a column {task!r}, which is the name of the column for the"
            " task's number."
        )
        step = (
            "Choose another name:"
            f' {method}({"task" if method == "broadcast" else "broadcast"}="task_number").'
        )
        raise PlanningError(problem, step, column=task, operator=operator)
    return columns.add({task: ColumnFacts("int")})


def check_task_column(task: str, found: str, **about: Any) -> None:
    """Raise ConfigurationError unless `task` can name the column for the task's number; `found`
    says what was given.
    """
    if plain_column(task) != task or task.startswith("__"):
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
        *records.columns, F.col(TASK).alias(name), TASK
    )


@dataclass(frozen=True, slots=True)
class Filter(PassThroughSpec):
    """The records that match a Spark SQL condition, or that a DataFrame function returns with
    the same columns.
    """

    kind: ClassVar[str] = "filter"
    condition: str | DataFrameFunction
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return self.condition if isinstance(self.condition, str) else function_label(self.condition)

    @property
    def sql(self) -> Sequence[str]:
        return (self.condition,) if isinstance(self.condition, str) else ()

    @property
    def keeps_only_final(self) -> bool:
        return isinstance(self.condition, str) and implies_true(self.condition, FINAL)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        if isinstance(self.condition, str):
            check_condition(context.operator, self.condition, columns.names, columns.types)
        return columns

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        return (
            flow
            if isinstance(self.condition, str) or self.keeps_partitioning
            else flow.lose(context.operator)
        )

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return (
            expressions_need(self.sql, arriving[0])
            if isinstance(self.condition, str)
            else "a DataFrame function"
        )

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if isinstance(self.condition, str):
            return batch.filter(frame, self.condition)
        passed = batch.call(operator, self.condition, frame)
        _check_columns_unchanged(operator, self.condition, dict(frame.dtypes), dict(passed.dtypes))
        return passed


def _check_columns_unchanged(
    operator: str, function: DataFrameFunction, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Raise PlanningError if a filter's function has changed the columns: later operators rely
    on them.
    """
    name = next((name for name in (*before, *after) if before.get(name) != after.get(name)), None)
    if name is None:
        return
    was, made = before.get(name), after.get(name)
    what = f"changes the type of column {name!r} from {was} to {made}"
    if was is None or made is None:
        what = f"{'adds' if was is None else 'drops'} the column {name!r}"
    problem = f"{operator}: {function_label(function)} {what}: a filter must not change columns."
    step = "Change columns with map(function), and filter after it."
    raise PlanningError(problem, step, operator=operator, column=name)


def build_filter(
    after: str, condition: str | DataFrameFunction, keeps_partitioning: bool
) -> Filter:
    """Return the filter for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    what = f"filter after {after}"
    if callable(condition):
        check_plain_function(what, condition, "condition", "frame")
    elif not condition.strip():
        raise argument_error(
            f"{what} got {condition!r}", "a Spark SQL condition or a function", argument="condition"
        )
    elif keeps_partitioning:
        step = "Leave it out: a condition always keeps the partitioning."
        problem = f"{what} has keeps_partitioning=True with a condition."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Filter(condition, bool(keeps_partitioning))


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """Records whose columns are the Spark SQL `expressions`, or what the DataFrame `function`
    returns.
    """

    kind: ClassVar[str] = "map"
    expressions: tuple[str, ...] = ()
    function: DataFrameFunction | None = None
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return function_label(self.function) if self.function else ", ".join(self.expressions)

    @property
    def needs_tasks(self) -> bool:
        return self.function is not None

    @property
    def sql(self) -> Sequence[str]:
        return self.expressions

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        if self.function is not None:
            return Columns(complete=False)
        names, types, sources = columns.names, columns.types, columns.sources
        result: dict[str, ColumnFacts] = {}
        named: list[str] = []
        made: dict[str, Sources] = {}
        complete = True
        for read, kind in check_expressions(context.operator, self.expressions, names, types):
            name = read.name
            if read.star:
                kept = read.expand_star(columns.known)
                named += kept if columns.complete else ()
                result |= {column: columns.known[column] for column in kept}
                complete = complete and columns.complete
                continue
            if name is None:
                complete = False
                continue
            named.append(name)
            fields = struct_fields(read) if name in (UPDATE, DEFAULT) else ()
            parts = {
                field: ColumnFacts(
                    expression_type(value, types or {}),
                    sources_from_expression(value, sources, made),
                )
                for field, value in fields
            }
            made[name] = () if fields else sources_from_expression(read, sources, made)
            result[name] = ColumnFacts(kind, made[name], parts)
        check_new_names(
            context.operator,
            named,
            "List the columns to keep instead of '*', or choose another name.",
        )
        return Columns(result, complete, columns.typed and columns.complete)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        kept = self._partitioning(flow.partitioned_by)
        return flow.lose(context.operator) if kept is None else replace(flow, partitioned_by=kept)

    def _partitioning(self, partitioned_by: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the names that the partitioning columns have after the map, None if one of them is
        lost.

        A plain name, "dest as faa" and "*" keep a column unchanged.
        """
        if self.function is not None:
            return partitioned_by if self.keeps_partitioning else None
        passed: dict[str, str] = {}
        lost: set[str] = set()
        star = False
        for expression in map(parse_expression, self.expressions):
            if expression.star:
                star = True
                lost |= {name.lower() for name in expression.excepted}
            elif expression.column is not None:
                passed.setdefault(expression.column.lower(), expression.name or expression.column)
            elif expression.alias is not None:
                lost.add(expression.alias.lower())
        names = [
            each if star and each.lower() not in lost else passed.get(each.lower())
            for each in partitioned_by
        ]
        kept = tuple(name for name in names if name is not None)
        return kept if len(kept) == len(partitioned_by) else None

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        if self.function is not None:
            return "a DataFrame function"
        read = [(text, parse_expression(text)) for text in self.expressions]
        need = expressions_need([text for text, each in read if not each.star], arriving[0])
        unnamed = [
            f"the name that Spark gives {text}"
            for text, each in read
            if not each.star and each.name is None
        ]
        need = need or next(iter(unnamed), "")
        return need or names_need((name for _, each in read for name in each.excepted), arriving[0])

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if self.function is not None:
            return batch.call(operator, self.function, frame)
        has_star = any(parse_expression(text).star for text in self.expressions)
        hidden = (
            [] if has_star else [f"`{name}`" for name in list_hidden_columns(batch.names(frame))]
        )
        return batch.select(frame, (*hidden, *self.expressions))


def build_map(
    after: str, expressions: Sequence[str | DataFrameFunction], keeps_partitioning: bool
) -> Map:
    """Return the map for a user's arguments; `after` is the id of the operator before it, for
    errors.
    """
    what = f"map after {after}"
    functions = [item for item in expressions if callable(item)]
    texts = tuple(item for item in expressions if isinstance(item, str))
    if len(functions) == len(expressions) == 1:
        check_plain_function(what, functions[0], "expressions", "frame")
        return Map((), functions[0], keeps_partitioning)
    if not texts or functions or not all(text.strip() for text in texts):
        expected = (
            'Spark SQL expressions, such as "tailnum" and "upper(model) as model", or one function'
        )
        raise argument_error(f"{what} got {expressions!r}", expected, argument="expressions")
    if keeps_partitioning:
        step = "Leave it out: the planner knows the effect of expressions."
        problem = f"{what} has keeps_partitioning=True with expressions."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Map(texts)


@dataclass(frozen=True, slots=True)
class Merge(Spec):
    """The records of all inputs, which have the same columns of the same types; the first input
    gives their order.

    `inputs` are the ids of the input operators.
    """

    kind: ClassVar[str] = "merge"
    inputs: tuple[str, ...]

    @property
    def needs_tasks(self) -> bool:
        return False

    def summary(self) -> str:
        return f"of {', '.join(self.inputs)}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        first, *others = arriving
        typed = all(columns.types is not None for columns in arriving)
        for source, other in zip(self.inputs[1:], others, strict=True):
            if first.complete and other.complete:
                self._check_names(context.operator, tuple(first.known), source, tuple(other.known))
            if typed:
                self._check_types(context.operator, first.known, source, other.known)
        result = {}
        for name in first.known:
            columns = [one.known[name] for one in arriving if name in one.known]
            kind = next((column.type for column in columns if column.type), None)
            result[name] = ColumnFacts(
                kind, merge_sources(columns) if len(columns) == len(arriving) else ()
            )
        return Columns(result, first.complete, typed)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        flow = merge_flows(context, arriving)
        # Partitions by another hash were chosen by the client of another stream system; several
        # tasks may read one.
        return flow if flow.partitioner == SPARK else flow.lose(context.operator)

    def _check_names(
        self, operator: str, first: Sequence[str], source: str, other: Sequence[str]
    ) -> None:
        missing = [name for name in first if name not in other]
        more = [name for name in other if name not in first]
        if not missing and not more:
            return
        lacks = [f"has no {', '.join(map(repr, missing))}"] if missing else []
        has = [f"has {', '.join(map(repr, more))}"] if more else []
        kept = ", ".join(f'"{name}"' for name in first if name in other) or '"…"'
        differs = f"{source} {' and '.join(lacks + has)}, unlike {self.inputs[0]}"
        problem = f"{operator}: its inputs have different columns: {differs}."
        step = (
            f"Give all of them the same: .select({kept}) of each, or .with_columns(…) for what is"
            " missing."
        )
        raise PlanningError(problem, step, operator=operator, column=(missing or more)[0])

    def _check_types(
        self,
        operator: str,
        first: Mapping[str, ColumnFacts],
        source: str,
        other: Mapping[str, ColumnFacts],
    ) -> None:
        for name, column in first.items():
            kind, there = column.type, other[name].type
            if kind is not None and there is not None and types_differ(kind, there):
                problem = (
                    f"{operator}: its inputs have different types of {name!r}: {there} in {source},"
                    f" {kind} in {self.inputs[0]}; equal values of different types hash to"
                    " different partitions."
                )
                step = f'Cast it in one of them: .with_columns({name}="cast({name} as {kind})").'
                raise PlanningError(problem, step, operator=operator, column=name)

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return ""

    def compute(self, operator: str, tables: Sequence[Any], batch: ArrowBatch) -> Any:
        return batch.merge(tables)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        self.check_frames(operator, frames, batch.app)
        by = batch.required_partitioning(operator)
        first, *others = frames
        if by:
            # If all inputs are partitioned alike, Spark unions partition by partition. To find out,
            # it compares the names that the columns have in files; an alias with metadata makes it
            # compare the current names.
            first = first.withColumns(
                {name: named_column(name).alias(name, metadata={"merged": 1}) for name in by}
            )
        # Hidden columns that only some inputs have are null for the others.
        merged = reduce(
            lambda left, right: left.unionByName(right, allowMissingColumns=True), others, first
        )
        if not by:
            return merged
        partitions = batch.partitions_at(operator)
        if partitions == 1:
            return merged.coalesce(1)
        # Spark omits this exchange if it knows that the records are partitioned so.
        return merged.repartition(partitions, *map(named_column, by))


_NAMED = re.compile(r"\sas\s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartitionBy(PassThroughSpec):
    """An intermediate stream: the records repartitioned by `columns` into `partitions` (None: a
    planned count).
    """

    kind: ClassVar[str] = "partition-by"
    role: ClassVar[Role] = "intermediate"
    columns: tuple[str, ...]
    partitions: int | None = None

    def summary(self) -> str:
        return f"by {', '.join(self.columns)}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        next_step = (
            'Name columns that it has; an expression needs a name: partition_by("upper(city) as'
            ' city_key").'
        )
        require_columns(context.operator, "the stream", self.columns, arriving[0].names, next_step)
        return arriving[0]

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, self.columns, SPARK)

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        return (
            self.partitions,
            "" if self.partitions is None else f"partition_by(partitions={self.partitions})",
        )

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return ""

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        return batch.repartition(frames[0], batch.partitions_at(operator), self.columns)


def build_partition_by(after: str, columns: Sequence[str], partitions: int | None) -> PartitionBy:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    what = f"partition_by after {after}"
    names = validate_column_names(what, columns)
    if not names:
        raise ConfigurationError(
            f"{what} names no column.", "Name the columns to partition by.", argument="columns"
        )
    return PartitionBy(names, validate_partition_count(f"{what}: partitions", partitions))


def parse_key_columns(columns: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the columns to partition by, and {name: expression} of those to
    compute first.
    """
    # A column may be called "loud name": only "as" names an expression here.
    split = [split_alias(item) if _NAMED.search(str(item)) else (item, None) for item in columns]
    computed = {alias: what for what, alias in split if alias is not None}
    return tuple(alias or item for item, (_, alias) in zip(columns, split, strict=True)), computed


@dataclass(frozen=True, slots=True)
class Select(Map):
    """Records with exactly these columns: a map in which every expression has a name."""

    kind: ClassVar[str] = "select"


def build_select(after: str, columns: Sequence[str]) -> Select:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    if not columns:
        raise ConfigurationError(
            f"select after {after} names no column.", "Name those to keep.", argument="columns"
        )
    for item in columns:
        what, name = split_alias(item)
        if not item.strip() or (name is None and plain_column(what) is None):
            raise ConfigurationError(
                f"select after {after} got {item!r}: expected a column, 'column as name', or"
                " 'expression as name'.",
                'Give the expression a name, "upper(shop) as shop"; to keep all columns, use'
                " with_columns().",
                argument="columns",
            )
    return Select(tuple(columns))


@dataclass(frozen=True, slots=True)
class WithColumns(Spec):
    """Records with their columns and further ones: pairs (name, Spark SQL expression over the
    input's columns).

    An existing column of the same name is replaced in place; the case of names is ignored, as in
    Spark.
    """

    kind: ClassVar[str] = "with-columns"
    columns: tuple[tuple[str, str], ...]

    @property
    def needs_tasks(self) -> bool:
        return False

    def summary(self) -> str:
        return ", ".join(f"{expression} as {name}" for name, expression in self.columns)

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, expression in self.columns)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        names, types, sources = columns.names, columns.types, columns.sources
        given = {}
        for name, text in self.columns:
            kind = check_expression(context.operator, text, names, types)
            given[name.lower()] = name, ColumnFacts(kind, sources_from_sql(text, sources))
        placed = {name.lower(): (name, column) for name, column in columns.known.items()} | given
        return replace(columns, known=dict(placed.values()))

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        kept = tuple(filter(None, map(self._kept, flow.partitioned_by)))
        if len(kept) == len(flow.partitioned_by):
            return replace(flow, partitioned_by=kept)
        return flow.lose(context.operator)

    def _kept(self, column: str) -> str | None:
        """Return the name that an input column has after this operator, None if its values are
        replaced.
        """
        for name, expression in self.columns:
            if name.lower() == column.lower():
                return name if (plain_column(expression) or "").lower() == column.lower() else None
        return column

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return expressions_need(self.sql, arriving[0]) or names_need(
            (name for name, _ in self.columns), arriving[0]
        )

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        return batch.with_columns(frames[0], self.columns)


def build_with_columns(after: str, columns: Mapping[str, str]) -> WithColumns:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    what = f"with_columns after {after}"
    if not columns:
        raise argument_error(
            f"{what} names no column",
            'at least one, such as gross="spent * 1.2"',
            argument="columns",
        )
    validate_column_names(what, list(columns))
    for name, expression in columns.items():
        if not expression.strip():
            problem = f"{what} got {name}={expression!r}: expected a Spark SQL expression."
            step = f'Write, for example, {name}="spent * 1.2"; a text is {name}="\'text\'".'
            raise ConfigurationError(problem, step, argument=name)
    return WithColumns(tuple(columns.items()))

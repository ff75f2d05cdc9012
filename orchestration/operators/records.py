"""The operators on records: `Filter`, `Map`, `Select`, `WithColumns`, `Merge` and `PartitionBy`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns import (
    FINAL,
    Columns,
    DataFrameFunction,
    Types,
    check_new_names,
    function_label,
    list_hidden_columns,
    plain_column,
    require_columns,
    split_alias,
    validate_column_names,
    validate_partition_count,
)
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    PassThroughSpec,
    PlanContext,
    Role,
    Spec,
    StreamEdge,
    merge_flows,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    UNKNOWN,
    ColumnSources,
    LineageContext,
    add_sources,
    sources_from_expression,
    sources_from_sql,
)
from dagster_adjunct.resources.common import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.sql.checking import check_condition, check_expression, check_expressions
from dagster_adjunct.resources.sql.parser import implies_true, parse_expression, struct_fields
from dagster_adjunct.resources.sql.types import expression_type, types_differ
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext


@dataclass(frozen=True, slots=True)
class Filter(PassThroughSpec):
    """The records that match a Spark SQL condition, or that a DataFrame function returns with the same columns."""

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

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if isinstance(self.condition, str):
            check_condition(context.operator, self.condition, flow.columns)
        if isinstance(self.condition, str) or self.keeps_partitioning or not flow.partitioned_by:
            return flow
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or not isinstance(self.condition, str):
            return types
        check_condition(context.operator, self.condition, tuple(types), types)
        return types

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if isinstance(self.condition, str):
            return frame.filter(self.condition)
        passed = batch.call(operator, self.condition, frame)
        _check_columns_unchanged(operator, self.condition, dict(frame.dtypes), dict(passed.dtypes))
        return passed


def _check_columns_unchanged(
    operator: str, function: DataFrameFunction, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Raise PlanningError if a filter's function has changed the columns, with which later operators are planned."""
    name = next((name for name in (*before, *after) if before.get(name) != after.get(name)), None)
    if name is None:
        return
    was, made = before.get(name), after.get(name)
    what = f"makes the column {name!r}, which is {was}, {made}"
    if was is None or made is None:
        what = f"{'adds' if was is None else 'drops'} the column {name!r}"
    problem = f"{operator}: {function_label(function)} {what}: a filter must not change columns."
    step = "Change columns with map(function), and filter after it."
    raise PlanningError(problem, step, operator=operator, column=name)


def build_filter(after: str, condition: str | DataFrameFunction, keeps_partitioning: bool) -> Filter:
    """Return the filter for a user's arguments, after the operator `after`."""
    what = f"filter after {after}"
    if callable(condition):
        check_plain_function(what, condition, "condition", "frame")
    elif not condition.strip():
        raise argument_error(f"{what} got {condition!r}", "a Spark SQL condition or a function", argument="condition")
    elif keeps_partitioning:
        step = "Leave it out: a condition always keeps the partitioning."
        problem = f"{what} has keeps_partitioning=True with a condition."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Filter(condition, bool(keeps_partitioning))


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """Records with other columns: either Spark SQL `expressions`, or one DataFrame `function`."""

    kind: ClassVar[str] = "map"
    expressions: tuple[str, ...] = ()
    function: DataFrameFunction | None = None
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return function_label(self.function) if self.function else ", ".join(self.expressions)

    @property
    def sql(self) -> Sequence[str]:
        return self.expressions

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        kept = self._partitioning(flow.partitioned_by)
        flow = replace(flow, columns=self._columns(context.operator, flow.columns))
        if kept == flow.partitioned_by or not flow.partitioned_by:
            return flow
        if kept is not None:
            return replace(flow, partitioned_by=kept)
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _columns(self, operator: str, columns: Columns) -> Columns:
        """Return the columns after it; None if one has no known name."""
        if self.function is not None:
            return None
        result: list[str | None] = []
        for item in check_expressions(operator, self.expressions, columns):
            star = (None,) if columns is None else item.expand_star(columns)
            result += star if item.expression.star else [item.expression.name]
        named = [name for name in result if name is not None]
        check_new_names(operator, named, "List the columns to keep instead of '*', or choose another name.")
        return tuple(named) if len(named) == len(result) else None

    def _partitioning(self, partitioned_by: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the names of the partitioning columns after it, None if one is lost.

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
        names = [each if star and each.lower() not in lost else passed.get(each.lower()) for each in partitioned_by]
        kept = tuple(name for name in names if name is not None)
        return kept if len(kept) == len(partitioned_by) else None

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or self.function is not None:
            return None
        result: dict[str, str | None] = {}
        for item in check_expressions(context.operator, self.expressions, tuple(types), types):
            name = item.expression.name
            if item.expression.star:
                result |= {column: types[column] for column in item.expand_star(tuple(types))}
                continue
            if name is None:
                return None
            result[name] = item.type
            if name in (UPDATE, DEFAULT):
                fields = struct_fields(item.expression)
                result |= {f"{name}.{field}": expression_type(value, types) for field, value in fields}
        return result

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        (columns,) = arriving
        result: ColumnSources = {}
        named: ColumnSources = {}
        for expression in map(parse_expression, self.expressions):
            if expression.star:
                excepted = {name.lower() for name in expression.excepted}
                result |= {name: sources for name, sources in columns.items() if name.lower() not in excepted}
                continue
            fields = struct_fields(expression) if expression.name in (UPDATE, DEFAULT) else ()
            for name, value in fields:
                result[f"{expression.name}.{name}"] = sources_from_expression(value, columns, named)
            if expression.name is not None and not fields:
                result[expression.name] = sources_from_expression(expression, columns, named)
                named[expression.name] = result[expression.name]
        return result

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if self.function is not None:
            return batch.call(operator, self.function, frame)
        has_star = any(parse_expression(text).star for text in self.expressions)
        hidden = [] if has_star else [f"`{name}`" for name in list_hidden_columns(frame)]
        return frame.selectExpr(*hidden, *self.expressions)


def build_map(after: str, expressions: Sequence[str | DataFrameFunction], keeps_partitioning: bool) -> Map:
    """Return the map for a user's arguments, after the operator `after`."""
    what = f"map after {after}"
    functions = [item for item in expressions if callable(item)]
    texts = tuple(item for item in expressions if isinstance(item, str))
    if len(functions) == len(expressions) == 1:
        check_plain_function(what, functions[0], "expressions", "frame")
        return Map((), functions[0], keeps_partitioning)
    if not texts or functions or not all(text.strip() for text in texts):
        expected = 'Spark SQL expressions, such as "tailnum" and "upper(model) as model", or one function'
        raise argument_error(f"{what} got {expressions!r}", expected, argument="expressions")
    if keeps_partitioning:
        step = "Leave it out: the planner knows the effect of expressions."
        problem = f"{what} has keeps_partitioning=True with expressions."
        raise ConfigurationError(problem, step, argument="keeps_partitioning")
    return Map(texts)


@dataclass(frozen=True, slots=True)
class Merge(Spec):
    """The records of all inputs, which have the same columns of the same types, in the order of the first input.

    `inputs` are the ids of the input operators.
    """

    kind: ClassVar[str] = "merge"
    inputs: tuple[str, ...]

    def summary(self) -> str:
        return f"of {', '.join(self.inputs)}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        first, *others = arriving
        for source, other in zip(self.inputs[1:], others, strict=True):
            if first.columns is not None and other.columns is not None:
                self._check_names(context.operator, first.columns, source, other.columns)
        flow = merge_flows(context, arriving)
        if flow.partitioner == SPARK or not flow.partitioned_by:
            return flow
        # Another system's client chose the partitions, and several tasks may read one of them.
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _check_names(self, operator: str, first: Sequence[str], source: str, other: Sequence[str]) -> None:
        missing = [name for name in first if name not in other]
        more = [name for name in other if name not in first]
        if not missing and not more:
            return
        lacks = [f"has no {', '.join(map(repr, missing))}"] if missing else []
        has = [f"has {', '.join(map(repr, more))}"] if more else []
        kept = ", ".join(f'"{name}"' for name in first if name in other) or '"…"'
        differs = f"{source} {' and '.join(lacks + has)}, unlike {self.inputs[0]}"
        problem = f"{operator}: its inputs have different columns: {differs}."
        step = f"Give all of them the same: .select({kept}) of each, or .with_columns(…) for what is missing."
        raise PlanningError(problem, step, operator=operator, column=(missing or more)[0])

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        known = [(source, types) for source, types in zip(self.inputs, arriving, strict=True) if types is not None]
        if len(known) < len(self.inputs):
            return None
        for source, types in known[1:]:
            self._check_types(context.operator, known[0][1], source, types)
        return {name: next((types[name] for _, types in known if types.get(name)), None) for name in known[0][1]}

    def _check_types(
        self, operator: str, first: Mapping[str, str | None], source: str, other: Mapping[str, str | None]
    ) -> None:
        for name, kind in first.items():
            there = other.get(name)
            if kind is not None and there is not None and types_differ(kind, there):
                problem = (
                    f"{operator}: its inputs have different types of {name!r}: {there} in {source}, {kind} in "
                    f"{self.inputs[0]}; equal values of different types hash to different partitions."
                )
                step = f'Cast it in one of them: .with_columns({name}="cast({name} as {kind})").'
                raise PlanningError(problem, step, operator=operator, column=name)

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        result: ColumnSources = {}
        for made in arriving:
            for name, sources in made.items():
                add_sources(result, name, sources)
        return {name: sources for name, sources in result.items() if all(name in made for made in arriving)}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        own = [{name: kind for name, kind in frame.dtypes if not name.startswith("__")} for frame in frames]
        for source, types in zip(self.inputs[1:], own[1:], strict=True):
            self._check_names(operator, tuple(own[0]), source, tuple(types))
            self._check_types(operator, own[0], source, types)
        by = batch.required_partitioning(operator)
        first, *others = frames
        if by:
            # Spark unions partition by partition if all inputs are partitioned alike. It compares the columns' names in
            # their files, unless an alias with metadata makes them new columns.
            first = first.withColumns({name: named_column(name).alias(name, metadata={"merged": 1}) for name in by})
        # Hidden columns that only some inputs have are null for the others.
        merged = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), others, first)
        if not by:
            return merged
        partitions = batch.partitions_at(operator)
        if partitions == 1:
            return merged.coalesce(1)
        # Spark omits this exchange if it knows the partitioning.
        return merged.repartition(partitions, *map(named_column, by))


def build_merge(after: str, others: Sequence[str]) -> Merge:
    """Return the merge of the operator `after` and these others."""
    return Merge((after, *others))


_NAMED = re.compile(r"\sas\s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartitionBy(PassThroughSpec):
    """An intermediate stream: the records repartitioned by `columns`; the count is inferred if None."""

    kind: ClassVar[str] = "partition-by"
    role: ClassVar[Role] = "intermediate"
    stream: str
    columns: tuple[str, ...]
    partitions: int | None = None

    def summary(self) -> str:
        return f"by {', '.join(self.columns)}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        next_step = 'Name columns that it has; an expression needs a name: partition_by("upper(city) as city_key").'
        require_columns(context.operator, "the stream", self.columns, flow.columns, next_step)
        return Flow(context.operator, flow.columns, self.columns, SPARK)

    def declared_partitions(self, context: PlanContext) -> int | None:
        return self.partitions

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        declared = "" if self.partitions is None else f"partition_by(partitions={self.partitions})"
        return StreamEdge(self.stream, self.role, partitions, self.columns, SPARK, declared, context.operator)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        partitions = batch.partitions_at(operator)
        return batch.gather_small(frames[0]).repartition(partitions, *map(named_column, self.columns))


def build_partition_by(after: str, stream: str, columns: Sequence[str], partitions: int | None) -> PartitionBy:
    """Return the intermediate stream of this name for a user's arguments, after the operator `after`."""
    what = f"partition_by after {after}"
    names = validate_column_names(what, columns)
    if not names:
        raise ConfigurationError(f"{what} names no column.", "Name the columns to partition by.", argument="columns")
    return PartitionBy(stream, names, validate_partition_count(f"{what}: partitions", partitions))


def parse_key_columns(columns: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the columns to partition by, and the expressions of those to compute first."""
    # A column may be called "loud name": only "as" names an expression here.
    split = [split_alias(item) if _NAMED.search(str(item)) else (item, None) for item in columns]
    computed = {alias: what for what, alias in split if alias is not None}
    return tuple(alias or item for item, (_, alias) in zip(columns, split, strict=True)), computed


@dataclass(frozen=True, slots=True)
class Select(Map):
    """Records with exactly these columns: a map in which every expression has a name."""

    kind: ClassVar[str] = "select"


def build_select(after: str, columns: Sequence[str]) -> Select:
    """Return the selection for a user's arguments, after the operator `after`."""
    if not columns:
        raise ConfigurationError(f"select after {after} names no column.", "Name those to keep.", argument="columns")
    for item in columns:
        what, name = split_alias(item)
        if not item.strip() or (name is None and plain_column(what) is None):
            raise ConfigurationError(
                f"select after {after} got {item!r}: expected a column, 'column as name', or 'expression as name'.",
                'Give the expression a name, "upper(shop) as shop"; to keep all columns, use with_columns().',
                argument="columns",
            )
    return Select(tuple(columns))


@dataclass(frozen=True, slots=True)
class WithColumns(Spec):
    """All columns, and these: pairs (name, Spark SQL expression over the input's columns).

    An existing column of the name is replaced in place; names ignore case, as in Spark.
    """

    kind: ClassVar[str] = "with-columns"
    columns: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        return ", ".join(f"{expression} as {name}" for name, expression in self.columns)

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, expression in self.columns)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        for _, expression in self.columns:
            check_expression(context.operator, expression, flow.columns)
        moved = replace(flow, columns=self._columns(flow.columns))
        kept = tuple(filter(None, map(self._kept, flow.partitioned_by)))
        if len(kept) == len(flow.partitioned_by):
            return replace(moved, partitioned_by=kept)
        return replace(moved, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _columns(self, columns: Columns) -> Columns:
        if columns is None:
            return None
        given = {name.lower(): name for name, _ in self.columns}
        there = set(map(str.lower, columns))
        added = (name for name, _ in self.columns if name.lower() not in there)
        kept = columns if there.isdisjoint(given) else tuple(given.get(name.lower(), name) for name in columns)
        return (*kept, *added)

    def _kept(self, column: str) -> str | None:
        """Return the name of a column after it, None if another one replaces it."""
        for name, expression in self.columns:
            if name.lower() == column.lower():
                return name if (plain_column(expression) or "").lower() == column.lower() else None
        return column

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None:
            return None
        names = tuple(types)
        known = {name: check_expression(context.operator, text, names, types) for name, text in self.columns}
        columns = self._columns(tuple(types)) or ()
        if columns[: len(types)] == tuple(types):  # no replaced name changes its case
            return types | known
        return {name: types.get(name) for name in columns} | known

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        (made,) = arriving
        given = {name: sources_from_sql(expression, made) for name, expression in self.columns}
        replaced = {name.lower() for name in given}
        kept = {name: sources for name, sources in made.items() if name.lower() not in replaced}
        return kept | {name: sources for name, sources in given.items() if sources}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        return frames[0].withColumns({name: F.expr(expression) for name, expression in self.columns})


def build_with_columns(after: str, columns: Mapping[str, str]) -> WithColumns:
    """Return the columns for a user's arguments, after the operator `after`."""
    what = f"with_columns after {after}"
    if not columns:
        raise argument_error(f"{what} names no column", 'at least one, such as gross="spent * 1.2"', argument="columns")
    validate_column_names(what, list(columns))
    for name, expression in columns.items():
        if not expression.strip():
            problem = f"{what} got {name}={expression!r}: expected a Spark SQL expression."
            step = f'Write, for example, {name}="spent * 1.2"; a text is {name}="\'text\'".'
            raise ConfigurationError(problem, step, argument=name)
    return WithColumns(tuple(columns.items()))

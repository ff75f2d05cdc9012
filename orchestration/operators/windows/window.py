"""`Window`, the operator that aggregates the records of each key in windows of their event time.

The kinds of windows (`Tumbling`, `Sliding`, `Session`) are declared in `kinds.py`, the aggregates
in `aggregates.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.local_table import StateSpec
from dagster_adjunct.orchestration.operators.batch import SparkBatch
from dagster_adjunct.orchestration.operators.columns import (
    EXPIRES,
    FINAL,
    RECORD,
    check_duration,
    check_new_names,
    check_state_columns,
    check_state_names,
    find_taken,
    is_own,
    validate_column_names,
    validate_partition_by,
)
from dagster_adjunct.orchestration.operators.made_records import (
    EXCLUSION,
    exclusion_conditions,
    make_records,
    stored_position_key,
    to_json_object,
    to_late_records,
)
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    PassThroughSpec,
    PlanContext,
    Requirement,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnFacts,
    Columns,
    DeclaredApplication,
    merge_sources,
)
from dagster_adjunct.orchestration.operators.windows.aggregates import (
    WIDEST,
    Aggregate,
    Aggregation,
    ExactSum,
    exact_column,
)
from dagster_adjunct.orchestration.operators.windows.assignment import (
    ABSORBED,
    CLOSING,
    END,
    LEFT_OUT,
    PARTLY_LATE,
    RECORDS,
    START,
    TOUCHED,
    Windows,
    assign_sessions,
    build_session_runs,
    call_window_functions,
    classify_window_records,
    is_of_other_rules,
    merge_records,
    merge_sessions,
    prepare_records,
    select_window_records,
    stored_record_schema,
    union_sessions,
    update_fixed_windows,
)
from dagster_adjunct.orchestration.operators.windows.kinds import (
    Kind,
    Session,
    Tumbling,
    max_duration_after,
)
from dagster_adjunct.orchestration.operators.windows.zone_rules import describe_rules
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, OperatorFailedError, PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.paths import column_of, flat_name, value_name
from dagster_adjunct.resources.schemas.schema import named_column, value_column
from dagster_adjunct.resources.schemas.types import is_nested, is_storable, types_from_spark
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.user_code import MASKED, MAX_VALUE_CHARS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


Results: TypeAlias = Literal["final", "updates"]


def make_results(
    rows: DataFrame, windows: Windows, results: Results, operator: str, sensitive: Collection[str]
) -> DataFrame:
    """Return the results of a batch, with the column TOMBSTONE, given the windows' rows.

    With `results` "final", they are the windows that the batch closes. With "updates", they are all
    `rows`, with the column FINAL, and a tombstone for each session that was merged into another
    one. A sum that the type of the result can't hold fails the batch that closes the window. In
    earlier updates the sum is null then, because later records may reduce it.
    """
    values = [F.col(START), F.col(END)]
    computed = {}
    for name, aggregate in windows.aggregates:
        kind = windows.type_of(aggregate)
        exact = aggregate.exact(name, kind)
        if exact is None:
            value = F.expr(aggregate.result(name, kind))
        else:
            computed[exact_column(name)] = F.expr(exact)
            value = _check_range(name, aggregate, windows, operator, sensitive)
        values.append(value.alias(name))
    if computed:  # each analysed once, as columns
        rows = rows.withColumns(computed)
    if results == "final":
        return rows.filter(CLOSING).select(*windows.keys, *values, F.lit(False).alias(TOMBSTONE))
    return _add_retractions(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def _check_range(
    name: str, aggregate: Aggregation, windows: Windows, operator: str, sensitive: Collection[str]
) -> Column:
    """Return the value of an aggregate, which fails the batch if the window closes and its exact
    value does not fit the type.
    """
    kind = windows.type_of(aggregate)
    returns = str(aggregate.result_type(kind))
    value = F.expr(aggregate.result(name, kind))
    exact = named_column(exact_column(name))
    source, *_ = aggregate.columns
    total = _shown(windows, source, exact, sensitive)
    words: list[object] = [f"{operator}: {aggregate.describe()} as {name} is ", total]
    words += [f", which is no {returns}: in the window from ", F.col(START).cast("string")]
    words += [" to ", F.col(END).cast("string"), " UTC of "]
    separator = ""
    for key in windows.by:
        words += [f"{separator}{key} = ", _shown(windows, key, named_column(key), sensitive)]
        separator = ", "
    problem = F.concat(*map(F.lit, words), F.lit("."))
    step = _suggest_wider_type(aggregate, kind)
    failure = raise_error_column(OperatorFailedError, problem, step, operator=operator)
    too_large = F.col(CLOSING) & value.isNull() & exact.isNotNull()
    return F.when(too_large, failure.cast(returns)).otherwise(value)


def _shown(windows: Windows, source: str, value: Column, sensitive: Collection[str]) -> Column:
    """Return a value of the column `source`, or in it, as an error shows it: masked if the column
    is sensitive, else cut off.
    """
    if find_taken((column_of(source, windows.own),), sensitive):
        return F.lit(MASKED)
    return F.substring(value.cast("string"), 1, MAX_VALUE_CHARS)


def _suggest_wider_type(aggregate: Aggregation, kind: str) -> str:
    """Return the next step for a sum or mean of a column of the type `kind` that its type can't
    hold: a wider type, or another application.

    With a wider type, the next run continues the stored sum only if that type's sums are stored in
    the same way.
    """
    column, *_ = aggregate.columns
    flat = flat_name(column)
    stored = ExactSum("", kind)
    if stored.wider is not None:
        return (
            "Nothing is lost: the sum is stored exactly. Sum a wider type,"
            f' .with_columns({flat}="cast({column} as {stored.wider})") before the window, and the'
            " next run continues with it."
        )
    scale = stored.scale
    if not scale:
        fewer = ""
    else:
        fewer = (
            f', or, with fewer digits after the point, "cast({column} as decimal(38,{scale // 2}))"'
        )
    return (
        f"No decimal with {scale} digits after the point can hold it, and the stored sum has as"
        f' many. Sum doubles, which are rounded: .with_columns({flat}="cast({column} as'
        f' double)") before the window{fewer}. Do that in an application with another name and its'
        " own outputs: it fills its windows from the oldest records on."
    )


def select_open_windows(rows: DataFrame, windows: Windows) -> DataFrame:
    """Return what is written to the state table: changed rows of open windows, and tombstones of
    absorbed sessions.
    """
    values = [named_column(name) for name in windows.schema.names if name not in windows.by]
    still_open = rows.filter(TOUCHED).filter(f"not {CLOSING}")
    return _add_retractions(still_open, windows, values, (START, EXPIRES))


def _add_retractions(
    rows: DataFrame, windows: Windows, values: Sequence[Column], known: Sequence[str]
) -> DataFrame:
    """Return the key and `values` of each row, and a tombstone for each session that the row's
    session has absorbed.

    A tombstone has the key and the columns `known`; others are null. Both come from one exploded
    list per row, so that Spark still knows the partitioning; after a union it would not.
    """
    key = windows.keys
    if not isinstance(windows.kind, Session):
        return rows.select(*key, *values, F.lit(False).alias(TOMBSTONE))
    selected = rows.select(*key, *values, ABSORBED)
    fields = selected.schema.fields[len(key) : -1]
    own = [named_column(field.name) for field in fields]
    own_row = F.struct(*own, F.lit(False).alias(TOMBSTONE))

    def tombstone(absorbed: Column) -> Column:
        """Return the tombstone of an absorbed session."""
        parts = []
        for field in fields:
            if field.name in known:
                part = absorbed.getField(field.name)
            else:
                part = F.lit(None).cast(field.dataType)
            parts.append(part.alias(field.name))
        return F.struct(*parts, F.lit(True).alias(TOMBSTONE))

    tombstones = F.transform(ABSORBED, tombstone)
    return selected.select(*key, F.inline(F.concat(F.array(own_row), tombstones)))


@dataclass(frozen=True, slots=True)
class Window(PassThroughSpec):
    """The aggregates of records in `windows` of their event time, for each value of the columns
    `by`.

    With `results` "final", each window is emitted once, when the watermark has passed its end and
    `allowed_lateness`; with "updates", also whenever a batch has changed it, with the column FINAL.
    Rows are stored in the state table `name`, partitioned by `partition_by`, some of the columns
    `by`.
    """

    kind: ClassVar[str] = "window"
    takes_partition_by: ClassVar[bool] = True
    diverts: ClassVar[str] = "late_records"
    assigns_positions: ClassVar[bool] = True
    name: str
    windows: Kind
    by: tuple[str, ...]
    partition_by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregation], ...]
    results: Results
    allowed_lateness: timedelta

    def summary(self) -> str:
        made = ", ".join(f"{aggregate.describe()} as {name}" for name, aggregate in self.aggregates)
        late = ""
        if self.allowed_lateness:
            late = f", {self.allowed_lateness} late"
        return f"{self.windows.describe()} by {', '.join(self.by)}: {made}; {self.results}{late}"

    @property
    def states(self) -> Sequence[str]:
        if self._has_functions:
            return (self.name, f"{self.name}-records")
        return (self.name,)

    def ordered_by(self, arriving: Sequence[Columns]) -> Sequence[str]:
        (columns,) = arriving
        by = [value_name(name, columns.known) for name in self.by]
        if self.emits_updates:
            # An update of an earlier window may come after the results of a later one.
            return [*by, START]
        return by

    @property
    def zones(self) -> Sequence[str]:
        if isinstance(self.windows, Tumbling) and self.windows.zone is not None:
            return (self.windows.zone,)
        return ()

    @property
    def watermark_delay(self) -> timedelta:
        return self.allowed_lateness

    @property
    def max_result_delay(self) -> timedelta:
        return max_duration_after(self.windows)

    @property
    def record_retention(self) -> timedelta:
        return max_duration_after(self.windows) + self.allowed_lateness

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def emits_updates(self) -> bool:
        return self.results == "updates"

    @property
    def moves(self) -> int:
        # One each for the rows of changed windows, the values of functions, and the records of
        # sessions.
        if not self._has_functions:
            return 1
        if isinstance(self.windows, Session):
            return 3
        return 2

    @property
    def _has_functions(self) -> bool:
        """Whether users' functions are among the aggregates."""
        return any(isinstance(aggregate, Aggregate) for _, aggregate in self.aggregates)

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        return (Requirement(None, None, self.partition_by),)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        operator = context.operator
        columns.require(operator, self.by, "Correct by=.")
        columns.require_simple(operator, self.by, "in by=")
        result_columns = []
        for name in self.by:
            key_column = columns.find(name) or ColumnFacts()
            result_columns.append((value_name(name, columns.known), key_column))
        for name in (START, END):
            result_columns.append((name, ColumnFacts("timestamp")))
        for name, aggregate in self.aggregates:
            columns.require(operator, aggregate.columns, f"Correct the aggregate {name!r}.")
            argument_names = [value_name(column, columns.known) for column in aggregate.columns]
            check_new_names(
                operator, argument_names, f"Rename one before, or leave it out of {name!r}."
            )
            result_columns.append((name, _derive_result(aggregate, columns)))
        if self.emits_updates:
            result_columns.append((FINAL, ColumnFacts("boolean")))
        step = "Rename the column before, or the aggregate."
        check_new_names(operator, [name for name, _ in result_columns], step)
        if columns.types is not None:
            self._check_types(operator, columns)
        return Columns(dict(result_columns), typed=columns.types is not None)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        (columns,) = context.columns
        by = tuple(value_name(name, columns.known) for name in flow.partitioned_by)
        return replace(flow, partitioned_by=by)

    def _check_types(self, operator: str, columns: Columns) -> None:
        """Raise PlanningError for columns that can't be aggregated or stored; unknown types are
        not checked.
        """
        partials = [RECORDS]
        aggregated: list[str] = []
        stored: Iterable[str] = ()  # the columns of records that are stored for functions
        for name, aggregate in self.aggregates:
            aggregated += aggregate.columns
            for kind in ("", WIDEST):  # together they have the names of the partials of all types
                partials += [partial.name for partial in aggregate.partials(name, kind)]
            if isinstance(aggregate, Aggregate) and not aggregate.of:
                stored = columns.known
        check_state_names(operator, self.by, partials)
        check_state_names(operator, aggregated)
        check_state_columns(operator, columns.type_of, stored, self.by)
        for name, aggregate in self.aggregates:
            for column in aggregate.columns:
                _check_aggregated(operator, name, aggregate, column, columns.type_of(column))

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        """Store what the batch changes in windows; return the results that it has to emit.

        Raises an error if stored windows are of other rules of their zone than the present ones.
        """
        (frame,) = frames
        self.check_columns(operator, [batch.records.columns(frame)], batch.planned.app)
        sensitive = batch.planned.sensitive(operator, frame.columns)
        paths = self._find_paths(frame.columns)
        frame = frame.withColumns({name: value_column(frame.columns, name) for name in paths})
        types = types_from_spark(frame.schema)
        windows = Windows(
            kind=self.windows,
            by=self.by,
            aggregates=self.aggregates,
            lateness=self.allowed_lateness,
            types={name: kind for name, kind in types.items() if is_own(name)},
            paths=paths,
        )
        partitions = batch.planned.partitions_at(operator)
        counted = self._select_counting(operator, frame, windows, batch)
        key = (*self.by, START)
        spec = StateSpec(
            schema=windows.schema,
            key=key,
            partition_by=self.partition_by,
            partitions=partitions,
            expires=EXPIRES,
            kept_for=self.summary() + windows.units,
            zone_rules="".join(map(describe_rules, self.zones)),
        )
        state = batch.state.table(self.name, spec)
        for zone in self.zones:
            batch.state.check_zone_rules(self.name, zone, is_of_other_rules(windows))
        rows = self._update_rows(operator, state.frame(), counted, windows, batch)
        rows = batch.records.materialize(operator, rows)
        state.write(select_open_windows(rows, windows), partitioned=True)
        if windows.functions:
            rows = self._call_functions(operator, rows, counted, windows, batch)
        results = make_results(rows, windows, self.results, operator, sensitive)
        # The event time of a window's result is the last microsecond of the window; a tombstone has
        # no END.
        last = F.timestamp_micros(F.unix_micros(F.coalesce(END, START)) - 1)
        records = make_records(
            results,
            batch.planned,
            by=self.partition_by,
            partitions=partitions,
            ordinal=to_json_object([named_column(name) for name in key]),
            event_time=last,
        )
        return records.withColumnsRenamed(paths)

    def _find_paths(self, names: Collection[str]) -> dict[str, str]:
        """Return the paths in `by` and the aggregates, each with the name of a column for the
        value; `names` are those of the records' columns.
        """
        columns_and_paths = list(self.by)
        for _, aggregate in self.aggregates:
            columns_and_paths += aggregate.columns
        paths = {}
        for named in columns_and_paths:
            column = value_name(named, names)
            if column != named:
                paths[named] = column
        return paths

    def _repartition(self, frame: DataFrame, partitions: int) -> DataFrame:
        """Return the records or rows partitioned by `partition_by`."""
        return frame.repartition(partitions, *map(named_column, self.partition_by))

    def _update_rows(
        self,
        operator: str,
        stored: DataFrame,
        counted: DataFrame,
        windows: Windows,
        batch: SparkBatch,
    ) -> DataFrame:
        """Return the rows of the windows that the batch changes or closes, in the partitions of
        their records.
        """
        watermarks = batch.state.watermarks(self.name)
        partitions = batch.planned.partitions_at(operator)
        if isinstance(self.windows, Session):
            runs = batch.records.materialize(operator, build_session_runs(counted, windows))
            rows = union_sessions(stored, runs, windows, watermarks)
            return merge_sessions(self._repartition(rows, partitions), windows, watermarks)
        rows = update_fixed_windows(stored, counted, windows, watermarks)
        if not windows.functions and not batch.planned.required_partitioning(operator):
            return rows  # the rows are partitioned so already, though Spark does not know it
        return self._repartition(rows, partitions)

    def _select_counting(
        self, operator: str, frame: DataFrame, windows: Windows, batch: SparkBatch
    ) -> DataFrame:
        """Return the records that count, with RECORD; report how many are left out, and why, and
        pass the LEFT_OUT ones on if an operator reads late records.
        """
        conditions = {"records": F.lit(True), "partly_late": F.col(PARTLY_LATE)}
        conditions |= exclusion_conditions()
        before = batch.state.watermarks(self.name).before
        classified = classify_window_records(frame, windows, before)
        classified = batch.records.count_records(operator, classified, conditions)
        has_diverted_consumer = batch.planned.has_diverted_consumer(operator)
        if has_diverted_consumer or windows.functions:
            classified = batch.records.materialize(operator, classified)
        exclusion = F.col(EXCLUSION)
        if has_diverted_consumer:
            left_out = classified.filter(exclusion.isin(*LEFT_OUT))
            left_out = left_out.drop(*map(named_column, windows.paths))
            late = to_late_records(left_out, exclusion, self.watermark_delay)
            batch.records.divert(operator, late)
        record = stored_position_key(classified, batch.planned)
        return classified.filter(exclusion.isNull()).withColumn(RECORD, record)

    def _call_functions(
        self,
        operator: str,
        rows: DataFrame,
        counted: DataFrame,
        windows: Windows,
        batch: SparkBatch,
    ) -> DataFrame:
        """Return the rows that have results, with the values of users' functions; store the records
        of open windows.

        `rows` are the windows that the batch changes or closes, `counted` the batch's records.
        """
        schema = stored_record_schema(windows)
        partitions = batch.planned.partitions_at(operator)
        is_session = isinstance(self.windows, Session)
        only_closing = self.results == "final"
        spec = StateSpec(
            schema=schema,
            key=(*self.by, RECORD),
            partition_by=self.partition_by,
            partitions=partitions,
            expires=EXPIRES,
            append_only=not is_session,
            kept_for=self.summary(),
        )
        state = batch.state.table(f"{self.name}-records", spec, of=self.name)
        new = prepare_records(counted, windows)
        if only_closing:
            emitted = rows.filter(CLOSING)
        else:
            emitted = rows
        if is_session:
            records = self._repartition(merge_records(state.frame(), new, windows), partitions)
            assigned = _keep_single_partition(assign_sessions(records, rows, windows), partitions)
            still_open = assigned.filter(TOUCHED).filter(f"not {CLOSING}")
            state.write(still_open.select(*map(named_column, schema.names)), partitioned=True)
            if only_closing:
                assigned = assigned.filter(CLOSING)
        else:
            state.write(new, partitioned=True)
            assigned = select_window_records(state.with_written(), emitted, windows)
        sensitive = batch.planned.sensitive(operator, windows.own)
        values = call_window_functions(operator, assigned, windows, sensitive)
        values = self._repartition(values, partitions).hint("merge")
        with_values = emitted.join(values, [*self.by, START], "left")
        return _keep_single_partition(with_values, partitions)


def _derive_result(aggregate: Aggregation, columns: Columns) -> ColumnFacts:
    """Return the column with the results of an aggregate of records with these columns."""
    aggregated = [columns.find(column) or ColumnFacts() for column in aggregate.columns]
    kind = None
    if aggregated:
        kind = aggregated[0].type
    return ColumnFacts(aggregate.result_type(kind), merge_sources(aggregated))


def _check_aggregated(
    operator: str, name: str, aggregate: Aggregation, column: str, kind: str | None
) -> None:
    """Raise PlanningError if the aggregate `name` can't be made of a column of this type. An
    unknown type, None, passes.
    """
    if kind is None:
        return
    is_accepted = aggregate.accepts(kind)
    if is_accepted and is_storable(kind):
        return
    wanted = "string" if is_accepted else "double"
    problem = f"{operator}: {name!r} is {aggregate.describe()}, and column {column!r} is {kind}."
    cast = f'{flat_name(column)}="cast({column} as {wanted})"'
    if is_nested(kind):
        step = (
            f"Compute a simple value of it before, in .with_columns(…), or use Count({column!r}) or"
            " Aggregate(…)."
        )
    else:
        step = f"Cast it before, for example .with_columns({cast})."
    raise PlanningError(problem, step, operator=operator, column=column)


def _keep_single_partition(joined: DataFrame, partitions: int) -> DataFrame:
    """Return a join in one partition again if `partitions` is 1: Spark repartitions single
    partitions to join them.
    """
    if partitions == 1:
        return joined.coalesce(1)
    return joined


def build_window(
    after: str,
    kind: Kind,
    by: str | Sequence[str],
    name: str,
    aggregates: Mapping[str, Aggregation],
    results: Results,
    allowed_lateness: timedelta,
    partition_by: str | Sequence[str] | None,
) -> Window:
    """Return the operator for a user's arguments; `after` is the id of the operator before it,
    for errors.
    """
    what = f"window after {after}"
    check_name("window", name)
    found = f"{what} has allowed_lateness"
    check_duration(allowed_lateness, found, argument="allowed_lateness", zero=True, limited=True)
    key = validate_column_names(f"{what}: by=", by)
    if not key:
        problem = f"{what} has no key: by= is empty."
        raise ConfigurationError(problem, "Pass the key columns in by=.", argument="by")
    partition_columns = validate_partition_by(what, partition_by, key, "by")
    if not aggregates:
        found = f"{what} has aggregates={aggregates!r}"
        expected = 'at least one value, such as {"views": Count()}'
        raise argument_error(found, expected, argument="aggregates")
    validate_column_names(f"{what}: aggregates=", list(aggregates))
    for aggregate in aggregates.values():
        validate_column_names(f"{what}: {aggregate.describe()}", aggregate.columns)
    return Window(
        name=name,
        windows=kind,
        by=key,
        partition_by=partition_columns,
        aggregates=tuple(aggregates.items()),
        results=results,
        allowed_lateness=allowed_lateness,
    )

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
    MAX_DURATION,
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

    With `results` "final", these are the windows that the batch closes. With "updates", they are
    all `rows`, with the column FINAL, and a tombstone for each session that was merged into another
    one. A sum that its type can't hold fails the batch that closes the window; in earlier updates
    it is null, because later records may reduce it.
    """
    values = [F.col(START), F.col(END)]
    computed = {}
    for name, made in windows.aggregates:
        kind = windows.type_of(made)
        exact = made.exact(name, kind)
        value = F.expr(made.result(name, kind))
        if exact is not None:
            computed[exact_column(name)] = F.expr(exact)
            value = _check_range(name, made, windows, operator, sensitive)
        values.append(value.alias(name))
    if computed:
        rows = rows.withColumns(computed)
    if results == "final":
        return rows.filter(CLOSING).select(*windows.keys, *values, F.lit(False).alias(TOMBSTONE))
    return _add_retractions(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def _check_range(
    name: str, made: Aggregation, windows: Windows, operator: str, sensitive: Collection[str]
) -> Column:
    """Return the value of an aggregate, which fails the batch if the window closes and its exact
    value does not fit the type.
    """
    kind = windows.type_of(made)
    returns = str(made.result_type(kind))
    value = F.expr(made.result(name, kind))
    exact = named_column(exact_column(name))
    total = _shown(windows, made.columns[0], exact, sensitive)
    words: list[object] = [f"{operator}: {made.describe()} as {name} is ", total]
    words += [f", which is no {returns}: in the window from ", F.col(START).cast("string")]
    words += [" to ", F.col(END).cast("string"), " UTC of "]
    separator = ""
    for key in windows.by:
        words += [f"{separator}{key} = ", _shown(windows, key, named_column(key), sensitive)]
        separator = ", "
    problem = F.concat(*map(F.lit, words), F.lit("."))
    step = _next_step(made, kind)
    refused = raise_error_column(OperatorFailedError, problem, step, operator=operator)
    too_large = F.col(CLOSING) & value.isNull() & exact.isNotNull()
    return F.when(too_large, refused.cast(returns)).otherwise(value)


def _shown(windows: Windows, source: str, value: Column, sensitive: Collection[str]) -> Column:
    """Return a value of the column `source`, or in it, as an error shows it."""
    if find_taken((column_of(source, windows.own),), sensitive):
        return F.lit(MASKED)
    return F.substring(value.cast("string"), 1, MAX_VALUE_CHARS)


def _next_step(made: Aggregation, kind: str) -> str:
    """Return the next step for a sum or mean that its type can't hold: a wider type, or another
    application.

    After a change to a wider type, the stored sum is continued only if that type's sums are stored
    in the same way.
    """
    column = made.columns[0]
    flat = flat_name(column)
    stored = ExactSum("", kind)
    if stored.wider is not None:
        return (
            "Nothing is lost: the sum is stored exactly. Sum a wider type,"
            f' .with_columns({flat}="cast({column} as {stored.wider})") before the window, and the'
            " next run continues with it."
        )
    scale = stored.scale
    fewer = f', or, with fewer digits after the point, "cast({column} as decimal(38,{scale // 2}))"'
    if not scale:
        fewer = ""
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
    values = map(named_column, windows.schema.names[len(windows.by) :])
    still_open = rows.filter(TOUCHED).filter(f"not {CLOSING}")
    return _add_retractions(still_open, windows, list(values), (START, EXPIRES))


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
    made = rows.select(*key, *values, ABSORBED)
    fields = made.schema.fields[len(key) : -1]
    own = [named_column(field.name) for field in fields]
    here = F.struct(*own, F.lit(False).alias(TOMBSTONE))

    def tombstone(old: Column) -> Column:
        parts = []
        for field in fields:
            part = F.lit(None).cast(field.dataType)
            if field.name in known:
                part = old.getField(field.name)
            parts.append(part.alias(field.name))
        return F.struct(*parts, F.lit(True).alias(TOMBSTONE))

    return made.select(*key, F.inline(F.concat(F.array(here), F.transform(ABSORBED, tombstone))))


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
        by = [value_name(name, arriving[0].known) for name in self.by]
        # An update of an earlier window may come after the results of a later one.
        return [*by, START] if self.emits_updates else by

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
        return 3 if isinstance(self.windows, Session) else 2

    @property
    def _has_functions(self) -> bool:
        return any(isinstance(made, Aggregate) for _, made in self.aggregates)

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        return (Requirement(None, None, self.partition_by),)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        operator = context.operator
        columns.require(operator, self.by, "Correct by=.")
        columns.require_simple(operator, self.by, "in by=")
        made = []
        for name in self.by:
            made.append((value_name(name, columns.known), columns.find(name) or ColumnFacts()))
        made += [(START, ColumnFacts("timestamp")), (END, ColumnFacts("timestamp"))]
        for name, aggregate in self.aggregates:
            columns.require(operator, aggregate.columns, f"Correct the aggregate {name!r}.")
            taken = [value_name(column, columns.known) for column in aggregate.columns]
            check_new_names(operator, taken, f"Rename one before, or leave it out of {name!r}.")
            made.append((name, _derive_result(aggregate, columns)))
        if self.emits_updates:
            made.append((FINAL, ColumnFacts("boolean")))
        step = "Rename the column before, or the aggregate."
        check_new_names(operator, [name for name, _ in made], step)
        if columns.types is not None:
            self._check_types(operator, columns)
        return Columns(dict(made), typed=columns.types is not None)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        columns = context.columns[0].known
        by = tuple(value_name(name, columns) for name in flow.partitioned_by)
        return replace(flow, partitioned_by=by)

    def _check_types(self, operator: str, columns: Columns) -> None:
        """Raise PlanningError for columns that can't be aggregated or stored; unknown types are
        not checked.
        """
        partials = [RECORDS]
        aggregated: list[str] = []
        stored: Iterable[str] = ()
        for name, made in self.aggregates:
            aggregated += made.columns
            for kind in ("", WIDEST):
                partials += [partial.name for partial in made.partials(name, kind)]
            if isinstance(made, Aggregate) and not made.of:
                stored = columns.known
        check_state_names(operator, self.by, partials)
        check_state_names(operator, aggregated)
        check_state_columns(operator, columns.type_of, stored, self.by)
        for name, made in self.aggregates:
            for column in made.columns:
                _check_aggregated(operator, name, made, column, columns.type_of(column))

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        (frame,) = frames
        self.check_columns(operator, [batch.records.columns(frame)], batch.planned.app)
        sensitive = batch.planned.sensitive(operator, frame.columns)
        paths = self._find_paths(frame.columns)
        frame = frame.withColumns({name: value_column(frame.columns, name) for name in paths})
        types = types_from_spark(frame.schema)
        types = {name: kind for name, kind in types.items() if is_own(name)}
        windows = Windows(
            self.windows, self.by, self.aggregates, self.allowed_lateness, types, paths
        )
        partitions = batch.planned.partitions_at(operator)
        counted = self._count(operator, frame, windows, batch)
        key = (*self.by, START)
        spec = StateSpec(
            windows.schema,
            key,
            self.partition_by,
            partitions,
            EXPIRES,
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
        # The event time of a window's result is the last microsecond of the window.
        last = F.timestamp_micros(F.unix_micros(F.coalesce(END, START)) - 1)
        ordinal = to_json_object([named_column(name) for name in key])
        by = self.partition_by
        made = make_records(
            results, batch.planned, by=by, partitions=partitions, ordinal=ordinal, event_time=last
        )
        return made.withColumnsRenamed(dict(paths))

    def _find_paths(self, names: Collection[str]) -> dict[str, str]:
        """Return the paths that it names, each with the name of a column for the value; `names` are
        those of the columns.
        """
        named = list(self.by)
        for _, aggregate in self.aggregates:
            named += aggregate.columns
        return {name: value_name(name, names) for name in named if value_name(name, names) != name}

    def _repartition(self, frame: DataFrame, partitions: int) -> DataFrame:
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

    def _count(
        self, operator: str, frame: DataFrame, windows: Windows, batch: SparkBatch
    ) -> DataFrame:
        """Return the records that count, with POSITION; pass the LEFT_OUT ones on if an operator
        reads late records.
        """
        conditions = {"records": F.lit(True), "partly_late": F.col(PARTLY_LATE)}
        conditions |= exclusion_conditions()
        before = batch.state.watermarks(self.name).before
        classified = classify_window_records(frame, windows, before)
        classified = batch.records.count_records(operator, classified, conditions)
        has_diverted_consumer = batch.planned.has_diverted_consumer(operator)
        if has_diverted_consumer or windows.functions:
            classified = batch.records.materialize(operator, classified)
        why = F.col(EXCLUSION)
        if has_diverted_consumer:
            late = classified.filter(why.isin(*LEFT_OUT))
            late = late.drop(*map(named_column, windows.paths))
            late = to_late_records(late, why, self.watermark_delay)
            batch.records.divert(operator, late)
        record = stored_position_key(classified, batch.planned)
        return classified.filter(why.isNull()).withColumn(RECORD, record)

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
        final = self.results == "final"
        key = (*self.by, RECORD)
        spec = StateSpec(
            schema, key, self.partition_by, partitions, EXPIRES, not is_session, self.summary()
        )
        state = batch.state.table(f"{self.name}-records", spec, of=self.name)
        new = prepare_records(counted, windows)
        asked = rows.filter(CLOSING) if final else rows
        if is_session:
            every = self._repartition(merge_records(state.frame(), new, windows), partitions)
            assigned = _keep_single_partition(assign_sessions(every, rows, windows), partitions)
            grown = assigned.filter(TOUCHED).filter(f"not {CLOSING}")
            state.write(grown.select(*map(named_column, schema.names)), partitioned=True)
            if final:
                assigned = assigned.filter(CLOSING)
        else:
            state.write(new, partitioned=True)
            assigned = select_window_records(state.with_written(), asked, windows)
        sensitive = batch.planned.sensitive(operator, windows.own)
        values = call_window_functions(operator, assigned, windows, sensitive)
        values = self._repartition(values, partitions).hint("merge")
        return _keep_single_partition(asked.join(values, [*self.by, START], "left"), partitions)


def _derive_result(aggregate: Aggregation, columns: Columns) -> ColumnFacts:
    of = [columns.find(column) or ColumnFacts() for column in aggregate.columns]
    kind = of[0].type if of else None
    return ColumnFacts(aggregate.result_type(kind), merge_sources(of))


def _check_aggregated(
    operator: str, name: str, made: Aggregation, column: str, kind: str | None
) -> None:
    """Raise PlanningError if the aggregate `name` can't be made of a column of this type."""
    if kind is None:
        return
    wanted = "string" if made.accepts(kind) else "double"
    if wanted == "string" and is_storable(kind):
        return
    problem = f"{operator}: {name!r} is {made.describe()}, and column {column!r} is {kind}."
    cast = f'{flat_name(column)}="cast({column} as {wanted})"'
    step = f"Cast it before, for example .with_columns({cast})."
    if is_nested(kind):
        step = (
            f"Compute a simple value of it before, in .with_columns(…), or use Count({column!r}) or"
            " Aggregate(…)."
        )
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
    check_duration(
        allowed_lateness, found, argument="allowed_lateness", zero=True, most=MAX_DURATION
    )
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
    for made in aggregates.values():
        validate_column_names(f"{what}: {made.describe()}", made.columns)
    values = tuple(aggregates.items())
    return Window(name, kind, key, partition_columns, values, results, allowed_lateness)

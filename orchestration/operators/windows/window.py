"""`Window`, the operator that aggregates the records of each key in windows of their event time.

The kinds of windows (`Tumbling`, `Sliding`, `Session`) are declared in `kinds.py`, the aggregates
in `aggregates.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.local_table import StateSpec
from dagster_adjunct.orchestration.operators.columns import (
    EXPIRES,
    FINAL,
    MAX_DURATION,
    RECORD,
    check_duration,
    check_new_names,
    check_state_columns,
    check_state_names,
    require_columns,
    validate_column_names,
    validate_partition_by,
)
from dagster_adjunct.orchestration.operators.event_time import (
    EXCLUSION,
    exclusion_conditions,
    make_records,
    stored_position_key,
    to_json_object,
    to_late_records,
)
from dagster_adjunct.orchestration.operators.operator import (
    PassThroughSpec,
    PlanContext,
    Requirement,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns, merge_sources
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
from dagster_adjunct.resources.schemas.schema import is_storable, named_column
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.user_code import MASKED, MAX_VALUE_CHARS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.step.batch import BatchContext


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
    masked = frozenset(name.lower() for name in sensitive)
    exact = {name: made.exact(name, windows.type_of(made)) for name, made in windows.aggregates}
    computed = {
        exact_column(name): F.expr(text) for name, text in exact.items() if text is not None
    }
    rows = rows.withColumns(computed) if computed else rows
    values = [F.col(START), F.col(END)]
    values += [_value(name, made, windows, operator, masked) for name, made in windows.aggregates]
    if results == "final":
        return rows.filter(CLOSING).select(*windows.keys, *values, F.lit(False).alias(TOMBSTONE))
    return _add_retractions(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def _value(
    name: str, made: Aggregation, windows: Windows, operator: str, masked: Collection[str]
) -> Column:
    if isinstance(made, Aggregate):
        return named_column(name)
    kind = windows.type_of(made)
    value = F.expr(made.result(name, kind))
    if made.exact(name, kind) is None:
        return value.alias(name)
    exact, returns = named_column(exact_column(name)), str(made.result_type(kind))

    def shown(source: str, part: Column) -> Column:
        return (
            F.lit(MASKED)
            if source.lower() in masked
            else F.substring(part.cast("string"), 1, MAX_VALUE_CHARS)
        )

    words = [F.lit(f"{operator}: {made.describe()} as {name} is "), shown(made.columns[0], exact)]
    words.append(F.lit(f", which is no {returns}: in the window from "))
    words += [
        F.col(START).cast("string"),
        F.lit(" to "),
        F.col(END).cast("string"),
        F.lit(" UTC of "),
    ]
    for place, key in enumerate(windows.by):
        words += [F.lit(f"{', ' if place else ''}{key} = "), shown(key, named_column(key))]
    problem = F.concat(*words, F.lit("."))
    refused = raise_error_column(
        OperatorFailedError, problem, _next_step(made, kind), operator=operator
    )
    too_large = F.col(CLOSING) & value.isNull() & exact.isNotNull()
    return F.when(too_large, refused.cast(returns)).otherwise(value).alias(name)


def _next_step(made: Aggregation, kind: str) -> str:
    """Return the next step for a sum or mean that its type can't hold: a wider type, or another
    application.

    After a change to a wider type, the stored sum is continued only if that type's sums are stored
    in the same way.
    """
    column, wider = made.columns[0], ExactSum("", kind).wider
    if wider is not None:
        return (
            f"Nothing is lost: the sum is stored exactly. Sum a wider type, .with_columns({column}="
            f'"cast({column} as {wider})") before the window, and the next run continues with it.'
        )
    scale = ExactSum("", kind).scale
    fewer = (
        f', or, with fewer digits after the point, "cast({column} as decimal(38,{scale // 2}))"'
        if scale
        else ""
    )
    return (
        f"No decimal with {scale} digits after the point can hold it, and the stored sum has as"
        " many. Sum doubles, "
        f'which are rounded: .with_columns({column}="cast({column} as double)") before the'
        f" window{fewer}. Do that in "
        "an application with another name and its own outputs: it fills its windows from the oldest"
        " records on."
    )


def select_open_windows(rows: DataFrame, windows: Windows) -> DataFrame:
    """Return what is written to the state table: changed rows of open windows, and tombstones of
    absorbed sessions.
    """
    names = [name for name in windows.schema.names if name not in windows.by]
    still_open = rows.filter(TOUCHED).filter(f"not {CLOSING}")
    return _add_retractions(
        still_open, windows, [named_column(name) for name in names], (START, EXPIRES)
    )


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
    here = F.struct(*[named_column(field.name) for field in fields], F.lit(False).alias(TOMBSTONE))

    def tombstone(old: Column) -> Column:
        parts = [
            (
                old.getField(field.name)
                if field.name in known
                else F.lit(None).cast(field.dataType)
            ).alias(field.name)
            for field in fields
        ]
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
    diverts_late_records: ClassVar[bool] = True
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
        late = f", {self.allowed_lateness} late" if self.allowed_lateness else ""
        return f"{self.windows.describe()} by {', '.join(self.by)}: {made}; {self.results}{late}"

    @property
    def states(self) -> Sequence[str]:
        return (self.name, f"{self.name}-records") if self._has_functions else (self.name,)

    @property
    def ordered_by(self) -> Sequence[str]:
        # An update of an earlier window may come after the results of a later one.
        return (*self.by, START) if self.emits_updates else self.by

    @property
    def zones(self) -> Sequence[str]:
        zone = self.windows.zone if isinstance(self.windows, Tumbling) else None
        return () if zone is None else (zone,)

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
        return 1 + self._has_functions * (2 if isinstance(self.windows, Session) else 1)

    @property
    def _has_functions(self) -> bool:
        return any(isinstance(made, Aggregate) for _, made in self.aggregates)

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return (Requirement(None, None, self.partition_by),)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        operator, known = context.operator, columns.known
        require_columns(operator, "the stream", self.by, columns.names, "Correct by=.")
        made = [(name, known.get(name, ColumnFacts())) for name in self.by]
        made += [(START, ColumnFacts("timestamp")), (END, ColumnFacts("timestamp"))]
        for name, aggregate in self.aggregates:
            step = f"Correct the aggregate {name!r}."
            require_columns(operator, "the stream", aggregate.columns, columns.names, step)
            of = [known.get(column, ColumnFacts()) for column in aggregate.columns]
            made.append(
                (
                    name,
                    ColumnFacts(
                        aggregate.result_type(of[0].type if of else None), merge_sources(of)
                    ),
                )
            )
        made += [(FINAL, ColumnFacts("boolean"))] if self.emits_updates else []
        check_new_names(
            operator, [name for name, _ in made], "Rename the column before, or the aggregate."
        )
        if columns.types is not None:
            self._check_types(operator, columns)
        return Columns(dict(made), typed=columns.types is not None)

    def _check_types(self, operator: str, columns: Columns) -> None:
        """Raise PlanningError for columns that can't be aggregated or stored; unknown types are
        not checked.
        """
        values = [
            p.name
            for name, made in self.aggregates
            for kind in ("", WIDEST)
            for p in made.partials(name, kind)
        ]
        check_state_names(operator, self.by, (RECORDS, *values))
        check_state_names(
            operator, (column for _, made in self.aggregates for column in made.columns)
        )
        takes_all = any(isinstance(made, Aggregate) and not made.of for _, made in self.aggregates)
        types = columns.types or {}
        check_state_columns(operator, types, columns.known if takes_all else (), self.by)
        for name, made in self.aggregates:
            for column in made.columns:
                kind = types.get(column)
                if kind is not None and not (made.accepts(kind) and is_storable(kind)):
                    problem = (
                        f"{operator}: {name!r} is {made.describe()}, and column {column!r} is"
                        f" {kind}."
                    )
                    wanted = "string" if made.accepts(kind) else "double"
                    step = (
                        f'Cast it before, for example .with_columns({column}="cast({column} as'
                        f' {wanted})").'
                    )
                    raise PlanningError(problem, step, operator=operator, column=column)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        self.check_frames(operator, frames, batch.app)
        types = {name: kind for name, kind in frame.dtypes if not name.startswith("__")}
        windows = Windows(self.windows, self.by, self.aggregates, self.allowed_lateness, types)
        partitions = batch.partitions_at(operator)
        counted = self._count(operator, frame, windows, batch)
        key, stored_for = (*self.by, START), self.summary() + windows.units
        rules = "".join(map(describe_rules, self.zones))
        spec = StateSpec(
            windows.schema,
            key,
            self.partition_by,
            partitions,
            EXPIRES,
            kept_for=stored_for,
            zone_rules=rules,
        )
        state = batch.state(self.name, spec)
        for zone in self.zones:
            batch.check_zone_rules(state, zone, is_of_other_rules(windows))
        rows = batch.materialize(
            operator, self._update_rows(operator, state.frame(), counted, windows, batch)
        )
        state.write(select_open_windows(rows, windows), partitioned=True)
        if windows.functions:
            rows = self._call_functions(operator, rows, counted, windows, batch)
        results = make_results(rows, windows, self.results, operator, batch.sensitive(operator))
        # The event time of a window's result is the last microsecond of the window.
        last = F.timestamp_micros(F.unix_micros(F.coalesce(END, START)) - 1)
        ordinal = to_json_object([named_column(name) for name in key])
        by = self.partition_by
        return make_records(
            results, batch, by=by, partitions=partitions, ordinal=ordinal, event_time=last
        )

    def _repartition(self, frame: DataFrame, partitions: int) -> DataFrame:
        return frame.repartition(partitions, *map(named_column, self.partition_by))

    def _update_rows(
        self,
        operator: str,
        stored: DataFrame,
        counted: DataFrame,
        windows: Windows,
        batch: BatchContext,
    ) -> DataFrame:
        """Return the rows of the windows that the batch changes or closes, in the partitions of
        their records.
        """
        watermarks, partitions = batch.watermarks(self.name), batch.partitions_at(operator)
        if isinstance(self.windows, Session):
            runs = batch.materialize(operator, build_session_runs(counted, windows))
            rows = union_sessions(stored, runs, windows, watermarks)
            return merge_sessions(self._repartition(rows, partitions), windows, watermarks)
        rows = update_fixed_windows(stored, counted, windows, watermarks)
        if not windows.functions and not batch.required_partitioning(operator):
            return rows  # the rows are partitioned so already, though Spark does not know it
        return self._repartition(rows, partitions)

    def _count(
        self, operator: str, frame: DataFrame, windows: Windows, batch: BatchContext
    ) -> DataFrame:
        """Return the records that count, with POSITION; pass the LEFT_OUT ones on if an operator
        reads late records.
        """
        conditions = {
            "records": F.lit(True),
            "partly_late": F.col(PARTLY_LATE),
        } | exclusion_conditions()
        before = batch.watermarks(self.name).before
        classified = batch.count_records(
            operator, classify_window_records(frame, windows, before), conditions
        )
        has_late_consumer = batch.has_late_consumer(operator)
        if has_late_consumer or windows.functions:
            classified = batch.materialize(operator, classified)
        why = F.col(EXCLUSION)
        if has_late_consumer:
            late = classified.filter(why.isin(*LEFT_OUT))
            batch.divert_late_records(operator, to_late_records(late, why, self.watermark_delay))
        return classified.filter(why.isNull()).withColumn(
            RECORD, stored_position_key(classified, batch)
        )

    def _call_functions(
        self,
        operator: str,
        rows: DataFrame,
        counted: DataFrame,
        windows: Windows,
        batch: BatchContext,
    ) -> DataFrame:
        """Return the rows that have results, with the values of users' functions; store the records
        of open windows.

        `rows` are the windows that the batch changes or closes, `counted` the batch's records.
        """
        schema, partitions = stored_record_schema(windows), batch.partitions_at(operator)
        is_session, final = isinstance(self.windows, Session), self.results == "final"
        key = (*self.by, RECORD)
        spec = StateSpec(
            schema, key, self.partition_by, partitions, EXPIRES, not is_session, self.summary()
        )
        state = batch.state(f"{self.name}-records", spec, of=self.name)
        new = prepare_records(counted, windows)
        asked = rows.filter(CLOSING) if final else rows
        if is_session:
            every = self._repartition(merge_records(state.frame(), new, windows), partitions)
            assigned = _keep_single_partition(assign_sessions(every, rows, windows), partitions)
            grown = assigned.filter(TOUCHED).filter(f"not {CLOSING}")
            state.write(grown.select(*map(named_column, schema.names)), partitioned=True)
            assigned = assigned.filter(CLOSING) if final else assigned
        else:
            state.write(new, partitioned=True)
            assigned = select_window_records(state.with_written(), asked, windows)
        values = call_window_functions(operator, assigned, windows, batch.sensitive(operator))
        values = self._repartition(values, partitions).hint("merge")
        return _keep_single_partition(asked.join(values, [*self.by, START], "left"), partitions)


def _keep_single_partition(joined: DataFrame, partitions: int) -> DataFrame:
    """Return a join in one partition again if `partitions` is 1: Spark repartitions single
    partitions to join them.
    """
    return joined.coalesce(1) if partitions == 1 else joined


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
        raise ConfigurationError(
            f"{what} has no key: by= is empty.", "Pass the key columns in by=.", argument="by"
        )
    partition_columns = validate_partition_by(what, partition_by, key, "by")
    return Window(
        name, kind, key, partition_columns, _aggregates(what, aggregates), results, allowed_lateness
    )


def _aggregates(
    what: str, aggregates: Mapping[str, Aggregation]
) -> tuple[tuple[str, Aggregation], ...]:
    if not aggregates:
        expected = 'at least one value, such as {"views": Count()}'
        raise argument_error(
            f"{what} has aggregates={aggregates!r}", expected, argument="aggregates"
        )
    validate_column_names(f"{what}: aggregates=", list(aggregates))
    for made in aggregates.values():
        validate_column_names(f"{what}: {made.describe()}", made.columns)
    return tuple(aggregates.items())

"""Window: what the records of each key add up to in windows of their own time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.state_table import StateSpec
from dagster_adjunct.orchestration.operators.batch_context import BatchContext
from dagster_adjunct.orchestration.operators.columns import (
    FINAL,
    MAX_DURATION,
    Types,
    check_new_names,
    check_state_columns,
    first_duplicate,
    require_columns,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.event_time import make_records, to_json_object, to_late_records
from dagster_adjunct.orchestration.operators.operator import Declarations, Flow, PlanContext, Requirement, Spec
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, LineageContext
from dagster_adjunct.orchestration.operators.windows import functions
from dagster_adjunct.orchestration.operators.windows import rows as records
from dagster_adjunct.orchestration.operators.windows.aggregates import (
    Aggregate,
    Aggregation,
    Kind,
    Session,
    Sliding,
    Tumbling,
    max_duration_after,
)
from dagster_adjunct.orchestration.operators.windows.exact_sums import WIDEST, ExactSum
from dagster_adjunct.orchestration.operators.windows.functions import KEPT_TIME, LIMIT
from dagster_adjunct.orchestration.operators.windows.rows import (
    ABSORBED,
    CLOSING,
    END,
    EXPIRES,
    POSITION,
    RECORDS,
    START,
    TOUCHED,
    Windows,
    build_session_runs,
    merge_sessions,
    union_sessions,
    update_fixed_windows,
)
from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.errors import ConfigurationError, OperatorFailedError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.spark.errors import raise_error_column
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.user_code import MASKED, MAX_VALUE_CHARS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_OF_RECORDS = (POSITION, KEPT_TIME, LIMIT, EXPIRES)
_OF_WINDOWS = (START, END, RECORDS)


def check_reserved_names(
    operator: str,
    names: Iterable[str],
    by: Sequence[str],
    aggregates: Sequence[tuple[str, Aggregation]],
) -> None:
    """Raise PlanningError for a key or an aggregate of records' columns that are called as what is kept.

    `names` are the columns of the records, which a function without `of` takes.
    """
    partials = [
        partial.name for name, made in aggregates for kind in ("", WIDEST) for partial in made.partials(name, kind)
    ]
    _reject_reserved(operator, "by=", by, {*_OF_RECORDS, *_OF_WINDOWS, *partials})
    own = [name for name in names if not name.startswith("__")]
    for name, made in aggregates:
        taken = made.columns or (own if isinstance(made, Aggregate) else ())
        _reject_reserved(operator, f"the aggregate {name!r}", taken, _OF_RECORDS)


def _reject_reserved(operator: str, what: str, taken: Iterable[str], reserved: Collection[str]) -> None:
    clash = next((name for name in taken if name.lower() in {other.lower() for other in reserved}), None)
    if clash is not None:
        raise PlanningError(
            f"{operator}: {what} takes the column {clash!r}, and windows keep something of their own under that name.",
            f'Give the column another name before: .select("… as {clash.replace("$", "")}_of_record"), say; a function '
            "takes the columns that of= names.",
            operator=operator,
            column=clash,
        )


Results: TypeAlias = Literal["final", "updates"]


def make_results(
    rows: DataFrame, windows: Windows, results: Results, operator: str, sensitive: Collection[str]
) -> DataFrame:
    """Return a result for each row, with TOMBSTONE; with updates FINAL and what sessions take back, too.

    A sum that its type can't hold fails the batch that closes its window. In updates before that it is null: records
    may come that bring it back.
    """
    masked = frozenset(name.lower() for name in sensitive)
    values = [F.col(START), F.col(END)]
    values += [_value(name, made, windows, operator, masked) for name, made in windows.aggregates]
    if results == "final":
        kept = [named_column(name) for name in windows.by]
        return rows.filter(CLOSING).select(*kept, *values, F.lit(False).alias(TOMBSTONE))
    return _add_retractions(rows, windows, [*values, F.col(CLOSING).alias(FINAL)], (START,))


def _value(name: str, made: Aggregation, windows: Windows, operator: str, masked: Collection[str]) -> Column:
    if isinstance(made, Aggregate):
        return named_column(name)
    kind = windows.kind_of(made)
    value, exact = F.expr(made.result(name, kind)), made.exact(name, kind)
    if exact is None:
        return value.alias(name)

    def shown(source: str, part: Column) -> Column:
        return F.lit(MASKED) if source.lower() in masked else F.substring(part.cast("string"), 1, MAX_VALUE_CHARS)

    words = [F.lit(f"{operator}: {made.words()} as {name} is "), shown(made.columns[0], F.expr(exact))]
    words.append(F.lit(f", which is no {made.returns_of(kind)}: in the window from "))
    words += [F.col(START).cast("string"), F.lit(" to "), F.col(END).cast("string"), F.lit(" UTC of ")]
    for place, key in enumerate(windows.by):
        words += [F.lit(f"{', ' if place else ''}{key} = "), shown(key, named_column(key))]
    refused = raise_error_column(
        OperatorFailedError, F.concat(*words, F.lit(".")), _next_step(made, kind), operator=operator
    )
    too_large = F.col(CLOSING) & value.isNull() & F.expr(exact).isNotNull()
    return F.when(too_large, refused.cast(str(made.returns_of(kind)))).otherwise(value).alias(name)


def _next_step(made: Aggregation, kind: str) -> str:
    """Return what can be done about a result that its type can't hold: only what is kept alike is gone on with."""
    column, wider = made.columns[0], ExactSum("", kind).wider
    if wider is not None:
        return (
            f"Nothing is lost: the sum is kept whole. Add up a wider type, .with_columns({column}="
            f'"cast({column} as {wider})") before the window, and the next run goes on with it.'
        )
    scale = ExactSum("", kind).scale
    fewer = f', or, with fewer digits behind the point, "cast({column} as decimal(38,{scale // 2}))"' if scale else ""
    return (
        f"No decimal with {scale} digits behind the point holds it, and what is kept has as many. Add up doubles, "
        f'which round: .with_columns({column}="cast({column} as double)") before the window{fewer}. Do so in an '
        "application of another name, with outputs of its own: it fills its windows from the oldest records on."
    )


def select_open_windows(rows: DataFrame, windows: Windows) -> DataFrame:
    """Return the rows that stay open, as they are kept, with TOMBSTONE: those of absorbed sessions are deleted."""
    names = [name for name in windows.schema.names if name not in windows.by]
    still_open = rows.filter(TOUCHED).filter(f"not {CLOSING}")
    return _add_retractions(still_open, windows, [named_column(name) for name in names], (START, EXPIRES))


def _add_retractions(rows: DataFrame, windows: Windows, values: Sequence[Column], known: Sequence[str]) -> DataFrame:
    """Return these values of each row, and a tombstone with the `known` columns for each session that it absorbed.

    They come out of one list a row, so that they lie where it does: of a union Spark would not know.
    """
    key = [named_column(name) for name in windows.by]
    if not isinstance(windows.kind, Session):
        return rows.select(*key, *values, F.lit(False).alias(TOMBSTONE))
    here = F.struct(*values, F.lit(False).alias(TOMBSTONE))
    fields = rows.select(*values).schema.fields

    def gone(old: Column) -> Column:
        parts = [
            (old.getField(field.name) if field.name in known else F.lit(None).cast(field.dataType)).alias(field.name)
            for field in fields
        ]
        return F.struct(*parts, F.lit(True).alias(TOMBSTONE))

    return rows.select(*key, F.inline(F.concat(F.array(here), F.transform(ABSORBED, gone))))


@dataclass(frozen=True, slots=True)
class Window(Spec):
    """Windows of `kind` by the columns `by`, kept under `name`; records lie by `partition_by`, some of these.

    `results` "final" gives each window once, when the watermark has passed its end and `allowed_lateness`; "updates"
    gives each window that a batch has changed, with FINAL.
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
        made = ", ".join(f"{aggregation.words()} as {name}" for name, aggregation in self.aggregates)
        late = f", {self.allowed_lateness} late" if self.allowed_lateness else ""
        return f"{self.windows.words()} by {', '.join(self.by)}: {made}; {self.results}{late}"

    @property
    def states(self) -> Sequence[str]:
        return (self.name, *((self._records,) if self._functions else ()))

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
        """Rows of changed windows, values of functions, and records of sessions."""
        return 1 + (0 if not self._functions else 2 if isinstance(self.windows, Session) else 1)

    @property
    def _records(self) -> str:
        return f"{self.name}-records"

    @property
    def _functions(self) -> bool:
        return any(isinstance(made, Aggregate) for _, made in self.aggregates)

    @property
    def _columns(self) -> tuple[str, ...]:
        more = (FINAL,) if self.emits_updates else ()
        return (*self.by, START, END, *(name for name, _ in self.aggregates), *more)

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return (Requirement(None, None, self.partition_by),)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        require_columns(context.operator, "the stream", self.by, flow.columns, "Correct by=.")
        for name, made in self.aggregates:
            require_columns(
                context.operator, "the stream", made.columns, flow.columns, f"Correct the aggregate {name!r}."
            )
        check_new_names(context.operator, list(self._columns), "Rename the column before, or the aggregate.")
        return replace(flow, columns=self._columns)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None:
            return None
        self._check_types(context.operator, types)
        known: dict[str, str | None] = {name: types.get(name) for name in self.by}
        known |= {START: "timestamp", END: "timestamp"}
        for name, made in self.aggregates:
            known[name] = made.returns_of(types.get(made.columns[0]) if made.columns else None)
        return known | ({FINAL: "boolean"} if self.emits_updates else {})

    def _check_types(self, operator: str, types: Mapping[str, str | None]) -> None:
        """Refuse what can't be added up, or kept; a type that is None is not known yet."""
        check_reserved_names(operator, types, self.by, self.aggregates)
        whole = any(isinstance(made, Aggregate) and not made.of for _, made in self.aggregates)
        check_state_columns(
            operator, types, [name for name in types if not name.startswith("__")] if whole else (), self.by
        )
        for name, made in self.aggregates:
            for taken in made.columns:
                kind = types.get(taken)
                if kind is not None and (not made.takes(kind) or not _is_storable(taken, kind)):
                    problem = f"{operator}: {name!r} is {made.words()}, and column {taken!r} is {kind}."
                    step = f'Cast it before: .with_columns({taken}="cast({taken} as double)"), say.'
                    raise PlanningError(problem, step, operator=operator, column=taken)

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        (made,) = arriving
        kept = {name: made[name] for name in self.by if name in made}
        for name, aggregation in self.aggregates:
            sources = tuple(dict.fromkeys(source for taken in aggregation.columns for source in made.get(taken, ())))
            if sources:
                kept[name] = sources
        return kept

    def of_types(self, types: Mapping[str, str]) -> Windows:
        """Return the windows over records whose columns have these types."""
        own = {name: kind for name, kind in types.items() if not name.startswith("__")}
        return Windows(self.windows, self.by, self.aggregates, self.allowed_lateness, own)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        self._check_types(operator, dict(frame.dtypes))
        windows = self.of_types(dict(frame.dtypes))
        counted = self._counted(operator, frame, windows, batch)
        state = batch.state(self.name, self._spec(windows, batch.partitions_at(operator)))
        rows = batch.materialize(operator, self._rows(operator, state.frame(), counted, windows, batch))
        state.write(select_open_windows(rows, windows), partitioned=True)
        if windows.functions:
            rows = self._with_functions(operator, rows, counted, windows, batch)
        return self._made(
            make_results(rows, windows, self.results, operator, batch.sensitive(operator)),
            batch,
            batch.partitions_at(operator),
        )

    def _rows(
        self, operator: str, kept: DataFrame, counted: DataFrame, windows: Windows, batch: BatchContext
    ) -> DataFrame:
        """Return the windows that the batch has changed or closes, where their records lie."""
        marks = batch.watermarks(self.name)
        partition_columns = [named_column(name) for name in self.partition_by]
        if isinstance(self.windows, Session):
            runs = batch.materialize(operator, build_session_runs(counted, windows))
            rows = union_sessions(kept, runs, windows, marks)
            return merge_sessions(rows.repartition(batch.partitions_at(operator), *partition_columns), windows, marks)
        rows = update_fixed_windows(kept, counted, windows, marks)
        if not windows.functions and not batch.required_partitioning(operator):
            return rows  # where they do lie, though Spark does not know
        return rows.repartition(batch.partitions_at(operator), *partition_columns)

    def _made(self, results: DataFrame, batch: BatchContext, partitions: int) -> DataFrame:
        """Return results as records. A window's own time is its last moment."""
        last = F.timestamp_micros(F.unix_micros(F.coalesce(END, START)) - 1)
        ordinal = to_json_object([named_column(name) for name in (*self.by, START)])
        return make_records(
            results, batch, by=self.partition_by, partitions=partitions, ordinal=ordinal, event_time=last
        )

    def _counted(self, operator: str, frame: DataFrame, windows: Windows, batch: BatchContext) -> DataFrame:
        """Return the records that count in windows; the others are left out for who asks for them."""
        conditions = {name: F.expr(condition) for name, condition in _COUNTS.items()}
        before = batch.watermarks(self.name).before
        judged = batch.count_records(operator, records.classify_window_records(frame, windows, before), conditions)
        wanted = batch.has_late_consumer(operator)
        if wanted or windows.functions:
            judged = batch.materialize(operator, judged)
        if wanted:
            why = F.col(records.EXCLUSION)
            batch.divert_late_records(
                operator, to_late_records(judged.filter(why.isin(*records.LEFT_OUT)), why, self.watermark_delay)
            )
        return records.select_counted(judged, batch)

    def _spec(self, windows: Windows, partitions: int) -> StateSpec:
        key = (*self.by, START)
        return StateSpec(
            windows.schema, key, self.partition_by, partitions, EXPIRES, kept_for=self.summary() + windows.units
        )

    def _with_functions(
        self, operator: str, rows: DataFrame, counted: DataFrame, windows: Windows, batch: BatchContext
    ) -> DataFrame:
        """Return the rows that make results with the values of users' functions; keep the records of open windows."""
        schema, partitions = functions.kept_record_schema(windows), batch.partitions_at(operator)
        session = isinstance(self.windows, Session)
        key = (*self.by, records.POSITION)
        spec = StateSpec(schema, key, self.partition_by, partitions, EXPIRES, not session, self.summary())
        state = batch.state(self._records, spec, of=self.name)
        new = functions.prepare_records(counted, windows)
        asked = rows.filter(CLOSING) if self.results == "final" else rows
        if session:
            every = functions.merge_records(state.frame(), new, windows)
            every = every.repartition(partitions, *[named_column(name) for name in self.partition_by])
            placed = _keep_single_partition(functions.assign_sessions(every, rows, windows), partitions)
            grown = placed.filter(TOUCHED).filter(f"not {CLOSING}")
            state.write(grown.select(*[named_column(name) for name in schema.names]), partitioned=True)
            placed = placed.filter(CLOSING) if self.results == "final" else placed
        else:
            state.write(new, partitioned=True)
            placed = functions.select_window_records(state.with_written(), asked, windows)
        values = functions.call_window_functions(operator, placed, windows, batch.sensitive(operator))
        values = values.repartition(partitions, *[named_column(name) for name in self.partition_by])
        return _keep_single_partition(asked.join(values.hint("merge"), [*self.by, START], "left"), partitions)


_COUNTS = {
    "records": "true",
    "late": f"{records.EXCLUSION} = '{records.LATE}'",
    "partly_late": records.PARTLY_LATE,
    "null_times": f"{records.EXCLUSION} = '{records.NULL_TIME}'",
    "null_keys": f"{records.EXCLUSION} = '{records.NULL_KEY}'",
    "again": f"{records.EXCLUSION} = '{records.REPLAYED_REASON}'",
    "tombstones": f"{records.EXCLUSION} = '{records.DELETED}'",
}


def _keep_single_partition(joined: DataFrame, partitions: int) -> DataFrame:
    """Return what was joined where it lay: two single partitions Spark spreads anew before it joins them."""
    return joined.coalesce(1) if partitions == 1 else joined


def _is_storable(name: str, kind: str) -> bool:
    try:
        Field(name, kind)
    except SchemaMismatchError:
        return False
    return True


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
    """Return the windows that a user's arguments ask for, behind the operator `after`."""
    what = f"window after {after}"
    check_name("window", name)
    if not isinstance(kind, Tumbling | Sliding | Session):
        raise ConfigurationError(
            f"{what} got {kind!r}.", "Pass Tumbling(…), Sliding(…) or Session(…).", argument="kind"
        )
    if results not in ("final", "updates"):
        raise ConfigurationError(f"{what} has results={results!r}.", "Write final or updates.", argument="results")
    if not isinstance(allowed_lateness, timedelta) or not timedelta(0) <= allowed_lateness <= MAX_DURATION:
        raise ConfigurationError(
            f"{what} has allowed_lateness={allowed_lateness!r}: expected a timedelta of none or more, and "
            "of 100 years at most.",
            "Correct it.",
            argument="allowed_lateness",
        )
    key = validate_column_names(f"{what}: by=", by)
    if not key:
        raise ConfigurationError(f"{what} has no column in by=.", "Name the key.", argument="by")
    partition_columns = key if partition_by is None else validate_column_names(f"{what}: partition_by=", partition_by)
    if not partition_columns or set(partition_columns) - set(key):
        problem = f"{what} has partition_by={partition_by!r}: expected some of by= ({', '.join(key)})."
        step = "Name columns of the key, so that all records of a window lie together; or leave it out for all of them."
        raise ConfigurationError(problem, step, argument="partition_by")
    return Window(name, kind, key, partition_columns, _aggregates(what, aggregates), results, allowed_lateness)


def _aggregates(what: str, aggregates: Mapping[str, Aggregation]) -> tuple[tuple[str, Aggregation], ...]:
    if not isinstance(aggregates, Mapping) or not aggregates:
        problem = f"{what} has aggregates={aggregates!r}: expected a value or more."
        raise ConfigurationError(problem, 'Write {"views": Count()}, say.', argument="aggregates")
    names = validate_column_names(f"{what}: aggregates=", list(aggregates))
    double = first_duplicate(names)
    wrong = next((name for name, made in aggregates.items() if not isinstance(made, Aggregation)), None)
    if double is not None or wrong is not None:
        mistake = f"names {double!r} twice" if double is not None else f"gives {wrong!r} {aggregates[wrong or '']!r}"
        step = "Give each name one of Count(), Sum(…), Min(…), Max(…), Mean(…), Distinct(…) and Aggregate(…)."
        raise ConfigurationError(f"{what}: aggregates= {mistake}.", step, argument="aggregates")
    for made in aggregates.values():
        validate_column_names(f"{what}: {made.words()}", made.columns)
    return tuple(aggregates.items())

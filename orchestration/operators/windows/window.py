"""Window: what the records of each key add up to in windows of their own time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.assets.unbounded.state_spec import StateSpec
from dagster_adjunct.orchestration.operators.columns.kept_columns import check_kept
from dagster_adjunct.orchestration.operators.columns.known_columns import FINAL, check_names, require
from dagster_adjunct.orchestration.operators.event_times.late_records import as_late
from dagster_adjunct.orchestration.operators.event_times.made_records import as_json, made_records
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, Requirement
from dagster_adjunct.orchestration.operators.windows import window_functions as functions
from dagster_adjunct.orchestration.operators.windows import window_records as records
from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregate, Aggregation
from dagster_adjunct.orchestration.operators.windows.window_fixed import fixed_windows
from dagster_adjunct.orchestration.operators.windows.window_kinds import Kind, Session, longest
from dagster_adjunct.orchestration.operators.windows.window_reserved import check_reserved
from dagster_adjunct.orchestration.operators.windows.window_results import Results, kept_rows, results_of
from dagster_adjunct.orchestration.operators.windows.window_rows import CLOSING, END, EXPIRES, START, TOUCHED, Windows
from dagster_adjunct.orchestration.operators.windows.window_sessions import (
    session_runs,
    session_windows,
    sessions_side_by_side,
)
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Field

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext


@dataclass(frozen=True, slots=True)
class Window(Spec):
    """Windows of `kind` by the columns `by`, kept under `name`; records lie by `partition_by`, some of these.

    `results` "final" gives each window once, when the watermark has passed its end and `allowed_lateness`; "updates"
    gives each window that a batch has changed, with FINAL.
    """

    kind: ClassVar[str] = "window"
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
    def holds_back(self) -> timedelta:
        return self.allowed_lateness

    @property
    def reaches(self) -> timedelta:
        return longest(self.windows)

    @property
    def keeps_for(self) -> timedelta:
        return longest(self.windows) + self.allowed_lateness

    @property
    def takes_partition_by(self) -> bool:
        return True

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def gives_updates(self) -> bool:
        return self.results == "updates"

    @property
    def leaves_out(self) -> bool:
        return True

    @property
    def moves(self) -> int:
        """Rows of changed windows, values of functions, and records of sessions."""
        return 1 + (0 if not self._functions else 2 if isinstance(self.windows, Session) else 1)

    @property
    def makes_records(self) -> bool:
        return True

    @property
    def _records(self) -> str:
        return f"{self.name}-records"

    @property
    def _functions(self) -> bool:
        return any(isinstance(made, Aggregate) for _, made in self.aggregates)

    @property
    def _columns(self) -> tuple[str, ...]:
        more = (FINAL,) if self.gives_updates else ()
        return (*self.by, START, END, *(name for name, _ in self.aggregates), *more)

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return (Requirement(None, None, self.partition_by),)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        require(context.operator, "the stream", self.by, flow.columns, "Correct by=.")
        for name, made in self.aggregates:
            require(context.operator, "the stream", made.columns, flow.columns, f"Correct the aggregate {name!r}.")
        check_names(context.operator, list(self._columns), "Rename the column before, or the aggregate.")
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
        return known | ({FINAL: "boolean"} if self.gives_updates else {})

    def _check_types(self, operator: str, types: Mapping[str, str | None]) -> None:
        """Refuse what can't be added up, or kept; a type that is None is not known yet."""
        check_reserved(operator, types, self.by, self.aggregates)
        whole = any(isinstance(made, Aggregate) and not made.of for _, made in self.aggregates)
        check_kept(operator, types, [name for name in types if not name.startswith("__")] if whole else (), self.by)
        for name, made in self.aggregates:
            for taken in made.columns:
                kind = types.get(taken)
                if kind is not None and (not made.takes(kind) or not _can_be_kept(taken, kind)):
                    raise PlanningError(
                        f"{operator}: {name!r} is {made.words()}, and column {taken!r} is {kind}.",
                        f'Cast it before: .with_columns({taken}="cast({taken} as double)"), say.',
                        operator=operator,
                        column=taken,
                    )

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
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
        rows = batch.computed_once(operator, self._rows(operator, state.frame(), counted, windows, batch))
        state.write(kept_rows(rows, windows), lying=True)
        if windows.functions:
            rows = self._with_functions(operator, rows, counted, windows, batch)
        return self._made(
            results_of(rows, windows, self.results, operator, batch.sensitive(operator)),
            batch,
            batch.partitions_at(operator),
        )

    def _rows(
        self, operator: str, kept: DataFrame, counted: DataFrame, windows: Windows, batch: BatchContext
    ) -> DataFrame:
        """Return the windows that the batch has changed or closes, where their records lie."""
        marks = batch.watermarks(self.name)
        lying = [column(name) for name in self.partition_by]
        if isinstance(self.windows, Session):
            runs = batch.computed_once(operator, session_runs(counted, windows))
            rows = sessions_side_by_side(kept, runs, windows, marks)
            return session_windows(rows.repartition(batch.partitions_at(operator), *lying), windows, marks)
        rows = fixed_windows(kept, counted, windows, marks)
        if not windows.functions and not batch.lying_by(operator):
            return rows  # where they do lie, though Spark does not know
        return rows.repartition(batch.partitions_at(operator), *lying)

    def _made(self, results: DataFrame, batch: BatchContext, partitions: int) -> DataFrame:
        """Return results as records. A window's own time is its last moment."""
        from pyspark.sql import functions as F

        last = F.timestamp_micros(F.unix_micros(F.coalesce(END, START)) - 1)
        ordinal = as_json([column(name) for name in (*self.by, START)])
        return made_records(
            results, batch, by=self.partition_by, partitions=partitions, ordinal=ordinal, event_time=last
        )

    def _counted(self, operator: str, frame: DataFrame, windows: Windows, batch: BatchContext) -> DataFrame:
        """Return the records that count in windows; the others are left out for who asks for them."""
        from pyspark.sql import functions as F

        conditions = {name: F.expr(condition) for name, condition in _COUNTS.items()}
        before = batch.watermarks(self.name).before
        judged = batch.counted(operator, records.judged(frame, windows, before), conditions)
        wanted = batch.late_wanted(operator)
        if wanted or windows.functions:
            judged = batch.computed_once(operator, judged)
        if wanted:
            why = F.col(records.WHY)
            batch.leave_out(operator, as_late(judged.filter(why.isin(*records.ASIDE)), why, self.holds_back))
        return records.counted(judged, batch)

    def _spec(self, windows: Windows, partitions: int) -> StateSpec:
        key = (*self.by, START)
        return StateSpec(
            windows.schema, key, self.partition_by, partitions, EXPIRES, kept_for=self.summary() + windows.units
        )

    def _with_functions(
        self, operator: str, rows: DataFrame, counted: DataFrame, windows: Windows, batch: BatchContext
    ) -> DataFrame:
        """Return the rows that make results with the values of users' functions; keep the records of open windows."""
        schema, partitions = functions.record_schema(windows), batch.partitions_at(operator)
        session = isinstance(self.windows, Session)
        key = (*self.by, records.PLACE)
        spec = StateSpec(schema, key, self.partition_by, partitions, EXPIRES, not session, self.summary())
        state = batch.state(self._records, spec, of=self.name)
        new = functions.kept_records(counted, windows)
        asked = rows.filter(CLOSING) if self.results == "final" else rows
        if session:
            every = functions.all_records(state.frame(), new, windows)
            every = every.repartition(partitions, *[column(name) for name in self.partition_by])
            placed = _in_one(functions.session_records(every, rows, windows), partitions)
            grown = placed.filter(TOUCHED).filter(f"not {CLOSING}")
            state.write(grown.select(*[column(name) for name in schema.names]), lying=True)
            placed = placed.filter(CLOSING) if self.results == "final" else placed
        else:
            state.write(new, lying=True)
            placed = functions.window_records(state.with_written(), asked, windows)
        values = functions.called_of_windows(operator, placed, windows, batch.sensitive(operator))
        values = values.repartition(partitions, *[column(name) for name in self.partition_by])
        return _in_one(asked.join(values.hint("merge"), [*self.by, START], "left"), partitions)


_COUNTS = {
    "records": "true",
    "late": f"{records.WHY} = '{records.LATE}'",
    "partly_late": records.PARTLY,
    "null_times": f"{records.WHY} = '{records.NULL_TIME}'",
    "null_keys": f"{records.WHY} = '{records.NULL_KEY}'",
    "again": f"{records.WHY} = '{records.READ_AGAIN}'",
    "tombstones": f"{records.WHY} = '{records.DELETED}'",
}


def _in_one(joined: DataFrame, partitions: int) -> DataFrame:
    """Return what was joined where it lay: two single partitions Spark spreads anew before it joins them."""
    return joined.coalesce(1) if partitions == 1 else joined


def _can_be_kept(name: str, kind: str) -> bool:
    try:
        Field(name, kind)
    except SchemaMismatchError:
        return False
    return True

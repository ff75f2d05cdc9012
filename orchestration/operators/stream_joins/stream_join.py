"""StreamJoin: records of two streams that meet within a time, each kept as long as a partner may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal

from dagster_adjunct.assets.unbounded.state_spec import StateSpec
from dagster_adjunct.orchestration.operators.columns.kept_columns import check_kept
from dagster_adjunct.orchestration.operators.columns.known_columns import Columns, Types, check_names, require
from dagster_adjunct.orchestration.operators.event_times.late_records import as_late
from dagster_adjunct.orchestration.operators.event_times.made_records import held_back, made_records
from dagster_adjunct.orchestration.operators.joins.join_arguments import Selected
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import ComparedColumn, Flow, Requirement, agreed
from dagster_adjunct.orchestration.operators.stream_joins.stream_join_rows import (
    APART,
    AT,
    BOTH,
    DELETED,
    EXPIRES,
    FIRST,
    KIND,
    LATE,
    LIMIT,
    NULL_KEY,
    NULL_TIME,
    READ_AGAIN,
    RECORD,
    SECOND,
    TIME,
    WHY,
    Bound,
    Side,
    apart_rows,
    as_results,
    judged,
    kept_rows,
    matches,
    unmatched,
)
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext, Watermarks
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext

HowStreams = Literal["inner", "left", "right", "full"]
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class StreamJoin(Spec):
    """Records of the left and the right input with equal keys, whose times are within `before` and `after`.

    `on` pairs (left column, right column); both streams lie by `partition_by`, some of the left columns of these.
    `select` None means all columns of the right besides its key, each with `prefix` before its name. What is kept is
    kept under `name`.
    """

    kind: ClassVar[str] = "stream-join"
    name: str
    on: tuple[tuple[str, str], ...]
    partition_by: tuple[str, ...]
    before: timedelta
    after: timedelta
    how: HowStreams
    select: tuple[Selected, ...] | None
    prefix: str = ""

    @property
    def bound(self) -> Bound:
        """Which times meet."""
        return Bound(self.before // _MICROSECOND, self.after // _MICROSECOND)

    @property
    def takes_partition_by(self) -> bool:
        return True

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def states(self) -> Sequence[str]:
        return (f"{self.name}-left", f"{self.name}-right")

    @property
    def leaves_out(self) -> bool:
        return True

    @property
    def makes_records(self) -> bool:
        return True

    @property
    def holds_back(self) -> timedelta:
        """A row that has met nothing comes out when its last partner's time has passed."""
        left = self.after if self._outer("left") else timedelta(0)
        return max(left, self.before if self._outer("right") else timedelta(0))

    @property
    def keeps_for(self) -> timedelta:
        return self.before + self.after + _MICROSECOND

    def summary(self) -> str:
        on = ", ".join(left if left == right else f"{left} = {right}" for left, right in self.on)
        return f"{self.how} join on {on}, from {self.before} before to {self.after} after"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return [Requirement(None, None, lying) for lying in self._lying]

    @property
    def _lying(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns by which the left and the right stream lie."""
        theirs = dict(self.on)
        return self.partition_by, tuple(theirs[name] for name in self.partition_by)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        left, right = arriving
        to_left = {theirs: ours for ours, theirs in self.on}
        renamed = tuple(to_left.get(name, name) for name in right.partitioned_by)
        together = agreed(context, [left, replace(right, partitioned_by=renamed)])
        return replace(together, columns=self._columns(context.operator, left.columns, right.columns))

    def selection(self, columns: Sequence[str]) -> tuple[Selected, ...]:
        """Return what is taken of a right side with these columns."""
        if self.select is not None:
            return self.select
        keys = {theirs for _, theirs in self.on}
        return tuple(Selected(name, self.prefix + name) for name in columns if name not in keys)

    def _columns(self, operator: str, left: Columns, right: Columns) -> Columns:
        require(operator, "the left stream", tuple(a for a, _ in self.on), left, "Correct on=.")
        require(operator, "the right stream", tuple(b for _, b in self.on), right, "Correct on=.")
        if self.select is not None:
            require(operator, "the right stream", tuple(item.column for item in self.select), right, "Correct select=.")
        elif right is None:
            return None
        added = [item.name for item in self.selection(right or ())]
        there = {name.lower() for name in left or ()}
        taken = [name for name in added if name.lower() in there]
        if taken:
            raise PlanningError(
                f"{operator}: both streams bring a column {taken[0]!r}; the left one's columns there are "
                f"{', '.join(left or ())}.",
                f'Rename the added one: select=["{taken[0]} as right_{taken[0]}"], or prefix="right_".',
                operator=operator,
                column=taken[0],
            )
        check_names(operator, added, "Rename one with 'column as name'.")
        return None if left is None else (*left, *added)

    def compared(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        left, right = (types or {} for types in arriving)
        return [ComparedColumn(a, left.get(a), f"{b!r} of the right stream", right.get(b)) for a, b in self.on]

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        left, right = arriving
        if left is not None:
            check_kept(context.operator, left, left, [a for a, _ in self.on])
        if right is None:
            return None
        added = [chosen.column for chosen in self.selection(tuple(right))]
        check_kept(context.operator, right, added, [b for _, b in self.on])
        if left is None:
            return None
        return left | {chosen.name: right.get(chosen.column) for chosen in self.selection(tuple(right))}

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        left, right = arriving
        chosen = self.selection(tuple(right))
        return left | {selected.name: right[selected.column] for selected in chosen if selected.column in right}

    # -- the batch

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        sides, added = self._sides(operator, frames)
        watermarks = batch.watermarks(self.name)
        taken = [
            self._taken(operator, frame, side, watermarks, batch) for frame, side in zip(frames, sides, strict=True)
        ]
        rows = [self._kept(operator, frame, side, watermarks, batch) for frame, side in zip(taken, sides, strict=True)]
        left, right = rows
        since = None if watermarks.before is None else microseconds(watermarks.before)
        parts = [matches(left, right, sides, self.bound, since)]
        outer = [(frame, side) for frame, side in zip(taken, sides, strict=True) if side.outer]
        if watermarks.after is not None:
            parts += [unmatched(left, right, sides, self.bound, side, watermarks) for _, side in outer]
        parts += [apart_rows(frame, side) for frame, side in outer]
        results = as_results(parts, sides, [dict(frame.dtypes) for frame in frames], added)
        conditions = {"matched": F.col(KIND) == BOTH, "unmatched": F.col(KIND) != BOTH}
        results = batch.counted(operator, results, conditions)
        return self._made(operator, results, batch)

    def _sides(self, operator: str, frames: Sequence[DataFrame]) -> tuple[tuple[Side, Side], Sequence[Selected]]:
        """Return both sides, of the right with what is added only, and that."""
        own = [[name for name in frame.columns if not name.startswith("__")] for frame in frames]
        self._columns(operator, tuple(own[0]), tuple(own[1]))
        types = [dict(frame.dtypes) for frame in frames]
        for a, b in self.on:
            if types[0][a] != types[1][b]:
                raise PlanningError(
                    f"{operator}: {a!r} of the left stream is {types[0][a]} and {b!r} of the right one is "
                    f"{types[1][b]}; equal values of different types lie in different partitions.",
                    f'Cast one of them before: .with_columns({b}="cast({b} as {types[0][a]})").',
                    operator=operator,
                    column=a,
                )
        chosen = self.selection(own[1])
        check_kept(operator, types[0], own[0], [a for a, _ in self.on])
        check_kept(operator, types[1], [selected.column for selected in chosen], [b for _, b in self.on])
        keys = [tuple(pair[number] for pair in self.on) for number in (0, 1)]
        added = tuple(dict.fromkeys(item.column for item in chosen if item.column not in keys[1]))
        bound = self.bound
        lying = self._lying
        left = Side("left", keys[0], lying[0], tuple(own[0]), self._outer("left"), bound.after)
        right = Side("right", keys[1], lying[1], (*keys[1], *added), self._outer("right"), bound.before)
        return (left, right), chosen

    def _outer(self, side: str) -> bool:
        return self.how in (side, "full")

    def _taken(
        self, operator: str, frame: DataFrame, side: Side, watermarks: Watermarks, batch: BatchContext
    ) -> DataFrame:
        """Return the judged records of one side; what is left out is handed over where somebody wants it."""
        from pyspark.sql import functions as F

        frame = judged(frame, side, watermarks, self.keeps_for // _MICROSECOND)
        late = batch.late_wanted(operator)
        if side.outer or late:  # they are read more than once
            frame = batch.computed_once(operator, frame)
        if late:
            gone = frame.where(F.col(WHY).isin(LATE, *(() if side.outer else APART)))
            batch.leave_out(operator, as_late(gone, F.col(WHY), self.holds_back, side.name))
        return frame

    def _kept(
        self, operator: str, frame: DataFrame, side: Side, watermarks: Watermarks, batch: BatchContext
    ) -> DataFrame:
        """Keep the records of one side; return all rows of it that are kept."""
        from pyspark.sql import functions as F

        counts = {
            LATE: LATE,
            READ_AGAIN: READ_AGAIN,
            NULL_TIME: "null_times",
            NULL_KEY: "null_keys",
            DELETED: "tombstones",
        }
        conditions = {name: F.col(WHY) == why for why, name in counts.items()}
        counted = batch.counted(operator, frame, conditions | {side.name: F.col(WHY).isNull()})
        rows = kept_rows(counted, side, self._needed(side), batch)
        own = Schema.from_spark(frame.select(*[column(name) for name in side.columns]).schema)
        more = (Field(RECORD, "string"), Field(AT, "timestamp"), Field(EXPIRES, "timestamp"))
        spec = StateSpec(
            schema=Schema((*own.fields, *more)),
            key=(*side.keys, RECORD),
            partition_by=side.lying,
            partitions=batch.partitions_at(operator),
            expires=EXPIRES,
            append_only=True,
            kept_for=self.summary(),
        )
        table = batch.state(f"{self.name}-{side.name}", spec, of=self.name)
        table.write(rows, lying=True)
        return table.with_written()

    def _needed(self, side: Side) -> int:
        """Return how long a row is needed from its time on: while partners may come, and while one is judged."""
        bound = self.bound
        judges = self._outer("right" if side.name == "left" else "left")
        return (bound.before + bound.after if judges else side.ahead) + 1

    def _made(self, operator: str, results: DataFrame, batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        partitions, by = batch.partitions_at(operator), self.partition_by
        made = made_records(
            results,
            batch,
            by=by,
            partitions=partitions,
            ordinal=F.concat_ws("|", F.col(KIND), F.col(FIRST), F.col(SECOND)),
            event_time=F.timestamp_micros(F.col(TIME)),
            behind=held_back(F.col(LIMIT), F.col(TIME), self.holds_back),
        )
        lying = batch.lying_by(operator)
        if not lying:
            return made
        # Where Spark sees that they lie so, it leaves this out; of a single partition it never sees it.
        return made.repartition(partitions, *map(column, lying)) if partitions > 1 else made.coalesce(1)

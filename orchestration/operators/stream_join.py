"""StreamJoin: records of two streams that meet within a time, each kept as long as a partner may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.state_table import StateSpec
from dagster_adjunct.orchestration.operators.batch_context import BatchContext, Watermarks
from dagster_adjunct.orchestration.operators.columns import (
    BEHIND,
    EVENT_TIME,
    MAX_DURATION,
    REPLAYED,
    Columns,
    Types,
    check_new_names,
    check_state_columns,
    require_columns,
    validate_column_names,
)
from dagster_adjunct.orchestration.operators.event_time import (
    MAX_MICROS,
    hold_back_watermark,
    make_records,
    position_key,
    stored_position_key,
    to_late_records,
)
from dagster_adjunct.orchestration.operators.joins import On, SelectedColumn, parse_selection
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Declarations,
    Flow,
    PlanContext,
    Requirement,
    Spec,
    merge_flows,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, LineageContext
from dagster_adjunct.resources.common import check_name, to_microseconds
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.system import TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


# What a stream-stream join does to records: which of them count, which meet, and which have met none in time.
#
# Rows of both sides are scanned where they are kept, those of the batch among them. Time is cut into spans as long as
# the bound, so that a row is compared with those of two spans only, also where one key has most of the records.


EXCLUSION = "__why"
"""Why a record is not kept: one of the words below; null where it is."""
REPLAYED_REASON, DELETED, LATE, NULL_TIME, NULL_KEY = "again", "tombstone", "late", "null time", "null key"
UNMATCHABLE = (NULL_TIME, NULL_KEY)
"""What can meet nothing, and is known to at once."""
RECORD, AT, EXPIRES = "record$", "at$", "expires$"
"""Of a kept row: which record it was, its event time, and when it is not needed any more."""
NEW = "__new"
KIND, FIRST, SECOND, TIME = "__kind", "__first", "__second", "__time"
"""Of a result: "both", "left" or "right"; the records that it is made of; its event time, in microseconds."""
LIMIT = "__limit"
"""The watermark that a result is behind: that of a record that has met nothing, and came late."""
BOTH = "both"
_SPAN = "__span"


@dataclass(frozen=True, slots=True)
class Bound:
    """Which times meet, in microseconds: left - before <= right <= left + after."""

    before: int
    after: int

    @property
    def width(self) -> int:
        """How long a span of time is."""
        return max(self.before + self.after, 1)


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its name, the columns of the key, those of the key by which it lies, and those that are kept.

    `outer` says that rows come out that meet nothing. `ahead` is how far above a row's time a partner of it may be, in
    microseconds.
    """

    name: str
    keys: tuple[str, ...]
    partition_columns: tuple[str, ...]
    columns: tuple[str, ...]
    outer: bool
    ahead: int


def classify_join_records(frame: DataFrame, side: Side, watermarks: Watermarks, keeps_for: int) -> DataFrame:
    """Return the records with WHY they are not kept; `keeps_for` microseconds must not lead out of the year 9999.

    A record's own partition decides whether it is late, up to the record alone: however batches were cut, it is the
    same. The watermark that the batch began with is above that only where idle partitions were not waited for.
    """
    time = F.unix_micros(EVENT_TIME)
    late = F.col(BEHIND).isNotNull()
    if watermarks.before is not None:
        late = late | (time < F.lit(to_microseconds(watermarks.before)))
    no_key = reduce(lambda one, other: one | other, [named_column(name).isNull() for name in side.keys])
    reasons = [(F.col(REPLAYED), REPLAYED_REASON)] if REPLAYED in frame.columns else []
    reasons += [
        (F.col(TOMBSTONE), DELETED),
        (time.isNull() | (time > MAX_MICROS - keeps_for), NULL_TIME),
        (no_key, NULL_KEY),
        (late, LATE),
    ]
    return frame.withColumn(EXCLUSION, F.coalesce(*[F.when(condition, F.lit(why)) for condition, why in reasons]))


def select_kept_records(frame: DataFrame, side: Side, needed: int, batch: BatchContext) -> DataFrame:
    """Return the rows to keep of judged records; each is needed so many microseconds from its time on."""
    expires = F.timestamp_micros(F.unix_micros(EVENT_TIME) + F.lit(needed))
    return frame.where(F.col(EXCLUSION).isNull()).select(
        *[named_column(name) for name in side.columns],
        stored_position_key(frame, batch).alias(RECORD),
        F.col(EVENT_TIME).alias(AT),
        expires.alias(EXPIRES),
    )


def unmatchable_results(frame: DataFrame, side: Side) -> DataFrame:
    """Return results of the judged records that can meet nothing."""
    named = [named_column(name).alias(_side_column(side, name)) for name in side.columns]
    return frame.where(F.col(EXCLUSION).isin(*UNMATCHABLE)).select(
        *named,
        F.lit(side.name).alias(KIND),
        position_key(frame).alias(FIRST),
        F.lit("apart").alias(SECOND),
        F.unix_micros(EVENT_TIME).alias(TIME),
        F.col(BEHIND).alias(LIMIT),
    )


def match_rows(
    left: DataFrame, right: DataFrame, sides: tuple[Side, Side], bound: Bound, since: int | None
) -> DataFrame:
    """Return the pairs that this batch makes: its new rows of the left with all of the right, and of the right with the
    older ones of the left. No new row is from before `since`."""
    lefts, rights = (_prefix_columns(rows, side) for rows, side in zip((left, right), sides, strict=True))
    if since is not None:
        lefts = lefts.where(_at(sides[0]) >= since - bound.after)
        rights = rights.where(_at(sides[1]) >= since - bound.before)
    new_left = _spread(lefts.where(_new(sides[0])), [_first_span(sides[0], bound), _next_span(sides[0], bound)])
    any_right = rights.withColumn(_SPAN, _span(_at(sides[1]), bound))
    old_left = lefts.where(~_new(sides[0])).withColumn(_SPAN, _first_span(sides[0], bound))
    met = [_join_spans(new_left, any_right, sides, bound, "inner")]
    met += [_join_spans(old_left, _spread_right(rights.where(_new(sides[1])), sides[1], bound), sides, bound, "inner")]
    both = [
        pairs.withColumns(
            {
                KIND: F.lit(BOTH),
                FIRST: F.col(_side_column(sides[0], RECORD)),
                SECOND: F.col(_side_column(sides[1], RECORD)),
                TIME: F.greatest(_at(sides[0]), _at(sides[1])),
            }
        )
        for pairs in met
    ]
    return both[0].unionByName(both[1])


def find_unmatched(
    left: DataFrame, right: DataFrame, sides: tuple[Side, Side], bound: Bound, of: Side, watermarks: Watermarks
) -> DataFrame:
    """Return the rows of one side that have met nothing when the watermark passed the last time of a partner."""
    assert watermarks.after is not None, "nothing has passed"
    until = to_microseconds(watermarks.after) - of.ahead
    lefts, rights = (_prefix_columns(rows, side) for rows, side in zip((left, right), sides, strict=True))
    since = None if watermarks.before is None else to_microseconds(watermarks.before) - of.ahead
    # A row's last partner is `ahead` later than it; the watermark has passed that where it is above.
    passed = _at(of) < F.lit(until)
    passed = passed if since is None else passed & (_at(of) >= F.lit(since))
    if of is sides[0]:
        spread = _spread_right(_around(rights, sides[1], since, until, bound.before, bound.after), sides[1], bound)
        alone = _join_spans(
            lefts.where(passed).withColumn(_SPAN, _first_span(of, bound)), spread, sides, bound, "left_anti"
        )
    else:
        near = _around(lefts, sides[0], since, until, bound.after, bound.before)
        spread = _spread(near, [_first_span(sides[0], bound), _next_span(sides[0], bound)])
        alone = _join_spans(
            rights.where(passed).withColumn(_SPAN, _span(_at(of), bound)), spread, sides, bound, "left_anti"
        )
    return alone.withColumns(
        {KIND: F.lit(of.name), FIRST: F.col(_side_column(of, RECORD)), SECOND: F.lit(""), TIME: _at(of)}
    )


def combine_results(
    parts: Sequence[DataFrame],
    sides: tuple[Side, Side],
    types: Sequence[dict[str, str]],
    added: Sequence[SelectedColumn],
) -> DataFrame:
    """Return all results with the columns of the left and those `added` of the right, null where there is no row.

    The key stands in the columns of the left, whichever side it is of.
    """
    left, right = sides
    results = []
    for part in parts:
        there = set(part.columns)

        def value(side: Side, name: str, kind: str, there: set[str] = there) -> Column:
            own = _side_column(side, name)
            return named_column(own) if own in there else F.lit(None).cast(kind)

        keys = dict(zip(left.keys, right.keys, strict=True))
        columns = []
        for name in left.columns:
            other = name in keys and _side_column(left, name) not in there
            key_value = value(right, keys[name], types[0][name]) if other else value(left, name, types[0][name])
            columns.append(key_value.alias(name))
        columns += [value(right, selected.column, types[1][selected.column]).alias(selected.name) for selected in added]
        limit = F.col(LIMIT) if LIMIT in there else F.lit(None).cast("timestamp").alias(LIMIT)
        results.append(part.select(*columns, *[F.col(name) for name in (KIND, FIRST, SECOND, TIME)], limit))
    return reduce(lambda one, other: one.unionByName(other), results)


# -- rows of one side


def _side_column(side: Side, name: str) -> str:
    return f"__{side.name}_{name}"


def _at(side: Side) -> Column:
    return named_column(_side_column(side, AT))


def _new(side: Side) -> Column:
    return named_column(_side_column(side, NEW))


def _prefix_columns(rows: DataFrame, side: Side) -> DataFrame:
    """Return kept rows with names that the other side has not; their time in microseconds."""
    named = [named_column(name).alias(_side_column(side, name)) for name in (*side.columns, RECORD, NEW)]
    return rows.select(*named, F.unix_micros(named_column(AT)).alias(_side_column(side, AT)))


def _around(rows: DataFrame, side: Side, since: int | None, until: int, earlier: int, later: int) -> DataFrame:
    """Return the rows that may meet others from `since` to `until`."""
    rows = rows.where(_at(side) <= until + later)
    return rows if since is None else rows.where(_at(side) >= since - earlier)


# -- spans of time


def _span(time: Column, bound: Bound) -> Column:
    """Return the begin of the span that a time is in."""
    return time - F.pmod(time, F.lit(bound.width))


def _first_span(left: Side, bound: Bound) -> Column:
    """Return the span of the earliest partner of a left row; the latest one is in that or in the next."""
    return _span(_at(left) - bound.before, bound)


def _next_span(left: Side, bound: Bound) -> Column:
    return _first_span(left, bound) + bound.width


def _spread(rows: DataFrame, spans: Sequence[Column]) -> DataFrame:
    return rows.withColumn(_SPAN, F.explode(F.array(*spans)))


def _spread_right(rows: DataFrame, right: Side, bound: Bound) -> DataFrame:
    """Return right rows in the first spans of all left ones that they may meet."""
    span = _span(_at(right), bound)
    return _spread(rows, [span, span - bound.width])


def _join_spans(one: DataFrame, other: DataFrame, sides: tuple[Side, Side], bound: Bound, how: str) -> DataFrame:
    left, right = sides
    pairs = [
        named_column(_side_column(left, a)) == named_column(_side_column(right, b))
        for a, b in zip(left.keys, right.keys, strict=True)
    ]
    one, other = one.withColumnRenamed(_SPAN, "__one"), other.withColumnRenamed(_SPAN, "__other")
    pairs += [named_column("__one") == named_column("__other")]
    near = (_at(right) >= _at(left) - bound.before) & (_at(right) <= _at(left) + bound.after)
    return one.join(other.hint("merge"), reduce(and_, [*pairs, near]), how).drop("__one", "__other")


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
    takes_partition_by: ClassVar[bool] = True
    diverts_late_records: ClassVar[bool] = True
    assigns_positions: ClassVar[bool] = True
    name: str
    on: tuple[tuple[str, str], ...]
    partition_by: tuple[str, ...]
    before: timedelta
    after: timedelta
    how: HowStreams
    select: tuple[SelectedColumn, ...] | None
    prefix: str = ""

    @property
    def bound(self) -> Bound:
        """Which times meet."""
        return Bound(self.before // _MICROSECOND, self.after // _MICROSECOND)

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def states(self) -> Sequence[str]:
        return (f"{self.name}-left", f"{self.name}-right")

    @property
    def watermark_delay(self) -> timedelta:
        """A row that has met nothing comes out when its last partner's time has passed."""
        left = self.after if self._outer("left") else timedelta(0)
        return max(left, self.before if self._outer("right") else timedelta(0))

    @property
    def record_retention(self) -> timedelta:
        return self.before + self.after + _MICROSECOND

    def summary(self) -> str:
        on = ", ".join(left if left == right else f"{left} = {right}" for left, right in self.on)
        return f"{self.how} join on {on}, from {self.before} before to {self.after} after"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return [Requirement(None, None, partition_columns) for partition_columns in self._partition_columns]

    @property
    def _partition_columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns by which the left and the right stream lie."""
        theirs = dict(self.on)
        return self.partition_by, tuple(theirs[name] for name in self.partition_by)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        left, right = arriving
        to_left = {theirs: ours for ours, theirs in self.on}
        renamed = tuple(to_left.get(name, name) for name in right.partitioned_by)
        together = merge_flows(context, [left, replace(right, partitioned_by=renamed)])
        return replace(together, columns=self._columns(context.operator, left.columns, right.columns))

    def selection(self, columns: Sequence[str]) -> tuple[SelectedColumn, ...]:
        """Return what is taken of a right side with these columns."""
        if self.select is not None:
            return self.select
        keys = {theirs for _, theirs in self.on}
        return tuple(SelectedColumn(name, self.prefix + name) for name in columns if name not in keys)

    def _columns(self, operator: str, left: Columns, right: Columns) -> Columns:
        require_columns(operator, "the left stream", tuple(a for a, _ in self.on), left, "Correct on=.")
        require_columns(operator, "the right stream", tuple(b for _, b in self.on), right, "Correct on=.")
        if self.select is not None:
            require_columns(
                operator, "the right stream", tuple(item.column for item in self.select), right, "Correct select=."
            )
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
        check_new_names(operator, added, "Rename one with 'column as name'.")
        return None if left is None else (*left, *added)

    def compared_columns(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        left, right = (types or {} for types in arriving)
        return [ComparedColumn(a, left.get(a), f"{b!r} of the right stream", right.get(b)) for a, b in self.on]

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        left, right = arriving
        if left is not None:
            check_state_columns(context.operator, left, left, [a for a, _ in self.on])
        if right is None:
            return None
        added = [chosen.column for chosen in self.selection(tuple(right))]
        check_state_columns(context.operator, right, added, [b for _, b in self.on])
        if left is None:
            return None
        return left | {chosen.name: right.get(chosen.column) for chosen in self.selection(tuple(right))}

    def column_sources(self, context: LineageContext, arriving: Sequence[ColumnSources]) -> ColumnSources:
        left, right = arriving
        chosen = self.selection(tuple(right))
        return left | {selected.name: right[selected.column] for selected in chosen if selected.column in right}

    # -- the batch

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        sides, added = self._sides(operator, frames)
        watermarks = batch.watermarks(self.name)
        taken = [
            self._taken(operator, frame, side, watermarks, batch) for frame, side in zip(frames, sides, strict=True)
        ]
        rows = [self._kept(operator, frame, side, watermarks, batch) for frame, side in zip(taken, sides, strict=True)]
        left, right = rows
        since = None if watermarks.before is None else to_microseconds(watermarks.before)
        parts = [match_rows(left, right, sides, self.bound, since)]
        outer = [(frame, side) for frame, side in zip(taken, sides, strict=True) if side.outer]
        if watermarks.after is not None:
            parts += [find_unmatched(left, right, sides, self.bound, side, watermarks) for _, side in outer]
        parts += [unmatchable_results(frame, side) for frame, side in outer]
        results = combine_results(parts, sides, [dict(frame.dtypes) for frame in frames], added)
        conditions = {"matched": F.col(KIND) == BOTH, "unmatched": F.col(KIND) != BOTH}
        results = batch.count_records(operator, results, conditions)
        return self._made(operator, results, batch)

    def _sides(self, operator: str, frames: Sequence[DataFrame]) -> tuple[tuple[Side, Side], Sequence[SelectedColumn]]:
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
        check_state_columns(operator, types[0], own[0], [a for a, _ in self.on])
        check_state_columns(operator, types[1], [selected.column for selected in chosen], [b for _, b in self.on])
        keys = [tuple(pair[number] for pair in self.on) for number in (0, 1)]
        added = tuple(dict.fromkeys(item.column for item in chosen if item.column not in keys[1]))
        bound = self.bound
        partition_columns = self._partition_columns
        left = Side("left", keys[0], partition_columns[0], tuple(own[0]), self._outer("left"), bound.after)
        right = Side("right", keys[1], partition_columns[1], (*keys[1], *added), self._outer("right"), bound.before)
        return (left, right), chosen

    def _outer(self, side: str) -> bool:
        return self.how in (side, "full")

    def _taken(
        self, operator: str, frame: DataFrame, side: Side, watermarks: Watermarks, batch: BatchContext
    ) -> DataFrame:
        """Return the judged records of one side; what is left out is handed over where somebody wants it."""
        frame = classify_join_records(frame, side, watermarks, self.record_retention // _MICROSECOND)
        late = batch.has_late_consumer(operator)
        if side.outer or late:  # they are read more than once
            frame = batch.materialize(operator, frame)
        if late:
            gone = frame.where(F.col(EXCLUSION).isin(LATE, *(() if side.outer else UNMATCHABLE)))
            batch.divert_late_records(
                operator, to_late_records(gone, F.col(EXCLUSION), self.watermark_delay, side.name)
            )
        return frame

    def _kept(
        self, operator: str, frame: DataFrame, side: Side, watermarks: Watermarks, batch: BatchContext
    ) -> DataFrame:
        """Keep the records of one side; return all rows of it that are kept."""
        counts = {
            LATE: LATE,
            REPLAYED_REASON: REPLAYED_REASON,
            NULL_TIME: "null_times",
            NULL_KEY: "null_keys",
            DELETED: "tombstones",
        }
        conditions = {name: F.col(EXCLUSION) == why for why, name in counts.items()}
        counted = batch.count_records(operator, frame, conditions | {side.name: F.col(EXCLUSION).isNull()})
        rows = select_kept_records(counted, side, self._needed(side), batch)
        own = Schema.from_spark(frame.select(*[named_column(name) for name in side.columns]).schema)
        more = (Field(RECORD, "string"), Field(AT, "timestamp"), Field(EXPIRES, "timestamp"))
        spec = StateSpec(
            schema=Schema((*own.fields, *more)),
            key=(*side.keys, RECORD),
            partition_by=side.partition_columns,
            partitions=batch.partitions_at(operator),
            expires=EXPIRES,
            append_only=True,
            kept_for=self.summary(),
        )
        table = batch.state(f"{self.name}-{side.name}", spec, of=self.name)
        table.write(rows, partitioned=True)
        return table.with_written()

    def _needed(self, side: Side) -> int:
        """Return how long a row is needed from its time on: while partners may come, and while one is judged."""
        bound = self.bound
        judges = self._outer("right" if side.name == "left" else "left")
        return (bound.before + bound.after if judges else side.ahead) + 1

    def _made(self, operator: str, results: DataFrame, batch: BatchContext) -> DataFrame:
        partitions, by = batch.partitions_at(operator), self.partition_by
        made = make_records(
            results,
            batch,
            by=by,
            partitions=partitions,
            ordinal=F.concat_ws("|", F.col(KIND), F.col(FIRST), F.col(SECOND)),
            event_time=F.timestamp_micros(F.col(TIME)),
            behind=hold_back_watermark(F.col(LIMIT), F.col(TIME), self.watermark_delay),
        )
        partition_columns = batch.required_partitioning(operator)
        if not partition_columns:
            return made
        # Where Spark sees that they lie so, it leaves this out; of a single partition it never sees it.
        return (
            made.repartition(partitions, *map(named_column, partition_columns)) if partitions > 1 else made.coalesce(1)
        )


Within: TypeAlias = timedelta | tuple[timedelta, timedelta]
_JOIN_KINDS = ("inner", "left", "right", "full")


def checked_stream_join(
    operator: str,
    name: str,
    on: On,
    within: Within,
    how: HowStreams,
    select: Sequence[str] | None,
    prefix: str,
    partition_by: str | Sequence[str] | None,
) -> StreamJoin:
    """Return the join that a user's arguments ask for; `operator` is the id that it will have."""
    check_name("stream join", name)
    if how not in _JOIN_KINDS:
        problem = f"{operator} has how={how!r}: expected {', '.join(_JOIN_KINDS[:-1])} or {_JOIN_KINDS[-1]}."
        raise PlanningError(problem, "Choose one of them.", operator=operator)
    before, after = _validate_within(operator, within)
    if isinstance(on, Mapping):
        pairs = tuple((str(left), str(right)) for left, right in on.items())
    else:
        pairs = tuple((column, column) for column in validate_column_names(f"{operator}: on=", on))
    if not pairs:
        raise ConfigurationError(
            f"{operator}: on= names no column.", "Name what is equal in both streams.", argument="on", operator=operator
        )
    validate_column_names(f"{operator}: on=", [right for _, right in pairs])
    key = tuple(left for left, _ in pairs)
    partition_columns = (
        key if partition_by is None else validate_column_names(f"{operator}: partition_by=", partition_by)
    )
    if not partition_columns or set(partition_columns) - set(key):
        raise ConfigurationError(
            f"{operator} has partition_by={partition_by!r}: expected some of this stream's columns in on= "
            f"({', '.join(key)}).",
            "Name columns of the key, so that all records of a key lie together; or leave it out for all of them.",
            argument="partition_by",
            operator=operator,
        )
    return StreamJoin(
        name, pairs, partition_columns, before, after, how, parse_selection(operator, select, prefix), prefix
    )


def _validate_within(operator: str, within: Within) -> tuple[timedelta, timedelta]:
    bound = within if isinstance(within, tuple) else (within, within)
    if len(bound) != 2 or not all(
        isinstance(distance, timedelta) and timedelta(0) <= distance <= MAX_DURATION for distance in bound
    ):
        raise ConfigurationError(
            f"{operator} has within={within!r}: expected a timedelta, or two (before, after), none below 0, and of 100 "
            "years at most.",
            "Write how far apart the times may be: within=timedelta(minutes=10), say; or (before, after) of the left "
            "record's time.",
            argument="within",
            operator=operator,
        )
    return bound[0], bound[1]

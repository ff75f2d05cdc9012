"""`StreamJoin`, which joins records of two streams whose times are close. Rows are stored while
matches may arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.local_table import StateSpec
from dagster_adjunct.orchestration.operators import joins
from dagster_adjunct.orchestration.operators.columns import (
    AT,
    BEHIND,
    EVENT_TIME,
    EXPIRES,
    MAX_DURATION,
    RECORD,
    STATE_COLUMNS,
    check_added_names,
    check_duration,
    check_state_columns,
    require_columns,
    validate_column_names,
    validate_partition_by,
)
from dagster_adjunct.orchestration.operators.event_time import (
    EXCLUSION,
    LATE,
    MAX_MICROS,
    NULL_KEY,
    NULL_TIME,
    Watermarks,
    exclusion_column,
    exclusion_conditions,
    hold_back_watermark,
    make_records,
    position_key,
    stored_position_key,
    to_late_records,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Flow,
    PlanContext,
    Requirement,
    Spec,
    check_equal_types,
    merge_flows,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.step.batch import BatchContext


UNMATCHABLE = (NULL_TIME, NULL_KEY)
"""Values of EXCLUSION for records that can have no match: outer joins emit them."""
NEW = "__new"
KIND, FIRST, SECOND, TIME = "__kind", "__first", "__second", "__time"
"""Columns of a result: the sides of which it has a row ("both", "left", "right"); the unique keys
of these one or two rows; its event time, in microseconds."""
LIMIT = "__limit"
"""The watermark that a result is behind, if it is made of a late record, which can have no
match; else null.
"""
BOTH = "both"
_SPAN = "__span"


@dataclass(frozen=True, slots=True)
class Bound:
    """The times that match, in microseconds: left - before <= right <= left + after."""

    before: int
    after: int

    @property
    def width(self) -> int:
        """The length of a span in microseconds, at least 1.

        Time is divided into spans of this length, so that the matches of a row are in at most two
        of them.
        """
        return max(self.before + self.after, 1)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the join: its name ("left", "right"), its key columns, the ones among them that
    it is partitioned by, and all columns that are stored of it.

    If `outer`, rows without a match are emitted. A match may be up to `ahead` microseconds later
    than its row.
    """

    name: str
    keys: tuple[str, ...]
    partition_columns: tuple[str, ...]
    columns: tuple[str, ...]
    outer: bool
    ahead: int

    def prefixed(self, name: str) -> str:
        """Return the name that a column of this side has in rows of both sides."""
        return f"__{self.name}_{name}"

    def column(self, name: str) -> Column:
        """Return a column of this side in rows of both sides."""
        return named_column(self.prefixed(name))


def unmatchable_results(frame: DataFrame, side: Side) -> DataFrame:
    """Return a result for each record of this side that can have no match; `frame` has the
    column EXCLUSION.
    """
    return frame.where(F.col(EXCLUSION).isin(*UNMATCHABLE)).select(
        *[named_column(name).alias(side.prefixed(name)) for name in side.columns],
        F.lit(side.name).alias(KIND),
        position_key(frame).alias(FIRST),
        F.lit("apart").alias(SECOND),
        F.unix_micros(EVENT_TIME).alias(TIME),
        F.col(BEHIND).alias(LIMIT),
    )


def match_rows(
    left: DataFrame, right: DataFrame, sides: tuple[Side, Side], bound: Bound, since: int | None
) -> DataFrame:
    """Return the pairs that a batch adds: its new left rows with all right rows, and its new right
    rows with older left rows.

    `since`, in microseconds, is a time that no new row is earlier than, so that older rows can be
    skipped.
    """
    one, other = sides
    lefts, rights = _prefix_columns(left, one), _prefix_columns(right, other)
    if since is not None:
        lefts = lefts.where(one.column(AT) >= since - bound.after)
        rights = rights.where(other.column(AT) >= since - bound.before)
    new_left = _add_spans(lefts.where(one.column(NEW)), one, bound, both=True)
    new_right = _add_spans(rights.where(other.column(NEW)), other, bound, both=True)
    old_left = _add_spans(lefts.where(~one.column(NEW)), one, bound)
    pairs = _join_spans(new_left, _add_spans(rights, other, bound), sides, bound, "inner")
    pairs = pairs.unionByName(_join_spans(old_left, new_right, sides, bound, "inner"))
    time = F.greatest(one.column(AT), other.column(AT))
    return pairs.withColumns(
        {KIND: F.lit(BOTH), FIRST: one.column(RECORD), SECOND: other.column(RECORD), TIME: time}
    )


def find_unmatched(
    left: DataFrame,
    right: DataFrame,
    sides: tuple[Side, Side],
    bound: Bound,
    of: Side,
    watermarks: Watermarks,
) -> DataFrame:
    """Return results for the rows of the side `of` without a match whose latest possible match the
    watermark has passed in this batch."""
    assert watermarks.after is not None, "nothing has passed"
    other = sides[1] if of is sides[0] else sides[0]
    rows = {
        side.name: _prefix_columns(frame, side)
        for side, frame in zip(sides, (left, right), strict=True)
    }
    # The latest match is `ahead` later than the row.
    until = to_microseconds(watermarks.after) - of.ahead
    passed, near = of.column(AT) < F.lit(until), other.column(AT) <= until + of.ahead
    if watermarks.before is not None:
        since = to_microseconds(watermarks.before) - of.ahead
        passed, near = (
            passed & (of.column(AT) >= F.lit(since)),
            near & (other.column(AT) >= since - other.ahead),
        )
    mine = _add_spans(rows[of.name].where(passed), of, bound)
    theirs = _add_spans(rows[other.name].where(near), other, bound, both=True)
    alone = _join_spans(mine, theirs, sides, bound, "left_anti")
    return alone.withColumns(
        {KIND: F.lit(of.name), FIRST: of.column(RECORD), SECOND: F.lit(""), TIME: of.column(AT)}
    )


def combine_results(
    parts: Sequence[DataFrame],
    sides: tuple[Side, Side],
    types: Sequence[dict[str, str]],
    added: Sequence[joins.SelectedColumn],
) -> DataFrame:
    """Return the union of all results, with the left columns and the columns `added` of the right
    side.

    Columns of a side without a row are null, except for the key: the left key columns have it from
    either side. `types` are the types of both inputs' columns.
    """
    left, right = sides
    right_keys = dict(zip(left.keys, right.keys, strict=True))

    def combine(part: DataFrame) -> DataFrame:
        there = set(part.columns)

        def value(side: Side, name: str, kind: str) -> Column:
            return side.column(name) if side.prefixed(name) in there else F.lit(None).cast(kind)

        columns = []
        for name in left.columns:
            from_right = name in right_keys and left.prefixed(name) not in there
            side, source = (right, right_keys[name]) if from_right else (left, name)
            columns.append(value(side, source, types[0][name]).alias(name))
        columns += [
            value(right, selected.column, types[1][selected.column]).alias(selected.name)
            for selected in added
        ]
        limit = F.col(LIMIT) if LIMIT in there else F.lit(None).cast("timestamp").alias(LIMIT)
        return part.select(*columns, *map(F.col, (KIND, FIRST, SECOND, TIME)), limit)

    return reduce(lambda one, other: one.unionByName(other), map(combine, parts))


def _prefix_columns(rows: DataFrame, side: Side) -> DataFrame:
    """Return stored rows with prefixed column names, which the other side does not have, and AT
    in microseconds.
    """
    named = [named_column(name).alias(side.prefixed(name)) for name in (*side.columns, RECORD, NEW)]
    return rows.select(*named, F.unix_micros(named_column(AT)).alias(side.prefixed(AT)))


def _add_spans(rows: DataFrame, side: Side, bound: Bound, *, both: bool = False) -> DataFrame:
    """Return the rows with the start of a span in `_SPAN`; with `both`, each row twice, with two
    adjacent spans.

    A right row's one span is that of its own time; a left row's one span is that of its earliest
    possible match, whose latest is in that span or the next. So of the rows that are joined, one
    side must have both spans.
    """
    time, width = side.column(AT), bound.width
    time, width = (time - bound.before, width) if side.name == "left" else (time, -width)
    first = time - F.pmod(time, F.lit(bound.width))
    return rows.withColumn(_SPAN, F.explode(F.array(first, first + width)) if both else first)


def _join_spans(
    one: DataFrame, other: DataFrame, sides: tuple[Side, Side], bound: Bound, how: str
) -> DataFrame:
    left, right = sides
    pairs = [left.column(a) == right.column(b) for a, b in zip(left.keys, right.keys, strict=True)]
    one, other = one.withColumnRenamed(_SPAN, "__one"), other.withColumnRenamed(_SPAN, "__other")
    pairs.append(named_column("__one") == named_column("__other"))
    distance = right.column(AT) >= left.column(AT) - bound.before
    distance = distance & (right.column(AT) <= left.column(AT) + bound.after)
    return one.join(other.hint("merge"), reduce(and_, [*pairs, distance]), how).drop(
        "__one", "__other"
    )


HowStreams = Literal["inner", "left", "right", "full"]
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class StreamJoin(Spec):
    """Pairs of a left and a right record with equal keys; the right one is at most `before` earlier
    or `after` later.

    `on` has pairs (left column, right column). `partition_by` names the left columns of these pairs
    by which both streams are partitioned. `select` None means all columns of the right side except
    its key, with `prefix` before their names. `name` begins the names of the state tables.
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
    select: tuple[joins.SelectedColumn, ...] | None
    prefix: str = ""

    @property
    def bound(self) -> Bound:
        """`before` and `after` in microseconds."""
        return Bound(self.before // _MICROSECOND, self.after // _MICROSECOND)

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def states(self) -> Sequence[str]:
        return (f"{self.name}-left", f"{self.name}-right")

    @property
    def watermark_delay(self) -> timedelta:
        # A row without a match is emitted when the time of its latest possible match has passed.
        left, right = self.after * self._is_outer("left"), self.before * self._is_outer("right")
        return max(left, right)

    @property
    def record_retention(self) -> timedelta:
        return self.before + self.after + _MICROSECOND

    def summary(self) -> str:
        return (
            f"{self.how} join on {joins.describe_on(self.on)}, from {self.before} before to"
            f" {self.after} after"
        )

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return [
            Requirement(None, None, partition_columns)
            for partition_columns in self._partition_columns
        ]

    @property
    def _partition_columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns that the left and the right stream are partitioned by."""
        right = dict(self.on)
        return self.partition_by, tuple(right[name] for name in self.partition_by)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        left, right = arriving
        to_left = {theirs: ours for ours, theirs in self.on}
        renamed = tuple(to_left.get(name, name) for name in right.partitioned_by)
        return merge_flows(context, [left, replace(right, partitioned_by=renamed)])

    def selection(self, columns: Sequence[str]) -> tuple[joins.SelectedColumn, ...]:
        """Return the columns to add, for a right side with these columns."""
        return joins.select_columns(self.select, self.on, self.prefix, columns)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        left, right = arriving
        operator, left_keys, right_keys = (
            context.operator,
            [a for a, _ in self.on],
            [b for _, b in self.on],
        )
        require_columns(operator, "the left stream", tuple(left_keys), left.names, "Correct on=.")
        require_columns(
            operator, "the right stream", tuple(right_keys), right.names, "Correct on=."
        )
        chosen = self.selection(tuple(right.known))
        taken = [item.column for item in chosen]
        require_columns(operator, "the right stream", tuple(taken), right.names, "Correct select=.")
        if right.complete or self.select is not None:
            check_added_names(
                operator, left.names, [item.name for item in chosen], "the right stream", "right"
            )
        if left.types is not None:
            check_state_columns(operator, left.types, left.known, left_keys)
        if right.types is not None:
            check_state_columns(operator, right.types, taken, right_keys)
        own, theirs = left.types or {}, right.types or {}
        compared = [
            ComparedColumn(a, own.get(a), f"{b!r} of the right stream", theirs.get(b))
            for a, b in self.on
        ]
        check_equal_types(operator, compared)
        context.compared.extend(compared)
        made = left.add(
            {item.name: right.known.get(item.column, ColumnFacts()) for item in chosen},
            typed=right.types is not None,
        )
        return made if right.complete or self.select is not None else replace(made, complete=False)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        sides, added = self._sides(operator, frames, batch)
        watermarks = batch.watermarks(self.name)
        classified = [
            self._classify(operator, frame, side, watermarks, batch)
            for frame, side in zip(frames, sides, strict=True)
        ]
        left, right = (
            self._store(operator, frame, side, batch)
            for frame, side in zip(classified, sides, strict=True)
        )
        since = None if watermarks.before is None else to_microseconds(watermarks.before)
        parts = [match_rows(left, right, sides, self.bound, since)]
        outer = [(frame, side) for frame, side in zip(classified, sides, strict=True) if side.outer]
        if watermarks.after is not None:
            parts += [
                find_unmatched(left, right, sides, self.bound, side, watermarks)
                for _, side in outer
            ]
        parts += [unmatchable_results(frame, side) for frame, side in outer]
        results = combine_results(parts, sides, [dict(frame.dtypes) for frame in frames], added)
        conditions = {"matched": F.col(KIND) == BOTH, "unmatched": F.col(KIND) != BOTH}
        results = batch.count_records(operator, results, conditions)
        partitions = batch.partitions_at(operator)
        records = make_records(
            results,
            batch,
            by=self.partition_by,
            partitions=partitions,
            ordinal=F.concat_ws("|", F.col(KIND), F.col(FIRST), F.col(SECOND)),
            event_time=F.timestamp_micros(F.col(TIME)),
            behind=hold_back_watermark(F.col(LIMIT), F.col(TIME), self.watermark_delay),
        )
        required = batch.required_partitioning(operator)
        if not required:
            return records
        # Spark omits this exchange if it knows the partitioning, which it never does for a single
        # partition.
        return (
            records.repartition(partitions, *map(named_column, required))
            if partitions > 1
            else records.coalesce(1)
        )

    def _sides(
        self, operator: str, frames: Sequence[DataFrame], batch: BatchContext
    ) -> tuple[tuple[Side, Side], Sequence[joins.SelectedColumn]]:
        """Return both sides, and the columns that the right one adds; of these and its key its
        stored rows consist.
        """
        self.check_frames(operator, frames, batch.app)
        own = [[name for name in frame.columns if not name.startswith("__")] for frame in frames]
        chosen = self.selection(own[1])
        left_keys, right_keys = tuple(a for a, _ in self.on), tuple(b for _, b in self.on)
        added = tuple(
            dict.fromkeys(item.column for item in chosen if item.column not in right_keys)
        )
        bound, (left_by, right_by) = self.bound, self._partition_columns
        left = Side("left", left_keys, left_by, tuple(own[0]), self._is_outer("left"), bound.after)
        right = Side(
            "right",
            right_keys,
            right_by,
            (*right_keys, *added),
            self._is_outer("right"),
            bound.before,
        )
        return (left, right), chosen

    def _is_outer(self, side: str) -> bool:
        return self.how in (side, "full")

    def _classify(
        self,
        operator: str,
        frame: DataFrame,
        side: Side,
        watermarks: Watermarks,
        batch: BatchContext,
    ) -> DataFrame:
        """Return the records of one side with EXCLUSION, and pass the rejected ones on if an
        operator reads them.

        Those are late records and, unless the join emits them as unmatched, records without a time
        or key. A time is taken for null if the record would be retained after the year 9999.
        Whether a record is late depends only on the records before it in its own partition, and so
        not on how batches are cut; only where idle partitions were not waited for, the watermark at
        the start of the batch is higher.
        """
        time, is_late = F.unix_micros(EVENT_TIME), F.col(BEHIND).isNotNull()
        if watermarks.before is not None:
            is_late = is_late | (time < F.lit(to_microseconds(watermarks.before)))
        null_time = time.isNull() | (time > MAX_MICROS - self.record_retention // _MICROSECOND)
        frame = frame.withColumn(EXCLUSION, exclusion_column(frame, side.keys, null_time, is_late))
        has_late_consumer = batch.has_late_consumer(operator)
        if side.outer or has_late_consumer:  # the records are read more than once
            frame = batch.materialize(operator, frame)
        if has_late_consumer:
            why = F.col(EXCLUSION)
            late = frame.where(why.isin(LATE, *(() if side.outer else UNMATCHABLE)))
            batch.divert_late_records(
                operator, to_late_records(late, why, self.watermark_delay, side.name)
            )
        return frame

    def _store(self, operator: str, frame: DataFrame, side: Side, batch: BatchContext) -> DataFrame:
        """Add the records of one side to its state table; return all rows of the table, with
        NEW.
        """
        conditions = exclusion_conditions() | {side.name: F.col(EXCLUSION).isNull()}
        counted = batch.count_records(operator, frame, conditions)
        # A row is needed while matches may arrive; if the other side is outer, until its rows
        # within reach are decided.
        is_outer = self._is_outer("right" if side.name == "left" else "left")
        needed = (self.bound.before + self.bound.after if is_outer else side.ahead) + 1
        columns = [named_column(name) for name in side.columns]
        rows = counted.where(F.col(EXCLUSION).isNull()).select(
            *columns,
            stored_position_key(counted, batch).alias(RECORD),
            F.col(EVENT_TIME).alias(AT),
            F.timestamp_micros(F.unix_micros(EVENT_TIME) + F.lit(needed)).alias(EXPIRES),
        )
        own = Schema.from_spark(frame.select(*columns).schema)
        more = (Field(name, STATE_COLUMNS[name]) for name in (RECORD, AT, EXPIRES))
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


Within: TypeAlias = timedelta | tuple[timedelta, timedelta]


def build_stream_join(
    operator: str,
    name: str,
    on: joins.On,
    within: Within,
    how: HowStreams,
    select: Sequence[str] | None,
    prefix: str,
    partition_by: str | Sequence[str] | None,
) -> StreamJoin:
    """Return the join for a user's arguments; `operator` is its id."""
    check_name("stream join", name)
    bound = within if isinstance(within, tuple) else (within, within)
    for distance in bound:
        found = f"{operator} has within"
        check_duration(
            distance, found, argument="within", zero=True, most=MAX_DURATION, operator=operator
        )
    pairs = joins.parse_on(operator, on)
    if not pairs:
        expected = "the columns that are equal in both streams"
        raise argument_error(
            f"{operator}: on= names no column", expected, argument="on", operator=operator
        )
    validate_column_names(f"{operator}: on=", [right for _, right in pairs])
    by = validate_partition_by(operator, partition_by, tuple(left for left, _ in pairs), "on")
    return StreamJoin(
        name, pairs, by, *bound, how, joins.parse_selection(operator, select, prefix), prefix
    )

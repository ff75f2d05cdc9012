"""`StreamJoin`, which joins records of two streams whose times are close. Rows are stored while
matches may arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from dagster_adjunct.assets.unbounded.local_table import StateSpec
from dagster_adjunct.orchestration.operators import joins
from dagster_adjunct.orchestration.operators.batch import SparkBatch
from dagster_adjunct.orchestration.operators.columns import (
    AT,
    BEHIND,
    EVENT_TIME,
    EXPIRES,
    RECORD,
    STATE_COLUMNS,
    check_duration,
    check_state_columns,
    is_own,
    validate_column_names,
    validate_partition_by,
)
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS
from dagster_adjunct.orchestration.operators.lookups import SelectedColumn
from dagster_adjunct.orchestration.operators.made_records import (
    EXCLUSION,
    LATE,
    NULL_KEY,
    NULL_TIME,
    exclusion_column,
    exclusion_conditions,
    hold_back_watermark,
    make_records,
    position_key,
    stored_position_key,
    to_late_records,
)
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    PlanContext,
    Requirement,
    Spec,
    Watermarks,
    check_equal_types,
    merge_flows,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnFacts,
    Columns,
    DeclaredApplication,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.paths import split_path
from dagster_adjunct.resources.schemas.schema import (
    Field,
    Schema,
    Steps,
    copy_name,
    named_column,
    value_column,
)
from dagster_adjunct.resources.schemas.types import Struct, Type, parse_type
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


UNMATCHABLE = (NULL_TIME, NULL_KEY)
"""Values of EXCLUSION for records that can have no match: outer joins emit them."""
NEW = "__new"
"""Whether a stored row was written by this batch (`StateRows.with_written`)."""
KIND = "__kind"
FIRST = "__first"
SECOND = "__second"
TIME = "__time"
"""Columns of a result: the sides of which it has a row ("both", "left", "right"); the unique keys
of these one or two rows; its event time, in microseconds."""
LIMIT = "__limit"
"""The watermark that a result is behind, if it is made of a late record, which can have no
match; else null.
"""
BOTH = "both"
"""The KIND of a result with rows of both sides."""
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
    """One side of the join: its name ("left", "right"), the columns of its key, those of them by
    which it is partitioned, and the columns, or values in columns, that are stored of its records.

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

    def values(self, frame: DataFrame) -> list[tuple[str, Column]]:
        """Return what is stored of records of this side: names of columns, each with the value."""
        return [(name, value_column(frame.columns, name)) for name in self.columns]


Sides: TypeAlias = tuple[Side, Side]
"""The left and the right side."""


def unmatchable_results(frame: DataFrame, side: Side) -> DataFrame:
    """Return a result for each record of this side that can have no match; `frame` has the
    column EXCLUSION.
    """
    return frame.where(F.col(EXCLUSION).isin(*UNMATCHABLE)).select(
        *[value.alias(side.prefixed(name)) for name, value in side.values(frame)],
        F.lit(side.name).alias(KIND),
        position_key(frame).alias(FIRST),
        F.lit("apart").alias(SECOND),  # it has no second row; "" is for those of `find_unmatched`
        F.unix_micros(EVENT_TIME).alias(TIME),
        F.col(BEHIND).alias(LIMIT),
    )


def match_rows(
    rows: Mapping[str, DataFrame], sides: Sides, bound: Bound, earliest: datetime | None
) -> DataFrame:
    """Return the pairs that a batch adds: its new left rows with all right rows, and its new right
    rows with older left rows.

    `rows` has the stored rows by the name of their side (`prefix_columns`). No new row is earlier
    than `earliest`, so that older rows can be skipped.
    """
    left, right = sides
    left_rows = rows[left.name]
    right_rows = rows[right.name]
    if earliest is not None:
        since = to_microseconds(earliest)
        left_rows = left_rows.where(left.column(AT) >= since - bound.after)
        right_rows = right_rows.where(right.column(AT) >= since - bound.before)
    new_left = _add_spans(left_rows.where(left.column(NEW)), left, bound, both=True)
    old_left = _add_spans(left_rows.where(~left.column(NEW)), left, bound)
    new_right = _add_spans(right_rows.where(right.column(NEW)), right, bound, both=True)
    all_right = _add_spans(right_rows, right, bound)
    pairs_of_new_left = _join_spans(new_left, all_right, sides, bound, "inner")
    pairs_of_old_left = _join_spans(old_left, new_right, sides, bound, "inner")
    time = F.greatest(left.column(AT), right.column(AT))
    return pairs_of_new_left.unionByName(pairs_of_old_left).withColumns(
        {KIND: F.lit(BOTH), FIRST: left.column(RECORD), SECOND: right.column(RECORD), TIME: time}
    )


def find_unmatched(
    rows: Mapping[str, DataFrame], sides: Sides, bound: Bound, of: Side, watermarks: Watermarks
) -> DataFrame:
    """Return results for the `rows` of the side `of` that have no match, and can have none any
    more: the watermark has passed their latest possible match in this batch.
    """
    assert watermarks.after is not None, "nothing has passed"
    left, right = sides
    if of is left:
        other = right
    else:
        other = left
    # The latest match is `ahead` later than the row. A row of the other side is near if it may
    # match a row that is passed in this batch.
    until = to_microseconds(watermarks.after) - of.ahead
    passed = of.column(AT) < F.lit(until)
    near = other.column(AT) <= until + of.ahead
    if watermarks.before is not None:
        since = to_microseconds(watermarks.before) - of.ahead
        passed = passed & (of.column(AT) >= F.lit(since))
        near = near & (other.column(AT) >= since - other.ahead)
    passed_rows = _add_spans(rows[of.name].where(passed), of, bound)
    near_rows = _add_spans(rows[other.name].where(near), other, bound, both=True)
    unmatched = _join_spans(passed_rows, near_rows, sides, bound, "left_anti")
    return unmatched.withColumns(
        {KIND: F.lit(of.name), FIRST: of.column(RECORD), SECOND: F.lit(""), TIME: of.column(AT)}
    )


def combine_results(
    parts: Sequence[DataFrame],
    sides: Sides,
    arriving: Sequence[Columns],
    added: Sequence[SelectedColumn],
) -> DataFrame:
    """Return the union of all results, with the left columns and the columns `added` of the right
    side. `arriving` are the columns of both inputs.

    Columns of a side without a row are null, except for the key. The left key columns have the key
    of either side. If the key is a value inside a left column, a result without a left row has a
    struct there with only this value.
    """
    left, right = sides
    left_columns, right_columns = arriving
    results: dict[str, _ResultColumn] = {}
    for name, column in left_columns.known.items():
        results[name] = _ResultColumn(column.type, [left.prefixed(name)])
    for left_key, right_key in zip(left.keys, right.keys, strict=True):
        other = right.prefixed(right_key)
        if left_key in results:
            results[left_key].places.append(other)
            continue
        places = [left.prefixed(left_key), other]
        key_type = left_columns.type_of(left_key)
        results[copy_name(left_key)] = _ResultColumn(key_type, places)
        column_name, *steps = split_path(left_key)
        results[column_name].inside[tuple(steps)] = other
    for item in added:
        places = [right.prefixed(item.column)]
        results[item.name] = _ResultColumn(right_columns.type_of(item.column), places)
    results[LIMIT] = _ResultColumn("timestamp", [LIMIT])

    def combine(part: DataFrame) -> DataFrame:
        """Return a part with the columns of the results."""
        existing = set(part.columns)
        columns = list(map(F.col, (KIND, FIRST, SECOND, TIME)))
        columns += [column.value(existing).alias(name) for name, column in results.items()]
        return part.select(*columns)

    return reduce(lambda one, other: one.unionByName(other), map(combine, parts))


@dataclass(frozen=True, slots=True)
class _ResultColumn:
    """A column of the results: its type, and the columns that it may be taken from, in this order.

    Where none of these exists, its value is a struct of the columns `inside`, by their steps, if
    all of these exist.
    """

    type: str | None
    places: list[str]
    inside: dict[Steps, str] = field(default_factory=dict)

    def value(self, existing: Collection[str]) -> Column:
        """Return the value in rows that have these columns; null if it is taken from none."""
        for place in self.places:
            if place in existing:
                return named_column(place)
        if self.inside and set(self.inside.values()) <= set(existing):
            return _struct_of(parse_type(str(self.type)), self.inside)
        return F.lit(None).cast(str(self.type))


def _struct_of(kind: Type, values: Mapping[Steps, str]) -> Column:
    """Return a struct of this type with the columns `values` at their steps, and nulls elsewhere;
    null if all these columns are null.
    """
    if () in values:
        return named_column(values[()])
    within: dict[str, dict[Steps, str]] = {}  # by member, the columns at the steps inside it
    for (step, *rest), column in values.items():
        within.setdefault(step, {})[tuple(rest)] = column
    assert isinstance(kind, Struct), "the planner checks the paths of keys"
    members = []
    for member in kind.members:
        if member.name in within:
            value = _struct_of(member.type, within[member.name])
        else:
            value = F.lit(None)
        members.append(value.cast(str(member.type)).alias(member.name))
    known = reduce(or_, [named_column(column).isNotNull() for column in values.values()])
    return F.when(known, F.struct(*members))


def prefix_columns(rows: DataFrame, side: Side) -> DataFrame:
    """Return stored rows with prefixed column names, which the other side does not have, and AT
    in microseconds.
    """
    named = [named_column(name).alias(side.prefixed(name)) for name in (*side.columns, RECORD, NEW)]
    return rows.select(*named, F.unix_micros(named_column(AT)).alias(side.prefixed(AT)))


def _add_spans(rows: DataFrame, side: Side, bound: Bound, *, both: bool = False) -> DataFrame:
    """Return the rows with the start of a span in `_SPAN`; with `both`, each row twice, with two
    adjacent spans.

    For a right row, the first span is that of its own time. For a left row, it is that of its
    earliest possible match; the latest possible match is in that span or the next. So two rows that
    match have a common span if the rows of one side have both spans.
    """
    if side.name == "left":
        time = side.column(AT) - bound.before
        next_span = bound.width
    else:
        time = side.column(AT)
        next_span = -bound.width
    spans = time - F.pmod(time, F.lit(bound.width))
    if both:
        spans = F.explode(F.array(spans, spans + next_span))
    return rows.withColumn(_SPAN, spans)


def _join_spans(
    one: DataFrame, other: DataFrame, sides: Sides, bound: Bound, how: str
) -> DataFrame:
    """Return the join of the rows of both sides (`_add_spans`), in any order, by equal keys and
    times within the bound.
    """
    left, right = sides
    one = one.withColumnRenamed(_SPAN, "__one")
    other = other.withColumnRenamed(_SPAN, "__other")
    conditions = []
    for left_key, right_key in zip(left.keys, right.keys, strict=True):
        conditions.append(left.column(left_key) == right.column(right_key))
    conditions.append(named_column("__one") == named_column("__other"))
    earliest = left.column(AT) - bound.before
    latest = left.column(AT) + bound.after
    conditions.append((right.column(AT) >= earliest) & (right.column(AT) <= latest))
    joined = one.join(other.hint("merge"), reduce(and_, conditions), how)
    return joined.drop("__one", "__other")


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
    diverts: ClassVar[str] = "late_records"
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
        delay = timedelta(0)
        if self._is_outer("left"):
            delay = self.after
        if self._is_outer("right"):
            delay = max(delay, self.before)
        return delay

    @property
    def record_retention(self) -> timedelta:
        return self.before + self.after + _MICROSECOND

    def summary(self) -> str:
        return (
            f"{self.how} join on {joins.describe_on(self.on)}, from {self.before} before to"
            f" {self.after} after"
        )

    def requirements(self, app: DeclaredApplication) -> Sequence[Requirement | None]:
        return [Requirement(None, None, columns) for columns in self._partition_columns]

    @property
    def _keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The key columns of the left and of the right stream."""
        right = dict(self.on)
        return tuple(right), tuple(right.values())

    @property
    def _partition_columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns that the left and the right stream are partitioned by."""
        right = dict(self.on)
        return self.partition_by, tuple(right[name] for name in self.partition_by)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        left, right = arriving
        to_left = {right_name: left_name for left_name, right_name in self.on}
        renamed = tuple(to_left.get(name, name) for name in right.partitioned_by)
        return merge_flows(context, [left, replace(right, partitioned_by=renamed)])

    def selection(self, columns: Sequence[str]) -> tuple[SelectedColumn, ...]:
        """Return the columns to add, for a right side with these columns."""
        return joins.select_columns(self.select, self.on, self.prefix, columns)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        left, right = arriving
        operator = context.operator
        left_keys, right_keys = self._keys
        side = "the right stream"
        left.require(operator, left_keys, "Correct on=.", side="the left stream")
        right.require(operator, right_keys, "Correct on=.", side=side)
        left.require_simple(operator, left_keys, "in on=")
        right.require_simple(operator, right_keys, "in on=")
        chosen = self.selection(tuple(right.known))
        chosen_columns = [item.column for item in chosen]
        right.require(operator, chosen_columns, "Correct select=.", side=side)
        added = {}
        for item in chosen:
            added[item.name] = right.find(item.column) or ColumnFacts()
        is_complete = right.complete or self.select is not None
        if is_complete:
            left.check_added(operator, added, side, "right")
        if left.types is not None:
            check_state_columns(operator, left.type_of, left.known, left_keys)
        if right.types is not None:
            check_state_columns(operator, right.type_of, chosen_columns, right_keys)
        compared = joins.compare_columns(self.on, left, right, side)
        check_equal_types(operator, compared)
        context.compared.extend(compared)
        joined = left.add(added, typed=right.types is not None)
        return replace(joined, complete=left.complete and is_complete)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        """Store the records of both sides; return the results that are decided in this batch."""
        self.check_columns(operator, map(batch.records.columns, frames), batch.planned.app)
        _, right_frame = frames
        added = self.selection(tuple(filter(is_own, right_frame.columns)))
        sides = self._sides(frames, added)
        watermarks = batch.state.watermarks(self.name)
        rows: dict[str, DataFrame] = {}
        unmatchable: list[DataFrame] = []
        for frame, side in zip(frames, sides, strict=True):
            classified = self._classify(operator, frame, side, watermarks, batch)
            rows[side.name] = self._store(operator, classified, side, batch)
            if side.outer:
                unmatchable.append(unmatchable_results(classified, side))
        parts = [match_rows(rows, sides, self.bound, watermarks.before)]
        for side in sides:
            if side.outer and watermarks.after is not None:
                parts.append(find_unmatched(rows, sides, self.bound, side, watermarks))
        parts += unmatchable
        arriving = list(map(batch.records.columns, frames))
        results = combine_results(parts, sides, arriving, added)
        conditions = {"matched": F.col(KIND) == BOTH, "unmatched": F.col(KIND) != BOTH}
        results = batch.records.count_records(operator, results, conditions)
        partitions = batch.planned.partitions_at(operator)
        records = make_records(
            results,
            batch.planned,
            by=self.partition_by,
            partitions=partitions,
            ordinal=F.concat_ws("|", F.col(KIND), F.col(FIRST), F.col(SECOND)),
            event_time=F.timestamp_micros(F.col(TIME)),
            behind=hold_back_watermark(F.col(LIMIT), F.col(TIME), self.watermark_delay),
        )
        required = batch.planned.required_partitioning(operator)
        if not required:
            return records
        # Spark omits this exchange if it knows the partitioning, which it never does for a single
        # partition.
        if partitions > 1:
            columns = [value_column(records.columns, name) for name in required]
            return records.repartition(partitions, *columns)
        return records.coalesce(1)

    def _sides(self, frames: Sequence[DataFrame], added: Sequence[SelectedColumn]) -> Sides:
        """Return both sides for these records: all columns of the left side are stored, and of the
        right side its key and the columns that it adds.
        """
        left_frame, _ = frames
        left_keys, right_keys = self._keys
        left_by, right_by = self._partition_columns
        left_stored = dict.fromkeys((*filter(is_own, left_frame.columns), *left_keys))
        right_stored = dict.fromkeys((*right_keys, *(item.column for item in added)))
        left = Side(
            name="left",
            keys=left_keys,
            partition_columns=left_by,
            columns=tuple(left_stored),
            outer=self._is_outer("left"),
            ahead=self.bound.after,
        )
        right = Side(
            name="right",
            keys=right_keys,
            partition_columns=right_by,
            columns=tuple(right_stored),
            outer=self._is_outer("right"),
            ahead=self.bound.before,
        )
        return (left, right)

    def _is_outer(self, side: str) -> bool:
        """Whether rows of this side without a match are emitted."""
        return self.how in (side, "full")

    def _classify(
        self, operator: str, frame: DataFrame, side: Side, watermarks: Watermarks, batch: SparkBatch
    ) -> DataFrame:
        """Return the records of one side with EXCLUSION, and pass the rejected ones on if an
        operator reads them.

        Those are late records and, unless the join emits them as unmatched, records without a time
        or key. A time is taken for null if the record would be retained after the year 9999.
        Whether a record is late depends only on the records before it in its own partition, and so
        not on how batches are cut; only where idle partitions were not waited for, the watermark at
        the start of the batch is higher.
        """
        time = F.unix_micros(EVENT_TIME)
        is_late = F.col(BEHIND).isNotNull()
        if watermarks.before is not None:
            is_late = is_late | (time < F.lit(to_microseconds(watermarks.before)))
        latest = MAX_MICROS - self.record_retention // _MICROSECOND
        has_no_time = time.isNull() | (time > latest)
        exclusion = exclusion_column(frame, side.keys, has_no_time, is_late)
        frame = frame.withColumn(EXCLUSION, exclusion)
        has_diverted_consumer = batch.planned.has_diverted_consumer(operator)
        if side.outer or has_diverted_consumer:  # the records are read more than once
            frame = batch.records.materialize(operator, frame)
        if has_diverted_consumer:
            rejected = [LATE]
            if not side.outer:
                rejected += UNMATCHABLE
            reason = F.col(EXCLUSION)
            diverted = frame.where(reason.isin(*rejected))
            late = to_late_records(diverted, reason, self.watermark_delay, side.name)
            batch.records.divert(operator, late)
        return frame

    def _store(self, operator: str, frame: DataFrame, side: Side, batch: SparkBatch) -> DataFrame:
        """Add the records of one side to its state table; return all rows of the table, with
        NEW (`prefix_columns`).
        """
        conditions = exclusion_conditions() | {side.name: F.col(EXCLUSION).isNull()}
        counted = batch.records.count_records(operator, frame, conditions)
        # A row is needed while matches may arrive; if the other side is outer, until its rows
        # within reach are decided. It still is when the watermark is at the end of its reach: + 1.
        is_other_outer = self.how not in ("inner", side.name)
        if is_other_outer:
            needed = self.bound.before + self.bound.after
        else:
            needed = side.ahead
        columns = [value.alias(name) for name, value in side.values(frame)]
        rows = counted.where(F.col(EXCLUSION).isNull()).select(
            *columns,
            stored_position_key(counted, batch.planned).alias(RECORD),
            F.col(EVENT_TIME).alias(AT),
            F.timestamp_micros(F.unix_micros(EVENT_TIME) + F.lit(needed + 1)).alias(EXPIRES),
        )
        of_records = Schema.from_spark(frame.select(*columns).schema)
        added_fields = [Field(name, STATE_COLUMNS[name]) for name in (RECORD, AT, EXPIRES)]
        spec = StateSpec(
            schema=Schema((*of_records.fields, *added_fields)),
            key=(*side.keys, RECORD),
            partition_by=side.partition_columns,
            partitions=batch.planned.partitions_at(operator),
            expires=EXPIRES,
            append_only=True,
            kept_for=self.summary(),
        )
        table = batch.state.table(f"{self.name}-{side.name}", spec, of=self.name)
        table.write(rows, partitioned=True)
        return prefix_columns(table.with_written(), side)


Within: TypeAlias = timedelta | tuple[timedelta, timedelta]
"""How far apart two times may be, or (before, after): how much earlier and later the right one is.
"""


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
    before, after = within if isinstance(within, tuple) else (within, within)
    for distance in (before, after):
        found = f"{operator} has within"
        check_duration(
            distance, found, argument="within", zero=True, limited=True, operator=operator
        )
    pairs = joins.parse_on(operator, on)
    if not pairs:
        found = f"{operator}: on= names no column"
        expected = "the columns that are equal in both streams"
        raise argument_error(found, expected, argument="on", operator=operator)
    validate_column_names(f"{operator}: on=", [right for _, right in pairs])
    left_columns = tuple(left for left, _ in pairs)
    return StreamJoin(
        name=name,
        on=pairs,
        partition_by=validate_partition_by(operator, partition_by, left_columns, "on"),
        before=before,
        after=after,
        how=how,
        select=joins.parse_selection(operator, select, prefix),
        prefix=prefix,
    )

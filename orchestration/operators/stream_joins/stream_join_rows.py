"""What a stream-stream join does to records: which of them count, which meet, and which have met none in time.

Rows of both sides are scanned where they are kept, those of the batch among them. Time is cut into spans as long as the
bound, so that a row is compared with those of two spans only, also where one key has most of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.hidden_columns import AGAIN, BEHIND, EVENT_TIME
from dagster_adjunct.orchestration.operators.event_times.event_time import LAST
from dagster_adjunct.orchestration.operators.event_times.made_records import place_in, place_of
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.joins.join_arguments import Selected
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext, Watermarks

WHY = "__why"
"""Why a record is not kept: one of the words below; null where it is."""
READ_AGAIN, DELETED, LATE, NULL_TIME, NULL_KEY = "again", "tombstone", "late", "null time", "null key"
APART = (NULL_TIME, NULL_KEY)
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
    lying: tuple[str, ...]
    columns: tuple[str, ...]
    outer: bool
    ahead: int


def judged(frame: DataFrame, side: Side, watermarks: Watermarks, keeps_for: int) -> DataFrame:
    """Return the records with WHY they are not kept; `keeps_for` microseconds must not lead out of the year 9999.

    A record's own partition decides whether it is late, up to the record alone: however batches were cut, it is the
    same. The watermark that the batch began with is above that only where idle partitions were not waited for.
    """
    from pyspark.sql import functions as F

    time = F.unix_micros(EVENT_TIME)
    late = F.col(BEHIND).isNotNull()
    if watermarks.before is not None:
        late = late | (time < F.lit(microseconds(watermarks.before)))
    no_key = reduce(lambda one, other: one | other, [column(name).isNull() for name in side.keys])
    reasons = [(F.col(AGAIN), READ_AGAIN)] if AGAIN in frame.columns else []
    reasons += [
        (F.col(TOMBSTONE), DELETED),
        (time.isNull() | (time > LAST - keeps_for), NULL_TIME),
        (no_key, NULL_KEY),
        (late, LATE),
    ]
    return frame.withColumn(WHY, F.coalesce(*[F.when(condition, F.lit(why)) for condition, why in reasons]))


def kept_rows(frame: DataFrame, side: Side, needed: int, batch: BatchContext) -> DataFrame:
    """Return the rows to keep of judged records; each is needed so many microseconds from its time on."""
    from pyspark.sql import functions as F

    expires = F.timestamp_micros(F.unix_micros(EVENT_TIME) + F.lit(needed))
    return frame.where(F.col(WHY).isNull()).select(
        *[column(name) for name in side.columns],
        place_in(frame, batch).alias(RECORD),
        F.col(EVENT_TIME).alias(AT),
        expires.alias(EXPIRES),
    )


def apart_rows(frame: DataFrame, side: Side) -> DataFrame:
    """Return results of the judged records that can meet nothing."""
    from pyspark.sql import functions as F

    named = [column(name).alias(_own(side, name)) for name in side.columns]
    return frame.where(F.col(WHY).isin(*APART)).select(
        *named,
        F.lit(side.name).alias(KIND),
        place_of(frame).alias(FIRST),
        F.lit("apart").alias(SECOND),
        F.unix_micros(EVENT_TIME).alias(TIME),
        F.col(BEHIND).alias(LIMIT),
    )


def matches(left: DataFrame, right: DataFrame, sides: tuple[Side, Side], bound: Bound, since: int | None) -> DataFrame:
    """Return the pairs that this batch makes: its new rows of the left with all of the right, and of the right with the
    older ones of the left. No new row is from before `since`."""
    from pyspark.sql import functions as F

    lefts, rights = (_named(rows, side) for rows, side in zip((left, right), sides, strict=True))
    if since is not None:
        lefts = lefts.where(_at(sides[0]) >= since - bound.after)
        rights = rights.where(_at(sides[1]) >= since - bound.before)
    new_left = _spread(lefts.where(_new(sides[0])), [_first_span(sides[0], bound), _next_span(sides[0], bound)])
    any_right = rights.withColumn(_SPAN, _span(_at(sides[1]), bound))
    old_left = lefts.where(~_new(sides[0])).withColumn(_SPAN, _first_span(sides[0], bound))
    met = [_met(new_left, any_right, sides, bound, "inner")]
    met += [_met(old_left, _spread_right(rights.where(_new(sides[1])), sides[1], bound), sides, bound, "inner")]
    both = [
        pairs.withColumns(
            {
                KIND: F.lit(BOTH),
                FIRST: F.col(_own(sides[0], RECORD)),
                SECOND: F.col(_own(sides[1], RECORD)),
                TIME: F.greatest(_at(sides[0]), _at(sides[1])),
            }
        )
        for pairs in met
    ]
    return both[0].unionByName(both[1])


def unmatched(
    left: DataFrame, right: DataFrame, sides: tuple[Side, Side], bound: Bound, of: Side, watermarks: Watermarks
) -> DataFrame:
    """Return the rows of one side that have met nothing when the watermark passed the last time of a partner."""
    from pyspark.sql import functions as F

    assert watermarks.after is not None, "nothing has passed"
    until = microseconds(watermarks.after) - of.ahead
    lefts, rights = (_named(rows, side) for rows, side in zip((left, right), sides, strict=True))
    since = None if watermarks.before is None else microseconds(watermarks.before) - of.ahead
    # A row's last partner is `ahead` later than it; the watermark has passed that where it is above.
    passed = _at(of) < F.lit(until)
    passed = passed if since is None else passed & (_at(of) >= F.lit(since))
    if of is sides[0]:
        spread = _spread_right(_around(rights, sides[1], since, until, bound.before, bound.after), sides[1], bound)
        alone = _met(lefts.where(passed).withColumn(_SPAN, _first_span(of, bound)), spread, sides, bound, "left_anti")
    else:
        near = _around(lefts, sides[0], since, until, bound.after, bound.before)
        spread = _spread(near, [_first_span(sides[0], bound), _next_span(sides[0], bound)])
        alone = _met(rights.where(passed).withColumn(_SPAN, _span(_at(of), bound)), spread, sides, bound, "left_anti")
    return alone.withColumns({KIND: F.lit(of.name), FIRST: F.col(_own(of, RECORD)), SECOND: F.lit(""), TIME: _at(of)})


def as_results(
    parts: Sequence[DataFrame], sides: tuple[Side, Side], types: Sequence[dict[str, str]], added: Sequence[Selected]
) -> DataFrame:
    """Return all results with the columns of the left and those `added` of the right, null where there is no row.

    The key stands in the columns of the left, whichever side it is of.
    """
    from pyspark.sql import functions as F

    left, right = sides
    results = []
    for part in parts:
        there = set(part.columns)

        def value(side: Side, name: str, kind: str, there: set[str] = there) -> Column:
            own = _own(side, name)
            return column(own) if own in there else F.lit(None).cast(kind)

        keys = dict(zip(left.keys, right.keys, strict=True))
        columns = []
        for name in left.columns:
            other = name in keys and _own(left, name) not in there
            key_value = value(right, keys[name], types[0][name]) if other else value(left, name, types[0][name])
            columns.append(key_value.alias(name))
        columns += [value(right, selected.column, types[1][selected.column]).alias(selected.name) for selected in added]
        limit = F.col(LIMIT) if LIMIT in there else F.lit(None).cast("timestamp").alias(LIMIT)
        results.append(part.select(*columns, *[F.col(name) for name in (KIND, FIRST, SECOND, TIME)], limit))
    return reduce(lambda one, other: one.unionByName(other), results)


# -- rows of one side


def _own(side: Side, name: str) -> str:
    return f"__{side.name}_{name}"


def _at(side: Side) -> Column:
    return column(_own(side, AT))


def _new(side: Side) -> Column:
    return column(_own(side, NEW))


def _named(rows: DataFrame, side: Side) -> DataFrame:
    """Return kept rows with names that the other side has not; their time in microseconds."""
    from pyspark.sql import functions as F

    named = [column(name).alias(_own(side, name)) for name in (*side.columns, RECORD, NEW)]
    return rows.select(*named, F.unix_micros(column(AT)).alias(_own(side, AT)))


def _around(rows: DataFrame, side: Side, since: int | None, until: int, earlier: int, later: int) -> DataFrame:
    """Return the rows that may meet others from `since` to `until`."""
    rows = rows.where(_at(side) <= until + later)
    return rows if since is None else rows.where(_at(side) >= since - earlier)


# -- spans of time


def _span(time: Column, bound: Bound) -> Column:
    """Return the begin of the span that a time is in."""
    from pyspark.sql import functions as F

    return time - F.pmod(time, F.lit(bound.width))


def _first_span(left: Side, bound: Bound) -> Column:
    """Return the span of the earliest partner of a left row; the latest one is in that or in the next."""
    return _span(_at(left) - bound.before, bound)


def _next_span(left: Side, bound: Bound) -> Column:
    return _first_span(left, bound) + bound.width


def _spread(rows: DataFrame, spans: Sequence[Column]) -> DataFrame:
    from pyspark.sql import functions as F

    return rows.withColumn(_SPAN, F.explode(F.array(*spans)))


def _spread_right(rows: DataFrame, right: Side, bound: Bound) -> DataFrame:
    """Return right rows in the first spans of all left ones that they may meet."""
    span = _span(_at(right), bound)
    return _spread(rows, [span, span - bound.width])


def _met(one: DataFrame, other: DataFrame, sides: tuple[Side, Side], bound: Bound, how: str) -> DataFrame:
    left, right = sides
    pairs = [column(_own(left, a)) == column(_own(right, b)) for a, b in zip(left.keys, right.keys, strict=True)]
    one, other = one.withColumnRenamed(_SPAN, "__one"), other.withColumnRenamed(_SPAN, "__other")
    pairs += [column("__one") == column("__other")]
    near = (_at(right) >= _at(left) - bound.before) & (_at(right) <= _at(left) + bound.after)
    return one.join(other.hint("merge"), reduce(and_, [*pairs, near]), how).drop("__one", "__other")

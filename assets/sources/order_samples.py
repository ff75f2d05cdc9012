"""The first values by which the changes of a stream are ordered: later ones must have their
formats.

The first value is that of the first change, by time, that has one of a known format. A change
without one is a bad change, unless no change of the stream has one: then `order_by` is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration import change_values
from dagster_adjunct.assets.declaration.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.change_values import Order, Samples
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.sources.changes import (
    decode_arrow_rows,
    decode_rows,
    order_columns,
    position_array,
    readable_schema,
)
from dagster_adjunct.assets.sources.entries import (
    OpenedChanges,
    Ranges,
    describe_input,
    hides_values,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


_FIRST_OFFSETS = 1_000
_OFFSETS_AT_ONCE = 100_000


@dataclass(frozen=True, slots=True)
class OrderSamples:
    """What is known of each name in `order_by`, None where no change has shown it.

    `values` are the first values that can order changes, `problems` say why the first other changes
    can't be ordered.
    """

    values: Samples
    problems: tuple[str | None, ...]

    @property
    def lacking(self) -> tuple[int, str] | None:
        """The index in `order_by` of the first name by which changes can't be ordered and none can,
        with the reason; None if there is no such name.
        """
        for index, (value, problem) in enumerate(zip(self.values, self.problems, strict=True)):
            if value is None and problem is not None:
                return index, problem
        return None

    def merge(self, later: OrderSamples) -> OrderSamples:
        """Return what is known after these and `later` changes: what the earlier ones have shown,
        else what the later ones have.
        """

        def first(mine: str | None, other: str | None) -> str | None:
            return other if mine is None else mine

        values = tuple(map(first, self.values, later.values))
        return OrderSamples(values, tuple(map(first, self.problems, later.problems)))


def find_order_samples(
    source: OpenedChanges,
    ranges: Ranges,
    spark: Callable[[], SparkSession],
    known: Samples | None = None,
    ahead: Ranges | None = None,
) -> Samples | None:
    """Return the first value of each name in `order_by`, None for a name without one; None instead
    of all if no name has one. If positions need no samples, return `known`.

    `known` are those of earlier changes. If changes in `ranges` can't be ordered by some name, and
    none of them can, those in `ahead` are read, too, so that the result does not depend on how the
    stream is cut. Raises SchemaMismatchError if none of these can either.
    """
    spec = source.spec
    order = spec.following.ordering
    rows = readable_schema(source)
    if not needs_samples(order, rows):
        return known
    nothing: Samples = (None,) * len(order)
    found = OrderSamples(known or nothing, nothing)

    def look(part: Ranges) -> OrderSamples:
        """Return the samples of the changes in this part of the ranges."""
        if spark is IN_PROCESS:
            changes = decode_arrow_rows(source, source.read_arrow(part))
            return samples_in_arrow(spec, changes, rows)
        return samples_in_frame(spec, decode_rows(source, source.read(spark(), part)), rows)

    beginning = next(_cut(source, ranges, _FIRST_OFFSETS), {})
    for part in (beginning, ranges):  # usually the beginning has a value of each name
        if part and None in found.values:
            found = found.merge(look(part))
    for part in _cut(source, ahead or {}, _OFFSETS_AT_ONCE):
        if found.lacking is None:
            break
        found = found.merge(look(part))
    if found.lacking is not None:
        raise unorderable_error(spec, *found.lacking)
    if found.values == nothing:
        return None
    return found.values


def needs_samples(order: Order, rows: Schema) -> bool:
    """Whether positions depend on the formats of first values: those of strings and of paths do."""
    return any(name not in rows.names or rows.field(name).type == "string" for name in order)


def _cut(source: OpenedChanges, ranges: Ranges, count: int) -> Iterator[Ranges]:
    """Yield the ranges in pieces of at most `count` offsets of each partition."""
    system = source.system
    left = {ssp: span for ssp, span in ranges.items() if system.compare(*span) < 0}
    while left:
        piece = {}
        rest = {}
        for ssp, (start, end) in left.items():
            middle = system.advance(ssp, start, count)
            if system.compare(middle, end) < 0:
                piece[ssp] = (start, middle)
                rest[ssp] = (middle, end)
            else:
                piece[ssp] = (start, end)
        yield piece
        left = rest


def samples_in_frame(spec: UnboundedDataset, rows: DataFrame, schema: Schema) -> OrderSamples:
    """Return what these changes of rows show of each name in `order_by`, the first by time.

    Changes that can't be applied for another reason than a missing path show nothing.
    """
    order = spec.following.ordering
    lacks_path = F.startswith(F.col(PROBLEM), F.lit(change_values.NO_PATH))
    counts = F.col(PROBLEM).isNull() | lacks_path
    place = (TIMESTAMP, OFFSET, PARTITION)
    positions = change_values.position_type(order, schema)
    firsts = []
    for number, (name, value) in enumerate(zip(order, order_columns(order, schema), strict=True)):
        text = value.cast("string")
        orders = text.rlike(change_values.orderable_pattern(name, positions))
        fits = counts & orders
        misfits = (counts & ~orders) | (lacks_path & text.isNull())
        firsts.append(
            F.min(F.when(fits, F.struct(*place, text.alias("text")))).alias(f"fit{number}")
        )
        misfit = F.struct(*place, text.alias("text"), F.col(PROBLEM).alias("reason"))
        firsts.append(F.min(F.when(misfits, misfit)).alias(f"misfit{number}"))
    found = rows.agg(*firsts).head()
    assert found is not None
    values: list[str | None] = []
    problems: list[str | None] = []
    for number, name in enumerate(order):
        misfit = found[f"misfit{number}"]
        values.append(_get(found[f"fit{number}"], "text"))
        problems.append(_problem(name, _get(misfit, "text"), _get(misfit, "reason")))
    return OrderSamples(tuple(values), tuple(problems))


def samples_in_arrow(spec: UnboundedDataset, rows: pa.Table, schema: Schema) -> OrderSamples:
    """Return what these changes of rows show of each name in `order_by`, the first by time. All
    names are columns here: formats with other paths need Spark.
    """
    order = spec.following.ordering
    rows = rows.filter(pc.is_null(rows.column(PROBLEM)))
    places = rows.select([OFFSET, PARTITION])
    # Spark sorts nulls first.
    times = pc.fill_null(rows.column(TIMESTAMP).cast("int64"), change_values.LOWEST)
    by = [(name, "ascending") for name in (TIMESTAMP, OFFSET, PARTITION)]
    rows = rows.take(pc.sort_indices(places.append_column(TIMESTAMP, times), sort_keys=by))
    positions = change_values.position_type(order, schema)
    values: list[str | None] = []
    problems: list[str | None] = []
    for name in order:
        texts = position_array(rows, name, schema).cast("string").drop_null()
        orders = pc.match_substring_regex(texts, change_values.orderable_pattern(name, positions))
        fits = texts.filter(orders)
        misfits = texts.filter(pc.invert(orders))
        values += fits.slice(0, 1).to_pylist() or [None]
        first = misfits.slice(0, 1).to_pylist() or [None]
        problems.append(_problem(name, first[0], None))
    return OrderSamples(tuple(values), tuple(problems))


def _get(row: Row | None, name: str) -> str | None:
    """Return a field of a row, None for no row."""
    return None if row is None else row[name]


def _problem(name: str, text: str | None, reason: str | None) -> str | None:
    """Return why a change with this text can't be ordered by a name; without a text, the `reason`
    that its problem states, None for none.
    """
    return reason if text is None else change_values.unordered_reason(name, text)


def unorderable_error(spec: UnboundedDataset, index: int, reason: str) -> SchemaMismatchError:
    """Return the error for changes none of which can be ordered by the name at this index of
    `order_by`; `reason` is that of the first.
    """
    name = spec.following.ordering[index]
    shown = change_values.render_reason(reason, values=not hides_values(spec))
    meant = change_values.suggest_path(name)
    step = ""
    if meant is not None:
        step = f"Did you mean {meant!r}? "
    return SchemaMismatchError(
        f"{describe_input(spec)}: none of its changes can be ordered by {name!r}, the first because"
        f" of: {shown}.",
        f"{step}Nothing was committed. Name in order_by what the changes have, or leave it out to"
        " order by offset.",
        dataset=spec.name,
        column=name,
        argument="order_by",
    )

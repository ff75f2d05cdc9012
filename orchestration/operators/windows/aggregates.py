"""What is computed of the records of a window: Count, Sum, Min, Max, Mean, Distinct, and functions of users.

An aggregate is kept as *partial values*, columns of the window's row in the state table: made of a batch's records,
and added to what was kept. All of it is Spark SQL as text. Nulls are left out, as SQL's aggregates do.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

import pyarrow as pa

from dagster_adjunct.orchestration.operators.columns import MAX_DURATION
from dagster_adjunct.orchestration.operators.windows.exact_sums import DECIMAL, ExactSum, Partial
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.column_sql import quote_name
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.user_code import check_plain_function
from dagster_adjunct.resources.validation import validated

AggregateFunction: TypeAlias = "Callable[[Any], Any]"
INTEGERS = ("tinyint", "smallint", "int", "bigint")
FLOATS = ("float", "double")
_SET = "array<string>"
# Digits behind the point up to which a mean has four more: with 13 before it, for the records, and its own, 38 in all.
_DIVIDED_APART = 21


class Aggregation(ABC):
    """One value of each window."""

    __slots__ = ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the records that it is made of."""

    @abstractmethod
    def words(self) -> str:
        """Return what it is, as plans show it."""

    @abstractmethod
    def takes(self, kind: str) -> bool:
        """Whether it can be made of values of this type."""

    @abstractmethod
    def returns_of(self, kind: str | None) -> str | None:
        """Return the type of the value, made of a column of this type; None where that is not known."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        """Return what is kept for the value `name`, made of a column of this type; () where records are kept."""
        return ()

    def result(self, name: str, kind: str) -> str:
        """Return the value, of the partial values; null where its type can't hold it (`exact`)."""
        return quote_name(name)

    def exact(self, name: str, kind: str) -> str | None:
        """Return the value in a type or text that holds it whole, where the type of the result may not."""
        return None


@dataclass(frozen=True, slots=True)
class Count(Aggregation):
    """How many records there are, or how many whose `column` is not null."""

    column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    def words(self) -> str:
        return f"count({self.column or ''})"

    def takes(self, kind: str) -> bool:
        return True

    def returns_of(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return (_count(f"{name}$count", self.column),)

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}$count")


@dataclass(frozen=True, slots=True)
class _OfColumn(Aggregation):
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def words(self) -> str:
        return f"{type(self).__name__.lower()}({self.column})"


@dataclass(frozen=True, slots=True)
class Sum(_OfColumn):
    """The sum of a column: bigint of whole numbers, a decimal of decimals, double of others."""

    def takes(self, kind: str) -> bool:
        return _is_number(kind)

    def returns_of(self, kind: str | None) -> str | None:
        return None if kind is None else _sum_type(kind)

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return _sum(name, self.column, kind)

    def result(self, name: str, kind: str) -> str:
        exact = self.exact(name, kind)
        return quote_name(f"{name}$sum") if exact is None else f"try_cast({exact} as {_sum_type(kind)})"

    def exact(self, name: str, kind: str) -> str | None:
        return None if kind in FLOATS else ExactSum(name, kind).total()


@dataclass(frozen=True, slots=True)
class _Extreme(_OfColumn):
    def takes(self, kind: str) -> bool:
        return True

    def returns_of(self, kind: str | None) -> str | None:
        return kind

    def _partial(self, name: str, kind: str, aggregate: str, of_two: str) -> tuple[Partial, ...]:
        made, merged = f"{aggregate}({quote_name(self.column)})", f"{aggregate}({quote_name(name)})"
        return (Partial(name, kind, made, merged, f"{of_two}({{0}}, {{1}})"),)


@dataclass(frozen=True, slots=True)
class Min(_Extreme):
    """The least value of a column."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return self._partial(f"{name}$min", kind, "min", "least")

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}$min")


@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """The greatest value of a column."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return self._partial(f"{name}$max", kind, "max", "greatest")

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}$max")


@dataclass(frozen=True, slots=True)
class Mean(_OfColumn):
    """The mean of a column: a decimal with four more digits of decimals, double of others. The sum is exact.

    Of decimals with more than 21 digits behind the point it has those that Spark's division has room for.
    """

    def takes(self, kind: str) -> bool:
        return _is_number(kind)

    def returns_of(self, kind: str | None) -> str | None:
        if kind is None:
            return None
        decimal = DECIMAL.fullmatch(kind)
        if decimal is None:
            return "double"
        return f"decimal({min(int(decimal[1]) + 4, 38)},{_scale_of_mean(int(decimal[1]), int(decimal[2]))})"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return _count(f"{name}$count", self.column), *_sum(name, self.column, kind)

    def result(self, name: str, kind: str) -> str:
        total, number, returns = quote_name(f"{name}$sum"), quote_name(f"{name}$count"), str(self.returns_of(kind))
        decimal, exact = DECIMAL.fullmatch(kind), self.exact(name, kind)
        if exact is not None:
            return f"try_cast({exact} as {returns})"
        if decimal is None:
            mean = f"cast({total} as double) / {number}"
        elif int(decimal[2]) > _DIVIDED_APART:
            mean = f"cast(cast({total} as {_sum_type(kind)}) / {number} as {returns})"
        else:
            whole = f"cast({total} as {_sum_type(kind)})"
            mean = _quotient(whole, number, int(decimal[1]), int(decimal[2]), returns)
        return f"case when {number} > 0 then {mean} end"

    def exact(self, name: str, kind: str) -> str | None:
        kept, decimal = ExactSum(name, kind), DECIMAL.fullmatch(kind)
        if decimal is None or not kept.is_wide:
            return None
        return kept.mean(quote_name(f"{name}$count"), _scale_of_mean(int(decimal[1]), int(decimal[2])))


@dataclass(frozen=True, slots=True)
class Distinct(_OfColumn):
    """How many different values a column has.

    Exactly, by keeping all of them in the window's row; or, `approximate`, by a sketch of at most 4 KiB, which is
    mostly within 3 %.
    """

    approximate: bool = False

    def words(self) -> str:
        return f"{'about ' if self.approximate else ''}distinct({self.column})"

    def takes(self, kind: str) -> bool:
        return True

    def returns_of(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        if self.approximate:
            kept, value = quote_name(f"{name}$sketch"), _sketch_input(self.column, kind)
            either = "case when {0} is null then {1} when {1} is null then {0} else hll_union({0}, {1}) end"
            made, merged = f"hll_sketch_agg({value}, 12)", f"hll_union_agg({kept})"
            return (Partial(f"{name}$sketch", "binary", made, merged, either, ordered=True),)
        kept = quote_name(f"{name}$values")
        made = f"to_json(array_sort(collect_set({_as_text(self.column, kind)})))"
        merged = f"to_json(array_sort(array_distinct(flatten(collect_list({_values(kept)})))))"
        either = f"to_json(array_sort(array_union({_values('{0}')}, {_values('{1}')})))"
        return (Partial(f"{name}$values", "string", made, merged, either),)

    def result(self, name: str, kind: str) -> str:
        if self.approximate:
            return f"hll_sketch_estimate({quote_name(f'{name}$sketch')})"
        return f"cast(size({_values(quote_name(f'{name}$values'))}) as bigint)"


@dataclass(frozen=True, slots=True)
class Aggregate(Aggregation):
    """What a function of yours returns for all the records of a window: one value of the type `returns`.

    It is called in Spark's tasks with a pyarrow.Table, or a pandas DataFrame with `form="pandas"`, of the `of` columns
    (all of them unless given), in the order of the records' positions. The records of open windows are kept.
    """

    function: AggregateFunction
    returns: str
    of: tuple[str, ...] | None = None
    form: Literal["arrow", "pandas"] = "arrow"

    def __init__(
        self,
        function: AggregateFunction,
        returns: str,
        of: str | Sequence[str] | None = None,
        form: Literal["arrow", "pandas"] = "arrow",
    ) -> None:
        if not callable(function):
            raise ConfigurationError(f"Aggregate got {function!r}.", "Pass a function.", argument="function")
        check_plain_function("Aggregate", function, "function", "records")
        if form not in ("arrow", "pandas"):
            raise ConfigurationError(f"Aggregate has form={form!r}.", "Write arrow or pandas.", argument="form")
        columns = (of,) if isinstance(of, str) else None if of is None else tuple(of)
        if columns is not None and not columns:
            raise ConfigurationError("Aggregate has of=[], no column.", "Name some, or leave it out.", argument="of")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "returns", Field("value", returns).type)
        object.__setattr__(self, "of", columns)
        object.__setattr__(self, "form", form)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.of or ()

    def words(self) -> str:
        return f"{getattr(self.function, '__name__', type(self.function).__name__)}()"

    def takes(self, kind: str) -> bool:
        return True

    def returns_of(self, kind: str | None) -> str:
        return self.returns

    def value_of(self, records: pa.Table) -> object:
        """Return what the function makes of a window's records."""
        chosen = records if self.of is None else records.select(list(self.of))
        return self.function(chosen.to_pandas() if self.form == "pandas" else chosen)


def _is_number(kind: str) -> bool:
    return kind in INTEGERS or kind in FLOATS or DECIMAL.fullmatch(kind) is not None


def _sum_type(kind: str) -> str:
    """Return the type of a sum, as Spark's own."""
    decimal = DECIMAL.fullmatch(kind)
    if decimal is not None:
        return f"decimal({min(int(decimal[1]) + 10, 38)},{decimal[2]})"
    return "double" if kind in FLOATS else "bigint"


def _scale_of_mean(precision: int, scale: int) -> int:
    """Return how many digits a mean has behind the point: four more, as Spark's own, as far as these are computed."""
    if scale <= _DIVIDED_APART:
        return scale + 4
    return min(scale + 4, 38 - min(precision + 10, 38) + scale)


def _quotient(total: str, number: str, precision: int, scale: int, returns: str) -> str:
    """Return a sum by a number of records, with all digits of `returns`.

    Spark cuts the scale of a quotient by as many digits as the dividend's type has before the point. So what is whole
    is divided apart from the rest, which is below the number of records.
    """
    rest = f"({total} % {number})"
    whole = f"cast({total} - {rest} as decimal({precision + 10 - scale},0)) / {number}"
    digits = 19 if scale + 4 <= 18 else 13  # of a number of records
    fraction = f"cast({rest} as decimal({digits + scale},{scale})) / {number}"
    return f"cast(cast({whole} as {returns}) + cast({fraction} as {returns}) as {returns})"


def _count(name: str, column: str | None) -> Partial:
    counted = "1" if column is None else quote_name(column)
    return Partial(
        name, "bigint", f"count({counted})", f"sum({quote_name(name)})", "coalesce({0}, 0L) + coalesce({1}, 0L)"
    )


def _sum(name: str, column: str, kind: str) -> tuple[Partial, ...]:
    if kind not in FLOATS:
        return ExactSum(name, kind).partials(column)
    kept = quote_name(f"{name}$sum")
    either = "case when {0} is null then {1} when {1} is null then {0} else {0} + {1} end"
    return (Partial(f"{name}$sum", "double", f"sum({quote_name(column)})", f"sum({kept})", either, ordered=True),)


def _values(text: str) -> str:
    return f"coalesce(from_json({text}, '{_SET}'), cast(array() as {_SET}))"


def _as_text(column: str, kind: str) -> str:
    """Return a text for each value, different texts for different values: 0.0 and -0.0 are equal."""
    value = quote_name(column)
    if kind == "binary":
        return f"hex({value})"
    return (
        value if kind == "string" else f"cast({value} + 0D as string)" if kind in FLOATS else f"cast({value} as string)"
    )


def _sketch_input(column: str, kind: str) -> str:
    """Return what a sketch takes of each value: it passes over empty texts."""
    return f"cast({quote_name(column)} as bigint)" if kind in INTEGERS else f"concat('=', {_as_text(column, kind)})"


_MAX_OVERLAP = 1_000
_HOURS = (1, 2, 3, 4, 6, 8, 12)
# Files beside the zones that Python takes for zones, and nothing else does; those in right/ count leap seconds.
_NOT_A_ZONE = re.compile(r"(posix|right)/|(localtime|posixrules|Factory)$")


@validated
@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows one after the other: each time is in one of them.

    Of one `size`, they begin at whole multiples of it since 1970-01-01T00:00Z. Or they are so many `days` or `hours` of
    a `zone`, such as "America/New_York", by its clocks: days begin at midnight there and have 23 or 25 hours where
    clocks change; several days are counted from 1970-01-01. Hours (1, 2, 3, 4, 6, 8 or 12) are counted from midnight.
    With `hours=1`, an hour that clocks show twice is two windows; in longer windows both are in one.

    Raises ConfigurationError for anything else.
    """

    size: timedelta | None = None
    days: int | None = None
    hours: int | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("size", "days", "hours") if getattr(self, name) is not None]
        if len(given) != 1:
            problem = f"Tumbling has {' and '.join(given) or 'no size'}: expected a size, or days= or hours= of a zone."
            step = 'Write Tumbling(timedelta(minutes=5)), or Tumbling(days=1, zone="America/New_York").'
            raise ConfigurationError(problem, step, argument=given[-1] if given else "size")
        if self.size is not None:
            _check_duration("Tumbling", "size", self.size)
        if (self.size is None) != (self.zone is not None):
            without = "a size is not counted by the clocks of a zone" if self.zone is not None else "it names no zone"
            problem = f"Tumbling has {given[0]}={getattr(self, given[0])!r} and zone={self.zone!r}: {without}."
            step = 'Write days=1 or hours=1 with a zone, such as zone="UTC"; or a timedelta without one.'
            raise ConfigurationError(problem, step, argument="zone")
        if self.zone is not None:
            _check_calendar(self.days, self.hours, self.zone)

    @property
    def local(self) -> timedelta | None:
        """How long a window is by the clocks of its zone; None where windows have one size."""
        if self.zone is None:
            return None
        return timedelta(days=self.days or 0, hours=self.hours or 0)

    def words(self) -> str:
        """Return what it is, as plans show it."""
        if self.zone is None:
            return f"tumbling {self.size}"
        count, unit = (self.days, "day") if self.days is not None else (self.hours, "hour")
        return f"tumbling {count} {unit}{'s' if count != 1 else ''} of {self.zone}"


@validated
@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of one `size`, one beginning `every` so often: each time is in size / every of them."""

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        _check_duration("Sliding", "size", self.size)
        _check_duration("Sliding", "every", self.every)
        if not self.every <= self.size <= self.every * _MAX_OVERLAP:
            raise ConfigurationError(
                f"Sliding has size={self.size} and every={self.every}: expected a size of 1 to {_MAX_OVERLAP:,} times "
                "every; each record is counted in that many windows.",
                "Choose others; windows with gaps between them are a filter behind Tumbling.",
                argument="every",
            )

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sliding {self.size} every {self.every}"


@validated
@dataclass(frozen=True, slots=True)
class Session:
    """A window for each run of records of a key of which each follows the one before it in less than `gap`.

    It ends `gap` after the last of them.
    """

    gap: timedelta

    def __post_init__(self) -> None:
        _check_duration("Session", "gap", self.gap)

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sessions with gaps of {self.gap}"


Kind: TypeAlias = Tumbling | Sliding | Session


def to_micros(length: timedelta) -> int:
    """Return a length of time in microseconds."""
    return length // timedelta(microseconds=1)


def max_duration_after(kind: Kind) -> timedelta:
    """Return for how long a window takes records after its first: at most its size, or at least the gap of a session.

    Clocks of a zone were put back by a day at most.
    """
    if isinstance(kind, Session):
        return kind.gap
    if isinstance(kind, Tumbling) and kind.local is not None:
        return kind.local + timedelta(days=1)
    assert kind.size is not None
    return kind.size


def _check_calendar(days: int | None, hours: int | None, zone: object) -> None:
    """Refuse days and hours of a zone that can't be counted, and zones that are none."""
    argument, count = ("days", days) if days is not None else ("hours", hours)
    possible = range(1, 366) if days is not None else _HOURS
    if isinstance(count, bool) or not isinstance(count, int) or count not in possible:
        wanted = "a whole number from 1 to 365" if days is not None else f"one of {', '.join(map(str, _HOURS))}"
        step = "Days of a zone begin at midnight, and hours are counted from there: choose hours that divide a day."
        raise ConfigurationError(f"Tumbling has {argument}={count!r}: expected {wanted}.", step, argument=argument)
    try:
        known = isinstance(zone, str) and not _NOT_A_ZONE.match(zone) and ZoneInfo(zone) is not None
    except (KeyError, ValueError, OSError):  # a name that is unknown, or none at all
        known = False
    if not known:
        problem = f"Tumbling has zone={zone!r}, which is no time zone that this machine knows."
        step = 'Write a name of the IANA database, such as "America/New_York" or "UTC".'
        raise ConfigurationError(problem, step, argument="zone")


def _check_duration(kind: str, argument: str, value: object) -> None:
    if not isinstance(value, timedelta) or not timedelta(0) < value <= MAX_DURATION:
        problem = f"{kind} has {argument}={value!r}: expected a timedelta above none, and of 100 years at most."
        raise ConfigurationError(problem, f"Write {kind}({argument}=timedelta(minutes=5)), say.", argument=argument)

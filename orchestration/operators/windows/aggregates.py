"""The values that windows compute: Count, Sum, Min, Max, Mean, Distinct, and users' functions.

An aggregate is stored as *partial values*, columns of the window's row in the state table: computed from the records
of a batch, and added to the stored ones. All of them are Spark SQL as text. Nulls are ignored, as by SQL's aggregates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from dagster_adjunct.orchestration.operators.columns import function_label
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Field, decimal_digits, quote_name
from dagster_adjunct.resources.sql.types import INTEGERS, NUMBERS, sum_type
from dagster_adjunct.resources.user_code import check_plain_function
from dagster_adjunct.resources.validation import validated

AggregateFunction: TypeAlias = Callable[[Any], Any]
FLOATS = ("float", "double")
_SET = "array<string>"
# The most digits after the point for which a mean has four more: with them and 13 for the number of records, 38.
_DIVIDED_APART = 21
WIDEST = "decimal(38,0)"
_LOW, _NARROW, _SMALL = 20, 27, 28
"""Of 38 digits, 27 or 28 of each record leave ten or more for their number."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A column of a window's row with a partial value, computed from records by the aggregate `made`.

    `merged` aggregates the partial values of several rows. `added` adds two of them, {0} and {1}, of which one may be
    null. `ordered` says that the last digits depend on the order of additions, which therefore has to be repeatable.
    """

    name: str
    type: str
    made: str
    merged: str
    added: str
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The stored sum for a window's value `name`, of a column of the type `kind`: an integer or a decimal.

    Records are added in the order in which they arrive, so a partial sum may exceed the type of the result although the
    final sum does not. Therefore only results are checked. Integers, and decimals of at most 27 digits, are stored as
    one decimal of 38 digits. Wider decimals are stored as two whole numbers, in units of their last digit:

        sum = high * 10**20 + low    high: the sum of the first 18 digits of each record, low: of the other 20
    """

    name: str
    kind: str

    @property
    def scale(self) -> int:
        """The digits after the point."""
        return (decimal_digits(self.kind) or (0, 0))[1]

    @property
    def is_wide(self) -> bool:
        """Whether it is stored as two numbers."""
        return (decimal_digits(self.kind) or (0, 0))[0] > _NARROW

    @property
    def wider(self) -> str | None:
        """The widest type whose sums are stored in the same way, if its results are wider than those of this type."""
        digits = decimal_digits(self.kind)
        if digits is None:
            return "decimal(20,0)"
        return f"decimal({_NARROW},{self.scale})" if digits[0] < _NARROW else None

    def partials(self, column: str) -> tuple[Partial, ...]:
        """Return the partial values for this column of the records."""
        value, scale = quote_name(column), self.scale
        if self.is_wide:
            value, split = f"cast({value} as decimal(38,{scale}))", _power(_LOW - scale)
            # Splitting a number takes ten times as long as adding it, so only large numbers are split. Spark's abs and
            # unary minus round to 34 digits, and are not used here.
            is_small = f"{value} between 0 - {_power(_SMALL - scale)} and {_power(_SMALL - scale)}"
            low = f"sum(case when {is_small} then {value} else {value} % {split} end)"
            high = f"sum(case when not {is_small} then cast({value} div {split} as decimal(18,0)) end)"
            high = f"coalesce({high}, 0) + {low} div {split}"
            low = f"cast({low} % {split} / {_power(-scale)} as {WIDEST})"
            return _added(self._low, low, 0), _added(self._high, high, 0)
        made = f"sum({value})"
        if self.kind == "bigint":
            # The sum of halves in a batch fits in a bigint; decimals would take twice as long.
            made = f"cast(sum({value} >> 32) as {WIDEST}) * 4294967296L + sum({value} & 4294967295L)"
        return (_added(self._low, made, scale),)

    def total(self) -> str:
        """Return the sum: a number, or of a wide one its digits as text, which may be too many for any type."""
        if not self.is_wide:
            return quote_name(self._low)
        sign, high, low = self._digits()
        return self._unless_null(f"concat({sign}, {high}, lpad({low}, {_LOW}, '0'), 'E-{self.scale}')")

    def mean(self, number: str, scale: int) -> str:
        """Return a wide sum divided by `number` as text: exact, cut off one digit after those of `scale`."""
        sign, high, low = self._digits()
        more = scale - self.scale + 1
        number = f"cast({number} as decimal(19,0))"
        rest = f"(({high} % {number}) * {_power(_LOW)} + {low})"
        middle = f"cast(({rest} - {rest} % {number}) / {number} as {WIDEST})"
        last = f"((({rest} % {number}) * {_power(more)}) div {number})"
        digits = f"lpad({middle}, {_LOW}, '0'), lpad({last}, {more}, '0'), 'E-{self.scale + more}'"
        return self._unless_null(f"concat({sign}, {high} div {number}, {digits})")

    @property
    def _low(self) -> str:
        return f"{self.name}$sum"

    @property
    def _high(self) -> str:
        return f"{self.name}$high"

    def _digits(self) -> tuple[str, str, str]:
        """Return the sign of a wide sum, and `high` and `low` of its absolute value, with at most 20 digits in low."""
        high, low = f"coalesce({quote_name(self._high)}, 0)", quote_name(self._low)
        negative = f"({_carry(high, low)} < 0)"
        high, low = (f"(case when {negative} then 0 - {part} else {part} end)" for part in (high, low))
        return f"if({negative}, '-', '')", _carry(high, low), f"pmod({low}, {_power(_LOW)})"

    def _unless_null(self, text: str) -> str:
        return f"case when {quote_name(self._low)} is not null then {text} end"


def exact_column(name: str) -> str:
    """Return the column with the exact value of an aggregate: a long expression, which Spark analyses once."""
    return f"__exact_{name}"


class Aggregation(ABC):
    """One value of each window, computed from the column `column` of its records."""

    __slots__ = ()
    column: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the records that it is computed from."""
        return () if self.column is None else (self.column,)

    def describe(self) -> str:
        """Return a description for plans: "sum(spent)"."""
        return f"{type(self).__name__.lower()}({self.column or ''})"

    def accepts(self, kind: str) -> bool:
        """Whether it can be computed from values of this type."""
        return True

    @abstractmethod
    def result_type(self, kind: str | None) -> str | None:
        """Return the type of the value, given that of the column; None where it is unknown."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        """Return the partial values for the value `name` of a column of this type; () if records are stored instead."""
        return ()

    def unit(self, kind: str) -> str:
        """Return how values of this type are stored, where those of a wider type may be stored otherwise; else ""."""
        return ""

    def result(self, name: str, kind: str) -> str:
        """Return the value, computed from the partial values, or from the column `exact_column(name)`, which has what
        `exact` returns, where it returns something; null if its type can't hold it.
        """
        return quote_name(name)

    def exact(self, name: str, kind: str) -> str | None:
        """Return the exact value in a wider type or as text, None where the type of the result always holds it."""
        return None


@validated
@dataclass(frozen=True, slots=True)
class Count(Aggregation):
    """The number of records, or of those whose `column` is not null."""

    column: str | None = None

    def result_type(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return (count_partial(f"{name}$count", self.column),)

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}$count")


@validated
@dataclass(frozen=True, slots=True)
class Sum(Aggregation):
    """The sum of a column: bigint for integers, a decimal for decimals, double for others."""

    column: str

    def accepts(self, kind: str) -> bool:
        return _is_number(kind)

    def result_type(self, kind: str | None) -> str | None:
        return None if kind is None else sum_type(kind)

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return _sum(name, self.column, kind)

    def unit(self, kind: str) -> str:
        return _unit(kind)

    def result(self, name: str, kind: str) -> str:
        if self.exact(name, kind) is None:
            return quote_name(f"{name}$sum")
        return f"try_cast({quote_name(exact_column(name))} as {sum_type(kind)})"

    def exact(self, name: str, kind: str) -> str | None:
        return None if kind in FLOATS else ExactSum(name, kind).total()


class _Extreme(Aggregation):
    __slots__ = ()
    column: str
    function: ClassVar[str]
    of_two: ClassVar[str]

    def result_type(self, kind: str | None) -> str | None:
        return kind

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        partial = f"{name}${self.function}"
        made, merged = (f"{self.function}({quote_name(column)})" for column in (self.column, partial))
        return (Partial(partial, kind, made, merged, f"{self.of_two}({{0}}, {{1}})"),)

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}${self.function}")


@validated
@dataclass(frozen=True, slots=True)
class Min(_Extreme):
    """The least value of a column."""

    column: str
    function: ClassVar[str] = "min"
    of_two: ClassVar[str] = "least"


@validated
@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """The greatest value of a column."""

    column: str
    function: ClassVar[str] = "max"
    of_two: ClassVar[str] = "greatest"


@validated
@dataclass(frozen=True, slots=True)
class Mean(Aggregation):
    """The mean of a column: a decimal with four more digits for decimals, double for others. The sum is exact.

    For decimals with more than 21 digits after the point, it has as many digits as Spark's division.
    """

    column: str

    def accepts(self, kind: str) -> bool:
        return _is_number(kind)

    def result_type(self, kind: str | None) -> str | None:
        digits = None if kind is None else decimal_digits(kind)
        if digits is None:
            return None if kind is None else "double"
        return f"decimal({min(digits[0] + 4, 38)},{_scale_of_mean(*digits)})"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return count_partial(f"{name}$count", self.column), *_sum(name, self.column, kind)

    def unit(self, kind: str) -> str:
        return _unit(kind)

    def result(self, name: str, kind: str) -> str:
        total, number, returns = quote_name(f"{name}$sum"), quote_name(f"{name}$count"), str(self.result_type(kind))
        digits = decimal_digits(kind)
        if self.exact(name, kind) is not None:
            return f"try_cast({quote_name(exact_column(name))} as {returns})"
        if digits is None:
            mean = f"cast({total} as double) / {number}"
        elif digits[1] > _DIVIDED_APART:
            mean = f"cast(cast({total} as {sum_type(kind)}) / {number} as {returns})"
        else:
            mean = _quotient(f"cast({total} as {sum_type(kind)})", number, *digits, returns)
        return f"case when {number} > 0 then {mean} end"

    def exact(self, name: str, kind: str) -> str | None:
        stored, digits = ExactSum(name, kind), decimal_digits(kind)
        if digits is None or not stored.is_wide:
            return None
        return stored.mean(quote_name(f"{name}$count"), _scale_of_mean(*digits))


@validated
@dataclass(frozen=True, slots=True)
class Distinct(Aggregation):
    """The number of different values of a column.

    It is exact, with all values stored in the window's row; or, if `approximate`, it uses a sketch of at most 4 KiB,
    which is usually within 3 %.
    """

    column: str
    approximate: bool = False

    def describe(self) -> str:
        return f"{'about ' if self.approximate else ''}distinct({self.column})"

    def result_type(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        text = _as_text(self.column, kind)
        if self.approximate:
            stored = quote_name(f"{name}$sketch")
            # Sketches ignore empty texts.
            value = f"cast({quote_name(self.column)} as bigint)" if kind in INTEGERS else f"concat('=', {text})"
            either = _either("hll_union({0}, {1})")
            made, merged = f"hll_sketch_agg({value}, 12)", f"hll_union_agg({stored})"
            return (Partial(f"{name}$sketch", "binary", made, merged, either, ordered=True),)
        stored = quote_name(f"{name}$values")
        made = f"to_json(array_sort(collect_set({text})))"
        merged = f"to_json(array_sort(array_distinct(flatten(collect_list({_values(stored)})))))"
        either = f"to_json(array_sort(array_union({_values('{0}')}, {_values('{1}')})))"
        return (Partial(f"{name}$values", "string", made, merged, either),)

    def unit(self, kind: str) -> str:
        return "as double" if kind in FLOATS else _unit(kind, whole=self.approximate)

    def result(self, name: str, kind: str) -> str:
        if self.approximate:
            return f"hll_sketch_estimate({quote_name(f'{name}$sketch')})"
        return f"cast(size({_values(quote_name(f'{name}$values'))}) as bigint)"


@validated
@dataclass(frozen=True, slots=True)
class Aggregate(Aggregation):
    """The result of your function for all records of a window: one value of the type `returns`.

    Spark tasks call it with a pyarrow.Table, or with `form="pandas"` a pandas DataFrame, of the columns `of` (default:
    all), in the order of the records' positions. The records of open windows are stored.
    """

    function: AggregateFunction
    returns: str
    of: str | Sequence[str] | None = None
    form: Literal["arrow", "pandas"] = "arrow"

    def __post_init__(self) -> None:
        check_plain_function("Aggregate", self.function, "function", "records")
        if self.of is not None and not self.columns:
            raise ConfigurationError("Aggregate has of=[], no column.", "Name some, or leave it out.", argument="of")
        object.__setattr__(self, "returns", Field("value", self.returns).type)
        object.__setattr__(self, "of", self.columns or None)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.of,) if isinstance(self.of, str) else tuple(self.of or ())

    def describe(self) -> str:
        return function_label(self.function)

    def result_type(self, kind: str | None) -> str:
        return self.returns

    def compute(self, records: pa.Table) -> object:
        """Return the function's result for a window's records."""
        chosen = records.select(list(self.columns)) if self.of else records
        return self.function(chosen.to_pandas() if self.form == "pandas" else chosen)


def _is_number(kind: str) -> bool:
    return kind in NUMBERS or decimal_digits(kind) is not None


def _unit(kind: str, *, whole: bool = False) -> str:
    """Return the unit of decimals of this type, where they have digits after the point or are `whole`; else ""."""
    digits = decimal_digits(kind)
    return f"in units of 1E-{digits[1]}" if digits is not None and (digits[1] or whole) else ""


def _scale_of_mean(precision: int, scale: int) -> int:
    """Return the number of digits of a mean after the point: four more, like Spark's, as far as they are computed."""
    if scale <= _DIVIDED_APART:
        return scale + 4
    return min(scale + 4, 38 - min(precision + 10, 38) + scale)


def _quotient(total: str, number: str, precision: int, scale: int, returns: str) -> str:
    """Return a sum by a number of records, with all digits of `returns`.

    Spark reduces the scale of a quotient by the number of digits before the point in the dividend's type. So the part
    that is divisible is divided separately from the remainder, which is less than the number of records.
    """
    rest = f"({total} % {number})"
    whole = f"cast({total} - {rest} as decimal({precision + 10 - scale},0)) / {number}"
    digits = 19 if scale + 4 <= 18 else 13  # of a number of records
    fraction = f"cast({rest} as decimal({digits + scale},{scale})) / {number}"
    return f"cast(cast({whole} as {returns}) + cast({fraction} as {returns}) as {returns})"


def _either(both: str) -> str:
    """Return the expression `both` of two partial values, or one of them where the other is null."""
    return f"case when {{0}} is null then {{1}} when {{1}} is null then {{0}} else {both} end"


def count_partial(name: str, column: str | None) -> Partial:
    """Return the number of records, or of those whose `column` is not null, as a partial value of this name."""
    counted = "1" if column is None else quote_name(column)
    added = "coalesce({0}, 0L) + coalesce({1}, 0L)"
    return Partial(name, "bigint", f"count({counted})", f"sum({quote_name(name)})", added)


def _sum(name: str, column: str, kind: str) -> tuple[Partial, ...]:
    if kind not in FLOATS:
        return ExactSum(name, kind).partials(column)
    stored = f"{name}$sum"
    made, merged = f"sum({quote_name(column)})", f"sum({quote_name(stored)})"
    return (Partial(stored, "double", made, merged, _either("{0} + {1}"), ordered=True),)


def _carry(high: str, low: str) -> str:
    """Return `high` plus what `low` has beyond its 20 digits; it is negative if the sum is."""
    return f"({high} + ({low} - pmod({low}, {_power(_LOW)})) div {_power(_LOW)})"


def _power(exponent: int) -> str:
    """Return 10**exponent as a decimal of no more digits than it needs: those of a result follow from them."""
    kind = f"decimal({exponent + 1},0)" if exponent >= 0 else f"decimal({-exponent},{-exponent})"
    return f"cast('1E{exponent}' as {kind})"


def _added(name: str, made: str, scale: int) -> Partial:
    kind = f"decimal(38,{scale})"
    addend = "cast({} as decimal(37," + f"{scale}))"  # Spark rounds off a digit of the sum of two of 38 digits
    both = f"cast({addend.format('{0}')} + {addend.format('{1}')} as {kind})"
    return Partial(name, kind, f"cast({made} as {kind})", f"cast(sum({quote_name(name)}) as {kind})", _either(both))


def _values(text: str) -> str:
    return f"coalesce(from_json({text}, '{_SET}'), cast(array() as {_SET}))"


def _as_text(column: str, kind: str) -> str:
    """Return a text for each value, different texts for different values: 0.0 and -0.0 are equal."""
    value = quote_name(column)
    texts = {"binary": f"hex({value})", "string": value} | dict.fromkeys(FLOATS, f"cast({value} + 0D as string)")
    return texts.get(kind, f"cast({value} as string)")

"""The values that windows compute: Count, Sum, Min, Max, Mean, Distinct, and users' functions.

An aggregate is stored as *partial values*, columns of the window's row in the state table. A batch
computes them from its records and adds them to the stored ones, by expressions that are Spark SQL
texts. Nulls are ignored, as by the aggregates of SQL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from dagster_adjunct.orchestration.operators.columns import function_label
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Field, quote_name
from dagster_adjunct.resources.schemas.types import decimal_digits, is_nested
from dagster_adjunct.resources.schemas.values import to_pandas
from dagster_adjunct.resources.sql.result_types import INTEGERS, NUMBERS, sum_type
from dagster_adjunct.resources.user_code import check_plain_function
from dagster_adjunct.resources.validation import validated

AggregateFunction: TypeAlias = Callable[[Any], Any]
FLOATS = ("float", "double")
_SET = "array<string>"
# Means of decimals with at most this many digits after the point have four more: 21 + 4, and 13 for
# the number of records, are the 38 digits of a decimal.
_DIVIDED_APART = 21
WIDEST = "decimal(38,0)"
_LOW = 20
_NARROW = 27
_SMALL = 28
"""Numbers of digits: of the low part of a wide sum; of the widest decimal whose sum is one number;
of the largest numbers that are not split. Sums have 38 digits, so 27 or 28 leave at least ten for
the number of records."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A column of a window's row with a partial value, and the Spark SQL that computes it.

    `made` aggregates records, `merged` the partial values of several rows, and `added` is the
    expression that adds two partial values, {0} and {1}, of which one may be null. `ordered` says
    that the value depends on the order of additions, if only in its last digits; then this order
    must be repeatable.
    """

    name: str
    type: str
    made: str
    merged: str
    added: str
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The exact sum of a column of the type `kind`, an integer or a decimal, as it is stored for
    the aggregate `name`.

    Before the last record has arrived, a sum may exceed the type of the result although the final
    one does not, so it is stored exactly, and only results are checked. Sums of integers, and of
    decimals of at most 27 digits, are stored as one decimal of 38 digits. Sums of wider decimals
    are stored as two whole numbers, in units of their last digit:

        sum = high * 10**20 + low    high: the sum of the first 18 digits of each record, low: of
                                     the other 20
    """

    name: str
    kind: str

    @property
    def scale(self) -> int:
        """The number of digits after the point; 0 for a type other than a decimal."""
        digits = decimal_digits(self.kind)
        if digits is None:
            return 0
        return digits.scale

    @property
    def is_wide(self) -> bool:
        """Whether the sum is stored as two numbers, `high` and `low`."""
        digits = decimal_digits(self.kind)
        return digits is not None and digits.precision > _NARROW

    @property
    def wider(self) -> str | None:
        """The widest type whose sums are stored in the same way as those of `kind`; None if it
        is not wider.
        """
        digits = decimal_digits(self.kind)
        if digits is None:
            return "decimal(20,0)"
        if digits.precision >= _NARROW:
            return None
        return f"decimal({_NARROW},{digits.scale})"

    def partials(self, column: str) -> tuple[Partial, ...]:
        """Return the partial values of the sum of this column of the records."""
        value = quote_name(column)
        scale = self.scale
        if self.is_wide:
            value = f"cast({value} as decimal(38,{scale}))"
            split = _power(_LOW - scale)
            # Splitting a number takes ten times as long as adding it, so only large numbers are
            # split. Spark's abs and unary minus round to 34 digits, and are not used here.
            limit = _power(_SMALL - scale)
            is_small = f"{value} between 0 - {limit} and {limit}"
            low = f"sum(case when {is_small} then {value} else {value} % {split} end)"
            high = (
                f"sum(case when not {is_small} then cast({value} div {split} as decimal(18,0)) end)"
            )
            high = f"coalesce({high}, 0) + {low} div {split}"
            low = f"cast({low} % {split} / {_power(-scale)} as {WIDEST})"
            return (_decimal_partial(self._low, low, 0), _decimal_partial(self._high, high, 0))
        if self.kind == "bigint":
            # A batch's sums of the upper and lower 32 bits fit in bigints; adding decimals would
            # take twice as long.
            total = (
                f"cast(sum({value} >> 32) as {WIDEST}) * 4294967296L + sum({value} & 4294967295L)"
            )
        else:
            total = f"sum({value})"
        return (_decimal_partial(self._low, total, scale),)

    def total(self) -> str:
        """Return Spark SQL for the sum: a number; for a wide sum a text, which may have too many
        digits for any type.
        """
        if not self.is_wide:
            return quote_name(self._low)
        parts = self._wide_parts()
        low = f"lpad({parts.low}, {_LOW}, '0')"
        return self._unless_null(f"concat({parts.sign}, {parts.high}, {low}, 'E-{self.scale}')")

    def mean(self, number: str, scale: int) -> str:
        """Return Spark SQL for a wide sum divided by `number`, as text.

        It has `scale` + 1 digits after the point, cut off and not rounded.
        """
        parts = self._wide_parts()
        more_digits = scale - self.scale + 1
        number = f"cast({number} as decimal(19,0))"
        # Long division: of `high`, then of its remainder with `low`, then of further digits.
        first = f"{parts.high} div {number}"
        rest = f"(({parts.high} % {number}) * {_power(_LOW)} + {parts.low})"
        middle = f"cast(({rest} - {rest} % {number}) / {number} as {WIDEST})"
        last = f"((({rest} % {number}) * {_power(more_digits)}) div {number})"
        digits = f"lpad({middle}, {_LOW}, '0'), lpad({last}, {more_digits}, '0')"
        exponent = f"'E-{self.scale + more_digits}'"
        return self._unless_null(f"concat({parts.sign}, {first}, {digits}, {exponent})")

    @property
    def _low(self) -> str:
        """The name of the column of `low`, or of a sum that is not wide."""
        return f"{self.name}$sum"

    @property
    def _high(self) -> str:
        """The name of the column of `high`."""
        return f"{self.name}$high"

    def _wide_parts(self) -> _WideParts:
        """Return Spark SQL for the parts of a wide sum."""
        high = f"coalesce({quote_name(self._high)}, 0)"
        low = quote_name(self._low)
        is_negative = f"({_carry(high, low)} < 0)"
        high = f"(case when {is_negative} then 0 - {high} else {high} end)"
        low = f"(case when {is_negative} then 0 - {low} else {low} end)"
        return _WideParts(
            sign=f"if({is_negative}, '-', '')",
            high=_carry(high, low),
            low=f"pmod({low}, {_power(_LOW)})",
        )

    def _unless_null(self, text: str) -> str:
        """Return Spark SQL for this text, or null if there is no sum."""
        return f"case when {quote_name(self._low)} is not null then {text} end"


class _WideParts(NamedTuple):
    """Spark SQL for the sign of a wide sum, and for `high` and `low` of its absolute value; `low`
    then has at most 20 digits.
    """

    sign: str
    high: str
    low: str


def exact_column(name: str) -> str:
    """Return the name of the column for the exact value of an aggregate.

    Its expression is long and used several times; as a column, Spark analyses it once.
    """
    return f"__exact_{name}"


class Aggregation(ABC):
    """A value that is computed for each window from the column `column` of its records; with
    None, from the records.
    """

    __slots__ = ()
    column: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the records that the value is computed from; () for a count of records."""
        if self.column is None:
            return ()
        return (self.column,)

    def describe(self) -> str:
        """Return a description for plans: "sum(spent)"."""
        return f"{type(self).__name__.lower()}({self.column or ''})"

    def accepts(self, kind: str) -> bool:
        """Whether the value can be computed from a column of the type `kind`: by default of all
        simple types.
        """
        return not is_nested(kind)

    @abstractmethod
    def result_type(self, kind: str | None) -> str | None:
        """Return the type of the value for a column of the type `kind`; None if that is unknown."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        """Return the partial values to store for the value called `name`, of a column of the type
        `kind`.

        () if the window's records are stored instead.
        """
        return ()

    def unit(self, kind: str) -> str:
        """Return the unit in which values of a column of the type `kind` are stored, "in units of
        1E-2"; often "".

        State that was stored in one unit is rejected by a window with another.
        """
        return ""

    def result(self, name: str, kind: str) -> str:
        """Return Spark SQL for the value called `name`; null if its type can't hold it.

        It is computed from the partial values or, if `exact` returns an expression, from the column
        `exact_column(name)`, which has the value of that.
        """
        return quote_name(name)

    def exact(self, name: str, kind: str) -> str | None:
        """Return Spark SQL for the exact value, wider or as text; None if the type of the value
        always holds it.
        """
        return None


@validated
@dataclass(frozen=True, slots=True)
class Count(Aggregation):
    """The number of records, or of those whose `column` is not null."""

    column: str | None = None

    def accepts(self, kind: str) -> bool:
        return True

    def result_type(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return (count_partial(f"{name}$count", self.column),)

    def result(self, name: str, kind: str) -> str:
        return quote_name(f"{name}$count")


@validated
@dataclass(frozen=True, slots=True)
class Sum(Aggregation):
    """The sum of a column: bigint for integers, decimal for decimals (both exact), double for
    float and double.
    """

    column: str

    def accepts(self, kind: str) -> bool:
        return _is_number(kind)

    def result_type(self, kind: str | None) -> str | None:
        if kind is None:
            return None
        return sum_type(kind)

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return _sum_partials(name, self.column, kind)

    def unit(self, kind: str) -> str:
        return _unit(kind)

    def result(self, name: str, kind: str) -> str:
        if self.exact(name, kind) is None:
            return quote_name(f"{name}$sum")
        return f"try_cast({quote_name(exact_column(name))} as {sum_type(kind)})"

    def exact(self, name: str, kind: str) -> str | None:
        if kind in FLOATS:
            return None
        return ExactSum(name, kind).total()


class _Extreme(Aggregation):
    """The least or greatest value of a column: `function` aggregates it, `of_two` computes it from
    two values.
    """

    __slots__ = ()
    column: str
    function: ClassVar[str]
    of_two: ClassVar[str]

    def result_type(self, kind: str | None) -> str | None:
        return kind

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        partial = f"{name}${self.function}"
        made = f"{self.function}({quote_name(self.column)})"
        merged = f"{self.function}({quote_name(partial)})"
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
    """The mean of a column: double for integers, float and double; for decimals, a decimal with
    four more digits.

    With more than 21 digits after the point, it has as many digits as Spark's division gives it.
    The sum of integers and decimals is exact.
    """

    column: str

    def accepts(self, kind: str) -> bool:
        return _is_number(kind)

    def result_type(self, kind: str | None) -> str | None:
        if kind is None:
            return None
        digits = decimal_digits(kind)
        if digits is None:
            return "double"
        precision = min(digits.precision + 4, 38)
        return f"decimal({precision},{_scale_of_mean(*digits)})"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        number = count_partial(f"{name}$count", self.column)
        return (number, *_sum_partials(name, self.column, kind))

    def unit(self, kind: str) -> str:
        return _unit(kind)

    def result(self, name: str, kind: str) -> str:
        total = quote_name(f"{name}$sum")
        number = quote_name(f"{name}$count")
        returns = str(self.result_type(kind))
        digits = decimal_digits(kind)
        if self.exact(name, kind) is not None:
            return f"try_cast({quote_name(exact_column(name))} as {returns})"
        if digits is None:
            mean = f"cast({total} as double) / {number}"
        elif digits.scale > _DIVIDED_APART:
            mean = f"cast(cast({total} as {sum_type(kind)}) / {number} as {returns})"
        else:
            mean = _quotient(f"cast({total} as {sum_type(kind)})", number, *digits, returns)
        return f"case when {number} > 0 then {mean} end"

    def exact(self, name: str, kind: str) -> str | None:
        stored = ExactSum(name, kind)
        digits = decimal_digits(kind)
        if digits is None or not stored.is_wide:
            return None
        return stored.mean(quote_name(f"{name}$count"), _scale_of_mean(*digits))


@validated
@dataclass(frozen=True, slots=True)
class Distinct(Aggregation):
    """The number of different values of a column.

    It is exact, with all values stored in the window's row. If `approximate`, a sketch of at most 4
    KiB is stored instead, and the number is usually within 3 %.
    """

    column: str
    approximate: bool = False

    def describe(self) -> str:
        if self.approximate:
            return f"about distinct({self.column})"
        return f"distinct({self.column})"

    def result_type(self, kind: str | None) -> str:
        return "bigint"

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        if self.approximate:
            return (self._sketch(name, kind),)
        text = _as_text(self.column, kind)
        stored = quote_name(f"{name}$values")
        made = f"to_json(array_sort(collect_set({text})))"
        merged = f"to_json(array_sort(array_distinct(flatten(collect_list({_values(stored)})))))"
        added = f"to_json(array_sort(array_union({_values('{0}')}, {_values('{1}')})))"
        return (Partial(f"{name}$values", "string", made, merged, added),)

    def _sketch(self, name: str, kind: str) -> Partial:
        """Return the partial value that approximates the number."""
        stored = quote_name(f"{name}$sketch")
        if kind in INTEGERS:
            value = f"cast({quote_name(self.column)} as bigint)"
        else:
            value = f"concat('=', {_as_text(self.column, kind)})"  # sketches ignore empty texts
        return Partial(
            f"{name}$sketch",
            "binary",
            made=f"hll_sketch_agg({value}, 12)",
            merged=f"hll_union_agg({stored})",
            added=_either("hll_union({0}, {1})"),
            ordered=True,
        )

    def unit(self, kind: str) -> str:
        if kind in FLOATS:
            return "as double"
        return _unit(kind, whole=self.approximate)

    def result(self, name: str, kind: str) -> str:
        if self.approximate:
            return f"hll_sketch_estimate({quote_name(f'{name}$sketch')})"
        return f"cast(size({_values(quote_name(f'{name}$values'))}) as bigint)"


@validated
@dataclass(frozen=True, slots=True)
class Aggregate(Aggregation):
    """The result of your function for all records of a window: one value of the type `returns`.

    Spark tasks call it with a pyarrow.Table (with `form="pandas"`, a pandas DataFrame) of the
    columns `of` (default: all) of these records, ordered by position. The records of open windows
    are stored.
    """

    function: AggregateFunction
    returns: str
    of: str | Sequence[str] | None = None
    form: Literal["arrow", "pandas"] = "arrow"

    def __post_init__(self) -> None:
        check_plain_function("Aggregate", self.function, "function", "records")
        if self.of is not None and not self.columns:
            step = "Name some, or leave it out."
            raise ConfigurationError("Aggregate has of=[], no column.", step, argument="of")
        object.__setattr__(self, "returns", Field("value", self.returns).type)
        object.__setattr__(self, "of", self.columns or None)

    @property
    def columns(self) -> tuple[str, ...]:
        if isinstance(self.of, str):
            return (self.of,)
        return tuple(self.of or ())

    def describe(self) -> str:
        return function_label(self.function)

    def accepts(self, kind: str) -> bool:
        return True

    def result_type(self, kind: str | None) -> str:
        return self.returns

    def compute(self, records: pa.Table) -> object:
        """Return the function's result for a window's records, with the columns that it takes."""
        if self.form == "pandas":
            return self.function(to_pandas(records))
        return self.function(records)


def _is_number(kind: str) -> bool:
    """Whether values of this type are numbers."""
    return kind in NUMBERS or decimal_digits(kind) is not None


def _unit(kind: str, *, whole: bool = False) -> str:
    """Return the unit of decimals of this type, "in units of 1E-2"; "" for other types.

    Decimals without digits after the point have a unit only with `whole`.
    """
    digits = decimal_digits(kind)
    if digits is None:
        return ""
    if not digits.scale and not whole:
        return ""
    return f"in units of 1E-{digits.scale}"


def _scale_of_mean(precision: int, scale: int) -> int:
    """Return how many digits after the point the mean of a decimal has: four more or, for decimals
    with more than _DIVIDED_APART of them, as many as Spark's division gives it.
    """
    if scale <= _DIVIDED_APART:
        return scale + 4
    return min(scale + 4, 38 - min(precision + 10, 38) + scale)


def _quotient(total: str, number: str, precision: int, scale: int, returns: str) -> str:
    """Return Spark SQL for `total` divided by `number`, the number of records, with all digits of
    the type `returns`.

    The more digits before the point the dividend's type has, the fewer digits after it Spark
    computes. So the divisible part is divided separately from the remainder, which is less than the
    number of records.
    """
    rest = f"({total} % {number})"
    # A sum has ten digits more than its records. Any number of records has 19 digits at most; where
    # there is no room for them, 13.
    whole = f"cast({total} - {rest} as decimal({precision + 10 - scale},0)) / {number}"
    digits_of_number = 19 if scale + 4 <= 18 else 13
    fraction = f"cast({rest} as decimal({digits_of_number + scale},{scale})) / {number}"
    return f"cast(cast({whole} as {returns}) + cast({fraction} as {returns}) as {returns})"


def _either(both: str) -> str:
    """Return an expression that is `both` for two partial values, {0} and {1}, and if one is
    null the other one.
    """
    return f"case when {{0}} is null then {{1}} when {{1}} is null then {{0}} else {both} end"


def count_partial(name: str, column: str | None) -> Partial:
    """Return the partial value `name` that counts records, or those whose `column` is not null."""
    counted = "1" if column is None else quote_name(column)
    added = "coalesce({0}, 0L) + coalesce({1}, 0L)"
    return Partial(name, "bigint", f"count({counted})", f"sum({quote_name(name)})", added)


def _sum_partials(name: str, column: str, kind: str) -> tuple[Partial, ...]:
    """Return the partial values of the sum of a column of this type, called `name`."""
    if kind not in FLOATS:
        return ExactSum(name, kind).partials(column)
    stored = f"{name}$sum"
    made = f"sum({quote_name(column)})"
    merged = f"sum({quote_name(stored)})"
    return (Partial(stored, "double", made, merged, _either("{0} + {1}"), ordered=True),)


def _carry(high: str, low: str) -> str:
    """Return Spark SQL for `high` plus the carry from `low`, its digits beyond the last 20;
    negative if the sum is.
    """
    return f"({high} + ({low} - pmod({low}, {_power(_LOW)})) div {_power(_LOW)})"


def _power(exponent: int) -> str:
    """Return Spark SQL for 10**exponent in the narrowest decimal type: with a wider one, results
    would lose digits.
    """
    if exponent < 0:
        kind = f"decimal({-exponent},{-exponent})"
    else:
        kind = f"decimal({exponent + 1},0)"
    return f"cast('1E{exponent}' as {kind})"


def _decimal_partial(name: str, made: str, scale: int) -> Partial:
    """Return the partial value `name`, the sum `made` as a decimal of 38 digits."""
    kind = f"decimal(38,{scale})"
    narrow = f"decimal(37,{scale})"  # adding two decimals of 38 digits, Spark rounds one off
    both = f"cast(cast({{0}} as {narrow}) + cast({{1}} as {narrow}) as {kind})"
    merged = f"cast(sum({quote_name(name)}) as {kind})"
    return Partial(name, kind, f"cast({made} as {kind})", merged, _either(both))


def _values(text: str) -> str:
    """Return Spark SQL for the array that this JSON text has; an empty one for null."""
    return f"coalesce(from_json({text}, '{_SET}'), cast(array() as {_SET}))"


def _as_text(column: str, kind: str) -> str:
    """Return Spark SQL for a text that is equal for equal values only; 0.0 and -0.0 are equal."""
    value = quote_name(column)
    if kind == "string":
        return value
    if kind == "binary":
        return f"hex({value})"
    if kind in FLOATS:
        value = f"{value} + 0D"
    return f"cast({value} as string)"

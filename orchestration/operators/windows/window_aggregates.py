"""What is computed of the records of a window: Count, Sum, Min, Max, Mean, Distinct, and functions of users.

An aggregate is kept as *partial values*, columns of the window's row in the state table: made of a batch's records,
and added to what was kept. All of it is Spark SQL as text. Nulls are left out, as SQL's aggregates do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dagster_adjunct.orchestration.operators.windows.exact_sums import DECIMAL, ExactSum, Partial
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    import pyarrow as pa

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
        return quoted(name)

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
        return quoted(f"{name}$count")


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
        return quoted(f"{name}$sum") if exact is None else f"try_cast({exact} as {_sum_type(kind)})"

    def exact(self, name: str, kind: str) -> str | None:
        return None if kind in FLOATS else ExactSum(name, kind).total()


@dataclass(frozen=True, slots=True)
class _Extreme(_OfColumn):
    def takes(self, kind: str) -> bool:
        return True

    def returns_of(self, kind: str | None) -> str | None:
        return kind

    def _partial(self, name: str, kind: str, aggregate: str, of_two: str) -> tuple[Partial, ...]:
        made, merged = f"{aggregate}({quoted(self.column)})", f"{aggregate}({quoted(name)})"
        return (Partial(name, kind, made, merged, f"{of_two}({{0}}, {{1}})"),)


@dataclass(frozen=True, slots=True)
class Min(_Extreme):
    """The least value of a column."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return self._partial(f"{name}$min", kind, "min", "least")

    def result(self, name: str, kind: str) -> str:
        return quoted(f"{name}$min")


@dataclass(frozen=True, slots=True)
class Max(_Extreme):
    """The greatest value of a column."""

    def partials(self, name: str, kind: str) -> tuple[Partial, ...]:
        return self._partial(f"{name}$max", kind, "max", "greatest")

    def result(self, name: str, kind: str) -> str:
        return quoted(f"{name}$max")


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
        total, number, returns = quoted(f"{name}$sum"), quoted(f"{name}$count"), str(self.returns_of(kind))
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
        return kept.mean(quoted(f"{name}$count"), _scale_of_mean(int(decimal[1]), int(decimal[2])))


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
            kept, value = quoted(f"{name}$sketch"), _sketched(self.column, kind)
            either = "case when {0} is null then {1} when {1} is null then {0} else hll_union({0}, {1}) end"
            made, merged = f"hll_sketch_agg({value}, 12)", f"hll_union_agg({kept})"
            return (Partial(f"{name}$sketch", "binary", made, merged, either, ordered=True),)
        kept = quoted(f"{name}$values")
        made = f"to_json(array_sort(collect_set({_as_text(self.column, kind)})))"
        merged = f"to_json(array_sort(array_distinct(flatten(collect_list({_values(kept)})))))"
        either = f"to_json(array_sort(array_union({_values('{0}')}, {_values('{1}')})))"
        return (Partial(f"{name}$values", "string", made, merged, either),)

    def result(self, name: str, kind: str) -> str:
        if self.approximate:
            return f"hll_sketch_estimate({quoted(f'{name}$sketch')})"
        return f"cast(size({_values(quoted(f'{name}$values'))}) as bigint)"


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
    counted = "1" if column is None else quoted(column)
    return Partial(name, "bigint", f"count({counted})", f"sum({quoted(name)})", "coalesce({0}, 0L) + coalesce({1}, 0L)")


def _sum(name: str, column: str, kind: str) -> tuple[Partial, ...]:
    if kind not in FLOATS:
        return ExactSum(name, kind).partials(column)
    kept = quoted(f"{name}$sum")
    either = "case when {0} is null then {1} when {1} is null then {0} else {0} + {1} end"
    return (Partial(f"{name}$sum", "double", f"sum({quoted(column)})", f"sum({kept})", either, ordered=True),)


def _values(text: str) -> str:
    return f"coalesce(from_json({text}, '{_SET}'), cast(array() as {_SET}))"


def _as_text(column: str, kind: str) -> str:
    """Return a text for each value, different texts for different values: 0.0 and -0.0 are equal."""
    value = quoted(column)
    if kind == "binary":
        return f"hex({value})"
    return (
        value if kind == "string" else f"cast({value} + 0D as string)" if kind in FLOATS else f"cast({value} as string)"
    )


def _sketched(column: str, kind: str) -> str:
    """Return what a sketch takes of each value: it passes over empty texts."""
    return f"cast({quoted(column)} as bigint)" if kind in INTEGERS else f"concat('=', {_as_text(column, kind)})"

"""Exact sums of integers and decimals, wider than any type of their results, as Spark SQL.

Records are added in the order in which they arrive, so a partial sum may exceed the type of the result although the
final sum does not. Therefore only results are checked. Integers, and decimals of at most 27 digits, are stored as one
decimal of 38 digits. Wider decimals are stored as two whole numbers, in units of their last digit:

    sum = high * 10**20 + low        high: the sum of the first 18 digits of each record, low: of the other 20
"""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.resources.schemas.schema import decimal_digits, quote_name

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
    """The stored sum for a window's value `name`, of a column of the type `kind`: an integer or a decimal."""

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
    either = f"case when {{0}} is null then {{1}} when {{1}} is null then {{0}} else {both} end"
    return Partial(name, kind, f"cast({made} as {kind})", f"cast(sum({quote_name(name)}) as {kind})", either)

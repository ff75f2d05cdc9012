"""Exact sums of integers and decimals, wider than any type of their results, as Spark SQL.

Records are added in whatever order and batches they come, so a sum on its way may be beyond the type of the result,
and still come back. So nothing is checked before a result is made. Integers, and decimals of at most 27 digits, are
kept as one decimal of 38 digits. Wider decimals are kept as two whole numbers, in units of their last digit:

    sum = high * 10**20 + low        high: what 18 digits of each record add up to, low: the other 20
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster_adjunct.resources.schemas.column_sql import quote_name

DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
WIDEST = "decimal(38,0)"
_LOW, _NARROW, _SMALL = 20, 27, 28
"""Of 38 digits, 27 or 28 of each record leave ten or more for their number."""


@dataclass(frozen=True, slots=True)
class Partial:
    """One column of a window's row: of this type, made of records by the expression `made`.

    `merged` makes one of those of several rows. `added` is one of two, which it calls {0} and {1}, and either of which
    may be null. `ordered`: the last digits depend on the order of what is added, so it has to be the same each time.
    """

    name: str
    type: str
    made: str
    merged: str
    added: str
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The sum that a window keeps for its value `name`, of columns of the type `kind`: an integer or a decimal."""

    name: str
    kind: str

    @property
    def scale(self) -> int:
        """Digits behind the point."""
        decimal = DECIMAL.fullmatch(self.kind)
        return int(decimal[2]) if decimal else 0

    @property
    def is_wide(self) -> bool:
        """Whether it is kept as two numbers."""
        decimal = DECIMAL.fullmatch(self.kind)
        return decimal is not None and int(decimal[1]) > _NARROW

    @property
    def wider(self) -> str | None:
        """The widest type of values whose sum is kept as this one is, where its result has more room then."""
        decimal = DECIMAL.fullmatch(self.kind)
        if decimal is None:
            return "decimal(20,0)"
        return f"decimal({_NARROW},{self.scale})" if int(decimal[1]) < _NARROW else None

    def partials(self, column: str) -> tuple[Partial, ...]:
        """Return what is kept of this column of the records."""
        value, scale = quote_name(column), self.scale
        if self.is_wide:
            value, split = f"cast({value} as decimal(38,{scale}))", _power(_LOW - scale)
            # Taking a number apart takes ten times as long as adding it, so only those are that may add up to too much.
            # Spark's abs and unary minus round to 34 digits, and are not used here.
            is_small = f"{value} between 0 - {_power(_SMALL - scale)} and {_power(_SMALL - scale)}"
            low = f"sum(case when {is_small} then {value} else {value} % {split} end)"
            high = f"sum(case when not {is_small} then cast({value} div {split} as decimal(18,0)) end)"
            high = f"coalesce({high}, 0) + {low} div {split}"
            low = f"cast({low} % {split} / {_power(-scale)} as {WIDEST})"
            return _added(self._low, low, 0), _added(self._high, high, 0)
        made = f"sum({value})"
        if self.kind == "bigint":
            # Of halves, no sum of a batch is beyond a bigint; decimals would take twice as long.
            made = f"cast(sum({value} >> 32) as {WIDEST}) * 4294967296L + sum({value} & 4294967295L)"
        return (_added(self._low, made, scale),)

    def total(self) -> str:
        """Return the sum: a number, or of a wide one its digits as text, which may be too many for any type."""
        if not self.is_wide:
            return quote_name(self._low)
        sign, high, low = self._digits()
        return self._if_any(f"concat({sign}, {high}, lpad({low}, {_LOW}, '0'), 'E-{self.scale}')")

    def mean(self, number: str, scale: int) -> str:
        """Return a wide sum by a `number` of records as text: exact, but cut off a digit behind those of `scale`."""
        sign, high, low = self._digits()
        more = scale - self.scale + 1
        number = f"cast({number} as decimal(19,0))"
        rest = f"(({high} % {number}) * {_power(_LOW)} + {low})"
        middle = f"cast(({rest} - {rest} % {number}) / {number} as {WIDEST})"
        last = f"((({rest} % {number}) * {_power(more)}) div {number})"
        digits = f"lpad({middle}, {_LOW}, '0'), lpad({last}, {more}, '0'), 'E-{self.scale + more}'"
        return self._if_any(f"concat({sign}, {high} div {number}, {digits})")

    @property
    def _low(self) -> str:
        return f"{self.name}$sum"

    @property
    def _high(self) -> str:
        return f"{self.name}$high"

    def _digits(self) -> tuple[str, str, str]:
        """Return the sign, and `high` and `low` of the amount, where low has no more than its 20 digits."""
        high, low = f"coalesce({quote_name(self._high)}, 0)", quote_name(self._low)
        negative = f"({_upper(high, low)} < 0)"
        high, low = (f"(case when {negative} then 0 - {part} else {part} end)" for part in (high, low))
        return f"if({negative}, '-', '')", _upper(high, low), f"pmod({low}, {_power(_LOW)})"

    def _if_any(self, text: str) -> str:
        return f"case when {quote_name(self._low)} is not null then {text} end"


def _upper(high: str, low: str) -> str:
    """Return `high` with what `low` has beyond its 20 digits; negative where the whole is."""
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

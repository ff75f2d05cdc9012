"""Values that are written as text, in files and on command lines: what each column type accepts,
and nothing else.

Arrow's and Python's own converters accept more than a reader expects: hexadecimal numbers,
underscores, digits of other scripts, decimals with more digits than declared. So each text must
match the pattern of its type before it is converted. docs/sources.md has the same rules as a table.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.schemas.types import (
    INTEGER_BITS,
    arrow_type,
    decimal_digits,
    expected_range,
)

_MAX_SHOWN = 60


class TextMisfit(ValueError):
    """A text is not a value of its column's type: its row (from 0), and the reason, which shows
    the text.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextForm:
    """How values of a type are written: a regular expression for whole texts, and its meaning in
    words.
    """

    pattern: str
    expected: str

    def matches(self, text: str) -> bool:
        """Whether the text is written like a value of this type; it may still be out of its
        range.
        """
        return re.fullmatch(self.pattern, text) is not None


_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?)?"
_ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)"
WHOLE_NUMBER = TextForm("[+-]?[0-9]+", "digits with an optional sign, such as -12")
_FLOAT = TextForm(
    rf"{_NUMBER}(?:[eE][+-]?[0-9]+)?|[+-]?(?i:nan|inf|infinity)",
    "a decimal number, such as -1.5e3, or NaN or Infinity",
)
_FORMS = {
    **dict.fromkeys(INTEGER_BITS, WHOLE_NUMBER),
    **dict.fromkeys(("float", "double"), _FLOAT),
    "decimal": TextForm(
        rf"{_NUMBER}(?:[eE][+-]?[0-9]{{1,2}})?", "a decimal number, such as -12.50"
    ),
    "boolean": TextForm("true|True|TRUE|false|False|FALSE", "true or false"),
    "date": TextForm(_DAY, "a date, such as 2026-01-31"),
    "timestamp": TextForm(
        f"{_DAY}[T ]{_CLOCK}{_ZONE}",
        "a date, a time with at most six decimals, and a zone, such as 2026-01-31T09:30:00.5Z",
    ),
    "binary": TextForm(
        "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", "base64 with its padding"
    ),
}
_WITHOUT_ZONE = re.compile(rf"{_DAY}(?:[T ]{_CLOCK})?")


def parse_moment(text: str) -> dt.datetime:
    """Return a time in ISO 8601, as in files, except that its zone (then UTC) and its time of day
    may be absent.

    Raises ValueError for any other text.
    """
    form = _FORMS["timestamp"]
    if not any(form.matches(text + end) for end in ("", "Z", "T00Z")):
        raise ValueError(f"{_shown(text)} is no time")
    moment = dt.datetime.fromisoformat(text)
    if moment.tzinfo:
        return moment
    return moment.replace(tzinfo=dt.UTC)


def text_form(kind: str) -> TextForm | None:
    """Return how values of this Spark type are written as text, None for a type that takes any
    text.
    """
    return _FORMS.get(kind.partition("(")[0])


def convert_texts(texts: pa.Array, kind: str) -> pa.Array:
    """Return texts as values of this Spark type. Raises TextMisfit for the first one that is no
    value of it.
    """
    form = text_form(kind)
    if form is None:
        return texts
    fits = pc.fill_null(pc.match_substring_regex(texts, f"^(?:{form.pattern})$"), True)
    if not pc.all(fits, min_count=0).as_py():
        row = pc.index(fits, False).as_py()
        convert_texts(texts[:row], kind)  # raises if an earlier one is out of range
        raise TextMisfit(row, _misfit(texts[row].as_py(), kind))
    try:
        values = _cast(texts, kind)
    except pa.ArrowInvalid:
        # One text is out of range, or Arrow can't read it though it fits, such as a number with 50
        # leading zeros.
        return _convert_one_by_one(texts, kind)
    if kind in ("float", "double") and pc.any(pc.is_inf(values)).as_py():
        _check_infinities(texts, values, kind)
    return values


def _cast(texts: pa.Array, kind: str) -> pa.Array:
    """Return texts that are written like values of a type as these. Raises ArrowInvalid for one
    that is out of range.
    """
    if kind == "binary":
        return pa.array(
            [None if text is None else base64.b64decode(text) for text in texts.to_pylist()],
            arrow_type(kind),
        )
    if (digits := decimal_digits(kind)) is not None:
        # In 256 bits no text is rescaled beyond the range, which Arrow does not notice.
        texts = texts.cast(pa.decimal256(*digits))
    elif kind in INTEGER_BITS:
        texts = pc.ascii_ltrim(texts, characters="+")
    return texts.cast(arrow_type(kind))


def _check_infinities(texts: pa.Array, values: pa.Array, kind: str) -> None:
    """Raise TextMisfit for a number that became infinite because it is too large."""
    words = pc.match_substring_regex(texts, "(?i)inf")
    row = pc.index(pc.and_(pc.is_inf(values), pc.invert(words)), True).as_py()
    if row >= 0:
        raise TextMisfit(row, f"{_shown(texts[row].as_py())} is too large for {kind}")


def _convert_one_by_one(texts: pa.Array, kind: str) -> pa.Array:
    """Return texts as values of a type, converted by Python. Raises TextMisfit for one out of
    range.
    """
    convert = _exact_converter(kind)
    values: list[Any] = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else convert(text))
        except (ValueError, OverflowError) as error:
            raise TextMisfit(row, _misfit(text, kind)) from error
    return pa.array(values, arrow_type(kind))


def _exact_converter(kind: str) -> Callable[[str], Any]:
    """Return the function that converts a text to a value of this type, or raises ValueError or
    OverflowError.
    """
    if kind == "date":
        return dt.date.fromisoformat
    if kind == "timestamp":
        return lambda text: dt.datetime.fromisoformat(text).astimezone(dt.UTC)
    digits = decimal_digits(kind)
    if digits is None:
        return _integer_of(kind)
    return _decimal_of(*digits)


def _integer_of(kind: str) -> Callable[[str], int]:
    """Return the function that converts a text to an integer of this type."""
    bound = 2 ** (INTEGER_BITS[kind] - 1)

    def convert(text: str) -> int:
        number = int(text)
        if not -bound <= number < bound:
            raise OverflowError
        return number

    return convert


def _decimal_of(precision: int, scale: int) -> Callable[[str], Decimal]:
    """Return the function that converts a text to a decimal of so many digits."""

    def convert(text: str) -> Decimal:
        number = Decimal(text)
        # As many digits as the text may need: nothing is rounded before it is compared.
        exact = number.quantize(Decimal(1).scaleb(-scale), context=Context(prec=len(text) + 200))
        if exact != number or exact.copy_abs() >= Decimal(10) ** (precision - scale):
            raise OverflowError
        return exact

    return convert


def _misfit(text: str, kind: str) -> str:
    """Return why the text is no value of this type."""
    form = text_form(kind)
    assert form is not None
    shown = _shown(text)
    if kind == "timestamp" and _WITHOUT_ZONE.fullmatch(text):
        return f"{shown} has no time zone: expected {form.expected}"
    if not form.matches(text) or kind in ("date", "timestamp"):
        return f"{shown} is not as expected: {form.expected}"
    return f"{shown} does not fit: {expected_range(kind)}"


def _shown(text: str) -> str:
    """Return a text as errors show it: quoted, and only the beginning of a long one."""
    if len(text) <= _MAX_SHOWN:
        return repr(text)
    return f"{text[:_MAX_SHOWN]!r} … ({len(text)} characters)"

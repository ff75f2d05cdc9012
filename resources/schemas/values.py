"""Finds values that Arrow can hold and Python can't: dates outside the years 1 to 9999, and strings
that are not UTF-8.

They could be written but not read again, so wherever records enter, such values are rejected: with
`first_unreadable` if the whole table is rejected, with `unreadable_values` if the other rows are
kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pt
from dagster_adjunct.resources.schemas.arrow_values import as_lists
from dagster_adjunct.resources.schemas.types import has_maps, write_name

CHECKED_TYPES = ("string", "date", "timestamp")
Errors = Literal["backslashreplace", "replace"]
YEARS = "years are 1 to 9999"
UTF8 = "text is UTF-8"


class Bounds(NamedTuple):
    """The first and the last value that Python can hold, counted from 1970."""

    first: int
    last: int


DAYS = Bounds(-719_162, 2_932_896)
"""0001-01-01 and 9999-12-31, in days."""
MICROS = Bounds(DAYS.first * 86_400_000_000, (DAYS.last + 1) * 86_400_000_000 - 1)
"""The same days' first and last microsecond."""
_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_MAX_CHARS = 100


def unreadable_values(
    column: pa.Array | pa.ChunkedArray, errors: Errors = "backslashreplace"
) -> dict[int, Any]:
    """Return the values of a column that Python can't hold, by row, as `readable_value` returns
    them.

    Usually there are none, which Arrow's functions find without a search of the rows.
    """
    if not _has_unreadable(column):
        return {}
    return {row: readable_value(column[row], errors) for row in _unreadable_rows(column)}


def readable_values(
    column: pa.Array | pa.ChunkedArray, errors: Errors = "backslashreplace"
) -> list[Any]:
    """Return a column's values as Python objects, as `readable_value` returns them."""
    if _has_unreadable(column):
        return [readable_value(value, errors) for value in column]
    return python_values(column)


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return a column's values as Python objects, with dictionaries for maps at every depth."""
    values: list[Any]
    if has_maps(column.type):
        values = column.to_pylist(maps_as_pydicts="strict")
    else:  # over twice as fast
        values = column.to_pylist()
    return values


def python_rows(records: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return records as dictionaries of Python objects, as `python_values` returns them."""
    if any(map(has_maps, records.schema.types)):
        columns = map(python_values, records.columns)
        names = records.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    rows: list[dict[str, Any]] = records.to_pylist()
    return rows


def to_pandas(records: pa.Table) -> Any:
    """Return records as a pandas DataFrame, in which nested values are Python objects, as
    `python_values` returns them.
    """
    nested = [name for name in records.column_names if pt.is_nested(records.column(name).type)]
    frame = records.drop_columns(nested).to_pandas()
    for name in nested:  # in NumPy's arrays, integers with nulls would be inexact
        values = np.fromiter(python_values(records.column(name)), object, records.num_rows)
        frame.insert(records.column_names.index(name), name, values)
    return frame


@dataclass(frozen=True, slots=True)
class UnreadableValue:
    """A value that Python can't hold: its column and row (from 0), the value as text, the rule
    that it violates, and its path, which begins with the column.
    """

    column: str
    row: int
    text: str
    rule: str
    path: str

    @property
    def next_step(self) -> str:
        """What the producer of the records can do about it."""
        return {
            YEARS: "Write the intended date, at most 9999-12-31, or null.",
            UTF8: (
                "Decode it with its own character set first, as in data.decode('cp1252'), or"
                " declare it as binary."
            ),
        }.get(self.rule, "Correct the value, or write null instead.")

    def problem(self, place: str = "", *, hidden: bool = False) -> str:
        """Return a description of the problem; `place` is the location of the row. A `hidden` value
        is described as `***`.
        """
        if hidden:
            value = "***"
        else:
            value = self.text
        where = ""
        if place:
            where = f" of {place}"
        return f"column {self.path!r}{where} is {value}, which Python can't hold: {self.rule}"

    def error(
        self, what: str, place: str, *, hidden: bool = False, **about: Any
    ) -> SchemaMismatchError:
        """Return the error for this value: `what` names the data, `place` the row; `about` are
        further fields.
        """
        problem = self.problem(place, hidden=hidden)
        return SchemaMismatchError(
            f"{what}: {problem}.", self.next_step, column=self.column, **about
        )


def first_unreadable(
    records: pa.Table | pa.RecordBatch, names: Iterable[str] | None = None
) -> UnreadableValue | None:
    """Return the first value that Python can't hold in these columns (None: all columns); None
    if there is none.
    """
    places: Iterable[tuple[int | str, str]]  # the column's index or name, and its name
    if names is None:
        places = enumerate(records.schema.names)
    else:
        places = ((name, name) for name in names)
    for place, name in places:
        column = records.column(place)
        if _has_unreadable(column):
            row = next(iter(_unreadable_rows(column)))
            return _describe_unreadable(name, row, column.slice(row, 1))
    return None


def _describe_unreadable(
    name: str, row: int, values: pa.Array | pa.ChunkedArray
) -> UnreadableValue:
    """Return what is unreadable in the value of a row, the only one of `values`: the value itself,
    or a part of it.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    path, values = _unreadable_part(array, name)
    place = next(iter(_unreadable_rows(values)))
    rule = YEARS if pt.is_temporal(values.type) else UTF8
    return UnreadableValue(name, row, _format_value(readable_value(values[place])), rule, path)


def _unreadable_part(values: pa.Array, path: str) -> tuple[str, pa.Array]:
    """Return the path and the values of the first simple part that has an unreadable value.

    There must be one in `values`; keys of maps come before their values.
    """
    kind = values.type
    if pt.is_dictionary(kind):
        return _unreadable_part(values.dictionary_decode(), path)
    if not pt.is_nested(kind):
        return path, values
    if pt.is_struct(kind):
        members = zip(kind, values.flatten(), strict=True)
        field, part = next(pair for pair in members if _has_unreadable(pair[1]))
        return _unreadable_part(part, f"{path}.{write_name(field.name)}")
    if not pt.is_map(kind):
        return _unreadable_part(values.flatten(), f"{path}[]")
    keys, items = as_lists(values).flatten().flatten()
    if _has_unreadable(keys):
        return f"{path}, the keys,", keys
    return _unreadable_part(items, f"{path}[*]")


def expected_values(kind: str) -> str:
    """Return the rule for values of this Spark type, which is one of CHECKED_TYPES, as text for
    errors.
    """
    if kind == "string":
        return UTF8
    return YEARS


def readable_value(scalar: pa.Scalar, errors: Errors = "backslashreplace") -> Any:
    """Return a value as a Python object. A date or string that Python can't hold becomes text, also
    in nested values.

    In that text, bytes that are not UTF-8 are escaped, or with `errors="replace"` become U+FFFD, as
    in Java.
    """
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pt.is_dictionary(kind):
        return readable_value(scalar.dictionary[scalar.index.as_py()], errors)
    if pt.is_nested(kind):
        return _readable_nested(scalar, errors)
    if pt.is_date(kind) or pt.is_timestamp(kind):
        if _has_unreadable(pa.array([scalar], kind)):
            return format_spark_date(str(np.datetime64(scalar.value, _unit(kind))))
    elif _is_text(kind):
        return scalar.as_buffer().to_pybytes().decode(errors=errors)
    return scalar.as_py()


def _readable_nested(scalar: pa.Scalar, errors: Errors) -> Any:
    """Return a struct or map as a dictionary, and an array as a list, of readable values."""
    kind = scalar.type
    if pt.is_struct(kind):
        return {
            field.name: readable_value(scalar[place], errors) for place, field in enumerate(kind)
        }
    parts = [readable_value(item, errors) for item in scalar.values]
    if pt.is_map(kind):
        return {entry["key"]: entry["value"] for entry in parts}
    return parts


def _unit(kind: pa.DataType) -> Any:
    """Return the unit in which values of a date or timestamp type are counted."""
    if pt.is_date32(kind):
        return "D"
    if pt.is_date64(kind):
        return "ms"
    return kind.unit


def _is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of its types of strings."""
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def unreadable_condition(value: str, kind: str) -> str:
    """Return a Spark SQL condition that is true for values that Python can't hold.

    `value` is the SQL of the value, `kind` its type, one of CHECKED_TYPES.
    """
    if kind == "string":
        return f"NOT is_valid_utf8({value})"
    if kind == "date":
        return f"unix_date({value}) NOT BETWEEN {DAYS.first} AND {DAYS.last}"
    return f"unix_micros({value}) NOT BETWEEN {MICROS.first} AND {MICROS.last}"


def format_spark_date(text: str) -> str:
    """Return NumPy's text of a date or timestamp as Spark writes it: a sign before long years,
    no trailing zeros.
    """
    day, _, time = text.removeprefix("-").partition("T")
    year, _, month_and_day = day.partition("-")
    sign = ""
    if text.startswith("-"):
        sign = "-"
    elif len(year) > 4:
        sign = "+"
    if "." in time:
        time = time.rstrip("0").rstrip(".")
    return f"{sign}{int(year):04d}-{month_and_day} {time}".rstrip()


def _has_unreadable(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether the column has a value that Python can't hold."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        return any(map(_has_unreadable, column.chunks))
    if pt.is_date(kind) or pt.is_timestamp(kind):
        ends = pc.min_max(column)
        lowest = ends["min"].value
        if lowest is None:
            return False
        bounds = _bounds(kind)
        return bool(lowest < bounds.first or ends["max"].value > bounds.last)
    if _is_text(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return True
        return False
    if pt.is_dictionary(kind):
        return _has_unreadable(column.dictionary_decode())
    if pt.is_struct(kind):
        return any(map(_has_unreadable, column.flatten()))
    return bool(pt.is_nested(kind)) and _has_unreadable(as_lists(column).flatten())


def _bounds(kind: pa.DataType) -> Bounds:
    """Return the bounds of a date or timestamp type, in its unit."""
    a_day = 1
    if not pt.is_date32(kind):
        a_day = _A_DAY[_unit(kind)]
    return Bounds(DAYS.first * a_day, (DAYS.last + 1) * a_day - 1)


def _unreadable_rows(column: pa.Array | pa.ChunkedArray) -> Iterable[int]:
    """Return the indexes of the rows of a column whose values Python can't hold."""
    kind = column.type
    if not (pt.is_date(kind) or pt.is_timestamp(kind)):
        return _search_by_halves(column, 0, len(column))
    counts = column.cast("int32").cast("int64") if pt.is_date32(kind) else column.cast("int64")
    bounds = _bounds(kind)
    is_outside = pc.or_(pc.less(counts, bounds.first), pc.greater(counts, bounds.last))
    outside = pc.fill_null(is_outside, False)
    rows: list[int] = np.nonzero(np.asarray(outside))[0].tolist()
    return rows


def _search_by_halves(column: pa.Array | pa.ChunkedArray, start: int, count: int) -> Iterable[int]:
    """Yield the indexes of the rows whose values Python can't hold, of `count` rows from `start`
    on; finds them by bisection, so that few are checked one by one.
    """
    if not _has_unreadable(column.slice(start, count)):
        return
    if count == 1:
        yield start
        return
    half = count // 2
    yield from _search_by_halves(column, start, half)
    yield from _search_by_halves(column, start + half, count - half)


def _format_value(value: Any) -> str:
    """Return a value as errors show it, with at most _MAX_CHARS characters."""
    text = f"'{value}'" if isinstance(value, str) and value.isprintable() else repr(value)
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[: _MAX_CHARS - 1]}…"

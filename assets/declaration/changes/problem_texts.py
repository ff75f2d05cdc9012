"""What is wrong with a change, in words: as columns of Spark's, and as plain texts of the same wording.

A record's own values in a reason are marked, until `telling` or `told` shows or hides them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

_BEGINS, _ENDS = "\x02", "\x03"
_MARKED = re.compile(f"{_BEGINS}[^{_ENDS}]*{_ENDS}")
NO_PATH = "\x04"
"""What a reason begins with where a record lacks a path that `order_by` names: of the first change, it is an error."""
_UNMARKED = str.maketrans("", "", _BEGINS + _ENDS + NO_PATH)
_HIDDEN = "a value that is not told"
TRUNCATE = "a truncate deletes all rows at once, and a change is of one row: build the dataset anew"


def shown(value: Column) -> Column:
    """Return a text as reasons show it: quoted, its first 100 characters, or null."""
    from pyspark.sql import functions as F

    quoted = F.concat(F.lit("'"), F.substring(value, 1, 100), F.lit("'"))
    return F.coalesce(a_value(quoted), F.lit("null"))


def a_value(text: Column) -> Column:
    """Return a part of a reason that is a record's own; `telling` decides whether it is told."""
    from pyspark.sql import functions as F

    return F.concat(F.lit(_BEGINS), F.translate(text, _BEGINS + _ENDS, ""), F.lit(_ENDS))


def telling(reason: Column, *, values: bool) -> Column:
    """Return a reason with the values that stand in it (`shown`), or with a word in their places."""
    from pyspark.sql import functions as F

    if values:
        return F.translate(reason, _BEGINS + _ENDS + NO_PATH, "")
    return F.translate(F.regexp_replace(reason, f"{_BEGINS}[^{_ENDS}]*{_ENDS}", _HIDDEN), NO_PATH, "")


YEARS = "years are 1 to 9999"
_DAYS = (-719_162, 2_932_896)  # from 0001-01-01 to 9999-12-31
_MICROS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


def outside_years(value: Column, kind: str) -> Column:
    """Whether a date or timestamp is of a year that Python, and so a reader by key, has no value for."""
    from pyspark.sql import functions as F

    return ~(F.unix_date(value).between(*_DAYS) if kind == "date" else F.unix_micros(value).between(*_MICROS))


def unknown_operation(value: Column) -> Column:
    """Return the reason for an operation that is not declared."""
    from pyspark.sql import functions as F

    return F.concat(F.lit("unknown operation "), shown(value))


# -- the same in plain Python


def shown_text(value: str | None) -> str:
    """Return a text as reasons show it: quoted, its first 100 characters, or null."""
    return "null" if value is None else f"{_BEGINS}'{value[:100].translate(_UNMARKED)}'{_ENDS}"


def told(reason: str | None, *, values: bool) -> str | None:
    """Return a reason with the values that stand in it (`shown_text`), or with a word in their places."""
    if reason is None:
        return None
    return (reason if values else _MARKED.sub(_HIDDEN, reason)).translate(_UNMARKED)


def unknown_operation_text(value: str | None) -> str:
    """Return the reason for an operation that is not declared."""
    return f"unknown operation {shown_text(value)}"


def dates_outside_years(column: pa.Array | pa.ChunkedArray, kind: str) -> dict[int, str]:
    """Return the dates or timestamps of years that Python has no value for, as Spark writes them, by row."""
    import numpy as np
    import pyarrow.compute as pc

    counts = column.cast("int32").cast("int64") if kind == "date" else column.cast("int64")
    least, most = _DAYS if kind == "date" else _MICROS
    outside = pc.fill_null(pc.or_(pc.less(counts, least), pc.greater(counts, most)), False)
    times = counts.filter(outside).to_numpy().astype(f"datetime64[{'D' if kind == 'date' else 'us'}]")
    rows = np.nonzero(outside.to_numpy())[0].tolist()
    return dict(zip(rows, map(spark_date, np.datetime_as_string(times).tolist()), strict=True))


def spark_date(text: str) -> str:
    """Return a date or timestamp that numpy wrote as Spark writes it: a sign before long years, no needless zeros."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    day, _, time = digits.partition("T")
    year, _, rest = day.partition("-")
    sign = sign or ("+" if len(year) > 4 else "")
    time = time.rstrip("0").rstrip(".") if "." in time else time
    return f"{sign}{int(year):04d}-{rest}" + (f" {time}" if time else "")

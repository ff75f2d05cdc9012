"""What is wrong with a change, in words: as columns of Spark's, and as plain texts of the same wording.

A record's own values in a reason are marked, until `telling` or `told` shows or hides them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

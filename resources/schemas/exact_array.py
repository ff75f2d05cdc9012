"""Values of users' functions as Arrow has them, all of each value or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def exact_array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return the values in this type. Raises what Arrow raises, and ValueError for a value that would lose something.

    Arrow makes 2 of 2.5 where whole numbers are asked for, a day of a time of that day, and infinity of a number that
    is too large for 32 bits. That a float has fewer digits than a double is what its type says.
    """
    import pyarrow as pa

    array = pa.array(values, kind)
    if pa.types.is_integer(kind):
        if any(value is not None and type(value) is not int for value in values):
            for value, kept in zip(values, array.to_pylist(), strict=True):
                if value is not None and value != kept:
                    raise ValueError(f"{value} is no whole number")
    elif pa.types.is_date(kind):
        for value in values:
            if isinstance(value, datetime) and value.time() != time():
                raise ValueError(f"{value} is a time, and no day")
    elif pa.types.is_float32(kind):
        for value, kept in zip(values, array.to_pylist(), strict=True):
            if kept is not None and math.isinf(kept) and value != kept:
                raise ValueError(f"{value} is too large for 32 bits")
    return array

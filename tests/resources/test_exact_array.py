"""Values of users' functions in Arrow: whole, or refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dagster_adjunct.resources.schemas.exact_values import to_exact_array

TIME = pa.timestamp("us", tz="UTC")
NOON, MIDNIGHT = datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)


class Nowhere(tzinfo):
    """A zone that does not know its offset: a time with it is as naive as one without."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("value", "kind", "kept"),
    [
        (2.0, pa.int64(), 2),
        (np.float32(3), pa.int32(), 3),
        (np.int64(4), pa.int16(), 4),
        (Decimal("5.00"), pa.int64(), 5),
        (MIDNIGHT, pa.date32(), date(2026, 1, 1)),
        (float("inf"), pa.float32(), float("inf")),
        (0.1, pa.float32(), float(np.float32(0.1))),
        (NOON, TIME, NOON),
        (NOON.astimezone(timezone(timedelta(hours=5))), TIME, NOON),
        (pa.scalar(NOON), TIME, NOON),
        ([NOON, None], pa.list_(TIME), [NOON, None]),
        (pd.NaT, TIME, None),
        (pd.NaT, pa.date32(), None),
        (pd.NaT, pa.string(), None),
        (pd.NA, pa.int64(), None),
        (pd.NA, pa.bool_(), None),
        (np.datetime64("NaT", "us"), TIME, None),
        ([NOON, pd.NaT], pa.list_(TIME), [NOON, None]),
        ((1, pd.NA), pa.list_(pa.int64()), [1, None]),
    ],
)
def test_what_a_type_holds_is_kept(value: Any, kind: pa.DataType, kept: Any) -> None:
    assert to_exact_array([None, value], kind).to_pylist() == [None, kept]


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (2.5, pa.int64(), "2.5 is not a whole number"),
        (np.float64(2.5), pa.int32(), "2.5 is not a whole number"),
        (Decimal("2.5"), pa.int64(), "2.5 is not a whole number"),
        (NOON, pa.date32(), "is a time, not a date"),
        (1e300, pa.float32(), "too large for 32 bits"),
        (2**40, pa.int32(), "."),
        (20_000, pa.date32(), "20000 is not a date"),
        (datetime(2026, 1, 1, 12), TIME, "2026-01-01 12:00:00 is not a time with a time zone"),
        (NOON.replace(tzinfo=Nowhere()), TIME, "is not a time with a time zone"),
        (pa.scalar(datetime(2026, 1, 1)), TIME, "."),
        (pd.Timestamp(1, unit="ns", tz="UTC"), TIME, "is finer than microseconds"),
        (1_700_000_000_000_000, TIME, "1700000000000000 is not a time with a time zone"),
        (np.datetime64("2026-01-01T12:00", "us"), TIME, "."),
        (
            datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=5))),
            TIME,
            "years are 1 to 9999",
        ),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))), TIME, "years are 1 to 9999"),
        (pa.scalar(253_402_300_800_000_000, TIME), TIME, "."),
        (pa.scalar(2_932_897, pa.int32()).cast(pa.date32()), pa.date32(), "."),
        ([NOON, datetime(2026, 1, 1)], pa.list_(TIME), "is not a time with a time zone"),
        (float("nan"), pa.int64(), "nan"),
        (float("nan"), TIME, "NaN"),
    ],
)
def test_what_it_would_cut_is_refused(value: Any, kind: pa.DataType, why: str) -> None:
    with pytest.raises((ValueError, pa.ArrowException, OverflowError), match=why):
        to_exact_array([1 if pa.types.is_integer(kind) else None, value], kind)

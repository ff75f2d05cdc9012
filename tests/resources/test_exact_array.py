"""Values of users' functions in Arrow: whole, or refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dagster_adjunct.resources.schemas.exact_array import exact_array

NOON, MIDNIGHT = datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)


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
        (NOON, pa.timestamp("us", tz="UTC"), NOON),
    ],
)
def test_what_a_type_holds_is_kept(value: Any, kind: pa.DataType, kept: Any) -> None:
    assert exact_array([None, value], kind).to_pylist() == [None, kept]


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (2.5, pa.int64(), "2.5 is no whole number"),
        (np.float64(2.5), pa.int32(), "2.5 is no whole number"),
        (Decimal("2.5"), pa.int64(), "2.5 is no whole number"),
        (NOON, pa.date32(), "is a time, and no day"),
        (1e300, pa.float32(), "too large for 32 bits"),
        (2**40, pa.int32(), "."),
    ],
)
def test_what_it_would_cut_is_refused(value: Any, kind: pa.DataType, why: str) -> None:
    with pytest.raises((ValueError, pa.ArrowException, OverflowError), match=why):
        exact_array([1 if pa.types.is_integer(kind) else None, value], kind)

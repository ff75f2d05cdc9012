"""What functions of windows return, in plain Arrow: a value of the declared type, or a refusal
that says why not.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from dagster_adjunct.orchestration.operators.columns import RECORD
from dagster_adjunct.orchestration.operators.windows.assignment import WindowFunctionCall
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.windows import Aggregate

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
RECORDS = pa.table({"k": ["a", "a"], "n": [1, 2], RECORD: ["2", "1"]})


def value_of(returned: Any, returns: str) -> Any:
    """Return what a function that returns this gives for the window."""

    def made(records: pa.Table) -> Any:
        assert records.to_pylist() == [{"n": 2}, {"n": 1}], (
            "in the order of their positions, and what was asked for"
        )
        return returned

    functions = (("f", Aggregate(made, returns, of=["n"])),)
    call = WindowFunctionCall(
        "window-2-w", functions, ("k",), ("n",), Schema.of(k="string", f=returns), frozenset()
    )
    return call(RECORDS).to_pylist()[0]["f"]


def test_a_record_without_a_python_form_is_rejected_before_a_function_gets_it() -> None:
    times = pa.array([0, 253_402_300_800_000_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    functions = (("f", Aggregate(lambda records: pytest.fail("it was called"), "int", of=["at"])),)
    call = WindowFunctionCall(
        "window-2-w", functions, ("k",), ("at",), Schema.of(k="string", f="int"), frozenset()
    )
    with pytest.raises(SchemaMismatchError) as caught:
        call(pa.table({"k": ["a", "a"], "at": times, RECORD: ["2", "1"]}))
    assert (caught.value.operator, caught.value.column) == ("window-2-w", "at")


@pytest.mark.parametrize(
    ("returned", "returns"),
    [(7, "int"), (None, "int"), (2.5, "double"), ("x", "string"), (NOON, "timestamp")],
)
def test_a_value_of_the_declared_type_is_the_windows(returned: Any, returns: str) -> None:
    assert value_of(returned, returns) == returned


@pytest.mark.parametrize(
    ("returned", "returns"),
    [(pd.NaT, "timestamp"), (pd.NaT, "date"), (pd.NA, "bigint"), (pd.NA, "string")],
)
def test_what_pandas_calls_missing_is_null(returned: Any, returns: str) -> None:
    """As the latest time of records that have none."""
    assert value_of(returned, returns) is None


@pytest.mark.parametrize(
    ("returned", "returns", "why"),
    [
        ("x", "int", "returned str for 'f', which is no int"),
        (2**40, "int", "returned int for 'f', which does not fit into int"),
        (2.5, "bigint", "returned float for 'f', which does not fit into bigint"),
        ([1], "bigint", "returned list for 'f', which is no bigint"),
        (
            datetime(2026, 1, 1),
            "timestamp",
            "returned datetime for 'f', which is no timestamp: .* not a time with a time zone",
        ),
        (
            pa.scalar(datetime(2026, 1, 1)),
            "timestamp",
            "returned datetime for 'f', which is no timestamp",
        ),
        (1_767_225_600, "timestamp", "returned int for 'f', which does not fit into timestamp"),
        (
            pa.scalar(253_402_300_800_000_000, pa.timestamp("us", tz="UTC")),
            "timestamp",
            "returned TimestampScalar",
        ),
        (20_454, "date", "returned int for 'f', which does not fit into date"),
    ],
)
def test_another_value_is_refused_with_what_it_is(returned: Any, returns: str, why: str) -> None:
    with pytest.raises(SchemaMismatchError, match=f"window-2-w: made\\(\\) {why}"):
        value_of(returned, returns)

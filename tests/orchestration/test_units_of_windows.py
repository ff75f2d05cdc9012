"""Which wider types of a column continue with the values that a window has stored: those that
are stored alike.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from dagster_adjunct.orchestration.operators.windows.assignment import Windows
from dagster_adjunct.windows import Distinct, Tumbling


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize(
    ("narrow", "wide", "alike"),
    [
        ("int", "bigint", True),
        ("float", "double", True),
        ("decimal(10,2)", "decimal(20,2)", True),
        ("decimal(10,2)", "decimal(12,4)", False),  # 1.50 and 1.5000
        ("int", "decimal(12,2)", False),
        ("int", "decimal(10,0)", None),  # a sketch is made of numbers, and otherwise of texts
        ("int", "double", False),  # 1 and 1.0
    ],
)
def test_distinct_values_of_a_wider_type_are_not_added_to_others(
    narrow: str, wide: str, alike: bool | None, approximate: bool
) -> None:
    def units(kind: str) -> str:
        of = {"k": "string", "x": kind}
        return Windows(
            Tumbling(timedelta(1)), ("k",), (("n", Distinct("x", approximate)),), timedelta(0), of
        ).units

    assert (units(narrow) == units(wide)) is (not approximate if alike is None else alike)

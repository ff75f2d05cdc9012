"""The net changes between two states of a table are those of its keys whose rows differ."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import AdmittedFileError
from dagster_adjunct.resources.table_snapshots.net_changes import net_changes

SCHEMA = pa.schema(
    {"k": pa.int64(), "x": pa.float64(), "l": pa.list_(pa.struct({"x": pa.float64()}))}
)


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[str, int]]:
    states = [pa.Table.from_pylist(rows, schema=SCHEMA) for rows in (before, after)]
    found = net_changes(*states, ["k"], "the table")
    return [(row["op"], row["k"]) for row in found.to_pylist()]


def test_rows_that_were_only_written_again_are_no_changes() -> None:
    before = [
        {"k": 1, "x": math.nan, "l": [{"x": math.nan}, None]},
        {"k": 2, "x": 0.0, "l": [{"x": -0.0}]},
        {"k": 3, "x": None, "l": None},
    ]
    after = [
        {"k": 3, "x": None, "l": None},
        {"k": 2, "x": -0.0, "l": [{"x": 0.0}]},
        {"k": 1, "x": math.nan, "l": [{"x": math.nan}, None]},
    ]
    assert changes(before, after) == []


def test_deletions_come_first_and_each_kind_is_in_the_order_of_keys() -> None:
    same: dict[str, Any] = {"x": 1.0, "l": [{"x": 1.0}]}
    before = [{"k": key, **same} for key in (5, 4, 3, 2)]
    after = [
        {"k": 6, **same},
        {"k": 3, "x": None, "l": [{"x": 1.0}]},
        {"k": 2, "x": 1.0, "l": [{"x": None}]},
        {"k": 1, **same},
    ]
    assert changes(before, after) == [
        ("delete", 4),
        ("delete", 5),
        ("insert", 1),
        ("update", 2),
        ("update", 3),
        ("insert", 6),
    ]


def test_two_rows_of_one_key_are_an_error() -> None:
    rows = [{"k": 1, "x": 1.0, "l": None}, {"k": 1, "x": 2.0, "l": None}]
    with pytest.raises(AdmittedFileError) as caught:
        changes([], rows)
    assert caught.value.rule == "unique"

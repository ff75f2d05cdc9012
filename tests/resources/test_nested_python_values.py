"""Nested values of Arrow as Python objects: maps are dictionaries at every depth."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.schemas.types import arrow_type, has_maps
from dagster_adjunct.resources.schemas.values import (
    python_rows,
    python_values,
    readable_value,
    readable_values,
    to_pandas,
)

VALUES: dict[str, Any] = {
    "map<string,int>": [{"a": 1, "b": None}, {}, None],
    "array<map<string,string>>": [[{"a": "x"}, None], [], None],
    "struct<m:map<string,map<string,int>>,n:int>": [{"m": {"a": {"b": 1}}, "n": None}, None],
    "array<struct<a:int>>": [[{"a": 1}, None], [], None],
    "bigint": [1, None],
}


def column(kind: str, values: list[Any]) -> pa.ChunkedArray:
    """Return a column of two chunks, with these values."""
    return pa.chunked_array([[], values], arrow_type(kind))


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_pythons_own_with_dictionaries_for_maps(kind: str) -> None:
    values = column(kind, VALUES[kind])
    assert python_values(values) == VALUES[kind]
    assert python_values(values.combine_chunks()) == VALUES[kind]
    assert [readable_value(value) for value in values] == VALUES[kind]
    assert has_maps(values.type) == ("map<" in kind)


def test_rows_have_them_too_in_tables_and_batches() -> None:
    names = list(VALUES)
    table = pa.table([column(kind, VALUES[kind][:2]) for kind in names], names=names)
    expected = [
        dict(zip(names, row, strict=True))
        for row in zip(*(VALUES[kind][:2] for kind in names), strict=True)
    ]
    assert python_rows(table) == expected
    (batch,) = table.combine_chunks().to_batches()
    assert python_rows(batch) == expected
    assert python_rows(table.select(["bigint"])) == [{"bigint": 1}, {"bigint": None}]


def test_a_map_with_a_date_that_python_lacks_is_a_dictionary() -> None:
    dates = pa.array([[("a", 0), ("b", 3_000_000)]], pa.map_(pa.string(), pa.int32()))
    dates = dates.cast(pa.map_(pa.string(), pa.date32()))
    assert readable_values(dates) == [{"a": dt.date(1970, 1, 1), "b": "+10183-09-21"}]


def test_flat_rows_do_not_take_the_slower_way_of_maps() -> None:
    class Flat:
        schema = pa.schema({"a": pa.int64(), "b": pa.string()})

        def to_pylist(self, **options: Any) -> list[dict[str, Any]]:
            assert not options
            return [{"a": 1, "b": "x"}]

    assert python_rows(Flat()) == [{"a": 1, "b": "x"}]


@pytest.mark.parametrize("flat", [["bigint"], []])
def test_a_pandas_frame_has_python_objects_for_nested_values_only(flat: list[str]) -> None:
    names = [*list(VALUES)[:2], *flat, *list(VALUES)[2:4]]
    table = pa.table([column(kind, VALUES[kind][:2]) for kind in names], names=names)
    frame = to_pandas(table)
    assert list(frame.columns) == names
    for kind in names:
        expected = [1.0, pytest.approx(float("nan"), nan_ok=True)]
        if kind != "bigint":
            expected = VALUES[kind][:2]
        assert frame[kind].tolist() == expected
    exact = pa.table({"a": pa.array([[2**53 + 1, None]])})
    assert to_pandas(exact)["a"].tolist() == [[2**53 + 1, None]]

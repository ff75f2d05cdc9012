"""Values that Arrow holds and Python does not, against what Python itself says of each."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.schemas.values import (
    first_unreadable,
    readable_value,
    readable_values,
    unreadable_values,
)

TIME, DAY, STRING = pa.timestamp("us", tz="UTC"), pa.date32(), pa.string()
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
MICROS = [FIRST - 1, FIRST, 0, None, LAST, LAST + 1, 2**63 - 1, -(2**63) + 1]
DAYS = [-719_163, -719_162, 0, None, 2_932_896, 2_932_897]
TEXTS = [
    b"",
    b"plain",
    "\u00e9\U0001f600".encode(),
    None,
    b"caf\xe9",
    b"\xff",
    b"\xed\xa0\x80",
    b"cut \xf0\x9f\x98",
]


def texts(values: list[bytes | None], kind: pa.DataType = STRING) -> pa.Array:
    """Text that nobody has looked at."""
    size = pa.large_binary() if kind == pa.large_string() else pa.binary()
    return pa.array(values, size).view(kind)


def python_has(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except (OverflowError, ValueError):
        return False
    return True


def nested(leaf: pa.Array) -> list[pa.Array]:
    """The leaf's values one a row, inside of every type that holds others."""
    count = len(leaf)
    places, wide = pa.array(range(count + 1), pa.int32()), pa.array(range(count + 1), pa.int64())
    listed = pa.ListArray.from_arrays(places, leaf)
    names = pa.array([f"k{row}" for row in range(count)])
    return [
        listed,
        pa.LargeListArray.from_arrays(wide, leaf),
        pa.FixedSizeListArray.from_arrays(leaf, 1),
        pa.MapArray.from_arrays(places, names, leaf),
        pa.StructArray.from_arrays([names, leaf], ["name", "value"]),
        pa.StructArray.from_arrays([pa.ListArray.from_arrays(places, listed)], ["deep"]),
        pa.DictionaryArray.from_arrays(pa.array(range(count), pa.int16()), leaf),
    ]


LEAVES = [
    pa.array(DAYS, pa.int32()).cast(DAY),
    pa.array(MICROS, pa.int64()).cast(TIME),
    *(texts(TEXTS, kind) for kind in (pa.string(), pa.large_string())),
]
COLUMNS = [*LEAVES, *(column for leaf in LEAVES for column in nested(leaf))]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_it_is_what_python_can_not_make_a_value_of(column: pa.Array) -> None:
    lacking = {row for row in range(len(column)) if not python_has(column[row])}
    assert lacking, "some are"
    for cut in (column, pa.chunked_array([column.slice(0, 3), column.slice(3)]), column.slice(0)):
        assert set(unreadable_values(cut)) == lacking
    for start in range(len(column)):
        part = column.slice(start, 3)
        assert set(unreadable_values(part)) == {
            row - start for row in lacking if start <= row < start + 3
        }
    good = column.take([row for row in range(len(column)) if row not in lacking])
    assert unreadable_values(good) == {}
    assert readable_values(good) == good.to_pylist(maps_as_pydicts="strict")


def test_a_dictionary_whose_bad_value_nobody_has_is_fine() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0, None]), texts([b"a", b"\xff"]))
    assert unreadable_values(column) == {}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_of_every_unit_are_of_the_same_years(unit: Any, zone: str | None) -> None:
    factor = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    edges = [-62_135_596_801, -62_135_596_800, 253_402_300_799, 253_402_300_800]
    held = [edge for edge in edges if abs(edge * factor) < 2**63]
    column = pa.array([edge * factor for edge in held], pa.int64()).cast(
        pa.timestamp(unit, tz=zone)
    )
    outside = [row for row, edge in enumerate(held) if edge in (edges[0], edges[3])]
    assert list(unreadable_values(column)) == outside
    assert len(outside) == (0 if unit == "ns" else 2)


def test_what_is_displayed_is_the_value_as_spark_writes_it_or_with_its_bytes() -> None:
    times = pa.array([LAST + 1, FIRST - 1, 10**18], pa.int64()).cast(TIME)
    assert [readable_value(value) for value in times] == [
        "+10000-01-01 00:00:00",
        "0000-12-31 23:59:59.999999",
        "+33658-09-27 01:46:40",
    ]
    assert readable_value(texts([b"caf\xe9"])[0]) == "caf\\xe9"
    assert readable_value(texts([b"caf\xe9"])[0], "replace") == "caf\ufffd"
    struct = pa.StructArray.from_arrays([times, pa.array([1, 2, 3])], ["at", "n"])
    assert readable_value(struct[0]) == {"at": "+10000-01-01 00:00:00", "n": 1}


def test_the_first_one_is_reported_by_column_and_row() -> None:
    table = pa.table(
        {"n": [1, 2, 3], "at": pa.array([0, LAST + 1, LAST + 1], pa.int64()).cast(TIME)}
    )
    found = first_unreadable(table)
    assert found is not None
    assert (found.column, found.row) == ("at", 1)
    assert first_unreadable(table, ["n"]) is None
    error = found.error("stream 's'", "row 1", row=1)
    assert (error.column, error.row) == ("at", 1)
    assert "10000" not in str(found.error("stream 's'", "row 1", hidden=True)).replace(
        "1 to 9999", ""
    )


def test_few_of_many_texts_are_found_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not row by row: that a column of a million texts is right takes one look, and one bad text
    about twenty more.
    """
    from dagster_adjunct.resources.schemas import values as module

    looks = []
    looked = module._has_unreadable
    monkeypatch.setattr(
        module, "_has_unreadable", lambda column: looks.append(None) or looked(column)
    )
    assert unreadable_values(texts([b"ok"] * 100_000)) == {}
    assert len(looks) == 1
    place = random.Random(7).randrange(100_000)
    assert unreadable_values(
        texts([b"\xff" if row == place else b"ok" for row in range(100_000)])
    ) == {place: "\\xff"}
    assert len(looks) < 50


def test_dates_of_before_and_after_are_python_dates_where_there_are_any() -> None:
    column = pa.array(DAYS, pa.int32()).cast(DAY)
    assert readable_values(column) == [
        "0000-12-31",
        dt.date(1, 1, 1),
        dt.date(1970, 1, 1),
        None,
        dt.date(9999, 12, 31),
        "+10000-01-01",
    ]

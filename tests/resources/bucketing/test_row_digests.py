"""Digests of rows in Arrow against Spark's, and against a plain xxHash that follows the
specification word by word.
"""

from __future__ import annotations

import math
import random
import struct
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.bucketing.hashing import (
    EMPTY_CHECKSUM,
    arrow_checksum,
    arrow_checksums_by,
    row_digests,
    row_hash,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# -- the plain hash: XXH64 as specified, except that numbers are 4 or 8 bytes and decimals are as in
# Java

PRIMES = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)
EXACT = Context(prec=76)


def rotated(number: int, by: int) -> int:
    number %= 2**64
    return (number << by | number >> (64 - by)) % 2**64


def xxh64(data: bytes, seed: int) -> int:
    one, two, three, four, five = PRIMES

    def mixed(lane: int, word: int) -> int:
        return rotated(lane + word * two, 31) * one % 2**64

    rest = data
    if len(data) < 32:
        total = seed + five
    else:
        lanes = [seed + one + two, seed + two, seed, seed - one]
        while len(rest) >= 32:
            lanes = [
                mixed(lane, word)
                for lane, word in zip(lanes, struct.unpack("<4Q", rest[:32]), strict=True)
            ]
            rest = rest[32:]
        total = sum(rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = (total % 2**64 ^ mixed(0, lane)) * one + four
    total = (total + len(data)) % 2**64
    while len(rest) >= 8:
        total = (
            rotated(total ^ mixed(0, int.from_bytes(rest[:8], "little")), 27) * one + four
        ) % 2**64
        rest = rest[8:]
    if len(rest) >= 4:
        total = (
            rotated(total ^ int.from_bytes(rest[:4], "little") * one % 2**64, 23) * two + three
        ) % 2**64
        rest = rest[4:]
    for byte in rest:
        total = rotated(total ^ byte * five % 2**64, 11) * one % 2**64
    total = (total ^ total >> 33) * two % 2**64
    total = (total ^ total >> 29) * three % 2**64
    return total ^ total >> 32


def hashed_bytes(value: object, kind: pa.DataType) -> bytes:
    """Return the bytes that stand for a value of an Arrow type that is not nested."""
    match value:
        case bool() | int():
            return struct.pack("<q" if pt.is_int64(kind) else "<i", value)
        case float():
            number = math.nan if math.isnan(value) else 0.0 if value == 0 else value
            return struct.pack("<d" if pt.is_float64(kind) else "<f", number)
        case str():
            return value.encode()
        case Decimal():
            unscaled = int(value.scaleb(kind.scale, EXACT))
            if kind.precision <= 18:
                return struct.pack("<q", unscaled)
            sizes = range(1, 17)
            size = next(
                size for size in sizes if -(2 ** (8 * size - 1)) <= unscaled < 2 ** (8 * size - 1)
            )
            return unscaled.to_bytes(size, "big", signed=True)
        case datetime():
            return struct.pack(
                "<q",
                (value.replace(tzinfo=None) - datetime(1970, 1, 1)) // timedelta(microseconds=1),
            )
        case date():
            return struct.pack("<i", (value - date(1970, 1, 1)).days)
    assert isinstance(value, bytes)
    return value


def chained(value: object, kind: pa.DataType, seed: int) -> int:
    if value is None:
        return seed
    if isinstance(value, dict):
        for place, each in enumerate(value.values()):
            seed = chained(each, kind.field(place).type, seed)
        return seed
    if isinstance(value, list):
        for each in value:
            seed = chained(each, kind.value_type, seed)
        return seed
    return xxh64(hashed_bytes(value, kind), seed)


def plain_digests(table: pa.Table, names: Sequence[str]) -> list[int]:
    digests = []
    for row in table.select(names).to_pylist():
        seed = 42
        for place, name in enumerate(names):
            if row[name] is not None:
                seed = chained(
                    row[name], table.schema.field(name).type, xxh64(struct.pack("<i", place), seed)
                )
        digests.append(seed - (seed >> 63 << 64))
    return digests


def test_the_plain_hash_is_xxhash() -> None:
    # From the documentation of xxHash, and of xxhash64 in Spark: xxhash64('Spark', array(123), 2).
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"Nobody inspects the spammish repetition", 0) == 0xFBCEA83C8A378BF1
    chain = xxh64(struct.pack("<i", 2), xxh64(struct.pack("<i", 123), xxh64(b"Spark", 42)))
    assert chain == 5602566077635097486


# -- any table


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    # Also of few bytes, and around the numbers that need one more.
    few = st.builds(
        lambda byte, by: (1 << 8 * byte) // 2 + by,
        st.integers(0, precision // 3),
        st.integers(-2, 2),
    )
    unscaled = st.integers(0, 10**precision - 1) | few.map(lambda number: number % 10**precision)
    signed = st.builds(lambda number, sign: number * sign, unscaled, st.sampled_from([1, -1]))
    return signed.map(lambda number: Decimal(number).scaleb(-scale, EXACT))


def long_bytes(part: bytes, size: int) -> bytes:
    return (part * size)[:size]


WHOLE_SECONDS = st.datetimes().map(lambda time: time.replace(microsecond=0))
KINDS: list[tuple[pa.DataType, st.SearchStrategy[object]]] = [
    (pa.string(), st.text(st.characters(codec="utf-8"), max_size=40)),
    (
        pa.string(),
        st.builds(
            lambda part, times: part * times, st.text("aé€😀", min_size=1), st.integers(0, 300)
        ),
    ),
    (pa.binary(), st.binary(max_size=80)),
    (pa.binary(), st.builds(long_bytes, st.binary(min_size=1, max_size=7), st.integers(0, 5000))),
    (pa.int8(), numbers(8)),
    (pa.int16(), numbers(16)),
    (pa.int32(), numbers(32)),
    (pa.int64(), numbers(64)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("s"), WHOLE_SECONDS),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, math.nan, -math.nan])),
    (pa.decimal128(9, 2), decimals(9, 2)),
    (pa.decimal128(18, 0), decimals(18, 0)),
    (pa.decimal128(19, 4), decimals(19, 4)),
    (pa.decimal128(38, 10), decimals(38, 10)),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Draw a table of a few columns, in slices and chunks."""
    rows, columns = draw(st.integers(0, 12)), {}
    any_kind = st.sampled_from(KINDS)
    for place in range(draw(st.integers(1, 4))):
        kind, values = draw(any_kind)
        columns[f"c{place}"] = pa.array(
            draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind
        )
    table, cuts = pa.table(columns), sorted(draw(st.tuples(*[st.integers(0, rows)] * 3)))
    return pa.concat_tables([table.slice(from_, to - from_) for from_, to in pairwise(cuts)])


@pytest.mark.lengthy
@given(tables())
def test_digests_of_any_columns_are_those_of_the_plain_hash(table: pa.Table) -> None:
    assert row_digests(table, table.column_names).to_pylist() == plain_digests(
        table, table.column_names
    )
    some = table.column_names[::-1][: 1 + table.num_columns // 2]
    assert row_digests(table, some).to_pylist() == plain_digests(table, some)


ROWS = 70_001


def many_rows() -> pa.Table:
    texts = [None if number % 7 == 0 else "ab" * (number % 50) for number in range(ROWS)]
    return pa.table({"number": pa.array(range(ROWS), pa.int64()), "text": texts})


@pytest.mark.lengthy
def test_digests_of_many_rows_are_those_of_their_parts() -> None:
    table = many_rows()
    digests = row_digests(table, ["text", "number"])
    parts = [table.slice(start, 1000) for start in range(0, ROWS, 1000)]
    assert (
        pa.chunked_array([row_digests(part, ["text", "number"]).combine_chunks() for part in parts])
        == digests
    )
    assert row_digests(pa.concat_tables(parts), ["text", "number"]) == digests
    assert row_digests(table.slice(0, 0), ["text", "number"]).to_pylist() == []


@pytest.mark.lengthy
@pytest.mark.parametrize("rows", [1, 7, 8, 20])
def test_digests_of_long_values_are_those_of_the_plain_hash(rows: int) -> None:
    draw = random.Random(rows)
    texts = [draw.randbytes(draw.choice([0, 31, 32, 33, 2_000, 2_047, 5_000])) for _ in range(rows)]
    table = pa.table(
        {
            "a": pa.array([*texts, None], pa.binary()),
            "b": pa.array([*reversed(texts), b"x"], pa.binary()),
        }
    )
    assert row_digests(table, ["a", "b"]).to_pylist() == plain_digests(table, ["a", "b"])


def test_values_of_a_megabyte_are_digested_at_once() -> None:
    table = pa.table({"a": ["x" * 1_000_000] * 2})
    began = time.process_time()
    first, second = row_digests(table, ["a"]).to_pylist()
    assert first == second
    assert time.process_time() - began < 2


def test_checksums_are_sums_of_digests_that_wrap_around() -> None:
    schema, table = Schema.of(number="bigint", text="string"), many_rows()
    digests = row_digests(table, schema.names).to_pylist()
    assert arrow_checksum(table, schema) == f"r2-{sum(digests) % 2**64:016x}"
    assert arrow_checksum(table.slice(0, 0), schema) == EMPTY_CHECKSUM
    groups = table.append_column("group", pc.bit_wise_and(table.column("number"), 3))
    by_group = arrow_checksums_by("group", groups, schema)
    assert by_group == {group: f"r2-{sum(digests[group::4]) % 2**64:016x}" for group in range(4)}


def test_a_type_that_no_schema_may_have_is_rejected() -> None:
    for array in (
        pa.array([1], pa.uint8()),
        pa.array([[1]], pa.list_(pa.uint8())),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.uint8())),
    ):
        with pytest.raises(SchemaMismatchError):
            row_digests(pa.table({"m": array}), ["m"])


# -- Spark

TEXTS = ["", "a", "é€😀", "k" * 31, "k" * 32, "ü" * 2500, None]
SPARK_COLUMNS = {
    "s": pa.array(TEXTS),
    "raw": pa.array(
        [b"", b"\x00\xff", bytes(range(256)), b"\x80" * 39, b"x" * 63, b"y" * 4097, None]
    ),
    "t": pa.array([-128, 127, 0, -1, 1, None, 5], pa.int8()),
    "m": pa.array([-(2**15), 2**15 - 1, 0, -1, None, 1, 5], pa.int16()),
    "i": pa.array([-(2**31), 2**31 - 1, 0, None, -1, 1, 5], pa.int32()),
    "n": pa.array([-(2**63), 2**63 - 1, None, 0, -1, 1, 5], pa.int64()),
    "b": pa.array([True, False, None, True, False, None, True]),
    "d": pa.array(
        [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(9999, 12, 31), None, None, None]
    ),
    "at": pa.array(
        [
            datetime(1, 1, 1),
            datetime(1969, 12, 31, 23, 59, 59, 999_999),
            datetime(1970, 1, 1),
            datetime(9999, 12, 31, 23, 59, 59, 999_999),
            None,
            datetime(2013, 1, 1),
            None,
        ],
        pa.timestamp("us", "UTC"),
    ),
    "local": pa.array(
        [datetime(1960, 2, 29, 1, 2, 3, 4), None, *[datetime(2024, 3, 31, 2, 30)] * 5],
        pa.timestamp("us"),
    ),
    "f": pa.array([0.0, -0.0, math.nan, -math.nan, math.inf, 1.5, None], pa.float32()),
    "x": pa.array([-0.0, 0.0, -math.nan, math.nan, -math.inf, 5e-324, None], pa.float64()),
    "small": pa.array(
        [*map(Decimal, ("-9999999.99", "9999999.99", "0", "-0.01", "1.00", "0.01")), None],
        pa.decimal128(9, 2),
    ),
    "edge": pa.array(
        [*(Decimal(n) for n in (1 - 10**18, 10**18 - 1, 0, -1, 127, 128)), None],
        pa.decimal128(18, 0),
    ),
    "large": pa.array(
        [*(Decimal(n) for n in (1 - 10**38, 10**38 - 1, 0, -128, 127, -129)), None],
        pa.decimal128(38, 0),
    ),
    "wide": pa.array(
        [*(Decimal(n).scaleb(-4) for n in (128, 255, 256, -256, -32768, 2**63)), None],
        pa.decimal128(30, 4),
    ),
    "__timestamp": pa.array(
        [datetime(1969, 7, 20, tzinfo=UTC), *[None] * 6], pa.timestamp("us", "UTC")
    ),
    "__tombstone": pa.array([False] * 6 + [True]),
    "__epoch": pa.array([None, 1, *[None] * 5], pa.int32()),
}


@pytest.mark.spark
def test_digests_of_every_type_are_sparks(spark: SparkSession) -> None:
    table = pa.table(SPARK_COLUMNS)
    names = table.column_names
    marks = ("__timestamp", "__tombstone", "__epoch")
    # Each column alone, all of them, in another order, and the record of a stream with and without
    # its last mark.
    wanted = [
        *([name] for name in names),
        names,
        names[::-1],
        ["n", "s", *marks],
        ["n", "s", *marks[:-1]],
    ]
    frame = spark.createDataFrame(table).coalesce(1)  # the rows stay in order
    hashed = frame.select(
        [
            row_hash(dict.fromkeys(each, "int")).alias(f"h{place}")
            for place, each in enumerate(wanted)
        ]
    ).toArrow()
    for place, each in enumerate(wanted):
        assert (
            row_digests(table, each).to_pylist()
            == hashed.column(place).to_pylist()
            == plain_digests(table, each)
        )

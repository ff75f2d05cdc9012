from __future__ import annotations

import datetime as dt
import random
import time
from decimal import Context, Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.bucketing.hashing import (
    assign_buckets,
    bucket_of_key,
    plain_converter,
    spark_hash,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.of(
    s="string",
    b="binary",
    i="int",
    t="tinyint",
    m="smallint",
    l="bigint",
    d="date",
    at="timestamp",
    f="boolean",
)
SCHEMA = Schema((*SCHEMA.fields, *Schema.of(small="decimal(9,2)", large="decimal(30,4)").fields))


def rows() -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for n in range(-40, 40):
        text = ("héllo wörld ∑" * 3)[: abs(n) % 23]
        made.append(
            {
                "s": text,
                "b": bytes(x % 256 for x in range(n + 40)),
                "i": n * 50_000_000,
                "t": n,
                "m": n * 700,
                "l": n * 200_000_000_000_000_000,
                "d": dt.date(1970, 1, 1) + dt.timedelta(days=n * 500),
                "at": (
                    dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
                    + dt.timedelta(hours=n * 5000, microseconds=n)
                ),
                "f": n % 2 == 0,
                "small": Decimal(n) / 4,
                "large": Decimal(n) * Decimal("123456789012345678901234.5678"),
            }
        )
    for name in SCHEMA.names:  # a null in every column, and all nulls at once
        made.append({**made[5], name: None})
    # around the length that is hashed natively
    for length in (253, 254, 255, 256, 257, 259, 260, 261, 1_003, 70_001):
        made.append(
            {
                **made[5],
                "s": "é" * (length // 2) + "x" * (length % 2),
                "b": bytes(range(251, 0, -1)) * 280,
            }
        )
    made.append(dict.fromkeys(SCHEMA.names))
    return made


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    exact = Context(prec=precision)
    return st.integers(1 - 10**precision, 10**precision - 1).map(
        lambda n: Decimal(n).scaleb(-scale, exact)
    )


INSTANTS = st.datetimes(timezones=st.just(dt.UTC))
VALUES: dict[str, st.SearchStrategy[object]] = {
    "string": st.text(st.characters(codec="utf-8")),
    "binary": st.binary(),
    "tinyint": integers(8),
    "smallint": integers(16),
    "int": integers(32),
    "bigint": integers(64),
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": INSTANTS,
    "decimal(9,2)": decimals(9, 2),
    "decimal(18,0)": decimals(18, 0),
    "decimal(19,4)": decimals(19, 4),
    "decimal(38,10)": decimals(38, 10),
}
KEYS = st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3).flatmap(
    lambda types: st.tuples(
        st.just(types), st.tuples(*[st.none() | VALUES[kind] for kind in types])
    )
)


def plain_murmur3(data: bytes, seed: int) -> int:
    """Spark's Murmur3 as its definition reads: word by word, then each byte that is left as a
    signed word.
    """

    def mixed(h: int, word: int) -> int:
        k = word * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) * 0x1B873593 % 2**32
        h = (h ^ k) % 2**32
        return ((h << 13 | h >> 19) * 5 + 0xE6546B64) % 2**32

    aligned = len(data) // 4 * 4
    for at in range(0, aligned, 4):
        seed = mixed(seed, int.from_bytes(data[at : at + 4], "little"))
    for byte in data[aligned:]:
        seed = mixed(seed, (byte - 256 if byte > 127 else byte) % 2**32)
    seed ^= len(data)
    seed = (seed ^ seed >> 16) * 0x85EBCA6B % 2**32
    seed = (seed ^ seed >> 13) * 0xC2B2AE35 % 2**32
    return seed ^ seed >> 16


def signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


@pytest.mark.parametrize("length", [*range(250, 270), 4_096, 10_001])
def test_long_values_hash_as_short_ones_are_defined(length: int) -> None:
    draw = random.Random(length)
    long, short = draw.randbytes(length), draw.randbytes(9)
    column = pa.array([long, short, None, long[:-1], b""])
    assert spark_hash([column]).tolist() == [
        42 if value is None else signed(plain_murmur3(value, 42)) for value in column.to_pylist()
    ]
    chained = plain_murmur3(long, plain_murmur3(short, 42))
    assert int(spark_hash([pa.array([short]), pa.array([long])])[0]) == signed(chained)
    assert bucket_of_key([short, long], ["binary", "binary"], 97) == signed(chained) % 97


def test_keys_of_a_megabyte_are_hashed_at_once() -> None:
    text = "é" * 500_001
    began = time.process_time()
    for _ in range(5):
        assert bucket_of_key([text], ["string"], 8) == int(assign_buckets([pa.array([text])], 8)[0])
    assert time.process_time() - began < 2, "word by word, it takes a minute"


@pytest.mark.lengthy
@given(KEYS, st.integers(1, 100_000))
def test_a_single_key_hashes_as_columns_do(
    key: tuple[list[str], tuple[object, ...]], n: int
) -> None:
    types, values = key
    columns = [
        pa.array([value], arrow_type(kind)) for value, kind in zip(values, types, strict=True)
    ]
    assert bucket_of_key(values, types, n) == int(assign_buckets(columns, n)[0])


@pytest.mark.parametrize("kind", sorted(VALUES))
def test_stored_forms_order_as_the_values_do(kind: str) -> None:
    @given(VALUES[kind], VALUES[kind])
    def check(one: object, other: object) -> None:
        plain = plain_converter(kind)
        assert (plain(one) < plain(other)) == (one < other)  # type: ignore[operator]
        assert (plain(one) == plain(other)) == (one == other)

    check()


@pytest.mark.spark
def test_every_type_and_their_chain_hash_as_in_spark(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    table = pa.Table.from_pylist(rows(), schema=SCHEMA.to_arrow())
    # One partition, so that the rows stay in order.
    frame = spark.createDataFrame([tuple(row.values()) for row in rows()], SCHEMA.ddl()).coalesce(1)
    expected = frame.select(
        *[F.hash(F.col(name)).alias(name) for name in SCHEMA.names],
        F.hash(*[F.col(name) for name in SCHEMA.names]).alias("chain"),
    ).toArrow()
    for name in SCHEMA.names:
        assert spark_hash([table.column(name)]).tolist() == expected.column(name).to_pylist(), name
    chain = spark_hash([table.column(name) for name in SCHEMA.names])
    assert chain.tolist() == expected.column("chain").to_pylist()


def test_known_values_of_spark() -> None:
    # From Spark 4.3: SELECT hash('Spark'), hash(1), hash(1L), hash(CAST(NULL AS INT)),
    # hash('Spark', 1)
    assert int(spark_hash([pa.array(["Spark"])])[0]) == 228093765
    assert int(spark_hash([pa.array([1], pa.int32())])[0]) == -559580957
    assert int(spark_hash([pa.array([1], pa.int64())])[0]) == -1712319331
    assert int(spark_hash([pa.array([None], pa.int32())])[0]) == 42


def test_a_null_key_has_a_bucket_of_its_own() -> None:
    assert bucket_of_key([None], ["string"], 8) == 42 % 8
    assert bucket_of_key([None, None], ["string", "bigint"], 5) == 42 % 5


def test_slices_and_chunks_hash_like_the_whole() -> None:
    values = [f"key-{n}" if n % 3 else None for n in range(50)]
    whole = assign_buckets([pa.array(values)], 7).tolist()
    assert assign_buckets([pa.array(["x", *values]).slice(1)], 7).tolist() == whole
    assert assign_buckets([pa.chunked_array([values[:20], values[20:]])], 7).tolist() == whole
    assert assign_buckets([pa.chunked_array([], pa.string())], 7).tolist() == []
    assert assign_buckets([pa.array([], pa.string())], 7).tolist() == []


def test_what_can_not_be_hashed_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="a column of type double can't be hashed"):
        spark_hash([pa.array([1.5])])
    with pytest.raises(SchemaMismatchError, match="none are named"):
        spark_hash([])
    with pytest.raises(SchemaMismatchError, match="a value of type double can't be hashed"):
        bucket_of_key([1.5], ["double"], 8)

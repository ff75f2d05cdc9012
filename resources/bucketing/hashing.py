"""Spark's hashes of rows: the one that chooses their bucket, and the one that the checksum of records is made of.

The bucket hash is Murmur3 (x86, 32 bit), seed 42, chained over the columns.

`assign_buckets` returns what Spark's `pmod(hash(columns), n)` returns, so files that are written and keys that are
looked up without Spark use Spark's buckets. The public `mmh3` package differs for strings whose UTF-8
length is not a multiple of 4: Spark mixes each trailing byte, sign-extended, as a word of its own.

Columns are hashed with NumPy. A single key is hashed with Python integers, which takes 3 us instead of the 100 us of
arrays with one element; tests compare the two.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.schemas.schema import Plain, Schema, decimal_digits, plain_converter, quote_name
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame

    UInt32 = npt.NDArray[np.uint32]

SEED = 42


def assign_buckets(columns: Sequence[pa.Array | pa.ChunkedArray], n: int) -> npt.NDArray[np.int32]:
    """Return for each row the bucket in [0, n) to which Spark assigns it."""
    result: npt.NDArray[np.int32] = np.mod(spark_hash(columns), np.int32(n))
    return result


def bucket_of_key(values: Sequence[object], types: Sequence[str], n: int) -> int:
    """Return the bucket of a key, given as Python values and Spark type names."""
    plain = [None if value is None else plain_converter(kind)(value) for value, kind in zip(values, types, strict=True)]
    return bucket_function(tuple(types), n)(plain)


@lru_cache(maxsize=256)
def bucket_function(types: tuple[str, ...], n: int) -> Callable[[Sequence[Plain | None]], int]:
    """Return a function from a key of these Spark types, in plain form, to its bucket in [0, n)."""
    hashers = [_HASHERS[_width(kind)] for kind in types]

    def bucket(values: Sequence[Plain | None]) -> int:
        seed = SEED
        for hasher, value in zip(hashers, values, strict=True):
            if value is not None:
                seed = hasher(value, seed)
        return (seed - ((seed & 0x80000000) << 1)) % n  # the hash is signed, and so is its modulus

    return bucket


def spark_hash(columns: Sequence[pa.Array | pa.ChunkedArray]) -> npt.NDArray[np.int32]:
    """Return Spark's `hash(columns…)` of each row as int32; a null leaves the hash unchanged."""
    if not columns:
        raise SchemaMismatchError("a hash needs columns, and none are named.", "Name at least one key column.")
    hashes = np.full(len(columns[0]), SEED, dtype=np.uint32)
    for column in columns:
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        with np.errstate(over="ignore"):
            mixed = _hash_array(array, hashes)
        if array.null_count:
            valid = np.asarray(array.is_valid())
            hashes = np.where(valid, mixed, hashes)
        else:
            hashes = mixed
    return hashes.view(np.int32)


def _hash_array(array: pa.Array, seeds: UInt32) -> UInt32:
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(array, seeds)
    if pa.types.is_decimal(kind):
        return _hash_decimal(array, seeds)
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
    elif pa.types.is_boolean(kind) or pa.types.is_date32(kind):
        array = array.cast(pa.int32())
    if pa.types.is_integer(array.type):
        values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
        return _hash_long(values, seeds) if pa.types.is_int64(array.type) else _hash_int(values, seeds)
    raise _unhashable_error(f"a column of type {kind}")


def _unhashable_error(what: str) -> SchemaMismatchError:
    expected = "string, integer, boolean, date, timestamp, decimal or binary"
    problem = f"{what} can't be hashed into buckets: expected {expected}."
    return SchemaMismatchError(problem, "Cast it before it becomes a key.")


def _mix_k1(k1: UInt32) -> UInt32:
    k1 = k1 * np.uint32(0xCC9E2D51)
    k1 = (k1 << np.uint32(15)) | (k1 >> np.uint32(17))
    return k1 * np.uint32(0x1B873593)


def _mix_h1(h1: UInt32, k1: UInt32) -> UInt32:
    h1 = h1 ^ k1
    h1 = (h1 << np.uint32(13)) | (h1 >> np.uint32(19))
    return h1 * np.uint32(5) + np.uint32(0xE6546B64)


def _final_mix(h1: UInt32, length: Any) -> UInt32:
    h1 = h1 ^ length
    h1 = (h1 ^ (h1 >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h1 = (h1 ^ (h1 >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h1 ^ (h1 >> np.uint32(16))


def _hash_int(values: Any, seeds: UInt32) -> UInt32:
    words = np.ascontiguousarray(values, dtype=np.int32).view(np.uint32)
    return _final_mix(_mix_h1(seeds, _mix_k1(words)), np.uint32(4))


def _hash_long(values: Any, seeds: UInt32) -> UInt32:
    bits = np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)
    low = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (bits >> np.uint64(32)).astype(np.uint32)
    return _final_mix(_mix_h1(_mix_h1(seeds, _mix_k1(low)), _mix_k1(high)), np.uint32(8))


def _hash_bytes(array: pa.Array, seeds: UInt32) -> UInt32:
    """Mix aligned little-endian words, then each trailing byte as a signed word, row by row in lockstep."""
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    starts = offsets[:-1].astype(np.int64)
    lengths = offsets[1:].astype(np.int64) - starts
    data = np.frombuffer(data_buffer, dtype=np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    data = np.concatenate([data, np.zeros(4, np.uint8)])
    hashes = seeds.copy()
    words = lengths // 4
    for index in range(int(words.max(initial=0))):
        rows = np.nonzero(words > index)[0]
        at = starts[rows] + 4 * index
        word = (
            data[at].astype(np.uint32)
            | (data[at + 1].astype(np.uint32) << np.uint32(8))
            | (data[at + 2].astype(np.uint32) << np.uint32(16))
            | (data[at + 3].astype(np.uint32) << np.uint32(24))
        )
        hashes[rows] = _mix_h1(hashes[rows], _mix_k1(word))
    for index in range(3):
        rows = np.nonzero(lengths % 4 > index)[0]
        if rows.size:
            byte = data[starts[rows] + 4 * words[rows] + index].view(np.int8).astype(np.int32).view(np.uint32)
            hashes[rows] = _mix_h1(hashes[rows], _mix_k1(byte))
    return _final_mix(hashes, lengths.astype(np.uint32))


def _hash_decimal(array: pa.Array, seeds: UInt32) -> UInt32:
    """Hash the unscaled value: as a long up to 18 digits, else as its shortest big-endian bytes."""
    scale, precision = array.type.scale, array.type.precision
    exact = Context(prec=76)
    unscaled = [0 if v is None else int(v.scaleb(scale, exact)) for v in array.to_pylist()]
    if precision <= 18:
        return _hash_long(np.array(unscaled, dtype=np.int64), seeds)
    return _hash_bytes(pa.array([_java_bytes(v) for v in unscaled], pa.binary()), seeds)


Width = Literal["int", "long", "bytes", "large"]
_WIDTHS: dict[str, Width] = {"string": "bytes", "binary": "bytes", "bigint": "long", "timestamp": "long"}
_WIDTHS |= dict.fromkeys(("tinyint", "smallint", "int", "date", "boolean"), "int")


def _width(kind: str) -> Width:
    """Return how Spark hashes values of a type: as 32 or 64 bits, as bytes, or as the bytes of a large integer."""
    if (digits := decimal_digits(kind)) is not None:
        return "long" if digits[0] <= 18 else "large"
    if kind in _WIDTHS:
        return _WIDTHS[kind]
    raise _unhashable_error(f"a value of type {kind}")


def _hash_words(words: Sequence[int], seed: int, length: int) -> int:
    """Mix 32-bit words of any sign, and finish with the length in bytes."""
    h = seed
    for word in words:
        k = word * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) * 0x1B873593
        h = (h ^ k) & 0xFFFFFFFF
        h = (h << 13 | h >> 19) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= length
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def _hash_one_bytes(value: bytes, seed: int) -> int:
    length = len(value)
    return _hash_words(struct.unpack(f"<{length // 4}I{length % 4}b", value), seed, length)


_HASHERS: dict[Width, Callable[[Any, int], int]] = {
    "int": lambda value, seed: _hash_words((value,), seed, 4),
    "long": lambda value, seed: _hash_words((value & 0xFFFFFFFF, value >> 32), seed, 8),
    "bytes": _hash_one_bytes,
    "large": lambda value, seed: _hash_one_bytes(_java_bytes(value), seed),
}


# The digest of rows that Spark's `xxhash64` gives, for rows in Arrow: 64-bit xxHash, seed 42, chained over the values.
#
# `row_hash` is its column in Spark, `row_digests` the same row by row in plain Python, for tables that fit in memory.


_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_ALL = 0xFFFFFFFFFFFFFFFF


def row_hash(names: Iterable[str]) -> Column:
    """Return a 64-bit hash of these columns: Spark's xxhash64 of (position, value) of all that are not null.

    Spark's hash skips nulls, so that (1, null) and (null, 1) would be equal without positions. The last column may be
    left out where it is null.
    """
    # A position only with its value: else (0, 1, 1) would stand for two rows, as a 1 could be value or position.
    pairs = [
        f"CASE WHEN {quote_name(name)} IS NOT NULL THEN {place} END, {quote_name(name)}"
        for place, name in enumerate(names)
    ]
    return F.expr(f"xxhash64({', '.join(pairs)})")  # one request to Spark's JVM instead of four per column


def row_digests(table: pa.Table, schema: Schema) -> pa.Array:
    """Return for each row the hash of (position, value) of all columns that are not null, as signed 64-bit integers."""
    hashes = [SEED] * table.num_rows
    for place, field in enumerate(schema.fields):
        hashed = _xxhash_hasher(field.type)
        for row, value in enumerate(table.column(field.name).to_pylist()):
            if value is not None:
                hashes[row] = hashed(value, _xxhash_int(place, hashes[row]))
    return pa.array([number - ((number >> 63) << 64) for number in hashes], pa.int64())


def _xxhash_hasher(kind: str) -> Callable[[Any, int], int]:
    """Return a function that hashes a value of this Spark type as Spark's xxhash64 does."""
    if kind == "float":
        return lambda value, seed: _xxhash_int(_float_bits("<f", "<i", value), seed)
    if kind == "double":
        return lambda value, seed: _xxhash_long(_float_bits("<d", "<q", value), seed)
    plain, hashed = plain_converter(kind), _XXHASHERS[_width(kind)]
    return lambda value, seed: hashed(plain(value), seed)


def _float_bits(number: str, bits: str, value: float) -> int:
    """Return the bits of a float as an integer; -0.0 counts as 0.0, and all NaN are equal."""
    value = math.nan if math.isnan(value) else value + 0.0
    as_bits: int = struct.unpack(bits, struct.pack(number, value))[0]
    return as_bits


def _java_bytes(unscaled: int) -> bytes:
    """Return an integer as Java's BigInteger encodes it: big-endian, signed, in as few bytes as possible."""
    magnitude = unscaled if unscaled >= 0 else ~unscaled
    return unscaled.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


def _xxhash_int(value: int, seed: int) -> int:
    return _xxhash_final(_mix_int(seed + _P5 + 4 & _ALL, value & 0xFFFFFFFF))


def _xxhash_long(value: int, seed: int) -> int:
    return _xxhash_final(_mix_long(seed + _P5 + 8 & _ALL, value & _ALL))


def _xxhash_bytes(data: bytes, seed: int) -> int:
    size, at = len(data), 0
    if size >= 32:
        lanes = [seed + _P1 + _P2 & _ALL, seed + _P2 & _ALL, seed, seed - _P1 & _ALL]
        while at + 32 <= size:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_xxhash_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        mixed = sum(_rotate_left(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _ALL
        for lane in lanes:
            mixed = (mixed ^ _xxhash_round(0, lane)) * _P1 + _P4 & _ALL
    else:
        mixed = seed + _P5 & _ALL
    mixed = mixed + size & _ALL
    while at + 8 <= size:
        mixed = _mix_long(mixed, struct.unpack_from("<Q", data, at)[0])
        at += 8
    if at + 4 <= size:
        mixed = _mix_int(mixed, struct.unpack_from("<I", data, at)[0])
        at += 4
    for byte in data[at:]:
        mixed = _rotate_left(mixed ^ (byte * _P5 & _ALL), 11) * _P1 & _ALL
    return _xxhash_final(mixed)


_XXHASHERS: dict[Width, Callable[[Any, int], int]] = {
    "int": _xxhash_int,
    "long": _xxhash_long,
    "bytes": _xxhash_bytes,
    "large": lambda value, seed: _xxhash_bytes(_java_bytes(value), seed),
}


def _xxhash_round(lane: int, word: int) -> int:
    return _rotate_left(lane + word * _P2 & _ALL, 31) * _P1 & _ALL


def _mix_long(mixed: int, word: int) -> int:
    return _rotate_left(mixed ^ _xxhash_round(0, word), 27) * _P1 + _P4 & _ALL


def _mix_int(mixed: int, word: int) -> int:
    return _rotate_left(mixed ^ (word * _P1 & _ALL), 23) * _P2 + _P3 & _ALL


def _rotate_left(number: int, by: int) -> int:
    return (number << by | number >> (64 - by)) & _ALL


def _xxhash_final(mixed: int) -> int:
    mixed = (mixed ^ mixed >> 33) * _P2 & _ALL
    mixed = (mixed ^ mixed >> 29) * _P3 & _ALL
    return mixed ^ mixed >> 32


# A checksum of records that does not depend on their order, so that a producer can put it into a marker.

_PATTERN = re.compile(r"r2-[0-9a-f]{16}", re.IGNORECASE)
EMPTY_CHECKSUM = f"r2-{0:016x}"


@validated
def records_checksum(df: DataFrame, schema: Schema) -> str:
    """Return the checksum of the records: `r2-` and 16 hex digits, as in r2-51d0bd7a9c5e0f6b.

    It is the sum modulo 2**64 of a hash of each record: Spark's xxhash64 of the positions and values of the non-null
    columns of `schema`, in its order. Other columns of the frame are ignored. Equal records in any order and
    partitioning have equal checksums. Runs one Spark job.
    """
    with translate_spark_errors():
        row = df.agg(*_sum_hash_halves(schema)).first()
    assert row is not None
    return _format_checksum(row[0], row[1])


def checksums_by(number: str, df: DataFrame, schema: Schema) -> dict[int, str]:
    """Return the checksum of the records with each number in this column, such as `__partition`; one Spark job."""
    with translate_spark_errors():
        rows = df.groupBy(number).agg(*_sum_hash_halves(schema)).collect()
    return {row[0]: _format_checksum(row[1], row[2]) for row in rows}


def arrow_checksums_by(number: str, table: pa.Table, schema: Schema) -> dict[int, str]:
    """Return the checksum of the records with each number in this column of an Arrow table."""
    sums: dict[int, int] = {}
    digests = row_digests(table, schema).to_pylist()
    for group, digest in zip(table.column(number).to_pylist(), digests, strict=True):
        sums[group] = sums.get(group, 0) + digest
    return {group: _format_checksum(0, total) for group, total in sums.items()}


def arrow_checksum(table: pa.Table, schema: Schema) -> str:
    """Return the checksum of the records in an Arrow table."""
    return _format_checksum(0, sum(row_digests(table, schema).to_pylist()))


def parse_records_checksum(text: str | None) -> str | None:
    """Return the records' checksum in `text`; None without one, or for a checksum of the producer's own form."""
    return text.lower() if text is not None and _PATTERN.fullmatch(text) else None


def _sum_hash_halves(schema: Schema) -> tuple[Column, Column]:
    """Return the sums of the hashes' upper and lower 32 bits: neither overflows below 2**31 records."""
    hashed = row_hash(schema.names)
    high, low = F.shiftrightunsigned(hashed, 32), hashed.bitwiseAND(F.lit(0xFFFFFFFF))
    return F.sum(high), F.sum(low)


def _format_checksum(high: int | None, low: int | None) -> str:
    return f"r2-{(((high or 0) << 32) + (low or 0)) % 2**64:016x}"

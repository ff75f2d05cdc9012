"""Spark's hashes of rows, also without Spark: the one that chooses the bucket, and the one for
checksums of records.

The bucket hash is Murmur3 (x86, 32 bit), seed 42, chained over the columns.

`assign_buckets` returns what Spark's `pmod(hash(columns), n)` returns, so that writing files and
looking up keys without Spark use Spark's buckets. The `mmh3` package differs for strings whose
UTF-8 length is not a multiple of 4: Spark mixes each trailing byte, sign-extended, as a word of its
own. Long values are hashed by `mmh3` up to these bytes: its last step can be undone.

Columns are hashed with NumPy. A single key is hashed with Python integers, which takes 3 us instead
of the 100 us of arrays with one element; tests compare the two.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import mmh3

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc, pt
from dagster_adjunct.resources.schemas.arrow_values import as_lists
from dagster_adjunct.resources.schemas.schema import Schema, quote_name
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    decimal_digits,
    parse_type,
)
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame

    UInt32 = npt.NDArray[np.uint32]
    UInt64 = npt.NDArray[np.uint64]
    Int64 = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]

SEED = 42


def assign_buckets(columns: Sequence[pa.Array | pa.ChunkedArray], n: int) -> npt.NDArray[np.int32]:
    """Return for each row the bucket in [0, n) to which Spark assigns it."""
    result: npt.NDArray[np.int32] = np.mod(spark_hash(columns), np.int32(n))
    return result


def bucket_of_key(values: Sequence[object], types: Sequence[str], n: int) -> int:
    """Return the bucket in [0, n) of a key, given by its Python values and their Spark types."""
    plain: list[Plain | None] = []
    for value, kind in zip(values, types, strict=True):
        plain.append(None if value is None else plain_converter(kind)(value))
    return bucket_function(tuple(types), n)(plain)


@lru_cache(maxsize=256)
def bucket_function(types: tuple[str, ...], n: int) -> Callable[[Sequence[Plain | None]], int]:
    """Return a function from a key of these Spark types, in plain form, to its bucket in [0, n)."""
    hashers = [_HASHERS[_width(kind)] for kind in types]

    def bucket(values: Sequence[Plain | None]) -> int:
        seed = SEED
        for hasher, value in zip(hashers, values, strict=True):
            if value is not None:  # as in Spark, a null leaves the hash as it is
                seed = hasher(value, seed)
        signed = seed - (1 << 32) if seed >= 1 << 31 else seed
        return signed % n  # Python's modulus is that of Spark's pmod: never negative

    return bucket


def spark_hash(columns: Sequence[pa.Array | pa.ChunkedArray]) -> npt.NDArray[np.int32]:
    """Return Spark's `hash(columns…)` of each row. Nulls do not contribute to it. Raises
    SchemaMismatchError without columns, and for types that can't be hashed.
    """
    if not columns:
        raise SchemaMismatchError(
            "a hash needs columns, and none are named.", "Name at least one key column."
        )
    hashes = np.full(len(columns[0]), SEED, dtype=np.uint32)
    for column in columns:
        if isinstance(column, pa.ChunkedArray):
            array = column.combine_chunks()
        else:
            array = column
        with np.errstate(over="ignore"):
            mixed = _hash_array(array, hashes)
        if array.null_count:
            valid = np.asarray(array.is_valid())
            hashes = np.where(valid, mixed, hashes)
        else:
            hashes = mixed
    return hashes.view(np.int32)


def _hash_array(array: pa.Array, seeds: UInt32) -> UInt32:
    """Return the hash of each value, which goes on from the row's hash in `seeds`."""
    if (ranges := _byte_ranges(array)) is not None:
        return _hash_bytes(*ranges, seeds)
    numbers = _numbers(array)
    if numbers.itemsize == 8:
        return _hash_long(numbers, seeds)
    return _hash_int(numbers, seeds)


class _ByteRanges(NamedTuple):
    """The bytes of all values, and for each value where it starts in `data` and its length."""

    data: Bytes
    starts: Int64
    lengths: Int64


def _byte_ranges(array: pa.Array) -> _ByteRanges | None:
    """Return the bytes that Spark hashes for values of this type.

    They are UTF-8, the bytes of a binary value, or the shortest big-endian bytes of a decimal of
    more than 18 digits. None for other types, whose values are hashed as numbers.
    """
    kind = array.type
    end = array.offset + len(array)
    if pt.is_string(kind) or pt.is_binary(kind):
        _, offset_buffer, data_buffer = array.buffers()
        offsets = np.frombuffer(offset_buffer, dtype=np.int32)[array.offset : end + 1].astype(
            np.int64
        )
        data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
        return _ByteRanges(data, offsets[:-1], np.diff(offsets))
    if not pt.is_decimal128(kind) or kind.precision <= 18:
        return None
    big_endian = np.frombuffer(array.buffers()[1], dtype=np.uint8).reshape(-1, 16)[
        array.offset : end, ::-1
    ]
    magnitudes = big_endian ^ np.where(big_endian[:, :1] >= 128, np.uint8(255), np.uint8(0))
    # Leave out leading bytes that only repeat the sign, if the next byte has the same sign bit.
    repeats = (magnitudes[:, :-1] == 0) & (magnitudes[:, 1:] < 128)
    skipped = np.logical_and.accumulate(repeats, axis=1).sum(axis=1)
    starts = np.arange(len(array)) * 16 + skipped
    return _ByteRanges(big_endian.ravel(), starts, 16 - skipped)


_HASHED_AS_INT = ("bool", "date32[day]", "int8", "int16", "int32")


def _numbers(array: pa.Array) -> npt.NDArray[np.int32] | Int64:
    """Return the numbers of 32 or 64 bits that Spark hashes for values of this type. What stands
    for a null is no hash: callers leave the row's hash as it is there.

    Raises SchemaMismatchError for types that can't be hashed.
    """
    kind = array.type
    if pt.is_decimal128(kind) and kind.precision <= 18:
        # Up to 18 digits, the whole number is in the lower of its two words.
        words = np.frombuffer(array.buffers()[1], dtype="<i8").reshape(-1, 2)
        return words[array.offset : array.offset + len(array), 0]
    if pt.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
    elif str(kind) in _HASHED_AS_INT:
        array = array.cast(pa.int32())
    elif not pt.is_int64(kind):
        raise _unhashable_error(f"a column of type {kind}")
    numbers: npt.NDArray[np.int32] | Int64 = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    return numbers


def _read(data: Bytes, at: Int64, size: int) -> npt.NDArray[np.void]:
    """Return the `size` bytes that begin at each of the positions `at`, aligned or not."""
    windows: npt.NDArray[np.void] = np.ndarray(
        (max(0, data.size - size + 1),), f"V{size}", data, strides=(1,)
    )
    return windows[at]


def _unhashable_error(what: str) -> SchemaMismatchError:
    """Return the error for a type that can't be hashed."""
    expected = "string, integer, boolean, date, timestamp, decimal or binary"
    problem = f"{what} can't be hashed into buckets: expected {expected}."
    return SchemaMismatchError(problem, "Cast it before it becomes a key.")


def _mix_k1(k1: UInt32) -> UInt32:
    """Return words of data as Murmur3 prepares them (its `mixK1`)."""
    k1 = k1 * np.uint32(0xCC9E2D51)
    k1 = (k1 << np.uint32(15)) | (k1 >> np.uint32(17))
    return k1 * np.uint32(0x1B873593)


def _mix_h1(h1: UInt32, k1: UInt32) -> UInt32:
    """Return Murmur3's hashes after they took in these prepared words (its `mixH1`)."""
    h1 = h1 ^ k1
    h1 = (h1 << np.uint32(13)) | (h1 >> np.uint32(19))
    return h1 * np.uint32(5) + np.uint32(0xE6546B64)


def _final_mix(h1: UInt32, length: Any) -> UInt32:
    """Return the finished hashes of values of so many bytes (Murmur3's `fmix`)."""
    h1 = h1 ^ length
    h1 = (h1 ^ (h1 >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h1 = (h1 ^ (h1 >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h1 ^ (h1 >> np.uint32(16))


def _hash_int(values: Any, seeds: UInt32) -> UInt32:
    """Return Murmur3's hash of each 32-bit integer."""
    words = np.ascontiguousarray(values, dtype=np.int32).view(np.uint32)
    return _final_mix(_mix_h1(seeds, _mix_k1(words)), np.uint32(4))


def _hash_long(values: Any, seeds: UInt32) -> UInt32:
    """Return Murmur3's hash of each 64-bit integer."""
    bits = np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)
    low = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (bits >> np.uint64(32)).astype(np.uint32)
    return _final_mix(_mix_h1(_mix_h1(seeds, _mix_k1(low)), _mix_k1(high)), np.uint32(8))


def _hash_bytes(data: Bytes, starts: Int64, lengths: Int64, seeds: UInt32) -> UInt32:
    """Return the hash of each row's bytes: mix their little-endian words, then each byte left as a
    signed word.

    The first words of all rows are mixed at once, then the second ones, and so on. Long rows are
    mixed one by one.
    """
    hashes = seeds.copy()
    words = lengths // 4
    short = words <= _MOST_WORDS
    for row in np.nonzero(~short)[0].tolist():
        start = starts[row]
        hashes[row] = _mix_words(data[start : start + 4 * words[row]], int(hashes[row]))
    for index in range(int(words[short].max(initial=0))):
        rows = np.nonzero((words > index) & short)[0]
        word = _read(data, starts[rows] + 4 * index, 4).view("<u4")
        hashes[rows] = _mix_h1(hashes[rows], _mix_k1(word))
    for index in range(3):
        rows = np.nonzero(lengths % 4 > index)[0]
        if rows.size:
            byte = (
                data[starts[rows] + 4 * words[rows] + index]
                .view(np.int8)
                .astype(np.int32)
                .view(np.uint32)
            )
            hashes[rows] = _mix_h1(hashes[rows], _mix_k1(byte))
    return _final_mix(hashes, lengths.astype(np.uint32))


Width = Literal["int", "long", "bytes", "large"]
_WIDTHS: dict[str, Width] = {
    "string": "bytes",
    "binary": "bytes",
    "bigint": "long",
    "timestamp": "long",
}
_WIDTHS |= dict.fromkeys(("tinyint", "smallint", "int", "date", "boolean"), "int")


def _width(kind: str) -> Width:
    """Return how Spark hashes values of this type: as 32 or 64 bits, as bytes, or as the bytes
    of a large integer. Raises SchemaMismatchError for types that can't be hashed.
    """
    digits = decimal_digits(kind)
    if digits is not None:
        if digits.precision <= 18:
            return "long"
        return "large"
    if kind in _WIDTHS:
        return _WIDTHS[kind]
    raise _unhashable_error(f"a value of type {kind}")


def _hash_words(words: Sequence[int], seed: int, length: int) -> int:
    """Return the hash of 32-bit words of any sign; `length` is the number of bytes."""
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


_MOST_WORDS = 64  # of values that are mixed word by word; mmh3 mixes longer ones in native code


def _hash_one_bytes(value: bytes, seed: int) -> int:
    """Return the hash of one value's bytes, as `_hash_bytes` does for many."""
    length = len(value)
    words = length // 4
    if words > _MOST_WORDS:
        seed = _mix_words(memoryview(value)[: 4 * words], seed)
        return _hash_words(struct.unpack(f"<{length % 4}b", value[4 * words :]), seed, length)
    return _hash_words(struct.unpack(f"<{words}I{length % 4}b", value), seed, length)


def _mix_words(whole: Any, seed: int) -> int:
    """Return the hash after it has mixed all words of a buffer: the hash by mmh3, with its last
    step undone.

    The constants are the inverses of those of the last step, modulo 2**32.
    """
    h = mmh3.mmh3_32_uintdigest(whole, seed)
    h ^= h >> 16
    h = h * 0x7ED1B41D & 0xFFFFFFFF
    h ^= h >> 13 ^ h >> 26
    h = h * 0xA5CB9243 & 0xFFFFFFFF
    return h ^ h >> 16 ^ len(whole)


_HASHERS: dict[Width, Callable[[Any, int], int]] = {
    "int": lambda value, seed: _hash_words((value,), seed, 4),
    "long": lambda value, seed: _hash_words((value & 0xFFFFFFFF, value >> 32), seed, 8),
    "bytes": _hash_one_bytes,
    "large": lambda value, seed: _hash_one_bytes(_java_bytes(value), seed),
}


def _java_bytes(unscaled: int) -> bytes:
    """Return an integer as Java's BigInteger encodes it: big-endian, signed, in as few bytes as
    possible.
    """
    magnitude = unscaled if unscaled >= 0 else ~unscaled
    return unscaled.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


# The digest of rows that Spark's `xxhash64` gives: 64-bit xxHash, seed 42, chained over the values.
#
# `row_hash` is its column in Spark. `row_digests` computes the same with NumPy, for tables that fit
# in memory.


_P1 = 0x9E3779B185EBCA87
_P2 = 0xC2B2AE3D27D4EB4F
_P3 = 0x165667B19E3779F9
_P4 = 0x85EBCA77C2B2AE63
_P5 = 0x27D4EB2F165667C5
_ALL = 0xFFFFFFFFFFFFFFFF
_ROWS = 32_768  # at once, so that their hashes stay in the processor's cache
_NESTED_ROWS = 16_384  # which have more values than rows


def row_hash(types: Mapping[str, str]) -> Column:
    """Return a 64-bit hash of these columns, given with their types: Spark's xxhash64 of (position,
    value) of all that are not null.

    Spark's hash skips nulls, so that (1, null) and (null, 1) would be equal without positions. The
    last column may be left out if it is null in all rows: the hashes are the same.

    Instead of a nested value, its own hash is hashed, for the same reason. That of a struct is that
    of a row. That of an array is the hash of its size and of the hashes of all (index, element),
    combined by XOR; that of a map of its size and of all (key, value), so that the order of its
    entries does not matter.
    """
    parts = ((quote_name(name), parse_type(kind)) for name, kind in types.items())
    # One request to Spark's JVM instead of four per column.
    return F.expr(_hash_of_parts(parts))


def _hash_of_parts(parts: Iterable[tuple[str, Type]]) -> str:
    """Return the SQL of the hash of columns, or of fields of a struct, given by their SQL and
    type.
    """
    # A null's position is left out too: else two rows could give the same sequence, as a 1 may be
    # value or position.
    pairs = []
    for position, (value, type_) in enumerate(parts):
        pairs.append(f"CASE WHEN {value} IS NOT NULL THEN {position} END, {_hashed(value, type_)}")
    return f"xxhash64({', '.join(pairs)})"


def _hashed(value: str, type_: Type) -> str:
    """Return the SQL of what is hashed for a value: the value, or the hash of a nested one."""
    if isinstance(type_, Simple):
        return value
    if isinstance(type_, Struct):
        members = ((f"{value}.{quote_name(part.name)}", part.type) for part in type_.members)
        return f"CASE WHEN {value} IS NOT NULL THEN {_hash_of_parts(members)} END"
    if isinstance(type_, Array):
        hashes = f"transform({value}, (x, i) -> xxhash64(i, {_hashed('x', type_.element)}))"
    else:
        hashed = _hashed("x.value", type_.value)
        hashes = f"transform(map_entries({value}), x -> xxhash64(x.key, {hashed}))"
    combined = f"aggregate({hashes}, 0L, (one, other) -> one ^ other)"
    return f"CASE WHEN {value} IS NOT NULL THEN xxhash64(size({value}), {combined}) END"


def row_digests(table: pa.Table, names: Iterable[str]) -> pa.ChunkedArray:
    """Return the hash of these columns for each row of the table, as int64: the same as `row_hash`
    computes in Spark.

    The Arrow types of the columns must be those of the schema. Raises SchemaMismatchError for a
    type that no schema may have.
    """
    chosen = table.select(list(names)).combine_chunks()
    rows = _NESTED_ROWS if any(map(pt.is_nested, chosen.schema.types)) else _ROWS
    digests = []
    for batch in chosen.to_batches(max_chunksize=rows):
        hashes = np.full(batch.num_rows, SEED, dtype=np.uint64)
        for position, column in enumerate(batch.columns):
            hashes = _digest(column, position, hashes)
        digests.append(pa.array(hashes.view(np.int64)))
    return pa.chunked_array(digests, pa.int64())


def _digest(array: pa.Array, position: int, seeds: UInt64) -> UInt64:
    """Return the hash of (position, value) for each value, beginning with its seed; for a null, the
    seed.
    """
    if array.null_count:
        hashes = seeds.copy()
        valid = np.asarray(array.is_valid())
        hashes[valid] = _digest(array.drop_null(), position, seeds[valid])
        return hashes
    return _chain(array, _xxhash_int(np.array([position], dtype=np.int32), seeds))


def _chain(array: pa.Array, seeds: UInt64) -> UInt64:
    """Return the hash of each value, beginning with its seed; for a null, the seed."""
    if array.null_count:
        hashes = seeds.copy()
        valid = np.asarray(array.is_valid())
        hashes[valid] = _chain(array.drop_null(), seeds[valid])
        return hashes
    kind = array.type
    if pt.is_nested(kind):
        return _xxhash_long(_nested_hashes(array), seeds)
    if pt.is_float32(kind) or pt.is_float64(kind):
        numbers = array.to_numpy() + 0.0  # -0.0 counts as 0.0
        numbers[np.isnan(numbers)] = np.nan  # all NaN are equal
        if pt.is_float64(kind):
            return _xxhash_long(numbers, seeds)
        return _xxhash_int(numbers, seeds)
    if (ranges := _byte_ranges(array)) is not None:
        return _xxhash_bytes(*ranges, seeds)
    values = _numbers(array)
    if values.itemsize == 8:
        return _xxhash_long(values, seeds)
    return _xxhash_int(values, seeds)


def _nested_hashes(array: pa.Array) -> UInt64:
    """Return the hash of each nested value, of which none is null (see `row_hash`)."""
    if pt.is_struct(array.type):
        hashes = np.full(len(array), SEED, dtype=np.uint64)
        for position, part in enumerate(array.flatten()):
            hashes = _digest(part, position, hashes)
        return hashes
    lists = as_lists(array)
    sizes = np.asarray(pc.list_value_length(lists))
    elements = pc.list_flatten(lists)
    starts = np.cumsum(sizes) - sizes
    if pt.is_map(array.type):
        keys, elements = elements.flatten()
        seeds = _hash_keys(keys)
    else:
        seeds = _hash_counts(np.arange(len(elements)) - np.repeat(starts, sizes))
    combined = np.zeros(len(array), dtype=np.uint64)
    filled = sizes > 0
    if filled.any():
        hashes = _chain(elements, seeds)
        combined[filled] = np.bitwise_xor.reduceat(hashes, starts[filled])
    return _xxhash_long(combined, _hash_counts(sizes))


def _hash_keys(keys: pa.Array) -> UInt64:
    """Return the hash of each key of maps, few of which differ: each is hashed once."""
    encoded = keys.dictionary_encode()
    hashes = _chain(encoded.dictionary, np.full(len(encoded.dictionary), SEED, dtype=np.uint64))
    each: UInt64 = hashes[np.asarray(encoded.indices)]
    return each


def _hash_counts(counts: npt.NDArray[Any]) -> UInt64:
    """Return the hash of each count from 0 on, few of which differ: each is hashed once."""
    known = np.arange(counts.max(initial=0) + 1, dtype=np.int32)
    each: UInt64 = _xxhash_int(known, np.full(len(known), SEED, dtype=np.uint64))[counts]
    return each


def _xxhash_int(values: npt.NDArray[Any], seeds: UInt64) -> UInt64:
    """Return the xxHash of each 32-bit value."""
    return _xxhash_final(_mix_int(seeds + (_P5 + 4), np.ascontiguousarray(values).view(np.uint32)))


def _xxhash_long(values: npt.NDArray[Any], seeds: UInt64) -> UInt64:
    """Return the xxHash of each 64-bit value."""
    return _xxhash_final(_mix_long(seeds + (_P5 + 8), np.ascontiguousarray(values).view(np.uint64)))


def _xxhash_bytes(data: Bytes, starts: Int64, lengths: Int64, seeds: UInt64) -> UInt64:
    """Return the hash of each row's bytes: mix stripes of 32 bytes, then up to three words of 8,
    one of 4, three bytes.

    The same step is done for all rows at once.
    """
    stripes, left = np.divmod(lengths, 32)
    hashes = seeds + _P5
    rows = np.nonzero(stripes)[0]
    if rows.size:
        rows = rows[np.argsort(-stripes[rows])]
        hashes[rows] = _xxhash_stripes(data, starts[rows], stripes[rows], seeds[rows])
    hashes += lengths.astype(np.uint64)
    at = starts + 32 * stripes
    for index in range(3):
        rows = np.nonzero(left >= 8 * (index + 1))[0]
        hashes[rows] = _mix_long(hashes[rows], _read(data, at[rows] + 8 * index, 8).view("<u8"))
    at += left & 24
    rows = np.nonzero(left & 4)[0]
    hashes[rows] = _mix_int(hashes[rows], _read(data, at[rows], 4).view("<u4"))
    at += left & 4
    for index in range(3):
        rows = np.nonzero(left % 4 > index)[0]
        hashes[rows] = (
            _rotate_left(hashes[rows] ^ data[at[rows] + index] * np.uint64(_P5), 11) * _P1
        )
    return _xxhash_final(hashes)


def _xxhash_stripes(data: Bytes, starts: Int64, stripes: Int64, seeds: UInt64) -> UInt64:
    """Return each row's hash so far, of its first stripes of 32 bytes. `stripes`, their numbers,
    are descending.
    """
    lanes = np.stack([seeds + (_P1 + _P2 & _ALL), seeds + _P2, seeds, seeds - _P1], axis=1)
    # `count` is the number of rows that have a stripe of this index: the first ones.
    counts = np.searchsorted(-stripes, -np.arange(stripes[0]))
    # The number of stripes that are mixed for many rows at once; the others row by row.
    together = int(np.count_nonzero(counts >= _FEW_ROWS))
    for index, count in enumerate(counts[:together]):
        words = _read(data, starts[:count] + 32 * index, 32).view("<u8").reshape(-1, 4)
        lanes[:count] = _xxhash_round(lanes[:count], words)
    few = int(counts[together]) if together < len(counts) else 0
    for row in range(few):
        start = starts[row] + 32 * together
        end = starts[row] + 32 * stripes[row]
        lanes[row] = _xxhash_one_row(data[start:end].tobytes(), lanes[row].tolist())
    first, second, third, fourth = lanes.T
    mixed = (
        _rotate_left(first, 1)
        + _rotate_left(second, 7)
        + _rotate_left(third, 12)
        + _rotate_left(fourth, 18)
    )
    for lane in lanes.T:
        mixed = (mixed ^ _xxhash_round(0, lane)) * _P1 + _P4
    return mixed


_FEW_ROWS = 8  # below this number of rows, Python's integers are faster than arrays


def _xxhash_one_row(stripes: bytes, lanes: list[int]) -> list[int]:
    """Return the lanes of one row after these stripes, in a third of the time that arrays of one
    row take.
    """
    first, second, third, fourth = lanes
    for w1, w2, w3, w4 in struct.iter_unpack("<4Q", stripes):
        first = first + w1 * _P2 & _ALL
        first = (first << 31 | first >> 33) * _P1 & _ALL
        second = second + w2 * _P2 & _ALL
        second = (second << 31 | second >> 33) * _P1 & _ALL
        third = third + w3 * _P2 & _ALL
        third = (third << 31 | third >> 33) * _P1 & _ALL
        fourth = fourth + w4 * _P2 & _ALL
        fourth = (fourth << 31 | fourth >> 33) * _P1 & _ALL
    return [first, second, third, fourth]


def _xxhash_round(lanes: UInt64 | int, words: UInt64) -> UInt64:
    """Return xxHash's lanes after a round that takes in one word each."""
    return _rotate_left(lanes + words * _P2, 31) * _P1


def _mix_long(mixed: UInt64, words: UInt64) -> UInt64:
    """Return xxHash's hashes after they took in a word of 64 bits each."""
    return _rotate_left(mixed ^ _xxhash_round(0, words), 27) * _P1 + _P4


def _mix_int(mixed: UInt64, words: UInt32) -> UInt64:
    """Return xxHash's hashes after they took in a word of 32 bits each."""
    return _rotate_left(mixed ^ words * np.uint64(_P1), 23) * _P2 + _P3


def _rotate_left(numbers: UInt64, by: int) -> UInt64:
    """Return 64-bit numbers with their bits moved to the left, in a circle."""
    return numbers << np.uint64(by) | numbers >> np.uint64(64 - by)


def _xxhash_final(mixed: UInt64) -> UInt64:
    """Return the finished hashes."""
    mixed = (mixed ^ mixed >> np.uint64(33)) * _P2
    mixed = (mixed ^ mixed >> np.uint64(29)) * _P3
    return mixed ^ mixed >> np.uint64(32)


# A checksum of records that does not depend on their order, so that a producer can put it into a
# marker.

_PATTERN = re.compile(r"r2-[0-9a-f]{16}", re.IGNORECASE)
EMPTY_CHECKSUM = f"r2-{0:016x}"


@validated
def records_checksum(df: DataFrame, schema: Schema) -> str:
    """Return the checksum of the records: `r2-` and 16 hex digits, as in r2-51d0bd7a9c5e0f6b.

    It is the sum modulo 2**64 of a hash of each record: Spark's xxhash64 of the positions and
    values of the non-null columns of `schema`, in its order. Other columns of the frame are
    ignored. Equal records in any order and partitioning have equal checksums. Runs one Spark job.
    """
    with translate_spark_errors():
        row = df.agg(*_sum_hash_halves(schema)).first()
    assert row is not None
    high, low = row
    return _format_checksum(high, low)


def checksums_by(number: str, df: DataFrame, schema: Schema) -> dict[int, str]:
    """Return a checksum for each value of the column `number`, such as `__partition`: that of its
    records.

    Runs one Spark job.
    """
    with translate_spark_errors():
        rows = df.groupBy(number).agg(*_sum_hash_halves(schema)).collect()
    return {value: _format_checksum(high, low) for value, high, low in rows}


def arrow_checksums_by(number: str, table: pa.Table, schema: Schema) -> dict[int, str]:
    """Return a checksum for each value of the column `number` of an Arrow table: that of its
    records, the same as by `checksums_by`.
    """
    # Unsigned, since their sums wrap around.
    digests = row_digests(table, schema.names).cast(pa.uint64(), safe=False)
    numbered = pa.table([table.column(number), digests], ["number", "digest"])
    sums = numbered.group_by("number").aggregate([("digest", "sum")]).to_pylist()
    return {row["number"]: _format_checksum(0, row["digest_sum"]) for row in sums}


def arrow_checksum(table: pa.Table, schema: Schema) -> str:
    """Return the checksum of the records of an Arrow table, the same as by `records_checksum`."""
    return _format_checksum(
        0, pc.sum(row_digests(table, schema.names).cast(pa.uint64(), safe=False)).as_py()
    )


def parse_records_checksum(text: str | None) -> str | None:
    """Return `text` in lower case if it is a checksum of `records_checksum` (r2-…), else None."""
    if text is not None and _PATTERN.fullmatch(text):
        return text.lower()
    return None


def _sum_hash_halves(schema: Schema) -> tuple[Column, Column]:
    """Return the sums of the upper 32 bits and of the lower 32 bits of the records' hashes.

    For less than 2**31 records, neither overflows.
    """
    hashed = row_hash(schema.types)
    high = F.shiftrightunsigned(hashed, 32)
    low = hashed.bitwiseAND(F.lit(0xFFFFFFFF))
    return F.sum(high), F.sum(low)


def _format_checksum(high: int | None, low: int | None) -> str:
    """Return the checksum for the sums of the upper and the lower 32 bits of hashes; None counts as
    0.
    """
    return f"r2-{(((high or 0) << 32) + (low or 0)) % 2**64:016x}"


Plain = int | bytes
"""A value as Parquet stores it, which compares and hashes without Arrow. Plain values are ordered
as in Spark: strings by their UTF-8 bytes, decimals of one type by their unscaled number."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_FIRST_DAY = _EPOCH.date().toordinal()


_EXACT = Context(prec=76)


def plain_converter(kind: str) -> Callable[[Any], Plain]:
    """Return a function that converts a value of this Spark type to its plain form.

    string: UTF-8 bytes; binary: itself; integers and booleans: themselves; date: days, timestamp:
    microseconds, both since 1970 in UTC; decimal: the unscaled number.
    """
    digits = decimal_digits(kind)
    if digits is not None:
        return lambda value: int(Decimal(value).scaleb(digits.scale, _EXACT))
    return _CONVERTERS.get(kind, int)


def _micros(value: datetime) -> int:
    """Return a time in microseconds since 1970."""
    passed = value - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _days(value: date) -> int:
    """Return a date in days since 1970."""
    return value.toordinal() - _FIRST_DAY


_CONVERTERS: dict[str, Callable[[Any], Plain]] = {
    "string": str.encode,
    "binary": bytes,
    "date": _days,
    "timestamp": _micros,
}

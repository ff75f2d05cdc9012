"""Spark's bucket hash in numpy: Murmur3 (x86, 32 bit), seed 42, chained over the columns.

`buckets` gives the number that Spark's `pmod(hash(columns), n)` gives, so files written and keys looked
up without Spark land in Spark's own buckets. The public `mmh3` package differs for strings whose UTF-8
length is not a multiple of 4: Spark mixes each trailing byte, sign-extended, as a word of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context
from typing import TYPE_CHECKING, Any

from resources.errors import SchemaMismatchError
from resources.schema import arrow_type

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    UInt32 = npt.NDArray[np.uint32]

SEED = 42


def buckets(columns: Sequence[pa.Array | pa.ChunkedArray], n: int) -> npt.NDArray[np.int32]:
    """Return for each row the bucket in [0, n) that Spark would give it."""
    import numpy as np

    result: npt.NDArray[np.int32] = np.mod(spark_hash(columns), np.int32(n))
    return result


def bucket_of(values: Sequence[object], types: Sequence[str], n: int) -> int:
    """Return the bucket of one key, given as Python values and Spark type names."""
    import pyarrow as pa

    return int(buckets([pa.array([v], arrow_type(t)) for v, t in zip(values, types, strict=True)], n)[0])


def spark_hash(columns: Sequence[pa.Array | pa.ChunkedArray]) -> npt.NDArray[np.int32]:
    """Return Spark's `hash(columns…)` of each row as int32; a null leaves the hash as it was."""
    import numpy as np
    import pyarrow as pa

    if not columns:
        raise SchemaMismatchError("a hash over no columns is asked for.", "Name at least one key column.")
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
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(array, seeds)
    if pa.types.is_decimal(kind):
        return _hash_decimal(array, seeds)
    if pa.types.is_boolean(kind):
        return _hash_int(pc.fill_null(array.cast(pa.int8()), 0).to_numpy(zero_copy_only=False), seeds)
    if pa.types.is_date32(kind):
        return _hash_int(pc.fill_null(array.cast(pa.int32()), 0).to_numpy(zero_copy_only=False), seeds)
    if pa.types.is_timestamp(kind):
        micros = array.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
        return _hash_long(pc.fill_null(micros, 0).to_numpy(zero_copy_only=False), seeds)
    if pa.types.is_int64(kind):
        return _hash_long(pc.fill_null(array, 0).to_numpy(zero_copy_only=False), seeds)
    if pa.types.is_integer(kind):
        return _hash_int(pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int32), seeds)
    raise SchemaMismatchError(
        f"a column of type {kind} can't be hashed into buckets: expected string, integer, boolean, date, "
        "timestamp, decimal or binary.",
        "Cast it before it becomes a key.",
    )


def _mix_k1(k1: UInt32) -> UInt32:
    import numpy as np

    k1 = k1 * np.uint32(0xCC9E2D51)
    k1 = (k1 << np.uint32(15)) | (k1 >> np.uint32(17))
    return k1 * np.uint32(0x1B873593)


def _mix_h1(h1: UInt32, k1: UInt32) -> UInt32:
    import numpy as np

    h1 = h1 ^ k1
    h1 = (h1 << np.uint32(13)) | (h1 >> np.uint32(19))
    return h1 * np.uint32(5) + np.uint32(0xE6546B64)


def _final_mix(h1: UInt32, length: Any) -> UInt32:
    import numpy as np

    h1 = h1 ^ length
    h1 = (h1 ^ (h1 >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h1 = (h1 ^ (h1 >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h1 ^ (h1 >> np.uint32(16))


def _hash_int(values: Any, seeds: UInt32) -> UInt32:
    import numpy as np

    words = np.ascontiguousarray(values, dtype=np.int32).view(np.uint32)
    return _final_mix(_mix_h1(seeds, _mix_k1(words)), np.uint32(4))


def _hash_long(values: Any, seeds: UInt32) -> UInt32:
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)
    low = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (bits >> np.uint64(32)).astype(np.uint32)
    return _final_mix(_mix_h1(_mix_h1(seeds, _mix_k1(low)), _mix_k1(high)), np.uint32(8))


def _hash_bytes(array: pa.Array, seeds: UInt32) -> UInt32:
    """Mix aligned little-endian words, then each trailing byte as a signed word, row by row in lockstep."""
    import numpy as np

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
    import numpy as np
    import pyarrow as pa

    scale, precision = array.type.scale, array.type.precision
    exact = Context(prec=76)
    unscaled = [0 if v is None else int(v.scaleb(scale, exact)) for v in array.to_pylist()]
    if precision <= 18:
        return _hash_long(np.array(unscaled, dtype=np.int64), seeds)
    shortest = [v.to_bytes((v if v >= 0 else ~v).bit_length() // 8 + 1, "big", signed=True) for v in unscaled]
    return _hash_bytes(pa.array(shortest, pa.binary()), seeds)

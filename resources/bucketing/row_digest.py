"""The digest of rows that Spark's `xxhash64` gives, for rows in Arrow: 64-bit xxHash, seed 42, chained over the values.

It is `row_hash` (schemas/quoted_columns.py) row by row in plain Python, which is for tables that fit in memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.schemas.plain_values import decimal_type, to_plain

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.schemas.schema import Schema

SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_ALL = 0xFFFFFFFFFFFFFFFF


def row_digests(table: pa.Table, schema: Schema) -> pa.Array:
    """Return for each row the hash of (place, value) of all that are there, as signed 64-bit numbers."""
    import pyarrow as pa

    hashes = [SEED] * table.num_rows
    for place, field in enumerate(schema.fields):
        hashed = _hasher(field.type)
        for row, value in enumerate(table.column(field.name).to_pylist()):
            if value is not None:
                hashes[row] = hashed(value, _of_int(place, hashes[row]))
    return pa.array([number - ((number >> 63) << 64) for number in hashes], pa.int64())


def _hasher(kind: str) -> Callable[[Any, int], int]:
    """Return what hashes a value of this Spark type name as Spark does."""
    if kind == "float":
        return lambda value, seed: _of_int(_bits("<f", "<i", value), seed)
    if kind == "double":
        return lambda value, seed: _of_long(_bits("<d", "<q", value), seed)
    plain: Callable[[Any], Any] = to_plain(kind)
    if kind in ("string", "binary"):
        return lambda value, seed: _of_bytes(plain(value), seed)
    if kind in ("bigint", "timestamp"):
        return lambda value, seed: _of_long(plain(value), seed)
    if not kind.startswith("decimal"):
        return lambda value, seed: _of_int(plain(value), seed)
    if decimal_type(kind)[0] <= 18:
        return lambda value, seed: _of_long(plain(value), seed)
    return lambda value, seed: _of_bytes(_shortest(plain(value)), seed)


def _bits(number: str, bits: str, value: float) -> int:
    """Return the bits of a float as a whole number; -0.0 is 0.0, and all NaN are one."""
    value = math.nan if math.isnan(value) else value + 0.0
    as_bits: int = struct.unpack(bits, struct.pack(number, value))[0]
    return as_bits


def _shortest(unscaled: int) -> bytes:
    """Return a whole number as Java's BigInteger gives it: big-endian, signed, in no more bytes than it needs."""
    magnitude = unscaled if unscaled >= 0 else ~unscaled
    return unscaled.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


def _of_int(value: int, seed: int) -> int:
    return _last_mix(_int_mixed(seed + _P5 + 4 & _ALL, value & 0xFFFFFFFF))


def _of_long(value: int, seed: int) -> int:
    return _last_mix(_long_mixed(seed + _P5 + 8 & _ALL, value & _ALL))


def _of_bytes(data: bytes, seed: int) -> int:
    size, at = len(data), 0
    if size >= 32:
        lanes = [seed + _P1 + _P2 & _ALL, seed + _P2 & _ALL, seed, seed - _P1 & _ALL]
        while at + 32 <= size:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        mixed = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _ALL
        for lane in lanes:
            mixed = (mixed ^ _round(0, lane)) * _P1 + _P4 & _ALL
    else:
        mixed = seed + _P5 & _ALL
    mixed = mixed + size & _ALL
    while at + 8 <= size:
        mixed = _long_mixed(mixed, struct.unpack_from("<Q", data, at)[0])
        at += 8
    if at + 4 <= size:
        mixed = _int_mixed(mixed, struct.unpack_from("<I", data, at)[0])
        at += 4
    for byte in data[at:]:
        mixed = _rotated(mixed ^ (byte * _P5 & _ALL), 11) * _P1 & _ALL
    return _last_mix(mixed)


def _round(lane: int, word: int) -> int:
    return _rotated(lane + word * _P2 & _ALL, 31) * _P1 & _ALL


def _long_mixed(mixed: int, word: int) -> int:
    return _rotated(mixed ^ _round(0, word), 27) * _P1 + _P4 & _ALL


def _int_mixed(mixed: int, word: int) -> int:
    return _rotated(mixed ^ (word * _P1 & _ALL), 23) * _P2 + _P3 & _ALL


def _rotated(number: int, by: int) -> int:
    return (number << by | number >> (64 - by)) & _ALL


def _last_mix(mixed: int) -> int:
    mixed = (mixed ^ mixed >> 33) * _P2 & _ALL
    mixed = (mixed ^ mixed >> 29) * _P3 & _ALL
    return mixed ^ mixed >> 32

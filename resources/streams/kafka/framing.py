"""How messages name their schema, after Confluent: a zero byte, the schema's id, and for Protobuf the type's place."""

from __future__ import annotations

import struct

from dagster_adjunct.resources.streams.kafka.record_values import Unfit

_HEADER = struct.Struct(">bI")
HEADER_BYTES = _HEADER.size


def number_of(data: bytes) -> int | None:
    """Return the schema id that a message begins with, None where it does not begin like that."""
    if len(data) < HEADER_BYTES or data[0] != 0:
        return None
    return int(_HEADER.unpack_from(data)[1])


def header(number: int) -> bytes:
    """Return what a message of the schema begins with."""
    return _HEADER.pack(0, number)


def indexes_at(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the message indexes that stand here, and where they end; a lone zero is short for (0,)."""
    count, at = _zigzag(data, at)
    if count == 0:
        return (0,), at
    if not 0 < count <= len(data):
        raise Unfit("its message indexes can't be read")
    indexes = []
    for _ in range(count):
        index, at = _zigzag(data, at)
        indexes.append(index)
    return tuple(indexes), at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 35:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
    raise Unfit("its message indexes can't be read")


def indexes_bytes(indexes: tuple[int, ...]) -> bytes:
    """Return message indexes as they stand in a message."""
    if indexes == (0,):
        return b"\0"
    out = bytearray()
    for number in (len(indexes), *indexes):
        value = number << 1
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)

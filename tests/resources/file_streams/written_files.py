"""Files in every format, written by libraries that the project does not read them with, or by hand,
and what a stream of them has to return, in plain Python.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    decimal_digits,
    parse_type,
)
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.nested import comparable, write_json

Rows = list[dict[str, Any]]
FORMATS = ("parquet", "csv", "jsonl", "avro")
AT = 1_790_000_000
_numbers = itertools.count()

_AVRO = {
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "string",
    "binary": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
}


def avro_schema(type_: Type) -> Any:
    """Return a nullable Avro type for a type of ours."""
    return ["null", _avro_branch(type_)]


def _avro_branch(type_: Type) -> Any:
    if isinstance(type_, Array):
        return {"type": "array", "items": avro_schema(type_.element)}
    if isinstance(type_, Map):
        return {"type": "map", "values": avro_schema(type_.value)}
    if isinstance(type_, Struct):
        fields = [{"name": m.name, "type": avro_schema(m.type)} for m in type_.members]
        return {"type": "record", "name": f"r{next(_numbers)}", "fields": fields}
    assert isinstance(type_, Simple)
    digits = decimal_digits(type_.name)
    if digits is not None:
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": digits.precision,
            "scale": digits.scale,
        }
    return _AVRO[type_.name]


def avro_bytes(schema: Schema, rows: Rows, codec: str = "deflate") -> bytes:
    fields = [{"name": f.name, "type": avro_schema(parse_type(f.type))} for f in schema.fields]
    record = {"type": "record", "name": "row", "fields": fields}
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(record), rows, codec=codec, sync_interval=200)
    return out.getvalue()


def parquet_bytes(schema: Schema, rows: Rows, **options: Any) -> bytes:
    table = pa.Table.from_pylist(rows, schema.to_arrow())
    out = io.BytesIO()
    pq.write_table(table, out, **{"row_group_size": 7, **options})
    return out.getvalue()


def csv_bytes(schema: Schema, rows: Rows) -> bytes:
    out = io.StringIO()
    out.write(",".join(f'"{name}"' for name in schema.names) + "\n")
    for row in rows:
        out.write(",".join(_csv_field(row[name]) for name in schema.names) + "\n")
    return out.getvalue().encode()


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Decimal):
        return format(value, "f")
    return value.isoformat() if hasattr(value, "isoformat") else repr(value)


def jsonl_bytes(schema: Schema, rows: Rows, omit: bool = False) -> bytes:
    return "".join(write_json(row, omit) + "\n" for row in rows).encode()


WRITERS = {"parquet": parquet_bytes, "csv": csv_bytes, "jsonl": jsonl_bytes, "avro": avro_bytes}
COMPRESSED = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress}


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def put(folder: Path, name: str, data: bytes, at: int = AT) -> Path:
    """Write a file that was modified at this time, in seconds since 1970."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (at, at))
    return path


def stream_of(
    lake: Lake, url: object, schema: Schema, format: str, **options: Any
) -> FolderStreams:
    """Return the system with a new stream of a folder, whose files are admitted; see `name_of`."""
    name = f"s{next(_numbers)}"
    file_stream(name, str(url), schema=schema, format=format, **options)  # type: ignore[arg-type]
    streams = FolderStreams(lake)
    streams.admit(name)
    streams.tested = name  # type: ignore[attr-defined]
    return streams


def ranges(streams: Any, start: int = 0, end: int | None = None) -> dict[Any, OffsetRange]:
    ssp = SystemStreamPartition("files", streams.tested, 0)
    if end is None:
        end = int(streams.upcoming([ssp])[ssp])
    return {ssp: OffsetRange(str(start), str(end))}


def records(table: pa.Table) -> Rows:
    """Return records in the order of their offsets, comparable."""
    rows = table.to_pylist(maps_as_pydicts="strict")
    return [comparable(row) for row in sorted(rows, key=lambda row: row["__offset"])]


def expected(
    rows: Sequence[tuple[dict[str, Any], Mapping[str, Any]]], start: int, end: int
) -> Rows:
    """Return the records [start, end) of all of a stream: (row, what is added to it) in order."""
    made = []
    for offset in range(start, end):
        row, added = rows[offset]
        made.append(comparable({**row, **added, "__offset": offset}))
    return made


def cuts(random_: Random, count: int) -> list[tuple[int, int]]:
    """Return all of a stream, and some ranges of it."""
    chosen = [(0, count)]
    for _ in range(4):
        start = random_.randint(0, count)
        chosen.append((start, random_.randint(start, count)))
    return chosen

"""A stream system: streams in a SQLite file. Records are kept as JSON, so columns are text,
numbers and booleans.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from contextlib import closing, contextmanager

import pyarrow as pa  # noqa: TID253

from dagster_adjunct import Schema
from dagster_adjunct.errors import ProducerConflictError, StreamExistsError, StreamNotFoundError
from dagster_adjunct.streams import (
    RECORD_META,
    AppendOptions,
    AppendResult,
    DriverReads,
    NumberedOffsets,
    StreamCapabilities,
    StreamInfo,
    StreamWriter,
    check_range,
    register_system,
    value_of,
)

TABLES = """
CREATE TABLE IF NOT EXISTS streams (name PRIMARY KEY, columns, key, partitions);
CREATE TABLE IF NOT EXISTS appends (stream, producer, sequence, digest, first, next, rows);
CREATE TABLE IF NOT EXISTS records (stream, part, offset, time_ms, deleted, epoch, body,
                                    PRIMARY KEY (stream, part, offset)) WITHOUT ROWID;
"""
# of RECORD_META
KINDS = (pa.int32(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.bool_(), pa.int32())


class SqliteStreams(NumberedOffsets, DriverReads, StreamWriter):
    name = "sqlite"
    default_offset = "oldest"
    capabilities = StreamCapabilities(reads_arrow=True, finds_times=True)

    def __init__(self, path):
        self._path = path
        with self._transaction() as database:
            database.executescript(TABLES)

    def list_streams(self):
        return [name for (name,) in self._rows("SELECT name FROM streams ORDER BY name")]

    def create(self, name, *, schema, key=(), partitions):
        with self._transaction() as database:
            row = (name, schema.ddl(), json.dumps(list(key)), partitions)
            database.execute("INSERT OR IGNORE INTO streams VALUES (?, ?, ?, ?)", row)
            stored = database.execute("SELECT * FROM streams WHERE name = ?", (name,)).fetchone()
            if stored != row:
                raise StreamExistsError(
                    f"stream {name!r} has columns, key and partitions {stored[1:]}, not {row[1:]}.",
                    "Declare it as it exists, or choose another name.",
                    stream=f"{self.name}.{name}",
                )
        return self.info(name)

    def info(self, stream):
        rows = self._rows("SELECT columns, key, partitions FROM streams WHERE name = ?", stream)
        if not rows:
            raise StreamNotFoundError(
                f"{self._path} has no stream {stream!r}.",
                "Check the name, or create it.",
                stream=f"{self.name}.{stream}",
            )
        columns, key, partitions = rows[0]
        return StreamInfo(
            stream, partitions, tuple(json.loads(key)), "unknown", Schema.from_ddl(columns)
        )

    def oldest(self, ssps):
        return dict.fromkeys(self.upcoming(ssps), "0")

    def upcoming(self, ssps):
        last = "SELECT coalesce(max(offset) + 1, 0) FROM records WHERE stream = ? AND part = ?"
        ends = {}
        for ssp in ssps:
            self.info(ssp.stream)  # raises StreamNotFoundError
            ends[ssp] = str(self._rows(last, ssp.stream, ssp.partition)[0][0])
        return ends

    def offset_for_timestamp(self, ssp, timestamp_ms):
        first = "SELECT min(offset) FROM records WHERE stream = ? AND part = ? AND time_ms >= ?"
        first_offset = self._rows(first, ssp.stream, ssp.partition, timestamp_ms)[0][0]
        return self.upcoming([ssp])[ssp] if first_offset is None else str(first_offset)

    def read_arrow(self, ranges, columns=None):
        schema = self.info(next(iter(ranges)).stream).schema
        some = "SELECT body, part, offset, time_ms * 1000, deleted = 1, epoch FROM records "
        some += "WHERE stream = ? AND part = ? AND offset >= ? AND offset < ? ORDER BY offset"
        rows, ends = [], self.upcoming(ranges)
        for ssp in sorted(ranges):
            start, end = int(ranges[ssp].start), int(ranges[ssp].end)
            check_range(ssp, start, end, oldest=0, upcoming=int(ends[ssp]))
            rows += self._rows(some, ssp.stream, ssp.partition, start, end)
        table = pa.Table.from_pylist([json.loads(row[0]) for row in rows], schema.to_arrow())
        for at, (name, kind) in enumerate(zip(RECORD_META, KINDS, strict=True), start=1):
            table = table.append_column(name, pa.array([row[at] for row in rows]).cast(kind))
        return table.select([*(columns or schema.names), *RECORD_META])

    def append(self, stream, data, *, producer, sequence, options=AppendOptions()):
        info = self.info(stream)
        table = (
            data
            if isinstance(data, pa.Table)
            else data.orderBy(*options.order_by or info.schema.names).toArrow()
        )
        rows = table.to_pylist()
        bodies = [json.dumps({name: row[name] for name in info.schema.names}) for row in rows]
        digest = zlib.crc32("\n".join(bodies).encode())
        with self._transaction() as database:  # all of it or nothing, one writer at a time
            before = (
                "SELECT digest, first, next, rows FROM appends WHERE (stream, producer, sequence) ="
                " (?, ?, ?)"
            )
            known = database.execute(before, (stream, producer, sequence)).fetchone()
            if known and known[0] != digest:
                raise ProducerConflictError(
                    f"{sequence} of {producer} is in with other records.", "Count on."
                )
            if known:
                return AppendResult(
                    _by_partition(known[1]), _by_partition(known[2]), known[3], duplicate=True
                )
            first = [int(end) for end in self.upcoming(self.partitions(stream)).values()]
            end = list(first)
            for row, body in zip(rows, bodies, strict=True):
                key = [value_of(row, name) for name in info.key]  # maybe inside a column
                part = zlib.crc32(json.dumps(key).encode()) % info.partitions
                at = row.get("__timestamp")
                millis = int((time.time() if at is None else at.timestamp()) * 1000)
                marks = (bool(row.get("__tombstone")), row.get("__epoch") or 0)
                record = (stream, part, end[part], millis, *marks, body)
                database.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", record)
                end[part] += 1
            sent = (digest, json.dumps(first), json.dumps(end), len(rows))
            database.execute(
                "INSERT INTO appends VALUES (?, ?, ?, ?, ?, ?, ?)",
                (stream, producer, sequence, *sent),
            )
        return AppendResult(_by_partition(sent[1]), _by_partition(sent[2]), len(rows))

    def _rows(self, statement, *values):
        with closing(sqlite3.connect(self._path)) as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self):
        with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            yield database


def _by_partition(offsets):
    return {partition: str(offset) for partition, offset in enumerate(json.loads(offsets))}


def _open(lake):
    return SqliteStreams("streams.sqlite")


register_system("sqlite", _open)

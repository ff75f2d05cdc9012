"""Reads the messages of PostgreSQL's `pgoutput` plugin, protocol version 1.

PostgreSQL's manual, "Logical Replication Message Formats", describes them. A transaction comes
whole, when it has committed: Begin, then a Relation before the first change of each table, the
changes, and Commit. Values stay texts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dagster_adjunct.errors import MalformedDocumentError

Row = dict[str, Any]
_EPOCH_MS = 946_684_800_000  # PostgreSQL counts from 2000-01-01


@dataclass(frozen=True, slots=True)
class Change:
    """One row that changed: c(reate), u(pdate), d(elete) or t(runcate); r(ead) by a snapshot.

    `before` has all columns where the table's replica identity is FULL, else those of the key where
    they are told.
    """

    op: Literal["c", "u", "d", "t", "r"]
    table: str
    lsn: int
    before: Row | None
    after: Row | None


@dataclass(frozen=True, slots=True)
class Transaction:
    """A committed transaction: where its commit stands in the log, where that ends, and what it
    changed.
    """

    xid: int
    commit_lsn: int
    end_lsn: int
    committed_ms: int
    changes: tuple[Change, ...]


def transactions(messages: Iterable[tuple[int, bytes]]) -> Iterator[Transaction]:
    """Yield the transactions of one call of the decoding functions; `messages` are (log
    position, message).
    """
    tables: dict[int, _Table] = {}
    begun = (0, 0, 0)
    changes: list[Change] = []
    for lsn, data in messages:
        message = _Message(data)
        match message.kind:
            case "B":
                begun, changes = (message.int64(), message.int64(), message.int32()), []
            case "R":
                oid, table = _table(message)
                tables[oid] = table
            case "I" | "U" | "D":
                changes.append(_change(message, lsn, tables))
            case "T":
                count, _ = message.int32(), message.int8()
                truncated = [tables[message.int32()].name for _ in range(count)]
                changes += [Change("t", name, lsn, None, None) for name in truncated]
            case "C":
                message.int8()
                commit_lsn, end_lsn = message.int64(), message.int64()
                yield Transaction(
                    begun[2], commit_lsn, end_lsn, begun[1] // 1000 + _EPOCH_MS, tuple(changes)
                )
            case "O" | "Y" | "M":
                pass  # origins, types and messages say nothing of rows
            case _:
                raise MalformedDocumentError(
                    f"pgoutput sent a message of kind {message.kind!r} at {lsn:X}: expected one of"
                    " BROIUDTYMC.",
                    "Ask for proto_version 1.",
                )


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: tuple[tuple[str, bool], ...]  # name, whether it belongs to the replica identity


class _Message:
    """Takes one message apart, from its front."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 1
        self.kind = chr(data[0])

    def int8(self) -> int:
        return int(self._unpack("!B"))

    def int16(self) -> int:
        return int(self._unpack("!h"))

    def int32(self) -> int:
        return int(self._unpack("!I"))

    def int64(self) -> int:
        return int(self._unpack("!q"))

    def char(self) -> str:
        return chr(self.int8())

    def text(self) -> str:
        end = self._data.index(b"\0", self._at)
        value = self._data[self._at : end].decode()
        self._at = end + 1
        return value

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _unpack(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)


def _table(message: _Message) -> tuple[int, _Table]:
    oid, schema, name = message.int32(), message.text(), message.text()
    message.int8()
    columns = []
    for _ in range(message.int16()):
        identity, column = bool(message.int8() & 1), message.text()
        message.take(8)  # the type and its modifier
        columns.append((column, identity))
    return oid, _Table(f"{schema}.{name}", tuple(columns))


_OPS: Mapping[str, Literal["c", "u", "d"]] = {"I": "c", "U": "u", "D": "d"}


def _change(message: _Message, lsn: int, tables: Mapping[int, _Table]) -> Change:
    table = tables[message.int32()]
    before = after = whole = None
    part = message.char()
    if part in "KO":
        before = _row(message, table, identity_only=part == "K")
        whole = before if part == "O" else None  # of a key, all other columns are sent as nulls
        part = message.char() if message.kind == "U" else ""
    if part == "N":
        after = _row(message, table, before=whole)
    return Change(_OPS[message.kind], table.name, lsn, before, after)


def _row(
    message: _Message, table: _Table, *, identity_only: bool = False, before: Row | None = None
) -> Row:
    row: Row = {}
    message.int16()
    for column, identity in table.columns:
        form = message.char()
        value: Any = None
        if form == "t":
            value = message.take(message.int32()).decode()
        elif form == "u":  # a long value that an update left alone is not sent again
            if before is None or column not in before:
                raise MalformedDocumentError(
                    f"table {table.name} was updated, and PostgreSQL did not send the long value of"
                    f" {column!r}, which had not changed.",
                    f"ALTER TABLE {table.name} REPLICA IDENTITY FULL, and so each partition; then"
                    " take a new snapshot.",
                )
            value = before[column]
        if identity or not identity_only:
            row[column] = value
    return row

"""Captures a table: reads its changes from a logical replication slot and appends them to a lake stream.

    look at the slot -> append what the stream does not have -> advance the slot

The slot moves on only after the append, and the stream itself tells how far it is, so a capture that is killed anywhere
goes on without losing a change or writing one twice. It keeps no state of its own. One table, one process, one call a
round: enough to learn from, and for small tables. For large ones run Debezium, which writes the same records.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct import Lake, LakeStreams, OffsetRange, Schema, SystemStreamPartition
from examples.postgres_changes.envelopes import commit_of, events, position_of, snapshot_value, transaction_events
from examples.postgres_changes.pgoutput import Transaction, transactions
from examples.postgres_changes.slot import Rows, Slot

if TYPE_CHECKING:
    import psycopg

VALUE = "value"
_LOOK = 100_000
_NOWHERE = (0, 0)


@dataclass(frozen=True, slots=True)
class TableCapture:
    """Moves the changes of a slot's table onto a stream of the lake.

    `columns` are the table's, in Spark's types. The stream gets the columns of `key` and the envelopes as JSON, in
    `partitions` partitions. `ends` is a second stream, for the begin and the end of each transaction. `most` is how
    many events one append takes: a transaction may come in several.
    """

    slot: Slot
    lake: Lake
    stream: str
    columns: str
    key: tuple[str, ...]
    partitions: int = 4
    ends: str | None = None
    most: int = 10_000

    def start(self) -> None:
        """Create what is missing: streams, publication, slot. What is committed from here on will be captured."""
        value = Schema.of({VALUE: "string"})
        key = self._schema.select(self.key)
        self._streams.create(
            self.stream, schema=Schema(key.fields + value.fields), key=self.key, partitions=self.partitions
        )
        if self.ends is not None:
            self._streams.create(self.ends, schema=value, partitions=1)
        self.slot.create()

    def read(self, until: int | None = None) -> int:
        """Append all that is committed now (below the log position `until`); return how many changes were new."""
        appended, whole = 0, False
        with self.slot.reading() as connection:
            while not whole:
                added, whole = self._round(connection, until)
                appended += added
        return appended

    def snapshot(self, folder: Path) -> dict[SystemStreamPartition, str]:
        """Write the table as it is at one moment into `folder`/rows.parquet; return the offsets of that moment.

        What was committed before the moment is below these offsets of the stream, and what comes later is not.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with self.slot.moment(self._schema.names) as (moment, rows):
            self._write(folder / "rows.parquet", rows)
            self.read(until=moment)
            return self._streams.upcoming(self._streams.partitions(self.stream))

    def snapshot_into_stream(self) -> int:
        """Append the table as it is at one moment, as Debezium begins; return how many rows.

        The changes before the moment stand before it on the stream, later ones after it.
        """
        names = self._schema.names
        with self.slot.moment(names) as (moment, rows):
            self.read(until=moment)
            found = [dict(zip(names, map(_plain, row), strict=True)) for batch in rows for row in batch]
        values = [snapshot_value(self.slot.table, row, moment) for row in found]
        return self._append(self.stream, found, values, self._records(self.stream))

    def _round(self, connection: psycopg.Connection[Any], until: int | None) -> tuple[int, bool]:
        """Take one look at the slot; return how many changes were new, and whether that was all."""
        end = self.slot.end(connection)
        end = end if until is None else min(end, until)
        messages = self.slot.peek(connection, end, _LOOK)
        whole = len(messages) < _LOOK
        found = list(transactions(messages))
        taken = [one for one in found if one.commit_lsn < end]
        appended = self._append_changes(taken)
        self._append_ends(taken)
        whole = whole or len(taken) < len(found)
        self.slot.advance(connection, end if whole else taken[-1].end_lsn)
        return appended, whole

    def _append_changes(self, taken: Sequence[Transaction]) -> int:
        places = map(position_of, self._last_values(self.stream))
        reached = max((place for place in places if place is not None), default=_NOWHERE)
        new = [one for transaction in taken for one in events(transaction, self.key) if one.position > reached]
        before = self._records(self.stream)
        for at in range(0, len(new), self.most):
            records = [record for one in new[at : at + self.most] for record in one.records()]
            keys, values = [key for key, _ in records], [value for _, value in records]
            before += self._append(self.stream, keys, values, before)
        return len(new)

    def _append_ends(self, taken: Sequence[Transaction]) -> None:
        """Say which transactions are whole. Only now, when all that they changed is on the stream."""
        if self.ends is None:
            return
        reached = max((commit_of(json.loads(value)["id"]) for value in self._last_values(self.ends)), default=0)
        new = [one for one in taken if one.changes and one.commit_lsn > reached]
        values = [value for one in new for value in transaction_events(one, self.key)]
        self._append(self.ends, [{}] * len(values), values, self._records(self.ends))

    def _append(self, stream: str, keys: Sequence[Mapping[str, Any]], values: Sequence[str | None], before: int) -> int:
        """Append records. Their sequence is how many records the stream had `before`: nobody can add them twice."""
        if not values:
            return 0
        import pyarrow as pa

        schema = self._schema.to_arrow()
        names = self.key if stream == self.stream else ()
        columns = {name: pa.array([key.get(name) for key in keys], schema.field(name).type) for name in names}
        columns[VALUE] = pa.array(values, pa.string())
        columns["__tombstone"] = pa.array([value is None for value in values], pa.bool_())
        return self._streams.append(stream, pa.table(columns), producer=self.slot.name, sequence=before).rows

    def _records(self, stream: str) -> int:
        return sum(int(end) for end in self._streams.upcoming(self._streams.partitions(stream)).values())

    def _last_values(self, stream: str) -> list[str]:
        """Return what stands last in each partition: two records, because the last one may be a tombstone."""
        streams = self._streams
        ssps = streams.partitions(stream)
        oldest, upcoming = streams.oldest(ssps), streams.upcoming(ssps)
        starts = {ssp: max(int(oldest[ssp]), int(upcoming[ssp]) - 2) for ssp in ssps}
        ranges = {ssp: OffsetRange(str(at), upcoming[ssp]) for ssp, at in starts.items() if at < int(upcoming[ssp])}
        if not ranges:
            return []
        return [value for value in streams.read_arrow(ranges, columns=[VALUE]).column(VALUE).to_pylist() if value]

    def _write(self, path: Path, rows: Rows) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = self._schema.to_arrow()
        with pq.ParquetWriter(path, schema) as file:
            for batch in rows:
                arrays = [
                    pa.array(values, field.type) for values, field in zip(zip(*batch, strict=True), schema, strict=True)
                ]
                file.write_table(pa.table(arrays, schema=schema))

    @property
    def _schema(self) -> Schema:
        return Schema.from_ddl(self.columns, f"the columns of {self.slot.table}")

    @property
    def _streams(self) -> LakeStreams:
        return LakeStreams(self.lake)


def _plain(value: Any) -> Any:
    """Return a value as pgoutput.py reads it from the text of a change."""
    match value:
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date() | Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case float() if value - value != 0:
            return str(value)
        case _:
            return value

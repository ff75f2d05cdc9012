"""Captures a table: reads its changes from a logical replication slot and appends them to a lake
stream.

    look at the slot -> append what the stream does not have -> advance the slot

The slot moves on only after the append, and the stream itself tells how far it is, so a capture
that is killed anywhere goes on without losing a change or writing one twice. It keeps no state of
its own. One table, one process, one call a round: enough to learn from, and for small tables. For
large ones run Debezium, which writes the same records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct import Lake, LakeStreams, Schema, SystemStreamPartition
from dagster_adjunct.examples.postgres_changes.catalogue import Facts, Partitions
from dagster_adjunct.examples.postgres_changes.envelopes import (
    Event,
    commit_of,
    events,
    position_of,
    snapshot_value,
    transaction_events,
)
from dagster_adjunct.examples.postgres_changes.pgoutput import Transaction, transactions
from dagster_adjunct.examples.postgres_changes.slot import Rows, Slot
from dagster_adjunct.examples.postgres_changes.values import (
    read_row,
    readers,
    to_json,
    unreadable_error,
)
from dagster_adjunct.streams import OffsetRange

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

VALUE = "value"
POSITION_FILE = "position.json"
_LOOK = 100_000
_NOWHERE = (0, 0)


@dataclass(frozen=True, slots=True)
class TableCapture:
    """Moves the changes of a slot's table onto a stream of the lake.

    `columns` are the table's, in Spark's types. The stream gets the columns of `key` and the
    envelopes as JSON, in `partitions` partitions. `ends` is a second stream, for the begin and the
    end of each transaction. `most` is how many events one append takes: a transaction may come in
    several.
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
        """Create what is missing: streams, publication, slot. What is committed from here on will
        be captured.

        Raises ConfigurationError for a table whose changes would not have all declared columns.
        """
        self.slot.require_capturable(self._schema.names, self.key)
        value = Schema.of({VALUE: "string"})
        key = self._schema.select(self.key)
        self._streams.create(
            self.stream,
            schema=Schema(key.fields + value.fields),
            key=self.key,
            partitions=self.partitions,
        )
        if self.ends is not None:
            self._streams.create(self.ends, schema=value, partitions=1)
        self.slot.create()

    def start_with_snapshot(self, folder: Path) -> datetime:
        """Start, with a snapshot in `folder` where the slot is new; return when the snapshot was
        finished.

        A new slot knows nothing of what was committed before it: only a snapshot that was taken
        after it does.
        """
        position = folder / POSITION_FILE
        if not self.slot.exists():
            position.unlink(missing_ok=True)
        self.start()
        if not position.exists():
            self.snapshot(folder)
        return datetime.fromtimestamp(position.stat().st_mtime, UTC)

    def read(self, until: int | None = None) -> int:
        """Append all that is committed now (below the log position `until`); return how many
        changes were new.
        """
        appended, whole = 0, False
        with self.slot.reading() as connection:
            facts = self.slot.check(connection, self._schema.names, self.key)
            while not whole:
                added, whole = self._round(connection, facts, until)
                appended += added
            if facts.is_partitioned:
                self.slot.remember_partitions(connection, Partitions.of(facts))
        return appended

    def snapshot(self, folder: Path) -> dict[SystemStreamPartition, str]:
        """Write the table as it is at one moment, and return the stream's offsets of that moment.

        What was committed before the moment is below these offsets, and what comes later is not.
        The rows are in `folder`/rows.parquet, the offsets in `folder`/position.json, as
        ParquetSnapshot reads them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        position_file = folder / POSITION_FILE
        # it is written last: rows without it are of a snapshot that was cut off
        position_file.unlink(missing_ok=True)
        with self.slot.moment(self._schema.names) as (moment, rows):
            self._write(folder / "rows.parquet", rows)
            self.read(until=moment)
            position = self._streams.upcoming(self._streams.partitions(self.stream))
        position_file.write_text(
            json.dumps({str(ssp): offset for ssp, offset in position.items()}), encoding="utf-8"
        )
        return position

    def snapshot_into_stream(self) -> int:
        """Append the table as it is at one moment, as Debezium begins; return how many rows.

        The changes before the moment stand before it on the stream, later ones after it.
        """
        names = self._schema.names
        with self.slot.moment(names) as (moment, rows):
            self.read(until=moment)
            records = [dict(zip(names, row, strict=True)) for batch in rows for row in batch]
        values = [snapshot_value(self.slot.table, row, moment) for row in records]
        return self._append(self.stream, records, values, self._records(self.stream))

    def _round(
        self, connection: psycopg.Connection[Any], facts: Facts, until: int | None
    ) -> tuple[int, bool]:
        """Take one look at the slot; return how many changes were new, and whether that was all."""
        end = self.slot.end(connection)
        end = end if until is None else min(end, until)
        messages = self.slot.peek(connection, end, _LOOK)
        whole = len(messages) < _LOOK
        received = [self._typed(one, facts) for one in transactions(messages)]
        taken = [one for one in received if one.commit_lsn < end]
        appended = self._append_all(taken)
        whole = whole or len(taken) < len(received)
        self.slot.advance(connection, end if whole else taken[-1].end_lsn)
        return appended, whole

    def _typed(self, transaction: Transaction, facts: Facts) -> Transaction:
        """Return a transaction with the values of its changes as Python has them.

        Raises SchemaMismatchError for a change without all declared columns, or one of the key.
        """
        table, read = self.slot.table, readers(facts.columns)
        changes = []
        for change in transaction.changes:
            before, after = change.before, change.after
            changes.append(
                replace(
                    change,
                    before=before and read_row(before, read, self.key, table),
                    after=after and read_row(after, read, self._schema.names, table),
                )
            )
        return replace(transaction, changes=tuple(changes))

    def _append_all(self, taken: Sequence[Transaction]) -> int:
        """Append what of these transactions is not on the stream; return how many changes that
        were.
        """
        told = [(one, list(events(one, self.key))) for one in taken]
        places = map(position_of, self._last_values(self.stream))
        reached = max((place for place in places if place is not None), default=_NOWHERE)
        new = [event for _, happened in told for event in happened if event.position > reached]
        before = self._records(self.stream)
        self._append_ends(told, reached)
        for at in range(0, len(new), self.most):
            part = new[at : at + self.most]
            records = [record for event in part for record in event.records()]
            keys, values = [key for key, _ in records], [value for _, value in records]
            before += self._append(self.stream, keys, values, before)
            self._append_ends(told, part[-1].position)
        return len(new)

    def _append_ends(
        self, told: Sequence[tuple[Transaction, Sequence[Event]]], reached: tuple[int, int]
    ) -> None:
        """Say which transactions are whole, now that all that happened up to here is on the
        stream.
        """
        if self.ends is None:
            return
        last = max(
            (commit_of(json.loads(value)["id"]) for value in self._last_values(self.ends)),
            default=0,
        )
        new = [
            one
            for one, happened in told
            if happened and happened[-1].position <= reached and one.commit_lsn > last
        ]
        values = [value for one in new for value in transaction_events(one, self.key)]
        self._append(self.ends, [{}] * len(values), values, self._records(self.ends))

    def _append(
        self,
        stream: str,
        keys: Sequence[Mapping[str, Any]],
        values: Sequence[str | None],
        before: int,
    ) -> int:
        """Append records. Their sequence is how many records the stream had `before`: nobody can
        add them twice.
        """
        if not values:
            return 0
        import pyarrow as pa

        schema = self._schema.to_arrow()
        names = self.key if stream == self.stream else ()
        columns = {
            name: self._array([key.get(name) for key in keys], schema.field(name)) for name in names
        }
        columns[VALUE] = pa.array(values, pa.string())
        columns["__tombstone"] = pa.array([value is None for value in values], pa.bool_())
        return self._streams.append(
            stream, pa.table(columns), producer=self.slot.name, sequence=before
        ).rows

    def _records(self, stream: str) -> int:
        return sum(
            int(end) for end in self._streams.upcoming(self._streams.partitions(stream)).values()
        )

    def _last_values(self, stream: str) -> list[str]:
        """Return what stands last in each partition: two records, because the last one may be a
        tombstone.
        """
        streams = self._streams
        ssps = streams.partitions(stream)
        oldest, upcoming = streams.oldest(ssps), streams.upcoming(ssps)
        starts = {ssp: max(int(oldest[ssp]), int(upcoming[ssp]) - 2) for ssp in ssps}
        ranges = {
            ssp: OffsetRange(str(at), upcoming[ssp])
            for ssp, at in starts.items()
            if at < int(upcoming[ssp])
        }
        if not ranges:
            return []
        return [
            value
            for value in streams.read_arrow(ranges, columns=[VALUE]).column(VALUE).to_pylist()
            if value
        ]

    def _write(self, path: Path, rows: Rows) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = self._schema.to_arrow()
        with pq.ParquetWriter(path, schema) as file:
            for batch in rows:
                arrays = [
                    self._array(*column)
                    for column in zip(zip(*batch, strict=True), schema, strict=True)
                ]
                file.write_table(pa.table(arrays, schema=schema))

    def _array(self, values: Sequence[Any], field: pa.Field) -> pa.Array:
        """Return the values of a column. Raises SchemaMismatchError for one that its declared
        type does not hold.
        """
        import pyarrow as pa

        if pa.types.is_string(field.type):
            values = [_text(value) for value in values]
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise unreadable_error(field.name, self.slot.table, error) from error

    @property
    def _schema(self) -> Schema:
        return Schema.from_ddl(self.columns, f"the columns of {self.slot.table}")

    @property
    def _streams(self) -> LakeStreams:
        return LakeStreams(self.lake)


def _text(value: Any) -> str | None:
    """Return a value of a column that is declared as STRING."""
    plain = to_json(value)
    return (
        plain if plain is None or isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    )

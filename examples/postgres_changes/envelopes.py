"""Writes changes as Debezium does: one envelope a change, and a tombstone after each deletion.

An update that changes the key is told as Debezium tells it: the row under its old key is deleted,
and created under the new one. Each of the two goes to the partition of its own key, so the order in
a partition is all that a reader needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dagster_adjunct.examples.postgres_changes.pgoutput import Change, Row, Transaction
from dagster_adjunct.examples.postgres_changes.values import to_json


@dataclass(frozen=True, slots=True)
class Event:
    """One change as records of a stream: its envelope, and whether a tombstone of the same key
    follows it.

    `position` is (commit's place in the log, number in the transaction): every event has one of its
    own, and they grow in the order in which PostgreSQL committed. `key` is empty for a truncated
    table.
    """

    position: tuple[int, int]
    key: Row
    value: str
    deletes: bool

    def records(self) -> tuple[tuple[Row, str | None], ...]:
        """Return keys and values of its records."""
        return (
            ((self.key, self.value), (self.key, None))
            if self.deletes
            else ((self.key, self.value),)
        )


def events(transaction: Transaction, key: Sequence[str]) -> Iterator[Event]:
    """Yield what happened in a transaction, in order; tombstones don't count as events."""
    seen: dict[str, int] = {}
    for order, change in enumerate(_single(transaction, key), start=1):
        seen[change.table] = seen.get(change.table, 0) + 1
        row = change.before if change.after is None else change.after
        place = {
            "id": transaction_id(transaction),
            "total_order": order,
            "data_collection_order": seen[change.table],
        }
        yield Event(
            (transaction.commit_lsn, order),
            {} if row is None else {name: row[name] for name in key},
            _envelope(change, transaction.xid, transaction.committed_ms, place),
            deletes=change.op == "d",
        )


def snapshot_value(table: str, row: Row, lsn: int) -> str:
    """Return the envelope of a row that a snapshot of this place in the log has found."""
    return _envelope(Change("r", table, lsn, None, row), None, None, None)


def transaction_events(transaction: Transaction, key: Sequence[str]) -> list[str]:
    """Return what Debezium's transaction topic says of a transaction: that it began, and what it
    came to.
    """
    counts: dict[str, int] = {}
    for change in _single(transaction, key):
        counts[change.table] = counts.get(change.table, 0) + 1
    same = {"id": transaction_id(transaction), "ts_ms": transaction.committed_ms}
    collections = [
        {"data_collection": name, "event_count": count} for name, count in counts.items()
    ]
    begin = {"status": "BEGIN", **same, "event_count": None, "data_collections": None}
    end = {
        "status": "END",
        **same,
        "event_count": sum(counts.values()),
        "data_collections": collections,
    }
    return [json.dumps(begin), json.dumps(end)]


def transaction_id(transaction: Transaction) -> str:
    return f"{transaction.xid}:{transaction.commit_lsn}"


def position_of(value: str) -> tuple[int, int] | None:
    """Return the position of an envelope that was written here, None where it was a snapshot's."""
    place = json.loads(value)["transaction"]
    return None if place is None else (commit_of(place["id"]), place["total_order"])


def commit_of(transaction_id: str) -> int:
    return int(transaction_id.partition(":")[2])


def _single(transaction: Transaction, key: Sequence[str]) -> Iterator[Change]:
    """Yield the changes of a transaction, each of one key."""
    for change in transaction.changes:
        before, after = change.before, change.after
        if (
            before is not None
            and after is not None
            and any(before[name] != after[name] for name in key)
        ):
            yield replace(change, op="d", after=None)
            yield replace(change, op="c", before=None)
        else:
            yield change


def _envelope(
    change: Change, xid: int | None, at_ms: int | None, place: dict[str, Any] | None
) -> str:
    schema, _, table = change.table.partition(".")
    source = {
        "connector": "postgresql",
        "schema": schema,
        "table": table,
        "snapshot": "true" if change.op == "r" else "false",
        "txId": xid,
        "lsn": change.lsn,
        "ts_ms": at_ms,
    }
    envelope = {
        "before": _plain_row(change.before),
        "after": _plain_row(change.after),
        "source": source,
        "op": change.op,
        "ts_ms": at_ms,
        "transaction": place,
    }
    return json.dumps(envelope, ensure_ascii=False)


def _plain_row(row: Row | None) -> Row | None:
    return None if row is None else {name: to_json(value) for name, value in row.items()}

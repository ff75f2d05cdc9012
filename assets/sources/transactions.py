"""Complete transactions: ranges of a change stream limited to transactions that have fully arrived.

Debezium reports on a separate stream when a transaction has ended and how many changes of each
table it had. Changes of a transaction that has not ended, or of which some have not arrived, are
held back, together with everything after them in their partitions; that may make further
transactions incomplete, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import TYPE_CHECKING, NamedTuple

from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.declaration.envelope_parser import read_transactions
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.sources.entries import (
    Offsets,
    OpenedChanges,
    Ranges,
    describe_input,
    resolve_stream,
)
from dagster_adjunct.resources.errors import DatasetError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


_LOOK_BACK_MS = 600_000


@dataclass(frozen=True, slots=True)
class TransactionPart:
    """The part of a transaction in one partition: its first and last offset, and its number of
    changes.
    """

    first: int
    last: int
    count: int


def cut_at_incomplete(
    seen: Mapping[tuple[str, int], TransactionPart],
    complete: Mapping[str, int],
    ends: Mapping[int, int],
    *,
    unreadable: int = 0,
) -> dict[int, int]:
    """Return, by partition, the end offset up to which no change is of an incomplete transaction.

    `seen` are the changes below `ends`, by (transaction, partition). `complete` is the number of
    changes of each ended transaction; a transaction that is not in it has not ended. Holding
    changes back makes their transactions incomplete, so this repeats until nothing changes: the
    ends are then the furthest at which every transaction is included completely or not at all.
    `unreadable` is the number of changes that could not be read: as many may be missing from a
    transaction, because they may belong to it.
    """
    incomplete: set[str] = set()
    for transaction, count in count_by_transaction(seen).items():
        if transaction not in complete or count + unreadable < complete[transaction]:
            incomplete.add(transaction)
    cuts = dict(ends)
    fresh = set(incomplete)
    while fresh:
        for (transaction, partition), part in seen.items():
            if transaction in fresh:
                cuts[partition] = min(cuts[partition], part.first)
        held_back = {name for (name, at), part in seen.items() if part.last >= cuts[at]}
        fresh = held_back - incomplete
        incomplete |= fresh
    return cuts


def limit_to_complete_transactions(
    spec: UnboundedDataset,
    systems: Mapping[str, StreamSystem],
    spark: SparkSession,
    source: OpenedChanges,
    ranges: Ranges,
) -> Ranges:
    """Return the ranges without the changes of incomplete transactions; empty ranges are left out.

    This costs one aggregation over the ranges, and reading the transaction stream from some minutes
    before their first record. If changes of an ended transaction are missing, they are looked for
    before the ranges: these may start inside the transaction or repeat it. Raises DatasetError if
    the transaction stream does not reach back to a transaction or does not count changes of this
    table.
    """
    declared = spec.following.changes
    assert isinstance(declared, DebeziumEnvelope)
    reader = _TransactionReader(declared, systems, spark, source, describe_input(spec))
    rows = reader.aggregate(ranges)
    known = _list_known(rows)
    if not known:  # nothing belongs to a transaction
        return ranges
    unreadable = sum(row["count"] for row in rows if not row["readable"])
    since = _first_seen(known)
    seen = _parts(known)
    counts = count_by_transaction(seen)
    expected = reader.read_ends(since)
    oldest = source.system.oldest(list(ranges))
    # The removed changes will never be found: what is left of these transactions is all of them.
    for name in _find_truncated(rows, since, _find_trimmed(ranges, oldest)) & expected.keys():
        expected[name] = min(expected[name], counts[name])
    # Missing changes are looked for from some minutes before the ranges on, then in all the stream.
    near = min(since.values()) - _LOOK_BACK_MS
    for begins in (_offsets_at(source.system, ranges, near), oldest):
        lacking = {name for name in expected if counts[name] + unreadable < expected[name]}
        wider = _begin_at(source.system, ranges, begins)
        if not lacking or wider == ranges:
            continue
        found = count_by_transaction(_parts(_list_known(reader.aggregate(wider))))
        # The rest of these is before the ranges, which have all that they should have.
        expected |= {name: counts[name] for name in lacking if found[name] >= expected[name]}
    ends = {ssp.partition: int(end) for ssp, (_, end) in ranges.items()}
    cuts = cut_at_incomplete(seen, expected, ends, unreadable=unreadable)
    return _end_at(ranges, cuts)


def _find_trimmed(ranges: Ranges, oldest: Offsets) -> set[int]:
    """Return the partitions whose ranges begin where retention has removed the records before."""
    trimmed = set()
    for ssp, (start, _) in ranges.items():
        if start == oldest[ssp] and start != "0":
            trimmed.add(ssp.partition)
    return trimmed


def _end_at(ranges: Ranges, cuts: Mapping[int, int]) -> Ranges:
    """Return the ranges that are not empty, each up to the end of its partition in `cuts`."""
    limited = {}
    for ssp, (start, _) in ranges.items():
        end = cuts[ssp.partition]
        if end > int(start):
            limited[ssp] = (start, str(end))
    return limited


def _begin_at(system: StreamSystem, ranges: Ranges, begins: Offsets) -> Ranges:
    """Return the ranges, each from its partition's offset in `begins` on if that is earlier."""
    by_offset = cmp_to_key(system.compare)
    return {
        ssp: (min(begins[ssp], start, key=by_offset), end) for ssp, (start, end) in ranges.items()
    }


def _offsets_at(system: StreamSystem, ssps: Iterable[SystemStreamPartition], time: int) -> Offsets:
    """Return the offsets at this time, in milliseconds since the epoch."""
    return {ssp: system.offset_for_timestamp(ssp, time) for ssp in ssps}


def count_by_transaction(seen: Mapping[tuple[str, int], TransactionPart]) -> Counter[str]:
    """Return the number of changes of each transaction, summed over partitions."""
    counts = Counter[str]()
    for (transaction, _), part in seen.items():
        counts[transaction] += part.count
    return counts


def _list_known(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose envelopes could be read and name a transaction."""
    return [row for row in rows if row["readable"] and row["transaction"] is not None]


def _parts(rows: Iterable[Row]) -> dict[tuple[str, int], TransactionPart]:
    """Return the part of each transaction in each partition, by (transaction, partition), from the
    rows that `aggregate` returns.
    """
    parts = {}
    for row in rows:
        part = TransactionPart(row["first"], row["last"], row["count"])
        parts[row["transaction"], row[PARTITION]] = part
    return parts


def _first_seen(rows: Iterable[Row]) -> dict[str, int]:
    """Return the time of the first change of each transaction, in milliseconds since the epoch."""
    latest_first = sorted(rows, key=lambda row: row["since"], reverse=True)
    return {row["transaction"]: row["since"] for row in latest_first}


def _find_truncated(
    rows: Sequence[Row], since: Mapping[str, int], trimmed: Collection[int]
) -> set[str]:
    """Return the transactions that may have begun in records that retention has removed from the
    partitions `trimmed`.

    These are the first transaction that is left in each of these partitions, and all that began
    before the latest of them. `since` is the time of each transaction's first change.
    """
    firsts: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: int(row["first"])):
        if row[PARTITION] in trimmed:
            firsts.setdefault(row[PARTITION], row)
    until = max((row["since"] for row in firsts.values()), default=0)
    names = {name for name, at in since.items() if at < until}
    return names.union(row["transaction"] for row in firsts.values())


class _Events(NamedTuple):
    """The transactions that have `begun`, and the number of the table's changes in each that has
    `ended`.
    """

    begun: set[str]
    ended: dict[str, int]


@dataclass(frozen=True, slots=True)
class _TransactionReader:
    """Reads the transactions of a dataset's changes, and their ends from the stream that reports
    these.
    """

    declared: DebeziumEnvelope
    systems: Mapping[str, StreamSystem]
    spark: SparkSession
    source: OpenedChanges
    what: str

    def aggregate(self, ranges: Ranges) -> list[Row]:
        """Return a row for each transaction, partition and value of `readable`.

        It has the `first` and `last` offset, the `count` of distinct changes, and the time of the
        first one (`since`, in milliseconds since the epoch).
        """
        rows = read_transactions(self.declared, self.source.read(self.spark, ranges), self.what)
        # A change that was sent twice has the same number; one without a number counts by offset.
        change = F.coalesce(F.col("number"), F.concat(F.lit("@"), F.col(OFFSET).cast("string")))
        return (
            rows.groupBy("transaction", PARTITION, "readable")
            .agg(
                F.min(OFFSET).alias("first"),
                F.max(OFFSET).alias("last"),
                F.count_distinct(change).alias("count"),
                F.unix_millis(F.min(TIMESTAMP)).alias("since"),
            )
            .collect()
        )

    def read_ends(self, since: Mapping[str, int]) -> dict[str, int]:
        """Return, by transaction, the number of its changes of this table, for those that have
        ended.

        `since` is the time of each transaction's first change, in milliseconds since the epoch. The
        events that report transactions are usually near it; if some are not, the rest of their
        stream is read too.
        """
        name = str(self.declared.transactions)
        what = self.what
        system, stream = resolve_stream(
            self.systems, name, f"{what}: its transactions are on {name}"
        )
        system = system.snapshot(stream)
        self._check_stream(system.info(stream).schema)
        ssps = system.partitions(stream)
        oldest = system.oldest(ssps)
        ends = system.upcoming(ssps)
        time_near = min(since.values()) - _LOOK_BACK_MS
        near = _offsets_at(system, ssps, time_near)
        begun, expected = self._read_events(system, near, ends, since)
        missing = since.keys() - begun - expected.keys()
        if missing:
            earlier = self._read_events(system, oldest, near, since)
            begun |= earlier.begun
            expected = earlier.ended | expected
            missing = since.keys() - begun - expected.keys()
        for transaction in sorted(missing):  # without any event: perhaps it is still to come
            newer = _offsets_at(system, ssps, since[transaction])
            all_left_is_newer = newer == oldest
            lost_its_beginning = "0" not in oldest.values()
            if all_left_is_newer and lost_its_beginning:  # its events will never be found
                raise DatasetError(
                    f"{what}: {name} no longer reaches back to transaction {transaction!r}, so its"
                    " number of changes is unknown.",
                    "Give that stream a retention as long as the input's. To continue, advance the"
                    " dataset once without transactions= in its declaration.",
                    stream=name,
                )
        return expected

    def _check_stream(self, schema: Schema | None) -> None:
        """Raise SchemaMismatchError unless records are texts of transactions."""
        columns = []
        if schema is not None:
            columns = [f"{field.name} {field.type}" for field in schema.fields]
        if "value string" in columns:
            return
        name = self.declared.transactions
        raise SchemaMismatchError(
            f"{self.what}: its transactions are on {name}, whose records are"
            f" {', '.join(columns) or 'raw'}: expected a column value STRING.",
            "Write Debezium's transaction metadata to that stream, as JSON.",
            stream=name,
        )

    def _read_events(
        self, system: StreamSystem, starts: Offsets, ends: Offsets, wanted: Iterable[str]
    ) -> _Events:
        """Return which of the `wanted` transactions have begun and ended, according to the events
        between these offsets.
        """
        ranges = {}
        for ssp, start in starts.items():
            if system.compare(start, ends[ssp]) < 0:
                ranges[ssp] = OffsetRange(start, ends[ssp])
        if not ranges:
            return _Events(set(), {})
        # With the message's schema, the event is in a field `payload`; else it is the message.
        collection = "struct<data_collection:string,event_count:bigint>"
        block = f"status string, id string, data_collections array<{collection}>"
        form = (
            f"{block}, payload"
            f" struct<{block.replace(' string', ':string').replace(' array', ':array')}>"
        )
        ids = self.spark.createDataFrame([(transaction,) for transaction in wanted], "id string")
        events = system.read(self.spark, ranges).select(F.from_json("value", form).alias("e"))
        payload = F.coalesce(F.col("e.payload"), F.struct("e.status", "e.id", "e.data_collections"))
        events = events.select(payload.alias("e")).select("e.*")
        found = _Events(set(), {})
        for event in events.join(F.broadcast(ids), "id", "left_semi").collect():
            if event["status"] == "BEGIN":
                found.begun.add(event["id"])
            elif event["status"] == "END":
                found.ended[event["id"]] = self._count_changes(event)
        return found

    def _count_changes(self, event: Row) -> int:
        """Return the number of this table's changes, according to the end of a transaction. Raises
        DatasetError if that does not count the declared table.
        """
        counts: dict[str, int] = {}
        for table in event["data_collections"] or ():
            counts[table["data_collection"]] = table["event_count"]
        if self.declared.collection not in counts:
            name = self.declared.transactions
            raise DatasetError(
                f"{self.what}: the end of transaction {event['id']!r} on {name} counts"
                f" changes of {', '.join(sorted(counts)) or 'no table'}, but not of"
                f" {self.declared.collection!r}, which the stream has.",
                "Name the table in collection= as Debezium does (SCHEMA.TABLE).",
                stream=name,
            )
        return counts[self.declared.collection]

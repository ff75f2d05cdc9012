"""Transactions of the source become visible whole: the cut against brute force, and with
Debezium's streams.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.sources.entries import open_changes
from dagster_adjunct.assets.sources.transactions import (
    TransactionPart,
    cut_at_incomplete,
    limit_to_complete_transactions,
)
from dagster_adjunct.resources.errors import DatasetError, NoSealedVersionError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.assets.changes.changing import VALUES, dataset, send, stream
from tests.assets.conftest import World
from tests.clocks import on_clock

FORM = DebeziumEnvelope("id BIGINT", transactions="lake.tx", collection="public.accounts")
SPEC = dataset(changes=FORM, order_by="source.lsn")
KEYED = Schema.of(id="bigint", value="string")
Partitions = dict[int, list[str | None]]


# -- the cut


def parts_of(partitions: Partitions) -> dict[tuple[str, int], TransactionPart]:
    parts: dict[tuple[str, int], TransactionPart] = {}
    for partition, records in partitions.items():
        for transaction in set(records) - {None}:
            at = [offset for offset, name in enumerate(records) if name == transaction]
            parts[str(transaction), partition] = TransactionPart(at[0], at[-1], len(at))
    return parts


def furthest(partitions: Partitions, complete: dict[str, int]) -> dict[int, int]:
    """Try all ends, and return the furthest at which each transaction is in with all its changes
    or with none.
    """
    totals = Counter(
        transaction
        for records in partitions.values()
        for transaction in records
        if transaction is not None
    )
    best: dict[int, int] = {}
    for ends in product(*(range(len(records) + 1) for records in partitions.values())):
        taken = Counter(
            transaction
            for records, end in zip(partitions.values(), ends, strict=True)
            for transaction in records[:end]
            if transaction is not None
        )
        whole = all(
            complete.get(transaction) == count == totals[transaction]
            for transaction, count in taken.items()
        )
        if whole and sum(ends) > sum(best.values(), -1):
            best = dict(zip(partitions, ends, strict=True))
    return best


RECORDS = st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=5)


@pytest.mark.lengthy
@given(
    st.lists(RECORDS, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.booleans()),
)
def test_the_cut_is_the_furthest_at_which_every_transaction_is_whole(
    records: list[list[str | None]], ended: dict[str, bool]
) -> None:
    partitions = dict(enumerate(records))
    totals = Counter(transaction for part in records for transaction in part)
    complete = {
        transaction: totals[transaction] + (0 if arrived else 1)
        for transaction, arrived in ended.items()
        if totals[transaction]
    }
    ends = {partition: len(part) for partition, part in partitions.items()}
    assert cut_at_incomplete(parts_of(partitions), complete, ends) == furthest(partitions, complete)


def test_what_is_held_back_holds_back_what_stands_behind_it_in_other_partitions() -> None:
    partitions: Partitions = {
        0: [None, "open", "a"],
        1: ["a", "b"],
        2: ["b", None, "c"],
        3: ["c", "d"],
        4: ["d"],
    }
    complete = {"a": 2, "b": 2, "c": 2, "d": 2}
    ends = {partition: len(records) for partition, records in partitions.items()}
    assert cut_at_incomplete(parts_of(partitions), complete, ends) == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}
    partitions[0] = [None, "a", "open"]
    assert cut_at_incomplete(parts_of(partitions), complete, ends) == {0: 2, 1: 2, 2: 3, 3: 2, 4: 1}


def test_changes_that_can_not_be_read_may_be_those_that_are_missing() -> None:
    seen = parts_of({0: ["a", None]})
    assert cut_at_incomplete(seen, {"a": 2}, {0: 2}) == {0: 0}
    assert cut_at_incomplete(seen, {"a": 2}, {0: 2}, unreadable=1) == {0: 2}
    assert cut_at_incomplete(seen, {}, {0: 2}, unreadable=1) == {0: 0}, (
        "one that has not ended is never whole"
    )


# -- streams


def change(transaction: str | None, number: int, key: int = 0) -> str:
    block = (
        None
        if transaction is None
        else {"id": transaction, "total_order": number, "data_collection_order": number}
    )
    after = {"id": key}
    return json.dumps({"op": "c", "after": after, "source": {"lsn": number}, "transaction": block})


def begin(transaction: str) -> str:
    return json.dumps(
        {
            "status": "BEGIN",
            "id": transaction,
            "event_count": None,
            "data_collections": None,
            "ts_ms": 1,
        }
    )


def end(transaction: str, count: int, collection: str = "public.accounts") -> str:
    counts = [
        {"data_collection": "public.other", "event_count": 99},
        {"data_collection": collection, "event_count": count},
    ]
    return json.dumps(
        {"status": "END", "id": transaction, "event_count": count + 99, "data_collections": counts}
    )


def say(world: World, *events: str) -> None:
    if "tx" not in world.streams.list_streams():
        world.streams.create("tx", schema=VALUES, partitions=1)
    send(world, [(event,) for event in events], "tx")


def cut(world: World, start: int = 0) -> dict[int, tuple[str, str]]:
    """Return what is left of the whole stream from an offset on, by partition."""
    source = open_changes(world.systems, SPEC)
    whole = world.streams.all_ranges("changes")
    ranges = {ssp: (str(start), span.end) for ssp, span in whole.items() if int(span.end) > start}
    spans = limit_to_complete_transactions(SPEC, world.systems, world.spark(), source, ranges)
    return {ssp.partition: span for ssp, span in spans.items()}


def changes(world: World, *values: str) -> None:
    if "changes" not in world.streams.list_streams():
        stream(world, VALUES, [])
    send(world, [(value,) for value in values])


def test_a_transaction_waits_for_its_end_and_for_all_its_changes(sparkling: World) -> None:
    changes(sparkling, change(None, 0), change("5", 1), change("5", 2), change("6", 1))
    say(sparkling, begin("5"), begin("6"))
    assert cut(sparkling) == {0: ("0", "1")}
    say(sparkling, end("5", 2))
    assert cut(sparkling) == {0: ("0", "3")}
    assert cut(sparkling, 3) == {}, "a range with nothing left drops out"
    say(sparkling, json.dumps({"schema": {}, "payload": json.loads(end("6", 2))}))
    assert cut(sparkling) == {0: ("0", "3")}
    changes(sparkling, change("6", 2), change("7", 1))
    assert cut(sparkling) == {0: ("0", "5")}


def test_a_transaction_is_whole_in_all_partitions_or_in_none(sparkling: World) -> None:
    rows = [(key, change("1" if key < 8 else "2", key + 1, key)) for key in range(16)]
    stream(sparkling, KEYED, rows, key=["id"], partitions=4)
    say(sparkling, begin("1"), end("1", 8), begin("2"))
    source = open_changes(sparkling.systems, SPEC)
    whole = {
        ssp: (span.start, span.end) for ssp, span in sparkling.streams.all_ranges("changes").items()
    }
    spans = limit_to_complete_transactions(
        SPEC, sparkling.systems, sparkling.spark(), source, whole
    )
    rows_in = source.read(sparkling.spark(), spans).collect()
    assert sorted(row["id"] for row in rows_in) == list(range(8))


def test_records_without_a_transaction_wait_for_nothing(sparkling: World) -> None:
    changes(sparkling, change(None, 0), change(None, 1))
    assert cut(sparkling) == {0: ("0", "2")}, "not even for a transaction stream"


def test_changes_that_come_again_are_counted_once_and_may_be_a_part(sparkling: World) -> None:
    again = [change("5", 1), change("5", 2), change("5", 2), change("5", 3)]
    changes(sparkling, *again)
    say(sparkling, begin("5"), end("5", 4))
    assert cut(sparkling) == {}, "four records, three changes"
    changes(sparkling, change("5", 4))
    assert cut(sparkling) == {0: ("0", "5")}
    changes(sparkling, change("5", 3), change("5", 4))
    assert cut(sparkling, 5) == {0: ("5", "7")}, "the others were taken in before"
    assert cut(sparkling, 2) == {0: ("2", "7")}, (
        "and so where a range begins inside of a transaction"
    )


def test_a_change_that_can_not_be_read_does_not_hold_its_transaction_back_for_ever(
    sparkling: World,
) -> None:
    changes(sparkling, change("5", 1), "nonsense", change("5", 3))
    say(sparkling, begin("5"), end("5", 3))
    assert cut(sparkling) == {0: ("0", "3")}


def test_a_table_that_its_transactions_do_not_name_is_an_error(sparkling: World) -> None:
    changes(sparkling, change("5", 1))
    say(sparkling, begin("5"), end("5", 1, "public.account"))
    with pytest.raises(
        DatasetError,
        match=r"counts changes of public\.account, public\.other, but not of 'public\.acc",
    ):
        cut(sparkling)


def test_a_stream_that_has_no_events_in_json_is_refused(sparkling: World) -> None:
    changes(sparkling, change("5", 1))
    sparkling.streams.create("tx", schema=Schema.of(id="string"), partitions=1)
    with pytest.raises(SchemaMismatchError) as failure:
        cut(sparkling)
    assert failure.value.stream == "lake.tx"


def appended(
    world: World, name: str, at: datetime, sequence: int, values: Sequence[str]
) -> LakeStreams:
    """Append as of another time."""
    streams = LakeStreams(on_clock(world.lake, lambda: at))
    streams.append(name, pa.table({"value": pa.array(values)}), producer="past", sequence=sequence)
    return streams


@pytest.fixture
def hours_ago() -> Callable[[float], datetime]:
    now = datetime.now(UTC)
    return lambda hours: now - timedelta(hours=hours)


def test_what_was_reported_long_before_is_found_too(sparkling: World, hours_ago: Any) -> None:
    sparkling.streams.create("tx", schema=VALUES, partitions=1)
    appended(sparkling, "tx", hours_ago(5), 1, [begin("5"), end("5", 1)])
    changes(sparkling, change("5", 1))
    say(sparkling, begin("9"))
    assert cut(sparkling) == {0: ("0", "1")}


def test_a_transaction_that_its_stream_has_dropped_is_an_error(
    sparkling: World, hours_ago: Any
) -> None:
    retention = Retention(max_age=timedelta(hours=2))
    sparkling.streams.create("tx", schema=VALUES, partitions=1, retention=retention)
    sparkling.streams.create("changes", schema=VALUES, partitions=1)
    appended(sparkling, "tx", hours_ago(5), 1, [begin("5"), end("5", 1)])
    appended(sparkling, "changes", hours_ago(5), 1, [change("5", 1)])
    appended(sparkling, "tx", hours_ago(1), 2, [begin("6")])
    assert cut(sparkling) == {0: ("0", "1")}
    sparkling.streams.maintain("tx")
    with pytest.raises(DatasetError) as failure:
        cut(sparkling)
    assert failure.value.stream == "lake.tx"


def test_a_transaction_whose_beginning_the_input_has_dropped_does_not_wait_for_it(
    sparkling: World, hours_ago: Any
) -> None:
    retention = Retention(max_age=timedelta(hours=2))
    sparkling.streams.create("changes", schema=VALUES, partitions=1, retention=retention)
    appended(sparkling, "changes", hours_ago(5), 1, [change("5", 1)])
    appended(sparkling, "changes", hours_ago(1), 2, [change("5", 2), change("6", 1)])
    say(sparkling, begin("5"), end("5", 2), begin("6"), end("6", 2))
    sparkling.streams.maintain("changes")
    assert cut(sparkling, 1) == {0: ("1", "2")}


def ids(world: World) -> list[int]:
    return sorted(key for key in range(1, 9) if world.view(SPEC).get(key))


@pytest.mark.spark
def test_an_advance_commits_whole_transactions_only(sparkling: World) -> None:
    changes(sparkling, change("5", 1, 1), change("5", 2, 2))
    say(sparkling, begin("5"), end("5", 2))
    assert sparkling.advance(SPEC).action == "bootstrapped"
    changes(sparkling, change("6", 3, 3))
    say(sparkling, begin("6"))
    report = sparkling.advance(SPEC)
    assert (report.action, sum(report.lag.values())) == ("up-to-date", 1)
    assert "1 offsets wait for unfinished transactions" in report.note
    assert ids(sparkling) == [1, 2]
    changes(sparkling, change("6", 4, 4))
    say(sparkling, end("6", 2))
    assert sparkling.advance(SPEC).action == "applied"
    assert ids(sparkling) == [1, 2, 3, 4]


@pytest.mark.spark
def test_a_bootstrap_waits_for_the_end_of_a_transaction_that_was_open_at_its_target(
    sparkling: World,
) -> None:
    changes(sparkling, change("5", 1, 1), change("6", 1, 2))
    say(sparkling, begin("5"), end("5", 1), begin("6"))
    report = sparkling.advance(SPEC)
    assert (report.action, report.version) == ("waiting", None)
    with pytest.raises(NoSealedVersionError) as caught:
        sparkling.view(SPEC)
    assert caught.value.dataset == "table"
    changes(sparkling, change("6", 2, 3), change("7", 1, 4))
    say(sparkling, end("6", 2), begin("7"))
    assert sparkling.advance(SPEC).action == "bootstrapped"
    assert ids(sparkling) == [1, 2, 3], (
        "what the target cut in two is whole, and the next one has not begun"
    )


@pytest.mark.spark
def test_a_transaction_larger_than_a_chunk_makes_the_chunk_larger(sparkling: World) -> None:
    small = dataset(changes=FORM, order_by="source.lsn", chunk=2)
    changes(sparkling, *(change("5", number, number) for number in range(1, 6)), change("6", 1, 6))
    say(sparkling, begin("5"), end("5", 5), begin("6"), end("6", 1))
    assert sparkling.advance(small).action == "bootstrapped"
    assert ids(sparkling) == [1, 2, 3, 4, 5, 6]

"""Any mix of calls made at the same time answers as the same calls made one after the other on a
dictionary.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import RecordNotFoundError, TableError
from dagster_adjunct.resources.tables.batching import BatchProvider
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.slow_store import BAD, SlowStore
from tests.rounds import rounds

ONLY, WITH_DEFAULTS = UpdateContract.UPDATE_ONLY, UpdateContract.UPDATE_WITH_DEFAULTS
KEYS = st.sampled_from("abcd")
RECORDS = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9), max_size=2)
VALUES = RECORDS | st.just(BAD)
MESSAGES = st.builds(UpdateMessage, RECORDS, st.none() | RECORDS)


@dataclass(frozen=True)
class Call:
    kind: str
    entries: tuple[Any, ...]
    arg: object = None


def calls(*, updates: bool) -> st.SearchStrategy[Call]:
    def of(kind: str, entry: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
        several = st.lists(entry, max_size=6).map(tuple)
        return st.builds(Call, st.just(kind), several, st.sampled_from([None, "x"]))

    kinds = [of("get", KEYS), of("put", st.tuples(KEYS, st.none() | VALUES)), of("delete", KEYS)]
    if updates:
        kinds += [of("update", st.tuples(KEYS, VALUES)), of("message", st.tuples(KEYS, MESSAGES))]
    return st.one_of(*kinds)


PAUSES = st.sampled_from(["turn", "flush", "close"]).map(lambda what: Call(what, ()))


async def ask(table: RemoteTable[Any, Any, Any], call: Call) -> Any:
    """What the call answers: records, or which keys an error was about."""
    args = () if call.arg is None else (call.arg,)
    one = len(call.entries) == 1
    try:
        match call.kind:
            case "get" if one:
                return {call.entries[0]: await table.get(call.entries[0], *args)}
            case "get":
                records = await table.get_all(call.entries, *args)
                return {key: records.get(key) for key in call.entries}
            case "put" if one:
                await table.put(*call.entries[0], *args)
            case "put":
                await table.put_all(call.entries, *args)
            case "delete" if one:
                await table.delete(call.entries[0], *args)
            case "delete":
                await table.delete_all(call.entries, *args)
            case "update" if one:
                await table.update(*call.entries[0], *args)
            case "update":
                await table.update_all(call.entries, *args)
            case "message":
                await table.update_messages(call.entries, WITH_DEFAULTS, *args)
    except RecordNotFoundError as error:
        return "missing", sorted(error.keys)
    except TableError:
        return "refused"
    return None


def plainly(records: dict[str, dict[str, Any]], call: Call) -> Any:
    """The same on a dictionary."""
    if call.kind == "get":
        return {key: None if key not in records else dict(records[key]) for key in call.entries}
    refused, missing = False, set()
    for entry in call.entries:
        key, value = (entry, None) if call.kind == "delete" else entry
        if call.kind in ("put", "delete"):
            if value == BAD:
                refused = True
            elif value is None:
                records.pop(key, None)
            else:
                records[key] = dict(value)
            continue
        update, default = (value.update, value.default) if call.kind == "message" else (value, None)
        if update == BAD:
            refused = True
        elif key in records or default is not None:
            records[key] = {**records.get(key, default or {}), **update}
        else:
            missing.add(key)
    return "refused" if refused else ("missing", sorted(missing)) if missing else None


async def at_the_same_time(
    table: RemoteTable[Any, Any, Any], store: SlowStore, asked: list[Call]
) -> list[Any]:
    tasks = []
    records: dict[str, dict[str, Any]] = {}
    for call in asked:
        match call.kind:
            case "turn":
                await asyncio.sleep(0)
            case "flush":
                await table.flush()
                assert store.records == records
            case "close":
                await table.close()
                assert store.records == records
            case _:
                plainly(records, call)
                tasks.append(asyncio.create_task(ask(table, call)))
    answers = await asyncio.gather(*tasks)
    await table.close()
    return answers


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(80, 250))
@given(
    asked=st.lists(calls(updates=True) | PAUSES, max_size=14),
    size=st.integers(1, 6),
    most_bytes=st.none() | st.integers(1, 60),
    delay=st.sampled_from([0.0, 0.0, 0.001]),
    in_flight=st.integers(1, 3),
    at_once=st.booleans(),
    cache=st.sampled_from([None, Cache(), Cache(absent=True, on_write="around")]),
    seed=st.integers(0, 99),
)
def test_calls_made_at_the_same_time_answer_as_on_a_dictionary(
    asked, size, most_bytes, delay, in_flight, at_once, cache, seed
):
    turns = random.Random(seed)
    store = SlowStore(lambda: turns.randrange(4), at_once=at_once)
    batches = BatchProvider(size=size, bytes=most_bytes, delay=delay)
    table = RemoteTable(
        "t",
        key="id",
        read_function=store,
        write_function=store,
        batches=batches,
        in_flight=in_flight,
        cache=cache,
    )
    records: dict[str, dict[str, Any]] = {}
    expected = [
        plainly(records, call) for call in asked if call.kind not in ("turn", "flush", "close")
    ]
    assert asyncio.run(at_the_same_time(table, store, asked)) == expected
    assert store.records == records
    assert store.overlaps == []
    assert store.most_under_way <= in_flight
    assert all(0 < len(keys) <= size for _, keys in store.requests)


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(60, 150))
@given(
    asked=st.lists(st.tuples(calls(updates=True), st.none() | st.integers(0, 12)), max_size=12),
    size=st.integers(1, 8),
    delay=st.sampled_from([0.0, 0.0, 0.001]),
    at_once=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_caller_that_is_cancelled_harms_no_other(asked, size, delay, at_once, seed):
    """Calls with a number are cancelled after so many turns, and have keys of their own."""
    turns = random.Random(seed)
    store = SlowStore(lambda: turns.randrange(4), at_once=at_once)
    batches = BatchProvider(size=size, delay=delay)
    table = RemoteTable(
        "t", key="id", read_function=store, write_function=store, batches=batches, in_flight=2
    )

    def own(call: Call) -> Call:
        entries = (
            f"own {e}" if isinstance(e, str) else (f"own {e[0]}", e[1]) for e in call.entries
        )
        return Call(call.kind, tuple(entries), call.arg)

    async def scenario() -> list[Any]:
        kept = []

        async def cancelled(call: Call, after: int) -> None:
            task = asyncio.create_task(ask(table, own(call)))
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        ended = []
        for call, after in asked:
            if after is None:
                kept.append(asyncio.create_task(ask(table, call)))
            else:
                ended.append(asyncio.create_task(cancelled(call, after)))
        answers = await asyncio.wait_for(asyncio.gather(*kept), 120)
        await asyncio.wait_for(asyncio.gather(*ended), 120)
        await asyncio.wait_for(table.close(), 120)
        return answers

    records: dict[str, dict[str, Any]] = {}
    expected = [plainly(records, call) for call, after in asked if after is None]
    assert asyncio.run(scenario()) == expected
    assert {
        key: record for key, record in store.records.items() if not key.startswith("own")
    } == records

"""Conditions keep a table exact whatever is lost, sent again or comes late: checked against plain
Python on each store.

Here the store's function is sent operations as they are, and what failed is sent again by six lines
of this file, so that what is shown is the store's own doing. The same through all layers is in
test_every_layer.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
)
from tests.resources.table_backends.reached_stores import STORES
from tests.resources.tables.plain_oracle import (
    batches,
    counting,
    counting_next_to_newest,
    delivered_again,
    keeping_newest,
    messages,
    newest,
    record_of,
    totals,
)
from tests.resources.tables.troubled_function import TroubledFunction
from tests.rounds import rounds

SEEDS = rounds(range(1), range(3))


@pytest.fixture(scope="module", params=STORES)
def new_store(request, tmp_path_factory):
    """Makes an empty store of one backend."""
    reached = request.param(request, tmp_path_factory.mktemp("exact"))
    return lambda: reached.store(reached.new_name())


async def through(function, operation: Operation) -> None:
    """Send it, and what may pass again, until nothing is left; anything else is a fault of the
    test.
    """
    left = operation
    for _ in range(200):
        await function.open()
        outcomes: Outcomes = await function.send(left)
        assert not outcomes.places(State.REFUSED, State.MISSING), outcomes.problems
        again = outcomes.places(State.FAILED, State.UNKNOWN)
        if not again:
            return
        left = left.with_entries(left.entries.take(again))
    raise AssertionError("after 200 requests there was still something to send")


async def records(store, keys) -> dict:
    wanted = sorted(keys)
    await store.open()
    answers = await store.send(Operation(OperationKind.GET, RowEntries(wanted)))
    await store.close()
    return dict(zip(wanted, answers.records, strict=True))


def run(work):
    return asyncio.run(work)


def counted(sent):
    return {key: {"total": total} for key, total in totals(sent).items()}


def counted_next_to_newest(sent):
    return {
        key: {**record_of(message), "total": totals(sent)[key]}
        for key, message in newest(sent).items()
    }


@pytest.mark.rounds
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("operation", "oracle"),
    [(counting, counted), (counting_next_to_newest, counted_next_to_newest)],
)
def test_updates_are_exact_though_answers_are_lost_and_batches_come_again(
    new_store, seed, operation, oracle
):
    """Those that add count each message once, and those that set as well keep the newest."""
    sent = messages(seed, per_source=120)
    store = new_store()
    troubled = TroubledFunction(store, seed)

    async def source(number, own):
        for batch in delivered_again(batches(own, 8), Random(seed * 100 + number)):
            await through(troubled, operation(batch))

    async def all_sources():
        await asyncio.gather(*(source(number, own) for number, own in enumerate(sent.values())))
        return await records(store, expected)

    expected = oracle([message for own in sent.values() for message in own])
    kept = run(all_sources())
    assert troubled.spoilt > 50
    assert {
        key: {name: record[name] for name in expected[key]} for key, record in kept.items()
    } == expected


@pytest.mark.rounds
def test_a_new_epoch_counts_again_and_the_same_one_does_not(new_store):
    sent = messages(7)["lake.clicks.1"]
    store = new_store()

    async def three_rounds():
        for epoch in (0, 0, 1, 1):
            for batch in batches(sent, 25):
                await through(store, counting(batch, epoch))
        return await records(store, expected)

    expected = totals(sent, rounds=2)
    assert {key: record["total"] for key, record in run(three_rounds()).items()} == expected


@pytest.mark.rounds
@pytest.mark.parametrize("seed", SEEDS)
def test_the_newest_stays_in_whatever_order_and_how_often_messages_come(new_store, seed):
    sent = [message for own in messages(seed, per_source=120).values() for message in own]
    store = new_store()
    troubled = TroubledFunction(store, seed)

    async def writer(number):
        """All messages, in an order of its own, and a replay of some of them."""
        random = Random(seed * 100 + number)
        own = random.sample(sent, len(sent))
        for batch in batches(own, 16):
            await through(troubled, keeping_newest(batch))
        for batch in batches(random.sample(own, 40), 7):
            await through(troubled, keeping_newest(batch, epoch=number))

    async def two_writers():
        await asyncio.gather(writer(0), writer(1))
        return await records(store, expected)

    expected = {key: record_of(message) for key, message in newest(sent).items()}
    kept = run(two_writers())
    assert troubled.spoilt > 50
    assert {
        key: {name: record[name] for name in expected[key]} for key, record in kept.items()
    } == expected


def test_entries_say_which_of_them_came_too_late(new_store):
    by_time = sorted(messages(3, keys=1)["lake.clicks.0"], key=lambda message: message.time)
    early, late = keeping_newest(by_time[:1]), keeping_newest(by_time[-1:])
    store = new_store()

    async def late_first():
        await store.open()
        answers = [await store.send(late), await store.send(early), await store.send(late)]
        await store.close()
        return answers

    assert [outcomes.places(State.SKIPPED) for outcomes in run(late_first())] == [[], [0], []]


def test_deletes_under_conditions_are_not_undone_by_what_is_older(new_store):
    sent = sorted(messages(5, keys=1)["lake.clicks.0"], key=lambda m: (m.time, m.offset))
    older, delete, newer = sent[10], sent[30], sent[50]
    deleting = keeping_newest([delete])
    deleting = Operation(
        OperationKind.DELETE,
        RowEntries(
            deleting.entries.keys, marks=deleting.entries.marks, newest=deleting.entries.newest
        ),
        conditions=deleting.conditions,
    )
    store = new_store()

    async def in_turn():
        seen = []
        await store.open()
        for operation in (
            keeping_newest([older]),
            deleting,
            keeping_newest([older]),
            keeping_newest([newer]),
        ):
            await store.send(operation)
            answers = await store.send(Operation(OperationKind.GET, RowEntries(["k0"])))
            seen.append(None if answers.records[0] is None else answers.records[0]["number"])
        await store.close()
        return seen

    assert run(in_turn()) == [older.offset, None, None, newer.offset]


def test_a_late_update_of_a_deleted_record_changes_nothing_however_often_it_comes(new_store):
    """Also where a newer record has begun in between: a batch that is run again ends as it did
    the first time.
    """
    sent = sorted(messages(5, keys=1)["lake.clicks.0"], key=lambda m: (m.time, m.offset))
    late, deleted, newer = (
        counting_next_to_newest([replace(sent[at], source=source)])
        for at, source in ((10, "lake.a.0"), (30, "lake.b.0"), (50, "lake.c.0"))
    )
    delete = Operation(
        OperationKind.DELETE,
        RowEntries(
            deleted.entries.keys, marks=deleted.entries.marks, newest=deleted.entries.newest
        ),
        conditions=deleted.conditions,
    )
    store = new_store()

    async def in_turn():
        await store.open()
        outcomes = [await store.send(operation) for operation in (delete, late, newer, late)]
        await store.close()
        return [bool(outcome.places(State.SKIPPED)) for outcome in outcomes], await records(
            store, ["k0"]
        )

    skipped, kept = run(in_turn())
    assert skipped == [False, True, False, True]
    assert kept["k0"]["total"] == totals([sent[50]])["k0"]


def test_a_key_several_times_in_one_operation_takes_effect_in_order(new_store):
    """Of one source no message of a key is passed over because a later one of the same operation
    came before it.
    """
    sent = messages(11, keys=2, per_source=80)["lake.clicks.2"]
    store = new_store()

    async def at_once():
        await through(store, counting(sent))
        return await records(store, expected)

    expected = totals(sent)
    assert {key: record["total"] for key, record in run(at_once()).items()} == expected

"""Money that processes move by atomic batches: its sum never changes, and nothing that was
acknowledged is lost.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dagster_adjunct.key_value import BlockingKeyValueTable
from tests.end_to_end.key_values.bank import (
    ACCOUNTS,
    BANK,
    START,
    TOTAL,
    balances,
    open_accounts,
    transfers,
    versions,
)
from tests.end_to_end.key_values.worlds import BACKENDS, QUICK, SERVERS, Table, World, notes
from tests.servers.tcp_proxy import Chooser


def check_bank(world: World, processes: int, wanted: int, trouble: Chooser | None = None) -> None:
    """Have so many processes make so many transfers each, look at the accounts meanwhile, and
    count in the end.
    """
    table = world.table()
    open_accounts(table)
    paths = [world.folder / f"{table.id.name}-{number}" for number in range(processes)]
    started = [
        world.process(transfers, path, table, str(number), wanted)
        for number, path in enumerate(paths)
    ]
    with world.processes(*started), world.troubled(trouble):
        looks = 0
        while any(process.is_alive() for process in started):
            looks += look(world, table)
    assert looks > 0
    made = [note for path in paths for note in notes(path)]
    assert len(made) == processes * wanted
    expected = Counter(dict.fromkeys(ACCOUNTS, START))
    for note in made:
        expected.update(note)
    with BlockingKeyValueTable(table) as blocking:
        entries = {
            entry.key.key: entry.value
            for page in blocking.entries(BANK, page_size=4)
            for entry in page.items
        }
    assert {account: int(entries.pop(account)) for account in ACCOUNTS} == expected
    assert sum(expected.values()) == TOTAL
    receipts = {f"receipt-{number}-{wanted}": str(number) for number in range(processes)}
    assert entries == receipts | {f"transfers-{number}": str(wanted) for number in range(processes)}


def look(world: World, table: Table) -> int:
    """Check what a reader sees now; return how many sums it has seen of one moment."""
    with BlockingKeyValueTable(table) as blocking:
        matched = [
            entry
            for page in blocking.entries(BANK, prefix="account-", page_size=4)
            for entry in page.items
        ]
        assert [entry.key.key for entry in matched] == list(ACCOUNTS)
        first = blocking.get_all(ACCOUNTS, family=BANK)
        # A version never comes back: what has the same ones twice had them all in between.
        if world.at_one_moment or versions(first) == versions(
            blocking.get_all(ACCOUNTS, family=BANK)
        ):
            amounts = balances(first)
            assert (len(amounts), sum(amounts.values())) == (len(ACCOUNTS), TOTAL)
            return 1
        return 0


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_the_sum_never_changes(world):
    check_bank(world, 3, 15)


@pytest.mark.long
@pytest.mark.parametrize("world", SERVERS, indirect=True)
def test_the_sum_never_changes_though_requests_and_replies_are_lost(world):
    chance = random.Random(3)
    check_bank(
        world,
        4,
        40,
        lambda _: chance.choice(("lost-before", "lost-after")) if chance.random() < 0.1 else None,
    )
    assert world.network.befallen.count("lost-after") > 2


@pytest.mark.long
@pytest.mark.parametrize("world", BACKENDS, indirect=True)
def test_the_sum_never_changes_in_many_transfers(world):
    check_bank(world, 6, 150)

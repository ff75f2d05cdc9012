"""Accounts in one family of a key-value table, and processes that move money between them, each
by one batch.
"""

from __future__ import annotations

import random
from pathlib import Path

from dagster_adjunct.errors import ConditionsNotMetError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    Insert,
    KeyVersion,
    Put,
    Remove,
    Replace,
    TableEntry,
)
from tests.end_to_end.key_values.worlds import Notes, Table

BANK = "accounts"
ACCOUNTS = tuple(f"account-{number}" for number in range(6))
START = 100
TOTAL = START * len(ACCOUNTS)

Entry = TableEntry[str, str]


def open_accounts(table: Table) -> None:
    """Put the same sum on each account."""
    with BlockingKeyValueTable(table) as blocking:
        blocking.put_all([(account, str(START)) for account in ACCOUNTS], family=BANK)


def transfers(path: Path, table: Table, name: str, wanted: int) -> None:
    """Make so many transfers, noting each that was acknowledged: what it added to which account.

    A batch moves money from one account to one or two others, if nobody else has meanwhile, puts
    the number of the transfer, and passes on a receipt: the last one is removed, another inserted.
    """
    chance, notes, receipt = random.Random(name), Notes(path), (f"receipt-{name}-0", None)
    with BlockingKeyValueTable(table) as blocking:
        made = 0
        while made < wanted:
            moved = _moved(chance)
            read = blocking.get_all(list(moved), family=BANK)
            accounts = {entry.key.key: entry for entry in read if entry is not None}
            changes = [
                Replace(
                    account, str(int(accounts[account].value) + amount), accounts[account].version
                )
                for account, amount in moved.items()
            ]
            following = f"receipt-{name}-{made + 1}"
            others = [Insert(following, name), Put(f"transfers-{name}", str(made + 1))]
            removed: list[Remove[str]] = [] if receipt[1] is None else [Remove(*receipt)]
            try:
                versions = blocking.apply([*changes, *others, *removed], family=BANK)
            except ConditionsNotMetError as error:
                # Only others' transfers can be in the way: the receipts are ours.
                if {failure.key for failure in error.failures} <= moved.keys():
                    continue
                raise
            made += 1
            receipt = (following, versions[len(changes)])
            notes.add(moved)


def balances(entries: list[Entry | None]) -> dict[str, int]:
    """Return what is on each account."""
    return {entry.key.key: int(entry.value) for entry in entries if entry is not None}


def versions(entries: list[Entry | None]) -> list[KeyVersion | None]:
    """Return the versions of entries."""
    return [entry and entry.version for entry in entries]


def _moved(chance: random.Random) -> dict[str, int]:
    giver, *takers = chance.sample(ACCOUNTS, chance.choice((2, 3)))
    amounts = {taker: chance.randint(1, 20) for taker in takers}
    return {giver: -sum(amounts.values()), **amounts}

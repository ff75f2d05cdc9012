"""Key-value tables against bare clients that do the same, with the same conditions, by hand.

One process, one request at a time: single requests, batches of 50, reads of 1,000 keys, and all
entries in the order of their keys. A ratio is ours to the best by hand in the same run; in an event
loop, to the best in one, if there is one. Both have one partition and 16 bytes of key, 100 of
value; the table also keeps the tokens of requests and looks for a seal, which by hand nobody does.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.key_value_dynamodb import DYNAMODB
from benchmarks.key_value_postgres import POSTGRES
from benchmarks.key_value_sides import IN_A_LOOP, Compared, Side, Store, entries_from, our_sides
from benchmarks.key_value_sqlite import SQLITE, SQLITE_WITHOUT_DISK
from benchmarks.timing import Measured, alternate

STORES: tuple[Store, ...] = (SQLITE_WITHOUT_DISK, SQLITE, POSTGRES, DYNAMODB)
BATCH, BULK = 50, 1_000


def run(rounds: int) -> None:
    """Print rates and ratios for each store."""
    for store in STORES:
        print(
            f"key values: {store.name}, {store.singles:,} single requests,"
            f" {store.scanned:,} entries"
        )
        with store.opened() as compared, our_sides(compared.backend) as ours:
            _compare(store, compared, ours, rounds)


def _compare(store: Store, compared: Compared, ours: dict[str, Side], rounds: int) -> None:
    sides = {**compared.hands, **ours}
    count = store.singles
    batches = max(count // BATCH, 1)
    chosen = random.Random(1)
    first = dict.fromkeys(sides, 0)

    def fresh(name: str, amount: int) -> list[tuple[bytes, bytes]]:
        first[name] += amount
        return entries_from(first[name] - amount, amount)

    def measure(what: str, operations: int, work: Callable[[Side, str], object]) -> None:
        runs = {
            name: lambda turn, name=name, side=side: work(side, name)
            for name, side in sides.items()
        }
        measured = alternate(rounds + 1, **runs)
        # The first turn opens connections and compiles statements.
        _show(
            store,
            what,
            operations,
            {name: Measured(name, item.seconds[1:]) for name, item in measured.items()},
        )

    measure(
        "single conditional inserts", count, lambda side, name: side.inserts(fresh(name, count))
    )
    known = [key for key, _ in entries_from(0, min(first.values()))]
    for_replaces = [(key, b"changed" * 14) for key in chosen.sample(known, count)]
    measure("single conditional replaces", count, lambda side, name: side.replaces(for_replaces))
    for_gets = chosen.sample(known, count)
    measure("single gets", count, lambda side, name: side.gets(for_gets))
    measure(
        f"conditional inserts in batches of {BATCH}",
        batches * BATCH,
        lambda side, name: side.insert_batches([fresh(name, BATCH) for _ in range(batches)]),
    )
    reads = 20
    at_once = [chosen.sample(known, min(BATCH, len(known))) for _ in range(batches)]
    measure(
        f"gets of {BATCH} keys at once",
        batches * BATCH,
        lambda side, name: [side.get_all(k) for k in at_once],
    )
    bulks = [chosen.sample(known, min(BULK, len(known))) for _ in range(reads)]
    measure(
        f"gets of {BULK:,} keys at once",
        reads * BULK,
        lambda side, name: [side.get_all(k) for k in bulks],
    )
    for name, side in sides.items():
        side.fill(fresh(name, max(store.scanned - first[name], 0)))
    measure("entries in order", max(first.values()), lambda side, name: side.scan())


def _show(store: Store, what: str, operations: int, measured: dict[str, Measured]) -> None:
    rates = ", ".join(f"{name} {operations / item.median:,.0f}" for name, item in measured.items())
    print(f"  {what}/s: {rates}")
    hands = {name: item.median for name, item in measured.items() if not name.startswith("ours")}
    in_loop = {name: median for name, median in hands.items() if name.endswith(IN_A_LOOP)}
    for name in [name for name in measured if name.startswith("ours")]:
        alike = (name.endswith(IN_A_LOOP) and in_loop) or hands
        best, ours = min(alike, key=alike.__getitem__), measured[name].median
        more = (ours - alike[best]) / operations * 1e6
        goal = f" (goal: {store.goals[what]})" if what in store.goals else ""
        print(f"    {name}: {alike[best] / ours:.2f} of {best}'s rate, {more:+.1f} us each{goal}")

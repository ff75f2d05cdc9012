"""Tables with history written by hand, and what a look at all of their changes says that they
come to.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    KeptHistory,
    SealedVersion,
    StoredPositions,
    build_layout,
)
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO, Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema

SCHEMA = Schema.of(item="string", shop="int", price="int")
BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
Key = tuple[str, int]
LAYOUTS: dict[str, dict[str, Any]] = {
    "by its key": {"partitions": 3, "partition_by": ("item", "shop")},
    "by one column of it": {"partitions": 2, "partition_by": ("shop",)},
    "one copy": {"partitions": None, "partition_by": ()},
}


def day(number: int) -> dt.datetime:
    return BEGIN + dt.timedelta(days=number)


@dataclass(frozen=True)
class Change:
    """One stored row; `price` None deletes."""

    key: Key
    at: int
    position: int
    price: int | None


@dataclass(frozen=True)
class Interval:
    """The oracle's row: a key has this price (None: none) from one day to another (None: it
    still has).
    """

    key: Key
    start: int
    end: int | None
    first: bool
    price: int | None


def intervals(generations: Sequence[Sequence[Change]]) -> list[Interval]:
    """Return what holds when, by looking at all changes one after the other."""
    newest: dict[tuple[Key, int], tuple[int, int, Change]] = {}
    for number, changes in enumerate(generations):
        for change in changes:
            place = (change.position, number, change)
            if (change.key, change.at) not in newest or place[:2] > newest[change.key, change.at][
                :2
            ]:
                newest[change.key, change.at] = place
    as_intervals = []
    for key in {key for key, _ in newest}:
        times = sorted(at for other, at in newest if other == key)
        for at, end in zip(times, [*times[1:], None], strict=True):
            as_intervals.append(Interval(key, at, end, at == times[0], newest[key, at][2].price))
    return as_intervals


def stored(lake: Lake, generations: Sequence[Sequence[Change]], **layout: Any) -> VersionReader:
    """Write these generations as a table with history lies in files: the first one is a base,
    with its intervals.
    """
    spread = build_layout(
        SCHEMA,
        ("item", "shop"),
        layout["partition_by"],
        layout["partitions"],
        StoredPositions(),
        over_time=True,
    )
    known = {(row.key, row.start): row for row in intervals(generations[:1])}
    made = []
    for number, changes in enumerate(generations, 1):
        base = number == 1
        rows = [
            {
                "item": change.key[0],
                "shop": change.key[1],
                "price": change.price,
                POSITION: change.position,
                TOMBSTONE: change.price is None,
                VALID_FROM: day(change.at),
                VALID_TO: (
                    day(end)
                    if base and (end := known[change.key, change.at].end) is not None
                    else None
                ),
                IS_FIRST: known[change.key, change.at].first if base else None,
            }
            for change in changes
        ]
        order = [(name, "ascending") for name in ("item", "shop", VALID_FROM)]
        table = pa.Table.from_pylist(rows, schema=spread.arrow_schema()).sort_by(order)
        folder = f"datasets/prices/data/{id(generations)}-{number}"
        options = WriteOptions("a test", range_of=VALID_FROM)
        files = [
            file
            for file in write_arrow_buckets(table, lake.store, folder, spread, options)
            if file.rows
        ]
        made.append(Generation(number, folder, tuple(files)))
    sealed = SealedVersion(
        id="v000001-test",
        number=1,
        name=None,
        sealed_at=BEGIN,
        columns=SCHEMA,
        key=("item", "shop"),
        positioned=True,
        generations=tuple(made),
        offsets={},
        history=KeptHistory(),
        **layout,
    )
    return VersionReader(lake.store, "prices", sealed)


def changes_of(chance: random.Random, *, by_column: bool) -> list[list[Change]]:
    """Return generations with deletions, changes that come late, and such that come again, with
    the time of others.
    """
    made: list[list[Change]] = []
    position = 0
    for _ in range(chance.randint(1, 4)):
        rows: dict[tuple[Key, int], Change] = {}
        for _ in range(chance.randint(0, 25)):
            key, at = (f"é{chance.randint(0, 4)}", chance.randint(0, 2)), chance.randint(0, 12)
            position += 1
            price = None if chance.random() < 0.25 else chance.randint(1, 3)
            rows[key, at] = Change(key, at, chance.randint(1, 40) if by_column else position, price)
        made.append(list(rows.values()))
    return made


def in_order(rows: Iterable[Interval]) -> list[Interval]:
    return sorted(rows, key=lambda row: (row.key, row.start))


def joined(rows: Iterable[Interval]) -> list[tuple[Any, ...]]:
    """Return (item, shop, price, start, end, is current) with touching equal intervals as one,
    without deletions.
    """
    result: list[list[Any]] = []
    for row in in_order(rows):
        if row.price is None:
            continue
        last = result[-1] if result else None
        if last and (last[0], last[1]) == row.key and last[2] == row.price and last[4] == row.start:
            last[4], last[5] = row.end, row.end is None
        else:
            result.append([*row.key, row.price, row.start, row.end, row.end is None])
    return [tuple(row) for row in result]

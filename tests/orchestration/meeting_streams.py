"""Orders and payments that meet within a time: an application, random records, and what plain
Python makes of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from tests.orchestration.seen_times import at, watermarks_in_order
from tests.orchestration.step_world import StepWorld

KINDS = ("inner", "left", "right", "full")
BEFORE, AFTER, DELAY = 4, 7, 6
Result = tuple[Any, ...]  # key, number of the order, of the payment
Row = tuple[str | None, int, float | None]  # key, number, second of its time


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def meeting(
    records: int,
    *kinds: str,
    name: str = "meeting",
    late: bool = False,
    partitions: int = 2,
    **times: Any,
) -> Application:
    """Return an application that joins both streams in these ways; `times` is what its inputs
    say of times, too.
    """
    app = Application(name, max_batch_records=records)
    options: dict[str, Any] = {
        "default_offset": "oldest",
        "event_time": "ts",
        "delay": seconds(DELAY),
        **times,
    }
    orders = app.input_stream("lake.orders", **options)
    payments = app.input_stream("lake.payments", **options)
    for how in kinds:
        joined = orders.join_stream(
            payments,
            on={"k": "order_key"},
            within=(seconds(BEFORE), seconds(AFTER)),
            how=how,  # type: ignore[arg-type]
            name=how,
            select=["n as paid", "ts as paid_at"],
        )
        joined.send_to(app.output_stream(f"lake.{how}", partitions=partitions, key="k"))
        if late:
            joined.late_records().send_to(app.output_stream(f"lake.{how}-late", partitions=1))
    return app


def create(world: StepWorld, partitions: int = 2) -> None:
    world.stream("orders", "k", partitions, k="string", n="int", ts="timestamp")
    world.stream("payments", "order_key", partitions, order_key="string", n="int", ts="timestamp")


def drawn(chance: random.Random, number: int, now: int, keys: int) -> tuple[Any, ...]:
    """A record about now: some a little out of order, some very late, some of no time."""
    off = chance.choice([0, 0, 0, 1, -2, -5, 3, -25])
    return (f"k{chance.randrange(keys)}", number, None if chance.random() < 0.03 else at(now + off))


def expected(
    world: StepWorld, how: str, *, idle: bool = False
) -> tuple[Counter[Result], Counter[str]]:
    """Return the results of the whole input, and how many records are left out, by the reason.

    A partition without any record holds everything back, or is not waited for where partitions may
    be `idle`.
    """
    sides, marks, counts = [], [], Counter[str]()
    for stream, key in (("orders", "k"), ("payments", "order_key")):
        stored = world.streams.read_arrow(world.streams.all_ranges(stream)).to_pylist()
        rows = []
        for partition in range(world.streams.info(stream).partitions):
            mine = sorted(
                (r for r in stored if r["__partition"] == partition), key=lambda r: r["__offset"]
            )
            times = [None if r["ts"] is None else (r["ts"] - at(0)).total_seconds() for r in mine]
            behind, end = watermarks_in_order(times, DELAY)
            if mine or not idle:
                marks.append(end)
            for row, time, mark in zip(mine, times, behind, strict=True):
                if row["__tombstone"]:
                    counts["tombstones"] += 1
                    continue
                why = "null_times" if time is None else "null_keys" if row[key] is None else None
                if why is None and mark is not None:
                    counts["late"] += 1
                    continue
                if why is not None:
                    counts[why] += 1
                rows.append((row[key], row["n"], time))
        sides.append(rows)
    end = None if None in marks else min(mark for mark in marks if mark is not None)
    return results_of(sides[0], sides[1], how, end), counts


def results_of(
    left: Sequence[Row], right: Sequence[Row], how: str, end: float | None
) -> Counter[Result]:
    """Return what comes of orders and payments, none of them late, once the watermark is at
    `end`.
    """
    results = Counter[Result]()
    matched: tuple[set[int], set[int]] = (set(), set())
    for key, order, time in left:
        for other, payment, paid in right:
            if (
                key == other
                and None not in (key, time, paid)
                and time - BEFORE <= paid <= time + AFTER
            ):
                results[(key, order, payment)] += 1
                matched[0].add(order)
                matched[1].add(payment)
    for side, ahead, outer, index in (
        (left, AFTER, how in ("left", "full"), 0),
        (right, BEFORE, how in ("right", "full"), 1),
    ):
        for key, number, time in side:
            passed = None in (key, time) or (end is not None and time + ahead < end)
            if outer and number not in matched[index] and passed:
                results[(key, None, number) if index else (key, number, None)] += 1
    return results


def joined_rows(world: StepWorld, how: str) -> Counter[Result]:
    return Counter((row["k"], row["n"], row["paid"]) for row in world.rows(how))

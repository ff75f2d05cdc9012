"""Applications of thousands of operators: described, planned, and written as text and JSON,
against half as many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from statistics import median

from dagster_adjunct import Application, Schema, unbounded_dataset
from dagster_adjunct.testing import TestStream, assert_plannable

RECORDS = Schema.of(k="string", n="int")
STREAMS = {
    "lake.s": TestStream(RECORDS, key="k", partitions=8),
    "lake.t": TestStream(RECORDS, key="k", partitions=1),
}


def many_joins_and_writers(size: int) -> Application:
    """Of one table `size` joins and as many writers, each behind a stream of its own."""
    app = Application("planned")
    table = app.table(unbounded_dataset("t", input="lake.t", key="k", partitions=8))
    records = app.input_stream("lake.s")
    for number in range(size):
        moved = records.filter(f"n > {number % 100}").partition_by("k")
        moved.send_to(table)
        moved.join(table, on="k", select=[])
    return app


_SEEN = count()


def chain(size: int, joins: int = 0, *, others: bool = False) -> Application:
    """So many operators in a row, with joins among them; `others` gives each a condition that
    was never parsed.
    """
    app = Application("planned")
    table = app.table(unbounded_dataset("t", input="lake.t", key="k", partitions=8))
    records = app.input_stream("lake.s")
    for number in range(size):
        joined = joins and number % (size // joins) == 0
        records = (
            records.join(table, on="k", select=[])
            if joined
            else records.filter(f"n > {next(_SEEN) if others else number % 100}")
        )
    return app


def ever_wider(size: int) -> Application:
    """So many operators in a row, each of which adds a column."""
    app = Application("planned")
    records = app.input_stream("lake.s")
    for number in range(size):
        records = records.with_columns(**{f"c{number}": f"n + {number}"})
    return app


SHAPES: dict[str, tuple[Callable[[int], Application], int, str]] = {
    "2,500 joins and 2,500 writers of one table": (many_joins_and_writers, 2_500, "under 2 s"),
    "a chain of 10,000 operators": (chain, 10_000, "under 1 s"),
    "the same with 300 joins": (lambda size: chain(size, 300), 10_000, "under 1 s"),
    "10,000 operators, each with an expression to parse": (
        lambda size: chain(size, others=True),
        10_000,
        "no goal",
    ),
    "1,000 operators, each with one more column": (ever_wider, 1_000, "under 0.5 s"),
}


def run(rounds: int) -> None:
    for name, (describe, size, goal) in SHAPES.items():
        print(f"planning: {name}")
        whole, half = [], []
        for _ in range(rounds):  # in turns, so that a slow moment of the machine hits both
            whole.append(times(describe, size))
            half.append(times(describe, size // 2))
        described, planned, shown = (median(durations) for durations in zip(*whole, strict=True))
        print(
            f"  described in {described:.2f} s; planned in {planned:.2f} s, as text and JSON in"
            f" {shown:.2f} s ({goal})"
        )
        ratio = median(a[1] + a[2] for a in whole) / median(a[1] + a[2] for a in half)
        print(f"  against half as many: {ratio:.1f} (goal: about 2)\n")


def times(describe: Callable[[int], Application], size: int) -> tuple[float, float, float]:
    """Return the seconds to describe, to plan, and to write the plan."""
    at = [time.perf_counter()]
    app = describe(size)
    at.append(time.perf_counter())
    plan = assert_plannable(app, STREAMS)
    at.append(time.perf_counter())
    json.dumps(plan.to_json())
    plan.render()
    at.append(time.perf_counter())
    return at[1] - at[0], at[2] - at[1], at[3] - at[2]

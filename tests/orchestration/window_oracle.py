"""Random streams, and what windows over them have to be: plain Python over the whole input,
without any batches.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from dagster_adjunct.orchestration.operators.windows.kinds import Kind, Session, Sliding

T0 = dt.datetime(2024, 1, 1)


@dataclass(frozen=True)
class Click:
    """One record; `time` in seconds after T0, None where it says none."""

    key: str | None
    time: float | None
    number: int | None
    price: Decimal | None
    text: str | None
    weight: float | None


def at(seconds: float | None) -> dt.datetime | None:
    return None if seconds is None else T0 + dt.timedelta(seconds=seconds)


def random_clicks(seed: int, keys: int, records: int, partitions: int) -> list[list[Click]]:
    """Return the records of each partition in their order: mostly later ones later, some far
    behind.
    """
    rng = random.Random(seed)
    made: list[list[Click]] = []
    for partition in range(partitions):
        now = rng.uniform(0, 30)
        own: list[Click] = []
        for _ in range(records):
            now += rng.choice([0, 0, 0.5, 1, 3, 12]) * rng.random()
            back = rng.choice([0, 0, 0, 2, 8, 25, 70]) * rng.random()
            time = None if rng.random() < 0.02 else round(now - back, rng.choice([0, 6]))
            key = None if rng.random() < 0.02 else f"k{partition}-{rng.randrange(keys)}"
            own.append(
                Click(
                    key,
                    time,
                    rng.choice([None, *range(-5, 20)]),
                    rng.choice([None, Decimal(rng.randrange(-500, 500)).scaleb(-2)]),
                    rng.choice([None, "", "a", 'q"uote', "ä", "b,c"]),
                    rng.choice([None, 0.5, -0.0, 0.0, 0.25, 3.0, 1e6]),  # sums of these are exact
                )
            )
        made.append(own)
    return made


def watermark(clicks: Sequence[Click], delay: float) -> float | None:
    times = [click.time for click in clicks if click.time is not None]
    return max(times) - delay if times else None


def behind(clicks: Sequence[Click], delay: float) -> Iterator[float | None]:
    """Yield the watermark of its partition for each record that is behind it."""
    newest: float | None = None
    for click in clicks:
        mark = None if newest is None else newest - delay
        yield mark if mark is not None and click.time is not None and click.time < mark else None
        if click.time is not None and (newest is None or click.time > newest):
            newest = click.time


def starts_of(kind: Kind, time: float) -> list[float]:
    assert not isinstance(kind, Session)
    assert kind.size is not None
    size = kind.size.total_seconds()
    every = kind.every.total_seconds() if isinstance(kind, Sliding) else size
    last = math.floor(time / every) * every
    return [
        last - n * every for n in range(math.ceil(size / every)) if last - n * every > time - size
    ]


@dataclass
class Expected:
    """The windows by (key, start): their end, and their records in order; and the records that
    are in none.
    """

    windows: dict[tuple[str, float], tuple[float, list[Click]]]
    late: list[tuple[Click, str]]


def expected(
    clicks: Sequence[Sequence[Click]], kind: Kind, delay: float, lateness: float
) -> Expected:
    taken: dict[tuple[str, float], list[Click]] = defaultdict(list)
    sessions: dict[str, list[tuple[float, int, Click]]] = defaultdict(list)
    late = []
    for own in clicks:
        for place, (click, limit) in enumerate(zip(own, behind(own, delay), strict=True)):
            if click.time is None:
                late.append((click, "null time"))
            elif click.key is None:
                late.append((click, "null key"))
            elif isinstance(kind, Session):
                if limit is not None and click.time < limit - lateness:
                    late.append((click, "late"))
                else:
                    sessions[click.key].append((click.time, place, click))
            else:
                starts = starts_of(kind, click.time)
                size = kind.size.total_seconds() + lateness
                kept = [start for start in starts if limit is None or start + size > limit]
                if not kept:
                    late.append((click, "late"))
                for start in kept:
                    taken[click.key, start].append(click)
    if not isinstance(kind, Session):
        size = kind.size.total_seconds()
        return Expected({key: (key[1] + size, own) for key, own in taken.items()}, late)
    windows: dict[tuple[str, float], tuple[float, list[Click]]] = {}
    for key, of_key in sessions.items():
        for run in _runs(sorted(of_key, key=lambda one: one[:2]), kind.gap.total_seconds()):
            in_order = [click for _, _, click in sorted(run, key=lambda one: one[1])]
            windows[key, run[0][0]] = (run[-1][0] + kind.gap.total_seconds(), in_order)
    return Expected(windows, late)


def _runs(
    sorted_clicks: Sequence[tuple[float, int, Click]], gap: float
) -> Iterator[list[tuple[float, int, Click]]]:
    run: list[tuple[float, int, Click]] = []
    for one in sorted_clicks:
        if run and at(one[0]) - at(run[-1][0]) >= dt.timedelta(seconds=gap):  # type: ignore[operator]
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def values_of(clicks: Sequence[Click]) -> dict[str, Any]:
    """Return what AGGREGATES of the test give for the records of a window."""
    numbers = [click.number for click in clicks if click.number is not None]
    prices = [click.price for click in clicks if click.price is not None]
    weights = [click.weight for click in clicks if click.weight is not None]
    texts = [click.text for click in clicks if click.text is not None]
    return {
        "clicks": len(clicks),
        "numbers": len(numbers),
        "total": sum(numbers) if numbers else None,
        "spent": sum(prices, Decimal(0)) if prices else None,
        "weight": sum(weights) if weights else None,
        "first": min(texts, key=str.encode) if texts else None,
        "most": max(numbers) if numbers else None,
        "mean": sum(numbers) / len(numbers) if numbers else None,
        "mean_price": round(sum(prices, Decimal(0)) / len(prices), 6) if prices else None,
        "texts": len(set(texts)),
        "weights": len(set(weights)),
        "about": len(set(texts)),
    }

"""Factories of functions that tests name in Python extractors."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Function = Callable[[dict[str, Any]], Iterable[dict[str, Any]]]


def by_seat() -> Function:
    """None, one or several entries of a record: one for each seat."""

    def entries(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for seat in range(record["seats"] or 0):
            yield {"tailnum": record["tailnum"], "seat": seat}

    return entries


def seated() -> Function:
    """The record, if it has seats."""
    return lambda record: (
        [{"tailnum": record["tailnum"], "seats": record["seats"]}] if record["seats"] else []
    )


def whatever_it_says() -> Function:
    """What stands in `model`, evaluated: for everything that a function may do wrong."""
    return lambda record: eval(record["model"], {"dt": dt, "record": record})


def same() -> Function:
    """The record as it is."""
    return lambda record: [dict(record)]


def days() -> Function:
    return lambda record: [{"id": record["id"], "day": record["day"]}]


def renamed() -> Function:
    return lambda record: [{"tailnum": record["tailnum"].lower(), "seats": record["seats"]}]


NOT_A_FACTORY = 7


def not_a_function() -> int:
    return 7


def without_its_setting() -> Function:
    raise KeyError("FLEET_TOKEN")


def entries_of_lines() -> Function:
    """An entry for each element of an array."""
    return lambda record: [
        {"k": record["k"] * 10 + place, "line": line, "by": {"key": record["by"], "n": None}}
        for place, line in enumerate(record["lines"])
    ]


def wrong_line() -> Function:
    """An entry with a part of another type."""
    return lambda record: [{"k": 1, "line": {"price": "x"}, "by": None}]


def open_orders() -> Function:
    """Orders with a number that is not negative."""

    def extract(record: dict[str, Any]) -> list[dict[str, Any]]:
        if record["no"] < 0:
            return []
        return [{"no": record["no"], "customer": record["customer"]}]

    return extract

"""Intervals of a key that say the same are one, also where what they say is no number."""

from __future__ import annotations

import datetime as dt
from math import nan

from dagster_adjunct.assets.reading.version_reader import Validity, merge_equal_neighbours


def test_equal_entries_without_a_number_are_one_interval_as_spark_has_it() -> None:
    one, two, three = (dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2, 3))
    parts = [
        Validity(one, two, {"k": "a", "v": float("nan")}),
        Validity(two, three, {"k": "a", "v": -nan}),
        Validity(three, None, {"k": "a", "v": None}),
    ]
    assert [(part.valid_from, part.valid_to) for part in merge_equal_neighbours(parts)] == [
        (one, three),
        (three, None),
    ]

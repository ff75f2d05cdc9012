"""Intervals of a key that say the same are one, also where what they say is no number."""

from __future__ import annotations

import datetime as dt
from math import nan

from dagster_adjunct.assets.reading.version_reader import Validity, merge_equal_neighbours
from dagster_adjunct.assets.versions.version import KeptHistory, SealedVersion
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.schemas.schema import Schema


def test_equal_entries_without_a_number_are_one_interval_as_spark_has_it() -> None:
    one, two, three = (dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2, 3))
    parts = [
        Validity(one, two, {"k": "a", "v": float("nan")}),
        Validity(two, three, {"k": "a", "v": -nan}),
        Validity(three, None, {"k": "a", "v": None}),
    ]
    sealed = SealedVersion(
        id="v000001-test",
        number=1,
        name=None,
        sealed_at=one,
        columns=Schema.of(k="string", v="double"),
        key=("k",),
        partition_by=("k",),
        partitions=1,
        positioned=True,
        generations=(Generation(1, "nothing", ()),),
        offsets={},
        history=KeptHistory(),
    )
    merged = merge_equal_neighbours(parts, sealed)
    assert [(part.valid_from, part.valid_to) for part in merged] == [(one, three), (three, None)]

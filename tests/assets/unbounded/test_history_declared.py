"""A history as it is declared and stored: what is refused, how its rows lie in files, and how
far back it goes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.versions.version import (
    KeptHistory,
    StoredPositions,
    build_layout,
    find_newest_valid_from,
)
from dagster_adjunct.resources.bucketing.files import BucketFile, Generation
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"history": 5}, "history"),
        ({"history": timedelta(0)}, "history"),
        ({"history": "none"}, "history"),
        ({"valid_from": "at"}, "valid_from"),
        ({"history": "all", "valid_from": "__at"}, "valid_from"),
        ({"history": "all", "order_by": "n", "keep_tombstones": 5}, "keep_tombstones"),
        ({"history": "all", "persistent": False}, "history"),
    ],
)
def test_a_history_that_can_not_be_kept_is_rejected(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        unbounded_dataset("prices", input="lake.prices", key="item", partitions=2, **options)
    assert caught.value.argument == argument


def test_rows_over_time_are_distinguished_and_sorted_by_their_time() -> None:
    layout = build_layout(
        Schema.of(item="string", price="int"),
        ("item",),
        ("item",),
        2,
        StoredPositions(),
        over_time=True,
    )
    assert layout.key == ("item", "__valid_from")
    assert layout.bucket_by == ("item",)
    assert layout.key_types == ("string", "timestamp")
    assert layout.columns[2:] == (
        "__position",
        "__tombstone",
        "__valid_from",
        "__valid_to",
        "__first",
    )


def test_a_history_is_exact_from_its_edge_on_and_never_before_what_was_pruned() -> None:
    files = [BucketFile(0, "a", 1, 1, "", stats={"range": [5, 900]}), BucketFile(1, "b", 1, 1, "")]
    newest = find_newest_valid_from([Generation(1, "folder", tuple(files))])
    assert newest == 900
    assert KeptHistory(kept=100).edge(newest) == 800
    assert KeptHistory(kept=500, pruned=700).edge(newest) == 700
    assert KeptHistory().edge(newest) is None
    assert KeptHistory(kept=timedelta.max // timedelta(microseconds=1)).edge(newest) is None, (
        "before the year 1"
    )
    assert KeptHistory(kept=100).edge(find_newest_valid_from([])) is None

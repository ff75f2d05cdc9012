"""Dagster partitions say since when versions are valid: materialised in any order, they are read
over time as dated.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import VersionPartitions, bounded_dataset, open_dataset
from dagster_adjunct.exchange import polars_frame
from dagster_adjunct.sources import Computation, QuerySource
from tests.orchestration.dagster.lab import SCHEMA, FinishedRun, Lab, running_lab

PRICES: dict[str, dict[str, int]] = {
    "2026-01-01": {"a": 1, "b": 2},
    "2026-01-03": {"a": 5, "c": 3},
    "2026-01-04": {"a": 5, "b": 4},
}


def prices_of(spark: Any, asked: Computation) -> pa.Table:
    rows = [
        {"item": item, "label": item, "price": price}
        for item, price in PRICES[asked.version].items()
    ]
    return pa.Table.from_pylist(rows, SCHEMA.to_arrow())


ITEMS = bounded_dataset(
    "items",
    input=QuerySource(prices_of, SCHEMA),
    key="item",
    partitions=2,
    versions=VersionPartitions("day", start="2026-01-01"),
    valid_from="name",
)
Part = tuple[str, int | None, datetime]
"""An item, its price, null where the day has none, and since when that was so."""


def dated(days: list[str]) -> list[Part]:
    """Return what these days say in plain Python, one part for what does not change from a day
    to the next.
    """
    parts: list[Part] = []
    for item in {item for day in days for item in PRICES[day]}:
        last: int | None = None
        for day in sorted(days):
            price = PRICES[day].get(item)
            if price != last:
                parts.append((item, price, datetime.fromisoformat(day).replace(tzinfo=UTC)))
            last = price
    return sorted(parts, key=lambda part: (part[0], part[2]))


def materialised(lab: Lab, day: str) -> FinishedRun:
    """Materialise one partition, as the UI does."""
    job = lab.definitions(ITEMS).resolve_job_def("items_versions")
    return FinishedRun(
        job.execute_in_process(instance=lab.instance, partition_key=day), lab.instance
    )


@pytest.mark.lengthy
def test_partitions_in_any_order_are_read_over_time_as_their_days_say(tmp_path: Path) -> None:
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=1)
        for built in (
            ["2026-01-04"],
            ["2026-01-04", "2026-01-01"],
            ["2026-01-04", "2026-01-01", "2026-01-03"],
        ):
            assert list(materialised(lab, built[-1]).made) == [f"items/{built[-1]}"]
            expected = dated(built)
            with open_dataset(lab.lake, ITEMS) as dataset:
                histories = [
                    (item, part.entry["price"] if part.entry else None, part.valid_from)
                    for item in sorted({item for item, _, _ in expected})
                    for part in dataset.history_of(item)
                ]
                table = polars_frame(dataset.over_time()).sort("item", "valid_from").collect()
                whole = table.select("item", "price", "valid_from", "valid_to", "is_current").rows()
            assert histories == expected
            assert whole == with_ends(expected)
        assert lab.store("items").require_current().sealed.name == "2026-01-04"


def with_ends(parts: list[Part]) -> list[tuple[Any, ...]]:
    """Return a row of a table of type 2 for each part with a price; it is valid to the next part
    of its item.
    """
    rows = []
    for (item, price, since), following in zip(parts, [*parts[1:], None], strict=True):
        until = following[2] if following is not None and following[0] == item else None
        if price is not None:
            rows.append((item, price, since, until, until is None))
    return rows

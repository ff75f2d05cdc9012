"""The rate of a table that a step writes: whatever the partitions, it gets what it states, over
all running tasks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

RATE = 150.0
RECORDS = 600


def counting(folder: Path) -> TableWriteFunction[Any, Any, Any]:
    """A table that notes when how many records arrive; its class travels to tasks by value."""

    class Counting(TableWriteFunction[Any, Any, Any]):
        async def put(self, key: Any, value: Any, *args: object) -> None:
            await self.put_all([(key, value)])

        async def put_all(self, entries: Any, *args: object) -> None:
            with (folder / "arrivals").open("a") as file:
                file.write(f"{time.monotonic()} {len(entries)}\n")

        async def delete_all(self, keys: Any, *args: object) -> None:
            raise NotImplementedError

        async def delete(self, key: Any, *args: object) -> None:
            raise NotImplementedError

    return Counting()


@pytest.mark.parametrize(
    "partitions", [*(pytest.param(few, marks=pytest.mark.long) for few in (1, 4)), 16]
)
def test_a_table_gets_its_rate_from_any_number_of_partitions(
    step_world: StepWorld, tmp_path: Path, partitions: int
) -> None:
    step_world.stream("clicks", "k", partitions, k="string", v="int")
    step_world.send("clicks", *[(f"k{number}", number) for number in range(RECORDS)])
    app = Application("rated")
    table = RemoteTable(
        "sink", key="k", write_function=counting(tmp_path), rate_limit=RateLimit(None, RATE)
    )
    app.input_stream("lake.clicks").send_to(app.table(table))
    report = step_world.run(app)
    lines = [line.split() for line in (tmp_path / "arrivals").read_text().splitlines()]
    arrivals = sorted((float(at), int(count)) for at, count in lines)
    assert sum(count for _, count in arrivals) == RECORDS
    # A task that is stopped for a moment notes an arrival late, so a second of the rate is allowed
    # for. That no rate is lost is shown in simulated time (test_credits_over_runs.py).
    (first, count), (last, _) = arrivals[0], arrivals[-1]
    assert RECORDS - count <= RATE * 1.1 * (last - first) + RATE
    assert report.measured["sink"].store.rate_waits > 2.0


def test_a_budget_declared_with_two_rates_is_rejected_before_anything_is_read(
    step_world: StepWorld, tmp_path: Path
) -> None:
    step_world.stream("clicks", "k", 1, k="string", v="int")
    app = Application("rated")
    clicks = app.input_stream("lake.clicks")
    for name, rate in (("one", 10.0), ("two", 20.0)):
        limit = RateLimit(None, rate, budget="both")
        table = RemoteTable(name, key="k", write_function=counting(tmp_path), rate_limit=limit)
        clicks.send_to(app.table(table))
    with pytest.raises(ConfigurationError, match="both 10 and 20") as caught:
        step_world.run(app)
    assert caught.value.argument == "budget"

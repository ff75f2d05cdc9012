"""A replay of recorded versions sends again, byte for byte, what the first run sent; with Spark,
and with state.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from tests.orchestration.step_world import StepWorld

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

PRICES = unbounded_dataset("prices", input="lake.prices", key="shop", partitions=2)
LAST = Schema.of(shop="string", visitor="string")
WHO: dict[str, Any] = {"by": "ada", "reason": "an audit"}


def shopping() -> Application:
    """Visits with the price of their shop now, and who came last before: both of which move on with
    each batch.

    The second join meets what its own batch has sent before it.
    """
    app = Application("shopping", max_batch_records=100)
    last = app.local_table("last_visits", key="shop", schema=LAST, partitions=2)
    visits = app.input_stream("lake.visits", default_offset="oldest")
    before = visits.join(last, on="shop", how="left", prefix="before_")
    visits.send_to(last)
    (
        before.join(app.table(PRICES), on="shop", how="left")
        .join(last, on="shop", how="left", prefix="batch_")
        .send_to(app.output_stream("lake.sold", partitions=2, key="shop"))
    )
    return app


def sent(world: StepWorld, epoch: int) -> pa.Table:
    """Return what was sent in an epoch, by partition and in its order, without positions and
    times.
    """
    records = world.streams.read_arrow(world.streams.all_ranges("sold"))
    mine = records.filter(pc.equal(records["__epoch"], epoch))
    return mine.drop_columns(["__offset", "__epoch", "__timestamp"])


def test_the_output_is_that_of_the_first_run_though_datasets_and_state_have_moved_on(
    step_world: StepWorld,
) -> None:
    step_world.stream("visits", "shop", 2, visitor="string", shop="string")
    step_world.stream("prices", "shop", 2, shop="string", price="bigint")
    app = shopping()
    shops = ["a", "b", "c", "d", "e"]
    for day in range(2):
        step_world.send(
            "prices", *[(shop, day * 10 + number) for number, shop in enumerate(shops[: 2 + day])]
        )
        step_world.send("visits", *[(f"{day}-{number}", shops[number % 4]) for number in range(5)])
        step_world.run(app)
    step_world.send("prices", *[(shop, 99) for shop in shops])
    step_world.advance(PRICES)
    kept = dict(open_dataset(step_world.lake, "last_visits").items())
    startpoints = Startpoints(app, lake=step_world.lake)
    first = sent(step_world, 0)
    assert first.num_rows == 10
    with pytest.raises(
        ConfigurationError, match="joins read in 'last_visits' what the whole batch had sent"
    ):
        startpoints.request(
            "lake.visits.0",
            StartpointOldest(),
            until=StartpointSpecific(offset="1"),
            versions="recorded",
            **WHO,
        )
    startpoints.request(
        "lake.visits", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHO
    )
    step_world.run(app)
    assert sent(step_world, 1).equals(first)
    assert dict(open_dataset(step_world.lake, "last_visits").items()) == kept


HISTORY = unbounded_dataset(
    "fares", input="lake.fares", key="item", partitions=1, history="all", valid_from="since"
)
RATES = bounded_dataset(
    "rates",
    input="lake.rates",
    key="item",
    partitions=1,
    valid_from="%Y-%m-%d_%H",
    discard=DiscardPolicy(keep=1),
)
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def hour(number: float) -> datetime:
    return DAY + timedelta(hours=number)


def selling() -> Application:
    """Sales with the fare and the rate that were valid at their time."""
    app = Application("selling")
    (
        app.input_stream("lake.sales", default_offset="oldest")
        .join(app.table(HISTORY), on="item", as_of="at", how="left", select=["fare"])
        .join(app.table(RATES), on="item", as_of="at", how="left", select=["rate"])
        .send_to(app.output_stream("lake.sold_at", partitions=1))
    )
    return app


def test_replays_by_time_join_current_served_or_recorded_versions(step_world: StepWorld) -> None:
    """After the first run the past is corrected, and what is current moves on: three replays,
    three answers.
    """
    step_world.stream("sales", "item", 1, item="string", at="timestamp")
    step_world.stream("fares", "item", 1, item="string", since="timestamp", fare="bigint")
    step_world.stream("rates", "item", 1, item="string", rate="bigint")
    app = selling()
    step_world.send("fares", ("a", hour(0), 10), ("a", hour(4), 11))
    step_world.send("rates", ("a", 1), version="2026-01-01_00")
    step_world.send("sales", ("a", hour(2)))
    step_world.run(app)
    step_world.send("fares", ("a", hour(1), 9), ("a", hour(5), 13))
    step_world.send("rates", ("a", 2), version="2026-01-01_01")
    step_world.advance(RATES)
    step_world.send("rates", ("a", 3), version="2026-01-01_05")
    step_world.advance(HISTORY, RATES)

    startpoints = Startpoints(app, lake=step_world.lake)
    (displayed,) = startpoints.preview(
        "lake.sales", StartpointOldest(), until=StartpointUpcoming()
    ).previews
    assert displayed.versions == "as-of"
    for epoch, versions, fare, rate in (
        (1, None, 9, 2),
        (2, "current", 13, 3),
        (3, "recorded", 10, 1),
    ):
        asked: Any = {"versions": versions} if versions else {}
        startpoints.request(
            "lake.sales", StartpointOldest(), until=StartpointUpcoming(), **asked, **WHO
        )
        if versions == "recorded":
            expire_all_versions(step_world.lake, {"rates": RATES, "fares": HISTORY}, by="test")
        run_step(step_world.context(app))
        records = step_world.streams.read_arrow(step_world.streams.all_ranges("sold_at"))
        (row,) = records.filter(pc.equal(records["__epoch"], epoch)).to_pylist()
        assert (row["fare"], row["rate"]) == (fare, rate), versions

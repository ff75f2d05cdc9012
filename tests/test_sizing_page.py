"""The requests that the page on sizing promises are as many as a run makes."""

from __future__ import annotations

import re

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    Lake,
    LakeStreams,
    Schema,
    bounded_dataset,
    run_application,
)
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.doc_blocks import ROOT
from tests.faulty_store import FaultyStore

PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
RUNS = ("nothing to do", "one batch", "one batch and a new version of each dataset")


@pytest.mark.lengthy
@pytest.mark.parametrize(("column", "partitions", "datasets"), [(0, 2, 1), (1, 8, 1), (2, 8, 4)])
def test_a_run_makes_no_more_requests_than_the_page_on_sizing_says(
    column: int, partitions: int, datasets: int
) -> None:
    promised = [int(re.findall(r"\d+", _row(run))[column]) for run in RUNS]
    assert [
        made <= most for made, most in zip(_requests(partitions, datasets), promised, strict=True)
    ] == [True] * 3


def _row(run: str) -> str:
    (row,) = re.findall(rf"^\| {run} \|(.*)$", PAGE, re.MULTILINE)
    return row


def _requests(partitions: int, datasets: int) -> list[int]:
    """Return the number of requests of each of the runs, one after the other, after a first one.

    Manifests, which never change, are read once in a run.
    """
    store = FaultyStore(InMemoryStore())
    lake = Lake(store, "memory")
    streams = LakeStreams(lake)
    streams.create(
        "orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=partitions
    )
    app = Application("shop", engine="auto")
    orders = app.input_stream("lake.orders")
    for number in range(datasets):
        name = f"prices-{number}"
        streams.create(
            name, schema=Schema.of(k="string", price="int"), key=["k"], partitions=partitions
        )
        prices = bounded_dataset(name, input=f"lake.{name}", key="k", partitions=partitions)
        orders = orders.join(
            app.table(prices), on="k", how="left", select=[f"price as price_{number}"]
        )
    orders.send_to(app.output_stream("lake.out", partitions=partitions, key="k"))

    def deliver(version: int) -> None:
        entries = [{"k": str(key), "price": key + version} for key in range(100)]
        for number in range(datasets):
            streams.append(
                f"prices-{number}",
                entries,
                producer="shop",
                sequence=version,
                end_of_dataset=f"v{version}",
            )

    def order(sequence: int) -> None:
        streams.append(
            "orders",
            [{"k": str(n), "n": n} for n in range(300)],
            producer="till",
            sequence=sequence,
        )

    def requests_of_a_run() -> int:
        store.requests.clear()
        run_application(app, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, run="by-hand")
        manifests = [
            key for request, key in store.requests if request == "get" and "/manifests/" in key
        ]
        assert len(manifests) == len(set(manifests))
        return len(store.requests)

    deliver(1)
    order(1)
    requests_of_a_run()
    idle = requests_of_a_run()
    order(2)
    one_batch = requests_of_a_run()
    deliver(2)
    order(3)
    return [idle, one_batch, requests_of_a_run()]

"""What is made of a record by an application: its latest results, whatever operators lie between
and was replayed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
)
from dagster_adjunct.resources.streams.system import POSITION, SystemStreamPartition
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


def twice(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return frame.withColumn("n", F.explode(F.array(F.lit(1), F.lit(2))))


def application(least: int, limit: int = 1000) -> Application:
    """Numbers of at least `least`, joined and each twice, to `out`; what is even of these, from
    there, to `even`.
    """
    names = bounded_dataset("names", input="lake.names", key="k", partitions=2)
    app = Application("app", max_batch_records=limit)
    numbers = app.input_stream("lake.numbers", default_offset="oldest")
    out = app.output_stream("lake.out", partitions=3, key="n")
    even = app.output_stream("lake.even", partitions=2, key="v")
    joined = numbers.filter(f"v >= {least}").join(
        app.table(names), on="k", how="left", select=["name"]
    )
    made = joined.map("k", "v", "name").map(twice).partition_by("n", partitions=3).send_to(out)
    made.filter("v % 2 = 0").partition_by("v", partitions=2).send_to(even)
    return app


def ask(
    world: StepWorld,
    app: Application,
    partition: int,
    start: Startpoint,
    until: Startpoint | None = None,
    stream: str = "numbers",
) -> None:
    ssp = SystemStreamPartition("lake", stream, partition)
    request = StartpointRequest(ssp=ssp, startpoint=start, by="ada", reason="a test", until=until)
    open_startpoints(world.lake, app).write_startpoints([request])


def latest(world: StepWorld, stream: str) -> Counter[int]:
    """Return how often each number is among the latest, by Spark and by Arrow, which have to
    agree.
    """
    ranges = world.streams.all_ranges(stream)
    counts = Counter(world.streams.read_arrow(ranges, ["v"], epochs="latest")["v"].to_pylist())
    rows = world.streams.read(world.spark(), ranges, epochs="latest").collect()
    assert Counter(row.v for row in rows) == counts
    return counts


def placed(world: StepWorld) -> list[dict[int, int]]:
    """Return the numbers of the input by partition and offset."""
    table = world.streams.read_arrow(world.streams.all_ranges("numbers"))
    numbers: list[dict[int, int]] = [{}, {}]
    for row in table.select(["v", "__partition", "__offset"]).to_pylist():
        numbers[row["__partition"]][row["__offset"]] = row["v"]
    return numbers


# a chain of replays: below; streams alone: tests/resources/streams/test_latest.py
@pytest.mark.long
def test_the_latest_results_equal_those_of_the_last_read_of_each_record(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("numbers", "k", 2, k="string", v="int")
    world.stream("names", "k", 2, k="string", name="string")
    world.send("names", *[(f"k{i}", f"name {i}") for i in range(5)], version="one")
    world.send("numbers", *[(f"k{i % 7}", i) for i in range(24)])
    at = placed(world)
    # what the filter was when a record was read last
    least = [dict.fromkeys(numbers, 5) for numbers in at]

    def check() -> None:
        kept = [
            v
            for p, numbers in enumerate(at)
            for offset, v in numbers.items()
            if v >= least[p][offset]
        ]
        assert latest(world, "out") == Counter(dict.fromkeys(kept, 2))
        assert latest(world, "even") == Counter({v: 2 for v in kept if v % 2 == 0})

    world.run(application(5))
    check()

    # A bounded replay, in two batches, the second of which dies when both outputs have it but
    # nobody knows.
    app = application(15, limit=4)
    ask(world, app, 0, StartpointSpecific(offset="1"), StartpointSpecific(offset="7"))
    world.run(app, max_batches=1)
    least[0] |= dict.fromkeys(range(1, 5), 15)
    check()
    world.killed_when(app, "outputs")
    least[0] |= dict.fromkeys(range(5, 7), 15)
    check()
    assert world.run(app).caught_up  # as it was written down: nothing is added
    check()

    # An overlapping startpoint, of which one batch runs; then new records, and the rest.
    app = application(0, limit=6)
    ask(world, app, 0, StartpointSpecific(offset="3"))
    ask(world, app, 1, StartpointOldest())
    world.run(app, max_batches=1)
    last = BatchLog(world.lake, "app").read()[1].last
    assert last is not None
    for ssp, span in last.intent.ranges.items():
        least[ssp.partition] |= dict.fromkeys(range(int(span.start), int(span.end)), 0)
    check()
    world.send("numbers", ("k1", 100), ("k2", 101))
    at = placed(world)
    world.run(application(0))
    least = [
        {o: least[p].get(o, 0) if p == 0 and o < 3 else 0 for o in numbers}
        for p, numbers in enumerate(at)
    ]
    check()

    # A batch that is abandoned when an output has it: what is read again counts once.
    world.send("numbers", ("k3", 200), ("k4", 202))
    world.killed_when(application(0), "outputs")
    BatchLog(world.lake, "app").abandon(reason="a test", by="ada", skip=False)
    world.run(application(201))
    assert latest(world, "out")[200] == 0
    assert (latest(world, "out")[202], latest(world, "even")[202]) == (2, 2)
    assert (
        Counter(world.streams.read_arrow(world.streams.all_ranges("out"))["v"].to_pylist())[202]
        == 4
    )

    sources = world.streams.read_arrow(world.streams.all_ranges("even"), ["v"], positions=True)
    at = placed(world)
    for row in sources.select(["v", *POSITION]).to_pylist():
        partition = SystemStreamPartition.parse(row["__source"]).partition
        assert at[partition][row["__source_offset"]] == row["v"]


def test_a_function_that_loses_the_position_behind_an_output_is_refused(
    step_world: StepWorld,
) -> None:
    from dagster_adjunct.resources.errors import PlanningError
    from dagster_adjunct.resources.streams.system import RECORD_META

    step_world.stream("numbers", "k", 2, k="string", v="int")
    step_world.send("numbers", ("a", 1))
    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k")
    more = app.output_stream("lake.more", partitions=2, key="k")
    sent = app.input_stream("lake.numbers", default_offset="oldest").send_to(out)
    sent.map(lambda frame: frame.select("k", "v", *RECORD_META)).partition_by("k").send_to(more)
    with pytest.raises(PlanningError, match="returned records without __source, __source_offset"):
        step_world.run(app)


def test_results_of_replaced_records_are_replaced_along_a_chain(step_world: StepWorld) -> None:
    world = step_world
    world.stream("numbers", "k", 1, k="string", v="int")
    world.send("numbers", ("a", 1), ("b", 2))
    first, second = Application("app"), Application("second")
    first.input_stream("lake.numbers", default_offset="oldest").send_to(
        first.output_stream("lake.out", partitions=1)
    )
    second.input_stream("lake.out", default_offset="oldest").send_to(
        second.output_stream("lake.end", partitions=1)
    )
    world.run(first)
    world.run(second)
    assert latest(world, "end") == {1: 1, 2: 1}
    ask(world, first, 0, StartpointOldest())
    world.run(first)
    world.run(second)
    assert latest(world, "end") == {1: 1, 2: 1}
    assert len(world.rows("end")) == 4
    ask(world, first, 0, StartpointSpecific(offset="1"))
    world.run(first)
    with pytest.raises(
        ConfigurationError, match=r"lake\.out was replayed, and 'second' has not read all of it yet"
    ):
        latest(world, "end")
    ask(world, second, 0, StartpointSpecific(offset="3"), stream="out")
    world.run(second)
    assert latest(world, "end") == {1: 1, 2: 1}
    assert len(world.rows("end")) == 6

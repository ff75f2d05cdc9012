"""Open batches of which retention takes records: outputs that have the batch keep it, others get
what is left, once.

Nothing is read of a stream that is another one by then.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import (
    AdjunctError,
    OffsetOutOfRangeError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams, delete_stream
from dagster_adjunct.windows import Count, Tumbling
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.cli.commands import printed
from tests.orchestration.kafka_world import KafkaWorld
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import StepWorld
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

COLUMNS = {"k": "string", "v": "int"}
KEYS = "abcdef"


def sent(world: StepWorld, *numbers: int) -> set[tuple[str, int]]:
    """Send a record of each key for each number, an append each, and return them."""
    for number in numbers:
        world.send("numbers", *[(key, number) for key in KEYS])
    return {(key, number) for number in numbers for key in KEYS}


def retain_last(world: StepWorld, appends: int) -> None:
    """Have retention take all but the last appends of the input."""
    size = world.streams.describe("numbers")["bytes"]
    reported = world.streams.describe("numbers")["segments"]
    world.streams.configure(
        "numbers", retention=Retention(max_bytes=size * appends // reported + 1), compaction=None
    )
    world.streams.maintain("numbers")


def killed_at(world: StepWorld, app: Application, output: str) -> None:
    """Kill a run before it writes to this output."""

    def die(event: StepEvent) -> None:
        if event.what == "output" and event.detail["output"] == output:
            raise Crash(output)

    with pytest.raises(Crash):
        world.run(app, on_event=die)


def double(records: pa.RecordBatch, context: Any) -> pa.Table:
    return pa.table({"k": records["k"], "v": pc.multiply(records["v"], 2)})


def copying(on_lost: Any = "oldest") -> Application:
    """Copy the input to two streams, keep it in a local table, and have a function give the
    double.
    """
    app = Application("copying")
    numbers = app.input_stream("lake.numbers", on_lost=on_lost, default_offset="oldest")
    doubled = numbers.sink(double, returns=Schema.of(k="string", v="int"))
    numbers.send_to(app.output_stream("lake.first", partitions=2, key="k"))
    numbers.send_to(app.output_stream("lake.second", partitions=2, key="k"))
    doubled.send_to(app.output_stream("lake.doubled", partitions=2, key="k"))
    numbers.select("k", "v").send_to(
        app.local_table("newest", key="k", schema=Schema.of(k="string", v="int"), partitions=2)
    )
    return app


def rows(world: StepWorld, stream: str) -> list[tuple[str, int]]:
    return sorted((row["k"], row["v"]) for row in world.rows(stream))


@pytest.mark.parametrize(
    "output",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("lake.first", "lake.second")),
        "newest",
    ],
)
def test_what_an_output_has_of_a_batch_stays_and_others_get_what_is_left(
    step_world: StepWorld, output: str
) -> None:
    step_world.stream("numbers", "k", 2, **COLUMNS)
    lost, left = sent(step_world, 1), sent(step_world, 2, 3)
    killed_at(step_world, copying(), output)
    retain_last(step_world, 2)
    later = sent(step_world, 4)
    report = step_world.run(copying())
    assert report.counters["lake.numbers"] == {"lost_offsets": len(KEYS)}
    of_all, of_the_rest = sorted(lost | left | later), sorted(left | later)
    assert rows(step_world, "first") == (of_the_rest if output == "lake.first" else of_all)
    assert rows(step_world, "second") == (of_all if output == "newest" else of_the_rest)
    # What a function has returned was recorded before anything was written, and is used.
    assert rows(step_world, "doubled") == sorted((key, number * 2) for key, number in of_all)
    assert {
        key: entry["v"] for key, entry in open_dataset(step_world.lake, "newest").items()
    } == dict.fromkeys(KEYS, 4)


def test_a_batch_that_lost_all_its_records_ends_with_none(step_world: StepWorld) -> None:
    step_world.stream("numbers", "k", 2, **COLUMNS)
    sent(step_world, 1)
    killed_at(step_world, copying(), "lake.first")
    later = sent(step_world, 2)
    retain_last(step_world, 1)
    report = step_world.run(copying())
    assert (report.batches, report.counters["lake.numbers"]) == (2, {"lost_offsets": len(KEYS)})
    assert rows(step_world, "first") == rows(step_world, "second") == sorted(later)


@pytest.mark.parametrize("event_time", [None, "at"])
def test_tasks_do_not_read_a_stream_that_was_recreated_since_the_intent(
    step_world: StepWorld, event_time: str | None
) -> None:
    app = Application("app", few_records=0)
    app.input_stream("lake.times", event_time=event_time).send_to(
        app.output_stream("lake.out", partitions=1)
    )

    def fill(number: int) -> None:
        step_world.stream("times", "k", 1, k="string", v="int", at="timestamp")
        step_world.send("times", ("a", number, at(number)))

    def recreate(event: StepEvent) -> None:
        if event.what == "intent":
            streams = step_world.streams
            delete_stream(streams, "times", streams.state("times")[0], reason="a test", by="ada")
            fill(2)

    fill(1)
    with pytest.raises(OffsetOutOfRangeError, match="the open batch 1 ") as caught:
        step_world.run(app, on_event=recreate)
    assert (caught.value.application, caught.value.stream) == ("app", "lake.times")
    assert step_world.streams.list_streams() == ["times"]


@pytest.mark.lengthy
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "recreated"])
def test_an_input_that_goes_at_any_request_of_a_run_is_named(tmp_path: Path, again: bool) -> None:
    app = Application("app", engine="auto")
    app.input_stream("lake.times", default_offset="oldest").send_to(
        app.output_stream("lake.out", partitions=1)
    )
    named = 0
    for nth in range(1, 200):
        world = StepWorld(open_lake(tmp_path / f"{nth}" / "lake"), tmp_path / f"{nth}", IN_PROCESS)
        fill_times(world, 1)

        def delete(world: StepWorld = world) -> None:
            streams = world.streams
            delete_stream(streams, "times", streams.state("times")[0], reason="a test", by="ada")
            if again:
                fill_times(world, 2)

        store = FaultyStore(world.lake.store, [Fault("*", nth, "meanwhile", delete)])
        planned = world.context(app)
        runtime = replace(planned.runtime, lake=Lake(store, world.lake.id))
        runtime = replace(runtime, systems={"lake": LakeStreams(runtime.lake)})
        error: AdjunctError | None = None
        try:
            run_step(replace(planned, runtime=runtime))
        except (StreamNotFoundError, OffsetOutOfRangeError) as caught:
            error = caught
        if error is not None:
            assert error.facts["stream"] == "lake.times", nth
            named += 1
        else:
            assert [row["v"] for row in world.rows("out")] in ([1], [2]), nth
        if len(store.requests) < nth:
            break
    assert named > 10


def fill_times(world: StepWorld, number: int) -> None:
    world.stream("times", "k", 1, k="string", v="int", at="timestamp")
    world.send("times", ("a", number, at(number)))


# outputs and tables of state: test_what_an_output_has_of_a_batch_stays_and_others_get_what_is_left
@pytest.mark.long
@pytest.mark.parametrize("output", ["lake.counted", "counting-counted"])
def test_windows_count_what_is_left_of_a_batch(step_world: StepWorld, output: str) -> None:
    step_world.stream("numbers", "k", 2, at="timestamp", **COLUMNS)
    app = Application("counting")
    (
        app.input_stream("lake.numbers", event_time="at", on_lost="oldest", default_offset="oldest")
        .window(Tumbling(timedelta(seconds=10)), by="k", name="counted", aggregates={"n": Count()})
        .send_to(app.output_stream("lake.counted", partitions=2, key="k"))
    )
    for second in (1, 2, 3):
        step_world.send("numbers", *[(at(second), key, second) for key in KEYS])
    killed_at(step_world, app, output)
    retain_last(step_world, 2)
    step_world.send("numbers", *[(at(30), key, 30) for key in KEYS])
    step_world.run(app)
    assert sorted((row["k"], row["n"]) for row in step_world.rows("counted")) == [
        (key, 2) for key in KEYS
    ]


def test_the_commands_that_the_refusal_names_end_the_batch(
    step_world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, module = copying("fail"), ModuleType("copies")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "copies", module)
    step_world.stream("numbers", "k", 2, **COLUMNS)
    sent(step_world, 1)
    left = sent(step_world, 2)
    killed_at(step_world, app, "lake.first")
    retain_last(step_world, 1)
    for _ in range(2):
        with pytest.raises(OffsetOutOfRangeError) as refused:
            step_world.run(app)
        assert refused.value.application == "copying"
    commands = re.findall(r"adjunct (\S[^…]*) …", refused.value.next_step)
    assert [command.split()[:2] for command in commands] == [
        ["checkpoint", "abandon"],
        ["startpoint", "set"],
    ]
    for command in commands:
        more = ["--yes"] if "abandon" in command else []
        printed(step_world, *command.replace("MODULE:APP", "copies:app").split(), "ticket 7", *more)
    step_world.run(app)
    assert rows(step_world, "first") == rows(step_world, "second") == sorted(left)


@pytest.mark.server
@pytest.mark.parametrize("on_lost", ["oldest", "fail"])
def test_retention_of_a_topic_that_passes_an_open_batch(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession, on_lost: Any
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    topic = kafka.new_topic(2)
    topics = {"orders": KafkaTopic(topic, Json("n INT"), KeyText("k"))}
    world = KafkaWorld(
        open_lake(tmp_path / "lake"), tmp_path, lambda: spark, server=kafka, topics=topics
    )
    app = Application("copying")
    app.input_stream("kafka.orders", on_lost=on_lost, default_offset="oldest").send_to(
        app.output_stream("lake.copied", partitions=1, key="k")
    )
    for number in range(5):
        world.produce("orders", 0, [(None, "a", {"n": number})])
        world.produce("orders", 1, [(None, "b", {"n": number})])
    killed_at(world, app, "lake.copied")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    next(iter(admin.delete_records([TopicPartition(topic, 0, 3)]).values())).result(30)
    if on_lost == "fail":
        with pytest.raises(OffsetOutOfRangeError) as refused:
            world.run(app)
        found = (
            refused.value.stream,
            refused.value.partition,
            refused.value.offset,
            refused.value.oldest,
        )
        assert found == ("kafka.orders", 0, "0", "3")
        assert "adjunct checkpoint abandon copying" in refused.value.next_step
        return
    report = world.run(app)
    assert report.counters["kafka.orders"] == {"lost_offsets": 3}
    copied = sorted((row["k"], row["n"]) for row in world.rows("copied"))
    assert copied == [("a", 3), ("a", 4), *(("b", number) for number in range(5))]

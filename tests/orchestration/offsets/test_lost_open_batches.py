"""Open batches whose records retention takes: ended with what is left where that is declared,
else refused.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.startpoints import take_back_startpoints
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld, two_partitions

S0, S1, T0 = (SystemStreamPartition.parse(text) for text in ("fake.s.0", "fake.s.1", "fake.t.0"))


def reader(on_lost: str = "oldest", *streams: str, name: str = "app") -> Application:
    app = Application(name)
    for stream in streams or ("fake.s",):
        app.input_stream(stream, on_lost=on_lost, default_offset="oldest")  # type: ignore[arg-type]
    return app


def dies_open(world: OffsetsWorld, app: Application) -> None:
    """Let a run die when its intent is stored, before it reads anything."""

    def die(event: StepEvent) -> None:
        if event.what == "intent":
            raise Crash("open")

    with pytest.raises(Crash, match="open"):
        world.run(app, on_event=die)
    assert world.state(app).open is not None


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_an_open_batch_goes_on_with_what_is_left_and_counts_what_is_lost(left: int) -> None:
    world, app = two_partitions(), reader()
    dies_open(world, app)
    world.fake.write("s", 0, 4, 5, 6)
    world.fake.retain_from("s", 0, left)
    reported: list[str] = []
    ranges = world.reads(app, on_event=lambda event: reported.append(event.summary()))
    read = {
        (ssp, n)
        for batch in ranges
        for ssp, (start, end) in batch.items()
        for n in range(int(start[1:]), int(end[1:]))
    }
    assert read == {(S0, n) for n in range(left, 6)} | {(S1, n) for n in range(3)}
    assert ranges[0] == {S1: ("@0", "@3")} | ({S0: (f"@{left}", "@3")} if left < 3 else {})
    assert world.state(app).totals["fake.s"] == {"lost_offsets": left}
    assert [
        text
        for text in reported
        if "batch 1" in text and f"@{left}, the oldest left" in text and "fake.s.0" in text
    ]
    assert world.state(app).checkpoint == {S0: "@6", S1: "@3"}
    assert world.reads(app) == []


def test_what_is_lost_of_an_open_batch_is_in_the_history() -> None:
    world, app = two_partitions(), reader()
    dies_open(world, app)
    world.fake.retain_from("s", 1, 2)
    world.run(app)
    notes = [state.note for _, state in BatchLog(world.lake, "app").history(None) if state.note]
    assert notes == ["lost to retention: fake.s.1 from @0 up to @2"]


def test_more_that_is_lost_while_the_batch_is_open_is_counted_once() -> None:
    world, app = two_partitions(), reader()
    dies_open(world, app)
    world.fake.retain_from("s", 0, 1)
    dies_open(world, app)
    world.fake.retain_from("s", 0, 2)
    assert world.reads(app) == [{S0: ("@2", "@3"), S1: ("@0", "@3")}]
    assert world.state(app).totals["fake.s"] == {"lost_offsets": 2}


def test_retention_that_is_faster_than_the_run_that_began_the_batch_is_matched_in_it() -> None:
    world, app = two_partitions(), reader()
    tried: list[Batch] = []

    def retained_first(batch: Batch) -> None:
        tried.append(batch)
        if len(tried) == 1:
            world.fake.retain_from("s", 0, 2)
            raise OffsetOutOfRangeError("the oldest left is @2.", "")

    world.output.before = retained_first
    assert world.reads(app) == [{S0: ("@2", "@3"), S1: ("@0", "@3")}]
    assert [batch.number for batch in tried] == [1, 1]


def test_an_offset_that_is_out_of_range_for_another_reason_ends_the_run() -> None:
    world, app = two_partitions(), reader()

    def refused(batch: Batch) -> None:
        raise OffsetOutOfRangeError("something else.", "")

    world.output.before = refused
    with pytest.raises(OffsetOutOfRangeError, match="something else"):
        world.run(app)


def test_without_a_rule_the_error_names_what_ends_the_batch_and_following_it_does() -> None:
    world, app = two_partitions(), reader("fail")
    dies_open(world, app)
    world.fake.retain_from("s", 0, 2)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(app)
    error = refused.value
    assert (error.application, error.stream, error.partition, error.offset, error.oldest) == (
        "app",
        "fake.s",
        0,
        "@0",
        "@2",
    )
    assert "adjunct checkpoint abandon app --reason …" in error.next_step
    assert "adjunct startpoint set MODULE:APP fake.s.0 --oldest --reason …" in error.next_step
    BatchLog(world.lake, "app").abandon(reason="ticket 7", by="ada", skip=False)
    world.ask(app, S0, StartpointOldest)
    assert world.reads(app) == [{S0: ("@2", "@3"), S1: ("@0", "@3")}]


def test_without_a_rule_declaring_one_ends_the_batch() -> None:
    world = two_partitions()
    dies_open(world, reader("fail"))
    world.fake.retain_from("s", 0, 2)
    assert world.reads(reader("oldest")) == [{S0: ("@2", "@3"), S1: ("@0", "@3")}]
    assert world.state(reader()).totals["fake.s"] == {"lost_offsets": 2}


def test_each_input_of_an_open_batch_goes_by_its_own_rule() -> None:
    world, app = two_partitions(), Application("app")
    world.fake.make("t", 1)
    world.fake.write("t", 0, 1, 2)
    app.input_stream("fake.s", on_lost="oldest")
    app.input_stream("fake.t")
    dies_open(world, app)
    world.fake.retain_from("s", 0, 1)
    world.fake.retain_from("t", 0, 1)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(app)
    assert refused.value.stream == "fake.t"
    assert "fake.s" not in refused.value.problem


def test_a_startpoint_at_the_oldest_in_an_open_batch_begins_at_what_is_left() -> None:
    world, app = two_partitions(), reader("fail")
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    dies_open(world, app)
    world.fake.retain_from("s", 0, 1)
    assert world.reads(app) == [{S0: ("@1", "@3")}]
    assert world.state(app).offsets.epochs.main == {S0: 1}
    assert world.state(app).totals == {}
    assert world.fanned_out(app) == {}


def test_an_open_batch_of_a_replay_that_retention_has_passed_ends_by_the_advice() -> None:
    world, app = two_partitions(), reader("oldest")
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=StartpointUpcoming())
    dies_open(world, app)
    world.fake.retain_from("s", 0, 1)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(app)
    assert "adjunct checkpoint abandon app --reason …" in refused.value.next_step
    assert "adjunct startpoint clear MODULE:APP fake.s.0 --reason …" in refused.value.next_step
    BatchLog(world.lake, "app").abandon(reason="ticket 7", by="ada", skip=False)
    take_back_startpoints(world.lake, app, [S0], by="ada", reason="ticket 7")
    world.fake.write("s", 1, 4)
    assert world.reads(app) == [{S1: ("@3", "@4")}]


def test_an_open_batch_that_reads_past_the_end_of_its_stream_names_what_ends_it() -> None:
    world, app = two_partitions(), reader()
    dies_open(world, app)
    del world.fake.streams["s"].partitions[1].times[1:]
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(app)
    assert (refused.value.partition, refused.value.offset, refused.value.upcoming) == (
        1,
        "@3",
        "@1",
    )
    assert "adjunct checkpoint abandon app --reason …" in refused.value.next_step
    BatchLog(world.lake, "app").abandon(reason="ticket 7", by="ada", skip=False)
    assert world.reads(app) == [{S0: ("@0", "@3"), S1: ("@0", "@1")}]


def test_a_stream_that_is_read_no_more_and_deleted_keeps_no_open_batch_from_ending() -> None:
    world = two_partitions()
    world.fake.make("t", 1)
    world.fake.write("t", 0, 1, 2)
    dies_open(world, reader("fail", "fake.s", "fake.t"))
    gone = world.fake.streams.pop("t")
    only_s = reader("fail", "fake.s")
    assert world.reads(only_s) == [{S0: ("@0", "@3"), S1: ("@0", "@3")}]
    assert world.state(only_s).checkpoint[T0] == "@0", "nobody has read it"
    world.fake.streams["t"] = gone
    assert world.reads(reader("fail", "fake.s", "fake.t")) == [{T0: ("@0", "@2")}]

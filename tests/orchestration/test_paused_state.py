"""A run with state, in a local table, a window and a join of two streams, paused at any stage of a
batch and woken: state and outputs are those of runs without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    LeaseLostError,
    RunLeaseLostError,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.windows import Count, Sum, Tumbling
from tests.faulty_store import WRITES, Fault, FaultyStore
from tests.orchestration.paused_runs import PausedWorld
from tests.rounds import rounds

OUTPUTS = ("compared", "sums", "pairs")


def stateful(world: PausedWorld, first: bool) -> Application:
    app = Application("sets", engine="spark")
    records = app.input_stream("lake.changes", default_offset="oldest", event_time="at")
    seen = app.local_table("seen", key="k", schema=Schema.of(k="string", n="bigint"), partitions=2)
    before = records.join(seen, on="k", select=["n as before"], how="left")
    before.send_to(app.output_stream("lake.compared", partitions=2, key="k"))
    records.send_to(seen, deleted="gone")
    sums = records.window(
        Tumbling(timedelta(seconds=40)),
        by="k",
        name="sums",
        aggregates={"total": Sum("n"), "records": Count()},
    )
    sums.send_to(app.output_stream("lake.sums", partitions=2, key="k"))
    pairs = records.join_stream(
        records, on="k", within=timedelta(seconds=70), name="pairs", select=["n as other"]
    )
    pairs.send_to(app.output_stream("lake.pairs", partitions=2, key="k"))
    return app


def left_in(world: PausedWorld) -> dict[str, Any]:
    left: dict[str, Any] = {}
    for stream in OUTPUTS:
        rows = world.streams.read_arrow(world.streams.all_ranges(stream)).to_pylist()
        displayed = [{k: v for k, v in row.items() if not k.startswith("__")} for row in rows]
        left[stream] = sorted(displayed, key=str)
    seen = StoredVersions(world.lake, "seen").require_current()
    state = BatchLog(world.lake, "sets").read().state
    left["seen"] = {key: entry["n"] for key, entry in seen.items()}
    return left | {"open": state.open, "at": state.checkpoint}


def end(world: PausedWorld) -> dict[str, Any]:
    """Return what is left once a further round of records has closed what was open."""
    world.send()
    world.run("closes")
    return left_in(world)


@pytest.fixture
def worlds(tmp_path: Path, spark: Any) -> Iterator[PausedWorld]:
    def new() -> Iterator[PausedWorld]:
        for number in range(10_000):
            store = open_lake(tmp_path / f"lake{number}").store
            yield PausedWorld(stateful, store, lambda: spark)

    return new()


@pytest.mark.spark
@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.timeout(1800)
def test_state_and_its_results_are_those_without_a_pause(worlds: Iterator[PausedWorld]) -> None:
    whole = next(worlds)
    counted = FaultyStore(whole.store)
    whole.run("first", Lake(counted, whole.lake.id))
    whole.go_on()
    expected, requests = left_in(whole), counted.requests
    assert all(expected[stream] for stream in OUTPUTS)
    finished = end(whole)
    writes = [nth for nth, (made, _) in enumerate(requests, 1) if made in WRITES]
    for nth in rounds([writes[2 * len(writes) // 3]], writes[1::5]):
        world = next(worlds)
        pause = Fault("*", nth, "meanwhile", action=world.pause)
        error = world.run_paused(Lake(FaultyStore(world.store, [pause]), world.lake.id))
        made = (nth, requests[nth - 1], error)
        assert world.paused, made
        assert error is None or isinstance(
            error, RunLeaseLostError | CommitConflictError | LeaseLostError
        ), made
        assert left_in(world) == expected, made
        assert end(world) == finished, made


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.rounds
@pytest.mark.timeout(1800)
def test_no_state_is_committed_by_a_run_that_was_paused_at_a_stage_of_a_batch(
    worlds: Iterator[PausedWorld],
) -> None:
    stages: list[str] = []
    whole = next(worlds)
    whole.run("first", on_event=lambda event: stages.append(describe(event)))
    whole.go_on()
    expected = left_in(whole)
    outputs = [stage for stage in dict.fromkeys(stages) if stage.startswith("output")]
    assert len(outputs) > len(OUTPUTS), "local tables are outputs, too"
    for stage in rounds(outputs[-1:], ["intent", *outputs, "outputs"]):
        world = next(worlds)

        def pause_at(event: object, stage: str = stage, world: PausedWorld = world) -> None:
            if describe(event) == stage:
                world.pause()

        error: AdjunctError | None = world.run_paused(on_event=pause_at)
        assert isinstance(error, RunLeaseLostError | CommitConflictError | LeaseLostError), stage
        assert left_in(world) == expected, stage


def describe(event: object) -> str:
    if not isinstance(event, StepEvent):
        return ""
    return f"{event.what} {event.detail.get('output', '')}".strip()

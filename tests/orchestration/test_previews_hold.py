"""What the preview of startpoints says is what the next run reads: drawn requests, one after the
other, with and without an end.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct import Application, open_lake
from dagster_adjunct.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import (
    StartpointOldest,
    Startpoints,
    StartpointSpecific,
    StartpointUpcoming,
)
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

pytestmark = pytest.mark.lengthy
PARTITIONS = 2


def application() -> Application:
    app = Application("copies", engine="auto", max_batch_records=7)
    out = app.output_stream("lake.copy", partitions=1, key="n")
    app.input_stream("lake.r", default_offset="oldest").map("k", "n").send_to(out)
    return app


class World:
    """A lake with records whose numbers are unique, and an application that copies them."""

    def __init__(self, folder: Path, dice: Random) -> None:
        self.dice = dice
        self.world = StepWorld(open_lake(folder / "lake"), folder, IN_PROCESS)
        self.world.stream("r", "k", PARTITIONS, k="string", n="bigint")
        self.app = application()
        self.sent = 0

    @property
    def startpoints(self) -> Startpoints:
        return Startpoints(self.app, lake=self.world.lake)

    def send(self) -> None:
        number = self.dice.randrange(0, 9)
        rows = [(f"k{self.dice.randrange(6)}", self.sent + one) for one in range(number)]
        self.sent += number
        if rows:
            self.world.send("r", *rows)

    def records(self) -> dict[int, list[int]]:
        """Return the numbers in each partition, by offset."""
        streams = self.world.streams
        found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        for ssp, records in streams.all_ranges("r").items():
            rows = streams.read_arrow({ssp: records}).to_pylist()
            found[ssp.partition] = [row["n"] for row in rows]
        return found

    def copied(self) -> list[int]:
        try:
            return [row["n"] for row in self.world.rows("copy")]
        except StreamNotFoundError:
            return []

    def run(self) -> list[int]:
        """Run the application; return the numbers that it has copied, in order."""
        before = len(self.copied())
        self.world.run(self.app)
        return self.copied()[before:]

    def position(self, size: int) -> Any:
        return self.dice.choice(
            [
                StartpointOldest(),
                StartpointUpcoming(),
                StartpointSpecific(str(self.dice.randrange(size + 1))),
            ]
        )


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_a_run_reads_what_the_preview_of_its_startpoints_says(tmp_path: Path, seed: int) -> None:
    dice = Random(seed)
    world = World(tmp_path, dice)
    world.send()
    world.send()
    if dice.random() < 0.8:
        world.run()
    for _ in range(4):
        world.send()
        records = world.records()
        partition = dice.randrange(PARTITIONS)
        size = len(records[partition])
        position = world.position(size)
        until = StartpointSpecific(str(dice.randrange(size + 1))) if dice.random() < 0.4 else None
        asked = {"until": until} if until is not None else {}
        name = f"lake.r.{partition}"
        before = {
            ssp.partition: int(offset)
            for ssp, offset in world.world.state(world.app).checkpoint.items()
        }
        seen = world.startpoints.preview(name, position, **asked)
        (preview,) = seen.previews
        refused = [note for note in seen.notes if note.startswith("would be rejected")]
        refused += [preview.error] if preview.error else []
        try:
            done = world.startpoints.request(name, position, **asked, by="test", reason="to see")
        except ConfigurationError:
            assert refused
            expected = []
        else:
            assert refused == []
            assert done.previews[0].effect == preview.effect
            start, end = int(preview.start or 0), int(preview.end or 0)
            expected = records[partition][start:end]
            assert preview.offsets == len(expected)
            known = before.get(partition)
            if until is None and known is not None:
                assert preview.moved == start - known
            if until is not None:
                expected = expected + records[partition][known or 0 :]
        others = [
            number
            for other, numbers in records.items()
            if other != partition or refused
            for number in numbers[before.get(other, 0) :]
        ]
        assert sorted(world.run()) == sorted([*expected, *others]), (preview.effect, name)


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(4, 200)))
def test_of_startpoints_at_one_partition_those_are_replaced_that_the_preview_names(
    tmp_path: Path, seed: int
) -> None:
    dice = Random(seed)
    world = World(tmp_path, dice)
    for _ in range(3):
        world.send()
    if dice.random() < 0.8:
        world.run()
    records = world.records()
    asked: dict[int, tuple[int, int | None]] = {}
    for _ in range(dice.randrange(1, 5)):
        partition = dice.randrange(PARTITIONS)
        size = len(records[partition])
        start = dice.randrange(size + 1)
        until = dice.randrange(start, size + 1) if dice.random() < 0.4 else None
        name = f"lake.r.{partition}"
        given: dict[str, Any] = {"replace": dice.random() < 0.5}
        if until is not None:
            given["until"] = StartpointSpecific(str(until))
        seen = world.startpoints.preview(name, StartpointSpecific(str(start)), **given)
        is_refused = any("would be rejected" in note for note in seen.notes)
        assert bool(seen.replaced) == (partition in asked)
        try:
            world.startpoints.request(
                name, StartpointSpecific(str(start)), **given, by="test", reason="to see"
            )
        except ConfigurationError:
            assert is_refused
        else:
            assert not is_refused
            asked[partition] = (start, until)
    checkpoint = world.world.state(world.app).checkpoint
    known = {ssp.partition: int(offset) for ssp, offset in checkpoint.items()}
    expected: list[int] = []
    for partition, numbers in records.items():
        start, until = asked.get(partition, (known.get(partition, 0), None))
        expected += numbers[start:until]
        if until is not None:
            expected += numbers[known.get(partition, 0) :]
    assert sorted(world.run()) == sorted(expected)

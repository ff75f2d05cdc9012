"""Drawn applications, computed without Spark, leave what plain Python makes of their records,
whenever their runs die.

A failure names its seed; `ADJUNCT_DRAWN=SEED` tells that story only.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.orchestration.drawn_batches import KEYS, Left, Node, Record, Source
from tests.orchestration.drawn_columns import COLUMNS
from tests.orchestration.drawn_story import Story
from tests.orchestration.step_world import ByTasks, StepWorld
from tests.rounds import rounds

IN_A_TEST = rounds(50, 100)

Seen = tuple[tuple[Any, ...], bool, int, Source | None]


def _seen(row: dict[str, Any], sourced: bool) -> Seen:
    source = None
    if sourced:
        stream, _, partition = row["__source"].rpartition(".")
        source = Source(stream, int(partition), row["__source_offset"], row["__source_epoch"])
    return tuple(row[name] for name in COLUMNS), row["__tombstone"], row["__epoch"], source


def _wanted(record: Record, sourced: bool) -> Seen:
    source = record.source
    return (
        tuple(record.row[name] for name in COLUMNS),
        record.tombstone,
        source.epoch,
        source if sourced else None,
    )


def check(story: Story) -> None:
    """Check what the batches have left, and that they have read everything."""
    assert not story.asked
    for ssp in [
        each for node in story.inputs for each in story.world.streams.all_ranges(node.name)
    ]:
        assert story.positions.get(ssp, 0) == story.end(ssp)
    left, totals = computed(story), story.state.totals
    for node in story.drawn.of_kind("send"):
        check_stream(story, node, left.sent.get(node.name, []))
        assert totals.get(f"lake.{node.name}", {}).get("rows", 0) == len(
            left.sent.get(node.name, [])
        )
    assert stored(story) == {
        node.name: left.tables.get(node.name, {}) for node in story.drawn.of_kind("table")
    }
    for node in story.drawn.of_kind("table"):
        if node.refuses and story.batches:
            check_letters(story, node, left)
    for node in story.drawn.of_kind("join", "lookup"):
        counted = [
            its
            for name, its in totals.items()
            if name.startswith("join") and name.endswith(f"-{node.name}")
        ]
        expected = [left.counted[node.name]] if story.batches else []
        assert [[its["rows"], its["unmatched"]] for its in counted] == expected


def computed(story: Story) -> Left:
    """Return what is left of the batches by plain Python."""
    inputs, left = {node.name: read(story, node.name) for node in story.inputs}, Left()
    targets = {node.name: node.target for node in story.drawn.of_kind("join")}
    for number, intent in sorted(story.batches.items()):
        records: dict[str, list[Record]] = {name: [] for name in inputs}
        for ssp, span in intent.ranges.items():
            epoch = intent.epochs.get(ssp, 0)
            for row, tombstone, offset in inputs[ssp.stream][ssp.partition][
                int(span.start) : int(span.end)
            ]:
                source = Source(str(ssp).rpartition(".")[0], ssp.partition, offset, epoch)
                records[ssp.stream].append(Record(row, tombstone, source))

        def found(
            name: str, key: tuple[Any, ...], number: int = number, intent: Intent = intent
        ) -> Any:
            if name in targets:
                return story.versions[targets[name], intent.versions[targets[name]]].get(key)
            return story.lookups[name].held[number].get(key if len(key) > 1 else key[0])

        left.compute(story.drawn, records, found)
    return left


def read(story: Story, name: str) -> list[list[tuple[dict[str, Any], bool, int]]]:
    """Return the records of an input by partition."""
    partitions: list[list[tuple[dict[str, Any], bool, int]]] = [[], [], []]
    for row in story.world.streams.read_arrow(story.world.streams.all_ranges(name)).to_pylist():
        record = {column: row[column] for column in COLUMNS}
        partitions[row["__partition"]].append((record, row["__tombstone"], row["__offset"]))
    return partitions


def check_stream(story: Story, node: Node, expected: Sequence[Record]) -> None:
    """Check the records of an output; those of a key are together, and in order where the
    input's order is.
    """
    sourced = node.made_of is not None
    streams = story.world.streams
    if node.name not in streams.list_streams():
        assert not story.batches
        return
    found = streams.read_arrow(streams.all_ranges(node.name), positions=True).to_pylist()
    there = [(row["__partition"], _seen(row, sourced)) for row in found]
    wanted = [_wanted(record, sourced) for record in expected]
    difference = Counter(displayed for _, displayed in there)
    difference.subtract(Counter(wanted))
    assert {displayed: count for displayed, count in difference.items() if count} == {}
    places: dict[tuple[Any, ...], int] = {}
    key = [list(COLUMNS).index(name) for name in KEYS[node.number - 1]]
    for partition, displayed in there:
        assert places.setdefault(tuple(displayed[0][at] for at in key), partition) == partition
    for partition in range(node.number if story.drawn.has_order(node) else 0):
        of_partition = [
            displayed
            for displayed in wanted
            if places[tuple(displayed[0][at] for at in key)] == partition
        ]
        assert [displayed for place, displayed in there if place == partition] == of_partition


def check_letters(story: Story, node: Node, left: Left) -> None:
    """Check the dead letters; records that others of their key follow in a batch may not have
    been sent alone.
    """
    keys = [json.loads(row["key"]) for row in story.world.rows(f"{node.name}-letters")]
    there = Counter(tuple(key) if len(node.on) > 1 else (key,) for key in keys)
    least, most = Counter[Any](), Counter[Any]()
    for (name, key, _), refused in left.refused.items():
        least[key] += name == node.name and refused[-1]
        most[key] += name == node.name and sum(refused)
    assert least <= there <= most


def stored(story: Story) -> dict[str, dict[Any, dict[str, Any]]]:
    """Return the records of the tables by key."""
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    with closing(sqlite3.connect(story.file)) as connection:
        connection.row_factory = sqlite3.Row
        for node in story.drawn.of_kind("table"):
            exists = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = ?", [node.name]
            ).fetchall()
            rows = map(dict, connection.execute(f"SELECT * FROM {node.name}") if exists else [])
            found[node.name] = {tuple(row.pop(name) for name in node.on): row for row in rows}
    return found


def left_by(story: Story) -> dict[str, Any]:
    """Return all that is compared of engines, which differ in the time of an append and the
    number of requests.
    """
    totals = {
        name: {it: n for it, n in its.items() if it not in ("requests", "successes")}
        for name, its in story.state.totals.items()
    }
    left: dict[str, Any] = {"tables": stored(story), "counters": totals}
    for node in story.drawn.of_kind("send"):
        streams = story.world.streams
        if node.name in streams.list_streams():
            records = streams.read_arrow(
                streams.all_ranges(node.name), positions=True
            ).drop_columns(["__timestamp"])
            digests = [sent.digest for sent in streams.state(node.name)[1].producers["drawn"]]
            left[node.name] = digests, records.to_pylist()
    return left


def seeds(begin: int, count: int) -> range:
    """Return this many seeds, or the one that is asked for."""
    only = os.environ.get("ADJUNCT_DRAWN")
    return range(begin, begin + count) if only is None else range(int(only), int(only) + 1)


@contextmanager
def named(seed: int) -> Iterator[None]:
    """Say which story an error is from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"ADJUNCT_DRAWN={seed} tells this story again")
        raise


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("part", range(rounds(1, 100)))
def test_drawn_applications_leave_what_python_makes_of_their_records(
    part: int, tmp_path: Path
) -> None:
    for seed in seeds(part * IN_A_TEST, IN_A_TEST):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with named(seed):
            lake = open_lake(folder / "lake" if seed % 10 == 0 else f"memory://drawn-{seed}")
            kept = SmallBatchesInProcess()  # with the entries that it has read, as a run that stays
            story = Story(
                StepWorld(lake, folder, IN_PROCESS), seed, lambda attempt, kept=kept: kept
            )  # type: ignore[misc]
            story.begin()
            story.go_on()
            check(story)
        shutil.rmtree(folder)


def alternating(*engines: type[BatchEngine]) -> Callable[[int], BatchEngine]:
    """Return the engines of the runs, which take turns."""
    return lambda attempt: engines[attempt % len(engines)]()


@pytest.mark.spark
@pytest.mark.rounds
@pytest.mark.parametrize("seed", seeds(0, rounds(1, 60)))
def test_both_engines_leave_the_same_of_drawn_applications(
    step_world: StepWorld, seed: int, tmp_path: Path
) -> None:
    first = Story(step_world, seed, alternating(BatchEngine, SmallBatchesInProcess, ByTasks))
    first.begin()
    folder = tmp_path / "twin"
    shutil.copytree(step_world.folder, folder, ignore=shutil.ignore_patterns("twin"))
    twin = replace(
        step_world,
        lake=open_lake(folder / "lake"),
        folder=folder,
        sequences=dict(step_world.sequences),
    )
    second = first.on_a_copy(twin, alternating(SmallBatchesInProcess, ByTasks, BatchEngine))
    left: list[Any] = []
    for story in (first, second):
        with named(seed):
            story.go_on()
            check(story)
            left.append(left_by(story))
    assert left[0] == left[1]

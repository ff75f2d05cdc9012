"""Spark and this process make the same table of the same stream: rows, counters, positions, dead
letters, refusals.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.orchestration.code_location.resources import SparkResource
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.session import session_scope
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.facts import (
    DEAD,
    KEYS,
    NAME,
    PARTITIONS,
    TENFOLD,
    Fact,
    facts_in,
    send,
    table_of,
)

CASES: dict[str, dict[str, Any]] = {
    "by offset": {},
    # with dead letters it is the next
    "by a column, late changes counted": {"order_by": "at", "keep_tombstones": 4},
    "dead letters": {
        "order_by": "at",
        "keep_tombstones": 4,
        "on_bad_change": DeadLetters(f"lake.{DEAD}"),
    },
}

LETTERS = ["dataset", "stream", "partition", "offset", "reason", "value"]


def some_facts(chance: random.Random, *, bad: bool) -> list[Fact]:
    return [
        (
            None if bad and chance.random() < 0.1 else chance.choice(KEYS),
            chance.randrange(30),
            None if chance.random() < 0.3 else chance.randrange(100),
        )
        for _ in range(8)
    ]


def rewound(world: World, spec: Any, starts: Sequence[int]) -> Any:
    """Apply changes again from these offsets on; what refuses that is told instead."""
    positions = {
        SystemStreamPartition("lake", NAME, number): StartpointSpecific(
            offset=str(start), id=f"s{number}-{start}"
        )
        for number, start in enumerate(starts)
    }
    try:
        return rewind_dataset(
            spec,
            lake=world.lake,
            systems=world.systems,
            spark=world.spark,
            positions=positions,
            reason="again",
            by="test",
        ).action
    except AdjunctError as error:
        return str(error)


def state(world: World) -> dict[str, Any]:
    """Return all that a table holds and says of itself, but for times and ids."""
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    assert manifest.version is not None
    files = [
        (generation.id, file.bucket, file.rows, file.digest, file.min_key, file.max_key, file.stats)
        for generation in manifest.version.generations
        for file in generation.files
    ]
    letters: list[Any] = []
    if DEAD in world.streams.list_streams():
        dead = world.streams.read_arrow(world.streams.all_ranges(DEAD), LETTERS).to_pylist()
        letters = [[letter[name] for name in LETTERS] for letter in dead]
    return {
        "entries": dict(StoredVersions(world.lake, NAME).require_current().items()),
        "files": files,
        "counters": manifest.counters,
        "rows": manifest.version.rows,
        "horizon": manifest.horizon,
        "offsets": manifest.offsets,
        "letters": letters,
    }


@pytest.mark.spark
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("by offset", "by a column, late changes counted")
        ),
        "dead letters",
    ],
)
def test_any_history_makes_the_same_table_by_both(tmp_path: Path, spark: Any, name: str) -> None:
    options, chance = CASES[name], random.Random(name)
    bad = "on_bad_change" in options
    worlds = [
        facts_in(open_lake(tmp_path / "spark"), lambda: spark),
        facts_in(open_lake(tmp_path / "process"), IN_PROCESS),
    ]
    reported: list[list[Any]] = [[], []]
    for step in range(3):
        new, starts = some_facts(chance, bad=bad), [chance.randrange(2) for _ in range(PARTITIONS)]
        level = chance.choice(["major", "minor"])
        for world, outcomes in zip(worlds, reported, strict=True):
            send(world, new)
            report = world.advance(table_of(**options))
            outcomes += [report.action, report.counters, state(world)]
            if step:
                compacted = compact_dataset(
                    world.lake, NAME, spark=world.spark, by="test", level=level
                )
                outcomes += [compacted.action, compacted.counters, compacted.rows, state(world)]
                outcomes += [
                    rewound(world, table_of(extractor=TENFOLD, **options), starts),
                    state(world),
                ]
        assert reported[0] == reported[1]


COLUMNS = "k STRING, at BIGINT, n INT"
NEEDING_SPARK: dict[str, tuple[dict[str, Any], str]] = {
    "an expression": (
        {"extractor": Projection(COLUMNS, {"n": "n + 1"})},
        r"the extractor \(projection",
    ),
    "a condition": (
        {"extractor": Projection(COLUMNS, where="n > 0")},
        r"the extractor \(projection",
    ),
    "a form": ({"changes": DebeziumEnvelope("k STRING", value="k")}, "the form of its changes"),
    "a snapshot": ({"initial": ParquetSnapshot("nowhere")}, "its bulk snapshot"),
}


@pytest.mark.parametrize("name", NEEDING_SPARK)
def test_what_only_spark_can_do_is_refused_before_anything_is_written(
    name: str, world: World
) -> None:
    options, problem = NEEDING_SPARK[name]
    world = facts_in(world.lake, IN_PROCESS)
    send(world, [("a", 1, 1)])
    with pytest.raises(ConfigurationError, match=f"can't be made without Spark: {problem}"):
        world.advance(table_of(**options))
    assert StoredVersions(world.lake, NAME).read()[0] is None


def test_dead_letters_of_fractions_and_streams_of_other_systems_need_spark(world: World) -> None:
    world.spark = IN_PROCESS
    world.stream("floats", Schema.of(k="string", x="double"), ["k"], 2)
    dead = unbounded_dataset(
        "floats",
        input="lake.floats",
        key="k",
        partitions=2,
        on_bad_change=DeadLetters(f"lake.{DEAD}"),
    )
    with pytest.raises(ConfigurationError, match=r"dead letters of records with fractions \(x\)"):
        world.advance(dead)

    class ReadBySpark(LakeStreams):
        capabilities = replace(LakeStreams.capabilities, reads_arrow=False)

    system = ReadBySpark(world.lake)
    plain = unbounded_dataset("floats", input="lake.floats", key="k", partitions=2)
    with pytest.raises(
        ConfigurationError, match="stream system 'lake', whose records only Spark reads"
    ):
        advance_dataset(
            plain, lake=world.lake, systems={"lake": system}, spark=IN_PROCESS, by="test"
        )


def test_in_process_stands_for_a_session_that_nothing_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_scope(master="none") as spark:
        assert spark is IN_PROCESS
    assert SparkResource(master="none").starter is IN_PROCESS
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    with session_scope() as spark:
        assert spark is IN_PROCESS
    assert SparkResource(master="local[2]").starter is not IN_PROCESS
    assert pickle.loads(pickle.dumps(IN_PROCESS)) is IN_PROCESS
    with pytest.raises(ConfigurationError) as caught:
        IN_PROCESS()
    assert caught.value.argument == "spark"

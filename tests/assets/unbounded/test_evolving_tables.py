"""Columns of tables that are renamed, dropped, added again, reordered and widened between changes:
every commit has the names of its time, and joins give every commit the names of now.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import ChangeFormat, Upserts
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader, read_entries
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.evolving import Evolving, Part, named_now, shown
from tests.rounds import rounds

Entries = dict[int, dict[str, Any]]
Values = dict[int, dict[int, Any]]
Changed = dict[int, dict[str, Any] | None]


def spec(changes: ChangeFormat, **options: Any) -> UnboundedDataset:
    return unbounded_dataset(
        "planes",
        input="lake.planes",
        key="k",
        partitions=2,
        changes=changes,
        compaction=DeltaCompaction(inside_commit=False),
        **options,
    )


class Envelopes:
    """Sends changes as JSON envelopes, of which a declaration names the columns."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.stream("planes", Schema.of(k="bigint", value="string"), ["k"], 2)

    def send(self, evolving: Evolving, entries: Changed) -> ChangeFormat:
        rows = []
        for key, entry in entries.items():
            row = None if entry is None else {"k": key, **entry}
            change = {"op": "d" if row is None else "c", "before": {"k": key}, "after": row}
            rows.append((key, json.dumps(change)))
        self.world.send("planes", rows)
        return DebeziumEnvelope(evolving.schema.ddl(), on_missing="null")


class Columns:
    """Sends changes as records of a stream whose own columns are renamed and dropped."""

    def __init__(self, world: World) -> None:
        self.world = world

    def send(self, evolving: Evolving, entries: Changed) -> ChangeFormat:
        changes = ColumnChanges(evolving.renamed, tuple(evolving.drop))
        schema = self.world.streams.create(
            "planes", schema=evolving.schema, key=["k"], partitions=2, changes=changes
        ).schema
        assert schema is not None
        rows = []
        for key, entry in entries.items():
            rows.append((key, *((entry or {}).get(name) for name in schema.names if name != "k")))
        order = ["k", *(name for name in schema.names if name != "k")]
        assert list(schema.names) == order
        self.world.send("planes", rows)
        return Upserts()


def read_by_arrow(view: VersionReader) -> Entries:
    found = {row.pop("k"): row for row in read_entries(view, None).to_pylist()}
    for key, entry in found.items():
        assert view.get(key) == {"k": key, **entry}
    assert {key: {**row, "k": key} for key, row in found.items()} == dict(view.items())
    return found


def check_history(
    world: World, producer: Envelopes | Columns, seed: int, read: Callable[[VersionReader], Entries]
) -> None:
    """Draw changes of entries and columns, and compare every commit with plain Python; by Spark
    only at the end.
    """
    random = Random(seed)
    evolving = Evolving(random)
    table: Values = {}
    history: dict[str, tuple[list[Part], Values]] = {}
    for step in range(6):
        changed: dict[int, dict[int, Any] | None] = {}
        for key in random.sample(range(8), 4):
            changed[key] = evolving.draw_values() if random.random() < 0.8 or not step else None
        sent: Changed = {}
        for key, held in changed.items():
            entry = None if held is None else shown(held, evolving.columns)
            if held is None or entry is None or all(value is None for value in entry.values()):
                table.pop(key, None)
                sent[key] = None
            else:
                table[key] = held
                sent[key] = entry
        changes = producer.send(evolving, sent)
        declared = spec(changes, renamed=evolving.renamed, drop=evolving.drop)
        version = world.advance(declared).version
        assert version is not None
        history[version] = deepcopy((evolving.columns, table))
        if random.random() < 0.3:
            level = random.choice(["minor", "major"])
            compact_dataset(world.lake, "planes", spark=world.spark, level=level, by="test")
        if world.spark is IN_PROCESS or step == 5:
            compare(world, history, evolving.columns, read)
        evolving.step()


def compare(
    world: World,
    history: dict[str, tuple[list[Part], Values]],
    current: list[Part],
    read: Callable[[VersionReader], Entries],
) -> None:
    then = StoredVersions(world.lake, "planes")
    now = StoredVersions(world.lake, "planes", named_now=True)
    for version, (columns, held) in history.items():
        view = then.version(version)
        assert read(view) == {key: shown(each, columns) for key, each in held.items()}
        assert verify_version(view, deep=True).damaged == ()
        named = named_now(columns, current)
        expected = {key: shown(each, named) for key, each in held.items()}
        assert read(now.version(version)) == expected


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 6)))
def test_every_commit_has_the_names_of_then_and_joins_those_of_now(world: World, seed: int) -> None:
    world.spark = IN_PROCESS
    check_history(world, Columns(world), seed, read_by_arrow)


@pytest.mark.spark
@pytest.mark.parametrize("seed", [100, pytest.param(101, marks=pytest.mark.long)])
def test_spark_reads_every_commit_as_plain_python_does(sparkling: World, seed: int) -> None:
    def read(view: VersionReader) -> Entries:
        rows = [row.asDict(recursive=True) for row in view.frame(sparkling.spark()).collect()]
        return {row.pop("k"): row for row in rows}

    check_history(sparkling, Envelopes(sparkling), seed, read)

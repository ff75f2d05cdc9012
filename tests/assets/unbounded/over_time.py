"""Tables with a history of (k, since, n), and what a plain dictionary says of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World

NAME = "prices"
COLUMNS = Schema.of(k="string", since="timestamp", n="int")
KEYS = ("a", "b", "c", "d")
BY_HAND = DeltaCompaction(inside_commit=False)
# (key, second since which it is valid, value); no value deletes
Change = tuple[str, int, int | None]
LAST = 40


def at(second: int) -> datetime:
    """Return the moment so many seconds after a beginning."""
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def second_of(moment: datetime) -> int:
    return int((moment - at(0)).total_seconds())


def prices_in(world: World) -> World:
    """Return the world, with the stream."""
    world.stream(NAME, COLUMNS, ["k"], 2)
    return world


def prices(**options: Any) -> AdjunctDataset:
    """Declare the table; nothing is compacted unless it is asked for."""
    spread = {} if options.get("broadcast") else {"partitions": 2}
    declared = {"history": "all", "valid_from": "since", "compaction": BY_HAND, **spread, **options}
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **declared)


def send(world: World, changes: Sequence[Change]) -> None:
    columns = {
        "k": pa.array([key for key, _, _ in changes], pa.string()),
        "since": pa.array([at(second) for _, second, _ in changes], pa.timestamp("us", tz="UTC")),
        "n": pa.array([value for _, _, value in changes], pa.int32()),
        "__tombstone": pa.array([value is None for _, _, value in changes]),
    }
    world.streams.append(NAME, pa.table(columns), producer="test", sequence=world._next(NAME))


def manifest_of(world: World) -> UnboundedManifest:
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    assert isinstance(manifest, UnboundedManifest)
    return manifest


def edge_of(view: VersionReader) -> int:
    """Return the first second that answers are exact for."""
    return 0 if view.sealed.edge is None else second_of(datetime_from_micros(view.sealed.edge))


@dataclass
class Model:
    """What was valid when, of all changes that were taken in; of one key and second the last one
    counts.
    """

    valid: dict[str, dict[int, int | None]] = field(default_factory=dict)

    def add(self, changes: Sequence[Change], horizon: int | None = None) -> None:
        """Take changes in; those at or below the horizon come too late."""
        for key, second, value in changes:
            if horizon is None or second > horizon:
                self.valid.setdefault(key, {})[second] = value

    def value(self, key: str, second: int) -> int | None:
        """Return what was valid at this second, None for nothing."""
        begun = [start for start in self.valid.get(key, {}) if start <= second]
        return self.valid[key][max(begun)] if begun else None

    @property
    def current(self) -> dict[str, int]:
        newest = {key: rows[max(rows)] for key, rows in self.valid.items()}
        return {key: value for key, value in newest.items() if value is not None}

    @property
    def newest(self) -> int:
        return max(max(rows) for rows in self.valid.values())


def check(view: VersionReader, model: Model) -> None:
    """Hold everything that is read by key against the model: entries of now, and of each second
    from the edge on.
    """
    assert {key: entry["n"] for key, entry in view.items()} == model.current
    assert {key: entry["n"] for key, entry in view.get_all(KEYS).items()} == model.current
    assert view.rows in (None, len(model.current))
    for key in KEYS:
        parts = view.history_of(key)
        assert all(one.valid_to == two.valid_from for one, two in itertools.pairwise(parts))
        values = [part.entry and part.entry["n"] for part in parts]
        assert all(one != two for one, two in itertools.pairwise(values)), "not joined"
        for second in range(edge_of(view), LAST + 1):
            matched = [part for part in parts if part.holds(at(second))]
            assert len(matched) <= 1
            read = matched[0].entry["n"] if matched and matched[0].entry is not None else None
            assert read == model.value(key, second), (key, second)

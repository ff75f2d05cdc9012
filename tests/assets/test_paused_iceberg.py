"""Commands that register versions in Iceberg, paused for hours at any request: what others have
registered since stays current, and what its snapshots refer to stays in the lake.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.exchange.handover import stream_view
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergTable,
    publish_to_iceberg,
    register_in_iceberg,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.switches import VersionActions
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import Skewed, at_call
from tests.rounds import rounds

sql = pytest.importorskip("pyiceberg.catalog.sql")

KEYS = [f"k{n}" for n in range(6)]
SCHEMA = Schema.of(k="string", n="int")
TABLE = IcebergTable("out.facts")
NOTHING_KEPT = DiscardPolicy(keep=1, grace=timedelta(0))


class Catalog:
    """A catalogue that calls `before` before each of its requests."""

    def __init__(self, inner: Any, before: Callable[[], object]) -> None:
        self._inner, self._before = inner, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_table(self, identifier: str) -> Any:
        self._before()
        table = self._inner.load_table(identifier)
        table.catalog = self
        return table

    def commit_table(self, *given: Any, **more: Any) -> Any:
        self._before()
        done = self._inner.commit_table(*given, **more)
        self._before()  # done, and the reply is under way
        return done


@dataclass
class Hours:
    """A lake with a dataset of either kind and an Iceberg table, in which hours pass at once."""

    folder: Path
    kind: str
    meanwhile: Callable[[Hours], object]
    rounds: int = 0
    paused: bool = False
    clocks: Skewed = field(default_factory=Skewed)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.lake = open_lake(self.folder / "lake")
        self.streams = LakeStreams(self.lake)
        self.streams.create("changes", schema=SCHEMA, key=["k"], partitions=2)
        uri, warehouse = f"sqlite:///{self.folder}/catalog.db", str(self.folder / "warehouse")
        self.catalog = sql.SqlCatalog("me", uri=uri, warehouse=warehouse)
        self.catalog.create_namespace("out")
        for _ in range(2):
            self.deliver()
            self.publish(self.lake)
        self.deliver()

    @property
    def dataset(self) -> AdjunctDataset:
        make = bounded_dataset if self.kind == "bounded" else unbounded_dataset
        return make("facts", input="lake.changes", key="k", partitions=2, discard=NOTHING_KEPT)

    def deliver(self) -> None:
        """Serve a newer value of each key."""
        self.rounds += 1
        rows = [{"k": key, "n": 100 * self.rounds + n} for n, key in enumerate(KEYS)]
        table = pa.Table.from_pylist(rows, SCHEMA.to_arrow())
        name = f"v{self.rounds}" if self.kind == "bounded" else None
        self.streams.append(
            "changes", table, producer="t", sequence=self.rounds, end_of_dataset=name
        )
        systems = {"lake": self.streams}
        if self.kind != "stream":
            advance_dataset(
                self.dataset, lake=self.lake, systems=systems, spark=IN_PROCESS, by="test"
            )

    def publish(self, lake: Lake, catalog: Any = None) -> None:
        catalog = catalog or self.catalog
        if self.kind == "stream":
            register_in_iceberg(stream_view(lake, "changes"), catalog, TABLE.identifier)
            return
        with patch.object(IcebergTable, "open", lambda table: catalog):
            publish_to_iceberg(lake, "facts", TABLE, spark=IN_PROCESS, by="test")

    def pass_hours(self) -> None:
        self.clocks.by += 7200
        for path in (self.folder / "lake").rglob("*"):
            parts = path.relative_to(self.folder).parts
            if path.is_file() and ("leases" in parts or "holds" in parts):
                then = path.stat().st_mtime - 7200
                os.utime(path, (then, then))

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.meanwhile(self)

    def delete_what_nobody_holds(self) -> None:
        if self.kind == "stream":
            self.streams.maintain("changes")
        else:
            expire_versions(self.lake, "facts", NOTHING_KEPT, by="test")

    def snapshots(self) -> list[dict[str, int]]:
        """Return what can be read of each snapshot of the table, the current one last."""
        table = self.catalog.load_table(TABLE.identifier)
        ids = [snapshot.snapshot_id for snapshot in table.snapshots()]
        assert ids[-1] == table.current_snapshot().snapshot_id
        contents = []
        for number in ids:
            rows = table.scan(snapshot_id=number).to_arrow().to_pylist()
            contents.append({row["k"]: row["n"] for row in sorted(rows, key=lambda row: row["n"])})
        return contents


def values(number: int) -> dict[str, int]:
    return {key: 100 * number + n for n, key in enumerate(KEYS)}


def register_newer(hours: Hours) -> None:
    """Publish two newer versions, hours apart, and delete what nobody holds."""
    for _ in range(2):
        hours.pass_hours()
        hours.deliver()
        if hours.kind == "unbounded":
            compact_dataset(hours.lake, "facts", spark=IN_PROCESS, by="test", level="major")
        hours.publish(hours.lake)
    hours.pass_hours()
    hours.delete_what_nobody_holds()


def roll_back(hours: Hours) -> None:
    """Take the version that is being published back, and publish the one before."""
    hours.pass_hours()
    log = StoredVersions(hours.lake, "facts").log
    VersionActions(log).rollback(reason="wrong", by="test")
    hours.publish(hours.lake)


CASES = [
    ("bounded", register_newer, 5),
    ("unbounded", register_newer, 5),
    ("stream", register_newer, 5),
    ("bounded", roll_back, 2),
]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize(("kind", "meanwhile", "newest"), CASES)
def test_a_registration_that_was_paused_for_hours_sets_no_table_back(
    kind: str, meanwhile: Callable[[Hours], object], newest: int, tmp_path: Path
) -> None:
    calls: list[str] = []
    counting = Hours(tmp_path / "counting", kind, meanwhile)
    counted = FaultyStore(counting.lake.store)
    counting.publish(
        Lake(counted, counting.lake.id), Catalog(counting.catalog, lambda: calls.append("catalog"))
    )
    of_lake, of_catalog = len(counted.requests), len(calls)
    pauses = [("lake", nth) for nth in range(1, of_lake + 1)]
    pauses = rounds(pauses[:: 1 + of_lake // 3], pauses)
    pauses += [("catalog", nth) for nth in range(1, of_catalog + 1)]
    for where, nth in pauses:
        hours = Hours(tmp_path / f"{where}{nth}", kind, meanwhile)
        faults = [Fault("*", nth, "meanwhile", action=hours.pause)] if where == "lake" else []
        catalog = hours.catalog
        if where == "catalog":
            catalog = Catalog(hours.catalog, at_call(nth, hours.pause))
        ended = "done"
        with patch.object(times, "time", hours.clocks):
            try:
                hours.publish(Lake(FaultyStore(hours.lake.store, faults), hours.lake.id), catalog)
            except AdjunctError as error:
                ended = repr(error)
        made = (where, nth, ended)
        assert hours.paused, made
        hours.pass_hours()
        hours.delete_what_nobody_holds()
        assert hours.snapshots()[-1] == values(newest), made
        hours.publish(hours.lake)
        assert hours.snapshots()[-1] == values(newest), made

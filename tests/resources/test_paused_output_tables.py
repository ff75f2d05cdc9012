"""A run that stops before or after the commit of an output table, and goes on when another run has
taken over, writes nothing twice and loses nothing: real PyIceberg and delta-rs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.utils.config import Config

from dagster_adjunct.exchange import DeltaLakeTable, IcebergTable
from dagster_adjunct.resources.errors import ProducerConflictError, TransientError
from dagster_adjunct.resources.output_tables.batches import (
    OutputBatch,
    OutputColumns,
    ReplacedRange,
    TableOutput,
)
from dagster_adjunct.resources.output_tables.opening import open_output
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import READER, SOURCE, SOURCE_OFFSET

pytestmark = pytest.mark.lengthy

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
HIDDEN = ((READER, "string"), (SOURCE, "string"), (SOURCE_OFFSET, "bigint"))
COLUMNS = OutputColumns(Schema.of(id="bigint"), HIDDEN)


def rows(ids: Sequence[int]) -> pa.Table:
    """Return rows that were made of records with these offsets."""
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            READER: pa.array(["reader"] * len(ids), pa.string()),
            SOURCE: pa.array(["source"] * len(ids), pa.string()),
            SOURCE_OFFSET: pa.array(ids, pa.int64()),
        }
    )


def batch(number: int, *ids: int, replaces: Sequence[tuple[int, int]] = (), **more: Any) -> Any:
    ranges = [ReplacedRange("reader", "source", *span) for span in replaces]
    given = {"producer": "app", "clock": BEGAN, **more}
    return OutputBatch(
        number=number, columns=COLUMNS, parts=lambda: [rows(ids)], replaces=ranges, **given
    )


@dataclass
class Place:
    """A table of one format, and how a run that writes it is paused."""

    kind: str
    folder: Path
    patch: pytest.MonkeyPatch

    @property
    def table(self) -> Any:
        if self.kind == "iceberg":
            return IcebergTable("shop.orders", "adjunct")
        return DeltaLakeTable(str(self.folder / "delta"))

    @property
    def output(self) -> TableOutput:
        return open_output(self.table)

    def ids(self) -> list[int]:
        if self.kind == "iceberg":
            found = self.table.open().load_table("shop.orders").scan().to_arrow()
        else:
            found = DeltaTable(self.table.url).to_pyarrow_table()
        return sorted(found["id"].to_pylist())

    def maintain(self) -> None:
        """Rewrite the table's files, and forget its history, as another program does."""
        if self.kind == "iceberg":
            table = self.table.open().load_table("shop.orders")
            table.overwrite(table.scan().to_arrow())
            old = [each.snapshot_id for each in table.snapshots()][:-1]
            table.maintenance.expire_snapshots().by_ids(old).commit()
        else:
            DeltaTable(self.table.url).optimize.compact()
            clean_log(self.table.url)

    def paused(self, commit: OutputBatch, meanwhile: Callable[[], object]) -> Any:
        """Commit a batch; do something else when all but the commit itself is done."""
        waiting = [meanwhile]

        def pause() -> None:
            if waiting:
                in_another_thread(waiting.pop())

        if self.kind == "delta":
            object.__setattr__(commit, "before_commit", pause)
            return self.output.commit(commit)
        send = SqlCatalog.commit_table

        def commit_table(*args: Any, **more: Any) -> Any:
            pause()
            return send(*args, **more)

        with self.patch.context() as patch:
            patch.setattr(SqlCatalog, "commit_table", commit_table)
            return self.output.commit(commit)


def in_another_thread(do: Callable[[], object]) -> None:
    """Run a function in a thread of its own: delta-rs can't be called from within its calls."""
    failed = []

    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def clean_log(url: str) -> None:
    """Delete the commits of a Delta table before its newest checkpoint."""
    kept = {"delta.logRetentionDuration": "interval 0 seconds"}
    DeltaTable(url).alter.set_table_properties(kept)
    DeltaTable(url).create_checkpoint()
    for file in (Path(url) / "_delta_log").glob("*.json"):
        os.utime(file, (1, 1))
    DeltaTable(url).cleanup_metadata()


@pytest.fixture(params=["iceberg", "delta"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    name = "PYICEBERG_CATALOG__ADJUNCT__"
    monkeypatch.setenv(f"{name}TYPE", "sql")
    monkeypatch.setenv(f"{name}URI", f"sqlite:///{tmp_path}/catalog.sqlite")
    monkeypatch.setenv(f"{name}WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    return Place(request.param, tmp_path, monkeypatch)


def test_the_first_batch_of_a_table_that_another_run_has_created_meanwhile(place: Place) -> None:
    done = place.paused(batch(1, 1), lambda: place.output.commit(batch(1, 1)))
    assert done.duplicate
    assert place.ids() == [1]


def test_a_first_batch_after_which_another_run_has_committed_more(place: Place) -> None:
    def go_on() -> None:
        for number in (1, 2):
            place.output.commit(batch(number, number))

    with pytest.raises(ProducerConflictError):
        place.paused(batch(1, 1), go_on)
    assert place.ids() == [1, 2]
    found = place.output.find("app")
    assert found is not None
    assert found.number == 2


def test_two_applications_that_create_one_table(place: Place) -> None:
    other = batch(1, 2, producer="other")
    assert not place.paused(batch(1, 1), lambda: place.output.commit(other)).duplicate
    assert place.ids() == [1, 2]
    numbers = [place.output.find(name) for name in ("app", "other")]
    assert [found and found.number for found in numbers] == [1, 1]


def test_a_batch_that_another_run_has_committed_before_maintenance(place: Place) -> None:
    place.output.commit(batch(1, 1))

    def take_over() -> None:
        place.output.commit(batch(2, 2))
        place.maintain()

    assert place.paused(batch(2, 2), take_over).duplicate
    assert place.ids() == [1, 2]


def test_a_batch_after_which_another_run_has_committed_more(place: Place) -> None:
    place.output.commit(batch(1, 1))

    def take_over() -> None:
        for number in (2, 3):
            place.output.commit(batch(number, number))
        place.maintain()

    with pytest.raises(ProducerConflictError):
        place.paused(batch(2, 2), take_over)
    assert place.ids() == [1, 2, 3]


def test_a_batch_is_committed_after_maintenance_by_others(place: Place) -> None:
    """Delta's conflict check needs commits that are gone by then: the batch looks again."""
    place.output.commit(batch(1, 1))

    def write() -> None:
        for number in (3, 4):
            place.output.commit(batch(1 + number, number, producer="other"))
        place.maintain()

    assert not place.paused(batch(2, 2), write).duplicate
    assert place.ids() == [1, 2, 3, 4]


def test_rows_are_replaced_in_files_that_maintenance_has_moved(place: Place) -> None:
    place.output.commit(batch(1, 1, 2, 3))
    place.paused(batch(2, 1, replaces=[(1, 3)]), place.maintain)
    assert place.ids() == [1, 3]


def test_rows_that_another_run_has_replaced_before_maintenance(place: Place) -> None:
    place.output.commit(batch(1, 1, 2, 3))

    def take_over() -> None:
        place.output.commit(batch(2, 1, replaces=[(1, 3)]))
        place.maintain()

    assert place.paused(batch(2, 1, replaces=[(1, 3)]), take_over).duplicate
    assert place.ids() == [1, 3]


@pytest.mark.parametrize("place", ["iceberg"], indirect=True)
def test_a_reply_of_the_catalogue_that_is_lost_while_another_run_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.output.commit(batch(1, 1))
    send = SqlCatalog.commit_table

    def lose(*args: Any, **more: Any) -> Any:
        send(*args, **more)
        monkeypatch.setattr(SqlCatalog, "commit_table", send)
        place.output.commit(batch(3, 3))
        place.maintain()
        raise CommitStateUnknownException("the reply was lost")

    monkeypatch.setattr(SqlCatalog, "commit_table", lose)
    with pytest.raises(TransientError):
        place.output.commit(batch(2, 2))
    with pytest.raises(ProducerConflictError):
        place.output.commit(batch(2, 2))
    assert place.ids() == [1, 2, 3]


def test_a_batch_of_another_lake_is_an_error_after_any_number_of_commits(place: Place) -> None:
    place.output.commit(batch(1, 1))
    if place.kind == "delta":
        for _ in range(3):
            write_deltalake(place.table.url, rows([9]), mode="append")
    place.maintain()
    with pytest.raises(ProducerConflictError):
        place.output.commit(batch(1, 1, clock=BEGAN + timedelta(days=1)))
    assert place.output.commit(batch(1, 1)).duplicate

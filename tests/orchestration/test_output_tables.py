"""Iceberg and Delta tables that applications write hold each batch once, whatever happens: real
PyIceberg with a SQLite catalogue and delta-rs, compared with plain Python.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import uuid4

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.utils.config import Config

from dagster_adjunct import errors
from dagster_adjunct.exchange import DeltaLakeTable, IcebergTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.lineage import find_outputs
from dagster_adjunct.orchestration.application.table_registry import (
    open_registered_table,
    reset_table,
)
from dagster_adjunct.orchestration.code_location.nodes import AdjunctTranslator, asset_subject
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.planner.planned import PlannedOutputTable
from dagster_adjunct.orchestration.planner.planner import compare_output_tables, plan_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.repartitioning import repartition_stream
from dagster_adjunct.resources.delta import delta_options, delta_place
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.output_tables.batches import (
    OutputBatch,
    OutputColumns,
    ReplacedRange,
    lake_number,
)
from dagster_adjunct.resources.output_tables.iceberg_files import project
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable, open_output
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import POSITION
from dagster_adjunct.startpoints import (
    StartpointOldest,
    Startpoints,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.testing import TestApplication, TestStream
from tests.faulty_store import Crash, Fault
from tests.orchestration.cli.commands import document
from tests.orchestration.dagster.test_components import component
from tests.orchestration.step_world import StepWorld
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from tests.servers.s3 import S3Server

DIED: Any = Crash
WHY = ("--reason", "test", "--by", "test")
REQUESTS = "dagster_adjunct.orchestration.startpoints.startpoints"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_NESTED = {"id": "bigint", "sku": "string", "at": "timestamp", "lines": [{"n": "int"}]}


@dataclass
class Target:
    """An output table of one format in a folder, and how tests read and change it."""

    kind: str
    folder: Path
    by: tuple[str, ...] = ()
    iceberg_name: str = "shop.enriched"

    @property
    def table(self) -> AnyOutputTable:
        if self.kind == "iceberg":
            return IcebergTable(self.iceberg_name, "adjunct", self.by)
        return DeltaLakeTable(str(self.folder / "delta"), self.by)

    def iceberg(self) -> Table:
        return IcebergTable(self.iceberg_name, "adjunct").open().load_table(self.iceberg_name)

    def delta(self) -> DeltaTable:
        return DeltaTable(self.folder / "delta")

    def read(self) -> pa.Table:
        """Return all rows; PyIceberg itself reads null arrays as empty ones."""
        if self.kind == "iceberg":
            table = self.iceberg()
            wanted = schema_to_pyarrow(table.schema(), include_field_ids=False)
            parts = [wanted.empty_table()]
            for task in table.scan().plan_files():
                path = task.file.file_path.removeprefix("file://")
                parts.append(project(pq.read_table(path), table.schema()).cast(wanted))
            return pa.concat_tables(parts)
        return self.delta().to_pyarrow_table()

    def ids(self) -> list[int]:
        return sorted(self.read()["id"].to_pylist())

    def commits(self) -> int:
        """Return how many commits with rows the table has."""
        if self.kind == "iceberg":
            return len(self.iceberg().snapshots())
        return len([entry for entry in self.delta().history() if entry["operation"] == "WRITE"])

    def exists(self) -> bool:
        return open_output(self.table).stored_columns() is not None

    def drop(self) -> Callable[[], object]:
        """Delete the table; return what restores it."""
        if self.kind == "delta":
            copy = self.folder / f"copy-{uuid4().hex}"
            (self.folder / "delta").rename(copy)
            return lambda: copy.rename(self.folder / "delta")
        catalog = IcebergTable("shop.enriched", "adjunct").open()
        metadata = self.iceberg().metadata_location
        catalog.drop_table("shop.enriched")
        return lambda: catalog.register_table("shop.enriched", metadata)

    def create(self, columns: pa.Schema) -> None:
        """Create an empty table as somebody else does."""
        if self.kind == "delta":
            write_deltalake(self.folder / "delta", columns.empty_table())
        else:
            catalog = IcebergTable("shop.enriched", "adjunct").open()
            catalog.create_table("shop.enriched", columns)

    def append(self, rows: pa.Table) -> None:
        """Append as somebody else does."""
        if self.kind == "iceberg":
            self.iceberg().append(rows)
        else:
            write_deltalake(self.delta(), rows, mode="append", schema_mode="merge")

    def compact(self) -> None:
        """Rewrite the whole table, and forget its history, as maintenance of others does."""
        if self.kind == "iceberg":
            table = self.iceberg()
            table.overwrite(table.scan().to_arrow())
            old = [each.snapshot_id for each in table.snapshots()][:-1]
            table.maintenance.expire_snapshots().by_ids(old).commit()
        else:
            table = self.delta()
            table.optimize.compact()
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
            table.create_checkpoint()


@pytest.fixture(params=["iceberg", "delta"])
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Target:
    name = "PYICEBERG_CATALOG__ADJUNCT__"
    monkeypatch.setenv(f"{name}TYPE", "sql")
    monkeypatch.setenv(f"{name}URI", f"sqlite:///{tmp_path}/catalog.sqlite")
    monkeypatch.setenv(f"{name}WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    return Target(request.param, tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    """A lake with 3 partitions of nested orders, whose batches run in this process."""
    made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.streams.create("orders", schema=Schema.of(_NESTED), key=["id"], partitions=3)
    return made


def send(world: StepWorld, *ids: int, stream: str = "orders", **more: Any) -> None:
    world.send(stream, *map(row, ids), **more)


def row(number: int) -> tuple[Any, ...]:
    at = _BEGIN + timedelta(hours=7 * number)
    return (number, f"sku-{number % 5}", at, [{"n": number}, {"n": None}] if number % 2 else None)


def declare(target: Target, **options: Any) -> Application:
    """Return an application that sends all orders but those of sku-0 to the table."""
    app = Application("enrich", engine="auto", max_batch_records=40)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    kept = orders.filter("sku <> 'sku-0'").with_columns(twice="id * 2")
    kept.send_to(app.output_table(target.table, **options))
    return app


def expected(*ids: int) -> list[int]:
    return sorted(number for number in ids if number % 5)


@pytest.mark.lengthy
def test_each_batch_is_a_commit_and_all_engines_read_the_rows(
    world: StepWorld, target: Target
) -> None:
    target.by = ("days(at)", "sku") if target.kind == "iceberg" else ("sku",)
    app = declare(target)
    send(world, *range(100))
    report = world.run(app)
    assert report.batches == 3
    send(world, *range(100, 110))
    world.run(app)
    assert target.commits() == 4
    assert target.ids() == expected(*range(110))
    read = {record["id"]: record for record in target.read().to_pylist()}
    for number in expected(*range(110)):
        _, sku, at, lines = row(number)
        wanted = {"id": number, "sku": sku, "at": at, "lines": lines, "twice": 2 * number}
        assert read[number] == wanted | {"__epoch": 0}
    assert report.counters[target.table.name]["rows"] == len(expected(*range(100)))
    total = sum(expected(*range(110)))
    if target.kind == "iceberg":
        metadata = target.iceberg().metadata_location
        assert pl.scan_iceberg(target.iceberg()).select("id").collect().sum().item() == total
        days = {str(field.transform) for field in target.iceberg().spec().fields}
        assert days == {"day", "identity"}
        files = [file.file.file_path for file in target.iceberg().scan().plan_files()]
        assert metadata
    else:
        files = target.delta().file_uris()
        assert pl.read_delta(str(target.folder / "delta"))["id"].sum() == total
        assert target.delta().metadata().partition_columns == ["sku"]
    found = duckdb.sql(f"select sum(id) from read_parquet({files!r})").fetchall()
    assert found == [(total,)]


@pytest.mark.parametrize("target", ["iceberg"], indirect=True)
@pytest.mark.parametrize(
    "by",
    [
        "days(at)",
        "months(at)",
        "years(at)",
        "hours(at)",
        "bucket(4, id)",
        "truncate(5, sku)",
        "lines.n",
        "weeks(at)",
    ],
)
def test_partitions_of_iceberg_are_those_of_its_own_transforms(
    by: str, world: StepWorld, tmp_path: Path, target: Target
) -> None:
    target.by = (by,)
    if by in ("lines.n", "weeks(at)"):
        with pytest.raises((errors.ConfigurationError, errors.PlanningError)):
            world.run(declare(target))
        return
    send(world, *range(30))
    world.run(declare(target))
    assert target.ids() == expected(*range(30))
    for task in target.iceberg().scan().plan_files():
        (value,) = [task.file.partition[0]]
        rows = _rows_of(task.file.file_path)
        field = target.iceberg().spec().fields[0]
        source = target.iceberg().schema().find_field(field.source_id)
        call = field.transform.transform(source.field_type)
        for each in rows:
            given = each[source.name]
            if isinstance(given, datetime):
                given = int(given.timestamp() * 1_000_000)
            assert call(given) == value


def _rows_of(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path.removeprefix("file://")).to_pylist()
    return rows


# -- once


def test_a_run_killed_at_any_write_leaves_each_batch_once(world: StepWorld, target: Target) -> None:
    send(world, *range(60))
    app = declare(target)
    for nth in range(1, 40):
        try:
            world.killed_at(app, Fault("*", nth * 4, "crash-before"))
        except BaseException as error:
            if isinstance(error, pytest.fail.Exception):
                break  # the run ended before that request
            raise
        send(world, 1000 + nth)
    world.run(app)
    ids = [record["id"] for record in world.rows("orders")]
    assert target.ids() == expected(*ids)


@dataclass
class Failure:
    """What happens to the `nth` commit of the table, before or after it took place."""

    nth: int
    error: Callable[[], BaseException]
    after: bool
    calls: int = 0

    def wrap(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls != self.nth:
                return commit(*args, **options)
            if self.after:
                commit(*args, **options)
            raise self.error()

        return call

    def install(self, kind: str, patch: pytest.MonkeyPatch) -> None:
        if kind == "iceberg":
            patch.setattr(SqlCatalog, "commit_table", self.wrap(SqlCatalog.commit_table))
        else:
            patch.setattr(deltalake, "write_deltalake", self.wrap(write_deltalake))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_process_that_dies_before_or_after_a_commit_repeats_nothing(
    nth: int, after: bool, world: StepWorld, target: Target
) -> None:
    send(world, *range(60))
    app = declare(target)
    with pytest.MonkeyPatch.context() as patch:
        Failure(nth, lambda: Crash("commit"), after).install(target.kind, patch)
        with pytest.raises(DIED):
            world.run(app)
    world.run(app)
    assert target.ids() == expected(*range(60))
    assert target.commits() == 2
    send(world, 101)
    world.run(app)
    assert target.ids() == expected(*range(60), 101)


@pytest.mark.parametrize("after", [False, True])
def test_a_lost_reply_is_found_by_looking(after: bool, world: StepWorld, target: Target) -> None:
    send(world, *range(60))
    app = declare(target)
    kind = CommitStateUnknownException if target.kind == "iceberg" else OSError
    with pytest.MonkeyPatch.context() as patch:
        Failure(1, lambda: kind("connection reset"), after).install(target.kind, patch)
        if after:
            world.run(app)
        else:
            with pytest.raises(errors.TransientError):
                world.run(app)
    world.run(app)
    assert target.ids() == expected(*range(60))
    assert target.commits() == 2


def test_the_commits_of_others_stay_and_their_maintenance_forgets_no_batch(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    target.append(target.read().slice(0, 1).set_column(0, "id", pa.array([-7])))
    send(world, *range(20, 40))
    with pytest.MonkeyPatch.context() as patch:
        Failure(1, lambda: Crash("commit"), after=True).install(target.kind, patch)
        with pytest.raises(DIED):
            world.run(app)
    target.compact()
    target.compact()
    world.run(app)
    assert target.ids() == [-7, *expected(*range(40))]
    state = world.state(app)
    assert state.last is not None
    assert state.last.counters[target.table.name]["duplicate_batches"] == 1


def test_another_writer_between_looking_and_committing_costs_an_attempt_only(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    other = target.read().slice(0, 1).set_column(0, "id", pa.array([-7]))
    send(world, *range(20, 40))
    commit = SqlCatalog.commit_table if target.kind == "iceberg" else write_deltalake
    done = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(1)
            target.append(other)
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if target.kind == "iceberg":
            patch.setattr(SqlCatalog, "commit_table", meanwhile)
        else:
            patch.setattr(deltalake, "write_deltalake", meanwhile)
        world.run(app)
    assert target.ids() == [-7, *expected(*range(40))]


def test_of_two_runs_that_commit_one_batch_at_once_one_does(
    world: StepWorld, target: Target
) -> None:
    """The slower run looks, and then the faster one commits this batch and the next one."""
    app = declare(target)
    send(world, *range(60))
    commit = SqlCatalog.commit_table if target.kind == "iceberg" else write_deltalake
    done = []

    def faster(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(1)
            run_step(world.context(app, run="faster"))
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if target.kind == "iceberg":
            patch.setattr(SqlCatalog, "commit_table", faster)
        else:
            patch.setattr(deltalake, "write_deltalake", faster)
        with pytest.raises((errors.CommitConflictError, errors.ProducerConflictError)):
            run_step(world.context(app, run="slower"))
    world.run(app)
    assert target.ids() == expected(*range(60))
    assert target.commits() == 2


@pytest.mark.parametrize("target", ["iceberg"], indirect=True)
@pytest.mark.parametrize("change", ["rolled back", "replaced"])
def test_a_history_that_changes_during_a_commit_is_an_error_of_ours_or_none(
    change: str, world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    first = target.iceberg().current_snapshot()
    assert first is not None
    send(world, *range(20, 40))
    world.run(app)
    send(world, *range(40, 60))
    commit = SqlCatalog.commit_table
    done = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(1)
            table = target.iceberg()
            second = table.current_snapshot()
            assert second is not None
            if change == "replaced":
                catalog = IcebergTable("shop.enriched", "adjunct").open()
                catalog.drop_table("shop.enriched")
                catalog.create_table("shop.enriched", table.schema())
            else:
                table.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
                target.iceberg().maintenance.expire_snapshots().by_id(second.snapshot_id).commit()
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", meanwhile)
        if change == "replaced":
            with pytest.raises(errors.TableError) as caught:
                world.run(app)
            assert caught.value.table == target.table.name
        else:
            world.run(app)
    if change == "replaced":
        with pytest.raises(errors.TableReplacedError):
            world.run(app)
        reset_table(world.lake, target.table.name, by="test", reason="test")
    world.run(app)
    kept = range(40, 60) if change == "replaced" else [*range(20), *range(40, 60)]
    assert target.ids() == expected(*kept)


@pytest.mark.parametrize("target", ["iceberg"], indirect=True)
@pytest.mark.parametrize("setting", ["URI", "WAREHOUSE"])
def test_relative_paths_in_the_settings_of_a_catalogue_are_refused(
    setting: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = "sqlite:///catalog.sqlite" if setting == "URI" else "warehouse"
    monkeypatch.setenv(f"PYICEBERG_CATALOG__ADJUNCT__{setting}", value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    with pytest.raises(errors.ConfigurationError, match="relative") as caught:
        open_output(target.table).stored_columns()
    assert caught.value.setting == f"PYICEBERG_CATALOG__ADJUNCT__{setting}"


def test_a_run_that_has_lost_its_lease_commits_nothing(world: StepWorld, target: Target) -> None:
    columns = OutputColumns(Schema.of(id="bigint"))
    output = open_output(target.table)
    rows = pa.table({"id": pa.array([1], pa.int64())})

    def lost() -> None:
        raise errors.RunLeaseLostError("the lease is lost.")

    output.commit(OutputBatch("app", 1, _BEGIN, columns, lambda: [rows]))
    with pytest.raises(errors.RunLeaseLostError):
        output.commit(OutputBatch("app", 2, _BEGIN, columns, lambda: [rows], (), lost))
    assert target.ids() == [1]


def test_another_lake_under_the_same_name_is_an_error(
    world: StepWorld, target: Target, tmp_path: Path
) -> None:
    app = declare(target)
    send(world, *range(60))
    world.run(app)
    other = StepWorld(open_lake(tmp_path / "other"), tmp_path, IN_PROCESS)
    other.streams.create("orders", schema=Schema.of(_NESTED), key=["id"], partitions=3)
    send(other, *range(10))
    with pytest.raises(errors.ProducerConflictError) as caught:
        other.run(app)
    assert (caught.value.producer, caught.value.newest) == ("enrich", 2)
    assert target.ids() == expected(*range(60))


@pytest.mark.parametrize("compacted", [False, True])
def test_a_batch_of_another_lake_is_refused_also_if_its_number_is_higher(
    compacted: bool, target: Target
) -> None:
    columns = OutputColumns(Schema.of(id="bigint"))
    output = open_output(target.table)

    def batch(number: int, lake: str) -> OutputBatch:
        rows = pa.table({"id": pa.array([number], pa.int64())})
        parts: Callable[[], Iterable[pa.Table]] = lambda: [rows]  # noqa: E731
        return OutputBatch("app", number, _BEGIN, columns, parts, lake=lake_number(lake))

    output.commit(batch(1, "one"))
    if compacted:
        target.compact()
    for number in (1, 2):
        with pytest.raises(errors.ProducerConflictError, match="another lake") as caught:
            output.commit(batch(number, "another"))
        assert (caught.value.table, caught.value.newest) == (target.table.name, 1)
        with pytest.raises(errors.ProducerConflictError):
            output.find_batch("app", number, _BEGIN, lake_number("another"))
    output.commit(batch(2, "one"))
    assert target.ids() == [1, 2]
    assert output.commit(batch(2, "one")).duplicate


# -- tables that are gone


def plan(world: StepWorld, app: Application) -> Any:
    return compare_output_tables(app, plan_application(app, systems=world.systems), world.lake)


def test_a_table_that_is_gone_is_an_error_until_it_is_restored_or_may_be_created(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    name = target.table.name
    send(world, *range(20))
    world.run(app)
    restore = target.drop()
    send(world, *range(20, 40))
    for _ in range(2):
        with pytest.raises(errors.TableNotFoundError) as caught:
            world.run(app)
        assert not isinstance(caught.value, errors.TableReplacedError)
        assert caught.value.table == name
        with pytest.raises(errors.PlanningError) as planned:
            plan(world, app)
        assert planned.value.table == name
        assert not target.exists()
    restore()
    plan(world, app)
    world.run(app)
    assert target.ids() == expected(*range(40))
    target.drop()
    document(world, "table", "allow-recreate", name, *WHY)
    plan(world, app)
    send(world, 41)
    replay(world, app)
    assert target.ids() == expected(*range(40), 41)
    target.drop()
    with pytest.raises(errors.PlanningError):
        plan(world, app)


def test_a_table_that_somebody_has_created_again_is_an_error_until_it_is_accepted(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    columns = target.read().schema
    target.drop()
    target.create(columns)
    send(world, *range(20, 40))
    with pytest.raises(errors.TableReplacedError) as caught:
        world.run(app)
    assert (caught.value.table, caught.value.loss) == (target.table.name, "replaced")
    with pytest.raises(errors.PlanningError):
        plan(world, app)
    assert target.ids() == []
    document(world, "table", "allow-recreate", target.table.name, *WHY)
    world.run(app)
    assert target.ids() == expected(*range(20, 40))


def test_a_table_that_goes_while_a_batch_is_computed_is_not_created_again(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    send(world, *range(20, 40))

    def drop(event: Any) -> None:
        if event.what == "output":  # the batch has looked at the table
            target.drop()

    with pytest.raises(errors.TableNotFoundError):
        world.run(app, on_event=drop)
    assert not target.exists()


def test_a_table_that_goes_while_a_batch_is_committed_is_not_created_again(
    world: StepWorld, target: Target
) -> None:
    app = declare(target)
    send(world, *range(20))
    world.run(app)
    send(world, *range(20, 40))
    restored: list[Callable[[], object]] = []
    commit = SqlCatalog.commit_table if target.kind == "iceberg" else write_deltalake

    def meanwhile(*args: Any, **options: Any) -> Any:
        if not restored:
            restored.append(target.drop())
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if target.kind == "iceberg":
            patch.setattr(SqlCatalog, "commit_table", meanwhile)
        else:
            patch.setattr(deltalake, "write_deltalake", meanwhile)
        with pytest.raises(errors.TableNotFoundError) as caught:
            world.run(app)
    assert caught.value.table == target.table.name
    assert not target.exists()
    if target.kind == "delta":  # delta-rs has written a file that belongs to no table
        shutil.rmtree(target.folder / "delta")
    restored[0]()
    world.run(app)
    assert target.ids() == expected(*range(40))


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_at_the_first_commit_leaves_no_claim_that_is_false_and_loses_nothing(
    after: bool, is_dropped: bool, world: StepWorld, target: Target
) -> None:
    """Killed before or after the first commit to the table, so before the end of the batch."""
    app = declare(target)
    send(world, *range(20))
    with pytest.MonkeyPatch.context() as patch:
        Failure(1, lambda: Crash("commit"), after).install(target.kind, patch)
        with pytest.raises(DIED):
            world.run(app)
    if is_dropped and target.exists():
        target.drop()
    world.run(app)
    assert target.ids() == expected(*range(20))
    target.drop()
    send(world, *range(20, 40))
    with pytest.raises(errors.TableNotFoundError):
        world.run(app)


def test_a_run_killed_at_any_request_remembers_a_table_with_rows(
    world: StepWorld, target: Target
) -> None:
    """From the run's first request to the lake to its last: the next run fills the table, and the
    run after that misses it.
    """
    app = declare(target)
    send(world, *range(20))
    for nth in range(1, 60, 3):
        try:
            world.killed_at(app, Fault("*", nth, "crash-after"))
        except BaseException as error:
            if isinstance(error, pytest.fail.Exception):
                break  # the run ended before that request
            raise
        world.run(app)
        assert target.ids() == expected(*(record["id"] for record in world.rows("orders")))
        send(world, 1000 + nth)
    send(world, 2000)
    restore = target.drop()
    with pytest.raises(errors.TableNotFoundError):
        world.run(app)
    restore()
    world.run(app)
    assert target.ids() == expected(*(record["id"] for record in world.rows("orders")))


def test_a_table_that_never_got_rows_may_go(world: StepWorld, target: Target) -> None:
    app = declare(target)
    send(world, 0, 5, 10)
    world.run(app)
    if target.exists():
        target.drop()
    send(world, 1)
    world.run(app)
    assert target.ids() == [1]


def test_no_other_application_creates_a_table_that_is_gone(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(20))
    world.run(declare(target))
    other = Application("other", engine="auto")
    other.input_stream("lake.orders", default_offset="oldest").send_to(
        other.output_table(target.table)
    )
    restore = target.drop()
    with pytest.raises(errors.TableNotFoundError):
        world.run(other)
    restore()
    assert target.ids() == expected(*range(20))


def test_a_plan_of_a_renamed_application_finds_its_batches_and_misses_a_table(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(20))
    world.run(declare(target))
    rename_application(world.lake, "enrich", "refine", reason="test", by="test")
    app = Application("refine", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.with_columns(twice="id * 2").send_to(app.output_table(target.table))
    planned = plan_application(app, systems=world.systems)
    compare_output_tables(app, planned, world.lake, writes_as="enrich")
    target.drop()
    with pytest.raises(errors.PlanningError):
        compare_output_tables(app, planned, world.lake, writes_as="enrich")


@pytest.mark.parametrize("target", ["delta"], indirect=True)
def test_a_run_in_another_folder_makes_no_second_table(
    world: StepWorld, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [target.folder / "one", target.folder / "two"]
    app = Application("enrich", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.send_to(app.output_table(DeltaLakeTable("enriched")))
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    send(world, 1)
    world.run(app)
    monkeypatch.chdir(folders[1])
    send(world, 2)
    with pytest.raises(errors.TableNotFoundError) as caught:
        world.run(app)
    assert all(str(folder / "enriched") in str(caught.value) for folder in folders)
    assert list(folders[1].iterdir()) == []
    monkeypatch.chdir(folders[0])
    world.run(app)
    assert DeltaTable("enriched").to_pyarrow_table().num_rows == 2


def test_commands_about_tables_know_output_tables(world: StepWorld, target: Target) -> None:
    send(world, 1)
    world.run(declare(target))
    with pytest.raises(errors.ConfigurationError) as unknown:
        reset_table(world.lake, "delta:elsewhere", by="test", reason="test")
    assert target.table.name in unknown.value.problem
    with pytest.raises(errors.ConfigurationError) as caught:
        open_registered_table(world.lake, target.table.name)
    assert caught.value.table == target.table.name


# -- replays


def replay(world: StepWorld, app: Application, stream: str = "lake.orders") -> None:
    Startpoints(app, lake=world.lake).request(stream, StartpointOldest(), by="test", reason="test")
    world.run(app)


def test_results_of_a_replay_come_in_a_higher_epoch(world: StepWorld, target: Target) -> None:
    app = declare(target)
    send(world, *range(60))
    world.run(app)
    replay(world, app)
    epochs = Counter(target.read()["__epoch"].to_pylist())
    assert epochs == {0: len(expected(*range(60))), 1: len(expected(*range(60)))}


@pytest.mark.lengthy
def test_results_of_a_replay_replace_those_of_before_beside_rows_of_others(
    world: StepWorld, target: Target
) -> None:
    app = declare(target, on_replay="replace")
    send(world, *range(60))
    world.run(app)
    target.append(pa.table({"id": pa.array([-7])}))
    stricter = Application("enrich", engine="auto", max_batch_records=25)
    orders = stricter.input_stream("lake.orders", default_offset="oldest")
    kept = orders.filter("sku <> 'sku-1'").with_columns(twice="id * 2")
    kept.send_to(stricter.output_table(target.table, on_replay="replace"))
    Startpoints(app, lake=world.lake).request(
        "lake.orders", StartpointOldest(), by="test", reason="test"
    )
    with pytest.MonkeyPatch.context() as patch:
        Failure(2, lambda: Crash("commit"), after=True).install(target.kind, patch)
        with pytest.raises(DIED):
            world.run(stricter)
    world.run(stricter)
    assert target.ids() == sorted([-7, *(number for number in range(60) if number % 5 != 1)])
    send(world, 61, 62)
    world.run(stricter)
    assert target.ids()[-1] == 62
    assert 61 not in target.ids()


@pytest.mark.parametrize("again", [["lake.orders.0"], ["lake.orders.0", "lake.orders.1"]])
def test_a_batch_of_new_records_and_of_some_that_are_read_again_replaces_these(
    again: list[str], world: StepWorld, target: Target
) -> None:
    app = declare(target, on_replay="replace")
    send(world, *range(30))
    world.run(app)
    for partition in again:
        Startpoints(app, lake=world.lake).request(
            partition, StartpointOldest(), by="test", reason="test"
        )
    send(world, *range(30, 60))
    world.run(app)
    assert target.ids() == expected(*range(60))


def test_rows_without_source_positions_are_never_left_beside_a_replay_that_replaces(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(10))
    world.run(declare(target))
    app = declare(target, on_replay="replace")
    plan = plan_application(app, systems=world.systems)
    with pytest.raises(errors.PlanningError, match='wrote with on_replay="append"'):
        compare_output_tables(app, plan, world.lake)
    with pytest.raises(errors.ConfigurationError) as caught:
        replay(world, app)
    assert caught.value.argument == "on_replay"
    assert target.ids() == expected(*range(10))
    world.run(declare(target))  # the requested replay
    assert target.ids() == sorted(expected(*range(10)) * 2)


def test_rows_without_an_epoch_are_never_left_beside_a_replay_that_appends(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(10))
    world.run(declare(target, on_replay="replace"))
    app = declare(target)
    plan = plan_application(app, systems=world.systems)
    with pytest.raises(errors.PlanningError):
        compare_output_tables(app, plan, world.lake)
    with pytest.raises(errors.ConfigurationError) as caught:
        replay(world, app)
    assert caught.value.argument == "on_replay"
    assert target.ids() == expected(*range(10))
    world.run(declare(target, on_replay="replace"))  # the requested replay
    assert target.ids() == expected(*range(10))


def test_a_replay_replaces_in_a_table_that_another_application_appends_to(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(10))
    other = Application("other", engine="auto")
    orders = other.input_stream("lake.orders", default_offset="oldest")
    orders.with_columns(twice="id * 2").send_to(other.output_table(target.table))
    world.run(other)
    app = declare(target, on_replay="replace")
    (sent,) = compare_output_tables(
        app, plan_application(app, systems=world.systems), world.lake
    ).output_tables
    assert sent.changes is not None
    assert {change.split()[0] for change in sent.changes} == {*POSITION}
    replay(world, app)  # its first batch is one that replaces
    both = sorted([*range(10), *expected(*range(10))])
    assert target.ids() == both
    replay(world, app)
    assert target.ids() == both


def test_a_plan_says_whose_replays_add_rows_to_a_table_that_replaces_them(
    world: StepWorld, target: Target
) -> None:
    def planned() -> PlannedOutputTable:
        (sent,) = plan_application(app, systems=world.systems).output_tables
        return sent

    world.streams.create("raw", schema=Schema.of(_NESTED), key=["id"], partitions=3)
    first = Application("first", engine="auto")
    first.input_stream("lake.raw", default_offset="oldest").send_to(
        first.output_stream("lake.orders", partitions=3, key="id")
    )
    app = declare(target, on_replay="replace")
    assert planned().upstream == ()
    send(world, *range(10), stream="raw")
    world.run(first)
    world.run(app)
    assert planned().upstream == ("application first (lake.orders)",)
    text = plan_application(app, systems=world.systems).render()
    assert "A replay of application first (lake.orders) replaces no rows of" in text
    assert plan_application(declare(target), systems=world.systems).output_tables[0].upstream == ()
    assert target.ids() == expected(*range(10))
    replay(world, first, "lake.raw")
    world.run(app)
    # as the docs and the plan say
    assert target.ids() == sorted(expected(*range(10)) * 2)


def test_a_plan_says_that_a_table_keeps_its_partitions(world: StepWorld, target: Target) -> None:
    target.by = ("sku",)
    send(world, 1)
    world.run(declare(target))
    target.by = ("id",)
    app = declare(target)
    (sent,) = compare_output_tables(
        app, plan_application(app, systems=world.systems), world.lake
    ).output_tables
    assert sent.changes == ("partitions stay by sku: partition_by=['id'] is for a new table",)


def test_records_without_one_source_can_not_be_replaced(world: StepWorld, target: Target) -> None:
    world.streams.create("more", schema=Schema.of(_NESTED), key=["id"], partitions=3)
    app = Application("enrich", engine="auto")
    both = app.input_stream("lake.orders").merge(app.input_stream("lake.more"))
    both.send_to(app.output_table(target.table, on_replay="replace"))
    with pytest.raises(errors.PlanningError, match=r"lake\.more and lake\.orders"):
        plan_application(app, systems=world.systems)


def test_many_scattered_records_are_replaced_or_refused_by_name(target: Target) -> None:
    columns = OutputColumns(Schema.of(id="bigint"), tuple(POSITION.items()))
    output = open_output(target.table)

    def made(ids: Iterable[int], epoch: int) -> list[pa.Table]:
        rows = [("lake.o.0", number, epoch, "app@1", number) for number in ids]
        names = [*POSITION, "id"]
        records = [dict(zip(names, each, strict=True)) for each in rows]
        return [pa.Table.from_pylist(records, columns.arrow_schema())]

    everything = range(25_000)
    output.commit(OutputBatch("app", 1, _BEGIN, columns, lambda: made(everything, 0)))
    for number, count in ((2, 300), (3, 12_000)):
        again = range(0, 2 * count, 2)
        spans = [ReplacedRange("app@1", "lake.o.0", each, each + 1) for each in again]
        new = [each for each in again if each % 3]
        batch = OutputBatch("app", number, _BEGIN, columns, lambda ids=new: made(ids, 1), spans)
        if target.kind == "delta" and count > 10_000:
            with pytest.raises(errors.TableError, match="12,000 scattered"):
                output.commit(batch)
            return
        output.commit(batch)
        assert target.ids() == [each for each in everything if each not in again or each % 3]


# -- tombstones


@pytest.mark.parametrize("rule", ["fail", "drop", "keep"])
def test_tombstones_follow_the_declared_rule(rule: str, world: StepWorld, target: Target) -> None:
    app = Application("enrich", engine="auto")
    app.input_stream("lake.orders", default_offset="oldest").send_to(
        app.output_table(target.table, tombstones=rule)  # type: ignore[arg-type]
    )
    send(world, 1, 2, deleted=[row(3)])
    if rule == "fail":
        with pytest.raises(errors.SchemaMismatchError, match="1 tombstone"):
            world.run(app)
        return
    report = world.run(app)
    read = {record["id"]: record for record in target.read().to_pylist()}
    if rule == "drop":
        assert [*sorted(read)] == [1, 2]
        assert report.counters[target.table.name]["dropped_tombstones"] == 1
    else:
        assert {number: read[number]["__tombstone"] for number in read} == {
            1: False,
            2: False,
            3: True,
        }


# -- columns


def test_columns_are_added_widened_renamed_and_dropped(world: StepWorld, target: Target) -> None:
    send(world, *range(10))
    world.run(declare(target))
    app = Application("enrich", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    changed = orders.with_columns(added="named_struct('a', id)", twice="id * 2")
    send(world, 11)
    if target.kind == "delta":
        changed.send_to(app.output_table(target.table, drop="lines"))
        with pytest.raises(errors.ConfigurationError, match="rename or drop"):
            world.run(app)
        app = Application("enrich", engine="auto")
        orders = app.input_stream("lake.orders", default_offset="oldest")
        orders.with_columns(added="id + 1").map("id", "sku", "added").send_to(
            app.output_table(target.table)
        )
        world.run(app)
        read = {record["id"]: record for record in target.read().to_pylist()}
        assert (read[11]["added"], read[11]["twice"], read[1]["added"]) == (12, None, None)
        return
    orders.with_columns(added="id + 1").map("id", "sku as code", "at", "added").send_to(
        app.output_table(target.table, renamed={"sku": "code"}, drop=["lines", "twice"])
    )
    before = {field.name: field.field_id for field in target.iceberg().schema().fields}
    world.run(app)
    after = {field.name: field.field_id for field in target.iceberg().schema().fields}
    assert after["code"] == before["sku"]
    assert "lines" not in after
    read = {record["id"]: record for record in target.read().to_pylist()}
    assert (read[11]["added"], read[11]["code"], read[1]["code"]) == (12, "sku-1", "sku-1")
    world.run(app)  # the changes may stay declared


def test_a_type_that_does_not_fit_is_refused_before_anything_is_written(
    world: StepWorld, target: Target
) -> None:
    send(world, *range(10))
    world.run(declare(target))
    app = Application("enrich", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.map("sku as id").send_to(app.output_table(target.table))
    send(world, 11)
    with pytest.raises(errors.SchemaMismatchError, match="id is string, was bigint") as caught:
        world.run(app)
    assert "renamed" not in caught.value.next_step, "the name is the same"
    assert world.state(app).batch == 1
    assert target.commits() == 1


def test_the_plan_names_the_table_and_its_errors(world: StepWorld, target: Target) -> None:
    app = declare(target)
    plan = plan_application(app, systems=world.systems)
    assert target.table.name in str(plan.operators)
    assert not plan.exchanges
    target.by = ("nothing",)
    with pytest.raises(errors.PlanningError, match="nothing"):
        plan_application(declare(target), systems=world.systems)
    twice = Application("twice")
    out = twice.output_table(target.table)
    records = twice.input_stream("lake.orders")
    records.send_to(out)
    with pytest.raises(errors.PlanningError, match="used twice"):
        records.send_to(out)


def test_the_plan_says_what_the_first_commit_creates_or_changes(
    world: StepWorld, target: Target
) -> None:
    target.by = ("sku",)

    def compared(app: Application) -> Any:
        plan = plan_application(app, systems=world.systems)
        assert [sent.changes for sent in plan.output_tables] == [None]
        again = compare_output_tables(app, plan, world.lake)
        assert again == plan
        (sent,) = again.output_tables
        assert not sent.unchecked
        return sent

    first = compared(declare(target, on_replay="replace"))
    assert first.changes == ("the table is created, partitioned by sku",)
    assert open_output(target.table).stored_columns() is None
    assert (first.table, first.on_replay) == (target.table.name, "replace")
    assert first.streams == ("lake.orders",)
    send(world, *range(10))
    world.run(declare(target))
    assert compared(declare(target)).changes == ()
    app = Application("enrich", engine="auto")
    more = app.input_stream("lake.orders").with_columns(more="'x'")
    more.send_to(app.output_table(target.table))
    # what a dry run logs of the same records
    fields = {**_NESTED, "more": "string"}
    sent = OutputColumns(Schema.of(fields), app.output_tables[target.table.name].hidden)
    assert compared(app).changes == tuple(open_output(target.table).check(sent, app.name))
    assert any("more" in change for change in compared(app).changes)


def test_a_table_that_can_not_take_the_records_is_a_problem_of_the_plan(
    world: StepWorld, target: Target
) -> None:
    send(world, 1)
    world.run(declare(target))
    app = Application("enrich", engine="auto")
    app.input_stream("lake.orders").map("sku as id").send_to(app.output_table(target.table))
    plan = plan_application(app, systems=world.systems)
    with pytest.raises(errors.PlanningError) as caught:
        compare_output_tables(app, plan, world.lake)
    assert caught.value.operator == plan.output_tables[0].operator
    assert caught.value.table == target.table.name


def test_a_plan_says_what_could_not_be_compared(
    world: StepWorld, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: AnyOutputTable = IcebergTable("shop.enriched", "elsewhere")
    monkeypatch.setenv("PYICEBERG_CATALOG__ELSEWHERE__URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    if target.kind == "delta":
        monkeypatch.setenv("ADJUNCT_S3_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("ADJUNCT_S3_ATTEMPTS", "1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        table = DeltaLakeTable("s3://bucket/enriched")
    app = Application("enrich", engine="auto")
    app.input_stream("lake.orders").send_to(app.output_table(table))
    plan = compare_output_tables(app, plan_application(app, systems=world.systems), world.lake)
    (sent,) = plan.output_tables
    assert sent.changes is None
    assert "does not answer" in sent.unchecked
    assert sent.unchecked in plan.render()
    assert plan.to_json()["output_tables"][0]["unchecked"] == sent.unchecked


def test_a_plan_says_of_which_columns_the_types_are_not_known(
    world: StepWorld, target: Target
) -> None:
    def app() -> Application:
        made = Application("enrich")
        orders = made.input_stream("lake.orders", default_offset="oldest")
        orders.map(lambda frame: frame).send_to(made.output_table(target.table))
        return made

    (sent,) = compare_output_tables(
        app(), plan_application(app(), systems=world.systems), world.lake
    ).output_tables
    assert sent.changes == ("the table is created",)
    assert sent.unchecked
    send(world, 1)
    world.run(declare(target))
    (sent,) = compare_output_tables(
        app(), plan_application(app(), systems=world.systems), world.lake
    ).output_tables
    assert sent.changes is None
    assert sent.unchecked


@pytest.mark.parametrize("on_replay", ["append", "replace"])
def test_a_preview_says_what_records_that_are_read_again_do_to_the_table(
    on_replay: str, world: StepWorld, target: Target
) -> None:
    send(world, *range(10))
    app = declare(target, on_replay=on_replay)
    world.run(app)
    asked = Startpoints(app, lake=world.lake)
    tables = asked.preview("lake.orders", StartpointOldest()).tables
    assert [*tables] == [target.table.name]
    found = {"append": "__epoch", "replace": "replace the earlier ones"}
    assert found[on_replay] in tables[target.table.name]
    assert not asked.preview("lake.orders", StartpointUpcoming()).tables


def test_a_test_application_writes_no_table(world: StepWorld, target: Target) -> None:
    app = declare(target)
    with TestApplication(app, {"lake.orders": TestStream(Schema.of(_NESTED), "id", 3)}) as test:
        test.input(
            "lake.orders", [dict(zip(_NESTED, row(number), strict=True)) for number in (1, 5)]
        )
        (sent,) = test.run(IN_PROCESS).output(target.table.name)
    assert (sent["id"], sent["twice"]) == (1, 2)
    assert open_output(target.table).stored_columns() is None


# -- S3 and YAML


def test_tables_on_s3_are_written_with_the_settings_of_lakes(
    moto_s3: S3Server, world: StepWorld, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto_s3.set_in(monkeypatch)
    url = moto_s3.url()
    bucket = url.removeprefix("s3://").partition("/")[0]
    table: AnyOutputTable = DeltaLakeTable(f"{url}/paid")
    if target.kind == "iceberg":  # by the Glue catalogue
        settings = {"TYPE": "glue", "GLUE__ENDPOINT": moto_s3.endpoint, "GLUE__REGION": "us-east-1"}
        settings |= {"S3__ENDPOINT": moto_s3.endpoint, "WAREHOUSE": f"s3://{bucket}/warehouse"}
        for name, value in settings.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__GLUE__{name}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
        table = IcebergTable(f"shop{uuid4().hex}.paid", "glue", ("days(at)",))
    app = Application("enrich", engine="auto", max_batch_records=40)
    app.input_stream("lake.orders", default_offset="oldest").send_to(app.output_table(table))
    send(world, *range(60))
    world.run(app)
    send(world, 100)
    world.run(app)
    if isinstance(table, IcebergTable):
        read = table.open().load_table(table.identifier).scan().to_arrow()
    else:
        assert moto_s3.endpoint not in repr(table)
        read = DeltaTable(
            delta_place(table.url), storage_options=delta_options(table.url)
        ).to_pyarrow_table()
    assert sorted(read["id"].to_pylist()) == [*range(60), 100]


def test_output_tables_are_declared_in_yaml_and_are_assets(target: Target) -> None:
    format_of = "{identifier: shop.paid, partition_by: [days(at)]}"
    if target.kind == "delta":
        format_of = "{url: s3://tables/paid, partition_by: [day]}"
    text = f"""
applications:
  one:
    output_tables:
      paid: {{{target.kind}: {format_of}, on_replay: replace}}
    steps:
      - input_stream: lake.in
      - send_to: paid
"""
    (app,) = component(text).applications().values()
    (output,) = app.output_tables.values()
    assert output.on_replay == "replace"
    assert len(output.table.partition_by) == 1
    (node,) = [made.node for made in find_outputs(app)]
    key = AdjunctTranslator().get_asset_key(asset_subject(app, node))
    wanted = (
        ["iceberg", "shop", "paid"] if target.kind == "iceberg" else ["delta", "tables", "paid"]
    )
    assert key.path == wanted


# -- Spark


@pytest.mark.one_engine
@pytest.mark.spark
def test_spark_writes_what_this_process_writes(
    step_world: StepWorld, target: Target, tmp_path: Path
) -> None:
    step_world.streams.create("orders", schema=Schema.of(_NESTED), key=["id"], partitions=3)
    target.by = ("days(at)",) if target.kind == "iceberg" else ("sku",)
    app = declare(target, on_replay="replace")
    send(step_world, *range(90))
    for engine in ("spark",):
        app.engine = engine
        step_world.run(app)
    replay(step_world, app)
    assert target.ids() == expected(*range(90))
    read = {record["id"]: record for record in target.read().to_pylist()}
    for number in expected(*range(90)):
        _, sku, at, lines = row(number)
        assert (read[number]["sku"], read[number]["at"], read[number]["lines"]) == (sku, at, lines)
        assert read[number]["__source_epoch"] == 1


def test_a_replay_of_records_from_before_a_repartitioning_doubles_no_rows(
    world: StepWorld, target: Target
) -> None:
    app = declare(target, on_replay="replace")
    send(world, *range(30))
    world.run(app)
    repartition_stream(world.lake, "orders", 4, reason="test", by="test")
    send(world, *range(30, 60))
    world.run(app)
    startpoints = Startpoints(app, lake=world.lake)
    with pytest.raises(errors.ConfigurationError) as caught:
        startpoints.request("lake.orders", StartpointOldest(), by="test", reason="test")
    assert (caught.value.stream, caught.value.table) == ("lake.orders", target.table.name)
    asked = startpoints.preview("lake.orders", StartpointOldest())
    assert any(caught.value.problem in note for note in asked.notes)
    # Records that were sent after it can be read again.
    continued = world.streams.info("orders").repartitioned
    assert continued is not None
    for number, offset in enumerate(continued.continued_at):
        startpoints.request(
            f"lake.orders.{number}", StartpointSpecific(offset), by="test", reason="test"
        )
    world.run(app)
    assert target.ids() == expected(*range(60))
    # As the error says: a new table gets all rows again.
    new = Target(target.kind, target.folder / "new", iceberg_name="shop.new")
    moved = declare(new, on_replay="replace")
    Startpoints(moved, lake=world.lake).request(
        "lake.orders", StartpointOldest(), by="test", reason="test"
    )
    world.run(moved)
    assert new.ids() == expected(*range(60))


def test_a_request_from_before_that_a_run_finds_after_a_repartitioning_doubles_no_rows(
    world: StepWorld, target: Target
) -> None:
    app = declare(target, on_replay="replace")
    send(world, *range(30))
    world.run(app)
    repartition_stream(world.lake, "orders", 4, reason="test", by="test")
    startpoints = Startpoints(app, lake=world.lake)
    with patch(f"{REQUESTS}.check_rows_replaceable"):
        startpoints.request("lake.orders", StartpointOldest(), by="test", reason="test")
    send(world, *range(30, 60))
    with pytest.raises(errors.ConfigurationError) as caught:
        world.run(app)
    assert caught.value.table == target.table.name
    startpoints.take_back("lake.orders", by="test", reason="as the error says")
    world.run(app)
    assert target.ids() == expected(*range(60))

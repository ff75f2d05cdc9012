"""Tables of an Iceberg REST catalogue as outputs, streams, versions and changes: a server made of
Iceberg's own Java library, with answers that are lost and refused, compared with plain Python.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import Config

from dagster_adjunct import errors
from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.table_versions import IcebergVersions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.file_streams.iceberg import IcebergStreams, iceberg_stream
from dagster_adjunct.resources.file_streams.table_changes import (
    SYSTEM,
    TableChangeStreams,
    iceberg_changes,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_snapshots.iceberg import IcebergSnapshots
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld
from tests.resources.file_streams.table_lab import Reader
from tests.servers.iceberg_rest import TOKEN, IcebergRest
from tests.servers.tcp_proxy import TcpProxy

DIED: Any = Crash
SECRET = "adjunct-vended-secret-key"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_COLUMNS = {"id": "bigint", "sku": "string", "at": "timestamp", "lines": [{"n": "int"}]}
_COMMIT = b"POST /v1/namespaces/shop/tables/orders "


@dataclass
class Rest:
    """The table `shop.orders` of a REST catalogue, to which requests go by a proxy."""

    server: IcebergRest
    proxy: TcpProxy
    catalog: str
    by: tuple[str, ...] = ("days(at)",)

    @property
    def table(self) -> IcebergTable:
        return IcebergTable("shop.orders", self.catalog, self.by)

    def load(self) -> Any:
        return self.table.open().load_table("shop.orders")

    def read(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.load().scan().to_arrow().sort_by("id").to_pylist()
        return rows

    def ids(self) -> list[int]:
        return [row["id"] for row in self.read()]

    def append(self, number: int) -> None:
        """Append a row as somebody else does, to a table without partitions."""
        self.load().append(pa.table({"id": pa.array([number])}))


@pytest.fixture
def rest(iceberg_rest: IcebergRest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rest]:
    iceberg_rest.vended = {"s3.access-key-id": "vended", "s3.secret-access-key": SECRET}
    with TcpProxy(iceberg_rest.port).running() as proxy:
        name = f"r{uuid4().hex}"
        settings = {"TYPE": "rest", "URI": f"http://127.0.0.1:{proxy.port}", "TOKEN": TOKEN}
        for setting, value in settings.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__{name.upper()}__{setting}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
        yield Rest(iceberg_rest, proxy, name)


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.streams.create("orders", schema=Schema.of(_COLUMNS), key=["id"], partitions=2)
    return made


def send(world: StepWorld, *ids: int) -> None:
    rows = [(n, f"sku-{n % 5}", _BEGIN + timedelta(hours=7 * n), [{"n": n}]) for n in ids]
    world.send("orders", *rows)


def declare(rest: Rest, **options: Any) -> Application:
    app = Application("enrich", engine="auto", max_batch_records=20)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.filter("sku <> 'sku-0'").send_to(app.output_table(rest.table, **options))
    return app


def expected(*ids: int) -> list[int]:
    return [number for number in ids if number % 5]


def test_outputs_are_created_evolved_replaced_and_written_beside_others(
    rest: Rest, world: StepWorld
) -> None:
    rest.by = ()
    app = declare(rest, on_replay="replace")
    send(world, *range(30))
    assert world.run(app).batches == 2
    assert rest.ids() == expected(*range(30))
    rest.append(-7)
    changed = Application("enrich", engine="auto", max_batch_records=20)
    orders = changed.input_stream("lake.orders", default_offset="oldest")
    kept = orders.filter("sku <> 'sku-1'").map("id", "sku as code", "at", "id + 1 as added")
    kept.send_to(
        changed.output_table(
            rest.table, on_replay="replace", renamed={"sku": "code"}, drop=["lines"]
        )
    )
    Startpoints(changed, lake=world.lake).request(
        "lake.orders", StartpointOldest(), by="test", reason="test"
    )
    send(world, *range(30, 40))
    commit = RestCatalog.commit_table
    done: list[int] = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(1)
            rest.append(-6)
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestCatalog, "commit_table", meanwhile)
        world.run(changed)
    assert rest.ids() == [-7, -6, *(number for number in range(40) if number % 5 != 1)]
    read = {row["id"]: (row["code"], row["added"]) for row in rest.read()}
    assert read[2] == ("sku-2", 3)
    assert "lines" not in rest.load().schema().column_names


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after", "unknown", "refused"])
def test_a_commit_without_an_answer_is_in_the_table_once(
    trouble: Any, rest: Rest, world: StepWorld
) -> None:
    app = declare(rest)
    send(world, 1, 2)
    world.run(app)
    send(world, *range(3, 40))
    if trouble == "unknown":
        rest.server.refusals[:] = [504]
    elif trouble == "refused":
        rest.server.refusals[:] = [409]
    else:
        rest.proxy.next(trouble, holding=_COMMIT)
    try:
        world.run(app)
    except errors.TransientError:
        assert trouble in ("lost-before", "unknown")
    world.run(app)
    assert rest.ids() == expected(*range(1, 40))
    assert len(rest.load().snapshots()) == 3


@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_dies_before_or_after_a_commit_repeats_nothing(
    after: bool, rest: Rest, world: StepWorld
) -> None:
    app = declare(rest)
    send(world, *range(20))
    world.run(app)
    send(world, *range(20, 40))
    commit = RestCatalog.commit_table

    def die(*args: Any, **options: Any) -> None:
        if after:
            commit(*args, **options)
        raise Crash("commit")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestCatalog, "commit_table", die)
        with pytest.raises(DIED):
            world.run(app)
    world.run(app)
    assert rest.ids() == expected(*range(40))
    assert len(rest.load().snapshots()) == 2


def test_a_table_is_a_stream_versions_and_changes_and_no_secret_is_kept(
    rest: Rest, world: StepWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "py4j")  # of the server
    rest.by = ()
    app = declare(rest)
    send(world, *range(30))
    world.run(app)
    schema = Schema.of({"id": "bigint", "sku": "string"})
    table = IcebergTable("shop.orders", rest.catalog)
    stream = Reader(
        IcebergStreams(world.lake), iceberg_stream(f"s{uuid4().hex}", table, schema=schema)
    )
    assert sorted(row["id"] for row in stream.rows()) == expected(*range(30))
    bounded = bounded_dataset(
        "orders", input=IcebergVersions(table, schema), key="id", partitions=2
    )
    changes = iceberg_changes(f"c{uuid4().hex}", table, schema=schema, key="id")
    followed = unbounded_dataset(
        "followed", input=changes, key="id", partitions=2, changes=OperationColumn()
    )

    def advance() -> None:
        systems: Any = {SYSTEM: TableChangeStreams(world.lake)}
        for spec in (bounded, followed):
            advance_dataset(spec, lake=world.lake, systems=systems, spark=IN_PROCESS, by="test")
            with open_dataset(world.lake, spec) as opened:
                found = {entry["id"]: entry["sku"] for _, entry in opened.items()}
            assert found == {row["id"]: row["sku"] for row in rest.read()}

    advance()
    rest.load().delete("id < 10")
    rest.append(100)
    advance()

    snapshots = IcebergSnapshots(table).pinned()
    (state,) = snapshots.history(None).states[-1:]
    pickled = pickle.dumps((snapshots, snapshots.plan(state, ["id", "sku"])))
    stored = b"".join(path.read_bytes() for path in world.folder.rglob("*") if path.is_file())
    assert any("/tables/orders" in path for _, path, _ in rest.server.seen)
    for secret in (SECRET, TOKEN):
        assert secret.encode() not in stored
        assert secret.encode() not in pickled
        assert secret not in caplog.text
        assert secret not in repr((table, snapshots))
    again, plan = pickle.loads(pickled)
    read = [pa.table(each) for part in plan.parts for each in again.read(state, part, ["id"])]
    assert sorted(pa.concat_tables(read)["id"].to_pylist()) == rest.ids()

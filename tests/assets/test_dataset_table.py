"""A dataset's entries as the records of a table: what gets see while versions come and go."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct import Application, run_application
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import DatasetTable
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.orchestration.batch_log.batch_log import application_state
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
)
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries, State
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.assets.conftest import World

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
LEGS = bounded_dataset("legs", input="lake.legs", key=["origin", "number"], partitions=2)
COUNT = 20
KEYS = [f"N{n}" for n in range(COUNT)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    world.stream("planes", Schema.of(tailnum="string", seats="int"), ["tailnum"], 2)
    return world


def publish(world: World, number: int) -> None:
    """Publish a version in which each plane has `number` seats."""
    world.send("planes", [(key, number) for key in KEYS], version=f"v{number}")
    world.advance(PLANES)


def of(function: DatasetTable, key: str = "tailnum") -> BlockingTable:
    return BlockingTable(RemoteTable("planes", key=key, read_function=function))


def leased(world: World) -> list[str]:
    return sorted(
        version for lease in list_leases(world.lake, "planes") for version in lease.versions
    )


def plane(key: str, number: int) -> dict[str, object]:
    return {"tailnum": key, "seats": number}


@pytest.mark.lengthy
def test_entries_are_records_and_the_table_moves_to_the_version_that_is_served(
    world: World,
) -> None:
    publish(world, 1)
    with of(DatasetTable(world.lake, "planes", refresh_every=0)) as table:
        assert table.get("N1") == plane("N1", 1)
        assert table.get("X") is None
        publish(world, 2)
        assert table.get_all([*KEYS, "X"]) == {key: plane(key, 2) for key in KEYS}
    with of(DatasetTable(world.lake, "planes", refresh_every=None)) as table:
        assert table.get("N1") == plane("N1", 2)
        publish(world, 3)
        assert table.get("N1") == plane("N1", 2), "until it is opened again"
        table.close()
        assert table.get("N1") == plane("N1", 3)
    with of(DatasetTable(world.lake, "planes", version="v1", refresh_every=0)) as table:
        assert table.get("N1") == plane("N1", 1)


@pytest.mark.lengthy
def test_the_version_that_is_read_is_leased_until_the_table_moves_on_or_is_closed(
    world: World,
) -> None:
    publish(world, 1)
    function = DatasetTable(world.lake, "planes", refresh_every=None)
    with of(function) as table:
        table.get("N1")
        table.get("N2")  # the first answer takes no lease
        assert len(leased(world)) == 1
        publish(world, 2)
        discard(world.lake, "planes", DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
        assert table.get_all(KEYS) == {key: plane(key, 1) for key in KEYS}
    assert leased(world) == []


def test_writing_is_refused(world: World) -> None:
    publish(world, 1)
    function = DatasetTable(world.lake, "planes")
    with of(function) as table, pytest.raises(ConfigurationError, match="no write function"):
        table.put("N1", plane("N1", 5))
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(function.send(Operation(OperationKind.PUT, RowEntries(["N1"], [{}]))))
    assert caught.value.facts == {"dataset": "planes"}
    assert not function.capabilities.updates


def test_a_key_that_is_none_is_refused_and_the_others_are_read(world: World) -> None:
    publish(world, 1)
    function = DatasetTable(world.lake, "planes")
    outcomes = asyncio.run(
        function.send(Operation(OperationKind.GET, RowEntries(["N1", 7, None, "N2", "N1"])))
    )
    assert outcomes.records == [plane("N1", 1), None, None, plane("N2", 1), plane("N1", 1)]
    assert {place: (p.state, type(p.error)) for place, p in outcomes.problems.items()} == {
        1: (State.REFUSED, SchemaMismatchError),
        2: (State.REFUSED, NullKeyError),
    }
    asyncio.run(function.close())


def test_keys_of_several_columns_come_in_the_order_that_the_request_names(world: World) -> None:
    world.stream(
        "legs", Schema.of(origin="string", number="bigint", miles="int"), ["origin", "number"], 2
    )
    world.send("legs", [("JFK", n, 100 * n) for n in range(5)], version="v1")
    world.advance(LEGS)
    function = DatasetTable(world.lake, "legs")
    legs = Operation(OperationKind.GET, RowEntries([("JFK", 3), ("JFK", 9)]))
    turned = Operation(OperationKind.GET, RowEntries([(3, "JFK")]), key=("number", "origin"))
    leg = {"origin": "JFK", "number": 3, "miles": 300}
    assert asyncio.run(function.send(legs)).records == [leg, None]
    beyond = asyncio.run(
        function.send(Operation(OperationKind.GET, RowEntries([("JFK", 2**63), ("JFK", 3)])))
    )
    assert (beyond.records, beyond.problems) == ([None, leg], {}), (
        "a number that the column can't hold"
    )
    assert asyncio.run(function.send(turned)).records == [leg]
    assert function.column_types() == {"origin": "string", "number": "bigint", "miles": "int"}
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(
            function.send(
                Operation(OperationKind.GET, RowEntries([(3, "JFK")]), key=("number", "x"))
            )
        )
    assert caught.value.argument == "key"
    asyncio.run(function.close())


def test_a_table_with_another_key_than_the_dataset_finds_nothing_by_it(world: World) -> None:
    publish(world, 1)
    with of(DatasetTable(world.lake, "planes"), "seats") as table:
        for asked in (lambda: table.get("N1"), lambda: table.get_all(["N1"])):
            with pytest.raises(ConfigurationError) as caught:
                asked()
            assert caught.value.argument == "key"
    with of(DatasetTable(world.lake, "planes")) as table:
        assert table.get("N1") == plane("N1", 1)


def test_a_join_with_a_dataset_by_another_key_is_refused_before_a_batch(world: World) -> None:
    publish(world, 1)
    world.stream("flights", Schema.of(number="string"), ["number"], 1)
    world.send("flights", [("N1",)])
    app = Application("seats", engine="auto")
    planes = RemoteTable("planes", key="number", read_function=DatasetTable(world.lake, "planes"))
    flights = app.input_stream("lake.flights", default_offset="oldest")
    flights.join(app.table(planes), on="number", select={"seats": "int"}).send_to(
        app.output_stream("lake.out", partitions=1, key="number")
    )
    with pytest.raises(ConfigurationError) as caught:
        run_application(app, lake=world.lake, spark=IN_PROCESS)
    assert caught.value.argument == "key"
    assert application_state(world.lake, "seats").open is None


def test_what_is_not_there_is_reported_and_comes_when_it_is_published(world: World) -> None:
    function = DatasetTable(world.lake, "nosuch")
    with of(function) as table, pytest.raises(DatasetNotFoundError):
        table.get("N1")
    publish(world, 1)
    with of(DatasetTable(world.lake.url, "planes")) as table:
        assert table.get("N1") == plane("N1", 1)


def test_it_travels_as_its_declaration(world: World) -> None:
    publish(world, 1)
    function = DatasetTable(world.lake, "planes", version="v1", refresh_every=7.0)
    with of(function) as table:
        table.get("N1")
        sent = pickle.loads(pickle.dumps(function))
    described = {
        "backend": "dataset",
        "lake": world.lake.url,
        "dataset": "planes",
        "version": "v1",
        "refresh_every": 7.0,
    }
    assert (
        describe_function(function)
        == describe_function(sent)
        == describe_function(function_from_description(described))
        == described
    )
    with of(sent) as table:
        assert table.get("N1") == plane("N1", 1)


@pytest.mark.lengthy
def test_threads_share_it_while_others_close_it(world: World) -> None:
    publish(world, 1)
    function = DatasetTable(world.lake, "planes", refresh_every=0)

    def read(turns: int) -> int:
        for _ in range(turns):
            with of(function) as table:
                numbers = {record["seats"] for record in table.get_all(KEYS).values()}
                assert len(numbers) == 1, "one version"
        return numbers.pop()

    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(read, 10) for _ in range(4)]
        publish(world, 2)
        assert {done.result() for done in reading} <= {1, 2}
    assert leased(world) == []

"""A run that was paused, taken for dead, and wakes changes nothing that its successors have written
since.

It is paused before each of its requests in turn (`paused_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.operators.calls import SinkContext
from dagster_adjunct.orchestration.operators.functions import pickle_function
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.recorded_answers import SinkCall, _call_on_batches
from dagster_adjunct.resources.errors import CommitConflictError, LeaseLostError, RunLeaseLostError
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects.fence import lease_lost_error
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings, TopicFacts
from dagster_adjunct.resources.streams.kafka.produce import Sender
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import KEYS, PausedFunction, PausedWorld, at_call
from tests.orchestration.test_tables_that_stores_lost import connect
from tests.rounds import rounds
from tests.servers.http_records import RecordService, running_service

Function = Callable[[PausedWorld, Any], Any]
TYPES = {"k": "string", "n": "bigint"}


def memory(world: PausedWorld, folder: Path) -> Any:
    return MemoryTable(f"paused-{world.number}")


def sqlite(world: PausedWorld, folder: Path) -> Any:
    return SqliteTable(folder / f"{world.number}.sqlite", "t", "k", columns=TYPES, create=True)


def rows_in_the_lake(world: PausedWorld, folder: Path) -> Any:
    return KeyValueRows(world.lake, "app", "t", "k", columns=TYPES, create=True, partitions=2)


def rows_in_sqlite(world: PausedWorld, folder: Path) -> Any:
    stored_in = SqliteSegments(folder / f"rows-{world.number}.sqlite")
    return KeyValueRows(
        world.lake, "app", "t", "k", columns=TYPES, create=True, partitions=2, stored_in=stored_in
    )


def postgres(world: PausedWorld, server: Any) -> Any:
    return PostgresTable(
        f"paused_{world.number}", "k", columns=TYPES, create=True, connect=connect(server)
    )


def redis(world: PausedWorld, server: Any) -> Any:
    return RedisTable(f"paused{world.number}", "k", columns=TYPES, url=server.url())


def http(world: PausedWorld, service: RecordService) -> Any:
    return HttpTable(service.url, f"/{world.number}/{{k}}", "k", puts_if_absent=True)


def dynamodb(world: PausedWorld, server: Any) -> Any:
    where = {"region": "us-east-1", "endpoint_url": server.endpoint}
    return DynamoDbTable(f"paused-{world.number}", "k", columns=TYPES, create=True, **where)


@pytest.fixture
def http_service() -> Iterator[RecordService]:
    with running_service() as service:
        yield service


# Each with the fixture that it needs: where it is stored.
TABLES = [
    pytest.param(memory, "tmp_path", id="memory"),
    pytest.param(sqlite, "tmp_path", id="sqlite", marks=pytest.mark.lengthy),
    pytest.param(rows_in_the_lake, "tmp_path", id="rows in the lake", marks=pytest.mark.lengthy),
    pytest.param(rows_in_sqlite, "tmp_path", id="rows in SQLite", marks=pytest.mark.lengthy),
    pytest.param(http, "http_service", id="http", marks=pytest.mark.lengthy),
    pytest.param(
        postgres, "postgres_server", id="postgres", marks=[pytest.mark.server, pytest.mark.lengthy]
    ),
    pytest.param(
        redis, "redis_server", id="redis", marks=[pytest.mark.server, pytest.mark.lengthy]
    ),
    pytest.param(
        dynamodb, "dynamodb", id="dynamodb", marks=[pytest.mark.server, pytest.mark.lengthy]
    ),
]
FENCED: list[Function] = [rows_in_the_lake, rows_in_sqlite]


def puts_and_deletes(app: Application, table: RemoteTable[Any, Any, Any]) -> None:
    kept = app.input_stream("lake.changes", default_offset="oldest")
    handle = app.table(table)
    kept.filter("not gone").select("k", "n").send_to(handle)


def sets(app: Application, table: RemoteTable[Any, Any, Any]) -> None:
    kept = app.input_stream("lake.changes", default_offset="oldest")
    kept.update(app.table(table), set={"n": "n"}, if_missing={"n": "n"})


def world_with(
    of: Function,
    folder: Any,
    write: Callable[[Application, RemoteTable[Any, Any, Any]], None],
    pauses: Callable[[PausedWorld], dict[str, Callable[[], object]]],
) -> tuple[PausedWorld, BlockingTable[Any, Any, Any]]:
    """Return a world whose application writes to a new table, whose function pauses the first
    run.
    """

    def make(world: PausedWorld, first: bool) -> Application:
        function = of(world, folder)
        if first:
            function = PausedFunction(function, **pauses(world))
        app = Application("sets", engine="auto")
        write(app, RemoteTable("t", key="k", write_function=function, batch_size=5, in_flight=1))
        return app

    world = PausedWorld(make)
    reads = of(world, folder)
    return world, BlockingTable(RemoteTable("t", key="k", read_function=reads))


def content(table: BlockingTable[Any, Any, Any]) -> dict[str, Any]:
    with table:
        return table.get_all([f"k{n}" for n in range(KEYS)])


@pytest.mark.rounds
@pytest.mark.parametrize("write", [puts_and_deletes, sets])
@pytest.mark.parametrize(("of", "where"), TABLES)
def test_nothing_is_sent_by_a_run_that_was_paused_before_any_request(
    of: Function, where: str, write: Any, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(where)
    whole, expected = world_with(of, place, write, lambda world: {})
    whole.run_alone()
    for nth in rounds([1, 3], [1, 2, 3, 4]):
        world, table = world_with(
            of, place, write, lambda world, nth=nth: {"before": at_call(nth, world.pause)}
        )
        error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert error.run == "first"
        assert content(table) == content(expected), nth


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("of", FENCED)
def test_a_table_with_fences_refuses_even_the_request_that_was_under_way(
    of: Function, tmp_path: Path
) -> None:
    whole, expected = world_with(of, tmp_path, sets, lambda world: {})
    whole.run_alone()
    for nth in rounds([2], [1, 2, 3, 4]):
        world, table = world_with(
            of, tmp_path, sets, lambda world, nth=nth: {"within": at_call(nth, world.pause)}
        )
        error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert content(table) == content(expected), nth


class Choosy(MemoryTable):
    """Rejects the record of one key for good."""

    async def send(self, operation: Operation[Any]) -> Outcomes:
        outcomes = await super().send(operation)
        if operation.kind is OperationKind.GET:
            return outcomes
        refused = {
            place: Problem(State.REFUSED, ValueError("it is not liked"))
            for place, key in enumerate(operation.entries.keys)
            if key == "k5"
        }
        return Outcomes(len(operation), problems=refused)


def everything(world: PausedWorld, first: bool) -> Application:
    """Return what writes to the lake: two output streams, dead letters, recorded answers, and
    datasets on the way.
    """
    app = Application("sets", engine="auto", max_batch_records=16)
    names = MemoryTable(f"names-{world.number}")
    names.fill({f"k{n}": {"k": f"k{n}", "name": f"name {n}"} for n in range(KEYS)})
    looked_up = app.table(RemoteTable("names", key="k", read_function=names, batch_size=5))
    facts = app.table(unbounded_dataset("facts", input="lake.changes", key="k", partitions=2))
    chosen = Choosy(f"choosy-{world.number}")
    records = app.input_stream("lake.changes", default_offset="oldest")
    named = records.join(looked_up, on="k", select={"name": "string"})
    out = named.send_to(app.output_stream("lake.named", partitions=2, key="k"))
    out.join(facts, on="k", select=["gone as there"], how="left").send_to(
        app.output_stream("lake.known", partitions=1)
    )
    letters = app.output_stream("lake.letters", partitions=1)
    records.send_to(
        app.table(RemoteTable("choosy", key="k", write_function=chosen)),
        dead_letters=letters,
        at_most=9,
    )
    return app


def left_in(world: PausedWorld) -> dict[str, Any]:
    """Return what runs have left in the lake: each stream's records in order, the dataset,
    positions, startpoints.
    """
    records: dict[str, Any] = {}
    for stream in ("named", "known", "letters"):
        table = world.streams.read_arrow(world.streams.all_ranges(stream))
        order = [("__partition", "ascending"), ("__offset", "ascending")]
        kept = [
            name for name in table.column_names if name not in ("__timestamp", "there", "problem")
        ]
        records[stream] = table.sort_by(order).select(kept).to_pylist()
    state = BatchLog(world.lake, "sets").read().state
    current = StoredVersions(world.lake, "facts").require_current()
    facts = {key: dict(entry.items()) for key, entry in current.items()}
    answers = [item.key for item in world.store.list("applications/sets/answers/")]
    listed = Startpoints(everything(world, False), lake=world.lake).list()
    asked = {name: listed[name] for name in ("waiting", "handed")}
    return {
        "records": records,
        "facts": facts,
        "open": state.open,
        "at": state.checkpoint,
        "answers": answers,
    } | asked


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_run_paused_at_any_request_to_the_lake_changes_nothing_that_followed() -> None:
    def prepare() -> PausedWorld:
        world = PausedWorld(everything)
        asked = Startpoints(everything(world, False), lake=world.lake)
        asked.request(
            "lake.changes",
            StartpointOldest(),
            by="test",
            reason="a request that the first run applies",
        )
        return world

    whole = prepare()
    counted = FaultyStore(whole.store)
    whole.run("first", Lake(counted, whole.lake.id))
    whole.go_on()
    expected, requests = left_in(whole), counted.requests
    for nth in rounds([*range(5, len(requests), 26)], [*range(1, len(requests) + 1)]):
        world = prepare()
        pause = Fault("*", nth, "meanwhile", action=world.pause)
        error = world.run_paused(Lake(FaultyStore(world.store, [pause]), world.lake.id))
        made = (nth, requests[nth - 1], error)
        assert world.paused, made
        assert error is None or isinstance(
            error, RunLeaseLostError | CommitConflictError | LeaseLostError
        ), made
        # Answers that were being recorded may be left; nobody reads them, and the next run deletes
        # them.
        assert {**left_in(world), "answers": []} == expected, made
        world.run("last")
        assert left_in(world) == expected, made


class LostSoon:
    """A fence whose lease is lost after some checks."""

    def __init__(self, checks: int) -> None:
        self.left = checks

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise lease_lost_error("sets", "first", "it was taken")


def test_a_sink_is_not_called_once_the_lease_is_lost() -> None:
    called: list[int] = []

    def sink(records: pa.RecordBatch, context: SinkContext) -> None:
        called.append(records.num_rows)

    fence: Any = LostSoon(2)
    call = SinkCall("sink-1", "sink()", pickle_function("sink-1", sink), "sets", 1, fence=fence)
    object.__setattr__(call, "shipped", SimpleNamespace(unpickle=lambda: sink))
    batches = [pa.RecordBatch.from_pydict({"n": [number]}) for number in range(5)]
    with pytest.raises(RunLeaseLostError):
        list(_call_on_batches(call, [], iter(batches)))
    assert called == [1, 1]


def test_a_kafka_producer_takes_no_record_once_the_lease_is_lost() -> None:
    settings = KafkaSettings("kafka-of-paused-runs", "127.0.0.1:1")
    fence: Any = LostSoon(2)
    sender = Sender(TopicFacts(settings, "s", "t", "id", 1), fence=fence)
    sent: list[Any] = []
    sender.producer = SimpleNamespace(produce=lambda *record, **more: sent.append(record))  # type: ignore[assignment]
    with pytest.raises(RunLeaseLostError):
        sender.send([(b"k", b"v", 0, [])] * 5)
    assert sent == [("t", b"v", b"k")] * 2

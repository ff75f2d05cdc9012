"""A table with fenced=True refuses what a paused run had under way, after a later run has begun, in
every store.

Each run is paused between its last look at the lease and its request, which then arrives after its
successors' writes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError

from dagster_adjunct.errors import (
    ConfigurationError,
    RunLeaseLostError,
    TableAccessError,
    TableUnavailableError,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.columns import Column
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.dynamodb_bookkeeping import FencedWrites
from dagster_adjunct.resources.table_backends.dynamodb_items import ItemCodec
from dagster_adjunct.resources.table_backends.dynamodb_requests import TableRequests
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.table_backends.write_plan import validate_entries
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.paused_runs import KEYS, START, PausedWorld
from tests.orchestration.step_world import StepWorld
from tests.orchestration.test_tables_that_stores_lost import connect
from tests.rounds import rounds

COLUMNS = {"k": "string", "n": "bigint", "seen": "array<bigint>", "first": "bigint"}
_names = count()
Pause = Callable[[], object]


@dataclass
class PausedStore:
    """A store's new table; `table(pause)` is its function, which calls `pause` before each
    write.
    """

    make: type[Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def table(self, pause: Pause = lambda: None) -> Any:
        made = self.make

        class Pausing(made):  # type: ignore[valid-type, misc]
            async def send(self, operation: Operation[Any]) -> Outcomes:
                if operation.kind is not OperationKind.GET:
                    pause()
                outcomes: Outcomes = await super().send(operation)
                return outcomes

        return Pausing(*self.arguments, **self.options)


def sqlite(request: pytest.FixtureRequest, folder: Path) -> PausedStore:
    file = folder / f"fenced-{next(_names)}.sqlite"
    return PausedStore(SqliteTable, (file, "t", "k"), {"columns": COLUMNS, "create": True})


def postgres(request: pytest.FixtureRequest, folder: Path) -> PausedStore:
    server = request.getfixturevalue("postgres_server")
    options = {"columns": COLUMNS, "create": True, "connect": connect(server)}
    return PausedStore(PostgresTable, (f"fenced_{next(_names)}", "k"), options)


def redis(request: pytest.FixtureRequest, folder: Path) -> PausedStore:
    server = request.getfixturevalue("redis_server")
    return PausedStore(
        RedisTable, (f"fenced{next(_names)}", "k"), {"columns": COLUMNS, "url": server.url()}
    )


def dynamodb(request: pytest.FixtureRequest, folder: Path) -> PausedStore:
    server = request.getfixturevalue("dynamodb")
    where = {"region": "us-east-1", "endpoint_url": server.endpoint}
    options = {"columns": COLUMNS, "create": True, **where}
    return PausedStore(DynamoDbTable, (f"fenced-{next(_names)}", "k"), options)


STORES = [
    pytest.param(sqlite, id="sqlite"),
    pytest.param(postgres, id="postgres", marks=pytest.mark.server),
    pytest.param(redis, id="redis", marks=pytest.mark.server),
    pytest.param(dynamodb, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long]),
]
pytestmark = pytest.mark.lengthy
Write = Callable[[Application, Any], object]


def changes(app: Application) -> Any:
    return app.input_stream("lake.changes", default_offset="oldest")


WRITES: dict[str, tuple[Write, dict[str, Any]]] = {
    "set": (
        lambda app, t: changes(app).update(t, set={"n": "n"}, if_missing={"n": "n", "first": "n"}),
        {},
    ),
    "put": (lambda app, t: changes(app).select("k", "n").send_to(t), {}),
    "add": (lambda app, t: changes(app).update(t, add={"n": "n"}, if_missing=[]), {}),
    "idempotent": (
        lambda app, t: changes(app).update(t, add={"n": "n"}, if_missing=[]),
        {"idempotent": True},
    ),
    "newest_by": (
        lambda app, t: changes(app).update(t, set={"n": "n"}, if_missing={"n": "n"}),
        {"newest_by": "n"},
    ),
}


def deletes(app: Application, table: Any) -> None:
    changes(app).map("k", "n").send_to(table)


class DeletingWorld(PausedWorld):
    """A world whose records are tombstones where they are gone."""

    def send(self) -> None:
        self.rounds += 1
        gone = [n % 4 == self.rounds % 4 for n in range(KEYS)]
        rows = {
            "k": [f"k{n}" for n in range(KEYS)],
            "n": [100 * self.rounds + n for n in range(KEYS)],
            "at": [START + timedelta(seconds=60 * self.rounds + n) for n in range(KEYS)],
        }
        table = pa.table({**rows, "gone": gone, "__tombstone": gone})
        self.streams.append("changes", table, producer="test", sequence=self.rounds)


def world_of(
    store: PausedStore,
    write: Write,
    pauses: Callable[[PausedWorld], Pause] | None = None,
    kind: type[PausedWorld] = PausedWorld,
    **options: Any,
) -> tuple[PausedWorld, Callable[[], dict[str, Any]]]:
    """Return a world whose first run is paused, and what returns the records of its table."""

    def make(world: PausedWorld, first: bool) -> Application:
        pause = pauses(world) if first and pauses is not None else lambda: None
        app = Application("sets", engine="auto")
        given = {"batch_size": 5, "in_flight": 1, "fenced": True, **options}
        write(app, app.table(RemoteTable("t", key="k", write_function=store.table(pause), **given)))
        return app

    def content() -> dict[str, Any]:
        with BlockingTable(RemoteTable("t", key="k", read_function=store.table())) as table:
            return table.get_all([f"k{n}" for n in range(KEYS)])

    return kind(make), content


def at_write(nth: int, world: PausedWorld) -> Pause:
    left = iter(range(1, 100_000))
    return lambda: world.pause() if next(left) == nth else None


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run looks at its lease before it is paused, and not again: only the store can
    refuse.
    """
    check, in_thread = Fence.check, Fence.check_in_thread

    async def check_others_in_thread(self: Fence) -> None:
        if self.run != "first":
            await in_thread(self)

    monkeypatch.setattr(Fence, "check", lambda self: None if self.run == "first" else check(self))
    monkeypatch.setattr(Fence, "check_in_thread", check_others_in_thread)


@pytest.mark.rounds
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("of", STORES)
def test_the_request_that_was_under_way_is_refused(
    of: Callable[..., PausedStore], kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    write, options = WRITES[kind]
    whole, expected = world_of(of(request, tmp_path), write, **options)
    whole.run_alone()
    exact = kind != "add"
    # A batch that adds is added again by its successor, if a part of it was written: as after a
    # crash.
    for nth in rounds([2], [1, 2, 3, 5]) if exact else [1]:
        world, content = world_of(
            of(request, tmp_path), write, lambda world, nth=nth: at_write(nth, world), **options
        )
        error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert (error.application, error.run) == ("sets", "first")
        assert content() == expected(), nth


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("of", STORES)
def test_deleted_records_stay_deleted(
    of: Callable[..., PausedStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    whole, expected = world_of(of(request, tmp_path), deletes, kind=DeletingWorld)
    whole.run_alone()
    world, content = world_of(
        of(request, tmp_path), deletes, lambda world: at_write(2, world), DeletingWorld
    )
    error = world.run_paused()
    assert isinstance(error, RunLeaseLostError)
    assert content() == expected()
    assert len(content()) == KEYS * 3 // 4


@pytest.mark.usefixtures("unchecked")
def test_without_a_fence_the_request_would_arrive(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    write, _ = WRITES["set"]
    whole, expected = world_of(sqlite(request, tmp_path), write)
    whole.run_alone()
    world, content = world_of(
        sqlite(request, tmp_path), write, lambda world: at_write(2, world), fenced=False
    )
    world.run_paused()
    assert content() != expected()


@pytest.mark.spark
def test_tasks_of_spark_carry_the_epoch_of_the_run(step_world: StepWorld, tmp_path: Path) -> None:
    step_world.stream("changes", "k", 2, k="string", n="bigint")
    step_world.send("changes", ("a", 1), ("b", 2))
    store = SqliteTable(tmp_path / "t.sqlite", "t", "k", columns=COLUMNS, create=True)
    app = Application("sets")
    table = RemoteTable("t", key="k", read_function=store, write_function=store, fenced=True)
    WRITES["set"][0](app, app.table(table))
    run_application(app, lake=step_world.lake, spark=step_world.spark)
    step_world.send("changes", ("a", 10))

    def begin_a_later_run(event: object) -> None:
        if isinstance(event, StepEvent) and event.what == "output":
            fence = Held(store).fence(10**15)
            fence.application = "sets"
            asyncio.run(store.begin_run(create=False, marks=False, fence=fence))

    with pytest.raises(RunLeaseLostError) as refused:
        run_application(
            app, lake=step_world.lake, spark=step_world.spark, on_event=begin_a_later_run
        )
    assert refused.value.application == "sets"
    with BlockingTable(table) as reads:
        assert {key: row["n"] for key, row in reads.get_all(["a", "b"]).items()} == {"a": 1, "b": 2}


# -- one function alone


@dataclass
class Held:
    """Writes of runs with these epochs to one function, without any lease."""

    function: Any
    epochs: dict[int, Fence] = field(default_factory=dict)

    def fence(self, epoch: int) -> Fence:
        from dagster_adjunct.resources.objects.store import InMemoryStore

        fence = Fence(
            InMemoryStore(), "run", holder="h", application="app", run=f"run-{epoch}", epoch=epoch
        )
        fence.check = lambda: None  # type: ignore[method-assign]
        fence.check_in_thread = _nothing  # type: ignore[method-assign]
        return fence

    async def write(self, epoch: int | None, n: int, *, key: str = "k0") -> Outcomes:
        fence = None if epoch is None else self.fence(epoch)
        entries = RowEntries([key], [{"k": key, "n": n}])
        operation = Operation(OperationKind.PUT, entries, fence=fence, fenced=fence is not None)
        await self.function.open()
        outcomes: Outcomes = await self.function.send(operation)
        return outcomes

    async def begin(self, epoch: int) -> None:
        await self.function.begin_run(create=True, marks=False, fence=self.fence(epoch))

    async def read(self, key: str = "k0") -> Any:
        await self.function.open()
        (record,) = (
            await self.function.send(Operation(OperationKind.GET, RowEntries([key])))
        ).records
        return None if record is None else record["n"]


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("of", STORES)
def test_a_store_knows_the_greatest_epoch_that_has_begun_or_written(
    of: Callable[..., PausedStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    held = Held(of(request, tmp_path).table())

    async def story() -> None:
        await held.begin(3)
        assert (await held.write(3, 1)).done == 1
        await held.begin(5)
        for late in (3, 4):
            with pytest.raises(RunLeaseLostError):
                await held.write(late, 2)
            with pytest.raises(RunLeaseLostError):
                await held.begin(late)
        assert await held.read() == 1
        assert (await held.write(5, 3)).done == 1
        assert (await held.write(None, 4)).done == 1  # a plain call has no epoch
        assert await held.read() == 4
        await held.function.close()

    asyncio.run(story())


ENTRIES = {
    "put": (
        OperationKind.PUT,
        RowEntries(["k0", "k9"], [{"k": "k0", "n": 2}, {"k": "k9", "n": 2}]),
    ),
    "put_if_absent": (OperationKind.PUT_IF_ABSENT, RowEntries(["k9"], [{"k": "k9", "n": 2}])),
    "delete": (OperationKind.DELETE, RowEntries(["k0"])),
    "set": (OperationKind.UPDATE, RowEntries(["k0"], [{"n": 2}])),
    "add": (OperationKind.UPDATE, RowEntries(["k0"], [Changes(add={"n": 2})])),
    "append": (OperationKind.UPDATE, RowEntries(["k0"], [Changes(append={"seen": [2]})])),
    "default": (OperationKind.UPDATE, RowEntries(["k9"], [{"n": 2}], [{"k": "k9", "n": 1}])),
    "arrow": (
        OperationKind.PUT,
        ArrowEntries.of(
            pa.table({"k": [f"k{n}" for n in range(500)], "n": list(range(500))}), ("k",)
        ),
    ),
}


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("of", STORES)
def test_every_kind_of_write_is_refused_as_a_whole(
    of: Callable[..., PausedStore], kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    held = Held(of(request, tmp_path).table())
    what, entries = ENTRIES[kind]

    async def story() -> None:
        await held.begin(3)
        await held.write(3, 1)
        await held.begin(5)
        with pytest.raises(RunLeaseLostError):
            await held.function.send(Operation(what, entries, fence=held.fence(3), fenced=True))
        assert (await held.read("k0"), await held.read("k9")) == (1, None)
        outcomes = await held.function.send(
            Operation(what, entries, fence=held.fence(5), fenced=True)
        )
        assert outcomes.done == len(entries)
        await held.function.close()

    asyncio.run(story())


@pytest.mark.parametrize("of", STORES[:3])
def test_a_write_with_a_greater_epoch_raises_the_known_one(
    of: Callable[..., PausedStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    held = Held(of(request, tmp_path).table())

    async def story() -> None:
        await held.begin(3)
        assert (await held.write(7, 1)).done == 1
        with pytest.raises(RunLeaseLostError):
            await held.write(6, 2)
        assert await held.read() == 1
        await held.function.close()

    asyncio.run(story())


@pytest.mark.server
def test_a_later_run_waits_for_a_transaction_under_way_and_writes_after_it(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The older transaction is paused between its last statement and its COMMIT."""
    store = postgres(request, tmp_path)
    older, later = Held(store.table()), Held(store.table())
    paused, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def run_older() -> None:
        async def story() -> None:
            await older.begin(3)
            fence = older.fence(3)

            async def pause() -> None:
                if not paused.is_set():
                    paused.set()
                    await asyncio.to_thread(go_on.wait, 20)

            checks = iter([_nothing, pause])  # before the request, and before its COMMIT
            fence.check_in_thread = lambda: next(checks, _nothing)()  # type: ignore[method-assign]
            entries = RowEntries(["k0"], [{"k": "k0", "n": 1}])
            operation = Operation(OperationKind.PUT, entries, fence=fence, fenced=True)
            await older.function.open()
            await older.function.send(operation)
            ended.append("older")
            await older.function.close()

        asyncio.run(story())

    def run_later() -> None:
        async def story() -> None:
            await later.begin(5)
            ended.append("later has begun")
            await later.write(5, 2)
            await later.function.close()

        asyncio.run(story())

    threads = [threading.Thread(target=run_older), threading.Thread(target=run_later)]
    threads[0].start()
    assert paused.wait(20)
    threads[1].start()
    with pytest.raises(TimeoutError):
        _join(threads[1], 0.5)
    assert ended == []
    go_on.set()
    for thread in threads:
        _join(thread, 30)
    assert sorted(ended) == ["later has begun", "older"]
    with BlockingTable(RemoteTable("t", key="k", read_function=store.table())) as table:
        assert table.get("k0")["n"] == 2


def _join(thread: threading.Thread, seconds: float) -> None:
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError


@pytest.mark.server
def test_many_fenced_writes_run_next_to_each_other(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    held = Held(postgres(request, tmp_path).table())

    async def story() -> None:
        await held.begin(3)
        writes = [held.write(3, n, key=f"k{n}") for n in range(40)]
        assert sum(outcomes.done for outcomes in await asyncio.gather(*writes)) == 40
        await held.function.close()

    asyncio.run(story())


@pytest.mark.server
@pytest.mark.long
def test_dynamodb_names_the_entry_that_it_rejects_in_a_fenced_batch(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    held = Held(dynamodb(request, tmp_path).table())

    async def story() -> None:
        await held.begin(3)
        keys = [f"k{n}" for n in range(60)]
        values = [{"k": key, "n": place} for place, key in enumerate(keys)]
        operation = Operation(
            OperationKind.PUT, RowEntries(keys, values), fence=held.fence(3), fenced=True
        )
        assert (await held.function.send(operation)).done == 60
        defaults = [{"k": "k1", "n": 5}, {"k": "new", "n": 5}, None]
        updates = RowEntries(["k1", "new", "none"], [{"n": 7}] * 3, defaults)
        operation = Operation(OperationKind.UPDATE, updates, fence=held.fence(3), fenced=True)
        outcomes = await held.function.send(operation)
        assert (outcomes.places(State.MISSING), outcomes.defaults_put) == ([2], 1)
        assert (await held.read("k1"), await held.read("new")) == (7, 7)
        await held.function.close()

    asyncio.run(story())


class CancellingClient:
    """Answers each transaction as cancelled by its first action, for a reason; counts them."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.asked = 0

    def transact_write_items(self, TransactItems: list[Any]) -> Any:
        self.asked += 1
        reasons = [{"Code": self.code}, *({"Code": "None"} for _ in TransactItems[1:])]
        answer: Any = {
            "Error": {"Code": "TransactionCanceledException"},
            "CancellationReasons": reasons,
        }
        raise ClientError(answer, "TransactWriteItems")

    def fenced(self) -> FencedWrites:
        client: Any = self
        fence = Held(None).fence(1)
        return FencedWrites(client, "t", "t__adjunct_runs", fence, pause=lambda seconds: None)

    def requests(self) -> TableRequests:
        client: Any = self
        codec = ItemCodec("t", {"k": "S"}, [Column("k", "string"), Column("n", "bigint")])
        fenced = self.fenced()
        return TableRequests(client, "t", codec, consistent=True, fence=fenced.fence, fenced=fenced)


def problem_of(client: CancellingClient, kind: OperationKind, *, batch: bool) -> Any:
    """Write one entry in a batch or a sequence; return its problem."""
    requests = client.requests()
    operation = Operation(kind, RowEntries(["a"], [{"n": 1}]), fence=requests.fence, fenced=True)
    valid = validate_entries(requests.codec, operation).entries
    if batch:
        return requests.write_batch(kind, valid).get(0)
    problems: dict[int, Any] = {}
    requests.write_in_sequence(operation, valid, problems)
    return problems.get(0)


def test_dynamodb_transactions_that_meet_others_for_long_are_failed_and_retried() -> None:
    client = CancellingClient("TransactionConflict")
    problem = problem_of(client, OperationKind.UPDATE, batch=False)
    assert (problem.state, type(problem.error)) == (State.FAILED, TableUnavailableError)
    assert client.asked > 10


@pytest.mark.parametrize("batch", [False, True])
def test_dynamodb_writes_whose_check_of_the_epoch_is_throttled_are_failed_and_retried(
    batch: bool,
) -> None:
    client = CancellingClient("ThrottlingError")
    problem = problem_of(client, OperationKind.PUT, batch=batch)
    assert (problem.state, type(problem.error)) == (State.FAILED, TableUnavailableError)


def test_dynamodb_runs_whose_epoch_can_not_be_stored_now_do_not_begin() -> None:
    with pytest.raises(TableUnavailableError):
        CancellingClient("ThrottlingError").fenced().announce()


@pytest.mark.server
def test_fenced_without_book_keeping_names_the_table_that_it_needs(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue("postgres_server")
    name = f"fenced_{next(_names)}"
    server.execute(f"CREATE TABLE {name} (k text PRIMARY KEY, n bigint)")
    held = Held(PostgresTable(name, "k", connect=connect(server)))

    async def begin() -> None:
        try:
            await held.begin(1)
        finally:
            await held.function.close()

    with pytest.raises(TableAccessError) as refused:
        asyncio.run(begin())
    assert f"{name}__adjunct_runs" in refused.value.problem


def test_a_store_without_fences_is_rejected_by_name() -> None:
    function = HttpTable("http://127.0.0.1:1", "/t/{k}", "k")
    with pytest.raises(ConfigurationError) as refused:
        RemoteTable("t", key="k", write_function=function, fenced=True)
    assert refused.value.argument == "fenced"


def test_key_value_rows_are_always_fenced(tmp_path: Path) -> None:
    rows = KeyValueRows(str(tmp_path / "lake"), "app", "t", "k", columns=COLUMNS, create=True)
    assert RemoteTable("t", key="k", write_function=rows, fenced=True).fenced


def test_direct_calls_of_a_fenced_table_need_no_epoch(tmp_path: Path) -> None:
    store = SqliteTable(tmp_path / "t.sqlite", "t", "k", columns=COLUMNS, create=True)
    table = RemoteTable("t", key="k", read_function=store, write_function=store, fenced=True)
    with BlockingTable(table) as direct:
        direct.put("a", {"n": 1})
        assert direct.get("a")["n"] == 1

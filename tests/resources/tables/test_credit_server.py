"""Credits over real connections, by processes as tasks are, from a real lake: what was granted
in 10 s, and to whom.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import (
    MalformedDocumentError,
    StoreUnavailableError,
    TableError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.tables import shared_rate
from dagster_adjunct.resources.tables.credit_messages import CreditAddress
from dagster_adjunct.resources.tables.rate import Budget, LeaseInterval, LeaseRequest
from dagster_adjunct.resources.tables.shared_rate import BudgetLeases, CreditClient, CreditServer
from tests.resources.tables.credit_world import of_the_rate

BUDGET = Budget("orders", "write", 400.0)


class Plenty:
    """Leases whatever is wished for."""

    def lease(self, wish: LeaseRequest) -> LeaseInterval | None:
        now = time.monotonic()
        return LeaseInterval(now - 0.5, now + wish.seconds)


class Fails:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def lease(self, wish: LeaseRequest) -> LeaseInterval | None:
        raise self.error


@pytest.fixture
def serve() -> Iterator[Callable[..., CreditServer]]:
    servers: list[CreditServer] = []

    def start(leases: object) -> CreditServer:
        servers.append(CreditServer(lambda budget: leases))  # type: ignore[arg-type,return-value]
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


class Spender:
    """A task in a process of its own, and when it was granted how many credits."""

    def __init__(self, address: CreditAddress, request: int, pause: float) -> None:
        self.granted: list[tuple[float, float]] = []
        script = Path(__file__).with_name("spend_credits.py")
        command = [sys.executable, str(script), str(request), str(pause)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        reported = (
            f"{address.host} {address.port} {address.secret.hex()} {BUDGET.name} {BUDGET.rate}\n"
        )
        assert self._process.stdin is not None
        self._process.stdin.write(reported)
        self._process.stdin.flush()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # killed while it wrote
            at, credits = line.split()
            self.granted.append((float(at), float(credits)))

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.long  # in simulated time: test_credits_over_runs.py
@pytest.mark.lengthy
def test_two_runs_whose_tasks_are_killed_get_the_rate_in_every_ten_seconds(tmp_path: Path) -> None:
    servers = [
        CreditServer(lambda budget, run=run: BudgetLeases(open_lake(str(tmp_path)), budget, run))
        for run in "ab"
    ]
    first, second = (server.serve([BUDGET]) for server in servers)
    spenders = [Spender(first, 50, 0.01), Spender(first, 3, 0.0), Spender(second, 100, 0.1)]
    try:
        wait_until(lambda: all(spender.granted for spender in spenders))
        began = time.monotonic()
        time.sleep(4)
        spenders[0].kill()
        spenders += [Spender(second, 20, 0.0), Spender(first, 100, 0.0)]
        time.sleep(4)
        servers[0].stop()  # a run ends
        time.sleep(4.5)
        ended = time.monotonic()
    finally:
        for spender in spenders[1:]:
            spender.kill()
        for server in servers:
            server.stop()
    granted = [one for spender in spenders for one in spender.granted]
    parts = of_the_rate(granted, BUDGET.rate, began, ended)
    print([round(part, 3) for part in parts])
    assert len(parts) > 20
    # A busy machine wakes spenders late; in simulated time (test_credits_over_runs.py) each part is
    # within a tenth.
    assert min(parts) >= 0.5
    assert max(parts) <= 1.5, "two runs that each spend the whole rate would be at 2"


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_demand_whose_task_is_gone_is_not_served(serve: Callable[..., CreditServer]) -> None:
    server = serve(Plenty())
    address = server.serve([Budget("slow", "write", 100.0)])
    budget = Budget("slow", "write", 100.0)

    async def work() -> None:
        greedy, modest = CreditClient(address), CreditClient(address)
        asking = asyncio.create_task(greedy.acquire(budget, 100_000))
        await asyncio.sleep(0.5)
        asking.cancel()
        await greedy.close()
        # the other's demand would take 1,000 s
        await asyncio.wait_for(modest.acquire(budget, 10), 120)
        await modest.close()

    asyncio.run(work())


def test_requests_of_one_task_are_served_in_their_order_and_small_ones_together(
    serve: Callable[..., CreditServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    demands, send = list[float](), shared_rate.send_message

    async def counted(writer: asyncio.StreamWriter, message: dict[str, object]) -> None:
        if "credits" in message:
            demands.append(float(str(message["credits"])))
        await send(writer, message)

    monkeypatch.setattr(shared_rate, "send_message", counted)
    budget = Budget("quick", "write", 10_000.0)
    address = serve(Plenty()).serve([budget])

    async def work() -> list[int]:
        client, order = CreditClient(address), []

        async def one(number: int) -> None:
            await client.acquire(budget, 1)
            order.append(number)

        await asyncio.gather(*map(one, range(2000)))
        await client.close()
        return order

    assert asyncio.run(work()) == list(range(2000))
    assert sum(demands) == 2000
    assert len(demands) < 20


def test_who_does_not_know_the_secret_gets_nothing_and_none_is_reported_it(
    serve: Callable[..., CreditServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rate, "_RECONNECT_SECONDS", 0.3)
    address = serve(Plenty()).serve([BUDGET])
    assert address.secret.hex() not in repr(address)
    assert repr(address.secret) not in repr(address)
    assert pickle.loads(pickle.dumps(address)) == address
    stranger = replace(address, secret=b"x" * 32)
    with pytest.raises(TableError, match="is gone") as caught:
        asyncio.run(CreditClient(stranger).acquire(BUDGET, 1))
    assert caught.value.budget == "orders"
    with socket.create_connection((address.host, address.port)) as rude:
        rude.settimeout(10)
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while rude.recv(1000):
            pass
    asyncio.run(CreditClient(address).acquire(BUDGET, 1))  # the server goes on


@pytest.mark.parametrize("sent", [b"", b'{"proof": ', b"[" * 200_000, b"[]\n", b"\xff\n"])
def test_a_connection_that_does_not_identify_itself_keeps_nobody_waiting(
    serve: Callable[..., CreditServer], sent: bytes
) -> None:
    address = serve(Plenty()).serve([BUDGET])
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(sent)
        asyncio.run(asyncio.wait_for(CreditClient(address).acquire(BUDGET, 1), 5))


def test_a_driver_that_is_gone_is_reported(
    serve: Callable[..., CreditServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rate, "_RECONNECT_SECONDS", 0.3)
    server = serve(Plenty())
    address = server.serve([BUDGET])

    async def work() -> None:
        client = CreditClient(address)
        await client.acquire(BUDGET, 1)
        await asyncio.to_thread(server.stop)
        await client.acquire(BUDGET, 1)

    with pytest.raises(TableError) as reported:
        asyncio.run(work())
    assert reported.value.budget == "orders"
    assert str(address.port) in str(reported.value)


def test_what_keeps_the_driver_from_leasing_reaches_the_task(
    serve: Callable[..., CreditServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = serve(
        Fails(MalformedDocumentError("the budget can't be read.", "Delete it.", document="d"))
    )
    with pytest.raises(MalformedDocumentError) as caught:
        asyncio.run(CreditClient(damaged.serve([BUDGET])).acquire(BUDGET, 1))
    assert caught.value.document == "d"
    monkeypatch.setattr(shared_rate, "_STORE_SECONDS", 0.3)
    away = serve(Fails(StoreUnavailableError("the store does not answer.", "Wait.")))
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        asyncio.run(CreditClient(away.serve([BUDGET])).acquire(BUDGET, 1))
    with pytest.raises(TableError, match="not served by this run") as caught:
        asyncio.run(CreditClient(away.serve([])).acquire(Budget("other", "write", 1.0), 1))
    assert caught.value.budget == "other"


def test_a_budget_that_can_not_be_read_says_which_and_what_to_do(tmp_path: Path) -> None:
    lake = open_lake(str(tmp_path), create=True)
    lake.store.put("metadata/budgets/orders/write.json", b'{"format": 2}')
    with pytest.raises(MalformedDocumentError) as caught:
        BudgetLeases(lake, BUDGET, "run").lease(LeaseRequest(1.0, 1.0))
    assert "'orders'" in str(caught.value.document)

"""`CreditServer`: hands a run's credits out to its tasks, as they ask, from the run's driver."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError, TableError, TransientError
from dagster_adjunct.resources.spark.spark_errors import to_document
from dagster_adjunct.resources.tables.credit_source import Budget
from dagster_adjunct.resources.tables.credits.credit_wire import CreditAddress, NotOfThisRun, admit, receive, send
from dagster_adjunct.resources.tables.credits.leased_credits import Demand, Demands
from dagster_adjunct.resources.tables.credits.shared_timeline import Stretch, Wish

_log = logging.getLogger("adjunct.tables")
# A task that waits hears so often that its driver lives.
BEAT_SECONDS = 3.0
# A store that leases nothing for so long is told to those that wait.
_STORE_SECONDS = 60.0


class Leases(Protocol):
    """Where the credits of one budget are leased."""

    def lease(self, wish: Wish) -> Stretch | None: ...


class CreditServer:
    """A thread that leases credits while tasks demand them, and serves each demand in its turn.

    `start` it before its `address` is given to tasks, and `stop` it when the run ends. A task that is gone leaves its
    connection, and with it what it still demanded.
    """

    def __init__(self, leases: Callable[[Budget], Leases], *, host: str = "127.0.0.1", bind: str | None = None) -> None:
        self._leases, self._host, self._bind = leases, host, bind or host
        self._secret = secrets.token_bytes(32)
        self._taps: dict[tuple[str, str], _Tap] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._port = 0

    def serve(self, budgets: Iterable[Budget]) -> CreditAddress:
        """Return where tasks get credits of these budgets, from now on."""
        loop = self._started()

        async def add() -> None:
            for budget in budgets:
                if (budget.name, budget.tag) not in self._taps:
                    self._taps[budget.name, budget.tag] = _Tap(Demands(budget.rate), self._leases(budget))

        asyncio.run_coroutine_threadsafe(add(), loop).result()
        return CreditAddress(self._host, self._port, self._secret)

    def stop(self) -> None:
        """Close all connections; tasks that wait are told by that."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        if self._server is not None:
            loop.call_soon_threadsafe(self._server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(loop,), name="adjunct-credits", daemon=True)
            self._thread.start()
            try:
                opening = asyncio.start_server(self._connected, self._bind, 0)
                self._server = asyncio.run_coroutine_threadsafe(opening, loop).result()
            except BaseException:
                self.stop()
                raise
            self._port = self._server.sockets[0].getsockname()[1]
        return self._loop

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await admit(reader, writer, self._secret)
            while True:
                await self._serve(reader, writer, await receive(reader))
        except NotOfThisRun as error:
            _log.warning("credits: a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        except (OSError, EOFError, TimeoutError):
            pass  # the task has ended, or is gone
        except asyncio.CancelledError:
            pass  # the server stops; streams take a cancelled callback for a failure
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        tap = self._taps.get((str(message.get("budget")), str(message.get("tag"))))
        credits = message.get("credits")
        if not isinstance(credits, int | float) or not 0 < credits < float("inf"):
            raise NotOfThisRun(f"a demand of {credits!r} credits")
        if tap is None:
            await send(writer, {"error": to_document(_unknown(message))})
            return
        demand, granted = tap.ask(credits)
        # Nothing is sent while a task waits: whatever comes is the end of it.
        gone = asyncio.ensure_future(reader.read(1))
        either: set[asyncio.Future[Any]] = {granted, gone}
        try:
            while True:
                done, _ = await asyncio.wait(either, timeout=BEAT_SECONDS, return_when="FIRST_COMPLETED")
                if granted in done:
                    break
                if gone in done:
                    raise EOFError
                await send(writer, {"wait": True})
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await gone
            tap.forget(demand)
        await send(writer, granted.result())


def _unknown(message: dict[str, Any]) -> TableError:
    return TableError(
        f"budget {message.get('budget')!r} ({message.get('tag')}) is none that this run serves.",
        "Declare the table, with its rate, in the application.",
        budget=message.get("budget"),
    )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class _Tap:
    """One budget: its demands, and the leases that are made for them."""

    def __init__(self, demands: Demands, leases: Leases) -> None:
        self._demands, self._leases = demands, leases
        self._waiting: dict[Demand, asyncio.Future[dict[str, Any]]] = {}
        self._changed = asyncio.Event()
        self._leasing: asyncio.Task[None] | None = None
        self._leased_at = time.monotonic()
        self._pump = asyncio.get_running_loop().create_task(self._pour())

    def ask(self, credits: float) -> tuple[Demand, asyncio.Future[dict[str, Any]]]:
        demand = self._demands.ask(credits)
        answer = self._waiting[demand] = asyncio.get_running_loop().create_future()
        self._changed.set()
        return demand, answer

    def forget(self, demand: Demand) -> None:
        """Who demanded that has got it, or is gone."""
        if self._waiting.pop(demand, None) is not None:
            self._demands.withdraw(demand, time.monotonic())
            self._changed.set()

    async def _pour(self) -> None:
        while True:
            now = time.monotonic()
            self._changed.clear()
            for demand in self._demands.pay(now):
                self._waiting.pop(demand).set_result({"granted": demand.credits})
            if self._leasing is None and (wish := self._demands.wish(now)) is not None:
                self._leasing = asyncio.create_task(self._lease(wish))
            at = self._demands.look_at(now)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if at is None else max(0.001, at - now)):
                    await self._changed.wait()

    async def _lease(self, wish: Wish) -> None:
        began = time.monotonic()
        try:
            got = await asyncio.to_thread(self._leases.lease, wish)
        except (TransientError, CommitConflictError) as error:
            _log.warning("credits: nothing could be leased: %s", error)
            if began - self._leased_at > _STORE_SECONDS:
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - who waits is told
            self._fail(error)
        else:
            self._leased_at = time.monotonic()
            self._demands.lease_takes = self._leased_at - began
            if got is not None:
                self._demands.leased.add(got.start, got.end, (got.end - got.start) * self._demands.rate)
        finally:
            self._leasing = None
            self._changed.set()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, AdjunctError):
            _log.error("credits: nothing could be leased", exc_info=error)
            error = AdjunctError(f"nothing could be leased of a budget: {error!r}.", "See the driver's log.")
        for demand, answer in list(self._waiting.items()):
            del self._waiting[demand]
            self._demands.withdraw(demand, time.monotonic())
            answer.set_result({"error": to_document(error)})

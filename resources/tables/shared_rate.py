"""Credits of a rate limit in an application's run: `RunCredits` in the driver starts a
`CreditServer`, which leases the run's credits from the lake and hands them out to the
`CreditClient`s in the run's tasks.

`credit_messages.py` has what they send each other, `credit_demands.py` who gets credits next. A
share of the rate for each task would need no server, and would leave credits unused wherever tasks
have unlike loads: with 50, 25, 15 and 10% of the calls, four tasks took 9.9 s instead of 5.0 s.

Runs of a lake share a budget's timeline (`SharedTimeline` in `rate.py`). Credits arrive at the
budget's rate, so a lease is an interval of time: a lease of 0.2 s allows a run to spend what
arrives in these 0.2 s. No interval is leased twice, so all runs together never exceed the rate,
whatever their clocks say: a run whose clock is behind the timeline uses the timeline's time, and
one whose clock is ahead advances it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import ValidationError

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.metadata import SharedValue
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import error_from_json, error_to_json
from dagster_adjunct.resources.tables.credit_demands import Demand, Demands
from dagster_adjunct.resources.tables.credit_messages import (
    CreditAddress,
    HandshakeError,
    authenticate_driver,
    authenticate_task,
    receive_message,
    send_message,
)
from dagster_adjunct.resources.tables.rate import (
    Budget,
    LeaseInterval,
    LeaseRequest,
    SharedTimeline,
    lease_credits,
    unequal_rates_error,
)
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.threads import LoopThread, PerLoop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("adjunct.tables")
# How often, in seconds, a waiting task receives {"wait"}.
HEARTBEAT_SECONDS = 3.0
# After so many seconds in which no lease succeeded, waiting tasks get the store's error.
_STORE_SECONDS = 60.0


class CreditServer:
    """A thread of a run's driver that leases credits while tasks demand them, and serves demands in
    order.

    A task that ends closes its connection, which withdraws its demands. `stop` the server when the
    run ends.
    """

    def __init__(
        self,
        leases: Callable[[Budget], BudgetLeases],
        *,
        host: str = "127.0.0.1",
        bind: str | None = None,
    ) -> None:
        self._leases = leases
        self._host = host
        self._bind = bind or host
        self._secret = secrets.token_bytes(32)
        self._budgets: dict[tuple[str, str], _BudgetServer] = {}  # by name and tag
        self._thread = LoopThread("adjunct-credits")
        self._server: asyncio.Server | None = None

    def serve(self, budgets: Iterable[Budget]) -> CreditAddress:
        """Serve these budgets too; return the address at which tasks get their credits."""
        return self._thread.run(self._add(budgets))

    def stop(self) -> None:
        """Stop the server and close all connections, so that waiting tasks notice."""
        self._thread.close(self._close)

    async def _add(self, budgets: Iterable[Budget]) -> CreditAddress:
        """Start the server if need be, and serve these budgets too."""
        if self._server is None:
            self._server = await asyncio.start_server(self._handle_connection, self._bind, 0)
        for budget in budgets:
            if (budget.name, budget.tag) not in self._budgets:
                self._budgets[budget.name, budget.tag] = _BudgetServer(
                    Demands(budget.rate), self._leases(budget)
                )
        return CreditAddress(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    async def _close(self) -> None:
        """End the server, its connections and what it leases."""
        server = self._server
        self._server = None
        if server is not None:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one task until its connection is closed."""
        try:
            await authenticate_task(reader, writer, self._secret)
            while True:
                await self._serve(reader, writer, await receive_message(reader))
        except HandshakeError as error:
            _log.warning(
                "credits: a connection from %s was refused: %s",
                writer.get_extra_info("peername"),
                error,
            )
        except (OSError, EOFError, TimeoutError):
            pass  # the task has ended
        except asyncio.CancelledError:
            # the server stops; if this was raised, asyncio's streams would log it as a failure
            pass
        finally:
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: dict[str, Any]
    ) -> None:
        """Answer a task's demand for credits once they are granted. Until then, regular messages
        show the task that this server lives. Raises EOFError once the task has ended, and
        HandshakeError for an invalid demand.
        """
        server = self._budgets.get((str(message.get("budget")), str(message.get("tag"))))
        credits = message.get("credits")
        if not isinstance(credits, int | float) or not 0 < credits < float("inf"):
            raise HandshakeError(f"a demand of {credits!r} credits")
        if server is None:
            unknown = errors.TableError(
                f"budget {message.get('budget')!r} ({message.get('tag')}) is not served by this"
                " run.",
                "Declare the table, with its rate, in the application.",
                budget=message.get("budget"),
            )
            await send_message(writer, {"error": error_to_json(unknown)})
            return
        waiting = server.add(credits)
        # A waiting task sends nothing: if something can be read, the connection was closed.
        gone = asyncio.ensure_future(reader.read(1))
        either: set[asyncio.Future[Any]] = {waiting.answer, gone}
        try:
            while True:
                done, _ = await asyncio.wait(
                    either, timeout=HEARTBEAT_SECONDS, return_when="FIRST_COMPLETED"
                )
                if waiting.answer in done:
                    break
                if gone in done:
                    raise EOFError
                await send_message(writer, {"wait": True})
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await gone
            server.forget(waiting.demand)
        await send_message(writer, waiting.answer.result())


class _WaitingDemand(NamedTuple):
    """A task's demand, and the future of the message that answers it."""

    demand: Demand
    answer: asyncio.Future[dict[str, Any]]


class _BudgetServer:
    """Serves one budget: pays its demands, and leases credits for them."""

    def __init__(self, demands: Demands, leases: BudgetLeases) -> None:
        self._demands = demands
        self._leases = leases
        # The future of the answer to each demand that waits.
        self._waiting: dict[Demand, asyncio.Future[dict[str, Any]]] = {}
        self._changed = asyncio.Event()
        self._leasing: asyncio.Task[None] | None = None
        self._leased_at = time.monotonic()
        self._pump = asyncio.get_running_loop().create_task(self._pay_demands())

    def add(self, credits: float) -> _WaitingDemand:
        """Add a demand, which is answered when it is paid, or when nothing can be leased."""
        demand = self._demands.add(credits)
        answer = self._waiting[demand] = asyncio.get_running_loop().create_future()
        self._changed.set()
        return _WaitingDemand(demand, answer)

    def forget(self, demand: Demand) -> None:
        """Withdraw a demand whose task has ended; no effect after it was answered."""
        if self._waiting.pop(demand, None) is not None:
            self._demands.withdraw(demand, time.monotonic())
            self._changed.set()

    async def _pay_demands(self) -> None:
        """Pay demands as credits arrive, and begin to lease more when they are needed; never
        ends.
        """
        while True:
            now = time.monotonic()
            self._changed.clear()
            for demand in self._demands.pay(now):
                self._waiting.pop(demand).set_result({"granted": demand.credits})
            if self._leasing is None and (request := self._demands.next_lease(now)) is not None:
                self._leasing = asyncio.create_task(self._lease(request))
            at = self._demands.next_event_at(now)
            wait = None  # until something changes
            if at is not None:
                wait = max(0.001, at - now)  # at most 1,000 turns a second
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _lease(self, request: LeaseRequest) -> None:
        """Lease credits for the waiting demands. An error that does not pass fails all of them, and
        so does any other once no lease has succeeded for `_STORE_SECONDS`.
        """
        began = time.monotonic()
        try:
            got = await asyncio.to_thread(self._leases.lease, request)
        except errors.RunLeaseLostError as error:  # the run has ended: its tasks must not wait
            self._fail(error)
        except (errors.TransientError, errors.CommitConflictError) as error:
            _log.warning("credits: nothing could be leased: %s", error)
            if began - self._leased_at > _STORE_SECONDS:
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - the waiting tasks receive it
            self._fail(error)
        else:
            self._leased_at = time.monotonic()
            self._demands.lease_takes = self._leased_at - began
            if got is not None:
                self._demands.leased.add(
                    got.start, got.end, (got.end - got.start) * self._demands.rate
                )
        finally:
            self._leasing = None
            self._changed.set()

    def _fail(self, error: Exception) -> None:
        """Answer all waiting demands with this error."""
        if not isinstance(error, errors.AdjunctError):
            _log.error("credits: nothing could be leased", exc_info=error)
            error = errors.AdjunctError(
                f"leasing credits failed: {error!r}.", "See the driver's log."
            )
        for demand, answer in list(self._waiting.items()):
            del self._waiting[demand]
            self._demands.withdraw(demand, time.monotonic())
            answer.set_result({"error": error_to_json(error)})


class BudgetLeases:
    """Leases a budget's credits for one run; all runs of the lake share the budget. Not
    thread-safe.

    `clock` is monotonic, in seconds; the wall clock is read only once.
    """

    def __init__(
        self, lake: Lake, budget: Budget, run: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._value = SharedValue(lake, "budgets", budget.name, budget.tag)
        self._rate = budget.rate
        self._logged_rates = set[float]()
        self._where = f"the budget {budget.name!r} ({budget.tag}) in {lake.url}"
        self._run = run
        self._clock = clock
        self._ahead = time.time() - clock()  # how far the budget's timeline is ahead of `clock`

    def lease(self, request: LeaseRequest) -> LeaseInterval | None:
        """Return the leased interval in times of `clock`; None if other runs hold nearly everything
        that may be leased.

        Raises StoreUnavailableError (if a lease was stored nevertheless, it expires unused),
        CommitConflictError after many conflicts, and MalformedDocumentError.
        """
        has_others = False  # runs that share the budget
        other_rates = set[float]()

        def decide(data: bytes | None) -> tuple[bytes, LeaseInterval | None]:
            """Return the timeline to store instead of `data`, and the interval in times
            of `clock`.
            """
            nonlocal has_others, other_rates
            timeline = SharedTimeline() if data is None else self._parse(data)
            clock_now = self._clock()
            self._ahead = max(self._ahead, timeline.now - clock_now)
            after, got = lease_credits(
                timeline, self._run, clock_now + self._ahead, request, self._rate
            )
            has_others = len(after.runs) > 1
            other_rates = {run.rate for run in after.runs.values()} - {self._rate}
            if got is not None:
                got = LeaseInterval(clock_now + got.start, clock_now + got.end)
            unique = after.model_copy(update={"nonce": uuid.uuid4().hex})
            return unique.model_dump_json().encode(), got

        got = self._value.transact(decide)
        if has_others:  # they will have changed the timeline before our next lease
            self._value.forget()
        for rate in sorted(other_rates - self._logged_rates):
            _log.warning(
                "%s is declared with %g credits per second here, and with %g in another run:"
                " together they spend more than the lower. Give all tables that share it one"
                " RateLimit, or budgets of their own.",
                self._where,
                self._rate,
                rate,
            )
        self._logged_rates |= other_rates
        return got

    def _parse(self, data: bytes) -> SharedTimeline:
        """Return the stored timeline; MalformedDocumentError if it can't be read."""
        try:
            return SharedTimeline.model_validate_json(data)
        except ValidationError as error:
            raise errors.MalformedDocumentError(
                f"{self._where} can't be read: {first_validation_problem(error)}.",
                "If a newer release wrote it, upgrade dagster-adjunct; else delete the object: it"
                " is created again, and its content expires after two seconds.",
                document=self._where,
            ) from error


# A driver that can't be reached for _RECONNECT_SECONDS is gone. A connection on which nothing
# arrives for _SILENT_SECONDS is lost: the driver sends {"wait"} several times in these.
_RECONNECT_SECONDS = 5.0
_SILENT_SECONDS = 15.0
_RETRY_SECONDS = 0.2
# Callers that wait at the same time share a demand, of at most the credits of so many seconds, to
# save round trips.
_TOGETHER_SECONDS = 0.05


class CreditClient:
    """A `CreditSource` that gets credits from the run's driver, with one connection per budget and
    event loop.

    `acquire` raises TableError if the driver is gone, or the driver's own error if it could not
    lease credits.
    """

    def __init__(self, address: CreditAddress) -> None:
        self._address = address
        self._connections: PerLoop[dict[Budget, _BudgetConnection]] = PerLoop(dict)

    def __reduce__(self) -> tuple[type[CreditClient], tuple[CreditAddress]]:
        return CreditClient, (self._address,)

    async def acquire(self, budget: Budget, credits: float) -> None:
        """Take credits from the server that all tasks share, and wait until there are enough."""
        if credits <= 0:
            return
        connections = self._connections.here()
        connection = connections.get(budget)
        if connection is None:
            connection = connections[budget] = _BudgetConnection(self._address, budget)
        await connection.acquire(credits)

    async def close(self) -> None:
        for connection in (self._connections.take() or {}).values():
            connection.close()


class _Streams(NamedTuple):
    """Both directions of a connection to the driver."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _BudgetConnection:
    """A task's connection to the driver for one budget, with one demand at a time; other callers
    wait in order.
    """

    def __init__(self, address: CreditAddress, budget: Budget) -> None:
        self._address = address
        self._budget = budget
        self._turn = asyncio.Lock()
        # The credits that each waiting caller needs, in order.
        self._waiting: dict[object, float] = {}
        # Since when the driver can't be reached, if somebody waits.
        self._lost_at: float | None = None
        self._open: _Streams | None = None

    async def acquire(self, credits: float) -> None:
        """Wait until the driver has granted these credits."""
        mine = object()
        self._waiting[mine] = credits
        try:
            async with self._turn:
                while mine in self._waiting:
                    together = self._first_waiting()
                    if await self._demand(sum(together.values())):
                        for one in together:
                            self._waiting.pop(one, None)
                    else:
                        await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._waiting.pop(mine, None)
            if not self._waiting:
                self._lost_at = None

    def _first_waiting(self) -> dict[object, float]:
        """Return the callers for which to make the next demand, and their credits: the first one,
        and others after it that fit into the same demand.
        """
        first = dict[object, float]()
        left = self._budget.rate * _TOGETHER_SECONDS
        for caller, credits in self._waiting.items():
            left -= credits
            if first and left < 0:
                break
            first[caller] = credits
        return first

    def close(self) -> None:
        """Close the connection; the next demand opens it again."""
        if self._open is not None:
            self._open.writer.close()
            self._open = None

    async def _demand(self, credits: float) -> bool:
        """Demand credits from the driver, and wait for them; return False if the driver can't be
        reached now.

        Raises TableError if the driver is gone, and the error that the driver sends.
        """
        message = {"budget": self._budget.name, "tag": self._budget.tag, "credits": credits}
        try:
            if self._open is None:
                self._open = _Streams(
                    *await asyncio.open_connection(self._address.host, self._address.port)
                )
                await authenticate_driver(*self._open, self._address.secret)
            streams = self._open
            await send_message(streams.writer, message)
            answer = await self._receive_answer(streams.reader)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            if now - self._lost_at > _RECONNECT_SECONDS:
                raise errors.TableError(
                    f"budget {self._budget.name!r} ({self._budget.tag}): the run's driver, which"
                    f" hands out its credits at {self._address.host}:{self._address.port}, is"
                    " gone.",
                    "If the run has ended, end this task too. Otherwise make sure that tasks can"
                    " reach the driver's host (spark.driver.host).",
                    budget=self._budget.name,
                ) from error
            return False
        except BaseException:
            self.close()  # or the next demand would get this one's answer
            raise
        if "error" in answer:
            raise error_from_json(answer["error"])  # type: ignore[arg-type]
        return True

    async def _receive_answer(self, reader: asyncio.StreamReader) -> dict[str, object]:
        """Return the driver's answer to a demand. Until then the driver sends {"wait"}; it raises
        TimeoutError if nothing arrives for _SILENT_SECONDS.
        """
        while True:
            async with asyncio.timeout(_SILENT_SECONDS):
                answer = await receive_message(reader)
            self._lost_at = None
            if "wait" not in answer:
                return answer


class RunCredits:
    """A context manager in a run's driver: until it exits, the run's tables share the rates of the
    lake's budgets.

    A server starts when a table with a rate is first used; a run without one has no server.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._run = uuid.uuid4().hex[:12]
        self._servers: dict[str, CreditServer] = {}  # by the address at which tasks reach them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            server.stop()

    def with_credits(
        self, table: RemoteTable[Any, Any, Any], spark: SparkSession | None
    ) -> RemoteTable[Any, Any, Any]:
        """Return a copy of the table that gets its credits from this run's server; a table without
        a rate as it is.

        It is for tasks of the session `spark`, or with None for this process.
        """
        budgets = table.rate_limit.budgets(table.name)
        if not budgets:
            return table
        host = bind = "127.0.0.1"
        if spark is not None:
            host = spark.conf.get("spark.driver.host") or host
            bind = spark.conf.get("spark.driver.bindAddress", host) or host
        if host not in self._servers:
            leases = partial(BudgetLeases, self._lake, run=f"{self._run}-{len(self._servers)}")
            self._servers[host] = CreditServer(leases, host=host, bind=bind)
        return table.with_credit_source(CreditClient(self._servers[host].serve(budgets)))


def list_budgets(tables: Iterable[object]) -> tuple[Budget, ...]:
    """Return the budgets that the remote tables among `tables` declare."""
    remote = [table for table in tables if isinstance(table, RemoteTable)]
    return tuple(budget for table in remote for budget in table.rate_limit.budgets(table.name))


def check_budgets(budgets: Iterable[Budget]) -> None:
    """Raise ConfigurationError if one of these budgets is declared with different rates."""
    rates: dict[tuple[str, str], float] = {}  # by name and tag
    for budget in budgets:
        rate = rates.setdefault((budget.name, budget.tag), budget.rate)
        if rate != budget.rate:
            raise unequal_rates_error(budget, rate)

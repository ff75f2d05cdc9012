"""`CreditServer`: hands a run's credits out to its tasks, as they ask, from the run's driver."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, ValidationError

from dagster_adjunct.resources.common import StoredDocument, first_validation_problem
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    MalformedDocumentError,
    TableError,
    TransientError,
)
from dagster_adjunct.resources.metadata import SharedValue
from dagster_adjunct.resources.spark.errors import error_to_json
from dagster_adjunct.resources.tables.rate import KEPT_SECONDS, Budget

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

# What a run's driver and its tasks say to each other about credits, and how each knows the other.
#
#     driver  {"nonce"}            task  {"proof", "nonce"}           driver  {"proof"}
#     task    {"budget", "tag", "credits"}      driver  {"wait"} now and then, then {"granted"} or {"error"}
#
# A message is JSON after its length in four bytes. Proofs are HMACs of the other's nonce: the run's secret itself never
# passes, and a process that later gets the driver's port can't hand out anything.


_MAX_MESSAGE_BYTES = 64 * 1024
# So long somebody may take to say who he is.
_HANDSHAKE_SECONDS = 10.0


class HandshakeError(ConnectionError):
    """The other side doesn't know the run's secret, or speaks otherwise."""


@dataclass(frozen=True, slots=True)
class CreditAddress:
    """Where a run's driver hands out credits, and the secret of the run. It travels to tasks and is written nowhere."""

    host: str
    port: int
    secret: bytes = field(repr=False)


async def send_message(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def receive_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises IncompleteReadError where nobody is there any more, and NotOfThisRun."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > _MAX_MESSAGE_BYTES:
        raise HandshakeError(f"a message of {length} bytes")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as error:
        raise HandshakeError("what is no message") from error
    if not isinstance(message, dict):
        raise HandshakeError("what is no message")
    return message


async def authenticate_task(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Let a task in that knows the secret, and show that we do. Raises NotOfThisRun."""
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        nonce = secrets.token_hex(16)
        await send_message(writer, {"nonce": nonce})
        answer = await receive_message(reader)
        _check_proof(answer.get("proof"), secret, "task", nonce)
        await send_message(writer, {"proof": _proof(secret, "driver", str(answer.get("nonce")))})


async def authenticate_driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Show a driver that we know the secret, and see that it does. Raises NotOfThisRun."""
    async with asyncio.timeout(_HANDSHAKE_SECONDS):
        greeting = await receive_message(reader)
        nonce = secrets.token_hex(16)
        await send_message(writer, {"proof": _proof(secret, "task", str(greeting.get("nonce"))), "nonce": nonce})
        _check_proof((await receive_message(reader)).get("proof"), secret, "driver", nonce)


def _proof(secret: bytes, whose: str, nonce: str) -> str:
    return hmac.new(secret, f"{whose} {nonce}".encode(), "sha256").hexdigest()


def _check_proof(proof: object, secret: bytes, whose: str, nonce: str) -> None:
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), _proof(secret, whose, nonce).encode()):
        raise HandshakeError("a wrong proof")


# What the runs of a lake know of one budget: up to when its credits are leased, on a time line that they share.
#
# Credits come in at the budget's rate, so a lease is a stretch of time: who leases two tenths of a second may spend
# what
# comes in meanwhile. No stretch is leased twice, so all runs together never spend more, whatever their clocks say: who
# finds the time line ahead of his clock goes by it, and whose clock is ahead moves it on.


# So far ahead is leased at most: what a run that dies takes along. Two seconds is the promise.
MAX_AHEAD_SECONDS = 1.0
# A run that has not leased for so long wants nothing any more, or is dead.
_ACTIVE_SECONDS = 2.0
# A shorter lease is not worth a request: who wishes for less gets so much, where there is so much.
_MIN_LEASE_SECONDS = 0.01


class RunShare(StoredDocument):
    """When a run leased last, how much of the rate it could use, from 0 to 1, and the rate that it states (credits per
    second)."""

    at: float
    share: float
    rate: float | None = None


class SharedTimeline(StoredDocument):
    """A budget as it is stored. `now` is the latest time that a run has told; credits up to `through` are leased."""

    format: Literal[1] = 1
    now: float = 0.0
    through: float = 0.0
    runs: dict[str, RunShare] = Field(default_factory=dict)
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class LeaseInterval:
    """Leased time, in seconds from when it was decided: its beginning may be past."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a run asks for: so many seconds' credits now, and such a share of the rate as long as it goes on so."""

    seconds: float
    share: float


def lease_credits(
    timeline: SharedTimeline, run: str, now: float, wish: LeaseRequest, rate: float | None = None
) -> tuple[SharedTimeline, LeaseInterval | None]:
    """Return the budget after a lease, and what was leased; None where others have all that may be leased by now.

    Of what may be leased a run gets the part that its share is of all shares, where all can't have what they want.
    """
    now = max(now, timeline.now)
    heard = {name: other for name, other in timeline.runs.items() if other.at > now - _ACTIVE_SECONDS and name != run}
    runs = {**heard, run: RunShare(at=now, share=wish.share, rate=rate)}
    wished = max(wish.seconds, _MIN_LEASE_SECONDS)
    # Of what has come in, the latest: what came in before has expired when a small lease is there.
    start = max(timeline.through, now - min(wished, KEPT_SECONDS))
    shares = divide_fairly({name: other.share for name, other in runs.items()})
    part = shares[run] / total if (total := sum(shares.values())) else 0.0
    seconds = min(wished, (now + MAX_AHEAD_SECONDS - start) * part)
    if seconds < _MIN_LEASE_SECONDS:
        # Who waits is told all the same, or those before it would never leave it anything.
        return timeline.model_copy(update={"now": now, "runs": runs}), None
    after = timeline.model_copy(update={"now": now, "through": start + seconds, "runs": runs})
    return after, LeaseInterval(start - now, start + seconds - now)


def divide_fairly(wanted: Mapping[str, float]) -> dict[str, float]:
    """Return what each gets of 1: no more than it wants, and more than others only where those have all they want."""
    got: dict[str, float] = {}
    left, waiting = 1.0, sorted(wanted, key=lambda name: wanted[name])
    for place, name in enumerate(waiting):
        got[name] = min(wanted[name], left / (len(waiting) - place))
        left -= got[name]
    return got


# The credits of one budget that a run holds, which come in with time and expire, and the demands that wait for them.
#
# Times are the driver's own, in seconds, and given: nothing here waits or looks at a clock.


# Between two leases there is so much time, and a use is not taken for more than it was in that.
PAUSE_SECONDS = 0.2
# More than it used is wanted, or a demand that grows would never get ahead.
_HEADROOM = 1.25
_EPSILON = 1e-9


@dataclass(slots=True)
class _CreditInterval:
    start: float
    end: float
    credits: float

    def until(self, time: float) -> float:
        """How many of its credits have come in by then."""
        if time >= self.end:
            return self.credits
        if time <= self.start:
            return 0.0
        return self.credits * (time - self.start) / (self.end - self.start)

    def drop(self, credits: float) -> None:
        """Take away its first credits."""
        if self.credits - credits <= _EPSILON:
            self.start, self.credits = self.end, 0.0
        else:
            self.start += (self.end - self.start) * credits / self.credits
            self.credits -= credits


class LeasedCredits:
    """Leased credits in the order in which they come in."""

    def __init__(self) -> None:
        self._stretches: deque[_CreditInterval] = deque()

    def add(self, start: float, end: float, credits: float) -> None:
        self._stretches.append(_CreditInterval(start, end, credits))

    def give_back(self, now: float, credits: float) -> None:
        """Add what was taken and not used, as if it came in now."""
        self._stretches.appendleft(_CreditInterval(now, now, credits))

    def take(self, now: float, at_most: float) -> float:
        """Take what has come in and not expired, but no more than that; return how much it was."""
        taken = 0.0
        for stretch in self._stretches:
            stretch.drop(stretch.until(now - KEPT_SECONDS))
            part = min(at_most - taken, stretch.until(now))
            if part > 0:
                stretch.drop(part)
                taken += part
        while self._stretches and self._stretches[0].credits <= _EPSILON:
            self._stretches.popleft()
        return taken

    def held(self, now: float) -> float:
        """How many credits have not expired, those that have yet to come in included."""
        return sum(stretch.credits - stretch.until(now - KEPT_SECONDS) for stretch in self._stretches)

    def ready_at(self, now: float, credits: float) -> float | None:
        """When so many will have come in; None where all that are leased are not enough."""
        for stretch in self._stretches:
            if stretch.credits >= credits:
                length = stretch.end - stretch.start
                return max(now, stretch.start + length * credits / stretch.credits)
            credits -= stretch.credits
        return None


@dataclass(slots=True, eq=False)
class Demand:
    """Credits that somebody waits for; `missing` are those that are not paid in yet."""

    credits: float
    missing: float = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.credits


class Demands:
    """Who waits for the credits of one budget, in order, and how many credits to lease for them.

    Credits are paid in for the first demand until it has all: several that fill at once would be spent in one burst.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.leased = LeasedCredits()
        self.lease_takes = 0.0  # seconds, as the last one did
        self._waiting: deque[Demand] = deque()
        self._spent = 0.0
        self._wished_at = float("-inf")
        self._used_before = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, credits: float) -> Demand:
        demand = Demand(credits)
        self._waiting.append(demand)
        return demand

    def withdraw(self, demand: Demand, now: float) -> None:
        """Forget a demand; what was paid in for it is for those that still wait."""
        if demand in self._waiting:
            self._waiting.remove(demand)
            if (paid := demand.credits - demand.missing) > 0:
                self._spent -= paid
                self.leased.give_back(now, paid)

    def pay(self, now: float) -> list[Demand]:
        """Pay in what has come in; return the demands that have all by now, which wait no longer."""
        paid: list[Demand] = []
        while self._waiting:
            first = self._waiting[0]
            part = self.leased.take(now, first.missing)
            self._spent += part
            first.missing -= part
            if first.missing > _EPSILON * max(1.0, first.credits):
                break
            paid.append(self._waiting.popleft())
        return paid

    def next_at(self, now: float) -> float | None:
        """When the first demand will have all its credits; None where nobody waits, or a lease is needed first."""
        return self.leased.ready_at(now, self._waiting[0].missing) if self._waiting else None

    def wish(self, now: float) -> LeaseRequest | None:
        """Return what to lease now, None where nothing is wanted or the last lease was just before."""
        since = now - self._wished_at
        waiting = sum(demand.missing for demand in self._waiting)
        if since < PAUSE_SECONDS or (waiting <= 0 and self._spent <= _EPSILON):
            return None
        used = (self._spent + waiting) / (max(PAUSE_SECONDS, min(since, 1.0)) * self.rate)
        share = min(1.0, _HEADROOM * max(used, self._used_before))
        target = max(waiting, share * MAX_AHEAD_SECONDS * self.rate)
        held = self.leased.held(now + self.lease_takes)  # when the lease is there
        if held >= max(waiting, target * 2 / 3):
            return None
        self._wished_at, self._spent, self._used_before = now, 0.0, used
        return LeaseRequest(min(MAX_AHEAD_SECONDS + KEPT_SECONDS, (target - held) / self.rate), share)

    def look_at(self, now: float) -> float | None:
        """When there will be something to do; None until somebody demands."""
        if not self._waiting and self._spent <= _EPSILON:
            return None
        next_wish = max(now, self._wished_at + PAUSE_SECONDS)
        ready = self.next_at(now)
        if next_wish <= now:  # nothing was wished for just now: the leases suffice for a while
            next_wish = now + PAUSE_SECONDS
        return next_wish if ready is None else min(ready, next_wish)


_log = logging.getLogger("adjunct.tables")
# A task that waits hears so often that its driver lives.
HEARTBEAT_SECONDS = 3.0
# A store that leases nothing for so long is told to those that wait.
_STORE_SECONDS = 60.0


class Leases(Protocol):
    """Where the credits of one budget are leased."""

    def lease(self, wish: LeaseRequest) -> LeaseInterval | None: ...


class CreditServer:
    """A thread that leases credits while tasks demand them, and serves each demand in its turn.

    `start` it before its `address` is given to tasks, and `stop` it when the run ends. A task that is gone leaves its
    connection, and with it what it still demanded.
    """

    def __init__(self, leases: Callable[[Budget], Leases], *, host: str = "127.0.0.1", bind: str | None = None) -> None:
        self._leases, self._host, self._bind = leases, host, bind or host
        self._secret = secrets.token_bytes(32)
        self._taps: dict[tuple[str, str], _BudgetServer] = {}
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
                    self._taps[budget.name, budget.tag] = _BudgetServer(Demands(budget.rate), self._leases(budget))

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
            await authenticate_task(reader, writer, self._secret)
            while True:
                await self._serve(reader, writer, await receive_message(reader))
        except HandshakeError as error:
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
            raise HandshakeError(f"a demand of {credits!r} credits")
        if tap is None:
            await send_message(writer, {"error": error_to_json(_unknown(message))})
            return
        demand, granted = tap.ask(credits)
        # Nothing is sent while a task waits: whatever comes is the end of it.
        gone = asyncio.ensure_future(reader.read(1))
        either: set[asyncio.Future[Any]] = {granted, gone}
        try:
            while True:
                done, _ = await asyncio.wait(either, timeout=HEARTBEAT_SECONDS, return_when="FIRST_COMPLETED")
                if granted in done:
                    break
                if gone in done:
                    raise EOFError
                await send_message(writer, {"wait": True})
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await gone
            tap.forget(demand)
        await send_message(writer, granted.result())


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


class _BudgetServer:
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

    async def _lease(self, wish: LeaseRequest) -> None:
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
            answer.set_result({"error": error_to_json(error)})


class BudgetLeases:
    """Leases credits of a budget that all runs of a lake share. For one thread at a time.

    `clock` gives seconds that only grow; the wall clock is looked at once.
    """

    def __init__(self, lake: Lake, budget: Budget, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._value = SharedValue(lake, "budgets", budget.name, budget.tag)
        self._rate, self._told = budget.rate, set[float]()
        self._where = f"the budget {budget.name!r} ({budget.tag}) in {lake.url}"
        self._run, self._clock = run, clock
        self._ahead = time.time() - clock()  # of the budget's time line, by which its runs go together

    def lease(self, wish: LeaseRequest) -> LeaseInterval | None:
        """Return what was leased, by `clock`; None where others have all that may be leased by now.

        Raises StoreUnavailableError (what may have been leased expires), CommitConflictError after many conflicts, and
        MalformedDocumentError.
        """

        others, rates = False, set[float]()

        def decide(data: bytes | None) -> tuple[bytes, LeaseInterval | None]:
            nonlocal others, rates
            timeline = SharedTimeline() if data is None else self._parse(data)
            here = self._clock()
            self._ahead = max(self._ahead, timeline.now - here)
            after, got = lease_credits(timeline, self._run, here + self._ahead, wish, self._rate)
            others = len(after.runs) > 1
            rates = {run.rate for run in after.runs.values() if run.rate is not None} - {self._rate}
            document = after.model_copy(update={"nonce": uuid.uuid4().hex}).model_dump_json().encode()
            return document, None if got is None else LeaseInterval(here + got.start, here + got.end)

        got = self._value.transact(decide)
        if others:
            self._value.forget()
        self._tell(rates - self._told)
        return got

    def _tell(self, rates: set[float]) -> None:
        """Say which other rates runs spend of the budget at this moment, each once."""
        self._told |= rates
        for rate in sorted(rates):
            _log.warning(
                "%s is stated with %g credits per second here, and with %g in another run at this moment: together "
                "they spend more than the lower. Give all tables that share it one RateLimit, or budgets of their own.",
                self._where,
                self._rate,
                rate,
            )

    def _parse(self, data: bytes) -> SharedTimeline:
        try:
            return SharedTimeline.model_validate_json(data)
        except ValidationError as error:
            raise MalformedDocumentError(
                f"{self._where} can't be read: {first_validation_problem(error)}.",
                "If a newer release wrote it, upgrade dagster-adjunct; else delete the object, which is made again: "
                "what it tells is worth nothing after two seconds.",
                document=self._where,
            ) from error

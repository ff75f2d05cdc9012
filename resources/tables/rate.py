"""Rate limits of tables: `RateLayer` delays each attempt until the credits it costs are available.

A budget has credits per second for one tag: reads and writes have separate budgets. In plain Python
a budget belongs to the process; in an application's run the driver hands credits out to its tasks,
and leases them from the lake, where all runs share them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Annotated, Any, Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

from pydantic import Field

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    RunLeaseLostError,
    TransientError,
)
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables.functions import is_retryable
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Clock,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
    SystemClock,
    concatenate_outcomes,
    estimate_bytes,
    send_without_problems,
)
from dagster_adjunct.resources.validation import validated

# Unused credits expire after KEPT_SECONDS, and requests that cost more than arrive within
# LARGEST_SECONDS are split if possible: so in any 10 s at most 1.1 times the rate is sent.
KEPT_SECONDS = 0.5
LARGEST_SECONDS = 0.25

READ = "read"
WRITE = "write"


class Budget(NamedTuple):
    """Credits per second (`rate`) for reads or for writes (`tag`). Tables that declare the same
    name share it.
    """

    name: str
    tag: str
    rate: float

    @property
    def largest(self) -> int:
        """The most credits that one request may cost before it is split; at least 1."""
        return max(1, int(self.rate * LARGEST_SECONDS))


class CreditSource(Protocol):
    """Hands out the credits of budgets, to any number of coroutines and event loops."""

    async def acquire(self, budget: Budget, credits: float) -> None:
        """Wait until the budget has these credits, and spend them; callers are served in order."""
        ...

    async def close(self) -> None:
        """Release what is open in this event loop; the next call opens it again."""
        ...


def unequal_rates_error(budget: Budget, other: float) -> ConfigurationError:
    """The error for a budget for which another table declares the rate `other`."""
    problem = (
        f"budget {budget.name!r} is declared with both {other:g} and {budget.rate:g} {budget.tag}s"
        " per second."
    )
    step = "Give all tables that share the budget the same RateLimit, or use separate budgets."
    return ConfigurationError(problem, step, argument="budget")


_CHECK_SECONDS = 0.25  # how often a waiting caller checks whether its wait has become shorter


class TokenBucket:
    """Credits that arrive at `rate` per second, and expire after half a second (`KEPT_SECONDS`) if
    they are not spent.

    It starts empty: otherwise tasks that live for less than a second would each spend a whole
    burst, and together exceed their shared rate.

    A waiting caller has spent its credits before they arrive. If it is cancelled, callers behind it
    wait less, and credits that nobody waits for go to the next caller. Event loops of several
    threads may share a bucket.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._credits = 0.0
        self._taking = threading.Lock()
        self._filled_at = clock.now()
        self._waits: list[_Wait] = []

    async def acquire(self, credits: float) -> None:
        """Wait until `credits` have arrived, and spend them.

        Callers are served in order, except that two whose waits a cancellation shortens may swap if
        they are at most a quarter of a second apart.
        """
        wait = self._take(credits)
        if wait is None:
            return
        try:
            while (left := wait.due - self._clock.now()) > 0:
                # With nobody ahead whose cancellation could shorten it, the wait is slept through.
                is_first = self._waits[0] is wait
                if is_first or left <= _CHECK_SECONDS:
                    await self._clock.sleep(left)
                    break
                await self._clock.sleep(_CHECK_SECONDS)
        except BaseException:
            self._give_back(wait)
            raise
        with self._taking:
            self._waits.remove(wait)

    def _take(self, credits: float) -> _Wait | None:
        """Spend `credits`; return the wait for those that are yet to arrive, None if all have."""
        if credits <= 0:
            return None
        with self._taking:
            now = self._earn()
            self._credits -= credits
            if self._credits >= 0:
                return None
            debt = -self._credits
            wait = _Wait(credits, now + debt / self.rate)
            self._waits.append(wait)
            return wait

    def _earn(self) -> float:
        """Add the credits that have arrived since the last call; return the present time."""
        now = self._clock.now()
        earned = (now - self._filled_at) * self.rate
        self._credits = min(self.rate * KEPT_SECONDS, self._credits + earned)
        self._filled_at = now
        return now

    def _give_back(self, wait: _Wait) -> None:
        """Return a cancelled caller's credits: those behind it get them earlier.

        Of those that have arrived while it waited, only as many are left as have not expired.
        """
        with self._taking:
            now = self._earn()
            to_come = min(wait.credits, max(0.0, (wait.due - now) * self.rate))
            returned = to_come + min(wait.credits - to_come, self.rate * KEPT_SECONDS)
            self._credits += returned
            place = self._waits.index(wait)
            del self._waits[place]
            for other in self._waits[place:]:
                other.due -= returned / self.rate


@dataclass(eq=False, slots=True)
class _Wait:
    """A waiting caller: the credits that it has spent, and the time at which all of them will
    have arrived (`due`).
    """

    credits: float
    due: float


_MAX_CREDITS = 1e15  # far beyond any use, and still exact in a float
CreditsPerSecond = Annotated[float, Field(gt=0, le=_MAX_CREDITS)]
Credits = Callable[["Operation[Any]", "Outcomes | None"], float]


def per_record(operation: Operation[Any], answer: Outcomes | None) -> float:
    """Cost one credit per entry, and nothing in addition once it is answered."""
    if answer is None:
        return len(operation)
    return 0


@validated
def per_byte(operation: Operation[Any], answer: Outcomes | None) -> float:
    """Cost about one credit per byte that a write sends or a get returns. A get pays after its
    answer.
    """
    if answer is not None:
        return sum(map(estimate_bytes, _found_records(answer)))
    if operation.kind.writes:
        return operation.entries.nbytes
    return 0


@validated
def per_capacity_unit(operation: Operation[Any], answer: Outcomes | None) -> float:
    """Cost DynamoDB's capacity units: one per 1 KiB of a written entry, and per 4 KiB of a record
    that a get returns.

    DynamoDB counts the size of the whole record for an update; here only the update's own is known,
    so it may cost more.
    """
    if answer is not None:
        missing = answer.count - len(_found_records(answer))  # reading these costs one unit each
        return missing + sum(
            max(1, ceil(estimate_bytes(record) / 4096)) for record in _found_records(answer)
        )
    if not operation.kind.writes:
        return 0
    entries = operation.entries
    values = entries.values or [None] * len(entries)
    return sum(
        max(1, ceil((estimate_bytes(key) + estimate_bytes(value)) / 1024))
        for key, value in zip(entries.keys, values, strict=True)
    )


def _found_records(answer: Outcomes) -> list[Any]:
    """Return the records that a get has found."""
    return [record for record in answer.records or () if record is not None]


@validated
@dataclass(frozen=True, slots=True)
class RateLimit:
    """Limits a table's reads and writes, each to a number of credits per second (None: no limit).

    Updates and deletes are writes. In an application the limits hold over all tasks of all runs; in
    plain Python for one open table. Tables with the same `budget` share it; without one a table has
    its own.

    `credits` computes the cost of a request: `per_record` by default, `per_byte`,
    `per_capacity_unit`, or a function of your own. It is called with the operation and None before
    each attempt. After each get it is called with the operation and its outcomes, and returns what
    the get costs in addition.
    """

    reads_per_second: CreditsPerSecond | None = None
    writes_per_second: CreditsPerSecond | None = None
    budget: str | None = None
    credits: Credits = field(default=per_record, kw_only=True)

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_name("budget", self.budget)

    def budgets(self, table: str) -> tuple[Budget, ...]:
        """Return the budgets that this table's requests spend."""
        rates = ((READ, self.reads_per_second), (WRITE, self.writes_per_second))
        return tuple(
            Budget(self.budget or table, tag, rate) for tag, rate in rates if rate is not None
        )


# By name and tag of the budget, which tables of this process share.
_SHARED: WeakValueDictionary[tuple[str, str], TokenBucket] = WeakValueDictionary()


class LocalCredits:
    """A `CreditSource` of this process.

    Budgets belong to this object, or, if `shared`, to all such objects of the process, by name.
    """

    def __init__(self, clock: Clock | None = None, *, shared: bool = False) -> None:
        self._clock = clock or SystemClock()
        self._shared = shared
        self._buckets: dict[Budget, TokenBucket] = {}
        self._making = threading.Lock()

    async def acquire(self, budget: Budget, credits: float) -> None:
        """Take credits of a budget of this process, and wait until there are enough."""
        bucket = self._buckets.get(budget)
        if bucket is None:
            with self._making:
                # Another thread may have made it since.
                bucket = self._buckets.get(budget) or self._new_bucket(budget)
                self._buckets[budget] = bucket
        await bucket.acquire(credits)

    def _new_bucket(self, budget: Budget) -> TokenBucket:
        """Return the budget's bucket, one of the process if it is shared; ConfigurationError if
        that has another rate.
        """
        if not self._shared:
            return TokenBucket(budget.rate, self._clock)
        bucket = _SHARED.get((budget.name, budget.tag)) or TokenBucket(budget.rate, self._clock)
        if bucket.rate != budget.rate:
            raise unequal_rates_error(budget, bucket.rate)
        _SHARED[budget.name, budget.tag] = bucket
        return bucket

    async def close(self) -> None:
        pass


_NO_WAIT = 0.0001  # seconds; a shorter `acquire` did not wait


@validated
@dataclass(slots=True)
class RateLayer:
    """Pays for every attempt from the budget for reads or writes.

    A request that costs more than may be sent at once (`Budget.largest`) is split into parts, which
    are sent one after the other. After an entry that can be retried, later entries of its key are
    not sent and get `Problem.unsent`. `source` provides the credits; by default they are this
    process's own.
    """

    table: str
    below: Layer
    limit: RateLimit = field(default_factory=RateLimit)
    source: CreditSource | None = None
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=SystemClock)
    _budgets: dict[str, Budget] = field(init=False)
    _credits: CreditSource = field(init=False)

    def __post_init__(self) -> None:
        self._budgets = {budget.tag: budget for budget in self.limit.budgets(self.table)}
        self._credits = self.source or LocalCredits(
            self.clock, shared=self.limit.budget is not None
        )

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send when the budget allows it, and in parts if it never allows all at once."""
        budget = self._budgets.get(READ if operation.kind is OperationKind.GET else WRITE)
        if budget is None:
            return await self.below.send(operation)
        cost = self._cost(operation)
        if cost <= budget.largest or operation.count <= 1:
            return await self._attempt(operation, budget, cost)
        return await self._send_in_parts(operation, budget, cost)

    def largest(self, wanted: int) -> int:
        """The greatest number of entries, up to `wanted`, of which a request need not be split."""
        if self.limit.credits is not per_record:
            return wanted
        return min([wanted, *(budget.largest for budget in self._budgets.values())])

    async def close(self) -> None:
        await self._credits.close()
        await self.below.close()

    async def _attempt(self, operation: Operation[Any], budget: Budget, cost: float) -> Outcomes:
        """Pay for a request, send it, and pay what a get costs in addition. An error of the credits
        is its outcome.
        """
        began = self.clock.now()
        try:
            await self._credits.acquire(budget, cost)
        except RunLeaseLostError:
            raise
        except AdjunctError as error:
            # Nothing is wrong with the records: they must not become dead letters.
            # Nothing of this part was sent, but earlier parts may have been.
            if isinstance(error, TransientError):
                state = State.FAILED
            else:
                state = State.REFUSED
            return Outcomes.all(len(operation), Problem(state, error, of_request=True))
        waited = self._count_wait(began)
        outcomes = await self.below.send(operation)
        if operation.kind is OperationKind.GET and (rest := self._cost(operation, outcomes)) > 0:
            began = self.clock.now()
            await self._credits.acquire(budget, rest)
            waited += self._count_wait(began)
        if waited:
            return replace(outcomes, waited=outcomes.waited + waited)
        return outcomes

    def _count_wait(self, began: float) -> float:
        """Return how many seconds have been waited for credits since `began`, and count them."""
        waited = self.clock.now() - began
        if waited < _NO_WAIT:
            return 0.0
        self.meter.add("rate_waits", waited)
        return waited

    def _cost(self, operation: Operation[Any], answer: Outcomes | None = None) -> float:
        """Return how many credits an operation costs before it is sent, or with its `answer` in
        addition. Raises ConfigurationError if the declared function gives no number of credits.
        """
        credits = self.limit.credits
        if credits is per_record:
            if answer is None:
                return operation.count
            return 0
        raised: Exception | None = None
        try:
            cost = credits(operation, answer)
            is_number = isinstance(cost, int | float) and not isinstance(cost, bool)
            if is_number and 0 <= cost <= _MAX_CREDITS:
                return cost
            what = f"gave {cost!r:.60}"
        except Exception as error:  # noqa: BLE001 - it is the cause
            what = f"raised {type(error).__name__}: {error}"
            raised = error
        problem = f"table {self.table}: credits of the rate limit {what}"
        step = (
            "a number of credits, 0 or more, for the operation, and after a get also for its"
            " outcomes"
        )
        raise argument_error(problem, step, argument="credits", table=self.table) from raised

    async def _send_in_parts(
        self, operation: Operation[Any], budget: Budget, cost: float
    ) -> Outcomes:
        """Send an operation that costs too much at once in parts, one after the other."""
        sent: list[Outcomes] = []
        blocked: dict[Any, Problem] = {}  # by key
        # Costs are computed before any is sent.
        for part, its_cost in list(self._parts(operation, budget, cost)):
            keys = part.entries.keys
            held = {place: blocked[key] for place, key in enumerate(keys) if key in blocked}
            if held:
                attempt = partial(self._attempt_rest, budget)
                outcomes = await send_without_problems(part, held, attempt)
            else:
                outcomes = await self._attempt(part, budget, its_cost)
            sent.append(outcomes)
            for place, problem in outcomes.problems.items():
                if operation.kind.writes and is_retryable(problem):
                    blocked.setdefault(keys[place], problem.unsent)
        return concatenate_outcomes(sent)

    async def _attempt_rest(self, budget: Budget, rest: Operation[Any]) -> Outcomes:
        """Attempt what is left of a part, after others: an error of its cost is its outcome."""
        try:
            return await self._attempt(rest, budget, self._cost(rest))
        except ConfigurationError as error:
            return Outcomes.all(len(rest), Problem(State.REFUSED, error))

    def _parts(
        self, operation: Operation[Any], budget: Budget, cost: float
    ) -> Iterator[tuple[Operation[Any], float]]:
        """Yield the parts of an operation and their costs: each may be sent at once, or is a
        single entry.
        """
        count = len(operation)
        size = ceil(count / ceil(cost / budget.largest))
        for start in range(0, count, size):
            part = operation.with_entries(operation.entries.part(start, min(count, start + size)))
            its_cost = self._cost(part)
            can_be_split = 1 < len(part) < count
            if its_cost > budget.largest and can_be_split:
                yield from self._parts(part, budget, its_cost)
            else:
                yield part, its_cost


# Credits are leased at most this far ahead: what a run has leased when it dies, others can't use.
MAX_AHEAD_SECONDS = 1.0
# A run that has not asked for a lease for this long needs no credits, or is dead.
_ACTIVE_SECONDS = 2.0
# The shortest lease: a shorter one is not worth its request to the store, so less is raised to this
# if possible.
_MIN_LEASE_SECONDS = 0.01


class RunShare(StoredDocument):
    """What a budget's timeline knows of a run.

    `at` is when it last asked for a lease, on the timeline; `share` the part of the rate that it
    could use (0 to 1); `rate` what it declares, in credits per second.
    """

    at: float
    share: float
    rate: float


class SharedTimeline(StoredDocument):
    """The document in the lake by which runs share a budget.

    Times are in seconds. `now` is the latest time that any run has had; credits that arrive until
    `through` are leased. `nonce` differs in each version of the document.
    """

    format: Literal[1] = 1
    now: float = 0.0
    through: float = 0.0
    runs: dict[str, RunShare] = Field(default_factory=dict)
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class LeaseInterval:
    """A leased interval of time, in seconds: what arrives from `start` to `end` may be spent. The
    start may be past.

    `lease_credits` returns it relative to `now`, `BudgetLeases.lease` on its own clock.
    """

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a run asks for: credits for this many seconds, and the share of the rate that it
    expects to use (0 to 1).
    """

    seconds: float
    share: float


def lease_credits(
    timeline: SharedTimeline, run: str, now: float, request: LeaseRequest, rate: float
) -> tuple[SharedTimeline, LeaseInterval | None]:
    """Return the timeline after a run's request at `now`, and the leased interval. `rate` is what
    the run declares.

    The interval is None if other runs hold nearly everything that may be leased. If not all active
    runs can have what they expect to use, this one gets its fair part (`divide_fairly`) of what may
    be leased.
    """
    now = max(now, timeline.now)
    active = {}
    for name, other in timeline.runs.items():
        if other.at > now - _ACTIVE_SECONDS and name != run:
            active[name] = other
    runs = {**active, run: RunShare(at=now, share=request.share, rate=rate)}
    wanted = max(request.seconds, _MIN_LEASE_SECONDS)
    # Lease the latest credits that have arrived: older ones would expire before they are spent.
    start = max(timeline.through, now - min(wanted, KEPT_SECONDS))
    shares = divide_fairly({name: other.share for name, other in runs.items()})
    part = 0.0
    if total := sum(shares.values()):
        part = shares[run] / total
    seconds = min(wanted, (now + MAX_AHEAD_SECONDS - start) * part)
    if seconds < _MIN_LEASE_SECONDS:
        # The run is recorded though it gets nothing, so that the others leave it a part.
        return timeline.model_copy(update={"now": now, "runs": runs}), None
    after = timeline.model_copy(update={"now": now, "through": start + seconds, "runs": runs})
    return after, LeaseInterval(start - now, start + seconds - now)


def divide_fairly(wanted: Mapping[str, float]) -> dict[str, float]:
    """Divide 1 among names by max-min fairness.

    Who wants less than an equal part gets it; the others share the rest equally.
    """
    got: dict[str, float] = {}
    left = 1.0
    waiting = sorted(wanted, key=lambda name: wanted[name])
    for place, name in enumerate(waiting):
        got[name] = min(wanted[name], left / (len(waiting) - place))
        left -= got[name]
    return got

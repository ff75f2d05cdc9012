"""`BatchProcessor`: places operations into batches and answers each when the requests that it is in are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, TableAccessError
from dagster_adjunct.resources.tables.batch import Batch, BatchProvider
from dagster_adjunct.resources.tables.batch_handler import BatchHandler, Request
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.messages_held_back import HeldBack
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.order_of_a_key import KeyOrder, Turn
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State


class _Call:
    """What is known so far of the outcomes of one caller's operation."""

    __slots__ = ("_defaults_put", "_error", "_problems", "_records", "answer", "left", "operation")

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation
        self.answer: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        self.left = 0  # requests that it is in and that are not answered
        self._problems: dict[int, Problem] = {}
        self._records: list[Any] | None = None
        self._defaults_put = 0
        self._error: BaseException | None = None

    def note(self, places: Sequence[int], outcomes: Outcomes, start: int) -> None:
        """The outcomes of the entries at `places` are those from `start` on."""
        if outcomes.problems:
            for place, member in enumerate(places, start):
                if member_problem := outcomes.problems.get(place):
                    self._problems[member] = member_problem
        if outcomes.records is not None:
            if self._records is None:
                self._records = [None] * len(self.operation)
            for place, member in enumerate(places, start):
                self._records[member] = outcomes.records[place]

    def began(self, defaults: int) -> None:
        self._defaults_put += defaults

    def failed(self, error: BaseException) -> None:
        self._error = self._error or error

    def answered(self) -> None:
        """One of its requests is over."""
        self.left -= 1
        if self.left or self.answer.done():
            return
        if self._error is not None:
            self.answer.set_exception(self._error)
        else:
            count = len(self.operation)
            self.answer.set_result(Outcomes(count, self._records, self._problems, self._defaults_put))


class BatchProcessor:
    """The batches of one event loop."""

    def __init__(self, below: Layer, provider: BatchProvider, handler: BatchHandler, in_flight: int) -> None:
        self._below = below
        self._provider = provider
        self._handler = handler
        self._order = KeyOrder()
        self._held_back = HeldBack()
        self._slots = asyncio.Semaphore(in_flight)
        self._gathering: _Gathering | None = None

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not operation.count:
            return Outcomes(0)
        size = self._provider.size_of(operation) if self._provider.bytes else 0
        if not self._provider.gathers(operation, size):
            self._end_gathering()  # it comes before, for keys of both
            return await self._alone(operation)
        gathering = self._gathering
        if gathering is not None and not gathering.batch.takes(operation, size):
            self._end_gathering()
            gathering = None
        if gathering is not None:
            return await self._with_others(gathering, operation, size)
        gathering = self._gathering = _Gathering(self._provider.batch())
        if self._provider.delay:
            loop = asyncio.get_running_loop()
            gathering.timer = loop.call_later(self._provider.delay, self._end_gathering, gathering)
            return await self._with_others(gathering, operation, size)
        return await self._first_of(gathering, operation, size)

    async def flush(self) -> None:
        """Send what is gathered; return when everything that was asked before is answered."""
        self._end_gathering()
        await self._order.over()

    async def _first_of(self, gathering: _Gathering, operation: Operation[Any], size: int) -> Outcomes:
        """Gather what others ask in this turn of the event loop; whoever is alone then needs no task."""
        gathering.batch.add(operation, size)
        gathering.calls.append(None)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            gathering.withdraw(0)
            if self._gathering is gathering:
                self._end_gathering()
            raise
        if self._gathering is gathering:
            if len(gathering.calls) == 1:
                self._gathering = None
                return await self._alone(operation)
            self._end_gathering()
        return await self._answer(gathering, 0)

    async def _with_others(self, gathering: _Gathering, operation: Operation[Any], size: int) -> Outcomes:
        mine = len(gathering.calls)
        gathering.batch.add(operation, size)
        gathering.calls.append(None)
        if gathering.batch.full:
            self._end_gathering()
        return await self._answer(gathering, mine)

    async def _answer(self, gathering: _Gathering, mine: int) -> Outcomes:
        call = gathering.calls[mine]
        if call is None:
            call = gathering.calls[mine] = _Call(gathering.batch.operations[mine])
        try:
            return await call.answer
        except asyncio.CancelledError:
            gathering.withdraw(mine)
            raise

    def _end_gathering(self, only: _Gathering | None = None) -> None:
        """Send the batch, each request in a task of its own: no caller's end is that of the others."""
        gathering = self._gathering
        if gathering is None or (only is not None and gathering is not only):
            return
        self._gathering = None
        if gathering.timer is not None:
            gathering.timer.cancel()
        calls: list[_Call] = []
        for place, operation in enumerate(gathering.batch.operations):
            if gathering.withdrawn is None or place not in gathering.withdrawn:
                call = gathering.calls[place] = gathering.calls[place] or _Call(operation)
                calls.append(call)
        if not calls:
            return
        try:
            gathering.tasks = self._start(calls)
        except Exception as error:  # noqa: BLE001 - whoever waits is told; nothing was sent
            for call in calls:
                call.answer.set_exception(error)

    def _start(self, calls: Sequence[_Call]) -> list[asyncio.Task[None]]:
        requests = self._handler.requests([call.operation for call in calls])
        members = [[calls[of] for of in _members(request)] for request in requests]
        for of_request in members:
            for call in of_request:
                call.left += 1
        turns = [self._order.take(request.operation.entries) for request in requests]
        tasks = []
        for request, turn, of_request in zip(requests, turns, members, strict=True):
            task = asyncio.create_task(self._answer_calls(request, turn, calls, of_request))
            # A task that is cancelled before its first step runs none of its own code.
            task.add_done_callback(partial(self._ended, turn, of_request))
            tasks.append(task)
        return tasks

    async def _answer_calls(
        self, request: Request, turn: Turn, calls: Sequence[_Call], members: Sequence[_Call]
    ) -> None:
        await turn.come()
        async with self._slots:
            try:
                outcomes = await self._held_back.sent(turn, request.operation, self._below)
            except Exception as error:  # noqa: BLE001 - it is the callers'
                if len(members) == 1 or len(request.spans) == 1 or _may_have_acted(request.operation, error):
                    for call in members:
                        call.failed(error)
                else:
                    await self._one_after_the_other(request, calls)
                return
            if len(request.spans) > 1 and outcomes.problems and _is_one_callers(request.operation, outcomes):
                await self._one_after_the_other(request, calls)
                return
        for span in request.spans:
            calls[span.of].note(span.places, outcomes, span.start)
        for place, of, origin in request.followers:
            if place in outcomes.problems:
                calls[of].note([origin], Outcomes(1, problems={0: outcomes.problems[place]}), 0)
        if outcomes.defaults_put:  # nobody says whose
            members[0].began(outcomes.defaults_put)

    async def _one_after_the_other(self, request: Request, calls: Sequence[_Call]) -> None:
        """The request was refused as a whole, maybe for what one caller asks: the others are not to suffer from it."""
        problems: dict[int, Problem] = {}
        errors: dict[int, Exception] = {}
        for span in request.spans:
            end = span.start + len(span.places)
            part = request.operation.with_entries(request.operation.entries.part(span.start, end))
            try:
                outcomes = await self._below.send(part)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                calls[span.of].failed(error)
                errors |= dict.fromkeys(range(span.start, end), error)
            else:
                calls[span.of].note(span.places, outcomes, 0)
                calls[span.of].began(outcomes.defaults_put)
                problems |= {span.start + place: problem for place, problem in outcomes.problems.items()}
        for place, of, origin in request.followers:
            if place in errors:
                calls[of].failed(errors[place])
            elif place in problems:
                calls[of].note([origin], Outcomes(1, problems={0: problems[place]}), 0)

    def _ended(self, turn: Turn, members: Sequence[_Call], task: asyncio.Task[None]) -> None:
        turn.leave()
        for call in members:
            if task.cancelled():
                call.answer.cancel()
            elif (error := task.exception()) is not None:
                call.failed(error)
            call.answered()

    async def _alone(self, operation: Operation[Any]) -> Outcomes:
        if self._handler.is_one_request(operation):
            turn = self._order.take(operation.entries)
            try:
                if turn.ahead:
                    await turn.come()
                await self._slots.acquire()
                try:
                    return await self._held_back.sent(turn, operation, self._below)
                finally:
                    self._slots.release()
            finally:
                turn.leave()
        call = _Call(operation)
        tasks = self._start([call])
        try:
            return await call.answer
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise


class _Gathering:
    """A batch that is open, and who waits for it."""

    __slots__ = ("batch", "calls", "tasks", "timer", "withdrawn")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.calls: list[_Call | None] = []
        self.timer: asyncio.TimerHandle | None = None
        self.withdrawn: set[int] | None = None
        self.tasks: list[asyncio.Task[None]] | None = None

    def withdraw(self, mine: int) -> None:
        """Its caller was cancelled: it is not sent if it was not; where nobody is left, the requests end."""
        self.withdrawn = (self.withdrawn or set()) | {mine}
        if self.tasks is not None and len(self.withdrawn) == len(self.calls):
            for task in self.tasks:
                task.cancel()


def _may_have_acted(operation: Operation[Any], error: BaseException) -> bool:
    """Whether sending again may repeat an effect: of updates, unless it was their declaration that was refused."""
    return operation.kind is OperationKind.UPDATE and not isinstance(error, ConfigurationError | SchemaMismatchError)


def _is_one_callers(operation: Operation[Any], outcomes: Outcomes) -> bool:
    """Whether the function refused the request as a whole, and each caller's part of it may be sent alone.

    What is wrong with the table itself is everybody's.
    """
    problem = outcomes.problems.get(0)
    if problem is None or problem.state is not State.REFUSED or not problem.of_request or problem.error is None:
        return False
    everybodys = isinstance(problem.error, ConfigurationError | TableAccessError)
    return not everybodys and not _may_have_acted(operation, problem.error)


def _members(request: Request) -> list[int]:
    """Whose entries a request has, or stands for; each once."""
    return list(dict.fromkeys([*(span.of for span in request.spans), *(of for _, of, _ in request.followers)]))

"""`RetryLayer`: sends again what may pass, and only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dagster_adjunct.resources.tables.clock import Clock, SystemClock
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class RetryLayer:
    """Sends the entries that failed, or of which nothing is known, again as the policy says.

    An operation is over when each of its entries has an outcome that stays; whoever keeps the order of a key waits for
    that. Inside an operation it is the function that sends nothing of a key after an entry that failed.
    """

    inner: Layer
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=SystemClock)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        began = self.clock.now()
        try:
            outcomes = await self.inner.send(operation)
        except BaseException:
            self.meter.request(ended=False)
            raise
        if outcomes.problems:
            self.meter.request(ended=False)
            return await self._until_over(operation, outcomes, began)
        self.meter.request(ended=True)
        return outcomes

    async def close(self) -> None:
        await self.inner.close()

    async def _until_over(self, operation: Operation[Any], outcomes: Outcomes, began: float) -> Outcomes:
        attempts = 1
        while True:
            # Entries may be done by now: what is raised is told of the others, so that nobody sends all of them again.
            left = [place for place, problem in outcomes.problems.items() if not problem.is_answer]
            try:
                left = self._left(operation, outcomes)
                again = await self._waited(operation, outcomes, left, attempts, began) if left else None
                if again is None:
                    break
                attempts += 1
                later = await self.inner.send(operation.with_entries(operation.entries.take(again)))
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                states = {place: outcomes.problems[place].state for place in left}
                problems = {place: Problem(state, error, of_request=True) for place, state in states.items()}
                outcomes = replace(outcomes, problems={**outcomes.problems, **problems})
                break
            outcomes = outcomes.amended(again, later)
        given_up = sum(not problem.is_answer for problem in outcomes.problems.values())
        self.meter.add("failures" if given_up else "successes")
        if given_up:
            self.meter.add("given_up", given_up)
        return outcomes

    async def _waited(
        self, operation: Operation[Any], outcomes: Outcomes, left: list[int], attempts: int, began: float
    ) -> list[int] | None:
        """Wait for the next attempt; return the entries to send again, None where the policy gives up."""
        problems = [outcomes.problems[place] for place in left]
        asked = max((problem.retry_after or 0.0 for problem in problems), default=0.0)
        if asked:
            self.meter.add("throttled")
        spent = self.clock.now() - began - outcomes.waited
        wait = self.policy.wait(attempts, spent, asked)
        if wait is None:
            _tell(problems, attempts, spent, asked)
            return None
        if wait:
            self.meter.add("retry_waits", wait)
            await self.clock.sleep(wait)
        self.meter.add("retries")
        return _with_overtakers(operation, outcomes, left)

    def _left(self, operation: Operation[Any], outcomes: Outcomes) -> list[int]:
        left = sorted(place for place, problem in outcomes.problems.items() if self.policy.passes(problem))
        if self.policy.unknown == "fail" and operation.kind is OperationKind.UPDATE:
            return [place for place in left if not _may_act_twice(operation, place, outcomes.problems[place])]
        return left


def _may_act_twice(operation: Operation[Any], place: int, problem: Problem) -> bool:
    """Whether the update may have had its effect, and would have it again."""
    return problem.state is not State.FAILED and not _repeatable(operation, place)


def _repeatable(operation: Operation[Any], place: int) -> bool:
    if operation.kind is not OperationKind.UPDATE or operation.conditions.idempotent:
        return True
    update = (operation.entries.values or ())[place]
    return update.repeatable if isinstance(update, Changes) else isinstance(update, Mapping)


def _with_overtakers(operation: Operation[Any], outcomes: Outcomes, left: list[int]) -> list[int]:
    """`left`, and the entries that were done though an earlier one of their key was not, where they may be repeated.

    A function that keeps the order of a key leaves none. One that does not would have the key's earlier value win when
    only that is sent again.
    """
    if operation.conditions or not operation.kind.writes or operation.kind is OperationKind.PUT_IF_ABSENT:
        return left
    keys = operation.entries.keys
    first: dict[Any, int] = {}
    for place in left:
        first.setdefault(keys[place], place)
    if len(outcomes.problems) == outcomes.count or left[0] == outcomes.count - 1:
        return left
    overtakers = [
        place
        for place in range(left[0] + 1, outcomes.count)
        if place not in outcomes.problems and first.get(keys[place], place) < place and _repeatable(operation, place)
    ]
    return sorted([*left, *overtakers]) if overtakers else left


def _tell(problems: list[Problem], attempts: int, spent: float, asked: float) -> None:
    """Add to each of the errors why it was not tried again."""
    asking = f"; the store asked for a pause of {asked:g} s" if asked else ""
    note = f"Gave up after {attempts} attempts in {spent:.1f} s{asking}."
    for error in {id(problem.error): problem.error for problem in problems}.values():
        if error is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

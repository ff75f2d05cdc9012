"""A layer below the one under test, which does as a test says and keeps what it was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
)

Answer = Callable[[Operation[Any]], Outcomes]


class ScriptedLayer:
    """Answers the n-th operation with the n-th of `answers`, and what comes after them with
    success.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.sent: list[Operation[Any]] = []

    async def send(self, operation: Operation[Any]) -> Outcomes:
        self.sent.append(operation)
        if self.answers:
            return self.answers.pop(0)(operation)
        return well(operation)

    async def close(self) -> None:
        pass

    @property
    def keys(self) -> list[list[Any]]:
        return [list(operation.entries.keys) for operation in self.sent]


def well(operation: Operation[Any]) -> Outcomes:
    return Outcomes(
        len(operation),
        list(operation.entries.keys) if operation.kind is OperationKind.GET else None,
    )


def busy(state: State = State.FAILED, retry_after: float | None = None) -> Problem:
    return Problem(state, TableUnavailableError("the store is busy.", "Wait."), retry_after)


def failing(*places: int, problem: Problem | None = None) -> Answer:
    """The entries at `places` (none: all) have this problem, the others are well."""

    def answer(operation: Operation[Any]) -> Outcomes:
        records = well(operation).records
        chosen = places or range(len(operation))
        return Outcomes(len(operation), records, dict.fromkeys(chosen, problem or busy()))

    return answer


def puts(*keys: Any) -> Operation[Any]:
    return Operation(
        OperationKind.PUT, RowEntries(list(keys), [{"n": n} for n in range(len(keys))])
    )


def gets(*keys: Any) -> Operation[Any]:
    return Operation(OperationKind.GET, RowEntries(list(keys)))


def updates(*keys: Any, idempotent: bool = False, **changes: Any) -> Operation[Any]:
    marks = [Mark("s.0", str(n)) for n in range(len(keys))]
    entries = RowEntries(list(keys), [Changes(**changes)] * len(keys), marks=marks)
    return Operation(OperationKind.UPDATE, entries, conditions=Conditions(idempotent=idempotent))

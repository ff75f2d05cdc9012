"""`FunctionLayer`: the lowest layer, which hands operations to a table's functions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.tables.declared_conditions import check_conditions
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.own_cancellation import ended_itself
from dagster_adjunct.resources.tables.record_not_found import outcomes_of_missing
from dagster_adjunct.resources.tables.table_functions import TableFunction, check_args, problem_told


@dataclass(frozen=True, slots=True)
class FunctionLayer:
    """Sends gets to the one function and writes to the other, each opened before its request."""

    table: str
    read_function: TableFunction | None
    write_function: TableFunction | None

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not len(operation):
            return Outcomes(0)
        function = self._function(operation)
        try:
            await function.open()
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return _of_the_request(operation, problem_told(function, error, sent=False))
        except asyncio.CancelledError as error:
            return Outcomes.all(len(operation), problem_told(function, ended_itself(error), sent=False))
        try:
            outcomes = await function.send(operation)
        except asyncio.CancelledError as error:
            return Outcomes.all(len(operation), problem_told(function, ended_itself(error)))
        except ConfigurationError:
            raise  # nothing was sent, and nothing of it can be
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            # Some of it may be done: whoever sends it again has to know.
            told = partial(problem_told, function)
            return outcomes_of_missing(operation, error, told) or _of_the_request(operation, told(error))
        return outcomes if _answers(outcomes, operation) else self._no_answer(function, operation, outcomes)

    async def close(self) -> None:
        for function in {id(f): f for f in (self.read_function, self.write_function) if f is not None}.values():
            await function.close()

    def _no_answer(self, function: TableFunction, operation: Operation[Any], outcomes: object) -> Outcomes:
        answer = type(outcomes).__name__
        if isinstance(outcomes, Outcomes):
            records = len(outcomes.records) if isinstance(outcomes.records, Sized) else outcomes.records
            problems = f"{outcomes.problems!r:.100}" if outcomes.problems else "none"
            answer = f"Outcomes of {outcomes.count} entries (records: {records}, problems: {problems})"
        error = TableError(
            f"{type(function).__name__} answered a {operation.kind.value} of {len(operation)} entries with {answer}.",
            "Have its send() return Outcomes with one outcome, and for a get one record or None, for each entry; its "
            "problems are {place: Problem(State.REFUSED, error)} and the like.",
            table=self.table,
        )
        return _of_the_request(operation, Problem(State.REFUSED, error))

    def _function(self, operation: Operation[Any]) -> TableFunction:
        reads = operation.kind is OperationKind.GET
        function = self.read_function if reads else self.write_function
        if function is None:
            verb, missing = ("asked for records", "read") if reads else ("asked to write", "write")
            raise ConfigurationError(
                f"table {self.table} was {verb} but has no {missing} function.",
                f"Declare it with {missing}_function=….",
                table=self.table,
            )
        check_args(function, operation, self.table)
        if operation.conditions:
            check_conditions(self.table, function, operation)
        return function


def _of_the_request(operation: Operation[Any], problem: Problem) -> Outcomes:
    return Outcomes.all(len(operation), replace(problem, of_request=True))


def _answers(outcomes: object, operation: Operation[Any]) -> bool:
    """Whether there is one outcome for each entry: entries that nobody speaks of must not pass for done."""
    count = len(operation)
    if not isinstance(outcomes, Outcomes) or outcomes.count != count:
        return False
    problems, records = outcomes.problems, outcomes.records
    if not isinstance(problems, Mapping):
        return False
    if problems and not all(_is_problem(place, count, problem) for place, problem in problems.items()):
        return False
    if operation.kind.writes or (records is None and len(problems) == count):
        return True
    return isinstance(records, Sequence) and len(records) == count


def _is_problem(place: object, count: int, problem: object) -> bool:
    if not isinstance(place, int) or not 0 <= place < count or not isinstance(problem, Problem):
        return False
    pause, error = problem.retry_after, problem.error
    timed = pause is None or (isinstance(pause, int | float) and 0 <= pause < math.inf)
    return timed and isinstance(problem.state, State) and (error is None or isinstance(error, BaseException))

"""The lowest layer of a table, which calls its functions; a layer in the place of a function."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.tables.functions import (
    RUN_FENCE,
    StoreFunction,
    TableFunction,
    check_args,
    outcomes_from_error,
    problem_from_error,
    self_cancelled_error,
)
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
)
from dagster_adjunct.resources.validation import validated


def check_conditions(
    table: str, function: str, capabilities: Capabilities, operation: Operation[Any]
) -> None:
    """Raise for conditions that the function can't check, and for entries without the marks or
    times that they need.
    """
    conditions = operation.conditions
    entries = operation.entries
    what = f"table {table}: a {operation.kind.value}"
    wanted = {"newest_by": conditions.newest_by is not None, "idempotent": conditions.idempotent}
    for name, is_wanted in wanted.items():
        if is_wanted and not getattr(capabilities, name):
            problem = f"{what} has the condition {name}, which {function} can't check."
            step = f"Remove the condition, or use a table whose store supports {name}."
            raise errors.ConfigurationError(problem, step, argument=name, table=table)
    if isinstance(entries, RowEntries):  # a stream's entries always have both
        needed = ["marks"] if conditions.newest_by is None else ["marks", "newest"]
        for name in needed:
            if getattr(entries, name) is None:
                problem = f"{what} has conditions, but its entries have no {name}."
                step = f"Pass RowEntries(…, {name}=…), or declare the conditions on the table."
                raise errors.TableError(problem, step, table=table)


@dataclass(frozen=True, slots=True)
class FunctionLayer:
    """Sends gets to the read function and writes to the write function.

    Before every request it calls the function's `open`, which does nothing if the function is
    connected. Writes of a run have its `fence`, which is checked last: a run that may have lost its
    lease sends nothing.
    """

    table: str
    read_function: TableFunction | None
    write_function: TableFunction | None
    fence: Fence | None = None
    fenced: bool = False
    may_create: bool = True

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Call the user's function under the run's fence; return its outcomes, and its error as
        problems of the entries.
        """
        count = len(operation)
        if not count:
            return Outcomes(0)
        function = self._function(operation)
        if self.fence is not None and operation.kind.writes:
            operation = replace(operation, fence=self.fence, fenced=self.fenced)
        if not self.may_create:
            operation = replace(operation, may_create=False)
        sent = False
        token = RUN_FENCE.set(operation.fence)
        try:
            await function.open()
            await operation.check_fence()
            sent = True
            outcomes = await function.send(operation)
        except asyncio.CancelledError as error:
            return Outcomes.all(
                count, problem_from_error(function, self_cancelled_error(error), sent=sent)
            )
        except errors.RunLeaseLostError:
            raise  # what was sent before counts no more: another run repeats the batch
        except Exception as error:
            if not sent:
                problem = problem_from_error(function, error, sent=False)
                return Outcomes.all(count, replace(problem, of_request=True))
            if isinstance(error, errors.ConfigurationError):
                raise  # nothing was sent
            return outcomes_from_error(function, operation, error, of_request=True)
        finally:
            RUN_FENCE.reset(token)
        if _fits(outcomes, operation):
            return outcomes
        return self._invalid_outcomes(function, operation, outcomes)

    async def close(self) -> None:
        reader = self.read_function
        writer = self.write_function
        if reader is not None:
            await reader.close()
        if writer is not None and writer is not reader:
            await writer.close()

    def _invalid_outcomes(
        self, function: TableFunction, operation: Operation[Any], outcomes: object
    ) -> Outcomes:
        """Return outcomes that reject all entries, because the function's own do not fit the
        operation.
        """
        answer = type(outcomes).__name__
        if isinstance(outcomes, Outcomes):
            records: object = outcomes.records
            if isinstance(outcomes.records, Sized):
                records = len(outcomes.records)
            problems = "none"
            if outcomes.problems:
                problems = f"{outcomes.problems!r:.100}"
            answer = (
                f"Outcomes of {outcomes.count} entries (records: {records}, problems: {problems})"
            )
        error = errors.TableError(
            f"{type(function).__name__} answered a {operation.kind.value} of"
            f" {len(operation)} entries with {answer}.",
            "Return Outcomes from send() with one outcome for each entry, and for a get one record"
            " or None; problems are given as {place: Problem(State.REFUSED, error)}.",
            table=self.table,
        )
        return Outcomes.all(len(operation), Problem(State.REFUSED, error, of_request=True))

    def _function(self, operation: Operation[Any]) -> TableFunction:
        """Return the function for an operation; ConfigurationError if there is none, or if it does
        not support the operation's arguments or conditions.
        """
        if operation.kind is OperationKind.GET:
            function = self.read_function
            asked = "asked for records"
            missing = "read"
        else:
            function = self.write_function
            asked = "asked to write"
            missing = "write"
        if function is None:
            problem = f"table {self.table} was {asked} but has no {missing} function."
            raise errors.ConfigurationError(
                problem, f"Declare it with {missing}_function=….", table=self.table
            )
        check_args(function, operation, self.table)
        if operation.conditions:
            check_conditions(self.table, type(function).__name__, function.capabilities, operation)
        return function


def _fits(outcomes: object, operation: Operation[Any]) -> bool:
    """Whether `outcomes` are valid outcomes with one for each entry: an entry without a problem
    would count as done.
    """
    count = len(operation)
    if not isinstance(outcomes, Outcomes) or outcomes.count != count:
        return False
    if not isinstance(outcomes.problems, Mapping):
        return False
    for place, problem in outcomes.problems.items():
        is_index = isinstance(place, int) and 0 <= place < count
        if not is_index or not _is_valid(problem):
            return False
    records = outcomes.records
    needs_no_records = records is None and len(outcomes.problems) == count
    if operation.kind.writes or needs_no_records:
        return True
    return isinstance(records, Sequence) and len(records) == count


def _is_valid(problem: object) -> bool:
    """Whether a problem of a user's function is a `Problem` whose fields have the right types."""
    if not isinstance(problem, Problem) or not isinstance(problem.state, State):
        return False
    if not isinstance(problem.error, BaseException | None):
        return False
    pause = problem.retry_after
    return pause is None or (isinstance(pause, int | float) and 0 <= pause < math.inf)


@validated
class LayerAsFunction(StoreFunction[Any, Any, Any]):
    """A function that passes each operation to `layer`; `capabilities` are those of the function
    below it.

    It gives a single layer the methods of a table, and a `RemoteTable` can use it in place of a
    store's function. A layer's state belongs to its process: for use in tasks, create it there.
    """

    def __init__(self, layer: Layer, capabilities: Capabilities) -> None:
        self._layer = layer
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return await self._layer.send(operation)

    async def close(self) -> None:
        await self._layer.close()

"""Asks the stores of an application's remote tables, and its sinks, before a batch is begun whether
they can do it.

Each is asked once a run, before the intent is committed: a password that is wrong, a server that is
away or a column that was dropped then leaves no batch open, and no output has been written. Nothing
is created or written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.updates import TableSend, Update
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.event_loop import run_blocking
from dagster_adjunct.resources.tables.functions import TableFunction, TableUse
from dagster_adjunct.resources.tables.operation import Conditions, OperationKind
from dagster_adjunct.resources.tables.table import AnyTable
from dagster_adjunct.resources.threads import call_in_threads


def check_stores(app: Application) -> None:
    """Ask each remote table and sink that the application uses; raise the first error, in the order
    of declaration.

    A table that can't be reached is asked again as its retry policy says. A function of a user is
    asked if it has a method `check`.
    """
    asked = [partial(_check_table, used) for used in list_uses(app)]
    for operator in app.operators:
        check = operator.spec.check_target
        if check is not None:
            asked.append(partial(_check_sink, f"{operator.id}: {operator.spec.writes}", check))
    if asked:
        call_in_threads(*asked)


@dataclass(frozen=True, slots=True)
class UsedFunction:
    """A function of a remote table, and for what the application uses it, first in `operator`."""

    operator: str
    table: AnyTable
    function: TableFunction
    use: TableUse


def list_uses(app: Application) -> list[UsedFunction]:
    """The functions of remote tables that can be asked; each function of a table once."""
    uses: dict[tuple[str, int], UsedFunction] = {}
    for operator, name, use in _uses_of_operators(app):
        table = app.tables[name]
        function: Any = table.read_function if use.reads else table.write_function
        if isinstance(function, TableFunction) and type(function).check is not TableFunction.check:
            used = UsedFunction(operator, table, function, replace(use, key=table.key))
            known = uses.setdefault((name, id(function)), used)
            uses[name, id(function)] = replace(known, use=known.use | use)
    return list(uses.values())


def _uses_of_operators(app: Application) -> Iterator[tuple[str, str, TableUse]]:
    for operator in app.operators:
        send = operator.spec.send
        match = operator.spec.match
        if match is not None and match.table is not None:
            yield operator.id, match.table, TableUse(frozenset({OperationKind.GET}))
        if send is not None:
            yield operator.id, send.table, _use_of_send(app.tables[send.table], send)


def _use_of_send(table: AnyTable, send: TableSend) -> TableUse:
    conditions = Conditions(table.newest_by, table.idempotent)
    if send.contract is None:
        return TableUse(frozenset({OperationKind.PUT}), conditions)
    update = send.update or Update()
    kinds = {OperationKind.UPDATE}
    if update.if_missing is not None:
        kinds.add(OperationKind.PUT_IF_ABSENT)
    columns = {*update.columns, *(name for name, _ in update.if_missing or ())}
    return TableUse(frozenset(kinds), conditions, frozenset(columns))


def _check_table(used: UsedFunction) -> None:
    function = used.function
    retry = used.table.retry
    began = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        try:
            run_blocking(_ask(function, used.use, retry.timeout))
        except Exception as error:
            problem = function.problem_of(error, sent=False)
            waited = time.monotonic() - began
            if problem.may_pass and not errors.needs_action(error):
                pause = retry.wait(attempts, waited, problem.retry_after or 0.0)
            else:
                pause = None
            if pause is None:
                raise _table_error(used, error, passing=problem.may_pass) from error
            time.sleep(pause)
        else:
            return


async def _ask(function: TableFunction, use: TableUse, timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            await function.check(use)
    finally:
        await function.close()


def _table_error(used: UsedFunction, error: Exception, *, passing: bool) -> errors.AdjunctError:
    """Return the error for a table that can't be used, of the same class as its store's."""
    table = used.table.name
    step = "No batch was begun or continued: the next run goes on from here."
    if not isinstance(error, errors.AdjunctError):
        kind = errors.TableUnavailableError if passing else errors.TableAccessError
        if isinstance(error, TimeoutError):
            reason = "it did not answer in time"
        else:
            reason = f"{type(error).__name__}: {error}"
        problem = f"{used.operator}: table {table}: {reason.removesuffix('.')}."
        if isinstance(error, OSError) and error.errno in errors.OF_FILES:
            advice = errors.describe_file_error(error, error.filename or "/")[1]
        else:
            advice = "Check its store."
        return kind(problem, f"{advice} {step}", table=table, operator=used.operator)
    problem = f"{used.operator}: {error.problem}"
    next_step = f"{error.next_step} {step}"
    return error.reworded(problem, next_step, table=table, operator=used.operator)


def _check_sink(sink: str, check: Callable[[], object]) -> None:
    try:
        check()
    except errors.AdjunctError:
        raise
    except Exception as error:
        problem = f"{sink} can't be used: {type(error).__name__}: {error}."
        step = "Correct what its check() reports. No batch was begun."
        raise errors.OperatorFailedError(problem, step, operator=sink.partition(":")[0]) from error

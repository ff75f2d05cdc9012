"""What a caller is told by an error of the outcomes of an operation. Pure."""

from __future__ import annotations

import copy
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, RecordNotFoundError, TableError, TableUnavailableError
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes, State

# The first of these that there is says most.
_ORDER = (State.REFUSED, State.UNKNOWN, State.FAILED, State.MISSING)

_SHOWN = 300  # characters of a key


def error_of(table: str, operation: Operation[Any], outcomes: Outcomes) -> AdjunctError | None:
    """The error that names table, operation and keys, with the entry's own error as its cause; None if all is well.

    It is of the class of the entry's error where that is one of ours. Entries that were skipped are well.
    """
    for state in _ORDER:
        places = outcomes.places(state)
        if places:
            break
    else:
        return None
    problem = outcomes.problems[places[0]]
    keys = tuple(dict.fromkeys(operation.entries.keys[place] for place in places))
    if state is State.MISSING and isinstance(problem.error, RecordNotFoundError) and problem.error.table == table:
        return problem.error  # the contract layer says it all
    first = repr(keys[0])
    shown = f"{operation.kind.value} of key {first if len(first) <= _SHOWN else first[:_SHOWN] + '…'}"
    if len(keys) > 1:
        shown += f" and {len(keys) - 1} more"
    cause = problem.error
    if isinstance(cause, AdjunctError):
        error = copy.copy(cause)  # of its class, whatever its constructor asks for
        reason, error.next_step = cause.problem, cause.next_step
    else:
        kind = TableUnavailableError if problem.may_pass else TableError
        error = kind("", "" if problem.may_pass else "Change what the store says is wrong, then send it again.")
        reason = f"{type(cause).__name__}: {cause}" if cause is not None else f"the outcome is {state.value}"
    error.problem = f"table {table}: {shown} failed: {reason}"
    error.args = (f"{error.problem} {error.next_step}" if error.next_step else error.problem,)
    for name, value in (("table", table), ("keys", keys)):
        if hasattr(error, name):
            setattr(error, name, value)
    error.__cause__ = cause
    for note in getattr(cause, "__notes__", ()):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return error

"""What a caller is told by an error of the outcomes of an operation. Pure."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, RecordNotFoundError, TableError, TableUnavailableError
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes, State

# The first of these that there is says most.
_ORDER = (State.REFUSED, State.UNKNOWN, State.FAILED, State.MISSING)

_SHOWN = 300  # characters of a key


def error_of(table: str, operation: Operation[Any], outcomes: Outcomes) -> AdjunctError | None:
    """The error that names table, operation and keys, with the entry's own error as its cause; None if all is well.

    It is of the class of the entry's error where that is one of ours. Entries that failed otherwise are named at its
    end. Entries that were skipped are well.
    """
    failed = [places for state in _ORDER if (places := outcomes.places(state))]
    if not failed:
        return None
    places = failed[0]
    problem = outcomes.problems[places[0]]
    keys = tuple(dict.fromkeys(operation.entries.keys[place] for place in places))
    cause = problem.error
    if problem.state is State.MISSING and isinstance(cause, RecordNotFoundError) and cause.table == table:
        return cause  # the contract layer says it all
    if isinstance(cause, AdjunctError):
        error = copy.copy(cause)  # of its class, whatever its constructor asks for
        error.next_step = cause.next_step
    else:
        kind = TableUnavailableError if problem.may_pass else TableError
        error = kind("", "" if problem.may_pass else "Change what the store says is wrong, then send it again.")
    told = [_told(operation, outcomes, same) for same in failed]
    error.problem = f"table {table}: {' Besides, '.join(told)}"
    error.args = (f"{error.problem} {error.next_step}" if error.next_step else error.problem,)
    for name, value in (("table", table), ("keys", keys)):
        if hasattr(error, name):
            setattr(error, name, value)
    error.__cause__ = cause
    for note in getattr(cause, "__notes__", ()):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return error


def _told(operation: Operation[Any], outcomes: Outcomes, places: Sequence[int]) -> str:
    """What happened to entries of one state: the first key, how many others there are, and the first one's reason."""
    problem = outcomes.problems[places[0]]
    keys = tuple(dict.fromkeys(operation.entries.keys[place] for place in places))
    first = repr(keys[0])
    shown = first if len(first) <= _SHOWN else first[:_SHOWN] + "…"
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    cause = problem.error
    if isinstance(cause, AdjunctError):
        reason = cause.problem
    elif cause is not None:
        reason = f"{type(cause).__name__}: {cause}"
    else:
        reason = f"the outcome is {problem.state.value}"
    end = "" if reason.endswith((".", "!", "?", "…")) else "."
    return f"{operation.kind.value} of key {shown}{more} failed: {reason}{end}"

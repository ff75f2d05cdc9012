"""What errors say of updates that met no record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_adjunct.resources.errors import RecordNotFoundError, TableError
from dagster_adjunct.resources.tables.error_chain import causes, first_cause
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State


def outcomes_of_missing(
    operation: Operation[Any], error: BaseException, problem_of: Callable[[BaseException], Problem]
) -> Outcomes | None:
    """What an error says of updates where missing records are among its causes; None where none are.

    The entries of the keys that its RecordNotFoundErrors name are missing. The others are done, or, where the error is
    a group with others in it, have the first of those as their problem.
    """
    told = [cause for cause in causes(error) if isinstance(cause, RecordNotFoundError)]
    if operation.kind is not OperationKind.UPDATE or not told:
        return None
    count, missing = len(operation), Problem(State.MISSING, error)
    if count == 1:
        return Outcomes.all(1, missing)
    lacking, wrong = _keys_told(told, operation.entries.keys)
    if wrong:
        untold = TableError(
            f"RecordNotFoundError was raised for {count} entries {wrong}.",
            "Give the error the keys without a record, of those asked for: RecordNotFoundError(…, keys=[…]).",
        )
        untold.__cause__ = error
        return Outcomes.all(count, Problem(State.REFUSED, untold, of_request=True))
    other = _other_than_missing(error)
    others = None if other is None else problem_of(other)
    problems: dict[int, Problem] = {}
    for place, key in enumerate(operation.entries.keys):
        if key in lacking:
            problems[place] = missing
        elif others is not None:
            problems[place] = others
    return Outcomes(count, problems=problems)


def _keys_told(told: Sequence[RecordNotFoundError], asked: Sequence[Any]) -> tuple[set[Any], str]:
    """The keys without a record that errors name, and what is wrong with these; "" where nothing is."""
    if any(isinstance(cause.keys, str | bytes) for cause in told):
        return set(), f"with the keys {told[0].keys!r:.60}, which is one text"
    try:
        lacking = {key for cause in told for key in cause.keys}
    except TypeError as error:
        return set(), f"with what are no keys: {error}"
    others = sorted(map(repr, lacking - set(asked)))
    if others:
        return set(), f"with keys that were not asked for: {', '.join(others[:3])}{', …' if len(others) > 3 else ''}"
    return lacking, "" if lacking else "without the keys that have no record"


def _other_than_missing(error: BaseException) -> BaseException | None:
    """The first member of a group, at any depth, that has no missing record among its causes."""
    for cause in causes(error):
        if isinstance(cause, BaseExceptionGroup):
            for member in cause.exceptions:
                if first_cause(member, RecordNotFoundError) is None:
                    return member
    return None


def record_not_found(keys: Sequence[object], table: str = "the table") -> RecordNotFoundError:
    """The error for updates that met no record, naming the first few of `keys`."""
    shown = ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    many = len(keys) > 1
    return RecordNotFoundError(
        f"{table} has no record to update for {len(keys)} key{'s' if many else ''}: {shown}.",
        "Put the record first, or send an UpdateMessage with a default under UPDATE_WITH_DEFAULTS.",
        keys=tuple(keys),
    )

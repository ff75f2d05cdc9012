"""Which problems are about what is in a record, and which may be everybody's. Pure."""

from __future__ import annotations

from dagster_adjunct.resources.errors import ConfigurationError, PermanentError, TableAccessError
from dagster_adjunct.resources.tables.outcomes import Problem, State


def is_of_the_record(problem: Problem) -> bool:
    """Whether an entry was refused for what is in it, as far as its error says: then it may become a dead letter.

    Of other errors nobody knows that they are not the next record's as well: a store that is out of reach, a login that
    is refused, a mistake in a function. They fail a batch, which is run again when that is mended.
    """
    if problem.state is State.MISSING:
        return True
    return problem.state is State.REFUSED and not problem.of_request and _is_of_data(problem.error)


def comes_again(problem: Problem) -> bool:
    """Whether an entry is to be sent again, now or when its batch is run again: what it holds has not been refused."""
    return problem.state is not State.SKIPPED and not is_of_the_record(problem)


def _is_of_data(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_of_data, error.exceptions))
    if isinstance(error, ConfigurationError | TableAccessError):
        return False
    return isinstance(error, PermanentError | ValueError | TypeError | ArithmeticError)

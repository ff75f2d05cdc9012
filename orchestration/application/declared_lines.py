"""Adds the line of user code to errors about what an application declares."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dagster_adjunct.resources.code_lines import CodeLine, find_calling_line
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, PlanningError

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def locate_errors(cls: C) -> C:
    """Return the class, whose public methods now raise PlanningError with the user's line that
    calls them as `declared_at`.
    """
    for name, member in list(vars(cls).items()):
        if isinstance(member, types.FunctionType) and not name.startswith("_"):
            setattr(cls, name, _located(member))
    return cls


def _located(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method whose PlanningErrors have the user's line that calls it."""

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return method(*args, **options)
        except PlanningError as error:
            line = find_calling_line()
            if line is None or error.declared_at is not None:
                raise
            raise with_line(error, line) from error.__cause__

    return call


def with_line(error: AdjunctError, line: CodeLine) -> AdjunctError:
    """Return an error of a declaration with the line of user code that makes the declaration; the
    error itself if it has a line.
    """
    if error.facts.get("declared_at") is not None:
        return error
    if isinstance(error, PlanningError | ConfigurationError):
        return error.with_problem(error.problem, declared_at=str(line))
    return error.with_problem(f"{line}: {error.problem}")

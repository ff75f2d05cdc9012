"""Errors of arguments: what pydantic found in a call, as one ConfigurationError.

The error names the function, the argument, what was found, what was expected and the next step.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dagster_adjunct.resources.code_lines import find_calling_line
from dagster_adjunct.resources.errors import ConfigurationError

# The types of our own errors among those of pydantic. Their context has `expected`, in words.
WRONG_TYPE: Final = "wrong_type"
TEXT_FOR_LIST: Final = "text_for_list"

# Functions that validate their arguments, in which an unknown argument may belong to another one.
validated_functions: list[Callable[..., Any]] = []

# how similar a name must be to be taken for a misspelling: "validators" is none of "valid_from"
_CLOSE = 0.75
_SHOWN_CHARACTERS = 80
# An argument or key of which no value is shown. Names of environment variables are no secrets.
_SECRET = re.compile(r"(?!.*_env$).*(password|secret|token|credentials|\bdsn\b)", re.IGNORECASE)
_CONVERSIONS = {"LazyFrame": "collect", "Series": "to_frame"}  # methods that return a frame
_LIMITS = ("greater_than", "less_than")  # as the types of pydantic's errors begin


@dataclass(frozen=True, slots=True)
class RejectedCall:
    """A call with wrong arguments: what was called, the names that it takes, and what was given.

    `positional` are the names that may be given by position, `known` those that may be given by
    name.
    """

    called: str
    positional: Sequence[str]
    known: Sequence[str]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What was called, with the name that it was given: `bounded_dataset('prices')`."""
        by_position = dict(zip(self.positional, self.args, strict=False))
        name = self.kwargs.get("name", by_position.get("name"))
        if isinstance(name, str):
            return f"{self.called}({name!r})"
        return self.called

    def argument(self, problem: ErrorDetails) -> str:
        """Return the name of the argument that a problem is about; empty for several together."""
        if not problem["loc"]:
            return ""
        place = problem["loc"][0]
        if isinstance(place, str):
            return place
        return self.positional[min(place, len(self.positional) - 1)]  # `*args` is the last one

    def is_inside(self, problem: ErrorDetails) -> bool:
        """Return whether only a part of the argument is wrong, such as an element of a list; False
        for several arguments together.
        """
        if not problem["loc"]:
            return False
        place = problem["loc"][0]
        given = self.kwargs.get(place) if isinstance(place, str) else self.args[place]
        return problem["input"] is not given


def argument_error(call: RejectedCall, error: ValidationError) -> ConfigurationError:
    """Return the error for the worst problem that pydantic found.

    An unknown argument is worst, then too many by position, missing ones, and a wrong value.
    """
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            return unexpected_error(call.label, call.argument(problem), call.known)
    missing = []
    for problem in problems:
        if problem["type"] == "unexpected_positional_argument":
            return too_many_error(call)
        if problem["type"].startswith("missing"):
            missing.append(call.argument(problem))
    if missing:
        return located_error(f"{call.label} lacks {_keywords(missing)}.", argument=missing[0])
    return _value_error(call, problems)


def unexpected_error(label: str, argument: str, known: Sequence[str]) -> ConfigurationError:
    """Return the error of an argument that a function doesn't take.

    The next step names the functions that take it, else a similar argument, else all of `known`.
    """
    others = _functions_that_take(argument, label.partition("(")[0])
    near = _nearest_argument(argument, known)
    if others:
        taken_by = " and of ".join(others)
        step = f"It is an argument of {taken_by}: use that, or leave {argument}= out."
    elif near is not None:
        step = f"Did you mean {near}=?"
    else:
        step = f"{label} takes {_keywords(known) or 'nothing'}."
    return located_error(f"{label} takes no {argument}=.", step, argument=argument)


def _functions_that_take(argument: str, called: str) -> list[str]:
    """Return the functions of the same module as the function `called` that take this argument."""
    modules = set()
    for each in validated_functions:
        if each.__name__ == called:
            modules.add(each.__module__)
    takers = []
    for function in validated_functions:
        if function.__module__ in modules and argument in inspect.signature(function).parameters:
            takers.append(function.__name__)
    return takers


def _nearest_argument(argument: str, known: Sequence[str]) -> str | None:
    """Return the argument for which this one may be a misspelling, None if there is none."""
    for near in difflib.get_close_matches(argument, known, n=1):
        is_longer = near.startswith(f"{argument}_") or argument.startswith(f"{near}_")
        if is_longer or difflib.SequenceMatcher(None, near, argument).ratio() >= _CLOSE:
            return near
    return None


def too_many_error(call: RejectedCall) -> ConfigurationError:
    """Return the error of a call with more arguments by position than are taken so."""
    by_position = [name for name in call.positional if name in call.known]
    by_name = [name for name in call.known if name not in by_position]
    not_counted = len(call.positional) - len(by_position)  # `self` or `cls`, also among the args
    given = len(call.args) - not_counted
    problem = (
        f"{call.label} takes {len(by_position)} arguments by position"
        f" ({', '.join(by_position) or 'none'}), and {given} are given."
    )
    if by_name:
        step = f"Name the others: {_keywords(by_name)}."
    else:
        step = "Leave the others out."
    return located_error(problem, step)


def _keywords(names: Sequence[str]) -> str:
    """Return names as they are written in a call: "name=, key="."""
    return ", ".join(f"{name}=" for name in names)


def _value_error(call: RejectedCall, problems: Sequence[ErrorDetails]) -> ConfigurationError:
    """Return the error for a wrong value, of the first argument with a problem."""
    argument = call.argument(problems[0])
    if not argument:  # the values don't fit together; they are not shown, some may be secret
        text = problems[0]["msg"].removeprefix("Value error, ")
        return located_error(f"{call.label}: {text}.")
    own = [problem for problem in problems if call.argument(problem) == argument]
    useful = _most_useful(call, own)
    value = useful[0]["input"]
    shown = "***" if _is_secret(argument, useful[0]) else _shorten(value)
    kind = ""
    if value is not None:
        kind = f" ({type(value).__name__})"
    verb = "is"
    if call.is_inside(useful[0]):
        verb = "has"
    expected = " or ".join(dict.fromkeys(map(_expected, useful)))
    problem = f"{call.label}: {argument} {verb} {shown}{kind}: expected {expected}."
    return located_error(problem, _next_step(useful, shown), argument=argument)


def _is_secret(argument: str, problem: ErrorDetails) -> bool:
    """Whether the value that a problem is about must not be shown."""
    names = [argument, *map(str, problem["loc"])]
    return any(_SECRET.match(name) for name in names)


def _most_useful(call: RejectedCall, own: Sequence[ErrorDetails]) -> Sequence[ErrorDetails]:
    """Return those of an argument's problems, one for each alternative of its type, that say most.

    They are those about a value that can be converted; if there are none, about a text that UTF-8
    can't hold; else about an element only; else all.
    """
    convertible = []
    for problem in own:
        if type(problem["input"]).__name__ in _CONVERSIONS:
            convertible.append(problem)
    inside = [problem for problem in own if call.is_inside(problem)]
    not_text = []
    for problem in own:
        if problem["type"] == "string_unicode":
            not_text.append(problem)
    return convertible or not_text or inside or own


def _expected(problem: ErrorDetails) -> str:
    """Return what was expected of a value, in words."""
    if problem["type"] == "string_unicode":
        return "whole characters, which UTF-8 can hold"
    text = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if problem["type"].startswith(_LIMITS):
        return f"a value {text}"
    return text


def _next_step(problems: Sequence[ErrorDetails], shown: str) -> str:
    """Return how to pass what was probably meant, "" if that is not known."""
    value = problems[0]["input"]
    kind = type(value).__name__
    if kind in _CONVERSIONS:
        return f"Pass the result of its {_CONVERSIONS[kind]}()."
    if isinstance(value, str) and any(map(_is_for_lake, problems)):
        return f"Pass open_lake({shown})."
    if TEXT_FOR_LIST in [problem["type"] for problem in problems]:
        return f"Put it into a list: [{shown}]."
    if isinstance(value, type):
        return f"Pass an object of it: {value.__name__}(…)."
    return ""


def _is_for_lake(problem: ErrorDetails) -> bool:
    """Whether a problem is that a Lake was expected."""
    return problem.get("ctx", {}).get("class") == "Lake"


def _shorten(value: object) -> str:
    """Return a value as Python writes it, in one line."""
    text = str(value) if isinstance(value, timedelta) else repr(value)
    shown = " ".join(text.split())
    if len(shown) <= _SHOWN_CHARACTERS:
        return shown
    return f"{shown[: _SHOWN_CHARACTERS - 3]}..."


def located_error(
    problem: str, next_step: str = "", *, argument: str | None = None
) -> ConfigurationError:
    """Return a ConfigurationError that begins with the line of user code that made the call."""
    line = find_calling_line()
    declared_at = None if line is None else str(line)
    return ConfigurationError(problem, next_step, argument=argument, declared_at=declared_at)

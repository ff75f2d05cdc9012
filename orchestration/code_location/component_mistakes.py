"""Mistakes in the keys and values of YAML: what pydantic found, as one problem and one step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dagster_adjunct.orchestration.code_location.component_forms import UNKNOWN_KEY, Attributes

Place = tuple[str | int, ...]
"""The path to a value, such as ("attributes", "tables", "rates")."""

WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with the value at a place, and what to do."""

    place: Place
    problem: str
    next_step: str


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def find_mistake(given: Any, line_of: Callable[[Place], int]) -> Mistake | None:
    """Return the mistake in the attributes that comes first in the file, None if their keys and
    values are right.
    """
    try:
        Attributes.model_validate(given)
    except ValidationError as error:
        found: dict[Place, list[ErrorDetails]] = {}
        for problem in error.errors(include_url=False):
            found.setdefault(_place_of(problem, given), []).append(problem)
        # An alternative of which only an element is wrong says more than those that are wrong as a
        # whole.
        whole = {place[:length] for place in found for length in range(len(place))}
        first = min((place for place in found if place not in whole), key=line_of)
        return _describe_mistake(("attributes", *first), found[first])
    return None


def _place_of(problem: ErrorDetails, given: Any) -> Place:
    """Return the path to what the problem is about, without the names of alternatives in it."""
    place: list[str | int] = []
    value = given
    for at in problem["loc"]:
        is_key = isinstance(value, Mapping) and at in value
        if is_key or (isinstance(value, list) and isinstance(at, int)):
            value = value[at]
            place.append(at)
    if problem["type"] == UNKNOWN_KEY:
        place.append(problem["ctx"]["key"])
    return tuple(place)


def _describe_mistake(place: Place, problems: Sequence[ErrorDetails]) -> Mistake:
    first = problems[0]
    if first["type"] == UNKNOWN_KEY:
        key = str(first["ctx"]["key"])
        known = first["ctx"]["known"]
        near = difflib.get_close_matches(key, known, n=1)
        step = f"Did you mean {near[0]}?" if near else f"Give one of {', '.join(known)}."
        return Mistake(place, f"{place[-2]} takes no {key!r}.", step)
    if missing := [str(problem["loc"][-1]) for problem in problems if problem["type"] == "missing"]:
        return Mistake(place, f"{place[-1]} lacks {', '.join(missing)}.", f"Add {missing[0]}: …")
    value = first["input"]
    expected = " or ".join(dict.fromkeys(map(_expected, problems)))
    what = f"item {place[-1] + 1} of {place[-2]}" if isinstance(place[-1], int) else place[-1]
    found = "is empty" if value is None or value in ({}, []) else f"is {written_in_yaml(value)}"
    return Mistake(place, f"{what} {found}: expected {expected}.", _next_step(value, expected))


def _expected(problem: ErrorDetails) -> str:
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    return _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))


def written_in_yaml(value: Any) -> str:
    """Return a value as it would be written in YAML, in one line."""
    try:
        text = str(
            yaml.safe_dump(
                value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1_000_000
            )
        )
    except yaml.YAMLError:  # such as a set, whose items Dagster has wrapped
        return f"a {type(value).__name__}"
    text = text.removesuffix("\n").removesuffix("\n...")
    text = f"'{text}'" if isinstance(value, str) and not text.startswith(("'", '"')) else text
    return text if len(text) <= 80 else f"{text[:77]}..."


def _next_step(value: Any, expected: str) -> str:
    if value is None:
        return "Give a value, or remove the key."
    meant = _find_meant(value, expected)
    return f"Give {expected}." if meant is None else meant


def _find_meant(value: Any, expected: str) -> str | None:
    """Return how to write what was probably meant."""
    if isinstance(value, str):
        return _find_meant_by_text(value, expected)
    if isinstance(value, int | float) and "a text" in expected:
        return f"Write it in quotes: '{written_in_yaml(value)}'."
    if isinstance(value, float) and value.is_integer() and "a whole number" in expected:
        return f"Write {int(value)}."
    return None


def _find_meant_by_text(text: str, expected: str) -> str | None:
    if "number" in expected and re.fullmatch(WHOLE_NUMBER, text):
        return f"Write {text} without quotes."
    if "true or false" in expected and text.lower() in ("true", "false"):
        return f"Write {text.lower()} without quotes."
    return None

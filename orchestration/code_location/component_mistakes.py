"""Mistakes in the keys and values of a component: what pydantic found, as one problem and one
step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dagster_adjunct.orchestration.code_location.component_forms import (
    NO_DURATION,
    STEPS,
    UNKNOWN_KEY,
    ApplicationForm,
    Attributes,
    Step,
    keys_of,
    signature_of,
)
from dagster_adjunct.orchestration.code_location.component_source import (
    WHOLE_NUMBER,
    Mistake,
    Place,
    Position,
    Source,
    written_in_yaml,
)
from dagster_adjunct.resources.errors import AdjunctError, ComponentError

_ON = re.compile(r"\bon=")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANT = re.compile(rf"\b(\w+)=({'|'.join(_CONSTANTS)})\b")
_PARTITION_BY = re.compile(r"\.partition_by\(([^()]*)\)")
_KINDS = {
    NO_DURATION: "a text such as 30s, 5m, 2h, 7d or 1w",
    "too_short": "at least one",
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


def find_mistake(given: Any, position_of: Callable[[Place], Position]) -> Mistake | None:
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
        inner = [place for place in found if place not in whole]
        first = min(inner, key=lambda place: position_of(("attributes", *place)))
        return _describe_mistake(("attributes", *first), found[first], {"attributes": given})
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


def _describe_mistake(place: Place, problems: Sequence[ErrorDetails], document: Any) -> Mistake:
    """Return the mistake at a place, of which pydantic found these problems."""
    first = problems[0]
    if first["type"] == UNKNOWN_KEY:
        return _describe_unknown_key(place, first["ctx"]["known"], document)
    what = name_of(place, document)
    if missing := [str(problem["loc"][-1]) for problem in problems if problem["type"] == "missing"]:
        return Mistake(place, f"{what} lacks {', '.join(missing)}.", f"Add {missing[0]}: …")
    value = first["input"]
    expected = " or ".join(dict.fromkeys(map(_expected, problems)))
    is_empty = value is None or value in ({}, [])
    found = "is empty" if is_empty else f"is {written_in_yaml(value)}"
    return Mistake(place, f"{what} {found}: expected {expected}.", _next_step(value, expected))


def name_of(place: Place, document: Any) -> str:
    """Return the name by which people know the value at a place: its key, of an item its number
    from 1, of a step its `as`, its operator, or what is written there.
    """
    last = place[-1]
    if isinstance(last, str):
        return last
    if place[-2] != "steps":
        return f"item {last + 1} of {name_of(place[:-1], document)}"
    step = value_at(place, document)
    if not isinstance(step, Mapping):
        return f"item {last + 1} of steps"
    if isinstance(step.get("as"), str):
        return f"step {step['as']!r}"
    operators = [key for key in step if key in STEPS]
    return f"step {operators[0] if operators else written_in_yaml(step)}"


def value_at(place: Place, document: Any) -> Any:
    """Return the value at a place of a document."""
    for key in place:
        document = document[key]
    return document


def _describe_unknown_key(place: Place, known: Sequence[str], document: Any) -> Mistake:
    """Return the mistake of a key that nothing takes there: a misspelled one, one of another depth,
    or neither.
    """
    key = str(place[-1])
    problem = f"{name_of(place[:-1], document)} takes no {key!r}."
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return Mistake(place, problem, f"Did you mean {near[0]}?")
    owner = _find_owner(key, value_at(place[:-1], document))
    if owner is not None:
        return Mistake(place, problem, f"Indent it, or move it, below {owner}, which takes it.")
    return Mistake(place, problem, f"Give one of {', '.join(known)}.")


def _find_owner(key: str, beside: Mapping[str, Any]) -> str | None:
    """Return what takes a key that is given at another depth: an operator beside it, or a part of
    the file.
    """
    for operator in beside:
        if operator in STEPS and signature_of(STEPS[operator]).by_key(key) is not None:
            return operator
    forms: dict[str, type[BaseModel]] = {
        "attributes": Attributes,
        "an application": ApplicationForm,
        "one of steps": Step,
    }
    for owner, form in forms.items():
        if key in keys_of(form):
            return owner
    return None


def _expected(problem: ErrorDetails) -> str:
    """Return what was expected in the place of a wrong value, such as "a whole number"."""
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"]).replace("True", "true")
    return _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))


def _next_step(value: Any, expected: str) -> str:
    """Return how to mend a wrong value."""
    if value is None:
        return "Give a value, or remove the key."
    meant = _find_meant(value, expected)
    return f"Give {expected}." if meant is None else meant


def _find_meant(value: Any, expected: str) -> str | None:
    """Return how to write what was probably meant; None if that is not known."""
    if isinstance(value, str):
        return _find_meant_by_text(value, expected)
    if isinstance(value, bytes | date):  # of a tag
        return "Leave the tag out."
    if isinstance(value, int | float) and expected == _KINDS[NO_DURATION]:
        return f"Add the unit, as in {value}m or {value}h: '{value}' alone is no duration."
    if isinstance(value, int | float) and "a text" in expected:
        return f"Write it in quotes: '{written_in_yaml(value)}'."
    if isinstance(value, float) and value.is_integer() and "a whole number" in expected:
        return f"Write {int(value)}."
    return None


def _find_meant_by_text(text: str, expected: str) -> str | None:
    """Return how to write what was probably meant by a text; None if that is not known."""
    if "{{" in text:
        return f"Write {expected}: templates are for texts."
    if "number" in expected and re.fullmatch(WHOLE_NUMBER, text):
        return f"Write {text} without quotes."
    if "true or false" in expected and text.lower() in ("true", "false"):
        return f"Write {text.lower()} without quotes."
    return None


def component_error(source: Source, mistake: Mistake, **facts: Any) -> ComponentError:
    """Return the error for a mistake in a component: it begins with file, line and column, and
    ends with the lines there.
    """
    line = source.code_line(mistake.place)
    if line is None:
        return ComponentError(mistake.problem, mistake.next_step, **facts)
    path = ".".join(str(key)[:100] for key in mistake.place)
    where = source.describe_position(mistake.place)
    problem = f"{where}{path}: {mistake.problem}\n{source.show(mistake.place)}"
    facts |= {"file": line.file, "line": line.line}
    return ComponentError(problem, mistake.next_step, **facts)


def with_keys(text: str) -> str:
    """Return a text for people with calls of the Python API as they are written in YAML."""
    text = _CONSTANT.sub(lambda match: f"{match[1]}: {_CONSTANTS[match[2]]}", _ON.sub("by=", text))
    return _PARTITION_BY.sub(
        lambda match: f"`- partition_by: [{match[1].replace(chr(34), '')}]`", text
    )


def facts_of(error: AdjunctError) -> dict[str, Any]:
    """Return the fields of an error that a ComponentError has too."""
    fields = ComponentError.__dataclass_fields__
    return {name: value for name, value in error.facts.items() if name in fields}

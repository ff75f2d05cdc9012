"""Mistakes in the keys and values of a component: what pydantic found, as one problem and one
step.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.code_location.component_forms import (
    KEYS,
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
    write_flow,
    written_in_yaml,
)
from dagster_adjunct.resources.errors import AdjunctError, ComponentError
from dagster_adjunct.resources.schemas.paths import split_alias
from dagster_adjunct.resources.tables.table import RemoteTable

# Parts of a text about the Python API. What is quoted, which may be a user's SQL, stays.
# What is not written in YAML, such as LakeStreams(lake).create(…), stays too.
_ARGUMENTS = r"""(?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*")*\))*"""
_DECLARED_BY: tuple[Callable[..., Any], ...] = (
    *STEPS.values(),
    Application,
    Application.output_stream,
    Application.local_table,
    RemoteTable,
    bounded_dataset,
    unbounded_dataset,
)
_KEYS = sorted({name for each in _DECLARED_BY for name in signature_of(each).names()})
_IN_PYTHON = re.compile(
    rf"""
    (?<!\w)'[^'\n]*'(?!\w)
    | \b[A-Z]\w*\({_ARGUMENTS}\)\.\w+\({_ARGUMENTS}\)
    | (?: [a-z]*\. | \b(?=partition_by\() ) (?P<step>{"|".join(STEPS)})
      \((?P<arguments>{_ARGUMENTS})\)
    | \b(?P<function>{"|".join(STEPS)}|output_stream|local_table)\(\)
    | (?<![\w.])(?P<key>{"|".join(_KEYS)})=
      (?P<value> \{{[^{{}}]*\}} | \[[^\[\]]*\] | timedelta\(\w+=[^()]*\) | … | \w+(?:\.\w+)*
        | (?=["']) )?
    """,
    re.VERBOSE,
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
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
        # Of a union, pydantic reports a problem for each alternative. The alternative of which only
        # a value inside is wrong was probably meant, so problems of what is around it are left out.
        around = {place[:length] for place in found for length in range(len(place))}
        innermost = [place for place in found if place not in around]
        first = min(innermost, key=lambda place: position_of(("attributes", *place)))
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
    """Return the name by which people know the value at a place: its key, or for an item of a list
    its number from 1. A step is named by its `as`, else by its operator, else by what is written.
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
    """Return what takes a key that is given at another depth: an operator `beside` it, or a part of
    the file; None if nothing takes it.
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


def find_name(name: str, place: Place, document: Any) -> Place | None:
    """Return where the arguments at a place name a column or path, with or without "as"; None if
    they do not.

    It may be the value of an argument, an item of a list, or a key or value of a mapping.
    """
    try:
        given = value_at(place, document)
    except (KeyError, IndexError, TypeError):
        return None
    for key, value in _items(given):
        if _means(value, name):
            return (*place, key)
        for at, item in _items(value):
            if at == name or _means(item, name):
                return (*place, key, at)
    return None


def _items(value: Any) -> Sequence[tuple[str | int, Any]]:
    """Return the items of a list or mapping with their numbers or keys; none of another value."""
    if isinstance(value, Mapping):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, list) else []


def _means(value: Any, name: str) -> bool:
    """Return whether a value is a name, or one with "as"."""
    return isinstance(value, str) and name in (value, split_alias(value)[0])


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
    return _IN_PYTHON.sub(_write_in_yaml, text)


def _write_in_yaml(match: re.Match[str]) -> str:
    """Return a part of a text about the Python API as it is written in YAML: the call of a step
    with arguments, the name of a function with empty parentheses, or an argument with its value.
    """
    if match["step"] is not None:
        return f"`- {match['step']}: {_write_arguments(match['step'], match['arguments'])}`"
    if match["function"] is not None:
        return match["function"]
    if match["key"] is None:  # in quotes, or not written in YAML
        return match[0]
    key = KEYS.get(match["key"], match["key"])
    value: str | None = match["value"]
    if value is None:
        return key
    if not value:  # a text in quotes follows
        return f"{key}: "
    if value.startswith("timedelta"):
        unit, _, number = value.removeprefix("timedelta(").removesuffix(")").partition("=")
        return f"{key}: {number}{unit[0]}"
    return f"{key}: {_CONSTANTS.get(value) or _write_value(value)}"


def _write_arguments(step: str, text: str) -> str:
    """Return the arguments of a step's call in YAML: a list, or a mapping if one is given by name;
    the text itself if not all of them are literals.
    """
    try:
        call = ast.parse(f"step({_with_quoted_dots(text)})", mode="eval").body
        given = [ast.literal_eval(each) for each in call.args]  # type: ignore[attr-defined]
        named = {
            each.arg: ast.literal_eval(each.value)
            for each in call.keywords  # type: ignore[attr-defined]
        }
    except (SyntaxError, ValueError):
        return text
    if not named:
        return write_flow(given) if text != "…" else text  # "…" stands for any arguments
    arguments = signature_of(STEPS[step]).arguments
    by_name: dict[str, Any] = {}
    if given and arguments[0].is_starred:
        by_name[arguments[0].key] = given
    else:
        by_name |= {each.key: value for each, value in zip(arguments, given, strict=False)}
    for name, value in named.items():
        by_name[KEYS.get(name or "", name)] = value
    return write_flow(by_name)


def _write_value(text: str) -> str:
    """Return a value of a text about Python in YAML; any but a list or mapping is unchanged."""
    if text[0] not in "{[":
        return text
    try:
        return write_flow(ast.literal_eval(_with_quoted_dots(text)))
    except (SyntaxError, ValueError):  # such as {stream column: 'k'}
        return text.replace("'", "")


def _with_quoted_dots(text: str) -> str:
    """Return a text of Python in which each … is a string, so that it can be parsed."""
    return re.sub(r'(?<![\w"])…', '"…"', text)


def facts_of(error: AdjunctError) -> dict[str, Any]:
    """Return the fields of an error that a ComponentError has too."""
    fields = ComponentError.__dataclass_fields__
    return {name: value for name, value in error.facts.items() if name in fields}

"""The YAML forms that are made of the API's signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.code_location.component_forms import (
    form_of,
    signature_of,
    step_form,
)
from dagster_adjunct.orchestration.code_location.component_source import ATTRIBUTES, Source
from dagster_adjunct.orchestration.code_location.component_translation import Translation
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.validation import validated


class _Side(Enum):
    LEFT = 1
    RIGHT = 2


@pytest.mark.parametrize(
    ("hint", "written", "rejected"),
    [
        (int, 5, "5"),
        (Annotated[int, Field(gt=0)] | None, None, "5"),
        (timedelta | str, "5m", 5),
        (_Side, "left", "LEFT"),
        (Literal["a", "b"], "a", "c"),
        (MessageStream, "orders", 5),
        (Schema, {"k": "string"}, {"k": 5}),
        (Sequence[str], ["a"], "a"),
        (tuple[MessageStream, ...], ["orders"], [5]),
        (Mapping[str, timedelta], {"a": "5m"}, {"a": 5}),
        (_Side | str | Sequence[int], [1], ["1"]),
        (object, {"any": ["thing"]}, None),
        (ValueError, {"ValueError": {}}, "ValueError"),
    ],
)
def test_a_type_has_one_form_in_yaml(hint: Any, written: Any, rejected: Any) -> None:
    adapter = TypeAdapter(form_of(hint).yaml_type, config={"strict": True})
    assert adapter.validate_python(written) == written
    if hint is not object:
        with pytest.raises(ValidationError):
            adapter.validate_python(rejected)


class _Options(TypedDict, total=False):
    owner: str


def test_a_signature_lists_arguments_options_and_what_is_required() -> None:
    @validated
    def operator(
        on: str, *columns: str, grace: timedelta = timedelta(0), **more: Unpack[_Options]
    ) -> None:
        """Do nothing."""

    signature = signature_of(operator)
    assert [(each.key, each.is_required, each.is_starred) for each in signature.arguments] == [
        ("by", True, False),
        ("columns", False, True),
        ("grace", False, False),
        ("owner", False, False),
    ]
    assert not signature.takes_any_name
    assert signature_of(Schema.of).takes_any_name


def _sample(fraction: float, seed: int | None = None) -> tuple[float, int | None]:
    return fraction, seed


def _deduplicate(exactly: bool) -> bool:
    return exactly


def _expire(after: timedelta) -> timedelta:
    return after


def _top(*counts: int) -> tuple[int, ...]:
    return counts


def _project(columns: Sequence[str]) -> Sequence[str]:
    return columns


@pytest.mark.parametrize(
    ("operator", "alone", "result", "rejected"),
    [
        (_sample, 0.5, (0.5, None), "0.5"),
        (_sample, 1, (1, None), True),
        (_deduplicate, False, False, "no"),
        (_expire, "5m", timedelta(minutes=5), 5),
        (_top, 3, (3,), "3"),
        (_top, [3, 5], (3, 5), ["3"]),
        (_project, ["a", "b"], ["a", "b"], "a"),
    ],
)
def test_the_first_argument_stands_alone_whatever_its_type(
    operator: Any, alone: Any, result: Any, rejected: Any
) -> None:
    adapter = TypeAdapter(step_form("step", operator), config={"strict": True})
    adapter.validate_python(alone)
    assert Translation(Source()).call(operator, alone, ATTRIBUTES) == result
    with pytest.raises(ValidationError):
        adapter.validate_python(rejected)

"""Functions of users: which are refused before they are called, and what is told of one that
failed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.user_code import check_plain_function, function_failed_error


def with_a_connection(function: Callable[[Any, object], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def given(record: Any) -> Any:
        return function(record, object())

    return given


@with_a_connection
def decorated(record: Any, connection: object) -> Any:
    return record


class Called:
    def __call__(self, record: Any) -> Any:
        return record

    def method(self, record: Any) -> Any:
        return record


def numbers(record: dict[str, str]) -> Iterator[int]:
    return map(int, record["text"])


@pytest.mark.parametrize(
    "function",
    [
        decorated,
        Called(),
        Called().method,
        functools.partial(lambda first, record: record, 1),
        lambda record, more=1: record,
        lambda *records: records,
        operator.itemgetter("k"),
        dict,  # tells no signature
        Mock(),
    ],
)
def test_what_can_be_called_with_a_record_passes(function: Callable[..., Any]) -> None:
    check_plain_function("flat_map", function, "function", "record")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda: [1],
            r"flat_map calls <lambda>\(\) with \(record\), but its parameters are \(\): too many",
        ),
        (lambda record, more: [], "parameters are .*: missing a required argument: 'more'"),
        (lambda *, record: [], "parameters are .*: too many positional arguments"),
        (Called.method, r"calls method\(\) with \(record\), .*missing a required argument"),
        (functools.partial(Called().method, 1), r"calls method\(\) with \(record\)"),
    ],
)
def test_what_takes_other_values_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_plain_function("flat_map", function, "function", "record")
    assert caught.value.argument == "function"


def test_where_none_of_the_function_s_lines_failed_its_own_is_reported() -> None:
    """It returned what fails later: no line of it is in the traceback."""
    lines = Path(__file__).read_text().splitlines()
    defined = next(number for number, line in enumerate(lines, 1) if line.startswith("def numbers"))
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(numbers({"text": "1x"}))
    error = caught.value.with_traceback(None)
    for function in (numbers, functools.partial(numbers)):
        reported = function_failed_error("flat-map-2", "numbers()", function, error)
        assert (reported.file, reported.line) == (__file__, defined)
    assert function_failed_error("flat-map-2", "loads()", dict, error).line is None
